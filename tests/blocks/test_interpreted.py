"""Tests of tests/gpu in Triton's interpreter: Mamba-2's norm by group, kernels of several configurations in a deterministic run, kernels
inside an exported model."""

import interpreter
import pytest

PASSED = {"mamba2_norm": "12 passed, 3 deselected", "autotune": "7 passed", "hf_kernels": "37 passed"}


@pytest.mark.few(1)
@pytest.mark.parametrize("file", PASSED)
def test_the_kernels(file):
    assert PASSED[file] in interpreter.passes(f"tests/gpu/test_{file}.py")
