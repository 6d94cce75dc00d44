"""What differs between two plans, in plain text: the layers, Megatron's arguments, and the recipe's keys, many of which are no argument."""

import difflib
import json

from nam_megatron.budget.text import grid
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.judge.same import differences, flat
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
    text += ["", grid([("argument", names[1], names[0]), *rows])[:-1]] if rows else ["the same arguments"]
    trees = [json.loads(plan_json(x)) for x in (theirs, ours)]
    sides = [{key: v if isinstance(v, str) else json.dumps(v) for key, v in flat(t["recipe"]).items()} for t in trees]
    keys = [
        (d.key, *(side.get(d.key, "(not there)") for side in sides), "computes" if d.computes else "executes")
        for d in differences(*trees)
        if d.key.partition(".")[0] in Recipe.model_fields.keys() - {"assumptions"} and d.key not in NAMED
    ]
    text += ["", grid([("recipe", names[1], names[0], ""), *keys])[:-1]] if keys else []
    return "\n".join(text) + "\n"
