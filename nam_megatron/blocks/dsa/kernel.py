"""DSA in Triton, for Hopper: the functions of naive.py without a tensor of [heads, s, s].

Every result is deterministic: no atomics. Nothing waits for the host and no shape depends on data, so all of it can be
captured in a CUDA graph. README.md derives the algorithms and their bytes and FLOPs.

Shapes: s queries, the last ones of t positions with keys (of whole sequences s = t); b samples, n heads of the attention, h of the
indexer (d channels each); r latent and p RoPE channels of the absorbed MLA; K = top-k. In kernels: I (queries) and J (keys) are tiles
along s and t, which are S and T there; query i stands at position T - S + i; offsets of [s, b, ...] tensors are those of contiguous ones.
Exponentials are base 2: scores are scaled by log2(e) and every `lse` is a base-2 logarithm.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.dsa.block import TILE

# Tile sizes and launch options of each kernel at NAM56R's shapes on H200; benchmarks/dsa.py --sweep measures others.
TILES: dict[str, dict[str, int]] = {
    "scores": dict(I=64, J=128, num_warps=4, num_stages=3),
    "select": dict(per_warp=1024),
    "transpose": dict(I=64, rows=512, num_warps=4),
    "attend": dict(J=64, num_warps=4, num_stages=2),
    "attend_back": dict(J=64, num_warps=4, num_stages=2),
    "collect": dict(E=32, num_warps=4, num_stages=3),
    "lse": dict(M=128, J=64, num_warps=4, num_stages=4),
    "target": dict(I=64, J=128, num_warps=4, num_stages=2),
    "index_dq": dict(I=64, J=64, num_warps=4, num_stages=3),
    "index_dk": dict(J=64, I=64, num_warps=4, num_stages=3, rows=1024),
}
LOG2E = math.log2(math.e)
# Rows of [b, s, t] tensors are padded to a multiple of this and written up to one: with I and J that divide it, tiles load
# what they want without a causal mask, which would make every load two bytes wide. It divides the position of the first query.
ALIGN = tl.constexpr(TILE)


@dataclass(frozen=True)
class Selection:
    """Which keys each query attends to, and the same from the keys' side.

    indices: int32 [b, s, K], ascending; query i has min(t - s + i + 1, K), then -1.
    starts, pairs: int32 [b, t + 1] and [b, s K]; key j was selected at pairs[starts[j] : starts[j + 1]], each
      query * K + place in its indices, ascending.
    """

    indices: Tensor
    starts: Tensor
    pairs: Tensor

    def of(self, rows: slice) -> Tensor:
        """The keys of some queries: bool [b, rows, t]."""
        chosen = self.indices[:, rows].long()
        b, t = len(self.starts), self.starts.size(1) - 1
        selected = torch.zeros(b, chosen.size(1), t + 1, dtype=torch.bool, device=chosen.device)
        return selected.scatter_(-1, chosen.where(chosen >= 0, t), True)[..., :t]


# Selecting -----------------------------------------------------------------------------------------------------------


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """sum over h of w relu(q . k): fp32 [b, s, t], of padded rows; what lies after the query means nothing.

    q [s, b, h, d], k [t, b, d], w [s, b, h]; ALIGN divides t - s.
    """
    q, k, w = q.contiguous(), k.contiguous(), w.contiguous()
    (s, b, h, d), t = q.shape, len(k)
    assert (t - s) % ALIGN.value == 0, (s, t)
    scores = q.new_empty(b, s, triton.cdiv(t, ALIGN.value) * ALIGN.value, dtype=torch.float32)[..., :t]
    tile = TILES["scores"]
    grid = (triton.cdiv(t, tile["J"]), triton.cdiv(s, tile["I"]), b)
    _scores[grid](q, k, w, scores, s, t, scores.stride(1), H=h, D=d, **tile)
    return scores


@triton.jit
def _scores(q, k, w, scores, S, T, pitch, H: tl.constexpr, D: tl.constexpr, I: tl.constexpr, J: tl.constexpr):
    b, B = tl.program_id(2), tl.num_programs(2)
    first_i, first_j = tl.program_id(1) * I, tl.program_id(0) * J
    if first_j > T - S + first_i + I - 1:
        return
    i, j, c = first_i + tl.arange(0, I), first_j + tl.arange(0, J), tl.arange(0, D)
    rows, columns = i < S, j < T
    keys = tl.load(k + (j * B + b)[:, None] * D + c[None, :], mask=columns[:, None], other=0.0)
    row = (i * B + b).to(tl.int64) * H
    total = tl.zeros([I, J], tl.float32)
    for head in range(H):
        queries = tl.load(q + (row + head)[:, None] * D + c[None, :], mask=rows[:, None], other=0.0)
        weight = tl.load(w + row + head, mask=rows, other=0.0).to(tl.float32)
        dots = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        total += tl.maximum(dots, 0.0) * weight[:, None]
    at = scores + (b * S + i).to(tl.int64)[:, None] * pitch + j[None, :]
    tl.store(at, total, mask=rows[:, None] & (j < pitch)[None, :])


def select(scores: Tensor, top_k: int) -> Selection:
    """The `top_k` largest scores of each query, earlier keys first among equals. scores: of index_scores."""
    (b, s, t), pitch = scores.shape, scores.stride(1)
    words = triton.cdiv(t, 32)
    indices = scores.new_empty(b, s, top_k, dtype=torch.int32)
    mask = scores.new_empty(b, s, words, dtype=torch.int32)
    before = scores.new_empty(b, s, words, dtype=torch.int16)
    width = max(32, triton.next_power_of_2(t))
    places = triton.next_power_of_2(top_k)
    warps = min(16, max(4, width // TILES["select"]["per_warp"]))
    _select[(s, b)](
        scores, indices, mask, before, s, t, pitch, words, K=top_k, places=places, width=width, num_warps=warps
    )  # fmt: skip
    # The same from the keys' side: how many of each part of the queries took a key, where these start, and which they are.
    tile = TILES["transpose"]
    parts = triton.cdiv(s, tile["rows"])
    counts = scores.new_empty(b, t, parts, dtype=torch.int32)
    pairs = scores.new_empty(b, s * top_k, dtype=torch.int32)
    _transpose[(words, parts, b)](mask, before, counts, counts, s, t, words, K=top_k, fill=False, **tile)
    starts = torch.nn.functional.pad(counts.flatten(1).cumsum(1, dtype=torch.int32), (1, 0))
    _transpose[(words, parts, b)](mask, before, starts, pairs, s, t, words, K=top_k, fill=True, **tile)
    return Selection(indices, starts[:, ::parts].contiguous(), pairs)


@triton.jit
def _select(
    scores, indices, mask, before, S, T, pitch, words, K: tl.constexpr, places: tl.constexpr, width: tl.constexpr
):
    """One query a program: the K-th largest score bit by bit, then places by prefix sums."""
    i, b = tl.program_id(0), tl.program_id(1)
    row, at_i = (b * S + i).to(tl.int64), T - S + i
    j = tl.arange(0, width)
    bits = tl.load(scores + row * pitch + j, mask=j < (at_i // ALIGN + 1) * ALIGN, other=0.0).to(
        tl.uint32, bitcast=True
    )
    # An unsigned integer that orders as the float does; 0, below every float, where there is no key.
    order = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    order = tl.where(j <= at_i, order, 0)
    count = tl.minimum(at_i + 1, K)
    least = tl.full([], 0, tl.uint32)  # ends as the count-th largest
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        higher = least | bit
        least = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= count, higher, least)
        bit = bit >> 1
    above, equal = order > least, (order == least).to(tl.int32)
    room = count - tl.sum(above.to(tl.int32), 0)
    chosen = (above | ((equal == 1) & (tl.cumsum(equal, 0) <= room))).to(tl.int32)
    tl.store(indices + row * K + tl.cumsum(chosen, 0) - 1, j, mask=chosen == 1)
    tail = tl.arange(0, places)
    tl.store(indices + row * K + tail, -1, mask=(tail >= count) & (tail < K))
    by_word = tl.reshape(chosen, [width // 32, 32])
    word = tl.sum(by_word << tl.arange(0, 32)[None, :], 1)
    in_word = tl.sum(by_word, 1)
    at = tl.arange(0, width // 32)
    tl.store(mask + row * words + at, word, mask=at < words)
    tl.store(before + row * words + at, (tl.cumsum(in_word, 0) - in_word).to(tl.int16), mask=at < words)


@triton.jit
def _transpose(
    mask, before, starts, out, S, T, words,
    K: tl.constexpr, fill: tl.constexpr, I: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """32 keys (a word of the mask) and a part of the queries a program: how many of these took each key, or which."""
    word, part, parts, b = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    lane = tl.arange(0, 32)
    j = word * 32 + lane
    if fill:
        start = tl.load(starts + b * (T * parts + 1) + j * parts + part, mask=j < T, other=0)
        out += b.to(tl.int64) * S * K
    seen = tl.zeros([32], tl.int32)
    earliest = tl.maximum(word * 32 - (T - S), 0) // I * I  # of the queries that see one of these keys
    for first in range(tl.maximum(part * rows, earliest), tl.minimum(part * rows + rows, S), I):
        i = first + tl.arange(0, I)
        at = (b * S + i) * words + word
        bits = (tl.load(mask + at, mask=i < S, other=0)[:, None] >> lane[None, :]) & 1
        if fill:
            place = tl.load(before + at, mask=i < S, other=0).to(tl.int32)[:, None] + tl.cumsum(bits, 1) - bits
            to = (start + seen)[None, :] + tl.cumsum(bits, 0) - bits
            tl.store(out + to, i[:, None] * K + place, mask=bits == 1)
        seen += tl.sum(bits, 0)
    if not fill:
        tl.store(out + (b * T + j) * parts + part, seen, mask=j < T)


# Attending -----------------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, selection: Selection, scale: float, rank: int) -> Tensor:
    """softmax(scale query . key) over the selected keys times the latent part of the keys: [s, b, n, r]. Differentiable.

    query [s, b, n, r + p]; key [t, b, 1, r + p], one for all heads, its first `rank` = r channels the value too.
    """
    out, _ = _Attend.apply(query, key, selection.indices, selection.starts, selection.pairs, scale, rank)
    return out


class _Attend(torch.autograd.Function):
    """Gathers the keys of each query: its heads share them, so they fill a tensor-core tile."""

    @staticmethod
    def forward(ctx, query, key, indices, starts, pairs, scale, rank):
        query, key = query.contiguous(), key.contiguous()
        (s, b, n, width), t = query.shape, len(key)
        out = query.new_empty(s, b, n, rank)
        lse = query.new_empty(s, b, n, dtype=torch.float32)
        sizes = dict(N=n, R=rank, P=width - rank, K=indices.size(2), heads=max(16, triton.next_power_of_2(n)))
        _attend[(s, b)](query, key, indices, out, lse, s, t, scale * LOG2E, **sizes, **TILES["attend"])
        ctx.save_for_backward(query, key, indices, starts, pairs, lse)
        ctx.scale, ctx.sizes = scale, sizes
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        query, key, indices, starts, pairs, lse = ctx.saved_tensors
        dout = dout.contiguous()
        (s, b, _, width), t = query.shape, len(key)
        dquery, dkey = torch.empty_like(query), torch.empty_like(key)
        # What each query adds to each of its keys, one sample at a time: memory stays [s K, r + p]. Summing the rows of a
        # key in a fixed order costs less than atomics would and always gives the same result.
        parts = key.new_empty(s * indices.size(2), width)
        for sample in range(b):
            _attend_back[(s,)](
                query, key, indices, lse, dout, dquery, parts, s, t, b, sample, ctx.scale, ctx.scale * LOG2E,
                **ctx.sizes, **TILES["attend_back"],
            )  # fmt: skip
            _collect[(t,)](
                parts, starts, pairs, dkey, s, t, b, sample, K=indices.size(2), W=width,
                width=triton.next_power_of_2(width), **TILES["collect"],
            )  # fmt: skip
        return dquery, dkey, None, None, None, None, None


@triton.jit
def _attend(
    query, key, indices, out, lse, S, T, scale2,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, heads: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """One query a program, its heads the rows of every tile."""
    i, b, B = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    n, r, p = tl.arange(0, heads), tl.arange(0, R), tl.arange(0, P)
    real = n < N
    row = (i * B + b).to(tl.int64) * N + n
    own = query + row[:, None] * (R + P)
    q_latent = tl.load(own + r[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(own + R + p[None, :], mask=real[:, None], other=0.0)
    highest = tl.full([heads], -float("inf"), tl.float32)
    total = tl.zeros([heads], tl.float32)
    value = tl.zeros([heads, R], tl.float32)
    count = tl.minimum(T - S + i + 1, K)
    chosen = indices + (b * S + i).to(tl.int64) * K
    for first in range(0, count, J):
        place = first + tl.arange(0, J)
        j = tl.load(chosen + place, mask=place < count, other=0)
        at = key + (j * B + b)[:, None] * (R + P)
        k_latent = tl.load(at + r[None, :])
        k_rope = tl.load(at + R + p[None, :])
        dots = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        dots = tl.dot(q_rope, tl.trans(k_rope), dots, input_precision="ieee")
        dots = tl.where((place < count)[None, :], dots * scale2, -float("inf"))
        higher = tl.maximum(highest, tl.max(dots, 1))
        weight = tl.exp2(dots - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        value = tl.dot(weight.to(k_latent.dtype), k_latent, value * fade[:, None], input_precision="ieee")
        highest = higher
    value = value / total[:, None]
    tl.store(out + row[:, None] * R + r[None, :], value.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + row, highest + tl.log2(total), mask=real)


@triton.jit
def _weights(key, chosen, place, inside, q_latent, q_rope, d_out, lse, scale2, B, b, R: tl.constexpr, P: tl.constexpr):
    """A tile of keys, and [keys, heads]: their weights and the gradients of these."""
    j = tl.load(chosen + place, mask=inside, other=0)
    at = key + (j * B + b)[:, None] * (R + P)
    k_latent = tl.load(at + tl.arange(0, R)[None, :])
    k_rope = tl.load(at + R + tl.arange(0, P)[None, :])
    dots = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
    dots = tl.dot(k_rope, tl.trans(q_rope), dots, input_precision="ieee")
    weight = tl.where(inside[:, None], tl.exp2(dots * scale2 - lse[None, :]), 0.0)
    return k_latent, k_rope, weight, tl.dot(k_latent, tl.trans(d_out), input_precision="ieee")


@triton.jit(do_not_specialize=["b"])
def _attend_back(
    query, key, indices, lse, dout, dquery, parts, S, T, B, b, scale, scale2,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, heads: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """One query a program. Tiles are [keys, heads]: P and dP leave the tensor cores as the operands that dK and dV want."""
    i = tl.program_id(0)
    n, r, p = tl.arange(0, heads), tl.arange(0, R), tl.arange(0, P)
    real = n < N
    row = (i * B + b).to(tl.int64) * N + n
    own = query + row[:, None] * (R + P)
    q_latent = tl.load(own + r[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(own + R + p[None, :], mask=real[:, None], other=0.0)
    d_out = tl.load(dout + row[:, None] * R + r[None, :], mask=real[:, None], other=0.0)
    lse_ = tl.load(lse + row, mask=real, other=0.0)
    count = tl.minimum(T - S + i + 1, K)
    chosen = indices + (b * S + i).to(tl.int64) * K
    # The sum of weights times their gradients is also out . dout, but out is rounded: where one key has nearly all the weight, what is
    # left of its gradient less that sum would be the rounding.
    delta = tl.zeros([heads], tl.float32)
    for first in range(0, count, J):
        place = first + tl.arange(0, J)
        _, _, weight, d_weight = _weights(
            key, chosen, place, place < count, q_latent, q_rope, d_out, lse_, scale2, B, b, R, P
        )
        delta += tl.sum(weight * d_weight, 0)
    dq_latent = tl.zeros([R, heads], tl.float32)
    dq_rope = tl.zeros([P, heads], tl.float32)
    for first in range(0, count, J):
        place = first + tl.arange(0, J)
        inside = place < count
        k_latent, k_rope, weight, d_weight = _weights(
            key, chosen, place, inside, q_latent, q_rope, d_out, lse_, scale2, B, b, R, P
        )
        d_dots = (weight * (d_weight - delta[None, :]) * scale).to(k_latent.dtype)
        dk_latent = tl.dot(weight.to(k_latent.dtype), d_out, input_precision="ieee")
        dk_latent = tl.dot(d_dots, q_latent, dk_latent, input_precision="ieee")
        dk_rope = tl.dot(d_dots, q_rope, input_precision="ieee")
        to = parts + (i.to(tl.int64) * K + place)[:, None] * (R + P)
        tl.store(to + r[None, :], dk_latent.to(parts.dtype.element_ty), mask=inside[:, None])
        tl.store(to + R + p[None, :], dk_rope.to(parts.dtype.element_ty), mask=inside[:, None])
        dq_latent = tl.dot(tl.trans(k_latent), d_dots, dq_latent, input_precision="ieee")
        dq_rope = tl.dot(tl.trans(k_rope), d_dots, dq_rope, input_precision="ieee")
    own = dquery + row[:, None] * (R + P)
    tl.store(own + r[None, :], tl.trans(dq_latent).to(dquery.dtype.element_ty), mask=real[:, None])
    tl.store(own + R + p[None, :], tl.trans(dq_rope).to(dquery.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["b"])
def _collect(
    parts, starts, pairs, dkey, S, T, B, b, K: tl.constexpr, W: tl.constexpr, width: tl.constexpr, E: tl.constexpr
):
    """One key a program: the sum of its rows of `parts`."""
    j = tl.program_id(0)
    start, end = tl.load(starts + b * (T + 1) + j), tl.load(starts + b * (T + 1) + j + 1)
    pairs += b.to(tl.int64) * S * K
    c = tl.arange(0, width)
    total = tl.zeros([E, width], tl.float32)
    for first in range(start, end, E):
        place = first + tl.arange(0, E)
        pair = tl.load(pairs + place, mask=place < end, other=0).to(tl.int64)
        here = (place < end)[:, None] & (c < W)[None, :]
        total += tl.load(parts + pair[:, None] * W + c[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(dkey + (j * B + b) * W + c, tl.sum(total, 0).to(dkey.dtype.element_ty), mask=c < W)


def values(latent: Tensor, weight: Tensor) -> Tensor:
    """Each head's value from its latent output: [s, b, n d] of latent [s, b, n, r] and weight [n, d, r]. Differentiable."""
    return _Values.apply(latent, weight)


class _Values(torch.autograd.Function):
    """Batched products over heads that read and write [s, b, n, ...] as it lies; einsum would copy it to and fro."""

    @staticmethod
    def forward(ctx, latent, weight):
        ctx.save_for_backward(latent, weight)
        out = latent.new_empty(*latent.shape[:3], weight.size(1))
        torch.bmm(_by_head(latent), weight.transpose(1, 2), out=_by_head(out))
        return out.flatten(2)

    @staticmethod
    def backward(ctx, grad):
        latent, weight = ctx.saved_tensors
        grad = _by_head(grad.contiguous().view(*latent.shape[:3], -1))
        d_latent = torch.empty_like(latent)
        torch.bmm(grad, weight, out=_by_head(d_latent))
        return d_latent, torch.bmm(grad.transpose(1, 2), _by_head(latent))


def _by_head(x: Tensor) -> Tensor:
    """[n, s b, width], a view of contiguous [s, b, n, width]."""
    return x.flatten(0, 1).transpose(0, 1)


# The indexer's loss --------------------------------------------------------------------------------------------------


def indexer_kl(
    q: Tensor, k: Tensor, w: Tensor, scores: Tensor, query: Tensor, key: Tensor, scale: float, group=None, factor=1.0
) -> Tensor:
    """`factor` times the sum over all queries of KL(attention || indexer), each over all keys up to the query; a fp32 scalar.

    The attention's distribution is that over all keys, averaged over the heads of all ranks of `group`; it is a constant.
    Differentiable in q, k and w, of which `scores` are index_scores. Their gradients are rounded once if what the backward pass
    multiplies them by is a power of two, so all else belongs into `factor`.
    """
    return _IndexerKl.apply(q, k, w, scores, query.detach(), key.detach(), scale, group, factor)


class _IndexerKl(torch.autograd.Function):
    """The loss is a scalar and its gradients a multiple of what the forward pass has at hand, so that computes them."""

    @staticmethod
    def forward(ctx, q, k, w, scores, query, key, scale, group, factor):
        q, k, w, query, key = (t.contiguous() for t in (q, k, w, query, key))
        s, b = query.shape[:2]
        t, pitch = scores.size(2), scores.stride(1)
        target = _target(query, key, scale, pitch)
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(target, group=group)
        rows = scores.new_empty(b, s)
        tile = triton.next_power_of_2(t)
        warps = min(16, max(4, tile // 1024))
        _kl[(s, b)](scores, target, rows, s, t, pitch, factor, width=tile, num_warps=warps)
        ctx.save_for_backward(*_index_back(q, k, w, dscores=target))
        return rows.sum()

    @staticmethod
    def backward(ctx, grad):
        dq, dk, dw = ctx.saved_tensors
        return dq * grad, dk * grad, dw * grad, None, None, None, None, None, None


def _target(query: Tensor, key: Tensor, scale: float, pitch: int) -> Tensor:
    """Sum over heads of softmax(scale query . key) over all keys up to the query, as index_scores lie: fp32 [b, s, pitch]."""
    (s, b, n, width), t = query.shape, len(key)
    lse, sizes = _normalisers(query, key, scale), _halves(n, width)
    target = query.new_empty(b, s, pitch, dtype=torch.float32)
    tile = TILES["target"]
    grid = (triton.cdiv(t, tile["J"]), triton.cdiv(s, tile["I"]), b)
    _sum_of_softmax[grid](query, key, lse, target, s, t, pitch, scale * LOG2E, **sizes, **tile)
    return target


def _normalisers(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """log2 of the sum over all keys up to the query of exp(scale query . key): fp32 [s, b, n]."""
    s, b, n, width = query.shape
    lse = query.new_empty(s, b, n, dtype=torch.float32)
    tile = TILES["lse"]
    grid = (triton.cdiv(s * n, tile["M"]), b)
    _lse[grid](query, key, lse, s, len(key), scale * LOG2E, **_halves(n, width), **tile)
    return lse


def _halves(n: int, width: int) -> dict[str, int]:
    """Any split of the channels into two powers of two serves the dense scores."""
    rope = width // 2 if width & (width - 1) == 0 else width & -width
    return dict(N=n, R=width - rope, P=rope)


@triton.jit
def _lse(
    query, key, lse, S, T, scale2,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """log2 of the sum over keys of 2^score. Rows are (query, head), M of them a program: few queries, all causal alike."""
    b, B = tl.program_id(1), tl.num_programs(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest first
    m, r, p = first_row + tl.arange(0, M), tl.arange(0, R), tl.arange(0, P)
    i = m // N
    at_i, before = T - S + i, T - S
    row = (i * B + b).to(tl.int64) * N + m % N
    at = query + row[:, None] * (R + P)
    q_latent = tl.load(at + r[None, :], mask=(i < S)[:, None], other=0.0)
    q_rope = tl.load(at + R + p[None, :], mask=(i < S)[:, None], other=0.0)
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    whole = (before + first_row // N + 1) // J * J  # keys before this are visible to every row
    for first in range(0, whole, J):
        j = first + tl.arange(0, J)
        dots = _dots(q_latent, q_rope, key, j, j < T, B, b, R, P) * scale2
        higher = tl.maximum(highest, tl.max(dots, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(dots - higher[:, None]), 1)
        highest = higher
    for first in range(whole, tl.minimum(before + (first_row + M - 1) // N + 1, T), J):
        j = first + tl.arange(0, J)
        dots = _dots(q_latent, q_rope, key, j, j < T, B, b, R, P) * scale2
        dots = tl.where(j[None, :] <= at_i[:, None], dots, -float("inf"))
        higher = tl.maximum(highest, tl.max(dots, 1))
        # A tile may lie wholly after a row's query; only for rows that have seen a key before, as every row sees key 0.
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(dots - higher[:, None]), 1)
        highest = higher
    tl.store(lse + row, highest + tl.log2(total), mask=i < S)


@triton.jit
def _dots(q_latent, q_rope, key, j, visible, B, b, R: tl.constexpr, P: tl.constexpr):
    """[rows, keys]: products with the keys at positions j."""
    at = key + (j * B + b)[:, None] * (R + P)
    k_latent = tl.load(at + tl.arange(0, R)[None, :], mask=visible[:, None], other=0.0)
    k_rope = tl.load(at + R + tl.arange(0, P)[None, :], mask=visible[:, None], other=0.0)
    dots = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
    return tl.dot(q_rope, tl.trans(k_rope), dots, input_precision="ieee")


@triton.jit
def _sum_of_softmax(
    query, key, lse, target, S, T, pitch, scale2,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    b, B = tl.program_id(2), tl.num_programs(2)
    first_i, first_j = tl.program_id(1) * I, tl.program_id(0) * J
    if first_j > T - S + first_i + I - 1:
        return
    i, j = first_i + tl.arange(0, I), first_j + tl.arange(0, J)
    r, p = tl.arange(0, R), tl.arange(0, P)
    rows, columns = i < S, j < T
    at = key + (j * B + b)[:, None] * (R + P)
    k_latent = tl.load(at + r[None, :], mask=columns[:, None], other=0.0)
    k_rope = tl.load(at + R + p[None, :], mask=columns[:, None], other=0.0)
    row = (i * B + b).to(tl.int64) * N
    total = tl.zeros([I, J], tl.float32)
    for head in range(N):
        from_ = query + (row + head)[:, None] * (R + P)
        q_latent = tl.load(from_ + r[None, :], mask=rows[:, None], other=0.0)
        q_rope = tl.load(from_ + R + p[None, :], mask=rows[:, None], other=0.0)
        shift = tl.load(lse + row + head, mask=rows, other=0.0)
        dots = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        dots = tl.dot(q_rope, tl.trans(k_rope), dots, input_precision="ieee")
        total += tl.exp2(dots * scale2 - shift[:, None])
    at = target + (b * S + i).to(tl.int64)[:, None] * pitch + j[None, :]
    tl.store(at, total, mask=rows[:, None] & (j < pitch)[None, :])


@triton.jit
def _kl(scores, target, kl, S, T, pitch, factor, width: tl.constexpr):
    """One query a program: factor KL of its row, and in the target's place the gradient of its scores, factor (predicted - target)."""
    i, b = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, width)
    at, at_i = (b * S + i).to(tl.int64) * pitch + j, T - S + i
    visible, written = j <= at_i, j < (at_i // ALIGN + 1) * ALIGN
    score = tl.where(visible, tl.load(scores + at, mask=written, other=0.0), -float("inf"))
    wanted = tl.where(visible, tl.load(target + at, mask=written, other=0.0), 0.0)
    wanted = wanted / tl.sum(wanted, 0)
    score = score - tl.max(score, 0)
    weight = tl.exp(score)
    total = tl.sum(weight, 0)
    terms = wanted * (tl.log(tl.maximum(wanted, 1e-10)) - (score - tl.log(total)))
    tl.store(kl + b * S + i, factor * tl.sum(tl.where(visible, terms, 0.0), 0))
    tl.store(target + at, factor * (weight / total - wanted), mask=written)  # 0 behind the query


def _index_back(q: Tensor, k: Tensor, w: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w from those of the scores, fp32 and 0 after the query in the part that is whole."""
    (s, b, h, d), t, pitch = q.shape, len(k), dscores.stride(1)
    dq, dw = torch.empty_like(q), torch.empty_like(w)
    tile = TILES["index_dq"]
    _index_dq[(h, triton.cdiv(s, tile["I"]), b)](q, k, w, dscores, dq, dw, s, t, pitch, H=h, D=d, **tile)
    tile = TILES["index_dk"]
    parts = k.new_empty(triton.cdiv(s, tile["rows"]), t, b, d, dtype=torch.float32)
    grid = (triton.cdiv(t, tile["J"]), len(parts), b)
    _index_dk[grid](q, k, w, dscores, parts, s, t, pitch, H=h, D=d, **tile)
    return dq, parts.sum(0).to(k.dtype), dw


@triton.jit
def _wide_dot(x, y, total):
    """total + x y for fp32 x. Where y is bf16, x is two such numbers, to 2^-17: a score's gradient rounded to one would be most of the
    error of all that is learned from it."""
    high = x.to(y.dtype)
    total = tl.dot(high, y, total, input_precision="ieee")
    if y.dtype != tl.float32:
        total = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, total, input_precision="ieee")
    return total


@triton.jit
def _index_dq(
    q, k, w, dscores, dq, dw, S, T, pitch, H: tl.constexpr, D: tl.constexpr, I: tl.constexpr, J: tl.constexpr
):
    """A tile of queries of one head a program."""
    head, b, B = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    first_i = (tl.num_programs(1) - 1 - tl.program_id(1)) * I  # the longest first
    i, c = first_i + tl.arange(0, I), tl.arange(0, D)
    rows = i < S
    row = (i * B + b).to(tl.int64) * H + head
    queries = tl.load(q + row[:, None] * D + c[None, :], mask=rows[:, None], other=0.0)
    weight = tl.load(w + row, mask=rows, other=0.0).to(tl.float32)
    total = tl.zeros([I, D], tl.float32)
    at = dscores + (b * S + i).to(tl.int64)[:, None] * pitch
    for first in range(0, tl.minimum(T - S + first_i + I, T), J):
        j = first + tl.arange(0, J)
        keys = tl.load(k + (j * B + b)[:, None] * D + c[None, :], mask=(j < T)[:, None], other=0.0)
        d_score = tl.load(at + j[None, :], mask=rows[:, None], other=0.0)
        dots = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        total = _wide_dot(tl.where(dots > 0.0, d_score, 0.0), keys, total)
    tl.store(dq + row[:, None] * D + c[None, :], (total * weight[:, None]).to(dq.dtype.element_ty), mask=rows[:, None])
    # relu(q . k) = q . k where it is not zero, so the sum over keys that dw wants is q times the one that dq has.
    d_weight = tl.sum(queries.to(tl.float32) * total, 1)
    tl.store(dw + row, d_weight.to(dw.dtype.element_ty), mask=rows)


@triton.jit
def _index_dk(
    q, k, w, dscores, parts, S, T, pitch,
    H: tl.constexpr, D: tl.constexpr, I: tl.constexpr, J: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """What `rows` queries, all heads, add to a tile of keys."""
    part, b, B = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    first_j = tl.program_id(0) * J
    j, c = first_j + tl.arange(0, J), tl.arange(0, D)
    keys = tl.load(k + (j * B + b)[:, None] * D + c[None, :], mask=(j < T)[:, None], other=0.0)
    total = tl.zeros([J, D], tl.float32)
    earliest = tl.maximum(first_j - (T - S), 0) // I * I  # queries before the first key see none of them
    begin = tl.maximum(part * rows, earliest)
    for first in range(begin, tl.minimum(part * rows + rows, S), I):
        i = first + tl.arange(0, I)
        at = dscores + (b * S + i).to(tl.int64)[None, :] * pitch + j[:, None]
        d_score = tl.load(at, mask=(i < S)[None, :], other=0.0)
        row = (i * B + b).to(tl.int64) * H
        for head in range(H):
            queries = tl.load(q + (row + head)[:, None] * D + c[None, :], mask=(i < S)[:, None], other=0.0)
            weight = tl.load(w + row + head, mask=i < S, other=0.0).to(tl.float32)
            dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            total = _wide_dot(tl.where(dots > 0.0, d_score * weight[None, :], 0.0), queries, total)
    at = parts + ((part * T + j).to(tl.int64) * B + b)[:, None] * D + c[None, :]
    tl.store(at, total, mask=(j < T)[:, None])
