"""Documents out of JSONL, Parquet and trees of source files, in pieces that can be read apart from each other."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, BinaryIO, Literal

from nam_megatron.errors import Problem, Refused, counted, raise_if
from nam_megatron.words.regular import closed, irregular
from nam_megatron.words.whole import digest

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PIECE = 8 * 2**20  # bytes of one piece of work, about
SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}
# What a file of JSON lines begins with that is none.
OTHERS = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """An input as it was given. field: the key or column of the text. suffixes: of the files of a tree that are read.

    skip: what of it is not read: files of a tree, by their paths below it; lines of JSONL and rows of Parquet, from 1.
    """

    path: Path
    kind: Literal["jsonl", "parquet", "tree"]
    field: str
    suffixes: tuple[str, ...]
    skip: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Part of a source: bytes [first, last) of JSONL, row groups of Parquet, files of a tree by their place in the sorted list."""

    source: Source
    first: int
    last: int


class Unreadable(Exception):
    """Why a row or file is no document."""


def source(path: Path, field: str, suffixes: tuple[str, ...]) -> Source:
    """Raises Refused for what is none of the three kinds."""
    if path.is_dir():
        if not suffixes:
            raise Refused(f"`{path}` is a folder", hint="say which files: `--suffix .h --suffix .cpp`")
        tree = Source(path, "tree", field, tuple(sorted(suffixes)))
        if not files(tree):
            raise Refused(f"no file in `{path}` ends in {' or '.join(tree.suffixes)}", hint="another `--suffix`")
        passed = [found for folder, _, names in path.walk() for name in names if (found := folder / name).is_symlink()]
        if passed := sorted(link for link in passed if link.is_dir() or link.name.endswith(tree.suffixes)):
            sys.stderr.write(f"> {counted(len(passed), 'link')} in `{path}` not followed, as `{passed[0]}`\n")
        return tree
    raise_if(irregular((path,)))
    if not path.is_file():
        raise Refused(f"no file or folder `{path}`")
    if (kind := SUFFIXES.get(path.suffix)) is None:
        hint = "unpack it first" if path.suffix in (".gz", ".zst", ".xz", ".bz2", ".zip") else None
        raise Refused(f"`{path}` is neither a folder nor a file in {', '.join(SUFFIXES)}", hint=hint)
    if kind == "jsonl":
        with path.open("rb") as stream:
            head = stream.read(4)
        if other := next((name for magic, name in OTHERS.items() if head.startswith(magic)), None):
            hint = "unpack it, or write it anew, first" if other != "Parquet" else "its name ends with `.parquet`"
            raise Refused(f"`{path}` is {other}, not JSON lines in UTF-8", hint=hint)
    return Source(path, kind, field, ())  # type: ignore[arg-type]


def without(inputs: Sequence[Source], places: Sequence[str]) -> list[Source]:
    """The inputs without what `places` name, as `place` does: an input, a file of a tree, `file:line`, `file:row`.

    Raises Refused for a place that would not be read: it may be misspelt.
    """
    left, left_out = {source.path.resolve(): source for source in inputs}, set()
    problems = []
    for word in dict.fromkeys(places):
        path, (file, _, number) = Path(word).resolve(), word.rpartition(":")
        row = Path(file).resolve()
        tree = next((left[above] for above in path.parents if above in left and left[above].kind == "tree"), None)
        if path in left:
            left_out.add(path)
        elif tree is not None and path in {found.resolve() for found in files(tree)}:
            inside = path.relative_to(tree.path.resolve()).as_posix()
            left[tree.path.resolve()] = replace(tree, skip=tuple(sorted({*tree.skip, inside})))
        elif row in left and number.isascii() and number.isdigit() and 0 < int(number) <= _rows_of(left[row]):
            left[row] = replace(left[row], skip=tuple(sorted({*left[row].skip, int(number)})))
        else:
            hint = "an input, a file of a folder, or `file:line`, as a refusal names them"
            problems.append(Problem(f"`{word}` would not be read", hint=hint))
    raise_if(problems)
    return [source for path, source in left.items() if path not in left_out]


def _rows_of(source: Source) -> int:
    """Lines of JSONL, rows of Parquet; none of a tree."""
    if source.kind == "parquet":
        return _parquet(source).metadata.num_rows
    if source.kind == "tree":
        return 0
    with source.path.open("rb") as stream:
        return sum(1 for _ in stream)


def files(tree: Source) -> list[Path]:
    """The files of a tree with its suffixes, sorted by path; links are not followed. Raises Refused for one that is no file."""
    walked = tree.path.walk(on_error=_closed)
    named = (folder / name for folder, _, names in walked for name in names if name.endswith(tree.suffixes))
    found = sorted(path for path in named if path.relative_to(tree.path).as_posix() not in tree.skip)
    modes = [(path, path.lstat().st_mode) for path in found]
    raise_if(irregular(path for path, mode in modes if not (S_ISREG(mode) or S_ISLNK(mode))))
    return [path for path, mode in modes if S_ISREG(mode)]


def _closed(err: OSError) -> None:
    """Its documents would be left out without a word."""
    raise Refused(closed(err))


def twins(inputs: Sequence[Source]) -> Iterator[tuple[Path, Path]]:
    """Files that are another one byte for byte, each with the first of them. Only files of one size are read; blank ones are none."""
    of_size: dict[int, list[Path]] = {}
    for source in inputs:
        for path in files(source) if source.kind == "tree" else [source.path]:
            of_size.setdefault(path.stat().st_size, []).append(path)
    for paths in of_size.values():
        first: dict[str, Path] = {}
        for path in paths if len(paths) > 1 else []:
            before = first.setdefault(digest(path), path)
            if before != path and not _blank(path):
                yield path, before


def _blank(path: Path) -> bool:
    with path.open("rb") as stream:
        return not any(block.strip() for block in iter(partial(stream.read, 2**20), b""))


def content(source: Source) -> str:
    """Hash of all that a source holds; of a tree, without the files that are skipped."""
    if source.kind != "tree":
        return digest(source.path)
    whole = hashlib.sha256()
    for path in files(source):
        whole.update(f"{path.relative_to(source.path)}\0{digest(path)}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def stamps(source: Source) -> dict[str, tuple[int, ...] | None]:
    """{file: its size, and when it and what is known of it were last changed}, by the path within the source; None of one that is gone."""
    found: dict[str, tuple[int, ...] | None] = {}
    for path in files(source) if source.kind == "tree" else [source.path]:
        try:
            said = path.stat()
        except FileNotFoundError:
            found[str(path)] = None
        else:
            found[str(path)] = said.st_size, said.st_mtime_ns, said.st_ctime_ns
    return found


def pieces(source: Source) -> Iterator[Piece]:
    """The source cut into pieces of about PIECE bytes; how depends on its content alone."""
    if source.kind == "parquet":
        for group in range(_parquet(source).metadata.num_row_groups):
            yield Piece(source, group, group + 1)
    elif source.kind == "jsonl":
        size = source.path.stat().st_size
        for first in range(0, size, PIECE):
            yield Piece(source, first, min(first + PIECE, size))
    else:
        first, size, paths = 0, 0, files(source)
        for number, path in enumerate(paths, 1):
            size += path.stat().st_size
            if size >= PIECE or number == len(paths):
                yield Piece(source, first, number)
                first, size = number, 0


def documents(piece: Piece) -> Iterator[tuple[int, str | Unreadable]]:
    """Each document's place within the piece, from 0 (see `place`), and its text or why there is none."""
    read = {"jsonl": _lines, "parquet": _rows, "tree": _texts}[piece.source.kind]
    for at, get in read(piece):
        try:
            text = get()
            if not isinstance(text, str):
                raise Unreadable(f"`{piece.source.field}` is {type(text).__name__}, not text")
            text.encode("utf-8")  # JSON can hold halves of characters
        except KeyError:
            yield at, Unreadable(f"no `{piece.source.field}`")
        except (Unreadable, ValueError, RecursionError) as err:
            yield at, Unreadable(str(err))
        else:
            yield at, text


def place(piece: Piece, at: int) -> str:
    """`file:line` or `file:row`, from 1, or the file, of a document; reads the file up to there."""
    if piece.source.kind == "tree":
        return str(files(piece.source)[piece.first + at])
    return f"{piece.source.path}:{_before(piece) + at + 1}"


def _begin(stream: BinaryIO, offset: int) -> int:
    """Go to the first line that begins at `offset` or later; where that is."""
    stream.seek(max(offset - 1, 0))
    if offset:
        stream.readline()
    return stream.tell()


def _lines(piece: Piece) -> Iterator[tuple[int, Callable[[], object]]]:
    """A line belongs to the piece in which it begins. Blank lines are no documents."""
    skip = _places(piece)
    with piece.source.path.open("rb") as stream:
        _begin(stream, piece.first)
        at = 0
        while stream.tell() < piece.last and (line := stream.readline()):
            if line.strip() and at not in skip:
                yield at, partial(_field, line, piece.source.field)
            at += 1


def _places(piece: Piece) -> frozenset[int]:
    """What is skipped of a piece of lines or rows, from 0 within it."""
    skip = piece.source.skip
    return frozenset(int(number) - 1 - _before(piece) for number in skip) if skip else frozenset()


def _before(piece: Piece) -> int:
    """Lines or rows of the source before the piece; reads the file up to there."""
    if piece.source.kind == "parquet":
        metadata = _parquet(piece.source).metadata
        return sum(metadata.row_group(group).num_rows for group in range(piece.first))
    with piece.source.path.open("rb") as stream:
        end = _begin(stream, piece.first)
        stream.seek(0)
        return sum(stream.read(min(2**20, end - i)).count(b"\n") for i in range(0, end, 2**20))


def _field(line: bytes, field: str) -> object:
    keys: list[str] = []

    def whole(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys[:] = (key for key, _ in pairs)  # the line's own come last
        return dict(pairs)

    row = json.loads(line, object_pairs_hook=whole)
    if not isinstance(row, dict):
        raise Unreadable("not a JSON object")
    if keys.count(field) > 1:
        raise Unreadable(f"`{field}` stands in it twice")
    return row[field]


def _parquet(source: Source) -> "ParquetFile":
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(source.path)
    except (OSError, pyarrow.ArrowException) as err:
        raise Refused(f"`{source.path}` is no Parquet file: {err}") from None
    if source.field not in (columns := file.schema_arrow.names):
        raise Refused(f"`{source.path}` has no column `{source.field}`", hint=f"it has {', '.join(columns)}")
    return file


def _rows(piece: Piece) -> Iterator[tuple[int, Callable[[], object]]]:
    field = piece.source.field
    table = _parquet(piece.source).read_row_groups(range(piece.first, piece.last), columns=[field])
    skip = _places(piece)
    return ((at, value.as_py) for at, value in enumerate(table.column(field)) if at not in skip)


def _texts(piece: Piece) -> Iterator[tuple[int, Callable[[], object]]]:
    paths = files(piece.source)[piece.first : piece.last]
    return ((at, partial(_text, path)) for at, path in enumerate(paths))


def _text(path: Path) -> str:
    """Not `read_text`, to which all ends of lines are one."""
    return path.read_bytes().decode("utf-8")
