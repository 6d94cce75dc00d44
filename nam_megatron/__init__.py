"""From a Hydra recipe of a hybrid language model to exactly what Megatron-Core must be told."""

from __future__ import annotations

import os
import sys

from nam_megatron import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

if sys.argv[:1] == ["-m"] or process.PROGRAM:
    # `python -m nam_megatron...` imports for seconds before a command can catch anything: a Ctrl-C in there is no traceback either.
    _told = sys.excepthook

    def _interrupt(number: int, frame: FrameType | None) -> None:
        process.interrupted = True
        raise KeyboardInterrupt

    def _end(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        if isinstance(err, ModuleNotFoundError) and not process.interrupted and not process.ours(err):
            from nam_megatron.errors import Refused  # neither needs a package
            from nam_megatron.packages import missing

            sys.stderr.write(Refused(missing(err.name or "", process.started())).render())
            sys.stderr.flush()
            os._exit(2)
        if not process.interrupted and kind is not KeyboardInterrupt:
            _told(kind, err, trace)
            return
        sys.stderr.write("interrupted\n")
        if kind is not KeyboardInterrupt:  # with which Python itself would end with 1
            sys.stderr.flush()
            os._exit(130)

    def _lost(ignored: sys.UnraisableHookArgs) -> None:
        """A Ctrl-C that came while Python called back something that must not fail, and was dropped: it comes again."""
        if ignored.exc_type is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is _interrupt:
            try:  # noqa: SIM105  `contextlib` imports for milliseconds itself
                _thread.start_new_thread(_again, ())
            except RuntimeError:  # the interpreter is ending, which is what was asked for
                pass
        else:
            _ignored(ignored)

    def _again() -> None:
        time.sleep(0.001)  # not in the hook, where it would be dropped once more
        os.kill(os.getpid(), signal.SIGINT)

    sys.excepthook = _end
    import _thread  # these after the hook: `signal` imports for milliseconds itself
    import signal
    import time

    _ignored, sys.unraisablehook = sys.unraisablehook, _lost
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)

__version__ = "0.1.0"
