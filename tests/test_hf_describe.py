"""The two names of every tensor, against the budget's own list of parameters."""

import importlib
from math import prod
from types import SimpleNamespace

import pytest
import torch
from presets import NAMES, lowered

from nam_megatron.argv import plan_json
from nam_megatron.budget import static
from nam_megatron.errors import Refused
from nam_megatron.hf import __main__ as command
from nam_megatron.hf import check, describe, export
from nam_megatron.sizes import Sizes


def of_the_budget(plan) -> dict[str, int]:
    """Elements by kind over all layers, MTP's inner layers included."""
    z, found = Sizes.of(plan), {}
    layers = [(layer.kind, layer) for layer in plan.layers] + [(kind, None) for kind in plan.mtp] * plan.mtp_depths
    for kind, layer in layers:
        held = getattr(z.model.blocks, kind).params(z, layer)
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


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_preset_is_exported_once(name):
    plan = lowered(name).plan
    assert list(describe.objections(plan)) == []
    config = describe.config(plan)
    assert of_the_export(config) == of_the_budget(plan)
    names = [tensor.name for tensor in describe.tensors(config)]
    keys = [key for tensor in describe.tensors(config) for key, _ in tensor.parts]
    assert len(set(names)) == len(names) and len(set(keys)) == len(keys)


def test_a_refusal_names_the_key_before_the_checkpoint_is_opened(tmp_path):
    """This one holds nothing."""
    lowering = lowered(
        "nam56r_smoke", "lane=native_dp", "model.letters.A=attention", "model.blocks.attention.qkv_bias=true"
    )
    (tmp_path / "ckpt" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "ckpt" / "plan.json").write_text(plan_json(lowering))
    with pytest.raises(Refused) as refused:
        export.export(tmp_path / "ckpt", tmp_path / "out", None, print)
    assert {p.key for p in refused.value.problems} == {"model.blocks.attention.qkv_bias"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding", "none"),
        ("rotary_percent", "0.5"),
        ("qkv_bias", "true"),
        ("output_gate", "true"),
        ("window", "128"),
    ],
)
def test_attention_that_the_export_does_not_have_is_refused_by_key(key, value):
    at = "model.blocks.attention."
    plan = lowered("nam56r_native_dp", f"{at}{key}={value}").plan
    assert [p.key for p in describe.objections(plan)] == [at + key]


def test_layers_that_the_export_does_not_have_are_refused_by_key():
    plan = lowered("qwen3_next_80b_a3b").plan
    assert "model.blocks.gdn" in {p.key for p in describe.objections(plan)}


@pytest.mark.parametrize(
    ("preset", "override", "key"),
    [
        ("nam56r", "feature.yarn.factor=2.0", "feature.yarn.factor"),
        ("nam56r_native_dp", "feature.llama_rope.factor=8.0", "feature.llama_rope.factor"),
        ("nam52r_h200_prod_candidate_v1", "model.learned_positions=8192", "model.learned_positions"),
        ("nam52r_h200_prod_candidate_v1", "model.blocks.mla.q_lora_rank=null", "model.blocks.mla.q_lora_rank"),
    ],
)
def test_positions_and_queries_that_the_export_does_not_have_are_refused_by_key(preset, override, key):
    more = ("model.substitute=[]", "model.blocks.mla.kernels=megatron") if "q_lora" in key else ()
    assert [p.key for p in describe.objections(lowered(preset, override, *more).plan)] == [key]


def test_norms_that_the_export_does_not_have_are_refused_by_key():
    plan = lowered("nam56r_native_dp", "model.zero_centered_norms=true").plan
    assert [p.key for p in describe.objections(plan)] == ["model.zero_centered_norms"]


def test_biases_are_refused_by_key():
    plan = lowered("nam56r_smoke", "model.linear_bias=true", "model.letters.E=mlp").plan
    assert "model.linear_bias" in {p.key for p in describe.objections(plan)}


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("capacity_factor", "1.25", ()),
        ("routed_scaling", "2.5", ()),
        ("shared_expert_gate", "true", ()),
        ("group_limit", "[2,1]", ()),
        ("router_dtype", "null", ()),
        ("pre_softmax", "true", ("score_function=softmax", "expert_bias=false")),
    ],
)
def test_routing_that_the_export_does_not_have_is_refused_by_key(key, value, others):
    at = "model.blocks.moe."
    plan = lowered("nam56r_smoke", f"{at}{key}={value}", *(at + other for other in others)).plan
    assert [p.key for p in describe.objections(plan)] == [at + key]


class Asked(Exception):
    """With what a verb's function was called."""


@pytest.mark.parametrize(
    ("module", "function", "line", "wanted"),
    [
        ("export", "export", "export a b --tokenizer t --shard-gb 0.5", "a b t _progress 536870912"),
        ("export", "export", "export a b", "a b None _progress 4294967296"),
        ("export", "load", "import a b c", "a b c _progress"),
        ("perplexity", "perplexity", "perplexity a b --split train --most 3 --batch 5 --dtype fp32 --device d",
         "a b train 3 5 torch.float32 d"),
        ("perplexity", "perplexity", "perplexity a b", "a b valid None 4 torch.bfloat16 cpu"),
        ("watch", "watch", "watch a b --tokenizer t --dataset s --until 6 --seconds 7 --device d", "a b t s d 6 7.0 _progress"),
        ("watch", "watch", "watch a b", "a b None None cpu None 20.0 _progress"),
        ("check", "check", "check a b --length 3 --batch 2 --seed 5 --dtype fp32 --device d", "a b (2, 3) fp32 d"),
        ("check", "check", "check a b", "a b (2, 128) bf16 cuda"),
        ("evaluate", "evaluate", "evaluate a t,u.yaml --tokenizer k --shots 2 --limit 3 --batch 5 --dtype fp32 --device d",
         "a ['t', 'u.yaml'] k 2 3 5 torch.float32 d"),
        ("evaluate", "evaluate", "evaluate a t", "a ['t'] None None None 4 torch.bfloat16 cpu"),
    ],
)  # fmt: skip
def test_each_verb_hands_on_what_was_said(monkeypatch, module, function, line, wanted):
    """In its order: two folders, or a dtype and a device, are easily exchanged."""

    def asked(*words):
        shown = (tuple(w.shape) if isinstance(w, torch.Tensor) else getattr(w, "__name__", w) for w in words)
        raise Asked(" ".join(map(str, shown)))

    monkeypatch.setattr(importlib.import_module(f"nam_megatron.hf.{module}"), function, asked)
    monkeypatch.setattr(export, "config_of", lambda path: SimpleNamespace(vocab_size=9))
    with pytest.raises(Asked) as said:
        command.main(line.split())
    assert str(said.value) == wanted


@pytest.mark.parametrize(("dtype", "kernels"), [("fp32", "naive"), ("bf16", "fused")])
def test_one_device_holds_all_of_the_model(dtype, kernels):
    plan = lowered("nam56r_fused").plan
    alone = check.one_device(lowered("nam56r_fused"), dtype).plan
    assert (plan.recipe.world_size, alone.recipe.world_size) == (8, 1)
    assert [layer.kind for layer in alone.layers] == [layer.kind for layer in plan.layers] and "|" not in alone.pattern
    assert {alone.recipe.model.blocks.mla.kernels, alone.recipe.model.blocks.mamba3.kernels} == {kernels}
    assert alone.recipe.schedule.save is None and not alone.recipe.precision.fused_grad_accumulation
