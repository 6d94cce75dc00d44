"""Mamba-2 of a launch."""

from typing import Any

from nam_megatron.blocks.mamba2.block import CONV, Mamba2
from nam_megatron.blocks.read import Numbers, norm

SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    if not a.any_said(*SIZES):
        lost.append(
            "the block at `M`: no flag says which; Mamba-2 of Megatron's default sizes is written (Mamba-3 and M2RNN stand in plan.json "
            "alone)"
        )
    return Mamba2.of_arguments(a) | {"heads": m.mamba_heads, "strided": False, "strided_norm": False}


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, heads = v["hidden_size"], v["mamba_heads"]
    inner, state = heads * v["mamba_head_dim"], 2 * v["mamba_num_groups"] * v["mamba_state_dim"]
    convolution = (CONV + 1) * (inner + state)  # biased
    return norm(v) * h + h * (2 * inner + state + heads) + convolution + 3 * heads + inner + inner * h
