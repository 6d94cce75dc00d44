"""Laws on the model as a whole and on the ranks that share it."""

from collections.abc import Iterator
from math import gcd, lcm

from nam_megatron.blocks import Place
from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import counted, joined
from nam_megatron.features.mtp import Mtp
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.laws.sizes import BF16_ROW
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.layout import Device, Parallel
from nam_megatron.recipe.model import Model
from nam_megatron.targets import Target

ARGUMENTS = "training/arguments.py"
PRODUCT = "the product must divide nodes * gpus_per_node"


def _dense_misfit(recipe: Recipe, parallel: Parallel) -> Words | None:
    size = parallel.tensor * parallel.pipeline * parallel.context
    return {"gpus": counted(recipe.world_size, "GPU"), "size": size} if recipe.world_size % size else None


def _experts_misfit(recipe: Recipe, parallel: Parallel) -> Words | None:
    others = parallel.pipeline * parallel.expert_tensor
    if not recipe.world_size % (others * parallel.expert):
        return None
    shared = gcd(parallel.expert, recipe.world_size // others)
    fits = f"; here `parallel.expert={shared}`" if not recipe.world_size % others else ""
    return {"gpus": counted(recipe.world_size, "GPU"), "size": others * parallel.expert, "or_fits": fits}


def _ranks_without_experts(plan: Plan, parallel: Parallel) -> Iterator[Words]:
    for name in ("expert", "expert_tensor"):
        degree = getattr(parallel, name)
        if "moe" not in plan.kinds and degree > 1:
            yield {"key": f"parallel.{name}", "name": name, "degree": degree}


def _uneven_heads(plan: Plan, model: Model) -> Words | None:
    """Megatron divides where `kv_channels` is not given, which attention and MLA give."""
    if plan.kinds & {"attention", "mla", "dsa"} or model.hidden_size % model.num_attention_heads == 0:
        return None
    step = lcm(BF16_ROW, model.num_attention_heads)
    whole = [(model.hidden_size // columns, columns) for columns in (64, 128) if model.hidden_size % columns == 0]
    heads = " or ".join(f"`model.num_attention_heads={number}` ({columns} columns a head)" for number, columns in whole)
    return {"heads": f"{heads}, or " if heads else "", "next": (model.hidden_size // step + 1) * step}


def _unshared_widths(model: Model, parallel: Parallel) -> Iterator[Words]:
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size"):
        if getattr(model, name) % parallel.tensor:
            yield {"key": f"model.{name}", "name": name, "size": getattr(model, name)}


def _unread(plan: Plan, model: Model) -> Iterator[Words]:
    """Values that Megatron's config would hold and a module would not read."""
    for name, modules in (("attention_dropout", "dropout"), ("norm_epsilon", "epsilon")):
        for block in plan.blocks:
            value, where = block.fixed.get(name, (None, ""))
            if value is not None and block.kind in plan.kinds and value != getattr(model, name):
                numbers = plan.numbers(block.kind)
                layers = f" ({len(numbers)} layers)" if numbers else ""
                yield {"key": f"model.{name}", "name": name, "value": value,
                       "what": f"{block.title} has no {modules} but {value:g}: {where}{layers}"}  # fmt: skip


def _untried(plan: Plan, recipe: Recipe, parallel: Parallel) -> Iterator[Words]:
    """Where a kind would be that does not say that it is right there."""
    graphs, fp8 = recipe.feature.cuda_graphs, recipe.feature.fp8
    asked: tuple[tuple[Place, object, str, str], ...] = (
        ("tensor", parallel.tensor > 1, "parallel.tensor=1", "over tensor ranks"),
        ("sequence", parallel.sequence, "parallel.sequence=false", "under sequence parallelism"),
        ("context", parallel.context > 1, "parallel.context=1", "over context ranks"),
        ("expert", parallel.expert > 1, "parallel.expert=1", "over expert ranks"),
        ("fp8", fp8, "feature.fp8.recipe=none", "in FP8"),
        ("graphs", graphs, "feature.cuda_graphs.impl=none", "inside CUDA graphs"),
        ("mtp", plan.mtp, "feature.mtp.depths=0", "inside MTP"),
    )
    for kind in sorted(plan.kinds):
        for place, there, without, where in asked:
            if (kind in plan.mtp if place == "mtp" else there) and place not in KINDS[kind].tried:
                key, _, off = without.partition("=")
                yield {"key": key, "off": off, "what": KINDS[kind].title, "where": where}


def _on_no_gpu(mtp: Mtp, plan: Plan, recipe: Recipe) -> Iterator[Words]:
    """What no CPU can show: GPUs have had attention and a dense MLP there."""
    feature = recipe.feature
    more = [KINDS[kind].title for kind in KINDS if kind in plan.mtp and kind not in ("attention", "mla", "mlp")]
    if more and feature.fp8:
        yield {"kinds": joined(more), "where": "in FP8", "off": "feature.fp8.recipe=none"}
    if more and feature.cuda_graphs:
        yield {"kinds": joined(more), "where": "beside CUDA graphs", "off": "feature.cuda_graphs.impl=none"}


def _unserved(device: Device, target: Target) -> Words | None:
    """Whether what is said here is true on the device: kernels, forecasts and Megatron's own demands are an architecture's."""
    if device.capability in target.chips:
        return None
    served = ", ".join(f"{'.'.join(map(str, c))} {name}" for c, name in target.chips.items())
    missing = target.lacking.get(device.capability, "nothing here was measured there")
    return {"capability": ".".join(map(str, device.capability)), "missing": missing, "served": served}


LAYOUT = (
    Law(id="device-unserved", category=OURS, key="device.capability",
        when=_unserved, says="device `{device.name}` of compute capability {capability} is not served: {missing}",
        way="there is {served}", source="nam_megatron/targets"),
    Law(id="layout-beyond-gpus", category=MATHS, key="cluster.gpus_per_node",
        when=_dense_misfit,
        says="{gpus} cannot hold tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {size}",
        way=PRODUCT),
    Law(id="expert-layout-beyond-gpus", category=MATHS, key="parallel.expert",
        when=_experts_misfit,
        says="{gpus} cannot hold pipeline {parallel.pipeline} x expert {parallel.expert} x expert tensor "
            "{parallel.expert_tensor} = {size}", way=PRODUCT + "{or_fits}"),
    Law(id="sequence-without-tensor", category=WRONG, key="parallel.sequence",
        when=lambda parallel: parallel.sequence and parallel.tensor == 1,
        says="Megatron would switch sequence parallelism off at tensor size 1", way="set `parallel.sequence=false`",
        source=ARGUMENTS),
    Law(id="tensor-over-hosts", category=UNTRIED, key="parallel.tensor",
        when=lambda parallel, cluster: parallel.over_hosts(parallel.tensor, cluster),
        says="tensor ranks on several hosts have not been tried: two sums of each layer would wait for the network",
        way="take a divisor of {cluster.gpus_per_node}, or pipeline stages for the rest"),
    Law(id="expert-ranks-without-experts", category=CONTRADICTION, key="parallel.expert",
        when=_ranks_without_experts, says="{name} parallel {degree} in a model without experts", way="set it to 1"),
)  # fmt: skip

LAWS = (
    Law(id="hidden-size-unaligned", category=REFUSES, key="model.hidden_size",
        when=lambda model: model.hidden_size % BF16_ROW and {"next": (model.hidden_size // BF16_ROW + 1) * BF16_ROW},
        says="hidden_size {model.hidden_size} is not a multiple of 8: rows of bf16 would not be 16 bytes apart",
        way="{next} fits", source="cuBLAS: GEMMs want rows 16 bytes apart"),
    Law(id="hidden-size-heads", category=REFUSES, key="model.hidden_size",
        when=_uneven_heads,
        says="hidden_size {model.hidden_size} is not a multiple of num_attention_heads {model.num_attention_heads}",
        way="{heads}{next} fits {model.num_attention_heads} heads; widths that have keys of their own, as an MLP's, stay as they are",
        source=ARGUMENTS),
    Law(id="widths-unshared", category=REFUSES, key="model.hidden_size",
        when=_unshared_widths, says="{name} {size} is not divisible by tensor size {parallel.tensor}",
        way="fewer tensor ranks, or a multiple of {parallel.tensor}, which is another model",
        source="core/tensor_parallel/layers.py"),
    Law(id="bias-of-nothing", category=CONTRADICTION, key="model.linear_bias",
        when=lambda model, plan: model.linear_bias and not plan.kinds & {*LETTERS["A"], *LETTERS["E"]},
        says="no layer has such a bias: none is attention or an MLP", way="set `model.linear_bias=false`"),
    Law(id="sequence-unshared", category=MATHS, key="model.seq_length",
        when=lambda model, parallel: parallel.sequence
            and model.seq_length % (parallel.tensor * parallel.context)
            and {"ranks": parallel.tensor * parallel.context},
        says="a sequence of {model.seq_length} cannot be shared by {ranks} ranks"),
    Law(id="sequence-context", category=REFUSES, key="model.seq_length",
        when=lambda model, parallel: parallel.context > 1 and model.seq_length % (2 * parallel.context),
        says="a sequence of {model.seq_length} cannot be cut into 2 x context {parallel.context}", source=ARGUMENTS),
    Law(id="mtp-tied-embeddings", category=UNTRIED, key="model.tied_embeddings",
        when=lambda model, mtp: model.tied_embeddings, says="MTP with tied embeddings is not tested upstream",
        way="set it to false"),
    Law(id="value-unread", category=WRONG, key="model.norm_epsilon",
        when=_unread, title="a layer has another dropout or epsilon, whatever the model says", says="{what}",
        way="set `model.{name}={value:g}`", source="the kinds' `fixed`, each with its place in Megatron"),
    Law(id="mtp-kinds-untried", category=UNTRIED, key="feature.mtp.pattern",
        when=_on_no_gpu, says="inside MTP nobody has tried {kinds} {where}", way="set it to `A-`, or `{off}`"),
    Law(id="kind-untried", category=UNTRIED, key="model.letters",
        when=_untried, says="{what}: nobody has tried such a layer {where}", way="set `{key}={off}`"),
)  # fmt: skip
