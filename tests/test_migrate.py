"""Keys that moved: records are read with today's, and a person's files are told them."""

import contextlib
import copy
import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from presets import lowered

from launch.record import compare, report
from nam_megatron import migrate
from nam_megatron.blocks.kinds import KINDS, Executing
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.judge import same as computation
from nam_megatron.recipe import from_tree, load, to_tree
from nam_megatron.schema import configs

RECEIPTS = sorted((Path(__file__).parent.parent / "receipts").rglob("receipt.json"))
FUSED = "nam56r_fused"


def before(tree: dict) -> dict:
    """A plan's tree as it was written when what executes lay beside what computes, and the keys since then were not."""
    old = copy.deepcopy(tree)
    names = {new: past for past, new in migrate.MOVED.items()}
    for kind, keys in old["recipe"].pop("execution").items():
        of_then = {key: value for key, value in keys.items() if f"execution.{kind}.{key}" in names}
        old["recipe"]["model"]["blocks"][kind] |= of_then
    for setting in old["settings"]:
        setting["key"] = names.get(setting["key"], setting["key"])
    return old


def test_where_a_key_lies_says_whether_it_computes():
    """`model.family` is a name, and neither."""
    for path, config in configs():
        for name in config.model_fields:
            executes = bool(config.row(name).executes)
            if path.startswith("model.") and f"{path}{name}" != "model.family":
                assert not executes, path + name
            if path.startswith("execution.") and path != "execution.":
                assert executes, path + name
    assert set(Executing.model_fields) == {kind for kind, block in KINDS.items() if block.keys(executes=True)}


@pytest.mark.parametrize("name", [FUSED, "deepseek_v3_2", "nemotron_3_nano_30b_a3b"])
def test_a_plan_of_before_is_the_plan_of_now(name, tmp_path):
    now = json.loads(argv.plan_json(lowered(name)))
    (tmp_path / "plan.json").write_text(json.dumps(before(now)))
    assert argv.load_plan(tmp_path / "plan.json").plan.recipe == lowered(name).plan.recipe
    assert list(computation.differences(computation.read(tmp_path / "plan.json"), now)) == []
    other = copy.deepcopy(now)
    other["recipe"]["execution"] |= {"moe": {**now["recipe"]["execution"]["moe"], "permute_fusion": "other"}}
    (found,) = computation.differences(computation.read(tmp_path / "plan.json"), other)
    assert (found.key, found.computes) == ("execution.moe.permute_fusion", False)


def test_a_cpus_plan_of_before_demanded_what_gpus_read(tmp_path):
    tree = json.loads(argv.plan_json(lowered("nam56r_smoke", "cluster=cpu")))
    tree["env"] |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NVTE_NORM_FWD_USE_CUDNN": None}
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    assert argv.load_plan(tmp_path / "plan.json").env


def test_an_fsdps_plan_of_before_had_gradients_in_bf16():
    """Whatever its recipe said: nothing that Megatron-FSDP reads told it of fp32. Resuming and comparing know it."""
    lowering = lowered("nam56r_native_dp", "+overlay=fsdp_ep")
    tree = json.loads(argv.plan_json(lowering))
    old = {**tree, "settings": [s for s in tree["settings"] if s["name"] != "megatron_fsdp_main_grads_dtype"]}
    assert migrate.plan(tree)["recipe"] == tree["recipe"]
    (found,) = (d for d in computation.differences(migrate.plan(old), tree) if d.computes)
    assert (found.key, found.before, found.after) == ("precision.grad_reduce", "bf16", "fp32")
    one, other = ({"run": name, **said, "recipe": tree["recipe"]} for name, said in (("1", {}), ("2", {"means": 1})))
    rows = dict(compare.differences([one, other]))["changes the computation"]
    assert [key for key, _ in rows] == ["recipe.precision.grad_reduce"]
    shown = ["".join(report._settings(side)) for side in (one, other)]
    assert [text.count("<td>recipe.precision.grad_reduce</td><td>bf16</td>") for text in shown] == [1, 0]


def test_a_record_from_before_a_key_has_what_it_meant_by_saying_nothing():
    tree = to_tree(lowered(FUSED).plan.recipe)
    old = before({"recipe": tree, "settings": []})["recipe"]
    for name in ("strided_norm", "padded_projection", "strided"):
        old["model"]["blocks"].get("mamba2", {}).pop(name, None)
    old["model"]["blocks"]["m2rnn"].pop("padded_projection")
    assert from_tree(old).execution.m2rnn.padded_projection is False


def test_every_receipt_has_todays_keys_alone():
    known = {f"{path}{name}" for path, config in configs() for name in config.model_fields}
    recipes = [json.loads(path.read_text())["recipe"] for path in RECEIPTS]
    assert any("execution" not in recipe for recipe in recipes)
    for recipe in map(migrate.recipe, recipes):
        model = compare.flat(recipe["model"]["blocks"], "model.blocks") | compare.flat(recipe["execution"], "execution")
        assert not {key for key, value in model.items() if value != {}} - known
        assert not set(migrate.left(recipe))


def test_a_receipt_of_before_is_compared_with_one_of_now():
    tree = json.loads(argv.plan_json(lowered(FUSED)))
    receipts = [{"recipe": tree["recipe"]}, {"recipe": before(tree)["recipe"]}]
    assert [rows for _, rows in compare.differences(receipts)] == [[], []]
    receipts[1]["recipe"]["model"]["blocks"]["moe"]["dispatcher"] = "alltoall"
    assert [[row[0] for row in rows] for _, rows in compare.differences(receipts)] == [
        [],
        ["recipe.execution.moe.dispatcher"],
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["model.blocks.moe.dispatcher=local"],
        ["+model.blocks.moe.dispatcher=local"],
        ["~model.blocks.moe.dispatcher"],
        ["model.blocks.moe={dispatcher: local}"],
    ],
)
def test_a_word_of_before_is_told_todays(words):
    with pytest.raises(Refused, match="lies in `execution` now") as refused:
        load("nam56r", words)
    (problem,) = refused.value.problems
    assert problem.law == "key-moved" and "`execution.moe.dispatcher`" in problem.hint


@pytest.mark.parametrize("sign", ["", "+", "++", "~"])
def test_a_recorded_word_keeps_what_it_does(sign):
    for old, new in ("model.blocks.moe.dispatcher", "execution.moe.dispatcher"), ("optim.lr", "optim.lr"):
        assert migrate.word(f"{sign}{old}=a=b") == f"{sign}{new}=a=b" and migrate.word(f"{sign}{old}") == f"{sign}{new}"


MINE = """# @package _global_
defaults:
  - nam56r
  - _self_
preset: {name: mine}
model:
  blocks:
    moe: {experts: 8, dispatcher: local, top_k: 2, permute_fusion: true}   # two of each
    mamba3:
      state_dim: 64  # small
      # in pieces
      head_pieces: 2
    m2rnn: {padded_projection: true}
schedule: {train_steps: 100}
"""


def test_a_preset_of_before_is_refused_and_printed_anew(tmp_path, capsys):
    (tmp_path / "preset").mkdir()
    file = tmp_path / "preset" / "mine.yaml"
    file.write_text(MINE)
    with pytest.raises(Refused) as refused:
        load("mine", [f"hydra.searchpath=[{tmp_path}]"])
    assert {p.key for p in refused.value.problems} >= {"model.blocks.moe.dispatcher", "model.blocks.mamba3.head_pieces"}
    assert "mine.yaml:8" in refused.value.render() and "`nam migrate FILE`" in refused.value.render()
    assert migrate.command([str(file)]) == 0
    printed = capsys.readouterr().out
    assert "  # two of each" in printed and "# small" in printed
    file.write_text(printed)
    found = translate(load("mine", [f"hydra.searchpath=[{tmp_path}]"])).plan.recipe.blocks
    assert (found.moe.dispatcher, found.moe.top_k, found.moe.permute_fusion) == ("local", 2, True)
    assert (found.mamba3.head_pieces, found.mamba3.state_dim, found.m2rnn.padded_projection) == (2, 64, True)
    assert migrate.text(printed, "mine.yaml") == printed


@pytest.mark.parametrize("end", ["", "\n", "\n\n# the end\n"])
@pytest.mark.parametrize("head", ["", "execution:\n  mla: {kernels: naive}\n"])
def test_what_is_left_of_a_file_is_yaml_wherever_the_key_stood(head, end):
    for text in (
        "model:\n  blocks:\n    moe: {dispatcher: local}",
        "model: {blocks: {moe: {dispatcher: local, top_k: 4}}}",
        "model: {blocks: {moe: {top_k: 4, dispatcher: local}}}",
        "model: {depth: 4, blocks: {moe: {dispatcher: local}}}",
        "model:\n  depth: 4\n  blocks:\n    moe:\n      dispatcher: local",
        'model:\n  blocks:\n    moe:\n      dispatcher: "local"  # why\n      top_k: 4',
    ):
        whole = f"{head}a: 1\n{text}{end}"
        was, now = yaml.safe_load(whole), yaml.safe_load(migrate.text(whole, "f"))
        moe = now.pop("execution")["moe"]
        assert moe == {"dispatcher": "local"} and now["a"] == 1
        left = {k: v for k, v in was["model"].get("blocks", {})["moe"].items() if k != "dispatcher"}
        assert now.get("model", {}).get("blocks", {}).get("moe", {}) == left


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("model:\n  blocks:\n    moe: {dispatcher: local}\n", {}),
        ("model:\n  blocks:\n    moe:\n      dispatcher: local\n    mlp: {a: 1}\n", {"model": {"blocks": {"mlp": {"a": 1}}}}),
        ("model:\n  blocks:\n    moe:\n      dispatcher: local\n\n  # why\n  depth: 4\n", {"model": {"depth": 4}}),
        ("model: {blocks: {moe: {top_k: 2, dispatcher: local, router_fusion: true}}}", {"model": {"blocks": {"moe": {"top_k": 2}}}}),
        ("execution: {mla: {kernels: naive}}\nmodel: {blocks: {moe: {dispatcher: local}}}", {}),
        ("execution: {}\nmodel: {blocks: {moe: {dispatcher: local}}}", {}),
        ("execution:\n    moe: {permute_fusion: true}\nmodel: {blocks: {moe: {dispatcher: local}}}", {}),
        ("execution:\n    moe:\n        permute_fusion: true\nmodel: {blocks: {moe: {dispatcher: local}}}", {}),
    ],
)  # fmt: skip
def test_what_stands_beside_a_key_that_moves_stays(text, wanted):
    printed = migrate.text(text, "f.yaml")
    now = OmegaConf.to_container(OmegaConf.create(printed))
    execution = now.pop("execution")
    assert now == wanted and execution["moe"]["dispatcher"] == "local"
    past = yaml.safe_load(text).get("execution") or {}
    assert all(execution[kind].items() >= keys.items() for kind, keys in past.items())
    assert ("# why" in printed) == ("# why" in text)


@pytest.mark.parametrize(
    "text",
    [
        "a: &d local\nmodel: {blocks: {moe: {dispatcher: *d, top_k: 2}}}",
        "model: {blocks: {moe: {dispatcher: &d local}}}\nb: *d",
        "x: &m {dispatcher: local}\nmodel:\n  blocks:\n    moe:\n      <<: *m\n      top_k: 2\n",
        "{a: 1, model: {blocks: {moe: {dispatcher: local}}}}",
        "execution: {moe: {dispatcher: alltoall}}\nmodel: {blocks: {moe: {dispatcher: local}}}",
    ],
)
def test_what_cannot_be_rewritten_is_left_to_its_writer(text):
    with pytest.raises(Refused) as refused:
        migrate.text(text, "f.yaml")
    (problem,) = refused.value.problems
    assert "`model.blocks.moe.dispatcher` to `execution.moe.dispatcher`" in problem.hint


@pytest.mark.parametrize(
    "package, inner", [("model", "blocks: {moe: {%s}}"), ("model.blocks", "moe: {%s}"), ("model.blocks.moe", "%s")]
)
def test_a_file_that_is_laid_below_a_key_is_read_there(package, inner):
    text = (
        f"# @package {package}\n{inner % 'dispatcher: local, top_k: 2'}\n"
        if "{" in inner
        else f"# @package {package}\ndispatcher: local\ntop_k: 2\n"
    )
    printed = migrate.text(text, "f.yaml")
    assert yaml.safe_load(printed) == yaml.safe_load(inner.replace("%s", "top_k: 2"))
    assert "#     dispatcher: local\n" in printed


def test_a_models_own_file_is_told_what_belongs_to_its_preset():
    printed = migrate.text("family: X\nblocks:\n  moe:\n    top_k: 2\n    dispatcher: local\n", "m.yaml")
    assert yaml.safe_load(printed) == {"family": "X", "blocks": {"moe": {"top_k": 2}}}
    assert "# execution:\n#   moe:\n#     dispatcher: local\n" in printed


def test_what_is_no_yaml_is_refused(tmp_path):
    (tmp_path / "f.yaml").write_text("a: [")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 3000)
    for name in (tmp_path / "f.yaml", tmp_path / "deep.yaml", tmp_path / "none.yaml"):
        with pytest.raises(Refused):
            migrate.command([str(name)])


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(settings=3),
        lambda tree: tree.update(settings=[3]),
        lambda tree: tree["settings"][0].update(key=[1]),
        lambda tree: tree["settings"][0].pop("key"),
        lambda tree: tree["recipe"].update(wishes=[{**WISH, "key": "model.hidden_size", "value": 8}]),
        lambda tree: tree["recipe"].update(wishes=[{**WISH, "key": "nope.x.y"}]),
    ],
)
def test_a_plan_that_was_edited_is_refused_whatever_stands_there(change, tmp_path):
    tree = json.loads(argv.plan_json(lowered(FUSED)))
    change(tree)
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(Refused):
        argv.load_plan(tmp_path / "plan.json")
    with contextlib.suppress(Refused):
        list(computation.differences(computation.read(tmp_path / "plan.json"), tree))


WISH = {"key": "execution.moe.dispatcher", "value": "local", "by": "x", "instead": "alltoall", "why": None}
