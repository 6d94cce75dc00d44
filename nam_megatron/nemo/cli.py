"""`nemo nam pretrain conf=nam56r`: NeMo-Run's own command, which finds this by an entry point (`nemo_run.cli`)."""

from typing import Optional

import nemo_run as run


@run.cli.entrypoint(name="pretrain", namespace="nam", skip_confirmation=False)
def pretrain(conf: str, overrides: Optional[list[str]] = None) -> None:  # noqa: UP045  NeMo-Run parses no other spelling
    """Train a NAM recipe by Megatron-Bridge, on the processes that the executor starts.

    conf: a preset. overrides: changes of the recipe, `overrides="[lane=native_dp]"`.
    """
    from nam_megatron.nemo.train import start
    from nam_megatron.recipe import load

    if code := start(load(conf, overrides or ())):
        raise SystemExit(code)
