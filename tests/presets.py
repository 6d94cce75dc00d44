"""The presets in conf/, for parametrised tests; recipes changed without composing anew; a second opinion on words."""

import copy
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.recipe import Recipe, conf_dir, config_at, load, parsed, resolved
from nam_megatron.targets import current

FLAGS = json.loads(current().flags_file.read_text())["flags"]
ALL = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))
NAMES = [name for name in ALL if name.startswith("nam")]
# Models of others: they vary what ours vary, so test_public.py alone asks them, and their golden.
PUBLIC = [name for name in ALL if name not in NAMES]

# What a dataset of no documents says of itself.
EMPTY_SET = {
    "version": 1, "key": "", "inputs": [], "valid_share": 0, "duplicates": 0, "empty": 0, "vocabulary": 1, "largest_id": 0,
    "splits": {}, "files": {},
}  # fmt: skip


@cache
def lowered(name: str, *overrides: str) -> Lowering:
    return translate(load(name, overrides))


@cache
def written(name: str) -> dict[str, Any]:
    """A preset with everything that conf/ writes out, whether it stands or not."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return OmegaConf.to_container(compose("recipe", overrides=[f"preset={name}"]), resolve=True)


def changed(name: str, changes: Mapping[str, Any]) -> Recipe:
    """A preset with values at dotted keys replaced, as if typed; links between keys (tensor and the lane's) are not followed."""
    tree = copy.deepcopy(written(name))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        assert last in node or last in config_at(parents).model_fields, key
        node[last] = value
    return resolved(parsed(tree), lambda key: any(k == key or k.startswith(f"{key}.") for k in changes))


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
