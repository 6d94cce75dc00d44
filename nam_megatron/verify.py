"""Stage 6: what Megatron builds, compared with what the recipe says. python -m nam_megatron.verify conf=nam56r_native_dp

The expectations are worked out from the recipe (expect.py), not taken from lower.py's settings: a wrong setting must disagree with
them. Megatron's side is what its own parser, validation and configs make of the argv (runtime/oracle.py).
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import yaml

from nam_megatron import app, installed
from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.compile.plan import Seam
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, Refused, counted
from nam_megatron.judge.expect import FIELDS, compared, expected, worked_out
from nam_megatron.recipe import Recipe
from nam_megatron.runtime.oracle import Answer, Oracle
from nam_megatron.targets import Target

VERIFIED, MISMATCH, UNFINISHED = "verified", "mismatch", "incomplete"
DEFAULT = object()  # stands for Megatron's default in the reviewed list
ABSENT = "(no such field)"


@dataclass(frozen=True, slots=True)
class Row:
    """One field: what the recipe (or a pin, or a reviewed default) says, and what Megatron has."""

    field: str  # config.field in Megatron
    expected: Any
    actual: Any
    key: str | None  # recipe key; None: pinned or reviewed
    source: str  # recipe | pinned | reviewed

    @property
    def agrees(self) -> bool:
        return _same(self.expected, self.actual)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one plan. refused: Megatron's own error, if it does not take the argv at all."""

    rows: tuple[Row, ...]
    refused: str | None
    unknown: tuple[str, ...]  # fields nobody has looked at
    not_built: tuple[Seam, ...]
    stack: installed.Stack

    @property
    def mismatches(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if not r.agrees)

    @property
    def word(self) -> str:
        if self.refused or self.mismatches or self.unknown:
            return MISMATCH
        return UNFINISHED if self.not_built else VERIFIED

    @property
    def code(self) -> int:
        return {VERIFIED: OK, MISMATCH: FINDINGS, UNFINISHED: INCOMPLETE}[self.word]


def verify(lowering: Lowering, oracle: Oracle, words: Sequence[str] | None = None) -> Verdict:
    """Compare what Megatron makes of `words` (the plan's own argv unless given) with the plan's recipe.

    Raises Refused for another Megatron than the plan's target.
    """
    p, stack = lowering.plan, installed.ask(lowering.target)
    words = argv.argv(lowering) if words is None else words
    env = {e.name: e.value for e in lowering.env}
    ours = [seam.owner for seam in p.ours]
    answer = oracle.ask(words, p.recipe.world_size, p.recipe.device.capability, env, ours)
    if answer.error:
        return Verdict((), answer.error, (), p.not_built, stack)
    rows = list(_rows(lowering, answer))
    seen = {r.field for r in rows}
    reviewed, derived = reviewed_fields(lowering.target)
    values = answer.values
    for field, value in reviewed.items():
        if field in values and field not in seen:
            expected = _default(field, answer, lowering.target) if value is DEFAULT else value
            rows.append(Row(field, expected, values[field], None, "reviewed"))
    configs = lowering.target.configs
    unknown = [f for f in values if f.split(".")[0] in configs and f not in seen | reviewed.keys() and f not in derived]
    return Verdict(tuple(rows), None, tuple(unknown), p.not_built, stack)


@cache
def reviewed_fields(target: Target) -> tuple[Mapping[str, Any], frozenset[str]]:
    """(field -> demanded value or DEFAULT, fields Megatron derives) of the target's reviewed list."""
    groups = yaml.safe_load(target.reviewed_file.read_text(encoding="utf-8")) if target.reviewed_file else []
    demanded: dict[str, Any] = {}
    for group in groups:
        if group["class"] != "derived":
            for field in group["fields"]:
                demanded |= field if isinstance(field, dict) else {field: DEFAULT}
    return demanded, frozenset(f for g in groups if g["class"] == "derived" for f in g["fields"])


def _default(field: str, answer: Answer, target: Target) -> Any:
    """What Megatron has when nobody speaks: its parser's default, or the config's where there is no flag."""
    if flag := target.by_dest.get(field.split(".")[1]):
        value = flag.default
        return value[0] if isinstance(value, list) and len(value) == 1 else value  # Megatron unwraps lists of one
    return answer.defaults.get(field)


def expectations(lowering: Lowering, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """(Megatron's field, value, recipe key or None for a pin) of every setting. `values`: the fields that Megatron has."""
    yield "args.data_parallel_size", lowering.plan.recipe.data_parallel, "cluster.gpus_per_node"
    found = worked_out(lowering.plan)
    for s in lowering.settings:
        fields = lowering.target.fields(s.name, values) if s.fields is None else s.fields
        assert fields or compared(s) or s.name in lowering.target.renamed, (
            f"{s.owner} sets {s.name}, and no field shows it"
        )
        if s.name in found or not isinstance(fields, Mapping):
            fields = dict.fromkeys(fields, expected(s, lowering.plan, found) if fields else None)
        pairs = [(f, FIELDS[f](lowering.plan) if f in FIELDS else v) for f, v in fields.items()]
        yield from ((field, value, s.key) for field, value in pairs)


def _rows(lowering: Lowering, answer: Answer) -> Iterator[Row]:
    for field, value, key in expectations(lowering, answer.values):
        yield Row(field, value, answer.values.get(field, ABSENT), key, "recipe" if key else "pinned")


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, (tuple, list)) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_same, expected, actual))
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    return bool(expected == actual)


# The command ----------------------------------------------------------------------------------------------------------


def summary(lowering: Lowering, v: Verdict) -> str:
    """The three lines a user sees first."""
    r = lowering.plan.recipe
    count = {source: sum(row.source == source for row in v.rows) for source in ("recipe", "pinned", "reviewed")}
    verdict = f"verdict:  {v.word}"
    if v.refused:
        verdict += f": Megatron refuses the arguments: {v.refused}"
    elif v.mismatches or v.unknown:
        verdict += f": {len(v.mismatches)} fields disagree, {len(v.unknown)} nobody has looked at"
    elif v.not_built:
        verdict += f": everything built agrees; not built: {', '.join(s.owner for s in v.not_built)}"
    return (
        f"{r.preset.name} on {counted(r.world_size, r.cluster.unit)} against Megatron {v.stack.megatron_core}: "
        f"{len(v.rows)} fields compared\n"
        f"fields:   {count['recipe']} follow from the recipe, {count['pinned']} are pinned, "
        f"{count['reviewed']} are reviewed defaults\n"
        f"{verdict}\n"
    )


def rows_text(rows: Sequence[Row]) -> str:
    """recipe key, Megatron's field, both values, verdict; one row a line."""
    cells = [("recipe key", "Megatron's field", "expected", "Megatron has", "verdict")]
    for r in rows:
        verdict = VERIFIED if r.agrees else MISMATCH
        cells.append((r.key or f"({r.source})", r.field, str(r.expected), str(r.actual), verdict))
    widths = [min(max(len(c[i]) for c in cells), 60) for i in range(5)]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in cells)


def task(recipe: Recipe, words: Mapping[str, Any], sources: Any) -> int:
    """Verify and print. stdout is the result."""
    form = words["format"]
    if form not in ("auto", "table", "json"):
        raise Refused(f"no format `{form}`", key="format", hint="there are: auto, table, json", law="format-unknown")
    sys.stderr.write(sources.unnamed_preset(recipe.preset.name))
    lowering = translate(recipe)
    installed.ask(lowering.target)  # before one is started
    with Oracle() as oracle:
        v = verify(lowering, oracle)
    if form == "json":
        rows = [{**asdict(r), "agrees": r.agrees} for r in v.rows]
        tree = {
            "preset": recipe.preset.name,
            **v.stack.as_dict(),
            "verdict": v.word,
            "refused": v.refused,
            "unknown": v.unknown,
            "rows": rows,
        }
        tree["not_built"] = [asdict(s) for s in v.not_built]
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
        return v.code
    sys.stdout.write(summary(lowering, v))
    shown = v.rows if form == "table" else v.mismatches
    if shown:
        sys.stdout.write("\n" + rows_text(shown))
    for field in v.unknown:
        sys.stdout.write(f"{field}: neither compared nor in {lowering.target.name}.yaml, the list of reviewed fields\n")
    return v.code


def main() -> None:
    app.run("verify", ("format",), task)


if __name__ == "__main__":
    main()
