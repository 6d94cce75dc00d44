"""The gradient of the word embedding, added to Megatron's buffer row by row (torch side, Triton).

Autograd fills a gradient of the whole table with zeros, scatters the microbatch's rows into it in bf16, adds MTP's, which is another one,
and Megatron's hook adds the sum to the fp32 buffer: of 65,536 words and 8,192 tokens most of it is zeros. With
gradient_accumulation_fusion the rows are added where they belong, in fp32, of equal words in the order of their positions.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from nam_megatron.runtime.gpu import interpreted
from nam_megatron.runtime.wgrad import nothing

ROWS, COLUMNS, WARPS = 4, 1024, 4  # of a step of a program


def provide(models: list[HybridModel]) -> list[HybridModel]:
    """Let the stages of a model add the gradient of their word embedding, which has a buffer. In the form of Megatron's hooks before
    wrapping."""
    for model in models:
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                assert module.gtp_remat_size == 1, "no recipe keeps weights apart"
                # No bound method, which cannot be pickled; a deep copy gets a partial of its own.
                module.forward = partial(_embedded, module)
    return models


def _embedded(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
    """VocabParallelEmbedding.forward (megatron-core 0.19.2): tokens [b, s] -> [b, s, hidden], or [s / t, b, hidden] where it scatters
    over the tensor ranks."""
    if getattr(self.weight, "main_grad", None) is None:  # nobody trains it
        return VocabParallelEmbedding.forward(self, tokens)
    tokens = tokens.t()  # as the layers have them, so that nothing is turned afterwards, nor its gradient before
    if self.tp_group.size() > 1:
        tokens = tokens - self.vocab_start_index
        tokens = tokens.masked_fill((tokens < 0) | (tokens >= len(self.weight)), -1)
    rows = _Rows.apply(self.weight, tokens.contiguous(), self.tp_group.size() > 1)
    if self.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
    return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group).transpose(0, 1)


class _Rows(torch.autograd.Function):
    """Rows of a table [words, width] that has a `main_grad`; zeros where a word is -1, which some are if `absent`."""

    @staticmethod
    def forward(ctx, table: Tensor, words: Tensor, absent: bool) -> Tensor:
        ctx.save_for_backward(words)
        ctx.table = table
        if not absent:
            return F.embedding(words, table)
        return F.embedding(words.clamp(min=0), table).masked_fill_((words < 0).unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (words,), table = ctx.saved_tensors, ctx.table
        add_rows(table.main_grad, words, gradient)
        table.grad_added_to_main_grad = True  # then Megatron's hook waits for a gradient, and does not read it
        return nothing(table.shape, table.dtype), None, None


def add_rows(total: Tensor, words: Tensor, gradient: Tensor) -> None:
    """total [words, width] += gradient [..., width] at the rows `words` [...]; those of -1 are left out. Repeats bit by bit."""
    width, count = total.size(1), words.numel()
    assert total.is_contiguous() and gradient.shape == (*words.shape, width)
    if not count:
        return
    if not (total.is_cuda or interpreted()):
        held = words >= 0
        total.index_put_((words[held],), gradient[held].to(total.dtype), accumulate=True)
        return
    found, order = torch.sort(words.flatten().int(), stable=True)
    grid = count, triton.cdiv(width, COLUMNS)
    _add_rows[grid](
        total, found, order, gradient.contiguous(), count, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )


@triton.jit
def _add_rows(total, found, order, gradient, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """All rows of one word, if it begins at this place."""
    first = tl.program_id(0)
    word = tl.load(found + first)
    before = tl.load(found + first - 1, mask=first > 0, other=-1)
    if (word == before) | (word < 0):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    added = tl.zeros([COLUMNS], tl.float32)
    more = word >= 0
    while more:
        place = first + tl.arange(0, ROWS)
        same = tl.load(found + place, mask=place < count, other=-1) == word
        row = gradient + tl.load(order + place, mask=same, other=0) * width
        here = same[:, None] & known[None, :]
        added += tl.sum(tl.load(row[:, None] + column[None, :], mask=here, other=0.0).to(tl.float32), 0)
        first += ROWS
        more = tl.load(found + first, mask=first < count, other=-1) == word
    total += word.to(tl.int64) * width
    sums = tl.load(total + column, mask=known, other=0.0).to(tl.float32) + added
    tl.store(total + column, sums.to(total.dtype.element_ty), mask=known)
