"""M2RNN's recurrence as one would first write it in Triton: one program for each head of each sequence, every state stored.

The baseline of benchmarks/m2rnn.py. All gradients are made inside the backward loop; those of the shared queries and keys are added
up by atomics. The state is fp32 in registers, stored in the type of v; products are tf32, as `tl.dot` makes them unasked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _forward(q, k, v, f, w, y, states, tokens, batch, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    head, b = tl.program_id(0), tl.program_id(1)
    rows, cols, square = tl.arange(0, K), tl.arange(0, V), tl.arange(0, V)[:, None] * V
    wt = tl.load(w + head * V * V + square + cols[None, :])
    h = tl.zeros((K, V), tl.float32)
    for t in range(tokens):
        at = (t * batch + b).to(tl.int64)
        qt, kt = tl.load(q + at * K + rows).to(tl.float32), tl.load(k + at * K + rows).to(tl.float32)
        vt = tl.load(v + (at * HEADS + head) * V + cols).to(tl.float32)
        ft = tl.load(f + at * HEADS + head)
        h = ft * h + (1 - ft) * _tanh(tl.dot(h, wt) + kt[:, None] * vt[None, :])
        tl.store(states + (at * HEADS + head) * K * V + rows[:, None] * V + cols[None, :], h)
        tl.store(y + (at * HEADS + head) * V + cols, tl.sum(qt[:, None] * h, 0))


@triton.jit
def _backward(
    q, k, v, f, w, states, dy, dq, dk, dv, df, dw, tokens, batch, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):
    head, b = tl.program_id(0), tl.program_id(1)
    rows, cols, square = tl.arange(0, K), tl.arange(0, V), tl.arange(0, V)[:, None] * V
    tile = rows[:, None] * V + cols[None, :]
    wt = tl.load(w + head * V * V + square + cols[None, :])
    dh, dws = tl.zeros((K, V), tl.float32), tl.zeros((V, V), tl.float32)
    for i in range(tokens):
        t = tokens - 1 - i
        at = (t * batch + b).to(tl.int64)
        qt, kt = tl.load(q + at * K + rows).to(tl.float32), tl.load(k + at * K + rows).to(tl.float32)
        vt = tl.load(v + (at * HEADS + head) * V + cols).to(tl.float32)
        dyt = tl.load(dy + (at * HEADS + head) * V + cols).to(tl.float32)
        ft = tl.load(f + at * HEADS + head)
        prev = tl.load(states + ((at - batch) * HEADS + head) * K * V + tile, mask=(tile >= 0) & (t > 0), other=0.0)
        prev = prev.to(tl.float32)
        z = _tanh(tl.dot(prev, wt) + kt[:, None] * vt[None, :])
        h = ft * prev + (1 - ft) * z
        tl.atomic_add(dq + at * K + rows, tl.sum(h * dyt[None, :], 1), sem="relaxed")
        dh += qt[:, None] * dyt[None, :]
        tl.store(df + at * HEADS + head, tl.sum(dh * (prev - z)))
        dx = (1 - ft) * (1 - z * z) * dh
        tl.atomic_add(dk + at * K + rows, tl.sum(dx * vt[None, :], 1), sem="relaxed")
        tl.store(dv + (at * HEADS + head) * V + cols, tl.sum(dx * kt[:, None], 0))
        dws += tl.dot(tl.trans(prev), dx)
        dh = ft * dh + tl.dot(dx, tl.trans(wt))
    tl.store(dw + (b * HEADS + head) * V * V + square + cols[None, :], dws)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, w, warps):
        tokens, batch, heads, width = v.shape
        y = torch.empty_like(v)
        states = torch.empty(tokens, batch, heads, q.size(-1), width, device=v.device, dtype=v.dtype)
        _forward[(heads, batch)](
            q, k, v, f, w, y, states, tokens, batch, HEADS=heads, K=q.size(-1), V=width, num_warps=warps
        )
        ctx.save_for_backward(q, k, v, f, w, states)
        ctx.warps = warps
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, f, w, states = ctx.saved_tensors
        tokens, batch, heads, width = v.shape
        dq, dk = (torch.zeros(x.shape, device=x.device, dtype=torch.float32) for x in (q, k))
        dv, df, dw = torch.empty_like(v), torch.empty_like(f), w.new_empty(batch, *w.shape)
        _backward[(heads, batch)](
            q, k, v, f, w, states, dy.contiguous(), dq, dk, dv, df, dw, tokens, batch,
            HEADS=heads, K=q.size(-1), V=width, num_warps=ctx.warps,
        )  # fmt: skip
        return dq.to(q.dtype), dk.to(k.dtype), dv, df, dw.sum(0), None


def scan(q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor, warps: int = 4) -> Tensor:
    """naive.scan's y from zero states; all tensors contiguous."""
    return _Scan.apply(*(x.contiguous() for x in (q, k, v, f, w)), warps)
