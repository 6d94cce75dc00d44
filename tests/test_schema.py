"""Files made of the code are current, every config obeys it, and it objects to what a person mistypes."""

import copy
import json
import re

import pytest
import yaml
from jsonschema import Draft202012Validator
from presets import NAMES, lowered

from nam_megatron import reference, schema
from nam_megatron.features.names import FEATURES
from nam_megatron.laws import page
from nam_megatron.recipe import Recipe, conf_dir, to_tree

SCHEMA = json.loads((conf_dir() / "schema.json").read_text())
FILES = sorted(str(path.relative_to(conf_dir())) for path in conf_dir().rglob("*.yaml"))


def definition(file):
    """The definition a file obeys: by its package, then by its group."""
    group, _, name = file.rpartition("/")
    if not group:
        return "Recipe" if name == "recipe.yaml" else "Command"
    if (conf_dir() / file).read_text().startswith("# @package _global_\n"):
        return "Recipe"
    if group == "feature" and name != "default.yaml":
        return FEATURES[name.removesuffix(".yaml")].__name__
    return Recipe.model_fields[group].annotation.__name__


def complaints(tree, name):
    return [e.message for e in Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"}).iter_errors(tree)]


def read(file):
    return yaml.safe_load((conf_dir() / file).read_text())


@pytest.mark.parametrize(
    ("path", "module"),
    [("conf/schema.json", schema), ("docs/reference.md", reference), ("docs/laws.md", page)],
    ids=str,
)
def test_what_is_made_of_the_code_is_current(path, module):
    assert (conf_dir().parent / path).read_text() == module.render(), f"python -m {module.__name__} > {path}"


def test_it_is_a_schema():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", FILES)
def test_every_config_obeys_and_says_what(file):
    assert complaints(read(file), definition(file)) == []
    up = "../" * file.count("/")
    lines = (conf_dir() / file).read_text().splitlines()[:2]
    assert f"# yaml-language-server: $schema={up}schema.json#/$defs/{definition(file)}" in lines


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_recipe_obeys(name):
    assert complaints(to_tree(lowered(name).plan.recipe), "Recipe") == []


@pytest.mark.parametrize("file", [f for f in FILES if definition(f) != "Command"])
def test_a_misspelt_key_is_seen_in_every_file(file):
    """At every level: the last letter of each key dropped."""

    def misspelt(node):
        for key, value in node.items() if isinstance(node, dict) else ():
            if key in ("defaults", "assumptions"):  # Hydra's own; names of one's own
                continue
            yield {**{k: v for k, v in node.items() if k != key}, key[:-1]: value}
            for inner in misspelt(value) if key != "waivers" else ():  # names of findings: launch/ knows them
                yield {**node, key: inner}

    for wrong in misspelt(read(file)):
        assert complaints(wrong, definition(file)), wrong


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("depth", 52.5),
        ("depth", "52"),
        ("depth", True),
        ("depth", 0),
        ("normalization", "RMSnorm"),
        ("tied_embeddings", "no"),
        ("hidden_dropout", 1.0),
        ("letters", {"A": "gqa"}),
        ("letters", {"D": "mla"}),
        ("substitute", {"letter": "A"}),
        ("substitute", [{"letter": "A", "ranks": [-1], "kind": "dsa"}]),
        ("blocks", {"mla": {"q_lora": 64}}),
        ("family", ""),
    ],
)
def test_a_wrong_value_is_seen(key, value):
    tree = copy.deepcopy(read("model/nam56r.yaml"))
    assert complaints(tree, "Model") == []
    tree[key] = value
    assert complaints(tree, "Model")


@pytest.mark.parametrize("value", ["???", "${lane.tensor}", "${.train_steps}", "${oc.env:X,1}"])
def test_what_comes_later_is_no_mistake(value):
    assert complaints({"depth": value, "tied_embeddings": value}, "Model") == []
    assert complaints({"depth": value + " x"}, "Model")


def test_every_model_is_defined_and_closed():
    assert set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(SCHEMA))) <= SCHEMA["$defs"].keys()
    closed = {n for n, d in SCHEMA["$defs"].items() if d.get("additionalProperties") is False}
    assert SCHEMA["$defs"].keys() - closed == {"Later", "Command"}
    assert not any("required" in d for d in SCHEMA["$defs"].values())
