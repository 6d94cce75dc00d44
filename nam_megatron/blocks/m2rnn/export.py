"""M2RNN's tensors, which nobody else publishes."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, one, packed
from nam_megatron.blocks.m2rnn.block import M2Rnn

INPUT_NORM = "mixer.in_proj.layer_norm_"


def keys(b: M2Rnn) -> dict[str, Any]:
    return {name: getattr(b, name) for name in ("k_dim", "v_dim", "heads", "conv_width")}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h = c["m2rnn"], c["hidden_size"]
    heads, inner = b["heads"], b["heads"] * b["v_dim"]
    convolved = {"q": b["k_dim"], "k": b["k_dim"], "v": inner}
    yield packed("mixer.in_proj.weight", "mixer.in_proj.weight", {**convolved, "gate": inner, "forget": heads}, h)
    yield packed("mixer.conv_weight", "mixer.conv1d_weight", convolved, 1, b["conv_width"])
    yield packed("mixer.conv_bias", "mixer.conv1d_bias", convolved)
    yield one("mixer.norm_weight", "mixer.norm_weight", inner)
    yield one("mixer.state_weight", "mixer.state_weight", heads, b["v_dim"], b["v_dim"], dtype="F32")
    for name, size in (("D", inner), ("A_log", heads), ("dt_bias", heads)):
        yield one(f"mixer.{name}", f"mixer.{name}", size, dtype="F32")
    yield one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


def pieces(c: Config) -> Iterator[Piece]:
    return iter(())
