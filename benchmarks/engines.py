"""Open native exports by vLLM's own loader on a CPU, in vLLM's environment (no nam_megatron, no GPU):

    VENV_OF_VLLM/bin/python benchmarks/engines.py FILE FOLDER [FOLDER ...]

Of each folder: the class that vLLM takes, its parameters beside the files' and the sum of squares of both (fp64), which fusing and
stacking tensors leaves as it is; without a state-space model's A, of which vLLM holds no logarithm. No forward pass: this build has kernels
for GPUs alone. `tests/cpu/test_published.py` makes such folders.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import torch
import vllm
import vllm.platforms
from safetensors.torch import load_file
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # what is imported below takes it by name
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state as groups
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype


def opened(folder: Path) -> dict:
    words = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 32}
    config = EngineArgs(model=str(folder), max_num_seqs=1, max_num_batched_tokens=32, **words).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as store:
        groups.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        groups.initialize_model_parallel(1, 1)
        try:
            # Without what its own `load_model` does next: it packs the weights by kernels that this build does not have.
            with set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
        finally:
            groups.destroy_model_parallel()
            groups.destroy_distributed_environment()
    files = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    row = {"class": type(model).__name__}
    for name, tensors in (("held", dict(model.named_parameters())), ("files", files)):
        squares = (t.double().pow(2).sum().item() for key, t in tensors.items() if not key.endswith((".A", ".A_log")))
        row[name] = {"parameters": sum(t.numel() for t in tensors.values()), "squares": sum(squares)}
    return row


def main() -> int:
    registry._run_in_subprocess = lambda look: look()  # a process for each class would guard a GPU
    found = {"vllm": vllm.__version__, "torch": torch.__version__, "folders": {}}
    for folder in map(Path, sys.argv[2:]):
        try:
            row = opened(folder)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        found["folders"][folder.name] = row
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
        print(folder.name, row, flush=True)
    return int(any("error" in row for row in found["folders"].values()))


if __name__ == "__main__":
    sys.exit(main())
