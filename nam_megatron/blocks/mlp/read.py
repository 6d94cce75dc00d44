"""A dense MLP of a launch."""

from typing import Any

from nam_megatron.blocks.read import Numbers, feed_forward, norm


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    return {}


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h = v["hidden_size"]
    return norm(v) * h + feed_forward(v, v["ffn"], h, int(v["add_bias_linear"]))
