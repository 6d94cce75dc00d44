"""Megatron-Bridge's own tools on our checkpoints and exports: what opens, what is converted, what is refused."""

import json
from types import SimpleNamespace

import check_train
import pretend
import pytest
import test_author_lane
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.nemotronh.nemotron_h_bridge import NemotronHBridge
from megatron.bridge.training.model_load_save import load_model_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from nam_megatron import train
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.data import tokenizer
from nam_megatron.errors import Refused
from nam_megatron.hf import check, export
from nam_megatron.nemo.container import container
from nam_megatron.nemo.converter import NamBridge
from nam_megatron.recipe import load


def test_bridge_opens_the_config_of_its_own_checkpoint(tmp_path):
    made = container(translate(load("nam56r_smoke", check_train.SMALL)))
    made.to_yaml(str(tmp_path / "run_config.yaml"))
    config, args = load_model_config(str(tmp_path))
    assert args is None and config.lowering.plan == made.model.lowering.plan


def test_an_export_whose_config_is_not_its_plans_is_refused(tmp_path):
    lowering = translate(load("nam56r_smoke", check_train.SMALL))
    (tmp_path / "plan.json").write_text(argv.plan_json(lowering))
    said = export._tree(export.config_for(lowering.plan), {})
    (tmp_path / "config.json").write_text(json.dumps(said | {"rotary_base": said["rotary_base"] + 1}))
    with pytest.raises(Refused, match=r"the export has `rotary_base` \d+, and the plan"):
        NamBridge().provider_bridge(SimpleNamespace(model_name_or_path=tmp_path))


@pytest.mark.few(1)
@pytest.mark.parametrize(("lane", "world"), [("native", 1), ("native", 2), ("author", 1)])
def test_an_export_through_autobridge_there_and_back(lane, world, tmp_path, monkeypatch):
    """The same logits, the same bits, also over two tensor ranks; and no other converter takes the model."""
    texts = [f"int f{i}(int x) {{ return {i * 37} * x; }}" for i in range(60)]
    tokenizer.save(tokenizer.train(texts, 256 + 5, progress=False), tmp_path / "bpe")
    small = ("nam56r_smoke", check_train.SMALL) if lane == "native" else ("nam56r", test_author_lane.RECIPE)
    more = ("schedule.train_steps=4", f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=4")
    lowering = translate(load(small[0], [*small[1], *more, "model.vocab_size=264", "cluster=h200_1"]))
    (tmp_path / "plan.json").write_text(argv.plan_json(lowering))
    words = ["--nam-plan", str(tmp_path / "plan.json"), *argv.words(lowering)]
    (trained,) = pretend.fork(1, lambda: train.main(words, 0.0))
    assert trained.code == 0, trained.err[-4000:]
    export.export(tmp_path / "ckpt", tmp_path / "hf", tmp_path / "bpe", lambda text: None, shard_bytes=150_000)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))

    def job():
        check_train.pretended()
        bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf", trust_remote_code=True)
        provider = bridge.to_megatron_provider()
        provider.tensor_model_parallel_size = provider.tensor_parallel_num_weight_shards = world
        provider.sequence_parallel = world > 1
        provider.finalize()
        models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        if world == 1:
            seen = check.observed(models[0].module.eval(), tokens)
            outcome = check.compare(
                seen, check.exported(tmp_path / "hf", tokens, "bf16", "cpu", seen, follows=True), "bf16"
            )
            assert outcome.passed, outcome
        bridge.save_hf_pretrained(models, tmp_path / "again")
        AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
        with pytest.raises(Refused, match="`NemotronHBridge` does not know this model"):
            list(NemotronHBridge().stream_weights_megatron_to_hf(models, bridge.hf_pretrained))

    ranks = pretend.fork(world, job, 200.0)
    assert all(rank.code == 0 for rank in ranks), "".join(rank.err[-4000:] for rank in ranks)
    before, after = (
        {k: v for f in sorted((tmp_path / name).glob("*.safetensors")) for k, v in load_file(f).items()}
        for name in ("hf", "again")
    )
    assert before.keys() == after.keys()
    assert all(before[k].dtype == after[k].dtype and torch.equal(before[k], after[k]) for k in before)
