"""The words blocks, features and sections speak: a strict config, the row of a key, a setting, an environment variable."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from nam_megatron.words.site import Site

Value = bool | int | float | str | tuple[Any, ...] | None

# Platforms force a value, which is slower at worst where a plan wants it unset.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# One line of text that stays one word on a command line and one comment in a script.
Name = Annotated[
    str,
    Field(
        min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f-\xa0\u2028\u2029-][^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
    ),
]

# Why a choice between kernels computes nothing else.
SAME = "the same formula by another program"

NEEDED = object()  # stands for "there is no value that plans without this key had"


@dataclass(frozen=True, slots=True)
class Row:
    """What a recipe key is, written once beside it: `heads: Annotated[PositiveInt, Row("query heads", "num_heads")]`.

    Lowering, verify, lint's way back to a recipe, resuming, comparing, `explain=`, the editors' schema and docs/reference.md read it.

    doc: what it is, for people; also the reason of the setting. argument: destination in Megatron's parser that gets the value as it
    stands; None where there is none, or `settings` computes it. fields: where Megatron keeps the value, as `config.field`; by the
    argument's name unless given. executes: why another value leaves the trained model as it is but for the order of sums; None: it
    computes. was: the value that plans stored before the key existed meant.
    """

    doc: str
    argument: str | None = None
    fields: tuple[str, ...] | None = None
    executes: str | None = None
    was: Any = NEEDED


class Config(BaseModel):
    """A piece of the recipe: frozen, strict (`"8"`, `true` and `52.0` are not integers), no unknown keys.

    Fields have no defaults in Python: every value stands in a YAML file, where a person can read it. None as the default marks a
    field that may not stand at all: of a kind, a feature or a key that nothing in this plan reads.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    executes: ClassVar[str | None] = None  # of every key that does not say otherwise

    @classmethod
    def row(cls, name: str) -> Row:
        """The row of a field; a section of its own has its docstring's first line."""
        return _rows(cls)[name]

    @classmethod
    def of_arguments(cls, a: Any) -> dict[str, Any]:
        """The keys that are an argument of Megatron's, with what `a` has for it."""
        return {name: getattr(a, row.argument) for name, row in _rows(cls).items() if row.argument}

    def lowered(self, site: Site) -> Iterator["Setting"]:
        """Every setting of this section: each key's own, and beside it what `settings` computes from it."""
        computed = list(self.settings(site))
        for name, row in _rows(type(self)).items():
            value = getattr(self, name)
            if row.argument and (type(self).model_fields[name].is_required() or value is not None):
                yield Setting(row.argument, value, row.doc, name, fields=row.fields)
            yield from (s for s in computed if s.place == name)
        yield from (s for s in computed if s.place not in type(self).model_fields)

    def settings(self, site: Site) -> Iterator["Setting"]:
        """What Megatron is told besides the rows: values computed from keys, and pins. Keys are field names of this config."""
        return iter(())

    def alone(self, site: Site) -> Iterator[str]:
        """Why only nam_megatron trains this plan's arguments as they are meant, though the model is Megatron's: where stock stops, waits
        for ever, or computes something else.
        """
        return iter(())

    def packages(self) -> Iterator["Package"]:
        """What has to be installed beside Megatron-Core and Transformer Engine."""
        return iter(())

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        """(key, why) of keys that nothing reads where these kinds stand: nobody may say them; those with a default go."""
        return iter(())

    def unneeded(self, site: Site) -> Iterator[tuple[str, Any]]:
        """(key, value without it) of what asks for nothing where these kinds stand: an overlay is laid without it, else `check` refuses."""
        return iter(())


@cache
def _rows(cls: type[Config]) -> Mapping[str, Row]:
    found = {}
    for name, field in cls.model_fields.items():
        row = next((m for m in field.metadata if isinstance(m, Row)), None)
        if row is None:
            inner = section(field.annotation)
            row = Row((inner.__doc__ or "").strip().partition("\n")[0] if inner else "")
        found[name] = row if row.executes or not cls.executes else replace(row, executes=cls.executes)
    return found


def section(annotation: Any) -> type[Config] | None:
    """The config class that a field holds, if it holds one: `Fp8`, `Fp8 | None`, `tuple[Substitute, ...]`."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((t for t in kinds if isinstance(t, type) and issubclass(t, Config)), None)


@dataclass(frozen=True, slots=True)
class Package:
    """A package that a plan's arguments need. what: it asks for it. of: the trainer that needs it, where it is not every one; instead:
    what the other has in its place.
    """

    name: str
    what: str
    of: str | None = None
    instead: str | None = None


STOCK, OURS = "stock Megatron", "nam_megatron"  # the trainers


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing Megatron is told.

    name: the argument's destination in Megatron's parser (`hidden_size`); None as value pins "not given".
    why: one clause. key: the recipe key that decides it, None where the owner pins it. owner: who sets it.
    beside: the key that a pin stands beside when settings are read. fields: what Megatron must hold then, by `config.field`; only
    names where it is the value itself; None: the value, wherever Megatron keeps a field of the argument's name.
    executes: of a pin, as of a Row.
    """

    name: str
    value: Value
    why: str
    key: str | None = None
    owner: str = ""
    beside: str | None = None
    fields: Mapping[str, Any] | tuple[str, ...] | None = None
    executes: str | None = None

    @property
    def place(self) -> str | None:
        """The key of its owner that it is read with."""
        return self.key if self.beside is None else self.beside


@dataclass(frozen=True, slots=True)
class Env:
    """One environment variable of the training processes; value None means it must be unset.

    never: what even a platform that forces a value may not force.
    """

    name: str
    value: str | None
    why: str
    owner: str = ""
    never: str | None = None

    def allows(self, here: str | None) -> bool:
        """Whether a process may run with `here`, None where the variable is not set. Platforms may force CONNECTIONS."""
        return here == self.value or (self.value is None and self.name == CONNECTIONS and here != self.never)

    def put(self, environ: MutableMapping[str, str]) -> None:
        """Set it there, or take it out."""
        environ.pop(self.name, None)
        if self.value is not None:
            environ[self.name] = self.value


def leaves(key: str, value: Any) -> list[str]:
    """Dotted keys of every value below `key`; the key itself where it is none."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in leaves(f"{key}.{name}", inner)]
