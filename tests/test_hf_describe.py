"""The two names of every tensor, against the budget's own list of parameters."""

import copy
import importlib
import json
import re
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from presets import ALL, lowered

from nam_megatron.budget import static
from nam_megatron.compile.argv import plan_json
from nam_megatron.errors import Refused
from nam_megatron.hf import __main__ as command
from nam_megatron.hf import check, describe, export
from nam_megatron.hf.model.configuration_nam import NamConfig
from nam_megatron.words.sizes import Sizes


def of_the_budget(plan) -> dict[str, int]:
    """Elements by kind over all layers, MTP's inner layers included."""
    z, found = Sizes.of(plan.site), {}
    layers = [(layer.kind, layer) for layer in plan.layers] + [(kind, None) for kind in plan.mtp] * plan.mtp_depths
    for kind, layer in layers:
        held = getattr(z.site.blocks, kind).params(z, layer)
        found[kind] = found.get(kind, 0) + sum(prod(p.shape) * p.count for p in held)
    if mhc := plan.recipe.feature.mhc:
        (stage,) = static.stages(plan)
        found["streams"] = sum(prod(p.shape) * p.count for p in mhc.params(z, stage))
    return found


def of_the_export(config) -> dict[str, int]:
    kinds = dict(enumerate(config["layer_kinds"]))
    found: dict[str, int] = {}
    for tensor in describe.tensors(config):
        words = tensor.name.split(".")
        if "layers" not in words or tensor.name.endswith("expert_bias"):  # which is no parameter
            continue
        index = int(words[words.index("layers") + 1])
        if "streams" in words:
            found["streams"] = found.get("streams", 0) + prod(tensor.shape)
            continue
        kind = config["mtp_kinds"][index] if "mtp" in words else kinds[index]
        found[kind] = found.get(kind, 0) + prod(tensor.shape)
    return found


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_of_a_preset_is_exported_once(name):
    plan = lowered(name).plan
    assert list(describe.objections(plan)) == []
    config = describe.config(plan)
    assert of_the_export(config) == of_the_budget(plan)
    names = [tensor.name for tensor in describe.tensors(config)]
    keys = [key for tensor in describe.tensors(config) for key, _ in tensor.parts]
    assert len(set(names)) == len(names) and len(set(keys)) == len(keys)
    NamConfig(**config)


def test_a_refusal_names_the_key_before_the_checkpoint_is_opened(tmp_path):
    """This one holds nothing."""
    lowering = lowered("nam56r_smoke", "model.blocks.moe.capacity_factor=1.25")
    (tmp_path / "ckpt" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "ckpt" / "plan.json").write_text(plan_json(lowering))
    with pytest.raises(Refused) as refused:
        export.export(tmp_path / "ckpt", tmp_path / "out", None, print)
    assert {p.key for p in refused.value.problems} == {"model.blocks.moe.capacity_factor"}


@pytest.mark.parametrize(
    "overrides",
    [("model.letters.E=mlp",), ("model.blocks.moe.grouped_gemm=false", "model.blocks.moe.shared_expert_hidden_size=0")],
)
def test_biases_are_those_that_the_budget_counts(overrides):
    plan = lowered("nam56r_smoke", "model.linear_bias=true", *overrides).plan
    assert not list(describe.objections(plan))
    found, wanted = (of(plan) for of in (lambda plan: of_the_export(describe.config(plan)), of_the_budget))
    for kind in {"attention", "mlp", "moe"} & wanted.keys():
        assert found[kind] == wanted[kind]


# What a hostile config.json might say: a preset, a key of its config, values that are refused by that key, or by another's name.
HOSTILE = [
    ("qwen3_next_80b_a3b", "attention.rotary_dim", (63, 512, -2, None), ""),
    ("qwen3_next_80b_a3b", "attention.window", (-1, 2**31, 2.5), ""),
    ("qwen3_next_80b_a3b", "attention.unwindowed_every", (-1, "2"), ""),
    ("qwen3_next_80b_a3b", "attention.output_gate", (1,), ""),
    ("qwen3_next_80b_a3b", "attention.qkv_bias", (None,), ""),
    ("qwen3_next_80b_a3b", "gdn.key_heads", (0, 5, 2**40), ""),
    ("qwen3_next_80b_a3b", "gdn.conv_width", (0, True), ""),
    ("qwen3_next_80b_a3b", "moe.shared_expert_hidden_size", (0,), "moe.shared_expert_gate"),
    ("qwen3_next_80b_a3b", "zero_centered_norms", ("yes",), ""),
    ("deepseek_v3", "moe.groups", (0, 7, -8), ""),
    ("deepseek_v3", "moe.chosen_groups", (0, 3, 16), ""),
    ("deepseek_v3", "moe.top_k", (256,), "moe.chosen_groups"),
    ("deepseek_v3", "moe.routed_scaling", (0, -1.0, float("nan"), float("inf"), "2.5"), ""),
    ("deepseek_v3", "moe.router_dtype", ("bf16", 32), ""),
    ("deepseek_v3", "moe.latent_size", (-8, 2**31), ""),
    ("deepseek_v3", "moe.pre_softmax", (0,), ""),
    ("deepseek_v3", "linear_bias", (True, None), ""),
    ("deepseek_v3", "mla.q_lora_rank", (-1, None), ""),
    ("deepseek_v3_2", "mla.q_lora_rank", (0,), ""),
    ("deepseek_v3_yarn", "yarn", ([], {"factor": 2.0}), ""),
    ("deepseek_v3_yarn", "yarn.factor", (0.5, float("nan"), 1e300, None), ""),
    ("deepseek_v3_yarn", "yarn.original_length", (0, 2.0), ""),
    ("deepseek_v3_yarn", "yarn.beta_fast", (0, -1.0), ""),
    ("deepseek_v3_yarn", "yarn.beta_slow", (0, float("inf")), ""),
    ("deepseek_v3_yarn", "yarn.mscale", (-1.0,), ""),
    ("deepseek_v3_yarn", "yarn.mscale_all_dim", (-1.0,), ""),
    ("deepseek_v3_yarn", "yarn.rounded", (None,), ""),
    ("deepseek_v3_yarn", "rotary_base", (1,), ""),
    ("deepseek_v3_yarn", "llama_rope", ({"factor": 8.0},), ""),
    ("llama_3_1_8b", "llama_rope.factor", (0, -8.0), ""),
    ("llama_3_1_8b", "learned_positions", (-1, 2**31), ""),
    ("nam56r", "learned_positions", (64,), ""),
    ("nam56r", "num_key_value_heads", (56,), ""),
    ("nam56r", "layers_block_type", (["attention"],), ""),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "key", "values", "said"), HOSTILE)
def test_a_hostile_size_is_refused_by_key(preset, key, values, said):
    for value in values:
        tree = copy.deepcopy(describe.config(lowered(preset).plan))
        *block, name = key.split(".")
        (tree[block[0]] if block else tree)[name] = value
        with pytest.raises(ValueError, match=f"^{re.escape(said or key)}"):
            NamConfig(**tree)


@pytest.mark.parametrize(
    ("preset", "heads", "width", "grow", "stay"),
    [("nam56r_native_dp", 8, 64, 13, 17), ("nam56r", 56, None, 13, 17), ("qwen3_next_80b_a3b", 2, 256, 12, 36)],
)
def test_an_engine_reads_by_its_own_names_what_layers_remember(preset, heads, width, grow, stay):
    """vLLM 0.33.0 counts keys and values by them; without, it takes all heads for such. No file says them, so none can say otherwise."""
    config = NamConfig(**describe.config(lowered(preset).plan))
    told = config.layers_block_type
    assert (config.num_key_value_heads, config.head_dim) == (heads, width)
    assert (told.count("attention"), told.count("mamba"), len(told)) == (grow, stay, config.num_hidden_layers)
    assert not config.to_dict().keys() & {"num_key_value_heads", "head_dim", "layers_block_type"}
    assert NamConfig(**config.to_dict()).layers_block_type == told
    old = copy.deepcopy(config.to_dict())  # of an export that is older than these keys
    for keys, key in (
        (old, "glu_offset"),
        (old.get("attention", {}), "sinks"),
        (old.get("mla", {}), "latent_norm_epsilon"),
    ):
        keys.pop(key, None)
    assert NamConfig(**old).to_dict() == config.to_dict()


class Asked(Exception):
    """With what a verb's function was called."""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("module", "function", "line", "wanted"),
    [
        ("export", "export", "export a b --tokenizer t --shard-gb 0.5", "a b t _progress 536870912"),
        ("export", "export", "export a b", "a b None _progress 4294967296"),
        ("export", "load", "import a b c", "a b c _progress"),
        ("perplexity", "perplexity", "perplexity a b --split train --most 3 --batch 5 --device d --kernels nam_megatron",
         "a b train 3 5 torch.bfloat16 d nam_megatron _progress"),
        ("perplexity", "perplexity", "perplexity a b", "a b valid None 4 torch.bfloat16 cpu torch _progress"),
        ("watch", "watch", "watch a b --tokenizer t --dataset s --until 6 --seconds 7 --device d", "a b t s d 6 7.0 _progress"),
        ("watch", "watch", "watch a b", "a b None None cpu None 20.0 _progress"),
        ("check", "check", "check a b --length 3 --batch 2 --seed 5 --dtype fp32 --device d --plain", "a b (2, 3) fp32 d True"),
        ("check", "check", "check a b", "a b (2, 200) bf16 cuda False"),
        ("evaluate", "evaluate", "evaluate a t,u.yaml --tokenizer k --shots 2 --limit 3 --batch 5 --dtype fp32 --device d",
         "a ['t', 'u.yaml'] k 2 3 5 torch.float32 d torch"),
        ("evaluate", "evaluate", "evaluate a t", "a ['t'] None None None 4 torch.bfloat16 cpu torch"),
    ],
)  # fmt: skip
def test_each_verb_hands_on_what_was_said(monkeypatch, tmp_path, module, function, line, wanted):
    """In its order: two folders, or a dtype and a device, are easily exchanged."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()

    def asked(*words):
        shown = (tuple(w.shape) if isinstance(w, torch.Tensor) else getattr(w, "__name__", w) for w in words)
        raise Asked(" ".join(map(str, shown)))

    monkeypatch.setattr(importlib.import_module(f"nam_megatron.hf.{module}"), function, asked)
    model = SimpleNamespace(vocab_size=9, to_dict=lambda: {"max_position_embeddings": 200})
    monkeypatch.setattr(export, "config_of", lambda path: model)
    with pytest.raises(Asked) as said:
        command.main(line.split())
    assert str(said.value) == wanted


@pytest.mark.parametrize(
    ("plain", "kernels", "gemm"), [(True, "naive", "transformer_engine"), (False, "fused", "torch")]
)
def test_one_device_holds_all_of_the_model(plain, kernels, gemm):
    lowering = lowered("nam56r_fused", "execution.dsa.query_pieces=4")
    plan, alone = lowering.plan, check.one_device(lowering, plain).plan
    assert alone.recipe.execution.dsa.query_pieces == 1, "of any length"
    assert (plan.recipe.world_size, alone.recipe.world_size) == (8, 1)
    assert [layer.kind for layer in alone.layers] == [layer.kind for layer in plan.layers] and "|" not in alone.pattern
    assert {alone.recipe.execution.mla.kernels, alone.recipe.execution.mamba3.kernels} == {kernels}
    assert alone.recipe.execution.moe.expert_gemm == gemm
    assert alone.recipe.schedule.save is None and not alone.recipe.precision.fused_grad_accumulation


def test_one_device_has_none_of_the_borders_that_a_pattern_says():
    words = ("cluster=h200_2", "parallel.pipeline=2", "model.pattern='AEAEMM|MM'", "model.depth=8")
    plan = check.one_device(lowered("nam56r_native_dp", *words), plain=True).plan
    assert "|" not in plan.pattern and [len(stage) for stage in plan.segments] == [8]


@pytest.mark.parametrize("plain", [True, False])
def test_one_device_keeps_the_columns_that_fp8_needs(plain):
    alone = check.one_device(lowered("nam56r_native_dp_fused", "+overlay=[extras,fp8]"), plain).plan.recipe
    assert alone.feature.fp8 and alone.execution.mamba2.padded_projection
    assert alone.precision.attention_kernels == "transformer_engine"


UNTRAINED = {"gpt_oss_20b", "gpt_oss_120b"}  # on a CPU, whose linear layers do not train experts with biases


def test_the_bounds_that_the_documents_name_are_those_of_the_proof():
    root = Path(__file__).parents[1]
    rows = json.loads((root / "benchmarks/exports.json").read_text())
    presets = {path.stem for path in (root / "conf/preset").glob("*.yaml")}
    assert {row["preset"] for row in rows} == presets - UNTRAINED
    named = re.search(
        r"logits at most (\S+) and a layer at most (\S+) off, in bf16 a cosine of (\S+) or more",
        (root / "docs/checkpoints.md").read_text(),
    )
    logits, layer, cosine = map(float, named.groups())
    worst = [max(row["fp32"][key] for row in rows) for key in ("relative", "layers")]
    assert worst[0] <= logits < 1.1 * worst[0] and worst[1] <= layer < 1.1 * worst[1]
    assert cosine <= min(row["bf16"]["cosine"] for row in rows) < cosine + 1e-5
