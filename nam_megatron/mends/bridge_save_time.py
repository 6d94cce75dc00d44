"""The time in Bridge's lines of checkpoints, by which a launcher knows them (torch side)."""

from datetime import datetime

from megatron.bridge.training import checkpointing

from nam_megatron.mends.install import Run


def install(run: Run) -> None:
    """Begin such lines as Megatron does."""
    theirs = checkpointing.print_rank_0

    def stamped(line: str) -> None:
        known = "checkpoint" in line and line.lstrip().startswith(("saving", "scheduled", "successfully saved"))
        theirs(f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {line.lstrip()}" if known else line)

    checkpointing.print_rank_0 = stamped
