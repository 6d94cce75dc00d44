"""Forecast against measured memory: python benchmarks/memory.py

Reads benchmarks/measured_{h200,h100}.json, writes benchmarks/memory.json and the tables of docs/budget.md. Needs the test group:
Megatron's own estimator is asked about each run, too.
"""

import argparse
import contextlib
import io
import json
import statistics
import time
from argparse import Namespace
from pathlib import Path

from nam_megatron import migrate
from nam_megatron.budget import budget, search
from nam_megatron.budget.text import grid
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.recipe import conf_dir, load
from nam_megatron.words.sizes import GIB

HERE = Path(__file__).parent
MEASURED = HERE / "measured_h200.json", HERE / "measured_h100.json"
RESULT, DOCS = HERE / "memory.json", HERE.parent / "docs" / "budget.md"
PHASES = ("after_init", "first_step", "warm_up", "between_steps", "steady")


def entries() -> list[dict]:
    return [entry for path in MEASURED for entry in json.loads(path.read_text())["entries"]]


def rows() -> list[dict]:
    """Each measured figure beside its forecast, worst stage."""
    found = []
    for entry in entries():
        worst = budget(translate(load(entry["preset"], map(migrate.word, entry["overrides"]))).plan).worst
        for phase in PHASES:
            for what in ("allocated", "reserved"):
                if measured := entry["peaks"].get(phase, {}).get(what):
                    moment = worst.moments[phase]
                    row = {"name": entry["name"], "phase": phase, "what": what, "moment": moment.event}
                    found.append(row | {"measured": measured, "forecast": getattr(moment, what)})
        if used := entry.get("device_used"):
            row = {"name": entry["name"], "phase": "whole run", "what": "in use", "moment": worst.worst.event}
            found.append(row | {"measured": used, "forecast": worst.worst.total})
    return found


def error(row: dict) -> float:
    return row["forecast"] / row["measured"] - 1


def megatron_says(lowering: Lowering) -> str:
    """The answer of megatron-core's own estimator (megatron/training/theoretical_memory_usage.py)."""
    from megatron.training.theoretical_memory_usage import report_theoretical_memory

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        report_theoretical_memory(Namespace(hybrid_layer_pattern=lowering.plan.pattern))
    return said.getvalue().strip()


def speed() -> dict:
    """Milliseconds of a budget after the plan, by preset, median of 20; seconds of a sweep over 200 points."""
    presets = {}
    for path in sorted((conf_dir() / "preset").glob("*.yaml")):
        plan, times = translate(load(path.stem)).plan, []
        for _ in range(20):
            start = time.perf_counter()
            budget(plan)
            times.append(time.perf_counter() - start)
        presets[path.stem] = round(1e3 * statistics.median(times), 1)
    recipe, start = load("nam56r_native_dp"), time.perf_counter()
    points = list(search.sweep(recipe, "model.seq_length", range(64, 64 * 201, 64)))
    assert len(points) == 200 and all(p.budget for p in points)
    return {"ms_per_budget": presets, "s_per_200_points": round(time.perf_counter() - start, 2)}


def tables(result: dict) -> str:
    """What stands between the markers of docs/budget.md."""
    lines = [("run", "phase", "moment", "measured GiB", "forecast GiB", "error")]
    for row in result["rows"]:
        sizes = f"{row['measured'] / GIB:.2f}", f"{row['forecast'] / GIB:.2f}"
        lines.append(
            (row["name"], f"{row['phase']}, {row['what']}", row["moment"], *sizes, f"{100 * error(row):+.2f} %")
        )
    peaks = [abs(error(r)) for r in result["rows"] if r["what"] == "allocated"]
    slowest = max(result["speed"]["ms_per_budget"].values())
    return "\n".join(
        [
            "```text",
            grid(lines, right=(3, 4, 5)) + "```",
            "",
            f"Allocated memory: largest error {100 * max(peaks):.2f} %, median {100 * statistics.median(peaks):.2f} %, "
            f"over {len(peaks)} figures of {len({r['name'] for r in result['rows']})} runs.",
            "",
            f'Megatron\'s own estimator on each of these runs: "{result["megatron_says"]}"',
            "",
            f"A budget takes at most {slowest} ms after the plan (slowest preset), a sweep over 200 points "
            f"{result['speed']['s_per_200_points']} s, on one core.",
        ]
    )


def page(text: str, result: dict) -> str:
    """docs/budget.md with its tables made anew."""
    begin, end = "<!-- begin: benchmarks/memory.py -->\n", "\n<!-- end -->"
    head, rest = text.split(begin)
    return head + begin + tables(result) + end + rest.split(end, 1)[1]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    says = {megatron_says(translate(load(e["preset"], map(migrate.word, e["overrides"])))) for e in entries()}
    assert len(says) == 1, says
    result = {"rows": rows(), "megatron_says": says.pop(), "speed": speed()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    DOCS.write_text(page(DOCS.read_text(), result))
    print(tables(result))


if __name__ == "__main__":
    main()
