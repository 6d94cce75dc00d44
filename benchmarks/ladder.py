"""The bring-up ladder: each parallel layout and feature for a few steps with a checkpoint, on the fewest GPUs that show it.

    python benchmarks/ladder.py --out ladder.json --gpus N [--limit SECONDS] [--data FOLDER] [--scratch FOLDER] [RUNG ...]

Each rung is an overlay of conf/overlay on `nam56r_native_dp` cut to 6 layers, trained for three steps and a checkpoint, and then, in a new
process group, from that checkpoint for three more. Rungs that need more GPUs than `--gpus` are left out and said; smaller ones run
beside each other. The file is written anew after each rung; rungs that stand there without an error are not run again.
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

from nam_megatron.runtime import checkpoint

PRESET = "nam56r_native_dp"
CUT = (
    "model.pattern=AEMEAE",
    "model.depth=6",
    "schedule.micro_batch_size=2",
    "schedule.global_batch_size=8",
    "optim.warmup_steps=2",
)
STEPS = ("schedule.train_steps=6", "schedule.decay_steps=8", "schedule.save_interval=3", "schedule.stop_every=3")
# name, of a file in conf/overlay -> GPUs
RUNGS = {"tp_sp": 2, "ep": 2, "tp_sp_ep": 2, "pp_tp_sp": 4, "fsdp_ep": 2, "graphs": 1, "muon": 2}
# Capture comes after the warm-up, and a half has three steps.
SOON = {"graphs": ("feature.cuda_graphs.warmup_steps=1",)}


def overrides(name: str) -> tuple[str, ...]:
    return (f"cluster=h200_{RUNGS[name]}", *CUT, *STEPS, f"+overlay={name}", *SOON.get(name, ()))


def run(name: str, folder: Path, limit: float, gpus: Sequence[int], data: str | None) -> dict[str, Any]:
    """One rung on some GPUs: what each half was, and what was wrong with the checkpoint between them."""
    saved = folder / f"{name}.checkpoint"
    whole = (*overrides(name), *measure.built(data, folder / f"{name}.data"), f"schedule.save={saved}")
    entry: dict[str, Any] = {"name": name, "gpus": RUNGS[name], "overrides": measure.told(whole[:-1])}
    end = time.monotonic() + limit
    for half, load in (("first", ()), ("resumed", (f"schedule.load={saved}",))):
        left = max(1.0, end - time.monotonic())
        trial = measure.trial(f"{name}.{half}", PRESET, (*whole, *load), folder, left, (), gpus)
        entry[half] = {
            k: trial[k] for k in ("wall_seconds", "error", "median_step_seconds", "peak_bytes", "steps") if k in trial
        }
        entry |= {k: trial[k] for k in ("device", "versions") if k in trial}
        if "error" in trial:
            entry["error"] = f"{half}: {trial['error']}"
            break
        entry["checkpoint"] = {
            "bytes": sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()),
            "wrong": [p.message for p in checkpoint.damage(saved)],
        }
    shutil.rmtree(saved, ignore_errors=True)
    return entry


def line(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['name']}: {entry['error']}"
    steps = entry["first"]["steps"] + entry["resumed"]["steps"]
    losses = ", ".join(f"{s['losses']['lm loss']:.4f}" for s in steps)
    norms = ", ".join(f"{s['grad_norm']:.3f}" for s in steps)
    peak = max(entry[half]["peak_bytes"]["steady"]["allocated"] for half in ("first", "resumed"))
    saved = entry["checkpoint"]
    said = "; ".join(saved["wrong"]) or f"{saved['bytes'] / 1e9:.1f} GB"
    last = steps[-1]["seconds"] * 1e3
    return f"{entry['name']}: losses {losses}; norms {norms}; checkpoint {said}; last step {last:.0f} ms; peak {peak / 1e9:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--limit", type=int, default=540, help="seconds for all rungs together")
    parser.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    parser.add_argument("--scratch", type=Path, help="where checkpoints go until they are looked at")
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help=f"of {', '.join(RUNGS)}; all by default")
    options = parser.parse_args()
    if unknown := [n for n in options.rungs if n not in RUNGS]:
        parser.error(f"no rung {', '.join(unknown)}")
    entries = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {e["name"] for e in entries if "error" not in e}
    wanted = [n for n in options.rungs or RUNGS if n not in done]
    for name in [n for n in wanted if RUNGS[n] > options.gpus]:
        print(f"{name}: needs {RUNGS[name]} GPUs", flush=True)
        wanted.remove(name)
    wanted.sort(key=lambda n: -RUNGS[n])  # the small ones fill what is left
    end, free, changed = time.monotonic() + options.limit, set(range(options.gpus)), threading.Condition()

    def work(name: str, gpus: Sequence[int], folder: Path) -> None:
        entry = run(name, folder, end - time.monotonic(), gpus, options.data)
        with changed:
            entries[:] = [e for e in entries if e["name"] != name] + [entry]
            options.out.write_text(json.dumps(entries, indent=1) + "\n")
            print(line(entry), flush=True)
            if "error" in entry:
                half = "resumed" if "resumed" in entry else "first"
                log = (folder / f"{name}.{half}.log").read_text(errors="replace")
                options.out.with_name(f"{name}.log").write_text(log[-100_000:])
            free.update(gpus)
            changed.notify_all()

    threads = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for name in wanted:
            world = RUNGS[name]
            with changed:
                changed.wait_for(lambda world=world: len(free) >= world)
                if end - time.monotonic() < 60:
                    print(f"{name}: no time left", flush=True)
                    continue
                gpus = sorted(free)[:world]
                free.difference_update(gpus)
            threads.append(threading.Thread(target=work, args=(name, gpus, Path(folder))))
            threads[-1].start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
