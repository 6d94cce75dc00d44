"""A proof: both sides run in processes of their own, and what they saw compared. Torch and Megatron are imported when a bench opens."""

import contextlib
import logging
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nam_megatron import installed
from nam_megatron.budget.static import parameters
from nam_megatron.errors import FINDINGS, OK, Problem, counted, raise_if
from nam_megatron.prove import compare, cut
from nam_megatron.prove.compare import FP32, Limits, Row
from nam_megatron.recipe import Recipe
from nam_megatron.words.sizes import GIB

if TYPE_CHECKING:
    from nam_megatron.prove.ranks import Rank

TWICE, AGAIN = "the layout, twice, to the last bit", "the layout, resumed in itself, to the last bit"
PROVEN, DIFFERS, BROKEN = "proven", "differs", "does not run"
# Of what faulthandler says: a line of Megatron's or ours, not of what stands in for a GPU.
FRAME = re.compile(r'File "[^"]*/(?:nam_)?megatron/(?!prove/)(?:[^"]*/)?([^/"]+)", line (\d+) in (\S+)')
LIMIT_S = {"cpu": 300.0, "cuda": 540.0}
START, RESUMED, BACK = (
    "from the same weights",
    "resumed from one rank's checkpoint",
    "one rank, resumed from the layout's checkpoint",
)


@dataclass(frozen=True)
class Part:
    """One comparison. broken: what was said instead, where a side did not come to its end."""

    title: str
    rows: tuple[Row, ...]
    broken: str = ""

    @property
    def first(self) -> Row | None:
        return compare.first_off(self.rows)


@dataclass(frozen=True)
class Proof:
    pair: cut.Pair
    device: str
    steps: int
    limits: Limits
    parts: tuple[Part, ...]
    stack: installed.Stack = field(default_factory=installed.stack)

    @property
    def word(self) -> str:
        if any(part.broken for part in self.parts):
            return BROKEN
        return DIFFERS if any(part.first for part in self.parts) else PROVEN

    @property
    def code(self) -> int:
        return OK if self.word == PROVEN else FINDINGS

    @property
    def unproven(self) -> tuple[str, ...]:
        resumed = any(part.title == RESUMED for part in self.parts)
        said = [] if resumed else ["a resume in another layout: not run"]
        compared = {row.what for part in self.parts for row in part.rows}
        if compared and compare.NORM not in compared:
            said.append(
                "optim.clip_grad: whether its norm counts every element once, which Megatron-FSDP does not tell"
            )
        if blunt := Counter((row.what, row.step) for part in self.parts for row in part.rows if row.blunt):
            most = ", ".join(
                f"{n} {what}{'s' * (not what.endswith('s'))} of step {step}"
                for (what, step), n in sorted(blunt.items())
            )
            said.append(f"{most}: rounding alone may change them by more than half")
        return (*self.pair.unproven, *said)


def prove(recipe: Recipe, device: str = "cpu", steps: int = 2, resume: bool = True) -> Proof:
    """Run the plan of `recipe` and its one-rank reference, and compare them.

    resume: also let each side go on from the checkpoint that the other wrote after step 1.

    Raises:
        Refused: the recipe, or what of it this device cannot run.
    """
    with Bench(recipe, device, steps, resume) as bench:
        return bench.proof(bench.begin())


class Bench:
    """The reference of one recipe, and as many runs beside it as are wanted.

    Raises Refused as `prove` does.
    """

    def __init__(self, recipe: Recipe, device: str = "cpu", steps: int = 2, resume: bool = True):
        self.device, self.steps, self.resume = device, steps, resume and steps > 1
        self.limits, self.limit_s = FP32, LIMIT_S[device]
        self._noise: Part | None = None
        self.beside(cut.pair(recipe, device, steps))

    def beside(self, pair: cut.Pair) -> None:
        """Go on with another layout of the same reference."""
        installed.ask(pair.layout.target, engine=self.device == "cuda")
        raise_if(compare.refusals(pair.layout.plan, self.device))
        if self.device == "cuda":
            raise_if(lacking(pair.layout.plan.recipe.world_size))
        self.pair, self.resumable = pair, self.resume and cut.resumable(pair.layout.plan.recipe)

    def __enter__(self) -> "Bench":
        warm()
        self._ending = contextlib.ExitStack()
        for number in (signal.SIGTERM, signal.SIGHUP):  # tens of GiB are taken away then, too
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
                before = signal.signal(number, lambda number, _: sys.exit(128 + number))
                self._ending.callback(signal.signal, number, before)
        self._kept = tempfile.TemporaryDirectory(prefix="nam_megatron_prove_")
        self.folder = Path(self._kept.name)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        from nam_megatron.prove import ranks

        with self._ending, ranks.undisturbed():
            self._kept.cleanup()

    def clear(self) -> None:
        """Delete what its runs have left; there is nothing to go on from then."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def proof(self, begun: Part) -> Proof:
        """Every part of a proof. begun: what `begin` said."""
        parts = [begun if begun.broken else self.start()]
        if self.resumable and not parts[0].broken:
            parts += [self.resumed(), self.back()]
        if self.pair.layout.plan.recipe.precision.deterministic and not parts[0].broken:
            parts += self.equal()
        return Proof(self.pair, self.device, self.steps, self.limits, tuple(map(self.judged, parts)))

    def judged(self, part: Part) -> Part:
        """A part whose differences may be rounding, by what rounding makes of them on one rank.

        On a GPU each comparison has its noise already. But a norm is one number, which one shaken run may miss: it is asked for in fp32.
        """
        if part.broken or not compare.may_be_rounding(part.rows):
            return part
        on_gpu = self.device == "cuda"
        if on_gpu and not all(row.agrees or row.what == compare.FORTH for row in part.rows):
            return part
        if self._noise is None:
            self._noise = self._in_fp32() if on_gpu else self._shaken()
            sys.stderr.write(f"> {self._noise.title}: {self._noise.broken}\n" if self._noise.broken else "")
        noise = [row for row in self._noise.rows if not on_gpu or row.what == compare.FORTH]
        return replace(part, rows=compare.rounded(part.rows, noise, self._noise.title))

    def begin(self) -> Part:
        """Run the reference; on a GPU twice, the second time from shaken weights, for the noise of each comparison."""
        saves = self.resume and cut.resumable(self.pair.reference.plan.recipe)
        if broken := self._cramped(saves):
            return Part("one rank", (), broken)
        one = self._side("reference", reference=True, saves=saves)
        part = Part("one rank", (), self._run(one))
        if self.device == "cuda" and not part.broken:
            noise = self._shaken()
            self.limits = compare.beyond(noise.rows)
            part = replace(noise, rows=())
        return part

    def _cramped(self, saves: bool) -> str:
        """What to say if the disk has no room for what this keeps: fp32 gradients and weights of each step, weights to begin with, and two
        checkpoints with their optimizers; an eighth for names and indices. A rank that fills it takes down whatever else writes there.
        """
        width = 4 if self.device == "cpu" else 2
        a_parameter = 4 * self.steps + width * (self.steps + 2) + 2 * saves * (width + 16)
        needs, free = 1.125 * a_parameter * parameters(self.pair.reference.plan)[0], shutil.disk_usage(self.folder).free
        if needs <= free:
            return ""
        where = f"`{self.folder.parent}`, where {free / GIB:.1f} GiB are free; `TMPDIR=FOLDER` names another folder"
        return f"it keeps up to {needs / GIB:.1f} GiB in {where}"

    def _shaken(self) -> Part:
        side = self._side("shaken", lowering=self.pair.reference, shaken=True)
        return self._compared("one rank from shaken weights", side, range(1, self.steps + 1))

    def _in_fp32(self) -> Part:
        side = self._side("exact", lowering=self.pair.reference, exact=True)
        fp8 = ", which FP8 multiplies" * (self.pair.reference.plan.recipe.feature.fp8 is not None)
        return self._compared(f"one rank in fp32{fp8}", side, range(1, self.steps + 1))

    def start(self, before: Callable[[], object] | None = None) -> Part:
        """The layout from the reference's weights. before: called in each of its ranks before anything is built."""
        return self._compared(START, self._side("layout", saves=self.resumable), range(1, self.steps + 1), before)

    def resumed(self, before: Callable[[], object] | None = None) -> Part:
        return self._compared(RESUMED, self._side("resumed", resume="reference"), range(2, self.steps + 1), before)

    def back(self, before: Callable[[], object] | None = None) -> Part:
        side = self._side("back", lowering=self.pair.reference, resume="layout")
        return self._compared(BACK, side, range(2, self.steps + 1), before)

    def equal(self, before: Callable[[], object] | None = None) -> list[Part]:
        """The layout a second time and, where its checkpoint was written, resumed: equal to the last bit."""
        world = self.pair.layout.plan.recipe.world_size
        found, first = [], self._said("layout", world)
        runs = [(TWICE, self._side("twice"), 1)]
        runs += [(AGAIN, self._side("again", resume="layout"), 2)] if self.resumable else []
        for title, side, begin in runs:
            broken = self._run(side, before)
            plan, steps = self.pair.layout.plan, range(begin, self.steps + 1)
            again = self._said(side.name, world)
            broken = broken or compare.mute(first, steps) or compare.mute(again, steps)
            found.append(Part(title, () if broken else compare.equal_bits(first, again, plan, steps), broken))
        return found

    def _said(self, name: str, world: int) -> list[Any]:
        import torch

        paths = (self.folder / f"{name}-{rank}.said" for rank in range(world))
        return [torch.load(path, weights_only=True) if path.exists() else [] for path in paths]

    def _side(self, name: str, lowering: Any = None, **more: Any) -> Any:
        from nam_megatron.prove.worker import Side

        reference = more.get("reference", False)
        lowering = lowering or (self.pair.reference if reference else self.pair.layout)
        return Side(lowering, self.folder, self.device, name, **more)

    def _run(self, side: Any, before: Callable[[], object] | None = None) -> str:
        """Run a side; what it said if it did not come to its end."""
        from nam_megatron.prove import ranks, worker

        world = side.lowering.plan.recipe.world_size
        for old in self.folder.glob(f"{side.name}-*.said"):
            old.unlink()
        shutil.rmtree(self.folder / side.name, ignore_errors=True)
        began = time.monotonic()
        ended = ranks.fork(world, partial(worker.run, side, before), self.limit_s, side.device)
        sys.stderr.write(f"> {side.name}: {counted(world, 'rank')}, {time.monotonic() - began:.0f} s\n")
        if any(rank.late for rank in ended):
            return f"the ranks did not end in {self.limit_s:.0f} s: {_waiting(ended)}"
        for number, rank in enumerate(ended):
            if rank.code and rank.code > 0:
                return f"rank {number} of {world} ended with code {rank.code}: {_last(rank.err)}"
        if codes := [rank.code for rank in ended if rank.code != 0]:
            return f"{len(codes)} of {world} ranks were killed"
        return ""

    def _compared(
        self, title: str, side: Any, steps: Iterable[int], before: Callable[[], object] | None = None
    ) -> Part:
        import torch

        if broken := self._run(side, before):
            return Part(title, (), broken)
        read = partial(torch.load, weights_only=True, mmap=True)
        names = {
            (what, int(number)): [(key, tensor.numel()) for key, tensor in read(path).items()]
            for path in self.folder.glob("*-*.pt")
            for what, number in [path.stem.split("-")]
            if int(number) in steps or (number == "0" and not side.resume)
        }
        (reference,) = self._said("reference", 1)
        same = 2 if side.resume == "reference" else 1
        plan = side.lowering.plan
        said = self._said(side.name, plan.recipe.world_size)
        found = compare.rows(reference, said, names, plan, self.limits, steps, same)
        return Part(title, found, compare.silent(found, said, steps))


def lacking(ranks: int) -> Iterator[Problem]:
    """What this host has not that a proof on GPUs needs."""
    import torch

    def problem(message: str, hint: str) -> Problem:
        # The command's own word, which no file has; the recipe's `device` is the GPU that it is for.
        return Problem(message, key="device", hint=hint, place="device=cuda")

    on_cpu = "`device=cpu` proves it in fp32 with widths cut"
    if not (gpus := torch.cuda.device_count()):
        yield problem("torch sees no GPU on this host", f"{on_cpu}; `CUDA_VISIBLE_DEVICES` may hide them")
    elif gpus < ranks:
        fewer = "the same kinds of parallelism of fewer ranks: `cluster.nodes=1 cluster.gpus_per_node=2`"
        yield problem(
            f"{counted(ranks, 'rank')}, and torch sees {counted(gpus, 'GPU')} on this host", f"{fewer}; {on_cpu}"
        )
    if find_spec("transformer_engine") is None:
        yield problem("Transformer Engine is not installed", f"the `train` extra has it; {on_cpu}")


def warm() -> None:
    """What a fork need not import again. A spawned rank imports it itself."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no CUDA
    with warnings.catch_warnings():  # of Transformer Engine, which a CPU does without: the proof says so
        warnings.simplefilter("ignore")
        import megatron.core.models.hybrid.hybrid_model
        import megatron.core.tokenizers.text.libraries
        import megatron.training.checkpointing
        import megatron.training.training  # noqa: F401

        from nam_megatron.runtime import pretrain, stack  # noqa: F401


def _waiting(ranks: Iterable["Rank"]) -> str:
    """Where each late rank was: those of a collective that others do not join stand at another line than these."""
    places: dict[str, list[str]] = {}
    for number, rank in enumerate(ranks):
        if rank.late:
            place = FRAME.search(rank.err)
            where = f"{place[3]} ({place[1]}:{place[2]})" if place else "no line of Megatron's or ours"
            places.setdefault(where, []).append(str(number))
    return ", ".join(f"rank{'s' * (len(n) > 1)} {', '.join(n)} in {where}" for where, n in places.items())


def _last(text: str) -> str:
    """The error that a traceback ends with."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or line.partition(":")[0].endswith("Error")]
    return (errors or lines or ["it said nothing"])[-1]
