"""Megatron's Mamba-2 mixer without its copy of the input projection's output (torch side).

core/ssm/mamba_mixer.py of megatron-core 0.19.2 has the sequence before the batch. mamba-ssm wants the batch first, so the mixer copies
the packed z, x, B, C, dt, and the linear layer copies their gradient back. mamba-ssm 2.3.2.post1 and causal-conv1d 1.7.0 read strides,
and the gradient has those of its tensor: a transposed view does. So does our norm behind the scan (norm.py), with `strided_norm`.
"""

import copy
from functools import partial
from typing import Any

import megatron.core.ssm.mamba_mixer as upstream
import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.blocks.mamba2.norm import group_norm
from nam_megatron.runtime.aligned import align, with_columns
from nam_megatron.runtime.gpu import interpreted
from nam_megatron.words.site import Site


def spec(backend: BackendSpecProvider, block: Mamba2, site: Site) -> ModuleSpec:
    """The mixer: Megatron's own, but for `strided`, `strided_norm` and `padded_projection`."""
    parts = upstream.MambaMixerSubmodules(
        in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear()
    )
    if not block.strided:
        return ModuleSpec(upstream.MambaMixer, submodules=parts)
    ours = StridedNormMambaMixer if block.strided_norm else StridedMambaMixer
    columns = block.columns(site) if block.padded_projection else None
    return ModuleSpec(ours, params={"columns": columns}, submodules=parts)


class StridedMambaMixer(upstream.MambaMixer):
    """MambaMixer whose scan reads the projection's output where it lies. Batches of one sample lie the same either way.

    columns: aligned.align's multiple, for columns of zeros; None: there are none.
    """

    def __init__(self, config: Any, *args: Any, columns: int | None = None, **kwargs: Any):
        # It refuses FP8 by the columns that it has without the zeros; Transformer Engine multiplies in FP8 by a context, not by this.
        plain = copy.copy(config)
        plain.fp8 = None if columns else config.fp8
        super().__init__(plain, *args, **kwargs)
        self.config = config
        self.padded = columns is not None
        if columns:
            align(self.in_proj, columns)

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """[s, b, z + x + B + C + dt, and zeros of a padded projection] -> [s, b, inner], gated and normalised."""
        assert packed_seq_params is None and not self.D_has_hdim, "nothing of ours asks for either"
        if self.padded:
            zxBCdt = _Narrow.apply(zxBCdt, len(self.in_proj.weight))
        states = {"state_dtype": self.mamba_training_ssm_states_dtype} if upstream.MAMBA_HAS_STATE_DTYPE else {}
        y = upstream.mamba_split_conv1d_scan_combined(
            zxBCdt.transpose(0, 1),
            self.cp.get_conv1d_weight().squeeze(1),
            self.cp.get_conv1d_bias(),
            self.cp.get_dt_bias().float(),
            -torch.exp(self.cp.get_A_log().float()),
            D=self.cp.get_D(),
            chunk_size=self.chunk_size,
            activation=self.activation,
            headdim=self.headdim,
            ngroups=self.cp.ngroups_local_tpcp,
            norm_before_gate=self.norm_before_gate,
            **states,
        )
        return self._normed(y.transpose(0, 1))

    def _normed(self, y: Tensor) -> Tensor:
        """y: [s, b, inner], batch first in memory."""
        y = self.cp.post_conv_ssm(y.contiguous(), None)
        return self.norm(y) if self.rmsnorm else y


class StridedNormMambaMixer(StridedMambaMixer):
    """StridedMambaMixer whose norm reads the scan's output where it lies."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self.rmsnorm and self.cp.cp_size == 1, "block.py refuses context ranks"
        # The module is called as before, for its hooks. No bound method: a deep copy gets a partial of its own.
        self.norm.forward = partial(_norm, self.norm)

    def _normed(self, y: Tensor) -> Tensor:
        return self.norm(y)


class _Narrow(torch.autograd.Function):
    """The first columns. Autograd's own backward pass fills all columns with zeros before it copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:
        ctx.columns = x.size(-1)
        return x[..., :columns]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return with_columns(gradient, ctx.columns), None


def _norm(self: Any, x: Tensor, *gate: Tensor) -> Tensor:
    """Megatron's gated norm; in training the scan has gated its output already."""
    if gate or not (x.is_cuda or interpreted()):
        return type(self).forward(self, x, *gate)
    return group_norm(x, self.weight, self.group_size, self.eps)
