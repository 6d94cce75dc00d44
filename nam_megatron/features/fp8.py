"""FP8 training through Transformer Engine: Megatron's --fp8-format and --fp8-recipe."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import AfterValidator, PositiveInt

from nam_megatron.errors import Problem, quoted
from nam_megatron.features import Feature
from nam_megatron.setting import Row, Setting
from nam_megatron.sizes import WORKSPACE, Group, Line, Param, Sizes, Stage

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Layer, Plan
    from nam_megatron.recipe import Recipe


Part = Literal["experts", "shared_experts", "latents", "m2rnn", "mamba3_rates"]


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
    bf16_parts: Annotated[
        tuple[Part, ...],
        AfterValidator(lambda parts: tuple(part for part in get_args(Part) if part in parts)),
        Row(
            "what stays in bf16 where the model has it: routed experts, shared experts, the low-rank projections of MLA and DSA "
            "with its indexer, M2RNN's projections, of Mamba-3's input projection what sets decays and angles (dt, A, trap, angles)",
            was=[],  # as a stored plan would have it
        ),
    ]
    keep_inputs: Annotated[
        bool,
        Row(
            "what attention's output projection and the shared experts read is kept in FP8 for the weights' gradients, not quantised "
            "again in the backward pass",
            executes="the same numbers, made once instead of twice",
            was=False,
        ),
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

    def keeps(self, part: Part) -> bool:
        """Whether a part stays in bf16."""
        return part in self.bf16_parts

    def standing(self, plan: "Plan") -> Iterator[Part]:
        """The parts in bf16 that a model has."""
        yield from self._among(plan.recipe, plan.kinds | set(plan.mtp))

    def unneeded(self, recipe: "Recipe", kinds: frozenset[str]) -> Iterator[tuple[str, tuple[Part, ...]]]:
        if self.bf16_parts and not any(self._among(recipe, kinds)):
            yield "bf16_parts", ()

    def _among(self, recipe: "Recipe", kinds: Collection[str]) -> Iterator[Part]:
        moe = recipe.model.blocks.moe
        has = {
            "experts": "moe" in kinds,
            "shared_experts": "moe" in kinds and moe is not None and moe.shared_expert_hidden_size > 0,
            "latents": "mla" in kinds or "dsa" in kinds,
            "m2rnn": "m2rnn" in kinds,
            "mamba3_rates": "mamba3" in kinds,
        }
        yield from (part for part in self.bf16_parts if has[part])

    def said(self, plan: "Plan") -> str:
        """In one line of what stands."""
        but = ", ".join(self.standing(plan))
        return f"FP8 {self.recipe}" + (f" but for {but}" if but else "")

    def ours(self, plan: "Plan") -> str | None:
        if any(self.standing(plan)):
            return "on these arguments alone Megatron would multiply all parts in FP8"
        return None

    def build(self, stack: "ModuleSpec", layers: "Mapping[str, ModuleSpec]") -> "ModuleSpec":
        if self.bf16_parts:
            from nam_megatron.runtime import bf16_parts

            stack.metainfo.setdefault("hooks", []).append(bf16_parts.provider(self.bf16_parts))
        if self.keep_inputs:
            from nam_megatron.runtime import fp8_inputs

            stack.metainfo.setdefault("hooks", []).append(fp8_inputs.provide)
        return stack

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
        moe = r.model.blocks.moe
        if self.bf16_parts and not any(self.standing(plan)):
            yield Problem(
                f"this model has no {' or '.join(self.bf16_parts)} to keep in bf16", at + "bf16_parts", "set it to []"
            )
        if moe and "experts" in self.standing(plan) and not moe.grouped_gemm:
            message = "experts without grouped GEMM are in FP8 with all other layers"
            key = "model.blocks.moe.grouped_gemm"
            yield Problem(message, at + "bf16_parts", f"leave `experts` out, or set `{key}=true`")
        if any(self.standing(plan)) and r.feature.cuda_graphs and r.feature.cuda_graphs.modules:
            message = "CUDA graphs of parts of layers have not been tried with parts in bf16"
            yield Problem(message, at + "bf16_parts", "set it to [], or `feature.cuda_graphs.impl=none`")
        if self.bf16_parts and self.param_gather:
            message = "weights that are gathered in FP8 are FP8 in all parts"
            yield Problem(message, at + "bf16_parts", f"set it to [], or `{at}param_gather=false`")
        if self.recipe == "delayed":
            yield from self._undelayed(plan)
        if self.keep_inputs:
            yield from self._inputs_unkept(plan)
        if self.param_gather and not (r.feature.distributed_optimizer.enabled or r.feature.megatron_fsdp):
            yield Problem(
                "FP8 all-gather needs sharded weights",
                at + "param_gather",
                "set `feature.distributed_optimizer.enabled=true`",
            )
        edges = max(self.bf16_layers_at_start or 0, self.bf16_layers_at_end or 0)
        if edges > r.model.depth // r.parallel.pipeline:
            yield Problem("more bf16 layers than a pipeline stage has", at + "bf16_layers_at_start")
        for name, width in (("hidden_size", r.model.hidden_size), ("ffn_hidden_size", r.model.ffn_hidden_size)):
            if width // r.parallel.tensor % 16:
                yield Problem(
                    f"FP8 GEMMs need widths that 16 divides, not {width} / tensor {r.parallel.tensor}", "model." + name
                )

    def _inputs_unkept(self, plan: "Plan") -> Iterator[Problem]:
        """Where no input is quantised twice, or keeping it has not been tried."""
        r, key = plan.recipe, "feature.fp8.keep_inputs"
        parts = r.feature.recompute is not None and r.feature.recompute.granularity != "full"
        untried = (
            (self.recipe == "blockwise", "scaling `blockwise`"),
            (parts, "recompute of parts of layers"),
            (bool(r.feature.cuda_graphs and r.feature.cuda_graphs.modules), "CUDA graphs of parts of layers"),
            (r.feature.megatron_fsdp is not None, "an FSDP"),
            (r.feature.lora is not None, "adapters"),
        )
        for found, what in untried:
            if found:
                yield Problem(f"keeping FP8 inputs has not been tried with {what}", key, f"set `{key}=false`")
        if not any(self._kept_widths(plan, [*self._fp8_kinds(plan, plan.layers), *plan.mtp])):
            message = "this model has no attention and no shared experts in FP8 whose inputs would be quantised twice"
            yield Problem(message, key, f"set `{key}=false`")

    def _fp8_kinds(self, plan: "Plan", layers: Iterable["Layer"]) -> Iterator[str]:
        """Of these layers those that are not in bf16 as a whole."""
        depth = len(plan.layers)
        yield from (layer.kind for layer in layers if not self.in_bf16(layer.number, depth))

    def _kept_widths(self, plan: "Plan", kinds: Iterable[str]) -> Iterator[int]:
        """Of layers of these kinds: channels of what `keep_inputs` keeps."""
        m = plan.recipe.model
        for kind in kinds:
            if kind in ("mla", "dsa"):
                assert m.blocks.mla is not None
                yield m.num_attention_heads * m.blocks.mla.v_head_dim
            elif kind == "attention":
                assert m.blocks.attention is not None
                yield m.num_attention_heads * m.blocks.attention.head_dim
            elif kind == "moe" and m.blocks.moe and m.blocks.moe.shared_expert_hidden_size:
                if not self.keeps("shared_experts"):
                    yield m.hidden_size

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """Of attention a tensor rank keeps its heads', of the shared experts its share of the sequence where that is cut."""
        recompute = z.plan.recipe.feature.recompute
        if not (self.keep_inputs or self.recipe == "delayed") or (recompute and recompute.granularity == "full"):
            return
        kinds = list(self._fp8_kinds(z.plan, stage.layers))
        kinds += [*z.plan.mtp] * z.plan.mtp_depths if stage.last else []
        shared = sum(self._kept_widths(z.plan, (kind for kind in kinds if kind == "moe")))
        rest = sum(self._kept_widths(z.plan, (kind for kind in kinds if kind != "moe")))
        why = "of attention's output projections and the shared experts, in FP8"
        yield z.own(W=rest, Y=shared).line("inputs kept", "T W / t + Ts Y", why)

    def _undelayed(self, plan: "Plan") -> Iterator[Problem]:
        """What delayed scaling excludes, or what would lose or change its scales (Transformer Engine 2.20: pytorch/_extra_state.py,
        quantization.py).
        """
        r, recipe = plan.recipe, "feature.fp8.recipe"
        mamba3, recompute = r.model.blocks.mamba3, r.feature.recompute
        parts = [part for part in (recompute.modules if recompute else ()) if part in ("moe_act", "layernorm")]
        again = mamba3 is not None and "mamba3" in plan.kinds and mamba3.recompute != "none"
        pickled = "a checkpoint has the scales of delayed scaling as a pickle, which Transformer Engine refuses to open"
        for asked, message, key, way in (
            (self.first_last_bf16, "delayed scaling excludes bf16 edge layers", "feature.fp8.first_last_bf16", "false"),
            (self.keep_inputs, "delayed scaling keeps FP8 inputs by itself", "feature.fp8.keep_inputs", "false"),
            (parts, "delayed scaling excludes recompute of `moe_act` and `layernorm`", "feature.recompute.modules", None),
            (r.schedule.save, pickled, "schedule.save", "null"),
            (r.schedule.load, pickled, "schedule.load", "null"),
            (r.schedule.eval_steps, "evaluations would change the scales of delayed scaling, and so what is trained",
             "schedule.eval_steps", "0"),
            (again, "delayed scaling has not been tried with a projection that is computed again",
             "model.blocks.mamba3.recompute", "none"),
        ):  # fmt: skip
            if asked:
                other = f"`{key}={way}`" if way else f"leave {quoted(parts)} out of `{key}`"
                place = key if key.startswith("feature.fp8.") else recipe
                yield Problem(message, place, f"set `{recipe}=tensorwise`, or {other}")

    def in_bf16(self, number: int | None, depth: int) -> bool:
        """Whether layer `number` of `depth` (None: MTP's, which have no edge) stays in bf16."""
        if not self.first_last_bf16 or number is None:
            return False
        return not (self.bf16_layers_at_start or 0) < number <= depth - (self.bf16_layers_at_end or 0)

    def _kept(self, owner: str, param: Param) -> bool:
        """Whether a parameter is of a part that stays in bf16. owner: the kind of its layer."""
        if param.shard == "expert":
            part: Part = "experts"
        elif ".shared_experts." in param.name:
            part = "shared_experts"
        elif any(name in param.name for name in ("_down_proj", "_up_proj", ".indexer.")):
            part = "latents"
        elif owner == "m2rnn":
            part = "m2rnn"
        else:
            return False
        return self.keeps(part)

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """FP8 copies of the weights that TE multiplies with; gathered in FP8 they replace the bf16 weights at equal size."""
        if self.param_gather:
            return
        depth = len(z.plan.layers)
        held = [
            x
            for x in group.held
            if x.param.role == "weight" and not self.in_bf16(x.layer, depth) and not self._kept(x.owner, x.param)
        ]
        why = "row-wise and transposed FP8 weights, cached over the microbatches"
        yield from group.line(z, WORKSPACE, "FP8 weights", "2", why, held)
