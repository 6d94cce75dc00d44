"""Mends installed into a real Megatron: what they replace is what they were made for, in one order, once."""

import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.mends import SAID, Mend, Moment, Trainer, fsdp, install
from nam_megatron.mends.series import MENDS, SERIES, needed
from nam_megatron.recipe import load

HERE = [mend for mend in SERIES if not any(place.name.startswith("megatron.bridge.") for place in mend.places)]


def plan(*overrides):
    return translate(load("nam56r_smoke", overrides)).plan


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process without mends, whose installs are noted and do nothing."""
    done = []
    monkeypatch.setattr(install, "_INSTALLED", {})
    monkeypatch.setattr(install, "_MODELS", {})
    monkeypatch.setattr(Mend, "install", property(lambda self: lambda *given: done.append((self.name, *given))))
    return done


@pytest.mark.parametrize("mend", HERE, ids=lambda mend: mend.name)
def test_each_place_has_the_source_that_its_mend_was_made_for(mend):
    assert list(install.objections(mend)) == []


def other(*words, **named):
    """Another source than Megatron's."""


def test_another_source_is_refused_and_nothing_is_installed(fresh, monkeypatch):
    monkeypatch.setattr(schedules, "forward_step_calc_loss", other)
    monkeypatch.delattr(layers, "LinearWithGradAccumulationAndAsyncCommunication")
    of = plan("cluster=h200_2", "parallel.context=2", "precision.fused_grad_accumulation=true")
    with pytest.raises(Refused) as refused:
        install.start(of, Trainer.MEGATRON)
    changed, gone = refused.value.problems
    place = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
    assert changed.message.startswith(f"`{place}`, which the mend `context` is about, has another source than the mend")
    assert MENDS["context"].places[0].sha256[:12] in changed.message
    assert "`wgrad`" in gone.message and "cannot be read here" in gone.message
    assert all("docs/mends.md" in problem.hint for problem in (changed, gone))
    assert fresh == [] and install.installed() == ()


def test_another_source_of_a_model_is_refused_before_it_is_touched(fresh, monkeypatch):
    """Nor by another mend, which stands before it."""
    monkeypatch.setattr("megatron.core.models.hybrid.hybrid_model.HybridModel.__init__", other)
    with pytest.raises(Refused, match="the mend `llama_rope`"):
        install.built([torch.nn.Linear(1, 1)], plan("feature.llama_rope.factor=8.0"))
    assert fresh == []


def test_what_nobody_needs_may_have_any_source(fresh, monkeypatch):
    monkeypatch.setattr(schedules, "forward_step_calc_loss", other)
    install.start(plan(), Trainer.MEGATRON)
    assert "context" not in [name for name, *_ in fresh]


def test_the_order_is_the_series_and_twice_is_once(fresh, capsys):
    of, model = (
        plan("cluster=h200_2", "parallel.context=2", "precision.fused_grad_accumulation=true"),
        torch.nn.Linear(1, 1),
    )
    run = install.Run(of, 1.0)
    for _ in range(2):
        install.command(run, Trainer.MEGATRON)
        assert install.built([model], of) == [model]
        assert install.wrapped([model], of) == [model]
    names = [name for name, *_ in fresh]
    assert names == [mend.name for mend in needed(of, Trainer.MEGATRON)] == [mend.name for mend in install.installed()]
    given = {Moment.COMMAND: (run,), Moment.START: (of,)}
    said = capsys.readouterr().out.splitlines()
    assert said == [SAID + " ".join(f"{mend.name}={mend.sha256}" for mend in install.installed())] * 2
    assert all(words == list(given.get(MENDS[name].moment, ([model], of))) for name, *words in fresh)


def test_a_second_model_gets_its_own(fresh):
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    install.built([first], plan())
    install.built([first, second], plan())
    assert [(name, models) for name, models, _ in fresh] == [("experts_apart", [first]), ("experts_apart", [second])]


def test_single_mends_are_looked_at_too(fresh, monkeypatch):
    monkeypatch.setattr("megatron.core.datasets.utils.compile_helpers", other)
    with pytest.raises(Refused, match=re.escape("`megatron.core.datasets.utils:compile_helpers`")):
        install.single("yarn", "shipped_helpers")
    assert fresh == []


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_what_one_rank_reduces_with_each_microbatch_is_scaled_once(strategy):
    """Where a step's gradients are reduced once, Megatron's own scale is right; and so is that of a group of several."""
    held = {
        name: SimpleNamespace(data=torch.ones(2), data_parallel_group=SimpleNamespace(size=lambda n=n: n), gradient_scaling_factor=factor)
        for name, (n, factor) in {"alone": (1, 0.5), "several": (2, 0.25), "as it is": (1, 1), "none": (1, None)}.items()
    }  # fmt: skip
    updated = []
    groups = [SimpleNamespace(main_grad_buffer=buffer) for buffer in (*held.values(), None)]
    buffer = SimpleNamespace(parameter_groups=groups, update_main_grads=lambda: updated.append(True))
    model = SimpleNamespace(
        ddp_config=SimpleNamespace(data_parallel_sharding_strategy=strategy), finish_grad_sync=lambda: None
    )
    fsdp._scale_once(model, buffer)
    model.finish_grad_sync()
    mended = strategy.startswith("optim_grads")
    assert held["alone"].gradient_scaling_factor == (None if mended else 0.5)
    assert {name: float(of.data[0]) for name, of in held.items()} == {
        "alone": 0.5 if mended else 1,
        "several": 1,
        "as it is": 1,
        "none": 1,
    }
    assert held["several"].gradient_scaling_factor == 0.25 and updated == [True] * mended
