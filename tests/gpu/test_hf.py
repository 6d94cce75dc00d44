"""The export beside Megatron with Transformer Engine and our kernels, in bf16: trained, exported and checked as a user does it.

Each step is a process: `check` becomes rank 0 of a world of one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nam_megatron.generate import Options, decode
from nam_megatron.hf import export
from nam_megatron.hf.model.modeling_nam import NamCache
from nam_megatron.hf.opened import open_model

from .trained import trained

pytestmark = pytest.mark.gpu

CASES = {
    "nam56r": ("model.ffn_hidden_size=2048", "model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]"),
    "nam56r_native_dp": (),
}


def made(name: str, at: Path) -> tuple[Path, Path]:
    """The checkpoint of fifty steps on random tokens, and its export."""
    checkpoint = trained(at, name, 50, *CASES[name], "schedule.save_interval=50")
    export.export(checkpoint, at / "hf", None, lambda text: None)
    return checkpoint, at / "hf"


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
    for _ in decode(model, [[1, 2, 3]], Options(2)):
        pass  # cuBLAS takes its workspace, 32 MiB, at its first product
    before, cache = torch.cuda.memory_allocated(), NamCache(192)
    for _ in decode(model, [list(range(1, 129))] * 8, Options(64), cache):
        pass
    held = torch.cuda.memory_allocated() - before
    assert cache.nbytes <= held <= 1.05 * cache.nbytes + 2**20
