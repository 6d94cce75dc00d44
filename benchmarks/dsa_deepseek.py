"""DSA at DeepSeek-V3.2's sizes on one GPU: which of Megatron's backends run, which of our kernels, how long, and are they right?

    python benchmarks/dsa_deepseek.py --out dsa_deepseek.json [--seconds 110] [--lengths 4096 8192] [none] [ours] [cudnn] [tilelang]

128 heads over a latent of 512 and 64 RoPE channels, an indexer of 64 heads x 128, top-k 2048; one sample. `none`, `tilelang` and
`cudnn` are the values of megatron-core 0.19.2's dsa_kernel_backend (`none`: plain torch). What does not run says why in its row. tilelang
wants nvcc; cudnn wants cudnn-frontend's DSA, the CUTLASS DSL and a flash_mla with Hopper's sparse prefill. What breaks a process breaks all
after it, so a part a call is safest. Times are medians over CUDA events (clock.py), of forward and backward where there are both.
Errors are |x - reference| / |reference|, reference naive.py in fp64, of 48 queries where these tell.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import dsa as base  # the first to load Transformer Engine
from benchmarks.clock import Clock, error, memory, one_rank
from benchmarks.report import Report
from nam_megatron.blocks.dsa import kernel, naive

N, R, W, H, D, K = 128, 512, 576, 64, 128, 2048  # heads, latent, with RoPE; indexer heads and width; top-k
SCALE = (128 + 64) ** -0.5  # of the heads before the absorption; YaRN's factor changes no time
COEFFICIENT, LIMIT = 0.001, 0.02  # of the loss; of errors, where bf16 rounds to 0.002
# Ours have all heads in a tile, here too many. These fit 227 KiB of shared memory with 64 heads a call forward, and 32 or 16 backward.
TILES = {
    "attend": dict(J=64, num_warps=8, num_stages=2),
    "collect": dict(E=8, num_warps=4, num_stages=2),
    "lse": dict(M=64, J=64, num_warps=4, num_stages=2),
    "target": dict(I=64, J=64, num_warps=4, num_stages=2),
}
BACK = [(group, dict(J=J, num_warps=8, num_stages=1)) for group, J in ((32, 16), (32, 64), (16, 64))]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["none", "ours", "cudnn", "tilelang"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=110.0, help="start nothing new after this time")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    o = parser.parse_args(argv)
    report = Report(o.out, o.seconds)
    report.host(parts=o.parts, sizes=dict(heads=N, latent=R, key=W, indexer=[H, D], top_k=K), tiles=TILES)
    for part in o.parts:
        for s in o.lengths:
            work = partial(ours, report, s) if part == "ours" else partial(stock, report, s, part)
            report.attempt(f"{part} s{s}", work)
        if part != "ours" and not base.LAYERS:
            one_rank()
            for loss in ("sparse", "dense"):
                name = f"{part} s4096 layer, {loss} loss"
                report.attempt(name, partial(layer, report, name, part, loss == "sparse"))
    return report.end()


@cache
def inputs(s: int) -> SimpleNamespace:
    """Random tensors as the layer hands them over, of one sample, and a random selection, the hardest to gather.

    drawn fp32 [1, s, s], of which the K largest of a row are selected; index int32 [1, s, K], ascending, then -1; length int32 [1, s].
    """
    g = torch.Generator(base.DEVICE).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, device=base.DEVICE) * scale).bfloat16()

    x = dict(q=draw(s, 1, H, D), k=draw(s, 1, D), w=draw(s, 1, H, scale=(H * D) ** -0.5))
    x |= dict(query=draw(s, 1, N, W), key=draw(s, 1, 1, W), dout=draw(s, 1, N, R), value=draw(N, 128, R, scale=R**-0.5))
    drawn = torch.rand(s, s, generator=g, device=base.DEVICE).argsort(-1).float()
    best = drawn.masked_fill_(~naive.causal(s, s, drawn.device), -1.0).topk(K)
    index = best.indices.masked_fill(best.values < 0, s).sort().values[None]
    ends = torch.arange(1, s + 1, dtype=torch.int32, device=base.DEVICE)
    x |= dict(drawn=drawn[None], index=index.masked_fill(index == s, -1).int(), length=ends.clamp_max(K)[None])
    # checked: the first, those that begin to leave keys out, the last
    some = [slice(i, i + 16) for i in (0, K - 8, s - 16)]
    return SimpleNamespace(**x, s=s, starts=ends * 0, ends=ends, some=some)


def floors(s: int) -> dict[str, tuple[float, float]]:
    """(GB, GFLOP) of each piece: each input and output once; a pair is a query with a key, a taken one with a selected key."""
    pairs, taken = s * (s + 1) / 2, K * (K + 1) / 2 + (s - K) * K
    indexer, qkv, out, chosen = 2 * s * (H * D + D + H), 2 * s * (N + 1) * W, 2 * s * N * R, 4 * s * K
    scores = 2 * H * (D + 1) * pairs
    found = {"forward": (qkv + out + chosen, 2 * N * (W + R) * taken), "top-k": (4 * pairs + chosen, 0.0)}
    found["both"] = (3 * qkv + 3 * out + 2 * chosen, 2 * N * (4 * W + 3 * R) * taken)
    found |= {"scores": (indexer + 4 * pairs, scores), "chosen": (indexer + chosen, scores)}
    # A target over selected keys has its heads' sums from the attention; one over all keys computes its dots twice.
    found["sparse"] = (qkv + 2 * indexer + chosen, scores + (2 * N * W + 8 * H * D) * taken)
    found["dense"] = (qkv + 2 * indexer, scores + (4 * N * W + 8 * H * D) * pairs)
    return {name: (size / 1e9, flop / 1e9) for name, (size, flop) in found.items()}


def timed(report: Report, name: str, floor: tuple, forward: Callable, backward: Callable[[Any], object] | None = None):
    """A row of both passes, with the time of the first alone."""
    clock, more = Clock(5), {}
    if backward:
        more["forward_ms"] = clock(forward)
    then = backward or (lambda _: None)
    ms = clock(lambda: then(forward()))
    base.row(report, name, ms, *floor, **more, peak_gb=memory(forward, then)[1] / 1e9)


# What is right -------------------------------------------------------------------------------------------------------


def mask(index: Tensor, rows: slice) -> Tensor:
    """bool [1, rows, rows.stop] of index [1, s, K]."""
    return kernel.Selection(index, index.new_empty(1, index.size(1) + 1), index).of(rows)[..., : rows.stop]


def check_attend(report: Report, name: str, x: SimpleNamespace, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Gradients of what the checked queries alone give, so that those of the keys need no other query."""
    dout, outs, wide = torch.zeros_like(x.dout), [], base.leaves(x.query, x.key, dtype=torch.float64)
    for rows in x.some:
        dout[rows] = x.dout[rows]
        selection = naive.Selection(mask(x.index, rows))
        outs.append(naive.attend(wide[0][rows], wide[1][: rows.stop], selection, SCALE, R))
        outs[-1].backward(x.dout[rows].double())
    query, key = base.leaves(x.query, x.key)
    out = attend(query, key)
    found = [torch.cat([out[rows] for rows in x.some]), *torch.autograd.grad(out, (query, key), dout)]
    wanted = [torch.cat(outs), wide[0].grad, wide[1].grad]
    for what, f, w in zip(("out", "dquery", "dkey"), found, wanted, strict=True):
        report.check(f"{name} {what}", error(f.detach(), w.detach()), LIMIT)


def check_chosen(report: Report, name: str, x: SimpleNamespace, index: Tensor) -> None:
    """The share of the K best keys that was missed. index [1, s, K], in any order, -1 for none."""
    missed, wanted = 0, 0
    for rows in x.some:
        scores = naive.index_scores(x.q[rows].double(), x.k[: rows.stop].double(), x.w[rows].double())
        best = naive.select(scores, K).selected
        missed, wanted = missed + int((best & ~mask(index, rows)).sum()), wanted + int(best.sum())
    report.check(f"{name}: missed", missed / wanted, 1e-3)


@cache
def learned(s: int, sparse: bool) -> list[Tensor]:
    """The indexer's loss and its gradients of q, k and w in fp64, over the selected keys or over all visible ones."""
    x, total = inputs(s), torch.zeros((), dtype=torch.float64, device=base.DEVICE)
    q, k, w = base.leaves(x.q, x.k, x.w, dtype=torch.float64)
    for i in range(0, s, 64):
        rows, key = slice(i, i + 64), x.key[: i + 64].double()
        scores = naive.index_scores(q[rows], k[: i + 64], w[rows])
        seen = naive.select(scores.detach(), K).selected if sparse else scores.detach() > -torch.inf
        with torch.no_grad():
            target = naive._probabilities(x.query[rows].double(), key, seen, SCALE).mean(1)
        predicted = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
        kl = COEFFICIENT / s * (target * (target.clamp_min(naive.LOG_FLOOR).log() - predicted)).sum()
        kl.backward()
        total += kl.detach()
    return [total, q.grad, k.grad, w.grad]


def losses(
    report: Report, name: str, x: SimpleNamespace, floor: tuple, sparse: bool, loss: Callable[..., Tensor]
) -> None:
    """loss(q, k, w), with whatever else one call computes: its row, and whether it is right."""
    leaves = base.leaves(x.q, x.k, x.w)
    timed(report, name, floor, lambda: loss(*leaves), lambda kl: torch.autograd.grad(kl, leaves))
    kl = loss(*leaves)
    found = [kl.detach(), *torch.autograd.grad(kl, leaves)]
    for what, f, wanted in zip(("kl", "dq", "dk", "dw"), found, learned(x.s, sparse), strict=True):
        report.check(f"{name} {what}", error(f, wanted), LIMIT)


# Megatron's ----------------------------------------------------------------------------------------------------------


def stock(report: Report, s: int, backend: str) -> None:
    """The functions that Megatron's layer calls for one backend."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels

    x, at, floor, plain = inputs(s), f"{backend} s{s} ", floors(s), backend == "none"
    config: Any = SimpleNamespace(dsa_kernel_backend=backend, attention_backend=None, kv_lora_rank=R)
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    bounds = dict(varlen_starts=x.starts, varlen_ends=x.ends)

    def given(hook: str, *args: Any, **words: Any) -> Any:
        result = getattr(dsa_kernels, hook)(*args, **words)
        if result is None:
            raise RuntimeError(f"the backend declines {hook}: Megatron's layer falls back to plain torch")
        return result

    def attend(query: Tensor, key: Tensor) -> Tensor:
        args = query, key, x.index, SCALE, R
        if plain:
            return dsa._unfused_absorbed_dsa_fn(*args, **bounds)
        return given("run_fused_absorbed_sparse_attention", config, *args, topk_length=x.length)

    @torch.no_grad()
    def choose() -> Tensor:
        if plain:
            return dsa.fused_qk_topk_naive(x.q, x.k, x.w, K, **bounds)[1]
        return given("run_fused_qk_topk", config, x.q, x.k, x.w, K, x.starts, x.ends, 8192)[0]

    def learn(sparse: bool, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        if plain:
            args = x.query, x.key.expand(-1, -1, N, -1), SCALE, K, COEFFICIENT, None, sparse, groups, x.starts, x.ends
            return dsa.FusedDSAIndexerLoss.apply(q, w, k, *args, None, None, False, True)[1]
        more = dict(query=x.query, key=x.key, softmax_scale=SCALE, loss_coeff=COEFFICIENT, pg_collection=groups)
        if sparse:
            return given("run_fused_qk_topk_with_loss", config, q, k, w, K, x.starts, x.ends, 8192, **more)[-1]
        more |= dict(config=config, value=None, up_v_weight=x.value, q_indexer=q, k_indexer=k, indexer_weights=w)
        more |= dict(indexer_topk=K, sparse_loss=False, calculate_per_token_loss=False, absorbed_mla=True, cp_size=1)
        more |= dict(attn_mask_type=AttnMaskType.causal, packed_seq_params=None, varlen_starts=None, varlen_ends=None)
        return given("run_fused_dsa_attention", **more, key_positions=None, query_valid_rows=None, use_relu=True)[1]

    def frozen() -> None:
        """Megatron calls flash_mla as its branch nv_dev has it; a build that keeps Hopper's kernels apart wants to be told."""
        from flash_mla import flash_mla_sparse_fwd as run
        from megatron.core.transformer.experimental_attention_variant import dsa_cudnn_kernels

        if "use_legacy" in signature(run).parameters:
            told = lambda *args, indexer_topk, **more: run(*args, use_legacy=True, **more)  # noqa: E731
            dsa_cudnn_kernels._flash_mla_sparse_fwd = told

    def core() -> None:
        query, key = base.leaves(x.query, x.key)
        back = partial(torch.autograd.grad, inputs=(query, key), grad_outputs=x.dout)
        timed(report, at + "sparse core", floor["both"], lambda: attend(query, key), back)
        check_attend(report, at + "sparse core", x, attend)

    def indexer() -> None:
        timed(report, at + "scores and top-k", floor["chosen"], choose)
        check_chosen(report, at + "top-k", x, choose())

    if backend == "cudnn":
        report.attempt(at + "flash_mla called as Megatron does", lambda: attend(x.query, x.key))
        report.attempt(at + "flash_mla's frozen kernels", frozen)
    report.attempt(at + "scores and top-k", indexer)
    report.attempt(at + "sparse core", core)
    for loss in ("sparse", "dense"):
        name = f"{at}{'scores, top-k' if plain or loss == 'sparse' else 'the whole core'}, {loss} loss"
        size = (
            floor[loss]
            if plain or loss == "sparse"
            else tuple(map(sum, zip(floor["dense"], floor["both"], strict=True)))
        )
        report.attempt(name, partial(losses, report, name, x, size, loss == "sparse", partial(learn, loss == "sparse")))


def layer(report: Report, name: str, backend: str, sparse: bool) -> None:
    """Megatron's transformer layer of 4096 tokens, 7168 wide, with its loss; what the backend declines is plain torch."""
    sizes = dict(hidden_size=7168, num_attention_heads=N, q_lora_rank=1536, kv_lora_rank=R, qk_head_dim=128)
    sizes |= dict(v_head_dim=128, dsa_indexer_n_heads=H, dsa_indexer_head_dim=D, dsa_indexer_topk=K)
    config = base.config(
        **sizes, dsa_indexer_topk_freq=1, dsa_kernel_backend=backend, dsa_indexer_use_sparse_loss=sparse
    )
    module, seen = base.layer("stock", 1, config), torch.ones(1, 1, 1, 1, device="cuda", dtype=torch.bool)
    x = torch.randn(4096, 1, 7168, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    back = partial(
        torch.autograd.grad, inputs=(x, *module.parameters()), grad_outputs=torch.randn_like(x), allow_unused=True
    )
    timed(report, name, (0.0, 0.0), lambda: module(x, attention_mask=seen)[0], back)


# Ours ----------------------------------------------------------------------------------------------------------------


def ours(report: Report, s: int) -> None:
    """Our kernels: as they are for NAM56R, then with a part of the heads a call, each part lying apart so that nothing is copied."""
    x, at, floor = inputs(s), f"ours s{s} ", floors(s)
    scores, selection = kernel.index_scores(x.q, x.k, x.w), kernel.select(x.drawn, K)

    def attend(queries: Sequence[Tensor], key: Tensor) -> list[Tensor]:
        return [kernel.attend(q, key, selection, SCALE, R) for q in queries]

    def forward(group: int) -> None:
        queries = [q.contiguous() for q in x.query.split(group, 2)]
        with torch.no_grad():
            timed(report, f"{at}core forward, {group} heads a call", floor["forward"], lambda: attend(queries, x.key))

    def both(group: int, tile: dict[str, int]) -> None:
        name, kernel.TILES["attend_back"] = f"{at}core, {group} heads a call, {tile['J']} keys", tile
        queries, (key,) = base.leaves(*(q.contiguous() for q in x.query.split(group, 2))), base.leaves(x.key)
        douts = [d.contiguous() for d in x.dout.split(group, 2)]
        back = partial(torch.autograd.grad, inputs=(*queries, key), grad_outputs=douts)
        timed(report, name, floor["both"], lambda: attend(queries, key), back)
        check_attend(report, name, x, lambda query, key: torch.cat(attend(query.split(group, 2), key), 2))

    def kl(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return kernel.indexer_kl(q, k, w, scores, x.query, x.key, SCALE, factor=COEFFICIENT / s)

    works = dict(scores=lambda: kernel.index_scores(x.q, x.k, x.w)) | {"top-k": lambda: kernel.select(scores, K)}
    for name, work in works.items():
        report.attempt(at + name, partial(timed, report, at + name, floor[name], work))
    report.attempt(at + "top-k", lambda: check_chosen(report, at + "top-k", x, kernel.select(scores, K).indices))
    if s == 4096:
        report.attempt(at + "core, all heads", partial(forward, N))
    kernel.TILES |= TILES
    report.attempt(at + "core forward", partial(forward, 64))
    report.attempt(at + "dense loss", partial(losses, report, at + "dense loss", x, floor["dense"], False, kl))
    for group, tile in BACK:
        report.attempt(at + f"core, {group} heads, {tile['J']} keys", partial(both, group, tile))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
