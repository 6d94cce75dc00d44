"""Parts of an FP8 model that multiply in bf16 (torch side): Megatron's own override of a module's precision, set without its file.

megatron-core 0.19.2: `te_quant_params` of core/extensions/transformer_engine.py, which --te-precision-config-file fills by module names.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import TEQuantizationParams, TEQuantizationRecipe
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch.nn import Module

from nam_megatron.blocks.m2rnn.layer import M2RnnMixer

LATENTS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
# part -> the modules that have it, and the names of its projections
WHERE: dict[str, tuple[tuple[type[Module], tuple[str, ...]], ...]] = {
    "experts": ((TEGroupedMLP, ("linear_fc1", "linear_fc2")),),
    "shared_experts": ((SharedExpertMLP, ("linear_fc1", "linear_fc2")),),
    "latents": (
        (MultiLatentAttention, LATENTS),
        (AbsorbedMLASelfAttention, LATENTS),
        (DSAIndexer, ("linear_wq_b", "linear_wk", "linear_weights_proj")),
    ),
    "m2rnn": ((M2RnnMixer, ("in_proj", "out_proj")),),
    "mamba3_rates": (),  # rows of a projection, which its mixer multiplies by themselves
}


def provider(parts: Sequence[str]) -> Callable[[list[Any]], list[Any]]:
    """Keeps `parts` of a model's stages in bf16, in the form of Megatron's hooks before wrapping."""

    def provide(models: list[Any]) -> list[Any]:
        for model in models:
            for module in model.modules():
                for projection in _projections(module, parts):
                    projection.te_quant_params = TEQuantizationParams(TEQuantizationRecipe(), None)
                if "experts" in parts and isinstance(module, TEGroupedMLP):
                    # In FP8 it pads each expert's rows, for which it asks the host.
                    module.config = copy.copy(module.config)
                    module.config.fp8 = None
        return models

    return provide


def _projections(module: Module, parts: Sequence[str]) -> Iterator[Module]:
    for part in parts:
        for owner, names in WHERE[part]:
            if isinstance(module, owner):
                yield from (found for name in names if (found := getattr(module, name, None)) is not None)
