"""M2RNN step by step in plain torch: the definition that the kernels are held to.

Mishra et al., "M2RNN: Non-Linear RNNs with Matrix-Valued States for Scalable Language Modeling" (arXiv 2603.14360), as its authors
train it (open-lm-engine/lm-engine, sequence_mixer_blocks/m2rnn). Tensors are sequence first, as everywhere in Megatron: [s, b, ...].
With `cu_seqlens` (int, [documents + 1], from 0 to s) b is 1 and every document starts anew.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce


def spans(tokens: int, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """[first, last) of each document."""
    if cu_seqlens is None:
        return [(0, tokens)]
    borders = cu_seqlens.tolist()
    return list(pairwise(borders))


def conv(x: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Causal convolution of each channel, then SiLU. x: [s, b, c]; weight: [c, 1, width]; bias: [c]."""
    width = weight.size(-1)
    parts = []
    for first, last in spans(x.size(0), cu_seqlens):
        if first == last:
            continue
        channels = F.pad(x[first:last].permute(1, 2, 0), (width - 1, 0))
        parts.append(F.conv1d(channels, weight.to(x.dtype), bias.to(x.dtype), groups=x.size(2)).permute(2, 0, 1))
    return F.silu(torch.cat(parts))


def forget(x: Tensor, dt_bias: Tensor, a_log: Tensor) -> Tensor:
    """How much of the state each head keeps, in (0, 1): exp(-A softplus(x + dt_bias)). x: [s, b, heads]; in fp32, or fp64 where x is."""
    x, dt_bias, a_log = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (x, dt_bias, a_log))
    return torch.exp(-torch.exp(a_log) * F.softplus(x + dt_bias))


class _Clipped(torch.autograd.Function):
    """Itself, with each element of its gradient in [-bound, bound]."""

    @staticmethod
    def forward(ctx, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.bound, ctx.bound), None


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    w: Tensor,
    h0: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gradient_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = f_t h_{t-1} + (1 - f_t) tanh(h_{t-1} W + k_t v_t^T), y_t = q_t h_t, for each head.

    q, k: [s, b, K], shared by all heads; v: [s, b, heads, V]; f: [s, b, heads]; w: [heads, V, V].
    h0: [sequences, heads, K, V], zero where None. Returns y [s, b, heads, V] and the last states [sequences, heads, K, V];
    sequences: b, or the documents. gradient_clip: bound of each element of what the gradient of h_t gets from later tokens, before that
    of y_t is added, as in the authors' kernels (their torch code bounds the sum). It is in units of the loss's gradient.
    """
    (tokens, batch, heads, width), depth, given = v.shape, q.size(-1), v.dtype
    q, k, v = (x.to(torch.promote_types(given, f.dtype)) for x in (q, k, v))
    borders = spans(tokens, cu_seqlens)
    if h0 is None:
        h0 = q.new_zeros(batch if cu_seqlens is None else len(borders), heads, depth, width)
    ys, last = [], []
    for n, (first, end) in enumerate(borders):
        h = h0 if cu_seqlens is None else h0[n : n + 1]
        for t in range(first, end):
            z = torch.tanh(h @ w + k[t, :, None, :, None] * v[t, :, :, None, :])
            keep = f[t, :, :, None, None]
            h = keep * h + (1 - keep) * z
            ys.append((q[t, :, None, :, None] * h).sum(2))
            if gradient_clip is not None:
                h = _Clipped.apply(h, gradient_clip)
        last.append(h)
    return torch.stack(ys).to(given), torch.cat(last)


@torch.no_grad()
def gain(k: Tensor, v: Tensor, f: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """The most that these tokens multiply the norm of a gradient by on its way from the state behind them to `h`, the one before them.

    That is the spectral norm of d h_s / d h, of each row of the state, since the rows do not see each other: [b, heads, K].
    k, v, f, w: as scan's, without a clip; h: [b, heads, K, V].
    """
    k, v = (x.to(torch.promote_types(x.dtype, f.dtype)) for x in (k, v))
    across = torch.eye(w.size(-1), dtype=h.dtype, device=h.device).expand(*h.shape, -1)  # [i, j]: d h_t[j] / d h[i]
    for t in range(len(k)):
        z = torch.tanh(h @ w + k[t, :, None, :, None] * v[t, :, :, None, :])
        keep = f[t, :, :, None, None]
        slope = (1 - keep) * (1 - z.square())
        across = keep.unsqueeze(-1) * across + (across @ w.unsqueeze(1)) * slope.unsqueeze(-2)
        h = keep * h + (1 - keep) * z
    return torch.linalg.matrix_norm(across, ord=2)


def gate(
    y: Tensor, v: Tensor, g: Tensor, d: Tensor, weight: Tensor, eps: float, group: ProcessGroup | None = None
) -> Tensor:
    """RMSNorm over all heads of (y + D v) SiLU(g), in fp32 or better.

    y, v: [s, b, heads, V]; g: [s, b, heads * V]; d, weight: [heads * V]. group: the ranks that hold the other heads.
    """
    given = y.dtype
    y, v, g = (x.flatten(2).to(torch.promote_types(given, d.dtype)) for x in (y, v, g))
    u = (y + d * v) * F.silu(g)
    square, width = u.square().sum(-1, keepdim=True), u.size(-1)
    if group is not None:
        square, width = all_reduce(square, group=group), width * group.size()
    return (u * torch.rsqrt(square / width + eps) * weight).to(given)
