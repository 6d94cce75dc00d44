"""The environment of the checks in here: Bridge, a stand-in of Transformer Engine, and a pretended GPU."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# The oracle is a process of its own, without the stand-in.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch):
    """Sets the number of processes that a runner is said to have started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return lambda world: monkeypatch.setenv("WORLD_SIZE", str(world))


@pytest.fixture(scope="session")
def oracle() -> Iterator:
    from nam_megatron.runtime.oracle import Oracle

    with Oracle() as warm:
        yield warm
