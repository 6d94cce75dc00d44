"""Kernels inside an exported model, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_an_export_in_tritons_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:xdist", "tests/gpu/test_hf_kernels.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "36 passed" in done.stdout
