"""Parallel layout, batches, recomputation."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.cards import from_card
from nam_megatron.lint.rules.rule import CONFIG, COST, FAIL, FRAGILE, OPEN, PATTERN, VALIDATE, Rule, each
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import SIZE, Args, NotKnown

UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
)  # fmt: skip

NOT_WITH_PATTERN = (*UNEVEN[2:], "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


Number = Callable[[Args, Model], Any]
TENSOR = "tensor parallel size"


def _sharers(a: Args, m: Model) -> str:
    return TENSOR if m.cp == 1 else "tensor x context parallel size"


# An argument, its width, what that must be divisible by, that one's name, and where.
CUTS: tuple[tuple[str, Number, Number, str | Number, Number], ...] = (
    ("num_attention_heads", lambda a, m: m.heads, lambda a, m: m.tp, TENSOR, lambda a, m: True),
    ("num_attention_heads", lambda a, m: m.heads, lambda a, m: m.groups, "the number of query groups",
     lambda a, m: "attention" in m.kinds and a.group_query_attention),
    ("hidden_size", lambda a, m: a.hidden_size, lambda a, m: m.heads, "the number of heads, and there is no --kv-channels:",
     lambda a, m: not a.said("kv_channels") and not from_card(a)),
    ("mamba_num_heads", lambda a, m: m.mamba_heads, lambda a, m: m.tp, TENSOR, lambda a, m: m.mamba),
    ("mamba_num_groups", lambda a, m: a.mamba_num_groups, lambda a, m: m.tp, TENSOR, lambda a, m: m.mamba),
    ("mamba_num_heads", lambda a, m: m.mamba_heads, lambda a, m: a.mamba_num_groups, "the number of Mamba groups", lambda a, m: m.mamba),
    ("linear_num_value_heads", lambda a, m: a.linear_num_value_heads, lambda a, m: a.linear_num_key_heads, "the number of key heads",
     lambda a, m: m.variant == "gated_delta_net"),
    *((name, lambda a, m, name=name: getattr(a, name), lambda a, m: m.tp * m.cp, "tensor x context parallel size",
       lambda a, m: m.variant == "gated_delta_net") for name in ("linear_num_key_heads", "linear_num_value_heads")),
    ("tensor_parallel_num_weight_shards", lambda a, m: a.tensor_parallel_num_weight_shards, lambda a, m: m.tp, TENSOR, lambda a, m: True),
    ("expert_tensor_parallel_num_weight_shards", lambda a, m: a.expert_tensor_parallel_num_weight_shards, lambda a, m: m.etp,
     "expert tensor parallel size", lambda a, m: True),
    ("ffn_hidden_size", lambda a, m: m.ffn, lambda a, m: m.tp, TENSOR, lambda a, m: "mlp" in m.kinds),
    ("moe_ffn_hidden_size", lambda a, m: m.moe_ffn, lambda a, m: m.etp, "expert tensor parallel size", lambda a, m: m.moe),
    ("num_experts", lambda a, m: a.num_experts, lambda a, m: m.ep, "expert parallel size", lambda a, m: m.moe),
    ("seq_length", lambda a, m: a.seq_length, lambda a, m: m.tp * m.cp, lambda a, m: f"{_sharers(a, m)}, under sequence parallelism,",
     lambda a, m: m.sequence_parallel),
    ("seq_length", lambda a, m: a.seq_length, lambda a, m: 2 * m.cp, "twice the context parallel size,", lambda a, m: m.cp > 1),
    ("mamba_num_heads", lambda a, m: m.mamba_heads, lambda a, m: m.tp * m.cp, "tensor x context parallel size",
     lambda a, m: m.cp > 1 and m.mamba and m.tp > 0 and not m.mamba_heads % m.tp),
)  # fmt: skip


def _indivisible(a: Args, m: Model) -> Iterator[str]:
    """(flag, why) of every width that the layout cannot cut. One that is not known says nothing of the others."""
    for name, width, parts, what, where in CUTS:
        with suppress(NotKnown):
            value, by = width(a, m), parts(a, m)
            if where(a, m) and value and by > 0 and value % by:
                yield f"{a.written(name)}\t{value} is not divisible by {what(a, m) if callable(what) else what} {by}"
    with suppress(NotKnown):
        if "attention" in m.kinds and m.groups > 0 and m.groups % m.tp and m.tp % m.groups:
            yield f"{a.written('num_query_groups')}\t{m.groups} is neither a multiple nor a divisor of {TENSOR} {m.tp}"


def _world(a: Args, m: Model) -> Iterator[str]:
    gpus = a.launch.gpus
    if gpus and m.tp * m.pp * m.cp > 0 and gpus % (m.tp * m.pp * m.cp):
        yield f"--tensor-model-parallel-size {m.tp}\t{gpus} GPUs, tensor {m.tp} x pipeline {m.pp} x context {m.cp}"
    elif gpus and m.moe and m.etp * m.ep * m.pp > 0 and gpus % (m.etp * m.ep * m.pp):
        yield f"--expert-model-parallel-size {m.ep}\t{gpus} GPUs, expert tensor {m.etp} x expert {m.ep} x pipeline {m.pp}"


def _never(a: Args, m: Model) -> Iterator[str]:
    """Layouts that no number of the script's nodes serves."""
    asked = (m.tp * m.pp * m.cp, m.etp * m.ep * m.pp if m.moe else 0)
    if a.launch.supposed and a.launch.gpus and any(n % a.launch.gpus for n in asked):
        yield from _world(a, m)


def _pipeline(a: Args, m: Model) -> Iterator[str]:
    ends = [
        size for size in (a.decoder_first_pipeline_num_layers, a.decoder_last_pipeline_num_layers) if size is not None
    ]
    if len(m.segments) > 1:
        if m.pp == 1 or len(m.segments) % m.pp:
            yield f"{len(m.segments)} segments, and pipeline size {m.pp}"
    elif ends:
        if a.account_for_embedding_in_pipeline_split or a.account_for_loss_in_pipeline_split:
            yield "the first or last stage has its number of layers, and is said to count an end as one more"
        rest, middle = m.num_layers - sum(ends), m.pp - len(ends)
        if bool(rest) != bool(middle) or (middle and rest % middle):
            yield f"{rest} layers for the {middle} other stages"
        elif virtual := a.num_virtual_stages_per_pipeline_rank:
            parted = {*ends, rest // middle} if middle else {*ends}
            yield from (f"{n} layers of a stage, and {virtual} virtual stages a rank" for n in parted if n % virtual)
    elif stages := m.unrolled_stages:
        layout, depths = a.written("pipeline_model_parallel_layout"), a.mtp_num_layers or 0
        if strange := set(stages) - set("EtmL|"):
            yield f"{layout}\tno layer `{min(strange)}`\twrite E, t, m and L: the embedding, a layer, MTP and the loss"
        elif stages.count("t") != m.num_layers:
            yield f"{layout}\t{stages.count('t')} layers there, {m.num_layers} in the model\tgive it a `t` for each layer"
        elif stages.count("m") != depths:
            yield f"{layout}\t{stages.count('m')} of MTP there, {depths} in the model\tgive it an `m` for each depth of MTP"
        elif stages[0] != "E" or stages[-1] != "L":
            yield f"{layout}\tits ends are no embedding and no loss\tbegin it with `E` and end it with `L`"
    elif m.pattern is not None:
        if m.num_layers % m.pp:
            yield f"{m.num_layers} layers without `|`, and pipeline size {m.pp}"
    elif (chunk := a.num_layers_per_virtual_pipeline_stage) and m.pp > 1 and not a.pipeline_model_parallel_layout:
        layers = m.num_layers + a.account_for_embedding_in_pipeline_split + a.account_for_loss_in_pipeline_split
        if layers % (m.pp * chunk):
            yield f"{layers} layers, pipeline size {m.pp}, and {chunk} layers a virtual stage"
    elif (stages := a.num_virtual_stages_per_pipeline_rank) and m.pp > 1 and not a.pipeline_model_parallel_layout:
        layers = m.num_layers + a.account_for_embedding_in_pipeline_split + a.account_for_loss_in_pipeline_split
        if layers % (m.pp * stages):
            yield f"{layers} layers, pipeline size {m.pp}, and {stages} virtual stages a rank"
    elif not a.any_said(*UNEVEN):
        layers = m.num_layers + a.account_for_embedding_in_pipeline_split + a.account_for_loss_in_pipeline_split
        if layers % m.pp:
            yield f"{layers} layers, and pipeline size {m.pp}"


RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")


def _recompute(a: Args, m: Model) -> Iterator[str]:
    if known(lambda: a.moe_layer_recompute) and a.recompute_granularity == "full":
        yield "`--moe-layer-recompute` with full recompute"
    if m.recompute == "full":
        if a.recompute_method is None:
            yield "full recompute without `--recompute-method`"
        if a.recompute_num_layers is None:
            yield "full recompute without `--recompute-num-layers`"
        if a.distribute_saved_activations and m.sequence_parallel:
            yield "`--distribute-saved-activations` with sequence parallelism"
    elif m.recompute == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if a.sure(name) and a.value(name) is not None:
                yield f"`{a.target.by_dest[name].name}` with selective recompute"
        cut = "," if a.elsewhere else None  # other programs take one text of all of them, too
        modules = {name for word in a.recompute_modules or () for name in word.split(cut)}
        if unknown := modules - set(RECOMPUTED):
            yield f"{', '.join(f'`{name}`' for name in sorted(unknown))}: there are {', '.join(RECOMPUTED)}"
        if "gdn_norm_out" in modules and m.variant != "gated_delta_net":
            yield "`gdn_norm_out` without `--experimental-attention-variant gated_delta_net`"
        if "shared_experts" in modules and a.moe_shared_expert_intermediate_size and a.moe_shared_expert_overlap:
            yield "`shared_experts` with `--moe-shared-expert-overlap`"
        if "moe_act" in modules and not a.moe_grouped_gemm:
            yield "`moe_act` without `--moe-grouped-gemm`"
        if "mla_up_proj" in modules and not m.mla:
            yield "`mla_up_proj` without `--multi-latent-attention`"


def _unrecomputed(a: Args, m: Model) -> list[str]:
    return [] if m.recompute else each(a, ("recompute_modules", "recompute_method", "recompute_num_layers"))


MTP = "core/transformer/multi_token_prediction.py _checkpointed_forward"


def _recomputes_mtp(a: Args, m: Model, method: str) -> bool:
    return m.recompute == "full" and a.recompute_method == method and bool(m.mtp_depths or a.mtp_num_layers)


# Which sizes a model reads that not every model does.
READS: tuple[tuple[tuple[str, ...], Callable[[Args, Model], object]], ...] = (
    (("num_layers",), lambda a, m: m.pattern is None),
    (("num_query_groups",), lambda a, m: a.group_query_attention),
    (("mamba_",), lambda a, m: m.mamba),
    (("linear_",), lambda a, m: m.variant == "gated_delta_net"),
    (("dsa_",), lambda a, m: m.checks_dsa),
    (("moe_",), lambda a, m: m.moe),
    (("q_lora", "kv_lora", "qk_", "v_head"), lambda a, m: m.mla),
    (("fp8_",), lambda a, m: a.fp8),
    (("rotary_",), lambda a, m: m.mla or m.positions in ("rope", "yarn")),
    (("log_interval", "eval_interval"), lambda a, m: not a.elsewhere),  # other programs' loops are their own
    (("eval_interval",), lambda a, m: not (a.full_validation or a.skip_train)),
)


def _reads(name: str, a: Args, m: Model) -> bool:
    return all(is_read(a, m) for names, is_read in READS if name.startswith(names))


def _not_positive(a: Args, m: Model) -> Iterator[str]:
    """Of every size that is read."""
    chunks = known(lambda: m.recompute == "full" and a.recompute_method == "uniform")
    for name in a.given:
        if (size := SIZE.fullmatch(name)) and known(partial(_reads, name, a, m), True):
            value = a.value(name)
            none = size["none"] and not (chunks and name == "recompute_num_layers")  # walked in such steps then
            # "as the checkpoint has it", in programs of others
            if a.elsewhere and value == -1 and name.endswith("parallel_size"):
                continue
            if isinstance(value, int) and value < (0 if none else 1):
                yield f"{a.written(name)}\t{'0 for none of it' if none else ''}"


RULES = (
    Rule("dropout-range", FAIL, "",
        lambda a, m: each(a, (n for n in ("hidden_dropout", "attention_dropout") if not 0 <= getattr(a, n) <= 1)),
        "a dropout is a share, from 0 to 1", "correct it", "torch.nn.functional.dropout"),
    Rule("not-positive", FAIL, "", _not_positive, "a size is a whole number from 1 on", "correct it", VALIDATE),
    Rule("world-size", FAIL, "", lambda a, m: [] if a.launch.supposed else _world(a, m),
        "the layout does not divide the GPUs", "change one of them", VALIDATE),
    Rule("world-size-unset", OPEN, "", _never,
        "the layout does not divide the GPUs that the script takes where the environment does not say how many",
        "export what it asks for, or lint with `gpus=N`", VALIDATE),
    Rule("indivisible", FAIL, "", _indivisible, "the layout cannot cut it", "change one of them",
        f"{CONFIG}, core/ssm/mamba_mixer.py"),
    Rule("batch", FAIL, "global_batch_size",
        lambda a, m: bool(a.global_batch_size)
            and bool(a.global_batch_size % (m.need("micro_batch_size") * known(lambda: m.dp, 1)))
            and " x ".join([f"{a.micro_batch_size} a pass", *known(lambda: [f"{m.dp} ranks"], [])]),
        "not a multiple of the micro batch times the data parallel ranks", "change one of them", VALIDATE),
    Rule(
        "sequence-parallel-off",
        COST,
        "sequence_parallel",
        # A launch that says 1 leaves it on for every layout; one that says none may have lost it.
        lambda a, m: not a.elsewhere and a.sequence_parallel and not a.said("tensor_model_parallel_size"),
        "switched off at tensor parallel size 1, with a line in the log",
        "leave it out",
        VALIDATE,
    ),
    Rule("pipeline-split", FAIL, "pipeline_model_parallel_size", _pipeline, "the layers cannot be cut so",
        "let `|` in the pattern (or the number of layers) agree with the pipeline size", f"{VALIDATE}, {PATTERN}"),
    Rule("pipeline-auto-split", FRAGILE, "pipeline_model_parallel_size",
        lambda a, m: m.hybrid and m.pattern is not None and m.pp > 1 and len(m.segments) == 1,
        "without `|` Megatron cuts the layers into equal pieces, wherever that falls", "write `|` at the cuts",
        PATTERN),
    Rule("pipeline-flags", FAIL, "",
        lambda a, m: m.pattern is not None and each(a, NOT_WITH_PATTERN + (UNEVEN[:2] if len(m.segments) > 1 else ())),
        "a pattern excludes it", "cut the pipeline with `|` in the pattern", VALIDATE),
    Rule("gpt-only", COST, "",
        lambda a, m: [
                f"{a.written(n)}\t"
                for n in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "cpu_offloading_num_layers")
                if m.hybrid and a.value(n)
            ], "for GPT models; a hybrid gains nothing by it", "leave it out",
        "core/pipeline_parallel/combined_1f1b.py"),
    *map(trap, ("overlap-param-gather",)),
    Rule("cpu-offloading", FAIL, "cpu_offloading_num_layers",
        lambda a, m: a.cpu_offloading_num_layers > 0
            and (m.pp > 1 or bool(m.recompute) or a.cpu_offloading_num_layers >= m.num_layers),
        "offloads fewer layers than there are, without pipeline parallelism and without recompute",
        "leave one of them out", CONFIG),
    Rule("recompute", FAIL, "recompute_granularity|recompute_modules", _recompute, "recompute flags that do not fit",
        "full: `--recompute-method uniform --recompute-num-layers 1`; selective: `--recompute-modules` only", CONFIG),
    Rule("recompute-mtp", FAIL, "recompute_num_layers",
        lambda a, m: _recomputes_mtp(a, m, "uniform") and a.recompute_num_layers not in (None, 1),
        "MTP is recomputed by single layers: Megatron stops in the first step", "`--recompute-num-layers 1`", MTP),
    Rule("recompute-mtp-block", COST, "recompute_method", lambda a, m: _recomputes_mtp(a, m, "block"),
        "under `block` MTP is not recomputed; Megatron warns and keeps all that it needs",
        "`--recompute-method uniform --recompute-num-layers 1`", MTP),
    Rule("recompute-ignored", COST, "", _unrecomputed, "ignored: nothing is recomputed",
        "add `--recompute-granularity`", CONFIG),
)  # fmt: skip
