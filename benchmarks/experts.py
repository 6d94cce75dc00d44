"""Experts: torch's grouped GEMM, which reads their counts on the GPU, beside a GEMM for each expert, which needs them on the host.

    python benchmarks/experts.py [--out FILE] [--rows 32768 65536 131072] [--experts 16] [--hidden 3584] [--width 896] [--spread 0.1]

bf16 on one GPU, both projections of an expert layer: forward, the gradients of the rows and those of the weights, kernels alone. `each`
launches cuBLAS expert by expert on one stream. spread: standard deviation of the experts' shares of the rows, over their mean. Floor: one
GEMM of all operations at 750 TFLOP/s. That both are right is tests/gpu/test_moe.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.clock import Clock
from benchmarks.report import Report

FLOPS_PER_SECOND = 750e12
REPETITIONS = 20


def counts_of(rows: int, experts: int, spread: float) -> list[int]:
    shares = (1 + spread * torch.randn(experts, generator=torch.Generator().manual_seed(0))).clamp(min=0)
    bounds = (shares.cumsum(0) / shares.sum() * rows).round().long().tolist()
    return [end - begin for begin, end in zip([0, *bounds], bounds, strict=False)]


def ways(counts: list[int], into: int, out: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The three products of a projection, expert by expert and grouped."""
    here = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(sum(counts), into, **here), torch.randn(sum(counts), out, **here)
    weights = torch.randn(len(counts), out, into, **here)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weights)
    parts = list(zip(*(t.split(counts) for t in (x, dy, y, dx)), weights, dw, strict=True))
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    return {
        "forward": (lambda: [torch.mm(x, w.T, out=y) for x, _, y, _, w, _ in parts], lambda: F.grouped_mm(x, weights.mT, offs=ends)),
        "rows": (lambda: [torch.mm(dy, w, out=dx) for _, dy, _, dx, w, _ in parts], lambda: F.grouped_mm(dy, weights, offs=ends)),
        "weights": (lambda: [torch.mm(dy.T, x, out=dw) for x, dy, *_, dw in parts], lambda: F.grouped_mm(dy.mT, x, offs=ends)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--spread", type=float, default=0.1)
    options = parser.parse_args()
    report, clock = Report(options.out, 600.0), Clock(REPETITIONS)
    report.host(experts=options.experts, spread=options.spread)
    for rows in options.rows:
        counts = counts_of(rows, options.experts, options.spread)
        for into, out in (options.hidden, options.width), (options.width, options.hidden):
            floor = 2e3 * rows * into * out / FLOPS_PER_SECOND
            for of, (each, grouped) in ways(counts, into, out).items():
                name = f"{rows} rows, {into} to {out}, {of}"
                report.add("rows", name=name, floor=floor, each=clock(each), grouped=clock(grouped))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
