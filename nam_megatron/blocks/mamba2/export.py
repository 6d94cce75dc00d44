"""Mamba-2's tensors, which others publish as they are."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, one, packed, same
from nam_megatron.blocks.mamba2.block import Mamba2

INPUT_NORM = "mixer.in_proj.layer_norm_"


def keys(b: Mamba2) -> dict[str, Any]:
    named = ("heads", "head_dim", "state_dim", "groups")
    return {name: getattr(b, name) for name in named} | {"conv_width": 4}  # MambaMixer's d_conv; not a flag


def tensors(c: Config) -> Iterator[Tensor]:
    b, h = c["mamba2"], c["hidden_size"]
    heads, inner, width = b["heads"], b["heads"] * b["head_dim"], b["groups"] * b["state_dim"]
    convolved = {"x": inner, "B": width, "C": width}
    yield packed("mixer.in_proj.weight", "mixer.in_proj.weight", {"z": inner, **convolved, "dt": heads}, h)
    yield packed("mixer.conv_weight", "mixer.conv1d.weight", convolved, 1, b["conv_width"])
    yield packed("mixer.conv_bias", "mixer.conv1d.bias", convolved)
    for name in ("dt_bias", "A_log", "D"):
        yield one(f"mixer.{name}", f"mixer.{name}", heads)
    yield one("mixer.norm_weight", "mixer.norm.weight", inner)
    yield one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


def pieces(c: Config) -> Iterator[Piece]:
    return same(tensors(c))
