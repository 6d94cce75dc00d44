"""Every preset's plan and arguments, as text under review: a change that moves them shows in the diff.

`pytest tests/test_golden.py --rewrite-golden` writes them anew.
"""

from pathlib import Path

import pytest
from presets import NAMES, lowered

from nam_megatron import argv, report
from nam_megatron.budget import text

GOLDEN = Path(__file__).parent / "golden"
FILES = {"plan.txt": report.plan_text, "args.txt": argv.lines, "budget.txt": text.golden}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", FILES)
def test_preset_is_as_reviewed(name, file, rewrite_golden):
    path, text = GOLDEN / name / file, FILES[file](lowered(name))
    if rewrite_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: pytest tests/test_golden.py --rewrite-golden"
    assert text == path.read_text()


def test_no_golden_without_a_preset():
    assert {p.name for p in GOLDEN.iterdir()} == set(NAMES)
