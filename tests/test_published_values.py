"""What is published of a family, and what its presets have beside that: nothing is inherited without a word."""

import pytest
import yaml
from hf_configs import CONFIGS
from presets import NAMES, lowered

from nam_megatron import published, report
from nam_megatron.budget import parameters
from nam_megatron.compile.lower import translate
from nam_megatron.judge.same import executes, flat
from nam_megatron.recipe import config_at, load, to_tree
from nam_megatron.recipe.keys import called_elsewhere, value_at
from nam_megatron.recipe.resolve import unread

TREE = yaml.safe_load(published.FILE.read_text())
# What one run has and another not: its data, its length, its seed.
OF_A_RUN = ("data.", "schedule.", "preset.", "assumptions.", "cluster.", "lane.", "allow", "model.family", "parallel.")
# Published, and another value stands in a preset of ours, which says so.
DEPARTS = {
    ("nam56r_native_dp", "lane.name"),
    ("nam56r_native_dp_fp8", "lane.name"),
    ("nam56r_native_dp_fused", "lane.name"),
}


def values(name: str) -> dict:
    """By key what the table gives for a family, read here by itself."""
    said = TREE["families"][name]
    found = values(said["same"]) if "same" in said else {}
    return found | {key: value for rows in said["published"].values() for key, value in rows.items()}


def stands(recipe) -> dict:
    left = set(unread(recipe))
    tree = flat(to_tree(recipe))
    return {k: v for k, v in tree.items() if v is not None and k not in left and not executes(k)}


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_preset_is_published_or_assumed(name):
    recipe = load(name)
    given, assumed = values(recipe.preset.family), {a.key: a.value for a in recipe.assumptions.values()}
    for key, value in stands(recipe).items():
        if key.startswith(OF_A_RUN) or key == "model.substitute":
            continue
        if key in given and (name, key) not in DEPARTS:
            assert given[key] == value and key not in assumed, key
        else:
            assert assumed[key] == (value if value != [] else "none"), key
    departs = {key for key in assumed if key in given and key in flat(to_tree(recipe))}
    assert departs == {key for preset, key in DEPARTS if preset == name}


@pytest.mark.parametrize("name", TREE["families"])
def test_a_published_value_has_a_key_and_a_source(name):
    said = TREE["families"][name]
    assert said["published"].keys() <= TREE["sources"].keys()
    for key in (*values(name), *said.get("why", {}), *said.get("absent", {})):
        *above, last = key.split(".")
        assert last in config_at(above).model_fields, key
    assert name in {load(preset).preset.family for preset in NAMES}


def test_what_a_person_gives_is_no_assumption():
    assert "model/norm_epsilon" not in load("nam56r", ["model.norm_epsilon=1e-6"]).assumptions
    assert "model/norm_epsilon" in load("nam56r").assumptions


def test_a_width_that_is_not_the_published_one_says_so():
    (said,) = published.assumed("nam56r", {"model.hidden_size": 4096})
    assert said[:2] == ("model.hidden_size", 4096) and said[2] == "NAM56R is published with 3584"


def test_the_published_count_is_without_qk_norm_and_the_other_is_offered():
    text = "\n".join(report.header(lowered("nam56r_native_dp")))
    said = next(line for line in text.splitlines() if "qk_norm" in line)
    count, offer = "3,996,461,352", "`model.blocks.attention.qk_norm=true`"
    assert said.startswith("assumed: ") and count in said and offer in said and f"{count} in all" in text
    other = parameters(translate(load("nam56r_native_dp", [offer.strip("`")])).plan)[0]
    assert other == 3_996_461_352 + 13 * 2 * 64  # a norm of queries and one of keys in each of 13 layers


def test_dense_sparse_and_recurrent_are_three_families():
    names = ("nam52_h200_dense_ref_v1", "nam52_h200_sparse_8_11_ref_v1", "nam52r_h200_4full_9sparse_candidate_v1")
    assert len({load(name).preset.family for name in names}) == 3
    assert "feature/mhc/streams" in load(names[1]).assumptions


def test_a_key_that_others_call_otherwise_has_the_value_they_publish():
    """But for what is counted or chosen otherwise here: layers, the length of a run, Megatron's symbols, a bias of all or none."""
    off = set()
    for name, said in CONFIGS.items():
        recipe = lowered(name).plan.recipe
        pairs = (
            (key, value, value_at(recipe, ours)) for key, ours in called_elsewhere().items() if (value := said.get(key))
        )
        off |= {key for key, theirs, value in pairs if value is not None and value != theirs}
    assert off == {"num_hidden_layers", "max_position_embeddings", "hybrid_override_pattern", "attention_bias", "initializer_range",
                   "intermediate_size"}  # fmt: skip
