"""What rules ask, in the words of wants.yaml and traps.yaml, and the rules that stand in the latter."""

import re
from functools import partial
from operator import gt, lt
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.rule import Rule, listed
from nam_megatron.lint.values import Args, Open, harmless

WANTS, TRAPS = (
    yaml.safe_load((Path(__file__).parent.parent / name).read_text(encoding="utf-8"))
    for name in ("wants.yaml", "traps.yaml")
)


def _holds(a: Args, m: Model, term: str) -> bool:
    """Whether a term holds."""
    if said := re.fullmatch(r"(not )?said (\w+)", term):
        return a.said(said[2]) is not bool(said[1])
    name, sign, right = re.findall(r"^(?:not )?(\w+)(?:([=~<>%])(.*))?$", term)[0]
    found = _named(a, m, name)
    if sign in ("<", ">", "%"):
        bound = _named(a, m, right) if right[0].isalpha() else float(right)
        compared = {"<": lt, ">": gt, "%": lambda one, other: other > 0 and one % other == 0}[sign]
        holds = None not in (found, bound) and compared(found, bound)
    elif sign:
        among = [str(f) in right.split(",") for f in listed(found)]
        holds = all(among) if sign == "=" else any(among)
    else:
        holds = bool(found)
    return holds is not term.startswith("not ")


def _named(a: Args, m: Model, name: str) -> Any:
    if name in a.target.by_dest and isinstance(a.value(name), Open) and a.said(name) and harmless(name, a.target):
        return True  # a path, wherever it leads
    return getattr(a if name in a.target.by_dest else m, name)


def is_so(terms: str, a: Args, m: Model) -> bool:
    return any(all(_holds(a, m, term) for term in both.split(" and ")) for both in terms.split(" or "))


def trap(name: str) -> Rule:
    """A rule of traps.yaml."""
    row = TRAPS[name]
    when = partial(is_so, row["when"])
    return Rule(name, row["severity"], row["about"], when, row["says"], row["fix"], row["source"])
