"""Exports of weights drawn at random, made without Megatron: every kind of layer, in four models."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from nam_megatron.blocks.exported import Tensor
from nam_megatron.hf import describe, export, folder
from nam_megatron.hf.model.configuration_nam import COMPUTES, NamConfig

SIZES: dict[str, dict[str, Any]] = {
    "attention": {
        "head_dim": 16, "query_groups": 2, "qk_norm": True, "qkv_bias": False, "output_gate": True, "rotary_dim": 8, "window": 6,
        "unwindowed_every": 2, "sinks": False,
    },
    "mla": {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 8, "latent_norm": True,
        "latent_norm_epsilon": 1e-6,
    },
    "dsa": {"indexer_heads": 2, "indexer_head_dim": 16, "top_k": 6},
    "moe": {
        "experts": 6, "top_k": 2, "expert_hidden_size": 24, "shared_expert_hidden_size": 16, "shared_expert_gate": False,
        "score_function": "sigmoid", "expert_bias": True, "pre_softmax": False, "routed_scaling": 1.5, "groups": 1,
        "chosen_groups": 1, "latent_size": 0, "router_dtype": "fp32",
    },
    "mlp": {},
    "mamba2": {"heads": 4, "head_dim": 16, "state_dim": 16, "groups": 2, "conv_width": 4},
    "gdn": {"key_heads": 2, "key_head_dim": 16, "value_heads": 4, "value_head_dim": 16, "conv_width": 4},
    "mamba3": {"heads": 4, "head_dim": 16, "state_dim": 16, "groups": 2, "mimo_rank": 2, "angles": 4},
    "m2rnn": {"k_dim": 16, "v_dim": 16, "heads": 3, "conv_width": 4},
}  # fmt: skip
MODEL = {
    "vocab_size": 96, "hidden_size": 64, "ffn_hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64,
    "learned_positions": 0, "normalization": "RMSNorm", "norm_epsilon": 1e-5, "zero_centered_norms": False, "linear_bias": False,
    "activation": "squared_relu", "glu_offset": 0.0, "activation_clamp": 0.0, "rotary_base": 10000,
}  # fmt: skip
# Kinds of layers, and what else of the config is not as above.
MODELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "author": (
        ["mla", "moe", "dsa", "m2rnn", "dsa", "mamba3"],
        {"mtp_kinds": ["mla", "mlp"], "mtp_depths": 1, "mhc": {"streams": 2, "sinkhorn_steps": 4, "epsilon": 1e-6},
         "ngrams": {"order": 3, "heads": 2, "buckets": 31, "width": 4, "document_end": 7}},
    ),
    "native": (["attention", "moe", "mamba2", "attention", "mlp"], {"tie_word_embeddings": True, "activation": "swiglu"}),
    "latent": (
        ["mla", "mlp", "mla", "moe", "gdn", "attention"],
        {"activation": "swiglu", "zero_centered_norms": True,
         "mla": SIZES["mla"] | {"q_lora_rank": 0, "latent_norm": False},
         "moe": SIZES["moe"] | {"groups": 3, "chosen_groups": 1, "latent_size": 24, "shared_expert_gate": True, "expert_bias": False},
         "yarn": {"factor": 4.0, "original_length": 16, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "rounded": True}},
    ),
    "learned": (
        ["attention", "mlp", "attention", "mamba2"],
        {"learned_positions": 64, "normalization": "LayerNorm", "linear_bias": True, "activation": "gelu",
         "attention": SIZES["attention"] | {"rotary_dim": 0, "qkv_bias": True, "output_gate": False, "qk_norm": False}},
    ),
}  # fmt: skip


def config(name: str) -> NamConfig:
    kinds, more = MODELS[name]
    used = {*kinds, *more.get("mtp_kinds", ())} | ({"mla"} if "dsa" in kinds else set())
    sources = [
        kinds.index("dsa") if kind == "dsa" and i != kinds.index("dsa") else None for i, kind in enumerate(kinds)
    ]
    sizes = {kind: SIZES[kind] for kind in used}
    return NamConfig(**{"layer_kinds": kinds, "index_sources": sources, **MODEL, **sizes, **more})


def write(name: str, out: Path) -> None:
    """The model of that name as a whole export, in several shards."""
    out.mkdir()
    made, generator = config(name).to_dict(), torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> torch.Tensor:
        value = torch.randn(tensor.shape, generator=generator)
        value *= 0.2 if len(tensor.shape) < 2 or "mimo" in tensor.name else 1.5 * tensor.shape[-1] ** -0.5
        if ("norm" in tensor.name and tensor.name.endswith("weight")) or "mimo" in tensor.name:
            value += 1 - made["zero_centered_norms"]
        return value.to(folder.DTYPES[tensor.dtype])

    files = folder.shards(describe.tensors(made), 60_000)
    hashes = {file: folder.write_shard(out / file, group, drawn) for file, group in files}
    folder.write_index(out, files)
    more = {"architectures": ["NamForCausalLM"], "auto_map": export.AUTO, "dtype": "bfloat16", "model_type": "nam"}
    tree = {k: v for k, v in made.items() if k in COMPUTES} | more
    (out / folder.CONFIG).write_text(json.dumps(tree))
    (out / "generation_config.json").write_text('{"use_cache": true}')
    for file in export.CODE:
        shutil.copyfile(export.MODEL / file, out / file)
    folder.write_manifest(out, hashes, step="iter_0000003", weights=folder.fingerprint(hashes), checkpoint="")
