"""The throughput ladder: what each rung changes in the speed of one GPU, against a baseline of the same sitting on the same GPU.

    python benchmarks/throughput.py --out throughput.json [--gpus N] [--limit SECONDS] [--data FOLDER] [RUNG ...]

A rung is a set of recipe overrides of `nam56r_native_dp` cut to 13 layers: 65,536 tokens a step unless it says otherwise. `stock` is
Megatron's own stack on the baseline's arguments. With several GPUs, rungs run beside each other, each GPU with its own baseline. The
file gets one more sitting, written anew after each rung. A rung that fails stands there with its error.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import kernels
import measure
from measure import ALLGATHER, COMPILED, FUSED, GBS64, GRAPHS, MBS8, MOE, OURS, PERMUTE, ROUTER, WGRAD

from nam_megatron.budget.cost import cost

PRESET = "nam56r_native_dp"
STEPS = 10
CUT = ("cluster=h200_1", "model.depth=13", "schedule.global_batch_size=16", "optim.warmup_steps=2")
SHARED, LOCAL = f"{MOE}shared_overlap=true", f"{MOE}dispatcher=local"
WEIGHED, NORMS = f"{MOE}fused_weighted_squared_relu=true", "precision.norm_kernels=cudnn"
STRIDED = "execution.mamba2.strided=true"
ALL = (*FUSED, ALLGATHER)
OVERLAY = "+overlay=fused"
HEADS = "model.blocks.mamba2.heads=64"
FP8 = ("precision=fp8_tensorwise", HEADS)
BASELINE, STOCK = "baseline", "stock"
# name -> (overrides, words for peak_memory.py); `TRACE` stands for a trace's path.
TRACE = "--profile"
RUNGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    BASELINE: ((), (TRACE,)),
    STOCK: ((), ("--stock",)),
    "grad_accumulation": ((WGRAD,), ()),
    "cross_entropy": ((COMPILED,), ()),
    "our_cross_entropy": ((OURS,), ()),
    "permute": ((PERMUTE,), ()),
    "router": ((ROUTER,), ()),
    "fusions": ((WGRAD, COMPILED, PERMUTE, ROUTER), (TRACE,)),
    "fusions_our_cross_entropy": (FUSED, (TRACE,)),
    "all": (ALL, (TRACE,)),
    "all_weighed": ((*ALL, WEIGHED), (TRACE,)),
    "all_norms": ((*ALL, NORMS), (TRACE,)),
    "all_local": ((*FUSED, LOCAL), (TRACE,)),
    "all_strided": ((*ALL, STRIDED), (TRACE,)),
    "overlay": ((OVERLAY,), (TRACE,)),
    "overlay_mbs8": ((OVERLAY, MBS8), ()),
    "overlay_gbs64": ((OVERLAY, MBS8, GBS64), ()),
    "all_mbs8": ((*ALL, MBS8), ()),
    "all_gbs64": ((*ALL, MBS8, GBS64), ()),
    "graphs": (GRAPHS, ()),
    "fusions_graphs": ((WGRAD, COMPILED, PERMUTE, ROUTER, *GRAPHS), (TRACE,)),
    "fusions_mbs8": ((WGRAD, COMPILED, PERMUTE, ROUTER, MBS8), ()),
    "fusions_graphs_mbs8": ((WGRAD, COMPILED, PERMUTE, ROUTER, MBS8, *GRAPHS), ()),
    "fusions_gbs64": ((WGRAD, COMPILED, PERMUTE, ROUTER, GBS64), ()),
    "mbs2": (("schedule.micro_batch_size=2",), ()),
    "mbs8": ((MBS8,), ()),
    "allgather": ((ALLGATHER,), ()),
    "shared_overlap": ((SHARED,), ()),
    "no_overlap": (
        ("feature.distributed_optimizer.overlap_grad_reduce=false", "feature.distributed_optimizer.overlap_param_gather=false"),
        (),
    ),
    "plain_optimizer": (tuple(f"feature.distributed_optimizer.{k}=false" for k in ("enabled", "overlap_param_gather")), ()),
    "bf16_gradients": (("precision.grad_reduce=bf16",), ()),
    "muon": (("optim=muon",), ()),
    "heads64": ((HEADS,), ()),
    "fp8_tensorwise": (FP8, (TRACE,)),
    "fp8_blockwise": ((*FP8, "feature.fp8.recipe=blockwise"), ()),
    "fp8_delayed": ((*FP8, "feature.fp8.recipe=delayed"), ()),
    "fp8_fusions": ((*FP8, WGRAD, COMPILED, PERMUTE, ROUTER), ()),
    "fp8_fusions_graphs_mbs8": ((*FP8, WGRAD, COMPILED, PERMUTE, ROUTER, MBS8, *GRAPHS), ()),
}  # fmt: skip
# Worth a device's minutes first.
FIRST = (
    STOCK,
    "grad_accumulation",
    "cross_entropy",
    "permute",
    "router",
    "graphs",
    "fusions",
    "fusions_graphs",
    "fusions_graphs_mbs8",
)


def run(name: str, folder: Path, limit: float, gpu: int, data: str | None) -> dict[str, Any]:
    """One rung on one GPU: its trial, with tokens a second and the share of the peak on paper that the model's operations reach."""
    overrides, words = RUNGS[name]
    words = tuple(x for w in words for x in ((w, str(folder / f"{name}.{gpu}.trace.json")) if w == TRACE else (w,)))
    steps = (f"schedule.train_steps={STEPS}", f"schedule.decay_steps={2 * STEPS}")
    steps = (*steps, *measure.built(data, folder / f"{name}.{gpu}.data"))
    entry = measure.trial(f"{name}.{gpu}", PRESET, (*CUT, *steps, *overrides), folder, limit, words, [gpu])
    return rated(entry | {"name": name, "gpu": gpu})


def rated(entry: dict[str, Any]) -> dict[str, Any]:
    """A trial of one GPU with its rate; without what differs between any two."""
    if "error" not in entry:
        plan = measure.lowered(entry["preset"], entry["overrides"]).plan
        tokens = plan.recipe.schedule.global_batch_size * plan.recipe.model.seq_length
        entry["tokens_per_second"] = round(tokens / entry["median_step_seconds"], 1)
        entry["utilisation"] = round(cost(plan).utilisation(entry["tokens_per_second"]), 4)
        for key in ("ranks", "plan_sha256"):
            entry.pop(key)
    return entry


def line(entry: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    if "error" in entry:
        return f"{entry['name']}: {entry['error']} ({entry['wall_seconds']} s)"
    rate, peak = entry["tokens_per_second"], entry["peak_bytes"]["steady"]["allocated"]
    gain = f", {rate / baseline['tokens_per_second'] - 1:+.1%}" if baseline and "error" not in baseline else ""
    speed = f"{entry['median_step_seconds'] * 1e3:.0f} ms, {rate / 1e3:.2f}k tokens/s{gain}, {entry['utilisation']:.1%} of the peak"
    return f"{entry['name']}: {speed}, {peak / 1e9:.1f} GB (gpu {entry['gpu']}, {entry['wall_seconds']:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=int, default=540, help="seconds for all rungs together")
    parser.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    parser.add_argument(
        "rungs", nargs="*", metavar="RUNG", help=f"of {', '.join(RUNGS)}; by default {', '.join(FIRST)}"
    )
    options = parser.parse_args()
    if unknown := [n for n in options.rungs if n not in RUNGS]:
        parser.error(f"no rung {', '.join(unknown)}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and options.gpus > visible.count(",") + 1:
        parser.error(f"--gpus {options.gpus}, and CUDA_VISIBLE_DEVICES is `{visible}`")
    sittings = json.loads(options.out.read_text()) if options.out.exists() else []
    sitting: dict[str, Any] = {"tokens": "mock" if not options.data else options.data, "rungs": []}
    sittings.append(sitting)
    queue: Queue[str] = Queue()
    for name in options.rungs or FIRST:
        if name != BASELINE:
            queue.put(name)
    end, lock = time.monotonic() + options.limit, threading.Lock()

    def keep(entry: dict[str, Any], baseline: dict[str, Any] | None) -> None:
        with lock:
            sitting["rungs"].append(entry)
            options.out.write_text(json.dumps(sittings, indent=1) + "\n")
            print(line(entry, baseline), flush=True)
            if "kinds" in (entry.get("kernels") or ()):
                print(kernels.text(entry["kernels"]), end="", flush=True)

    def work(gpu: int, folder: Path) -> None:
        baseline = run(BASELINE, folder, end - time.monotonic(), gpu, options.data)
        keep(baseline, None)
        while (left := end - time.monotonic()) > 45:
            try:
                name = queue.get_nowait()
            except Empty:
                return
            entry = run(name, folder, left, gpu, options.data)
            keep(entry, baseline)
            if "error" in entry:
                log = (folder / f"{name}.{gpu}.log").read_text(errors="replace")
                options.out.with_name(f"{name}.log").write_text(log[-100_000:])

    with tempfile.TemporaryDirectory() as name:
        threads = [threading.Thread(target=work, args=(gpu, Path(name))) for gpu in range(options.gpus)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in iter(lambda: queue.get_nowait() if not queue.empty() else None, None):
        print(f"{name}: no time left", flush=True)


if __name__ == "__main__":
    main()
