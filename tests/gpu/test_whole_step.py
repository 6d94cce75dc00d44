"""A step as one CUDA graph: the run that it replaces, through a checkpoint; and what stops it at a NaN."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.record import steps as log
from launch.run.process import Process

from .trained import SMALL

pytestmark = pytest.mark.gpu

LONGEST = 300.0  # seconds of a run; a longer one hangs, and is killed
WHOLE = ("feature.cuda_graphs.impl=full_iteration", "feature.cuda_graphs.warmup_steps=1")
AUTHOR = "model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]"
# Before step 4, all of which is replayed: no Python runs that could notice.
POISON = """
import sys, time, torch
from megatron.training import training
from nam_megatron import train
def poisoned(forward, samples, model, *rest, iteration, step=training.train_step, **named):
    if iteration == 3:
        next(p for n, p in model[0].named_parameters() if n.endswith("linear_proj.weight")).data.fill_(torch.nan)
    return step(forward, samples, model, *rest, iteration=iteration, **named)
training.train_step = poisoned
if __name__ == "__main__":
    train.process(sys.argv[1:], time.time())
"""


def ran(at: Path, preset: str, *words: str, script: Path | None = None) -> tuple[int, str]:
    """Exit code and log of six steps, two microbatches each."""
    command = [
        f"conf={preset}",
        *SMALL,
        "schedule.micro_batch_size=4",
        "schedule.train_steps=6",
        "schedule.decay_steps=6",
    ]
    command += ["schedule.log_interval=1", "optim.warmup_steps=0", *words, f"out={at}"]
    subprocess.run([sys.executable, "-m", "nam_megatron.translate", *command], check=True, timeout=100)
    if script:
        text = (at / "run.sh").read_text()
        (at / "run.sh").write_text(text.replace("-m nam_megatron.train", str(script)))
    # Ranks have sessions of their own: only `Process` leaves none of them on the GPUs.
    process = Process(["bash", str(at / "run.sh")], os.environ, Path.cwd())
    late = threading.Timer(LONGEST, process.kill)
    late.start()
    text = "\n".join(line for lines in process.lines() for line in lines)
    late.cancel()
    return process.wait(), text


STACKS = [("nam56r_native_dp_fused", ()), ("nam56r_fused", (AUTHOR,))]


def losses(at: Path, preset: str, *words: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a deterministic run, by all digits of the log; from the fourth on those of a resumed one."""
    found = {}
    saves = f"schedule.save={at}/ckpt", "schedule.save_interval=3", "schedule.stop_every=3"
    for name, load in (("first", ()), ("second", (f"schedule.load={at}/ckpt",))):
        code, text = ran(at / name, preset, "precision.deterministic=true", *words, *saves, *load)
        assert not code, text[-3000:]
        found |= {
            number: (s.values["lm loss"], s.values["grad norm"])
            for number, s in log.read(text.splitlines()).steps.items()
        }
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    return list(found.values())


@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_replays_train_what_eager_steps_train(tmp_path, preset, words):
    assert losses(tmp_path / "whole", preset, *words, *WHOLE) == losses(tmp_path / "eager", preset, *words)


def test_a_nan_in_a_replay_stops_the_run_before_the_update(tmp_path):
    (tmp_path / "poison.py").write_text(POISON)
    code, text = ran(tmp_path / "run", "nam56r_native_dp_fused", *WHOLE, script=tmp_path / "poison.py")
    assert code == 1 and sorted(log.read(text.splitlines()).steps) == [1, 2, 3], text[-3000:]
    assert (
        "error: step 4, rank 0: the loss is nan; the step was replayed as one CUDA graph, and no layer could be" in text
    )
