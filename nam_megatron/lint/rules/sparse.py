"""DeepSeek sparse attention."""

from collections.abc import Iterator

from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.rule import CONFIG, COST, DSA, FAIL, HYBRID, OPEN, WRONG, Rule, each, listed
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args

DSA_ONLY = (
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_topk_freq",
)


def _shares_topk(m: Model) -> list[tuple[int, int]]:
    """(DSA layer, the layer whose top-k it reuses)."""
    return [(n, s) for n in m.dsa_layers if (s := m.topk_source(n)) != n]


def _without_source(a: Args, m: Model) -> str:
    sparse = set(m.dsa_layers)
    return ", ".join(f"layer {n} wants layer {s}'s" for n, s in _shares_topk(m) if s not in sparse)


def _recompute_parts_group(a: Args, m: Model) -> bool:
    size = a.recompute_num_layers or 1
    whole = a.recompute_method == "uniform" and m.pp == 1
    return any(not whole or (n - 1) // size != (s - 1) // size for n, s in _shares_topk(m))


# Megatron's DSA hands a shared top-k on with the attention mask or the config object; ours keeps it with its layers.
def _recompute_loses(a: Args, m: Model) -> bool:
    return m.dsa and m.recompute == "full" and _recompute_parts_group(a, m)


def _mask_lacks(a: Args, m: Model) -> bool:
    return m.dsa and bool(_shares_topk(m)) and not a.create_attention_mask_in_dataloader


def _whose(a: Args, m: Model) -> Iterator[str]:
    if m.dsa_kernels is None:
        if _recompute_loses(a, m):
            yield f"{a.written('recompute_granularity')}\tMegatron's reads another group's top-k when it recomputes layers apart"
        if _mask_lacks(a, m):
            yield f"{a.written('create_attention_mask_in_dataloader')}\tMegatron's hands the top-k on wrongly without a mask"


def _kernel_declines(a: Args, m: Model) -> bool:
    heads = m.heads // m.tp
    power = heads >= 16 and heads & (heads - 1) == 0
    fits = a.kv_lora_rank == 512 and a.kv_lora_rank + a.qk_pos_emb_head_dim == 576
    return not fits or not (power or (a.dsa_kernel_backend == "cudnn" and heads % 64 == 0))


RULES = (
    Rule("dsa-flags-ignored", WRONG, "",
        lambda a, m: []
            if m.dsa
            else each(a, DSA_ONLY) or (m.hybrid and m.checks_dsa and [f"{a.written('experimental_attention_variant')}\t"]),
        "ignored: no layer is sparse",
        "put `D` in the pattern (without a pattern: `--experimental-attention-variant dsa`)", HYBRID),
    *map(trap, ("dsa-without-mla",)),
    Rule("dsa-bias", FAIL, "add_bias_linear", law("dsa-bias"), "linear bias is on by default and DSA refuses it",
        "add `--disable-bias-linear`", CONFIG),
    *map(trap, ("dsa-rotate", "dsa-untrained-indexer", "dsa-untrained-overlap")),
    Rule("dsa-stage-without-indexer", FAIL, "pipeline_model_parallel_size|hybrid_layer_pattern",
        lambda a, m: not m.plan and m.uneven(Dsa.kind) and bool(a.dsa_indexer_loss_coeff),
        "a pipeline stage has no DSA layer: it takes no part in the sum of the indexers' losses, and the first log line waits for ever",
        "cut the pattern with `|` so that every stage has a `D`",
        f"{DSA} DSAIndexerLossLoggingHelper.reduce_loss_in_tracker"),
    *map(trap, ("dsa-latent-norm",)),
    Rule("dsa-kernel-declines", COST, "dsa_kernel_backend",
        lambda a, m: m.dsa and a.dsa_kernel_backend != "none" and _kernel_declines(a, m),
        "these kernels take latents of 512 + 64 and 16, 32, 64, ... heads a rank; others fall to dense fp32 attention, with a debug line",
        "use those shapes, or `--dsa-kernel-backend none` and know what it costs",
        "dsa_kernels.py, ops/tilelang_dsa.py"),
    Rule("dsa-context", FAIL, "cp_comm_type",
        lambda a, m: m.checks_dsa
            and m.cp > 1
            and any(str(t).replace("_", "").lower() != "allgather" for t in listed(a.cp_comm_type)),
        "DSA under context parallelism takes all-gather only", "add `--cp-comm-type all_gather`", CONFIG),
    *map(trap, ("dsa-context-loss",)),
    Rule("dsa-fsdp-recompute", WRONG, "recompute_modules", law("recompute-up-projection-fsdp"),
        "Megatron-FSDP keeps one of the two gradients that the up-projection of keys and values then gets",
        "leave `mla_up_proj` out", "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py _grad_acc"),
    *map(trap, ("dsa-sequence",)),
    Rule("dsa-reuse-source", FAIL, "dsa_indexer_topk_freq", _without_source,
        "the layer whose top-k is to be reused is not sparse",
        "choose --dsa-indexer-topk-freq and -skip-topk-offset by Megatron's layer numbers", DSA),
    Rule("dsa-reuse-cut", FAIL, "dsa_indexer_topk_freq",
        lambda a, m: ", ".join(
            f"layer {n} wants layer {s}'s, cut after layer {c}"
            for n, s in _shares_topk(m)
            for c in m.cuts
            if s <= c < n
        ),
        "a pipeline cut parts layers that share a top-k", "cut elsewhere, or reuse nothing", DSA),
    Rule("dsa-reuse-recompute", WRONG, "recompute_granularity|dsa_indexer_topk_freq",
        lambda a, m: m.dsa_kernels == "megatron" and _recompute_loses(a, m),
        "recomputed apart, a layer reads another group's top-k: gradients are silently wrong",
        "recompute selectively, reuse nothing, or let one chunk cover each group", DSA),
    Rule("dsa-reuse-mask", WRONG, "create_attention_mask_in_dataloader",
        lambda a, m: m.dsa_kernels == "megatron" and _mask_lacks(a, m),
        "without a mask the shared top-k travels on the config object and lives across microbatches",
        "leave `--no-create-attention-mask-in-dataloader` out", DSA),
    Rule("dsa-reuse-kernels", OPEN, "", _whose,
        "layers share a top-k, and the text does not tell whose sparse attention trains them; ours shares it safely",
        "lint the script that starts the training, or our plan.json", DSA),
)  # fmt: skip
