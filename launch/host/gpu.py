"""`nvidia-smi -q -x` -> what each GPU is, whether it is healthy, and who is on it. Reads; sets nothing."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from launch.finding import Finding, Level
from nam_megatron.recipe import Device

WORDS = ("nvidia-smi", "-q", "-x")
# Reasons that slow a GPU whatever it is asked to do; the others (idle, a chosen clock, the power cap under load) are ordinary.
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
IDLE_MIB = 1024  # a driver without a process holds up to a few hundred
# Since the driver was loaded. A few are ordinary; these many are a bad slot, cable or memory.
REPLAYS, CORRECTED = 100, 100
HEADROOM = 10  # degrees C below the point where it slows down, at least, while nothing runs
HOT_MEMORY = 85  # degrees C, while nothing runs


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
    uncorrected: int | None  # memory errors since the driver was loaded
    repair: tuple[str, ...]  # what the driver asks for: remapping, reset
    slowed: tuple[str, ...] | None
    sm_mhz: float | None
    max_sm_mhz: float | None
    app_mhz: float | None
    default_app_mhz: float | None
    limit_w: float | None
    default_limit_w: float | None
    fabric: str | None
    processes: tuple[Process, ...]
    state: str | None = None  # P0 is the fastest
    width: float | None = None  # PCIe lanes, as they are and as they could be
    max_width: float | None = None
    gen: float | None = None
    max_gen: float | None = None
    replays: float | None = None
    corrected: float | None = None
    remapped: tuple[float | None, float | None] = (None, None)  # rows, for correctable and for uncorrectable errors
    spare: tuple[float | None, float | None] = (None, None)  # banks with few spare rows, and with none
    sram_exceeded: bool | None = None
    headroom: float | None = None
    memory_c: float | None = None
    capped: bool = False
    persistence: str | None = None
    compute: str | None = None
    vbios: str | None = None


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
    counts = [_value(e.text) for e in (*errors, *([older] if older is not None else []))]
    uncorrected = int(sum(v or 0 for v in counts))
    reasons = [e for name in ("clocks_event_reasons", "clocks_throttle_reasons") for e in node.iterfind(f"{name}/*")]
    told = [
        (r, e.text) for e in reasons for r in SLOWED if e.tag.endswith("reason_" + r) and "Active" in (e.text or "")
    ]
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
        uncorrected if uncorrected or (counts and None not in counts) else None,
        tuple(_repair(node)),
        tuple(dict.fromkeys(r for r, text in told if text == "Active")) if told else None,
        _number(node, "clocks/sm_clock"),
        _number(node, "max_clocks/sm_clock"),
        _number(node, "applications_clocks/graphics_clock"),
        _number(node, "default_applications_clocks/graphics_clock"),
        _number(node, *power),
        _number(node, *default),
        _text(node, "fabric/state"),
        tuple(_processes(node)),
        state=_text(node, "performance_state"),
        width=_number(node, f"{LINK}/link_widths/current_link_width"),
        max_width=_number(node, f"{LINK}/link_widths/max_link_width"),
        gen=_number(node, f"{LINK}/pcie_gen/current_link_gen"),
        max_gen=_number(node, f"{LINK}/pcie_gen/max_link_gen"),
        replays=_number(node, "pci/replay_counter"),
        corrected=_sum(e for e in volatile.iter() if e.tag.endswith("_correctable")) if volatile is not None else None,
        remapped=(_number(node, "remapped_rows/remapped_row_corr"), _number(node, "remapped_rows/remapped_row_unc")),
        spare=(_number(node, f"{SPARE}_low"), _number(node, f"{SPARE}_none")),
        sram_exceeded={"Yes": True, "No": False}.get(_text(node, "ecc_errors/aggregate/sram_threshold_exceeded") or ""),
        headroom=_headroom(node),
        memory_c=_number(node, "temperature/memory_temp"),
        capped=any(e.tag.endswith("reason_sw_power_cap") and e.text == "Active" for e in reasons),
        persistence=_text(node, "persistence_mode"),
        compute=_text(node, "compute_mode"),
        vbios=_text(node, "vbios_version"),
    )


LINK = "pci/pci_gpu_link_info"
SPARE = "remapped_rows/row_remapper_histogram/row_remapper_histogram"


def _sum(counts: Iterable[ET.Element]) -> float | None:
    """None where none is told, or one that is not told could be what matters."""
    found = [_value(e.text) for e in counts]
    known = [value for value in found if value is not None]
    return sum(known) if known and (len(known) == len(found) or sum(known) >= CORRECTED) else None


def _headroom(node: ET.Element) -> float | None:
    """Degrees C until it slows down. Newer drivers say what is left until the limit, and at what of it (-2) it slows down."""
    left, slow = (_degrees(node.findtext(f"temperature/gpu_temp_{k}")) for k in ("tlimit", "slow_tlimit_threshold"))
    if left is not None:
        return left - (slow or 0)
    now, slow = (_degrees(node.findtext(f"temperature/gpu_temp{k}")) for k in ("", "_slow_threshold"))
    return slow - now if now is not None and slow is not None else None


def _degrees(text: str | None) -> float | None:
    found = re.match(r"\s*(-?\d{1,4}) C\s*$", text or "", re.ASCII)
    return float(found[1]) if found else None


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
    found = re.match(r"\s*(\d{1,15}(?:\.\d{1,6})?)x?(?:\s|$)", text or "", re.ASCII)
    return float(found[1]) if found else None


def findings(smi: Smi, device: Device, count: int, cuda: str) -> Iterator[Finding]:
    """count: GPUs of a host that the plan is for. cuda: what torch was built for, `13.0`."""
    yield from driver(smi, cuda)
    yield from census(smi.gpus, device, count)
    yield from ecc(smi.gpus)
    yield from slowed(smi.gpus)
    yield from clocks(smi.gpus)
    yield from pcie(smi.gpus)
    yield from heat(smi.gpus)
    yield from modes(smi.gpus)
    yield from idle(smi.gpus)


def driver(smi: Smi, cuda: str) -> Iterator[Finding]:
    said = f"driver {smi.driver}, CUDA {smi.cuda}"
    if smi.driver is None or smi.cuda is None:
        message = f"{said}: nvidia-smi and the driver do not fit each other"
        yield Finding("driver", "fail", message, "look at nvidia-smi")
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
    for words, test in {
        f"memory is not that of `{device.name}` ({device.total_gib} GiB)": lambda g: (
            not device.sized((g.total_mib or 0) / 1024)
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
        (
            [g for g in gpus if (g.corrected or 0) >= CORRECTED],
            f"{CORRECTED} or more corrected memory errors since the driver was loaded",
        ),
        ([g for g in gpus if g.sram_exceeded], "SRAM errors are over the threshold at which the vendor replaces it"),
        ([g for g in gpus if g.spare[1]], "a bank has no spare rows left"),
        *(([g for g in gpus if g.repair == r], "; ".join(r)) for r in dict.fromkeys(g.repair for g in gpus) if r),
    ):
        if bad:
            clean = False
            yield Finding("ecc", "fail", f"{on(bad)}: {words}", "drain the host and have it looked at")
    unread: dict[str, Callable[[Gpu], Any]] = {
        "uncorrected memory errors": lambda g: g.uncorrected,
        "corrected memory errors": lambda g: g.corrected,
        "remapped rows": lambda g: None if None in (*g.remapped, *g.spare) else 0,
        "whether SRAM errors are over the vendor's threshold": lambda g: g.sram_exceeded,
    }
    for words, told in unread.items():
        if some := [g for g in gpus if g.ecc and told(g) is None]:
            clean = False
            yield Finding("ecc", "note", f"{on(some)}: {words} cannot be read")
    for rows, words in ((0, "correctable"), (1, "uncorrectable")):
        if some := [g for g in gpus if g.remapped[rows]]:
            clean = False
            yield Finding("ecc", "note", f"{on(some)}: rows were remapped after {words} errors")
    if some := [g for g in gpus if g.spare[0]]:
        clean = False
        yield Finding("ecc", "note", f"{on(some)}: a bank has few spare rows left")
    if clean and gpus:
        yield Finding("ecc", "ok", "on, no uncorrected errors, nothing to repair")


def slowed(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for reason in SLOWED:
        if bad := [g for g in gpus if reason in (g.slowed or ())]:
            yield Finding("throttle", "fail", f"{on(bad)}: {reason.replace('_', ' ')}", "cooling, power, or a sick GPU")
    if unread := [g for g in gpus if g.slowed is None]:
        yield Finding("throttle", "note", f"{on(unread)}: whether heat or power slows it cannot be read")
    if bad := [g for g in gpus if g.capped and not g.processes]:
        said = f"{on(bad)}: the power cap slows it while nothing runs"
        yield Finding("throttle", "fail", said, "its power limit, or a sick GPU")
    elif gpus and not any(g.slowed or g.slowed is None for g in gpus):
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
            hint = "`nvidia-smi -q -d CLOCK,POWER`; whoever set it can tell why"
            yield Finding("clocks", "fail", f"{on(bad)}: {words}", hint)
    if clean and gpus:
        first = gpus[0]
        yield Finding("clocks", "ok", f"SM up to {shown(first.max_sm_mhz)} MHz, power up to {shown(first.limit_w)} W")


def pcie(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The link to the host: checkpoints, data and, between NVLink islands, collectives go over it. A seldom used one may slow down."""
    clean = True
    checks: tuple[tuple[str, Level, Callable[[Gpu], Any]], ...] = (
        ("fewer PCIe lanes than it has", "fail", lambda g: g.width and g.max_width and g.width < g.max_width),
        ("a slower PCIe generation than it has", "fail", lambda g: slower(g) and g.state in (None, "P0")),
        ("a slower PCIe generation than it has, at rest", "note", lambda g: slower(g) and g.state not in (None, "P0")),
        (f"{REPLAYS} or more PCIe replays since the driver was loaded", "fail", lambda g: (g.replays or 0) >= REPLAYS),
        (
            "another PCIe link than GPU 0",
            "fail",
            lambda g: (g.max_gen, g.max_width) != (gpus[0].max_gen, gpus[0].max_width),
        ),
        (
            "its PCIe link or replays cannot be read",
            "note",
            lambda g: None in (g.width, g.max_width, g.gen, g.max_gen, g.replays),
        ),
    )
    for words, level, test in checks:
        if bad := [g for g in gpus if test(g)]:
            clean = False
            yield Finding("pcie", level, f"{on(bad)}: {words}", "reseat it, or another slot; `nvidia-smi -q -d PCIE`")
    if clean and gpus:
        yield Finding("pcie", "ok", f"generation {shown(gpus[0].gen)}, {shown(gpus[0].width)} lanes")


def slower(g: Gpu) -> bool:
    return bool(g.gen and g.max_gen and g.gen < g.max_gen)


def heat(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Before anything runs: one that is hot now will be slowed soon."""
    clean = True
    for words, test in {
        f"less than {HEADROOM} degrees below the point where it slows down": lambda g: g.headroom is not None
        and g.headroom < HEADROOM,
        f"memory at {HOT_MEMORY} degrees or more": lambda g: (g.memory_c or 0) >= HOT_MEMORY,
    }.items():
        if bad := [g for g in gpus if test(g)]:
            clean = False
            yield Finding("heat", "fail", f"{on(bad)}: {words}, and nothing runs yet", "fans, airflow, the water")
    if unread := [g for g in gpus if None in (g.headroom, g.memory_c)]:
        yield Finding("heat", "note", f"{on(unread)}: how warm it is cannot be read")
    elif clean and gpus:
        least = min(g.headroom or 0 for g in gpus)
        yield Finding("heat", "ok", f"{least:g} degrees or more below the point where GPUs slow down")


def modes(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """How the driver was set up: for one process at most, for none, unloaded between runs; and with which firmware."""
    shut = [g for g in gpus if g.compute == "Prohibited"]
    alone = [g for g in gpus if g.compute not in (None, "Default", "Prohibited")]
    off = [g for g in gpus if g.persistence == "Disabled"]
    unread = [g for g in gpus if None in (g.compute, g.persistence)]
    found: tuple[tuple[list[Gpu], Level, str, str | None], ...] = (
        (shut, "fail", "compute mode lets no process in", "as root: `nvidia-smi -c DEFAULT`"),
        (alone, "note", "compute mode lets one process in: no profiler beside a rank", None),
        (off, "note", "persistence mode is off: the driver is loaded anew for each run, and forgets clocks", None),
        (unread, "note", "its compute or persistence mode cannot be read", None),
    )
    for bad, level, words, hint in found:
        if bad:
            yield Finding("mode", level, f"{on(bad)}: {words}", hint)
    if gpus and not (shut or alone or off or unread):
        yield Finding("mode", "ok", "persistent, compute mode Default")
    if bad := [g for g in gpus if g.vbios != gpus[0].vbios]:
        said = ", ".join(sorted({g.vbios or "unknown" for g in gpus}))
        message = f"{on(bad)}: another VBIOS than GPU 0 ({said})"
        yield Finding("vbios", "fail", message, "one firmware on all: clocks and limits differ")
    elif gpus:
        yield Finding("vbios", "ok", f"VBIOS {gpus[0].vbios or 'unknown'} on every GPU")


def idle(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    clean = True
    for g in gpus:
        if g.processes:
            clean = False
            who = ", ".join(f"PID {p.pid} ({p.name}, {shown(p.mib)} MiB)" for p in g.processes)
            hint = "wait for it, or end it: nothing is killed here"
            yield Finding("idle", "fail", f"GPU {g.index} is in use by {who}", hint)
    if bad := [g for g in gpus if not g.processes and (g.used_mib or 0) > IDLE_MIB]:
        clean = False
        used = ", ".join(f"{shown(g.used_mib)} MiB" for g in bad)
        said = f"{on(bad)}: {used} in use by a process that cannot be seen from here"
        yield Finding("idle", "fail", said, "look outside this container")
    if unread := [g for g in gpus if not g.processes and g.used_mib is None]:
        clean = False
        yield Finding("idle", "note", f"{on(unread)}: memory in use cannot be read, nor whether somebody is on it")
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
        "vbios": g.vbios,
        "pcie": [g.gen, g.width],
    }
    return {"driver": smi.driver, "driver_cuda": smi.cuda, "gpus": [said(g) for g in smi.gpus]}


def on(gpus: Sequence[Gpu]) -> str:
    """`GPU 0`, `GPUs 0-3, 6`."""
    runs = []
    for _, run in groupby(enumerate(sorted(g.index for g in gpus)), key=lambda pair: pair[1] - pair[0]):
        numbers = [n for _, n in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(runs)}"


def shown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
