"""The order of a dataset's samples, which Megatron works out once and keeps: bound to what it was made of, and whole (torch side).

megatron-core 0.19.2 (core/datasets/megatron_dataset.py) finds a kept order by the dataset's path, the seed and the lengths asked for. Of a
dataset that was written anew at its path it would take the old one: documents left out, and samples that begin and end in others. It
takes an order that was damaged since, or whose writing broke off, as it lies there: gpt_dataset.py, blended_dataset.py.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Refused
from nam_megatron.words.whole import digest, write_whole


def install(plan: Plan) -> None:
    """Have datasets that this process builds from now on look for an order of documents with the same lengths, as it was written."""

    make = MegatronDataset.__init__

    @wraps(make)
    def bound(self: MegatronDataset, *words: Any, **named: Any) -> None:
        make(self, *words, **named)
        self.unique_identifiers["lengths"] = lengths(self.dataset)
        self.unique_description = json.dumps(
            self.unique_identifiers, indent=4, default=lambda thing: thing.unique_identifiers
        )
        name = hashlib.md5(self.unique_description.encode("utf-8"), usedforsecurity=False)
        self.unique_description_hash = name.hexdigest()

    MegatronDataset.__init__ = bound
    GPTDataset._build_document_sample_shuffle_indices = _kept_whole(GPTDataset._build_document_sample_shuffle_indices)
    BlendedDataset._build_indices = _kept_whole(BlendedDataset._build_indices)


def lengths(data: Any) -> str:
    """SHA-256 of the lengths of a dataset's sequences; of one dataset worked out once."""
    if (known := getattr(data, "nam_lengths", None)) is None:
        known = data.nam_lengths = hashlib.sha256(numpy.ascontiguousarray(data.sequence_lengths)).hexdigest()
    return known


def _kept_whole(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`build`, which makes an order or takes a kept one, without one that is not what was written; it is made again then."""

    @wraps(build)
    def built(self: Any) -> Any:
        folder, first = _folder(self), not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if folder is None or not first:  # the others read what the first rank has left
            return build(self)
        split = self.split if isinstance(self, BlendedDataset) else self.index_split
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{split.name}-"
        sums = folder / f"{stem}sums.json"
        try:
            with _alone(folder):
                if _stored(sums) != _digests(folder, stem):
                    for path in folder.glob(f"{stem}*"):  # a new file of the name leaves what others have open as it is
                        path.unlink()
                order = build(self)
                if not sums.exists():
                    write_whole(sums, json.dumps(_digests(folder, stem)))
        except OSError as err:
            message = f"the order of samples in `{folder}` cannot be kept: {err.strerror}"
            hint = "make room there, or let `data.cache` name a folder that may be written to"
            raise Refused(message, key="data.cache", hint=hint) from None
        return order

    return built


def _folder(data: Any) -> Path | None:
    """Where the order of a dataset is kept, as Megatron has it; None where it is not."""
    if data.config.path_to_cache or data.config.mock or isinstance(data, BlendedDataset):
        return Path(data.config.path_to_cache) if data.config.path_to_cache else None
    return Path(data.dataset.path_prefix, "cache", f"{type(data).__name__}_indices")


def _digests(folder: Path, stem: str) -> dict[str, str]:
    return {path.name: digest(path) for path in sorted(folder.glob(f"{stem}*.npy")) if path.is_file()}


def _stored(path: Path) -> Any:
    """Hashes as they were written; none of an order that nobody has finished."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        return {}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of the runs that keep orders in a folder one at a time, where its file system has locks."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder, os.O_RDONLY)
            held.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
