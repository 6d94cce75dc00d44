"""Does DSA's indexer learn where attention does? Small models on a CPU: python benchmarks/indexer.py OUT [CASE ...]

Text of the Python files that torch carries, a tokenizer of 1,024 entries, 800 steps of 2,048 tokens, the author stack's plain torch. Each
case is a run of `launch`, five minutes on a core or two; with Mamba-3, whose plain torch takes each token by itself, a step takes ten times
as long. What is kept is the share of attention on the keys that the indexer selects, by layer; chance is where it begins. Writes
OUT/indexer.json; of a case that OUT has already, what it has.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = """
defaults: [nam56r, _self_]
family: {name}
pattern: {pattern}
depth: {depth}
hidden_size: 256
ffn_hidden_size: 512
num_attention_heads: 4
vocab_size: 1024
seq_length: 256
letters: {letters}
substitute: []
blocks:
  dsa: {{indexer_heads: 4, indexer_head_dim: 32, top_k: 16, full_every: 1}}
  mla: {{qk_head_dim: 32, qk_rope_head_dim: 32, v_head_dim: 64}}
{more}
"""
PRESET = """# @package _global_
defaults: [nam56r, {{override /model: {name}}}, {{override /cluster: cpu}}, {{override /execution: plain}}, _self_]
preset: {{name: {name}, family: {name}, about: "small layers with DSA"}}
feature: {{mtp: {{depths: 0}}}}
schedule: {{micro_batch_size: 8, global_batch_size: 8, train_steps: 800, decay_steps: 800}}
optim: {{warmup_steps: 20, lr: 1.0e-3}}
"""
PLAIN = {"pattern": "AEAE", "depth": 4, "letters": "{A: dsa, E: mlp}", "more": ""}
MIXED = {
    "pattern": "AEME",
    "depth": 8,
    "letters": "{A: dsa, E: mlp, M: mamba3}",
    "more": "  mamba3: {heads: 8, head_dim: 32, state_dim: 16, groups: 2, mimo_rank: 2}",
}
LOSS = "model.blocks.dsa.indexer_loss_coeff"
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "as in NAM56R": (PLAIN, ()),
    "its loss a thousand times": (PLAIN, (f"{LOSS}=1.0",)),
    "a learning rate of 3e-4": (PLAIN, ("optim.lr=3e-4",)),
    "Mamba-3 between them": (MIXED, ()),
}


def corpus(out: Path) -> Path:
    if not (built := out / "set").is_dir():
        files = sorted(Path(torch.__file__).parent.rglob("*.py"))
        texts = [text for file in files if 500 < len(text := file.read_text(errors="ignore")) < 60_000][:420]
        (out / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for verb in (
            ("tokenizer", "bpe", "text.jsonl", "--entries", "1024"),
            ("build", "set", "text.jsonl", "--tokenizer", "bpe"),
        ):
            subprocess.run(
                [sys.executable, "-m", "nam_megatron.data", *verb], cwd=out, env={"PYTHONPATH": str(ROOT)}, check=True
            )
    return built


def run(out: Path, number: int, model: dict[str, Any], words: tuple[str, ...]) -> None:
    name = f"case{number}"
    for folder, text in (("model", MODEL), ("preset", PRESET)):
        (out / folder).mkdir(exist_ok=True)
        (out / folder / f"{name}.yaml").write_text(text.format(name=name, **model))
    storage = [f"cluster.storage.{kind}={out / name / kind}" for kind in ("receipts", "scratch", "durable")]
    told = ["data=built", f"data.path={corpus(out)}", "data.workers=0", f"port={29600 + number}", *storage, *words]
    subprocess.run(
        [sys.executable, "-m", "launch", "run", "--config-dir", str(out), f"conf={name}", *told], cwd=ROOT, check=False
    )


def steps(folder: Path) -> list[dict[str, Any]]:
    """Of each step that measured it: what each layer keeps, and the loss."""
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [
        {
            "step": said["step"],
            "loss": round(said["loss"], 3),
            "kept": {name.removeprefix("DSA kept "): round(share, 4) for name, share in said["gauges"].items()},
        }
        for said in lines
        if said["event"] == "step" and said["gauges"]
    ]


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for number, (name, (model, words)) in enumerate(CASES.items()):
        if name in (sys.argv[2:] or CASES) and not (out / f"case{number}" / "receipts").is_dir():
            run(out, number, model, words)
    found = {
        name: {"model": model, "words": words, "steps": steps(folder)}
        for number, (name, (model, words)) in enumerate(CASES.items())
        for folder in sorted((out / f"case{number}" / "receipts").glob("*Z-case*"))[:1]
    }
    (out / "indexer.json").write_text(json.dumps({"torch": torch.__version__, "cases": found}) + "\n")


if __name__ == "__main__":
    main()
