"""What lint says of a launch and each flag that it looks at, all in golden/lint.txt: `--rewrite-golden` after a change that is meant."""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from lint_cases import DSA, FSDP, HYBRID, MLA, MOE, TP2
from test_lint import launch

from nam_megatron.lint import describe, report
from nam_megatron.targets import current

GOLDEN = Path(__file__).parent / "golden" / "lint.txt"
SOURCES = sorted(Path(report.__file__).parent.rglob("*.py"))
# Launches of every family; two layouts, for most rules of a layout are silent on one GPU.
LAID_OUT = TP2 | {"--pipeline-model-parallel-size": "2", "--context-parallel-size": "2"}
BASES = {
    "hybrid": HYBRID, "experts": MOE, "latent": MLA | {"--mtp-num-layers": "1"}, "sparse": DSA, "laid out": MOE | LAID_OUT,
    "sharded": FSDP | TP2,
    "recomputed": HYBRID | {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"},
}  # fmt: skip
VALUES = {"int": ("0", "3"), "float": ("0.0", "0.3"), "str": ("other",), "eval": ("[1,0]",)}


def looked_at() -> set[str]:
    """The names of arguments in lint's own code."""
    words = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return {flag.dest for flag in current().flags.values()} & words


def changes(base: dict) -> Iterator[dict]:
    """Each flag in question, with values that its parser takes and the base has not."""
    of_interest = looked_at()
    for name, flag in sorted(current().flags.items()):
        if flag.dest not in of_interest or not name.startswith("--") or name in ("--help",):
            continue
        if flag.action != "store":
            yield {name: None if name in base else True}
            continue
        values = tuple(map(str, flag.choices or ())) or VALUES.get(flag.type or "str", ("3",))
        yield from ({name: value} for value in (*values, *((None,) if name in base else ())) if base.get(name) != value)


def said(found) -> dict[str, str]:
    rows = {f"{name}:": text for name, text in describe.rows(found.args, found.model)}
    rows |= {f"note {i}": note for i, note in enumerate(describe.notes(found.args, found.model))}
    return rows | {f"{f.severity} {f.id}": f.flag for f in found.findings}


def lines() -> Iterator[str]:
    for title, base in BASES.items():
        plain = said(launch(base, {}))
        yield f"== {title}"
        yield from (f"{key} {text}" for key, text in plain.items())
        for change in changes(base):
            (flag, value), now = *change.items(), said(launch(base, change))
            told = [f"    {key} {text}" for key, text in now.items() if plain.get(key) != text]
            told += [f"    no {key}" for key in plain if key not in now]
            if told:
                yield f"{title}: {'without ' if value is None else ''}{flag}{'' if value in (True, None) else f' {value}'}"
                yield from told


def test_what_is_said_is_as_reviewed(rewrite_golden):
    now = [line.rstrip() for text in lines() for line in text.splitlines()]
    if rewrite_golden:
        GOLDEN.write_text("".join(f"{line}\n" for line in now))
    reviewed = GOLDEN.read_text().splitlines()
    differ = ((said, wanted) for said, wanted in zip_longest(now, reviewed) if said != wanted)
    assert next(differ, None) is None  # lists of thousands of lines would take pytest minutes to compare
