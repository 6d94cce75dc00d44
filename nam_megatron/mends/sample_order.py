"""The order of a dataset's samples, which Megatron works out once and keeps: bound to what it was made of (torch side).

megatron-core 0.19.2 (core/datasets/megatron_dataset.py) finds a kept order by the dataset's path, the seed and the lengths asked for. Of a
dataset that was written anew at its path it would take the old one: documents left out, and samples that begin and end in others.
"""

import hashlib
import json
from functools import wraps
from typing import Any

import numpy
from megatron.core.datasets.megatron_dataset import MegatronDataset

from nam_megatron.compile.plan import Plan


def install(plan: Plan) -> None:
    """Have datasets that this process builds from now on look for an order of documents with the same lengths."""

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


def lengths(data: Any) -> str:
    """SHA-256 of the lengths of a dataset's sequences; of one dataset worked out once."""
    if (known := getattr(data, "nam_lengths", None)) is None:
        known = data.nam_lengths = hashlib.sha256(numpy.ascontiguousarray(data.sequence_lengths)).hexdigest()
    return known
