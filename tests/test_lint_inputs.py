"""Lint of what is no launch: a config.json of Hugging Face, and the arguments that a checkpoint stores."""

import contextlib
import enum
import json
import math
import os
import pickle
import re
import shlex
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from command import warm
from hf_configs import CONFIGS, DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_4_7_FLASH, GPT_OSS, LLAMA, NEMOTRON_3_NANO, SAID
from lint_cases import HYBRID, MOE
from presets import lowered
from test_lint import launch
from test_public import PUBLISHED

from nam_megatron.budget import parameters
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import REFUSED, Refused
from nam_megatron.hf import describe as export
from nam_megatron.hf import native
from nam_megatron.lint import __main__ as command
from nam_megatron.lint import checkpoint, container, describe, huggingface, lint, preset, recipe
from nam_megatron.lint.checkpoint import file_of
from nam_megatron.lint.read import read
from nam_megatron.lint.rules import cards
from nam_megatron.lint.values import Args
from nam_megatron.recipe import to_tree
from nam_megatron.targets import current
from nam_megatron.targets.target import legal

# What a config.json does not say.
TRAINING = (
    "schedule.micro_batch_size=1", "schedule.global_batch_size=8", "schedule.train_steps=10", "optim.lr=1e-4", "optim.min_lr=1e-5",
    "optim.warmup_steps=1",
)  # fmt: skip


def tree(lowering):
    """The model of a recipe by what is trained: layers, and keys that compute."""
    found = to_tree(lowering.plan.recipe)
    model = {
        k: v for k, v in found["model"].items() if k not in ("family", "pattern", "depth", "seq_length", "substitute")
    }
    blocks = {kind: dict(keys) for kind, keys in model.pop("blocks").items()}
    for key in ("balancing", "aux_loss_coeff"):  # published beside the model
        blocks.get("moe", {}).pop(key, None)
    if "mlp" not in lowering.plan.kinds:
        del model["ffn_hidden_size"]
    if blocks.get("attention", {}).get("position_embedding") == "none":
        del model["rotary_base"]
    features = {k: found["feature"].get(k) for k in ("yarn", "llama_rope")}
    return model, blocks, features, [layer.kind for layer in lowering.plan.layers]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_a_public_model_has_its_parameters(name):
    found = lint(json.dumps(CONFIGS[name]), "config.json")
    assert not found.findings and found.model.count.total == PUBLISHED[name]


# Initial values that were trained with (Megatron-Bridge's recipe), where config.json has another.
TRAINED = {"nemotron_3_nano_30b_a3b": 0.0173}
# Of the loss that balances experts a config.json says nothing, or what its authors' code has and not what they trained with.
BALANCED = {
    "moonlight_16b_a3b", "deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_2", "deepseek_v2_lite", "kimi_k2",
    "qwen3_30b_a3b", "qwen3_next_80b_a3b", "mixtral_8x7b",
    "gpt_oss_20b", "gpt_oss_120b",
}  # fmt: skip


def test_every_published_config_says_where_and_when_it_was_read():
    assert all(said["source"].count("/") == 1 and said["read"].isoformat() < "2100" for said in SAID.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_published_field_is_the_presets(name):
    """All that an export would write of either; the width of dense MLPs where none stands is nobody's."""
    theirs, plan = native.described(CONFIGS[name], "config.json"), lowered(name).plan
    assert export.counted(theirs) == export.counted(export.config(plan))
    model = plan.recipe.model
    assert model.init_std == TRAINED.get(name, CONFIGS[name].get("initializer_range", 0.02))
    said = CONFIGS[name].get("router_aux_loss_coef", CONFIGS[name].get("aux_loss_alpha"))
    assert (said is not None) == (name in BALANCED)
    if said is not None:
        assert model.blocks.moe.aux_loss_coeff == said


# Each what the others have not; one takes two seconds.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["llama_3_1_8b", "qwen3_next_80b_a3b", "deepseek_v2_lite", "kimi_k2", "nemotron_3_nano_30b_a3b"]
)
def test_config_of_a_public_model_is_its_preset(name):
    found = lint(json.dumps(CONFIGS[name]), "config.json")
    made = recipe.make(found, Path("back.yaml"))
    again = translate(recipe._load(made.yaml, "back", TRAINING))
    assert not made.refused and not made.keyless and parameters(again.plan)[0] == PUBLISHED[name]
    model, *rest = tree(again)
    assert (model | {"init_std": TRAINED.get(name, model["init_std"])}, *rest) == tree(lowered(name))
    assert any("sequence length" in line for line in made.lost)  # guessed, and said


BAMBA = {
    "model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "attention_dropout": 0.0,
}  # fmt: skip
HY3 = {"model_type": "hy_v3", "first_k_dense_replace": 1, "num_shared_experts": 1, "router_scaling_factor": 2.5}
SEED_OSS = {"model_type": "seed_oss", "head_dim": 128, "residual_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (LLAMA, {"qk_gain": 2}, "keys that are not read: qk_gain"),
        (DEEPSEEK_V3, {}, "num_nextn_predict_layers: 1"),
        (LLAMA, {"residual_in_fp32": True}, "residual_in_fp32"),
        (LLAMA, SEED_OSS | {"residual_dropout": 0.1}, "`residual_dropout`: Megatron's is of the embedding, too"),
    ],
)
def test_what_arguments_cannot_say_is_listed(base, change, says):
    found = lint(json.dumps(base | change), "config.json")
    assert any(says in note for note in describe.notes(found.args, found.model))
    assert any(says in line for line in recipe.make(found, Path("back.yaml")).lost)


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, SEED_OSS | {"attention_out_bias": True}, "attention_out_bias"),
        (LLAMA, {"sliding_window": 4096}, "`sliding_window: 4096`"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"] * 16}, "`layer_types`: sliding_attention"),
        (LLAMA, {"time_step_limit": [0.0, 0.1]}, "`time_step_limit: [0.0, 0.1]`"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of type dynamic"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1.5}}, "whole numbers"),
        (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 2.0}}, "low_freq_factor"),
        (LLAMA, {"hidden_act": "gelu_pytorch_tanh"}, "`gelu_pytorch_tanh` in a gated MLP"),
        (LLAMA, {"hidden_act": "relu2"}, "`relu2` in a gated MLP"),
        (NEMOTRON_3_NANO, {"mlp_hidden_act": "silu"}, "`silu` in a plain MLP"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 1, "n_group": 1}, "it weighs one by its score"),
        (
            DEEPSEEK_V3,
            {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0}},  # which is none for transformers
            "`rope_scaling.mscale_all_dim` without the other",
        ),
        (
            DEEPSEEK_V3,
            {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"attention_factor": 2.0}},
            "attention_factor: 2.0",
        ),
        (
            DEEPSEEK_V2_LITE,
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            "`topk_group: 3` of `n_group: 8`, each ranked by its best 1, beside top-6",
        ),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "transformers' class leaves it out"),
        (DEEPSEEK_V3, {"topk_group": 2}, "each ranked by its best 2, beside top-8"),
        (LLAMA, {"use_sliding_window": True}, "here it is not read"),
        (NEMOTRON_3_NANO, {"conv_kernel": 3}, "conv_kernel: 3"),
        (LLAMA, {"model_type": "gemma2"}, "its MLPs are gated GELU"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit: 5.0"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha: 1.0"),
        (LLAMA, {"layer_types": ["indexed_attention"] * 32}, "indexed_attention"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        (
            GPT_OSS,
            {"rope_scaling": GPT_OSS["rope_scaling"] | {"attention_factor": 2.0}},
            "rope_scaling.attention_factor: 2.0",
        ),
    ],
)
def test_what_nobody_can_say_is_refused_by_whose_lack_it_is(base, change, says):
    with pytest.raises(Refused) as refused:
        lint(json.dumps(base | change), "config.json")
    (problem,) = refused.value.problems
    assert says in refused.value.render() and problem.key
    whose = ("Megatron 0.19.2", "here it is not read", "of ours", "transformers' class")
    assert any(lack in refused.value.render() for lack in whose)


def test_a_scaling_that_megatron_has_and_no_recipe_is_described_and_not_written():
    found = lint(json.dumps(LLAMA | {"rope_scaling": {"type": "linear", "factor": 8.0}}), "config.json")
    assert found.args.rotary_seq_len_interpolation_factor == 8
    with pytest.raises(Refused, match="no recipe of ours says `--rotary-seq-len-interpolation-factor 8"):
        recipe.make(found, Path("back.yaml"))


# What transformers 5 writes of each, where version 4 writes another.
def test_a_factor_that_megatron_ignores_is_no_finding_of_a_model_that_recipes_have():
    """Llama-3.2's, which `feature.llama_rope.factor` is."""
    found = lint(json.dumps(LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0}}), "config.json")
    assert not found.findings and recipe.make(found, Path("back.yaml")).recipe.feature.llama_rope.factor == 32


INF = {"__float__": "Infinity"}
SYMBOLS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
SPELLED = {
    "qwen3_30b_a3b": {"num_experts": None, "num_local_experts": 128, "rope_theta": None,
                      "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "llama_3_1_8b": {"rope_theta": None, "rope_scaling": None, "rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 500000.0}},
    "nemotron_3_nano_30b_a3b": {
        "hybrid_override_pattern": None, "layers_block_type": [SYMBOLS[s] for s in NEMOTRON_3_NANO["hybrid_override_pattern"]],
        "time_step_limit": [0.0, INF], "num_hidden_layers": None,
    },
    "nemotron_h_8b": {"time_step_limit": [0.0, 1e308]},  # as Nemotron-3-Ultra's
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_transformers_5_spells_the_same_model(name):
    config = {key: value for key, value in (CONFIGS[name] | SPELLED[name]).items() if value is not None}
    assert lint(json.dumps(config), "a").launch.words == lint(json.dumps(CONFIGS[name]), "b").launch.words


def test_the_text_model_of_a_nested_config_is_read():
    """As Qwen3.5 publishes it, with what its code does without a key: a gate, norms centred at zero, shares that sum to one."""
    left = (
        "intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
        "decoder_sparse_step",
        "tie_word_embeddings",
        "full_attention_interval",
    )
    text = {key: value for key, value in CONFIGS["qwen3_next_80b_a3b"].items() if key not in left}
    text |= {"model_type": "qwen3_5_moe_text", "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12}
    nested = {
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"depth": 27},
        "tie_word_embeddings": False,
    }
    found, plain = lint(json.dumps(nested), "config.json"), lint(json.dumps(CONFIGS["qwen3_next_80b_a3b"]), "b")
    assert found.model.count.total == plain.model.count.total
    assert any("`vision_config`" in note for note in found.launch.notes)
    nested["text_config"] = text | {"tie_word_embeddings": True}  # transformers 4 would tie them, and 5 not
    with pytest.raises(Refused, match="`tie_word_embeddings` is false, and true in `text_config`"):
        lint(json.dumps(nested), "config.json")


@pytest.mark.parametrize(
    ("model_type", "name", "change"),
    [
        ("qwen3_vl_text", "qwen3_8b", {"mrope_section": [24, 20, 20], "mrope_interleaved": True}),
        ("qwen2_5_vl", "qwen2", {"type": "mrope", "mrope_section": [16, 24, 24]}),
        ("glm4v_moe_text", "glm_4_5_air", {"mrope_section": [8, 12, 12]}),
        ("qwen3_vl_moe_text", "qwen3_30b_a3b", {"mrope_section": [24, 20, 20]}),
    ],
)
def test_a_model_that_also_sees_is_described_by_its_text(model_type, name, change):
    """Whose positions are the same in every section: plain RoPE."""
    base = CONFIGS["qwen3_8b"] | {"model_type": name} if name == "qwen2" else CONFIGS[name]
    seeing = base | {"model_type": model_type, "rope_scaling": {"rope_type": change.get("type", "default")} | change}
    assert flags(seeing, "a") == flags(base, "b")
    with pytest.raises(Refused, match="of type mrope"):
        flags(LLAMA | {"rope_scaling": {"type": "mrope"}}, "c")


def test_architectures_that_are_not_read_say_whose_lack_it_is():
    whys = yaml.safe_load(huggingface.LACKS.read_text()).values()
    named = " ".join(kinds for why in whys for kinds in why.values()).split()
    assert len({*named}) == len(named) and not {*named} & huggingface.KINDS.keys()
    for kind, says in (
        ("lfm2", "convolutions: Megatron 0.19.2"),
        ("gpt2", "names: Megatron may"),
        ("bert", "Megatron may"),
    ):
        with pytest.raises(Refused, match=f"`{kind}` in `a` is no architecture that is read.*{says}"):
            huggingface.words(LLAMA | {"model_type": kind}, "a")


def test_how_published_weights_are_stored_is_said():
    whole = {"model_type": "x", "text_config": GPT_OSS}
    for said in (GPT_OSS, whole, LLAMA | {"quantization_config": {"quant_algo": "mxfp4"}}):
        notes = lint(json.dumps(said), "config.json").launch.notes
        assert any(note.startswith("`quantization_config`") and "`mxfp4`" in note for note in notes)


def test_two_names_of_one_key_say_one_value():
    """NemotronH's class takes its own, whatever stands under the usual name."""
    config = CONFIGS["nemotron_h_8b"] | {"layer_norm_epsilon": 1e-5}
    with pytest.raises(Refused, match="`rms_norm_eps: 1e-06` beside `layer_norm_epsilon: 1e-05`"):
        lint(json.dumps(config | {"rms_norm_eps": 1e-6}), "config.json")


@pytest.mark.parametrize(
    ("name", "key"),
    [("glm_4_5_air", "partial_rotary_factor"), ("glm_4_5_air", "n_shared_experts"), ("glm_4_5_air", "head_dim"),
     ("qwen3_next_80b_a3b", "partial_rotary_factor"), ("qwen3_next_80b_a3b", "head_dim"), ("qwen3_30b_a3b", "head_dim"),
     ("nemotron_h_8b", "head_dim"), ("mixtral_8x7b", "sliding_window"), ("deepseek_v3_yarn", "routed_scaling_factor"),
     ("deepseek_v3_yarn", "n_group"), ("deepseek_v3_yarn", "topk_group"), ("deepseek_v3_yarn", "n_shared_experts"),
     ("deepseek_v2_lite", "topk_method")],
)  # fmt: skip
def test_a_key_that_transformers_would_give_a_value_of_its_own_is_asked_for(name, key):
    """Without it a model was described that transformers would not build: GLM-4.5 with rope on all of a head, not on half."""
    assert key in CONFIGS[name] or key == "head_dim"
    config = {k: v for k, v in CONFIGS[name].items() if k not in (key, f"attention_{key}")}
    with pytest.raises(Refused, match=f"does not say `{key}`"):
        lint(json.dumps(config), "config.json")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama_3_1_8b", {"rope_theta": 10000.5}, "`rope_theta: 10000.5` cannot be said"),
        ("deepseek_v3_yarn", {"rope_interleave": False}, "`rope_interleave: False`"),
        (
            "deepseek_v3_yarn",
            {"rope_interleave": None},
            "`rope_interleave: null`",
        ),  # transformers asks whether it is true
        ("deepseek_v3_yarn", {"norm_topk_prob": None}, "`norm_topk_prob: null`"),
        ("qwen3_8b", {"is_causal": None}, "`is_causal: null`"),
        (
            "deepseek_v3_yarn",
            {"mlp_layer_types": ["dense", "sparse"]},
            "has 2 layers in `config.json`, and there are 61",
        ),
        (
            "qwen3_next_80b_a3b",
            {"layer_types": ["full_attention"] * 4},
            "has 4 layers in `config.json`, and there are 48",
        ),
        ("nemotron_h_8b", {"num_hidden_layers": 8}, "has 52 layers in `config.json`, and there are 8"),
    ],
)
def test_what_a_config_says_twice_or_too_finely_is_refused(name, change, says):
    with pytest.raises(Refused, match=re.escape(says)):
        lint(json.dumps(CONFIGS[name] | change), "config.json")


GLM_5 = GLM_4_7_FLASH | {"model_type": "glm_moe_dsa", "indexer_rope_interleave": True, "index_n_heads": 32, "index_head_dim": 128,
                         "index_topk": 2048}  # fmt: skip
SHARED = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 11


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join(kind[0].upper() for kind in SHARED)},
        {"indexer_types": SHARED},
    ],
)
def test_layers_that_share_positions_are_a_period_in_any_spelling(said):
    found = flags(GLM_5 | said, "a")
    assert found["--dsa-indexer-topk-freq"] == ["4"] and found["--dsa-indexer-skip-topk-offset"] == ["3"]
    with pytest.raises(Refused, match="which is no period"):
        flags(GLM_5 | said | {"indexer_types": SHARED[::-1]}, "b")
    assert any("of latents" in note for note in lint(json.dumps(GLM_5 | said), "config.json").launch.notes)


NEWER = {"rope_theta": 1000000, "rope_type": "default"}  # as transformers 5 writes it
YARN = CONFIGS["deepseek_v3_yarn"]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("glm_4_7_flash", {"partial_rotary_factor": None, "rope_parameters": NEWER | {"partial_rotary_factor": 0.5}},
         "`partial_rotary_factor: 0.5`"),
        ("qwen3_8b", {"rope_parameters": NEWER | {"rope_theta": 10000}}, "beside `rope_parameters.rope_theta: 10000`"),
        ("qwen3_8b", {"rope_parameters": {"full_attention": NEWER}}, "for some layers alone"),
        ("qwen3_8b", {"rope_parameters": NEWER | {"rope_thetas": 10000}}, "did you mean `rope_theta`?"),
        ("qwen3_8b", {"rope_parameters": NEWER | {"rope_theta": "10000"}, "rope_theta": None}, "it is a number"),
        ("qwen3_8b", {"rope_parameters": NEWER, "rope_scaling": {"type": "linear", "factor": 8}}, "of two types: default, linear"),
        *(
            ("deepseek_v3_yarn", {"rope_parameters": YARN | {key: 2 * value}}, f"with two values of `{key}`")
            for key, value in YARN.items() if key != "type"
        ),
        ("glm_4_7_flash", {"mlp_layer_types": ["dense", *["Sparse"] * 46]}, "`mlp_layer_types`: Sparse"),
        ("glm_4_5_air", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 44}, "beside other `mlp_layer_types`"),
        ("qwen3_next_80b_a3b", {"layer_types": ["full_attention"] * 48}, "beside other `layer_types`"),
        ("glm_4_7_flash", {"n_routed_experts": 0}, "without experts"),
        ("deepseek_v3_yarn", {"n_routed_experts": None}, "without experts"),
        ("deepseek_v2_lite", {"n_routed_experts": None, "n_routed_expert": 64}, "did you mean `n_routed_experts`?"),
        ("qwen3_8b", {"num_experts": 8}, "without experts"),
        ("qwen3_8b", {"atention_bias": True, "attention_bias": None}, "no `atention_bias` is read"),
        ("qwen3_8b", {"tie_word_embeddings": "false"}, "it is true or false"),
        ("glm_4_5_air", {"use_qk_norm": "false"}, "it is true or false"),
        ("glm_4_7_flash", {"routed_scaling_factor": "1.8"}, "it is a number of 0 or more"),
        ("mixtral_8x7b", {"sliding_window": "4096"}, "it is a whole number"),
        ("qwen3_8b", {"hidden_size": 4096.5}, "it is a whole number"),
        ("qwen3_8b", {"vocab_size": 0}, "it is 1 or more"),
        ("qwen3_8b", {"initializer_range": math.nan}, "`initializer_range` is nan"),
        ("llama_3_1_8b", {"initializer_range": -0.02}, "`initializer_range` is -0.02"),
        ("glm_4_7_flash", {"first_k_dense_replace": -1}, "`first_k_dense_replace` is -1"),
        ("glm_4_7_flash", {"first_k_dense_replace": 48}, "and there are 47 layers"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [48]}, "names no layer: 48"),
        ("deepseek_v3_yarn", {"scoring_func": "softmax"}, "its code has other scores"),
        ("deepseek_v3_yarn", {"topk_method": "greedy"}, "its code chooses otherwise"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "its code chooses otherwise"),
        ("deepseek_v3_yarn", {"topk_group": 0}, "it is 1 or more"),
        ("deepseek_v3_yarn", {"qk_head_dim": 200}, "`qk_head_dim: 200`"),
        ("deepseek_v3_yarn", {"head_dim": 128}, "`head_dim: 128`"),
        ("deepseek_v3_yarn", {"num_local_experts": 8}, "beside `num_local_experts: 8`"),
        ("mixtral_8x7b", {"num_experts": 16}, "beside `num_experts: 16`"),
        ("llama_3_1_8b", {"partial_rotary_factor": 0.5}, "`llama` turns whole heads"),
        ("glm_4_5_air", {"partial_rotary_factor": 1.5}, "above 0, and no more than 1"),
        ("qwen3_8b", {"head_dim": 0}, "it is 1 or more"),
        ("qwen3_8b", {"is_causal": False}, "`is_causal: False`"),
        ("qwen3_8b", {"model_type": "stablelm", "partial_rotary_factor": 0.25, "head_dim": 64}, "together are as wide as"),
        ("qwen3_8b", {"model_type": "smollm3", "no_rope_layers": [1, 0]}, "1 or 0 for each layer"),
        ("qwen3_8b", BAMBA | {"attn_layer_indices": [9, 36]}, "names no layer: 36"),
        ("qwen3_8b", BAMBA | {"partial_rotary_factor": 1.0}, "turns half of each head"),
        ("qwen3_8b", BAMBA | {"mamba_n_groups": 2}, "its norm goes over all groups at once"),
        ("qwen3_8b", BAMBA | {"mamba_d_head": 32}, "make 64"),
        ("qwen3_8b", BAMBA | {"mamba_d_conv": 3}, "`mamba_d_conv: 3`"),
        ("qwen3_8b", BAMBA | {"attn_rotary_emb": 128}, "`attn_rotary_emb: 128`"),
        ("qwen3_30b_a3b", HY3 | {"qk_norm": False}, "its class has these norms"),
        ("qwen3_30b_a3b", HY3 | {"expert_hidden_dim": 1536}, "under another name"),
        ("qwen3_30b_a3b", HY3 | {"num_experts_per_tok": 1}, "a share of one expert"),
        ("qwen3_30b_a3b", HY3 | {"num_shared_experts": 0}, "it is 1 or more"),
        ("qwen3_30b_a3b", HY3 | {"first_k_dense_replace": None}, "does not say `first_k_dense_replace`"),
        ("qwen3_8b", {"model_type": "dots1", "sliding_window": 64, "use_sliding_window": None, "max_window_layers": 9,
         **dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "norm_topk_prob"), 1)},
         "does not say `layer_types`"),
        ("qwen3_8b", {"sliding_window": 64, "use_sliding_window": None}, "does not say `use_sliding_window`"),
        ("qwen3_8b", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": None}, "not say `max_window_layers`"),
        ("qwen3_8b", {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "give the window's length"),
        ("qwen3_8b", {"layer_types": ["sliding_attention"] * 36}, "set `use_sliding_window` to true"),
        ("qwen3_8b", {"layer_types": ["linear_attention"] * 36}, "`linear_attention` without a window"),
        ("qwen3_30b_a3b", {"use_sliding_window": True}, "does not say `sliding_window`"),
        ("nemotron_3_nano_30b_a3b", {"n_shared_experts": 0}, "its code has one"),
        ("llama_3_1_8b", {"original_max_position_embeddings": 4096}, "`original_max_position_embeddings: 4096`"),
        ("llama_3_1_8b", {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **CONFIGS["llama_3_1_8b"]["rope_scaling"]}},
         "with two values of `rope_theta`"),
        ("mixtral_8x7b", {"sliding_window": 0}, "say null"),
        ("mixtral_8x7b", {"model_type": "mistral", "architectures": None, "num_local_experts": None, "num_experts_per_tok": None,
         "sliding_window": 8, "layer_types": ["full_attention"] * 32}, "transformers opens it as `ministral`"),
        ("gpt_oss_20b", {"layer_types": None}, "does not say `layer_types`"),
        ("qwen3_next_80b_a3b", {"model_type": "qwen3_5_moe_text", "decoder_sparse_step": 2}, "experts in all layers"),
        *(("qwen3_8b", {"architectures": [named]}, f"`{named}` in `config.json` is no language model of `qwen3`")
          for named in ("Qwen3ForCausalLMEagle3", "Qwen3ForSequenceClassification", "DFlashDraftModel", "LlamaForCausalLM")),
        ("llama_3_1_8b", {"rope_theta": None}, "older than this key, have 10000.0"),
        ("llama_3_1_8b", {"rope_theta": None, "vocab_size": None}, "does not say `vocab_size`"),  # all at once
        ("qwen3_8b", {"text_config": {"vocab_size": 32064}}, "`config.json: text_config` does not say `hidden_size`"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_another_model_without_a_word_is_refused(name, change, says):
    config = {
        key: value for key, value in (CONFIGS[name] | change).items() if value is not None or key in CONFIGS[name]
    }
    with pytest.raises(Refused) as refused:
        lint(json.dumps(config), "config.json")
    assert says in refused.value.render()


@pytest.mark.parametrize("name", ["qwen3_8b", "glm_4_5_air", "deepseek_v3_yarn", "qwen3_next_80b_a3b"])
def test_rotary_embedding_is_read_where_transformers_5_writes_it(name):
    old = {key: CONFIGS[name].get(key) for key in ("rope_theta", "partial_rotary_factor")}
    new = {k: v for k, v in CONFIGS[name].items() if k not in (*old, "rope_scaling")}
    new["rope_parameters"] = {
        k: v for k, v in ((CONFIGS[name].get("rope_scaling") or {}) | old).items() if v is not None
    }
    assert flags(new, name) == flags(CONFIGS[name], name)


def test_greedy_choice_looks_at_no_groups_and_a_scale_of_zero_is_one():
    greedy = lint(json.dumps(DEEPSEEK_V2_LITE | {"topk_method": "greedy", "n_group": 4, "topk_group": 2}), "a")
    assert "--moe-router-num-groups" not in greedy.launch.words
    limited = DEEPSEEK_V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 6}
    words = lint(json.dumps(limited), "a").launch.words  # top-6 of six groups: Megatron's best 6 // 6 is the best
    assert words[words.index("--moe-router-group-topk") + 1] == "6"
    scaled = lint(json.dumps(DEEPSEEK_V3 | {"routed_scaling_factor": 0.0}), "b").launch.words
    assert scaled[scaled.index("--moe-router-topk-scaling-factor") + 1] == "0.0"


def test_a_scaling_under_its_older_name_in_the_newer_place_is_read():
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    config["rope_parameters"] = {"type": "linear", "factor": 8.0, "rope_theta": 500000.0}
    words = lint(json.dumps(config), "a").launch.words
    assert words[words.index("--rotary-seq-len-interpolation-factor") + 1] == "8"


@pytest.mark.parametrize(
    "change",
    [{"model_type": "bert"}, {"rope_theta": None}, {"tie_word_embeddings": None}, {"hidden_size": "4096"}, {"rope_scaling": 8},
     {"num_hidden_layers": 10**12}, {"num_attention_heads": 0, "head_dim": None}],
    ids=str,
)  # fmt: skip
def test_config_that_does_not_say_its_model_is_refused(change):
    with pytest.raises(Refused):
        lint(json.dumps(LLAMA | change), "config.json")


@pytest.mark.slow
def test_a_container_of_bridges_comes_back_as_the_public_model():
    text = (Path(__file__).parent / "lint/bridge_nemotron_3_nano.yaml").read_text()
    made = recipe.make(lint(text, "run_config.yaml", 8), Path("back.yaml"))
    words = ["model.vocab_size=131072", "execution.moe.dispatcher=alltoall"]  # its tokenizer's, and none of ours
    again, public = (tree(translate(recipe._load(made.yaml, "back", words))), tree(lowered("nemotron_3_nano_30b_a3b")))
    assert made.refused is None and [*made.unsaid] == [word.partition("=")[0] for word in words]
    for model, *_ in (again, public):
        del model["vocab_size"], model["init_std"]
    assert again == public


@pytest.mark.parametrize("given", ["folder", "config.json"])
def test_commands_take_a_published_model_by_its_config(given, tmp_path):
    at = tmp_path / "a-model"
    at.mkdir()
    (at / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]))
    words = (f"conf={at if given == 'folder' else at / 'config.json'}", "model.seq_length=4096")
    ran = warm(*words, *TRAINING)
    assert ran.code == 0 and "--num-experts 8" in ran.out and "--moe-ffn-hidden-size 14336" in ran.out, ran
    assert " positions, or `model.seq_length`" in ran.err and "the recipe has" not in ran.err
    ran = warm(*words)
    assert ran.code == 2 and {*re.findall(r"([\w.]+)=\.\.\.", ran.err)} == {word.partition("=")[0] for word in TRAINING}
    assert "` (not in " in ran.err and "read from" not in ran.err  # where a value waits, nothing was read
    (at / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "gelu"}))
    ran = warm(f"conf={at}")
    assert ran.code == 2 and "`gelu` in a gated MLP" in ran.err and not ran.out
    (at / "config.json").write_text("{}")
    assert warm(f"conf={at}").code == 2


def test_a_folder_named_as_a_preset_is_not_taken_for_it(tmp_path):
    """A download lies where it was called for; the folder's sequence is its positions, the preset's is not."""
    (tmp_path / "mixtral_8x7b").mkdir()
    (tmp_path / "mixtral_8x7b" / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]))
    ran = warm("conf=mixtral_8x7b", cwd=tmp_path)
    assert ran.code == 2 and "is a preset, and a folder here" in ran.err and "`conf=./mixtral_8x7b`" in ran.err
    assert warm("conf=./mixtral_8x7b", "model.seq_length=4096", *TRAINING, cwd=tmp_path).code == 0


def test_a_deviation_of_initial_weights_that_no_file_says_is_asked_for():
    """GLM-4.7-Flash's does not, and Megatron's own was taken."""
    made = recipe.make(lint(json.dumps(GLM_4_7_FLASH), "config.json"), Path("back.yaml"))
    assert yaml.safe_load(made.yaml)["model"]["init_std"] == "???" and "model.init_std" in made.unsaid


def test_a_preset_of_a_published_model_says_all_of_the_model():
    """What a model of ours has alike is written too: it may change there."""
    made = recipe.make(lint(json.dumps(CONFIGS["nemotron_3_nano_30b_a3b"]), "config.json"), Path("back.yaml"))
    said, model = yaml.safe_load(made.yaml)["model"], to_tree(made.recipe)["model"]
    unsaid = {key for key, value in model.items() if key not in said and value is not None}
    assert unsaid == {"ffn_hidden_size", "rotary_base"}, "which no layer of this one reads"


# A number of a config.json -> the flags that hold it, and all that change with it.
HOLDS = {
    key: flags.split() for key, flags in {
        "hidden_size": "--hidden-size", "intermediate_size": "--ffn-hidden-size", "max_position_embeddings": "--max-position-embeddings",
        "num_attention_heads": "--num-attention-heads", "num_key_value_heads": "--num-query-groups", "head_dim": "--kv-channels",
        "attention_head_dim": "--kv-channels", "vocab_size": "--vocab-size --padded-vocab-size", "rms_norm_eps": "--norm-epsilon",
        "initializer_range": "--init-method-std", "rope_theta": "--rotary-base", "partial_rotary_factor": "--rotary-percent",
        "num_hidden_layers": "--num-layers", "num_experts": "--num-experts", "num_local_experts": "--num-experts",
        "n_routed_experts": "--num-experts", "num_experts_per_tok": "--moe-router-topk", "moe_intermediate_size": "--moe-ffn-hidden-size",
        "moe_latent_size": "--moe-latent-size", "shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
        "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size", "aux_loss_alpha": "--moe-aux-loss-coeff",
        "router_aux_loss_coef": "--moe-aux-loss-coeff", "routed_scaling_factor": "--moe-router-topk-scaling-factor",
        "n_group": "--moe-router-num-groups", "topk_group": "--moe-router-group-topk", "q_lora_rank": "--q-lora-rank",
        "kv_lora_rank": "--kv-lora-rank", "qk_nope_head_dim": "--qk-head-dim", "qk_rope_head_dim": "--qk-pos-emb-head-dim",
        "v_head_dim": "--v-head-dim", "linear_conv_kernel_dim": "--linear-conv-kernel-dim", "linear_key_head_dim": "--linear-key-head-dim",
        "linear_value_head_dim": "--linear-value-head-dim", "linear_num_key_heads": "--linear-num-key-heads",
        "linear_num_value_heads": "--linear-num-value-heads", "mamba_head_dim": "--mamba-head-dim",
        "mamba_num_heads": "--mamba-num-heads", "n_groups": "--mamba-num-groups", "ssm_state_size": "--mamba-state-dim",
    }.items()
}  # fmt: skip
# What follows besides: lists of layers, an even share of heads, the widths of experts and shared experts.
FOLLOWS = {
    "num_hidden_layers": {"--moe-layer-freq", "--linear-attention-freq"}, "num_attention_heads": {"--kv-channels"},
    "hidden_size": {"--kv-channels"}, "v_head_dim": {"--kv-channels"},
    "intermediate_size": {"--moe-ffn-hidden-size"}, "moe_intermediate_size": {"--moe-shared-expert-intermediate-size"},
    "n_group": {"--moe-router-group-topk"}, "rms_norm_eps": {"--dsa-indexer-k-norm-epsilon"},
}  # fmt: skip
# (Family, key): another number of it is one that no layer reads, or none that can be said.
SILENT = {(family, "num_key_value_heads") for family in ("deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_2",
                                                         "deepseek_v2_lite", "kimi_k2", "moonlight_16b_a3b",
                                                         "glm_4_7_flash")}  # fmt: skip
SILENT |= {(family, "partial_rotary_factor") for family in ("glm_4_7_flash", "solar_open_100b")}
# Groups beside a top-k that is not twice those chosen.
SILENT |= {(family, "n_group") for family in CONFIGS if not family.startswith("deepseek_v3")}
SILENT |= {
    (family, key)
    for family in CONFIGS
    if family.startswith("deepseek_v3")
    for key in ("topk_group", "num_experts_per_tok")
}
SILENT |= {(family, "topk_group") for family in ("deepseek_v2_lite", "kimi_k2", "glm_4_5_air", "nemotron_3_nano_30b_a3b",
                                                  "moonlight_16b_a3b", "glm_4_7_flash",
                                                  "nemotron_3_super_120b_a12b")}  # fmt: skip
SILENT |= {(family, "num_experts_per_tok") for family in ("gpt_oss_20b", "gpt_oss_120b")}  # which is said twice
SILENT |= {(family, "num_hidden_layers") for family in CONFIGS if family.startswith(("nemotron", "gpt_oss"))}


def flags(config: dict, name: str) -> dict[str, list[str]]:
    """Of each flag its values."""
    found: dict[str, list[str]] = {}
    for word in huggingface.words(config, name)[0]:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_number_of_a_config_is_held_by_its_flags_and_no_other(name):
    config, plain = CONFIGS[name], flags(CONFIGS[name], name)
    for key in config.keys() & HOLDS.keys():
        if config[key] is None or (name, key) in SILENT:
            continue
        value = config[key] + (-0.125 if key == "partial_rotary_factor" else 1)
        now = flags(config | {key: value}, name)
        changed = {flag for flag in {*now, *plain} if now.get(flag) != plain.get(flag)}
        assert changed - FOLLOWS.get(key, set()) == set(HOLDS[key]), key
        assert {float(now[flag][0]) for flag in HOLDS[key]} == {value}, key


# Keys of a config that may lack, for transformers has the same value for them or another key says it.
OPTIONAL = {
    "initializer_range",
    "attention_bias", "mlp_bias", "use_bias", "use_conv_bias", "conv_kernel", "use_qk_norm", "time_step_limit", "scoring_func",
    "topk_method", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "rope_scaling", "router_aux_loss_coef", "aux_loss_alpha",
    "seq_aux", "num_nextn_predict_layers", "moe_latent_size",
}  # fmt: skip
OF_ONE = {
    "nemotron": {"num_hidden_layers", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts"},
    "deepseek": {"num_key_value_heads"}, "kimi": {"num_key_value_heads", "norm_topk_prob"},
    "deepseek_v3": {"norm_topk_prob"}, "glm": {"norm_topk_prob"},
    "moonlight": {"num_key_value_heads", "norm_topk_prob"},
    "glm_4_7_flash": {"num_key_value_heads", "partial_rotary_factor"},
    "qwen3_8b": {"sliding_window", "use_sliding_window"},
    "qwen3_0": {"sliding_window", "use_sliding_window"},
    "qwen3_5": {"attn_output_gate", "mtp_num_hidden_layers"},
    "seed_oss": {"attention_out_bias"}, "solar": {"norm_topk_prob", "partial_rotary_factor", "intermediate_size"},
    "gpt_oss": {"attention_dropout", "experts_per_token", "initial_context_length", "quantization_config", "swiglu_limit"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_lacks_what_decides_its_model_is_refused(name):
    may = OPTIONAL.union(*(keys for family, keys in OF_ONE.items() if name.startswith(family)))
    unsaid = {
        "gpt_oss": {"rope_scaling", "attention_bias"},
        "deepseek_v2": {"topk_method"},
        "seed_oss": {"attention_bias"},
    }
    # Which their classes have.
    may = may.difference(*(keys for family, keys in unsaid.items() if name.startswith(family)))
    lacking = set()
    for key in CONFIGS[name].keys() - {"model_type"}:
        try:
            huggingface.words({k: v for k, v in CONFIGS[name].items() if k != key}, name)
        except (Refused, TypeError, ValueError):
            lacking.add(key)
    assert lacking == CONFIGS[name].keys() - may - {"model_type"}


def test_a_folder_with_a_plan_is_told_to_name_the_plan(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(Refused) as refused:
        file_of(tmp_path)
    assert f"name the plan in it, `{tmp_path}/plan.json`" in refused.value.render()


LAYERS = "--moe-layer-freq"


@pytest.mark.parametrize(
    ("name", "said", "flag", "layers"),
    [
        ("glm_4_5_air", {"num_hidden_layers": 7, "first_k_dense_replace": 2}, LAYERS, "[0,0,1,1,1,1,1]"),
        ("deepseek_v2_lite", {"num_hidden_layers": 7, "first_k_dense_replace": 3, "moe_layer_freq": 2}, LAYERS, "[0,0,0,0,1,0,1]"),
        ("qwen3_30b_a3b", {"num_hidden_layers": 6, "decoder_sparse_step": 3}, LAYERS, "[0,0,1,0,0,1]"),
        ("qwen3_30b_a3b", {"num_hidden_layers": 6, "mlp_only_layers": [1, 3]}, LAYERS, "[1,0,1,0,1,1]"),
        ("qwen3_next_80b_a3b", {"num_hidden_layers": 7, "full_attention_interval": 3}, "--linear-attention-freq", "[1,1,0,1,1,0,1]"),
        ("mixtral_8x7b", {"sliding_window": 4096}, "--window-size", "4095,0"),  # the token itself is one of them
        ("deepseek_v3_yarn", {"n_shared_experts": 3, "moe_intermediate_size": 50}, "--moe-shared-expert-intermediate-size", "150"),
        ("mixtral_8x7b", {"intermediate_size": 50}, "--moe-ffn-hidden-size", "50"),
        ("llama_3_1_8b", {"num_attention_heads": 16}, "--kv-channels", "256"),
        ("qwen3_30b_a3b", {"head_dim": None}, "--kv-channels", "64"),
        ("deepseek_v3_yarn", {"seq_aux": False}, "--moe-router-load-balancing-type", "aux_loss"),
        ("deepseek_v3_yarn", {"aux_loss_alpha": None}, "--moe-router-load-balancing-type", "none"),
        ("deepseek_v3_yarn", {"rope_scaling": None}, "--rope-type", "rope"),
        ("deepseek_v3_yarn", {"q_lora_rank": None}, "--q-lora-rank", None),
        ("deepseek_v3_yarn", {"n_shared_experts": None}, "--moe-shared-expert-intermediate-size", None),
        ("llama_3_1_8b", {"rope_scaling": None}, "--use-rope-scaling", None),
        ("glm_4_5_air", {"attention_bias": False}, "--add-qkv-bias", None),
        ("glm_4_5_air", {"use_qk_norm": True}, "--qk-layernorm", ""),
        ("qwen3_30b_a3b", {"norm_topk_prob": False}, "--moe-router-pre-softmax", ""),
        ("qwen3_30b_a3b", {"norm_topk_prob": False}, "--moe-router-pre-softmax", ""),
        ("llama_3_1_8b", {"tie_word_embeddings": True}, "--untie-embeddings-and-output-weights", None),
        ("llama_3_1_8b", {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "llama3", "factor": 4.0,
         "rope_theta": 7.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}}, "--rope-scaling-factor", "4.0"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_config_says_otherwise_than_a_flag(name, said, flag, layers):
    found = flags(CONFIGS[name] | said, name).get(flag)
    assert found == (None if layers is None else layers.split())


# Containers of Bridge ------------------------------------------------------------------------------------------------------

BRIDGE = Path(__file__).parent / "lint" / "bridge_nemotron_3_nano.yaml"
# What Bridge spells otherwise than Megatron's parser: field, a value of it, and the words that it becomes by itself.
SPELLS = {
    "model.num_moe_experts": (64, "--num-experts 64"), "model.hybrid_override_pattern": ("M*", "--hybrid-layer-pattern M*"),
    "model.num_query_groups": (7, "--group-query-attention --num-query-groups 7"),
    "model.activation_func": ({"_target_": "megatron.core.activations.squared_relu"}, "--squared-relu"),
    "model.share_embeddings_and_output_weights": (False, "--untie-embeddings-and-output-weights"),
    "model.persist_layer_norm": (False, "--no-persist-layer-norm"),
    "model.seq_length": (7, "--seq-length 7 --max-position-embeddings 7"), "model.num_layers": (7, "--num-layers 7"),
    "model.attention_backend": ("a.b.AttnBackend.unfused", "--attention-backend unfused"),
    "model.mtp_num_layers": (2, "--mtp-num-layers 2"), "model.fp8_param": (True, "--fp8-param-gather"),
    "model.fp8": ("e4m3", "--fp8-format e4m3"), "model.moe_hybridep_num_sms": (7, ""), "model.moe_deepep_num_sms": (7, ""),
    "model.gated_linear_unit": (True, ""), "model.recompute_modules": (["mlp"], "--recompute-modules mlp"),
    "model.cpu_offloading_num_layers": (2, "--cpu-offloading-num-layers 2"),
    "model.cuda_graph_modules": ([{"_args_": ["moe_router"]}], "--cuda-graph-modules moe_router"),
    "ddp.grad_reduce_in_fp32": (True, "--accumulate-allreduce-grads-in-fp32"),
    "ddp.average_in_collective": (True, "--ddp-average-in-collective"), "ddp.bucket_size": (7, "--ddp-bucket-size 7"),
    "ddp.num_buckets": (7, "--ddp-num-buckets 7"), "ddp.align_param_gather": (True, ""),
    "scheduler.start_weight_decay": (0.7, "--start-weight-decay 0.7"), "scheduler.end_weight_decay": (0.6, "--end-weight-decay 0.6"),
    "dataset.blend": ([["a", "b"], [0.3, 0.7]], "--data-path 0.3 a 0.7 b"), "dataset.random_seed": (7, "--seed 7"),
    "dataset.path_to_cache": ("x", "--data-cache-path x"), "dataset.data_path": ("x", ""),
    "dataset.create_attention_mask": (False, "--no-create-attention-mask-in-dataloader"), "dataset.sequence_length": (7, "--seq-length 7"),
    "model.vocab_size": (7, "--vocab-size 7 --padded-vocab-size 7"), "model.fp8_recipe": ("tensorwise", ""),
    "optimizer.fp8_recipe": ("tensorwise", ""),
}  # fmt: skip


def bridged(*fields: tuple[str, object]) -> str:
    """The words of a container that has these fields, `section.name` and value."""
    root: dict = {}
    for name, value in fields:
        section, _, key = name.partition(".")
        root.setdefault(section, {})[key] = value
    return " ".join(container.words(root, current())[0])


def test_every_spelling_of_bridges_is_tried():
    assert SPELLS.keys() == {name if "." in name else f"model.{name}" for name in container.SPELLED}


def test_a_backend_is_read_by_its_number_in_megatrons_enum():
    from megatron.core.transformer.enums import AttnBackend

    for backend in AttnBackend:
        said = {"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [backend.value], "_call_": True}
        assert bridged(("model.attention_backend", said), ("model.num_layers", 7)).split()[:2] == (
            ["--num-layers", "7"] if backend is AttnBackend.auto else ["--attention-backend", backend.name]
        )


@pytest.mark.parametrize("name", SPELLS)
def test_what_bridge_spells_otherwise_becomes_megatrons_words(name):
    value, becomes = SPELLS[name]
    assert bridged((name, value)) == becomes


BACKEND = ("model.moe_flex_dispatcher_backend", "deepep")


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ((BACKEND, ("model.moe_deepep_num_sms", 7)), "--moe-flex-dispatcher-num-sms 7"),
        ((BACKEND, ("model.moe_hybridep_num_sms", 7)), ""),
        ((("model.recompute_granularity", None), ("model.recompute_modules", ["core_attn"])), ""),
        ((("model.cpu_offloading", False), ("model.cpu_offloading_num_layers", 2)), ""),
    ],
)
def test_what_bridge_writes_in_use_or_not_counts_where_it_is(fields, becomes):
    assert bridged(*fields).replace("--moe-flex-dispatcher-backend deepep", "").strip() == becomes


SILU = ("model.activation_func", {"_target_": "torch.nn.functional.silu"})


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ([("model.fp8", "hybrid"), ("model.fp8_recipe", "mxfp8")], "--fp8-format hybrid --fp8-recipe mxfp8"),
        ([("scheduler.weight_decay_incr_style", "constant"), ("scheduler.start_weight_decay", 0.7)], ""),
        ([("model.hybrid_layer_pattern", "M*"), ("model.num_layers", 7), ("model.mtp_num_layers", 2)], "--hybrid-layer-pattern M*"),
        ([("model.vocab_size", 7), ("model.should_pad_vocab", True)], "--vocab-size 7"),
        ([SILU, ("model.gated_linear_unit", True)], "--swiglu"), ([SILU], ""), ([SILU, ("model.gated_linear_unit", False)], ""),
        ([("dataset.blend", [["a", "b"], None])], "--data-path a b"), ([("dataset.blend", None)], "--mock-data"),
        ([("rng.seed", 5), ("dataset.random_seed", 7)], "--seed 5"),  # the first that says it
        ([("model.num_query_groups", None), ("model.fp8", None), ("model.hybrid_override_pattern", None)], ""),
        ([("mixed_precision.bf16", True)], "--bf16"), ([("mixed_precision.bf16", True), ("model.bf16", True)], "--bf16"),
        ([("mixed_precision.bf16", False)], ""), ([("model.layernorm_epsilon", 0.5)], "--norm-epsilon 0.5"),
        ([("model.moe_layer_freq", [0, 1])], "--moe-layer-freq [0,1]"), ([("model.moe_layer_freq", 2)], "--moe-layer-freq 2"),
        ([("model.window_size", [127, 0])], "--window-size 127,0"), ([("model.moe_layer_freq", 1)], ""),
        ([("model.params_dtype", "x"), ("model.main_grads_dtype", {"_target_": "torch.bfloat16"})], "--main-grads-dtype bf16"),
    ],
    ids=str,
)  # fmt: skip
def test_what_bridge_says_in_several_fields(fields, becomes):
    assert bridged(*fields) == becomes


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"peft": {"dim": 8}}, "it has `peft`, which no flag of Megatron's says"),
        ({"comm_overlap": {"tp": True}}, "it has `comm_overlap`, which no flag of Megatron's says"),
        (
            {"model": {"attention_backend": "other"}},
            "`attention_backend` is 'other' there, which no flag of Megatron's can say",
        ),
    ],
    ids=str,
)
def test_what_no_flag_says_of_a_container_is_noted(more, says):
    assert container.words(more, current())[1] == [says]


def test_a_field_of_a_container_is_the_argument_of_its_name():
    """Of every field that Bridge calls as Megatron's parser does: what lint reads is what stands there."""
    tried = 0
    for section, fields in yaml.safe_load(BRIDGE.read_text()).items():
        for key, was in fields.items() if section in container.SECTIONS else ():
            flag = current().by_dest.get(key)
            if flag is None or key in container.SPELLED or f"{section}.{key}" in container.SPELLED:
                continue
            other = {bool: not was, int: 24, float: 0.375, str: "other"}.get(type(was))
            if other is None or not legal(flag, other) or other == flag.default:
                continue
            assert (
                Args(read(json.dumps(bridged((f"{section}.{key}", other)).split()), current())).value(key) == other
            ), key
            tried += 1
    assert tried > 150


# Checkpoints ---------------------------------------------------------------------------------------------------------------


class Backend(enum.Enum):
    auto = 5


def save(folder: Path, found, **more) -> Path:
    """What Megatron saves of a launch, its objects of Python included."""
    values = {name: found.args.value(name) for name in current().by_dest}
    args = Namespace(
        **values
        | {"params_dtype": torch.bfloat16, "attention_backend": Backend.auto, "rank": 3, "world_size": 16}
        | more
    )
    step = folder / "iter_0000020"
    step.mkdir()
    torch.save({"args": args, "iteration": 20, "opt": [torch.zeros(2)]}, step / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return step / "common.pt"


@pytest.mark.parametrize("base", [HYBRID, MOE], ids=["hybrid", "moe"])
def test_stored_arguments_describe_what_the_launch_did(base, tmp_path):
    said = launch(base, {})
    file = save(tmp_path, said)
    read = lint(file)
    theirs, ours = dict(describe.rows(said.args, said.model)), dict(describe.rows(read.args, read.model))
    same = theirs.keys() - {"layout", "batch", "also"}
    assert {k: ours[k].replace(" (default)", "") for k in same} == {
        k: theirs[k].replace(" (default)", "") for k in same
    }
    assert read.launch.gpus == 16 and any("attention_backend" in note for note in read.launch.notes)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("moe_layer_freq", [0, 1], ("--moe-layer-freq", "[0,1]")), ("moe_layer_freq", 2, ("--moe-layer-freq", "2")),
        ("window_size", (127, 0), ("--window-size", "127,0")), ("window_size", [127, 0], ("--window-size", "127,0")),
    ],
    ids=str,
)  # fmt: skip
def test_a_stored_number_or_list_is_what_its_flag_takes(name, value, words, tmp_path):
    """A frequency that is a number and a window that is a tuple, as Megatron holds both, were left out."""
    found = lint(save(tmp_path, launch(MOE, {}), **{name: value}))
    at = found.launch.words.index(words[0])
    assert found.launch.words[at : at + 2] == words and not found.args.trouble


def test_command_takes_the_folder(tmp_path, capsys):
    save(tmp_path, launch(HYBRID, {}))
    assert command.main([str(tmp_path)]) in (0, 1)
    assert "the arguments that a checkpoint stores on 16 GPUs" in capsys.readouterr().out
    assert command.main([str(tmp_path / "iter_0000020" / "nothing")]) == REFUSED
    (tmp_path / "iter_0000020" / "common.pt").unlink()
    assert command.main([str(tmp_path)]) == REFUSED


class Runs:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


def test_what_the_pattern_says_no_word_of_a_checkpoint_says():
    stored = {"hidden_size": 64, "num_layers": 2, "mtp_num_layers": 1, "hybrid_layer_pattern": "M*/M*"}
    for pattern, words in (("M*/M*", set()), (None, {"--num-layers", "--mtp-num-layers"})):
        found, _ = checkpoint.words({**stored, "hybrid_layer_pattern": pattern}, current())
        assert {word for word in found if word in ("--num-layers", "--mtp-num-layers")} == words


def test_nothing_of_a_checkpoint_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "common.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "common/data.pkl", pickle.dumps({"args": Namespace(hidden_size=64, load=Runs()), "more": Runs()})
        )
    found = lint(file)
    assert found.args.hidden_size == 64 and not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    "inside", [b"", b"no pickle", pickle.dumps({"model": 1}), pickle.dumps({"args": {"hidden_size": 64}})]
)
def test_file_without_arguments_is_refused(inside, tmp_path):
    file = tmp_path / "common.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("common/data.pkl", inside)
    with pytest.raises(Refused, match=r"common\.pt"):
        lint(file)


@pytest.mark.parametrize(
    ("name", "flags", "finds"),
    [
        ("train_llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008", set()),
        ("train_llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11000", {"--ffn-hidden-size 11000"}),
        ("examples/llama2/conf/7b.yaml", "--hidden-size 4096 --num-attention-heads 16 --ffn-hidden-size 11008",
         {"--num-attention-heads 16", "without --num-query-groups", "without --kv-channels"}),
        ("llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32 --use-bridge --bridge-hf-model x", set()),  # what lacks is there
        ("llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32", {"without --ffn-hidden-size"}),
        ("llama2_7b_from_70b.sh", "--hidden-size 2048 --num-attention-heads 32", set()),  # two sizes
        ("tiny_llama2_7b.sh", "--hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504", set()),
        ("llama2_7b.sh", "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --normalization LayerNorm "
         "--rotary-base 500000", set()),  # a model of its own
        ("llama2_13b/llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11000", {"--ffn-hidden-size 11000"}),
        ("llama2_7b.sh", "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --rotary-seq-len-interpolation-factor 1",
         set()),
        ("llama2_17b.sh", "--hidden-size 2048 --num-attention-heads 32", set()),
        ("Patch-llama2-7b/qwen1_5/run_qwen.sh", "--hidden-size 4096 --num-attention-heads 32", set()),  # a repository of both
        ("Patch-llama2-7b/run_llama.sh", "--hidden-size 4096 --num-attention-heads 32", {"without --ffn-hidden-size"}),
        ("mixtral_8x7b.sh", "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
         "--ffn-hidden-size 14336 --rotary-base 1000000", {"without --num-experts"}),
    ],
)  # fmt: skip
def test_a_name_is_held_against_the_models_card(name, flags, finds):
    rest = "--num-layers 32 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
    rest = rest.replace("--normalization RMSNorm", "") if "LayerNorm" in flags else rest
    found = lint(f"torchrun pretrain_gpt.py {flags} {rest} --disable-bias-linear", name)
    assert {f.flag for f in found.findings if f.id == "not-the-card"} == finds


def test_a_bias_on_every_layer_is_one_on_queries_and_keys_too():
    qwen = "--hidden-size 3584 --num-attention-heads 28 --group-query-attention --num-query-groups 4 --ffn-hidden-size 18944 --swiglu"
    qwen += " --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --rotary-base 1000000"
    for said, flag in (("", "without --disable-bias-linear"), ("--disable-bias-linear", "without --add-qkv-bias")):
        found = lint(
            f"torchrun pretrain_gpt.py {qwen} --norm-epsilon 1e-6 --num-layers 28 {said}", "qwen2_7b.sh"
        ).findings
        assert {f.flag for f in found if f.id == "not-the-card"} == {flag}


def test_a_third_of_what_both_have_makes_a_model_of_its_own():
    """Of 23 values of Mixtral's card a dense model has 18, of which six may be others."""
    dense = "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --ffn-hidden-size 14336"
    dense += " --rotary-base 1000000 --position-embedding-type rope --num-layers 32 --disable-bias-linear --qk-layernorm --add-qkv-bias"
    for more, count in (("--swiglu", 6), ("", 0)):
        found = lint(f"torchrun pretrain_gpt.py {dense} {more}", "mixtral_8x7b.sh").findings
        assert sum(f.id == "not-the-card" for f in found) == count


def test_flags_that_a_script_sets_and_forgets_are_told():
    """A launch of Mixtral's trained a dense model, as nothing took the flags of its experts; others were not sharded."""
    text = "A='--num-layers 2 --swiglu'\nMOE=(\n--num-experts 8\n--moe-router-topk 2\n)\ntorchrun pretrain_gpt.py --lr 1 $A"
    told = "`MOE` is handed on to nothing here, nor what stands in it: --num-experts, --moe-router-topk"
    assert [told in lint(f"{text}{more}").launch.notes for more in ("", " ${MOE[@]}")] == [True, False]
    exported = text.replace("(\n", "'").replace("\n)", "'").replace("MOE", "export MOE")
    assert told not in lint(exported).launch.notes
    for hands in ("X=MOE; echo ${!X}", "declare -n X=MOE", ". ./models.sh"):
        assert told not in lint(f"{hands}\n{text}").launch.notes


def test_cards_are_those_of_our_presets():
    """What both know of a public model, they know alike."""
    of_ours = {"llama_3_8b": "Llama-3-8B", "mixtral_8x7b": "Mixtral-8x7B", "qwen3_30b_a3b": "Qwen3-30B-A3B", "deepseek_v3": "DeepSeek-V3",
               "nemotron_h_8b": "Nemotron-H-8B", "nemotron_h_56b": "Nemotron-H-56B", "kimi_k2": "Kimi-K2"}  # fmt: skip
    for ours, card in of_ours.items():
        words = argv.argv(lowered(ours))
        found = lint("torchrun pretrain_hybrid.py " + " ".join(map(shlex.quote, words)), f"{card}.sh")
        assert cards.named(found.args)[0] == card
        assert not [f for f in found.findings if f.id == "not-the-card"], ours


@pytest.mark.slow
def test_a_value_that_no_recipe_has_is_left_to_be_given_and_not_ours():
    """A launch with another activation became squared ReLU: NAM56R's."""
    made = recipe.make(launch(MOE, {"--swiglu": None, "--quick-geglu": True, "--train-iters": None}), Path("back.yaml"))
    assert {"model.activation", "schedule.train_steps"} <= {*made.unsaid} and made.exit_code == 1
    with pytest.raises(Refused) as refused:
        recipe._load(made.yaml, "back")
    assert {*re.findall(r"([\w.]+)=\.\.\.", refused.value.render())} == {*made.unsaid}
    given = {"model.activation": "gelu", "schedule.train_steps": "5"}
    again = recipe._load(made.yaml, "back", [f"{key}={given.get(key, 1024)}" for key in made.unsaid])
    assert (again.model.activation, again.schedule.train_steps) == ("gelu", 5)


def test_what_lint_finds_is_said_where_a_config_json_is_a_preset(tmp_path, capsys):
    """The command that goes on with the model said nothing of what stops it."""
    wrong = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    stops = [f.id for f in lint(json.dumps(wrong), "config.json").findings if f.severity == "will fail"]
    assert stops
    with contextlib.suppress(Refused):
        preset.of_config(tmp_path / "config.json")
    assert "will fail" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    preset.of_config(tmp_path / "config.json")
    assert "will fail" not in capsys.readouterr().err
    (tmp_path / "config.json").write_bytes(json.dumps(LLAMA).encode("utf-16"))
    with pytest.raises(Refused) as refused:
        preset.of_config(tmp_path / "config.json")
    assert "hint: save it as UTF-8" in refused.value.render()


BASE = "model:\n  num_layers: 24\n  hidden_size: 1024\n  num_attention_heads: 16\ntrain:\n  micro_batch_size: 1\n  lr: 1e-4\n"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("base.yaml", "_base_: base.yaml"), ("base.yml", "extends: [base]"), ("../base.yaml", "defaults: ../base.yaml"),
        ("group/one.yaml", "defaults:\n- override group@_global_: one\n- _self_"),
    ],
)  # fmt: skip
def test_the_base_of_a_yaml_is_read_where_it_lies_beside_it(tmp_path, where, said):
    (folder := tmp_path / "conf").mkdir()
    file, base = folder / "a.yaml", folder / where
    text = f"{said}\nmodel:\n  num_layers: 12\n"
    away = lint(text, str(file))
    assert away.args.elsewhere and any("not read" in note for note in away.launch.notes)
    base.parent.mkdir(exist_ok=True)
    base.write_text(BASE)
    found = lint(text, str(file))
    assert (found.args.num_layers, found.args.hidden_size, found.args.lr) == (12, 1024, 1e-4)
    assert found.launch.notes[0] == f"starts from {base.name}, which is read with it" and not found.args.elsewhere


def test_a_group_of_hydras_stands_below_its_name_and_a_base_of_itself_ends(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("num_layers: 4\nhidden_size: 64\n")
    (tmp_path / "a.yaml").write_text(text := "defaults:\n- model: small\nextends: b\nmicro_batch_size: 2\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nlr: 1e-3\n")
    found = lint(text, str(tmp_path / "a.yaml"))
    assert (found.args.num_layers, found.args.hidden_size, found.args.lr) == (4, 64, 1e-3)
    (tmp_path / "c.yaml").write_text(text := "extends: d\nnum_layers: 2\n")
    (tmp_path / "d.yaml").write_text("extends: [c.yaml]\nhidden_size: 64\n")
    found = lint(text, str(tmp_path / "c.yaml"))
    assert (found.args.num_layers, found.args.hidden_size) == (2, 64)
    with pytest.raises(Refused, match="unhashable key"):  # it was a traceback
        lint("num_layers: 2\n? [1]\n: 2\n", str(tmp_path / "e.yaml"))


def test_what_stands_behind_self_in_hydras_defaults_lies_over_the_file(tmp_path):
    """The file's own value was told, which Hydra does not take."""
    (tmp_path / "base.yaml").write_text("num_layers: 4\nhidden_size: 64\n")
    for order, layers in (
        ("- _self_\n- base", 4),
        ("- base\n- _self_", 2),
        ("- base", 2),
        ("- _self_\n- base\n- none: x", 4),
    ):
        found = lint(f"defaults:\n{order}\nnum_layers: 2\n", str(tmp_path / "a.yaml"))
        assert (found.args.num_layers, found.args.hidden_size) == (layers, 64)
        assert ("none: x (over this one)" in " ".join(found.launch.notes)) is ("none" in order)


def test_what_a_yaml_leaves_out_that_others_start_from_is_theirs_to_say(tmp_path):
    """Lengths that the heirs say were called missing."""
    (tmp_path / "base.yaml").write_text(BASE)
    assert lint(BASE, str(tmp_path / "base.yaml")).findings
    (tmp_path / "a.yaml").write_text("defaults:\n  - other\n  - base\ntrain_iters: 10\n")
    found = lint(BASE, str(tmp_path / "base.yaml"))
    assert not found.findings and any(
        "others start from it" in note and "a.yaml" in note for note in found.launch.notes
    )
