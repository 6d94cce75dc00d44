"""Mends: what stands in the place of a function of Megatron's, Megatron-Bridge's or Triton's while a run trains, and why.

A mend is a record in series.py and a file of its name beside it, which holds `install` (torch side). Both trainers take the whole series in
its one order, by install.py. The other half of what we change upstream is patches/, applied to the installed files: see docs/mends.md.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol

SAID = "> mends: "  # begins the line of a trainer's log with what stands: NAME=SHA256 NAME=SHA256


class Trainer(StrEnum):
    """Who trains: Megatron's pretrain() by nam_megatron.train, or Megatron-Bridge's."""

    MEGATRON = "megatron"
    BRIDGE = "bridge"


class Moment(StrEnum):
    """When a mend is installed, and what its `install` gets."""

    COMMAND = "our own command begins"  # install(run: install.Run)
    START = "before Megatron initialises"  # install(plan)
    MODEL = "a stage's layers are built, nothing is wrapped"  # install(models, plan)
    WRAPPED = "the stages are wrapped"  # install(models, plan)


@dataclass(frozen=True)
class Place:
    """What a mend replaces or makes up for. name: `module:qualified.name`. sha256: of its source, as inspect.getsource has it."""

    name: str
    sha256: str


class Plan(Protocol):
    """What a mend may ask of a plan: its recipe, and of no kind. The plan itself is made of kinds, whose layers are built with mends."""

    @property
    def recipe(self) -> Any: ...


def always(plan: Plan) -> bool:
    """Of a mend that every plan needs."""
    return True


@dataclass(frozen=True)
class Mend:
    """One fault of others, and what is done about it.

    name: of its file. fault: what goes wrong without it, a plain sentence. upstream: issues and pull requests that know of it or its kin;
    none: none is known. drop_when: what has to be so for it to go. tests: `file::function` that fail without it. needed: whether a plan
    may meet the fault. trainers: in whose hands.
    """

    name: str
    fault: str
    places: tuple[Place, ...]
    upstream: tuple[str, ...]
    drop_when: str
    tests: tuple[str, ...]
    moment: Moment
    needed: Callable[[Plan], bool] = always
    trainers: tuple[Trainer, ...] = field(default=(Trainer.MEGATRON, Trainer.BRIDGE))

    @property
    def sha256(self) -> str:
        """Of its places and their sources together."""
        return hashlib.sha256("".join(f"{place.name} {place.sha256}\n" for place in self.places).encode()).hexdigest()

    @property
    def install(self) -> Callable[..., None]:
        """Torch side; see Moment for what it gets."""
        found: Callable[..., None] = import_module(f"{__name__}.{self.name}").install
        return found
