"""Hostile and damaged checkpoints: every one ends as findings, none is trained, none runs its code."""

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import run, signed, trained

from nam_megatron.runtime import checkpoint, checksums

TRACKER = "latest_checkpointed_iteration.txt"
FOUR = ("schedule.train_steps=4", "schedule.decay_steps=4", "schedule.save_interval=2")
MUTATIONS = 300


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint that two ranks wrote."""
    folder = tmp_path_factory.mktemp("saved")
    trained(run(folder, *FOUR, f"schedule.save={folder}/ckpt", "cluster=h200_2", world=2))
    return folder / "ckpt"


@pytest.fixture
def step(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "ckpt")
    return tmp_path / "ckpt" / "iter_0000004"


def found(step: Path, **words) -> list[str]:
    return [p.message for p in checkpoint.damage(step.parent, **words)]


def test_each_file_that_was_saved_has_its_checksum(step):
    told = checksums.read(step)
    assert {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"} <= told.keys()
    assert told == checksums.digests(step, checksums.names(step))
    assert found(step) == []


def test_what_a_broken_save_left_is_not_among_what_is_hashed(step):
    """A kill before the file of checksums has its name: the next save takes that name away."""
    (step / f".{checksums.NAME}.7.part").write_text("{")
    signed(step)
    assert found(step) == []


def test_megatron_reads_the_same_file(step):
    """Its `--verify-integrity` is a second reader."""
    from megatron.core.dist_checkpointing import validation

    assert validation.INTEGRITY_FNAME == checksums.NAME
    validation._verify_integrity_manifest_impl(str(step))


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_inverted_bytes_of_a_shard_are_not_trained(step, tmp_path, name):
    data = bytearray((step / name).read_bytes())
    data[8192:12288] = bytes(b ^ 0xFF for b in data[8192:12288])
    (step / name).write_bytes(data)
    ranks = run(
        tmp_path, *FOUR, f"schedule.load={step.parent}", f"schedule.save={step.parent}", "cluster=h200_2", world=2
    )
    assert ranks[0].code == 2
    assert f"`{name}` is not what was saved: its checksum differs" in ranks[0].err
    assert "iteration" not in ranks[0].out + ranks[1].out


@pytest.mark.slow
def test_every_mutation_of_the_index_is_a_finding(step):
    """Its checksums made anew, so that the index itself is what is judged: a finding or a sound index, never an exception."""
    path, rng, refused = step / ".metadata", random.Random(17), 0
    data = path.read_bytes()
    for _ in range(MUTATIONS):
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 32))):
            match rng.randrange(3):
                case 0:
                    made[rng.randrange(len(made))] = rng.randrange(256)
                case 1:
                    del made[(at := rng.randrange(len(made))) : at + rng.randrange(1, 64)]
                case 2:
                    made[(at := rng.randrange(len(made))) : at] = rng.randbytes(rng.randrange(1, 64))
        path.write_bytes(made)
        assert any("`.metadata` is not what was saved" in text for text in found(step, thorough=False))
        signed(step)
        refused += bool(found(step, thorough=False))
    assert refused > MUTATIONS // 2


class Code:
    """A pickle that runs a command."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("where", ["alone", "in an index", "in a shard"])
def test_a_crafted_checkpoint_runs_no_code(step, tmp_path, where):
    marker = tmp_path / "ran"
    path = step / ".metadata"
    index = pickle.loads(path.read_bytes())
    if where == "alone":
        path.write_bytes(pickle.dumps(Code(marker)))
    elif where == "in an index":
        index.storage_meta = Code(marker)
        path.write_bytes(pickle.dumps(index))
    else:
        key, info = next((k, i) for k, i in index.storage_data.items() if "rng_state" in k.fqn)
        shard = step / info.relative_path
        size = shard.stat().st_size
        with open(shard, "ab") as file:
            torch.save([Code(marker)], file)
        index.storage_data[key].offset, index.storage_data[key].length = size, shard.stat().st_size - size
        path.write_bytes(pickle.dumps(index))
    signed(step)
    said = found(step)
    assert len(said) == 1 and re.search(r"posix\.system|os\.system|has no place in an index", said[0])
    assert not marker.exists()


@pytest.mark.parametrize(
    "call", ["os.system", "builtins.eval", "torch.load", "torch.hub.load", "pickle.loads", "nam_megatron.train.main"]
)
def test_an_index_may_name_nothing_but_its_own_parts(step, call):
    module, _, name = call.rpartition(".")
    (step / ".metadata").write_bytes(f"c{module}\n{name}\n(S'true'\ntR.".encode())
    signed(step)
    assert [text for text in found(step) if "has no place in an index" in text]


def test_an_index_changes_no_class(step):
    """BUILD with a pair of states sets attributes, and of a class too."""
    head = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (step / ".metadata").write_bytes(head + b"(N(dS'storage_data'\nI1\nstb.")
    signed(step)
    assert len(found(step)) == 1


@pytest.mark.parametrize("name", ["../../plan.json", "/etc/hostname", ".."])
def test_an_index_names_files_of_its_own_checkpoint_only(step, name):
    index = pickle.loads((step / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = name
    (step / ".metadata").write_bytes(pickle.dumps(index))
    signed(step)
    assert "which is no file of this checkpoint" in found(step)[0]


MANIFESTS = (
    "",
    "null",
    "[]",
    "{}",
    "[" * 100_000,
    '{"algorithm": "md5", "files": {}}',
    '{"algorithm": "sha256", "files": 3}',
)
MANIFESTS += ('{"algorithm": "sha256", "files": {"../../plan.json": "%s"}}' % ("0" * 64),)
MANIFESTS += (
    '{"algorithm": "sha256", "files": {".metadata": "00"}}',
    '{"algorithm": "sha256", "files": {}}',
    "\x00",
    '{"a": NaN',
)


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_is_none_is_a_finding(step, text):
    (step / checksums.NAME).write_text(text)
    assert found(step)


@pytest.mark.parametrize("spoil", ["missing", "folder", "no rights", "binary"])
def test_a_tracker_that_cannot_be_read_is_a_finding(step, spoil):
    tracker = step.parent / TRACKER
    tracker.unlink()
    if spoil == "folder":
        tracker.mkdir()
    elif spoil == "binary":
        tracker.write_bytes(b"\xff\xfe\x00" * 40)
    elif spoil == "no rights":
        tracker.symlink_to(tracker)
    assert len(found(step)) == 1


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__1_0.distcp", checksums.NAME])
@pytest.mark.parametrize("spoil", ["gone", "empty", "longer"])
def test_a_file_that_is_not_as_it_was_saved_is_a_finding(step, name, spoil):
    path = step / name
    data = path.read_bytes()
    path.unlink()
    if spoil != "gone":
        path.write_bytes(b"" if spoil == "empty" else data + b"x")
    assert any(name in text for text in found(step))


@pytest.mark.slow
def test_a_checkpoint_without_checksums_gets_them_from_whoever_trusts_it(step):
    (step / checksums.NAME).unlink()
    (said,) = found(step)
    command = re.search(r"`python -m (\S+) (\S+)`", said)
    for code in (0, 2):  # the second time they are there
        done = subprocess.run([sys.executable, "-m", *command.groups()], capture_output=True, text=True, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr
    assert found(step) == []
    assert json.loads((step / checksums.NAME).read_text())["files"] == checksums.read(step)
