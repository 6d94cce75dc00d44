"""Experts' own kernels: routing maps with the last expert first, and where its rows begin; gradients added to a buffer. With
TRITON_INTERPRET=1 the same on a CPU."""

import os

import pytest
import torch

from nam_megatron.blocks.moe.experts import last_first
from nam_megatron.blocks.moe.torch_gemm import ADDED, add_to

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.usefixtures("ready"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (63, 4), (200, 16), (129, 72), (64 * 130 + 5, 16), (16, 513)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_turned_around(tokens, experts, share, dtype):
    torch.manual_seed(0)
    chosen = torch.rand(tokens, experts, device=DEVICE) < share
    probs = torch.rand(tokens, experts, device=DEVICE).to(dtype).requires_grad_()
    back = torch.rand_like(probs)
    # One that lies otherwise, too.
    for given in (chosen, chosen.t().contiguous().t()):
        flipped, turned, bounds = last_first(given, probs)
        assert torch.equal(flipped, chosen.flip(1)) and torch.equal(turned, probs.flip(1))
        counts = bounds.bounds.diff()
        assert bounds.bounds.dtype == torch.int32 and bounds.bounds[0] == 0
        assert torch.equal(counts.long(), chosen.flip(1).sum(0))
        assert torch.equal(torch.autograd.grad(turned, probs, back)[0], back.flip(1))


@pytest.mark.parametrize("size", [1, ADDED, 2 * ADDED + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_to_what_is_there_and_to_nothing_behind_it(size, dtype):
    torch.manual_seed(0)
    buffer, more = torch.randn(size + 5, device=DEVICE), torch.randn(size, device=DEVICE).to(dtype)
    wanted = torch.cat([buffer[:size] + more.float(), buffer[size:]])
    add_to(buffer[:size], more)
    assert torch.equal(buffer, wanted)
