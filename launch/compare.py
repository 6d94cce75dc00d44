"""`launch compare`: runs side by side, and whether their figures may be compared at all."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import box
from launch.overlay import CACHES
from launch.receipt import read
from nam_megatron import computation
from nam_megatron.errors import OK, Problem, Refused, quoted, raise_if

Receipt = Mapping[str, Any]
Row = tuple[str, list[str]]
LINEAGE = {"host": "host lineage", "family": "preset family", "regime": "launch regime"}
ANYWAY = "`--anyway` prints the table, marked as a rumor"
# Where receipts can differ.
PLACES = ("recipe", "source.trees", "patches", "host", "job.packages", "job.overlay", "job.diagnostic", "environ")
# Outside the recipe: what changes how a run is carried out, not what it computes, but for the host's software. A key stands for all below.
EXECUTION = ("job", "host", "source.trees.launch", "environ")
SOFTWARE = ("job.packages", "host.versions", "host.torch", "host.megatron")
# Variables of the training processes that say where, on any host of its own: folders, and which GPUs, which the box says.
WHERE = {*CACHES, "NVIDIA_VISIBLE_DEVICES"}
FIGURES = (
    ("end", "outcome.end"),
    ("steps", "outcome.figures.steps"),
    ("window, first step", "outcome.figures.window.first"),
    ("window, last step", "outcome.figures.window.last"),
    ("median ms", "outcome.figures.window.median_ms"),
    ("p10 ms", "outcome.figures.window.p10_ms"),
    ("p90 ms", "outcome.figures.window.p90_ms"),
    ("tokens/s/GPU", "outcome.figures.window.tokens_per_s_per_gpu"),
    ("model FLOPs utilisation", "outcome.against_forecast.model_flops_utilisation"),
    ("Megatron's TFLOP/s/GPU", "outcome.figures.window.megatron_tflops_per_gpu"),
    ("peak allocated GiB", "outcome.memory.peak_allocated_gib"),
    ("peak reserved GiB", "outcome.memory.peak_reserved_gib"),
    ("forecast allocated GiB", "forecast.peak_allocated_gib"),
    ("until the first step, s", "outcome.bad_put.until_first_step_s"),
    ("first steps' excess, s", "outcome.bad_put.first_steps_excess_s"),
    ("checkpoints, s", "outcome.bad_put.checkpoints_s"),
    ("last loss", "outcome.figures.loss_last"),
    ("losses finite", "outcome.figures.loss_finite"),
    ("gradient norms finite", "outcome.figures.grad_norm_finite"),
    ("NaN check", "outcome.nan_check"),
)


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) < 2:
        example = "python -m launch compare receipts/A receipts/B"
        raise Refused(Problem("`compare` takes two receipts or more", None, example))
    if (anyway := options.get("anyway", "false")) not in ("true", "false"):
        raise Refused(Problem(f"`anyway` is true or false, not `{anyway}`"))
    print(table([read(Path(word)) for word in words], anyway == "true"), end="")
    return OK


def objections(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """What forbids comparing figures of these runs."""
    names = [receipt["run"] for receipt in receipts]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield Problem(f"`{name}` is compared with itself", None, "name two runs")
    for receipt in receipts:
        if receipt["state"] != "sealed":
            yield Problem(f"`{receipt['run']}` is not sealed", None, "`python -m launch receipts` seals lost ones")
        elif at(receipt, "outcome.end") == "lost":
            hint = "its figures are of a log that lay open for anybody to edit"
            yield Problem(f"`{receipt['run']}` lost its launcher", None, hint)
    yield from boxes(receipts)
    for key, title in LINEAGE.items():
        values = [at(r, f"lineage.{key}") for r in receipts]
        if unnamed := [r["run"] for r, v in zip(receipts, values, strict=True) if not isinstance(v, str) or not v]:
            yield Problem(f"{title} is not named in {quoted(unnamed)}", None, "nothing can be compared with it")
        elif len(set(values)) > 1:
            yield Problem(f"{title} differs: {quoted(dict.fromkeys(parted(values)))}", None, ANYWAY)
    yield from environments(receipts)
    peaks = [at(r, "forecast.peak_tflops") for r in receipts]
    if len(set(peaks)) > 1:
        measure = quoted(dict.fromkeys(map(shown, peaks)))
        yield Problem(f"MFU is measured by different peaks: {measure} TFLOP/s", None, f"leave `device` alone; {ANYWAY}")


def environments(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """What NCCL, CUDA and torch read and no plan names is part of the regime, too: CUDA_LAUNCH_BLOCKING, NCCL_NVLS_ENABLE."""
    found = [at(r, "environ") for r in receipts]
    known = [{k: v for k, v in e.items() if k not in WHERE} if isinstance(e, Mapping) else {} for e in found]
    if len({at(r, "box.salt") for r in receipts}) > 1:  # marks of two folders say nothing of each other
        known = [{k: re.sub("<set [0-9a-f]{8}>", "<set>", str(v)) for k, v in one.items()} for one in known]
    for name in sorted({name for one in known for name in one}):
        if len(values := dict.fromkeys(shown(one.get(name, "unset")) for one in known)) > 1:
            yield Problem(f"launch regime differs: the training processes had {name} {quoted(values)}", None, ANYWAY)


def boxes(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    """Whether all ran on one host, or on hosts of one declared pool."""
    pools = {at(r, "lineage.pool") for r in receipts}
    if len(pools) == 1 and isinstance(next(iter(pools)), str):
        return
    ids = [box.of(r) for r in receipts]
    if unknown := [r["run"] for r, found in zip(receipts, ids, strict=True) if found is None]:
        why = "a cluster's name says what kind of host it was, not which one"
        yield Problem(f"no host is recorded in {quoted(unknown)}", None, f"{why}; {ANYWAY}")
    elif len(set(ids)) > 1:
        hint = f"run both on one, or declare that they are alike before they run: `cluster.pool=NAME`; {ANYWAY}"
        yield Problem(
            f"{len(set(ids))} hosts: {quoted(dict.fromkeys(found[-1] for found in ids if found))}", None, hint
        )


def parted(values: Sequence[str]) -> list[str]:
    """Lineages without the parts that all have."""
    lists = [value.split("; ") for value in values]
    shared = set(lists[0]).intersection(*lists[1:])
    return ["; ".join(part for part in parts if part not in shared) or "nothing more" for parts in lists]


def table(receipts: Sequence[Receipt], anyway: bool = False) -> str:
    """Config differences, those that change the computation first, then figures. Raises Refused unless the runs are comparable."""
    found = list(objections(receipts))
    if not anyway:
        raise_if(found)
    title = "figures (RUMOR)" if found else "figures"
    text = ["RUMOR: these runs are not comparable", *(f"  {p.message}" for p in found), ""] if found else []
    columns = [r["run"] for r in receipts]
    for name, rows in (*differences(receipts), (title, figures(receipts))):
        text += grid(name, columns, rows)
    return "\n".join(text)


def differences(receipts: Sequence[Receipt]) -> Iterator[tuple[str, list[Row]]]:
    """What differs: in the computation, in the execution only."""
    trees = [{k: v for place in PLACES for k, v in flat(at(r, place), place).items()} for r in receipts]
    rows = []
    for key in dict.fromkeys(k for tree in trees for k in tree):
        values = [tree.get(key) for tree in trees]
        if any(v != values[0] for v in values):
            rows.append((key, [shown(v) for v in values]))
    for title, executing in (("changes the computation", False), ("execution only", True)):
        yield title, [row for row in rows if executes(row[0]) == executing]


def executes(key: str) -> bool:
    """Whether a receipt's key only says how the run was carried out."""

    def below(places: Sequence[str]) -> bool:
        return any(key == place or key.startswith(f"{place}.") for place in places)

    if key.startswith("recipe."):
        return computation.executes(key.removeprefix("recipe.")) is not None
    return below(EXECUTION) and not below(SOFTWARE)


def figures(receipts: Sequence[Receipt]) -> list[Row]:
    rows = [(title, [shown(at(r, key)) for r in receipts]) for title, key in FIGURES]
    return [(title, values) for title, values in rows if set(values) != {"-"}]


def grid(title: str, columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    if not rows:
        return [f"== {title}: none ==", ""]
    lines = [("", list(columns)), *rows]
    widths = [
        max(len(cells[i]) for cells in ([key, *values] for key, values in lines)) for i in range(len(columns) + 1)
    ]
    made = (
        "  ".join(c.ljust(w) for c, w in zip([key, *values], widths, strict=True)).rstrip() for key, values in lines
    )
    return [f"== {title} ==", *made, ""]


def flat(node: Any, key: str) -> dict[str, Any]:
    """Nested mappings as {dotted key: leaf}."""
    if isinstance(node, Mapping) and node:
        return {k: v for name, child in node.items() for k, v in flat(child, f"{key}.{name}").items()}
    return {key: node}


def at(node: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."
