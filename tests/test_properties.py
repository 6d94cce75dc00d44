"""Whatever a recipe holds, it becomes legal arguments or is refused with a message and a key. Nothing else, ever."""

import copy
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from presets import NAMES, changed, check_words, lowered

from nam_megatron import report
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import Recipe, conf_dir, from_tree, load, to_tree
from nam_megatron.words.setting import section


def tree_of(name):
    return to_tree(lowered(name).plan.recipe)


TREE = tree_of(NAMES[0])


def many(examples):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def judge(recipe, tree=()):
    """`recipe` makes a Recipe or refuses; `tree`: what it is made of, whose own keys may be named too."""
    try:
        lowering = translate(recipe())
    except Refused as refused:
        assert refused.render().startswith("error: ")
        for problem in refused.problems:
            assert problem.message.strip()
            assert problem.key is None or problem.key in tree or known(problem.key), problem
        return None
    words = argv.argv(lowering)
    check_words(words)
    assert all("\0" not in word and "\n" not in word for word in words)
    plan = argv.plan_json(lowering)
    assert translate(from_tree(json.loads(plan)["recipe"])) == lowering
    assert len(lowering.plan.layers) == lowering.plan.recipe.model.depth
    script = argv.run_script(lowering)
    begin = ("#", "set ", "export ", "unset ", "python -c ", "exec ", "  --", "  '--")
    assert all(line.startswith(begin) for line in script.splitlines())
    assert report.plan_text(lowering) and argv.lines(lowering) and argv.flat_yaml(lowering)
    try:
        assert argv.shell(lowering).split() == list(argv.words(lowering))
    except Refused as refused:
        assert "in `$(...)`" in refused.problems[0].message
    return lowering


def known(key):
    """A key of the recipe or of a section that exists: only its last part may be the user's own."""
    *parents, _ = key.replace("[", ".[").split(".")
    model = Recipe
    for part in parents:
        if part.startswith("[") or not hasattr(model, "model_fields"):
            return True  # inside a list or a free mapping
        if part not in model.model_fields:
            return False
        annotation = model.model_fields[part].annotation
        model = None if getattr(annotation, "__origin__", None) is dict else section(annotation)
    return True


# Mutated trees ------------------------------------------------------------------------------------------------------

text = st.text(max_size=12) | st.sampled_from(
    ["", "8", "true", "null", "???", "${x}", "mla", "--bf16", "a b", "a\nb", "|", "NaN"]
)
numbers = st.integers() | st.integers(-2, 70) | st.floats() | st.sampled_from([10**30, 2**63, -0.0, 1e400, True])
junk = st.recursive(
    st.none() | st.booleans() | numbers | text | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(text | st.integers(), inner, max_size=3)
    | st.tuples(inner),
    max_leaves=5,
)


def paths(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


@st.composite
def mutated(draw):
    tree = copy.deepcopy(draw(st.sampled_from(NAMES).map(tree_of)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted((p for p in paths(tree) if p), key=str)))
        node = tree
        for part in path[:-1]:
            node = node[part]
        what = draw(st.sampled_from(["replace", "near", "near", "near", "delete", "add", "swap"]))
        if what == "delete":
            del node[path[-1]]
        elif what == "add" and isinstance(node, dict):
            node[draw(text | st.integers())] = draw(junk)
        elif what == "swap" and isinstance(node, dict):
            node[path[-1]] = node[draw(st.sampled_from(sorted(node, key=str)))]
        elif what == "near":
            node[path[-1]] = draw(near(node[path[-1]]))
        else:
            node[path[-1]] = draw(junk)
    return tree


def near(value):
    """Another value of the same type, which has a chance."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([value * 2, value // 2, value + 1, value - 1, 1, 2, 4, 16])
    if isinstance(value, float):
        return st.sampled_from([value * 2, value / 2, 0.5])
    if isinstance(value, str):
        return st.sampled_from([*KINDS, "none", "full", "selective", "AEM|R", "AE", value + "x"])
    if value is None:
        return st.sampled_from(["x", 1, 0.5])
    return st.just(value)


@pytest.mark.slow
@many(400)
@given(mutated())
def test_mutated_trees(tree):
    judge(lambda: from_tree(tree), tree if isinstance(tree, dict) else ())


@many(200)
@given(junk)
def test_trees_of_anything(tree):
    judge(lambda: from_tree(tree), tree if isinstance(tree, dict) else ())


# Plausible recipes: most are translated --------------------------------------------------------------------------------

small = st.sampled_from([1, 2, 3, 4, 8])
substitute = st.fixed_dictionaries(
    {"letter": st.just("A"), "ranks": st.lists(st.integers(0, 12), max_size=6), "kind": st.sampled_from(["dsa", "mla"])}
)
ASPECTS = {  # what is drawn anew, by section
    "pattern": lambda: {"model.pattern": st.text("AEMR", min_size=1, max_size=14), "model.substitute": st.just([])},
    "odd pattern": lambda: {"model.pattern": st.text("AEMRDG|x", min_size=1, max_size=14)},
    "depth": lambda: {"model.depth": st.integers(1, 80)},
    "attention": lambda: {"model.letters.A": st.sampled_from(["attention", "mla", "dsa"])},
    "experts": lambda: {"model.letters.E": st.sampled_from(["moe", "mlp"]), "model.blocks.moe.top_k": st.integers(1, 17)},
    "sparse": lambda: {"model.substitute": st.lists(substitute, max_size=2), "model.letters.A": st.just("mla")},
    "sharing": lambda: {"model.blocks.dsa.full_every": st.integers(1, 4)},
    "pipeline": lambda: {"parallel.pipeline": small, "parallel.virtual_pipeline": small},
    "expert layout": lambda: {"parallel.expert": small, "parallel.expert_tensor": small},
    "tensor": lambda: {"parallel.tensor": small, "parallel.sequence": st.booleans()},
    "context": lambda: {"parallel.context": small},
    "world": lambda: {"cluster.nodes": small, "cluster.gpus_per_node": st.sampled_from([1, 2, 4, 8])},
    "batch": lambda: {"schedule.micro_batch_size": small, "schedule.global_batch_size": st.integers(1, 40).map(lambda n: 16 * n)},
    "mtp": lambda: {"feature.mtp.depths": st.integers(0, 2)},
    "recompute": lambda: {
        "feature.recompute.granularity": st.sampled_from(["full", "selective"]),
        "feature.recompute.modules": st.sampled_from([[], ["core_attn"], ["mlp", "moe"]]),
        "feature.recompute.method": st.sampled_from([None, "uniform", "block"]),
        "feature.recompute.layers": st.sampled_from([None, 1, 2]),
    },
    "fsdp": lambda: {"feature.megatron_fsdp.enabled": st.booleans()},
    "texts": lambda: {"preset.about": text, "schedule.load": text, "lane.name": text},
}  # fmt: skip


@st.composite
def plausible(draw):
    name = draw(st.sampled_from(NAMES))
    changes: dict = {}
    for aspect in draw(st.sets(st.sampled_from(sorted(ASPECTS)), max_size=4)):
        for key, values in ASPECTS[aspect]().items():
            changes[key] = draw(values)
    return name, changes


@pytest.mark.slow
def test_plausible_recipes():
    """Both ends are reached often: recipes that are translated, and recipes that are refused."""
    outcomes = []

    @many(400)
    @given(plausible())
    def run(case):
        outcomes.append(judge(lambda: changed(*case)) is not None)

    run()
    assert 50 < sum(outcomes) < len(outcomes) - 50, (sum(outcomes), len(outcomes))


# Overrides, through Hydra ---------------------------------------------------------------------------------------------

KEYS = [".".join(map(str, p)) for p in paths(TREE) if p and not any(isinstance(part, int) for part in p)]
GROUPS = sorted(p.name for p in conf_dir().iterdir() if p.is_dir())
values = (
    st.sampled_from(
        [
            "",
            "null",
            "true",
            "52.5",
            "'8'",
            "nan",
            "[1,2]",
            "{a: 1}",
            "${lane.tensor}",
            "${x}",
            "${",
            "1,2",
            "???",
            "'",
            "(",
            "=",
            "mla",
        ]
    )
    | st.integers(-3, 100).map(str)
    | st.sampled_from(NAMES)
    | st.text(max_size=8)
)
override = st.builds(
    lambda sign, key, equals, value: f"{sign}{key}{equals}{value}",
    st.sampled_from(["", "", "", "", "+", "++", "~"]),
    st.sampled_from(KEYS + GROUPS * 4) | st.sampled_from(KEYS).map(lambda k: k[:-1] + "x") | st.text(max_size=8),
    st.sampled_from(["=", "=", "=", "=", "@x=", ""]),
    values,
)


@many(150)
@example("nam56r", ["+="])  # an assertion of Hydra's
@example("nam56r", ["lane=null"])  # a ValueError
@example("nam56r", ["x" * 9000 + "=1"])  # an OSError
@given(st.sampled_from(NAMES), st.lists(override, min_size=1, max_size=3))
def test_overrides(name, overrides):
    judge(lambda: load(name, overrides))


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {1: 2},
        {"model": None},
        TREE | {"model": []},
        TREE | {"assumptions": {"a\nrm -r": "b"}},
        TREE | {"assumptions": {3: "b"}},
        TREE | {"model": TREE["model"] | {"hidden_size": 10**5000}},  # Python refuses to print it
        TREE | {"feature": TREE["feature"] | {"mtp": {"depths": True, "loss_weight": 0.1}}},  # True == 1
    ],
    ids=range(8),
)
def test_cases_once_found(tree):
    with pytest.raises(Refused):
        from_tree(tree)
    judge(lambda: from_tree(tree), tree if isinstance(tree, dict) else ())
