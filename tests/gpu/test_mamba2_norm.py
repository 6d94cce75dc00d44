"""Mamba-2's norm by group: values and gradients against fp64 and mamba-ssm's own, whatever order tokens and samples lie in.

With TRITON_INTERPRET=1 the same on a CPU and small, without mamba-ssm (tests/blocks/test_interpreted.py does that).
"""

import os

import pytest
import torch

from nam_megatron.blocks.mamba2 import norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
# tokens, samples, groups, channels of a group
SIZES = [(7, 3, 2, 24), (5, 1, 3, 16), (3, 2, 1, 40)] + ([] if INTERPRETED else [(4096, 4, 8, 448), (1000, 3, 1, 3584)])


@pytest.fixture(autouse=True)
def begun(ready, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(norm, "PROGRAMS", 8)  # fewer than rows
    torch.manual_seed(0)


def inputs(tokens, samples, groups, width, batch_first, dtype):
    """x, the weight, the gradient of the output."""
    x = torch.randn(tokens, samples, groups * width, device=DEVICE).to(dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    weight, back = torch.randn(groups * width, device=DEVICE).to(dtype), torch.randn_like(x)
    return x.requires_grad_(), weight.requires_grad_(), back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_norm_is_exact(size, batch_first, dtype):
    x, weight, back = inputs(*size, batch_first, dtype)
    y = norm.group_norm(x, weight, size[3], 1e-5)
    y.backward(back)
    assert y.is_contiguous() and x.grad.stride() == x.stride()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    groups = torch.nn.functional.rms_norm(exact[0].unflatten(-1, (size[2], size[3])), (size[3],), eps=1e-5)
    expected = groups.flatten(-2) * exact[1]
    expected.backward(back.double())
    for found, wanted in ((y, expected), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() < (4e-3 if dtype == torch.bfloat16 else 1e-6) * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(7, 3, 2, 24), (4096, 4, 8, 448), (1000, 3, 1, 3584)], ids=str)
def test_the_norm_is_mamba_ssms_to_the_bit(size):
    """The output and the input's gradient; the weight's is summed over other parts of the rows."""
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    x, weight, back = inputs(*size, True, torch.bfloat16)
    found = norm.group_norm(x, weight, size[3], 1e-5)
    found.backward(back)
    ours, x.grad, gradient, weight.grad = x.grad, None, weight.grad, None
    expected = rmsnorm_fn(x.contiguous(), weight, None, eps=1e-5, group_size=size[3], norm_before_gate=False)
    expected.backward(back)
    assert torch.equal(found, expected) and torch.equal(ours, x.grad)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-2, atol=1e-2)
