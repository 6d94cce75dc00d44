"""A sample of mistakes in our own code is noticed; tests/mutate_code.py tries all of them."""

import signal
import subprocess
import sys
from pathlib import Path

import mutate_code
import pytest
from mistakes import OWN

HERE = Path(__file__).parent
BEFORE = """
def f(a, b, *, c):
    if a and b:
        g(a, b, x=b, y=c)
        max(a, b)
    self.seen = a
    a.total, b = max(b), b.abs().sum(dim=0).item()
    return [x for x in [a, b, 1] if x != c], {"k": a}, re.compile(r"(a|b|c)")
"""
MADE = {
    "SwapArguments": ["g(b, a, x=b, y=c)", "g(a, b, x=c, y=b)"],
    "DropElement": ["g(a, b, y=c)", "g(a, b, x=b,)", "in [ b, 1] if", "in [a, 1] if", "in [a, b,] if"],
    "DropOperand": ["if b:", "if a:", "in [a, b, 1]], {"],
    "DropStatement": ["        pass\n        max", "y=c)\n        pass\n"],
    "DropAlternative": ['r"(a|c)"', 'r"(a|b)"'],
    "DropReduction": ["b = ( b), b.abs()", "b.abs().item()"],
    "SwapPair": ["b, a.total = max(b), b.abs()", "= b.abs().sum(dim=0).item(), max(b)"],
    "StaleState": ["        max(a, b)\n    pass\n    a.total"],
}  # fmt: skip


@pytest.mark.parametrize("operator", OWN, ids=lambda o: o.__name__)
def test_our_operators_make_the_mistakes_that_they_are_named_for(operator):
    from cosmic_ray.mutating import mutate_code as mutated

    found = []
    while (text := mutated(BEFORE, operator(), len(found))) is not None:
        found.append(text)
        compile(text, "mutant", "exec")
    assert len(found) == len(MADE[operator.__name__])
    for part in MADE[operator.__name__]:
        assert any(part in text for text in found), (part, found)
    assert BEFORE not in found


def test_every_group_has_its_files_and_its_tests():
    for name, group in mutate_code.GROUPS.items():
        for glob in group.files:
            assert list(mutate_code.REPO.glob(glob)), f"{name}: {glob}"
        for test in group.tests:
            for word in (word for word in test.split() if "/" in word):
                path, _, function = word.removeprefix("--deselect=").partition("::")
                assert f"def {function}" in mutate_code.written(path), f"{name}: {word}"  # pytest would stop, or run it


@pytest.mark.parametrize(
    ("code", "text", "word"),
    [
        (0, "", "survived"), (1, "FAILED", "killed"), (2, "ImportError", "killed"), (-signal.SIGSEGV, "", "killed"),
        (5, "3 deselected", "undecided"), (4, "ERROR: not found: a.py::test_gone", "undecided"), (None, "", "undecided"),
        (-signal.SIGXCPU, "", "undecided"),
    ],
)  # fmt: skip
def test_only_a_test_that_ran_and_failed_has_noticed(code, text, word):
    assert mutate_code.verdict(code, text) == word


def test_a_kernel_has_the_tests_that_interpret_it():
    """Those of an exported model name the step of Mamba-3, and nothing else that runs without a GPU does."""
    assert "tests/blocks/test_interpreted.py" in mutate_code.naming("nam_megatron/blocks/mamba3/step.py")
    assert "tests/blocks/test_router.py" in mutate_code.naming("nam_megatron/blocks/moe/experts.py")
    assert mutate_code.interpreting("nam_megatron.verify") == set()


def test_a_file_is_asked_of_the_tests_that_name_it():
    """First, and where its group has none of them behind those that it has."""
    of_group = mutate_code.GROUPS["lint"].tests
    assert mutate_code.asked("lint", "nam_megatron/lint/others.py") == [*of_group, "tests/test_lint_others.py"]
    first, *others = mutate_code.asked("data", "nam_megatron/data/indexed.py")
    assert first == "tests/test_indexed.py" and {first, *others} == {*mutate_code.GROUPS["data"].tests}


# Programs that no test names, nor their folder: a mistake in them nobody can notice but by chance.
UNNAMED: set[str] = set()


def test_every_program_has_tests_that_should_notice_a_mistake_in_it():
    found = {
        str(p.relative_to(mutate_code.REPO))
        for g in mutate_code.GROUPS.values()
        for f in g.files
        for p in mutate_code.REPO.glob(f)
    }
    assert found >= set(mutate_code.sources())
    alone = {g.files[0] for g in mutate_code.GROUPS.values() if g.tests == ("tests/test_said_right.py",)}
    assert {path for path in alone if (mutate_code.REPO / path).read_text().count("\n") > 5} == UNNAMED


@pytest.mark.slow
def test_what_does_more_harm_is_drawn_more_often_and_pieces_are_the_whole():
    chosen = mutate_code.drawn(list(mutate_code.GROUPS), ["nam_megatron/laws/found.py", "launch/host/gpu.py"], 24, 7)
    assert len({(mutant.path, mutant.line) for _, mutant in chosen}) == 24
    again = mutate_code.drawn(list(mutate_code.GROUPS), ["nam_megatron/laws/found.py", "launch/host/gpu.py"], 24, 7)
    assert [mutant for _, mutant in again] == [mutant for _, mutant in chosen]
    of_laws = sum(mutant.path.startswith("nam_megatron/laws") for _, mutant in chosen)
    assert of_laws / 24 > 144 / (144 + 435), "three times as often as by its lines"


def test_what_nobody_has_decided_is_no_part_of_the_score():
    mutant = mutate_code.Mutant("a.py", "X", 0, 1, "a", "b")
    words = ("killed", "killed", "survived", "undecided")
    told = mutate_code.report([("g", mutant, {"word": word, "seconds": 1.0}) for word in words], 4, 0)
    assert (told["mutants"], told["noticed"], told["undecided"], len(told["survived"])) == (4, 2, 1, 1)


def test_mistakes_in_the_last_commits_files_are_noticed():
    """Twelve, drawn by its hash. A survivor gets its test, or its reason in SAME: `python tests/mutate_code.py commit` names it."""
    command = [sys.executable, str(HERE / "mutate_code.py"), "commit"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and " mutants" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
