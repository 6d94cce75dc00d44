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

from nam_megatron.blocks.m2rnn.elementwise import conv, gate, unreachable
from nam_megatron.errors import raise_if

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

    rows: of the state that a program owns. tokens: between two states kept for the backward pass, 2, 4 or 8; as many are unrolled.
    exact: tanh to 3e-7 (absolute, and relative for fp32 inputs) from 2^x and 1/x; else the hardware's own, to 5e-4 (relative). None: exact
    for fp32 inputs.
    """

    rows: int = 16
    warps: int = 1
    tokens: int = 4
    exact: bool | None = None

    def exact_for(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 if self.exact is None else self.exact


@triton.jit
def _tanh(x, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """tanh(x / c), or tanh(x) of the hardware."""
    if _ASSEMBLY:
        z = tl.inline_asm_elementwise(
            _EXACT_TANH if EXACT else "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        z = 1 - 2 / (1 + tl.exp2(x if EXACT else x * _C))
    if EXACT and WIDE:
        # Near zero the difference from 1 has lost the bits of x. A least-squares fit to 1e-7 of (tanh x / x - 1) / x^2 below 0.55.
        t = x * (1 / _C)
        y = t * t
        more = -0.3333333134651184 + y * (
            0.13333044946193695 + y * (-0.05390177294611931 + y * (0.02127799019217491 + y * -0.006567004602402449))
        )
        z = tl.where(y < 0.3, t + t * (y * more), z)
    return z


@triton.jit
def _split(x):
    """x as a sum of two bf16 numbers, to 2^-16. Cutting x off costs one instruction where rounding it costs a slow one."""
    top = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return top.to(tl.bfloat16), (x - top).to(tl.bfloat16)


@triton.jit
def _split_once(x, WIDE: tl.constexpr):
    """_split with rounding, to 2^-17, for what stays the same over all tokens. WIDE: x as it is, twice."""
    if WIDE:
        return x, x
    else:
        top = x.to(tl.bfloat16)
        return top, (x - top.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _matmul(x, hi, lo, acc):
    """acc + x (hi + lo) on bf16 tensor cores, exact to 2^-16: only the product of the two small parts is left out. acc + x hi, exact, where
    hi is fp32."""
    if hi.dtype == tl.float32:
        return tl.dot(x, hi, acc, input_precision="ieee")
    else:
        x_hi, x_lo = _split(x)
        acc = tl.dot(x_hi, hi, acc)
        rest = tl.dot(x_hi, lo)
        rest = tl.dot(x_lo, hi, rest)
        return acc + rest


@triton.jit
def _times_input(x, y, acc):
    """acc + x y, for fp32 x and y of the inputs' type."""
    if y.dtype == tl.bfloat16:
        hi, lo = _split(x)
        acc = tl.dot(hi, y, acc)
        return tl.dot(lo, y, acc)
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def _input_times(x, y, acc):
    """acc + x y, for x of the inputs' type and y, which is rounded to bf16 where x is bf16."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x, y.to(tl.bfloat16), acc)
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def _step(h, kt, vt, ft, w_hi, w_lo, EXACT: tl.constexpr):
    """(z, next h)."""
    WIDE: tl.constexpr = kt.dtype == tl.float32
    kt = kt.to(tl.float32) * (_C if EXACT else 1.0)
    z = _tanh(_matmul(h, w_hi, w_lo, kt[:, None] * vt.to(tl.float32)[None, :]), EXACT, WIDE)
    return z, (1 - ft) * z + ft * h


@triton.jit
def _token(t, length):
    """t; past the end the last token instead."""
    return tl.maximum(tl.minimum(t, length - 1), 0)


@triton.jit
def _vectors(p, start, length, stride, index, TOKENS: tl.constexpr):
    """Of each token of a block, its numbers at `index`."""
    xs = ()
    for u in tl.static_range(TOKENS):
        xs = xs + (tl.load(p + _token(start + u, length) * stride + index),)
    return xs


@triton.jit
def _columns(p, start, length, stride, index):
    """The same as the columns of a matrix, of which tensor cores take 8."""
    return tl.load(p + _token(start + tl.arange(0, 8), length)[None, :] * stride + index[:, None])


@triton.jit
def _load_state(p, ROWS: tl.constexpr, V: tl.constexpr):
    """Rows of a kept state. They lie in memory as a warp holds an accumulator in its registers, so that nothing moves between lanes."""
    x = tl.reshape(tl.load(p + tl.arange(0, ROWS * V)), (ROWS // 8, V // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(x, (0, 2, 1, 4, 3, 5)), (ROWS, V))


@triton.jit
def _keep_state(p, h, ROWS: tl.constexpr, V: tl.constexpr):
    x = tl.permute(tl.reshape(h, (ROWS // 8, 8, V // 16, 2, 4, 2)), (0, 2, 1, 4, 3, 5))
    tl.store(p + tl.arange(0, ROWS * V), tl.reshape(x, (ROWS * V,)))


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
        length = tl.load(cu + n + 1) - first
        # A last document without tokens begins past the end.
        return tl.minimum(first, tokens - 1), length, n * 0, first // TOKENS + n


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
        states += (block.to(tl.int64) * heads + head) * K * V + part * ROWS * V
    WIDE: tl.constexpr = k.dtype.element_ty == tl.float32
    w_hi, w_lo = _split_once(tl.load(w + head * V * V + square + cols[None, :]) * (_C if EXACT else 1.0), WIDE)
    h = tl.load(h0 + own + tile) if h0 is not None else tl.zeros((ROWS, V), tl.float32)

    # Inputs are loaded one block ahead, into registers.
    qs, ks = _vectors(q, 0, length, q_token, rows, TOKENS), _vectors(k, 0, length, k_token, rows, TOKENS)
    vs, fs = _vectors(v, 0, length, v_token, cols, TOKENS), _vectors(f, 0, length, f_token, 0, TOKENS)
    for start in range(0, length, TOKENS):
        if states is not None:
            _keep_state(states, h, ROWS, V)
            states += heads * K * V
        after = start + TOKENS
        q_next = _vectors(q, after, length, q_token, rows, TOKENS)
        k_next = _vectors(k, after, length, k_token, rows, TOKENS)
        v_next, f_next = (
            _vectors(v, after, length, v_token, cols, TOKENS),
            _vectors(f, after, length, f_token, 0, TOKENS),
        )
        ys = ()
        for u in tl.static_range(TOKENS):
            ft = tl.where(start + u < length, fs[u], 1.0)  # past the end the state stays
            _, h = _step(h, ks[u], vs[u], ft, w_hi, w_lo, EXACT)
            ys = ys + (tl.sum(qs[u].to(tl.float32)[:, None] * h, 0),)
        qs, ks, vs, fs = q_next, k_next, v_next, f_next
        # One store of a block: each would cost a way through shared memory and a barrier.
        t = start + tl.arange(0, TOKENS)
        tl.store(y + t[None, :] * y_token + cols[:, None], _stack(ys, TOKENS), mask=(t < length)[None, :])
    tl.store(last + own + tile, h)


@triton.jit
def _backward(
    q, k, v, f, w, states, cu, dy, dlast, dq, dk, dv, df, dw, dh0,
    tokens, q_token, q_batch, k_token, k_batch, v_token, v_batch, f_token, f_batch, y_token, y_batch,
    k_head, dk_token, dk_batch, v_part, df_part, df_token, df_batch,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, CLIP: tl.constexpr,
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
    start = (tl.cdiv(length, TOKENS) - 1) * TOKENS
    states += ((block.to(tl.int64) + tl.maximum(start, 0) // TOKENS) * heads + head) * K * V + part * ROWS * V
    wt = tl.load(w + head * V * V + square + cols[None, :])
    WIDE: tl.constexpr = k.dtype.element_ty == tl.float32
    w_hi, w_lo = _split_once(wt * (_C if EXACT else 1.0), WIDE)
    back_hi, back_lo = _split_once(tl.trans(wt), WIDE)
    carry = tl.load(dlast + own + tile) if dlast is not None else tl.zeros((ROWS, V), tl.float32)
    dw_sum = tl.zeros((V, V), tl.float32)
    few, no_rows, no_cols = tl.arange(0, 8), tl.zeros((ROWS, 8), tl.float32), tl.zeros((V, 8), tl.float32)

    # An input is loaded for the next block as soon as it has served this one: no copies, and the loads have the rest of the block's time.
    h = _load_state(states, ROWS, V)
    ks, vs = _vectors(k, start, length, k_token, rows, TOKENS), _vectors(v, start, length, v_token, cols, TOKENS)
    fs = _vectors(f, start, length, f_token, 0, TOKENS)
    k_cols, v_cols = _columns(k, start, length, k_token, rows), _columns(v, start, length, v_token, cols)
    dy_cols = _columns(dy, start, length, y_token, cols)
    for _ in range(0, tl.cdiv(length, TOKENS)):
        qs, dys = _vectors(q, start, length, q_token, rows, TOKENS), _vectors(dy, start, length, y_token, cols, TOKENS)
        before, gates, zs = (), (), ()
        for u in tl.static_range(TOKENS):
            ft = tl.where(start + u < length, fs[u], 1.0)
            before, gates = before + (h,), gates + (ft,)
            z, h = _step(h, ks[u], vs[u], ft, w_hi, w_lo, EXACT)
            zs = zs + (z,)
        earlier = tl.maximum(start - TOKENS, 0)
        states -= tl.where(start > 0, heads * K * V, 0)
        h_next = _load_state(states, ROWS, V)
        ks, vs = (
            _vectors(k, earlier, length, k_token, rows, TOKENS),
            _vectors(v, earlier, length, v_token, cols, TOKENS),
        )
        fs = _vectors(f, earlier, length, f_token, 0, TOKENS)

        # Sums over rows or columns: products with the vectors of all the block's tokens, of which one column is kept.
        dqs, dks, dvs, dfs = no_rows, no_rows, no_cols, tl.zeros((8,), tl.float32)
        for u in tl.static_range(TOKENS - 1, -1, -1):
            ft, prev, z = gates[u], before[u], zs[u]
            qt = tl.where(start + u < length, qs[u].to(tl.float32), 0.0)
            if CLIP is not None:
                carry = tl.clamp(carry, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
            dh = carry + qt[:, None] * dys[u].to(tl.float32)[None, :]
            dx = (1 - ft) * (1 - z * z) * dh
            carry = _matmul(dx, back_hi, back_lo, ft * dh)
            dqs = tl.where(few[None, :] == u, _times_input(h, dy_cols, no_rows), dqs)
            dks = tl.where(few[None, :] == u, _times_input(dx, v_cols, no_rows), dks)
            dx_t = tl.trans(dx.to(k_cols.dtype))
            dvs = tl.where(few[None, :] == u, _input_times(dx_t, k_cols, no_cols), dvs)
            dfs = tl.where(few == u, tl.sum(dh * (prev - z)), dfs)
            dw_sum = _input_times(dx_t, prev, dw_sum)
            h = prev
        t = start + few
        ok = (few < TOKENS) & (t < length)
        tl.store(dq + t[None, :] * dk_token + rows[:, None], dqs, mask=ok[None, :])
        tl.store(dk + t[None, :] * dk_token + rows[:, None], dks, mask=ok[None, :])
        tl.store(dv + t[None, :] * y_token + cols[:, None], dvs, mask=ok[None, :])
        tl.store(df + t * df_token, dfs, mask=ok)
        start, h = earlier, h_next
        k_cols, v_cols = _columns(k, start, length, k_token, rows), _columns(v, start, length, v_token, cols)
        dy_cols = _columns(dy, start, length, y_token, cols)
    if dh0 is not None:
        tl.store(dh0 + own + tile, carry)
    dw += ((n.to(tl.int64) * tl.num_programs(0) + part) * heads + head) * V * V
    tl.store(dw + cols[None, :] * V + tl.arange(0, V)[:, None], dw_sum)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, w, h0, cu_seqlens, gradient_clip, config):
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
            K=depth, V=width, ROWS=config.rows, TOKENS=config.tokens, EXACT=config.exact_for(q),
            num_warps=config.warps, num_stages=1,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, f, w, states, cu_seqlens)
        ctx.config, ctx.given, ctx.clip = config, h0 is not None, gradient_clip
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
            K=depth, V=width, ROWS=config.rows, TOKENS=config.tokens, EXACT=config.exact_for(q), CLIP=ctx.clip,
            num_warps=config.warps, num_stages=1,
        )  # fmt: skip
        sums = dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype), df.sum(0), dw.sum((0, 1))
        return *sums, dh0, None, None, None


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
    gradient_clip: float | None = None,
    config: Config = Config(),  # noqa: B008  frozen
) -> tuple[Tensor, Tensor]:
    """naive.scan on a GPU. q, k and v in fp32 or bf16 (all three alike), the rest in fp32; cu_seqlens is int32.

    q, k and v may be slices of one tensor. States, products and sums are fp32; y has v's type.

    Raises:
        Refused: more numbers in a tensor than 32-bit offsets reach.
    """
    heads, width = v.shape[2:]
    assert q.dtype == k.dtype == v.dtype and f.dtype == w.dtype == torch.float32
    assert q.stride(2) == k.stride(2) == v.stride(3) == f.stride(2) == 1 and v.stride(2) == width
    assert w.shape == (heads, width, width) and w.is_contiguous() and (h0 is None or h0.is_contiguous())
    assert q.size(2) % config.rows == 0 and config.rows >= 16 and config.tokens in (2, 4, 8)
    assert cu_seqlens is None or (cu_seqlens.dtype == torch.int32 and v.size(1) == 1)
    raise_if(unreachable(q, k, v, f))
    return _Scan.apply(q, k, v, f, w, h0, cu_seqlens, gradient_clip, config)
