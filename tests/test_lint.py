"""Lint: launches that people write, each with the traps it steps in; every rule against Megatron's own parser and configs."""

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lint_cases import CASES, CONFLICTING, CONFLICTS_LATER, DSA, FSDP, GPT, HYBRID, LATER, MLA, MOE, NEEDS_CUDA, words
from presets import NAMES, lowered
from rich.console import Console

from benchmarks import launches
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import parameters
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.judge import same
from nam_megatron.lint import __main__ as command
from nam_megatron.lint import describe, follow, lint, recipe, report, rules
from nam_megatron.lint.read import Launch, read
from nam_megatron.lint.rules import cards, conflicts
from nam_megatron.lint.rules.rule import FAIL
from nam_megatron.lint.shell import ShellError
from nam_megatron.lint.values import REMOVED, Args, NotKnown
from nam_megatron.recipe import Recipe, to_tree
from nam_megatron.recipe.resolve import unread
from nam_megatron.report import header
from nam_megatron.runtime.oracle import Answer
from nam_megatron.targets import current
from nam_megatron.translate import write
from nam_megatron.words.setting import section

ROOT = Path(__file__).parent.parent
FIXTURES = sorted((Path(__file__).parent / "lint").iterdir())


def ids(found) -> Counter:
    return Counter(f.id for f in found.findings)


def ask(oracle, found):
    """What Megatron makes of a launch; variables that nobody set are paths, and a tokenizer's size is its own."""
    words = [follow.HOLE.sub("somewhere", word) for word in found.launch.words]
    words += [] if "--vocab-size" in " ".join(words) else ["--vocab-size", "1000"]
    silent = {"CUDA_DEVICE_MAX_CONNECTIONS": None, "PYTORCH_CUDA_ALLOC_CONF": None, "NCCL_GRAPH_REGISTER": None}
    env = silent | dict(found.launch.env)
    return answered(oracle, tuple(words), found.args.launch.gpus or 8, tuple(sorted(env.items())))


@cache
def answered(oracle, words: tuple[str, ...], gpus: int, env: tuple) -> Answer:
    """Each launch once: many traps are told from the same clean one."""
    return oracle.ask(list(words), gpus, (9, 0), dict(env))


# Launches --------------------------------------------------------------------------------------------------------------


def declared(path: Path, what: str) -> list[str]:
    return re.search(rf"^# {what}:(.*)$", path.read_text(), re.MULTILINE)[1].split()


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.name)
def test_launch_steps_in_exactly_these_traps(path):
    assert ids(lint(path.read_text(), path.name)) == Counter(declared(path, "finds"))


@pytest.mark.few(14)
@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.name)
def test_megatron_refuses_what_will_fail_and_nothing_else(path, oracle):
    (verdict,) = declared(path, "megatron")
    found = lint(path.read_text(), path.name)
    if verdict != "unknown":
        answer = ask(oracle, found)
        assert (answer.error is None) == (verdict == "accepts"), answer.error
        assert (verdict == "refuses") >= any(f.severity == FAIL for f in found.findings if f.id not in LATER)


DERIVED = {
    "num_layers": lambda m: m.num_layers, "num_query_groups": lambda m: m.groups, "kv_channels": lambda m: m.head_dim,
    "ffn_hidden_size": lambda m: m.ffn, "apply_rope_fusion": lambda m: m.rope_fusion,
    "mtp_num_layers": lambda m: m.mtp_depths or m.a.mtp_num_layers,
    "sequence_parallel": lambda m: m.sequence_parallel, "gated_linear_unit": lambda m: m.gated, "multi_latent_attention": lambda m: m.mla,
    "experimental_attention_variant": lambda m: m.variant, "expert_tensor_parallel_size": lambda m: m.etp,
    "moe_ffn_hidden_size": lambda m: m.moe_ffn if m.a.num_experts else None, "rope_type": lambda m: m.rope_type if m.mla else None,
}  # fmt: skip


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.name)
def test_derived_values_are_those_of_megatrons_config(path, oracle):
    found = lint(path.read_text(), path.name)
    if declared(path, "megatron") == ["accepts"]:
        values = ask(oracle, found).values
        ours = {name: derive(found.model) for name, derive in DERIVED.items()}
        assert ours == {name: values.get(f"transformer.{name}") for name in DERIVED}
        assert found.model.positions == values["args.position_embedding_type"]


SWIFT = """NPROC_PER_NODE=4 megatron sft --model org/Model-35B --dataset 'org/data#500' --tuner_type lora \\
    --loss_scale ignore_empty_think --expert_model_parallel_size 4 --micro_batch_size 4 --global_batch_size 16 --lr 1e-4 \\
    --sequence_parallel true --output_dir out
"""
NEMO_RL = """policy:
  model_name: org/model-1.5B
  max_total_sequence_length: 512
  precision: bfloat16
  megatron_cfg: {enabled: true, cuda_graph_modules: [], recompute_granularity: full, tensor_model_parallel_size: 1}
"""


@pytest.mark.parametrize(
    ("text", "said"), [(SWIFT, "--expert_model_parallel_size 4"), (NEMO_RL, "recompute_granularity=full")]
)
def test_what_another_program_decides_is_not_megatrons_default(text, said):
    """It was described as GELU in fp32 with dropout 0.1, and its own values as failures."""
    found = lint(text, "theirs")
    assert not found.findings
    rows = dict(describe.rows(found.args, found.model))
    assert said in rows.pop("said")
    rows.pop("also", None)
    assert {text for name, text in rows.items() if name not in ("batch", "sequence", "layout")} == {"?"}
    assert "defaults" not in report.text(found).splitlines()[-1]


@pytest.mark.parametrize(
    "text", ["torchrun t.py {} $EXTRA", "A='{}'", "torchrun t.py {} --use-checkpoint-args --load x"]
)
def test_a_default_is_not_known_where_a_part_of_the_words_is_not(text):
    """It said `(default)` of what a variable that is not in the text may well say."""
    told = report.text(lint(text.format(DESCRIBED), "x.sh"))
    assert "norms        ?, epsilon ?" in told and "note `?` is not said here" in told and "activation   ?\n" in told
    whole = report.text(lint(f"torchrun t.py {DESCRIBED} --load $X"))
    assert told.endswith("not in this text\n") and "norms        LayerNorm (default), epsilon 1e-05" in whole


def test_flags_of_which_nothing_hangs_are_a_note():
    found = lint(f"python t.py {DESCRIBED} --tokenizer-type Llama2Tokenizer --vocab-size 64000 --use-pytorch-profiler")
    note = r"note of no effect here: --vocab-size 64000 wants .*--use-pytorch-profiler\s+wants\s+--profile\n"
    assert re.search(note, report.text(found), re.DOTALL)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("pretrain_gpt.py", "GELU (Megatron's default), not gated, linear bias"),
        *((f"{n}.py", "?") for n in ("pretrain_llama", "t")),
    ],
)
def test_a_fork_of_megatrons_script_keeps_its_defaults(script, said):
    """Another program need not: slime's trains in bf16, and a Llama's own script makes RMSNorm and SwiGLU in its code."""
    own = "--rollout-size 8 --actor-num-nodes 2 --sglang-mem 0.7 --its-a 1 --its-b 1 --max-position-embeddings 64 --its-c 1"
    rows = dict(describe.rows((found := lint(f"torchrun {script} {DESCRIBED} {own}", "fork")).args, found.model))
    guess = rows["parameters"].startswith("?; by Megatron's defaults ")
    assert rows["activation"] == said and guess is (said == "?") is (describe.data(found)["parameters"] is None)


def test_many_launches_of_every_family():
    words = " ".join(p.read_text() for p in FIXTURES)
    assert len(FIXTURES) >= 20
    for family in (
        "hybrid-layer-pattern",
        "multi-latent",
        "dsa-indexer",
        "group-query",
        "num-experts",
        "fp8",
        "fsdp",
        "pipeline",
    ):
        assert family in words


# Rules -----------------------------------------------------------------------------------------------------------------


def launch(base: dict, change: dict, env: dict | None = None):
    text = "\n".join(f"export {k}={v}" for k, v in (env or {}).items())
    line = " ".join(f"'{w}'" if set(w) & set("*|") else w for w in words(base | change))
    return lint(f"{text}\ntorchrun --nproc-per-node 8 train.py {line}", "case")


@pytest.mark.few(60)
@pytest.mark.parametrize("rule", CASES)
def test_rule_finds_its_trap_and_megatron_agrees(rule, oracle):
    base, change, *env = CASES[rule]
    clean, found = (
        launch(base, {}, *env if rule != "connections-leftover" and "fsdp" not in rule else []),
        launch(base, change, *env),
    )
    assert ids(found)[rule] and not ids(clean)[rule]
    if rule in NEEDS_CUDA:
        return
    refused = ask(oracle, found).error
    assert (refused is not None) == (rules.BY_ID[rule].severity == FAIL and rule not in LATER), refused
    assert ask(oracle, clean).error is None or rule in ("connections-not-one", "connections-fsdp"), ask(
        oracle, clean
    ).error


@pytest.mark.few(10)
@pytest.mark.parametrize("pair", CONFLICTING, ids="-".join)
def test_two_flags_that_are_refused_together_are_taken_alone(pair, oracle):
    base, change = CONFLICTING[pair]
    clean, found = launch(base, {}), launch(base, change)
    name, what = pair
    assert f"beside {what}" in [
        f.detail for f in found.findings if f.id == "conflict" and f.flag == found.args.written(name)
    ]
    assert "conflict" not in ids(clean)
    refused = ask(oracle, clean).error or ""
    assert not refused or "from TransformerEngine, but not found" in refused  # none is installed beside the oracle
    assert ask(oracle, found).error not in (None, refused) or pair in CONFLICTS_LATER


def test_fsdp_reads_the_dtype_of_gradients_elsewhere():
    said = {"--bf16": True, "--accumulate-allreduce-grads-in-fp32": True}
    for dtype, idle in ("auto", True), ("bf16", True), ("fp32", False):
        found = launch(FSDP | said, {"--megatron-fsdp-main-grads-dtype": dtype})
        assert bool(ids(found)["idle-flag"]) is idle


def test_fsdp_switches_the_reuse_of_gradients_buffer_off_and_refuses_nothing(oracle):
    found = launch(FSDP, {"--reuse-grad-buf-for-mxfp8-param-ag": True})
    assert "companion" not in ids(found) and ask(oracle, found).error is None


def test_every_conflict_has_a_case():
    assert {(name, what) for name, beside in conflicts.CONFLICTS.items() for what in beside} == CONFLICTING.keys()


@pytest.mark.parametrize("base", [GPT, HYBRID, MOE, MLA, DSA, FSDP], ids=["gpt", "hybrid", "moe", "mla", "dsa", "fsdp"])
def test_clean_launch_reports_nothing(base):
    assert ids(launch(base, {})) == Counter()


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"--cp-comm-type": "ring"}, "context-attention"),
        ({"--window-size": "128,0"}, "context-attention"),
        ({"--window-size": "128,0", "--cp-comm-type": "all_gather"}, None),
        ({"--softmax-type": "learnable", "--cp-comm-type": "all_gather"}, "context-attention"),
        ({"--softmax-type": "learnable", "--cp-comm-type": "a2a"}, None),
        ({"--cp-comm-type": "ring", "--hybrid-layer-pattern": "M-M-M-"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_share_a_sequence_is_found(given, rule):
    given |= {"--context-parallel-size": "2"}
    assert ids(launch(HYBRID, given, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})) == Counter([rule] if rule else [])


@pytest.mark.parametrize(("base", "more", "flag", "last", "beyond", "rule"), [
    (GPT, {"--context-parallel-size": "2"}, "--seq-length", "1020", "1022", "indivisible"),
    (GPT, {}, "--cpu-offloading-num-layers", "7", "8", "cpu-offloading"),
    (GPT, {"--lr-decay-iters": "10"}, "--lr-warmup-iters", "9", "10", "schedule"),
    (GPT, {"--lr-decay-style": "WSD", "--lr-warmup-iters": "4"}, "--lr-wsd-decay-iters", "6", "7", "wsd-too-long"),
    (GPT, {}, "--hidden-dropout", "1.0", "1.01", "dropout-range"),
    (CASES["fsdp-lone-experts"][0], {"--context-parallel-size": "2"}, "--expert-model-parallel-size", "4", "8", "fsdp-lone-experts"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_rule_begins_where_megatron_does(base, more, flag, last, beyond, rule, oracle):
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if base is GPT else {}
    fits, found = (launch(base, more | {flag: value}, env) for value in (last, beyond))
    assert not ids(fits)[rule] and ids(found)[rule]
    if rules.BY_ID[rule].severity == FAIL and rule not in LATER:
        assert ask(oracle, fits).error is None and ask(oracle, found).error


def test_tensor_and_context_ranks_both_share_a_sequence():
    """1020 is a multiple of either number of ranks, and not of their product."""
    shared = {"--tensor-model-parallel-size": "4", "--context-parallel-size": "2", "--sequence-parallel": True}
    for length, told in (("1016", 0), ("1020", 1)):
        said = launch(GPT, shared | {"--seq-length": length}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        assert ids(said)["indivisible"] == told


@pytest.mark.parametrize("more", [{"--ckpt-format": "torch"}, {"--no-save-optim": True}], ids=str)
def test_a_checkpoint_without_such_a_state_is_not_shifted(more):
    base, change = CASES["checkpoint-shifted"]
    assert not ids(launch(base | change, more))["checkpoint-shifted"]


@pytest.mark.parametrize(
    ("first", "last", "pipeline", "fits"),
    [
        ("1", None, "4", True),
        ("2", None, "4", False),
        ("5", "5", "2", True),
        ("5", "4", "2", False),
        (None, "6", "2", True),
    ],
)
def test_uneven_pipeline_stages(first, last, pipeline, fits, oracle):
    flags = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    found = launch(HYBRID, flags | {"--pipeline-model-parallel-size": pipeline, "--hybrid-layer-pattern": "M-M*-M-M-M"})
    assert (ids(found)["pipeline-split"] == 0) is fits
    assert (ask(oracle, found).error is None) is fits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--moe-layer-freq": "([0]*3+[1]*6)"}, "9 entries for 8 layers"),
        ({"--moe-layer-freq": "([0]*3+[2]*5)"}, "an entry is neither 0 nor 1"),
        ({"--moe-layer-freq": "0"}, "every 0 layers is no frequency"),
        (
            {"--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": "[1,0]"},
            "2 entries for 8",
        ),
        ({"--experimental-attention-variant": "gated_delta_net"}, ""),
    ],
    ids=str,
)
def test_broken_layer_frequency_silences_nothing_else(change, says):
    found = launch(MOE | CASES["default-dropout"][0], change | {"--hidden-dropout": None})
    assert {"layer-frequency", "default-dropout"} <= set(ids(found)) and found.exit_code == 1
    (finding,) = [f for f in found.findings if f.id == "layer-frequency"]
    assert says in finding.detail
    assert dict(describe.rows(found.args, found.model))["layers"] != "?"


RECOMPUTE = {"--recompute-granularity": "selective", "--recompute-modules": None}


@pytest.mark.parametrize(
    ("base", "change", "env", "rule"),
    [
        (GPT, RECOMPUTE | {"--recompute-modules": "attn mlp"}, {}, "recompute"),
        (GPT, RECOMPUTE | {"--recompute-modules": "gdn_norm_out"}, {}, "recompute"),
        (MOE, {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1",
               "--moe-layer-recompute": True}, {}, "recompute"),
        (GPT, {"--deterministic-mode": True}, {"NCCL_ALGO": "Tree"}, "deterministic"),
        (GPT, {"--deterministic-mode": True}, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "deterministic"),
    ],
)  # fmt: skip
def test_what_else_megatron_refuses(base, change, env, rule, oracle):
    found = launch(base, change, env)
    assert rule in ids(found) and rules.BY_ID[rule].severity == FAIL
    assert ask(oracle, found).error is not None


def test_deterministic_environment_is_taken(oracle):
    found = launch(GPT, {"--deterministic-mode": True}, {"NCCL_ALGO": "Ring,^NVLS", "CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not ids(found) and ask(oracle, found).error is None


@pytest.mark.parametrize(
    ("words_", "finds"), [("", 1), ("# GB200 nodes\n", 0), ("#SBATCH --gres=gpu:b200:8\n", 0), ("# debug20000\n", 1)]
)
def test_connections_are_no_matter_on_blackwell(words_, finds):
    line = " ".join(words(GPT | {"--tensor-model-parallel-size": "2"}))
    found = lint(f"{words_}export CUDA_DEVICE_MAX_CONNECTIONS=32\ntorchrun --nproc-per-node 8 t.py {line}")
    assert ids(found)["connections-not-one"] == finds


def test_modelopts_switch_for_gpt_oss_is_part_of_the_model():
    change = {"--enable-gpt-oss": True, "--position-embedding-type": None, "--rotary-base": "150000"}
    found = launch(GPT, change)
    assert set(ids(found)) == {"default-positions"}  # the table of learned positions is built beside the yarn
    positions = dict(describe.rows(found.args, found.model))["positions"]
    assert "yarn of gpt-oss" in positions and "150000" in positions and "learned table" in positions
    assert any("--enable-gpt-oss" in line for line in recipe.make(found, Path("mine.yaml")).lost)


def test_every_rule_is_tested():
    planted = {name for path in FIXTURES for name in declared(path, "finds")}
    of_plans = {"not-the-plan", "not-built", "world-size-unset", "given-twice-runs", "misspelt-field"}  # of other texts
    assert planted | CASES.keys() | of_plans == set(rules.BY_ID)


def test_traps_change_megatrons_config(oracle):
    """Where Megatron says nothing, its config says what the finding says."""
    groups = ask(oracle, launch(*CASES["gqa-ignored"])).values
    assert groups["transformer.num_query_groups"] == 16
    assert ask(oracle, launch(*CASES["gqa-one-group"])).values["transformer.num_query_groups"] == 1
    assert ask(oracle, launch(*CASES["default-rope-type"])).values["transformer.rope_type"] == "yarn"
    assert ask(oracle, launch(*CASES["default-kv-lora-rank"])).values["transformer.kv_lora_rank"] == 32
    assert ask(oracle, launch(*CASES["default-dropout"])).values["transformer.hidden_dropout"] == 0.1
    assert ask(oracle, launch(*CASES["default-positions"])).values["args.position_embedding_type"] == "learned_absolute"
    assert ask(oracle, launch(*CASES["sequence-parallel-off"])).values["transformer.sequence_parallel"] is False
    assert ask(oracle, launch(*CASES["graphs-ignored"])).values["transformer.cuda_graph_impl"] == "none"


# Words -----------------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Megatron's parser as argparse builds it, from the dump; words stay words."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    for flag in current().flags.values():
        if flag.action == "store":
            made.add_argument(flag.name, *flag.aliases, dest=flag.dest, nargs=flag.nargs, default=argparse.SUPPRESS)
        elif flag.action == "boolean":
            made.add_argument(
                flag.name, dest=flag.dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
            )
        else:
            made.add_argument(flag.name, *flag.aliases, dest=flag.dest, action=flag.action, default=argparse.SUPPRESS)
    return made


ARGPARSE = parser()
VALUES = ("1", "-1", "-0.5", "1e-5", "-1e-5", "rope", "-", "--", "-x", "M-M*", "a b", "-a b", "--bf16 x", "=", "")


@settings(max_examples=400, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 12))
def test_words_are_read_as_argparse_reads_them(rng: random.Random, count):
    names = [
        *(n for n in current().flags if n not in REMOVED),
        *(a for f in current().flags.values() for a in f.aliases),
        "--no-such-flag",
    ]
    line = []
    for _ in range(count):
        name = rng.choice(names)
        values = [rng.choice(VALUES) for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3)))]
        line += [f"{name}={values[0]}", *values[1:]] if values and rng.random() < 0.3 else [name, *values]
    line = [w for w in line if w != "--"]
    try:
        theirs, extra = ARGPARSE.parse_known_args(line)
    except (argparse.ArgumentError, SystemExit):
        theirs = extra = None
    ours = Args(Launch(current(), tuple(line), "words", ""))
    stumbles = {t.rule for t in ours.trouble} - {"bad-value"} | {
        t.rule for t in ours.trouble if t.detail == "takes no value"
    }
    if theirs is None:
        assert stumbles & {"missing-value", "bad-value"}
    else:
        assert bool(stumbles or ours.foreign) == bool(extra)  # several unknown ones are another program's
        assert set(vars(theirs)) == set(ours.given)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [("--moe-layer-freq", "([0]*3+[1]*5)", [0] * 3 + [1] * 5), ("--moe-layer-freq", "2", 2), ("--window-size", "(127,0)", (127, 0)),
     ("--lr", "1e-5", 1e-5), ("--hidden-size", "4096", 4096), ("--attention-backend", "auto", "auto")],
)  # fmt: skip
def test_values_have_megatrons_types(flag, text, value):
    args = Args(read(f"{flag} {text}", current()))
    assert getattr(args, current().by_name(flag).dest) == value and not args.trouble


@pytest.mark.parametrize(
    "text",
    [
        "--moe-layer-freq [0]*999999*999999",
        "--moe-layer-freq [[1]]",
        "--hidden-size 1.5",
        "--lr x",
        "--window-size a,b",
    ],
)
def test_values_of_another_type_are_found_and_then_not_known(text):
    args = Args(read(text, current()))
    assert [t.rule for t in args.trouble] == ["bad-value"]
    with pytest.raises(NotKnown):
        getattr(args, current().by_name(text.split()[0]).dest)


# Shell -----------------------------------------------------------------------------------------------------------------

SHELL = {
    "X=4; torchrun t.py --hidden-size ${X}": "4",
    "X=4\ntorchrun t.py --hidden-size=$X": "4",
    "torchrun t.py --hidden-size ${X:-4}": "4",
    "export X=4; torchrun t.py --hidden-size $((X * 2))": "8",
    "A=(--hidden-size 4 # width\n)\ntorchrun t.py ${A[@]}": "4",
    "A=(--lr 1)\nA+=(--hidden-size\n4)\ntorchrun t.py \"${A[@]}\"": "4",
    "A=(--lr 1); A=(\"${A[@]}\" --hidden-size 4); torchrun t.py ${A[*]}": "4",
    "A='--lr 1'; A+=' --hidden-size 4'; torchrun t.py $A": "4",
    "A=\"--lr 1 \\\n  --hidden-size 4\"; torchrun t.py $A": "4",
    "torchrun t.py \\\n  --hidden-size \\\n 4": "4",
    "if [ 1 -eq 1 ]; then X=4; else X=5; fi; torchrun t.py --hidden-size $X": "4",
    "S=big; if [[ $S == small ]]; then X=5; elif [[ \"$S\" == b* ]]; then X=4; fi; torchrun t.py --hidden-size $X": "4",
    "if [ -z \"$X\" ]; then X=4; fi; torchrun t.py --hidden-size $X": "4",
    "S=a; case $S in b|c) X=5;; a) X=4;; *) X=6;; esac; torchrun t.py --hidden-size $X": "4",
    "[[ -n \"$DEBUG\" ]] && X=5 || X=4; torchrun t.py --hidden-size $X": "4",
    "cd /x && X=4 && torchrun t.py --hidden-size $X": "4",
    "f() { torchrun t.py --hidden-size 4 \"$@\"; }\nf": "4",
    "while [[ $# -gt 0 ]]; do X=$1; shift; done\nX=${X:-4}; torchrun t.py --hidden-size $X": "4",
    "C='python t.py --hidden-size 4'; eval $C": "4",
    "C='python t.py --hidden-size 4'; srun -l sh -c \"$C\"": "4",
    "sbatch <<EOF\n#!/bin/bash\nsrun python t.py --hidden-size 4\nEOF": "4",
    "X=4 torchrun t.py --hidden-size 4 > log 2>&1 &": "4",
    "bcprun -p 8 -c 'python /mount/t.py --hidden-size 4'": "4",
    "sbatch --wrap=\"torchrun t.py --hidden-size 4\"": "4",
    "C='import torch --hidden-size 5'; python -c \"$C\"; torchrun t.py --hidden-size 4": "4",
    "OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 t.py --hidden-size 4 | tee log": "4",
    "torchrun t.py --hidden-size '4'": "4",
    "X=\"a'b\"; torchrun t.py --hidden-size 4 --save \"$X\"": "4",
    "torchrun t.py --hidden-size 4 --moe-layer-freq \"([0]*1+[1]*3)\"": "4",
    "for x in 1 2; do torchrun t.py --hidden-size 4 --lr $x; done": "4",
    "L=; for i in 1 2 3; do L=\"$L $i\"; done; torchrun t.py --hidden-size 4 --data-path $L": "4",
    "for i in $(seq 1 4); do X=$i; done; torchrun t.py --hidden-size $X": "4",
    "for i in {1..4}; do X=$i; done; torchrun t.py --hidden-size $X": "4",
    "X=1; while [ $X -lt 4 ]; do X=$((X+1)); done; torchrun t.py --hidden-size $X": "4",
    "C='torchrun t.py --hidden-size 4'; echo run $C --hidden-size 5; eval $C": "4",
    "C='torchrun t.py --hidden-size 4'; if [ \"$DRY\" = 1 ]; then echo $C; else eval $C; fi": "4",
    "C='torchrun t.py --hidden-size 4'; [ \"$DRY\" = 1 ] && echo $C || eval $C": "4",
    "echo torchrun t.py --hidden-size 4 > job.sh": "4",
    "MODEL_ARGS=\" \\\n --hidden-size 4 \\\n\"\n": "4",
    "torchrun t.py --hidden-size $X": None,
    "torchrun t.py --hidden-size $(cat width)": None,
    "if grep -q a b; then X=4; else X=5; fi; torchrun t.py --hidden-size $X": None,
    "X=4; if test -f a; then X=5; fi; torchrun t.py --hidden-size $X": None,
}  # fmt: skip


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_are_followed_and_not_guessed(script):
    args = Args(read(script, current()))
    if SHELL[script] is None:
        assert [name for name, _ in args.open_values()] == ["hidden_size"]
    else:
        assert args.hidden_size == int(SHELL[script])


def test_branch_that_cannot_be_told_is_left_out_and_noted():
    launch = read(
        "A=(--hidden-size 4)\nif grep -q a b; then\n  A+=(--log-throughput)\nfi\ntorchrun t.py ${A[@]}", current()
    )
    assert launch.words == ("--hidden-size", "4")
    assert launch.notes == ("line 2: its condition cannot be told here, left out: --log-throughput",)


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (
            'if [ "$A" = 1 ]; then torchrun t.py --hidden-size 4; fi',
            "line 1: its condition cannot be told here; the launch",
        ),
        (
            "for x in 1 2; do torchrun t.py --lr $x; done",
            "the text has 2 launches: read is the one with the most flags",
        ),
        ("echo torchrun t.py --hidden-size 4 > job.sh", "nothing here starts this launch: the text only prints it"),
    ],
)
def test_launch_that_is_chosen_among_others_is_said_to_be(script, note):
    (said,) = read(script, current()).notes
    assert said.startswith(note) or note in said


def test_loop_of_unknown_length_leaves_what_it_appends_open():
    args = Args(read('for f in $(ls data); do D="$D 1 $f"; done\ntorchrun t.py --bf16 --data-path $D', current()))
    assert dict(args.open_values())["data_path"][-1] == "D of a loop"


@pytest.mark.parametrize(
    ("script", "gpus"),
    [("torchrun --nproc_per_node 8 --nnodes=2 t.py --bf16", 16), ("torchrun --nproc-per-node=4 t.py --bf16", 4),
     ("torchrun --nproc-per-node gpu t.py --bf16", None), ("WORLD_SIZE=8\ntorchrun t.py --bf16", None),
     ("torchrun --nproc-per-node 8 --nnodes $N t.py --bf16", None),
     ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python t.py --bf16", 32),
     ("#SBATCH -N 2\n#SBATCH --gres=gpu:4\nsrun python t.py --bf16", 8),
     ("srun -n 16 python t.py --bf16", 16), ("WORLD_SIZE=$((2*8))\npython t.py --bf16", 16), ("python t.py --bf16", None)],
)  # fmt: skip
def test_gpus_are_counted_where_the_text_says_so(script, gpus):
    assert read(script, current()).gpus == gpus


def test_control_characters_do_not_reach_the_terminal():
    found = lint("--hidden-size \x1b[31m --hiden 3 --num-layers \x07", "a\x1b[0mb")
    assert not set(report.text(found)) & {"\x1b", "\x07"}


NO_LAUNCH = [
    "", "  \n# nothing\n", "hello world", "a: 1", "[]", "{}", "- 1", "x = (", "echo 'a", "if true; then", "\x00", "<", "torchrun t.py",
    "(" * 5000, "{a: " * 5000, "[" * 5000, "$(" * 999, "a=" + "$a" * 50, "--no-such-flag 1",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_LAUNCH)
def test_text_without_a_launch_is_refused(text):
    with pytest.raises(Refused):
        lint(text)


def test_broken_json_is_refused_by_its_own_name():
    with pytest.raises(Refused) as refused:
        lint('{"a": [1, 2', "bad.json")
    assert "`bad.json` cannot be read" in str(refused.value) and "at line 1" in str(refused.value)
    assert "unicode string" not in str(refused.value)


def test_doubling_variables_end():
    script = "a=xxxxxxxx\n" + "a=$a$a\n" * 60 + "torchrun t.py --save $a --bf16"
    with pytest.raises(Refused, match="too long"):
        lint(script)


# YAML ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "hidden-size: 4096\nbf16: true\nfp16: false\nload: null", "--hidden-size: 4096\n--bf16: true", "hidden_size: 4096\nbf16: true",
    "MODEL_ARGS:\n  --hidden-size: 4096\n  --bf16: true\nTEST_TYPE: regular", "model:\n  hidden_size: 4096\ntraining:\n  bf16: yes",
    '{"--hidden-size": 4096, "--bf16": true}', '["--hidden-size", "4096", "--bf16"]', "- --hidden-size\n- 4096\n- --bf16",
    '{"argv": ["--hidden-size", "4096", "--bf16"], "world_size": 8}',
])  # fmt: skip
def test_yaml_forms(text):
    args = Args(read(text, current()))
    assert args.hidden_size == 4096 and args.bf16 and set(args.given) == {"hidden_size", "bf16"} and not args.trouble


def test_a_path_that_is_not_set_is_no_matter():
    for flag, said in (
        ("--save", "not set in the text, and no matter here: "),
        ("--recompute-modules", "not set in the text, and how it runs hangs on it: "),
        ("--te-precision-config-file", "the text does not decide what these hang on, and they are open: "),
    ):
        found = lint(f"ARGS:\n  --hidden-size: 4096\n  {flag}: $OUT/x\n")
        assert f"{said}{flag} ($OUT)" in describe.notes(found.args, found.model)


def test_yaml_by_argument_name_and_lists_and_environment():
    launch = read("ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1, A: null}\nadd_bias_linear: false\napply_rope_fusion: true\n"
                  "moe_layer_freq: [0, 1]\nspec: '[a.b c]'\nrecompute_modules: [mlp, moe]\nsave: $OUT/x", current())  # fmt: skip
    args = Args(launch)
    assert launch.env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "A": None}
    assert args.given.keys() == {"add_bias_linear", "moe_layer_freq", "spec", "recompute_modules", "save"}
    assert (args.add_bias_linear, args.moe_layer_freq, args.spec, args.recompute_modules) == (
        False,
        [0, 1],
        ["a.b", "c"],
        ["mlp", "moe"],
    )
    assert dict(args.open_values()) == {"save": ("OUT",)}


@pytest.mark.parametrize(
    "head",
    ["extends: base.yaml", "bases:\n- base.yaml", "defaults:\n- _self_\n- model: base.yaml", "bases: [base.yaml]"],
)
def test_yaml_that_starts_from_another_lacks_nothing(head):
    found = lint(f"{head}\nmodel:\n  hidden_size: 4096\n  swiglu: true\n")
    assert not found.findings and found.args.hidden_size == 4096
    (note,) = found.launch.notes
    assert "not read" in note and note.endswith("base.yaml") and "_self_" not in note


OPEN_ENDS = ("$(cat more)", "$MORE", "${MORE[@]}")


@pytest.mark.parametrize("more", OPEN_ENDS)
def test_flags_that_may_stand_in_an_open_word_are_not_absent(more):
    lacking = {
        "--hidden-dropout": None,
        "--adam-beta2": None,
        "--moe-aux-loss-coeff": None,
        "--num-query-groups": "4",
        "--lr": None,
    }
    base = MOE | CASES["default-dropout"][0] | lacking
    line = " ".join(words(base))
    assert {"default-dropout", "default-balancing", "gqa-ignored", "missing-flag"} <= set(
        ids(lint(f"torchrun t.py {line}"))
    )
    assert set(ids(lint(f"torchrun t.py {line} {more} --bf16=1"))) == {"bad-value"}


DESCRIBED = "--hidden-size 1024 --num-layers 8 --num-attention-heads 16 --ffn-hidden-size 4096"
UNDERSCORED, TIK = re.sub(r"(?<=\w)-", "_", DESCRIBED), "--tokenizer-type TikTokenizer"
WITHOUT_FFN = DESCRIBED.replace(" --ffn-hidden-size 4096", "")
PIECES = "{num_layers: 8, hidden_size: 1024, num_attention_heads: 16, train_iters: 2}"
OPTIM = "actor_rollout_ref.actor.optim.override_optimizer_config"
# A text, a finding that it has, and one that it has not.
BESIDE = (
    ("A=({})\ntorchrun t.py ${{A[@]}} ${{PROFILING[@]}} --num-query-groups 4", "gqa-ignored", ""),  # nobody fills the second
    ("torchrun t.py {} $MORE --num-experts 8 --moe-router-enable-expert-bias --moe-router-score-function softmax", "moe-expert-bias", ""),
    ("torchrun t.py {} --hidden-size 1030 --tensor-model-parallel-size $TP", "indivisible", ""),
    ("torchrun t.py {} --num-experts 8 --expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm --recompute-modules moe "
     "--recompute-granularity $HOW --moe-token-dispatcher-type alltoall", "conflict", ""),
    ("torchrun t.py {} --tokenizer-type BailingTokenizer", "", "bad-value"),
    ("torchrun t.py {} --tokenizer-type Llama3Tokenizer", "", "bad-value"),
    ("torchrun t.py {} --tokenizer-type GPT2BPE", "bad-value", ""),
    ("torchrun t.py {} --tokenizer-type HuggingfaceTokenizer", "bad-value", ""),
    ("torchrun t.py {} --train-samples 9000000 --global-batch-size $GBS --lr-warmup-samples 2000", "", "schedule-apart"),
    ("torchrun t.py {} --bias-zero-mean-update --optimizer adamw-8bit", "", "bad-value"),
    ("torchrun t.py {} --bias-zero-mean-update --optimizer adamw", "bad-value", ""),
    ("torchrun pretrain_gpt.py {} --use-mpi", "", "unknown-flag"),
    ("torchrun pretrain_gpt.py {} --data-path2 x", "", "unknown-flag"),
    ("torchrun pretrain_gpt.py {} --tokenizer-prompt-format x", "", "unknown-flag"),
    ("torchrun pretrain_gpt.py {} --swigglu", "unknown-flag", ""),
    ("torchrun pretrain_gpt.py {} --layernorm-epsilon 1e-6", "unknown-flag", ""),
    ("torchrun t.py {} --a-b 1 --c-d 1 --e-f 1 --num-attention-head 8", "", "unknown-flag"),
    ("torchrun t.py {} --save $X --save-interval 5 --save-retain-interval 7", "conflict", ""),
    ("torchrun t.py {} --use-bridge --hidden-size 100 --num-attention-heads 24", "", "indivisible"),
    ("X=${{2:-}}\n[ -z \"$X\" ] && exit\ntorchrun t.py {} --tokenizer-model $X --bf16", "", "missing-value"),
    ("python tools/merge_parts.py {} --model-types BERT --reset-position-ids --position-embedding-type rope", "", "documents-not-apart"),
    ("torchrun pretrain_gpt.py {} \\\n --save <PATH TO x> \\\n --bf16", "", "stray-word"),
    ("torchrun pretrain_gpt.py {} --bf16 \\ \n --swiglu", "stray-word", ""),
    ("torchrun t.py {} --lr 1 --adam-beta1 0.9 --optimizer sgd", "idle-flag", ""),
    ("torchrun t.py {} --train-samples 9000000 --global-batch-size 512 --lr-warmup-samples 2000", "schedule-apart", ""),
    ("torchrun t.py {} --train-samples 9000000 --global-batch-size 512 --lr-warmup-samples 64 --finetune", "", "schedule-apart"),
    ("torchrun t.py {} --train-iters 9000 --lr-warmup-fraction 0.9", "schedule-apart", ""),
    ("torchrun t.py {} --train-iters 9000 --lr-decay-iters 90000", "schedule-apart", ""),
    ("torchrun t.py {} --train-iters 50 --lr-decay-iters 90000", "", "schedule-apart"),
    ("torchrun t.py {} --train-iters 9000 --lr-decay-iters 900000", "", "schedule-apart"),
    ("torchrun pretrain_gpt.py {} --use-legacy-models", "removed-flag", ""),
    ("torchrun pretrain_gpt.py {} --use-legacy-models --a-b 1 --c-d 1 --e-f 1", "", "removed-flag"),
    ("torchrun t.py {} --save $X --load $X --no-load-optim", "restart-anew", ""),
    ("torchrun t.py {} --save $X --load $Y --no-load-optim", "", "restart-anew"),
    ("torchrun bench_ep.py --hidden-size 64 --num-experts 8 --num-attention-heads 8", "", "missing-flag"),
    ("DEFAULTS='{} --num-experts 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0'", "", "moe-no-balancing"),
    ("--hidden-size 64 --num-layers 2 --swiglu --num-attention-heads 8", "", "missing-flag"),  # a model alone
    ("--hidden-size 64 --num-layers 2 --swiglu --num-attention-heads 8 --lr 1", "missing-flag", ""),
    ("TEST_TYPE: regular\nMODEL_ARGS:\n  --hidden-size: 1024\n  --num-layers: 8\n  --swiglu: true\n  --num-attention-heads: 16", "",
     "default-dropout"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "has", "has_not"), BESIDE, ids=lambda value: str(value)[-40:])
def test_what_is_a_finding_beside_this(text, has, has_not):
    found = ids(lint(text.format(DESCRIBED)))
    assert (not has or found[has]) and not found[has_not]


def test_what_an_earlier_megatron_had_is_one_finding():
    found = lint(f"torchrun pretrain_gpt.py {DESCRIBED} --DDP-impl local --data-impl mmap")
    assert [f.flag for f in found.findings if f.id == "removed-flag"] == ["--DDP-impl --data-impl"]
    short = lint(f"torchrun t.py {DESCRIBED} --train-iters 9000 --lr-decay-iters 90 --lr-warmup-iters 80")
    assert ids(short)["schedule-apart"] == 1  # of the decay, not of the warm-up's share of it as well


def test_flags_that_a_checkpoint_holds_are_not_absent():
    said = "--tensor-model-parallel-size 2 --moe-grouped-gemm --rotary-base 5 --num-query-groups 4 --mtp-num-layers 1"
    found = lint(f"torchrun t.py --use-checkpoint-args --load x {said}")
    assert not ids(found)
    assert any("--use-checkpoint-args" in note for note in describe.notes(found.args, found.model))


def test_yaml_bomb_is_refused():
    letters = "abcdefghijklmnopqrstuvwxyz"
    doubled = [f"{c}: &{c} {{x: *{p}, y: *{p}}}" for p, c in pairwise(letters)]
    with pytest.raises(Refused):
        lint("\n".join(["a: &a [1, 2]", *doubled]))


# What is said ----------------------------------------------------------------------------------------------------------


def test_native_preset_is_counted_exactly():
    count = lint(argv.shell(lowered("nam56r_native_dp"))).model.count
    assert (count.total, count.active) == (3_996_461_352, 2_300_913_960)


@pytest.mark.parametrize(("fixture", "change", "total"), [
    ("clean_gqa.sh", ("", ""), 8_030_261_248),  # Llama 3 8B
    ("clean_moe.sh", ("", ""), 46_702_792_704),  # Mixtral 8x7B
])  # fmt: skip
def test_published_models_are_counted_exactly(fixture, change, total):
    assert lint((Path(__file__).parent / "lint" / fixture).read_text().replace(*change)).model.count.total == total


def test_a_container_of_bridges_is_the_published_model():
    """Nemotron 3 Nano: 31.58 billion parameters with its 131,072 tokens, whose number its tokenizer has."""
    found = lint((ROOT / "tests/lint/bridge_nemotron_3_nano.yaml").read_text(), "run_config.yaml", 8)
    rows = 131_072 * found.args.hidden_size * 2
    assert round((found.model.count.total + rows) / 1e9, 2) == 31.58
    text = report.text(found)
    assert "a container of Megatron-Bridge" in text and "128 of 1856, top 6" in text and "`comm_overlap`" in text
    assert found.launch.lines("--moe-router-topk")


@pytest.mark.parametrize("text", [
    "model: {_target_: a.b, nam_recipe: '{'}", "model: {_target_: a.b, nam_recipe: '[]'}",
    "model: {_target_: a.b, hidden_size: 8}\ndataset: {blend: 5}",
])  # fmt: skip
def test_half_a_container_is_refused(text):
    with pytest.raises(Refused, match="is no"):
        lint(text, "run_config.yaml")


@pytest.mark.parametrize("text", [
    "recipe: {_target_: nemotron.recipes.nano3.config}\ntrain: {train_iters: 5}",
    "recipe: {_target_: nam_megatron.nemo.nam57_pretrain_config}",
])  # fmt: skip
def test_a_python_function_is_no_model(text):
    with pytest.raises(Refused, match="only its container says the model"):
        lint(text, "nemotron.yaml")


def test_nemotrons_yaml_of_a_recipe_of_ours():
    text = (ROOT / "examples/nemo/nemotron.yaml").read_text()
    found = lint(f"{text}\ncheckpoint: {{save: /c}}\n", "nemotron.yaml")
    assert (found.launch.plan.name, found.launch.gpus) == ("nam56r_native_dp", 16)
    assert any("checkpoint.save" in note for note in found.launch.notes)


def test_text_names_what_is_trained():
    text = report.text(lint(argv.run_script(lowered("nam56r_nemo_native")), "run.sh"))
    for line in (
        "model        hybrid, 52 layers: *EME*EME*EMM*EME*EME*EMM*EME*EME*EMM*EME*EME*EMM*EME",
        "layers        13 attention        1, 5, ... 49 (every 4)",
        "parameters   3,996,461,352, 2,300,913,960 active per token",
        "attention    GQA: 56 heads of 64, 8 key/value heads",
        "positions    RoPE, base 500000",
        "norms        RMSNorm, epsilon 1e-05, none on queries and keys",
        "activation   squared ReLU, not gated, no linear bias",
        "layout       8 GPUs: tensor 2 + sequence, pipeline 1, context 1, data 4, expert 1, expert tensor 1",
    ):
        assert line in text.splitlines()
    assert text.splitlines()[-1].startswith("no finding; ")


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [GPT, HYBRID, MOE, MLA, DSA], ids=["gpt", "hybrid", "moe", "mla", "dsa"])
def test_text_has_no_value_that_nobody_said(base):
    for flag in base:
        for positions in ("rope", "learned_absolute"):
            text = report.text(launch(base | {"--position-embedding-type": positions}, {flag: None}))
            assert not re.search(r"\bNone\b", text), flag


def test_text_of_findings():
    found = launch(GPT, {"--num-query-groups": "4", "--hiden-size": "3"})
    assert (
        report.text(found).split("\n\n", 2)[2]
        == """\
wrong model  --num-query-groups 4  (line 2)  [gqa-ignored]
  the groups are ignored: full multi-head attention is trained (16 key/value heads)
  fix: add `--group-query-attention`

will fail  --hiden-size  (line 2)  [unknown-flag]
  Megatron 0.19.2 has no such flag and its parser stops at it (did you mean `--hidden-size`?)
  fix: correct it; a flag that your training script adds itself is fine

1 wrong model, 1 will fail; 22 arguments said, 784 at Megatron 0.19.2's defaults
"""
    )


def test_defaults_that_nobody_chose_are_one_paragraph():
    found = launch(
        CASES["default-beta2"][0],
        dict.fromkeys(("--hidden-dropout", "--attention-dropout", "--adam-beta2"), None) | {"--num-query-groups": "4"},
    )
    text = report.text(found).split("\n\n", 2)[2]
    assert text.startswith("wrong model  --num-query-groups 4")
    assert (
        text.split("\n\n", 1)[1]
        == """\
default  3 values that nobody chose; say what is meant
  --hidden-dropout: a dropout of 0.1 [default-dropout]
  --attention-dropout: a dropout of 0.1 [default-dropout]
  --adam-beta2: Adam's second moment decays with 0.999 [default-beta2]

1 wrong model, 3 default; 18 arguments said, 788 at Megatron 0.19.2's defaults
"""
    )


def sections(cls) -> set:
    """A config and all within it."""
    inner = {s for f in cls.model_fields.values() if (s := section(f.annotation)) is not None}
    return {cls} | {s for i in inner for s in sections(i)}


def defining() -> list[str]:
    """Arguments that make another model or training: those of rows that compute, and fields reviewed as meant."""
    rows = [cls.row(name) for cls in sections(Recipe) | set(KINDS.values()) for name in cls.model_fields]
    of_rows = {row.argument for row in rows if row.argument and not row.executes}
    reviewed = yaml.safe_load(current().reviewed_file.read_text())
    meant = {field.split(".")[1] for group in reviewed if group["class"] == "meant" for field in group["fields"]}
    return sorted((of_rows | meant) & current().by_dest.keys())


def another(flag) -> str | bool:
    if flag.action != "store":
        return flag.name.replace("--", "--no-", 1) if flag.action == "boolean" and flag.default else True
    if flag.choices:
        return str(next(c for c in flag.choices if c != flag.default))
    return {"int": "24", "float": "0.375", "tuple_type": "24,0"}.get(flag.type, "24")


@pytest.mark.parametrize("name", defining())
def test_flag_that_makes_another_model_is_in_the_description(name):
    flag = current().by_dest[name]
    value = another(flag)
    change = {value: True} if isinstance(value, str) and value.startswith("--") else {flag.name: value}
    mtp, window = HYBRID | {"--hybrid-layer-pattern": "M-*-/*-"}, GPT | {"--window-size": "127,0"}
    fp8 = GPT | {"--fp8-format": "hybrid"}
    for base in (
        MOE | {"--moe-shared-expert-intermediate-size": "512"},
        MLA,
        mtp,
        DSA,
        window,
        fp8,
        MLA | {"--rope-type": "yarn", "--rotary-scaling-factor": "8"},
        GPT | {"--use-rope-scaling": True},
        GPT | {"--optimizer": "muon"},
        GPT | {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "4"},
        HYBRID | {"--hybrid-layer-pattern": "G-G*-"},
    ):
        without = {said: None for said in base if current().by_name(said).dest == name}
        told = [(describe.data(f)["text"], ids(f)) for f in (launch(base, without), launch(base, without | change))]
        if told[0] != told[1]:
            return
    raise AssertionError(f"nothing is said of {flag.name}")


def test_json_is_the_same_for_programs():
    tree = json.loads(report.as_json(launch(MOE, {"--moe-aux-loss-coeff": None, "--lr": "nan"})))
    assert tree["trains"]["kind"] == "gpt" and tree["trains"]["num_layers"] == 8 and tree["gpus"] == 8
    assert tree["trains"]["layers"][:2] == [{"number": 1, "kind": "attention"}, {"number": 1, "kind": "moe"}]
    assert [f["id"] for f in tree["findings"]] == ["default-balancing"]
    assert tree["findings"][0]["severity"] == "default" and tree["findings"][0]["fix"]


# Our own presets -------------------------------------------------------------------------------------------------------


@pytest.mark.few(12)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [*argv.FORMATS, "run.sh"])
def test_preset_in_every_form_is_clean(name, form):
    lowering = lowered(name)
    text = argv.run_script(lowering) if form == "run.sh" else argv.FORMATS[form](lowering)
    found = lint(text)
    # Our own DSA hands the shared top-k on by itself; Megatron's would not, and the words alone do not tell which trains them.
    reused = bool(lowering.plan.index_reuse)
    assert set(ids(found)) == ({"dsa-reuse-kernels"} if reused and form != "json" else set())
    assert found.model.num_layers == len(lowering.plan.layers)


@pytest.fixture
def out(tmp_path):
    """`translate conf=... out=DIR`, as a function of the recipe's words; gives DIR."""

    def made(name: str, *overrides: str) -> Path:
        write(lowered(name, *overrides), tmp_path / "out")
        return tmp_path / "out"

    return made


def of(path: Path):
    return lint(path.read_text(), str(path))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["plan.json", "run.sh"])
def test_plan_of_a_preset_is_told_as_it_is_trained(name, file, out):
    plan, found = lowered(name).plan, of(out(name) / file)
    assert not ids(found)
    assert found.model.layers == tuple((l.number, l.kind) for l in plan.layers)
    assert (found.model.count.total, found.model.count.active) == parameters(plan)
    assert (found.args.launch.gpus, found.model.dp) == (plan.recipe.world_size, plan.recipe.data_parallel)
    told = report.text(found)
    assert all(KINDS[kind].title in told for kind in plan.kinds)
    given_up = [line for line in header(lowered(name)) if line.startswith("gives up")]
    assert all(line in " ".join(told.split()) for line in given_up)


UNLAPPED = [f"feature.distributed_optimizer.overlap_{what}=false" for what in ("grad_reduce", "param_gather")]


@pytest.mark.parametrize(("overrides", "finds"), [
    (["feature.recompute={granularity: full, modules: [], method: uniform, layers: 1}"], []),
    (["execution.dsa.kernels=naive"], []),
    (["execution.dsa.kernels=megatron"], []),
    (["model.blocks.mla.latent_norm=false"], []),
    (["model.blocks.dsa.indexer_loss_coeff=0", *UNLAPPED], ["dsa-untrained-indexer"]),
    (["feature.mtp.depths=0", "model.letters.E=mlp", "model.letters.A=attention", "model.substitute=[]", "model.linear_bias=true"], []),
], ids=str)  # fmt: skip
def test_plan_of_ours_has_the_findings_that_are_true_of_it(overrides, finds):
    assert [f.id for f in lint(argv.plan_json(lowered("nam56r", *overrides))).findings] == finds


def test_columns_of_zeros_are_what_fp8_wants(out):
    """8,248 columns and eight of zeros: of the plan, and of arguments that say that FP8 is laid out by us."""
    words = "nam56r_native_dp_fused", "+overlay=fp8", "cluster=h200_1"
    found = of(out(*words) / "plan.json")
    assert not ids(found) and "FP8 tensorwise but for experts" in report.text(found)
    assert "fp8-mamba-width" not in ids(lint(argv.lines(lowered(*words))))


@pytest.mark.parametrize(("kernels", "finds"), [("megatron", {"dsa-reuse-mask", "not-the-plan"}), ("fused", set())])
def test_shared_topk_without_a_mask_is_a_trap_of_megatrons_kernels_alone(kernels, finds, out):
    script = out("nam56r", f"execution.dsa.kernels={kernels}") / "run.sh"
    text, flag = script.read_text(), "--no-create-attention-mask-in-dataloader"
    script.write_text(text if flag in text else f"{text.rstrip()} {flag}\n")
    assert set(ids(of(script))) == finds


def test_edited_plan_is_refused(out):
    folder = out("nam56r_smoke")
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"--seed"', '"--speed"'))
    for file in ("plan.json", "run.sh"):
        with pytest.raises(Refused, match=r"out/plan\.json` was edited"):
            of(folder / file)


def test_script_whose_plan_is_not_there_says_so(out, tmp_path):
    folder = out("nam56r")
    (folder / "plan.json").unlink()
    (note, *_) = describe.notes((found := of(folder / "run.sh")).args, found.model)
    assert note.startswith(f"`{folder}/plan.json` cannot be read from here")
    assert lint((folder / "run.sh").read_text()).launch.plan is None  # from standard input: nobody knows where it lies


@pytest.mark.parametrize(("was", "now", "says"), [
    ("--lr 0.0003", "--lr 0.001", "given only `--lr 0.001`; in the plan only `--lr 0.0003`"),
    ("--nproc-per-node 1", "--nproc-per-node 2", "2 GPUs, and the plan is for 1"),
    ("unset NVTE_NORM_FWD_USE_CUDNN", "export NVTE_NORM_FWD_USE_CUDNN=1", "1, and the plan needs it unset"),
    ("expandable_segments:True", "''", "unset, and the plan needs it expandable_segments:True"),
])  # fmt: skip
def test_script_that_departs_from_its_plan_will_fail(was, now, says, out):
    script = out("nam56r_smoke") / "run.sh"
    assert was in script.read_text()
    script.write_text(script.read_text().replace(was, now))
    (finding,) = of(script).findings
    assert (finding.id, finding.severity, finding.detail) == ("not-the-plan", FAIL, says)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_plan_comes_back_as_its_own_recipe(name, tmp_path):
    made = recipe.make(lint(argv.plan_json(lowered(name))), Path("back.yaml"))
    assert made.refused is None and not (made.lost or made.added or made.keyless)
    again, was = (
        {
            k: v
            for k, v in same.flat(to_tree(r)).items()
            if not k.startswith(("preset.", "assumptions.")) and k not in set(unread(r))
        }
        for r in (recipe._load(made.yaml, "back"), lowered(name).plan.recipe)
    )
    assert again == was


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "words"),
    [*((name, ()) for name in NAMES), ("nam56r_native_dp", ("feature.distributed_optimizer.reshardable=true",))],
)
def test_preset_comes_back_as_a_recipe_with_the_same_arguments_or_is_refused(name, words, tmp_path):
    lowering = lowered(name, *words)
    path = tmp_path / "back.yaml"
    script = lint(argv.run_script(lowering), "run.sh")
    if lowering.plan.ours:  # the script's arguments are those of another model, with Mamba-2 for our layers
        with pytest.raises(Refused, match="what `--nam-model` stands for is not in the text"):
            recipe.write(script, str(path))
        return
    made = recipe.write(script, str(path))
    again = list(argv.argv(translate(recipe._load(path.read_text(), "back"))))
    told = list(argv.argv(lowering))
    if "mlp" not in lowering.plan.kinds:  # the width that no layer has need not come back
        again, told = (
            [w for i, w in enumerate(x) if "--ffn-hidden-size" not in x[max(i - 1, 0) : i + 1]] for x in (again, told)
        )
    assert made.exit_code == 0 and not made.keyless and not made.added and not made.lost
    assert again == told


def test_recipe_lists_what_it_does_not_carry():
    found = launch(
        GPT,
        {"--position-embedding-type": "relative", "--tensorboard-dir": "tb", "--vocab-size": "32000", "--seed": "5"},
    )
    made = recipe.make(found, Path("mine.yaml"))
    assert made.refused is None
    assert "--position-embedding-type relative -> --position-embedding-type rope" in made.lost
    assert made.keyless == ["--tensorboard-dir tb"]
    assert any(line.startswith("GPT layers: 8 layers of two parts become 16") for line in made.lost)
    assert "eval_interval unset -> --eval-interval 1000" in made.lost
    again = made.recipe
    assert (again.model.pattern, again.model.depth, again.schedule.seed, again.model.activation) == (
        "AE",
        16,
        5,
        "swiglu",
    )


def test_recipe_of_one_data_path_and_its_tokenizer():
    given = {
        "--data-path": "a/b_text",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": "x/y",
        "--split": "98,2,0",
    }
    made = recipe.make(launch(GPT, given | {"--mock-data": None}), Path("mine.yaml"))
    data = made.recipe.data
    assert (data.name, data.path, data.tokenizer, data.split) == ("indexed", "a/b_text", "x/y", "98,2,0")


@pytest.mark.slow
def test_recipe_names_a_difference_as_one():
    several = {"--moe-router-load-balancing-type": "aux_loss seq_aux_loss", "--moe-aux-loss-coeff": "1e-3 1e-3"}
    for base, change in ((GPT, {"--position-embedding-type": "learned_absolute"}), (MOE, several), (MOE, {})):
        made = recipe.make(launch(base, change), Path("mine.yaml"))
        assert all(was != now for line in made.lost if " -> " in line for was, now in [line.split(" -> ")])
        assert not any("is not one of" in line for line in made.lost)


NORMS = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")


def test_a_launch_without_layers_is_no_recipe():
    text = " ".join(map(repr, words(HYBRID | {"--hybrid-layer-pattern": None})))
    with pytest.raises(Refused, match="builds no layers"):
        recipe.make(lint(f"torchrun --nproc-per-node 8 pretrain_hybrid.py {text}"), Path("mine.yaml"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("said", "kernels", "lost"),
    [(NORMS, "cudnn", False), (NORMS[:1], "transformer_engine", True), ((), "transformer_engine", False)],
    ids=str,
)
def test_recipe_has_the_norm_kernels_of_the_environment(said, kernels, lost):
    made = recipe.make(launch(MOE, {}, dict.fromkeys(said, "1")), Path("mine.yaml"))
    assert made.recipe.precision.norm_kernels == kernels
    assert any(NORMS[0] in line for line in made.lost) is lost


def test_recipe_that_our_compiler_refuses_is_written_and_says_so(tmp_path, capsys):
    file, out = tmp_path / "x.txt", tmp_path / "mine.yaml"
    file.write_text(" ".join(words(MOE | {"--tensor-model-parallel-size": "2", "--expert-tensor-parallel-size": "1"})))
    assert command.main([str(file), f"recipe={out}"]) == 1
    assert "translate refuses it as it stands (exit code 1):" in capsys.readouterr().err
    assert recipe._load(out.read_text(), "mine").parallel.tensor == 2


def test_refused_recipe_lists_what_it_loses_all_the_same():
    scaled = {"--rotary-scaling-factor": "40", "--mscale-all-dim": "1.0", "--tensor-model-parallel-size": "2"}
    made = recipe.make(launch(MLA, scaled), Path("mine.yaml"))  # of plain RoPE they scale the softmax
    assert made.refused is not None
    assert {line.split(" -> ")[0] for line in made.lost} >= {"--rotary-scaling-factor 40", "--mscale-all-dim 1.0"}
    made = recipe.make(
        launch(MOE, {"--moe-apply-probs-on-input": True, "--tensor-model-parallel-size": "2"}), Path("mine.yaml")
    )
    assert made.refused is not None and any(line.startswith("--moe-apply-probs-on-input -> ") for line in made.lost)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("said", "keys"),
    [
        ({"--moe-router-num-groups": "4", "--moe-router-group-topk": "2", "--moe-router-topk-scaling-factor": "2.5",
          "--moe-z-loss-coeff": "1e-3", "--moe-shared-expert-intermediate-size": "512", "--moe-shared-expert-gate": True,
          "--moe-router-dtype": "fp64"},
         {"group_limit": (4, 2), "routed_scaling": 2.5, "z_loss_coeff": 1e-3, "shared_expert_gate": True, "router_dtype": "fp64"}),
        # Kimi-K2's one group limits nothing, there is no shared expert, and of sigmoid scores Megatron reads no pre-softmax.
        ({"--moe-router-num-groups": "1", "--moe-router-group-topk": "1", "--moe-shared-expert-gate": True,
          "--moe-router-pre-softmax": True},
         {"group_limit": None, "shared_expert_gate": False, "pre_softmax": False, "router_dtype": None}),
        ({"--moe-router-pre-softmax": True, "--moe-router-score-function": "softmax", "--moe-latent-size": "512"},
         {"pre_softmax": True, "latent_size": 512}),
        ({"--moe-expert-capacity-factor": "1.5", "--moe-pad-expert-input-to-capacity": True}, {"pad_to_capacity": True}),
    ],
    ids=["all", "nothing", "softmax", "capacity"],
)  # fmt: skip
def test_routing_comes_back(said, keys):
    made = recipe.make(launch(MOE, said), Path("mine.yaml"))
    assert made.refused is None and not any("moe" in line for line in [*made.lost, *made.keyless])
    moe = made.recipe.blocks.moe
    assert {key: getattr(moe, key) for key in keys} == keys


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("said", "key", "value"),
    [
        ({"--add-qkv-bias": True, "--disable-bias-linear": True}, "qkv_bias", True),
        ({"--attention-output-gate": True}, "output_gate", True),
        ({"--window-size": "127,0"}, "window", 128),
        ({"--window-size": "127,0", "--window-attn-skip-freq": "2"}, "unwindowed_every", 2),
        ({"--window-size": "127,0", "--window-attn-skip-freq": "([1]*3+[0]*1+[1]*3+[0]*1)"}, "unwindowed_every", 4),
        ({"--position-embedding-type": "none"}, "position_embedding", "none"),
        ({"--position-embedding-type": "rope", "--rotary-percent": "0.5"}, "rotary_percent", 0.5),
    ],
)
def test_what_attention_has_comes_back(said, key, value):
    made = recipe.make(launch(GPT, said), Path("mine.yaml"))
    flags = tuple(said)
    assert made.refused is None and not any(line.startswith(flags) for line in [*made.lost, *made.keyless])
    assert getattr(made.recipe.blocks.attention, key) == value


def test_windows_of_other_layers_than_a_key_can_say_are_listed():
    said = {"--window-size": "127,0", "--window-attn-skip-freq": "([0]*3+[1]*5)"}
    made = recipe.make(launch(GPT, said), Path("mine.yaml"))
    assert made.recipe.blocks.attention.window is None
    assert any("--window-attn-skip-freq" in line for line in made.keyless)
    assert any(line.startswith("--window-size 127,0 -> ") for line in made.lost)


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [GPT, MLA, HYBRID], ids=["GPT", "MLA", "hybrid"])
def test_learned_positions_come_back(base):
    """Megatron's default; its table has a row for each of --max-position-embeddings, and MLA turns beside it."""
    said = {k: v for k, v in base.items() if k != "--position-embedding-type"} | {"--max-position-embeddings": "8192"}
    made = recipe.make(launch(said, {}), Path("mine.yaml"))
    assert made.refused is None and not any(
        "position" in line or "rotary" in line for line in [*made.lost, *made.keyless]
    )
    attention = made.recipe.blocks.attention
    assert made.recipe.model.learned_positions == 8192 and not (attention and attention.turned)


GRAPHED = {"--cuda-graph-impl": "transformer_engine", "--te-rng-tracker": True, "--recompute-granularity": "selective"}


@pytest.mark.parametrize(
    ("base", "captured", "again", "said", "stops"),
    [
        (MOE, "moe_router", "moe", {}, True),
        (MOE, "moe_router moe_preprocess", "moe_act", {}, False),
        (MOE, "moe_router moe_preprocess", "moe", {"--cuda-graph-impl": "local"}, False),
        (GPT, "mlp", "mlp", {"--hidden-dropout": "0.1"}, True),
        (GPT, "mlp", "mlp", {}, False),
        (GPT, "mlp", "core_attn", {"--hidden-dropout": "0.1", "--attention-dropout": "0.1"}, False),
        (GPT, "attn", "core_attn", {"--attention-dropout": "0.1"}, True),
    ],
)
def test_what_is_recomputed_beside_what_is_captured(base, captured, again, said, stops, oracle):
    found = launch(base, GRAPHED | {"--cuda-graph-modules": captured, "--recompute-modules": again} | said)
    assert ("graphs-modules" in ids(found)) is stops is (ask(oracle, found).error is not None)


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [MLA, DSA], ids=["MLA", "DSA"])
@pytest.mark.parametrize("said", [{"--normalization": "LayerNorm"}, {"--fp8-format": "hybrid"}], ids=str)
def test_layers_that_our_kernels_do_not_take_come_back_as_megatrons(base, said):
    made = recipe.make(launch(base, said), Path("mine.yaml"))
    assert made.refused is None or "kernels" not in made.refused
    assert "kernels: megatron" in made.yaml


YARN = {"--rotary-scaling-factor": "40", "--mscale": "0.9", "--mscale-all-dim": "0.7"}
SCALED = {  # launch, what it says more -> the keys of a feature
    "MLA's YaRN": (MLA, YARN | {"--rope-type": "yarn"}, "yarn",
                   {"factor": 40, "original_length": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 0.9, "mscale_all_dim": 0.7}),
    "GQA's YaRN": (GPT, YARN | {"--position-embedding-type": "yarn", "--yarn-beta-fast": "16",
                                "--no-yarn-correction-range-round-to-int": True}, "yarn",
                   {"factor": 40, "original_length": 4096, "beta_fast": 16, "rounded": False}),
    "yarn of factor 1": (MLA, {"--rope-type": "yarn"}, "yarn", None),
    "Llama's": (GPT, {"--use-rope-scaling": True}, "llama_rope", {"factor": 8}),
    "a hybrid's, which ignores it": (HYBRID, {"--use-rope-scaling": True}, "llama_rope", None),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_angles_come_back(name):
    base, said, feature, keys = SCALED[name]
    made = recipe.make(launch(base, said), Path("mine.yaml"))
    assert made.refused is None and not any(line.startswith(tuple(said)) for line in [*made.lost, *made.keyless])
    found = getattr(made.recipe.feature, feature)
    assert (found is None) is (keys is None)
    assert keys is None or {key: getattr(found, key) for key in keys} == keys


def test_megatrons_norm_before_queries_without_a_latent_is_listed():
    found = launch(MLA, {"--q-lora-rank": None})
    made = recipe.make(found, Path("mine.yaml"))
    assert any("norm over the whole width" in line for line in made.lost)
    ours = lint(argv.run_script(translate(made.recipe)), "run.sh")
    assert found.model.count.total - ours.model.count.total == 8 * 1024  # layers times the width
    assert "mla-query-norm" in ids(found) and "mla-query-norm" not in ids(ours)


def test_flags_of_yarn_are_what_megatron_reads(oracle):
    """MLA's config has fields for the betas, and no argument of the parser's ever comes there."""
    found = launch(*CASES["yarn-flags-ignored"])
    held = ask(oracle, found).values
    assert (held["args.yarn_beta_fast"], held["transformer.beta_fast"]) == (1.0, 32)
    assert "betas 32 and 1" in dict(describe.rows(found.args, found.model))["positions"]


def test_file_of_a_model_alone_becomes_a_preset_of_a_model_alone():
    trains = ("--micro-batch-size", "--global-batch-size", "--lr", "--train-iters", "--seq-length", "--adam-beta2")
    other = {"--tensor-model-parallel-size": "4", "--untie-embeddings-and-output-weights": True}
    flags = HYBRID | other | dict.fromkeys(trains) | {"--hybrid-layer-pattern": "M-M*-/*-"}
    made = recipe.make(lint(" ".join(words(flags))), Path("mine.yaml"))
    tree = yaml.safe_load(made.yaml)
    assert set(tree) == {"defaults", "preset", "model", "feature", "optim", "schedule"} and set(tree["feature"]) == {
        "mtp"
    }
    assert {value for key in ("optim", "schedule") for value in tree[key].values()} == {"???"}
    assert made.refused is None and made.recipe.model.pattern == "MEMAE"
    assert sum(line.startswith(("all but the model", "sequence length")) for line in made.lost) == 2
    assert any(line.startswith("--tensor-model-parallel-size 4 -> ") for line in made.lost)


def test_recipe_overwrites_only_what_lint_has_written(tmp_path, capsys):
    file, out = tmp_path / "x.txt", tmp_path / "mine.yaml"
    file.write_text(" ".join(words(GPT)))
    for text in ("name: precious\n", "# From a by nam_megatron\n", "\xff"):
        out.write_bytes(text.encode("latin-1"))
        assert command.main([str(file), f"recipe={out}"]) == 2
        assert f"error: `{out}` exists, and lint has not written it" in capsys.readouterr().err
        assert out.read_bytes() == text.encode("latin-1")
    out.unlink()
    assert [command.main([str(file), f"recipe={out}"]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("steps", [{"--lr-wsd-decay-iters": "4"}, {"--lr-wsd-decay-samples": "256"}])
def test_wsd_comes_back(steps):
    said = {"--lr-decay-style": "WSD", "--lr-wsd-decay-style": "linear", "--min-lr": "0"}
    if "--lr-wsd-decay-samples" in steps:
        said |= {"--train-iters": None, "--train-samples": "640"}
    made = recipe.make(launch(GPT, said | steps), Path("mine.yaml"))
    assert made.refused is None and not any("wsd" in line.lower() for line in [*made.lost, *made.keyless])
    optim = made.recipe.optim
    assert (optim.decay, optim.wsd_steps, optim.wsd_shape) == ("WSD", 4, "linear")


def test_gated_delta_nets_come_back():
    said = {"--hybrid-layer-pattern": "G-G*-", "--linear-num-value-heads": "8", "--linear-num-key-heads": "4"}
    made = recipe.make(launch(HYBRID, said | {"--mamba-num-heads": None}), Path("mine.yaml"))
    assert made.refused is None and not any("linear" in line for line in [*made.lost, *made.keyless])
    plan = translate(made.recipe).plan
    assert plan.pattern == "G-G*-" and (plan.recipe.blocks.gdn.key_heads, plan.recipe.lane.name) == (4, "own_dp")


# The command -----------------------------------------------------------------------------------------------------------


def run(*options: str, text: str | bytes = "") -> subprocess.CompletedProcess:
    data = text.encode() if isinstance(text, str) else text
    command_line = [sys.executable, "-m", "nam_megatron.lint", "-", *options]
    return subprocess.run(command_line, input=data, capture_output=True, timeout=600, cwd=ROOT, check=False)


def test_exit_codes(tmp_path, capsys):
    clean, trap = tmp_path / "clean.txt", tmp_path / "trap.txt"
    clean.write_text(" ".join(words(GPT)))
    trap.write_text(" ".join(words(GPT | {"--num-query-groups": "4"})))
    assert [command.main([str(p)]) for p in (clean, trap)] == [0, 1]
    assert command.main([str(trap), "ignore=gqa-ignored"]) == 0
    written = [str(trap), f"recipe={tmp_path}/mine.yaml"]  # whole, and of a launch that is not
    assert [command.main([*written, *more]) for more in ((), ("ignore=gqa-ignored",))] == [1, 0]
    for rule, word in (("unknown-flag", "--of-a-fork"), ("unknown-variable", "--make-vocab-size-divisible-by $ROWS")):
        trap.write_text(" ".join([*words(GPT), word]))
        assert [command.main([str(trap), *more]) for more in ((), (f"ignore={rule}",))] == [1, 0]
    capsys.readouterr()
    assert command.main([str(tmp_path / "none.sh")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read ")


def test_a_pipe_has_one_width_and_a_terminal_its_own(tmp_path, capsys, monkeypatch):
    file = tmp_path / "trap.txt"
    file.write_text(" ".join(words(GPT | {"--num-query-groups": "4"})))

    def said(columns: int, **more: bool) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with monkeypatch.context() as m:
            m.setattr("rich.console.Console", partial(Console, **more))
            command.main([str(file)])
        return capsys.readouterr().out

    monkeypatch.setenv("TERM", "xterm")
    piped, narrow = said(70), said(70, force_terminal=True)
    assert piped == said(200) and "\x1b[" not in piped and "\x1b[" in narrow
    monkeypatch.setenv("NO_COLOR", "1")
    plain = said(70, force_terminal=True)
    assert plain.split() == piped.split() and len(plain.splitlines()) > len(piped.splitlines())


@pytest.mark.parametrize(("options", "says"), [
    (["formatt=json"], "did you mean `format`?"), (["ignore=gqa-ignred"], "did you mean `gqa-ignored`?"),
    (["format=xml"], "no format `xml`"), (["gpus=many"], "is no number of GPUs"), (["run.sh"], "one FILE, and format="),
    (["ignore=gqa"], "no rule `gqa`"), (["recipe=a b.yaml"], "is no file name"), (["recipe=/no/such/dir/x.yaml"], "cannot write"),
    (["gpus=9" * 20], "is no number of GPUs"), (["--formatt=json"], "`--formatt=json` is no option"), (["--format"], "is no option"),
])  # fmt: skip
def test_options_are_checked(options, says, tmp_path, capsys):
    file = tmp_path / "x.txt"
    file.write_text(" ".join(words(GPT)))
    assert command.main([str(file), *options]) == 2
    assert says in capsys.readouterr().err


def test_options_may_have_dashes(tmp_path, capsys):
    file = tmp_path / "x.txt"
    file.write_text(" ".join(words(GPT)))
    assert command.main(["--format=json", str(file), "--gpus=4"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 4


def test_no_words_ask_for_a_file_alone():
    with pytest.raises(Refused, match=r"required: FILE$"):
        command.main([])


def test_gpus_that_the_text_contradicts_are_refused():
    text = "torchrun --nproc-per-node 8 train.py --bf16"
    with pytest.raises(Refused, match="`gpus=7`, and `-` says 8"):
        lint(text, gpus=7)
    assert lint(text, gpus=8).args.launch.gpus == 8


@pytest.mark.slow
def test_command_line_end_to_end(tmp_path):
    done = run("recipe=" + str(tmp_path / "mine.yaml"), "format=json", "gpus=4", text=" ".join(words(GPT)))
    assert done.returncode == 0 and json.loads(done.stdout)["gpus"] == 4
    assert b"wrote" in done.stderr and (tmp_path / "mine.yaml").is_file()
    assert run(text=b"\xff\xfe--bf16").returncode == 2
    assert b"not UTF-8" in run(text=b"\xff\xfe--bf16").stderr
    assert b"\x1b[" not in run(text=" ".join(words(GPT))).stdout


def test_needs_no_torch_and_no_megatron():
    blocked = "import sys; sys.modules.update(torch=None, megatron=None, transformer_engine=None)\n"
    code = blocked + "from nam_megatron.lint.__main__ import main; sys.exit(main(['-']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=" ".join(words(MOE)),
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_docs_are_current(rewrite_golden):
    """The page's example is run and its table of rules is the code's."""
    page = ROOT / "docs" / "lint.md"
    text = page.read_text()
    example = re.search(r"<!-- input -->\n```bash\n(.*?)```", text, re.DOTALL)[1]
    now = _between(text, "<!-- output -->\n```text\n", "```", report.text(lint(example, "train.sh")))
    now = _between(now, "--rewrite-golden` -->\n", "<!-- end of rules -->", rules.table())
    measured = json.loads((ROOT / "benchmarks" / "launches.json").read_text())
    now = _between(now, "<!-- begin: launches -->\n", "<!-- end of launches -->", launches.page(measured))
    if rewrite_golden:
        page.write_text(now)
    assert now == text or rewrite_golden, "pytest tests/test_lint.py -k docs --rewrite-golden"
    severities = [f"| **{name}** | {meaning} |" for name, meaning in rules.SEVERITIES.items()]
    assert "\n".join(severities) in text


def _between(text: str, start: str, end: str, new: str) -> str:
    before, rest = text.split(start, 1)
    return before + start + new + rest[rest.index(end) :]


# Nonsense --------------------------------------------------------------------------------------------------------------

SNIPPETS = st.sampled_from([
    "--hidden-size 64", "--num-layers 2", "--hybrid-layer-pattern", "M*E|D+-/", "--spec", "--moe-layer-freq", "([1]*", "--", "--bf16=1",
    "torchrun", "t.py", "pretrain_gpt.py", "eval", "bash -c", "export", "if", "then", "fi", "case", "esac", "in", "for", "do", "done",
    "{", "}", "(", ")", "=(", "A=(", "A+=", "X=", "$X", "${X", "${X:-", "$((1/0))", "$(", "`", '"', "'", "\\\n", "<<EOF", "EOF", "\n", ";",
    "&&", "||", "|", "#", "[[", "]]", "[", "]", "-z", "==", "=", "a: b", "---", "? ", "- ", "&a", "*a", "!!python/object:x y", "\t", "\x00",
    "-1", "0", "99999999999999999999", "nan", "1e400", "\ue000", "\ue001", "é",
])  # fmt: skip


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(SNIPPETS, max_size=30).map(" ".join),
        st.lists(SNIPPETS, max_size=30).map("".join),
    )
)
def test_any_text_is_read_or_refused(text):
    try:
        found = lint(text)
    except Refused:
        return
    report.text(found), report.as_json(found)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=120))
def test_any_script_is_followed_or_refused(text):
    with contextlib.suppress(ShellError):
        follow.run(text)


ODD = (
    "0", "-1", "1", "2", "3", "7", "64", "1000000007", "nan", "inf", "-inf", "1e309", "", "[]", "[1]*3", "none", "rope", "MEM*|D+/-G",
    "a,b", "$X", "é",
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flags_are_described_and_checked(data):
    """Random flags, of random values, on top of random parts of a launch."""
    base = data.draw(st.sampled_from([GPT, HYBRID, MOE, MLA, DSA, FSDP, {}]))
    flags = {k: v for k, v in base.items() if data.draw(st.integers(0, 9)) > 0}
    for name in data.draw(st.lists(st.sampled_from(sorted(current().flags)), max_size=12)):
        flag = current().by_name(name)
        odd = st.sampled_from(ODD + tuple(map(str, flag.choices or ())))
        flags[name] = True if flag.action != "store" else data.draw(odd)
    if not flags:
        return
    found = lint(json.dumps(words(flags)), gpus=data.draw(st.sampled_from((None, 1, 6, 8))))
    report.text(found), report.as_json(found)
    if data.draw(st.integers(0, 29)) == 0:
        with contextlib.suppress(Refused):
            recipe.make(found, Path("mine.yaml"))


def test_layers_of_ours_are_not_taken_as_megatrons():
    """Translate's words for a pipe say that some `M` are ours, and no more."""
    found = lint(" ".join(argv.words(lowered("nam56r"))))
    rows = dict(describe.rows(found.args, found.model))
    assert rows["parameters"] == "?" and "17 Mamba-2 or ours" in rows["layers"] and "Mamba" not in rows
    notes = list(describe.notes(found.args, found.model))
    assert any("dsa, mamba3, m2rnn are ours" in note for note in notes) and not any(
        "no flag says" in note for note in notes
    )
    assert {"number": 12, "kind": None} in describe.data(found)["layers"]
    with pytest.raises(Refused, match="--nam-model"):
        recipe.make(found, Path("mine.yaml"))


# What launches of others have -----------------------------------------------------------------------------------------------

OF_ANOTHER = "--rollout-batch-size 8 --actor-num-nodes 2 --sglang-mem-fraction 0.7"


@pytest.mark.parametrize(
    "before",
    [
        "mapfile -t HOSTS < <(scontrol show hostnames)",
        "while IFS='=' read -r K V; do export $K=$V; done < <(echo \"$VARS\" | tr ' ' '\\n')",
        "function hosts() {\n  echo $1\n}",
        'if [[ "$1" ]]; then\n  [[ ! "$2" =~ "--num-layers" ]] && [[ ! "$2" =~ "--hidden-size" ]] && \\\n  [[ "$3" ]]\nfi',
    ],
)
def test_bash_beside_the_launch_is_no_launch(before):
    found = lint(f"{before}\ntorchrun --nproc-per-node 8 pretrain_gpt.py {DESCRIBED}\n")
    assert found.launch.script == "pretrain_gpt.py" and found.args.hidden_size == 1024 and not found.args.trouble


def test_flags_of_another_parser_are_a_note_and_nothing_is_lacking():
    found = lint(f"python train.py {DESCRIBED} {OF_ANOTHER} --hidden-sise 8")
    assert ids(found) == Counter({"unknown-flag": 1})  # the misspelt one is told apart
    assert "--sglang-mem-fraction" in report.text(found)
    old = lint(f"python pretrain_gpt.py {DESCRIBED} --use-mcore-models --moe-enable-deepep")
    assert "--moe-enable-deepep (use `--moe-flex-dispatcher-backend deepep`)" in " ".join(report.text(old).split())
    refused = lint(f"torchrun t.py {DESCRIBED} --no-weight-decay-cond-type qwen3_next")
    assert ids(refused)["bad-value"] and "read as before" not in " ".join(report.text(refused).split())
    megatrons = lint(f"python pretrain_gpt.py {DESCRIBED} {OF_ANOTHER}")
    assert not ids(megatrons)["unknown-flag"] and ids(megatrons)["missing-flag"]  # `rollout` is no `global` misspelt
    assert "0.19.2's parser stops at --rollout-batch-size, --actor-num-nodes, --sglang-mem-fraction" in " ".join(
        describe.notes(megatrons.args, megatrons.model)
    )


def test_flags_with_underscores_are_megatrons_in_another_program():
    flags = (
        DESCRIBED.replace("-size", "_size").replace("-layers", "_layers")
        + " --use_distributed_optimizer True --sequence_parallel false --moe_permute_fusion False"
    )
    flags = flags.replace("hidden-size", "hidden_size").replace("attention-heads", "attention_heads")
    found = lint(f"megatron sft {flags.replace('num-', 'num_')}")
    assert found.args.hidden_size == 1024 and found.args.use_distributed_optimizer and not found.args.sequence_parallel
    assert found.args.moe_permute_fusion is False
    assert found.exit_code == 0 and "names with underscores" in report.text(found)


def test_a_variable_for_rays_workers_is_set(tmp_path):
    (tmp_path / "model.sh").write_text(f"A=({DESCRIBED} --moe-token-dispatcher-type alltoall)\n")
    text = """source "$(dirname "$0")/model.sh"\nENV="{\\"env_vars\\": {\\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\"}}"
ray job submit --runtime-env-json="$ENV" -- python3 t.py ${A[@]} --tensor-model-parallel-size 2 --moe-token-dispatcher-type flex"""
    other, comment = text.replace("CUDA_DEVICE", "CUDA"), "# export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    for said, told in ((text, False), (other, True), (comment + other, True), (text.replace('"1', '"8'), True)):
        found = lint(said, str(tmp_path / "run.sh"))
        assert told is ("does not export it" in " ".join(describe.notes(found.args, found.model)))
        assert not ids(found)["given-twice-runs"]  # a model's file, and what the launch says over it


def test_text_whose_flags_no_command_has_is_read_in_part():
    found = lint("ray job submit --lr 1e-4\n  --" + "\n  --".join(DESCRIBED.split("--")[1:]))
    assert not ids(found)["missing-flag"] and "no command here has the others" in " ".join(
        describe.notes(found.args, found.model)
    )


def test_yaml_of_several_launches_is_read_as_one_of_them():
    one = "\n".join(f"  --{line}" for line in DESCRIBED.replace("--", "").replace(" ", "\n").splitlines())
    one = re.sub(r"--([a-z-]+)\n  --(\d+)", r"--\1: \2", one)
    found = lint(f"MODEL_ARGS_1:\n{one}\n  --bf16: true\nMODEL_ARGS_2:\n{one.replace('1024', '2048')}\n")
    assert found.args.hidden_size == 1024 and not ids(found)["given-twice"]
    assert any("MODEL_ARGS_2" in note for note in found.launch.notes)


def test_yaml_values_as_a_shell_and_omegaconf_would_have_them():
    text = """
--rampup-batch-size: "384 384 97656250"
--pipeline-model-parallel-layout: 'Et\\|tL'
--lr: ${oc.env:RATE,3e-4}
--data-path: ${TOKENS:null}
--hidden-size: ${model.width}
"""
    found = lint(text).args
    assert found.rampup_batch_size == [384, 384, 97656250] and found.pipeline_model_parallel_layout == "Et|tL"
    assert found.lr == 3e-4 and not found.said("data_path") and follow.holes(found.given["hidden_size"][0][2])
    assert any("RATE" in note and "TOKENS" in note for note in found.launch.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("said", "pattern", "virtual"),
    [
        ({"--pipeline-model-parallel-layout": "Et|ttt|tt|ttL"}, "AE|AEAEAE|AEAE|AEAE", 2),
        (
            {"--pipeline-model-parallel-layout": "Et*4|tttt|tt|L", "--num-layers": "10"},
            "AE",
            2,
        ),  # ours have no empty ones
        ({"--num-layers-per-virtual-pipeline-stage": "2"}, "AEAE|AEAE|AEAE|AEAE", 2),
        ({"--account-for-loss-in-pipeline-split": True, "--num-layers": "7"}, "AEAEAEAE|AEAEAE", 1),
        ({"--decoder-last-pipeline-num-layers": "3"}, "AEAEAEAEAE|AEAEAE", 1),
    ],
)
def test_pipeline_stages_of_a_gpt_come_back(said, pattern, virtual):
    pairs = {"--pipeline-model-parallel-size": "2", "--moe-layer-freq": "1"}
    made = recipe.make(launch(MOE, pairs | said), Path("mine.yaml"))
    model, parallel = made.recipe.model, made.recipe.parallel
    assert made.refused is None and (model.pattern, parallel.virtual_pipeline) == (pattern, virtual)
    assert any(line.startswith(tuple(said)) for line in made.keyless) is ("|" not in pattern)


@pytest.mark.few(1)
@pytest.mark.parametrize("modules", [None, "full"])
def test_graphs_of_whole_layers_are_listed_and_nothing_breaks(modules, tmp_path):
    made = recipe.make(
        launch(HYBRID, {"--cuda-graph-impl": "local", "--cuda-graph-modules": modules}), tmp_path / "mine.yaml"
    )
    assert any("--cuda-graph-impl local" in line for line in made.lost) and made.refused is None


@pytest.mark.parametrize(
    ("said", "impl"),
    [
        ({"--cuda-graph-impl": "full_iteration"}, "full_iteration"),
        ({"--cuda-graph-impl": "local", "--cuda-graph-scope": "full_iteration"}, "full_iteration"),
        ({"--enable-cuda-graph": True, "--cuda-graph-scope": "full_iteration"}, "full_iteration"),
        ({"--cuda-graph-modules": "full_iteration"}, "full_iteration"),
        ({"--cuda-graph-impl": "local", "--cuda-graph-modules": "full"}, "local"),
        ({"--cuda-graph-impl": "local", "--cuda-graph-modules": "full_iteration_inference"}, "local"),
        ({"--cuda-graph-impl": "transformer_engine", "--cuda-graph-scope": "full_iteration"}, None),
    ],
)
def test_graphs_of_whole_steps_in_all_their_spellings(said, impl, oracle):
    found = launch(HYBRID, {"--te-rng-tracker": True, "--no-check-for-nan-in-loss-and-grad": True} | said)
    answer = ask(oracle, found)
    assert ids(found)["graphs-modules"] == (impl is None) == (answer.error is not None)
    if impl:
        assert (found.model.graphs, found.model.graph_modules) == (impl, ())
        assert answer.values["transformer.cuda_graph_impl"] == impl
        assert not ids(found)["graphs-ignored"]


@pytest.mark.slow
def test_a_graph_of_a_whole_step_comes_back_of_one_host_alone():
    flags = HYBRID | {"--cuda-graph-scope": "full_iteration", "--no-check-for-nan-in-loss-and-grad": True}
    for nodes, gpus, tensor in ((1, 1, 1), (1, 8, 1), (1, 8, 2), (2, 8, 1)):
        said = " ".join(f"'{word}'" for word in words(flags | {"--tensor-model-parallel-size": str(tensor)}))
        found = lint(f"torchrun --nnodes {nodes} --nproc-per-node {gpus} train.py {said}")
        made = recipe.make(found, Path("mine.yaml"))
        graphs = made.recipe.feature.cuda_graphs
        assert (graphs and graphs.impl) == ("full_iteration" if nodes == 1 else None)
        assert any("cuda_graph_impl" in line or "--cuda-graph" in line for line in made.lost) is (graphs is None)


def test_sequence_length_under_its_other_name():
    found = launch(GPT, {"--seq-length": None, "--encoder-seq-length": "2048"})
    assert ids(found)["positions-short"] and dict(describe.rows(found.args, found.model))["sequence"] == "2048 tokens"


def test_letters_replaced_in_a_variable():
    found = lint(
        "N=300_000\nP=a-b-c\npython pretrain_gpt.py --train-samples $((${N//_}/100)) --tokenizer-model ${P/-/+} --lr 1e-4"
    )
    assert found.args.tokenizer_model == "a+b-c"
    found = lint("N=300_000\nN=${N//_}\npython pretrain_gpt.py --train-samples $((N/100)) --lr 1e-4")
    assert found.args.train_samples == 3000


def test_flag_that_a_variable_names_is_open():
    found = lint(f"python pretrain_gpt.py {DESCRIBED} --$DTYPE")
    assert not ids(found)["unknown-flag"] and not ids(found)["missing-flag"]
    assert "--$DTYPE" in " ".join(describe.notes(found.args, found.model))


def test_softmax_before_the_choice_is_said_beside_softmax_scores_alone():
    for scores, said in (("sigmoid", False), ("softmax", True)):
        found = launch(MOE, {"--moe-router-pre-softmax": True, "--moe-router-score-function": scores})
        assert ("softmax before the choice" in dict(describe.rows(found.args, found.model))["experts"]) is said


@pytest.mark.parametrize(
    ("change", "said"), [({"--moe-aux-loss-coeff": "0"}, "0"), ({"--moe-aux-loss-coeff": None}, "not said, and so 0")]
)
def test_a_coefficient_of_0_that_is_said_is_not_called_unsaid(change, said):
    (finding,) = [
        f
        for f in launch(MOE, {"--moe-router-load-balancing-type": "aux_loss"} | change).findings
        if f.id == "moe-no-balancing"
    ]
    assert finding.detail == said


def test_a_batch_that_its_micro_batch_does_not_divide_fails_on_any_number_of_gpus():
    text = " ".join(words(GPT | {"--micro-batch-size": "2", "--global-batch-size": "7"}))
    assert "batch" in ids(lint(text)) and "batch" not in ids(lint(text.replace("size 7", "size 8")))


@pytest.mark.parametrize(("name", "epsilon"), [("Kimi-K2-Thinking", "1e-5"), ("Kimi-K2-Instruct", "1e-6")])
def test_versions_of_a_card_have_their_own_epsilon(name, epsilon):
    given = {"--norm-epsilon": epsilon, "--hf-checkpoint": None, "--load": f"/models/{name}"}
    assert not [f for f in launch(MLA, given).findings if f.id == "not-the-card" and "eps" in f.detail]
    other = given | {"--norm-epsilon": "1e-3"}
    assert cards.named(launch(MLA, other).args)[1]["eps"] == float(epsilon)


OF_A_PORT = "--use-fused-rmsnorm --swap-optimizer --tokenizer-name-or-path x --tokenizer-type PretrainedFromHF --spec mindspeed_llm.a b"


def test_a_port_to_another_device_is_judged_by_what_is_its_own():
    """Each of its flags was a failure, and Megatron's checks of its layout."""
    other = lint(
        f"source /usr/local/Ascend/ascend-toolkit/set_env.sh\npython pretrain_gpt.py {DESCRIBED} {OF_A_PORT} --fp16 --bf16"
    )
    assert not [f for f in other.findings if f.severity == FAIL]
    assert "--tokenizer-type PretrainedFromHF" in report.text(other)
    documents = f"{DESCRIBED} --reset-attention-mask --attention-backend flash"
    ported = ids(lint(f"source /usr/local/Ascend/ascend-toolkit/set_env.sh\npython t.py {documents} {OF_A_PORT}"))
    assert not ported["documents-not-apart"] and ids(lint(f"python t.py {documents}"))["documents-not-apart"]
    same = ids(lint(f"python pretrain_gpt.py {DESCRIBED} --tokenizer-type PretrainedFromHF --fp16 --bf16"))
    assert same["bad-value"] and same["two-precisions"]


def test_what_flags_of_deepspeeds_megatron_decide_is_not_told_as_megatrons():
    """A model with one expert is dense there; heads and lengths have names of its own."""
    own = "--num-key-value-heads 4 --num-experts 1 --lr-warmup-tokens 9 --lr-decay-tokens 9 --train-tokens 9 --train-samples 7"
    text = report.text(lint(f"torchrun pretrain_gpt.py {DESCRIBED} {own} --zero-stage 1"))
    assert "heads, key/value heads ? (`--num-key-value-heads`)" in text and "8 MLP" in text and "MoE" not in text
    assert "schedule     ?, warm-up ?, decay over ?" in text
    theirs = own.replace("num-key-value-heads", "group-query-attention --num-query-groups").replace("tokens", "samples")
    text = report.text(lint(f"torchrun pretrain_gpt.py {DESCRIBED} {theirs}"))
    assert "GQA: 16 heads of 64, 4 key/value heads" in text and "8 MoE" in text
    assert "warm-up 9 samples, decay over 9 samples" in text


def test_a_batch_by_the_name_of_megatron_1_lacks_no_batch():
    """What is gone says what to write; that it is not written yet is no second finding."""
    flags = {f.flag for f in lint(f"torchrun pretrain_gpt.py {DESCRIBED} --batch-size 4").findings}
    assert "--batch-size" in flags and "without --micro-batch-size" not in flags and "without --lr" in flags


LLAMA70 = (
    "--num-layers 2 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --normalization RMSNorm --swiglu "
    "--rotary-base 10000 --position-embedding-type rope --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights"
)
BIASED = " ".join(words(GPT | {"--disable-bias-linear": None}))
LONGER = " ".join(words(CASES["default-beta2"][0] | {"--hidden-dropout": None, "--adam-beta2": None}))
PLAIN = LONGER.replace("RMSNorm", "LayerNorm").replace("--disable-bias-linear", "--add-qkv-bias")
SCHEDULED = "global_batch_size: 8\nstep_batch_size_schedule: '0:8'\nmicro_batch_size: 2\nseq_length: 8"
MIXTRAL = " ".join(words(MOE | {"--moe-router-topk": None, "--untie-embeddings-and-output-weights": True}))


@pytest.mark.parametrize(
    ("rule", "name", "text", "louder"),
    [
        ("default-top-k", "mixtral_8x7b.sh", f"torchrun pretrain_gpt.py {MIXTRAL}", ("mixtral", "own")),
        *((rule, "own.sh", f"torchrun t.py {PLAIN}", ("LayerNorm", "RMSNorm"))
          for rule in ("default-dropout", "default-beta2")),
        ("default-beta2", "own.sh", f"torchrun t.py {LONGER} --mock-data", ("--mock-data", "")),
        ("default-beta2", "own.sh", f"torchrun t.py {LONGER}".replace("2000", "20"), (" 20 ", " 2000 ")),
        ("bad-value", "fork.sh", f"torchrun t.py {DESCRIBED} --tokenizer-type TokenizerOfFile", ("TokenizerOf", "")),
        ("idle-flag", "fork.sh", f"torchrun t.py {DESCRIBED} --fim-rate 0.5 --tokenizer-type TokenizerFromFileWithFIM", ("FIM", "")),
        ("stray-word", "end.sh", f"torchrun t.py {DESCRIBED} \\", ("\\", "\\ ")),
        ("no-layers", "r.sh", "python pretrain_mamba.py --num-layers 8 --hybrid-mlp-ratio 1", (" --hybrid-mlp-ratio 1", "")),
        ("conflict", "c.yaml", f"language_model: {{num_layers: 2}}\n{SCHEDULED}", ("language_model", "model")),
        ("world-size", "call.sh", f"N_GPUS=${{1:-8}}\ntorchrun --nproc-per-node $N_GPUS t.py {DESCRIBED} --tensor-model-parallel-size 16",
         ("${1:-8}", "8")),
        ("removed-flag", "old.sh", f"torchrun /x/Megatron-DeepSpeed/pretrain_gpt.py {DESCRIBED} --data-impl mmap", ("-DeepSpeed", "")),
        ("removed-flag", "ds_pretrain_gpt.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --data-impl mmap", ("ds_", "")),
        ("default-bias", "gpt3_345m.sh", f"python t.py {BIASED}", ("gpt3", "own")),
        ("connections-not-one", "dgx_b200.sh",
         f"export CUDA_DEVICE_MAX_CONNECTIONS=8\ntorchrun t.py {DESCRIBED} --tensor-model-parallel-size 2", ("b200", "x")),
        ("missing-flag", "over.yaml", "model: {seq_length: 8}\ntrain: {train_iters: 2}\nddp: {bucket_size: 1}\nrng: {seed: 1}", ()),
        ("missing-flag", "m.yaml", "_target_: v.E\nseed: 1\nuse_distributed_optimizer: true", ("_target_: v.E", "lr: 1")),
        ("spec-words", "bert.yaml", "num_layers: 2\nspec: local", ("bert", "own")),
        ("not-positive", "e.sh", f"python evaluate.py {DESCRIBED} --seq-length -1", ("evaluate", "t")),
        ("unknown-variable", "l.sh", f"WIDTH=64\npython t.py {DESCRIBED} --kv-channels $SIZE", ("$SIZE", "$WIDTHS")),
        ("unknown-variable", "l.sh", f"load_options=\npython t.py {DESCRIBED} $offload_option", ("$offload", "$laod")),
        ("unknown-variable", "l.sh", f"SIZE_2=64\npython t.py {DESCRIBED} --kv-channels $SIZE_1", ("SIZE_2", "SIZE1")),
        ("unknown-variable", "l.sh", f"HEAD_SIZES=$1\npython t.py {DESCRIBED} --kv-channels ${{HEAD_SIZES%/}}", ("${HEAD_S", "${HAED_S")),
        ("world-size", "w.sh", f"torchrun --nproc-per-node 1 train.py {DESCRIBED} {OF_ANOTHER} --own-world-size 8 "
         "--tensor-model-parallel-size 2", ("--own-world-size 8", "--own-size 8")),
        ("bad-value", "tune.yaml", "optimizer: adamw\nlr: 1.0\nmodel_id: x\ncutoff_len: 3\nmax_steps: 2\n", ("adamw", "adm")),
        ("documents-not-apart", "p.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --reset-attention-mask --use-packed-params",
         ("--use-packed-params", "")),
        ("unknown-flag", "own.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --zookeeper", ("--zookeeper", "--swigloo")),
        ("missing-flag", "own.sh", f"python $CODE {DESCRIBED}", ("$CODE", "pretrain_gpt.py")),
        ("unknown-variable", "l.sh", f"M_TRAIN_ARGS=\npython t.py {DESCRIBED} $M_EXTRA_ARGS", ("EXTRA", "TRIAN")),
        ("given-twice", "s.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --save-interval 4 --save-interval 8",
         ("--save-interval", "--seed")),
        ("given-twice", "s.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --eval-iters 4 --eval-iters 8", ("--eval-iters", "--train-iters")),
        ("given-twice-runs", "s.sh", f"torchrun p.py {DESCRIBED} --eval-iters 4 --eval-iters 8", ("--eval-iters", "--save-interval")),
        ("idle-flag", "w.sh", f"torchrun t.py {DESCRIBED} --wandb-exp-name ''", ("''", "x")),
        ("idle-flag", "w.sh", f"torchrun t.py {DESCRIBED} --wgrad-deferral-limit 50", ("wgrad-deferral-limit 50", "wandb-entity x")),
        ("idle-flag", "b.sh", f"torchrun t.py {DESCRIBED} --bf16 --initial-loss-scale 4096", ("--bf16", "--loss-scale 8")),
        ("unknown-variable", "l.sh", f"SOME_ARGS=\npython t.py {DESCRIBED} --kv-channels $MY_SOME_ARGS", ("$MY_SOME", "$SO_ME")),
        ("idle-flag", "train.yaml", "system: {save_interval: 5, logging: {wandb_project: x}, checkpoint: {load: y, save: null}}\n"
         "model: {num_layers: 2, lr: 1}\ndata: {split: 1}", ("data", "dataset")),
        ("idle-flag", "c.yaml", "model: {_target_: a.P, num_layers: 2}\noptimizer: {muon_momentum: 0.5}\n", ()),
        ("stray-word", "d.py", f'"""Run\n\n    torchrun --nproc-per-node=1 x.py a.txt\n"""\nrun("{DESCRIBED}")\n', ()),
        ("bad-value", "p.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --tp-2d --recompute-method chunk", ("--tp-2d", "")),
        ("not-the-card", "llama2_70b_test.sh", f"torchrun pretrain_gpt.py {LLAMA70}", ("_test", "")),
        ("missing-flag", "m.yaml", "num_layers: 4\nhidden_size: 64\nbf16: true", ("bf16: true", "lr: 1")),
        ("overlap-param-gather", "o.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --overlap-param-gather $MORE", ("$MORE", "")),
        ("missing-flag", "run.sh", "python pretrain_retro.py --num-layers 8 --hidden-size 64", ("retro", "gpt")),
        ("removed-flag", "d.sh", f"deepspeed pretrain_gpt.py {DESCRIBED} --data-impl mmap", ("deepspeed", "torchrun")),
        ("ignored-flag", "i.yaml", "hidden_size: 8\nnum_layers: 2\nopenai_gelu: false", ("false", "true")),
        ("stray-word", "s.sh", "CKPT=<Path (e.g. /345m)>\nVOCAB=<PATH> (e.g., /v.json)\npython t.py --num-layers 2 --load $CKPT", ()),
        ("idle-flag", "rl.sh", f'A="--grpo-group-size 16 {DESCRIBED}"\n', ("\n", "\ntorchrun t.py $A")),
        ("idle-flag", "p.sh", f"torchrun t.py {DESCRIBED} --profile-step-start 3 --use-pytorch-profiler", ()),
        ("idle-flag", "p.sh", f"torchrun t.py {DESCRIBED} --split-ag", ("split-ag", "bulk-wgrad --offload-modules moe_act")),
        ("bad-value", "z.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --its-a --its-b --its-c --recompute-method chunk", ("--its-c", "")),
        ("pipeline-split", "z.sh", f"torchrun t.py {DESCRIBED} --pipeline-model-parallel-size 3 --pad-layers", ("--pad-layers", "")),
        ("default-top-k", "m.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --num-experts 8 --moe-type mixtral", ("--moe-type mixtral", "")),
        ("moe-sequence", "g.sh", f"torchrun forward_gpt.py {DESCRIBED} --num-experts 8 --tensor-model-parallel-size 2", ("forward", "p")),
        ("unknown-variable", "v.sh", f"HEAD_WIDTH=$(($1*2))\npython t.py {DESCRIBED} --kv-channels $(( $HEAD_WIDTH ))",
         ("$(( $HEAD_WIDTH ))", "$HEADWIDTH")),
        ("given-twice", "o.sh", f"A=(\n# Overrides\n--lr 2\n)\ntorchrun t.py {DESCRIBED} --lr 1 ${{A[@]}}", ("# Over", "# L")),
        ("idle-flag", "d.sh", f"torchrun t.py {DESCRIBED} --wandb-name x --wandb-project y", ("--wandb-name x", "--its-name x")),
        ("idle-flag", "n.yaml", "policy: {megatron_cfg: {optimizer: {optimizer_cpu_offload: false, optimizer_offload_fraction: 0.5}}}", ()),
        ("bad-value", "sweep.yaml", "num_layers: [4]\nhidden_size: [64]\nmoe_router_topk: [8, 16]\nlr: [0.1]", ("[4]", "4.5")),
        ("bad-value", "old.sh", f"python t.py {DESCRIBED} --warmup .01", ("--warmup", "--log-interval")),
        ("removed-flag", "d.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --checkpoint-activations --zero-stage 1", ("--zero-stage 1", "")),
        ("unknown-flag", "f.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --no-bias --data-impl a --its-b --its-c", (" --its-b --its-c", "")),
        ("bad-value", "f.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --normalization rmsnorm --its-a --its-b --its-c", ("--its-c", "")),
        ("offload-resume", "rl.sh", f"python train.py {OF_ANOTHER} --optimizer-cpu-offload --load x", ("train.py", f"t.py {DESCRIBED}")),
        ("restart-anew", "e.sh", f"python its_eval_harness.py {DESCRIBED} --save x --load x --no-load-optim", ("eval", "train_eval")),
        ("restart-anew", "e.sh", f"torchrun t {DESCRIBED} --train-iters 9 --save-interval 9 --save x --load x --finetune", ("l 9", "l 2")),
        ("restart-anew", "e.sh", f"python its_eval.py {DESCRIBED} --save x --load x --no-load-optim", ("its_eval", "retrieval")),
        ("given-twice", "e.sh", f"python evaluate.py {DESCRIBED} --num-layers -1", ("evaluate", "t")),
        ("rampup-ignored", "d.sh", f"python pretrain_g.py {DESCRIBED} --rampup-batch-size 8 8 9 --zero-stage 1", ("--zero-stage 1", "")),
        ("bad-value", "f.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --normalization rmsnorm --data-impl mmap", ("--data-impl mmap", "")),
        ("connections-leftover", "a.sh", "export HSA_ENABLE_SDMA=0 CUDA_DEVICE_MAX_CONNECTIONS=1\n"
         f"torchrun t.py {DESCRIBED} --overlap-grad-reduce", ("HSA_ENABLE_SDMA", "X")),
        ("not-the-card", "llama2_70b_like.sh", f"torchrun pretrain_gpt.py {LLAMA70}", ("_like", "")),
        ("moe-forced-balancing", "b.sh", f"torchrun t.py {DESCRIBED} --num-experts 8 --moe-router-force-load-balancing --mock-data",
         ("--mock-data", "")),
        ("spec-not-stock", "s.sh", f"python train.py {DESCRIBED} {OF_ANOTHER} --spec a.b c", (OF_ANOTHER, "")),
        ("unknown-flag", "n.sh", f"export HCCL_X=1\ntorchrun t.py {DESCRIBED} --mamba-headdim 64", ("HCCL_X", "X")),
        ("world-size", "r.sh", "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n"
         f"ray job submit -- python3 train.py {DESCRIBED} --tensor-model-parallel-size 2", ("ray job submit --", "")),
        ("companion-later", "d.sh", f"python pretrain_gpt.py {DESCRIBED} --split 9,1 --train-data-path a --zero-stage 1",
         ("--zero-stage 1", "")),
        ("bad-value", "tpu.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --distributed-backend sccl "
         + " ".join(f"--its-{c} 1" for c in "abcdef"), ("sccl", "ncll")),
        ("indivisible", "m.yml", "hidden_size: 10\nnum_attention_heads: 4\nnum_layers: 2\nattention_config: [[[mamba], 2]]\nrms_eps_: 1",
         ("attention_config: [[[mamba], 2]]", "lr: 1")),
        ("resume-learning-rate", "d.sh",
         f"python pretrain_gpt.py {DESCRIBED} --override-opt_param-scheduler --lr 1 --load x --zero-stage 1", ("--zero-stage 1", "")),
        ("bad-value", "q.yaml", "A:\n  --num-layers: 2\n  --lr: 1\n  --moe-layer-freq: \"'([0]+[1])'\"", ("--", "")),
        ("connections-leftover", "o.sh", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
         f"torchrun --nproc-per-node 1 t.py {DESCRIBED} --overlap-grad-reduce", ("node 1", "node 2")),
        ("connections-leftover", "p.sh", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
         f"python $CODE {DESCRIBED} --overlap-grad-reduce", ("$CODE", "t.py")),
        ("window-size", "v.json", '{"vision": {"hidden_size": 8, "window_size": 112}}', ()),
        ("default-positions", "x.sh", f"torchrun t.py {DESCRIBED} --num-experts 8", ("--num-experts 8", "--num-experts 8 --swiglu")),
        ("default-bias", "neox.sh", f"torchrun t.py {DESCRIBED} --swiglu", ("--swiglu", "--swiglu --normalization RMSNorm")),
        ("default-normalization", "neox.sh", f"torchrun t.py {DESCRIBED} --swiglu", ("--swiglu", "--swiglu --disable-bias-linear")),
        ("default-positions", "u.sh", f"torchrun t.py {DESCRIBED} --untie-embeddings-and-output-weights", ("--untie", "--swiglu --untie")),
        ("default-positions", "mimo.sh", f"torchrun t.py {DESCRIBED} --swiglu --model-provider vlm", ("--model-provider vlm", "")),
        ("idle-flag", "v.sh", f"torchrun t.py {DESCRIBED} --tokenizer-type Llama2Tokenizer --vocab-size 64000", ()),
        ("not-positive", "i.yaml", "model: {tensor_model_parallel_size: -1}\ntrainer: {devices: 1}", ("-1", "-2")),
        ("bad-value", "d.sh", f"python t.py {DESCRIBED} --normalization layernorm --zero-stage 1", (" --zero-stage 1", "")),
        ("unknown-flag", "e.sh", f"torchrun pretrain_t5.py {UNDERSCORED} --data_path x --lr_decay_style a --distributed_backend b", ()),
        ("default-positions", "run.sh", f"torchrun generate_text.py {DESCRIBED} --swiglu", ("generate", "own")),
        ("idle-flag", "v.sh", f"torchrun t.py {DESCRIBED} {TIK} --vocab-file x --tokenizer-model y", ("--tokenizer-model y", "")),
        *((rule, "f.sh", f"torchrun pretrain_f.py {DESCRIBED} --fim-rate 0.1 --reset-position-ids --position-embedding-type rope "
           + " ".join(f"--its-{c} 1" for c in "abcdef"), ("--its-f 1", "")) for rule in ("idle-flag", "documents-not-apart")),
        ("unknown-flag", "s.sh", f"python t.py {DESCRIBED} --its-a 1 --its-b 1 --its-c 1 --seeds 1", ("--seeds", "--seeed")),
        ("not-the-card", "llama2_70b.sh", f"torchrun t.py {LLAMA70.replace('8192', '1024')} --ffn-hidden-size 4096", ("1024", "8192")),
        *((rule, "f.sh", f"torchrun pretrain_f.py {DESCRIBED} {said} --its-a 1", (" --its-a 1", "")) for rule, said in (
            ("removed-flag", "--data-impl mmap"), ("data-sources", "--mock-data --data-path x"),
            ("experts-not-in-pattern", "--hybrid-layer-pattern *-*- --num-experts 8"),
            ("pipeline-auto-split", "--hybrid-layer-pattern *-*- --pipeline-model-parallel-size 2"))),
        ("removed-flag", "7b.yaml", f"system: {{bf16: true}}\nmodel: {PIECES}\ndata: {{legacy_tokenizer: true}}", ("data:", "rest:")),
        ("bad-value", "7b.yaml", f"model: {PIECES}\ndata: {{vocab_size: xxx}}", ("xxx", "xyz")),
        ("not-positive", "auto.yaml", f"model: {PIECES}\nauto_tuner: {{context_parallel_size: [0]}}", ("auto_tuner", "tuner")),
        ("pipeline-split", "f.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --pipeline-model-parallel-size 3 --split-spec 3,3,2",
         ("split-spec", "my-spec")),
        ("default-ffn", "f.sh", f"torchrun t.py {WITHOUT_FFN} --swiglu --multiple-of 256", ("--multiple-of", "--many-of")),
        ("companion-later", "f.sh", f"torchrun pretrain_gpt_f.py {DESCRIBED} --train-data-path x --split 1,0,0", ("_gpt_f", "_gpt")),
        ("idle-flag", "v.sh", f"torchrun -m verl.trainer.main_ppo {OPTIM}.optimizer_offload_fraction=0 {OPTIM}.optimizer_cpu_offload=False",
         ()),
        ("default-balancing", "f.sh", f"torchrun t.py {DESCRIBED} --swiglu --num-experts 8 --moe-router-force-load-balancing",
         (" --moe-router-force-load-balancing", "")),
        ("not-the-card", "llama2_70b.sh", f"torchrun t.py {LLAMA70} --kv-channels 128".replace("8192", "7168").replace("s 64", "s 56"),
         ("heads 56", "heads 64")),
        ("bad-value", "r.sh", f"ray job submit -- python3 train.py {DESCRIBED} --moe-layer-freq \"'([1]*8)'\"", ("ray job submit --", "")),
        ("bad-value", "r.sh", f"ray job submit -- python3 train.py {DESCRIBED} --moe-layer-freq \"'([1]*8)'\"",
         ("\"'([1]*8)'\"", "'\"([1]*8)\"'")),
        ("pattern-symbol", "n.yaml", 'A:\n  --num-layers: 2\n  --lr: 1\n  --hybrid-layer-pattern: \\"M*\\"', ('"M', '"?M')),
        ("fp8-flags-ignored", "f.sh", f"torchrun t.py {DESCRIBED} --first-last-layers-bf16 --fp4-format e2m1", ("--fp4-format e2m1", "")),
        *((rule, "f.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --num-experts 8 {said} --moe-own-routing", (" --moe-own-routing", ""))
          for rule, said in (("moe-top-1", "--moe-router-topk 1"),
                             ("moe-no-balancing", "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0"))),
        ("idle-flag", "s.sh", f"torchrun t.py {DESCRIBED} --load x --save-interval 1000000", ("1000000", "1000")),
        ("unknown-variable", "r.py", "def recipe():\n    cfg.model.num_layers = f()\n    cfg.model.hidden_size = 64", ()),
        ("bad-value", "adapter.sh", "A=\"--num-layers 2 --hidden-size 64 --recompute-granularity 'full'\"", ("'full'", "'ful'")),
        ("bad-value", "adapter.sh", "A='--num-layers 2 --hidden-size 64 --rotary-base 1e6 --special-file x'", ("--special-file x", "")),
        ("fp32", "f.sh", f"torchrun t.py {DESCRIBED} --lr 1 --micro-batch-size 1 --precision 32", ("--precision 32", "")),
        ("unknown-variable", "v.sh", f"MIN_LR=1\npython t.py {DESCRIBED} --tensorboard-dir x_$MINLR", ("--tensorboard-dir", "--save")),
        ("connections-leftover", "p.sh", "export CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=${TP:-1}\n"
         f"python t.py {DESCRIBED} --overlap-grad-reduce --tensor-model-parallel-size $TP", ("TP=${TP:-1}", "TP=1")),
        ("bad-value", "l.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --tokenizer-type FromHF --tokenizer-dir x", ("--tokenizer-dir x", "")),
        ("flex-ignored", "p.yaml", f"model: {PIECES}\nmoe: {{num_experts: 8, moe_token_dispatcher_type: alltoall, "
         "moe_flex_dispatcher_backend: deepep, use_turbo_deepep: true}",
         ("turbo_deepep", "turbo_mlp")),
        ("given-twice", "w.sh", f"torchrun pretrain_gpt.py {DESCRIBED} --train-iters 5000 --train-iters 100", ("iters 100", "iters 1000")),
        ("restart-anew", "w.sh", f"S='PATH TO SAVE'; torchrun t.py {DESCRIBED} --save $S --load PATH --finetune", ("PATH", "ckpt")),
        ("spec-not-stock", "s.sh", f"python train.py {DESCRIBED} --its-own 1 --spec a.b c", ("--its-own 1", "")),
    ],
)  # fmt: skip
def test_what_nobody_who_starts_it_could_mend_is_no_finding(rule, name, text, louder):
    assert rule not in ids(lint(text, name))
    assert not louder or rule in ids(lint(text.replace(*louder), name.replace(*louder)))


def test_one_cause_is_one_finding():
    text = f"torchrun t.py {DESCRIBED} --position-embedding-type rope --reset-position-ids --reset-attention-mask"
    (found,) = (f for f in lint(text, "x.sh").findings if f.id == "documents-not-apart")
    assert found.flag == "--reset-attention-mask --reset-position-ids" and "takes no mask; `--position" in found.detail
    text = f"TRAIN_ITERS=3\ntorchrun t.py {DESCRIBED} --save a-$TRAIN_ITER --tensorboard-dir b-$TRAIN_ITER"
    assert ids(lint(text, "x.sh"))["unknown-variable"] == 1
    text = f"torchrun t.py {LLAMA70} --group-query-attention --num-query-groups 8".replace(" --disable-bias-linear", "")
    assert ids(lint(text, "llama2_70b.sh"))["not-the-card"] == 1


def test_flags_of_an_array_are_no_value_of_the_flag_before():
    """slime's scripts have `--colocate ${MODEL_ARGS[@]}`, and MODEL_ARGS in another file: its model was Megatron's default."""
    text = "source models/x.sh\npython train.py --colocate ${MODEL_ARGS[@]} --rollout-size 8 --its-a 2 --lr 1e-6"
    found = lint(text, "x.sh")
    assert any("flags may stand in $MODEL_ARGS" in note for note in describe.notes(found.args, found.model))
    assert dict(describe.rows(found.args, found.model))["activation"] == "?"


def test_a_table_of_names_starts_nothing():
    with pytest.raises(Refused, match="says `num_layers`, `hidden_size` and `rotary_base` by names"):
        lint("map: {num_layers: num_hidden_layers, hidden_size: n_embd, rotary_base: rope_theta}", "cfg.yaml")


def test_a_text_for_people_starts_nothing():
    text = "recompute_num_layers: Of full recompute, the layers of each\nrecompute_method: Either uniform, for all of them, or block"
    with pytest.raises(Refused, match="tells of `recompute_num_layers` and `recompute_method` in sentences"):
        lint(text, "card.yaml")
    assert "bad-value" in ids(lint(text.replace("Either uniform, for all of them, or block", "uniform"), "card.yaml"))


def test_a_launch_where_defaults_do_not_lead_is_told_from_none():
    with pytest.raises(Refused, match="1 stand where its own defaults do not lead"):
        lint("M=${M:-no}\nif [ $M = yes ]; then\n  python t.py --num-layers 2\nfi", "t.sh")


def test_layers_without_transformer_engine_have_no_fp8():
    local = {"--fp8-format": "hybrid", "--transformer-impl": "local"}
    assert ids(launch(GPT, local))["fp8-flags-ignored"] and not ids(launch(HYBRID, local))["fp8-flags-ignored"]


def test_what_a_program_works_out_is_a_note():
    found = lint("def recipe():\n    cfg.model.num_layers = f()\n    cfg.model.hidden_size = 64", "r.py")
    assert "worked out by the program where it runs, and open here: num_layers=$(f())" in report.text(found)


@pytest.mark.parametrize("value", ["{{ cluster.tp }}", "<TP>", "{tp}", "%(tp)s"])
def test_a_templates_value_is_open(value):
    found = lint(f"pretrain_gpt.py {DESCRIBED}\n--num-query-groups '{value}'".replace("pretrain_gpt.py", ""))
    assert not ids(found)["bad-value"] and dict(found.args.open_values()).keys() == {"num_query_groups"}
    assert "the text does not decide what these hang on, and they are open: --num-query-groups (" in report.text(found)
    assert "bad-value" in ids(lint(f"{DESCRIBED} --num-query-groups two"))


def test_gpus_that_are_a_default_of_the_script_do_not_fail_a_layout():
    text = (
        "NNODES=${WORLD_SIZE:-1}\ntorchrun --nproc-per-node 8 --nnodes $NNODES t.py "
        + DESCRIBED
        + " --pipeline-model-parallel-size 12"
    )
    assert (found := ids(lint(f"{text} --num-experts 8")))["world-size-unset"] == 1 and not found["world-size"]
    fits = lint(text.replace("size 12", "size 16"))  # on two such nodes
    assert not ids(fits).keys() & {"world-size-unset", "world-size"} and "the layout asks for 16 GPUs" in report.text(
        fits
    )
    changed = text.replace("${WORLD_SIZE:-1}", "1  # Change for multinode config")
    assert ids(lint(changed))["world-size-unset"]
    assert (
        ids(lint(text, gpus=None))["world-size-unset"]
        and ids(lint(text.replace("${WORLD_SIZE:-1}", "1")))["world-size"]
    )


def test_a_flag_of_what_is_logged_that_is_given_twice_is_no_other_model():
    assert not ids(lint(f"{DESCRIBED} --log-interval 1 --log-interval 2"))["given-twice"]
    assert ids(lint(f"{DESCRIBED} --hidden-size 1024 --hidden-size 2048"))["given-twice"]
    runs = ids(lint(f"{DESCRIBED} --moe-token-dispatcher-type alltoall --moe-token-dispatcher-type flex"))
    assert runs["given-twice-runs"] and not runs["given-twice"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"--pipeline-model-parallel-size": "2", "--num-virtual-stages-per-pipeline-rank": "-1"}, "not-positive"),
        ({"--pipeline-model-parallel-size": "1000000007"}, "pipeline-split"),  # a list of as many was built
        ({"--rotary-percent": "nan"}, "rope-columns"),
        ({"--rotary-percent": "inf"}, "rope-columns"),
        ({"--rotary-percent": "0.01"}, "rope-share-odd"),  # no column: nothing stops, nothing is turned
        (
            {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "0"},
            "not-positive",
        ),
        ({"--log-interval": "0"}, "not-positive"),
        ({"--eval-interval": "0"}, "not-positive"),
    ],
    ids=str,
)
def test_a_number_that_no_run_stands_is_a_finding_and_no_traceback(change, rule):
    found = launch(GPT, change)
    assert ids(found)[rule] == 1 and report.text(found)


@pytest.mark.parametrize(
    "change",
    [
        {"--position-embedding-type": "learned_absolute", "--rotary-base": "0"},
        {"--eval-interval": "0", "--full-validation": True},
        {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "0"},
    ],
    ids=str,
)
def test_a_size_of_nothing_that_nothing_reads_does_not_fail(change):
    assert not ids(launch(GPT, change))["not-positive"]


def test_a_value_that_stands_in_two_variables_is_told_once():
    assert ids(lint("A='--num-layers 2 --hidden-size 64 --rotary-base ten'\nB=\"$A --lr 1\""))["bad-value"] == 1


def test_a_rate_below_a_constant_one_is_noted_and_no_finding():
    """It stands in launches whose schedule was changed, and asks nobody to do anything."""
    found = lint(f"torchrun pretrain_gpt.py {DESCRIBED} --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant")
    assert not [f for f in found.findings if "--min-lr" in f.flag]
    assert any("--min-lr 1e-5 wants" in note for note in describe.notes(found.args, found.model))


@pytest.mark.parametrize(
    "name", ["bench.sh", "run_benchmark.sh", "profile-gpt.sh", "x/llama_perf.sh", "gpt_test.sh", "debug.sh"]
)
def test_a_script_that_measures_is_asked_for_nothing_that_only_a_kept_run_wants(name):
    newer = "--swiglu --normalization RMSNorm --position-embedding-type rope"
    text = f"torchrun pretrain_gpt.py {DESCRIBED} {newer} --save a --load a --finetune --train-iters 2000 --lr-decay-iters 20000"
    both = [lint(text, one) for one in ("benchley/perform.sh", name)]
    kept, measured = (Counter(f.id for f in found.findings) for found in both)
    assert set(kept - measured) == {
        "fp32",
        "default-beta2",
        "default-bias",
        "default-dropout",
        "restart-anew",
        "save-interval",
        "schedule-apart",
    }
    noted = [
        any("a benchmark or a test by its file's name" in n for n in describe.notes(f.args, f.model)) for f in both
    ]
    assert noted == [False, True]


def test_what_a_flag_with_underscores_would_say_is_open():
    """Beside --pipeline_model_parallel_size 2, which Megatron's parser stops at, a batch was called wrong for one stage."""
    line = f"{DESCRIBED} --pipeline_model_parallel_size 2 --micro-batch-size 16 --global-batch-size 32"
    found = lint(f"torchrun --nproc-per-node 4 pretrain_gpt.py {line}")
    assert "unknown-flag" in ids(found) and not {"batch", "world-size"} & set(ids(found))
    assert "pipeline ?" in dict(describe.rows(found.args, found.model))["layout"]


@pytest.mark.parametrize(("base", "fails"), [("1000000.0", False), ("1000000.5", True)])
def test_flagscale_takes_a_whole_number_with_a_point(base, fails):
    text = f"system:\n  precision: {{bf16: true}}\nmodel:\n  num_layers: 2\n  hidden_size: 64\n  rotary_base: {base}\ndata:\n  split: 1\n"
    assert ("bad-value" in ids(lint(text, "m.yaml"))) is fails
