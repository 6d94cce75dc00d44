"""blocks/m2rnn's kernels against naive.py in fp64: values, every gradient, repeated runs, poisoned memory.

With TRITON_INTERPRET=1 the same on a CPU and small (tests/blocks/test_m2rnn.py does that). The checks themselves, and their limits,
are those of benchmarks/m2rnn.py, which prints them beside the times.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from benchmarks import m2rnn as bench
from nam_megatron.blocks.m2rnn import elementwise, kernel, naive

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

# (tokens, sequences, heads, sizes); the interpreter is some hundred times slower than naive.py.
CASES = [(1, 1, 1, {}), (7, 1, 3, {"k": 16}), (8, 2, 3, {"k": 128}), (64, 3, 2, {"v": 32}), (517, 2, 44, {})]
CONFIGS = [dict(tokens=8), dict(tokens=2), dict(rows=32, warps=2), dict(exact=False)]
if INTERPRETED:
    CASES = [(9, 2, 1, {"k": 32}), (3, 1, 1, {"k": 16, "v": 32})]
    CONFIGS = [dict(tokens=8), dict(exact=False)]


class Failures(bench.Report):
    """Collects what the benchmark would print."""

    def __init__(self):
        super().__init__(None, 1e9)
        self.seen = 0

    def check(self, name, ours, limit, reference=None):
        self.seen += 1
        assert ours <= limit, f"{name}: {ours:.2e} > {limit:.2e} (naive in bf16: {reference})"

    def attempt(self, name, work):
        work()


@pytest.fixture
def report(monkeypatch):
    """Torch's deterministic mode: memory comes filled with NaN, and what is not deterministic raises."""
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)
        monkeypatch.setattr(bench, "DEVICE", "cpu")
        monkeypatch.setattr(elementwise, "ROWS", 16)
        monkeypatch.setattr(elementwise, "STRIPS", 2)
    torch.use_deterministic_algorithms(True)
    report = Failures()
    yield report
    torch.use_deterministic_algorithms(False)
    assert report.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "batch", "heads", "sizes"), CASES)
def test_recurrence(report, tokens, batch, heads, sizes, dtype):
    bench.check_scan(report, "", tokens, batch, heads, dtype, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipped_gradients_of_the_state(report, dtype):
    """Bounds that some elements meet and some do not, at the end of the sequence and past it too."""
    for clip in (0.05, 2.0):
        bench.check_scan(report, f"clip {clip} ", 9, 1, 1, dtype, clip=clip, k=16)


def test_a_gradient_of_bf16_is_rounded_once(report):
    """Numbers of fp32 enter products with inputs as two of bf16, not cut off to one: few gradients of q and k round another way."""
    x = bench.inputs(9, 1, 1, dtype=torch.bfloat16, k=16)
    ways = (partial(kernel.scan, config=kernel.Config(exact=True)), x), (naive.scan, x, torch.float64)
    found, exact = (bench.run(*way)[2][..., : 2 * x.k] for way in ways)
    report.check("dq, dk", (found != exact.to(found.dtype)).float().mean().item(), 0.02)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_way_to_cut_it(report, config):
    bench.check_scan(report, "", 9, 1, 1, torch.float32, config=kernel.Config(**config), k=32)


def test_the_last_state_alone_may_have_a_gradient(report):
    x, found = bench.inputs(9, 1, 1, dtype=torch.float32, k=16), []
    q, k, v = x.qkv.split([x.k, x.k, x.v], -1)
    for scan in (kernel.scan, naive.scan):
        f = x.f.clone().requires_grad_()
        found += torch.autograd.grad(scan(q, k, v.unflatten(-1, (1, x.v)), f, x.w, x.h0)[1].sum(), f)
    report.check("f", bench.error(*found), 1e-4)


def test_packed_documents(report):
    if INTERPRETED:
        bench.check_documents(report, [0, 2, 2, 11], 1, k=16)
    else:
        bench.check_documents(report)


def test_evaluation_is_training(report):
    bench.check_evaluation(report, *((5, 1, 1) if INTERPRETED else (61, 2, 4)), k=16)


def test_two_halves_are_the_whole(report):
    if INTERPRETED:
        bench.check_halves(report, 9, 1, 1, k=16)
    else:
        bench.check_halves(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "batch", "borders"), [(13, 2, None), (37, 1, [0, 5, 5, 21, 37])])
def test_convolution_and_gate(report, tokens, batch, borders, dtype):
    bench.check_around(report, dtype, tokens, batch, borders)


if INTERPRETED:

    @pytest.mark.parametrize(("tokens", "batch", "borders"), [(13, 2, None), (37, 1, [0, 5, 5, 21, 37])])
    def test_convolution_and_gate_in_many_programs(report, monkeypatch, tokens, batch, borders):
        """Each sums over several rows and strips, and there are several of them."""
        for name, value in dict(PROGRAMS=3, ROWS=4, STRIPS=2, CHANNELS=64).items():
            monkeypatch.setattr(elementwise, name, value)
        bench.check_around(report, torch.float32, tokens, batch, borders)

else:

    def test_convolution_and_gate_in_many_programs(report):
        bench.check_around(report, torch.float32, 4097, 1)
