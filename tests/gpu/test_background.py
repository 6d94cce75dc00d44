"""A checkpoint written while training goes on is that of its step: bit for bit what a run writes that waits for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

pytestmark = pytest.mark.gpu

SMALL = (
    "cluster=h200_1",
    "model.depth=12",
    "model.hidden_size=1024",
    "model.num_attention_heads=16",
    "model.vocab_size=8192",
)
SMALL += ("model.seq_length=1024", "schedule.global_batch_size=8", "schedule.train_steps=6", "schedule.decay_steps=6")
SMALL += ("optim.lr=0.01", "optim.warmup_steps=0", "precision.deterministic=true", "schedule.save_interval=2")


def saved(at: Path, *words: str) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint of step 2 of six."""
    command = ["conf=nam56r_native_dp", *SMALL, f"schedule.save={at}/ckpt", f"out={at}/run", *words]
    subprocess.run([sys.executable, "-m", "nam_megatron.translate", *command], check=True, timeout=100)
    ran = subprocess.run(["bash", str(at / "run" / "run.sh")], capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    step = at / "ckpt" / "iter_0000002"
    held = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in held.items() if hasattr(m, "properties")
    }
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    return tensors


def test_what_is_written_meanwhile_is_the_step_it_says(tmp_path):
    waited = saved(tmp_path / "waited")
    meanwhile = saved(tmp_path / "meanwhile", "schedule.async_save=true")
    assert waited.keys() == meanwhile.keys() and len(waited) > 20
    assert not [name for name in waited if not torch.equal(waited[name], meanwhile[name])]
