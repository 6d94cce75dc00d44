"""Hashed n-gram embeddings beside the token embedding (torch side; megatron-core 0.19.2).

For each order o from 2 on and each of several hash functions, the o tokens that end at a position name one of `buckets` narrow rows.
The rows of a position, side by side, are projected to the hidden size and added to the embedding of its token:

    e_i = E[t_i] + P [ T[o, k][hash_ok(t_i-o+1 .. t_i)] for each o, k ]

An n-gram that would begin before its document has no row: zeros stand there. All rows are one table, cut over the tensor ranks as the
vocabulary is. It is a vector to Megatron, so that it has no weight decay, which would take a row that no token asks for to zero, and
Muon leaves it to Adam; the projection is a matrix like others, whole on every rank.

The gradient of the table is sparse: what a microbatch asked for and nothing else, which Megatron's DDP adds to its fp32 buffer. From there
on it is dense: docs/budget.md says why, and what it costs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from nam_megatron.blocks import EMBEDDING
from nam_megatron.features.ngram_hash import PRIME, NgramHash
from nam_megatron.runtime.context import own, whole
from nam_megatron.runtime.gauges import GAUGES


def multipliers(count: int) -> Iterator[int]:
    """`count` numbers below PRIME that have nothing to do with each other, always the same: splitmix64 of 1, 2, ..."""
    for i in range(1, count + 1):
        x = i * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        yield (x ^ x >> 31) % (PRIME - 2) + 2


def rows(tokens: Tensor, order: int, heads: int, buckets: int, document_end: int | None) -> tuple[Tensor, Tensor]:
    """Of tokens [b, s]: the row that each order and head has for each position, and whether it has one: [b, s, (order - 1) heads].

    Order by order, in it head by head; each has `buckets` rows of its own. document_end: the last token of a document.
    """
    factors = multipliers((order - 1) * heads)
    back, within = [tokens], [torch.ones_like(tokens, dtype=torch.bool)]
    for _ in range(1, order):
        back.append(F.pad(back[-1], (1, 0))[:, :-1])
        before = F.pad(within[-1], (1, 0))[:, :-1]  # False where nothing stands before
        within.append(before if document_end is None else within[-1] & before & (back[-1] != document_end))
    found: list[Tensor] = []
    there: list[Tensor] = []
    for o in range(2, order + 1):
        for _ in range(heads):
            factor, state = next(factors), torch.zeros_like(tokens)
            for token in reversed(back[:o]):
                state = (state * factor + token + 1) % PRIME
            # A fifth power is a permutation of the residues; without it n-grams in steps would fall into rows in steps.
            square = state * state % PRIME
            state = square * square % PRIME * state % PRIME
            found.append(state % buckets + len(found) * buckets)
            there.append(within[o - 1])
    return torch.stack(found, -1), torch.stack(there, -1)


class _Looked(torch.autograd.Function):
    """Rows `ids` of a flat table, [..., width], with a sparse gradient; F.embedding's would be of the whole table or of a matrix."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return F.embedding(ids, table.view(-1, width))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        width = grad.size(-1)
        places = ids.unsqueeze(-1) * width + torch.arange(width, device=ids.device)
        sparse = torch.sparse_coo_tensor(places.view(1, -1), grad.flatten(), ctx.shape, check_invariants=False)
        return sparse, None, None


class NgramEmbedding(MegatronModule):
    """tokens [b, s] -> what is added to their embedding: [s, b, hidden]; under sequence parallelism s is this rank's share."""

    def __init__(
        self,
        config: TransformerConfig,
        tp_group: Any,
        cp_group: Any,
        *,
        order: int,
        heads: int,
        buckets: int,
        width: int,
        document_end: int | None,
    ):
        super().__init__(config)
        self.tp_group, self.cp_group, self.width = tp_group, cp_group, width
        self.hashed = order, heads, buckets, document_end
        tables = (order - 1) * heads
        assert tables * buckets % tp_group.size() == 0
        self.held = tables * buckets // tp_group.size()
        self.first = self.held * tp_group.rank()
        new = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.table = Parameter(torch.empty(self.held * width, **new))
        self.projection = Parameter(torch.empty(config.hidden_size, tables * width, **new))
        # Which rows a token has ever asked for, since the process began; one more for those of other ranks.
        self.register_buffer(
            "asked", torch.zeros(self.held + 1, dtype=torch.bool, device=new["device"]), persistent=False
        )
        if config.perform_initialization:
            config.init_method(self.projection)
            with get_cuda_rng_tracker().fork():
                config.init_method(self.table)
        self.table.tensor_model_parallel, self.table.partition_dim, self.table.partition_stride = True, 0, 1
        self.projection.sequence_parallel = config.sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        # Of whole sequences: the tokens before a rank's are another's.
        found = rows(whole(tokens.t(), self.cp_group).t(), *self.hashed)
        ids, there = (own(x.transpose(0, 1), self.cp_group).transpose(0, 1) for x in found)
        ids = ids - self.first
        mine = there & (ids >= 0) & (ids < self.held)
        if self.training:
            self.asked[ids.masked_fill(~mine, self.held)] = True
            if GAUGES.wants(EMBEDDING):
                GAUGES.add(EMBEDDING, self.share_asked())
        looked = _Looked.apply(self.table, ids.masked_fill(~mine, 0), self.width)
        looked = looked.masked_fill(~mine.unsqueeze(-1), 0).flatten(2).transpose(0, 1).contiguous()
        summed = reduce_from_tensor_model_parallel_region
        if self.config.sequence_parallel:
            summed = reduce_scatter_to_sequence_parallel_region
        return F.linear(summed(looked, group=self.tp_group), self.projection)

    def share_asked(self) -> Tensor:
        """Of this rank's rows, those that have ever got a gradient from a data-parallel rank; all of those have to call it together."""
        seen = self.asked[: self.held].to(torch.uint8)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX, group=group)
        return torch.count_nonzero(seen) / self.held

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        kept: dict[str, Tensor] = {}
        self._save_to_state_dict(kept, "", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(kept, prefix, {"table": 0}, sharded_offsets, **groups)


def build(ngrams: NgramHash, stack: ModuleSpec, layers: Mapping[str, ModuleSpec]) -> ModuleSpec:
    keys = ngrams.model_dump(exclude={"enabled"})
    stack.metainfo.setdefault("hooks", []).append(provider(**keys))
    return stack


def provider(**keys: Any) -> Callable[[list[HybridModel]], list[HybridModel]]:
    """Puts a NgramEmbedding beside the token embedding of a model's stages, in the form of Megatron's hooks before wrapping."""

    def provide(models: list[HybridModel]) -> list[HybridModel]:
        for model in models:
            if hasattr(model, "embedding"):
                groups = model.pg_collection
                ngrams = NgramEmbedding(model.config, groups.tp, groups.cp, **keys)
                model.embedding.add_module("ngrams", ngrams)
                model.embedding.register_forward_hook(_added, with_kwargs=True)
        return models

    return provide


def _added(embedding: Any, given: tuple, named: dict[str, Any], output: Tensor) -> Tensor:
    return output + embedding.ngrams(named["input_ids"] if "input_ids" in named else given[0])
