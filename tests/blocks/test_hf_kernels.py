"""Kernels inside an exported model, in Triton's interpreter."""

import interpreter


def test_kernels_in_an_export_in_tritons_interpreter():
    assert "37 passed" in interpreter.passes("tests/gpu/test_hf_kernels.py")
