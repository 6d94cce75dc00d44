"""M2RNN: a recurrent layer with a matrix state, h = f h + (1 - f) tanh(h W + k v^T). Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveInt

from nam_megatron.blocks import Block, divides
from nam_megatron.errors import Problem


class M2Rnn(Block):
    kind: ClassVar[str] = "m2rnn"
    symbol: ClassVar[str] = "M"
    title: ClassVar[str] = "M2RNN"
    missing: ClassVar[str | None] = "the M2RNN mixer"

    k_dim: PositiveInt
    v_dim: PositiveInt
    heads: PositiveInt
    conv_width: PositiveInt

    def check(self, plan) -> Iterator[Problem]:
        p = plan.recipe.parallel
        yield from divides("model.blocks.m2rnn.heads", self.heads, p.tensor, "M2RNN heads", "parallel.tensor")
        if p.context > 1:
            yield Problem(
                "M2RNN does not run under context parallelism", "parallel.context", "set `parallel.context=1`"
            )
