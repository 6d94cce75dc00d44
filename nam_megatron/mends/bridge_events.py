"""The checkpoints of Bridge's training loop, as events (torch side). Its lines come by a callback: nemo/pretrain.py."""

from megatron.bridge.training import checkpointing

from nam_megatron.mends.events import follow_saves
from nam_megatron.mends.install import Run


def install(run: Run) -> None:
    """Have Bridge say when a checkpoint is begun and when it is there."""
    follow_saves(checkpointing, checkpointing, lambda state, **_: state.train_state.step)
