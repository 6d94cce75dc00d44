"""Where our Triton kernels can run (torch side)."""

from collections.abc import Iterator

import torch

from nam_megatron.errors import Problem


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on a CPU."""
    from triton import knobs  # not needed by the stock stack, whose layers import this file too

    return knobs.runtime.interpret


def runs_kernels() -> bool:
    """Whether this process has what a Triton kernel needs: a GPU, or Triton's interpreter."""
    return torch.cuda.is_available() or interpreted()


def without_gpu(title: str, kind: str, kernels: str) -> Iterator[Problem]:
    """What speaks against a block's `kernels` in this process; nothing else is put in their place."""
    if kernels == "fused" and not runs_kernels():
        key = f"execution.{kind}.kernels"
        message = f"the fused kernels of {title} need a GPU"
        yield Problem(message, key=key, hint=f"set `{key}=naive` to run it in plain torch")
