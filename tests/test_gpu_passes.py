"""The record of which test of GPUs passed when."""

import ast
from pathlib import Path

from gpu import passes

GPU = Path(__file__).parent / "gpu"


def run(date, *passed, revision="0" * 40):
    return {"revision": revision, "date": date, "device": "a GPU", "gpus": 1, "passed": list(passed)}


def test_of_each_test_the_newest_pass_is_kept():
    found = passes.newest([run("2026-01-01", "a", "b"), run("2026-01-03", "b"), run("2026-01-02", "b", "c")])
    assert [(one["date"], one["passed"]) for one in found] == [
        ("2026-01-03", ["b"]), ("2026-01-02", ["c"]), ("2026-01-01", ["a"]),
    ]  # fmt: skip


def test_a_pass_is_as_old_as_the_oldest_of_its_file_and_an_unknown_commit_is_said():
    here = passes.git("rev-parse", "HEAD").strip()
    runs = [
        run("2026-01-02", "test_dsa.py::a", revision=here),
        run("2026-01-01", "test_dsa.py::b"),
        run("2026-01-03", "test_mla.py::c", revision=here),
    ]
    here = ["test_dsa.py::a", "test_dsa.py::b", "test_dsa.py::d", "test_mla.py::c", "test_moe.py::e"]
    (dsa, *_), (mla, _), _ = found = list(passes.files(runs, here))
    assert [current for _, current in found] == [False, True, False], "an old one, one of this commit, none"
    assert "2 of   3 on record, since 2026-01-01" in dsa and "does not know that commit" in dsa
    assert "1 of   1 on record" in mla and "nothing it tests has changed" in mla


def test_what_a_file_tests_is_where_its_modules_lie_or_everything():
    assert "nam_megatron/blocks/dsa" in passes.tested(GPU / "test_dsa.py")
    assert passes.tested(GPU / "test_four_gpus.py") == passes.tested(GPU / "test_prove.py") == ["nam_megatron"]


def test_what_is_on_record_is_there():
    functions = {
        f"{file.name}::{node.name}"
        for file in GPU.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {test.split("[")[0] for one in passes.read() for test in one["passed"]} <= functions
