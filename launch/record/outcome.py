"""What came of a run: figures, memory, the ranks' devices, how it ended, and forecast against measured."""

import builtins
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.record import events, steps
from launch.record.receipt import LOG, NCCL
from launch.run import hang
from nam_megatron.mends.series import MENDS
from nam_megatron.recipe import at

# The launcher's own lines at the start and the end of a log; the hours are the host's, as Megatron's are.
STARTED, ENDED = "launch: started", "launch: ended"
CLOCK = re.compile(rf"^\[([\d :.-]+)\] ({STARTED}|{ENDED})")
ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?:(?P<ours>error:)|(?P<name>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))\s*(?::|$))"
    r"|\bout of memory\b|(?P<nccl>NCCL (?:WARN|error))",
    re.ASCII,
)
RANK = re.compile(r"\[rank(\d{1,6})\]", re.ASCII)
# Classes of exceptions that a receipt names: Python's, and those of what trains. Any other name may be anybody's word.
CLASSES = {n for n, o in vars(builtins).items() if isinstance(o, type) and issubclass(o, BaseException)} | {
    "OutOfMemoryError", "AcceleratorError", "DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "ChildFailedError",
    "SignalException", "RendezvousError", "RendezvousConnectionError", "RendezvousTimeoutError", "BackendCompilerFailed",
    "InductorError", "CompilationError", "OutOfResources", "PTXASError", "CheckpointException", "CheckpointingException",
    "JSONDecodeError", "CalledProcessError", "TimeoutExpired", "UnpicklingError", "ValidationError",
}  # fmt: skip
TRAINER_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d{1,9})\b")
NCCL_RANK = re.compile(
    r"\brank (\d{1,6}) nranks (\d{1,6}) cudaDev (\d{1,3})(?: nvmlDev (\d{1,3}))? busId ([0-9a-fA-F]{1,10})\b"
)
NCCL_VERSION = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4}){1,3}(?:\+cuda\d{1,3}\.\d{1,3})?)")
NCCL_NET = re.compile(r"Using network (Socket|IB|AWS Libfabric|gIB|FasTrak|UCX|IBext\w{0,4}|OFI)\b")
LINE = 4000  # characters of a line that are looked at
KEPT = 20  # last lines that look like errors


def of_run(folder: Path, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What came of a run, from its folder and its receipt. Works on half a record as on a whole one.

    By its events. Receipts from before there were any have no nonce: their logs are read.
    """
    job = receipt.get("job") or {}
    world = job.get("world") or 1
    logged = Log.read(folder / LOG, said=not receipt.get("nonce"))
    first = logged.errors[0] if logged.errors else None
    if nonce := receipt.get("nonce"):
        made_of = {"source": at(receipt, "source.trees.nam_megatron"), "plan": at(receipt, "plan.sha256")}
        found = events.read(folder, nonce, world, job.get("train_steps"), job.get("log_interval"), **made_of)
        said, started, ended, last, failure = found.said, found.started, found.over, found.last_step, found.failure
        code, wall = failure and failure["code"], found.wall
        more = {"hole": found.hole, "events": found.facts(), "loaded": found.begun}
        mends = found.mends and {
            name: sha for name, sha in found.mends.items() if name in MENDS and events.HASH.fullmatch(str(sha))
        }
        reason = blamed(failure) if failure else first and f"no rank says why; {told(first)}"
    else:
        said, started, ended, last = logged.said, logged.started, logged.ended, steps.last_step(logged.said)
        code, wall, reason, more, mends = logged.code, None, first and told(first), {"hole": None}, None
    if logged.waited and reason:
        reason += f"; {hang.whose(logged.waited, (receipt.get('recipe') or {}).get('schedule') or {})}"
    figures = steps.figures(said, job.get("tokens_per_step") or 0, world)
    memory = steps.memory(said)
    view = nccl(folder.glob(NCCL))
    every = job.get("log_interval") if job.get("trainer") == "bridge" else 1 if nonce else None
    return {
        "trainer_exit_code": code,
        "reason": reason,
        "errors": logged.errors[-KEPT:],
        "last_step": last,
        "figures": figures,
        "series": steps.series(said),
        "nan_check": job.get("nan_check"),
        "memory": memory,
        "bad_put": steps.bad_put(said, started, ended, every=every, wall=wall),
        "against_forecast": against(receipt.get("forecast") or {}, figures, memory),
        "mends": mends,
        "ranks": ranks(said, view, receipt.get("host") or {}),
        "nccl": view and {k: v for k, v in view.items() if k != "ranks"},
        **more,
    }


@dataclass
class Log:
    """What a log says. errors: the first one, and the last KEPT. waited: seconds after which the first collective gave up.

    Everything else is for runs without events.
    """

    said: steps.Said = field(default_factory=steps.Said)
    errors: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    waited: float | None = None
    started: datetime | None = None
    ended: datetime | None = None

    @classmethod
    def read(cls, path: Path, said: bool = True) -> "Log":
        """said: also what steps it tells of."""
        log = cls()
        for number, line in enumerate(steps.lines(path, LINE), 1):
            found = log.said.add(line) if said else None
            log.waited = log.waited or hang.waited(line)
            if found is None and (shown := error(line)):
                rank = {"rank": int(m[1])} if (m := RANK.match(line)) else {}
                log.errors = [*log.errors[:1], *log.errors[1:][-KEPT:], {"what": shown, "line": number, **rank}]
            elif code := TRAINER_CODE.match(line):
                log.code = int(code[1]) if log.code is None else log.code
            elif (clock := CLOCK.match(line)) and (when := steps.time_of_day(clock[1])):
                log.started, log.ended = (when, log.ended) if clock[2] == STARTED else (log.started, when)
        return log


def blamed(end: Mapping[str, Any]) -> str:
    """How a rank ended, in words of ours: what a program says may hold whatever it had in hand."""
    if end["reason"] == "error" and end.get("error") in CLASSES:
        return f"{end['error']}, rank {end['rank']}"
    words = {
        "refused": "a refusal of the trainer's", "error": "an exception of another class",
        "full disk": "the disk of `schedule.save` is full",
    }  # fmt: skip
    code = f" with code {end['code']}" if end["reason"] in events.WELL else ""
    return f"{words.get(end['reason'], end['reason'])}{code}, rank {end['rank']}"


def error(line: str) -> str | None:
    """The class of a line that looks like an error, of a list of our own; None for any other line.

    What it says stays in the log: a message may hold whatever the program had in hand.
    """
    if not (found := ERROR.search(line)):
        return None
    if found["name"]:
        name = found["name"].rpartition(".")[2]
        taken = " (another process took the port after the checks: another port=)" if "name: EADDRINUSE" in line else ""
        return name + taken if name in CLASSES else "an exception of another class"
    if found["ours"]:
        return "a refusal of the trainer's"
    return "NCCL" if found["nccl"] else "out of memory"


def told(found: Mapping[str, Any]) -> str:
    rank = f", rank {found['rank']}" if "rank" in found else ""
    return f"{found['what']}, line {found['line']} of the log{rank}"


def done(outcome: Mapping[str, Any]) -> int | None:
    """The last step of a run, as its ranks say it; else as its log does."""
    said: int | None = at(outcome, "last_step")
    return at(outcome, "figures.last_step") if said is None else said


def summary(outcome: Mapping[str, Any], unit: str) -> str:
    """A run in a few lines, for the terminal and the log."""
    figures, memory = outcome["figures"], outcome["memory"]
    loss, norm = (f"{x:.5g}" if isinstance(x := figures[key], float) else x for key in ("loss_last", "grad_norm_last"))
    last = f"loss {loss}, gradient norm {norm}" if figures["steps"] else "no step"
    text = [f"{outcome['end']}: {outcome['reason']}" if outcome.get("reason") else str(outcome["end"])]
    steps, planned = done(outcome) or 0, figures["planned_steps"]
    text += [f"steps {steps} of {planned or '?'}; {last}" if steps or planned else last]  # neither: it never started
    if window := figures["window"]:
        spread = f"p10 {window['p10_ms']}, p90 {window['p90_ms']}; steps {window['first']} to {window['last']}"
        text += [f"{window['median_ms']} ms a step ({spread}), {window['tokens_per_s_per_gpu']} tokens/s/{unit}"]
    against = outcome["against_forecast"] or {}
    if "model_flops_utilisation" in against:
        theirs = f"; Megatron says {figures['window']['megatron_tflops_per_gpu']}" if figures["window"] else ""
        mfu = f"{against['model_flops_utilisation']:.1%}"
        text += [f"model FLOPs utilisation {mfu} ({against['model_tflops_per_gpu']} TFLOP/s/GPU by our count{theirs})"]
    if memory:
        ratio = against.get("peak_allocated_ratio")
        said = f" ({ratio:.1%} of the forecast)" if ratio else ""
        text += [f"peak {memory['peak_allocated_gib']} GiB allocated{said}, {memory['peak_reserved_gib']} reserved"]
    return "\n".join(text) + "\n"


def nccl(files: Iterable[Path]) -> dict[str, Any] | None:
    """NCCL's own view, from the files that NCCL_DEBUG_FILE asked for: version, network, GPU and bus of each rank of the world."""
    ranks: dict[int, dict[str, Any]] = {}
    version = network = None
    world = 0
    for file in sorted(files):
        for line in steps.lines(file, LINE):
            if found := NCCL_RANK.search(line):
                rank, size, cuda, _, bus = found.groups()
                if int(size) > world:  # smaller communicators number their ranks anew
                    ranks, world = {}, int(size)
                if int(size) == world:
                    ranks[int(rank)] = {"device": int(cuda), "bus": bus_of(int(bus, 16))}
            version = version or ((m := NCCL_VERSION.search(line)) and m[1])
            network = network or ((m := NCCL_NET.search(line)) and m[1])
    return {"version": version, "network": network, "world": world, "ranks": ranks} if ranks or version else None


def bus_of(number: int) -> str:
    """NCCL's number of a place on the PCI bus as `nvidia-smi` prints it."""
    return f"{number >> 20:08X}:{number >> 12 & 0xFF:02X}:{number >> 4 & 0xFF:02X}.{number & 0xF:X}"


def ranks(said: steps.Said, view: Mapping[str, Any] | None, host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which GPU each rank really had, as it said itself and as NCCL saw it, and the NICs and CPUs near it.

    Topology is known of the launcher's host; on others of a job the NICs are those of the same GPU there.
    """
    theirs = (view or {}).get("ranks", {})
    gpus = {str(g.get("bus")): f"GPU{i}" for i, g in enumerate(host.get("gpus") or []) if isinstance(g, Mapping)}
    near = host.get("topology") or {}
    found = []
    for rank, device in sorted({r.rank: r.device for r in said.readings if r.device}.items()):
        gpu = gpus.get(device["bus"])
        seen = theirs.get(rank)
        found.append(
            {
                "rank": rank,
                **device,
                "gpu": gpu,
                "nics": (near.get("nics") or {}).get(gpu),
                "cpus": (near.get("cpus") or {}).get(gpu),
                "nccl_agrees": None if seen is None else seen["bus"] == device["bus"],
            }
        )
    return found


def against(
    forecast: Mapping[str, Any], figures: Mapping[str, Any], memory: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Measured over forecast, where both are known; model FLOPs utilisation by our own count."""
    made: dict[str, Any] = {}
    for kind in ("allocated", "reserved"):
        if memory and (expected := forecast.get(f"peak_{kind}_gib")):
            made[f"peak_{kind}_ratio"] = round(memory[f"peak_{kind}_gib"] / expected, 4)
    rate = (figures.get("window") or {}).get("tokens_per_s_per_gpu")
    if rate and (flops := forecast.get("model_flops_per_token")) and (peak := forecast.get("peak_tflops")):
        made["model_tflops_per_gpu"] = round(rate * flops / 1e12, 2)
        made["model_flops_utilisation"] = round(rate * flops / (peak * 1e12), 4)
    return made or None
