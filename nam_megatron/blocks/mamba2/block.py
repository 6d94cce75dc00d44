"""Mamba-2 (arXiv 2405.21060): Megatron's MambaMixer, symbol `M`."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import PositiveInt

from nam_megatron.blocks import (
    BF16_COLUMNS,
    FP8_COLUMNS,
    NO_KERNEL,
    Block,
    needless,
    padding,
    padding_working,
    residual,
)
from nam_megatron.words.setting import Package, Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import Line, Param, Sizes, State, Work

CHUNK = 128  # MambaMixer's default chunk_size; not a flag
CONV = 4  # its d_conv


class Mamba2(Block):
    """Mamba-2: Megatron's own mixer."""

    kind = "mamba2"
    title = "Mamba-2"
    colour = "bright_green"
    hue = "#58b368"
    letters = ("M", "R")
    symbol = "M"
    slot = "mamba_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("in_proj", "out_proj")
    graph_parts = ("mamba",)
    autotuned = True
    library = "mamba-ssm's"
    fixed = MappingProxyType({"norm_epsilon": (1e-5, "Megatron's gated norm has it from its own default")})
    without_gpu = (("strided_norm", True, False, NO_KERNEL), ("padded_projection", True, False, NO_KERNEL))
    padded = ("padded_projection", "strided")

    heads: Annotated[PositiveInt, Row("heads; unset, Megatron takes 2 * hidden_size / head_dim", "mamba_num_heads")]
    head_dim: Annotated[PositiveInt, Row("width of one head", "mamba_head_dim")]
    state_dim: Annotated[PositiveInt, Row("columns of a head's state; Megatron's default is 128", "mamba_state_dim")]
    groups: Annotated[PositiveInt, Row("B and C groups", "mamba_num_groups")]
    strided: Annotated[
        bool,
        Row("the scan reads its input where it lies; Megatron's mixer copies it, and the gradient back",
            executes="the same kernels on the same values"),
    ]  # fmt: skip
    strided_norm: Annotated[
        bool,
        Row("the norm behind the scan reads its input where it lies, by a kernel of ours; mamba-ssm's has it copied",
            executes="the same steps on the same values; the weight's gradient is summed over other parts of the rows", was=False),
    ]  # fmt: skip

    padded_projection: Annotated[
        bool,
        Row("the input projection multiplies by rows of zeros too, up to a multiple of 16, as FP8 GEMMs want",
            executes="the same products, and columns of zeros that nobody reads", was=False),
    ]  # fmt: skip

    @property
    def in_proj_width(self) -> int:
        """Columns of the packed input projection: z, x, B, C, dt."""
        return 2 * self.heads * self.head_dim + 2 * self.groups * self.state_dim + self.heads

    def settings(self, site: Site) -> Iterator[Setting]:
        yield Setting("use_mamba_mem_eff_path", True, "the fused kernel; Megatron does not test the other")
        yield Setting("mamba_training_ssm_states_dtype", None, "chunk states in the parameters' dtype")

    def columns(self, site: Site) -> int:
        """What the GEMMs of the input projection want multiples of."""
        return FP8_COLUMNS if site.fp8 else BF16_COLUMNS

    def unneeded(self, site: Site) -> Iterator[tuple[str, bool]]:
        if self.padded_projection and needless(self.in_proj_width, self.columns(site), site.tensor):
            yield "padded_projection", False

    def packages(self) -> Iterator[Package]:
        for package in ("mamba-ssm", "causal-conv1d", "einops"):
            yield Package(package, self.title)

    def alone(self, site: Site) -> Iterator[str]:
        if self.padded_projection and site.fp8:
            yield f"an input projection of {self.in_proj_width:,} columns has no FP8 GEMM unless columns of zeros stand behind them"

    def small(self, site: Site) -> Mapping[str, int]:
        ranks = site.tensor * site.context
        return {"heads": 8 * ranks, "head_dim": 8, "state_dim": 16, "groups": 2 * ranks}

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads of P, in all di wide; B and C of G groups of ns; scanned in chunks of L."""
        columns = self.in_proj_width / z["t"]
        # Of all pc columns that the projection multiplies by.
        pad = -columns % self.columns(z.site) if self.padded_projection else 0
        return z.own(
            nh=self.heads, P=self.head_dim, di=self.heads * self.head_dim, G=self.groups, ns=self.state_dim, L=CHUNK,
            pad=pad, pc=columns + pad,
        )  # fmt: skip

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, inner = z.site.hidden_size, self.heads * self.head_dim
        conv = inner + 2 * self.groups * self.state_dim
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.in_proj.weight", (self.in_proj_width, h), "tensor", "weight")
        yield Param("mixer.conv1d_weight", (conv, 1, CONV), "tensor", "other")
        yield Param("mixer.conv1d_bias", (conv,), "tensor", "other")
        for name in ("dt_bias", "A_log", "D"):
            yield Param(f"mixer.{name}", (self.heads,), "tensor", "other")
        yield Param("mixer.norm.weight", (inner,), "tensor", "other")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        yield from residual(z)
        copied = "batch first: a copy of the projection, which is freed"
        why = "the projection where it lies" if self.strided else copied
        yield z.line(
            "z, x, B, C, dt", "2 T (2 di + 2 G ns + nh) / t" + (" + 2 T pad" if self.padded_projection else ""), why
        )
        if self.padded_projection:
            yield from padding(z)
        yield z.line("scan output", "2 T di / t", "the scan computes convolution and chunk states again")
        lies = "where it lies" if self.strided_norm else "sequence first"
        yield z.line("gated norm", "2 T di / t + 4 T G / t", f"its input, {lies}, and statistics")
        yield z.line("gated output", "w T di / t", "input of the output projection")

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        forward = "2 T (2 di + 2 G ns) / t + 4 T L G / t + 6 T di ns / (L t)"
        yield z.line("forward", forward, "convolution, output, C B products and chunk states, fp32 and bf16")
        backward = (
            "6 T (di + 2 G ns) / t + 2 T (3 di + 2 G ns + nh) / t + 8 T nh / t + 8 T (L + ns) G / t + 4 T di ns / (L t)"
        )
        yield z.line("backward", backward, "the same again, and the gradients of each")
        if self.padded_projection:
            yield from padding_working(z)

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 di + 2 G ns + nh) + 2 di h", "in and out")
        yield z.work("convolution", "8 (di + 2 G ns)", "width 4")
        yield z.work("scan", "L ns G + L di + 4 ns di", "causal half of a chunk, and the states between chunks")

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("convolution window", "8 (di + 2 G ns) / t", "the last 4 columns, bf16", "sequence")
        yield z.state("recurrent state", "2 di ns / t", "one matrix a head, bf16", "sequence")
