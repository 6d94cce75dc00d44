"""M2RNN's recurrence on a GPU (Triton 3.6, no other dependency); README.md derives it.

One program of one warp owns `rows` rows of the state of one head of one sequence and keeps them in registers over all tokens:
the rows of h do not see each other. Every `tokens` tokens it stores them. The backward pass walks these blocks from the last to
the first, computes the states of a block again in registers, and then carries only the gradient of the state through it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.m2rnn.elementwise import conv, gate

__all__ = ["Config", "conv", "gate", "scan"]

# Triton's interpreter knows no inline assembly.
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
# tanh x = 1 - 2 / (1 + 2^(c x)): c goes into k and W, so that it costs nothing.
_C = tl.constexpr(2.8853900817779268)
_EXACT_TANH = tl.constexpr(
    "{.reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; "
    "fma.rn.f32 $0, t, 0fC0000000, 0f3F800000;}"
)


@dataclass(frozen=True)
class Config:
    """How the kernels are cut. Chosen from measurements (benchmarks/m2rnn_h200.json), not tuned at run time.

    rows: of the state that a program owns. tokens: between two states kept for the backward pass; as many are unrolled.
    exact: tanh to 3e-7 (absolute) from 2^x and 1/x; else the hardware's own, to 5e-4 (relative). None: exact for fp32 inputs.
    """

    rows: int = 16
    warps: int = 1
    tokens: int = 4
    exact: bool | None = None

    def exact_for(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 if self.exact is None else self.exact


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    """tanh(x / c), or tanh(x) of the hardware."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            _EXACT_TANH if EXACT else "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 - 2 / (1 + tl.exp2(x if EXACT else x * _C))


@triton.jit
def _split(x):
    """x as a sum of two bf16 numbers, to 2^-16. Cutting x off costs one instruction where rounding it costs a slow one."""
    top = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return top.to(tl.bfloat16), (x - top).to(tl.bfloat16)


@triton.jit
def _split_once(x):
    """_split with rounding, to 2^-17, for what stays the same over all tokens."""
    top = x.to(tl.bfloat16)
    return top, (x - top.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _matmul(x, hi, lo, acc):
    """acc + x (hi + lo) on bf16 tensor cores, nearly as exact as fp32: only the product of the two small parts is left out."""
    x_hi, x_lo = _split(x)
    acc = tl.dot(x_hi, hi, acc)
    rest = tl.dot(x_hi, lo)
    rest = tl.dot(x_lo, hi, rest)
    return acc + rest


@triton.jit
def _load(p, at, index, ok):
    return tl.load(p + at + index, mask=ok, other=0.0)


@triton.jit
def _step(h, kt, vt, ft, w_hi, w_lo, EXACT: tl.constexpr):
    """(z, next h). Past the end k and v are 0 and f is 1, which leaves h as it is."""
    kt = kt.to(tl.float32) * (_C if EXACT else 1.0)
    z = _tanh(_matmul(h, w_hi, w_lo, kt[:, None] * vt.to(tl.float32)[None, :]), EXACT)
    return z, (1 - ft) * z + ft * h


@triton.jit
def _fetch(p):
    """Ask the L2 for what the addresses `p` hold, and do not wait."""
    if _ASSEMBLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _stack(xs, N: tl.constexpr):
    """N vectors as the columns of a matrix; N is a power of two."""
    for level in tl.static_range(4):
        if N >> level > 1:
            pairs = ()
            for i in tl.static_range(N >> (level + 1)):
                pairs = pairs + (tl.join(xs[i], xs[i + (N >> (level + 1))]),)
            xs = pairs
    return tl.reshape(xs[0], (xs[0].shape[0], N))


@triton.jit
def _span(cu, n, tokens, TOKENS: tl.constexpr):
    """Of sequence n: its first token, its length, its batch index and its first block of states."""
    if cu is None:
        return tokens * 0, tokens, n, n * tl.cdiv(tokens, TOKENS)
    else:
        first = tl.load(cu + n)
        return first, tl.load(cu + n + 1) - first, n * 0, first // TOKENS + n


@triton.jit
def _forward(
    q, k, v, f, w, h0, cu, y, states, last,
    tokens, q_token, q_batch, k_token, k_batch, v_token, v_batch, f_token, f_batch, y_token, y_batch, y_part,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    part, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    first, length, batch, block = _span(cu, n, tokens, TOKENS)
    batch, first = batch.to(tl.int64), first.to(tl.int64)
    rows, cols, square = part * ROWS + tl.arange(0, ROWS), tl.arange(0, V), tl.arange(0, V)[:, None] * V
    q += batch * q_batch + first * q_token
    k += batch * k_batch + first * k_token
    v += batch * v_batch + first * v_token + head * V
    f += batch * f_batch + first * f_token + head
    y += part.to(tl.int64) * y_part + batch * y_batch + first * y_token + head * V
    tile = rows[:, None] * V + cols[None, :]
    own = (n.to(tl.int64) * heads + head) * K * V
    if states is not None:
        states += (block.to(tl.int64) * heads + head) * K * V
    w_hi, w_lo = _split_once(tl.load(w + head * V * V + square + cols[None, :]) * (_C if EXACT else 1.0))
    h = tl.load(h0 + own + tile) if h0 is not None else tl.zeros((ROWS, V), tl.float32)

    # Inputs are loaded one block ahead, into registers.
    now = ()
    for u in tl.static_range(TOKENS):
        ok = u < length
        now = now + (
            (
                _load(q, u * q_token, rows, ok),
                _load(k, u * k_token, rows, ok),
                _load(v, u * v_token, cols, ok),
                tl.load(f + u * f_token, mask=ok, other=1.0),
            ),
        )
    for start in range(0, length, TOKENS):
        if states is not None:
            tl.store(states + tile, h)
            states += heads * K * V
        ahead, ys = (), ()
        for u in tl.static_range(TOKENS):
            qt, kt, vt, ft = now[u]
            _, h = _step(h, kt, vt, ft, w_hi, w_lo, EXACT)
            ys = ys + (tl.sum(qt.to(tl.float32)[:, None] * h, 0),)
            t = start + TOKENS + u
            ok = t < length
            ahead = ahead + (
                (
                    _load(q, t * q_token, rows, ok),
                    _load(k, t * k_token, rows, ok),
                    _load(v, t * v_token, cols, ok),
                    tl.load(f + t * f_token, mask=ok, other=1.0),
                ),
            )
        now = ahead
        # One store of a block: each would cost a way through shared memory and a barrier.
        t = start + tl.arange(0, TOKENS)
        tl.store(y + t[None, :] * y_token + cols[:, None], _stack(ys, TOKENS), mask=(t < length)[None, :])
    tl.store(last + own + tile, h)


@triton.jit
def _backward(
    q, k, v, f, w, states, cu, dy, dlast, dq, dk, dv, df, dw, dh0,
    tokens, q_token, q_batch, k_token, k_batch, v_token, v_batch, f_token, f_batch, y_token, y_batch,
    k_head, dk_token, dk_batch, v_part, df_part, df_token, df_batch,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    EXACT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    part, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    first, length, batch, block = _span(cu, n, tokens, TOKENS)
    batch, first = batch.to(tl.int64), first.to(tl.int64)
    rows, cols, square = part * ROWS + tl.arange(0, ROWS), tl.arange(0, V), tl.arange(0, V)[:, None] * V
    q += batch * q_batch + first * q_token
    k += batch * k_batch + first * k_token
    v += batch * v_batch + first * v_token + head * V
    f += batch * f_batch + first * f_token + head
    dy += batch * y_batch + first * y_token + head * V
    dq += head.to(tl.int64) * k_head + batch * dk_batch + first * dk_token
    dk += head.to(tl.int64) * k_head + batch * dk_batch + first * dk_token
    dv += part.to(tl.int64) * v_part + batch * y_batch + first * y_token + head * V
    df += part.to(tl.int64) * df_part + batch * df_batch + first * df_token + head
    tile = rows[:, None] * V + cols[None, :]
    own = (n.to(tl.int64) * heads + head) * K * V
    blocks = tl.cdiv(length, TOKENS)
    states += ((block.to(tl.int64) + blocks) * heads + head) * K * V
    wt = tl.load(w + head * V * V + square + cols[None, :])
    w_hi, w_lo = _split_once(wt * (_C if EXACT else 1.0))
    back_hi, back_lo = _split_once(tl.trans(wt))
    carry = tl.load(dlast + own + tile) if dlast is not None else tl.zeros((ROWS, V), tl.float32)
    dw_sum = tl.zeros((V, V), tl.float32)

    for index in range(0, blocks):
        start = (blocks - 1 - index) * TOKENS
        states -= heads * K * V
        h = tl.load(states + tile)
        # The next block, which registers have no room for.
        t = tl.minimum(tl.maximum(start - TOKENS, 0) + tl.arange(0, TOKENS), length - 1)
        _fetch(q + t * q_token + part * ROWS)
        _fetch(k + t * k_token + part * ROWS)
        _fetch(v + t * v_token)
        _fetch(f + t * f_token)
        _fetch(dy + t * y_token)
        _fetch(states - tl.minimum(start, 1) * heads * K * V + rows * V)
        before, zs = (), ()
        for u in tl.static_range(TOKENS):
            t = start + u
            ok = t < length
            before = before + (h,)
            kt, vt = _load(k, t * k_token, rows, ok), _load(v, t * v_token, cols, ok)
            z, h = _step(h, kt, vt, tl.load(f + t * f_token, mask=ok, other=1.0), w_hi, w_lo, EXACT)
            zs = zs + (z,)
        for u in tl.static_range(TOKENS - 1, -1, -1):
            t = start + u
            ok = t < length
            qt, kt = _load(q, t * q_token, rows, ok).to(tl.float32), _load(k, t * k_token, rows, ok).to(tl.float32)
            vt, dyt = _load(v, t * v_token, cols, ok).to(tl.float32), _load(dy, t * y_token, cols, ok).to(tl.float32)
            ft = tl.load(f + t * f_token, mask=ok, other=1.0)
            prev, z = before[u], zs[u]
            dh = carry + qt[:, None] * dyt[None, :]
            dx = (1 - ft) * (1 - z * z) * dh
            carry = _matmul(dx, back_hi, back_lo, ft * dh)
            tl.store(df + t * df_token, tl.sum(dh * (prev - z)), mask=ok)
            tl.store(dq + t * dk_token + rows, tl.sum(h * dyt[None, :], 1), mask=ok)
            tl.store(dk + t * dk_token + rows, tl.sum(dx * vt[None, :], 1), mask=ok)
            tl.store(dv + t * y_token + cols, tl.sum(dx * kt[:, None], 0), mask=ok)
            if SPLIT:
                dx_hi, dx_lo = _split(dx)
                dw_sum = _matmul(tl.trans(prev), dx_hi, dx_lo, dw_sum)
            else:
                dw_sum = tl.dot(tl.trans(prev).to(tl.bfloat16), dx.to(tl.bfloat16), dw_sum)
            h = prev
    if dh0 is not None:
        tl.store(dh0 + own + tile, carry)
    dw += ((n.to(tl.int64) * tl.num_programs(0) + part) * heads + head) * V * V
    tl.store(dw + square + cols[None, :], dw_sum)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, w, h0, cu_seqlens, config):
        (tokens, batch, heads, width), depth = v.shape, q.size(-1)
        count = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        blocks = count * triton.cdiv(tokens, config.tokens) if cu_seqlens is None else tokens // config.tokens + count
        parts = depth // config.rows
        kept = any(ctx.needs_input_grad)
        new = {"device": q.device, "dtype": torch.float32}
        y = torch.empty(parts, tokens, batch, heads, width, **(new if parts > 1 else new | {"dtype": v.dtype}))
        states = torch.empty(blocks, heads, depth, width, **new) if kept else None
        last = torch.empty(count, heads, depth, width, **new)
        _forward[(parts, heads, count)](
            q, k, v, f, w, h0, cu_seqlens, y, states, last,
            tokens, *_steps(q), *_steps(k), *_steps(v), *_steps(f), *_steps(y[0]), y.stride(0),
            K=depth, V=width, ROWS=config.rows, TOKENS=config.tokens, EXACT=config.exact_for(q), num_warps=config.warps,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, f, w, states, cu_seqlens)
        ctx.config, ctx.given = config, h0 is not None
        ctx.set_materialize_grads(False)
        return (y.sum(0).to(v.dtype) if parts > 1 else y[0]), last

    @staticmethod
    def backward(ctx, dy, dlast):
        q, k, v, f, w, states, cu_seqlens = ctx.saved_tensors
        (tokens, batch, heads, width), depth, config = v.shape, q.size(-1), ctx.config
        count = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        parts = depth // config.rows
        new = {"device": q.device, "dtype": torch.float32}
        dy = torch.zeros_like(v, memory_format=torch.contiguous_format) if dy is None else dy.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        dq, dk = torch.empty(2, heads, tokens, batch, depth, **new)
        dv = torch.empty(parts, tokens, batch, heads, width, **new)
        df = torch.empty(parts, tokens, batch, heads, **new)
        dw = torch.empty(count, parts, heads, width, width, **new)
        dh0 = torch.empty(count, heads, depth, width, **new) if ctx.given and ctx.needs_input_grad[5] else None
        _backward[(parts, heads, count)](
            q, k, v, f, w, states, cu_seqlens, dy, dlast, dq, dk, dv, df, dw, dh0,
            tokens, *_steps(q), *_steps(k), *_steps(v), *_steps(f), *_steps(dy),
            dq.stride(0), *_steps(dq[0]), dv.stride(0), df.stride(0), *_steps(df[0]),
            K=depth, V=width, ROWS=config.rows, TOKENS=config.tokens, EXACT=config.exact_for(q),
            SPLIT=q.dtype == torch.float32, num_warps=config.warps,
        )  # fmt: skip
        sums = dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype), df.sum(0), dw.sum((0, 1))
        return *sums, dh0, None, None


def _steps(x: Tensor) -> tuple[int, int]:
    """Elements from a token to the next, and from a sequence of the batch to the next."""
    return x.stride(0), x.stride(1)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    w: Tensor,
    h0: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    config: Config = Config(),  # noqa: B008  frozen
) -> tuple[Tensor, Tensor]:
    """naive.scan on a GPU. q, k and v in fp32 or bf16 (all three alike), the rest in fp32; cu_seqlens is int32.

    q, k and v may be slices of one tensor. States, products and sums are fp32; y has v's type.
    """
    heads, width = v.shape[2:]
    assert q.dtype == k.dtype == v.dtype and f.dtype == w.dtype == torch.float32
    assert q.stride(2) == k.stride(2) == v.stride(3) == f.stride(2) == 1 and v.stride(2) == width
    assert w.shape == (heads, width, width) and w.is_contiguous() and (h0 is None or h0.is_contiguous())
    assert q.size(2) % config.rows == 0 and config.rows >= 16
    assert cu_seqlens is None or (cu_seqlens.dtype == torch.int32 and v.size(1) == 1)
    return _Scan.apply(q, k, v, f, w, h0, cu_seqlens, config)
