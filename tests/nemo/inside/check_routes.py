"""Three routes, one model: argv through Megatron's parser, HybridModelConfig, Bridge's container. Field by field, for every preset."""

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nam_megatron import train
from nam_megatron.compile.argv import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.nemo.container import CLASSES, container
from nam_megatron.recipe import conf_dir, load
from nam_megatron.runtime import pretrain
from nam_megatron.runtime.oracle import _plain

pytestmark = pytest.mark.usefixtures("fusions")
ROOT = Path(__file__).parents[3]
# Without those that this route refuses: residual streams, n-grams.
PRESETS = [
    preset
    for preset in sorted(path.stem for path in (conf_dir() / "preset").glob("nam*.yaml"))
    if not ((feature := load(preset).feature).mhc or feature.ngram_hash)
]
SHARDING = ("enabled", "overlap_param_gather", "overlap_grad_reduce")
VARIANTS = {
    "pipeline": ("parallel.pipeline=2",),
    "experts": ("parallel.expert=8",),
    "context": ("parallel.context=2",),
    "gated": ("model.activation=swiglu",),
    "as many groups as heads": ("model.blocks.attention.query_groups=56",),
    "dense": ("model.letters.E=mlp",),
    "mtp": ("feature.mtp.depths=1",),
    "recompute": (
        "feature.recompute.granularity=full",
        "feature.recompute.method=uniform",
        "feature.recompute.layers=1",
    ),
    "muon": ("optim=muon", *(f"feature.distributed_optimizer.{key}=false" for key in SHARDING)),
    "bf16 gradients": ("precision.grad_reduce=bf16",),
    "attention of others": (
        "model.blocks.attention={window: 128, qkv_bias: true, output_gate: true, rotary_percent: 0.5}",
        "model.zero_centered_norms=true",
    ),
    "learned positions": (
        "model.blocks.attention.position_embedding=none",
        "model.learned_positions=4096",
        "model.blocks.moe.router_dtype=null",
    ),
    "wsd": ("optim.decay=WSD", "optim.wsd_steps=100", "optim.wsd_shape=linear"),
    "fsdp": ("feature.megatron_fsdp.enabled=true",),
    "graphs of shards": ("feature.megatron_fsdp.enabled=true", "+overlay=graphs"),
    "indexed": ("data=indexed", "data.path=/d/x", "data.split='99,1,0'", "data.tokenizer=/t"),
    "checkpoints": ("schedule.save=/c", "schedule.save_interval=5"),
}
# Of the models of others, two that have what ours have not: no positions, and gated delta nets.
OTHERS = ["nemotron_h_8b", "qwen3_next_80b_a3b"]
YARN = ("feature.yarn.factor=4.0", "feature.yarn.beta_fast=16.0", "feature.yarn.mscale_all_dim=1.0")
CASES = [("nam56r", YARN), *((preset, ()) for preset in [*PRESETS, *OTHERS])]
CASES += [("nam56r_native_dp", words) for words in VARIANTS.values()]

# Fields that Bridge fills in where Megatron works the value out elsewhere, or that do nothing there.
DIFFERENT = {
    "scheduler.lr_decay_steps": "Megatron's scheduler multiplies steps by the batch itself",
    "scheduler.lr_warmup_steps": "the same",
    "scheduler.wd_incr_steps": "the same",
    "scheduler.wsd_decay_steps": "the same",
    "transformer.use_cpu_initialization": "false and null are both no",
    "transformer.use_te_rng_tracker": "Bridge copies it from rng.te_rng_tracker",
    "model.hybrid_stack_spec": "Megatron's is handed over in the training process",
    "tokenizer.pad_vocab_size": "the model's should_pad_vocab decides in both",
    "ddp.use_custom_fsdp": "old name of use_megatron_fsdp, read nowhere",
}
# What Bridge's classes have beyond Megatron's, by section: at Bridge's defaults each does nothing.
BRIDGE_ONLY = {
    "model": {"hf_model_id", "hf_model_revision", "keep_mtp_spec_in_bf16", "mamba_chunk_size", "nam_recipe"},
    "train": {
        "check_optimizer_step_success",
        "eval_interval",
        "eval_iters",
        "num_epochs",
        "skip_sync_grad_norm_across_mp",
        "skip_train",
    },
    "scheduler": {"max_steps"},
    "rerun_state_machine": {"spiky_loss_factor"},
    "dist": {
        "enable_megatron_core_experimental",
        "eval_context_parallel_size",
        "external_gpu_device_mapping",
        "use_decentralized_pg",
    },
}
DATASET_DIFFERENT = {
    "tokenizer": "Bridge sets it once it has built it",
    "token_dtype_code": "the same",
    "data_parallel_size": "read by hybrid context parallelism alone, which is off",
    "sequence_parallel_size": "the same",
}
# Of Bridge's loader, with the values that Megatron's has written in its code.
DATASET_ONLY = {
    "pin_memory": True,
    "drop_last": True,
    "persistent_workers": ...,  # of `num_workers`
    "trust_remote_code": False,
    "dataloader_save": None,
    "dataloader_load": None,
    "seq_length": ...,  # `sequence_length` has it
    "data_path": None,
    "per_dataset_sequences_path": None,
}
MEGATRON_ONLY = {"model.extra_checkpoint_metadata", "model.pre_wrap_hooks", "model.post_wrap_hooks"}


@cache
def lowered(preset: str, words: tuple[str, ...]) -> Lowering:
    return translate(load(preset, words))


@pytest.fixture(params=CASES, ids=[preset if not words else words[0] for preset, words in CASES])
def case(request, oracle, ranks, monkeypatch):
    """(lowering, Megatron's answer), with the environment that the training would have."""
    lowering = lowered(*request.param)
    world = lowering.plan.recipe.world_size
    env = {e.name: e.value for e in lowering.env}
    ours = tuple(seam.owner for seam in lowering.plan.ours)
    answer = oracle.ask(tuple(argv(lowering)), world, lowering.plan.recipe.device.capability, tuple(env.items()), ours)
    assert answer.error is None
    ranks(world)
    for name, value in env.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    return lowering, answer.values


def differing(section: str, config, values) -> dict[str, tuple]:
    """field -> (here, in Megatron's parser's configs), where both have the field and do not agree."""
    found = {}
    for field in dataclasses.fields(config):
        name = f"{section}.{field.name}"
        if name in values and name not in DIFFERENT:
            here = _plain(getattr(config, field.name))
            if here != values[name]:
                found[name] = here, values[name]
    return found


@pytest.mark.few(3)
def test_bridges_container_agrees_with_the_parser(case, monkeypatch):
    lowering, values = case
    made = container(lowering)
    monkeypatch.setattr(train, "unfit_data", lambda plan: ())  # its data is nowhere
    made.validate()
    assert not differing("transformer", made.model, values)
    # Of one name the model's is the transformer's, where that has it too.
    assert not differing(
        "model", made.model, {k: v for k, v in values.items() if k.replace("model.", "transformer.") not in values}
    )
    for section in CLASSES:
        assert not differing(section, getattr(made, section), values)
    assert not dataset_differing(made.dataset, values, monkeypatch)


def dataset_differing(ours, values, monkeypatch) -> dict[str, tuple]:
    """field -> (here, in the trainer's own), of all that Megatron's dataset and loader read."""
    args = SimpleNamespace(**{k.removeprefix("args."): v for k, v in values.items() if k.startswith("args.")})
    monkeypatch.setattr(pretrain, "get_tokenizer", lambda: SimpleNamespace(vocab_size=0))
    _, theirs = pretrain.dataset_config(args)
    there = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs) if f.name not in DATASET_DIFFERENT}
    there |= {name: getattr(args, name) for name in ("dataloader_type", "num_workers", "data_sharding")}
    looked_at = there.keys() | DATASET_DIFFERENT.keys() | DATASET_ONLY.keys()
    assert {f.name for f in dataclasses.fields(ours)} == looked_at
    there |= {name: value for name, value in DATASET_ONLY.items() if value is not ...}
    return {
        name: (_plain(getattr(ours, name)), _plain(value))
        for name, value in there.items()
        if _plain(getattr(ours, name)) != _plain(value)
    }


def test_no_field_is_overlooked(case):
    """Bridge's extra fields are the ones that somebody has looked at, and it lacks none of Megatron's."""
    lowering, values = case
    made = container(lowering)
    here = {f.name for f in dataclasses.fields(made.model)}
    theirs = {name.partition(".")[2] for name in values if name.startswith(("transformer.", "model."))}
    assert {name for name in here - theirs if not name.startswith("_")} == BRIDGE_ONLY["model"]
    assert {f"model.{name}" for name in theirs - here} <= MEGATRON_ONLY | {"model.transformer"}
    for section in set(BRIDGE_ONLY) - {"model"}:
        here = {f.name for f in dataclasses.fields(getattr(made, section)) if not f.name.startswith("_")}
        theirs = {name.partition(".")[2] for name in values if name.startswith(f"{section}.")}
        assert here - theirs == BRIDGE_ONLY[section]


def test_every_field_of_the_container_is_somebodys():
    """A recipe's key or pin, left to the runner, or in a list of those that somebody has looked at."""
    from nam_megatron.nemo.container import made
    from nam_megatron.nemo.overrides import _free, flat, reviewed

    owned, seen = set(), set()
    sft = ("data=sft_blend", "data.parts=[{weight: 2, path: /a}]", "data.tokenizer=/t", "schedule.pretrained=/p")
    for preset, words in [*((preset, ()) for preset in PRESETS), ("nam56r_native_dp", sft)]:
        lowering = lowered(preset, words)
        c, a = made(lowering)
        seen |= {path for path in flat(c) if not _free(path)}
        owned |= {path for setting in lowering.settings for path in a.fields[setting.name]}
    listed = reviewed(lowering.target)
    assert not sorted(seen - owned - listed.keys())
    bridges = {f for g in yaml.safe_load((ROOT / "nam_megatron/nemo/reviewed.yaml").read_text()) for f in g["fields"]}
    assert bridges <= seen, "each is a field"


def test_extra_fields_keep_bridges_defaults():
    """Nothing of ours sets one by accident, whatever its name means to Megatron's parser."""
    made = container(lowered("nam56r", ()))
    for section, names in BRIDGE_ONLY.items():
        config = getattr(made, section)
        defaults = {f.name: f.default for f in dataclasses.fields(config)}
        for name in names - {"nam_recipe", "eval_interval", "eval_iters", "skip_train"}:
            assert getattr(config, name) == defaults[name], f"{section}.{name}"


def test_every_setting_ends_in_a_field_of_its_name_or_its_rules():
    """One place a setting, or the places that Megatron itself copies it to."""
    from nam_megatron.nemo.container import ELSEWHERE, made

    copies = {
        "bf16": {
            "model.bf16",
            "model.params_dtype",
            "model.pipeline_dtype",
            "optimizer.bf16",
            "optimizer.params_dtype",
        },
        "seed": {"dataset.random_seed", "rng.seed", "model.inference_sampling_seed"},
    }
    for preset in PRESETS:
        lowering = lowered(preset, ())
        _, a = made(lowering)
        for setting in lowering.settings:
            ends = set(a.fields[setting.name])
            assert ends or setting.name in ELSEWHERE, setting.name
            if setting.name in copies:
                assert ends == copies[setting.name]
