"""What the two sides said, as rows: how far off each tensor, loss and count of each step is, and which row is the first."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, isfinite, sqrt
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem
from nam_megatron.judge.same import SHARED_OUT, by_layout
from nam_megatron.prove.cut import OPTIM, leaves
from nam_megatron.recipe import to_tree

START, LOSS, COUNT, GRADIENT, NORM, WEIGHT = "start", "loss", "tokens of experts", "gradient", "norm", "weight"
BITS = "bits of the ranks"  # of two runs that have to be equal to the last one
FORTH, BACK = "output", "output's-gradient"  # of a module
MADE = (FORTH, BACK, GRADIENT, WEIGHT)  # a step makes
ORDER = (START, FORTH, LOSS, COUNT, GRADIENT, NORM, WEIGHT, BITS)


@dataclass(frozen=True)
class Limits:
    """The largest relative difference that counts as rounding.

    first: of the first step's outputs and gradients and of every weight: both sides start from equal bits. later: of those of later steps,
    which see weights that differ in their last bits. loss: of a microbatch. counts: the share of a layer's tokens that may go to
    another expert: ties that rounding decides. why: where the numbers come from. own: of single comparisons, (what, step, name or
    layer), what the noise of that one makes of them.
    """

    first: float
    later: float
    loss: float
    counts: float
    why: str
    own: Mapping[tuple[str, int, Any], float] = MappingProxyType({})

    def of(self, what: str, step: int, at: Any, same: int = 1) -> float:
        """at: the tensor's name, the layer's number, None of a loss. same: the step at whose beginning both sides had the same bits."""
        if what == START:
            return 0.0
        usual = {LOSS: self.loss, COUNT: self.counts}.get(what)
        if usual is None:
            usual = self.first if what == WEIGHT or step <= same else self.later
        return max(usual, self.own.get((what, step, at), 0.0))


EXACT = 1e-9  # of sums of whole numbers' n-ths
# Ranks of a proof on a CPU: each is a process of half a GiB.
MOST = 32
# The share of tokens that bf16 may send to another expert than another order of sums would.
COUNTS_BF16 = 0.02
# fp32 over a few hundred terms: 2e-6 is the largest that any layout was seen to make in a first step, 1.1e-5 in a third.
FP32 = Limits(
    1e-5, 1e-4, 1e-5, 0, "fp32: 1e-5, and 1e-4 for gradients after the first update, or what its note says of rounding"
)


# How often a comparison's own noise it may be off by, and the limit from which on it says nothing.
TIMES, BLUNT = 4.0, 0.5
# A tensor of fewer numbers, or a norm, shares its noise with its like in all layers, and that the other often: one draw of a normal noise
# is below a fourth of another in one case of six, and six times the root mean square of twelve in one of 17,000.
FEW, TIMES_OF_FEW = 8, 6.0
NEAR = 10.0  # times its limit in fp32 that a comparison may be off by for rounding to be asked about


def beyond(noise: Iterable["Row"]) -> Limits:
    """What may be told from noise on a GPU: each comparison by its own, and bf16's rounding at least.

    noise: of one rank that ran twice, the second time from weights of which each was moved by about a rounding of bf16. Two runs differ by
    the order in which atomics add; other kernels and other splits round elsewhere, which a shaken weight stands for. How much comes of
    it differs by a factor of a hundred from tensor to tensor. 2^-8 is a rounding of bf16, and a gradient is the sum of many.
    """
    rounding = 2.0**-8
    why = f"bf16: {8 * rounding:.3f}, twice that after the first update, and {TIMES:g} times what shaken weights make of each tensor"
    why += f"; {TIMES_OF_FEW:g} times of a norm, or of fewer than {FEW} numbers, with their like in all layers"
    return Limits(8 * rounding, 16 * rounding, rounding, COUNTS_BF16, why, _own(noise))


def _own(noise: Iterable["Row"]) -> dict[tuple[str, int, Any], float]:
    own: dict[tuple[str, int, Any], float] = defaultdict(float)
    alike: dict[tuple, list[Row]] = defaultdict(list)
    for row in noise:
        if row.what != START:
            own[row.at] = max(own[row.at], TIMES * row.off)
        if row.what in (FORTH, GRADIENT, WEIGHT) and 0 < row.elements < FEW:
            alike[row.what, row.step, re.sub(r"\d+", "*", row.name.rpartition(".")[0])].append(row)
    for few in alike.values():
        shared = TIMES_OF_FEW * sqrt(sum(row.off**2 for row in few) / len(few))
        own.update({row.at: max(own[row.at], shared) for row in few})
    return own


def may_be_rounding(found: Iterable["Row"]) -> bool:
    """Whether what differs in fp32 is little enough, of quantities that rounding can change, to ask what rounding does to it."""
    bad = [r for r in found if not r.agrees]
    return bool(bad) and all(r.what in (FORTH, LOSS, GRADIENT, WEIGHT) and r.off <= NEAR * r.limit for r in bad)


def rounded(found: Iterable["Row"], noise: Sequence["Row"], by: str) -> tuple["Row", ...]:
    """What differs, by its own noise.

    by: whose noise that is: one rank's from weights of which each was moved by about a rounding of fp32, or, in bf16, one rank's in fp32.

    Noise that sends a token to another expert, or is as large as a choice makes it, is no rounding's, and changes nothing here.
    """
    own = {} if any(r.off for r in noise if r.what == COUNT) else _own(r for r in noise if r.off <= NEAR * r.limit)
    told = []
    for row in found:
        if not row.agrees and own.get(row.at, 0.0) >= row.off:
            note = f"its limit is what rounding may make of it, by {by}: {own[row.at]:.1e}"
            row = replace(row, limit=own[row.at], note=note)
        told.append(row)
    return tuple(told)


@dataclass(frozen=True)
class Row:
    """One compared thing. off: relative difference, in norm; of counts: the share of tokens. note: what is wrong beyond a number.

    elements: of a tensor, all ranks together; 1 of a norm, 0 of what is none.
    """

    what: str
    step: int
    name: str
    off: float
    limit: float
    layer: int | None = None
    kind: str | None = None
    key: str | None = None
    note: str = ""
    elements: int = 0

    @property
    def blunt(self) -> bool:
        """Whether noise alone may be so large that this comparison says nothing, but that it is one of numbers."""
        return self.limit > BLUNT and isfinite(self.off)

    @property
    def at(self) -> tuple[str, int, Any]:
        """What is compared, of all runs alike: see Limits.of."""
        return self.what, self.step, None if self.what == LOSS else self.layer if self.what == COUNT else self.name

    @property
    def agrees(self) -> bool:
        return self.off <= self.limit or self.blunt


def rows(
    reference: Iterable[Sequence[Any]], layout: Sequence[Iterable[Sequence[Any]]], names: Mapping[tuple, Iterable[str]], plan: Plan,
    limits: Limits, steps: Iterable[int], same: int = 1,
) -> tuple[Row, ...]:  # fmt: skip
    """Every comparison of a proof.

    reference, layout: what the one rank and each rank of the layout said (worker.Watch). names: (what, step) -> the tensors that the
    reference has. steps: those that the layout was to do. same: see Limits.of.
    """
    turned = _turned(reference, limits)
    found = [
        *_scalars(reference, layout, plan, limits, steps, same),
        *_tensors(layout, names, plan, limits, steps, same, turned),
        *_norm(layout, names, plan),
    ]
    return tuple(sorted(found, key=_place))


def silent(found: Iterable[Row], layout: Iterable[Iterable], steps: Iterable[int]) -> str:
    """What of a step was not compared at all, since one rank, or one of the layout's, said nothing of it: nothing is proven of that."""
    seen = {(row.what, row.step) for row in found}
    none = [f"{what} of step {n}" for n in steps for what in (LOSS, GRADIENT, WEIGHT) if (what, n) not in seen]
    return f"nothing to compare: no {', no '.join(none)}" if none else mute(layout, steps)


def mute(layout: Iterable[Iterable], steps: Iterable[int]) -> str:
    """Of which step a rank of a layout said no gradient or no weight: another that holds the same would speak for it."""
    for rank, said in enumerate(layout):
        seen = {(what, step) for what, step, *_ in said}
        if none := [f"{what} of step {n}" for n in steps for what in (GRADIENT, WEIGHT) if (what, n) not in seen]:
            return f"rank {rank} said no {', no '.join(none)}"
    return ""


def equal_bits(one: Sequence[Iterable], two: Sequence[Iterable], plan: Plan, steps: Iterable[int]) -> tuple[Row, ...]:
    """Two runs of one layout, rank by rank: in how many ranks a tensor has other bits; in the order in which they were made."""
    wanted = set(steps)
    ranks: list[dict[tuple[int, str], list]] = []
    for said in (*one, *two):
        ranks.append(held := defaultdict(list))
        for what, step, name, *bits in said:
            if what == "bits" and step in wanted:
                held[step, name] += bits  # a rank may hold several parts of a tensor, as of experts
    seen = dict.fromkeys(at for rank in ranks for at in rank)
    back = dict.fromkeys(at for rank in reversed(ranks) for at in rank)  # from the last stage to the first
    made = [at for what in MADE for at in (back if what == BACK else seen) if at[1].startswith(f"{what} ")]
    found = []
    for at in sorted(made, key=itemgetter(0)):
        what, key = at[1].split(" ", 1)
        pairs = [(a.get(at), b.get(at)) for a, b in zip(ranks[: len(one)], ranks[len(one) :], strict=True)]
        if what in (FORTH, BACK):  # a module may keep for later steps what it made in this one, as angles of a rotation
            pairs = [pair for pair in pairs if None not in pair]
        off = sum(a != b for a, b in pairs)
        found.append(Row(BITS, *at, off, 0, *_of_key(plan, key)))
    return tuple(found)


def hooked(plan: Plan) -> bool:
    """Whether a side says what its layers put out: the replay of a graph runs no hooks."""
    return plan.recipe.feature.cuda_graphs is None


def first_off(found: Sequence[Row]) -> Row | None:
    """The row to look at first: of the first step that is off; where its losses agree, the fault is in a backward pass."""
    bad = [r for r in found if not r.agrees]
    if not bad:
        return None
    step = min(r.step for r in bad)
    bad = [r for r in bad if r.step == step]
    if bad[0].what == BITS:  # these come as they were made
        return bad[0]
    if not any(r.what in (START, FORTH, LOSS, COUNT) for r in bad) and (
        gradients := [r for r in bad if r.what == GRADIENT]
    ):
        # A gradient goes from the last layer to the first: the fault is where the first wrong one came out.
        return max(gradients, key=lambda r: (_depth(r), r.off))
    return min(bad, key=_place)


def _place(row: Row) -> tuple:
    return row.step, ORDER.index(row.what), _depth(row), row.name


def _depth(row: Row) -> float:
    if row.layer is not None:
        return row.layer
    return {"embedding": 0.0, "output": 1e6 + 1}.get(row.name.split("_")[0].split(".")[0], 1e6)


def _scalars(
    reference: Iterable, layout: Sequence[Iterable], plan: Plan, limits: Limits, steps: Iterable[int], same: int
) -> Iterator[Row]:
    outputs, losses, counts = _said(reference)
    ours_outputs, ours_losses, ours_counts = _said(itertools.chain.from_iterable(layout))
    wanted = set(steps)
    for (step, module), (squares,) in outputs.items():
        if step in wanted and hooked(plan):
            seen = sqrt(sum(ours_outputs.get((step, module), [])))
            limit = limits.of(FORTH, step, module, same)
            off, place = _relative(seen, sqrt(squares)), _of_key(plan, f"{module}.")
            yield Row(FORTH, step, module, off, limit, *place, elements=1)
    for (step, index), ((loss, tokens),) in losses.items():
        if step not in wanted:
            continue
        seen = ours_losses.get((step, index), [])
        off = max((_relative(value, loss) for value, _ in seen), default=inf)
        note = "" if seen else "no rank computed it"
        if any(count != tokens for _, count in seen):
            off, note = inf, f"over {sorted({c for _, c in seen})} tokens, not {tokens:g}"
        yield Row(LOSS, step, f"microbatch {index + 1}", off, limits.of(LOSS, step, None), note=note)
    for (step, layer), (expected,) in counts.items():
        if step not in wanted:
            continue
        seen = [sum(c) for c in zip(*ours_counts.get((step, layer), []), strict=True)] or [0.0] * len(expected)
        off = sum(abs(a - b) for a, b in zip(seen, expected, strict=True)) / 2
        if sum(seen) != sum(expected):
            off = max(off, abs(sum(seen) - sum(expected)))
        off /= sum(expected)
        yield Row(COUNT, step, "router", off, limits.of(COUNT, step, int(layer)), *_where(plan, int(layer)))


def _said(said: Iterable) -> tuple[dict, dict, dict]:
    found = {what: defaultdict(list) for what in (FORTH, "loss", "count")}
    for what, step, at, *rest in said:
        if what in found:
            found[what][step, at].append(rest[0])
    return tuple(found.values())


def _turned(reference: Iterable, limits: Limits) -> dict[tuple[int, int], float]:
    """How far off the experts' biases of a layer may be after a step because tokens went to other experts, by (step, layer).

    A bias goes one rate up or down by whether its expert got fewer tokens than the mean (megatron-core 0.19.2,
    transformer/moe/moe_utils.py get_updated_expert_bias): with so few tokens more or fewer as the limit lets an expert have, it goes the
    other way.
    """
    found, went, other = {}, {}, {}
    for (step, layer), (counts,) in sorted(_said(reference)[2].items()):
        mean = sum(counts) / len(counts)
        near = limits.of(COUNT, step, int(layer)) * mean
        ways, turns = went.setdefault(layer, [0] * len(counts)), other.setdefault(layer, [0] * len(counts))
        for expert, count in enumerate(counts):
            ways[expert] += (count < mean) - (count > mean)
            turns[expert] += 2 * (abs(count - mean) < near)
        found[step, int(layer)] = hypot(*turns) / hypot(*ways) if any(ways) else 0.0
    return found


def _tensors(
    layout: Sequence[Iterable],
    names: Mapping[tuple, Iterable[str]],
    plan: Plan,
    limits: Limits,
    steps: Iterable[int],
    same: int,
    turned: Mapping[tuple[int, int], float],
) -> Iterator[Row]:
    # (what, step, key) -> window -> (worst of its replicas, whole, elements); None for a tensor that the reference has not.
    found: dict[tuple, dict] = defaultdict(dict)
    for said in layout:
        for what, step, key, *rest in said:
            if what in ("gradient", "weight"):
                window, off, whole, elements = rest
                worst = max(off, found[what, step, key].get(window, (0.0,))[0]) if isfinite(off) else inf
                found[what, step, key][window] = worst, whole, elements
    pools: dict[tuple, float] = defaultdict(float)
    for (what, step, key), windows in found.items():
        if pool := _pool(what, key):
            pools[what, step, pool] = max(pools[what, step, pool], *(sqrt(w) for _, w, _ in windows.values()))
    for (what, step), keys in names.items():
        if step not in {0, *steps} or (step == 0) != (what == "weight" and step == 0):
            continue
        said_as = START if step == 0 else what
        for key, elements in keys:
            windows, place = found.pop((what, step, key), {}), _of_key(plan, key)
            limit = limits.of(said_as, step, key, same)
            if said_as == WEIGHT and key.endswith("router.expert_bias"):
                limit = max(limit, turned.get((step, place[0]), 0.0))
            if None in windows:
                yield Row(said_as, step, key, inf, limit, *place, note="another shape than on one rank")
            elif sum(n for _, _, n in windows.values()) != elements:
                yield Row(said_as, step, key, inf, limit, *place, note="the ranks do not hold all of it")
            else:
                off = sqrt(sum(o for o, _, _ in windows.values()))
                whole = pools.get((what, step, _pool(what, key)), sqrt(max(w for _, w, _ in windows.values())))
                if said_as == WEIGHT and not key.endswith("router.expert_bias"):
                    # A step may take a weight to where it is next to nothing.
                    whole = max(whole, OPTIM["lr"] * sqrt(elements))
                yield Row(
                    said_as,
                    step,
                    key,
                    off / whole if whole else (inf if off else 0.0),
                    limit,
                    *place,
                    elements=elements,
                )
    for what, step, key in found:
        if step in {0, *steps}:
            yield Row(
                START if step == 0 else what,
                step,
                key,
                inf,
                0.0,
                *_of_key(plan, key),
                note="one rank has no such tensor",
            )


def _norm(layout: Iterable[Iterable], names: Mapping[tuple, Iterable], plan: Plan) -> Iterator[Row]:
    """Whether the norm that clips counts every element once, by the tensor that is worst off. Adam's steps hardly show it."""
    counted: dict[str, float] = defaultdict(float)
    for what, _, key, *rest in itertools.chain.from_iterable(layout):
        if what == NORM:
            counted[key] += rest[0]
    times = {key: counted[key] / elements for key, elements in names.get((GRADIENT, 1), ()) if key in counted}
    if times:
        key = max(times, key=lambda key: abs(times[key] - 1))
        off = abs(times[key] - 1)
        note = f"counted {times[key]:.3g} times" if off > EXACT else ""
        yield Row(NORM, 1, key, off, EXACT, *_of_key(plan, key), note=note)


def _relative(value: float, expected: float) -> float:
    off = abs(value - expected) / abs(expected) if expected else abs(value)
    return off if isfinite(off) else inf


# How residual streams mix: gradients that are sums over all tokens and may cancel to nothing, as where all streams are equal still.
POOLED = re.compile(r"^.*\.hyper_connection\.")


def _pool(what: str, key: str) -> str | None:
    """Of a tensor whose difference is judged by the largest of several: what they have in common."""
    match = POOLED.match(key) if what == GRADIENT else None
    return match[0] if match else None


LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
MTP = re.compile(r"^mtp\.layers\.\d+\.(?:mtp_model_layer\.layers\.(\d+)\.)?")


def _of_key(plan: Plan, key: str) -> tuple[int | None, str | None, str | None]:
    """Layer number, kind and recipe key of a checkpoint's tensor."""
    if match := LAYER.match(key):
        return _where(plan, int(match[1]) + 1)
    if match := MTP.match(key):
        kind = plan.mtp[int(match[1])] if match[1] else None
        return None, f"MTP {kind or 'depth'}", "feature.mtp.depths"
    if key.startswith("output_layer"):
        return None, "output layer", "model.vocab_size"
    if key.startswith("embedding"):
        return None, "embedding", "model.vocab_size"
    return None, "final norm", "model.normalization"


def _where(plan: Plan, number: int) -> tuple[int, str, str]:
    kind = plan.layers[number - 1].kind
    return number, kind, "model.ffn_hidden_size" if kind == "mlp" else f"model.blocks.{kind}"


def refusals(plan: Plan, device: str) -> Iterator[Problem]:
    """What speaks against running a plan's two sides on this device, as far as it can be told without torch."""
    for seam in plan.not_built:
        yield Problem(f"`{seam.owner}` is not built: {seam.missing}")
    for key in ("hidden_dropout", "attention_dropout"):
        if getattr(plan.recipe.model, key) and plan.recipe.world_size > 1:
            message = "several ranks drop other values than one does, and nothing could be compared"
            yield Problem(message, key=f"model.{key}", hint=f"`model.{key}=0.0`: the rest of the layout is the same")
    if device == "cpu" and plan.recipe.model.linear_bias and "moe" in plan.kinds:
        message = (
            "Megatron's own linear layers, which a CPU takes for Transformer Engine's, do not train experts with biases"
        )
        yield Problem(message, key="model.linear_bias", hint="set it to false, or prove it with `device=cuda`")
    flat = dict(leaves(to_tree(plan.recipe)))
    for key, why, cut in by_layout(flat):
        if cut is SHARED_OUT:
            ranks = plan.recipe.data_parallel
            split = f"{ranks} of them" if ranks > 1 else None
        else:
            split = next((f"`{name}={flat[name]}`" for name in cut if flat[name] not in (1, False)), None)
        if split:
            message = f"{why}: with {split} this trains another model than one rank does"
            yield Problem(message, key=key, hint="prove the rest of the layout without it")
    if device == "cpu" and (ranks := plan.recipe.world_size) > MOST:
        hint = "the same kinds of parallelism of fewer ranks: `cluster.nodes=1 parallel.expert=2 parallel.pipeline=2`"
        yield Problem(f"{ranks} ranks would run on this host; {MOST} at most", key="parallel", hint=hint)
