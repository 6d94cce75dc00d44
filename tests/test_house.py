"""The shape of the house: who may import whom, and measures that may not get worse."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import house
import pytest
from tiers import SLOW_ALONE, few

from nam_megatron.recipe.keys import keys_at

# What each measure is at most. One that gets better takes its bound along.
CIRCLE, PRIVATE, PYTHON, GOLDEN = 1, 0, 125_007, 6_315


def test_imports_keep_to_the_layers():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


def test_no_circle_of_imports_grows():
    largest = next(iter(house.circles_of_imports()), [])
    assert len(largest) <= CIRCLE, largest


def test_a_kind_is_named_in_its_folder_and_where_there_is_a_reason():
    assert house.naming_a_kind() == house.MAY_NAME.keys()


def test_no_more_files_import_what_hydra_keeps_for_itself():
    assert len(house.in_hydras_private_modules()) <= PRIVATE, house.in_hydras_private_modules()


def test_the_house_does_not_grow_past_its_walls():
    counts = house.lines()
    python = sum(n for area, n in counts.items() if area != "golden")
    assert python <= PYTHON and counts["golden"] <= GOLDEN, counts


def test_each_file_of_tests_has_quick_ones(pytestconfig):
    """And so has each test of which few cases are; of all that is collected, whatever runs of it."""
    assert pytestconfig.stash[SLOW_ALONE] == []


@pytest.mark.parametrize(("said", "quick"), [((1,), "a"), ((2,), "ac"), (("b", "d"), "bd"), (("x",), "")])
def test_few_cases_are_quick(said, quick):
    class Case:
        def __init__(self, name):
            self.nodeid, self.callspec, self.marks = (
                f"t.py::t[{name}]",
                SimpleNamespace(id=name),
                {"few": pytest.mark.few(*said)},
            )

        def get_closest_marker(self, name):
            return self.marks.get(name)

        def add_marker(self, name):
            self.marks[name] = name

    cases = {name: Case(name) for name in "abcd"}
    alone = few([*cases.values()])
    assert "".join(name for name, case in cases.items() if "slow" not in case.marks) == quick
    assert alone == ([] if quick else ["t.py", "t.py::t"])


# A key of a recipe, and a file of this repository, where a text names one; not `feature.NAME` nor `targets/vX_Y.py`.
KEY = re.compile(r"\b(?:feature|execution|model\.blocks)(?:\.[a-z][a-z0-9_]*)+(?![\w{<*.])")
FILE = re.compile(
    r"(?<![\w/.-])(?:conf|docs|launch|nam_megatron|benchmarks|examples)/(?!\S*(?:NAME|X_Y))[\w/.-]*\w\.(?:py|md|yaml|json|txt)\b"
)


def texts() -> Iterator[tuple[str, str]]:
    """(file, its text) of what is read by people and programs here; not the log's, which tells of what was."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=house.ROOT, text=True).split()
    for name in listed:
        if name.endswith((".py", ".md", ".yaml")) and not name.startswith(("docs/log", "receipts/", "tests/")):
            yield name, (house.ROOT / name).read_text()


def test_what_is_removed_is_named_nowhere():
    """No message, page or comment keeps a key that is gone, or a file."""
    found = []
    for name, text in texts():
        strings = [text]
        if name.endswith(".py"):
            nodes = ast.walk(ast.parse(text))
            strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for key in (m[0] for string in strings for m in KEY.finditer(string)):
            *parents, last = key.split(".")
            found += [(name, key)] * (last not in keys_at(parents))
        found += [(name, m[0]) for m in FILE.finditer(text) if not (house.ROOT / m[0]).exists()]
    assert found == []


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}}, [["c", "d", "e"], ["a", "b"]]),
    ],
    ids=["none", "one", "two"],
)
def test_circles(edges, found):
    assert house.circles(edges) == found


def test_imports_of_every_form_are_seen(tmp_path: Path):
    file = tmp_path / "__init__.py"
    text = (
        "import a.b\nif TYPE_CHECKING:\n    from a import b, c\ndef f():\n    from . import d\n    from .e import g\n"
    )
    file.write_text(text + "from ..h import k\n")
    known = dict.fromkeys(("a.b", "p.q.d"), file)
    assert sorted(house.imports("p.q", file, known)) == ["a", "a.b", "a.b", "p.h", "p.q.d", "p.q.e"]
