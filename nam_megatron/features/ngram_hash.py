"""Hashed n-gram embeddings added to the token embedding."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.sizes import ESTIMATED, FEATURES, Line, Param


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

    # As designed, not as built: one table, looked up once a token and n-gram length, added to the embedding.

    def params(self, z, stage) -> Iterator[Param]:
        if stage.first:
            yield Param("ngram_embeddings.weight", (self.buckets, z.model.hidden_size), "tensor", "table")

    def activations(self, z, stage) -> Iterator[Line]:
        if stage.first:
            z = z.own(order=self.order)
            yield z.line("n-gram positions", "8 T (order - 1)", "int64 buckets", bucket=FEATURES, mark=ESTIMATED)
