"""Fused MLA and DSA on two tensor ranks, sequence parallel, are what they are on one: output and every gradient by name.

Needs two GPUs and fails with one: there, leave it out by `--ignore tests/gpu/test_two_gpus.py`. tests/blocks/test_tensor_parallel.py
runs the same program on a CPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from test_tensor_parallel import assert_same_on_two_ranks

pytestmark = pytest.mark.gpu


def test_two_tensor_ranks_are_one(tmp_path):
    found = torch.cuda.device_count()
    assert found >= 2, f"{found} GPU, two are needed: leave this file out by `--ignore tests/gpu/test_two_gpus.py`"
    # bf16: each rank rounds its share of a sum. A share that is missing or counted twice is off by a half and more.
    assert_same_on_two_ranks(tmp_path, limit=5e-2)
