"""`nvidia-smi -q -x` -> what each GPU is, whether it is healthy, and who is on it. Reads; sets nothing."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from launch.finding import Finding
from nam_megatron.recipe import Device

WORDS = ("nvidia-smi", "-q", "-x")
# Reasons that slow a GPU whatever it is asked to do; the others (idle, a chosen clock, the power cap under load) are ordinary.
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
IDLE_MIB = 1024  # a driver without a process holds up to a few hundred
SIZE_OFF = 0.03  # nvidia-smi counts a little more than torch does


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    mib: float | None


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it; None is `N/A` and whatever else is no value."""

    index: int
    name: str
    bus: str
    total_mib: float | None
    used_mib: float | None
    mig: bool
    ecc: bool | None
    uncorrected: int  # memory errors since the driver was loaded
    repair: tuple[str, ...]  # what the driver asks for: remapping, reset
    slowed: tuple[str, ...]
    sm_mhz: float | None
    max_sm_mhz: float | None
    app_mhz: float | None
    default_app_mhz: float | None
    limit_w: float | None
    default_limit_w: float | None
    fabric: str | None
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Smi:
    driver: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...]


def parse(text: str) -> Smi | None:
    """The report, or None where it is none. GPUs stand in the order of their bus, as CUDA counts them by default in `nvidia-smi`."""
    try:
        root = ET.fromstring(text.strip())
    except (ET.ParseError, ValueError):
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = tuple(_gpu(i, node) for i, node in enumerate(root.iterfind("gpu")))
    return Smi(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(index: int, node: ET.Element) -> Gpu:
    volatile = node.find("ecc_errors/volatile")
    errors = [e for e in volatile.iter() if "uncorrectable" in e.tag] if volatile is not None else []
    older = node.find("ecc_errors/volatile/double_bit/total")
    reasons = [e for name in ("clocks_event_reasons", "clocks_throttle_reasons") for e in node.iterfind(f"{name}/*")]
    power = "gpu_power_readings/current_power_limit", "power_readings/power_limit"
    default = "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"
    return Gpu(
        index,
        _text(node, "product_name") or "unknown",
        _text(node, "pci/pci_bus_id") or "unknown",
        _number(node, "fb_memory_usage/total"),
        _number(node, "fb_memory_usage/used"),
        _text(node, "mig_mode/current_mig") == "Enabled",
        {"Enabled": True, "Disabled": False}.get(_text(node, "ecc_mode/current_ecc") or ""),
        sum(int(_value(e.text) or 0) for e in (*errors, *([older] if older is not None else []))),
        tuple(_repair(node)),
        tuple(dict.fromkeys(r for e in reasons if e.text == "Active" for r in SLOWED if e.tag.endswith("reason_" + r))),
        _number(node, "clocks/sm_clock"),
        _number(node, "max_clocks/sm_clock"),
        _number(node, "applications_clocks/graphics_clock"),
        _number(node, "default_applications_clocks/graphics_clock"),
        _number(node, *power),
        _number(node, *default),
        _text(node, "fabric/state"),
        tuple(_processes(node)),
    )


def _repair(node: ET.Element) -> Iterator[str]:
    for path, words in {
        "remapped_rows/remapped_row_pending": "rows wait to be remapped",
        "remapped_rows/remapped_row_failure": "rows could not be remapped",
        "retired_pages/pending_retirement": "pages wait to be retired",
        "gpu_reset_status/reset_required": "a reset is required",
        "ecc_errors/channel_repair_pending": "a channel waits for repair",
        "ecc_errors/tpc_repair_pending": "a TPC waits for repair",
    }.items():
        if _text(node, path) == "Yes":
            yield words
    action = _text(node, "gpu_recovery_action")
    if action not in (None, "None"):
        yield f"recovery action: {action}"


def _processes(node: ET.Element) -> Iterator[Process]:
    for entry in node.iterfind("processes/process_info"):
        pid = _number(entry, "pid")
        if pid is not None:
            name = (_text(entry, "process_name") or "unknown").split(" ")[0].rsplit("/", 1)[-1]
            yield Process(int(pid), name, _number(entry, "used_memory"))


def _text(node: ET.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return text if text and text not in ("N/A", "Not Found") else None


def _number(node: ET.Element, *paths: str) -> float | None:
    return next((v for path in paths if (v := _value(node.findtext(path))) is not None), None)


def _value(text: str | None) -> float | None:
    """`143771 MiB` -> 143771.0; None for words."""
    found = re.match(r"\s*(\d{1,15}(?:\.\d{1,6})?)(?:\s|$)", text or "", re.ASCII)
    return float(found[1]) if found else None


def findings(smi: Smi, device: Device, count: int, cuda: str) -> Iterator[Finding]:
    """count: GPUs of a host that the plan is for. cuda: what torch was built for, `13.0`."""
    yield from driver(smi, cuda)
    yield from census(smi.gpus, device, count)
    yield from ecc(smi.gpus)
    yield from slowed(smi.gpus)
    yield from clocks(smi.gpus)
    yield from idle(smi.gpus)


def driver(smi: Smi, cuda: str) -> Iterator[Finding]:
    said = f"driver {smi.driver}, CUDA {smi.cuda}"
    if smi.driver is None or smi.cuda is None:
        yield Finding(
            "driver", "fail", f"{said}: nvidia-smi and the driver do not fit each other", "look at nvidia-smi"
        )
    elif _version(smi.cuda) < _version(cuda):
        yield Finding(
            "driver", "fail", f"{said}, and torch is built for CUDA {cuda}", "another driver, or another torch"
        )
    else:
        yield Finding("driver", "ok", said)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n[:9]) for n in re.findall(r"\d+", text))


def census(gpus: Sequence[Gpu], device: Device, count: int) -> Iterator[Finding]:
    clean = True
    if len(gpus) != count:
        clean = False
        yield Finding("gpus", "fail", f"{len(gpus)} GPUs, and the plan is for {count} a host", "set `cluster`")
    if len(names := sorted({g.name for g in gpus})) > 1:
        clean = False
        yield Finding("gpus", "fail", f"GPUs of several kinds: {', '.join(names)}", "hosts of one kind")
    want = device.total_gib * 1024
    for words, test in {
        f"memory is not that of `{device.name}` ({device.total_gib} GiB)": lambda g: (
            abs((g.total_mib or 0) - want) > SIZE_OFF * want
        ),
        "cut up by MIG": lambda g: g.mig,
    }.items():
        if bad := [g for g in gpus if test(g)]:
            clean = False
            yield Finding("gpus", "fail", f"{on(bad)}: {words}", "another `device`, or another host")
    if clean and gpus:
        yield Finding("gpus", "ok", f"{count} x {names[0]}, {gpus[0].total_mib:.0f} MiB each")


def ecc(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    clean = True
    for bad, words in (
        ([g for g in gpus if g.ecc is False], "ECC is off"),
        ([g for g in gpus if g.ecc is None], "whether ECC is on cannot be read"),
        ([g for g in gpus if g.uncorrected], "uncorrected memory errors since the driver was loaded"),
        *(([g for g in gpus if g.repair == r], "; ".join(r)) for r in dict.fromkeys(g.repair for g in gpus) if r),
    ):
        if bad:
            clean = False
            yield Finding("ecc", "fail", f"{on(bad)}: {words}", "drain the host and have it looked at")
    if clean and gpus:
        yield Finding("ecc", "ok", "on, no uncorrected errors, nothing to repair")


def slowed(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for reason in SLOWED:
        if bad := [g for g in gpus if reason in g.slowed]:
            yield Finding("throttle", "fail", f"{on(bad)}: {reason.replace('_', ' ')}", "cooling, power, or a sick GPU")
    if gpus and not any(g.slowed for g in gpus):
        yield Finding("throttle", "ok", "no GPU is slowed by heat or power")


def clocks(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Read, never set: a lowered power limit or clock is somebody's choice, and another figure for the same configuration."""
    clean = True
    for words, test in {
        "power limit below the default": lambda g: g.limit_w and g.default_limit_w and g.limit_w < g.default_limit_w,
        "application clocks below the default": lambda g: (
            g.app_mhz and g.default_app_mhz and g.app_mhz < g.default_app_mhz
        ),
        "another maximum clock than GPU 0": lambda g: g.max_sm_mhz != gpus[0].max_sm_mhz,
        "another power limit than GPU 0": lambda g: g.limit_w != gpus[0].limit_w,
    }.items():
        if bad := [g for g in gpus if test(g)]:
            clean = False
            yield Finding(
                "clocks", "fail", f"{on(bad)}: {words}", "`nvidia-smi -q -d CLOCK,POWER`; whoever set it can tell why"
            )
    if clean and gpus:
        first = gpus[0]
        yield Finding("clocks", "ok", f"SM up to {_shown(first.max_sm_mhz)} MHz, power up to {_shown(first.limit_w)} W")


def idle(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    clean = True
    for g in gpus:
        if g.processes:
            clean = False
            who = ", ".join(f"PID {p.pid} ({p.name}, {_shown(p.mib)} MiB)" for p in g.processes)
            yield Finding(
                "idle", "fail", f"GPU {g.index} is in use by {who}", "wait for it, or end it: nothing is killed here"
            )
    if bad := [g for g in gpus if not g.processes and (g.used_mib or 0) > IDLE_MIB]:
        clean = False
        used = ", ".join(f"{_shown(g.used_mib)} MiB" for g in bad)
        yield Finding(
            "idle",
            "fail",
            f"{on(bad)}: {used} in use by a process that cannot be seen from here",
            "look outside this container",
        )
    if clean and gpus:
        yield Finding("idle", "ok", "no process on any GPU")


def facts(smi: Smi) -> dict[str, Any]:
    """For the receipt: no serial numbers, no UUIDs, no process names."""
    said: Callable[[Gpu], dict[str, Any]] = lambda g: {  # noqa: E731
        "index": g.index,
        "name": g.name,
        "bus": g.bus,
        "memory_mib": g.total_mib,
        "ecc": g.ecc,
        "sm_mhz": g.sm_mhz,
        "max_sm_mhz": g.max_sm_mhz,
        "power_limit_w": g.limit_w,
        "fabric": g.fabric,
    }
    return {"driver": smi.driver, "driver_cuda": smi.cuda, "gpus": [said(g) for g in smi.gpus]}


def on(gpus: Sequence[Gpu]) -> str:
    """`GPU 0`, `GPUs 0-3, 6`."""
    runs = []
    for _, run in groupby(enumerate(sorted(g.index for g in gpus)), key=lambda pair: pair[1] - pair[0]):
        numbers = [n for _, n in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(runs)}"


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
