"""Hangs of the real trainer: two ranks of Megatron's own pretrain(), a fault in one of them, and what the launcher reads of it."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from megatron.training import get_args
from test_train import run, trained

from launch.record import oom
from launch.run import hang
from nam_megatron.runtime import pretrain
from nam_megatron.runtime.heartbeat import FOLDER

TWO = ("cluster=h200_2", "schedule.train_steps=6", "schedule.global_batch_size=16", "schedule.micro_batch_size=2")


def slow(step: int, seconds: float, how: str) -> None:
    """From here on rank 1 does nothing, or computes half of the time, for so long in each forward pass from `step` on."""
    forward = pretrain.forward_step

    def slowed(samples, model):
        made = forward(samples, model)
        if get_args().curr_iteration + 1 >= step and os.environ["RANK"] == "1":
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                busy = time.process_time() + 0.05 * (how == "compute")
                while time.process_time() < busy:
                    pass
                time.sleep(0.05)
        return made

    pretrain.forward_step = slowed


def never_meet() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def stop(step: int) -> None:
    forward = pretrain.forward_step

    def stopped(samples, model):
        if get_args().curr_iteration + 1 == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return forward(samples, model)

    pretrain.forward_step = stopped


def watched(folder: Path, before, still: float = 10.0) -> hang.Hang:
    """What the launcher would say of a run with that fault once no beat has come for `still` seconds; then the ranks are killed."""
    (folder / FOLDER).mkdir()
    said = []

    def kill() -> None:
        for beat in hang.beats(folder).values():
            with contextlib.suppress(ProcessLookupError):  # the end of one rank ends the others
                os.kill(beat.pid, signal.SIGKILL)

    with hang.Watch(folder, 2, still, kill, patience=1.0) as watch:
        thread = threading.Thread(target=lambda: said.append(run(folder, *TWO, world=2, before=before)))
        thread.start()
        thread.join(120)
    assert said and watch.found
    return watch.found


@pytest.mark.slow
def test_beats_of_a_run_that_is_well(tmp_path):
    (tmp_path / FOLDER).mkdir()
    trained(run(tmp_path, *TWO, world=2))
    known = hang.beats(tmp_path)
    assert {(r, b.phase, b.step, b.micro) for r, b in known.items()} == {(r, "end", 6, 24) for r in (0, 1)}
    assert all(0 < b.spent < 10 for b in known.values())


@pytest.mark.slow
def test_without_a_folder_nothing_is_written(tmp_path):
    trained(run(tmp_path, "schedule.train_steps=2"))
    assert {p.name for p in tmp_path.iterdir()} == {"plan.json"}


def test_a_rank_that_does_not_meet_the_others(tmp_path):
    found = watched(tmp_path, never_meet)
    assert (found.kind, found.ranks) == ("bootstrap", (1,)) or found.text.startswith("all ranks came"), str(found)


@pytest.mark.slow
def test_a_rank_that_stops_in_a_step(tmp_path):
    found = watched(tmp_path, lambda: stop(3))
    assert (found.kind, found.ranks) == ("stopped", (1,)) and "is stopped, at step" in found.text


@pytest.mark.slow
def test_a_first_step_that_compiles(tmp_path):
    found = watched(tmp_path, lambda: slow(1, 60, "compute"))
    assert found.kind == "compile" and 1 in found.ranks, str(found)


@pytest.mark.slow
def test_a_rank_that_waits_for_something_else(tmp_path):
    """A disk, a lock: neither computing nor stopped, and behind the others."""
    found = watched(tmp_path, lambda: slow(4, 60, "sleep"))
    assert found.kind in ("stopped", "waiting") and "step 4" in found.text, str(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", ["decoder.layers.1", "decoder.layers.4"])
def test_out_of_memory_names_the_layer_and_its_kind(tmp_path, layer):
    (rank,) = run(tmp_path, "schedule.train_steps=4", before=lambda: full(layer))
    assert rank.code == 1
    number = int(layer[-1]) + 1
    kind = {2: "moe", 5: "attention"}[number]
    assert f"out of memory: step 2, rank 0, in the forward pass of layer {number} ({kind}): {layer} (" in rank.err
    (found,) = oom.triage(rank.err.splitlines())
    assert found.layer == f"layer {number} ({kind}): {layer}" and found.phase == "forward"
    assert layer in "\n".join(oom.told(found))


def full(name: str) -> None:
    """From here on the second step needs more memory than there is, in this layer."""
    import torch

    forward = pretrain.forward_step

    def watched(samples, model):
        if get_args().curr_iteration == 1:
            module = dict(pretrain.unwrap_model(model).named_modules())[name]
            inner = next(m for n, m in module.named_modules() if n.endswith(("linear_fc1", "linear_qkv")))

            def raising(*_, **__):
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB"
                )

            inner.forward = raising
        return forward(samples, model)

    pretrain.forward_step = watched
