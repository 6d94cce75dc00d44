"""Kernels of several configurations in a deterministic run, in Triton's interpreter; on a GPU: tests/gpu/test_autotune.py."""

import interpreter


def test_in_the_interpreter():
    assert "7 passed" in interpreter.passes("tests/gpu/test_autotune.py")
