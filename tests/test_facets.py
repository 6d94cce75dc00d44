"""What every kind says of itself in its folder: each facet whole, and a kind without one refused by whoever asks for it."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from presets import lowered

from nam_megatron import blocks
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.lower import granted
from nam_megatron.errors import Refused
from nam_megatron.features.fp8 import Part
from nam_megatron.features.names import FEATURES
from nam_megatron.features.recompute import Module
from nam_megatron.hf import describe
from nam_megatron.laws import book
from nam_megatron.lint import count, lint, recipe
from nam_megatron.prove import cut
from nam_megatron.recipe import load
from nam_megatron.targets import current

FOLDER = Path(blocks.__file__).parent
# What a facet's file has, as the module says that is made for it.
FACETS = {
    "layer": {"spec"},
    "export": {"INPUT_NORM", "keys", "tensors", "pieces"},
    "read": {"keys", "count"},
    "serve": {"unserved", "put"},
}
BY_KIND = [(kind, facet) for kind in KINDS for facet in FACETS]
# Keys of a kind that a facet of its block names.
NAMING = ("cut_on_gpu", "padded", "trains")


def defined(file: Path) -> set[str]:
    names = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("kind", "facet"), BY_KIND)
def test_a_facet_is_whole(kind, facet):
    file = FOLDER / kind / f"{facet}.py"
    assert not file.exists() or FACETS[facet] <= defined(file)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_trained_has_the_facets_that_are_asked_of_it(kind):
    block = KINDS[kind]
    has = {facet for facet in FACETS if (FOLDER / kind / f"{facet}.py").exists()}
    assert has >= {"layer", "export"} or block.missing
    assert ("read" in has) == block.stock, "a launch can say Megatron's kinds, and no other"


@pytest.mark.parametrize("kind", KINDS)
def test_a_facet_names_keys_that_the_kind_has(kind):
    block = KINDS[kind]
    named = {key for facet in NAMING for key in getattr(block, facet)} | {key for key, *_ in block.without_gpu}
    named |= {block.share_by} if block.share_by else set()
    assert named <= block.model_fields.keys()
    assert set(block.recomputed) <= set(get_args(Module))


@pytest.mark.parametrize(
    ("place", "words", "key"),
    [
        ("tensor", ["parallel.tensor=2"], "parallel.tensor"),
        ("sequence", ["parallel.tensor=2", "parallel.sequence=true"], "parallel.sequence"),
        ("context", ["parallel.context=2"], "parallel.context"),
        ("expert", ["execution.moe.dispatcher=alltoall", "parallel.expert=2"], "parallel.expert"),
        ("fp8", ["feature.fp8.recipe=tensorwise"], "feature.fp8.recipe"),
        ("mtp", ["feature.mtp.depths=1", "feature.mtp.pattern=M"], "feature.mtp.depths"),
        ("graphs", ["feature.cuda_graphs.impl=transformer_engine", "feature.cuda_graphs.modules=[mamba]"], "feature.cuda_graphs.impl"),
    ],
)  # fmt: skip
def test_a_kind_that_says_nothing_of_a_place_is_refused_there_by_its_name(monkeypatch, place, words, key):
    plan = granted(load("nam56r_native_dp", words), current())
    monkeypatch.setattr(KINDS["mamba2"], "tried", tuple(p for p in get_args(blocks.Place) if p != place))
    (problem,) = (problem for problem in book.problems(plan, current()) if problem.law == "kind-untried")
    assert problem.key == key and problem.message.startswith("Mamba-2: ")


@pytest.mark.parametrize("kind", [kind for kind, block in KINDS.items() if "kernels" in block.model_fields])
def test_a_kind_with_kernels_of_its_own_is_plain_torch_on_the_one_rank_of_a_proof(kind):
    """Or it would be compared with itself."""
    assert cut.plain()[f"execution.{kind}.kernels"] == "naive"


def test_the_parts_that_fp8_can_leave_are_those_of_the_kinds():
    plan = lowered("nam56r").plan
    assert {part for block in plan.blocks for part in block.parts()} == set(get_args(Part))


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if "exported" in vars(feature)])
def test_an_export_reads_what_a_feature_says_in_it(name):
    """transformers keeps a section that nothing reads, and the export would compute without it."""
    config = (Path(describe.__file__).parent / "model" / "configuration_nam.py").read_text(encoding="utf-8")
    (optional,) = re.findall(r"^OPTIONAL = (\(.*\))$", config, re.MULTILINE)
    feature = FEATURES[name].model_construct(**dict.fromkeys(FEATURES[name].model_fields, 2))
    assert feature.exported(())[0] in ast.literal_eval(optional)


def test_an_export_names_the_kind_that_it_has_not(monkeypatch):
    plan = lowered("nam56r").plan
    assert not list(describe.objections(plan))
    monkeypatch.setattr(describe, "FACETS", {kind: facet for kind, facet in describe.FACETS.items() if kind != "m2rnn"})
    assert [problem.key for problem in describe.objections(plan)] == ["model.blocks.m2rnn"]
    assert "no M2RNN" in next(describe.objections(plan)).message


def test_a_recipe_of_a_launch_names_the_kind_that_arguments_cannot_say(monkeypatch):
    words = "--hybrid-layer-pattern M*E- --hidden-size 64 --num-attention-heads 4 --num-experts 4 --micro-batch-size 1"
    report = lint(f"torchrun --nproc-per-node 8 pretrain_hybrid.py {words} --seq-length 64")
    assert recipe._blocks(report.model, []).keys() == {"attention", "moe", "mlp", "mamba2"}
    monkeypatch.setattr(recipe, "facet", lambda kind: None if kind == "mamba2" else count.facet(kind))
    with pytest.raises(Refused, match="Mamba-2 cannot be said in Megatron's arguments"):
        recipe._blocks(report.model, [])
