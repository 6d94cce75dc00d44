"""Runs the checks of tests/nemo/inside, which need Megatron-Bridge, in an environment of their own that uv makes of the lock.

Bridge's imports would cost every other test that imports Megatron some seconds, and half a minute here. The environment is kept inside
the project's own, so only the first run downloads anything.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "tests/nemo/inside"
ENVIRONMENT = Path(sys.prefix) / "nemo"


@pytest.fixture(scope="module")
def python() -> Path:
    """The environment's Python, with exactly the lock's packages of the group `nemo`."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "these tests make an environment with uv: pip install uv"
    env = os.environ | {"UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)}
    command = [uv, "sync", "--locked", "--quiet", "--group", "nemo", "--python", sys.executable]
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return ENVIRONMENT / "bin" / "python"


def test_inside(python, pytestconfig):
    """All checks of this tier pass, in one process: importing Bridge costs more than most of them."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_")}
    command = [python, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={INSIDE}"]
    command += ["-m", pytestconfig.option.markexpr]
    ran = subprocess.run(
        [*command, *sorted(INSIDE.glob("check_*.py"))], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
