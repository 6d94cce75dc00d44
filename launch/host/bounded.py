"""Ask another program something, for so many seconds and no longer."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

EXCEPTION = re.compile(r"^(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception)\b.*:", re.ASCII)

_live: set[int] = set()  # process groups that have not answered yet
_over = threading.Event()  # nobody waits for answers any more


@dataclass(frozen=True)
class Answer:
    """What the program printed. `code`: its exit code, None where it never started or took too long; `why`: the reason in words."""

    code: int | None
    out: str = ""
    err: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def failure(self) -> str:
        """Why there is no good answer, in one line: the first exception that was printed, or the first line at all."""
        said = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        told = next(filter(EXCEPTION.search, said), said[0] if said else "")
        return ", ".join(filter(None, [self.why or f"exit code {self.code}", told[:300]]))


def ask(words: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run a program; on the bound it ends with every process that it started."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
    except OSError as err:
        return Answer(None, why=f"`{words[0]}` cannot be started: {err.strerror}")
    _live.add(process.pid)
    try:
        if _over.is_set():  # looked at after _live was written, so that `at_once` misses nothing that starts beside it
            _end(process.pid)
        out, said = process.communicate(timeout=seconds)
        return Answer(process.returncode, out, said)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, said = process.communicate(timeout=5)
            return Answer(None, out, said, f"no answer within {seconds:g} s")
        return Answer(None, why=f"no answer within {seconds:g} s, and it cannot be ended")
    except BaseException:  # Ctrl-C: nothing of ours stays behind
        _end(process.pid)
        raise
    finally:
        _live.discard(process.pid)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """End what other threads are waiting for, and in this context whatever they still start: their answers come at once."""
    _over.set()
    try:
        for group in tuple(_live):
            _end(group)
        yield
    finally:
        _over.clear()


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
