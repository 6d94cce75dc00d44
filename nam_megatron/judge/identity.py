"""What two runs must share before their figures may be compared, beside the host: the family and the regime of a plan.

family: what stands, by letter and rank, MTP, residual streams and embeddings, and a digest of every width. regime: how it is carried
out: layout, sharding, graphs, FP8, recompute, adapters, kernels, batches. Both are read from the plan, never from a name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.plan import Plan
from nam_megatron.features import Feature
from nam_megatron.features.names import FEATURES
from nam_megatron.judge.same import executes

# Keys of a block that say how, not what, although its values come out otherwise rounded.
HOW = ("recompute", "grouped_gemm")
# Features that stand in the model, and MTP, which is trained beside it; the others say how it is trained.
STANDING = tuple(name for name, feature in FEATURES.items() if feature.shapes or name == "mtp")


def family(plan: Plan) -> str:
    """`nam56r: A13 mla 0,4,8,12 + dsa 1-3,5-7,9-11; E22 moe; M13 mamba3; R4 m2rnn; mtp 1 (mla mlp); 1a2b3c4d`."""
    parts = [f"{letter}{count} {_by_rank(plan, letter)}" for letter, count in plan.letter_counts.items()]
    if plan.mtp:
        parts.append(f"mtp {plan.mtp_depths} ({' '.join(plan.mtp)})")
    for name in STANDING:
        if name != "mtp" and (feature := on(plan, name)):
            parts.append(f"{name} {_values(_computing(name, feature))}")
    return f"{plan.recipe.preset.family}: {'; '.join([*parts, _digest(plan)])}"


def regime(plan: Plan) -> str:
    """`author_dp; 1 x 4 GPUs; tensor 1, ...; DDP, distributed optimizer; ...`, each part under its own word."""
    said = "; ".join(_regime(plan))
    # A rehearsal runs plain torch for every kernel that its recipe names.
    return said if plan.recipe.cluster.processor == "gpu" else said.replace("=transformer_engine", "=torch")


def on(plan: Plan, name: str) -> Feature | None:
    """A feature where it is on."""
    feature = getattr(plan.recipe.feature, name, None)
    return feature if feature is not None and feature.on else None


def stands(plan: Plan) -> dict[str, Any]:
    """Layers by kind and number, and what was given up for them: for a receipt, in facts and not in prose."""
    numbers = {kind: list(plan.numbers(kind)) for kind in sorted({layer.kind for layer in plan.layers})}
    layers: dict[str, dict[str, Any]] = {kind: {"count": len(at), "numbers": at} for kind, at in numbers.items()}
    for name, at in plan.variants.items():
        layers[plan.layers[at[0] - 1].kind].setdefault("variants", {})[name] = list(at)
    found: dict[str, Any] = {"layers": layers}
    found["given_up"] = [
        {"letter": s.letter, "designed": s.designed, "stands": s.standing, "layers": list(s.numbers), "by": s.by}
        for s in plan.substitutions
    ]
    found["mtp"] = {"depths": plan.mtp_depths, "kinds": list(plan.mtp)} if plan.mtp else None
    own = {b.kind: b.stands([l for l in plan.layers if l.kind == b.kind], plan.site) for b in plan.blocks}
    return found | {kind: said for kind, said in own.items() if said is not None}


def _by_rank(plan: Plan, letter: str) -> str:
    ranks: dict[str, list[int]] = {}
    for layer in plan.layers:
        if layer.letter == letter:
            ranks.setdefault(layer.kind, []).append(layer.rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return " + ".join(f"{kind} {_runs(at)}" for kind, at in sorted(ranks.items(), key=lambda kv: kv[1]))


def _runs(numbers: list[int]) -> str:
    """[1, 2, 3, 5] as `1-3,5`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _digest(plan: Plan) -> str:
    """Of everything else that the model computes: widths, vocabulary, norms, blocks; not of names, nor of what says how."""
    model = plan.recipe.model.model_dump(mode="json")
    # The layers say what these come to; the pattern's pipes are a layout.
    widths = {
        k: v for k, v in model.items() if k not in ("family", "pattern", "depth", "letters", "substitute", "blocks")
    }
    content = {
        "model": widths,
        "layers": [(layer.kind, layer.source) for layer in plan.layers],
        "blocks": {
            b.kind: {k: v for k, v in b.model_dump(mode="json").items() if not _how(b.kind, k)} for b in plan.blocks
        },
        "features": {name: _computing(name, f) for name in STANDING if (f := on(plan, name))},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _how(kind: str, key: str) -> bool:
    return key in HOW or KINDS[kind].row(key).executes is not None


def _computing(name: str, feature: Feature) -> dict[str, Any]:
    return {k: v for k, v in feature.model_dump(mode="json").items() if not executes(f"feature.{name}.{k}")}


def _regime(plan: Plan) -> Iterator[str]:
    r = plan.recipe
    p, x, s = r.parallel, r.precision, r.schedule
    yield r.lane.name + (f" ({', '.join(plan.departures)})" if plan.departures else "")
    yield f"{r.cluster.nodes} x {r.cluster.gpus_per_node} {r.cluster.unit}s"
    tensor = f"tensor {p.tensor}{' + sequence' if p.sequence else ''}"
    cuts = f" cut {'|'.join(str(len(s)) for s in plan.segments)}" if len(plan.segments) > 1 else ""
    yield f"{tensor}, pipeline {p.pipeline} x {p.virtual_pipeline}{cuts}, context {p.context}, expert {p.expert} x {p.expert_tensor}"
    yield ", ".join(_sharding(plan))
    for name in ("cuda_graphs", "fp8", "recompute"):
        feature = on(plan, name)
        yield f"{name} {_values(feature.model_dump()) if feature else 'none'}"
    if lora := on(plan, "lora"):
        yield f"lora {_values(lora.model_dump())}"
    yield _values({k: v for k, v in x.model_dump().items() if k != "name"})
    for block in plan.blocks:
        if how := {k: v for k, v in block.model_dump().items() if _how(block.kind, k)}:
            yield f"{block.kind} {_values(how)}"
    for name in STANDING:
        feature = on(plan, name)
        if how := {k: v for k, v in feature.model_dump().items() if executes(f"feature.{name}.{k}")} if feature else {}:
            yield f"{name} {_values(how)}"
    yield r.optim.name
    yield f"micro batch {s.micro_batch_size}, global batch {s.global_batch_size}"


def _sharding(plan: Plan) -> Iterator[str]:
    if fsdp := on(plan, "megatron_fsdp"):
        yield f"Megatron-FSDP {_values(fsdp.model_dump(), 'enabled')}"
    else:
        yield "DDP"
    if optimizer := on(plan, "distributed_optimizer"):
        yield f"distributed optimizer {_values(optimizer.model_dump(), 'enabled', 'reshardable')}"


def _values(tree: Mapping[str, Any], *but: str) -> str:
    """`{"a": 1, "b": (2, 3), "c": True, "d": False}` as `a=1 b=2,3 c`."""

    def shown(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    kept = {k: v for k, v in tree.items() if k not in but and v is not False}
    return " ".join(k if v is True else f"{k}={shown(v)}" for k, v in kept.items()) or "none"
