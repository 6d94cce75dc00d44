"""What our own command adds to Bridge's pretrain: events, and lines of the log (torch side). The guards come with the container.

Made for megatron-bridge 0.6.2.
"""

from megatron.bridge.training import gpt_step
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils import flop_utils
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from nam_megatron.errors import raise_if
from nam_megatron.events import RECORD, early
from nam_megatron.mends import Trainer, install
from nam_megatron.nemo.container import NamContainer, stack_spec
from nam_megatron.runtime import checkpoint, record
from nam_megatron.runtime.heartbeat import HEART
from nam_megatron.runtime.pretrain import BAD_GRADIENT, READINGS, NonFinite


def run(made: NamContainer, operations: float) -> None:
    """Train a container; returns on every rank once training is over. operations: see `install.Run`.

    Raises:
        Refused: what the container or its layers would not be built for.
        NonFinite: the loss is not a number.
        SystemExit: as Megatron's pretrain does; see `nam_megatron.runtime.pretrain.run`.
    """
    stack_spec(made.model)  # what it refuses is said before any process group is there
    # For good: a process trains once.
    install.command(install.Run(made.model.lowering.plan, operations), Trainer.BRIDGE)
    readings = Readings()
    try:
        train = finetune if made.checkpoint.pretrained_checkpoint else bridge.pretrain
        train(made, gpt_step.forward_step, callbacks=[readings])
    except SystemExit as end:
        readings.leave(end.code)
        raise
    finally:
        readings.end()


# The log ----------------------------------------------------------------------------------------------------------------


class Readings(Callback):
    """The same readings and events as `nam_megatron.train` gives."""

    state: GlobalState | None = None

    def __init__(self) -> None:
        self.line = record.Line()

    def on_data_init_start(self, context: CallbackContext) -> None:
        self.state = context.state
        HEART.built()
        READINGS.built()
        begun, step = context.state.cfg.checkpoint, context.state.train_state.step
        # Bridge has looked again which of the two there is. The first that was judged is the one that it took, or none goes on.
        raise_if(checkpoint.exchanged(begun.load, step))
        raise_if(checkpoint.exchanged(begun.pretrained_checkpoint, None, "schedule.pretrained"))
        record.loaded(step, begun.load, begun.pretrained_checkpoint)

    def on_train_step_start(self, context: CallbackContext) -> None:
        READINGS.step(context.state.train_state.step)
        HEART.step(context.state.train_state.step)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Before Bridge counts the step, and logs it where `log_interval` says so."""
        assert context.loss_dict is not None and context.optimizer is not None, "they are there at a step's end"
        state, config = context.state, context.state.cfg
        step, batch = state.train_state.step + 1, get_current_global_batch_size()
        if config.checkpoint.save is None and get_rerun_state_machine().state == RerunState.WILL_RERUN_FROM_CHECKPOINT:
            # Bridge would save before it leaves the step, without a folder.
            raise NonFinite(f"step {step}, rank {get_rank_safe()}: {BAD_GRADIENT}")
        self.line.add(context.loss_dict, bool(context.skipped_iter))
        if step % config.logger.log_interval == 0:
            seconds = state.timers("interval-time").elapsed(reset=False, barrier=True)
            rates = [group["lr"] for group in context.optimizer.param_groups if group and not group["is_decoupled_lr"]]
            self.line.say(
                step, seconds, flop_utils.num_floating_point_operations(config, batch), of=config.train.train_iters,
                grad_norm=record.norm(context.grad_norm, config.optimizer.clip_grad), lr=record.number(rates[-1] if rates else None),
                loss_scale=record.number(context.optimizer.get_loss_scale()),
                tokens=(state.train_state.consumed_train_samples + batch) * config.model.seq_length,
            )  # fmt: skip

    def leave(self, code: object) -> None:
        """Bridge ends the run early, or cannot load."""
        if self.state is not None:
            signals = getattr(self.state.signal_handler, "_signal_received", False)
            RECORD.leaving = early(code, self.state.train_state.step, signals, self.state.cfg.train.exit_interval)

    def end(self) -> None:
        """However the run ends: Bridge fires no event where it leaves early."""
        READINGS.end(self.state.train_state.step if self.state else 0)
        HEART.end()
