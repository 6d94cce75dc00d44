"""Our MLA layer and our DSA layer on some tensor ranks, sequence parallel: output and every gradient, put together.

    python tests/gpu/tensor_parallel.py RANKS FILE [--cpu]

FILE gets a dict of whole tensors by kind and name. Input and weights are the same for any number of ranks. Each rank has a GPU: fused
kernels, bf16, Transformer Engine, NCCL. With --cpu: naive kernels, fp32, stand-ins for Transformer Engine's modules, gloo, tiny.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import modules
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.spec_utils import build_module

from nam_megatron.runtime import stack

# (positions, samples, config) of NAM56R's attention, narrower.
GPU = 2048, 2, dict(hidden_size=1024, num_attention_heads=28, q_lora_rank=64, kv_lora_rank=64, qk_head_dim=64)
GPU[2].update(qk_pos_emb_head_dim=64, v_head_dim=64, dsa_indexer_n_heads=32, dsa_indexer_head_dim=64)
GPU[2].update(dsa_indexer_topk=256, bf16=True, params_dtype=torch.bfloat16)
CPU = 32, 2, dict(hidden_size=64, num_attention_heads=4, q_lora_rank=16, kv_lora_rank=24, qk_head_dim=16)
CPU[2].update(qk_pos_emb_head_dim=8, v_head_dim=16, dsa_indexer_n_heads=4, dsa_indexer_head_dim=16)
CPU[2].update(dsa_indexer_topk=8, use_cpu_initialization=True, persist_layer_norm=False)


def config_of(sizes: dict[str, Any], ranks: int) -> MLATransformerConfig:
    fields = dict(num_layers=1, ffn_hidden_size=128, normalization="RMSNorm", add_bias_linear=False, qk_layernorm=True)
    fields |= dict(rope_type="rope", rotary_base=500000, rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    fields |= dict(hidden_dropout=0.0, attention_dropout=0.0, apply_rope_fusion=False, bias_dropout_fusion=False)
    fields |= dict(gradient_accumulation_fusion=False, experimental_attention_variant="dsa", is_hybrid_model=True)
    fields |= dict(dsa_indexer_loss_coeff=0.01, dsa_indexer_rotate_activation=False)
    fields |= dict(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)
    return MLATransformerConfig(**fields | sizes)


def layer_of(kind: str, sizes: dict[str, Any], ranks: int, cpu: bool) -> torch.nn.Module:
    recipe = harness.recipe_of()
    for ours in ("mla", "dsa"):
        harness.say(recipe, ours, kernels="naive" if cpu else "fused")
    backend = modules.CpuBackend() if cpu else stack.transformer_engine_backend()
    spec = stack.torch_side(kind).spec(backend, recipe.blocks.of(kind), harness.site_of(recipe))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=config_of(sizes, ranks), layer_number=1, pg_collection=groups)
    layer = layer if cpu else layer.cuda()
    harness.fill(layer)
    return layer.train()


def step(kind: str, rank: int, ranks: int, cpu: bool) -> list[harness.Shard]:
    """This rank's parts of the layer's output and of every gradient."""
    s, b, sizes = CPU if cpu else GPU
    layer = layer_of(kind, sizes, ranks, cpu)
    generator, shape = torch.Generator().manual_seed(7), (s, b, sizes["hidden_size"])
    here = dict(device="cpu" if cpu else "cuda", dtype=layer.config.params_dtype)
    part = slice(rank * s // ranks, (rank + 1) * s // ranks)
    x, back = (torch.randn(shape, generator=generator)[part].to(**here) for _ in range(2))
    out, _ = layer(x.requires_grad_(), None)
    out.backward(back)
    layer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_non_tensor_model_parallel_grads([layer], layer.config, layer.pg_collection.tp)
    shards = [("output", shape, (part,), out), ("input", shape, (part,), x.grad)]
    shards += harness.gathered(layer, lambda p: p.grad)
    if kind == "dsa":  # of all heads, whoever holds them: gradients alone would not tell
        shards.append(("indexer loss", (1,), (slice(0, 1),), DSAIndexerLossLoggingHelper.tracker.pop("values")))
    return [(f"{kind} {name}", size, window, local.detach().float().cpu()) for name, size, window, local in shards]


def run(rank: int, ranks: int, folder: Path, cpu: bool) -> None:
    with harness.patched() if cpu else contextlib.nullcontext():
        if not cpu:
            torch.cuda.set_device(rank)
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo" if cpu else "nccl", init_method=store, rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        if not cpu:
            model_parallel_cuda_manual_seed(1)
        torch.save([s for kind in ("mla", "dsa") for s in step(kind, rank, ranks, cpu)], folder / f"{rank}.pt")
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cpu", action="store_true")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        method = "fork" if o.cpu else "spawn"  # a fork saves the imports, and cannot use a GPU
        torch.multiprocessing.start_processes(run, (o.ranks, folder, o.cpu), nprocs=o.ranks, start_method=method)
        parts = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(o.ranks)]
    torch.save(harness.assemble(parts), o.file)


if __name__ == "__main__":
    main()
