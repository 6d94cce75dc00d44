"""What-if: the recipe with another value at one key. The largest or smallest that fits, and a sweep over many."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nam_megatron.budget.memory import Budget, budget
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused, likely
from nam_megatron.recipe import Recipe, to_tree, value_at, with_values

LIMIT = 2**24  # no integer of a recipe means more
MOST_POINTS = 10_000  # of a sweep: some minutes
PATIENCE = 256  # refused values in a row, after which a search gives up


@dataclass(frozen=True)
class Trial:
    """The recipe with `value`. budget: None where it was refused, `reason` says why. note: what else had to change."""

    value: int
    budget: Budget | None
    reason: str = ""
    note: str = ""

    @property
    def good(self) -> bool:
        return self.budget is not None and self.budget.roomy


@dataclass(frozen=True)
class Fit:
    """best: the value that leaves the headroom, None if none does. beyond: the next one that does not, if any."""

    key: str
    best: Trial | None
    beyond: Trial | None


def resolve(recipe: Recipe, name: str, word: str) -> str:
    """The dotted key of an integer: itself, or the only one whose last part is `name`.

    Raises:
        Refused: no such integer, or several; `word` is the command's key.
    """
    keys = list(_integers(to_tree(recipe)))
    found = [key for key in keys if name in (key, key.rsplit(".", 1)[-1])]
    if len(found) == 1:
        return found[0]
    if found:
        raise Refused(f"`{name}` is {len(found)} keys", key=word, hint=f"say which: {', '.join(found)}")
    close = likely(name, [*keys, *(key.rsplit(".", 1)[-1] for key in keys)])
    meant = f"did you mean `{close}`?" if close else "any integer of the recipe, by its dotted path or its last name"
    raise Refused(f"no integer key `{name}`", key=word, hint=meant)


def _integers(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _integers(value, f"{path}.{key}" if path else key)
    elif isinstance(node, int) and not isinstance(node, bool):
        yield path


def attempt(recipe: Recipe, key: str, value: int, imbalance: float = 1.0) -> Trial:
    """The recipe with `value` at `key`; the global batch follows to the next multiple where it must."""
    note = ""
    try:
        trial = with_values(recipe, {key: value})
        s = trial.schedule
        step = s.micro_batch_size * max(1, trial.data_parallel)
        if key != "schedule.global_batch_size" and s.global_batch_size % step:
            batch = -(-s.global_batch_size // step) * step
            note = f"global batch {s.global_batch_size} -> {batch}, a multiple of {s.micro_batch_size} x {trial.data_parallel}"
            trial = with_values(recipe, {key: value, "schedule.global_batch_size": batch})
        return Trial(value, budget(translate(trial).plan, imbalance), note=note)
    except Refused as refused:
        return Trial(value, None, "; ".join(p.message for p in refused.problems))


def largest(recipe: Recipe, key: str, imbalance: float = 1.0, *, keep: bool = False) -> Fit:
    """The largest value that leaves the headroom: doubled until one does not or is refused, then halved in between.

    keep: only values with which the global batch may stay as it is.
    In between, refused values are stepped over. Memory must not shrink again above the first value that is too large.
    """
    at = _trials(recipe, key, imbalance, keep)
    best, beyond = 0, max(1, _value(recipe, key))
    while at(beyond).good and beyond <= LIMIT:
        best, beyond = beyond, 2 * beyond
    if beyond > LIMIT:
        return Fit(key, at(best), None)
    while (middle := _tested(at, best, beyond)) is not None:
        if at(middle).good:
            best = middle
        else:
            beyond = middle
    return Fit(key, at(best) if best else None, at(beyond))


def shrinks(recipe: Recipe, key: str, imbalance: float = 1.0) -> bool:
    """Whether more of it needs less memory: twice the present value, or the present one beside its half."""
    value = max(1, _value(recipe, key))
    less, here, more = (attempt(recipe, key, v, imbalance).budget for v in (value // 2 or 1, value, 2 * value))
    few, many = (here, more) if more else (less, here)
    return few is not None and many is not None and _needs(many) < _needs(few)


def smallest(recipe: Recipe, key: str, imbalance: float = 1.0, *, keep: bool = False) -> Fit:
    """The smallest value that leaves the headroom, of a key of which more needs less memory (`shrinks`). keep: as `largest` has it.

    Where the present value does not, it is doubled until one does; then halved in between. Refused values are stepped over.
    """
    at = _trials(recipe, key, imbalance, keep)
    low, best = 0, max(1, _value(recipe, key))
    while not at(best).good:
        less, more = at(low).budget if low else None, at(best).budget
        if more is None or (less is not None and _needs(more) >= _needs(less)):
            return Fit(key, None, at(low or best))
        low, best = best, 2 * best
    while (middle := _tested(at, low, best)) is not None:
        if at(middle).good:
            best = middle
        else:
            low = middle
    return Fit(key, at(best), at(low) if low else None)


def _trials(recipe: Recipe, key: str, imbalance: float, keep: bool) -> Callable[[int], Trial]:
    """What becomes of a value, each tried once. keep: refused where the global batch could not stay as it is."""
    tried: dict[int, Trial] = {}

    def at(value: int) -> Trial:
        if value not in tried:
            trial = attempt(recipe, key, value, imbalance)
            tried[value] = Trial(value, None, trial.note) if keep and trial.note else trial
        return tried[value]

    return at


def _needs(found: Budget) -> float:
    return found.worst.steady.total


def _value(recipe: Recipe, key: str) -> int:
    value = value_at(recipe, key)
    assert isinstance(value, int), key
    return value


def _tested(at: Callable[[int], Trial], low: int, high: int) -> int | None:
    """A value between that is not refused, the nearest to the middle; None if there is none."""
    middle = (low + high) // 2
    near = sorted(range(max(low + 1, middle - PATIENCE), min(high, middle + PATIENCE)), key=lambda v: abs(v - middle))
    return next((v for v in near if at(v).budget is not None), None)


def values(text: str) -> tuple[str, range]:
    """`KEY:FROM:TO[:STEP]`, both ends included.

    Raises:
        Refused: it is something else.
    """
    name, *numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(n.isdecimal() and len(n) < 19 for n in numbers):
        raise Refused(f"cannot read the sweep `{text}`", key="sweep", hint="write KEY:FROM:TO or KEY:FROM:TO:STEP")
    first, last, step = (*map(int, numbers), 1)[:3]
    if not step or last < first:
        message = f"the sweep `{text}` has no values"
        raise Refused(message, key="sweep", hint="FROM must not exceed TO, and STEP not be 0")
    points = range(first, last + 1, step)
    if len(points) > MOST_POINTS:
        hint = f"a larger STEP: {name}:{first}:{last}:{-(-len(points) // MOST_POINTS) * step}"
        said = f"the sweep `{text}` has {len(points):,} values, more than {MOST_POINTS:,}"
        raise Refused(said, key="sweep", hint=hint)
    return name, points


def sweep(recipe: Recipe, key: str, points: Sequence[int], imbalance: float = 1.0) -> Iterator[Trial]:
    for value in points:
        yield attempt(recipe, key, value, imbalance)
