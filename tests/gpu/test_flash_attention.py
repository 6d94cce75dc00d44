"""FlashAttention 4 as Megatron's core attention: outputs and gradients against fp64, whatever lies where tensors are made."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from nam_megatron.runtime import flash_attention

pytestmark = pytest.mark.gpu

# tokens, samples, heads, groups, widths of queries and of values
CASES = [
    (333, 2, 8, 2, 64, 64),
    (512, 1, 4, 4, 128, 64),
    (1000, 3, 6, 3, 128, 128),
    (64, 2, 4, 1, 96, 96),
    (4096, 1, 7, 1, 64, 64),
]


@pytest.fixture(autouse=True)
def poisoned():
    for problem in flash_attention.unserved():
        pytest.skip(problem.message)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory comes filled with NaN
    yield
    torch.use_deterministic_algorithms(False)


def core(width: int, scale: float | None = None) -> flash_attention.FlashAttention:
    config = dict(
        kv_channels=width, attention_dropout=0.0, window_size=None, context_parallel_size=1, softmax_type="vanilla"
    )
    return flash_attention.FlashAttention(
        SimpleNamespace(**config), 1, AttnMaskType.causal, "self", softmax_scale=scale
    )


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[s, b, n, d] -> [s, b, n * dv] in fp64."""
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    later = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(later, float("-inf")).softmax(-1), v).flatten(2)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_exact(case, scale):
    s, b, n, g, d, dv = case
    here = dict(device="cuda", dtype=torch.bfloat16)
    packed = torch.randn(s, b, g, d + dv, **here)  # values are a part of a projection
    q, k, v = torch.randn(s, b, n, d, **here), packed[..., :d].contiguous(), packed[..., d:]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    back = torch.randn(s, b, n * dv, **here)
    out = core(d, scale)(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    found = [out, *torch.autograd.grad(out, (q, k, v), back)]
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact(*doubles, d**-0.5 if scale is None else scale)
    wanted = [expected, *torch.autograd.grad(expected, doubles, back.double())]
    for name, x, y in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert x.shape == y.shape and x.is_contiguous(), name
        assert (x.double() - y).norm() < 6e-3 * y.norm(), name
