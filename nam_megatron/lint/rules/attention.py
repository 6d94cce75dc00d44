"""Attention and position embeddings."""

from collections.abc import Iterator

from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.features.yarn import FIXED
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.rule import (
    CONFIG,
    DEFAULT,
    FAIL,
    FROM_ARGS,
    HYBRID,
    VALIDATE,
    WRONG,
    Rule,
    each,
    listed,
    without,
)
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args

MLA_ONLY = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "cache_mla_latents")

ROPE_ONLY = (
    "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
    "rope_scaling_factor", "no_rope_freq",
)  # fmt: skip


YARN = {
    "yarn_original_max_position_embeddings": "original_length", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
    "yarn_correction_range_round_to_int": "rounded",
}  # fmt: skip


def _yarn_unread(a: Args, m: Model) -> list[str]:
    """Flags of YaRN that Megatron hands to GQA alone; a value that MLA has by itself does no harm."""
    if (m.positions == "yarn" and not m.mla) or m.gpt_oss or m.ours or "yarn" in m.marked:
        return []
    kept = FIXED | {"rounded": True} if m.mla and m.rope_type == "yarn" else {}
    return each(a, (name for name in a.sure(*YARN) if getattr(a, name) != kept.get(YARN[name])))


def _yarn_longest(a: Args, m: Model) -> float:
    """How long a sequence YaRN scales for; 0 where it is not on, or its length is not said."""
    if m.gpt_oss or a.rotary_scaling_factor <= 1 or "yarn" not in (m.rope_type if m.mla else "", m.positions):
        return 0
    before = FIXED["original_length"] if m.mla else a.yarn_original_max_position_embeddings
    return a.rotary_scaling_factor * (before or 0)


# Kinds whose attention is Transformer Engine's, and how it may share a sequence.
ROUND = {kind for kind in LETTERS["A"] if not KINDS[kind].gathers_keys}
SHARED = ("p2p", "all_gather", "a2a", "a2a+p2p")


def _not_shared(a: Args, m: Model) -> Iterator[str]:
    """What Transformer Engine's attention does not do on ranks that share a sequence; DSA's is Megatron's own."""
    if m.cp == 1 or not m.kinds & ROUND:
        return
    how = listed(a.cp_comm_type)
    if isinstance(a.cp_comm_type, list) and len(how) != m.num_layers:
        yield f"{a.written('cp_comm_type')}\t{len(how)} ways for {m.num_layers} layers\tgive one, or one for each layer"
    if strange := [way for way in how if way not in SHARED]:
        yield f"{a.written('cp_comm_type')}\tno `{strange[0]}`; {', '.join(SHARED)}"
        return
    if a.window_size and any("p2p" in way for way in how):
        yield f"{a.written('window_size')}\tno window where keys go round\t`--cp-comm-type all_gather` or a2a"
    if a.softmax_type != "vanilla" and any(way != "a2a" for way in how):
        yield f"{a.written('softmax_type')}\tno sink but with a2a\t`--cp-comm-type a2a`"


def _columns(a: Args, m: Model) -> float | None:
    """Columns of a head that the flags let RoPE turn; None where it turns none, and of heads so narrow that they are placeholders."""
    if "attention" not in m.kinds or m.positions not in ("rope", "yarn") or m.mla or m.head_dim <= 8:
        return None
    return m.head_dim * (a.rotary_percent if m.positions == "rope" else 1)


def _turned(a: Args, m: Model) -> list[str]:
    """Shares of a head that RoPE cannot turn: it turns columns in pairs, and no more than there are."""
    found, columns = [], _columns(a, m)
    if columns is not None and not (0 <= columns <= m.head_dim and int(columns) + int(columns) % 2 <= m.head_dim):
        said = "rotary_percent" if a.said("rotary_percent") else "kv_channels"
        flag = a.written(said) if a.said(said) else without(a.written(said))
        found.append(f"{flag}\t{columns:g} columns of a head of {m.head_dim}\t")
    if m.latent and a.qk_pos_emb_head_dim % 2:
        found.append(f"{a.written('qk_pos_emb_head_dim')}\t\t")
    return found


def _mla_refuses(a: Args, m: Model) -> list[str]:
    names = ("group_query_attention", "qk_l2_norm", "attention_output_gate", "rotary_interleaved")
    return [f"{a.written(n)}\t" for n in names if m.mla and getattr(a, n)]


RULES = (
    Rule("gqa-ignored", WRONG, "num_query_groups",
        lambda a, m: "attention" in m.kinds
            and a.said("num_query_groups")
            and not a.group_query_attention
            and a.num_query_groups != m.heads
            and f"{m.heads} key/value heads",
        "the groups are ignored: full multi-head attention is trained",
        "add `--group-query-attention`", FROM_ARGS),
    *map(trap, ("gqa-one-group",)),
    Rule("rope-columns", FAIL, "", _turned,
        "RoPE turns columns of a head in pairs, and no more than it has: the first step stops", "choose such a number",
        "core/models/common/embeddings/rope_utils.py _apply_rotary_pos_emb_bshd"),
    Rule("rope-share-odd", WRONG, "rotary_percent",
        lambda a, m: (columns := _columns(a, m)) is not None
            and 0 <= columns < m.head_dim
            and (columns < 1 or int(columns) % 2 == 1)
            and f"{columns:g} columns of a head of {m.head_dim}{': none is turned' * (columns < 1)}",
        "RoPE turns columns in pairs: of an odd number one more, by the odd number's angles",
        "choose a share that turns whole pairs", "core/models/common/embeddings/rotary_pos_embedding.py"),
    Rule("mla-refuses", FAIL, "", _mla_refuses, "MLA refuses it", "leave it out", f"{VALIDATE}, {CONFIG}"),
    Rule("mla-flags-ignored", WRONG, "", lambda a, m: [] if m.mla else each(a, MLA_ONLY), "ignored: MLA is not on",
        "add `--multi-latent-attention` (in a hybrid, `+` in the pattern)", FROM_ARGS),
    *map(trap, ("mla-rope-type", "mla-no-latent-norm", "mla-query-norm", "default-kv-lora-rank")),
    Rule("default-rope-type", DEFAULT, "rope_type",
        lambda a, m: m.mla
            and not a.any_said("rope_type", "rotary_scaling_factor", "mscale_all_dim")
            and f"factor {a.rotary_scaling_factor:g}"
            + (": the angles are still RoPE's" if a.rotary_scaling_factor == 1 else ""),
        "MLA's rotary embedding is yarn unless said otherwise",
        "say `--rope-type rope --no-rope-fusion`, or `--rope-type yarn` if that is meant", CONFIG),
    Rule("rope-scales-softmax", WRONG, "rotary_scaling_factor",
        lambda a, m: m.mla and m.rope_type == "rope" and a.rotary_scaling_factor > 1 and a.mscale_all_dim != 0,
        "yarn's factor and mscale-all-dim scale the softmax even with plain RoPE",
        "add `--rotary-scaling-factor 1 --mscale-all-dim 0`", "core/transformer/multi_latent_attention.py"),
    Rule("mla-rope-fusion", FAIL, "apply_rope_fusion",
        lambda a, m: m.mla and not m.checks_dsa and m.rope_type == "rope" and m.rope_fusion,
        "RoPE fusion is on by default and MLA has it for yarn only", "add `--no-rope-fusion`", CONFIG),
    *map(trap, ("dsa-rope-fusion",)),
    Rule("mla-yarn-fusion-heads", WRONG, "apply_rope_fusion",
        lambda a, m: m.mla
            and not m.checks_dsa
            and m.rope_type == "yarn"
            and m.rope_fusion
            and bool((m.heads // m.tp) & (m.heads // m.tp - 1))
            and f"{m.heads // m.tp} heads a rank",
        "the fused yarn kernels mask heads wrongly when their number is no power of two", "add `--no-rope-fusion`",
        "core/fusions/fused_mla_yarn_rope_apply.py, upstream issue 7103"),
    Rule("rope-flags-ignored", WRONG, "",
        lambda a, m: [] if m.mla or m.gpt_oss or m.positions in ("rope", "yarn", "mrope") else each(a, ROPE_ONLY),
        "ignored: positions are not rotary", "add `--position-embedding-type rope`", HYBRID),
    *map(trap, ("hybrid-positions",)),
    Rule("yarn-flags-ignored", WRONG, "", _yarn_unread,
        "ignored: MLA's yarn has no flags for these and stays at 4096 tokens, betas of 32 and 1 and whole columns; other attention wants "
            "--position-embedding-type yarn", "leave it out; for MLA our trainer has the keys of `feature.yarn`",
        "training/argument_utils.py _apply_yarn_config_from_args"),
    Rule("yarn-sequence", WRONG, "seq_length",
        lambda a, m: f"{longest:,.0f} tokens" if 0 < (longest := _yarn_longest(a, m)) < m.need("seq_length") else "",
        "longer than YaRN is scaled for: angles beyond its factor times its original length are new to the weights",
        "a larger `--rotary-scaling-factor`, or a shorter sequence",
        "core/models/common/embeddings/yarn_rotary_pos_embedding.py"),
    *map(trap, ("rope-scaling-factor", "rope-scaling-of-yarn", "hybrid-rope-scaling")),
    Rule("window-size", FAIL, "window_size",
        lambda a, m: a.window_size is not None and len(a.window_size) != 2 and not a.elsewhere,
        "a window has two sides, what is seen before a token and after it",
        "write `--window-size N,0`, for N tokens before", "core/transformer/utils.py get_sliding_window_causal_mask"),
    Rule("positions-short", FAIL, "max_position_embeddings",
        lambda a, m: m.need("max_position_embeddings") < m.sequence, "must be at least --seq-length", "raise it",
        VALIDATE),
    Rule("context-attention", FAIL, "", _not_shared,
        "refused at the first step by the attention of Transformer Engine under context parallelism",
        "name one of them", "transformer_engine 2.20 attn_forward_func_with_cp"),
    *map(trap, ("sinks-without-kernel", "sinks-uncounted")),
    Rule("gdn-sequence", WRONG, "sequence_parallel", law("gdn-tensor-without-sequence"),
        "tensor ranks keep their own gradients of a gated delta net's norm, whose copies then part",
        "add `--sequence-parallel`", "core/distributed/finalize_model_grads.py; Megatron-LM issue 7452, finding 11"),
    *map(trap, ("mla-sequence",)),
    Rule("yarn-share", WRONG, "rotary_percent",
        lambda a, m: a.rotary_percent != 1 and (a.rope_type if m.mla else a.position_embedding_type) == "yarn",
        "YaRN turns all columns of a head, whatever the share", "leave it out",
        "core/models/common/embeddings/yarn_rotary_pos_embedding.py"),
    *map(trap, ("window-mtp",)),
)  # fmt: skip
