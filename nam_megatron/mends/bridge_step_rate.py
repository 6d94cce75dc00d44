"""Our count of the model's operations in Bridge's step lines (torch side)."""

from megatron.bridge.training.utils import train_utils

from nam_megatron.mends.install import Run
from nam_megatron.runtime.rate import beside


def install(run: Run) -> None:
    """Put the rate behind Bridge's figures."""
    theirs = train_utils.print_rank_last
    train_utils.print_rank_last = lambda line: theirs(beside(line, run.operations))
