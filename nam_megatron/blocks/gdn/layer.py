"""Gated delta net as a Megatron layer: Megatron's own modules, as its stock hybrid stack has them (torch side; megatron-core 0.19.2)."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from nam_megatron.blocks.gdn.block import Gdn
from nam_megatron.errors import Refused
from nam_megatron.runtime.slots import NO_CROSS, NO_MLP
from nam_megatron.words.site import Site


def spec(backend: BackendSpecProvider, block: Gdn, site: Site) -> ModuleSpec:
    """The whole layer.

    Raises:
        Refused: flash-linear-attention is not installed.
    """
    if not common.HAVE_FLA:
        hint = "install `flash-linear-attention` beside Triton"
        raise Refused("the kernels of a gated delta net cannot be imported (`fla`)", key="model.blocks.gdn", hint=hint)
    parts = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_layer_norm_linear(),
        out_norm=backend.layer_norm(rms_norm=True),
        out_proj=backend.row_parallel_linear(),
    )
    mixer = ModuleSpec(GatedDeltaNet, submodules=parts)
    layer = TransformerLayerSubmodules(self_attention=mixer, self_attn_bda=get_bias_dropout_add)
    return ModuleSpec(TransformerLayer, submodules=layer)


def empty(block: Gdn, site: Site) -> frozenset[str]:
    # The input norm is inside in_proj.
    return NO_CROSS | NO_MLP | {"input_layernorm"}
