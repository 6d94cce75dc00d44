"""GQA as a Megatron layer: Megatron's own modules, as its stock hybrid stack has them (torch side; megatron-core 0.19.2)."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from nam_megatron.blocks.attention.block import Attention
from nam_megatron.runtime.slots import NO_CROSS, NO_MLP
from nam_megatron.words.site import Site

# The input norm is inside linear_qkv; Megatron itself puts TENorm on q and k when --qk-layernorm is given.


def spec(backend: BackendSpecProvider, block: Attention, site: Site) -> ModuleSpec:
    """The whole layer."""
    parts = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
    )
    attention = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    layer = TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add)
    return ModuleSpec(TransformerLayer, submodules=layer)


def empty(block: Attention, site: Site) -> frozenset[str]:
    return NO_CROSS | NO_MLP | {"input_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm"}
