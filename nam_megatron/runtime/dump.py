"""Dump every flag of the Megatron that Python finds: python -m nam_megatron.runtime.dump > nam_megatron/targets/vX_Y.json

The result is never edited. Needs that Megatron's code and torch, no GPU; docs/megatron.md says what comes next.
"""

import argparse
import contextlib
import enum
import json
import sys
import warnings

from nam_megatron import installed
from nam_megatron.errors import OK, Refused, finish

ACTIONS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "BooleanOptionalAction": "boolean",
}


def dump() -> dict:
    """{"megatron_core": version, "flags": {flag: {dest, action, nargs, type, choices, default, aliases}}}"""
    warnings.filterwarnings("ignore")
    here = installed.stack().megatron_core  # whichever it is: a new one has no target yet
    with contextlib.redirect_stdout(sys.stderr):  # importing Megatron prints
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name, *aliases = action.option_strings
        entry = {"dest": action.dest, "action": ACTIONS[type(action).__name__]}
        if entry["action"] == "store":
            entry["type"] = getattr(action.type, "__name__", None)
            if action.nargs is not None:
                entry["nargs"] = action.nargs
            if action.choices:
                entry["choices"] = [_plain(c) for c in action.choices]
        entry["default"] = _plain(action.default)
        if aliases:
            entry["aliases"] = aliases
        flags[name] = entry
    return {"megatron_core": here, "flags": dict(sorted(flags.items()))}


def render(dumped: dict) -> str:
    """One flag a line, so that a new Megatron's diff can be read."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in dumped["flags"].items()]
    head = f'{{"megatron_core": {json.dumps(dumped["megatron_core"])}, "flags": {{'
    return head + "\n" + ",\n".join(lines) + "\n}}\n"


def _plain(value):
    """Enum members by the name the command line takes."""
    if isinstance(value, enum.Enum):
        return value.name
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def command() -> int:
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        raise Refused(f"the dump takes no words, and here is `{sys.argv[1]}`", hint="`--help` says more")
    sys.stdout.write(__doc__ if sys.argv[1:] else render(dump()))
    return OK


if __name__ == "__main__":
    finish(command)
