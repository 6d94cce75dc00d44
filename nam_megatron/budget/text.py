"""A budget in plain text, for people: what a pipe, a golden file and the documentation get."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget.cost import Cost, cost, megatrons_gaps
from nam_megatron.budget.memory import Budget, Moment, StageBudget, budget
from nam_megatron.budget.serving import Serving, serve
from nam_megatron.budget.static import by_kind
from nam_megatron.compile.lower import Lowering
from nam_megatron.judge.identity import on
from nam_megatron.report import layout, tries
from nam_megatron.words.sizes import BUCKETS, GIB, Line, Sizes

PHASES = {
    "build": "building the model",
    "after_init": "before the first step",
    "first_step": "first step",
    "warm_up": "before capture",
    "between_steps": "between steps",
    "steady": "steady",
}
LINES = (26, 22, 32, 7, 16, 46)  # bucket, owner, line, GiB, bytes, formula
Row = Sequence[str]


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def grid(rows: Iterable[Row], right: Sequence[int] = (), at_least: Sequence[int] = ()) -> str:
    """Rows as aligned columns; those in `right` flush right. at_least: widths that keep diffs small."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths = [max(w, low) for w, low in zip(widths, [*at_least, *[0] * len(widths)], strict=False)]
    made = (
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in made)


# Memory ---------------------------------------------------------------------------------------------------------------


def head(b: Budget) -> Iterator[str]:
    """The model, the layout, the order of placement, the symbols."""
    p = b.plan
    r, a = p.recipe, p.recipe.parallel
    designed = " as designed, not as built" if p.not_built else ""
    yield f"{r.preset.name}: {b.parameters:,} parameters, {b.active:,} active for a token{designed}"
    counted = ((p.site.blocks.of(k).called(p.site) if k in KINDS else k, n) for k, n in by_kind(p).items())
    yield "parameters: " + ", ".join(f"{name} {n:,}" for name, n in counted)
    yield f"layout: {layout(p)}"
    yield from tries(p)
    yield (
        f"placement: tensor {a.tensor} cuts the tensors, pipeline {a.pipeline} deals out the layers, {r.data_parallel * a.context} "
        f"data-parallel ranks share state, expert {a.expert} deals out the experts"
    )
    names = ("b", "S", "s", "T", "Ts", "h", "V", "t", "cp", "e", "et", "N", "Ne", "D", "w")
    symbols = Sizes.of(p.site).symbols
    fp8 = r.feature.fp8
    kept = f" (2 of {', '.join(fp8.standing(p.site))})" if fp8 and any(fp8.standing(p.site)) else ""
    yield "symbols: " + ", ".join(f"{name} {symbols[name]:g}" for name in names) + kept


def verdict(b: Budget) -> str:
    """One line: whether it fits, and what is left."""
    device, cluster = b.plan.recipe.device, b.plan.recipe.cluster
    name = device.name if cluster.processor == "gpu" else f"{device.name} (which no {cluster.unit} uses)"
    at = f"stage {b.worst.stage.rank}, " if len(b.stages) > 1 else ""
    used = f"{gib(b.worst.worst.total)} of {gib(b.capacity)} GiB ({at}{b.worst.worst.event})"
    if not b.fits:
        return f"does not fit {name}: {used}, {gib(-b.free)} too much"
    room = "" if b.roomy else f", less than the headroom of {device.headroom_gib:g}"
    return f"fits {name}: {used}, {gib(b.free)} free{room}"


def owners(moment: Moment) -> Iterator[tuple[str, str, int, Line, int]]:
    """(bucket, owner, bytes, its largest line, how many others), in the order of buckets."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in moment.lines:
        groups.setdefault((line.bucket, line.owner), []).append(line)
    for (bucket, owner), lines in groups.items():
        largest = max(lines, key=lambda line: line.bytes)
        yield bucket, owner, sum(line.bytes for line in lines), largest, len(lines) - 1


def times(line: Line) -> str:
    return f"{line.count} x ({line.formula})" if line.count > 1 else line.formula


def marked(line: Line) -> str:
    return f"{line.why} [{line.mark}]" if line.mark else line.why


def stage_title(s: StageBudget) -> str:
    layers = [layer.number for layer in s.stage.layers]
    where = f"layers {layers[0]} to {layers[-1]}" if len(s.stage.chunks) == 1 else f"{len(layers)} layers"
    return f"stage {s.stage.rank} of {s.stage.of} ({where}, {s.parameters:,} parameters on a rank)"


def phases(s: StageBudget) -> str:
    rows = [("phase", "GiB allocated", "reserved", "in use", "moment")]
    for phase, moment in s.moments.items():
        sizes = gib(moment.allocated), gib(moment.reserved), gib(moment.total)
        rows.append((PHASES[phase], *sizes, moment.event))
    return grid(rows, right=(1, 2, 3))


def table(b: Budget) -> str:
    """Buckets and owners at the worst moment of each stage; what would be 0.00 GiB in one row."""
    text = [*head(b), ""]
    for s in b.stages:
        rows, small = [("bucket", "owner", "GiB", "of which most")], []
        for bucket, owner, size, line, others in owners(s.steady):
            if gib(size) == gib(0):
                small.append(size)
                continue
            more = f", and {others} more" if others else ""
            rows.append((bucket, owner, gib(size), f"{line.name}: {times(line)}{more}"))
        if small:
            rows.append((f"{len(small)} rows below 0.005", "", gib(sum(small)), "`format=lines` has each"))
        rows.append(("in use", "", gib(s.steady.total), f"at {s.steady.event}"))
        text += [stage_title(s), grid(rows, right=(2,)), phases(s)]
    return "\n".join([*text, verdict(b)]) + "\n"


def lines(b: Budget) -> str:
    """Every line with its formula and its reason."""
    text = [*head(b), ""]
    for s in b.stages:
        rows = [("bucket", "owner", "line", "GiB", "bytes", "formula", "why")]
        for line in s.steady.lines:
            size = gib(line.bytes), f"{line.bytes:,}"
            rows.append((line.bucket, line.owner, line.name, *size, times(line), marked(line)))
        text += [f"{stage_title(s)}, {s.steady.event}", grid(rows, (3, 4), LINES), phases(s)]
    return "\n".join([*text, verdict(b)]) + "\n"


def against(ours: Budget, theirs: Budget) -> str:
    """Bucket by bucket on the worst stage of each, the one that grows most first."""
    a, b = ours.worst.steady, theirs.worst.steady
    names = ours.plan.recipe.preset.name, theirs.plan.recipe.preset.name
    if names[0] == names[1]:
        names = "this", names[1]
    change = {bucket: a.buckets[bucket] - b.buckets[bucket] for bucket in BUCKETS}
    rows = [("bucket", f"{names[0]} GiB", f"{names[1]} GiB", "change")]
    for bucket in sorted(BUCKETS, key=lambda bucket: -change[bucket]):
        if change[bucket]:
            rows.append((bucket, gib(a.buckets[bucket]), gib(b.buckets[bucket]), f"{change[bucket] / GIB:+.2f}"))
    same = sum(a.buckets[bucket] for bucket in BUCKETS if not change[bucket])
    rows.append(("the same in both", gib(same), gib(same), "+0.00"))
    rows.append(("in use", gib(a.total), gib(b.total), f"{(a.total - b.total) / GIB:+.2f}"))
    most = max(BUCKETS, key=lambda bucket: change[bucket])
    answer = f"{most} grows most: {change[most] / GIB:+.2f} GiB" if change[most] > 0 else "no bucket grows"
    moments = f"{names[0]} at {a.event}, {names[1]} at {b.event}"
    return grid(rows, right=(1, 2, 3)) + f"\n{moments}\nagainst {names[1]}: {answer}\n"


# Cost -----------------------------------------------------------------------------------------------------------------


def cost_text(c: Cost) -> str:
    """Operations by owner, totals, and the floor at the device's peaks."""
    device = c.plan.recipe.device
    rows = [("kind", "layers", "MFLOP forward", "formulas")]
    groups: dict[str, list] = {}
    for work in c.works:
        groups.setdefault(work.owner, []).append(work)
    for owner, works in groups.items():
        forward = sum(w.flops for w in works if w.model)
        title = KINDS[owner].title if owner in KINDS else owner
        formulas = "; ".join(f"{w.name} {w.formula}" + ("" if w.model else " (hardware only)") for w in works)
        rows.append((title, str(works[0].count), f"{forward / 1e6:.2f}", formulas))
    text = [
        "operations of one token, forward",
        grid(rows, right=(1, 2)),
        f"model FLOPs, forward and backward: {c.model / 1e9:.3f} GFLOP a token",
        f"hardware FLOPs, with recompute and what stock kernels add: {c.hardware / 1e9:.3f} GFLOP a token",
        f"Megatron logs {c.megatron / 1e9:.3f} GFLOP a token ({100 * (c.megatron / c.model - 1):+.1f} %): {megatrons_gaps(c)}",
        f"tokens/s a GPU at most: {c.floor(device.bf16_tflops):,.0f} at the peak on paper ({device.bf16_tflops:g} TFLOP/s), "
        f"{c.floor(device.gemm_tflops):,.0f} at the fastest GEMM measured ({device.gemm_tflops:g})",
    ]
    if on(c.plan, "lora"):
        text.append("counted with the gradient of every weight: beside adapters a token costs less")
    if c.plan.recipe.feature.fp8:
        text.append("FP8 GEMMs may go beyond these bf16 peaks")
    return "\n".join(text) + "\n"


# Serving --------------------------------------------------------------------------------------------------------------


def serving_text(stages: Sequence[Serving]) -> str:
    """Weights, caches and pools of each stage while serving."""
    text = []
    for s in stages:
        rows = [("what", "layers", "bytes", "per", "GiB contiguous", "GiB paged", "formula", "why")]
        rows.append(
            ("weights", "", "", "", gib(s.weights), gib(s.weights), "2 a parameter", "bf16; no gradient, no optimizer")
        )
        for p in s.pools:
            name = f"{KINDS[p.kind].title} {p.state.name}"
            why = f"{p.state.why} [{p.state.mark}]" if p.state.mark else p.state.why
            sizes = gib(p.contiguous), gib(p.paged)
            rows.append((name, str(p.layers), f"{p.state.bytes:,}", p.state.per, *sizes, p.state.formula, why))
        rows.append(("logits", "", "", "", gib(s.logits), gib(s.logits), "6 batch V / t", "last token, bf16 and fp32"))
        rows.append(
            ("in use", "", "", "", gib(s.total("contiguous")), gib(s.total("paged")), "", "with the runtime reserve")
        )
        places = (
            ", ".join(f"{number} -> {place}" for number, place in s.cache_map.items()) or "no attention-owned layer"
        )
        text += [
            f"stage {s.stage.rank} of {s.stage.of}: {s.batch} sequences of {s.context} tokens",
            grid(rows, right=(1, 2, 4, 5)),
        ]
        text += [f"cache map, layer -> place: {places}", ""]
    return "\n".join(text)


# For programs ---------------------------------------------------------------------------------------------------------


def tree(b: Budget, c: Cost, serving: Sequence[Serving] = ()) -> dict:
    """Everything as plain data, bytes and operations."""
    found = {
        "preset": b.plan.recipe.preset.name,
        "untried": b.plan.recipe.allow,
        "parameters": b.parameters,
        "active": b.active,
        "capacity": b.capacity,
        "free": b.free,
        "fits": b.fits,
        "headroom_left": b.roomy,
        "stages": [_stage_tree(s) for s in b.stages],
        "cost": {
            "model": c.model,
            "hardware": c.hardware,
            "megatron": c.megatron,
            "floor": c.floor(b.plan.recipe.device.bf16_tflops),
            "works": [asdict(w) for w in c.works],
        },
    }
    if serving:
        found["serving"] = [_serving_tree(s) for s in serving]
        found["fits"] = all(s.fits("paged") for s in serving)  # as the exit code says; the rest is of training
    return found


def _stage_tree(s: StageBudget) -> dict:
    moments = {
        phase: {"event": m.event, "allocated": m.allocated, "reserved": m.reserved, "total": m.total}
        for phase, m in s.moments.items()
    }
    layers = [layer.number for layer in s.stage.layers]
    lines = [asdict(line) for line in s.steady.lines]
    return {"rank": s.stage.rank, "layers": layers, "parameters": s.parameters, "moments": moments, "lines": lines}


def _serving_tree(s: Serving) -> dict:
    pools = [
        {"kind": p.kind, "layers": p.layers, "contiguous": p.contiguous, "paged": p.paged, **asdict(p.state)}
        for p in s.pools
    ]
    totals = {layout: s.total(layout) for layout in ("contiguous", "paged")}
    return {"rank": s.stage.rank, "weights": s.weights, "cache_map": s.cache_map, "pools": pools, "total": totals}


def to_json(found: Mapping) -> str:
    return json.dumps(found, indent=1) + "\n"


def golden(lowering: Lowering) -> str:
    """What is under review for a preset."""
    plan = lowering.plan
    served = serving_text(serve(plan, 1, plan.recipe.model.seq_length))
    return lines(budget(plan)) + "\n" + cost_text(cost(plan)) + "\n" + served
