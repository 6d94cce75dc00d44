"""One token of the Mamba-3 scan on a GPU, from the state of the tokens before it: each head's state is read and written once, in Triton.

The recurrence is naive.scan's. Everything between the projections is in it; sums and the state are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.mamba3.naive import A_FLOOR, NORM_EPSILON, Shape, State, Weights
from nam_megatron.blocks.mamba3.prepare import offsets, softplus


@torch.no_grad()
def step(packed: Tensor, weights: Weights, shape: Shape, state: State) -> Tensor:
    """naive.scan's output [b, heads * head_dim] for packed [b, sum of shape.parts]; `state`, contiguous, goes one token on in its place.

    head_dim and state_dim are powers of two.
    """
    h, p, n, g, r, a = shape
    assert all(kept.is_contiguous() for kept in state) and packed.stride(1) == 1
    y, at = packed.new_empty(len(packed), shape.inner), offsets(shape)
    _step[(h, len(packed))](
        packed, *state, *weights, y, packed.stride(0), at["x"], at["B"], at["C"], at["dt"], at["A"], at["trap"], at["angles"],
        H=h, P=p, HALF=n // 2, G=g, R=r, A=a, FLOOR=A_FLOOR, EPS=NORM_EPSILON, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def _normed(packed, scale, bias, column, HALF: tl.constexpr, EPS: tl.constexpr):
    """Both halves of a key or query before it is turned."""
    low, high = tl.load(packed + column).to(tl.float32), tl.load(packed + HALF + column).to(tl.float32)
    rate = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + EPS)
    low = low * rate * tl.load(scale + column).to(tl.float32) + tl.load(bias + column)
    return low, high * rate * tl.load(scale + HALF + column).to(tl.float32) + tl.load(bias + HALF + column)


@triton.jit
def _step(
    packed, angle, ssm, key, value, dt_bias, D, B_bias, C_bias, B_norm, C_norm, mimo_x, mimo_z, mimo_o, y,
    width, at_x, at_B, at_C, at_dt, at_A, at_trap, at_angles,
    H: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    FLOOR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence a program."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group, own = head // (H // G), b * H + head
    packed += b * width
    row, column = tl.arange(0, P), tl.arange(0, HALF)

    dt = softplus(tl.load(packed + at_dt + head).to(tl.float32) + tl.load(dt_bias + head))
    decay = tl.exp(-tl.maximum(softplus(tl.load(packed + at_A + head).to(tl.float32)), FLOOR) * dt)
    gate = tl.sigmoid(tl.load(packed + at_trap + head).to(tl.float32))
    late, now = (1 - gate) * dt, gate * dt

    turns = tl.load(packed + at_angles + column, mask=column < A, other=0.0).to(tl.float32)
    turns = (2 * tl.sigmoid(2 * turns) - 1) * 3.141592653589793 * dt
    total = tl.load(angle + own * A + column, mask=column < A, other=0.0) + turns
    total -= tl.floor(total / 6.283185307179586) * 6.283185307179586
    tl.store(angle + own * A + column, total, mask=column < A)
    cos, sin = tl.cos(total), tl.sin(total)

    x, before = tl.load(packed + at_x + head * P + row).to(tl.float32), tl.load(value + own * P + row).to(tl.float32)
    z = tl.load(packed + head * P + row).to(tl.float32)
    tl.store(value + own * P + row, x.to(value.dtype.element_ty))
    place = ssm + own * (2 * P * HALF) + row[:, None] * (2 * HALF) + column[None, :]
    low, high = tl.load(place), tl.load(place + HALF)
    new_low, new_high = tl.zeros_like(low), tl.zeros_like(high)
    for rank in tl.static_range(R):
        given, passed = x, before
        if mimo_x is not None:
            mixed = tl.load(mimo_x + (head * R + rank) * P + row)
            given, passed = x * mixed, before * mixed
        kept = key + (own * R + rank) * (2 * HALF) + column
        low += (late * passed)[:, None] * tl.load(kept).to(tl.float32)[None, :]
        high += (late * passed)[:, None] * tl.load(kept + HALF).to(tl.float32)[None, :]
        at = (group * R + rank) * (2 * HALF)
        k_low, k_high = _normed(packed + at_B + at, B_norm, B_bias + (head * R + rank) * (2 * HALF), column, HALF, EPS)
        k_low, k_high = k_low * cos - k_high * sin, k_low * sin + k_high * cos
        tl.store(kept, k_low.to(key.dtype.element_ty))
        tl.store(kept + HALF, k_high.to(key.dtype.element_ty))
        new_low += (now * given)[:, None] * k_low[None, :]
        new_high += (now * given)[:, None] * k_high[None, :]
    low, high = decay * low + new_low, decay * high + new_high
    tl.store(place, low)
    tl.store(place + HALF, high)

    out = tl.zeros_like(x)
    skip = tl.load(D + head)
    for rank in tl.static_range(R):
        at = (group * R + rank) * (2 * HALF)
        q_low, q_high = _normed(packed + at_C + at, C_norm, C_bias + (head * R + rank) * (2 * HALF), column, HALF, EPS)
        q_low, q_high = q_low * cos - q_high * sin, q_low * sin + q_high * cos
        o = tl.sum(low * q_low[None, :] + high * q_high[None, :], 1)
        given, gated, weight = x, z, 1.0
        if mimo_x is not None:
            ours = (head * R + rank) * P + row
            given, gated, weight = x * tl.load(mimo_x + ours), z * tl.load(mimo_z + ours), tl.load(mimo_o + ours)
        out += weight * (o + skip * given) * gated * tl.sigmoid(gated)
    tl.store(y + b * (H * P) + head * P + row, out.to(y.dtype.element_ty))
