"""`nemo nam pretrain conf=nam56r`: NeMo-Run's own command, which finds this by an entry point (`nemo_run.cli`)."""

import os
from typing import Optional

import nemo_run as run


@run.cli.entrypoint(name="pretrain", namespace="nam", skip_confirmation=False)
def pretrain(conf: str, overrides: Optional[list[str]] = None) -> None:  # noqa: UP045  NeMo-Run parses no other spelling
    """Train a NAM recipe by Megatron-Bridge, on the processes that the executor starts.

    conf: a preset. overrides: changes of the recipe, `overrides="[lane=native_dp]"`.
    """
    from nam_megatron import train
    from nam_megatron.compile.lower import translate
    from nam_megatron.errors import raise_if
    from nam_megatron.nemo.train import begin
    from nam_megatron.recipe import load

    job = train.Job(translate(load(conf, overrides or ())))
    raise_if(train.objections(job, job.argv, os.environ))
    if code := begin(job):
        raise SystemExit(code)
