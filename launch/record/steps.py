"""Steps, memory and checkpoints of a run -> figures; and Megatron's log -> those, for runs that have no events
(launch/record/events.py): the step lines of `training_log`, its memory and checkpoint lines (megatron-core 0.19.2), our readings.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.features.names import FEATURES

STEP = re.compile(r"\biteration\s+(\d{1,18})/\s*(\d{1,18})\s+\|(.*)")
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
FIELD = re.compile(rf"^\s*([^|]+?):\s*({NUMBER})\s*$", re.IGNORECASE)
TIME_OF_DAY = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)\]")
SAVE = re.compile(
    r"\] (saving checkpoint|scheduled an async checkpoint save|successfully saved checkpoint) (?:at|from) iteration\s+(\d{1,18})\b"
)
READING = re.compile(r"nam_megatron\.readings (\{.*\})\s*$")
MEMORY = re.compile(
    r"\[Rank (\d{1,9})\] \(after (\d{1,18}) iterations\) memory \(MB\) \| allocated: (\d{1,15}\.\d+) \| max allocated: (\d{1,15}\.\d+)"
    r" \| reserved: (\d{1,15}\.\d+) \| max reserved: (\d{1,15}\.\d+)"
)
TIME, NORM, TFLOPS, LOSS = "elapsed time per iteration (ms)", "grad norm", "throughput per GPU (TFLOP/s/GPU)", "lm loss"
NAN_STEPS, SKIPPED = "number of nan iterations", "number of skipped iterations"
# Of a step, in a receipt.
CURVES = {TIME: "ms", LOSS: "loss", NORM: "grad_norm", "learning rate": "lr"}
POINTS = 200  # steps of them, and the last
APART = 3  # first steps, in which Triton tunes, cuDNN plans and the allocator grows
WINDOW = 50  # step lines that the figures are taken from, at most
BYTES = ("allocated", "peak_allocated", "reserved", "peak_reserved")
DEVICE = ("node", "device", "bus", "name", "expandable", "uuid")
GIB = 2**30


@dataclass(frozen=True)
class Step:
    """One step line. `values`: every `name: number` of it, by Megatron's names. when: the host's local time, if it is there."""

    number: int
    total: int
    values: dict[str, float]
    when: datetime | None = None

    @property
    def ms(self) -> float | None:
        """Time a step; None where it is no number."""
        ms = self.values.get(TIME)
        return ms if ms is not None and math.isfinite(ms) and ms > 0 else None


@dataclass(frozen=True)
class Reading:
    """Bytes that torch held on a rank after a step. device: which GPU it is, where the line says it."""

    rank: int
    when: str
    step: int
    allocated: float
    peak_allocated: float
    reserved: float
    peak_reserved: float
    device: dict[str, Any] | None = None


@dataclass(frozen=True)
class Save:
    """A checkpoint after a step is begun, or done. when: the host's local time. behind: it goes on beside the training."""

    step: int
    done: bool
    when: datetime
    behind: bool = False


def parse(line: str) -> Step | Reading | Save | None:
    """What a line of the log says; None for all others, torn and foreign ones included."""
    if found := STEP.search(line):
        fields = (m.groups() for part in found[3].split("|") if (m := FIELD.match(part)))
        values = {name: float(value) for name, value in fields}
        if TIME not in values:
            return None
        clock = TIME_OF_DAY.search(line)
        return Step(int(found[1]), int(found[2]), values, time_of_day(clock[1]) if clock else None)
    if found := READING.search(line):
        return _reading(found[1])
    if found := MEMORY.search(line):
        rank, step, *mib = found.groups()
        a, b, c, d = (float(v) * 2**20 for v in mib)
        return Reading(int(rank), "step", int(step), a, b, c, d)
    if (found := SAVE.search(line)) and (clock := TIME_OF_DAY.search(line)) and (when := time_of_day(clock[1])):
        return Save(int(found[2]), found[1].startswith("successfully"), when, found[1].startswith("scheduled"))
    return None


# What layers measure of themselves; a figure's name ends with the layer's number, the embedding's with 0.
MEASURED = [kind.measures for kind in KINDS.values()] + [feature.measures for feature in FEATURES.values()]
GAUGES = tuple(gauge.name for gauge in MEASURED if gauge)


def time_of_day(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # the 31st of February
        return None


def _reading(text: str) -> Reading | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("when") not in ("built", "step", "end"):
        return None
    whole = {key: v for key in ("rank", "step", *BYTES) if type(v := said.get(key)) is int and 0 <= v < 2**63}
    if len(whole) < 2 + len(BYTES):
        return None
    device = {k: said.get(k) for k in DEVICE} if "device" in said else None
    return Reading(when=said["when"], device=device, **whole)


@dataclass
class Said:
    """All that a log said: steps by number, a repeated one as it was said last; memory and checkpoints in order."""

    steps: dict[int, Step] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    def add(self, line: str) -> Step | Reading | Save | None:
        found = parse(line)
        if isinstance(found, Step):
            self.steps[found.number] = found
        elif isinstance(found, Reading):
            self.readings.append(found)
        elif isinstance(found, Save):
            self.saves.append(found)
        return found


def read(lines: Iterable[str]) -> Said:
    said = Said()
    for line in lines:
        said.add(line)
    return said


def last_step(said: Said) -> int | None:
    """The last step that the trainer says it finished, on the rank that finished fewest; None where it said nothing at its end.

    Not that of the last step line: `log_interval` hides steps.
    """
    return min((r.step for r in said.readings if r.when == "end"), default=None)


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """(the first lines, those of steady steps), both with a time.

    A line's time is the mean since the line before, but Megatron logs the first step once more within the next line. So a line is
    steady if none of the first APART steps is in it.
    """
    timed = [s for s in steps if s.ms is not None]
    if not timed:
        return [], []
    start = timed[0].number - 1
    since = [start, start, *(s.number for s in timed[1:])]
    steady = [s for s, before in zip(timed, since, strict=False) if before >= start + APART]
    return timed[: len(timed) - len(steady)], steady


def _ms(step: Step) -> float:
    assert step.ms is not None, "`split` leaves lines without a time out"
    return step.ms


def figures(said: Said, tokens_per_step: int, world: int) -> dict[str, Any]:
    """Figures of a run: its first window of steady steps, the steps before it, and whether the numbers were numbers.

    tokens_per_step: of the whole job. A run too short for a window has `window: null`.
    """
    steps = [said.steps[n] for n in sorted(said.steps)]
    first, steady = split(steps)
    norms = [s.values.get(NORM) for s in steps]
    losses = [s.values.get(LOSS) for s in steps]
    return {
        "steps": steps[-1].number - steps[0].number + 1 if steps else 0,
        "last_step": steps[-1].number if steps else None,
        "planned_steps": steps[-1].total if steps else None,
        "first_lines_ms": [s.ms for s in first],
        "window": _window(steady[:WINDOW], tokens_per_step, world) if steady else None,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        # Megatron leaves a loss out of the line when it is NaN.
        "loss_finite": all(l is not None and math.isfinite(l) for l in losses) if losses else None,
        "grad_norm_last": norms[-1] if norms else None,
        "grad_norm_finite": all(n is not None and math.isfinite(n) for n in norms) if {*norms} - {None} else None,
        "nan_steps": _sum(s.values.get(NAN_STEPS) for s in steps),
        "skipped_steps": _sum(s.values.get(SKIPPED) for s in steps),
    }


def _sum(counts: Iterable[float | None]) -> float | None:
    """None where one of them is not known."""
    known = list(counts)
    return None if None in known else sum(n for n in known if n is not None)


def _window(window: Sequence[Step], tokens_per_step: int, world: int) -> dict[str, Any]:
    ms = sorted(map(_ms, window))
    middle = median(ms)
    tflops = [v for s in window if (v := s.values.get(TFLOPS)) is not None and math.isfinite(v)]
    return {
        "first": window[0].number,
        "last": window[-1].number,
        "lines": len(window),
        "median_ms": round(middle, 3),
        "p10_ms": round(quantile(ms, 0.1), 3),
        "p90_ms": round(quantile(ms, 0.9), 3),
        "tokens_per_s_per_gpu": round(tokens_per_step / world / middle * 1000, 1),
        "megatron_tflops_per_gpu": round(median(tflops), 2) if tflops else None,
    }


def series(said: Said) -> dict[str, Any] | None:
    """The steps of a run for its receipt, thinned: every so many-th one, POINTS at most, and the last; six digits of each figure.

    A figure's list is as long as `step`, with None where a step has none.
    """
    numbers = sorted(said.steps)
    if not numbers:
        return None
    every = math.ceil(len(numbers) / POINTS)
    kept = sorted({*numbers[::every], numbers[-1]})
    names = {CURVES.get(name, name): name for step in said.steps.values() for name in step.values}
    values = {
        short: [_digits(said.steps[n].values.get(name)) for n in kept]
        for short, name in names.items()
        if name in CURVES or name.rpartition(" ")[0] in GAUGES
    }
    return {"of": said.steps[numbers[-1]].total, "every": every, "step": kept, **values}


def _digits(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def of_series(tree: Mapping[str, Any]) -> Said:
    """What `series` kept, as steps again; a tree that is none gives none."""
    named = {short: name for name, short in CURVES.items()}
    said, numbers = Said(), tree.get("step")
    for at, number in enumerate(numbers if isinstance(numbers, list) else ()):
        found = {key: values[at] for key, values in tree.items() if isinstance(values, list) and at < len(values)}
        figures = {named.get(key, key): v for key, v in found.items() if key != "step" and type(v) in (int, float)}
        if type(number) is int:
            said.steps[number] = Step(number, tree.get("of") or 0, figures)
    return said


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between the neighbours."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def memory(said: Said) -> dict[str, Any] | None:
    """Peaks over all ranks, GiB, and how far reserved runs ahead of allocated at the worst rank of each reading."""
    if not any(r.peak_allocated for r in said.readings):  # none, or of a CPU
        return None
    moments: dict[tuple[str, int], list[Reading]] = {}
    for r in said.readings:
        moments.setdefault((r.when, r.step), []).append(r)
    worst = [
        (when, step, max(rs, key=lambda r: r.peak_reserved - r.peak_allocated)) for (when, step), rs in moments.items()
    ]
    return {
        "ranks": len({r.rank for r in said.readings}),
        "peak_allocated_gib": _gib(max(r.peak_allocated for r in said.readings)),
        "peak_reserved_gib": _gib(max(r.peak_reserved for r in said.readings)),
        "gap": [
            {"when": when, "step": step, "rank": r.rank, "gib": _gib(r.peak_reserved - r.peak_allocated)}
            for when, step, r in worst[:64]
        ],
    }


def _gib(size: float) -> float:
    return round(size / GIB, 3)


def _forward(seconds: float) -> float | None:
    """A time between two readings of the host's clock; None where that was set back between them, as it is every autumn."""
    return seconds if seconds >= 0 else None


def bad_put(
    said: Said, started: datetime | None, ended: datetime | None, *, every: int | None = None, wall: float | None = None
) -> dict[str, Any] | None:
    """Seconds that were no steady training: until the first step began, what the first steps took beyond steady ones, checkpoints.

    started, ended: local times of the launcher; what is unknown is None. every: steps of each line, where the first is like the others,
    as Bridge's is; Megatron's first line is of one step, and its second has that step in it once more. wall: seconds between these two
    by a clock that nobody sets; None where none was read.
    """
    steps = [said.steps[n] for n in sorted(said.steps)]
    first, steady = split(steps)
    began = None
    if steps and steps[0].when and steps[0].ms is not None and started:
        began = (steps[0].when - started).total_seconds() - steps[0].ms / 1000
    saving: dict[int, datetime] = {}
    held: dict[int, float] = {}  # how long the training waited for one that then went on behind it
    saved = []
    for save in said.saves:
        begun = saving.get(save.step)
        if save.done:
            if begun:
                saved.append(held.pop(save.step, (save.when - begun).total_seconds()))
                del saving[save.step]
        elif not save.behind:
            saving[save.step] = save.when
        elif begun:
            held[save.step] = (save.when - begun).total_seconds()
    excess = None
    if steady:  # then there are two lines before it
        rest = first if every else first[1:]
        lines = [(rest[0], first[0].number - (every or 1)), *((s, before.number) for before, s in pairwise(rest))]
        middle = median(map(_ms, steady[:WINDOW]))
        excess = sum((_ms(s) - middle) * (s.number - before) for s, before in lines) / 1000
    if wall is None and started and ended:
        wall = _forward((ended - started).total_seconds())
    known = {
        "wall_s": wall,
        "until_first_step_s": None if began is None else _forward(began),
        "first_steps_excess_s": excess,
        "checkpoints_s": None if any(_forward(s) is None for s in saved) else sum(saved, 0.0),
    }
    known = {k: None if v is None or not math.isfinite(v) else round(v, 1) + 0.0 for k, v in known.items()}
    return {**known, "checkpoints": len(saved)}


def lines(path: Path, longest: int) -> Iterator[str]:
    """Of a file that a run has left, each cut in pieces of `longest` characters; none where it cannot be read, or is no file."""
    if not path.is_file():
        return
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            while line := file.readline(longest):
                yield line.rstrip("\n")
    except OSError:
        return
