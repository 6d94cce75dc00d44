"""M2RNN: a recurrent layer with a matrix state, h = f h + (1 - f) tanh(h W + k v^T). Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveInt

from nam_megatron.blocks import Block, divides, residual
from nam_megatron.errors import Problem
from nam_megatron.sizes import ESTIMATED, Line, Param, Sizes, State, Work

CHECKPOINT = 64  # tokens between two states that are kept for the backward pass


class M2Rnn(Block):
    kind: ClassVar[str] = "m2rnn"
    symbol: ClassVar[str] = "M"
    title: ClassVar[str] = "M2RNN"
    missing: ClassVar[str | None] = "the M2RNN mixer"

    kernels: Literal["fused", "naive"]
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

    # As designed (one query and one key head, gate and norm behind the recurrence), not as built.

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads with a state of K x Vh; a convolution of width c over q, k and v; state checkpoints every L tokens."""
        return z.own(nh=self.heads, K=self.k_dim, Vh=self.v_dim, c=self.conv_width, L=CHECKPOINT)

    def params(self, z, layer) -> Iterator[Param]:
        h, inner = z.model.hidden_size, self.heads * self.v_dim
        conv = 2 * self.k_dim + inner
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.in_proj.weight", (conv + inner + self.heads, h), "tensor", "weight")  # q, k, v; gate; forget
        yield Param("mixer.conv1d_weight", (conv, 1, self.conv_width), "tensor", "other")
        yield Param("mixer.conv1d_bias", (conv,), "tensor", "other")
        yield Param("mixer.state_weight", (self.heads, self.v_dim, self.v_dim), "tensor", "other")
        yield Param("mixer.forget_bias", (self.heads,), "tensor", "other")
        yield Param("mixer.norm.weight", (inner,), "tensor", "other")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z, layer) -> Iterator[Line]:
        z = self._sizes(z)
        yield from residual(z)
        yield z.line("q, k, v, gate, forget", "2 T (2 K + 2 nh Vh + nh) / t", "the whole projection", mark=ESTIMATED)
        yield z.line("after the convolution", "2 T (2 K + nh Vh) / t", "bf16", mark=ESTIMATED)
        yield z.line(
            "states", "4 T nh K Vh / (L t)", "fp32, one every L tokens; the rest is computed again", mark=ESTIMATED
        )
        yield z.line(
            "output", "(2 + w) T nh Vh / t", "of the recurrence, and gated: input of the projection", mark=ESTIMATED
        )

    def working(self, z, layer) -> Iterator[Line]:
        z = self._sizes(z)
        yield z.line("forward", "2 Ts h", "the layer's output", mark=ESTIMATED)
        backward = "4 T nh K Vh / t + 2 T (4 K + 4 nh Vh + nh) / t + 2 T h"
        yield z.line("backward", backward, "every state's gradient for the parallel post-pass, fp32", mark=ESTIMATED)

    def flops(self, z, layer) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 K + 2 nh Vh + nh) + 2 nh Vh h", "in and out", mark=ESTIMATED)
        yield z.work("convolution", "2 c (2 K + nh Vh)", "", mark=ESTIMATED)
        yield z.work("recurrence", "nh (2 K Vh Vh + 8 K Vh)", "h W, k v, forget, q h", mark=ESTIMATED)

    def serving(self, z, layer) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("recurrent state", "4 nh K Vh / t", "one matrix a head, fp32", "sequence", mark=ESTIMATED)
        yield z.state(
            "convolution window", "2 c (2 K + nh Vh) / t", "the last columns, bf16", "sequence", mark=ESTIMATED
        )
