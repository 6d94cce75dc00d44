"""Every preset with every overlay: python -m nam_megatron.prove.every [FILE] [--presets A,B] [--overlays none,X] [--resume]

A line for each; FILE gets them as JSON. A pair whose two runs are those of an earlier one is not run again and says of which; the pairs of
a preset share the reference where they can. `--with "cluster=h200_2 parallel.pipeline=2"`, any number of times, stands in the place of the
overlays, and `--device cuda` runs on the GPUs of this host.

Exit codes: 0 all are proven or refused by name, 1 something differs or does not run, 2 refused.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nam_megatron import installed
from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, finish, raise_if
from nam_megatron.prove import cut
from nam_megatron.prove.__main__ import said
from nam_megatron.prove.compare import Row
from nam_megatron.prove.proof import PROVEN, Bench, Proof, lacking
from nam_megatron.recipe import Recipe, conf_dir, load

NONE, AS = "none", "as"
STEPS = 2


class References(contextlib.ExitStack):
    """The benches of one preset, by their reference: what ran on one rank need not run again."""

    def __init__(self, device: str, resume: bool):
        super().__init__()
        self.device, self.resume, self.begun = device, resume, {}

    def proof(self, recipe: Recipe, pair: cut.Pair) -> Proof:
        key = run_of(pair.reference)
        if key not in self.begun:
            bench = self.enter_context(Bench(recipe, self.device, STEPS, self.resume))
            self.begun[key] = bench, bench.begin()
        bench, begun = self.begun[key]
        bench.beside(pair)
        return bench.proof(begun)

    def keep_for(self, asked: Iterable["Asked"]) -> None:
        """Delete what no pair of these needs: on a GPU each reference is tens of GiB."""
        needed = {run_of(pair[1].reference) for pair in asked if not isinstance(pair, Refused)}
        for key in self.begun.keys() - needed:
            self.begun.pop(key)[0].clear()


Asked = tuple[Recipe, cut.Pair] | Refused


def words_of(overlay: str) -> Sequence[str]:
    """overlay: its name, or words."""
    return () if overlay == NONE else overlay.split() if "=" in overlay else (f"+overlay={overlay}",)


def asked(preset: str, overlay: str, device: str) -> Asked:
    try:
        recipe = load(preset, words_of(overlay))
        return recipe, cut.pair(recipe, device, STEPS)
    except Refused as refused:
        return refused


def outcome(preset: str, overlay: str, what: Asked, seen: dict[Any, str], references: References) -> dict[str, Any]:
    """What became of one pair. overlay: its name, or words. seen: the plans that ran, and as whose."""
    row: dict[str, Any] = {"preset": preset, "overlay": overlay, **installed.stack().as_dict()}
    begun = time.monotonic()
    try:
        if isinstance(what, Refused):
            raise what
        recipe, pair = what
        if seams := pair.layout.plan.not_built:
            return row | {"verdict": "not built", "why": ", ".join(s.owner for s in seams)}
        row["unproven"] = pair.unproven
        same = run_of(pair.layout), run_of(pair.reference)
        if same in seen:
            return row | {"verdict": AS, "why": seen[same]}
        seen[same] = " ".join((preset, *words_of(overlay)))
        proof = references.proof(recipe, pair)
    except Refused as refused:
        return row | {"verdict": "refused", "why": "; ".join(p.message for p in refused.problems)}
    worst = [
        max((r.off for p in proof.parts for r in p.rows if r.what == what), default=0.0)
        for what in ("gradient", "weight")
    ]
    row |= {"verdict": proof.word, "ranks": pair.layout.plan.recipe.world_size, "pattern": pair.layout.plan.pattern}
    row |= {"gradient": worst[0], "weight": worst[1], "compared": sum(len(p.rows) for p in proof.parts)}
    row |= {"unproven": proof.unproven, "seconds": round(time.monotonic() - begun, 1)}
    why = [f"{p.title}: {said(p)}" for p in proof.parts if p.broken or p.first]
    told = [r for p in proof.parts for r in p.rows if not r.blunt]
    if off := [r for r in told if not r.agrees]:
        row["differ"] = [_said(r) for r in off[:50]]
    row["nearest"] = [_said(r) for r in sorted(told, key=lambda r: -r.off / r.limit if r.limit else 0)[:5]]
    return row | ({"why": "; ".join(why)} if why else {})


def _said(row: Row) -> str:
    how = row.note or f"{row.off:.1e} of {row.limit:.1e}"
    return f"{row.what} of {row.name}{f' {row.layer}' if row.layer else ''}, step {row.step}: {how}"


def run_of(lowering: Lowering) -> Any:
    """What decides a run: Megatron's arguments, and of the recipe what goes by no argument."""
    plan = lowering.plan
    said = plan.recipe.model_dump_json(include={"model", "precision", "execution", "feature"})
    return argv.words(lowering), plan.recipe.world_size, plan.layers, said


def line(row: dict[str, Any]) -> str:
    numbers = (
        f" ({row['ranks']} ranks, gradients {row['gradient']:.1e}, weights {row['weight']:.1e})"
        if "ranks" in row
        else ""
    )
    return f"{row['preset']:40} {row['overlay']:10} {row['verdict']}{numbers}{': ' + row['why'] if row.get('why') else ''}\n"


def record(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON with a line for each row. Raises Refused."""
    try:
        path.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    except OSError as err:
        raise Refused(f"cannot write `{path}`: {err.strerror}", hint="name a file you may write") from None


def command() -> int:
    parser = argparse.ArgumentParser(prog="python -m nam_megatron.prove.every", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    names = {kind: sorted(p.stem for p in (conf_dir() / kind).glob("*.yaml")) for kind in ("preset", "overlay")}
    parser.add_argument("--presets", default=",".join(names["preset"]))
    parser.add_argument("--overlays", default=",".join([NONE, *names["overlay"]]))
    parser.add_argument("--with", dest="words", action="append", help="overrides in the place of the overlays")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--resume", action="store_true", help="also resume in the other side's layout, both ways")
    o = parser.parse_args()
    wanted = {"preset": o.presets.split(","), "overlay": o.overlays.split(",")}
    unknown = [(kind, n) for kind in wanted for n in wanted[kind] if n not in (*names[kind], NONE)]
    if unknown:
        raise Refused(
            Problem(f"no {kind} `{name}`", hint=f"there are: {', '.join(names[kind])}") for kind, name in unknown
        )
    stack = installed.ask(engine=o.device == "cuda")
    if o.device == "cuda":
        raise_if(lacking(1))  # or every pair would be refused by name, which is no finding
    sys.stdout.write(f"{stack}\n")
    seen: dict[Any, str] = {}
    found: list[dict[str, Any]] = []
    overlays = o.words or wanted["overlay"]
    if o.file is not None:  # before anything runs for minutes
        record(o.file, found)
    for preset in wanted["preset"]:
        pairs = [asked(preset, overlay, o.device) for overlay in overlays]
        with References(o.device, o.resume) as references:
            for number, overlay in enumerate(overlays):
                found.append(outcome(preset, overlay, pairs[number], seen, references))
                sys.stdout.write(line(found[-1]))
                sys.stdout.flush()
                if o.file is not None:
                    record(o.file, found)
                references.keep_for(pairs[number + 1 :])
    bad = [row for row in found if row["verdict"] not in (PROVEN, AS, "refused", "not built")]
    count = {v: sum(row["verdict"] == v for row in found) for v in sorted({row["verdict"] for row in found})}
    sys.stdout.write(", ".join(f"{n} {verdict}" for verdict, n in count.items()) + "\n")
    return FINDINGS if bad else OK


if __name__ == "__main__":
    finish(command)
