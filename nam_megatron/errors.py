"""What a user is told when something is refused: every finding at once, each naming its key and file."""

import errno
import os
import select
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from nam_megatron.origin import Origin

# Exit codes of every command.
OK, FINDINGS, REFUSED, INCOMPLETE = 0, 1, 2, 3
INTERRUPTED = 130  # Ctrl-C, as shells count it

# What writing can meet that is no mistake of ours.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


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


def raise_if_twice(words: Iterable[tuple[str, str]]) -> None:
    """Refuse a command line's (key, value) pairs where a key stands twice: the last would win, and nobody would know.

    The same value twice is refused as well: which spellings are one value (`1e-3`, `0.001`) is not to be guessed here.
    """
    first: dict[str, str] = {}
    problems = []
    for key, value in words:
        if key in first:
            problems.append(Problem(f"`{key}` is given twice: `{first[key]}` and `{value}`", None, "keep one of them"))
        first.setdefault(key, value)
    raise_if(problems)


def finish(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code, whatever a person, a pipe or a disk does to it meanwhile.

    A refusal and Ctrl-C are said in a line. A reader that has read enough (`| head`) changes nothing, a full disk refuses; a stream
    that was closed beforehand (`>&-`) takes everything.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
    code: int | str | None = OK
    try:
        try:
            code = command()
        except SystemExit as end:  # argparse's, or of a command within
            code = end.code
        except Refused as refused:
            code = REFUSED
            sys.stderr.write(refused.render())
        except KeyboardInterrupt:
            code = INTERRUPTED
            sys.stderr.write("interrupted\n")
        sys.stdout.flush()
    except OSError as err:
        if (unwritten_code := unwritten(err)) is None:
            raise
        code = unwritten_code or code
    sys.exit(code)


def unwritten(err: Exception) -> int | None:
    """The exit code where `err` says that stdout cannot be written, and why on stderr; None where it says something else.

    What is still buffered goes nowhere, or Python would complain once more at exit.
    """
    left = isinstance(err, BrokenPipeError) and _reader_left()
    full = isinstance(err, OSError) and err.filename is None and err.errno in UNWRITABLE
    if not left and not full:
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if left:
        return OK
    sys.stderr.write(Refused(Problem(f"cannot write: {err.strerror}", None, "give it somewhere with room")).render())
    return REFUSED


def _reader_left() -> bool:
    """Whether it is stdout whose reader is gone, and not another pipe's, whose loss is a failure."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def quoted(words: Iterable[object]) -> str:
    """`a`, `b` and `c`, for messages."""
    *most, last = [f"`{w}`" for w in words]
    return f"{', '.join(most)} and {last}" if most else last
