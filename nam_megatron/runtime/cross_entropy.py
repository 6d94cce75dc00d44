"""Cross entropy that reads the logits once forward and turns them into their gradient backward (torch side, Triton).

Of bf16 logits Megatron 0.19.2 makes fp32 tensors of tokens x vocabulary and passes over them several times, compiled or not, which is
also where the memory of a run without DSA peaks. What is needed of a row is the logarithm of its sum of exponentials:

    loss = log sum - (logit of the label - most)            most = the largest logit, sum = of exp(logit - most)
    gradient = (exp(logit - most) / sum - [label]) * gradient of the loss

All differences are of logits: steps of fp32 are 1e-3 at 1e4, so most + log sum would be that far off. Bytes a logit in bf16: 2 forward,
4 backward; nothing else grows with the vocabulary.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from nam_megatron.errors import Refused
from nam_megatron.runtime.gpu import runs_kernels

LARGEST = "nam_largest"
WARPS = 8
COLUMNS = 8 * 32 * WARPS  # 16 bytes of bf16 a thread
PIECES = 4  # so many columns of one thread are read before its maximum moves


def provide(models: list[HybridModel]) -> list[HybridModel]:
    """Let the stages of a model compute their losses here, those of MTP's depths too. In the form of Megatron's hooks before wrapping.

    Raises:
        Refused: no GPU; Megatron's is not put in its place.
    """
    if not runs_kernels():
        hint = "set `precision.cross_entropy=compiled`, or `megatron`"
        raise Refused("the fused cross entropy needs a GPU", key="precision.cross_entropy", hint=hint)

    for model in models:
        model.compute_language_model_loss = partial(_of_batch, model.tp_group)
    return models


def _of_batch(group: dist.ProcessGroup, labels: Tensor, logits: Tensor) -> Tensor:
    """Megatron's compute_language_model_loss: labels and losses [b, s]."""
    return cross_entropy(logits, labels.t().contiguous(), group).t().contiguous()


def cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Loss of each token [s, b] in fp32, of logits [s, b, vocabulary / tensor ranks] and labels [s, b].

    The backward pass overwrites the logits with their gradient and says so to autograd, which then refuses (RuntimeError) a second
    one, and any other that still needs them; who reads them afterwards reads gradients. With a `group` of tensor ranks each holds its
    slice of the vocabulary, in rank order. NaN and +inf among the logits, and a label outside the vocabulary of all ranks (-100 too: mask
    losses by another label), make the loss and the row's gradient NaN. The logits get an attribute LARGEST, [s, b] int32, the first of
    the largest in each row, unless ranks have slices of them.
    """
    assert not (logits.is_leaf and logits.requires_grad), "a leaf would be overwritten by its gradient"
    loss, largest = _CrossEntropy.apply(logits, labels, group)
    if group is None or group.size() == 1:
        setattr(logits, LARGEST, largest)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        logits, labels, slice_ = logits.contiguous(), labels.contiguous(), logits.size(-1)
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        # Per row: the maximum; the sum of exponentials below it; the label's logit less the maximum, on the rank that holds it.
        most, sums, own = torch.empty(3, *labels.shape, dtype=torch.float32, device=logits.device)
        largest = torch.empty(labels.shape, dtype=torch.int32, device=logits.device)
        _cross_entropy_sums[(labels.numel(),)](
            logits, labels, most, sums, own, largest, slice_, rank * slice_, ranks * slice_,
            COLUMNS=COLUMNS, PIECES=PIECES, num_warps=WARPS,
        )  # fmt: skip
        if ranks > 1:
            top = most.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            held = (labels >= rank * slice_) & (labels < (rank + 1) * slice_)
            both = torch.stack((sums * torch.exp(most - top), torch.where(held, own + (most - top), 0.0)))
            dist.all_reduce(both, group=group)
            most, (sums, own) = top, both
        ctx.save_for_backward(logits, labels, most, sums)
        ctx.first = rank * slice_
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return torch.log(sums) - own, largest

    @staticmethod
    def backward(ctx, d_loss: Tensor, _: Any) -> tuple[Tensor, None, None]:
        logits, labels, most, sums = ctx.saved_tensors
        _cross_entropy_gradient[(labels.numel(),)](
            logits, labels, most, sums, d_loss.contiguous(), logits.size(-1), ctx.first,
            COLUMNS=COLUMNS * PIECES, num_warps=WARPS,
        )  # fmt: skip
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None


@triton.jit
def _cross_entropy_sums(
    logits, labels, most, sums, own, largest, slice_, slice_start, vocabulary, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * slice_
    column = tl.arange(0, PIECES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    # Finite, so that a thread which has seen nothing but -inf can still subtract it.
    top = tl.full([COLUMNS], -3e38, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, slice_, PIECES * COLUMNS):
        x = tl.load(logits + first + column, mask=first + column < slice_, other=float("-inf")).to(tl.float32)
        higher, piece = tl.max(x, 0, return_indices=True)
        place = tl.where(higher > top, first + piece * COLUMNS, place)
        new = tl.maximum(top, higher)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new[None, :]), 0)
        top = new
    high = tl.max(top, 0)
    tl.store(most + row, high)
    tl.store(largest + row, tl.min(tl.where(top == high, place + tl.arange(0, COLUMNS), slice_), 0))
    whole = tl.sum(total * tl.exp(top - high), 0)
    label = tl.load(labels + row)
    tl.store(sums + row, tl.where((label >= 0) & (label < vocabulary), whole, float("nan")))
    label -= slice_start
    held = (label >= 0) & (label < slice_)
    tl.store(own + row, tl.load(logits + label, mask=held, other=0.0).to(tl.float32) - high)


@triton.jit
def _cross_entropy_gradient(logits, labels, most, sums, d_loss, slice_, slice_start, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * slice_
    label, by = tl.load(labels + row) - slice_start, tl.load(d_loss + row)
    high, scale = tl.load(most + row), 1 / tl.load(sums + row)
    for first in range(0, slice_, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < slice_, other=0.0).to(tl.float32)
        d = (tl.exp(x - high) * scale - tl.where(column == label, 1.0, 0.0)) * by
        tl.store(logits + column, d.to(logits.dtype.element_ty), mask=column < slice_)
