"""Which runs of a folder go on, and what a person or an alert should look at."""

import json
import os
import time
from dataclasses import asdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.record import receipt, report, status
from launch.record.redact import Redactor
from launch.run import hang
from nam_megatron import events
from nam_megatron.errors import Refused

NONCE = "mine"
JOB = {"world": 2, "train_steps": 50, "tokens_per_step": 4096}


def started(root, steps=3, loss=6.5, beats=(0.0, 0.0), words=("conf=nam56r_smoke", "optim.lr=1e-4")):
    """An open run, as its launcher and two ranks leave it. beats: how many seconds old."""
    run = receipt.open_receipt(root, "x", {"nonce": NONCE, "job": JOB, "words": list(words)}, Redactor({}))
    record = events.Record()
    record.open(run.folder, NONCE, 0)
    record.say("start", world=2)
    for step in range(1, steps + 1):
        record.say(
            "step", step=step, of=50, ms=100.0, loss=loss, grad_norm=1.5, tflops=1.0, skipped=0, nan=0, gauges={}
        )
    record.close()
    (run.folder / "beat").mkdir()
    for rank, age in enumerate(beats):
        beat = {
            "rank": rank, "host": "h7", "pid": 1, "phase": "step", "step": steps, "micro": 4, "spent": None, "nth": steps,
        }  # fmt: skip
        path, at = run.folder / "beat" / str(rank), time.time() - age
        path.write_text(json.dumps({**beat, "at": at}))
        os.utime(path, (at, at))
    return run


def seen(root, **options):
    return [status.status(folder, 60, time.time()) for folder in receipt.folders(root)]


def test_a_run_that_goes_on(tmp_path, capsys):
    run = started(tmp_path)
    (found,) = seen(tmp_path)
    assert (found.state, found.step, found.steps, found.loss, found.why) == ("running", 3, 50, 6.5, None)
    assert found.tokens_per_s_per_gpu == 4096 / 0.1 / 2  # of two GPUs
    assert status.command([str(tmp_path)], {}) == 0
    assert capsys.readouterr().out.startswith(
        f"{run.folder.name}  running  step 3 of 50  100 ms  20480 tokens/s a rank  loss 6.5"
    )


def test_a_rank_that_is_behind_makes_it_silent_and_is_named(tmp_path, capsys):
    started(tmp_path, beats=(0.0, 90.0))
    (found,) = seen(tmp_path)
    assert found.state == "silent" and found.why.startswith("rank 1 on h7 was last at step 3, microbatch 4")
    assert 89 < found.quiet_s < 120
    assert status.command([str(tmp_path)], {"silent": "60"}) == 1
    assert status.command([str(tmp_path)], {"silent": "600"}) == 0


def test_a_clock_that_went_back_hides_no_silence(tmp_path, capsys):
    started(tmp_path, beats=(-3600.0, -3600.0))
    (found,) = seen(tmp_path)
    assert found.why.startswith("the clock of h7 is 3") and "ahead of this one" in found.why
    assert found.bad and status.command([str(tmp_path)], {}) == 1


def test_a_host_whose_clock_is_behind_is_not_silent(tmp_path):
    """The files of both hosts have the time of one file system."""
    run = started(tmp_path, beats=(0.0, 3600.0))
    os.utime(run.folder / "beat" / "1")
    (found,) = seen(tmp_path)
    assert found.state == "running" and found.why is None and 0 <= found.quiet_s < 30


def test_clocks_of_two_hosts_may_be_a_little_apart(tmp_path):
    started(tmp_path, beats=(-40.0, -40.0))
    (found,) = seen(tmp_path)
    assert (found.state, found.why, found.bad) == ("running", None, False) and found.quiet_s < 0


def test_a_rank_that_has_ended_is_not_the_one_that_is_behind(tmp_path):
    run = started(tmp_path, beats=(200.0, 90.0))
    file = run.folder / "beat" / "0"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"phase": "end"}))
    (found,) = seen(tmp_path)
    assert found.why.startswith("rank 1 on h7") and 89 < found.quiet_s < 150


def test_a_pipe_or_a_device_among_the_heartbeats_is_none(tmp_path):
    beats = started(tmp_path).folder / "beat"
    os.mkfifo(beats / "5")
    (beats / "6").symlink_to("/dev/zero")
    assert [one.state for one in seen(tmp_path)] == ["running"]


@pytest.mark.parametrize("change", [{"at": float("nan")}, {"at": float("inf")}, {"host": []}, {"spent": "1"}], ids=str)
def test_what_no_rank_writes_is_no_heartbeat(tmp_path, change):
    """A time that is no number hid a silence, and a host that is no name was a traceback."""
    run = started(tmp_path, beats=(90.0, 90.0))
    os.close(run._lock)
    file = run.folder / "beat" / "0"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (found,) = seen(tmp_path)
    assert 89 < found.quiet_s < 150 and list(hang.beats(run.folder)) == [1]


def test_a_run_without_its_launcher_is_orphaned_and_says_the_next_try(tmp_path):
    os.close(started(tmp_path)._lock)
    before = [(f, f.read_bytes()) for f in tmp_path.rglob("*") if f.is_file()]
    (found,) = seen(tmp_path)
    assert (found.state, found.again) == ("orphaned", "python -m launch run conf=nam56r_smoke optim.lr=1e-4")
    assert found.bad and before == [(f, f.read_bytes()) for f, _ in before]  # nothing was sealed


def test_a_word_that_a_receipt_left_out_makes_no_command(tmp_path):
    os.close(started(tmp_path, words=("conf=/home/me/mine.yaml",))._lock)
    (found,) = seen(tmp_path)
    assert found.again is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_said(tmp_path, capsys, loss):
    started(tmp_path, loss=loss)
    (found,) = seen(tmp_path)
    assert (found.state, found.why) == ("running", "lm loss of step 3 is no number")
    assert status.command([str(tmp_path)], {"format": "json"}) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["loss"] == str(loss) and row.keys() == asdict(found).keys()


def test_a_sealed_run_is_as_its_receipt_says(tmp_path):
    outcome = {
        "figures": {"loss_last": 4.0, "grad_norm_last": 1.0, "window": {"median_ms": 10.0, "tokens_per_s_per_gpu": 5.0}}
    }
    for end in ("completed", "failed"):
        started(tmp_path).seal(
            end, {**outcome, "last_step": 50, "reason": None if end == "completed" else "out of memory, rank 1"}
        )
    good, bad = sorted(seen(tmp_path), key=lambda one: one.state)
    assert (good.state, good.step, good.step_ms, good.again, good.bad) == ("completed", 50, 10.0, None, False)
    assert (bad.state, bad.why, bad.bad) == ("failed", "out of memory, rank 1", False)
    assert bad.again == "python -m launch run conf=nam56r_smoke optim.lr=1e-4"


def test_no_step_that_every_rank_finished_is_step_0(tmp_path):
    """The last line was of step 3, and one rank fell behind."""
    made = started(tmp_path)
    made.seal("failed", {"last_step": 0, "figures": {"last_step": 3, "window": None}})
    (one,) = seen(tmp_path)
    assert one.step == 0
    assert "<b>0</b><span>last step</span>" in report.page([report.Run(receipt.read(made.folder), None, None)])


def test_a_damaged_receipt_hides_no_other(tmp_path):
    run, other = started(tmp_path), started(tmp_path)
    (run.folder / receipt.FILE).write_text("{")
    found = {one.run: one for one in seen(tmp_path)}
    assert found[run.folder.name].state == "unknown" and "is no receipt" in found[run.folder.name].why
    assert found[other.folder.name].state == "running"


def test_prometheus_reads_it(tmp_path, capsys):
    name = started(tmp_path, loss=float("nan")).folder.name
    (tmp_path / (evil := 'a"} 1\nb{c="\\')).mkdir()
    (tmp_path / evil / receipt.FILE).touch()
    status.command([str(tmp_path)], {"format": "prometheus"})
    families = {f.name: f for f in text_string_to_metric_families(capsys.readouterr().out)}
    state, other = families["nam_megatron_run_state"].samples
    assert other.labels == {"run": evil, "state": "unknown"}
    assert state.labels == {"run": name, "state": "running"} and state.value == 1
    assert families["nam_megatron_run_step"].samples[0].value == 3
    loss = families["nam_megatron_run_loss"].samples[0].value
    assert loss != loss


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"format": "xml"}, "format"),
        ({"silent": "0"}, "silent"),
        ({"silent": "x"}, "silent"),
        ({"silent": "0" * 9 + "1"}, "silent"),
        ({"silent": "1000000"}, "silent"),
    ],
)
def test_words_that_mean_nothing(tmp_path, options, key):
    with pytest.raises(Refused) as refused:
        status.command([str(tmp_path)], options)
    assert refused.value.problems[0].key == key


@pytest.mark.parametrize(
    ("micros", "end", "out"),
    [
        ((9, 9, 4, 4), "failed", "--exclude=h2 "),
        ((9, 9, 9, 4), "lost", "--exclude=h2 "),
        ((9, 9, 9, 9), "failed", ""),
        ((9, 4, 9, 4), "failed", ""),  # both hosts were waited for
        ((9, 9, 4, 4), "interrupted", ""),
    ],
)
def test_several_hosts_try_again_without_the_one_that_was_behind(tmp_path, micros, end, out):
    run = started(tmp_path)
    run.record(job={**JOB, "nodes": 2})
    for rank, micro in enumerate(micros):
        beat = {
            "rank": rank,
            "host": f"h{1 + rank // 2}",
            "pid": 1,
            "phase": "step",
            "step": 3,
            "spent": None,
            "nth": 3,
        }
        (run.folder / "beat" / str(rank)).write_text(json.dumps({**beat, "micro": micro, "at": time.time()}))
    run.seal(end, {"reason": "x"})
    (found,) = seen(tmp_path)
    show = "python -m launch show format=sbatch conf=nam56r_smoke optim.lr=1e-4 > job.sh"
    assert found.again == f"{show} && sbatch {out}job.sh"


def test_what_is_open_comes_first_and_of_what_ended_the_newest():
    ended = [status.Status(run=f"{n:02d}", state="completed") for n in range(14)]
    told = status.text([*ended[:7], status.Status(run="mine", state="running"), *ended[7:]]).splitlines()
    assert [line.split()[0] for line in told[:3]] == ["mine", "13", "12"] and "and 4 more that ended" in told[-1]
