"""Flags that Megatron refuses without another one: one rule, a line for each."""

import re
from collections.abc import Iterator
from functools import partial

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.parser import incomplete, strangers
from nam_megatron.lint.rules.rule import CONFIG, FAIL, FRAGILE, VALIDATE, Rule, off
from nam_megatron.lint.rules.terms import WANTS, is_so
from nam_megatron.lint.values import Args


def _lacking(a: Args, m: Model, which: str, given_elsewhere: bool = False) -> Iterator[str]:
    """Of each flag that is given, what it wants and has not. given_elsewhere: maybe by flags of which the text has none."""
    for row in WANTS[which]:
        flags = row["flags"].split()
        beginnings = tuple(flag for flag in flags if flag.endswith("_"))
        for name in (name for name in a.sure(*a.given) if name in flags or name.startswith(beginnings)):
            asks = not off(a, name) if which in ("idle", "noted") and "always" not in row else not a.switched_off(name)
            stands_on = a.sure(*re.findall(r"[a-z]\w+", row["with"]))
            asks &= not any(map(a.switched_off, stands_on))  # else it waits for that to be switched on
            if asks and (stands_on or not given_elsewhere) and not known(partial(is_so, row["with"], a, m), True):
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
    Rule("idle-flag", FRAGILE, "", idle, "no effect without what it stands on", "give what it wants, or leave it out",
        CONFIG),
    Rule("companion", FAIL, "", lambda a, m: _lacking(a, m, "refused"), "refused without what it stands on",
        "give what it wants, or leave it out", f"{VALIDATE}, {CONFIG}"),
    Rule("companion-later", FAIL, "", lambda a, m: _lacking(a, m, "later"),
        "refused without what it stands on, after the start", "give what it wants, or leave it out",
        "core/optimizer/__init__.py, core/distributed/distributed_data_parallel.py, core/datasets/blended_megatron_dataset_config.py"),
)  # fmt: skip
