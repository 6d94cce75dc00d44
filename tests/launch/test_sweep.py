"""Several runs of one command line: one after another, or a Slurm array of them."""

import re
import subprocess
import sys

import pytest

from launch import app
from launch.record import receipt

WORDS = ["--multirun", "conf=nam56r_native_dp", "optim.lr=1e-3,4e-4"]


def show(capsys, *words):
    with pytest.raises(SystemExit) as end:
        app.run("show", [*WORDS, *words])
    return end.value.code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch"])


def test_a_sweep_is_one_slurm_array(capsys, tmp_path):
    """Run by bash with stand-ins for Slurm and for us, each task of the array trains its own point."""
    code, script, _ = show(capsys, "format=sbatch")
    assert code == 0 and script.count("#SBATCH --array=0-1\n") == 1
    stand_ins = 'srun() { echo software=0; }; exec() { echo "RUN $*"; }; '
    for task, lr in (("0", "0.001"), ("1", "0.0004")):
        environ = {
            "SLURM_ARRAY_TASK_ID": task,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "PATH": "/usr/bin:/bin",
        }
        ran = subprocess.run(
            ["bash", "-c", stand_ins + script], env=environ, capture_output=True, text=True, check=True
        )
        (run,) = [line for line in ran.stdout.splitlines() if line.startswith("RUN")]
        assert run.endswith(f"run preset=nam56r_native_dp optim.lr={lr}")


def test_every_point_of_an_array_gets_the_time_that_the_largest_checkpoint_takes(capsys):
    saved = ("format=sbatch", "schedule.save=/c", "schedule.save_interval=10")
    scripts = [show(capsys, *saved, f"model.vocab_size={size}")[1] for size in ("4096", "262144", "4096,262144")]
    notice = [re.search("TERM@[0-9]+", script)[0] for script in scripts]
    assert notice[0] != notice[1] == notice[2]


def test_what_starts_one_run_does_not_start_a_sweep(capsys):
    code, out, said = show(capsys, "format=torchrun")
    assert (code, out) == (2, "") and "a sweep is several runs" in said and "`format=sbatch`" in said


@pytest.mark.parametrize(("end", "runs"), [("completed", 2), ("failed", 2), ("interrupted", 1)])
def test_the_runs_of_a_sweep_follow_one_another_until_somebody_ends_one(end, runs, monkeypatch, tmp_path, capsys):
    trained = []

    def train(context):
        context.made.append(tmp_path / str(len(trained)))
        trained.append([word for word in context.overrides if word.startswith("optim.lr")])
        return 0 if end == "completed" else 1

    monkeypatch.setattr(app, "train", train)
    monkeypatch.setattr(receipt, "folders", lambda root: [tmp_path / "another's, open"])
    monkeypatch.setattr(receipt, "read", lambda folder: {"outcome": {"end": end}})
    with pytest.raises(SystemExit) as ended:
        app.run("run", WORDS)
    assert trained == [["optim.lr=0.001"], ["optim.lr=0.0004"]][:runs]
    assert ended.value.code == {"completed": 0, "failed": 1, "interrupted": 130}[end]
    if runs == 2:
        assert capsys.readouterr().err.rstrip().endswith(f"report {tmp_path}/0 {tmp_path}/1")
