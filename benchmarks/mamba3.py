"""Mamba-3 on one H200: is it right, how long does it take, what does it keep?

    python benchmarks/mamba3.py --out mamba3.json [--quick] [--only PART ...] [--sweep] [--seconds 300]

Parts, in this order. ours: whole mixers, projections and input norm included, hidden 3584, sequence 4096, rank 1 and 4. released:
mamba-ssm's own Mamba-3 module (no norm in it), only if asked for; its rank 4 needs TileLang and one group. mamba2: Megatron's
Mamba-2 mixer. scan: ours without projections, kernel by kernel too, with --sweep under several launches. checks: more cases
against naive.py.

Right means: |x - reference| / |reference| of the output and of every gradient against blocks/mamba3/naive.py in fp64, in the last
part with NaN in uninitialised memory. Ours are timed only where they are right. A time is a median over CUDA events (clock.py),
the host's is of one step without waiting for the GPU. `floor` is the larger of bytes / 4.3 TB/s and FLOPs / 750 TFLOP/s, of the
projections, the scan at its chunk, and each tensor between them once each way.

Others' kernels choose among all of their configurations, at batch 1 as their keys know no batch; each is tried for 30 ms instead of
Triton's 125. Everything is compiled before, in as many processes as there are CPU cores, without running it. Each part runs in a
process of its own, so that what crashes ends nothing else; the file is whole after every step.
"""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.testing import do_bench

from benchmarks.clock import BANDWIDTH, PEAK, Clock, by_kernel, memory, one_rank
from benchmarks.report import Report, parser
from nam_megatron.blocks.mamba3 import kernel, naive
from nam_megatron.blocks.mamba3.naive import Shape, State, Weights

HIDDEN, SEQUENCE = 3584, 4096
NAM56R = Shape(heads=112, head_dim=64, state_dim=128, groups=8, rank=4, angles=32)
SISO = NAM56R._replace(rank=1)


# Correctness ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Inputs of a comparison with naive.py. documents: lengths of packed documents, which make up s, or none. decay: what is added to
    the inputs of A and dt: 4 makes a token leave e^-28 of the state, and a few of them less than fp32 has."""

    shape: Shape
    chunk: int
    s: int
    b: int = 1
    dtype: torch.dtype = torch.bfloat16
    documents: tuple[int, ...] = ()
    launch: kernel.Launch | None = None
    decay: float = 0.0

    def __str__(self) -> str:
        h, p, n, g, r, a = self.shape
        kind = str(self.dtype).removeprefix("torch.")
        text = (
            f"heads {h} x {p} state {n} groups {g} rank {r} angles {a} chunk {self.chunk} [{self.b}, {self.s}] {kind}"
        )
        text += f" documents {','.join(map(str, self.documents))}" if self.documents else ""
        text += " in a walk" if self.launch is not None and self.launch.walk else ""
        return text + (f" decay {self.decay:g}" if self.decay else "")

    def limit(self, name: str) -> float:
        """Largest relative error allowed of the output or a gradient; in bf16 several roundings of 2^-9 follow one another.

        The gradient of an angle is a sum over all later tokens in which every pair of them cancels. What rounding leaves of each pair
        adds up as a random walk does, with the square root of the length. So a limit for short sequences, which a wrong kernel
        misses by far, grows with it.
        """
        limit = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[self.dtype]
        return limit * max(1.0, (self.s / 512) ** 0.5) if name == "d angles" else limit

    def wrong(self, found: dict[str, float]) -> dict[str, float]:
        """The errors above their limits; NaN is."""
        return {name: e for name, e in found.items() if not e < self.limit(name)}


SMALL = Shape(heads=8, head_dim=64, state_dim=128, groups=2, rank=4, angles=32)
TINY = Shape(heads=4, head_dim=16, state_dim=32, groups=2, rank=4, angles=8)
WALK = kernel.Launch(walk=1)
# The last one has sizes that no walk serves.
WALKED = [
    Case(SMALL, 16, 203, 2, launch=WALK),
    Case(SMALL._replace(groups=8), 16, 1, 3, launch=WALK),
    Case(SMALL, 16, 203, documents=(1, 60, 4, 64, 74), launch=WALK),
    Case(SMALL, 16, 2048, launch=WALK),
    Case(SMALL, 16, 130, dtype=torch.float16, launch=WALK),
    Case(SMALL._replace(rank=2, groups=1), 32, 97, 2, launch=WALK),
    Case(SMALL._replace(rank=1, angles=64), 64, 333, 2, launch=WALK),
    Case(SMALL._replace(rank=1), 64, 203, documents=(64, 64, 75), launch=WALK),
    *(Case(SMALL, 16, s, decay=4.0, launch=WALK) for s in (15, 17, 203)),
    Case(SMALL, 16, 203, decay=4.0, documents=(1, 60, 4, 64, 74), launch=WALK),
    Case(TINY, 4, 61, 2, torch.float32, launch=WALK),
]
CASES = [
    *(Case(SMALL._replace(groups=g), 16, 203, 2) for g in (1, 2, 8)),
    *(Case(SMALL._replace(groups=g, rank=1), 64, 333, 2) for g in (1, 2, 8)),
    *(Case(SMALL, chunk, 130) for chunk in (8, 32)),
    *(Case(SMALL._replace(rank=1, angles=64), chunk, 130) for chunk in (32, 128)),
    Case(SMALL._replace(rank=2), 32, 97),
    Case(SMALL, 16, 1, 3),
    Case(SMALL, 16, 203, documents=(1, 60, 4, 64, 74)),
    Case(SMALL._replace(rank=1), 64, 203, documents=(64, 64, 75)),
    Case(SMALL, 16, 2048),
    *(Case(TINY._replace(groups=g), 4, 61, 2, torch.float32) for g in (1, 2, 4)),
    *(Case(TINY._replace(rank=1), chunk, 61, 2, torch.float32) for chunk in (16, 32)),
    Case(TINY._replace(rank=2, angles=16), 8, 61, 1, torch.float32, (9, 20, 32)),
    Case(TINY, 4, 61, 2, torch.float32, launch=kernel.Launch(columns=16, chunks=3, programs=1)),
]
# Whole chunks, and more and fewer heads than a GPU has multiprocessors: what hopper.py serves, all but the last two.
SPECIALISED = [
    *(Case(SMALL._replace(groups=g), 16, 208, 2) for g in (1, 8)),
    Case(SMALL, 16, 16, 3),
    Case(SMALL._replace(heads=1, groups=1), 16, 512),
    Case(SMALL, 16, 208, documents=(1, 60, 5, 64, 78)),
    Case(SMALL._replace(heads=72), 16, 96, 4, dtype=torch.float16),
    Case(SMALL._replace(rank=2, groups=1), 32, 96, 2),
    Case(SMALL._replace(rank=1, angles=64), 64, 320, 2),
    Case(SMALL._replace(rank=1), 64, 192, documents=(64, 60, 68)),
    Case(SMALL, 16, 208, decay=4.0),
    Case(SMALL, 16, 208, decay=4.0, documents=(1, 60, 5, 64, 78)),
    Case(SMALL, 16, 203),
    Case(TINY, 4, 64, dtype=torch.float32),
]
# Where what is left of a state within a chunk is less than fp32 has.
STRONG = [
    *(Case(SMALL._replace(rank=1), 64, s, 2, decay=4.0) for s in (1, 63, 65, 255)),
    *(Case(SMALL, 16, s, 1, decay=4.0) for s in (15, 17, 203)),
    Case(SMALL, 16, 203, decay=4.0, documents=(1, 60, 4, 64, 74)),
    Case(TINY._replace(rank=1), 32, 61, 2, torch.float32, decay=4.0),
]


def weights_of(shape: Shape, device: str, dtype: torch.dtype, generator: torch.Generator | None) -> Weights:
    """Around their initial values, so that every gradient matters."""
    h, p, n, _, r, _ = shape

    def draw(*size: int, mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(*size, device=device, generator=generator)

    mimo = [draw(h, r, p, mean=m, spread=0.3) for m in (1 / r, 1, 1 / r)] if r > 1 else [None] * 3
    bias = [draw(h, r, n, mean=1, spread=0.3) for _ in range(2)]
    norm = [draw(n, mean=1, spread=0.2).to(dtype) for _ in range(2)]
    every = Weights(draw(h, mean=-3, spread=1), draw(h, mean=1, spread=1), *bias, *norm, *mimo)
    return Weights(*(None if w is None else w.requires_grad_() for w in every))


def packed_of(
    shape: Shape, s: int, b: int, device: str, dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    width = sum(shape.parts.values())
    return torch.randn(s, b, width, device=device, generator=generator).to(dtype).requires_grad_()


def documents_of(case: Case, device: str) -> Tensor | None:
    if not case.documents:
        return None
    assert sum(case.documents) == case.s
    numbers = torch.arange(len(case.documents)).repeat_interleave(torch.tensor(case.documents))
    return numbers.to(device, torch.int32).unsqueeze(0)


def named(shape: Shape, y: Tensor, packed: Tensor, weights: Weights) -> dict[str, Tensor]:
    """Output and gradients by name; the packed one's by part."""
    parts = zip(shape.parts, packed.split(list(shape.parts.values()), -1), strict=True)
    return {
        "y": y,
        **{f"d {name}": part for name, part in parts},
        **{f"d {n}": w for n, w in weights._asdict().items() if w is not None},
    }


def run(scan: Callable[[Tensor, Weights], Tensor], packed: Tensor, weights: Weights, dy: Tensor) -> tuple:
    leaves = [packed, *(w for w in weights if w is not None)]
    y = scan(packed, weights)
    d_packed, *rest = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    grads = iter(rest)
    return y, d_packed, Weights(*(None if w is None else next(grads) for w in weights))


def double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().double().requires_grad_()


def error(found: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Relative to `wanted`, or to `size` if given. Where `wanted` is exactly zero, so must `found` be, or nearly."""
    size = wanted if size is None else size
    return ((found.double() - wanted.double()).norm() / size.double().norm().clamp(min=1e-4)).item()


def errors(case: Case, device: str = "cuda", seed: int = 0) -> dict[str, float]:
    """Of our output and gradients, by name."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = weights_of(case.shape, device, case.dtype, generator)
    packed = packed_of(case.shape, case.s, case.b, device, case.dtype, generator)
    with torch.no_grad():
        for name, part in zip(case.shape.parts, packed.split(list(case.shape.parts.values()), -1), strict=True):
            part.add_(case.decay if name in ("dt", "A") else 0.0)
            # One head's last token forgets as slowly as any may, and learns nothing of it.
            part[-1:, :, : name == "A" and not case.decay] = -12.0
    dy = torch.randn(case.s, case.b, case.shape.inner, device=device, generator=generator)
    documents = documents_of(case, device)
    exact = run(
        lambda x, w: naive.scan(x, w, case.shape, None, documents)[0],
        double(packed),
        Weights(*map(double, weights)),
        dy,
    )
    ours = run(
        lambda x, w: kernel.scan(x, w, case.shape, case.chunk, documents, launch=case.launch), packed, weights, dy
    )
    wanted, found = named(case.shape, *exact), named(case.shape, *ours)
    # Of a token that no other sees the angles' gradient is exactly zero: q's part and k's cancel. Each is about half as large as
    # d B, and what rounding leaves of them counts dt times: judged by that.
    dt = max(1.0, case.decay)
    sizes = wanted | ({"d angles": dt * wanted["d B"]} if case.s == 1 or case.decay else {})
    floor = {"d A at its floor": float(found["d A"][-1, :, 0].any())} if not case.decay else {}
    return {name: error(t, wanted[name], sizes[name]) for name, t in found.items()} | floor


def halves(case: Case, device: str = "cuda") -> dict[str, float]:
    """Errors of a sequence taken in three pieces, the last of one token, against naive's whole one."""
    generator = torch.Generator(device).manual_seed(1)
    weights = weights_of(case.shape, device, case.dtype, generator)
    packed = packed_of(case.shape, case.s, case.b, device, case.dtype, generator).detach()
    wanted, last = naive.scan(packed.double(), Weights(*map(double, weights)), case.shape)
    ys, state = [], None
    for piece in packed.split([case.s // 3, case.s - case.s // 3 - 1, 1]):
        y, state = kernel.prefill(piece, weights, case.shape, case.chunk, state, launch=case.launch)
        ys.append(y)
    angles = {"angle": error(state.angle.cos(), last.angle.cos())}
    states = {n: error(getattr(state, n), getattr(last, n)) for n in State._fields if n != "angle"}
    return {"y": error(torch.cat(ys), wanted)} | angles | states


# Time ----------------------------------------------------------------------------------------------------------------


def host_ms(work: Callable[[], Any], repetitions: int) -> float:
    """Of the host's time alone: how long it takes to queue the work."""
    spans = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        spans.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(spans)


def measure(module: torch.nn.Module, batch: int, clock: Clock, batch_first: bool = False) -> dict[str, float]:
    """Forward, forward and backward in ms; GiB kept in between, less the output, and the peak of both, parameter gradients in it."""
    size = (batch, SEQUENCE) if batch_first else (SEQUENCE, batch)
    x = torch.randn(*size, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)

    def forward() -> Tensor:
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    def both() -> None:
        forward().backward(dy)
        module.zero_grad(set_to_none=True)
        x.grad = None

    result = {"forward": clock(forward), "both": clock(both), "host": host_ms(both, 5)}
    kept, peak = memory(forward, lambda out: out.backward(dy))
    return result | {"kept_gib": (kept - dy.nbytes) / 2**30, "peak_gib": peak / 2**30}


def floors(shape: Shape, chunk: int, batch: int) -> dict[str, float]:
    """Least ms, forward and both ways."""
    tokens, width = SEQUENCE * batch, sum(shape.parts.values())
    h, p, n, _, r, _ = shape
    rows = chunk * r
    projections = 2 * HIDDEN * (width + shape.inner)
    scan = r * h * (rows * (n + p) + 4 * n * p)  # half of the scores is masked
    moved = 2 * tokens * (2 * HIDDEN + 2 * width + 2 * shape.inner) + 2 * HIDDEN * (width + shape.inner)
    flops, least = tokens * (projections + scan), moved / BANDWIDTH
    return {"forward": 1e3 * max(least, flops / PEAK), "both": 3e3 * max(least, flops / PEAK), "tflop": flops / 1e12}


class Megatron:
    """Mixers as Megatron builds them on one GPU. Raises where Megatron or Transformer Engine is missing."""

    def __init__(self) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        from nam_megatron.runtime.stack import transformer_engine_backend

        self.backend = transformer_engine_backend()
        one_rank()
        self.groups = ProcessGroupCollection.use_mpu_process_groups()

    def config(self, **more: Any) -> Any:
        from megatron.core.transformer import TransformerConfig

        fields = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=56, ffn_hidden_size=128)
        fields |= dict(normalization="RMSNorm", add_bias_linear=False, is_hybrid_model=True, bf16=True)
        fields |= dict(params_dtype=torch.bfloat16, gradient_accumulation_fusion=False)
        return TransformerConfig(**fields | more)

    def parts(self) -> Any:
        from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules

        in_proj, out_proj = self.backend.column_parallel_layer_norm_linear(), self.backend.row_parallel_linear()
        return MambaMixerSubmodules(in_proj=in_proj, out_proj=out_proj)

    def mamba3(self, shape: Shape, chunk: int, recompute: str = "none") -> torch.nn.Module:
        from nam_megatron.blocks.mamba3.layer import Mamba3Mixer

        sizes = dict(zip(("heads", "head_dim", "state_dim", "groups", "mimo_rank", "angles"), shape, strict=True))
        return Mamba3Mixer(
            self.config(), self.parts(), HIDDEN, **sizes, chunk=chunk, recompute=recompute, kernels="fused", head_pieces=1,
            keep_states=False,
            keep_prepared=False,
            rates_apart=False,
            layer_number=1, pg_collection=self.groups,
        ).cuda()  # fmt: skip

    def mamba2(self, heads: int, state: int) -> torch.nn.Module:
        from megatron.core.ssm.mamba_mixer import MambaMixer

        sizes = dict(mamba_num_heads=heads, mamba_head_dim=64, mamba_state_dim=state, mamba_num_groups=8)
        return MambaMixer(
            self.config(**sizes), self.parts(), HIDDEN, layer_number=1, pg_collection=self.groups
        ).cuda()  # fmt: skip


def released(groups: int, rank: int = 1) -> torch.nn.Module:
    """mamba-ssm's module at NAM56R's sizes, with the chunk that it recommends."""
    from mamba_ssm.modules.mamba3 import Mamba3

    sizes = dict(d_state=SISO.state_dim, expand=2, headdim=SISO.head_dim, ngroups=groups, chunk_size=64 // rank)
    return Mamba3(HIDDEN, **sizes, is_mimo=rank > 1, mimo_rank=rank, device="cuda", dtype=torch.bfloat16)


def released_errors(module: torch.nn.Module, s: int = 512) -> tuple[dict[str, float], dict[str, float]]:
    """(mamba-ssm's, ours): errors against naive in fp64 of the output and the gradients, same bf16 inputs and weights.

    mamba-ssm turns neighbouring state columns, we columns half the state apart.
    """
    shape = SISO._replace(groups=module.num_bc_heads)
    generator = torch.Generator("cuda").manual_seed(2)
    weights = weights_of(shape, "cuda", torch.bfloat16, generator)
    packed = packed_of(shape, s, 1, "cuda", torch.bfloat16, generator)
    dy = torch.randn(s, 1, shape.inner, device="cuda", generator=generator)
    half = shape.state_dim // 2
    theirs = torch.arange(shape.state_dim, device="cuda").view(2, half).t().flatten()

    def module_scan(x: Tensor, w: Weights) -> Tensor:
        z, v, B, C, *rest = x.split(list(shape.parts.values()), -1)
        B, C = (t.unflatten(-1, (-1, shape.state_dim))[..., theirs].flatten(-2) for t in (B, C))
        x = torch.cat([z, v, B, C, *rest], -1).transpose(0, 1)
        names = {"dt_bias": w.dt_bias, "D": w.D, "B_bias": w.B_bias[..., theirs], "C_bias": w.C_bias[..., theirs]}
        names |= {"B_norm.weight": w.B_norm[theirs], "C_norm.weight": w.C_norm[theirs]}
        kept = module.in_proj, module.out_proj
        module.in_proj = module.out_proj = torch.nn.Identity()
        y = torch.func.functional_call(module, names, (x,)).transpose(0, 1)
        module.in_proj, module.out_proj = kept
        return y

    exact = run(lambda x, w: naive.scan(x, w, shape)[0], double(packed), Weights(*map(double, weights)), dy)
    wanted = named(shape, *exact)
    found = [
        run(scan, packed, weights, dy) for scan in (module_scan, lambda x, w: kernel.scan(x, w, shape, 64))
    ]  # fmt: skip
    return tuple({n: error(t, wanted[n]) for n, t in named(shape, *each).items()} for each in found)


# The scan alone ------------------------------------------------------------------------------------------------------


def measure_scan(case: Case, clock: Clock) -> dict[str, Any]:
    """Forward and backward in ms, the peak above the inputs, and the ms of each kernel in both, torch's own together."""
    generator = torch.Generator("cuda").manual_seed(3)
    weights = weights_of(case.shape, "cuda", case.dtype, generator)
    packed = packed_of(case.shape, case.s, case.b, "cuda", case.dtype, generator)
    leaves = [packed, *(w for w in weights if w is not None)]
    dy = torch.randn(case.s, case.b, case.shape.inner, device="cuda", dtype=case.dtype, generator=generator)

    def forward() -> Tensor:
        return kernel.scan(packed, weights, case.shape, case.chunk, launch=case.launch)

    def backward(y: Tensor) -> object:
        return torch.autograd.grad(y, leaves, dy)

    times = {"forward": clock(forward), "backward": clock(backward, forward)}
    kernels: dict[str, float] = {}
    for key, (ms, _) in by_kernel(lambda: backward(forward())).items():
        name = key if key.startswith("_") else "torch"
        kernels[name] = kernels.get(name, 0.0) + ms
    _, peak = memory(forward, backward)
    return times | {"both": sum(times.values()), "peak_gib": peak / 2**30, "kernels": kernels}


def sweep() -> Iterator[Case]:
    """What to try: all kernels change at once, each is judged by its own time."""
    for shape, chunk in ((NAM56R, 16), (SISO, 64)):
        for walks in ((4, 1, 0), (4, 1, 168), (4, 1, 128), (4, 2, 0), (8, 1, 128)):
            yield Case(shape, chunk, SEQUENCE, 4, launch=WALK._replace(walks=walks))
        for columns, walk, tile, product, rows, keys, steps, values, written in (
            (64, (4, 1, 0), 128, (0, 1, 168), 64, 1, 32, 4, 16),
            (64, (4, 4, 0), 64, (0, 1, 168), 16, 1, 32, 2, 32),
            (128, (4, 2, 0), 64, (0, 2, 0), 64, 2, 64, 8, 64),
            (128, (4, 3, 0), 128, (0, 1, 128), 128, 4, 64, 4, 128),
        ):
            launch = kernel.Launch(
                columns=columns, output_tile=tile, gradients_tile=tile, turned=written, written=written, rows=rows, steps=steps,
                forward_states=walk, backward_states=walk, output=product, gradients=product, values=values, keys=keys,
            )  # fmt: skip
            yield Case(shape, chunk, SEQUENCE, 4, launch=launch)


# Compiling ahead -----------------------------------------------------------------------------------------------------


@contextmanager
def instead_of_running(start: Callable[..., Any]) -> Iterator[None]:
    """start(kernel, *arguments, **options) instead of each start of a Triton kernel."""
    run, JITFunction.run = JITFunction.run, start
    try:
        yield
    finally:
        JITFunction.run = run


RUN, TUNE = JITFunction.run, Autotuner.run


def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Into Triton's cache on disk."""
    return RUN(kernel, *arguments, grid=grid, warmup=True, **options)


def scan_without_data(case: Case) -> None:
    """Our scan and its gradients on the meta device."""
    weights = weights_of(case.shape, "meta", case.dtype, None)
    packed = packed_of(case.shape, case.s, case.b, "meta", case.dtype, None)
    y = kernel.scan(packed, weights, case.shape, case.chunk, documents_of(case, "meta"), launch=case.launch)
    y.backward(torch.empty_like(y))


def names_of(case: Case) -> list[str]:
    """Of the kernels of a scan."""
    names: dict[str, None] = {}
    with instead_of_running(lambda kernel, *_, **__: names.setdefault(kernel.__name__)):
        scan_without_data(case)
    return list(names)


def compile_ours(name: str, cases: list[Case]) -> None:
    """One kernel of scans."""
    with instead_of_running(lambda kernel, *a, **o: compile_only(kernel, *a, **o) if kernel.__name__ == name else None):
        for case in cases:
            scan_without_data(case)


def compile_theirs(make: Callable[[], torch.nn.Module], sizes: list[tuple[int, int]], share: int, of: int) -> None:
    """Every `of`-th configuration among which a module's kernels choose. sizes: of the input, but for its last dimension.

    Theirs insist on tensors of a GPU. Fewer tokens than will be timed are enough: a kernel only depends on whether what it counts,
    chunks above all, is a multiple of 16.
    """

    def tune(self: Autotuner, *arguments: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        for config in self.prune_configs(options)[share::of] or self.configs[:1]:
            try:
                self.fn.run(*arguments, **options, **config.all_kwargs())
            except Exception as error:  # some do not fit, and are passed over when the module chooses, too
                print(f"compiling: {self.base_fn.__name__} {config}: {type(error).__name__}", flush=True)

    Autotuner.run = tune
    try:
        with instead_of_running(compile_only):
            for size in sizes:
                out = make()(torch.randn(*size, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True))
                out = out[0] if isinstance(out, tuple) else out
                out.backward(torch.ones_like(out))
    finally:
        Autotuner.run = TUNE


def mamba2(heads: int, state: int) -> torch.nn.Module:
    return Megatron().mamba2(heads, state)


def jobs_of(cases: list[Case]) -> Iterator[Callable[[], None]]:
    """Each kernel of each of our scans; batches after one another, since most kernels do not depend on them."""
    scans: dict[Case, list[Case]] = {}
    for case in dict.fromkeys(cases):
        scans.setdefault(replace(case, b=1), []).append(case)
    for same in scans.values():
        yield from (partial(compile_ours, name, same) for name in names_of(same[0]))


def compile_all(cases: list[Case], others: list[Callable[[], None]]) -> None:
    """One at a time they would take longer than everything else. What fails here fails again where it is used."""
    start, jobs = time.monotonic(), [*others, *jobs_of(cases)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            if cause := done.exception():
                print(f"compiling: {type(cause).__name__}: {str(cause)[:200]}", flush=True)
    print(f"compiled in {time.monotonic() - start:.0f} s, {len(jobs)} jobs", flush=True)


# The sitting ---------------------------------------------------------------------------------------------------------


def check(report: Report, name: str, case: Case, find: Callable[[Case], dict[str, float]] = errors) -> None:
    found = find(case)
    limits = {"limit": case.limit("y"), "limit_angles": case.limit("d angles")}
    verdict = "FAIL" if case.wrong(found) else "PASS"
    report.add("checks", name=name, verdict=verdict, **limits, errors=found)


def check_all(report: Report, cases: list[Case]) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for case in cases:
        report.attempt(str(case), partial(check, report, str(case), case))
    wholes = {case.launch: case for case in reversed(cases) if case.launch in (None, WALK) and not case.documents}
    for whole in wholes.values():
        name = f"in pieces: {whole}"
        report.attempt(name, partial(check, report, name, whole, halves))


def small(case: Case) -> Case:
    """Of the same kernels, few enough tokens for naive.py."""
    return replace(case, s=203, b=1)


def scan_alone(report: Report, case: Case, repetitions: int) -> None:
    kind = "SISO" if case.shape.rank == 1 else f"MIMO rank {case.shape.rank}"
    name = f"{kind}, groups {case.shape.groups}"
    if report.sound(name, lambda: check(report, str(small(case)), small(case))):
        found = measure_scan(case, Clock(repetitions))
        launch = (case.launch or kernel.Launch())._asdict()
        report.add("scan", name=name, batch=case.b, chunk=case.chunk, **found, launch=launch)


def row(
    report: Report, name: str, module: Callable[[], torch.nn.Module], batch: int, repetitions: int, **more: Any
) -> None:
    floor = more.pop("floor", None)

    def step() -> None:
        found = measure(module(), batch, Clock(repetitions), **more)
        report.add("rows", name=name, batch=batch, **found, floor=floor)

    report.attempt(f"{name} batch {batch}", step)


def ours(report: Report, name: str, shape: Shape, chunk: int, repetitions: int) -> None:
    case = Case(shape, chunk, 203)
    if not report.sound(name, lambda: check(report, str(case), case)):
        return
    megatron = Megatron()
    for batch in (1, 4):
        module = partial(megatron.mamba3, shape, chunk)
        row(report, name, module, batch, repetitions, floor=floors(shape, chunk, batch))
    again = partial(megatron.mamba3, shape, chunk, "in_proj")
    row(report, f"{name}, in_proj computed again", again, 4, repetitions)


def mamba2_rows(report: Report, heads: int, state: int, repetitions: int) -> None:
    for batch in (1, 4):
        row(report, f"Mamba-2 {heads} heads state {state} groups 8", partial(mamba2, heads, state), batch, repetitions)


def released_rows(report: Report, groups: int, rank: int, repetitions: int) -> None:
    name = f"mamba-ssm 2.3.2.post1 Mamba-3 {'SISO' if rank == 1 else f'MIMO rank {rank}'} groups {groups}"
    for batch in (1, 4):
        row(report, name, partial(released, groups, rank), batch, repetitions, batch_first=True)


def mamba2_part(report: Report, repetitions: int) -> None:
    sizes = ((56, 64), (112, 128))
    jobs = [partial(compile_theirs, partial(mamba2, *n), [(2048, 1), (2048, 4)], i, 5) for n in sizes for i in range(5)]
    report.apart("compiling Mamba-2", partial(compile_all, [], jobs))
    for heads, state in sizes:
        report.apart(f"Mamba-2 {heads} heads", partial(mamba2_rows, report, heads, state, repetitions))


def released_jobs() -> list[Callable[[], None]]:
    return [
        partial(compile_theirs, partial(released, groups), [(1, 1024)], i, 27) for groups in (1, 8) for i in range(27)
    ]


def released_part(report: Report, repetitions: int) -> None:
    for groups in (1, 8):
        report.apart(f"mamba-ssm groups {groups}", partial(released_rows, report, groups, 1, repetitions))
    # After the rows: the choice of configurations, kept on disk, is to be made at their length.
    report.apart("errors beside mamba-ssm's", partial(compare, report))
    if importlib.util.find_spec("tilelang"):
        report.apart("mamba-ssm groups 1 rank 4", partial(released_rows, report, 1, 4, repetitions))
    else:
        report.add("failed", name="mamba-ssm groups 1 rank 4", why="TileLang is not installed")


def compare(report: Report) -> None:
    for whose, each in zip(("mamba-ssm", "ours"), released_errors(released(8)), strict=True):
        report.add("errors", name=whose, tokens=512, errors=each)


LAYERS = {
    "Mamba-3 SISO groups 1": (SISO._replace(groups=1), 64),
    "Mamba-3 SISO groups 8": (SISO, 64),
    "Mamba-3 MIMO rank 4 groups 1": (NAM56R._replace(groups=1), 16),
    "Mamba-3 MIMO rank 4 groups 8": (NAM56R, 16),
}


PARTS = ("ours", "released", "mamba2", "scan", "checks")
DEFAULT = tuple(part for part in PARTS if part != "released")


def main(argv: list[str]) -> int:
    what = dict(sweep="times of each kernel under several launches", quick="fewer checks and repetitions")
    words = parser(__doc__, 600, **what, apart=True)
    words.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", default=DEFAULT, help=f"of {', '.join(PARTS)}"
    )
    given = words.parse_args(argv)
    report, repetitions = Report(given.out, given.seconds), 10 if given.quick else 30
    parts = given.only

    # A process uses what another has chosen.
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    Autotuner.do_bench = staticmethod(partial(do_bench, warmup=5, rep=25))
    layers = (
        [Case(shape, chunk, SEQUENCE, b) for shape, chunk in LAYERS.values() for b in (1, 4)] if "ours" in parts else []
    )
    timed = [Case(shape, chunk, SEQUENCE, b) for shape, chunk in ((SISO, 64), (NAM56R, 16)) for b in (1, 4)]
    timed = [*timed, *(sweep() if given.sweep else [])] if "scan" in parts else []
    checked = [*CASES, *STRONG, *WALKED] if "checks" in parts else []
    checked = [*CASES[::4], *STRONG[::4], *WALKED[::4]] if given.quick and checked else checked

    report.apart("host", partial(report.host, hidden=HIDDEN, sequence=SEQUENCE))
    theirs = released_jobs() if "released" in parts else []
    report.apart("compiling", partial(compile_all, [*layers, *timed, *map(small, [*layers, *timed]), *checked], theirs))
    if "ours" in parts:
        for name, (shape, chunk) in LAYERS.items():
            report.apart(name, partial(ours, report, name, shape, chunk, repetitions))
    if "released" in parts:
        released_part(report, repetitions)
    if "mamba2" in parts:
        mamba2_part(report, repetitions)
    for case in timed:
        report.apart(f"scan of {case} {case.launch}", partial(scan_alone, report, case, repetitions))
    for rank in (1, 2, 4):
        if cases := [case for case in checked if case.shape.rank == rank]:
            report.apart(f"checks of rank {rank}", partial(check_all, report, cases))
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
