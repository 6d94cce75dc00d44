"""A dense MLP as a Megatron layer: Megatron's own modules, as its stock hybrid stack has them (torch side; megatron-core 0.19.2)."""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from nam_megatron.blocks.mlp.block import Mlp
from nam_megatron.runtime.slots import NO_ATTENTION, NO_CROSS
from nam_megatron.words.site import Site

# The norm is inside linear_fc1; the activation is the config's function.


def spec(backend: BackendSpecProvider, block: Mlp, site: Site) -> ModuleSpec:
    """The whole layer."""
    mlp = MLPSubmodules(
        linear_fc1=backend.column_parallel_layer_norm_linear(), linear_fc2=backend.row_parallel_linear()
    )
    parts = TransformerLayerSubmodules(mlp=partial(MLP.as_mlp_submodule, submodules=mlp), mlp_bda=get_bias_dropout_add)
    return ModuleSpec(MLPLayer, submodules=parts)


def empty(block: Mlp, site: Site) -> frozenset[str]:
    return NO_CROSS | NO_ATTENTION | {"pre_mlp_layernorm", "mlp.activation_func"}
