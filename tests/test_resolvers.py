"""No recipe reads the machine: a preset with `${oc.env:TOKEN}` put the token into plan, receipt and log."""

import pytest
from omegaconf import OmegaConf

from nam_megatron.errors import Refused
from nam_megatron.recipe import load


@pytest.mark.parametrize(
    "value",
    [
        "'${oc.env:TOKEN}'", "'${oc.env:TOKEN,x}'", "'/x/${oc.env:TOKEN}/y'", "'${oc.decode:${oc.env:TOKEN}}'", "'${hydra:runtime.cwd}'",
        "'${oc.${preset.alias_of}:TOKEN}'", "'${now:%Y}'", "'${mine:x}'",
    ],
)  # fmt: skip
def test_a_resolver_that_reads_the_machine_is_refused(monkeypatch, value):
    monkeypatch.setenv("TOKEN", "hunter2")
    if not OmegaConf.has_resolver("mine"):
        OmegaConf.register_new_resolver("mine", lambda x: f"hunter2 {x}")
    with pytest.raises(Refused) as refused:
        load("nam56r_smoke", [f"schedule.save={value}", "schedule.save_interval=1", "preset.alias_of=env"])
    (problem,) = refused.value.problems
    assert problem.key == "schedule.save" and "reads this machine" in problem.message
    assert "hunter2" not in refused.value.render()


def test_one_that_reads_the_config_is_not():
    recipe = load(
        "nam56r_smoke", ["schedule.save='/x/${oc.select:model.family}/${preset.name}'", "schedule.save_interval=1"]
    )
    assert recipe.schedule.save == "/x/NAM56R/nam56r_smoke"
    assert OmegaConf.create({"a": "${oc.env:HOME}"}).a  # outside of a recipe it is as it was
