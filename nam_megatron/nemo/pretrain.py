"""What Bridge's training loop lacks of `nam_megatron.runtime.pretrain`: the first step's check, and lines of the log (torch side).

Made for megatron-bridge 0.6.2.
"""

import logging
from collections.abc import Iterator
from datetime import datetime
from functools import partial

import torch
from megatron.bridge.training import checkpointing, gpt_step
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils import train_utils
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.core.utils import unwrap_model

from nam_megatron.errors import Refused
from nam_megatron.nemo.container import NamContainer, stack_spec
from nam_megatron.runtime import rate
from nam_megatron.runtime.heartbeat import HEART
from nam_megatron.runtime.nonfinite import Watch
from nam_megatron.runtime.pretrain import READINGS, NonFinite, report


def run(made: NamContainer, operations: float) -> None:
    """Train a container; returns on every rank once training is over. operations: see `rate.provide`.

    Raises:
        Refused: what the container or its layers would not be built for.
        NonFinite: the loss is not a number.
        SystemExit: as Megatron's pretrain does; see `nam_megatron.runtime.pretrain.run`.
    """
    stack_spec(made.model)  # what it refuses is said before any process group is there
    speak_as_megatron(operations)  # for good: a process trains once
    readings = Readings()
    try:
        bridge.pretrain(made, forward_step, callbacks=[readings])
    finally:
        readings.end()


# The loss ---------------------------------------------------------------------------------------------------------------


def forward_step(state: GlobalState, samples: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """Bridge's, with a look at a loss that is not a number.

    Bridge leaves that to Megatron's rerun state machine alone, which skips the first step, and cannot end a run without `save`.
    """
    machine = get_rerun_state_machine()
    first, again = not machine.first_iteration_complete, machine.state == RerunState.RERUNNING_IN_PLACE
    if machine.get_mode() == RerunMode.DISABLED or not (first or again):
        return gpt_step.forward_step(state, samples, model)
    watch = Watch(unwrap_model(model))
    try:
        output, loss = gpt_step.forward_step(state, samples, model)
    finally:
        watch.close()
    # An inner stage says it itself: the last one will only see that it came from elsewhere.
    if not mpu.is_pipeline_last_stage() and watch.began_here():
        report(f"{whereabouts(state)}: NaN or Inf, {watch.verdict()}")
    return output, partial(finite, state, watch, loss, fatal=first or state.cfg.checkpoint.save is None)


def finite(state: GlobalState, watch: Watch, loss: partial, output: torch.Tensor, *, fatal: bool) -> tuple:
    """`loss(output)`. Raises NonFinite where it is not a number and the run cannot go on."""
    made = loss(output)
    if not made[0].isfinite():
        message = f"{whereabouts(state)}: the loss is {made[0].item()}; {watch.verdict()}"
        if fatal:
            raise NonFinite(message)
        report(message)
    return made


def whereabouts(state: GlobalState) -> str:
    return f"step {state.train_state.step + 1}, rank {torch.distributed.get_rank()}"


# The log ----------------------------------------------------------------------------------------------------------------


class Readings(Callback):
    """The same readings as `nam_megatron.train` gives."""

    state: GlobalState | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        self.state = context.state
        HEART.built()
        READINGS.built()

    def on_train_step_start(self, context: CallbackContext) -> None:
        READINGS.step(context.state.train_state.step)
        HEART.step(context.state.train_state.step)

    def end(self) -> None:
        """However the run ends: Bridge fires no event where it leaves early."""
        READINGS.end(self.state.train_state.step if self.state else 0)
        HEART.end()


class _Explained(logging.Filter):
    """Bridge logs a traceback and "failed" at every early end: at a planned one, and at those that we explain ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], SystemExit | Refused | NonFinite))


def speak_as_megatron(operations: float) -> None:
    """Our rate in the step lines, and the time in the lines of checkpoints, by which a launcher knows them."""
    step, save = train_utils.print_rank_last, checkpointing.print_rank_0

    def stamped(line: str) -> None:
        known = "checkpoint" in line and line.lstrip().startswith(("saving", "successfully saved"))
        save(f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {line.lstrip()}" if known else line)

    train_utils.print_rank_last = lambda line: step(rate.beside(line, operations))
    checkpointing.print_rank_0 = stamped
    bridge.logger.addFilter(_Explained())
