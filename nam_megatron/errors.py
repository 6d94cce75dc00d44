"""What a user is told when something is refused: every finding at once, each naming its key and file."""

import contextlib
import difflib
import io
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from nam_megatron.origin import Origin

# Exit codes of every command.
OK, FINDINGS, REFUSED, INCOMPLETE = 0, 1, 2, 3
INTERRUPTED = 130  # Ctrl-C, as shells count it


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
            hint = "keep one of them"
            if key.endswith("overlay"):  # the one key of which several may be meant
                both = dict.fromkeys(word for given in (first[key], value) for word in given.strip("[]").split(","))
                hint = f"to lay all: `+overlay=[{','.join(both)}]`"
            problems.append(Problem(f"`{key}` is given twice: `{first[key]}` and `{value}`", None, hint))
        first.setdefault(key, value)
    raise_if(problems)


class Output:
    """stdout or stderr that a command may always write to: what can no longer be written goes nowhere, and `lost` says why."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as err:
            self.lost = self.lost or err
            # What is still buffered too, or Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def finish(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code, whatever a person, a pipe or a disk does to it meanwhile.

    A refusal and Ctrl-C are said in a line. A reader that has read enough (`| head`) changes nothing, a full disk refuses; a stream
    that was closed beforehand (`>&-`) takes everything.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale of ASCII must not end a run at the first name with an umlaut.
        with contextlib.suppress(OSError):  # what is buffered cannot be written; that is said at the end
            sys.stdout.reconfigure(errors="backslashreplace")
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, _ = Output(sys.stdout), Output(sys.stderr)
    code: int | str | None
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
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
    if out.lost and not isinstance(out.lost, BrokenPipeError):
        problem = Problem(f"cannot write: {out.lost.strerror}", None, "give it somewhere with room")
        with contextlib.suppress(OSError):
            sys.stderr.write(Refused(problem).render())
        code = REFUSED
    sys.exit(code)


def keyless(command: Callable[[], int]) -> int:
    """A command's exit code, for `finish`. What is refused is said without a recipe's keys: such a command has none. A file that cannot
    be read or written is a refusal, too.
    """
    try:
        return command()
    except Refused as refused:
        sys.stderr.write(without_keys(refused.problems).render())
    except OSError as err:
        if err.filename is None:  # a full disk, or stdout
            raise
        sys.stderr.write(Refused(Problem(f"`{err.filename}`: {err.strerror}")).render())
    return REFUSED


def without_keys(problems: Iterable[Problem]) -> Refused:
    return Refused(replace(p, key=None) for p in problems)


def likely(word: str, names: Iterable[str]) -> str | None:
    """The name that was meant by a word that is none: the one with the word in it, else the most alike."""
    names = list(names)
    within = [name for name in names if len(word) > 2 and word in name]
    if len(within) == 1:
        return within[0]
    return next(iter(difflib.get_close_matches(word, within, 1) or difflib.get_close_matches(word, names, 1)), None)


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `8 GPUs`, for messages."""
    return f"{number} {noun}{'s' * (number != 1)}"


def quoted(words: Iterable[object]) -> str:
    """`a`, `b` and `c`, for messages."""
    *most, last = [f"`{w}`" for w in words]
    return f"{', '.join(most)} and {last}" if most else last
