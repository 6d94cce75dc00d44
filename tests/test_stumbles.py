"""What people stumbled over in their first hour: each is answered with what to do about it, and what is right beside it is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import warm

from launch.record import receipt
from nam_megatron import cli
from nam_megatron.errors import Refused
from nam_megatron.lint import lint
from nam_megatron.recipe import load

NAM = Path(sys.executable).with_name("nam")
HEAD = "# @package _global_\n"
MINE = "defaults: [nam56r_smoke, _self_]\npreset: {name: mine, alias_of: null, family: mine, about: x}\n"


def nam(*words, cwd=None):
    return subprocess.run([NAM, *words], capture_output=True, text=True, timeout=600, check=False, cwd=cwd)


@pytest.fixture
def own(tmp_path):
    """own(name, text): a file in a folder of one's own, by its group's name and its own."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / "own" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + text)
        return path

    return write


def asked(tmp_path, *words):
    return warm("--config-dir", f"{tmp_path}/own", *words)


def hint_of(preset="nam56r_smoke", *words):
    with pytest.raises(Refused) as refused:
        load(preset, words)
    return refused.value.problems[0].hint


# Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["allow.mtp-tied-embeddings", "cluster.waivers.git"])
def test_a_section_that_begins_empty_was_said_where_something_was_put_into_it(key):
    section = key.rpartition(".")[0]
    tied = ["feature.mtp.depths=1", "model.tied_embeddings=true"] if section == "allow" else []
    said = warm(f"{key}=why", f"explain={section}", "conf=nam56r_smoke", *tied)
    assert f"set     command line: {key}=why" in said.out, said.err
    assert "set     conf/" in warm(f"explain={section}", "conf=nam56r_smoke").out


@pytest.mark.parametrize("key", ["allow", "cluster.waivers"])
def test_a_list_for_a_mapping_is_told_how_one_is_written(key):
    hint = hint_of("nam56r_smoke", f"{key}=[a]")
    assert f"`{key}." in hint and '="why"`' in hint


@pytest.mark.parametrize("word", ["optim.lr=interval(1e-4,3e-4)", "lane=glob(*)"])
def test_a_sweep_that_lists_no_values_is_not_told_to_be_a_sweep(word):
    ran = warm("conf=nam56r_smoke", "--multirun", word)
    assert ran.code == 2 and "add `--multirun`" not in ran.err and f"`{word.partition('=')[0]}=A,B`" in ran.err
    assert warm("conf=nam56r_smoke", "--multirun", "optim.lr=1e-4,3e-4").code == 0


def test_what_all_points_of_a_sweep_have_in_common_is_refused_once():
    ran = warm("conf=nam56r_smoke", "--multirun", "schedule.seed=1,2,3", "optim.lrr=1")
    assert ran.code == 2 and ran.err.count("error: ") == 1
    ran = warm("conf=nam56r_smoke", "--multirun", "optim.lr=-1,-2")
    assert ran.err.count("error: ") == 2


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("num_experts=8", "model.blocks.moe.experts"), ("model.num_experts=8", "model.blocks.moe.experts"),
        ("moe_router_topk=2", "model.blocks.moe.top_k"), ("weight_decay=0", "optim.weight_decay"),
    ],
)  # fmt: skip
def test_megatrons_name_of_a_key_leads_to_the_recipes(word, key):
    assert f"`{key}`" in hint_of("nam56r_smoke", word)
    load("nam56r_smoke", [f"{key}={word.partition('=')[2]}.0" if key.startswith("optim") else f"{key}=2"])


# Files of one's own --------------------------------------------------------------------------------------------------


def test_hydras_own_settings_in_a_preset_are_refused_by_line(own, tmp_path):
    preset = "defaults: [nam56r_smoke, _self_]\npreset: {name: p, about: x, alias_of: null}\n"
    own("preset/p", preset)
    assert asked(tmp_path, "conf=p").code == 0
    own("preset/p", f"{preset}hydra: {{run: {{dir: x}}}}\n")
    ran = asked(tmp_path, "conf=p")
    assert ran.code == 2 and "own/preset/p.yaml:4: nothing reads this" in ran.err


def test_overlays_in_a_circle_are_told_how_one_is_laid_within_another(own, tmp_path):
    own("overlay/a", "defaults: [/overlay@_global_: b]\noptim: {lr: 0.1}\n")
    own("overlay/b", "defaults: [/overlay@_global_: a]\noptim: {lr: 0.2}\n")
    ran = asked(tmp_path, "conf=nam56r_smoke", "+overlay=a")
    assert ran.code == 2 and "`/overlay/b@_global_`" in ran.err and "override" not in ran.err
    own("overlay/b", "optim: {lr: 0.2}\n")
    own("overlay/a", "defaults: [/overlay/b@_global_]\nschedule: {seed: 3}\n")  # as the hint has it
    ran = asked(tmp_path, "conf=nam56r_smoke", "+overlay=a")
    assert ran.code == 0 and "--lr 0.2 " in ran.out and "--seed 3 " in ran.out


@pytest.mark.parametrize(
    "words", [["conf=x"], ["conf=nam56r_smoke", "+overlay=x"], ["list=overlays"], ["list=presets"]]
)
def test_a_link_that_leads_nowhere_is_named(words, own, tmp_path):
    group = "preset" if words[0] in ("conf=x", "list=presets") else "overlay"
    link = own(f"{group}/x", "")
    link.unlink()
    link.symlink_to("gone.yaml")
    ran = asked(tmp_path, *words)
    assert ran.code == 2 and f"`{link}` is a link to `gone.yaml`, which is not there" in ran.err


def test_a_model_file_that_is_missing_is_looked_for_in_ones_own_folder(own, tmp_path):
    own("preset/p", "defaults:\n  - override /model: mine\npreset: {name: p, about: x, alias_of: null, family: p}\n")
    ran = asked(tmp_path, "conf=p")
    assert ran.code == 2 and f"one of your own would be `{tmp_path}/own/model/mine.yaml`" in ran.err


def test_a_file_in_the_place_of_a_name_is_told_where_it_belongs(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own("mine", MINE)
    for words in (["conf=mine"], ["conf=own/mine.yaml"], ["conf=own/mine"]):
        ran = asked(tmp_path, *words)
        way = f"hint: a preset is named, and not its file: move it to `{tmp_path}/own/preset/mine.yaml`, then `--config-dir"
        assert ran.code == 2 and "mine.yaml` is a file @ preset" in ran.err and way in ran.err, words
    own("preset/mine", MINE)
    (tmp_path / "own" / "mine.yaml").unlink()
    ran = asked(tmp_path, "conf=own/preset/mine.yaml")
    assert ran.code == 2 and "did you mean `mine`?" in ran.err
    assert asked(tmp_path, "conf=mine").code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{broken", "is no JSON"), ("", "is no JSON"), ('{"hidden_act": "silu"}', "has no `model_type` and `vocab_size`"),
        ('{"model_type": "llama"}', "has no `vocab_size`"),
    ],
)  # fmt: skip
def test_a_config_json_that_is_none_is_told_what_it_lacks(text, said):
    with pytest.raises(Refused, match=said) as refused:
        lint(text, "config.json")
    assert "as it was published" in refused.value.problems[0].hint
    with pytest.raises(Refused, match="no Megatron flag"):
        lint(json.dumps({"model_type": "llama"}), "flags.txt")


# Commands ------------------------------------------------------------------------------------------------------------


def test_one_of_a_list_is_the_list():
    assert cli.spelled("list", ["cluster"]) == ["list=clusters"] == cli.spelled("list", ["clusters"])
    assert "`nam list clusters`" in nam("list", "clustrs").stderr


@pytest.mark.few(2)
@pytest.mark.parametrize("words", [["data"], ["hf", "watch", "x"], ["lint"], ["generate"], ["data", "biuld", "x"]])
def test_a_wrong_word_is_refused_in_the_programs_name(words):
    ran = nam(*words)
    assert (ran.returncode, ran.stdout) == (2, "") and ran.stderr.startswith("error: ")
    assert f"hint: it is `nam {words[0]}" in ran.stderr and "python -m" not in ran.stderr


def test_a_run_is_named_by_how_its_name_begins_or_by_a_part_of_it(tmp_path):
    old = "archive/20250101T000000Z-c-3"
    for name in ("20260101T000000Z-a-1", "20260101T000001Z-b-2", old):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / receipt.FILE).write_text("{}")
    assert receipt.named("20260101T000001Z", tmp_path) == tmp_path / "20260101T000001Z-b-2"
    assert receipt.named("2025", tmp_path) == receipt.named("c-3", tmp_path) == tmp_path / old
    assert receipt.named("elsewhere/RUN", tmp_path) == Path("elsewhere/RUN")
    assert receipt.named(f"{tmp_path}/20260101T000001Z", Path("elsewhere")) == tmp_path / "20260101T000001Z-b-2"
    with pytest.raises(Refused, match="2 runs are called `2026"):
        receipt.named("2026", tmp_path)


def test_what_does_not_fit_is_told_a_way_out_that_is_one():
    ran = warm("conf=nam56r", "cluster=h200_1", "schedule.micro_batch_size=16", module="nam_megatron.budget.__main__")
    assert ran.code == 1 and "hint: `fit=micro_batch_size`" in ran.err
    ran = warm("conf=nam56r", "cluster=h200_1", "schedule.micro_batch_size=2", module="nam_megatron.budget.__main__")
    assert ran.code == 0 and "hint:" not in ran.err


def test_a_fresh_clone_misses_no_receipt():
    """What is published is a choice; what a run of one's own leaves in that folder is not."""
    ran = nam("launch", "receipts")
    assert "MISSING" not in ran.stdout, ran.stdout
