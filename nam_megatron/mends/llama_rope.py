"""Llama-3.1's angles in a hybrid model (torch side): Megatron's own scaling, which its HybridModel does not ask for.

megatron-core 0.19.2: GPTModel hands `rope_scaling` to RotaryEmbedding, HybridModel does not (core/models/hybrid/hybrid_model.py).
"""

from collections.abc import Sequence

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_model import HybridModel

from nam_megatron.mends import Plan


def install(models: Sequence[HybridModel], plan: Plan) -> None:
    """Scale the angles of a model's stages."""
    feature = plan.recipe.feature.llama_rope
    assert feature is not None, "the series asks"
    for model in models:
        rope = model.rotary_pos_emb
        assert type(rope) is RotaryEmbedding, "other angles than plain RoPE's"
        rope.inv_freq = rope._apply_scaling(rope.inv_freq, factor=feature.factor)
