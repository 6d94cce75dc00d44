"""Kernels of several configurations in a deterministic run. Without a GPU they run in Triton's interpreter."""

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, OutOfResources

from nam_megatron.mends import autotune

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of kernels' trials, which says that one was read; put back behind a test, as what stands in for it."""
    read = []
    for name in ("prune_configs", "check_disk_cache"):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))
    monkeypatch.setattr(
        Autotuner, "do_bench", property(lambda self: lambda call, quantiles: read.append(call) or [1.0] * 3)
    )
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    yield read
    if hasattr(Autotuner, "nam_fits"):
        del Autotuner.nam_fits


def kernel(widths, fits=lambda width: True):
    """A sum by atomics, of its own making: what a configuration that was tried has added has to be gone."""

    def zeroed(width):
        def before(arguments):
            arguments["total"].zero_()
            if not fits(width):
                raise OutOfResources(width, 0, "shared memory")

        return before

    @triton.autotune([triton.Config({"WIDTH": n}, pre_hook=zeroed(n)) for n in widths], key=["n"], cache_results=True)
    @triton.jit
    def add(x, total, n, WIDTH: tl.constexpr):
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        tl.atomic_add(total, tl.sum(tl.load(x + at, at < n, other=0.0)))

    return add


def width_of(add, n=100):
    x, total = torch.ones(n, device=DEVICE), torch.zeros(1, device=DEVICE)
    for _ in range(2):
        add[lambda meta: (triton.cdiv(n, meta["WIDTH"]),)](x, total, n)
        assert total.item() == n
    return add.best_config.kwargs["WIDTH"]


@pytest.mark.parametrize(
    ("widths", "fits", "taken"),
    [
        ((16, 32, 64), lambda width: True, 32),
        ((16, 32, 64, 128), lambda width: True, 64),
        ((16, 32, 64, 128), lambda width: width > 64, 128),
        ((16, 32, 64, 128), lambda width: width < 64, 32),
        ((16,), lambda width: True, 16),
    ],
)
def test_the_middle_one_of_those_that_fit_without_a_clock(clock, widths, fits, taken):
    autotune.install(None)
    assert width_of(kernel(widths, fits)) == taken
    assert not clock


def test_one_that_fits_nowhere_says_so():
    autotune.install(None)
    with pytest.raises(OutOfResources):
        width_of(kernel((16, 32), lambda width: False))


def test_another_run_keeps_its_clock(clock):
    width_of(kernel((16, 32, 64)))
    assert len(clock) == 3
