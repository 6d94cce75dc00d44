"""A sample of mistakes in our own code is noticed; tests/mutate_code.py tries all of them."""

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
    return [x for x in [a, b, 1] if x != c], {"k": a}, re.compile(r"(a|b|c)")
"""
MADE = {
    "SwapArguments": ["g(b, a, x=b, y=c)", "g(a, b, x=c, y=b)"],
    "DropElement": ["g(a, b, y=c)", "g(a, b, x=b,)", "in [ b, 1] if", "in [a, 1] if", "in [a, b,] if"],
    "DropOperand": ["if b:", "if a:", "in [a, b, 1]], {"],
    "DropStatement": ["        pass\n        max", "y=c)\n        pass\n"],
    "DropAlternative": ['r"(a|c)"', 'r"(a|b)"'],
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
            assert (mutate_code.REPO / test.split()[0].partition("::")[0]).is_file(), f"{name}: {test}"


def test_a_sample_of_mistakes_is_noticed():
    """Which ones, the seed and the code say. A survivor or two get their test when the whole is tried, more are a hole."""
    words = ["groups=judges,receipts", "sample=4", "seed=26", "workers=1", "trusted=true"]
    command = [sys.executable, str(HERE / "mutate_code.py"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "4 mutants" in ran.stderr and ran.stdout.count("survived ") <= 3, (
        ran.stdout + ran.stderr
    )  # one of them is the sum
