"""What a user is told when something is refused: every finding at once, each naming its key and file."""

import contextlib
import difflib
import errno
import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from nam_megatron import process
from nam_megatron.launcher import called
from nam_megatron.words.problem import Problem as Problem

if TYPE_CHECKING:
    from pathlib import Path

# Exit codes of every command.
OK, FINDINGS, REFUSED, INCOMPLETE = 0, 1, 2, 3
INTERRUPTED = 130  # Ctrl-C, as shells count it
# What a disk or a network's file system says that cannot be used any more, whoever asked it; of a file that is already open without a name.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EINTR, errno.ETIMEDOUT)
# Of a value in the place of a name, and of another user's file: what helps.
OF_FILE = {errno.ENAMETOOLONG: None, errno.EACCES: "let this user read it"}
# What moves a cursor, or turns the writing round: a refusal quotes files that may be anybody's.
UNSHOWN = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {9, 10},
    "\N{REPLACEMENT CHARACTER}",
)
ROOM = "give it somewhere with room"
MAKES_ROOM = {errno.EFBIG: "raise `ulimit -f`"} | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there")


class Places(Protocol):
    """Who knows where keys were set, as sources.py's Sources does."""

    def where(self, key: str) -> str | None:
        """File and line, or the word of the command line; None where nobody set it."""


class Refused(Exception):
    """The recipe, the command line or a file asks for something that cannot be done as written.

    A user's mistake, so it is printed without a traceback; our own mistakes are assertions. Of one problem its message may be given, and
    the rest of it, by name.
    """

    def __init__(
        self,
        problems: str | Problem | Iterable[Problem],
        places: Places | None = None,
        *,
        key: str | None = None,
        hint: str | None = None,
        law: str | None = None,
    ):
        if isinstance(problems, str):
            problems = Problem(problems, key=key, hint=hint, law=law)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.places = places
        assert self.problems, "Refused without a reason"
        super().__init__("; ".join(p.message for p in self.problems))

    def render(self, places: Places | None = None) -> str:
        """The text for a person, each key with the file and line (or override) that set it where `places` knows."""
        lines, places = [], self.places or places
        for p in self.problems:
            where = places.where(p.place or p.key) if places and p.key else None
            place = f" @ {p.key}" + (f" ({where})" if where else "") if p.key else ""
            lines += [f"error: {p.message}{place}"]
            if p.hint:
                lines += ["", f"hint: {p.hint}", ""]
        text = "\n".join(lines).rstrip("\n") + "\n"
        return called(shown(text))


def shown(text: str) -> str:
    """Text that quotes a file which may be anybody's, without what moves a cursor."""
    return text.translate(UNSHOWN)


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
            problems.append(
                Problem(f"`{key}` is given twice: `{first[key]}` and `{value}`", hint=hint, law="word-twice")
            )
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
    except ModuleNotFoundError as err:
        if process.ours(err):
            raise
        code = REFUSED
        sys.stderr.write(Refused(lacking(err)).render())
    except OSError as err:
        if err.errno not in DISK and err.errno not in OF_FILE:
            raise
        code = REFUSED
        what = f"`{str(err.filename)[:200]}`: {err.strerror}" if err.filename else f"cannot write: {err.strerror}"
        problem = Problem(what, hint=ROOM, law="not-writable")
        if err.errno in OF_FILE:
            problem = Problem(what, hint=OF_FILE[err.errno], law="file-error")
        sys.stderr.write(Refused(problem).render())
    except RuntimeError as err:
        if not str(err).startswith("Symlink loop"):  # as Path.resolve says it
            raise
        code = REFUSED
        sys.stderr.write(Refused(str(err), hint="name a folder or a file", law="file-error").render())
    except OverflowError as err:
        if "timestamp" not in str(err):  # as `time.time` says it
            raise
        code, hint = REFUSED, "set it: Python tells no time beyond the year 2262"
        sys.stderr.write(Refused(f"the clock of this host: {err}", hint=hint, law="clock-beyond-time").render())
    except KeyboardInterrupt:
        code = INTERRUPTED
        sys.stderr.write("interrupted\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
    if out.lost and not isinstance(out.lost, BrokenPipeError):
        problem = Problem(f"cannot write: {out.lost.strerror}", hint=ROOM, law="not-writable")
        with contextlib.suppress(OSError):
            sys.stderr.write(Refused(problem).render())
        code = REFUSED
    sys.exit(code)


def lacking(err: ModuleNotFoundError) -> Problem:
    """Of a package that a command imports and this environment has not."""
    from nam_megatron.packages import missing

    return missing(err.name or "", process.started())


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
        sys.stderr.write(Refused(f"`{err.filename}`: {err.strerror}", law="file-error").render())
    return REFUSED


@contextlib.contextmanager
def writing(folder: "Path", key: str | None = None, hint: str | None = None) -> Iterator[None]:
    """What the system objects to, as a refusal that names the folder. key: by which another would be named."""
    try:
        yield
    except OSError as err:
        raise Refused(unwritable(folder, err, key, hint)) from None


def unwritable(folder: "Path", err: OSError, key: str | None = None, hint: str | None = None) -> Problem:
    hint = hint or MAKES_ROOM.get(err.errno or 0) or f"name a folder you may write to: `{key}=DIR`"
    return Problem(f"cannot write to `{folder}`: {err.strerror}", key=key, hint=hint, law="not-writable")


def not_there(path: "Path", key: str | None = None) -> Problem:
    """For somebody who named what is not there; a relative path is looked for where the command runs."""
    hint = None if path.is_absolute() else f"it is looked for in the current folder, `{os.getcwd()}`"
    return Problem(f"there is no `{path}`", key=key, hint=hint, law="file-missing")


def page(doc: str | None, render: Callable[[], str]) -> int:
    """A command that prints one file and takes no words, for `finish`. doc: what `--help` says."""
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        message = f"this takes no words, and here is `{sys.argv[1]}`"
        raise Refused(message, hint="`--help` says more", law="words-unwanted")
    sys.stdout.write(doc if sys.argv[1:] and doc else render())
    return OK


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
    return joined(f"`{w}`" for w in words)


def joined(words: Iterable[str]) -> str:
    """a, b and c, for messages."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def folded(before: str, said: str, blank: str, columns: int) -> str:
    """A text that breaks between words alone, under `blank` from its second line on."""
    return textwrap.fill(said, columns, initial_indent=before, subsequent_indent=blank, break_long_words=False,
                         break_on_hyphens=False, drop_whitespace=True) + "\n"  # fmt: skip
