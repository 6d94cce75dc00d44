"""What stands before and behind M2RNN's recurrence, each in one pass over memory (Triton): convolution with SiLU, gate with norm."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from nam_megatron.errors import Problem, raise_if

REACH = 2**31  # elements that a 32-bit offset reaches
ROWS, CHANNELS = 16, 64  # tile of the convolution; a program sums its weights' gradient over ROWS * STRIPS rows
STRIPS = 4
PROGRAMS = 1024  # at most, of the gate's gradients


def unreachable(*tensors: Tensor) -> Iterator[Problem]:
    """Offsets within a sequence batch are 32 bits wide: wider ones would cost instructions in a recurrence that is bound by them."""
    for x in tensors:
        if (most := sum((size - 1) * abs(step) for size, step in zip(x.shape, x.stride(), strict=True))) >= REACH:
            tokens = x.size(0) * x.size(1)
            message = f"M2RNN's kernels reach {REACH:,} numbers of a tensor, and {tokens:,} tokens are {most + 1:,}"
            hint = "fewer or shorter sequences a micro batch, or more tensor ranks"
            yield Problem(message, key="schedule.micro_batch_size", hint=hint)
            return


@triton.jit
def _taps(
    x, weight, bias, start, r, c, rows, channels, x_row, batch,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The convolution before its SiLU. Row r is token r // batch; a tap before the document's first token reads 0."""
    t, here = r // batch, c < channels
    acc = tl.zeros((ROWS, CHANNELS), tl.float32) + tl.load(bias + c, mask=here, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        tap = tl.load(weight + c * WIDTH + WIDTH - 1 - back, mask=here, other=0.0).to(tl.float32)
        seen = (r < rows)[:, None] & here[None, :] & (t - back >= start)[:, None]
        acc += tap[None, :] * tl.load(x + (r - back * batch)[:, None] * x_row + c[None, :], mask=seen, other=0.0)
    return acc


@triton.jit
def _conv_forward(
    x, weight, bias, starts, out, rows, channels, x_row, batch,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok = (r < rows)[:, None] & (c < channels)[None, :]
    start = tl.load(starts + r // batch, mask=r < rows, other=0) if starts is not None else r * 0
    acc = _taps(x, weight, bias, start, r, c, rows, channels, x_row, batch, WIDTH, ROWS, CHANNELS)
    tl.store(out + r[:, None] * channels + c[None, :], acc * tl.sigmoid(acc), mask=ok)


@triton.jit
def _conv_backward_pre(
    x, weight, bias, starts, dout, dpre, sums, rows, channels, x_row, batch,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Gradient before the SiLU, and this program's share of the weights' and the bias's: sums [programs, WIDTH + 1, channels]."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = c < channels
    sums += tl.program_id(0) * (WIDTH + 1) * channels + c
    d_bias = tl.zeros((CHANNELS,), tl.float32)
    d_taps = ()
    for _ in tl.static_range(WIDTH):
        d_taps = d_taps + (tl.zeros((CHANNELS,), tl.float32),)
    for strip in range(STRIPS):
        r = (tl.program_id(0) * STRIPS + strip) * ROWS + tl.arange(0, ROWS)
        ok = (r < rows)[:, None] & here[None, :]
        start = tl.load(starts + r // batch, mask=r < rows, other=0) if starts is not None else r * 0
        acc = _taps(x, weight, bias, start, r, c, rows, channels, x_row, batch, WIDTH, ROWS, CHANNELS)
        s = tl.sigmoid(acc)
        at = r[:, None] * channels + c[None, :]
        g = tl.load(dout + at, mask=ok, other=0.0) * s * (1 + acc * (1 - s))
        tl.store(dpre + at, g, mask=ok)
        d_bias += tl.sum(g, 0)
        more = ()
        for back in tl.static_range(WIDTH):
            seen = ok & (r // batch - back >= start)[:, None]
            tap = tl.load(x + (r - back * batch)[:, None] * x_row + c[None, :], mask=seen, other=0.0)
            more = more + (d_taps[back] + tl.sum(g * tap, 0),)
        d_taps = more
    for back in tl.static_range(WIDTH):
        tl.store(sums + (WIDTH - 1 - back) * channels, d_taps[back], mask=here)
    tl.store(sums + WIDTH * channels, d_bias, mask=here)


@triton.jit
def _conv_backward_x(
    dpre, weight, starts, dx, rows, channels, batch, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok = (r < rows)[:, None] & (c < channels)[None, :]
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for ahead in tl.static_range(WIDTH):
        late = r + ahead * batch
        reads = late < rows
        if starts is not None:  # the later token has this one in its window only within the document
            reads = reads & (tl.load(starts + late // batch, mask=reads, other=0) <= r // batch)
        tap = tl.load(weight + c * WIDTH + WIDTH - 1 - ahead, mask=c < channels, other=0.0).to(tl.float32)
        acc += tap[None, :] * tl.load(dpre + late[:, None] * channels + c[None, :], mask=ok & reads[:, None], other=0.0)
    tl.store(dx + r[:, None] * channels + c[None, :], acc, mask=ok)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, starts):
        (tokens, batch, channels), width = x.shape, weight.size(-1)
        out = torch.empty(tokens, batch, channels, device=x.device, dtype=x.dtype)
        grid = triton.cdiv(tokens * batch, ROWS), triton.cdiv(channels, CHANNELS)
        _conv_forward[grid](
            x, weight, bias, starts, out, tokens * batch, channels, x.stride(1), batch, width, ROWS, CHANNELS
        )
        ctx.save_for_backward(x, weight, bias, starts)
        return out

    @staticmethod
    def backward(ctx, dout):
        x, weight, bias, starts = ctx.saved_tensors
        (tokens, batch, channels), width = x.shape, weight.size(-1)
        rows, columns = tokens * batch, triton.cdiv(channels, CHANNELS)
        programs = triton.cdiv(rows, ROWS * STRIPS)
        dpre = torch.empty(rows, channels, device=x.device, dtype=torch.float32)
        sums = torch.empty(programs, width + 1, channels, device=x.device, dtype=torch.float32)
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _conv_backward_pre[(programs, columns)](
            x, weight, bias, starts, dout.contiguous(), dpre, sums, rows, channels, x.stride(1), batch,
            width, ROWS, CHANNELS, STRIPS,
        )  # fmt: skip
        _conv_backward_x[(triton.cdiv(rows, ROWS), columns)](
            dpre, weight, starts, dx, rows, channels, batch, width, ROWS, CHANNELS
        )
        total = sums.sum(0)
        return dx, total[:width].T.unsqueeze(1).to(weight.dtype), total[width].to(bias.dtype), None


def conv(x: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """naive.conv on a GPU. x: [s, b, c], a slice of the last axis of a contiguous tensor or a whole one; sums in fp32."""
    assert x.stride(2) == 1 and x.stride(0) == x.size(1) * x.stride(1) and weight.is_contiguous()
    raise_if(unreachable(x))
    starts = None
    if cu_seqlens is not None:  # the first token of each token's document
        assert x.size(1) == 1
        tokens = torch.arange(x.size(0), device=x.device, dtype=torch.int32)
        document = torch.searchsorted(cu_seqlens, tokens, right=True).clamp(max=cu_seqlens.numel() - 1) - 1
        starts = cu_seqlens[document]
    return _Conv.apply(x, weight, bias, starts)


@triton.jit
def _gated(y, v, g, d, r, c, ok, y_row, v_row, g_row):
    """(y + D v, SiLU(g), sigmoid(g), v) of row r, fp32."""
    vt = tl.load(v + r * v_row + c, mask=ok, other=0.0).to(tl.float32)
    gt = tl.load(g + r * g_row + c, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(gt)
    open_ = tl.load(y + r * y_row + c, mask=ok, other=0.0).to(tl.float32) + tl.load(d + c, mask=ok, other=0.0) * vt
    return open_, gt * s, s, vt


@triton.jit
def _gate_forward(
    y, v, g, d, weight, squares, out, rows, width, total, eps, y_row, v_row, g_row,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FIRST: sum the squares of each row; LAST: normalise by them. Both, unless other ranks hold a part of the row."""
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    ok = c < width
    opened, silu, _, _ = _gated(y, v, g, d, r, c, ok, y_row, v_row, g_row)
    u = opened * silu
    if FIRST:
        square = tl.sum(u * u)
        tl.store(squares + r, square)
    else:
        square = tl.load(squares + r)
    if LAST:
        wt = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + r * width + c, u * tl.rsqrt(square / total + eps) * wt, mask=ok)


@triton.jit
def _gate_backward(
    y, v, g, d, weight, squares, dout, dots, dy, dv, dg, sums, rows, width, total, eps, y_row, v_row, g_row,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FIRST: the product of each row's normalised output with its gradient; LAST: the gradients. sums: [programs, 2, width]."""
    c = tl.arange(0, BLOCK)
    ok = c < width
    wt = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    dt = tl.load(d + c, mask=ok, other=0.0)
    d_sum, w_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for r in range(tl.program_id(0), rows, tl.num_programs(0)):
        opened, silu, s, vt = _gated(y, v, g, d, r, c, ok, y_row, v_row, g_row)
        u = opened * silu
        dn = tl.load(dout + r * width + c, mask=ok, other=0.0).to(tl.float32)
        if FIRST:
            dot = tl.sum(u * wt * dn)
            tl.store(dots + r, dot)
        else:
            dot = tl.load(dots + r)
        if LAST:
            scale = tl.rsqrt(tl.load(squares + r) / total + eps)
            du = scale * (wt * dn - u * (scale * scale * dot / total))
            d_open = du * silu
            tl.store(dy + r * width + c, d_open, mask=ok)
            tl.store(dv + r * width + c, d_open * dt, mask=ok)
            tl.store(dg + r * width + c, du * opened * (s + silu * (1 - s)), mask=ok)
            d_sum += d_open * vt
            w_sum += dn * u * scale
    if LAST:
        sums += tl.program_id(0) * 2 * width + c
        tl.store(sums, d_sum, mask=ok)
        tl.store(sums + width, w_sum, mask=ok)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, v, g, d, weight, eps, group):
        rows, width = y.shape
        parts = 1 if group is None else group.size()
        squares = torch.empty(rows, device=y.device, dtype=torch.float32)
        out = torch.empty(rows, width, device=y.device, dtype=y.dtype)
        sizes = rows, width, width * parts, eps, y.stride(0), v.stride(0), g.stride(0)
        block = triton.next_power_of_2(width)
        if parts > 1:
            _gate_forward[(rows,)](y, v, g, d, weight, squares, out, *sizes, True, False, block)
            all_reduce(squares, group=group)
        _gate_forward[(rows,)](y, v, g, d, weight, squares, out, *sizes, parts == 1, True, block)
        ctx.save_for_backward(y, v, g, d, weight, squares)
        ctx.sizes, ctx.block, ctx.parts, ctx.group = sizes, block, parts, group
        return out

    @staticmethod
    def backward(ctx, dout):
        y, v, g, d, weight, squares = ctx.saved_tensors
        rows, width = y.shape
        programs = min(rows, PROGRAMS)
        dout, dots = dout.contiguous(), torch.empty_like(squares)
        dy, dv, dg = (torch.empty(rows, width, device=y.device, dtype=x.dtype) for x in (y, v, g))
        sums = torch.empty(programs, 2, width, device=y.device, dtype=torch.float32)
        tensors = y, v, g, d, weight, squares, dout, dots, dy, dv, dg, sums
        if ctx.parts > 1:
            _gate_backward[(programs,)](*tensors, *ctx.sizes, True, False, ctx.block)
            all_reduce(dots, group=ctx.group)
        _gate_backward[(programs,)](*tensors, *ctx.sizes, ctx.parts == 1, True, ctx.block)
        d_sum, w_sum = sums.sum(0)
        return dy, dv, dg, d_sum.to(d.dtype), w_sum.to(weight.dtype), None, None


def gate(
    y: Tensor, v: Tensor, g: Tensor, d: Tensor, weight: Tensor, eps: float, group: ProcessGroup | None = None
) -> Tensor:
    """naive.gate on a GPU: [s, b, heads * V]. v and g may be slices of the last axis of a contiguous tensor; d is fp32."""
    tokens, batch = g.shape[:2]
    rows = [x.flatten(2).flatten(0, 1) for x in (y, v, g)]
    assert all(x.stride(1) == 1 for x in rows) and d.dtype == torch.float32
    raise_if(unreachable(y, v, g))
    return _Gate.apply(*rows, d, weight, eps, group).view(tokens, batch, -1)
