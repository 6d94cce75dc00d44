"""Gated delta net of a launch."""

from typing import Any

from nam_megatron.blocks.gdn.block import Gdn
from nam_megatron.blocks.read import Numbers, norm


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    return Gdn.of_arguments(a)


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, heads, width = v["hidden_size"], v["linear_num_value_heads"], v["linear_value_head_dim"]
    made, values = v["linear_key_head_dim"] * v["linear_num_key_heads"], width * heads
    convolved = (2 * made + values) * v["linear_conv_kernel_dim"]
    return norm(v) * (h + width) + h * (2 * made + 2 * values + 2 * heads) + convolved + 2 * heads + values * h
