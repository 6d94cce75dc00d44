"""The presets in conf/, for parametrised tests; recipes changed without composing anew; a second opinion on words."""

import copy
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nam_megatron import mcore
from nam_megatron.lower import Lowering, translate
from nam_megatron.recipe import Recipe, conf_dir, from_tree, load, to_tree

FLAGS = json.loads((Path(mcore.__file__).parent / "flags" / "v0_19.json").read_text())["flags"]
NAMES = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))


@cache
def lowered(name: str, *overrides: str) -> Lowering:
    return translate(load(name, overrides))


@cache
def _tree(name: str) -> dict[str, Any]:
    return to_tree(load(name))


def changed(name: str, changes: Mapping[str, Any]) -> Recipe:
    """A preset with values at dotted keys replaced; links between keys (tensor and the lane's) are not followed."""
    tree = copy.deepcopy(_tree(name))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        assert last in node, key
        node[last] = value
    return from_tree(tree)


def check_words(words: Iterable[str]) -> None:
    """Name, arity, type and choice of each flag, by the dumped list alone; one flag a destination."""
    words, seen = list(words), []
    while words:
        name, joined, value = words.pop(0).partition("=")
        on = name.replace("--no-", "--", 1)
        flag = FLAGS[on if FLAGS.get(on, {}).get("action") == "boolean" else name]
        values = [value] if joined else []
        while words and not joined and not words[0].startswith("--"):
            values.append(words.pop(0))
        if flag["action"] != "store":
            assert values == [], name
        else:
            assert len(values) == 1 if "nargs" not in flag else values, f"{name} {values}"
            for value in values:
                {"int": int, "float": float}.get(flag["type"], str)(value)
                assert value in [str(c) for c in flag.get("choices", [value])], f"{name} {value}"
        seen.append(flag["dest"])
    assert len(seen) == len(set(seen)), "two words for one destination"
