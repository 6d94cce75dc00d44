"""The events of a run (nam_megatron/events.py) -> what a receipt says of it. Lines of another run, and torn ones, count for nothing."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.record import steps
from launch.record.receipt import EVENTS, MOST
from nam_megatron.events import FILE, REASONS

LONGEST = 1 << 16  # characters of a line
LARGEST = 1 << 53  # of a number that counts something
INFINITE = ("nan", "inf", "-inf")  # as JSON has them
HASH = re.compile(r"[0-9a-f]{64}")
WELL = ("done", "signal", "planned stop")
FIGURES = {
    "ms": steps.TIME, "loss": steps.LOSS, "grad_norm": steps.NORM, "tflops": steps.TFLOPS, "lr": "learning rate",
    "skipped": steps.SKIPPED, "nan": steps.NAN_STEPS,
}  # fmt: skip


@dataclass
class Events:
    """What came of a run by its own word. world: how many ranks there are; planned: steps, interval: of them from line to line.

    ends: how each rank has ended, badly where its last process said so; last: what each has said last.
    loaded: steps of checkpoints, 0 of none; begun: the first said, with the hash of its checksums; firsts: the step that each process
    said first.
    wall: seconds between the launcher's two events, by a clock that nobody sets; older records lack it.
    again: a step that one process said after it, a later one, or its end; early: one that it said before its start; stray: one that
    another process than the last rank's newest said; worlds: of how many ranks somebody said to be one. made_of: hashes of the code and
    the plan that the receipt tells of; other: which of them is another's of a process.
    """

    world: int
    planned: int | None = None
    interval: int | None = None
    said: steps.Said = field(default_factory=steps.Said)
    started: datetime | None = None
    over: datetime | None = None
    wall: float | None = None
    ends: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    last: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    mends: Mapping[str, Any] | None = None
    loaded: set[int] = field(default_factory=lambda: {0})
    begun: Mapping[str, Any] | None = None
    firsts: set[int] = field(default_factory=set)
    strange: int = 0
    missing: int = 0
    again: int = 0
    early: int = 0
    stray: int = 0
    worlds: set[int] = field(default_factory=set)
    made_of: Mapping[str, str | None] = field(default_factory=dict)
    other: str | None = None
    _process: dict[int, int] = field(default_factory=dict)
    _heard: dict[tuple[Any, int], int] = field(default_factory=dict)
    _at: dict[tuple[int, int], int] = field(default_factory=dict)

    def hear(self, line: str | bytes, nonce: str) -> None:
        """One line of a file; one that cannot be read, or is of another run, is counted."""
        try:
            event = json.loads(line)
            if event["run"] != nonce:
                raise ValueError
            self._add(event)
            self._count(event)
        except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
            self.strange += 1

    def _add(self, event: Mapping[str, Any]) -> None:
        """One line of this run, in the order of its file."""
        rank = event["rank"]
        figures = [event.get(name) for name in FIGURES]
        whole = (
            event[name] for name in ("n", "pid", "rank", "step", "of", "world", "code") if event.get(name) is not None
        )
        if (
            any(type(value) is not int or not -1 < value < LARGEST for value in whole)
            or max(rank or 0, event.get("world", 0)) > MOST
            or (event["event"] == "step" and not event["step"])
            or (event["event"] == "end" and (not event.keys() >= {"step", "code"} or event["reason"] not in REASONS))
            or any(not isinstance(event.get(name), str | None) for name in ("when", "bus"))
            or type(event.get("wall", 0.0)) is not float
            or any(type(value) is bool or (type(value) is str and value not in INFINITE) for value in figures)
        ):
            raise ValueError
        when, kind = datetime.fromtimestamp(event["at"], UTC), event["event"]
        if rank is None:
            if kind == "launched":
                self.started = when
            elif kind == "over":
                self.over, self.wall = when, event.get("wall")
            return
        if kind == "start":
            self.starts[rank] += 1
            self._process[rank] = event["pid"]
            self._at.setdefault((rank, event["pid"]), 0)
            self.ends.pop(rank, None)
            self.worlds.add(event["world"])
            self.world = max(self.world, event["world"])
        if kind in ("start", "built"):
            said = self.made_of if kind == "start" else self.made_of.keys() & event.keys()
            self.other = self.other or next((key for key in said if event.get(key) != self.made_of[key]), None)
        self.last[rank] = event
        if kind == "end" and event["pid"] == self._process.get(rank, event["pid"]):
            if went_well(self.ends.get(rank)):  # a bad end stays
                self.ends[rank] = event
        elif kind == "loaded":
            self.loaded.add(event["step"])
            sums = str(event.get("sha256"))
            self.begun = self.begun or {"step": event["step"], "sha256": sums if HASH.fullmatch(sums) else None}
        elif kind == "mends":
            self.mends = dict(event["stood"])
        elif kind == "step":
            named = {FIGURES.get(key, key): value for key, value in event.items() if key in FIGURES}
            values = {name: float(value) for name, value in (named | event["gauges"]).items() if value is not None}
            by = rank, event["pid"]
            over = self.ends.get(rank, {}).get("pid") == event["pid"]
            self.again = self.again or event["step"] * (over or event["step"] <= self._at.get(by, 0))
            self.early = self.early or event["step"] * (by not in self._at)
            newest = self.world - 1, self._process.get(rank, event["pid"])
            self.stray = self.stray or event["step"] * (by != newest)
            if not self._at.get(by):
                self.firsts.add(event["step"])
            self._at[by] = event["step"]
            self.said.steps[event["step"]] = steps.Step(event["step"], event["of"], values, when)
        elif kind in ("saving", "scheduled", "saved"):
            self.said.saves.append(steps.Save(event["step"], kind == "saved", when, kind == "scheduled"))
        elif kind in ("built", "memory"):
            device = {key: event.get(key) for key in steps.DEVICE} if kind == "built" else None
            sizes = {name: float(event[name]) for name in steps.BYTES}
            self.said.readings.append(
                steps.Reading(rank, event.get("when", kind), event["step"], device=device, **sizes)
            )

    def _count(self, event: Mapping[str, Any]) -> None:
        """A line that was read; those before it that were not are missing."""
        by = event["rank"], event["pid"]
        before = self._heard.get(by, 0)
        self.missing += max(0, event["n"] - before - 1)
        self._heard[by] = max(event["n"], before)

    @property
    def last_step(self) -> int | None:
        """The last step that is done on the rank that finished fewest; None while a rank has not said its end."""
        done = [self.ends[rank]["step"] for rank in self._ranks if rank in self.ends]
        return min(done) if done and len(done) == len(self._ranks) and None not in done else None

    @property
    def _ranks(self) -> range:
        return range(self.world)

    @property
    def hole(self) -> str | None:
        """Why this is not the whole record of a run that has ended; None where it is."""
        if not self.starts:
            return f"`{FILE}` says nothing of this run"
        for said, what in ((self.ends, "end"), (self.starts, "start")):
            if silent := [rank for rank in self._ranks if rank not in said]:
                more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
                return f"rank {', '.join(map(str, silent[:8]))}{more} did not say its {what} in `{FILE}`"
        if (bad := self.failure) and bad["code"] is None:
            return f"rank {bad['rank']} ended without a code: {bad['reason']}"
        return f"{self.missing} lines are missing from `{FILE}`" if self.missing else self._contradiction

    @property
    def _contradiction(self) -> str | None:
        """What a run that says that it went well says against it."""
        if self.failure:
            return None
        last = max((*self.loaded, *self.said.steps))
        done = max((end["step"] for end in self.ends.values() if end["step"] is not None), default=None)
        if done is None:
            return None
        if self.other:
            return f"a process had another {self.other} than this receipt tells of"
        if self.last_step != done:
            return f"ranks ended at different steps, at {self.last_step} and {done}"
        if self.planned is not None and done > self.planned:
            return f"it ended at step {done}, beyond the {self.planned} of the plan"
        if self.interval and not last <= done < last + self.interval:
            return f"it ended at step {done}, and the last line is of step {last}"
        if self.planned and (other := {step.total for step in self.said.steps.values()} - {self.planned}):
            return f"it trained for {max(other)} steps, and the plan has {self.planned}"
        if self.interval and (far := [p for p in pairwise(sorted(self.said.steps)) if p[1] - p[0] > self.interval]):
            return f"no line is of a step between {far[0][0]} and {far[0][1]}"
        if cut := [
            n for n in self.firsts if self.interval and all(not 0 < n - at <= self.interval for at in self.loaded)
        ]:
            return f"a process began with step {min(cut)}, and no checkpoint of the steps before it was loaded"
        if self.again:
            return f"one process said step {self.again} again, after a later one, or after its end"
        if self.early:
            return f"step {self.early} was said by a process that had not said its start"
        for name, what in ((steps.LOSS, "loss"), (steps.NORM, "gradient norm")):
            if nan := [n for n, step in self.said.steps.items() if not math.isfinite(step.values.get(name, 0.0))]:
                return f"the {what} of step {nan[0]} is no number"
        if self.said.steps and not any(steps.LOSS in step.values for step in self.said.steps.values()):
            return "no step has a loss: all were skipped, and nothing was trained"
        if {step.values.get(steps.NORM) for step in self.said.steps.values()} == {0.0}:
            return "every gradient is 0, and nothing was trained"
        if bare := [
            n for n, s in self.said.steps.items() if steps.LOSS not in s.values and not s.values.get(steps.SKIPPED)
        ]:
            return f"step {bare[0]} has no loss, and was not skipped"
        if beyond := max((rank for rank in self.last if rank >= self.world), default=None):
            return f"there is no rank {beyond} in a world of {self.world}"
        begun = {save.step: save.done for save in self.said.saves}  # as was said of each last
        if left := [step for step, whole in begun.items() if not whole]:
            return f"the checkpoint of step {max(left)} was begun and not finished"
        if max(begun, default=0) > done:
            return f"it ended at step {done}, and a checkpoint is of step {max(begun)}"
        if other := self.worlds - {self.world}:
            return f"a rank is of a world of {min(other)}, and there are {self.world}"
        if self.stray:
            return f"step {self.stray} was said by another process than the last rank's newest, which has the loss"
        return None

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """The first end that is none of a run that went well: the others may be of ranks that waited for this one."""
        bad = [end for end in self.ends.values() if not went_well(end)]
        return min(bad, key=lambda end: end["at"], default=None)

    def facts(self) -> dict[str, Any]:
        """For a receipt."""
        more = {"again": again} if (again := sum(self.starts.values()) - len(self.starts)) else {}
        ends = Counter(end["reason"] for end in self.ends.values())
        return {"ranks": len(self.starts), "ends": dict(ends), "missing": self.missing, "strange": self.strange, **more}


def went_well(end: Mapping[str, Any] | None) -> bool:
    return end is None or (end["reason"] in WELL and end["code"] == 0)


def read(
    folder: Path, nonce: str, world: int = 1, planned: int | None = None, interval: int | None = None, **made_of: str | None
) -> Events:  # fmt: skip
    """Everything that lies in a run's folder. A line that cannot be read is counted. world, planned, interval: of the plan."""
    found = Events(world, planned, interval, made_of={key: was for key, was in made_of.items() if was})
    for path in sorted(folder.glob(EVENTS)):
        for line in filter(str.strip, steps.lines(path, LONGEST)):
            found.hear(line, nonce)
    return found


class Newest:
    """Follows the lines of a run that goes on."""

    def __init__(self, folder: Path, nonce: str):
        self._folder, self._nonce, self._read = folder, nonce, Counter[Path]()

    def step(self) -> steps.Step | None:
        """The last one that was said since this was asked before."""
        found = Events(0)
        for path in filter(Path.is_file, self._folder.glob(EVENTS)):  # a pipe has no end
            with open(path, "rb") as file:
                file.seek(self._read[path])
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole) + len(end)
            for line in whole.split(b"\n") if end else ():
                found.hear(line, self._nonce)
        return found.said.steps[max(found.said.steps)] if found.said.steps else None
