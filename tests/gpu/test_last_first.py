"""Routing maps with the last expert first, and where its rows begin; with TRITON_INTERPRET=1 the same on a CPU."""

import os

import pytest
import torch

from nam_megatron.blocks.moe.experts import last_first

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
