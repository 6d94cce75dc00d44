"""The container under other people's hands: YAML there and back, any number of GPUs, overrides that Bridge would take."""

import functools
import importlib
import io
import json
import os
import runpy
import shlex
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import (
    ConfigContainer,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    StragglerDetectionConfig,
    TensorInspectConfig,
    runtime_config_update,
)
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.utils.omegaconf_utils import (
    apply_overrides,
    create_omegaconf_dict_config,
    process_config_with_overrides,
)
from megatron.core.rerun_state_machine import RerunMode, RerunState
from megatron.core.utils import init_method_normal
from omegaconf import OmegaConf

import nam_megatron.nemo as nemo
from nam_megatron.errors import Problem, Refused
from nam_megatron.lint import lint
from nam_megatron.mends import install
from nam_megatron.nemo import adapters, container, doctor, engine, finetune, guards
from nam_megatron.nemo.__main__ import command
from nam_megatron.nemo.container import NamContainer, guarded, settled, stack_spec
from nam_megatron.nemo.overrides import _plain, flat
from nam_megatron.nemo.words import apart, laid
from nam_megatron.recipe import from_tree, load
from nam_megatron.runtime import stack

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("fusions")


def read_back(made: NamContainer, folder) -> NamContainer:
    made.to_yaml(str(folder / "container.yaml"))
    return NamContainer.from_yaml(str(folder / "container.yaml"))


# One of each shape of model and layout: the others differ from these by values that no rule here looks at.
SHAPES = [
    "nam52_h200_dense_no_mhc_recovery_v1",
    "nam56r",
    "nam56r_native_dp",
    "nam56r_native_dp_fp8",
    "nam56r_native_dp_fused",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", [*SHAPES, "nam56r_nemo_native"])
def test_yaml_there_and_back_is_equal(preset, tmp_path):
    made = nemo.recipe(preset)
    back = read_back(made, tmp_path)
    assert back == made
    assert back.model.hybrid_stack_spec is stack_spec
    assert type(back.model) is type(made.model)


# Said by the arguments and by no field, or by none that is written down.
UNWRITTEN = {"spec", "log_throughput", "transformer_impl", "bias_gelu_fusion"}
PLAIN = {
    "nam52_h200_dense_no_mhc_recovery_v1": ["lane=native_dp"],
    "nam56r_native_dp": [],
    "nam56r_native_dp_fp8": [],
    "nam56r_nemo_native": [],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", PLAIN)
def test_lint_reads_what_bridge_writes(preset, tmp_path):
    """The fields alone, without the recipe that ours carries, are the words of its command line again; with it they are its plan."""
    made = nemo.recipe(preset, PLAIN[preset])
    made.to_yaml(str(tmp_path / "run_config.yaml"))
    text = (tmp_path / "run_config.yaml").read_text()
    carried = lint(text, "run_config.yaml")
    assert carried.launch.plan.lowering.plan == made.model.lowering.plan
    bare = yaml.safe_load(text)
    del bare["model"]["nam_recipe"]
    found = lint(yaml.safe_dump(bare), "run_config.yaml")

    def same(here, meant) -> bool:
        return _plain(meant) in (_plain(here), [here]) or not (here or meant)

    meant = {s.name: s.value for s in made.model.lowering.settings if s.name not in UNWRITTEN}
    there = {name: found.args.value(name) for name in meant}
    assert not {name: (there[name], meant[name]) for name in meant if not same(there[name], meant[name])}
    assert found.model.count.total == carried.model.count.total


@pytest.mark.few(3)
@pytest.mark.parametrize("world", [1, 8, 16])
@pytest.mark.parametrize("preset", SHAPES)
def test_it_validates_on_any_number_of_gpus(preset, world, ranks):
    """As Bridge's pretrain has it done."""
    ranks(world)
    made = nemo.recipe(preset)
    batch = made.train.global_batch_size
    runtime_config_update(made)
    assert made.data_parallel_size == world
    assert made.train.global_batch_size == batch
    assert made.model.lowering.plan.recipe.world_size == world


def test_a_layout_that_does_not_fit_is_refused_in_our_words(ranks):
    ranks(1)
    with pytest.raises(Refused, match="1 GPU"):
        runtime_config_update(nemo.recipe("nam56r_nemo_native"))
    ranks(16)
    with pytest.raises(Refused, match="global batch 4 is not a multiple"):
        runtime_config_update(nemo.recipe("nam56r_smoke"))
    ranks(12)
    with pytest.raises(Refused, match="12 processes on hosts of 8"):
        runtime_config_update(nemo.recipe("nam56r_native_dp"))


def overridden(*overrides: str, preset: str = "nam56r_native_dp") -> NamContainer:
    """A container after a runner has laid `overrides` over it and Bridge has validated it."""
    made = nemo.recipe(preset)
    process_config_with_overrides(made, cli_overrides=list(overrides))
    runtime_config_update(made)
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


DATA = ("tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=/t", "dataset.split='99,1,0'")


def corpus(folder: Path, name: str) -> str:
    """200 documents of four tokens: of 99,1,0 each share has some."""
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 200, 201)
    index += struct.pack("<200i200q201q", *[4] * 200, *range(0, 1600, 8), *range(201))
    (folder / f"{name}.idx").write_bytes(index)
    (folder / f"{name}.bin").write_bytes(bytes(1600))
    return str(folder / name)


@pytest.mark.few(1)
@pytest.mark.parametrize("said", ["dataset.data_path={}", "dataset.blend=[[{}],[1.0]]", "dataset.data_path=[{}]"])
def test_a_corpus_by_the_containers_fields_alone(said, ranks, tmp_path):
    ranks(8)
    path = corpus(tmp_path, "x")
    made = overridden(said.format(path), *DATA)
    words = ["data=indexed", f"data.path={path}", "data.tokenizer=/t", "data.workers=2"]
    assert (
        made.model.lowering.plan.recipe.data == nemo.recipe("nam56r_native_dp", words).model.lowering.plan.recipe.data
    )
    assert _plain(made.dataset.blend) == [[path], None] and not made.dataset.mock


def test_several_datasets_by_the_containers_fields_alone(ranks, tmp_path):
    ranks(8)
    paths = [corpus(tmp_path, name) for name in ("x", "y")]
    made = overridden(f"dataset.blend=[[{','.join(paths)}],[1.0,2.0]]", *DATA)
    assert [part.path for part in made.model.lowering.plan.recipe.data.parts] == paths
    assert _plain(made.dataset.blend) == [paths, [1.0, 2.0]]


@pytest.mark.slow
def test_datasets_for_validation_alone_by_the_containers_fields(ranks, tmp_path):
    ranks(8)
    x, y, z = (corpus(tmp_path, name) for name in "xyz")
    apart = f"dataset.blend_per_split=[[[{x},{y}],[1.0,2.0]],[[{z}],[1.0]],null]"
    made = overridden(apart, "validation.eval_iters=2", *DATA[:2])
    data = made.model.lowering.plan.recipe.data
    assert ([part.path for part in data.parts], [part.path for part in data.valid_parts]) == ([x, y], [z])
    assert data.split is None
    assert [_plain(b) for b in made.dataset.blend_per_split] == [[[x, y], [1.0, 2.0]], [[z], [1.0]], None]
    assert made.dataset.blend is None and not made.dataset.mock
    with pytest.raises(Refused, match="datasets for evaluations, and no evaluations"):
        overridden(apart, *DATA[:2])
    with pytest.raises(Refused, match="a split beside datasets of which none is split"):
        overridden(apart, "validation.eval_iters=2", *DATA)
    with pytest.raises(Refused, match="two fields name datasets"):
        overridden(apart, f"dataset.data_path={z}", *DATA[:2])
    with pytest.raises(Refused, match=r"dataset\.blend_per_split` is \[\[\["):
        overridden(f"dataset.blend_per_split=[[[{x}],[1.0]],[[{y}],[1.0]],[[{z}],[1.0]]]", *DATA[:2])


def test_a_dataset_that_megatron_would_look_through_for_ever_is_refused(ranks, tmp_path):
    ranks(8)
    paths = [corpus(tmp_path, "x"), str(tmp_path / "gone")]
    with pytest.raises(Refused, match=r"gone\.idx` is not there"):
        overridden(f"dataset.blend=[[{','.join(paths)}],[1.0,2.0]]", *DATA)
    with pytest.raises(Refused, match="and the validation share of `999,1,0` none of them"):
        overridden(f"dataset.data_path={paths[0]}", *DATA[:2], "dataset.split='999,1,0'")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["dataset.data_path=/d/x"], "a dataset without `tokenizer.tokenizer_model`"),
        (["dataset.blend=[[/d/x,/d/y],[1.0]]", *DATA], "with the weights"),
        (["dataset.data_path=[/d/x,/d/y]", *DATA], "with the weights"),
    ],
)
def test_half_a_corpus_is_refused(overrides, said, ranks):
    ranks(8)
    with pytest.raises(Refused, match=said):
        overridden(*overrides)


SECTIONS = {
    "ft": FaultToleranceConfig(enable_ft_package=True),
    "straggler": StragglerDetectionConfig(log_straggler=True),
    "nvrx_straggler": NVRxStragglerDetectionConfig(),
    "inprocess_restart": InProcessRestartConfig(),
}


def test_sections_that_are_left_to_runners(ranks):
    """Optional in Bridge: absent before. What else is changed beside them rebuilds the rest."""
    ranks(8)
    made = nemo.recipe("nam56r_native_dp")
    for name, section in SECTIONS.items():
        setattr(made, name, section)
    made.train.train_iters = 20
    runtime_config_update(made)
    assert all(getattr(made, name) is section for name, section in SECTIONS.items())
    assert made.model.lowering.plan.recipe.schedule.train_steps == 20 == made.scheduler.wd_incr_steps // 64


@pytest.mark.parametrize(
    ("name", "section", "said"),
    [
        ("peft", LoRA(), "`peft` was set to a LoRA, and no recipe key decides it: adapters are the recipe's"),
        ("tensor_inspect", TensorInspectConfig(enabled=True), "`tensor_inspect` was set to a TensorInspectConfig"),
        ("ft", {"enable_ft_package": True}, "`ft` is a mapping, and Bridge needs a config"),
        ("model", SimpleNamespace(), "`model` was replaced by a SimpleNamespace: it is no longer the recipe's"),
        ("rerun_state_machine", None, "`rerun_state_machine` was replaced by nothing"),
        ("dataset", SimpleNamespace(), "hint: a recipe says it so: `data=sft data.path=FOLDER "),
        ("comm_overlap", CommOverlapConfig(tp_comm_overlap=False, bucket_size=7), "`ddp.bucket_size` was set to 7"),
    ],
)
def test_sections_that_decide_what_is_trained_are_refused_by_name(name, section, said, ranks):
    ranks(8)
    made = nemo.recipe("nam56r_native_dp")
    setattr(made, name, section)
    with pytest.raises(Refused) as refused:
        made.validate() if name == "model" else runtime_config_update(made)
    assert said in refused.value.render()


@pytest.mark.parametrize("preset", [("nam56r_nemo_native",), ("nam56r_native_dp", "parallel.context=2")], ids=" ".join)
def test_an_overlap_over_data_ranks_is_asked_of_these_alone(preset, ranks):
    """Two ranks of tensors or of a sequence are one data rank, where Bridge sets none of its buckets."""
    ranks(2)
    made = nemo.recipe(preset[0], ["cluster=h200_2", *preset[1:]])
    made.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    with pytest.raises(Refused) as refused:
        runtime_config_update(made)
    assert "`model.wgrad_deferral_limit`" in str(refused.value) and "bucket_size" not in str(refused.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["nam56r_native_dp", "nam56r_native_dp_fp8"])
def test_the_precision_of_the_recipe_may_be_named(preset, ranks):
    ranks(8)
    plain = overridden(preset=preset)
    name = "bf16_mixed" if preset == "nam56r_native_dp" else "bf16_with_fp8_current_scaling_mixed"
    if preset == "nam56r_native_dp":
        assert flat(overridden(f"mixed_precision={name}", preset=preset)) == flat(plain)
    else:
        # Bridge's recipe of that name keeps the first and last layers in bf16; ours does not.
        with pytest.raises(Refused, match="`bf16_layers_at_start` is missing"):
            overridden(f"mixed_precision={name}", preset=preset)


@pytest.mark.parametrize(
    "field", ["loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"]
)
def test_what_a_precision_says_of_scales_that_bf16_has_not_changes_nothing(field, ranks):
    ranks(8)
    made = nemo.recipe("nam56r_native_dp")
    made.mixed_precision = get_mixed_precision_config("bf16_mixed")
    setattr(made.mixed_precision, field, 7.0)
    runtime_config_update(made)


def test_a_rebuilt_section_is_the_same_object_with_its_hooks(ranks):
    ranks(8)
    made = nemo.recipe("nam56r_native_dp")
    model, hook = made.model, lambda models: models
    model.register_pre_wrap_hook(hook)
    model.moe_router_topk = 2
    runtime_config_update(made)
    assert made.model is model and made.model._pre_wrap_hooks == [hook]
    assert made.model.lowering.plan.recipe.blocks.moe.top_k == 2


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [("model", "moe_router_topkk", "did you mean `moe_router_topk`"), ("", "trian", "did you mean `train`")],
)
def test_a_misspelt_attribute_is_refused(section, name, said, ranks):
    ranks(8)
    made = nemo.recipe("nam56r_native_dp")
    setattr(getattr(made, section) if section else made, name, 2)
    with pytest.raises(Refused) as refused:
        runtime_config_update(made)
    assert said in refused.value.render()
    runtime_config_update(again := nemo.recipe("nam56r_native_dp"))
    again.validate()  # what Bridge itself keeps there is no such thing


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["init_method", "output_layer_init_method", "embedding_init_method"])
def test_an_initialisation_is_the_recipes_with_the_width_that_it_has_there(name, ranks):
    """Each is made of the same function of torch's, whatever its width."""
    ranks(8)
    derived = overridden()
    std = getattr(derived.model, name).keywords["std"]
    for width in (std, 0.5):
        made = nemo.recipe("nam56r_native_dp")
        setattr(made.model, name, init_method_normal(width))
        refused = (
            nullcontext() if width == std else pytest.raises(Refused, match=rf"`model\.{name}` was set to .*std=0\.5")
        )
        with refused:
            runtime_config_update(made)
    derived.model.activation_func = functools.partial(derived.model.activation_func, inplace=True)
    with pytest.raises(Refused, match=r"`model\.activation_func` "):
        derived.validate()


@pytest.mark.slow
def test_a_checkpoint_that_is_not_there(ranks, tmp_path):
    """Bridge would start from random weights."""
    ranks(8)
    with pytest.raises(Refused, match="no checkpoint of Megatron-Bridge's in"):
        overridden(f"checkpoint.load={tmp_path}/absent")
    both = f"checkpoint.load={tmp_path}/run", f"checkpoint.save={tmp_path}/run", "checkpoint.save_interval=5"
    made = overridden(*both, "checkpoint.exit_on_missing_checkpoint=false")
    assert made.checkpoint.load == made.checkpoint.save == f"{tmp_path}/run"
    assert overridden(*both, "checkpoint.exit_on_missing_checkpoint=true").checkpoint.exit_on_missing_checkpoint
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(Refused, match="no checkpoint of Megatron-Bridge's in"):
        overridden(*both)


def test_variables_of_the_container_that_contradict_its_plan(ranks):
    ranks(8)
    name = "NVTE_NORM_FWD_USE_CUDNN"
    for said, why in (
        ({}, f"`env_vars` lacks {name}"),
        ({name: 0}, f"`env_vars.{name}` is `0`, and the plan needs `1`"),
    ):
        made = nemo.recipe("nam56r_native_dp_fused")
        made.env_vars = said
        with pytest.raises(Refused, match=why):
            runtime_config_update(made)
        os.environ.pop(name, None)
    made = nemo.recipe("nam56r_native_dp")
    assert made.env_vars["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7200"  # as on every road: tests/launch/test_roads.py
    made.model.tensor_model_parallel_size, made.model.sequence_parallel = 2, True
    runtime_config_update(made)  # Bridge has set the variables of the plan before
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == made.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


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
        (["mixed_precision=fp16_mixed"], "`model.fp16` was set to True"),
        (["optimizer.exp_avg_dtype=bf16"], "no recipe key decides it: fp32 master weights"),
        (["checkpoint.dist_ckpt_strictness=ignore_all"], "all of it is loaded or nothing"),
        (["rerun_state_machine.rerun_mode=disabled"], "no recipe key decides it: "),
        (["dataset.multiple_validation_sets=true"], "no recipe key decides it: evaluations are"),
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
    settled(back)
    assert back.model.lowering.plan.recipe == made.model.lowering.plan.recipe


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "virtual pipeline"),
        (
            ["feature.cuda_graphs.impl=local", "feature.cuda_graphs.modules=[attn]"],
            "by Transformer Engine's graphs alone",
        ),
        (["optim=muon"], "does not shard the state of Muon"),
        (
            ["model.learned_positions=8192", "model.blocks.attention.position_embedding=none"],
            "to the length of its samples",
        ),
        (["feature.mhc.streams=4"], "have not been tried under Megatron-Bridge"),
        (["feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=8"], "without embeddings of n-grams"),
    ],
)  # fmt: skip
def test_what_bridge_cannot_do_is_refused_by_name(overrides, said):
    with pytest.raises(Refused, match=said):
        nemo.recipe("nam56r_native_dp", overrides)


@pytest.mark.slow
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
    hooked = SimpleNamespace(metainfo={})
    monkeypatch.setattr(
        stack,
        "hybrid_stack_spec",
        lambda plan: hooked.metainfo.update(hooks=[functools.partial(install.built, plan=plan)]) or hooked,
    )
    monkeypatch.setattr(HybridModelProvider, "provide", lambda self, *_: (self.hybrid_stack_spec(self), model)[1])
    nemo.recipe("nam56r_native_dp", overrides).model.provide()
    assert all(getattr(p, "allreduce", True) is not apart for p in model.parameters())


def test_what_features_do_beside_the_layers_is_done_to_each_stage(monkeypatch):
    """Parts in bf16, of an FP8 model."""
    seen, model = [], torch.nn.Linear(1, 1)
    spec = SimpleNamespace(metainfo={"hooks": [lambda models: seen.append(models) or models]})
    monkeypatch.setattr(stack, "hybrid_stack_spec", lambda plan: spec)
    monkeypatch.setattr(HybridModelProvider, "provide", lambda self, *_: (self.hybrid_stack_spec(self), model)[1])
    provider = nemo.recipe("nam56r_native_dp").model
    assert provider.provide() is model and seen == [[model]]
    provider.provide()
    assert seen == [[model], [model]] and not hasattr(provider, "_hooks")
    provided = []
    for part in (container.cross_entropy, container.word_embedding):
        monkeypatch.setattr(part, "provide", lambda models, part=part: provided.append((part, models)))
    nemo.recipe("nam56r_native_dp_fused").model.provide()
    assert provided == [(container.cross_entropy, [model]), (container.word_embedding, [model])]


def test_recipe_functions():
    for name in ("nam56r_pretrain_config", "nam56r_pretrain_8gpu_h200_bf16_config"):
        function = getattr(nemo, name)
        assert function.__name__ == name
        assert function() == nemo.recipe("nam56r")
    assert nemo.nam56r_pretrain_config(overrides=["lane=nemo_native"]).model.tensor_model_parallel_size == 2
    tuned = nemo.nam56r_native_dp_finetune_config(overrides=["schedule.pretrained=/p", "optim.lr=1e-4"])
    assert tuned.checkpoint.pretrained_checkpoint == "/p"
    with pytest.raises(Refused, match="nothing to finetune"):
        nemo.nam56r_native_dp_finetune_config()
    for absent in (
        "nam57_finetune_config",
        "nam57_pretrain_config",
        "nam56r_pretrain_4gpu_h200_bf16_config",
        "nam56r_pretrain_x_config",
    ):
        assert not hasattr(nemo, absent)


def test_figures_for_others_to_look_at_go_where_the_recipe_says(ranks, monkeypatch):
    ranks(8)
    at = "feature.tracking."
    words = [f"{at}tensorboard=/t", f"{at}wandb_project=p", f"{at}wandb_name=n", f"{at}wandb_dir=/w", f"{at}mlflow=/m"]
    made = nemo.recipe("nam56r_native_dp", [*words, f"{at}mlflow_experiment=e"])
    said = made.logger
    assert (said.wandb_project, said.wandb_exp_name, said.wandb_save_dir, said.tensorboard_dir) == (
        "p",
        "n",
        "/w",
        "/t",
    )
    assert (said.mlflow_tracking_uri, said.mlflow_experiment, said.mlflow_run_name) == ("/m", "e", "nam56r_native_dp")
    assert not said.mlflow_log_artifacts, "no copies of checkpoints"
    with pytest.raises(Refused, match="`wandb` is not installed: nothing would be written"):
        made.validate()


def test_the_stack_is_found_again_from_the_config_alone(monkeypatch):
    """Without Transformer Engine there is no stack to build; what the function asks for is the recipe's plan."""
    asked = []
    monkeypatch.setattr(stack, "hybrid_stack_spec", lambda plan: asked.append(plan) or SimpleNamespace(metainfo={}))
    made = nemo.recipe("nam56r", ["lane=native_dp"])
    stack_spec(made.model)
    assert asked[0] == made.model.lowering.plan
    assert asked[0].recipe == load("nam56r", ["lane=native_dp"]) == from_tree(asked[0].recipe.model_dump(mode="json"))


def test_the_example_for_the_nemotron_cli(ranks):
    """As its scripts do: import the target, call it with the other keys, lay the rest over the container.

    What they keep at the top of such a file for themselves is among the rest.
    """
    config = OmegaConf.load(ROOT / "examples/nemo/nemotron.yaml")
    config.run, config.artifacts = {"data": "corpus:v1", "env": {"container": "c"}}, {"input": "somewhere"}
    recipe = OmegaConf.to_container(config.pop("recipe"))
    module, _, name = recipe.pop("_target_").rpartition(".")
    made = getattr(importlib.import_module(module), name)(**recipe)
    fields, kept = create_omegaconf_dict_config(made)
    apply_overrides(made, OmegaConf.to_container(OmegaConf.merge(fields, config)), kept)
    ranks(16)
    made.validate()
    after = made.model.lowering.plan.recipe.schedule
    assert (after.train_steps, after.save, made.logger.log_interval) == (2000, "/checkpoints/nam56r", 10)
    assert after.load == after.save, "so that a job that is started again goes on"


# `src` of a checkout of github.com/NVIDIA-NeMo/Nemotron; last run with e27b371
NEMOTRON = os.environ.get("NAM_NEMOTRON")


@pytest.mark.skipif(NEMOTRON is None, reason="no source of Nemotron: NAM_NEMOTRON=FOLDER/src, see above")
def test_the_first_job_of_nemotrons_own_runner(ranks, monkeypatch, tmp_path):
    """Up to Bridge's pretrain, whose place a list takes: there is nothing to load yet."""
    monkeypatch.syspath_prepend(NEMOTRON)
    from nemotron.steps._runners.megatron_bridge import run_megatron_bridge

    ranks(16)
    started = []
    example = tmp_path / "nemotron.yaml"
    example.write_text((ROOT / "examples/nemo/nemotron.yaml").read_text().replace("/checkpoints", str(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["step.py", "--config", str(example), "logger.log_interval=7"])
    run_megatron_bridge(
        default_recipe="none",
        default_config=example,
        entry=lambda config, *_, **__: started.append(config),
        enable_peft=False,
        dataset_mode="override",
    )
    runtime_config_update(started[0])
    after = started[0].model.lowering.plan.recipe.schedule
    assert (after.train_steps, after.save, after.load) == (2000, f"{tmp_path}/nam56r", f"{tmp_path}/nam56r")
    assert started[0].logger.log_interval == 7


@pytest.mark.slow
def test_nemo_runs_own_dry_run(monkeypatch, tmp_path, capfd):
    """Of the example, and of its command, which finds ours. Here, since importing NeMo-Run costs ten seconds a process."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # its shell commands read on
    example = runpy.run_path(str(ROOT / "examples/nemo/slurm.py"))
    words = [
        "conf=nam56r_native_dp_fused",
        "cluster=h200_2x8",
        "data=indexed",
        "data.path=/d/my set",
        "data.tokenizer=/t",
    ]
    example["start"](words, dryrun=True)
    text = capfd.readouterr().out
    assert "#SBATCH --nodes=2" in text and "export NVTE_NORM_FWD_USE_CUDNN=1" in text
    at = "--rdzv-endpoint $head_node_ip:29500"
    assert at in text, "the shell of the batch job fills it in, and no quotes keep it from that"
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert f"-m nam_megatron.nemo pretrain {shlex.join(words)}" in text

    from nemo_run.cli.api import create_cli

    words = ["nam", "pretrain", "--dryrun", "--yes", "conf=nam56r_smoke", "overrides=['lane=native_dp']"]
    monkeypatch.setattr(sys, "argv", ["nemo", *words])  # it looks there which entry points to load
    create_cli()(words, standalone_mode=False)
    text = capfd.readouterr().out
    assert "nam_megatron.nemo.cli:pretrain" in text and "['lane=native_dp']" in text


@pytest.mark.slow
def test_the_yaml_needs_no_transformer_engine(monkeypatch, tmp_path):
    """None is installed here; in this process a stand-in takes its place already, as the command has it."""
    assert doctor.installed(doctor.ENGINE) is None
    monkeypatch.setattr(engine, "provide", lambda: provided.append(True))
    monkeypatch.setattr(sys, "argv", ["nemo", "dump", "conf=nam56r_smoke", f"out={tmp_path}/container.yaml"])
    provided = []
    with pytest.raises(SystemExit) as end:
        command()
    assert not end.value.code and provided
    assert NamContainer.from_yaml(f"{tmp_path}/container.yaml") == nemo.recipe("nam56r_smoke")


@pytest.mark.slow
@pytest.mark.parametrize("profiler", ["NsysPlugin", "PyTorchProfilerPlugin"])
def test_bridges_plugins_work_with_our_command(profiler, ranks, monkeypatch):
    """What each appends to a script's words, as NeMo-Run has it do, is taken by the container, and leaves the model alone."""
    import nemo_run as run
    from megatron.bridge.recipes import run_plugins as bridges

    ranks(8)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    script = run.Script("nam_megatron.nemo", args=["pretrain", "conf=nam56r_native_dp"], entrypoint="python", m=True)
    for plugin in (
        bridges.PreemptionPlugin(),
        bridges.FaultTolerancePlugin(),
        bridges.WandbPlugin(project="p", name="n"),
        getattr(bridges, profiler)(profile_step_start=3, profile_step_end=4),
    ):
        plugin.setup(script, run.LocalExecutor(ntasks_per_node=8))
    own, theirs = apart(script.args[1:])
    assert own == ["conf=nam56r_native_dp"] and len(theirs) > 8, theirs
    made = laid(load("nam56r_native_dp"), theirs)
    assert made.ft.enable_ft_package and made.logger.wandb_project == "p" and made.profiling.profile_step_end == 4
    assert made.model.lowering.plan == nemo.recipe("nam56r_native_dp").model.lowering.plan
    runtime_config_update(made)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["model.seq_length=2048", "model.moe_router_topk=2", "+train.train_iters=5", "~ft.x", "ft.x"], [0, 4]),
        (
            ["model.hiden_size=1", "schedule.train_steps=5", "--config-dir=x", "optim.lr=1", "optimizer.lr=1"],
            [0, 1, 2, 3],
        ),
    ],
)
def test_whose_a_word_is(words, own):
    assert apart(words) == ([words[i] for i in own], [word for i, word in enumerate(words) if i not in own])


def told(monkeypatch, capfd, *words: str) -> tuple[int, str, str]:
    """Our command with these words, in this process."""
    monkeypatch.setattr(sys, "argv", ["nemo", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        command()
    return end.value.code or 0, *capfd.readouterr()


@pytest.mark.slow
def test_words_of_a_container_change_the_recipe_on_our_command_line(monkeypatch, capfd):
    code, said, _ = told(
        monkeypatch, capfd, "dump", "conf=nam56r_native_dp", "train.train_iters=20", "model.num_layers=26"
    )
    assert code == 0
    recipe = from_tree(json.loads(yaml.safe_load(said)["model"]["nam_recipe"]))
    assert (recipe.schedule.train_steps, recipe.model.depth) == (20, 26)
    for word, why in {
        "train.nosuch=1": "train.nosuch",
        "logger.x=[1": "`SECTION.FIELD=VALUE`",
        "optimizer.lr=-1": "greater than 0",
        "validation.eval_micro_batch_size=4": "no recipe key decides it",  # as it comes out in validation, today
    }.items():
        code, _, said = told(monkeypatch, capfd, "dump", "conf=nam56r_native_dp", word)
        assert code == 2 and why in said and "Traceback" not in said, said


def test_a_dry_run_says_what_would_be_started(monkeypatch, capfd):
    code, said, _ = told(
        monkeypatch,
        capfd,
        "pretrain",
        "conf=nam56r_native_dp",
        "cluster=h200_2x8",
        "--dry-run",
        "logger.log_interval=5",
    )
    assert code == 0 and "16 GPUs" in said
    assert (
        "--nnodes 2 " in said
        and "-m nam_megatron.nemo pretrain conf=nam56r_native_dp cluster=h200_2x8 logger.log_interval=5\n" in said
    )
    assert "export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=" in said
    wrong = {
        "optim.lr=-1": "greater than 0",
        "out=x": "writes no such file",
        "train.nosuch=1": "train.nosuch",
        "schedule.load=/no": "/no",
    }
    for word, why in wrong.items():
        code, _, said = told(monkeypatch, capfd, "pretrain", "conf=nam56r_native_dp", "--dry-run", word)
        assert code == 2 and why in said, said


DECIDED = yaml.safe_load((ROOT / "nam_megatron/nemo/decided.yaml").read_text())


@pytest.mark.parametrize(
    "override",
    [
        "model.fp8=hybrid", "model.recompute_granularity=full", "model.cuda_graph_impl=local", "ddp.use_megatron_fsdp=true",
        "model.mtp_num_layers=2", "optimizer.optimizer=muon", "mixed_precision=bf16_with_fp8_current_scaling_mixed", "train.manual_gc=true",
    ],
)  # fmt: skip
def test_a_refusal_names_the_words_that_decide(override, ranks):
    ranks(8)
    with pytest.raises(Refused) as refused:
        overridden(override)
    assert any(f"a recipe says it so: `{group['words']}`" in refused.value.render() for group in DECIDED), (
        refused.value.render()
    )


def test_each_host_forgets_where_lines_of_an_older_file_began(monkeypatch):
    asked, lowering = [], nemo.recipe("nam56r_native_dp").model.lowering
    monkeypatch.setattr(finetune, "forget", asked.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: int(os.environ["RANK"]))
    monkeypatch.setenv("SLURM_NTASKS", "16")
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # torchrun's, and Slurm's where it starts the ranks
        for rank, local in ((8, 0), (9, 1)):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv(name, str(local))
            guarded([], lowering)
        monkeypatch.delenv(name)
    assert asked == [lowering.plan.recipe] * 2


def test_the_first_rank_reads_all_of_a_checkpoint(monkeypatch, ranks):
    ranks(8)
    asked, container = [], nemo.recipe("nam56r_native_dp")

    def objections(lowering, *, thorough, dry=False):
        asked.append(thorough)
        return [Problem("enough")]

    monkeypatch.setattr(guards, "objections", objections)
    for rank, local in (("0", "0"), ("8", "0"), ("9", "1")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(Refused, match="enough"):
            container.validate()
    assert asked == [True, False, False]


def test_hosts_of_fewer_processes_than_the_recipe_says_are_refused(monkeypatch, ranks):
    ranks(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(Refused, match="8 processes on hosts of 8 GPUs, and here are 4"):
        settled(nemo.recipe("nam56r_native_dp"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settled(nemo.recipe("nam56r_native_dp"))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_a_nan_ends_a_run_that_has_nothing_to_go_back_to(complete, saves, monkeypatch, capfd):
    """No checkpoint is saved, or its step would be the first: else Megatron saves the state before it, and ends the run."""
    machine = SimpleNamespace(
        first_iteration_complete=complete, current_iteration=1, state=RerunState.RERUNNING_IN_PLACE
    )
    machine.get_mode = lambda: RerunMode.VALIDATE_RESULTS
    monkeypatch.setattr(guards, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    model = torch.nn.Identity()
    model.post_process = True
    ends = pytest.raises(guards.NonFinite, match="the loss is nan") if not (complete and saves) else nullcontext()
    with ends:
        guards.Watched(model, saves=saves)(torch.tensor(torch.nan))
    assert ("the loss is nan" in capfd.readouterr().err) is (complete and saves)


def test_what_nobody_catches_ends_a_process_in_our_words(monkeypatch, capfd):
    """Runners that know nothing of ours get our exit codes."""
    monkeypatch.setenv("RANK", "0")
    for error, code, text in (
        (Refused(Problem("no", key="a.key", hint="do")), 2, "error: no @ a.key\n\nhint: do\n"),
        (guards.NonFinite("step 1, rank 0: the loss is nan"), 1, "error: step 1, rank 0: the loss is nan\n"),
    ):
        with pytest.raises(SystemExit) as end:
            sys.excepthook(type(error), error, None)
        assert (end.value.code, capfd.readouterr().err) == (code, text)


ADAPTED = [
    "schedule.pretrained=/p",
    "feature.lora.rank=8",
    "model.blocks.moe.expert_bias_update_rate=0.0",
    "feature.lora.targets=[in_proj]",
]


def test_adapters_and_the_weights_below_them_are_the_recipes(ranks):
    ranks(8)
    made = nemo.recipe("nam56r_native_dp", ADAPTED)
    assert (made.peft.dim, made.peft.alpha, list(made.peft.target_modules)) == (8, 32, ["in_proj"])
    process_config_with_overrides(made, cli_overrides=["checkpoint.pretrained_checkpoint=/q", "train.train_iters=20"])
    settled(made)
    schedule = made.model.lowering.plan.recipe.schedule
    assert (schedule.pretrained, schedule.train_steps) == ("/q", 20) and made.peft.dim == 8
    made.peft.dim = 16
    with pytest.raises(Refused, match="`peft` was set to"):
        settled(made)
    plain = nemo.recipe("nam56r_native_dp")
    plain.checkpoint.pretrained_checkpoint = "/p"
    settled(plain)
    assert plain.model.lowering.plan.recipe.schedule.pretrained == "/p"


class Adapted(AdapterWrapper):
    """A module around which an adapter stands."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.to_wrap, self.adapter = torch.nn.Linear(2, 2, bias=False).requires_grad_(False), torch.nn.Linear(2, 2)
        self.adapter.base_linear_name = "mixer.in_proj"


def test_adapters_stand_where_they_are_asked_for_and_nothing_else_is_trained(ranks):
    ranks(8)
    plan = nemo.recipe("nam56r_native_dp", ADAPTED).model.lowering.plan
    adapters.stand([torch.nn.ModuleDict({"in_proj": Adapted()})], plan)
    with pytest.raises(Refused, match="`in_proj` has no adapter"):
        adapters.stand([torch.nn.ModuleDict({"out_proj": Adapted()})], plan)
    more = torch.nn.ModuleDict({"in_proj": Adapted(), "norm": torch.nn.Linear(2, 2, bias=False)})
    with pytest.raises(Refused, match=r"`norm\.weight` would be trained too"):
        adapters.stand([more], plan)


def test_a_first_run_says_what_it_does_not_do():
    notes = list(guards.notes(load("nam56r_smoke")))
    assert len(notes) == 2 and "learns nothing" in notes[0] and "nothing is saved" in notes[1]
    assert not list(
        guards.notes(
            load("nam56r_smoke", ["data=built", "data.path=/d", "schedule.save=/c", "schedule.save_interval=2"])
        )
    )
