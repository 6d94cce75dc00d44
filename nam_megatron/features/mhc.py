"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams mixed around each layer. Ours.

The formulas, and what MTP gets: runtime/hyper_connections.py. Its sizes travel in plan.json; Megatron has no flags for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from nam_megatron.errors import Problem, quoted
from nam_megatron.features import Feature
from nam_megatron.setting import SAME, Row
from nam_megatron.sizes import COMMUNICATION, FEATURES, UNMEASURED, Group, Line, Param, Sizes, Stage, Work

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Plan

# Recompute that frees a tensor and fills it again when a gradient comes by; on a CPU it does not come to an end, streams or not.
DISCARDING = {"layernorm", "moe_act", "mla_up_proj"}


class Mhc(Feature):
    """Manifold-constrained hyper-connections: residual streams mixed between layers."""

    name = "mhc"
    switch = "streams"

    streams: Annotated[int, Field(ge=0, le=8), Row("residual streams; 0 or 1: off, the plain residual")]
    sinkhorn_steps: Annotated[PositiveInt, Row("times that rows and columns of the residual map are normalised")]
    initial_scale: Annotated[NonNegativeFloat, Row("of what depends on the token in the three maps, before training")]
    epsilon: Annotated[
        float, Field(ge=1e-12, le=1), Row("beside the root mean square; the least sum that Sinkhorn divides by")
    ]
    kernels: Annotated[Literal["fused", "naive"], Row("ours in Triton, or plain torch", executes=SAME)]

    @property
    def on(self) -> bool:
        return self.streams > 1

    def build(self, stack: "ModuleSpec", layers: "Mapping[str, ModuleSpec]") -> "ModuleSpec":
        from nam_megatron.runtime import hyper_connections

        return hyper_connections.connected(stack, layers, **self.model_dump())

    def ours(self, plan: "Plan") -> str | None:
        return "Megatron 0.19.2 has no residual streams and would add each layer to one"

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, f = "feature.mhc.streams", plan.recipe.feature
        off = "set `feature.mhc.streams=0`, or "
        if plan.recipe.parallel.virtual_pipeline > 1:
            message = "residual streams have not been shown to pass through an interleaved pipeline"
            yield Problem(message, at, off + "`parallel.virtual_pipeline=1`")
        if f.recompute and f.recompute.granularity == "full":
            message = "full recompute of layers between residual streams has not been shown to be right"
            yield Problem(message, at, off + "selective recompute")
        if f.recompute and (discarded := sorted(DISCARDING & {*f.recompute.modules})):
            message = f"recompute of {quoted(discarded)} between residual streams has not been shown to be right"
            yield Problem(message, at, off + "leave them out of `feature.recompute.modules`")
        if f.cuda_graphs and not f.cuda_graphs.whole:
            message = "a CUDA graph of a layer would hold its residual streams, and none was captured yet"
            yield Problem(message, at, off + "`feature.cuda_graphs.impl=none`, or on one GPU full_iteration")
        elif f.cuda_graphs and self.kernels == "naive":
            message = "a graph of the whole step has not been tried with streams in plain torch"
            yield Problem(message, "feature.mhc.kernels", "set it to fused, or `feature.cuda_graphs.impl=none`")
        if f.fp8:
            message = (
                "residual streams between FP8 layers have not been shown: no CPU runs FP8, and no GPU has run these"
            )
            yield Problem(message, at, off + "`feature.fp8.recipe=none`")
        if f.muon:
            message = "Muon would take the maps of the residual streams, which are fp32, for matrices like others"
            yield Problem(message, at, off + "`optim=adamw`")

    def _sizes(self, z: Sizes, layers: int) -> Sizes:
        """n streams; m coefficients a token and layer: read, write and the n x n residual map."""
        return z.own(n=self.streams, m=self.streams * (self.streams + 2), layers=layers)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        maps, layers, at = self.streams * (self.streams + 2), len(stage.layers), "hyper_connection."
        width = self.streams * z.model.hidden_size
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
        if z.plan.recipe.parallel.pipeline > 1:
            why = "a received gradient and a received input have all streams"
            yield self._sizes(z, 1).line(
                "pipeline exchange", "4 (n - 1) Ts h", why, bucket=COMMUNICATION, mark=UNMEASURED
            )

    def flops(self, z: Sizes) -> Iterator[Work]:
        z = self._sizes(z, len(z.plan.layers))
        yield z.work("maps", "2 m n h layers", "coefficients from the streams")
        yield z.work("streams", "(2 n n + 4 n) h layers", "read, mixed and written")
        if self.kernels == "naive":
            again = "(2 m n + 2 n n + 4 n) h layers"
            yield z.work("once more", again, "in the backward pass", passes=1, model=False)
