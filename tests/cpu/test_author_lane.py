"""NAM56R as designed, small, trained from its recipe: MLA, DSA with its indexer's loss, experts, Mamba-3, M2RNN and MTP in one model.

All of ours in plain torch (`kernels: naive`), in Megatron's own pretrain() on a CPU.
"""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pretend
import pytest
import torch
from megatron.core.utils import unwrap_model
from test_train import logged, trained

from nam_megatron import train
from nam_megatron.compile.argv import plan_json, words
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
from nam_megatron.runtime import pretrain

SMALL = {
    "model": "depth=12 seq_length=32 hidden_size=64 ffn_hidden_size=96 num_attention_heads=4 vocab_size=256",
    "execution.mla": "kernels=naive",
    "model.blocks.mla": "q_lora_rank=16 kv_lora_rank=16 qk_head_dim=16 qk_rope_head_dim=8 v_head_dim=16",
    "execution.dsa": "kernels=naive",
    "model.blocks.dsa": "indexer_heads=4 indexer_head_dim=16 top_k=8 indexer_loss_coeff=0.1",
    "model.blocks.moe": "experts=4 top_k=2 expert_hidden_size=32 shared_expert_hidden_size=48",
    "execution.mamba3": "kernels=naive",
    "model.blocks.mamba3": "heads=4 head_dim=8 state_dim=16 groups=2",
    "execution.m2rnn": "kernels=naive",
    "model.blocks.m2rnn": "k_dim=8 v_dim=4 heads=4",
    "schedule": "micro_batch_size=2 global_batch_size=4 train_steps=4 decay_steps=4",
    "optim": "warmup_steps=1 lr=0.01",
    "data": "workers=0",
}
RECIPE = [f"{group}.{word}" for group, words in SMALL.items() for word in words.split()]
RECIPE.append("model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]")


def steps(folder: Path, *overrides: str, world: int = 1, before=lambda: None) -> list[pretend.Rank]:
    lowering = translate(load("nam56r", [*RECIPE, *overrides]))
    kinds = {layer.kind for layer in lowering.plan.layers}
    assert kinds == {"mla", "dsa", "moe", "mamba3", "m2rnn"} and lowering.plan.mtp_depths == 1
    (folder / "plan.json").write_text(plan_json(lowering))

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        before()
        return train.main(["--nam-plan", str(folder / "plan.json"), *words(lowering)], time.time())

    return pretend.fork(world, job)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return steps(tmp_path_factory.mktemp("one"), "cluster=h200_1")


def test_it_learns_with_every_loss_on(one_rank):
    losses = trained(one_rank)
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.05
    for what in ("mtp_1 loss", "load_balancing_loss", "indexer loss", "grad norm"):
        found = logged(one_rank, what)
        assert len(found) == 4 and all(math.isfinite(x) and x > 0 for x in found), what
    assert all(0.25 < x < 1 for x in logged(one_rank, "DSA kept 5")), "8 of 9 to 32 keys"
    assert len(logged(one_rank, "DSA kept 5")) == len(logged(one_rank, "M2RNN gain 12")) == 1
    assert not logged(one_rank, "DSA kept 9"), "which reuses the top-k of layer 5"


@pytest.mark.slow
def test_two_tensor_ranks_train_the_same_model(tmp_path, one_rank):
    """From other random weights, since each rank draws its own: what is the same is how it learns."""
    ranks = steps(tmp_path, "cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true", world=2)
    assert trained(ranks) == pytest.approx(trained(one_rank), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("reshardable", ["false", "true"])
def test_it_is_saved_and_gone_on_with(tmp_path, one_rank, reshardable):
    """Megatron writes the moments of fp32 parameters as those of others, or stops where their sizes differ; see group_order."""
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=2", "schedule.stop_every=2", "cluster=h200_1")
    save = (*save, f"feature.distributed_optimizer.reshardable={reshardable}")
    losses = trained(one_rank)
    trained(steps(tmp_path, *save))
    # The second line of a command is the mean of its first two steps.
    third, mean = trained(steps(tmp_path, *save, f"schedule.load={tmp_path}/ckpt"))
    assert (third, mean) == (losses[2], pytest.approx((losses[2] + losses[3]) / 2, abs=1e-6))


# Of four columns two turn as ever, one is on the ramp and one divided; by Megatron's own length and betas one, one and two.
YARN = {"factor": 4.0, "original_length": 1000, "beta_fast": 1.0, "beta_slow": 0.01}


@pytest.mark.slow
def test_the_angles_that_are_trained_are_yarns(tmp_path):
    """Megatron's parser hands MLA no length and no betas: the trainer does. Held against the frequencies of transformers."""
    turns = [f"feature.yarn.{key}={value}" for key, value in YARN.items()]
    one = ("schedule.train_steps=1", "schedule.decay_steps=1", "optim.warmup_steps=0")
    seen = tmp_path / "angles.json"

    def before() -> None:
        step = pretrain.forward_step

        def told(samples, model):
            layers = unwrap_model(model).decoder.layers
            angles = [layer.self_attention.rotary_pos_emb(2)[0][1].flatten() for layer in (layers[0], layers[4])]
            seen.write_text(json.dumps([a.tolist() for a in angles]))
            return step(samples, model)

        pretrain.forward_step = told

    trained(steps(tmp_path, "cluster=h200_1", *turns, *one, before=before))
    asked = {"rope_type": "yarn", "original_max_position_embeddings": YARN["original_length"], "rope_theta": 5e5}
    sizes = {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
    config = SimpleNamespace(rope_parameters=asked | YARN, standardize_rope_params=lambda: None, **sizes)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # seconds, in every worker that collects this file

    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    for angles in json.loads(seen.read_text()):
        assert angles == pytest.approx(wanted.tolist() * 2, rel=1e-6)
    plain = 5e5 ** (-torch.arange(0, 8, 2) / 8)
    assert (wanted / plain).tolist() == pytest.approx([1, 1, 0.625, 0.25])
