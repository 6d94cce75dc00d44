"""What /proc and /sys say of a host: NUMA balancing, training that still runs, who holds the port, InfiniBand. Reads only."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.finding import Finding

PROC, SYS = Path("/proc"), Path("/sys")
BALANCING = "sys/kernel/numa_balancing"
# A word of a command line by which a process is taken for training.
TRAINING = re.compile(
    r"^(nam_megatron\.train|torch\.distributed\.(run|launch)|(.*/)?torchrun|(.*/)?(pretrain|finetune)_\w+\.py|megatron\.training\.\S+)$"
)
LISTEN = "0A"


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
        return Finding(
            "numa", "fail", "whether the kernel balances NUMA cannot be read", f"look at /proc/{BALANCING}, or waive it"
        )
    if int(said[:9]):
        # Pages migrate under pinned ranks, and steps take unequal time.
        return Finding("numa", "fail", "the kernel balances NUMA pages", "as root: `sysctl kernel.numa_balancing=0`")
    return Finding("numa", "ok", "NUMA balancing is off")


def processes(proc: Path = PROC) -> list[Process]:
    """Every process whose command line may be read."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdecimal() and (line := text(folder / "cmdline")):
            # `pid (name) state parent ...`; the name may hold anything, brackets too.
            stat = (text(folder / "stat") or "").rpartition(")")[2].split()
            parent = int(stat[1]) if len(stat) > 1 and stat[1].isdecimal() else 0
            found.append(Process(int(folder.name), parent, tuple(line.rstrip("\0").split("\0"))))
    return sorted(found, key=lambda p: p.pid)


def ancestors(running: Sequence[Process], pid: int) -> set[int]:
    """`pid` and whoever started it."""
    parents, line = {p.pid: p.parent for p in running}, set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line


def stale(running: Sequence[Process], own: int) -> Finding:
    """Training that runs already. own: this process, which a launcher may have started."""
    line = ancestors(running, own)
    found = [(p, w) for p in running if p.pid not in line if (w := next(filter(TRAINING.match, p.words), None))]
    if not found:
        return Finding("stale", "ok", "no training runs on this host")
    shown = ", ".join(f"PID {p.pid} ({w.rsplit('/', 1)[-1]})" for p, w in found[:16])
    more = f" and {len(found) - 16} more" if len(found) > 16 else ""
    return Finding(
        "stale", "fail", f"training runs already: {shown}{more}", "wait for it, or end it: nothing is killed here"
    )


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
    return Finding(
        "port", "fail", f"port {port} is in use by {who}", "another `port`, or end it: nothing is killed here"
    )


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
