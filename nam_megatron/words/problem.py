"""One finding about what a person wrote, or about a machine."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: a message, the recipe key it is about (dotted), and what to change.

    place: the key whose file and line are shown, where that is not `key` itself (a key that should not be there). law: its id in laws/,
    where a recipe can waive it.
    """

    message: str
    _: KW_ONLY
    key: str | None = None
    hint: str | None = None
    place: str | None = None
    law: str | None = None
