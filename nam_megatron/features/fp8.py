"""FP8 training through Transformer Engine: Megatron's --fp8-format and --fp8-recipe."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, PositiveInt

from nam_megatron.features import Feature
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import WORKSPACE, Group, Line, Param, Sizes, Stage

Part = Literal["experts", "shared_experts", "latents", "m2rnn", "mamba3_rates"]


class Fp8(Feature):
    """FP8 training through Transformer Engine."""

    name = "fp8"
    switch = "recipe"
    torch_side = "fp8"

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

    def standing(self, site: Site) -> Iterator[Part]:
        """The parts in bf16 that a model has."""
        has = {part for kind in site.kinds for part in site.blocks.of(kind).parts()}
        yield from (part for part in self.bf16_parts if part in has)

    def unneeded(self, site: Site) -> Iterator[tuple[str, tuple[Part, ...]]]:
        if self.bf16_parts and not any(self.standing(site)):
            yield "bf16_parts", ()

    def said(self, site: Site) -> str:
        """In one line of what stands."""
        but = ", ".join(self.standing(site))
        return f"FP8 {self.recipe}" + (f" but for {but}" if but else "")

    def ours(self, site: Site) -> str | None:
        if any(self.standing(site)):
            return "on these arguments alone Megatron would multiply all parts in FP8"
        return None

    def settings(self, site: Site) -> Iterator[Setting]:
        why, fields = "Megatron's default is delayed", ("transformer.fp8_recipe",)
        yield Setting("fp8_recipe", self.recipe, why, "recipe", beside="format", fields=fields)
        yield Setting("fp8_margin", 0, "no margin in the scale", beside="format")
        yield Setting("fp8_wgrad", True, "weight gradients in FP8 too", beside="format")
        yield Setting("moe_router_padding_for_quantization", False, "TE pads each expert's tokens itself")

    @classmethod
    def off(cls) -> Iterator[Setting]:
        yield Setting("fp8", None, "bf16", fields=("transformer.fp8",))
        yield Setting("fp8_param_gather", False, "bf16", fields=("args.fp8_param_gather", "ddp.fp8_param_gather"))
        yield Setting("first_last_layers_bf16", False, "all of them", fields=("transformer.first_last_layers_bf16",))
        yield Setting("moe_router_padding_for_quantization", False, "TE pads each expert's tokens itself")

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if not self.first_last_bf16:
            for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
                yield name, "no layer stays in bf16 (`feature.fp8.first_last_bf16=false`)"

    def quantises_twice(self, site: Site) -> bool:
        """Whether an input is quantised a second time where `keep_inputs` does not keep it."""
        return any(self._kept_widths(site, [*self._fp8_kinds(site, site.layers), *site.mtp]))

    def _fp8_kinds(self, site: Site, layers: Iterable[Layer]) -> Iterator[str]:
        """Of these layers those that are not in bf16 as a whole."""
        depth = len(site.layers)
        yield from (layer.kind for layer in layers if not self.in_bf16(layer.number, depth))

    def _kept_widths(self, site: Site, kinds: Iterable[str]) -> tuple[int, int]:
        """Of layers of these kinds: channels of what `keep_inputs` keeps, as `Block.requantised` has them."""
        found = [site.blocks.of(kind).requantised(site) for kind in kinds]
        return sum(heads for heads, _ in found), sum(own for _, own in found)

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """Of attention a tensor rank keeps its heads', of the shared experts its share of the sequence where that is cut."""
        if not (self.keep_inputs or self.recipe == "delayed") or z.site.recomputes_layers:
            return
        kinds = list(self._fp8_kinds(z.site, stage.layers))
        kinds += [*z.site.mtp] * z.site.mtp_depths if stage.last else []
        rest, shared = self._kept_widths(z.site, kinds)
        why = "of attention's output projections and the shared experts, in FP8"
        yield z.own(W=rest, Y=shared).line("inputs kept", "T W / t + Ts Y", why)

    def in_bf16(self, number: int | None, depth: int) -> bool:
        """Whether layer `number` of `depth` (None: MTP's, which have no edge) stays in bf16."""
        if not self.first_last_bf16 or number is None:
            return False
        return not (self.bf16_layers_at_start or 0) < number <= depth - (self.bf16_layers_at_end or 0)

    def quantises(self, site: Site, owner: str, layer: int | None, param: Param) -> bool:
        """Whether a parameter is multiplied in FP8. owner: the kind of its layer, or MTP."""
        kinds = (owner,) if owner in site.kinds else site.mtp
        kept = any(site.blocks.of(kind).part(param) in self.bf16_parts for kind in kinds)
        return param.role == "weight" and not kept and not self.in_bf16(layer, len(site.layers))

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """FP8 copies of the weights that TE multiplies with; gathered in FP8 they replace the bf16 weights at equal size."""
        if self.param_gather:
            return
        held = [x for x in group.held if self.quantises(z.site, x.owner, x.layer, x.param)]
        why = "row-wise and transposed FP8 weights, cached over the microbatches"
        yield from group.line(z, WORKSPACE, "FP8 weights", "2", why, held)
