"""Small runs on one GPU that leave checkpoints, started as a user starts them."""

import subprocess
import sys
from pathlib import Path

SMALL = (
    "cluster=h200_1", "model.depth=12", "model.hidden_size=1024", "model.num_attention_heads=16", "model.vocab_size=8192",
    "model.seq_length=1024", "schedule.global_batch_size=8",
)  # fmt: skip


def trained(at: Path, preset: str, steps: int, *words: str) -> Path:
    """The folder of the checkpoints of `steps` steps on random tokens, by SMALL and `words`."""
    command = [f"conf={preset}", *SMALL, f"schedule.train_steps={steps}", f"schedule.decay_steps={steps}", *words]
    command += [f"schedule.save={at}/ckpt", f"out={at}/run"]
    subprocess.run([sys.executable, "-m", "nam_megatron.translate", *command], check=True, timeout=100)
    ran = subprocess.run(["bash", str(at / "run" / "run.sh")], capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    return at / "ckpt"
