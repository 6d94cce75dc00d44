"""A recipe says nothing in vain: every key that a preset accepts changes something, or is refused.

Here: settings, environment, layers, words, budget. What only the built modules show is in tests/cpu/test_effect_modules.py.
"""

import contextlib
import json
from functools import cache
from typing import Any, get_args

import pytest
from presets import NAMES, changed, lowered, written

from nam_megatron import report
from nam_megatron.budget import text
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.judge.same import another_model, differences
from nam_megatron.recipe import Recipe, config_at, load, parsed, resolved, to_tree

# Keys that neither plan nor budget shows, and who reads them.
ELSEWHERE = {
    "preset.name": "the first line of every output, the folder of a run",
    "preset.alias_of": "the first line of every output",
    "preset.family": "compare: may two runs be compared",
    "preset.about": "list=presets",
    "assumptions": "the header of every output",
    "execution.dsa.query_pieces": "the budget where sequences are long, and how many scores are held (tests/blocks/test_dsa.py)",
    "execution.moe.expert_gemm": "which experts are built (tests/cpu/test_models.py); the budget where MoE's backward pass is the peak",
    "execution.moe.fused_router_gradient": "which router is built (tests/blocks/test_router.py)",
    "precision.attention_kernels": "which core attention is built (tests/cpu/test_models.py)",
    "device.link": "the checks before a run (launch/host/gpu.py)",
    "device.gemm_floor_tflops": "the checks before a run (launch/host/sanity.py)",
    "device.allreduce_floor_gbs": "the checks before a run (launch/host/sanity.py)",
    "device.copy_gbs": "`launch scale` (launch/record/scale.py)",
    "device.headroom_gib": "budget: when it warns",
    "device.groups_gib": "the budget of a layout that has such groups",
    "cluster.pool": "compare: hosts that may be compared as one",
    "cluster.storage": "the folders of a run (launch/)",
    "cluster.processor": "what a run is started on (launch/), and the laws of a rehearsal",
    "schedule.changes": "which checkpoints a run may go on with (tests/cpu/test_resume.py)",
    "cluster.waivers": "the checks before a run (launch/host/preflight.py)",
}  # fmt: skip
# Values that stand only with others.
WITH = {
    "optim.name": {"optim.name": "muon", "feature.muon.enabled": True},
    "data.name": {"data.name": "indexed", "data.path": "/d/x", "data.split": "99,1,0", "data.tokenizer": "/t"},
    "schedule.save": {"schedule.save": "/c", "schedule.save_interval": 5},
}


def leaves(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    return [
        leaf
        for name, value in tree.items()
        for leaf in (leaves(value, f"{path}{name}.") if isinstance(value, dict) and value else [(path + name, value)])
    ]


def others(value: Any, annotation: Any) -> list[Any]:
    """Values to try in place of `value`."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found = [value + 1, 2 * value, value // 2, 16 * value, 1, 2, 3, 4, 0]
    elif isinstance(value, float):
        found = [value / 2, value * 2, 0.25]
    else:
        choices = [c for a in (annotation, *get_args(annotation)) for c in get_args(a) if isinstance(c, str)]
        found = [[c] for c in choices] + [[*value, *value]] if isinstance(value, list) else choices
        found = found or ["other", "AEMR", 5, "98,1,1"]
    return [v for v in found if v != value]


def shown(recipe: Recipe) -> tuple[Any, ...]:
    lowering = translate(recipe)
    return argv.words(lowering), lowering.env, lowering.plan.layers, report.plan_text(lowering)


@cache
def unchanged(name: str) -> tuple[Any, ...]:
    return (*shown(load(name)), text.golden(lowered(name)))


def idle(name: str, key: str, value: Any) -> list[Any]:
    """Values at `key` that are taken and change nothing."""
    *parents, last = key.split(".")
    config = config_at(parents)
    annotation = config.model_fields[last].annotation if config and last in config.model_fields else None
    silent = []
    for other in [WITH[key]] if key in WITH else [{key: v} for v in others(value, annotation)]:
        with contextlib.suppress(Refused):
            recipe = changed(name, other)
            now = shown(recipe)
            if now != unchanged(name)[:-1] or text.golden(translate(recipe)) != unchanged(name)[-1]:
                return []
            silent.append(other)
    return silent


@pytest.mark.few("nam56r_fused")
@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_preset_does_something_or_is_refused(name):
    told = [
        (key, value)
        for key, value in leaves(to_tree(load(name)))
        if not any(f"{key}.".startswith(f"{k}.") for k in ELSEWHERE)
    ]
    assert {key: found for key, value in told if (found := idle(name, key, value))} == {}


@pytest.mark.parametrize("name", ["nam56r", "nam56r_native_dp", "nam52_h200_dense_ref_v1"])
def test_what_does_not_stand_cannot_be_said(name):
    """Every key that conf/ writes out and the plan leaves out is refused when a person says it, at its own value too."""
    as_it_is, whole = to_tree(load(name)), parsed(written(name))
    standing = dict(leaves(as_it_is))
    full = {
        k: v
        for k, v in leaves(written(name))
        if k not in standing and not k.startswith(("assumptions", "hydra", "model.letters"))
    }
    assert len(full) > 30
    for key, value in full.items():
        *parents, last = key.split(".")
        with contextlib.suppress(Refused):
            recipe = resolved(whole, lambda said, key=key: said == key or key.startswith(f"{said}."))
            on_switch = config_at(parents) is not None and getattr(config_at(parents), "switch", None) == last
            assert on_switch, f"{key}={value} is taken in silence"
            assert to_tree(recipe) == as_it_is


# The leaks of the first inspection, each as it was typed.
LEAKS = {
    "a kind that does not stand": ("nam56r", "model.blocks.attention.query_groups=4", "model.blocks.attention", "no layer is GQA"),
    "another": ("nam56r_native_dp", "model.blocks.mla.q_lora_rank=32", "model.blocks.mla", "no layer is MLA"),
    "a feature that is off": ("nam56r", "feature.muon.momentum=0.9", "feature.muon.momentum", "`momentum` of a feature that is off"),
    "fill-in-the-middle that is off": ("nam56r", "feature.fim.rate=0.9", "feature.fim.rate", "of a feature that is off"),
    "a decay that has no end": ("nam56r", "optim.decay=constant optim.min_lr=1e-5", "optim.min_lr", "nothing reads this"),
    "no layer has that width": ("nam56r_native_dp", "model.ffn_hidden_size=1024", "model.ffn_hidden_size", "no layer is a dense MLP"),
    "dropout that DSA has not": ("nam56r", "model.attention_dropout=0.1", "model.attention_dropout", "DSA has no dropout but 0"),
    "an epsilon of Mamba-2": ("nam56r_native_dp", "model.norm_epsilon=1e-3", "model.norm_epsilon", "Mamba-2 has no epsilon but 1e-05"),
    "a pattern that is cut": ("nam56r", f"model.pattern={'AEMR' * 14}AEM", "model.pattern", "the last 7 would be cut off"),
    "bf16 layers without them": ("nam56r_native_dp_fp8", "feature.fp8.bf16_layers_at_start=2", "feature.fp8.bf16_layers_at_start",
                                "no layer stays in bf16"),
    "a base of angles that are none": ("nam56r_native_dp", "model.blocks.attention.position_embedding=none model.rotary_base=10000",
                                       "model.rotary_base", "attention has no position embedding"),
    "evaluations that are none": ("nam56r", "schedule.eval_interval=7", "schedule.eval_interval", "there are no evaluations"),
    "Muon's split of what MLA has not": ("nam56r", "optim=muon feature.muon.split_qkv=false", "feature.muon.split_qkv",
                                        "nothing reads this"),
    "Muon's shares of one rank": ("nam56r_native_dp", "optim=muon feature.muon.tp_mode=distributed", "feature.muon.tp_mode",
                                  "no matrix is shared"),
    "positions of no attention": ("nam56r_native_dp", "model.pattern=EMEM model.rotary_base=10007", "model.rotary_base",
                                  "no layer is attention"),
    "a Blackwell": ("nam56r", "device.name=b200 device.capability=[10,0]", "device.capability", "10.0 is not served"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEAKS.values(), ids=LEAKS)
def test_a_leak_is_stopped(case):
    name, typed, key, said = case
    with pytest.raises(Refused) as refused:
        translate(load(name, typed.split()))
    assert [p.key for p in refused.value.problems] == [key]
    assert said in refused.value.problems[0].message


SHARED = ("lane=nemo_native", "cluster.gpus_per_node=4")
BALANCED = "model.blocks.moe.balancing=global_aux_loss"
COMPUTES = {
    "Muon by shares": (("optim=muon",), ("optim=muon", *SHARED), {"parallel.tensor"}),
    "Muon whole": (("optim=muon",), ("optim=muon", "feature.muon.tp_mode=duplicated", *SHARED), set()),
    "places of an expert": (("model.blocks.moe.capacity_factor=1.5",), ("model.blocks.moe.capacity_factor=1.5", *SHARED),
                            {"parallel.tensor", "parallel.sequence"}),
    "places of an expert along a sequence": (("model.blocks.moe.capacity_factor=1.5",),
                                             ("model.blocks.moe.capacity_factor=1.5", "parallel.context=2"), {"parallel.context"}),
    "experts' Muon by shares": (("optim=muon",), ("optim=muon", *SHARED, "parallel.expert_tensor=2"),
                                {"parallel.tensor", "parallel.expert_tensor"}),
    "balance against all ranks": ((BALANCED,), (BALANCED, "cluster=h200_4"), {"cluster.gpus_per_node"}),
    "neither": ((), SHARED, set()),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("case", COMPUTES.values(), ids=COMPUTES)
def test_a_layout_that_decides_what_is_computed_is_no_other_order_of_sums(case):
    *sides, expected = case
    trees = [json.loads(argv.plan_json(lowered("nam56r_native_dp", *words))) for words in sides]
    assert {d.key for d in differences(*trees) if d.computes} == expected


def test_weights_with_other_depths_of_token_prediction_are_another_models():
    """But for those whose depths are left behind."""
    trees = [json.loads(argv.plan_json(lowered("nam56r", f"feature.mtp.depths={n}"))) for n in range(3)]
    other = {(a, b) for a in range(3) for b in range(3) if [*another_model(trees[a], trees[b])]}
    assert other == {(0, 1), (0, 2), (1, 2), (2, 1)}


def test_a_preset_that_configures_other_kinds_than_it_has_is_refused(tmp_path):
    """What became MLA, MoE and Mamba-3 without a word: only blocks are set, no letter is."""
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - nam56r\n  - _self_\npreset: {name: mine}\n"
        "model:\n  blocks:\n    attention: {query_groups: 4}\n    mamba2: {heads: 112}\n"
    )
    with pytest.raises(Refused) as refused:
        load("mine", [f"hydra.searchpath=[file://{tmp_path}]"])
    assert {p.key for p in refused.value.problems} == {"model.blocks.attention", "model.blocks.mamba2"}
    text = refused.value.render()
    assert (
        "mine.yaml:8" in text
        and "`model.letters.A=attention`" in text
        and "`lane.blocks.M=mamba2 lane.name=NAME`" in text
    )


def test_a_presets_word_can_be_taken_back():
    """By switching its feature off, or with Hydra's `~`; what is typed for a feature that is off stays refused."""
    fp8 = "nam56r_native_dp_fp8"
    assert lowered(fp8, "feature.cuda_graphs.impl=none").plan.recipe.feature.cuda_graphs is None
    assert lowered(fp8, "~feature.cuda_graphs").plan.recipe == lowered(fp8, "feature.cuda_graphs.impl=none").plan.recipe
    with pytest.raises(Refused, match="`modules` of a feature that is off"):
        load(fp8, ["feature.cuda_graphs.impl=none", "feature.cuda_graphs.modules=[attn]"])
    with pytest.raises(Refused, match="no layer is Mamba-2"):
        load(fp8, ["lane=author_dp"])
    assert load(fp8, ["lane=author_dp", "~model.blocks.mamba2"]).model.blocks.mamba2 is None


def test_words_follow_the_plan():
    """Title, identity and assumptions are of what stands, whatever the preset is called."""
    lines = list(report.header(lowered("nam56r_native_dp", "model.init_std=0.5", "model.depth=13")))
    assert lines[0] == "nam56r_native_dp: NAM56R of GQA 4, MoE 5, Mamba-2 4, bf16"
    assert not any("0.02" in line for line in lines)
    assert "pattern: AEMEAEMEAEMR once and its first 1: 13 layers" in lines
