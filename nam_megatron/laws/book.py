"""All laws, and a plan put before them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, likely
from nam_megatron.laws import attention, experts, graphs, memory, mixers, model, parts, precision, rehearsal, training
from nam_megatron.laws.found import FOUND
from nam_megatron.laws.law import UNTRIED, Found, Law, broken
from nam_megatron.targets import Target

# In the order in which they are said.
LAWS: tuple[Law, ...] = (
    *model.LAYOUT,  # first: what else is wrong may follow from it
    *model.LAWS,
    *precision.LAWS,
    *training.LAWS,
    *attention.LAWS,
    *experts.LAWS,
    *mixers.LAWS,
    *memory.LAWS,
    *graphs.LAWS,
    *parts.LAWS,
    *rehearsal.LAWS,
)
EVERY: tuple[Law | Found, ...] = (*LAWS, *FOUND)
BY_ID = {law.id: law for law in EVERY}
assert len(BY_ID) == len(EVERY), "two laws of one id"
RENAMED = {"gdn-graphs": "kind-untried"}  # what older presets may waive: since 2026-11-30
WAIVABLE = {law.id: law.stated for law in LAWS if law.category == UNTRIED}


def facts(plan: Plan, target: Target) -> Mapping[str, Any]:
    """What laws are about, by the names that their predicates take: what stands in a plan, and the Megatron that it is for."""
    r = plan.recipe
    found = {name: getattr(r, name) for name in type(r).model_fields}
    found |= {block.kind: block for block in plan.blocks}
    found |= {feature.name: feature for feature in r.feature.all()}
    return found | {"plan": plan, "recipe": r, "target": target}


def problems(plan: Plan, target: Target) -> Iterator[Problem]:
    """What of a plan breaks a law."""
    found = facts(plan, target)
    return (problem for law in LAWS for problem in broken(law, found))


def left(problems: Iterable[Problem], allow: Mapping[str, str]) -> Iterator[Problem]:
    """Of `problems` those that `allow` waives none of, then its waivers that waive nothing: they would stand for what is not there."""
    met = set()
    for problem in problems:
        met.add(problem.law)
        if problem.law not in allow or problem.law not in WAIVABLE:
            yield problem
    for law in allow:
        if law not in WAIVABLE:
            named = RENAMED.get(law) or likely(law, WAIVABLE)
            hint = f"`allow.{named}`?" if named else "docs/laws.md has them"
            message = f"there is no law `{law}` that can be waived"
            yield Problem(message, key=f"allow.{law}", hint=hint, law="waiver-unknown")
        elif law not in met:
            said = f"nothing in this recipe needs `{law}`"
            yield Problem(said, key=f"allow.{law}", hint="take it out", law="waiver-of-nothing")
