"""Mamba-3: complex-valued state, trapezoidal update, multi-input multi-output. Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from nam_megatron.blocks import NO_KERNEL, Block, residual
from nam_megatron.errors import Problem
from nam_megatron.words.setting import SAME, Row
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

ENTRIES = 2  # of the batch, that the fused kernels take at once, to bound what they hold
SPECIALISED = (
    64  # heads taken at once from which hopper.py's kernel computes the backward pass's products: a program each
)
PREPARED = "(4 T G r ns + 4 T nh a + 12 T nh)"  # bytes of prepare.Prepared


def walk_from(rank: int) -> int:
    """Heads of all sequences from which the forward pass is one walk; 0: never. Timed on an H200 at rank 4 alone."""
    return 224 if rank == 4 else 0


def walkable(head_dim: int, state_dim: int, rank: int, chunk: int) -> bool:
    """Whether a walk's tiles are those of `wgmma`, 64 rows a chunk and each operand 64 columns, and ranks few."""
    return (head_dim, state_dim, rank * chunk) == (64, 128, 64) and rank in (1, 2, 4)


def odd_sizes(head_dim: int, state_dim: int, mimo_rank: int, chunk: int) -> Iterator[tuple[str, str]]:
    """Sizes that the fused kernels do not take, by name, and why."""
    sizes = {"head_dim": (head_dim, 16), "state_dim": (state_dim, 32), "mimo_rank": (mimo_rank, 1), "chunk": (chunk, 1)}
    odd = {name: size for name, size in sizes.items() if size[0] < size[1] or size[0] & (size[0] - 1)}
    for name, (size, least) in odd.items():
        yield name, f"Mamba-3's kernels need a power of two from {least}, not {size}"
    if not odd and not 16 <= chunk * mimo_rank <= 128:
        yield "chunk", f"Mamba-3's kernels need `chunk` x `mimo_rank` from 16 to 128, not {chunk} x {mimo_rank}"


class Mamba3(Block):
    """Mamba-3: our own mixer."""

    kind = "mamba3"
    title = "Mamba-3"
    colour = "bright_green"
    hue = "#2f9e58"
    letters = ("M", "R")
    symbol = "M"
    slot = "mamba_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("in_proj", "out_proj")
    stock = False
    graph_parts = ("mamba",)
    fixed = MappingProxyType({"norm_epsilon": (1e-5, "its norms of B and C are those of the paper")})
    without_gpu = (
        ("kernels", "fused", "naive", NO_KERNEL),
        ("keep_states", True, False, NO_KERNEL),
        ("keep_prepared", True, False, NO_KERNEL),
    )

    kernels: Annotated[Literal["fused", "naive"], Row("ours in Triton, or plain torch", executes=SAME)]
    recompute: Annotated[
        Literal["none", "in_proj"],
        Row(
            "whose output is computed again in the backward pass instead of kept",
            executes="the same values, computed twice",
        ),
    ]
    keep_states: Annotated[
        bool,
        Row("the scan's states at the starts of chunks are kept for the backward pass instead of computed again; our kernels' alone",
            executes="the same states, of which a forward walk adds the sums in another order", was=False),
    ]  # fmt: skip
    keep_prepared: Annotated[
        bool,
        Row("what the scan reads besides z and x is kept for the backward pass instead of computed again: normed B and C, cosines and"
            " sines, steps and decays; our kernels' alone",
            executes="the same values, made once instead of twice", was=False),
    ]  # fmt: skip
    heads: Annotated[PositiveInt, Row("heads")]
    head_dim: Annotated[PositiveInt, Row("width of one head")]
    state_dim: Annotated[PositiveInt, Row("columns of a head's state")]
    groups: Annotated[PositiveInt, Row("B and C groups")]
    mimo_rank: Annotated[PositiveInt, Row("inputs and outputs of a state update; 1 is SISO")]
    chunk: Annotated[PositiveInt, Row("tokens that the kernels take at once", executes="the order of sums")]
    head_pieces: Annotated[
        PositiveInt,
        Row(
            "parts of a rank's heads, scanned one after the other: more of them need less memory and wait more",
            executes="the order of sums",
            was=1,
        ),
    ]
    rope_fraction: Annotated[PositiveFloat, Row("share of the state's columns that data-dependent angles turn")]

    def rates_apart(self, site: Site) -> bool:
        """Whether dt, A, trap and the angles are multiplied in bf16 beside the rest of the projection in FP8."""
        return site.keeps("mamba3_rates")

    @property
    def angles(self) -> int:
        """Rotary angles of B and C, shared by all heads: one for each pair of turned state columns."""
        return round(self.state_dim * self.rope_fraction / 2)

    @property
    def in_proj_width(self) -> int:
        """Columns of the packed input projection: z, x, B, C, dt, A, trap, angles."""
        return (
            2 * self.heads * self.head_dim
            + 2 * self.state_dim * self.groups * self.mimo_rank
            + 3 * self.heads
            + self.angles
        )

    def unserved(self) -> Iterator[Problem]:
        """Sizes at which the chosen kernels cannot run."""
        if self.kernels == "naive":
            return
        hint = f"`{self.at('kernels')}=naive` runs any size, slowly"
        for name, text in odd_sizes(self.head_dim, self.state_dim, self.mimo_rank, self.chunk):
            yield Problem(text, key=self.at(name), hint=hint, law="mamba3-kernel-sizes")

    def parts(self) -> Iterator[str]:
        yield "mamba3_rates"  # rows of a projection, which is one parameter

    def small(self, site: Site) -> Mapping[str, int]:
        groups = max(2, self.head_pieces) * site.tensor * site.context
        sizes = {"head_dim": 16, "state_dim": 32, "mimo_rank": 2, "chunk": 16}
        return {"heads": 2 * groups, "groups": groups} | sizes

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads of P, in all di wide; B and C of G groups of ns, r of them; a angles; scanned in chunks of L, E tokens at once, of one
        of hp parts of the heads.
        """
        at_once = min(ENTRIES, z["b"]) * z["s"]
        sizes = {"nh": self.heads, "P": self.head_dim, "di": self.heads * self.head_dim, "r": self.mimo_rank}
        return z.own(
            **sizes, G=self.groups, ns=self.state_dim, a=self.angles, L=self.chunk, E=at_once, W=self.in_proj_width,
            hp=self.head_pieces,
        )  # fmt: skip

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, inner, rank = z.site.hidden_size, self.heads * self.head_dim, self.mimo_rank
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.in_proj.weight", (self.in_proj_width, h), "tensor", "weight")
        yield Param("mixer.dt_bias", (self.heads,), "tensor", "other")
        yield Param("mixer.D", (self.heads,), "tensor", "other")
        for name in ("B", "C"):
            yield Param(f"mixer.{name}_bias", (self.heads, rank, self.state_dim), "tensor", "other")
            yield Param(f"mixer.{name}_norm.weight", (self.state_dim,), "replicated", "other")
        if rank > 1:
            for name in ("x", "z", "o"):
                yield Param(f"mixer.mimo_{name}", (self.heads, rank, self.head_dim), "tensor", "other")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        if self.recompute == "in_proj":
            yield z.line("input", "2 Ts h", "kept for the input projection; the residual branch shares it")
        else:
            yield from residual(z)
            yield z.line("z, x, B, C, dt, A, trap, angles", "2 T (W + (cp hp - 1) a) / t", "all that the scan keeps")
            if self.rates_apart(z.site):
                yield z.line("norm output in bf16", "2 Ts h", "input of dt, A, trap and the angles", mark=UNMEASURED)
        yield z.line("output", "w T di / t", "input of the output projection")
        if self.keep_states:
            yield z.line("chunk states", "2 T di ns / (L t)", "at the start of each chunk", mark=UNMEASURED)
        if self.keep_prepared:
            why = "normed B and C, cosines and sines, steps and decays"
            yield z.line("what the scan reads", f"{PREPARED} / t", why, mark=UNMEASURED)
        if self.kernels == "naive":
            yield z.line("states", "16 T di ns / t", "the state after each token and its terms, fp32", mark=UNMEASURED)

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        if self.kernels == "naive":
            return
        z = self._sizes(z)
        prepared = "0" if self.keep_prepared else f"{PREPARED} / (t hp)"
        tiles = walkable(self.head_dim, self.state_dim, self.mimo_rank, self.chunk)
        parts = z["t"] * z["cp"] * self.head_pieces
        walk = tiles and 0 < walk_from(self.mimo_rank) * parts <= self.heads * z["b"]
        operands = "(4 E r nh ns + 2 E r di + 12 E nh) / (t hp)"
        forward = f"{operands} + 2 E di ns / (L t hp) + {prepared} + 2 Ts h"
        why = "turned q and k, v; chunk states; normed B and C, cos and sin, steps; the output"
        if walk:
            forward, why = f"12 T nh / (t hp) + {prepared} + 2 Ts h", "normed B and C, cos and sin, steps; the output"
        yield z.line("forward", forward, why, mark=UNMEASURED)
        # The last term: partial sums of the biases' gradients over 32 rows, of the rank weights' over 512; the others are small.
        sums = "T nh r r (ns / 4 + 3 P / 128) / (t hp)"
        gradients = f"(4 T G r ns + 8 T nh a + 16 T nh) / (t hp) + {sums} + (2 T W + 2 T di) / t"
        # The states' gradient is carried by the kernel that reads it, which leaves sums once a rank.
        carried = tiles and z["s"] * z["cp"] % self.chunk == 0
        carried &= SPECIALISED * parts <= self.heads * min(ENTRIES, z["b"])
        written = 2 * (not self.keep_states) + 2 * (not carried)
        of_states = " + ".join(["12 E nh r"] * carried + [f"{written} E di ns / L"] * bool(written))
        backward = f"{operands} + (2 E r di + {of_states}) / (t hp) + {prepared} + {gradients}"
        if self.head_pieces > 1:  # the output's gradient, of one piece once more
            backward += " + 2 T di / (t hp)"
        if self.recompute == "in_proj":  # made again, and not among what is kept
            backward += " + 2 T (W + (cp hp - 1) a) / t" + (" + 2 Ts h" if self.rates_apart(z.site) else "")
        yield z.line("backward", backward, "the same again, and the gradient of each")

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h W + 2 di h", "in and out")
        if self.recompute == "in_proj":
            yield z.work("input projection again", "2 h W", "its output is not kept", passes=1, model=False)
        chunk = "r r L (ns nh + di)"
        yield z.work(
            "scan", f"{chunk} + 4 r ns di + 6 r di", "rank r as r tokens: causal half of a chunk, states, rank weights"
        )
        if self.kernels == "fused":
            yield z.work("other half of a chunk", chunk, "computed and masked", model=False)
        if self.kernels == "fused" and not self.keep_states:
            yield z.work("chunk states again", "2 r ns di", "not kept for the backward pass", passes=1, model=False)

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("recurrent state", "4 di ns / t", "one matrix a head, fp32", "sequence")
        yield z.state("last k and x", "2 r nh ns / t + 2 di / t", "bf16, for the trapezoid", "sequence")
        yield z.state("angles", "4 nh a / t", "fp32", "sequence")
