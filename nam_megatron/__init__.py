"""From a Hydra recipe of a hybrid language model to exactly what Megatron-Core must be told."""

import os
import sys
from types import TracebackType

if sys.argv[:1] == ["-m"]:
    # `python -m nam_megatron...` imports for seconds before a command can catch anything: a Ctrl-C in there is no traceback either.
    _told = sys.excepthook

    def _interrupted(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        cause: BaseException | None = err
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__  # a library may make another error of it
        if cause is None:
            _told(kind, err, trace)
            return
        sys.stderr.write("interrupted\n")
        if cause is not err:  # which Python itself would end with 1
            sys.stderr.flush()
            os._exit(130)

    sys.excepthook = _interrupted

__version__ = "0.1.0"
