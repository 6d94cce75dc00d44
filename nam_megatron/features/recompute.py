"""Activation recomputation: Megatron's --recompute-* family."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Row, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan

Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
NONE = ["core_attn"]  # Megatron's word for no modules
NEEDS = {"mla_up_proj": "mla", "moe": "moe", "moe_act": "moe", "shared_experts": "moe", "mlp": "mlp"}


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

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        selective = self.granularity == "selective"
        fields = {"transformer.recompute_modules": list(self.modules) if selective else NONE}
        modules = self.modules if selective else None
        yield Setting("recompute_modules", modules, "which parts", "modules", fields=fields)
        yield Setting("distribute_saved_activations", False, "saved inputs stay whole on each rank")

    @classmethod
    def off(cls, plan: "Plan") -> Iterator[Setting]:
        pin = partial(Setting, executes=cls.executes)
        yield pin("recompute_granularity", None, "nothing is")
        yield pin("recompute_modules", None, "nothing is", fields={"transformer.recompute_modules": NONE})
        yield pin("recompute_method", None, "nothing is")
        yield pin("recompute_num_layers", None, "nothing is")
        yield pin("distribute_saved_activations", False, "saved inputs stay whole on each rank")

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at = "feature.recompute."
        if self.granularity == "selective":
            if not self.modules:
                yield Problem(
                    "selective recompute without modules recomputes `core_attn` silently",
                    at + "modules",
                    f"name them: `{at}modules=[core_attn]`, say",
                )
            if self.method or self.layers:
                yield Problem(
                    "`method` and `layers` belong to full recompute",
                    at + "method",
                    f"set `{at}granularity=full` or null them",
                )
            for module in self.modules:
                if (kind := NEEDS.get(module)) and kind not in plan.kinds:
                    yield Problem(f"recompute of `{module}` in a model without {kind}", at + "modules")
            fsdp = plan.recipe.feature.megatron_fsdp
            if "mla_up_proj" in self.modules and "dsa" in plan.kinds and fsdp and fsdp.strategy != "optim":
                # megatron_fsdp.py, _grad_acc: what a second backward pass brings is written over what the first has brought.
                yield Problem(
                    "under Megatron-FSDP the up-projection of DSA's keys and values loses one of the gradients that it gets in two passes",
                    at + "modules",
                    "leave `mla_up_proj` out, or set `feature.megatron_fsdp.enabled=false`",
                )
            moe = plan.recipe.model.blocks.moe
            if "moe_act" in self.modules and moe and not moe.grouped_gemm:
                yield Problem(
                    "`moe_act` is recomputed only with grouped GEMM",
                    at + "modules",
                    "set `model.blocks.moe.grouped_gemm=true`",
                )
        else:
            if self.modules:
                yield Problem(
                    "`modules` belong to selective recompute", at + "modules", "set `feature.recompute.modules=[]`"
                )
            if not self.method or not self.layers:
                yield Problem(
                    "full recompute needs `method` and `layers`",
                    at + "method",
                    f"set `{at}method=uniform {at}layers=1`, say",
                )
            elif self.layers > plan.longest_stage:
                yield Problem(
                    f"{self.layers} layers per group exceed the longest stage of {plan.longest_stage}", at + "layers"
                )
            if plan.mtp_depths and self.method == "uniform" and (self.layers or 1) > 1:
                message = "Megatron recomputes MTP by single layers, and stops in the first step with groups of more"
                yield Problem(message, at + "layers", "set it to 1")
            dsa = plan.recipe.model.blocks.dsa
            if plan.reusing_layers and self.layers and dsa and dsa.kernels == "megatron":
                # It travels with the microbatch's attention mask, of which the second run has another. Ours is kept by each layer.
                yield Problem(
                    "stock DSA loses a shared top-k under full recompute",
                    at + "granularity",
                    "set `model.blocks.dsa.kernels=fused`, `model.blocks.dsa.full_every=1`, or use selective recompute",
                )


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
