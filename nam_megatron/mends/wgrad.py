"""Weight gradients added to the gradient buffer by the GEMM that computes them, without APEX (torch side).

With gradient_accumulation_fusion Transformer Engine's layers use their own GEMMs; Megatron's own linear layers, of which a hybrid model
has the output layer, want a kernel of APEX's (megatron-core 0.19.2, tensor_parallel/layers.py). TE's GEMM does the same. What autograd is
given for the weight is read by nobody; MTP's and the main loss's are added all the same, so it has no element.
"""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers

from nam_megatron.mends import Plan
from nam_megatron.runtime.wgrad import nothing


def install(plan: Plan | None) -> None:
    """Give Megatron's linear layers nothing to hand to autograd, and TE's GEMM (2.20) where APEX's kernel is not installed."""
    layers.get_dummy_wgrad = nothing
    # As it is without a word; torch warns of it where nobody has said so.
    torch.sparse.check_sparse_tensor_invariants.disable()
    if layers._grad_accum_fusion_available:
        return
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        """main_grad [n, k] += dy^T x, of x [tokens, k] and dy [tokens, n]."""
        general_gemm(x, dy, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True
