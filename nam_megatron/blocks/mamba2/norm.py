"""RMS norm by group behind Mamba-2's scan, which reads the scan's output where it lies (torch side; Triton).

mamba-ssm's (2.3.2.post1, ops/triton/layernorm_gated.py) wants rows one behind the other, so that its input and its input's gradient are
copied between batch first and sequence first; and its backward runs on so few programs that each waits for memory, row by row. Values
are the same: each row is computed by the same steps on as many threads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 4096  # of the backward, at most: enough for all warps of a GPU


def group_norm(x: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
    """[s, b, d] -> [s, b, d], each `width` channels by themselves. x: any order of s and b; its gradient has the same."""
    return _GroupNorm.apply(x, weight, width, eps)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
        assert x.stride(2) == 1 and x.size(2) % width == 0 and weight.is_contiguous()
        tokens, batch, channels = x.shape
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        scales = torch.empty(channels // width, tokens * batch, device=x.device, dtype=torch.float32)
        _strided_norm_forward[(tokens * batch, channels // width)](
            x, weight, out, scales, tokens * batch, batch, *x.stride()[:2], channels, width, eps, **_launch(width)
        )
        ctx.save_for_backward(x, weight, scales)
        ctx.width = width
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scales = ctx.saved_tensors
        (tokens, batch, channels), width = x.shape, ctx.width
        groups, rows = channels // width, tokens * batch
        programs = min(rows, triton.cdiv(PROGRAMS, groups))
        d_x = torch.empty_strided(x.shape, x.stride(), device=x.device, dtype=x.dtype)
        sums = torch.empty(programs, channels, device=x.device, dtype=torch.float32)
        _strided_norm_backward[(programs, groups)](
            x,
            weight,
            scales,
            d_out.contiguous(),
            d_x,
            sums,
            rows,
            batch,
            *x.stride()[:2],
            channels,
            width,
            **_launch(width),
        )
        return d_x, sums.sum(0).to(weight.dtype), None, None


def _launch(width: int) -> dict[str, int]:
    """mamba-ssm's: with other warps a row's sums would have another order."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


@triton.jit
def _strided_norm_forward(
    x, weight, out, scales, rows, batch, token_step, sample_step, channels, width, eps, BLOCK: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * width + tl.arange(0, BLOCK)
    ok = tl.arange(0, BLOCK) < width
    v = tl.load(x + row // batch * token_step + row % batch * sample_step + c, mask=ok, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, 0) / width + eps)
    tl.store(scales + tl.program_id(1).to(tl.int64) * rows + row, scale)
    w = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * channels + c, v * scale * w, mask=ok)


@triton.jit
def _strided_norm_backward(
    x, weight, scales, d_out, d_x, sums, rows, batch, token_step, sample_step, channels, width, BLOCK: tl.constexpr
):
    c = tl.program_id(1) * width + tl.arange(0, BLOCK)
    ok = tl.arange(0, BLOCK) < width
    w = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    scales += tl.program_id(1).to(tl.int64) * rows
    d_w = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        at = row // batch * token_step + row % batch * sample_step + c
        scale = tl.load(scales + row)
        normed = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * scale
        d = tl.load(d_out + row * channels + c, mask=ok, other=0.0).to(tl.float32)
        weighed = w * d
        dot = tl.sum(normed * weighed, 0) / width
        tl.store(d_x + at, (weighed - normed * dot) * scale, mask=ok)
        d_w += d * normed
    tl.store(sums + tl.program_id(0) * channels + c, d_w, mask=ok)
