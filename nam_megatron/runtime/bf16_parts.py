"""Parts of an FP8 model that multiply in bf16 (torch side): Megatron's own override of a module's precision, set without its file.

megatron-core 0.19.2: `te_quant_params` of core/extensions/transformer_engine.py, which --te-precision-config-file fills by module names.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import TEQuantizationParams, TEQuantizationRecipe
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch.nn import Module

from nam_megatron.blocks import Block
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.runtime.stack import torch_side

Where = tuple[type[Module], tuple[str, ...]]  # a module, and the names of its projections


def provider(parts: Sequence[str]) -> Callable[[list[Any]], list[Any]]:
    """Keeps `parts` of a model's stages in bf16, in the form of Megatron's hooks before wrapping."""

    where = [found for kind in KINDS for found in _where(kind, parts)]

    def provide(models: list[Any]) -> list[Any]:
        for model in models:
            for module in model.modules():
                for projection in _projections(module, where):
                    projection.te_quant_params = TEQuantizationParams(TEQuantizationRecipe(), None)
                if "experts" in parts and isinstance(module, TEGroupedMLP):
                    # In FP8 it pads each expert's rows, for which it asks the host.
                    module.config = copy.copy(module.config)
                    module.config.fp8 = None
        return models

    return provide


def _where(kind: str, parts: Sequence[str]) -> Iterator[Where]:
    """What of a kind these parts are; its torch side is looked at only if it has parts."""
    if KINDS[kind].parts is not Block.parts:
        # Mamba-3's part is rows of a projection, which its mixer multiplies by themselves.
        by_part = getattr(torch_side(kind), "IN_BF16", {})
        yield from (found for part in parts for found in by_part.get(part, ()))


def _projections(module: Module, where: Sequence[Where]) -> Iterator[Module]:
    for owner, names in where:
        if isinstance(module, owner):
            yield from (found for name in names if (found := getattr(module, name, None)) is not None)
