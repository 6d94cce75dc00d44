"""DeepSeek sparse attention (DeepSeek-V3.2): MLA over the top-k positions a small indexer picks, symbol `D`."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from nam_megatron.blocks import Block
from nam_megatron.errors import Problem
from nam_megatron.setting import Setting


class Dsa(Block):
    kind: ClassVar[str] = "dsa"
    symbol: ClassVar[str] = "D"
    title: ClassVar[str] = "DSA"
    needs: ClassVar[tuple[str, ...]] = ("mla",)

    indexer_heads: PositiveInt
    indexer_head_dim: PositiveInt
    top_k: PositiveInt
    indexer_loss_coeff: NonNegativeFloat
    full_every: PositiveInt

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("experimental_attention_variant", "dsa", "Megatron checks a DSA config only when this is said")
        yield Setting("dsa_indexer_n_heads", self.indexer_heads, "indexer heads", "indexer_heads")
        yield Setting("dsa_indexer_head_dim", self.indexer_head_dim, "indexer head width", "indexer_head_dim")
        yield Setting("dsa_indexer_topk", self.top_k, "positions each query attends to", "top_k")
        yield Setting(
            "dsa_indexer_loss_coeff",
            self.indexer_loss_coeff,
            "unset leaves the indexer untrained",
            "indexer_loss_coeff",
        )
        yield Setting("dsa_indexer_use_sparse_loss", False, "KL over all positions, not over the selected ones")
        freq, offset = plan.index_reuse or (1, None)
        yield Setting(
            "dsa_indexer_topk_freq", freq, "layers between two that compute their top-k; 1: all do", "full_every"
        )
        if plan.index_reuse:
            yield Setting("dsa_indexer_skip_topk_offset", offset, "first layer that computes one", "full_every")
        yield Setting("dsa_indexer_rotate_activation", False, "on by default; needs fast_hadamard_transform")
        yield Setting("dsa_indexer_rope_interleaved", False, "halves, as the attention itself")
        yield Setting("dsa_indexer_scoring_relu", True, "as published")
        yield Setting("dsa_indexer_k_norm_epsilon", None, "the model's epsilon")
        yield Setting("dsa_indexer_k_norm_fp32", False, "as published")
        yield Setting(
            "dsa_kernel_backend", "none", "tilelang and cudnn decline these shapes and fall to dense fp32 silently"
        )
        if plan.index_reuse:
            why = "carries the shared top-k; without a mask it would ride on the config object across microbatches"
            yield Setting("create_attention_mask_in_dataloader", True, why, "full_every")

    def check(self, plan) -> Iterator[Problem]:
        r = plan.recipe
        if self.top_k > r.model.seq_length:
            yield Problem(f"top-k {self.top_k} exceeds the sequence of {r.model.seq_length}", "model.blocks.dsa.top_k")
        if self.indexer_head_dim < r.model.blocks.mla.qk_rope_head_dim:
            yield Problem(
                f"indexer heads of {self.indexer_head_dim} cannot hold the {r.model.blocks.mla.qk_rope_head_dim} RoPE dimensions",
                "model.blocks.dsa.indexer_head_dim",
            )
        if r.parallel.context > 1:
            yield Problem(
                "DSA does not run under context parallelism here", "parallel.context", "set `parallel.context=1`"
            )
        if r.model.linear_bias:
            yield Problem("DSA has no linear bias", "model.linear_bias", "set `model.linear_bias=false`")
