"""Gated delta net (Yang et al., arXiv 2412.06464): Megatron's GatedDeltaNet on the kernels of flash-linear-attention, symbol `G`."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import PositiveInt

from nam_megatron.blocks import Block, residual
from nam_megatron.words.setting import Package, Row
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

CHUNK = 64  # of flash-linear-attention's chunk_gated_delta_rule; not a flag


class Gdn(Block):
    """Gated delta net: Megatron's own."""

    kind = "gdn"
    title = "gated delta net"
    colour = "bright_cyan"
    hue = "#8fae3c"
    letters = ("M", "R")
    symbol = "G"
    slot = "gdn_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "mtp")
    autotuned = True
    activates = True
    library = "flash-linear-attention's"

    key_heads: Annotated[PositiveInt, Row("heads of queries and keys", "linear_num_key_heads")]
    key_head_dim: Annotated[PositiveInt, Row("width of one of them", "linear_key_head_dim")]
    value_heads: Annotated[PositiveInt, Row("heads of values, as many to each key head", "linear_num_value_heads")]
    value_head_dim: Annotated[PositiveInt, Row("width of one of them", "linear_value_head_dim")]
    conv_width: Annotated[PositiveInt, Row("tokens that the convolution sees", "linear_conv_kernel_dim")]

    @property
    def in_proj_width(self) -> int:
        """Columns of the packed input projection: q, k, v, gate, beta, alpha."""
        keys, values = self.key_heads * self.key_head_dim, self.value_heads * self.value_head_dim
        return 2 * keys + 2 * values + 2 * self.value_heads

    def packages(self) -> Iterator[Package]:
        yield Package("flash-linear-attention", self.title)

    def small(self, site: Site) -> Mapping[str, int]:
        ranks = site.tensor * site.context
        return {"key_heads": 2 * ranks, "key_head_dim": 8, "value_heads": 4 * ranks, "value_head_dim": 16}

    def _sizes(self, z: Sizes) -> Sizes:
        """nk key heads of dk and nv value heads of dv, in all kd and vd wide; a convolution of cw; chunks of L."""
        nk, dk, nv, dv = self.key_heads, self.key_head_dim, self.value_heads, self.value_head_dim
        return z.own(dk=dk, nv=nv, dv=dv, kd=nk * dk, vd=nv * dv, cw=self.conv_width, L=CHUNK)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, at = z.site.hidden_size, "self_attention."
        keys, values = self.key_heads * self.key_head_dim, self.value_heads * self.value_head_dim
        yield from z.norm(f"{at}in_proj.layer_norm_", h)
        yield Param(f"{at}in_proj.weight", (self.in_proj_width, h), "tensor", "weight")
        yield Param(f"{at}conv1d.weight", (2 * keys + values, 1, self.conv_width), "tensor", "other")
        for name in ("dt_bias", "A_log"):
            yield Param(at + name, (self.value_heads,), "tensor", "other")
        yield from z.norm(f"{at}out_norm.", self.value_head_dim)
        yield Param(f"{at}out_proj.weight", (h, values), "tensor", "weight")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        yield from residual(z)
        mark = UNMEASURED
        yield z.line(
            "q, k, v, gate, beta, alpha", "2 T (2 kd + 2 vd + 2 nv) / t", "input of the convolution", mark=mark
        )
        yield z.line(
            "queries and keys", "4 T kd / t + 4 T nv dk / t", "normed, then one for each value head", mark=mark
        )
        yield z.line("values", "2 T vd / t", "convolved", mark=mark)
        yield z.line("decay and beta", "6 T nv / t", "fp32 and bf16", mark=mark)
        if z.site.deterministic:
            kept = "T nv (4 (L L - 1) / 3 + 24 L + 16 + 28 dk + 12 dv + 4 dk dv / L) / t"
            why = "in fp32: each row of a chunk's triangle as it is inverted, and what comes of them"
            yield z.line("delta rule in plain torch", kept, why, mark=mark)
        else:
            yield z.line("chunk matrices", "2 T nv L / t", "inverse of each chunk's triangle", mark=mark)
        yield z.line("output and gate", "4 T vd / t", "inputs of the gated norm", mark=mark)
        yield z.line("gated output", "w T vd / t", "input of the output projection", mark=mark)

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        states = "2 T nv dk dv / (L t)"
        yield z.line("forward", f"2 T (2 kd + vd) / t + {states}", "convolution and chunk states", mark=UNMEASURED)
        backward = f"2 T (2 kd + 2 vd + 2 nv) / t + 4 T nv (dk + dv) / t + 2 {states}"
        yield z.line("backward", backward, "the same again, and the gradients of each", mark=UNMEASURED)

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("projections", "2 h (2 kd + 2 vd + 2 nv) + 2 vd h", "in and out")
        yield z.work("convolution", "2 cw (2 kd + vd)", "")
        why = "causal half of a chunk: k k, its inverse times k and v, q k, times v; the states between chunks"
        yield z.work("delta rule", "nv (3 L dk + 2 L dv + 6 dk dv)", why)

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("convolution window", "2 cw (2 kd + vd) / t", "the last columns, bf16", "sequence")
        yield z.state("recurrent state", "4 nv dk dv / t", "one matrix a value head, fp32", "sequence", mark=UNMEASURED)
