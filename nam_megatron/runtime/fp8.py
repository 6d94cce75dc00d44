"""What FP8 changes in a model (torch side): parts that stay in bf16, and inputs that are kept."""

from collections.abc import Mapping

from megatron.core.transformer.spec_utils import ModuleSpec

from nam_megatron.features.fp8 import Fp8


def build(fp8: Fp8, stack: ModuleSpec, layers: Mapping[str, ModuleSpec]) -> ModuleSpec:
    """The stack, with what is done to its modules before they are wrapped."""
    hooks = stack.metainfo.setdefault("hooks", [])
    if fp8.bf16_parts:
        from nam_megatron.runtime import bf16_parts

        hooks.append(bf16_parts.provider(fp8.bf16_parts))
    if fp8.keep_inputs:
        from nam_megatron.runtime import fp8_inputs

        hooks.append(fp8_inputs.provide)
    return stack
