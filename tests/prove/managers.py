"""A rank's work with managers, in a module of its own: a spawned rank imports it, and would import torch and Megatron with the tests."""

import multiprocessing
import os
import time
from pathlib import Path


def with_managers(folder, other, then):
    """A rank with managers, forked as on a CPU and spawned as on a GPU, whose ids it writes into a file."""
    if os.environ["RANK"] == "1":
        while not (folder / "0.pids").exists():
            time.sleep(0.01)
        return other()
    managers = [multiprocessing.get_context(method).Manager() for method in ("fork", "spawn")]
    (folder / "pids").write_text(" ".join(str(manager._process.pid) for manager in managers))
    (folder / "pids").rename(folder / "0.pids")
    return then()


def fails():
    return 7


def waits():
    time.sleep(600)


def ends():
    return 0


def gone(folder) -> bool:
    """Whether those managers have ended: one that its new parent has not waited for has, too."""

    def ended(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    pids = (folder / "0.pids").read_text().split()
    assert len(pids) == 2
    until = time.monotonic() + 10
    while not all(map(ended, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return all(map(ended, pids))
