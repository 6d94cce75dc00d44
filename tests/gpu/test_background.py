"""A checkpoint written while training goes on is that of its step: bit for bit what a run writes that waits for it."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from .trained import trained

pytestmark = pytest.mark.gpu

# By parameter: between those of a bucket Megatron 0.19.2 writes memory that nobody filled.
HARD = ("optim.lr=0.01", "optim.warmup_steps=0", "precision.deterministic=true", "schedule.save_interval=2")
HARD += ("feature.distributed_optimizer.reshardable=true",)


def saved(at: Path, *words: str) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint of step 2 of six."""
    step = trained(at, "nam56r_native_dp", 6, *HARD, *words) / "iter_0000002"
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
