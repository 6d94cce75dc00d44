"""Every preset's plan and arguments, as text under review: a change that moves them shows in the diff.

`pytest tests/test_golden.py --rewrite-golden` writes them anew.
"""

import itertools
from pathlib import Path

import pytest
from presets import NAMES, lowered
from test_rows import ODD, odd

from nam_megatron import argv, report
from nam_megatron.budget import text

GOLDEN = Path(__file__).parent / "golden"
# Sizes that are all different: what two swapped ones would not survive. Their arguments are those of test_rows.py.
ODDLY = {f"odd_{name.replace(' ', '_')}": name for name in ODD}
FILES = {"plan.txt": report.plan_text, "args.txt": argv.lines, "budget.txt": text.golden}


@pytest.mark.parametrize(("file", "name"), [*itertools.product(FILES, NAMES), *itertools.product(["budget.txt"], ODDLY)])
def test_preset_is_as_reviewed(name, file, rewrite_golden):
    path, text = GOLDEN / name / file, FILES[file](odd(ODDLY[name])[2] if name in ODDLY else lowered(name))
    if rewrite_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: pytest tests/test_golden.py --rewrite-golden"
    assert text == path.read_text()


def test_no_golden_without_a_preset():
    assert {p.name for p in GOLDEN.iterdir()} == {*NAMES, *ODDLY}
