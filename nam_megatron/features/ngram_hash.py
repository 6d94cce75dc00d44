"""Hashed n-gram embeddings added to the token embedding. Ours.

The formulas: runtime/ngram_embedding.py. Megatron has no flags for them; they travel in plan.json.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from nam_megatron.blocks import Gauge
from nam_megatron.features import Switch
from nam_megatron.words.setting import Row
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import FEATURES, GRADIENTS, Group, Line, Param, Sizes, Stage, Work

PRIME = 2**31 - 1  # of the hash: products of two residues stay below 2^62


class NgramHash(Switch):
    """Hashed n-gram embeddings added to the token embedding."""

    name = "ngram_hash"
    torch_side = "ngram_embedding"
    shapes = True
    measures = Gauge("n-gram rows")

    order: Annotated[int, Field(ge=2, le=8), Row("length of the longest n-grams; each from 2 on has rows of its own")]
    heads: Annotated[PositiveInt, Row("hash functions of each length")]
    buckets: Annotated[NonNegativeInt, Row("rows of each hash function")]
    width: Annotated[
        PositiveInt, Row("width of a row; all rows of a token go through one projection to the hidden size")
    ]
    document_end: Annotated[
        NonNegativeInt | None, Row("token that ends a document, before which no n-gram reaches; null: no token does")
    ]

    def exported(self, kinds: Collection[str]) -> tuple[str, Mapping[str, Any]]:
        return "ngrams", self.model_dump(include={"order", "heads", "buckets", "width", "document_end"})

    @property
    def tables(self) -> int:
        return (self.order - 1) * self.heads

    def ours(self, site: Site) -> str | None:
        return "Megatron 0.19.2 has no such embedding and would train without it"

    def _sizes(self, z: Sizes) -> Sizes:
        """L rows a token of width r, of B in each table."""
        return z.own(L=self.tables, r=self.width, B=self.buckets)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        if stage.first:
            yield Param("embedding.ngrams.table", (self.tables * self.buckets * self.width,), "tensor", "table")
            shape = (z.site.hidden_size, self.tables * self.width)
            yield Param("embedding.ngrams.projection", shape, "replicated", "weight")

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        if stage.first:
            z = self._sizes(z)
            yield z.line("n-gram rows' places", "9 T L", "int64, and whether there is one", bucket=FEATURES)
            yield z.line("n-gram rows", "2 Ts L r", "input of the projection", bucket=FEATURES)

    def working(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        if stage.first:
            why = "of the rows that were asked for: int64 places, bf16 and fp32, before it is added to the buffer of gradients"
            yield self._sizes(z).line("backward", "14 T L r", why, bucket=GRADIENTS)

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        if any(held.owner == self.name for group in groups for held in group.held):
            why = "bool: which of them a token has ever asked for"
            yield self._sizes(z).line("n-gram rows asked for", "L B / t", why, bucket=FEATURES, since="init")

    def flops(self, z: Sizes) -> Iterator[Work]:
        yield self._sizes(z).work("projection", "2 h L r", "of a token's n-gram rows")
