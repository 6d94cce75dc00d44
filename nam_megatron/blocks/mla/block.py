"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): Megatron's MLASelfAttention, symbol `+`."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveInt

from nam_megatron.blocks import Block
from nam_megatron.errors import Problem
from nam_megatron.setting import Setting


class Mla(Block):
    kind: ClassVar[str] = "mla"
    symbol: ClassVar[str] = "+"
    title: ClassVar[str] = "MLA"

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    latent_norm: bool

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("multi_latent_attention", True, "said outright; Megatron would infer it from the pattern")
        yield Setting("q_lora_rank", self.q_lora_rank, "query latent", "q_lora_rank")
        yield Setting(
            "kv_lora_rank", self.kv_lora_rank, "32 on Megatron's command line, 512 in its config", "kv_lora_rank"
        )
        yield Setting("qk_head_dim", self.qk_head_dim, "query/key head without position", "qk_head_dim")
        yield Setting("qk_pos_emb_head_dim", self.qk_rope_head_dim, "query/key head with RoPE", "qk_rope_head_dim")
        yield Setting("v_head_dim", self.v_head_dim, "value head", "v_head_dim")
        yield Setting("rope_type", "rope", "unset means yarn")
        yield Setting("rotary_scaling_factor", 1.0, "40 in Megatron's config; scales the softmax even with plain RoPE")
        yield Setting("mscale", 1.0, "yarn's, neutral")
        yield Setting("mscale_all_dim", 0.0, "yarn's, neutral")
        yield Setting(
            "qk_layernorm", self.latent_norm, "norms on both latents; our stack spec holds them", "latent_norm"
        )
        yield Setting("apply_rope_fusion", False, "Megatron fuses RoPE for MLA only with yarn, and never for DSA")
        yield Setting("cache_mla_latents", False, "inference only")
        yield Setting(
            "mla_down_proj_fusion", False, "one layer norm and two down projections, as the stack spec has them"
        )
        # GQA's settings stay at what MLA expects.
        yield Setting("group_query_attention", False, "excluded by MLA")

    def check(self, plan) -> Iterator[Problem]:
        if self.qk_rope_head_dim % 2:
            yield Problem(f"RoPE needs an even width, not {self.qk_rope_head_dim}", "model.blocks.mla.qk_rope_head_dim")
        if plan.recipe.parallel.tensor > 1 and not plan.recipe.parallel.sequence:
            # Measured on Megatron 0.19.2: the latent norms' gradients come out multiplied by the tensor size.
            yield Problem(
                "MLA under tensor parallelism gets wrong gradients without sequence parallelism",
                "parallel.sequence",
                "set `parallel.sequence=true`",
            )
