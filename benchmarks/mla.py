"""MLA's ingress on one H200: is it right, how long does it take, what does it keep?

    python benchmarks/mla.py --out mla.json [--quick] [--layers] [--sweep] [--seconds 300]

The kernels need torch and Triton. Rows that compare with Megatron and Transformer Engine say so where these are missing.
A time is a median over CUDA events (clock.py). `bytes` counts each input once and each output once; a floor is the larger of
bytes / 4.3 TB/s and FLOPs / 750 TFLOP/s. Errors are |x - reference| / |reference|, reference in fp32; uninitialised memory is
NaN in checks.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the checks run in torch's deterministic mode

import torch
from torch import Tensor

from benchmarks.clock import BANDWIDTH, PEAK, Clock, by_kernel, error, memory, one_rank
from benchmarks.report import Report, parser
from nam_megatron.blocks.mla import kernel, naive

EPS = 1e-5
Run = dict[str, Tensor]


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """NAM56R's MLA on s positions of b samples, or on s packed tokens; see blocks/mla/naive.py for the sizes."""

    s: int = 4096
    b: int = 4
    h: int = 3584
    n: int = 56
    rq: int = 64
    rkv: int = 64
    dq: int = 64
    dr: int = 64
    dv: int = 64
    interleaved: bool = True
    packed: bool = False
    norm: bool = True
    stretch: float = 1.0  # of the angles and of the magnitude, as yarn does

    @property
    def tokens(self) -> int:
        return self.s if self.packed else self.s * self.b

    def shape(self, *last: int) -> tuple[int, ...]:
        return (self.s, *last) if self.packed else (self.s, self.b, *last)


FULL = Case()
CASES = [
    FULL,
    *(Case(s=2048, b=1, n=n) for n in (7, 14, 28, 32, 64)),
    *(Case(s=s, b=1) for s in (4097, 8192)),
    Case(s=1, b=3),
    Case(s=2049, b=2, n=7, h=3600),
    Case(s=2048, b=2, stretch=1.3),
    Case(s=2048, b=2, interleaved=False),
    Case(s=4093, packed=True),
    Case(s=2048, b=1, norm=False),
    Case(s=1024, b=1, rq=128, rkv=32, dq=128, dr=32, dv=128, n=14),
    Case(s=1024, b=1, rq=32, rkv=128, dq=32, dr=64, dv=16, n=14),
]
# Ranks and widths of DeepSeek-V3: products by cuBLAS, our kernels behind them.
HIGH = Case(s=1024, b=2, n=56, rq=1536, rkv=512, dq=128, dr=64, dv=128)
ODD = Case(s=257, b=3, n=7, rq=96, rkv=48, dq=24, dr=16, dv=40)  # no width a power of two


def rope_of(case: Case, device: str) -> naive.Rope:
    turns = 500000.0 ** (-torch.arange(0, case.dr, 2, device=device) / case.dr) / case.stretch
    angles = torch.outer(torch.arange(case.s, device=device).float(), turns)
    cos, sin = ((t * case.stretch).contiguous() for t in (angles.cos(), angles.sin()))
    ends = torch.tensor([0, case.s // 3, case.s // 3 + 1, case.s - 5], device=device, dtype=torch.int32)
    positions = naive.packed_positions(ends, case.s, case.s) if case.packed else None
    return naive.Rope(cos, sin, positions, case.interleaved)


def tensors(case: Case, device: str, seed: int = 0) -> Run:
    """Input, parameters and what flows back, fp32 with bf16's values, so that every precision starts alike."""
    g = torch.Generator(device).manual_seed(seed)
    made: Run = {}

    def add(name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> None:
        made[name] = (shift + scale * torch.randn(shape, generator=g, device=device)).bfloat16().float()

    heads = {"q_up": case.dq + case.dr, "kv_up": case.dq + case.dv}
    add("x", *case.shape(case.h), scale=2.0)
    add("gamma", case.h, scale=0.2, shift=1.0)
    add("q_down", case.rq, case.h, scale=case.h**-0.5)
    add("kv_down", case.rkv + case.dr, case.h, scale=case.h**-0.5)
    add("q_up", case.n * heads["q_up"], case.rq, scale=case.rq**-0.5)
    add("kv_up", case.n * heads["kv_up"], case.rkv, scale=case.rkv**-0.5)
    if case.norm:
        add("gamma_q", case.rq, scale=0.2, shift=1.0)
        add("gamma_kv", case.rkv, scale=0.2, shift=1.0)
    for name, width in (("d_q", case.dq + case.dr), ("d_k", case.dq + case.dr), ("d_v", case.dv)):
        add(name, *case.shape(case.n, width))
    add("d_absorbed_q", *case.shape(case.n, case.rkv + case.dr))
    add("d_absorbed_k", *case.shape(1, case.rkv + case.dr))
    return made


def leaves(made: Run, dtype: torch.dtype) -> tuple[Run, Run]:
    """(what gets gradients, what flows back)."""
    held = {k: v.to(dtype, copy=True) for k, v in made.items()}
    return {k: v.requires_grad_() for k, v in held.items() if not k.startswith("d_")}, {
        k: v for k, v in held.items() if k.startswith("d_")
    }


def latents_of(ops: Any, p: Run, case: Case) -> Tensor:
    norms = p.get("gamma_q"), p.get("gamma_kv")
    return ops.ingress(p["x"], p["gamma"], p["q_down"], p["kv_down"], *norms, case.dr, EPS, 100 * EPS)


def up(ops: Any, latents: Tensor, p: Run, rope: naive.Rope, case: Case) -> Run:
    q, kv, k_rope = latents.split((case.rq, case.rkv, case.dr), -1)
    k, v = ops.keys_values(kv, k_rope, p["kv_up"], rope, case.n, case.dv)
    return {"q": ops.queries(q, p["q_up"], rope, case.n), "k": k, "v": v}


def absorbed(ops: Any, latents: Tensor, p: Run, rope: naive.Rope, case: Case) -> Run:
    weight = naive.absorbed_weight(p["q_up"], p["kv_up"], case.n, case.dr, case.dv)
    q, k = ops.absorbed(latents, weight, rope, case.n, case.rq)
    return {"absorbed_q": q, "absorbed_k": k}


def ingress_run(ops: Any, made: Run, rope: naive.Rope, case: Case, dtype: torch.dtype, way: Callable = up) -> Run:
    """Outputs, and every gradient by name."""
    p, back = leaves(made, dtype)
    out = way(ops, latents_of(ops, p, case), p, rope, case)
    torch.autograd.backward(list(out.values()), [back[f"d_{name}"] for name in out])
    return {k: v.detach() for k, v in out.items()} | {f"grad {k}": v.grad for k, v in p.items()}


def behind_products(ops: Any, made: Run, rope: naive.Rope, case: Case, dtype: torch.dtype) -> Run:
    """The kernels for high ranks, alone: queries, keys and values of given products."""
    g = torch.Generator(made["x"].device).manual_seed(1)
    shapes = {"q": case.shape(case.n, case.dq + case.dr), "kv": case.shape(case.n, case.dq + case.dv)}
    shapes |= {"k_rope": case.shape(case.dr)}
    p = {k: torch.randn(s, generator=g, device=made["x"].device).bfloat16().to(dtype) for k, s in shapes.items()}
    p = {k: v.requires_grad_() for k, v in p.items()}
    if ops is naive:
        nope, v = p["kv"].split((case.dq, case.dv), -1)
        shared = naive.rotate(p["k_rope"].unsqueeze(-2), rope).expand(*nope.shape[:-1], -1)
        q = torch.cat((p["q"][..., : case.dq], naive.rotate(p["q"][..., case.dq :], rope)), -1)
        k = torch.cat((nope, shared), -1)
    else:
        q = ops.rotate_queries(p["q"] * 1, rope)
        k, v = ops.split_keys_values(p["kv"], p["k_rope"], rope, case.dv)
    out = {"q": q, "k": k, "v": v}
    torch.autograd.backward(list(out.values()), [made[f"d_{name}"].to(dtype, copy=True) for name in out])
    return {k: v.detach() for k, v in out.items()} | {f"grad {k}": v.grad for k, v in p.items()}


@dataclass(frozen=True)
class Verdict:
    """The tensor that does worst against its allowance: twice the bf16 error of plain torch, which rounds like Megatron."""

    worst: str
    ours: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.ours <= self.limit


def verdict(found: Run, plain: Run, reference: Run, floor: float = 1e-6) -> Verdict:
    """floor: an error that is let pass whatever plain torch has (it may be exactly 0)."""
    assert found.keys() == plain.keys() == reference.keys()
    pairs = {k: (error(found[k], reference[k]), error(plain[k], reference[k])) for k in reference}
    limits = {k: max(2 * plain, floor) for k, (_, plain) in pairs.items()}
    short = {k: ours / limits[k] if ours == ours else float("inf") for k, (ours, _) in pairs.items()}
    worst = max(short, key=lambda k: short[k])
    return Verdict(worst, *pairs[worst], limits[worst])


def judge(case: Case, device: str, way: Callable, dtype: torch.dtype = torch.bfloat16) -> Verdict:
    """way: up, absorbed or behind_products."""
    made, rope = tensors(case, device), rope_of(case, device)
    run = behind_products if way is behind_products else lambda ops, m, r, c, kind: ingress_run(ops, m, r, c, kind, way)
    with poisoned():
        return verdict(
            run(kernel, made, rope, case, dtype),
            run(naive, made, rope, case, dtype),
            run(naive, made, rope, case, torch.float32 if dtype != torch.float32 else torch.float64),
        )


class poisoned:
    """Uninitialised memory holds NaN, so that an element which no kernel writes shows."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def repeats(case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What differs between two runs."""
    made, rope = tensors(case, device), rope_of(case, device)
    one, two = (ingress_run(kernel, made, rope, case, dtype) for _ in range(2))
    return [k for k in one if not torch.equal(one[k], two[k])]


# Time -----------------------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """forward() -> outputs; leaves get gradients; back: what flows back."""

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: list[Tensor]
    back: list[Tensor]

    def gradients(self, out: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(out, self.leaves, self.back, allow_unused=True)


def kernels_subject(case: Case, way: Callable, ops: Any) -> Subject:
    made, rope = tensors(case, "cuda"), rope_of(case, "cuda")
    p, back = leaves(made, torch.bfloat16)
    forward = lambda: tuple(way(ops, latents_of(ops, p, case), p, rope, case).values())  # noqa: E731
    names = ("d_absorbed_q", "d_absorbed_k") if way is absorbed else ("d_q", "d_k", "d_v")
    return Subject(forward, list(p.values()), [back[k] for k in names])


def work_of(case: Case, way: Callable) -> dict[str, tuple[float, float]]:
    """(bytes, FLOPs) of the forward and of the backward pass: inputs once, outputs once, latents twice in between."""
    t, r = case.tokens, case.rq + case.rkv + case.dr
    out = case.n * (2 * (case.dq + case.dr) + case.dv)
    multiply = case.h * r + case.n * (case.rq * (case.dq + case.dr) + case.rkv * (case.dq + case.dv))
    if way is absorbed:
        out = (case.n + 1) * (case.rkv + case.dr)
        multiply = case.h * r + case.n * case.rq * (case.rkv + case.dr)
    return {"forward": (2 * t * (case.h + out + 2 * r), 2 * t * multiply),
            "backward": (2 * t * (2 * case.h + out + 4 * r), 4 * t * multiply)}  # fmt: skip


# Megatron -------------------------------------------------------------------------------------------------------------


class Megatron:
    """Stock attention modules, and ours, on one GPU. Raises where Megatron or Transformer Engine is missing."""

    def __init__(self) -> None:
        from megatron.core.extensions.transformer_engine import HAVE_TE

        if not HAVE_TE:
            raise ImportError("Transformer Engine cannot be imported")
        one_rank()

    def config(self, case: Case, yarn: bool, **more: Any) -> Any:
        from megatron.core.transformer import MLATransformerConfig

        fields = dict(num_layers=1, hidden_size=case.h, num_attention_heads=case.n, ffn_hidden_size=128)
        fields |= dict(q_lora_rank=case.rq, kv_lora_rank=case.rkv, qk_head_dim=case.dq, v_head_dim=case.dv)
        fields |= dict(qk_pos_emb_head_dim=case.dr, qk_layernorm=True, normalization="RMSNorm", add_bias_linear=False)
        fields |= dict(rope_type="yarn" if yarn else "rope", apply_rope_fusion=yarn, rotary_base=500000)
        fields |= dict(rotary_scaling_factor=4.0 if yarn else 1.0, original_max_position_embeddings=4096, mscale=1.0)
        fields |= dict(hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16)
        fields |= dict(layernorm_epsilon=EPS, bias_dropout_fusion=False, gradient_accumulation_fusion=False)
        return MLATransformerConfig(**fields | more)

    def _layer(self, config: Any, attention: type, parts: Any, norm: Any) -> Any:
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.spec_utils import ModuleSpec, build_module
        from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

        inner = ModuleSpec(attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
        both = TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=inner, self_attn_bda=get_bias_dropout_add
        )
        return build_module(ModuleSpec(TransformerLayer, submodules=both), config=config, layer_number=1).cuda()

    def stock(self, case: Case, **more: Any) -> Any:
        """Plain RoPE, every module by itself."""
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

        parts = MLASelfAttentionSubmodules(core_attention=te.TEDotProductAttention, **self._modules())
        return self._layer(self.config(case, False, **more), MLASelfAttention, parts, te.TENorm)

    def _modules(self) -> dict[str, Any]:
        from megatron.core.extensions import transformer_engine as te

        down = dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), te.TELinear)
        column = dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), te.TEColumnParallelLinear)
        norms = dict.fromkeys(("q_layernorm", "kv_layernorm"), te.TENorm)
        return down | column | norms | {"linear_proj": te.TERowParallelLinear}

    def best(self, case: Case, **more: Any) -> Any:
        """Everything native on: one fused down projection, norms inside the products, yarn with its fused kernels."""
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttentionSubmodules

        # Block sizes that do not divide the heads write outside their tensors (upstream issue 7103).
        for name in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"):
            tuner = getattr(fused, name)
            tuner.configs = [c for c in tuner.configs if case.n % c.kwargs["BLOCK_H"] == 0]
        column = te.TELayerNormColumnParallelLinear
        parts = MLASelfAttentionSubmodules(
            linear_proj=te.TERowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
            linear_qkv_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_up_proj=column,
            core_attention=te.TEDotProductAttention,
        )
        return self._layer(self.config(case, True, **more), FusedMLASelfAttention, parts, IdentityOp)

    def absorbed(self, case: Case) -> Any:
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
            AbsorbedMLASelfAttention,
            AbsorbedMLASelfAttentionSubmodules,
        )

        parts = AbsorbedMLASelfAttentionSubmodules(core_attention=te.TEDotProductAttention, **self._modules())
        return self._layer(self.config(case, False), AbsorbedMLASelfAttention, parts, te.TENorm)

    def ours(self, case: Case, yarn: bool = False, **more: Any) -> Any:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        from megatron.core.transformer.spec_utils import build_module

        from nam_megatron.blocks.mla import layer

        config = self.config(case, yarn, **more)
        block: Any = SimpleNamespace(kernels="fused", latent_norm=True, q_lora_rank=config.q_lora_rank)
        site: Any = None  # which this kind does not read
        spec = layer.spec(TESpecProvider(), block, site)
        return build_module(spec, config=config, layer_number=1).cuda()

    def ingress(self, layer: Any, case: Case, way: Callable = up) -> Subject:
        """The layer up to its queries, keys and values, its input norm included."""
        made = tensors(case, "cuda")
        x = made["x"].bfloat16().requires_grad_()
        names = ("d_absorbed_q", "d_absorbed_k") if way is absorbed else ("d_q", "d_k", "d_v")

        def forward() -> tuple[Tensor, ...]:
            return layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(x))[: len(names)]

        parameters = [p for name, p in layer.named_parameters() if "linear_proj" not in name]
        return Subject(forward, [x, *parameters], [made[k].bfloat16() for k in names])

    def whole(self, layer: Any, case: Case) -> Subject:
        made = tensors(case, "cuda")
        x = made["x"].bfloat16().requires_grad_()
        back = torch.randn(
            x.shape, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(2)
        )
        return Subject(lambda: layer(x, None)[:1], [x, *layer.parameters()], [back])


# The rows --------------------------------------------------------------------------------------------------------------

# Tried by --sweep: changes to kernel.TILES.
SWEEP: dict[str, list[dict[str, int]]] = {
    "ingress": [{}, dict(num_stages=3), dict(num_stages=5), dict(BM=64, num_warps=4, num_stages=3), dict(BM=64, num_warps=4),
                dict(BK=32, num_stages=6), dict(BK=128, num_stages=2), dict(BM=64, BK=32, num_warps=4, num_stages=6), dict(BM=256, BK=32)],
    "queries": [{}, dict(programs=512), dict(programs=128), dict(BM=64, num_warps=4), dict(BM=64, num_warps=4, programs=512),
                dict(num_stages=4), dict(BM=64, num_warps=4, num_stages=2), dict(BM=64, num_warps=4, num_stages=4)],
    "keys_values": [{}, dict(programs=512), dict(programs=128), dict(BM=64, num_warps=4), dict(BM=64, num_warps=4, programs=512),
                    dict(num_stages=4), dict(BM=64, num_warps=4, num_stages=2), dict(BM=64, num_warps=4, num_stages=4)],
    "queries_latent": [{}, dict(num_stages=4), dict(BM=64, num_warps=4), dict(BM=64, num_warps=4, num_stages=4), dict(num_stages=5)],
    "keys_values_latent": [{}, dict(num_stages=4), dict(BM=64, num_warps=4), dict(BM=64, num_warps=4, num_stages=2)],
    "queries_weight": [{}, dict(num_stages=2), dict(num_stages=4), dict(programs=132), dict(programs=396), dict(GROUP=4, BM=32),
                       dict(BM=32), dict(BM=32, num_stages=5)],
    "keys_values_weight": [{}, dict(num_stages=2), dict(programs=132), dict(programs=132, num_stages=4), dict(programs=396),
                           dict(GROUP=4, programs=132), dict(num_warps=4)],
    "ingress_input": [{}, dict(num_stages=2), dict(BM=64, num_warps=4, num_stages=2), dict(BM=64, num_warps=4, programs=512),
                      dict(BN=32), dict(BN=32, programs=384), dict(BN=128, num_stages=2), dict(programs=128), dict(programs=384)],
    "latent_norm_back": [{}, dict(BM=16), dict(BM=64), dict(BM=64, num_warps=8)],
    "ingress_weights": [{}, dict(BN=16), dict(BN=64)],
    "total": [{}, dict(BN=512), dict(BN=2048)],
}  # fmt: skip


def differing(case: Case) -> str:
    return ", ".join(f"{k}={v}" for k, v in asdict(case).items() if v != getattr(FULL, k)) or "NAM56R"


def check_all(report: Report, cases: Iterable[Case]) -> None:
    runs = [(case, up) for case in cases] + [(FULL, absorbed), (FULL, behind_products), (HIGH, behind_products)]
    for case, way in [*runs, (ODD, behind_products)]:
        name = f"{way.__name__}: {differing(case)}"

        def one(name: str = name, case: Case = case, way: Callable = way) -> None:
            v = judge(case, "cuda", way)
            report.check(f"{name}: {v.worst}", v.ours, v.limit, v.plain)

        report.attempt(name, one)

    def again() -> None:
        bad = repeats(FULL, "cuda")
        report.check(f"two runs differ in {', '.join(bad) or 'nothing'}", len(bad), 0)

    report.attempt("two runs", again)


def row(report: Report, clock: Clock, name: str, against: str, subject: Subject, case: Case, way: Callable) -> None:
    """Of the forward and of the backward pass. against: the name of the rows that were measured before for comparison."""
    work = work_of(case, way)
    passes = {"forward": (subject.forward,), "backward": (subject.gradients, subject.forward)}
    for part, timed in passes.items():
        us = 1e3 * clock(*timed)
        size, flops = work[part]
        floor = 1e6 * max(size / BANDWIDTH, flops / PEAK)
        theirs = [r["us"] for r in report.data["rows"] if r["name"] == against and r["part"] == part]
        gain = {"gain": theirs[0] / us} if theirs else {}
        more = dict(bytes=size, flops=flops, floor_us=floor, against=against)
        report.add("rows", name=name, part=part, us=us, **gain, **more)


def time_all(report: Report, clock: Clock, megatron: Megatron | None) -> None:
    yarn = Case(stretch=1.3)
    stock: dict[str, tuple[Callable[[], Subject], Case, Callable]] = {}
    if megatron:
        m = megatron
        stock = {
            "Megatron, everything native (yarn)": (lambda: m.ingress(m.best(FULL), FULL), FULL, up),
            "Megatron, plain RoPE": (lambda: m.ingress(m.stock(FULL), FULL), FULL, up),
            "Megatron, AbsorbedMLA": (lambda: m.ingress(m.absorbed(FULL), FULL, absorbed), FULL, absorbed),
        }
    stock["naive"] = (lambda: kernels_subject(FULL, up, naive), FULL, up)
    for name, (build, case, way) in stock.items():
        report.attempt(name, lambda n=name, b=build, c=case, w=way: row(report, clock, n, "", b(), c, w))
    ours = {
        "ours against native yarn": ("Megatron, everything native (yarn)", yarn, up),
        "ours": ("Megatron, plain RoPE", FULL, up),
        "ours against naive": ("naive", FULL, up),
        "ours, absorbed": ("Megatron, AbsorbedMLA", FULL, absorbed),
    }
    for name, (against, case, way) in ours.items():

        def one(name: str = name, against: str = against, case: Case = case, way: Callable = way) -> None:
            row(report, clock, name, against, kernels_subject(case, way, kernel), case, way)

        report.attempt(name, one)


def kernels_of(report: Report, name: str, subject: Subject) -> None:
    """Where the time of one forward and backward pass goes, kernel by kernel."""
    found = by_kernel(lambda: subject.gradients(subject.forward()))
    for kernel_name, (ms, launches) in list(found.items())[:24]:
        if ms >= 1e-3:
            report.add("kernels", of=name, kernel=kernel_name[:90], us=1e3 * ms, launches=launches)


def sweep(report: Report, clock: Clock) -> None:
    """Each kernel's candidates, timed through the smallest pass that holds it."""
    made, rope = tensors(FULL, "cuda"), rope_of(FULL, "cuda")
    p, back = leaves(made, torch.bfloat16)
    latents = latents_of(kernel, p, FULL).detach()
    q, kv, k_rope = (t.requires_grad_() for t in latents.split((FULL.rq, FULL.rkv, FULL.dr), -1))
    d_latents = torch.randn_like(latents)
    passes = {
        "queries": Subject(lambda: (kernel.queries(q, p["q_up"], rope, FULL.n),), [q, p["q_up"]], [back["d_q"]]),
        "keys_values": Subject(
            lambda: kernel.keys_values(kv, k_rope, p["kv_up"], rope, FULL.n, FULL.dv),
            [kv, k_rope, p["kv_up"]],
            [back["d_k"], back["d_v"]],
        ),
        "ingress": Subject(
            lambda: (latents_of(kernel, p, FULL),), [v for k, v in p.items() if not k.endswith("up")], [d_latents]
        ),
    }
    passes |= {"latent_norm": passes["ingress"], "total": passes["queries"]}
    for name, candidates in SWEEP.items():
        subject = next(s for prefix, s in passes.items() if name.startswith(prefix))
        base = kernel.TILES[name]
        for change in candidates:
            kernel.TILES[name] = base | change

            def measure(name: str = name, subject: Subject = subject, change: dict[str, int] = change) -> None:
                forward = name in ("ingress", "queries", "keys_values")
                ms = clock(subject.forward) if forward else clock(subject.gradients, subject.forward)
                report.add("sweep", kernel=name, us=1e3 * ms, **change)

            report.attempt(f"{name} {change}", measure)
        kernel.TILES[name] = base


def layers(report: Report, clock: Clock, megatron: Megatron) -> None:
    """The whole attention layer, ours and Megatron's, from the same weights."""
    report.attempt("whole layers from the same weights", lambda: same_layers(report, megatron))
    recompute = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    for name, make in {
        "layer: Megatron, plain RoPE": megatron.stock,
        "layer: Megatron, everything native (yarn)": megatron.best,
        "layer: ours": megatron.ours,
        "layer: Megatron, plain RoPE, up projections again": partial(megatron.stock, **recompute),
        "layer: ours, up projections again": partial(megatron.ours, **recompute),
    }.items():

        def one(name: str = name, make: Callable[[Case], Any] = make) -> None:
            subject = megatron.whole(make(FULL), FULL)

            def back(out: tuple[Tensor, ...]) -> None:
                torch.autograd.backward(out, subject.back)  # Megatron's checkpoints refuse autograd.grad

            times = dict(forward_us=1e3 * clock(subject.forward), backward_us=1e3 * clock(back, subject.forward))
            kept, peak = memory(subject.forward, back)
            report.add("memory", name=name, **times, kept_mb=kept / 1e6, peak_mb=peak / 1e6)

        report.attempt(name, one)


def same_layers(report: Report, megatron: Megatron) -> None:
    """Output and every gradient, both in bf16."""
    ours, stock = megatron.ours(FULL), megatron.stock(FULL)
    ours.load_state_dict(stock.state_dict())
    runs = {}
    for name, layer in (("ours", ours), ("stock", stock)):
        subject = megatron.whole(layer, FULL)
        (out,) = subject.forward()
        names = ["x", *(k for k, _ in layer.named_parameters())]
        runs[name] = {"out": out} | dict(zip(names, subject.gradients((out,)), strict=True))
    for key in runs["stock"]:
        report.check(f"layer {key}", error(runs["ours"][key], runs["stock"][key]), 0.03)


def high_ranks(report: Report, clock: Clock, megatron: Megatron) -> None:
    """DeepSeek-V3's ranks, where arithmetic bounds the products: times, and where they go."""
    high = Case(n=28, rq=1536, rkv=512, dq=128, dr=64, dv=128)
    made = {
        "Megatron, ranks 1536 and 512": ("", megatron.stock),
        "Megatron, everything native, ranks 1536 and 512": ("", megatron.best),
        "ours, ranks 1536 and 512": ("Megatron, ranks 1536 and 512", megatron.ours),
        "ours, yarn, ranks 1536 and 512": (
            "Megatron, everything native, ranks 1536 and 512",
            partial(megatron.ours, yarn=True),
        ),
    }

    def subject(name: str) -> Subject:
        return megatron.ingress(made[name][1](high), high)

    for name, (against, _) in made.items():
        report.attempt(name, lambda n=name, a=against: row(report, clock, n, a, subject(n), high, up))
    for name in made:
        report.attempt(f"kernels of {name}", lambda n=name: kernels_of(report, n, subject(n)))


def main(argv: list[str]) -> int:
    words = parser(__doc__, 300, sweep="time other tile sizes, too", quick="a quarter of the checks, ten repetitions")
    words.add_argument("--layers", action="store_true", help="only whole layers and high ranks")
    o = words.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(o.out, o.seconds)
    report.host()
    megatron = None
    try:
        megatron = Megatron()
    except Exception as missing:
        report.add("failed", name="Megatron", why=f"no row of Megatron or of whole layers: {missing}")
    clock = Clock(10 if o.quick else 30)
    if not o.layers:
        check_all(report, CASES[::4] if o.quick else CASES)
        time_all(report, clock, megatron)
    if megatron:
        layers(report, clock, megatron)
        high_ranks(report, clock, megatron)
    if not o.layers:
        report.attempt("kernels of ours", lambda: kernels_of(report, "ours", kernels_subject(FULL, up, kernel)))
        if megatron:
            name, build = "Megatron, everything native", lambda: megatron.ingress(megatron.best(FULL), FULL)
            report.attempt(f"kernels of {name}", lambda: kernels_of(report, name, build()))
        if o.sweep:
            report.attempt("sweep", lambda: sweep(report, Clock(10)))
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
