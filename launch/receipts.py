"""`launch receipts`: one line a receipt, the newest last. Seals the lost ones first. Exits 1 where one is damaged, missing or unsigned."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import outcome, receipt, signature
from launch.compare import at
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, raise_if

RECEIPTS = Path(__file__).parent.parent / "receipts"
WHERE = {
    "state": "state",
    "family": "lineage.family",
    "host": "lineage.host",
    "end": "outcome.end",
    "preset": "recipe.preset.name",
}
CHOICES = {"state": receipt.STATES, "end": receipt.ENDS}
UNKEYED = "a hash without a key shows accidents; who may write to the folder can compute it anew: `run sign=KEY`, `receipts signers=FILE`"


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) > 1:
        raise Refused(Problem("`receipts` lists one folder", None, "python -m launch receipts DIR end=completed"))
    signers = Path(options["signers"]) if "signers" in options else None
    options = {key: value for key, value in options.items() if key in WHERE}
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
    folders, listed, code = receipt.folders(root), 0, OK
    whole: list[dict[str, Any]] = []
    for folder in folders:
        try:
            found = receipt.read(folder)
        except Refused as refused:
            print(f"{folder.name}  DAMAGED: {refused.problems[0].message}")
            code = FINDINGS
            continue
        whole.append(found)
        said, bad = standing(folder, found, signers)
        code = FINDINGS if bad else code
        if bad or all(is_of(key, at(found, WHERE[key]), value) for key, value in options.items()):
            print(line(found) + (f"  {said}" if said else ""))
            listed += 1
    for damage, said in receipt.broken(root, whole):
        print(f"{'DAMAGED' if damage else 'note'}: {said}")
        code = FINDINGS if damage else code
    if not listed:
        sys.stderr.write(f"note: none of {len(folders)} receipt{'s' * (len(folders) != 1)} in {root}\n")
    elif signers is None:
        sys.stderr.write(f"note: {UNKEYED}\n")
    return code


def is_of(key: str, found: Any, asked: str) -> bool:
    """`family=nam56r` asks for the name that a family begins with."""
    return found == asked or (key == "family" and str(found).startswith(f"{asked}: "))


def standing(folder: Path, found: Mapping[str, Any], signers: Path | None) -> tuple[str, bool]:
    """What is to be said of a receipt that its own hash agrees with, and whether that is a finding."""
    if found["state"] == "open":
        alive = receipt.held(folder, found)
        return ("", False) if alive else ("UNKNOWN: its lock is gone or another's; it is not sealed", True)
    if signers is not None:
        name = signature.signer(folder, signers)
        return (f"signed by {name}", False) if name else ("UNSIGNED, or by nobody of that file", True)
    return ("version 1: its own hash only" if found["schema"] == receipt.FIRST else "", False)


def line(found: Mapping) -> str:
    window = at(found, "outcome.figures.window") or {}
    cells = [found["run"], at(found, "outcome.end") or "open", at(found, "lineage.host"), at(found, "lineage.regime")]
    cells += [f"{window['median_ms']} ms, {window['tokens_per_s_per_gpu']} tokens/s/GPU"] if window else []
    return "  ".join(str(cell or "-") for cell in cells)
