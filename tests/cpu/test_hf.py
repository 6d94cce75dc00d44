"""Exports against Megatron's real models on a CPU: every lane, several layouts; and what a damaged or hostile folder is answered."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import megatron.core.transformer.attention as attention
import modules
import numpy
import pretend
import pytest
import test_author_lane
import test_train
import torch
from megatron.core import dist_checkpointing
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.ssm.gated_delta_net.common import _GDNBase
from megatron.core.transformer.moe import moe_utils
from torch.distributed.checkpoint import filesystem, metadata
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

from nam_megatron import generate, train
from nam_megatron.compile.argv import load_plan, plan_json, words
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.data import identity, tokenizer
from nam_megatron.errors import Refused
from nam_megatron.generate import Options, decode
from nam_megatron.hf import __main__ as command
from nam_megatron.hf import check, describe, distributed, export, folder, perplexity, watch
from nam_megatron.hf.model.configuration_nam import NamConfig
from nam_megatron.hf.model.modeling_nam import (
    Experts,
    Gdn,
    NamCache,
    NamForCausalLM,
    Norm,
    Router,
    Step,
    activate,
    attend,
)
from nam_megatron.hf.opened import open_model
from nam_megatron.prove import cut
from nam_megatron.recipe import from_tree, load, to_tree
from nam_megatron.runtime import checkpoint as beside
from nam_megatron.runtime import checksums
from nam_megatron.words.whole import digest

AT = "model.blocks."
SMALL = ("model.pattern=AEMEAE", "model.depth=6", "model.seq_length=32", "model.hidden_size=64", "model.vocab_size=256")
SMALL += (f"{AT}mamba2.heads=8", f"{AT}mamba2.head_dim=8", f"{AT}attention.head_dim=16", "data.workers=0")
# Three steps, so that biases, router and norms have left where they began.
STEPS = ("schedule.train_steps=3", "schedule.decay_steps=3", "schedule.save_interval=3", "optim.lr=0.01")
TWO = {"tp": ("parallel.tensor=2", "parallel.sequence=true"), "ep": ("parallel.expert=2",)}
NATIVE = {
    "native": (),
    "native gated": (
        "model.activation=swiglu", f"{AT}attention.qk_norm=true", "model.tied_embeddings=true",
        f"{AT}moe.score_function=softmax", f"{AT}moe.expert_bias=false", f"{AT}moe.shared_expert_hidden_size=0",
    ),
    "native tp": TWO["tp"],
    "native pp": (),
}  # fmt: skip
AUTHOR = {
    "author": (),
    "author odd": (
        f"{AT}mla.latent_norm=false", f"{AT}mamba3.mimo_rank=1", "execution.mamba3.chunk=16", f"{AT}dsa.full_every=1",
        "feature.mtp.depths=2", f"{AT}m2rnn.conv_width=3", f"{AT}mla.kv_lora_rank=32",
    ),
    "author streams": (
        "feature.mhc.streams=3", "feature.mhc.kernels=naive", "feature.mtp.depths=1", "feature.ngram_hash.enabled=true",
        "feature.ngram_hash.buckets=50", "feature.ngram_hash.order=4", "feature.ngram_hash.document_end=7",
    ),
    "author tp": TWO["tp"],
    "author ep": TWO["ep"],
    "author pp": (),
}  # fmt: skip
# Models of others, cut as `prove` cuts them: a preset, what is said beside it, and what of the cut is another.
MOE, GQA = f"{AT}moe.", f"{AT}attention."
TP = {"parallel.tensor": 2, "parallel.sequence": True, "cluster.gpus_per_node": 2}
PUBLIC: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "next tp": ("qwen3_next_80b_a3b", ("feature.mtp.depths=1", "feature.mtp.pattern=MEAE"), TP),
    "lite": (
        "deepseek_v2_lite", ("feature.yarn.mscale=1.0", f"{MOE}group_limit=[2,1]", f"{MOE}routed_scaling=1.5", "feature.mtp.depths=2",
                             "feature.mtp.pattern=AE"),
        {"feature.yarn.original_length": 512, f"{MOE}router_dtype": None},
    ),
    "sparse": (
        "deepseek_v3_2", ("cluster=h200_1", "parallel.pipeline=1", "parallel.expert=1", f"{AT}dsa.full_every=2"),
        {"feature.yarn.original_length": 512, "feature.yarn.beta_fast": 16.0, "feature.yarn.beta_slow": 2.0, f"{MOE}latent_size": 24,
         "execution.dsa.kernels": "megatron", "model.zero_centered_norms": True, "model.normalization": "LayerNorm"},
    ),
    "gpt": (
        "mixtral_8x7b", ("+model.blocks.mlp={}", "model.substitute=[{letter: E, ranks: [0], kind: mlp}]"),
        {"model.activation": "gelu", "model.normalization": "LayerNorm", "model.learned_positions": 96,
         f"{GQA}position_embedding": "none", f"{GQA}window": 5, f"{GQA}unwindowed_every": 2, f"{MOE}grouped_gemm": False,
         f"{MOE}pre_softmax": True},
    ),
    "llama tp": (
        "llama_3_1_8b", ("feature.mtp.depths=1",),
        {"model.linear_bias": True, f"{GQA}rotary_percent": 0.5, f"{GQA}window": 9, **TP},
    ),
    "yarn": (
        "llama_3_8b", ("feature.yarn.factor=4", "feature.yarn.rounded=false"),
        {"feature.yarn.original_length": 512, "model.rotary_base": 50, f"{GQA}output_gate": True, f"{GQA}qkv_bias": True},
    ),
}  # fmt: skip
EVERY = (*NATIVE, *AUTHOR, *PUBLIC)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (checkpoint folder, export), trained in its layout; each made once."""
    done: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in done:
            at = tmp_path_factory.mktemp(name.replace(" ", "_"))
            world = 2 if name.endswith((" tp", " ep")) else 1
            if name.endswith(" pp"):
                written_by_two_stages(make(name.removesuffix(" pp"))[0], at / "ckpt")
            elif name in PUBLIC:
                test_train.trained(train_of(cut_down(name, at), at, world))
            else:
                overrides = (*(NATIVE | AUTHOR)[name], *STEPS, f"schedule.save={at}/ckpt")
                overrides = (*overrides, f"cluster=h200_{world}", "schedule.global_batch_size=4")
                test_train.trained(run(name, at, *overrides, world=world))
            export.export(at / "ckpt", at / "hf", None, lambda text: None, shard_bytes=150_000)
            done[name] = at / "ckpt", at / "hf"
        return done[name]

    return make


def run(name: str, folder: Path, *overrides: str, world: int = 1) -> list[pretend.Rank]:
    """The training command on a small cut of the lane that `name` begins with."""
    small = SMALL if name.startswith("native") else test_author_lane.RECIPE
    lowering = translate(load("nam56r_smoke" if name.startswith("native") else "nam56r", [*small, *overrides]))
    return train_of(lowering, folder, world)


def cut_down(name: str, folder: Path) -> Lowering:
    """One of PUBLIC, three steps of it."""
    preset, overrides, changes = PUBLIC[name]
    tree = to_tree(cut.pair(load(preset, overrides), "cpu", 3).reference.plan.recipe)
    changes = {
        "schedule.save": f"{folder}/ckpt",
        "schedule.save_interval": 3,
        "schedule.global_batch_size": 4,
        **changes,
    }
    for key, value in {"model.vocab_size": 256, "data.workers": 0, **changes}.items():
        *parents, last = key.split(".")
        reduce(getitem, parents, tree)[last] = value
    return translate(from_tree(tree))


def train_of(lowering: Lowering, folder: Path, world: int) -> list[pretend.Rank]:
    (folder / "plan.json").write_text(plan_json(lowering))

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        norm()
        return train.main(["--nam-plan", str(folder / "plan.json"), *words(lowering)], time.time())

    return pretend.fork(world, job, 400.0)


def norm() -> None:
    """Stock attention asks Transformer Engine for its norm of queries and keys."""
    attention.HAVE_TE, attention.TENorm, attention.TELinear = True, modules.Norm, modules.ReplicatedLinear


def written_by_two_stages(checkpoint: Path, out: Path) -> None:
    """The checkpoint again, as two pipeline stages write it. Gloo's stages cannot train here: nothing passes between them."""
    tree = to_tree(load_plan(checkpoint / "plan.json").plan.recipe)
    tree["parallel"]["pipeline"] = tree["cluster"]["gpus_per_node"] = 2
    tree["schedule"] |= {"save": None, "save_interval": None}
    lowering, step = translate(from_tree(tree)), out / "iter_0000003"
    step.mkdir(parents=True)

    def job():
        model = check.built(lowering, distributed.step_folder(checkpoint), "bf16")
        dist_checkpointing.save(
            model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp}), str(step)
        )

    assert [rank.code for rank in pretend.fork(2, job, 400.0)] == [0, 0]
    test_train.signed(step)
    (out / "plan.json").write_text(plan_json(lowering))
    shutil.copyfile(checkpoint / "latest_checkpointed_iteration.txt", out / "latest_checkpointed_iteration.txt")
    assert {path.name for path in step.glob("*.distcp")} >= {"__0_0.distcp", "__1_0.distcp"}


@pytest.fixture
def copied(made, tmp_path):
    """An export of the author's lane to be damaged."""
    shutil.copytree(made("author")[1], tmp_path / "hf")
    return tmp_path / "hf"


def random(*shape: int, seed: int = 0, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def in_megatron(job) -> None:
    """`job` in a process where Megatron runs on the CPU; its assertions are ours."""
    (rank,) = pretend.fork(1, lambda: (norm(), job())[1], 400.0)
    assert rank.code == 0, rank.err[-4000:]


# Against Megatron ----------------------------------------------------------------------------------------------------


# Without their fused kernel Megatron turns heads in bf16, and of plain attention little else would be compared.
@pytest.mark.few("native-fp32")
@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in EVERY for d in ("fp32", "bf16") if d == "fp32" or n not in ("llama tp", "yarn")]
)
def test_the_export_computes_what_megatron_does(made, name, dtype):
    """Logits, every layer, MTP; from whatever layout wrote the checkpoint."""
    checkpoint, exported = made(name)

    def job():
        outcome = check.check(checkpoint, exported, random(2, 32), dtype, "cpu")
        assert outcome.passed and not outcome.unproven, outcome
        plan = load_plan(checkpoint / "plan.json").plan
        assert len(outcome.layers) == len(plan.layers) and len(outcome.ahead) == plan.mtp_depths
        if dtype == "fp32":
            assert outcome.greedy == 1 and max(outcome.layers) <= 1e-5

    in_megatron(job)


@pytest.mark.parametrize(
    ("dtype", "inside"), [(torch.float32, None), *((torch.bfloat16, inside) for inside in (None, "fp32", "fp64"))]
)
@pytest.mark.parametrize("router", [(1, 1, 1), (2, 1, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("scores", ["softmax", "pre_softmax", "sigmoid", "bias"])
def test_experts_and_their_shares_are_megatrons(scores, router, dtype, inside):
    torch.manual_seed(0)
    (top_k, groups, left), function = router, "softmax" if "softmax" in scores else "sigmoid"
    b = dict(experts=8, top_k=top_k, groups=groups, chosen_groups=left, score_function=function, routed_scaling=1.5)
    b |= dict(pre_softmax=scores == "pre_softmax", expert_bias=scores == "bias", router_dtype=inside)
    made, x = Router(SimpleNamespace(moe=b, hidden_size=16, linear_bias=False)), torch.randn(50, 16).to(dtype)
    made.weight.data = torch.randn(8, 16).to(dtype)
    if made.expert_bias is not None:
        torch.nn.init.normal_(made.expert_bias)
    wide = {None: dtype, "fp32": torch.float32, "fp64": torch.float64}[inside]
    logits, limit = torch.nn.functional.linear(x.to(wide), made.weight.to(wide)), left if groups > 1 else None
    shares, experts = moe_utils.topk_routing_with_score_function(
        logits, top_k, b["pre_softmax"], groups, limit, 1.5, function, made.expert_bias, dense_output=True
    )
    assert all(torch.equal(one, other) for one, other in zip(made(x), (experts, shares), strict=True))


def test_decays_in_bf16_are_megatrons(monkeypatch):
    b = dict(key_heads=1, key_head_dim=4, value_heads=16, value_head_dim=4, conv_width=2)
    norms = dict(norm_epsilon=1e-6, normalization="RMSNorm", zero_centered_norms=False)
    layer, found = Gdn(SimpleNamespace(gdn=b, hidden_size=8, **norms), 0).bfloat16(), []
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    monkeypatch.setattr(layer, "scan", lambda q, k, v, logs, *_: found.append(logs) or v)
    alpha = layer.in_proj(x := torch.randn(1, 9, 8).bfloat16())[..., -16:]
    layer.A_log.data, layer.dt_bias.data = (kept := layer.A_log.data).float(), (bias := layer.dt_bias.data).float()
    layer(x, SimpleNamespace(state=lambda _: {}, real=None))
    with torch.compiler.set_stance("force_eager"):
        decays, _ = _GDNBase._compute_g_and_beta(None, kept, bias, alpha, alpha)
    assert torch.equal(*found, decays)


@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_without_weights_of_a_checkpoint_scales_nothing(centered):
    NamForCausalLM._init_weights(None, made := Norm(8, 0.0, centered=centered))
    torch.testing.assert_close(made(torch.ones(8)), torch.ones(8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "author", "author streams"])
def test_a_hundred_greedy_continuations_are_megatrons(made, name):
    """Megatron computes every sequence anew, the export from its caches."""
    checkpoint, exported = made(name)
    prompts, new = random(100, 12, seed=3), 6

    def job():
        step = distributed.step_folder(checkpoint)
        lowering = check.one_device(load_plan(checkpoint / "plan.json"), plain=True)
        check.rank_zero(lowering)
        model, tokens = check.built(lowering, step, "fp32"), prompts
        for _ in range(new):
            logits = check.observed(model, tokens).logits[:, -1]
            tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
        ours = list(decode(open_model(exported, torch.float32), prompts.tolist(), Options(new)))
        assert torch.equal(torch.tensor(ours).T, tokens[:, 12:])

    in_megatron(job)


def altered(made, to: Path, name: str, change, which: str = "native") -> tuple[Path, Path, list[str]]:
    """A checkpoint, its export with one tensor changed, and the kinds of its layers."""
    checkpoint, exported = made(which)
    config = describe.config(load_plan(checkpoint / "plan.json").plan)
    read = distributed.Checkpoint(distributed.step_folder(checkpoint)).joined
    shutil.copytree(exported, to)
    for old in to.glob("*.safetensors"):
        old.unlink()
    files = folder.shards(describe.tensors(config))
    found = {
        file: folder.write_shard(to / file, group, lambda t: change(read(t)) if t.name == name else read(t))
        for file, group in files
    }
    folder.write_index(to, files)
    folder.write_manifest(to, found, step="", weights="")
    return checkpoint, to, config["layer_kinds"]


def test_a_difference_is_found_and_placed(made, tmp_path):
    """Of one changed weight in layer 4, in both forms of the report."""
    expert = "model.layers.3.mixer.experts.up"
    checkpoint, other, kinds = altered(made, tmp_path / "hf", expert, lambda weight: weight * 1.5)

    def job():
        outcome = check.check(checkpoint, other, random(2, 32), "fp32", "cpu")
        assert not outcome.passed
        said = list(check.report(outcome, kinds))
        assert said[-2:] == [
            "they differ: asked for is relative 1e-05 or less, in MTP too",
            "they part most in layer 4 (moe)",
        ]
        own = [*outcome.own]
        assert own.pop(3) > 1e-3 and max(own) <= 1e-5  # the others by themselves do not part

    in_megatron(job)


def test_another_choice_is_a_difference_though_the_export_takes_megatrons(made, tmp_path):
    """A router that is turned round: by its own choices, and by what the same experts count."""
    router = "model.layers.3.mixer.router.weight"
    checkpoint, other, _ = altered(made, tmp_path / "hf", router, lambda weight: -weight)

    def job():
        sides, compare = [], check.compare
        check.compare = lambda theirs, *rest: sides.append(theirs) or compare(theirs, *rest)
        outcome = check.check(checkpoint, other, random(2, 32), "bf16", "cpu")
        assert outcome.otherwise > 0.3 and not outcome.passed
        free = check.exported(other, random(2, 32), "bf16", "cpu", *sides, follows=False)
        assert not free.otherwise and not free.experts

    in_megatron(job)


@pytest.mark.slow
def test_another_token_prediction_is_a_difference_in_bf16(made, tmp_path):
    """And four tokens, of which each query sees all, show no choice of keys."""
    join = "model.mtp.0.join.weight"
    checkpoint, other, kinds = altered(made, tmp_path / "hf", join, lambda weight: -weight, "author")

    def job():
        outcome = check.check(checkpoint, other, random(2, 4), "bf16", "cpu")
        assert outcome.cosine >= check.COSINE and outcome.kl <= check.KL and not outcome.passed
        (told,) = [line for line in check.report(outcome, kinds) if line.startswith("unproven")]
        assert told == "unproven: `dsa.top_k` of 8 leaves out none of 4 tokens"

    in_megatron(job)


@pytest.mark.parametrize(
    ("blocks", "trained", "tokens"),
    [({}, 4096, 256), ({"dsa": {"top_k": 256}}, 4096, 512), ({"attention": {"window": 4096}}, 32768, 8192),
     ({"dsa": {"top_k": 2048}}, 1024, 1024)],
)  # fmt: skip
def test_as_many_tokens_are_compared_as_show_a_choice(blocks, trained, tokens):
    assert check.length({"max_position_embeddings": trained, **blocks}) == tokens


def test_a_choice_made_otherwise_is_a_share_of_what_was_chosen():
    """Of experts [tokens, k], and of keys in blocks of queries, of which the first see fewer than k."""
    best = torch.arange(6.0, 0, -1).expand(4, 6)
    seen = best.masked_fill(torch.ones(4, 6).triu(1).bool(), -torch.inf)[None]
    for scores, chosen, first, share in (
        (best, [[0, 1, 2], [0, 1, 5], [3, 4, 5], [2, 1, 0]], (), 4 / 12),
        (seen[:, :2], [[[0, 4, 5], [1, 0, 3], [9, 9, 9], [9, 9, 9]]], (0,), 0.0),
        (seen[:, 2:], [[[9, 9, 9], [9, 9, 9], [2, 1, 0], [1, 2, 3]]], (2,), 1 / 6),
    ):
        shares, pick = [], lambda scores, *first: scores.topk(3, -1).indices
        check._taken(pick, torch.tensor(chosen), shares, scores, *first)
        assert shares == [pytest.approx(share)]


def test_a_host_without_a_gpu_is_told_so(made, capsys):
    assert command.main(["check", *map(str, made("native"))]) == 2
    assert "Megatron's side needs a GPU, and this host has none" in capsys.readouterr().err


def test_the_export_of_another_step_is_named(made, tmp_path):
    checkpoint, exported = made("native")
    assert check.of_another(checkpoint, exported) is None
    other = made("author")[0]
    assert "from another checkpoint, `iter_0000003`" in (check.of_another(other, exported) or "")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EVERY)
def test_import_of_export_is_the_checkpoint_to_the_last_bit(made, tmp_path, name, recwarn):
    checkpoint, exported = made(name)
    assert command.main(["import", str(exported), str(checkpoint / "plan.json"), str(tmp_path / "again")]) == 0
    assert not [w for w in recwarn if "torch.distributed is disabled" in str(w.message)]
    before, after = (distributed.Checkpoint(distributed.step_folder(p)) for p in (checkpoint, tmp_path / "again"))
    keys = [key for key in before.tensors if not key.startswith(("optimizer", "chained_"))]
    assert set(keys) == set(after.tensors)
    for key in keys:
        of = before.tensors[key]
        x, y = (side.read(key, tuple(of.size), of.properties.dtype) for side in (before, after))
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "author"])
def test_training_starts_from_imported_weights(made, tmp_path, name):
    """The first loss is that of the trained weights, not of fresh ones; another layout may read them."""
    checkpoint, exported = made(name)
    export.load(exported, checkpoint / "plan.json", tmp_path / "again", lambda text: None)
    overrides = (*STEPS, "schedule.global_batch_size=4", f"schedule.load={tmp_path}/again")
    overrides += (
        "schedule.train_steps=1",
        "schedule.decay_steps=1",
        "optim.warmup_steps=0",
        "schedule.save_interval=null",
    )
    (tmp_path / "fresh").mkdir()
    fresh = test_train.trained(
        run(name, tmp_path / "fresh", *(w for w in overrides if "load=" not in w), "cluster=h200_1")
    )
    one = test_train.trained(run(name, tmp_path, *overrides, "cluster=h200_1"))
    two = test_train.trained(run(name, tmp_path, *overrides, "cluster=h200_2", *TWO["tp"], world=2))
    assert one[0] < fresh[0] - 0.1
    assert two[0] == pytest.approx(one[0], abs=1e-2)


@pytest.mark.slow
def test_imported_weights_begin_a_run_of_its_own(made, tmp_path):
    """With another optimizer, seed and end, and without the head that predicts ahead; never with another model."""
    checkpoint, exported = made("author")
    export.load(exported, checkpoint / "plan.json", tmp_path / "again", lambda text: None)
    begins = [word for word in test_author_lane.RECIPE if "ffn_hidden_size" not in word]
    begins += [f"schedule.load={tmp_path}/again", "schedule.train_steps=4", "schedule.decay_steps=4", "cluster=h200_1"]
    begins += ["optim.lr=0.002", "optim.weight_decay=0.0", "feature.mtp.depths=0", "schedule.seed=7"]

    def ran(*words: str) -> list[pretend.Rank]:
        return train_of(translate(load("nam56r", [*begins, *words])), tmp_path, 1)

    losses = test_train.trained(ran())
    assert len(losses) == 4 and max(losses) < test_train.trained(ran("schedule.load=null"))[0] - 0.1
    (refused,) = ran("model.rotary_base=10000")
    assert refused.code == 2
    assert "the checkpoint's model has `model.rotary_base` 500000, and the plan's 10000" in refused.err


# Decoding ------------------------------------------------------------------------------------------------------------


FURTHER = ("native gated", "author odd", "author streams", *PUBLIC)


@pytest.fixture(params=["native", "author", *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def model(request, made) -> NamForCausalLM:
    return open_model(made(request.param)[1], torch.float32)


@pytest.mark.parametrize("length", [None, 96])
@torch.inference_mode()
def test_prefill_and_steps_are_the_full_pass(model, length):
    """Token by token, through chunks of the scans; growing and allocated caches."""
    tokens = random(2, 80)
    full, cache = model(tokens).logits, NamCache(length)
    parts = [model(tokens[:, :70], past_key_values=cache).logits]
    parts += [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(70, 74)]
    parts.append(model(tokens[:, 74:], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-5 * full.abs().max().item())
    assert cache.get_seq_length() == 80


@torch.inference_mode()
def test_an_allocated_cache_takes_no_more_than_it_holds(model):
    cache = NamCache(8)
    model(random(1, 8), past_key_values=cache)
    with pytest.raises(ValueError, match="holds 8 tokens, and 9 are asked for"):
        model(random(1, 1), past_key_values=cache)


def test_beams_leave_an_allocated_cache_where_it_lies():
    """A step that was captured knows tensors by their place."""
    cache, rows = NamCache(3), torch.arange(6.0).view(2, 3)
    cache.rows(0, "k", rows)
    at = cache.layers[0]["k"].data_ptr()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.layers[0]["k"].data_ptr() == at and torch.equal(cache.layers[0]["k"], rows[[1, 1]])


def test_quick_geglu_is_gpt_oss():
    c = SimpleNamespace(activation="quick_geglu", activation_clamp=0.5, glu_offset=1.0)
    pairs = torch.cartesian_prod(*2 * [torch.tensor([-4.0, -0.2, 0.2, 4.0])])  # of a gate and a value
    theirs = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=0.5), pairs.flatten())
    torch.testing.assert_close(activate(pairs.T.flatten(), c), theirs)


@pytest.mark.parametrize("window", [0, 3])
def test_sinks_are_gpt_oss(window):
    """Beside a window and without one, in groups of heads."""
    torch.manual_seed(2)
    q, k, v, sinks = torch.randn(2, 7, 6, 5), torch.randn(2, 7, 3, 5), torch.randn(2, 7, 3, 5), torch.randn(6)
    step = Step(None, 0, torch.arange(7).expand(2, 7), None, None, {})
    back = torch.arange(7)[:, None] - torch.arange(7)
    hidden = torch.zeros(7, 7).masked_fill((back < 0) | (back >= (window or 7)), -torch.inf)
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    theirs, _ = eager_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), hidden[None, None], 0.3, 0.0)
    torch.testing.assert_close(attend(q, k, v, step, 0.3, window, sinks), theirs.flatten(2))


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_weighed_with_their_biases(bias):
    torch.manual_seed(2)
    moe = {"experts": 4, "expert_hidden_size": 5, "latent_size": 0}
    experts = Experts(SimpleNamespace(moe=moe, hidden_size=6, activation="gelu", linear_bias=bias))
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    x, shares, chosen = torch.randn(9, 6), torch.rand(9, 2), torch.stack([torch.randperm(4)[:2] for _ in range(9)])

    def one(expert, x):
        up, down = (b[expert] if bias else 0 for b in (experts.up_bias, experts.down_bias))
        return experts.down[expert] @ torch.nn.functional.gelu(experts.up[expert] @ x + up) + down

    wanted = [sum(s * one(e, x[t]) for e, s in zip(chosen[t], shares[t], strict=True)) for t in range(9)]
    torch.testing.assert_close(experts(x, chosen, shares), torch.stack(wanted), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_batch_of_unequal_lengths_is_each_alone(model):
    prompts = [random(n, seed=n).tolist() for n in (3, 17, 9, 1)]
    together = list(zip(*decode(model, prompts, Options(7)), strict=True))
    for prompt, new in zip(prompts, together, strict=True):
        alone = [token for (token,) in decode(model, [prompt], Options(7, grow=True))]
        assert alone == list(new)
    # Words are coarse: of a step behind a padded batch, all numbers.
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    tokens, mask = (
        torch.tensor([[0] * (17 - len(p)) + fill(p) for p in prompts]) for fill in (list, lambda p: [1] * len(p))
    )
    model(tokens[:, :-1], attention_mask=mask[:, :-1], past_key_values=(cache := NamCache()))
    for prompt, row in zip(
        prompts, model(tokens[:, -1:], attention_mask=mask, past_key_values=cache).logits[:, 0], strict=True
    ):
        wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@torch.inference_mode()
def test_padding_on_the_right_changes_nothing_before_it(model):
    tokens, mask = random(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    full, short = model(tokens, attention_mask=mask).logits, model(tokens[1:, :12]).logits
    torch.testing.assert_close(full[1:, :12], short, rtol=0, atol=1e-5 * short.abs().max().item())
    for bad, cache, said in ((mask, NamCache(), "stands on the left"), (mask.roll(3, 1), None, "on one side")):
        with pytest.raises(ValueError, match=said):
            model(tokens, attention_mask=bad, past_key_values=cache)


def test_what_a_cache_holds_is_what_the_budget_prices(made):
    """Rows to the byte; states and windows never more than priced, but for Mamba-2's state, which is kept in fp32."""
    from nam_megatron.budget.serving import serve

    for name in ("native", "author"):
        checkpoint, exported = made(name)
        plan, cache = load_plan(checkpoint / "plan.json").plan, NamCache()
        with torch.inference_mode():
            open_model(exported)(random(3, 32), past_key_values=cache)
        grows = ("keys", "values", "latents", "indexer")
        sizes = {True: 0, False: 0}
        for kept in cache.layers.values():
            for key, tensor in kept.items():
                sizes[key in grows] += tensor.nbytes
        (forecast,) = serve(plan, 3, 32)
        assert sizes[True] == forecast.cache("contiguous")
        if name == "author":
            assert 0.7 * forecast.recurrent < sizes[False] <= forecast.recurrent


@torch.inference_mode()
def test_loss_is_the_mean_over_the_next_tokens(model):
    tokens, labels = random(2, 16), random(2, 16)
    labels[0, :8] = -100
    out = model(tokens, labels=labels)
    each = out.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(out.loss, -each[labels[:, 1:] != -100].mean())


def test_gradients_reach_every_weight(made):
    """So an export can be trained further as it is; MTP's weights by a loss of their own."""
    model = open_model(made("author")[1], torch.float32).requires_grad_(True)
    tokens = random(2, 24)
    out = model(tokens, labels=tokens, mtp=True)
    (out.loss + model.lm_head(out.hidden_states[0]).logsumexp(-1).mean()).backward()
    still = {n for n, p in model.named_parameters() if p.grad is None}
    # The indexer and the bias of the experts choose; what they choose has no gradient.
    assert all("indexer" in name or "expert_bias" in name for name in still), still


# A fresh environment -------------------------------------------------------------------------------------------------

FRESH = """
import shutil, sys, torch
for name in ("nam_megatron", "megatron", "hydra"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is here")
from transformers import AutoConfig, AutoModelForCausalLM
tokens = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).float()
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, pad_token_id=0)
    again = model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    beams = model.generate(tokens, max_new_tokens=4, num_beams=3, pad_token_id=0)
    assert torch.equal(out, again) and beams.shape == (2, 9)
    model.save_pretrained("again")
    other = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    shutil.rmtree("again")
    print(out[:, 5:].tolist())
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> list[str]:
    """A Python with what we have installed, but for ours, Megatron and Hydra."""
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(torch.__file__).parents[1].iterdir():
        if (
            not path.name.lower().startswith(("nam_megatron", "_nam_megatron", "megatron", "hydra", "__editable"))
            and path.suffix != ".pth"
        ):
            (packages / path.name).symlink_to(path)
    start = f"import sys; sys.path.insert(0, {str(packages)!r}); exec(sys.stdin.read())"
    return [sys.executable, "-I", "-S", "-c", start]


@pytest.mark.slow
def test_exports_open_without_us_and_without_megatron(made, fresh, tmp_path):
    exports = [made(name)[1] for name in ("native gated", "author")]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command_line = [*fresh, *map(str, exports)]
    done = subprocess.run(
        command_line, input=FRESH, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for exported, said in zip(exports, done.stdout.splitlines()[-2:], strict=True):
        ours = decode(open_model(exported, torch.float32), [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], Options(8))
        assert json.loads(said) == torch.tensor(list(ours)).T.tolist()


def test_a_missing_tensor_is_no_warning_to_transformers(copied):
    """transformers would draw it at random."""
    index = json.loads((copied / folder.INDEX).read_text())
    lost = index["weight_map"].pop("model.norm.weight")
    (copied / folder.INDEX).write_text(json.dumps(index))
    from safetensors.torch import load_file, save_file

    rest = {k: v for k, v in load_file(copied / lost).items() if k != "model.norm.weight"}
    save_file(rest, copied / lost, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model\.norm\.weight"):
        NamForCausalLM.from_pretrained(copied)


# What is refused -----------------------------------------------------------------------------------------------------


def refusal(path: Path, capsys) -> str:
    capsys.readouterr()
    assert generate.main([str(path), "--file", str(path.parent / "p.jsonl"), "--new", "2"]) == 2
    return capsys.readouterr().err


@pytest.fixture
def prompts(tmp_path) -> Path:
    (tmp_path / "p.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    return tmp_path / "p.jsonl"


def test_generate_reads_an_export_or_a_checkpoint(made, prompts, capsys):
    said = []
    for path in made("author"):
        assert generate.main([str(path), "--file", str(prompts), "--new", "5", "--dtype", "fp32"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(json.loads(said[0])["new"]) == 5
    assert json.loads(said[0])["ended"] is None  # nothing says which token ends a text
    assert generate.main([str(path), "--file", str(prompts), "--new", "1", "--dtype", "fp32", "--endless"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] is False


def test_a_sequence_that_has_ended_says_no_more():
    def counts(tokens, **_):
        return SimpleNamespace(logits=torch.nn.functional.one_hot((tokens[:, -1:] + 1) % 8, 8))

    config = SimpleNamespace(vocab_size=8, max_position_embeddings=99)
    model = Mock(side_effect=counts, device="cpu", config=config)
    assert [*decode(model, [[2], [4]], Options(9, ends=[6]))] == [[3, 5], [4, 6], [5, None], [6, None]]


def test_what_ends_a_text_is_none_of_it(spoken, prompts, monkeypatch, capsys):
    tokens = tokenizer.load(spoken[1])
    word, end = tokenizer.encode(tokens, "i;")
    monkeypatch.setattr(generate, "_tokenizer", lambda *_, **__: (tokens, [end]))
    monkeypatch.setattr(generate, "decode", lambda *_: iter([[word], [end]]))
    prompts.write_text('{"prompt": "int"}\n')
    assert generate.main([str(spoken[1]), "--file", str(prompts), "--new", "9"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "int", "text": "i", "ended": True}


@pytest.mark.parametrize(("temperature", "drawn"), [(0.1, {0}), (1.0, {0, 1}), (100.0, {0, 1, 2})])
def test_words_are_cut_off_by_what_the_temperature_leaves(temperature, drawn):
    shares, options = torch.tensor([0.6, 0.3, 0.1]).expand(200, -1), Options(1, temperature, top_p=0.7, seed=1)
    assert {*generate.pick(shares.log(), options, generate.drawing(options, "cpu")).tolist()} == drawn


@pytest.mark.parametrize(("top_k", "drawn"), [(0, {0, 1, 2, 3}), (1, {1}), (3, {0, 1, 3}), (9, {0, 1, 2, 3})])
def test_of_the_best_words_each_may_be_drawn_and_no_other(top_k, drawn):
    rows = torch.tensor([2.0, 3.0, 0.0, 1.0]).expand(200, -1)
    options = Options(1, temperature=3.0, top_k=top_k)
    assert set(generate.pick(rows, options, torch.Generator().manual_seed(1)).tolist()) == drawn


@pytest.mark.parametrize("token", [-1, 4])
def test_a_token_of_no_vocabulary_is_refused_in_whichever_prompt(token):
    config = SimpleNamespace(vocab_size=4, max_position_embeddings=9)
    generate._check(config, [[0], [3, 2]], 1)
    for prompts in ([[token], [1]], [[1], [2, token]]):
        with pytest.raises(Refused, match=f"token {token} of a vocabulary of 4"):
            generate._check(config, prompts, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "tokens": [5]}', "line 2 of `{}` has a `prompt` and `tokens`"),  # the prompt was left out
        ('{"prompt": "a", "text": "mine"}', "line 2 of `{}` has `text`, which is written here"),
        ('{"tokens": [5], "new": 3}', "line 2 of `{}` has `new`, which is written here"),
        ('{"tokens": [5], "ended": 3}', "line 2 of `{}` has `ended`, which is written here"),
    ],
)
def test_nothing_of_a_line_is_left_out_or_replaced(prompts, text, said):
    prompts.write_text('{"prompt": "a", "new": 1}\n' + text)
    with pytest.raises(Refused, match=re.escape(said.format(prompts))):
        list(generate._lines(prompts))


@pytest.mark.parametrize(("name", "said"), [("/dev/zero", "is a device, and no file"), ("none", "holds no prompts")])
def test_prompts_come_to_an_end_and_there_are_some(tmp_path, monkeypatch, capsys, name, said):
    """Told before a model is looked for, which takes minutes to open."""
    monkeypatch.chdir(tmp_path)
    Path("none").write_text("\n")
    assert generate.main([".", "--file", name, "--new", "2"]) == 2
    assert f"`{name}` {said}" in capsys.readouterr().err


def test_sampling_is_repeated_by_its_seed_and_bounded(made):
    model = open_model(made("native")[1], torch.float32)
    draw = lambda **kw: [t for (t,) in decode(model, [[1, 2, 3]], Options(20, **kw))]  # noqa: E731
    warm = partial(draw, temperature=1.5)
    assert warm(seed=1) == warm(seed=1) != warm(seed=2)
    assert warm(seed=1, top_k=1) == warm(seed=2, top_p=1e-9) == draw()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_give_no_numbers_say_no_words(temperature):
    """Greedy they said the first word again and again; drawn from they were a traceback."""
    model = Mock(
        return_value=Mock(logits=torch.full((1, 1, 8), torch.nan)),
        config=Mock(vocab_size=8, max_position_embeddings=8),
        device="cpu",
    )
    with pytest.raises(Refused, match="gives no numbers"):
        next(decode(model, [[1]], Options(1, temperature)))


def test_a_seed_draws_other_words_in_each_batch(made, prompts, capsys):
    prompts.write_text('{"tokens": [1, 2, 3]}\n' * 4)
    said = []
    for _ in range(2):
        words = ["--file", str(prompts), "--new", "12", "--batch", "2", "--temperature", "1.5", "--seed", "1"]
        assert generate.main([str(made("native")[1]), *words]) == 0
        said.append([tuple(json.loads(line)["new"]) for line in capsys.readouterr().out.splitlines()])
    assert said[0] == said[1] and len(set(said[0])) == 4


@pytest.mark.parametrize("word", ["--top-k 5", "--top-p 0.5"])
def test_bounds_of_what_is_not_drawn_are_refused(made, prompts, capsys, word):
    assert generate.main([str(made("native")[1]), "--file", str(prompts), *word.split()]) == 2
    assert f"`{word.split()[0]}` of greedy words" in capsys.readouterr().err


def test_a_prompt_too_long_is_refused_before_any_text_is_written(made, prompts, capsys):
    """In the last batch too; and it says how many new tokens there is room for."""
    for long, hint in ((20, "`--new 12` or less"), (32, "a shorter prompt")):
        prompts.write_text('{"tokens": [1]}\n' + json.dumps({"tokens": [1] * long}) + "\n")
        words = ["--file", str(prompts), "--new", "13", "--batch", "1"]
        assert generate.main([str(made("native")[1]), *words]) == 2
        out, err = capsys.readouterr()
        assert not out and f"{long} tokens and 13 new ones, and the model was trained on 32" in err and hint in err
    prompts.write_text(json.dumps({"tokens": [1] * 20}))
    assert generate.main([str(made("native")[1]), *words[:2], "--new", "12"]) == 0, "as the hint says"


@pytest.mark.parametrize("which", ["cut", "swapped", "changed", "missing"])
def test_damaged_shards_are_refused_by_name(copied, prompts, capsys, which):
    first, second = sorted(copied.glob("*.safetensors"))[:2]
    if which == "cut":
        first.write_bytes(first.read_bytes()[:-100])
    elif which == "swapped":
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b), second.write_bytes(a)
    elif which == "changed":
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    else:
        first.unlink()
    assert f"`{first}`" in refusal(copied, capsys)


def test_a_tensor_of_another_size_or_type_than_the_plans_is_refused():
    known = distributed.Checkpoint.__new__(distributed.Checkpoint)
    known.folder, known.tensors, known.chunks = Path("step"), {"w": None}, {"w": ((2,), torch.float32, {})}
    with pytest.raises(Refused, match=r"`w` is \[2\] in `step`, and \[3\] in the plan"):
        known.read("w", (3,), torch.float32)
    with pytest.raises(Refused, match=r"`w` is torch\.float32 in `step`, not torch\.bfloat16"):
        known.read("w", (2,), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "is_one"), [("a/b", True), ("../a", False), ("/a", False), ("a\0", False), ("\udc80", False)]
)
def test_a_name_in_a_manifest_is_of_a_file_in_its_folder(name, is_one):
    assert folder.inside(name) == is_one


def test_shards_are_refused_without_the_manifests_help(copied):
    """The reader itself: hashes are no excuse for trusting a header."""
    config = NamConfig(
        **{k: v for k, v in json.loads((copied / folder.CONFIG).read_text()).items() if k != "model_type"}
    )
    tensors = list(describe.tensors(config.to_dict()))
    first, second = sorted(copied.glob("*.safetensors"))[:2]
    a, b = first.read_bytes(), second.read_bytes()
    for one, two, said in ((b, a, "the index says"), (a[:-7], b, "is damaged"), (b"\0" * 64, b, "is damaged")):
        first.write_bytes(one), second.write_bytes(two)
        with pytest.raises(Refused, match=said):
            folder.reader(copied, tensors)


HOSTILE = {
    "hidden_size": (-64, 2**40, "64", 64.0, None, True, [64]),
    "layer_kinds": ([], ["mla"] * 600_000, ["mla"] * 11 + ["os.system"], "mla", {"a": 1}),
    "index_sources": ([None] * 3, [None] * 8 + [11] + [None] * 3, [None] * 8 + [3] + [None] * 3),
    "mtp_depths": (-1, 1e9, 65, 0),
    "activation": ("relu", ["squared_relu"]),
    "norm_epsilon": (0, -1.0, float("nan"), "1e-5"),
    "mla": (None, {}, [1], {"q_lora_rank": 16}),
    "moe": ({"experts": 4, "top_k": 9},),
    "mhc": (4, {}, {"streams": 4, "sinkhorn_steps": 20}, {"streams": 4, "sinkhorn_steps": 10**9, "epsilon": 1e-6},
            {"streams": 9, "sinkhorn_steps": 20, "epsilon": 1e-6}),
    "ngrams": ([], {"order": 2}, {"order": 1, "heads": 1, "buckets": 8, "width": 4}, {"order": 10**9, "heads": 1, "buckets": 8, "width": 4},
               {"order": 2, "heads": 1, "buckets": 8, "width": 4, "document_end": 256}),
    "auto_map": ({"AutoModelForCausalLM": "evil/repo--modeling_nam.NamForCausalLM"}, None),
    "model_type": ("llama", None),
    "num_labels": (3, 10**8),
    "to_dict": (1,),
    "attribute_map": ({"hidden_size": "vocab_size"},),
    "num_hidden_layers": (99,),
    "eos_token_id": ("x", True),
    "learned_positions": (3,),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in HOSTILE.items() for v in values], ids=str)
def test_a_hostile_config_is_refused_by_key(copied, prompts, capsys, key, value):
    """Signed by a hostile manifest too, so that it is the config that is looked at."""
    tree = json.loads((copied / folder.CONFIG).read_text())
    (copied / folder.CONFIG).write_text(json.dumps({**tree, key: value}))
    folder.write_manifest(copied, {}, step="", weights="")
    said = refusal(copied, capsys)
    assert said.startswith("error: ") and "config.json" in said
    assert key in said or key in ("auto_map", "model_type")


@pytest.mark.parametrize(
    "words",
    [
        "--top-k -1", "--temperature 1 --top-p 0", "--temperature 1e-42", "--temperature nan", "--seed 99999999999999999999", "--new 0",
    ],
)  # fmt: skip
def test_words_out_of_bounds_are_refused_before_anything_is_read(prompts, words):
    with pytest.raises(Refused) as refused:
        generate.main(["nowhere", "--file", str(prompts), *words.split()])
    assert f"argument {words.split()[-2]}: `{words.split()[-1]}` is no" in refused.value.render()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"tokens": null}', "`tokens` is no list of integers"),
        ('{"tokens": ["a"]}', "`tokens` is no list of integers"),
        ('{"prompt": "\\ud800 x"}', "`prompt` is no text of Unicode characters"),
        ('{"tokens": [-5, 2]}', "token -5 of a vocabulary of"),
        ('{"tokens": [1], "note": "a\u2028b"}', None),
    ],
)
def test_lines_of_a_file(made, prompts, capsys, line, said):
    prompts.write_text(line + "\n", encoding="utf-8")
    code = generate.main([str(made("native")[1]), "--file", str(prompts), "--new", "1"])
    assert (code, said or "") == (2 if said else 0, said or "") and (said or "") in capsys.readouterr().err


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:7"])
def test_a_device_that_is_not_there(made, prompts, capsys, device):
    assert generate.main([str(made("native")[1]), "--file", str(prompts), "--new", "1", "--device", device]) == 2
    assert f"`{device}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (generate.main, ("{here}", "--prompt", "x")),
        (command.main, ("perplexity", "{here}", "{here}")),
        (command.main, ("evaluate", "{here}", "no_such_task")),
    ],
    ids=["generate", "perplexity", "evaluate"],
)
def test_kernels_on_a_cpu_are_refused_before_anything_is_read(tmp_path, capsys, main, words):
    assert main([*(word.format(here=tmp_path) for word in words), "--kernels", "nam_megatron"]) == 2
    assert "the kernels of `nam_megatron` compute on a GPU, not on `cpu`" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_config_does_not_take_is_refused_before_a_shard_is_written(made, tmp_path, capsys):
    shutil.copytree(made("yarn")[0], tmp_path / "ckpt")
    tree = to_tree(load_plan(tmp_path / "ckpt" / "plan.json").plan.recipe)
    tree["model"]["norm_epsilon"] = 1.5
    (tmp_path / "ckpt" / "plan.json").write_text(plan_json(translate(from_tree(tree))))
    assert command.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2
    assert "norm_epsilon: between 0 and 1, not 1.5" in capsys.readouterr().err
    assert generate.main([str(tmp_path / "ckpt"), "--prompt", "x", "--tokenizer", str(tmp_path)]) == 2


@pytest.mark.slow
def test_learned_positions_are_not_outrun(made, capsys):
    checkpoint, export = made("gpt")
    model = open_model(export, torch.float32)
    rows = model.config.learned_positions
    with pytest.raises(ValueError, match=f"{rows + 1} tokens, and {rows} positions are learned"):
        model(random(1, rows + 1))
    padded = torch.ones(1, rows + 8, dtype=torch.long)
    padded[:, :8] = 0
    assert model(random(1, rows + 8), attention_mask=padded).logits.isfinite().all()
    assert command.main(["check", str(checkpoint), str(export), "--length", str(rows + 1), "--device", "cpu"]) == 2
    assert f"the model has learned {rows} positions" in capsys.readouterr().err
    assert command.main(["check", str(checkpoint), str(export), "--length", str(rows), "--device", "cpu"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 5000, "\x00"])
def test_a_config_that_is_none_is_refused(copied, prompts, capsys, text):
    (copied / folder.CONFIG).write_text(text)
    folder.write_manifest(copied, {}, step="", weights="")
    assert "config.json` cannot be understood" in refusal(copied, capsys)


def test_a_pickle_in_an_export_is_refused(copied, prompts, capsys):
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert "`pytorch_model.bin` is not of this export" in refusal(copied, capsys).replace(f"{copied}/", "")


def test_an_index_that_would_run_code_is_refused(made, tmp_path, prompts, capsys):
    shutil.copytree(made("native")[0], tmp_path / "ckpt")

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "ckpt" / "iter_0000003" / ".metadata").write_bytes(pickle.dumps(Evil()))
    test_train.signed(tmp_path / "ckpt" / "iter_0000003")
    assert "it names `posix.system`" in refusal(tmp_path / "ckpt", capsys)
    assert not (tmp_path / "ran").exists()


def test_a_cut_checkpoint_is_refused_by_tensor(made, tmp_path, prompts, capsys):
    shutil.copytree(made("native")[0], tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "iter_0000003" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:40000])
    assert f"checkpoint `{path.parent}` is damaged: `{path.name}`" in refusal(tmp_path / "ckpt", capsys)
    test_train.signed(path.parent)
    said = refusal(tmp_path / "ckpt", capsys)
    assert f"in `{path}` is damaged" in said and "error: `" in said


@pytest.mark.slow
def test_another_plan_is_refused_by_key(made, tmp_path, capsys):
    words = ["import", str(made("author")[1]), str(made("author odd")[0] / "plan.json"), str(tmp_path / "out")]
    assert command.main(words) == 2
    said = capsys.readouterr().err
    assert "the export has `mtp_depths` 1, and the plan 2" in said and "`mamba3`" in said
    assert not (tmp_path / "out").exists()


def test_the_nearest_plan_is_a_checkpoints(tmp_path):
    """Of Megatron-Bridge's run the file is in a folder; one that lies above it is what was meant."""
    step = tmp_path / "run" / "iter_0000003"
    at = [f / export.PLAN for f in (step, step.parent, step / export.SIGNED, step.parent / export.SIGNED)]
    for path in reversed(at):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert export.plan_of(step, step) == path


@pytest.mark.slow
def test_a_plan_of_other_angles_is_refused(made):
    """They have no tensor that would be missed."""
    checkpoint, exported = made("llama tp")
    wanted = describe.config(load_plan(checkpoint / "plan.json").plan)
    assert list(export.differences(exported, wanted)) == []
    del wanted["llama_rope"]
    (problem,) = export.differences(exported, wanted)
    assert "the export has `llama_rope`" in problem.message


def test_nothing_is_written_over(made, tmp_path, capsys):
    checkpoint, exported = made("native")
    assert command.main(["export", str(checkpoint), str(exported)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_nothing_is_written_into_an_export(made, tmp_path, capsys):
    """Which would be refused from then on, with a file that nobody vouches for."""
    checkpoint, exported = made("native")
    was = sorted(exported.rglob("*"))
    for asked in (
        ["export", checkpoint, exported / "in"],
        ["perplexity", exported, tmp_path, "--out", exported / "r.json"],
    ):
        assert command.main([*map(str, asked)]) == 2
        assert f"`{exported}` is an export, which vouches" in capsys.readouterr().err
    (tmp_path / "link").symlink_to("nowhere")
    assert command.main(["export", str(checkpoint), str(tmp_path / "link")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert sorted(exported.rglob("*")) == was


def test_a_result_lies_beside_the_record_of_its_run_and_replaces_nothing_there(tmp_path, capsys):
    (tmp_path / "receipt.json").touch()
    for out, refused in (("tasks.json", False), ("receipt.json", True)):
        assert command.main(["perplexity", str(tmp_path), str(tmp_path / "set"), "--out", str(tmp_path / out)]) == 2
        assert ("is the record of a run" in capsys.readouterr().err) is refused


def test_what_a_watch_cannot_do_is_said_before_it_waits(tmp_path):
    """For a step, which may come hours later, or never to the folder of another."""
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "integrity.json").touch()
    for step, dataset, device, said in (
        ("", None, "cuda", "no `--dataset` is given"),
        ("", tmp_path / "set", "tpu", "no device `tpu`"),
        ("", tmp_path / "set", "cpu", f"there is no `{tmp_path}/set`"),
        ("iter_0000003", None, "cpu", "is one step"),
    ):
        with pytest.raises(Refused, match=said):
            watch.watch(tmp_path / step, tmp_path / "out", None, dataset, device, 3, 0.01, lambda _: None)
    (tmp_path / "nam_export.json").touch()
    with pytest.raises(Refused, match=f"`{tmp_path}` is an export"):
        watch.watch(tmp_path / "iter_0000003", tmp_path, None, None, "cpu", 3, 0.01, lambda _: None)


def test_who_watches_a_folder_without_steps_is_told(made, tmp_path, monkeypatch):
    """It may be a run that has not saved yet, or a wrong name."""
    checkpoint, said = made("native")[0], []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            shutil.copytree(checkpoint, tmp_path / "late")

    looks = iter(range(9))
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=lambda _: next(looks)))
    watch.watch(tmp_path / "late", tmp_path / "out", None, None, "cpu", 2, 0.01, say)  # a run's steps may go past it
    assert said[0] == f"no step in `{tmp_path}/late` yet: waiting" and (tmp_path / "out/iter_0000003").is_dir()


@pytest.mark.parametrize("said", ["-1", "../../x", "9" * 5000, "pipe", "iter_0000003", "closed"])
def test_a_tracker_that_names_no_step_is_not_waited_for(made, tmp_path, monkeypatch, said):
    shutil.copytree(made("native")[0], tmp_path / "ckpt")
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    os.mkfifo(tracker) if said == "pipe" else tracker.write_text(said)
    if said == "closed":  # root may read whatever there is
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied", str(tracker))))
    with pytest.raises(Refused, match=r"is a pipe|no step|cannot be read: Permission denied"):
        watch.watch(tmp_path / "ckpt", tmp_path / "out", None, None, "cpu", 3, 0.01, lambda text: None)


def test_what_lay_there_is_not_taken_for_a_steps_export(made, tmp_path):
    """Of another run, or of the same step as it was before a run went back; the right one is kept."""
    checkpoint, exported = made("native")
    shutil.copytree(exported, tmp_path / "out" / "iter_0000003")
    before = (tmp_path / "out" / "iter_0000003" / folder.INDEX).stat()
    look = partial(watch.watch, checkpoint, tmp_path / "out", None, None, "cpu", 3, 0.01, lambda text: None)
    look()
    assert (tmp_path / "out" / "iter_0000003" / folder.INDEX).stat() == before
    shutil.rmtree(tmp_path / "out" / "iter_0000003")
    shutil.copytree(made("author")[1], tmp_path / "out" / "iter_0000003")
    with pytest.raises(Refused, match="was there already, and is not the export of"):
        look()


def test_what_transformers_saved_is_signed_by_refresh(made, tmp_path, prompts, capsys):
    """And is an export from then on: computed with, and imported to the last bit."""
    checkpoint, exported = made("native")
    again = tmp_path / "hf"
    NamForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).save_pretrained(again)
    assert not (again / folder.INDEX).exists()  # one small file
    said = refusal(again, capsys)
    hint = f"python -m nam_megatron.hf refresh {again}"
    assert "nothing vouches for its files" in said and hint in said
    assert command.main(["check", str(checkpoint), str(again)]) == 2
    assert hint in capsys.readouterr().err
    (again / "custom_generate").mkdir()
    (again / "custom_generate" / "generate.py").write_text("")
    assert command.main(hint.split()[3:]) == 2
    assert "custom_generate/generate.py` is not of this export" in capsys.readouterr().err
    shutil.rmtree(again / "custom_generate")
    assert command.main(hint.split()[3:]) == 0
    for path in (again, exported):
        assert generate.main([str(path), "--file", str(prompts), "--new", "5", "--dtype", "fp32"]) == 0
    one, other = capsys.readouterr().out.splitlines()[-2:]
    assert one == other
    export.load(again, checkpoint / "plan.json", tmp_path / "back", lambda text: None)
    old, new = (distributed.Checkpoint(distributed.step_folder(at)) for at in (checkpoint, tmp_path / "back"))
    # Values that training does not have are not rounded without a word; who rounds them himself is understood.
    other = NamForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    other.model.layers[2].mixer.dt_bias.data.fill_(1 / 3)
    for name, code in (("third", 2), ("rounded", 0)):
        (other.bfloat16() if name == "rounded" else other).save_pretrained(tmp_path / name)
        assert command.main(["refresh", str(tmp_path / name)]) == 0
        words = [str(tmp_path / name), str(checkpoint / "plan.json"), str(tmp_path / f"{name}.in")]
        assert command.main(["import", *words]) == code
    assert "has values that BF16 does not have" in capsys.readouterr().err
    for tensor in describe.tensors(describe.config(load_plan(checkpoint / "plan.json").plan)):
        assert torch.equal(old.joined(tensor), new.joined(tensor))


# With a tokenizer ----------------------------------------------------------------------------------------------------

TEXTS = [f"// file {i}\nint f{i}(int x) {{\n\treturn {i * 37} * x;  // naïve €{i}\n}}\n" for i in range(60)]


@pytest.fixture(scope="module")
def words_of(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bpe")
    tokenizer.save(tokenizer.train(TEXTS, 256 + 5, progress=False), path / "large")
    return path


def test_the_tokenizer_is_that_of_the_runs_dataset(made, words_of, tmp_path, capsys):
    """Where that is; a dataset that has moved is no reason to export without one."""
    shutil.copytree(made("native")[0], tmp_path / "ckpt")
    assert command.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "none")]) == 0
    assert "tokenizer: none" in capsys.readouterr().err
    tree = to_tree(load_plan(tmp_path / "ckpt" / "plan.json").plan.recipe)
    tree["data"] |= {"name": "built", "path": f"{tmp_path}/set"}
    tree["model"]["vocab_size"] = 264
    (tmp_path / "ckpt" / "plan.json").write_text(plan_json(translate(from_tree(tree))))
    assert command.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2
    said = capsys.readouterr().err
    assert f"the tokenizer of the run's dataset is not in `{tmp_path}/set/tokenizer`" in said
    assert "`--tokenizer FOLDER`" in said and not (tmp_path / "hf").exists()


def test_a_tokenizer_too_large_is_refused(made, words_of, tmp_path, capsys):
    words = ["export", str(made("native")[0]), str(tmp_path / "hf"), "--tokenizer", str(words_of / "large")]
    assert command.main(words) == 2
    assert "has 261 entries, and the model's vocabulary 256" in capsys.readouterr().err


@pytest.fixture(scope="module")
def spoken(tmp_path_factory, words_of) -> tuple[Path, Path]:
    """A checkpoint of a vocabulary that the tokenizer fits, and its export with it."""
    at = tmp_path_factory.mktemp("spoken")
    overrides = (*STEPS, "model.vocab_size=264", f"schedule.save={at}/ckpt", "cluster=h200_1")
    test_train.trained(run("native", at, *overrides))
    export.export(at / "ckpt", at / "hf", words_of / "large", lambda text: None)
    return at / "ckpt", at / "hf"


def test_text_goes_in_and_comes_out(spoken, capsys):
    from transformers import AutoTokenizer

    assert generate.main([str(spoken[1]), "--prompt", "int naïve €", "--new", "6", "--dtype", "fp32"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("int naïve €")
    theirs = AutoTokenizer.from_pretrained(spoken[1])
    prompt = theirs("int naïve €").input_ids
    new = [t for (t,) in decode(open_model(spoken[1], torch.float32), [prompt], Options(6, ends=[theirs.eos_token_id]))]
    assert text == "int naïve €" + theirs.decode(new, skip_special_tokens=True) + "\n"


def test_a_datasets_own_tokenizer_that_was_changed_since_is_another(tmp_path):
    """It was believed, since no other one is known: `generate` stopped elsewhere, and an export said so to everybody."""
    (tokens := tmp_path / "set/tokenizer").mkdir(parents=True)
    (tokens / tokenizer.FILE).write_text("{}")
    (config := tokens / tokenizer.CONFIG).write_text('{"eos_token": "a"}')
    of_data = {f"tokenizer/{tokenizer.CONFIG}": {"sha256": digest(config)}}
    (tmp_path / "data.json").write_text(json.dumps({"files": of_data}))
    copied = shutil.copytree(tokens, tmp_path / "copy")
    assert [*export.other_ends(tokens, tokens, tmp_path)] == []
    config.write_text('{"eos_token": "b"}')
    changed = shutil.copytree(tokens, tmp_path / "changed")
    for given in (tokens, tmp_path / "set/../set/tokenizer", changed):
        (problem,) = export.other_ends(tokens, given, tmp_path)
        assert problem.message == f"`{config}` is not what it was when the model was trained"
    assert [*export.other_ends(tokens, copied, tmp_path)] == [], "as the hint says"


def test_a_tokenizer_that_ends_documents_otherwise_is_another(spoken, tmp_path, capsys):
    """With the same words: `generate` would stop elsewhere, and an export would say so to everybody."""
    for name in (tokenizer.FILE, tokenizer.CONFIG):
        shutil.copyfile(spoken[1] / name, tmp_path / name)
    keys = json.loads((tmp_path / tokenizer.CONFIG).read_text())
    (tmp_path / tokenizer.CONFIG).write_text(json.dumps(keys | {"eos_token": "a"}))
    assert generate.main([str(spoken[1]), "--prompt", "int f3", "--new", "2", "--tokenizer", str(tmp_path)]) == 2
    assert f'`{tmp_path}` has {{"eos_token_id": ' in capsys.readouterr().err
    export.load(spoken[1], spoken[0] / "plan.json", tmp_path / "again", lambda text: None)
    words = ["export", str(tmp_path / "again"), str(tmp_path / "hf"), "--tokenizer"]
    assert command.main([*words, str(tmp_path)]) == 2 and not (tmp_path / "hf").exists()
    assert "which the model was trained with" in capsys.readouterr().err
    (tmp_path / tokenizer.CONFIG).write_text(json.dumps(keys | {"model_max_length": 7}))
    assert command.main([*words, str(tmp_path)]) == 0


HOLE = "decoder.final_norm.weight"


def swapped_index(step: Path, change) -> None:
    index = pickle.loads((step / ".metadata").read_bytes())
    change(index, index.state_dict_metadata[HOLE])
    with (step / ".metadata").open("wb") as stream:
        pickle.dump(index, stream)


def pieces(*starts: int, value: Any = None):
    """Of a tensor of 64 values, pieces of equal size that begin at `starts`."""

    def change(index: Any, of: Any, step: Path) -> None:
        made = torch.ones(64 // len(starts), dtype=torch.bfloat16) if value is None else value
        torch.save(made, step / "__9_0.distcp")
        of.chunks = [metadata.ChunkStorageMetadata(torch.Size((at,)), made.shape) for at in starts]
        for at in [at for at in index.storage_data if at.fqn == HOLE]:
            del index.storage_data[at]
        stored = filesystem._StorageInfo("__9_0.distcp", 0, (step / "__9_0.distcp").stat().st_size)
        index.storage_data |= {metadata.MetadataIndex(HOLE, torch.Size((at,))): stored for at in starts}

    return change


def setting(name: str, value: Any):
    return lambda index, of, step: setattr(of, name, value)


def stored(value: Any):
    return lambda index, of, step: index.storage_data.update(
        dict.fromkeys([at for at in index.storage_data if at.fqn == HOLE], value)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (pieces(0, 16), "holds a NaN or an infinity"),  # 48 of 64 values, the others were whatever lay in memory
        (pieces(0, value=torch.full((64,), torch.nan, dtype=torch.bfloat16)), "holds a NaN or an infinity"),
        (pieces(8, value=torch.ones(64, dtype=torch.bfloat16)), "lies outside it"),
        (pieces(0, value=torch.ones(64, dtype=torch.bfloat16).to_sparse()), "is not what its index says"),
        (pieces(0, value=torch.ones(64, dtype=torch.bfloat16, device="meta")), "is not what its index says"),
        (setting("size", None), "cannot be read"),
        (setting("properties", None), "cannot be read"),
        (setting("chunks", [1]), "cannot be read"),
        (stored(4), "cannot be read"),
        (stored(filesystem._StorageInfo("__0_0.distcp", 0, 10**15)), "is damaged: "),
        *((lambda index, of, step, at=at: index.state_dict_metadata.update({f"{at}.x": of}), f"`{at}.x`, and the plan has no such tensor")
          for at in ("decoder.layers.0", "embedding", "mtp.layers.0", "output_layer")),
    ],
)  # fmt: skip
def test_an_index_that_leaves_a_hole_or_says_more_than_the_plan_is_refused(made, tmp_path, capsys, change, says):
    shutil.copytree(made("native")[0], tmp_path / "ckpt")
    step = tmp_path / "ckpt" / "iter_0000003"
    swapped_index(step, partial(change, step=step))
    checksums.put(step, checksums.digests(step, checksums.names(step)))
    (tmp_path / "f.jsonl").write_text('{"tokens": [1]}\n')
    assert generate.main([str(tmp_path / "ckpt"), "--file", str(tmp_path / "f.jsonl"), "--new", "1"]) == 2
    assert says in capsys.readouterr().err
    assert command.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2


def test_an_export_has_no_password_of_its_plan(made, tmp_path):
    """What an address has before its host went with the plan into a folder that is published."""
    tree = to_tree(load_plan(made("native")[0] / "plan.json").plan.recipe)
    tree["feature"]["tracking"] = dict.fromkeys(
        ("tensorboard", "wandb_project", "wandb_name", "wandb_dir", "wandb_entity")
    )
    address = "https://me:hunter2@/hunter2@host.example?key=hunter2"
    tree["feature"]["tracking"] |= {"mlflow": address, "mlflow_experiment": "E"}
    shutil.copytree(made("native")[0], tmp_path / "ckpt")
    for at in (tmp_path / "ckpt", step := tmp_path / "ckpt" / "iter_0000003"):
        (at / "plan.json").write_text(plan_json(translate(from_tree(tree))))
    checksums.put(step, checksums.digests(step, checksums.names(step)))
    export.export(tmp_path / "ckpt", tmp_path / "hf", None, lambda text: None)
    said = (tmp_path / "hf" / "plan.json").read_text()
    assert "https://host.example" in said and "hunter2" not in said
    load_plan(tmp_path / "hf" / "plan.json")


def test_a_character_of_several_tokens_is_shown_whole(monkeypatch, capsys):
    monkeypatch.setattr(generate, "decode", lambda *_: ([byte] for byte in "€!".encode()))
    by_bytes = SimpleNamespace(decode=lambda said: bytes(said).decode(errors="replace"))
    generate._stream(None, b"a", Options(4), by_bytes)
    assert capsys.readouterr().out == "a€!\n"


def test_a_tokenizer_of_others_says_where_texts_end_and_begins_none(spoken, tmp_path, capsys):
    """A text goes on behind its last word with the blank that the tokenizer keeps in the next one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"\u2581w{i}": i for i in range(3, 264)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "theirs").mkdir()
    made.save(str(tmp_path / "theirs" / tokenizer.FILE))
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "tokenizer_class": "TokenizersBackend"}
    (tmp_path / "theirs" / tokenizer.CONFIG).write_text(json.dumps(config))
    export.export(spoken[0], tmp_path / "hf", tmp_path / "theirs", lambda text: None)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 2
    model = open_model(tmp_path / "hf", torch.float32)
    new = [token for (token,) in decode(model, [[5, 9]], Options(4))]
    text = "w5 w9" + "".join(f" w{token}" for token in new if token > 2)
    command = [str(tmp_path / "hf"), "--new", "4", "--dtype", "fp32", "--endless"]
    assert generate.main([*command, "--prompt", "w5 w9"]) == 0
    assert capsys.readouterr().out == text + "\n"
    (tmp_path / "p.jsonl").write_text('{"prompt": "w5 w9"}\n')
    assert generate.main([*command, "--file", str(tmp_path / "p.jsonl")]) == 0
    assert "w5 w9" + json.loads(capsys.readouterr().out)["text"] == text
    harness = pytest.importorskip("nam_megatron.hf.evaluate").NamLM(tmp_path / "hf", dtype=torch.float32)
    assert harness.tok_encode("w5 w9") == [5, 9] and harness.tok_batch_encode(["w5 w9"])[0].tolist() == [[5, 9]]
    # what stands before a text's first word, as in the data
    assert harness.prefix_token_id == harness.eot_token_id == 2


def test_another_tokenizer_is_refused(spoken, words_of, tmp_path, prompts, capsys):
    shutil.copytree(spoken[1], tmp_path / "hf")
    tokenizer.save(tokenizer.train(TEXTS, 262, progress=False), tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / tokenizer.FILE, tmp_path / "hf" / tokenizer.FILE)
    assert f"`{tmp_path}/hf/tokenizer.json`" in refusal(tmp_path / "hf", capsys)
    one, other = (at / tokenizer.FILE for at in (words_of / "large", tmp_path / "other"))
    for told in (folder.digest(one), identity.laid_out(identity.tokens(one))):  # a dataset's word, by file or by tokens
        assert export.same_tokens(None, told, one.parent) and not export.same_tokens(None, told, other.parent)


@pytest.mark.slow
def test_imported_weights_know_their_tokenizer(spoken, words_of, tmp_path):
    """However its file is laid out; another of the same size is told, and weights exported without one ask nothing."""
    from nam_megatron.data import __main__ as data

    export.load(spoken[1], spoken[0] / "plan.json", tmp_path / "again", lambda text: None)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    shutil.copytree(words_of / "large", tmp_path / "other")
    swapped = json.loads((tmp_path / "other" / tokenizer.FILE).read_text())
    ids = swapped["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other" / tokenizer.FILE).write_text(json.dumps(swapped))
    for name, tokens in (("same", words_of / "large"), ("else", tmp_path / "other")):
        words = [
            "build",
            tmp_path / name,
            tmp_path / "t.jsonl",
            "--tokenizer",
            tokens,
            "--valid",
            "0.2",
            "--workers",
            1,
        ]
        assert data.main([str(w) for w in words]) == 0

    def found(*words: str) -> list[str]:
        begins = (*SMALL, *STEPS, "model.vocab_size=264", "cluster=h200_1", f"schedule.load={tmp_path}/again", *words)
        begins += (f"schedule.save={tmp_path}/on",)
        lowering = translate(load("nam56r_smoke", begins))
        return [f"{p.key}: {p.message}" for p in beside.objections(lowering, thorough=False)]

    # And so do `generate` and an export of them.
    assert generate.main([str(tmp_path / "again"), "--prompt", "int f3", "--new", "2"]) == 0
    assert command.main(["export", str(tmp_path / "again"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / tokenizer.FILE).read_bytes() == (words_of / "large" / tokenizer.FILE).read_bytes()
    laid_out = tmp_path / "again" / "tokenizer" / tokenizer.FILE
    laid_out.write_text(json.dumps(json.loads(laid_out.read_text()), indent=7))
    assert not found("data=built", f"data.path={tmp_path}/same")
    (told,) = found("data=built", f"data.path={tmp_path}/else")
    assert told.startswith(
        f"data.path: the data's tokenizer, `{tmp_path}/else/tokenizer`, is another than that of the weights"
    )
    shutil.rmtree(laid_out.parent)
    assert not found("data=built", f"data.path={tmp_path}/else")


@pytest.mark.parametrize("piece", [1, 14, 2**25])
def test_two_runs_are_apart_by_torchs_own_divergence(monkeypatch, piece):
    monkeypatch.setattr(check, "PIECE", piece)
    sizes, by_position = [], check._by_position
    monkeypatch.setattr(check, "_by_position", lambda x, y: sizes.append(x.numel()) or by_position(x, y))
    torch.manual_seed(5)
    one, other = 3 * torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    found = check.compare(check.Run(one, (one,), ()), check.Run(other, (other,), (), own=(other,)), "fp32")
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (one, other))
    assert found.kl == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item(), rel=1e-5)
    assert max(sizes) == min(max(piece, 7), 42) and sum(sizes) == 42
    assert found.cosine == pytest.approx(torch.cosine_similarity(one, other, -1).median().item(), rel=1e-5)
    assert found.relative == pytest.approx(((one - other).abs().max() / one.abs().max()).item())
    assert found.greedy == pytest.approx((one.argmax(-1) == other.argmax(-1)).float().mean().item())
    for bad in (one.log(), one / 0):
        with pytest.raises(Refused, match="not finite"):
            check.compare(check.Run(one, (), ()), check.Run(bad, (), ()), "fp32")
    with pytest.raises(Refused, match="hidden states of MTP that are not finite"):
        check.compare(check.Run(one, (), (one,)), check.Run(one, (), (one.log(),)), "fp32")


@pytest.mark.parametrize(
    ("dtype", "asked"), [("fp32", {"relative", "ahead"}), ("bf16", {"cosine", "least", "kl", "depths", "otherwise"})]
)
def test_each_limit_of_a_comparison_is_asked_by_itself(dtype, asked):
    least = dict(cosine=check.COSINE, least=check.LEAST, kl=check.KL, relative=check.RELATIVE, greedy=0.0)
    least |= dict(layers=(1.0,), ahead=(check.RELATIVE,), own=(1.0,), depths=(check.COSINE,), otherwise=check.OTHERWISE)
    beyond = dict(
        cosine=0.99,
        least=-1.0,
        kl=0.1,
        relative=1.0,
        greedy=-1.0,
        layers=(9.0,),
        ahead=(0.0, 1.0),
        own=(9.0,),
        depths=(1.0, 0.99),
        otherwise=1.0,
    )
    assert check.Outcome(dtype, **least).passed
    assert {key for key in least if not check.Outcome(dtype, **least | {key: beyond[key]}).passed} == asked


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
def test_windows_predict_every_token_but_the_first_once(tmp_path, tokens):
    """As many as whole windows hold; what is too short for one is read by itself."""
    row = list(range(1, tokens + 1))
    builder = IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=numpy.uint16)
    builder.add_document(row, [tokens])
    builder.finalize(str(tmp_path / "t.idx"))
    whole = (tokens - 1) // 3 * 3 or tokens
    for batch in (1, 2):
        read = [one for rows in perplexity.windows(tmp_path / "t", 4, None, batch) for one in rows.tolist()]
        assert [token for one in read for token in one[1:]] == row[1 : 1 + whole]
    assert sum(map(len, perplexity.windows(tmp_path / "t", 4, None, 1))) == max((tokens - 1) // 3, tokens > 1)
    (tmp_path / "t.bin").write_bytes(b"x")
    with pytest.raises(Refused, match=r"t.bin` is cut off: 1 bytes of"):
        next(perplexity.windows(tmp_path / "t", 4, None, 1))


@pytest.mark.parametrize(("weights", "dataset"), [("w", "d"), ("w", "e"), ("v", "d"), ("w", None), (None, "d")])
def test_a_result_is_of_these_weights_and_that_dataset(tmp_path, monkeypatch, weights, dataset):
    monkeypatch.setattr(watch.manifest, "read", lambda path: SimpleNamespace(key="d"))
    said = {"weights": weights, "dataset": dataset}
    said = {key: value for key, value in said.items() if value}
    # by `hf perplexity`, of a few windows say
    (tmp_path / "s.json").write_text(json.dumps(said | {"step": "iter_0000003"}))
    assert not watch._scored(tmp_path / "s.json", {"weights": "w"}, tmp_path)
    (tmp_path / "s.json").write_text(json.dumps(said | {"step": 3}))
    assert watch._scored(tmp_path / "s.json", {"weights": "w"}, tmp_path) == ((weights, dataset) == ("w", "d"))
    assert not watch._scored(tmp_path / "none.json", {"weights": "w"}, tmp_path)


def test_perplexity_is_that_of_the_windows(spoken, words_of, tmp_path, capsys, monkeypatch):
    from nam_megatron.data import __main__ as data

    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    words = ["build", tmp_path / "set", tmp_path / "t.jsonl", "--tokenizer", words_of / "large", "--valid", "0.2"]
    assert data.main([str(w) for w in [*words, "--workers", 1]]) == 0
    capsys.readouterr()
    monkeypatch.setattr(perplexity, "SECONDS", 0.0)
    found = []
    for path in spoken:
        assert command.main(["perplexity", str(path), str(tmp_path / "set"), "--dtype", "fp32", "--most", "3"]) == 0
        said = capsys.readouterr()
        found.append(json.loads(said.out))
        assert re.search(rf"> 96 tokens of `valid` in \d+ s, loss {found[-1]['loss']:.4f}\n", said.err)
    row = torch.from_numpy(numpy.fromfile(tmp_path / "set" / "valid.bin", dtype=numpy.uint16).astype(numpy.int64))
    model = open_model(spoken[1], torch.float32)
    windows = torch.stack([row[i * 32 : i * 32 + 33] for i in range(3)])
    loss = model(windows, labels=windows).loss.item()
    assert found[0]["loss"] == found[1]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found[1]["weights"] == json.loads((spoken[1] / folder.MANIFEST).read_text())["weights"]
    assert found[0]["tokens"] == 96
    with monkeypatch.context() as patched, pytest.raises(Refused, match=f"the loss of `{path}` is not finite"):
        spoilt = open_model(spoken[1], torch.float32)
        spoilt.lm_head.weight.fill_(torch.nan)
        patched.setattr(perplexity, "open_model", lambda *_: spoilt)
        perplexity.perplexity(path, tmp_path / "set", "valid", 3, 1, torch.float32, "cpu")
    small = SimpleNamespace(config=SimpleNamespace(vocab_size=260))
    with (
        monkeypatch.context() as patched,
        pytest.raises(Refused, match="has 261 entries, and the model's vocabulary 260"),
    ):
        patched.setattr(perplexity, "open_model", lambda *_: small)
        perplexity.perplexity(path, tmp_path / "set", "valid", 3, 1, torch.float32, "cpu")
    with pytest.raises(Refused, match="has 261 entries, and the model's vocabulary 260"):
        perplexity.held_out(tmp_path / "set", 260, 2, 16)
    assert found[0]["checkpoint"] == found[1]["checkpoint"] == checksums.whole(spoken[0] / "iter_0000003")

    # A dataset of another tokenizer of equal size; an export says its own, and these weights were trained without one.
    assert found[0]["unproven"] == ["tokenizer"] and found[1]["unproven"] == ["step", "checkpoint"]
    swapped = json.loads((words_of / "large" / tokenizer.FILE).read_text())
    ids = swapped["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    shutil.copytree(words_of / "large", tmp_path / "else")
    (tmp_path / "else" / tokenizer.FILE).write_text(json.dumps(swapped))
    words = ["build", tmp_path / "other", tmp_path / "t.jsonl", "--tokenizer", tmp_path / "else", "--valid", "0.2"]
    assert data.main([str(w) for w in [*words, "--workers", 1]]) == 0
    other = ["--dataset", str(tmp_path / "other")]
    for refused in (
        ["perplexity", str(spoken[1]), str(tmp_path / "other")],
        ["check", *map(str, spoken), *other],
        ["watch", str(spoken[0]), str(tmp_path / "no"), *other, "--until", "3", "--tokenizer", str(words_of / "large")],
    ):
        assert command.main(refused) == 2
        assert "is another tokenizer than that of" in capsys.readouterr().err
    words = [str(spoken[1]), "--prompt", "int f3", "--new", "2", "--tokenizer"]
    assert generate.main([*words, str(tmp_path / "else")]) == 2
    assert "is another tokenizer than that of" in capsys.readouterr().err
    assert generate.main([*words, str(words_of / "large")]) == 0
    capsys.readouterr()

    # One token, at the same size.
    shutil.copytree(tmp_path / "set", tmp_path / "flipped")
    tokens = bytearray((tmp_path / "set" / "valid.bin").read_bytes())
    tokens[2] ^= 1
    (tmp_path / "flipped" / "valid.bin").write_bytes(tokens)
    assert command.main(["perplexity", str(spoken[1]), str(tmp_path / "flipped")]) == 2
    assert "valid.bin` is not what was built" in capsys.readouterr().err
    assert command.main(["check", *map(str, spoken), "--dataset", str(tmp_path / "flipped")]) == 2
    assert "valid.bin` is not what was built" in capsys.readouterr().err

    # What `check --dataset` asks about.
    text = perplexity.held_out(tmp_path / "set", model.config.vocab_size, 2, 16)
    assert torch.equal(text, torch.stack([row[:16], row[15:31]]))
    asked = ["check", *map(str, spoken), "--dataset", str(tmp_path / "set"), "--length", "99999", "--device", "cpu"]
    assert command.main(asked) == 2
    assert "fewer than 2 x 99999 tokens" in capsys.readouterr().err
    with pytest.raises(Refused, match="fewer than 1 x 99999 tokens"):  # one window there is, which is shorter
        perplexity.held_out(tmp_path / "set", model.config.vocab_size, 1, 99999)

    watched = ["watch", str(spoken[0]), str(tmp_path / "steps"), "--dataset", str(tmp_path / "set"), "--until", "3"]
    assert command.main([*watched, "--tokenizer", str(words_of / "large")]) == 0
    seen = json.loads((tmp_path / "steps" / "iter_0000003.json").read_text())
    assert seen["step"] == 3 and seen["weights"] == found[1]["weights"]
    assert seen["loss"] == pytest.approx(loss, rel=0.05)
    assert seen["tokens"] == (len(row) - 1) // 32 * 32 > 4 * 32
    # A result is kept, where it is of this export and dataset.
    result = tmp_path / "steps" / "iter_0000003.json"
    for old, kept in (({}, True), *(({key: None}, False) for key in ("weights", "dataset", "step"))):
        result.write_text(json.dumps(seen | {"loss": 1.0} | old))
        assert command.main([*watched, "--tokenizer", str(words_of / "large")]) == 0
        assert (json.loads(result.read_text())["loss"] == 1.0) is kept


TASK = """
task: own_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {at}/q.jsonl}}, cache_dir: {at}/cache}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
metric_list: [{{metric: {metric}}}]
"""
# What the harness asks of a model: likelihoods of endings, of a whole text, and texts.
ASKED = {
    "multiple_choice": ("acc", 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"'),
    "loglikelihood_rolling": ("bits_per_byte", 'doc_to_target: "{{q}}"'),
    "generate_until": (
        "exact_match",
        'doc_to_target: "{{text}}"\ngeneration_kwargs: {until: ["never"], max_gen_toks: 4, do_sample: false}',
    ),
}


@pytest.fixture
def questions(spoken, tmp_path) -> str:
    """Three tasks on whose questions the model is right twice of three times, by likelihood and by text."""
    encode, model = tokenizer.load(spoken[1]).encode, open_model(spoken[1], torch.float32)
    lines, choices = [], [" x;", "}", "\n\treturn 37"]
    for number, text in enumerate(("int f3", "// file 12\nint f12(int", "return")):
        asked = encode(text).ids
        with torch.inference_mode():
            likely = [
                model(torch.tensor([asked + end])).logits.log_softmax(-1)[0, len(asked) - 1 : -1].gather(
                    -1, torch.tensor(end)[:, None]
                ).sum().item()
                for end in (encode(choice).ids for choice in choices)
            ]  # fmt: skip
        best = max(range(3), key=likely.__getitem__)
        said = tokenizer.load(spoken[1]).decode([token for (token,) in decode(model, [asked], Options(4))])
        right = {"answer": best, "text": said} if number else {"answer": (best + 1) % 3, "text": "never"}
        lines.append({"q": text, "choices": choices, **right})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, (metric, more) in ASKED.items():
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(kind=kind, at=tmp_path, metric=metric) + more)
    return ",".join(f"{tmp_path}/{kind}.yaml" for kind in ASKED)


def test_the_harness_finds_the_same_in_export_and_checkpoint(
    spoken, words_of, questions, tmp_path, monkeypatch, capsys
):
    """And by its own route, with the export's code; each result says what it was found on."""
    words, found = (
        ["--dtype", "fp32", "--tokenizer", str(words_of / "large"), "--out", str(tmp_path / "new/out.json")],
        [],
    )
    for path in spoken:
        assert command.main(["evaluate", str(path), questions, *words[: 2 if path is spoken[1] else None]]) == 0
        out, err = capsys.readouterr()
        assert "|own_multiple_choice " in err  # for a person
        found.append(json.loads(out))
    assert json.loads((tmp_path / "new/out.json").read_text()) == found[0]
    assert found[0]["results"] == found[1]["results"]
    assert found[0]["unproven"] == ["tokenizer"] and "tokenizer" not in found[1]["unproven"]
    assert found[0]["results"]["own_multiple_choice"]["acc,none"] == pytest.approx(2 / 3)
    assert found[0]["results"]["own_generate_until"]["exact_match,none"] == pytest.approx(2 / 3)
    assert found[1]["weights"] == json.loads((spoken[1] / folder.MANIFEST).read_text())["weights"]
    assert found[0]["checkpoint"] == found[1]["checkpoint"] == checksums.whole(spoken[0] / "iter_0000003")

    from lm_eval import simple_evaluate, tasks

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    their = {"pretrained": str(spoken[1]), "trust_remote_code": True, "dtype": "float32"}
    manager = tasks.TaskManager(include_defaults=False)
    seen = simple_evaluate(
        "hf", their, questions.split(","), batch_size=1, device="cpu", task_manager=manager, bootstrap_iters=0
    )["results"]
    for kind, (metric, _) in ASKED.items():
        ours = found[1]["results"][f"own_{kind}"][f"{metric},none"]
        assert seen[f"own_{kind}"][f"{metric},none"] == pytest.approx(ours, rel=1e-5)


def test_a_question_that_the_harness_cuts_is_counted(spoken):
    from lm_eval.api.instance import Instance

    model = pytest.importorskip("nam_megatron.hf.evaluate").NamLM(spoken[1], dtype=torch.float32)
    model._max_length = 8

    def ask(how, *given):
        return getattr(model, how)([Instance(how, {}, given, 0)], disable_tqdm=True)

    for text, each in (("a b", 0), ("a b c d e f g h i j k l", 1)):
        model.truncated = 0
        ask("loglikelihood", text, " c")
        ask("generate_until", text, {"until": ["z"], "max_gen_toks": 2})
        assert model.truncated == 2 * each


def test_what_the_harness_cannot_evaluate_is_refused(made, spoken, questions, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("task: [")
    shutil.copytree(spoken[0], tmp_path / "changed")
    shard = tmp_path / "changed" / "iter_0000003" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0\0")
    for path, asked, said in (
        (spoken[0], questions, f"no tokenizer goes with `{spoken[0]}`"),
        (spoken[1], f"{tmp_path}/own.yaml", f"`{tmp_path}/own.yaml` cannot be loaded"),
        (tmp_path / "changed", questions, "`__0_0.distcp` is not what was saved"),
        (made("native")[0], questions, "has 261 entries, and the model's vocabulary 256"),
    ):
        tokens = [] if path in spoken else ["--tokenizer", str(spoken[1])]
        assert command.main(["evaluate", str(path), asked, *tokens]) == 2
        assert said in capsys.readouterr().err
