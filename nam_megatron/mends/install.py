"""Mends installed in the order of the series, by whichever trainer (torch side)."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from nam_megatron.errors import Problem, raise_if
from nam_megatron.events import RECORD
from nam_megatron.mends import SAID, Mend, Moment, Plan, Trainer
from nam_megatron.mends.series import MENDS, SERIES

# In this process; mends of models: and in which of them.
_INSTALLED: dict[str, Mend] = {}
_MODELS: dict[str, WeakSet] = {}


@dataclass(frozen=True)
class Run:
    """What our own commands know of a run beside its plan.

    operations: of the model for one sequence, forward and backward, a GPU's share. track: called with each line of the log, on every
    rank. begin: called before each replay of a step's graph. look: gets the loss of each of its microbatches, on the host.
    """

    plan: Plan
    operations: float
    track: Callable[[str], None] | None = None
    begin: Callable[[], None] | None = None
    look: Callable[[Any], None] | None = None


def command(run: Run, trainer: Trainer) -> None:
    """The mends of our own command, and those of a training that starts. Raises Refused, see `single`."""
    RECORD.saves = run.plan.recipe.schedule.save
    _install(Moment.COMMAND, run.plan, trainer, run)
    start(run.plan, trainer)


def start(plan: Plan, trainer: Trainer) -> None:
    """Before Megatron initialises; again is as once. Raises Refused, see `single`."""
    _install(Moment.START, plan, trainer, plan)


def built(models: list[Any], plan: Plan) -> list[Any]:
    """In the form of Megatron's hooks before wrapping; a model that has them is left alone. Raises Refused, see `single`."""
    return _mended(Moment.MODEL, models, plan)


def wrapped(models: list[Any], plan: Plan) -> list[Any]:
    """In the form of Megatron's hooks after wrapping; a model that has them is left alone. Raises Refused, see `single`.

    Rank 0 says which mends stand now that all are in place; launch/record/outcome.py reads the event.
    """
    _mended(Moment.WRAPPED, models, plan)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        RECORD.say("mends", stood={mend.name: mend.sha256 for mend in installed()})
        stood = " ".join(f"{mend.name}={mend.sha256}" for mend in installed())
        sys.stdout.write(f"{SAID}{stood}\n")  # in one write: print() ends a line in a second one
        sys.stdout.flush()
    return models


def single(*names: str, plan: Plan | None = None) -> None:
    """Single mends of START, for what is no training: a check of an export, a test.

    Raises:
        Refused: a place has another source than the mend was made for; all such places at once, and nothing is installed.
    """
    _put([MENDS[name] for name in names], plan)


def installed() -> tuple[Mend, ...]:
    """The mends of this process, in the order of the series."""
    return tuple(mend for mend in SERIES if mend.name in _INSTALLED)


def _install(moment: Moment, plan: Plan, trainer: Trainer, *given: Any) -> None:
    _put([mend for mend in SERIES if mend.moment == moment and trainer in mend.trainers and mend.needed(plan)], *given)


def _put(mends: Sequence[Mend], *given: Any) -> None:
    new = [mend for mend in mends if mend.name not in _INSTALLED]
    raise_if(problem for mend in new for problem in objections(mend))
    for mend in new:
        mend.install(*given)
        _INSTALLED[mend.name] = mend


def _mended(moment: Moment, models: list[Any], plan: Plan) -> list[Any]:
    mends = [mend for mend in SERIES if mend.moment == moment and mend.needed(plan)]
    raise_if(problem for mend in mends if mend.name not in _INSTALLED for problem in objections(mend))
    for mend in mends:
        done = _MODELS.setdefault(mend.name, WeakSet())
        if new := [model for model in models if model not in done]:
            mend.install(new, plan)
            done.update(new)
            _INSTALLED[mend.name] = mend
    return models


# What is replaced is what the mend was made for --------------------------------------------------------------------------


def objections(mend: Mend) -> Iterator[Problem]:
    """Places of a mend that are not what it was made for; before it is installed."""
    hint = f"install the pinned version again; with a new one, look whether the fault is gone: docs/mends.md, `{mend.name}`"
    for place in mend.places:
        try:
            found = digest(place.name)
        except (ImportError, AttributeError, OSError, TypeError) as err:
            why = f"cannot be read here: {err}"
        else:
            if found == place.sha256:
                continue
            why = f"has another source than the mend was made for: sha256 {found[:12]}, and not {place.sha256[:12]}"
        yield Problem(f"`{place.name}`, which the mend `{mend.name}` is about, {why}", hint=hint)


def digest(place: str) -> str:
    """SHA-256 of the source of what stands at a place, `module:qualified.name`; that of what it wraps where it says so.

    Raises ImportError, AttributeError, OSError or TypeError where nothing of the sort is there.
    """
    module, _, name = place.partition(":")
    owner: Any = import_module(module)
    *owners, last = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, last)
    for inner in ("__func__", "fget", "func"):  # of class methods, properties, cached ones
        found = getattr(found, inner, found)
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()
