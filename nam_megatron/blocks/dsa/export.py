"""DSA's tensors: MLA's, and an indexer's in layers that compute their own top-k."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.blocks.exported import Config, Piece, Tensor, one, same
from nam_megatron.blocks.mla import export as mla

INPUT_NORM = mla.INPUT_NORM
MOST_KEYS = "top_k"
UNBIASED = True
tensors = mla.tensors


def keys(b: Dsa) -> dict[str, Any]:
    return {name: getattr(b, name) for name in ("indexer_heads", "indexer_head_dim", "top_k")}


def indexer(c: Config) -> Iterator[Tensor]:
    """What layers that reuse another's top-k have not."""
    b, h, at = c["dsa"], c["hidden_size"], "self_attention.core_attention.indexer."
    heads, width = b["indexer_heads"], b["indexer_head_dim"]
    yield one("mixer.indexer.q.weight", f"{at}linear_wq_b.weight", heads * width, c["mla"]["q_lora_rank"])
    yield one("mixer.indexer.k.weight", f"{at}linear_wk.weight", width, h)
    for part in ("weight", "bias"):  # a LayerNorm, whatever the model's norm
        yield one(f"mixer.indexer.k_norm.{part}", f"{at}k_norm.{part}", width)
    yield one("mixer.indexer.weights.weight", f"{at}linear_weights_proj.weight", heads, h)


def pieces(c: Config) -> Iterator[Piece]:
    yield from mla.pieces(c)
    yield from same(indexer(c))
