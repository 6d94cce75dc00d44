"""Checkpoints and faults: a run in several commands and layouts is one run, and what cannot be gone on with is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import get_args
from test_train import TORCHRUN, command, indexed, logged, lowered, poison, run, trained

from launch.record import steps
from nam_megatron import train
from nam_megatron.data import tokenizer
from nam_megatron.judge import resume
from nam_megatron.mends import background, master_weights
from nam_megatron.runtime import checkpoint, checksums, pretrain

SIX = ("schedule.train_steps=6", "schedule.decay_steps=6", "schedule.save_interval=2", "optim.lr=0.01")
SIX += ("feature.distributed_optimizer.reshardable=true",)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[float]]:
    """The checkpoints of a run of six steps on one rank, and its losses. Its second log line is the mean of its first two steps."""
    folder = tmp_path_factory.mktemp("whole")
    first, mean, *rest = trained(run(folder, *SIX, f"schedule.save={folder}/ckpt"))
    return folder / "ckpt", [first, 2 * mean - first, *rest]


@pytest.fixture
def at_two(whole, tmp_path) -> tuple[str, ...]:
    """A copy of that run as it was after two steps: the overrides that go on with it."""
    folder = tmp_path / "ckpt"
    shutil.copytree(whole[0], folder)
    for step in (4, 6):
        shutil.rmtree(folder / f"iter_{step:07d}")
    (folder / TRACKER).write_text("2")
    return (*SIX, f"schedule.save={folder}", f"schedule.load={folder}")


# One run in several commands -----------------------------------------------------------------------------------------------------


def in_background() -> None:
    """The writing process as a fork, for it has no GPU either."""
    start = async_utils.PersistentAsyncCaller._get_process.__func__
    async_utils.PersistentAsyncCaller._get_process = classmethod(
        wraps(start)(lambda cls, rank, *_, **__: start(cls, rank, "fork"))
    )
    torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda _: None


BACKGROUND = ("schedule.async_save=true",)


def test_commands_that_stop_and_resume_are_one_run(whole, at_two, tmp_path):
    _, losses = whole
    middle = trained(run(tmp_path, *at_two, "schedule.stop_every=4"))
    assert middle == [losses[2], pytest.approx((losses[2] + losses[3]) / 2, abs=1e-6)]
    end = trained(run(tmp_path, *at_two, "schedule.stop_every=4"))
    assert end == [losses[4], pytest.approx((losses[4] + losses[5]) / 2, abs=1e-6)]


@pytest.mark.slow
def test_a_checkpoint_in_the_background_is_named_once_it_is_whole(whole, at_two, tmp_path):
    """Two ranks write two of them slowly while training goes on; the command's end waits for them, and one rank goes on."""
    save, seen = tmp_path / "ckpt", tmp_path / "seen"

    def slowly() -> None:
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread

        @wraps(write)
        def late(*words):
            time.sleep(1)
            with seen.open("a") as file:
                file.write(f"{(save / TRACKER).read_text()} {len(list(save.rglob(checksums.NAME)))}\n")
            write(*words)

        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(late)
        in_background()

    _, losses = whole
    words = (*at_two, *BACKGROUND, "schedule.save_interval=1", "schedule.stop_every=4", "cluster=h200_2")
    ranks = run(tmp_path, *words, world=2, before=slowly)
    assert trained(ranks) == pytest.approx([losses[2], (losses[2] + losses[3]) / 2], abs=1e-2)
    said = [(s.step, s.behind, s.done) for s in steps.read(ranks[0].out.splitlines()).saves]
    assert said[:2] == [(3, False, False), (3, True, False)] and said[-1] == (4, False, True)
    assert seen.read_text().splitlines()[:2] == ["2 1", "2 1"], "nothing names what is being written"
    assert (save / TRACKER).read_text() == "4" and len(list(save.rglob(checksums.NAME))) == 3
    one = trained(run(tmp_path, *at_two))
    assert one == pytest.approx([losses[4], (losses[4] + losses[5]) / 2], abs=1e-2)


@pytest.mark.slow
def test_a_writer_that_dies_ends_the_run(tmp_path):
    """Megatron waits for it for ever."""

    def dies() -> None:
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread
        fatal = wraps(write)(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(fatal)
        in_background()

    words = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=2", "schedule.train_steps=2", *BACKGROUND)
    (rank,) = run(tmp_path, *words, before=dies)
    assert rank.code == 1 and background.DIED in rank.err
    assert not (tmp_path / "ckpt" / TRACKER).exists() and not list((tmp_path / "ckpt").rglob(checksums.NAME))


LAYOUTS = {"tensor and sequence": ("parallel.tensor=2", "parallel.sequence=true"), "expert": ("parallel.expert=2",)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_run_goes_on_in_another_layout_and_comes_back(whole, at_two, tmp_path, layout):
    """Two ranks do steps 3 and 4, one rank the rest: the losses are those of one rank throughout, but for bf16's rounding."""
    _, losses = whole
    two = trained(run(tmp_path, *at_two, "cluster=h200_2", *layout, "schedule.stop_every=4", world=2))
    assert two == pytest.approx([losses[2], (losses[2] + losses[3]) / 2], abs=1e-2)
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "4"
    one = trained(run(tmp_path, *at_two))
    assert one == pytest.approx([losses[4], (losses[4] + losses[5]) / 2], abs=1e-2)
    assert abs(losses[5] - losses[2]) > 5e-2, "the losses move too little to tell steps apart"


@pytest.mark.slow
def test_a_checkpoint_with_the_state_of_other_weights_is_refused(tmp_path):
    """As Megatron alone writes it where gradients have several buckets; its weights are right, and so is its first loss."""

    def megatrons() -> None:
        laid = DistributedOptimizer._compute_per_buffer_param_layout
        DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(
            lambda held, _, *more: laid(held, 3000, *more)
        )
        master_weights._without_padding = lambda _: nullcontext()

    words = (*SIX, f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=1", "schedule.stop_every=1")
    trained(run(tmp_path, *words, before=megatrons))
    (rank,) = run(tmp_path, *words, f"schedule.load={tmp_path}/ckpt")
    assert rank.code == 2 and "Traceback" not in rank.err
    assert "the optimizer's fp32 weights are not those of the model: " in rank.err and "schedule.load" in rank.err


def test_parameters_have_their_places_without_the_padding_before_them():
    """Three buckets of 10, 5 and 4 elements, which begin at multiples of 12."""
    sizes = {"a": (0, 4, 0), "b": (4, 10, 0), "c": (12, 17, 1), "d": (24, 28, 2)}
    buckets = [SimpleNamespace(offset=at, numel_unpadded=n) for at, n in ((0, 10), (12, 5), (24, 4))]
    buffer = SimpleNamespace(param_index_map=sizes, buckets=buckets)
    with master_weights._without_padding(buffer):
        assert buffer.param_index_map == {"a": (0, 4, 0), "b": (4, 10, 0), "c": (10, 15, 1), "d": (15, 19, 2)}
    assert buffer.param_index_map is sizes


def test_every_buffer_of_an_optimizer_is_saved_without_padding(monkeypatch):
    """Dense weights and experts have one each, and biases in fp32 another."""
    seen = []

    class Stock:
        buffers = tuple(
            SimpleNamespace(param_index_map={n: (12, 17, 1)}, buckets=[SimpleNamespace(offset=at, numel_unpadded=10) for at in (0, 12)])
            for n in "abc"
        )  # fmt: skip

        def save(self):
            seen.extend(buffer.param_index_map for buffer in self.buffers)

    setattr(Stock, master_weights.SAVE, Stock.save)
    setattr(Stock, master_weights.LOAD, Stock.save)
    monkeypatch.setattr(master_weights, "DistributedOptimizer", Stock)
    master_weights.install(None)
    getattr(Stock(), master_weights.SAVE)()
    assert seen == [{"a": (10, 15, 1)}, {"b": (10, 15, 1)}, {"c": (10, 15, 1)}]
    assert all({*buffer.param_index_map.values()} == {(12, 17, 1)} for buffer in Stock.buffers)


@pytest.mark.slow
def test_weights_gathered_in_fp8_are_not_held_against_their_state(whole, at_two, tmp_path):
    """Their checkpoint has them as FP8 rounded them, and the state as it was before."""

    def in_fp8() -> None:
        load = getattr(DistributedOptimizer, master_weights.LOAD)

        @wraps(load)
        def quantized(optimizer, state):
            load(optimizer, state)
            for parameter in (p for group in optimizer.model_float16_groups for p in group if p.ndim > 1):
                parameter.data.copy_(parameter.data.to(torch.float8_e4m3fn))
            DistributedOptimizer._is_distopt_quantized_param = staticmethod(lambda tensor: tensor.ndim > 1)

        setattr(DistributedOptimizer, master_weights.LOAD, quantized)

    on = trained(run(tmp_path, *at_two, "schedule.stop_every=3", before=in_fp8))
    assert len(on) == 1 and on[0] != whole[1][2]


@pytest.mark.slow
def test_a_sharded_run_is_the_run_and_goes_on_as_it_was(tmp_path):
    """Tensor, sequence and expert parallelism under Megatron-FSDP, which no GPU of ours was needed for: four ranks over gloo."""
    layout = (
        "cluster=h200_2",
        "cluster.gpus_per_node=4",
        "parallel.tensor=2",
        "parallel.sequence=true",
        "parallel.expert=2",
    )
    small = ("model.pattern=AEM", "model.depth=3", "schedule.global_batch_size=4", "schedule.micro_batch_size=2")
    small += ("schedule.train_steps=4", "schedule.decay_steps=4", "optim.lr=0.01", "optim.warmup_steps=0")
    plain = trained(run(tmp_path, *small, *layout, world=4))

    def unset() -> None:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]

    fsdp = (*small, *layout, "feature.megatron_fsdp.enabled=true", f"schedule.save={tmp_path}/ckpt")
    fsdp += ("schedule.save_interval=2",)
    losses = trained(run(tmp_path, *fsdp, world=4, before=unset))
    assert losses == plain, "its gradients are fp32, as they are without it"
    assert abs(losses[3] - losses[2]) > 5e-2, "the losses move too little to tell steps apart"
    shutil.rmtree(tmp_path / "ckpt" / "iter_0000004")
    (tmp_path / "ckpt" / TRACKER).write_text("2")
    on = trained(run(tmp_path, *fsdp, f"schedule.load={tmp_path}/ckpt", world=4, before=unset))
    assert on == [losses[2], pytest.approx((losses[2] + losses[3]) / 2, abs=1e-6)]


# What cannot be gone on with -----------------------------------------------------------------------------------------------------


STAGE = ("optim.lr", "optim.min_lr", "optim.decay", "schedule.train_steps", "schedule.decay_steps")
UNSAVED = ("schedule.save=null", "schedule.save_interval=null")
LOWER = {
    "optim.lr": 0.002,
    "optim.min_lr": 0.0004,
    "optim.decay": "linear",
    "schedule.train_steps": 8,
    "schedule.decay_steps": 8,
}


def staged(at_two: tuple[str, ...], folder: Path, values: dict) -> tuple[str, ...]:
    """The words of a next stage from step 2 on, saved to `folder`."""
    kept = [word for word in at_two if word.split("=")[0] not in (*values, "schedule.save")]
    changed = [f"{key}={value}" for key, value in values.items()]
    return (*kept, *changed, f"schedule.save={folder}", f"schedule.changes=[{','.join(STAGE)}]")


@pytest.mark.slow
def test_a_next_stage_has_its_own_rates_and_the_state(whole, at_two, tmp_path):
    """Changed in nothing it is the run; else its rates are the new curve's at the steps counted from the run's first."""
    *_, third, fourth, fifth, sixth = whole[1]
    idle = partial(setattr, resume, "no_stage", lambda *_: ())  # it would be refused
    same = trained(run(tmp_path, *staged(at_two, tmp_path / "same", {}), before=idle))
    assert same == pytest.approx([third, (third + fourth) / 2, fifth, sixth], abs=1e-6)
    words = staged(at_two, tmp_path / "lower", LOWER)
    ranks = run(tmp_path, *words)
    assert trained(ranks)[-1] not in same
    warm_up = lowered(*words).plan.recipe.optim.warmup_steps
    curve = [0.0004 + 0.0016 * (8 - step) / (8 - warm_up) for step in (3, 4, 5, 6, 7, 8)]
    assert logged(ranks, "learning rate") == pytest.approx(curve)
    again = [word for word in words if not word.startswith(("schedule.load", "schedule.changes"))]
    assert objections(*again, f"schedule.load={tmp_path}/lower") == []


def rates_of_groups() -> None:
    """Prints every group's rate at the end: Muon's and Adam's are of two optimizers, and the log has one."""
    step = OptimizerParamScheduler.step

    @wraps(step)
    def told(self, increment):
        step(self, increment)
        print("rates:", len(self.optimizer.param_groups), *{group["lr"] for group in self.optimizer.param_groups})

    OptimizerParamScheduler.step = told


@pytest.mark.slow
def test_a_next_stage_on_two_ranks_under_muon(tmp_path):
    """Its momentum is the checkpoint's, and the new rates are of both optimizers' groups."""
    words = (
        "optim=muon",
        "optim.lr=0.01",
        "cluster=h200_2",
        "schedule.save_interval=2",
        f"schedule.load={tmp_path}/ckpt",
    )
    four = (*words[:-1], "schedule.train_steps=4", "schedule.decay_steps=4", f"schedule.save={tmp_path}/ckpt")
    *_, third, fourth = trained(run(tmp_path, *four, world=2))
    shutil.rmtree(tmp_path / "ckpt" / "iter_0000004")
    (tmp_path / "ckpt" / TRACKER).write_text("2")
    idle = partial(setattr, resume, "no_stage", lambda *_: ())
    kept = staged((*words, "schedule.train_steps=4", "schedule.decay_steps=4"), tmp_path / "same", {})
    assert trained(run(tmp_path, *kept, world=2, before=idle)) == pytest.approx([third, (third + fourth) / 2], abs=1e-6)
    ranks = run(tmp_path, *staged(words, tmp_path / "lower", LOWER), world=2, before=rates_of_groups)
    assert trained(ranks)[0] == third and logged(ranks, "learning rate")[-1] == pytest.approx(0.0004)
    groups, *last = ranks[0].out.split("rates: ")[-1].splitlines()[0].split()
    assert int(groups) > 2 and [float(rate) for rate in last] == [pytest.approx(0.0004)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.expert=2", "parallel.pipeline=2"])
def test_a_next_stage_over_two_ranks_is_the_stage_of_one(at_two, tmp_path, layout):
    one = trained(run(tmp_path, *staged(at_two, tmp_path / "one", LOWER)))
    words = staged((*at_two, "cluster=h200_2", layout), tmp_path / "two", LOWER)
    ranks = run(tmp_path, *words, world=2, before=rates_of_groups)
    assert trained(ranks) == pytest.approx(one, abs=1e-2)
    ends = {rank.out.split("rates: ")[-1].splitlines()[0].split()[1] for rank in ranks}
    assert [float(rate) for rate in ends] == [pytest.approx(0.0004)]


@pytest.mark.few(1)
@pytest.mark.parametrize("said", [None, "4"])
def test_a_checkpoint_that_was_exchanged_once_it_was_judged_is_refused(whole, tmp_path, said):
    """Megatron began with random weights where its tracker was gone by then, and with whatever step it named."""
    folder = tmp_path / "ckpt"
    shutil.copytree(whole[0], folder)
    (folder / TRACKER).write_text("2")

    def late() -> None:
        checkpoint.sign = lambda _: (folder / TRACKER).write_text(said) if said else (folder / TRACKER).unlink()

    (rank,) = run(tmp_path, *SIX, *UNSAVED, f"schedule.load={folder}", before=late)
    assert rank.code == 2 and "was changed after it was looked at: its `iter_0000002` was not loaded" in rank.err


def test_a_checkpoint_that_came_once_there_was_none_is_refused(tmp_path):
    (problem,) = checkpoint.exchanged(str(tmp_path), 4)
    assert "it had no checkpoint then, and one was loaded" in problem.message
    assert not [*checkpoint.exchanged(str(tmp_path), 0)]


@pytest.mark.parametrize(("said", "name", "step"), [("4", "iter_0000004", 4), ("release", "release", 0)])
def test_a_step_whose_checksums_were_written_anew_once_it_was_judged_is_refused(
    tmp_path, monkeypatch, said, name, step
):
    (tmp_path / TRACKER).write_text(said)
    (tmp_path / name).mkdir()
    (tmp_path / name / checksums.NAME).write_text("judged")
    monkeypatch.setitem(checkpoint.JUDGED, tmp_path, (name, checksums.whole(tmp_path / name)))
    assert not [*checkpoint.exchanged(str(tmp_path), step)]
    (tmp_path / name / checksums.NAME).write_text("another's")
    (problem,) = checkpoint.exchanged(str(tmp_path), step)
    assert f"the checksums of its `{name}` are others now" in problem.message


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((*UNSAVED, "schedule.changes=[optim.min_lr]", "optim.min_lr=0.001", "optim.lr=0.02"), "optim.lr"),
        (("schedule.changes=[optim.lr]", "optim.lr=0.02"), "schedule.save"),
        ((*UNSAVED, "schedule.changes=[optim.lr]", "schedule.load=null"), "schedule.changes"),
        ((*UNSAVED, "schedule.changes=[optim.lr,optim.min_lr]", "optim.lr=0.02"), "schedule.changes"),
        ((*UNSAVED, "schedule.changes=[schedule.train_steps]", "schedule.train_steps=2"), "schedule.train_steps"),
    ],
)
def test_what_is_no_next_stage(at_two, words, key):
    names = {word.split("=")[0] for word in words}
    kept = [word for word in at_two if word.split("=")[0] not in names]
    assert [found for found, _ in objections(*kept, *words)] == [key]


def test_weights_alone_are_no_stage(at_two, tmp_path):
    (tmp_path / "ckpt" / TRACKER).write_text("release")
    (problem,) = resume.no_stage(tmp_path / "ckpt", lowered(*at_two, "schedule.changes=[optim.lr]"))
    assert problem.key == "schedule.changes" and "weights alone" in problem.message


def objections(*overrides: str) -> list[tuple[str | None, str]]:
    return [(p.key, p.message) for p in checkpoint.objections(lowered(*overrides))]


def test_another_computation_is_refused_by_field(at_two, tmp_path):
    """In the training command, before anything is built, and every field at once."""
    (rank,) = run(tmp_path, *at_two, "optim.lr=0.02", "model.blocks.moe.top_k=1")
    assert rank.code == 2
    assert "error: the checkpoint has `optim.lr` 0.01, and the plan 0.02 @ optim.lr" in rank.err
    assert "error: the checkpoint has `model.blocks.moe.top_k` 2, and the plan 1" in rank.err
    assert rank.err.count("error:") == 2


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("schedule.train_steps=8", ["schedule.train_steps"]),
        ("schedule.micro_batch_size=1", ["schedule.micro_batch_size"]),
        ("model.depth=7", ["model.depth"]),
        ("schedule.seed=1", ["schedule.seed"]),
        ("schedule.log_interval=2", []),
        ("schedule.timeout_minutes=9", []),
        ("cluster=h200_2", []),
    ],
)
def test_what_computes_and_what_only_carries_out(at_two, change, keys):
    assert [key for key, _ in objections(*at_two, change)] == keys


def test_a_shorter_command_is_pointed_to(at_two):
    (problem,) = checkpoint.objections(lowered(*at_two, "schedule.train_steps=4"))
    assert "the order of the data depends on it" in problem.hint and "schedule.stop_every" in problem.hint


def test_a_setting_of_another_version_is_a_difference(at_two, tmp_path):
    """Pins have no key: what an older compiler told Megatron by itself."""
    plan = json.loads((tmp_path / "ckpt" / "plan.json").read_text())
    next(s for s in plan["settings"] if s["name"] == "qk_clip")["value"] = True
    (tmp_path / "ckpt" / "plan.json").write_text(json.dumps(plan))
    assert objections(*at_two) == [
        ("settings.qk_clip", "the checkpoint has `settings.qk_clip` true, and the plan false")
    ]


def test_a_truncated_checkpoint_is_refused(at_two, tmp_path):
    path = tmp_path / "ckpt" / "iter_0000002" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    (rank,) = run(tmp_path, *at_two)
    assert rank.code == 2
    assert f"`{tmp_path}/ckpt/iter_0000002`" in rank.err
    assert "write an earlier step into" in rank.err


def test_a_checkpoint_that_nobody_signed_is_refused(at_two, tmp_path):
    (tmp_path / "ckpt" / "plan.json").unlink()
    assert [key for key, _ in objections(*at_two)] == ["schedule.load"]


def test_a_checkpoint_that_is_not_there_is_not_started_without(tmp_path):
    """Megatron would start from random weights."""
    (rank,) = run(tmp_path, f"schedule.load={tmp_path}/ckpt")
    assert rank.code == 2
    assert f"error: no checkpoint in `{tmp_path}/ckpt`" in rank.err


# Faults ----------------------------------------------------------------------------------------------------------------------------


def signal_in(step: int, number: int, rank: str = "0") -> None:
    """From here on, the process of this rank gets a signal at the start of `step` (from 1)."""
    forward = pretrain.forward_step

    def interrupted(samples, model):
        if get_args().curr_iteration + 1 == step and os.environ["RANK"] == rank:
            os.kill(os.getpid(), number)
        return forward(samples, model)

    pretrain.forward_step = interrupted


@pytest.mark.slow
def test_a_signal_ends_the_run_with_a_checkpoint_and_success(tmp_path):
    """One rank gets it; both finish the step, save and end."""
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=100", "schedule.train_steps=5", "cluster=h200_2")
    ranks = run(tmp_path, *save, world=2, before=partial(signal_in, 3, signal.SIGTERM, "1"))
    assert len(trained(ranks)) == 3
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "3"
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_signal_without_a_checkpoint_folder_ends_the_run_with_success(tmp_path):
    ranks = run(tmp_path, "schedule.train_steps=5", before=partial(signal_in, 2, signal.SIGTERM))
    assert len(trained(ranks)) == 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path):
    """Under a real torchrun: the other rank is not waited for, and the rank and its signal are said."""
    words = command(tmp_path, "cluster=h200_2", "schedule.train_steps=50")
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(train.__file__).parents[1])]!r}
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        import pretend, test_resume
        with pretend.pretended():
            test_resume.signal_in(3, signal.SIGKILL, "1")
            sys.exit(test_resume.train.main({words!r}, time.time()))
    """)
    )
    torchrun = [sys.executable, "-m", "nam_megatron.torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    begin = time.monotonic()
    done = subprocess.run(torchrun, env=os.environ | TORCHRUN, capture_output=True, text=True, timeout=600, check=False)
    assert time.monotonic() - begin < 500  # a collective waits ten minutes
    assert done.returncode == 128 + signal.SIGKILL
    assert "Sending process" in done.stderr and "rank      : 1 (local_rank: 1)" in done.stderr
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_with_its_data_and_no_other(tmp_path):
    """Built again at the same path, it was accepted, and the record of the data written over. So was another step's folder."""
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.stop_every=2", "data=indexed", f"data.path={tmp_path}/corpus")
    save += (f"data.tokenizer={tmp_path}/words", "data.split='100,0,0'", "model.vocab_size=262", *SIX)
    on = f"schedule.load={tmp_path}/ckpt"
    tokenizer.save(tokenizer.train(["a b a b"], 262, progress=False), tmp_path / "words")
    prefix = indexed(tmp_path)
    trained(run(tmp_path, *save))
    step = tmp_path / "ckpt" / "iter_0000002"
    assert json.loads((step / checksums.NAME).read_text())["step"] == step.name
    assert {resume.PLAN, resume.DATA} <= checksums.read(step).keys()
    (tmp_path / "corpus.idx").unlink()
    indexed(tmp_path, documents=41)
    record = (tmp_path / "ckpt" / resume.DATA).read_bytes()
    (rank,) = run(tmp_path, *save, on)
    assert rank.code == 2 and "trained on other data: `data.bin` and `data.idx` have another hash" in rank.err
    assert (tmp_path / "ckpt" / resume.DATA).read_bytes() == record
    assert indexed(tmp_path) == prefix
    shutil.copytree(step, step.with_name("iter_0000004"))
    (tmp_path / "ckpt" / TRACKER).write_text("4")
    (rank,) = run(tmp_path, *save, on)
    assert rank.code == 2 and "iter_0000004` is damaged: it was saved as `iter_0000002`" in rank.err
    (tmp_path / "ckpt" / TRACKER).write_text("2")
    special = tmp_path / "words" / "special_tokens_map.json"
    special.write_text('{"eos_token": "a"}')  # documents would end elsewhere
    (rank,) = run(tmp_path, *save, on)
    assert rank.code == 2 and "trained on other data: `tokenizer/special tokens` has another hash" in rank.err
    special.unlink()
    assert len(trained(run(tmp_path, *save, on))) == 2


@pytest.mark.slow
def test_a_nan_with_a_checkpoint_folder_saves_the_state_before_it(tmp_path):
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=100", "schedule.train_steps=4")
    (rank,) = run(tmp_path, *save, before=partial(poison, 3, "decoder.layers.4"))
    assert rank.code == 16  # Megatron's: resume to see whether another device says the same
    assert rank.err.count("first seen in the output of decoder.layers.4 (layer 5, TransformerLayer)") == 1
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "2"
