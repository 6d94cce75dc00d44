"""`python -m launch inspect RUN`: look at a run that hangs, crawls or has died. Every question is bounded in time; nothing is ended.

python -m launch inspect RUN [receipts=DIR] [seconds=10]     RUN: a receipt's name, its beginning, or its folder
"""

import contextlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.host import gpu, linux
from launch.host.bounded import ask
from launch.record import events, oom, receipt, steps
from launch.record.receipts import RECEIPTS
from launch.run import hang
from launch.words import whole
from nam_megatron.errors import OK, Refused

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
LINE = 1 << 16  # characters; a log may be of gigabytes, and of one line
STATUS = ("State", "Threads", "VmRSS", "voluntary_ctxt_switches")


@dataclass(frozen=True)
class Rank:
    """A training process of the run. rank None: the launcher of the ranks. workers: what it forked, to load data."""

    pid: int
    rank: int | None
    environ: Mapping[str, str]
    workers: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        return f"PID {self.pid}: {who}" + (f", its workers {', '.join(map(str, self.workers))}" if self.workers else "")


def command(names: Sequence[str], options: Mapping[str, str]) -> int:
    if len(names) != 1:
        raise Refused("which run?", hint="`python -m launch inspect RUN`; `python -m launch receipts` lists them")
    seconds = whole("seconds", options.get("seconds", "10"), 600)
    folder = find(names[0], Path(options["receipts"]) if "receipts" in options else RECEIPTS)
    for line in report(folder, receipt.read(folder), seconds):
        print(line, flush=True)
    return OK


def find(name: str, root: Path) -> Path:
    """The folder of a run. Raises Refused where there is none, or several."""
    if not (found := receipt.named(name, root)).is_dir():
        raise Refused(f"no run `{name}` in `{root}`", hint="`python -m launch receipts` lists them")
    return found


def report(folder: Path, content: Mapping[str, Any], seconds: int, proc: Path = linux.PROC) -> Iterator[str]:
    end = (content.get("outcome") or {}).get("end")
    yield f"run {content['run']}: {content['state']}" + (f", {end}" if end else "")
    found = ranks(folder, proc)
    yield "processes:"
    yield from (f"  {r}" for r in found)
    if not found:
        yield "  none on this host"
    if training := [r for r in found if r.rank is not None]:
        yield "stacks:"
        if not shutil.which("py-spy"):
            yield "  no py-spy here: `pip install py-spy` shows Python's stack; this is the kernel's view"
        with ThreadPoolExecutor(len(training)) as pool:
            for rank, lines in zip(training, pool.map(lambda r: list(stack(r, seconds, proc)), training), strict=True):
                yield f"  rank {rank.rank}, PID {rank.pid}"
                yield from (f"    {line}" for line in lines)
        yield "NCCL flight recorder:"
        yield from (f"  {line}" for line in recorder(training, seconds))
    yield "heartbeats:"
    world, schedule = (content.get("job") or {}).get("world") or 1, (content.get("recipe") or {}).get("schedule")
    yield from (f"  {line}" for line in hang.report(folder, world, proc=proc, schedule=schedule))
    yield "memory:"
    yield from (f"  {line}" for line in memory({r.pid: r.rank for r in found}, seconds))
    yield "out of memory:"
    yield from (f"  {line}" for line in errors(folder, content.get("nonce")))


def ranks(folder: Path, proc: Path = linux.PROC) -> list[Rank]:
    """Processes that were started with this run's plan, by rank; the launcher of the ranks first."""
    plans = {str(folder / receipt.PLAN), os.path.realpath(folder / receipt.PLAN)}
    running = {p.pid: p for p in linux.processes(proc) if plans & set(p.words)}
    environs = {pid: environ(proc / str(pid)) for pid in running}
    number = {pid: int(n[:9]) if (n := known.get("RANK", "")).isdecimal() else None for pid, known in environs.items()}
    # A fork has its parent's command line and environment.
    workers = defaultdict(list)
    for pid, process in running.items():
        if number.get(process.parent) is not None:
            workers[process.parent].append(pid)
    forked = {pid for pids in workers.values() for pid in pids}
    found = [Rank(pid, number[pid], environs[pid], tuple(workers[pid])) for pid in running if pid not in forked]
    return sorted(found, key=lambda r: (-1 if r.rank is None else r.rank, r.pid))


def environ(process: Path) -> dict[str, str]:
    """A process' environment variables, of its folder in /proc."""
    said = linux.text(process / "environ") or ""
    return dict(pair.split("=", 1) for pair in said.split("\0") if "=" in pair)


def stack(rank: Rank, seconds: float, proc: Path = linux.PROC) -> Iterator[str]:
    """Where a rank is: py-spy's view of its Python, or the kernel's where there is no py-spy."""
    if spy := shutil.which("py-spy"):
        answer = ask([spy, "dump", "--nonblocking", "--pid", str(rank.pid)], seconds)
        if answer.ok:
            yield from answer.out.splitlines()
            return
        yield f"py-spy: {answer.failure}"
    yield from kernel(rank.pid, proc)


def kernel(pid: int, proc: Path = linux.PROC) -> Iterator[str]:
    """State, what it waits for, and its kernel stack where that may be read. Of a process that has gone: nothing but that."""
    status = linux.text(proc / str(pid) / "status")
    if status is None:
        yield "gone"
        return
    pairs = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    yield ", ".join(f"{key} {' '.join(pairs[key].split())}" for key in STATUS if key in pairs)
    for name in ("wchan", "stack"):
        if said := (linux.text(proc / str(pid) / name) or "").strip("\0 \n"):
            yield f"{name}: " + " < ".join(said.splitlines())


def recorder(training: Sequence[Rank], seconds: float) -> Iterator[str]:
    """Ask every rank for its last collectives, where the run was started with the recorder's pipe."""
    if not (armed := [r for r in training if r.environ.get(PIPE)]):
        yield f"not armed: the run needs TORCH_FR_BUFFER_SIZE=2000 and {PIPE}=PREFIX; then PREFIX<rank>.pipe asks for a dump"
        return
    start = time.time()
    files = {r.rank: dump_file(r) for r in armed}
    for rank in armed:
        with contextlib.suppress(OSError):  # no pipe, or nobody reads it: its dump will be missing
            pipe = os.open(f"{rank.environ[PIPE]}{rank.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1\n")
            os.close(pipe)
    while time.time() < start + seconds and not all(_newer(f, start) for f in files.values()):
        time.sleep(0.2)
    for number, file in files.items():
        yield f"rank {number}: {file}" if _newer(file, start) else f"rank {number}: no dump within {seconds:g} s"
    if any(_newer(f, start) for f in files.values()):
        yield "`torchfrtrace FOLDER -p PREFIX` compares the dumps of all ranks, once they are in one folder"


def dump_file(rank: Rank) -> Path:
    """Where torch 2.11 writes a rank's dump."""
    named = next((rank.environ[name] for name in DUMP if rank.environ.get(name)), None)
    cache = rank.environ.get("XDG_CACHE_HOME") or rank.environ.get("HOME", "/tmp") + "/.cache"
    return Path(f"{named or cache + '/torch/comm_lib_trace_rank_'}{rank.rank}")


def _newer(file: Path, start: float) -> bool:
    try:
        return file.stat().st_mtime >= start - 1  # file systems count in larger steps
    except OSError:
        return False


def memory(numbers: Mapping[int, int | None], seconds: float) -> Iterator[str]:
    """numbers: {PID: rank} of the run."""
    answer = ask(gpu.WORDS, seconds)
    smi = gpu.parse(answer.out) if answer.ok else None
    if smi is None:
        yield f"`{' '.join(gpu.WORDS)}`: {answer.failure if not answer.ok else 'it printed no report'}"
        return
    for g in smi.gpus:
        who = [
            f"{f'rank {numbers[p.pid]}' if p.pid in numbers else p.name} (PID {p.pid}) {gpu.shown(p.mib)} MiB"
            for p in g.processes
        ]
        yield f"GPU {g.index}: {gpu.shown(g.used_mib)} of {gpu.shown(g.total_mib)} MiB; {', '.join(who) or 'no process to be seen'}"


def errors(folder: Path, nonce: str | None) -> Iterator[str]:
    """By the run's events; libraries that ask the driver themselves, and runs without events, are known by the log alone."""
    if nonce:
        ends = events.read(folder, nonce).ends.values()
        if said := [oom.of_end(end) for end in ends if end["reason"] == "out of memory"]:
            for error in said:
                yield from oom.told(error)
            return
        yield "no rank says so; by the log:"
    found = oom.triage(steps.lines(folder / receipt.LOG, LINE))
    if not found:
        yield "not in the log" if (folder / receipt.LOG).is_file() else "no log"
    for error in found:
        yield from oom.told(error)
