"""A run that does not go on: which rank, and in what. Read from the trainer's heartbeats and from /proc; nothing is asked of the ranks.

A hang is one of these, the first that fits:
    bootstrap    not all ranks have met: some never came, or they wait for one another before the model is there
    compile      the first steps, and a rank or its children compute on the CPU: compilers, autotuning
    stopped      a rank is behind all others, or its process is stopped, in the kernel, a zombie or gone
    waiting      all ranks are at one place, and none computes: a collective, a network or a disk that does not answer
and a run that goes on may have a steady skew: a rank whose own part of a microbatch takes longer than that of the others.
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from launch.host import linux
from launch.record import steps

FOLDER = "beat"  # nam_megatron/runtime/heartbeat.py
LONGEST = 4096  # characters of a beat
PHASES = ("start", "built", "step", "end")
COMPILING = 2  # steps in which kernels are compiled and tuned
BUSY = 0.2  # CPUs that a rank with its children uses at least while it compiles; a rank that waits polls with less, or spins with one
TOOLS = ("nvcc", "cicc", "ptxas", "cc1plus", "gcc", "g++", "cc1", "ld", "ninja", "clang", "fatbinary")
SKEW = 1.15  # of the median
# What NCCL's watchdog and gloo say of a collective that waited too long.
TIMEOUT = re.compile(
    r"collective operation timeout: .{0,500}Timeout\(ms\)=(\d{1,12})|Timed out waiting (\d{1,12})ms for", re.ASCII
)
STATES = {"T": "stopped", "t": "traced", "D": "in the kernel, uninterruptible", "Z": "a zombie", "X": "gone"}


@dataclass(frozen=True)
class Beat:
    rank: int
    host: str
    pid: int
    phase: str
    step: int
    micro: int
    spent: float | None
    at: float
    nth: int
    born: int | None = None  # older ones lack it

    @property
    def place(self) -> tuple[int, int]:
        return PHASES.index(self.phase), self.micro


def beats(folder: Path) -> dict[int, Beat]:
    """{rank: its last beat}; what cannot be read is not there."""
    found = {}
    for path in sorted((folder / FOLDER).glob("[0-9]*")):
        try:
            beat = Beat(**json.loads(next(steps.lines(path, LONGEST), "")))
            numbers = (beat.rank, beat.pid, beat.step, beat.micro, beat.nth)
            whole = all(type(n) is int and n >= 0 for n in numbers) and beat.phase in PHASES
            times = [beat.at] if beat.spent is None else [beat.at, beat.spent]
            if whole and isinstance(beat.host, str) and all(type(t) is float and math.isfinite(t) for t in times):
                # A host's clock may be behind; the file's time is by the one clock of a shared file system.
                found[beat.rank] = replace(beat, at=max(beat.at, path.stat().st_mtime))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    return found


@dataclass(frozen=True)
class Look:
    """A process at one moment. state: of /proc; None: it is gone. cpu: seconds that it and its descendants have used. born: as in Beat."""

    state: str | None
    cpu: float
    tools: tuple[str, ...] = ()
    born: int | None = None


def look(pids: Sequence[int], proc: Path = linux.PROC) -> dict[int, Look]:
    """{pid: how it is}, with its descendants' CPU time and the compilers among them."""
    stats = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal() and (text := linux.text(folder / "stat")):
            name, _, rest = text.partition("(")[2].rpartition(")")
            cells = rest.split()
            if len(cells) > 14:
                used = sum(int(c) for c in cells[11:15] if c.lstrip("-").isdecimal())
                born = int(cells[19]) if len(cells) > 19 else None
                stats[int(folder.name)] = (name, cells[0], int(cells[1]), used / os.sysconf("SC_CLK_TCK"), born)
    children: dict[int, list[int]] = {}
    for pid, (_, _, parent, *_) in stats.items():
        children.setdefault(parent, []).append(pid)
    found = {}
    for pid in pids:
        line, seen = [pid], set()
        while line:
            at = line.pop()
            if at in stats and at not in seen:
                seen.add(at)
                line += children.get(at, ())
        tools = tuple(sorted({stats[p][0] for p in seen if p != pid and stats[p][0] in TOOLS}))
        state, born = (stats[pid][1], stats[pid][4]) if pid in stats else (None, None)
        found[pid] = Look(state, sum(stats[p][3] for p in seen), tools, born)
    return found


@dataclass(frozen=True)
class Hang:
    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def triage(
    known: Mapping[int, Beat], world: int, before: Mapping[int, Look], after: Mapping[int, Look], seconds: float
) -> Hang:
    """Why a run does not go on. before, after: its ranks' processes (of this host), `seconds` apart."""
    missing = tuple(r for r in range(world) if r not in known)
    if missing:
        where = f"{len(missing)} of {world} ranks never came: {numbers(missing)}" if known else "no rank has come"
        return Hang("bootstrap", missing, f"{where}; the others wait for them. Their own output stands in the log")
    here = {r: after[b.pid] for r, b in known.items() if b.pid in after and b.host == os.uname().nodename}
    others = [
        r for r, seen in here.items() if known[r].born not in (None, seen.born)
    ]  # the rank's number is given again
    here |= dict.fromkeys(others, Look(None, 0.0))
    ill = {r: seen.state for r, seen in here.items() if (seen.state or "X") in STATES and known[r].phase != "end"}
    if ill:
        said = ", ".join(f"rank {r} (PID {known[r].pid}) is {STATES[state or 'X']}" for r, state in ill.items())
        return Hang("stopped", tuple(ill), f"{said}, at {at(known[next(iter(ill))])}")
    early = all((b.phase == "step" and b.nth <= COMPILING) or b.phase == "built" for b in known.values())
    busy = {r: used for r in here if (used := rate(before, after, known[r].pid, seconds)) >= BUSY}
    tools = {r: seen.tools for r, seen in here.items() if seen.tools}
    if early and (tools or busy):
        who = "; ".join(f"rank {r}: {', '.join(names)}" for r, names in tools.items())
        said = who or f"rank {numbers(tuple(busy))} on the CPU ({max(busy.values()):.1f} CPUs)"
        return Hang(
            "compile",
            tuple(tools or busy),
            f"in step {max(b.step for b in known.values())}, {said}: compilers, or autotuning",
        )
    first = min(b.place for b in known.values())
    behind = tuple(r for r, b in known.items() if b.place == first)
    if len(behind) < len(known):
        where = f"rank {numbers(behind)} is behind, at {at(known[behind[0]])}"
        return Hang("stopped", behind, f"{where}; the others are at {at(max(known.values(), key=lambda b: b.place))}")
    if known[0].phase == "start":
        return Hang(
            "bootstrap",
            behind,
            "all ranks came, and wait for one another before the model is built: rendezvous, NCCL, data or a checkpoint",
        )
    return Hang(
        "waiting", behind, f"all ranks are at {at(known[behind[0]])}, and wait: a collective, the network, or a disk"
    )


def waited(line: str) -> float | None:
    """Seconds after which a collective gave up, by a line of a log; None of any other line."""
    found = TIMEOUT.search(line)
    return int(found[1] or found[2]) / 1e3 if found else None


def whose(seconds: float, schedule: Mapping[str, Any]) -> str:
    """Which of a run's two timeouts that was. schedule: the recipe's, as a receipt has it."""
    first, steady = (schedule.get("timeout_minutes") or 0) * 60, schedule.get("steady_timeout_seconds")
    if seconds == steady:
        return f"a collective waited {seconds:g} s, `schedule.steady_timeout_seconds`: the first step was over"
    if seconds == first and steady:
        return f"a collective waited {seconds:g} s, `schedule.timeout_minutes`: the first step was not over"
    name = (
        ", `schedule.timeout_minutes`, which holds in every step"
        if seconds == first
        else ", no timeout of the recipe's"
    )
    return f"a collective waited {seconds:g} s{name}"


def holds(known: Mapping[int, Beat], schedule: Mapping[str, Any]) -> str:
    """Which of them holds now. Megatron sets the later one when all ranks begin the second step of this process."""
    first, steady = (schedule.get("timeout_minutes") or 0) * 60, schedule.get("steady_timeout_seconds")
    if not steady:
        return f"a collective may wait {first} s (`schedule.timeout_minutes`) in every step"
    if all(b.phase == "end" or (b.phase == "step" and b.nth > 1) for b in known.values()):
        return f"a collective may wait {steady} s (`schedule.steady_timeout_seconds`): the first step is over"
    return f"a collective may wait {first} s (`schedule.timeout_minutes`): the first step is not over"


def rate(before: Mapping[int, Look], after: Mapping[int, Look], pid: int, seconds: float) -> float:
    """CPUs that a process used between two looks."""
    return (after[pid].cpu - before[pid].cpu) / seconds if pid in before and pid in after and seconds > 0 else 0.0


def skew(known: Mapping[int, Beat]) -> Hang | None:
    """A rank that is steadily slower than the others; None where there is none, or it cannot be known."""
    spent = {r: b.spent for r, b in known.items() if b.spent}
    if len(spent) < 2:
        return None
    rest = {r: median(v for other, v in spent.items() if other != r) for r in spent}
    slow = tuple(r for r, v in sorted(spent.items(), key=lambda rv: -rv[1]) if v > SKEW * rest[r])
    if not slow:
        return None
    said = ", ".join(f"rank {r} takes {spent[r] * 1e3:.0f} ms of its own a microbatch" for r in slow)
    return Hang("skew", slow, f"{said}, the others {rest[slow[0]] * 1e3:.0f}")


def at(beat: Beat) -> str:
    if beat.phase == "step":
        return f"step {beat.step}, microbatch {beat.micro} since the start"
    return {"start": "its start", "built": "the first step", "end": "its end"}[beat.phase]


def numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def report(
    folder: Path, world: int, seconds: float = 1.0, proc: Path = linux.PROC, schedule: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """For `inspect`: each rank's last beat, what a hang would be, which timeout holds, and the skew."""
    known = beats(folder)
    if not known:
        yield "none: no rank has started, or the run was not started by `launch run`"
        return
    now, pids = time.time(), [b.pid for b in known.values()]
    for rank, beat in sorted(known.items()):
        own = f", {beat.spent * 1e3:.0f} ms of its own a microbatch" if beat.spent else ""
        yield f"rank {rank}: {at(beat)}, {now - beat.at:.0f} s ago{own}"
    before = look(pids, proc)
    time.sleep(seconds)
    if any(b.phase != "end" for b in known.values()):
        yield f"if it hangs: {triage(known, world, before, look(pids, proc), seconds)}"
    if schedule:
        yield holds(known, schedule)
    if slow := skew(known):
        yield str(slow)


class Watch(threading.Thread):
    """Looks at the heartbeats of a run as long as it lasts. found: why it was ended, None while all is well.

    limit: seconds in which a rank has begun nothing; `on_hang` is called once, and again while the run is still there.
    """

    def __init__(self, folder: Path, world: int, limit: float, on_hang: Callable[[], None], patience: float = 30.0):
        super().__init__(daemon=True)
        self._folder, self._world, self._limit, self._on_hang, self._patience = folder, world, limit, on_hang, patience
        self._over = threading.Event()
        self.found: Hang | None = None

    def __enter__(self) -> "Watch":
        (self._folder / FOLDER).mkdir(exist_ok=True)
        if self._limit:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        pause, now, looked = min(1.0, self._limit / 4), 0.0, time.monotonic()
        last: dict[int, tuple[Any, float]] = {r: (None, now) for r in range(self._world)}
        while not self._over.wait(pause):
            known, before, looked = beats(self._folder), looked, time.monotonic()
            # In the rest of it this process did not run, and nor may the ranks have: a host that slept, a job that was suspended.
            now += min(looked - before, 2 * pause)
            for rank, beat in known.items():
                if last.get(rank, (None, 0))[0] != beat.place or beat.phase == "end":
                    last[rank] = beat.place, now
            if any(now - since >= self._limit for _, since in last.values()):
                pids = [b.pid for b in known.values()]
                first, begun = look(pids), time.monotonic()
                self._over.wait(pause)
                self.found = triage(known, self._world, first, look(pids), time.monotonic() - begun)
                break
        while self.found and not self._over.is_set():
            self._on_hang()
            self._over.wait(self._patience)
