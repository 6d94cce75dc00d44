"""Experts multiplied by QuACK's GEMMs of rows of any number (quack-kernels, CuTe DSL; torch side).

Where experts' rows begin is read on the GPU. Weights' gradients are added in fp32 to Megatron's buffers as they leave the tensor cores:
nothing is rounded to bf16 before, and no kernel adds afterwards.
"""

import importlib.metadata
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from nam_megatron.errors import Problem

VERSION = "0.6.5"  # the only one that has been tried
SERVED = (9, 0)  # compute capability


class QuackGemm:
    """QuACK's, as experts.py calls them."""

    @staticmethod
    def unserved() -> Iterator[Problem]:
        """Another GPU than Hopper's, none, or a host without the library; nothing else is put in its place."""
        key = "model.blocks.moe.expert_gemm"
        try:
            found = importlib.metadata.version("quack-kernels")
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != VERSION:
            hint = f"install the extra `quack` of nam_megatron, or set `{key}=torch`"
            yield Problem(f"quack-kernels {VERSION} is needed, and this host has {found}", key, hint)
        elif not torch.cuda.is_available() or torch.cuda.get_device_capability() != SERVED:
            yield Problem("QuACK's GEMMs have been run on Hopper alone", key, f"set `{key}=torch`")

    @staticmethod
    def product(rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        """rows [rows, k] by expert, weights [experts, k, n], bounds [experts + 1] -> [rows, n]."""
        from quack.gemm_interface import gemm

        return gemm(rows, weights, cu_seqlens_m=bounds, tuned=False)

    @staticmethod
    def gradients(d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """d_out [rows, n], rows [rows, k] -> the weights' [experts, n, k]."""
        return _gradients(d_out, rows, bounds, rows.dtype)

    @staticmethod
    def addends(d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """What `add` adds, where the buffers do not lie in order: fp32."""
        return _gradients(d_out, rows, bounds, torch.float32)

    @staticmethod
    def add(total: Tensor, d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """Add the weights' gradients to total [experts, n, k] -> what autograd gets for them, [experts, n, k], which nobody reads."""
        from quack.gemm_interface import gemm_add_inplace

        gemm_add_inplace(d_out.mT, rows, total, cu_seqlens_k=bounds, tuned=False)
        return _unread(total.shape[1:], rows.dtype, rows.device).expand(total.shape)


def _gradients(d_out: Tensor, rows: Tensor, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    from quack.gemm_interface import gemm

    return gemm(d_out.mT, rows, out_dtype=dtype, cu_seqlens_k=bounds, tuned=False)


@cache
def _unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One for all layers, as Transformer Engine has it (module/base.py, get_dummy_wgrad, 2.20)."""
    return torch.zeros(shape, dtype=dtype, device=device)
