"""The mends of Megatron-Bridge: made for the source of this version, and what they do. Of Megatron: tests/cpu/test_mends_installed.py."""

import pytest
from megatron.bridge.data import loaders
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import runtime_config_update

import nam_megatron.nemo as nemo
from nam_megatron.errors import Refused
from nam_megatron.mends import Mend, bridge_exit, install
from nam_megatron.mends.series import SERIES


def test_each_place_has_the_source_that_its_mend_was_made_for():
    new = [mend for mend in SERIES if mend not in install.installed()]
    assert [problem.message for mend in new for problem in install.objections(mend)] == []


def test_another_source_is_refused_when_a_container_is_validated(ranks, monkeypatch):
    """As every start of a training does, whoever's runner it is."""
    ranks(8)
    done = []
    # may stand in this process already
    others = {mend.name: mend for mend in SERIES if mend.name != "bridge_evaluation"}
    monkeypatch.setattr(install, "_INSTALLED", dict(others))
    monkeypatch.setattr(Mend, "install", property(lambda self: lambda plan: done.append(self.name)))
    runtime_config_update(nemo.recipe("nam56r"))
    assert done == ["bridge_evaluation"]
    monkeypatch.setattr(install, "_INSTALLED", dict(others))
    monkeypatch.setattr(loaders, "build_train_valid_test_data_loaders", lambda *_: None)
    with pytest.raises(Refused, match="`bridge_evaluation` is about, has another source"):
        runtime_config_update(nemo.recipe("nam56r"))
    assert done == ["bridge_evaluation"]


def test_a_checkpoint_that_bridge_cannot_load_is_no_success(monkeypatch):
    monkeypatch.setattr(checkpointing, "sys", checkpointing.sys)
    bridge_exit.install(None)
    with pytest.raises(SystemExit) as end:
        checkpointing.sys.exit()
    assert end.value.code == bridge_exit.ENDED
