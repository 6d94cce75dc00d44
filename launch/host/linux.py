"""What /proc and /sys say of a host: NUMA balancing, training that still runs, who holds the port, InfiniBand. Reads only."""

import ctypes
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.finding import Finding
from launch.host.bounded import ask
from launch.host.storage import user_cache

PROC, SYS = Path("/proc"), Path("/sys")
BALANCING = "sys/kernel/numa_balancing"
# A word of a command line by which a process is taken for training.
TRAINING = re.compile(
    r"^(nam_megatron\.(torchrun|train)|torch\.distributed\.(run|launch)|(.*/)?torchrun|(.*/)?(pretrain|finetune)_\w+\.py|megatron\.training\.\S+)$"
)
LISTEN = "0A"
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,4})\b", re.ASCII)
# Of NVIDIA's list: what a program of a user's does to itself. Every other number speaks of the GPU, its memory, its links or its driver.
OF_PROGRAMS = {8, 13, 31, 32, 43, 45, 68, 69, 137}
FILES = 65536  # a rank has sockets to every other one, and the data's files
SHM = 512 << 20  # bytes of /dev/shm a GPU: NCCL's buffers between processes, batches of the data's workers
UNSYNCHRONISED, ERROR = 0x40, 5  # of linux/timex.h: STA_UNSYNC, TIME_ERROR


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    words: tuple[str, ...]


def text(path: Path) -> str | None:
    """A small file of /proc or /sys; None where it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def numa(said: str | None) -> Finding:
    """said: the content of /proc/sys/kernel/numa_balancing."""
    if said is None or not said.strip().isdecimal():
        message = "whether the kernel balances NUMA cannot be read"
        return Finding("numa", "fail", message, f"look at /proc/{BALANCING}, or waive it")
    if int(said[:9]):
        # Pages migrate under pinned ranks, and steps take unequal time.
        return Finding("numa", "fail", "the kernel balances NUMA pages", "as root: `sysctl kernel.numa_balancing=0`")
    return Finding("numa", "ok", "NUMA balancing is off")


def processes(proc: Path = PROC, *, nameless: bool = False) -> list[Process]:
    """Every process whose command line may be read. nameless: others, too, such as one that is just started and has none yet."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdecimal() and ((line := text(folder / "cmdline")) or nameless):
            # `pid (name) state parent ...`; the name may hold anything, brackets too.
            stat = (text(folder / "stat") or "").rpartition(")")[2].split()
            parent = int(stat[1]) if len(stat) > 1 and stat[1].isdecimal() else 0
            found.append(Process(int(folder.name), parent, tuple((line or "").rstrip("\0").split("\0"))))
    return sorted(found, key=lambda p: p.pid)


def ancestors(running: Sequence[Process], pid: int) -> set[int]:
    """`pid` and whoever started it."""
    parents, line = {p.pid: p.parent for p in running}, set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line


def descendants(running: Sequence[Process], pid: int) -> list[int]:
    """Whatever it started, and what that started."""
    return [p.pid for p in running if pid in ancestors(running, p.parent)]


def stale(running: Sequence[Process], own: int) -> Finding:
    """Training that runs already. own: this process, which a launcher may have started."""
    line = ancestors(running, own)
    found = [(p, w) for p in running if p.pid not in line if (w := next(filter(TRAINING.match, p.words), None))]
    if not found:
        return Finding("stale", "ok", "no training runs on this host")
    shown = ", ".join(f"PID {p.pid} ({w.rsplit('/', 1)[-1]})" for p, w in found[:16])
    more = f" and {len(found) - 16} more" if len(found) > 16 else ""
    hint = "wait for it, or end it: nothing is killed here"
    return Finding("stale", "fail", f"training runs already: {shown}{more}", hint)


def listening(table: str, port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, from /proc/net/tcp or tcp6."""
    found = set()
    for line in table.splitlines()[1:]:
        cells = line.split()
        if len(cells) > 9 and cells[3] == LISTEN and cells[1].rpartition(":")[2].upper() == f"{port:04X}":
            found.add(cells[9])
    return found


def owners(inodes: set[str], proc: Path = PROC) -> list[int]:
    """Processes that hold one of these sockets, as far as their files may be seen."""
    want, found = {f"socket:[{i}]" for i in inodes}, []
    for folder in proc.iterdir():
        if folder.name.isdecimal() and any(link in want for link in _links(folder / "fd")):
            found.append(int(folder.name))
    return sorted(found)


def _links(folder: Path) -> Iterator[str]:
    try:
        for entry in folder.iterdir():
            yield os.readlink(entry)
    except OSError:  # another user's process, or one that has just ended
        return


def port_free(port: int, proc: Path = PROC) -> Finding:
    tables = [said for name in ("net/tcp", "net/tcp6") if (said := text(proc / name)) is not None]
    if not tables:
        return Finding(
            "port", "fail", f"who listens on port {port} cannot be read", "look at /proc/net/tcp, or waive it"
        )
    if not (inodes := set().union(*(listening(table, port) for table in tables))):
        return Finding("port", "ok", f"port {port} is free")
    who = ", ".join(f"PID {pid}" for pid in owners(inodes, proc)) or "a process of another user"
    hint = "another `port`, or end it: nothing is killed here"
    return Finding("port", "fail", f"port {port} is in use by {who}", hint)


def infiniband(root: Path = SYS) -> dict[str, dict[str, str]]:
    """{device port: state, rate, link layer}, as /sys/class/infiniband has them."""
    found = {}
    for port in sorted((root / "class/infiniband").glob("*/ports/*")):
        read = {k: (text(port / k) or "unknown").strip() for k in ("state", "rate", "link_layer")}
        found[f"{port.parent.parent.name}/{port.name}"] = read
    return found


def network(ports: dict[str, dict[str, str]], nodes: int) -> Finding:
    """Several nodes need a live InfiniBand or RoCE port; one node needs none."""
    live = [name for name, port in ports.items() if "ACTIVE" in port["state"]]
    if nodes > 1 and not live:
        said = f"{len(ports)} InfiniBand ports, none of them active, and the plan is for {nodes} nodes"
        return Finding("nic", "fail", said, "bring a port up, or waive it where the nodes talk over Ethernet")
    return Finding("nic", "ok" if live else "note", f"{len(live)} of {len(ports)} InfiniBand ports are active")


def xid(said: str | None) -> Finding:
    """said: the kernel's log since it was started; None where it may not be read."""
    if said is None:
        return Finding("xid", "note", "the kernel's log cannot be read: whether a GPU had an error (Xid) is not known")
    found: dict[tuple[str, int], int] = {}
    for bus, number in XID.findall(said):
        found[bus, int(number)] = found.get((bus, int(number)), 0) + 1
    shown = ", ".join(
        f"{n} on {bus}" + (f" ({times} times)" if times > 1 else "") for (bus, n), times in sorted(found.items())
    )
    if any(number not in OF_PROGRAMS for _, number in found):
        message = f"errors of GPUs since the host was started: Xid {shown}"
        return Finding("xid", "fail", message, "drain the host, or reset the GPU and look again")
    if found:
        return Finding("xid", "note", f"programs failed on GPUs since the host was started: Xid {shown}")
    return Finding("xid", "ok", "no errors of GPUs in the kernel's log")


def kernel_log(seconds: float) -> str | None:
    for words in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"]):
        answer = ask(words, seconds)
        if answer.ok and answer.out.strip():
            return answer.out
    return None


def limits(
    nodes: int, files: tuple[int, int] | None = None, locked: tuple[int, int] | None = None
) -> Iterator[Finding]:
    """Open files, and memory that a NIC may be given. files, locked: (soft, hard) of this process."""
    soft, hard = files or resource.getrlimit(resource.RLIMIT_NOFILE)
    clean = True
    if hard != resource.RLIM_INFINITY and hard < FILES:
        clean = False
        said = f"{hard} open files at most, and {FILES} are wanted"
        hint = "`ulimit -Hn`: limits.conf, LimitNOFILE= of the service, `--ulimit nofile=` of the container"
        yield Finding("limits", "fail", said, hint)
    elif soft != resource.RLIM_INFINITY and soft < FILES:
        clean = False
        yield Finding("limits", "note", f"{soft} open files; `run` raises it to what is allowed")
    most = (locked or resource.getrlimit(resource.RLIMIT_MEMLOCK))[1]
    if nodes > 1 and most != resource.RLIM_INFINITY:
        clean = False
        said = f"{most >> 10} KiB of locked memory at most: RDMA registers gigabytes"
        yield Finding(
            "limits",
            "fail",
            said,
            "`ulimit -Hl` must say unlimited: limits.conf, `--ulimit memlock=-1` of the container",
        )
    if clean:
        yield Finding("limits", "ok", "open files and locked memory")


def shm(count: int, path: Path = Path("/dev/shm")) -> Finding:
    """count: GPUs of a host that the plan is for."""
    try:
        left = os.statvfs(path)
    except OSError as err:
        return Finding(
            "shm", "fail", f"`{path}`: {err.strerror}", "mount a tmpfs there: ranks of a host talk through it"
        )
    free, want = left.f_bavail * left.f_frsize, count * SHM
    said = f"{free >> 20} MiB free in `{path}`"
    if free < want:
        hint = "`--shm-size` or `--ipc=host` of the container"
        return Finding("shm", "fail", f"{said}, and {want >> 20} are wanted", hint)
    return Finding("shm", "ok", said)


def compiling(environ: Mapping[str, str]) -> Finding:
    """torch locks an extension that it compiles by a file, and waits without end where one lies that a killed compiler left."""
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or user_cache(environ) / "torch_extensions")
    # One folder for an extension, below one for each Python and CUDA unless the environment names the place.
    found = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    if not found:
        return Finding("compiling", "ok", "no extension of torch is locked")
    said = ", ".join(f"`{lock}`" for lock in found)
    return Finding(
        "compiling", "fail", f"an extension of torch is being compiled, or its compiler was killed: {said}",
        "where no process compiles, remove the file: recompute builds such an extension, and a run waits at the lock without a word",
    )  # fmt: skip


def clock(nodes: int, state: tuple[int, int, int] | None = None) -> Finding:
    """state: of `adjtimex`: what it returned, its status, its largest error in microseconds."""
    returned, status, error = state or _adjtimex()
    if returned < 0:
        return Finding("clock", "note", "whether the clock is synchronised cannot be read")
    if returned == ERROR or status & UNSYNCHRONISED:
        # Logs of several hosts are put in order by it, and certificates and tokens expire by it.
        said = "the clock is not synchronised"
        hint = "start chrony or systemd-timesyncd; `timedatectl`"
        return Finding("clock", "fail" if nodes > 1 else "note", said, hint)
    return Finding("clock", "ok", f"the clock is synchronised, to {error / 1000:.0f} ms")


def _adjtimex() -> tuple[int, int, int]:
    """`struct timex` has its modes, four longs of which the third is the largest error, and the status; 208 bytes. Changes nothing."""
    buffer = (ctypes.c_long * 26)()
    try:
        returned = ctypes.CDLL(None).adjtimex(ctypes.byref(buffer))
    except (OSError, AttributeError):
        return -1, 0, 0
    return returned, ctypes.c_int(buffer[5] & 0xFFFFFFFF).value, buffer[3]


def facts(proc: Path = PROC, root: Path = SYS) -> dict[str, Any]:
    total = re.search(r"^MemTotal:\s+(\d{1,15}) kB", text(proc / "meminfo") or "", re.MULTILINE)
    # Versions only: what vendors append may name a host or a person.
    kernel = re.match(r"\d+(?:\.\d+)*", os.uname().release)
    return {
        "kernel": kernel[0] if kernel else None,
        "cpus": os.cpu_count(),
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "numa_nodes": (text(root / "devices/system/node/online") or "").strip() or None,
        "numa_balancing": (text(proc / BALANCING) or "").strip() or None,
        "infiniband": infiniband(root),
    }
