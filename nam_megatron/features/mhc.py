"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams mixed around each layer. Ours.

The formulas, and what MTP gets: runtime/hyper_connections.py. Its sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from nam_megatron.blocks import NO_KERNEL
from nam_megatron.features import Feature
from nam_megatron.words.setting import SAME, Row
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import COMMUNICATION, FEATURES, UNMEASURED, Group, Line, Param, Sizes, Stage, Work

# Recompute that frees a tensor and fills it again when a gradient comes by; on a CPU it does not come to an end, streams or not.
DISCARDING = {"layernorm", "moe_act", "mla_up_proj"}


class Mhc(Feature):
    """Manifold-constrained hyper-connections: residual streams mixed between layers."""

    name = "mhc"
    switch = "streams"
    torch_side = "hyper_connections"
    shapes = True
    plain = MappingProxyType({"kernels": "naive"})
    without_gpu = (("kernels", "fused", "naive", NO_KERNEL),)

    streams: Annotated[int, Field(ge=0, le=8), Row("residual streams; 0 or 1: off, the plain residual")]
    sinkhorn_steps: Annotated[PositiveInt, Row("times that rows and columns of the residual map are normalised")]
    initial_scale: Annotated[NonNegativeFloat, Row("of what depends on the token in the three maps, before training")]
    epsilon: Annotated[
        float, Field(ge=1e-12, le=1), Row("beside the root mean square; the least sum that Sinkhorn divides by")
    ]
    kernels: Annotated[Literal["fused", "naive"], Row("ours in Triton, or plain torch", executes=SAME)]

    def exported(self, kinds: Collection[str]) -> tuple[str, Mapping[str, Any]]:
        return "mhc", self.model_dump(include={"streams", "sinkhorn_steps", "epsilon"})

    @property
    def on(self) -> bool:
        return self.streams > 1

    def ours(self, site: Site) -> str | None:
        return "Megatron 0.19.2 has no residual streams and would add each layer to one"

    def _sizes(self, z: Sizes, layers: int) -> Sizes:
        """n streams; m coefficients a token and layer: read, write and the n x n residual map."""
        return z.own(n=self.streams, m=self.streams * (self.streams + 2), layers=layers)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        maps, layers, at = self.streams * (self.streams + 2), len(stage.layers), "hyper_connection."
        width = self.streams * z.site.hidden_size
        yield Param(f"{at}mapping_proj.weight", (maps, width), "replicated", "weight", layers)
        yield Param(f"{at}bias", (maps,), "replicated", "other", layers)
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            yield Param(f"{at}{name}", (1,), "replicated", "other", layers)

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        z, more = self._sizes(z, len(stage.layers)), {"bucket": FEATURES}
        yield z.line(
            "residual streams", "2 n Ts h layers", "before each layer, once; its norm's input is the layer's", **more
        )
        yield z.line(
            "layers' outputs", "2 Ts h layers", "for the gradient of how they are dealt to the streams", **more
        )
        if self.kernels == "fused":
            yield z.line("maps", "4 (2 m - n + 1) Ts layers", "of each token, fp32, and what they came of", **more)
        else:
            yield z.line("maps", "4 (m - n) Ts layers", "write and residual map of each token, fp32", **more)

    def working(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        if self.kernels == "fused":
            formula, why = "4 n Ts h", "gradients of a layer's streams, before and after what reads"
        else:
            formula, why = "16 n Ts h", "in fp32: a layer's streams, what comes of them, their gradients"
        yield self._sizes(z, 1).line("backward", formula, why, bucket=FEATURES)

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        if z.site.pipeline > 1:
            why = "a received gradient and a received input have all streams"
            yield self._sizes(z, 1).line(
                "pipeline exchange", "4 (n - 1) Ts h", why, bucket=COMMUNICATION, mark=UNMEASURED
            )

    def flops(self, z: Sizes) -> Iterator[Work]:
        z = self._sizes(z, len(z.site.layers))
        yield z.work("maps", "2 m n h layers", "coefficients from the streams")
        yield z.work("streams", "(2 n n + 4 n) h layers", "read, mixed and written")
        if self.kernels == "naive":
            again = "(2 m n + 2 n n + 4 n) h layers"
            yield z.work("once more", again, "in the backward pass", passes=1, model=False)
