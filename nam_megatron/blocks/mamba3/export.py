"""Mamba-3's tensors, which nobody else publishes."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, one, packed
from nam_megatron.blocks.mamba3.block import Mamba3

INPUT_NORM = "mixer.in_proj.layer_norm_"


def keys(b: Mamba3) -> dict[str, Any]:
    named = ("heads", "head_dim", "state_dim", "groups", "mimo_rank", "angles")
    return {name: getattr(b, name) for name in named}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h = c["mamba3"], c["hidden_size"]
    heads, p, n, r = (b[k] for k in ("heads", "head_dim", "state_dim", "mimo_rank"))
    inner, width = heads * p, b["groups"] * r * n
    parts = {"z": inner, "x": inner, "B": width, "C": width, "dt": heads, "A": heads, "trap": heads}
    yield packed("mixer.in_proj.weight", "mixer.in_proj.weight", {**parts, "angles": b["angles"]}, h)
    shapes = {"dt_bias": (heads,), "D": (heads,), "B_bias": (heads, r, n), "C_bias": (heads, r, n)}
    if r > 1:
        shapes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), (heads, r, p))
    for name, shape in shapes.items():
        yield one(f"mixer.{name}", f"mixer.{name}", *shape, dtype="F32")
    for name in ("B", "C"):
        yield one(f"mixer.{name}_norm.weight", f"mixer.{name}_norm.weight", n)
    yield one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


def pieces(c: Config) -> Iterator[Piece]:
    return iter(())
