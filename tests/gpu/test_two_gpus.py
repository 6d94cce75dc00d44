"""Two GPUs: fused MLA and DSA on two tensor ranks are what they are on one; a step as one CUDA graph, with its collectives, is the eager
step, and no way of ending leaves a process behind. Halves of all GPUs that are there, as two hosts, train what one host does.

Needs two GPUs and fails with one: there, leave it out by `--ignore tests/gpu/test_two_gpus.py`. tests/blocks/test_tensor_parallel.py
runs the first program on a CPU.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from launch.record import steps as log

from .test_whole_step import POISON, STACKS, WHOLE, losses, ran
from .trained import SMALL

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from measure import LAYOUTS
from pods import Hosts
from test_tensor_parallel import assert_same_on_two_ranks

pytestmark = pytest.mark.gpu
TWO = "cluster.gpus_per_node=2"
# On the second rank alone, before step 5, when the graph has been replayed.
ENDS = {
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "memory": "torch.empty(10**15, device='cuda')",
    "error": "raise RuntimeError('planted')",
}
FAULT = """
import os, signal, sys, time, torch
from megatron.training import training
from nam_megatron import train
def faulty(*words, iteration, step=training.train_step, **named):
    if iteration == 4 and os.environ["RANK"] == "1":
        %s
    return step(*words, iteration=iteration, **named)
training.train_step = faulty
if __name__ == "__main__":  # the process that writes checkpoints imports this file
    train.process(sys.argv[1:], time.time())
"""


@pytest.fixture(autouse=True)
def two_gpus():
    found = torch.cuda.device_count()
    assert found >= 2, f"{found} GPU, two are needed: leave this file out by `--ignore tests/gpu/test_two_gpus.py`"


def test_two_tensor_ranks_are_one(tmp_path):
    # bf16: each rank rounds its share of a sum. A share that is missing or counted twice is off by a half and more.
    assert_same_on_two_ranks(tmp_path, limit=5e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_replays_on_two_ranks_train_what_eager_steps_train(tmp_path, preset, words, layout):
    """What ranks say to each other is inside the graph; a checkpoint is written and read between replays."""
    words = (TWO, *words, *LAYOUTS[layout])
    with ProcessPoolExecutor() as beside:  # a launcher ends whatever outlives its run in its own process
        whole = beside.submit(losses, tmp_path / "whole", preset, *words, *WHOLE)
        eager = beside.submit(losses, tmp_path / "eager", preset, *words)
        assert whole.result() == eager.result()


@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_gathered_tokens_train_what_exchanged_ones_do(tmp_path, preset, words):
    """Sums are of another order, and in bf16."""
    words = (TWO, *words, "parallel.expert=2", "precision.deterministic=true")
    exchanged = "execution.moe.dispatcher=alltoall"
    found, expected = (
        log.read(ran(tmp_path / str(i), preset, *words, one)[1].splitlines()).steps
        for i, one in enumerate(("execution.moe.dispatcher=gathered", exchanged))
    )
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4, 5, 6]
    for number, step in expected.items():
        for name, limit in (("lm loss", 2e-3 if number < 5 else 1e-2), ("grad norm", 5e-2)):
            assert found[number].values[name] == pytest.approx(step.values[name], rel=limit), (number, name)


def test_a_nan_in_a_replay_on_two_ranks_stops_the_run(tmp_path):
    (tmp_path / "poison.py").write_text(POISON)
    code, text = ran(tmp_path / "run", "nam56r_native_dp_fused", TWO, *WHOLE, script=tmp_path / "poison.py")
    assert code == 1 and sorted(log.read(text.splitlines()).steps) == [1, 2, 3], text[-3000:]
    assert "the loss is nan; the step was replayed as one CUDA graph" in text


@pytest.mark.parametrize("how", ENDS)
def test_a_run_of_replays_ends_however_one_rank_does(tmp_path, how):
    """After a signal with a checkpoint of the step that was under way, which a run goes on from; else with an error. Never not at all."""
    (tmp_path / "fault.py").write_text(FAULT % ENDS[how])
    save = f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=100"
    code, text = ran(tmp_path / "run", "nam56r_native_dp_fused", TWO, *WHOLE, *save, script=tmp_path / "fault.py")
    if how != "signal":
        assert code and sorted(log.read(text.splitlines()).steps) == [1, 2, 3, 4], text[-3000:]
        return
    assert not code and sorted(log.read(text.splitlines()).steps) == [1, 2, 3, 4, 5], text[-3000:]
    code, text = ran(tmp_path / "rest", "nam56r_native_dp_fused", TWO, *WHOLE, *save, f"schedule.load={tmp_path}/ckpt")
    assert not code and sorted(log.read(text.splitlines()).steps) == [6], text[-3000:]


SIX = ("precision.deterministic=true", "schedule.train_steps=6", "schedule.decay_steps=6", "optim.warmup_steps=0")
WAITS = "schedule.train_steps=100000", "schedule.timeout_minutes=4", "schedule.steady_timeout_seconds=20"


@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_halves_of_the_gpus_as_two_hosts(tmp_path, preset, words):
    """They train what one host does. If one is lost, the other waits as long as its recipe says, and ends."""
    half = torch.cuda.device_count() // 2
    words = [f"conf={preset}", *words, *SMALL, "schedule.micro_batch_size=1"]
    found = []
    for name, hosts, gpus in (("two", 2, half), ("one", 1, 2 * half)):
        with Hosts(tmp_path / name, hosts, gpus, [*words, *SIX]) as run:
            assert not any(run.ended()), run.logs[0].read_text()[-3000:]
            found.append([(s["lm loss"], s["grad norm"]) for s in run.steps().values()])
    assert len(found[0]) == 6 and found[0] == found[1]
    with Hosts(tmp_path / "lost", 2, half, [*words, *WAITS]) as lost:
        lost.trained(2)
        lost.lose(0 if lost.logs[1].read_text().count("lm loss") else 1)
        assert all(lost.ended())
