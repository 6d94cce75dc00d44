"""Where a training step goes on the GPU: the kernels of a trace by what they are for, and the gaps between them.

    python benchmarks/kernels.py trace.json

A trace is torch.profiler's (export_chrome_trace). Kernels are told by their names, the first rule that fits; `top` keeps the names, so
that a table can be checked and made again.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TOP = 60
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Microseconds between two kernels that the host launched in time; of longer gaps it says what they waited for.
PROMPT = 10.0
# What a kernel is for -> words of its name, case aside. Names of: our blocks' kernels, NCCL, cuDNN and flash attention, mamba_ssm and
# causal_conv1d, TE and torch for routing, TE's and emerging_optimizers' optimizers, cuBLAS, CUTLASS and nvjet, TE's norms, torch's
# pointwise kernels.
RULES: dict[str, str] = {
    "Mamba-3": r"^_(angles|bounds|gradients|keys|norm|output|rows|states|step|steps|turn|values|walk)(_kernel|_backward)?$",
    "M2RNN": r"^_((conv|gate)_)?(forward|backward)(_pre|_x)?$",
    "residual streams": r"^_(read|write)_(forward|backward)$",
    "MLA": r"^_(ingress|keys_values|latent_norm|queries|rotate|split|total)",
    "DSA": r"^_(attend(_back)?|collect|index_d[qk]|kl|lse|scores|select|sum_of_softmax|transpose)$",
    "NCCL": r"nccl",
    "attention core": r"sdpa|flash|fmha|fused_attn|dot_product_attention|mha_|compute_dot_do_o|convert_dq",
    "Mamba scan, conv, norm": (
        r"causal_conv1d|_chunk_(scan|state|cumsum)|_state_passing|_bmm_chunk|^_layer_norm_(fwd|bwd)|^_strided_norm|ssd_|_swiglu"
    ),
    "optimizer": r"multi_tensor|adam|l2norm|newton|_muon",
    # Compiled, by torch 2.11's names: maximum, exponentials, division, the gradient at the label, the gradient's cast.
    "cross entropy": (
        r"cross_entropy|softmax|nll|logsumexp|^triton_red_fused_(_to_copy_max|copy__exp)|"
        r"^triton_poi_fused_(copy__div|_to_copy_(arange|copy))"
    ),
    # Before the next: names of grouped ones have its words.
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|gemv|s16816|s1688|tensorop|matmul",
    "MoE permute, sort, router": (
        r"^_(input|weight)_gradient$|^_last_first$|^_expert_bounds$|permut|sort|radix|bitonic|topk|top_k|router|moe|histc|bincount|histogram|cumsum|scan_|tensor_kernel_scan|gather|scatter|"
        r"index_(select|put|add|copy|kernel)|indexSelect|indexFunc|masked_|nonzero|flag|chunk_sort"
    ),
    "norms": r"rmsnorm|layernorm|ln_(tma_)?(fwd|bwd)|norm_(fwd|bwd)|_norm_",
    "gradient adds": r"^_add_(kernel|rows)$|CUDAFunctor_add|CUDAFunctorOnSelf_add|AddFunctor",
    "FP8 casts": r"cast_|quantize|amax|fp8|transpose_kernel",
    "copies and fills": r"memcpy|memset|copy|fill|CatArray|transpose",
    "element-wise": r"^triton_|elementwise|relu|reduce_kernel|pointwise|unrolled|vectorized|dropout|act_",
}
COMPILED = {kind: re.compile(rule, re.IGNORECASE) for kind, rule in RULES.items()}


def kind_of(name: str) -> str:
    return next((kind for kind, rule in COMPILED.items() if rule.search(name)), "other")


def table(trace: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds and launches by kind, the time no kernel ran between the first and the last, what the longer of those gaps lie
    between (`waits`), and the kernels that took most.

    Kernels that run at the same time each count in full under their kind; `busy_ms` counts such time once. NCCL's
    kernels wait inside for slower ranks: `nccl_alone_ms` is what they cost.
    """
    events = [e for e in trace["traceEvents"] if e.get("cat") in DEVICE and e.get("ph") == "X"]
    if not events:
        raise ValueError("the trace has no kernels")
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        for where, key in ((kinds, kind_of(event["name"])), (names, event["name"])):
            where[key][0] += event["dur"] / 1e3
            where[key][1] += 1
    first = min(e["ts"] for e in events)
    last = max(e["ts"] + e["dur"] for e in events)
    busy = covered((e["ts"], e["ts"] + e["dur"]) for e in events)
    computing = covered((e["ts"], e["ts"] + e["dur"]) for e in events if kind_of(e["name"]) != "NCCL")
    waits: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for before, after, gap in gaps(events):
        if gap > PROMPT:
            waits[kind_of(before), kind_of(after)][0] += gap / 1e3
            waits[kind_of(before), kind_of(after)][1] += 1
    order = sorted(names.items(), key=lambda item: -item[1][0])
    return {
        "span_ms": round((last - first) / 1e3, 3),
        "busy_ms": round(busy / 1e3, 3),
        "gaps_ms": round((last - first - busy) / 1e3, 3),
        "nccl_alone_ms": round((busy - computing) / 1e3, 3),
        "kinds": {
            kind: {"ms": round(ms, 3), "launches": int(count)}
            for kind, (ms, count) in sorted(kinds.items(), key=lambda item: -item[1][0])
        },
        "waits": [
            {"after": a, "before": b, "ms": round(ms, 3), "gaps": int(count)}
            for (a, b), (ms, count) in sorted(waits.items(), key=lambda item: -item[1][0])[:TOP]
        ],
        "top": [
            {"name": n[:160], "kind": kind_of(n), "ms": round(ms, 3), "launches": int(c)} for n, (ms, c) in order[:TOP]
        ],
    }


def gaps(events: Iterable[dict[str, Any]]) -> Iterable[tuple[str, str, float]]:
    """Where no kernel runs: the kernel that ended last before it, the one that ends it, its microseconds."""
    end, last = float("inf"), ""
    for event in sorted(events, key=lambda e: e["ts"]):
        if event["ts"] > end:
            yield last, event["name"], event["ts"] - end
        if not last or event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event["name"]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def text(found: dict[str, Any]) -> str:
    """The table as a person reads it."""
    rows = [(kind, row["ms"], row["launches"]) for kind, row in found["kinds"].items()]
    rows += [("NCCL with nothing beside it", found["nccl_alone_ms"], "")]
    rows += [("gaps", found["gaps_ms"], ""), ("first to last kernel", found["span_ms"], "")]
    width = max(len(kind) for kind, _, _ in rows)
    lines = [f"{kind:<{width}}  {ms:>10.2f} ms  {count:>6}\n" for kind, ms, count in rows]
    longest = [f"  {w['ms']:.1f} ms in {w['gaps']} gaps: {w['after']} -> {w['before']}\n" for w in found["waits"][:8]]
    return "".join(lines + longest)


if __name__ == "__main__":
    sys.stdout.write(text(table(json.loads(Path(sys.argv[1]).read_text()))))
