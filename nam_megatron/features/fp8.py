"""FP8 training through Transformer Engine: Megatron's --fp8-format and --fp8-recipe."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Setting
from nam_megatron.sizes import WORKSPACE, Line


class Fp8(Feature):
    name: ClassVar[str] = "fp8"

    recipe: Literal["none", "tensorwise", "delayed", "blockwise"]
    format: Literal["hybrid", "e4m3"]
    param_gather: bool
    first_last_bf16: bool
    bf16_layers_at_start: PositiveInt
    bf16_layers_at_end: PositiveInt

    @property
    def on(self) -> bool:
        return self.recipe != "none"

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("fp8", self.format if self.on else None, "e4m3 forward, e5m2 gradients when hybrid", "format")
        if self.on:
            yield Setting("fp8_recipe", self.recipe, "Megatron's default is delayed", "recipe")
            yield Setting("fp8_margin", 0, "no margin in the scale")
            yield Setting("fp8_wgrad", True, "weight gradients in FP8 too")
        yield Setting("fp8_param_gather", self.on and self.param_gather, "all-gather weights in FP8", "param_gather")
        yield Setting(
            "first_last_layers_bf16", self.on and self.first_last_bf16, "edge layers stay in bf16", "first_last_bf16"
        )
        if self.on and self.first_last_bf16:
            yield Setting(
                "num_layers_at_start_in_bf16", self.bf16_layers_at_start, "first layers", "bf16_layers_at_start"
            )
            yield Setting("num_layers_at_end_in_bf16", self.bf16_layers_at_end, "last layers", "bf16_layers_at_end")
        yield Setting("moe_router_padding_for_quantization", False, "TE pads each expert's tokens itself")

    def idle(self) -> Iterator[Problem]:
        for name in ("param_gather", "first_last_bf16"):
            if getattr(self, name):
                yield Problem(f"`{name}` without FP8", f"feature.fp8.{name}", "set `precision=fp8_tensorwise`")

    def check(self, plan) -> Iterator[Problem]:
        at, r = "feature.fp8.", plan.recipe
        mamba = r.model.blocks.mamba2
        if "mamba2" in plan.kinds and (width := mamba.in_proj_width) % 16:
            yield Problem(
                f"Mamba-2's input projection is {width} wide, which 16 does not divide: no FP8 GEMM",
                "model.blocks.mamba2.heads",
                "64 or 112 heads fit",
            )
        if self.recipe == "delayed" and self.first_last_bf16:
            yield Problem(
                "delayed scaling excludes bf16 edge layers", at + "first_last_bf16", "set it to false or use tensorwise"
            )
        if self.param_gather and not (r.feature.distributed_optimizer.enabled or r.feature.megatron_fsdp.enabled):
            yield Problem(
                "FP8 all-gather needs sharded weights",
                at + "param_gather",
                "set `feature.distributed_optimizer.enabled=true`",
            )
        if self.recipe == "delayed" and {"moe_act", "layernorm"} & set(r.feature.recompute.modules):
            yield Problem("delayed scaling excludes recompute of `moe_act` and `layernorm`", at + "recipe")
        if (
            self.first_last_bf16
            and max(self.bf16_layers_at_start, self.bf16_layers_at_end) > r.model.depth // r.parallel.pipeline
        ):
            yield Problem("more bf16 layers than a pipeline stage has", at + "bf16_layers_at_start")
        for name, width in (("hidden_size", r.model.hidden_size), ("ffn_hidden_size", r.model.ffn_hidden_size)):
            if width // r.parallel.tensor % 16:
                yield Problem(
                    f"FP8 GEMMs need widths that 16 divides, not {width} / tensor {r.parallel.tensor}", "model." + name
                )

    def in_bf16(self, number: int | None, depth: int) -> bool:
        """Whether layer `number` of `depth` (None: MTP's, which have no edge) stays in bf16."""
        edge = self.on and self.first_last_bf16 and number is not None
        return not self.on or (edge and not self.bf16_layers_at_start < number <= depth - self.bf16_layers_at_end)

    def state(self, z, group) -> Iterator[Line]:
        """FP8 copies of the weights that TE multiplies with; gathered in FP8 they replace the bf16 weights at equal size."""
        if self.param_gather:
            return
        depth = len(z.plan.layers)
        held = [x for x in group.held if x.param.role == "weight" and not self.in_bf16(x.layer, depth)]
        why = "row-wise and transposed FP8 weights, cached over the microbatches"
        yield from group.line(z, WORKSPACE, "FP8 weights", "2", why, held)
