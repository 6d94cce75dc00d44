"""The exports that the checks open, with their own code, as anybody would."""

import copy
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

EXPORTS = Path(os.environ["NAM_EXPORTS"])
NAMES = sorted(path.name for path in EXPORTS.iterdir() if (path / "config.json").is_file())
MARKS = {name: pytest.mark.slow for name in NAMES if name != "author"}


def opened(name: str, dtype=torch.float32, **more):
    return AutoModelForCausalLM.from_pretrained(EXPORTS / name, trust_remote_code=True, dtype=dtype, **more)


@pytest.fixture(scope="session", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def kept(name):
    return opened(name)


@pytest.fixture
def model(kept):
    """A fresh one for each check."""
    return copy.deepcopy(kept)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 96, shape, generator=torch.Generator().manual_seed(seed))
