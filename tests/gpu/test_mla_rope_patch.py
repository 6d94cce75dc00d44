"""patches/megatron-core/0.19.2: the fused MLA RoPE kernels with 56 heads, against the rotation written out in plain torch.

Run on a host whose Megatron is patched: `python -m launch patch apply megatron-core`. Without the patch block sizes 16 and 32, which the
autotuner may choose, fail. `TRITON_INTERPRET=1` runs the same kernels on a CPU: tests/launch/test_mla_rope_interpreted.py.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

TOKENS, BATCH, HEADS, NOPE, ROPE, VALUE = 3, 2, 56, 8, 8, 8
TOKENS, NOPE, ROPE, VALUE = (5, 64, 64, 64) if DEVICE == "cuda" else (TOKENS, NOPE, ROPE, VALUE)
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)  # what the autotuner may choose
POISON = 7777.0  # stands past the end of every tensor that a kernel writes


@pytest.fixture(params=BLOCKS)
def block(request, monkeypatch):
    """Leaves the autotuner one block size to choose."""
    if DEVICE == "cpu":
        import interpreter

        interpreter.mend(monkeypatch)
    for name in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"):
        kernel = getattr(fused, name)
        monkeypatch.setattr(kernel, "configs", [c for c in kernel.configs if c.kwargs["BLOCK_H"] == request.param])
        monkeypatch.setattr(kernel, "cache", {})
    return request.param


@pytest.fixture
def angles(monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of yarn, [tokens, 1, 1, rope], as MLA hands them to the kernels."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    rope = YarnRotaryEmbedding(ROPE, rotary_base=500000, scaling_factor=40.0, original_max_position_embeddings=4)
    emb, scale = rope(TOKENS)
    return (emb.cos() * scale).contiguous().to(DEVICE), (emb.sin() * scale).contiguous().to(DEVICE)


def fenced(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random tensor and the poisoned memory right after it."""
    size, fence = torch.Size(shape).numel(), 128 * shape[-1]
    memory = torch.full((size + fence,), POISON, device=DEVICE)
    memory[:size] = torch.randn(size, device=DEVICE)
    return memory[:size].view(shape), memory[size:]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, batch, heads, rope], pairs interleaved; out: halves, as the kernels leave them."""
    even, odd = x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    left = even * cos[..., :half] - odd * sin[..., :half]
    return torch.cat((left, odd * cos[..., half:] + even * sin[..., half:]), dim=-1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_query(block, angles):
    torch.manual_seed(0)
    q, beyond = fenced(TOKENS, BATCH, HEADS, NOPE + ROPE)
    grad, beyond_grad = fenced(TOKENS, BATCH, HEADS, NOPE + ROPE)
    plain = q.clone().requires_grad_()
    wanted = torch.cat((plain[..., :NOPE], rotate(plain[..., NOPE:], *angles)), dim=-1)
    wanted.backward(grad.clone())

    # Both rotate in place: q's memory and the gradient's.
    ctx = Context()
    out = fused.ApplyMLARotaryEmbQ.forward(ctx, q, *angles, NOPE, ROPE, None, 0, 1)
    close(out, wanted.detach())
    assert torch.all(beyond == POISON), "the forward pass writes past the last token"
    found = fused.ApplyMLARotaryEmbQ.backward(ctx, grad)[0]
    close(found, plain.grad)
    assert torch.all(beyond_grad == POISON), "the backward pass writes past the last token"


def test_key_and_value(block, angles):
    torch.manual_seed(0)
    kv = torch.randn(TOKENS, BATCH, HEADS, NOPE + VALUE, device=DEVICE, requires_grad=True)
    shared = torch.randn(TOKENS, BATCH, 1, ROPE, device=DEVICE, requires_grad=True)
    dk = torch.randn(TOKENS, BATCH, HEADS, NOPE + ROPE, device=DEVICE)
    dv = torch.randn(TOKENS, BATCH, HEADS, VALUE, device=DEVICE)

    rotated = rotate(shared, *angles).expand(-1, -1, HEADS, -1)
    key, value = torch.cat((kv[..., :NOPE], rotated), dim=-1), kv[..., NOPE:]
    wanted = torch.autograd.grad((key, value), (kv, shared), (dk, dv))

    found_key, found_value = fused.fused_apply_mla_rope_for_kv(kv, shared, *angles, ROPE, NOPE, VALUE)
    close(found_key, key)
    close(found_value, value)
    found = torch.autograd.grad((found_key, found_value), (kv, shared), (dk, dv))
    close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-4)  # a sum over 56 heads


class Context:
    """What autograd keeps between the two passes."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors
