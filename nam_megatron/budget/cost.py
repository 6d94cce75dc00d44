"""Plan -> Cost: operations per token by block kind, and what the device's peak makes of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import ends
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import joined
from nam_megatron.features.recompute import groups
from nam_megatron.words.sizes import GATED, Sizes, Work

# Of what is named so it counts something, or it is a part of an attention that it takes for nothing.
COUNTED = {"core", "delta rule", "down projections", "experts", "logits", "output projection", "projections", "recurrence", "scan",
           "shared expert", "up projections"}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of training on one token; `works` of one forward pass, equal layers as one.

    model: what the mathematics needs, forward and backward. hardware: and what recompute and stock kernels add.
    megatron: what megatron-core 0.19.2 logs its TFLOP/s by.
    """

    plan: Plan
    works: tuple[Work, ...]
    recomputed: float
    megatron: float

    @cached_property
    def model(self) -> float:
        return sum(w.passes * w.flops for w in self.works if w.model)

    @cached_property
    def hardware(self) -> float:
        return sum(w.passes * w.flops for w in self.works) + self.recomputed

    def floor(self, tflops: float) -> float:
        """Tokens a second and GPU if every operation of the model ran at `tflops`."""
        return tflops * 1e12 / self.model

    def utilisation(self, tokens_per_second: float) -> float:
        """Share of the peak on paper that a measured rate (a second and GPU) is: model FLOPs utilisation."""
        return tokens_per_second / self.floor(self.plan.recipe.device.bf16_tflops)

    def by_owner(self) -> dict[str, float]:
        """Model operations of one forward pass and token by block kind and feature."""
        found: dict[str, float] = {}
        for work in self.works:
            if work.model:
                found[work.owner] = found.get(work.owner, 0.0) + work.flops
        return found


def cost(plan: Plan) -> Cost:
    z, recompute = Sizes.of(plan.site), plan.recipe.feature.recompute
    whole: set[int | None] = set()  # layers recomputed from their input
    for segment in plan.segments:
        for indices, checkpointed in groups(recompute, len(segment)):
            whole |= {segment[i].number for i in indices if checkpointed}
    if recompute and recompute.granularity == "full" and recompute.method == "uniform":
        whole.add(None)  # MTP's inner layers, which `block` skips
    counts: Counter[Work] = Counter()
    again = 0.0
    for number, work in _works(plan, z):
        counts[work] += 1
        # MTP's logits and the ends are outside every checkpoint.
        if (number in whole and work.owner != "ends") or z.recompute & set(work.redone):
            again += work.flops
    works = tuple(replace(work, flops=work.flops * n, count=n) for work, n in counts.items())
    return Cost(plan, works, again, megatron(plan))


def _works(plan: Plan, z: Sizes) -> Iterator[tuple[int | None, Work]]:
    """(layer number, work of one token's forward pass); 0 for what is in no layer."""
    for layer in plan.layers:
        for work in z.site.blocks.of(layer.kind).flops(z, layer):
            yield layer.number, replace(work, owner=layer.kind)
    for _ in range(plan.mtp_depths):
        for kind in plan.mtp:
            for work in z.site.blocks.of(kind).flops(z, None):
                yield None, replace(work, owner="mtp")
    for feature in plan.recipe.feature.all():
        yield from ((0, replace(work, owner=feature.name)) for work in feature.flops(z))
    yield from ((0, replace(work, owner="ends")) for work in ends.flops(z))


def megatron(plan: Plan) -> float:
    """Per token, what megatron-core 0.19.2 counts (training/training.py, num_floating_point_operations)."""
    every, by_symbol = plan.pattern.replace("|", "").replace("/", ""), _by_symbol(plan)
    forward = sum(by_symbol.get(symbol, 0.0) for symbol in every)
    return 3 * (forward + 2 * plan.recipe.model.hidden_size * plan.recipe.model.vocab_size * (1 + plan.mtp_depths))


def megatrons_gaps(c: Cost) -> str:
    """What that count takes for something else, or leaves out, of what this model has."""
    blocks, h, counted = c.plan.recipe.blocks, c.plan.recipe.model.hidden_size, _by_symbol(c.plan)
    kinds = dict.fromkeys([*(layer.kind for layer in c.plan.layers), *c.plan.mtp])
    nothing = [KINDS[k].title for k in kinds if KINDS[k].symbol not in counted]
    other = [KINDS[k].title for k in kinds if KINDS[k].symbol == "M" and getattr(blocks, k) is not blocks.mamba2]
    left = dict.fromkeys(
        f"MTP's {w.name}" if w.owner == "mtp" else w.name if w.owner in kinds else f"{w.owner}'s {w.name}"
        for w in c.works
        if w.model and w.name not in COUNTED and (w.owner not in kinds or KINDS[w.owner].symbol in counted.keys() - {"G"})
    )  # fmt: skip
    wider = (b := blocks.mamba2) and b.heads * b.head_dim != 2 * h
    latent = blocks.moe and blocks.moe.latent_size
    parts = [("takes {} for nothing", nothing), ("takes {} for Mamba-2", other),
             ("takes {} for 2 hidden_size", ["Mamba-2's inner width"] * bool(wider)),
             ("takes {} for experts of hidden_size", ["experts of a latent"] * bool(latent)), ("leaves out {}", left)]  # fmt: skip
    said = "; ".join(words.format(joined(names)) for words, names in parts if names)
    return f"its own count {said}" if said else "it counts the same operations"


def _by_symbol(plan: Plan) -> dict[str, float]:
    """What it counts of one layer's forward pass, by the pattern's symbol."""
    m, blocks = plan.recipe.model, plan.recipe.blocks
    h = m.hidden_size
    gated = 1.5 if m.activation in GATED else 1.0
    state, groups, heads = 128, 8, 2 * h // 64  # its defaults
    if blocks.mamba2:
        state, groups, heads = blocks.mamba2.state_dim, blocks.mamba2.groups, blocks.mamba2.heads
    inner = 2 * h
    by_symbol = {
        "M": 2 * h * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * h,
        "-": 4 * h * gated * m.ffn_hidden_size,
    }
    if a := blocks.attention:
        width = a.head_dim * m.num_attention_heads
        by_symbol["*"] = 4 * width * (h + h * a.query_groups / m.num_attention_heads) + 2 * m.seq_length * width
    if moe := blocks.moe:
        by_symbol["E"] = 4 * h * gated * (moe.expert_hidden_size * moe.top_k + moe.shared_expert_hidden_size)
    if g := blocks.gdn:
        keys, values = g.key_heads * g.key_head_dim, g.value_heads * g.value_head_dim
        rule = 4 * g.value_heads * g.value_head_dim**2
        by_symbol["G"] = 2 * (h * (g.in_proj_width + values) + g.conv_width * (2 * keys + values) + rule)
    return by_symbol
