"""What `pip install` gives: everything that a user needs, tried outside of the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nam_megatron import card

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return unpacked(tmp_path_factory.mktemp("wheel"))


def unpacked(folder: Path) -> Path:
    """A folder with the wheel unpacked as pip would; what it depends on is this environment's."""
    build = ["uv", "build", "-q", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", folder, REPO]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, words: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *words.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def test_the_wheel_takes_one_name_among_others_packages(installed):
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"nam_megatron"}
    inside = installed / "nam_megatron"
    for part in (
        "conf/preset",
        "beside/launch/host/stack.toml",
        "beside/patches/megatron-core",
        "hf/model/modeling_nam.py",
    ):
        assert (inside / part).exists(), part


def test_a_plan_is_made_read_and_shown(installed, tmp_path):
    made = run(installed, tmp_path, "nam_megatron.translate conf=nam56r_smoke out=p")
    assert made.returncode == 0, made.stderr
    found = run(installed, tmp_path, "nam_megatron.lint p/run.sh")
    assert found.returncode == 0 and "12 layers" in found.stdout, found.stderr
    priced = run(installed, tmp_path, "nam_megatron.budget conf=nam56r_smoke")
    assert priced.returncode == 0 and "3,624,496 parameters" in priced.stdout, priced.stderr


@pytest.mark.slow
def test_a_card_says_what_the_records_of_the_checkout_say(installed, tmp_path):
    found = run(installed, tmp_path, "nam_megatron.card nam56r_smoke")
    assert (found.returncode, found.stdout) == (0, card.text("nam56r_smoke")), found.stderr


@pytest.mark.slow
def test_a_preset_of_ones_own(installed, tmp_path):
    (tmp_path / "own" / "preset").mkdir(parents=True)
    head = "# @package _global_\ndefaults: [nam56r_smoke, _self_]\npreset: {name: mine, about: x, alias_of: null}\n"
    (tmp_path / "own" / "preset" / "mine.yaml").write_text(head + "optim: {lr: 0.002}\n")
    made = run(installed, tmp_path, "nam_megatron.translate --config-dir own conf=mine")
    assert made.returncode == 0 and "--lr 0.002" in made.stdout, made.stderr


@pytest.mark.slow
def test_the_launcher_is_the_wheels_own(installed, tmp_path):
    script = run(installed, tmp_path, "nam_megatron.launch show conf=nam56r_smoke format=sbatch")
    assert script.returncode == 0 and "exec python -m nam_megatron.launch run" in script.stdout, script.stderr
    asked = run(installed, tmp_path, "nam_megatron.launch inspect nope")
    assert asked.returncode == 2 and f"`{tmp_path}/receipts`" in asked.stderr, asked.stderr
    assert "`python -m nam_megatron.launch receipts`" in asked.stderr
    stack = run(installed, tmp_path, "nam_megatron.launch stack")
    assert (
        stack.returncode == 0 and "hydra-core" in stack.stdout and "python -m nam_megatron.launch patch" in stack.stdout
    )


@pytest.mark.slow
def test_in_a_checkout_both_names_are_the_same(tmp_path):
    asked = [
        subprocess.run(
            [sys.executable, "-m", name, "inspect", "nope"], capture_output=True, text=True, cwd=REPO, check=False
        )
        for name in ("launch", "nam_megatron.launch")
    ]
    first, second = ((done.returncode, done.stdout, done.stderr) for done in asked)
    assert (
        first == second
        and first[0] == 2
        and f"`{REPO}/receipts`" in first[2]
        and "`python -m launch receipts`" in first[2]
    )
