"""tests/gpu/tensor_parallel.py with plain torch on a CPU; tests/gpu/test_two_gpus.py runs it with the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from gpu import tensor_parallel

PROGRAM = Path(__file__).parents[1] / "gpu" / "tensor_parallel.py"


def assert_same_on_two_ranks(folder: Path, *options: str, limit: float) -> None:
    """Runs the program on one rank and on two."""
    found = []
    for ranks in (1, 2):
        file = folder / f"{ranks}.pt"
        command = [sys.executable, str(PROGRAM), str(ranks), str(file), *options]
        # Megatron wants it under tensor parallelism.
        env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found.append(torch.load(file))
    assert_same(*found, limit)


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], limit: float) -> None:
    """No tensor may be off by more than `limit`, relatively."""
    assert one.keys() == two.keys() and len(one) > 20
    errors = {name: float((two[name] - tensor).norm() / tensor.norm()) for name, tensor in one.items()}
    bad = {name: error for name, error in errors.items() if not error <= limit}
    assert not bad, f"two ranks are not one: {bad}"


def test_two_tensor_ranks_are_one(tmp_path, monkeypatch):
    """As the program does it, in forks of this process, which has the imports."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = []
    for ranks in (1, 2):
        (folder := tmp_path / str(ranks)).mkdir()
        torch.multiprocessing.start_processes(
            tensor_parallel.run, (ranks, folder, True), nprocs=ranks, start_method="fork"
        )
        parts = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        found.append(tensor_parallel.harness.assemble(parts))
    assert_same(*found, limit=1e-4)
