"""Experts by one grouped GEMM inside an exported model (torch side)."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nam_megatron.blocks.moe.torch_gemm import TorchGemm
from nam_megatron.runtime.served import served


def unserved(config: Any) -> Iterator[str]:
    sizes = config.moe
    rows = (sizes["expert_hidden_size"], sizes["latent_size"] or config.hidden_size)
    yield from (f"torch's grouped GEMM takes widths that 8 divides, not {n}" for n in rows if n % 8)
    yield from (problem.message for problem in TorchGemm.unserved())


def put(mixer: Any) -> None:
    mixer.experts.forward = served(_experts, mixer.experts)


def _experts(self: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    activate = sys.modules[type(self).__module__].activate
    experts, order = chosen.flatten().sort(stable=True)
    counts = (chosen.flatten().unsqueeze(0) == torch.arange(len(self.up), device=x.device).unsqueeze(1)).sum(1)
    ends = counts.cumsum(0).to(torch.int32)
    shares = shares.flatten()[order, None]
    y = F.grouped_mm(x[order // chosen.size(1)], self.up.mT, offs=ends)
    y = activate(y if self.up_bias is None else y + self.up_bias[experts], self.config)
    y = F.grouped_mm((y * shares).to(x.dtype), self.down.mT, offs=ends)
    if self.down_bias is not None:
        y = y + (self.down_bias[experts] * shares).to(x.dtype)
    return y[order.argsort()].view(*chosen.shape, -1).sum(1)
