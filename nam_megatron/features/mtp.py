"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the pattern's `/` suffix."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from nam_megatron.features import Feature
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import MTP, Line, Param, Sizes, Stage, Work

LAYERS = r"^[AEMR-]{1,16}$"


class Mtp(Feature):
    """Multi-token prediction: layers of `pattern` at each depth, attention never DSA."""

    name = "mtp"
    switch = "depths"

    # A Literal would take `true` for 1. How many there are, the pattern says.
    depths: Annotated[int, Field(ge=0, le=2), Row("depths; 0: off")]
    pattern: Annotated[
        Annotated[str, Field(pattern=LAYERS)],
        Row("the layers of one depth: letters as in `model.pattern`, A never DSA, and `-` a dense MLP", was="A-"),
    ]
    loss_weight: Annotated[
        NonNegativeFloat,
        Row("weight of the extra losses", "mtp_loss_scaling_factor", ("transformer.mtp_loss_scaling_factor",)),
    ]

    def settings(self, site: Site) -> Iterator[Setting]:
        yield Setting("mtp_use_repeated_layer", False, "each depth has its own weights")
        yield Setting("mtp_detach_heads", False, "the extra losses train the trunk")

    def alone(self, site: Site) -> Iterator[str]:
        moe = site.blocks.moe
        if moe is not None and moe.has_losses and any(kind == "moe" for kind in site.mtp[site.mtp_depths :]):
            yield "a router in MTP with a loss is beyond the rows of Megatron 0.19.2's log, and the first step stops"

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        if not stage.last:
            return
        h = z.site.hidden_size
        for depth in range(self.depths):
            at = f"mtp.layers.{depth}."
            for norm in ("enorm", "hnorm", "final_layernorm"):
                yield from z.norm(f"{at}{norm}.", h)
            yield Param(f"{at}eh_proj.weight", (h, 2 * h), "tensor", "weight")
            for i, kind in enumerate(z.site.mtp):
                for p in z.site.blocks.of(kind).params(z, None):
                    yield replace(p, name=f"{at}mtp_model_layer.layers.{i}.{p.name}")

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        if stage.last:
            why = "shifted embedding, both concatenated (twice as wide), the last inner residual, its share of all depths' and the trunk's"
            yield z.line("around the inner layers", "12 Ts h D", why, bucket=MTP)

    def flops(self, z: Sizes) -> Iterator[Work]:
        yield z.work("eh projection", "4 h h D", "embedding and hidden state to one")
        yield z.work("logits", "2 h V D", "of every depth")
