"""Runs under a real Slurm of two hosts on this machine (tests/slurm.py): CPU ranks, a declared diagnostic."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from ports import free_port

from launch.record import outcome, receipt, receipts
from nam_megatron.tracker import TRACKER

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(slurm.lacking() is not None, reason=f"no Slurm: {slurm.lacking()}")
SMALL = (
    "conf=nam56r_smoke", "cluster=cpu", "cluster.nodes=2", "schedule.global_batch_size=4", "diagnostic=under Slurm",
)  # fmt: skip


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    made = slurm.Scheduler(tmp_path_factory.mktemp("slurm") / "pair")
    try:
        made.up()
        yield made
    finally:
        made.down()


class Job:
    """A script of `launch show format=sbatch`, submitted."""

    def __init__(self, scheduler: slurm.Scheduler, at: Path, *words: str, options: tuple[str, ...] = ()):
        self.scheduler, self.at, self.receipts = scheduler, at, at / "receipts"
        path = f"{Path(sys.executable).parent}:{scheduler.environ['PATH']}"
        self.environ = {"PATH": path, "PYTHONPATH": str(ROOT)}
        port = free_port()
        words = (
            *SMALL, f"cluster.storage.receipts={self.receipts}", f"cluster.storage.scratch={at}/scratch", f"port={port}", *words,
        )  # fmt: skip
        show = [sys.executable, "-m", "launch", "show", "format=sbatch", *words]
        script = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "--gpus-per-node" not in script
        (at / "job.sh").write_text(script)
        self.out = at / "out.txt"
        said = scheduler.ask(
            "sbatch", f"--output={self.out}", "--open-mode=append", *options, str(at / "job.sh"),
            environ=self.environ, cwd=at,
        )  # fmt: skip
        self.number = re.search(r"\d+", said)[0]

    @property
    def state(self) -> str:
        return self.scheduler.job(self.number)["JobState"]

    def until(self, *states: str) -> None:
        self.scheduler.wait(lambda: self.state in states)

    def training(self, steps: int = 1) -> None:
        """Until the run that goes on has made so many steps."""

        def found() -> bool:
            logs = sorted(self.receipts.glob(f"2*/{receipt.LOG}"))
            return bool(logs) and len(re.findall(r"iteration +\d+/", logs[-1].read_text(errors="replace"))) >= steps

        self.scheduler.wait(found)

    def ends(self) -> list[dict]:
        receipt.seal_lost(self.receipts, outcome.of_run)
        return [receipt.read(folder) for folder in receipt.folders(self.receipts)]

    def whole(self) -> bool:
        """Whether the receipts are a chain without damage."""
        return receipts.command([str(self.receipts)], {}) == 0


def saving(at: Path) -> tuple[str, ...]:
    return f"schedule.save={at}/ckpt", "schedule.save_interval=2"


def step(at: Path) -> int:
    return int((at / "ckpt" / TRACKER).read_text())


def test_a_run_over_two_hosts_is_checked_trained_and_sealed(scheduler, tmp_path):
    job = Job(scheduler, tmp_path, "schedule.train_steps=4")
    job.until("COMPLETED", "FAILED")
    said = job.out.read_text(errors="replace")
    assert job.state == "COMPLETED", said[-3000:]
    (found,) = job.ends()
    assert found["outcome"]["end"] == "completed" and found["outcome"]["figures"]["steps"] == 4
    assert found["job"]["diagnostic"] and found["job"]["nodes"] == 2 and found["job"]["world"] == 2
    assert re.search(r"^0: PASS .*@ h1 ", said, re.M) and re.search(r"^1: PASS .*@ h2 ", said, re.M)
    assert {path.name for path in job.receipts.glob("2*/events*.jsonl")} >= {"events.0.jsonl", "events.1.jsonl"}
    assert "h1:" not in (receipt.folders(job.receipts)[0] / receipt.FILE).read_text() and job.whole()


@pytest.mark.parametrize("how", ["scancel", "time limit"])
def test_a_job_that_is_ended_saves_and_goes_on(scheduler, tmp_path, how):
    """By a person, and by Slurm, whose signal comes before its limit. Then the same script again."""
    words = (saving(tmp_path)[0], "schedule.train_steps=100000", "schedule.save_interval=100000")
    options = ("--time=600", "--signal=B:TERM@600") if how == "time limit" else ()
    job = Job(scheduler, tmp_path, *words, options=options)
    job.training(2)
    if how == "scancel":
        scheduler.ask("scancel", job.number)
    else:  # as much is left as the signal comes before: it is due
        hours, minutes, _ = map(int, scheduler.job(job.number)["RunTime"].split(":"))
        scheduler.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 11}")
    job.until("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")
    scheduler.wait(lambda: scheduler.nodes() == ["idle", "idle"])
    (found,) = job.ends()
    # `lost`: the launcher had not sealed when KillWait was over; the ranks had saved all the same.
    assert found["outcome"]["end"] in ("interrupted", "lost"), job.out.read_text()[-2000:]
    stopped = step(tmp_path)
    assert stopped >= 1
    again = Job(scheduler, tmp_path, *words, f"schedule.stop_every={stopped + 3}", f"schedule.load={tmp_path}/ckpt")
    again.until("COMPLETED", "FAILED")
    _, second = again.ends()
    assert second["outcome"]["end"] == "completed" and step(tmp_path) == stopped + 3
    assert second["outcome"]["figures"]["steps"] == 3 and again.whole()


def test_a_killed_host_requeues_the_job_and_it_goes_on(scheduler, tmp_path):
    job = Job(scheduler, tmp_path, *saving(tmp_path), "schedule.train_steps=60", options=("--requeue",))
    scheduler.wait(lambda: (tmp_path / "ckpt" / TRACKER).is_file())
    scheduler.kill("h2")
    job.until("PENDING", "REQUEUED", "FAILED", "COMPLETED")
    scheduler.start("h2")
    job.until("COMPLETED", "FAILED")
    assert job.state == "COMPLETED", job.out.read_text()[-3000:]
    first, *_, last = job.ends()
    assert first["outcome"]["end"] in ("lost", "failed", "interrupted")
    assert last["outcome"]["end"] == "completed" and step(tmp_path) == 60
    assert first["outcome"]["figures"]["steps"] + last["outcome"]["figures"]["steps"] >= 60
    assert last["outcome"]["figures"]["steps"] < 60  # it went on
    assert job.whole()
