"""The same plan trained twice on this host: by Megatron's pretrain and by Megatron-Bridge's. Losses and step times side by side.

    python benchmarks/nemo.py --out nemo.json --logs DIR [--data FOLDER] [--limit SECONDS] [NAME ...]

Both get one plan.json, so the seed, the data and every field are the same; only the training program differs. The baseline is Megatron's
run in the same sitting; a second one of Megatron's says how far apart equal runs are, since kernels with atomics make them differ. Steps
up to WARM are left out of the times: kernels are tuned in them. Of what RESUMED names Bridge trains the same steps twice: at once, and in
two commands, the second from the first one's checkpoint; in deterministic mode, in which they have to be equal. Of what LOOPED names each
of benchmarks/loops.py trains the same steps; in that mode, too. Nemotron's is left out, and said so, without its source.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import loops
from measure import AUTHOR13, CUT, EAGER, MLA, built, dataset, ranks

from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.nemo import doctor
from nam_megatron.recipe import load

MEGATRON, BRIDGE, AGAIN = "megatron", "bridge", "megatron again"
TRAINERS = {MEGATRON: "nam_megatron.train", BRIDGE: "nam_megatron.nemo.train", AGAIN: "nam_megatron.train"}
STEPS, WARM = 20, 5
LOGGED = (f"schedule.train_steps={STEPS}", "schedule.decay_steps=40", "schedule.log_interval=1")
ONE = ("cluster=h200_1", *CUT, *LOGGED)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoke": ("nam56r_smoke", LOGGED),
    "gqa13": ("nam56r_native_dp", ONE),
    "mla13_mtp1": ("nam56r", (*ONE, *MLA, "feature.mtp.depths=1", "schedule.micro_batch_size=2")),
    "author13": ("nam56r_fused", (*AUTHOR13, *LOGGED)),
    "fp8_13": ("nam56r_native_dp_fp8", (*ONE, *EAGER, "schedule.micro_batch_size=4")),
}

HALF = 6
SHORT = ("schedule.global_batch_size=4", f"schedule.train_steps={2 * HALF}", "precision.deterministic=true")
RESUMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoke_resumed": ("nam56r_smoke", (*LOGGED, *SHORT, "model.vocab_size=65536")),
    "author13_resumed": ("nam56r_fused", (*AUTHOR13, *LOGGED, *SHORT)),
}

LOOPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoke_loops": ("nam56r_smoke", (*LOGGED, *SHORT)),
    "author13_loops": ("nam56r_fused", (*AUTHOR13, *LOGGED, *SHORT)),
    "native13_loops": ("nam56r_native_dp_fused", (*ONE, *EAGER, *LOGGED, *SHORT)),
}

FIGURES = {
    "step": re.compile(r"\biteration\s+(\d+)/"),
    "ms": re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)"),
    "loss": re.compile(r"\blm loss: (\S+)"),
    "grad_norm": re.compile(r"\bgrad norm: (\S+)"),
}
PEAK = re.compile(r'"peak_allocated": (\d+)')


def measure(name: str, folder: Path, limit: float, data: str | None) -> dict[str, Any]:
    """One case under both trainers, and once more under the first."""
    preset, overrides = CASES[name]
    lowering = translate(load(preset, (*overrides, *built(data, folder / f"{name}.data"))))
    runs = {trainer: run(name, trainer, lowering, folder, limit) for trainer in TRAINERS}
    entry = {"name": name, "preset": preset, "overrides": list(overrides), "data": data and Path(data).name, **runs}
    losses = {trainer: [step["loss"] for step in runs[trainer]["steps"]] for trainer in TRAINERS}
    if all(len(side) == STEPS for side in losses.values()):
        # Megatron's line of step 2 is the mean of the first two.
        losses[BRIDGE][1] = (losses[BRIDGE][0] + losses[BRIDGE][1]) / 2
        entry["loss_apart"] = {trainer: apart(losses[MEGATRON], losses[trainer]) for trainer in (BRIDGE, AGAIN)}
    return entry


def resume(name: str, folder: Path, limit: float, data: str | None) -> dict[str, Any]:
    """One case by Bridge: the steps of a whole run, and those of a run that was ended halfway and begun again."""
    preset, overrides = RESUMED[name]
    overrides = (*overrides, *built(data, folder / f"{name}.data"))
    save = folder / f"{name}.checkpoint"
    begun = (f"schedule.save={save}", f"schedule.save_interval={HALF}", f"schedule.stop_every={HALF}")
    parts = {"whole": (), "begun": begun, "resumed": (f"schedule.load={save}",)}
    runs = {
        part: run(f"{name}_{part}", BRIDGE, translate(load(preset, (*overrides, *words))), folder, limit)
        for part, words in parts.items()
    }
    shutil.rmtree(save, ignore_errors=True)
    entry = {
        "name": name,
        "preset": preset,
        "overrides": list(RESUMED[name][1]),
        "data": data and Path(data).name,
        **runs,
    }
    losses = {
        part: {step["step"]: (step["loss"], step["grad_norm"]) for step in of["steps"]} for part, of in runs.items()
    }
    if len(losses["whole"]) == 2 * HALF:
        entry["equal"] = losses["whole"] == losses["begun"] | losses["resumed"]
    return entry


def loop(name: str, folder: Path, limit: float, data: str | None) -> dict[str, Any]:
    """One case by every loop that is here."""
    preset, overrides = LOOPED[name]
    last = {word.partition("=")[0]: word for word in overrides}  # a command takes a key once
    overrides = (*last.values(), *built(data, folder / f"{name}.data"))
    lowering = translate(load(preset, overrides))
    entry = {"name": name, "preset": preset, "overrides": list(LOOPED[name][1]), "data": data and Path(data).name}
    steps = []
    for one in loops.LOOPS:
        if one == "nemotron" and "NAM_NEMOTRON" not in os.environ:
            entry[one] = {"exit": "NAM_NEMOTRON names no source of it"}
            continue
        home = folder / f"{name}.{one}"
        home.mkdir()
        command = [sys.executable, loops.__file__, one, preset, str(home), *overrides]
        entry[one] = trained(command, lowering, folder / f"{name}.{one}.log", limit)
        steps.append([(step["step"], step["loss"], step["grad_norm"]) for step in entry[one]["steps"]])
    entry["equal"] = len(steps[0]) == 2 * HALF and all(found == steps[0] for found in steps)
    return entry


def apart(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Differences of the steps' losses."""
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {"first": differences[0], "median": median(differences), "worst": max(differences), "last": differences[-1]}


def run(name: str, trainer: str, lowering: Lowering, folder: Path, limit: float) -> dict[str, Any]:
    """Steps as the log has them, the median step and tokens per second and GPU after WARM, the peak; or an error."""
    plan = folder / f"{name}.plan.json"
    plan.write_text(argv.plan_json(lowering))
    command = [sys.executable, "-m", TRAINERS[trainer], "--nam-plan", str(plan), *argv.words(lowering)]
    return trained(command, lowering, folder / f"{name}.{trainer.replace(' ', '_')}.log", limit)


def trained(command: Sequence[str], lowering: Lowering, log: Path, limit: float) -> dict[str, Any]:
    """The same of any command that trains."""
    r = lowering.plan.recipe
    env = dict(os.environ)
    for e in lowering.env:
        env.pop(e.name, None)
        if e.value is not None:
            env[e.name] = e.value
    begin = time.monotonic()
    code = ranks(command, env, r.world_size, log, limit)
    found: dict[str, Any] = {"exit": code, "wall_seconds": round(time.monotonic() - begin, 1), "steps": []}
    for line in log.read_text(errors="replace").splitlines():
        hits = {key: pattern.search(line) for key, pattern in FIGURES.items()}
        if hits["step"] and hits["loss"]:
            step = {key: float(hit[1]) for key, hit in hits.items() if hit}
            found["steps"] += [step] * (step not in found["steps"])  # NeMo-Run prints a job's lines twice
        if peak := PEAK.search(line):
            found["peak_allocated_gb"] = round(max(found.get("peak_allocated_gb", 0), int(peak[1]) / 1e9), 3)
    if times := [step["ms"] for step in found["steps"] if step["step"] > WARM]:
        tokens = r.schedule.global_batch_size * r.model.seq_length
        found["median_ms"] = median(times)
        found["tokens_per_s_per_gpu"] = round(tokens / median(times) * 1000 / r.world_size)
    if code != 0:
        said = [x for x in log.read_text(errors="replace").splitlines() if "Error" in x or x.startswith("error:")]
        found["error"] = said[-1][:400] if said else "see the log"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--data", type=dataset, help="a built dataset; mock data by default")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one training")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*CASES, *RESUMED, *LOOPED]))
    args = parser.parse_args()
    if unknown := set(args.names) - {*CASES, *RESUMED, *LOOPED}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    args.logs.mkdir(parents=True, exist_ok=True)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    host = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.splitlines()
    findings = [f.message for f in doctor.findings()]
    made = {
        "steps": STEPS,
        "warm": WARM,
        "gpus": host,
        "versions": doctor.recorded(),
        "findings": findings,
        "cases": [],
    }
    failed = False
    for name in args.names or CASES:
        kind = measure if name in CASES else resume if name in RESUMED else loop
        entry = kind(name, args.logs, args.limit, args.data)
        made["cases"].append(entry)
        args.out.write_text(json.dumps(made, indent=1) + "\n")
        if kind is not measure:
            failed |= not entry.get("equal", False)
            print(
                name,
                {part: of.get("error", of["exit"]) for part, of in entry.items() if isinstance(of, dict)},
                entry.get("equal"),
            )
            continue
        failed |= "loss_apart" not in entry
        print(name, entry.get("loss_apart", "no comparison"), flush=True)
        for trainer in TRAINERS:
            of = entry[trainer]
            print(
                f"  {trainer}: {of.get('median_ms')} ms, {of.get('tokens_per_s_per_gpu')} tok/s/GPU",
                of.get("error", ""),
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
