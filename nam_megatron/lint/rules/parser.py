"""What argparse makes of the words."""

import re
from collections.abc import Iterator, Mapping

from nam_megatron.lint.follow import shown
from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.rule import (
    COST,
    DEFAULT,
    FAIL,
    FRAGILE,
    OPEN,
    PARSER,
    VALIDATE,
    WRONG,
    Rule,
    When,
    each,
    without,
)
from nam_megatron.lint.values import Args, Trouble, harmless

OLD = {
    "hybrid_override_pattern": "use `--hybrid-layer-pattern`",
    "mtp_hybrid_override_pattern": "use `--hybrid-layer-pattern` with a `/` before each MTP depth",
    "cuda_graph_scope_deprecated": "use `--cuda-graph-modules`",
    "enable_cuda_graph": "use `--cuda-graph-impl local`",
    "external_cuda_graph": "use `--cuda-graph-impl transformer_engine`",
    "moe_layer_recompute": "use `--recompute-granularity selective --recompute-modules moe`",
    "moe_router_padding_for_fp8": "use `--moe-router-padding-for-quantization`",
    "moe_enable_deepep": "use `--moe-flex-dispatcher-backend deepep`",
    "moe_deepep_num_sms": "use `--moe-flex-dispatcher-num-sms`",
    "moe_hybridep_num_sms": "use `--moe-flex-dispatcher-num-sms`",
    "no_weight_decay_cond_type": "use `--apply-wd-to-qk-layernorm`",
    "dist_ckpt_format_deprecated": "use `--ckpt-format`",
}

# Parsed, and of no effect on anything: no finding. Nor are old words for what 0.19.2 does all the same.
IDLE = (
    "deprecated_use_mcore_models", "use_flash_attn", "onnx_safe", "use_dist_ckpt_deprecated", "ckpt_fully_parallel_save_deprecated",
    "disable_msc_deprecated",
)  # fmt: skip
ALIASES = ("use_rotary_position_embeddings", "add_position_embedding")

GONE = {
    "batch_size": "use `--micro-batch-size`",
    "warmup": "use `--lr-warmup-fraction`",
    "model_parallel_size": "use `--tensor-model-parallel-size`",
    "checkpoint_activations": "use `--recompute-activations`",
}


# How a model runs, and not which.
RUNS = re.compile(
    "dispatcher|recompute|_parallel|overlap|cuda_graph|fusion|attention_backend|num_workers|offload|distributed_"
)
SHOWN = re.compile("log_|tensorboard|wandb|timing")  # what is printed, and no more


# Rules about what a launch lacks; they say nothing where it may be given elsewhere. So do findings "without" a flag and rules that are
# mended by one more.
ABSENCES = re.compile(
    "missing-flag|companion|no-layers|moe-expert-parallel|pattern-without-experts|save-interval|"
    "fp32|default-.*|gqa-one-group|mla-no-latent-norm"
)


# Programs that take Megatron's flags and do not train.
NO_TRAINING = re.compile(
    r"convert|hf2|2mcore|mcore2|inference|generat|evaluat|server|export|preprocess|quantize|ptq|prune|index|(^|/)(tasks|tools)/"
)


OF_TRAINING = ("not-positive", "inference-layers", "default-dropout", "default-beta2", "default-balancing")


def runs(name: str) -> bool:
    """Whether an argument is of how a launch runs, how often it looks up and what it does beside training: no model hangs on it."""
    return bool(RUNS.search(name) or re.search("interval|inference_|grpo|^rl_|ckpt_step", name))


def own(a: Args) -> list[Trouble]:
    """Flags that Megatron has not, of a program that does not train: it has more than Megatron's parser, in most cases."""
    other = NO_TRAINING.search(a.launch.script or "")
    return [t for t in a.trouble if other and t.rule == "unknown-flag" and not t.fix]


def absence(rule: Rule, flag: str, fix: str) -> bool:
    """Whether a finding is about something that a launch lacks."""
    return bool(ABSENCES.fullmatch(rule.id)) or flag.startswith(without("")) or (fix or rule.fix).startswith("add `--")


def of_another(rule: Rule, a: Args) -> bool:
    """Whether a rule is about what another program does itself: its parser and checks; a port to another device has kernels, too."""
    if NO_TRAINING.search(a.launch.script or "") and (rule.severity == COST or rule.id in OF_TRAINING):
        return True
    if a.ported and rule.id not in ("given-twice", "not-the-card", "unknown-variable", "unknown-flag"):
        return rule.severity != DEFAULT
    return (a.forked and _of_parser(rule)) or (a.elsewhere and rule.id == "old-flag" and not a.launch.program)


def _of_parser(rule: Rule) -> bool:
    """Whether only Megatron's own command refuses: another program builds the same layers."""
    return (
        rule.severity == FAIL
        and rule.source.startswith(VALIDATE)
        and rule.id not in ("world-size", "conflict", "indivisible", "not-positive")
    )


def elsewhere(a: Args, m: Model) -> bool:
    """Whether flags may come from elsewhere: a checkpoint, a YAML, a script that reads these variables, or words not known here."""
    opened = any(t.rule == "unknown-variable" for t in a.trouble)
    return bool(known(lambda: m.from_elsewhere, True)) or a.launch.partial or opened or bool(a.foreign) or a.elsewhere


def _trouble(rule: str) -> When:
    return lambda a, m: [f"{t.about}\t{t.detail}\t{t.fix}" for t in a.trouble if t.rule == rule]


def _missing(a: Args, m: Model) -> list[str]:
    names = ["hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "micro_batch_size", "lr"]
    if "D" in (m.pattern or "") or m.checks_dsa:
        names += ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"]
    missing = [
        a.target.by_dest[n].name
        for n in names
        if not a.said(n) and not (n == "seq_length" and a.said("encoder_seq_length"))
    ]
    if not a.any_said("num_layers", "encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"):
        missing.append("--num-layers or --hybrid-layer-pattern")
    if not a.any_said("train_iters", "train_samples"):
        missing.append("--train-iters or --train-samples")
    if a.tokenizer_type == "NullTokenizer" and not a.any_said("vocab_size", "padded_vocab_size"):
        missing.append("--vocab-size")
    return [] if a.skip_train or NO_TRAINING.search(a.launch.script or "") else missing


def _unknown(a: Args, m: Model) -> Iterator[str]:
    """One finding for each kind of reason: a script that takes its values as arguments would have one for each of them."""
    found = [(t.about, tuple(t.detail.split(", "))) for t in a.trouble if t.rule == "unknown-variable"]
    found += [
        (a.written(name), variables)
        for name, variables in a.open_values()
        if not harmless(name, a.target)
        and name != "local_rank"  # a launcher's, as ever
        and not a.worked_out(variables)
        and not runs(name)
    ]
    set_in = {name: _set_in(a.launch.text, name) for _, names in found for name in names}
    alike: dict[tuple[bool, ...], list[tuple[str, tuple[str, ...]]]] = {}
    for what, names in found:
        alike.setdefault(tuple(sorted({bool(set_in[name]) for name in names})), []).append((what, names))
    for (first, names), *others in alike.values():
        more = "".join(f"{what}{_in_line(a, what)}, " for what, _ in others).removesuffix(", ")
        why = _why_open({name: set_in[name] for _, ns in [(first, names), *others] for name in ns})
        yield f"{first}\t{f'and {more}: ' if more else ''}{why}"


def _in_line(a: Args, what: str) -> str:
    lines = a.launch.lines(what.split()[0].split("=")[0]) if what.startswith("--") else ()
    return f" (line {', '.join(map(str, lines))})" if lines else ""


def _set_in(text: str, name: str) -> tuple[int, ...]:
    return tuple(n for n, line in enumerate(text.splitlines(), 1) if _sets(name, line))


def _why_open(found: Mapping[str, tuple[int, ...]]) -> str:
    """Of each name whether the text sets it, and in which lines, where only a condition or a command would tell to what."""
    computed = [name for name in found if not re.fullmatch(r"[\w-]+", name)]
    unset = [name for name, lines in found.items() if not lines and name not in computed]
    hanging = {name: lines for name, lines in found.items() if lines}
    told = [f"nothing in the text sets {', '.join(unset)}"] if unset else []
    if hanging:
        lines = sorted({line for lines in hanging.values() for line in lines})
        where = f"line {', '.join(map(str, lines))}" if len(lines) < 8 else f"lines {lines[0]} to {lines[-1]}"
        told.append(f"{', '.join(hanging)} hang{'s' if len(hanging) == 1 else ''} on what {where} would find")
    return "; ".join([*told, *(f"`{name}` is worked out where it runs" for name in computed)])


def _sets(name: str, line: str) -> bool:
    """Whether a line of a shell script or of Python sets a variable."""
    word = re.escape(name)
    return bool(
        re.search(
            rf"(?:^|[\s;(&]){word}\+?\s*=(?!=)|\b(?:for|read(?: -\w+)*|mapfile(?: -\w+)*|-v)\s+{word}\b|\$\{{{word}:?=",
            line,
        )
    )


RULES = (
    Rule(
        "unknown-variable",
        OPEN,
        "",
        _unknown,
        "a value that this text does not tell: everything that hangs on it is left open",
        "put the value in, or lint the text after your shell has expanded it",
        "nam_megatron/lint/follow.py",
    ),
    Rule(
        "unknown-flag",
        FAIL,
        "",
        lambda a, m: [
            f"{t.about}\t{t.detail}\t{t.fix}" for t in a.trouble if t.rule == "unknown-flag" and t not in own(a)
        ],
        "Megatron 0.19.2 has no such flag and its parser stops at it",
        "correct it; a flag that your training script adds itself is fine",
        PARSER,
    ),
    Rule(
        "misspelt-field",
        OPEN,
        "",
        _trouble("misspelt-field"),
        "no field that Megatron has, and a letter or two from one: the program leaves it out or stops at it",
        "correct it; a field of the program's own is fine",
        "core/transformer/transformer_config.py",
    ),
    Rule(
        "removed-flag",
        FAIL,
        "",
        _trouble("removed-flag"),
        "Megatron 0.19.2 has this flag no more and its parser stops at it",
        "say it as 0.19.2 does",
        PARSER,
    ),
    Rule(
        "missing-value",
        FAIL,
        "",
        _trouble("missing-value"),
        "the flag has no value; a value with a dash in front reads as a flag",
        "give it one, as `--flag=VALUE` where the value starts with a dash",
        PARSER,
    ),
    Rule("bad-value", FAIL, "", _trouble("bad-value"), "not a value of this flag", "correct it", PARSER),
    Rule(
        "stray-word",
        FAIL,
        "",
        _trouble("stray-word"),
        "a word that belongs to no flag stops the parser",
        "remove it, or look at the quotes around it",
        PARSER,
    ),
    Rule(
        "given-twice",
        WRONG,
        "",
        lambda a, m: [
            f"{' ... '.join(shown(g[2]) for g in a.given[n])}\tthe last one counts"
            for n in a.contradictions
            if not SHOWN.match(n) and not RUNS.search(n)
        ],
        "given more than once, with different values",
        "keep one",
        PARSER,
    ),
    Rule(
        "given-twice-runs",
        FRAGILE,
        "",
        lambda a, m: [
            f"{' ... '.join(shown(g[2]) for g in a.given[n])}\tthe last one counts"
            for n in a.contradictions
            if RUNS.search(n)
        ],
        "given more than once, with different values: the model is the same, how it runs is the last one's",
        "keep one",
        PARSER,
    ),
    Rule(
        "missing-flag",
        FAIL,
        "",
        lambda a, m: [without(flag) + "\t" for flag in _missing(a, m)],
        "Megatron does not start without it",
        "give it",
        VALIDATE,
    ),
    Rule(
        "old-flag",
        FRAGILE,
        "",
        lambda a, m: [f"{a.written(n)}\t\t{OLD[n]}" for n in OLD if a.said(n) and not a.switched_off(n)],
        "deprecated: read today, or not even that",
        "say it as 0.19.2 does",
        VALIDATE,
    ),
    Rule(
        "gone-flag",
        FAIL,
        "",
        lambda a, m: [f"{a.written(n)}\t\t{GONE[n]}" for n in GONE if a.said(n)],
        "still parsed, then refused",
        "say it as 0.19.2 does",
        VALIDATE,
    ),
    Rule(
        "ignored-flag",
        WRONG,
        "",
        lambda a, m: each(a, (n for n in ("openai_gelu", "apply_residual_connection_post_layernorm") if a.value(n))),
        "nothing in Megatron 0.19.2 reads it: the model is built without it",
        "leave it out",
        "no reader in the package",
    ),
)
