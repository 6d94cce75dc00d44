"""A model trained on code, exported, opened and asked to go on: python benchmarks/trained.py FOLDER --data SET --json FILE [OVERRIDE ...]

The author stack cut to 13 layers at full width, on one GPU, by the commands that a user gives, each a process of its own: run.sh, `hf
export`, `hf check`, `hf perplexity` on held-out documents, `generate`, `hf import`, and a second run.sh that starts from what was imported.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import built, dataset, told

from launch.record import steps as log

PRESET = "nam56r_fused"
CUT = (
    "cluster=h200_1",
    "model.depth=13",
    "model.substitute=[{letter: A, ranks: [1, 2, 3], kind: dsa}]",
    "schedule.log_interval=1",
)
STEPS, AGAIN = 600, 5
KERNELS = ("--kernels", "nam_megatron")
PROMPTS = (
    "#include <vector>\n#include <",
    "namespace at {\n\nclass TORCH_API Tensor",
    "for (const auto i : c10::irange(",
    "  if (!self.defined()) {\n",
    "template <typename T>\nstruct ",
    "static inline bool is_",
)


def said(*words: str | Path, ends: Sequence[int] = (0,)) -> str:
    """What a command of ours prints. Raises CalledProcessError, once it has told what the command said, if it ends otherwise."""
    ran = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, check=False)
    if ran.returncode not in ends:
        print(ran.stdout[-3000:], ran.stderr[-5000:], sep="\n", flush=True)
        ran.check_returncode()
    return ran.stdout


def trained(folder: Path, words: Sequence[str], conf: str | Path = PRESET) -> dict[int, float]:
    """Losses by step."""
    said("nam_megatron.translate", f"conf={conf}", *words, f"out={folder}")
    with (folder / "log").open("w+", errors="replace") as stream:
        code = subprocess.run(["bash", str(folder / "run.sh")], stdout=stream, stderr=stream, check=False).returncode
        stream.seek(0)
        text = stream.read()
    if code:
        print(text[-5000:], flush=True)
        raise SystemExit(f"the training ended with {code}: {folder / 'log'}")
    return {number: step.values["lm loss"] for number, step in log.read(text.splitlines()).steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one, for the runs, the checkpoint and the export")
    parser.add_argument("--data", type=dataset, required=True, help="a built dataset")
    parser.add_argument("--json", type=Path, required=True, help="file that gets what was measured")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the first run (default: {STEPS})")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="of the recipe, e.g. schedule.global_batch_size=8"
    )
    options = parser.parse_intermixed_args()
    at: Path = options.folder
    at.mkdir(parents=True)
    words = [*CUT, *options.overrides, *built(options.data, at / "data")]
    run = [*words, f"schedule.train_steps={options.steps}", f"schedule.decay_steps={options.steps}"]
    found: dict[str, Any] = {"preset": PRESET, "overrides": told(run), "steps": options.steps}

    def timed(name: str, *command: str | Path, ends: Sequence[int] = (0,)) -> str:
        began = time.monotonic()
        out = said(*command, ends=ends)
        found[f"{name}_s"] = round(time.monotonic() - began, 1)
        return out

    def keep() -> None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    began = time.monotonic()
    losses = trained(at / "run", [*run, f"schedule.save={at / 'ckpt'}", f"schedule.save_interval={options.steps}"])
    found["training_s"] = round(time.monotonic() - began, 1)
    found["losses"] = {step: loss for step, loss in losses.items() if step in (1, 10, options.steps) or step % 50 == 0}
    keep()
    timed("export", "nam_megatron.hf", "export", at / "ckpt", at / "hf")
    found["export_gib"] = round(sum(f.stat().st_size for f in (at / "hf").glob("*.safetensors")) / 2**30, 2)
    checked = ("nam_megatron.hf", "check", at / "ckpt", at / "hf", "--json", "--length", "512")
    text = ("--dataset", options.data)
    ways = {"check": (), "check_plain": ("--plain",), "check_text": text, "check_text_plain": (*text, "--plain")}
    for name, way in ways.items():  # a difference is a result, too
        found[name] = json.loads(timed(name, *checked, *way, ends=(0, 1)))
        keep()
    on_gpu = ("--device", "cuda", "--dtype", "bf16")
    held_out = ("nam_megatron.hf", "perplexity", at / "hf", options.data, *on_gpu, "--most", "16")
    for name, way in (("perplexity", ()), ("perplexity_kernels", KERNELS)):
        timed(name, *held_out, *way, "--out", at / f"{name}.json")
        found[name] = json.loads((at / f"{name}.json").read_text(encoding="utf-8"))
    (at / "prompts").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    generate = ("nam_megatron.generate", at / "hf", "--file", at / "prompts", "--new", "96", *on_gpu)
    drawn = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "1")
    for name, way in (("greedy", ()), ("greedy_kernels", KERNELS), ("sampled", drawn)):
        lines = timed(name, *generate, *way).splitlines()
        found[name] = [json.loads(line) for line in lines]
        keep()
    timed("import", "nam_megatron.hf", "import", at / "hf", at / "run" / "plan.json", at / "again")
    on = [*words, f"schedule.train_steps={AGAIN}", f"schedule.decay_steps={AGAIN}", f"schedule.load={at / 'again'}"]
    found["losses_from_import"] = trained(
        at / "goes_on", [*on, "optim.lr=3e-5", "optim.min_lr=3e-6", "optim.warmup_steps=0"]
    )
    keep()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
