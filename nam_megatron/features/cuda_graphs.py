"""CUDA graphs per layer part: Megatron's --cuda-graph-impl and --cuda-graph-modules, always both."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Env, Setting

NEEDS = {"mamba": ("mamba2", "mamba3", "m2rnn"), "mlp": ("mlp",), "moe_router": ("moe",), "moe_preprocess": ("moe",)}


class CudaGraphs(Feature):
    name: ClassVar[str] = "cuda_graphs"

    impl: Literal["none", "transformer_engine", "local"]
    modules: tuple[Literal["attn", "mamba", "mlp", "moe_router", "moe_preprocess"], ...]
    warmup_steps: NonNegativeInt

    @property
    def on(self) -> bool:
        return self.impl != "none"

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("cuda_graph_impl", self.impl, "without it the modules mean nothing", "impl")
        yield Setting("cuda_graph_modules", self.modules if self.on else None, "which parts are captured", "modules")
        yield Setting("cuda_graph_warmup_steps", self.warmup_steps, "eager steps before capture", "warmup_steps")
        yield Setting(
            "te_rng_tracker", self.on, "graphs need TE's; Megatron would switch it on behind the recipe", "impl"
        )

    def env(self, plan) -> Iterator[Env]:
        if self.on:
            yield Env("NCCL_GRAPH_REGISTER", "0", "graphs with expandable segments read freed memory otherwise")

    def check(self, plan) -> Iterator[Problem]:
        at, r = "feature.cuda_graphs.", plan.recipe
        if not self.modules:
            yield Problem(
                "CUDA graphs without modules would capture whole layers, dropless MoE included",
                at + "modules",
                "name them",
            )
        for module in self.modules:
            if module in NEEDS and not plan.kinds & set(NEEDS[module]):
                yield Problem(f"no layer has the part `{module}`", at + "modules")
        if "moe_preprocess" in self.modules and "moe_router" not in self.modules:
            yield Problem("`moe_preprocess` is captured only with `moe_router`", at + "modules", "add `moe_router`")
        if "mlp" in self.modules and "moe" in plan.kinds:
            yield Problem("Megatron captures `mlp` only in models without MoE", at + "modules", "leave `mlp` out")
        if "moe_preprocess" in self.modules and r.model.blocks.moe.capacity_factor is not None:
            yield Problem("`moe_preprocess` cannot be captured with a capacity factor", at + "modules", "leave it out")
        if r.feature.recompute.granularity == "full":
            yield Problem("full recompute and per-layer CUDA graphs exclude each other", at + "impl")
        if "dsa" in plan.kinds and "attn" in self.modules:
            yield Problem(
                "stock DSA synchronises with the host and cannot be captured", at + "modules", "leave `attn` out"
            )
