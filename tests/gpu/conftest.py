"""What tests of kernels share, on a GPU and in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))


@pytest.fixture
def ready(monkeypatch):
    """Memory comes filled with NaN, and the interpreter is mended where it runs the kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.mend(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
