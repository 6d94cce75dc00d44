"""Mamba-3: complex-valued state, trapezoidal update, multi-input multi-output. Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from nam_megatron.blocks import Block, divides, residual
from nam_megatron.errors import Problem
from nam_megatron.sizes import ESTIMATED, Line, Param, Sizes, State, Work


class Mamba3(Block):
    kind: ClassVar[str] = "mamba3"
    symbol: ClassVar[str] = "M"
    title: ClassVar[str] = "Mamba-3"
    missing: ClassVar[str | None] = "the Mamba-3 mixer"

    kernels: Literal["fused", "naive"]
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

    # As designed (mamba-ssm 2.3.2.post1, modules/mamba3.py, with our groups and Megatron's projections), not as built.

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads of P, in all di wide; B and C of G groups of ns, r of them; a angles; scanned in chunks of L."""
        sizes = {"nh": self.heads, "P": self.head_dim, "di": self.heads * self.head_dim, "r": self.mimo_rank}
        return z.own(**sizes, G=self.groups, ns=self.state_dim, a=self.angles, L=self.chunk)

    @property
    def angles(self) -> int:
        """Rotary angles of B and C, shared by all heads: one for each pair of turned state columns."""
        return int(self.state_dim * self.rope_fraction) // 2

    def params(self, z, layer) -> Iterator[Param]:
        h, inner, rank = z.model.hidden_size, self.heads * self.head_dim, self.mimo_rank
        packed = 2 * inner + 2 * self.state_dim * self.groups * rank + 3 * self.heads + self.angles
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.in_proj.weight", (packed, h), "tensor", "weight")
        yield Param("mixer.dt_bias", (self.heads,), "tensor", "other")
        yield Param("mixer.D", (self.heads,), "tensor", "other")
        for name in ("B", "C"):
            yield Param(f"mixer.{name}_bias", (self.heads, rank, self.state_dim), "tensor", "other")
            yield Param(f"mixer.{name}_norm.weight", (self.state_dim,), "replicated", "other")
        if rank > 1:
            for name in ("x", "z", "o"):
                yield Param(f"mixer.mimo_{name}", (self.heads, rank, self.head_dim), "tensor", "other")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z, layer) -> Iterator[Line]:
        z = self._sizes(z)
        yield from residual(z)
        packed = "2 T (2 di + 2 ns G r + 3 nh + a) / t"
        yield z.line("z, x, B, C, dt, A, trap, angles", packed, "the whole projection", mark=ESTIMATED)
        yield z.line("normed B and C", "4 T ns G r / t", "bf16", mark=ESTIMATED)
        yield z.line(
            "angles", "4 T a nh / t", "fp32, copied for each head: the released kernels want it", mark=ESTIMATED
        )
        yield z.line("steps and decays", "8 T nh / t", "fp32", mark=ESTIMATED)
        yield z.line(
            "output", "w T di / t", "input of the output projection; chunk states are computed again", mark=ESTIMATED
        )

    def working(self, z, layer) -> Iterator[Line]:
        z = self._sizes(z)
        states = "4 T di ns / (L t)"
        yield z.line("forward", f"{states} + 2 Ts h", "fp32 chunk states and the layer's output", mark=ESTIMATED)
        backward = f"2 {states} + 2 T (3 di + 2 ns G r + 3 nh + a) / t + 8 T ns G r / t + 4 T a nh / t"
        yield z.line(
            "backward",
            backward,
            "states and their gradients in fp32, and a gradient of all that is kept",
            mark=ESTIMATED,
        )

    def flops(self, z, layer) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 di + 2 ns G r + 3 nh + a) + 2 di h", "in and out", mark=ESTIMATED)
        scan = "r r L (ns nh + di) + 4 r ns di + 6 r di"
        yield z.work(
            "scan", scan, "rank r as r tokens: causal half of a chunk, states, rank projections", mark=ESTIMATED
        )

    def serving(self, z, layer) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("recurrent state", "4 di ns / t", "one matrix a head, fp32", "sequence", mark=ESTIMATED)
        yield z.state("last k and v", "2 r nh ns / t + 2 di / t", "bf16, for the trapezoid", "sequence", mark=ESTIMATED)
        yield z.state("angles", "4 nh a / t", "fp32", "sequence", mark=ESTIMATED)
