"""Mamba-2's norm by group in Triton's interpreter."""

import interpreter


def test_the_kernels():
    assert "12 passed, 3 deselected" in interpreter.passes("tests/gpu/test_mamba2_norm.py")
