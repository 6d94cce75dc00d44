"""Rows of a projection multiplied by themselves, around a stand-in for Transformer Engine's module, which needs a GPU (the module itself:
tests/gpu/test_bf16_parts.py): who gets which gradient."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nam_megatron.runtime import split_projection

ROWS, OTHERS, WIDTH = 6, 3, 5


class Projection(torch.nn.Module):
    """A norm and a linear layer that adds the gradient of its weight to `main_grad` where that is fused."""

    def __init__(self, accumulate: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(ROWS + OTHERS, WIDTH))
        self.config = SimpleNamespace(delay_wgrad_compute=False)
        self.fuse_wgrad_accumulation, self.return_layernorm_output = accumulate, False

    def _get_weight_tensors(self):
        return [self.weight]

    def forward(self, x):
        (weight,), normed = self._get_weight_tensors(), F.rms_norm(x, (WIDTH,))
        out = Fused.apply(normed, weight) if self.fuse_wgrad_accumulation else F.linear(normed, weight)
        return ((out, normed) if self.return_layernorm_output else out), None


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, back):
        (x,), weight = ctx.saved_tensors, ctx.weight
        gradient = back.flatten(0, 1).t() @ x.flatten(0, 1)
        weight.main_grad.copy_(gradient) if weight.overwrite_main_grad else weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        return back @ weight, torch.full_like(weight, torch.nan)


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_are_those_of_the_whole(accumulate, overwrites):
    torch.manual_seed(0)
    projection = Projection(accumulate)
    weight, x = projection.weight, torch.randn(4, 2, WIDTH, requires_grad=True)
    back = torch.randn(4, 2, ROWS + OTHERS)
    whole = F.linear(F.rms_norm(x, (WIDTH,)), weight)
    d_x, d_weight = torch.autograd.grad(whole, (x, weight), back)
    split_projection.prepare(projection)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    weight.overwrite_main_grad = overwrites
    first, last = split_projection.split(projection, x, ROWS)
    assert projection._get_weight_tensors()[0] is weight
    torch.testing.assert_close(torch.cat([first, last], -1), whole)
    torch.cat([first, last], -1).backward(back)
    torch.testing.assert_close(x.grad, d_x)
    if accumulate:
        assert weight.grad_added_to_main_grad and weight.grad is not None
        torch.testing.assert_close(weight.main_grad, d_weight + (0 if overwrites else 1))
    else:
        torch.testing.assert_close(weight.grad, d_weight)
        assert torch.equal(weight.main_grad, torch.ones_like(weight))


def test_evaluation_asks_for_no_buffer():
    projection = Projection(True)
    split_projection.prepare(projection)
    with torch.no_grad():
        first, last = split_projection.split(projection, torch.randn(4, 2, WIDTH), ROWS)
    assert (first.size(-1), last.size(-1)) == (ROWS, OTHERS)
