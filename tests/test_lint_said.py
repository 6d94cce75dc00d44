"""What lint says, in golden/lint*.txt as reviewed: `--rewrite-golden` after a change that is meant.

lint.txt: a launch of every family and each flag that lint looks at, in words and in a recipe's keys. lint_read.txt: what is read of
scripts, YAML, configs of Hugging Face and containers of Bridge. lint_texts.txt: whole reports, and whole recipes.
"""

import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import yaml
from hf_configs import CONFIGS
from lint_cases import CASES, DSA, FSDP, GPT, HYBRID, MLA, MOE, TP2
from presets import lowered
from test_lint import FIXTURES, NO_LAUNCH, SHELL, launch, words
from test_lint_bash import RUN, SCRIPTS

from nam_megatron import argv
from nam_megatron.computation import flat
from nam_megatron.errors import Refused
from nam_megatron.lint import __main__ as command
from nam_megatron.lint import container, describe, follow, huggingface, lint, recipe, report, rules
from nam_megatron.lint.model import Model, known
from nam_megatron.lint.read import BASES as OTHER_FILES
from nam_megatron.lint.read import read
from nam_megatron.lint.rules import parser
from nam_megatron.lint.rules.rule import FAIL
from nam_megatron.lint.values import REMOVED, NotKnown
from nam_megatron.lower import translate
from nam_megatron.targets import current

GOLDEN = Path(__file__).parent / "golden"
SOURCES = sorted(Path(report.__file__).parent.rglob("*.py"))
# Launches of every family; two layouts, for most rules of a layout are silent on one GPU.
LAID_OUT = TP2 | {"--pipeline-model-parallel-size": "2", "--context-parallel-size": "2"}
BASES = {
    "hybrid": HYBRID, "experts": MOE, "latent": MLA | {"--mtp-num-layers": "1"}, "sparse": DSA, "laid out": MOE | LAID_OUT,
    "sharded": FSDP | TP2,
    "recomputed": HYBRID | {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"},
}  # fmt: skip
VALUES = {"int": ("0", "3"), "float": ("0.0", "0.3"), "str": ("other",), "eval": ("[1,0]",)}


def looked_at() -> set[str]:
    """The names of arguments in lint's own code."""
    words = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return {flag.dest for flag in current().flags.values()} & words


def changes(base: dict, of_interest: set[str]) -> Iterator[dict]:
    """Each flag in question, with values that its parser takes and the base has not."""
    for name, flag in sorted(current().flags.items()):
        if flag.dest not in of_interest or not name.startswith("--") or name in ("--help",):
            continue
        if flag.action != "store":
            yield {name: None if name in base else True}
            continue
        values = tuple(map(str, flag.choices or ())) or VALUES.get(flag.type or "str", ("3",))
        yield from ({name: value} for value in (*values, *((None,) if name in base else ())) if base.get(name) != value)


def said(found) -> dict[str, str]:
    rows = {f"{name}:": text for name, text in describe.rows(found.args, found.model)}
    rows |= {f"note {i}": note for i, note in enumerate(describe.notes(found.args, found.model))}
    own = {f: f.fix * (f.fix != rules.BY_ID[f.id].fix) for f in found.findings}
    return (
        rows
        | {f"{f.severity} {f.id} {f.flag}": f"{f.detail} {own[f]}".strip() for f in found.findings}
        | carried(found)
    )


def carried(found) -> dict[str, str]:
    """The keys of the nearest recipe; what no key says, as far as that is known before it is composed."""
    lost: list[str] = []
    try:
        keys = recipe._groups(found.args, found.model) | flat(recipe._wanted(found.args, found.model, "mine", lost), "")
    except (NotKnown, Refused) as why:
        return {"recipe": f"none: {why}"}
    return {f"recipe {key}": str(value) for key, value in keys.items()} | {
        f"lost {i}": why for i, why in enumerate(lost)
    }


def of_flags() -> Iterator[str]:
    for title, base in BASES.items():
        plain = said(launch(base, {}))
        yield f"== {title}"
        yield from (f"{key} {text}" for key, text in plain.items())
        for change in changes(base, looked_at()):
            (flag, value), now = *change.items(), said(launch(base, change))
            told = [f"    {key} {text}" for key, text in now.items() if plain.get(key) != text]
            told += [
                f"    no {key}"
                for key in plain
                if key not in now and not ("recipe" in now and key.startswith("recipe "))
            ]
            if told:
                yield f"{title}: {'without ' if value is None else ''}{flag}{'' if value in (True, None) else f' {value}'}"
                yield from told


def of_texts_read() -> Iterator[str]:
    extending = (f"{base}: x.yaml\nhidden_size: 4" for base in sorted(OTHER_FILES))
    for text in (*SHELL, *NO_LAUNCH, *extending, *(script.replace("RUN", RUN) for script in (*SCRIPTS, *of_tables()))):
        yield f"== {text[:300]!r}"
        try:
            found = read(text, current())
        except Refused as why:
            yield f"refused: {why}"
            continue
        yield " ".join(map(repr, found.words))
        told = {"env": found.env, "script": found.script, "gpus": found.gpus, "partial": found.partial}
        yield from (f"    {name}: {value}" for name, value in told.items() if value)
        yield from (f"    note: {note}" for note in found.notes)
    for name, config in CONFIGS.items():
        plain = "\n".join(pairs(*huggingface.words(config, name)))
        yield from (f"== {name}", plain)
        for key in sorted({*config, *OTHERS} - {"model_type"}):
            for value in (others(config[key]) if key in config else []) + OTHERS.get(key, []):
                changed = without_absent(config | {key: value})
                yield from differing(f"{name}: {key}: {value}", plain, partial(huggingface.words, changed, name))
    whole = yaml.safe_load(BRIDGES.read_text())
    plain = "\n".join(pairs(*container.words(whole, current())))
    yield from ("== a container of Bridge's", plain)
    for section in container.SECTIONS:
        for key, was in whole.get(section, {}).items():
            for value in others(was):
                changed = whole | {section: without_absent(whole[section] | {key: value})}
                yield from differing(f"{section}.{key}: {value}", plain, partial(container.words, changed, current()))

    for name in sorted(
        key for key in container.SPELLED if key.partition(".")[2] not in whole.get(key.partition(".")[0], {})
    ):
        section, _, key = name.rpartition(".")
        for value in (7, True, "x", ["a", "b"]):
            changed = whole | {section: whole.get(section, {}) | {key: value}}
            yield from differing(f"{name}: {value}", plain, partial(container.words, changed, current()))


def of_tables() -> Iterator[str]:
    """A script for every word that lint knows."""
    yield from (f"{shell} -c 'RUN 4'" for shell in sorted(follow.SHELLS))
    yield from (f"cat <<EOF | {taker}\nRUN 4\nEOF" for taker in sorted(follow.TAKES_SCRIPT))
    yield from (f"{taker} job.sh <<EOF\nRUN 4\nEOF" for taker in sorted(follow.TAKES_SCRIPT))
    yield from (f"{declare} X=4; RUN $X" for declare in sorted(follow.DECLARE))
    yield from (f"{prints} RUN 4 > job.sh; {prints} RUN 5" for prints in sorted(follow.PRINTS))
    yield from (f"if {asks} a; then X=4; else X=5; fi; RUN $X" for asks in sorted(follow.ASKS))
    yield from (
        f"if [ {n} {test} 4 ]; then X=4; else X=5; fi; RUN $X" for test in sorted(follow.NUMERIC) for n in (3, 4, 5)
    )
    signs = (
        "+",
        "-",
        "*",
        "/",
        "%",
        "**",
        "<<",
        ">>",
        "&",
        "|",
        "^",
        "<",
        "<=",
        ">",
        ">=",
        "==",
        "!=",
        "&&",
        "||",
        ",",
    )
    yield from (
        f"RUN $(( {n} {sign} 3 ))" for sign in signs for n in ((7, 3, 0, -7) if sign in (*signs[:5],) else (7,))
    )
    yield from (f"X=7; (( X {sign}= 2 )); RUN $X" for sign in ("", *signs[:11]))
    yield from (
        f"X=7; RUN $(( {text} ))"
        for text in ("-X", "+X", "!X", "~X", "X++", "--X", "X?1:2", "X/0", "08", "0x1f", "2#101", "Y")
    )
    cut = "if [ 1 -eq 1 ] ; then for x in a b ; do case $x in a ) X=4 ;; esac ; done ; fi ; f () { X=5 ; } ; while true ; do f ; done"
    yield from (" ".join(cut.split(" ")[:n]) for n in range(cut.count(" ") + 2))
    yield from (f"X=$'a{escape}b'; RUN \"$X\"" for escape in (r"\n", r"\t", r"\r", r"\\", r"\'", r"\"", r"\q"))


BRIDGES = Path(__file__).parent / "lint" / "bridge_nemotron_3_nano.yaml"
# Keys of architectures that the configs of public models have not, or with values that say something else.
OTHERS = {
    "attention_bias": [True], "use_qk_norm": [True, False], "sliding_window": [4096], "use_sliding_window": [True], "mlp_bias": [True],
    "layer_types": [["full_attention", "sliding_attention"]], "hidden_act": ["gelu", "relu2"], "rope_parameters": [
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "rope_theta": 7.0, "partial_rotary_factor": 0.5}],
    "rope_scaling": [{"type": "yarn", "factor": 8}, {"rope_type": "linear", "factor": 8}], "mlp_only_layers": [[1, 3]],
    "decoder_sparse_step": [2], "time_step_limit": [[0.0, float("inf")], [0.0, 1.0]], "residual_in_fp32": [True],
    "moe_layer_freq": [2], "topk_method": ["group_limited_greedy"], "scoring_func": ["softmax", "sigmoid"], "n_group": [4],
    "topk_group": [2], "moe_latent_size": [64], "router_jitter_noise": [0.1], "partial_rotary_factor": [0.25],
}  # fmt: skip


def without_absent(fields: dict) -> dict:
    return {key: value for key, value in fields.items() if value != "absent"}


def others(value) -> list:
    """Not there, nothing, and another value of its type."""
    match value:
        case bool():
            other = not value
        case int() | float():
            other = value + 1
        case str():
            other = f"{value}x"
        case _:
            other = 7
    return ["absent", None, other]


def pairs(words: Iterable[str], left: Iterable[str]) -> list[str]:
    """A flag with its values a line, and what no flag says."""
    return [*" ".join(words).replace(" --", "\n--").splitlines(), *(f"left: {line}" for line in left)]


def differing(title: str, plain: str, make) -> Iterator[str]:
    """The lines that are others now."""
    was = plain.splitlines()
    try:
        now = pairs(*make())
    except (Refused, TypeError, ValueError) as why:  # for read() all of them are no config
        now = [*was, f"refused: {why}"]
    told = [f"    {line}" for line in now if line not in was] + [f"    no {line}" for line in was if line not in now]
    if told:
        yield from (title, *told)


STRANGE = (  # flags of other parsers, and Megatron's as another parser spells them
    "--hidden_size 4 --seq_length 8", "--hidden_size 4 --seq_length 8 --micro_batch_size=1", "--hidden_size 4 --seq_length 8 --bf16 true",
    "--hidden_size 4 --seq_length 8 --micro_batch_size 1 --bf16 true --swiglu false --my_own 3", "--a_b 1 --c_d 2 --e_f 3 --hidden_size 4",
    "--a-b 1 --c-d 2", "--a-b 1 --c-d 2 --e-f 3 --hidden-size 4",
    "--hidden-sise 4 --seq-lenght 8 --micro-batch-sice 1", "--bf16=1 --lr x stray",
    "--hidden-size 4 --hidden-size 5 --lr 1e-4 --lr 1e-4", "--hidden 4 --num-l 3",
    "--micro-batch-size one --recompute-modules mlp moe --lr",
)  # fmt: skip


OTHERWISE = (  # what a recipe says in one way, said in another
    (MOE, {"--recompute-activations": True, "--position-embedding-type": None, "--use-rotary-position-embeddings": True,
           "--train-iters": None, "--train-samples": "640", "--lr-decay-samples": "640", "--lr-warmup-samples": "128",
           "--grad-reduce-in-bf16": True, "--group-query-attention": True, "--num-query-groups": "16", "--eval-iters": "0"}),
    (MOE, {"--rampup-batch-size": "16 16 1000", "--moe-router-load-balancing-type": "aux_loss", "--lr-decay-iters": "10"}),
    (MOE, {"--moe-router-load-balancing-type": "none", "--moe-aux-loss-coeff": None, "--mtp-num-layers": "0"}),
    (HYBRID, {"--enable-cuda-graph": True, "--lr-warmup-fraction": "0.2", "--lr-decay-iters": "10", "--init-method-std": "0.01",
              "--embedding-init-method-std": "0.01", "--kv-channels": "64", "--max-position-embeddings": "4096", "--is-hybrid-model": True,
              "--padded-vocab-size": "32000", "--spec": "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"}),
)  # fmt: skip


def of_reports() -> Iterator[str]:
    for path in FIXTURES:
        found = lint(path.read_text(), path.name, None if "yaml" not in path.suffix else 8)
        yield f"== {path.name}"
        yield report.text(found)
        data = describe.data(found.args, found.model)
        yield from (f"{key}: {json.dumps(value)}" for key, value in data.items() if key != "text")
        if path.stem.startswith(CARRIED):
            yield from whole_recipe(found)
    for base, change in OTHERWISE:
        yield f"== {' '.join(change)}"
        yield from whole_recipe(launch(base, change))
    for name in ("nam56r_smoke", "nam56r_fused"):
        yield report.text(lint(argv.plan_json(lowered(name)), name))
    for flag in (*REMOVED, *parser.GONE, *parser.OLD):
        found = launch(GPT, {flag if flag.startswith("--") else current().by_dest[flag].name: "3"})
        yield from (f"{f.severity} {f.id} {f.flag}: {f.message} ({f.detail}). {f.fix}" for f in found.findings)
    for script, flags in product(("train.py", "pretrain_gpt.py"), STRANGE):
        found = lint(f"python {script} --num-layers 2 {flags}", "x")
        yield f"{script} {flags}: {' '.join(found.args.given)}"
        yield from (f"    {f.severity} {f.id} {f.flag} {f.detail}" for f in found.findings)
    yield from of_commands()
    for gpus in (None, 1, 2, 3, 4, 8, 12, 16, 24):  # and of a batch that Megatron derives
        start = f"torchrun --nproc-per-node {gpus} " if gpus else ""
        line = " ".join(
            words(MOE | {"--global-batch-size": None, "--expert-model-parallel-size": "2", "--fp8-format": "e4m3"})
        )
        told = carried(lint(f"{start}pretrain_gpt.py {line}"))
        yield f"{gpus} GPUs"
        yield from (f"    {k} {v}" for k, v in told.items() if re.search("cluster|batch|lost", k))
    for rule, (base, change, *env) in CASES.items():
        found = launch(base, change, *env)
        yield f"== {rule}"
        yield from (f"{f.flag}: {f.message} ({f.detail}). {f.fix}" for f in found.findings if f.id == rule)


# A recipe takes a tenth of a second: of launches that have keys which the others have not.
CARRIED = (
    "clean_",
    "bridge",
    "graphs",
    "kernels",
    "pipeline",
    "tensor",
    "training",
    "fsdp_muon",
    "fp8_mamba",
    "hybrid_symbols",
    "mla_ref",
)


def of_commands() -> Iterator[str]:
    """Options that are refused, and the help."""
    for words_ in (
        "x", "x=1", "gpus=", "gpus=0", "gpus=1", "gpus=999999", "gpus=1000000", "gpus=²", "gpus=x", "format=xml", "format=json",
        "ignore=none", "ignore=batch,none", "ignore=batch,companion", "gpus=4 --gpus=8", "--recipe=a.yaml format=text",
    ):  # fmt: skip
        try:
            yield f"{words_}: {command._options(words_.split())}"
        except Refused as refused:
            yield f"{words_}: {refused.render()}"
    for out in (
        "/none/at/all.yaml",
        "a-b.yaml",
        "a.txt",
        ".yaml",
        str(Path(__file__).parent / "golden.yaml" / "x.yaml"),
    ):
        with pytest.raises(Refused) as refused:
            recipe.write(launch(GPT, {}), out)
        yield refused.value.render().replace(str(Path(__file__).parent), "")
    for file in ("/none/at/all", "/none\0"):
        with pytest.raises(Refused) as refused:
            command._text(file)
        yield refused.value.render().replace("\0", "NUL")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        patch.setenv("COLUMNS", "120")
        command.main(["--help"])
    yield shown.getvalue()


def neighbours() -> Iterator[str]:
    """Every trap's launch with one more flag changed of those that its rule reads: is it still the trap?"""
    yield from stages()
    for name, (base, change, *env) in CASES.items():
        rule, others = rules.BY_ID[name], rules.BY_ID.keys() - {name}

        def detail(more: dict, all_: dict = base | change, env=env, others=others) -> str:
            text = "\n".join(f"export {k}={v}" for k, v in dict(*env).items())
            line = " ".join(map(shlex.quote, words(all_ | more)))
            found = lint(f"{text}\ntorchrun --nproc-per-node 8 train.py {line}", "case", ignore=others).findings
            return "; ".join(f"{f.flag} {f.detail}".strip() for f in found)

        plain = detail({})
        yield f"{name}: {plain}"
        for more in changes(base | change, read_by(rule.when) | {*rule.about.split("|")}):
            if (now := detail(more)) != plain:
                (flag, value) = *more.keys(), *more.values()
                yield f"    {'without ' if value is None else ''}{flag} {value if isinstance(value, str) else ''}: {now or 'no trap'}"


def stages() -> Iterator[str]:
    """How layers are cut, of every way to say it."""
    ways = {
        "--pipeline-model-parallel-size": ("1", "2", "4", "9"), "--decoder-first-pipeline-num-layers": (None, "1", "5"),
        "--decoder-last-pipeline-num-layers": (None, "3"), "--account-for-embedding-in-pipeline-split": (None, True),
        "--num-layers-per-virtual-pipeline-stage": (None, "2"),
    }  # fmt: skip
    layouts = ({"--pipeline-model-parallel-size": "2", "--pipeline-model-parallel-layout": text} for text in (
        "Et*4|t*4L", "E(t|)*7tL", "(Et|t)*4L", "Et*3|t*4L", "Ex*8|L", "E,t*8|L", "Et*99999|L", "t*8"))  # fmt: skip
    for more in (*(dict(zip(ways, values, strict=True)) for values in product(*ways.values())), *layouts):
        for title, base in {"GPT": GPT, "hybrid": HYBRID}.items():
            found = launch(base, more)
            cut = known(lambda m=found.model: (m.stage_sizes, m.cuts), "not known")
            split = "; ".join(f"{f.id} {f.detail}" for f in found.findings if f.severity == FAIL)
            yield f"{title} {' '.join(str(v) for v in more.values() if v)}: {cut} {split}"


def read_by(function, depth: int = 2) -> set[str]:
    """Names that a function reads, those that it calls included, and the model's properties."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    found, codes = {c for c in closed if isinstance(c, str)}, [function.__code__]
    codes += [c.__code__ for c in closed if isinstance(c, FunctionType)]
    while codes:
        code = codes.pop()
        found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    for name in sorted(found) * (depth > 0):
        inner = function.__globals__.get(name) or getattr(Model, name, None)
        inner = getattr(inner, "func", None) or getattr(inner, "fget", None) or inner
        if isinstance(inner, FunctionType):
            found |= read_by(inner, depth - 1)
        elif isinstance(inner, (tuple, set, dict)):
            found |= {word for word in inner if isinstance(word, str)}
    return found


def whole_recipe(found) -> Iterator[str]:
    try:
        made = recipe.make(found, Path("mine.yaml"))
    except Refused as why:
        yield f"no recipe: {why}"
        return
    yield made.yaml
    yield made.text()
    if made.refused is None:
        theirs = lint(argv.shell(translate(made.recipe))).model
        assert [k for _, k in theirs.layers] == [k for _, k in found.model.layers], found.name
        assert theirs.mtp_depths == found.model.mtp_depths, found.name


GOLDENS = {  # the quick and keen ones first
    "lint_read.txt": of_texts_read,
    "lint_neighbours.txt": neighbours,
    "lint_texts.txt": of_reports,
    "lint.txt": of_flags,
}


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_said_is_as_reviewed(name, rewrite_golden):
    now = [line.rstrip() for text in GOLDENS[name]() for line in text.splitlines()]
    if rewrite_golden:
        (GOLDEN / name).write_text("".join(f"{line}\n" for line in now))
    reviewed = (GOLDEN / name).read_text().splitlines()
    differ = ((said, wanted) for said, wanted in zip_longest(now, reviewed) if said != wanted)
    assert next(differ, None) is None  # lists of thousands of lines would take pytest minutes to compare
