"""A sequence that the ranks of context parallelism share, whole again for what runs along it (torch side).

Megatron cuts a sequence into 2 c chunks for c ranks; rank r has chunks r and 2 c - 1 - r, one behind the other, so that causal attention
costs each the same (megatron-core 0.19.2, core/utils.py, get_batch_on_this_cp_rank). A recurrence gets whole sequences of its share of the
heads, as Megatron's Mamba-2 does (core/ssm/mamba_context_parallel.py); attention keeps its queries and gets all keys.

Gradients of what is gathered are summed over the ranks. A rank's parameters have the gradients of what it computed; Megatron averages them
with those of the data-parallel ranks.
"""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from nam_megatron.errors import Refused


def own_chunks(group: ProcessGroup) -> tuple[int, int]:
    """Which of a sequence's chunks this rank has, in its order."""
    dealt, first = _dealt(group.size()), 2 * group.rank()
    return dealt[first], dealt[first + 1]


def whole(x: Tensor, group: ProcessGroup) -> Tensor:
    """[s, ...], all tokens in their order on each rank, of this rank's [s / c, ...]."""
    return x if group.size() == 1 else _in_order(gather_from_sequence_parallel_region(x, group=group), group.size())


def by_heads(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """[s, b, sum of w / c]: whole sequences of this rank's share of each part, of parts [s / c, b, w] that have the heads in order."""
    c = group.size()
    by_rank = torch.cat([part.unflatten(-1, (c, -1)) for part in parts], -1)
    s, b, _, width = by_rank.shape
    return _in_order(all_to_all_sp2hp(by_rank.flatten(2), group=group).view(c * s, b, width), c)


def by_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """[s / c, b, w]: all heads of this rank's tokens, of whole sequences [s, b, w / c] of its share of the heads."""
    c = group.size()
    if c == 1:
        return x
    s, b, width = x.shape
    chunks = x.chunk(2 * c)
    by_rank = torch.cat([chunks[n] for n in _dealt(c)])
    return all_to_all_hp2sp(by_rank, group=group).view(s // c, b, c * width)


def own(x: Tensor, group: ProcessGroup) -> Tensor:
    """[s / c, ...]: this rank's tokens of a whole sequence [s, ...]."""
    if group.size() == 1:
        return x
    chunks = x.chunk(2 * group.size())
    return torch.cat([chunks[n] for n in own_chunks(group)])


def share(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of a parameter whose first dimension has the heads in order."""
    return x if group.size() == 1 else x.chunk(group.size())[group.rank()]


def refuse_documents(layer: str, group: ProcessGroup) -> None:
    """Chunks of packed documents are each document's, in another order than of one sequence."""
    if group.size() > 1:
        message = f"{layer} takes no packed documents under context parallelism"
        raise Refused(message, key="parallel.context", hint="set `parallel.context=1`")


def _dealt(c: int) -> list[int]:
    """A sequence's chunks as the ranks have them, rank by rank."""
    return [n for rank in range(c) for n in (rank, 2 * c - 1 - rank)]


def _in_order(x: Tensor, c: int) -> Tensor:
    """Tokens in their order, of the chunks of rank 0, those of rank 1, ..."""
    dealt, chunks = _dealt(c), x.chunk(2 * c)
    return torch.cat([chunks[dealt.index(n)] for n in range(2 * c)])
