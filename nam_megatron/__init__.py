"""From a Hydra recipe of a hybrid language model to exactly what Megatron-Core must be told."""

import sys
from types import TracebackType

if sys.argv[:1] == ["-m"]:
    # `python -m nam_megatron...` imports for seconds before a command can catch anything: a Ctrl-C in there is no traceback either.
    _told = sys.excepthook

    def _interrupted(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        if kind is KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
        else:
            _told(kind, err, trace)

    sys.excepthook = _interrupted

__version__ = "0.1.0"
