"""MLA of a launch."""

from typing import Any

from nam_megatron.blocks.mla.block import Mla
from nam_megatron.blocks.read import Numbers, norm


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    found = Mla.of_arguments(a)
    if a.q_lora_rank is None or foreign(a):
        found["kernels"] = "megatron"
    found["latent_norm_epsilon"] = _epsilon(a, m)
    if a.q_lora_rank is None and a.qk_layernorm and not m.plain_query:
        lost.append(
            "Megatron's norm over the whole width before the queries' projection, where there is no query latent"
        )
    return found


def _epsilon(a: Any, m: Any) -> float | str | None:
    """Of the norms of latents: no argument of Megatron's says it. `???` where a plan that is not here may."""
    if "mla" in m.marked or "dsa" in m.marked:
        return "???"
    return None if m.latent_epsilon == a.layernorm_epsilon else m.latent_epsilon


def foreign(a: Any) -> bool:
    """What our kernels do not take."""
    return a.normalization != "RMSNorm" or bool(a.fp8)


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, q, kv, width = v["hidden_size"], v["q_lora_rank"], v["kv_lora_rank"], v["qk_head_dim"] + v["qk_pos_emb_head_dim"]
    query = h * v["heads"] * width if q is None else h * q + q * v["heads"] * width
    value = v["heads"] * v["v_head_dim"]
    own = 0 if v.get("plain_query") else h  # without a latent Megatron's is over the whole width
    latents = norm(v) * ((own if q is None else q) + kv) if v["qk_layernorm"] else 0
    made = h * (kv + v["qk_pos_emb_head_dim"]) + kv * (v["heads"] * v["qk_head_dim"] + value)
    return norm(v) * h + query + made + latents + value * h + v["add_bias_linear"] * h
