"""`launch receipts`: one line a receipt, the newest last. Seals the lost ones first. Exits 1 where one is damaged, missing or unsigned.

gaps=allowed: the folder holds a choice of its chains' receipts, as a published one does; a file `.published` in it says so, too, but
to `signers=`: anybody may have put it there.
head=SEAL: a receipt that must be here. --full: each run's whole regime, its layout and kernels among it.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.context import CHECKOUT
from launch.record import outcome, receipt, signature
from launch.record.compare import unit
from launch.run.terminal import printable
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, folded, raise_if
from nam_megatron.recipe import at

RECEIPTS = CHECKOUT / "receipts"
WHERE = {"state": "state", "family": "lineage.family", "host": "lineage.host", "end": "outcome.end", "preset": "run"}
CHOICES = {"state": receipt.STATES, "end": receipt.ENDS, "gaps": ("refused", "allowed"), "full": ("true", "false")}
UNKEYED = (
    "the seals show accidents, not forgery: to show that too, `run sign=KEY` signs, and `receipts signers=FILE` checks"
)
# No hash, no signature and no chain that lies in the folder shows that its newest receipts were taken away.
HEAD = "the newest seal is {}: keep it elsewhere, and `receipts head=...` shows whether that receipt is still here"
SHORT = "layout, kernels and batch are left out: `receipts --full` lists them, `report RUN` shows one run"
OLD = "(v1)"
PUBLISHED = ".published"  # a file beside receipts that somebody chose among a chain's
SHORTEST = 12  # hex digits of a seal that nobody finds twice


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) > 1:
        raise Refused("`receipts` lists one folder", hint="python -m launch receipts DIR end=completed")
    signers = Path(options["signers"]) if "signers" in options else None
    asked = {key: options[key] for key in CHOICES if key in options}
    full = options.get("full") == "true"
    if "head" in options and len(options["head"]) < SHORTEST:
        raise Refused(f"`head` is {SHORTEST} digits of a seal or more", key="head", hint="as `receipts` printed it")
    raise_if(
        Problem(f"no {key} `{word}`", key=key, hint=f"there are: {', '.join(CHOICES[key])}")
        for key, word in asked.items()
        if word not in CHOICES[key]
    )
    root = Path(words[0]) if words else RECEIPTS
    if not root.is_dir():
        raise Refused(f"`{root}` is no folder", hint="name a folder of runs; none: `receipts/` of this checkout")
    for run in receipt.seal_lost(root, outcome.of_run):
        sys.stderr.write(f"note: {run} lost its launcher; it is sealed now\n")
    folders, listed, old, code = receipt.folders(root), 0, False, OK
    whole: list[dict[str, Any]] = []
    for folder in folders:
        try:
            found = receipt.read(folder)
        except Refused as refused:
            print(f"{printable(folder.name)}  DAMAGED: {printable(refused.problems[0].message)}")
            code = FINDINGS
            continue
        whole.append(found)
        said, bad = standing(folder, found, signers)
        code = FINDINGS if bad else code
        if bad or all(is_of(key, at(found, WHERE[key]), value) for key, value in options.items() if key in WHERE):
            sys.stdout.write(shown(line(found, full) + (f"  {said}" if said else "")))
            listed, old = listed + 1, old or said == OLD
    torn = list(receipt.broken(root, whole))
    gaps = options.get("gaps", "allowed" if signers is None and (root / PUBLISHED).exists() else "refused")
    for damage, said in torn:
        bad = damage or gaps != "allowed"
        print(f"{'DAMAGED' if damage else 'MISSING' if bad else 'note'}: {printable(said)}")
        code = FINDINGS if bad else code
    if code and gaps != "allowed" and any(not damage for damage, _ in torn):
        sys.stderr.write("note: a folder that was published holds a choice of its chains' receipts: `gaps=allowed`\n")
    if "head" in options and not any(str(found.get("seal")).startswith(options["head"]) for found in whole):
        print(f"MISSING: no receipt here has the seal `{options['head']}`")
        code = FINDINGS
    if not listed:
        sys.stderr.write(f"note: none of {len(folders)} receipt{'s' * (len(folders) != 1)} in {root}\n")
    elif signers is None:
        sys.stderr.write(f"note: {UNKEYED}\n")
    if listed and not full:
        sys.stderr.write(f"note: {SHORT}\n")
    if old:
        sys.stderr.write(f"note: {OLD}: a receipt of version 1 has its own hash only\n")
    kept = receipt.kept_of(root, shown=True)  # by the chain: a clock that went back gives a later run an earlier name
    seals = [found["seal"] for found in whole if found["state"] == "sealed"] + ([kept["last"]] if kept else [])
    if listed and "head" not in options and seals and seals[-1]:
        sys.stderr.write(f"note: {HEAD.format(seals[-1][:SHORTEST])}\n")
    return code


def is_of(key: str, found: Any, asked: str) -> bool:
    """`family=nam56r` asks for the name that a family begins with; a preset's name is a part of its run's."""
    if key == "preset":  # as a run's folder has it: a name of one's own stands nowhere else in a receipt
        found = str(found).partition("-")[2].rpartition("-")[0]
    return found == asked or (key == "family" and str(found).startswith(f"{asked}: "))


def standing(folder: Path, found: Mapping[str, Any], signers: Path | None) -> tuple[str, bool]:
    """What is to be said of a receipt that its own hash agrees with, and whether that is a finding."""
    if found["state"] == "open":
        alive = receipt.held(folder, found)
        why = (
            "its lock is gone, another's or not to be asked"
            if alive is None
            else "its launcher is gone, and it cannot be sealed"
        )
        return ("", False) if alive else (f"UNKNOWN: {why}; it is not sealed", True)
    if signers is not None:
        name = signature.signer(folder, signers)
        return (f"signed by {name}", False) if name else ("UNSIGNED, or by nobody of that file", True)
    return (OLD if found["schema"] == receipt.FIRST else "", False)


def shown(text: str) -> str:
    """One line; on a terminal that is too narrow for it, broken between words."""
    columns = shutil.get_terminal_size().columns
    return folded("", text, "    ", columns) if sys.stdout.isatty() and len(text) > columns else text + "\n"


def line(found: Mapping, full: bool = False) -> str:
    ms, rate = (at(found, f"outcome.figures.window.{name}") for name in ("median_ms", "tokens_per_s_per_gpu"))
    regime = at(found, "lineage.regime")
    if regime and not full:
        parts = (part.replace(" x ", "x") for part in regime.split("; ") if part.endswith(("GPUs", "CPU ranks")))
        regime = next(parts, None)
    cells = [found["run"], at(found, "outcome.end") or "open", at(found, "lineage.host"), regime]
    cells += [f"{ms:.0f} ms, {rate:.0f} tok/s/{unit([found])}"] if None not in (ms, rate) else []
    return "  ".join(printable(str(cell or "-")) for cell in cells)
