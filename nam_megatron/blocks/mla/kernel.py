"""The functions of naive.py in Triton, for Hopper: x is read once, queries, keys and values are written once.

Every result is deterministic: no atomics, sums over tokens in two stages. Nothing waits for the host, so all of it can be
captured in a CUDA graph. README.md derives the algebra, bytes and FLOPs.

Shapes as in naive.py. In kernels: T tokens (s b, or t when packed), R = rq + rkv + dr; BM is a tile of tokens, BK and BN of
the hidden size; a program takes `group` (or GROUP) heads, and `span` tokens go into one partial sum of a
weight's gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.mla.naive import Rope

# Tile sizes and launch options of each kernel at NAM56R's shapes on H200; benchmarks/mla.py --sweep measures others.
TILES: dict[str, dict[str, int]] = {
    "ingress": dict(BM=128, BK=64, num_warps=8, num_stages=4),
    "latent_norm_back": dict(BM=64, num_warps=8, num_stages=1),
    "ingress_input": dict(BM=128, BN=64, num_warps=8, num_stages=2, programs=256),
    "ingress_weights": dict(BN=32, num_warps=4, num_stages=2),
    "total": dict(BN=1024, num_warps=4, num_stages=4),
    "queries": dict(BM=64, num_warps=4, num_stages=4, programs=256),
    "queries_latent": dict(BM=128, num_warps=8, num_stages=3),
    "queries_weight": dict(BM=32, GROUP=2, num_warps=8, num_stages=3, programs=264),
    "keys_values": dict(BM=64, num_warps=4, num_stages=3, programs=256),
    "keys_values_latent": dict(BM=128, num_warps=8, num_stages=3),
    "keys_values_weight": dict(BM=64, GROUP=2, num_warps=8, num_stages=3, programs=132),
    "rotate": dict(GROUP=16, num_warps=1, num_stages=1),
    "split": dict(GROUP=16, num_warps=4, num_stages=1),
}

# What changes where a rank or a width is 128: registers and shared memory would not do.
WIDE: dict[str, dict[str, int]] = {
    "ingress": dict(BM=64, num_stages=3),
    "ingress_input": dict(BM=64, num_stages=2),
    "queries": dict(num_warps=8, num_stages=2),
    "queries_latent": dict(BM=64, num_stages=2),
    "queries_weight": dict(BM=64, GROUP=1, num_stages=2),
    "keys_values": dict(num_warps=8, num_stages=2),
    "keys_values_latent": dict(BM=64, num_stages=2),
    "keys_values_weight": dict(GROUP=1, num_stages=2),
}

# Where tiles of 128 tokens would leave half of an H200's 132 SMs without one: one H100, 8,192 tokens, `sweep` of benchmarks/mla.py.
FEW_TOKENS = 66 * 128
FEW: dict[str, dict[str, int]] = {
    "ingress": dict(BM=64, num_warps=4),
    "queries_latent": dict(BM=64, num_warps=4, num_stages=4),
    "keys_values_latent": dict(BM=64, num_warps=4),
}


# Pieces ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _angles(cos, sin, positions, rows, inside, batch, HALF: tl.constexpr, PACKED: tl.constexpr):
    """cos and sin of each row's position, [rows, HALF]. rows: token numbers, int32."""
    place = tl.load(positions + rows, mask=inside, other=0) if PACKED else rows // batch
    at = place[:, None] * HALF + tl.arange(0, HALF)[None, :]
    return tl.load(cos + at, mask=inside[:, None], other=0.0), tl.load(sin + at, mask=inside[:, None], other=0.0)


@triton.jit
def _pair(ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Channels that turn together: the first of each pair, and the second."""
    i = tl.arange(0, ROPE // 2)
    first = i * 2 if INTERLEAVED else i
    second = first + 1 if INTERLEAVED else first + ROPE // 2
    return first, second


# Ingress --------------------------------------------------------------------------------------------------------------


@triton.jit
def _ingress(
    x, gamma, w_q, w_kv, gamma_q, gamma_kv, latents, raw, stats, tokens, width, eps, latent_eps,
    RQ: tl.constexpr, RKV: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum of squares and all projections in one pass: rms commutes with the projection, so it divides at the end."""
    R: tl.constexpr = RQ + RKV + ROPE
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < tokens
    x += rows.to(tl.int64)[:, None] * width
    iq, ikv, ir = tl.arange(0, RQ), tl.arange(0, RKV), tl.arange(0, ROPE)
    q = tl.zeros([BM, RQ], tl.float32)
    kv = tl.zeros([BM, RKV], tl.float32)
    pe = tl.zeros([BM, ROPE], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for k in range(0, width, BK):
        cols = k + tl.arange(0, BK)
        if EVEN:
            tile = tl.load(x + cols[None, :], mask=inside[:, None], other=0.0)
            g = tl.load(gamma + cols)
            wq = tl.load(w_q + iq[None, :] * width + cols[:, None])
            wkv = tl.load(w_kv + ikv[None, :] * width + cols[:, None])
            wpe = tl.load(w_kv + (RKV + ir)[None, :] * width + cols[:, None])
        else:
            there = cols < width
            tile = tl.load(x + cols[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            g = tl.load(gamma + cols, mask=there, other=0.0)
            wq = tl.load(w_q + iq[None, :] * width + cols[:, None], mask=there[:, None], other=0.0)
            wkv = tl.load(w_kv + ikv[None, :] * width + cols[:, None], mask=there[:, None], other=0.0)
            wpe = tl.load(w_kv + (RKV + ir)[None, :] * width + cols[:, None], mask=there[:, None], other=0.0)
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        scaled = (wide * g.to(tl.float32)[None, :]).to(tile.dtype)
        q = tl.dot(scaled, wq, q, input_precision="ieee")
        kv = tl.dot(scaled, wkv, kv, input_precision="ieee")
        pe = tl.dot(scaled, wpe, pe, input_precision="ieee")
    rrms = tl.rsqrt(squares / width + eps)
    tl.store(stats + rows, rrms, mask=inside)
    kind = latents.dtype.element_ty
    q, kv, pe = (q * rrms[:, None]).to(kind), (kv * rrms[:, None]).to(kind), (pe * rrms[:, None]).to(kind)
    at = rows.to(tl.int64)[:, None] * R
    here = inside[:, None]
    tl.store(latents + at + RQ + RKV + ir[None, :], pe, mask=here)
    tl.store(raw + at + iq[None, :], q, mask=here)
    tl.store(raw + at + RQ + ikv[None, :], kv, mask=here)
    tl.store(raw + at + RQ + RKV + ir[None, :], pe, mask=here)
    if NORM:
        wide_q, wide_kv = q.to(tl.float32), kv.to(tl.float32)
        r_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) / RQ + latent_eps)
        r_kv = tl.rsqrt(tl.sum(wide_kv * wide_kv, 1) / RKV + latent_eps)
        tl.store(stats + tokens + rows, r_q, mask=inside)
        tl.store(stats + 2 * tokens + rows, r_kv, mask=inside)
        q = (wide_q * r_q[:, None] * tl.load(gamma_q + iq).to(tl.float32)[None, :]).to(kind)
        kv = (wide_kv * r_kv[:, None] * tl.load(gamma_kv + ikv).to(tl.float32)[None, :]).to(kind)
    tl.store(latents + at + iq[None, :], q, mask=here)
    tl.store(latents + at + RQ + ikv[None, :], kv, mask=here)


@triton.jit
def _norm_back(grad, raw, at, here, rrms, gamma, d_gamma, N: tl.constexpr, NORM: tl.constexpr):
    """Gradient of a projection's output behind its latent norm, and its product with that output, by row."""
    i = tl.arange(0, N)
    d = tl.load(grad + at + i[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(raw + at + i[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        unit = c * rrms[:, None]
        tl.store(d_gamma + i, tl.sum(d * unit, 0))
        d *= tl.load(gamma + i).to(tl.float32)[None, :]
        d = rrms[:, None] * (d - unit * (tl.sum(d * unit, 1) / N)[:, None])
    return d, tl.sum(d * c, 1)


@triton.jit
def _latent_norm_back(
    grad, raw, stats, gamma_q, gamma_kv, scaled, pull, d_gamma, tokens, width,
    RQ: tl.constexpr, RKV: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """scaled = rrms dc, what both the weights and dx need; pull = rrms^2 / h (dc . c), how far x itself pulls."""
    R: tl.constexpr = RQ + RKV + ROPE
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    at = rows.to(tl.int64)[:, None] * R
    rrms = tl.load(stats + rows, mask=inside, other=0.0)
    r_q, r_kv = rrms, rrms
    if NORM:
        r_q = tl.load(stats + tokens + rows, mask=inside, other=0.0)
        r_kv = tl.load(stats + 2 * tokens + rows, mask=inside, other=0.0)
    sums = d_gamma + tl.program_id(0) * (RQ + RKV)
    q, by_q = _norm_back(grad, raw, at, here, r_q, gamma_q, sums, RQ, NORM)
    kv, by_kv = _norm_back(grad + RQ, raw + RQ, at, here, r_kv, gamma_kv, sums + RQ, RKV, NORM)
    pe, by_pe = _norm_back(grad + RQ + RKV, raw + RQ + RKV, at, here, rrms, gamma_q, sums, ROPE, False)
    tl.store(pull + rows, rrms * rrms / width * (by_q + by_kv + by_pe), mask=inside)
    kind = scaled.dtype.element_ty
    tl.store(scaled + at + tl.arange(0, RQ)[None, :], (q * rrms[:, None]).to(kind), mask=here)
    tl.store(scaled + at + RQ + tl.arange(0, RKV)[None, :], (kv * rrms[:, None]).to(kind), mask=here)
    tl.store(scaled + at + RQ + RKV + tl.arange(0, ROPE)[None, :], (pe * rrms[:, None]).to(kind), mask=here)


@triton.jit
def _ingress_input(
    x, folded, scaled, pull, dx, tokens, width, span,
    RQ: tl.constexpr, RKV: tl.constexpr, ROPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx of a tile of tokens and `span` columns: the latents' gradients stay, the weights stream by."""
    R: tl.constexpr = RQ + RKV + ROPE
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    at = rows.to(tl.int64)[:, None]
    iq, ikv, ir = tl.arange(0, RQ), tl.arange(0, RKV), tl.arange(0, ROPE)
    d_q = tl.load(scaled + at * R + iq[None, :], mask=here, other=0.0)
    d_kv = tl.load(scaled + at * R + RQ + ikv[None, :], mask=here, other=0.0)
    d_pe = tl.load(scaled + at * R + RQ + RKV + ir[None, :], mask=here, other=0.0)
    away = tl.load(pull + rows, mask=inside, other=0.0)[:, None]
    first = tl.program_id(0) * span
    for start in range(first, tl.minimum(first + span, width), BN):
        cols = start + tl.arange(0, BN)
        there = (cols < width)[None, :]
        if EVEN:
            tile = tl.load(x + at * width + cols[None, :], mask=here, other=0.0)
            wq = tl.load(folded + iq[:, None] * width + cols[None, :])
            wkv = tl.load(folded + (RQ + ikv)[:, None] * width + cols[None, :])
            wpe = tl.load(folded + (RQ + RKV + ir)[:, None] * width + cols[None, :])
        else:
            tile = tl.load(x + at * width + cols[None, :], mask=here & there, other=0.0)
            wq = tl.load(folded + iq[:, None] * width + cols[None, :], mask=there, other=0.0)
            wkv = tl.load(folded + (RQ + ikv)[:, None] * width + cols[None, :], mask=there, other=0.0)
            wpe = tl.load(folded + (RQ + RKV + ir)[:, None] * width + cols[None, :], mask=there, other=0.0)
        up = tl.dot(d_q, wq, input_precision="ieee")
        up = tl.dot(d_kv, wkv, up, input_precision="ieee")
        up = tl.dot(d_pe, wpe, up, input_precision="ieee")
        out = (up - away * tile.to(tl.float32)).to(dx.dtype.element_ty)
        tl.store(dx + at * width + cols[None, :], out, mask=here if EVEN else here & there)


@triton.jit
def _unfold(G, weight, out, g, cols, width, N: tl.constexpr):
    """Writes gamma G, where G is the gradient of gamma W; returns the columns' sums of W G, which is d gamma."""
    at = tl.arange(0, N)[:, None] * width + cols[None, :]
    there = (cols < width)[None, :]
    total = tl.load(G + at, mask=there, other=0.0)
    tl.store(out + at, (total * g[None, :]).to(out.dtype.element_ty), mask=there)
    return tl.sum(total * tl.load(weight + at, mask=there, other=0.0).to(tl.float32), 0)


@triton.jit
def _ingress_weights(
    G, gamma, w_q, w_kv, d_q, d_kv, d_gamma, width,
    RQ: tl.constexpr, RKV: tl.constexpr, ROPE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    there = cols < width
    g = tl.load(gamma + cols, mask=there, other=0.0).to(tl.float32)
    total = _unfold(G, w_q, d_q, g, cols, width, RQ)
    total += _unfold(G + RQ * width, w_kv, d_kv, g, cols, width, RKV)
    total += _unfold(G + (RQ + RKV) * width, w_kv + RKV * width, d_kv + RKV * width, g, cols, width, ROPE)
    tl.store(d_gamma + cols, total.to(d_gamma.dtype.element_ty), mask=there)


@triton.jit
def _total(partial, out, size, splits, BN: tl.constexpr):
    """Sum of `splits` partial sums of `size` elements each, always in the same order."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for _ in range(splits):
        total += tl.load(partial + i, mask=i < size, other=0.0)
        partial += size
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


# Queries --------------------------------------------------------------------------------------------------------------


@triton.jit
def _queries(
    latent, stride, weight, cos, sin, positions, out, tokens, batch, heads, group,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Projection, rotation and concatenation. The pairs' halves are two products: rows of W are picked, not channels."""
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = NOPE + ROPE
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    i, j, r = tl.arange(0, NOPE), tl.arange(0, HALF), tl.arange(0, RANK)
    first, second = _pair(ROPE, INTERLEAVED)
    c, s = _angles(cos, sin, positions, rows, inside, batch, HALF, PACKED)
    a = tl.load(latent + rows.to(tl.int64)[:, None] * stride + r[None, :], mask=here, other=0.0)
    at = out + rows.to(tl.int64)[:, None] * heads * WIDTH
    kind = out.dtype.element_ty
    begin = tl.program_id(0) * group
    for head in range(begin, tl.minimum(begin + group, heads)):
        w = weight + head * WIDTH * RANK
        keep = tl.dot(a, tl.load(w + i[None, :] * RANK + r[:, None]), input_precision="ieee")
        w += NOPE * RANK
        x = tl.dot(a, tl.load(w + first[None, :] * RANK + r[:, None]), input_precision="ieee")
        y = tl.dot(a, tl.load(w + second[None, :] * RANK + r[:, None]), input_precision="ieee")
        to = at + head * WIDTH
        tl.store(to + i[None, :], keep.to(kind), mask=here)
        tl.store(to + NOPE + j[None, :], (x * c - y * s).to(kind), mask=here)
        tl.store(to + NOPE + HALF + j[None, :], (y * c + x * s).to(kind), mask=here)


@triton.jit
def _queries_latent(
    grad, weight, cos, sin, positions, d_latent, tokens, batch, heads,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Gradient of the latent: a program owns its tokens and walks over all heads."""
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = NOPE + ROPE
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    i, j, r = tl.arange(0, NOPE), tl.arange(0, HALF), tl.arange(0, RANK)
    first, second = _pair(ROPE, INTERLEAVED)
    c, s = _angles(cos, sin, positions, rows, inside, batch, HALF, PACKED)
    at = grad + rows.to(tl.int64)[:, None] * heads * WIDTH
    kind = grad.dtype.element_ty
    total = tl.zeros([BM, RANK], tl.float32)
    for head in range(heads):
        keep = tl.load(at + head * WIDTH + i[None, :], mask=here, other=0.0)
        u = tl.load(at + head * WIDTH + NOPE + j[None, :], mask=here, other=0.0).to(tl.float32)
        v = tl.load(at + head * WIDTH + NOPE + HALF + j[None, :], mask=here, other=0.0).to(tl.float32)
        w = weight + head * WIDTH * RANK
        total = tl.dot(keep, tl.load(w + i[:, None] * RANK + r[None, :]), total, input_precision="ieee")
        w += NOPE * RANK
        x, y = (u * c + v * s).to(kind), (v * c - u * s).to(kind)
        total = tl.dot(x, tl.load(w + first[:, None] * RANK + r[None, :]), total, input_precision="ieee")
        total = tl.dot(y, tl.load(w + second[:, None] * RANK + r[None, :]), total, input_precision="ieee")
    out = d_latent + rows.to(tl.int64)[:, None] * RANK + r[None, :]
    tl.store(out, total.to(d_latent.dtype.element_ty), mask=here)


@triton.jit
def _queries_weight(
    grad, latent, stride, cos, sin, positions, partial, tokens, batch, heads, span,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradient of the weights of GROUP heads from `span` tokens: partial[split] is [n (dq + dr), rank], fp32."""
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = NOPE + ROPE
    i, j, r = tl.arange(0, GROUP * NOPE), tl.arange(0, GROUP * HALF), tl.arange(0, RANK)
    head_i, head_j = tl.program_id(0) * GROUP + i // NOPE, tl.program_id(0) * GROUP + j // HALF
    at_i, at_j = head_i * WIDTH + i % NOPE, head_j * WIDTH + NOPE + j % HALF
    there_i, there_j = (head_i < heads)[None, :], (head_j < heads)[None, :]
    keep = tl.zeros([RANK, GROUP * NOPE], tl.float32)
    x = tl.zeros([RANK, GROUP * HALF], tl.float32)
    y = tl.zeros([RANK, GROUP * HALF], tl.float32)
    kind = grad.dtype.element_ty
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, tokens), BM):
        rows = start + tl.arange(0, BM)
        inside = rows < tokens
        here = inside[:, None]
        at = grad + rows.to(tl.int64)[:, None] * heads * WIDTH
        a = tl.load(latent + rows.to(tl.int64)[:, None] * stride + r[None, :], mask=here, other=0.0)
        d = tl.load(at + at_i[None, :], mask=here & there_i, other=0.0)
        u = tl.load(at + at_j[None, :], mask=here & there_j, other=0.0).to(tl.float32)
        v = tl.load(at + HALF + at_j[None, :], mask=here & there_j, other=0.0).to(tl.float32)
        c, s = _angles(cos, sin, positions, rows, inside, batch, HALF, PACKED)
        c = tl.broadcast_to(c[:, None, :], (BM, GROUP, HALF)).reshape(BM, GROUP * HALF)
        s = tl.broadcast_to(s[:, None, :], (BM, GROUP, HALF)).reshape(BM, GROUP * HALF)
        t = tl.trans(a)
        keep = tl.dot(t, d, keep, input_precision="ieee")
        x = tl.dot(t, (u * c + v * s).to(kind), x, input_precision="ieee")
        y = tl.dot(t, (v * c - u * s).to(kind), y, input_precision="ieee")
    partial += tl.program_id(1).to(tl.int64) * heads * WIDTH * RANK
    even = j % HALF * 2 if INTERLEAVED else j % HALF
    odd = even + 1 if INTERLEAVED else even + HALF
    pairs = head_j * WIDTH + NOPE
    tl.store(partial + at_i[None, :] * RANK + r[:, None], keep, mask=there_i)
    tl.store(partial + (pairs + even)[None, :] * RANK + r[:, None], x, mask=there_j)
    tl.store(partial + (pairs + odd)[None, :] * RANK + r[:, None], y, mask=there_j)


# Keys and values ------------------------------------------------------------------------------------------------------


@triton.jit
def _keys_values(
    latent, stride, k_rope, rope_stride, weight, cos, sin, positions, key, value, tokens, batch, heads, group,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Projection, split, and the one rotated head written to all."""
    HALF: tl.constexpr = ROPE // 2
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    wide = rows.to(tl.int64)[:, None]
    i, j, o, r = tl.arange(0, NOPE), tl.arange(0, HALF), tl.arange(0, VALUE), tl.arange(0, RANK)
    first, second = _pair(ROPE, INTERLEAVED)
    c, s = _angles(cos, sin, positions, rows, inside, batch, HALF, PACKED)
    x = tl.load(k_rope + wide * rope_stride + first[None, :], mask=here, other=0.0).to(tl.float32)
    y = tl.load(k_rope + wide * rope_stride + second[None, :], mask=here, other=0.0).to(tl.float32)
    kind = key.dtype.element_ty
    turned, other = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
    a = tl.load(latent + wide * stride + r[None, :], mask=here, other=0.0)
    begin = tl.program_id(0) * group
    for head in range(begin, tl.minimum(begin + group, heads)):
        w = weight + head * (NOPE + VALUE) * RANK
        k = tl.dot(a, tl.load(w + i[None, :] * RANK + r[:, None]), input_precision="ieee")
        v = tl.dot(a, tl.load(w + (NOPE + o)[None, :] * RANK + r[:, None]), input_precision="ieee")
        to = key + (wide * heads + head) * (NOPE + ROPE)
        tl.store(to + i[None, :], k.to(kind), mask=here)
        tl.store(to + NOPE + j[None, :], turned, mask=here)
        tl.store(to + NOPE + HALF + j[None, :], other, mask=here)
        tl.store(value + (wide * heads + head) * VALUE + o[None, :], v.to(kind), mask=here)


@triton.jit
def _keys_values_latent(
    d_key, d_value, weight, cos, sin, positions, d_latent, d_rope, tokens, batch, heads,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of the latent and of the shared head: rotation is linear, so heads are summed first and turned back once."""
    HALF: tl.constexpr = ROPE // 2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < tokens
    here = inside[:, None]
    wide = rows.to(tl.int64)[:, None]
    i, j, o, r = tl.arange(0, NOPE), tl.arange(0, HALF), tl.arange(0, VALUE), tl.arange(0, RANK)
    total = tl.zeros([BM, RANK], tl.float32)
    u = tl.zeros([BM, HALF], tl.float32)
    v = tl.zeros([BM, HALF], tl.float32)
    for head in range(heads):
        at = d_key + (wide * heads + head) * (NOPE + ROPE)
        dk = tl.load(at + i[None, :], mask=here, other=0.0)
        dv = tl.load(d_value + (wide * heads + head) * VALUE + o[None, :], mask=here, other=0.0)
        u += tl.load(at + NOPE + j[None, :], mask=here, other=0.0).to(tl.float32)
        v += tl.load(at + NOPE + HALF + j[None, :], mask=here, other=0.0).to(tl.float32)
        w = weight + head * (NOPE + VALUE) * RANK
        total = tl.dot(dk, tl.load(w + i[:, None] * RANK + r[None, :]), total, input_precision="ieee")
        w += NOPE * RANK
        total = tl.dot(dv, tl.load(w + o[:, None] * RANK + r[None, :]), total, input_precision="ieee")
    kind = d_latent.dtype.element_ty
    tl.store(d_latent + wide * RANK + r[None, :], total.to(kind), mask=here)
    c, s = _angles(cos, sin, positions, rows, inside, batch, HALF, PACKED)
    first, second = _pair(ROPE, INTERLEAVED)
    tl.store(d_rope + wide * ROPE + first[None, :], (u * c + v * s).to(kind), mask=here)
    tl.store(d_rope + wide * ROPE + second[None, :], (v * c - u * s).to(kind), mask=here)


@triton.jit
def _keys_values_weight(
    d_key, d_value, latent, stride, partial, tokens, heads, span,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Gradient of the weights of GROUP heads from `span` tokens: partial[split] is [n (dq + dv), rank], fp32."""
    i, o, r = tl.arange(0, GROUP * NOPE), tl.arange(0, GROUP * VALUE), tl.arange(0, RANK)
    head_i, head_o = tl.program_id(0) * GROUP + i // NOPE, tl.program_id(0) * GROUP + o // VALUE
    there_i, there_o = (head_i < heads)[None, :], (head_o < heads)[None, :]
    at_i, at_o = (head_i * (NOPE + ROPE) + i % NOPE)[None, :], (head_o * VALUE + o % VALUE)[None, :]
    k = tl.zeros([RANK, GROUP * NOPE], tl.float32)
    v = tl.zeros([RANK, GROUP * VALUE], tl.float32)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, tokens), BM):
        rows = start + tl.arange(0, BM)
        here = (rows < tokens)[:, None]
        wide = rows.to(tl.int64)[:, None]
        t = tl.trans(tl.load(latent + wide * stride + r[None, :], mask=here, other=0.0))
        dk = tl.load(d_key + wide * heads * (NOPE + ROPE) + at_i, mask=here & there_i, other=0.0)
        dv = tl.load(d_value + wide * heads * VALUE + at_o, mask=here & there_o, other=0.0)
        k = tl.dot(t, dk, k, input_precision="ieee")
        v = tl.dot(t, dv, v, input_precision="ieee")
    partial += tl.program_id(1).to(tl.int64) * heads * (NOPE + VALUE) * RANK + r[:, None]
    row_i, row_o = head_i * (NOPE + VALUE) + i % NOPE, head_o * (NOPE + VALUE) + NOPE + o % VALUE
    tl.store(partial + row_i[None, :] * RANK, k, mask=there_i)
    tl.store(partial + row_o[None, :] * RANK, v, mask=there_o)


# Behind a GEMM --------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    q, cos, sin, positions, batch, heads, width, keep,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Turns ROPE channels of each head of a token, from `keep` on, in place; BACK turns a gradient back."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0)
    place = tl.load(positions + token) if PACKED else token // batch
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    here = (head < heads)[:, None]
    i, j = tl.arange(0, ROPE)[None, :], tl.arange(0, HALF)[None, :]
    c, s = tl.load(cos + place * HALF + j), tl.load(sin + place * HALF + j)
    at = q + (token.to(tl.int64) * heads + head)[:, None] * width + keep
    # Pairs that lie side by side are read and written as whole rows: single channels would be half of each sector.
    if INTERLEAVED and not BACK:
        x, y = tl.split(tl.reshape(tl.load(at + i, mask=here, other=0.0), [GROUP, HALF, 2]))
    else:
        x, y = tl.load(at + j, mask=here, other=0.0), tl.load(at + HALF + j, mask=here, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)
    tl.debug_barrier()  # another thread's channels are overwritten below
    if BACK:
        s = -s
    first, second = (x * c - y * s).to(q.dtype.element_ty), (y * c + x * s).to(q.dtype.element_ty)
    if INTERLEAVED and BACK:
        tl.store(at + i, tl.reshape(tl.join(first, second), [GROUP, ROPE]), mask=here)
    else:
        tl.store(at + j, first, mask=here)
        tl.store(at + HALF + j, second, mask=here)


@triton.jit
def _split(
    kv, k_rope, rope_stride, key, value, cos, sin, positions, batch, heads, nope, wide_value,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr, GROUP: tl.constexpr,
    NOPE: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """kv [n, nope + value] and the shared head -> key and value of a token; BACK: their gradients -> those of both."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0)
    wide = token.to(tl.int64)
    place = tl.load(positions + token) if PACKED else token // batch
    i, j, o = tl.arange(0, NOPE), tl.arange(0, HALF), tl.arange(0, VALUE)
    c, s = tl.load(cos + place * HALF + j), tl.load(sin + place * HALF + j)
    first, second = _pair(ROPE, INTERLEAVED)
    kind = kv.dtype.element_ty
    k_rope += wide * rope_stride
    x, y = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    if not BACK:
        x, y = tl.load(k_rope + first).to(tl.float32), tl.load(k_rope + second).to(tl.float32)
        x, y = x * c - y * s, y * c + x * s
    for begin in range(0, heads, GROUP):
        head = begin + tl.arange(0, GROUP)
        here = (head < heads)[:, None]
        row = (wide * heads + head)[:, None]
        a, b = kv + row * (nope + wide_value) + i[None, :], kv + row * (nope + wide_value) + nope + o[None, :]
        to_k, to_v = key + row * (nope + ROPE), value + row * wide_value + o[None, :]
        here_k, here_v = here & (i < nope)[None, :], here & (o < wide_value)[None, :]
        if BACK:
            tl.store(a, tl.load(to_k + i[None, :], mask=here_k, other=0.0), mask=here_k)
            tl.store(b, tl.load(to_v, mask=here_v, other=0.0), mask=here_v)
            x += tl.sum(tl.load(to_k + nope + j[None, :], mask=here, other=0.0).to(tl.float32), 0)
            y += tl.sum(tl.load(to_k + nope + HALF + j[None, :], mask=here, other=0.0).to(tl.float32), 0)
        else:
            tl.store(to_k + i[None, :], tl.load(a, mask=here_k, other=0.0), mask=here_k)
            tl.store(to_v, tl.load(b, mask=here_v, other=0.0), mask=here_v)
            tl.store(to_k + nope + j[None, :], tl.broadcast_to(x[None, :], GROUP, HALF).to(kind), mask=here)
            tl.store(to_k + nope + HALF + j[None, :], tl.broadcast_to(y[None, :], GROUP, HALF).to(kind), mask=here)
    if BACK:
        tl.store(k_rope + first, (x * c + y * s).to(kind))
        tl.store(k_rope + second, (y * c - x * s).to(kind))


# Launches -------------------------------------------------------------------------------------------------------------


def _tiles(name: str, sizes: dict[str, int], tokens: int) -> dict[str, int]:
    changed = WIDE if max(sizes.values()) > 64 else FEW if tokens <= FEW_TOKENS else {}
    return TILES[name] | changed.get(name, {})


def _groups(tiles: dict[str, int], tokens: int, heads: int) -> tuple[tuple[int, int], int]:
    """(grid, heads of a program) for about the wanted number of programs, which it takes from tiles."""
    blocks = triton.cdiv(tokens, tiles["BM"])
    group = max(1, heads * blocks // tiles.pop("programs"))
    return (triton.cdiv(heads, group), blocks), group


def _spans(tiles: dict[str, int], tokens: int, side: int) -> tuple[int, int]:
    """(partial sums, tokens in each), so that `side` programs for each make about the wanted number; takes it from tiles."""
    blocks, programs = triton.cdiv(tokens, tiles["BM"]), tiles.pop("programs")
    span = triton.cdiv(blocks, max(1, min(blocks, programs // side))) * tiles["BM"]
    return triton.cdiv(tokens, span), span


def _rope_arguments(rope: Rope, x: Tensor) -> tuple[tuple, dict]:
    """Positional (cos, sin, positions) and constants (INTERLEAVED, PACKED) for rows [s, b, ...] or [t, ...] of x."""
    assert rope.cos.dtype == rope.sin.dtype == torch.float32 and rope.cos.is_contiguous() and rope.sin.is_contiguous()
    packed = rope.positions is not None
    assert packed == (x.dim() == 2), "packed rows are [t, width], others [s, b, width]"
    assert packed or len(x) <= len(rope.cos), f"{len(x)} positions, a table of {len(rope.cos)}"
    positions = rope.positions if packed else rope.cos
    return (rope.cos, rope.sin, positions), dict(INTERLEAVED=rope.interleaved, PACKED=packed)


def _row_stride(x: Tensor) -> int:
    """Stride between the rows of x, all leading axes taken as one."""
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(0) == x.size(1) * x.stride(1)), "rows are not evenly spaced"
    return x.stride(-2)


def _batch(x: Tensor) -> int:
    return x.size(1) if x.dim() == 3 else 1


def _added(partial: Tensor, like: Tensor) -> Tensor:
    """Sum over the first axis, in the type of `like`."""
    out, tiles = like.new_empty(partial.shape[1:]), TILES["total"]
    _total[(triton.cdiv(out.numel(), tiles["BN"]),)](partial, out, out.numel(), len(partial), **tiles)
    return out


class _Ingress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, w_q, w_kv, gamma_q, gamma_kv, rope, eps, latent_eps):
        x, w_q, w_kv = x.contiguous(), w_q.contiguous(), w_kv.contiguous()
        width, tokens, norm = x.size(-1), x.numel() // x.size(-1), gamma_q is not None
        sizes = dict(RQ=w_q.size(0), RKV=w_kv.size(0) - rope, ROPE=rope, NORM=norm)
        folded = torch.cat((w_q, w_kv)) * gamma
        latents = x.new_empty(*x.shape[:-1], len(folded))
        raw, stats = torch.empty_like(latents), x.new_empty(3, tokens, dtype=torch.float32)
        tiles = _tiles("ingress", sizes, tokens)
        _ingress[(triton.cdiv(tokens, tiles["BM"]),)](
            x, gamma, w_q, w_kv, gamma_q, gamma_kv, latents, raw, stats, tokens, width, eps, latent_eps,
            EVEN=width % tiles["BK"] == 0, **sizes, **tiles,
        )  # fmt: skip
        ctx.save_for_backward(x, gamma, w_q, w_kv, gamma_q, gamma_kv, folded, raw, stats)
        ctx.sizes = sizes
        return latents

    @staticmethod
    def backward(ctx, grad):
        x, gamma, w_q, w_kv, gamma_q, gamma_kv, folded, raw, stats = ctx.saved_tensors
        sizes = {name: size for name, size in ctx.sizes.items() if name != "NORM"}
        width, tokens, rq, rkv = x.size(-1), stats.size(1), sizes["RQ"], sizes["RKV"]

        tiles = TILES["latent_norm_back"]
        programs = triton.cdiv(tokens, tiles["BM"])
        scaled, pull = torch.empty_like(raw), stats.new_empty(tokens)
        d_gammas = stats.new_empty(programs, rq + rkv)
        _latent_norm_back[(programs,)](
            grad.contiguous(),
            raw,
            stats,
            gamma_q,
            gamma_kv,
            scaled,
            pull,
            d_gammas,
            tokens,
            width,
            **ctx.sizes,
            **tiles,
        )

        tiles = _tiles("ingress_input", sizes, tokens)
        blocks, columns = triton.cdiv(tokens, tiles["BM"]), triton.cdiv(width, tiles["BN"])
        span = triton.cdiv(columns, max(1, tiles.pop("programs") // blocks)) * tiles["BN"]
        dx = torch.empty_like(x)
        _ingress_input[(triton.cdiv(width, span), blocks)](
            x, folded, scaled, pull, dx, tokens, width, span, EVEN=width % tiles["BN"] == 0, **sizes, **tiles
        )

        tiles = TILES["ingress_weights"]
        G = _product(scaled.view(tokens, -1), x.view(tokens, -1))
        d_gamma, d_q, d_kv = torch.empty_like(gamma), torch.empty_like(w_q), torch.empty_like(w_kv)
        _ingress_weights[(triton.cdiv(width, tiles["BN"]),)](
            G, gamma, w_q, w_kv, d_q, d_kv, d_gamma, width, **sizes, **tiles
        )
        norms = (None, None) if gamma_q is None else d_gammas.sum(0).to(gamma_q.dtype).split((rq, rkv))
        return dx, d_gamma, d_q, d_kv, *norms, None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b in fp32, a sum over tokens; a plain product, so it is the library's."""
    if a.is_cuda:
        return torch.mm(a.t(), b, out_dtype=torch.float32)
    return torch.mm(a.t().float(), b.float())  # in the interpreter


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent, weight, rope, heads):
        weight, (tables, constants) = weight.contiguous(), _rope_arguments(rope, latent)
        tokens, batch, stride = latent.numel() // latent.size(-1), _batch(latent), _row_stride(latent)
        constants |= dict(RANK=weight.size(1), NOPE=weight.size(0) // heads - rope.width, ROPE=rope.width)
        q = latent.new_empty(*latent.shape[:-1], heads, weight.size(0) // heads)
        tiles = _tiles("queries", constants, tokens)
        grid, group = _groups(tiles, tokens, heads)
        _queries[grid](latent, stride, weight, *tables, q, tokens, batch, heads, group, **constants, **tiles)
        ctx.save_for_backward(latent, weight, *tables)
        ctx.constants, ctx.heads = constants, heads
        return q

    @staticmethod
    def backward(ctx, grad):
        (latent, weight, *tables), constants, heads = ctx.saved_tensors, ctx.constants, ctx.heads
        grad, tokens, batch = grad.contiguous(), latent.numel() // latent.size(-1), _batch(latent)

        tiles = _tiles("queries_latent", constants, tokens)
        d_latent = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
        _queries_latent[(triton.cdiv(tokens, tiles["BM"]),)](
            grad, weight, *tables, d_latent, tokens, batch, heads, **constants, **tiles
        )

        tiles = _tiles("queries_weight", constants, tokens)
        groups = triton.cdiv(heads, tiles["GROUP"])
        splits, span = _spans(tiles, tokens, groups)
        partial = weight.new_empty(splits, *weight.shape, dtype=torch.float32)
        _queries_weight[(groups, splits)](
            grad, latent, _row_stride(latent), *tables, partial, tokens, batch, heads, span, **constants, **tiles
        )
        return d_latent, _added(partial, weight), None, None


class _KeysValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent, k_rope, weight, rope, heads, value):
        weight, (tables, constants) = weight.contiguous(), _rope_arguments(rope, latent)
        tokens, batch = latent.numel() // latent.size(-1), _batch(latent)
        nope = weight.size(0) // heads - value
        constants |= dict(RANK=weight.size(1), NOPE=nope, ROPE=rope.width, VALUE=value)
        k = latent.new_empty(*latent.shape[:-1], heads, nope + rope.width)
        v = latent.new_empty(*latent.shape[:-1], heads, value)
        tiles = _tiles("keys_values", constants, tokens)
        grid, group = _groups(tiles, tokens, heads)
        _keys_values[grid](
            latent, _row_stride(latent), k_rope, _row_stride(k_rope), weight, *tables, k, v, tokens, batch, heads,
            group, **constants, **tiles,
        )  # fmt: skip
        ctx.save_for_backward(latent, weight, *tables)
        ctx.constants, ctx.heads = constants, heads
        return k, v

    @staticmethod
    def backward(ctx, d_key, d_value):
        (latent, weight, *tables), constants, heads = ctx.saved_tensors, ctx.constants, ctx.heads
        d_key, d_value = d_key.contiguous(), d_value.contiguous()
        tokens, batch = latent.numel() // latent.size(-1), _batch(latent)

        tiles = _tiles("keys_values_latent", constants, tokens)
        d_latent = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
        d_rope = latent.new_empty(*latent.shape[:-1], constants["ROPE"])
        _keys_values_latent[(triton.cdiv(tokens, tiles["BM"]),)](
            d_key, d_value, weight, *tables, d_latent, d_rope, tokens, batch, heads, **constants, **tiles
        )

        tiles = _tiles("keys_values_weight", constants, tokens)
        groups = triton.cdiv(heads, tiles["GROUP"])
        splits, span = _spans(tiles, tokens, groups)
        partial = weight.new_empty(splits, *weight.shape, dtype=torch.float32)
        sizes = {name: constants[name] for name in ("RANK", "NOPE", "ROPE", "VALUE")}
        _keys_values_weight[(groups, splits)](
            d_key, d_value, latent, _row_stride(latent), partial, tokens, heads, span, **sizes, **tiles
        )
        return d_latent, d_rope, _added(partial, weight), None, None, None


class _RotateQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, rope, first):
        # Not marked dirty: autograd would refuse a view or copy it thrice. But it learns of it, and refuses who kept q for later.
        ctx.save_for_backward(rope.cos, rope.sin, rope.positions)
        ctx.interleaved, ctx.first = rope.interleaved, first
        torch.autograd.graph.increment_version(q)
        return _turn(q, rope, first, back=False)

    @staticmethod
    def backward(ctx, grad):
        cos, sin, positions = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)  # a sum hands the same one to all that it added
        return _turn(grad, Rope(cos, sin, positions, ctx.interleaved), ctx.first, back=True), None, None


def _turn(q: Tensor, rope: Rope, first: int, back: bool) -> Tensor:
    (cos, sin, positions), constants = _rope_arguments(rope, q[..., 0, :])
    heads, width = q.shape[-2:]
    tokens, batch = q.numel() // (heads * width), _batch(q[..., 0, :])
    constants |= dict(ROPE=rope.width, BACK=back)
    tiles = TILES["rotate"]
    grid = tokens, triton.cdiv(heads, tiles["GROUP"])
    _rotate[grid](q, cos, sin, positions, batch, heads, width, first, **constants, **tiles)
    return q


class _SplitKeysValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, k_rope, rope, value):
        kv = kv.contiguous()
        nope = kv.size(-1) - value
        k, v = kv.new_empty(*kv.shape[:-1], nope + rope.width), kv.new_empty(*kv.shape[:-1], value)
        _cut(kv, k_rope, k, v, rope, back=False)
        ctx.save_for_backward(rope.cos, rope.sin, rope.positions)
        ctx.interleaved = rope.interleaved
        return k, v

    @staticmethod
    def backward(ctx, d_key, d_value):
        cos, sin, positions = ctx.saved_tensors
        rope = Rope(cos, sin, positions, ctx.interleaved)
        nope, value = d_key.size(-1) - rope.width, d_value.size(-1)
        d_kv = d_key.new_empty(*d_key.shape[:-1], nope + value)
        d_rope = d_key.new_empty(*d_key.shape[:-2], rope.width)
        _cut(d_kv, d_rope, d_key.contiguous(), d_value.contiguous(), rope, back=True)
        return d_kv, d_rope, None, None


def _cut(kv: Tensor, k_rope: Tensor, k: Tensor, v: Tensor, rope: Rope, back: bool) -> None:
    tables, constants = _rope_arguments(rope, k_rope)
    heads, value = v.shape[-2:]
    nope = k.size(-1) - rope.width
    constants |= dict(ROPE=rope.width, BACK=back)
    constants |= dict(NOPE=triton.next_power_of_2(nope), VALUE=triton.next_power_of_2(value))
    _split[(k_rope.numel() // k_rope.size(-1),)](
        kv,
        k_rope,
        _row_stride(k_rope),
        k,
        v,
        *tables,
        _batch(k_rope),
        heads,
        nope,
        value,
        **constants,
        **TILES["split"],
    )


# What the layers call -------------------------------------------------------------------------------------------------


def ingress(
    x: Tensor,
    gamma: Tensor,
    w_q_down: Tensor,
    w_kv_down: Tensor,
    gamma_q: Tensor | None,
    gamma_kv: Tensor | None,
    rope: int,
    eps: float,
    latent_eps: float,
) -> Tensor:
    """naive.ingress. Sizes as block.low_rank has them; any h. Keeps x, the latents before their norms, and 12 T bytes."""
    return _Ingress.apply(x, gamma, w_q_down, w_kv_down, gamma_q, gamma_kv, rope, eps, latent_eps)


def queries(latent: Tensor, weight: Tensor, rope: Rope, heads: int) -> Tensor:
    """naive.queries. The latent may be a slice of wider rows. Keeps the latent alone."""
    return _Queries.apply(latent, weight, rope, heads)


def keys_values(
    latent: Tensor, k_rope: Tensor, weight: Tensor, rope: Rope, heads: int, value: int
) -> tuple[Tensor, Tensor]:
    """naive.keys_values. Latent and k_rope may be slices of wider rows. Keeps the latent alone."""
    return _KeysValues.apply(latent, k_rope, weight, rope, heads, value)


def absorbed(latents: Tensor, weight: Tensor, rope: Rope, heads: int, rq: int) -> tuple[Tensor, Tensor]:
    """naive.absorbed: the same kernel with other weights, and one small rotation."""
    q_latent, key = latents.split((rq, latents.size(-1) - rq), -1)
    key = rotate_queries(key.clone(memory_format=torch.contiguous_format).unsqueeze(-2), rope)
    return queries(q_latent, weight, rope, heads), key


def rotate_queries(q: Tensor, rope: Rope, front: bool = False) -> Tensor:
    """q [..., n, dq + dr], contiguous, with its last dr channels turned **in place**; its gradient is a copy of the given one.
    front: the first ones instead."""
    return _RotateQueries.apply(q, rope, 0 if front else q.size(-1) - rope.width)


def split_keys_values(kv: Tensor, k_rope: Tensor, rope: Rope, value: int) -> tuple[Tensor, Tensor]:
    """naive.keys_values behind its product: kv [..., n, dq + dv]; any widths and any number of heads."""
    return _SplitKeysValues.apply(kv, k_rope, rope, value)
