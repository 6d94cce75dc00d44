"""Matrix products and collectives on all GPUs of the host, for seconds: Megatron's own sniff test, and `dcgmi diag` if present."""

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.finding import Finding
from launch.host.bounded import ask
from nam_megatron.recipe import Device

SCRIPT = "training/gpu_sniff_test.py"  # in the wheel of megatron-core 0.19.2
SECONDS, DCGM_SECONDS = 180, 120
LINE = re.compile(r"^\s*(.+?): median=(\S+), mean=(\S+), min=(\S+), max=(\S+)\s*$")
OUTLIER = re.compile(r"^\s*OUTLIER rank (\d{1,6})\b[^:]*: (\S+)")  # between them it prints the host's name
# What it calls its collectives: a receipt says only words that stand in our files.
REDUCE = "All-reduce busbw (global PG"
WIRES = (REDUCE, "Reduce-scatter busbw (TP PG", "All-to-all busbw (EP PG", "Send/recv busbw (DP PG")
BIG = ("8192x8192x8192", "268 MB")  # of each kind the figure that the floors are for; smaller ones are mostly latency


@dataclass(frozen=True)
class Metric:
    """One figure over the ranks, TFLOP/s or GB/s. outliers: ranks more than 10 % off the median."""

    name: str
    median: float
    low: float
    high: float
    outliers: tuple[int, ...] = ()

    @property
    def is_gemm(self) -> bool:
        return self.name.startswith("GEMM")


def script() -> Path | None:
    """The sniff test of the Megatron that would be imported; nothing is imported."""
    spec = importlib.util.find_spec("megatron")
    found = [Path(p) / SCRIPT for p in (spec.submodule_search_locations or ())] if spec else []
    return next((p for p in found if p.is_file()), None)


def words(path: Path, count: int, port: int) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={count}"]
    return [*start, "--master-addr=127.0.0.1", f"--master-port={port}", str(path)]


def run(device: Device, count: int, port: int, environ: Mapping[str, str]) -> tuple[list[Finding], dict[str, Any]]:
    """Only on idle GPUs: it takes them, and the figures would mean nothing."""
    if (path := script()) is None:
        return [Finding("gemm", "fail", f"this Megatron has no {SCRIPT}", "`python -m launch stack`")], {}
    # Its folder, full of Megatron's modules, would come first in the search path; NCCL's log would stand between the figures.
    quiet = {**environ, "PYTHONSAFEPATH": "1", "NCCL_DEBUG": "WARN"}
    answer = ask(words(path, count, port), SECONDS, quiet)
    if not answer.ok:
        return [
            Finding("gemm", "fail", f"the sniff test failed: {answer.failure}", "run it by hand to see all it says")
        ], {}
    metrics = parse(answer.out)
    found = list(findings(metrics, device, count))
    if dcgmi := shutil.which("dcgmi", path=environ.get("PATH")):
        said = ask([dcgmi, "diag", "-r", "1"], DCGM_SECONDS, environ)
        found.append(dcgm(said.out + said.err, said.code, said.why))
    return found, {m.name: {"median": m.median, "min": m.low, "max": m.high} for m in metrics}


def parse(text: str) -> list[Metric]:
    """What rank 0 printed. Lines that cannot be read are left out, and missed by `findings`."""
    found: list[Metric] = []
    for line in text.splitlines():
        if m := LINE.match(line):
            try:
                median, _, low, high = (float(v) for v in m.groups()[1:])
            except ValueError:
                continue
            found.append(Metric(m[1], median, low, high))
        elif found and (m := OUTLIER.match(line)):
            last = found.pop()
            found.append(Metric(last.name, last.median, last.low, last.high, (*last.outliers, int(m[1]))))
    return found


def findings(metrics: list[Metric], device: Device, count: int) -> Iterator[Finding]:
    big = [m for m in metrics if any(b in m.name for b in BIG)]
    yield _judge("gemm", [m for m in big if m.is_gemm], device.gemm_floor_tflops, "TFLOP/s", "gemm_floor_tflops")
    if count > 1:
        wires = [m for m in big if not m.is_gemm]
        reduce = [m for m in wires if m.name.startswith(REDUCE)]
        yield _judge("collective", reduce, device.allreduce_floor_gbs, "GB/s", "allreduce_floor_gbs")
        for m in wires:
            if m.outliers and m not in reduce:
                yield _apart("collective", m)


def _judge(name: str, metrics: list[Metric], floor: float, unit: str, key: str) -> Finding:
    if not metrics:
        return Finding(name, "fail", "the sniff test printed no such figure", "run it by hand to see all it says")
    m = metrics[0]
    # `not >=`: NaN is no good figure either.
    if not m.low >= floor:
        said = f"{m.low:g} {unit} at the slowest rank, and `device.{key}` is {floor:g}"
        return Finding(name, "fail", f"{m.name}: {said}", "a sick GPU or link: `nvidia-smi -q`, `dmesg`")
    if m.outliers:
        return _apart(name, m)
    return Finding(name, "ok", f"{m.name}: {m.low:g} to {m.high:g} (floor {floor:g})")


def _apart(name: str, m: Metric) -> Finding:
    ranks = ", ".join(map(str, m.outliers))
    said = f"{m.name}: rank {ranks} is over 10 % off the median {m.median:g}"
    return Finding(name, "fail", said, "a sick GPU or link")


def dcgm(text: str, code: int | None, why: str = "") -> Finding:
    """text, code: of `dcgmi diag -r 1`; the table has `| name | Pass |` rows."""
    rows = re.findall(r"^\|\s*(.+?)\s*\|\s*(Pass|Fail|Warn|Skip)\b", text, re.MULTILINE)
    bad = [name for name, result in rows if result == "Fail"]
    if bad:
        return Finding("dcgm", "fail", f"dcgmi diag: {', '.join(bad)} failed", "`dcgmi diag -r 1 -v`")
    if code != 0 or not rows:
        said = why or next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        return Finding("dcgm", "note", f"dcgmi diag could not be run: {said[:200]}")
    return Finding("dcgm", "ok", f"dcgmi diag: {sum(r == 'Pass' for _, r in rows)} of {len(rows)} tests passed")
