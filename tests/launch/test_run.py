"""The whole life of a run, with a stand-in for the trainer: receipts, signals, kills, full disks, two launches at once."""

import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import stand_in
from command import SERVER, _child

from launch import outcome, receipt, receipts
from launch.redact import Redactor
from launch.run import ended
from nam_megatron.errors import Refused

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def test_a_run_from_the_receipt_to_the_seal(root):
    launcher = Launcher.start(root, "steps=5", HF_TOKEN="hunter2-is-a-secret", NCCL_IB_HCA="hunter2-is-a-secret")
    assert launcher.wait() == 0, launcher.err
    found = launcher.receipt
    assert (found["state"], found["outcome"]["end"], found["outcome"]["reason"]) == ("sealed", "completed", None)
    figures = found["outcome"]["figures"]
    assert (figures["window"]["first"], figures["window"]["last"], figures["window"]["median_ms"]) == (4, 5, 104.5)
    assert figures["window"]["tokens_per_s_per_gpu"] == round(4 * 128 / 0.1045, 1)
    assert found["outcome"]["against_forecast"]["peak_allocated_ratio"] == round(
        2 / found["forecast"]["peak_allocated_gib"], 4
    )
    assert [gap["gib"] for gap in found["outcome"]["memory"]["gap"]] == [1.0, 0.001]
    (rank,) = found["outcome"]["ranks"]
    assert (rank["gpu"], rank["nics"], rank["nccl_agrees"]) == ("GPU0", ["mlx5_0 (PIX)"], None)
    assert found["job"]["command"][2:] == ["train", "steps=5"]
    assert {"host", "recipe", "source", "patches", "forecast", "findings"} <= found.keys()
    (folder,) = receipt.folders(root)
    assert not (folder / receipt.RESERVE).exists()
    assert (folder / receipt.LOG).read_text().count(" consumed samples") == 5 == launcher.out.count(" consumed samples")
    everything = b"".join(f.read_bytes() for f in folder.iterdir() if f.is_file() and f.name != receipt.DIFF)
    assert b"hunter2" not in everything
    text = (folder / receipt.FILE).read_text()
    assert re.fullmatch("<set [0-9a-f]{8}>", found["environ"]["NCCL_IB_HCA"])
    assert socket.gethostname() not in text and str(root) not in text


def test_a_killed_launcher_is_lost_and_its_trainer_dies(root):
    mark = f"touch={root.parent}/running"
    launcher = Launcher.start(root, f"steps=50 sleep=0.2 {mark}")
    appears(root.parent / "running")
    assert receipt.seal_lost(root, outcome.of_log) == []  # it lives
    assert launcher.receipt["state"] == "open"
    launcher.signal(signal.SIGKILL)
    launcher.process.join()
    assert gone(mark)
    assert receipts.command([str(root)], {}) == 0
    found = launcher.receipt
    assert (found["state"], found["outcome"]["end"]) == ("sealed", "lost")
    assert found["outcome"]["figures"]["last_step"] >= 1
    assert receipt.seal_lost(root, outcome.of_log) == []


def test_a_launcher_killed_in_its_checks_has_a_receipt(root):
    launcher = Launcher.start(root, "steps=5", STAND_IN_CHECKS="60")
    appears(root / "checking")
    launcher.signal(signal.SIGKILL)
    launcher.process.join()
    second = Launcher.start(root, "steps=5")  # the next command seals it
    assert second.wait() == 0
    ends = [receipt.read(f)["outcome"]["end"] for f in receipt.folders(root)]
    assert sorted(ends) == ["completed", "lost"] and "lost its launcher" in second.err


def test_a_signal_in_the_checks(root):
    launcher = Launcher.start(root, "steps=5", STAND_IN_CHECKS="60")
    appears(root / "checking")
    launcher.signal(TERM)
    assert launcher.wait() == 1
    assert launcher.receipt["outcome"]["reason"] == "SIGTERM before the training was started"


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


def test_two_nodes_have_one_receipt(root, tmp_path):
    """Two real torchruns that meet, below an srun that starts both here and hands signals on, as Slurm's does."""
    started = (
        'while [[ $1 == --* ]]; do shift; done; "$@" & "$@" & trap "kill -TERM $(jobs -p | xargs)" TERM; wait; wait'
    )
    slurm = {"scontrol": "printf '127.0.0.1\\nlocalhost\\n'", "srun": started}
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


def test_a_rank_that_outlives_its_torchrun_is_ended(root):
    launcher = Launcher.start(root, "steps=5 child=1")
    begin = time.monotonic()
    assert launcher.wait() == 0
    assert time.monotonic() - begin < 30 and "outlived torchrun" in launcher.err


def test_two_launches_do_not_mix(root):
    port = free_port()
    mark = f"touch={root.parent}/running"
    first = Launcher.start(
        root, f"steps=5 sleep=1.5 {mark}", port=port
    )  # on when the second looks, however busy the machine
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


def end(step: int) -> str:
    return stand_in.reading("end", step, 0)


@pytest.mark.parametrize(
    ("said", "code", "signals", "expected"),
    [
        ([], 0, [], ("interrupted", 1, "the trainer ended without saying at which step")),
        ([3, end(3)], 0, [], ("interrupted", 1, "the trainer ended at step 3 of 5")),
        ([5, end(5)], 0, [], ("completed", 0, None)),
        ([5, end(5)], 0, ["SIGTERM"], ("completed", 0, "SIGTERM came too late to matter")),
        ([3, end(3)], 0, ["SIGTERM"], ("interrupted", 1, "SIGTERM; torchrun ended with 0")),
        ([3], -15, ["SIGTERM"], ("interrupted", 1, "SIGTERM; torchrun ended with -15")),
        ([4, end(4)], 0, [], ("completed", 0, "stopped at step 4 of 5, as `schedule.stop_every` says")),
        # What log_interval=3 hides: the last line says 3, the trainer says where it was.
        ([3, end(4)], 0, ["SIGTERM"], ("completed", 0, "stopped at step 4 of 5, as `schedule.stop_every` says")),
        ([3, end(3)], 0, ["SIGTERM"], ("interrupted", 1, "SIGTERM; torchrun ended with 0")),
        ([3, end(5)], 0, [], ("completed", 0, None)),
        ([5, end(5), end(4)], 0, [], ("completed", 0, "stopped at step 4 of 5, as `schedule.stop_every` says")),
        ([5], 0, [], ("interrupted", 1, "the trainer ended without saying at which step")),
        ([5, end(5)], 7, [], ("failed", 1, "torchrun ended with 7: the log does not say why")),
        (
            [3, "  what:  x", OOM, "later.Error: y"], 1, [],
            ("failed", 1, "torchrun ended with 1: OutOfMemoryError, line 3 of the log, rank 0"),
        ),
        (
            ["error: no checkpoint in `x`", "  exitcode  : 2 (pid: 17)"], 1, [],
            ("refused", 2, "a refusal of the trainer's, line 1 of the log"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("log_interval", [1, 3])
def test_how_it_ended(tmp_path, said, code, signals, expected, log_interval):
    lines = [stand_in.step_line(word, 5) if isinstance(word, int) else word for word in said]
    (tmp_path / receipt.LOG).write_text("\n".join(lines))
    job = {"train_steps": 5, "log_interval": log_interval, "stop_every": 4}
    assert ended(code, outcome.of_log(tmp_path, {}), job, signals) == expected


def limited(bytes_: int, trainer: str, root: Path) -> subprocess.CompletedProcess:
    """A launcher that may write no file longer than that, which fails as a full disk does."""
    command = [sys.executable, stand_in.__file__, "launch", str(root), trainer, f"port={free_port()}"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))

    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)


def in_a_shell(root: Path, trainer: str, before=lambda: None, **env: str) -> subprocess.CompletedProcess:
    """The launcher as a program of its own; `before()` in it first."""
    command = [sys.executable, stand_in.__file__, "launch", str(root), trainer, f"port={free_port()}"]
    return subprocess.run(
        command, preexec_fn=before, env=os.environ | env, capture_output=True, timeout=120, check=False
    )


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
    _, said = launcher.communicate(timeout=60)
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["outcome"]
    assert (launcher.returncode, found["end"], found["signals"]) == (0, "completed", []), said


def test_names_that_a_terminal_cannot_write_end_nothing(root):
    done = in_a_shell(root, "steps=5 say=Größe", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"Gr\\xf6\\xdfe" in done.stdout
    (folder,) = receipt.folders(root)
    assert "Größe" in (folder / receipt.LOG).read_text(encoding="utf-8")


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


def test_a_log_that_cannot_be_written_stops_the_run_and_is_said(root):
    done = limited(5 << 20, "steps=100000 sleep=0.00001", root)
    assert done.returncode == 1 and "the disk is full" in done.stderr and "Traceback" not in done.stderr
    (folder,) = receipt.folders(root)
    found = receipt.read(folder)["outcome"]
    assert found["end"] == "failed" and "the disk is full" in found["reason"] and found["figures"]["last_step"] > 1000


def test_no_room_for_a_receipt_starts_nothing(root):
    done = limited(1 << 20, f"steps=5 touch={root.parent}/running", root)
    assert done.returncode == 2 and "the disk is full" in done.stderr and "Traceback" not in done.stderr
    assert receipt.folders(root) == [] and not (root.parent / "running").exists()


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
    assert sorted(receipt.seal_lost(root, outcome.of_log)) == [f.name for f in unsealed]
    ends = {receipt.read(f)["outcome"]["end"] for f in folders}
    assert ends == {"completed", "lost"} and not list(root.glob(f"*/{receipt.RESERVE}"))[len(unsealed) :]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"schema": 1}', "\x00", "[" * 100000, '{"schema": "nam_megatron.receipt/1"}']
)
def test_what_is_no_receipt_is_refused(tmp_path, text):
    (tmp_path / receipt.FILE).write_text(text)
    with pytest.raises(Refused):
        receipt.read(tmp_path)
    assert receipt.seal_lost(tmp_path.parent, outcome.of_log) == []
