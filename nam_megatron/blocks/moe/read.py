"""Experts of a launch."""

from typing import Any

from nam_megatron.blocks.moe.block import Moe
from nam_megatron.blocks.read import Numbers, feed_forward, norm


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    groups = m.expert_groups
    found = Moe.of_arguments(a) | {
        "expert_hidden_size": m.moe_ffn,
        "shared_expert_hidden_size": a.moe_shared_expert_intermediate_size or 0,
        "shared_expert_gate": a.moe_shared_expert_gate and bool(a.moe_shared_expert_intermediate_size),
        "aux_loss_coeff": m.aux_coefficients[0],
        "pre_softmax": a.moe_router_pre_softmax and a.moe_router_score_function == "softmax",
        "dispatcher": a.moe_token_dispatcher_type,
        "shared_overlap": a.moe_shared_expert_overlap,
        "group_limit": list(groups) if groups else None,
    }
    if len(m.balancing) == 1:  # several have no word in a recipe; the comparison lists them
        found["balancing"] = m.balancing[0]
    return found


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, bias, latent = v["hidden_size"], int(v["add_bias_linear"]), v["moe_latent_size"]
    projections = 2 * h * latent + bias * (h + latent) if latent else 0
    width = v["moe_shared_expert_intermediate_size"]
    shared = feed_forward(v, width, h, 0) if width else 0
    gate = h if shared and v["moe_shared_expert_gate"] else 0
    experts = v["experts"] if whole else min(v["moe_router_topk"], v["experts"])
    routed = experts * feed_forward(v, v["moe_ffn"], latent or h, bias)
    return norm(v) * h + v["experts"] * (h + bias) + routed + projections + shared + gate
