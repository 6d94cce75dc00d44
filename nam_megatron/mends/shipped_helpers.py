"""The C++ helpers of Megatron's datasets as the wheel has them: compiled, and without a Makefile (torch side)."""

from pathlib import Path

from megatron.core.datasets import utils

from nam_megatron.mends import Plan


def install(plan: Plan | None) -> None:
    """Compile nothing where there is nothing to compile, and the compiled helpers are there."""
    if not (Path(utils.__file__).parent / "Makefile").exists():
        import megatron.core.datasets.helpers_cpp  # noqa: F401  here, so that a missing one is not found after the model is built

        utils.compile_helpers = lambda: None
