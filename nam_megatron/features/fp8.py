"""FP8 training through Transformer Engine: Megatron's --fp8-format and --fp8-recipe."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Row, Setting
from nam_megatron.sizes import WORKSPACE, Group, Line, Sizes

if TYPE_CHECKING:
    from nam_megatron.plan import Plan
    from nam_megatron.recipe import Recipe


class Fp8(Feature):
    """FP8 training through Transformer Engine."""

    name = "fp8"
    switch = "recipe"

    recipe: Annotated[
        Literal["none", "tensorwise", "delayed", "blockwise"],
        Row("how tensors are scaled; Megatron's default is delayed"),
    ]
    format: Annotated[
        Literal["hybrid", "e4m3"], Row("e4m3 forward, e5m2 gradients when hybrid", "fp8", ("transformer.fp8",))
    ]
    param_gather: Annotated[
        bool, Row("weights are gathered in FP8", "fp8_param_gather", ("args.fp8_param_gather", "ddp.fp8_param_gather"))
    ]
    first_last_bf16: Annotated[
        bool, Row("layers at the edges stay in bf16", "first_last_layers_bf16", ("transformer.first_last_layers_bf16",))
    ]
    bf16_layers_at_start: Annotated[
        PositiveInt | None,
        Row("first layers in bf16", "num_layers_at_start_in_bf16", ("transformer.num_layers_at_start_in_bf16",)),
    ] = None
    bf16_layers_at_end: Annotated[
        PositiveInt | None,
        Row("last layers in bf16", "num_layers_at_end_in_bf16", ("transformer.num_layers_at_end_in_bf16",)),
    ] = None

    @property
    def on(self) -> bool:
        return self.recipe != "none"

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        why, fields = "Megatron's default is delayed", ("transformer.fp8_recipe",)
        yield Setting("fp8_recipe", self.recipe, why, "recipe", beside="format", fields=fields)
        yield Setting("fp8_margin", 0, "no margin in the scale", beside="format")
        yield Setting("fp8_wgrad", True, "weight gradients in FP8 too", beside="format")
        yield Setting("moe_router_padding_for_quantization", False, "TE pads each expert's tokens itself")

    @classmethod
    def off(cls, plan: "Plan") -> Iterator[Setting]:
        yield Setting("fp8", None, "bf16", fields=("transformer.fp8",))
        yield Setting("fp8_param_gather", False, "bf16", fields=("args.fp8_param_gather", "ddp.fp8_param_gather"))
        yield Setting("first_last_layers_bf16", False, "all of them", fields=("transformer.first_last_layers_bf16",))
        yield Setting("moe_router_padding_for_quantization", False, "TE pads each expert's tokens itself")

    def idle(self, recipe: "Recipe", kinds: frozenset[str]) -> Iterator[tuple[str, str]]:
        if not self.first_last_bf16:
            for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
                yield name, "no layer stays in bf16 (`feature.fp8.first_last_bf16=false`)"

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, r = "feature.fp8.", plan.recipe
        if (mamba := r.model.blocks.mamba2) and (width := mamba.in_proj_width) % 16:
            yield Problem(
                f"Mamba-2's input projection is {width} wide, which 16 does not divide: no FP8 GEMM",
                "model.blocks.mamba2.heads",
                "64 or 112 heads fit",
            )
        if self.recipe == "delayed" and self.first_last_bf16:
            yield Problem(
                "delayed scaling excludes bf16 edge layers", at + "first_last_bf16", "set it to false or use tensorwise"
            )
        if self.param_gather and not (r.feature.distributed_optimizer.enabled or r.feature.megatron_fsdp):
            yield Problem(
                "FP8 all-gather needs sharded weights",
                at + "param_gather",
                "set `feature.distributed_optimizer.enabled=true`",
            )
        recompute = r.feature.recompute
        if self.recipe == "delayed" and recompute and {"moe_act", "layernorm"} & set(recompute.modules):
            yield Problem("delayed scaling excludes recompute of `moe_act` and `layernorm`", at + "recipe")
        edges = max(self.bf16_layers_at_start or 0, self.bf16_layers_at_end or 0)
        if edges > r.model.depth // r.parallel.pipeline:
            yield Problem("more bf16 layers than a pipeline stage has", at + "bf16_layers_at_start")
        for name, width in (("hidden_size", r.model.hidden_size), ("ffn_hidden_size", r.model.ffn_hidden_size)):
            if width // r.parallel.tensor % 16:
                yield Problem(
                    f"FP8 GEMMs need widths that 16 divides, not {width} / tensor {r.parallel.tensor}", "model." + name
                )

    def in_bf16(self, number: int | None, depth: int) -> bool:
        """Whether layer `number` of `depth` (None: MTP's, which have no edge) stays in bf16."""
        if not self.first_last_bf16 or number is None:
            return False
        return not (self.bf16_layers_at_start or 0) < number <= depth - (self.bf16_layers_at_end or 0)

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """FP8 copies of the weights that TE multiplies with; gathered in FP8 they replace the bf16 weights at equal size."""
        if self.param_gather:
            return
        depth = len(z.plan.layers)
        held = [x for x in group.held if x.param.role == "weight" and not self.in_bf16(x.layer, depth)]
        why = "row-wise and transposed FP8 weights, cached over the microbatches"
        yield from group.line(z, WORKSPACE, "FP8 weights", "2", why, held)
