"""Hashed n-gram embeddings added to the token embedding."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Row
from nam_megatron.sizes import ESTIMATED, FEATURES, Line, Param, Sizes, Stage

if TYPE_CHECKING:
    from nam_megatron.plan import Plan


class NgramHash(Switch):
    """Hashed n-gram embeddings added to the token embedding."""

    name = "ngram_hash"
    missing = "the n-gram embedding"

    order: Annotated[int, Field(ge=2), Row("length of the n-grams")]
    buckets: Annotated[NonNegativeInt, Row("rows of the table")]

    def check(self, plan: "Plan") -> Iterator[Problem]:
        if not self.buckets:
            yield Problem(
                "n-gram embeddings without buckets", "feature.ngram_hash.buckets", "set it to the size of the table"
            )

    # As designed, not as built: one table, looked up once a token and n-gram length, added to the embedding.

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        if stage.first:
            yield Param("ngram_embeddings.weight", (self.buckets, z.model.hidden_size), "tensor", "table")

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        if stage.first:
            z = z.own(order=self.order)
            yield z.line("n-gram positions", "8 T (order - 1)", "int64 buckets", bucket=FEATURES, mark=ESTIMATED)
