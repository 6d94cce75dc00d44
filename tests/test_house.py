"""The shape of the house: who may import whom, and measures that may not get worse."""

import subprocess
import sys
from pathlib import Path

import house
import pytest

# What each measure is at most. One that gets better takes its bound along.
CIRCLE, PRIVATE, PYTHON, GOLDEN = 1, 0, 113_774, 9_500


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
