"""From a Hydra recipe of a hybrid language model to exactly what Megatron-Core must be told."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

interrupted = False  # by a Ctrl-C that nothing else handles: what a library made of it since is no error of its own

if sys.argv[:1] == ["-m"]:
    # `python -m nam_megatron...` imports for seconds before a command can catch anything: a Ctrl-C in there is no traceback either.
    _told = sys.excepthook

    def _interrupt(number: int, frame: FrameType | None) -> None:
        global interrupted
        interrupted = True
        raise KeyboardInterrupt

    def _end(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        if isinstance(err, ModuleNotFoundError) and not interrupted:
            while trace and trace.tb_next:
                trace = trace.tb_next
            wanted = f", which `{trace.tb_frame.f_code.co_filename}` imports" if trace else ""
            sys.stderr.write(f"error: {err.msg}{wanted}\n\n")
            sys.stderr.write(
                f"hint: this Python is `{sys.executable}`; `uv sync` makes an environment, `uv run` starts in it\n"
            )
            sys.stderr.flush()
            os._exit(2)
        if not interrupted and kind is not KeyboardInterrupt:
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
