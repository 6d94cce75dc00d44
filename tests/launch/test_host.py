"""/proc and /sys: of this machine with real processes, and of others as folders."""

import os
import resource
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.host import linux
from launch.run.process import LONGEST, Process

SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def child():
    """Start processes that live as long as the test."""
    started = []

    def start(*words, **more):
        process = subprocess.Popen([sys.executable, "-c", SLEEP, *words], stdout=subprocess.PIPE, **more)
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("said", "level"), [("0\n", "ok"), ("1\n", "fail"), ("2", "fail"), (None, "fail"), ("", "fail"), ("x", "fail")]
)
def test_numa(said, level):
    assert linux.numa(said).level == level


@pytest.mark.parametrize(
    "word",
    [
        "nam_megatron.train", "nam_megatron.torchrun", "torch.distributed.run",
        "torch.distributed.launch", "torchrun", "/usr/bin/torchrun", "/w/pretrain_gpt.py",
        "finetune_gpt.py", "megatron.training.x",
    ],
)  # fmt: skip
def test_training_that_runs_is_named_and_lives_on(child, word):
    process = child(word)
    found = linux.stale(linux.processes(), os.getpid())
    assert found.level == "fail" and f"PID {process.pid} ({word.rsplit('/', 1)[-1]})" in found.message
    assert process.poll() is None


def test_ones_own_launcher_is_not_stale(child):
    """A check that a training's launcher started looks at everybody but that line."""
    running = [
        linux.Process(10, 1, ("torchrun",)),
        linux.Process(11, 10, ("sh",)),
        linux.Process(12, 11, ("python", "-m", "launch")),
    ]
    assert linux.stale(running, 12).level == "ok" and linux.stale(running[:1], 12).level == "fail"
    process = child("torch.distributed.run")
    assert {process.pid, os.getpid()} <= linux.ancestors(linux.processes(), process.pid)


def test_a_word_within_a_word_is_no_training(child):
    process = child("--note=nam_megatron.train", "nam_megatron.trainer")
    assert f"PID {process.pid} " not in linux.stale(linux.processes(), os.getpid()).message


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_holds_the_port_is_named(family):
    with socket.socket(family) as listener:
        try:
            listener.bind(("", 0))
        except OSError:
            assert family == socket.AF_INET6, "IPv4 is everywhere"
            return
        port = listener.getsockname()[1]
        assert linux.port_free(port).level == "ok"  # bound is not yet listening
        listener.listen()
        found = linux.port_free(port)
        assert found.level == "fail" and f"port {port} is in use by PID {os.getpid()}" in found.message
    assert linux.port_free(port).level == "ok"


def test_a_connection_is_no_listener():
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:733C 0100007F:A1B2 {} 00000000:00000000 00:00000000 00000000     0        0 4242 1 0\n"
    assert linux.listening(head + row.format("0A"), 29500) == {"4242"}
    assert linux.listening(head + row.format("01"), 29500) == set() == linux.listening(head + row.format("0A"), 29501)


def test_a_host_whose_sockets_cannot_be_read(tmp_path):
    assert "cannot be read" in linux.port_free(29500, tmp_path).message


def test_infiniband_ports(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    ports = linux.infiniband(tmp_path)
    assert ports["mlx5_1/1"] == {"state": "1: DOWN", "rate": "400 Gb/sec (4X NDR)", "link_layer": "unknown"}
    assert linux.network(ports, 2).level == "ok" and linux.network(ports, 2).message.startswith("1 of 2")
    down = {"mlx5_1/1": ports["mlx5_1/1"]}
    assert (linux.network(down, 2).level, linux.network(down, 1).level, linux.network({}, 1).level) == (
        "fail",
        "note",
        "note",
    )


def test_facts_carry_no_name_of_this_host():
    known = linux.facts()
    assert known["cpus"] and known["memory_gib"] > 0
    assert socket.gethostname() not in str(known) and "-" not in known["kernel"]


HEX = st.sampled_from(["0100007F:733C", "00000000:733C", ":733C", "0A", "01", "", "12345", "x", "\x00"])


@given(st.lists(st.lists(HEX, max_size=12).map(" ".join), max_size=5).map("\n".join) | st.text(), st.integers(1, 65535))
def test_no_socket_table_ends_in_a_traceback(table, port):
    linux.listening(table, port)


XIDS = """[   12.0] nvidia: loading
[ 4711.1] NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.
[ 4712.1] NVRM: Xid (PCI:0000:2a:00): 31, pid=2, name=python
[ 4713.1] NVRM: Xid (PCI:0000:2a:00): 31, pid=2, name=python
"""


@pytest.mark.parametrize(
    ("said", "level", "message"),
    [
        (XIDS, "fail", "Xid 79 on 0000:18:00, 31 on 0000:2a:00 (2 times)"),
        (XIDS.replace("79", "43"), "note", "programs failed"),
        ("[ 1.0] nothing of it", "ok", "no errors"),
        (None, "note", "cannot be read"),
    ],
)
def test_errors_of_gpus_in_the_kernels_log(said, level, message):
    found = linux.xid(said)
    assert found.level == level and message in found.message


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("nodes", "files", "locked", "expected"),
    [
        (1, (1 << 20, 1 << 20), (65536, 65536), [("ok", "open files")]),
        (1, (INFINITE, INFINITE), (INFINITE, INFINITE), [("ok", "open files")]),
        (1, (1024, 4096), (INFINITE, INFINITE), [("fail", "4096 open files at most")]),
        (1, (1024, 1 << 20), (INFINITE, INFINITE), [("note", "1024 open files; `run` raises it")]),
        (2, (1 << 20, 1 << 20), (65536, 8 << 20), [("fail", "8192 KiB of locked memory at most")]),
        (2, (1 << 20, 1 << 20), (65536, INFINITE), [("ok", "open files")]),
    ],
)
def test_limits_of_a_process(nodes, files, locked, expected):
    found = list(linux.limits(nodes, files, locked))
    assert [f.level for f in found] == [level for level, _ in expected]
    assert all(f.message.startswith(message) for f, (_, message) in zip(found, expected, strict=True))


def test_the_ranks_get_all_open_files_that_are_allowed(tmp_path):
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        started = Process([sys.executable, "-c", code], os.environ, tmp_path)
        ((line,),) = started.lines()
        started.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert line == f"{hard} {hard}"


def test_a_line_that_is_too_long_is_cut_behind_a_word():
    """A secret in two halves is found in neither."""
    started, (there, here) = object.__new__(Process), os.pipe()
    with open(there, "rb") as pipe, open(here, "wb", buffering=0) as says:
        vars(started).update(_pipe=pipe, _popen=SimpleNamespace(poll=lambda: None))
        lines, long = started.lines(), b"x " * (LONGEST // 2 - 2)
        says.write(long + b"key-")
        assert next(lines) == [long.decode()]
        says.write(b"of-two\n" + b"y" * (LONGEST - 7))
        assert next(lines) == ["key-of-two"]
        says.write(b"yyyyyyyy")  # one word
        assert next(lines) == ["y" * (LONGEST + 1)]


def test_a_line_that_comes_in_pieces_is_one():
    started, (there, here) = object.__new__(Process), os.pipe()
    with open(there, "rb") as pipe, open(here, "wb", buffering=0) as says:
        vars(started).update(_pipe=pipe, _popen=SimpleNamespace(poll=lambda: None))
        lines, found = started.lines(), []
        for piece in (b"one\ntw", b"o\n\nth", b"ree\nfour"):
            says.write(piece)
            found.append(next(lines))
        says.close()
        assert [*found, *lines] == [["one"], ["two", ""], ["three"], ["four"]]


def test_nothing_goes_on_behind_a_launcher_that_fails(tmp_path):
    with pytest.raises(OSError, match="no beat"), Process(["sleep", "60"], os.environ, tmp_path) as started:
        raise OSError("no beat")
    assert started.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("told", "first"), [(0, []), (1, [(signal.SIGTERM, [5])])])
def test_ranks_of_several_hosts_hear_of_an_end_by_slurm_and_then_srun_does(told, first, monkeypatch):
    """Asked once more, a launcher is to be heard whatever Slurm says."""
    started, sent = object.__new__(Process), []
    vars(started).update(_popen=SimpleNamespace(pid=5, poll=lambda: None), _srun=True, _asked=0, _job="7", _environ={})
    monkeypatch.setattr("launch.run.process.send", lambda number, pids: sent.append((number, [*pids])))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=told))
    monkeypatch.setattr(Process, "_descendants", lambda _: [6])
    for _ in range(3):
        started.end()
    assert sent == [*first, (signal.SIGTERM, [5]), (signal.SIGKILL, [5, 6])]


def test_shared_memory(tmp_path, monkeypatch):
    assert linux.shm(8, tmp_path / "none").level == "fail"
    for free, level in ((64 << 20, "fail"), (8 << 30, "ok")):  # a container's 64 MiB
        monkeypatch.setattr(linux.os, "statvfs", lambda _, f=free: SimpleNamespace(f_bavail=f >> 12, f_frsize=4096))
        assert linux.shm(8).level == level


def test_a_lock_that_a_killed_compiler_left_is_named(tmp_path):
    """Where torch says that it locks: what it would wait for is what is found."""
    from torch.utils import cpp_extension
    from torch.utils.file_baton import FileBaton

    for environ in (
        {"TORCH_EXTENSIONS_DIR": str(tmp_path / "named")},
        {"HOME": str(tmp_path)},
        {"HOME": "/none", "XDG_CACHE_HOME": str(tmp_path / "xdg")},
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
                patch.delenv(name, raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            folder = cpp_extension._get_build_directory("share_storage_ext", verbose=False)
        assert linux.compiling(environ).level == "ok"
        baton = FileBaton(f"{folder}/lock")
        assert baton.try_acquire()
        found = linux.compiling(environ)
        assert found.level == "fail" and f"`{folder}/lock`" in found.message
        baton.release()


@pytest.mark.parametrize(
    ("nodes", "state", "level"),
    [
        (2, (5, 0x40, 16_000_000), "fail"),
        (2, (0, 0x40, 0), "fail"),
        (1, (5, 0x40, 0), "note"),
        (2, (0, 1, 3000), "ok"),
        (2, (-1, 0, 0), "note"),
    ],
)
def test_a_clock_that_nobody_synchronises(nodes, state, level):
    assert linux.clock(nodes, state).level == level


def test_this_machines_clock_can_be_read():
    returned, status, error = linux._adjtimex()
    assert -1 <= returned <= 5 and 0 <= status < 1 << 16 and error >= 0
