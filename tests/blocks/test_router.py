"""The router's fork in Triton's interpreter, and inside Megatron's real HybridModel on a CPU."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import interpreter
import megatron.core.tensor_parallel.random as rng
from harness import Case, on_ranks, step
from megatron.core.transformer.moe.router import TopKRouter

from nam_megatron.blocks.moe import router
from nam_megatron.blocks.moe.layer import ForkedMoELayer, NamMoELayer


def test_the_kernels():
    assert "35 passed" in interpreter.passes("tests/gpu/test_router.py")


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("gemm", ["transformer_engine", "torch"])
@pytest.mark.parametrize("config", [{}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}], ids=str)
def test_the_fork_changes_no_bit(layout, gemm, config):
    """Against one tensor that three read, whose gradients autograd adds."""

    def run(on, rig):
        # Recomputation keeps the state of a GPU's generator.
        rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        (layer,) = [m for m in rig.model.modules() if isinstance(m, NamMoELayer)][:1]
        assert type(layer) is (ForkedMoELayer if on else NamMoELayer)
        assert type(layer.router) is (router.ForkingRouter if on else TopKRouter)
        step(rig)
        return {name: p.main_grad.clone() for name, p in rig.model.named_parameters()}

    half = dict(params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16)
    case = Case("*E-E", dispatcher="local", expert_gemm=gemm, config=config | half, **layout)
    ours, theirs = (
        on_ranks(replace(case, keys={"moe": {"fused_router_gradient": on}}), partial(run, on)) for on in (True, False)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        assert not [name for name, g in expected.items() if not torch.equal(found[name], g)]
        assert any(g.any() for name, g in expected.items() if "router.weight" in name)


@pytest.mark.slow
def test_the_kernels_of_experts():
    assert "42 passed" in interpreter.passes("tests/gpu/test_last_first.py")
