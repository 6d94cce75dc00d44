"""Plan -> Budget: adds up what blocks and features say, at the worst moment of each pipeline stage."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nam_megatron.budget import ends, static
from nam_megatron.compile.plan import Plan
from nam_megatron.features.recompute import groups
from nam_megatron.words.site import Layer
from nam_megatron.words.sizes import (
    ACTIVATIONS,
    BUCKETS,
    COMMUNICATION,
    FEATURES,
    GIB,
    GRADIENTS,
    MTP,
    PARAMETERS,
    UNMEASURED,
    WORKSPACE,
    Line,
    Sizes,
    Stage,
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment."""

    event: str
    lines: tuple[Line, ...]

    def sum(self, *places: str) -> int:
        return sum(line.bytes for line in self.lines if line.place in places)

    @cached_property
    def allocated(self) -> int:
        """What torch.cuda.memory_allocated shows."""
        return self.sum("allocated")

    @cached_property
    def reserved(self) -> int:
        """What torch.cuda.memory_reserved shows."""
        return self.sum("allocated", "reserved")

    @cached_property
    def total(self) -> int:
        """What the device has in use."""
        return self.sum("allocated", "reserved", "outside")

    @cached_property
    def buckets(self) -> dict[str, int]:
        found = dict.fromkeys(BUCKETS, 0)
        for line in self.lines:
            found[line.bucket] += line.bytes
        return found


@dataclass(frozen=True)
class StageBudget:
    """The worst rank of a pipeline stage. `moments`: the worst of each phase.

    build: while the model is made. after_init: before the first step. first_step: its peak, without moments in the
    optimizer until its end. warm_up: the peak of the steps that still run eagerly, where CUDA graphs are captured later.
    between_steps: at rest afterwards. steady: the peak of every later step.
    """

    stage: Stage
    parameters: int
    moments: dict[str, Moment]

    @property
    def startup(self) -> Moment:
        passing = (self.moments[k] for k in ("build", "first_step", "warm_up") if k in self.moments)
        return max(passing, key=lambda m: m.total)

    @property
    def steady(self) -> Moment:
        return self.moments["steady"]

    @property
    def worst(self) -> Moment:
        return max(self.startup, self.steady, key=lambda m: m.total)

    @property
    def peak_allocated(self) -> int:
        """Of all phases: what lies in a graph's pool was allocated while it was captured, and is not while it is replayed."""
        return max(moment.allocated for moment in self.moments.values())


@dataclass(frozen=True)
class Budget:
    """Memory of a plan on its device. `parameters`, `active`: of the whole model."""

    plan: Plan
    parameters: int
    active: int
    stages: tuple[StageBudget, ...]

    @property
    def worst(self) -> StageBudget:
        return max(self.stages, key=lambda s: s.worst.total)

    @property
    def capacity(self) -> int:
        """Bytes of a device."""
        return int(self.plan.recipe.device.total_gib * GIB)

    @property
    def free(self) -> int:
        """Bytes left on the worst device; negative where it does not fit."""
        return self.capacity - self.worst.worst.total

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def roomy(self) -> bool:
        """Whether the headroom of the device file is left."""
        return self.free >= self.plan.recipe.device.headroom_gib * GIB


def budget(plan: Plan, imbalance: float = 1.0) -> Budget:
    """Forecast of the memory of each pipeline stage's worst rank.

    imbalance: rows of the busiest expert rank over the mean, where experts are spread over ranks.
    """
    z = Sizes.of(plan.site, imbalance)
    return Budget(plan, *static.parameters(plan), tuple(_stage(plan, z, stage) for stage in static.stages(plan)))


def _stage(plan: Plan, z: Sizes, stage: Stage) -> StageBudget:
    held = static.groups(plan, z, stage)
    fixed = tuple(static.lines(plan, z, stage, held))
    at = {
        since: tuple(x for x in fixed if x.since == since) for since in ("build", "init", "forward", "step", "stepping")
    }
    graphs = plan.recipe.feature.cuda_graphs
    moving = _Moving(plan, z, stage, graphs is not None)
    eager = _Moving(plan, z, stage, graphs=False) if graphs and graphs.warmup_steps else moving
    before, after = (*at["init"], *at["forward"]), (*at["init"], *at["forward"], *at["step"])
    # While the model is built there is no optimizer yet.
    buffers = (*PARAMETERS.values(), GRADIENTS, COMMUNICATION)
    made = tuple(x for x in at["init"] if x.bucket in buffers or x.place != "allocated")
    step = Moment("optimizer step", (*after, *at["stepping"]))
    # A graph of the whole step keeps its pool, of the size of its peak, while the optimizer works.
    beside = tuple(replace(x, place="reserved") for x in at["stepping"] if moving.pooled and x.place == "allocated")
    event, worst = moving.worst(after)
    moments = {
        "build": Moment("building the model", (*made, *at["build"])),
        "after_init": Moment("before the first step", at["init"]),
        "first_step": max(Moment(*eager.worst(before, first=True)), step, key=lambda m: m.total),
        **({"warm_up": max(Moment(*eager.worst(after)), step, key=lambda m: m.total)} if eager is not moving else {}),
        "between_steps": Moment("between steps", after),
        "steady": max(Moment(event, (*worst, *beside)), step, key=lambda m: m.total),
    }
    return StageBudget(stage, sum(g.elements() for g in held), {k: _sorted(v) for k, v in moments.items()})


def _sorted(moment: Moment) -> Moment:
    """Equal lines as one, by bucket."""
    counts = Counter(moment.lines)
    merged = [replace(line, bytes=line.bytes * n, count=line.count * n) for line, n in counts.items()]
    return Moment(moment.event, tuple(sorted(merged, key=lambda line: BUCKETS.index(line.bucket))))


# What microbatches hold ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Something a microbatch passes through. kept: for its backward pass. events: (name, all it holds while it works)."""

    kept: tuple[Line, ...]
    events: tuple[tuple[str, tuple[Line, ...]], ...] = ()


class _Moving:
    """The activations of one stage, as parts in the order of the forward pass, for each of its segments."""

    def __init__(self, plan: Plan, z: Sizes, stage: Stage, graphs: bool):
        self.plan, self.z, self.stage, self.graphs = plan, z, stage, graphs
        self.pooled = graphs and z.site.whole_step  # all of it lies in a graph's pool
        self.plain = replace(z, recompute=frozenset())
        self.costs: dict[tuple, tuple] = {}
        timed = not z.site.deterministic  # see mends/autotune.py
        self.autotuned = {block.kind for block in plan.blocks if block.autotuned and timed}
        self.chunks = [list(self._parts(chunk)) for chunk in stage.chunks]
        self.chunks[0] = [_Part(tuple(self._features())), *self.chunks[0]]
        for chunk in self.chunks:
            chunk.append(_Part((), tuple(self._feature_events())))
        if stage.last:
            self.chunks[-1] += self._tail()

    def worst(self, fixed: Sequence[Line], first: bool = False) -> tuple[str, tuple[Line, ...]]:
        """The event in which most is held, with everything that is. first: in the first step, which autotunes."""
        tune = self.z.line("autotuning", "256 MiB", "Triton flushes this buffer between trials", bucket=WORKSPACE)
        tune = replace(tune, owner="device")
        best: tuple[int, str, tuple[Line, ...]] = (-1, "", ())
        kept = [_bytes(line for part in chunk for line in part.kept) for chunk in self.chunks]
        for sets, now in in_flight(self.plan, self.stage):
            before = sum(n * size for n, size in zip(sets, kept, strict=True))
            for i, part in enumerate(self.chunks[now]):
                for name, lines in part.events:
                    more = (tune,) if first and name.split()[0] in self.autotuned else ()
                    size = before + _bytes(lines) + _bytes(more)
                    if size > best[0]:
                        passed = [line for p in self.chunks[now][:i] for line in p.kept]
                        others = [
                            x
                            for n, c in zip(sets, self.chunks, strict=True)
                            for p in c
                            for x in p.kept
                            for _ in range(n)
                        ]
                        best = size, name, (*others, *passed, *lines, *more)
                before += _bytes(part.kept)
        _, name, held = best
        pooled = (replace(x, place="reserved") if self.pooled and x.place == "allocated" else x for x in held)
        return name, (*fixed, *pooled)

    def _parts(self, layers: Sequence[Layer]) -> Iterator[_Part]:
        for indices, checkpointed in groups(self.plan.recipe.feature.recompute, len(layers)):
            group = [layers[i] for i in indices]
            names = [f"{layer.kind} {layer.number}" for layer in group]
            yield self._part([self._cost(x.kind, x) for x in group], names, checkpointed)

    def _part(self, costs: Sequence[tuple], names: Sequence[str], checkpointed: bool, owner: str = "") -> _Part:
        kept = tuple(line for c in costs for line in c[0])
        gradient: tuple[Line, ...] = ()
        if checkpointed:
            why = "all that a checkpointed group of layers keeps"
            more = {"bucket": costs[0][0][0].bucket, "owner": owner or "recompute"}
            kept = (self.z.line("input of a group", "2 Ts h", why, **more), *(line for line in kept if line.stays))
            gradient = (self.z.line("gradient", "2 Ts h", "on its way back into the group", **more),)
        events, open_ = [], ()
        for name, (_, whole, working) in zip(names, costs, strict=True):
            open_ += whole
            events += [(f"{name} {line.name}", (*open_, line, *self._gathered(), *gradient)) for line in working]
        return _Part(kept, tuple(events))

    def _cost(self, kind: str, layer: Layer | None) -> tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]]:
        """(what a layer keeps, what it holds while it runs or is recomputed, what it needs besides)."""
        f, depth = self.plan.recipe.feature, len(self.plan.layers)
        number = layer.number if layer else None
        bf16 = f.fp8 is None or f.fp8.in_bf16(number, depth)
        key = kind, layer and layer.source is None, layer is None, bf16
        if key not in self.costs:
            block = self.z.site.blocks.of(kind)
            width = {"w": 2} if bf16 else {}
            z, plain = self.z.own(**width), self.plain.own(**width)
            kept, whole = (
                (
                    *self._owned(kind, layer, block.activations(of, layer)),
                    *self._dropped(kind, MTP if layer is None else ACTIVATIONS),
                )
                for of in (z, plain)
            )
            self.costs[key] = kept, whole, tuple(self._owned(kind, layer, block.working(z, layer)))
        return self.costs[key]

    def _dropped(self, owner: str, bucket: str) -> tuple[Line, ...]:
        """What a layer, or the embedding, keeps of the places that it has dropped. megatron-core 0.19.2, fusions/fused_bias_dropout.py."""
        if not self.plan.recipe.model.hidden_dropout:
            return ()
        more = {"bucket": bucket, "owner": owner, "mark": UNMEASURED}
        return (self.z.line("dropout mask", "Ts h", "one byte a place, of the sum with the residual", **more),)

    def _owned(self, kind: str, layer: Layer | None, lines: Iterator[Line]) -> Iterator[Line]:
        graphs = self.plan.recipe.feature.cuda_graphs
        for line in lines:
            if layer is None:
                yield replace(line, bucket=MTP, owner="mtp")
            else:
                parts = frozenset(graphs.modules) if self.graphs and graphs else frozenset()
                pooled = line.name not in ("forward", "backward") and self.z.site.blocks.of(kind).captured(line, parts)
                place = "reserved" if pooled else line.place
                yield replace(line, bucket=line.bucket or ACTIVATIONS, owner=kind, place=place)

    def _gathered(self) -> tuple[Line, ...]:
        if not self.z.site.sequence:
            return ()
        of = {"bucket": COMMUNICATION, "owner": "parallel"}
        return (self.z.line("gathered input", "2 T h", "of the running column-parallel layer", **of),)

    def _features(self) -> Iterator[Line]:
        yield from self._dropped("ends", ACTIVATIONS) if self.stage.first else ()
        for feature in self.plan.recipe.feature.all():
            if feature.name != "mtp" and (self.graphs or feature.name != "cuda_graphs"):
                for line in feature.activations(self.z, self.stage):
                    yield replace(line, bucket=line.bucket or FEATURES, owner=feature.name)

    def _feature_events(self) -> Iterator[tuple[str, tuple[Line, ...]]]:
        for feature in self.plan.recipe.feature.all():
            for line in feature.working(self.z, self.stage):
                owned = replace(line, bucket=line.bucket or FEATURES, owner=feature.name)
                yield f"{feature.name} {line.name}", (owned,)

    def _tail(self) -> Iterator[_Part]:
        plan, z, f = self.plan, self.z, self.plan.recipe.feature
        yield _Part((*ends.activations(z, self.stage), *plan.mtp_depths * self._dropped("mtp", MTP)))
        for depth in range(plan.mtp_depths):
            names = [f"mtp {depth} {kind}" for kind in plan.mtp]
            costs = [self._cost(kind, None) for kind in plan.mtp]
            # Under `block` Megatron 0.19.2 skips MTP, with a warning.
            if f.recompute and f.recompute.granularity == "full" and f.recompute.method == "uniform":
                yield self._part(costs, names, True, "mtp")
            else:
                yield from (self._part([c], [n], False) for c, n in zip(costs, names, strict=True))
        if f.mtp:
            yield _Part(tuple(replace(line, owner="mtp") for line in f.mtp.activations(z, self.stage)))
        yield _Part((), tuple(ends.loss(z)))


def _bytes(lines) -> int:
    return sum(line.bytes for line in lines)


def in_flight(plan: Plan, stage: Stage) -> set[tuple[tuple[int, ...], int]]:
    """(microbatches held besides the current one, for each segment of the stage; the segment at work).

    Megatron's 1F1B and interleaved 1F1B (megatron-core 0.19.2, pipeline_parallel/schedules.py: warm-up, then one forward
    and one backward pass in turn).
    """
    r, chunks = plan.recipe, len(stage.chunks)
    per_step = max(1, r.schedule.global_batch_size // (r.schedule.micro_batch_size * r.data_parallel))
    batches = min(per_step, 4 * stage.of)  # the rest repeats
    later = stage.of - stage.rank - 1
    warm_up = later if chunks == 1 else 2 * later + (chunks - 1) * stage.of
    order = [
        chunk
        for start in range(0, batches, stage.of)
        for chunk in range(chunks)
        for _ in range(min(stage.of, batches - start))
    ]
    counts, found = [0] * chunks, set()
    for i, chunk in enumerate(order):
        counts[chunk] += 1
        found.add((tuple(n - (k == chunk) for k, n in enumerate(counts)), chunk))
        if i >= warm_up:
            back = chunks - 1 - order[i - warm_up]
            found.add((tuple(n - (k == back) for k, n in enumerate(counts)), back))
            counts[back] -= 1
    for i in range(max(0, len(order) - warm_up), len(order)):  # cool-down
        back = chunks - 1 - order[i]
        found.add((tuple(n - (k == back) for k, n in enumerate(counts)), back))
        counts[back] -= 1
    return found
