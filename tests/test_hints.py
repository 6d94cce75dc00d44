"""Wrong inputs of people (hints.yaml): each is refused with a hint, and whoever follows it gets the model that was meant."""

from pathlib import Path

import pytest
import yaml

from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load, value_at

CASES = yaml.safe_load((Path(__file__).parent / "hints.yaml").read_text())
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["wrong"]))


def recipe(words):
    name, rest = words["conf"], {key: value for key, value in words.items() if key != "conf"}
    return translate(load(name, [f"{key}={value}" for key, value in rest.items()])).plan.recipe


def written(case):
    return dict(word.split("=", 1) for word in case["wrong"])


@pytest.mark.few(6)
@EACH
def test_a_hint_that_is_followed_is_accepted_with_the_model_that_was_meant(case):
    with pytest.raises(Refused) as refused:
        recipe(written(case))
    if case["hint"]:
        assert any(case["hint"] in (problem.hint or "") for problem in refused.value.problems), refused.value.render()
    right = {key: value for key, value in (written(case) | case["follow"]).items() if value is not None}
    found = recipe(right)
    assert {key: value_at(found, key) for key in case["then"]} == case["then"]
