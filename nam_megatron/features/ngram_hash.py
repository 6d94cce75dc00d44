"""Hashed n-gram embeddings added to the token embedding."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt

from nam_megatron.errors import Problem
from nam_megatron.features import Switch


class NgramHash(Switch):
    name: ClassVar[str] = "ngram_hash"
    missing: ClassVar[str | None] = "the n-gram embedding"

    order: Annotated[int, Field(ge=2)]
    buckets: NonNegativeInt

    def check(self, plan) -> Iterator[Problem]:
        if not self.buckets:
            yield Problem(
                "n-gram embeddings without buckets", "feature.ngram_hash.buckets", "set it to the size of the table"
            )
