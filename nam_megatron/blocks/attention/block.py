"""Multi-head and grouped-query attention: Megatron's SelfAttention, symbol `*`."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveInt

from nam_megatron.blocks import Block, divides
from nam_megatron.errors import Problem
from nam_megatron.setting import Setting


class Attention(Block):
    kind: ClassVar[str] = "attention"
    symbol: ClassVar[str] = "*"
    title: ClassVar[str] = "GQA"

    head_dim: PositiveInt
    query_groups: PositiveInt
    qk_norm: bool

    def settings(self, plan) -> Iterator[Setting]:
        grouped = self.query_groups < plan.recipe.model.num_attention_heads
        yield Setting("kv_channels", self.head_dim, "width of one head", "head_dim")
        yield Setting(
            "group_query_attention",
            grouped,
            "without it Megatron ignores the groups and trains full MHA",
            "query_groups",
        )
        yield Setting("num_query_groups", self.query_groups if grouped else 1, "key/value heads", "query_groups")
        yield Setting("qk_layernorm", self.qk_norm, "norm on queries and keys per head", "qk_norm")
        yield Setting("apply_rope_fusion", True, "plain RoPE is fused for this kind")

    def check(self, plan) -> Iterator[Problem]:
        heads, tensor = plan.recipe.model.num_attention_heads, plan.recipe.parallel.tensor
        yield from divides("model.num_attention_heads", heads, self.query_groups, "attention heads", "query_groups")
        if self.query_groups % tensor and tensor % self.query_groups:
            yield Problem(
                f"{self.query_groups} query groups are neither a multiple nor a divisor of tensor parallel size {tensor}",
                "model.blocks.attention.query_groups",
            )
        if self.head_dim % 2:
            yield Problem(f"RoPE needs an even head width, not {self.head_dim}", "model.blocks.attention.head_dim")
