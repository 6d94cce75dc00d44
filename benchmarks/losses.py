"""Losses of long trainings beside each other: one run a command, then the plots and the table of docs/log.md.

    python benchmarks/losses.py train NAME [--out FOLDER] [--data FOLDER] [--steps 1000] [--limit SECONDS]
    python benchmarks/losses.py plot

The runs of a question differ in what is asked and in nothing else. They take one sequence a step, so that a thousand steps are minutes.
Nothing is timed, so a run may share its GPU, though several of these take longer beside each other than one after the other.
FOLDER/NAME.json (benchmarks/losses) is what a run's log said; of one that failed, as far as it went.

    ours, stock, again   13 layers of `nam56r_native_dp`: our stack with `+overlay=fused`, Megatron's default one with Megatron's builder,
                         and ours once more, which shows what kernels with atomics make of equal runs; three seeds
    bf16_native, fp8_native, delayed_native, bf16_native_again,
    bf16_author, fp8_author, delayed_author, bf16_author_again
                         13 layers of both fused presets with `+overlay=extras`, and of fp8_* dense projections in FP8 (`+overlay=fp8`),
                         of delayed_* with delayed scaling, each step one CUDA graph; and bf16's once more
    rates_author, bf16_author_calm, fp8_author_calm, rates_author_calm, bf16_author_calm_again
                         of rates_* what sets Mamba-3's decays and angles is multiplied in bf16; *_calm has 200 steps
                         of warm-up, not 10; up to three seeds
    reused, own          13 layers of `nam56r_fused`: of three DSA layers two take the first one's top-k, or each its own; two seeds
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import measure

from launch.record import steps

HERE = Path(__file__).parent
FOLDER, DOCS = HERE / "losses", HERE.parent / "docs"
SEEDS = (1234, 1235, 1236)
STEPS = 1000  # of a whole run
SPAN = 50  # steps that a point of a curve is the mean of
LOSS, KEPT = steps.LOSS, "DSA kept"


class Run(NamedTuple):
    """words: for benchmarks/peak_memory.py."""

    preset: str
    overrides: tuple[str, ...]
    words: tuple[str, ...] = ()


CUT = ("cluster=h200_1", "model.depth=13", "schedule.micro_batch_size=1", "schedule.global_batch_size=1")
CALM = ("optim.warmup_steps=200",)
LANES = {"native": ("nam56r_native_dp_fused", ()), "author": ("nam56r_fused", (measure.SPARSE13,))}
FORMS = {
    "bf16": ("+overlay=extras",),
    "fp8": ("+overlay=[extras,fp8]", measure.WITHOUT),
    "rates": ("+overlay=[extras,fp8]", measure.RATES),
    "delayed": ("+overlay=[extras,fp8]", measure.WITHOUT, f"{measure.FP8}delayed", "feature.fp8.keep_inputs=false"),
}
RUNS = {
    f"{name}_{seed}": Run(preset, (*CUT, *overrides, f"schedule.seed={seed}"), words)
    for seeds, name, preset, overrides, words in (
        (SEEDS, "ours", "nam56r_native_dp", ("+overlay=fused",), ()),
        (SEEDS, "stock", "nam56r_native_dp", (), ("--stock",)),
        (SEEDS, "again", "nam56r_native_dp", ("+overlay=fused",), ()),
        *(
            (seeds, name, LANES[lane][0], (*measure.WHOLE, *FORMS[form], *LANES[lane][1], *more), ())
            for seeds, name, lane, form, more in (
                (SEEDS[:2], "bf16_native", "native", "bf16", ()),
                (SEEDS[:2], "fp8_native", "native", "fp8", ()),
                (SEEDS[:1], "delayed_native", "native", "delayed", ()),
                (SEEDS[:1], "bf16_native_again", "native", "bf16", ()),
                (SEEDS[:1], "bf16_author", "author", "bf16", ()),
                (SEEDS[:1], "fp8_author", "author", "fp8", ()),
                (SEEDS[:1], "rates_author", "author", "rates", ()),
                (SEEDS[:1], "delayed_author", "author", "delayed", ()),
                (SEEDS[:1], "bf16_author_again", "author", "bf16", ()),
                (SEEDS, "bf16_author_calm", "author", "bf16", CALM),
                (SEEDS[:1], "fp8_author_calm", "author", "fp8", CALM),
                (SEEDS, "rates_author_calm", "author", "rates", CALM),
                (SEEDS[:1], "bf16_author_calm_again", "author", "bf16", CALM),
            )
        ),
        (SEEDS[:2], "reused", "nam56r_fused", (measure.SPARSE13,), ()),
        (SEEDS[:2], "own", "nam56r_fused", (measure.SPARSE13, "model.blocks.dsa.full_every=1"), ()),
    )
    for seed in seeds
}


def train(name: str, count: int, data: str | None, limit: float) -> dict[str, Any]:
    """One run: `series` has each figure of its step lines by step, those of layers where they were measured."""
    run = RUNS[name]
    length = (f"schedule.train_steps={count}", f"schedule.decay_steps={count}")
    with tempfile.TemporaryDirectory() as folder:
        more = (*run.overrides, *length, *measure.built(data, Path(folder) / "data"))
        entry = measure.trial(name, run.preset, more, Path(folder), limit, run.words)
        log = Path(folder) / f"{name}.log"
        said = steps.read(log.read_text(errors="replace").splitlines() if log.exists() else ())
    kept = ("name", "preset", "overrides", "words", "wall_seconds", "device", "versions", "error")
    return {key: entry[key] for key in kept if key in entry} | {"series": series(said)}


def series(said: steps.Said) -> dict[str, dict[int, float]]:
    """Losses, gradient norms and what layers measure of themselves, by step."""
    found: dict[str, dict[int, float]] = {}
    for number, step in sorted(said.steps.items()):
        for figure, value in step.values.items():
            if figure == steps.NORM or figure.endswith("loss") or figure.startswith(steps.GAUGES):
                found.setdefault(figure, {})[number] = value
    return found


def smooth(values: Sequence[float], span: int = SPAN) -> list[float]:
    """The mean of each `span` values in a row."""
    sums = [0.0, *accumulate(values)]
    return [(after - before) / span for before, after in zip(sums, sums[span:], strict=False)]


def read(name: str) -> dict[str, dict[int, float]]:
    """Figures of a run by step; none of one that has not been made, or not to its end."""
    path = FOLDER / f"{name}.json"
    run = json.loads(path.read_text()) if path.exists() else {"error": "not run"}
    if "error" in run or len(run["series"].get(LOSS, {})) != STEPS:
        return {}
    return {figure: {int(n): v for n, v in of.items()} for figure, of in run["series"].items()}


def losses(name: str) -> list[float]:
    return list(read(name).get(LOSS, {}).values())


def program(seed: int) -> tuple[list[float], list[float], list[float]]:
    """Losses of ours, of Megatron's default stack, and of ours once more; `ours` and `again` are one command, so either is the first."""
    ours, again = sorted((losses(f"ours_{seed}"), losses(f"again_{seed}")), key=len, reverse=True)
    return ours, losses(f"stock_{seed}"), again


def apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """What is left of a difference when it is smoothed; nothing where a run is missing."""
    return smooth([a - b for a, b in zip(one, other, strict=True)]) if one and other else []


def table() -> Iterator[str]:
    """The last losses of each seed, and how far two runs are apart."""
    yield (
        "| seed | ours | Megatron's default stack | ours again | from Megatron's, median step | from ours again | from Megatron's,"
        " largest mean | from ours again |"
    )
    yield "|---" * 8 + "|"
    for seed in SEEDS:
        ours, *others = program(seed)
        last = [f"{statistics.fmean(run[-SPAN:]):.4f}" if run else "" for run in (ours, *others)]
        middle, most = [], []
        for run in others:
            both = bool(ours and run)
            middle.append(f"{statistics.median(map(abs, map(sub, ours, run))):.4f}" if both else "")
            most.append(f"{max(map(abs, apart(ours, run))):.4f}" if both else "")
        yield f"| {seed} | {' | '.join((*last, *middle, *most))} |"


# What a thousand steps in FP8 are compared with: title -> bf16's run, and those in FP8 by name.
NATIVE8 = {"FP8": "fp8_native", "FP8, delayed scaling": "delayed_native"}
AUTHOR8 = {"FP8": "fp8_author", "FP8, `mamba3_rates` in bf16": "rates_author", "FP8, delayed scaling": "delayed_author"}
CALM8 = {
    "bf16 again": "bf16_author_calm_again",
    "FP8": "fp8_author_calm",
    "FP8, `mamba3_rates` in bf16": "rates_author_calm",
}
PRECISIONS = {
    "native lane, 10 steps of warm-up": ("bf16_native", NATIVE8),
    "author stack, 10 steps": (
        "bf16_author",
        {"bf16, torch's GEMMs, cuDNN": "reused", "the same, each DSA layer's own top-k": "own"} | AUTHOR8,
    ),
    "author stack, 200 steps": ("bf16_author_calm", CALM8),
}


def precisions() -> Iterator[str]:
    """The last losses in bf16 and in FP8 of each seed, and how far each run is from bf16's of its seed."""
    yield (
        "| 13 layers | seed | run | mean of the last 50 losses | mean of the last 500, less bf16's | from bf16's, median step |"
        " largest mean of 50 steps | largest of the last 500 |"
    )
    yield "|---" * 8 + "|"
    half = STEPS // 2
    for title, (first, others) in PRECISIONS.items():
        for seed in SEEDS:
            bf16 = losses(f"{first}_{seed}")
            runs = {name: found for name, run in others.items() if bf16 and (found := losses(f"{run}_{seed}"))}
            if runs:
                yield f"| {title} | {seed} | bf16 | {statistics.fmean(bf16[-SPAN:]):.3f} | | | | |"
            for name, found in runs.items():
                less = [*map(sub, found, bf16)]
                means = [*map(abs, smooth(less))]
                figures = statistics.median(map(abs, less)), max(means), max(means[SPAN - 1 - half :])
                last = f"{statistics.fmean(found[-SPAN:]):.3f} | {statistics.fmean(less[-half:]):+.3f}"
                yield f"| | | {name} | {last} | " + " | ".join(f"{x:.3f}" for x in figures) + " |"


def plot() -> None:
    """docs/losses.png, docs/reuse.png and docs/fp8.png, of the runs that there are."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    def panels(*titles: tuple[str, str]) -> Any:
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for axis, (title, unit) in zip(axes, titles, strict=True):
            axis.set(xlabel="step", ylabel=unit, title=title)
            axis.grid(alpha=0.3)
        return figure, axes

    def curve(axis: Any, values: Sequence[float], label: str, **how: Any) -> None:
        if values:
            axis.plot(range(SPAN, SPAN + len(values)), values, label=label, **how)

    def finish(figure: Any, axes: Any, name: str) -> None:
        for axis in axes:
            axis.legend(fontsize=7)
        figure.savefig(DOCS / name, dpi=100)

    means = f"means of {SPAN} steps"
    figure, axes = panels((f"loss, {means}", "lm loss"), (f"ours less the other, {means}", "difference"))
    for seed, colour in zip(SEEDS, ("C0", "C1", "C2"), strict=True):
        ours, stock, again = program(seed)
        curve(axes[0], smooth(ours), f"ours, seed {seed}", color=colour)
        curve(axes[0], smooth(stock), f"Megatron's, seed {seed}", color=colour, linestyle=":")
        curve(axes[1], apart(ours, stock), f"Megatron's, seed {seed}", color=colour)
        curve(axes[1], apart(ours, again), f"ours again, seed {seed}", color=colour, linestyle=":")
    finish(figure, axes, "losses.png")

    figure, axes = panels((f"loss, {means}", "lm loss"), ("share of attention that a DSA layer keeps", "share"))
    for name, style in (("reused", "-"), ("own", ":")):
        for seed, colour in zip(SEEDS, ("C0", "C1", "C2"), strict=True):
            curve(axes[0], smooth(losses(f"{name}_{seed}")), f"{name}, seed {seed}", color=colour, linestyle=style)
            for figure_, values in read(f"{name}_{seed}").items():
                if figure_.startswith(KEPT):
                    layer = f"{name}, layer {figure_.removeprefix(KEPT).strip()}, seed {seed}"
                    axes[1].plot(list(values), list(values.values()), linestyle=style, label=layer)
    finish(figure, axes, "reuse.png")

    names = ["bf16", *dict.fromkeys(name for _, others in PRECISIONS.values() for name in others)]
    figure, axes = panels(
        (f"author stack, 10 steps of warm-up, {means}", "lm loss"),
        ("author stack, 200 steps; native lane, 10", "lm loss"),
    )
    drawn = (axes[0], "author stack, 10 steps"), (axes[1], "author stack, 200 steps"), (axes[1], next(iter(PRECISIONS)))
    for axis, title in drawn:
        first, others = PRECISIONS[title]
        style = ":" if title.startswith("native") else "-"
        for name, run in {"bf16": first, **others}.items():
            label = f"native, {name}" if style == ":" else name
            curve(axis, smooth(losses(f"{run}_{SEEDS[0]}")), label, color=f"C{names.index(name)}", linestyle=style)
    finish(figure, axes, "fp8.png")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    what = "\n".join(line for line in (__doc__ or "").splitlines() if line.startswith("    ") and "python" not in line)
    raw = argparse.RawDescriptionHelpFormatter
    one = commands.add_parser(
        "train", help="one run", epilog=f"NAME is one of these and a seed:\n{what}", formatter_class=raw
    )
    one.add_argument("name", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    one.add_argument("--out", type=Path, default=FOLDER, help="folder of the record (default: benchmarks/losses)")
    one.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    one.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s; plots are of whole runs)")
    one.add_argument("--limit", type=float, default=540, help="seconds, by which it is ended (default: 540)")
    commands.add_parser("plot", help="docs/losses.png, docs/reuse.png and docs/fp8.png, of all runs")
    options = parser.parse_args(words)
    if options.command == "plot":
        plot()
        return 0
    chosen = RUNS[options.name]
    warm_up = measure.lowered(chosen.preset, chosen.overrides).plan.recipe.optim.warmup_steps
    if options.steps <= warm_up:
        one.error(f"--steps {options.steps}: {options.name} has {warm_up} steps of warm-up; give it more than those")
    options.out.mkdir(parents=True, exist_ok=True)
    run = train(options.name, options.steps, options.data, options.limit)
    (options.out / f"{options.name}.json").write_text(json.dumps(run) + "\n")
    said = list(run["series"].get(LOSS, {}).values())
    print(f"{options.name}: {run.get('error') or f'{len(said)} steps, loss {said[0]:.3f} to {said[-1]:.3f}'}")
    return int("error" in run)


if __name__ == "__main__":
    sys.exit(main())
