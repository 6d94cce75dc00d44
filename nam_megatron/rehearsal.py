"""A run on a CPU, `cluster=cpu`: the trainer's whole program with plain torch in the place of what only a GPU has.

It shows that a recipe trains, and nothing of speed, memory or kernels: a diagnostic. What a recipe asks of a GPU by a key is
refused (laws/rehearsal.py), and no key is read otherwise than it stands. The stand-ins themselves are prove/cpu.py's.
"""

from typing import Any

from nam_megatron.blocks import NO_KERNEL
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.features.names import FEATURES

NOTE = (
    "on a CPU: a rehearsal with plain torch for kernels and gloo for NCCL; it shows nothing of speed, memory or kernels"
)

# Of a feature that a CPU has none of: the key that switches it.
SWITCHES = {"feature.cuda_graphs": "impl", "feature.fp8": "recipe"}

# What a CPU runs otherwise than the recipe says, and why: key, the value that it cannot run, what it runs instead, the reason.
ANY = object()
CPU_DOES_WITHOUT: tuple[tuple[str, Any, Any, str], ...] = (
    ("precision.cross_entropy", "fused", "megatron", NO_KERNEL),
    ("precision.cross_entropy", "compiled", "megatron", "torch.compile is off"),
    ("precision.fused_grad_accumulation", True, False, NO_KERNEL),
    ("precision.norm_kernels", "cudnn", "transformer_engine", NO_KERNEL),
    ("precision.attention_kernels", "flash_attention_4", "transformer_engine", "FlashAttention's kernels"),
    ("feature.cuda_graphs", ANY, None, "no CUDA graphs"),
    ("feature.fp8", ANY, None, "no FP8"),
    *((kind.at(key), *more) for kind in KINDS.values() for key, *more in kind.without_gpu),
    *((f"feature.{name}.{key}", *more) for name, feature in FEATURES.items() for key, *more in feature.without_gpu),
)
