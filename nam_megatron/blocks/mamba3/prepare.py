"""Element-wise Triton kernels on both sides of the scan: what it needs of the packed projection, and the gradient of that.

`Prepared.of` runs in the forward pass and again in the backward pass, so nothing it makes is kept in between.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.mamba3.naive import A_FLOOR, NORM_EPSILON, Shape, Weights

PI, TURN = tl.constexpr(math.pi), tl.constexpr(2.0**32)
# Sums of angles: tokens of a program, and of a step as rows x run. A thread has whole runs, so it mostly sums by itself.
SPAN, ROWS, RUN = 256, 8, 4
PROGRAMS = 1024  # that sum the gradients of the norms' weights, at most


class Prepared(NamedTuple):
    """What the scan reads besides z and x. Sequence last or next to last, so that a head's chunk is contiguous.

    keys, queries: [b, s, groups, rank, state_dim], normed B and C. cos, sin: [b, heads, s, angles] of the summed angles.
    decay: [b, heads, s] fp32, log of the decay since the chunk began. now, scale: [b, heads, s] fp32, the weight of a token's
    input in its own output and in all later ones. angle: [b, heads, angles], where the sum ends.
    """

    keys: Tensor
    queries: Tensor
    cos: Tensor
    sin: Tensor
    decay: Tensor
    now: Tensor
    scale: Tensor
    angle: Tensor

    @classmethod
    def of(
        cls,
        packed: Tensor,
        rates: Tensor,
        weights: Weights,
        shape: Shape,
        chunk: int,
        angles: Tensor,
        documents: Tensor | None = None,
        start: Tensor | None = None,
    ) -> "Prepared":
        """For packed [s, b, *], whose first columns are z, x, B and C of shape.parts, rates [s, b, *], whose first are dt, A and trap,
        and all angles [s, b, angles].

        start: [b, heads, angles] fp32, where the sum of angles starts; 0 if None.
        """
        s, b, _ = packed.shape
        h, _, n, g, r, a = shape
        starts, strides, of_rates = offsets(shape), packed.stride()[:2], rates.stride()[:2]
        # cos and sin lie in [-1, 1], where fp16 has three more bits than bf16.
        turned = torch.float32 if packed.dtype == torch.float32 else torch.float16
        cos, sin = (packed.new_empty(b, h, s, a, dtype=turned) for _ in range(2))
        end = packed.new_empty(b, h, a, dtype=torch.float32)
        tanh, spans = angles.float().tanh(), triton.cdiv(s, SPAN)
        sums = packed.new_empty(b, h, spans, a, dtype=torch.int32)
        for last in (False, True):
            _angles[(spans, h, b)](
                rates, tanh, weights.dt_bias, start, sums, cos, sin, end, s, *of_rates, tanh.stride(0), tanh.stride(1),
                h, a, triton.next_power_of_2(a), SPAN, ROWS, RUN, start is not None, last,
                num_warps=_warps(a),
            )  # fmt: skip
        decay, now, scale = (packed.new_empty(b, h, s, dtype=torch.float32) for _ in range(3))
        heads = min(16, triton.next_power_of_2(h))
        _steps[(triton.cdiv(s, chunk), triton.cdiv(h, heads), b)](
            rates, weights.dt_bias, documents, decay, now, scale, s, *of_rates,
            h, chunk, heads, A_FLOOR, documents is not None, num_warps=4,
        )  # fmt: skip
        keys, queries = (packed.new_empty(b, s, g, r, n) for _ in range(2))
        rows = max(1, 2048 // n)
        _norm[(triton.cdiv(b * s * g * r, rows), 2)](
            packed, weights.B_norm, weights.C_norm, keys, queries, b * s * g * r, s, *strides, starts["B"], starts["C"],
            g * r, n, rows, NORM_EPSILON, num_warps=4,
        )  # fmt: skip
        return cls(keys, queries, cos, sin, decay, now, scale, end)


class Raw(NamedTuple):
    """Gradients that the scan's backward pass leaves for `packed_gradients`.

    keys, queries: [b, s, groups, rank, state_dim]. angles, more_angles: [b, heads, s, angles] fp32, of
    each token's summed angle, by its key and by its query. row, now, scale: [b, heads, s] fp32; row is of `decay` from the
    query side alone, the key side's is -scale * its gradient. ends: [b, heads, chunks] fp32, of the decay over a whole chunk.
    """

    keys: Tensor
    queries: Tensor
    angles: Tensor
    more_angles: Tensor
    row: Tensor
    now: Tensor
    scale: Tensor
    ends: Tensor


def offsets(shape: Shape) -> dict[str, int]:
    """Where each part of the packed projection starts."""
    starts, total = {}, 0
    for name, width in shape.parts.items():
        starts[name], total = total, total + width
    return starts


def rates_of(packed: Tensor, shape: Shape) -> Tensor:
    """Of the packed projection [s, b, *] what sets decays, steps and angles: dt, A, trap and the angles."""
    return packed[..., offsets(shape)["dt"] :]


def packed_gradients(
    raw: Raw,
    d_packed: Tensor,
    d_rates: Tensor,
    packed: Tensor,
    rates: Tensor,
    weights: Weights,
    shape: Shape,
    chunk: int,
    angles: Tensor,
    scale: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fills d_packed but for z and x, and d_rates but for angles; `scale` is what Prepared had.

    Returns the gradients of angles [s, b, angles], dt_bias, B_norm and C_norm.
    """
    s, b, _ = packed.shape
    h, _, n, g, r, a = shape
    starts, strides, of_rates = offsets(shape), packed.stride()[:2], rates.stride()[:2]
    out = d_packed.stride()[:2]
    chunks = raw.ends.size(2)

    tanh, d_dt, spans = angles.float().tanh(), torch.empty_like(raw.now), triton.cdiv(s, SPAN)
    sums = packed.new_empty(b, h, spans, a, dtype=torch.float32)
    for last in (False, True):
        _angles_backward[(spans, h, b)](
            rates, tanh, weights.dt_bias, raw.angles, raw.more_angles, sums, d_dt, s, *of_rates, tanh.stride(0), tanh.stride(1),
            h, a, triton.next_power_of_2(a), SPAN, ROWS, RUN, last, num_warps=_warps(a),
        )  # fmt: skip
    d_angles = raw.angles.sum(1).transpose(0, 1) * (math.pi * (1 - tanh.square()))

    heads = min(16, triton.next_power_of_2(h))
    bias = packed.new_empty(b, h, chunks, dtype=torch.float32)
    _steps_backward[(chunks, triton.cdiv(h, heads), b)](
        rates, weights.dt_bias, documents, raw.row, raw.now, raw.scale, scale, raw.ends, d_dt, d_rates, bias,
        s, *of_rates, *d_rates.stride()[:2],
        h, chunks, chunk, heads, A_FLOOR, documents is not None, num_warps=4,
    )  # fmt: skip

    rows, lines = max(1, 2048 // n), b * s * g * r
    programs = min(triton.cdiv(lines, rows), PROGRAMS)
    norm = packed.new_empty(2, programs, n, dtype=torch.float32)
    _norm_backward[(programs, 2)](
        packed, weights.B_norm, weights.C_norm, raw.keys, raw.queries, d_packed, norm, lines, s, *strides, *out,
        starts["B"], starts["C"], g * r, n, rows, NORM_EPSILON, num_warps=4,
    )  # fmt: skip
    d_norm = norm.sum(1)
    return (
        d_angles.to(packed.dtype),
        bias.sum((0, 2)),
        d_norm[0].to(weights.B_norm.dtype),
        d_norm[1].to(weights.C_norm.dtype),
    )


def _warps(angles: int) -> int:
    """One is enough for a step of up to 32 angles, and no sum crosses warps."""
    return max(1, triton.next_power_of_2(angles) // 32)


@triton.jit
def softplus(x):
    # log(1 + u) loses the bits of a small u: there the series is used.
    u = tl.exp(-tl.abs(x))
    small = u * (1 - u * (0.5 - u * (0.33333333 - u * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(u < 0.01, small, tl.log(1 + u))


@triton.jit
def _cos_sin(turns):
    """To 1e-6: the library's ones, which take radians of any size, cost several times as much."""
    quarter = tl.floor(turns * 4 + 0.5)
    x = (turns - quarter * 0.25) * (2 * PI)
    y = x * x
    c = 1 + y * (-0.5 + y * (4.16666418e-2 + y * (-1.388731625e-3 + y * 2.443315711e-5)))
    s = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 + y * -1.9515295891e-4))
    turn = quarter.to(tl.int32) & 3
    odd = (turn & 1) == 1
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    return tl.where((turn == 1) | (turn == 2), -cos, cos), tl.where(turn >= 2, -sin, sin)


@triton.jit
def _steps_of(rates, dt_bias, documents, s, stride_s, token, head, ok, H: tl.constexpr, PACKED: tl.constexpr):
    """dt, gate of tokens x heads, and of the next token of the same document (0 if there is none)."""
    at = rates + token[:, None].to(tl.int64) * stride_s + head[None, :]
    more = ok & (token + 1 < s)[:, None]
    if PACKED:
        here = tl.load(documents + token, mask=token < s, other=0)
        then = tl.load(documents + token + 1, mask=token + 1 < s, other=0)
        more = more & (here == then)[:, None]
    dt = softplus(tl.load(at, mask=ok, other=0.0).to(tl.float32) + dt_bias[None, :])
    gate = tl.sigmoid(tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32))
    next_dt = softplus(tl.load(at + stride_s, mask=more, other=0.0).to(tl.float32) + dt_bias[None, :])
    next_gate = tl.sigmoid(tl.load(at + stride_s + 2 * H, mask=more, other=0.0).to(tl.float32))
    return dt, gate, tl.where(more, next_dt, 0.0), next_gate


@triton.jit
def _steps(
    rates, dt_bias, documents, decay, now, scale, s, stride_s, stride_b,
    H: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ok = (token < s)[:, None] & (head < H)[None, :]
    rates += b * stride_b
    if PACKED:
        documents += b * s
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0)
    dt, gate, next_dt, next_gate = _steps_of(rates, bias, documents, s, stride_s, token, head, ok, H, PACKED)
    raw = tl.load(rates + token[:, None].to(tl.int64) * stride_s + H + head[None, :], mask=ok, other=0.0)
    log = tl.where(ok, -tl.maximum(softplus(raw.to(tl.float32)), FLOOR) * dt, 0.0)
    to = (b * H + head[None, :]) * s + token[:, None]
    tl.store(decay + to, tl.cumsum(log, 0), mask=ok)
    tl.store(now + to, gate * dt, mask=ok)
    tl.store(scale + to, gate * dt + (1 - next_gate) * next_dt, mask=ok)


@triton.jit
def _steps_backward(
    rates, dt_bias, documents, d_row, d_now, d_scale, scale, d_ends, d_dt, d_rates, d_bias,
    s, stride_s, stride_b, out_s, out_b,
    H: tl.constexpr, CHUNKS, CHUNK: tl.constexpr, HEADS: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = head < H
    ok = (token < s)[:, None] & known[None, :]
    rates += b * stride_b
    if PACKED:
        documents += b * s
    bias = tl.load(dt_bias + head, mask=known, other=0.0)
    dt, gate, _, _ = _steps_of(rates, bias, documents, s, stride_s, token, head, ok, H, PACKED)
    at = rates + token[:, None].to(tl.int64) * stride_s + head[None, :]
    raw_dt = tl.load(at, mask=ok, other=0.0).to(tl.float32) + bias[None, :]
    raw_A = tl.load(at + H, mask=ok, other=0.0).to(tl.float32)
    soft = softplus(raw_A)
    A = -tl.maximum(soft, FLOOR)

    to = (b * H + head[None, :]) * s + token[:, None]
    g_scale = tl.load(d_scale + to, mask=ok, other=0.0)
    g_now = tl.load(d_now + to, mask=ok, other=0.0) + g_scale
    # The token before this one holds (1 - gate) dt of this one in its scale.
    linked = ok & (token > 0)[:, None]
    if PACKED:
        here = tl.load(documents + token, mask=token < s, other=0)
        before = tl.load(documents + token - 1, mask=(token > 0) & (token < s), other=0)
        linked = linked & (here == before)[:, None]
    g_before = tl.load(d_scale + to - 1, mask=linked, other=0.0)

    g_decay = tl.load(d_row + to, mask=ok, other=0.0) - g_scale * tl.load(scale + to, mask=ok, other=0.0)
    end = tl.load(d_ends + (b * H + head) * CHUNKS + chunk, mask=known, other=0.0)
    g_log = tl.cumsum(g_decay, 0, reverse=True) + end[None, :]
    g_dt = tl.load(d_dt + to, mask=ok, other=0.0) + g_log * A + g_now * gate + g_before * (1 - gate)
    g_dt *= tl.sigmoid(raw_dt)
    g_A = tl.where(soft > FLOOR, -g_log * dt * tl.sigmoid(raw_A), 0.0)
    g_trap = (g_now - g_before) * dt * gate * (1 - gate)

    out = d_rates + b * out_b + token[:, None].to(tl.int64) * out_s + head[None, :]
    kind = d_rates.dtype.element_ty
    tl.store(out, g_dt.to(kind), mask=ok)
    tl.store(out + H, g_A.to(kind), mask=ok)
    tl.store(out + 2 * H, g_trap.to(kind), mask=ok)
    tl.store(d_bias + (b * H + head) * CHUNKS + chunk, tl.sum(tl.where(ok, g_dt, 0.0), 0), mask=known)


@triton.jit
def _fixed(turns):
    """In 2^-32 of a turn: sums of these wrap where angles do, and are exact at any length."""
    return ((turns - tl.floor(turns + 0.5)) * TURN).to(tl.int32)


@triton.jit
def _summed(x):
    """Sums of rows x run x angles up to each token."""
    rows = tl.sum(x, 1)
    return tl.cumsum(x, 1) + (tl.cumsum(rows, 0) - rows)[:, None, :]


@triton.jit
def _turning(rates, tanh, bias, token, column, s, stride_s, tanh_s, A: tl.constexpr):
    """dt and tanh(angles) of rows x run of tokens; 0 beyond the end."""
    ok, far = token < s, token.to(tl.int64)
    dt = tl.load(rates + far * stride_s, mask=ok, other=0.0).to(tl.float32)
    dt = tl.where(ok, softplus(dt + bias), 0.0)
    at = tanh + far[:, :, None] * tanh_s + column[None, None, :]
    return dt, tl.load(at, mask=ok[:, :, None] & (column < A)[None, None, :], other=0.0)


@triton.jit
def _angles(
    rates, tanh, dt_bias, start, sums, cos, sin, end, s, stride_s, stride_b, tanh_s, tanh_b,
    H: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
    STARTED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """First for the sum of each span of tokens, and at last, from those before it, for cos and sin."""
    span, spans, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    rates += b * stride_b + h
    tanh += b * tanh_b
    row = b * H + h
    column = tl.arange(0, COLUMNS)
    known = column < A
    bias = tl.load(dt_bias + h)
    step = tl.arange(0, ROWS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    total = tl.zeros([COLUMNS], tl.int32)
    if LAST:
        if STARTED:
            total = _fixed(tl.load(start + row * A + column, mask=known, other=0.0) / (2 * PI))
        for before in range(span):
            total += tl.load(sums + (row * spans + before) * A + column, mask=known, other=0)
    for first in range(span * SPAN, min((span + 1) * SPAN, s), ROWS * RUN):
        token = first + step
        dt, rate = _turning(rates, tanh, bias, token, column, s, stride_s, tanh_s, A)
        turns = (0.5 * dt)[:, :, None] * rate
        if LAST:
            c, sn = _cos_sin(_summed(turns) + (total.to(tl.float32) / TURN)[None, None, :])
            to = (row * s + token[:, :, None]) * A + column[None, None, :]
            ok = (token < s)[:, :, None] & known[None, None, :]
            tl.store(cos + to, c.to(cos.dtype.element_ty), mask=ok)
            tl.store(sin + to, sn.to(sin.dtype.element_ty), mask=ok)
        total += _fixed(tl.sum(tl.sum(turns, 1), 0))
    if not LAST:
        tl.store(sums + (row * spans + span) * A + column, total, mask=known)
    elif span == spans - 1:
        angle = total.to(tl.float32) * (2 * PI / TURN)
        tl.store(end + row * A + column, tl.where(angle < 0, angle + 2 * PI, angle), mask=known)


@triton.jit
def _angles_backward(
    rates, tanh, dt_bias, d_angles, more, sums, d_dt, s, stride_s, stride_b, tanh_s, tanh_b,
    H: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """As _angles, from the last token to the first. In place: d_angles of the summed angles gets `more`, and at last becomes this head's
    share of the gradient of pi tanh(angles)."""
    span, spans, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    rates += b * stride_b + h
    tanh += b * tanh_b
    row = b * H + h
    column = tl.arange(0, COLUMNS)
    known = column < A
    bias = tl.load(dt_bias + h)
    step = tl.arange(0, ROWS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    later = tl.zeros([COLUMNS], tl.float32)
    if LAST:
        for after in range(span + 1, spans):
            later += tl.load(sums + (row * spans + after) * A + column, mask=known, other=0.0)
    end = min((span + 1) * SPAN, s)
    for back in range(0, end - span * SPAN, ROWS * RUN):
        token = end - 1 - back - step
        inside = token >= span * SPAN
        ok = inside[:, :, None] & known[None, None, :]
        at = (row * s + token[:, :, None]) * A + column[None, None, :]
        own = tl.load(d_angles + at, mask=ok, other=0.0)
        if LAST:
            dt, rate = _turning(rates, tanh, bias, tl.where(inside, token, s), column, s, stride_s, tanh_s, A)
            summed = _summed(own) + later[None, None, :]
            tl.store(d_angles + at, summed * dt[:, :, None], mask=ok)
            tl.store(d_dt + row * s + token, PI * tl.sum(summed * rate, 2), mask=inside)
        else:
            own += tl.load(more + at, mask=ok, other=0.0)
            tl.store(d_angles + at, own, mask=ok)
        later += tl.sum(tl.sum(own, 1), 0)
    if not LAST:
        tl.store(sums + (row * spans + span) * A + column, later, mask=known)


@triton.jit
def _norm(
    packed, B_norm, C_norm, keys, queries, lines, s, stride_s, stride_b, at_B, at_C,
    KEYS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    at, weight, out = at_B, B_norm, keys
    if tl.program_id(1) == 1:
        at, weight, out = at_C, C_norm, queries
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N)
    token = line // KEYS
    start = (token % s) * stride_s + (token // s) * stride_b + at + (line % KEYS) * N
    ok = (line < lines)[:, None]
    x = tl.load(packed + start[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
    rms = tl.rsqrt(tl.sum(x * x, 1) / N + EPSILON)
    y = x * rms[:, None] * tl.load(weight + column).to(tl.float32)[None, :]
    tl.store(out + line[:, None] * N + column[None, :], y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _norm_backward(
    packed, B_norm, C_norm, d_keys, d_queries, d_packed, d_norm, lines, s, stride_s, stride_b, out_s, out_b, at_B, at_C,
    KEYS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    at, weight, grad = at_B, B_norm, d_keys
    if tl.program_id(1) == 1:
        at, weight, grad = at_C, C_norm, d_queries
    programs = tl.num_programs(0)
    column = tl.arange(0, N)
    w = tl.load(weight + column).to(tl.float32)
    total = tl.zeros([ROWS, N], tl.float32)
    for i in range(tl.cdiv(lines, programs * ROWS)):
        line = (i * programs + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        token = line // KEYS
        ok = (line < lines)[:, None]
        start = (token % s) * stride_s + (token // s) * stride_b + at + (line % KEYS) * N
        x = tl.load(packed + start[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
        g = tl.load(grad + line[:, None] * N + column[None, :], mask=ok, other=0.0).to(tl.float32)
        rms = tl.rsqrt(tl.sum(x * x, 1) / N + EPSILON)[:, None]
        total += g * x * rms  # over rows at the end: that sum crosses warps
        g *= w[None, :]
        dx = rms * g - x * (rms * rms * rms * (tl.sum(g * x, 1) / N)[:, None])
        to = (token % s) * out_s + (token // s) * out_b + at + (line % KEYS) * N
        tl.store(d_packed + to[:, None] + column[None, :], dx.to(d_packed.dtype.element_ty), mask=ok)
    tl.store(d_norm + (tl.program_id(1) * programs + tl.program_id(0)) * N + column, tl.sum(total, 0))
