"""Experts: torch's and QuACK's grouped GEMMs, which read counts on the GPU, beside a GEMM for each expert, which needs them on the host.

    python benchmarks/experts.py [--out FILE] [--rows 32768 65536 131072] [--experts 16] [--hidden 3584] [--width 896] [--spread 0.1]

bf16 on one GPU, both projections of an expert layer: forward, the gradients of the rows and those of the weights, kernels alone. `each`
launches cuBLAS expert by expert on one stream. spread: standard deviation of the experts' shares of the rows, over their mean. Floor: one
GEMM of all operations at 750 TFLOP/s. `weights added` adds the gradients to an fp32 buffer, too. Correctness:
tests/gpu/test_moe.py. A GPU gets hotter, and slower, as it works: `grouped_after` is torch's once more, behind the others.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.clock import Clock
from benchmarks.report import Report, parser
from nam_megatron.blocks.moe.experts import Gemm
from nam_megatron.blocks.moe.quack_gemm import QuackGemm
from nam_megatron.blocks.moe.torch_gemm import TorchGemm

FLOPS_PER_SECOND = 750e12
REPETITIONS = 20


def counts_of(rows: int, experts: int, spread: float) -> list[int]:
    shares = (1 + spread * torch.randn(experts, generator=torch.Generator().manual_seed(0))).clamp(min=0)
    bounds = (shares.cumsum(0) / shares.sum() * rows).round().long().tolist()
    return [end - begin for begin, end in zip([0, *bounds], bounds, strict=False)]


Ways = dict[str, Callable[[], object]]


def ways(counts: list[int], into: int, out: int) -> dict[str, Ways]:
    """The three products of a projection, expert by expert and grouped, and the third with what adds it."""
    here = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(sum(counts), into, **here), torch.randn(sum(counts), out, **here)
    weights = torch.randn(len(counts), out, into, **here)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weights)
    parts = list(zip(*(t.split(counts) for t in (x, dy, y, dx)), weights, dw, strict=True))
    bounds = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    total = torch.zeros(weights.shape, device="cuda")
    found: dict[str, Ways] = {
        "forward": {"each": lambda: [torch.mm(x, w.T, out=y) for x, _, y, _, w, _ in parts]},
        "rows": {"each": lambda: [torch.mm(dy, w, out=dx) for _, dy, _, dx, w, _ in parts]},
        "weights": {"each": lambda: [torch.mm(dy.T, x, out=dw) for x, dy, *_, dw in parts]},
        "weights added": {},
    }
    gemms: dict[str, type[Gemm]] = {"grouped": TorchGemm}
    if not list(QuackGemm.unserved()):
        gemms |= {"quack": QuackGemm, "grouped_after": TorchGemm}
    for name, gemm in gemms.items():
        found["forward"][name] = partial(gemm.product, x, weights.mT, bounds)
        found["rows"][name] = partial(gemm.product, dy, weights, bounds)
        found["weights"][name] = partial(gemm.gradients, dy, x, bounds)
        found["weights added"][name] = partial(gemm.add, total.unbind(), total, dy, x, bounds)
    return found


def main() -> int:
    words = parser(__doc__, 600)
    words.add_argument("--rows", type=int, nargs="+", default=[32768, 65536, 131072])
    words.add_argument("--experts", type=int, default=16)
    words.add_argument("--hidden", type=int, default=3584)
    words.add_argument("--width", type=int, default=896)
    words.add_argument("--spread", type=float, default=0.1)
    options = words.parse_args()
    report, clock = Report(options.out, options.seconds), Clock(REPETITIONS)
    report.host(experts=options.experts, spread=options.spread)
    for rows in options.rows:
        counts = counts_of(rows, options.experts, options.spread)
        for into, out in (options.hidden, options.width), (options.width, options.hidden):
            floor = 2e3 * rows * into * out / FLOPS_PER_SECOND
            for of, each in ways(counts, into, out).items():
                name = f"{rows} rows, {into} to {out}, {of}"
                report.add("rows", name=name, floor=floor, **{way: clock(work) for way, work in each.items()})
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
