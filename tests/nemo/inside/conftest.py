"""The environment of the checks in here, which share one process: Megatron without Transformer Engine, so that it takes its own
functions; a fork of that as the oracle; then Bridge, with a stand-in of Transformer Engine; and a pretended GPU.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import megatron.core.utils as core_utils
import pytest
import torch
from megatron.training.argument_utils import ArgumentGroupFactory
from packaging.version import Version

gc.disable()  # until all is imported, which stays
TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "cpu")]
sys.path += [str(TESTS / "nemo" / "stand_in"), str(TESTS.parent / "benchmarks")]

import pretend  # noqa: E402, F401  imports Megatron
import tiers  # noqa: E402

from nam_megatron.nemo import engine  # noqa: E402
from nam_megatron.runtime import oracle as asked  # noqa: E402


class Forked(asked.Oracle):
    """The oracle as a fork of this process, which has imported Megatron already."""

    def __enter__(self) -> "Forked":
        (reads, asks), (hears, answers) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(answers, 1)
            os.close(asks)
            sys.stdin = os.fdopen(reads)
            asked._serve()
            os._exit(0)
        os.close(reads)
        os.close(answers)
        self._questions, self._answers = os.fdopen(asks, "w"), os.fdopen(hears)
        self.ask = functools.cache(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.close()
        os.waitpid(self.pid, 0)
        self._answers.close()

    def _ask(self, argv: tuple, world: int, capability: tuple, env: tuple, ours: tuple = ()) -> asked.Answer:
        return super().ask(argv, world, capability, dict(env), ours)


ORACLE = Forked().__enter__()
engine.provide()

import nam_megatron.nemo.pretrain  # noqa: E402, F401  imports Bridge

# What each fork would do anew: read its parsers' help from source code, and look for garbage among all that was imported.
ArgumentGroupFactory._get_field_docstrings = lambda *_: {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    assert not tiers.few(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def oracle() -> Iterator[Forked]:
    yield ORACLE
    ORACLE.__exit__()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs may ask for what Transformer Engine brings; nothing is built."""
    for module, name in asked.fusions():
        monkeypatch.setattr(module, name, getattr(module, name) or object())
    monkeypatch.setattr(core_utils, "_te_version", Version(asked.TE_VERSION))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Sets the number of processes that a runner is said to have started. Whatever a test does to the environment is undone."""
    before = dict(os.environ)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    yield lambda world: monkeypatch.setenv("WORLD_SIZE", str(world))
    os.environ.clear()
    os.environ.update(before)
