"""The training process of NeMo's route: plan.json -> Megatron-Bridge's pretrain(), one process per GPU (torch side).

    torchrun --nproc-per-node 8 -m nam_megatron.nemo.train --nam-plan plan.json $(args)

The same command line, checks and exit codes as `nam_megatron.train`, so a launcher starts either. Megatron's arguments stand there to
be seen and compared; Bridge gets the container that is made of the same plan.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nam_megatron import train
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, REFUSED, Problem, Refused, raise_if
from nam_megatron.lower import Lowering
from nam_megatron.nemo import doctor
from nam_megatron.runtime.heartbeat import HEART

# What Bridge leaves beside its checkpoints, and looks for when it loads one; it writes Megatron's tracker too.
TRACKER = "latest_train_state.pt"
# The folder for what computed these weights. Not beside them: there `nam_megatron.train` would take it for its own, find no count of
# samples in the checkpoint, and begin the data anew.
SIGNED = "nam_megatron"


def objections(lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Why this plan cannot load what it asks for, or must not save where it asks to. thorough: see `checkpoint.damage`."""
    from nam_megatron.runtime import checkpoint

    s, tracking = lowering.plan.recipe.schedule, lowering.plan.recipe.feature.tracking
    if tracking is not None and tracking.mlflow:
        yield Problem(
            "Bridge's trainer is not told of `mlflow`", "feature.tracking.mlflow", "`nam_megatron.train`, or null"
        )
    if s.load is not None:
        folder = Path(s.load)
        if not all((folder / name).is_file() for name in (TRACKER, checkpoint.TRACKER)):
            # Bridge would start from random weights.
            hint = "set `schedule.load=null` to start afresh; checkpoints of `nam_megatron.train` are of another form"
            yield Problem(f"no checkpoint of Megatron-Bridge's in `{s.load}`", "schedule.load", hint)
            return
        yield from checkpoint.damage(folder, thorough=thorough)
        yield from at_odds(folder, folder / checkpoint.TRACKER)
        yield from checkpoint.another(folder / SIGNED, lowering)
    yield from checkpoint.occupied(lowering)


def at_odds(folder: Path, tracker: Path) -> Iterator[Problem]:
    """Whether somebody has set back Megatron's tracker alone: Bridge goes by its own."""
    import torch

    try:
        step = str(torch.load(folder / TRACKER, weights_only=True)["step"].item())
    except Exception as err:  # whatever a cut-off file makes torch raise
        yield Problem(f"`{folder / TRACKER}` cannot be read: {err}", "schedule.load")
        return
    if (said := tracker.read_text(encoding="utf-8", errors="replace").strip()) != step:
        hint = f"copy the `train_state.pt` of the step that is meant over `{folder / TRACKER}`"
        yield Problem(f"`{tracker.name}` says step {said}, and `{TRACKER}` {step}", "schedule.load", hint)


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return OK
    try:
        job = train.accept(words, os.environ)
    except Refused as refused:
        return train.stop(int(os.environ.get(train.RANK, 0)), REFUSED, refused.render())
    HEART.start(train.split(words)[0], int(os.environ[train.RANK]))
    return begin(job)


def begin(job: train.Job) -> int:
    """Train an accepted job. Returns the exit code."""
    from nam_megatron.runtime import checkpoint

    rank = int(os.environ[train.RANK])
    try:
        raise_if(Problem(f.message, hint=f.hint) for f in doctor.findings() if f.fatal)
        if missing := train.unbuilt(job):
            return train.stop(rank, INCOMPLETE, missing)
        raise_if(objections(job.lowering, thorough=not rank))
        if not rank:
            checkpoint.sign(job.lowering, SIGNED)
            train.announce(job.plan)
        return run(job)
    except Refused as refused:
        return train.stop(rank, REFUSED, refused.render())
    except SystemExit as end:
        if end.code is not None:
            raise
        return train.stop(rank, FINDINGS, "error: Megatron-Bridge gave up before the end; its reason stands above\n")


def run(job: train.Job) -> int:
    """Train by Bridge. Returns the exit code, on every rank, once training is over. Raises Refused, and SystemExit as Bridge does."""
    from nam_megatron.nemo import pretrain
    from nam_megatron.nemo.container import container
    from nam_megatron.runtime import checksums

    checksums.provide()
    try:
        pretrain.run(container(job.lowering), train.operations(job.plan))
    except pretrain.NonFinite as stopped:
        print(f"error: {stopped}", file=sys.stderr, flush=True)
        return FINDINGS
    return OK


if __name__ == "__main__":
    # Under its own name: see nam_megatron/train.py.
    from nam_megatron.nemo.train import main as command

    sys.exit(command(sys.argv[1:]))
