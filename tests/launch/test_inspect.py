"""inspect on real processes: found by their plan, looked at, and left alone."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
from hosts import nvidia_smi, process, program, smi

from launch.record import receipt
from launch.record.redact import Redactor
from launch.run import inspect
from nam_megatron import events
from nam_megatron.errors import Refused

SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def run(tmp_path):
    """A folder with an open receipt."""
    opened = receipt.open_receipt(tmp_path / "receipts", "nam56r_smoke", {}, Redactor({}))
    yield opened.folder
    os.close(opened._lock)


@pytest.fixture
def start(run):
    """Start processes as torchrun does; they live as long as the test."""
    started = []

    def start(rank, folder=run, **environ):
        words = [sys.executable, "-c", SLEEP, "--nam-plan", str(folder / receipt.PLAN)]
        known = {**os.environ, **environ} | ({} if rank is None else {"RANK": str(rank)})
        child = subprocess.Popen(words, stdout=subprocess.PIPE, env=known)
        child.stdout.readline()
        started.append(child)
        return child

    yield start
    for child in started:
        assert child.poll() is None, "inspect ended a process"
        child.kill()
        child.wait()
        child.stdout.close()


def said(folder, seconds=5):
    return "\n".join(inspect.report(folder, receipt.read(folder), seconds))


def test_the_processes_of_this_run_and_no_other(run, start, tmp_path):
    launcher, one, zero = start(None), start(1), start(0)
    start(0, folder=tmp_path / "another")
    # the run may have been started by one of two names, and be asked for by the other
    (tmp_path / "link").symlink_to(run)
    for name in (run, tmp_path / "link"):
        assert [(r.pid, r.rank) for r in inspect.ranks(name)] == [(launcher.pid, None), (zero.pid, 0), (one.pid, 1)]


def test_what_a_rank_forked_is_no_rank(run):
    """A data loader's workers have the rank's command line and environment."""
    words = [sys.executable, "-c", f"import os; os.fork(); {SLEEP}", "--nam-plan", str(run / receipt.PLAN)]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "RANK": "0"}, start_new_session=True)
    try:
        rank.stdout.readline(), rank.stdout.readline()
        (found,) = inspect.ranks(run)
        assert found.pid == rank.pid and len(found.workers) == 1
        text = said(run)
        assert text.count("rank 0, PID") == 1 and f"rank 0, its workers {found.workers[0]}" in text
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        rank.stdout.close()


def test_without_py_spy_it_says_how_to_get_it_and_reads_the_kernels_view(run, start, tmp_path, monkeypatch):
    child = start(0)
    while "S (sleeping)" not in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.01)
    monkeypatch.setenv("PATH", str(tmp_path))
    text = said(run)
    assert f"rank 0, PID {child.pid}" in text and "pip install py-spy" in text
    assert "State S (sleeping), Threads 1" in text and "VmRSS" in text
    assert "cannot be started" in text  # nvidia-smi


def test_py_spy_is_asked_once_a_rank_without_pausing_it(run, start, tmp_path, monkeypatch):
    start(0), start(1)
    program(tmp_path / "bin", "py-spy", f'echo "$@" >> {tmp_path}/asked; echo "Thread 1 (idle): MainThread"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert said(run).count("Thread 1 (idle): MainThread") == 2
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and all(line.startswith("dump --nonblocking --pid ") for line in asked)


def test_a_py_spy_that_hangs_or_fails_is_bounded_and_the_kernel_is_read(run, start, tmp_path, monkeypatch):
    start(0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    program(tmp_path / "bin", "py-spy", "sleep 1200")
    began = time.monotonic()
    text = said(run, 1)
    assert time.monotonic() - began < 900 and "py-spy: no answer within 1 s" in text and "State S" in text
    program(
        tmp_path / "bin",
        "py-spy",
        "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1",
    )
    text = said(run, 1)
    assert "py-spy: exit code 1, Error: Permission Denied" in text and "State S" in text


def test_a_process_that_has_gone():
    child = subprocess.Popen(["true"])
    child.wait()
    assert list(inspect.kernel(child.pid)) == ["gone"]


def test_the_flight_recorder_is_asked_through_its_pipe(run, start, tmp_path):
    """A rank of torch reads its pipe and writes its last collectives; a thread does so here."""
    stem, dump = tmp_path / "ask_", tmp_path / "dump_"
    os.mkfifo(f"{stem}0.pipe")
    reader = os.open(f"{stem}0.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def rank():
        while True:
            try:
                if os.read(reader, 10):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.05)
        (tmp_path / "dump_0").write_bytes(b"pickle")

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    names = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(stem), "TORCH_FR_DUMP_TEMP_FILE": str(dump)}
    start(0, **names), start(1, **names)
    text = said(run, 2)
    thread.join(5)
    os.close(reader)
    assert f"rank 0: {dump}0" in text and "rank 1: no dump within 2 s" in text and "torchfrtrace" in text


def test_a_recorder_that_is_not_armed_says_how(run, start):
    start(0)
    assert "not armed" in said(run, 1) and inspect.PIPE in said(run, 1)


def test_memory_of_each_rank(run, start, tmp_path, monkeypatch):
    child = start(0)
    report = smi(2, processes=process(child.pid, mib="100000 MiB") + process(1, "/opt/x"), used="101000 MiB")
    nvidia_smi(tmp_path / "bin", report, "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    text = said(run, 2)
    assert f"GPU 0: 101000 of 143771 MiB; rank 0 (PID {child.pid}) 100000 MiB, x (PID 1) 4242 MiB" in text
    assert "GPU 1: 0 of 143771 MiB; no process to be seen" in text


def test_a_dead_run_is_read_from_its_log(run):
    (run / receipt.LOG).write_text(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. x\n"
    )
    text = said(run)
    assert "none on this host" in text and "stacks:" not in text and "line 1: rank 0" in text and "tried 2.00" in text


def test_out_of_memory_is_read_from_the_events(run):
    """What the log says of it may be another run's; what only a library knows stands there alone."""
    log = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.00 GiB. x\n"
    (run / receipt.LOG).write_text(log)
    record = events.Record()
    record.open(run, "mine", 1)
    record.say("start", world=2)
    assert next(inspect.errors(run, "mine")) == "no rank says so; by the log:" and "rank 3" in "".join(
        inspect.errors(run, "mine")
    )
    text = "CUDA out of memory. Tried to allocate 2.00 GiB"
    record.done = 4
    record.end("out of memory", 1, phase="backward", layer="layer 5 (moe): decoder.layers.4 (A)", error=text)
    first, *rest = inspect.errors(run, "mine")
    assert first == "rank 1, backward of layer 5 (moe): decoder.layers.4 (A), after step 4: activation"
    assert rest[0] == "  GiB: tried 2.00"


@pytest.mark.slow
def test_a_long_log_is_not_held_in_memory(run):
    """460 MB took 1.2 GB. Here one of 40 MB, with an error at its end, and a line that never ends."""
    with open(run / "log.txt", "w") as log:
        log.write("x" * (8 << 20) + "\n")
        for _ in range(1 << 18):
            log.write("y" * 127 + "\n")
        log.write("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    tracemalloc.start()
    text = "\n".join(inspect.errors(run, None))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert "rank 3" in text


def test_a_run_is_found_by_the_beginning_of_its_name(run, monkeypatch):
    root = run.parent
    assert inspect.find(run.name[:20], root) == run == inspect.find(str(run), root)
    with pytest.raises(Refused, match="no run `nothing`"):
        inspect.find("nothing", root)
    with monkeypatch.context() as closed, pytest.raises(Refused, match=f"`{root}` cannot be looked into"):
        closed.setattr(os, "scandir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        inspect.find(f"{root}/{run.name[:20]}", root.parent)  # there may be one
    other = receipt.open_receipt(root, "nam56r_smoke", {}, Redactor({}))
    os.close(other._lock)
    with pytest.raises(Refused, match="2 runs are called `2"):
        inspect.find("2", root)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["inspect"], "which run?"),
        (["inspect", "a", "b"], "which run?"),
        (["inspect", "a", "seconds=0"], "`0` is no number from 1 to 600"),
        (["inspect", "a", "receipts=/nowhere"], "no run `a`"),
        (["inspect", "/"], "is no receipt"),
    ],
)
def test_the_command(words, error):
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, cwd=inspect.RECEIPTS.parent
    )
    assert done.returncode == 2 and error in done.stderr and "Traceback" not in done.stderr
