"""CUDA graphs and the environment."""

import re
from collections.abc import Iterator

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.rule import CONFIG, COST, FAIL, MOE, OPEN, VALIDATE, Rule
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args

# Whose GPUs take no queues from CUDA_DEVICE_MAX_CONNECTIONS.
AMD = re.compile(r"rocm|\b(HSA|HIP|ROCR|MIOPEN)_", re.IGNORECASE)


def _graph_modules(a: Args, m: Model) -> Iterator[str]:
    modules = set(m.graph_modules)
    if m.graphs == "full_iteration":
        if modules:
            yield "modules with `full_iteration`, which captures everything"
        if a.check_for_nan_in_loss_and_grad:
            yield "`full_iteration` without `--no-check-for-nan-in-loss-and-grad`"
    elif m.graphs != "none":
        if "full_iteration" in m.graph_words:
            yield "`full_iteration` of Transformer Engine's graphs"
        if {"moe", "moe_router"} <= modules:
            yield "`moe` together with `moe_router`"
        if "moe_preprocess" in modules and "moe_router" not in modules and m.graphs != "local":
            yield "`moe_preprocess` without `moe_router`"
        if not a.num_experts and modules & {"moe", "moe_router"}:
            yield "`moe` modules without `--num-experts`"
        if a.num_experts and "mlp" in modules and a.moe_layer_freq == 1:
            yield "`mlp` in a model with experts"
        if a.num_experts and not (a.moe_expert_capacity_factor and a.moe_pad_expert_input_to_capacity):
            if "moe" in modules:
                yield "`moe` without `--moe-expert-capacity-factor` and padding to it"
            waits = a.moe_expert_capacity_factor is not None or a.moe_router_padding_for_fp8
            if "moe_preprocess" in modules and a.moe_token_dispatcher_type == "alltoall" and waits:
                yield "`moe_preprocess` with a capacity factor, or with padding for FP8"
        if law("graphs-full-recompute")(a, m):
            yield "full recompute under per-layer graphs"
        again = set(a.recompute_modules or ()) if m.recompute == "selective" else set()
        if law("graphs-recomputed-experts")(a, m):
            yield "recompute of `moe` around a captured `moe_router`"
        for name in ("mlp", "moe"):
            if a.hidden_dropout and name in again and name in modules:
                yield f"hidden dropout in a captured and recomputed `{name}`"
        if a.attention_dropout and "core_attn" in again and "attn" in modules:
            yield "attention dropout in captured and recomputed attention"


def _connections(a: Args, m: Model) -> str | None:
    """CUDA_DEVICE_MAX_CONNECTIONS as the text exports it: a value, `unset`, or None if it is silent on it."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in a.launch.env:
        return None
    value = a.launch.env["CUDA_DEVICE_MAX_CONNECTIONS"]
    return "unset" if value is None else None if "\ue000" in value else value


def _other_sizes(a: Args) -> bool:
    """Whether the text has, or asks for, another size than 1 for what it cuts tensors or sequences by: then 1 is for that."""
    names = re.findall(r"--(?:tensor-model|context)-parallel-size[ =]\"?\$\{?(\w+)", a.launch.text)
    return any(re.search(rf"\b{name}=(?![\"']?1\b)", a.launch.text) for name in names)


def _expandable(a: Args) -> bool:
    return any(
        "expandable_segments:True" in (a.launch.env.get(n) or "")
        for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )


RULES = (
    Rule("graphs-recomputed-attention", COST, "recompute_modules", law("graphs-recomputed-attention"),
        "attention that is captured keeps what its recompute would drop",
        "leave `core_attn` out, or do not capture `attn`", "core/tensor_parallel/random.py"),
    Rule("graphs-recomputed-dropout", FAIL, "recompute_modules", law("graphs-recomputed-dropout"),
        "an MLP that is captured cannot draw the dropout again that its recompute needs",
        "leave `mlp` out of one of them, or say `--hidden-dropout 0`", "core/tensor_parallel/random.py"),
    *map(trap, ("graphs-ignored",)),
    Rule("graphs-modules", FAIL, "cuda_graph_modules|cuda_graph_impl|enable_cuda_graph|external_cuda_graph",
        _graph_modules, "graphs that cannot be captured", "capture other modules", CONFIG),
    Rule("graphs-overlap", OPEN, "cuda_graph_modules|cuda_graph_scope_deprecated",
        lambda a, m: m.graphs == "transformer_engine"
            and "attn" in m.graph_modules
            and a.overlap_moe_expert_parallel_comm,
        "graphs of attention beside the overlap of expert communication: gradient norms that jump after some 80 steps, then NaN, were "
            "reported of 0.19.0 with TE 2.16 and not explained (Megatron-LM issue 5966)",
        "look at the gradient norms of the first hundred steps, or leave one of them out",
        "core/models/common/model_chunk_schedule_plan.py"),
    Rule("graphs-experts", OPEN, "cuda_graph_modules|cuda_graph_scope_deprecated",
        lambda a, m: m.graphs == "transformer_engine"
            and m.ep > 1
            and bool({"moe_router", "moe_preprocess"} & {*m.graph_modules}),
        "graphs up to the token dispatcher: hangs right after the capture were reported by several and not explained (Megatron-Bridge "
            "issue 3517, of H100 and GB200)", "run a few steps first, or leave the graphs out",
        f"{MOE}token_dispatcher.py"),
    *map(trap, ("graphs-twice",)),
    Rule("graphs-allocator", FAIL, "PYTORCH_CUDA_ALLOC_CONF|PYTORCH_ALLOC_CONF",
        lambda a, m: m.graphs == "transformer_engine"
            and _expandable(a)
            and a.launch.env.get("NCCL_GRAPH_REGISTER") != "0",
        "graphs with expandable segments read freed memory unless NCCL registers none", "export NCCL_GRAPH_REGISTER=0",
        VALIDATE),
    Rule("connections-not-one", FAIL, "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda a, m: (m.tp > 1 or m.cp > 1)
            and not m.blackwell
            and not m.fsdp
            and not a.overlap_moe_expert_parallel_comm
            and _connections(a, m) not in (None, "1"),
        "tensor and context parallelism demand 1 on Hopper and before",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1", VALIDATE),
    Rule("connections-fsdp", FAIL, "CUDA_DEVICE_MAX_CONNECTIONS", lambda a, m: m.fsdp and _connections(a, m) == "1",
        "an FSDP forbids 1", "unset CUDA_DEVICE_MAX_CONNECTIONS", VALIDATE),
    Rule("connections-leftover", COST, "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda a, m: (m.blackwell or (m.tp == 1 and m.cp == 1 and not _other_sizes(a)))
            and not m.fsdp
            and not (AMD.search(a.launch.text) or a.launch.partial or a.launch.gpus == 1)
            and _connections(a, m) == "1"
            and (a.overlap_grad_reduce or a.overlap_param_gather or a.overlap_moe_expert_parallel_comm),
        "nothing demands 1 here, and it serialises the overlap of communication (Megatron-LM issue 1468)",
        "unset CUDA_DEVICE_MAX_CONNECTIONS", VALIDATE),
)  # fmt: skip
