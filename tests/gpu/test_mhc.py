"""The kernels of residual streams against the formulas in fp64: outputs and every gradient by name, odd sizes, poisoned memory.

With TRITON_INTERPRET=1 the same on a CPU (tests/cpu/test_hyper_connections.py does that).
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from nam_megatron.runtime import mhc_kernel
from nam_megatron.runtime.hyper_connections import HyperConnection

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

# (streams, sequence, batch, hidden): within a tile, over its edges, across several.
SIZES = [(2, 3, 1, 130), (3, 17, 1, 7), (4, 7, 3, 150), (8, 1, 5, 40)]
if not INTERPRETED:
    SIZES += [(n, 37, 3, 257) for n in range(2, 9)] + [(4, 1024, 2, 3584), (8, 100, 1, 1000)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that was not written reads as NaN."""
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        for name, size in {"SPAN": 128, "BACK_SPAN": 16, "BACK_SPANS": 2}.items():  # several, of few columns and tokens
            monkeypatch.setattr(mhc_kernel, name, size)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is empty
    assert torch.empty(1).isnan() and torch.empty(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def module(streams: int, hidden: int, kernels: str, dtype: torch.dtype, strength: float) -> HyperConnection:
    config = SimpleNamespace(hidden_size=hidden, perform_initialization=False, sequence_parallel=False)
    keys = {"sinkhorn_steps": 20, "initial_scale": 0.01, "epsilon": 1e-6, "kernels": kernels}
    made = HyperConnection(config, streams=streams, **keys)
    generator = torch.Generator(DEVICE).manual_seed(streams)
    with torch.no_grad():
        for name, p in made.named_parameters():
            wide = hidden**-0.5 if "proj" in name else 0.5
            value = torch.randn(p.shape, generator=generator, device=DEVICE, dtype=torch.float32)
            p.copy_(strength * wide * value + ("alpha" in name))
    return made.to(dtype)


def passed(
    maps: HyperConnection, streams: torch.Tensor, output: torch.Tensor, wanted: tuple
) -> dict[str, torch.Tensor]:
    """What comes of a layer whose output is `output` plus what it got, and the gradients of all that goes in."""
    streams, output = streams.clone().requires_grad_(), output.clone().requires_grad_()
    taken, write, mix, on = maps.read(streams)
    after = maps.write(on, output + taken, write, mix)
    loss = sum((a * w).sum() for a, w in zip((after, taken), wanted, strict=True))
    given = {"streams": streams, "output": output, **dict(maps.named_parameters())}
    gradients = torch.autograd.grad(loss, list(given.values()))
    values = {"taken": taken, "write": write, "mix": mix, "after": after}
    return {k: v.detach() for k, v in values.items()} | dict(zip(given, gradients, strict=True))


@pytest.mark.parametrize("strength", [0.1, 3.0])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_and_gradients(size, strength):
    n, s, b, hidden = size
    make = torch.Generator(DEVICE).manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=make, device=DEVICE).bfloat16()  # noqa: E731
    streams, output = draw(s, b, n * hidden), draw(s, b, hidden)
    streams[0, 0] = 0  # the root of nothing has no slope
    wanted = draw(s, b, n * hidden), draw(s, b, hidden)
    ours = passed(module(n, hidden, "fused", torch.float32, strength), streams, output, wanted)
    plain = passed(module(n, hidden, "naive", torch.float32, strength), streams, output, wanted)
    exact = passed(
        module(n, hidden, "naive", torch.float64, strength),
        streams.double(),
        output.double(),
        tuple(w.double() for w in wanted),
    )
    for name, tensor in exact.items():
        assert ours[name].dtype == plain[name].dtype and ours[name].isfinite().all(), name
        off, as_plain = ((found[name].double() - tensor).norm() / tensor.norm() for found in (ours, plain))
        # A factor is one number, the sum of what all tokens would have it do, which nearly cancels.
        much = 1e-3 if tensor.numel() == 1 else 2e-4
        assert off <= 1.2 * as_plain + much, f"{name}: off by {off:.1e}, plain torch by {as_plain:.1e}"


def test_maps_that_leave_a_column_next_to_nothing():
    """Its sum is below what fp32 holds for many steps of Sinkhorn's; plain division had NaN for gradients."""
    n, hidden, strength = 4, 64, 8.0
    make = torch.Generator(DEVICE).manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=make, device=DEVICE).bfloat16()  # noqa: E731
    given = draw(200, 1, n * hidden), draw(200, 1, hidden), (draw(200, 1, n * hidden), draw(200, 1, hidden))
    wide = given[0].double(), given[1].double(), tuple(w.double() for w in given[2])
    exact = passed(module(n, hidden, "naive", torch.float64, strength), *wide)
    for kernels in ("fused", "naive"):
        found = passed(module(n, hidden, kernels, torch.float32, strength), *given)
        for name, tensor in exact.items():
            off = (found[name].double() - tensor).norm() / tensor.norm()
            assert off <= 2e-2, f"{kernels}, {name}: off by {off:.1e}"  # NaN fails


def test_two_runs_have_the_same_bits():
    n, hidden, maps = 4, 96, module(4, 96, "fused", torch.float32, 1.0)
    make = torch.Generator(DEVICE).manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=make, device=DEVICE).bfloat16()  # noqa: E731
    given = draw(40, 1, n * hidden), draw(40, 1, hidden), (draw(40, 1, n * hidden), draw(40, 1, hidden))
    one, two = passed(maps, *given), passed(maps, *given)
    assert all(torch.equal(one[name], two[name]) for name in one)
