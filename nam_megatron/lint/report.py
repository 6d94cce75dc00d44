"""A report as text for people and as JSON for programs."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from nam_megatron import __version__
from nam_megatron.errors import counted
from nam_megatron.lint import Report, describe
from nam_megatron.lint.follow import shown
from nam_megatron.lint.rules import SEVERITIES, Finding
from nam_megatron.lint.rules.rule import DEFAULT, without

STYLES = {
    "wrong model": "bold red",
    "will fail": "bold magenta",
    "cost": "bold yellow",
    "fragile": "bold blue",
    "default": "bold",
    "open": "bold cyan",
}
MANY = 4  # findings of one rule, from which on they are one paragraph
Line = list[tuple[str, str]]  # (text, style) pieces


def lines(report: Report, width: int = 110) -> Iterator[Line]:
    """The report line by line; `width` in characters."""
    yield [(f"{_printable(report.name)}: ", ""), (_printable(_headline(report)), "bold")]
    yield []
    rows = list(describe.told(report).items())
    if report.args.elsewhere and (untold := [label for label, text in rows if text == "?"]):
        rows = [*(row for row in rows if row[1] != "?"), ("not told", ", ".join(untold))]
    for label, text in rows:
        hang = 21 if label == "layers" else 0
        for i, line in enumerate(line for part in text.splitlines() for line in _wrap(part, width - 13, hang)):
            yield [(f"{label if not i else '':<11}  ", "dim"), (line, "")]
    found = list(describe.notes(report.args, report.model))
    if found:
        yield []
    for note in found:
        yield from _paragraph("note", note, width, "dim")
    defaults = [f for f in report.findings if f.severity == DEFAULT]
    many = {name for name, times in Counter(f.id for f in report.findings).items() if times >= MANY}
    for finding in report.findings:
        if finding.severity == DEFAULT:
            if finding is defaults[0]:
                yield []
                yield from _folded(defaults, width)
            continue
        if finding.id in many:
            alike = [f for f in report.findings if f.id == finding.id]
            if finding is alike[0]:
                yield []
                yield from _alike(alike, width)
            continue
        yield []
        at = f"  (line {', '.join(map(str, finding.lines))})" if finding.lines else ""
        yield [
            (finding.severity, STYLES[finding.severity]),
            (f"  {_brief(finding.flag)}", "bold"),
            (f"{at}  ", "dim"),
            (f"[{finding.id}]", "dim"),
        ]
        yield from _paragraph("", finding.message + (f" ({finding.detail})" if finding.detail else ""), width)
        yield from _paragraph("fix:", finding.fix, width)
    yield []
    yield [(summary(report), "bold" if report.findings else "")]


def _folded(findings: list[Finding], width: int) -> Iterator[Line]:
    """The defaults that nobody chose."""
    yield [
        (DEFAULT, STYLES[DEFAULT]),
        (f"  {counted(len(findings), 'value')} that nobody chose; say what is meant", "bold"),
    ]
    for finding in findings:
        detail = f" ({finding.detail})" if finding.detail else ""
        told = f"{_brief(finding.flag).removeprefix(without(''))}: {finding.message}{detail}"
        yield from _paragraph("", f"{told} [{finding.id}]", width)


def _alike(findings: list[Finding], width: int) -> Iterator[Line]:
    """Many findings of one rule."""
    first = findings[0]
    yield [(first.severity, STYLES[first.severity]), (f"  {len(findings)} times  ", "bold"), (f"[{first.id}]", "dim")]
    yield from _paragraph("", first.message, width)
    for finding in findings:
        at = f"  (line {', '.join(map(str, finding.lines))})" if finding.lines else ""
        detail = f": {finding.detail}" if finding.detail else ""
        yield from _paragraph("", f"{_brief(finding.flag)}{at}{detail}", width)
    for fix in dict.fromkeys(f.fix for f in findings):
        yield from _paragraph("fix:", fix, width)


def summary(report: Report) -> str:
    """The last line: how much of what was found."""
    counts = Counter(f.severity for f in report.findings)
    given, target = len(report.args.given), report.args.target
    part = describe.in_part(report.args, report.model)
    whose = "not in this text" if part else f"at Megatron {target.pin}'s defaults"
    whose = "left to the program" if report.args.elsewhere else whose
    flags = f"{given} arguments said, {len(target.by_dest) - given} {whose}"
    found = ", ".join(f"{counts[s]} {s}" for s in SEVERITIES if counts[s]) or "no finding"
    left = f", {counted(len(report.open), 'flag')} left open" if report.open else ""
    return f"{found}{left}; {flags}"


def text(report: Report, width: int = 110) -> str:
    """The report without colours."""
    return "".join("".join(piece for piece, _ in line).rstrip() + "\n" for line in lines(report, width))


def as_json(report: Report, more: Mapping[str, object] | None = None) -> str:
    """Everything, and `more` beside it."""
    tree = {
        "nam_megatron": __version__,
        "megatron_core": report.args.target.pin,
        "name": report.name,
        "script": report.launch.script and shown(report.launch.script),
        "gpus": report.args.launch.gpus,
        "environment": {name: value and shown(value) for name, value in report.launch.env.items()},
        "trains": describe.data(report),
        "findings": [
            {
                "id": f.id,
                "severity": f.severity,
                "flag": f.flag,
                "lines": list(f.lines),
                "message": f.message,
                "detail": f.detail,
                "fix": f.fix,
            }
            for f in report.findings
        ],
        "open": list(report.open),
        "notes": list(describe.notes(report.args, report.model)),
        **(more or {}),
    }
    return json.dumps(tree, indent=1, allow_nan=False, default=str) + "\n"


def _headline(report: Report) -> str:
    launch = report.launch
    if launch.plan is not None:
        source = f"the plan of {launch.plan.name}"
    else:
        source = {
            "words": "a list of flags",
            "yaml": "YAML",
            "shell": "a shell script",
            "container": "a container of Megatron-Bridge",
            "huggingface": "a config.json of Hugging Face",
            "checkpoint": "the arguments that a checkpoint stores",
            "python": "a Python recipe",
            "script": "a Python script",
        }[launch.kind]
        source = f"{source} of {launch.program}" if launch.program and launch.kind != "script" else source
    return (shown(launch.script or "") or source) + (f" on {counted(launch.gpus, 'GPU')}" if launch.gpus else "")


def _brief(flag: str) -> str:
    flag = _printable(flag)
    return flag if len(flag) < 80 else flag[:77] + "..."


def _printable(text: str) -> str:
    """No control characters on somebody's terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _paragraph(mark: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    for i, line in enumerate(_wrap(text, width - 7)):
        yield [(f"  {mark if not i else '':<5}" if mark else "  ", "dim"), (line, style)]


def _wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """Cut at blanks, other blanks as they are; further lines start `hang` columns in."""
    done, line = [], ""
    for blanks, word in re.findall(r"(\s*)(\S+)", _printable(text)):
        if line.strip() and len(line) + len(blanks) + len(word) > width:
            done.append(line)
            line, blanks = " " * hang, ""
        line += blanks + word
    return [*done, line]
