"""Every preset's plan and arguments, as text under review: a change that moves them shows in the diff.

`pytest tests/test_golden.py --rewrite-golden` writes them anew.
"""

import difflib
import itertools
from pathlib import Path

import pytest
from presets import ALL, NAMES, PUBLIC, lowered
from test_rows import ODD, odd

from nam_megatron import report
from nam_megatron.budget import text
from nam_megatron.compile import argv
from nam_megatron.recipe import keys_at

GOLDEN = Path(__file__).parent / "golden"
# Sizes that are all different: what two swapped ones would not survive. Their arguments are those of test_rows.py.
ODDLY = {f"odd_{name.replace(' ', '_')}": name for name in ODD}
# What no preset has, and what it takes.
LAYOUTS = {
    "layout_fsdp": ("nam56r_native_dp", "+overlay=fsdp_ep"),
    "layout_tp_sp_ep": ("nam56r_fused", "+overlay=tp_sp_ep"),
    "layout_pipeline": ("nam56r_native_dp", "cluster=h200_2x8", "parallel.pipeline=4", "parallel.virtual_pipeline=2", "+overlay=graphs"),
    "layout_capacity": ("nam56r_native_dp", "parallel.expert=4", "model.blocks.moe.capacity_factor=1.25", "model.activation=swiglu"),
    "features_all": (
        "nam56r_native_dp", "feature.mhc.streams=4", "feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=1000", "data=indexed",
        "data.path=/d/x", "data.split='99,1,0'", "data.tokenizer=/t", "feature.fim.enabled=true", "feature.fim.rate=0.3",
        "schedule.save=/c", "schedule.save_interval=5", "schedule.async_save=true",
    ),
    "keys_of_others": (
        "nam56r_native_dp", "model.activation=swiglu", "model.normalization=LayerNorm",
        "model.blocks.attention={window: 128, qkv_bias: true, output_gate: true, rotary_percent: 0.5}",
        "model.blocks.moe.shared_expert_gate=true", "model.blocks.moe.z_loss_coeff=0.001", "optim.decay=WSD", "optim.wsd_steps=100",
        "optim.wsd_shape=linear",
    ),
}  # fmt: skip


def unsaid(lowering) -> str:
    """What Megatron is not told because its parser's default is it, and must hold all the same; with the key it is read with."""
    silent = [s for s in lowering.settings if not lowering.target.words(s)]
    return "".join(f"{s.owner} {s.name} = {s.value!r} @ {s.place}\n" for s in silent)


FILES = {
    "plan.txt": report.plan_text, "args.txt": argv.lines, "unsaid.txt": unsaid, "budget.txt": text.golden, "run.sh": argv.run_script,
}  # fmt: skip
# Written whole: of others the arguments, of ours the plan, too, and all of an alias are what differs from one of these or its own.
OURS, THEIRS = "nam56r", "llama_3_8b"


def told(name: str, file: str) -> str:
    lowering, say = odd(ODDLY[name])[2] if name in ODDLY else lowered(*LAYOUTS.get(name, (name,))), FILES[file]
    alias = lowering.plan.recipe.preset.alias_of
    base = alias or (THEIRS if name in PUBLIC else OURS)
    alone = ("budget.txt", "run.sh", "plan.txt") if name in PUBLIC else ("budget.txt", "run.sh")
    if name == base or (file in alone and not alias):
        return say(lowering)
    sides = (say(side).splitlines() for side in (lowered(base), lowering))
    moved = list(difflib.unified_diff(*sides, n=0, lineterm=""))[2:]  # behind the names of the sides
    return "".join(f"{line}\n" for line in moved if line[:2] not in ("@@", "+#", "-#"))


ASKED = [
    *itertools.product(set(FILES) - {"run.sh"}, NAMES),
    *itertools.product(["plan.txt", "args.txt"], PUBLIC),
    *itertools.product(["budget.txt"], (*ODDLY, *LAYOUTS, "qwen3_next_80b_a3b")),
    *itertools.product(["args.txt", "unsaid.txt"], ("features_all", "keys_of_others", "layout_fsdp")),
    *itertools.product(["run.sh"], ("nam56r", "layout_pipeline")),
]


@pytest.mark.parametrize(("file", "name"), sorted(ASKED))
def test_preset_is_as_reviewed(name, file, rewrite_golden):
    path, text = GOLDEN / name / file, told(name, file)
    if rewrite_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: pytest tests/test_golden.py --rewrite-golden"
    assert text == path.read_text()


@pytest.mark.parametrize("name", [*NAMES, *PUBLIC, *LAYOUTS])
def test_a_setting_is_decided_by_a_key_that_there_is(name):
    lowering = lowered(*LAYOUTS.get(name, (name,)))
    for setting in lowering.settings:
        *parents, last = (setting.key or "model.depth").split(".")
        assert last in keys_at(parents), setting


def test_no_golden_without_a_preset():
    assert {p.name for p in GOLDEN.iterdir() if p.is_dir()} == {*ALL, *ODDLY, *LAYOUTS}
