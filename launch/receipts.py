"""`launch receipts`: one line a receipt, the newest last. Seals the lost ones first."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import outcome, receipt
from launch.compare import at
from nam_megatron.errors import OK, Problem, Refused, raise_if

RECEIPTS = Path(__file__).parent.parent / "receipts"
WHERE = {
    "state": "state",
    "family": "lineage.family",
    "host": "lineage.host",
    "end": "outcome.end",
    "preset": "recipe.preset.name",
}
CHOICES = {"state": receipt.STATES, "end": receipt.ENDS}


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) > 1:
        raise Refused(Problem("`receipts` lists one folder", None, "python -m launch receipts DIR end=completed"))
    asked = {key: options[key] for key in CHOICES if key in options}
    raise_if(
        Problem(f"no {key} `{word}`", key, f"there are: {', '.join(CHOICES[key])}")
        for key, word in asked.items()
        if word not in CHOICES[key]
    )
    root = Path(words[0]) if words else RECEIPTS
    if not root.is_dir():
        raise Refused(Problem(f"`{root}` is no folder", None, "python -m launch receipts DIR"))
    for run in receipt.seal_lost(root, outcome.of_log):
        sys.stderr.write(f"note: {run} lost its launcher; it is sealed now\n")
    folders, listed = receipt.folders(root), 0
    for folder in folders:
        try:
            found = receipt.read(folder)
        except Refused as refused:
            print(f"{folder.name}  DAMAGED: {refused.problems[0].message}")
            continue
        if all(at(found, WHERE[key]) == value for key, value in options.items()):
            print(line(found))
            listed += 1
    if not listed:
        sys.stderr.write(f"note: none of {len(folders)} receipt{'s' * (len(folders) != 1)} in {root}\n")
    return OK


def line(found: Mapping) -> str:
    window = at(found, "outcome.figures.window") or {}
    cells = [found["run"], at(found, "outcome.end") or "open", at(found, "lineage.host"), at(found, "lineage.regime")]
    cells += [f"{window['median_ms']} ms, {window['tokens_per_s_per_gpu']} tokens/s/GPU"] if window else []
    return "  ".join(str(cell or "-") for cell in cells)
