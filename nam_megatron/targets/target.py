"""What a Megatron is: its pin, its legal flags, how a setting becomes words of its command line, what it demands of a device.

A target is a value that is passed in; only nam_megatron/targets/__init__.py names one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nam_megatron.words.setting import Setting, Value

TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of Megatron's parser, as dumped (runtime/dump.py)."""

    name: str
    dest: str
    action: Literal["store", "store_true", "store_false", "boolean"]
    default: Any = None
    type: str | None = None
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A Megatron version.

    name: of its files. pin: the exact megatron-core. flags_file: the dump of its parser. te_version: Transformer Engine's that hosts
    with it have. configs: its training config's dataclasses, in the order in which a field of a name is looked for. renamed: arguments
    whose config field has another name; () where it has none. chips: compute capability -> the architecture that plans, kernels and
    forecasts are right for. lacking: another capability -> what is missing for it. reviewed_file: fields that no key decides.
    """

    name: str
    pin: str
    flags_file: Path
    te_version: str
    configs: tuple[str, ...]
    renamed: Mapping[str, tuple[str, ...]]
    chips: Mapping[tuple[int, int], str]
    lacking: Mapping[tuple[int, int], str]
    reviewed_file: Path | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def flags(self) -> Mapping[str, Flag]:
        """Every flag by its first name."""
        dumped = json.loads(self.flags_file.read_text(encoding="utf-8"))
        assert dumped["megatron_core"] == self.pin, "the dumped flags are another Megatron's"
        entries: dict[str, dict[str, Any]] = dumped["flags"]
        for entry in entries.values():
            entry |= {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry}
        return {name: Flag(name, **entry) for name, entry in entries.items()}

    @cached_property
    def by_dest(self) -> Mapping[str, Flag]:
        """The flag that sets a destination; the first where two do (`--x` before `--no-x`)."""
        found: dict[str, Flag] = {}
        for flag in self.flags.values():
            found.setdefault(flag.dest, flag)
        return found

    @cached_property
    def _aliases(self) -> Mapping[str, Flag]:
        return {alias: flag for flag in self.flags.values() for alias in flag.aliases}

    def by_name(self, name: str) -> Flag | None:
        """The flag called `name`, alias or not."""
        return self.flags.get(name) or self._aliases.get(name)

    def words(self, setting: Setting) -> tuple[str, ...]:
        """A setting as command-line words; empty where Megatron's parser needs none to arrive at the value.

        A value that the flag cannot express is our mistake, not the user's: recipes are checked before.
        """
        flag, value = self.by_dest[setting.name], setting.value
        assert legal(flag, value), f"{setting.owner} sets {flag.name} to {value!r}"
        if flag.action == "store":
            if value is None:
                return ()
            said = [_word(v) for v in (value if isinstance(value, tuple) else (value,))]
            # A pattern that begins with a dense layer: apart, the parser would take it for a flag.
            if said[0].startswith("-"):
                assert len(said) == 1, f"{setting.owner} sets {flag.name} to {value!r}"
                return (f"{flag.name}={said[0]}",)
            return (flag.name, *said)
        if flag.action == "boolean":
            return (flag.name if value else flag.name.replace("--", "--no-", 1),)
        return (flag.name,) if value is (flag.action == "store_true") else ()

    def fields(self, name: str, among: Mapping[str, Any]) -> tuple[str, ...]:
        """Where this Megatron keeps the argument `name`: the config fields of `among`, else the parsed arguments."""
        if name in self.renamed:
            return tuple(f for f in self.renamed[name] if f in among)
        return tuple(f for c in self.configs if (f := f"{c}.{name}") in among) or (f"args.{name}",)

    def unset(self, settings: Mapping[str, Setting]) -> Iterator[Flag]:
        """Flags that no setting owns."""
        return (flag for flag in self.flags.values() if flag.dest not in settings)


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
    kind = TYPES.get(flag.type or "str", (str,))
    return all(isinstance(v, kind) and not isinstance(v, bool) for v in items) and (
        flag.choices is None or all(v in flag.choices for v in items)
    )


# Types of flags that take one number or several, in one text.
AS_TEXT = {"moe_freq_type", "la_freq_type", "no_rope_freq_type", "tuple_type"}


def as_text(flag: Flag, value: Any) -> str:
    """What a program holds for such a flag, as the flag takes it."""
    text = str([*value] if isinstance(value, tuple) else value).replace(" ", "")
    return text.strip("[]") if flag.type == "tuple_type" else text


def _word(value: Value) -> str:
    return repr(value) if isinstance(value, float) else str(value)
