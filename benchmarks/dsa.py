"""DSA on one H200: is it right, and how long does it take?

    python benchmarks/dsa.py --out dsa.json [--quick] [--sweep] [--seconds 240]

The kernels need torch and Triton. Rows that compare with Megatron and Transformer Engine say so where these are missing.
Times are medians over CUDA events (clock.py). A floor is the larger of bytes / 4.3 TB/s and FLOPs / 750 TFLOP/s. Errors are
|x - reference| / |reference|, reference in fp64.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the checks run in torch's deterministic mode

import torch

try:
    import transformer_engine.pytorch  # noqa: F401  (before any operation: the first to load cuDNN decides which)

    LAYERS = ""
except (ImportError, OSError) as missing:
    LAYERS = f"no row for whole layers, stock DSA or dense MLA: {missing}"

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.clock import BANDWIDTH, PEAK, Clock, by_kernel, error, memory, one_rank
from benchmarks.report import Report, parser
from nam_megatron.blocks.dsa import kernel, naive

N, R, P, H, D, K = 56, 64, 64, 32, 64, 256  # NAM56R: heads, latent, rope; indexer heads and width; top-k
SCALE = (64 + 64) ** -0.5
COEFFICIENT = 0.001
DEVICE, DTYPE = "cuda", torch.bfloat16  # tests/gpu/test_dsa.py runs the checks in Triton's interpreter too

# Tried by --sweep: changes to kernel.TILES.
SWEEP = {
    "target": [{}, dict(num_stages=3), dict(I=128, J=128, num_warps=8), dict(J=64)],
    "lse": [{}, dict(M=64, J=128), dict(M=128, J=128, num_warps=8), dict(num_stages=4)],
    "attend_back": [{}, dict(num_stages=3), dict(num_warps=8), dict(J=32), dict(J=128, num_warps=8)],
    "index_dq": [{}, dict(J=128), dict(I=128, num_warps=8), dict(I=128, J=128, num_warps=8)],
    "index_dk": [{}, dict(rows=512), dict(J=64, num_warps=4), dict(num_stages=2)],
    "select": [{}, dict(per_warp=512), dict(per_warp=2048)],
    "collect": [{}, dict(E=16), dict(E=64, num_warps=8), dict(E=16, num_warps=1)],
    "scores": [{}, dict(num_stages=2), dict(num_stages=4)],
    "attend": [{}, dict(num_stages=3), dict(num_warps=8)],
    "transpose": [{}, dict(rows=256), dict(I=128, num_warps=8)],
}


def main(argv: list[str]) -> int:
    words = parser(__doc__, 600, sweep="time other tiles first, then use the best", quick="few checks, one length")
    words.add_argument("--layers", action="store_true", help="only the rows that need Megatron")
    o = words.parse_args(argv)
    report = Report(o.out, o.seconds)
    report.host(tiles=kernel.TILES)
    clock = Clock(10 if o.quick else 30)
    if not o.layers:
        check_all(report, o.quick)
        if o.sweep:
            sweep(report, report.until - 0.45 * o.seconds)  # leaves time for what comes after
        time_kernels(report, clock, 4, 4096)
    if LAYERS:
        report.add("failed", name="layers", why=LAYERS)
    else:
        one_rank()
        report.attempt("layers", lambda: time_layers(report, clock))
    if not o.layers and not o.quick:
        time_kernels(report, clock, 2, 8192)
    return report.end()


# Inputs --------------------------------------------------------------------------------------------------------------


def inputs(b: int, s: int, n: int = N, h: int = H, seed: int = 0) -> SimpleNamespace:
    """Random tensors as the layer hands them over."""
    g = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, device=DEVICE) * scale).to(DTYPE)

    indexer = dict(q=draw(s, b, h, D), k=draw(s, b, D), w=draw(s, b, h, scale=(h * D) ** -0.5))
    value = dict(value=draw(n, R, R, scale=R**-0.5), dvalue=draw(s, b, n * R))
    core = dict(query=draw(s, b, n, R + P), key=draw(s, b, 1, R + P), dout=draw(s, b, n, R))
    return SimpleNamespace(**indexer, **core, **value)


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


# Checks --------------------------------------------------------------------------------------------------------------


def check_all(report: Report, quick: bool) -> None:
    # Every torch.empty is filled with NaN, and operations that cannot be deterministic raise.
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    cases = [(2, 1025, 56), (1, 2049, 28)]
    if not quick:
        cases += [(1, 2048, 7), (1, 2048, 14), (1, 2047, 32), (1, 4097, 64), (1, 4096, 56), (1, 8192, 7)]
    for b, s, n in cases:
        report.attempt(f"correct b{b} s{s} n{n}", lambda b=b, s=s, n=n: check(report, b, s, n))
    report.attempt("top-k = sequence", lambda: check_dense(report))
    report.attempt("bit mask", lambda: check_mask(report))
    report.attempt("CUDA graph", lambda: check_graph(report))
    torch.use_deterministic_algorithms(False)


def check(report: Report, b: int, s: int, n: int) -> None:
    """Against naive.py in fp64; its run in DTYPE, which rounds where Megatron's fallback does, is the measure."""
    at, x = f"b{b} s{s} n{n} ", inputs(b, s, n)
    scores = kernel.index_scores(x.q, x.k, x.w)
    q64, k64, w64 = leaves(x.q, x.k, x.w, dtype=torch.float64)
    scores64 = naive.index_scores(q64, k64, w64)
    seen = naive.causal(s, s, x.q.device)
    visible = scores[..., :s].masked_fill(~seen, 0.0)
    report.check(at + "scores", error(visible, scores64.masked_fill(~seen, 0.0)), 1e-5)

    selection = kernel.select(scores, K)
    report.check(at + "top-k is not torch.topk's", different_top_k(scores, selection), 0)
    report.check(at + "keys' side of the top-k", wrong_pairs(selection), 0)
    again = kernel.select(kernel.index_scores(x.q, x.k, x.w), K)
    report.check(at + "top-k not repeated", float((again.pairs != selection.pairs).sum()), 0)

    check_attend(report, at, x, selection)

    def valued(ops, dtype) -> list[Tensor]:
        latent, weight = leaves(x.dout, x.value, dtype=dtype)
        out = ops.values(latent, weight)
        return [out.detach(), *torch.autograd.grad(out, (latent, weight), x.dvalue.to(dtype))]

    for name, f, r, w in zip(
        ("out", "dlatent", "dweight"),
        valued(kernel, DTYPE), valued(naive, DTYPE), valued(naive, torch.float64), strict=True,
    ):  # fmt: skip
        its = error(r, w)
        report.check(at + f"values {name}", error(f, w), max(2 * its, 1e-5), its)

    check_indexer(report, at, x)


def check_attend(report: Report, at: str, x: SimpleNamespace, selection: kernel.Selection) -> None:
    chosen = naive.Selection(as_mask(selection))

    def attended(ops, dtype, picked) -> list[Tensor]:
        query, key = leaves(x.query, x.key, dtype=dtype)
        out = ops.attend(query, key, picked, SCALE, R)
        return [out.detach(), *torch.autograd.grad(out, (query, key), x.dout.to(dtype))]

    wanted, rounded = attended(naive, torch.float64, chosen), attended(naive, DTYPE, chosen)
    found, second = attended(kernel, DTYPE, selection), attended(kernel, DTYPE, selection)
    for name, f, r, w in zip(("out", "dquery", "dkey"), found, rounded, wanted, strict=True):
        its = error(r, w)
        report.check(at + f"attend {name}", error(f, w), max(1.5 * its, 1e-5), its)
    report.check(at + "attend not repeated", float(sum((a != c).sum() for a, c in zip(found, second, strict=True))), 0)


def check_indexer(report: Report, at: str, x: SimpleNamespace) -> None:
    """The loss and its gradients, which Megatron computes in fp32 and rounds once: so must we, as naive.py does in DTYPE."""

    def learned(ops, dtype) -> list[Tensor]:
        q, k, w = leaves(x.q, x.k, x.w, dtype=dtype)
        scores, core = ops.index_scores(q, k, w), (x.query.to(dtype), x.key.to(dtype))
        kl = ops.indexer_kl(q, k, w, scores, *core, SCALE, factor=0.7 / x.k[..., 0].numel())
        return [kl.detach(), *torch.autograd.grad(kl, (q, k, w))]

    wanted, rounded = learned(naive, torch.float64), learned(naive, DTYPE)
    found, second = learned(kernel, DTYPE), learned(kernel, DTYPE)
    for name, f, r, w in zip(("kl", "dq", "dk", "dw"), found, rounded, wanted, strict=True):
        its = error(r, w)
        report.check(at + f"indexer {name}", error(f, w), max(1.2 * its, 1e-5), its)
    report.check(at + "indexer not repeated", float(sum((a != c).sum() for a, c in zip(found, second, strict=True))), 0)


def as_mask(selection: kernel.Selection) -> Tensor:
    """bool [b, s, s]."""
    at = selection.indices.long()
    mask = torch.zeros(*at.shape[:2], at.size(1) + 1, dtype=torch.bool, device=at.device)
    return mask.scatter_(-1, at.where(at >= 0, at.size(1)), True)[..., :-1]


def different_top_k(scores: Tensor, selection: kernel.Selection) -> float:
    """How many selected scores are not torch.topk's: as multisets, so that ties may go either way."""
    s = scores.size(1)
    scores = scores[..., :s].masked_fill(~naive.causal(s, s, scores.device), -torch.inf)
    ours = scores.masked_fill(~as_mask(selection), -torch.inf)
    k = min(K, s)
    return float(
        (ours.topk(k).values != scores.topk(k).values).sum() + (as_mask(selection).sum() != ours.isfinite().sum())
    )


def wrong_pairs(selection: kernel.Selection) -> float:
    """Entries of the keys' lists that do not lead back to the key, plus those missing."""
    wrong = 0
    for indices, starts, pairs in zip(selection.indices, selection.starts, selection.pairs, strict=True):
        total = int(starts[-1])
        keys = torch.arange(len(indices), device=indices.device).repeat_interleave(starts.diff().long())
        wrong += int((indices.flatten()[pairs[:total].long()] != keys).sum()) + int((indices >= 0).sum()) - total
        wrong += total - len(pairs[:total].unique())
    return float(wrong)


def check_dense(report: Report, b: int = 1, s: int = 1000, n: int = N) -> None:
    """Every key selected: DSA is dense causal attention."""
    x = inputs(b, s, n)
    query, key = leaves(x.query, x.key, dtype=torch.float64)
    q, k, v = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), key[..., :R].permute(1, 2, 0, 3)
    args = dict(is_causal=True, scale=SCALE)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand(-1, n, -1, -1), **args)
    selection = kernel.select(kernel.index_scores(x.q, x.k, x.w), s)
    report.check(
        "top-k = sequence", error(kernel.attend(x.query, x.key, selection, SCALE, R), dense.permute(2, 0, 1, 3)), 5e-3
    )


def check_mask(report: Report) -> None:
    """The way not taken computes the same."""
    x = inputs(1, 1000)
    selection = kernel.select(kernel.index_scores(x.q, x.k, x.w), K)
    ours = kernel.attend(x.query, x.key, selection, SCALE, R)
    report.check("by a bit mask", error(attend_by_mask(x.query, x.key, packed(selection)), ours), 5e-3)


def check_graph(report: Report) -> None:
    """Captured once, replayed on other inputs."""
    x, other = inputs(1, 512), inputs(1, 512, seed=1)
    names = ("q", "k", "w", "query", "key")

    def step() -> list[Tensor]:
        return train_core(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for name in names:
        getattr(x, name).copy_(getattr(other, name))
    graph.replay()
    eager = step()
    report.check(
        "CUDA graph replay differs", float(sum((a != c).sum() for a, c in zip(captured, eager, strict=True))), 0
    )


def train_core(x: SimpleNamespace) -> list[Tensor]:
    """Forward and backward of a computing layer's core: outputs and gradients."""
    q, k, w, query, key = leaves(x.q, x.k, x.w, x.query, x.key)
    scores = kernel.index_scores(q, k, w)
    selection = kernel.select(scores, K)
    kl = kernel.indexer_kl(q, k, w, scores, query, key, SCALE)
    out = kernel.attend(query, key, selection, SCALE, R)
    return [out, kl, *torch.autograd.grad((out, kl), (q, k, w, query, key), (x.dout, torch.ones_like(kl)))]


# The way not taken ---------------------------------------------------------------------------------------------------


def attend_by_mask(query: Tensor, key: Tensor, mask: Tensor, M: int = 128, J: int = 64) -> Tensor:
    """kernel.attend's forward pass as dense flash attention under a bit mask, int32 [b, s, s / 32]: 8 times its FLOPs."""
    s, b, n, _ = query.shape
    out = query.new_empty(s, b, n, R)
    grid = (triton.cdiv(s * n, M), b)
    sizes = dict(N=n, R=R, P=P, M=M, J=J)
    _attend_by_mask[grid](
        query, key, mask, out, s, mask.size(-1), SCALE * kernel.LOG2E, **sizes, num_warps=8, num_stages=3
    )
    return out


@triton.jit
def _attend_by_mask(
    query, key, mask, out, S, words, scale2,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Rows are (query, head), as in kernel._lse."""
    b, B = tl.program_id(1), tl.num_programs(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    m, r, p = first_row + tl.arange(0, M), tl.arange(0, R), tl.arange(0, P)
    i = m // N
    row = (i * B + b).to(tl.int64) * N + m % N
    own = query + row[:, None] * (R + P)
    q_latent = tl.load(own + r[None, :], mask=(i < S)[:, None], other=0.0)
    q_rope = tl.load(own + R + p[None, :], mask=(i < S)[:, None], other=0.0)
    bits = mask + (b * S + i).to(tl.int64)[:, None] * words
    highest = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    value = tl.zeros([M, R], tl.float32)
    for first in range(0, tl.minimum((first_row + M - 1) // N + 1, S), J):
        j = first + tl.arange(0, J)
        at = key + (j * B + b)[:, None] * (R + P)
        k_latent = tl.load(at + r[None, :], mask=(j < S)[:, None], other=0.0)
        k_rope = tl.load(at + R + p[None, :], mask=(j < S)[:, None], other=0.0)
        word = tl.load(bits + (j // 32)[None, :], mask=(i < S)[:, None] & (j < S)[None, :], other=0)
        dots = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        dots = tl.dot(q_rope, tl.trans(k_rope), dots, input_precision="ieee") * scale2
        dots = tl.where(((word >> (j % 32)[None, :]) & 1) != 0, dots, -float("inf"))
        higher = tl.maximum(highest, tl.max(dots, 1))
        weight = tl.exp2(dots - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        value = tl.dot(weight.to(k_latent.dtype), k_latent, value * fade[:, None], input_precision="ieee")
        highest = higher
    tl.store(
        out + row[:, None] * R + r[None, :], (value / total[:, None]).to(out.dtype.element_ty), mask=(i < S)[:, None]
    )


def packed(selection: kernel.Selection) -> Tensor:
    """int32 [b, s, s / 32]: bit j % 32 of word j // 32 says whether key j is selected."""
    mask = torch.nn.functional.pad(as_mask(selection), (0, -selection.indices.size(1) % 32)).unflatten(-1, (-1, 32))
    words = (mask.long() << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


# Times ---------------------------------------------------------------------------------------------------------------


def row(report: Report, name: str, ms: float, gb: float = 0.0, gflop: float = 0.0, **more) -> None:
    floor = max(gb * 1e9 / BANDWIDTH, gflop * 1e9 / PEAK) * 1e3
    known = dict(gb=gb, gflop=gflop, floor_ms=floor, over_floor=ms / floor) if floor else {}
    report.add("rows", name=name, ms=ms, **known, **more)


def steps(b: int, s: int) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """(name, work, GB, GFLOP) of each part. Bytes: each input once, each output once."""
    x = inputs(b, s)
    T, pairs = b * s, b * s * (s + 1) / 2
    taken = b * (K * (K + 1) / 2 + (s - K) * K)
    index_in = 2 * T * (H * D + D + H)
    qkv = 2 * T * (N + 1) * (R + P)
    scores = kernel.index_scores(x.q, x.k, x.w)
    selection = kernel.select(scores, K)
    yield (
        "indexer scores",
        lambda: kernel.index_scores(x.q, x.k, x.w),
        (index_in + 4 * pairs) / 1e9,
        2 * H * (D + 1) * pairs / 1e9,
    )
    yield "top-k, both sides", lambda: kernel.select(scores, K), (4 * pairs + 8 * T * K) / 1e9, 0.0
    yield (
        "torch.topk of the same scores (no baseline of ours: it ignores causality)",
        lambda: scores.topk(K, sorted=False), 4 * pairs / 1e9, 0.0,
    )  # fmt: skip
    with torch.no_grad():
        yield (
            "sparse core forward",
            lambda: kernel.attend(x.query, x.key, selection, SCALE, R),
            (qkv + 2 * T * N * R + 4 * T * K) / 1e9, 2 * N * (2 * R + P) * taken / 1e9,
        )  # fmt: skip
    mask = packed(selection)
    yield (
        "sparse core forward by a bit mask (not used)",
        lambda: attend_by_mask(x.query, x.key, mask),
        (qkv + 2 * T * N * R) / 1e9,
        2 * N * (2 * R + P) * pairs / 1e9,
    )
    query, key = leaves(x.query, x.key)
    out = kernel.attend(query, key, selection, SCALE, R)
    yield (
        "sparse core backward",
        lambda: torch.autograd.grad(out, (query, key), x.dout, retain_graph=True),
        (2 * qkv + 4 * T * N * R + 4 * T * K + 4 * T * K * (R + P)) / 1e9, 2 * N * (3 * (R + P) + 2 * R) * taken / 1e9,
    )  # fmt: skip
    q, k, w = leaves(x.q, x.k, x.w)
    loss = (4 * R + 4 * P) * N + 8 * H * D  # per pair: two passes over the scores; scores again twice, dq, dk
    yield (
        "indexer loss and all its gradients",
        lambda: kernel.indexer_kl(q, k, w, scores, x.query, x.key, SCALE),
        (qkv + 2 * index_in + 4 * pairs) / 1e9, loss * pairs / 1e9,
    )  # fmt: skip
    yield "whole core, computing its top-k, with loss", lambda: train_core(x), 0.0, 0.0


def time_kernels(report: Report, clock: Clock, b: int, s: int) -> None:
    for name, work, gb, gflop in steps(b, s):
        report.attempt(name, lambda n=name, w=work, g=gb, f=gflop: row(report, f"b{b} s{s} {n}", clock(w), g, f))
    x = inputs(b, s)
    report.attempt("kernels", lambda: profile(report, f"b{b} s{s}", lambda: train_core(x)))
    report.attempt("memory", lambda: peak_of_core(report, f"b{b} s{s}", x))


def profile(report: Report, at: str, work: Callable[[], object]) -> None:
    for name, (ms, launches) in list(by_kernel(work).items())[:16]:
        row(report, f"{at} kernel {name[:40]} x{launches:g}", ms)


def peak_of_core(report: Report, at: str, x: SimpleNamespace) -> None:
    _, peak = memory(lambda: train_core(x))
    report.add("rows", name=f"{at} peak memory of the whole core over its inputs", gb=peak / 1e9)


def sweep(report: Report, until: float) -> None:
    """Times the tiles of SWEEP and leaves the best in kernel.TILES."""
    clock, x = Clock(10), inputs(4, 4096)
    scores = kernel.index_scores(x.q, x.k, x.w)
    selection = kernel.select(scores, K)
    query, key = leaves(x.query, x.key)
    out = kernel.attend(query, key, selection, SCALE, R)
    dscores = torch.randn_like(scores).bfloat16()

    def backward() -> object:
        return torch.autograd.grad(out, (query, key), x.dout, retain_graph=True)

    def select() -> object:
        return kernel.select(scores, K)

    def index_back() -> object:
        return kernel._index_back(x.q, x.k, x.w, dscores)

    work = {
        "scores": lambda: kernel.index_scores(x.q, x.k, x.w), "select": select, "transpose": select,
        "attend": lambda: kernel.attend(x.query, x.key, selection, SCALE, R),
        "attend_back": backward, "collect": backward,
        "lse": lambda: kernel._normalisers(x.query, x.key, SCALE),
        "target": lambda: kernel._target(x.query, x.key, SCALE, scores.stride(1)),
        "index_dq": index_back, "index_dk": index_back,
    }  # fmt: skip
    for name, changes in SWEEP.items():
        usual, times = kernel.TILES[name], {}
        for change in changes:
            if time.monotonic() > until:
                break
            kernel.TILES[name] = tile = usual | change

            def measure(name: str = name, tile: dict = tile, times: dict = times) -> None:
                times[tuple(tile.items())] = ms = clock(work[name])
                report.add("sweep", name=f"{name} {tile}", ms=ms)

            report.attempt(f"{name} {change}", measure)
        kernel.TILES[name] = dict(min(times, key=times.get)) if times else usual
    print("best tiles:", kernel.TILES, flush=True)


# Whole layers --------------------------------------------------------------------------------------------------------


def config(**more):
    """NAM56R's: layer 5 computes a top-k, 9 and 13 reuse it."""
    from megatron.core.transformer import MLATransformerConfig

    fields = dict(
        num_layers=52, hidden_size=3584, num_attention_heads=N, ffn_hidden_size=18944, q_lora_rank=64, kv_lora_rank=R,
        qk_head_dim=64, qk_pos_emb_head_dim=P, v_head_dim=64, qk_layernorm=True, rope_type="rope", rotary_base=500000,
        rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, is_hybrid_model=True, experimental_attention_variant="dsa",
        dsa_indexer_n_heads=H, dsa_indexer_head_dim=D, dsa_indexer_topk=K, dsa_indexer_loss_coeff=COEFFICIENT,
        dsa_indexer_rotate_activation=False, dsa_indexer_topk_freq=16, dsa_indexer_skip_topk_offset=5,
    )  # fmt: skip
    return MLATransformerConfig(**fields | more)


def layer(kind: str, number: int, config):
    """kind: dsa (ours), stock (Megatron's DSA) or mla (Megatron's dense MLA). Ours on one config hand their top-k on by it."""
    from megatron.core.transformer.spec_utils import build_module

    from nam_megatron.recipe import load
    from nam_megatron.runtime import stack

    blocks = load("nam56r").blocks
    keys = {"mla": {"kernels": "megatron"}, "dsa": {"kernels": "fused" if kind == "dsa" else "megatron"}}
    blocks = blocks.model_copy(update={k: blocks.of(k).model_copy(update=said) for k, said in keys.items()})
    which, site = "mla" if kind == "mla" else "dsa", SimpleNamespace(blocks=blocks)
    spec = stack.torch_side(which).spec(stack.transformer_engine_backend(), blocks.of(which), site)
    return build_module(spec, config=config, layer_number=number).cuda().train()


def time_layers(report: Report, clock: Clock) -> None:
    """TransformerLayers of NAM56R's width, built by Megatron from our specs and from its own."""

    def passes(module, b: int, s: int, before: Callable[[], None] = lambda: None) -> tuple[Callable, Callable]:
        x = torch.randn(s, b, 3584, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)
        mask = torch.ones(1, 1, 1, 1, device="cuda", dtype=torch.bool)

        def forward() -> Tensor:
            before()
            return module(x, attention_mask=mask)[0]

        def backward(y: Tensor) -> None:
            y.backward(dy)
            x.grad = None
            module.zero_grad(set_to_none=True)

        return forward, backward

    def timed(name: str, clock: Clock, forward: Callable, backward: Callable, **more) -> float:
        """Of both passes together."""
        ms = clock(lambda: backward(forward()))
        kept, peak = memory(forward, backward)
        row(report, name, ms, kept_gb=kept / 1e9, peak_gb=peak / 1e9, **more)
        return ms

    def ours(b: int, s: int) -> None:
        x = inputs(b, s)
        selection = kernel.select(kernel.index_scores(x.q, x.k, x.w), K)
        computing, reusing = layer("dsa", 5, config()), layer("dsa", 6, config())
        shelf = reusing.self_attention.core_attention.shelf
        for name, work in (
            (f"b{b} s{s} layer: ours, computing", passes(computing, b, s)),
            (
                f"b{b} s{s} layer: ours, reusing",
                passes(reusing, b, s, lambda: shelf.selections.update({5: [selection]})),
            ),
        ):
            timed(name, clock, *work)
            profile(report, name, lambda forward=work[0], backward=work[1]: backward(forward()))

    def dense(b: int, s: int) -> None:
        work = passes(layer("mla", 1, config()), b, s)
        timed(f"b{b} s{s} layer: Megatron's dense MLA, cuDNN", clock, *work, baseline="itself")

    def stock() -> None:
        work = passes(layer("stock", 5, config()), 1, 4096)
        ms = timed("b1 s4096 layer: Megatron's DSA fallback, computing", Clock(5), *work, baseline="itself")
        row(report, "b4 s4096 layer: Megatron's DSA fallback, four times b1", 4 * ms, baseline="itself")

    for b, s in ((4, 4096), (2, 8192)):
        report.attempt(f"our layer b{b} s{s}", lambda b=b, s=s: ours(b, s))
        report.attempt(f"dense MLA b{b} s{s}", lambda b=b, s=s: dense(b, s))
    report.attempt("stock DSA", stock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
