"""Every preset's small cut, trained on a CPU, exported and held against Megatron's model.

    PYTHONPATH=tests python tests/cpu/exports.py FILE [PRESET ...]

FILE gets a row for each as JSON: what `python -m nam_megatron.hf check` finds in fp32 and bf16, and whether the import of the export is the
checkpoint, to the bit. Exit code 1 if one does not pass.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import test_hf
import torch

from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.errors import FINDINGS, OK, Refused, finish
from nam_megatron.hf import check, distributed, export
from nam_megatron.prove import cut
from nam_megatron.prove.every import record
from nam_megatron.recipe import conf_dir, from_tree, load, to_tree

STEPS = 50
OPTIMIZER = ("optimizer", "chained_")


def small(preset: str, folder: Path) -> Lowering:
    """The cut that `prove` makes of one rank, for STEPS steps."""
    tree = to_tree(cut.pair(load(preset), "cpu", STEPS).reference.plan.recipe)
    tree["schedule"] |= {"save": f"{folder}/ckpt", "save_interval": STEPS, "global_batch_size": 4}
    tree["data"] |= {"workers": 0}
    return translate(from_tree(tree))


def outcome(preset: str, folder: Path) -> dict[str, Any]:
    """Of one preset. Raises Refused where it is not exported."""
    lowering = small(preset, folder)
    (rank,) = test_hf.train_of(lowering, folder, 1)
    assert rank.code == 0, rank.err[-2000:]
    export.export(folder / "ckpt", folder / "hf", None, lambda text: None)
    model = lowering.plan.recipe.model
    tokens = test_hf.random(4, model.seq_length, vocabulary=model.vocab_size)
    row: dict[str, Any] = {"preset": preset, "pattern": lowering.plan.pattern, "steps": STEPS}
    for dtype in ("fp32", "bf16"):
        told = folder / f"{dtype}.json"

        def job(dtype: str = dtype, told: Path = told) -> None:
            found = check.check(folder / "ckpt", folder / "hf", tokens, dtype, "cpu")
            told.write_text(json.dumps(found.as_dict()))

        test_hf.in_megatron(job)
        found = json.loads(told.read_text())
        numbers = {"layers": max(found["layers"]), "ahead": max(found["ahead"], default=None)}
        row[dtype] = {k: found[k] for k in ("passed", "relative", "cosine", "kl", "greedy", "otherwise")} | numbers
    row["import"] = equal(folder)
    return row


def equal(folder: Path) -> bool:
    """Whether the import of the export has the checkpoint's weights, to the bit."""
    export.load(folder / "hf", folder / "ckpt" / "plan.json", folder / "again", lambda text: None)
    before, after = (distributed.Checkpoint(distributed.step_folder(folder / name)) for name in ("ckpt", "again"))
    of = {key: tensor for key, tensor in before.tensors.items() if not key.startswith(OPTIMIZER)}
    return of.keys() == after.tensors.keys() and all(
        torch.equal(*(side.read(key, tuple(t.size), t.properties.dtype).view(torch.uint8) for side in (before, after)))
        for key, t in of.items()
    )


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("presets", nargs="*", help="all, where none is named")
    words = parser.parse_args()
    found = []
    for preset in words.presets or sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml")):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = outcome(preset, Path(folder))
            except Refused as refused:
                row = {"preset": preset, "refused": "; ".join(p.message for p in refused.problems)}
        found.append(row | {"seconds": round(time.monotonic() - begun, 1)})
        sys.stdout.write(f"{json.dumps(found[-1])}\n")
        sys.stdout.flush()
        record(words.file, found)
    good = all("refused" not in r and r["fp32"]["passed"] and r["bf16"]["passed"] and r["import"] for r in found)
    return OK if good else FINDINGS


if __name__ == "__main__":
    finish(command)
