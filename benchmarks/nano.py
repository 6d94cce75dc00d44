"""Nemotron-3 Nano, which nothing here was tuned on, cut to ten layers: Megatron's own stack against ours and our overlay, on one GPU.

    python benchmarks/nano.py --out nano.json [--limit SECONDS] [--data FOLDER] [TRIAL ...]

The cut keeps every width, the experts and the vocabulary, and takes the first ten letters of its pattern, which is what one H200 holds. The
baseline is Megatron's default stack on the same arguments (benchmarks/peak_memory.py --stock) at the same micro batch; all run in one
sitting, one after another. Beside each peak stands the budget's forecast of it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import measure
from throughput import OVERLAY, RUNGS, STOCK, line, rated

from nam_megatron.budget import budget
from nam_megatron.words.sizes import GIB

PRESET, STEPS = "nemotron_3_nano_30b_a3b", 8
CUT = ("cluster=h200_1", "model.depth=10", "model.pattern=MEMEMAEMEM", "parallel.expert=1", "optim.warmup_steps=2")
CUT += ("schedule.global_batch_size=8", f"schedule.train_steps={STEPS}", f"schedule.decay_steps={2 * STEPS}")
MBS2 = "schedule.micro_batch_size=2"
# name -> (overrides, words for peak_memory.py)
TRIALS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    STOCK: RUNGS[STOCK],
    "ours": ((), ()),
    "overlay": ((OVERLAY,), ()),
    "stock, micro batch 2": ((MBS2,), RUNGS[STOCK][1]),
    "overlay, micro batch 2": ((OVERLAY, MBS2), ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=540, help="seconds for all trials together")
    parser.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)}; all by default")
    options = parser.parse_args()
    if unknown := [n for n in options.trials if n not in TRIALS]:
        parser.error(f"no trial {', '.join(unknown)}")
    end, entries = time.monotonic() + options.limit, []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.trials or TRIALS):
            overrides, words = TRIALS[name]
            data = measure.built(options.data, Path(folder) / f"{number}.data")
            left = end - time.monotonic()
            entry = measure.trial(str(number), PRESET, (*CUT, *overrides, *data), Path(folder), left, words)
            entry = rated(entry | {"name": name, "gpu": 0})
            if "error" not in entry:
                (stage,) = budget(measure.lowered(PRESET, entry["overrides"]).plan).stages
                entry["forecast_gib"] = round(stage.steady.allocated / GIB, 2)
                entry["steady_gib"] = round(entry["peak_bytes"]["steady"]["allocated"] / GIB, 2)
            print(line(entry, None), flush=True)
            entries.append(entry)
            options.out.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
