"""What argparse makes of the words."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

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
from nam_megatron.lint.values import CHOICES, STRANGERS, Args, Trouble, alike, harmless, nearly_a_choice, set_where

# Old names, which 0.19.2 takes with a warning: a note.
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
}

# Parsed, and of no effect on anything: no finding. Nor are old words for what 0.19.2 does all the same.
IDLE = (
    "deprecated_use_mcore_models", "use_flash_attn", "onnx_safe", "use_dist_ckpt_deprecated", "ckpt_fully_parallel_save_deprecated",
    "disable_msc_deprecated", "dist_ckpt_format_deprecated",
)  # fmt: skip
ALIASES = ("use_rotary_position_embeddings", "add_position_embedding")

# How a model runs, and not which.
RUNS = re.compile(
    "dispatcher|interval|recompute|_parallel|overlap|cuda_graph|fusion|attention_backend|num_workers|offload|distributed_"
)
MEANT = re.compile("^heterogeneous_|^mtp_|^yaml_cfg|^te_precision|quantizer|schedule$")  # say the model
SHOWN = re.compile("log_|tensorboard|wandb|timing|eval_i")  # what is printed or looked up, and no more


# Rules about what a launch lacks; they say nothing where it may be given elsewhere. So do findings "without" a flag and rules that are
# mended by one more.
ABSENCES = re.compile(
    "missing-flag|companion|overlap-param-gather|sequence-parallel-off|no-layers|moe-expert-parallel|pattern-without-experts|save-interval|"
    "fp32|default-.*|gqa-one-group|mla-no-latent-norm"
)


# Programs that take Megatron's flags and do not train.
NO_TRAINING = re.compile(
    r"forward_|convert|hf2|2mcore|mcore2|inference|generat|evaluat|server|export|preprocess|quantize|ptq|prune|index|(^|/)(tasks|tools)/|"
    r"(^|/)(?![^/]*train)([^/]*[^a-z/])?eval[^/]*$"
)


# A program that measures how fast a model runs, or whether it does: whatever it trains, nobody keeps.
MEASURES = re.compile(
    r"(?<![a-z])(tests?|debug|smoke|toy|bench(mark)?(s|ing)?|perf|profil(e|ing)|nsys|throughput|mfu)(?![a-z])",
    re.IGNORECASE,
)
OF_KEPT_RUNS = (
    "fp32", "save-interval", "schedule-apart", "restart-anew", "offload-resume", "resume-learning-rate", "moe-forced-balancing",
)  # fmt: skip


OF_TRAINING = (
    "idle-flag", "documents-not-apart", "schedule-apart", "restart-anew", "not-positive", "inference-layers", "moe-sequence", "given-twice",
)  # fmt: skip


# Of --yaml-cfg, which has checks of its own: of the older flags alone.
YAML_CFG = re.compile(r"^language_model:", re.MULTILINE)
# What a program's code does, of which a fork's may do something else.
OF_ITS_CODE = (
    "idle-flag",
    "documents-not-apart",
    "rampup-ignored",
    "ignored-flag",
    "companion-later",
    "resume-learning-rate",
)
# What it makes of a pattern.
OF_ITS_LAYERS = ("experts-not-in-pattern", "pipeline-auto-split", "num-layers-ignored", "moe-layer-freq-ignored")
# Flags of a script's own by which the model comes from its code.
MODELS = re.compile(r"--([\w-]+-)?model-(provider|type|arch|name)")
# What flags of a script's own decide otherwise than Megatron, by a word in them: how layers are cut, what experts are.
OWN_WORDS = {
    "pipeline-split": re.compile("layer|stage|pipeline|split"),
    "indivisible": re.compile("attention-config"),  # GPT-NeoX: which layers have heads
    "fp32": re.compile("fp32|float32|precision|dtype"),
    "default-ffn": re.compile("multiple|ffn|intermediate"),
    "default-activation": re.compile("glu|gelu|relu|activation-f|silu"),
    "default-positions": re.compile("rope|rotary|alibi|position"),
    "default-normalization": re.compile("(?<!grad-)norm"),
    **dict.fromkeys(("default-top-k", "default-balancing", "moe-sequential"), re.compile("moe|expert|router")),
    "moe-no-balancing": re.compile("moe|expert|router"),
    "moe-top-1": re.compile("rout|gat(e|ing)|score|top-?k"),  # not how experts are laid out, or logged
}


def runs(name: str) -> bool:
    """Whether an argument is of how a launch runs, how often it looks up and what it does beside training: no model hangs on it."""
    return bool(RUNS.search(name) or re.search("interval|eval_iters|inference_|grpo|^rl_|ckpt_step", name))


def own(a: Args) -> list[Trouble]:
    """Flags that Megatron has not and that look like none of its, with a fork's that are an earlier Megatron's."""
    return _own(a) + ([t for t in a.trouble if t.rule == "removed-flag"] if forked(a) else [])


def forked(a: Args) -> bool:
    """Whether a program with a parser of its own reads these words, or a script of its own name with a flag of its own."""
    return a.forked or (a.launch.script is not None and not a.of_megatron and bool(a.foreign or _own(a)))


def _own(a: Args) -> list[Trouble]:
    """Flags that look like none of Megatron's: nobody invents one, so the script has it, or the Megatron it is of."""
    unknown = [
        t
        for t in a.trouble
        if t.rule == "unknown-flag" and not t.fix and not _meant(t, a) and re.fullmatch(r"--[\w-]+", t.about)
    ]
    cut_short = [] if a.foreign else [t for t in unknown if any(flag.startswith(t.about) for flag in a.target.flags)]
    strange = [t for t in unknown if t not in cut_short]
    gone = any(t.rule == "removed-flag" for t in a.trouble)  # an older Megatron, or a fork of one
    count = STRANGERS if gone else len(strange)
    return strange + [t for t in a.trouble if t.rule == "bad-value" and _of_a_fork(t, count)]


def _meant(t: Trouble, a: Args) -> bool:
    """Whether an unknown flag is one of Megatron's, misspelt: not a tool's own, and no digit or word more, which makes another one."""
    close = re.search("`(.*)`", t.detail)
    if close is None or NO_TRAINING.search(a.launch.script or "") or t.about.rstrip("0123456789") == close[1]:
        return False
    words, others = (re.split("[-_]", flag[2:]) for flag in (t.about, close[1]))
    return "".join(words) == "".join(others) or (len(words) == len(others) and all(map(_near, words, others)))


def _near(one: str, other: str) -> bool:
    return alike(one, other) >= 0.7 and abs(len(one) - len(other)) <= 2  # `offload` is no `load`


def strangers(a: Args) -> tuple[str, ...]:
    """Flags that are a program's own: a fork's, or the script's."""
    return *a.foreign, *(t.about for t in own(a))


def _of_a_fork(bad: Trouble, strange: int) -> bool:
    """Whether a value is the class of a fork's tokenizer, or beside flags of its own an optimizer of its, or any choice."""
    name, _, value = bad.about.partition(" ")
    if strange >= STRANGERS and bad.detail.startswith(CHOICES) and not nearly_a_choice(bad):
        return True
    if name == "--optimizer":
        return strange > 0 and value.startswith("adam") and not re.fullmatch("adam_?w", value, re.IGNORECASE)
    choices = bad.detail.removeprefix(CHOICES).strip().split(", ")
    own_class = name == "--tokenizer-type" and (strange or re.fullmatch(r"\w*Tokenizer\w*", value))
    bare = re.sub(r"\d", "", value)  # Llama3Tokenizer is no misspelt Llama2Tokenizer
    return bool(own_class) and all(alike(value, c) < 0.9 or bare == re.sub(r"\d", "", c) for c in choices)


def left_open(a: Args) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Flags whose value the text does not tell: what is to be said of each, the flag with its variables, and the lines that would tell."""
    for name, names in a.open_values():
        flag = a.written(name).split()[0].split("=")[0]
        variables = ", ".join(n if name in a.hanging else f"${n}" for n in dict.fromkeys(names))
        if a.worked_out(names) and name not in a.hanging:
            yield "computed", a.written(name), ()
        elif runs(name):
            yield "runs", f"{flag} ({variables})", ()
        elif harmless(name, a.target) and not MEANT.search(name):
            yield "path", f"{flag} ({variables})", ()
        elif name in a.hanging:
            yield "condition", f"{flag} ({variables})", ()
        else:
            lines = tuple(line for one in names for line in set_where(a.launch.text, one))
            yield "branch" if lines else "unset", f"{flag} ({variables})", lines


def absence(rule: Rule, flag: str, fix: str, a: Args) -> bool:
    """Whether a finding is about something that a launch lacks. A flag that it gives otherwise is not lacking."""
    if ABSENCES.fullmatch(rule.id) or flag.startswith(without("")):
        return True
    wanted = re.match(r"add `(--[\w-]+)", fix or rule.fix)
    lacking = a.target.by_name(wanted[1]) if wanted else None
    return lacking is not None and not a.sure(lacking.dest)


def of_another(rule: Rule, a: Args) -> bool:
    """Whether a rule is about what another program does itself: its parser and checks; a port to another device has kernels, too."""
    if NO_TRAINING.search(a.launch.script or "") and (rule.severity in (COST, DEFAULT) or rule.id in OF_TRAINING):
        return True
    if (rule.severity == DEFAULT or rule.id in OF_KEPT_RUNS) and MEASURES.search(Path(a.launch.name).name):
        return True
    if rule.id == "spec-not-stock" and forked(a):
        return True
    if rule.id == "flex-ignored" and re.search("use_turbo_deepep: *true", a.launch.text, re.IGNORECASE):  # Primus's own
        return True
    if a.rebuilt and rule.id in OF_ITS_CODE:
        return True
    if rule.id == "world-size" and any("world-size" in flag for flag in a.foreign):
        return True
    if rule.id in OWN_WORDS and any(map(OWN_WORDS[rule.id].search, strangers(a))):
        return True
    if a.ported and rule.id not in ("given-twice", "not-the-card", "unknown-variable", "unknown-flag"):
        return rule.severity != DEFAULT
    of_yaml = rule.id == "conflict" and bool(YAML_CFG.search(a.launch.text))
    return of_yaml or ((_of_parser(rule) or rule.id in OF_ITS_LAYERS) and forked(a))


def _of_parser(rule: Rule) -> bool:
    """Whether only Megatron's own command refuses: another program builds the same layers."""
    return (
        rule.severity == FAIL
        and rule.source.startswith(VALIDATE)
        and rule.id not in ("world-size", "conflict", "indivisible", "not-positive")
    )


def elsewhere(a: Args, m: Model) -> bool:
    """Whether a flag that lacks may come from elsewhere, or lack for reasons of another parser's."""
    return bool(a.foreign) or incomplete(a, m)


def incomplete(a: Args, m: Model) -> bool:
    """Whether flags may come from elsewhere: a checkpoint, a YAML, a script that reads these variables, or words not known here."""
    opened = any(t.rule == "unknown-variable" for t in a.trouble) or any(MODELS.match(t.about) for t in own(a))
    return bool(known(lambda: m.from_elsewhere, True)) or a.launch.partial or opened or a.elsewhere


def _unknown_flags(a: Args, m: Model, rule: str = "unknown-flag") -> list[str]:
    others = own(a)
    return [f"{t.about}\t{t.detail}\t{t.fix}" for t in dict.fromkeys(a.trouble) if t.rule == rule and t not in others]


def _overrides(a: Args, name: str, runs: bool) -> bool:
    """Whether what is given last stands in a block that the text calls overrides, or, of how it runs, over a file that it sources."""
    last = max(a.launch.lines(flag := a.given[name][-1][0]), default=0)
    return (runs and 0 < a.launch.text.count(flag) < len(a.given[name])) or any(
        re.match(r"\s*#.*\boverrid", line, re.IGNORECASE)
        for line in a.launch.text.splitlines()[max(last - 12, 0) : last]
    )


def _shortened(a: Args, name: str) -> bool:
    """Whether a length is said again as a tenth or less: a trial of a long run, which the description tells."""
    lengths = [value for _, value, _ in a.given[name]] if name in ("train_iters", "train_samples") else []
    return all(isinstance(v, int) for v in lengths) and len(lengths) > 1 and 10 * lengths[-1] <= lengths[0]


def _removed(a: Args, m: Model) -> list[str]:
    """One finding of all that an earlier Megatron had: a launch of its time has several."""
    gone = {t.about: t.fix for t in a.trouble if t.rule == "removed-flag"}
    if gone and forked(a):
        return []
    if len(gone) < 2:
        return [f"{flag}\t\t{fix}" for flag, fix in gone.items()]
    return [f"{' '.join(gone)}\t\t{'; '.join(f'`{flag}`: {fix}' for flag, fix in gone.items())}"]


def _trouble(rule: str) -> When:
    return lambda a, m: [f"{t.about}\t{t.detail}\t{t.fix}" for t in a.trouble if t.rule == rule]


def _twice(runs: bool) -> When:
    return lambda a, m: [
        f"{' ... '.join(shown(g[2]) for g in a.given[n])}\t{'its program knows which' if a.launch.program else 'the last one'} counts"
        for n in a.contradictions
        if not SHOWN.match(n) and bool(RUNS.search(n)) is runs and not _overrides(a, n, runs) and not _shortened(a, n)
    ]


def _missing(a: Args, m: Model) -> list[str]:
    names = ["hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "micro_batch_size", "lr"]
    if "D" in (m.pattern or "") or m.checks_dsa:
        names += ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"]
    other = {
        "seq_length": "encoder_seq_length" in a.given,
        "micro_batch_size": any(t.about == "--batch-size" for t in a.trouble),
    }
    missing = [a.target.by_dest[n].name for n in names if n not in a.given and not other.get(n)]
    if a.given.keys().isdisjoint(
        ("num_layers", "encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern")
    ):
        missing.append("--num-layers or --hybrid-layer-pattern")
    if a.given.keys().isdisjoint(("train_iters", "train_samples")):
        missing.append("--train-iters or --train-samples")
    if a.tokenizer_type == "NullTokenizer" and a.given.keys().isdisjoint(("vocab_size", "padded_vocab_size")):
        missing.append("--vocab-size")
    return [] if a.skip_train or NO_TRAINING.search(a.launch.script or "") else missing


def _unknown(a: Args, m: Model) -> Iterator[str]:
    """Variables that nothing in the text sets, but one a letter or two away. Others are a template's, an environment's: a note."""
    found = [(t.about, tuple(t.detail.split(", "))) for t in a.trouble if t.rule == "unknown-variable"]
    found += [(a.written(name), names) for name, names in a.open_values() if not SHOWN.match(name)]
    first = {name: what for what, names in reversed(found) for name in filter(str.isidentifier, names)}
    for name, what in first.items():
        if not set_where(a.launch.text, name) and (close := _nearly_set(a.launch.text, name)):
            yield f"{what}\tnothing in the text sets {name}, but {close}"


def _nearly_set(text: str, name: str) -> str | None:
    """The variable that a text sets which is a letter or two from one that it does not."""
    names = {found for found in re.findall(r"(?:^|[\s;(&])([A-Za-z_]\w{3,})\+?=", text, re.MULTILINE)}
    near = next(iter(difflib.get_close_matches(name, names, 1, 0.83) if len(name) > 3 else []), None)
    if near is None or re.sub(r"\D", "", name) != re.sub(r"\D", "", near):
        return None
    one, other = name.split("_"), near.split("_")  # of which none is another word, and no word is more
    near_words = all(map(_near, one, other)) if len(one) == len(other) else alike("".join(one), "".join(other)) >= 0.9
    return near if near_words else None


RULES = (
    Rule("unknown-variable", OPEN, "", _unknown, "a variable that has no value here",
        "correct its name; one of your environment's is fine", "nam_megatron/lint/follow.py"),
    Rule("unknown-flag", FAIL, "", _unknown_flags, "Megatron 0.19.2 has no such flag and its parser stops at it",
        "correct it; a flag that your training script adds itself is fine", PARSER),
    Rule("misspelt-field", OPEN, "", _trouble("misspelt-field"),
        "no field that Megatron has, and a letter or two from one: the program leaves it out or stops at it",
        "correct it; a field of the program's own is fine", "core/transformer/transformer_config.py"),
    Rule("removed-flag", FAIL, "", _removed, "Megatron 0.19.2 takes this flag no more, and stops at it",
        "say it as 0.19.2 does", PARSER),
    Rule("missing-value", FAIL, "", _trouble("missing-value"),
        "the flag has no value; a value with a dash in front reads as a flag",
        "give it one, as `--flag=VALUE` where the value starts with a dash", PARSER),
    Rule("bad-value", FAIL, "", lambda a, m: _unknown_flags(a, m, "bad-value"), "not a value of this flag",
        "correct it", PARSER),
    Rule("stray-word", FAIL, "", _trouble("stray-word"), "a word that belongs to no flag stops the parser",
        "remove it, or look at the quotes around it", PARSER),
    Rule(
        "given-twice", WRONG, "", _twice(runs=False), "given more than once, with different values", "keep one", PARSER
    ),
    Rule("given-twice-runs", FRAGILE, "", _twice(runs=True),
        "given more than once, with different values: the model is the same, how it runs is the last one's", "keep one",
        PARSER),
    Rule("missing-flag", FAIL, "", lambda a, m: [without(flag) + "\t" for flag in _missing(a, m)],
        "Megatron does not start without it", "give it", VALIDATE),
    Rule("ignored-flag", WRONG, "",
        lambda a, m: each(a, (n for n in ("openai_gelu", "apply_residual_connection_post_layernorm") if a.value(n))),
        "nothing in Megatron 0.19.2 reads it: the model is built without it", "leave it out",
        "no reader in the package"),
)  # fmt: skip
