"""Our figures among the scalars that Megatron writes, and each step line for MLflow, which it has no writer for (torch side)."""

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core._rank_utils import safe_get_rank, safe_get_world_size
from megatron.training import global_vars

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, unwritable
from nam_megatron.packages import adding
from nam_megatron.runtime import rate
from nam_megatron.runtime.gauges import GAUGES

STEP = re.compile(r"\biteration +(\d+)/ *\d+ \|")
FIELD = re.compile(r"\| ([a-zA-Z][^|:]*): +([-+.\deE]+) (?=\|)")
GIB = 2**30
# A key of `feature.tracking` and what it needs; without it Megatron prints a warning and goes on without (TensorBoard), or breaks.
PACKAGES = {"tensorboard": "tensorboard", "wandb_project": "wandb", "mlflow": "mlflow"}


def objections(plan: Plan, *, dry: bool = False) -> Iterator[Problem]:
    """What is asked for and not installed here, or where the rank that writes it may not. dry: nothing is written."""
    feature = plan.recipe.feature.tracking
    if feature is None:
        return
    writes = not dry and safe_get_rank() == safe_get_world_size() - 1
    for key in ("tensorboard", "wandb_dir"):
        if writes and (folder := getattr(feature, key)):
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as err:
                yield unwritable(Path(folder), err, f"feature.tracking.{key}")
    for key, package in PACKAGES.items():
        if getattr(feature, key) and importlib.util.find_spec(package) is None:
            hint = f"{adding('tracking')} on the training host, or null the key"
            message = f"`{package}` is not installed: nothing would be written"
            yield Problem(message, key=f"feature.tracking.{key}", hint=hint)
        elif key == "mlflow" and writes and feature.mlflow:
            try:
                import mlflow

                mlflow.set_tracking_uri(feature.mlflow)
                mlflow.set_experiment(feature.mlflow_experiment)
            except Exception as err:
                # Of MLflow, or of what it stores with; behind the first step it would be a traceback.
                yield Problem(f"MLflow does not open its store: {err}", key="feature.tracking.mlflow")


def tracker(plan: Plan) -> Callable[[str], None] | None:
    """What is to be called with every step line; None where nobody looks. Opens MLflow's run, on the last rank, at the first line."""
    feature = plan.recipe.feature.tracking
    return Tracker(plan) if feature is not None and feature.on else None


class Tracker:
    """Scalars of a step: `model TFLOP/s/GPU`, `MFU` (of the device's peak), `memory/...` in GiB, of the last rank, as Megatron's are,
    and what layers measured of themselves."""

    def __init__(self, plan: Plan):
        self._plan, self._run = plan, None

    def __call__(self, line: str) -> None:
        step = STEP.search(line)
        if not step or not last_rank():
            return
        said = {name: float(value) for name, value in FIELD.findall(line)}
        gpu = self._plan.recipe.cluster.processor == "gpu"
        ours = {name: said[name] for name in (*GAUGES.names, rate.NAME) if name in said}
        ours |= memory() if gpu else {}
        if gpu and rate.NAME in said:
            ours["MFU"] = said[rate.NAME] / self._plan.recipe.device.bf16_tflops
        number = int(step[1])
        if writer := global_vars.get_tensorboard_writer():
            for name, value in ours.items():
                writer.add_scalar(name, value, number)
        if wandb := global_vars.get_wandb_writer():
            wandb.log(ours, number)
        self._mlflow(said | ours, number)

    def _mlflow(self, figures: dict[str, float], step: int) -> None:
        feature = self._plan.recipe.feature.tracking
        if feature is None or not feature.mlflow:
            return
        import mlflow

        if self._run is None:
            self._run = mlflow.start_run(run_name=self._plan.recipe.preset.name)
        # MLflow takes no brackets in a name.
        mlflow.log_metrics({re.sub(r"[^\w ./-]", "", name): value for name, value in figures.items()}, step=step)


def last_rank() -> bool:
    d = torch.distributed
    return not d.is_initialized() or d.get_rank() == d.get_world_size() - 1


def memory() -> dict[str, float]:
    peaks = {"peak allocated": torch.cuda.max_memory_allocated(), "peak reserved": torch.cuda.max_memory_reserved()}
    return {f"memory/{name} GiB": size / GIB for name, size in peaks.items()}
