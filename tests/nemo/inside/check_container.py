"""The container under other people's hands: YAML there and back, any number of GPUs, overrides that Bridge would take."""

import importlib
from pathlib import Path

import pytest
import torch
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.omegaconf_utils import (
    apply_overrides,
    create_omegaconf_dict_config,
    process_config_with_overrides,
)
from omegaconf import OmegaConf

import nam_megatron.nemo as nemo
from nam_megatron.errors import Refused
from nam_megatron.nemo.container import NamContainer, stack_spec
from nam_megatron.nemo.overrides import flat, settle
from nam_megatron.recipe import conf_dir, from_tree, load

PRESETS = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))


def read_back(made: NamContainer, folder) -> NamContainer:
    made.to_yaml(str(folder / "container.yaml"))
    return NamContainer.from_yaml(str(folder / "container.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_there_and_back_is_equal(preset, tmp_path):
    made = nemo.recipe(preset)
    back = read_back(made, tmp_path)
    assert back == made
    assert back.model.hybrid_stack_spec is stack_spec
    assert type(back.model) is type(made.model)


@pytest.mark.parametrize("world", [1, 8, 16])
@pytest.mark.parametrize("preset", [p for p in PRESETS if p not in ("nam56r_nemo_native", "nam56r_smoke")])
def test_it_validates_on_any_number_of_gpus(preset, world, ranks):
    ranks(world)
    made = nemo.recipe(preset)
    batch = made.train.global_batch_size
    made.validate()
    assert made.data_parallel_size == world
    assert made.train.global_batch_size == batch
    assert made.model.lowering.plan.recipe.world_size == world


def test_a_layout_that_does_not_fit_is_refused_in_our_words(ranks):
    ranks(1)
    with pytest.raises(Refused, match="1 GPU"):
        nemo.recipe("nam56r_nemo_native").validate()
    ranks(16)
    with pytest.raises(Refused, match="global batch 4 is not a multiple"):
        nemo.recipe("nam56r_smoke").validate()
    ranks(12)
    with pytest.raises(Refused, match="12 processes on hosts of 8"):
        nemo.recipe("nam56r_native_dp").validate()


def overridden(*overrides: str, preset: str = "nam56r_native_dp") -> NamContainer:
    """A container after a runner has laid `overrides` over it and Bridge has validated it."""
    made = nemo.recipe(preset)
    process_config_with_overrides(made, cli_overrides=list(overrides))
    made.validate()
    return made


# Bridge's own Nemotron-3-Nano recipe validates all of these.
ABSURD = {
    "+model.no_such_field=1": "no_such_field",
    "model.moe_router_topk=500": "top-k 500 of 16 experts",
    "model.hidden_size=2688.5": "must be an integer, not 2688.5",
    "model.hidden_size=2687": "2687 is not a multiple of 8",
    "optimizer.lr=-1": "must be greater than 0, not -1",
    "model.num_moe_experts=100 model.expert_model_parallel_size=8": "100 is not divisible by `parallel.expert` = 8",
}


@pytest.mark.parametrize("absurd", ABSURD)
def test_nonsense_is_refused_before_bridge_sees_it(absurd, ranks, monkeypatch):
    ranks(8)
    monkeypatch.setattr(
        ConfigContainer, "validate", lambda self: pytest.fail("Bridge was asked") if self.train is None else None
    )
    with pytest.raises(Refused, match=ABSURD[absurd]):
        overridden(*absurd.split())


def test_the_same_nonsense_is_refused_in_the_recipes_own_words():
    """What `python -m nam_megatron.nemo dump conf=nam56r_native_dp ...` says."""
    keys = {
        "model.no_such_field=1": "no_such_field",
        "model.blocks.moe.top_k=500": "top-k 500 of 16 experts",
        "model.hidden_size=2688.5": "must be an integer",
        "model.hidden_size=2687": "multiple of 8",
        "optim.lr=-1": "greater than 0",
        "model.blocks.moe.experts=100 parallel.expert=8": "not divisible",
    }
    for words, said in keys.items():
        with pytest.raises(Refused, match=said):
            nemo.recipe("nam56r_native_dp", words.split())


def test_an_override_becomes_the_recipes_and_all_that_follows_from_it(ranks):
    ranks(8)
    made = overridden("model.seq_length=2048", "train.train_iters=20")
    recipe = made.model.lowering.plan.recipe
    assert (recipe.model.seq_length, recipe.schedule.train_steps) == (2048, 20)
    assert made.dataset.seq_length == 2048
    again = flat(made)
    made.validate()
    assert flat(made) == again


def test_what_runners_set_themselves_is_left_to_them(ranks):
    ranks(8)
    made = overridden("logger.tensorboard_dir=/t", "logger.log_interval=7", "checkpoint.most_recent_k=3", "checkpoint.save=/c",
                      "checkpoint.save_interval=5", "optimizer.lr=1e-4")  # fmt: skip
    assert (made.logger.tensorboard_dir, made.logger.log_interval) == ("/t", 7)
    assert made.checkpoint.most_recent_k == 3 and made.checkpoint.save == "/c"
    assert made.optimizer.lr == 1e-4 == made.model.lowering.plan.recipe.optim.lr


def test_garbage_is_collected_as_bridges_own_recipes_ask(ranks):
    """They set the switch and the interval; ours is one key."""
    ranks(8)
    made = overridden("train.manual_gc=true", "train.manual_gc_interval=100")
    assert made.model.lowering.plan.recipe.schedule.manual_gc_interval == 100


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.manual_gc=true"], "`train.manual_gc` was set to True; it follows from another value"),
        (["model.rotary_interleaved=true"], "`model` pins it: halves, not pairs"),
        (["model.softmax_scale=0.5"], "no recipe key decides it"),
        (["mixed_precision=bf16_mixed"], "no recipe key decides it"),
        (["checkpoint.pretrained_checkpoint=/x"], "no recipe key decides it"),
        (["model.mtp_num_layers=3"], "follows from another value"),
        (["model.seq_length=2048", "dataset.seq_length=1024"], "another field to 2048"),
    ],
)
def test_what_the_recipe_does_not_decide_cannot_be_changed(overrides, said, ranks):
    ranks(8)
    with pytest.raises(Refused, match=said):
        overridden(*overrides)


def test_a_validated_container_comes_back_from_its_checkpoint(ranks, tmp_path):
    ranks(8)
    made = overridden("train.train_iters=20")
    back = read_back(made, tmp_path)
    settle(back)
    assert back.model.lowering.plan.recipe == made.model.lowering.plan.recipe


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "virtual pipeline"),
        (["optim=muon"], "does not shard the state of Muon"),
    ],
)  # fmt: skip
def test_what_bridge_cannot_do_is_refused_by_name(overrides, said):
    with pytest.raises(Refused, match=said):
        nemo.recipe("nam56r_native_dp", overrides)


def test_an_environment_that_contradicts_the_recipe_is_refused(ranks, monkeypatch):
    """Runners apply the container's variables only where there are none of that name."""
    ranks(8)
    fused = "nam56r_native_dp_fused"
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", "1")
    overridden(preset=fused)
    with pytest.raises(Refused, match="NVTE_NORM_FWD_USE_CUDNN is `1`, and the plan needs it unset"):
        overridden()
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", "0")
    with pytest.raises(Refused, match="NVTE_NORM_FWD_USE_CUDNN is `0`, and the plan needs `1`"):
        overridden(preset=fused)


@pytest.mark.parametrize(("overrides", "apart"), [((), True), (("feature.megatron_fsdp.enabled=true",), False)])
def test_experts_stand_apart_where_megatrons_ddp_keeps_them(overrides, apart, monkeypatch):
    model = torch.nn.ModuleDict(
        {"layer": torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.Linear(1, 1)})})}
    )
    monkeypatch.setattr(HybridModelProvider, "provide", lambda *_: model)
    nemo.recipe("nam56r_native_dp", overrides).model.provide()
    assert all(getattr(p, "allreduce", True) is not apart for p in model.parameters())


def test_recipe_functions():
    assert len(nemo.names()) == 2 * len(PRESETS)
    for name in ("nam56r_pretrain_config", "nam56r_pretrain_8gpu_h200_bf16_config"):
        function = getattr(nemo, name)
        assert function.__name__ == name and name in dir(nemo)
        assert function() == nemo.recipe("nam56r")
    assert nemo.nam56r_pretrain_config(overrides=["lane=nemo_native"]).model.tensor_model_parallel_size == 2
    assert nemo.names()["nam56r_native_dp_fp8_pretrain_8gpu_h200_fp8_config"] == "nam56r_native_dp_fp8"
    for absent in ("nam57_pretrain_config", "nam56r_pretrain_4gpu_h200_bf16_config", "nam56r_pretrain_x_config"):
        assert not hasattr(nemo, absent)


def test_the_stack_is_found_again_from_the_config_alone(monkeypatch):
    """Without Transformer Engine there is no stack to build; what the function asks for is the recipe's plan."""
    from nam_megatron.runtime import stack

    asked = []
    monkeypatch.setattr(stack, "hybrid_stack_spec", asked.append)
    made = nemo.recipe("nam56r", ["lane=native_dp"])
    stack_spec(made.model)
    assert asked[0] == made.model.lowering.plan
    assert asked[0].recipe == load("nam56r", ["lane=native_dp"]) == from_tree(asked[0].recipe.model_dump(mode="json"))


def test_the_example_for_the_nemotron_cli(ranks):
    """As its scripts do: import the target, call it with the other keys, lay the rest over the container."""
    config = OmegaConf.load(Path(__file__).parents[3] / "examples/nemo/nemotron.yaml")
    recipe = OmegaConf.to_container(config.pop("recipe"))
    module, _, name = recipe.pop("_target_").rpartition(".")
    made = getattr(importlib.import_module(module), name)(**recipe)
    fields, kept = create_omegaconf_dict_config(made)
    apply_overrides(made, OmegaConf.to_container(OmegaConf.merge(fields, config)), kept)
    ranks(16)
    made.validate()
    after = made.model.lowering.plan.recipe.schedule
    assert (after.train_steps, after.save, made.logger.log_interval) == (2000, "/checkpoints/nam56r", 10)
