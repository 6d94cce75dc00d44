"""Tensors on their way between the GPUs of an expert group, while something else is computed (torch side).

Their sizes are known before any token is routed: the host waits for nothing, and a graph of the whole step holds them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor, Any], tuple[Tensor, Any]]  # (what, group) -> (where it arrives, how to wait for it)


def gather(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """[n, ...] -> [ranks x n, ...]: everybody's, by rank."""
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    return out, dist.all_gather_into_tensor(out, x, group=group, async_op=True)


def scatter(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """[ranks x n, ...] -> [n, ...]: the sum of what everybody has for this rank."""
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=True)


def exchange(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """[ranks x n, ...] -> [ranks x n, ...]: what each has for this rank, by rank."""
    out = torch.empty_like(x)
    return out, dist.all_to_all_single(out, x, group=group, async_op=True)


BACK: dict[Send, Send] = {gather: scatter, scatter: gather, exchange: exchange}


class Trip:
    """There in the forward pass, and the gradient's way back: what is computed between `leave` and `arrive` runs meanwhile in both."""

    def __init__(self, send: Send, group: Any):
        self.send, self.group = send, group
        self.arrival: tuple[Tensor, Any] | None = None

    def leave(self, x: Tensor) -> Tensor:
        """Where x will have arrived; nobody may read it before `arrive`."""
        return _Leave.apply(x, self)

    def arrive(self, sent: Tensor) -> Tensor:
        return _Arrive.apply(sent, self)

    def start(self, send: Send, x: Tensor) -> Tensor:
        assert self.arrival is None, "still under way"
        self.arrival = send(x.contiguous(), self.group)
        return self.arrival[0]

    def end(self) -> Tensor:
        assert self.arrival is not None, "nothing is under way"
        (arrived, work), self.arrival = self.arrival, None
        work.wait()
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(trip.send, x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.end()
        return sent.view_as(sent)

    @staticmethod
    def backward(ctx: Any, d_arrived: Tensor) -> tuple[Tensor, None]:
        """What _Leave's gets is not read: it stands for the gradient, which is under way, and keeps it."""
        ctx.trip.start(BACK[ctx.trip.send], d_arrived)
        return d_arrived, None
