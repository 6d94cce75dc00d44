"""`python -m launch status [DIR]`: which runs of a folder go on, which are silent, which ended and why. Changes nothing.

python -m launch status [DIR] [silent=600] [format=text|json|prometheus]

silent: seconds without a heartbeat after which a run that is still open is called silent. `prometheus` is for the textfile collector
of its node exporter: `python -m launch status format=prometheus > /var/lib/node_exporter/nam_megatron.prom.new`, then `mv`.
Exits 1 where an open run is silent or orphaned, or has a loss or gradient norm that is no number.
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.record import events, outcome, receipt, steps
from launch.record.receipts import RECEIPTS
from launch.record.redact import MARK
from launch.run import hang
from launch.run.terminal import printable
from launch.words import whole
from nam_megatron.errors import FINDINGS, OK, Refused
from nam_megatron.launcher import called
from nam_megatron.recipe import at

SHOWN = 10  # runs that ended
FORMATS = ("text", "json", "prometheus")
# Of a run that is open: its launcher lives and its ranks beat, they do not, it is gone, or nobody can tell.
OPEN = ("running", "silent", "orphaned", "unknown")
AHEAD = 60  # seconds that clocks of two hosts may be apart, or one may go back
GAUGES = {
    "step": "Steps that are done.", "steps": "Steps that are planned.", "step_ms": "Time of the last step in milliseconds.",
    "tokens_per_s_per_gpu": "Of the last step.", "loss": "Of the last step.", "grad_norm": "Of the last step.",
    "quiet_s": "Seconds since the last sign of life of the rank that is behind.",
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """One run. state: one of OPEN, or how it ended (receipt.ENDS). why: of an end, or what is wrong. again: the command of a next try."""

    run: str
    state: str
    step: int | None = None
    steps: int | None = None
    step_ms: float | None = None
    tokens_per_s_per_gpu: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    quiet_s: float | None = None
    why: str | None = None
    again: str | None = None

    @property
    def bad(self) -> bool:
        """Whether a person should look: at a run that is open, since the end of any other is its receipt's."""
        return self.state in OPEN and (self.state != "running" or self.why is not None)


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) > 1:
        raise Refused("`status` looks at one folder", hint="python -m launch status DIR")
    if (form := options.get("format", "text")) not in FORMATS:
        raise Refused(f"no format `{form}`", key="format", hint=f"there are: {', '.join(FORMATS)}")
    silent = whole("silent", options.get("silent", "600"), 999_999)
    root = Path(words[0]) if words else RECEIPTS
    if not root.is_dir():
        raise Refused(f"`{root}` is no folder", hint="name a folder of runs; none: `receipts/` of this checkout")
    found = [status(folder, silent, time.time()) for folder in receipt.folders(root)]
    sys.stdout.write({"text": text, "json": as_json, "prometheus": prometheus}[form](found))
    return FINDINGS if any(one.bad for one in found) else OK


def status(folder: Path, silent: float, now: float) -> Status:
    """What can be said of the run in `folder`; now: seconds since the epoch."""
    try:
        content = receipt.read(folder)
    except Refused as refused:
        return Status(folder.name, "unknown", why=refused.problems[0].message)
    if content["state"] == "sealed":
        return _sealed(folder, content)
    return _open(folder, content, silent, now)


def _sealed(folder: Path, content: Mapping[str, Any]) -> Status:
    figures = at(content, "outcome.figures") or {}
    window = figures.get("window") or {}
    end = str(at(content, "outcome.end"))
    return Status(
        content["run"],
        end,
        _number(outcome.done(at(content, "outcome"))),
        _number(at(content, "job.train_steps")),
        _number(window.get("median_ms")),
        _number(window.get("tokens_per_s_per_gpu")),
        _number(figures.get("loss_last")),
        _number(figures.get("grad_norm_last")),
        why=at(content, "outcome.reason"),
        again=again(folder, content) if end != "completed" else None,
    )


def _open(folder: Path, content: Mapping[str, Any], silent: float, now: float) -> Status:
    job = content.get("job") or {}
    said = events.read(folder, content.get("nonce") or "", job.get("world") or 1).said.steps
    last = said[max(said)] if said else None
    values = last.values if last else {}
    going = (beat for beat in hang.beats(folder).values() if beat.phase != "end")
    behind = min(going, key=lambda beat: beat.at, default=None)
    quiet = now - (behind.at if behind else folder.stat().st_mtime)
    alive = receipt.held(folder, content)
    state = {None: "unknown", False: "orphaned", True: "silent" if quiet > silent else "running"}[alive]
    why = {
        "orphaned": "its launcher is gone; `python -m launch receipts` seals it",
        "unknown": "its lock is gone, another's or not to be asked",
    }.get(state)
    if state == "silent":
        why = (
            f"rank {behind.rank} on {behind.host} was last at {hang.at(behind)}; `python -m launch inspect {folder}`"
            if behind
            else "no rank has come"
        )
    if behind and quiet < -AHEAD:
        why = f"the clock of {behind.host} is {-quiet:.0f} s ahead of this one: nobody can tell how long rank {behind.rank} is quiet"
    strange = [name for name in (steps.LOSS, steps.NORM) if name in values and not math.isfinite(values[name])]
    if strange and why is None:
        why = f"{' and '.join(strange)} of step {last.number if last else 0} {'is' if len(strange) == 1 else 'are'} no number"
    ms, tokens = last.ms if last else None, job.get("tokens_per_step")
    rate = round(tokens / ms * 1e3 / (job.get("world") or 1), 1) if ms and tokens else None
    return Status(
        content["run"], state, last.number if last else None, _number(job.get("train_steps")), ms, rate, values.get(steps.LOSS),
        values.get(steps.NORM), round(quiet, 1), why, again(folder, content) if state == "orphaned" else None,
    )  # fmt: skip


def again(folder: Path, content: Mapping[str, Any]) -> str | None:
    """The command of a next try: that of this run, or of several hosts its batch script, without the host that was behind where one was.
    None where the receipt left a word out."""
    words = content.get("words")
    if not isinstance(words, list) or any(not isinstance(w, str) or MARK in w or "<" in w for w in words):
        return None
    if (at(content, "job.nodes") or 1) == 1:
        return shlex.join(["python", "-m", "launch", "run", *words])
    show = shlex.join(["python", "-m", "launch", "show", "format=sbatch", *words])
    host = None if at(content, "outcome.end") in ("refused", "interrupted") else left_behind(folder)
    return f"{show} > job.sh && {shlex.join(['sbatch', *([f'--exclude={host}'] if host else []), 'job.sh'])}"


def left_behind(folder: Path) -> str | None:
    """The one host whose ranks had begun less than those of each other when the run ended; None where no one had."""
    furthest: dict[str, tuple[int, int]] = {}
    for beat in hang.beats(folder).values():
        furthest[beat.host] = min(beat.place, furthest.get(beat.host, beat.place))
    first, *others = sorted(furthest, key=lambda host: furthest[host]) or [""]
    return first if others and furthest[first] < furthest[others[0]] else None


def _number(value: Any) -> Any:
    return value if type(value) in (int, float) else None


def text(found: Sequence[Status]) -> str:
    """One line a run, and what is to be said of it below: those that are open, then the newest that ended."""
    lines, open_ = [], [one for one in found if one.state in OPEN]
    ended = [one for one in reversed(found) if one.state not in OPEN]
    for one in (*open_, *ended[:SHOWN]):
        cells = [one.run, one.state, f"step {one.step or 0} of {one.steps or '?'}"]
        cells += [f"{one.step_ms:g} ms"] if one.step_ms else []
        cells += [f"{one.tokens_per_s_per_gpu:g} tokens/s a rank"] if one.tokens_per_s_per_gpu else []
        cells += [f"loss {one.loss:g}"] if one.loss is not None else []
        cells += [f"quiet for {one.quiet_s:.0f} s"] if one.quiet_s is not None else []
        lines.append("  ".join(cells))
        lines += [f"    {one.why}"] if one.why else []
        lines += [f"    again: {one.again}"] if one.again else []
    if len(ended) > SHOWN:
        lines.append(called(f"and {len(ended) - SHOWN} more that ended: `python -m launch receipts` lists them"))
    return "".join(f"{printable(line)}\n" for line in lines) or "no run\n"


def as_json(found: Sequence[Status]) -> str:
    return json.dumps([receipt.plain(asdict(one)) for one in found], indent=1) + "\n"


def prometheus(found: Sequence[Status]) -> str:
    """Prometheus' text format, version 0.0.4."""

    def of(one: Status) -> str:
        escaped = (
            "\n".join(map(printable, one.run.split("\n"))).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        )
        return f'run="{escaped.encode("utf-8", "replace").decode()}"'

    def samples() -> Iterator[str]:
        yield "# HELP nam_megatron_run_state 1 for the state that a run is in."
        yield "# TYPE nam_megatron_run_state gauge"
        yield from (f'nam_megatron_run_state{{{of(one)},state="{one.state}"}} 1' for one in found)
        for name, what in GAUGES.items():
            yield f"# HELP nam_megatron_run_{name} {what}"
            yield f"# TYPE nam_megatron_run_{name} gauge"
            known = ((of(one), value) for one in found if (value := getattr(one, name)) is not None)
            yield from (f"nam_megatron_run_{name}{{{label}}} {_sample(value)}" for label, value in known)

    return "".join(f"{line}\n" for line in samples())


def _sample(value: float) -> str:
    return f"{value}" if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
