"""A checkpoint of our mixers, of residual streams and of n-gram rows, written on one tensor parallel size and read on another.

By Megatron's own saving and loading, on a CPU.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import test_m2rnn
import test_mamba3
from harness import Case, Rig, on_ranks

# Rows of each part of the packed projection, over all ranks.
PARTS = {
    "m2rnn": {"q": 8, "k": 8, "v": 24, "gate": 24, "forget": 6},
    "mamba3": {"z": 64, "x": 64, "B": 64, "C": 64, "dt": 8, "A": 8, "trap": 8, "angles": 4},
    "features": {},
}
FEATURES = {"mhc": {"streams": 4, "kernels": "naive"}, "ngram_hash": {"enabled": True, "buckets": 14, "width": 3}}
CASES = {"m2rnn": test_m2rnn.CASE, "mamba3": test_mamba3.CASE, "features": Case("*E-", features=FEATURES)}


def state(rig: Rig) -> dict:
    return rig.model.sharded_state_dict(metadata={"dp_cp_group": rig.model.pg_collection.dp_cp})


@pytest.mark.few("m2rnn-1")
@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", CASES)
def test_another_tensor_parallel_size_reads_the_same_model(tmp_path, kind, written, read):
    """Weights that the reader had before are NaN; what it then computes is what the writer computed."""

    def save(rig: Rig):
        from megatron.core import dist_checkpointing

        with torch.no_grad():  # weights that no layout could have made by itself
            for tensor in rig.model.parameters():
                tensor.mul_(1.25)
        dist_checkpointing.save(state(rig), str(tmp_path))
        return harness.weights(rig), harness.step(rig)

    def restore(rig: Rig):
        from megatron.core import dist_checkpointing

        with torch.no_grad():
            for tensor in rig.model.parameters():
                tensor.fill_(torch.nan)
        rig.model.load_state_dict(dist_checkpointing.load(state(rig), str(tmp_path)))
        return harness.weights(rig), harness.step(rig)

    wrote = on_ranks(replace(CASES[kind], tp=written), save)
    found = on_ranks(replace(CASES[kind], tp=read), restore)
    saved, loaded = (harness.assemble([weights for weights, _ in ranks]) for ranks in (wrote, found))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[key], loaded[key]) for key in saved)
    assert found[0][1] == pytest.approx(wrote[0][1], rel=1e-6)
    shapes = {key.rsplit(".", 1)[1]: tensor.shape[-2] for key, tensor in saved.items() if "in_proj.weight." in key}
    assert shapes == PARTS[kind]
