"""Model -> what is trained, in lines for people and as data for programs. Values nobody said are marked as Megatron's default."""

import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nam_megatron.blocks.mamba2.read import SIZES
from nam_megatron.errors import counted
from nam_megatron.lint.follow import shown
from nam_megatron.lint.model import SYMBOLS, TITLES, Model, known, lacks
from nam_megatron.lint.rules.companions import idle
from nam_megatron.lint.rules.parser import ALIASES, IDLE, MEASURES, OLD, incomplete, left_open, own
from nam_megatron.lint.values import Args, Hangs, NotKnown, Open

if TYPE_CHECKING:
    from nam_megatron.lint import Report

FEW = 4  # values that a piece of a row may have
CUTS = re.compile(r"(, |\n)")  # between its pieces

# Said by few launches, and part of what is trained: shown as written.
ALSO = (
    "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp32_residual_connection", "rotary_interleaved",
    "rotary_seq_len_interpolation_factor", "mrope_section", "glu_linear_offset", "activation_func_clamp_value", "use_mup",
    "mup_attn_scale_power", "mup_base_head_dim", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_width_mult",
    "qk_clip", "qk_clip_alpha", "qk_clip_threshold", "moe_router_bias_update_rate", "moe_router_force_biased",
    "moe_router_force_load_balancing", "moe_apply_probs_on_input", "moe_enable_routing_replay", "moe_token_drop_policy",
    "moe_router_quantile_balancing_ema", "moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_use_upcycling",
    "mtp_use_repeated_layer", "mtp_detach_heads", "mtp_hybrid_override_pattern", "no_weight_decay_cond_type",
    "dsa_indexer_use_sparse_loss", "dsa_indexer_scoring_relu",
    "dsa_indexer_rope_interleaved", "dsa_indexer_k_norm_epsilon", "dsa_indexer_rotate_activation", "mamba_training_ssm_states_dtype",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "freeze_all_layers", "calculate_per_token_loss", "eod_mask_loss", "reset_position_ids", "reset_attention_mask",
    "dataloader_inter_document_masking", "create_attention_mask_in_dataloader", "fim_data", "fim_rate", "fim_spm_rate", "sft", "finetune",
    "rampup_batch_size", "step_batch_size_schedule", "decoupled_lr", "decoupled_min_lr", "lr_warmup_init", "adam_eps", "sgd_momentum",
    "muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor", "muon_split_qkv", "lion_beta1",
    "lion_beta2", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "apply_wd_to_qk_layernorm", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_margin", "grad_reduce_in_bf16", "loss_scale",
    "te_precision_config_file",
    "batch_invariant_mode", "data_parallel_random_init", "decrease_batch_size_if_needed", "disable_bf16_reduced_precision_matmul",
    "error_injection_rate", "exit_duration_in_mins", "fim_eod_token", "fim_middle_token", "fim_pad_token", "fim_prefix_token",
    "fim_suffix_token", "fp8_interval", "fp8_quantizer_factory", "gradient_reduce_div_fusion", "iterations_to_skip",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "perform_initialization", "skip_train", "test_mode",
    "use_kitchen_attention", "transformer_impl", "attention_backend", "accumulate_allreduce_grads_in_fp32", "ddp_average_in_collective",
    "dsa_indexer_k_norm_fp32", "fake_process_group", "fp8_amax_compute_algo", "fp8_amax_history_len", "recompute_modules",
    "data_path", "train_data_path", "split", "seed",
)  # fmt: skip

# Rows of which nothing is known where none of these is said and what is not said is not known.
ROWS = {
    "activation": "swiglu squared_relu quick_geglu",
    "optimizer": "lr optimizer weight_decay adam_beta2 clip_grad",
    "schedule": "train_iters train_samples lr_decay_iters lr_decay_samples",
    "start": "init_method_std init_method_xavier_uniform load pretrained_checkpoint",
    "layout": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
}
# Scripts that build Megatron's own models in its forks, too: pretrain_llama.py makes a Llama of its code.
OF_FORKS = re.compile(r"(.*/)?pretrain_(gpt2?|hybrid|mamba|bert|t5)\.py")
DEFAULT = re.compile(r"(tied to the output|learned table of \S+|\S+) \(default[^)]*\)")


def rows(a: Args, m: Model, written: Callable[[str], str] | None = None) -> Iterator[tuple[str, str]]:
    """(label, text); a text of `?` where it hangs on a value that is not known. written: an argument, otherwise than the launch says it."""
    written = written or a.written

    def unsaid(label: str) -> bool:
        return label in ROWS and not a.sure(*ROWS[label].split())

    def row(label: str, text: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        found = known(text, "?")
        if found is not None and defaults_unknown(a, m):
            found = DEFAULT.sub("?", found) if not unsaid(label) else "?"
        elif label == "activation" and "(default" in str(found) and re.search("[egis]lu|swish", " ".join(a.shaping)):
            found = "?"
        if found is not None:
            yield label, found.replace("(default", "(Megatron's default") if a.foreign else found

    if a.elsewhere:
        yield "said", ", ".join(map(written, a.given)) or "nothing that Megatron has a flag for"
    yield from row("model", lambda: f"{_model(a, m)}{_otherwise(a)}")
    yield from row("layers", lambda: _layers(m))
    yield from row("MTP", lambda: _mtp(a, m))
    yield from row("parameters", lambda: _parameters(a, m))
    yield from row(
        "width", lambda: f"hidden {_hung(lambda: m.need('hidden_size'))}{known(lambda: _mlp(a, m), ', MLP ?')}"
    )
    yield from row("attention", lambda: _attention(a, m))
    yield from row("positions", lambda: _positions(a, m))
    yield from row("norms", lambda: _norms(a, m))
    yield from row("activation", lambda: _activation(a, m))
    yield from row("experts", lambda: _experts(a, m))
    yield from row("Mamba", lambda: _mamba(a, m))
    yield from m.plan.rows() if m.plan else ()
    if not m.described:  # a training's, as precision and batch are
        yield from row("sequence", lambda: f"{m.sequence} tokens")
    yield from row("dropout", lambda: ", ".join(f"{n} {_v(a, f'{n}_dropout')}" for n in ("hidden", "attention")))
    yield from row("embedding", lambda: _embedding(a, m))
    if not m.described:
        yield from row("precision", lambda: _precision(a, m))
        yield from row("optimizer", lambda: _optimizer(a, m))
        yield from row("schedule", lambda: _schedule(a))
    yield from row("start", lambda: _start(a))
    yield from row(
        "also",
        lambda: ", ".join(written(n) if n in a.hanging else _cut(a.written(n)) for n in ALSO if n in a.given) or None,
    )
    if not m.described:
        yield from row("layout", lambda: _layout(a, m))
        yield from row("batch", lambda: _batch(a, m))


def told(report: "Report") -> dict[str, str]:
    """The rows of a report; `?` with what it may be, where that hangs on a condition that the text does not decide."""
    return {label: "".join(pieces) for label, pieces in _told(report).items()}


def _told(report: "Report") -> dict[str, list[str]]:
    forks = [[(on, _told(way)) for on, way in ways] for ways in report.forks]
    found = {}
    for label, text in rows(report.args, report.model, partial(_written, report)):
        if label in ("said", "also"):
            found[label] = [text]
        else:
            may = [[(on, way.get(label, ["none"])) for on, way in ways] for ways in forks]
            found[label] = _merged(CUTS.split(text), may)
    return {label: pieces for label, pieces in found.items() if pieces != ["none"] or label == "layers"}


def _written(report: "Report", name: str, flag: str = "") -> str:
    """An argument as the launch gives it, or whether and how by each way of the condition that decides it."""
    a = report.args
    flag = flag or re.split("[ =]", a.written(name))[0]
    may = [[(on, _written(way, name, flag)) for on, way in ways] for ways in report.forks]
    deciding = [one for one in may if len({text for _, text in one}) > 1]
    if deciding:
        return _either(deciding[0])
    return f"no {flag}" if name not in a.given else a.written(name) if a.sure(name) else f"{a.written(name)} or none"


def _merged(pieces: list[str], forks: list[list[tuple[str, list[str]]]]) -> list[str]:
    """A row with what each piece may be. pieces: of the row with open what conditions decide; forks: what it is by the ways of each."""
    deciding = [may for may in forks if any(cut != pieces for _, cut in may)]
    if len(deciding) == 1:
        pieces = deciding[0][0][1]
    if any(len(cut) != len(pieces) for may in deciding for _, cut in may):
        whole = [[(on, "".join(cut)) for on, cut in may] for may in deciding]
        apart = [may for may in whole if len({text for _, text in may}) > 1]  # alike, they leave out what is not known
        return [_either(min(apart, key=lambda may: sum(text.count("?") for _, text in may))) if apart else "?"]
    found, decided = list(pieces), set[int]()
    for may in deciding:
        for i in range(len(pieces)):
            one = [(on, cut[i]) for on, cut in may]
            if len({text for _, text in one}) > 1:
                found[i] = "?" if i in decided else _either(one)
                decided.add(i)
            elif i not in decided:
                found[i] = one[0][1]
    return found


def _either(may: list[tuple[str, str]]) -> str:
    """What may be, each with its condition: `hidden ? (0 if $X = 1, else 0.1)`."""
    if len({text for _, text in may}) > FEW:
        return "?"
    words = [text.replace("\n", "; ").split() for _, text in may]
    whole = any(", " in re.sub(r"\(.*\)", "", text) for _, text in may)
    shared = 0 if whole else min(map(len, words)) - 1  # words, of which something is left
    first = min(len(os.path.commonprefix(words)), shared)
    end = min(len(os.path.commonprefix([w[::-1] for w in words])), shared - first)
    ways: dict[str, list[str]] = {}
    for (condition, _), said in zip(may, words, strict=True):
        own = said[first : len(said) - end]
        ways.setdefault("open" if {*own} == {"?"} else " ".join(own), []).append(condition)
    last = next(text for text, on in ways.items() if may[-1][0] in on)
    several = [f"{text} if {' or '.join(on)}" for text, on in ways.items() if text != last]
    return " ".join(
        [*words[0][:first], f"? ({', '.join([*several, f'else {last}'])})", *words[0][len(words[0]) - end :]]
    )


def defaults_unknown(a: Args, m: Model) -> bool:
    """Whether words that are not here, or a program that is not Megatron's, may say what these leave out."""
    of_another = bool(a.foreign) and not OF_FORKS.fullmatch(a.launch.script or "")
    return (in_part(a, m) or of_another) and not m.described


def in_part(a: Args, m: Model) -> bool:
    """Whether this text has only a part of the words that say what is trained."""
    return incomplete(a, m) and not m.described


def notes(a: Args, m: Model) -> Iterator[str]:
    """What is no trap and good to know."""
    yield from a.launch.notes
    yield from m.plan.notes() if m.plan else ()
    if flags := dict.fromkeys([*a.script_flags, *(t.about for t in own(a))]):
        yield f"flags of the script, or of another Megatron: {a.target.pin}'s parser stops at {', '.join(flags)}"
    if a.foreign:
        more = f" and {len(a.foreign) - 8} more" if len(a.foreign) > 8 else ""
        whose = "of a program whose parser and defaults are not known here, or of another Megatron"
        yield f"no flags of Megatron {a.target.pin}: {', '.join(a.foreign[:8])}{more}; {whose}: of no flag is said that it lacks"
    if a.of_no_training:
        yield f"{shown(a.launch.script or '')} is given neither layers nor a batch nor a length: what is not said here is left to it"
    if unread := [a.written(name) for name in a.sure(*IDLE)]:
        yield f"read, and of no effect in this Megatron: {', '.join(unread)}"
    names = dict.fromkeys(ALIASES, "") | {name: f" ({hint})" for name, hint in OLD.items()}
    refused = {*a.foreign, *(t.about for t in a.trouble)}
    hints = {a.written(name): hint for name, hint in names.items() if a.sure(name) and not a.switched_off(name)}
    if old := [word + hint for word, hint in hints.items() if word not in refused]:
        yield f"deprecated, and read as before in this Megatron: {', '.join(old)}"
    if without := [found.replace("\t", " ") for found in idle(a, m, "noted")]:
        yield f"of no effect here: {', '.join(without)}"
    if known(lambda: a.attention_backend == "flash" and m.attends):
        yield "--attention-backend flash wants flash-attn installed: it switches cuDNN's attention off"
    if known(lambda: m.from_elsewhere):
        yield f"part of the description is elsewhere ({', '.join(m.from_elsewhere)}): what is said here is of these flags alone"
    if words := [t.about for t in a.trouble if t.rule == "unknown-variable"]:
        yield f"flags may stand in {', '.join(words)}: what is said here is of the others, and of no flag is said that it lacks"
    asked = known(lambda: max(m.tp * m.pp * m.cp, m.etp * m.ep * m.pp if m.moe else 0), 1)
    if a.launch.supposed and a.launch.gpus and asked > a.launch.gpus and not asked % a.launch.gpus:
        yield f"the layout asks for {asked} GPUs or a multiple; the environment says how many, {a.launch.gpus} where it says nothing"
    if defaults_unknown(a, m) and not a.elsewhere and any("?" in text for _, text in rows(a, m)):
        yield "`?` is not said here: what this text leaves out, or its program, decides it"
    if MEASURES.search(PurePath(a.launch.name).name) and not m.described:
        yield "a benchmark or a test by its file's name: of defaults, and of what a run that is kept wants, nothing is said"
    if a.empty:
        yield f"arrays that nothing in the text fills, taken as empty: {', '.join(f'${n}' for n in a.empty)}"
    left: dict[str, list[str]] = {}
    lines = set[int]()
    for why, flag, where in left_open(a):
        left.setdefault(why, []).append(flag)
        lines.update(where if why == "branch" else ())
    would = f"line {', '.join(map(str, sorted(lines)))}" if len(lines) < 8 else f"lines {min(lines)} to {max(lines)}"
    for why, said in (
        ("computed", "worked out by the program where it runs, and open here"),
        ("unset", "the text does not decide what these hang on, and they are open"),
        ("branch", f"open, since they hang on what {would} would find"),
        ("condition", "open, since they hang on what the text does not decide"),
        ("runs", "not set in the text, and how it runs hangs on it"),
        ("path", "not set in the text, and no matter here"),
    ):
        if why in left:
            yield f"{said}: {', '.join(left[why])}"
    if known(lambda: a.sequence_parallel and a.said("tensor_model_parallel_size") and m.tp == 1):
        yield "--sequence-parallel is switched off at tensor parallel size 1"
    if m.marked:
        ours = f"`--nam-model` says that {', '.join(m.marked)} are ours"
        yield f"{ours}: stock Megatron stops at it; which and how large stands in plan.json"
    if known(lambda: m.mamba and not m.hidden_mixers and not a.any_said(*SIZES), False):
        plan = "" if m.a.launch.script and not m.ours else "; Mamba-3 and M2RNN of ours would stand in plan.json alone"
        yield f"`M` layers are taken as Mamba-2 of Megatron's default sizes: no flag says otherwise{plan}"
    if known(
        lambda: m.tp * m.cp > 1
        and not m.fsdp
        and not m.blackwell
        and "CUDA_DEVICE_MAX_CONNECTIONS" not in a.launch.env
        and not re.search(r"(?m)^[^#\n]*CUDA_DEVICE_MAX_CONNECTIONS[^\w\n]+1\b", a.launch.text),  # in Ray's JSON, say
        False,
    ):
        yield "tensor and context parallelism demand CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper and before; the text does not export it"
    if known(lambda: a.log_throughput and m.hybrid and m.latent, False):
        yield "the TFLOP/s that Megatron logs count `+` and `D` layers as 0"
    if known(lambda: a.optimizer in ("muon", "dist_muon"), False):
        yield "Muon takes every matrix but the embeddings: routers and DSA indexers included"


def data(report: "Report") -> dict[str, object]:
    """The same for programs; null where not known."""
    a, m = report.args, report.model
    return {
        "kind": known(lambda: "hybrid" if m.hybrid else "gpt"),
        "num_layers": known(lambda: m.num_layers),
        "pattern": known(lambda: m.pattern),
        "layers": known(
            lambda: [{"number": n, "kind": None if m.hidden_mixers and k == SYMBOLS["M"] else k} for n, k in m.layers]
        ),
        "mtp": known(lambda: {"depths": m.mtp_depths, "kinds": list(m.mtp_layers)}),
        "parameters": None
        if a.shaping or known(lambda: guessed(a, m), True)
        else known(lambda: {"total": m.count.total, "active": m.count.active, "by": dict(m.count.by)}),
        "arguments": {name: _plain(a.value(name)) for name in sorted(a.given)},
        "text": told(report),
    }


def _plain(value: object) -> object:
    """As JSON has it; null for what is not known, text for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return None if isinstance(value, Open) else value


def _v(a: Args, name: str) -> str:
    """A value, marked where it is Megatron's default; `?` where a condition decides it."""
    if name in a.hanging:
        return "?"
    value = getattr(a, name)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if a.said(name) else f"{text} (default)"


def _hung(of: Callable[[], Any], hangs: str = "?") -> Any:
    """A piece of a row, each of which another condition may decide."""
    try:
        return of()
    except Hangs:
        return hangs


def _or_open(value: object) -> object:
    """A value that Megatron has no default for; `?` where the launch lacks it."""
    return "?" if value is None else value


def ranges(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as `1-3, 7`; evenly spaced ones as `1, 5, ... 49 (every 4)`."""
    if len(numbers) > 3 and len(steps := {b - a for a, b in pairwise(numbers)}) == 1 and (step := steps.pop()) > 1:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]} (every {step})"
    pieces, start = [], 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            pieces.append(f"{first}-{last}" if last - first > 1 else ", ".join(map(str, numbers[start:i])))
            start = i
    return ", ".join(pieces)


def _model(a: Args, m: Model) -> str:
    if m.hybrid:
        return f"hybrid, {m.num_layers} layers" + (f": {m.pattern}" if m.pattern else "")
    return f"GPT, {m.num_layers} layers" + (
        "" if m.pattern is None else f" (the pattern {m.pattern} gives their number and nothing else)"
    )


def _layers(m: Model) -> str | None:
    titles = TITLES | ({SYMBOLS["M"]: "Mamba-2 or ours"} if m.hidden_mixers else {})
    lines = [f"{len(m.numbers(k)):>3} {titles[k]:<16} {ranges(m.numbers(k))}".rstrip() for k in TITLES if m.numbers(k)]
    return "\n".join(lines) or "none"


def _mtp(a: Args, m: Model) -> str | None:
    kinds = " + ".join(TITLES[k] for k in m.mtp_layers)
    return f"{m.mtp_depths} x ({kinds}), loss weight {a.mtp_loss_scaling_factor:g}" if m.mtp_depths else None


def _parameters(a: Args, m: Model) -> str:
    """Exact; without the embeddings where the tokenizer decides how many rows they have."""
    rest = ""
    if lacks(lambda: m.vocabulary) is None:
        embeddings = "two embeddings" if a.untie_embeddings_and_output_weights else "one embedding"
        rest = f" and {embeddings} of as many rows as the tokenizer has entries"
    elif m.vocabulary_is_the_tokenizers:
        rest = ", if the tokenizer has as many entries as --vocab-size says"
    active = f", {m.count.active:,} active per token" if m.count.active != m.count.total else ""
    guess = "?; without those flags " if a.shaping else "?; by Megatron's defaults " if guessed(a, m) else ""
    return f"{guess}{m.count.total:,}{active}{rest}"


def guessed(a: Args, m: Model) -> bool:
    """Whether the count stands on what is not said, and another program may say otherwise."""
    names = ("position_embedding_type use_rotary_position_embeddings", ROWS["activation"], "normalization")
    return defaults_unknown(a, m) and not a.of_megatron and not all(a.any_said(*n.split()) for n in names)


def _otherwise(a: Args) -> str:
    """Whether what is not read may make it another model than what is."""
    more = f" and {len(a.shaping) - 3} more" if len(a.shaping) > 3 else ""
    return f", as far as it is read: {', '.join(a.shaping[:3])}{more} may make it another" if a.shaping else ""


def _cut(text: str) -> str:
    """What a flag has, as of a blend of many files the first few."""
    words = text.split(" ")
    return text if len(words) < 14 else f"{' '.join(words[:7])} ... ({len(words) - 1} words)"


def _mlp(a: Args, m: Model) -> str:
    if "mlp" not in m.kinds:
        return ""
    return f", MLP {m.ffn}" + ("" if a.said("ffn_hidden_size") else " (default)")


def _attention(a: Args, m: Model) -> str | None:
    if not m.attends:
        return None
    lines = []
    if m.plain_attention:
        kind = "MHA" if m.groups == m.heads else "MQA" if m.groups == 1 else "GQA"
        groups = f", {m.groups} key/value heads" if kind != "MHA" else ""
        others = [] if a.said("num_query_groups") else [f for f in a.shaping if re.search("kv|key.value|group", f)]
        unread = f"{m.heads} heads, key/value heads ? (`{others[0]}`)" if others else ""
        lines.append(unread or f"{kind}: {m.heads} heads of {m.head_dim}{groups}")
    if m.latent:
        q = f"query latent {a.q_lora_rank}" if a.q_lora_rank is not None else "no query latent"
        lines.append(f"MLA: {m.heads} heads, {q}, key/value latent {_v(a, 'kv_lora_rank')}, head {_v(a, 'qk_head_dim')} + "
                     f"{_v(a, 'qk_pos_emb_head_dim')} with RoPE, value {_v(a, 'v_head_dim')}")  # fmt: skip
    if m.dsa:
        loss = f"{a.dsa_indexer_loss_coeff or 0:g}"
        top, heads, width = map(_or_open, (a.dsa_indexer_topk, a.dsa_indexer_n_heads, a.dsa_indexer_head_dim))
        text = f"DSA: top {top} by {heads} indexer heads of {width}, loss {loss}"
        shared: dict[int, list[int]] = {}
        for n in m.dsa_layers:
            if (source := m.topk_source(n)) != n:
                shared.setdefault(source, []).append(n)
        if shared:
            text += "; top-k shared " + "; ".join(f"{s} -> {', '.join(map(str, to))}" for s, to in shared.items())
        lines.append(text)
    if a.window_size is not None and m.plain_attention:
        skip = a.window_attn_skip_freq
        lines.append(f"window {a.window_size}" + ("" if skip is None else f", but for layers by frequency {skip}"))
    extra = {
        "a gate on its output": a.attention_output_gate, "bias of queries, keys and values": a.add_qkv_bias,
        f"softmax {a.softmax_type}": a.softmax_type != "vanilla",
    }  # fmt: skip
    lines += [", ".join(name for name, on in extra.items() if on)] if m.plain_attention and any(extra.values()) else []
    return "\n".join(lines)


def _positions(a: Args, m: Model) -> str:
    default = "" if a.any_said("position_embedding_type", "use_rotary_position_embeddings") else " (default)"
    table = (
        f"learned table of {_or_open(a.max_position_embeddings)}{default}"
        if m.positions == "learned_absolute"
        else None
    )
    own = []
    if m.mla and m.latent:
        own.append(
            f"MLA: {m.rope_type}{'' if a.said('rope_type') else ' (default)'}{_yarn(a, m)}, base {_v(a, 'rotary_base')}"
        )
    if m.plain_attention and m.gpt_oss:
        own.append(f"yarn of gpt-oss by --enable-gpt-oss (factor 32 over 131072 tokens), base {_v(a, 'rotary_base')}")
    elif m.plain_attention and not table:
        if m.positions in ("rope", "yarn") and not (m.hybrid and m.mla):
            scaled = f", scaled by {m.llama_factor:g}" if m.llama_factor is not None else _yarn(a, m)
            part = f", {a.rotary_percent:.0%} of the head" if a.rotary_percent != 1 else ""
            own.append(f"{'RoPE' if m.positions == 'rope' else 'yarn'}, base {_v(a, 'rotary_base')}{part}{scaled}")
        else:
            own.append("none in attention" if m.positions != "mrope" or m.hybrid else "mrope")
    if own and a.no_rope_freq is not None:
        own.append(f"no rotation in layers by frequency {a.no_rope_freq}")
    return "; ".join([*([table] if table else []), *own]) or f"none ({m.positions})"


def _yarn(a: Args, m: Model) -> str:
    if m.yarn is None:
        return f", factor {a.rotary_scaling_factor:g}" if m.mla and m.rope_type == "yarn" else ""
    y = m.yarn
    return (
        f", factor {y['factor']:g} over {y['original_length']}, betas {y['beta_fast']:g} and {y['beta_slow']:g}, "
        f"mscale {y['mscale']:g} and {y['mscale_all_dim']:g}"
    )


def _norms(a: Args, m: Model) -> str:
    extra = []
    if m.plain_attention:
        extra.append(
            "on queries and keys"
            if a.qk_layernorm
            else "L2 on queries and keys"
            if a.qk_l2_norm
            else "none on queries and keys"
        )
    if m.latent:
        own = f" with {m.latent_epsilon:g}" if m.latent_epsilon != a.layernorm_epsilon else ""
        extra.append(f"on MLA's latents{own}" if a.qk_layernorm else "none on MLA's latents")
    if a.layernorm_zero_centered_gamma:
        extra.append("weights centred at zero (1p)")
    return ", ".join([f"{_v(a, 'normalization')}, epsilon {_v(a, 'layernorm_epsilon')}", *extra])


def _activation(a: Args, m: Model) -> str:
    default = "" if a.any_said("swiglu", "squared_relu", "quick_geglu") else " (default)"
    pieces: tuple[Callable[[], str], ...] = (
        lambda: f"{m.activation}{default}",
        lambda: "gated" if m.gated else "not gated",
        lambda: "linear bias" if a.add_bias_linear else "no linear bias",
    )
    return ", ".join(_hung(piece) for piece in pieces)


def _experts(a: Args, m: Model) -> str | None:
    if not m.moe:
        return None
    shared = f", one shared of {a.moe_shared_expert_intermediate_size}" if a.moe_shared_expert_intermediate_size else ""
    # Of all programs with Megatron's layers, so that the number stays beside other defaults that are not known.
    of_mlp = (
        " (the MLP's)" if a.foreign and a.said("ffn_hidden_size") and not in_part(a, m) else " (default: the MLP's)"
    )
    width = f"{m.moe_ffn}" + ("" if a.said("moe_ffn_hidden_size") else of_mlp)
    balance = "expert bias" if a.moe_router_enable_expert_bias else ""
    losses = [f"{b} {c:g}" for b, c in zip(m.balancing, m.aux_coefficients, strict=False) if c]
    drop = "dropless" if a.moe_expert_capacity_factor is None else f"capacity {a.moe_expert_capacity_factor:g}"
    routing = (
        f"scores {_v(a, 'moe_router_score_function')}, router in {a.moe_router_dtype or 'the dtype of the weights'}"
    )
    extra = {
        "softmax before the choice": a.moe_router_pre_softmax and a.moe_router_score_function == "softmax",
        f"weights scaled by {a.moe_router_topk_scaling_factor}": a.moe_router_topk_scaling_factor,
        f"experts from {a.moe_router_group_topk} of {a.moe_router_num_groups} groups": a.moe_router_group_topk,
        f"z-loss {a.moe_z_loss_coeff}": a.moe_z_loss_coeff,
        f"input jitter {a.moe_input_jitter_eps}": a.moe_input_jitter_eps,
        f"latent {a.moe_latent_size}": a.moe_latent_size,
        "a gate on the shared expert": shared and a.moe_shared_expert_gate,
    }
    routing = ", ".join([routing, *(name for name, on in extra.items() if on)])
    balanced = " and ".join(filter(None, [balance, *losses])) or "nothing"
    lines = (
        f"{_or_open(a.num_experts)} of {width}, top {_v(a, 'moe_router_topk')}{shared}",
        f"{routing}, balanced by {balanced}",
        f"{drop}, dispatcher {m.plan.dispatcher if m.plan else _v(a, 'moe_token_dispatcher_type')}",
    )
    return "\n".join(lines)


def _mamba(a: Args, m: Model) -> str | None:
    if not m.mamba or m.hidden_mixers:
        return None
    heads = f"{m.mamba_heads}" + ("" if a.said("mamba_num_heads") else " (default)")
    return f"{heads} heads of {_v(a, 'mamba_head_dim')}, state {_v(a, 'mamba_state_dim')}, {_v(a, 'mamba_num_groups')} groups"


def _embedding(a: Args, m: Model) -> str:
    tied = "untied" if a.untie_embeddings_and_output_weights else "tied to the output (default)"
    rows_ = _hung(lambda: lacks(lambda: f"{m.vocabulary:,} rows", "rows as the tokenizer has entries"), "? rows")
    return f"{rows_}, {tied}"


def _precision(a: Args, m: Model) -> str:
    base = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32 (default)"
    if known(lambda: (a.fp8, a.fp4)) is None:
        return f"{base}, FP8 ?"
    if a.fp8:
        said = m.plan.precision if m.plan else None
        return f"{base} with {said}, {a.fp8}" if said else f"{base} with FP8 {a.fp8}, {_v(a, 'fp8_recipe')} scaling"
    return f"{base} with FP4 {a.fp4}" if a.fp4 else base


def _optimizer(a: Args, m: Model) -> str:
    names = {"adam": "AdamW"}
    rate = f"lr {a.lr:g} -> {a.min_lr:g} {_v(a, 'lr_decay_style')}" if a.lr is not None else "lr ?"
    betas = f", betas {_v(a, 'adam_beta1')} {_v(a, 'adam_beta2')}" if a.optimizer != "sgd" else ""
    sharded = ", sharded" if a.use_distributed_optimizer or m.fsdp else ""
    name = f"{names.get(a.optimizer, a.optimizer)}{sharded}"
    return f"{name}, {rate}, weight decay {_v(a, 'weight_decay')}{betas}, clip {_v(a, 'clip_grad')}"


def _schedule(a: Args) -> str:
    """How long, warmed up and decayed over how much; each in steps or samples, as the launch counts."""

    def length(what: str) -> str | None:
        if any(f"{what.removeprefix('lr_')}-tokens" in flag.replace("_", "-") for flag in a.foreign):
            return "?"
        for unit, name in (("steps", f"{what}_iters"), ("samples", f"{what}_samples")):
            if getattr(a, name):
                return f"{getattr(a, name)} {unit}"
        return None

    def warmup() -> str:
        share = a.lr_warmup_fraction
        return f"{share:.2%} of the decay" if share is not None else length("lr_warmup") or "none"

    decay = _hung(lambda: length("lr_decay") or "all of it")
    words = [_hung(lambda: length("train") or "?"), f"warm-up {_hung(warmup)}", f"decay over {decay}"]
    if a.lr_decay_style == "WSD":
        words.append(f"the last {length('lr_wsd_decay') or '?'} {a.lr_wsd_decay_style}")
    return ", ".join(words)


def _start(a: Args) -> str:
    std = "Xavier uniform" if a.init_method_xavier_uniform else f"normal, std {_v(a, 'init_method_std')}"
    embedding = "" if a.embedding_init_method_std is None else f", embeddings {a.embedding_init_method_std}"
    source = next((n for n in ("load", "pretrained_checkpoint") if n in a.given), None)
    if source:
        return f"{std}{embedding}; weights {f'of {a.written(source)}' if a.sure(source) else '?'}"
    return f"{std}{embedding}"


def _layout(a: Args, m: Model) -> str:
    on = f"{counted(a.launch.gpus, 'GPU')}: " if a.launch.gpus else ""
    if a.elsewhere and not a.any_said(
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
    ):
        raise NotKnown("layout")

    def size(name: str, of: Callable[[], int]) -> str:
        return f"{name} {known(of, '?')}"

    def piece(name: str, of: Callable[[], object]) -> list[str]:
        """Nothing where there is none of it; `?` where a condition decides that."""
        found = _hung(lambda: lacks(of))
        return [name if found is True else f"{name} {found}"] if found else []

    def experts() -> bool:
        return lacks(lambda: m.moe, bool(a.sure("expert_model_parallel_size")))

    def recomputed() -> str | None:
        of_none = m.recompute == "full" and a.recompute_method == "block" and a.recompute_num_layers == 0
        return "full, of no layer" if of_none else m.recompute

    words = [
        " ".join([size("tensor", lambda: m.tp), *piece("+ sequence", lambda: m.sequence_parallel)]),
        size("pipeline", lambda: m.pp),
        size("context", lambda: m.cp),
        *piece("data", lambda: m.dp),
        *piece("expert", lambda: experts() and known(lambda: str(m.ep), "?")),
        *piece("expert tensor", lambda: experts() and known(lambda: str(m.etp), "?")),
        *piece("Megatron-FSDP", lambda: a.use_megatron_fsdp),
        *piece("torch FSDP2", lambda: a.use_torch_fsdp2),
        *piece("recompute", recomputed),
        *piece("CUDA graphs", lambda: m.graphs.removeprefix("none")),
    ]
    return on + ", ".join(words)


def _batch(a: Args, m: Model) -> str:
    size = a.global_batch_size or known(lambda: f"{m.need('micro_batch_size') * m.dp} (default)", "? (default)")
    return f"{_or_open(a.micro_batch_size)} per pass, {size} per step"
