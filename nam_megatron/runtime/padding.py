"""A dataset looked at as it is read: what is no token to train on ends the run. What Megatron makes of its padding: mends/padding.py.

An id beyond the model's vocabulary is no token, and a tensor-parallel embedding makes zeros of it.
"""

from typing import Any

import numpy


class Unfit(Exception):
    """A dataset holds what is no token to train on; the message says where."""

    def __str__(self) -> str:
        """Without what a loader's process puts around it."""
        return super().__str__().rpartition(f"{__name__}.{type(self).__name__}: ")[2].rstrip()


class Looked:
    """Megatron's indexed dataset, each piece looked at as it is read. lost: ids that would not be trained as they stand, and why."""

    def __init__(self, data: Any, path: str, entries: int):
        self._data, self._path, self._entries = data, path, entries
        self.lost, self.why = numpy.array([], numpy.int64), ""

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what unpickling asks for before there are any
            raise AttributeError(name)
        return getattr(self._data, name)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """As IndexedDataset's. Raises Unfit."""
        ids = self._data.get(idx, offset=offset, length=length)
        if ids.size and not (ids.min() >= 0 and ids.max() < self._entries):
            first = ids[(ids < 0) | (ids >= self._entries)][0]
            raise Unfit(f"{self._where(idx)} has token {first}, and the model's vocabulary {self._entries}")
        if self.lost.size and (found := ids[numpy.isin(ids, self.lost)]).size:
            raise Unfit(f"{self._where(idx)} has token {found[0]}, {self.why}")
        return ids

    def _where(self, idx: int) -> str:
        return f"document {idx} of `{self._path}`"


def special(tokenizer: Any, end: int) -> numpy.ndarray:
    """Ids that a tokenizer of `transformers` leaves out when it makes text of tokens, but for the end of a document."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return numpy.array(sorted({*added, *tokenizer.all_special_ids} - {end}), numpy.int64)
