"""What overlays wish of kernels, granted or denied by what else a recipe says: any order of the same overlays gives the same plan.

A layout, a feature, a typed key or a preset's own is what a person wants, and is refused where it cannot be. What an overlay says in
`execution` and `precision` of a key that only executes is a wish: a law that it would break denies it, and the plan says so.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nam_megatron.compile.plan import Plan, plan
from nam_megatron.laws import book
from nam_megatron.recipe import Recipe, resolve, value_at
from nam_megatron.recipe.recipe import Wish
from nam_megatron.targets import Target
from nam_megatron.words.problem import Problem

WORD = re.compile(r"`([a-z0-9_.]+)=[^`]*`")  # of a law's ways out


def granted(recipe: Recipe, target: Target) -> Plan:
    """The plan of a recipe with the wishes that nothing speaks against, and in `wishes` those that are denied, with the reason.

    Raises:
        Refused: what no wish is behind has no plan.
    """
    left: dict[str, list[Wish]] = {}  # by key, those that may stand; the last of the key's values first
    for wish in recipe.wishes:
        if wish.why is None:
            left.setdefault(wish.key, []).append(wish)
    if not left:
        return plan(recipe)
    denied = [wish for wish in recipe.wishes if wish.why is not None]
    while True:
        said = {key: wishes[0].value for key, wishes in left.items() if wishes}
        recipe = _with(recipe, {wish.key: wish.instead for wish in denied} | said)
        found = plan(recipe)
        reasons: dict[str, str] = {}
        for problem in book.left(book.problems(found, target), recipe.allow):
            for key in _asked(problem, said):
                reasons.setdefault(key, problem.message)
        if not reasons:
            for first, *others in (wishes for wishes in left.values() if wishes):
                denied += [w.model_copy(update={"why": f"{first.by} wants another"}) for w in others]
            stand = tuple(w.model_copy(update={"instead": value_at(recipe, w.key)}) for w in denied)
            return replace(found, recipe=recipe.model_copy(update={"wishes": stand}))
        for key, why in reasons.items():
            denied.append(left[key].pop(0).model_copy(update={"why": why}))


def _asked(problem: Problem, said: Mapping[str, object]) -> Iterator[str]:
    """The wishes that a broken law denies: the one that it is about, else those that its way out gives up."""
    if problem.key in said:
        yield str(problem.key)
    else:
        yield from (key for key in dict.fromkeys(WORD.findall(problem.hint or "")) if key in said)


def _with(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    for key, value in values.items():
        if value_at(recipe, key) != value:
            recipe = resolve.put(recipe, key, value)
    return recipe
