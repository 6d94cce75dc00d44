"""Mixers of the tests' own for the M slot. The stand-ins for Transformer Engine's modules are the prove command's."""

import torch
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from nam_megatron.prove.cpu_modules import (  # noqa: F401
    CoreAttention,
    CpuBackend,
    GatedNorm,
    GroupedLinear,
    Norm,
    NormColumnLinear,
    ReplicatedLinear,
    gated_delta_rule,
    l2norm,
    mamba2_scan,
)


def toy_mixer(expand: int) -> ModuleSpec:
    """A mixer of our own for the M slot: what one must honour, with a TP-sharded vector of its own (`decay`)."""
    parts = MambaMixerSubmodules(in_proj=NormColumnLinear, out_proj=CpuBackend().row_parallel_linear())
    return ModuleSpec(ToyMixer, params={"expand": expand}, submodules=parts)


class ToyMixer(MegatronModule):
    """out_proj(leaky cumulative sum of in_proj(norm(x)) gated by itself); sees the whole sequence, as a scan does."""

    def __init__(self, config, submodules, d_model, expand, layer_number, pg_collection, name, **_):
        super().__init__(config)
        self.expand, self.tp_group = expand, pg_collection.tp
        inner = expand * d_model
        common = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        # No packed projection: a column shard of [value, gate] would part them, so one projection serves as both.
        self.in_proj = build_module(
            submodules.in_proj, d_model, inner, init_method=config.init_method, gather_output=False, **common
        )
        self.out_proj = build_module(
            submodules.out_proj,
            inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        self.decay = torch.nn.Parameter(torch.zeros(inner // self.tp_group.size()))
        self.decay.tensor_model_parallel, self.decay.partition_dim = True, 0

    def forward(self, x, inference_context=None, *, inference_params=None, packed_seq_params=None):
        u, _ = self.in_proj(x)
        return self.out_proj(torch.cumsum(u, 0) * torch.sigmoid(u + self.decay))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        own = make_sharded_tensors_for_checkpoint(
            {"decay": self.decay}, prefix, {"decay": 0}, sharded_offsets, **groups
        )
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            own |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        return own
