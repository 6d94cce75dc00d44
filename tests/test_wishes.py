"""Overlays in any order: what they wish of kernels is granted or denied, and the plan says so."""

import itertools
import json
import random

import pytest
from presets import lowered

from nam_megatron import report
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.conf import conf_dir
from nam_megatron.errors import Refused
from nam_megatron.recipe import load, value_at

OVERLAYS = sorted(path.stem for path in (conf_dir() / "overlay").glob("*.yaml"))
PAIRS = list(itertools.combinations(OVERLAYS, 2))
TRIPLES = random.Random(50).sample(list(itertools.combinations(OVERLAYS, 3)), 12)


def outcome(preset: str, *overlays: str) -> str:
    """The plan of a preset under overlays in this order, or everything that refuses it."""
    try:
        return argv.plan_json(translate(load(preset, [f"+overlay=[{','.join(overlays)}]"])))
    except Refused as refused:
        return "\n".join(f"{problem.message} @ {problem.key}" for problem in refused.problems)


@pytest.mark.few(2)
@pytest.mark.parametrize("overlays", PAIRS, ids=" ".join)
def test_two_overlays_commute(overlays):
    assert outcome("nam56r", *overlays) == outcome("nam56r", *reversed(overlays))


@pytest.mark.slow
@pytest.mark.parametrize("overlays", TRIPLES, ids=" ".join)
def test_three_overlays_commute(overlays):
    found = {outcome("nam56r_native_dp", *order) for order in itertools.permutations(overlays)}
    assert len(found) == 1, found


def denied(preset: str, *words: str) -> dict[str, tuple[object, object, str]]:
    return {w.key: (w.value, w.instead, w.why) for w in lowered(preset, *words).plan.recipe.wishes}


def test_an_overlay_that_is_laid_twice_wishes_once():
    wishes = lowered("nam56r_fused", "+overlay=[fused,ep]").plan.recipe.wishes
    assert {wish.by for wish in wishes} == {"fused"}


def test_a_layout_denies_what_it_cannot_do_and_the_plan_says_why(tmp_path):
    assert denied("nam56r_fused") == {}
    found = denied("nam56r", "+overlay=fused", "parallel.expert=2")
    assert found.keys() == {
        "execution.moe.dispatcher", "execution.moe.expert_gemm", "execution.moe.fused_router_gradient",
    }  # fmt: skip
    value, instead, why = found["execution.moe.dispatcher"]
    assert (value, instead) == ("local", "alltoall") and "the experts are on several GPUs" in why
    lowering = lowered("nam56r", "+overlay=fused", "parallel.expert=2")
    recipe = lowering.plan.recipe
    assert all(value_at(recipe, wish.key) == wish.instead for wish in recipe.wishes)
    assert recipe.blocks.moe.permute_fusion and recipe.precision.cross_entropy == "fused"
    said = "\n".join(report.header(lowering))
    assert "overlay fused wants execution.moe.dispatcher=local, and gets alltoall: " in said
    tree = json.loads(argv.plan_json(lowering))
    assert {wish["key"] for wish in tree["recipe"]["wishes"]} == found.keys()
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    assert argv.load_plan(tmp_path / "plan.json").plan.recipe == recipe


def test_a_presets_overlay_wishes_too():
    assert denied("nam56r_fused", "parallel.expert=2").keys() >= {"execution.moe.dispatcher"}


def test_what_a_person_says_is_no_wish():
    words = ("+overlay=[fused,ep]", "execution.moe.dispatcher=local")
    with pytest.raises(Refused, match="the experts are on several GPUs"):
        translate(load("nam56r", words))
    kept = translate(load("nam56r", ["+overlay=fused", "execution.moe.dispatcher=alltoall"])).plan.recipe
    assert kept.blocks.moe.dispatcher == "alltoall"
    assert "execution.moe.dispatcher" not in {wish.key for wish in kept.wishes}


MINE = "defaults:\n  - nam56r\n  - _self_\npreset: {name: mine, alias_of: null, family: mine, about: x}\n"


def folder(path, **files: str) -> str:
    """The word for a folder with these files: GROUP__NAME."""
    for name, text in files.items():
        file = path / f"{name.replace('__', '/')}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# @package _global_\n{text}" if name.startswith(("overlay", "preset")) else text)
    return f"hydra.searchpath=[{path}]"


@pytest.mark.parametrize("first", [False, True])
def test_what_a_preset_of_ones_own_says_outlasts_an_overlay_behind_it(first, tmp_path):
    mine = MINE.replace("  - _self_\n", "  - _self_\n  - /overlay@_global_: fused\n") if first else MINE
    word = folder(tmp_path, preset__mine=f"{mine}execution: {{moe: {{dispatcher: alltoall}}}}\n")
    overlay = [] if first else ["+overlay=fused"]
    recipe = translate(load("mine", [word, *overlay])).plan.recipe
    (wish,) = (w for w in recipe.wishes if w.key == "execution.moe.dispatcher")
    assert (wish.value, wish.instead, recipe.blocks.moe.dispatcher) == ("local", "alltoall", "alltoall")
    assert wish.why.endswith("preset/mine.yaml:" + ("7" if first else "6") + " says so")
    assert recipe.blocks.moe.permute_fusion
    typed = translate(load("mine", [word, *overlay, "execution.moe.dispatcher=local"])).plan.recipe
    assert typed.blocks.moe.dispatcher == "local"


def test_kernels_that_the_command_line_chooses_by_name_outlast_an_overlay(tmp_path):
    word = folder(tmp_path, overlay__a="execution: {mla: {kernels: naive}, moe: {permute_fusion: true}}\n")
    chosen = translate(load("nam56r", [word, "+overlay=a", "execution=megatron"])).plan.recipe
    assert chosen.blocks.mla.kernels == "megatron" and chosen.blocks.moe.permute_fusion
    assert (
        translate(load("nam56r", [word, "+overlay=a", "execution=default"])).plan.recipe.blocks.mla.kernels == "naive"
    )


def test_what_is_plain_runs_on_a_cpu_whatever_a_preset_lays():
    """Also of a kind that does not stand, M's Mamba-2: its wishes are nobody's."""
    recipe = lowered("nam56r_fused", "execution=plain", "cluster=cpu").plan.recipe
    assert recipe.execution == lowered("nam56r", "execution=plain", "cluster=cpu").plan.recipe.execution
    assert "execution.moe.permute_fusion" in {wish.key for wish in recipe.wishes}


@pytest.mark.parametrize(
    "mine, overlay, key",
    [
        ("precision: {deterministic: true}", "precision: {deterministic: false}", "precision.deterministic"),
        ("execution: {moe: {dispatcher: '${lane.name}'}}", "execution: {moe: {dispatcher: local}}", "execution.moe.dispatcher"),
    ],
)  # fmt: skip
def test_what_is_no_wish_is_not_decided_by_the_order_of_files(mine, overlay, key, tmp_path):
    word = folder(tmp_path, preset__mine=f"{MINE}{mine}\n", overlay__a=f"{overlay}\n")
    with pytest.raises(Refused, match="the overlay `a` says") as refused:
        load("mine", [word, "+overlay=a"])
    (problem,) = refused.value.problems
    assert (problem.key, problem.hint) == (key, f"say which: `{key}=...`")
    value = "false" if key.startswith("precision") else "local"
    assert load("mine", [word, "+overlay=a", f"{key}={value}"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one, other",
    [
        ("execution: {moe: {dispatcher: local}}", "execution: {moe: {dispatcher: '${oc.select:nope,allgather}'}}"),
        ("execution: {moe: {dispatcher: local}}", "execution:\n  moe:\n    dispatcher: ???"),
        ("defaults: [override /optim: muon]", "defaults: [override /optim: adamw]"),
        (
            "precision: {cross_entropy: fused}\nexecution: {moe: {permute_fusion: true}}",
            "execution: {moe: {permute_fusion: false}}\nprecision: {cross_entropy: compiled}",
        ),
    ],
)  # fmt: skip
def test_overlays_of_ones_own_commute_whatever_they_are_made_of(one, other, tmp_path):
    word = folder(tmp_path, overlay__a=f"{one}\n", overlay__b=f"{other}\n")

    def of(order: str) -> str:
        try:
            return argv.plan_json(translate(load("nam56r", [word, f"+overlay=[{order}]"])))
        except Refused as refused:
            return "\n".join(f"{problem.message} @ {problem.key}" for problem in refused.problems)

    assert of("a,b") == of("b,a")


@pytest.mark.parametrize("overlays", ["fused,extras", "extras,fused"])
def test_of_two_wishes_the_later_value_stands_and_the_other_is_said(overlays):
    found = denied("nam56r", f"+overlay=[{overlays}]")
    assert found == {"execution.moe.expert_gemm": ("torch", "quack", "extras wants another")}


@pytest.mark.parametrize("order", ["a,b", "b,a"])
def test_two_layouts_that_differ_are_refused(order, tmp_path):
    (tmp_path / "overlay").mkdir()
    for name, degree in (("a", 2), ("b", 4)):
        text = f"# @package _global_\nparallel: {{expert: {degree}}}\n"
        (tmp_path / "overlay" / f"{name}.yaml").write_text(text)
    words = [f"hydra.searchpath=[{tmp_path}]", f"+overlay=[{order}]"]
    with pytest.raises(Refused) as refused:
        load("nam56r", words)
    (problem,) = refused.value.problems
    assert (problem.message, problem.key) == ("two overlays differ: `a` says 2 and `b` says 4", "parallel.expert")
    assert load("nam56r", [*words, "parallel.expert=8"]).parallel.expert == 8


def test_what_has_to_be_is_no_wish(tmp_path):
    """A run that is equal to the last bit is not traded for a kernel."""
    (tmp_path / "overlay").mkdir()
    text = "# @package _global_\nprecision: {deterministic: true}\n"
    (tmp_path / "overlay" / "exact.yaml").write_text(text)
    recipe = load("nam56r", [f"hydra.searchpath=[{tmp_path}]", "+overlay=exact", "precision.cross_entropy=compiled"])
    with pytest.raises(Refused, match="not deterministic"):
        translate(recipe)


def test_wishes_are_not_written_by_hand():
    wish = "{key: execution.moe.dispatcher, value: local, by: me, instead: alltoall, why: because}"
    with pytest.raises(Refused, match="no key of yours"):
        load("nam56r", [f"wishes=[{wish}]"])
