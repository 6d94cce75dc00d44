"""Weights that transformers itself has made and saved: to Megatron, the same logits there, and back to the bit."""

import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend
import published
import pytest
import test_hf
import test_train
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hf_configs import CONFIGS, GPT_OSS
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from presets import lowered
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nam_megatron import generate
from nam_megatron.budget import parameters
from nam_megatron.compile.argv import load_plan, plan_json
from nam_megatron.compile.plan import Plan
from nam_megatron.data import tokenizer
from nam_megatron.errors import Refused
from nam_megatron.hf import __main__ as command
from nam_megatron.hf import check, distributed, families, native, quantized
from nam_megatron.hf import export as exports
from nam_megatron.hf.adapters import based
from nam_megatron.hf.families import config
from nam_megatron.hf.folder import INDEX
from nam_megatron.judge.resume import BEGAN, SIGNED, in_a_word
from nam_megatron.lint import lint, recipe
from nam_megatron.runtime import checksums

RELATIVE = 1e-5


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (transformers' folder, the plan's file, the imported weights); each made once."""
    done: dict[str, tuple[Path, Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path, Path]:
        if name not in done:
            at = tmp_path_factory.mktemp(name)
            published.write(name, at / "hf")
            (at / "plan.json").write_text(plan_json(published.lowering(at / "hf")))
            assert command.main(["import", *map(str, (at / "hf", at / "plan.json", at / "weights"))]) == 0
            done[name] = at / "hf", at / "plan.json", at / "weights"
        return done[name]

    return make


def opened(folder: Path, dtype: torch.dtype) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def theirs(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' logits in fp32."""
    with torch.inference_mode():
        return opened(folder, torch.float32)(tokens).logits


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    assert off <= RELATIVE and torch.equal(found.argmax(-1), expected.argmax(-1)), off


@pytest.mark.few(2)
@pytest.mark.parametrize("name", published.ALL)
def test_what_is_read_of_a_config_has_the_parameters_of_its_class(name, tmp_path):
    """And a recipe has them, too, or says which argument of Megatron's it has not."""
    with torch.device("meta"):
        model = published.built(name)
    keys = model.config.to_dict() | {"architectures": [type(model).__name__]}
    found = lint(json.dumps(keys, default=str), "config.json")
    total = sum(value.numel() for value in model.parameters())
    assert not found.findings and found.model.count.total == total
    if unsaid := published.FILE["described"].get(name, {}).get("unsaid"):
        with pytest.raises(Refused, match=re.escape(f"no recipe of ours says `{unsaid}")):
            recipe.make(found, Path("made.yaml"))
    else:
        (tmp_path / "config.json").write_text(found.launch.text)
        assert parameters(published.lowering(tmp_path).plan)[0] == total


@pytest.mark.few("llama_3_1")
@pytest.mark.parametrize("name", published.MODELS)
def test_megatron_computes_the_same_logits(made, name):
    folder, plan, weights = made(name)
    tokens = test_hf.random(2, 16, vocabulary=128)
    expected = theirs(folder, tokens)

    def job():
        lowering = check.one_device(load_plan(plan), plain=True)
        check.rank_zero(lowering)
        agree(check.observed(check.built(lowering, distributed.step_folder(weights), "fp32"), tokens).logits, expected)

    test_hf.in_megatron(job)


@pytest.mark.few("llama_3_1")
@pytest.mark.parametrize("name", published.MODELS)
def test_what_goes_back_is_what_came_to_the_bit(made, name, tmp_path):
    """And transformers opens it by its own class, with nothing of ours and the same model."""
    folder, _, weights = made(name)
    form = published.FILE["models"][name].get("as", "native")
    assert command.main(["export", str(weights), str(tmp_path / "back"), "--as", form, "--shard-gb", "0.001"]) == 0
    before, after = (opened(path, torch.bfloat16) for path in (folder, tmp_path / "back"))
    assert type(before) is type(after) and not list((tmp_path / "back").glob("*.py"))
    x, y = before.state_dict(), after.state_dict()
    assert x.keys() == y.keys() and not [key for key in x if not torch.equal(x[key], y[key])]
    one, two = ({k: v for k, v in vars(side.config).items() if "dropout" in k} for side in (before, after))
    assert one == two
    agree(*(theirs(path, test_hf.random(2, 16, vocabulary=128)) for path in (tmp_path / "back", folder)))
    # Nobody knows them, and a class has its own: 0 pads Nemotron-H, and 1 Seed-OSS, which is trained no more then.
    assert {getattr(after.config, f"{end}_token_id") for end in ("bos", "eos", "pad")} == {None}
    again = native.described(published.keys(tmp_path / "back"), "again")
    assert again == native.described(published.keys(folder), "first")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "said", "all_of"), [
    ("generation_config.json", [5, 2, 7], [5, 2, 7]), ("config.json", [5, 5, 127], [2, 5, 127]), ("generation_config.json", 5, [2, 5]),
])  # fmt: skip
def test_every_token_that_ends_a_text_comes_back(copied, tmp_path, file, said, all_of):
    """However often it goes in and out; one is the tokenizer's, which ends documents."""
    source, plan, _ = copied
    words = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 128)}, "<unk>")
    )
    words.save(str(source / tokenizer.FILE))
    (source / tokenizer.CONFIG).write_text(json.dumps({"eos_token": "</s>"}))
    tree = json.loads((source / file).read_text()) if (source / file).exists() else {}
    (source / "generation_config.json").unlink(missing_ok=True)
    (source / file).write_text(json.dumps(tree | {"eos_token_id": said}))
    for turn in ("one", "two"):
        weights, back = tmp_path / turn, tmp_path / f"{turn} back"
        native.load(source, plan, weights, False, silent)
        native.export(weights, back, None, silent)
        assert transformers.GenerationConfig.from_pretrained(back).eos_token_id == all_of
        assert published.keys(back)["eos_token_id"] == 2
        source = back
    for text in ("[]", "{", "\0", *(f'{{"eos_token_id": {end}}}' for end in ("128", "-1", '[2, "3"]', "[true]", "{}"))):
        (copied[0] / "generation_config.json").write_text(text)
        with pytest.raises(Refused, match=r"generation_config.json` cannot be understood"):
            native.load(copied[0], plan, tmp_path / "three", False, silent)
    exports.export(weights, tmp_path / "ours", None, silent)
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["eos_token_id"] == all_of
    assert generate._tokenizer(SimpleNamespace(tokenizer=None, path=weights), True)[1] == all_of


@pytest.mark.slow
def test_what_nobody_reads_and_a_class_computes_otherwise_is_said(made, tmp_path, capsys):
    shutil.copytree(made("deepseek_v2")[0], tmp_path / "hf")
    keys = published.keys(tmp_path / "hf")
    keys["rope_parameters"] |= {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    keys |= {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}, "unheard_of": 3}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(keys))
    (tmp_path / "plan.json").write_text(plan_json(published.lowering(tmp_path / "hf")))
    weighs = "`rope_scaling.mscale_all_dim: 0.707`: transformers 5.12.1's class leaves it out of its softmax"
    capsys.readouterr()
    assert command.main(["import", *(str(tmp_path / name) for name in ("hf", "plan.json", "weights"))]) == 0
    told = capsys.readouterr().err
    assert weighs in told and "weigh by 1.59" in told and "modeling.Other" in told and "not read: unheard_of" in told
    assert command.main(["export", str(tmp_path / "weights"), str(tmp_path / "back"), "--as", "native"]) == 0
    assert weighs in capsys.readouterr().err


@pytest.mark.slow
def test_the_text_of_a_model_that_also_sees_is_taken_out_of_it(tmp_path, capsys):
    """Qwen3.5 as it is published: another prefix, and an encoder of pictures, which is left out with a word."""
    text = published.BASE | published.MODELS["qwen3_5"][1]
    seeing = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(7)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=seeing, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    kind = transformers.Qwen3_5ForConditionalGeneration
    kind(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    lowering, tokens = published.lowering(tmp_path / "hf"), test_hf.random(2, 16, vocabulary=128)
    (tmp_path / "plan.json").write_text(plan_json(lowering))
    assert command.main(["import", *(str(tmp_path / name) for name in ("hf", "plan.json", "weights"))]) == 0
    assert "`vision_config`: the model of text alone is described" in capsys.readouterr().err
    with torch.inference_mode():
        expected = kind.from_pretrained(tmp_path / "hf", dtype=torch.float32)(tokens).logits

    def job():
        plain = check.one_device(lowering, plain=True)
        check.rank_zero(plain)
        found = check.observed(check.built(plain, distributed.step_folder(tmp_path / "weights"), "fp32"), tokens)
        agree(found.logits, expected)

    test_hf.in_megatron(job)


LAYOUTS = {
    "tp": {"parallel__tensor": 2, "parallel__sequence": True},
    "tp ep": {"parallel__tensor": 2, "parallel__sequence": True, "parallel__expert": 2},
    "ep": {"parallel__expert": 2},
    "pp": {"parallel__pipeline": 2},
}
# kernels, since there is no GPU
NAIVE = {**dict.fromkeys(("deepseek_v3", "glm_4_7_flash"), "mla"), "deepseek_v32": "dsa"}


def layouts() -> Iterator[tuple[str, str]]:
    """One or two models of each family, experts and tensors in one run."""
    for name in [name for name, said in published.FILE["models"].items() if not said.get("of_another")]:
        dense = not any("experts" in key for key in published.MODELS[name][1])
        both = "tp" if dense else "ep" if name == "glm_4_7_flash" else "tp ep"  # it has three heads
        yield from ((name, layout) for layout in (both, "pp"))
    yield "deepseek_v3", "ep"


def whole_pieces(model: Any, step: Path) -> None:
    """torch reads all of a piece, whatever part of it a rank takes: of no matrix one takes a part, but of an expert's."""
    state, chunks = model.sharded_state_dict(), distributed.Checkpoint(step).chunks
    apply_factories(state)
    taken = [at for at in nested_values(state) if isinstance(at, ShardedTensor) and len(at.local_shape) == 2]
    assert any(chunks[at.key][0] != at.local_shape for at in taken)
    for at in (at for at in taken if ".experts." not in at.key):
        ours = [range(o, o + n) for o, n in zip(at.global_offset, at.local_shape, strict=True)]
        for offsets, sizes in chunks[at.key][2].items():
            both = [len({*mine} & {*range(o, o + n)}) for mine, o, n in zip(ours, offsets, sizes, strict=True)]
            assert not all(both) or (*both,) == (*sizes,), at.key


@pytest.mark.few("llama_3_1-tp")
@pytest.mark.parametrize(("name", "layout"), sorted(layouts()))
def test_any_layout_reads_the_weights(made, name, layout, tmp_path):
    """TP, EP: each rank's logits. PP, whose stages pass nothing here: both stages' weights, saved again."""
    folder, _, _ = made(name)
    kernels = {f"execution__{NAIVE[name]}__kernels": "naive"} if name in NAIVE else {}
    lowering = published.lowering(folder, cluster__gpus_per_node=2, **LAYOUTS[layout], **kernels)
    (tmp_path / "plan.json").write_text(plan_json(lowering))
    native.load(folder, tmp_path / "plan.json", tmp_path / "weights", False, silent)
    tokens, step = test_hf.random(2, 16, vocabulary=128), distributed.step_folder(tmp_path / "weights")
    expected = theirs(folder, tokens)
    (tmp_path / "again").mkdir()

    def job():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        test_hf.norm()
        model = check.built(lowering, step, "fp32")
        if "tp" in layout:
            whole_pieces(model, step)
        if layout == "pp":
            state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
            dist_checkpointing.save(state, str(tmp_path / "again"))
            return
        found = check.observed(model, tokens).logits
        rank, share = int(os.environ["RANK"]), found.size(-1)
        whole = share == expected.size(-1)
        agree(found, expected if whole else expected[..., rank * share : (rank + 1) * share])

    for rank in pretend.fork(2, job, 400.0):
        assert rank.code == 0, rank.err[-3000:]
    if layout == "pp":
        before, after = distributed.Checkpoint(step), distributed.Checkpoint(tmp_path / "again")
        assert before.tensors.keys() == after.tensors.keys()
        for key, of in after.tensors.items():
            x, y = (side.read(key, tuple(of.size), side.tensors[key].properties.dtype) for side in (before, after))
            assert torch.equal(x.to(y.dtype), y), key


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(made, tmp_path):
    """(a folder to be damaged, the plan's file, where the weights would go)"""
    folder, plan, _ = made("mixtral")
    shutil.copytree(folder, tmp_path / "hf")
    return tmp_path / "hf", plan, tmp_path / "out"


def said(copied) -> str:
    with pytest.raises(Refused) as refused:
        native.load(*copied, False, silent)
    assert not copied[2].exists() and not copied[2].with_name("out.part").exists()
    return refused.value.render()


def of_shard(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.gate.weight"


def changed(folder: Path, name: str, change) -> None:
    shard = of_shard(folder, name)
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    save_file({key: value for key, value in tensors.items() if value is not None}, shard, {"format": "pt"})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_a_file_that_is_none_is_named(copied, name):
    """It was passed over, or another was said to be missing."""
    at = copied[0] / name
    at.unlink(missing_ok=True)
    os.mkfifo(at)
    with pytest.raises(Refused, match=rf"`{at}` is a pipe, and no file"):
        native.is_published(copied[0])
        native.load(*copied, False, silent)
    at.unlink()
    at.write_bytes('{"model": {}}'.encode("utf-16"))
    assert "utf-8" in said(copied).lower() and "export` writes one" not in said(copied)
    os.truncate(at, 300 << 20)
    assert "too large" in said(copied) or "has more than 256 MiB" in said(copied)


def test_shards_that_are_missing_cut_or_swapped_are_named(copied):
    folder = copied[0]
    one, two = of_shard(folder, Q), of_shard(folder, GATE)
    a, b = one.read_bytes(), two.read_bytes()
    one.unlink()
    assert f"`{one}` cannot be read" in said(copied)
    one.write_bytes(a[:-7])
    assert f"`{one}` is damaged" in said(copied)
    one.write_bytes(b), two.write_bytes(a)
    assert f"`{GATE}` lies in `{one.name}`, and the index says `{two.name}`" in said(copied)


def test_a_tensor_without_a_place_or_a_place_without_one_is_named(copied):
    folder = copied[0]
    changed(folder, Q, lambda tensor: tensor[:-1].contiguous())
    assert f"`{Q}` is [63, 64] in `{of_shard(folder, Q).name}`, and [64, 64] in the plan" in said(copied)
    changed(folder, GATE, lambda tensor: tensor.to(torch.int8))
    assert f"`{GATE}` is I8 in `{of_shard(folder, GATE).name}`, which is not read" in (text := said(copied))
    assert "there are: BF16, F16, F32, F8_E4M3" in text
    (folder / INDEX).unlink()
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert "holds neither" in said(copied)
    model = published.write("mixtral", folder)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    assert "mlp.experts.gate_up_proj" in " ".join(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"holds both `{INDEX}` and a `model.safetensors`" in said(copied)
    (folder / INDEX).unlink()
    text = said(copied)
    assert (
        "holds no `model.layers.0.block_sparse_moe.experts.0.w1.weight`, which `model.layers.1.mixer.experts.up` is made of"
        in text
    )
    assert "more" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 3.3999e38])  # the last is an infinity in bf16
def test_a_weight_that_is_no_number_is_named_and_nothing_is_left(copied, value):
    changed(copied[0], GATE, lambda tensor: tensor.float().index_fill(0, torch.tensor([1]), value))
    assert f"`{GATE}` of `{of_shard(copied[0], GATE).name}` holds a NaN or an infinity" in said(copied)


@pytest.mark.slow
def test_another_model_and_what_no_reader_takes_are_refused(copied):
    folder, keys = copied[0], published.keys(copied[0])

    def with_config(**more: Any) -> str:
        (folder / "config.json").write_text(json.dumps(keys | more))
        return said(copied)

    assert "has `attention.query_groups` 4, and the plan 2" in with_config(num_key_value_heads=4)
    assert "has `norm_epsilon` 0.0001, and the plan 1e-05" in with_config(rms_norm_eps=1e-4)
    # Ours stood in the place of what no recipe takes, without a word.
    assert "no recipe has: model.norm_epsilon: must be greater than 0, not 0.0" in with_config(rms_norm_eps=0.0)
    assert "no recipe has: model.rotary_base: an integer of more" in with_config(rope_parameters={"rope_theta": 1e300})
    assert "weights of `bert` are not read" in with_config(model_type="bert")
    one, none = ({"quant_method": "fp8", "weight_block_size": sizes} for sizes in ([128], [0, 128]))
    methods = ("gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "mxfp4")  # the last is read of gpt-oss
    for of in (*({"quant_method": method} for method in methods), {"load_in_4bit": True}, "int8", one, none):
        method = of.get("quant_method", of) if isinstance(of, dict) else of
        text = with_config(quantization_config=of)
        assert f"config.json` quantizes its weights: `{method}` @ quantization_config\n" in text
    assert "`int4` @ compression_config\n" in with_config(compression_config={"quant_method": "int4"})
    inner = keys | {"quantization_config": {"quant_method": "awq"}}
    assert "weights: `awq` @ quantization_config" in with_config(model_type="whole", vocab_size=None, text_config=inner)
    for name, tool in (("hf_quant_config", "modelopt"), ("quantize_config", "gptq"), ("quant_config", "awq")):
        at = folder / f"{name}.json"
        at.write_text("{}")
        assert f"`{at}` quantizes its weights: `{tool}`" in with_config()
        at.unlink()


def test_weights_that_no_index_names_are_said_not_to_be_read(copied):
    """As the originals beside a converted model; transformers passes them over."""
    shutil.copy(of_shard(copied[0], Q), copied[0] / "consolidated.safetensors")
    told = list[str]()
    native.load(*copied, False, told.append)
    assert f"`{copied[0] / 'consolidated.safetensors'}` is not read: `{INDEX}` does not name it" in told


def test_nothing_of_a_folder_runs(copied):
    (copied[0] / "modeling_mixtral.py").write_text("raise SystemExit('it ran')")
    keys = published.keys(copied[0]) | {"auto_map": {"AutoModelForCausalLM": "modeling_mixtral.X"}}
    (copied[0] / "config.json").write_text(json.dumps(keys))
    native.load(*copied, False, silent)


@pytest.mark.slow
def test_layers_of_token_prediction_are_left_out_by_word_alone(made, tmp_path):
    folder, plan, weights = made("deepseek_v3")
    shutil.copytree(folder, tmp_path / "hf")
    index = json.loads((folder / INDEX).read_text())

    def with_more(*names: str) -> None:
        save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "hf" / "model-mtp.safetensors")
        weight_map = index["weight_map"] | dict.fromkeys(names, "model-mtp.safetensors")
        (tmp_path / "hf" / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))

    with_more("model.layers.3.eh_proj.weight", "model.layers.2.more.weight")
    with pytest.raises(Refused) as refused:
        native.load(tmp_path / "hf", plan, tmp_path / "out", False, silent)
    layer, more = sorted(refused.value.problems, key=lambda problem: "layers.3" not in problem.message)
    assert "`model.layers.3.eh_proj.weight` of `model-mtp.safetensors` has no place" in layer.message
    assert "`--without-mtp`" in layer.hint
    assert "more.weight" in more.message and more.hint is None
    with_more("model.layers.3.eh_proj.weight")
    native.load(tmp_path / "hf", plan, tmp_path / "out", True, silent)
    assert tensors(tmp_path / "out") == tensors(weights)


SLOTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
OF_DEEPSEEK = (
    {"num_hidden_layers": 4},
    {"model.layers.3.": "model.layers.3."},
    [f"model.layers.3.{slot}" for slot in SLOTS],
)
# Of a class with layers more than its config.json says, whose weights go under the names of token prediction: these, and the names of two
# norms, of the projection and of the last norm.
AHEAD: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
    "deepseek_v3": OF_DEEPSEEK,
    "glm4_moe": OF_DEEPSEEK,
    "qwen3_next": (
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
        {"model.layers.2.": "mtp.layers.0."},
        ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"],
    ),
    "nemotron_3_nano": (
        {"num_hidden_layers": 6, "layers_block_type": ["mamba", "moe", "attention", "moe", "attention", "moe"]},
        {"backbone.layers.4.": "mtp.layers.0.", "backbone.layers.5.": "mtp.layers.1."},
        ["mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"],
    ),
}
SAID = ("num_nextn_predict_layers", "mtp_hybrid_override_pattern")
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


def with_a_layer_ahead(name: str, at: Path) -> tuple[Path, Path, Any, list[torch.Tensor]]:
    """(a folder with layers of token prediction, its plan, transformers' model with these as its last, two norms, projection and norm)."""
    more, renamed, slots = AHEAD[name]
    published.write(name, at / "hf", **more)
    big = opened(at / "hf", torch.float32)
    index = json.loads((at / "hf" / INDEX).read_text())
    held = {
        key: value for file in {*index["weight_map"].values()} for key, value in load_file(at / "hf" / file).items()
    }
    for before, after in renamed.items():
        held = {key.replace(before, after): value for key, value in held.items()}
    h = published.BASE["hidden_size"]
    own = [torch.randn(shape).mul(0.1).bfloat16() for shape in ((h,), (h,), (h, 2 * h), (h,))]
    own = [value if value.dim() == 2 or name == "qwen3_next" else value + 1 for value in own]
    held |= {f"{slot}.weight": value for slot, value in zip(slots, own, strict=True)}
    if more is OF_DEEPSEEK[0]:
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        held |= {f"model.layers.3.{key}": held[whole].clone() for key, whole in copies.items()}
    for file in (at / "hf").glob("*.safetensors*"):
        file.unlink()
    save_file(
        {key: value.contiguous() for key, value in held.items()}, at / "hf" / "model.safetensors", {"format": "pt"}
    )
    keys, last = published.keys(at / "hf"), more["num_hidden_layers"] - len(renamed)
    keys |= {"num_hidden_layers": last} | {key: keys[key][:last] for key in LISTS if keys.get(key)}
    keys |= {} if name == "qwen3_next" else {"num_nextn_predict_layers": 1}
    keys |= {"mtp_hybrid_override_pattern": "*E"} if len(renamed) == 2 else {}
    (at / "hf" / "config.json").write_text(json.dumps(keys))
    plan = published.lowering(at / "hf", feature__mtp={"depths": 1, "pattern": "AE", "loss_weight": 0.1})
    (at / "plan.json").write_text(plan_json(plan))
    return at / "hf", at / "plan.json", big, [value.float() for value in own]


def predicted(name: str, folder: Path, big: Any, own: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of the layers of token prediction by DeepSeek-V3's formulas (arXiv 2412.19437, 2.2), in plain torch around
    transformers' own layers; the embedding stands first in the projection's input, as in published weights."""
    less, eps = float(name == "qwen3_next"), getattr(big.config, "rms_norm_eps", None) or big.config.layer_norm_epsilon

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (weight + less)

    with torch.inference_mode():
        small = opened(folder, torch.float32)
        hidden, ahead = small.model(tokens).last_hidden_state, small.get_input_embeddings()(tokens.roll(-1, 1))
        x = torch.cat([norm(ahead, own[0]), norm(hidden, own[1])], -1) @ own[2].T
        positions = torch.arange(tokens.shape[1])[None]
        given = {"attention_mask": torch.full((1, 1, 16, 16), float("-inf")).triu(1), "position_ids": positions}
        if turned := getattr(big.model, "rotary_emb", None):
            given["position_embeddings"] = turned(x, positions)
        for layer in big.model.layers[-len(AHEAD[name][1]) :]:
            x = layer(x, **given)
            x = x[0] if isinstance(x, tuple) else x
        return norm(x, own[3])


@pytest.mark.few("deepseek_v3")
@pytest.mark.parametrize("name", AHEAD)
def test_a_layer_of_token_prediction_comes_and_goes(name, tmp_path):
    """Megatron's hidden states of it are those of its published formulas, and all tensors go back to the bit."""
    folder, plan, big, own = with_a_layer_ahead(name, tmp_path)
    assert command.main(["import", *map(str, (folder, plan, tmp_path / "weights"))]) == 0
    tokens = test_hf.random(2, 16, vocabulary=128)
    expected = predicted(name, folder, big, own, tokens)[:, :-1]  # behind the last token there is none

    def job():
        lowering = check.one_device(load_plan(plan), plain=True)
        check.rank_zero(lowering)
        model = check.built(lowering, distributed.step_folder(tmp_path / "weights"), "fp32")
        (found,) = check.observed(model, tokens).ahead
        agree(found[:, :-1], expected)

    test_hf.in_megatron(job)
    assert command.main(["export", str(tmp_path / "weights"), str(tmp_path / "back"), "--as", "native"]) == 0
    (before,), (after,) = (list(path.glob("*.safetensors")) for path in (folder, tmp_path / "back"))
    x, y = (
        {key.replace("backbone.embedding.", "backbone.embeddings."): value for key, value in load_file(path).items()}
        for path in (before, after)
    )
    assert x.keys() == y.keys() and not [key for key in x if not torch.equal(x[key], y[key])]
    one, two = (published.keys(path) for path in (tmp_path / "back", folder))
    assert [one.get(key) for key in SAID] == [two.get(key) for key in SAID]


def test_a_layer_of_token_prediction_with_a_head_of_its_own_is_refused(tmp_path):
    folder, plan, _, _ = with_a_layer_ahead("deepseek_v3", tmp_path)
    with pytest.raises(Refused, match="the plan has the layers that are to be left out"):
        native.load(folder, plan, tmp_path / "out", True, silent)
    held = load_file(folder / "model.safetensors")
    held["model.layers.3.shared_head.head.weight"][5, 7] += 1
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused) as refused:
        native.load(folder, plan, tmp_path / "out", False, silent)
    (problem,) = refused.value.problems
    assert (
        "`model.layers.3.shared_head.head.weight` of `model.safetensors` is another than `lm_head.weight`"
        in problem.message
    )


def tensors(checkpoint: Path) -> dict[str, list]:
    step = distributed.Checkpoint(distributed.step_folder(checkpoint))
    return {key: step.read(key, tuple(of.size), of.properties.dtype).tolist() for key, of in step.tensors.items()}


def test_what_a_norm_around_one_loses_is_told():
    held = {"exact": torch.tensor([0.5, 1.0078125]), "small": torch.tensor([0.0013, 1.0])}
    form = SimpleNamespace(read=lambda _, name, shape: held[name].bfloat16())
    source = native.Source(Path("hf"), SimpleNamespace(found=held), {}, form, frozenset())
    for name, value in held.items():
        assert torch.equal(source.read(name, torch.bfloat16, (2,), 1.0), (value.bfloat16().float() - 1).bfloat16())
    assert source.rounded == ["small"]


def test_fp8_in_blocks_is_read_by_its_scales(made, tmp_path):
    """As DeepSeek-V3 publishes it, here with blocks of 16 by 32 that do not divide a weight."""
    folder, plan, _ = made("deepseek_v3")
    shutil.copytree(folder, tmp_path / "hf")
    name = "model.layers.0.mlp.down_proj.weight"
    shard = of_shard(tmp_path / "hf", name)
    found = load_file(shard)
    torch.manual_seed(0)
    scale = torch.rand(64 // 16, -(-96 // 40)) + 0.5
    eighth = found[name].to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(16, 0).repeat_interleave(40, 1)[:, :96]
    save_file(found | {name: eighth, f"{name}_scale_inv": scale}, shard, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][f"{name}_scale_inv"] = shard.name
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    keys = published.keys(folder)

    def quantized(*block: int) -> None:
        said = {"quant_method": "fp8", "weight_block_size": list(block)}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(keys | {"quantization_config": said}))

    quantized(16, 40)
    native.load(tmp_path / "hf", plan, tmp_path / "out", False, silent)
    read = distributed.Checkpoint(distributed.step_folder(tmp_path / "out"))
    down = read.read("decoder.layers.1.mlp.linear_fc2.weight", (64, 96), torch.bfloat16)
    assert torch.equal(down, (eighth.float() * wide).to(torch.bfloat16))
    changed(tmp_path / "hf", f"{name}_scale_inv", lambda scale: scale.index_fill(0, torch.tensor([1]), torch.nan))
    with pytest.raises(Refused, match=f"`{name}` of .* holds a NaN"):
        native.load(tmp_path / "hf", plan, tmp_path / "other", False, silent)
    norm = "model.layers.0.input_layernorm.weight"  # of one axis, and blocks have two
    changed(tmp_path / "hf", norm, lambda tensor: tensor.to(torch.float8_e4m3fn))
    text = said((tmp_path / "hf", plan, tmp_path / "out2"))
    assert re.search(rf"`{norm}` of .* is FP8.* @ quantization_config\n+hint: read are FP8 in blocks", text)
    quantized(32, 40)
    with pytest.raises(Refused, match=r"_scale_inv` is \[4, 3\] in .*, and \[2, 3\] by its blocks"):
        native.load(tmp_path / "hf", plan, tmp_path / "other", False, silent)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_next"])
def test_one_tensor_is_held_at_a_time(made, tmp_path, monkeypatch, name):
    """torch's writer keeps each until its file is whole: a model would have to fit into the host's memory."""
    folder, plan, weights = made(name)
    held: list[weakref.ref[torch.Tensor]] = []

    def joined(*given: Any) -> torch.Tensor:
        assert not any(tensor.untyped_storage().nbytes() for at in held if (tensor := at()) is not None)
        held.append(weakref.ref(tensor := join(*given)))
        return tensor

    join = native.joined
    monkeypatch.setattr(native, "joined", joined)
    native.load(folder, plan, tmp_path / "out", False, silent)
    assert len(held) > 9 and tensors(tmp_path / "out") == tensors(weights)


@pytest.mark.slow
def test_a_tied_output_layer_stands_beside_the_embedding_or_for_it(made, tmp_path):
    """As transformers ties two that are equal, or one of which is missing, and leaves two apart that differ."""
    folder, plan, weights = made("qwen3")
    keys, held = published.keys(folder), {k: v for at in folder.glob("*.safetensors") for k, v in load_file(at).items()}
    table = held["model.embed_tokens.weight"]
    for name, more, stops in (
        ("both", {}, None),
        ("alone", {"model.embed_tokens.weight": None}, None),
        ("apart", {"lm_head.weight": table + 1}, "`lm_head.weight` of `model.safetensors` is another than `model.embed_tokens.weight`"),
        ("more", {"model.norm.weight_blocks": table + 1}, "`model.norm.weight_blocks` of `model.safetensors` has no place"),
    ):  # fmt: skip
        those = {
            key: value for key, value in (held | {"lm_head.weight": table.clone()} | more).items() if value is not None
        }
        at, told = written(tmp_path / name, keys, those), list[str]()
        if stops:
            assert stops in (text := said((at, plan, tmp_path / "out"))) and text.count("error: ") == 1
            continue
        native.load(at, plan, tmp_path / f"{name}.out", False, told.append)
        assert tensors(tmp_path / f"{name}.out") == tensors(weights)
        assert ("equal to the embedding: 1 tensor left out, as `lm_head.weight`" in told) == (name == "both")


@pytest.fixture(scope="module")
def packed(made, tmp_path_factory):
    """gpt-oss as it is published: (config.json, its tensors, the plan's file, the import of what transformers opens of it)."""
    folder, plan, _ = made("gpt_oss")
    at = tmp_path_factory.mktemp("packed")
    keys = published.keys(folder) | {"quantization_config": GPT_OSS["quantization_config"]}
    held = {key: value for shard in folder.glob("*.safetensors") for key, value in load_file(shard).items()}
    torch.manual_seed(5)
    for key in [key for key in held if key.endswith("_proj") and "experts" in key]:
        count, into, out = held.pop(key).shape
        held[f"{key}_blocks"] = torch.randint(256, (count, out, into // 32, 16), dtype=torch.uint8)
        held[f"{key}_scales"] = torch.randint(119, 124, (count, out, into // 32), dtype=torch.uint8)
    whole = opened(written(at / "hf", keys, held), torch.bfloat16).state_dict()
    native.load(written(at / "whole", published.keys(folder), whole), plan, at / "weights", False, silent)
    return keys, held, plan, tensors(at / "weights")


def written(folder: Path, keys: dict[str, Any], held: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_packed(packed, tmp_path: Path, change: dict[str, Any], config: dict[str, Any]) -> tuple[Path, Path, Path]:
    """What `said` takes: the published folder with other tensors (None: without) and with other keys of its quantization."""
    keys, held, plan, _ = packed
    keys = keys | {"quantization_config": keys["quantization_config"] | config}
    held = {name: value for name, value in (held | change).items() if value is not None}
    return written(tmp_path / "hf", keys, held), plan, tmp_path / "out"


UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.slow
def test_mxfp4_is_what_transformers_makes_of_it(packed, tmp_path):
    native.load(*of_packed(packed, tmp_path, {}, {}), False, silent)
    assert tensors(tmp_path / "out") == packed[3]
    blocks = torch.arange(256, dtype=torch.uint8).repeat(254).view(1, 254, 16, 16)
    scales = torch.arange(254, dtype=torch.uint8).repeat_interleave(16).view(1, 254, 16)  # 254: 6 of it is beyond bf16
    assert torch.equal(quantized.unpacked(blocks, scales), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        ({f"{UP}_scales": None}, {}, f"`{UP}_blocks` of `model.safetensors` is MXFP4, and its `{UP}_scales` is missing"),
        ({f"{UP}_blocks": None}, {}, f"holds no `{UP}`"),
        ({f"{UP}_scales": torch.zeros(4, 192, 3).byte()}, {}, "[4, 192, 3] in `model.safetensors`, and [4, 192, 2] by its"),
        ({f"{UP}_blocks": torch.zeros(4, 192, 2, 16)}, {}, f"`{UP}_blocks` is F32 in"),
        ({f"{UP}_scales": torch.full((4, 192, 2), 255).byte()}, {}, f"`{UP}` of `model.safetensors` holds a NaN"),
        ({UP: torch.zeros(4, 64, 192)}, {}, f"`{UP}_blocks` of `model.safetensors` is `{UP}` of `model.safetensors`, too"),
        ({}, {"modules_to_not_convert": ["model.layers.*.mlp"]}, "says that `model.layers.*.mlp` is not quantized"),
        ({}, {"modules_to_not_convert": None, "ignored_layers": ["model.layers.1.mlp.experts"]}, "experts` is not quantized"),
        ({"model.norm.weight_blocks": torch.zeros(1).byte()}, {}, "is MXFP4, and [64] in the plan is not, turned, in blocks of 32"),
        ({}, {"modules_to_not_convert": "lm_head"}, "it is a list of modules"),
        ({}, {"quant_method": "fp8", "weight_block_size": [128, 128]}, f"`{UP}_blocks` of `model.safetensors` has no place"),
    ],
    ids=lambda part: str(part)[:20],
)  # fmt: skip
def test_mxfp4_that_is_not_whole_is_named(packed, tmp_path, change, config, told):
    assert told in said(of_packed(packed, tmp_path, change, config))


def integers(made, bits: int, group: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], Path, tuple[str, ...]]:
    """A folder as compressed-tensors packs it: (config.json, its tensors, the plan's file, names of the weights)."""
    folder, plan, _ = made("qwen3")
    keys, held = published.keys(folder), {k: v for at in folder.glob("*.safetensors") for k, v in load_file(at).items()}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    keys["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*o_proj", "re:gate_proj"],  # the last from the first letter on: none
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | ({"group_size": group} if group else {})}},
    }  # fmt: skip
    names, _ = tuple(held), torch.manual_seed(7)
    for name in [name for name in names if name.endswith("_proj.weight") and "o_proj" not in name]:
        rows, columns = held.pop(name).shape
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
        scale = (torch.rand(rows, columns // group if group else 1) / 64).bfloat16()
        shape = torch.tensor([rows, columns])
        held |= {f"{name}_packed": pack_to_int32(values, bits), f"{name}_scale": scale, f"{name}_shape": shape}
    return keys, held, plan, names


@pytest.mark.few(1)
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 0)])
def test_packed_integers_are_what_compressed_tensors_makes_of_them(made, tmp_path, bits, group):
    """Its own packer has written them; transformers opens the folder with its classes, and says what each weight is."""
    keys, _, plan, names = packed = integers(made, bits, group)
    at, _, out = of_packed(packed, tmp_path, {}, {})
    plainly = transformers.CompressedTensorsConfig(**keys["quantization_config"], run_compressed=False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(at, dtype=torch.bfloat16, quantization_config=plainly)
    theirs = {name: whole.state_dict()[name] for name in names}
    keys = {key: value for key, value in keys.items() if key != "quantization_config"}
    one = written(tmp_path / "whole", keys, theirs)
    (one / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(theirs, "model.safetensors")}))  # which names it
    native.load(one, plan, tmp_path / "expected", False, silent)
    native.load(at, plan, out, False, silent)
    assert tensors(out) == tensors(tmp_path / "expected")


def test_each_word_of_packed_integers_decides_by_itself_whether_they_are_read():
    """Not read: scales of other shapes, zero points, columns in another order, types made while it runs, zeros that are left out."""

    def told(*groups, **more):
        tree = {"format": "pack-quantized", "config_groups": {str(n): {"weights": of} for n, of in enumerate(groups)}}
        return quantized._packed(tree | more)

    plain = {"num_bits": 4, "strategy": "group", "group_size": 32}
    read = [
        ({}, (4, 32)),
        ({"num_bits": 8}, (8, 32)),
        ({"strategy": None}, (4, 32)),
        ({"strategy": None, "group_size": None}, (4, 0)),
    ]
    read += [({"strategy": "channel", "group_size": size}, (4, 0)) for size in (None, -1, 32)]
    read += [({"actorder": order}, (4, 32)) for order in (None, False, "static", "weight")]
    other = [
        {"num_bits": 5},
        {"strategy": "tensor"},
        {"group_size": None},
        {"group_size": -1},
        {"group_size": "32"},
        {"type": "float"},
    ]
    other += [{"symmetric": False}, {"actorder": "group"}, {"dynamic": True}]
    for more, found in (*read, *((more, None) for more in other)):
        assert told(plain | more) == found, more
    assert told(plain, dict(plain)) == (4, 32) and told(plain, plain | {"num_bits": 8}) is None and told() is None
    for more, found in (({"format": "dense"}, (4, 32)), ({"format": "sparse-24-bitmask"}, None), ({}, (4, 32))):
        assert told(plain, sparsity_config=more) == found
    assert told(plain, format="marlin-24") is None


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_fill_no_word_are_read_whole(bits):
    for columns in range(1, 12):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, columns), dtype=torch.int8)
        held = {
            "_packed": pack_to_int32(values, bits),
            "_scale": torch.rand(3, 1),
            "_shape": torch.tensor([3, columns]),
        }
        form = quantized.Packed(bits=bits)
        shapes = {part: shape for part, (shape, _) in form.parts((3, columns)).items()}
        assert shapes == {part: tuple(value.shape) for part, value in held.items()}
        assert torch.equal(form.number(held.__getitem__, "w"), values * held["_scale"])


GATE4 = "model.layers.1.mlp.gate_proj.weight"


def weights_of(**more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16} | more
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


UNREAD = "config.json` quantizes its weights: `compressed-tensors`"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        ({f"{GATE4}_scale": None}, {}, f"`{GATE4}_packed` of `model.safetensors` is INT4, and its `{GATE4}_scale` is missing"),
        ({f"{GATE4}_shape": torch.tensor([96, 60])}, {}, f"`{GATE4}` is [96, 60] by its parts, and [96, 64] in the plan"),
        ({f"{GATE4}_shape": torch.tensor([96, 61])}, {}, f"`{GATE4}_shape` says [96, 61], and `{GATE4}_packed` is [96, 8] words"),
        ({f"{GATE4}_packed": torch.zeros(96, 8)}, {}, f"`{GATE4}_packed` is F32 in `model.safetensors`, and I32 in INT4"),
        ({GATE4: torch.zeros(96, 64)}, {}, f"`{GATE4}_packed` of `model.safetensors` is `{GATE4}` of `model.safetensors`, too"),
        ({}, {"ignore": ["re:.*gate_proj$"]}, "config.json says that `re:.*gate_proj$` is not quantized"),
        ({}, {"ignore": ["re:(", "lm_head"]}, "`re:(` is no regular expression"),
        ({}, weights_of(group_size=32), f"`{GATE4}_scale` is [96, 4] in `model.safetensors`, and [96, 2] by its blocks"),
        ({}, weights_of(group_size=48), "is INT4, and [96, 64] in the plan has no rows of 48 at a time"),
        ({}, weights_of(num_bits=8), f"`{GATE4}_packed` is [96, 8] in `model.safetensors`, and [96, 16] by its blocks"),
        ({}, weights_of(symmetric=False), UNREAD),
        ({}, weights_of(actorder="group"), UNREAD),
        ({}, weights_of(type="float"), UNREAD),
        ({}, {"format": "nvfp4-pack-quantized"}, UNREAD),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, UNREAD),
        ({f"{GATE4}_zero_point": torch.zeros(12, 4).int()}, {}, f"`{GATE4}_zero_point` of `model.safetensors` has no place"),
    ],
    ids=lambda part: str(part)[:20],
)  # fmt: skip
def test_packed_integers_that_are_not_whole_are_named(made, tmp_path, change, config, told):
    assert told in said(of_packed(integers(made, 4, 16), tmp_path, change, config))


# Which architecture ------------------------------------------------------------------------------------------------------

ARCHITECTURES = {
    "llama_3_8b": "LlamaForCausalLM", "llama_3_1_8b": "LlamaForCausalLM", "mixtral_8x7b": "MixtralForCausalLM",
    "qwen3_30b_a3b": "Qwen3MoeForCausalLM", "qwen3_next_80b_a3b": "Qwen3NextForCausalLM", "deepseek_v2_lite": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v3_yarn": "DeepseekV3ForCausalLM", "deepseek_v3_2": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM", "moonlight_16b_a3b": "DeepseekV3ForCausalLM", "glm_4_7_flash": "DeepseekV3ForCausalLM",
    "qwen3_8b": "Qwen3ForCausalLM", "qwen3_0_6b": "Qwen3ForCausalLM", "nemotron_nano_9b_v2": "NemotronHForCausalLM",
    "qwen3_5_0_8b": "Qwen3_5ForCausalLM", "gpt_oss_20b": "GptOssForCausalLM", "gpt_oss_120b": "GptOssForCausalLM",
    "seed_oss_36b": "SeedOssForCausalLM", "solar_open_100b": "Glm4MoeForCausalLM",
    "glm_4_5_air": "Glm4MoeForCausalLM", "nemotron_h_8b": "NemotronHForCausalLM",
    "nemotron_h_56b": "NemotronHForCausalLM", "nemotron_3_nano_30b_a3b": "NemotronHForCausalLM",
    "nemotron_3_super_120b_a12b": "NemotronHForCausalLM",
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_public_preset_has_its_architecture(name):
    of, keys = native.architecture(lowered(name).plan)
    assert of.architecture == keys["architectures"][0] == ARCHITECTURES[name]


@pytest.mark.slow
def test_what_an_engine_reads_under_another_name_is_written():
    """SGLang 0.5.23 opens neither family without: it looks at no `layer_types`, and takes 8 groups."""
    (_, linear), (_, mamba) = (native.architecture(lowered(n).plan) for n in ("qwen3_5_0_8b", "nemotron_h_8b"))
    assert (linear["full_attention_interval"], mamba["mamba_n_groups"]) == (4, mamba["n_groups"])
    for kinds, every in (("gdn attention", 2), ("attention gdn", config.ABSENT), ("gdn gdn", 3)):
        layers = [kind for mixer in kinds.split() for kind in (mixer, "moe")]
        assert config._interval(families.family("qwen3_next"), None, {"layer_kinds": layers}) == every


def test_of_several_architectures_one_is_chosen_by_its_name():
    plan = lowered("glm_4_7_flash").plan
    of, keys = native.architecture(plan, "glm4_moe_lite")
    assert of.architecture == "Glm4MoeLiteForCausalLM" and keys["mlp_layer_types"] == ["dense"] + ["sparse"] * 46
    with pytest.raises(Refused, match="`llama`"):
        native.architecture(plan, "llama")
    with pytest.raises(Refused, match="`nothing` are not read"):
        native.architecture(plan, "nothing")


def of_config(at: Path, name: str, **more: Any) -> Plan:
    (at / "config.json").write_text(json.dumps(published.built(name, **more).config.to_dict() | more))
    return published.lowering(at).plan


@pytest.mark.slow
def test_dense_layers_anywhere_are_said_where_a_class_reads_them(tmp_path):
    kinds = ["sparse", "dense", "sparse"]
    plan = of_config(tmp_path, "glm_4_7_flash", mlp_layer_types=kinds, num_hidden_layers=3, first_k_dense_replace=None)
    of, keys = native.architecture(plan)
    assert (of.model_type, keys["mlp_layer_types"], "first_k_dense_replace" in keys) == ("glm4_moe_lite", kinds, False)
    with pytest.raises(Refused, match="does not say `first_k_dense_replace`"):
        native.architecture(plan, "deepseek_v3")


@pytest.mark.slow
def test_nemotron_hs_class_ties_nothing_and_has_a_residual_stream_of_its_own(tmp_path):
    with pytest.raises(Refused, match="has `tie_word_embeddings` False, and the plan True"):
        native.architecture(of_config(tmp_path, "nemotron_h", tie_word_embeddings=True))
    with pytest.raises(Refused, match="--fp32-residual-connection"):
        of_config(tmp_path, "nemotron_h", residual_in_fp32=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["nam56r", "nam56r_native_dp"])
def test_nams_lanes_are_no_published_architecture(name):
    """The native lane is Nemotron-H's kinds, and turns heads, which Nemotron-H does not."""
    with pytest.raises(Refused) as refused:
        native.architecture(lowered(name).plan)
    told = [problem.message for problem in refused.value.problems]
    assert told[0].startswith("no published architecture") and len(told) == 1 + len(families.own())
    if name == "nam56r_native_dp":
        (why,) = [text for text in told if text.startswith("`nemotron_h`")]
        assert "rotary_dim" in why


def test_each_expert_is_a_piece_of_its_own(made):
    """Megatron asks for one after the other, and torch reads a whole piece for each: all in one are read once for each expert."""
    _, _, weights = made("mixtral")
    step = weights / "release"
    (shape, _, pieces) = distributed.Checkpoint(step).chunks["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert shape[0] > 1 and [*pieces] == [(expert, 0, 0) for expert in range(shape[0])]
    assert {*pieces.values()} == {(1, *shape[1:])}
    others = [key for key, (_, _, of) in distributed.Checkpoint(step).chunks.items() if len(of) != 1]
    assert others and all(".mlp.experts.experts." in key for key in others)


# Adapters ----------------------------------------------------------------------------------------------------------------

LORA = {"rank": 4, "alpha": 8, "targets": None}
ADAPTED = {
    "self_attention.linear_qkv": (128, 64),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (192, 64),
    "mlp.linear_fc2": (64, 96),
}


def adapters(at: Path, made, *strangers: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of adapters alone on the imported Llama, as Megatron-Bridge names them, and its tensors."""
    folder, _, weights = made("llama_3")
    lowering = published.lowering(folder, feature__lora=LORA, schedule__pretrained=str(weights))
    torch.manual_seed(3)
    held: dict[str, torch.Tensor] = {}
    for layer, (module, (out, into)) in (
        (n, of) for n in range(4) for of in ADAPTED.items() if of[0].startswith("mlp") == n % 2
    ):
        key = f"decoder.layers.{layer}.{module}.adapter.linear_"
        held |= {f"{key}in.weight": torch.randn(4, into).bfloat16(), f"{key}out.weight": torch.randn(out, 4).bfloat16()}
    held |= {name: torch.ones(4, 4) for name in strangers}
    distributed.write(begun_with(at, weights), held, lowering)
    return at, held


def begun_with(at: Path, weights: Path) -> Path:
    """A folder for adapters that were trained on an imported model."""
    (at / SIGNED).mkdir(parents=True)
    word = in_a_word(weights / "release", checksums.whole(weights / "release"))
    (at / SIGNED / BEGAN).write_text(json.dumps({"schedule.pretrained": word}))
    return at


def test_adapters_go_into_the_weights_that_they_stand_on(made, tmp_path):
    checkpoint, held = adapters(tmp_path / "adapters", made)
    assert command.main(["export", str(checkpoint), str(tmp_path / "out"), "--as", "native"]) == 0
    before, after = (opened(path, torch.bfloat16).state_dict() for path in (made("llama_3")[0], tmp_path / "out"))
    for part, rows in (("gate_proj", slice(0, 96)), ("up_proj", slice(96, 192))):
        key, name = "decoder.layers.3.mlp.linear_fc1.adapter.linear_", f"model.layers.1.mlp.{part}.weight"
        added = 2.0 * held[f"{key}out.weight"].float() @ held[f"{key}in.weight"].float()
        assert torch.equal(after[name], (before[name].float() + added[rows]).bfloat16())
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "proj" not in name}, "norms and both ends stay"
    told = exports.export(checkpoint, tmp_path / "nam", None, silent)["checkpoint"]
    assert told == checksums.whole(checkpoint / "release"), "the step of the adapters, not the one that they stand on"


@pytest.mark.slow
def test_adapters_by_themselves_are_what_peft_reads(made, tmp_path):
    """By its file format: W + alpha / r B A of each module is the merged weight. docs/checkpoints.md: so does the package."""
    checkpoint, _ = adapters(tmp_path / "adapters", made)
    assert command.main(["export", str(checkpoint), str(tmp_path / "peft"), "--as", "peft"]) == 0
    assert command.main(["export", str(checkpoint), str(tmp_path / "out"), "--as", "native"]) == 0
    keys = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    held = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    before, after = (opened(path, torch.bfloat16) for path in (made("llama_3")[0], tmp_path / "out"))
    merged = after.state_dict()
    assert len(keys["target_modules"]) == 2 * 7 and len(held) == 2 * 2 * 7
    for module in keys["target_modules"]:
        into, out = (held[f"base_model.model.{module}.lora_{part}.weight"].float() for part in "AB")
        base = before.get_submodule(module).weight.float()
        added = keys["lora_alpha"] / keys["r"] * (out @ into)
        assert torch.equal((base + added).bfloat16(), merged[f"{module}.weight"]), module


@pytest.mark.slow
def test_an_adapter_of_grouped_experts_goes_into_each_and_has_no_module_of_peft(made, tmp_path):
    folder, _, weights = made("mixtral")
    off = {"feature__lora": LORA | {"targets": ["linear_fc1"]}, "schedule__pretrained": str(weights)}
    lowering = published.lowering(folder, **off)
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.adapter.linear_"
    torch.manual_seed(4)
    into, out = torch.randn(4, 64).bfloat16(), torch.randn(192, 4).bfloat16()
    distributed.write(
        begun_with(tmp_path / "adapters", weights), {f"{key}in.weight": into, f"{key}out.weight": out}, lowering
    )
    assert command.main(["export", str(tmp_path / "adapters"), str(tmp_path / "out"), "--as", "native"]) == 0
    before, after = (opened(path, torch.bfloat16).state_dict() for path in (folder, tmp_path / "out"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(after[name], (before[name].float() + 2.0 * out.float() @ into.float()).bfloat16())
    assert [other for other in before if not torch.equal(before[other], after[other])] == [name]
    with pytest.raises(Refused, match="holds its experts in one tensor"):
        native.peft(tmp_path / "adapters", tmp_path / "peft", silent)


@pytest.mark.slow
def test_an_adapter_without_a_weight_is_refused(made, tmp_path):
    checkpoint, _ = adapters(tmp_path / "adapters", made, "decoder.layers.0.mlp.router.adapter.linear_in.weight")
    with pytest.raises(
        Refused, match=r"`decoder\.layers\.0\.mlp\.router\.adapter\.linear_in\.weight` .* nothing is merged"
    ):
        native.export(checkpoint, tmp_path / "out", None, silent)
    assert not (tmp_path / "out").exists()
    # Nor is a step without any taken for one whose adapters say nothing.
    distributed.write(
        begun_with(tmp_path / "none", made("llama_3")[2]),
        {"output_layer.bias": torch.ones(4)},
        load_plan(checkpoint / "plan.json"),
    )
    with pytest.raises(Refused, match=r"has no adapters: nothing is merged"):
        native.export(tmp_path / "none", tmp_path / "out", None, silent)


@pytest.mark.slow
def test_adapters_do_not_go_into_weights_of_another_model_than_the_plan_beside_them(made, tmp_path):
    checkpoint, _ = adapters(tmp_path / "adapters", made)
    beside = made("llama_3")[2] / "plan.json"
    before = beside.read_text()
    try:
        beside.write_text(before.replace('"rotary_base": 500000', '"rotary_base": 9'))
        with pytest.raises(Refused, match=r"release` is of another model.*`model\.rotary_base`"):
            native.export(checkpoint, tmp_path / "out", None, silent)
    finally:
        beside.write_text(before)
    lora = {"feature__lora": LORA, "schedule__pretrained": str(made("llama_3")[2])}
    other = published.lowering(made("llama_3")[0], model__rotary_base=9, **lora)
    (checkpoint / "plan.json").write_text(plan_json(other))  # of the adapters themselves
    with pytest.raises(Refused, match=r"adapters/release` is of another model.*`model\.rotary_base`"):
        native.export(checkpoint, tmp_path / "out", None, silent)


@pytest.mark.slow
def test_adapters_go_into_the_step_that_they_were_trained_on_alone(made, tmp_path):
    """A base that went on, or that was imported anew, has other weights of the same shapes."""
    checkpoint, _ = adapters(tmp_path / "adapters", made)
    shutil.copytree(made("llama_3")[2], tmp_path / "base")
    step, told = checkpoint / "release", checkpoint / SIGNED / BEGAN
    assert based(step, tmp_path / "base") == tmp_path / "base" / "release"
    sums = tmp_path / "base" / "release" / checksums.NAME
    sums.write_text(sums.read_text() + " ")
    with pytest.raises(Refused, match="base/release` is not the step that these adapters were trained on"):
        based(step, tmp_path / "base")
    for said in ("{", "[]", '{"schedule.pretrained": "release"}'):
        told.write_text(said)
        with pytest.raises(Refused, match=r"began\.json` does not say which weights"):
            native.export(checkpoint, tmp_path / "out", None, silent)


@pytest.mark.slow
def test_adapters_do_not_go_into_damaged_weights(made, tmp_path):
    checkpoint, _ = adapters(tmp_path / "adapters", made)
    shard = next((made("llama_3")[2] / "release").glob("*.distcp"))
    whole = shard.read_bytes()
    try:
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(Refused, match=r"release` is damaged"):
            native.export(checkpoint, tmp_path / "out", None, silent)
    finally:
        shard.write_bytes(whole)


@pytest.mark.slow
def test_a_published_model_goes_on_for_twenty_steps_and_back(made, tmp_path):
    """What no step moves, here the experts' bias, comes back to the bit; all else has moved, and transformers opens it."""
    folder, _, weights = made("glm4_moe")
    steps = {"train_steps": 20, "decay_steps": 20, "save_interval": 20, "global_batch_size": 4, "micro_batch_size": 1}
    steps |= {"load": str(weights), "save": str(tmp_path / "ckpt")}
    more = {
        "optim__lr": 1e-3,
        "optim__min_lr": 1e-3,
        "optim__warmup_steps": 0,
        "model__blocks__moe__expert_bias_update_rate": 0.0,
    }
    lowering = published.lowering(
        folder, model__seq_length=32, **more, **{f"schedule__{k}": v for k, v in steps.items()}
    )
    losses = test_train.trained(test_hf.train_of(lowering, tmp_path, 1))
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert command.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "back"), "--as", "native"]) == 0
    before, after = (opened(path, torch.bfloat16).state_dict() for path in (folder, tmp_path / "back"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and same == {name for name in before if "e_score_correction_bias" in name}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--as", "nativ"], "did you mean `native`?"),
        (["--as", "zzz"], "there are: nam, native, peft, "),
        (["--as", "peft", "--tokenizer", "x"], "`--as peft` has no use for `--tokenizer`"),
        (["--as", "peft", "--shard-gb", "1"], "`--as peft` has no use for `--shard-gb`"),
    ],
)
def test_a_form_that_is_none_is_refused_before_anything_is_read(words, said, capsys):
    assert command.main(["export", ".", "out", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_tensor_of_text_that_stands_twice_is_refused(tmp_path):
    """In a model that also sees, with its prefix and without: the one without was left out as a picture's."""
    twice = {name: torch.ones(4) for name in ("model.norm.weight", "model.language_model.norm.weight")}
    save_file(twice, tmp_path / "model.safetensors")
    with pytest.raises(
        Refused, match=r"`model\.language_model\.norm\.weight` and `model\.norm\.weight`, which are one"
    ):
        native._source(tmp_path, {}, {"model_type": "x"}, families.family("qwen3_5_text"))
    names = ("backbone.embedding.weight", "backbone.embeddings.weight")
    save_file({name: torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="which are one tensor"):
        native._source(tmp_path, tree := {}, tree, families.family("nemotron_h"))


def test_what_two_readers_would_take_for_two_models_is_refused(copied):
    """One tensor in two shards, neither of which the index names; adapters, which transformers puts into the weights."""
    folder, index = copied[0], json.loads((copied[0] / INDEX).read_text())
    other = of_shard(folder, GATE)
    file = index["weight_map"].pop(Q)
    save_file(load_file(other) | {Q: torch.ones(64, 64, dtype=torch.bfloat16)}, other, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))
    assert re.search(f"`{Q}` lies in `[^`]+` and in `[^`]+`, and the index says neither", said(copied))
    (folder / INDEX).write_text(json.dumps({"weight_map": [file]}))
    assert f"`weight_map` of `{folder / INDEX}` is no table" in said(copied)
    (folder / "adapter_config.json").write_text("{}")
    (folder / INDEX).write_text(json.dumps(index))
    assert f"`{folder}` holds adapters beside its weights" in said(copied)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_4_5_air", "glm_4_7_flash", "qwen3_next_80b_a3b"])
def test_the_layer_of_token_prediction_of_a_preset_has_the_parameters_of_its_class(name):
    """One more layer of transformers' own, a projection of two widths to one, and three norms."""
    known = transformers.AutoConfig.for_model(**CONFIGS[name])
    with torch.device("meta"):
        layer = transformers.AutoModelForCausalLM.from_config(known).model.layers[-1]
    h = known.hidden_size
    (total, _), (without, _) = (parameters(lowered(name, *words).plan)[:2] for words in (["+overlay=mtp"], []))
    assert total - without == sum(value.numel() for value in layer.parameters()) + 2 * h * h + 3 * h
