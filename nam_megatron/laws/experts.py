"""Laws on mixtures of experts: their sizes, their router, and how tokens travel to them."""

from collections.abc import Iterator

from nam_megatron.blocks.moe.block import Moe
from nam_megatron.errors import quoted
from nam_megatron.features.names import Features
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.laws.sizes import BF16_ROW, UNEVEN, uneven
from nam_megatron.recipe.layout import Parallel
from nam_megatron.recipe.model import Model

AT, HOW = "model.blocks.moe.", "execution.moe."
CONFIG = "core/transformer/transformer_config.py"
EXPERTS = "core/transformer/moe/experts.py"
LOCAL = "nam_megatron/blocks/moe/layer.py"


def elsewhere(moe: Moe) -> str:
    """The way out of our dispatchers. Two keys go with them alone: one hint for all."""
    words = [f"{HOW}dispatcher=alltoall"]
    if moe.on_gpu:
        words.append(f"{HOW}expert_gemm=transformer_engine")
    if moe.fused_router_gradient:
        words.append(f"{HOW}fused_router_gradient=false")
    return f"set {quoted(words)}"


def whose(moe: Moe) -> str:
    return "torch's grouped GEMM" if moe.expert_gemm == "torch" else "QuACK's GEMM"


def _groups_limit_nothing(moe: Moe) -> Words | None:
    groups, chosen = moe.group_limit or (1, 0)
    limits = moe.group_limit is None or chosen < groups < moe.experts
    return None if limits else {"groups": groups, "chosen": chosen}


def _indivisible_top_k(moe: Moe) -> Words | None:
    """Megatron scores a group by the sum of its top_k // chosen best experts."""
    if moe.group_limit is None or _groups_limit_nothing(moe) or moe.top_k % moe.group_limit[1] == 0:
        return None
    return {"chosen": moe.group_limit[1]}


def _few_experts(moe: Moe) -> Words | None:
    if moe.group_limit is None or _groups_limit_nothing(moe) or _indivisible_top_k(moe):
        return None
    groups, chosen = moe.group_limit
    return {"chosen": chosen} if moe.top_k > chosen * (moe.experts // groups) else None


def _ours(parallel: Parallel) -> str:
    """The dispatcher of ours that a layout takes."""
    return "gathered" if parallel.expert > 1 else "local"


def _on_several(moe: Moe, parallel: Parallel) -> Words | None:
    if moe.dispatcher != "local" or parallel.expert * parallel.expert_tensor == 1:
        return None
    whole = moe.on_gpu and parallel.expert_tensor == 1
    return {"way": f"set `{HOW}dispatcher=gathered`" if whole else elsewhere(moe)}


def _counts_on_host(moe: Moe, parallel: Parallel) -> Words | None:
    if not moe.on_gpu or moe.dispatcher_is_ours:
        return None
    return {"or_ours": "" if parallel.expert_tensor > 1 else f", or `{HOW}dispatcher={_ours(parallel)}`"}


def _unforked(moe: Moe, parallel: Parallel) -> Words | None:
    if not moe.fused_router_gradient or moe.dispatcher_is_ours:
        return None
    ours = parallel.expert == 1 or (moe.on_gpu and parallel.expert_tensor == 1)
    return {"or_ours": f", or `{HOW}dispatcher={_ours(parallel)}`" if ours else ""}


def _odd_rows(moe: Moe, model: Model) -> Iterator[Words]:
    for width in (model.hidden_size, moe.expert_hidden_size):
        if moe.on_gpu and width % BF16_ROW:
            yield {"width": width, "whose": whose(moe)}


def _fp8_on_gpu(moe: Moe, feature: Features) -> Words | None:
    asked = moe.on_gpu and feature.fp8 and not feature.fp8.keeps("experts")
    return {"whose": whose(moe)} if asked else None


OFF = "set it to false"
BACK = f"set `{HOW}expert_gemm=transformer_engine`"

LAWS = (
    Law(id="top-k-above-experts", category=MATHS, key=AT + "top_k",
        when=lambda moe: moe.top_k > moe.experts, says="top-k {moe.top_k} of {moe.experts} experts"),
    Law(id="experts-uneven", category=MATHS, key=AT + "experts",
        when=lambda moe, parallel: uneven("experts", moe.experts, parallel.expert, "parallel.expert"),
        title="the experts are not a multiple of `parallel.expert`", says=UNEVEN),
    Law(id="expert-width-uneven", category=MATHS, key=AT + "expert_hidden_size",
        when=lambda moe, parallel: uneven("expert width", moe.expert_hidden_size, parallel.expert_tensor, "parallel.expert_tensor"),
        title="an expert's width is not a multiple of `parallel.expert_tensor`", says=UNEVEN),
    Law(id="shared-expert-width-uneven", category=MATHS, key=AT + "shared_expert_hidden_size",
        when=lambda moe, parallel: uneven("shared expert width", moe.shared_expert_hidden_size, parallel.tensor, "parallel.tensor"),
        title="the shared expert's width is not a multiple of `parallel.tensor`", says=UNEVEN),
    Law(id="expert-bias-without-sigmoid", category=REFUSES, key=AT + "expert_bias",
        when=lambda moe: moe.expert_bias and moe.score_function != "sigmoid",
        says="an expert bias needs sigmoid scores", way=f"set `{AT}expert_bias=false`", source=CONFIG),
    Law(id="shared-overlap-dispatcher", category=REFUSES, key=HOW + "shared_overlap",
        when=lambda moe: moe.shared_overlap and moe.dispatcher != "alltoall",
        says="only the all-to-all dispatcher runs beside the shared expert",
        way=f"set `{HOW}dispatcher=alltoall`, or this to false", source=CONFIG),
    Law(id="shared-overlap-latent", category=REFUSES, key=HOW + "shared_overlap",
        when=lambda moe: moe.latent_size and moe.shared_overlap,
        says="Megatron stops where a shared expert runs beside experts of a latent", way=OFF,
        source="core/transformer/moe/moe_layer.py"),
    Law(id="latent-unaligned", category=REFUSES, key=AT + "latent_size",
        when=lambda moe: moe.latent_size and moe.latent_size % BF16_ROW,
        says="latent_size {moe.latent_size} is not a multiple of 8: rows of bf16 would not be 16 bytes apart",
        source="cuBLAS: grouped GEMMs want rows 16 bytes apart"),
    Law(id="padding-without-capacity", category=REFUSES, key=HOW + "pad_to_capacity",
        when=lambda moe: moe.pad_to_capacity and moe.capacity_factor is None,
        says="without a capacity there is nothing to pad to", way=f"set `{AT}capacity_factor`, or it to false",
        source=CONFIG),
    Law(id="gate-without-shared-expert", category=CONTRADICTION, key=AT + "shared_expert_gate",
        when=lambda moe: moe.shared_expert_gate and not moe.shared_expert_hidden_size,
        says="there is no shared expert to gate", way=OFF),
    Law(id="overlap-without-shared-expert", category=CONTRADICTION, key=HOW + "shared_overlap",
        when=lambda moe: moe.shared_overlap and not moe.shared_expert_hidden_size,
        says="there is no shared expert to overlap", way=OFF),
    Law(id="shared-expert-bias", category=REFUSES, key="model.linear_bias",
        when=lambda moe, model: model.linear_bias and moe.shared_expert_hidden_size,
        says="a shared expert takes no bias", way="set `model.linear_bias=false`",
        source="core/transformer/moe/shared_experts.py"),
    Law(
        id="grouped-experts-bias",  # bias_dropout_fusion, Megatron's default, which no key turns off
        category=REFUSES,
        key="model.linear_bias",
        when=lambda moe, model: model.linear_bias and moe.grouped_gemm,
        says="grouped experts take no bias beside Megatron's fusion of bias and dropout",
        way=f"set `model.linear_bias=false`, or `{AT}grouped_gemm=false`",
        source=EXPERTS,
    ),
    Law(id="experts-bias-parts", category=REFUSES, key="model.linear_bias",
        when=lambda moe, model, parallel: model.linear_bias and parallel.expert_tensor > 1,
        says="experts with biases are whole on a GPU", way="set `parallel.expert_tensor=1`", source=EXPERTS),
    Law(id="swiglu-experts-bias", category=REFUSES, key="model.linear_bias",
        when=lambda moe, model: model.linear_bias and not moe.grouped_gemm and model.activation == "swiglu",
        says="Megatron's weighed SwiGLU of experts takes no bias, and stops in the first step",
        way="set it to false, or choose another `model.activation`", source="core/fusions/fused_bias_swiglu.py"),
    Law(id="local-dispatcher-several-gpus", category=OURS, key=HOW + "dispatcher",
        when=_on_several, says="the local dispatcher sends nothing, and the experts are on several GPUs",
        way=f"set `{HOW}dispatcher=gathered`", source=LOCAL),
    Law(id="gathered-dispatcher-one-gpu", category=CONTRADICTION, key=HOW + "dispatcher",
        when=lambda moe, parallel: moe.dispatcher == "gathered" and parallel.expert == 1,
        says="every GPU has all experts: there is nobody to gather tokens from", way=f"set `{HOW}dispatcher=local`",
        source=LOCAL),
    Law(id="gathered-dispatcher-parts", category=OURS, key=HOW + "dispatcher",
        when=lambda moe, parallel: moe.dispatcher == "gathered"
            and parallel.expert > 1
            and parallel.expert_tensor > 1
            and {"way": f"set `parallel.expert_tensor=1`, or {elsewhere(moe)}"},
        says="the gathered dispatcher wants each expert whole on its GPU", way="set `parallel.expert_tensor=1`",
        source=LOCAL),
    Law(id="gathered-dispatcher-counts", category=OURS, key=HOW + "dispatcher",
        when=lambda moe, parallel: moe.dispatcher == "gathered"
            and parallel.expert > 1
            and not moe.on_gpu
            and {"way": f"set `{HOW}dispatcher=alltoall`" + (f", or `{HOW}expert_gemm=torch`" if moe.grouped_gemm else "")},
        says="the gathered dispatcher leaves the experts' counts on the GPU, and {moe.expert_gemm} wants them on the host",
        way=f"set `{HOW}dispatcher=alltoall`, or `{HOW}expert_gemm=torch` of grouped experts", source=LOCAL),
    Law(id="local-dispatcher-latent", category=OURS, key=HOW + "dispatcher",
        when=lambda moe: moe.dispatcher_is_ours and moe.latent_size and {"way": elsewhere(moe)},
        says="the {moe.dispatcher} dispatcher runs the shared expert between the projections to the latent and back",
        way=f"set `{HOW}dispatcher=alltoall`", source=LOCAL),
    Law(id="local-dispatcher-capacity", category=OURS, key=HOW + "dispatcher",
        when=lambda moe: moe.dispatcher_is_ours
            and moe.capacity_factor is not None
            and {"way": f"{elsewhere(moe)}, or `{AT}capacity_factor=null`"},
        says="the {moe.dispatcher} dispatcher drops nothing, and a capacity factor does",
        way=f"set `{HOW}dispatcher=alltoall`, or `{AT}capacity_factor=null`", source=LOCAL),
    Law(id="local-dispatcher-router-graph", category=OURS, key=HOW + "dispatcher",
        when=lambda moe, cuda_graphs: moe.dispatcher_is_ours
            and "moe_router" in cuda_graphs.modules
            and {"way": f"leave `moe_router` out of `feature.cuda_graphs.modules`, or {elsewhere(moe)}"},
        says="a graph of the router has to end with the shared expert's output, which the {moe.dispatcher} dispatcher leaves for later",
        way=f"leave `moe_router` out of `feature.cuda_graphs.modules`, or set `{HOW}dispatcher=alltoall`",
        source=LOCAL),
    Law(id="expert-gemm-dispatcher", category=OURS, key=HOW + "expert_gemm",
        when=_counts_on_host, says="only dispatchers of ours leave the experts' counts on the GPU",
        way=BACK + "{or_ours}", source=LOCAL),
    Law(id="expert-gemm-ungrouped", category=CONTRADICTION, key=HOW + "expert_gemm",
        when=lambda moe: moe.on_gpu and not moe.grouped_gemm,
        says="without grouped GEMM each expert multiplies by itself", way=BACK),
    Law(id="expert-gemm-fp8", category=OURS, key=HOW + "expert_gemm",
        when=_fp8_on_gpu, says="{whose} has no FP8 of this kind",
        way=f"put `experts` into `feature.fp8.bf16_parts`, or {BACK}",
        source="torch 2.11 `_grouped_mm`; quack-kernels 0.6.5"),
    Law(id="expert-gemm-fsdp", category=OURS, key=HOW + "expert_gemm",
        when=lambda moe, megatron_fsdp: moe.on_gpu and {"whose": whose(moe)},
        says="an FSDP takes weights away between the passes, and {whose} keeps hold of them", way=BACK,
        source="nam_megatron/blocks/moe/experts.py"),
    Law(id="torch-gemm-experts", category=OURS, key=HOW + "expert_gemm",
        when=lambda moe: moe.experts >= 1024 and moe.expert_gemm == "torch",
        says="torch's grouped GEMM (2.11) multiplies fewer than 1,024 experts, not {moe.experts:,}", way=BACK,
        source="torch 2.11 `_grouped_mm`"),
    Law(id="quack-deterministic", category=UNTRIED, key=HOW + "expert_gemm",
        when=lambda moe, precision: moe.expert_gemm == "quack" and precision.deterministic,
        says="QuACK's GEMM has not been tried with `precision.deterministic`", way=f"set `{HOW}expert_gemm=torch`"),
    Law(id="quack-bf16-gradients", category=UNTRIED, key=HOW + "expert_gemm",
        when=lambda moe, precision: moe.expert_gemm == "quack" and precision.grad_reduce == "bf16",
        says="QuACK's GEMM has not been tried with bf16 gradients", way=f"set `{HOW}expert_gemm=torch`"),
    Law(id="quack-adapters", category=UNTRIED, key=HOW + "expert_gemm",
        when=lambda moe, lora: moe.expert_gemm == "quack", says="QuACK's GEMM has not been tried with adapters",
        way=f"set `{HOW}expert_gemm=torch`"),
    Law(id="quack-muon", category=UNTRIED, key=HOW + "expert_gemm",
        when=lambda moe, muon: moe.expert_gemm == "quack", says="QuACK's GEMM has not been tried with Muon",
        way=f"set `{HOW}expert_gemm=torch`"),
    Law(id="expert-gemm-unaligned", category=OURS, key=HOW + "expert_gemm",
        when=_odd_rows, says="a width of {width} is not a multiple of 8: {whose} wants rows 16 bytes apart", way=BACK,
        source="torch 2.11 `_grouped_mm`; quack-kernels 0.6.5"),
    Law(id="router-gradient-dispatcher", category=OURS, key=HOW + "fused_router_gradient",
        when=_unforked, says="the router hands its input on to the experts in a layer with a dispatcher of ours alone",
        way=OFF + "{or_ours}", source="nam_megatron/blocks/moe/router.py"),
    Law(id="router-gradient-dtype", category=OURS, key=HOW + "fused_router_gradient",
        when=lambda moe: moe.fused_router_gradient
            and moe.router_dtype != "fp32"
            and {"dtype": moe.router_dtype or "bf16"},
        says="the kernels of the router's gradient are of fp32 logits, not {dtype}",
        way=f"{OFF}, or `{AT}router_dtype=fp32`", source="nam_megatron/blocks/moe/router.py"),
    Law(id="router-gradient-bias", category=OURS, key=HOW + "fused_router_gradient",
        when=lambda moe, model: moe.fused_router_gradient and model.linear_bias,
        says="a router with a bias has Megatron's gradient", way=OFF, source="nam_megatron/blocks/moe/router.py"),
    Law(id="fused-relu-activation", category=WRONG, key=HOW + "fused_weighted_squared_relu",
        when=lambda moe, model: moe.fused_weighted_squared_relu and model.activation != "squared_relu",
        says="the fused activation is squared ReLU, not {model.activation}", way=OFF, source=EXPERTS),
    Law(id="fused-relu-ungrouped", category=WRONG, key=HOW + "fused_weighted_squared_relu",
        when=lambda moe: moe.fused_weighted_squared_relu and not moe.grouped_gemm,
        says="Megatron fuses the activation of grouped experts only", way=OFF, source=EXPERTS),
    Law(id="fused-relu-bias", category=REFUSES, key=HOW + "fused_weighted_squared_relu",
        when=lambda moe, model: moe.fused_weighted_squared_relu and model.linear_bias,
        says="the fused activation takes no bias", way=OFF, source=EXPERTS),
    Law(id="pre-softmax-without-softmax", category=CONTRADICTION, key=AT + "pre_softmax",
        when=lambda moe: moe.pre_softmax and moe.score_function != "softmax",
        says="{moe.score_function} scores are no softmax, before the choice or after", way=OFF),
    Law(id="expert-groups-uneven", category=REFUSES, key=AT + "group_limit",
        when=lambda moe: moe.group_limit and uneven("experts", moe.experts, moe.group_limit[0], "groups"),
        title="the experts are not a multiple of their groups", says=UNEVEN, source=CONFIG),
    Law(id="expert-groups-limit-nothing", category=CONTRADICTION, key=AT + "group_limit",
        when=_groups_limit_nothing, says="{chosen} of {groups} groups of {moe.experts} experts limit nothing",
        way="set it to null"),
    Law(id="expert-groups-top-k", category=WRONG, key=AT + "group_limit",
        when=_indivisible_top_k, says="top-k {moe.top_k} is not divisible by {chosen} chosen groups",
        way="choose a divisor", source="core/transformer/moe/moe_utils.py"),
    Law(id="expert-groups-too-few", category=MATHS, key=AT + "group_limit",
        when=_few_experts, says="{chosen} groups have fewer experts than top-k {moe.top_k}", way="choose more groups"),
    Law(id="softmax-of-one", category=MATHS, key=AT + "top_k",
        when=lambda moe: moe.top_k == 1 and moe.score_function == "softmax" and not moe.pre_softmax,
        says="softmax over one chosen expert has no gradient", way="use sigmoid scores or top-k above 1"),
    Law(id="balancing-weight-without-loss", category=CONTRADICTION, key=AT + "aux_loss_coeff",
        when=lambda moe: moe.balancing == "none" and moe.aux_loss_coeff,
        says="aux_loss_coeff {moe.aux_loss_coeff} without a balancing loss", way="set it to 0.0"),
    Law(id="experts-tensor-without-sequence", category=REFUSES, key="parallel.sequence",
        when=lambda moe, parallel: parallel.tensor > 1 and not parallel.sequence,
        says="MoE under tensor parallelism trains only with sequence parallelism", way="set `parallel.sequence=true`",
        source="core/transformer/moe/moe_layer.py"),
)  # fmt: skip
