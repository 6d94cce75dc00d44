"""The numbers of each step line and the checkpoints of a run, as events (torch side).

    {"event": "step", "step": 12, "of": 100, "first": 11, "ms": 845.1, "loss": 6.93, "grad_norm": 1.23, "lr": 3e-4, "tokens": 196608,
     "loss_scale": 1.0, "skipped": 0, "nan": 0, "tflops": 301.2, "memory": {"allocated": ..., ...}, "gauges": {"M2RNN gain 12": 1.1}}

`first` to `step` are what the line is about, each step in one line: ms is their mean, loss that of those that were not skipped, skipped
and nan how many of them were. The rest is of `step`: tokens since the run began, memory of the last rank in bytes, tflops by Megatron's
count. Where Megatron logs, so at a process's first step and at each `log_interval`-th; nothing waits for the device elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nam_megatron.events import RECORD
from nam_megatron.runtime import checkpoint
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.readings import memory


class Line:
    """What the next line will be about. To be given every step on every rank; the last one, which has the loss, keeps it."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._nan: Any = 0
        self._skipped = self._steps = 0

    def add(self, losses: Mapping[str, torch.Tensor], skipped: bool) -> None:
        self._steps, self._skipped = self._steps + 1, self._skipped + bool(skipped)
        if "lm loss" in losses:
            loss = losses["lm loss"].detach().float().sum()
            self._nan = self._nan + (~loss.isfinite()).int()
            self._sum = self._sum if skipped else self._sum + loss

    def say(self, step: int, seconds: float, operations: float, **more: Any) -> None:
        """The line, which is over then. seconds: of all its steps; operations: of one step on all ranks, by Megatron's count."""
        if RECORD.on and last_rank():
            trained, each = self._steps - self._skipped, seconds / self._steps
            RECORD.say(
                "step", step=step, first=step - self._steps + 1, ms=1e3 * each, loss=float(self._sum) / trained if trained else None,
                skipped=self._skipped, nan=int(self._nan), memory=memory(), gauges=GAUGES.told(step),
                tflops=operations / each / 1e12 / torch.distributed.get_world_size() if each else None, **more,
            )  # fmt: skip
        self._sum, self._nan, self._skipped, self._steps = 0.0, 0, 0, 0


def last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def loaded(step: int, *folders: str | None) -> None:
    """The model is there; folders: that it may have begun with, the first that there is. Of weights alone the step is 0, and of
    random ones, which have no hash: what a run began with is told by its first process, and not by one that is started again."""
    if not torch.distributed.get_rank():
        judged = (checkpoint.JUDGED.get(Path(name)) for name in folders if name)
        RECORD.say("loaded", step=step, sha256=next((sums for _, sums in filter(None, judged)), None))


def number(value: Any) -> float | None:
    """Of what Megatron has as a number, as a tensor of one, or not at all."""
    return None if value is None else float(value)


def norm(value: Any, clip: float) -> float | None:
    """Of the gradient, if it was measured: where nothing is clipped some optimizers give 0 for it (core/optimizer/optimizer.py of 0.19.2,
    `MixedPrecisionOptimizer.step`)."""
    return number(value if value or clip else None)
