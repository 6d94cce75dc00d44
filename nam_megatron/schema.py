"""JSON Schema of the files in conf/, for editors: python -m nam_megatron.schema > conf/schema.json

Made from the models that check recipes, so an editor knows the same keys, types and choices. A file in conf/ is a
fragment of a recipe, and each kind of file has its definition: `#/$defs/Recipe` for presets, `#/$defs/Model` for
conf/model/, `#/$defs/Mtp` for conf/feature/mtp.yaml. Its first lines name it (`# yaml-language-server: $schema=...`).
"""

import json
from collections.abc import Iterator
from typing import Any

from nam_megatron.errors import finish, page
from nam_megatron.features.names import Features
from nam_megatron.recipe import Recipe
from nam_megatron.targets import current
from nam_megatron.words.setting import Config, section

# What may stand for any value until Hydra has composed the recipe: `???` (must be given) and `${other.key}`.
LATER = {"type": "string", "pattern": r"^(\?\?\?|\$\{.+\})$"}
DEFAULTS = {"type": "array", "items": {"type": ["string", "object"]}, "description": "files Hydra merges first"}


def schema() -> dict[str, Any]:
    """The whole schema. The root constrains nothing: files point into `$defs`."""
    tree = Recipe.model_json_schema()
    defs = {"Recipe": tree, **tree.pop("$defs")}
    defs = {name: fragment(definition) for name, definition in defs.items()}
    groups = [section(field.annotation) for model in (Recipe, Features) for field in model.model_fields.values()]
    for name in ("Recipe", *(group.__name__ for group in groups if group)):
        defs[name]["properties"]["defaults"] = DEFAULTS
    for _, config in configs():
        for key, value in defs[config.__name__]["properties"].items():
            if key in config.model_fields:
                value["description"] = hover(config, key)
    # A command's own file includes a recipe and adds its words, whose types the command checks.
    own = {"type": ["string", "number", "boolean", "null"]}
    properties = {**defs["Recipe"]["properties"], "hydra": {"type": "object"}}
    defs |= {"Later": LATER, "Command": {"type": "object", "properties": properties, "additionalProperties": own}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Files in conf/ (generated: python -m nam_megatron.schema)",
        "$defs": dict(sorted(defs.items())),
    }


def configs(config: type[Config] = Recipe, path: str = "") -> Iterator[tuple[str, type[Config]]]:
    """(dotted prefix, class) of the recipe and of every section in it, in the order of the recipe."""
    yield path, config
    for name, field in config.model_fields.items():
        if inner := section(field.annotation):
            named = "NAME." if getattr(field.annotation, "__origin__", None) is dict else ""
            yield from configs(inner, f"{path}{name}.{named}")


def hover(config: type[Config], key: str) -> str:
    """What an editor shows of a key."""
    row = config.row(key)
    said = [row.doc]
    if row.argument:
        said.append(f"Megatron's {current().by_dest[row.argument].name}")
    if row.executes:
        said.append(f"Computes nothing: {row.executes}")
    return ". ".join(said)


def fragment(definition: dict[str, Any]) -> dict[str, Any]:
    """A definition of which no key is required and each value may come later."""
    made = {k: v for k, v in definition.items() if k not in ("required", "title")}
    return made | {"properties": {k: later(v) for k, v in definition.get("properties", {}).items()}}


def later(value: dict[str, Any]) -> dict[str, Any]:
    value = {k: v for k, v in value.items() if k != "title"}
    return value if "$ref" in value else {"anyOf": [*value.get("anyOf", [value]), {"$ref": "#/$defs/Later"}]}


def render() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    finish(lambda: page(__doc__, render))
