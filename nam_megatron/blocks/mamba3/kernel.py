"""The Mamba-3 scan on a GPU, SISO and MIMO in one: chunks of tokens with the state between them, in Triton.

README.md beside this derives it. A chunk of L tokens of rank r is M = L r rows. The state at the start of every chunk is
written by one sequential pass over the sequence, its gradient at the end of every chunk by another in reverse; all else is
parallel over chunks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.mamba3.naive import Shape, State, Weights, turn
from nam_megatron.blocks.mamba3.prepare import Prepared, Raw, offsets, packed_gradients

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Launch(NamedTuple):
    """How the kernels are started.

    columns: of half the state dimension, taken at once; not in the kernel of B and C. chunks: of a backward program.
    programs: splits of a group's heads are made until there are so many. (warps, stages, registers of a thread) of each
    kernel; 0 registers: no limit.
    """

    columns: int = 32
    chunks: int = 4
    programs: int = 1056
    forward_states: tuple[int, int, int] = (4, 1, 0)
    output: tuple[int, int, int] = (4, 1, 0)
    backward_states: tuple[int, int, int] = (4, 1, 0)
    values: tuple[int, int, int] = (4, 1, 0)
    keys: tuple[int, int, int] = (4, 1, 0)


def scan(
    packed: Tensor,
    weights: Weights,
    shape: Shape,
    chunk: int,
    documents: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """naive.scan's output for a whole sequence, with gradients of `packed` and `weights`.

    packed [s, b, width] on a GPU, unit stride in the last dimension; documents [b, s] int32. With a group of tensor ranks
    each holds an equal share of the angles in its `packed`, in rank order. Keeps its arguments for the backward pass and
    nothing else.
    """
    return _Scan.apply(packed, documents, shape, chunk, group, launch or Launch(), *weights)


@torch.no_grad()
def prefill(
    packed: Tensor,
    weights: Weights,
    shape: Shape,
    chunk: int,
    state: State | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, State]:
    """naive.scan of one document without gradients: the output, and the state from which to go on."""
    launch = Launch()
    start = None if state is None else state.angle
    prepared = Prepared.of(packed, weights, shape, chunk, _angles(packed, shape, group), start=start)
    before = None if state is None else _with_trapezoid(packed, weights, shape, state)
    states, end = _states(packed, weights, prepared, shape, chunk, launch, None, before, ends=True)
    y = _output(packed, weights, prepared, states, shape, chunk, launch, None)
    key = prepared.keys[:, -1].float().repeat_interleave(shape.heads // shape.groups, 1) + weights.B_bias
    x = packed[-1, :, shape.inner : 2 * shape.inner].unflatten(-1, (shape.heads, shape.head_dim))
    return y, State(prepared.angle, end, turn(key, prepared.angle).to(packed.dtype), x.contiguous())


def _angles(packed: Tensor, shape: Shape, group: dist.ProcessGroup | None) -> Tensor:
    """All angles [s, b, angles] of the packed projection."""
    own = packed[..., offsets(shape)["angles"] :]
    if group is None or group.size() == 1:
        return own
    every = own.new_empty(group.size() * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(every, own.contiguous(), group=group)
    return every.unflatten(0, (group.size(), -1)).movedim(0, -2).flatten(-2)


def _own_angles(d_angles: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's share of the gradients of all angles, summed over the ranks, each of which knows its own heads'."""
    if group is None or group.size() == 1:
        return d_angles
    every = d_angles.unflatten(-1, (group.size(), -1)).movedim(-2, 0).flatten(0, 1).contiguous()
    own = every.new_empty(d_angles.size(0), *every.shape[1:])
    dist.reduce_scatter_tensor(own, every, group=group)
    return own


def _with_trapezoid(packed: Tensor, weights: Weights, shape: Shape, state: State) -> Tensor:
    """The state that the first token decays: its own step's share of the token before it is added."""
    at = offsets(shape)
    dt, trap = (packed[0, :, at[name] : at[name] + shape.heads].float() for name in ("dt", "trap"))
    step = torch.nn.functional.softplus(dt + weights.dt_bias) * torch.sigmoid(-trap)
    v = state.x.float().unsqueeze(2) * (1 if weights.mimo_x is None else weights.mimo_x)
    return state.ssm + step[..., None, None] * torch.einsum("bhrn,bhrp->bhpn", state.k.float(), v)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, documents, shape, chunk, group, launch, *weights):
        ctx.sizes = shape, chunk, group, launch
        ctx.save_for_backward(packed, documents, *weights)
        weights = Weights(*weights)
        prepared = Prepared.of(packed, weights, shape, chunk, _angles(packed, shape, group), documents)
        states, _ = _states(packed, weights, prepared, shape, chunk, launch, documents)
        return _output(packed, weights, prepared, states, shape, chunk, launch, documents)

    @staticmethod
    def backward(ctx, dy):
        packed, documents, *weights = ctx.saved_tensors
        shape, chunk, group, launch = ctx.sizes
        weights, angles = Weights(*weights), _angles(packed, shape, group)
        prepared = Prepared.of(packed, weights, shape, chunk, angles, documents)
        states, _ = _states(packed, weights, prepared, shape, chunk, launch, documents)
        d_packed = torch.empty_like(packed, memory_format=torch.contiguous_format)
        raw, sums = _backward(
            packed, weights, prepared, states, dy.contiguous(), d_packed, shape, chunk, launch, documents
        )
        d_angles, d_bias, d_B_norm, d_C_norm = packed_gradients(
            raw, d_packed, packed, weights, shape, chunk, angles, prepared.scale, documents
        )
        d_packed[..., offsets(shape)["angles"] :] = _own_angles(d_angles, group)
        return d_packed, None, None, None, None, None, d_bias, *sums[:3], d_B_norm, d_C_norm, *sums[3:]


def _common(packed: Tensor, shape: Shape, chunk: int, documents: Tensor | None) -> dict:
    """Arguments that every kernel below takes by name."""
    h, p, n, g, r, a = shape
    return dict(
        documents=documents, s=packed.size(0), stride_s=packed.stride(0), stride_b=packed.stride(1),
        H=h, P=p, HALF=n // 2, G=g, R=r, A=a, L=chunk, PACKED=documents is not None,
        PRECISION="ieee" if packed.dtype == torch.float32 else "tf32",
    )  # fmt: skip


def _states(
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None,
    start: Tensor | None = None,
    ends: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The state at the start of each chunk [b, chunks, heads, head_dim, state_dim], and the last one in fp32 if asked for."""
    s, b, _ = packed.shape
    h, p, n = shape[:3]
    columns = min(launch.columns, n // 2)
    states = packed.new_empty(b, triton.cdiv(s, chunk), h, p, n)
    end = packed.new_empty(b, h, p, n, dtype=torch.float32) if ends else None
    _states_kernel[(n // 2 // columns, h, b)](
        packed, _mimo(weights)[0], weights.B_bias, prepared.keys, prepared.cos, prepared.sin, prepared.decay, prepared.scale,
        start, states, end, COLUMNS=columns, STARTED=start is not None, ENDS=ends,
        **_common(packed, shape, chunk, documents), **_options(launch.forward_states),
    )  # fmt: skip
    return states, end


def _output(
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    states: Tensor,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None,
) -> Tensor:
    s, b, _ = packed.shape
    y = packed.new_empty(s, b, shape.inner)
    _output_kernel[(triton.cdiv(s, chunk), shape.heads, b)](
        packed, *_mimo(weights), weights.B_bias, weights.C_bias, weights.D, prepared.keys, prepared.queries,
        prepared.cos, prepared.sin, prepared.decay, prepared.now, prepared.scale, states, y, B=b,
        COLUMNS=min(launch.columns, shape.state_dim // 2),
        **_common(packed, shape, chunk, documents), **_options(launch.output),
    )  # fmt: skip
    return y


def _options(chosen: tuple[int, int, int]) -> dict[str, int]:
    warps, stages, registers = chosen
    return dict(num_warps=warps, num_stages=stages) | (dict(maxnreg=registers) if registers else {})


def _mimo(weights: Weights) -> tuple[Tensor, ...]:
    """mimo_x, mimo_z, mimo_o; with rank 1 something in their place, which is not read."""
    return tuple(weights.D if w is None else w for w in (weights.mimo_x, weights.mimo_z, weights.mimo_o))


def _backward(
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    states: Tensor,
    dy: Tensor,
    d_packed: Tensor,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None,
) -> tuple[Raw, list[Tensor | None]]:
    """Writes z's and x's columns of d_packed; returns what packed_gradients needs for the others, and the gradients of
    D, B_bias, C_bias, mimo_x, mimo_z, mimo_o."""
    s, b, _ = packed.shape
    h, p, n, g, r, a = shape
    chunks = triton.cdiv(s, chunk)
    common = _common(packed, shape, chunk, documents)

    def fp32(*size: int) -> Tensor:
        return packed.new_empty(*size, dtype=torch.float32)

    columns = min(launch.columns, n // 2)
    d_states, ends = torch.empty_like(states), fp32(n // 2 // columns, b, h, chunks)
    _d_states_kernel[(n // 2 // columns, h, b)](
        packed, *_mimo(weights), weights.C_bias, prepared.queries, prepared.cos, prepared.sin, prepared.decay,
        states, dy, d_states, ends, B=b, COLUMNS=columns, **common, **_options(launch.backward_states),
    )  # fmt: skip

    # A program sums the gradients of weights over some chunks, and those of B and C over some heads of a group.
    per = max(1, min(launch.chunks, b * chunks * h // launch.programs))
    slots = triton.cdiv(chunks, per)
    sources = (
        packed, *_mimo(weights), weights.B_bias, weights.C_bias, weights.D, prepared.keys, prepared.queries,
        prepared.cos, prepared.sin, prepared.decay, prepared.now, prepared.scale, states, d_states, dy,
    )  # fmt: skip
    row, now, scale = (fp32(b, h, s) for _ in range(3))
    key_ends, d_D = fp32(b, h, chunks), fp32(b, slots, h)
    d_x, d_z, d_o = (fp32(b, slots, h, r, p) if r > 1 else None for _ in range(3))
    _values_kernel[(slots, h, b)](
        *sources, d_packed, row, now, scale, key_ends, d_x, d_z, d_o, d_D,
        out_s=d_packed.stride(0), out_b=d_packed.stride(1), B=b, PER=per, COLUMNS=columns,
        **common, **_options(launch.values),
    )  # fmt: skip
    per = max(1, min(launch.chunks, b * chunks * g // launch.programs))
    slots, splits = triton.cdiv(chunks, per), 1
    while h // g % (2 * splits) == 0 and slots * b * g * splits < launch.programs:
        splits *= 2
    d_keys, d_queries = (packed.new_empty(splits, b, s, g, r, n) for _ in range(2))
    d_B, d_C = (fp32(b, slots, h, r, n) for _ in range(2))
    d_angles = fp32(b, h, s, a)
    _keys_kernel[(slots, g * splits, b)](
        *sources, d_keys, d_queries, d_angles, d_B, d_C,
        B=b, SPLITS=splits, PER=per, **common, **_options(launch.keys),
    )  # fmt: skip
    raw = Raw(d_keys, d_queries, d_angles, row, now, scale, ends.sum(0) + key_ends)
    return raw, [None if t is None else t.sum((0, 1)) for t in (d_D, d_B, d_C, d_x, d_z, d_o)]


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Names: row m of a chunk is token m // R, rank m % R. q, k: turned queries and keys, in two halves (low, high) whose columns
# are turned together. v, g: rows of x mimo_x and of the gradient of o. c: log decay since the chunk began.


@triton.jit
def _rows(chunk, s, L: tl.constexpr, R: tl.constexpr):
    """Token, rank and presence of each row of a chunk."""
    row = tl.arange(0, L * R)
    token = chunk * L + row // R
    return token, row % R, token < s


@triton.jit
def _angle(cos, sin, token, ok, column, A: tl.constexpr):
    """cos and sin of each row and column of a half; columns from A on do not turn. Pointers of a batch entry and head."""
    turning = ok[:, None] & (column < A)[None, :]
    at = token[:, None] * A + column[None, :]
    c = tl.load(cos + at, mask=turning, other=1.0).to(tl.float32)
    return c, tl.load(sin + at, mask=turning, other=0.0).to(tl.float32)


@triton.jit
def _turned(
    keys, bias, cos, sin, token, rank, ok, column, G: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, A: tl.constexpr
):
    """Both halves of normed keys (or queries) + bias, turned. keys: of a batch entry and group, bias of a head."""
    at = keys + (token * (G * R) + rank)[:, None] * (2 * HALF) + column[None, :]
    add = bias + rank[:, None] * (2 * HALF) + column[None, :]
    low = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32) + tl.load(add)
    high = tl.load(at + HALF, mask=ok[:, None], other=0.0).to(tl.float32) + tl.load(add + HALF)
    c, s = _angle(cos, sin, token, ok, column, A)
    kind = keys.dtype.element_ty
    return (low * c - high * s).to(kind), (low * s + high * c).to(kind)


@triton.jit
def _values(x, stride_s, mimo, token, rank, ok, P: tl.constexpr, R: tl.constexpr):
    """x of each row's token and head, and the rank's weights of it (ones if there are none), [M, P] fp32."""
    p = tl.arange(0, P)
    at = x + token[:, None].to(tl.int64) * stride_s + p[None, :]
    value = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)
    weight = tl.full(value.shape, 1.0, tl.float32)
    if R > 1:
        weight = tl.load(mimo + rank[:, None] * P + p[None, :])
    return value, weight


@triton.jit
def _over_ranks(x, L: tl.constexpr, R: tl.constexpr):
    """[L R, n] -> [L, n], summed over the rows of a token."""
    if R > 1:
        x = tl.sum(tl.reshape(x, [L, R, x.shape[1]]), 1)
    return x


@triton.jit
def _over_tokens(x, L: tl.constexpr, R: tl.constexpr):
    """[L R, n] -> [R, n], summed over tokens."""
    return tl.sum(tl.reshape(x, [L, R, x.shape[1]]), 0)


@triton.jit
def _by_token(x, L: tl.constexpr, R: tl.constexpr):
    """[L R] -> [L], summed over the rows of a token."""
    if R > 1:
        x = tl.sum(tl.reshape(x, [L, R]), 1)
    return x


@triton.jit
def _add(to, x, mask, again):
    """Store, or add to what this program has stored there before."""
    tl.store(to, x + tl.load(to, mask=mask & again, other=0.0), mask=mask)


@triton.jit
def _since(documents, chunk, token, s, L: tl.constexpr, PACKED: tl.constexpr):
    """1 for rows of the document that the chunk before handed over, 0 for others."""
    same = token < s
    if PACKED:
        same = tl.load(documents + token, mask=same, other=-1) == tl.load(documents + tl.maximum(chunk * L - 1, 0))
    return same.to(tl.float32)


@triton.jit
def _until(documents, chunk, token, s, L: tl.constexpr, PACKED: tl.constexpr):
    """1 for rows of the document that the chunk hands over, 0 for others."""
    same = token < s
    if PACKED:
        last = tl.load(documents + tl.minimum(chunk * L + L, s) - 1)
        same = tl.load(documents + token, mask=same, other=-1) == last
    return same.to(tl.float32)


@triton.jit
def _last(decay, chunk, s, L: tl.constexpr):
    """Log decay over the whole chunk."""
    return tl.load(decay + tl.minimum(chunk * L + L, s) - 1)


@triton.jit
def _left(last, documents, chunk, s, L: tl.constexpr, PACKED: tl.constexpr):
    """How much of the state at the chunk's start is left at its end."""
    left = tl.exp(last)
    if PACKED:
        before = tl.load(documents + tl.maximum(chunk * L - 1, 0))
        left = tl.where(tl.load(documents + tl.minimum(chunk * L + L, s) - 1) == before, left, 0.0)
    return left


@triton.jit
def _states_kernel(
    packed, mimo_x, B_bias, keys, cos, sin, decay, scale, start, states, end,
    documents, s, stride_s, stride_b,
    COLUMNS: tl.constexpr, STARTED: tl.constexpr, ENDS: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, P)
    x = packed + b * stride_b + (H + h) * P
    mimo_x += h * R * P
    B_bias += h * R * 2 * HALF
    keys += (b * s * G + h // (H // G)) * (R * 2 * HALF)
    of = b * H + h
    cos += of * s * A
    sin += of * s * A
    decay += of * s
    scale += of * s
    if PACKED:
        documents += b * s
    kind = states.dtype.element_ty
    chunks = tl.cdiv(s, L)
    tile = p[:, None] * (2 * HALF) + column[None, :]
    states += (b * chunks * H + h) * (P * 2 * HALF) + tile

    low = tl.zeros([P, COLUMNS], tl.float32)
    high = tl.zeros([P, COLUMNS], tl.float32)
    if STARTED:
        low = tl.load(start + of * P * 2 * HALF + tile)
        high = tl.load(start + of * P * 2 * HALF + tile + HALF)
    for chunk in range(chunks):
        tl.store(states, low.to(kind))
        tl.store(states + HALF, high.to(kind))
        states += H * P * 2 * HALF
        token, rank, ok = _rows(chunk, s, L, R)
        k_low, k_high = _turned(keys, B_bias, cos, sin, token, rank, ok, column, G, R, HALF, A)
        value, weight = _values(x, stride_s, mimo_x, token, rank, ok, P, R)
        last = _last(decay, chunk, s, L)
        left = _left(last, documents, chunk, s, L, PACKED)
        until = _until(documents, chunk, token, s, L, PACKED)
        c = tl.load(decay + token, mask=ok, other=0.0)
        by = tl.exp(tl.minimum(last - c, 0.0)) * tl.load(scale + token, mask=ok, other=0.0) * until
        v = tl.trans((value * weight * by[:, None]).to(kind))
        low = tl.dot(v, k_low, low * left, input_precision=PRECISION)
        high = tl.dot(v, k_high, high * left, input_precision=PRECISION)
    if ENDS:
        tl.store(end + of * P * 2 * HALF + tile, low)
        tl.store(end + of * P * 2 * HALF + tile + HALF, high)


@triton.jit
def _weights_of(c_query, c_key, token_query, token_key, documents, s, PACKED: tl.constexpr):
    """[queries, keys]: the decay between them, 0 unless the key is earlier; and whether they are of one token.

    The four vectors are already shaped to broadcast to [queries, keys], or both ways round.
    """
    earlier = token_key < token_query
    if PACKED:
        earlier = earlier & (
            tl.load(documents + token_query, mask=token_query < s, other=-1)
            == tl.load(documents + token_key, mask=token_key < s, other=-1)
        )
    # Only what the mask drops can be above 0.
    between = tl.where(earlier, tl.exp(tl.minimum(c_query - c_key, 0.0)), 0.0)
    return between, token_key == token_query


@triton.jit
def _diagonal(value, M: tl.constexpr):
    """[M, M] with `value` on its diagonal: D, which skips the state, is a score of each row with itself."""
    row = tl.arange(0, M)
    return tl.where(row[:, None] == row[None, :], value, 0.0)


@triton.jit
def _output_kernel(
    packed, mimo_x, mimo_z, mimo_o, B_bias, C_bias, D, keys, queries, cos, sin, decay, now, scale, states, y,
    documents, s, stride_s, stride_b, B, COLUMNS: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    p = tl.arange(0, P)
    packed += b * stride_b + h * P
    at_group = (b * s * G + h // (H // G)) * (R * 2 * HALF)
    at_head = h * R * 2 * HALF
    of = b * H + h
    cos += of * s * A
    sin += of * s * A
    decay += of * s
    if PACKED:
        documents += b * s
    kind = states.dtype.element_ty
    token, rank, ok = _rows(chunk, s, L, R)

    at_state = states + ((b * tl.cdiv(s, L) + chunk) * H + h) * (P * 2 * HALF) + p[:, None] * (2 * HALF)
    scores = tl.zeros([L * R, L * R], tl.float32)
    o = tl.zeros([L * R, P], tl.float32)
    for first in tl.range(0, HALF, COLUMNS, disable_licm=True):
        column = first + tl.arange(0, COLUMNS)
        q_low, q_high = _turned(queries + at_group, C_bias + at_head, cos, sin, token, rank, ok, column, G, R, HALF, A)
        k_low, k_high = _turned(keys + at_group, B_bias + at_head, cos, sin, token, rank, ok, column, G, R, HALF, A)
        scores = tl.dot(q_low, tl.trans(k_low), scores, input_precision=PRECISION)
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
        state = at_state + column[None, :]
        o = tl.dot(q_low, tl.trans(tl.load(state)), o, input_precision=PRECISION)
        o = tl.dot(q_high, tl.trans(tl.load(state + HALF)), o, input_precision=PRECISION)
    c = tl.load(decay + token, mask=ok, other=0.0)
    since = _since(documents, chunk, token, s, L, PACKED)
    o *= (tl.exp(c) * since)[:, None]

    between, same = _weights_of(c[:, None], c[None, :], token[:, None], token[None, :], documents, s, PACKED)
    later = tl.load(scale + of * s + token, mask=ok, other=0.0)
    own = tl.load(now + of * s + token, mask=ok, other=0.0)
    scores = scores * tl.where(same, own[None, :], between * later[None, :]) + _diagonal(tl.load(D + h), L * R)
    x, weight = _values(packed + H * P, stride_s, mimo_x + h * R * P, token, rank, ok, P, R)
    o = tl.dot(scores.to(kind), (x * weight).to(kind), o, input_precision=PRECISION)

    z, by = _values(packed, stride_s, mimo_z + h * R * P, token, rank, ok, P, R)
    gate = z * by
    o *= gate * tl.sigmoid(gate)
    if R > 1:
        o *= tl.load(mimo_o + h * R * P + rank[:, None] * P + p[None, :])
    o = _over_ranks(o, L, R)
    token = chunk * L + tl.arange(0, L)
    to = y + (token.to(tl.int64) * B + b)[:, None] * (H * P) + h * P + p[None, :]
    tl.store(to, o.to(kind), mask=(token < s)[:, None])


@triton.jit
def _d_outputs(
    dy, packed, mimo_z, mimo_o, stride_s, token, rank, ok, B, H: tl.constexpr, P: tl.constexpr, R: tl.constexpr
):
    """Gradient of each row's o, [M, P] fp32. dy and packed: of a batch entry and head, packed at z."""
    z, by = _values(packed, stride_s, mimo_z, token, rank, ok, P, R)
    g, out = _values(dy, B * H * P, mimo_o, token, rank, ok, P, R)
    gate = z * by
    return g * out * gate * tl.sigmoid(gate)


@triton.jit
def _d_states_kernel(
    packed, mimo_x, mimo_z, mimo_o, C_bias, queries, cos, sin, decay, states, dy, d_states, ends,
    documents, s, stride_s, stride_b, B,
    COLUMNS: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, P)
    packed += b * stride_b + h * P
    dy += (b * H + h) * P
    C_bias += h * R * 2 * HALF
    queries += (b * s * G + h // (H // G)) * (R * 2 * HALF)
    of = b * H + h
    cos += of * s * A
    sin += of * s * A
    decay += of * s
    if PACKED:
        documents += b * s
    kind = states.dtype.element_ty
    chunks = tl.cdiv(s, L)
    ends += ((tl.program_id(0) * B + b) * H + h) * chunks
    last = ((b * chunks + chunks - 1) * H + h) * (P * 2 * HALF) + p[:, None] * (2 * HALF) + column[None, :]
    states += last
    d_states += last

    low = tl.zeros([P, COLUMNS], tl.float32)
    high = tl.zeros([P, COLUMNS], tl.float32)
    for i in range(chunks):
        chunk = chunks - 1 - i
        tl.store(d_states, low.to(kind))
        tl.store(d_states + HALF, high.to(kind))
        left = _left(_last(decay, chunk, s, L), documents, chunk, s, L, PACKED)
        low *= left
        high *= left
        both = low * tl.load(states).to(tl.float32) + high * tl.load(states + HALF).to(tl.float32)
        states -= H * P * 2 * HALF
        d_states -= H * P * 2 * HALF
        tl.store(ends + chunk, tl.sum(tl.sum(both, 1), 0))
        token, rank, ok = _rows(chunk, s, L, R)
        q_low, q_high = _turned(queries, C_bias, cos, sin, token, rank, ok, column, G, R, HALF, A)
        g = _d_outputs(dy, packed, mimo_z + h * R * P, mimo_o + h * R * P, stride_s, token, rank, ok, B, H, P, R)
        since = _since(documents, chunk, token, s, L, PACKED)
        by = tl.exp(tl.load(decay + token, mask=ok, other=0.0)) * since
        g = tl.trans((g * by[:, None]).to(kind))
        low = tl.dot(g, q_low, low, input_precision=PRECISION)
        high = tl.dot(g, q_high, high, input_precision=PRECISION)


@triton.jit
def _values_kernel(
    packed, mimo_x, mimo_z, mimo_o, B_bias, C_bias, D, keys, queries, cos, sin, decay, now, scale, states, d_states, dy,
    d_packed, d_row, d_now, d_scale, ends, d_mimo_x, d_mimo_z, d_mimo_o, d_D,
    documents, s, stride_s, stride_b, out_s, out_b, B, PER: tl.constexpr, COLUMNS: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head, all that needs scores: gradients of x, z, mimo_*, D, and of steps and decays."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    p = tl.arange(0, P)
    ranks = tl.arange(0, R)
    chunks = tl.cdiv(s, L)
    kind = packed.dtype.element_ty
    of = b * H + h
    packed += b * stride_b + h * P
    d_packed += b * out_b + h * P
    dy += of * P
    keys += (b * s * G + h // (H // G)) * (R * 2 * HALF)
    queries += (b * s * G + h // (H // G)) * (R * 2 * HALF)
    B_bias += h * R * 2 * HALF
    C_bias += h * R * 2 * HALF
    cos += of * s * A
    sin += of * s * A
    decay += of * s
    now += of * s
    scale += of * s
    if R > 1:
        mimo_x += h * R * P
        mimo_z += h * R * P
        mimo_o += h * R * P
    if PACKED:
        documents += b * s
    slot = (b * tl.num_programs(0) + tl.program_id(0)) * H + h
    for part in tl.range(PER, disable_licm=True):
        chunk = tl.program_id(0) * PER + part
        if chunk < chunks:
            token, rank, ok = _rows(chunk, s, L, R)
            single = chunk * L + tl.arange(0, L)
            at_state = ((b * chunks + chunk) * H + h) * (P * 2 * HALF) + p[:, None] * (2 * HALF)
            scores = tl.zeros([L * R, L * R], tl.float32)
            o = tl.zeros([L * R, P], tl.float32)
            for first in tl.range(0, HALF, COLUMNS, disable_licm=True):
                column = first + tl.arange(0, COLUMNS)
                q_low, q_high = _turned(queries, C_bias, cos, sin, token, rank, ok, column, G, R, HALF, A)
                k_low, k_high = _turned(keys, B_bias, cos, sin, token, rank, ok, column, G, R, HALF, A)
                scores = tl.dot(q_low, tl.trans(k_low), scores, input_precision=PRECISION)
                scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
                tile = at_state + column[None, :]
                o = tl.dot(q_low, tl.trans(tl.load(states + tile)), o, input_precision=PRECISION)
                o = tl.dot(q_high, tl.trans(tl.load(states + tile + HALF)), o, input_precision=PRECISION)

            x, weight = _values(packed + H * P, stride_s, mimo_x, token, rank, ok, P, R)
            v = (x * weight).to(kind)
            g = _d_outputs(dy, packed, mimo_z, mimo_o, stride_s, token, rank, ok, B, H, P, R).to(kind)
            c = tl.load(decay + token, mask=ok, other=0.0)
            later = tl.load(scale + token, mask=ok, other=0.0)
            own = tl.load(now + token, mask=ok, other=0.0)
            o *= (tl.exp(c) * _since(documents, chunk, token, s, L, PACKED))[:, None]
            row = tl.sum(g.to(tl.float32) * o, 1)

            d_scores = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            skip = tl.sum(tl.sum(d_scores * _diagonal(1.0, L * R), 1), 0)
            if part > 0:
                skip += tl.load(d_D + slot)
            tl.store(d_D + slot, skip)
            between, same = _weights_of(c[:, None], c[None, :], token[:, None], token[None, :], documents, s, PACKED)
            d_scores *= scores
            at_once = tl.sum(tl.where(same, d_scores, 0.0), 0)
            tl.store(d_now + of * s + single, _by_token(at_once, L, R), mask=single < s)
            d_scores *= between
            row += tl.sum(d_scores * later[None, :], 1)
            tl.store(d_row + of * s + single, _by_token(row, L, R), mask=single < s)
            step = tl.sum(d_scores, 0)
            weights = tl.where(same, own[None, :], between * later[None, :])
            scores = (scores * weights + _diagonal(tl.load(D + h), L * R)).to(kind)
            o = tl.dot(scores, v, o, input_precision=PRECISION)

            to = d_packed + single[:, None].to(tl.int64) * out_s + p[None, :]
            at = slot * (R * P) + ranks[:, None] * P + p[None, :]
            each = tl.full([R, P], True, tl.int1)
            # Read again instead of kept: registers are scarce here.
            z, by = _values(packed, stride_s, mimo_z, token, rank, ok, P, R)
            d_out, out = _values(dy, B * H * P, mimo_o, token, rank, ok, P, R)
            gate = z * by
            sigmoid = tl.sigmoid(gate)
            o *= d_out
            d_gate = o * out * (sigmoid * (1 + gate * (1 - sigmoid)))
            tl.store(to, _over_ranks(d_gate * by, L, R).to(kind), mask=(single < s)[:, None])
            if R > 1:
                _add(d_mimo_z + at, _over_tokens(d_gate * z, L, R), each, part > 0)
                _add(d_mimo_o + at, _over_tokens(o * gate * sigmoid, L, R), each, part > 0)

            dv = tl.zeros([L * R, P], tl.float32)
            for first in tl.range(0, HALF, COLUMNS, disable_licm=True):
                column = first + tl.arange(0, COLUMNS)
                k_low, k_high = _turned(keys, B_bias, cos, sin, token, rank, ok, column, G, R, HALF, A)
                tile = at_state + column[None, :]
                dv = tl.dot(k_low, tl.trans(tl.load(d_states + tile)), dv, input_precision=PRECISION)
                dv = tl.dot(k_high, tl.trans(tl.load(d_states + tile + HALF)), dv, input_precision=PRECISION)
            kept = tl.exp(tl.minimum(_last(decay, chunk, s, L) - c, 0.0)) * _until(
                documents, chunk, token, s, L, PACKED
            )
            dv *= kept[:, None]
            x, weight = _values(packed + H * P, stride_s, mimo_x, token, rank, ok, P, R)
            carried = tl.sum(x * weight * dv, 1)
            tl.store(ends + of * chunks + chunk, tl.sum(carried * later, 0))
            tl.store(d_scale + of * s + single, _by_token(step + carried, L, R), mask=single < s)
            dv = tl.dot(tl.trans(scores), g, dv * later[:, None], input_precision=PRECISION)
            tl.store(to + H * P, _over_ranks(dv * weight, L, R).to(kind), mask=(single < s)[:, None])
            if R > 1:
                _add(d_mimo_x + at, _over_tokens(dv * x, L, R), each, part > 0)


@triton.jit
def _keys_kernel(
    packed, mimo_x, mimo_z, mimo_o, B_bias, C_bias, D, keys, queries, cos, sin, decay, now, scale, states, d_states, dy,
    d_keys, d_queries, d_angles, d_B, d_C,
    documents, s, stride_s, stride_b, B, SPLITS: tl.constexpr, PER: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and group: gradients of B, C, their biases, and of the summed angles."""
    # Not in tiles of fewer columns than P: one piece of shared memory then holds operands of two swizzles, and ptxas 12.8
    # took a wrong register for the address of one of them. README.md beside this has the details.
    column = tl.arange(0, HALF)
    group = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    b = tl.program_id(2).to(tl.int64)
    HEADS: tl.constexpr = H // G // SPLITS
    p = tl.arange(0, P)
    ranks = tl.arange(0, R)
    chunks = tl.cdiv(s, L)
    kind = packed.dtype.element_ty
    packed += b * stride_b
    keys += (b * s * G + group) * (R * 2 * HALF)
    queries += (b * s * G + group) * (R * 2 * HALF)
    if PACKED:
        documents += b * s
    tile = p[:, None] * (2 * HALF) + column[None, :]
    for part in tl.range(PER, disable_licm=True):
        chunk = tl.program_id(0) * PER + part
        if chunk < chunks:
            token, rank, ok = _rows(chunk, s, L, R)
            single = chunk * L + tl.arange(0, L)
            dq_low_total = tl.zeros([L * R, HALF], tl.float32)
            dq_high_total = tl.zeros([L * R, HALF], tl.float32)
            dk_low_total = tl.zeros([L * R, HALF], tl.float32)
            dk_high_total = tl.zeros([L * R, HALF], tl.float32)
            for i in tl.range(HEADS, disable_licm=True):
                h = group * (H // G) + split * HEADS + i
                of = b * H + h
                at_head = h * R * 2 * HALF
                x, weight = _values(packed + (H + h) * P, stride_s, mimo_x + h * R * P, token, rank, ok, P, R)
                v = (x * weight).to(kind)
                g = _d_outputs(
                    dy + of * P, packed + h * P, mimo_z + h * R * P, mimo_o + h * R * P,
                    stride_s, token, rank, ok, B, H, P, R,
                ).to(kind)  # fmt: skip
                d_scores = tl.dot(g, tl.trans(v), input_precision=PRECISION)
                c = tl.load(decay + of * s + token, mask=ok, other=0.0)
                later = tl.load(scale + of * s + token, mask=ok, other=0.0)
                own = tl.load(now + of * s + token, mask=ok, other=0.0)
                begun = tl.exp(c) * _since(documents, chunk, token, s, L, PACKED)
                kept = tl.exp(tl.minimum(_last(decay + of * s, chunk, s, L) - c, 0.0)) * later
                kept *= _until(documents, chunk, token, s, L, PACKED)
                between, same = _weights_of(
                    c[:, None], c[None, :], token[:, None], token[None, :], documents, s, PACKED
                )
                d_scores = (d_scores * tl.where(same, own[None, :], between * later[None, :])).to(kind)

                k_low, k_high = _turned(
                    keys, B_bias + at_head, cos + of * s * A, sin + of * s * A,
                    token, rank, ok, column, G, R, HALF, A,
                )  # fmt: skip
                at = ((b * chunks + chunk) * H + h) * (P * 2 * HALF) + tile
                dq_low = tl.dot(g, tl.load(states + at), input_precision=PRECISION) * begun[:, None]
                dq_low = tl.dot(d_scores, k_low, dq_low, input_precision=PRECISION)
                dq_high = tl.dot(g, tl.load(states + at + HALF), input_precision=PRECISION) * begun[:, None]
                dq_high = tl.dot(d_scores, k_high, dq_high, input_precision=PRECISION)
                q_low, q_high = _turned(
                    queries, C_bias + at_head, cos + of * s * A, sin + of * s * A,
                    token, rank, ok, column, G, R, HALF, A,
                )  # fmt: skip
                dk_low = tl.dot(v, tl.load(d_states + at), input_precision=PRECISION) * kept[:, None]
                dk_low = tl.dot(tl.trans(d_scores), q_low, dk_low, input_precision=PRECISION)
                dk_high = tl.dot(v, tl.load(d_states + at + HALF), input_precision=PRECISION) * kept[:, None]
                dk_high = tl.dot(tl.trans(d_scores), q_high, dk_high, input_precision=PRECISION)

                angle = q_low.to(tl.float32) * dq_high - q_high.to(tl.float32) * dq_low
                angle += k_low.to(tl.float32) * dk_high - k_high.to(tl.float32) * dk_low
                to = d_angles + (of * s + single[:, None]) * A + column[None, :]
                known = (single < s)[:, None] & (column < A)[None, :]
                tl.store(to, _over_ranks(angle, L, R), mask=known)
                cosine, sine = _angle(cos + of * s * A, sin + of * s * A, token, ok, column, A)
                to = ((b * tl.num_programs(0) + tl.program_id(0)) * H + h) * (R * 2 * HALF)
                to += ranks[:, None] * (2 * HALF) + column[None, :]
                every = tl.full([R, HALF], True, tl.int1)
                low = cosine * dq_low + sine * dq_high
                high = cosine * dq_high - sine * dq_low
                dq_low_total += low
                dq_high_total += high
                _add(d_C + to, _over_tokens(low, L, R), every, part > 0)
                _add(d_C + to + HALF, _over_tokens(high, L, R), every, part > 0)
                low = cosine * dk_low + sine * dk_high
                high = cosine * dk_high - sine * dk_low
                dk_low_total += low
                dk_high_total += high
                _add(d_B + to, _over_tokens(low, L, R), every, part > 0)
                _add(d_B + to + HALF, _over_tokens(high, L, R), every, part > 0)
            to = (split * B + b) * s * (G * R * 2 * HALF) + group * (R * 2 * HALF)
            to += (token * (G * R) + rank)[:, None] * (2 * HALF) + column[None, :]
            tl.store(d_queries + to, dq_low_total.to(kind), mask=ok[:, None])
            tl.store(d_queries + to + HALF, dq_high_total.to(kind), mask=ok[:, None])
            tl.store(d_keys + to, dk_low_total.to(kind), mask=ok[:, None])
            tl.store(d_keys + to + HALF, dk_high_total.to(kind), mask=ok[:, None])
