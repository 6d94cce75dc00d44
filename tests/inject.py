"""Faults while records are written: a signal or a kill at each line, an error for each thing that is asked of the system.

    python tests/inject.py launch/record/receipt.py launch/run/run.py [count=100] [seed=0]

starts a small run (tests/launch/stand_in.py) for each fault, or for a hundred of them, and says how each ended. `wrong` is
whatever the next command on that host cannot read or leaves open, an end that the exit code denies, and any traceback.
"""

import errno
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
# As the line begins. Of two signals the second comes while the first is being answered.
SIGNALS = {"SIGTERM": [signal.SIGTERM], "SIGINT twice": [signal.SIGINT] * 2, "SIGKILL": [signal.SIGKILL]}
# One of the things that a run asks of the system, in and below the folder of its receipts, fails so.
# A network's file system is interrupted and forgets handles, too, and a disk that fails is remounted: from then on nothing is written.
ERRORS = {
    "ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "EINTR": errno.EINTR, "ESTALE": errno.ESTALE,
    "read-only": errno.EROFS,
}  # fmt: skip
MOST = 110  # a run without a fault asks for so many
# What a receipt may say where the launcher did not end with 0.
ENDS = ("failed", "refused", "interrupted", "lost")
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "fcntl.flock", "os.fsync", "os.posix_fallocate")


def lines(path: Path) -> list[int]:
    """Lines of a file's functions that hold code."""

    def inside(code: CodeType) -> Iterator[int]:
        for const in code.co_consts:
            if isinstance(const, CodeType):
                yield from (line for _, _, line in const.co_lines() if line and line != const.co_firstlineno)
                yield from inside(const)

    return sorted(set(inside(compile(path.read_text(encoding="utf-8"), str(path), "exec"))))


def at_line(path: Path, line: int, fault: str) -> None:
    """From now on, the signals of `fault` as this line begins; once."""
    monitor, tool = sys.monitoring, sys.monitoring.DEBUGGER_ID

    def reached(code: CodeType, number: int) -> object:
        if number != line or code.co_filename != str(path):
            return monitor.DISABLE
        monitor.set_events(tool, monitor.events.NO_EVENTS)
        for one in SIGNALS[fault]:
            os.kill(os.getpid(), one)
        return None

    monitor.use_tool_id(tool, "fault")
    monitor.register_callback(tool, monitor.events.LINE, reached)
    monitor.set_events(tool, monitor.events.LINE)


def at_call(number: int, fault: str, below: Path, calls: Sequence[str] = CALLS) -> None:
    """From now on, the `number`-th thing that is asked of the system about a file `below` a folder fails, or is where a signal comes; once.

    calls: what counts; of a rename alone, say, as some file systems fail it.
    """
    left = [number]

    def asked(call: str, args: tuple[object, ...]) -> None:
        if call in calls and (type(args[0]) is int or str(args[0]).startswith(str(below))):
            left[0] -= 1
            if left[0] == 0 or (fault == "read-only" and left[0] < 0 and writes(call, args)):
                for one in SIGNALS.get(fault, ()):
                    os.kill(os.getpid(), one)
                if fault in ERRORS:
                    # As the system says it: with the name of a file, where it was asked by one.
                    named = () if type(args[0]) is int else (str(args[0]),)
                    raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]), *named)

    for name in ("fsync", "posix_fallocate"):  # Python tells no hook of them
        setattr(os, name, audited(f"os.{name}", getattr(os, name)))
    sys.addaudithook(asked)


def writes(call: str, args: tuple[object, ...]) -> bool:
    """Whether a call changes a file system that is read-only by now."""
    flags = args[2] if call == "open" else os.O_CREAT
    return call not in ("fcntl.flock", "os.fsync") and bool(
        type(flags) is int and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
    )


def storm() -> None:
    """From now on a signal of no meaning every millisecond: whatever may be interrupted is."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)


def planted(where: str, below: Path) -> None:
    """A fault from its words: `FILE:LINE:SIGTERM`, `7:ENOSPC`, `storm`."""
    *place, fault = where.split(":")
    if fault == "storm":
        storm()
    elif fault in SIGNALS:
        at_line(Path(place[0]), int(place[1]), fault)
    else:
        at_call(int(place[0]), fault, below)


def audited(name: str, call: Callable[..., object]) -> Callable[..., object]:
    def told(*args: object) -> object:
        sys.audit(name, *args)
        return call(*args)

    return told


def drawn(paths: list[Path], count: int, seed: int) -> list[str]:
    """`count` of all faults that there are for a run and these files; all of them where there are no more."""
    of = [f"{path}:{line}:{fault}" for path in paths for line in lines(path) for fault in SIGNALS]
    of += [f"{number}:{fault}" for number in range(1, MOST + 1) for fault in ERRORS]
    random.Random(seed).shuffle(of)
    return of[:count]


def wrong(root: Path, code: int | None, said: str, fault: str) -> str | None:
    """What must not be, after a run below `root` that ended with `code` and printed `said`; None where all is as it should be."""
    from launch.record import outcome, receipt
    from nam_megatron.errors import Refused

    if "Traceback" in said:
        return "a traceback: " + said.strip().splitlines()[-1]
    try:
        receipt.seal_lost(root, outcome.of_run)
        found = [receipt.read(folder) for folder in receipt.folders(root)]
        torn = [word for damage, word in receipt.broken(root, found) if damage]
    except Refused as refused:
        return refused.problems[0].message
    if torn:
        return torn[0]
    if still := [one["run"] for one in found if one["state"] != "sealed"]:
        return f"{still[0]} is open"
    if left := list(root.glob(f"{receipt.OPENING}*")):
        return f"{left[0].name} is left"
    ends = [one["outcome"]["end"] for one in found]
    # A launcher that cannot write the chain after the seal has sealed all the same.
    kept = (["completed"],) if fault in ERRORS else ()
    allowed = {"SIGKILL": ([], ["completed"], ["lost"])}.get(fault) or {0: (["completed"],)}.get(
        code, ([], *([e] for e in ENDS), *kept)
    )
    return None if ends in allowed else f"ended with {code}, and its receipts say {ends}"


def tried(root: Path, where: str) -> tuple[str, str | None]:
    """(how a run with this fault ended, what is wrong with that)."""
    from test_run import Launcher

    from launch.record import receipt

    launcher = Launcher.start(root, "steps=2", FAULT=where)
    launcher.process.join(1200)
    if launcher.process.exitcode is None:
        launcher.process.kill()
        return "hangs", "it does not end"
    # ranks may live a moment longer than a launcher that was killed: nobody seals what they may add to
    over = time.monotonic() + 10
    while (bad := wrong(root, launcher.process.exitcode, launcher.err, where.rpartition(":")[2])) and bad.endswith(
        "is open"
    ):
        if time.monotonic() > over:
            break
        time.sleep(0.2)
    ends = [receipt.read(folder)["outcome"]["end"] for folder in receipt.folders(root)] if not bad else []
    return f"{', '.join(ends) or 'no receipt'}", bad


def main(words: list[str]) -> int:
    options = {k: int(v) for k, _, v in (w.partition("=") for w in words if "=" in w)}
    seen: Counter[tuple[str, str]] = Counter()
    paths = [ROOT / word for word in words if "=" not in word]
    for where in drawn(paths, options.get("count", 1 << 20), options.get("seed", 0)):
        with tempfile.TemporaryDirectory() as folder:
            end, bad = tried(Path(folder, "receipts"), where)
        seen[where.rpartition(":")[2], "wrong" if bad else end] += 1
        if bad:
            print(f"{where.removeprefix(f'{ROOT}/')}: {bad}", flush=True)
    for (fault, end), times in sorted(seen.items()):
        print(f"{fault:<14}{end:<14}{times:>5}")
    return 1 if any(end == "wrong" for _, end in seen) else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/launch")]
    sys.exit(main(sys.argv[1:]))
