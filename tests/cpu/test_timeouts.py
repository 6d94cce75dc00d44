"""The two timeouts of a run, by injected faults: Megatron's own, on ranks that talk over gloo, and what the launcher says of them."""

import os
import time

import pytest
from megatron.training import get_args
from test_heartbeat import TWO
from test_train import lowered, run, trained

from launch.record import outcome
from launch.record.receipt import LOG
from launch.run import hang, job
from nam_megatron.runtime import pretrain

STEADY = 8  # seconds
TIMES = (*TWO, f"schedule.steady_timeout_seconds={STEADY}")


def late(step: int, seconds: float) -> None:
    """From here on rank 1 begins this step so much later than rank 0."""
    forward = pretrain.forward_step
    waited = []

    def slowed(samples, model):
        if get_args().curr_iteration + 1 == step and os.environ["RANK"] == "1" and not waited:
            waited.append(time.sleep(seconds))
        return forward(samples, model)

    pretrain.forward_step = slowed


@pytest.mark.slow
def test_a_first_step_may_take_longer_than_later_ones(tmp_path):
    trained(run(tmp_path, *TIMES, world=2, before=lambda: late(1, 2 * STEADY)))


@pytest.mark.slow
def test_a_hang_in_a_later_step_ends_the_run_and_the_receipt_says_which_timeout_it_was(tmp_path):
    ranks = run(tmp_path, *TIMES, world=2, before=lambda: late(3, 60))
    assert ranks[0].code == 1 and ranks[1].code  # ended with the other
    (tmp_path / LOG).write_text(ranks[0].err)
    reason = outcome.of_run(tmp_path, {"job": {"world": 2}, "recipe": job.recipe(lowered(*TIMES))})["reason"]
    assert reason.endswith(
        f"; a collective waited {STEADY} s, `schedule.steady_timeout_seconds`: the first step was over"
    )


NCCL = (
    "[rank3]:[E1126 21:00:00.1 ProcessGroupNCCL.cpp:700] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=14, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=%d) ran for 300096 milliseconds before timing out."
)


@pytest.mark.parametrize(
    "seconds, steady, said",
    [
        (300, 120, "`schedule.timeout_minutes`: the first step was not over"),
        (120, 120, "`schedule.steady_timeout_seconds`: the first step was over"),
        (300, None, "`schedule.timeout_minutes`, which holds in every step"),
        (600, 120, "no timeout of the recipe's"),
    ],
)
def test_the_watchdog_of_nccl_says_how_long_it_waited(seconds, steady, said):
    waited = hang.waited(NCCL % (1000 * seconds))
    assert hang.whose(waited, {"timeout_minutes": 5, "steady_timeout_seconds": steady}).endswith(said)
    assert hang.waited("timeout: 300000ms") is None


def test_which_timeout_holds_now():
    """Megatron's later one begins with the second step of a process, whatever that step's number is."""
    times = {"timeout_minutes": 5, "steady_timeout_seconds": 120}

    def holds(*nths: int) -> str:
        beats = {r: hang.Beat(r, "h", 1, "step" if n else "built", 70 + n, n, None, 1.0, n) for r, n in enumerate(nths)}
        return hang.holds(beats, times)

    assert all("may wait 300 s" in holds(*nths) for nths in [(0, 0), (1, 1), (1, 2)])
    assert "may wait 120 s" in holds(2, 2)
