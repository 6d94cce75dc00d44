"""A captured graph without small memset nodes writes what it would write with them, in the same order."""

import pytest
import torch

from nam_megatron.runtime import graph_fills

pytestmark = pytest.mark.gpu


def fills(at: torch.Tensor) -> None:
    """Small ones of all element sizes, one that is large, one of several rows; between kernels that read what they left."""
    from cuda.bindings import driver

    stream, start = torch.cuda.current_stream().cuda_stream, at.data_ptr()
    for fill, rest in (
        (driver.cuMemsetD8Async, (start, 0x5A, 3)),
        (driver.cuMemsetD32Async, (start + 16, 0x01020304, 2)),
        (driver.cuMemsetD16Async, (start + 64, 0x0708, 5)),
        (driver.cuMemsetD8Async, (start + 128, 9, graph_fills.MOST + 1)),
        (driver.cuMemsetD2D8Async, (start + 8192, 64, 3, 5, 4)),
        (driver.cuMemsetD32Async, (start, 0, 1)),
    ):
        status, *_ = fill(*rest, stream)
        assert int(status) == 0
        at.add_(1)


def test_replays_write_what_memsets_wrote(monkeypatch):
    replaced, real = [], graph_fills.replace
    monkeypatch.setattr(graph_fills, "replace", lambda raw: replaced.append(real(raw)))
    start = torch.randint(0, 255, (16384,), device="cuda", dtype=torch.uint8)
    wanted, at = start.clone(), start.clone()
    for _ in range(3):
        fills(wanted)
    graph = graph_fills.FilledByKernels()
    with torch.cuda.graph(graph):
        fills(at)
    assert torch.equal(at, start) and replaced == [4]
    for _ in range(3):
        graph.replay()
    assert torch.equal(at, wanted)


def test_products_and_sums_are_the_same():
    """cuBLAS's counters of tiles, and those of torch's sums over several blocks."""
    x, w = (torch.randn(8192, 3584, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def work() -> tuple[torch.Tensor, ...]:
        y = x @ w.T
        return y, y.float().sum(0), (y[:, :100].float() > 0).sum(0, dtype=torch.int32), y.sum()

    wanted = work()
    graph = graph_fills.FilledByKernels()
    with torch.cuda.graph(graph):
        found = work()
    for _ in range(2):
        for one in found:
            one.fill_(-1)
        graph.replay()
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
