"""Plan -> Serving: weights, key/value cache and recurrent states of one rank for a batch of sequences."""

from collections.abc import Iterator
from dataclasses import dataclass

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import static
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, raise_if
from nam_megatron.words.sizes import GIB, Sizes, Stage, State


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of one kind of state over all layers of a rank: `layers` of them, `bytes` for the whole batch.

    contiguous: a cache of the full context for each sequence. paged: whole pages, as many as the context needs.
    """

    kind: str
    state: State
    layers: int
    contiguous: int
    paged: int


@dataclass(frozen=True)
class Serving:
    """One pipeline stage's rank. cache_map: attention-owned layer -> its place in the cache, both counted on this stage."""

    plan: Plan
    stage: Stage
    batch: int
    context: int
    weights: int
    cache_map: dict[int, int]
    pools: tuple[Pool, ...]
    logits: int

    def cache(self, layout: str) -> int:
        """Key/value cache; `layout` is `contiguous` or `paged`."""
        return sum(getattr(p, layout) for p in self.pools if p.state.per == "token")

    @property
    def recurrent(self) -> int:
        """The pool of recurrent states, whatever the context."""
        return sum(p.contiguous for p in self.pools if p.state.per == "sequence")

    def total(self, layout: str) -> int:
        device = self.plan.recipe.device
        return self.weights + self.cache(layout) + self.recurrent + self.logits + int(device.runtime_gib * GIB)

    def fits(self, layout: str) -> bool:
        return self.total(layout) <= self.plan.recipe.device.total_gib * GIB


def serve(plan: Plan, batch: int, context: int, page: int | None = None) -> tuple[Serving, ...]:
    """Each pipeline stage while `batch` sequences of `context` tokens are served.

    page: tokens of a page; Megatron's own where None.

    Raises:
        Refused: no batch, or a context the model was not made for.
    """
    raise_if(_problems(plan, batch, context))
    z = Sizes.of(plan.site)
    return tuple(_serve(plan, z, stage, batch, context, page) for stage in static.stages(plan))


def _problems(plan: Plan, batch: int, context: int) -> Iterator[Problem]:
    if batch < 1:
        yield Problem(f"a batch of {batch} sequences", key="batch", hint="give 1 or more")
    if context < 1:
        yield Problem(f"a context of {context} tokens", key="context", hint="give 1 or more")
    if context > plan.recipe.model.seq_length:
        message = f"a context of {context} tokens is beyond the model's {plan.recipe.model.seq_length}"
        hint = "positions it was not trained on; make `model.seq_length` larger if it was"
        yield Problem(message, key="context", hint=hint)


def _serve(plan: Plan, z: Sizes, stage: Stage, batch: int, context: int, page: int | None) -> Serving:
    weights = sum(2 * group.elements() for group in static.groups(plan, z, stage))
    owners = [layer.number for layer in stage.layers if z.site.blocks.of(layer.kind).cached]
    logits = int(z.own(batch=batch).value("6 batch V / t")) if stage.last else 0
    cache_map = {number: place for place, number in enumerate(owners)}
    pools = tuple(_pools(z, stage, batch, context, page))
    return Serving(plan, stage, batch, context, weights, cache_map, pools, logits)


def _pools(z: Sizes, stage: Stage, batch: int, context: int, page: int | None) -> Iterator[Pool]:
    counts: dict[tuple[str, State], int] = {}
    for layer in stage.layers:
        for state in z.site.blocks.of(layer.kind).serving(z, layer):
            counts[layer.kind, state] = counts.get((layer.kind, state), 0) + 1
    for kind in KINDS:
        for (owner, state), layers in counts.items():
            if owner == kind:
                each = layers * batch * state.bytes
                size = page or state.page
                pages = -(-context // size) * size
                tokens = (context, pages) if state.per == "token" else (1, 1)
                yield Pool(kind, state, layers, each * tokens[0], each * tokens[1])
