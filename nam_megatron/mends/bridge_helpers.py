"""Bridge's own name for the function that compiles the datasets' helpers (torch side): see shipped_helpers.py, which stands first."""

from megatron.bridge.training import initialize
from megatron.core.datasets import utils

from nam_megatron.mends import Plan


def install(plan: Plan) -> None:
    """Have Bridge call what Megatron would."""
    initialize.compile_helpers = utils.compile_helpers
