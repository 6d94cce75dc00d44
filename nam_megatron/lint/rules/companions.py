"""Flags that Megatron refuses without another one: one rule, a line for each."""

import re
from collections.abc import Iterator
from functools import partial
from operator import gt, lt
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.parser import incomplete, strangers
from nam_megatron.lint.rules.rule import CONFIG, FAIL, FRAGILE, VALIDATE, Rule, listed, off
from nam_megatron.lint.values import Args, Open, harmless

WANTS = yaml.safe_load((Path(__file__).parent.parent / "wants.yaml").read_text(encoding="utf-8"))


def _holds(a: Args, m: Model, term: str) -> bool:
    """Whether a term of wants.yaml holds."""
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


def _is_so(a: Args, m: Model, terms: str) -> bool:
    return any(all(_holds(a, m, term) for term in both.split(" and ")) for both in terms.split(" or "))


def _lacking(a: Args, m: Model, which: str, given_elsewhere: bool = False) -> Iterator[str]:
    """Of each flag that is given, what it wants and has not. given_elsewhere: maybe by flags of which the text has none."""
    for row in WANTS[which]:
        flags = row["flags"].split()
        beginnings = tuple(flag for flag in flags if flag.endswith("_"))
        for name in (name for name in a.given if name in flags or name.startswith(beginnings)):
            asks = not off(a, name) if which in ("idle", "noted") and "always" not in row else not a.switched_off(name)
            stands_on = a.any_said(*re.findall(r"[a-z]\w+", row["with"]))
            asks &= not any(map(a.switched_off, stands_on))  # else it waits for that to be switched on
            if asks and (stands_on or not given_elsewhere) and not known(partial(_is_so, a, m, row["with"]), True):
                yield f"{a.written(name)}\twants {row['wants']}"


def idle(a: Args, m: Model, which: str = "idle") -> Iterator[str]:
    """Flags that do nothing, each with what it wants."""
    if a.launch.kind == "container" or (a.launch.kind == "yaml" and a.elsewhere):
        return  # Bridge writes every field, in use or not, and so do other programs' files
    own = strangers(a)  # by what they begin with, or what a fork's class has in capitals
    families = {flag.lstrip("-").split("-")[0] for flag in own} | {*re.findall("[A-Z]{3,}$", "\n".join(own), re.M)}
    for found in _lacking(a, m, which, incomplete(a, m)):
        family = found[2:].split("-")[0]
        if not families & {family, family.upper()}:  # else what it stands on may be a flag of the script's own
            yield found


RULES = (
    Rule(
        "idle-flag",
        FRAGILE,
        "",
        idle,
        "no effect without what it stands on",
        "give what it wants, or leave it out",
        CONFIG,
    ),
    Rule(
        "companion",
        FAIL,
        "",
        lambda a, m: _lacking(a, m, "refused"),
        "refused without what it stands on",
        "give what it wants, or leave it out",
        f"{VALIDATE}, {CONFIG}",
    ),
    Rule(
        "companion-later",
        FAIL,
        "",
        lambda a, m: _lacking(a, m, "later"),
        "refused without what it stands on, after the start",
        "give what it wants, or leave it out",
        "core/optimizer/__init__.py, core/distributed/distributed_data_parallel.py, core/datasets/blended_megatron_dataset_config.py",
    ),
)
