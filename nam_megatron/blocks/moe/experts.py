"""Experts multiplied by torch's grouped GEMM, which reads on the GPU how many rows each has (torch side).

Transformer Engine's GroupedLinear (2.20) is told the rows of each expert as a list, for which the host has to wait until the router is
done: once a layer and microbatch the GPU runs out of work. `torch.nn.functional.grouped_mm` (2.11, CUTLASS on Hopper) takes offsets that
lie on the GPU. Transformer Engine's modules go on owning the parameters: names, checkpoints, hooks and gradients' buffers are the same.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def keep_counts_on_gpu(experts: torch.nn.Module) -> None:
    """Have both projections of a TEGroupedMLP take rows sorted from the last expert to the first, and Ends for them."""
    for projection in (experts.linear_fc1, experts.linear_fc2):
        projection.forward = MethodType(_project, projection)


def _project(self: Any, rows: Tensor, ends: Tensor) -> tuple[Tensor, None]:
    """[rows, k] times each expert's [n, k], and no bias."""
    weights = [getattr(self, f"weight{index}") for index in reversed(range(self.num_gemms))]
    return _Project.apply(rows, ends, *weights), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, _stacked(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        d_out, (of_rows, _, *of_weights) = d_out.contiguous(), ctx.needs_input_grad
        d_rows = F.grouped_mm(d_out, _stacked(weights), offs=ends) if of_rows else None
        d_weights = F.grouped_mm(d_out.mT, rows, offs=ends).unbind() if any(of_weights) else [None] * len(weights)
        return d_rows, None, *d_weights


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """[experts, n, k]. Megatron's buffers hold parameters from the last to the first: there it is no copy. Where a bucket ends among
    them, or without a buffer, it is one."""
    first = weights[0].detach()
    begun = first.storage_offset()
    in_order = all(
        w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and w.storage_offset() == begun + i * first.numel()
        and w.is_contiguous()
        for i, w in enumerate(weights)
    )
    if in_order:
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([w.detach() for w in weights])
