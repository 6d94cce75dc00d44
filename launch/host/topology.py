"""`nvidia-smi topo -m` -> which link joins every two GPUs, and which NICs and CPUs are near each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.finding import Finding
from launch.host.gpu import Gpu, on

WORDS = ("nvidia-smi", "topo", "-m")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINK = re.compile(r"^(X|NV\d+|PIX|PXB|PHB|NODE|SYS)$", re.ASCII)
DEVICE = re.compile(r"^(GPU\d+|NIC\d+|mlx\w+)$", re.ASCII)  # older drivers name the NIC itself
LEGEND_NIC = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$", re.ASCII)
CPUS = re.compile(r"^\d[\d,-]*$", re.ASCII)
NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from the nearest to the farthest


@dataclass(frozen=True)
class Topology:
    """links: {(row, column): link}; cpus: {GPU: CPU affinity}; names: {NIC: its device, from the legend}."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    links: dict[tuple[str, str], str]
    cpus: dict[str, str]
    names: dict[str, str]

    def nearest(self, gpu: str) -> list[str]:
        """The NICs with the best link to `gpu`, as `mlx5_0 (PIX)`."""
        found = {n: l for n in self.nics if (l := self.links.get((gpu, n))) in NEAR}
        best = min(found.values(), key=NEAR.index, default=None)
        return [f"{self.names.get(n, n)} ({l})" for n, l in found.items() if l == best]


def parse(text: str) -> Topology | None:
    """The matrix, or None where there is none. A cell that cannot be read is left out, and missed by `findings`."""
    header: list[str] = []
    rows: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for line in ESCAPE.sub("", text).splitlines():
        # The program parts cells by tabs; terminals turn them into blanks.
        cells = [c.strip() for c in re.split(r"\t|\s{2,}", line.strip(" \n"))]
        if legend := LEGEND_NIC.match(line):
            names[legend[1]] = legend[2]
        elif not header:
            words = [c for c in cells if c]
            header = words if words and DEVICE.match(words[0]) else []
        elif DEVICE.match(cells[0]):
            rows.setdefault(cells[0], cells[1:])
    if not rows:
        return None
    devices = [c for c in header if DEVICE.match(c)]
    gpus = tuple(d for d in devices if d.startswith("GPU"))
    links = {
        (row, column): cell
        for row, cells in rows.items()
        for column, cell in zip(devices, cells, strict=False)
        if LINK.match(cell)
    }
    affinity = {g: rows[g][len(devices)] for g in gpus if len(rows.get(g, ())) > len(devices)}
    cpus = {g: cpus for g, cpus in affinity.items() if CPUS.match(cpus)}
    return Topology(gpus, tuple(d for d in devices if d not in gpus), links, cpus, names)


def findings(topology: Topology, expected: str, count: int) -> Iterator[Finding]:
    """Whether there are `count` GPUs, each two of them joined as `expected` (`NV18`) in both directions."""
    clean = len(topology.gpus) == count
    if not clean:
        said = f"{len(topology.gpus)} GPUs in the matrix, and the plan is for {count} a host"
        yield Finding("topology", "fail", said, "set `cluster`")
    bad: dict[str, list[str]] = {}
    for i, a in enumerate(topology.gpus):
        for b in topology.gpus[i + 1 :]:
            both = {topology.links.get((a, b), "no link"), topology.links.get((b, a), "no link")}
            for link in sorted(both - {expected}):
                bad.setdefault(link, []).append(f"{a}-{b}")
    for link, pairs in bad.items():
        shown = ", ".join(pairs[:8]) + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
        said = f"{link} between {shown}, and the device file expects {expected}"
        yield Finding("topology", "fail", said, "another host, or have this one repaired")
    if clean and not bad:
        number = count * (count - 1) // 2
        said = f"{expected} between all {number} pairs of GPUs" if number else "one GPU, no pairs"
        yield Finding("topology", "ok", said)
    near = [f"{g}: {', '.join(topology.nearest(g)) or 'none'}" for g in topology.gpus]
    yield Finding("nic", "note", "nearest NICs: " + "; ".join(near) if topology.nics else "no NICs in the matrix")


def fabric(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The switch fabric: while it is not complete CUDA does not start, although the matrix looks whole."""
    for state in sorted({g.fabric for g in gpus if g.fabric not in (None, "Completed")}):
        bad = [g for g in gpus if g.fabric == state]
        hint = "is the fabric manager running on the host?"
        yield Finding("topology", "fail", f"{on(bad)}: fabric is `{state}`", hint)


def counted(active: Mapping[str, int | None], expected: str) -> Iterator[Finding]:
    """NVML's count of live NVLinks by GPU, against the same expectation: a second opinion. One GPU needs none."""
    if not (found := re.match(r"NV(\d+)$", expected)) or len(active) < 2:
        return
    want = int(found[1])
    if unknown := [gpu for gpu, n in active.items() if n is None]:
        yield Finding("topology", "note", f"NVML counts no NVLinks of GPU {', '.join(unknown)}")
    if bad := {gpu: n for gpu, n in active.items() if n is not None and n != want}:
        said = ", ".join(f"GPU {gpu} has {n}" for gpu, n in bad.items())
        message = f"NVML counts {want} live NVLinks a GPU only in part: {said}"
        yield Finding("topology", "fail", message, "reseat, or repair")
    elif not unknown:
        yield Finding("topology", "ok", f"NVML counts {want} live NVLinks on every GPU")


def facts(topology: Topology) -> dict[str, Any]:
    """links: one word where all are alike (8 GPUs have 28 pairs). cpus, nics: those near each GPU."""
    gpus = topology.gpus
    pairs = {f"{a}-{b}": topology.links.get((a, b)) for i, a in enumerate(gpus) for b in gpus[i + 1 :]}
    alike = set(pairs.values())
    links = alike.pop() if len(alike) == 1 else pairs
    return {"links": links, "cpus": topology.cpus, "nics": {g: topology.nearest(g) for g in gpus}}
