"""Gated delta net's tensors: ours pack queries, keys, values, gates, beta and alpha, each whole; others key head by key head."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, View, norm, one, packed, same
from nam_megatron.blocks.gdn.block import Gdn

INPUT_NORM = "self_attention.in_proj.layer_norm_"
LAYER_TYPE = "linear_attention"


def keys(b: Gdn) -> dict[str, Any]:
    named = ("key_heads", "key_head_dim", "value_heads", "value_head_dim", "conv_width")
    return {name: getattr(b, name) for name in named}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h, at = c["gdn"], c["hidden_size"], "self_attention."
    heads, width, inner = b["value_heads"], b["key_heads"] * b["key_head_dim"], b["value_heads"] * b["value_head_dim"]
    convolved = {"query": width, "key": width, "value": inner}
    parts = {**convolved, "z": inner, "beta": heads, "alpha": heads}
    yield packed("mixer.in_proj.weight", f"{at}in_proj.weight", parts, h)
    yield packed("mixer.conv_weight", f"{at}conv1d.weight", convolved, 1, b["conv_width"])
    for name in ("dt_bias", "A_log"):
        yield one(f"mixer.{name}", at + name, heads)
    yield from norm(c, "mixer.norm", f"{at}out_norm.", b["value_head_dim"])
    yield one("mixer.out.weight", f"{at}out_proj.weight", h, inner)


def pieces(c: Config) -> Iterator[Piece]:
    for piece in same(tensors(c)):
        if piece.slot == "in_proj.weight":
            yield from _by_key_head(c, piece)
            yield from _apart(c, piece)
        elif piece.slot == "norm.weight":  # which others keep as it is, whatever the model's norms
            slot, less = "gated_norm.weight", float(c["zero_centered_norms"])
            yield Piece(slot, piece.tensor, piece.shape, less=less)
        else:
            yield piece


def _by_key_head(c: Config, whole: Piece) -> Iterator[Piece]:
    """qkvz: of each key head its query, key, values and gates. ba: of each its betas and alphas."""
    b, columns = c["gdn"], whole.shape[1]
    n, each = b["key_heads"], b["value_heads"] // b["key_heads"]
    wide, narrow = (b["key_head_dim"], each * b["value_head_dim"]), (each, each)
    first = 0
    for slot, sizes in (("qkvz", (wide[0], wide[0], wide[1], wide[1])), ("ba", narrow)):
        total, at = sum(sizes), 0
        for size in sizes:
            here, there = _rows(first, n, size), _columns(n, total, at, size)
            yield Piece(f"{slot}.weight", whole.tensor, (n * total, columns), here, there)
            first, at = first + n * size, at + size


def _apart(c: Config, whole: Piece) -> Iterator[Piece]:
    """Queries, keys and values in one, gates, betas and alphas each in one of their own, as ours are behind one another."""
    b, first = c["gdn"], 0
    inner = b["value_heads"] * b["value_head_dim"]
    sizes = {
        "qkv": 2 * b["key_heads"] * b["key_head_dim"] + inner,
        "z": inner,
        "b": b["value_heads"],
        "a": b["value_heads"],
    }
    for slot, size in sizes.items():
        yield Piece(f"{slot}.weight", whole.tensor, (size, whole.shape[1]), _rows(first, 1, size))
        first += size


def _rows(first: int, heads: int, size: int) -> View:
    return lambda x: x[first : first + heads * size].view(heads, size, -1)


def _columns(heads: int, total: int, at: int, size: int) -> View:
    return lambda x: x.view(heads, total, -1)[:, at : at + size]
