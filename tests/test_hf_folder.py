"""An export's folder in the hands of others: what a manifest vouches for, and what stands beside an export that is made."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from nam_megatron.blocks.exported import Tensor
from nam_megatron.errors import Refused
from nam_megatron.hf import distributed, folder, opened

TENSORS = [Tensor("a.weight", (("x.weight", (2, 3)),)), Tensor("b.weight", (("y.weight", (4,)),))]


@pytest.fixture
def export(tmp_path) -> Path:
    """Two shards, their index, a config, and the manifest."""
    at = tmp_path / "hf"
    at.mkdir()
    files = folder.shards(TENSORS, 12)
    hashes = {
        name: folder.write_shard(at / name, group, lambda t: torch.ones(t.shape, dtype=torch.bfloat16))
        for name, group in files
    }
    folder.write_index(at, files)
    (at / folder.CONFIG).write_text("{}")
    step = {"step": "iter_0000003", "checkpoint": "0" * 64}
    folder.write_manifest(at, hashes, weights=folder.fingerprint(hashes), **step)
    folder.verified(at)
    return at


def refusal(at: Path) -> str:
    with pytest.raises(Refused) as refused:
        folder.verified(at)
    return refused.value.render()


@pytest.mark.parametrize("said", [None, 5, "x", []])
def test_a_file_of_which_the_manifest_says_nonsense_is_refused(export, said):
    tree = json.loads((export / folder.MANIFEST).read_text())
    tree["files"][folder.CONFIG] = said
    (export / folder.MANIFEST).write_text(json.dumps(tree))
    assert f"`{export / folder.CONFIG}` has 2 bytes, not None" in refusal(export)


@pytest.mark.parametrize(
    "name",
    [
        "custom_generate/generate.py", "model.safetensors", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "__pycache__/modeling_nam.cpython-312.pyc", "pytorch_model.bin", "README.md/x.py", "added_tokens.json",
    ],
)  # fmt: skip
def test_what_the_manifest_does_not_list_is_not_of_the_export(export, name):
    """transformers loads each of these by its name alone."""
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).write_bytes(bytes(8))
    assert f"`{export / name}` is not of this export" in refusal(export)
    assert "hint: take it away" in refusal(export)


def test_a_linked_folder_is_not_looked_past(export, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "generate.py").write_text("")
    (export / "custom_generate").symlink_to(tmp_path / "evil")
    assert "custom_generate` is not of this export" in refusal(export)


@pytest.mark.parametrize("name", ["README.md", "LICENSE", ".gitattributes", ".cache/huggingface/x.lock", ".git/HEAD"])
def test_what_nobody_computes_from_may_stand_there(export, name):
    (export / name).parent.mkdir(exist_ok=True, parents=True)
    (export / name).write_text("x")
    folder.verified(export)


def test_an_export_in_the_hubs_cache_is_whole_by_what_its_links_lead_to(export, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir(), snapshot.mkdir(parents=True)
    for number, path in enumerate(export.iterdir()):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    folder.verified(snapshot)
    shard = next(snapshot.glob("*.safetensors")).resolve()
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert "is not what was exported" in refusal(snapshot)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "../up", "/etc/passwd", "a/../../up", "", "."])
def test_names_of_no_file_inside_are_refused(export, name):
    tree = folder.load_json(export / folder.MANIFEST)
    tree["files"][name] = {"bytes": 1, "sha256": "0"}
    (export / folder.MANIFEST).write_text(json.dumps(tree))
    assert f"is no file inside `{export}`" in refusal(export)
    index = {"weight_map": {"a.weight": f"{name}.safetensors" if name in ("a\0b", "\ud800") else name, "b.weight": "b"}}
    (export / folder.INDEX).write_text(json.dumps(index))
    with pytest.raises(Refused, match="cannot be read"):
        folder.reader(export, TENSORS)


@pytest.mark.parametrize("name", [folder.MANIFEST, folder.INDEX, folder.CONFIG, "model-00001-of-00002.safetensors"])
def test_nobody_waits_for_a_pipe(export, name):
    (export / name).unlink()
    os.mkfifo(export / name)
    assert f"`{export / name}` is " in refusal(export)
    if name == folder.INDEX or name.endswith("safetensors"):
        with pytest.raises(Refused, match="is a pipe"):
            folder.reader(export, TENSORS)


def test_one_file_of_weights_needs_no_index_and_is_none_beside_one(export):
    for path in export.glob("model*"):
        path.unlink()
    folder.write_shard(export / folder.SINGLE, TENSORS, lambda t: torch.ones(t.shape, dtype=torch.bfloat16))
    assert folder.reader(export, TENSORS)(TENSORS[0]).tolist() == [[1.0] * 3] * 2
    save_file({t.name: torch.ones(t.shape, dtype=torch.int8) for t in TENSORS}, export / folder.SINGLE)
    with pytest.raises(Refused, match=r"`a\.weight` is I8"):  # whatever its scales, they are not read
        folder.reader(export, TENSORS)
    (export / folder.INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(Refused, match=r"holds no `a\.weight`"):
        folder.reader(export, TENSORS)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weights", "0" * 64), ("weights", None), ("step", "iter_1"), ("step", "\x1b[2J"), ("checkpoint", {"a": 1}), ("files", [])],
)  # fmt: skip
def test_an_identity_is_what_the_files_prove(export, key, value):
    tree = folder.load_json(export / folder.MANIFEST)
    assert opened.identity(export) == {
        **{k: tree[k] for k in ("step", "weights", "checkpoint")},
        "unproven": ["step", "checkpoint"],
    }
    folder.sign(export, tree | {key: value})
    with pytest.raises(Refused, match=folder.MANIFEST):
        opened.identity(export)


def test_a_folder_is_made_beside_what_others_call_alike(tmp_path):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("x")
    with folder.making(tmp_path / "out") as part:
        (part / "made").write_text("")
    with pytest.raises(ZeroDivisionError), folder.making(tmp_path / "other"):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.part"]
    assert (tmp_path / "out.part" / "mine").is_file() and (tmp_path / "out" / "made").is_file()


def test_a_folder_that_came_meanwhile_is_left(tmp_path):
    with pytest.raises(Refused, match="has come while"), folder.making(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_gpu_behind_the_last_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [len([*opened.absent(device)]) for device in ("cuda", "cuda:1", "cuda:2")] == [0, 0, 1]


def test_weights_that_a_plan_has_not_are_named_and_nothing_of_the_optimizers():
    step = object.__new__(distributed.Checkpoint)
    names = [f"{part}.a.weight" for part in ("embedding", "decoder", "mtp", "output_layer")]
    step.tensors = dict.fromkeys([*names, "optimizer.state.exp_avg.decoder.a.weight"])
    assert sorted(step.strangers({names[1]})) == sorted({*names} - {names[1]})


def test_a_file_is_filled_to_its_last_byte_and_a_tensor_never_cut():
    files = folder.shards([SimpleNamespace(nbytes=n) for n in (4, 6, 10, 11, 3, 7, 1)], 10)
    assert [[tensor.nbytes for tensor in group] for _, group in files] == [[4, 6], [10], [11], [3, 7], [1]]
    assert [name for name, _ in files] == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
