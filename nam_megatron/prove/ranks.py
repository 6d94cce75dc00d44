"""A job on the ranks of one host, as torchrun would start them (torch side)."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h


@dataclass(frozen=True)
class Rank:
    """How one rank ended: its exit code and what it printed. late: it was stopped at the limit, and `err` ends with where it was."""

    code: int
    out: str
    err: str
    late: bool = False


def fork(world: int, job: Callable[[], int | None], limit_s: float = 180.0, device: str = "cpu") -> list[Rank]:
    """`job`'s exit code (None is 0) and output on each rank. A rank that fails ends the others, as under torchrun.

    On a CPU a rank is a fork of this process, which has paid for the imports, and may be given any function. CUDA outlives no fork: there
    a rank is a new process, and `job` has to be picklable.
    """
    from torch.distributed import TCPStore

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        gc.freeze()  # a fork that looks for garbage among what it inherits copies every page of it
        ports = context.SimpleQueue()
        more = (world, ports, Path(folder), device)
        children = [context.Process(target=_child, args=(job, rank, *more)) for rank in range(world)]
        ending.callback(_kill, children)  # also where Ctrl-C or SIGTERM ends this: the interpreter would wait for them
        for child in children:
            child.start()
        # Held here, as torchrun's agent does: a port that is free now and taken by rank 0 later may be somebody's by then. And after the
        # forks: the store answers from a thread, and what a thread has locked in libc while a fork is made stays locked in the child.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in children:
            ports.put(store.port)
        waiting, end = list(children), time.monotonic() + limit_s
        while waiting and time.monotonic() < end:
            multiprocessing.connection.wait([c.sentinel for c in waiting], 1)
            if any(c.exitcode for c in children):
                for child in waiting:
                    child.join(3)  # time for a message of its own
                break
            waiting = [c for c in waiting if c.is_alive()]
        late = [time.monotonic() >= end and child.is_alive() for child in children]
        for child, slow in zip(children, late, strict=True):
            if slow and child.pid:
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(any(late))  # a second to say where it is
        _kill(children)  # all, before one of them hears that another is gone
        for child in children:
            child.join()
        read = [[(Path(folder) / f"{r}.{name}").read_text() for name in ("out", "err")] for r in range(world)]
        return [Rank(child.exitcode, *texts, slow) for child, texts, slow in zip(children, read, late, strict=True)]


def _kill(children: Iterable[BaseProcess]) -> None:
    for child in children:
        if child.pid:
            child.kill()


def _child(job: Callable[[], int | None], rank: int, world: int, ports: Any, folder: Path, device: str) -> None:
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    # A rank whose parent was killed would wait for the others until a collective times out.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    port = ports.get()
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ |= dict(PYTORCH_ALLOC_CONF="expandable_segments:True")
    code = 1
    try:
        with machine(device):
            code = job() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Megatron's checkpoint writer keeps a manager process, which only the interpreter's regular end would stop.
    for started in multiprocessing.active_children():
        started.kill()
    os._exit(code)


def machine(device: str) -> contextlib.AbstractContextManager[None]:
    """What a rank runs on. Imported here: on a GPU the libraries must not be, before the environment is as the plan has it."""
    if device == "cuda":
        return contextlib.nullcontext()
    from nam_megatron.prove.cpu import pretended

    return pretended()
