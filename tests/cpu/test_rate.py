"""Our count of operations in Megatron's step line."""

from pathlib import Path

import pytest

from launch.record.steps import STEP, TFLOPS, TIME, parse
from nam_megatron.runtime import rate

LOG = Path(__file__).parents[1] / "launch" / "megatron_0_19_cpu.log"


def test_a_real_line_gets_the_rate_of_its_step_and_keeps_the_rest():
    line = next(line for line in LOG.read_text().splitlines() if STEP.search(line))
    before, after = (parse(text).values for text in (line, rate.beside(line, 5e12)))
    added = after.pop(rate.NAME)
    # 4 sequences of 5 TFLOP in 173.2 ms
    assert added == pytest.approx(4 * 5 / 0.1732, abs=0.05)
    assert before == after and {TIME, TFLOPS} <= set(before)


def test_other_lines_stay_as_they_are():
    for line in LOG.read_text().splitlines():
        if not STEP.search(line):
            assert rate.beside(line, 5e12) == line
