"""What preflight has to say: findings, waived or not, and the verdict in text, JSON, Markdown or one line."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from nam_megatron.errors import Problem
from nam_megatron.launcher import called

Level = Literal["ok", "note", "waived", "fail"]
# Every name a finding can have; a waiver of any other is a misspelt one.
NAMES = (
    "gpus", "topology", "nic", "numa", "driver", "ecc", "throttle", "clocks", "idle", "stale", "port", "root-volume", "storage", "space",
    "caches", "lock", "torch", "extensions", "patches", "environment", "connections", "gemm", "collective", "git", "built", "memory",
    "data", "resume", "dcgm", "pcie", "heat", "mode", "vbios", "xid", "limits", "shm", "clock", "venv", "compiling", "bytecode",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `name`: what it is waived by; `hint`: what to do about it."""

    name: str
    level: Level
    message: str
    hint: str | None = None

    def __post_init__(self) -> None:
        assert self.name in NAMES and self.level in get_args(Level), (self.name, self.level)


def waive(findings: Iterable[Finding], waivers: Mapping[str, str]) -> list[Finding]:
    """Failures that the cluster file waives by name, with its reason."""
    return [
        replace(f, level="waived", message=f"{f.message} (waived: {waivers[f.name]})")
        if f.level == "fail" and f.name in waivers
        else f
        for f in findings
    ]


def unknown(waivers: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(f"no finding `{name}` to waive", key=f"cluster.waivers.{name}", hint=f"there are: {', '.join(NAMES)}")
        for name in waivers
        if name not in NAMES
    ]


def passed(findings: Iterable[Finding]) -> bool:
    return all(f.level != "fail" for f in findings)


def verdict(findings: Sequence[Finding]) -> str:
    failed = list(dict.fromkeys(f.name for f in findings if f.level == "fail"))
    waived = list(dict.fromkeys(f.name for f in findings if f.level == "waived"))
    text = f"FAIL: {', '.join(failed)}" if failed else "PASS"
    return text + (f" (waived: {', '.join(waived)})" if waived else "")


def render(findings: Sequence[Finding], form: str, host: str, software: str = "unknown") -> str:
    """form: text | json | markdown | line. host, software: stand in `line`, the pass/fail list of several nodes, which must agree."""
    if form == "line":
        return f"{verdict(findings)} @ {host} software={software}\n"
    if form == "json":
        return (
            json.dumps(
                {"pass": passed(findings), "verdict": verdict(findings), "findings": [asdict(f) for f in findings]},
                indent=1,
            )
            + "\n"
        )
    if form == "markdown":
        rows = [f"| {f.level} | {f.name} | {_cell(f.message)} | {_cell(f.hint or '')} |" for f in findings]
        return (
            "\n".join(
                [
                    "| level | what | finding | to do |",
                    "|---|---|---|---|",
                    *rows,
                    "",
                    f"**{_cell(verdict(findings))}**",
                ]
            )
            + "\n"
        )
    lines = []
    for f in findings:
        lines.append(f"{f.level:<7} {f.name:<12} {called(f.message)}")
        if f.hint and f.level == "fail":
            lines.append(f"{'':<20} -> {called(f.hint)}")
    return "\n".join([*lines, "", verdict(findings)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
