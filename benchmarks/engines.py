"""Open native exports by an engine's own loader on a CPU, in the engine's environment (no nam_megatron, no GPU):

    VENV_OF_VLLM_OR_SGLANG/bin/python benchmarks/engines.py vllm|sglang FILE FOLDER [FOLDER ...]

Of each folder: the class that the engine takes, its parameters beside the files' and the sum of squares of both (fp64), which fusing and
stacking tensors leaves as it is; without a state-space model's A, of which they hold no logarithm. No forward pass: their builds have
kernels for GPUs alone. `tests/cpu/test_published.py` makes such folders.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import torch
from safetensors.torch import load_file


def of_vllm(folder: Path) -> torch.nn.Module:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # what is imported below takes it by name
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as groups
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    registry._run_in_subprocess = lambda look: look()  # a process for each class would guard a GPU
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
    return model


def of_sglang(folder: Path) -> torch.nn.Module:
    # Where there is no GPU it takes vLLM's kernel that turns heads, which is called by no loader.
    sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm._custom_ops": types.ModuleType("vllm._custom_ops")}
    sys.modules["vllm._custom_ops"].rotary_embedding = None
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state as groups
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    words = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
    }
    args = ServerArgs(model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True, **words)
    publish(args, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    config = ModelConfig(model_path=str(folder), dtype="bfloat16", trust_remote_code=False)
    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        groups.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        groups.initialize_model_parallel("gloo")
    initialize_dp_attention(args)
    ours = loader.get_model_loader(LoadConfig(), config)
    with loader.set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model = loader._initialize_model(config, ours.load_config, None)
    model.load_weights(ours._get_all_weights(config, model))
    return model


def opened(engine: str, folder: Path) -> dict:
    model = {"vllm": of_vllm, "sglang": of_sglang}[engine](folder)
    files = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    row = {"class": type(model).__name__}
    for name, tensors in (("held", dict(model.named_parameters())), ("files", files)):
        squares = (t.double().pow(2).sum().item() for key, t in tensors.items() if not key.endswith((".A", ".A_log")))
        total = sum(squares)  # null: what no file fills holds a NaN
        row[name] = {
            "parameters": sum(t.numel() for t in tensors.values()),
            "squares": total if total == total else None,
        }
    return row


def main() -> int:
    engine = sys.argv[1]
    found = {engine: __import__(engine).__version__, "torch": torch.__version__, "folders": {}}
    for folder in map(Path, sys.argv[3:]):
        try:
            row = opened(engine, folder)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        found["folders"][folder.name] = row
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
        print(folder.name, row, flush=True)
    return int(any("error" in row for row in found["folders"].values()))


if __name__ == "__main__":
    sys.exit(main())
