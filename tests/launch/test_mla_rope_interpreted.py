"""The kernels of tests/gpu/test_mla_rope_patch.py on a CPU, by Triton's interpreter: wrong as they come, right when patched."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.host import patch

TESTS = Path(__file__).parents[1] / "gpu" / "test_mla_rope_patch.py"


def run(root: Path, *words: str) -> str:
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [
        sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS), *words,
    ]  # fmt: skip
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_patched_all_block_sizes_pass(queue, unpacked):
    patch.apply(queue, unpacked)
    assert "16 passed" in run(unpacked)


def test_pristine_the_block_sizes_that_do_not_divide_56_fail(unpacked):
    # The query alone: the other kernels of a pristine Megatron write outside their tensors and may take the process with them.
    said = run(unpacked, "-k", "query and (16 or 64)")
    assert re.findall(r"FAILED \S*::test_query\[(\d+)\]", said) == ["16"] and "1 passed" in said
