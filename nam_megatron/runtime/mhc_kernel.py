"""Residual streams read, mixed and written in bf16 (Triton). What is computed: hyper_connections.py.

A token's n streams of width h are K = n h numbers; its maps are m = n (n + 2) numbers in fp32. Products run over tiles of tokens and
columns, and a second launch adds what the tiles made in a fixed order; what the maps are made of runs over tokens; what only streams has
all columns of a token in a program, and sums that stay in each thread's registers until the end. So nothing is added by atomics, and a
second run has the same bits. The weight of the maps is fp32: it is multiplied as two bf16 parts, which are 16 bits of it, and in tf32 on
the way back, where a bf16 gradient takes the sum. Floors in bytes: benchmarks/mhc.py.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Tiles of up to four streams; `_product` and `_back` have others for more. What an H200 said of them: benchmarks/mhc.py --sweep.
# The maps' product: tokens x columns, and the columns that a program goes through, a multiple of those of a tile.
TOKENS, WIDTH, SPAN, WARPS = 64, 64, 1024, 4
# The gradient of what reads: tokens x columns, and tiles that are loaded ahead.
BACK_TOKENS, BACK_WIDTH, BACK_STAGES, BACK_WARPS = 32, 128, 3, 4
# Tokens that a program of it goes through at least, and such spans at most: each of them keeps sums of the weight's gradient.
BACK_SPAN, BACK_SPANS = 512, 16
# What makes the maps: tokens.
MAPS_TOKENS, MAPS_WARPS = 16, 1
# What only streams: tokens x columns. A warp has one token, a thread eight columns.
STREAM_TOKENS, STREAM_WIDTH, STREAM_WARPS = 1, 256, 1


@triton.jit
def _residual_map(raw, alpha, bias, scale, t, here, maps, N: tl.constexpr, P: tl.constexpr):
    """Of these tokens [T, P, P]: the logits less the largest of a row, next to nothing beyond N."""
    row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    at, inside = 2 * N + row * N + column, (row < N) & (column < N)
    seen = here[:, None, None] & inside
    logit = tl.load(raw + t[:, None, None] * maps + at, mask=seen, other=0.0) / scale[:, None, None]
    logit = tl.load(alpha + at, mask=inside, other=0.0) * logit + tl.load(bias + at, mask=inside, other=0.0)
    logit = tl.where(inside, logit, -1e30)
    return logit - tl.where(row < N, tl.max(logit, 2)[:, :, None], 0.0)


@triton.jit
def _log_sum(x, AXIS: tl.constexpr):
    """Of [T, P, P] over one of the last two: the logarithm of the sum of exponentials."""
    most = tl.max(x, AXIS)
    return most + tl.log(tl.sum(tl.exp(x - tl.expand_dims(most, AXIS)), AXIS))


@triton.jit
def _gate(raw, alpha, bias, scale, t, here, maps, FIRST: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """A sigmoid of N logits, from the FIRST, of each token [T, P]; 0 beyond N."""
    i = tl.arange(0, P)
    logit = tl.load(raw + t[:, None] * maps + FIRST + i[None, :], mask=here[:, None] & (i < N)[None, :], other=0.0)
    a, b = tl.load(alpha + FIRST + i, mask=i < N, other=0.0), tl.load(bias + FIRST + i, mask=i < N, other=0.0)
    return tl.where((i < N)[None, :], tl.sigmoid(a[None, :] * logit / scale[:, None] + b[None, :]), 0.0)


@triton.jit
def _lanes(x, T: tl.constexpr, W: tl.constexpr):
    """[T, W] -> [T, W / 8]: sums of eight columns that lie beside each other, as one thread has them."""
    return tl.sum(tl.reshape(x, (T, W // 8, 8)), 2)


@triton.jit
def _numbers(x, t, here, COUNT: tl.constexpr):
    """COUNT numbers of each of these tokens, so many [T]."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(x + t * COUNT + i, mask=here, other=0.0),)
    return found


@triton.jit
def _zeros(COUNT: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    """As many sums in lanes."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros((T, W // 8), tl.float32),)
    return found


@triton.jit
def _maps_product(
    x, weight, products, squares, tokens, size, maps,
    M: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Of each span of columns: products [span, tokens, maps] of the streams and the weight, squares [span, tokens] of the streams."""
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    tl.static_assert(SPAN % W == 0)  # else a span's last tile would have columns of the next one
    here, span = t < tokens, tl.program_id(1)
    row, k, m = x + t[:, None] * size, tl.arange(0, W), tl.arange(0, M)
    square, sums = tl.zeros((T, W), tl.float32), tl.zeros((T, M), tl.float32)
    for first in range(span * SPAN, tl.minimum(span * SPAN + SPAN, size), W):
        at = first + k
        tile = tl.load(row + at[None, :], mask=here[:, None] & (at < size)[None, :], other=0.0)
        known = (m < maps)[None, :] & (at < size)[:, None]
        w = tl.load(weight + m[None, :] * size + at[:, None], mask=known, other=0.0)
        high = w.to(tl.bfloat16)
        sums = tl.dot(tile, high, sums)
        sums = tl.dot(tile, (w - high.to(tl.float32)).to(tl.bfloat16), sums)
        wide = tile.to(tl.float32)
        square += wide * wide
    line = span.to(tl.int64) * tokens + t
    tl.store(squares + line, tl.sum(square, 1), mask=here)
    tl.store(products + line[:, None] * maps + m[None, :], sums, mask=here[:, None] & (m < maps)[None, :])


@triton.jit
def _maps_forward(
    products, squares, alpha, bias, raw, scale, read, write, mix, tokens, size, maps, spans, epsilon, least,
    N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, m, i = t < tokens, tl.arange(0, M), tl.arange(0, P)
    every = here[:, None] & (m < maps)[None, :]
    square, sums = tl.zeros((T,), tl.float32), tl.zeros((T, M), tl.float32)
    for span in range(spans):
        line = span * tokens + t
        square += tl.load(squares + line, mask=here, other=0.0)
        sums += tl.load(products + line[:, None] * maps + m[None, :], mask=every, other=0.0)
    spread = tl.sqrt(square / size) + epsilon
    tl.store(scale + t, spread, mask=here)
    tl.store(raw + t[:, None] * maps + m[None, :], sums, mask=every)
    tl.debug_barrier()  # read again below, in other shapes
    known = here[:, None] & (i < N)[None, :]
    tl.store(read + t[:, None] * N + i[None, :], _gate(raw, alpha, bias, spread, t, here, maps, 0, N, P), mask=known)
    writes = 2 * _gate(raw, alpha, bias, spread, t, here, maps, N, N, P)
    tl.store(write + t[:, None] * N + i[None, :], writes, mask=known)
    kept = _residual_map(raw, alpha, bias, spread, t, here, maps, N, P)
    for _ in range(STEPS):
        kept -= tl.maximum(_log_sum(kept, 2), least)[:, :, None]
        kept -= tl.maximum(_log_sum(kept, 1), least)[:, None, :]
    to = mix + t[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :]
    tl.store(to, tl.exp(kept), mask=here[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :])


@triton.jit
def _read_forward(x, read, taken, tokens, hidden, N: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here = t < tokens
    shares = _numbers(read, t, here, N)
    for first in range(0, hidden, W):
        at = first + tl.arange(0, W)
        ok, got = here[:, None] & (at < hidden)[None, :], tl.zeros((T, W), tl.float32)
        for j in tl.static_range(N):
            tile = tl.load(x + t[:, None] * (N * hidden) + j * hidden + at[None, :], mask=ok, other=0.0)
            got += shares[j][:, None] * tile.to(tl.float32)
        tl.store(taken + t[:, None] * hidden + at[None, :], got, mask=ok)


@triton.jit
def _read_gradient(x, d_taken, d_read, tokens, hidden, N: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    """Of what the layer got: its gradient by stream [tokens, N]."""
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, sums = t < tokens, _zeros(N, T, W)
    for first in range(0, hidden, W):
        at, more = first + tl.arange(0, W), ()
        ok = here[:, None] & (at < hidden)[None, :]
        grad = tl.load(d_taken + t[:, None] * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            tile = tl.load(x + t[:, None] * (N * hidden) + j * hidden + at[None, :], mask=ok, other=0.0)
            more = more + (sums[j] + _lanes(grad * tile.to(tl.float32), T, W),)
        sums = more
    for j in tl.static_range(N):
        tl.store(d_read + t * N + j, tl.sum(sums[j], 1), mask=here)


@triton.jit
def _maps_backward(
    alpha, bias, raw, scale, d_read, d_write, d_mix, read, d_logit, d_raw, by_x, d_own, sums, tokens, size, maps, epsilon, least,
    N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """sums [tokens, 2 STEPS, N]: of Sinkhorn's rows and columns, their logarithms; least: that of epsilon. by_x: what each number of the
    streams is multiplied with for the gradient of their spread. d_own [programs, 2, maps]: these tokens' part of alpha's and the bias's."""
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here, m, i = t < tokens, tl.arange(0, M), tl.arange(0, P)
    known = here[:, None] & (i < N)[None, :]
    spread = tl.load(scale + t, mask=here, other=1.0)
    reads = _gate(raw, alpha, bias, spread, t, here, maps, 0, N, P)
    tl.store(read + t[:, None] * N + i[None, :], reads, mask=known)
    d_reads = tl.load(d_read + t[:, None] * N + i[None, :], mask=known, other=0.0)
    tl.store(d_logit + t[:, None] * maps + i[None, :], d_reads * reads * (1 - reads), mask=known)
    deals = _gate(raw, alpha, bias, spread, t, here, maps, N, N, P)
    d_deals = 2 * tl.load(d_write + t[:, None] * N + i[None, :], mask=known, other=0.0)
    tl.store(d_logit + t[:, None] * maps + N + i[None, :], d_deals * deals * (1 - deals), mask=known)
    # Sinkhorn in logarithms forward for its sums, then back: what a normalisation took away is added again.
    kept = _residual_map(raw, alpha, bias, spread, t, here, maps, N, P)
    line = sums + t[:, None] * (2 * STEPS * N) + i[None, :]
    for step in range(STEPS):
        total = _log_sum(kept, 2)
        tl.store(line + 2 * step * N, total, mask=known)
        kept -= tl.maximum(total, least)[:, :, None]
        total = _log_sum(kept, 1)
        tl.store(line + (2 * step + 1) * N, total, mask=known)
        kept -= tl.maximum(total, least)[:, None, :]
    tl.debug_barrier()
    at3 = i[None, :, None] * N + i[None, None, :]
    inside = here[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :]
    grad = tl.load(d_mix + t[:, None, None] * N * N + at3, mask=inside, other=0.0) * tl.exp(kept)
    for back in range(STEPS):
        step = STEPS - 1 - back
        total = tl.load(line + (2 * step + 1) * N, mask=known, other=0.0)
        common = tl.where(total >= least, tl.sum(grad, 1), 0.0)  # a sum below the least is divided by what is constant
        grad -= common[:, None, :] * tl.exp(kept)
        kept += tl.maximum(total, least)[:, None, :]
        total = tl.load(line + 2 * step * N, mask=known, other=0.0)
        # No row's is: before the first step its largest is 1, and a column's sum, by which it was divided, is at most N.
        grad -= tl.sum(grad, 2)[:, :, None] * tl.exp(kept)
        kept += tl.maximum(total, least)[:, :, None]
    tl.store(d_logit + t[:, None, None] * maps + 2 * N + at3, grad, mask=inside)
    tl.debug_barrier()
    every = here[:, None] & (m < maps)[None, :]
    logit = tl.load(d_logit + t[:, None] * maps + m[None, :], mask=every, other=0.0)
    was = tl.load(raw + t[:, None] * maps + m[None, :], mask=every, other=0.0) / spread[:, None]
    part = d_own + tl.program_id(0) * 2 * maps + m
    tl.store(part, tl.sum(logit * was, 0), mask=m < maps)
    tl.store(part + maps, tl.sum(logit, 0), mask=m < maps)
    given = tl.load(alpha + m, mask=m < maps, other=0.0)[None, :] * logit / spread[:, None]
    tl.store(d_raw + t[:, None] * maps + m[None, :], given, mask=every)
    root = spread - epsilon
    tl.store(by_x + t, tl.where(root > 0, -tl.sum(given * was, 1) / (size * root), 0.0), mask=here)


@triton.jit
def _read_backward(
    x, weight, read, d_raw, by_x, d_taken, passed, dx, parts, tokens, hidden, maps, span,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """passed: the gradient that the streams themselves have. parts [spans of `span` tokens, maps, N hidden]: of the weight's gradient."""
    j = tl.program_id(0) % N  # programs beside each other read the same columns of d_taken
    start = tl.program_id(1) * span
    c, m = tl.program_id(0) // N * W + tl.arange(0, W), tl.arange(0, M)
    size, at, sums = N * hidden, j * hidden + c, tl.zeros((M, W), tl.float32)
    part, own = (m < maps)[:, None] & (c < hidden)[None, :], m[:, None] * size + at[None, :]
    w = tl.load(weight + own, mask=part, other=0.0)
    for first in tl.range(start, tl.minimum(start + span, tokens), T, num_stages=STAGES):
        t = (first + tl.arange(0, T)).to(tl.int64)
        here = t < tokens
        ok, to = here[:, None] & (c < hidden)[None, :], t[:, None] * size + at[None, :]
        tile = tl.load(x + to, mask=ok, other=0.0)
        new = tl.load(passed + to, mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(d_taken + t[:, None] * hidden + c[None, :], mask=ok, other=0.0).to(tl.float32)
        every = here[:, None] & (m < maps)[None, :]
        given = tl.load(d_raw + t[:, None] * maps + m[None, :], mask=every, other=0.0)
        new += tl.load(read + t * N + j, mask=here, other=0.0)[:, None] * grad
        new += tl.load(by_x + t, mask=here, other=0.0)[:, None] * tile.to(tl.float32)
        tl.store(dx + to, tl.dot(given, w, new, input_precision="tf32"), mask=ok)
        high = given.to(tl.bfloat16)
        sums = tl.dot(tl.trans(high), tile, sums)
        sums = tl.dot(tl.trans((given - high.to(tl.float32)).to(tl.bfloat16)), tile, sums)
    tl.store(parts + tl.program_id(1).to(tl.int64) * maps * size + own, sums, mask=part)


@triton.jit
def _total(parts, total, spans, size, W: tl.constexpr):
    at, sums = tl.program_id(0) * W + tl.arange(0, W), tl.zeros((W,), tl.float32)
    for _ in range(spans):
        sums += tl.load(parts + at, mask=at < size, other=0.0)
        parts += size
    tl.store(total + at, sums, mask=at < size)


@triton.jit
def _write_forward(x, output, write, mix, new, tokens, hidden, N: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here = t < tokens
    deals, shares = _numbers(write, t, here, N), _numbers(mix, t, here, N * N)
    for first in range(0, hidden, W):
        at, tiles = first + tl.arange(0, W), ()
        ok, row = here[:, None] & (at < hidden)[None, :], t[:, None] * (N * hidden) + at[None, :]
        out = tl.load(output + t[:, None] * hidden + at[None, :], mask=ok, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            tiles = tiles + (tl.load(x + row + j * hidden, mask=ok, other=0.0),)
        for i in tl.static_range(N):
            made = deals[i][:, None] * out
            for j in tl.static_range(N):
                made += shares[i * N + j][:, None] * tiles[j].to(tl.float32)
            tl.store(new + row + i * hidden, made, mask=ok)


@triton.jit
def _write_backward(
    x, output, write, mix, d_new, dx, d_output, d_write, d_mix, tokens, hidden,
    N: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    here = t < tokens
    deals, shares = _numbers(write, t, here, N), _numbers(mix, t, here, N * N)
    of_write, of_mix = _zeros(N, T, W), _zeros(N * N, T, W)
    for first in range(0, hidden, W):
        at, grads, more = first + tl.arange(0, W), (), ()
        ok, row = here[:, None] & (at < hidden)[None, :], t[:, None] * (N * hidden) + at[None, :]
        flat = t[:, None] * hidden + at[None, :]
        for i in tl.static_range(N):
            grads = grads + (tl.load(d_new + row + i * hidden, mask=ok, other=0.0),)
        out, d_out = tl.load(output + flat, mask=ok, other=0.0).to(tl.float32), tl.zeros((T, W), tl.float32)
        for i in tl.static_range(N):
            grad = grads[i].to(tl.float32)
            d_out += deals[i][:, None] * grad
            more = more + (of_write[i] + _lanes(grad * out, T, W),)
        of_write, more = more, ()
        tl.store(d_output + flat, d_out, mask=ok)
        for j in tl.static_range(N):
            tile, made = tl.load(x + row + j * hidden, mask=ok, other=0.0).to(tl.float32), tl.zeros((T, W), tl.float32)
            for i in tl.static_range(N):
                grad = grads[i].to(tl.float32)
                made += shares[i * N + j][:, None] * grad
                more = more + (of_mix[j * N + i] + _lanes(grad * tile, T, W),)
            tl.store(dx + row + j * hidden, made, mask=ok)
        of_mix = more
    for i in tl.static_range(N):
        tl.store(d_write + t * N + i, tl.sum(of_write[i], 1), mask=here)
        for j in tl.static_range(N):
            tl.store(d_mix + t * (N * N) + i * N + j, tl.sum(of_mix[j * N + i], 1), mask=here)


def _sides(n: int) -> dict[str, int]:
    return {"N": n, "M": max(16, triton.next_power_of_2(n * (n + 2)))}


def _product(n: int) -> dict[str, int]:
    """The weights of more than four streams' maps, loaded ahead, are more than shared memory holds."""
    tile = {"T": TOKENS, "W": WIDTH, "SPAN": SPAN, "num_warps": WARPS}
    return tile | ({"T": 16, "num_stages": 1} if n > 4 else {})


def _back(n: int) -> dict[str, int]:
    tile = {"T": BACK_TOKENS, "W": BACK_WIDTH, "STAGES": BACK_STAGES, "num_warps": BACK_WARPS}
    return tile | ({"T": 16, "W": 32, "STAGES": 1} if n > 4 else {})


def _each(n: int) -> dict[str, int]:
    return {"P": triton.next_power_of_2(n), "T": MAPS_TOKENS, "num_warps": MAPS_WARPS}


def _stream(n: int) -> dict[str, int]:
    return {"N": n, "T": STREAM_TOKENS, "W": STREAM_WIDTH, "num_warps": STREAM_WARPS}


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
        tile, each, stream = _product(n), _each(n), _stream(n)
        spans = triton.cdiv(size, tile["SPAN"])
        products, squares = torch.empty(spans, tokens, maps, **new), torch.empty(spans, tokens, **new)
        _maps_product[triton.cdiv(tokens, tile["T"]), spans](
            x, weight, products, squares, tokens, size, maps, M=_sides(n)["M"], **tile
        )
        raw, scale, read = torch.empty(tokens, maps, **new), torch.empty(tokens, **new), torch.empty(tokens, n, **new)
        write, mix = torch.empty(*lead, n, **new), torch.empty(*lead, n, n, **new)
        _maps_forward[triton.cdiv(tokens, each["T"]),](
            products, squares, alpha, bias, raw, scale, read, write, mix, tokens, size, maps, spans, epsilon, math.log(epsilon),
            **_sides(n), STEPS=steps, **each,
        )  # fmt: skip
        _read_forward[triton.cdiv(tokens, stream["T"]),](x, read, taken, tokens, hidden, **stream)
        ctx.save_for_backward(x, weight, alpha, bias, raw, scale)
        ctx.keys = n, steps, epsilon
        return taken, write, mix, streams.view_as(streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_taken: Tensor, d_write: Tensor, d_mix: Tensor, passed: Tensor):
        x, weight, alpha, bias, raw, scale = ctx.saved_tensors
        n, steps, epsilon = ctx.keys
        (tokens, maps), size = raw.shape, x.size(-1)
        hidden, d_taken = size // n, d_taken.contiguous()
        tile, each, stream = _back(n), _each(n), _stream(n)
        d_read, read = raw.new_empty(tokens, n), raw.new_empty(tokens, n)
        _read_gradient[triton.cdiv(tokens, stream["T"]),](x, d_taken, d_read, tokens, hidden, **stream)
        programs, span = triton.cdiv(tokens, each["T"]), max(BACK_SPAN, triton.cdiv(tokens, BACK_SPANS))
        span = triton.cdiv(span, tile["T"]) * tile["T"]
        spans = triton.cdiv(tokens, span)
        d_logit, d_raw, by_x = torch.empty_like(raw), torch.empty_like(raw), torch.empty_like(scale)
        d_own = raw.new_empty(programs, 2, maps)
        _maps_backward[programs,](
            alpha, bias, raw, scale, d_read, d_write.contiguous(), d_mix.contiguous(), read, d_logit, d_raw, by_x, d_own,
            raw.new_empty(tokens, 2 * steps, n), tokens, size, maps, epsilon, math.log(epsilon),
            **_sides(n), STEPS=steps, **each,
        )  # fmt: skip
        dx, parts = torch.empty_like(x), raw.new_empty(spans, maps, size)
        _read_backward[triton.cdiv(hidden, tile["W"]) * n, spans](
            x, weight, read, d_raw, by_x, d_taken, passed.contiguous(), dx, parts, tokens, hidden, maps, span,
            **_sides(n), **tile,
        )  # fmt: skip
        d_weight = torch.empty_like(weight)
        _total[triton.cdiv(maps * size, 1024),](parts, d_weight, spans, maps * size, W=1024)
        return dx, d_weight, *d_own.sum(0), None, None, None


class Write(Function):
    """(streams [..., n h], the layer's output [..., h], write [..., n], mix [..., n, n]) -> the streams after the layer."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, output: Tensor, write: Tensor, mix: Tensor):
        x, out = streams.contiguous(), output.contiguous()
        new = torch.empty_like(x)
        tokens, hidden, stream = out.numel() // out.size(-1), out.size(-1), _stream(write.size(-1))
        _write_forward[triton.cdiv(tokens, stream["T"]),](x, out, write, mix, new, tokens, hidden, **stream)
        ctx.save_for_backward(x, out, write, mix)
        return new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_new: Tensor):
        x, out, write, mix = ctx.saved_tensors
        dx, d_out, d_write, d_mix = (torch.empty_like(t) for t in (x, out, write, mix))
        tokens, hidden, stream = out.numel() // out.size(-1), out.size(-1), _stream(write.size(-1))
        _write_backward[triton.cdiv(tokens, stream["T"]),](
            x, out, write, mix, d_new.contiguous(), dx, d_out, d_write, d_mix, tokens, hidden, **stream
        )
        return dx, d_out, d_write, d_mix
