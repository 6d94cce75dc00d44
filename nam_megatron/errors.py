"""What a user is told when something is refused: every finding at once, each naming its key and file."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nam_megatron.origin import Origin

# Exit codes of every command.
OK, FINDINGS, REFUSED, INCOMPLETE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: a message, the recipe key it is about (dotted), and what to change.

    place: the key whose file and line are shown, where that is not `key` itself (a key that should not be there).
    """

    message: str
    key: str | None = None
    hint: str | None = None
    place: str | None = None


class Refused(Exception):
    """The recipe, the command line or a file asks for something that cannot be done as written.

    A user's mistake, so it is printed without a traceback; our own mistakes are assertions.
    """

    def __init__(self, problems: Problem | Iterable[Problem], origin: "Origin | None" = None):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.origin = origin
        assert self.problems, "Refused without a reason"
        super().__init__("; ".join(p.message for p in self.problems))

    def render(self, origin: "Origin | None" = None) -> str:
        """The text for a person, each key with the file and line (or override) that set it where `origin` knows."""
        lines, origin = [], self.origin or origin
        for p in self.problems:
            where = origin.where(p.place or p.key) if origin and p.key else None
            place = f" @ {p.key}" + (f" ({where})" if where else "") if p.key else ""
            lines += [f"error: {p.message}{place}"]
            if p.hint:
                lines += ["", f"hint: {p.hint}", ""]
        return "\n".join(lines).rstrip("\n") + "\n"


def raise_if(problems: Iterable[Problem]) -> None:
    """Refuse with all of `problems`; return if there are none."""
    if found := tuple(dict.fromkeys(problems)):
        raise Refused(found)


def quoted(words: Iterable[object]) -> str:
    """`a`, `b` and `c`, for messages."""
    *most, last = [f"`{w}`" for w in words]
    return f"{', '.join(most)} and {last}" if most else last
