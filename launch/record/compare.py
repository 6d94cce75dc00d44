"""`launch compare`: runs side by side, and whether their figures may be compared at all."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from launch.context import CHECKOUT
from launch.host import host_id
from launch.record.receipt import named, read
from launch.record.redact import SET, TEXT
from launch.run.overlay import CACHES
from launch.run.terminal import printable
from nam_megatron import migrate
from nam_megatron.errors import OK, Problem, Refused, quoted
from nam_megatron.judge import same
from nam_megatron.recipe import at, filled

Receipt = Mapping[str, Any]
Row = tuple[str, list[str]]
LINEAGE = {"host": "host lineage", "family": "preset family", "regime": "launch regime"}
SHOWN = 60  # characters of a value
ANYWAY = "`--anyway` does it all the same, marked as a rumor"
# Where receipts can differ.
PLACES = (
    "recipe", "data", "source.trees", "patches", "mends", "outcome.mends", "outcome.loaded", "host", "job.packages", "job.overlay",
    "job.diagnostic", "environ",
)  # fmt: skip
# What older receipts do not have, and what cannot be told of them.
STARTUP = "host.versions.startup"
UNTOLD: Mapping[str, Callable[[Receipt], bool]] = {
    "the data is the same": lambda r: at(r, "data") is None and at(r, "recipe.data.name") not in (None, "mock"),
    "they began with the same checkpoint": lambda r: begun(r) is None,
    "Python ran the same code at its start": lambda r: isinstance(v := at(r, "host.versions"), Mapping) and "startup" not in v,
}  # fmt: skip
# Outside the recipe: what changes how a run is carried out, not what it computes, but for the host's software. A key stands for all below.
EXECUTION = ("job", "host", "source.trees.launch", "environ")
SOFTWARE = ("job.packages", "host.versions", "host.torch", "host.megatron")
# Variables of the training processes that say where, on any host of its own: folders, and which GPUs, which the box says.
WHERE = {*CACHES, "NVIDIA_VISIBLE_DEVICES"}
# Of each GPU, what its figures hang on: in words, and as receipts have it.
GPU = {
    "name": "name", "memory": "memory_mib", "ECC": "ecc", "highest clock": "max_sm_mhz", "power limit": "power_limit_w", "PCIe": "pcie",
}  # fmt: skip
MARK = re.compile("<set [0-9a-f]{8}>")
FIGURES = (
    ("end", "outcome.end"), ("steps", "outcome.figures.steps"), ("window, first step", "outcome.figures.window.first"),
    ("window, last step", "outcome.figures.window.last"), ("median ms", "outcome.figures.window.median_ms"),
    ("p10 ms", "outcome.figures.window.p10_ms"), ("p90 ms", "outcome.figures.window.p90_ms"),
    ("tokens/s/GPU", "outcome.figures.window.tokens_per_s_per_gpu"),
    ("model FLOPs utilisation", "outcome.against_forecast.model_flops_utilisation"),
    ("Megatron's TFLOP/s/GPU", "outcome.figures.window.megatron_tflops_per_gpu"),
    ("peak allocated GiB", "outcome.memory.peak_allocated_gib"), ("peak reserved GiB", "outcome.memory.peak_reserved_gib"),
    ("forecast allocated GiB", "forecast.peak_allocated_gib"), ("until the first step, s", "outcome.bad_put.until_first_step_s"),
    ("first steps' excess, s", "outcome.bad_put.first_steps_excess_s"), ("checkpoints, s", "outcome.bad_put.checkpoints_s"),
    ("last loss", "outcome.figures.loss_last"), ("losses finite", "outcome.figures.loss_finite"),
    ("gradient norms finite", "outcome.figures.grad_norm_finite"), ("skipped steps", "outcome.figures.skipped_steps"),
    ("NaN steps", "outcome.figures.nan_steps"), ("NaN check", "outcome.nan_check"),
)  # fmt: skip


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) < 2:
        example = "python -m launch compare receipts/A receipts/B"
        raise Refused("`compare` takes two receipts or more", hint=example)
    if (anyway := options.get("anyway", "false")) not in ("true", "false"):
        raise Refused(f"`anyway` is true or false, not `{anyway}`")
    print(table([read(named(word, CHECKOUT / "receipts")) for word in words], anyway == "true"), end="")
    return OK


def objections(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """What forbids comparing figures of these runs."""
    names = [receipt["run"] for receipt in receipts]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield Problem(f"`{name}` is compared with itself", hint="name two runs")
    for receipt in receipts:
        if receipt["state"] != "sealed":
            yield Problem(f"`{receipt['run']}` is not sealed", hint="`python -m launch receipts` seals lost ones")
        elif at(receipt, "outcome.end") == "lost":
            hint = "its figures are of a log that lay open for anybody to edit"
            yield Problem(f"`{receipt['run']}` lost its launcher", hint=hint)
    yield from boxes(receipts)
    yield from machines(receipts)
    for key, title in LINEAGE.items():
        values = [at(r, f"lineage.{key}") for r in receipts]
        if unnamed := [r["run"] for r, v in zip(receipts, values, strict=True) if not isinstance(v, str) or not v]:
            yield Problem(f"{title} is not named in {quoted(unnamed)}", hint="nothing can be compared with it")
        elif len(set(values)) > 1:
            by = of_model(receipts) if key == "family" else None
            yield from (Problem(f"{title} differs: {quoted(dict.fromkeys(said))}", hint=by) for said in parted(values))
    yield from environments(receipts)
    declared = [at(r, "job.diagnostic") for r in receipts]
    if len(set(map(shown, declared))) > 1:
        yield Problem(f"a diagnostic beside what is none: {quoted(map(shown, declared))}")
    peaks, counts = ([at(r, f"forecast.{key}") for r in receipts] for key in ("peak_tflops", "model_flops_per_token"))
    if len(set(peaks)) > 1:
        measure = quoted(dict.fromkeys(map(shown, peaks)))
        yield Problem(f"MFU is measured by different peaks: {measure} TFLOP/s", hint="leave `device` alone")
    if len(set(counts)) > 1:
        message = f"MFU is of different counts: {quoted(dict.fromkeys(map(shown, counts)))} FLOPs a token"
        yield Problem(message, hint="one model is counted in one way: run both with one version")


def of_model(receipts: Sequence[Receipt]) -> str | None:
    """The model's keys that differ, a few of them: a family says them by its digest."""
    _, rows = next(iter(differences(receipts)))
    keys = [
        f"`{key.removeprefix('recipe.')}` is {quoted(cells)}" for key, cells in rows if key.startswith("recipe.model.")
    ]
    more = f", and {len(keys) - 4} more" if len(keys) > 4 else ""
    return f"{', '.join(keys[:4])}{more}" if keys else None


def allowed(receipts: Sequence[Receipt], anyway: bool) -> list[Problem]:
    """What forbids it. Raises Refused with that, and says once, at its end, that there is a way, unless it is done anyway."""
    found = list(dict.fromkeys(objections(receipts)))
    if found and not anyway:
        raise Refused([*found[:-1], replace(found[-1], hint="; ".join(filter(None, (found[-1].hint, ANYWAY))))])
    return found


def environments(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """What NCCL, CUDA and torch read and no plan names is part of the regime, too: CUDA_LAUNCH_BLOCKING, NCCL_NVLS_ENABLE."""
    found = [at(r, "environ") for r in receipts]
    known = [{k: v for k, v in e.items() if k not in WHERE} if isinstance(e, Mapping) else {} for e in found]
    if len({at(r, "box.salt") for r in receipts}) > 1 and (
        marked := sorted({k for e in known for k in e if MARK.search(str(e[k]))})
    ):
        hint = "marks of two folders say nothing of each other: let both runs write into one, `cluster.storage.receipts=DIR`"
        yield Problem(f"whether the training processes had the same {quoted(marked)} cannot be told", hint=hint)
        known = [{k: v for k, v in one.items() if k not in marked} for one in known]
    for name in sorted({name for one in known for name in one}):
        if [one.get(name) for one in known].count(SET) > 1:
            message = f"whether the training processes had the same `{name}` cannot be told"
            yield Problem(message, hint="it is called a secret: leave it unset")
        if len(values := dict.fromkeys(shown(one.get(name, "unset")) for one in known)) > 1:
            yield Problem(f"launch regime differs: the training processes had {name} {quoted(values)}")


def machines(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """What decides a GPU's speed: one host's may change between two runs, and a pool is declared by a person."""
    found = [_machine(r) for r in receipts]
    pooled = any(at(r, "lineage.pool") is not None for r in receipts)
    if pooled and (unknown := [r["run"] for r, one in zip(receipts, found, strict=True) if not one["name"]]):
        yield Problem(f"the GPUs of {quoted(unknown)} are not recorded", hint="a pool is of one kind")
    for what in found[0]:
        if len(values := dict.fromkeys(shown(one[what]) for one in found)) > 1:
            yield Problem(f"the GPUs' {what} differs: {quoted(values)}")


def _machine(found: Receipt) -> dict[str, Any]:
    every = {what: sorted({shown(g.get(key)) for g in listed(found, "host.gpus")}) or None for what, key in GPU.items()}
    # Of all hosts, and what NCCL found: sockets, though all were meant to have InfiniBand.
    ranks = {
        what: sorted({shown(r.get(key)) for r in listed(found, "outcome.ranks")}) or None
        for what, key in (("name on the ranks", "name"), ("growing segments", "expandable"))
    }
    nccl = {what: at(found, f"outcome.nccl.{key}") for what, key in (("NCCL", "version"), ("network", "network"))}
    return {**every, **ranks, **nccl, "driver": at(found, "host.driver")}


def boxes(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """Whether all ran on one host, or on hosts of one declared pool."""
    pools = {at(r, "lineage.pool") for r in receipts}
    if len(pools) == 1 and isinstance(next(iter(pools)), str):
        return
    ids = [host_id.of(r) for r in receipts]
    if unknown := [r["run"] for r, found in zip(receipts, ids, strict=True) if found is None]:
        why = "a cluster's name says what kind of host it was, not which one"
        yield Problem(f"no host is recorded in {quoted(unknown)}", hint=why)
    elif len(set(ids)) > 1:
        hint = "run both on one, or declare that they are alike before they run: `cluster.pool=NAME`"
        yield Problem(f"{len(set(ids))} hosts: {quoted(dict.fromkeys(map(host_id.called, receipts)))}", hint=hint)


def parted(values: Sequence[str]) -> Iterator[list[str]]:
    """How lineages (`PART; PART; ...`) differ: lists with one text a lineage.

    A part of `NAME KEY=VALUE ...` that all have by its name is a list of its own, of the words that differ; the last list has all other
    parts that differ.
    """
    lists = [value.split("; ") for value in values]
    shared = set(lists[0]).intersection(*lists[1:])
    named = [{re.split("[ =]", part)[0]: part for part in parts if part not in shared} for parts in lists]
    for name in [name for name in named[0] if all(name in one for one in named)]:
        words = [one[name].split() for one in named]
        if any("=" in part for part in map(" ".join, words)):
            same = set(words[0]).intersection(*words[1:]) - {name}
            yield [" ".join(word for word in one if word not in same) or "nothing more" for one in words]
            shared |= {one[name] for one in named}
    rest = ["; ".join(part for part in parts if part not in shared) or "nothing more" for parts in lists]
    if len(set(rest)) > 1:
        yield rest


def table(receipts: Sequence[Receipt], anyway: bool = False) -> str:
    """Config differences, those that change the computation first, then figures. Raises Refused unless the runs are comparable."""
    found = allowed(receipts, anyway)
    title = "figures (RUMOR)" if found else "figures"
    text = ["RUMOR: these runs are not comparable", *(f"  {printable(p.message)}" for p in found), ""] if found else []
    text += [line for said in untold(receipts) for line in (f"note: {said}", "")]
    columns = [r["run"] for r in receipts]
    body = [line for name, rows in differences(receipts) for line in grid(name, columns, rows)]
    if any(TEXT in line for line in body):
        text += [f"note: `{TEXT}` is a word of your own, which no receipt holds; the plan.json beside it does", ""]
    text += body
    text += grid(title, [*columns, *changes(columns)], figures(receipts))
    return "\n".join(map(printable, text))  # keys of a receipt may be anybody's, too


def untold(receipts: Sequence[Receipt]) -> Iterator[str]:
    """What is left out of the differences."""
    for what, unrecorded in UNTOLD.items():
        if unknown := [r["run"] for r in receipts if unrecorded(r)]:
            yield f"whether {what} cannot be told: {quoted(unknown)} did not record it"


def differences(receipts: Sequence[Receipt]) -> Iterator[tuple[str, list[Row]]]:
    """What differs: in the computation, in the execution only."""
    found = [{**r, "recipe": filled(migrate.receipt(r))} if at(r, "recipe.model") else r for r in receipts]
    known = [{place: at(r, place) for place in PLACES} | {"outcome.loaded": begun(r)} for r in found]
    gone = [place for place in ("data", "outcome.loaded") if any(one[place] is None for one in known)]
    trees = [
        {k: v for place in PLACES if place not in gone for k, v in flat(one[place], place).items()} for one in known
    ]
    if not all(STARTUP in tree for tree in trees):  # there None is an answer
        trees = [{k: v for k, v in tree.items() if k != STARTUP} for tree in trees]
    rows = []
    for key in dict.fromkeys(k for tree in trees for k in tree):
        values = [tree.get(key) for tree in trees]
        if any(v != values[0] for v in values):
            rows.append((key, apart(values)))
    for title, executing in (("changes the computation", False), ("execution only", True)):
        yield title, [row for row in rows if executes(row[0]) == executing]


def begun(found: Receipt) -> Any:
    """The checkpoint that a run began with, step 0 without one; None where that cannot be told."""
    named = any(at(found, f"recipe.schedule.{key}") for key in ("load", "pretrained"))
    return at(found, "outcome.loaded") or (None if named else {"step": 0, "sha256": None})


def executes(key: str) -> bool:
    """Whether a receipt's key only says how the run was carried out."""

    def below(places: Sequence[str]) -> bool:
        return any(key == place or key.startswith(f"{place}.") for place in places)

    if key.startswith("recipe."):
        return same.executes(key.removeprefix("recipe.")) is not None
    return below(EXECUTION) and not below(SOFTWARE)


def unit(receipts: Sequence[Receipt]) -> str:
    """What a rank of these runs had."""
    return "CPU rank" if all(at(r, "recipe.cluster.processor") == "cpu" for r in receipts) else "GPU"


def figures(receipts: Sequence[Receipt]) -> list[Row]:
    """Each figure of each run, and behind them by how much every other run's is off the first one's: see `changes`."""
    found = [(title.replace("GPU", unit(receipts)), [at(r, key) for r in receipts]) for title, key in FIGURES]
    found.append(("waived in the checks", [waived(r) for r in receipts]))
    return [
        (title, [*map(shown, values), *(change(values[0], v) for v in values[1:])])
        for title, values in found
        if any(v is not None for v in values)
    ]


def changes(names: Sequence[str]) -> list[str]:
    """The titles of the columns of differences."""
    return ["difference"] if len(names) == 2 else [f"{n} to 1" for n in range(2, len(names) + 1)]


def change(first: Any, other: Any) -> str:
    """`+1.23 %` of the first; blank where one of the two is no number, or nothing changed."""
    if not all(type(v) in (int, float) and math.isfinite(v) for v in (first, other)) or not first or first == other:
        return ""
    return f"{(other - first) / abs(first):+.2%}".replace("%", " %")


def waived(found: Receipt) -> str | None:
    """Names of the findings that a person said are no reason to stop: `idle` means that somebody else was on the GPUs."""
    return (
        ", ".join(sorted({str(f.get("name")) for f in listed(found, "findings") if f.get("level") == "waived"})) or None
    )


def grid(title: str, columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    if not rows:
        return [f"== {title}: none ==", ""]
    lines = [
        cells
        for key, values in [("", list(columns)), *rows]
        for cells in zip_longest([key], *map(wrapped, values), fillvalue="")
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    made = ("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in lines)
    return [f"== {title} ==", *made, ""]


def wrapped(text: str) -> list[str]:
    return [text[at : at + SHOWN] for at in range(0, len(text), SHOWN)] or [""]


def flat(node: Any, key: str) -> dict[str, Any]:
    """Nested mappings as {dotted key: leaf}; a list of mappings, as of a host's GPUs, by its places from 0."""
    if isinstance(node, list) and node and not key.startswith("recipe") and all(isinstance(v, Mapping) for v in node):
        node = {str(n): value for n, value in enumerate(node)}
    if isinstance(node, Mapping) and node:
        return {k: v for name, child in node.items() for k, v in flat(child, f"{key}.{name}").items()}
    return {key: node}


def listed(found: Receipt, key: str) -> list[Receipt]:
    """The mappings of a list, none where there is no list: a receipt may be anybody's."""
    rows = at(found, key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def shown(value: Any) -> str:
    text = whole(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def whole(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        value = ", ".join(value)
    return printable(value if isinstance(value, str) else json.dumps(value))


def apart(values: Sequence[Any]) -> list[str]:
    """Values that are not all equal, so that no two unlike ones read alike: long ones from shortly before where they part."""
    cut, texts = list(map(shown, values)), list(map(whole, values))
    if len(set(cut)) < len(set(texts)):
        start = max(0, len(os.path.commonprefix(texts)) - 8)
        cut = list(map(shown, [f"...{text[start:]}" if start else text for text in texts]))
    if len(set(cut)) < len(set(texts)):
        cut = texts
    # floats of more digits, a number and its text
    if len(set(cut)) < len({json.dumps(v, sort_keys=True) for v in values}):
        cut = [json.dumps(v) for v in values]
    return cut
