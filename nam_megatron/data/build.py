"""Documents -> a built dataset: pieces are scanned, then encoded, in parallel; what is finished is not done twice (torch side).

The result depends on the inputs, the tokenizer and the options alone: not on the number of processes, nor on how often the build was
killed and started again.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any, Literal

import numpy
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from nam_megatron.data import identity, indexed, sources, tokenizer
from nam_megatron.data import manifest as manifests
from nam_megatron.data.manifest import SPLITS, TOKENIZER, File, Input, Manifest, Split
from nam_megatron.data.sources import Piece, Source
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.words.whole import digest, write_whole

with warnings.catch_warnings():  # of what only training needs
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
warnings.filterwarnings("ignore", module="megatron.core._rank_utils")  # there are no ranks here

WORK, LOCK = "work", "lock"
CHOICE = "`--duplicates drop` keeps the first of each, `--duplicates keep` all"
SHOWN = 10  # findings of one kind that are printed
Stamps = dict[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class Options:
    """valid_share: of the documents, chosen by the hash of their text, so that a document stays on its side in every build.

    skip: what of the inputs is left out, see sources.without.
    """

    tokenizer: Path
    valid_share: float
    duplicates: Literal["refuse", "drop", "keep"]
    workers: int
    skip: tuple[str, ...] = ()


def build(out: Path, inputs: Sequence[Source], options: Options) -> Manifest:
    """Build `out` from `inputs`, or finish what a killed build left there; returns at once if it is finished.

    Raises:
        Refused: rows that are no documents, duplicates, an empty split, an input named twice, nothing there to skip; `out` is no
            folder, holds another dataset or anything else, or another build is at work there.
    """
    if out.exists() and not out.is_dir():
        raise Refused(f"`{out}` is a file, and a dataset is a folder", hint="name another")
    twice = [s.path for i, s in enumerate(inputs) if s.path.resolve() in [o.path.resolve() for o in inputs[:i]]]
    raise_if(Problem(f"`{path}` is named twice") for path in twice)
    left = sources.without(inputs, options.skip)
    raise_if([Problem("nothing is left to read")] * (not left))
    gone = [s.path.name for s in inputs if s.path not in {o.path for o in left}]
    before = _stamps(left, options)
    known = tokenizer.load(options.tokenizer)
    finished = (out / manifests.NAME).exists()
    # Killed before it had its lock, a build leaves an empty folder.
    begun = (out / WORK / LOCK).exists() or (out.exists() and [*out.rglob("*")] == [out / WORK])
    foreign = sorted(path.name for path in out.iterdir()) if out.exists() and not (finished or begun) else []
    raise_if(Problem(f"`{out}` holds `{name}`", hint="name a folder that is empty or new") for name in foreign[:1])
    # A finished dataset is only read.
    with contextlib.nullcontext() if finished else _locked(out / WORK):
        try:
            return _build(out, left, gone, options, known, before)
        except Exception:
            raise_if(_changed(before, _stamps(left, options)))  # which explains whatever it was
            raise


def _build(
    out: Path, inputs: Sequence[Source], gone: Sequence[str], options: Options, known: Tokenizer, before: Stamps
) -> Manifest:
    """gone: names of inputs that are skipped whole. before: of the inputs, as everything else is read after."""
    if options.duplicates == "refuse":  # before anything is read whole
        same = [f"{path} is {first}, byte for byte" for path, first in sources.twins(inputs)]
        raise_if(_listed("duplicates", same, f"`--skip {same[0].split(' is ')[0]}`, or {CHOICE}" if same else ""))
    with pool(options.workers) as run:
        contents = run("hash", sources.content, inputs)
        key = _key(inputs, contents, gone, options, known)
        if (out / manifests.NAME).exists():
            done = manifests.read(out)
            raise_if([Problem(f"`{out}` holds another dataset", hint="name another folder")] * (done.key != key))
            return done
        work = _work(out / WORK / key, before)
        pieces = [piece for source in inputs for piece in sources.pieces(source)]
        scans = run("read", _scan, pieces, [work / f"{i:06}.scan.json" for i in range(len(pieces))])
        left_out = _judge(pieces, scans, options)
        of_source = dict.fromkeys(inputs, 0)
        for piece, scan in zip(pieces, scans, strict=True):
            of_source[piece.source] += len(scan["digests"])
        bare = [str(source.path) for source, count in of_source.items() if not count]  # a download that broke off, say
        said = [f"`{path}` holds no documents" for path in bare]
        raise_if(_listed("inputs without documents", said, f"get it again, or `--skip {bare[0]}`" if bare else ""))
        jobs = [partial(_encode, options.tokenizer, options.valid_share, frozenset(skip)) for skip in left_out]
        parts = [work / f"{i:06}" for i in range(len(pieces))]
        counts = run("encode", _call, jobs, pieces, parts)
        ended = [place for count in counts for place in count.get("ended", ())]  # not in a build begun before
        said = [f"{place} holds the token that ends a document" for place in ended]
        raise_if(_listed("texts that hold it", said, f"`--skip {ended[0]}` leaves it out" if ended else ""))
        _merge(out, parts, counts, known.get_vocab_size())
        (out / TOKENIZER).mkdir(exist_ok=True)
        tokenizer.copy(options.tokenizer, out / TOKENIZER)
        # What was hashed, read for duplicates and encoded was one and the same.
        again = run("hash again", sources.content, inputs)
        other = [str(s.path) for s, was, now in zip(inputs, contents, again, strict=True) if was != now]
        if _key(inputs, contents, gone, options, known) != key:
            other.append(str(options.tokenizer))
        if found := dict.fromkeys((*_changed(before, _stamps(inputs, options)), *map(_change, other))):
            shutil.rmtree(work)
            raise Refused(found)
    names = [f"{split}.{end}" for split in SPLITS for end in ("bin", "idx")]
    names += [f"{TOKENIZER}/{name}" for name in (tokenizer.FILE, tokenizer.CONFIG)]
    made = Manifest(
        version=1,
        key=key,
        inputs=tuple(
            Input(path=str(s.path), sha256=content, documents=of_source[s])
            for s, content in zip(inputs, contents, strict=True)
        ),
        valid_share=options.valid_share,
        skipped=options.skip,
        duplicates=sum(map(len, left_out)),
        empty=sum(scan["empty"] for scan in scans),
        vocabulary=known.get_vocab_size(),
        largest_id=max(count["largest_id"] for count in counts),
        splits={s: Split(**{k: sum(c[s][k] for c in counts) for k in ("documents", "tokens")}) for s in SPLITS},
        files={name: _file(out / name) for name in names},
    )
    manifests.write(out, made)
    shutil.rmtree(out / WORK)
    return made


def _file(path: Path) -> File:
    size = path.stat().st_size
    blocks = identity.content(path) if size > identity.WHOLE else None
    return File(sha256=digest(path), bytes=size, blocks=blocks)


def _stamps(inputs: Sequence[Source], options: Options) -> Stamps:
    """Of all that a build reads. Raises Refused for a tree in which something is no file."""
    found = {path: stamp for source in inputs for path, stamp in sources.stamps(source).items()}
    for name in (tokenizer.FILE, tokenizer.CONFIG):
        found |= sources.stamps(Source(options.tokenizer / name, "jsonl", "", ()))
    return found


def _changed(before: Stamps, now: Stamps) -> list[Problem]:
    paths = [path for path in dict.fromkeys((*before, *now)) if before.get(path) != now.get(path)]
    return [*map(_change, paths[:SHOWN])]


def _change(path: str) -> Problem:
    return Problem(f"`{path}` changed while it was read", hint="build from a copy that nobody writes to")


def _work(folder: Path, before: Stamps) -> Path:
    """Where finished pieces are kept; those of files that somebody has touched since are thrown away."""
    path, text = folder / "stamps.json", json.dumps(before)
    if folder.exists() and not (path.exists() and path.read_text(encoding="utf-8") == text):
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    write_whole(path, text)
    return folder


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """One build at a time. The lock ends with its process; its file says that the folder is ours, and stays as long as that does."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / LOCK
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another build is at work in `{work.parent}`", hint="wait for it, or name another") from None
        except OSError as err:
            raise Refused(f"`{path}` cannot be locked: {err.strerror}", hint="name a local folder") from None
        yield


def _key(
    inputs: Sequence[Source], contents: Sequence[str], gone: Sequence[str], options: Options, known: Tokenizer
) -> str:
    """Hash of everything that decides the result, and of what was left out of it."""
    made_with = [digest(options.tokenizer / name) for name in (tokenizer.FILE, tokenizer.CONFIG)]
    # Builds of an earlier version knew one end of a line.
    kinds = ("tree, each end of a line as it is" if s.kind == "tree" else s.kind for s in inputs)
    read: list[Any] = [[k, s.field, s.suffixes, c] for k, s, c in zip(kinds, inputs, contents, strict=True)]
    decisive = [read, made_with, options.valid_share, options.duplicates, sources.PIECE]
    _, *further = tokenizer.ends(options.tokenizer, known)
    if further:  # they may stand in other files than those that `made_with` has
        decisive.append(further)
    if options.skip:
        decisive.append([gone, [s.skip for s in inputs]])
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


# Reading


def _scan(piece: Piece, out: Path) -> dict[str, Any]:
    """What is in a piece: place and hash of each document, how many are empty, which rows are none. Kept in `out`."""
    if out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"digests": [], "empty": 0, "problems": []}
    for at, text in sources.documents(piece):
        if not isinstance(text, str):
            found["problems"].append(f"{sources.place(piece, at)}: {text}")
            if len(found["problems"]) == SHOWN:
                break
        elif not text.strip():
            found["empty"] += 1
        else:
            found["digests"].append([at, hashlib.sha256(text.encode()).hexdigest()])
    write_whole(out, json.dumps(found))
    return found


def _judge(pieces: Sequence[Piece], scans: Sequence[dict], options: Options) -> list[list[int]]:
    """The places in each piece of documents to leave out. Raises Refused for what cannot be built."""
    problems = [p for scan in scans for p in scan["problems"]]
    raise_if(_listed("unreadable rows", problems, "mend them, or leave them out: `--skip` and the place"))
    first: dict[str, tuple[int, int]] = {}
    twice: list[tuple[int, int, int, int]] = []
    for i, scan in enumerate(scans):
        for at, hashed in scan["digests"]:
            if (before := first.setdefault(hashed, (i, at))) != (i, at):
                twice.append((i, at, *before))
    if options.duplicates != "keep" and twice:
        named = [f"{sources.place(pieces[i], at)} is {sources.place(pieces[j], of)}" for i, at, j, of in twice[:SHOWN]]
        if options.duplicates == "refuse":
            raise Refused(_listed("duplicates", named, CHOICE, len(twice)))
        print(f"{len(twice)} duplicates left out, the first: {'; '.join(named)}", file=sys.stderr)
    raise_if([Problem("the inputs hold no documents")] * (not first))
    valid = sum(_is_valid(digest, options.valid_share) for digest in first)
    for split, count in (("train", len(first) - valid), ("valid", valid)):
        if not count:
            hint = "give more documents or another `--valid`"
            raise Refused(f"none of {len(first)} documents falls into the split `{split}`", hint=hint)
    skip: list[list[int]] = [[] for _ in pieces]
    if options.duplicates == "drop":
        for i, at, *_ in twice:
            skip[i].append(at)
    return skip


def _listed(what: str, lines: Sequence[str], hint: str, total: int | None = None) -> list[Problem]:
    """At most SHOWN findings, and how many there are."""
    total = len(lines) if total is None else total
    rest = [Problem(f"... and {total - SHOWN} more {what}")] if total > SHOWN else []
    shown = [*(Problem(line) for line in lines[:SHOWN]), *rest]
    return [*shown[:-1], Problem(shown[-1].message, hint=hint)] if shown else []


def _is_valid(digest: str, share: float) -> bool:
    return int(digest[:16], 16) < share * 2**64


# Writing


def _encode(folder: Path, share: float, skip: frozenset[int], piece: Piece, out: Path) -> dict[str, Any]:
    """Write a piece's documents to `out`.{train,valid}.{bin,idx}, each with its end; what was written, kept in `out`.json."""
    done = out.with_suffix(".json")
    if done.exists():
        return json.loads(done.read_text())
    encoder = _tokenizer(folder)
    end = tokenizer.named(folder, encoder)["eos"]
    dtype = _dtype(encoder.get_vocab_size())
    builders = {split: IndexedDatasetBuilder(f"{out}.{split}.bin", dtype) for split in SPLITS}
    count: dict[str, Any] = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
    count |= {"largest_id": end, "ended": []}
    for at, text in sources.documents(piece):
        assert isinstance(text, str), f"{sources.place(piece, at)} was readable before"
        if at in skip or not text.strip():
            continue
        split = "valid" if _is_valid(hashlib.sha256(text.encode()).hexdigest(), share) else "train"
        ids = numpy.array([*tokenizer.encode(encoder, text), end], dtype)
        if end in ids[:-1]:  # some tokenizers of others have it as a piece like any other
            count["ended"].append(sources.place(piece, at))
        builders[split].add_document(ids, [len(ids)])
        count[split]["documents"] += 1
        count[split]["tokens"] += len(ids)
        count["largest_id"] = max(count["largest_id"], int(ids.max()))
    for split, builder in builders.items():
        builder.finalize(f"{out}.{split}.idx")
    write_whole(done, json.dumps(count))
    return count


@cache
def _tokenizer(folder: Path) -> Any:
    """Once per process: it is read in a second."""
    return tokenizer.load(folder)


def _dtype(entries: int) -> type[numpy.number]:
    """Megatron's own choice is 4 bytes from 65,500 entries on; ids of 65,536 fit into two."""
    return numpy.uint16 if entries <= 2**16 else numpy.int32


def _merge(out: Path, parts: Sequence[Path], counts: Sequence[dict], entries: int) -> None:
    for split in SPLITS:
        builder = IndexedDatasetBuilder(str(out / f"{split}.bin"), _dtype(entries))
        for part, count in zip(parts, counts, strict=True):
            if count[split]["documents"]:  # an index without sequences cannot be read
                builder.add_index(f"{part}.{split}")
        builder.finalize(str(out / f"{split}.idx"))


# Checking


def check(folder: Path, vocab_size: int | None) -> tuple[Manifest, list[Problem]]:
    """Read a built dataset again, every byte of it. vocab_size: of the model it is for, if that is to be checked.

    Raises Refused where there is no manifest; what else is wrong is returned.
    """
    manifest = manifests.read(folder)
    problems = list(manifests.damage(folder, manifest, thorough=True))
    if vocab_size is not None:
        problems += manifests.misfit(manifest, vocab_size)
    if problems:
        return manifest, problems
    read, kept = (sum(part.documents for part in of) for of in (manifest.inputs, manifest.splits.values()))
    if read != kept + manifest.duplicates:
        message = f"the manifest has {read} documents of its inputs, and {kept} in its splits without {manifest.duplicates} duplicates"
        problems.append(Problem(message, hint="build the dataset again"))
    encoder = tokenizer.load(folder / TOKENIZER)
    if encoder.get_vocab_size() != manifest.vocabulary:
        problems.append(Problem(f"the tokenizer has {encoder.get_vocab_size()} entries, not {manifest.vocabulary}"))
    for split, said in manifest.splits.items():
        try:
            indexed.read(folder / split)
        except indexed.Unreadable as err:  # though its hash is the manifest's
            problems.append(Problem(str(err), hint="build the dataset again"))
            continue
        end = tokenizer.named(folder / TOKENIZER, encoder)["eos"]
        problems += _wrong(IndexedDataset(str(folder / split)), split, said, manifest, end, encoder.id_to_token(end))
    return manifest, problems


def _wrong(data: IndexedDataset, split: str, said: Split, manifest: Manifest, end: int, name: str) -> Iterator[Problem]:
    lengths = data.sequence_lengths
    if (found := (len(data.document_indices) - 1, int(lengths.sum()))) != (said.documents, said.tokens):
        message = f"`{split}` has {found[0]} documents and {found[1]} tokens, not {said.documents} and {said.tokens}"
        yield Problem(message)
    unended, largest = 0, 0
    for i in range(len(data)):
        ids = data[i]
        unended += int(ids[-1]) != end
        largest = max(largest, int(ids.max()))
    if unended:
        yield Problem(f"{unended} documents of `{split}` do not end with `{name}`")
    if largest > manifest.largest_id:
        yield Problem(f"`{split}` has token {largest}, and the manifest knows of {manifest.largest_id} as the largest")


# Many processes


class pool:
    """`with pool(n) as run: run(title, function, *arguments)` is `list(map(function, *arguments))` in n processes, with a bar on
    terminals."""

    def __init__(self, workers: int):
        self._pool = None
        if workers > 1:
            # From a server without threads: a fork of this process would lose the tokenizer library's and the bar's. It imports torch once.
            context = get_context("forkserver")
            context.set_forkserver_preload([__name__])
            # Ctrl-C reaches every process of a terminal. The server leaves it to this one, and the workers die of it in silence;
            # until the first of them is there it has to wait, or that one would complain that nobody waits for it.
            seen: list[int] = []
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                forkserver.ensure_running()
                signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
                self._pool = ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_DFL))
                self._pool.submit(int).result()
            finally:
                signal.signal(signal.SIGINT, before)
            if seen:
                self.__exit__()
                raise KeyboardInterrupt

    def __enter__(self) -> Callable[..., list]:
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _run(self, title: str, function: Callable, *arguments: Sequence) -> list:
        each = self._pool.map if self._pool is not None else map
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            return list(bar.track(each(function, *arguments), len(arguments[0]), description=title))


def _call(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)
