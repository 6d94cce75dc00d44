"""Attention's tensors: ours pack queries (and their gates), keys and values group by group."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.attention.block import Attention
from nam_megatron.blocks.exported import Config, Piece, Tensor, View, linear, norm, one, same

INPUT_NORM = "self_attention.linear_qkv.layer_norm_"
MOST_KEYS = "window"


def keys(b: Attention) -> dict[str, Any]:
    named = ("head_dim", "query_groups", "qk_norm", "qkv_bias", "output_gate", "sinks")
    window = {"window": b.window or 0, "unwindowed_every": b.unwindowed_every or 0}
    return {name: getattr(b, name) for name in named} | {"rotary_dim": b.turned, **window}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h, heads, at = c["attention"], c["hidden_size"], c["num_attention_heads"], "self_attention."
    packed = (2 if b["output_gate"] else 1) * heads + 2 * b["query_groups"]
    yield from linear("mixer.qkv", f"{at}linear_qkv", packed * b["head_dim"], h, b["qkv_bias"])
    yield from linear("mixer.out", f"{at}linear_proj", h, heads * b["head_dim"], c["linear_bias"])
    if b["sinks"]:
        yield one("mixer.sinks", f"{at}core_attention.softmax_offset", heads)
    if b["qk_norm"]:
        for part in ("q", "k"):
            yield from norm(c, f"mixer.{part}_norm", f"{at}{part}_layernorm.", b["head_dim"])


def pieces(c: Config) -> Iterator[Piece]:
    for tensor in tensors(c):
        if tensor.name.startswith("mixer.qkv."):
            yield from _apart(c, tensor)
        else:
            yield from same([tensor])


def _apart(c: Config, tensor: Tensor) -> Iterator[Piece]:
    """q: head by head, each before its gate where it has one. k, v: group by group."""
    b, what = c["attention"], tensor.name.rpartition(".")[2]
    width, groups, kinds = b["head_dim"], b["query_groups"], 2 if b["output_gate"] else 1
    each, rest = c["num_attention_heads"] // groups, tensor.shape[1:]

    def queries(x: Any) -> Any:
        by_kind = x.view(groups, -1, width, *x.shape[1:])[:, : kinds * each].unflatten(1, (kinds, each))
        return by_kind.transpose(1, 2)

    yield Piece(f"q.{what}", tensor.name, (kinds * each * groups * width, *rest), queries)
    for slot, at in (("k", -2), ("v", -1)):
        yield Piece(f"{slot}.{what}", tensor.name, (groups * width, *rest), _column(groups, width, at))


def _column(groups: int, width: int, at: int) -> View:
    return lambda x: x.view(groups, -1, width, *x.shape[1:])[:, at]
