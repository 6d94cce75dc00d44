"""The router's projection and the fork behind it: gradients against fp64, and rounded where autograd rounds.

With TRITON_INTERPRET=1 the same on a CPU and small (tests/blocks/test_router.py does that).
"""

import os

import pytest
import torch

from nam_megatron.blocks.moe import router

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
# tokens, width, experts: odd ones, more experts than a program takes at once, and one of each behind whole tiles
SIZES = [(150, 136, 5), (70, 48, 16), (33, 40, 24), (129, 129, 17)] + (
    [] if INTERPRETED else [(8192, 3584, 16), (2049, 1024, 256)]
)


@pytest.fixture(autouse=True)
def begun(ready, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(router, "PARTS", 2)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "width", "experts"), SIZES)
def test_the_inputs_gradient_is_one_sum(tokens, width, experts, others, dtype):
    d_logits, weight = torch.randn(tokens, experts, device=DEVICE), torch.randn(experts, width, device=DEVICE)
    weight, parts = weight.to(dtype), [torch.randn(tokens, 1, width, device=DEVICE).to(dtype) for _ in range(others)]
    found = router.input_gradient(d_logits, weight, *parts)
    # As autograd adds: what came first, then the next, then the router's, each sum in the tensors' type.
    terms = [*(part.squeeze(1) for part in parts), (d_logits.double() @ weight.double()).to(dtype)]
    expected, largest = sum(terms[1:], terms[0]), sum(term.double().abs() for term in terms)
    products = d_logits.double().abs() @ weight.double().abs()  # which fp32 sums to a few rounding errors of their own
    assert found.shape == expected.shape and found.dtype == dtype
    far = (found.double() - expected.double()).abs()
    if dtype == torch.bfloat16:
        # All but those that lie so near to the middle of two bf16 numbers that fp32 and fp64 fall to different sides, and those by a
        # step of the largest term and one of the sum.
        assert (far > 0).float().mean() < 1e-3
        assert (far <= 2**-6 * largest + 1e-6 * products).all()
    else:
        assert (far <= 1e-6 * (largest + products)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width", "experts"), SIZES)
def test_the_weights_gradient_is_the_product(tokens, width, experts, dtype):
    d_logits, x = torch.randn(tokens, experts, device=DEVICE), torch.randn(tokens, width, device=DEVICE).to(dtype)
    found, expected = router.weight_gradient(d_logits, x), d_logits.double().T @ x.double()
    assert found.shape == expected.shape and found.dtype == dtype
    far = (found.double() - expected.to(dtype).double()).norm() / expected.norm()
    assert far < (1e-4 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, False)], ids=str)
def test_the_fork_has_the_gradients_of_three_uses(used):
    """Of an input [s, b, h] in bf16, against autograd's own sum over plain torch."""
    x = torch.randn(40, 2, 64, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(4, 64, device=DEVICE).bfloat16().requires_grad_()
    scale = [torch.randn(x.shape, device=DEVICE).bfloat16() for _ in range(2)]
    d_logits = torch.randn(40, 2, 4, device=DEVICE)

    def run(logits, *inputs):
        ends = [(i * s).sum() for i, s, is_used in zip(inputs, scale, used, strict=True) if is_used]
        sum([(logits * d_logits).sum(), *ends]).backward()
        gradients, x.grad, weight.grad = (x.grad, weight.grad), None, None
        return gradients

    found = run(*router._Fork.apply(x, weight))
    plain = x.flatten(0, 1).float() @ weight.float().T
    expected = run(plain.view(d_logits.shape), x, x)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).float().norm() < 4e-3 * theirs.float().norm()
