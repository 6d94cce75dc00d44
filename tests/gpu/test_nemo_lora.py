"""Adapters on Transformer Engine's layers, grouped experts and our fused kernels, by Megatron-Bridge: each has learned.

Needs the extra `nemo`. tests/nemo shows the same on a CPU, with experts one by one and kernels in plain torch.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from nam_megatron.compile.argv import plan_json, words
from nam_megatron.compile.lower import translate
from nam_megatron.data import tokenizer
from nam_megatron.recipe import load

from .trained import SMALL, trained

pytestmark = pytest.mark.gpu

KINDS = {
    "native": ("lane=native_dp",),
    "designed": ("lane=author_dp", "model.letters.A=mla", "model.substitute=[{letter: A, ranks: [1], kind: dsa}]"),
}
STAYS = ("model.blocks.moe.expert_bias_update_rate=0.0", "feature.lora.rank=16", "optim.warmup_steps=0")
SAMPLES = [{"input": f"What is {n} and {n}?", "output": f" It is {2 * n}."} for n in range(64)]


@pytest.mark.parametrize("kinds", KINDS)
def test_every_adapter_has_learned(kinds, tmp_path):
    """A second matrix begins at zero: it is none any more exactly where a gradient came by."""
    pytest.importorskip("megatron.bridge")
    text = [sample[key] for sample in SAMPLES for key in ("input", "output")]
    tokenizer.save(tokenizer.train(text, 268, progress=False), tmp_path / "tokenizer")
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    own = (*KINDS[kinds], "feature.mtp.depths=0")
    trained(tmp_path / "begun", "nam56r_smoke", 4, *own, "schedule.save_interval=4")
    stays = (*STAYS, *(("model.blocks.dsa.indexer_loss_coeff=0.0",) if kinds == "designed" else ()))
    data = ("data=sft", f"data.path={tmp_path}", f"data.tokenizer={tmp_path / 'tokenizer'}")
    begun = next((tmp_path / "begun").rglob("latest_checkpointed_iteration.txt")).parent
    steps = ("schedule.train_steps=3", "schedule.save_interval=3", f"schedule.save={tmp_path / 'out'}")
    recipe = load("nam56r_smoke", (*SMALL, *own, *stays, *data, *steps, f"schedule.pretrained={begun}"))
    lowering = translate(recipe)
    (tmp_path / "plan.json").write_text(plan_json(lowering))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "nam_megatron.nemo.train"]
    ran = subprocess.run(
        [*start, "--nam-plan", str(tmp_path / "plan.json"), *words(lowering)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    step = tmp_path / "out/iter_0000003"
    held = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    names = [name for name, m in held.items() if hasattr(m, "properties") and not name.startswith("optimizer")]
    assert names and all(".adapter." in name for name in names), "adapters alone"
    tensors = {name: torch.empty(held[name].size, dtype=held[name].properties.dtype) for name in names}
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    assert not [name for name, tensor in tensors.items() if not tensor.abs().max() > 0]
    modules = {name.partition(".adapter.")[0].rpartition(".")[2] for name in names}
    assert modules == set(recipe.feature.lora.modules(lowering.plan.site))
