"""Megatron's indexed datasets as their indices tell of them (no torch): what of each would be trained on, and whether Megatron could."""

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from operator import add, ne
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING

from nam_megatron.errors import Problem
from nam_megatron.recipe.training import Schedule
from nam_megatron.words.regular import kind

if TYPE_CHECKING:
    from nam_megatron.recipe import Recipe
    from nam_megatron.recipe.data import Data, Part

# megatron.core.datasets.indexed_dataset of 0.19.2: `.idx` is this, a version, a type, the numbers of sequences and of documents, then
# a length (4 bytes) and a place (8 bytes) of each sequence, and the first sequence of each document.
MAGIC, HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # of a token, by the type's code; 6 and 7 are floats
NAMES = ("training", "validation", "test")
SURPLUS = (
    0.005  # Megatron's `--mid-level-dataset-surplus`: of the samples of a blend's part, more are made than are drawn
)
PASSES = 10**6  # Megatron counts passes one by one, and keeps the order of each


class Unreadable(Exception):
    """Why an index is none."""


@dataclass(frozen=True)
class Index:
    """What `.idx` says. lengths: of each sequence, in tokens."""

    lengths: Sequence[int]
    token_bytes: int

    @property
    def bytes(self) -> int:
        """Of all tokens, in `.bin`."""
        return sum(self.lengths) * self.token_bytes


@dataclass(frozen=True)
class Share:
    """What is read of a dataset as one of NAMES: the sequences between two parts of the whole, for that many samples."""

    path: str
    of: str
    first: float
    last: float
    samples: int
    key: str = "path"  # of `data`

    def bounds(self, sequences: int) -> tuple[int, int]:
        """As `BlendedMegatronDatasetBuilder` rounds them."""
        return round(self.first * float(sequences)), round(self.last * float(sequences))


def read(prefix: Path) -> Index:
    """Raises Unreadable."""
    path, data = (prefix.with_name(f"{prefix.name}.{end}") for end in ("idx", "bin"))
    try:
        for file in (path, data):
            if not file.is_file():
                raise Unreadable(f"`{file}` is {(kind(file) or 'a folder') if file.exists() else 'not there'}")
        with path.open("rb") as stream:
            begin = stream.read(HEADER.size)
            if len(begin) < HEADER.size or not begin.startswith(MAGIC):
                raise Unreadable(f"`{path}` is no index of Megatron's")
            whole = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as err:
        raise Unreadable(f"`{path}` cannot be read: {err.strerror}") from None
    _, version, code, sequences, documents = HEADER.unpack(begin)
    if version != 1:
        raise Unreadable(f"`{path}` is of version {version}, and Megatron reads 1")
    if code not in BYTES:
        raise Unreadable(f"`{path}` says that tokens are of type {code}, which is no integer")
    if len(whole) < (needed := HEADER.size + 12 * sequences + 8 * documents):
        raise Unreadable(f"`{path}` is cut off: {len(whole)} bytes of {needed}")
    ends_of = whole[HEADER.size + 12 * sequences : needed].cast("q")  # documents, as Megatron asserts
    if not documents or ends_of[-1] != sequences:
        raise Unreadable(f"`{path}` has {sequences} sequences, and its documents others")
    index = Index(whole[HEADER.size : HEADER.size + 4 * sequences].cast("i"), BYTES[code])
    if index.lengths and min(index.lengths) < 0:
        raise Unreadable(f"`{path}` has a sequence of {min(index.lengths)} tokens")
    if (there := data.stat().st_size) != index.bytes:
        what = "is cut off" if there < index.bytes else f"is longer than `{path.name}` says"
        raise Unreadable(f"`{data}` {what}: {there} bytes of {index.bytes}")
    places = whole[HEADER.size + 4 * sequences : HEADER.size + 12 * sequences].cast("q")
    ends = map(add, places, map(index.token_bytes.__mul__, index.lengths))  # of millions, so in C
    if sequences and (min(places) < 0 or max(ends) > there):
        raise Unreadable(f"`{path}` has a sequence that does not lie within the {there} bytes of `{data}`")
    if any(map(ne, places, accumulate(map(index.token_bytes.__mul__, index.lengths), initial=0))):  # in another order
        laid = sorted((place, n * index.token_bytes) for place, n in zip(places, index.lengths, strict=True) if n)
        if any(place + size != after for (place, size), (after, _) in pairwise(laid)):
            raise Unreadable(f"`{path}` has sequences that share tokens of `{data}`, and leaves others out")
    return index


def objections(recipe: "Recipe", root: Path = Path(), *, there: bool = False) -> Iterator[Problem]:
    """What Megatron could not read of the datasets that a recipe names: an index that is none, and a share without tokens, in which it
    would look for the next ones for ever. root: what relative paths are of. there: only of datasets that this host has."""
    indices: dict[str, Index | None] = {}
    for share in shares(recipe.data, recipe.schedule):
        key = f"data.{share.key}"
        if there and not all(exists(root / f"{share.path}.{end}") for end in ("idx", "bin")):
            continue
        if share.path not in indices:
            indices[share.path] = None
            try:
                indices[share.path] = read(root / share.path)
            except Unreadable as why:
                hint = "the path of an indexed dataset is that of its `.bin` and `.idx`, without the suffix"
                yield Problem(str(why), key=key, hint=hint)
        if (index := indices[share.path]) is not None:
            yield from _unread(share, index, recipe, key)


def _unread(share: Share, index: Index, recipe: "Recipe", key: str) -> Iterator[Problem]:
    sequences, split = len(index.lengths), recipe.data.split
    first, last = share.bounds(sequences)
    tokens = sum(index.lengths[first:last])
    have = f"`{share.path}` has {sequences} document{'s' * (sequences != 1)}"
    if sequences and first == last:
        hint = "give it a larger share, or 0; or take a dataset with more documents"
        yield Problem(f"{have}, and the {share.of} share of `{split}` none of them", key="data.split", hint=hint)
    elif tokens < 1:
        where = f" in the {share.of} share of `{split}`" if split and sequences else ""
        yield Problem(f"{have}{' without a token' if sequences else ''}{where}", key=key, hint="take another dataset")
    elif (passes := _passes(share.samples, tokens, recipe.model.seq_length)) > PASSES:
        hint = "take a dataset with more tokens, or less of it"
        message = f"the {share.of} share of `{share.path}` has {tokens} tokens, and would be read {passes:,} times"
        yield Problem(message, key=key, hint=hint)


def _passes(samples: int, tokens: int, length: int) -> int:
    return -(-(samples * length + 1) // tokens)


def shares(data: "Data", schedule: Schedule) -> Iterator[Share]:
    """All that Megatron will open, evaluations or none: it builds what the split has, for no samples too."""
    steps, batch, evaluated = schedule.train_steps, schedule.global_batch_size, schedule.eval_steps
    samples = [steps * batch, (steps // schedule.eval_interval + 1) * evaluated * batch, evaluated * batch]
    if data.built is not None:
        for name, of, count in zip(("train", "valid"), NAMES, samples, strict=False):
            if name == "train" or evaluated:
                yield Share(str(data.built / name), of, 0.0, 1.0, count)
    elif data.name in ("indexed", "blend"):
        every = tuple(zip(NAMES, samples, _ends(data.split or "1,0,0"), strict=True))
        if data.parts is None:
            yield from (Share(data.path or "", of, *ends, count) for of, count, ends in every if ends[0] < ends[1])
            return
        yield from _mixed("parts", data.parts, every)
        if data.valid_parts is not None:
            yield from _mixed("valid_parts", data.valid_parts, [(NAMES[1], samples[1], (0.0, 1.0))])


def _mixed(key: str, parts: Sequence["Part"], every: Sequence[tuple[str, int, tuple[float, float]]]) -> Iterator[Share]:
    whole = _sum([part.weight for part in parts])
    for part in parts:
        for of, count, (first, last) in every:
            if first < last:
                drawn = ceil(ceil(count * (part.weight / whole)) * (1 + SURPLUS))
                yield Share(part.path, of, first, last, drawn, key)


def _ends(split: str) -> list[tuple[float, float]]:
    """Where each share begins and ends, by the arithmetic of Megatron's `convert_split_vector_to_split_matrix`."""
    weights = [float(word) for word in split.split(",")]
    whole = _sum(weights)
    at = list(accumulate((weight / whole for weight in weights), initial=0.0))
    return list(pairwise(at))


def _sum(weights: Sequence[float]) -> float:
    """One after the other, as numpy adds few of them; Python's own `sum` rounds less."""
    return list(accumulate(weights, initial=0.0))[-1]
