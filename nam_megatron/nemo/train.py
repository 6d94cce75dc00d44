"""The training process of NeMo's route: plan.json -> Megatron-Bridge's pretrain(), one process per GPU (torch side).

    python -m nam_megatron.torchrun --nproc-per-node 8 -m nam_megatron.nemo.train --nam-plan plan.json $(args)

The same command line, checks and exit codes as `nam_megatron.train`, so a launcher starts either. Megatron's arguments stand there to
be seen and compared; Bridge gets the container that is made of the same plan.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nam_megatron import installed, train
from nam_megatron.compile.lower import translate
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, REFUSED, Problem, Refused, raise_if
from nam_megatron.events import RECORD
from nam_megatron.nemo import doctor
from nam_megatron.nemo.words import laid
from nam_megatron.recipe import Recipe
from nam_megatron.runtime.heartbeat import HEART

if TYPE_CHECKING:
    from nam_megatron.nemo.container import NamContainer


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return OK
    return train.recorded("bridge", words, lambda: trained(words))


def trained(words: Sequence[str]) -> int:
    """See `main`."""
    try:
        job = train.accept(words, os.environ, engine=False)  # doctor knows which ones Bridge goes with
    except Refused as refused:
        return train.stop(int(os.environ.get(train.RANK, 0)), REFUSED, refused.render())
    HEART.start(train.split(words)[0], int(os.environ[train.RANK]))
    return begin(job)


def start(recipe: Recipe, fields: Sequence[str] = ()) -> int:
    """Train a recipe, for commands that have no plan file. Returns the exit code. Raises Refused."""
    job = train.Job(translate(recipe))
    raise_if(train.objections(job, job.argv, os.environ))
    return begin(job, fields)


def begin(job: train.Job, fields: Sequence[str] = ()) -> int:
    """Train an accepted job, with words for fields of its container laid over it. Returns the exit code."""
    rank = int(os.environ[train.RANK])
    try:
        installed.ask(job.lowering.target)
        raise_if(Problem(f.message, hint=f.hint) for f in doctor.findings() if f.fatal)
        made = laid(job.plan.recipe, fields)
        if fields:
            job = train.Job(made.model.lowering)
            raise_if(train.objections(job, job.argv, os.environ))
        if missing := train.unbuilt(job):
            return train.stop(rank, INCOMPLETE, missing)
        return run(job, made)
    except Refused as refused:
        return train.stop(rank, REFUSED, refused.render())


def run(job: train.Job, made: "NamContainer") -> int:
    """Train a job's container. Returns the exit code, on every rank, once it is over. Raises Refused, and SystemExit as Bridge does."""
    from nam_megatron.nemo import pretrain
    from nam_megatron.runtime.padding import Unfit
    from nam_megatron.runtime.pretrain import NonFinite

    try:
        pretrain.run(made, train.operations(job.plan))
    except (NonFinite, Unfit) as stopped:
        RECORD.end("not a number" if isinstance(stopped, NonFinite) else "unfit data", FINDINGS, where=str(stopped))
        print(f"error: {stopped}", file=sys.stderr, flush=True)
        return FINDINGS
    return OK


if __name__ == "__main__":
    # Under its own name: see nam_megatron/train.py.
    from nam_megatron.nemo.train import main as command

    sys.exit(command(sys.argv[1:]))
