"""A plan in plain text, for people: the header of every output, and the layer strip."""

import json
from collections.abc import Iterator
from itertools import groupby

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import parameters
from nam_megatron.compile.lower import Lowering
from nam_megatron.compile.plan import Plan, composition, identity, parts
from nam_megatron.errors import counted, joined
from nam_megatron.laws.book import WAIVABLE
from nam_megatron.recipe import resolve
from nam_megatron.words.setting import STOCK


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
    yield from over_hosts(p)
    if drawn := drawn_by(p):
        yield f"initial weights: each {drawn} draws its own; the same seed gives other weights in another layout"
    if p.departures:
        yield f"departs from lane {r.lane.name}: {', '.join(p.departures)}"
    yield from notes(p)
    if "mlp" in {l.kind for l in p.layers}:
        yield f"E is a dense MLP of {r.model.ffn_hidden_size}: {len(p.numbers('mlp'))} layers"
    for seam in p.not_built:
        where = f", layers {', '.join(map(str, seam.numbers))}" if seam.numbers else ""
        yield f"NOT BUILT: {seam.owner} ({seam.missing}{where}); this plan can be read, not trained"
    yield from assumed(p)


def assumed(p: Plan) -> Iterator[str]:
    """What nobody published, one line for each section and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for _, a in sorted(p.recipe.assumptions.items()):
        section, _, key = a.key.rpartition(".")
        found.setdefault((section, a.why), []).append(f"{key}={_said(a.value)}")
    for (section, why), values in found.items():
        yield f"assumed: {section}.{', '.join(values)}: {why}"


def notes(p: Plan) -> Iterator[str]:
    """What whoever gets the bare arguments is told, too."""
    yield from given_up(p)
    yield from denied(p)
    yield from only_here(p)
    yield from needed(p)
    yield from unmended(p)
    yield from tries(p)


def tiling(p: Plan) -> Iterator[str]:
    """How a shorter pattern becomes the layers."""
    if tiled := resolve.tiling(p.recipe):
        yield f"pattern: {tiled}"


def given_up(p: Plan) -> Iterator[str]:
    """What the family was designed with and the lane replaces."""
    for s in p.substitutions:
        there = f"{s.by} puts {KINDS[s.standing].title} there"
        yield f"gives up {KINDS[s.designed].title} at {s.letter} ({counted(len(s.numbers), 'layer')}): {there}"


def denied(p: Plan) -> Iterator[str]:
    """What overlays wished of kernels, and what denies it."""
    for wish in p.recipe.wishes:
        several = " and " in wish.by
        who = f"overlay{'s' if several else ''} {wish.by} want{'' if several else 's'}"
        yield f"{who} {wish.key}={_said(wish.value)}, and get{'' if several else 's'} {_said(wish.instead)}: {wish.why}"


def only_here(p: Plan) -> Iterator[str]:
    """Why stock Megatron must refuse the plan's arguments: one line for each kind and feature."""
    for seam in p.ours:
        where = f"layers {', '.join(map(str, seam.numbers))}" if seam.numbers else "MTP"
        what = f"{block.title} ({where})" if (block := KINDS.get(seam.owner)) else f"`{seam.owner}`"
        yield f"only nam_megatron trains {what}: {seam.missing}"
    for seam in p.alone:
        yield f"only nam_megatron trains these arguments as meant (`{seam.owner}`): {seam.missing}"


def needed(p: Plan) -> Iterator[str]:
    """What has to be installed beside Megatron-Core and Transformer Engine, and for which trainer."""
    for of in dict.fromkeys(need.of for need in p.packages):
        if of == STOCK and (p.ours or p.alone):
            continue  # it stops at the marker
        parts = []
        for (what, instead), found in groupby((n for n in p.packages if n.of == of), lambda n: (n.what, n.instead)):
            said = f"{joined(need.name for need in found)} for {what}"
            parts.append(f"{said} ({instead})" if instead else said)
        yield f"{of + ' ' if of else ''}needs {'; '.join(parts)}"


def unmended(p: Plan) -> Iterator[str]:
    """What stock Megatron would do to real data, where nothing else keeps it from these arguments: see docs/mends.md."""
    if p.recipe.data.name in ("indexed", "blend", "built") and not (p.ours or p.alone):
        yield (
            "stock Megatron takes the tokenizer's pad token within the data for padding, and may read a rebuilt dataset in the old order"
            " (docs/mends.md: padding, sample_order)"
        )


def tries(p: Plan) -> Iterator[str]:
    """What nobody has tried, and why this run does."""
    for law, why in sorted(p.recipe.allow.items()):
        yield f"untried, and allowed: {WAIVABLE[law]} (`{law}`: {why})"


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def mtp(p: Plan) -> str:
    return f", MTP {p.mtp_depths} x ({' + '.join(KINDS[k].title for k in p.mtp)})" if p.mtp else ""


def layout(p: Plan) -> str:
    """The parallel layout in one line; experts only where there are any."""
    r, a = p.recipe, p.recipe.parallel
    words = [
        f"{counted(r.world_size, r.cluster.unit)} ({r.cluster.name})",
        f"tensor {a.tensor}{' + sequence' if a.sequence else ''}",
        f"pipeline {a.pipeline}",
    ]
    if a.virtual_pipeline > 1:
        words.append(f"virtual {a.virtual_pipeline}")
    words += [f"context {a.context}", f"data {r.data_parallel}"]
    if "moe" in p.kinds:
        words += [f"expert {a.expert}", f"expert tensor {a.expert_tensor}", f"expert data {r.expert_data_parallel}"]
    return ", ".join(words)


def over_hosts(p: Plan) -> Iterator[str]:
    """Groups that exchange something in each layer and lie on several hosts, between which there is no NVLink."""
    a, cluster = p.recipe.parallel, p.recipe.cluster
    groups = {"context": a.tensor * a.context if a.context > 1 else 1}
    groups["expert"] = a.expert_tensor * a.expert if "moe" in p.kinds else 1
    for name, ranks in groups.items():
        if a.over_hosts(ranks, cluster):
            yield f"over hosts: {name} groups are {ranks} ranks, a host has {counted(cluster.gpus_per_node, 'GPU')}"


def drawn_by(p: Plan) -> str:
    """The ranks on which a weight's first value depends, beside the seed; empty where there is one of each.

    Megatron seeds a stream for each pipeline stage, each tensor rank and each rank of the experts (0.19.2, _set_random_seed and
    model_parallel_cuda_manual_seed).
    """
    a = p.recipe.parallel
    degrees = {"pipeline stage": a.pipeline, "tensor rank": a.tensor, "expert rank": a.expert * a.expert_tensor}
    return ", ".join(name for name, degree in degrees.items() if degree > 1)


def strip(p: Plan) -> tuple[str, str, str, str]:
    """(ruler, source letters, Megatron's symbols, marks of variants or nothing), one column a layer and a bar at each pipeline cut."""
    ruler, letters, symbols, marks = "", "", "", ""
    marked = {number: name[0] for name, numbers in p.variants.items() for number in numbers}
    for layer in p.layers:
        if layer.number > 1 and layer.segment != p.layers[layer.number - 2].segment:
            ruler, letters, symbols = ruler.ljust(len(letters)) + " ", letters + "|", symbols + "|"
            marks += "|"
        if layer.number == 1 or layer.number % 10 == 0:
            ruler = ruler.ljust(len(letters)) + str(layer.number)
        letters += layer.letter
        symbols += KINDS[layer.kind].symbol
        marks += marked.get(layer.number, " ")
    return ruler, letters, symbols, marks if marked else ""


def plan_text(lowering: Lowering) -> str:
    """The whole plan as plain text."""
    p = lowering.plan
    ruler, letters, symbols, marks = strip(p)
    text = [
        *header(lowering),
        "",
        f"number  {ruler}",
        f"letter  {letters}",
        f"symbol  {symbols}",
        *([f"variant {marks.rstrip()}"] if marks else []),
        f"pattern {p.pattern}",
        "",
    ]
    text += [f"{title:<8} {count:>3}  {where}" for title, count, where in parts(p)]
    text += [f"{name}: layers {', '.join(map(str, numbers))}" for name, numbers in p.variants.items()]
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
