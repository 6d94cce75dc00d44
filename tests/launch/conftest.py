"""What the launch tests share: a copy of the installed Megatron to patch."""

import shutil
from pathlib import Path

import pytest

from launch.host import patches


@pytest.fixture(scope="session")
def queue() -> patches.Queue:
    return patches.find("megatron-core")


@pytest.fixture
def unpacked(queue, tmp_path) -> Path:
    """A folder with the installed Megatron in it, as an unpacked wheel has it."""
    root = tmp_path / "unpacked"
    shutil.copytree(
        patches.installed(queue) / "megatron", root / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    return root
