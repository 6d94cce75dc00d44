"""The dumped flags are the installed Megatron's, and its own parser arrives at every setting of every preset."""

import argparse
import enum
import json
import shlex
from functools import cache

import pytest
from megatron.training.arguments import add_megatron_arguments
from presets import FLAGS, NAMES, check_words, lowered

from nam_megatron import installed
from nam_megatron.compile import argv
from nam_megatron.runtime import dump
from nam_megatron.targets import current
from nam_megatron.words.setting import Setting

# Further recipes that reach flags no preset has.
MORE = {
    "muon": ("nam56r_native_dp", "optim=muon"),
    "megatron_fsdp": ("nam56r_native_dp", "feature.megatron_fsdp.enabled=true"),
    "tensor and pipeline": ("nam56r_nemo_native", "parallel.pipeline=2", "parallel.expert=2"),
    "expert tensor": ("nam56r_nemo_native", "parallel.expert_tensor=2"),
    "full recompute": ("nam56r_native_dp", "feature.recompute={granularity: full, method: uniform, layers: 1}"),
    "selective recompute": ("nam56r", "feature.recompute={granularity: selective, modules: [core_attn, mla_up_proj]}"),
    "two MTP depths": ("nam56r", "feature.mtp.depths=2"),
    "edge layers in bf16": ("nam56r_native_dp_fp8", "feature.fp8.first_last_bf16=true"),
    "dense layers first": ("nam56r_native_dp", "model.letters.E=mlp", "model.pattern=EEMA"),
    "swiglu": ("nam56r_native_dp", "model.activation=swiglu"),
    "biases": ("nam56r_native_dp", "model.letters.E=mlp", "model.linear_bias=true"),
    "no shared expert": ("nam56r_native_dp", "model.blocks.moe.shared_expert_hidden_size=0"),
    "capacity": ("nam56r_native_dp", "model.blocks.moe.capacity_factor=1.25"),
    "multi-head attention": ("nam56r_native_dp", "model.blocks.attention.query_groups=56"),
    "indexed data": ("nam56r_native_dp", "data=indexed", "data.path=/d/x", "data.tokenizer=/t"),
    "checkpoints": ("nam56r_native_dp", "schedule.save=/c", "schedule.load=/c", "schedule.save_interval=50"),
}
RECIPES = {name: (name,) for name in NAMES} | MORE


@cache
def parser():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))


def plain(value):
    if isinstance(value, enum.Enum):
        return value.name
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def test_the_dump_is_the_installed_megatrons():
    assert installed.stack().megatron_core == current().pin
    assert current().flags_file.read_text() == dump.render(dump.dump())


def test_every_flag_of_the_parser_is_in_the_dump():
    live = {s for a in parser()._actions for s in a.option_strings} - {"-h", "--help"}
    assert live == set(FLAGS) | {a for f in FLAGS.values() for a in f.get("aliases", ())}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_word_is_legal(recipe):
    check_words(argv.argv(lowered(*RECIPES[recipe])))


@pytest.mark.parametrize(
    "words",
    [
        ["--hidden-sise", "8"],
        ["--hidden-size"],
        ["--hidden-size", "8", "9"],
        ["--hidden-size", "8.5"],
        ["--bf16", "true"],
        ["--lr-decay-style", "cosin"],
        ["--bf16", "--bf16"],
        ["--no-bf16"],
    ],
)
def test_the_check_of_words_objects(words):
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_words(words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatrons_parser_arrives_at_every_setting(recipe):
    """All of them, whether or not a word was needed: a pinned default that Megatron moves shows here."""
    lowering = lowered(*RECIPES[recipe])
    parsed, rest = parser().parse_known_args(argv.argv(lowering))
    assert rest == []
    for s in lowering.settings:
        got = plain(getattr(parsed, s.name))
        want = s.value if s.value is not None or got != () else ()  # an unset list
        assert got == want, s.name
        assert type(got) is type(want) or (type(got), type(want)) == (float, int), f"{s.name}: {got!r}, {want!r}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_form_says_the_same(recipe):
    """shell and lines give the words of argv; yaml gives them to tools that build the line."""
    lowering = lowered(*RECIPES[recipe])
    words = list(argv.words(lowering))
    assert argv.shell(lowering).split() == words
    assert shlex.split(argv.lines(lowering), comments=True) == words
    rebuilt = []
    for line in argv.flat_yaml(lowering).splitlines():
        flag, _, value = line.partition(": ")
        values = json.loads(value)
        said = [] if values is True else [str(v) for v in (values if isinstance(values, list) else [values])]
        rebuilt += [f"--{flag}={said[0]}"] if said and said[0].startswith("-") else [f"--{flag}", *said]
    assert rebuilt == words


def test_words_of_a_setting():
    def words(name, value):
        return current().words(Setting(name, value, "why", owner="test"))

    assert words("hidden_size", 8) == ("--hidden-size", "8")
    assert words("lr", 1e-5) == ("--lr", "1e-05")
    assert words("bf16", True) == ("--bf16",)
    assert words("bf16", False) == ()
    assert words("add_bias_linear", False) == ("--disable-bias-linear",)
    assert words("add_bias_linear", True) == ()
    assert words("apply_rope_fusion", False) == ("--no-rope-fusion",)
    assert words("recompute_modules", ("core_attn", "moe")) == ("--recompute-modules", "core_attn", "moe")
    assert words("save", None) == ()
    assert words("hybrid_layer_pattern", "--M*") == ("--hybrid-layer-pattern=--M*",)
    either = next(flag for flag in current().flags.values() if flag.action == "boolean")
    assert words(either.dest, True) == (either.name,) != words(either.dest, False)
    assert parser().parse_args(words(either.dest, False)) == parser().parse_args([f"--no-{either.name[2:]}"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 8.5),
        ("hidden_size", True),
        ("hidden_size", "8"),
        ("hidden_size", (8,)),
        ("bf16", 1),
        ("bf16", None),
        ("lr_decay_style", "cosin"),
        ("recompute_modules", "core_attn"),
        ("moe_aux_loss_coeff", ()),
        ("hidden_dropout", None),
    ],
)
def test_a_value_its_flag_cannot_say_is_our_mistake(name, value):
    """Megatron has a default for each of these, so silence would train something else."""
    with pytest.raises(AssertionError, match="test sets --"):
        current().words(Setting(name, value, "why", owner="test"))
