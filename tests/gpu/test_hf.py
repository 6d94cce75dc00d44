"""The export beside Megatron with Transformer Engine and our kernels, in bf16: `check` as a user runs it, from random weights.

Each case is a process: `check` becomes rank 0 of a world of one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nam_megatron.argv import plan_json
from nam_megatron.generate import Options, decode
from nam_megatron.hf import describe, distributed, export
from nam_megatron.hf.model.modeling_nam import NamCache
from nam_megatron.hf.opened import open_model
from nam_megatron.lower import translate
from nam_megatron.recipe import load

pytestmark = pytest.mark.gpu

SMALL = (
    "cluster=h200_1",
    "model.depth=12",
    "model.hidden_size=1024",
    "model.num_attention_heads=16",
    "model.vocab_size=8192",
)
SMALL += ("model.seq_length=1024", "model.ffn_hidden_size=2048")
CASES = {
    "nam56r": (*SMALL, "model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]"),
    "nam56r_native_dp": SMALL,
}


def made(name: str, at: Path) -> tuple[Path, Path]:
    """A checkpoint of weights drawn as a trained model's are sized, and its export."""
    lowering = translate(load(name, CASES[name]))
    generator = torch.Generator().manual_seed(0)

    def drawn(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in key and key.endswith("weight"):
            values = 1 + 0.1 * values
        elif len(shape) > 1 and "bias" not in key:
            values = values / shape[-1] ** 0.5
        else:
            values = 0.1 * values
        return values.to(dtype)

    tensors = list(describe.tensors(describe.config(lowering.plan)))
    weights = {key: drawn(key, shape, distributed.DTYPES[t.dtype]) for t in tensors for key, shape in t.parts}
    distributed.write(at / "ckpt", weights, lowering)
    assert (at / "ckpt" / "plan.json").read_text() == plan_json(lowering)
    export.export(at / "ckpt", at / "hf", None, lambda text: None)
    return at / "ckpt", at / "hf"


@pytest.mark.parametrize("name", CASES)
def test_the_export_computes_what_the_kernels_do(tmp_path, name):
    checkpoint, exported = made(name, tmp_path)
    words = [
        sys.executable,
        "-m",
        "nam_megatron.hf",
        "check",
        str(checkpoint),
        str(exported),
        "--json",
        "--length",
        "512",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)["passed"]


@pytest.mark.parametrize("name", CASES)
def test_what_a_batch_holds_is_its_cache(tmp_path, name):
    """Nothing else grows with the tokens: what is allocated after decoding is the weights and the cache."""
    model = open_model(made(name, tmp_path)[1], torch.bfloat16, "cuda")
    before, cache = torch.cuda.memory_allocated(), NamCache(192)
    for _ in decode(model, [list(range(1, 129))] * 8, Options(64), cache):
        pass
    held = torch.cuda.memory_allocated() - before
    assert cache.nbytes <= held <= 1.05 * cache.nbytes + 2**20
