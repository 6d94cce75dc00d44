"""An input projection with an odd number of columns, multiplied as if it had a few more (torch side).

cuBLAS's kernels for Hopper want rows of its matrices that begin 16 bytes apart or multiples of that: M2RNN's projection of NAM56R has
1,580 columns of bf16, and its three products took 1.5 ms a layer and 8,192 tokens, by kernels for the GPUs before
(benchmarks/whole52_h200.json). FP8 GEMMs want multiples of 16 columns: Mamba-2's has 8,248.
The parameter, its gradient's buffer and its checkpoints stay as they are: Transformer Engine's module is given a copy of the weight with
rows of zeros behind it.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.runtime.gpu import interpreted
from nam_megatron.runtime.wgrad import nothing

BLOCK = 1024  # columns of a program


def align(projection: Any, multiple: int) -> None:
    """Have Transformer Engine's norm-and-linear (2.20) give columns of zeros behind its own, up to a multiple of `multiple`."""
    assert not projection.config.delay_wgrad_compute, "a gradient of the padded weight has to be there when autograd is"
    assert len(projection.weight) % multiple, "block.py refuses it"
    # No bound method: a deep copy gets a partial of its own.
    projection._get_weight_tensors = partial(_weights, projection, multiple)


def _weights(self: Any, multiple: int) -> list[Tensor]:
    (weight,) = type(self)._get_weight_tensors(self)
    assert not hasattr(weight, "__fsdp_param__"), "block.py refuses an FSDP"
    return [padded(weight, multiple, self.fuse_wgrad_accumulation)]


def padded(weight: Tensor, multiple: int, accumulate: bool) -> Tensor:
    """[n, k] -> [n and rows of zeros up to a multiple of `multiple`, k].

    accumulate: whoever multiplies by it adds the gradient to its `main_grad` himself, as he would to the weight's.
    """
    sizes = (len(weight) + -len(weight) % multiple, weight.size(1))
    total = None
    if accumulate and weight.requires_grad and torch.is_grad_enabled():
        total = _gradient(sizes, weight.main_grad.dtype, weight.device)
    out = _Pad.apply(weight, sizes[0], total)
    if total is not None:
        # Written, not added to: it holds another layer's. And with this said, autograd gets a gradient, to be left alone.
        out.main_grad, out.overwrite_main_grad, out.grad_added_to_main_grad = total, True, False
    return out


@cache
def _gradient(sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One for all layers: the backward pass reads it as soon as it has been written."""
    return torch.empty(sizes, dtype=dtype, device=device)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, total: Tensor | None) -> Tensor:
        ctx.weight, ctx.total = weight, total
        out = weight.new_empty(rows, weight.size(1))
        out[: len(weight)] = weight
        out[len(weight) :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, total = ctx.weight, ctx.total
        if total is None:
            return gradient[: len(weight)], None, None
        return added(weight, total[: len(weight)]), None, None


def added(weight: Tensor, gradient: Tensor, first: int = 0) -> Tensor:
    """Add a gradient of a weight's rows from `first` on to its `main_grad`, or write it there; gives what autograd gets in its place."""
    own = weight.main_grad[first:]
    if getattr(weight, "overwrite_main_grad", False):
        own.copy_(gradient)
    else:
        own += gradient
    weight.grad_added_to_main_grad = True  # then Megatron's hooks wait for a gradient, and do not read it
    return nothing(weight.shape, weight.dtype)


def with_columns(x: Tensor, columns: int) -> Tensor:
    """[..., n] -> [..., columns], zeros behind its own. torch's pad fills all of it first, and copies at less than half the rate."""
    if not (x.is_cuda or interpreted()):
        return F.pad(x, (0, columns - x.size(-1)))
    rows = x.contiguous().view(-1, x.size(-1))
    out = x.new_empty(*x.shape[:-1], columns)
    _pad_kernel[(len(rows), triton.cdiv(columns, BLOCK))](rows, out, rows.size(1), columns, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _pad_kernel(x, out, own, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * own + column, mask=column < own, other=0.0)
    tl.store(out + row * columns + column, values, mask=column < columns)
