"""Laws on CUDA graphs: of parts of layers, and of a whole step."""

from collections.abc import Iterator

from nam_megatron.compile.plan import Plan
from nam_megatron.features.cuda_graphs import STOCK_DSA, CudaGraphs
from nam_megatron.features.names import Features
from nam_megatron.features.recompute import Recompute
from nam_megatron.laws.law import CONTRADICTION, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.training import Schedule

AT = "feature.cuda_graphs."
MODULES = AT + "modules"
CONFIG, CAPTURE = "core/transformer/transformer_config.py", "core/transformer/cuda_graphs.py"
TAKE_PARTS = "take graphs of parts of layers"
TAKE_ONE_OUT = "leave one of them out"
WHOLE_STEP = "docs/log.md, a graph of the whole step"


def eager_steps(cuda_graphs: CudaGraphs, schedule: Schedule) -> Words | None:
    steps = min(schedule.train_steps, schedule.stop_every or schedule.train_steps)
    return {"steps": steps} if steps <= cuda_graphs.warmup_steps else None


def parts(graphs: CudaGraphs) -> tuple[str, ...]:
    """The parts of layers that are captured; none where the whole step is."""
    return () if graphs.whole else graphs.modules


def _there(plan: Plan) -> set[str]:
    """The parts that its layers have."""
    return {part for block in plan.blocks for part in block.graph_parts}


def _alone(plan: Plan) -> str | None:
    """A part that is captured by itself."""
    return next((part for part in ("attn", "mamba") if part in _there(plan)), None)


def _parts_of_nothing(cuda_graphs: CudaGraphs, plan: Plan) -> Iterator[Words]:
    there = _there(plan)
    left = ",".join(module for module in cuda_graphs.modules if module in there)
    for module in parts(cuda_graphs):
        if module not in there:
            yield {"module": module, "way": f"set `{MODULES}=[{left}]`" if left else f"set `{AT}impl=none`"}


def _recomputed(recompute: Recompute, module: str, captured: str, cuda_graphs: CudaGraphs) -> bool:
    return captured in parts(cuda_graphs) and module in recompute.modules


def instead(plan: Plan) -> str:
    """What to take in the place of a graph of the whole step: graphs of parts of layers, where what stands goes with them."""
    r, at = plan.recipe, AT + "impl"
    dsa, fp8 = r.blocks.dsa, r.feature.fp8
    no_better = (
        r.feature.mhc
        or r.feature.recompute
        or (dsa and "dsa" in plan.kinds and dsa.kernels == "megatron")
        or r.precision.attention_kernels != "transformer_engine"
        or (fp8 and (fp8.bf16_parts or fp8.keep_inputs))
    )
    graphs = r.feature.cuda_graphs
    named = "" if graphs and graphs.modules else f" with `{MODULES}=[{_alone(plan)}]`"
    if no_better or (named and not _alone(plan)):
        return f"`{at}=none`"
    return f"`{at}=transformer_engine`{named}"


def _asked(recipe: Recipe, features: Features) -> Iterator[tuple[str, object, str]]:
    """(what a whole step's graph does not go with, whether the recipe has it, the key that takes it away)."""
    p, fp8, model, mamba3 = recipe.parallel, features.fp8, recipe.model, recipe.blocks.mamba3
    yield "hosts", recipe.cluster.nodes > 1, "cluster.nodes"
    yield "pipeline", p.pipeline > 1, "parallel.pipeline"
    yield "recompute", features.recompute, "feature.recompute.granularity"
    yield "recompute", mamba3 and mamba3.recompute != "none", "execution.mamba3.recompute"
    yield "fp8-blockwise", fp8 and fp8.recipe == "blockwise", "feature.fp8.recipe=tensorwise"
    yield "fp8-weights", fp8 and fp8.param_gather, "feature.fp8.param_gather=false"
    yield "bf16-layers", fp8 and fp8.first_last_bf16, "feature.fp8.first_last_bf16=false"
    yield "fsdp", features.megatron_fsdp, "feature.megatron_fsdp.enabled"
    yield "ngrams", features.ngram_hash, "feature.ngram_hash.enabled"
    yield "dropout", model.hidden_dropout > 0, "model.hidden_dropout"
    yield "dropout", model.attention_dropout > 0, "model.attention_dropout"


def whole_step_untried(what: str, said: str) -> Law:
    return beside_whole_step(what, UNTRIED, f"a graph of the whole step has not been tried with {said}")


def beside_whole_step(what: str, category: str, says: str, source: str = "") -> Law:
    def when(cuda_graphs: CudaGraphs, recipe: Recipe, feature: Features, plan: Plan) -> Iterator[Words]:
        found = _asked(recipe, feature) if cuda_graphs.whole else ()
        for name, asked, key in found:
            if name == what and asked:
                verb = "set" if "=" in key else "change"
                yield {"way": f"take {instead(plan)}, or {verb} `{key}`"}

    return Law(
        id=f"whole-step-{what}",
        category=category,
        key=AT + "impl",
        when=when,
        says=says,
        way=f"{TAKE_PARTS}, or do without",
        source=source,
    )


LAWS = (
    Law(id="graphs-capture-nothing", category=CONTRADICTION, key=AT + "warmup_steps",
        when=eager_steps,
        says="nothing would be captured: a command has {steps:,} steps, and {cuda_graphs.warmup_steps:,} are eager",
        way=f"set it to less than {{steps:,}}, or `{AT}impl=none`"),
    Law(id="whole-step-modules", category=CONTRADICTION, key=MODULES,
        when=lambda cuda_graphs, plan: cuda_graphs.whole
            and cuda_graphs.modules
            and {"way": f"set it to [], or take {instead(plan)}"},
        says="a graph of the whole step has no modules: it captures everything", way=f"set it to [], or {TAKE_PARTS}"),
    Law(id="whole-step-without-warmup", category=OURS, key=AT + "warmup_steps",
        when=lambda cuda_graphs: cuda_graphs.whole and not cuda_graphs.warmup_steps,
        says="the first step cannot be captured: its kernels are compiled and tuned in it, and its layers are watched for NaN",
        way="set it to 1 or more", source=WHOLE_STEP),
    Law(id="whole-step-expert-counts", category=REFUSES, key="execution.moe.expert_gemm",
        when=lambda cuda_graphs, moe: cuda_graphs.whole and not moe.on_gpu,
        says="the host waits for the experts' counts, and a graph waits for nobody",
        way="set `execution.moe.expert_gemm=torch`", source="core/transformer/moe/token_dispatcher.py"),
    Law(id="whole-step-stock-dsa", category=REFUSES, key="execution.dsa.kernels",
        when=lambda cuda_graphs, dsa: cuda_graphs.whole and dsa.kernels == "megatron", says=STOCK_DSA,
        way="set `execution.dsa.kernels=fused`", source="core/transformer/experimental_attention_variant/dsa.py"),
    Law(id="whole-step-evaluations", category=OURS, key="schedule.eval_steps",
        when=lambda cuda_graphs, schedule, plan: cuda_graphs.whole
            and schedule.eval_steps
            and {"way": f"set it to 0, or take {instead(plan)}"},
        says="evaluations would need memory of their own beside that of a graph of the whole step",
        way=f"set it to 0, or {TAKE_PARTS}", source=WHOLE_STEP),
    whole_step_untried("hosts", "several hosts"),
    beside_whole_step(  # seen on two H200s on 2026-11-28: the capture is invalidated
        "pipeline",
        REFUSES,
        "Megatron waits for the device after each exchange between stages, and a graph waits for nobody",
        "core/pipeline_parallel/p2p_communication.py",
    ),
    whole_step_untried("recompute", "recompute"),
    whole_step_untried("fp8-blockwise", "FP8 scaled by blocks"),
    whole_step_untried("fp8-weights", "weights held in FP8"),
    whole_step_untried("bf16-layers", "layers in bf16 beside those in FP8"),
    whole_step_untried("fsdp", "Megatron-FSDP"),
    whole_step_untried("ngrams", "n-gram tables, whose gradients are sparse"),
    whole_step_untried("dropout", "dropout"),
    Law(id="graphs-without-modules", category=WRONG, key=MODULES,
        when=lambda cuda_graphs, plan: not cuda_graphs.whole
            and not cuda_graphs.modules
            and {"way": f"name them: `{MODULES}=[{part}]`, say" if (part := _alone(plan)) else f"set `{AT}impl=none`"},
        says="CUDA graphs without modules would capture whole layers, dropless MoE included",
        way=f"name them: `{MODULES}=[attn]`, say", source=CAPTURE),
    Law(id="graphs-of-nothing", category=CONTRADICTION, key=MODULES,
        when=_parts_of_nothing, says="no layer has the part `{module}`", way="leave it out"),
    Law(id="graphs-preprocess-alone", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs: "moe_preprocess" in parts(cuda_graphs) and "moe_router" not in parts(cuda_graphs),
        says="`moe_preprocess` is captured only with `moe_router`", way="add `moe_router`", source=CONFIG),
    Law(id="graphs-router-alone", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs: cuda_graphs.impl == "local"
            and "moe_router" in cuda_graphs.modules
            and "moe_preprocess" not in cuda_graphs.modules,
        says="Megatron's own graphs capture `moe_preprocess` with `moe_router`", way="add `moe_preprocess`",
        source=CONFIG),
    Law(id="graphs-mlp-beside-experts", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs, moe: "mlp" in parts(cuda_graphs),
        says="Megatron captures `mlp` only in models without MoE", way="leave `mlp` out", source=CONFIG),
    Law(id="graphs-preprocess-capacity", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs, moe: "moe_preprocess" in parts(cuda_graphs) and moe.capacity_factor is not None,
        says="`moe_preprocess` cannot be captured with a capacity factor", way="leave it out", source=CONFIG),
    Law(id="graphs-full-recompute", category=REFUSES, key=AT + "impl",
        when=lambda cuda_graphs, recompute: not cuda_graphs.whole and recompute.granularity == "full",
        says="full recompute and per-layer CUDA graphs exclude each other", source=CONFIG),
    Law(id="graphs-recomputed-experts", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs, recompute: cuda_graphs.impl == "transformer_engine"
            and _recomputed(recompute, "moe", "moe_router", cuda_graphs),
        says="recompute of `moe` would run what the graph of `moe_router` holds a part of, and Megatron stops",
        way=TAKE_ONE_OUT, source=CAPTURE),
    Law(id="graphs-recomputed-dropout", category=WRONG, key=MODULES,
        when=lambda cuda_graphs, recompute, model: model.hidden_dropout
            and _recomputed(recompute, "mlp", "mlp", cuda_graphs),
        says="a captured `mlp` cannot draw the dropout again that its recompute needs",
        way=f"{TAKE_ONE_OUT}, or set `model.hidden_dropout=0.0`", source="core/tensor_parallel/random.py"),
    Law(id="graphs-recomputed-attention", category=WRONG, key=MODULES,
        when=lambda cuda_graphs, recompute: _recomputed(recompute, "core_attn", "attn", cuda_graphs),
        says="captured attention keeps what recompute of `core_attn` would drop", way=TAKE_ONE_OUT,
        source="core/tensor_parallel/random.py: a checkpoint is a plain call while a graph is captured"),
    Law(id="graphs-stock-dsa", category=REFUSES, key=MODULES,
        when=lambda cuda_graphs, dsa: "attn" in parts(cuda_graphs) and dsa.kernels == "megatron", says=STOCK_DSA,
        way="leave `attn` out, or set `execution.dsa.kernels=fused`",
        source="core/transformer/experimental_attention_variant/dsa.py"),
    Law(
        # The graph of a reusing layer reads what that of another wrote. Transformer Engine's are replayed in the order of their capture,
        # one for each microbatch in flight; Megatron's own take whichever of a layer's graphs is free.
        id="graphs-shared-top-k",
        category=WRONG,
        key=MODULES,
        when=lambda cuda_graphs, dsa, plan: cuda_graphs.impl == "local"
        and "attn" in cuda_graphs.modules
        and dsa.kernels != "megatron"
        and plan.reusing_layers,
        says="a reusing layer's graph may read another microbatch's top-k in Megatron's own graphs",
        way="set `feature.cuda_graphs.impl=transformer_engine`, leave `attn` out, or set `model.blocks.dsa.full_every=1`",
        source=CAPTURE,
    ),
)  # fmt: skip
