"""What a recipe that no preset has becomes, a line a case: what is refused and by what, or what moves (said.txt)."""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from presets import changed, lowered, written
from test_lower import DELTA, DESIGN, NATIVE

from nam_megatron.budget import search, serving
from nam_megatron.budget.cost import cost
from nam_megatron.budget.memory import budget
from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.errors import Problem, Refused
from nam_megatron.recipe import from_tree, keys_at, load, to_tree

FP8 = "nam56r_native_dp_fp8"
BASES = {"NATIVE": NATIVE, "DESIGN": DESIGN, "DELTA": DELTA, "FP8": FP8}
TABLE = Path(__file__).parent / "said.txt"


def cases() -> Iterator[tuple[str, str, str]]:
    """Of each line its preset, what is changed, and what comes of it."""
    base = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("== "):
            base = BASES[line[3:]]
        elif line[:1] not in "#":
            words, _, outcome = line.partition(" => ")
            yield base, words, outcome


def keys(words: str) -> dict[str, object]:
    """`a.b=1 c=[x, y]` -> the keys and their values as YAML."""
    parts = re.findall(r"(\S+?)=(.+?)(?=\s+[\w.]+=|\s*$)", words)
    return {key: yaml.safe_load(value) for key, value in parts}


@cache
def told(base: str) -> tuple[frozenset[str], dict[str, float]]:
    return moved(translate(changed(base, {})))


def moved(lowering: Lowering) -> tuple[frozenset[str], dict[str, float]]:
    """What Megatron is told and must hold; and sums: parameters, bytes of a rank at its moments, operations of a token."""
    held = {f"{s.name}={s.value}" for s in lowering.settings}
    env = {f"{e.name}={e.value}" for e in lowering.env}
    priced, work = budget(lowering.plan), cost(lowering.plan)
    sums: dict[str, float] = {"parameters": priced.parameters, "active": priced.active}
    for stage in priced.stages:
        for phase, moment in stage.moments.items():
            sums[phase] = max(sums.get(phase, 0), moment.total)
    sums |= {
        "GFLOP": round(work.model / 1e9, 3),
        "hardware": round(work.hardware / 1e9, 3),
        "megatron": round(work.megatron / 1e9, 3),
    }
    sums["layers"] = " ".join(
        f"{kind} {sum(l.kind == kind for l in lowering.plan.layers)}" for kind in sorted(lowering.plan.kinds)
    )
    return frozenset(held | env), sums


def outcome(base: str, words: str) -> str:
    try:
        now, sums = moved(translate(changed(base, keys(words))))
    except Refused as refused:
        return "refused: " + "; ".join(shown(problem) for problem in refused.problems)
    before, were = told(base)
    new = sorted(now - before)
    gone = sorted(name for name in {w.split("=")[0] for w in before} - {w.split("=")[0] for w in now})
    parts = [*new[:12], *(f"no {name}" for name in gone[:8])]
    parts += [
        f"{name} {value:+d}" if isinstance(value, int) else f"{name} {value}" for name, value in differing(sums, were)
    ]
    return ", ".join(parts)


def differing(sums: dict, were: dict) -> Iterator[tuple[str, object]]:
    for name, value in sums.items():
        if value != were.get(name):
            yield name, value - were[name] if isinstance(value, int) and name in were else value


def shown(problem: Problem) -> str:
    """Its law or the words of its message, and its key, which is one of a recipe."""
    *parents, last = re.sub(r"\[\d+\]", "", problem.key or "model.depth").split(".")
    assert problem.key is None or last in keys_at(parents) or problem.key in OTHERS, problem
    assert problem.hint is None or " " in problem.hint or "=" in problem.hint or "`" in problem.hint, problem
    return f"{problem.law or problem.message} @ {problem.key}" + (f" ({problem.place})" if problem.place else "")


# Keys of a command, and a name's.
OTHERS = {"sweep", "fit", "batch", "context", "feature", "assumptions.mine.key", "assumptions.a.key"}


@pytest.mark.parametrize(
    ("base", "words", "comes"), list(cases()), ids=lambda text: text[:80] if isinstance(text, str) else None
)
def test_what_comes_of_a_recipe(base, words, comes):
    assert outcome(base, words) == comes


# What is refused before or beside translating: what was asked -> what asks it.
def stored(preset: str, key: str, value: object = None) -> Callable[[], object]:
    """A stored recipe with another value at `key`; without it where there is none."""

    def ask() -> object:
        tree = to_tree(lowered(preset).plan.recipe)
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        if value is None:
            del node[last]
        else:
            node[last] = value
        return from_tree(tree)

    return ask


OFF = written(NATIVE)["feature"]["muon"]
ASKED: dict[str, Callable[[], object]] = {
    "stored without model.blocks.moe": stored(NATIVE, "model.blocks.moe"),
    "stored without model.blocks.mlp": stored(DESIGN, "model.blocks.mlp"),
    "stored without optim.min_lr": stored(NATIVE, "optim.min_lr"),
    "stored without model.depth": stored(NATIVE, "model.depth"),
    "stored with mamba3": stored(NATIVE, "model.blocks.mamba3", written(NATIVE)["model"]["blocks"]["mamba3"]),
    "stored with a feature that is off": stored(NATIVE, "feature.muon", {k: v for k, v in OFF.items() if k != "tp_mode"}),
    "stored with a key that nothing reads": stored(NATIVE, "optim.wsd_steps", 3),
    "stored with a wrong assumption": stored(NATIVE, "assumptions", {"a": {"key": "model.wide", "value": 1, "why": "b"}}),
    "stored with a key of no kind": stored(NATIVE, "model.blocks.moe.toes", 1),
    "stored with half of a kind": stored(NATIVE, "model.blocks.mla", {"q_lora_rank": 64}),
    "stored with no key": stored(NATIVE, "assumptions", {3: {"key": "model.depth", "value": 1, "why": "b"}}),
    **{f"loaded {' '.join(words)}": partial(load, NATIVE, words) for words in (
        ("feature=fp8",), ("lane.tensor=2",), ("lane.blocks.M=mamba3",), ("lane.sequence=true",), ("model.depth=${oc.env:HOME}",),
        ("model.depth=${nope}",), ("~model.depth",), ("model.blocks.mamba3.heads=4",), ("feature.muon.momentum=0.9",),
    )},
    **{f"sweep {text}": partial(search.values, text) for text in ("depth:1", "depth:1:x", "depth:3:2", "depth:1:9:0", "depth:1:20001:2")},
    **{f"search {name}": partial(search.resolve, lowered(NATIVE).plan.recipe, name, "fit") for name in ("heads", "hidden_sze", "no")},
    **{f"serving {batch} {context}": partial(serving.serve, lowered(NATIVE).plan, batch, context)
       for batch, context in ((0, 1), (1, 0), (1, 4097), (1, 4096))},
    "a plan that is no JSON": partial(argv.parse_plan, "{", "p"),
    "a plan that is a list": partial(argv.parse_plan, "[]", "p"),
    "a plan without a recipe": partial(argv.parse_plan, "{}", "p"),
    "a plan that cannot be": lambda: argv.parse_plan('{"recipe": {}}', "p"),
    "no plan": partial(argv.load_plan, "/nope/plan.json"),
}  # fmt: skip


BESIDE = [line.split(" => ") for line in (Path(__file__).parent / "said_beside.txt").read_text().splitlines()]


@pytest.mark.parametrize(("name", "comes"), BESIDE, ids=[name for name, _ in BESIDE])
def test_what_comes_of_what_is_asked_beside_a_plan(name, comes):
    assert beside(ASKED[name]) == comes


def beside(ask: Callable[[], object]) -> str:
    try:
        return f"stands: {type(ask()).__name__}"
    except Refused as refused:
        return "refused: " + "; ".join(f"{problem.message} @ {problem.key}" for problem in refused.problems)


def test_everything_that_can_be_asked_is():
    assert [name for name, _ in BESIDE] == list(ASKED)
