"""Which projections keep their FP8 input; what comes of it is checked inside Transformer Engine (tests/gpu/test_bf16_parts.py)."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from harness import Case, on_ranks

from nam_megatron.runtime import bf16_parts, fp8_inputs


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


def test_experts_in_bf16_change_no_other_layers_config(monkeypatch):
    """All layers share one, by which the others choose FP8."""

    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

    monkeypatch.setattr(bf16_parts, "TEGroupedMLP", Experts)
    for parts, fp8 in ((["experts"], None), ([], "hybrid")):
        config = SimpleNamespace(fp8="hybrid", hidden_size=8)
        model = torch.nn.ModuleList([Experts(config), torch.nn.Linear(1, 1)])
        (made,) = bf16_parts.provider(parts)([model])
        assert config.fp8 == "hybrid" and (made[0].config.fp8, made[0].config.hidden_size) == (fp8, 8)
