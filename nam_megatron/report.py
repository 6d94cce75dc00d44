"""A plan in plain text, for people: the header of every output, and the layer strip."""

import json
from collections.abc import Iterator

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import parameters
from nam_megatron.errors import counted
from nam_megatron.lower import Lowering
from nam_megatron.plan import Plan, composition, identity, parts
from nam_megatron.recipe import standing


def header(lowering: Lowering) -> Iterator[str]:
    """What a run is, what was given up, what is not built, what is assumed."""
    p = lowering.plan
    r = p.recipe
    alias = f" (alias of {r.preset.alias_of})" if r.preset.alias_of else ""
    yield f"{r.preset.name}{alias}: {r.model.family} of {composition(p)}"
    yield f"identity: {identity(p)}"
    yield (
        f"layers: {len(p.layers)} = "
        + " ".join(f"{letter}{count}" for letter, count in p.letter_counts.items())
        + mtp(p)
    )
    yield from tiling(p)
    total, active = parameters(p)
    designed = ", counted as designed" if p.not_built else ""
    yield f"parameters: {total:,} in all, {active:,} active for a token{designed}"
    yield f"layout: {layout(p)}"
    yield f"batch: {r.schedule.micro_batch_size} per pass, {r.schedule.global_batch_size} per step, {r.model.seq_length} tokens each"
    if drawn := drawn_by(p):
        yield f"initial weights: each {drawn} draws its own; the same seed gives other weights in another layout"
    if p.departures:
        yield f"departs from lane {r.lane.name}: {', '.join(p.departures)}"
    yield from given_up(p)
    yield from only_here(p)
    if "mlp" in {l.kind for l in p.layers}:
        yield f"E is a dense MLP of {r.model.ffn_hidden_size}: {len(p.numbers('mlp'))} layers"
    for seam in p.not_built:
        where = f", layers {', '.join(map(str, seam.numbers))}" if seam.numbers else ""
        yield f"NOT BUILT: {seam.owner} ({seam.missing}{where}); this plan can be read, not trained"
    for _, assumed in sorted(r.assumptions.items()):
        yield f"assumed: {assumed.key}={_said(assumed.value)}: {assumed.why}"


def tiling(p: Plan) -> Iterator[str]:
    """How a shorter pattern becomes the layers."""
    if tiled := standing.tiling(p.recipe):
        yield f"pattern: {tiled}"


def given_up(p: Plan) -> Iterator[str]:
    """What the family was designed with and the lane replaces."""
    for s in p.substitutions:
        there = f"{s.by} puts {KINDS[s.standing].title} there"
        yield f"gives up {KINDS[s.designed].title} at {s.letter} ({counted(len(s.numbers), 'layer')}): {there}"


def only_here(p: Plan) -> Iterator[str]:
    """Why stock Megatron must refuse the plan's arguments: one line for each kind and feature."""
    for seam in p.ours:
        where = f"layers {', '.join(map(str, seam.numbers))}" if seam.numbers else "MTP"
        what = f"{block.title} ({where})" if (block := KINDS.get(seam.owner)) else f"`{seam.owner}`"
        yield f"only nam_megatron trains {what}: {seam.missing}"


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def mtp(p: Plan) -> str:
    return f", MTP {p.mtp_depths} x ({' + '.join(KINDS[k].title for k in p.mtp)})" if p.mtp else ""


def layout(p: Plan) -> str:
    """The parallel layout in one line; experts only where there are any."""
    r, a = p.recipe, p.recipe.parallel
    words = [
        f"{counted(r.world_size, 'GPU')} ({r.cluster.name})",
        f"tensor {a.tensor}{' + sequence' if a.sequence else ''}",
        f"pipeline {a.pipeline}",
    ]
    if a.virtual_pipeline > 1:
        words.append(f"virtual {a.virtual_pipeline}")
    words += [f"context {a.context}", f"data {r.data_parallel}"]
    if "moe" in p.kinds:
        words += [f"expert {a.expert}", f"expert tensor {a.expert_tensor}", f"expert data {r.expert_data_parallel}"]
    return ", ".join(words)


def drawn_by(p: Plan) -> str:
    """The ranks on which a weight's first value depends, beside the seed; empty where there is one of each.

    Megatron seeds a stream for each pipeline stage, each tensor rank and each rank of the experts (0.19.2, _set_random_seed and
    model_parallel_cuda_manual_seed).
    """
    a = p.recipe.parallel
    degrees = {"pipeline stage": a.pipeline, "tensor rank": a.tensor, "expert rank": a.expert * a.expert_tensor}
    return ", ".join(name for name, degree in degrees.items() if degree > 1)


def strip(p: Plan) -> tuple[str, str, str]:
    """(ruler, source letters, Megatron's symbols), one column a layer and a bar at each pipeline cut."""
    ruler, letters, symbols = "", "", ""
    for layer in p.layers:
        if layer.number > 1 and layer.segment != p.layers[layer.number - 2].segment:
            ruler, letters, symbols = ruler.ljust(len(letters)) + " ", letters + "|", symbols + "|"
        if layer.number == 1 or layer.number % 10 == 0:
            ruler = ruler.ljust(len(letters)) + str(layer.number)
        letters += layer.letter
        symbols += KINDS[layer.kind].symbol
    return ruler, letters, symbols


def plan_text(lowering: Lowering) -> str:
    """The whole plan as plain text."""
    p = lowering.plan
    ruler, letters, symbols = strip(p)
    text = [
        *header(lowering),
        "",
        f"number  {ruler}",
        f"letter  {letters}",
        f"symbol  {symbols}",
        f"pattern {p.pattern}",
        "",
    ]
    text += [f"{title:<8} {count:>3}  {where}" for title, count, where in parts(p)]
    if p.index_reuse:
        groups: dict[int, list[int]] = {}
        for layer in p.layers:
            if layer.source is not None:
                groups.setdefault(layer.source, []).append(layer.number)
        text += ["top-k shared: " + "; ".join(f"{s} -> {', '.join(map(str, reuse))}" for s, reuse in groups.items())]
    if p.recipe.parallel.pipeline > 1:
        text += ["layers per pipeline rank: " + " ".join(map(str, p.stage_lengths))]
    for env in lowering.env:
        text += [f"environment: {env.name}{'=' + env.value if env.value is not None else ' unset'} ({env.why})"]
    return "\n".join(text) + "\n"
