"""Experts with an optimizer and gradient buffers of their own in every layout (torch side).

Megatron has them apart where they are sharded otherwise than the rest, and 0.19.2 cannot read a checkpoint of two optimizers into one or
back ("Expected 2 entries in state dict"). Where they are not, the group that they are reduced over has the same ranks.
"""

from collections.abc import Sequence

import torch

from nam_megatron.mends import Plan


def install(models: Sequence[torch.nn.Module], plan: Plan | None) -> None:
    """Mark the experts' parameters as Megatron does."""
    for model in models:
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False
