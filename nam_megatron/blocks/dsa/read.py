"""DSA of a launch: MLA's keys, and the indexer's."""

from typing import Any

from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.blocks.mla import read as mla
from nam_megatron.blocks.mla.block import WIDTHS
from nam_megatron.blocks.read import Numbers


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    numbers = m.numbers(Dsa.kind)
    shares = (
        k
        for k in range(1, len(numbers) + 1)
        if all(m.topk_source(n) == numbers[i - i % k] for i, n in enumerate(numbers))
    )
    if (every := next(shares, None)) is None:
        lost.append(
            "--dsa-indexer-topk-freq: our recipes share a top-k among equal numbers of layers only; none is shared here"
        )
    found = Dsa.of_arguments(a) | {"full_every": every or 1, "indexer_loss_coeff": a.dsa_indexer_loss_coeff or 0.0}
    widths = {a.q_lora_rank, a.kv_lora_rank, a.qk_pos_emb_head_dim, a.dsa_indexer_head_dim}
    if not widths <= set(WIDTHS) or mla.foreign(a):
        found["kernels"] = "megatron"
    return found


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, heads, width = v["hidden_size"], v["dsa_indexer_n_heads"], v["dsa_indexer_head_dim"]
    # Its norm is a LayerNorm always.
    indexer = (v["q_lora_rank"] or h) * heads * width + h * width + 2 * width + h * heads if chooses else 0
    return mla.count(v, chooses, whole) + indexer
