"""What is published of each family (published.yaml), and what is therefore assumed: every other value that a preset of it has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("published.yaml")
# Of a recipe what makes a model and its training; the rest is one run's.
ABOUT = ("model.", "feature.", "precision.", "optim.")
ALSO = ("lane.name", "schedule.micro_batch_size", "schedule.global_batch_size")
NEVER = ("model.family",)


@dataclass(frozen=True)
class Family:
    """published: {key: value}, those of a family that is the `same` among them. taken: those of the one that it follows, of that title."""

    title: str
    published: Mapping[str, Any]
    taken: Mapping[str, Any]
    whose: str
    why: Mapping[str, str]
    absent: Mapping[str, str]


@cache
def families() -> Mapping[str, Family]:
    """By `preset.family`."""
    tree = yaml.load(FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["families"]
    found: dict[str, Family] = {}
    for name, said in tree.items():  # one that another follows comes first
        same, followed = found.get(said.get("same")), found.get(said.get("from"))
        own = {key: value for values in said["published"].values() for key, value in values.items()}
        found[name] = Family(
            said["title"],
            {**(same.published if same else {}), **own},
            followed.published if followed else {},
            followed.title if followed else "",
            {**(same.why if same else {}), **(followed.why if followed else {}), **said.get("why", {})},
            said.get("absent", {}),
        )
    return found


def assumed(name: str, stands: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why) of what no article gives. name: the preset's family. stands: {key: value} of what computes and is there."""
    family = families().get(name)
    if family is None:
        return
    for key, value in stands.items():
        if key in ALSO or (key.startswith(ABOUT) and key not in NEVER):
            said = in_words(value) if isinstance(value, tuple) else value
            if said is not None and not _equal(family.published.get(key), said):
                yield key, said, _why(family, key, said)
    yield from ((key, 0, why) for key, why in family.absent.items() if key not in stands)


def _why(family: Family, key: str, value: Any) -> str:
    if key in family.why:
        return family.why[key]
    if key in family.published:
        return f"{family.title} is published with {family.published[key]}"
    if _equal(family.taken.get(key), value):
        return f"{family.whose}'s; of {family.title} it is nowhere published"
    return "no article gives it"


def _equal(published: Any, value: Any) -> bool:
    return type(published) is type(value) and bool(published == value)


def in_words(rows: tuple[Any, ...]) -> str:
    """A list as one value: `dsa at A 1,2,3` of `model.substitute`."""
    said = (f"{r.kind} at {r.letter} {','.join(map(str, r.ranks))}" if hasattr(r, "ranks") else str(r) for r in rows)
    return "; ".join(said) or "none"
