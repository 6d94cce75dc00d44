"""Experts multiplied by QuACK's GEMMs of rows of any number (quack-kernels, CuTe DSL; torch side).

Its functions choose tiles by trying all of them, or take one for everything; what is called here is behind them (0.6.5, gemm_interface.py).
Where experts' rows begin is read on the GPU. Weights' gradients are added in fp32 to Megatron's buffers as they leave the tensor cores:
nothing is rounded to bf16 before, and no kernel adds afterwards.
"""

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nam_megatron.blocks.moe.torch_gemm import add_to
from nam_megatron.errors import Problem
from nam_megatron.packages import INSTALL, QUACK_KEY, installed, without_quack

SERVED = (9, 0)  # compute capability


class QuackGemm:
    """QuACK's, as experts.py calls them."""

    @staticmethod
    def unserved() -> Iterator[Problem]:
        """Another GPU than Hopper's, none, or a host without the library; nothing else is put in its place."""
        if problems := list(without_quack(installed)):
            yield from problems
        elif not torch.cuda.is_available() or torch.cuda.get_device_capability() != SERVED:
            yield Problem("QuACK's GEMMs have been run on Hopper alone", key=QUACK_KEY, hint=f"set `{QUACK_KEY}=torch`")
        else:
            try:
                importlib.import_module("quack.gemm_interface")
            except Exception as err:  # whatever a broken installation throws
                why = f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
                message = f"QuACK cannot be imported: {why}"
                yield Problem(message, key=QUACK_KEY, hint=f"{INSTALL}; or set `{QUACK_KEY}=torch`")

    @staticmethod
    def product(rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        """rows [rows, k] by expert, weights [experts, k, n], bounds [experts + 1] -> [rows, n]."""
        from quack.gemm_interface import gemm_tuned

        out = rows.new_empty(len(rows), weights.size(-1))
        gemm_tuned.fn(rows, weights, out, cu_seqlens_m=bounds, config=_tile(out.size(-1)))
        return out

    @staticmethod
    def gradients(d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """d_out [rows, n], rows [rows, k] -> the weights' [experts, n, k]."""
        return _gradients(d_out, rows, bounds, rows.dtype)

    @staticmethod
    def add(totals: Sequence[Tensor], whole: Tensor | None, d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """By the GEMM itself where `whole` is given and TMA takes it, else from a tensor in fp32 for all experts."""
        from quack.gemm_interface import gemm_tuned

        # Without a sharded optimizer Megatron lets a parameter of odd size shift what lies behind it; TMA wants 16 bytes.
        if whole is not None and whole.data_ptr() % 16 == 0:
            # Faster where the longer side has the tiles' 128: there the same product, transposed.
            wide = whole.size(1) < whole.size(2)
            a, b, out = (rows, d_out, whole.mT) if wide else (d_out, rows, whole)
            gemm_tuned.fn(a.mT, b, out, None, cu_seqlens_k=bounds, add_to_output=True)
        else:
            for total, more in zip(totals, _gradients(d_out, rows, bounds, torch.float32), strict=True):
                add_to(total, more)
        shape = totals[0].shape
        return _unread(shape, rows.dtype, rows.device).expand(len(totals), *shape)


def _tile(columns: int) -> Any:
    """Of products this wide; None: QuACK's own, 128 x 192 in turns. Of 896 columns, NAM56R's experts', 192 leaves a part and 224 none:
    8 to 11 % of the time of three products, and 1 % of one (benchmarks/quack_tiles_h200.json)."""
    from quack.gemm_interface import GemmConfig

    if columns % 192 and columns % 224 == 0 and columns < 8 * 192:  # of more tiles the part that is left weighs less
        return GemmConfig(tile_m=128, tile_n=224, pingpong=False, cluster_m=1, cluster_n=2, is_dynamic_persistent=False)
    return None


def _gradients(d_out: Tensor, rows: Tensor, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    from quack.gemm_interface import gemm

    return gemm(d_out.mT, rows, out_dtype=dtype, cu_seqlens_k=bounds, tuned=False)


@cache
def _unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One for all layers, as Transformer Engine has it (module/base.py, get_dummy_wgrad, 2.20)."""
    return torch.zeros(shape, dtype=dtype, device=device)
