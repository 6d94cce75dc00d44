"""A job on the ranks of one host, as torchrun would start them (torch side)."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h
# What a person, `timeout` and a terminal that closes end a command with.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    with undisturbed() as came, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        gc.freeze()  # a fork that looks for garbage among what it inherits copies every page of it
        ports = context.SimpleQueue()
        more = (world, ports, Path(folder), device)
        children = [context.Process(target=_child, args=(job, rank, *more)) for rank in range(world)]
        for rank in range(world):  # one that the limit meets before it has begun has said nothing
            for name in ("out", "err"):
                (Path(folder) / f"{rank}.{name}").touch()
        ending.callback(_kill, children)  # also where an error ends this: the interpreter would wait for them
        for rank, child in enumerate(children):
            with contextlib.nullcontext() if device == "cpu" else _printing(Path(folder), rank):
                child.start()
        # Held here, as torchrun's agent does: a port that is free now and taken by rank 0 later may be somebody's by then. And after the
        # forks: the store answers from a thread, and what a thread has locked in libc while a fork is made stays locked in the child.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in children:
            ports.put(store.port)
        waiting, end = list(children), time.monotonic() + limit_s
        while waiting and not came and time.monotonic() < end:
            multiprocessing.connection.wait([c.sentinel for c in waiting], 0.1)
            if any(c.exitcode for c in children):
                said_by = time.monotonic() + 3  # time for messages of their own
                for child in waiting:
                    child.join(max(0.0, said_by - time.monotonic()))
                break
            waiting = [c for c in waiting if c.is_alive()]
        late = [time.monotonic() >= end and child.is_alive() for child in children]
        for child, slow in zip(children, late, strict=True):
            if slow and child.pid:
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(any(late))  # a second to say where it is
        _kill(children)
        read = [[(Path(folder) / f"{r}.{name}").read_text() for name in ("out", "err")] for r in range(world)]
        return [Rank(child.exitcode, *texts, slow) for child, texts, slow in zip(children, read, late, strict=True)]


@contextlib.contextmanager
def undisturbed() -> Iterator[list[int]]:
    """What would end this command waits for what is within, which may look at the list of what came; the first of it counts then.

    An exception in the middle of a deletion leaves files that nobody deletes, one in the middle of an ending processes that nobody ends.
    """
    came: list[int] = []
    with contextlib.ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():  # no other has handlers
            for number in ENDING:
                if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):  # `nohup` is the person's word
                    signal.signal(number, lambda number, _: came.append(number))
                    restored.callback(signal.signal, number, before)
        yield came
    if came:
        signal.raise_signal(came[0])


def _kill(children: Iterable[BaseProcess]) -> None:
    """End all, before one of them hears that another is gone, and wait until they write no more."""
    started = [child for child in children if child.pid]
    for child in started:
        child.kill()
    for child in started:
        child.join()


def _die_with(parent: int) -> None:
    """End this process when `parent` ends, however that ends. What nobody kills holds its memory for ever, its share of a GPU's too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _take_along() -> None:
    """Have whatever this process starts end with it: Megatron's checkpoint writer keeps a manager that hears no Ctrl-C.

    The kernel does it, as a rank that is killed does nothing any more; and it does not hand the order on to a child's children.
    """
    here, command_line = os.getpid(), multiprocessing.spawn.get_command_line

    def forked() -> None:
        nonlocal here
        _die_with(here)
        here = os.getpid()

    def spawned(**named: Any) -> list[str]:
        words = command_line(**named)
        program = words.index("-c") + 1
        die = f"import ctypes, os; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
        words[program] = f"{die}; os.getppid() == {here} or os._exit(1); {words[program]}"
        return words

    os.register_at_fork(after_in_child=forked)
    multiprocessing.spawn.get_command_line = spawned


@contextlib.contextmanager
def _printing(folder: Path, rank: int) -> Iterator[None]:
    """What is started within prints into the files of a rank: one may die while it reads its job, before any line of ours."""
    kept = [os.dup(fd) for fd in (1, 2)]
    _to(folder, rank)
    try:
        yield
    finally:
        for fd, copy in enumerate(kept, 1):
            os.dup2(copy, fd)
            os.close(copy)


def _to(folder: Path, rank: int) -> None:
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(file := os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_APPEND), fd)
        os.close(file)


def _child(job: Callable[[], int | None], rank: int, world: int, ports: Any, folder: Path, device: str) -> None:
    _to(folder, rank)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    # A rank whose parent was killed would wait for the others until a collective times out.
    parent = multiprocessing.parent_process()
    assert parent and parent.pid
    _die_with(parent.pid)
    _take_along()
    # Sockets of managers: a rank that is killed leaves what it has made. Not its whole TMPDIR, where compilers keep what the next can use.
    multiprocessing.util.get_temp_dir = lambda: str(folder)
    port = ports.get()
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
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
    os._exit(code)  # the interpreter's regular end would wait for the manager


def machine(device: str) -> contextlib.AbstractContextManager[None]:
    """What a rank runs on. Imported here: on a GPU the libraries must not be, before the environment is as the plan has it."""
    if device == "cuda":
        return contextlib.nullcontext()
    from nam_megatron.prove.cpu import pretended

    return pretended()
