"""Each law refuses a recipe and lets its neighbour pass, and says all of itself."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import megatron.core as megatron_core
import pytest
import yaml
from command import warm
from test_lower import REFUSALS, problems_of
from test_said_right import said_of

from nam_megatron.laws import book, experts
from nam_megatron.laws.found import FOUND
from nam_megatron.laws.law import CATEGORIES
from nam_megatron.recipe import Recipe, keys_at

ROOT = Path(__file__).parent.parent
ACCEPTED = yaml.safe_load((Path(__file__).parent / "laws.yaml").read_text())
STANDS = {*Recipe.model_fields, *keys_at(["feature"]), *keys_at(["model", "blocks"]), "recipe", "plan", "target"}
NAMES = pytest.mark.parametrize("law", book.LAWS, ids=lambda law: law.id)


@cache
def refused():
    """Law -> (base, changes) of the refusal with the fewest findings."""
    found = {}
    for base, changes, *_ in REFUSALS:
        problems = problems_of(base, changes)
        for law in {p.law for p in problems}:
            if law not in found or len(problems) < found[law][0]:
                found[law] = len(problems), base, changes
    return {law: case for law, (_, *case) in found.items()}


def followed(changes, words):
    """`changes` after somebody typed these words, too."""
    words = words.split()
    gone = {word[1:] for word in words if word.startswith("~")}
    said = dict(word.split("=", 1) for word in words if not word.startswith("~"))
    return {k: v for k, v in changes.items() if k not in gone} | {k: yaml.safe_load(v) for k, v in said.items()}


@NAMES
def test_a_law_refuses_a_recipe_and_lets_its_neighbour_pass(law):
    assert law.id in refused(), "no case of REFUSALS breaks it"
    assert law.id in ACCEPTED, "laws.yaml does not say what its neighbour is"
    base, changes = refused()[law.id]
    after = followed(changes, ACCEPTED[law.id])
    assert after != changes
    assert problems_of(base, after) == ()


@NAMES
def test_each_way_out_that_a_law_offers_is_one_by_itself(law):
    base, changes = refused()[law.id]
    hint = next(p.hint or "" for p in problems_of(base, changes) if p.law == law.id)
    offers = re.split(r",? or |, (?=leave|take|set)", hint)
    ways = {" ".join(re.findall(r"`([\w.]+=[^`]*)`", offer)) for offer in offers if offers[1:] and "NAME" not in offer}
    if law.id == "graphs-shared-top-k":
        ways |= {"feature.cuda_graphs.modules=[mamba]"}  # `attn` is left out
    for words in ways - {""}:
        if all("=" in word for word in words.split()):
            assert law.id not in {p.law for p in problems_of(base, followed(changes, words))}, words


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_dispatcher_is_offered_only_where_the_layout_may_have_it(ep, etp):
    layout = SimpleNamespace(expert=ep, expert_tensor=etp)
    words = experts._counts_on_host(SimpleNamespace(on_gpu=True, dispatcher_is_ours=False), layout)
    offered = re.findall(r"dispatcher=(\w+)", words["or_ours"])
    assert len(offered) == (etp == 1)
    for name in offered:
        moe = SimpleNamespace(dispatcher=name, on_gpu=True, fused_router_gradient=False)
        assert experts._on_several(moe, layout) is None


def test_laws_yaml_has_no_law_that_is_gone():
    assert sorted(ACCEPTED.keys() - {law.id for law in book.LAWS}) == []


@NAMES
def test_a_law_says_all_of_itself(law):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", law.id) and law.category in CATEGORIES and law.known_from
    *parents, last = law.key.split(".")
    assert last in keys_at(parents)
    assert set(law.about) <= STANDS and law.about


# Where a recipe, a command line, a plan file or an environment is read.
READERS = [*(ROOT / "nam_megatron" / "recipe").glob("*.py"), *(ROOT / "nam_megatron" / f"{name}.py" for name in (
    "app", "compile/argv", "compile/compose", "compile/files", "compile/lower", "compile/plan", "compile/sources", "errors", "installed",
    "judge/same", "laws/book", "migrate", "packages", "tracker", "train", "translate", "verify", "words/regular",
))]  # fmt: skip


def ids(path):
    """Of each problem that a file makes, or refuses with: the id that is written there; None where none is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and said_of(node):
            law = next((word.value for word in node.keywords if word.arg == "law"), None)
            if not (isinstance(law, ast.Name) and path.stem == "errors"):  # `Refused` hands its own on
                yield law.value if isinstance(law, ast.Constant) else None


def test_what_is_refused_beside_a_plan_has_an_id_and_each_id_is_met():
    named = {path.name: set(ids(path)) for path in READERS}
    assert {name for name, found in named.items() if None in found} == set()
    assert set().union(*named.values()) == {found.id for found in FOUND}


def test_a_law_is_listed_and_explained():
    listed = {line.split()[0] for line in warm("list=laws").out.splitlines()}
    assert listed == set(book.BY_ID)
    ran = warm("explain=softmax-of-one", "parallel.tensor=3")  # whatever the recipe
    assert ran.code == 0 and ran.out.startswith(
        "softmax-of-one\n  is      softmax over one chosen expert has no gradient\n"
    )


def test_budget_and_lint_say_what_is_waived(tmp_path):
    said = (
        "conf=nam56r_native_dp",
        "model.attention_dropout=0.1",
        "precision.attention_kernels=flash_attention_4",
        "allow.flash4-dropout=mine",
    )
    line = "untried, and allowed: FlashAttention 4 has not been tried with dropout (`flash4-dropout`: mine)"
    assert line in warm(*said, module="nam_megatron.budget.__main__").out.splitlines()
    assert json.loads(warm(*said, "format=json", module="nam_megatron.budget.__main__").out)["untried"] == {
        "flash4-dropout": "mine"
    }
    assert warm(*said, f"out={tmp_path}").code == 0
    found = warm(str(tmp_path / "run.sh"), "format=json", module="nam_megatron.lint.__main__")
    assert line in json.loads(found.out)["notes"]


def test_a_source_is_a_file_that_is_there():
    megatron = Path(megatron_core.__file__).parent.parent
    for source in {law.known_from for law in book.LAWS}:
        for path in re.findall(r"\b(?:core|training|nam_megatron|docs)/[\w/.]+\b", source):
            root = megatron if path.startswith(("core/", "training/")) else ROOT
            assert (root / path).exists(), source
