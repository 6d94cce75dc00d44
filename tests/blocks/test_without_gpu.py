"""Where kernels can run: on this CPU the fused ones are refused, before Megatron builds a module."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import modules

from nam_megatron.errors import Refused
from nam_megatron.runtime.stack import hybrid_stack_spec


@pytest.mark.parametrize(
    ("kind", "title", "pattern"),
    [("mla", "MLA", "+"), ("dsa", "DSA", "MMD"), ("mamba3", "Mamba-3", "3"), ("m2rnn", "M2RNN", "R")],
)
def test_fused_without_a_gpu_is_refused(kind, title, pattern):
    """Megatron's build_module would make another exception of it, without the key."""
    plan = harness.plan_of(pattern)
    harness.say(plan.recipe, kind, kernels="fused")
    with pytest.raises(Refused) as refused:
        hybrid_stack_spec(plan, modules.CpuBackend())
    (problem,) = refused.value.problems
    assert problem.key == f"execution.{kind}.kernels"
    assert f"fused kernels of {title} need a GPU" in problem.message
