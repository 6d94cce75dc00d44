"""The traps: a closed list, each with a stable id, what happens, what to do, and where Megatron 0.19.2 does it."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules import (
    attention,
    cards,
    companions,
    conflicts,
    defaults,
    experts,
    graphs,
    layers,
    layout,
    parser,
    plan,
    precision,
    sparse,
    training,
)
from nam_megatron.lint.rules.rule import LACKS, SEVERITIES, Finding, Rule, without
from nam_megatron.lint.rules.terms import TRAPS
from nam_megatron.lint.values import Args, NotKnown

FILES = (
    parser, layers, attention, sparse, defaults, experts, precision, layout, graphs, training, companions, conflicts, plan, cards,
)  # fmt: skip
RULES: tuple[Rule, ...] = tuple(rule for file in FILES for rule in file.RULES)
BY_ID = {rule.id: rule for rule in RULES}
assert len(BY_ID) == len(RULES), "two rules of one id"
assert TRAPS.keys() <= BY_ID.keys(), "a row of traps.yaml that no file here names"


def check(a: Args, m: Model, ignore: Iterable[str] = ()) -> list[Finding]:
    """Every finding, the gravest first."""
    found, elsewhere = [], parser.elsewhere(a, m)
    for rule in RULES:
        if rule.id in ignore or parser.of_another(rule, a):
            continue
        for text in _texts(rule, a, m):
            flag, detail, fix = ([*text.split("\t"), "", ""] if "\t" in text else [_shown(rule, a), text, ""])[:3]
            if elsewhere and (parser.absence(rule, flag, fix, a) or LACKS in detail):
                continue
            lines = () if flag.startswith(without("")) else a.launch.lines(flag.split()[0].split("=")[0])
            found.append(Finding(rule.id, rule.severity, flag, rule.message, fix or rule.fix, detail, lines))
    order = list(SEVERITIES)
    return sorted(found, key=lambda f: order.index(f.severity))


def _texts(rule: Rule, a: Args, m: Model) -> Iterator[str]:
    """What a rule answers, up to the first value that is not known."""
    with suppress(NotKnown):
        verdict = rule.when(a, m)
        if verdict is True:
            yield ""
        elif isinstance(verdict, str):
            yield from [verdict] if verdict else []
        elif verdict:
            yield from verdict


def _shown(rule: Rule, a: Args) -> str:
    """What a finding is about, as the launch gives it."""
    names = rule.about.split("|")
    name = next((n for n in names if n in a.given or n in a.launch.env), names[0])
    if name in a.target.by_dest:
        return a.written(name) if name in a.given else without(a.written(name))
    value = a.launch.env.get(name)
    return name if value is None else f"{name}={value}"


def table() -> str:
    """The rules as a Markdown table."""
    lines = ["| rule | severity | what happens | fix | in Megatron 0.19.2 |", "|---|---|---|---|---|"]
    for rule in sorted(RULES, key=lambda r: (list(SEVERITIES).index(r.severity), r.id)):
        cells = (f"`{rule.id}`", rule.severity, rule.message, rule.fix, rule.source)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"
