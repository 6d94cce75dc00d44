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
from nam_megatron.errors import INCOMPLETE, OK, REFUSED, Problem, Refused, raise_if
from nam_megatron.lower import Lowering
from nam_megatron.nemo import doctor

# What Bridge leaves beside its checkpoints, and looks for when it loads one.
TRACKER = "latest_train_state.pt"


def objections(lowering: Lowering) -> Iterator[Problem]:
    """Checkpoints that Bridge would not find, and start from random weights, or would write over."""
    s = lowering.plan.recipe.schedule
    if s.load is not None and not (Path(s.load) / TRACKER).is_file():
        hint = "set `schedule.load=null` to start afresh; checkpoints of `nam_megatron.train` are of another form"
        yield Problem(f"no checkpoint of Megatron-Bridge's in `{s.load}`", "schedule.load", hint)
    if s.save is not None and s.save != s.load and (Path(s.save) / TRACKER).exists():
        hint = f"`schedule.load={s.save}` goes on with it; or name another folder"
        yield Problem(f"`{s.save}` holds the checkpoints of a run", "schedule.save", hint)


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return OK
    try:
        job = train.accept(words, os.environ)
    except Refused as refused:
        return train.stop(int(os.environ.get(train.RANK, 0)), REFUSED, refused.render())
    return begin(job)


def begin(job: train.Job) -> int:
    """Train an accepted job. Returns the exit code."""
    rank = int(os.environ[train.RANK])
    try:
        raise_if(objections(job.lowering))
        raise_if(Problem(f.message, hint=f.hint) for f in doctor.findings() if f.fatal)
        if missing := train.unbuilt(job):
            return train.stop(rank, INCOMPLETE, missing)
        run(job.lowering)
    except Refused as refused:
        return train.stop(rank, REFUSED, refused.render())
    return OK


def run(lowering: Lowering) -> None:
    """Train a lowering by Bridge; returns on every rank once training is over. Raises Refused."""
    from nam_megatron.mcore import pretrain as ours
    from nam_megatron.nemo.container import container

    made = container(lowering)
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Readings(Callback):
        """The same lines in the log as `nam_megatron.train` writes."""

        def on_data_init_start(self, context) -> None:
            ours.READINGS.built()

        def on_train_step_end(self, context) -> None:
            ours.READINGS.step(context.state.train_state.step)

        def on_train_end(self, context) -> None:
            ours.READINGS.end(context.state.train_state.step)

    if not int(os.environ[train.RANK]):
        train.announce(lowering.plan)
    pretrain(made, forward_step, callbacks=[Readings()])


if __name__ == "__main__":
    # Under its own name: see nam_megatron/train.py.
    from nam_megatron.nemo.train import main as command

    sys.exit(command(sys.argv[1:]))
