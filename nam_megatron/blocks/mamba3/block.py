"""Mamba-3: complex-valued state, trapezoidal update, multi-input multi-output. Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt

from nam_megatron.blocks import Block, divides
from nam_megatron.errors import Problem


class Mamba3(Block):
    kind: ClassVar[str] = "mamba3"
    symbol: ClassVar[str] = "M"
    title: ClassVar[str] = "Mamba-3"
    missing: ClassVar[str | None] = "the Mamba-3 mixer"

    heads: PositiveInt
    head_dim: PositiveInt
    state_dim: PositiveInt
    groups: PositiveInt
    mimo_rank: PositiveInt
    chunk: PositiveInt
    rope_fraction: PositiveFloat

    def check(self, plan) -> Iterator[Problem]:
        at, p = "model.blocks.mamba3.", plan.recipe.parallel
        yield from divides(at + "heads", self.heads, self.groups, "Mamba-3 heads", at + "groups")
        yield from divides(at + "heads", self.heads, p.tensor, "Mamba-3 heads", "parallel.tensor")
        yield from divides(at + "groups", self.groups, p.tensor, "Mamba-3 groups", "parallel.tensor")
        if self.rope_fraction > 1:
            yield Problem(f"rope_fraction {self.rope_fraction} is above 1", at + "rope_fraction")
        if p.context > 1:
            yield Problem(
                "Mamba-3 does not run under context parallelism", "parallel.context", "set `parallel.context=1`"
            )
