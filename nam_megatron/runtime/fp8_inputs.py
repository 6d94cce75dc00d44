"""FP8 inputs that are kept for the backward pass instead of quantised once more (torch side).

Of attention's output projection and of the shared experts' first one Megatron (0.19.2) has Transformer Engine keep the input in bf16, which
somebody else keeps as well, and cast it again for the weights' gradient: an amax and a cast of each in every backward pass. With delayed
scaling it does not.
"""

from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch.nn import Module

# The modules whose projections are told to keep their inputs as they came, and which.
WHERE: tuple[tuple[type[Module], str], ...] = (
    (Attention, "linear_proj"),  # MLA's, too
    (AbsorbedMLASelfAttention, "linear_proj"),
    (SharedExpertMLP, "linear_fc1"),
)


def provide(models: list[Any]) -> list[Any]:
    """Keep the quantised inputs of a model's stages, in the form of Megatron's hooks before wrapping."""
    for model in models:
        for module in model.modules():
            for owner, name in WHERE:
                if isinstance(module, owner):
                    # Who multiplies in bf16 has nothing to quantise, and does not look.
                    getattr(module, name).save_original_input = False
    return models
