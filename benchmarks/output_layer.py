"""The output layer and its cross entropy: as they are trained, beside what never holds all logits, in one process.

    python benchmarks/output_layer.py [--out FILE] [--rows 16384 32768 8192] [--hidden 3584] [--vocabulary 65536] [--dry]

bf16 on one GPU, forward and backward of one loss. What comes out is always the same: a loss, the gradient of the hidden states, and that
of the weight added to an fp32 buffer, which was there before (`precision.fused_grad_accumulation`). Correctness first, against torch in
fp64 at a small size; a way that fails it is not timed. Floor: three GEMMs at 750 TFLOP/s.

    fused           a GEMM, `precision.cross_entropy=fused`, which turns the logits into their gradient in place, and two GEMMs
    pieces          ours, some rows at a time; backward computes their logits again: four GEMMs, and the same contract
    pieces ahead    the gradients in the forward pass: three GEMMs, for who knows the gradient of every loss before there is a loss
    liger           Liger's, some rows at a time, gradients in the forward pass: of a sum of losses alone, its gradient one number
    liger a token   the same with a loss and a gradient for each token, as ours has it; backward computes the logits again
    quack           quack's, for a sum of losses alone

Liger's and quack's are tried where they are installed; quack's needs nvidia-cutlass-dsl, a wheel of 92 MB. `--dry` only checks, on the
CPU with TRITON_INTERPRET=1 and what tests/blocks/interpreter.py mends.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.clock import Clock, error, memory
from benchmarks.report import Report, parser
from nam_megatron.mends import install
from nam_megatron.runtime import cross_entropy

FLOPS_PER_SECOND = 750e12
GIB = 2**30
REPETITIONS = 10
ODD = 1111, 296, 3000  # rows, hidden, vocabulary of the check
PIECE = 2048  # rows
# Hidden states [rows, hidden], weight [vocabulary, hidden], labels [rows] and the buffer of the weight's gradient -> the losses [rows], or
# their sum. Whoever gives autograd a gradient of the weight gets it added to the buffer.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def add(x: Tensor, d: Tensor, buffer: Tensor) -> None:
    """buffer += d^T x, with the GEMM that Megatron's output layer gets from us."""
    if x.is_cuda:
        from megatron.core.tensor_parallel import layers

        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, d, buffer)
    else:
        buffer += d.t().float() @ x.float()


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.buffer = buffer
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        d_hidden = d @ weight
        add(hidden, d, ctx.buffer)
        return d_hidden, None, None


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor) -> Tensor:
    logits = Linear.apply(hidden, weight, buffer)
    return cross_entropy.cross_entropy(logits[:, None], labels[:, None])[:, 0]


def sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy` keeps them: the largest logit, the sum of exponentials below it, the label's logit less the largest."""
    most, total, own = torch.empty(3, len(labels), dtype=torch.float32, device=logits.device)
    largest = torch.empty(len(labels), dtype=torch.int32, device=logits.device)
    width, k = logits.size(-1), cross_entropy
    k._cross_entropy_sums[(len(labels),)](
        logits, labels, most, total, own, largest, width, 0, width,
        COLUMNS=k.COLUMNS, PIECES=k.PIECES, num_warps=k.WARPS,
    )  # fmt: skip
    return most, total, own


def gradient(logits: Tensor, labels: Tensor, most: Tensor, total: Tensor, d_loss: Tensor) -> None:
    """In the place of the logits."""
    k = cross_entropy
    k._cross_entropy_gradient[(len(labels),)](
        logits, labels, most, total, d_loss, logits.size(-1), 0, COLUMNS=k.COLUMNS * k.PIECES, num_warps=k.WARPS
    )


def logits_of(hidden: Tensor, weight: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Each piece of the rows and its logits, all in the same place."""
    place = hidden.new_empty(min(rows, len(hidden)), len(weight))
    for start in range(0, len(hidden), rows):
        at = slice(start, start + rows)
        yield at, torch.mm(hidden[at], weight.t(), out=place[: len(hidden[at])])


class Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor, rows: int) -> Tensor:
        found = [sums(logits, labels[at]) for at, logits in logits_of(hidden, weight, rows)]
        most, total, own = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, labels, most, total)
        ctx.buffer, ctx.rows = buffer, rows
        return torch.log(total) - own

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, weight, labels, most, total = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        for at, logits in logits_of(hidden, weight, ctx.rows):
            gradient(logits, labels[at], most[at], total[at], d_loss[at].contiguous())
            torch.mm(logits, weight, out=d_hidden[at])
            add(hidden[at], logits, ctx.buffer)
        return d_hidden, None, None, None, None


def pieces(hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor, rows: int = PIECE) -> Tensor:
    return Pieces.apply(hidden, weight, labels, buffer, rows)


class Ahead(torch.autograd.Function):
    """The gradient of each loss is 1 / rows, whatever comes back."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor, rows: int) -> Tensor:
        d_hidden, losses = torch.empty_like(hidden), []
        d_loss = torch.full((len(hidden),), 1 / len(hidden), device=hidden.device)
        for at, logits in logits_of(hidden, weight, rows):
            most, total, own = sums(logits, labels[at])
            gradient(logits, labels[at], most, total, d_loss[at])
            torch.mm(logits, weight, out=d_hidden[at])
            add(hidden[at], logits, buffer)
            losses.append(torch.log(total) - own)
        ctx.save_for_backward(d_hidden)
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.saved_tensors[0], None, None, None, None


def ahead(hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor, rows: int = PIECE) -> Tensor:
    return Ahead.apply(hidden, weight, labels, buffer, rows)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor, reduction: str) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # Bias, weights of classes, ignored label, z-loss, smoothing, reduction, softcap, whether to return the z-loss, dtype of the sum.
    more = None, None, -100, 0.0, 0.0, reduction, None, False, torch.float32
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *more)[0]


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, buffer: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=4096, reduction="sum")


def ways() -> Iterator[tuple[str, Loss, Loss]]:
    """Name; what is timed; what is checked, which has several pieces at the small size, too."""
    yield "fused", fused, fused
    for rows in (PIECE, 2 * PIECE):
        yield f"pieces of {rows}", partial(pieces, rows=rows), partial(pieces, rows=500)
    yield "pieces ahead", ahead, partial(ahead, rows=500)
    if find_spec("liger_kernel"):
        yield "liger", partial(liger, reduction="sum"), partial(liger, reduction="sum")
        yield "liger a token", partial(liger, reduction="none"), partial(liger, reduction="none")
    if find_spec("quack"):
        yield "quack", quack, quack


def inputs(rows: int, hidden: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator(device).manual_seed(0)
    of = {"generator": make, "device": device, "dtype": torch.bfloat16}
    states, weight = torch.randn(rows, hidden, **of), torch.randn(vocabulary, hidden, **of).mul_(2 / hidden**0.5)
    labels = torch.randint(vocabulary, (rows,), generator=make, device=device)
    return states.requires_grad_(), weight.requires_grad_(), labels, torch.zeros(weight.shape, device=device)


def back(loss: Tensor, hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """The gradient of the hidden states; that of the weight is in the buffer. Of each loss: 1 / rows."""
    d_loss = torch.full_like(loss, 1 / len(hidden))
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight), d_loss, allow_unused=True)
    if d_weight is not None:
        buffer += d_weight
    return d_hidden


def check(report: Report, name: str, loss: Loss, device: str) -> None:
    hidden, weight, labels, buffer = inputs(*ODD, device)
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = functional.cross_entropy(wide[0] @ wide[1].t(), labels, reduction="none")
    d_wanted = torch.autograd.grad(wanted.mean(), wide)
    found = loss(hidden, weight, labels, buffer)
    d_found = back(found, hidden, weight, buffer), buffer
    wanted = wanted if found.ndim else wanted.sum()
    names = "loss", "gradient of hidden states", "gradient of weight"
    for what, a, b, limit in zip(names, (found, *d_found), (wanted, *d_wanted), (3e-3, 2e-2, 2e-2), strict=True):
        report.check(f"{name}: {what}", error(a, b), limit)


def measure(report: Report, name: str, loss: Loss, size: tuple[int, int, int]) -> None:
    hidden, weight, labels, buffer = inputs(*size, "cuda")

    def forward() -> Tensor:
        return loss(hidden, weight, labels, buffer)

    def backward(found: Tensor) -> Tensor:
        return back(found, hidden, weight, buffer)

    backward(forward())  # compiles, and makes what is made once
    kept, peak = memory(forward, backward)
    milliseconds = Clock(REPETITIONS)(lambda: backward(forward()))
    floor = 6 * size[0] * size[1] * size[2] / FLOPS_PER_SECOND * 1e3
    report.add(
        "rows", name=name, rows=size[0], ms=milliseconds, floor_ms=floor, kept_gib=kept / GIB, peak_gib=peak / GIB
    )


def main() -> int:
    words = parser(__doc__, 100)
    words.add_argument("--rows", type=int, nargs="+", default=[16384, 32768, 8192])
    words.add_argument("--hidden", type=int, default=3584)
    words.add_argument("--vocabulary", type=int, default=65536)
    words.add_argument("--dry", action="store_true", help="only the checks, on the CPU")
    options = words.parse_args()
    report = Report(options.out, options.seconds)
    if not options.dry:
        install.single("wgrad")
        report.host(hidden=options.hidden, vocabulary=options.vocabulary, piece=PIECE)
    for name, loss, checked in ways():

        def work(name: str = name, loss: Loss = loss, checked: Loss = checked) -> None:
            if report.sound(name, lambda: check(report, name, checked, "cpu" if options.dry else "cuda")):
                for rows in () if options.dry else options.rows:
                    measure(report, name, loss, (rows, options.hidden, options.vocabulary))

        report.attempt(name, work)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
