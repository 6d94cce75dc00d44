"""python -m nam_megatron.prove conf=NAME [+overlay=X ...] [device=cpu|cuda]"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nam_megatron import app, installed
from nam_megatron.compile.lower import translate
from nam_megatron.errors import INCOMPLETE, Refused, counted, raise_if_twice
from nam_megatron.prove.compare import BITS, ORDER, Row
from nam_megatron.prove.proof import Part, Proof, prove
from nam_megatron.recipe import Recipe
from nam_megatron.report import layout

# `device` of a recipe is the GPU it is for; the word of that name becomes this one.
KEYS = ("run_on", "steps", "resume", "format")
DEVICES = ("cpu", "cuda")


def task(recipe: Recipe, words: Mapping[str, Any], sources: Any) -> int:
    """Prove and print. stdout is the result."""
    check(words)
    sys.stderr.write(sources.unnamed_preset(recipe.preset.name))
    if seams := translate(recipe).plan.not_built:
        sys.stderr.write("".join(f"error: `{s.owner}` is not built: {s.missing}\n" for s in seams))
        return INCOMPLETE
    installed.ask(translate(recipe).target, engine=words["run_on"] == "cuda")
    proof = prove(recipe, words["run_on"], words["steps"], words["resume"])
    sys.stdout.write(as_json(proof) if words["format"] == "json" else text(proof, words["format"] == "table"))
    return proof.code


def check(words: Mapping[str, Any]) -> None:
    choices = {"run_on": DEVICES, "format": ("auto", "table", "json")}
    for key, allowed in choices.items():
        if words[key] not in allowed:
            raise Refused(f"no `{words[key]}`", key=key, hint=f"there are: {', '.join(allowed)}")
    if not isinstance(words["resume"], bool):  # 1 is equal to True
        message = f"`{words['resume']}` is neither true nor false"
        raise Refused(message, key="resume", hint="`resume=false` leaves it out")
    steps = words["steps"]
    if type(steps) is not int or not 1 <= steps <= 100:  # True is an int
        shown = str(steps).lower() if isinstance(steps, bool) else steps
        hint = "2 or 3 show what there is to see"
        raise Refused(f"`{shown}` is no number of steps from 1 to 100", key="steps", hint=hint)


def text(proof: Proof, every: bool = False) -> str:
    """The proof for people. every: all rows, not only the worst of each kind and those that are off."""
    r, plan = proof.pair.layout.plan.recipe, proof.pair.layout.plan
    beside = f"one rank with naive kernels, {counted(proof.steps, 'step')}"
    lines = [
        f"{r.preset.name} on {counted(r.world_size, 'rank')} ({layout(plan)}) against {beside}",
        f"version:  {proof.stack}",
        f"model:    {plan.pattern}, of {proof.pair.full.pattern}",
        f"cut:      {_cut(proof.pair.shrunk)}",
        *([f"limits:   {proof.limits.why}"] if compared(proof) else []),
        *(f"unproven: {sentence}" for sentence in proof.unproven),
    ]
    for part in proof.parts:
        lines += ["", f"{part.title}: {said(part)}"]
        notable = [*worst(part.rows), *[x for x in part.rows if x.note or not x.agrees][:20]]
        lines += table(part.rows if every else list(dict.fromkeys(notable)))
    lines += ["", f"verdict:  {proof.word}"]
    return "\n".join(lines) + "\n"


def _cut(shrunk: Sequence[str]) -> str:
    """What was cut of ranks, depth and sequences; how much else."""
    shown = [cut for cut in shrunk if cut.startswith(("cluster.", "model.depth:", "model.seq_length:"))]
    return ", ".join([*shown, f"{len(shrunk) - len(shown)} other keys (format=json lists them)"])


def compared(proof: Proof) -> bool:
    """Whether anything was: a proof on GPUs has its limits from the noise that its reference was asked for."""
    return any(part.rows for part in proof.parts)


def said(part: Part) -> str:
    if part.broken:
        return part.broken
    if (first := part.first) is None:
        noted = sum(bool(row.note) for row in part.rows)
        return f"{len(part.rows)} comparisons agree" + (
            f", {noted} of them by what rounding makes of them" if noted else ""
        )
    off = sum(not row.agrees for row in part.rows)
    place = f"layer {first.layer}, " if first.layer else ""
    key = f" @ {first.key}" if first.key else ""
    how = (
        first.note or f"on {counted(int(first.off), 'rank')}"
        if first.what == BITS
        else first.note or f"off by {first.off:.1e} of {first.limit:.1e}"
    )
    where = f"{first.what} of {first.name}, step {first.step} ({place}{first.kind or 'model'}{key})"
    return f"{off} of {len(part.rows)} differ; first: {where}: {how}"


def worst(rows: Sequence[Row]) -> Iterator[Row]:
    """Of each kind of comparison and step the one that is most off, among those that agree."""
    found: dict[tuple, Row] = {}
    for row in rows:
        at = row.step, ORDER.index(row.what)
        if row.agrees and (at not in found or row.off > found[at].off):
            found[at] = row
    yield from (found[at] for at in sorted(found))


def table(rows: Sequence[Row]) -> list[str]:
    cells = [("step", "what", "off by", "limit", "layer", "kind", "tensor", "")]
    for x in rows:
        off, limit = (f"{x.off:g}", f"{x.limit:g}") if x.what == BITS else (f"{x.off:.1e}", f"{x.limit:.1e}")
        cells.append(
            (
                str(x.step),
                x.what,
                off,
                limit,
                str(x.layer or ""),
                x.kind or "",
                x.name,
                x.note or ("" if x.agrees else "differs"),
            )
        )
    if not rows:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(8)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def as_json(proof: Proof) -> str:
    recipe = proof.pair.layout.plan.recipe
    parts = [
        {
            "title": part.title, "broken": part.broken, "compared": len(part.rows), "first": _row(part.first),
            "differ": [_row(r) for r in part.rows if not r.agrees], "worst": [_row(r) for r in worst(part.rows)],
            "rounding": [_row(r) for r in part.rows if r.note and r.agrees],
        }
        for part in proof.parts
    ]  # fmt: skip
    tree = {
        "preset": recipe.preset.name,
        **proof.stack.as_dict(),
        "verdict": proof.word,
        "device": proof.device,
        "ranks": recipe.world_size,
    }
    tree |= {
        "layout": layout(proof.pair.layout.plan),
        "steps": proof.steps,
        "pattern": proof.pair.layout.plan.pattern,
        "limits": _limits(proof) if compared(proof) else None,
        "unproven": proof.unproven,
    }
    return json.dumps(tree | {"cut": proof.pair.shrunk, "parts": parts}, indent=1, default=str) + "\n"


def _limits(proof: Proof) -> dict[str, Any]:
    """The usual ones; each row has its own."""
    return {name: getattr(proof.limits, name) for name in ("first", "later", "loss", "counts", "why")}


def _row(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else asdict(row) | {"off": row.off if row.off != float("inf") else None}


def own(words: Sequence[str]) -> list[str]:
    """The command line with the name of the command's own `device`. Another one is the GPU that the recipe is for."""
    mine = [f"device={name}" for name in DEVICES]
    raise_if_twice(("device", word.removeprefix("device=")) for word in words if word in mine)
    return [word.replace("device", "run_on") if word in mine else word for word in words]


def main() -> None:
    app.run("prove", KEYS, task, own, {"device": "what a proof runs on is `device=cpu` or `device=cuda`"})


if __name__ == "__main__":
    main()
