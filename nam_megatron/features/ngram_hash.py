"""Hashed n-gram embeddings added to the token embedding. Ours.

The formulas: runtime/ngram_embedding.py. Megatron has no flags for them; they travel in plan.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from nam_megatron.blocks import Gauge
from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Row
from nam_megatron.sizes import FEATURES, GRADIENTS, Group, Line, Param, Sizes, Stage, Work

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Plan

PRIME = 2**31 - 1  # of the hash: products of two residues stay below 2^62


class NgramHash(Switch):
    """Hashed n-gram embeddings added to the token embedding."""

    name = "ngram_hash"
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

    @property
    def tables(self) -> int:
        return (self.order - 1) * self.heads

    def build(self, stack: "ModuleSpec", layers: "Mapping[str, ModuleSpec]") -> "ModuleSpec":
        from nam_megatron.runtime import ngram_embedding

        keys = self.model_dump(exclude={"enabled"})
        stack.metainfo.setdefault("hooks", []).append(ngram_embedding.provider(**keys))
        return stack

    def ours(self, plan: "Plan") -> str | None:
        return "Megatron 0.19.2 has no such embedding and would train without it"

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, r = "feature.ngram_hash.", plan.recipe
        if not self.buckets:
            yield Problem("n-gram embeddings without buckets", at + "buckets", "set it to the rows of a hash function")
        if self.buckets > PRIME:
            yield Problem(
                f"more buckets than the {PRIME} values of the hash", at + "buckets", "fewer buckets, more heads"
            )
        if self.tables * self.buckets % r.parallel.tensor:
            message = f"{self.tables * self.buckets} rows cannot be shared by {r.parallel.tensor} tensor ranks"
            yield Problem(message, at + "buckets", "make it a multiple of `parallel.tensor`")
        if self.document_end is not None and self.document_end >= r.model.vocab_size:
            message = f"token {self.document_end} is not among the {r.model.vocab_size} of the vocabulary"
            yield Problem(message, at + "document_end", "give the tokenizer's, or null")
        if plan.mtp and r.parallel.pipeline > 1:
            message = "under MTP the last pipeline stage would have n-gram rows of its own, which nothing keeps equal to the first's"
            yield Problem(message, at + "enabled", "set `parallel.pipeline=1` or `feature.mtp.depths=0`")
        if r.feature.megatron_fsdp:
            message = "Megatron-FSDP copies gradients into buffers, and that of the n-grams' table is sparse"
            yield Problem(message, at + "enabled", "set `feature.megatron_fsdp.enabled=false`")

    def _sizes(self, z: Sizes) -> Sizes:
        """L rows a token of width r, of B in each table."""
        return z.own(L=self.tables, r=self.width, B=self.buckets)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        if stage.first:
            yield Param("embedding.ngrams.table", (self.tables * self.buckets * self.width,), "tensor", "table")
            shape = (z.model.hidden_size, self.tables * self.width)
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
