"""What a command says where a package is missing: its name, and the extra that has it. Never a traceback."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from presets import EMPTY_SET

from nam_megatron import packages

REPO = Path(__file__).parent.parent
# In a file of this name Python runs it before anything else: these packages are as good as not installed.
BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def without(names: tuple[str, ...], words: str, folder: Path) -> subprocess.CompletedProcess:
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=names))
    env = os.environ | {"PYTHONPATH": f"{folder}:{REPO}"}
    command = [sys.executable, "-m", *words.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "names, words, extra",
    [
        (("torch", "megatron"), "nam_megatron.verify conf=nam56r_smoke", "--extra megatron`"),
        (("megatron",), "nam_megatron.verify conf=nam56r_smoke", "--extra megatron`"),
        (("megatron",), "nam_megatron.prove conf=nam56r_smoke", "--extra megatron`"),
        (("torch",), "nam_megatron.generate d --prompt x", "--extra hf`"),
        (("tokenizers",), "nam_megatron.hf refresh d", "--extra hf`"),
        (("lm_eval",), "nam_megatron.hf evaluate d arc_easy", "--extra hf --extra eval`"),
        (("numpy", "torch"), "nam_megatron.data check d", "--extra data`"),
        (("matplotlib",), "nam_megatron.budget conf=nam56r_smoke plot=x.png", "--extra plot`"),
        (("pydantic",), "nam_megatron.budget conf=nam56r_smoke", "`uv sync` makes an environment"),
    ],
)
def test_a_command_names_the_extra_it_needs(names, words, extra, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text("{}")
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(EMPTY_SET))
    done = without(names, words, tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr and "Error executing" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1
    assert extra in done.stderr.partition("\nhint: ")[2], done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["nam_megatron.translate conf=nam56r_smoke", "nam_megatron.budget conf=nam56r_smoke"])
def test_translating_and_pricing_need_no_extra(words, tmp_path):
    done = without(("torch", "megatron", "transformers", "numpy", "matplotlib"), words, tmp_path)
    assert done.returncode == 0 and "error" not in done.stderr


def test_a_megatron_that_cannot_be_imported_is_a_refusal(tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise RuntimeError('built for another torch')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    words = [sys.executable, "-m", "nam_megatron.verify", "conf=nam56r_smoke"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Megatron cannot be imported: RuntimeError: built for another torch\n\nhint: ")


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*packages.EXTRAS.values(), *packages.OF_PACKAGES.values(), *packages.BUILT} <= extras.keys()


def test_a_missing_module_of_our_own_is_our_mistake(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv=['-m']; import nam_megatron.nothing"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.slow
def test_a_plan_says_where_nam_megatron_is_missing(tmp_path):
    translate = [sys.executable, "-m", "nam_megatron.translate", "conf=nam56r_smoke", f"out={tmp_path}"]
    subprocess.run(translate, check=True, capture_output=True, cwd=REPO)
    done = subprocess.run(
        ["/bin/bash", tmp_path / "run.sh"], capture_output=True, text=True, env={"PATH": "/bin"}, check=False
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: no nam_megatron here: ")
    report = subprocess.run([sys.executable, "-m", "nam_megatron.lint", tmp_path / "run.sh", "format=json"],
                            capture_output=True, text=True, cwd=REPO, check=True)  # fmt: skip
    assert not json.loads(report.stdout)["findings"]
