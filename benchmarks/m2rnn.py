"""M2RNN on one H200: is it right, and how long does it take?

    python benchmarks/m2rnn.py --out m2rnn.json [--quick] [--sweep] [--seconds 240] [--xma FOLDER]

The kernels need torch and Triton; the rows of whole layers need megatron-core and Transformer Engine and say so where these are
missing. FOLDER holds the package `xma` of github.com/open-lm-engine/accelerated-model-architectures, the authors' kernels (PyPI's `xma`
is another library). Errors are |x - reference| / |reference| with the reference in fp64, beside those of naive.py in bf16. Times are
medians over CUDA events (clock.py). Each part runs in a process of its own, a row only once its check has passed, and the file is
whole after every line.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import m2rnn_every_state
from benchmarks.clock import BANDWIDTH, PEAK, Clock, by_kernel, error, memory, one_rank
from benchmarks.report import Report, parser
from nam_megatron.blocks.m2rnn import kernel, naive

B, S, H, K, V, WIDTH, HIDDEN = 4, 4096, 44, 64, 16, 4, 3584  # NAM56R at micro batch 4
DEVICE = "cuda"  # tests/gpu/test_m2rnn.py runs the checks in Triton's interpreter too
CUTS = [
    *(kernel.Config(tokens=t, exact=exact) for t in (8, 4, 2) for exact in (True, False)),
    *(kernel.Config(rows, warps, tokens) for rows, warps, tokens in ((32, 2, 4), (32, 1, 4), (64, 4, 4), (64, 2, 4))),
]  # what --sweep tries
REPETITIONS = 20
NAMES = ("y", "last", "dq, dk, dv", "df", "dw", "dh0")


def main(argv: list[str]) -> int:
    words = parser(__doc__, 600, sweep="time other ways to cut the kernels", quick="few checks, few sizes", apart=True)
    words.add_argument("--xma", type=Path, help="time the authors' kernels too")
    o = words.parse_args(argv)
    report = Report(o.out, o.seconds)
    report.apart("host", lambda: report.host(config=vars(kernel.Config())))
    report.apart("recurrence", lambda: time_both(report))
    report.apart("layer", lambda: time_layer(report))
    report.apart("elementwise", lambda: time_elementwise(report))
    if o.xma:
        report.apart("xma", lambda: time_xma(report, o.xma))
    if o.sweep:
        report.apart("compile", lambda: compile_all(CUTS))
        for config in CUTS:
            report.apart(title(config), lambda c=config: time_cut(report, c))
    report.apart("checks", lambda: check_all(report, o.quick))
    if not o.quick:
        for b, s in ((1, 4096), (2, 8192), (8, 4096)):
            report.apart(f"recurrence b{b} s{s}", lambda b=b, s=s: time_recurrence(report, b, s))
    return report.end()


# Inputs --------------------------------------------------------------------------------------------------------------


def inputs(
    s: int,
    b: int,
    h: int = H,
    k: int = K,
    v: int = V,
    dtype: torch.dtype = torch.bfloat16,
    documents: int | None = None,
) -> SimpleNamespace:
    """Random tensors as the layer hands them over. q, k and v are one tensor; f is that of A and dt at the start of training."""
    g = torch.Generator(DEVICE).manual_seed(s + b)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE) * scale

    qkv = torch.nn.functional.silu(draw(s, b, 2 * k + h * v)).to(dtype)
    a = 16 * torch.rand(h, generator=g, device=DEVICE)
    f = naive.forget(draw(s, b, h) - 4, torch.zeros(h, device=DEVICE), a.log())
    w = torch.eye(v, device=DEVICE) + draw(h, v, v, scale=0.05)
    n = documents or b
    return SimpleNamespace(
        qkv=qkv,
        f=f,
        w=w,
        h0=draw(n, h, k, v, scale=0.3),
        dy=draw(s, b, h, v).to(dtype),
        dlast=draw(n, h, k, v),
        k=k,
        v=v,
    )


def run(scan: Callable, x: SimpleNamespace, dtype: torch.dtype | None = None, cu: Tensor | None = None) -> list[Tensor]:
    """NAMES of `scan` on `x`, all of whose tensors are of `dtype` where it is given."""
    qkv, f, w, h0 = (t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in (x.qkv, x.f, x.w, x.h0))
    q, k, v = qkv.split([x.k, x.k, f.size(-1) * x.v], -1)
    y, last = scan(q, k, v.unflatten(-1, (-1, x.v)), f, w, h0, cu)
    grads = torch.autograd.grad((y, last), (qkv, f, w, h0), (x.dy.to(y.dtype), x.dlast.to(last.dtype)))
    return [y.detach(), last.detach(), *grads]


# Checks --------------------------------------------------------------------------------------------------------------


def check_all(report: Report, quick: bool) -> None:
    # Every torch.empty is filled with NaN, and operations that cannot be deterministic raise.
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    cases = [(61, 2, 4, {}), (300, 1, 44, {}), (64, 3, 2, {"v": 32})]
    if not quick:
        cases += [(1, 1, 1, {}), (7, 1, 3, {"k": 16}), (8, 2, 3, {"k": 128}), (517, 2, 5, {}), (2048, 1, 2, {})]
    for s, b, h, more in cases:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"s{s} b{b} h{h} {more or ''} {str(dtype)[6:]}"
            report.attempt(name, lambda a=(name, s, b, h, dtype), m=more: check_scan(report, *a, **m))
    configs = [kernel.Config(tokens=2), kernel.Config(exact=False)]
    configs += [] if quick else [kernel.Config(tokens=8), kernel.Config(rows=32, warps=2)]
    for config in configs:
        name = " ".join(f"{key}={value}" for key, value in vars(config).items())
        report.attempt(name, lambda n=name, c=config: check_scan(report, n, 61, 2, 4, torch.float32, config=c))
    report.attempt("documents", lambda: check_documents(report))
    report.attempt("halves", lambda: check_halves(report))
    report.attempt("evaluation", lambda: check_evaluation(report))
    torch.use_deterministic_algorithms(False)


def limit(dtype: torch.dtype, its: float, config: kernel.Config | None = None) -> float:
    """By what naive.py loses in `dtype`, to which sums in another order come in fp32. The hardware's tanh is exact to 2^-11."""
    if dtype == torch.bfloat16:
        return max(2 * its, 4e-3)
    return 4e-3 if config is not None and config.exact is False else max(4 * its, 1e-6)


def check_scan(
    report: Report, name: str, s: int, b: int, h: int, dtype: torch.dtype, config: kernel.Config | None = None,
    clip: float | None = None, **more,
) -> None:  # fmt: skip
    """Outputs and every gradient; a second run must repeat every bit."""
    x = inputs(s, b, h, dtype=dtype, **more)

    def ours(*tensors):
        return kernel.scan(*tensors, gradient_clip=clip, config=config or kernel.Config())

    def plain(*tensors):
        return naive.scan(*tensors, gradient_clip=clip)

    found, again = run(ours, x), run(ours, x)
    wanted, rounded = run(plain, x, torch.float64), run(plain, x, dtype)
    for part, one, exact, low in zip(NAMES, found, wanted, rounded, strict=True):
        its = error(low, exact)
        report.check(f"{name} {part}", error(one, exact), limit(dtype, its, config), its)
    differ = float(sum((one != other).sum() for one, other in zip(found, again, strict=True)))
    report.check(f"{name} not repeated", differ, 0)


def check_documents(report: Report, borders: Sequence[int] = (0, 5, 5, 21, 96, 97), h: int = 4, **more) -> None:
    """Packed documents, one of them empty: each is a sequence of its own."""
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs(borders[-1], 1, h, dtype=dtype, documents=len(borders) - 1, **more)
        cu = torch.tensor(list(borders), dtype=torch.int32, device=DEVICE)
        found, wanted = run(kernel.scan, x, cu=cu), run(naive.scan, x, torch.float64, cu)
        rounded = run(naive.scan, x, dtype, cu)
        for part, one, exact, low in zip(NAMES, found, wanted, rounded, strict=True):
            its = error(low, exact)
            report.check(f"documents {str(dtype)[6:]} {part}", error(one, exact), limit(dtype, its), its)


def check_halves(report: Report, s: int = 75, b: int = 2, h: int = 3, **more) -> None:
    """A sequence in two parts, the second from the state that the first leaves, is the sequence; gradients too."""
    x, cut = inputs(s, b, h, dtype=torch.float32, **more), s // 2

    def halves(q, k, v, f, w, h0, _):
        first, state = kernel.scan(q[:cut], k[:cut], v[:cut], f[:cut], w, h0)
        second, last = kernel.scan(q[cut:], k[cut:], v[cut:], f[cut:], w, state)
        return torch.cat([first, second]), last

    for part, one, other in zip(NAMES, run(halves, x), run(kernel.scan, x), strict=True):
        report.check(f"two halves {part}", error(one, other), 1e-6)


def check_evaluation(report: Report, s: int = 61, b: int = 2, h: int = 4, **more) -> None:
    """Without gradients no state is kept and y is the same."""
    x = inputs(s, b, h, **more)
    y = run(kernel.scan, x)[0]
    q, k, v = x.qkv.split([x.k, x.k, x.f.size(-1) * x.v], -1)
    with torch.no_grad():
        other, _ = kernel.scan(q, k, v.unflatten(-1, (-1, x.v)), x.f, x.w, x.h0)
    report.check("evaluation differs from training", float((y != other).sum()), 0)


def check_every_state(report: Report) -> None:
    """The baseline computes the same function."""
    x = inputs(61, 2, 4)

    def plain(q, k, v, f, w, h0, _):
        return m2rnn_every_state.scan(q, k, v, f, w), h0 * 1.0

    def from_zero(q, k, v, f, w, h0, _):
        return naive.scan(q, k, v, f, w)[0], h0 * 1.0

    torch.use_deterministic_algorithms(False)  # it adds by atomics
    for part, one, exact in zip(NAMES, run(plain, x), run(from_zero, x, torch.float64), strict=True):
        report.check(f"baseline {part}", error(one, exact), 2e-2)


def check_elementwise(report: Report) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_around(report, dtype, 61, 2)
        check_around(report, dtype, 97, 1, [0, 5, 5, 21, 96, 97])


def check_around(report: Report, dtype: torch.dtype, s: int, b: int, borders: list[int] | None = None) -> None:
    """Convolution and gate, on slices of a packed projection as in the layer."""
    h, g = 5, torch.Generator(DEVICE).manual_seed(s)
    c, inner = 2 * K + h * V, h * V
    cu = None if borders is None else torch.tensor(list(borders), dtype=torch.int32, device=DEVICE)

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(to)

    packed, weight, bias, scale = draw(s, b, c + inner + h), draw(c, 1, WIDTH), draw(c), draw(inner)
    y, d, up = draw(s, b, h, V), draw(inner, to=torch.float32), draw(s, b, c)

    def conv(ops, x, *rest):
        return ops.conv(x[..., :c], *rest, cu)

    def gate(ops, y, x, *rest):
        return ops.gate(
            y, x[..., :c].contiguous()[..., 2 * K :].unflatten(-1, (h, V)), x[..., c : c + inner], *rest, 1e-5
        )

    def graded(work, ops, tensors, to=None) -> list[Tensor]:
        leaves = [t.to(to or t.dtype, copy=True).requires_grad_() for t in tensors]
        out = work(ops, *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, up[..., : out.size(-1)].to(out.dtype))]

    for name, work, tensors in (("conv", conv, (packed, weight, bias)), ("gate", gate, (y, packed, d, scale))):
        found, exact = graded(work, kernel, tensors), graded(work, naive, tensors, torch.float64)
        low = graded(work, naive, tensors, torch.bfloat16)
        for i, (one, wanted, rounded) in enumerate(zip(found, exact, low, strict=True)):
            its = error(rounded, wanted)
            bound = 1e-5 if dtype == torch.float32 else max(2 * its, 4e-3)
            part = "out" if i == 0 else f"gradient {i}"
            report.check(f"{name} s{s} {str(dtype)[6:]} {part}", error(one, wanted), bound, its)


# Times ---------------------------------------------------------------------------------------------------------------


def both(forward: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor) -> SimpleNamespace:
    """Milliseconds of the forward and of the backward pass, and the peak above the inputs."""
    clock = Clock(REPETITIONS)

    def backward(y: Tensor) -> object:
        return torch.autograd.grad(y, leaves, dy)

    times = dict(forward=clock(forward), backward=clock(backward, forward))
    return SimpleNamespace(**times, peak=memory(forward, backward)[1])


def scanned(scan: Callable[..., Tensor], x: SimpleNamespace) -> SimpleNamespace:
    """`both` of `scan`(q, k, v, f, w) -> y."""
    qkv, f, w = (t.detach().clone().requires_grad_() for t in (x.qkv, x.f, x.w))

    def forward() -> Tensor:
        q, k, v = qkv.split([x.k, x.k, f.size(-1) * x.v], -1)
        return scan(q, k, v.unflatten(-1, (-1, x.v)), f, w)

    return both(forward, (qkv, f, w), x.dy)


def row(report: Report, name: str, t: SimpleNamespace, b: int, s: int, h: int = H, **more) -> None:
    """Floors: bytes of inputs and outputs, products with W and its transpose; `mufu` is 2^x and 1/x of each element, once."""
    n = b * s * h * K * V
    clock = torch.cuda.get_device_properties(0).multi_processor_count * 16 * 1.755e9
    ahead = b * s * (2 * 2 * K + 2 * 2 * h * V + 4 * h)
    report.add(
        "rows", name=name, forward_ms=t.forward, backward_ms=t.backward,
        forward_us_step=t.forward / s * 1e3, backward_us_step=t.backward / s * 1e3, peak_GB=t.peak / 1e9,
        floor_bytes_ms=ahead / BANDWIDTH * 1e3, floor_flops_ms=2 * n * V / PEAK * 1e3, floor_mufu_ms=2 * n / clock * 1e3, **more,
    )  # fmt: skip


def time_both(report: Report) -> None:
    """Ours, the obvious kernel and the torch loop, one after the other."""
    time_recurrence(report, B, S)
    time_every_state(report)
    report.attempt("torch loop", lambda: time_loop(report))


def time_recurrence(report: Report, b: int, s: int) -> None:
    name = f"ours b{b} s{s}"
    if report.sound(name, lambda: check_scan(report, f"{name}, 61 of them", 61, b, H, torch.bfloat16)):
        row(report, name, scanned(lambda *t: kernel.scan(*t)[0], inputs(s, b)), b, s)


def title(config: kernel.Config) -> str:
    return " ".join(f"{key} {value}" for key, value in vars(config).items())


def time_cut(report: Report, config: kernel.Config) -> None:
    name = title(config)
    if report.sound(name, lambda: check_scan(report, name, 61, 2, 4, torch.bfloat16, config=config)):
        row(report, name, scanned(lambda *t: kernel.scan(*t, config=config)[0], inputs(S, B)), B, S)


def compile_all(cuts: Sequence[kernel.Config]) -> None:
    """Compile the kernels of a sweep at once, in processes of their own; Triton's cache hands them on."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_cut, cuts))


def compile_cut(config: kernel.Config) -> None:
    scanned(lambda *t: kernel.scan(*t, config=config)[0], inputs(64, B))


def time_every_state(report: Report) -> None:
    if not report.sound("every state", lambda: check_every_state(report)):
        return
    x = inputs(S, B)
    for warps in (2, 4, 8):
        t = scanned(lambda *t, warps=warps: m2rnn_every_state.scan(*t, warps=warps), x)
        row(report, f"every state, {warps} warps", t, B, S)


def time_xma(report: Report, folder: Path) -> None:
    """The authors' kernels, batch first, the best of 1, 2, 4 and 8 warps; the state's gradient is not clipped."""
    sys.path.insert(0, str(folder))
    from xma.layers.m2rnn.op import m2rnn
    from xma.layers.m2rnn.triton_implementation import backward as back_kernels
    from xma.layers.m2rnn.triton_implementation import forward as kernels

    for tuned in (*vars(kernels).values(), *vars(back_kernels).values()):
        if isinstance(tuned, triton.runtime.Autotuner):  # of their 24 configs each
            tuned.configs = [triton.Config({}, num_warps=n, num_stages=1) for n in (1, 2, 4, 8)]

    x = inputs(S, B)
    q, k, v = (t.transpose(0, 1).contiguous() for t in x.qkv.split([K, K, H * V], -1))
    leaves = [q.unsqueeze(2), k.unsqueeze(2), v.unflatten(-1, (H, V)), x.w.bfloat16(), x.f.transpose(0, 1).bfloat16()]
    leaves = [t.detach().contiguous().requires_grad_() for t in leaves]
    dy = x.dy.transpose(0, 1).contiguous()

    def forward() -> Tensor:
        return m2rnn(*leaves)[0]

    wanted = kernel.scan(*x.qkv[..., : 2 * K].split(K, -1), x.qkv[..., 2 * K :].unflatten(-1, (H, V)), x.f, x.w)[0]
    # Its tensors are all bf16, the forget gates too.
    if not report.sound("xma", lambda: report.check("xma against ours", error(forward().transpose(0, 1), wanted), 0.1)):
        return
    row(report, "xma", both(forward, leaves, dy), B, S)


def time_loop(report: Report, steps: int = 32) -> None:
    """naive.scan in fp32 over so few tokens that the GPU's queue holds their kernels; times and bytes are multiplied up to all."""
    t = scanned(lambda *t: naive.scan(*t)[0], inputs(steps, B))
    t = SimpleNamespace(**{key: value * S / steps for key, value in vars(t).items()})
    row(report, f"torch loop, {S} tokens extrapolated from {steps}", t, B, S)


def time_elementwise(report: Report) -> None:
    """Convolution and gate with norm, in Triton and in plain torch, against the bytes that must move."""
    if not report.sound("elementwise", lambda: check_elementwise(report)):
        return
    g = torch.Generator(DEVICE).manual_seed(0)
    c, inner = 2 * K + H * V, H * V
    packed = torch.randn(S, B, c + inner + H, generator=g, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(c, 1, WIDTH, generator=g, device=DEVICE).bfloat16().requires_grad_()
    bias, scale = (torch.randn(n, generator=g, device=DEVICE).bfloat16().requires_grad_() for n in (c, inner))
    d = torch.ones(inner, device=DEVICE, requires_grad=True)
    y = torch.randn(S, B, H, V, generator=g, device=DEVICE).bfloat16().requires_grad_()
    up = torch.randn(S, B, c, generator=g, device=DEVICE).bfloat16()
    element = 2 * S * B / BANDWIDTH * 1e3
    works = {
        "conv": (lambda ops: ops.conv(packed[..., :c], weight, bias), (packed, weight, bias), up, 2 * c, 3 * c),
        "gate": (
            lambda ops: ops.gate(
                y, packed[..., 2 * K : c].unflatten(-1, (H, V)), packed[..., c : c + inner], d, scale, 1e-5
            ),
            (y, packed, d, scale), up[..., :inner].contiguous(), 4 * inner, 7 * inner,
        ),
    }  # fmt: skip
    for name, (work, leaves, grad, ahead, back) in works.items():
        for kind, ops in (("ours", kernel), ("torch", naive)):
            t = both(lambda work=work, ops=ops: work(ops), leaves, grad)
            report.add(
                "rows", name=f"{name}, {kind}", forward_ms=t.forward, backward_ms=t.backward,
                floor_forward_ms=ahead * element, floor_backward_ms=back * element,
            )  # fmt: skip


# The layer -----------------------------------------------------------------------------------------------------------


def build_layer(kernels: str):
    """The mixer at full width with Transformer Engine's projections, on one rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from nam_megatron.blocks.m2rnn import layer
    from nam_megatron.blocks.m2rnn.block import M2Rnn
    from nam_megatron.runtime.stack import transformer_engine_backend

    one_rank(7)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=56, normalization="RMSNorm", add_bias_linear=False,
        params_dtype=torch.bfloat16, bf16=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    block = M2Rnn(
        kernels=kernels, k_dim=K, v_dim=V, heads=H, conv_width=WIDTH, gradient_clip=None, padded_projection=False
    )
    site: Any = None  # which it does not read without columns of zeros
    groups = ProcessGroupCollection.use_mpu_process_groups()
    spec = layer.spec(transformer_engine_backend(), block, site)
    return build_module(spec, config, d_model=HIDDEN, layer_number=1, pg_collection=groups, name="mixer").cuda()


def time_layer(report: Report) -> None:
    fused, plain = build_layer("fused"), build_layer("naive")
    x = torch.randn(96, 2, HIDDEN, device=DEVICE).bfloat16()
    up = torch.randn_like(x)

    def graded(mixer, to=torch.bfloat16) -> dict[str, Tensor]:
        given = x.detach().to(to).requires_grad_()
        out, _ = mixer(given)
        names, leaves = zip(("x", given), *mixer.named_parameters(), strict=True)
        return {
            "out": out.detach(),
            **dict(zip(names, torch.autograd.grad(out, leaves, up.to(out.dtype)), strict=True)),
        }

    plain.load_state_dict(fused.state_dict())

    def check() -> None:
        found, wanted = graded(fused), graded(plain)
        for name in found:
            report.check(f"layer {name}", error(found[name], wanted[name]), 5e-2)

    if not report.sound("layer", check):
        return
    x = torch.randn(S, B, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    up = torch.randn_like(x)
    leaves = [x, *fused.parameters()]
    clock = Clock(REPETITIONS)

    def forward() -> Tensor:
        return fused(x)[0]

    def backward(out: Tensor) -> object:
        return torch.autograd.grad(out, leaves, up)

    times = dict(forward_ms=clock(forward), backward_ms=clock(backward, forward))
    kept, peak = memory(forward, backward)
    report.add("rows", name="layer", **times, kept_GB=kept / 1e9, peak_GB=peak / 1e9)
    for key, (ms, launches) in list(by_kernel(lambda: backward(forward())).items())[:24]:
        report.add("rows", name=f"layer: {key[:60]}", ms=ms, calls=launches)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
