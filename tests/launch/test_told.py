"""What the launcher finds of hosts, logs and runs, a line a case (told.txt); a page of a run that is looked at (golden/launch.txt)."""

import itertools
import json
import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in
import test_oom as ooms
import test_storage as disks
from hosts import FIXTURES, process, smi
from test_steps import REAL

from launch import finding
from launch.host import gpu, linux, preflight, sanity, stack, storage, topology
from launch.host.bounded import Answer
from launch.record import oom, report, steps
from launch.run import hang, inspect
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

GOLDEN = Path(__file__).parents[1] / "golden" / "launch.txt"
DEVICE = load("nam56r_smoke").device
NOON = datetime(2026, 11, 21, 12)


def told(found: Iterable[finding.Finding]) -> list[str]:
    return [f"{f.level} {f.name}" for f in found]


def in_a_line(title: object, lines: Iterable[object]) -> str:
    return f"{title}: {', '.join(map(str, lines))}"


def alike(cases: Iterable[tuple[object, object]]) -> Iterator[str]:
    """A line for each outcome, with the cases that have it."""
    found: dict[str, list[str]] = {}
    for case, outcome in cases:
        found.setdefault(str(outcome), []).append(str(case))
    yield from (f"{outcome} <- {'; '.join(cases)}" for outcome, cases in found.items())


def changed(title: object, was: list[str], now: list[str]) -> Iterator[str]:
    """A title and the lines that are others; nothing where all are alike."""
    if was != now:
        gone = [
            f"no {line}"
            for line in was
            if line not in now and line.partition(":")[0] not in {n.partition(":")[0] for n in now}
        ]
        yield in_a_line(
            title, [*(line for line in now if line not in was), *gone] or ["the same, in another order or number"]
        )


# Hosts -------------------------------------------------------------------------------------------------------------------


def of_gpus() -> Iterator[str]:
    def seen(text: str, count: int = 3, cuda: str = "13.0") -> list[str]:
        if (found := gpu.parse(text)) is None:
            return ["no report"]
        facts = gpu.facts(found)
        facts |= {f"GPU {g['index']}, {name}": value for g in facts.pop("gpus") for name, value in g.items()}
        return [*told(gpu.findings(found, DEVICE, count, cuda)), *(f"{name}: {value}" for name, value in facts.items())]

    for path in sorted(FIXTURES.glob("smi_*.xml")):
        yield f"{path.name}"
        yield from map(repr, gpu.parse(path.read_text()).gpus)
        yield from seen(path.read_text(), 1, "12.2")
    text = smi(3, at=1, processes=process(7))
    plain = seen(text)
    yield from plain
    for more in (
        {"cap": "Active"},
        {"cap": "Active", "processes": process(7)},
        {"used": "1024 MiB"},
        {"used": "1025 MiB"},
        {"used": "N/A"},
    ):
        yield from changed(more, plain, seen(smi(3, at=1, **more)))
    for count, cuda in ((2, "13.0"), (4, "13.1"), (3, "12.9"), (3, "13")):
        yield from changed(f"{count} GPUs, CUDA {cuda}", plain, seen(text, count, cuda))
    root = ET.fromstring(text)
    for element in (e for e in root.findall("gpu")[1].iter() if not len(e)):
        kind = NAMED if element.tag in NAMES else NUMBERS if any(map(str.isdecimal, element.text or "")) else WORDS
        for value in (*kind, *VALUES_OF.get(element.tag, ())):
            was, element.text = element.text, value
            yield from changed(f"{element.tag} {value}", plain, seen(ET.tostring(root, "unicode")))
            element.text = was
    for path, value in OLDER.items():
        node = root.findall("gpu")[1]
        *folders, name = path.split("/")
        for folder in folders:
            node = node.find(folder) if node.find(folder) is not None else ET.SubElement(node, folder)
        new = ET.SubElement(node, name)
        new.text = value
        yield from changed(f"{path} {value}", plain, seen(ET.tostring(root, "unicode")))
        node.remove(new)


NAMES, NAMED = (
    ("product_name", "vbios_version", "pci_bus_id", "pid", "process_name", "state", "performance_state"),
    ("", "other"),
)
WORDS, NUMBERS = ("", "N/A", "Yes", "Active", "Disabled"), ("N/A", "1", "99", "100", "200 C")
VALUES_OF = {
    "used": ("1024 MiB", "1025 MiB"), "total": ("139000 MiB", "140000 MiB", "147000 MiB", "149000 MiB"), "gpu_temp_tlimit": ("7 C", "8 C"),
    "memory_temp": ("84 C", "85 C"), "current_power_limit": ("699.99 W", "701.00 W"), "graphics_clock": ("1979 MHz", "1981 MHz"),
    "replay_counter": ("101",), "sm_clock": ("1981 MHz",), "gpu_temp_slow_tlimit_threshold": ("-49 C",),
    "compute_mode": ("Exclusive_Process",),
}  # fmt: skip
# What other drivers say, or say elsewhere.
OLDER = {
    "retired_pages/pending_retirement": "Yes", "gpu_reset_status/reset_required": "Yes", "ecc_errors/channel_repair_pending": "Yes",
    "ecc_errors/tpc_repair_pending": "Yes", "ecc_errors/volatile/double_bit/total": "3", "temperature/gpu_temp_slow_threshold": "40 C",
    "clocks_throttle_reasons/clocks_throttle_reason_sw_thermal_slowdown": "Active",
    "clocks_throttle_reasons/clocks_throttle_reason_hw_power_brake_slowdown": "Active",
    "power_readings/power_limit": "400.00 W", "power_readings/default_power_limit": "500.00 W",
}  # fmt: skip


def of_links() -> Iterator[str]:
    for path in sorted(FIXTURES.glob("topo_*.txt")):
        found = topology.parse(path.read_text())
        for count, link in ((len(found.gpus), "NV18"), (8, "NODE")):
            yield f"{path.name} {count} {link}"
            yield in_a_line("  ", told(topology.findings(found, link, count)))
        yield from (f"{k}: {v}" for k, v in topology.facts(found).items())
    for active, link in itertools.product(
        ({"0": 18, "1": 18}, {"0": 18, "1": 17, "2": None}, {"0": None, "1": None}, {"0": 4}), ("NV18", "NV4", "PIX")
    ):
        yield in_a_line(f"{active} {link}", told(topology.counted(active, link)))
    for state in ("In Progress", "N/A", "Completed", "Not Started"):
        yield in_a_line(state, told(topology.fabric(gpu.parse(smi(4, at=2, fabric=state)).gpus)))


def of_hosts() -> Iterator[str]:
    training = [linux.Process(n, 1, ("python", "-m", "nam_megatron.train")) for n in range(2, 21)]
    yield from told(
        linux.stale(running, own) for running, own in ((training, 1), (training[:16], 2), (training[:17], 1))
    )
    log = "".join(
        f"NVRM: Xid (PCI:0000:{bus}): {number}, x\n" for bus, number in (("b", 79), ("a", 31), ("b", 79), ("a", 13))
    )
    yield from told(map(linux.xid, (log, log.replace("79", "8"), log.replace("79", "1370"), "", None)))
    live, dead = ({"state": s, "rate": "400", "link_layer": "x"} for s in ("4: ACTIVE", "1: DOWN"))
    yield from told(
        linux.network(ports, nodes) for ports in ({}, {"a": dead}, {"a": dead, "b": live}) for nodes in (1, 2)
    )
    counts = (1, linux.FILES - 1, linux.FILES, linux.FILES + 1, linux.resource.RLIM_INFINITY)
    grid = itertools.product(counts, counts, (1 << 20, -1), (1, 2))
    yield from alike(
        ((soft, hard, most, nodes), told(linux.limits(nodes, (soft, hard), (0, most))))
        for soft, hard, most, nodes in grid
    )
    states = itertools.product((1, 2), (-1, 0, 4, 5), (0, 0x3F, 0x40, 0x41), (0, 12345))
    yield from alike(((n, *state), told([linux.clock(n, state)])) for n, *state in states)
    table = "head\n" + "\n".join(
        f"0: {at}:{port} 0:0 {state} 0 0 0 0 0 {inode} 1"
        for inode, (at, port, state) in enumerate(
            itertools.product(("0100007F", "00000000000000000000000001000000"), ("735a", "735A", "0735"), ("0A", "01"))
        )
    )
    yield f"{sorted(linux.listening(table, 0x735A), key=int)} {sorted(linux.listening(table, 0x735), key=int)}"


def of_disks() -> Iterator[str]:
    for name in ("ONE_DISK", "CLUSTER", "CONTAINER", "BTRFS"):
        mounted = storage.mounts(getattr(disks, name))
        for given in ((), ("schedule.save=/durable/c", "schedule.save_interval=2"), ("cluster.storage.durable=/durable",
                      "cluster.storage.scratch=/scratch", "cluster.storage.receipts=/durable/r", "schedule.load=/old")):  # fmt: skip
            used = disks.used(
                RECIPES(*given),
                {"TMPDIR": "/tmp/t", "TRITON_CACHE_DIR": "/durable/triton", "CUDA_CACHE_PATH": "/scratch/c"},
            )
            yield in_a_line(f"{name} {' '.join(given)}", (f"{p.kind} {p.name} {p.path}" for p in used))
            found = [*storage.root_volume(used, mounted), *storage.caches(used), *storage.classes(used, mounted)]
            yield in_a_line("  ", told(found))
            programs = [
                storage.Place(p, "program", Path(p)) for p in ("/scratch/venv", "/durable/uv", "/tmp/pip", "/opt/venv")
            ]
            yield in_a_line("  ", told(storage.environment(programs[at:], used, mounted) for at in range(4)))
    one = storage.CHECKPOINT_BYTES * 1000
    grid = itertools.product(("null", "/durable/c"), ("null", 1, 2, 3), (None, one - 1, one, 2 * one - 1, 2 * one))
    recipes = (
        (case, RECIPES(f"schedule.save={case[0]}", f"schedule.save_interval={case[1]}", "schedule.train_steps=2"))
        for case in grid
    )
    yield from alike(
        (case, f"{told([storage.space(recipe, 1000, case[2])])} {storage.grace(recipe, 3 * 10**9)}")
        for case, recipe in recipes
    )


class Recipes:
    """Of the same keys the same recipe: it is composed once."""

    def __init__(self):
        self.base = disks.recipe()

    def __call__(self, *overrides: str):
        schedule, storage_ = {}, {}
        for key, _, value in (o.partition("=") for o in overrides):
            into, name = (
                (storage_, key[16:]) if key.startswith("cluster.storage.") else (schedule, key.rpartition(".")[2])
            )
            into[name] = None if value == "null" else int(value) if value.isdecimal() else value
        cluster = self.base.cluster
        cluster = cluster.model_copy(update={"storage": cluster.storage.model_copy(update=storage_)})
        return self.base.model_copy(
            update={"schedule": self.base.schedule.model_copy(update=schedule), "cluster": cluster}
        )


RECIPES = Recipes()


def of_the_pass() -> Iterator[str]:
    big, small = "GEMM throughput (8192x8192x8192, bf16)", "GEMM throughput (1024x1024x1024, bf16)"
    reduce, gather = (f"{what} busbw (global PG, size=4, 268 MB) [GB/s]" for what in ("All-reduce", "All-gather"))

    def row(name: str, low: float, outlier: str = "") -> str:
        return f"  {name}: median={low + 5}, mean={low + 4}, min={low}, max={low + 9}\n{outlier}"

    floor, wire, far = DEVICE.gemm_floor_tflops, DEVICE.allreduce_floor_gbs, "    OUTLIER rank 3 (h): 1.0 (x)\n" * 2
    for name, said in {
        "well": row(small, 1) + row(big, floor) + row(reduce, wire) + row(gather, 1),
        "slow": row(big, floor - 0.1) + row(reduce, wire - 0.1),
        "apart": row(big, floor, far) + row(reduce, wire, far) + row(gather, 1, far),
        "slow and apart": row(big, floor - 1, far), "others alone": row(small, floor, far) + row(gather, 9),
    }.items():  # fmt: skip
        yield name
        yield from map(repr, sanity.parse(said))
        yield from (in_a_line(count, told(sanity.findings(sanity.parse(said), DEVICE, count))) for count in (1, 2))
    table = "| Memory | Pass |\n|  PCIe  | {} - All |\n| x | Skip |"
    yield from told(sanity.dcgm(table.format(what), code) for what in ("Pass", "Fail", "Warn") for code in (0, 1, None))
    yield from told(sanity.dcgm(said, 0, why) for said, why in (("", ""), ("\n  no host \nx", ""), ("x", "no answer")))
    with pytest.MonkeyPatch.context() as patch:
        places = ["/none", str(sanity.script().parents[1])]
        for spec in (
            SimpleNamespace(submodule_search_locations=places),
            SimpleNamespace(submodule_search_locations=None),
            None,
        ):
            patch.setattr(sanity.importlib.util, "find_spec", lambda _, spec=spec: spec)
            yield str(sanity.script()).replace(places[1], "")
        yield f"{told(sanity.run(DEVICE, 2, 29500, {})[0])} {sanity.words(Path('/s.py'), 3, 29501)[1:]}"
    lock = stack.load()
    right = {p.name: p.version for p in lock.packages} | {"torch": f"{lock.torch.version}+cu130"}
    loaded = {p.module: {"ok": True} for p in lock.packages if p.module}
    loaded["torch"] = {"torch": "2.11.0", "cuda": lock.torch_cuda, "cudnn": 9, "nccl": "2.28", "triton": "3.6"}
    second = next(p for p in lock.packages[1:] if p.module)
    for name, installed, imported in (
        ("as locked", right, loaded), ("nothing", {}, {}), ("another torch", right | {"torch": "2.10.0"}, loaded),
        ("no torch", right | {"torch": None}, loaded), ("broken torch", right, loaded | {"torch": {"error": "OSError"}}),
        ("silent torch", right, loaded | {"torch": {}}), ("another CUDA", right, loaded | {"torch": {"torch": "2.11.0", "cuda": "12.8"}}),
        ("another package", right | {second.name: "0.1", lock.packages[-1].name: f"{lock.packages[-1].version}+x"}, loaded),
        *((why, right, loaded | {second.module: {"error": why}}) for why in ("undefined symbol: x", "libc10.so: x", "ABI 9", "y")),
    ):  # fmt: skip
        yield name
        yield in_a_line("  ", told(stack.findings(lock, installed, imported)))
    some = [finding.Finding("gpus", level, f"{level}|x\ny", "do|it") for level in ("ok", "note", "fail")]
    some += [
        finding.Finding("ecc", "fail", "bad"),
        finding.Finding("ecc", "fail", "worse"),
        finding.Finding("idle", "fail", "busy"),
    ]
    for waived in ({}, {"ecc": "known", "gpus": "few"}, {"ecc": "a", "gpus": "b", "idle": "c"}):
        found = finding.waive(some, waived)
        yield from (finding.render(found, form, "node", "abc") for form in ("text", "json", "markdown", "line"))
    facts = {"versions": {"a": "1"}, "torch": {"torch": "2"}, "megatron": "patched", "driver": "5", "driver_cuda": "13"}
    facts |= {"plan": "p", "packages": {"b": "1"}, "code": {"launch": "c"}}
    for change in ({}, *({key: "other"} for key in facts), {"gpus": [{"vbios": "b"}]}, {"gpus": None}, {"host": "h"}):
        yield f"{change} {preflight.fingerprint(facts | {'gpus': [{'vbios': 'a'}, {'vbios': None}]} | change)}"


def of_checks() -> Iterator[str]:
    """What preflight asks programs, with which bounds, and what it makes of their answers."""
    recipe = RECIPES("schedule.save=/durable/c", "schedule.save_interval=1")
    lowering = SimpleNamespace(plan=SimpleNamespace(recipe=recipe))
    environ, matrix = {"E": "1"}, (FIXTURES / "topo_h200_x4.txt").read_text()
    links = {"active": dict.fromkeys("0123", 18)}
    for name, count, report_, table, counted in (
        ("well", 4, Answer(0, smi(4)), Answer(0, matrix), links),
        ("weak", 4, Answer(0, smi(4, fabric="x")), Answer(0, matrix), {"error": "e"}),
        ("another", 2, Answer(0, "x"), Answer(0, "y"), {}), ("silent", 2, Answer(9, "", "E: no"), Answer(None, why="late"), links),
        ("failing", 1, Answer(9, smi(1)), Answer(1, matrix), {}),
        ("one", 1, Answer(0, smi(1, fabric="x")), Answer(0, (FIXTURES / "topo_h200_x1.txt").read_text()), {}),
    ):  # fmt: skip
        asked: list[str] = []

        def ask(words, seconds, env=None, said=(report_, table), asked=asked) -> Answer:
            asked.append(f"{' '.join(words)} {seconds} {env}")
            return said["topo" in words]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight, "ask", ask)
            patch.setattr(stack, "probed", lambda *words, said=counted, asked=asked: asked.append(str(words)) or said)
            words = {"port": 29500, "sanity": None}
            cluster = recipe.cluster.model_copy(update={"gpus_per_node": count})
            context = SimpleNamespace(
                lowering=lowering, cluster=cluster, words=words, checkout=Path("/w"), durable=Path("/durable")
            )
            looks = preflight.gpus(context, environ, stack.load()), preflight.links(context, environ)
            yield f"{name}: {sorted(asked)}"
            for found, facts in looks:
                yield in_a_line(" ".join(facts), told(found))
            yield from map(
                str, (preflight.wanted(context), [preflight.wanted(replace_(context, said)) for said in (True, False)])
            )
            patch.setattr(sanity, "run", lambda *words: str(words[1:]))
            some = [finding.Finding(name, level, "") for name in finding.NAMES for level in ("note", "fail")]
            yield f"{preflight.passes(context, environ, some[::2])} {told(preflight.passes(context, environ, some)[0])}"
        left = [Answer(0, " \n"), Answer(1, "x"), Answer(0, "log")][: count - 1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                linux, "ask", lambda words, seconds, left=left: (left or [Answer(0, f"{words} {seconds}")]).pop(0)
            )
            yield str(linux.kernel_log(7))


def of_looks() -> Iterator[str]:
    """What else preflight looks at, and what of it goes to whom."""
    recipe = RECIPES("schedule.save=/durable/c", "schedule.save_interval=1")
    lowering, words = SimpleNamespace(plan=SimpleNamespace(recipe=recipe)), {"port": 29500}
    cluster = recipe.cluster.model_copy(update={"gpus_per_node": 4, "nodes": 3})
    context = SimpleNamespace(
        lowering=lowering, cluster=cluster, words=words, checkout=Path("/w"), durable=Path("/durable")
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("numa", "stale", "port_free", "network", "xid", "shm", "clock", "compiling"):
            patch.setattr(linux, name, lambda *given, name=name: (name, *given))
        patch.setattr(linux, "limits", lambda *given: given)
        patch.setattr(linux, "text", str)
        for name in ("processes", "infiniband", "facts"):
            patch.setattr(linux, name, lambda name=name: name)
        patch.setattr(linux, "kernel_log", lambda seconds: seconds)
        patch.setattr(linux.os, "getpid", lambda: 77)
        yield from map(str, preflight.system(context, {"E": "1"})[0])
        patch.setattr(storage, "facts", lambda used, mounted: [p.name for p in used])
        patch.setattr(storage, "mounts", str)
        patch.setattr(preflight, "parameters", lambda plan: (1000, 10))
        patch.setattr(storage, "space", lambda *given: given[1:])
        patch.setattr(storage, "free", str)
        patch.setattr(storage, "findings", lambda used, mounted: (len(used), mounted))
        patch.setattr(storage, "programs", dict)
        patch.setattr(storage, "environment", lambda programs, used, mounted: (programs, len(used), mounted))
        yield str(preflight.disks(context, {"E": "1"}))
        plain = SimpleNamespace(plan=SimpleNamespace(recipe=RECIPES()))
        yield str(preflight.disks(SimpleNamespace(**vars(context) | {"lowering": plain}), {})[0][2:])
        patch.setattr(stack, "versions", lambda lock: {"torch": "2"})
        patch.setattr(stack, "probe", lambda lock, env: {"torch": {"cuda": "13", "error": "x"}, "env": env})
        patch.setattr(stack, "megatron", lambda: ("finding", "patched"))
        patch.setattr(stack, "bytecode_of_megatron", lambda: [])
        patch.setattr(stack, "findings", lambda lock, installed, imported: [installed, imported])
        yield str(preflight.software({"E": "1"}, stack.load(), SimpleNamespace(packages=())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=len(str(path)) * 10**9))
        used = disks.used(recipe)
        yield from (
            str(storage.facts(used, storage.mounts(getattr(disks, name)))) for name in ("ONE_DISK", "CLUSTER", "BTRFS")
        )
        patch.setattr(stack, "requirements", lambda: ["requirements"])
        yield stack.steps(stack.load())


def replace_(context: SimpleNamespace, said: bool) -> SimpleNamespace:
    return SimpleNamespace(**vars(context) | {"words": context.words | {"sanity": said}})


# Runs --------------------------------------------------------------------------------------------------------------------


def of_memory() -> Iterator[str]:
    errors = {name: getattr(ooms, name) for name in ("ACTIVATION", "FRAGMENTED", "NEIGHBOUR", "OLD", "OUTSIDE")}
    failed = (f"CU{name}_STATUS_ALLOC_FAILED" for name in ("BLAS", "DNN", "SOLVER", "SPARSE"))
    errors |= {f"library {n}": text for n, text in enumerate((*ooms.LIBRARIES, *failed, "cudaErrorMemoryAllocation"))}
    calls = {name: getattr(ooms, name) for name in ("FORWARD", "BACKWARD", "OPTIMIZER", "SETUP", "GRAPHS")}
    calls["SAVE"], calls["NONE"] = (("x/checkpointing.py", "save_checkpoint_and_time"),), ()
    yield from alike(
        (f"{name} {where}", f"{found.phase}, after step {found.steps}, rank {found.rank}: {found.kind[0]}")
        for (name, text), (where, stack_) in itertools.product(errors.items(), calls.items())
        for found in oom.triage([ooms.STEP.format(7), *ooms.traceback(text, *stack_, rank=2)])
    )
    place = "[rank2]: out of memory: step 9, rank 2, in the backward pass of layer 5 (moe): decoder.layers.4"
    for said in (place, place.replace("rank 2,", "rank 3,"), place.split(" of layer")[0] + ", in the output layer"):
        for text in (ooms.traceback(ooms.OLD, rank=2), [ooms.OLD], ooms.traceback(ooms.OLD, *ooms.OPTIMIZER, rank=2)):
            yield from (line for found in oom.triage([said, *text, *text]) for line in oom.told(found))
    grid = itertools.product(
        (None, 1.0), (0.0, 0.9, 1.0), (None, 0.9, 1.0), (None, 100.0), (5.5, 6.0, 6.5), ("setup", "forward")
    )
    cases = []
    for tried, others, free, total, process_, where in grid:
        cases.append(
            (
                (tried, others, free, total, process_, where),
                oom.Oom(1, 0, 0, where, tried, total, process=process_, allocated=0.5, unallocated=free, others=others),
            )
        )
    yield from alike((" ".join(map(str, case)), f"{found.kind[0]} {found.outside:g}") for case, found in cases)
    assert {f.name for f in fields(oom.Oom)} > {"layer"}


def of_hangs() -> Iterator[str]:
    here = os.uname().nodename
    beats = {r: hang.Beat(r, here, 10 + r, "step", 5, 40, 0.1, 1.0, 5) for r in range(4)}
    still = {10 + r: hang.Look("S", 1.0) for r in range(4)}

    def said(known, after=still, world=4, seconds=2.0) -> str:
        found = hang.triage(known, world, still, after, seconds)
        return f"{found.ranks} {found}"

    def all_with(**more):
        return {r: replace(b, **more) for r, b in beats.items()}

    cases: list[tuple[str, str]] = []
    for phase, step in itertools.product(hang.PHASES, (1, 2, 3)):
        known = all_with(phase=phase, step=step, nth=step)
        looks = {
            "waiting": (known, still),
            "busy": (known, still | {11: hang.Look("R", 1.4), 12: hang.Look("R", 1.39)}),
            "tools": (known, still | {12: hang.Look("S", 1.0, ("nvcc", "ptxas")), 13: hang.Look("R", 3.0)}),
            "one later": (known | {1: replace(known[1], step=step + 1, micro=41)}, still),
            "one ended": (known | {1: replace(known[1], phase="end")}, still | {11: hang.Look(None, 0.0)}),
        } | {
            f"state {state}": (known, still | {11: hang.Look(state, 1.0)})
            for state in ("T", "t", "D", "Z", "X", None, "R")
        }
        cases += (
            (f"{phase} {step} {what}", said(*look).replace(f"step {step}", "its step")) for what, look in looks.items()
        )
    yield from alike(cases)
    yield said({r: beats[r] for r in (0, 2)}, world=40)
    yield said({}, world=20)
    yield said(all_with(host="another"), still | {11: hang.Look("T", 9.0)})
    yield said(beats, seconds=0.0)
    for spent in ((0.1, 0.115, 0.1), (0.1, 0.116, 0.1), (0.3, 0.2, 0.1), (0.1, None, 0.0), (0.1, 0.2, None)):
        yield f"{spent} {hang.skew({r: replace(beats[0], rank=r, spent=v) for r, v in enumerate(spent)})}"


def of_processes(proc: Path, run: Path) -> Iterator[str]:
    """A run's processes in a /proc of our own: torchrun, two ranks, a worker of one, and somebody else's."""
    plan = str(run / "plan.json")
    for pid, parent, rank, state, words in (
        (20, 1, None, "S", ("torchrun", plan)), (21, 20, 1, "R", ("python", plan)), (22, 20, 0, "D", ("python", plan)),
        (23, 21, 1, "S", ("python", plan)), (24, 1, 0, "S", ("python", "/other/plan.json")), (25, 23, None, "S", ("nvcc",)),
    ):  # fmt: skip
        folder = proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_text("\0".join(words) + "\0")
        (folder / "environ").write_text("\0".join(["A=1=2", "odd", *([] if rank is None else [f"RANK={rank}"])]))
        (folder / "stat").write_text(
            f"{pid} (a) b{')' * (pid == 25)}) {state} {parent} " + " ".join(map(str, range(3, 40)))
        )
        (folder / "status").write_text(
            f"Name:\tx\nState:\t{state} (s)\nThreads:\t3\nVmRSS:\t 5 kB\nvoluntary_ctxt_switches:\t9\nnonvoluntary_ctxt_switches:\t1\n"
        )
        (folder / "wchan").write_text("futex\0")
        (folder / "stack").write_text("[<0>] a\n[<0>] b\n")
    (proc / "25" / "stat").write_text("25 (nvcc) R 23 " + " ".join(map(str, range(3, 40))))
    (run / hang.FOLDER).mkdir(parents=True)
    beat = {"host": "node", "phase": "step", "step": 5, "micro": 9, "spent": 0.1, "at": 90.0, "nth": 5}
    for rank, pid in ((0, 22), (1, 21), (2, 99)):
        path = run / hang.FOLDER / str(rank)
        path.write_text(json.dumps({"rank": rank, "pid": pid} | beat | {"micro": 9 + (rank == 2)}))
        os.utime(path, (90, 90))
    (run / "log.txt").write_text("\n".join([ooms.STEP.format(4), *ooms.traceback(ooms.OLD, *ooms.FORWARD, rank=1)]))
    report_ = smi(2, at=1, processes=process(21) + process(7, "/x/other", "N/A"), used="5 MiB")
    content = {"run": "r", "state": "open"}
    for spy, said in ((None, report_), ("/bin/py-spy", "x")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inspect.shutil, "which", lambda name, spy=spy: spy)
            clock = SimpleNamespace(sleep=lambda seconds: None, time=lambda: 100.0)
            patch.setattr(hang, "time", clock)
            patch.setattr(inspect, "time", clock)
            patch.setattr(
                inspect,
                "ask",
                lambda words, s, said=said: Answer(
                    int("22" in words), f"{' '.join(words)} {s}" if "dump" in words else said
                ),
            )
            yield from (
                line for world in (3, 4) for line in inspect.report(run, content | {"job": {"world": world}}, 7, proc)
            )
            yield next(inspect.report(run, content | {"state": "sealed", "outcome": {"end": "failed"}}, 7, proc))
    looks = hang.look([20, 21, 22, 23, 25, 99], proc)
    yield from (f"{pid}: {look}" for pid, look in looks.items())
    yield from map(repr, (*linux.processes(proc), *inspect.ranks(run, proc)))
    yield f"{sorted(linux.ancestors(linux.processes(proc), 25))} {linux.owners({'77'}, proc)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.os, "access", lambda path, _: True)
        yield from told(
            storage.classes([storage.Place(n, k, run) for n, k in (("durable",) * 2, ("scratch",) * 2)], [])
        )
    ib = proc / "class/infiniband/mlx5_0/ports/1"
    ib.mkdir(parents=True)
    (ib / "state").write_text("4: ACTIVE\n")
    (proc / "meminfo").write_text("MemTotal:  1073741824 kB\n")
    online = proc / "devices/system/node/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-1\n")
    yield str({k: v for k, v in linux.facts(proc, proc).items() if k != "cpus"})
    armed = [inspect.Rank(1, n, environ) for n, environ in enumerate((
        {inspect.PIPE: str(run / "p"), inspect.DUMP[1]: str(run / "d")}, {inspect.PIPE: str(run / "p"), "HOME": "/h"},
        {inspect.PIPE: str(run / "p"), inspect.DUMP[0]: "/f", inspect.DUMP[1]: "/g", "XDG_CACHE_HOME": "/c"},
        {"HOME": "/h"}, {"XDG_CACHE_HOME": "/c"}))]  # fmt: skip
    yield from (str(inspect.dump_file(rank)) for rank in armed[1:])
    (run / "d0").touch()
    yield from inspect.recorder(armed[:2], 0)
    yield from inspect.recorder(armed[3:], 0)


def of_logs() -> Iterator[str]:
    lines = [line(n, 1000 if n < 4 else 100 + n % 7, loss=9 / n) for n in range(1, 71)]
    at = [f" [{NOON + timedelta(seconds=s)}] {what}" for s, what in (
        (30, "saving checkpoint at iteration       2 to /c"), (31.5, "scheduled an async checkpoint save at iteration       2 to /c"),
        (39, "successfully saved checkpoint from iteration       2 to /c"), (50, "saving checkpoint at iteration       9 to /c"),
        (53, "successfully saved checkpoint from iteration       9 to /c"),
        (54, "successfully saved checkpoint from iteration       8 to /c"),
        (60, "saving checkpoint at iteration       12 to /c"),
    )]  # fmt: skip
    held = [stand_in.reading(when, step, gap << 30, rank=rank) for when, step, gap, rank in (
        ("built", 0, 0, 0), ("step", 2, 3, 0), ("step", 2, 4, 1), ("end", 9, 1, 0), ("end", 8, 5, 1))]  # fmt: skip
    mib = "[Rank 3] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 1024.00 | reserved: 3.00 | max reserved: 2048.00"
    odd = [line(5, 100, norm="nan"), line(6, 100).replace("lm loss", "em loss"), line(7, 100).replace("301.2", "inf"), line(8, 0),
           line(9, 100).replace("skipped iterations:   0", "skipped iterations: 2").replace("nan iterations:   0", "nan iterations: 4"),
           line(10, 100).split("| number of")[0] + "|"]  # fmt: skip
    texts = {"long": lines, "saves": [*lines[:12], *at], "readings": [*lines[:4], *held, mib], "odd": [*lines[:4], *odd],
             "tens": [line(n, 9000 if n == 10 else 100 + n) for n in range(10, 100, 10)], "real": REAL.splitlines()}  # fmt: skip
    for name, text in texts.items():
        said = steps.read(text)
        yield f"{name}: {len(said.steps)} steps, last {steps.last_step(said)}"
        yield from (f"  {k}: {v}" for k, v in steps.figures(said, 1000, 3).items())
        yield from (
            f"  put {every}: {steps.bad_put(said, NOON, NOON + timedelta(hours=1), every=every)}"
            for every in (None, 1, 10)
        )
        yield f"  memory: {steps.memory(said)}"
    yield from (repr(steps.parse(text)) for text in (*at, held[1], mib, lines[3], odd[0]))


def line(number: int, ms: float, total: int = 100, **more) -> str:
    """With a clock of its own."""
    return re.sub(r"\[[^]]*\]", f"[{NOON + timedelta(seconds=number)}]", stand_in.step_line(number, total, ms, **more))


def of_pages() -> Iterator[str]:
    for low, high in ((0, 1), (0.1, 0.9), (99, 1300), (5, 5), (0, 0), (-2, 3), (1e-5, 3e-5)):
        yield f"{low} {high}: {report._ticks(low, high)}"
    yield in_a_line(
        "numbers", map(report._number, (0, 0.12345, 99.96, 100.04, 999.9, 1000.4, 12, -3.5, None, float("inf"), True))
    )


def of_commands() -> Iterator[str]:
    lock = GOLDEN.with_name("none.toml")
    for command, names, options in (
        (report.command, ["x"], {"anyway": "maybe"}), (inspect.command, [], {}), (inspect.command, ["a", "b"], {}),
        *((inspect.command, ["none"], {"seconds": said}) for said in ("0", "601", "x", "1²", "²", "600")),
        (inspect.command, ["none"], {"receipts": "/none"}), (stack.command, ["x"], {}), (stack.command, [], {"lock": str(lock)}),
    ):  # fmt: skip
        with pytest.raises(Refused) as refused:
            command(names, options)
        yield f"{names} {options}: {refused.value}".replace(str(lock.parents[2]), "")


SECTIONS = (
    of_gpus, of_links, of_hosts, of_disks, of_the_pass, of_checks, of_looks, of_memory, of_hangs, of_logs, of_pages, of_commands,
)  # fmt: skip


@pytest.fixture
def nowhere(monkeypatch):
    """No folder of this machine is looked at, and none can be written to but those of one place."""
    monkeypatch.setattr(storage.os, "access", lambda path, _: str(path) == "/")
    monkeypatch.setattr(hang.os, "uname", lambda: SimpleNamespace(nodename="node", release="6.1.0"))


TABLE = Path(__file__).with_name("told.txt")


@pytest.mark.few(4)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_what_is_found_of_each_case(section, nowhere):
    """Its level and name, or its figures, a line a case; equal cases of a grid share one."""
    text = TABLE.read_text().split(f"== {section.__name__}\n")[1].split("\n== ")[0].rstrip("\n").splitlines()
    now = [line.rstrip() for said in section() for line in said.splitlines()]
    assert Counter(now) - Counter(text) == Counter(text) - Counter(now) == Counter()
    assert now == text


def test_the_page_of_a_run_under_inspection_is_as_reviewed(rewrite_golden, nowhere, tmp_path):
    now = "".join(
        f"{line.rstrip()}\n".replace(str(tmp_path), "")
        for text in of_processes(tmp_path / "proc", tmp_path / "run")
        for line in text.splitlines()
    )
    if rewrite_golden:
        GOLDEN.write_text(now)
    assert now == GOLDEN.read_text()
