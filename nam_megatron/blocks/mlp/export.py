"""A dense MLP's tensors: ours pack gate and up."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, gated, gates, linear, same
from nam_megatron.blocks.mlp.block import Mlp

INPUT_NORM = "mlp.linear_fc1.layer_norm_"


def keys(b: Mlp) -> dict[str, Any]:
    return {}


def tensors(c: Config) -> Iterator[Tensor]:
    h, width = c["hidden_size"], c["ffn_hidden_size"]
    yield from linear("mixer.up", "mlp.linear_fc1", gates(c) * width, h, c["linear_bias"])
    yield from linear("mixer.down", "mlp.linear_fc2", h, width, c["linear_bias"])


def pieces(c: Config) -> Iterator[Piece]:
    for tensor in tensors(c):
        yield from gated(c, tensor) if tensor.name.startswith("mixer.up.") else same([tensor])
