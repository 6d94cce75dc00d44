"""What the real trainer says in `events.jsonl`, and what the launcher makes of it: Megatron's own pretrain() on a CPU."""

import errno
import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.training import get_args
from test_heartbeat import full
from test_resume import in_background, signal_in
from test_train import logged, poison, run

from launch.record import events, oom, outcome, steps
from launch.run.run import ended
from nam_megatron.events import FILE, NONCE, PACKAGE, Record
from nam_megatron.runtime import checksums, pretrain, readings, record
from nam_megatron.words.tree import tree_hash

SHORT = ("schedule.train_steps=5", "schedule.decay_steps=5", "optim.warmup_steps=0", "optim.lr=0.01")
TWO = (*SHORT, "cluster=h200_2", "parallel.pipeline=2", "model.letters.E=mlp")


def told(folder: Path, *overrides: str, world: int = 1, before: Callable[[], object] = lambda: None) -> list[dict]:
    """What was said, in the order of the file. Two ranks that write at one time may leave an empty line."""

    def ready() -> None:
        os.environ[NONCE] = "mine"
        before()

    ranks = run(folder, *overrides, world=world, before=ready)
    (folder / "log.txt").write_text("".join(rank.out + rank.err for rank in ranks))
    (folder / "codes").write_text(json.dumps([rank.code for rank in ranks]))
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines() if line]


def of(said: list[dict], *names: str, rank: int | None = None) -> list[dict]:
    return [one for one in said if one["event"] in names and rank in (None, one["rank"])]


def verdict(folder: Path, world: int = 1, code: int = 0, signals: list[str] = [], **job) -> tuple:  # noqa: B006
    job = {"train_steps": 5, "log_interval": 1, "stop_every": None, "world": world, "tokens_per_step": 128} | job
    return tuple(ended(code, outcome.of_run(folder, {"nonce": "mine", "job": job}), job, signals))


def test_each_event_is_said_by_its_rank_and_agrees_with_the_log(tmp_path):
    said = told(
        tmp_path, *TWO, "schedule.log_interval=2", f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=4", world=2
    )
    assert {one["run"] for one in said} == {"mine"}
    for rank in (0, 1):
        mine = [one for one in said if one["rank"] == rank]
        assert [one["n"] for one in mine] == list(range(1, len(mine) + 1)) and len({one["pid"] for one in mine}) == 1
        assert [(one["reason"], one["code"], one["step"]) for one in of(mine, "end")] == [("done", 0, 5)]
        assert [one["step"] for one in of(mine, "memory")] == [1, 2, 4, 5] and mine[0]["event"] == "start"
    (stood,) = of(said, "mends")
    assert stood["rank"] == 0 and "step_rate" in stood["stood"]
    lines = of(said, "step")
    assert {one["rank"] for one in lines} == {1} and {one["rank"] for one in of(said, "saving", "saved")} == {0}
    assert [(one["first"], one["step"], one["of"]) for one in lines] == [(1, 1, 5), (2, 2, 5), (3, 4, 5)]
    assert [one["tokens"] for one in lines] == [step * 4 * 32 for step in (1, 2, 4)]
    read = steps.read((tmp_path / "log.txt").read_text().splitlines())
    figures = [s.values for s in read.steps.values()]
    # Megatron's second line has the first step in it once more.
    assert (lines[0]["loss"] + lines[1]["loss"]) / 2 == pytest.approx(figures[1][steps.LOSS], rel=1e-5)
    assert 0.5 < (lines[0]["ms"] + lines[1]["ms"]) / 2 / figures[1][steps.TIME] < 1.01, (
        "ours is looked at a moment before theirs"
    )
    for line, printed in ((lines[0], figures[0]), (lines[2], figures[2])):
        assert line["loss"] == pytest.approx(printed[steps.LOSS], rel=1e-5)
        assert 0.5 < line["ms"] / printed[steps.TIME] < 1.01
        assert line["grad_norm"] == pytest.approx(printed[steps.NORM], abs=1e-3)
        assert line["lr"] == pytest.approx(printed["learning rate"], rel=1e-5)
        assert line["tflops"] * line["ms"] == pytest.approx(lines[0]["tflops"] * lines[0]["ms"]), (
            "the same operations each step"
        )
    assert verdict(tmp_path, 2, log_interval=2) == ("completed", 0, None)
    assert verdict(tmp_path, 3)[:2] == ("failed", 1), "a rank that the plan has and nobody heard"


@pytest.mark.slow
def test_commands_that_go_on_append_with_a_start_of_their_own(tmp_path):
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=2", "schedule.stop_every=2", *SHORT)
    first = told(tmp_path, *save)
    assert [(one["reason"], one["step"]) for one in of(first, "end")] == [("planned stop", 2)]
    assert verdict(tmp_path, stop_every=2)[0] == "completed"
    assert [(one["step"], one["sha256"]) for one in of(first, "loaded")] == [(0, None)]
    whole = told(tmp_path, *save, f"schedule.load={tmp_path}/ckpt")
    assert whole[: len(first)] == first and whole[len(first)]["event"] == "start"
    second = whole[len(first) :]
    sums = checksums.whole(tmp_path / "ckpt/iter_0000002")
    assert [(one["step"], one["sha256"]) for one in of(second, "loaded")] == [(2, sums)] and second[0]["n"] == 1
    # as the first one began
    assert outcome.of_run(tmp_path, {"nonce": "mine"})["loaded"] == {"step": 0, "sha256": None}
    again = events.Events(1)
    for one in second:
        again.hear(json.dumps(one), "mine")
    assert again.begun == {"step": 2, "sha256": sums}
    assert {one["source"] for one in of(second, "start", "built")} == {tree_hash(PACKAGE.parent, PACKAGE.name)}
    assert [one["step"] for one in of(whole, "step")] == [1, 2, 3, 4]
    assert [(one["event"], one["step"]) for one in of(whole, "saving", "saved")] == [
        ("saving", 2), ("saved", 2), ("saving", 4), ("saved", 4),
    ]  # fmt: skip
    found = events.read(tmp_path, "mine")
    assert (found.last_step, found.hole, found.facts()["again"]) == (4, None, 1)


def test_code_that_changes_while_it_is_read_is_another_and_ends_no_training(tmp_path, monkeypatch):
    """`git checkout` in the clone meanwhile; without a record nothing reads it at all."""
    asked = []

    def gone(*_):
        asked.append(1)
        raise FileNotFoundError("a module is not there any more")

    monkeypatch.setattr(readings.events, "source", gone)
    monkeypatch.setattr(readings, "memory", lambda: dict.fromkeys(steps.BYTES, 0))
    monkeypatch.setattr(readings, "device", dict)
    monkeypatch.setattr(readings, "RECORD", Record())
    monkeypatch.setenv("RANK", "0")
    readings.Readings().built()
    assert not asked
    readings.RECORD.open(tmp_path, "mine", 0)
    readings.Readings().built()
    assert asked and events.read(tmp_path, "mine", source="a hash").other == "source"


def test_a_gpu_is_told_and_whether_any_of_its_memory_grows(monkeypatch):
    """With the setting on, a pool of a graph has whole segments beside those that grow."""
    chip = SimpleNamespace(name="H", uuid="1", pci_domain_id=1, pci_bus_id=0x2A, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: chip)
    for segments, grows in (
        ([], None),
        ([{}], False),
        ([{"is_expandable": True}, {}], True),
        ([{"is_expandable": False}], False),
    ):
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda found=segments: found)
        told = readings.device()
        assert told["expandable"] is grows and told["bus"] == "00000001:2A:03.0" and told["uuid"] != "1"
    del chip.pci_bus_id
    assert readings.device()["bus"] is None


def test_memory_is_read_after_the_first_step_and_whenever_their_number_has_doubled(monkeypatch):
    """Of a run that goes on at step 1000, too: once, and not in each microbatch until it has doubled so far."""
    said = []
    monkeypatch.setattr(readings, "_say", lambda _, step: said.append(step))
    for begun in (0, 1000):
        found = readings.Readings()
        for microbatch in range(80):
            found.step(begun + microbatch // 2)
    assert said == [1, 2, 4, 8, 16, 32, 1000, 1024]


@pytest.mark.slow
def test_a_checkpoint_in_the_background_is_saved_once_it_is_whole(tmp_path):
    words = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=4", "schedule.async_save=true", *SHORT)
    said = told(tmp_path, *words, before=in_background)
    assert [one["event"] for one in of(said, "saving", "scheduled", "saved") if one["step"] == 4] == [
        "saving", "scheduled", "saved",
    ]  # fmt: skip
    assert outcome.of_run(tmp_path, {"nonce": "mine"})["bad_put"]["checkpoints"] >= 1


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [1, 3])
def test_a_nan_is_said_with_its_place(tmp_path, step):
    said = told(tmp_path, *SHORT, before=partial(poison, step, "decoder.layers.2"))
    (end,) = of(said, "end")
    assert (end["reason"], end["code"], end["step"]) == ("not a number", 1, step - 1)
    assert end["where"].startswith(f"step {step}, rank 0: the loss is nan")
    assert verdict(tmp_path, code=1) == ("failed", 1, "torchrun ended with 1: not a number, rank 0")


@pytest.mark.slow
def test_a_gradient_of_one_rank_that_is_no_number_is_the_reason(tmp_path):
    """Megatron wants to save then; where nothing is saved it ended with a TypeError, and so said the receipt."""

    def poisoned() -> None:
        loss = pretrain.loss_func

        def bad(mask, watch, output):
            if torch.distributed.get_rank() == 1 and get_args().curr_iteration == 2:
                output.register_hook(lambda gradient: gradient * math.nan)
            return loss(mask, watch, output)

        pretrain.loss_func = bad

    said = told(tmp_path, *SHORT, "cluster=h200_2", world=2, before=poisoned)
    assert {(end["reason"], end["code"], end["step"]) for end in of(said, "end")} == {("not a number", 1, 2)}
    assert "step 3, rank 1: a gradient is no number" in of(said, "end", rank=1)[0]["where"]


def test_a_loss_that_is_no_number_is_in_its_line(tmp_path, monkeypatch):
    """Megatron's own line leaves it out; and the mean is over the steps that were not skipped."""
    monkeypatch.setattr(record, "last_rank", lambda: True)
    monkeypatch.setattr(record, "memory", dict)
    monkeypatch.setattr(record, "RECORD", Record())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    record.RECORD.open(tmp_path, "mine", 0)
    line = record.Line()
    for losses in ([(2.0, False), (9.0, True), (4.0, False)], [(math.nan, False), (1.0, False)], [(math.inf, True)]):
        for loss, skipped in losses:
            line.add({"lm loss": torch.tensor(loss)}, skipped)
        line.say(6, 3.0, 4e12, of=6)
    said = [json.loads(text) for text in (tmp_path / FILE).read_text().splitlines()]
    names = ("first", "loss", "skipped", "nan", "ms", "tflops")
    assert [[one[name] for name in names] for one in said] == [
        [4, 3.0, 1, 0, 1000.0, 2.0], [5, "nan", 0, 1, 1500.0, 4 / 3], [6, None, 1, 1, 3000.0, 2 / 3],
    ]  # fmt: skip
    figures = outcome.of_run(tmp_path, {"nonce": "mine"})["figures"]
    assert (figures["loss_finite"], figures["nan_steps"], figures["skipped_steps"]) == (False, 1, 1)


@pytest.mark.slow
def test_out_of_memory_is_said_with_its_layer(tmp_path):
    (end,) = of(told(tmp_path, *SHORT, before=partial(full, "decoder.layers.1")), "end")
    assert (end["reason"], end["phase"], end["step"]) == ("out of memory", "forward", 1)
    assert end["layer"].startswith("layer 2 (moe): decoder.layers.1 (")
    (found,) = [oom.of_end(said) for said in events.read(tmp_path, "mine").ends.values()]
    assert (found.tried, found.rank, found.phase, found.kind[0]) == (2.0, 0, "forward", "activation")


@pytest.mark.slow
def test_a_signal_is_said_by_both_ranks_though_one_got_it(tmp_path):
    said = told(tmp_path, *TWO, world=2, before=partial(signal_in, 3, signal.SIGTERM, "1"))
    assert [(one["reason"], one["step"]) for one in of(said, "end")] == [("signal", 3)] * 2
    assert verdict(tmp_path, 2, signals=["SIGTERM"]) == ("interrupted", 1, "SIGTERM; torchrun ended with 0")


@pytest.mark.slow
def test_a_killed_rank_keeps_what_it_said_and_says_no_end(tmp_path):
    said = told(tmp_path, *SHORT, before=partial(signal_in, 4, signal.SIGKILL))
    assert [one["step"] for one in of(said, "step")] == [1, 2, 3] and not of(said, "end")
    assert verdict(tmp_path, code=1)[2].startswith("torchrun ended with 1: no rank")


def test_an_end_that_nothing_was_open_for_is_no_end(tmp_path):
    """A process that is forked off has its own to say."""
    one = Record()
    one.end("refused", 2)
    one.open(tmp_path, "mine", 0)
    one.end("done", 0)
    assert [line["reason"] for line in map(json.loads, (tmp_path / FILE).read_text().splitlines())] == ["done"]


def test_a_refused_plan_is_said(tmp_path):
    said = told(tmp_path, *SHORT, before=lambda: os.environ.pop("PYTORCH_ALLOC_CONF"))
    assert [one["event"] for one in said] == ["start", "end"]
    assert (said[1]["reason"], said[1]["code"]) == ("refused", 2)
    assert verdict(tmp_path, code=1) == ("refused", 2, "a refusal of the trainer's, rank 0")


@pytest.mark.slow
def test_an_error_is_said_by_its_class(tmp_path):
    def breaks() -> None:
        from nam_megatron.runtime import pretrain

        def broken(*_):
            raise ZeroDivisionError("with the user's own words")

        pretrain.forward_step = broken

    (end,) = of(told(tmp_path, *SHORT, before=breaks), "end")
    assert (end["reason"], end["code"], end["error"]) == ("error", 1, "ZeroDivisionError")
    assert "words" not in (tmp_path / FILE).read_text()


def test_a_disk_that_fills_while_a_checkpoint_is_saved_is_the_reason(tmp_path):
    """Megatron raises CheckpointException, whose text has no more than `error: <class 'RuntimeError'>`."""

    def fills() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        shutil.disk_usage = lambda _: SimpleNamespace(free=4096)

    said = told(tmp_path, *SHORT, f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=1", before=fills)
    assert [(one["reason"], one["error"]) for one in of(said, "end")] == [("full disk", "CheckpointException")]
    assert verdict(tmp_path, code=1)[2] == "torchrun ended with 1: the disk of `schedule.save` is full, rank 0"


CheckpointException = type("CheckpointException", (Exception,), {})
NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    ("err", "free", "reason"),
    [
        (CheckpointException("Worker failure"), 0, "full disk"),
        (CheckpointException("Worker failure"), 1 << 30, "error"),
        (CheckpointException(f"Local worker: {NO_SPACE}"), 1 << 30, "full disk"),  # another has made room since
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "ckpt/iter_1"), 1 << 30, "full disk"),
        (OSError(errno.ENOSPC, NO_SPACE, "ckpt"), 1 << 30, "full disk"),
        (OSError(errno.ENOSPC, NO_SPACE, "elsewhere"), 1 << 30, "error"),
        (OSError(errno.ENOSPC, NO_SPACE, "/dev/shm/ckpt_of_others"), 1 << 30, "error"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG), "ckpt/iter_1"), 1 << 30, "error"),  # a limit of this process
        (FileNotFoundError("data"), 0, "error"),
        (ZeroDivisionError(), 0, "error"),
    ],
)
def test_what_a_full_disk_is_blamed_for(tmp_path, monkeypatch, err, free, reason):
    mine = Record()
    mine.open(tmp_path, "mine", 0)
    mine.saves = "ckpt"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(type(err)), mine.ending():
        raise err
    assert json.loads((tmp_path / FILE).read_text())["reason"] == reason


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path):
    (tmp_path / FILE).mkdir()
    (rank,) = run(tmp_path, *SHORT, before=lambda: os.environ.update({NONCE: "mine"}))
    assert rank.code == 2 and rank.err.startswith(f"error: `{FILE}` cannot be written") and not logged([rank])


@pytest.mark.slow
def test_a_gradient_that_was_not_measured_has_no_norm(tmp_path):
    """Without clipping, Megatron-FSDP's optimizer gives 0 for it, and a receipt called that finite."""
    fsdp = ("cluster=h200_2", "parallel.expert=2", "feature.megatron_fsdp.enabled=true", "optim.clip_grad=0.0")
    said = told(tmp_path, *SHORT, *fsdp, world=2, before=lambda: os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None))
    assert {one["grad_norm"] for one in of(said, "step")} == {None}
    assert outcome.of_run(tmp_path, {"nonce": "mine"})["figures"]["grad_norm_finite"] is None
