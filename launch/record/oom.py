"""Out-of-memory errors in a log: what was asked for, what was there, in which phase, and which kind that makes it.

The texts are torch's (2.11 and its forerunners) and those of libraries that ask the driver past torch's allocator.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from launch.record import steps

SIZE = r"(\d{1,12}(?:\.\d{1,4})? (?:[KMG]iB|bytes))"
ERROR = re.compile(r"CUDA out of memory\. Tried to allocate ", re.ASCII)
LIBRARY = re.compile(
    r"CUDA error: out of memory|cudaErrorMemoryAllocation|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|Cuda failure\s+(?:2\s+)?'out of memory'"
)
NUMBERS = {
    "tried": re.compile(rf"Tried to allocate {SIZE}", re.ASCII),
    "total": re.compile(rf"total capac\w*ty of {SIZE}|; {SIZE} total capacity", re.ASCII),
    "free": re.compile(rf"of which {SIZE} is free|; {SIZE} free", re.ASCII),
    "process": re.compile(rf"this process has {SIZE} memory in use", re.ASCII),
    "allocated": re.compile(
        rf"{SIZE} is allocated by PyTorch|{SIZE} allocated by PyTorch|; {SIZE} already allocated", re.ASCII
    ),
    "pools": re.compile(rf"with {SIZE} allocated in private pools", re.ASCII),
    "unallocated": re.compile(rf"{SIZE} is reserved by PyTorch but unallocated", re.ASCII),
}
RESERVED = re.compile(rf"; {SIZE} reserved in total by PyTorch", re.ASCII)  # the old text: allocated is among it
OTHERS = re.compile(rf"Process \d+ has {SIZE} memory in use", re.ASCII)
RANK = re.compile(r"\[(?:rank|default)(\d{1,6})\]", re.ASCII)
FRAME = re.compile(r'File "([^"]*)", line \d+, in (\S+)')
# torch/optim/adamw.py, core/optimizer/distrib_optimizer.py
OPTIMIZER = re.compile(r"optim[^/]*/[^/]*$|/[^/]*optim[^/]*$")
STEP = re.compile(r"step|adam|prepare_grads|_copy_model|_copy_main")
# Our trainer's own line, nam_megatron/runtime/outofmemory.py: it comes before the traceback.
PLACE = re.compile(
    r"out of memory: step (\d{1,18}), rank (\d{1,6}), in the (forward|backward) pass"
    r"(?: of (layer \d{1,6} \(\w{1,40}\): [\w.]{1,200})|, (in [\w ]{1,60}))?",
    re.ASCII,
)
BEFORE = 400  # lines in which a traceback may stand: several ranks print at once
UNITS = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
OUTSIDE = 0.05  # of the device; CUDA, NCCL and loaded kernels take less than that


@dataclass(frozen=True)
class Oom:
    """One error. Sizes in GiB, None where the text does not say. line: in the log, from 1, and 0 for one of the events; steps: how many
    were finished before it.

    layer: where our trainer says that it was: `layer 5 (moe): decoder.layers.4`.
    """

    line: int
    rank: int | None
    steps: int
    phase: str
    tried: float | None = None
    total: float | None = None
    free: float | None = None
    process: float | None = None
    allocated: float | None = None
    pools: float | None = None
    unallocated: float | None = None
    others: float = 0.0
    layer: str | None = None

    @property
    def outside(self) -> float:
        """In use by this process, but not by torch's allocator."""
        if self.process is None or self.allocated is None:
            return 0.0
        return max(0.0, self.process - self.allocated - (self.unallocated or 0.0))

    @property
    def kind(self) -> tuple[str, str]:
        """(name, what to do), the first that fits."""
        if self.tried is None:
            return (
                "workspace",
                "a library asked the driver for memory that torch's allocator holds: leave it some headroom",
            )
        if self.others >= self.tried:
            return (
                "neighbour",
                f"another process holds {self.others:.2f} GiB of this GPU: `python -m launch check` names it",
            )
        if (self.unallocated or 0.0) >= self.tried:
            return (
                "fragmentation",
                "what was asked for was reserved, but in pieces: did PYTORCH_ALLOC_CONF=expandable_segments:True reach the process?",
            )
        if self.total and self.outside > max(OUTSIDE * self.total, self.tried):
            return (
                "workspace",
                f"{self.outside:.2f} GiB are outside torch's allocator: NCCL buffers, CUDA graphs, library workspaces",
            )
        if self.phase == "optimizer step":
            return (
                "optimizer burst",
                "state and temporaries of the optimizer: `feature.distributed_optimizer`, or more data-parallel ranks",
            )
        if self.phase == "setup":
            return "weights", "weights, gradients and optimizer state alone are too much: shard them over more ranks"
        return (
            "activation",
            "a smaller `schedule.micro_batch_size`, or `feature.recompute`; `python -m nam_megatron.budget` says which layers",
        )


def triage(lines: Iterable[str]) -> list[Oom]:
    """Every distinct error of a log, in its order. One that torchrun repeats at the end counts once. Holds BEFORE lines at a time."""
    found: dict[tuple, Oom] = {}
    before: deque[str] = deque(maxlen=BEFORE)
    places: dict[int, tuple[str, str | None]] = {}
    done = 0
    for at, line in enumerate(lines):
        if isinstance(said := steps.parse(line), steps.Step):
            done = max(done, said.number)
        elif ERROR.search(line) or LIBRARY.search(line):
            oom = read(line, at + 1, done, phase(frames(before, line)))
            same = tuple(getattr(oom, f.name) for f in fields(Oom) if f.name not in ("line", "phase"))
            if same not in found or found[same].phase == "unknown":
                found[same] = oom
        elif place := PLACE.search(line):
            places[int(place[2])] = place[3], place[4] or place[5]
        before.append(line)
    return [_placed(oom, places) for oom in found.values()]


def of_end(end: Mapping[str, Any]) -> Oom:
    """An error as our trainer has said it: torch's own text, and where in the step that was."""
    oom = read(str(end.get("error")), 0, end["step"] or 0, end.get("phase") or "unknown")
    return replace(oom, rank=end["rank"], layer=end.get("layer"))


def _placed(oom: Oom, places: Mapping[int, tuple[str, str | None]]) -> Oom:
    """With what the trainer said of its rank; of a run of one rank, whose errors name none."""
    rank = next(iter(places)) if oom.rank is None and len(places) == 1 else oom.rank
    if rank is None or rank not in places:
        return oom
    run, layer = places[rank]
    return replace(oom, layer=layer, phase=run if oom.phase == "unknown" else oom.phase)


def read(text: str, line: int = 1, done: int = 0, where: str = "unknown") -> Oom:
    """One message."""
    numbers: dict[str, Any] = {name: _gib(pattern.search(text)) for name, pattern in NUMBERS.items()}
    reserved = _gib(RESERVED.search(text))
    if reserved is not None and numbers["allocated"] is not None:
        numbers["unallocated"] = max(0.0, reserved - numbers["allocated"])
    rank = RANK.search(text)
    others = sum(_gib(found) or 0.0 for found in OTHERS.finditer(text))
    return Oom(line, int(rank[1]) if rank else None, done, where, **numbers, others=others)


def _gib(found: re.Match[str] | None) -> float | None:
    if not found:
        return None
    number, unit = next(group for group in found.groups() if group).split(" ")
    return float(number) * UNITS[unit]


def frames(before: Iterable[str], line: str) -> list[tuple[str, str]]:
    """(file, function) of the traceback that ends at `line`, of its rank."""
    rank = RANK.search(line)
    found: list[tuple[str, str]] = []
    for text in before:
        if rank and (other := RANK.search(text)) and other[1] != rank[1]:
            continue
        if "Traceback (most recent call last)" in text:
            found = []
        elif frame := FRAME.search(text):
            found.append((frame[1], frame[2]))
    return found


def phase(stack: Sequence[tuple[str, str]]) -> str:
    """setup, graph capture, optimizer step, backward, forward or unknown: of the calls that are open, the innermost that tells.

    A layer that is computed again stands in backward and in forward; backward it is.
    """
    names = {name for _, name in stack}
    if names & {"create_cudagraphs", "make_graphed_callables"}:
        return "graph capture"
    if names & {"save_checkpoint", "save_checkpoint_and_time"}:
        return "checkpoint"
    if any(OPTIMIZER.search(file) and STEP.search(name) for file, name in stack):
        return "optimizer step"
    if "setup_model_and_optimizer" in names:
        return "setup"
    if names & {"backward", "backward_step", "_engine_run_backward"}:
        return "backward"
    return "forward" if names & {"forward", "forward_step"} else "unknown"


def told(oom: Oom) -> Iterator[str]:
    """For a person."""
    kind, advice = oom.kind
    when = "before step 1 was finished" if oom.steps == 0 else f"after step {oom.steps}"
    where = f"rank {oom.rank}, " if oom.rank is not None else ""
    layer = f" of {oom.layer}" if oom.layer else ""
    line = f"line {oom.line}: " if oom.line else ""
    yield f"{line}{where}{oom.phase}{layer}, {when}: {kind}"
    known = {f: v for f in NUMBERS if (v := getattr(oom, f)) is not None}
    if oom.others:
        known["other processes"] = oom.others
    if oom.outside:
        known["outside torch"] = oom.outside
    if known:
        yield "  GiB: " + ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    yield f"  -> {advice}"
