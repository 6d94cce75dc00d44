"""Which projections keep their FP8 input; what comes of it is checked inside Transformer Engine (tests/gpu/test_bf16_parts.py)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from harness import Case, on_ranks

from nam_megatron.runtime import fp8_inputs


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", ["*E-", "+DE/*-", "ME3R"])
def test_attentions_output_projections_and_the_shared_experts_first(pattern):
    def told(rig):
        fp8_inputs.provide([rig.model])
        return {name for name, m in rig.model.named_modules() if getattr(m, "save_original_input", None) is False}

    def meant(rig):
        ends = ("self_attention.linear_proj", "shared_experts.linear_fc1")
        return {name for name, _ in rig.model.named_modules() if name.endswith(ends)}

    case = Case(pattern)
    (found,), (wanted,) = on_ranks(case, told), on_ranks(case, meant)
    assert found == wanted
    assert len(wanted) == sum(pattern.count(letter) for letter in "*+DE")
