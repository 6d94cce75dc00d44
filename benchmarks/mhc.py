"""Residual streams around one layer (`feature.mhc`): our kernels beside plain torch and torch.compile's, in one process.

    python benchmarks/mhc.py [--out FILE] [--sweep] [--tokens 8192] [--hidden 3584] [--streams 4]

bf16 streams on one GPU, read and written once. Correctness first, against the formulas in fp64 on some tokens; a way that fails it is not
timed. Floors: bytes over 4.3 TB/s, where the streams are read once by what reads and once by what writes, and written once; backward their
gradient is read once and written twice, once by each, and read once more between, the streams are read by both and once more: what the maps
get has to be known before what they give back.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.clock import Clock, by_kernel, error, memory
from benchmarks.report import Report, parser
from nam_megatron.runtime import mhc_kernel
from nam_megatron.runtime.hyper_connections import HyperConnection

BYTES_PER_SECOND = 4.3e12
GIB = 2**30
REPETITIONS = 20
KEYS = {"sinkhorn_steps": 20, "initial_scale": 0.01, "epsilon": 1e-6}
Layer = Callable[[HyperConnection, Tensor, Tensor], tuple[Tensor, Tensor]]


def around(maps: HyperConnection, streams: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer gets, and the streams after it."""
    taken, write, mix, on = maps.read(streams)
    return taken, maps.write(on, output, write, mix)


def plain(maps: HyperConnection, streams: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Without recompute, so that a compiler sees all of it."""
    taken, write, mix = maps._read(streams)
    return taken, maps._write(streams, output, write, mix)


def maps(hidden: int, streams: int, kernels: str) -> HyperConnection:
    config = SimpleNamespace(hidden_size=hidden, perform_initialization=True, sequence_parallel=False)
    torch.manual_seed(1)
    return HyperConnection(config, streams=streams, kernels=kernels, **KEYS)


def inputs(tokens: int, hidden: int, streams: int) -> tuple[Tensor, ...]:
    """Streams, the layer's output, and the gradients of what it gets and of the streams after it."""
    make = torch.Generator("cuda").manual_seed(0)
    widths = (streams * hidden, hidden, hidden, streams * hidden)
    drawn = [torch.randn(tokens // 2, 2, w, generator=make, device="cuda", dtype=torch.bfloat16) for w in widths]
    return drawn[0].requires_grad_(), drawn[1].requires_grad_(), *drawn[2:]


def check(report: Report, name: str, layer: Layer, module: HyperConnection, size: tuple[int, int, int]) -> None:
    _, hidden, streams = size
    x, output, d_taken, d_after = inputs(256, hidden, streams)
    exact = maps(hidden, streams, "naive").double()
    given = x, output, *module.parameters()
    wide = x.detach().double().requires_grad_(), output.detach().double().requires_grad_()
    wanted = around(exact, *wide)
    d_wanted = torch.autograd.grad(wanted, (*wide, *exact.parameters()), (d_taken.double(), d_after.double()))
    found = layer(module, x, output)
    d_found = torch.autograd.grad(found, given, (d_taken, d_after))
    names = ("taken", "after", *(f"gradient of {n}" for n in ("streams", "output", *dict(module.named_parameters()))))
    for what, a, b in zip(names, (*found, *d_found), (*wanted, *d_wanted), strict=True):
        report.check(f"{name}: {what}", error(a, b), 2e-2)


def measure(
    report: Report, name: str, layer: Layer, module: HyperConnection, size: tuple[int, int, int], part: str = "rows"
) -> None:
    tokens, hidden, streams = size
    clock, (x, output, d_taken, d_after) = Clock(REPETITIONS), inputs(*size)
    given = x, output, *module.parameters()

    def ahead() -> tuple[Tensor, Tensor]:
        return layer(module, x, output)

    def back(kept: tuple[Tensor, Tensor]) -> object:
        return torch.autograd.grad(kept, given, (d_taken, d_after))

    kept, peak = memory(ahead, back)
    wide, narrow = (2 * tokens * hidden * n / BYTES_PER_SECOND * 1e3 for n in (streams, 1))
    report.add(
        part, name=name, forward_ms=clock(ahead), forward_floor_ms=3 * wide + 2 * narrow, backward_ms=clock(back, ahead),
        backward_floor_ms=7 * wide + 3 * narrow, kept_gib=kept / GIB, peak_gib=peak / GIB,
    )  # fmt: skip


# One group of kernels at a time: names in mhc_kernel, and what else they could be.
SWEEP: dict[tuple[str, ...], tuple[tuple[int | None, ...], ...]] = {
    ("TOKENS", "WIDTH", "SPAN", "WARPS"): ((32, 64, 1024, 4), (64, 64, 2048, 4), (128, 64, 1024, 8)),
    ("BACK_TOKENS", "BACK_WIDTH", "BACK_STAGES", "BACK_WARPS"): (
        (32, 128, None, 4), (32, 128, 3, 4), (32, 64, 3, 4), (16, 64, 4, 4),
    ),
    ("MAPS_TOKENS", "MAPS_WARPS"): ((16, 2), (32, 1), (32, 4)),
    ("STREAM_TOKENS", "STREAM_WIDTH", "STREAM_WARPS"): ((2, 256, 2), (4, 256, 4), (4, 512, 8)),
}  # fmt: skip


def sweep(report: Report, module: HyperConnection, size: tuple[int, int, int]) -> None:
    for names, choices in SWEEP.items():
        chosen = [getattr(mhc_kernel, name) for name in names]
        for choice in (*choices, chosen):
            for name, value in zip(names, choice, strict=True):
                setattr(mhc_kernel, name, value)
            said = ", ".join(f"{name} {value}" for name, value in zip(names, choice, strict=True))
            report.attempt(said, lambda said=said: measure(report, said, around, module, size, "sweep"))


def kernels(report: Report, module: HyperConnection, size: tuple[int, int, int]) -> None:
    """Each kernel of one layer, forward and backward, by torch's profiler."""
    x, output, d_taken, d_after = inputs(*size)
    given = x, output, *module.parameters()

    def layer() -> object:
        return torch.autograd.grad(around(module, x, output), given, (d_taken, d_after))

    for name, (ms, launches) in by_kernel(layer).items():
        report.add("kernels", name=name[:100], ms=ms, launches=launches)


def main() -> int:
    words = parser(__doc__, 100, sweep="other tiles, too")
    words.add_argument("--tokens", type=int, default=8192, help="of a microbatch (default: 8192)")
    words.add_argument("--hidden", type=int, default=3584, help="width of a stream (default: 3584)")
    words.add_argument("--streams", type=int, default=4, help="of a token (default: 4)")
    options = words.parse_args()
    size = options.tokens, options.hidden, options.streams
    report = Report(options.out, options.seconds)
    report.host(tokens=size[0], hidden=size[1], streams=size[2])
    fused, naive = (maps(*size[1:], kernels) for kernels in ("fused", "naive"))
    compiled = torch.compile(plain)
    ways: list[tuple[str, Layer, HyperConnection]] = [("fused", around, fused), ("naive", around, naive)]
    for name, layer, module in (*ways, ("compiled", compiled, naive)):
        given = (report, name, layer, module, size)
        report.judged(name, partial(check, *given), partial(measure, *given))
    report.attempt("kernels", lambda: kernels(report, fused, size))
    if options.sweep:
        report.attempt("sweep", lambda: sweep(report, fused, size))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
