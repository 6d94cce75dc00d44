"""Experts whose GEMMs read on the GPU how many rows each has: torch's or QuACK's (torch side).

Transformer Engine's GroupedLinear (2.20) is told the rows of each expert as a list, for which the host has to wait until the router is
done: once a layer and microbatch the GPU runs out of work. torch_gemm.py and quack_gemm.py take bounds that
lie on the GPU. Transformer Engine's modules go on owning the parameters: names, checkpoints, hooks and gradients' buffers are the same.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.errors import Problem
from nam_megatron.runtime.gpu import interpreted

TOKENS = 64  # of a program that turns a routing map


class Bounds(NamedTuple):
    """Where the rows of each expert begin and end, int32 [experts + 1] on the GPU, the last expert first: in the place of Megatron's list
    of counts."""

    bounds: Tensor

    def tolist(self) -> Tensor:
        """What Megatron asks counts for (TEGroupedMLP.forward, 0.19.2), and gives to both projections."""
        return self.bounds


def last_first(routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Bounds]:
    """Both [tokens, experts] with the last expert first, and where its rows begin and end. routing_map: bool."""
    flipped, probs, bounds = _LastFirst.apply(routing_map, probs)
    return flipped, probs, Bounds(bounds)


class _LastFirst(torch.autograd.Function):
    """Two kernels; torch has ten for it, each of which waits for the one before."""

    @staticmethod
    def forward(ctx: Any, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, experts = routing_map.shape
        if not (probs.is_cuda or interpreted()):
            flipped, turned = routing_map.flip(1), probs.flip(1)
            bounds = F.pad(flipped.sum(dim=0, dtype=torch.int32), (1, 0)).cumsum(0, dtype=torch.int32)
        else:
            routing_map, probs = routing_map.contiguous(), probs.contiguous()
            flipped, turned = torch.empty_like(routing_map), torch.empty_like(probs)
            blocks, width = triton.cdiv(tokens, TOKENS), triton.next_power_of_2(experts)
            counts = torch.empty(blocks, experts, dtype=torch.int32, device=probs.device)
            bounds = torch.empty(experts + 1, dtype=torch.int32, device=probs.device)
            _last_first[(blocks,)](
                routing_map.view(torch.uint8), probs, flipped.view(torch.uint8), turned, counts, tokens, experts,
                TOKENS=TOKENS, EXPERTS=width, num_warps=4,
            )  # fmt: skip
            _expert_bounds[(1,)](
                counts, bounds, blocks, experts, BLOCKS=max(1, 2048 // width), EXPERTS=width, num_warps=4
            )
        ctx.mark_non_differentiable(flipped, bounds)
        ctx.set_materialize_grads(False)
        return flipped, turned, bounds

    @staticmethod
    def backward(ctx: Any, _: None, d_probs: Tensor | None, __: None) -> tuple[None, Tensor | None]:
        return None, None if d_probs is None else d_probs.flip(1)


@triton.jit
def _last_first(chosen, probs, flipped, turned, counts, tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    token, expert = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    ok = (token < tokens)[:, None] & (expert < experts)[None, :]
    row = token[:, None] * experts
    here = tl.load(chosen + row + (experts - 1 - expert)[None, :], mask=ok, other=0)
    tl.store(flipped + row + expert[None, :], here, mask=ok)
    weight = tl.load(probs + row + (experts - 1 - expert)[None, :], mask=ok, other=0.0)
    tl.store(turned + row + expert[None, :], weight, mask=ok)
    tl.store(counts + tl.program_id(0) * experts + expert, tl.sum(here.to(tl.int32), 0), mask=expert < experts)


@triton.jit
def _expert_bounds(counts, bounds, blocks, experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        ok = (block < blocks)[:, None] & (expert < experts)[None, :]
        total += tl.sum(tl.load(counts + block[:, None] * experts + expert[None, :], mask=ok, other=0), 0)
    tl.store(bounds + 1 + expert, tl.cumsum(total, 0), mask=expert < experts)
    tl.store(bounds + expert, 0, mask=expert == 0)


class Gemm(Protocol):
    """GEMMs of rows sorted by expert. bounds: those of Bounds."""

    @staticmethod
    def unserved() -> Iterator[Problem]:
        """Why they do not run here."""

    @staticmethod
    def product(rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        """rows [rows, k], weights [experts, k, n] -> [rows, n]."""

    @staticmethod
    def gradients(d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """d_out [rows, n], rows [rows, k] -> the weights', [experts, n, k], as the weights are."""

    @staticmethod
    def add(totals: Sequence[Tensor], whole: Tensor | None, d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """Add the weights' gradients to totals, each [n, k] -> what autograd gets for them, [experts, n, k], which nobody reads.

        whole: the totals as one, [experts, n, k], where they lie in order.
        """


def keep_counts_on_gpu(experts: torch.nn.Module, gemm: type[Gemm], accumulate: bool) -> None:
    """Have both projections of a new TEGroupedMLP take rows sorted from the last expert to the first, and Bounds for them.

    accumulate: they add weights' gradients to Megatron's buffers themselves, all experts' at once, where there are buffers.
    """
    for projection in (experts.linear_fc1, experts.linear_fc2):
        # Only a sharded optimizer of Adam moves them into a buffer: everywhere else they stay where they are put here.
        weights = _weights(projection)
        for weight, place in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
            weight.data = place
        # No bound method, which cannot be pickled; a deep copy gets a partial of its own, and so its own weights.
        projection.forward = partial(_project, projection, gemm=gemm, accumulate=accumulate)


def _weights(projection: Any) -> list[Tensor]:
    """The last expert's first."""
    return [getattr(projection, f"weight{index}") for index in reversed(range(projection.num_gemms))]


def _project(self: Any, rows: Tensor, bounds: Tensor, gemm: type[Gemm], accumulate: bool) -> tuple[Tensor, None]:
    """[rows, k] times each expert's [n, k], and no bias."""
    weights = _weights(self)
    buffered = accumulate and all(getattr(weight, "main_grad", None) is not None for weight in weights)
    return _Project.apply(rows, bounds, gemm, buffered, *weights), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bounds: Tensor, gemm: type[Gemm], buffered: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, bounds)
        ctx.weights, ctx.gemm, ctx.buffered = weights, gemm, buffered
        return gemm.product(rows, _stacked(weights).mT, bounds)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (rows, bounds), weights, gemm = ctx.saved_tensors, ctx.weights, ctx.gemm
        d_out, (of_rows, _, _, _, *of_weights) = d_out.contiguous(), ctx.needs_input_grad
        d_rows = gemm.product(d_out, _stacked(weights), bounds) if of_rows else None
        if not any(of_weights):
            return d_rows, None, None, None, *[None] * len(weights)
        if not ctx.buffered:
            return d_rows, None, None, None, *gemm.gradients(d_out, rows, bounds).unbind()
        buffers = [weight.main_grad for weight in weights]
        gradients = gemm.add(buffers, _in_order(buffers), d_out, rows, bounds)
        for weight in weights:
            weight.grad_added_to_main_grad = True  # then Megatron's hooks wait for a gradient, and do not read it
        return d_rows, None, None, None, *gradients.unbind()


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
