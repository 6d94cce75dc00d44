"""Experts multiplied by torch's grouped GEMM, which reads on the GPU how many rows each has (torch side).

Transformer Engine's GroupedLinear (2.20) is told the rows of each expert as a list, for which the host has to wait until the router is
done: once a layer and microbatch the GPU runs out of work. `torch.nn.functional.grouped_mm` (2.11, CUTLASS on Hopper) takes offsets that
lie on the GPU. Transformer Engine's modules go on owning the parameters: names, checkpoints, hooks and gradients' buffers are the same.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.errors import Problem

SERVED = (9, 0), (10, 0)  # compute capabilities; aten/src/ATen/native/cuda/GroupedBlas.cpp of torch 2.11
ADDED = 4096  # elements of a program that adds gradients


class Ends(NamedTuple):
    """Where the rows of each expert end, int32 [experts] on the GPU, the last expert first: in the place of Megatron's list of counts."""

    ends: Tensor

    @classmethod
    def of(cls, routing_map: Tensor) -> "Ends":
        """routing_map: bool [tokens, experts], the last expert first."""
        return cls(routing_map.sum(dim=0).cumsum(0).to(torch.int32))

    def tolist(self) -> Tensor:
        """What Megatron asks counts for (TEGroupedMLP.forward, 0.19.2), and gives to both projections."""
        return self.ends


def unserved() -> Iterator[Problem]:
    """A GPU on which torch would multiply expert by expert, and wait for the counts."""
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) not in SERVED:
        message = f"torch's grouped GEMM reads counts on GPUs of capability 9.0 and 10.0, and this one has {'.'.join(map(str, found))}"
        key = "model.blocks.moe.expert_gemm"
        yield Problem(message, key, f"set `{key}=transformer_engine`")


def keep_counts_on_gpu(experts: torch.nn.Module, accumulate: bool) -> None:
    """Have both projections of a new TEGroupedMLP take rows sorted from the last expert to the first, and Ends for them.

    accumulate: they add weights' gradients to Megatron's buffers themselves, all experts' at once, where there are buffers.
    """
    for projection in (experts.linear_fc1, experts.linear_fc2):
        # Only a sharded optimizer of Adam moves them into a buffer: everywhere else they stay where they are put here.
        weights = _weights(projection)
        for weight, place in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
            weight.data = place
        # No bound method, which cannot be pickled; a deep copy gets a partial of its own, and so its own weights.
        projection.forward = partial(_project, projection, accumulate=accumulate)


def _weights(projection: Any) -> list[Tensor]:
    """The last expert's first."""
    return [getattr(projection, f"weight{index}") for index in reversed(range(projection.num_gemms))]


def _project(self: Any, rows: Tensor, ends: Tensor, accumulate: bool) -> tuple[Tensor, None]:
    """[rows, k] times each expert's [n, k], and no bias."""
    weights = _weights(self)
    buffered = accumulate and all(getattr(weight, "main_grad", None) is not None for weight in weights)
    return _Project.apply(rows, ends, buffered, *weights), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, buffered: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weights, ctx.buffered = weights, buffered
        return F.grouped_mm(rows, _stacked(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (rows, ends), weights = ctx.saved_tensors, ctx.weights
        d_out, (of_rows, _, _, *of_weights) = d_out.contiguous(), ctx.needs_input_grad
        d_rows = F.grouped_mm(d_out, _stacked(weights), offs=ends) if of_rows else None
        if not any(of_weights):
            return d_rows, None, None, *[None] * len(weights)
        gradients = F.grouped_mm(d_out.mT, rows, offs=ends)
        if ctx.buffered:
            _add([weight.main_grad for weight in weights], gradients)
            for weight in weights:
                weight.grad_added_to_main_grad = True  # then Megatron's hooks wait for a gradient, and do not read it
        return d_rows, None, None, *gradients.unbind()


def _in_order(matrices: Sequence[Tensor]) -> Tensor | None:
    """[experts, n, k] of matrices that lie one behind the other, without a copy; None if they do not."""
    first = matrices[0].detach()
    storage, begun = first.untyped_storage().data_ptr(), first.storage_offset()
    for i, matrix in enumerate(matrices):
        if matrix.untyped_storage().data_ptr() != storage or matrix.storage_offset() != begun + i * first.numel():
            return None
        if not matrix.is_contiguous():
            return None
    return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """[experts, n, k]. Megatron's buffers hold parameters from the last to the first: there it is no copy. Where the padded end of a
    bucket parts them, or whoever moved the model moved each weight by itself, it is one."""
    whole = _in_order(weights)
    return torch.stack([w.detach() for w in weights]) if whole is None else whole


def _add(buffers: Sequence[Tensor], gradients: Tensor) -> None:
    """Add gradients [experts, n, k] to fp32 buffers, in one launch where these are in order."""
    whole = _in_order(buffers)
    for total, more in [(whole, gradients)] if whole is not None else zip(buffers, gradients, strict=True):
        if total.is_cuda:
            _add_kernel[(triton.cdiv(total.numel(), ADDED),)](total, more, total.numel(), BLOCK=ADDED, num_warps=8)
        else:
            total.add_(more)


@triton.jit
def _add_kernel(total, more, size, BLOCK: tl.constexpr):
    # torch adds tensors of two types a few bytes at a time, and takes twice as long or more.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    tl.store(total + at, tl.load(total + at, mask=known) + tl.load(more + at, mask=known).to(tl.float32), mask=known)
