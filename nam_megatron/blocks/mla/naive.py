"""MLA in plain torch: the definition that kernel.py is held to, and `kernels=naive`.

Any device and floating type; fp64 tensors make it a reference. Semantics are those of megatron-core 0.19.2,
transformer/multi_latent_attention.py (DeepSeek-V2, arXiv 2405.04434). Shapes: x and latents are [s, b, width], or
[t, width] when sequences are packed (THD); h is the hidden size, rq and rkv the latents' ranks, n heads, dq and dr the
widths of a query/key head without and with position, dv that of a value head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Angles of the rotary embedding.

    cos, sin: fp32 [positions, dr / 2], yarn's magnitude already in them.
    positions: int32 [t], where each packed token stands in its sequence; None: row i of [s, b, ...] stands at i.
    interleaved: channels (2i, 2i + 1) turn together, as Megatron's MLA has them; otherwise (i, i + dr / 2). What comes
      out is in halves either way.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    interleaved: bool = True

    @property
    def width(self) -> int:
        return 2 * self.cos.size(-1)


def packed_positions(cu_seqlens: Tensor, tokens: int, length: int, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """int32 [tokens]: where each token of a packed batch stands in its sequence; needs nothing from the device.

    cu_seqlens: [sequences + 1], over all context-parallel ranks. A rank of several holds chunk `cp_rank` of a sequence and
    the mirrored one. Tokens behind the last sequence, and none may point outside a table of `length`, are clamped.
    """
    starts = cu_seqlens // cp_size
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(starts) - 2)
    place = token - starts[sequence]
    if cp_size > 1:
        half = (starts[sequence + 1] - starts[sequence]) // 2
        front, back = cp_rank * half + place, (2 * cp_size - cp_rank - 2) * half + place
        place = torch.where(place < half, front, back)
    return place.clamp(max=length - 1).to(torch.int32)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gamma over the last axis, inside in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gamma.to(wide.dtype)).to(x.dtype)


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
    """Input norm, both down projections and the latent norms: [..., rq + rkv + dr], the last part not yet rotated.

    x [..., h]; gamma [h]; w_q_down [rq, h]; w_kv_down [rkv + dr, h]; gamma_q [rq] and gamma_kv [rkv], None: no latent norms;
    rope = dr.
    """
    y = rms_norm(x, gamma, eps)
    q, kv = F.linear(y, w_q_down), F.linear(y, w_kv_down)
    if gamma_q is None:
        return torch.cat((q, kv), -1)
    latent, k_rope = kv.split((kv.size(-1) - rope, rope), -1)
    return torch.cat((rms_norm(q, gamma_q, latent_eps), rms_norm(latent, gamma_kv, latent_eps), k_rope), -1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [s, b, n, dr], or [t, n, dr] when packed, turned by its positions, in halves."""
    half = rope.width // 2
    pairs = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = (t.to(wide) for t in pairs)
    cos, sin = (_at(table.to(wide), rope.positions, len(x))[(...,) + (None,) * (x.dim() - 2) + (slice(None),)]
                for table in (rope.cos, rope.sin))  # fmt: skip
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _at(table: Tensor, positions: Tensor | None, rows: int) -> Tensor:
    return table[:rows] if positions is None else table[positions]


def queries(latent: Tensor, weight: Tensor, rope: Rope, heads: int) -> Tensor:
    """[..., n, dq + dr] of latent [..., rq] and weight [n (dq + dr), rq]."""
    q = F.linear(latent, weight).unflatten(-1, (heads, -1))
    keep = q.size(-1) - rope.width
    return torch.cat((q[..., :keep], rotate(q[..., keep:], rope)), -1)


def keys_values(
    latent: Tensor, k_rope: Tensor, weight: Tensor, rope: Rope, heads: int, value: int
) -> tuple[Tensor, Tensor]:
    """Keys [..., n, dq + dr], whose rope part all heads share, and values [..., n, dv = value].

    latent [..., rkv]; k_rope [..., dr], not yet rotated; weight [n (dq + dv), rkv].
    """
    kv = F.linear(latent, weight).unflatten(-1, (heads, -1))
    k, v = kv.split((kv.size(-1) - value, value), -1)
    shared = rotate(k_rope.unsqueeze(-2), rope).expand(*k.shape[:-1], -1)
    return torch.cat((k, shared), -1), v.contiguous()


def absorbed_weight(w_q_up: Tensor, w_kv_up: Tensor, heads: int, rope: int, value: int) -> Tensor:
    """[n (rkv + dr), rq]: from the query latent straight to queries of the key latent, since q . (U c) = (U^T q) . c.

    w_q_up [n (dq + dr), rq], w_kv_up [n (dq + dv), rkv]; rope = dr, value = dv. Differentiable.
    """
    q, kv = w_q_up.unflatten(0, (heads, -1)), w_kv_up.unflatten(0, (heads, -1))
    keep = q.size(1) - rope
    up = kv[:, : kv.size(1) - value]
    return torch.cat((torch.bmm(up.transpose(1, 2), q[:, :keep]), q[:, keep:]), 1).flatten(0, 1)


def absorbed(latents: Tensor, weight: Tensor, rope: Rope, heads: int, rq: int) -> tuple[Tensor, Tensor]:
    """Queries [..., n, rkv + dr] and the one key of all heads [..., 1, rkv + dr], whose first rkv channels are the value too.

    latents [..., rq + rkv + dr] as `ingress` leaves them; weight as `absorbed_weight`.
    """
    q_latent, kv_latent, k_rope = latents.split((rq, latents.size(-1) - rq - rope.width, rope.width), -1)
    key = torch.cat((kv_latent, rotate(k_rope.unsqueeze(-2), rope).squeeze(-2)), -1)
    return queries(q_latent, weight, rope, heads), key.unsqueeze(-2)
