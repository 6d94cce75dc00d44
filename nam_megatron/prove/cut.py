"""What is run to prove a plan: its recipe cut down with the structure kept, and the one-rank recipe that it is compared with.

The rule on a CPU. Kept: kinds, their order, index reuse, MTP, the layout with every degree of it, features, what the recipe chooses
among kernels. Cut:

- widths, each to the smaller of its own and that of `widths`, a kind's own by its `small`: every rank has at least two of whatever is
  shared, and sizes that meet in one matrix differ where the model's may. The initialisation grows with the root of what the width lost,
  so that blocks weigh what they weigh;
- depth, to the shortest run of at least four layers that holds every kind, and a layer that reuses a top-k where one does. Of a pipeline
  each segment is cut by itself, to the shortest run of two layers or more with just its kinds, uneven where the model's are; if that takes
  more than 52 layers (on a GPU 24), to a run for all that has a legal place for every cut, and what a segment then lacks is said;
- data parallel ranks to two, or to what two copies of each expert need where it has several; sequences to 32 tokens, two samples a
  microbatch, four microbatches a step, or two a rank where that is more, so that most layouts of a recipe share one reference.

On a GPU widths stay but the vocabulary, of 8,192 at most, and depth is cut by the same rule. Sequences are cut to 512 tokens, of which
DSA selects at most 128, one sample a microbatch: the reference's naive kernels keep whole [s, s] matrices and the state of every token,
which 4,096 tokens of NAM56R's width are 140 GiB of.

The optimizer's numbers are the command's on both sides: a learning rate at which few steps move the weights and which falls with each,
no warm-up, a clip that clips, and an epsilon that makes Adam's step a smooth function of the gradient (with 1e-8 its first step is the
gradient's sign, and a rounding error becomes a whole step).
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.compose import composed
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe import Recipe, at, parsed, resolved, to_tree
from nam_megatron.recipe.data import mock
from nam_megatron.rehearsal import ANY, CPU_DOES_WITHOUT
from nam_megatron.words.site import Layer

SEQUENCE, SAMPLES, LEAST = 32, 2, 4
MOST = {"cpu": 52, "cuda": 24}  # layers of a pipeline whose segments keep their kinds
SHORTEST, TRIED = 4, 64  # runs of a segment, and choices of them, that are looked at
ON_GPU = {"model.seq_length": 512, "model.vocab_size": 8192, "schedule.micro_batch_size": 1} | {
    block.at(key): most for block in KINDS.values() for key, most in block.cut_on_gpu.items()
}
TILE = 128  # tokens of a sequence, whose part on a GPU is a multiple
OPTIM: dict[str, Any] = {"lr": 0.01, "min_lr": 0.001, "decay": "linear", "warmup_steps": 0, "eps": 1e-3}
CLIP = 0.5


Layers = Sequence[Layer]


def widths(plan: Plan) -> dict[str, int]:
    """The widths that a CPU gets, by key, for the degrees of the layout and what is taken in pieces."""
    t, shares = plan.site.tensor, plan.site.tensor * plan.site.context
    found = {
        "model.hidden_size": 64 * -(-t // 8),
        "model.ffn_hidden_size": 96 * -(-t // 8),
        "model.num_attention_heads": max(4, 2 * t),
        "model.vocab_size": 128 * -(-t // 8),
        "model.seq_length": _multiple(max(SEQUENCE, 4 * shares), _parts(plan.recipe)),
    }
    small = ((b.at(key), width) for b in plan.blocks for key, width in b.small(plan.site).items())
    return found | dict(small)


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _parts(recipe: Recipe) -> int:
    """Of a sequence's queries, each taken by itself."""
    pieces, context = max((block.pieces for block in recipe.blocks.all()), default=1), recipe.parallel.context
    return pieces * (2 * context if context > 1 else 1)


# The one rank: these options of conf/, and the keys that it has from them. Everything else is the same on both sides.
ONE_RANK = ("lane=author_dp", "cluster=h200_1", "precision=bf16", "execution=plain")
HAS = (
    *("execution", "parallel", "cluster.nodes", "cluster.gpus_per_node", "precision.cross_entropy"),
    *("precision.fused_grad_accumulation", "precision.norm_kernels", "precision.attention_kernels"),
)
WITHOUT = ("feature.recompute", "feature.cuda_graphs", "feature.megatron_fsdp")


@cache
def plain() -> Mapping[str, Any]:
    """What the one rank does without: each key, and what it says there."""
    config, _ = composed("recipe", ONE_RANK)
    tree = OmegaConf.to_container(config, resolve=True)
    keys = dict(leaf for key in HAS for leaf in leaves(at(tree, key), key))
    features = {f"feature.{name}.{key}": value for name, feat in FEATURES.items() for key, value in feat.plain.items()}
    return keys | dict.fromkeys(WITHOUT) | features


# With which alone projections whose columns 16 does not divide multiply in FP8: then one rank has them, too.
PADS = tuple(block.at(key) for block in KINDS.values() for key in block.padded)
# What runs by Megatron's modules where neither ours nor plain torch takes it.
MODULES = {b.at("kernels"): "megatron" for b in KINDS.values() if b.stock and "kernels" in b.model_fields}

CAPTURE, RESHARDABLE = "feature.cuda_graphs.warmup_steps", "feature.distributed_optimizer.reshardable"

# Features that a CPU has no way around, and what to call them. Megatron's Muon wants bf16 weights, and what is proven here is fp32.
NOT_ON_A_CPU = {"muon": "Megatron's Muon, in bf16 alone,"}
# On every run on a CPU, whatever the recipe.
CPU_STANDS_IN = (
    "precision.params: fp32 in place of bf16",
    "Transformer Engine's linear layers, norms, attention and grouped GEMM: plain torch of the same parameters and sharding",
    "torch's grouped GEMM of a GPU: its form for a CPU",
    "NCCL, streams and their overlap: gloo",
)


@dataclass(frozen=True)
class Pair:
    """The two runs of a proof, and what they leave unproven: sentences that name a key."""

    layout: Lowering
    reference: Lowering
    full: Plan
    unproven: tuple[str, ...]

    @property
    def shrunk(self) -> tuple[str, ...]:
        """What was cut, for people: `key: from -> to`, `none` where there is no such key."""
        before, after = (dict(leaves(to_tree(x.recipe))) for x in (self.full, self.layout.plan))
        names = [k for k in before | after if not k.startswith("assumptions.")]
        pairs = {k: (before.get(k, "none"), after.get(k, "none")) for k in names}
        return tuple(f"{k}: {was} -> {now}" for k, (was, now) in pairs.items() if was != now)


def pair(recipe: Recipe, device: str, steps: int, seed: int = 1234) -> Pair:
    """The layout of `recipe` and one rank's reference, both cut by the rule above.

    Raises:
        Refused: the recipe itself is refused, or holds what this device cannot run.
    """
    full = translate(recipe).plan
    recipe = full.recipe  # with what was granted of its wishes
    if device == "cpu":
        problems = [
            Problem(f"{title} cannot be proven on a CPU", key=f"feature.{name}.enabled", hint="`device=cuda`, on GPUs")
            for name, title in NOT_ON_A_CPU.items()
            if at(to_tree(recipe), f"feature.{name}") is not None
        ]
        if problems:
            raise Refused(problems)
    tree = copy.deepcopy(to_tree(recipe))
    unproven = [*CPU_STANDS_IN] if device == "cpu" else []
    if device == "cpu":
        unproven += _without_kernels(tree, full)
        unproven += [text for block in full.blocks for text in block.unproven()]
        for key, width in widths(full).items():
            _least(tree, key, width)
        if at(tree, "model.blocks.moe.group_limit"):  # of as few experts as are left
            _put(tree, "model.blocks.moe.group_limit", [2, 1])
        # Blocks weigh as much beside the residual stream as at full width.
        narrow = (full.recipe.model.hidden_size / at(tree, "model.hidden_size")) ** 0.5
        _put(tree, "model.init_std", round(full.recipe.model.init_std * narrow, 4))
        _keep_grouped(tree, recipe)
    else:
        for key, most in ON_GPU.items():
            _least(tree, key, _multiple(most, _parts(recipe) * TILE) if key == "model.seq_length" else most)
        if graphs := full.recipe.feature.cuda_graphs:
            # The last step at least is replayed, or nothing would have been seen of what is captured.
            if steps == 1 and graphs.warmup_steps:
                unproven.append("feature.cuda_graphs: of one step nothing is captured")
                _put(tree, "feature.cuda_graphs", None)
            else:
                unproven.append(
                    "feature.cuda_graphs: what single layers put out, since the replay of a graph runs no hooks"
                )
                _least(tree, CAPTURE, max(1, steps - 1))
    _batches(tree, recipe, full, steps, seed, device)
    if at(tree, RESHARDABLE) and not at(to_tree(recipe), RESHARDABLE):
        unproven.append(f"{RESHARDABLE}: true in place of false (so that one rank reads the layout's checkpoint)")
    layout, one = _shortest(tree, full, device)
    one["model"]["pattern"] = one["model"]["pattern"].replace("|", "")
    unproven += _other_segments(full, layout.plan)
    for key, value in plain().items():
        if not (key in PADS and at(one, "feature.fp8")):
            _put(one, key, value)
    # Whether or not this layout can: others share its reference. What is not sharded is so without a word.
    if at(one, "feature.distributed_optimizer.enabled") and not at(one, "feature.muon.enabled"):
        _put(one, RESHARDABLE, True)
    return Pair(layout, _reference(one), full, tuple(unproven))


def _reference(one: dict[str, Any]) -> Lowering:
    try:
        return _lowered(one)
    except Refused as refused:
        # What our layers do not take, LayerNorm or queries without a latent, runs by Megatron's; whole projections may need no columns.
        for key, value in (MODULES | dict.fromkeys(PADS, False)).items():
            if any(problem.key == key for problem in refused.problems):
                _put(one, key, value)
        return _lowered(one)


def resumable(recipe: Recipe) -> bool:
    """Whether another layout can read this one's optimizer, where the recipe asks for what that takes: nothing but Adam is reshardable."""
    return not any(feature.bound for feature in recipe.feature.all())


def _without_kernels(tree: dict[str, Any], full: Plan) -> Iterator[str]:
    """Put what a CPU runs in the place of what it cannot; says so of what stands."""
    for key, was, gets, why in CPU_DOES_WITHOUT:
        value = at(tree, key)
        if value is not None and was in (value, ANY):
            _put(tree, key, gets)
            yield f"{key}: {'off' if gets is None else gets} in place of {'what it says' if was is ANY else value} ({why})"


def _keep_grouped(tree: dict[str, Any], recipe: Recipe) -> None:
    """Query groups below, at or above one a head stay on their side of it."""
    heads, groups = at(tree, "model.num_attention_heads"), at(tree, "model.blocks.attention.query_groups")
    own = at(to_tree(recipe), "model.blocks.attention.query_groups")
    if groups is not None and (own == recipe.model.num_attention_heads or heads % groups):
        _put(tree, "model.blocks.attention.query_groups", heads)


def _batches(tree: dict[str, Any], recipe: Recipe, full: Plan, steps: int, seed: int, device: str) -> None:
    p = recipe.parallel
    dense, sparse = p.tensor * p.pipeline * p.context, p.pipeline * p.expert * p.expert_tensor
    copies = min(2, recipe.world_size // sparse)  # of each expert
    data = min(2, recipe.data_parallel)
    while (dense * data) % sparse or dense * data < copies * sparse:
        data += 1
    _put(tree, "cluster.nodes", 1)
    _put(tree, "cluster.gpus_per_node", dense * data)
    micro = min(SAMPLES, at(tree, "schedule.micro_batch_size"))
    count = max(2 * p.pipeline if p.virtual_pipeline > 1 else max(2, p.pipeline), 4 // data)
    schedule = dict(micro_batch_size=micro, global_batch_size=micro * data * count, train_steps=steps)
    schedule |= dict(decay_steps=steps, seed=seed, eval_steps=0, log_interval=1, save=None, load=None)
    schedule |= dict(save_interval=None, stop_every=None, manual_gc_interval=0, timeout_minutes=5)
    for key, value in schedule.items():
        _put(tree, f"schedule.{key}", value)
    for key, value in OPTIM.items():
        _put(tree, f"optim.{key}", value)
    _put(tree, "optim.clip_grad", min(CLIP, recipe.optim.clip_grad))
    if resumable(recipe) and at(tree, "feature.distributed_optimizer.enabled"):
        _put(tree, RESHARDABLE, True)
    tree["data"] = mock(tree["data"])
    _put(tree, "feature.fim", None)


def _shortest(tree: dict[str, Any], full: Plan, device: str) -> tuple[Lowering, dict[str, Any]]:
    """The plan of the shortest run of layers that holds what the whole model holds; of several the first."""
    reuse, refused = bool(full.reusing_layers), None
    for segments in itertools.chain(
        itertools.islice(_of_each_segment(full, MOST[device]), TRIED), _of_all_layers(full)
    ):
        made = copy.deepcopy(tree)
        _keep_layers(made, full, segments)
        try:
            found = _lowered(made)
        except Refused as why:  # no legal cut for the pipeline, no spacing that Megatron's index reuse knows
            refused = refused or why
            continue
        if found.plan.reusing_layers or not reuse:
            return found, made
    assert refused is not None
    raise Refused([replace(p, message=f"cut down for a proof: {p.message}") for p in refused.problems])


def _of_each_segment(full: Plan, most: int) -> Iterator[Sequence[Layers]]:
    """Runs of each pipeline segment's layers with all of its kinds, together the shortest first, as uneven as the model's are."""
    if len(full.segments) == 1:
        return
    shares, runs = {b.kind: getattr(b, b.share_by) for b in full.blocks if b.share_by}, []
    for number, layers in enumerate(full.segments, 1):
        kinds, least = {layer.kind for layer in layers}, min(2, len(layers))
        whole = [
            run for n in range(least, len(layers) + 1) for run in _runs(layers, n) if {layer.kind for layer in run} == kinds
        ]  # fmt: skip
        for kind, every in shares.items():
            if any(layer.kind == kind for later in full.segments[number:] for layer in later):
                # The next begins a share of a top-k of its own.
                whole = [run for run in whole if sum(layer.kind == kind for layer in run) % every == 0]
        # Of runs that read alike one.
        alike = {tuple(layer.kind for layer in run): run for run in reversed(whole)}
        runs.append(list(alike.values())[: -SHORTEST - 1 : -1])
    uneven = len({*map(len, full.segments)}) > 1
    choices = itertools.islice(itertools.product(*runs), 100_000)
    found = [c for c in choices if LEAST <= sum(map(len, c)) <= most]
    yield from sorted(found, key=lambda chosen: ((len({*map(len, chosen)}) > 1) != uneven, sum(map(len, chosen))))


def _of_all_layers(full: Plan) -> Iterator[Sequence[Layers]]:
    """Runs with every kind, in one piece: the planner cuts them."""
    kinds = {layer.kind for layer in full.layers}
    for depth in range(min(len(full.layers), max(LEAST, 2 * len(full.segments))), len(full.layers) + 1):
        yield from ([run] for run in _runs(full.layers, depth) if {layer.kind for layer in run} == kinds)


def _runs(layers: Layers, length: int) -> Iterator[Layers]:
    return (layers[first : first + length] for first in range(len(layers) - length + 1))


def _keep_layers(tree: dict[str, Any], full: Plan, segments: Sequence[Layers]) -> None:
    """Keep these layers, and where pipes part them."""
    layers = [layer for segment in segments for layer in segment]
    tree["model"]["pattern"] = "|".join("".join(layer.letter for layer in segment) for segment in segments)
    tree["model"]["depth"] = len(layers)
    substitutes = []
    for sub in tree["model"]["substitute"]:
        kept = [layer.rank for layer in layers if layer.letter == sub["letter"]]
        if ranks := [now for now, rank in enumerate(kept) if rank in sub["ranks"]]:
            substitutes.append({**sub, "ranks": ranks})
    tree["model"]["substitute"] = substitutes
    recompute = (tree.get("feature") or {}).get("recompute") or {}
    if recompute.get("layers"):
        recompute["layers"] = min(recompute["layers"], max(1, len(layers) // full.recipe.parallel.pipeline))


def _other_segments(full: Plan, small: Plan) -> Iterator[str]:
    """What pipeline segments of the cut are otherwise than the model's."""
    kinds = ([{layer.kind for layer in segment} for segment in plan.segments] for plan in (full, small))
    lacks = [sorted(whole - cut) for whole, cut in zip(*kinds, strict=True)]
    if any(lacks):
        said = "; ".join(f"{', '.join(names)} in segment {number}" for number, names in enumerate(lacks, 1) if names)
        yield f"parallel.pipeline: what the model has and the cut has not: {said}"
    if len({*map(len, full.segments)}) > 1 and len({*map(len, small.segments)}) == 1:
        yield "parallel.pipeline: the model's segments are uneven, those of the cut are not"


def _lowered(tree: dict[str, Any]) -> Lowering:
    """The plan of a tree that was cut; nothing may be left there that needs what the whole recipe allows."""
    try:
        return translate(_recipe(tree))
    except Refused as refused:
        idle = {problem.key for problem in refused.problems if problem.law == "waiver-of-nothing"}
        if not idle:
            raise
    allow = {law: why for law, why in tree["allow"].items() if f"allow.{law}" not in idle}
    return translate(_recipe(tree | {"allow": allow}))


def _recipe(tree: Mapping[str, Any]) -> Recipe:
    """What stands of a tree that was cut: a letter or key of which nothing is left goes."""
    return resolved(parsed(tree), lambda key: False)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a key that there is; a block or feature that does not stand has none."""
    *parents, last = key.split(".")
    node = at(tree, ".".join(parents))
    if isinstance(node, dict) and last in node:
        node[last] = value


def _least(tree: dict[str, Any], key: str, width: int) -> None:
    own = at(tree, key)
    if own is not None:
        _put(tree, key, min(own, width))


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a recipe's tree."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else name)
    else:
        yield key, tree
