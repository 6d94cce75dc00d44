"""Activation recomputation: Megatron's --recompute-* family."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Setting

Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
NEEDS = {"mla_up_proj": "mla", "moe": "moe", "moe_act": "moe", "shared_experts": "moe", "mlp": "mlp"}


class Recompute(Feature):
    name: ClassVar[str] = "recompute"

    granularity: Literal["none", "selective", "full"]
    modules: tuple[Module, ...]
    method: Literal["uniform", "block"] | None
    layers: PositiveInt | None

    @property
    def on(self) -> bool:
        return self.granularity != "none"

    def settings(self, plan) -> Iterator[Setting]:
        selective, full = self.granularity == "selective", self.granularity == "full"
        yield Setting(
            "recompute_granularity", self.granularity if self.on else None, "what is recomputed", "granularity"
        )
        yield Setting("recompute_modules", self.modules if selective else None, "which parts", "modules")
        yield Setting("recompute_method", self.method if full else None, "how layers are grouped", "method")
        yield Setting("recompute_num_layers", self.layers if full else None, "layers per group", "layers")
        yield Setting("distribute_saved_activations", False, "saved inputs stay whole on each rank")

    def idle(self) -> Iterator[Problem]:
        for name in ("modules", "method", "layers"):
            if getattr(self, name):
                yield Problem(
                    f"`{name}` of a recompute that is off",
                    f"feature.recompute.{name}",
                    "set `feature.recompute.granularity` to selective or full",
                )

    def check(self, plan) -> Iterator[Problem]:
        at = "feature.recompute."
        if self.granularity == "selective":
            if not self.modules:
                yield Problem(
                    "selective recompute without modules recomputes `core_attn` silently", at + "modules", "name them"
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
            if "moe_act" in self.modules and not plan.recipe.model.blocks.moe.grouped_gemm:
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
                    "full recompute needs `method` and `layers`", at + "method", "set `method=uniform layers=1`, say"
                )
            elif self.layers > plan.longest_stage:
                yield Problem(
                    f"{self.layers} layers per group exceed the longest stage of {plan.longest_stage}", at + "layers"
                )
            if plan.reusing_layers and self.layers and plan.recipe.model.blocks.dsa.kernels == "megatron":
                # It travels with the microbatch's attention mask, of which the second run has another. Ours is kept by each layer.
                yield Problem(
                    "stock DSA loses a shared top-k under full recompute",
                    at + "granularity",
                    "set `model.blocks.dsa.kernels=fused`, `model.blocks.dsa.full_every=1`, or use selective recompute",
                )

    def groups(self, layers: int) -> Iterator[tuple[range, bool]]:
        """How the `layers` of a pipeline segment are kept: (indices, whether only the first one's input is)."""
        full = self.granularity == "full"
        size = self.layers if full and self.method == "uniform" else 1
        for start in range(0, layers, size):
            checkpointed = full and (self.method == "uniform" or start < self.layers)
            yield range(start, min(start + size, layers)), checkpointed
