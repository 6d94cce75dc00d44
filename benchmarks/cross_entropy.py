"""The cross entropy of `precision.cross_entropy`: ours beside Megatron's two and Transformer Engine's, in one process.

    python benchmarks/cross_entropy.py [--out FILE] [--sweep] [--tokens 16384] [--vocabulary 65536]

bf16 logits of one microbatch on one GPU. Correctness first, against torch in fp64 on some tokens; a way of computing that fails it is
not timed. Floors: bytes over 4.3 TB/s, where a pass over the logits is read once forward, read and written once backward. Transformer
Engine's computes the gradient in its forward pass; Megatron 0.19.2 refuses it (`--cross-entropy-fusion-impl te`).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn import functional

from benchmarks.clock import Clock, error, memory
from benchmarks.report import Report, parser
from nam_megatron.runtime import cross_entropy

BYTES_PER_SECOND = 4.3e12
GIB = 2**30
REPETITIONS = 20
Loss = Callable[[Tensor, Tensor], Tensor]


def ways() -> Iterator[tuple[str, Loss]]:
    """Each takes logits [s, b, vocabulary] and labels [s, b] and gives losses [s, b]."""
    yield "fused", cross_entropy.cross_entropy
    yield "megatron", lambda x, y: vocab_parallel_cross_entropy(x, y, tp_group=dist.group.WORLD)
    yield "compiled", lambda x, y: fused_vocab_parallel_cross_entropy(x, y, dist.group.WORLD)
    try:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
    except ImportError:
        return
    yield "transformer engine", lambda x, y: parallel_cross_entropy(x, y, 0.0, False, None)


def inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(tokens // 4, 4, vocabulary, generator=make, device="cuda", dtype=torch.bfloat16).mul_(3)
    labels = torch.randint(vocabulary, logits.shape[:2], generator=make, device="cuda")
    return logits.requires_grad_(), labels, torch.rand(logits.shape[:2], generator=make, device="cuda")


def check(report: Report, name: str, loss: Loss, tokens: int, vocabulary: int) -> None:
    logits, labels, d_loss = inputs(tokens, vocabulary)
    some = logits.detach()[::97].double().requires_grad_()
    wanted = functional.cross_entropy(some.flatten(0, 1), labels[::97].flatten(), reduction="none").view(-1, 4)
    (d_wanted,) = torch.autograd.grad(wanted, some, d_loss[::97].double())
    # Some write the gradient over the logits: not over these.
    found = loss(logits * 1, labels)
    (d_found,) = torch.autograd.grad(found, logits, d_loss)
    for what, a, b, limit in (("loss", found[::97], wanted, 1e-5), ("gradient", d_found[::97], d_wanted, 4e-3)):
        report.check(f"{name}: {what}", error(a, b), limit)


def measure(
    report: Report, name: str, loss: Loss, tokens: int, vocabulary: int, part: str = "rows", **more: int
) -> None:
    clock, (logits, labels, d_loss) = Clock(REPETITIONS), inputs(tokens, vocabulary)

    def ahead() -> Tensor:
        return loss(logits, labels)

    def back(kept: Tensor) -> object:
        return torch.autograd.grad(kept, logits, d_loss)

    _, peak = memory(ahead, back)
    forward, backward = clock(ahead), clock(back, ahead)  # a forward pass for each: most write over what they kept
    read = logits.numel() * logits.element_size() / BYTES_PER_SECOND * 1e3
    report.add(
        part, name=name, forward_ms=forward, forward_floor_ms=read, backward_ms=backward, backward_floor_ms=2 * read,
        peak_gib=peak / GIB, **more,
    )  # fmt: skip


def sweep(report: Report, tokens: int, vocabulary: int) -> None:
    chosen = cross_entropy.WARPS, cross_entropy.COLUMNS, cross_entropy.PIECES
    for warps in (4, 8, 16):
        for pieces in (2, 4, 8):
            cross_entropy.WARPS, cross_entropy.COLUMNS, cross_entropy.PIECES = warps, 256 * warps, pieces
            measure(
                report, f"{warps} warps, {pieces} pieces", cross_entropy.cross_entropy, tokens, vocabulary, "sweep",
                warps=warps, pieces=pieces,
            )  # fmt: skip
    cross_entropy.WARPS, cross_entropy.COLUMNS, cross_entropy.PIECES = chosen


def main() -> int:
    words = parser(__doc__, 100, sweep="other numbers of warps and pieces, too")
    words.add_argument("--tokens", type=int, default=16384)
    words.add_argument("--vocabulary", type=int, default=65536)
    options = words.parse_args()
    size = options.tokens, options.vocabulary
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    report = Report(options.out, options.seconds)
    report.host(tokens=size[0], vocabulary=size[1])
    for name, loss in ways():
        given = (report, name, loss, *size)
        report.judged(name, partial(check, *given), partial(measure, *given))
    if options.sweep:
        report.attempt("sweep", lambda: sweep(report, *size))
    dist.destroy_process_group()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
