"""What a kind's kernels do inside an exported model, for `serve.py` of its folder (torch side).

Such a file has
    unserved(config)  why its kernels cannot compute a model of this config.json
    put(mixer)        lets them compute in a layer's mixer, which is the export's own and may not be on its GPU yet
What they do not do is the export's plain torch, which computes the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs


def on_gpu(x: Tensor) -> None:
    """Raises ValueError where the kernels cannot compute."""
    if not (x.is_cuda or knobs.runtime.interpret):
        raise ValueError(f"kernels: `nam_megatron` computes on a GPU, and the model is on `{x.device}`")


def served(compute: Callable[..., Tensor], module: Any) -> Callable[..., Tensor]:
    """`compute` in the place of a method. A partial, which a deep copy makes anew for its own modules."""
    return partial(_served, compute, module)


def _served(compute: Callable[..., Tensor], self: Any, x: Tensor, *rest: Any) -> Tensor:
    """A layer's part on the GPU of its input, which need not be the current one; the model may have left it, or bf16, since `fuse`."""
    on_gpu(x)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"kernels: `nam_megatron` computes in bf16, and the model in {x.dtype}".replace("torch.", ""))
    with torch.cuda.device_of(x):
        return compute(self, x, *rest)


def remembers(self: Any, x: Tensor, step: Any) -> bool:
    """Whether gradients are asked for through a cache: of the tokens, of frozen layers' own weights, or of tokens before."""
    if step.cache is None or not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (x, *self.parameters(), *step.state(self.index).values()))
