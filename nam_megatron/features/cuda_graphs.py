"""CUDA graphs of parts of layers, or one of all microbatches of a step: Megatron's --cuda-graph-impl and --cuda-graph-modules."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeInt

from nam_megatron.blocks import GraphPart
from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Env, Row, Setting
from nam_megatron.sizes import GRAPHS, Line, Sizes, Stage

if TYPE_CHECKING:
    from nam_megatron.plan import Plan

LAUNCHED = "the same kernels, launched at once"
STOCK_DSA = "stock DSA synchronises with the host and cannot be captured"
NO_MODULES: dict[str, Any] = {"transformer.cuda_graph_modules": []}


class CudaGraphs(Feature):
    """CUDA graphs of parts of layers, or of a step's forward and backward passes as a whole."""

    name = "cuda_graphs"
    switch = "impl"

    impl: Annotated[
        Literal["none", "transformer_engine", "local", "full_iteration"],
        Row(
            "who captures the modules, or full_iteration: all of a step but the update",
            "cuda_graph_impl",
            executes=LAUNCHED,
        ),
    ]
    modules: Annotated[tuple[GraphPart, ...], Row("parts that are captured", executes=LAUNCHED)]
    warmup_steps: Annotated[
        NonNegativeInt, Row("eager steps before capture", "cuda_graph_warmup_steps", executes=LAUNCHED)
    ]

    @property
    def on(self) -> bool:
        return self.impl != "none"

    @property
    def whole(self) -> bool:
        """Whether one graph holds all microbatches of a step."""
        return self.impl == "full_iteration"

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        fields = None if self.modules else NO_MODULES
        yield Setting("cuda_graph_modules", self.modules or None, "parts that are captured", "modules", fields=fields)
        why = "graphs need TE's; Megatron would switch it on behind the recipe"
        yield Setting("te_rng_tracker", True, why, "impl", beside="", fields=("rng.te_rng_tracker",))
        if self.impl == "local":
            scope = ("transformer.inference_cuda_graph_scope",)
            why = "Megatron's own graphs want a scope for inference, which training does not read"
            yield Setting(
                "inference_cuda_graph_scope", "layer", why, "impl", beside="", fields=scope, executes=LAUNCHED
            )

    @classmethod
    def off(cls, plan: "Plan") -> Iterator[Setting]:
        yield Setting("cuda_graph_impl", "none", "no graphs", executes=LAUNCHED)
        yield Setting("cuda_graph_modules", None, "no graphs", fields=NO_MODULES, executes=LAUNCHED)
        yield Setting("cuda_graph_warmup_steps", 3, "no graphs", executes=LAUNCHED)
        yield Setting("te_rng_tracker", False, "only graphs need it", fields=("rng.te_rng_tracker",), executes=LAUNCHED)

    def env(self, plan: "Plan") -> Iterator[Env]:
        if self.on:
            yield Env("NCCL_GRAPH_REGISTER", "0", "graphs with expandable segments read freed memory otherwise")

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, r = "feature.cuda_graphs.", plan.recipe
        steps = min(r.schedule.train_steps, r.schedule.stop_every or r.schedule.train_steps)
        if steps <= self.warmup_steps:
            message = f"nothing would be captured: a command has {steps:,} steps, and {self.warmup_steps:,} are eager"
            yield Problem(message, at + "warmup_steps", f"set it to less than {steps:,}, or `{at}impl=none`")
        if self.whole:
            yield from self._unseen(plan)
            return
        if not self.modules:
            yield Problem(
                "CUDA graphs without modules would capture whole layers, dropless MoE included",
                at + "modules",
                f"name them: `{at}modules=[attn]`, or `+overlay=graphs`",
            )
        for module in self.modules:
            if module != "attn" and not any(module in block.graph_parts for block in plan.blocks):
                yield Problem(f"no layer has the part `{module}`", at + "modules")
        if "moe_preprocess" in self.modules and "moe_router" not in self.modules:
            yield Problem("`moe_preprocess` is captured only with `moe_router`", at + "modules", "add `moe_router`")
        if self.impl == "local" and "moe_router" in self.modules and "moe_preprocess" not in self.modules:
            message = "Megatron's own graphs capture `moe_preprocess` with `moe_router`"
            yield Problem(message, at + "modules", "add `moe_preprocess`")
        if "mlp" in self.modules and "moe" in plan.kinds:
            yield Problem("Megatron captures `mlp` only in models without MoE", at + "modules", "leave `mlp` out")
        if "moe_preprocess" in self.modules and (moe := r.model.blocks.moe) and moe.capacity_factor is not None:
            yield Problem("`moe_preprocess` cannot be captured with a capacity factor", at + "modules", "leave it out")
        recompute = r.feature.recompute
        if recompute and recompute.granularity == "full":
            yield Problem("full recompute and per-layer CUDA graphs exclude each other", at + "impl")
        again = recompute.modules if recompute else ()
        if self.impl == "transformer_engine" and "moe_router" in self.modules and "moe" in again:
            message = "recompute of `moe` would run what the graph of `moe_router` holds a part of, and Megatron stops"
            yield Problem(message, at + "modules", "leave one of them out")
        if r.model.hidden_dropout and "mlp" in self.modules and "mlp" in again:
            message = "a captured `mlp` cannot draw the dropout again that its recompute needs"
            yield Problem(message, at + "modules", "leave one of them out, or set `model.hidden_dropout=0.0`")
        if "attn" in self.modules and "core_attn" in again:
            # Megatron's checkpoint is a plain call while a graph is captured.
            yield Problem(
                "captured attention keeps what recompute of `core_attn` would drop",
                at + "modules",
                "leave one of them out",
            )
        if (dsa := r.model.blocks.dsa) and "attn" in self.modules:
            if dsa.kernels == "megatron":
                yield Problem(
                    STOCK_DSA,
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

    def _unseen(self, plan: "Plan") -> Iterator[Problem]:
        """What a graph of the whole step cannot hold, or has not been seen to hold."""
        at, r = "feature.cuda_graphs.impl", plan.recipe
        blocks, kinds, fp8 = r.model.blocks, plan.kinds, r.feature.fp8
        # What goes with graphs of parts of layers no better.
        alone = (
            r.feature.mhc
            or r.feature.recompute
            or (blocks.dsa and "dsa" in kinds and blocks.dsa.kernels == "megatron")
            or r.precision.attention_kernels != "transformer_engine"
            or (fp8 and (fp8.bf16_parts or fp8.keep_inputs))
        )
        named = "" if alone or self.modules else " with `feature.cuda_graphs.modules=[attn]`"
        parts = f"`{at}={'none' if alone else 'transformer_engine'}`{named}"
        if self.modules:
            message = "a graph of the whole step has no modules: it captures everything"
            yield Problem(message, "feature.cuda_graphs.modules", "set it to [], or take " + parts)
        if not self.warmup_steps:
            message = "the first step cannot be captured: its kernels are compiled and tuned in it, and its layers are watched for NaN"
            yield Problem(message, "feature.cuda_graphs.warmup_steps", "set it to 1 or more")
        if blocks.moe and "moe" in kinds and not blocks.moe.on_gpu:
            key = "model.blocks.moe.expert_gemm"
            yield Problem(
                "the host waits for the experts' counts, and a graph waits for nobody", key, f"set `{key}=torch`"
            )
        if blocks.dsa and "dsa" in kinds and blocks.dsa.kernels == "megatron":
            key = "model.blocks.dsa.kernels"
            yield Problem(STOCK_DSA, key, f"set `{key}=fused`")
        if r.schedule.eval_steps:
            message = "evaluations would need memory of their own beside that of a graph of the whole step"
            yield Problem(message, "schedule.eval_steps", f"set it to 0, or take {parts}")
        untried = {
            "cluster=h200_1": (r.world_size != 1, "several GPUs"),
            "feature.recompute.granularity": (bool(r.feature.recompute), "recompute"),
            "model.blocks.mamba3.recompute": (
                blocks.mamba3 is not None and "mamba3" in kinds and blocks.mamba3.recompute != "none",
                "recompute",
            ),
            "feature.fp8.recipe=tensorwise": (fp8 is not None and fp8.recipe == "blockwise", "FP8 scaled by blocks"),
            "feature.fp8.param_gather=false": (fp8 is not None and fp8.param_gather, "weights held in FP8"),
            "feature.fp8.first_last_bf16=false": (
                fp8 is not None and fp8.first_last_bf16,
                "layers in bf16 beside those in FP8",
            ),
            "feature.megatron_fsdp.enabled": (bool(r.feature.megatron_fsdp), "Megatron-FSDP"),
            "feature.ngram_hash.enabled": (bool(r.feature.ngram_hash), "n-gram tables, whose gradients are sparse"),
            "model.hidden_dropout": (r.model.hidden_dropout > 0, "dropout"),
            "model.attention_dropout": (r.model.attention_dropout > 0, "dropout"),
        }
        for key, (asked, what) in untried.items():
            if asked:
                message = f"a graph of the whole step has not been tried with {what}"
                yield Problem(message, at, f"take {parts}, or {'set' if '=' in key else 'change'} `{key}`")

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """What graphs add to the eager budget: of a whole step its samples, else all captured layers at once, as no backward pass precedes
        a forward pass.
        """
        if self.whole:
            z = z.own(samples=z.plan.recipe.schedule.global_batch_size)
            yield z.line(
                "static inputs",
                "28 samples S",
                "tokens, labels and positions in int64, masks in fp32, of all microbatches",
                bucket=GRAPHS,
            )
            return

        def layers(*modules: str) -> int:
            parts = set(modules) & set(self.modules)
            return sum(bool(parts & set(z.block(layer.kind).graph_parts)) for layer in stage.layers)

        z = z.own(layers=layers(*self.modules), attention=layers("attn"), routed=layers("moe_preprocess"))
        more = {"bucket": GRAPHS}
        yield z.line("static inputs", "2 Ts h layers", "of each captured layer, outside the pool", **more)
        yield z.line(
            "static masks", "b s S attention", "a bool mask for each attention layer, outside the pool", **more
        )
        z = z.own(R=z.value(f"{moe.top_k if (moe := z.model.blocks.moe) else 0} Ts et imbalance"))
        why = "permuted rows, shared output and residual, which eager code frees"
        yield z.line("static outputs of routing", "(2 R h + 4 Ts h) routed", why, place="reserved", **more)
