"""A kind costs a folder, its line in blocks/kinds.py and a YAML; a target is a file and a flag dump: added to a copy, and taken away."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from presets import lowered

from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
from nam_megatron.targets import current

ROOT = Path(__file__).parent.parent

BLOCK = '''"""A toy: one matrix, in Megatron's `M` slot."""

from typing import Annotated

from pydantic import PositiveInt

from nam_megatron.blocks import Block
from nam_megatron.words.setting import Row
from nam_megatron.words.sizes import Param


class Toy(Block):
    """One matrix."""

    kind = "toy"
    title = "Toy"
    colour = "white"
    hue = "#ffffff"
    letters = ("R",)
    symbol = "M"
    slot = "mamba_layer"
    stock = False

    width: Annotated[PositiveInt, Row("columns of the matrix")]

    def params(self, z, layer):
        yield from z.norm("mixer.in_proj.layer_norm_", z.site.hidden_size)
        yield Param("mixer.in_proj.weight", (self.width, z.site.hidden_size), "tensor", "weight")
        yield Param("mixer.out_proj.weight", (z.site.hidden_size, self.width), "tensor", "weight")

    def activations(self, z, layer):
        yield z.own(W=self.width).line("product", "2 T W / t", "input of the second matrix")

    def flops(self, z, layer):
        yield z.own(W=self.width).work("products", "4 h W", "")
'''
LAYER = '''"""Torch side of the toy."""

from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


def spec(backend, block, site):
    parts = MambaMixerSubmodules(in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear())
    return ModuleSpec(ToyMixer, params={"width": block.width}, submodules=parts)


class ToyMixer(MegatronModule):
    def __init__(self, config, submodules, d_model, *, width, pg_collection, **_):
        super().__init__(config)
        common = dict(config=config, bias=False, is_expert=False, init_method=config.init_method, tp_group=pg_collection.tp)
        self.in_proj = build_module(submodules.in_proj, d_model, width, gather_output=False, skip_bias_add=False, **common)
        self.out_proj = build_module(submodules.out_proj, width, d_model, input_is_parallel=True, skip_bias_add=True, **common)

    def forward(self, hidden_states, **_):
        return self.out_proj(self.in_proj(hidden_states)[0])
'''
# What every command says of the toy, in a process that has it; the model is built on the meta device.
LOOK = """
import json, sys
sys.path.insert(0, "tests"), sys.path.insert(0, "tests/cpu")
from nam_megatron import report, reference, schema
from nam_megatron.compile import argv
from nam_megatron.compile.argv import parse_plan
from nam_megatron.budget import budget, parameters
from nam_megatron.judge.same import differences
from nam_megatron.lint import lint
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
lowering = translate(load("nam56r_toy"))
old = json.loads(open(sys.argv[1]).read())
found = {"text": report.plan_text(lowering), "marker": argv.marker(lowering), "parameters": parameters(lowering.plan)[0],
         "fits": budget(lowering.plan).roomy, "reference": "`model.blocks.toy.width`" in reference.render(),
         "hover": "columns of the matrix" in schema.render(), "old": parse_plan(json.dumps(old), "old").plan.recipe.preset.name,
         "differs": sorted(d.key for d in differences(old, json.loads(argv.plan_json(lowering))) if d.computes)}
seen = lint(argv.plan_json(lowering), "plan.json")
found["lint"] = [k for _, k in seen.model.layers].count("toy"), seen.model.count.total
import harness
harness.KIND["T"] = "toy"
memoryless = dict(use_cpu_initialization=False, perform_initialization=False)
found["shapes"] = harness.shapes(harness.Case("*TM", config=memoryless))
print(json.dumps(found))
"""


@pytest.fixture
def house(tmp_path):
    """A copy of the package and its conf/, to be rebuilt."""
    for name in ("nam_megatron", "conf", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "golden", "fixtures")
        )
    return tmp_path


def run(house, code, *words):
    env = os.environ | {"PYTHONPATH": str(house)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=house,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def add(house):
    """The toy, as CONTRIBUTING says: a folder, its line (an import and a field) in kinds.py, a YAML under model.blocks."""
    folder = house / "nam_megatron" / "blocks" / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "block.py").write_text(BLOCK)
    (folder / "layer.py").write_text(LAYER)
    kinds = house / "nam_megatron" / "blocks" / "kinds.py"
    text = kinds.read_text()
    text = text.replace(
        "from nam_megatron.words.setting",
        "from nam_megatron.blocks.toy.block import Toy\nfrom nam_megatron.words.setting",
        1,
    )
    kinds.write_text(
        text.replace("    m2rnn: M2Rnn | None = None\n", "    m2rnn: M2Rnn | None = None\n    toy: Toy | None = None\n")
    )
    (house / "conf" / "preset" / "nam56r_toy.yaml").write_text(
        "# @package _global_\ndefaults:\n  - nam56r_native_dp\n  - _self_\npreset: {name: nam56r_toy}\n"
        "lane: {name: toy, blocks: {R: toy}}\n"
    )
    model = house / "conf" / "model" / "nam56r.yaml"
    model.write_text(model.read_text() + "  toy:\n    width: 512\n")


@pytest.mark.slow
def test_a_kind_costs_a_folder_a_line_and_a_yaml(house, tmp_path):
    stored = tmp_path / "stored.json"
    stored.write_text(argv.plan_json(lowered("nam56r_native_dp")))
    add(house)
    found = json.loads(run(house, LOOK, str(stored)))
    assert (
        "Toy        4  12, 24, 36, 48" in found["text"]
        and "gives up M2RNN at R (4 layers): lane toy puts Toy there" in found["text"]
    )
    mamba = sum(n for n in (3584, 3584 * (2 * 3584 + 1024 + 56), 5 * (3584 + 1024), 3 * 56, 3584, 3584 * 3584))
    assert found["parameters"] == 3_996_461_352 - 4 * mamba + 4 * (3584 + 2 * 512 * 3584)
    assert found["lint"] == [4, found["parameters"]]
    assert found["marker"][1].startswith("toy:") and found["fits"] and found["reference"] and found["hover"]
    assert found["shapes"]["decoder.layers.1.mixer.in_proj.weight"] == [512, 64]
    assert found["shapes"]["decoder.layers.2.mixer.A_log"] == [8]
    # A plan stored before the kind existed is read as before, and differs only where the toy stands.
    assert found["old"] == "nam56r_native_dp"
    assert found["differs"] == ["lane.blocks.R", "model.blocks.toy.width"]
    shutil.rmtree(house / "nam_megatron" / "blocks" / "toy")
    (house / "conf" / "preset" / "nam56r_toy.yaml").unlink()
    for name in ("nam_megatron/blocks/kinds.py", "conf/model/nam56r.yaml"):
        shutil.copy(ROOT / name, house / name)
    code = "from nam_megatron.compile import argv\nfrom nam_megatron.compile.lower import translate\nfrom nam_megatron.recipe import load\n"
    code += "print(argv.plan_json(translate(load('nam56r_native_dp'))), end='')"
    assert run(house, code) == stored.read_text()


TRIED = """
import sys
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load
for word in ("", *sys.argv[1:]):
    try:
        translate(load("nam56r_toy", word.split()))
        print(word, "stands")
    except Refused as refused:
        print(word, *(f"{p.law} {p.key} {p.message}" for p in refused.problems), sep="; ")
"""


def test_a_kind_is_refused_where_it_does_not_say_that_it_is_right(house):
    add(house)
    context, fp8 = "parallel.context=2", "feature.fp8.recipe=tensorwise model.blocks.mamba2.heads=48"
    untried = "kind-untried {} Toy: nobody has tried such a layer {}"
    refused = [" stands", f"{context}; {untried.format('parallel.context', 'over context ranks')}",
               f"{fp8}; {untried.format('feature.fp8.recipe', 'in FP8')}"]  # fmt: skip
    assert run(house, TRIED, context, fp8).splitlines() == refused
    block = house / "nam_megatron" / "blocks" / "toy" / "block.py"
    block.write_text(BLOCK.replace("    stock = False\n", '    stock = False\n    tried = ("context",)\n'))
    assert run(house, TRIED, context, fp8).splitlines() == [refused[0], f"{context} stands", refused[2]]


def test_a_target_is_one_file_and_one_dump(tmp_path):
    """Another Megatron that calls a flag otherwise and has lost another: nothing but the value that is passed in changes."""
    dumped = json.loads(current().flags_file.read_text()) | {"megatron_core": "0.20.0"}
    dumped["flags"]["--width"] = dumped["flags"].pop("--hidden-size")
    (tmp_path / "v0_20.json").write_text(json.dumps(dumped))
    target = replace(current(), name="v0_20", pin="0.20.0", flags_file=tmp_path / "v0_20.json")
    there, here = translate(load("nam56r"), target), lowered("nam56r")
    assert [w for w in argv.argv(there) if w != "--width"] == [w for w in argv.argv(here) if w != "--hidden-size"]
    assert json.loads(argv.plan_json(there))["megatron_core"] == "0.20.0"
    assert current().pin == "0.19.2" and "--hidden-size" in argv.argv(translate(load("nam56r")))
