"""The whole life of a run, with a stand-in for the trainer: receipts, signals, kills, full disks, two launches at once."""

import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import inject
import pytest
import stand_in
from command import SERVER, _child
from ports import free_port

from launch.host import linux, patches
from launch.record import outcome, receipt, receipts
from launch.record.redact import Redactor
from launch.run import job, overlay
from launch.run.process import Process
from launch.run.run import changed, ended, installed
from nam_megatron import events
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.mends import SAID, Trainer
from nam_megatron.mends.series import MENDS, needed
from nam_megatron.recipe import load
from nam_megatron.words.tree import tree_hash

TERM = signal.SIGTERM


@dataclass
class Launcher:
    """A launcher in a process of its own, its output in files."""

    process: object
    root: Path
    folder: Path

    @classmethod
    def start(cls, root: Path, trainer: str, *overrides: str, port: int | None = None, **env: str) -> "Launcher":
        folder = root.parent / f"launcher{random.getrandbits(32)}"
        folder.mkdir()
        words = ("launch", str(root), trainer, f"port={port or free_port()}", *overrides)
        args = ("stand_in", words, str(root.parent), str(folder / "out"), str(folder / "err"), env)
        process = SERVER.Process(target=_child, args=args)
        process.start()
        return cls(process, root, folder)

    def wait(self) -> int:
        self.process.join(180)
        assert self.process.exitcode is not None, self.err
        return self.process.exitcode

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def receipt(self) -> dict:
        (folder,) = receipt.folders(self.root)
        return receipt.read(folder)


def appears(path: Path) -> None:
    """However busy the machine is: torchrun alone imports torch three times."""
    for _ in range(3600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def trainers(mark: str) -> list[int]:
    """Trainers whose command line holds `mark`, and which are no zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            if folder.name.isdecimal() and b"train" in words and mark.encode() in words and b"launch\0" not in words:
                found.append(int(folder.name))
    return found


def gone(mark: str) -> bool:
    return any(not trainers(mark) or time.sleep(0.05) for _ in range(200))


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "receipts"


def test_a_run_from_the_receipt_to_the_seal(root, tmp_path):
    (tmp_path / "diff").write_text("+token: hunter2-is-a-secret")
    secret = dict.fromkeys(("HF_TOKEN", "NCCL_IB_HCA"), "hunter2-is-a-secret")
    launcher = Launcher.start(root, "steps=5", STAND_IN_DIFF=str(tmp_path / "diff"), **secret)
    assert launcher.wait() == 0, launcher.err
    found = launcher.receipt
    assert (found["state"], found["outcome"]["end"], found["outcome"]["reason"]) == ("sealed", "completed", None)
    figures = found["outcome"]["figures"]
    assert (figures["window"]["first"], figures["window"]["last"], figures["window"]["median_ms"]) == (4, 5, 104.5)
    assert figures["window"]["tokens_per_s_per_gpu"] == round(4 * 128 / 0.1045, 1)
    for kind, gib in (("allocated", 2), ("reserved", 3)):
        ratio = found["outcome"]["against_forecast"][f"peak_{kind}_ratio"]
        assert ratio == round(gib / found["forecast"][f"peak_{kind}_gib"], 4)
    assert [gap["gib"] for gap in found["outcome"]["memory"]["gap"]] == [1.0, 0.001]
    (rank,) = found["outcome"]["ranks"]
    assert (rank["gpu"], rank["nics"], rank["nccl_agrees"]) == ("GPU0", ["mlx5_0 (PIX)"], None)
    assert found["job"]["command"][2:] == ["train", "steps=5"]
    assert {"host", "recipe", "source", "patches", "mends", "forecast", "findings"} <= found.keys()
    assert found["mends"] == {
        mend.name: mend.sha256 for mend in needed(translate(load("nam56r_smoke")).plan, Trainer.MEGATRON)
    }
    assert found["outcome"]["mends"] is None, "this trainer installs none and says so"
    (folder,) = receipt.folders(root)
    assert not (folder / receipt.RESERVE).exists()
    assert {(folder / name).stat().st_mode & 0o777 for name in (receipt.LOG, receipt.DIFF)} == {0o600}
    assert (folder / receipt.LOG).read_text().count(" consumed samples") == 5 == launcher.out.count(" consumed samples")
    everything = b"".join(f.read_bytes() for f in folder.iterdir() if f.is_file())
    assert b"hunter2" not in everything
    text = (folder / receipt.FILE).read_text()
    assert re.fullmatch("<set [0-9a-f]{8}>", found["environ"]["NCCL_IB_HCA"])
    assert socket.gethostname() not in text and str(root) not in text


@pytest.mark.slow
def test_a_receipt_says_which_data_it_was(root, tmp_path):
    """By its content, whatever the redaction leaves of names."""
    words = ["data=indexed", f"data.path={tmp_path}/a", f"data.tokenizer={tmp_path}/t"]
    tokens, ids = tmp_path / "t" / "tokenizer.json", b"\7\0" * 40
    tokens.parent.mkdir()
    tokens.write_text("{}")
    (tmp_path / "a.bin").write_bytes(ids)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 5)
    (tmp_path / "a.idx").write_bytes(head + struct.pack("<4i4q5q", *[10] * 4, 0, 20, 40, 60, *range(5)))
    launcher = Launcher.start(root, "steps=5", *words, "data.split='100,0,0'")
    assert launcher.wait() == 0, launcher.err
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["data"]
    assert found["name"] == "indexed" and {*found["files"]} == {"data.bin", "data.idx", "tokenizer.tokenizer.json"}
    assert found["files"]["data.bin"] == {"sha256": hashlib.sha256(ids).hexdigest()}


def test_the_mends_that_a_trainer_says_stood_are_in_its_outcome(tmp_path):
    """Names of the series and whole hashes alone, of its events: whoever prints such a line could print anything."""
    known = MENDS["step_rate"]
    (tmp_path / receipt.LOG).write_text(f"{SAID}fsdp={'b' * 64}\n")
    stood = {"step_rate": known.sha256, "hunter2": "a" * 64, "fsdp": "beef"}
    said_by(tmp_path, {"event": "mends", "stood": stood})
    came = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert came["mends"] == Redactor({}).tree(came)["mends"] == {"step_rate": known.sha256}


@pytest.mark.parametrize(("job", "every"), [({"trainer": "bridge", "log_interval": 10}, 10), ({"log_interval": 10}, 1)])
def test_bridges_first_line_is_of_as_many_steps_as_the_others(tmp_path, monkeypatch, job, every):
    monkeypatch.setattr(outcome.steps, "bad_put", lambda *_, every, wall: every)
    assert outcome.of_run(tmp_path, {"nonce": "mine", "job": job})["bad_put"] == every


def test_a_killed_launcher_is_lost_and_its_trainer_dies(root):
    mark = f"touch={root.parent}/running"
    launcher = Launcher.start(root, f"steps=50 sleep=0.2 {mark}")
    appears(root.parent / "running")
    assert receipt.seal_lost(root, outcome.of_run) == []  # it lives
    assert launcher.receipt["state"] == "open"
    launcher.signal(signal.SIGKILL)
    launcher.process.join()
    assert gone(mark)
    assert receipts.command([str(root)], {}) == 0
    found = launcher.receipt
    assert (found["state"], found["outcome"]["end"]) == ("sealed", "lost")
    assert found["outcome"]["figures"]["last_step"] >= 1
    assert receipt.seal_lost(root, outcome.of_run) == []


@pytest.mark.slow
def test_a_launcher_killed_in_its_checks_has_a_receipt(root):
    launcher = Launcher.start(root, "steps=5", STAND_IN_CHECKS="60")
    appears(Path(root).with_name("checking"))
    launcher.signal(signal.SIGKILL)
    launcher.process.join()
    second = Launcher.start(root, "steps=5")  # the next command seals it
    assert second.wait() == 0
    ends = [receipt.read(f)["outcome"]["end"] for f in receipt.folders(root)]
    assert sorted(ends) == ["completed", "lost"] and "lost its launcher" in second.err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fault",
    [
        *inject.drawn([inject.ROOT / "launch/run/run.py", inject.ROOT / "launch/record/receipt.py"], 20, seed=1),
        "storm",
        "40:read-only",
    ],
)
def test_no_fault_leaves_a_receipt_open_or_false(root, fault):
    _, bad = inject.tried(root, fault)
    assert bad is None


@pytest.mark.slow
def test_a_second_signal_in_the_checks_changes_nothing(root):
    launcher = Launcher.start(root, "steps=5", STAND_IN_CHECKS="60")
    appears(root.with_name("checking"))
    for _ in range(3):
        launcher.signal(TERM)
    assert launcher.wait() == 1
    assert launcher.receipt["outcome"]["reason"] == "SIGTERM before the training was started"


def test_a_signal_in_the_checks(root):
    launcher = Launcher.start(root, "steps=5", STAND_IN_CHECKS="60")
    appears(Path(root).with_name("checking"))
    launcher.signal(TERM)
    assert launcher.wait() == 1
    assert launcher.receipt["outcome"]["reason"] == "SIGTERM before the training was started"


@pytest.mark.slow
def test_sigterm_reaches_the_ranks_below_a_real_torchrun(root):
    mark = f"touch={root.parent}/running"
    launcher = Launcher.start(root, f"steps=500 sleep=0.1 {mark}", STAND_IN_RANKS="2")
    appears(root.parent / "running")  # each rank has said a step and listens
    appears(root.parent / "running1")
    launcher.signal(TERM)
    assert launcher.wait() == 1
    found = launcher.receipt["outcome"]
    assert (found["end"], found["signals"]) == ("interrupted", ["SIGTERM"])
    assert found["reason"] == "SIGTERM; torchrun ended with 0", launcher.out  # both ranks checkpointed and left
    assert found["bad_put"]["checkpoints"] >= 1 and found["memory"]["ranks"] == 2
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    assert gone(mark)


@pytest.mark.slow
def test_two_nodes_have_one_receipt(root, tmp_path):
    """Two real torchruns that meet, below an srun that starts both here and kills them when it is asked to end, as Slurm's does."""
    tasks = f"{tmp_path}/tasks"
    slurm = {
        "scontrol": "printf '127.0.0.1\\nlocalhost\\n'",
        "srun": 'while [[ $1 == --* ]]; do shift; done; "$@" & "$@" & '
        f'jobs -p > {tasks}; trap "kill -KILL $(jobs -p | xargs)" TERM; wait; wait',
        "scancel": f'[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat {tasks})',
    }
    for name, script in slurm.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    here = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    two = ("cluster=h200_2x8", "cluster.gpus_per_node=1")
    launcher = Launcher.start(root, f"steps=500 sleep=0.1 touch={root.parent}/running", *two, **here)
    appears(root.parent / "running")
    appears(root.parent / "running1")
    launcher.signal(TERM)
    assert launcher.wait() == 1
    found = launcher.receipt
    assert (found["job"]["nodes"], found["job"]["world"]) == (2, 2)
    assert found["outcome"]["end"] == "interrupted" and found["outcome"]["bad_put"]["checkpoints"], launcher.out
    assert [(r["rank"], r["node"]) for r in found["outcome"]["ranks"]] == [(0, 0), (1, 1)]


@pytest.mark.slow
def test_ranks_that_do_not_listen_are_killed_at_the_third_signal(root):
    mark = f"touch={root.parent}/running"
    launcher = Launcher.start(root, f"steps=500 sleep=0.1 deaf=1 {mark}")
    appears(root.parent / "running")
    for _ in range(3):
        launcher.signal(TERM)
        time.sleep(0.3)
    assert launcher.wait() == 1
    assert launcher.receipt["outcome"]["signals"] == ["SIGTERM"] * 3
    assert gone(mark)


def test_a_number_that_was_anothers_before_saves_no_rank(tmp_path, monkeypatch):
    """The next thousand numbers were those of processes that have ended since."""
    now = subprocess.Popen(["true"])
    now.wait()
    others = [linux.Process(pid, 1, ("x",)) for pid in range(now.pid, now.pid + 1000)]
    with monkeypatch.context() as before:
        before.setattr(linux, "processes", lambda **_: others)
        started = Process(["sh", "-c", "sleep 61.25 >&- & exit 0"], os.environ, tmp_path)
    assert started.wait() == 0
    assert not [p for p in linux.processes() if p.words == ("sleep", "61.25")]


def test_a_rank_that_outlives_its_torchrun_is_ended(root):
    launcher = Launcher.start(root, "steps=5 child=1")
    begin = time.monotonic()
    assert launcher.wait() == 0
    assert time.monotonic() - begin < 30 and "outlived torchrun" in launcher.err


@pytest.mark.slow
def test_two_launches_do_not_mix(root):
    port = free_port()
    mark = f"touch={root.parent}/running"
    # on when the second looks, however busy the machine
    first = Launcher.start(root, f"steps=5 sleep=1.5 {mark}", port=port)
    appears(root.parent / "running")
    second = Launcher.start(root, "steps=5", port=port)
    third = Launcher.start(root, "steps=5")
    assert second.wait() == 2 and f"another launch on this host has port {port}" in second.err
    assert (first.wait(), third.wait()) == (0, 0)
    folders = receipt.folders(root)
    assert len(folders) == 2
    for folder in folders:
        assert receipt.read(folder)["outcome"]["figures"]["steps"] == 5


OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def step(number: int) -> dict:
    return {
        "event": "step", "step": number, "of": 5, "ms": 845.1, "loss": 6.931472, "grad_norm": 1.234, "tflops": 301.2, "lr": 3e-4,
        "skipped": 0, "nan": 0, "gauges": {},
    }  # fmt: skip


def end(number: int | None, reason: str = "done", code: int = 0, **more) -> dict:
    return {"event": "end", "reason": reason, "code": code, "step": number, **more}


def said_by(folder: Path, *facts: dict, rank: int = 0, nonce: str = "mine", host: int | None = None) -> None:
    """Events of a rank, from its start."""
    record = events.Record()
    record.open(folder, nonce, rank, host)
    for fact in ({"event": "start", "world": 1}, *facts):
        record.say(**fact)
    record.close()


def ending(folder: Path, code: int, signals: list[str] = [], world: int = 1) -> tuple:  # noqa: B006
    job = {"train_steps": 5, "log_interval": 3, "stop_every": 4, "world": world, "tokens_per_step": 100}
    came = outcome.of_run(folder, {"nonce": "mine", "job": job})
    return tuple(ended(code, came, job, signals))


@pytest.mark.parametrize(
    ("said", "code", "signals", "expected"),
    [
        ([], 0, [], ("failed", 1, "torchrun ended with 0, but rank 0 did not say its end in `events.jsonl`")),
        ([end(None)], 0, [], ("interrupted", 1, "the trainer ended without saying at which step")),
        ([step(3), end(3)], 0, [], ("interrupted", 1, "the trainer ended at step 3 of 5")),
        *(([end(n)], 0, [], ("interrupted", 1, f"the trainer ended at step {n} of 5")) for n in (0, 2)),
        ([step(2), step(5), end(5)], 0, [], ("completed", 0, None)),
        ([step(2), step(5), end(5, "signal")], 0, ["SIGTERM"], ("completed", 0, "SIGTERM came too late to matter")),
        ([step(3), end(3, "signal")], 0, ["SIGTERM"], ("interrupted", 1, "SIGTERM; torchrun ended with 0")),
        ([step(3)], -15, ["SIGTERM"], ("interrupted", 1, "SIGTERM; torchrun ended with -15")),
        ([step(3), step(4), end(4, "planned stop")], 0, [], ("completed", 0, "stopped at step 4 of 5, as `schedule.stop_every` says")),
        # What log_interval=3 hides: the last line says 3, the trainer says where it was.
        ([step(3), end(4, "signal")], 0, ["SIGTERM"], ("completed", 0, "stopped at step 4 of 5, as `schedule.stop_every` says")),
        ([step(3), end(5)], 0, [], ("completed", 0, None)),
        ([step(2), step(5)], 0, [], ("failed", 1, "torchrun ended with 0, but rank 0 did not say its end in `events.jsonl`")),
        ([step(3), end(5, "error", 0, error="KeyError")], 0, [], ("failed", 1, "torchrun ended with 0, but a rank says: KeyError, rank 0")),
        ([step(3), end(5, "gave up", None)], 0, [], ("failed", 1, "torchrun ended with 0, but rank 0 ended without a code: gave up")),
        ([step(2), step(5), end(5)], 7, [], ("failed", 1, "torchrun ended with 7: no rank and no line of the log says why")),
        ([step(3), end(3, "out of memory", 1)], 1, [], ("failed", 1, "torchrun ended with 1: out of memory, rank 0")),
        ([end(3, "not a number", 1)], 1, [], ("failed", 1, "torchrun ended with 1: not a number, rank 0")),
        ([end(3, "error", 1, error="KeyError")], 1, [], ("failed", 1, "torchrun ended with 1: KeyError, rank 0")),
        ([end(3, "error", 1, error="hunter2")], 1, [], ("failed", 1, "torchrun ended with 1: an exception of another class, rank 0")),
        ([end(None, "refused", 2)], 1, [], ("refused", 2, "a refusal of the trainer's, rank 0")),
    ],
)  # fmt: skip
def test_how_it_ended(tmp_path, said, code, signals, expected):
    said_by(tmp_path, *said)
    assert ending(tmp_path, code, signals) == expected


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([step(2), step(5), end(5, "done", 1)], "a rank says: done with code 1, rank 0"),
        ([step(2), step(5), end(3, "error", 1), end(5)], "a rank says: an exception of another class, rank 0"),
        ([step(2), step(5), end(5), end(5, "error", 1)], "a rank says: an exception of another class, rank 0"),
        ([step(2), step(5), end(3, "exploded", 1), end(5)], "1 lines are missing from `events.jsonl`"),
        ([step(2), end(5)], "it ended at step 5, and the last line is of step 2"),
        ([step(2), step(5), step(6), end(5)], "it ended at step 5, and the last line is of step 6"),
        ([step(7), end(7)], "it ended at step 7, beyond the 5 of the plan"),
        ([step(2), step(5) | {"of": 9}, end(5)], "it trained for 9 steps, and the plan has 5"),
        ([step(2), step(5), {"event": "saving", "step": 5}, end(5)], "the checkpoint of step 5 was begun and not finished"),
        ([{"event": "loaded", "step": 5}, end(5)], None),
        ([*({"event": "loaded", "step": n} for n in (9, 2)), step(5), end(5)], "it ended at step 5, and the last line is of step 9"),
        ([step(1), step(5), end(5)], "no line is of a step between 1 and 5"),
        *(([step(n) for n in said] + [end(5)], f"one process said step {n} again, after a later one, or after its end")
          for n, said in ((2, (3, 2, 5)), (5, (3, 5, 5)))),
        ([step(3), end(5), step(5)], "one process said step 5 again, after a later one, or after its end"),
        ([step(2), step(5) | {"loss": "nan"}, end(5)], "the loss of step 5 is no number"),
        *(([step(2), step(5) | {"grad_norm": norm}, end(5)], "the gradient norm of step 5 is no number") for norm in ("nan", "inf")),
        ([step(2) | {"loss": None, "skipped": 2}, step(5) | {"grad_norm": None}, end(5)], None),  # fp16's first steps are skipped
        ([step(3) | {"loss": None}, step(5), end(5)], "step 3 has no loss, and was not skipped"),
        ([{"event": "loaded", "step": 1}, step(5), end(5)],
         "a process began with step 5, and no checkpoint of the steps before it was loaded"),
        ([step(n) | {"loss": None} for n in (2, 5)] + [end(5)], "no step has a loss: all were skipped, and nothing was trained"),
        ([step(n) | {"grad_norm": 0.0} for n in (2, 5)] + [end(5)], "every gradient is 0, and nothing was trained"),
        ([step(2) | {"grad_norm": 0.0}, step(5), end(5)], None),
        ([step(2), step(5), end(5, "done", None)], "rank 0 ended without a code: done"),
        ([step(2), step(5), *({"event": word, "step": 9} for word in ("saving", "saved")), end(5)],
         "it ended at step 5, and a checkpoint is of step 9"),
        ([step(2), step(5), *({"event": word, "step": 5} for word in ("saving", "saved", "saving", "scheduled")), end(5)],
         "the checkpoint of step 5 was begun and not finished"),
    ],
)  # fmt: skip
def test_what_says_something_against_itself_is_not_completed(tmp_path, said, reason):
    said_by(tmp_path, *said)
    assert ending(tmp_path, 0)[2] == (reason and f"torchrun ended with 0, but {reason}")


def test_a_step_of_a_process_that_never_began_is_of_no_run(tmp_path):
    said_by(tmp_path, step(2), step(5), end(5))
    file = tmp_path / events.FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, pid, number in zip(lines, (lines[0]["pid"], 9, 9, lines[0]["pid"]), (1, 1, 2, 2), strict=True):
        line |= {"pid": pid, "n": number}  # none is missing
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "step 2 was said by a process that had not said its start" in ending(tmp_path, 0)[2]


@pytest.mark.parametrize("other", [{"rank": 0}, {"pid": 9}])
def test_two_that_say_one_step_are_believed_neither(tmp_path, other):
    """It was completed, at the loss and the tokens/s of whoever said it last."""
    for rank, said in enumerate(([end(5)], [step(2), step(5), end(5)])):
        said_by(tmp_path, *said, rank=rank)
    file = tmp_path / events.FILE
    lines = [json.loads(line) | ({"world": 2} if "start" in line else {}) for line in file.read_text().splitlines()]
    ended_by = []
    for more in ([], [lines[3] | other | {"loss": 1.0, "n": 2}]):
        begins = [lines[2] | other] * ("pid" in other)
        at = 1 + 2 * ("pid" in other)
        file.write_text("".join(json.dumps(line) + "\n" for line in (*begins, *lines[:at], *more, *lines[at:])))
        ended_by.append(ending(tmp_path, 0, world=2))
    assert ended_by[0] == ("completed", 0, None)
    assert ended_by[1][2].endswith("step 2 was said by another process than the last rank's newest, which has the loss")


@pytest.mark.parametrize(("left", "code"), [("no room", 1), (None, 0), (16, 16)])
def test_a_rank_that_calls_exit_says_its_end(tmp_path, left, code):
    said_by(tmp_path)
    record = events.Record()
    record.open(tmp_path, "mine", 0)
    with pytest.raises(SystemExit), record.ending():
        sys.exit(left)
    found = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert (found["trainer_exit_code"], found["events"]["strange"]) == (code, 0)


TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE, message: x"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (OOM, "OutOfMemoryError, line 2 of the log, rank 0"),
        (TAKEN, "DistNetworkError (another process took the port after the checks: another port=), line 2 of the log"),
    ],
)
def test_a_rank_that_died_without_a_word_is_looked_for_in_the_log(tmp_path, line, reason):
    said_by(tmp_path, step(3))
    (tmp_path / receipt.LOG).write_text(f"x\n{line}\nlater.Error: y")
    assert ending(tmp_path, 1) == ("failed", 1, f"torchrun ended with 1: no rank says why; {reason}")


@pytest.mark.parametrize("what", ["source", "plan"])
def test_who_trained_with_other_code_or_another_plan_completed_no_run_of_this_receipt(tmp_path, what):
    """A checkout that was edited while the host was checked, a module of the folder around the run, a plan that was edited."""
    (tmp_path / "plan.json").write_text("{}")
    record = events.Record()
    record.start(tmp_path / "plan.json", {"NAM_MEGATRON_RUN": "mine"}, "megatron")
    for said in (step(2), step(5)):
        record.say(**said)
    record.done = 5
    record.end("done", 0)
    sums = {
        "source": tree_hash(Path(events.__file__).parents[1], "nam_megatron"),
        "plan": hashlib.sha256(b"{}").hexdigest(),
    }
    for of, reason in ((sums, None), (sums | {what: "0"}, f"a process had another {what} than this receipt tells of")):
        job = {"train_steps": 5, "log_interval": 3, "world": 1}
        told = {"job": job, "source": {"trees": {"nam_megatron": of["source"]}}, "plan": {"sha256": of["plan"]}}
        assert outcome.of_run(tmp_path, {"nonce": "mine", **told})["hole"] == reason


def test_code_that_was_edited_while_it_was_imported_is_no_code_of_this_receipt(tmp_path):
    """Torch alone takes seconds to import, and our modules come after it."""
    (tmp_path / "plan.json").write_text("{}")
    record = events.Record()
    record.start(tmp_path / "plan.json", {"NAM_MEGATRON_RUN": "mine"}, "megatron")
    sizes = dict.fromkeys(("allocated", "peak_allocated", "reserved", "peak_reserved"), 1)
    for said in ({"event": "built", "step": 0, **sizes, "source": "0"}, step(2), step(5)):
        record.say(**said)
    record.done = 5
    record.end("done", 0)
    trees = {"nam_megatron": tree_hash(Path(events.__file__).parents[1], "nam_megatron")}
    told = {"job": {"train_steps": 5, "log_interval": 3, "world": 1}, "source": {"trees": trees}}
    hole = outcome.of_run(tmp_path, {"nonce": "mine", **told})["hole"]
    assert hole == "a process had another source than this receipt tells of"


def test_nam_takes_no_module_from_the_folder_it_stands_in(monkeypatch):
    """`nam launch run` in a clone of Megatron-LM checked the installed one and trained the clone's."""
    lowering = translate(load("nam56r_smoke"))
    for program, value in ((True, "1"), (False, None)):
        monkeypatch.setattr("nam_megatron.process.PROGRAM", program)
        assert overlay.child({}, overlay.overlay(lowering, Path("/s"))).get("PYTHONSAFEPATH") == value


def test_all_ranks_have_to_end_and_the_one_that_failed_first_is_named(tmp_path):
    said_by(tmp_path, step(5), end(5))
    assert ending(tmp_path, 0, world=2)[2] == "torchrun ended with 0, but rank 1 did not say its end in `events.jsonl`"
    said_by(tmp_path, end(4), rank=1)
    assert ending(tmp_path, 0, world=2)[2].endswith("ranks ended at different steps, at 4 and 5")
    (alone := tmp_path / "alone").mkdir()
    for rank in (0, 1):
        said_by(alone, step(2), step(5), end(5), rank=rank)
    assert ending(alone, 0, world=2)[2].endswith("a rank is of a world of 1, and there are 2")
    beyond = tmp_path / "beyond"
    beyond.mkdir()
    for rank, said in enumerate(([end(5)], [end(5)], [step(2), step(5)])):
        said_by(beyond, *said, rank=rank)
    assert ending(beyond, 0, world=2)[2].endswith("there is no rank 2 in a world of 2")
    first, _, rest = (beyond / events.FILE).read_text().partition("\n")
    (beyond / events.FILE).write_text(f"{first}\n" + rest.replace('"start"', '"begin"'))
    assert ending(beyond, 0, world=2)[2].endswith("rank 1 did not say its start in `events.jsonl`")
    said_by(tmp_path, end(4, "error", 1, error="ValueError"), rank=1)
    said_by(tmp_path, end(4, "error", 1, error="KeyError"), rank=0)
    assert ending(tmp_path, 1, world=2)[2].endswith("ValueError, rank 1")
    hosts = tmp_path / "hosts"  # each with a file of its own, which are read in another order than they were written
    hosts.mkdir()
    for rank, error in ((1, "ValueError"), (0, "KeyError")):
        said_by(hosts, end(4, "error", 1, error=error), rank=rank, host=rank)
    assert ending(hosts, 1, world=2)[2].endswith("ValueError, rank 1")


def test_old_receipts_are_read_by_their_logs(tmp_path):
    """Of a launcher that was lost before there were events."""
    lines = [stand_in.step_line(3, 5), stand_in.reading("end", 3, 0), "  what:  x", OOM, "  exitcode  : 7 (pid: 17)"]
    (tmp_path / receipt.LOG).write_text("\n".join(lines))
    came = outcome.of_run(tmp_path, {"job": {"tokens_per_step": 100}})
    assert (came["last_step"], came["trainer_exit_code"], came["figures"]["steps"]) == (3, 7, 1)
    assert came["reason"] == "OutOfMemoryError, line 4 of the log, rank 0" and came["hole"] is None


# Whose word counts -------------------------------------------------------------------------------------------------------


def whole_run(root: Path, folder: Path) -> Path:
    """What another run has printed."""
    lines = [stand_in.step_line(n, 5, 1.0) for n in range(1, 6)] + [stand_in.reading("end", 5, 0)]
    (folder / "other.log").write_text("\n".join(lines))
    return folder / "other.log"


@pytest.mark.slow
def test_a_trainer_that_prints_another_runs_lines_has_completed_nothing(root, tmp_path):
    launcher = Launcher.start(root, "steps=5 stop=0 silent=1", STAND_IN_SAYS=str(whole_run(root, tmp_path)))
    assert launcher.wait() == 1
    found = launcher.receipt["outcome"]
    assert (found["end"], found["last_step"], found["figures"]["steps"]) == ("failed", None, 0)
    assert found["figures"]["window"] is None and "says nothing of this run" in found["reason"]


@pytest.mark.slow
def test_lines_of_another_run_change_no_figure(root, tmp_path):
    """Printed, and put into the file of the events: the nonce is the other run's."""
    launcher = Launcher.start(root, "steps=5", STAND_IN_SAYS=str(whole_run(root, tmp_path)))
    assert launcher.wait() == 0
    (folder,) = receipt.folders(root)
    came = outcome.of_run(folder, receipt.read(folder))
    said_by(folder, *(step(n) | {"ms": 1.0} for n in range(1, 6)), end(5), nonce="another")
    sealed = json.loads((folder / receipt.FILE).read_text())  # its reader refuses it now: the events have another hash
    again = outcome.of_run(folder, sealed)
    assert again["figures"] == came["figures"] == sealed["outcome"]["figures"]
    assert again["events"]["strange"] == 7 and again["hole"] is None and came["events"]["strange"] == 0


@pytest.mark.parametrize(
    "strange",
    [
        *({name: -1} for name in ("n", "pid", "rank", "step", "of", "world", "code")),
        *({"step": step} for step in (None, True, 2**53)),
        # Times that no clock has are an OverflowError and an OSError.
        *({name: it} for name, it in (("at", 1e99), ("at", 1e17), ("loss", True), ("loss", "12_3"), ("when", [1]))),
        {"event": "start", "world": 10**12},
        {"event": "start", "rank": 10**9, "world": 1},
    ],
    ids=str,
)
def test_what_no_trainer_of_ours_says_is_no_event(tmp_path, strange):
    said_by(tmp_path, step(1), step(2), end(2))
    path = tmp_path / events.FILE
    first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, json.dumps(json.loads(second) | strange) + "\n", *rest]))
    came = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert (came["events"]["strange"], came["figures"]["steps"], came["last_step"]) == (1, 1, 2)
    assert outcome.events.Newest(tmp_path, "mine").step().number == 2


@pytest.mark.slow
def test_events_that_do_not_fit_are_missed(root):
    """The disk is full from the third step on: the training goes on, and nobody says that the record is whole."""
    launcher = Launcher.start(root, "steps=5 full=3")
    assert launcher.wait() == 1
    assert "cannot be written" in launcher.out and "Traceback" not in launcher.out
    found = launcher.receipt["outcome"]
    assert found["end"] == "failed" and "did not say its end" in found["reason"] and found["figures"]["last_step"] == 2


def test_a_missing_line_is_a_hole(tmp_path):
    said_by(tmp_path, step(1), step(2), step(3), end(5))
    path = tmp_path / events.FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    assert ending(tmp_path, 0) == ("failed", 1, "torchrun ended with 0, but 1 lines are missing from `events.jsonl`")


def test_a_torn_line_costs_no_other(tmp_path):
    """A process that is killed, or a full disk, may leave half a line; the next one begins its own. The first is as long as one may be."""
    said_by(tmp_path, step(1) | {"of": 2**53 - 1, "more": "x" * 65_000})
    with open(tmp_path / events.FILE, "a") as file:
        file.write('\n{"run": "mine", "rank": 0, "n": 3, "at"')  # two that write at once leave an empty one
    came = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert (came["figures"]["last_step"], came["events"]["strange"], came["last_step"]) == (1, 1, None)
    said_by(tmp_path, step(5), end(5))  # started again
    came = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert (came["figures"]["last_step"], came["last_step"], came["hole"]) == (5, 5, None)
    assert came["events"] == {"ranks": 1, "ends": {"done": 1}, "missing": 0, "strange": 1, "again": 1}


def test_a_run_that_is_started_again_ends_by_its_last_start(tmp_path):
    said_by(tmp_path, step(1), end(5))
    said_by(tmp_path, step(2))
    assert ending(tmp_path, 0)[0] == "failed"
    lines = (tmp_path / events.FILE).read_text().splitlines()[:3]
    another = json.dumps(json.loads(lines[0]) | {"pid": 1})  # whose end is not the first one's
    (tmp_path / events.FILE).write_text("\n".join((lines[0], lines[1], another, lines[2])))
    assert "did not say its end" in ending(tmp_path, 0)[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_is_said(tmp_path, value):
    said_by(tmp_path, step(1), step(2) | {"loss": value, "nan": 1}, end(5))
    figures = outcome.of_run(tmp_path, {"nonce": "mine"})["figures"]
    assert (figures["loss_finite"], figures["nan_steps"], figures["grad_norm_finite"]) == (False, 1, True)


@pytest.mark.parametrize(
    "line",
    ["[]", "1", '"x"', "null", "{", "[" * 100000, '{"run": "mine"}', '{"run": "mine", "rank": [], "pid": 1, "n": 1, "at": 0, "event": "x"}',
     '{"run": "mine", "rank": 0, "pid": 1, "n": "1", "at": 0, "event": "end"}', '{"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 1e99}',
     '{"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 0, "event": "step", "step": 1, "of": 5, "gauges": 3}',
     '{"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 0, "event": "end", "reason": "error"}',
     '{"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 0, "event": "end", "reason": "error", "code": "x", "step": "y"}',
     '{"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 0, "event": "loaded", "step": 5, "more": "' + "x" * 65_536 + '"}',
     "\x00\x00", "\udcff"],
)  # fmt: skip
def test_no_line_stops_the_reader(tmp_path, line):
    said_by(tmp_path, step(5))
    with open(tmp_path / events.FILE, "a", errors="surrogateescape") as file:
        file.write(line + "\n")
    said_by(tmp_path, end(5))
    came = outcome.of_run(tmp_path, {"nonce": "mine"})
    assert came["events"]["strange"] >= 1 and came["last_step"] == 5 and came["hole"] is None


def test_the_newest_step_is_followed(tmp_path):
    """For the progress bar: whole lines, of this run."""
    newest = outcome.events.Newest(tmp_path, "mine")
    assert newest.step() is None
    said_by(tmp_path, step(1), step(2))
    said_by(tmp_path, step(9), nonce="another")
    os.mkfifo(tmp_path / "events.9.jsonl")
    found, line = newest.step(), outcome.steps.parse(stand_in.step_line(2, 5))
    assert found.number == 2 and newest.step() is None
    assert len(found.values) == 7 and found.values.items() <= line.values.items()  # as Megatron's line says them
    with open(tmp_path / events.FILE, "a") as file:
        file.write(json.dumps({"run": "mine", "rank": 0, "pid": 1, "n": 1, "at": 0.0} | step(3)))
    assert newest.step() is None
    said_by(tmp_path)
    assert newest.step().number == 3


def test_hosts_of_a_job_have_files_of_their_own(tmp_path):
    for host in ("0", "1"):
        record = events.Record()
        record.start(
            tmp_path / "plan.json",
            {"NAM_MEGATRON_RUN": "mine", "RANK": host, "WORLD_SIZE": "2", "GROUP_RANK": host, "GROUP_WORLD_SIZE": "2"},
            "megatron",
        )
        if host == "1":
            record.say(**step(3))
        record.done = 5
        record.end("done", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.0.jsonl", "events.1.jsonl"]
    assert ending(tmp_path, 0, world=2) == ("completed", 0, None)


@pytest.mark.parametrize("month", [3, 10])
def test_an_hour_that_a_country_takes_or_gives_is_none_of_a_run(tmp_path, monkeypatch, month):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    turned = datetime(2026, month, {3: 29, 10: 25}[month], 1, tzinfo=UTC).timestamp()
    said_by(tmp_path, *({"event": "step", **step(n), "ms": 1000.0} for n in (1, 2)))
    file = tmp_path / events.FILE
    begun = {"run": "mine", "rank": None, "pid": 1, "n": 1, "at": turned - 5, "event": "launched"}
    lines = [begun, *map(json.loads, file.read_text().splitlines())]
    for n, line in enumerate(lines):
        line["at"] = turned - 5 + 3 * n
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        assert outcome.of_run(tmp_path, {"nonce": "mine"})["bad_put"]["until_first_step_s"] == 5.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "end"), [("steps=2", "completed"), ("steps=2 spoil={}", "failed")])
def test_data_that_changes_under_a_run_is_not_what_its_receipt_tells_of(root, trainer, end):
    """Swapped between the checks and the trainer, or written over in place while it is read."""
    data = root.parent / "set.bin"
    for path in (data, data.with_suffix(".idx")):
        path.write_bytes(b"x")
    words = ("data=indexed", f"data.path={data.with_suffix('')}", f"data.tokenizer={root.parent}")
    launcher = Launcher.start(root, trainer.format(data), *words)
    assert launcher.wait() == (end == "failed"), launcher.err
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["outcome"]
    assert (found["end"], "the data is no longer" in str(found["reason"])) == (end, end == "failed")


def test_data_that_cannot_be_read_any_more_is_not_what_it_was(monkeypatch):
    monkeypatch.setattr(job, "data", lambda _: raise_if([Problem("it is gone")]))
    assert changed(None, {"patches": installed(), "data": {}}) == "the data"


def test_a_megatron_that_is_exchanged_under_a_run_is_not_what_its_receipt_tells_of(monkeypatch):
    monkeypatch.setattr(job, "data", lambda _: {})
    before = {"patches": installed(), "data": {}}
    assert changed(None, before) is None
    monkeypatch.setattr(patches.Queue, "tree", lambda *_: "0" * 40)
    assert changed(None, before) == "the installed Megatron"


def test_a_fork_of_a_rank_says_nothing(tmp_path):
    record = events.Record()
    record.open(tmp_path, "mine", 0)
    if not (child := os.fork()):
        record.say("step", step=1)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / events.FILE).read_text() == ""


def limited(bytes_: int, trainer: str, root: Path) -> subprocess.CompletedProcess:
    """A launcher that may write no file longer than that, which fails as a full disk does."""
    command = [sys.executable, stand_in.__file__, "launch", str(root), trainer, f"port={free_port()}"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))

    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=600, check=False)


def in_a_shell(root: Path, trainer: str, before=lambda: None, **env: str) -> subprocess.CompletedProcess:
    """The launcher as a program of its own; `before()` in it first."""
    command = [sys.executable, stand_in.__file__, "launch", str(root), trainer, f"port={free_port()}"]
    return subprocess.run(
        command, preexec_fn=before, env=os.environ | env, capture_output=True, timeout=600, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_caller_ignores_ends_nothing(root, number):
    """`nohup python -m launch run`, and a job in the background of a shell that gets a Ctrl-C."""
    trainer = f"steps=5 sleep=0.2 touch={root.parent}/running"
    command = [sys.executable, stand_in.__file__, "launch", str(root), trainer, f"port={free_port()}"]
    ignored = lambda: signal.signal(number, signal.SIG_IGN)  # noqa: E731
    launcher = subprocess.Popen(
        command, preexec_fn=ignored, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    appears(root.parent / "running")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=600)
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["outcome"]
    assert (launcher.returncode, found["end"], found["signals"]) == (0, "completed", []), said


@pytest.mark.slow
def test_names_that_a_terminal_cannot_write_end_nothing(root):
    done = in_a_shell(root, "steps=5 say=Größe", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"Gr\\xf6\\xdfe" in done.stdout
    (folder,) = receipt.folders(root)
    assert "Größe" in (folder / receipt.LOG).read_text(encoding="utf-8")


def test_a_line_that_does_not_end_is_cut_and_nothing_is_said_twice(tmp_path):
    words = [sys.executable, "-uc", "[print(i, end=' ') for i in range(50_000)]; print('end')"]
    with Process(words, os.environ, tmp_path) as process:
        said = [line for lines in process.lines() for line in lines]
        assert process.wait() == 0
    assert "".join(said) == "".join(f"{i} " for i in range(50_000)) + "end" and len(said) > 2


@pytest.mark.parametrize("just", [False, True], ids=["before", "just before"])
def test_what_the_launcher_had_started_before_goes_on(tmp_path, monkeypatch, just):
    """just: the kernel has not yet given it its command line."""
    with subprocess.Popen(["sleep", "600"]) as other:
        line, read = linux.PROC / str(other.pid) / "cmdline", linux.text
        with monkeypatch.context() as patched:
            patched.setattr(linux, "text", lambda path: "" if just and path == line else read(path))
            process = Process(["true"], os.environ, tmp_path)
        with process:
            assert process.wait() == 0
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        other.kill()


@pytest.mark.slow
def test_a_chatty_trainer_is_not_held_up(root):
    """By the processor time of a launch without its noise, which tells how fast the machine is: 4 times that, and 15 times once."""

    def spent(trainer: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = in_a_shell(root, trainer)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(b"x" * 127 + b"\n") == (64 * 8192 if "chat" in trainer else 0)
        return sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime"))

    silent = spent("steps=5")
    assert spent("steps=5 chat=64") < 8 * silent
    *_, folder = receipt.folders(root)
    assert (folder / receipt.LOG).stat().st_size > 64 << 20


@pytest.mark.slow
def test_a_log_that_cannot_be_written_stops_the_run_and_is_said(root):
    done = limited(5 << 20, "steps=100000 sleep=0.00001", root)
    assert done.returncode == 1 and "File too large" in done.stderr and "Traceback" not in done.stderr
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["outcome"]
    assert found["end"] == "failed" and "File too large" in found["reason"] and found["figures"]["last_step"] > 1000


@pytest.mark.parametrize("key", ["receipts", "scratch"])
def test_no_run_writes_into_an_export(root, key):
    export = root.parent if key == "receipts" else root / "scratch"
    export.mkdir(parents=True, exist_ok=True)
    (export / "nam_export.json").touch()
    launcher = Launcher.start(root, "steps=3")
    assert launcher.wait() == 2 and f"`{export}` is an export" in launcher.err
    assert f"@ cluster.storage.{key}" in launcher.err
    assert [*root.rglob("*")] == ([] if key == "receipts" else [export, export / "nam_export.json"])


def test_what_the_log_has_no_room_for_is_shown_without_secrets(root, tmp_path, monkeypatch):
    """The terminal is a scheduler's file, and CI's page."""
    secret = "hunter2-is-a-secret"
    (tmp_path / "says").write_text("".join(f"{'x' * 1000} {n}\n" for n in range(6000)) + f"the key is {secret}\n" * 3)
    monkeypatch.setenv("STAND_IN_SAYS", str(tmp_path / "says"))
    monkeypatch.setenv("MY_TOKEN", secret)
    done = limited(5 << 20, "steps=3", root)
    assert "File too large" in done.stderr and "the key is" in done.stdout and secret not in done.stdout + done.stderr
    (folder,) = receipt.folders(root)
    assert "the key is" not in (folder / receipt.LOG).read_text()


@pytest.mark.slow
def test_no_room_for_a_receipt_starts_nothing(root):
    done = limited(1 << 20, f"steps=5 touch={root.parent}/running", root)
    assert done.returncode == 2 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert receipt.folders(root) == [] and not (root.parent / "running").exists()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_receipts_whole(root):
    """Open, record and seal in a loop, killed at a random moment: what lies there is whole, and what was open is sealed as lost."""
    chance = random.Random(5)
    for _ in range(25):
        before = len(receipt.folders(root))
        child = os.fork()
        if not child:
            try:
                while True:
                    opened = receipt.open_receipt(root, "x", {"job": {"n": "x" * 20000}}, Redactor({}))
                    opened.record(more=[1, 2, 3])
                    opened.seal("completed", {})
            finally:
                os._exit(0)
        while len(receipt.folders(root)) < before + 2:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    folders = receipt.folders(root)
    unsealed = [f for f in folders if receipt.read(f)["state"] == "open"]
    assert len(folders) > len(unsealed) > 0
    assert sorted(receipt.seal_lost(root, outcome.of_run)) == [f.name for f in unsealed]
    ends = {receipt.read(f)["outcome"]["end"] for f in folders}
    assert ends == {"completed", "lost"} and not list(root.glob(f"*/{receipt.RESERVE}"))[len(unsealed) :]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"schema": 1}', "\x00", "[" * 100000, '{"schema": "nam_megatron.receipt/1"}']
)
def test_what_is_no_receipt_is_refused(tmp_path, text):
    (tmp_path / receipt.FILE).write_text(text)
    with pytest.raises(Refused):
        receipt.read(tmp_path)
    assert receipt.seal_lost(tmp_path.parent, outcome.of_run) == []
