"""Mamba-3's scan inside an exported model (torch side)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nam_megatron.blocks.mamba3 import kernel
from nam_megatron.blocks.mamba3.block import odd_sizes
from nam_megatron.blocks.mamba3.naive import Shape, State, Weights
from nam_megatron.blocks.mamba3.step import step as one_step
from nam_megatron.runtime.served import remembers, served

FORGET = -1e4  # of a token that is padding: softplus of it is 0
KEPT = ("angle", "ssm", "key", "value")  # what State is called in a cache


def unserved(config: Any) -> Iterator[str]:
    sizes: Mapping[str, int] = config.mamba3
    tiles, rank = (sizes["head_dim"], sizes["state_dim"]), sizes["mimo_rank"]
    yield from (text for _, text in odd_sizes(*tiles, rank, _chunk(rank)))


def put(mixer: Any) -> None:
    mixer.mix = served(_mix, mixer)


def _chunk(rank: int) -> int:
    """Tokens of Mamba-3 at once: what a walk takes, where it can."""
    return max(1, 64 // rank)


def _mix(self: Any, packed: Tensor, step: Any) -> Tensor:
    if remembers(self, packed, step):
        return type(self).mix(self, packed, step)
    shape = Shape(self.heads, self.width, self.states, self.groups, self.rank, self.angles)
    state = step.state(self.index)
    weights = Weights(
        self.dt_bias, self.D, self.B_bias, self.C_bias, self.B_norm.weight, self.C_norm.weight,
        self.mimo_x, self.mimo_z, self.mimo_o,
    )  # fmt: skip
    before = State(*(state[name] for name in KEPT)) if "key" in state else None
    if before is not None and packed.size(1) == 1 and step.real is None:
        return one_step(packed[:, 0], weights, shape, before).unsqueeze(1)
    if step.real is not None:
        z, x, B, C, dt, rest = packed.split((*self.parts[:5], sum(self.parts[5:])), -1)
        real = step.real.unsqueeze(-1)
        packed = torch.cat((z, torch.where(real, x, 0), B, C, torch.where(real, dt, FORGET), rest), -1)
    packed, chunk = packed.transpose(0, 1), _chunk(self.rank)
    if step.cache is None:
        return kernel.scan(packed, weights, shape, chunk).transpose(0, 1)
    if before is not None:
        before = before._replace(angle=before.angle.squeeze(1))
    y, after = kernel.prefill(packed, weights, shape, chunk, before)
    for name, kept in zip(KEPT, after._replace(angle=after.angle.unsqueeze(1)), strict=True):
        state[name] = kept
    return y.transpose(0, 1)
