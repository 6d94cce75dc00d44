"""Mamba-2 (arXiv 2405.21060): Megatron's MambaMixer, symbol `M`."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pydantic import PositiveInt

from nam_megatron.blocks import (
    BF16_COLUMNS,
    FP8_COLUMNS,
    Block,
    divides,
    needless,
    padding,
    padding_working,
    residual,
    spread,
    unpadded,
)
from nam_megatron.errors import Problem, quoted
from nam_megatron.setting import Row, Setting
from nam_megatron.sizes import Line, Param, Sizes, State, Work

if TYPE_CHECKING:
    from megatron.core.models.backends import BackendSpecProvider
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Layer, Plan
    from nam_megatron.recipe import Recipe

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
    adapted = ("in_proj", "out_proj")
    graph_parts = ("mamba",)
    autotuned = True
    fixed = MappingProxyType({"norm_epsilon": (1e-5, "Megatron's gated norm has it from its own default")})

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

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        yield Setting("use_mamba_mem_eff_path", True, "the fused kernel; Megatron does not test the other")
        yield Setting("mamba_training_ssm_states_dtype", None, "chunk states in the parameters' dtype")

    def build(self, backend: "BackendSpecProvider", plan: "Plan") -> "ModuleSpec":
        from nam_megatron.blocks.mamba2 import layer

        return layer.spec(backend, self, self.columns(plan.recipe) if self.padded_projection else None)

    def columns(self, recipe: "Recipe") -> int:
        """What the GEMMs of the input projection want multiples of."""
        return FP8_COLUMNS if recipe.feature.fp8 else BF16_COLUMNS

    def unneeded(self, recipe: "Recipe", kinds: frozenset[str]) -> Iterator[tuple[str, bool]]:
        if self.padded_projection and needless(self.in_proj_width, self.columns(recipe), recipe.parallel.tensor):
            yield "padded_projection", False

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, p = "model.blocks.mamba2.", plan.recipe.parallel
        yield from divides(at + "heads", self.heads, self.groups, "Mamba-2 heads", at + "groups")
        yield from spread(at + "heads", self.heads, p, "Mamba-2 heads")
        yield from divides(at + "groups", self.groups, p.tensor, "Mamba-2 groups", "parallel.tensor")
        # Megatron repeats a group whose heads are spread over context ranks.
        ranks, of_rank = p.tensor * p.context, self.groups // p.tensor
        if of_rank and max(of_rank, p.context) % min(of_rank, p.context):
            text = f"{of_rank} groups of Mamba-2 on a tensor rank are neither spread over {p.context} context ranks nor repeated"
            yield Problem(text, at + "groups", "one of the two numbers has to divide the other")
        groups = max(self.groups // ranks, 1)
        width = self.heads // ranks * (2 * self.head_dim + 1) + 2 * groups * self.state_dim
        if self.strided and width % 8 and not self.padded_projection:
            off = f"set it and `{at}strided_norm` to false" if self.strided_norm else "set it to false"
            yield Problem(
                f"causal-conv1d wants strides that 8 divides, and the projection has {width} columns on each GPU",
                at + "strided",
                f"{off}, or make the heads of a GPU a multiple of 8",
            )
        if self.padded_projection:
            yield from self._unpadded(plan, at + "padded_projection")
        elif plan.recipe.feature.fp8 and self.in_proj_width % (FP8_COLUMNS * p.tensor):
            yield Problem(
                f"Mamba-2's input projection is {self.in_proj_width} / tensor {p.tensor} wide, which 16 does not divide: no FP8 GEMM",
                at + "heads",
                f"choose heads that make it a multiple of {FP8_COLUMNS * p.tensor}" + self._way_to_pad(p.context),
            )
        if self.strided_norm and not self.strided:
            message = "only the strided mixer has a norm that reads strides"
            yield Problem(message, at + "strided_norm", f"set it to false, or `{at}strided=true`")
        if self.strided_norm and p.context > 1:
            message = "context ranks exchange the scan's output before its norm, which copies it"
            yield Problem(message, at + "strided_norm", "set it to false")

    def _way_to_pad(self, context: int) -> str:
        """What a hint adds where columns of zeros would do."""
        words = [
            "model.blocks.mamba2.padded_projection=true",
            *([] if self.strided else ["model.blocks.mamba2.strided=true"]),
        ]
        return f", or set {quoted(words)}" if context == 1 else ""

    def _unpadded(self, plan: "Plan", key: str) -> Iterator[Problem]:
        columns = self.columns(plan.recipe)
        yield from unpadded(plan, key, self.in_proj_width, columns)
        if needless(self.in_proj_width, columns, plan.recipe.parallel.tensor):
            return
        if not self.strided:
            message = "Megatron's mixer cuts the projection into its parts, and has none for columns of zeros"
            yield Problem(message, key, "set it to false, or `model.blocks.mamba2.strided=true`")
        if plan.recipe.parallel.context > 1:
            yield Problem(
                "context ranks exchange the projection's parts, and columns of zeros are none", key, "set it to false"
            )

    def _sizes(self, z: Sizes) -> Sizes:
        """nh heads of P, in all di wide; B and C of G groups of ns; scanned in chunks of L."""
        columns = self.in_proj_width / z["t"]
        # Of all pc columns that the projection multiplies by.
        pad = -columns % self.columns(z.plan.recipe) if self.padded_projection else 0
        return z.own(
            nh=self.heads, P=self.head_dim, di=self.heads * self.head_dim, G=self.groups, ns=self.state_dim, L=CHUNK,
            pad=pad, pc=columns + pad,
        )  # fmt: skip

    def params(self, z: Sizes, layer: "Layer | None") -> Iterator[Param]:
        h, inner = z.model.hidden_size, self.heads * self.head_dim
        conv = inner + 2 * self.groups * self.state_dim
        yield from z.norm("mixer.in_proj.layer_norm_", h)
        yield Param("mixer.in_proj.weight", (self.in_proj_width, h), "tensor", "weight")
        yield Param("mixer.conv1d_weight", (conv, 1, CONV), "tensor", "other")
        yield Param("mixer.conv1d_bias", (conv,), "tensor", "other")
        for name in ("dt_bias", "A_log", "D"):
            yield Param(f"mixer.{name}", (self.heads,), "tensor", "other")
        yield Param("mixer.norm.weight", (inner,), "tensor", "other")
        yield Param("mixer.out_proj.weight", (h, inner), "tensor", "weight")

    def activations(self, z: Sizes, layer: "Layer | None") -> Iterator[Line]:
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

    def working(self, z: Sizes, layer: "Layer | None") -> Iterator[Line]:
        z = self._sizes(z)
        forward = "2 T (2 di + 2 G ns) / t + 4 T L G / t + 6 T di ns / (L t)"
        yield z.line("forward", forward, "convolution, output, C B products and chunk states, fp32 and bf16")
        backward = (
            "6 T (di + 2 G ns) / t + 2 T (3 di + 2 G ns + nh) / t + 8 T nh / t + 8 T (L + ns) G / t + 4 T di ns / (L t)"
        )
        yield z.line("backward", backward, "the same again, and the gradients of each")
        if self.padded_projection:
            yield from padding_working(z)

    def flops(self, z: Sizes, layer: "Layer | None") -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 di + 2 G ns + nh) + 2 di h", "in and out")
        yield z.work("convolution", "8 (di + 2 G ns)", "width 4")
        yield z.work("scan", "L ns G + L di + 4 ns di", "causal half of a chunk, and the states between chunks")

    def serving(self, z: Sizes, layer: "Layer | None") -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("convolution window", "8 (di + 2 G ns) / t", "the last 4 columns, bf16", "sequence")
        yield z.state("recurrent state", "2 di ns / t", "one matrix a head, bf16", "sequence")
