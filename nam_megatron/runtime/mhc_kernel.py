"""Residual streams read, mixed and written in bf16, each in one pass or two over memory (Triton). What is computed: hyper_connections.py.

A token's n streams of width h are K = n h numbers; its maps are m = n (n + 2) numbers in fp32. Sums over a token stay in one program, so
nothing is added by atomics, and a second run has the same bits. The weight of the maps is fp32: it is multiplied as two bf16 parts, which
are 16 bits of it, and in tf32 on the way back, where a bf16 gradient takes the sum. Floors in bytes of an H200's 4.8 TB/s, forward and
backward: benchmarks/mhc.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

TOKENS, WIDTH, WARPS = 32, 64, 4  # a tile of what multiplies matrices: tensor cores want 16 rows
WRITE_TOKENS, WRITE_WIDTH, WRITE_WARPS = 8, 128, 4  # of what does not


@triton.jit
def _residual_map(raw, alpha, bias, scale, t, here, maps, N: tl.constexpr, P: tl.constexpr):
    """Of these tokens [T, P, P]: the logits' exponentials over the largest of a row, 0 beyond N."""
    row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    at, inside = 2 * N + row * N + column, (row < N) & (column < N)
    seen = here[:, None, None] & inside
    logit = tl.load(raw + t[:, None, None] * maps + at, mask=seen, other=0.0) / scale[:, None, None]
    logit = tl.load(alpha + at, mask=inside, other=0.0) * logit + tl.load(bias + at, mask=inside, other=0.0)
    most = tl.max(tl.where(inside, logit, -1e30), 2)
    return tl.where(inside, tl.exp(logit - most[:, :, None]), 0.0)


@triton.jit
def _gate(raw, alpha, bias, scale, t, here, maps, FIRST: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """A sigmoid of N logits, from the FIRST, of each token [T, P]; 0 beyond N."""
    i = tl.arange(0, P)
    logit = tl.load(raw + t[:, None] * maps + FIRST + i[None, :], mask=here[:, None] & (i < N)[None, :], other=0.0)
    a, b = tl.load(alpha + FIRST + i, mask=i < N, other=0.0), tl.load(bias + FIRST + i, mask=i < N, other=0.0)
    return tl.where((i < N)[None, :], tl.sigmoid(a[None, :] * logit / scale[:, None] + b[None, :]), 0.0)


@triton.jit
def _read_forward(
    x, high, low, alpha, bias, taken, raw, scale, write, mix, tokens, hidden, maps, epsilon,
    N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, size = t < tokens, N * hidden
    row, k, m, i = x + t[:, None] * size, tl.arange(0, W), tl.arange(0, M), tl.arange(0, P)
    squares, sums = tl.zeros((T,), tl.float32), tl.zeros((T, M), tl.float32)
    for first in range(0, size, W):
        at = first + k
        tile = tl.load(row + at[None, :], mask=here[:, None] & (at < size)[None, :], other=0.0)
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        part, known = m[None, :] * size + at[:, None], (m < maps)[None, :] & (at < size)[:, None]
        sums = tl.dot(tile, tl.load(high + part, mask=known, other=0.0), sums)
        sums = tl.dot(tile, tl.load(low + part, mask=known, other=0.0), sums)
    spread = tl.sqrt(squares / size) + epsilon
    tl.store(scale + t, spread, mask=here)
    tl.store(raw + t[:, None] * maps + m[None, :], sums, mask=here[:, None] & (m < maps)[None, :])
    tl.debug_barrier()  # read again below, in other shapes
    reads = _gate(raw, alpha, bias, spread, t, here, maps, 0, N, P)
    writes = 2 * _gate(raw, alpha, bias, spread, t, here, maps, N, N, P)
    tl.store(write + t[:, None] * N + i[None, :], writes, mask=here[:, None] & (i < N)[None, :])
    kept = _residual_map(raw, alpha, bias, spread, t, here, maps, N, P)
    for _ in range(STEPS):
        kept = kept / tl.maximum(tl.sum(kept, 2), epsilon)[:, :, None]
        kept = kept / tl.maximum(tl.sum(kept, 1), epsilon)[:, None, :]
    to = mix + t[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :]
    tl.store(to, kept, mask=here[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :])
    for first in range(0, hidden, W):
        at = first + k
        ok, got = here[:, None] & (at < hidden)[None, :], tl.zeros((T, W), tl.float32)
        for j in tl.static_range(N):
            share = tl.sum(tl.where(i[None, :] == j, reads, 0.0), 1)
            got += share[:, None] * tl.load(row + j * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(taken + t[:, None] * hidden + at[None, :], got, mask=ok)


@triton.jit
def _read_backward(
    x, weight, alpha, bias, raw, scale, d_taken, d_write, d_mix, passed, dx, d_logit, d_raw, sums, tokens, hidden, maps, epsilon,
    N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """passed: the gradient that the streams themselves have. sums [tokens, 2 STEPS, N]: of Sinkhorn's rows and columns."""
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, size = t < tokens, N * hidden
    row, k, m, i = t[:, None] * size, tl.arange(0, W), tl.arange(0, M), tl.arange(0, P)
    known = here[:, None] & (i < N)[None, :]
    spread = tl.load(scale + t, mask=here, other=1.0)
    # What the layer got: its gradient by stream.
    d_read = tl.zeros((T, P), tl.float32)
    for first in range(0, hidden, W):
        at = first + k
        ok = here[:, None] & (at < hidden)[None, :]
        grad = tl.load(d_taken + t[:, None] * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            tile = tl.load(x + row + j * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
            d_read += tl.where(i[None, :] == j, tl.sum(grad * tile, 1)[:, None], 0.0)
    reads = _gate(raw, alpha, bias, spread, t, here, maps, 0, N, P)
    tl.store(d_logit + t[:, None] * maps + i[None, :], d_read * reads * (1 - reads), mask=known)
    deals = _gate(raw, alpha, bias, spread, t, here, maps, N, N, P)
    d_deals = 2 * tl.load(d_write + t[:, None] * N + i[None, :], mask=known, other=0.0)
    tl.store(d_logit + t[:, None] * maps + N + i[None, :], d_deals * deals * (1 - deals), mask=known)
    # Sinkhorn forward for its sums, then back: what a normalisation divided by gives back what it divided.
    kept = _residual_map(raw, alpha, bias, spread, t, here, maps, N, P)
    line = sums + t[:, None] * (2 * STEPS * N) + i[None, :]
    for step in range(STEPS):
        total = tl.sum(kept, 2)
        tl.store(line + 2 * step * N, total, mask=known)
        kept = kept / tl.maximum(total, epsilon)[:, :, None]
        total = tl.sum(kept, 1)
        tl.store(line + (2 * step + 1) * N, total, mask=known)
        kept = kept / tl.maximum(total, epsilon)[:, None, :]
    tl.debug_barrier()
    at3 = i[None, :, None] * N + i[None, None, :]
    inside = here[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :]
    grad3 = tl.load(d_mix + t[:, None, None] * N * N + at3, mask=inside, other=0.0)
    for back in range(STEPS):
        step = STEPS - 1 - back
        total = tl.load(line + (2 * step + 1) * N, mask=known, other=1.0)
        by = tl.maximum(total, epsilon)
        common = tl.where(total >= epsilon, tl.sum(grad3 * kept, 1), 0.0)
        grad3, kept = (grad3 - common[:, None, :]) / by[:, None, :], kept * by[:, None, :]
        total = tl.load(line + 2 * step * N, mask=known, other=1.0)
        by = tl.maximum(total, epsilon)
        common = tl.where(total >= epsilon, tl.sum(grad3 * kept, 2), 0.0)
        grad3, kept = (grad3 - common[:, :, None]) / by[:, :, None], kept * by[:, :, None]
    tl.store(d_logit + t[:, None, None] * maps + 2 * N + at3, grad3 * kept, mask=inside)
    tl.debug_barrier()
    every = here[:, None] & (m < maps)[None, :]
    given = tl.load(alpha + m, mask=m < maps, other=0.0)[None, :] / spread[:, None]
    given = given * tl.load(d_logit + t[:, None] * maps + m[None, :], mask=every, other=0.0)
    tl.store(d_raw + t[:, None] * maps + m[None, :], given, mask=every)
    d_spread = -tl.sum(given * tl.load(raw + t[:, None] * maps + m[None, :], mask=every, other=0.0), 1) / spread
    root = spread - epsilon
    by_x = tl.where(root > 0, d_spread / (size * root), 0.0)
    for first in range(0, hidden, W):
        at = first + k
        ok = here[:, None] & (at < hidden)[None, :]
        grad = tl.load(d_taken + t[:, None] * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            to = row + j * hidden + at[None, :]
            share = tl.sum(tl.where(i[None, :] == j, reads, 0.0), 1)
            tile = tl.load(x + to, mask=ok, other=0.0).to(tl.float32)
            new = tl.load(passed + to, mask=ok, other=0.0).to(tl.float32)
            new += share[:, None] * grad + by_x[:, None] * tile
            part = (m < maps)[:, None] & (at < hidden)[None, :]
            w = tl.load(weight + m[:, None] * size + j * hidden + at[None, :], mask=part, other=0.0)
            new = tl.dot(given, w, new, input_precision="tf32")
            tl.store(dx + to, new, mask=ok)


@triton.jit
def _write_forward(
    x, output, write, mix, new, tokens, hidden, N: tl.constexpr, T: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    at = tl.program_id(1) * W + tl.arange(0, W)
    here = t < tokens
    ok = here[:, None] & (at < hidden)[None, :]
    row = t[:, None] * (N * hidden) + at[None, :]
    out = tl.load(output + t[:, None] * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        made = tl.load(write + t * N + i, mask=here, other=0.0)[:, None] * out
        for j in tl.static_range(N):
            share = tl.load(mix + t * (N * N) + i * N + j, mask=here, other=0.0)
            made += share[:, None] * tl.load(x + row + j * hidden, mask=ok, other=0.0).to(tl.float32)
        tl.store(new + row + i * hidden, made, mask=ok)


@triton.jit
def _write_backward(
    x, output, write, mix, d_new, dx, d_output, d_write, d_mix, tokens, hidden,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, k, p = t < tokens, tl.arange(0, W), tl.arange(0, P)
    of_write, of_mix = tl.zeros((T, P), tl.float32), tl.zeros((T, P, P), tl.float32)
    for first in range(0, hidden, W):
        at = first + k
        ok = here[:, None] & (at < hidden)[None, :]
        row, flat = t[:, None] * (N * hidden) + at[None, :], t[:, None] * hidden + at[None, :]
        out = tl.load(output + flat, mask=ok, other=0.0).to(tl.float32)
        d_out = tl.zeros((T, W), tl.float32)
        for i in tl.static_range(N):
            grad = tl.load(d_new + row + i * hidden, mask=ok, other=0.0).to(tl.float32)
            d_out += tl.load(write + t * N + i, mask=here, other=0.0)[:, None] * grad
            of_write += tl.where(p[None, :] == i, tl.sum(grad * out, 1)[:, None], 0.0)
        tl.store(d_output + flat, d_out, mask=ok)
        for j in tl.static_range(N):
            tile = tl.load(x + row + j * hidden, mask=ok, other=0.0).to(tl.float32)
            made = tl.zeros((T, W), tl.float32)
            for i in tl.static_range(N):
                grad = tl.load(d_new + row + i * hidden, mask=ok, other=0.0).to(tl.float32)
                made += tl.load(mix + t * (N * N) + i * N + j, mask=here, other=0.0)[:, None] * grad
                place = (p[None, :, None] == i) & (p[None, None, :] == j)
                of_mix += tl.where(place, tl.sum(grad * tile, 1)[:, None, None], 0.0)
            tl.store(dx + row + j * hidden, made, mask=ok)
    tl.store(d_write + t[:, None] * N + p[None, :], of_write, mask=here[:, None] & (p < N)[None, :])
    to = d_mix + t[:, None, None] * (N * N) + p[None, :, None] * N + p[None, None, :]
    tl.store(to, of_mix, mask=here[:, None, None] & (p < N)[None, :, None] & (p < N)[None, None, :])


def _sides(n: int) -> dict[str, int]:
    return {"N": n, "P": triton.next_power_of_2(n), "M": max(16, triton.next_power_of_2(n * (n + 2)))}


def _tile(n: int) -> dict[str, int]:
    """Of what multiplies matrices. The weights of more than four streams' maps, loaded ahead, are more than shared memory holds."""
    return {"T": TOKENS, "W": WIDTH, "num_warps": WARPS} | ({"T": 16, "num_stages": 1} if n > 4 else {})


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bf16 tensors whose sum is 16 bits of an fp32 one."""
    high = x.bfloat16()
    return high, (x - high.float()).bfloat16()


class Read(Function):
    """(streams [..., n h], weight [m, n h], alpha [m], bias [m]) -> what the layer gets, write, mix, and the streams to pass on."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, n: int, steps: int, epsilon: float
    ):
        *lead, size = streams.shape
        x, maps = streams.contiguous(), n * (n + 2)
        tokens, hidden = x.numel() // size, size // n
        new = {"device": x.device, "dtype": torch.float32}
        taken = torch.empty(*lead, hidden, device=x.device, dtype=x.dtype)
        raw, scale = torch.empty(tokens, maps, **new), torch.empty(tokens, **new)
        write, mix = torch.empty(*lead, n, **new), torch.empty(*lead, n, n, **new)
        high, low = _halves(weight)
        _read_forward[triton.cdiv(tokens, _tile(n)["T"]),](
            x, high, low, alpha, bias, taken, raw, scale, write, mix, tokens, hidden, maps, epsilon,
            **_sides(n), STEPS=steps, **_tile(n),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, alpha, bias, raw, scale)
        ctx.keys = n, steps, epsilon
        return taken, write, mix, streams.view_as(streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_taken: Tensor, d_write: Tensor, d_mix: Tensor, passed: Tensor):
        x, weight, alpha, bias, raw, scale = ctx.saved_tensors
        n, steps, epsilon = ctx.keys
        tokens, maps = raw.shape
        dx, d_logit, d_raw = torch.empty_like(x), torch.empty_like(raw), torch.empty_like(raw)
        _read_backward[triton.cdiv(tokens, _tile(n)["T"]),](
            x, weight, alpha, bias, raw, scale, d_taken.contiguous(), d_write.contiguous(), d_mix.contiguous(), passed.contiguous(),
            dx, d_logit, d_raw, raw.new_empty(tokens, 2 * steps, n), tokens, x.size(-1) // n, maps, epsilon,
            **_sides(n), STEPS=steps, **_tile(n),
        )  # fmt: skip
        d_alpha = (d_logit * raw / scale[:, None]).sum(0)
        return dx, _product(d_raw, x.flatten(0, -2)), d_alpha, d_logit.sum(0), None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a.T b in fp32. a: fp32; b: bf16, and read once."""
    if not a.is_cuda:
        return a.T @ b.float()
    both = torch.cat(_halves(a), 1)
    return sum(torch.mm(both.T, b, out_dtype=torch.float32).chunk(2))


class Write(Function):
    """(streams [..., n h], the layer's output [..., h], write [..., n], mix [..., n, n]) -> the streams after the layer."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, output: Tensor, write: Tensor, mix: Tensor):
        x, out, n = streams.contiguous(), output.contiguous(), write.size(-1)
        new = torch.empty_like(x)
        tokens, hidden = out.numel() // out.size(-1), out.size(-1)
        grid = triton.cdiv(tokens, WRITE_TOKENS), triton.cdiv(hidden, WRITE_WIDTH)
        _write_forward[grid](
            x, out, write, mix, new, tokens, hidden, N=n, T=WRITE_TOKENS, W=WRITE_WIDTH, num_warps=WRITE_WARPS
        )
        ctx.save_for_backward(x, out, write, mix)
        return new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_new: Tensor):
        x, out, write, mix = ctx.saved_tensors
        n, hidden = write.size(-1), out.size(-1)
        dx, d_out, d_write, d_mix = (torch.empty_like(t) for t in (x, out, write, mix))
        tokens = out.numel() // hidden
        _write_backward[triton.cdiv(tokens, WRITE_TOKENS),](
            x, out, write, mix, d_new.contiguous(), dx, d_out, d_write, d_mix, tokens, hidden,
            N=n, P=triton.next_power_of_2(n), T=WRITE_TOKENS, W=WRITE_WIDTH, num_warps=WRITE_WARPS,
        )  # fmt: skip
        return dx, d_out, d_write, d_mix
