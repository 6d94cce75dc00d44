"""A tensor with columns of zeros behind its own, of any strides and sizes. With TRITON_INTERPRET=1 on a CPU (tests/blocks/test_aligned.py
does that)."""

import os

import pytest
import torch

from nam_megatron.runtime import aligned

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.usefixtures("ready"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize(
    "shape", [(3, 2, 2040), (5, 1, 13), (2, 4, 16)] + ([] if INTERPRETED else [(4096, 4, 8248)]), ids=str
)
def test_columns_of_zeros(shape):
    x = torch.randn(shape, device=DEVICE).bfloat16()
    for given in (x, x[..., 1:], x.transpose(0, 1)):
        for more in (0, 3, 8, 1024):
            out = aligned.with_columns(given, given.size(-1) + more)
            assert out.is_contiguous() and torch.equal(out, torch.nn.functional.pad(given, (0, more)))
