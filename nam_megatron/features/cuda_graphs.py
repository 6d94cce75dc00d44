"""CUDA graphs per layer part: Megatron's --cuda-graph-impl and --cuda-graph-modules, always both."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Env, Setting
from nam_megatron.sizes import GRAPHS, Line

NEEDS = {"mamba": ("mamba2", "mamba3", "m2rnn"), "mlp": ("mlp",), "moe_router": ("moe",), "moe_preprocess": ("moe",)}
KINDS_OF = {**NEEDS, "attn": ("attention", "mla", "dsa")}


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

    def idle(self) -> Iterator[Problem]:
        if self.modules:
            yield Problem(
                "modules to capture and no CUDA graphs",
                "feature.cuda_graphs.modules",
                "set `feature.cuda_graphs.impl=transformer_engine`, or `feature.cuda_graphs.modules=[]`",
            )

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
        if "attn" in self.modules and r.feature.recompute.on and "core_attn" in r.feature.recompute.modules:
            # Megatron's checkpoint is a plain call while a graph is captured.
            yield Problem(
                "captured attention keeps what recompute of `core_attn` would drop",
                at + "modules",
                "leave one of them out",
            )
        if "dsa" in plan.kinds and "attn" in self.modules:
            if r.model.blocks.dsa.kernels == "megatron":
                yield Problem(
                    "stock DSA synchronises with the host and cannot be captured",
                    at + "modules",
                    "leave `attn` out, or set `model.blocks.dsa.kernels=fused`",
                )
            elif plan.reusing_layers and self.impl == "local":
                # The graph of a reusing layer reads what that of another wrote. Transformer Engine's are replayed in the order of
                # their capture, one for each microbatch in flight; Megatron's own take whichever of a layer's graphs is free.
                yield Problem(
                    "a reusing layer's graph may read another microbatch's top-k in Megatron's own graphs",
                    at + "modules",
                    "set `feature.cuda_graphs.impl=transformer_engine`, leave `attn` out, or set `model.blocks.dsa.full_every=1`",
                )

    def captures(self, kind: str, line: Line) -> bool:
        """Whether a tensor that a layer keeps lives in a graph's pool: reserved, not allocated."""
        if kind == "moe":
            inside = ("input", "norm statistics", "norm output", "router", "shared expert")
            return "moe_router" in self.modules and line.name in inside
        return any(kind in KINDS_OF[module] for module in self.modules)

    def activations(self, z, stage) -> Iterator[Line]:
        """What graphs add to the eager budget: all captured layers at once, as no backward pass precedes a forward pass."""

        def layers(*modules: str) -> int:
            kinds = {kind for module in modules if module in self.modules for kind in KINDS_OF[module]}
            return sum(layer.kind in kinds for layer in stage.layers)

        z = z.own(layers=layers(*self.modules), attention=layers("attn"), routed=layers("moe_preprocess"))
        more = {"bucket": GRAPHS}
        yield z.line("static inputs", "2 Ts h layers", "of each captured layer, outside the pool", **more)
        yield z.line(
            "static masks", "b s s attention", "a bool mask for each attention layer, outside the pool", **more
        )
        z = z.own(R=z.value(f"{z.model.blocks.moe.top_k} Ts et imbalance"))
        why = "permuted rows, shared output and residual, which eager code frees"
        yield z.line("static outputs of routing", "(2 R h + 4 Ts h) routed", why, place="reserved", **more)
