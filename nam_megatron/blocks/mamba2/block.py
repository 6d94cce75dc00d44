"""Mamba-2 (arXiv 2405.21060): Megatron's MambaMixer, symbol `M`."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveInt

from nam_megatron.blocks import Block, divides
from nam_megatron.errors import Problem
from nam_megatron.setting import Setting


class Mamba2(Block):
    kind: ClassVar[str] = "mamba2"
    symbol: ClassVar[str] = "M"
    title: ClassVar[str] = "Mamba-2"

    heads: PositiveInt
    head_dim: PositiveInt
    state_dim: PositiveInt
    groups: PositiveInt

    @property
    def in_proj_width(self) -> int:
        """Columns of the packed input projection: z, x, B, C, dt."""
        return 2 * self.heads * self.head_dim + 2 * self.groups * self.state_dim + self.heads

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("mamba_num_heads", self.heads, "unset means 2 * hidden_size / head_dim", "heads")
        yield Setting("mamba_head_dim", self.head_dim, "width of one head", "head_dim")
        yield Setting("mamba_state_dim", self.state_dim, "Megatron's default is 128", "state_dim")
        yield Setting("mamba_num_groups", self.groups, "B and C groups", "groups")
        yield Setting("use_mamba_mem_eff_path", True, "the fused kernel; Megatron does not test the other")
        yield Setting("mamba_training_ssm_states_dtype", None, "chunk states in the parameters' dtype")

    def check(self, plan) -> Iterator[Problem]:
        at, p = "model.blocks.mamba2.", plan.recipe.parallel
        yield from divides(at + "heads", self.heads, self.groups, "Mamba-2 heads", at + "groups")
        yield from divides(
            at + "heads", self.heads, p.tensor * p.context, "Mamba-2 heads", "parallel.tensor * parallel.context"
        )
        yield from divides(at + "groups", self.groups, p.tensor, "Mamba-2 groups", "parallel.tensor")
