"""What differs between two plans, in plain text: the layers, Megatron's arguments, and the recipe's keys, many of which are no argument."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nam_megatron.argv import plan_json
from nam_megatron.computation import differences
from nam_megatron.lower import Lowering
from nam_megatron.recipe import Recipe
from nam_megatron.report import plan_text

# Stand above, in the plan's text, or are prose; so do assumptions.
NAMED = "preset.name", "preset.alias_of", "preset.about"


def diff(ours: Lowering, theirs: Lowering) -> str:
    """Plans as a unified diff, then a table of arguments and one of keys: one that `executes` leaves the model as it is."""
    names = ours.plan.recipe.preset.name, theirs.plan.recipe.preset.name
    if names[0] == names[1]:
        names = "this", names[1]
    plans = difflib.unified_diff(
        plan_text(theirs).splitlines(), plan_text(ours).splitlines(), names[1], names[0], n=0, lineterm=""
    )
    text = [line for line in plans if not line.startswith("@@")]
    rows = []
    for name in dict.fromkeys([*ours.by_name, *theirs.by_name]):
        a, b = (str(x.by_name[name].value) if name in x.by_name else "(not set)" for x in (ours, theirs))
        if a != b:
            rows.append((name, b, a))
    text += _columns(("argument", names[1], names[0]), rows) if rows else ["the same arguments"]
    trees = [json.loads(plan_json(x)) for x in (theirs, ours)]
    keys = [
        (d.key, *(_value(tree["recipe"], d.key) for tree in trees), "computes" if d.computes else "executes")
        for d in differences(*trees)
        if d.key.partition(".")[0] in Recipe.model_fields.keys() - {"assumptions"} and d.key not in NAMED
    ]
    text += _columns(("recipe", names[1], names[0], ""), keys) if keys else []
    return "\n".join(text) + "\n"


def _columns(title: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(title, *rows, strict=True)]
    return ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (title, *rows))]


def _value(recipe: Mapping[str, Any], key: str) -> str:
    node: Any = recipe
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return "(not there)"
        node = node[name]
    return node if isinstance(node, str) else json.dumps(node)
