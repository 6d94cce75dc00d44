"""Our count of the model's operations, and what layers measured, in every step line (torch side)."""

from megatron.training import training

from nam_megatron.mends.install import Run
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.rate import STEP, beside


def install(run: Run) -> None:
    """Put both behind Megatron's figures, and hand each line to run.track."""
    theirs = training.print_rank_last

    def ours(line: str) -> None:
        said = beside(line, run.operations)
        if STEP.search(line):
            said = GAUGES.beside(said)
        theirs(said)
        if run.track is not None:
            run.track(said)

    training.print_rank_last = ours
