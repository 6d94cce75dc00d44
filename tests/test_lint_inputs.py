"""Lint of what is no launch: a config.json of Hugging Face, and the arguments that a checkpoint stores."""

import enum
import json
import os
import pickle
import shlex
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hf_configs import CONFIGS, DEEPSEEK_V3, LLAMA, NEMOTRON_3_NANO
from lint_cases import HYBRID, MOE
from presets import lowered
from test_lint import launch
from test_public import PUBLISHED

from nam_megatron import argv
from nam_megatron.budget import parameters
from nam_megatron.errors import REFUSED, Refused
from nam_megatron.lint import __main__ as command
from nam_megatron.lint import describe, lint, recipe
from nam_megatron.lint.rules import cards
from nam_megatron.lower import translate
from nam_megatron.recipe import to_tree
from nam_megatron.targets import current


def tree(lowering):
    """The model of a recipe by what is trained: layers, and keys that compute."""
    found = to_tree(lowering.plan.recipe)
    model = {
        k: v for k, v in found["model"].items() if k not in ("family", "pattern", "depth", "seq_length", "substitute")
    }
    blocks = {kind: dict(keys) for kind, keys in model.pop("blocks").items()}
    if "mla" in blocks:
        del blocks["mla"]["kernels"]
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


# Each what the others have not; one takes two seconds.
@pytest.mark.parametrize(
    "name", ["llama_3_1_8b", "qwen3_next_80b_a3b", "deepseek_v2_lite", "kimi_k2", "nemotron_3_nano_30b_a3b"]
)
def test_config_of_a_public_model_is_its_preset(name):
    found = lint(json.dumps(CONFIGS[name]), "config.json")
    made = recipe.make(found, Path("back.yaml"))
    again = translate(recipe._load(made.yaml, "back"))
    assert not made.refused and not made.keyless and parameters(again.plan)[0] == PUBLISHED[name]
    assert tree(again) == tree(lowered(name))
    assert any("sequence length" in line for line in made.lost)  # guessed, and said


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"qk_gain": 2}, "keys that are not read: qk_gain"),
        (LLAMA, {"sliding_window": 4096}, "`sliding_window: 4096`"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types`: sliding_attention"),
        (LLAMA, {"residual_in_fp32": True, "time_step_limit": [0.0, 0.1]}, "`time_step_limit: [0.0, 0.1]`"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of type dynamic"),
        (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 2.0}}, "low_freq_factor"),
        (DEEPSEEK_V3, {}, "num_nextn_predict_layers: 1"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob"),
        (NEMOTRON_3_NANO, {"conv_kernel": 3}, "conv_kernel: 3"),
    ],
)
def test_what_arguments_cannot_say_is_listed(base, change, says):
    found = lint(json.dumps(base | change), "config.json")
    assert any(says in note for note in describe.notes(found.args, found.model))
    assert any(says in line for line in recipe.make(found, Path("back.yaml")).lost)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "bert"}, {"rope_theta": None}, {"tie_word_embeddings": None}, {"hidden_size": "4096"}, {"rope_scaling": 8},
     {"num_hidden_layers": 10**12}, {"num_attention_heads": 0, "head_dim": None}],
    ids=str,
)  # fmt: skip
def test_config_that_does_not_say_its_model_is_refused(change):
    with pytest.raises(Refused):
        lint(json.dumps(LLAMA | change), "config.json")


def test_a_container_of_bridges_comes_back_as_the_public_model():
    text = (Path(__file__).parent / "lint/bridge_nemotron_3_nano.yaml").read_text()
    made = recipe.make(lint(text, "run_config.yaml", 8), Path("back.yaml"))
    again, public = (tree(translate(recipe._load(made.yaml, "back"))), tree(lowered("nemotron_3_nano_30b_a3b")))
    assert made.refused is None
    assert any(line.startswith("vocab_size unset") for line in made.lost), "its tokenizer's, which is not here"
    for model, blocks, *_ in (again, public):
        del model["vocab_size"], model["init_std"]
        for kernel in ("permute_fusion", "fused_weighted_squared_relu"):
            del blocks["moe"][kernel]
    assert again == public


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
        ("llama2_17b.sh", "--hidden-size 2048 --num-attention-heads 32", set()),
    ],
)  # fmt: skip
def test_a_name_is_held_against_the_models_card(name, flags, finds):
    rest = "--num-layers 32 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
    rest = rest.replace("--normalization RMSNorm", "") if "LayerNorm" in flags else rest
    found = lint(f"torchrun pretrain_gpt.py {flags} {rest} --disable-bias-linear", name)
    assert {f.flag for f in found.findings if f.id == "not-the-card"} == finds


def test_cards_are_those_of_our_presets():
    """What both know of a public model, they know alike."""
    of_ours = {"llama_3_8b": "Llama-3-8B", "mixtral_8x7b": "Mixtral-8x7B", "qwen3_30b_a3b": "Qwen3-30B-A3B", "deepseek_v3": "DeepSeek-V3",
               "nemotron_h_8b": "Nemotron-H-8B", "nemotron_h_56b": "Nemotron-H-56B", "kimi_k2": "Kimi-K2"}  # fmt: skip
    for preset, card in of_ours.items():
        words = argv.argv(lowered(preset))
        found = lint("torchrun pretrain_hybrid.py " + " ".join(map(shlex.quote, words)), f"{card}.sh")
        assert cards.named(found.args)[0] == card
        assert not [f for f in found.findings if f.id == "not-the-card"], preset
