"""Parameters marked `keep_in_fp32` stay what they are among those that are cast (torch side).

The mark is the one that Megatron honours itself from 0.20 on. No module of Megatron's sets it: MambaMixer's A_log and D are made in fp32
and cast to bf16, its dt_bias is made in bf16; the optimizer's copies are fp32, the forward pass sees them rounded.
"""

from functools import wraps
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module

from nam_megatron.mends import Plan


def install(plan: Plan | None) -> None:
    """Have Megatron's wrapper put back what it has cast."""
    wrap = Float16Module.__init__

    @wraps(wrap)
    def wrapped(self: Float16Module, config: Any, module: torch.nn.Module, *words: Any, **named: Any) -> None:
        kept = [(p, p.data) for p in module.parameters() if getattr(p, "keep_in_fp32", False)]
        wrap(self, config, module, *words, **named)
        for parameter, value in kept:
            parameter.data = value

    Float16Module.__init__ = wrapped
