"""The Mamba-3 mixer between its two projections, one token at a time in plain torch: the definition.

Mamba-3: Improved Sequence Modeling using State Space Principles (ICLR 2026), with the parametrisation of mamba-ssm
2.3.2.post1 (modules/mamba3.py). For a head, with the gate g = sigmoid(trap) and angles a summed over all tokens so far,

    q_t, k_t = turn(a_t) (norm(C_t) + C_bias), turn(a_t) (norm(B_t) + B_bias)       [rank, state_dim]
    v_t      = x_t * mimo_x                                                         [rank, head_dim]
    S_t      = e^(A_t dt_t) (S_t-1 + (1 - g_t) dt_t v_t-1' k_t-1) + g_t dt_t v_t' k_t
    o_t      = q_t S_t' + D v_t
    y_t      = sum over rank of mimo_o * o_t * silu(z_t * mimo_z)

so the step from t-1 to t integrates the input by a trapezoid whose two ends weigh 1 - g_t and g_t. With rank 1 (SISO) there
are no mimo weights: they are ones.

Two layouts differ from mamba-ssm's, by a permutation of rows of its in_proj: B and C are packed group by group (groups, rank,
state_dim) so that tensor ranks hold contiguous rows, and state column i is turned with column i + state_dim / 2 whatever
the rank (mamba-ssm: for rank 1 with its neighbour).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

A_FLOOR = 1e-4  # the least decay per unit of dt
NORM_EPSILON = 1e-5  # of the norms of B and C


class Shape(NamedTuple):
    """Sizes of what one tensor rank holds; `angles` is whole on every rank, the heads share them."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    rank: int
    angles: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def parts(self) -> dict[str, int]:
        """Widths of what the input projection packs, in its order."""
        keys = self.groups * self.rank * self.state_dim
        heads = dict.fromkeys(("dt", "A", "trap"), self.heads)
        return {"z": self.inner, "x": self.inner, "B": keys, "C": keys, **heads, "angles": self.angles}


class Weights(NamedTuple):
    """Parameters of the scan. [heads]: dt_bias, D. [heads, rank, state_dim]: the biases. [state_dim]: the norms.
    [heads, rank, head_dim]: mimo_*, None where the rank is 1."""

    dt_bias: Tensor
    D: Tensor
    B_bias: Tensor
    C_bias: Tensor
    B_norm: Tensor
    C_norm: Tensor
    mimo_x: Tensor | None = None
    mimo_z: Tensor | None = None
    mimo_o: Tensor | None = None

    def chunk(self, pieces: int) -> list["Weights"]:
        """Those of each of so many equal parts of the heads."""
        names = [name for name, weight in self._asdict().items() if weight is not None and not name.endswith("_norm")]
        parts = zip(*(getattr(self, name).chunk(pieces) for name in names), strict=True)
        return [self._replace(**dict(zip(names, part, strict=True))) for part in parts]


class State(NamedTuple):
    """What a sequence is remembered by. angle [b, heads, angles] and ssm [b, heads, head_dim, state_dim] in fp32;
    k [b, heads, rank, state_dim], turned, and x [b, heads, head_dim]: the last token's, for the trapezoid."""

    angle: Tensor
    ssm: Tensor
    k: Tensor
    x: Tensor

    @classmethod
    def zeros(cls, batch: int, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> "State":
        h, p, n, _, r, a = shape
        sizes = ((h, a), (h, p, n), (h, r, n), (h, p))
        kinds = (torch.float32, torch.float32, dtype, dtype)
        return cls(*(torch.zeros(batch, *s, device=device, dtype=k) for s, k in zip(sizes, kinds, strict=True)))


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """x [..., heads, rank, state_dim] turned by angle [..., heads, angles]: column i with column i + state_dim / 2."""
    rest = x.size(-1) // 2 - angle.size(-1)
    angle = F.pad(angle, (0, rest)).unsqueeze(-2)
    low, high = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)


def scan(
    packed: Tensor, weights: Weights, shape: Shape, state: State | None = None, documents: Tensor | None = None
) -> tuple[Tensor, State]:
    """The mixer's output [s, b, heads * head_dim] for packed [s, b, sum of shape.parts], and the state after the last token.

    documents: [b, s] non-decreasing numbers; where the number changes the state starts afresh.
    Computes in fp32, or fp64 where `packed` is.
    """
    dtype = torch.promote_types(packed.dtype, torch.float32)
    length, batch, _ = packed.shape
    shares = shape.heads // shape.groups
    z, x, B, C, dt, A, trap, angles = packed.to(dtype).split(list(shape.parts.values()), -1)
    z, x = (t.unflatten(-1, (shape.heads, shape.head_dim)) for t in (z, x))
    dt = F.softplus(dt + weights.dt_bias)
    decay = torch.exp(-F.softplus(A).clamp(min=A_FLOOR) * dt)
    gate = torch.sigmoid(trap)
    turns = math.pi * torch.tanh(angles).unsqueeze(-2) * dt.unsqueeze(-1)

    def normed(t: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        t = t.unflatten(-1, (shape.groups, shape.rank, shape.state_dim))
        t = F.rms_norm(t, (shape.state_dim,), norm.to(dtype), NORM_EPSILON)
        return t.repeat_interleave(shares, 2) + bias

    k, q = normed(B, weights.B_norm, weights.B_bias), normed(C, weights.C_norm, weights.C_bias)
    ones = x.new_ones(1, 1, 1)
    mimo_x, mimo_z, mimo_o = (ones if w is None else w for w in (weights.mimo_x, weights.mimo_z, weights.mimo_o))

    angle, ssm, k_last, x_last = State.zeros(batch, shape, x.device, dtype) if state is None else state
    ys = []
    for t in range(length):
        if documents is not None and t > 0:
            same = (documents[:, t] == documents[:, t - 1]).to(dtype)
            ssm, k_last = ssm * same[:, None, None, None], k_last * same[:, None, None, None]
        angle = angle + turns[t]
        k_t, q_t = turn(k[t], angle), turn(q[t], angle)
        old = torch.einsum("bhrn,bhrp->bhpn", k_last.to(dtype), x_last.unsqueeze(2) * mimo_x)
        new = torch.einsum("bhrn,bhrp->bhpn", k_t, x[t].unsqueeze(2) * mimo_x)
        step, decayed, g = (v[t, :, :, None, None] for v in (dt, decay, gate))
        ssm = decayed * (ssm + (1 - g) * step * old) + g * step * new
        o = torch.einsum("bhpn,bhrn->bhrp", ssm, q_t) + weights.D[:, None, None] * x[t].unsqueeze(2) * mimo_x
        ys.append((mimo_o * o * F.silu(z[t].unsqueeze(2) * mimo_z)).sum(2))
        k_last, x_last = k_t, x[t]
    y = torch.stack(ys).flatten(2).to(packed.dtype)
    # Only differences of angles matter.
    return y, State(angle.remainder(2 * math.pi), ssm, k_last.to(packed.dtype), x_last.to(packed.dtype))
