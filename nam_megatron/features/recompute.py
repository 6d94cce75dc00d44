"""Activation recomputation: Megatron's --recompute-* family."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import PositiveInt

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.features import Feature
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Site

Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
NONE = ["core_attn"]  # Megatron's word for no modules
NEEDS = {module: kind for kind, block in KINDS.items() for module in block.recomputed}


class Recompute(Feature):
    """Activation recomputation."""

    name = "recompute"
    switch = "granularity"
    executes = "the same values, computed twice"

    granularity: Annotated[Literal["none", "selective", "full"], Row("what is recomputed", "recompute_granularity")]
    modules: Annotated[tuple[Module, ...], Row("which parts of layers, when selective")]
    method: Annotated[Literal["uniform", "block"] | None, Row("how layers are grouped, when full", "recompute_method")]
    layers: Annotated[
        PositiveInt | None,
        Row("layers of a group (uniform) or of a pipeline stage (block), when full", "recompute_num_layers"),
    ]

    @property
    def on(self) -> bool:
        return self.granularity != "none"

    def settings(self, site: Site) -> Iterator[Setting]:
        selective = self.granularity == "selective"
        fields = {"transformer.recompute_modules": list(self.modules) if selective else NONE}
        modules = self.modules if selective else None
        yield Setting("recompute_modules", modules, "which parts", "modules", fields=fields)
        yield Setting("distribute_saved_activations", False, "saved inputs stay whole on each rank")

    @classmethod
    def off(cls) -> Iterator[Setting]:
        pin = partial(Setting, executes=cls.executes)
        yield pin("recompute_granularity", None, "nothing is")
        yield pin("recompute_modules", None, "nothing is", fields={"transformer.recompute_modules": NONE})
        yield pin("recompute_method", None, "nothing is")
        yield pin("recompute_num_layers", None, "nothing is")
        yield pin("distribute_saved_activations", False, "saved inputs stay whole on each rank")


def groups(recompute: Recompute | None, layers: int) -> Iterator[tuple[range, bool]]:
    """How the `layers` of a pipeline segment are kept: (indices, whether only the first one's input is)."""
    if recompute is None or recompute.granularity != "full":
        yield from ((range(at, at + 1), False) for at in range(layers))
        return
    most, uniform = recompute.layers, recompute.method == "uniform"
    assert most, "`check` refuses full recompute without it"
    size = most if uniform else 1
    for start in range(0, layers, size):
        yield range(start, min(start + size, layers)), uniform or start < most
