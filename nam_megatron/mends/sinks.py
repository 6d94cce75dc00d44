"""Attention's sinks are counted by the norm that clips, on every tensor rank (torch side).

megatron-core 0.19.2 counts a parameter on the first tensor rank alone, unless it is marked as sharded. `softmax_offset`, a number for each
of a rank's own heads, is made by Transformer Engine (2.20, DotProductAttention), and neither marks it.
"""

from collections.abc import Sequence

import torch

from nam_megatron.mends import Plan


def install(models: Sequence[torch.nn.Module], plan: Plan | None) -> None:
    """Mark each rank's sinks as its own."""
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("core_attention.softmax_offset"):
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0
