"""Hangs, each with an injected fault: processes that are really stopped, busy, gone; and a launcher that ends such a run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_run import Launcher, appears, gone

from launch.record import receipt
from launch.run import hang

NO_TIME = (
    b'{"rank": 0, "host": "h", "pid": 1, "phase": "step", "step": 1, "micro": 1, "spent": 0.1, "at": NaN, "nth": 1}'
)
SLEEP, SPIN = "import time; time.sleep(60)", "while True: pass"


@pytest.fixture
def ranks(tmp_path):
    """ranks(code, ...): a process for each, and a beat that says `step 5` for it; `with_` changes the beat of a rank."""
    started = []
    (tmp_path / hang.FOLDER).mkdir()

    def start(*codes: str, with_: dict[int, dict] | None = None) -> list[subprocess.Popen]:
        for rank, code in enumerate(codes):
            started.append(subprocess.Popen([sys.executable, "-c", code]))
            beat = {
                "rank": rank, "host": os.uname().nodename, "pid": started[-1].pid, "phase": "step", "step": 5, "micro": 40, "nth": 5,
            }  # fmt: skip
            beat |= {"spent": 0.1, "at": time.time()} | (with_ or {}).get(rank, {})
            (tmp_path / hang.FOLDER / str(rank)).write_text(json.dumps(beat))
        time.sleep(0.5)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def found(folder: Path, world: int) -> hang.Hang:
    known = hang.beats(folder)
    pids = [b.pid for b in known.values()]
    before = hang.look(pids)
    time.sleep(0.5)
    return hang.triage(known, world, before, hang.look(pids), 0.5)


def test_a_process_has_the_time_of_those_below_it_and_of_those_that_have_ended(tmp_path):
    """Compilers come and go between two looks."""
    for pid, parent, name in ((7, 1, "python"), (8, 7, "sh) ("), (9, 8, "ptxas"), (10, 1, "ptxas")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {'0 ' * 9}100 200 300 400 0")
    tick = os.sysconf("SC_CLK_TCK")
    assert hang.look([7, 11], tmp_path) == {7: hang.Look("S", 3000 / tick, ("ptxas",)), 11: hang.Look(None, 0)}


def test_a_rank_that_never_came(ranks, tmp_path):
    ranks(
        SLEEP, SLEEP, with_={0: {"phase": "start", "step": 0, "micro": 0}, 1: {"phase": "start", "step": 0, "micro": 0}}
    )
    said = found(tmp_path, 4)
    assert (said.kind, said.ranks) == ("bootstrap", (2, 3))
    assert "2 of 4 ranks never came: 2, 3" in said.text


def test_ranks_that_do_not_meet(ranks, tmp_path):
    start = {"phase": "start", "step": 0, "micro": 0}
    ranks(SLEEP, SLEEP, with_={0: start, 1: start})
    assert found(tmp_path, 2).kind == "bootstrap"
    assert hang.triage({}, 2, {}, {}, 1).text.startswith("no rank has come")


@pytest.mark.parametrize(
    ("nth", "kind", "ranks"),
    [((2, 2), "compile", (0,)), ((2, 3), "stopped", (0,)), ((3, 2), "stopped", (1,)), ((3, 3), "waiting", (0, 1))],
)
def test_autotuning_is_told_by_the_processor_time_of_first_steps(nth, kind, ranks):
    """Of a run that goes on from a checkpoint. One that waits in a later step spins as much as one that tunes."""
    here = os.uname().nodename
    known = {rank: hang.Beat(rank, here, rank + 1, "step", 100 + n, n, None, 0.0, n) for rank, n in enumerate(nth)}
    before, after = {1: hang.Look("R", 7.0), 2: hang.Look("S", 3.0)}, {1: hang.Look("R", 9.0), 2: hang.Look("S", 3.5)}
    said = hang.triage(known, 2, before, after, 5.0)
    assert (said.kind, said.ranks) == (kind, ranks)


def test_a_compiler_is_named(ranks, tmp_path):
    """A child of a rank, by its name in /proc."""
    (tmp_path / "ptxas").symlink_to("/bin/sleep")
    child = f"import subprocess; subprocess.run([{str(tmp_path / 'ptxas')!r}, '60'])"
    _, of = ranks(SLEEP, child, with_={r: {"phase": "built", "step": 0, "micro": 0} for r in (0, 1)})
    for _ in range(600):  # however busy the machine
        if "ptxas" in hang.look([of.pid])[of.pid].tools:
            break
        time.sleep(0.1)
    said = found(tmp_path, 2)
    assert (said.kind, said.ranks) == ("compile", (1,)) and "rank 1: ptxas" in said.text
    subprocess.run(["true"], check=True)
    os.system(f"kill $(pgrep -P {hang.beats(tmp_path)[1].pid})")


@pytest.mark.parametrize("fault", ["stopped", "a zombie"])
def test_a_rank_that_stopped_is_named_with_its_state(ranks, tmp_path, fault):
    processes = ranks(SLEEP, SLEEP, SLEEP)
    if fault == "stopped":
        processes[1].send_signal(signal.SIGSTOP)
    else:
        processes[1].kill()  # and nobody waits for it
    said = found(tmp_path, 3)
    assert (said.kind, said.ranks) == ("stopped", (1,)) and fault in said.text


def test_a_rank_whose_number_is_now_anothers_is_gone(ranks, tmp_path):
    born = hang.look([os.getpid()])[os.getpid()].born
    ranks(SLEEP, SLEEP, with_={0: {"pid": os.getpid(), "born": born}, 1: {"born": 1}})
    said = found(tmp_path, 2)
    assert (said.kind, said.ranks) == ("stopped", (1,)) and "is gone" in said.text


def test_a_rank_that_is_behind_is_named_while_the_others_spin(ranks, tmp_path):
    """As NCCL does while it waits."""
    ranks(SPIN, SLEEP, with_={1: {"micro": 39}})
    said = found(tmp_path, 2)
    assert (said.kind, said.ranks) == ("stopped", (1,))
    assert "rank 1 is behind, at step 5, microbatch 39" in said.text and "microbatch 40" in said.text


def test_all_at_one_place_wait(ranks, tmp_path):
    ranks(SLEEP, SLEEP)
    assert found(tmp_path, 2).kind == "waiting"


def test_processes_of_another_host_are_not_taken_for_ours(ranks, tmp_path):
    ranks(SLEEP, SLEEP, with_={1: {"host": "another", "pid": 2**22 - 1}})
    assert found(tmp_path, 2).kind == "waiting"


def test_a_steady_skew_names_the_slow_rank(ranks, tmp_path):
    ranks(SLEEP, SLEEP, SLEEP, with_={2: {"spent": 0.13}})
    said = hang.skew(hang.beats(tmp_path))
    assert said.ranks == (2,) and "rank 2 takes 130 ms of its own a microbatch, the others 100" in said.text
    assert any("skew: rank 2" in line for line in hang.report(tmp_path, 3, 0.1))


@pytest.mark.parametrize("spent", [{}, {0: 0.1}, {0: 0.1, 1: 0.11, 2: 0.1}, {0: None, 1: None}])
def test_no_skew_is_found_where_there_is_none(spent):
    beats = {r: hang.Beat(r, "h", 1, "step", 9, 9, v, 1.0, 9) for r, v in spent.items()}
    assert hang.skew(beats) is None


def test_a_slow_rank_is_measured_against_the_others_alone():
    """Of two, the median of both would lie half way to the slow one."""
    beats = {r: hang.Beat(r, "h", 1, "step", 9, 9, v, 1.0, 9) for r, v in {0: 0.1, 1: 0.124}.items()}
    assert hang.skew(beats).ranks == (1,)


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"{}", b"[" * 9999, b'{"rank": 0}', b"null", NO_TIME])),
        max_size=4,
    )
)
def test_a_torn_beat_is_none(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("beats")
    (folder / hang.FOLDER).mkdir()
    for rank, text in enumerate(texts):
        (folder / hang.FOLDER / str(rank)).write_bytes(text)
    assert hang.beats(folder) == {}


def test_a_launcher_ends_a_run_that_hangs_and_says_which_rank(tmp_path):
    """Below a real torchrun: one of two ranks is stopped in its third step."""
    root, mark = tmp_path / "receipts", f"touch={tmp_path}/running"
    launcher = Launcher.start(
        root, f"steps=500 sleep=0.1 beat=3 {mark}", "hang=40", "cluster=h200_2", STAND_IN_RANKS="2"
    )
    appears(tmp_path / "running")
    assert launcher.wait() == 1
    outcome = launcher.receipt["outcome"]
    assert outcome["end"] == "failed"
    # Where memory is short the other rank may be in the kernel at that moment, and is named, too.
    other = r"(rank 0 \(PID \d+\) is in the kernel, uninterruptible, )?"
    said = re.match(rf"it hung: stopped: {other}rank 1 \(PID \d+\) is stopped, at step (\d+)", outcome["reason"])
    assert said and (said[1] or said[2] == "3"), outcome["reason"]
    assert gone(mark)


def test_a_run_that_only_takes_long_is_not_ended_and_one_that_hangs_is_as_often_as_it_takes(tmp_path):
    def beat(rank: int, phase: str, micro: int) -> None:
        said = {
            "rank": rank, "host": "h", "pid": 1, "phase": phase, "step": 1, "micro": micro, "spent": None, "at": 1.0, "nth": 1,
        }  # fmt: skip
        (tmp_path / hang.FOLDER / f".{rank}").write_text(json.dumps(said))
        (tmp_path / hang.FOLDER / f".{rank}").replace(tmp_path / hang.FOLDER / str(rank))

    ended = threading.Event()
    calls = []
    with hang.Watch(tmp_path, 2, 0.8, lambda: calls.append(1) or (len(calls) > 1 and ended.set()), 0.1) as watch:
        beat(0, "end", 9)  # it has ended, and waits for the other
        for micro in range(20):  # longer than a look at the limit and another to say why
            beat(1, "step", micro)
            time.sleep(0.1)
        assert not calls and watch.found is None
        assert ended.wait(1200)
    assert watch.found.kind == "stopped" and watch.found.ranks == (1,) and not watch.is_alive()
    with hang.Watch(tmp_path, 2, 0, calls.clear) as watch:  # no limit
        assert not watch.is_alive()
    assert calls


def test_a_host_that_slept_is_no_hang(tmp_path, monkeypatch):
    """As `scontrol suspend` and a paused container have it: no process ran in that time, and a step that was begun takes its time."""
    passed, over, looks = [0.0], threading.Event(), []

    def beats(folder: Path) -> dict[int, hang.Beat]:
        looks.append(1)
        passed[0] += 10_000 if len(looks) == 3 else 0.1
        if len(looks) == 8:
            over.set()
        return {0: hang.Beat(0, "h", 1, "step", 1, max(len(looks) - 4, 0), None, 1.0, 3)}

    monkeypatch.setattr(hang, "beats", beats)
    monkeypatch.setattr(hang.time, "monotonic", lambda: passed[0])
    with hang.Watch(tmp_path, 1, 1.0, over.set) as watch:
        assert over.wait(1200)
    assert watch.found is None and len(looks) >= 8


def test_a_rank_that_never_comes_is_a_hang(tmp_path):
    ended = threading.Event()
    with hang.Watch(tmp_path, 1, 0.1, ended.set) as watch:
        assert ended.wait(1200)
    assert watch.found.kind == "bootstrap"


@pytest.mark.slow
def test_inspect_shows_the_beats_of_a_live_run(tmp_path):
    launcher = Launcher.start(tmp_path / "receipts", f"steps=60 sleep=0.2 beat=99 touch={tmp_path}/running")
    appears(tmp_path / "running")
    time.sleep(1)
    from launch.run import inspect

    (folder,) = receipt.folders(tmp_path / "receipts")
    text = "\n".join(inspect.report(folder, receipt.read(folder), 1))
    assert "heartbeats:\n  rank 0: step" in text
    launcher.signal(signal.SIGTERM)
    launcher.wait()
