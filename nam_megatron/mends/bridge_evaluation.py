"""Samples of evaluations in their order, as `dataloader_type` says (torch side)."""

from megatron.bridge.data import loaders

from nam_megatron.mends import Plan


def install(plan: Plan) -> None:
    """Have Bridge take no dataset for one whose evaluations it draws at random. This goes for every container of the process."""
    loaders.GPTDatasetConfig = ()
