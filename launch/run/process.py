"""A process that starts others (torchrun, srun): what it prints, how it is asked to end, and that nothing of it stays behind."""

import contextlib
import ctypes
import fcntl
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launch.host import linux
from launch.run.slurm import JOB
from nam_megatron.errors import Refused

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LONGEST = 1 << 16  # bytes of a line; a longer one is cut in two
F_SETPIPE_SZ, PIPE = 1031, 1 << 20  # linux/fcntl.h; bytes that a chatty trainer may be ahead
POLL, LINGER = 0.5, 3.0  # seconds: between two looks; that ranks may outlive their torchrun


class Process:
    """Its own session, so that Ctrl-C reaches the launcher alone. If the launcher is killed, the kernel sends it SIGTERM."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], cwd: Path):
        """Start it. Raises Refused where that cannot be."""
        launcher = os.getpid()
        # Its own and no others: a number is given again.
        self._before = set(linux.descendants(linux.processes(nameless=True), launcher))
        self._asked = 0
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks whose torchrun was killed become our children, to be found

        def tied() -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            if os.getppid() != launcher:
                os._exit(1)

        try:
            self._popen = subprocess.Popen(
                words, cwd=cwd, env=dict(environ), start_new_session=True, preexec_fn=tied,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as err:
            raise Refused(f"`{words[0]}` cannot be started: {err.strerror}") from None
        self._srun, self._job, self._environ = words[0] == "srun", environ.get(JOB), dict(environ)
        assert self._popen.stdout is not None, "started with a pipe"
        self._pipe = self._popen.stdout
        with contextlib.suppress(OSError):  # a user's pipes may be at their limit
            fcntl.fcntl(self._pipe, F_SETPIPE_SZ, PIPE)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever the launcher failed in meanwhile: nothing goes on behind a record that is closed."""
        if self._popen.poll() is None:
            self.kill()
            self.wait()

    def lines(self) -> Iterator[list[str]]:
        """What it prints, as many lines at a time as there are, until it and all its ranks have closed the pipe, or it is gone and
        LINGER is over.
        """
        rest, gone = b"", None
        with selectors.DefaultSelector() as ready:
            ready.register(self._pipe, selectors.EVENT_READ)
            while gone is None or time.monotonic() - gone < LINGER:
                if ready.select(POLL):
                    piece = os.read(self._pipe.fileno(), PIPE)
                    if not piece:
                        break
                    whole, end, rest = (rest + piece).rpartition(b"\n")
                    if end:
                        yield whole.decode("utf-8", "replace").split("\n")
                    if len(rest) >= LONGEST:  # behind a word: no secret is looked for in two halves
                        cut = max(rest.rfind(sign, LONGEST // 2) for sign in (b" ", b"\r", b",")) + 1 or len(rest)
                        yield [rest[:cut].decode("utf-8", "replace")]
                        rest = rest[cut:]
                if gone is None and self._popen.poll() is not None:
                    gone = time.monotonic()
        if rest:
            yield [rest.decode("utf-8", "replace")]

    def end(self) -> None:
        """Ask for an end: first the ranks, which checkpoint and exit; then torchrun, which kills them after 30 s; then kill them all.

        Ranks on several hosts hear of it by Slurm; srun, asked itself, kills its tasks on every host at once.
        """
        if self._popen.poll() is not None:
            return
        self._asked += 1
        ranks = [] if self._srun else [p.pid for p in linux.processes() if p.parent == self._popen.pid]
        if self._asked == 1 and ranks:
            send(signal.SIGTERM, ranks)
        elif self._asked < 3:
            if self._asked > 1 or not self._told():
                send(signal.SIGTERM, [self._popen.pid])
        else:
            send(signal.SIGKILL, [self._popen.pid, *self._descendants()])

    def _told(self) -> bool:
        """Whether Slurm handed a SIGTERM to all ranks of this job."""
        if not self._srun or not self._job:
            return False
        words = ["scancel", "--signal=TERM", self._job]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return not subprocess.run(words, env=self._environ, capture_output=True, timeout=60, check=False).returncode
        return False

    def kill(self) -> None:
        """End it at once: ranks that hang in a collective hear nothing else. srun is asked, and kills its tasks on every host."""
        if self._srun:
            self._asked = max(self._asked, 1)
            self.end()
        else:
            send(signal.SIGKILL, [self._popen.pid, *self._descendants()])

    def wait(self) -> int:
        """Its exit code, once it has ended. Ranks that outlived it hold GPUs: they are ended too."""
        code = self._popen.wait()
        if left := self._descendants():
            sys.stderr.write(f"note: {', '.join(map(str, left))} outlived torchrun; killed\n")
            send(signal.SIGKILL, left)
        return code

    def _descendants(self) -> list[int]:
        """Processes below this one that were not there before."""
        return [pid for pid in linux.descendants(linux.processes(), os.getpid()) if pid not in self._before]


def send(number: int, pids: Sequence[int]) -> None:
    """A signal to each of these processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Interrupted(BaseException):
    """A signal while there was nothing yet that could be asked to end."""


def ignore() -> None:
    """Too early or too late to end anything; the signal is remembered."""


class Signals:
    """SIGTERM, SIGINT and SIGHUP of this process. seen: those that came."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._how: Callable[[], None] = ignore

    def __enter__(self) -> "Signals":
        # What the caller had ignored, as nohup has SIGHUP and a shell the Ctrl-C of a background job, stays so.
        asked = [s for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        self._before = {s: signal.signal(s, self._on) for s in asked}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, the first signal raises Interrupted, and no other does. Only where nothing is written: a record would be half done."""
        self.look()
        try:
            self._how = self._raise
            yield
        finally:
            self._how = ignore
        self.look()

    def look(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.seen:
            raise Interrupted

    def _raise(self) -> None:
        self._how = ignore
        raise Interrupted

    def do(self, how: Callable[[], None]) -> None:
        """What a signal does from now on; also one that came while they were ignored."""
        self._how = how
        if self.seen:
            how()

    def _on(self, number: int, _: object) -> None:
        self.seen.append(signal.Signals(number).name)
        self._how()
