"""Megatron-Core 0.19.2: its pin, its legal flags, and how a setting becomes words of its command line."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nam_megatron.setting import Setting, Value

PIN = "0.19.2"
TYPES = {"int": int, "float": (int, float), "str": str}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of Megatron's parser, as dumped (see flags/dump.py)."""

    name: str
    dest: str
    action: str  # store | store_true | store_false | boolean
    default: Any = None
    type: str | None = None
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()


@cache
def flags() -> Mapping[str, Flag]:
    """Every flag of Megatron 0.19.2 by its first name."""
    dumped = json.loads((Path(__file__).parent / "flags" / "v0_19.json").read_text())
    assert dumped["megatron_core"] == PIN, "the dumped flags are another Megatron's"
    return {
        name: Flag(name, **{k: tuple(v) if k in ("choices", "aliases") else v for k, v in entry.items()})
        for name, entry in dumped["flags"].items()
    }


@cache
def by_dest() -> Mapping[str, Flag]:
    """The flag that sets a destination; the first where two do (`--x` before `--no-x`)."""
    found: dict[str, Flag] = {}
    for flag in flags().values():
        found.setdefault(flag.dest, flag)
    return found


def by_name(name: str) -> Flag | None:
    """The flag called `name`, alias or not."""
    return flags().get(name) or next((f for f in flags().values() if name in f.aliases), None)


def words(setting: Setting) -> tuple[str, ...]:
    """A setting as command-line words; empty where Megatron's parser needs none to arrive at the value.

    A value that the flag cannot express is our mistake, not the user's: recipes are checked before.
    """
    flag, value = by_dest()[setting.name], setting.value
    assert legal(flag, value), f"{setting.owner} sets {flag.name} to {value!r}"
    if flag.action == "store":
        if value is None:
            return ()
        said = [_word(v) for v in (value if isinstance(value, tuple) else (value,))]
        if said[0].startswith(
            "-"
        ):  # a pattern that begins with a dense layer; apart, the parser would take it for a flag
            assert len(said) == 1, f"{setting.owner} sets {flag.name} to {value!r}"
            return (f"{flag.name}={said[0]}",)
        return (flag.name, *said)
    if flag.action == "boolean":
        return (flag.name if value else flag.name.replace("--", "--no-", 1),)
    return (flag.name,) if value is (flag.action == "store_true") else ()


def legal(flag: Flag, value: Value) -> bool:
    """Whether the parser can be brought to `value` by this flag: arity, type and choice."""
    if flag.action != "store":
        return isinstance(value, bool)
    if value is None:
        return flag.default in (None, [])
    if (flag.nargs in ("+", "*")) != isinstance(value, tuple):
        return False
    items = value if isinstance(value, tuple) else (value,)
    if not items and flag.nargs == "+":
        return False
    kind = TYPES.get(flag.type or "str", str)
    return all(isinstance(v, kind) and not isinstance(v, bool) for v in items) and (
        flag.choices is None or all(v in flag.choices for v in items)
    )


def unset(settings: Mapping[str, Setting]) -> Iterator[Flag]:
    """Flags that no setting owns."""
    return (flag for flag in flags().values() if flag.dest not in settings)


def _word(value: Value) -> str:
    return repr(value) if isinstance(value, float) else str(value)
