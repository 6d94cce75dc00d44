"""M2RNN (arXiv 2603.14360): recurrence with a matrix state, h = f h + (1 - f) tanh(h W + k v^T). Ours, in Megatron's `M` slot.

The layer's sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from nam_megatron.blocks import (
    BF16_COLUMNS,
    FP8_COLUMNS,
    NO_KERNEL,
    Block,
    Gauge,
    needless,
    padding,
    padding_working,
    residual,
)
from nam_megatron.errors import Problem
from nam_megatron.words.setting import SAME, Row
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

CHECKPOINT = 4  # tokens between two states that are kept for the backward pass (kernel.Config.tokens)
ROWS = 16  # of a head's state that one program of the kernels owns (kernel.Config.rows)


def odd_sizes(k_dim: int, v_dim: int) -> Iterator[tuple[str, str]]:
    """Sizes that the fused kernels do not take, by name, and why. Tensor cores multiply tiles of 16; Triton's sides are powers of two."""
    if k_dim % ROWS:
        yield "k_dim", f"M2RNN's kernels take key widths that {ROWS} divides, not {k_dim}"
    if v_dim not in (16, 32):
        yield "v_dim", f"M2RNN's kernels take value widths of 16 and 32, not {v_dim}"


class M2Rnn(Block):
    """M2RNN, a recurrence with a matrix state: our own mixer."""

    kind = "m2rnn"
    title = "M2RNN"
    colour = "bright_magenta"
    hue = "#c2479e"
    measures = Gauge("M2RNN gain", largest=True)
    letters = ("R",)
    symbol = "M"
    slot = "mamba_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("in_proj", "out_proj")
    stock = False
    graph_parts = ("mamba",)
    without_gpu = (("kernels", "fused", "naive", NO_KERNEL), ("padded_projection", True, False, NO_KERNEL))
    padded = ("padded_projection",)
    trains = ("gradient_clip",)

    kernels: Annotated[Literal["fused", "naive"], Row("ours in Triton, or plain torch", executes=SAME)]
    k_dim: Annotated[PositiveInt, Row("rows of a head's state: width of queries and keys, one head of each")]
    v_dim: Annotated[PositiveInt, Row("columns of a head's state: width of a value")]
    heads: Annotated[PositiveInt, Row("heads of values, gates and states")]
    conv_width: Annotated[PositiveInt, Row("tokens of the causal convolution over q, k and v")]
    gradient_clip: Annotated[
        PositiveFloat | None, Row("bound of each element of what a state's gradient gets from later tokens; null: none")
    ]
    padded_projection: Annotated[
        bool,
        Row("the input projection multiplies by rows of zeros too, up to a multiple of 8, or of 16 in FP8, as Hopper's GEMMs want",
            executes="the same products, by other kernels, and columns of zeros that nobody reads", was=False),
    ]  # fmt: skip

    def columns(self, site: Site) -> int:
        """What the GEMMs of the input projection want multiples of."""
        return BF16_COLUMNS if not site.fp8 or site.keeps("m2rnn") else FP8_COLUMNS

    def unneeded(self, site: Site) -> Iterator[tuple[str, bool]]:
        if self.padded_projection and needless(self.in_proj_width, self.columns(site), site.tensor):
            yield "padded_projection", False

    def unserved(self) -> Iterator[Problem]:
        """Sizes at which the chosen kernels cannot run."""
        if self.kernels == "fused":
            for name, text in odd_sizes(self.k_dim, self.v_dim):
                yield Problem(text, key=self.at(name), law="m2rnn-kernel-sizes")

    @property
    def in_proj_width(self) -> int:
        """Columns of the packed input projection: q, k, v, gate, forget."""
        return 2 * self.k_dim + 2 * self.heads * self.v_dim + self.heads

    def parts(self) -> Iterator[str]:
        yield "m2rnn"

    def part(self, param: Param) -> str:
        return "m2rnn"

    def small(self, site: Site) -> Mapping[str, int]:
        return {"k_dim": 16, "v_dim": 16, "heads": 2 * site.tensor * site.context}

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads with a state of K x Vh; a convolution of width c over q, k and v; states kept every L tokens."""
        own = dict(nh=self.heads, K=self.k_dim, Vh=self.v_dim, c=self.conv_width, L=CHECKPOINT)
        # pad: columns that `padded_projection` puts behind the projection's; pc is all that it multiplies by then.
        columns = self.in_proj_width / z["t"]
        pad = -columns % self.columns(z.site) if self.padded_projection else 0
        return z.in_bf16("m2rnn").own(**own, parts=self.k_dim / ROWS, pad=pad, pc=columns + pad)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, inner = z.site.hidden_size, self.heads * self.v_dim
        conv = 2 * self.k_dim + inner
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.conv1d_weight", (conv, 1, self.conv_width), "tensor", "other")
        yield Param("mixer.conv1d_bias", (conv,), "tensor", "other")
        yield Param("mixer.norm_weight", (inner,), "tensor", "other")
        yield Param("mixer.state_weight", (self.heads, self.v_dim, self.v_dim), "tensor", "other")
        yield Param("mixer.D", (inner,), "tensor", "other")
        yield Param("mixer.A_log", (self.heads,), "tensor", "other")
        yield Param("mixer.dt_bias", (self.heads,), "tensor", "other")
        yield Param("mixer.in_proj.weight", (self.in_proj_width, h), "tensor", "weight")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z, naive = self._sizes(z), self.kernels == "naive"
        yield from residual(z)
        projected = "2 T (2 K cp + 2 nh Vh + nh) / t" + (" + 2 T pad" if self.padded_projection else "")
        yield z.line("q, k, v, gate, forget", projected, "the whole projection", mark=UNMEASURED)
        if self.padded_projection:
            yield from padding(z)
        yield z.line(
            "after the convolution",
            "2 T (2 K cp + nh Vh) / t + 4 T K cp (t - 1) / t",
            "q, k and v; q and k are gathered",
            mark=UNMEASURED,
        )
        yield z.line("forget gate", "12 T nh / t", "fp32: its input, softplus and result", mark=UNMEASURED)
        if naive:
            yield z.line("every state", "24 T nh K Vh / t", "fp32: what autograd keeps of each step", mark=UNMEASURED)
        else:
            yield z.line(
                "states", "4 T nh K Vh / (L t)", "fp32, one every L tokens; the rest is computed again", mark=UNMEASURED
            )
        yield z.line(
            "output",
            "(2 + w) T nh Vh / t + 4 T",
            "of the recurrence, and gated: input of the projection",
            mark=UNMEASURED,
        )

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        if self.padded_projection:
            yield from padding_working(z)
        if self.kernels == "naive":
            yield z.line("backward", "24 nh K Vh b / t", "one step's gradients", mark=UNMEASURED)
            return
        yield z.line(
            "forward",
            "4 T nh Vh parts / t + 2 T nh Vh / t",
            "each program's share of the output, fp32",
            mark=UNMEASURED,
        )
        backward = "8 T nh K / t + 4 T nh Vh parts / t + 4 T nh parts / t + 4 T (2 K + nh Vh) / t"
        yield z.line(
            "backward",
            backward,
            "each head's share of q's and k's gradients, each program's of v's and f's",
            mark=UNMEASURED,
        )

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 K + 2 nh Vh + nh) + 2 nh Vh h", "in and out")
        yield z.work("convolution", "2 c (2 K + nh Vh)", "")
        yield z.work("recurrence", "nh (2 K Vh Vh + 8 K Vh)", "h W, k v, forget, q h")

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("recurrent state", "4 nh K Vh / t", "one matrix a head, fp32", "sequence", mark=UNMEASURED)
        yield z.state(
            "convolution window", "2 c (2 K + nh Vh) / t", "the last columns, bf16", "sequence", mark=UNMEASURED
        )
