"""Public models at full width, cut in depth, with random weights: brought in, trained for some steps, and given back.

    python benchmarks/continued.py FOLDER --json FILE [NAME ...]

On one GPU, by the commands that a user gives: transformers' own class writes the model, `translate conf=` its folder, `hf import`,
`hf export --as native` of what was not trained, which has to be equal to the bit, run.sh, and `hf export --as native` of what was, which
the class has to open. Before and after, logits of the class beside Megatron's, both in bf16. The json is rewritten after each stage;
FOLDER/NAME/trained stays for `benchmarks/served.py`.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from trained import said, trained

from nam_megatron.compile.argv import load_plan
from nam_megatron.hf import check, distributed

CONFIGS = Path(__file__).parent.parent / "tests" / "hf_configs.yaml"
CASES: dict[str, dict[str, Any]] = {
    "llama_3_1_8b": {"num_hidden_layers": 2},
    "nemotron_3_nano_30b_a3b": {"num_hidden_layers": 4, "hybrid_override_pattern": "MEM*"},
    "qwen3_30b_a3b": {"num_hidden_layers": 2},
}
STEPS, LENGTH = 20, 512  # of training; tokens of each of two sequences whose logits are compared
WORDS = (
    "cluster=h200_1", "parallel.expert=1", f"schedule.train_steps={STEPS}", f"schedule.decay_steps={STEPS}", "schedule.log_interval=1",
    "schedule.micro_batch_size=1", "schedule.global_batch_size=4", "model.seq_length=2048", "optim.lr=1e-4", "optim.min_lr=1e-5",
    "optim.warmup_steps=0",
)  # fmt: skip


def config(name: str) -> dict[str, Any]:
    files = yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
    file = files[name]
    return (files[file["like"]]["config"] if "like" in file else {}) | file["config"] | CASES[name]


def written(name: str, to: Path, device: str) -> int:
    """The model, by its class, with what it begins with; its number of parameters."""
    keys = config(name)
    torch.manual_seed(7)
    with torch.device(device):
        made = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(to)
    return sum(p.numel() for p in model.parameters())


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def same(one: Path, two: Path) -> dict[str, int]:
    """Of the tensors that the class reads from two folders: how many, how many equal to the bit, how many that only one has."""
    ours, theirs = (opened(folder).state_dict() for folder in (one, two))
    equal = sum(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    return {"tensors": len(ours), "equal": equal, "of_one_alone": len(ours.keys() ^ theirs.keys())}


def prompts(vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(11))


@torch.inference_mode()
def theirs(folder: Path, device: str) -> torch.Tensor:
    model = opened(folder).to(device)
    return model(prompts(model.config.vocab_size).to(device)).logits.float().cpu()


def ours(plan: Path, checkpoint: Path, out: Path) -> None:
    """Megatron's, in a process of its own, which says where it is if it takes too long."""
    faulthandler.dump_traceback_later(400, exit=True)
    lowering = check.one_device(load_plan(plan), plain=True)
    check.rank_zero(lowering)
    with contextlib.redirect_stdout(sys.stderr):
        model = check.built(lowering, distributed.step_folder(checkpoint), "bf16")
        tokens = prompts(lowering.plan.recipe.model.vocab_size).cuda()
        torch.save(check.observed(model, tokens).logits, out)


def apart(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Logits [b, s, v] of both sides."""
    cosine = torch.cosine_similarity(x, y, -1)
    kl = (x.log_softmax(-1).exp() * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1)
    best = (x.argmax(-1) == y.argmax(-1)).float().mean()
    found = {"cosine": cosine.median(), "least_cosine": cosine.min(), "kl": kl.mean(), "same_best": best}
    return {key: round(value.item(), 6) for key, value in found.items()}


def compared(plan: Path, checkpoint: Path, folder: Path, scratch: Path, device: str) -> dict[str, float]:
    subprocess.run([sys.executable, __file__, "--logits", plan, checkpoint, scratch], check=True)
    found = apart(torch.load(scratch), theirs(folder, device))
    scratch.unlink()
    gc.collect()
    torch.cuda.empty_cache()  # for the next process
    return found


def continued(found: dict[str, Any], keep: Callable[[], None], at: Path, device: str) -> None:
    name = found["name"]

    def timed(key: str, *words: str | Path) -> None:
        began = time.monotonic()
        said(*words)
        found[f"{key}_s"] = round(time.monotonic() - began, 1)
        keep()

    found |= {"cut": CASES[name], "overrides": WORDS, "parameters": written(name, at / "hf", device)}
    gc.collect()
    torch.cuda.empty_cache()
    plan = at / "plan" / "plan.json"
    said("nam_megatron.translate", f"conf={at / 'hf'}", *WORDS, f"out={plan.parent}")
    timed("import", "nam_megatron.hf", "import", at / "hf", plan, at / "weights")
    timed("export", "nam_megatron.hf", "export", at / "weights", at / "back", "--as", "native")
    found["untrained"] = same(at / "hf", at / "back")
    found["logits_before"] = compared(plan, at / "weights", at / "hf", at / "logits.pt", device)
    keep()
    saves = (f"schedule.load={at / 'weights'}", f"schedule.save={at / 'ckpt'}", f"schedule.save_interval={STEPS}")
    began = time.monotonic()
    losses = trained(at / "run", [*WORDS, *saves], at / "hf")
    found |= {"training_s": round(time.monotonic() - began, 1), "losses": list(losses.values())}
    timed("export_trained", "nam_megatron.hf", "export", at / "ckpt", at / "trained", "--as", "native")
    found["trained"] = same(at / "hf", at / "trained")
    found["logits_after"] = compared(at / "run" / "plan.json", at / "ckpt", at / "trained", at / "logits.pt", device)
    for folder in ("hf", "weights", "back", "ckpt"):  # 20 bytes a parameter
        shutil.rmtree(at / folder)


def main() -> int:
    if sys.argv[1:2] == ["--logits"]:
        ours(*map(Path, sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one, for the models")
    parser.add_argument("--json", type=Path, required=True, help="file that gets what was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    options = parser.parse_intermixed_args()  # names may stand behind --json
    if unknown := set(options.names) - CASES.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}")
    made: dict[str, Any] = {"torch": torch.__version__, "models": []}
    if torch.cuda.is_available():
        made["gpu"] = torch.cuda.get_device_name()

    def keep() -> None:
        options.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

    for name in options.names or CASES:
        entry: dict[str, Any] = {"name": name, "transformers": transformers.__version__}
        made["models"].append(entry)
        try:
            continued(entry, keep, options.folder / name, options.device)
        except (Exception, SystemExit) as error:  # the others are still worth their time
            entry["error"] = f"{type(error).__name__}: {error}"
        keep()
        print(json.dumps(entry), flush=True)
    return int(any("error" in entry for entry in made["models"]))


if __name__ == "__main__":
    sys.exit(main())
