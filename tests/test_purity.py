"""Guards that keep the shape: translating needs no torch and no Megatron; files lie where they are said to lie."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from presets import NAMES

ROOT = Path(__file__).parent.parent

BLOCKED = """
import importlib.abc, os, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "transformer_engine", "numpy"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Block())
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=ROOT, env=os.environ | environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_every_preset_is_translated_without_torch_or_megatron():
    done = run(f"""
from nam_megatron import report, schema
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.mends.series import Trainer, needed
from nam_megatron.recipe import load
for name in {NAMES!r}:
    lowering = translate(load(name))
    for form in argv.FORMATS.values():
        form(lowering)
    argv.run_script(lowering), report.plan_text(lowering), needed(lowering.plan, Trainer.BRIDGE)
schema.render()
print("done")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_command_runs_without_torch_or_megatron():
    done = run("""
from nam_megatron import translate
sys.argv = ["x", "conf=nam56r_smoke", "explain=--lr"]
translate.main()
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--lr\n")


@pytest.mark.parametrize("words", [
    "hf export none out", "hf import none plan.json out", "hf check none none", "hf evaluate none arc_easy", "data check none",
])  # fmt: skip
def test_a_folder_that_is_not_there_is_told_before_torch_is_loaded(words):
    done = run(f"from nam_megatron import cli\nsys.argv = {['nam', *words.split()]!r}\ncli.main()")
    assert done.returncode == 2 and "error: there is no `none`" in done.stderr


def test_the_block_blocks():
    for name in ("torch", "megatron.core", "transformer_engine", "nam_megatron.runtime.stack"):
        done = run(f"import {name}")
        assert done.returncode == 1 and "was imported" in done.stderr


def test_the_environment_does_not_reach_a_plan():
    """plan.json is the only channel: no variable of the caller changes what is printed."""
    code = "from nam_megatron import translate\nsys.argv = ['x', 'conf=nam56r_nemo_native', 'format=json']\ntranslate.main()\n"
    noisy = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "WORLD_SIZE": "3", "RANK": "2", "NCCL_DEBUG": "INFO", "LANG": "C"}
    noisy |= {"NAM_MEGATRON_LANE": "x", "MEGATRON_HIDDEN_SIZE": "8", "HYDRA_FULL_ERROR": "1"}
    quiet, loud = run(code), run(code, **noisy)
    assert quiet.stdout == loud.stdout != ""


def files():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def test_no_file_is_named_for_nothing():
    assert [f for f in files() if f.stem in ("utils", "util", "common", "helpers", "helper", "misc")] == []


def test_every_folder_of_code_is_a_package():
    folders = {f.parent for f in files() if f.suffix == ".py" and f.parts[0] == "nam_megatron"}
    assert [d for d in folders if not (ROOT / d / "__init__.py").is_file()] == []


def tree_of(text):
    """The paths of a drawn tree (├── └── │): {path: is a folder}. `{a, b}` and several names a line are several paths."""
    found, folders = {}, {}
    for line in text.splitlines():
        if not (match := re.match(r"^([│ ]*)[├└]── (.*)$", line)):
            continue
        depth = len(match[1]) // 4
        names = re.split(r"  +", match[2].strip())[0]
        for name in re.split(r",? ", names) if "{" not in names else [names]:
            prefix = folders.get(depth - 1, "")
            braces = re.match(r"(.*)\{(.*)\}(.*)", name)
            for one in [braces[1] + b.strip() + braces[3] for b in braces[2].split(",")] if braces else [name]:
                found[prefix + one] = one.endswith("/")
            if name.endswith("/"):
                folders[depth] = prefix + name
    return found


def disagreements(text, root):
    """Paths of the tree that are not on the disk, and top-level entries of the repository that are not in the tree."""
    drawn = tree_of(text)
    absent = [p for p in drawn if "<" not in p and "*" not in p and not (root / p.rstrip("/")).exists()]
    tops = {p.parts[0] for p in files()} if root == ROOT else {p.name for p in root.iterdir()}
    forgotten = [t for t in sorted(tops) if not t.startswith(".") and t not in {p.split("/")[0] for p in drawn}]
    return absent, forgotten if drawn else []


def test_readmes_tree_is_the_disks():
    assert disagreements((ROOT / "README.md").read_text(), ROOT) == ([], [])


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ("├── a/      what\n│   └── b.py\n└── c.md\n", ([], [])),
        ("├── a/\n│   └── {b, d}.py\n└── c.md\n", (["a/d.py"], [])),
        ("├── a/\n│   └── x.py   what\n", (["a/x.py"], ["c.md"])),
        ("no tree\n", ([], [])),
    ],
)
def test_a_tree_that_lies_is_seen(drawn, expected, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").touch()
    (tmp_path / "c.md").touch()
    assert disagreements(drawn, tmp_path) == expected
