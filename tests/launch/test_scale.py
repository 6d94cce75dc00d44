"""`launch scale`: a measured step on other numbers of GPUs, held against published runs of one host and sitting."""

import json
import re
from itertools import pairwise

import pytest

from launch.context import CHECKOUT
from launch.record import scale
from launch.record.receipt import read
from nam_megatron.errors import Refused
from nam_megatron.recipe import at

ONE = "20261127T134719Z-nam56r_native_dp_fused-7cf37a"
FOUR = "20261128T090438Z-nam56r_native_dp_fused-9fe91a"
PAIRS = {  # from, to
    ONE: "20261127T134217Z-nam56r_native_dp_fused-52a65a",
    "20261127T134719Z-nam56r_fused-cd76dc": "20261127T135149Z-nam56r_fused-d944d4",
}


# What adds to gradients of bf16 by itself, and FP8 and a whole step's graph, which want that.
STOCK = {"recipe.execution.moe.expert_gemm": "transformer_engine", "recipe.execution.mamba2.padded_projection": False,
         "recipe.feature.fp8": None, "recipe.feature.cuda_graphs": None}  # fmt: skip
FSDP = {"enabled": True, "strategy": "optim_grads_params"}


def run(name: str) -> dict:
    return read(CHECKOUT / "receipts" / name)


def changed(found: dict, values: dict) -> dict:
    """The receipt with other values at dotted places."""
    found = json.loads(json.dumps(found))
    for key, value in values.items():
        parents, _, last = key.rpartition(".")
        (at(found, parents) if parents else found)[last] = value
    return found


@pytest.mark.parametrize(("first", "other"), [*PAIRS.items(), *(pair[::-1] for pair in PAIRS.items())])
def test_a_forecast_is_near_what_another_run_was_measured_to_take(first, other):
    took, gpus = scale.measured(run(other))
    (step,) = scale.forecast(run(first), [gpus])
    assert step.ms == pytest.approx(took, rel=0.01)


def test_a_larger_batch_on_as_many_gpus():
    took, _ = scale.measured(run("20261125T062633Z-nam56r_native_dp_fused-ea1b03"))
    (step,) = scale.forecast(run("20261125T062050Z-nam56r_native_dp_fused-535d21"), [1], batch=64)
    assert step.ms == pytest.approx(took, rel=0.02)


@pytest.mark.parametrize("name", [ONE, FOUR])
def test_on_its_own_gpus_a_run_takes_what_it_took(name):
    took, gpus = scale.measured(run(name))
    (step,) = scale.forecast(run(name), [gpus])
    assert (step.ms, step.hidden_ms) == pytest.approx((took, took))
    assert step.samples == run(name)["recipe"]["schedule"]["global_batch_size"]


def test_messages_grow_with_ranks_and_slower_links_and_one_batch_shrinks_the_work():
    steps = scale.forecast(run(FOUR), [1, 2, 8, 16, 64], network=50)
    sent = [step.messages_ms for step in steps]
    assert sent[0] == 0 and sent == sorted(sent) and sent[1] * 7 / 4 == pytest.approx(sent[2])
    # 15 of 16 parts of as many bytes, over links of 50 GB/s and no longer 280.
    assert sent[3] / sent[2] == pytest.approx((15 / 16 * 280) / (7 / 8 * 50))
    assert scale.forecast(run(FOUR), [16], network=900)[0].messages_ms == pytest.approx(sent[2] * (15 / 16) / (7 / 8))
    slow, fast = (scale.forecast(run(FOUR), [64], network=rate)[0] for rate in (25, 50))
    assert slow.messages_ms == pytest.approx(2 * fast.messages_ms) and slow.hidden_ms > fast.hidden_ms
    halves = scale.forecast(run(FOUR), [2, 4, 8], batch=128)
    assert [step.samples for step in halves] == [128] * 3
    assert all(1.9 < a.ms / b.ms < 2 for a, b in pairwise(halves))


@pytest.mark.parametrize(
    ("change", "gpus", "more", "said"),
    [
        ({}, [12], {}, "gpus: 12 GPUs are no whole hosts of 8"),
        ({}, [16], {}, "network: how fast is a GPU's link to other hosts?"),
        ({"job.world": 16}, [1], {}, "network: how fast"),
        ({}, [3], {"batch": 64}, "batch: 64 samples are no whole microbatches of 4 on 3 GPUs"),
        *(({f"recipe.parallel.{key}": 2}, [8], {}, f"parallel.{key}: only data parallelism is forecast, not 2 ranks")
          for key in ("tensor", "pipeline", "context", "expert")),
        ({"recipe.feature.megatron_fsdp": FSDP}, [8], {}, "feature.megatron_fsdp: only Adam over all weights under DDP"),
        ({"outcome.end": "interrupted"}, [8], {}, "has no measured step"),
        ({"outcome.figures.window": None}, [8], {}, "has no measured step"),
        ({"job.world": None}, [8], {}, "has no measured step"),
        ({"outcome.figures.window.median_ms": -1.0}, [8], {}, "has no measured step"),
        ({"job.world": 1000, "recipe.parallel.tensor": 1}, [8], {"network": 50}, "less than a microbatch on each of 1000"),
        ({"recipe.preset": None}, [8], {}, "is no recipe any more"),
        ({"recipe": None}, [8], {}, "is no recipe any more"),
        ({"recipe.cluster.processor": "cpu"}, [8], {}, "ran on a CPU"),
        ({"recipe.feature.fsdp2": {}}, [8], {}, "is no recipe any more"),
    ],
)  # fmt: skip
def test_what_cannot_be_forecast_is_refused(change, gpus, more, said):
    with pytest.raises(Refused) as refused:
        scale.forecast(changed(run(FOUR), change), gpus, **more)
    problem = refused.value.problems[0]
    assert said in f"{problem.key}: {problem.message}" and problem.hint


def test_without_shards_a_gradient_is_reduced_to_all_and_each_rank_steps_alone():
    """Twice the gradients' bytes and no weights; and where nothing overlaps nothing is hidden."""
    off = {"recipe.feature.distributed_optimizer.enabled": False}
    off |= {f"recipe.feature.distributed_optimizer.overlap_{what}": False for what in ("grad_reduce", "param_gather")}
    whole, shared = (scale.forecast(changed(run(FOUR), c), [1, 4, 8]) for c in (off, {}))
    assert whole[2].messages_ms == pytest.approx(shared[2].messages_ms * 8 / 6)
    # As much of the optimizer on each: a step differs by its messages alone.
    assert [s.ms - s.messages_ms for s in whole] == pytest.approx([whole[0].ms] * 3)
    assert whole[0].ms == pytest.approx(whole[0].hidden_ms) and shared[0].ms < shared[0].hidden_ms
    half = scale.forecast(changed(run(FOUR), {"recipe.precision.grad_reduce": "bf16"} | STOCK), [8])
    assert half[0].messages_ms == pytest.approx(shared[2].messages_ms * 4 / 6)


def test_what_no_microbatch_can_hide_is_left():
    """Beyond what a backward pass covers, messages hidden and counted in full grow alike."""
    slow, slower = (scale.forecast(run(FOUR), [64], network=rate)[0] for rate in (5, 2.5))
    assert slower.hidden_ms - slow.hidden_ms == pytest.approx(slower.messages_ms - slow.messages_ms)
    # What is hidden is one microbatch of the four.
    assert slow.ms - slow.hidden_ms == pytest.approx(scale.measured(run(FOUR))[0] / 4, rel=0.2)


def test_gradients_travel_behind_two_thirds_of_a_microbatch_and_weights_behind_one():
    """3 and 1.5 s of messages between two ranks, beside microbatches of 3 s."""
    for overlapped, left in (((True, True), 1.5), ((True, False), 2.5), ((False, True), 3.5), ((False, False), 4.5)):
        found = scale.Scale(6e9, 3e9, 0.0, True, 1.0, 1e9, 0.0, overlapped)
        assert found.messages(2) == (3.0, 1.5)
        assert found.rest(2, True, 3.0) == pytest.approx(left) and found.rest(2, False, 3.0) == pytest.approx(4.5)


@pytest.mark.parametrize(
    "word",
    ["gpus=0", "gpus=0000000011", "gpus=two", "gpus=1,", "batch=1.5", "network=nan", "network=-1", "network=fast"],
)
def test_words_that_are_no_numbers_are_refused(word):
    key, _, value = word.partition("=")
    with pytest.raises(Refused) as refused:
        scale.command([FOUR], {key: value})
    assert refused.value.problems[0].key == key


def test_the_command_prints_a_row_for_each_number(capsys):
    assert scale.command([str(CHECKOUT / "receipts" / ONE)], {"gpus": "1,64", "network": "50"}) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{ONE}: 6,199 ms a step on 1 GPU\n")
    assert re.search(r"^ +1 +64 +6,199 +42,287 +42,287 +0 +6,199$", out, re.M)
    ((rate, every),) = re.findall(r"^ +64 +4,096 +[\d,]+ +([\d,]+) +([\d,]+) ", out, re.M)
    assert int(every.replace(",", "")) == pytest.approx(64 * int(rate.replace(",", "")), rel=1e-4)
    assert "50 GB/s between hosts" in out
