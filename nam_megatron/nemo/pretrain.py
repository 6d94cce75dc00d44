"""What our own command adds to Bridge's pretrain: lines of the log (torch side). The guards come with the container.

Made for megatron-bridge 0.6.2.
"""

from datetime import datetime

from megatron.bridge.training import checkpointing, gpt_step
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils import train_utils

from nam_megatron.nemo.container import NamContainer, stack_spec
from nam_megatron.runtime import rate
from nam_megatron.runtime.heartbeat import HEART
from nam_megatron.runtime.pretrain import READINGS


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
        train = finetune if made.checkpoint.pretrained_checkpoint else bridge.pretrain
        train(made, gpt_step.forward_step, callbacks=[readings])
    finally:
        readings.end()


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


def speak_as_megatron(operations: float) -> None:
    """Our rate in the step lines, and the time in the lines of checkpoints, by which a launcher knows them."""
    step, save = train_utils.print_rank_last, checkpointing.print_rank_0

    def stamped(line: str) -> None:
        known = "checkpoint" in line and line.lstrip().startswith(("saving", "scheduled", "successfully saved"))
        save(f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {line.lstrip()}" if known else line)

    train_utils.print_rank_last = lambda line: step(rate.beside(line, operations))
    checkpointing.print_rank_0 = stamped
