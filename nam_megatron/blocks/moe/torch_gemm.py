"""Experts multiplied by torch's grouped GEMM (torch.nn.functional.grouped_mm, 2.11, CUTLASS on Hopper; torch side).

It writes a microbatch's gradients in bf16; they are added to Megatron's buffers afterwards.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.errors import Problem
from nam_megatron.runtime.gpu import interpreted

SERVED = (9, 0), (10, 0)  # compute capabilities; aten/src/ATen/native/cuda/GroupedBlas.cpp of torch 2.11
ADDED = 4096  # elements of a program that adds gradients


class TorchGemm:
    """torch's, as experts.py calls them."""

    @staticmethod
    def unserved() -> Iterator[Problem]:
        """A GPU on which torch would multiply expert by expert, and wait for the counts."""
        if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) not in SERVED:
            message = f"torch's grouped GEMM reads counts on GPUs of capability 9.0 and 10.0, and this one has {'.'.join(map(str, found))}"
            key = "execution.moe.expert_gemm"
            yield Problem(message, key=key, hint=f"set `{key}=transformer_engine`")

    @staticmethod
    def product(rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        """rows [rows, k] by expert, weights [experts, k, n], bounds [experts + 1] -> [rows, n]."""
        return F.grouped_mm(rows, weights, offs=bounds[1:])

    @staticmethod
    def gradients(d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """d_out [rows, n], rows [rows, k] -> the weights' [experts, n, k]."""
        return F.grouped_mm(d_out.mT, rows, offs=bounds[1:])

    @staticmethod
    def add(totals: Sequence[Tensor], whole: Tensor | None, d_out: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
        """In one launch where `whole` is given."""
        gradients = TorchGemm.gradients(d_out, rows, bounds)
        for total, more in [(whole, gradients)] if whole is not None else zip(totals, gradients, strict=True):
            add_to(total, more)
        return gradients


def add_to(total: Tensor, more: Tensor) -> None:
    """Both of one shape, the first contiguous."""
    if total.is_cuda or interpreted():
        _add_kernel[(triton.cdiv(total.numel(), ADDED),)](total, more, total.numel(), BLOCK=ADDED, num_warps=8)
    else:
        total.add_(more)


@triton.jit
def _add_kernel(total, more, size, BLOCK: tl.constexpr):
    # torch adds tensors of two types a few bytes at a time, and takes twice as long or more.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    tl.store(total + at, tl.load(total + at, mask=known) + tl.load(more + at, mask=known).to(tl.float32), mask=known)
