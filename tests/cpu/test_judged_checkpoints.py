"""What stands beside a checkpoint and in it, judged part by part: small ones that torch writes, and none is trained."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_train import lowered, signed

from nam_megatron.compile.lower import translate
from nam_megatron.data import identity, manifest
from nam_megatron.errors import Problem, Refused
from nam_megatron.hf import export, opened
from nam_megatron.judge import resume
from nam_megatron.mends import checksums as mend
from nam_megatron.recipe import load
from nam_megatron.runtime import checkpoint, checksums, hosts
from nam_megatron.words.whole import digest

TRACKER, STEP = "latest_checkpointed_iteration.txt", "iter_0000012"
READ = identity.read


@pytest.fixture(autouse=True)
def changed_under_way(monkeypatch):
    """As to processes that start anew."""
    monkeypatch.setattr(identity, "read", identity.tree)


@pytest.fixture
def step(tmp_path) -> Path:
    """A checkpoint of step 12 with two tensors and an object, its checksums and its tracker."""
    folder = tmp_path / "ckpt" / STEP
    held = {"a": torch.arange(64.0), "b": torch.ones(3, 5), "args": {"seed": 1}, "random": random.Random(1).getstate()}
    dcp.save(held, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"iteration": 12}, folder / "common.pt")
    (folder / "metadata.json").write_text("{}")
    (folder.parent / TRACKER).write_text("12")
    signed(folder)
    return folder


def found(step: Path, **words) -> list[str]:
    return [p.message.partition("is damaged: ")[2] or p.message for p in checkpoint.damage(step.parent, **words)]


def test_a_checkpoint_that_is_not_there_is_about_the_key_that_asks_for_it(tmp_path):
    (problem,) = checkpoint.objections(lowered(f"schedule.load={tmp_path}"))
    assert (problem.key, problem.message) == ("schedule.load", f"no checkpoint in `{tmp_path}`")
    assert "schedule.load=null" in problem.hint


def test_a_checkpoint_that_may_not_be_read_is_about_the_key_that_asks_for_it(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    asked = lowered(f"schedule.load={tmp_path}")
    monkeypatch.setattr(Path, "is_file", closed)
    (problem,) = checkpoint.objections(asked)
    assert (problem.key, problem.message) == (
        "schedule.load", f"`{tmp_path}/latest_checkpointed_iteration.txt` cannot be read: Permission denied",
    )  # fmt: skip


def test_checksums_wait_for_the_files_of_the_last_rank(step, monkeypatch):
    (step / checksums.NAME).unlink()
    alone = torch.distributed
    monkeypatch.setattr(alone, "barrier", lambda: (step / "__0_1.distcp").write_bytes(b"late"))
    monkeypatch.setattr(alone, "get_rank", lambda: 0)
    monkeypatch.setattr(alone, "get_world_size", lambda: 1)
    monkeypatch.setattr(alone, "all_gather_object", lambda found, mine: found.__setitem__(0, mine))
    checksums.write(step)
    assert checksums.read(step)["__0_1.distcp"] == hashlib.sha256(b"late").hexdigest()


# The tracker -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["12", "12\n", " 12 ", "0012", "release"])
def test_a_tracker_that_names_a_step(step, word):
    if word == "release":
        step = step.rename(step.with_name("release"))
        signed(step)
    (step.parent / TRACKER).write_text(word)
    assert found(step) == []
    assert resume.weights_alone(step.parent) == (word == "release")


@pytest.mark.parametrize("word", ["", "-1", "1.0", "1e1", "١٢", "1234567890", "Release", "../release", "x" * 99])
def test_a_tracker_that_names_none(step, word):
    (step.parent / TRACKER).write_text(word)
    (text,) = found(step)
    assert text.endswith(f"says `{word[:40]}`, which is no step")


def test_a_tracker_that_cannot_be_read_and_a_step_that_is_not_there(step):
    (step.parent / TRACKER).write_text("13")
    assert found(step) == [f"checkpoint `{step.parent}/iter_0000013` is not there"]
    (step.parent / TRACKER).unlink()
    (step.parent / TRACKER).mkdir()
    assert found(step)[0].endswith("cannot be read: Is a directory")


# Files and their checksums -----------------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_what_was_saved(step):
    assert {".metadata", "__0_0.distcp", "common.pt", "metadata.json"} == checksums.read(step).keys()
    assert found(step) == [] == found(step, thorough=False)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt", "metadata.json"])
def test_every_file_is_missed_and_a_changed_one_is_told(step, name):
    data = (step / name).read_bytes()
    (step / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    told = f"`{name}` is not what was saved: its checksum differs"
    assert told in found(step)
    # Without the shards, which one rank of a job reads.
    assert (told in found(step, thorough=False)) == (name != "__0_0.distcp")
    (step / name).unlink()
    assert f"`{name}` is missing" in found(step) and f"`{name}` is missing" in found(step, thorough=False)
    assert len(found(step)) == 1


@pytest.mark.parametrize(
    "name", [f"{STEP}/.metadata", f"{STEP}/{checksums.NAME}", "plan.json", "nam_megatron/data.json"]
)
def test_a_pipe_is_not_waited_for(step, name):
    path = step.parent / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert found(step) == [f"`{path}` is a pipe, and no file"]
    assert identity.stored(path) is None and (path.name != checksums.NAME or "a pipe" in next(checksums.damage(step)))


def test_a_shard_that_nobody_hashed_and_a_file_of_somebodys(step):
    (step / "notes.txt").write_text("mine")
    assert found(step) == []
    for name in ("__1_0.distcp", "__0_1.distcp"):
        (step / name).write_bytes(b"x")
    assert found(step) == ["`__0_1.distcp` has no checksum", "`__1_0.distcp` has no checksum"]


def test_checksums_that_are_none(step):
    said = json.loads((step / checksums.NAME).read_text())
    wrong = [said | {"algorithm": "sha1"}, said | {"files": []}, {}, [], {"files": said["files"]}]
    digest = said["files"]["common.pt"]
    wrong += [said | {"files": said["files"] | more} for more in (
        {"common.pt": digest.upper()}, {"common.pt": digest[:-1]}, {"common.pt": digest + "0"}, {"common.pt": 1}, {"../common.pt": digest},
        {"a/b": digest},
    )]  # fmt: skip
    for tree in wrong:
        (step / checksums.NAME).write_text(json.dumps(tree))
        (text,) = found(step)
        assert text.startswith(f"`{checksums.NAME}` cannot be read: "), tree
    (step / checksums.NAME).write_text("[" * 100_000)
    assert "cannot be read: it is nested too deep" in found(step)[0]
    (step / checksums.NAME).unlink()
    (step.parent / resume.PLAN).write_text("{}")  # a step of ours
    assert found(step)[0].startswith(
        f"`{checksums.NAME}` is missing; if you trust the files: `{checksums.COMMAND} {step}`"
    )
    assert len(found(step)) == 1


@pytest.mark.parametrize(
    ("beside", "whose", "way"),
    [
        ([], "another program", "the trainer's own converter"),
        (["run_config.yaml"], "Megatron-Bridge", "`AutoBridge.export_ckpt`"),
    ],
)
def test_a_checkpoint_of_another_program_is_not_called_damaged(step, beside, whose, way):
    (step / checksums.NAME).unlink()
    for name in beside:
        (step / name).write_text("{}")
    (problem,) = checkpoint.damage(step.parent)
    assert (
        whose in problem.message
        and way in problem.hint
        and "nam hf import" in problem.hint
        and "damaged" not in problem.message
    )
    assert not [*resume.another(step.parent, translate(load("nam56r_smoke")))], "it is said once"


def test_a_checkpoint_of_megatrons_older_form_is_anothers(step):
    for path in step.iterdir():
        path.unlink()
    (step / "mp_rank_00").mkdir()
    (problem,) = checkpoint.damage(step.parent)
    assert "was saved by another program" in problem.message


def test_a_file_that_cannot_be_read_is_told(step, monkeypatch):
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checksums, "digest", broken)
    assert found(step) == ["`.metadata` cannot be read: Input/output error"]


def test_a_checksum_is_sha256_of_the_file(step):
    assert checksums.read(step) == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in step.iterdir() if p.name != checksums.NAME
    }


@pytest.mark.parametrize(
    ("name", "rank"),
    [("__0_0.distcp", 0), ("__13_2.distcp", 13), ("__2_13.distcp", 2), (".metadata", 0), ("__1_0.x", 0)],
)
def test_who_wrote_a_file(name, rank):
    assert checksums.writer(name) == rank


# The index ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["common.pt"])
def test_a_file_that_is_cut_off_is_told_whatever_its_checksum_says(step, name):
    data = (step / name).read_bytes()
    (step / name).write_bytes(data[: len(data) // 2])
    signed(step)
    assert found(step) == [f"`{name}` is cut off"]


def test_a_shard_is_as_long_as_the_index_says(step):
    path = step / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data + b"more")
    signed(step)
    assert found(step) == []  # what lies behind is read by nobody
    for thorough in (True, False):
        path.write_bytes(data[:-1])
        signed(step)
        assert found(step, thorough=thorough) == [f"`__0_0.distcp` has {len(data) - 1} bytes of {len(data)}"]
    path.unlink()
    signed(step)
    assert found(step) == ["`__0_0.distcp` is missing"]


def indexed(step: Path, **changes) -> list[str]:
    """What is found where one entry of the index says something else."""
    path = step / ".metadata"
    metadata = dcp.FileSystemReader(step).read_metadata()
    key = next(key for key in metadata.storage_data if key.fqn == "a")
    for name, value in changes.items():
        setattr(metadata.storage_data[key], name, value)
    path.write_bytes(pickle.dumps(metadata))
    signed(step)
    return found(step)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None), ({"relative_path": "../x"}, "which is no file of this checkpoint"), ({"relative_path": ""}, "which is no file"),
        ({"relative_path": ".."}, "which is no file"), ({"relative_path": "/etc/passwd"}, "which is no file"),
        ({"relative_path": "a/b"}, "which is no file"), ({"relative_path": 7}, "it says 7"),
        ({"relative_path": "gone"}, "`gone` is missing"),
        ({"offset": -1}, "cannot be read: it says"), ({"length": -1}, "cannot be read: it says"), ({"offset": True}, "cannot be read"),
        ({"offset": 1.5}, "cannot be read"), ({"length": 2**62}, "cannot be read"), ({"length": 2**62 - 1}, "bytes of"),
        ({"offset": 2**40}, "bytes of"),
    ],
)  # fmt: skip
def test_what_an_index_says(step, change, said):
    texts = indexed(step, **change)
    assert len(texts) == (said is not None) and all(said in text for text in texts), texts


def test_an_object_among_the_tensors_is_looked_at_and_only_it(step):
    class Mine:
        def __reduce__(self):
            return print, ("ran",)

    held = {"a": torch.ones(3), "args": Mine()}
    dcp.save(held, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    signed(step)
    (text,) = found(step)
    assert text.startswith("`args` in `__0_0.distcp` cannot be loaded: ")
    assert found(step, thorough=False) == []


# Whether a plan may go on ------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "parallel.tensor": ("parallel.tensor=2", "parallel.sequence=true"),
    "parallel.pipeline": ("parallel.pipeline=2",),
    "parallel.expert": ("parallel.expert=2",),
    "parallel.expert_tensor": ("parallel.expert_tensor=2",),
}
OPTIMIZERS = {
    "reshardable": ("feature.distributed_optimizer.reshardable=true",),
    "whole": (
        "feature.distributed_optimizer.enabled=false",
        "feature.distributed_optimizer.overlap_param_gather=false",
    ),
    "muon": ("optim=muon",),
}


def refused(folder: Path, *words: str) -> list[str | None]:
    return [p.key for p in resume.another(folder, lowered(*words))]


@pytest.mark.slow
def test_a_layout_that_flattened_the_optimizer_is_kept(tmp_path):
    """In either direction; weights alone go into any."""
    save = (f"schedule.save={tmp_path}", "schedule.save_interval=2", "schedule.global_batch_size=16", "cluster=h200_8")
    for key, layout in LAYOUTS.items():
        (tmp_path / TRACKER).write_text("2")
        checkpoint.sign(lowered(*save, *layout))
        assert refused(tmp_path, *save) == [key]
        (tmp_path / TRACKER).write_text(" release\n")
        assert refused(tmp_path, *save) == []
    (tmp_path / TRACKER).write_text("2")
    checkpoint.sign(lowered(*save, "parallel.pipeline=2", "parallel.virtual_pipeline=2"))
    assert refused(tmp_path, *save, "parallel.pipeline=2") == ["parallel.virtual_pipeline"]
    checkpoint.sign(lowered(*save))
    assert refused(tmp_path, *save, *LAYOUTS["parallel.tensor"]) == ["parallel.tensor"]
    assert refused(tmp_path, *save, "cluster=h200_4") == []  # another data-parallel size reads it
    for name, words in OPTIMIZERS.items():
        checkpoint.sign(lowered(*save, *words))
        assert refused(tmp_path, *save, *words, *LAYOUTS["parallel.tensor"]) == ["parallel.tensor"] * (name == "muon")
    (bound,) = resume.another(tmp_path, lowered(*save, *words, *LAYOUTS["parallel.tensor"]))
    assert bound.hint == "resume in its layout"


def test_two_runs_do_not_save_into_one_folder(tmp_path):
    """Of one recipe, as by a job that is submitted twice: each step would be of parts of both."""
    plan = lowered(f"schedule.save={tmp_path}", "schedule.save_interval=2")
    begun, over = os.pipe(), os.pipe()
    if not (other := os.fork()):
        checkpoint.sign(plan)
        os.write(begun[1], b"x")
        os.read(over[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    with pytest.raises(Refused, match="another run that goes on saves into") as refused_:
        checkpoint.sign(plan)
    assert refused_.value.problems[0].key == "schedule.save"
    os.write(over[1], b"x")
    os.waitpid(other, 0)
    checkpoint.sign(plan)
    checkpoint.sign(plan)  # its own lock is none against itself


def test_an_fsdp_is_not_resharded():
    def recipe(*features: str) -> dict:
        found = {"distributed_optimizer": {"enabled": True, "reshardable": True}}
        return {"feature": found | {name: {} for name in features}}

    assert resume._reshardable(recipe("mtp"))
    assert not any(resume._reshardable(recipe("mtp", name)) for name in ("muon", "megatron_fsdp"))


def test_an_fsdp_takes_no_weights_alone(tmp_path):
    """They are of Megatron's form and not of its; what trained them does not matter."""
    save = (f"schedule.save={tmp_path}", "schedule.save_interval=2")
    (tmp_path / TRACKER).write_text("release")
    checkpoint.sign(lowered(*save))
    assert refused(tmp_path, *save, "feature.megatron_fsdp.enabled=true") == ["feature.megatron_fsdp.enabled"]
    checkpoint.sign(lowered(*save, "feature.megatron_fsdp.enabled=true"))
    assert refused(tmp_path, *save) == []
    assert refused(tmp_path, *save, "feature.megatron_fsdp.enabled=true") == ["feature.megatron_fsdp.enabled"]


def test_weights_alone_are_of_what_the_compiler_decided_then(tmp_path):
    """As a version of another day may have; how they were trained does not matter, nor on which Megatron."""
    save = (f"schedule.save={tmp_path}", "schedule.save_interval=2")
    (tmp_path / TRACKER).write_text("release")
    checkpoint.sign(lowered(*save))
    signed = tmp_path / resume.PLAN
    for name, told in (("rotary_interleaved", ["settings.rotary_interleaved"]), ("decoupled_lr", [])):
        tree = json.loads(signed.read_text())
        (pin,) = (s for s in tree["settings"] if s["name"] == name)
        pin["value"] = 1.5
        tree["megatron_core"] = "0.18.0"
        signed.write_text(json.dumps(tree))
        assert refused(tmp_path, *save) == told
        checkpoint.sign(lowered(*save))


@pytest.mark.parametrize("set_", [True, False])
def test_weights_know_the_tokenizer_of_their_data_by_its_bytes_or_by_what_it_says(tmp_path, set_):
    at = tmp_path / "ours" / manifest.TOKENIZER / manifest.TOKENS
    at.parent.mkdir(parents=True)
    at.write_text('{"model":   1}')
    data = SimpleNamespace(built=tmp_path / "ours" if set_ else None, tokenizer=None if set_ else str(at.parent))
    for told, same in ((digest(at), True), (identity.laid_out({"model": 1}), True), ("0" * 64, False)):
        (tmp_path / resume.DATA).write_text(json.dumps({"files": {resume.HASHED: {"sha256": told}}}))
        found = [p.key for p in resume.another_tokenizer(tmp_path, data)]
        assert found == ([] if same else ["data.path" if set_ else "data.tokenizer"])


def built(folder: Path, content: str) -> str:
    """What a built dataset says of itself; of `train.bin`, that it is `content`."""
    folder.mkdir(exist_ok=True)
    part = {"documents": 1, "tokens": 1}
    files = {name: {"sha256": content, "bytes": 1} for name in ("train.bin", "train.idx")}
    said = {
        "version": 1,
        "key": "k",
        "inputs": [],
        "valid_share": 0.1,
        "duplicates": 0,
        "empty": 0,
        "vocabulary": 9,
        "largest_id": 8,
    }
    (folder / manifest.NAME).write_text(json.dumps({**said, "splits": {"train": part, "valid": part}, "files": files}))
    return str(folder)


def test_another_kind_of_data_is_another_computation_wherever_it_lies(tmp_path):
    """Of two built datasets the content is asked; one that cannot be read is another one, too."""
    same, moved, other = (built(tmp_path / name, key) for name, key in (("a", "1"), ("b", "1"), ("c", "2")))
    data = ("data=built", "schedule.save_interval=2", f"schedule.save={tmp_path}/ckpt")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / TRACKER).write_text("2")
    checkpoint.sign(lowered(*data, f"data.path={same}"))
    assert refused(tmp_path / "ckpt", *data, f"data.path={moved}") == []
    assert refused(tmp_path / "ckpt", *data, f"data.path={other}") == ["data.path"]
    (Path(same) / "train.bin").write_bytes(b"x")  # written over, and its manifest left
    (problem,) = resume.another(tmp_path / "ckpt", lowered(*data, f"data.path={same}"))
    assert problem.message == f"`{same}/train.bin` is not what was built"
    (Path(same) / "train.bin").unlink()
    built(Path(same), "2")  # built again, at the same place
    assert refused(tmp_path / "ckpt", *data, f"data.path={same}") == ["data.path"]
    for unread in ("{}", "[]", "{"):
        (Path(moved) / manifest.NAME).write_text(unread)
        assert refused(tmp_path / "ckpt", *data, f"data.path={moved}") == ["data.path"]
    indexed = ("data=indexed", f"data.path={moved}", "data.tokenizer=t", *data[1:])
    assert "data.path" in refused(tmp_path / "ckpt", *indexed)


def test_datasets_of_others_are_known_by_their_content(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / manifest.TOKENS).write_text('{"model": {"a": 1}}')
    for name in ("a", "b"):
        for end in ("bin", "idx"):
            (tmp_path / f"{name}.{end}").write_bytes(f"{end} of both".encode())
    save = ("schedule.save_interval=2", f"schedule.save={tmp_path}/ckpt", f"data.tokenizer={tokens}")
    one = (*save, "data=indexed")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / TRACKER).write_text("2")

    def said(*words: str) -> list[str]:
        return [p.message.partition(": ")[2] for p in resume.another(tmp_path / "ckpt", lowered(*words))]

    checkpoint.sign(lowered(*one, f"data.path={tmp_path}/a"))
    assert said(*one, f"data.path={tmp_path}/a") == said(*one, f"data.path={tmp_path}/b") == []
    (tmp_path / "b.bin").write_bytes(b"bin of twos")
    assert said(*one, f"data.path={tmp_path}/b") == ["`data.bin` has another hash"]
    shorter = resume.another(tmp_path / "ckpt", lowered(*one, f"data.path={tmp_path}/b"), thorough=False)
    assert list(shorter) == []  # of a job one rank hashes it
    (tokens / manifest.TOKENS).write_text('{"padding": null,  "model": {"a": 1}}')  # laid out otherwise
    assert said(*one, f"data.path={tmp_path}/a") == []
    (tokens / manifest.TOKENS).write_text('{"model": {"b": 1}}')
    assert said(*one, f"data.path={tmp_path}/a") == ["`tokenizer/tokenizer.json` has another hash"]
    checkpoint.sign(lowered(*one, f"data.path={tmp_path}/a"))
    (tokens / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert said(*one, f"data.path={tmp_path}/a") == ["`tokenizer/special tokens` has another hash"]
    signed_data = json.loads((tmp_path / "ckpt" / resume.DATA).read_text())
    del signed_data["files"]["tokenizer/special tokens"]  # as older versions signed it
    (tmp_path / "ckpt" / resume.DATA).write_text(json.dumps(signed_data))
    assert said(*one, f"data.path={tmp_path}/a") == []
    parts = f"data.parts=[{{weight: 1, path: {tmp_path}/a}},{{weight: 2, path: {tmp_path}/b}}]"
    checkpoint.sign(lowered(*save, "data=blend", parts))
    assert said(*save, "data=blend", parts) == []
    for end in ("bin", "idx"):
        (tmp_path / f"moved.{end}").write_bytes((tmp_path / f"a.{end}").read_bytes())
    moved = parts.replace(f"{tmp_path}/a", f"{tmp_path}/moved")
    assert said(*save, "data=blend", moved) == []
    assert list(resume.another(tmp_path / "ckpt", lowered(*save, "data=blend", moved), thorough=False)) == []
    assert len(said(*save, "data=blend", moved.replace("weight: 2", "weight: 3"))) == 1
    swapped = f"data.parts=[{{weight: 1, path: {tmp_path}/b}},{{weight: 2, path: {tmp_path}/a}}]"
    assert said(*save, "data=blend", swapped) == ["`part1.bin` and `part2.bin` have another hash"]
    apart = (f"data.parts=[{{weight: 1, path: {tmp_path}/a}}]", f"data.valid_parts=[{{weight: 1, path: {tmp_path}/b}}]")
    apart += ("data.split=null", "schedule.eval_steps=1")
    checkpoint.sign(lowered(*save, "data=blend", *apart))
    assert said(*save, "data=blend", *apart) == []
    (tmp_path / "b.idx").write_bytes(b"x")
    assert said(*save, "data=blend", *apart) == ["`valid1.idx` has another hash"]
    checkpoint.sign(lowered(*save, "data=blend", parts))
    (tmp_path / "b.idx").write_bytes(b"y")
    assert said(*save, "data=blend", parts) == ["`part2.idx` has another hash"]
    (tmp_path / "b.idx").unlink()
    found = [p.message for p in resume.another(tmp_path / "ckpt", lowered(*save, "data=blend", parts))]
    assert found == [f"`{tmp_path}/b.idx` cannot be read: No such file or directory"]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.jsonl").write_text(name)
    answers = (*save, "data=sft_blend", parts, "schedule.pretrained=p", "feature.mtp.depths=0")
    checkpoint.sign(lowered(*answers))
    (tmp_path / "b" / "training.jsonl").write_text("c")
    assert said(*answers) == ["`part2/training.jsonl` has another hash"]


def test_of_a_large_file_blocks_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 64)
    monkeypatch.setattr(identity, "BLOCK", 16)
    path = tmp_path / "a"
    path.write_bytes(bytes(1000))
    before = identity.content(path)
    for at, seen in ((0, True), (328, True), (999, True), (500, False)):  # blocks begin at 0, 328, 656 and 984
        data = bytearray(1000)
        data[at] = 1
        path.write_bytes(data)
        assert (identity.content(path) != before) == seen, at
    path.write_bytes(bytes(64))
    assert identity.content(path) == hashlib.sha256(bytes(64)).hexdigest()


def test_what_an_older_version_left_out_is_said(step):
    folder = step.parent
    words = (f"schedule.save={folder}", "schedule.save_interval=2")
    data = ("data=built", f"data.path={built(folder.parent / 'd', '1')}")
    checkpoint.sign(lowered(*words, *data))
    checksums.bind_to(step, checksums.BOUND)
    signed(step)
    assert list(checkpoint.untold(folder)) == []
    (folder / resume.DATA).unlink()
    assert [said.partition(" cannot be told")[0] for said in checkpoint.untold(folder)] == [
        f"whether the data is that of `{folder}`"
    ]
    (step / resume.PLAN).unlink()
    checkpoint.sign(lowered(*words))  # random tokens
    tree = json.loads((step / checksums.NAME).read_text())
    del tree["step"], tree["files"]["plan.json"]
    (step / checksums.NAME).write_text(json.dumps(tree))
    assert found(step) == []
    assert [said.partition(" cannot be told")[0] for said in checkpoint.untold(folder)] == [
        f"whether `{step}` is a step of this run"
    ]


def test_a_step_of_another_run_or_another_step_is_told(step):
    """Copied with its checksums, as a folder is."""
    words = (f"schedule.save={step.parent}", "schedule.save_interval=2")

    def resigned(*more: str) -> None:
        checkpoint.sign(lowered(*words, *more))
        checksums.bind_to(step, checksums.BOUND)
        signed(step)

    def strange() -> list[str]:
        return list(resume.foreign(step))

    resigned("optim.lr=0.5")
    assert strange() == []
    checkpoint.sign(lowered(*words, "optim.lr=0.5", "schedule.log_interval=7"))  # went on; that computes nothing
    assert strange() == []
    checkpoint.sign(lowered(*words))
    (text,) = strange()
    assert text == "is of another run: `optim.lr` is 0.5 in its `plan.json`, and 0.0003 in the run's"
    (problem,) = resume.another(step.parent, lowered(*words))
    assert problem.message == f"checkpoint `{step}` {text}" and problem.key == "schedule.load"
    for ask in (opened.open_model, lambda step: export.checked(step, lowered(*words).plan)):
        with pytest.raises(Refused, match=r"is of another run: `optim\.lr`"):
            ask(step)
    first, moved = (("data=built", f"data.path={built(step.parents[1] / name, '1')}") for name in ("d", "e"))
    resigned(*first)
    checkpoint.sign(lowered(*words, *moved))
    assert strange() == []
    built(step.parents[1] / "e", "2")
    checkpoint.sign(lowered(*words, *moved))
    assert strange() == ["is of another run, which was trained on other data: `train.bin` and `train.idx`"]
    for at in (step, step.parent):
        (at / resume.DATA).unlink()
    resigned()
    later = step.rename(step.with_name("iter_0000014"))
    (step.parent / TRACKER).write_text("14")
    assert found(later) == ["it was saved as `iter_0000012`"]
    later.rename(step)
    later.symlink_to(step)
    assert found(later) == ["it was saved as `iter_0000012`"]


def test_a_step_of_a_run_that_began_with_other_weights_is_told(step):
    """Both have one plan but for where they began, and one data."""
    words = (f"schedule.save={step.parent}", "schedule.save_interval=2")
    began = step.parents[1] / "began"
    shutil.copytree(step, began / step.name)
    shutil.copy(step.parent / TRACKER, began)
    (step.parent / TRACKER).rename(began.with_name(TRACKER))  # it has saved nothing yet
    for plan in (lowered(*words), lowered(*words, f"schedule.load={began}")):
        checkpoint.sign(lowered(f"schedule.save={began}", "schedule.save_interval=2"))
        assert list(checkpoint.damage(began)) == []
        checkpoint.sign(plan)
        checksums.bind_to(step, checksums.BOUND)
        signed(step)
        assert list(resume.foreign(step)) == [] and resume.ORIGIN in checksums.read(step)
    another = shutil.copytree(began, began.with_name("another"))  # a step of the same name
    (another / step.name / "more").touch()
    signed(another / step.name)
    assert list(checkpoint.damage(another)) == []
    checkpoint.sign(lowered(*words, f"schedule.load={another}"))
    assert list(resume.foreign(step)) == ["is of another run, which began with other weights: `weights`"]
    checkpoint.sign(plan)
    began.with_name(TRACKER).rename(step.parent / TRACKER)
    for _ in range(2):  # who goes on with it says what it had begun with
        checkpoint.sign(lowered(*words, f"schedule.load={step.parent}"))
        assert list(resume.foreign(step)) == []
    (step.parent / TRACKER).unlink()
    checkpoint.sign(lowered(*words))
    assert list(resume.foreign(step)) == ["is of another run, which began with other weights: `weights`"]


SAME = {"our code": "a", "the code of `megatron.core`": "b", "`torch`": "2.11.0", "NVTE_FUSED_ATTN": "0"}


@pytest.mark.parametrize(
    ("disk", "ran", "told"),
    [
        ({}, {}, []),
        ({"schedule.load": "another"}, {}, ["schedule.load"]),
        ({"data.path": "another"}, {}, ["data.path"]),
        ({}, {"our code": "c"}, ["our code is not the same"]),
        ({}, {"`torch`": "2.10.0", "`wandb`": "1"}, ["`torch` is not the same"]),  # one rank alone writes to a tracker
        ({}, {"NVTE_FUSED_ATTN": None}, ["NVTE_FUSED_ATTN is not the same"]),
        ({}, {"FLA_TRIL_PRECISION": "tf32"}, ["FLA_TRIL_PRECISION is not the same"]),
    ],
)
def test_hosts_that_differ_train_nothing(step, monkeypatch, disk, ran, told):
    """Rank 2 is the first of another host; rank 1 has looked at nothing for its host."""
    data = ("data=built", f"data.path={built(step.parents[1] / 'd', '1')}")
    recipe = lowered(f"schedule.load={step.parent}", *data).plan.recipe
    monkeypatch.setitem(checkpoint.JUDGED, step.parent, (step.name, "a" * 64))
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # nobody says which rank reads: each does
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(hosts, "runs", lambda: SAME)

    def gather(every: list, said: tuple) -> None:
        found, mine = said
        assert not found
        if isinstance(mine, list):  # the checkpoint's files, which all see alike
            every[:] = [said] * 3
            return
        assert mine[0]["schedule.load"] == (step.name, "a" * 64) and mine[0]["data.path"]["train.bin"] == "1"
        theirs = {name: value for name, value in (SAME | ran).items() if value}
        ranks = mine, ({"schedule.load": mine[0]["schedule.load"]}, None), (mine[0] | disk, theirs)
        every[:] = [((), one) for one in ranks]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert hosts.one_for_all([], recipe) == []  # of one host
    several = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"nodes": 2})})
    if not told:
        assert hosts.one_for_all([], several) == []
        return
    with pytest.raises(Refused, match="not the same on every host") as refused:
        hosts.one_for_all([], several)
    assert [p.key or p.message.partition(" on every")[0] for p in refused.value.problems] == told


@pytest.mark.slow
def test_what_a_host_runs_is_told_by_its_files_and_variables(monkeypatch, tmp_path):
    import megatron.core  # noqa: F401  as every trainer has

    for name in ("training", "bridge"):  # wherever it lies
        (tmp_path / name).mkdir()
        monkeypatch.setitem(
            sys.modules, f"megatron.{name}", SimpleNamespace(__file__=str(tmp_path / name / "__init__.py"))
        )
    for name in ("CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.setenv(name, "0")
    for name in ("CUBLASLT_LOG_LEVEL", "CUDNN_LOGDEST_DBG", "PYTORCH_TUNABLEOP_FILENAME"):
        monkeypatch.setenv(name, "/this/host")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/this/host")
    said = hosts.runs()
    assert torch.__version__.startswith(said["`torch`"])
    assert list(said.values()).count("0") == 3 and "/this/host" not in said.values()
    assert {len(said[name]) for name in ("our code", "the code of `megatron.core`")} == {40}
    for name in ("training", "bridge"):
        (tmp_path / name / "__init__.py").write_text(name)
        (other,) = said.items() - (said := hosts.runs()).items()
        assert other[0] == f"the code of `megatron.{name}`"


def test_a_gpu_of_another_architecture_than_the_plans_is_refused(monkeypatch):
    for found, recipe, refused in (
        ((9, 0), lowered().plan.recipe, False),
        ((10, 0), lowered().plan.recipe, True),
        ((8, 0), lowered("cluster=cpu").plan.recipe, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        assert [p.key for p in hosts.another_chip(recipe)] == ["device.capability"] * refused
        with pytest.raises(Refused, match="compute capability") if refused else contextlib.nullcontext():
            assert hosts.one_for_all([], recipe) == []


def test_a_gpu_of_another_memory_than_the_plans_is_refused(monkeypatch):
    """An H100 in the place of an H200, whose compute capability it has; before a start, `launch check` says it."""
    recipe = lowered("device=h200").plan.recipe
    waived = recipe.cluster.model_copy(update={"waivers": {"gpus": "a slice"}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gib, of, refused in (
        (139.8, {}, False),
        (140.4, {}, False),
        (79.2, {}, True),
        (79.2, {"cluster": waived}, False),
    ):
        here = SimpleNamespace(total_memory=gib * 2**30, name="NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda here=here: here)
        found = [problem.message for problem in hosts.another_chip(recipe.model_copy(update=of))]
        assert found == ["this GPU, NVIDIA H100 80GB HBM3, has 79.2 GiB, and the plan's `h200` 139.8"] * refused


def test_what_was_signed_of_the_data_is_not_read_again(step, monkeypatch):
    data = ("data=built", f"data.path={built(step.parents[1] / 'd', '1')}")
    lowering = lowered(f"schedule.save={step.parents[1]}/new", "schedule.save_interval=2", *data)
    read, overwritten = [], identity.overwritten
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(identity, "read", READ)
    monkeypatch.setattr(identity, "overwritten", lambda *words: read.append(words) or overwritten(*words))
    checkpoint.sign(lowering)
    (step.parents[1] / "new" / TRACKER).write_text("2")
    for reads in (1, 2):
        assert list(resume.another(step.parents[1] / "new", lowering)) == [], "a resume asks before it signs"
        assert hosts.on_disk(lowering.plan.recipe)["data.path"]["train.bin"] == "1" and len(read) == reads
        READ.cache_clear()  # as on another host
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert hosts.on_disk(lowering.plan.recipe) == {} and len(read) == 2, "one rank reads for its host"


def test_a_copy_with_its_times_is_no_shared_disk(step, monkeypatch):
    monkeypatch.setattr(checkpoint, "JUDGED", {step.parent: (step.name, "a" * 64)})
    seen = hosts.judged()
    shutil.copytree(step, step.with_name("copy"))
    assert hosts.judged() == seen
    shutil.rmtree(step)
    step.with_name("copy").rename(step)
    assert hosts.judged() != seen


def test_what_one_rank_has_found_ends_all(monkeypatch):
    found = [Problem("another dataset", key="data.path")]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    gather = lambda every, said: every.__setitem__(slice(None), (said, (found, None)))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(Refused, match="another dataset"):
        hosts.agreed([], None)


@pytest.mark.parametrize("same_disk", [True, False])
def test_a_host_with_a_disk_of_its_own_reads_all_of_a_checkpoint(step, monkeypatch, same_disk):
    """What it finds is told by all ranks: the others would wait for it."""
    recipe = lowered(f"schedule.load={step.parent}", "cluster.nodes=2").plan.recipe
    monkeypatch.setitem(checkpoint.JUDGED, step.parent, (step.name, "a" * 64))
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert not [*checkpoint.damage(step.parent, thorough=False)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(hosts, "runs", lambda: SAME)
    told = []

    def gather(every: list, said: tuple) -> None:
        first = said[1] if same_disk else []
        every[:] = ((), first if isinstance(said[1], list) else said[1]), said
        told.append(bool(said[0]))

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setenv("LOCAL_RANK", "0")
    if same_disk:
        assert hosts.one_for_all([], recipe) == []
    else:
        with pytest.raises(Refused, match=f"{shard.name}.* differs|damaged"):
            hosts.one_for_all([], recipe)
    assert told == [False, not same_disk]


def test_what_ends_one_rank_is_told_where_all_meet(step, monkeypatch):
    """Another chip, a file that is gone, a refusal: none leaves the others waiting."""
    recipe = lowered("cluster.nodes=2").plan.recipe
    told = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda every, said: every.__setitem__(0, told.append(bool(said[0])) or said),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(Refused, match="compute capability"):
        hosts.one_for_all([], recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for error in (
        Refused((Problem("another dataset", key="data.path"),)),
        FileNotFoundError(2, "No such file", "train.bin"),
    ):
        monkeypatch.setattr(hosts, "on_disk", mock.Mock(side_effect=error))
        with pytest.raises(Refused, match=r"another dataset|train\.bin"):
            hosts.one_for_all([], recipe)
    assert told == [True, False, True, False, True]


def test_imported_weights_are_of_the_model_beside_them(step):
    """A run that began there has signed its own plan beside them, and may have saved nothing yet."""
    words = (f"schedule.save={step.parent}", "schedule.save_interval=2")
    checkpoint.sign(lowered(*words))
    step = step.rename(step.with_name("release"))
    checksums.bind_to(step, checksums.BOUND)
    signed(step)
    (step.parent / TRACKER).write_text("release")
    checkpoint.sign(lowered(*words, "optim.lr=0.5"))
    assert list(resume.foreign(step)) == []
    checkpoint.sign(lowered(*words, "model.vocab_size=512"))
    assert any("is of another model" in said and "vocab_size" in said for said in resume.foreign(step))


def test_a_plan_is_signed_whole_or_not_at_all(tmp_path):
    checkpoint.sign(lowered())  # saves nothing
    data = ("data=built", f"data.path={built(tmp_path / 'd', '1')}")
    lowering = lowered(f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=2", *data)
    checkpoint.sign(lowering, "within")
    assert {p.name for p in (tmp_path / "ckpt" / "within").iterdir()} == {"plan.json", "data.json", "origin.json"}
    signed = identity.stored(tmp_path / "ckpt" / "within" / "data.json")
    assert signed == {"train.bin": "1", "train.idx": "1"}


@pytest.mark.parametrize("failing", ["mkdir", "write_whole"])
def test_a_folder_that_cannot_be_written_is_about_the_key_that_names_it(tmp_path, monkeypatch, failing):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "mkdir") if failing == "mkdir" else (checkpoint, "write_whole")), full)
    with pytest.raises(Refused) as refused:
        checkpoint.sign(lowered(f"schedule.save={tmp_path}", "schedule.save_interval=2"))
    (problem,) = refused.value.problems
    assert (
        problem.key == "schedule.save" and problem.message == f"cannot write to `{tmp_path}`: No space left on device"
    )


def test_where_a_run_may_save(tmp_path):
    """Into its own folder, and into one that holds no run."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "other").mkdir()
    save = ("schedule.save_interval=2", f"schedule.save={tmp_path}/ckpt")

    def objections(*words: str) -> list[str | None]:
        return [p.key for p in resume.occupied(lowered(*save, *words))]

    assert objections() == []
    (tmp_path / "ckpt" / TRACKER).write_text("2")
    assert objections() == ["schedule.save"]
    assert objections(f"schedule.load={tmp_path}/ckpt") == [] == objections(f"schedule.load={tmp_path}/other/../ckpt")
    assert objections(f"schedule.load={tmp_path}/other") == ["schedule.save"]
    (tmp_path / "ckpt" / TRACKER).unlink()
    checkpoint.sign(lowered(*save))  # and killed before its first step
    assert objections("schedule.seed=7") == []
    (tmp_path / "ckpt" / "plan.json").write_text("my own plan")
    assert objections() == ["schedule.save"]  # it would be replaced
    for name in ("nam_export.json", "receipt.json", "integrity.json"):
        (tmp_path / "ckpt" / "plan.json").unlink(missing_ok=True)
        (tmp_path / "ckpt" / name).touch()
        assert objections() == ["schedule.save"]
        for key in ("tensorboard", "mlflow"):
            kept = [
                f"feature.tracking.{key}={place}{tmp_path}/ckpt" for place in ("", "file://")[: 1 + (key == "mlflow")]
            ]
            more = ("feature.tracking.mlflow_experiment=E",) if key == "mlflow" else ()
            assert all(objections(word, *more) == [f"feature.tracking.{key}", "schedule.save"] for word in kept)
        (tmp_path / "ckpt" / name).unlink()


def test_all_that_is_wrong_is_said_at_once(step):
    """Of what is loaded and of what is computed, and where it would be saved."""
    folder = step.parent
    (step / "common.pt").write_bytes(b"cut")
    other = folder.parent / "other"
    other.mkdir()
    (other / TRACKER).write_text("1")
    words = (f"schedule.load={folder}", f"schedule.save={other}", "schedule.save_interval=2")

    def said(**more) -> list[tuple[str | None, str]]:
        return [(p.key, p.message.split("`")[-1]) for p in checkpoint.objections(lowered(*words), **more)]

    spoilt = [("schedule.load", " is not what was saved: its checksum differs"), ("schedule.load", " is cut off")]
    taken = ("schedule.save", " holds the checkpoints of a run")
    unsigned = next(p for p in resume.another(folder, lowered(*words)))
    assert said() == [*spoilt, (unsigned.key, unsigned.message.split("`")[-1]), taken]
    (step / "__0_0.distcp").write_bytes((step / "__0_0.distcp").read_bytes()[::-1])
    assert len(said(thorough=False)) == 4 < len(said())
    checkpoint.sign(
        lowered(
            f"schedule.save={folder}", "schedule.save_interval=2", "schedule.train_steps=7", "schedule.decay_steps=7"
        )
    )
    found = {p.key: (p.message, p.hint) for p in resume.another(folder, lowered(*words))}
    steps = lowered().plan.recipe.schedule.train_steps
    assert found == {
        f"schedule.{name}_steps": (
            f"the checkpoint has `schedule.{name}_steps` 7, and the plan {steps}",
            f"{hint}; `schedule.changes=[schedule.{name}_steps]` makes it a next stage, saved elsewhere",
        )
        for name, hint in (
            ("train", "the order of the data depends on it; to end a command earlier, use `schedule.stop_every`"),
            ("decay", "go on with what was computed before"),
        )
    }


class Named:
    """What a pickle holds that calls something."""

    def __init__(self, *call: object):
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


def test_an_index_names_and_changes_nothing_of_ours(step):
    for spoilt, said in (
        (pickle.dumps(Named(print, "run")), "it names `builtins.print`, which has no place in an index"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'x'\nI1\nstb.", "Inert.__setstate__() missing"),
    ):
        (step / ".metadata").write_bytes(spoilt)
        signed(step)
        assert [text.startswith(f"its index `.metadata` cannot be read: {said}") for text in found(step)] == [True]


def test_an_index_that_another_python_wrote_is_read(step):
    """Python 3.13 moved its paths."""
    index = (step / ".metadata").read_bytes()
    assert b"pathlib" in index
    for name in ("PosixPath", "PurePosixPath"):
        for module in ("pathlib", "pathlib._local"):
            assert checkpoint.Index(io.BytesIO(b"")).find_class(module, name).__name__ == name


def test_checksums_come_before_whoever_waits_for_the_checkpoint(step, monkeypatch):
    """In the background they are the last thing that is done."""
    wrote, request = [], SimpleNamespace(finalize_fns=["first"])
    monkeypatch.setattr(mend, "write", wrote.append)
    save = mend._followed(lambda content, folder, **named: named["asked"], lambda words, named: words[1])
    assert save({}, str(step), asked=None) is None and wrote == [step]
    assert save({}, str(step), asked=request) is request and wrote == [step]
    first, last = request.finalize_fns
    assert last() is None and first == "first" and wrote == [step, step]


def test_a_rank_that_cannot_read_its_files_ends_all(step, monkeypatch):
    ranks = torch.distributed
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    monkeypatch.setattr(ranks, "get_world_size", lambda: 2)
    for rank in (0, 1):
        (step / checksums.NAME).unlink(missing_ok=True)
        other = {0: "__1_0.distcp: no", 1: {}}[rank]
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(
            ranks,
            "all_gather_object",
            lambda found, mine, r=rank, o=other: found.__setitem__(slice(None), [mine, o][:: 1 - 2 * r]),
        )
        if rank:
            checksums.write(step)  # rank 0 writes it
        else:
            with pytest.raises(OSError, match=r"no checksums of .*: __1_0\.distcp: no"):
                checksums.write(step)
        assert not (step / checksums.NAME).exists()
    monkeypatch.setattr(checksums, "digests", lambda folder, names: (_ for _ in ()).throw(OSError("unread")))
    with pytest.raises(OSError, match="unread"):
        checksums.write(step)


def test_checksums_are_on_the_disk_before_they_count(step, monkeypatch):
    order = []

    def synced(file):
        at = Path(os.readlink(f"/proc/self/fd/{file}"))
        order.append(at.name if at.is_dir() else list(json.loads(at.read_text())["files"].items()))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda old, new: order.append(new.name))
    checksums.put(step, {"b": "2", "a": "1"})
    assert order == [[("a", "1"), ("b", "2")], checksums.NAME, step.name]


def test_the_command_that_trusts_the_files(step, monkeypatch, capsys):
    def command(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["checksums", *words])
        try:
            assert checksums.command() == 0
        except Refused as refused:
            return refused.render()
        return capsys.readouterr().out

    assert f"`{step / checksums.NAME}` is there already\n\nhint: take it away" in command(str(step))
    assert command() == command("-h") == command("--help") == command("a", "b") == checksums.__doc__ + "\n"
    assert "is no checkpoint\n\nhint: the folder of one step" in command(str(step.parent))
    told = checksums.read(step)
    (step / checksums.NAME).unlink()
    assert command(str(step)) == f"{step / checksums.NAME}: {len(told)} files\n" and checksums.read(step) == told
    assert checksums.whole(step) == checksums.digest(step / checksums.NAME)
    (step / checksums.NAME).unlink()
    monkeypatch.setattr(checksums, "put", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert "No space left\n\nhint: its files must be readable" in command(str(step))


def test_each_object_of_a_shard_is_looked_at(tmp_path):
    """Several lie in one file, one after the other."""
    plain, hostile = io.BytesIO(), io.BytesIO()
    torch.save({"a": 1}, plain)
    torch.save(Named(print, "run"), hostile)
    path, length = tmp_path / "__0_0.distcp", len(plain.getvalue())
    path.write_bytes(plain.getvalue() + hostile.getvalue())
    assert checkpoint.unsafe(path, 0, length) is None
    assert "print" in checkpoint.unsafe(path, length, len(hostile.getvalue()))


def test_a_checkpoint_has_an_index(step):
    (step / ".metadata").unlink()
    signed(step)
    assert found(step) == ["`.metadata` is missing"]
