"""Our stack of layers against Megatron's default one: same arguments, seed and data, step by step.

    python benchmarks/stock.py --out stock.json [--steps 50] [--data FOLDER] [--gpus N] [--limit SECONDS] [OVERRIDE ...]

Three trials of `nam56r_native_dp` cut to 13 layers on one GPU: ours, Megatron's (benchmarks/peak_memory.py --stock), and ours again,
whose difference from the first is what kernels with atomics make of equal runs. With several GPUs the trials run beside each other.
Exit code 1: a trial failed, or ours was slower than Megatron's by more than 1 %.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure

PRESET = "nam56r_native_dp"
CUT = ("cluster=h200_1", "model.depth=13", "schedule.global_batch_size=16")
TRIALS = {"ours": (), "stock": ("--stock",), "again": ()}


def compare(trials: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Losses and gradient norms side by side, and the largest differences from `ours`."""
    found: dict[str, Any] = {}
    for what, read in (("lm loss", lambda s: s["losses"]["lm loss"]), ("grad norm", lambda s: s["grad_norm"])):
        columns = {name: [read(step) for step in trial["steps"]] for name, trial in trials.items()}
        found[what] = columns | {
            f"largest difference, {name}": max(abs(a - b) for a, b in zip(columns["ours"], columns[name], strict=True))
            for name in ("stock", "again")
        }
    found["median_step_seconds"] = {name: trial["median_step_seconds"] for name, trial in trials.items()}
    found["steady_allocated"] = {name: trial["peak_bytes"]["steady"]["allocated"] for name, trial in trials.items()}
    return found


def text(found: dict[str, Any]) -> str:
    losses = found["lm loss"]
    rows = [f"{'step':>4}  {'ours':>10}  {'stock':>10}  {'difference':>10}"]
    for step, (ours, stock) in enumerate(zip(losses["ours"], losses["stock"], strict=True), 1):
        rows.append(f"{step:>4}  {ours:>10.6f}  {stock:>10.6f}  {ours - stock:>10.2e}")
    for what in ("lm loss", "grad norm"):
        stock, again = (found[what][f"largest difference, {name}"] for name in ("stock", "again"))
        rows.append(f"{what}: largest difference {stock:.3e} from stock, {again:.3e} between equal runs of ours")
    for name in TRIALS:
        seconds, peak = found["median_step_seconds"][name], found["steady_allocated"][name]
        rows.append(f"{name}: {seconds * 1e3:.1f} ms a step, {peak / 1e9:.2f} GB")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=int, default=540, help="seconds for all trials together")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    options = parser.parse_args()
    overrides = [*CUT, f"schedule.train_steps={options.steps}", f"schedule.decay_steps={options.steps}"]
    overrides += options.overrides
    end = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(options.gpus, len(TRIALS))) as pool:

        def run(number: int, name: str) -> dict[str, Any]:
            gpu, left = number % options.gpus, max(1.0, end - time.monotonic())
            data = measure.built(options.data, Path(folder) / f"{name}.data")
            return measure.trial(name, PRESET, [*overrides, *data], Path(folder), left, TRIALS[name], [gpu])

        trials = dict(zip(TRIALS, pool.map(run, range(len(TRIALS)), TRIALS), strict=True))
        for name, trial in trials.items():
            log = (Path(folder) / f"{name}.log").read_text(errors="replace") if "error" in trial else ""
            if log:
                print(f"{name}: {trial['error']}\n{log[-3000:]}", flush=True)
    document: dict[str, Any] = {"trials": trials}
    failed = any("error" in trial for trial in trials.values())
    if not failed:
        document["compared"] = compare(trials)
        print(text(document["compared"]), end="")
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    if failed:
        return 1
    ours, stock = (trials[name]["median_step_seconds"] for name in ("ours", "stock"))
    return int(ours > 1.01 * stock)


if __name__ == "__main__":
    sys.exit(main())
