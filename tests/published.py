"""Tiny models of public families, made and saved by transformers itself with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.lint import lint, recipe
from nam_megatron.recipe import from_tree, to_tree

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_hidden_layers": 3, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4,
    "head_dim": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# transformers' class of DeepSeek-V2 leaves `mscale_all_dim` out of its softmax, which the model's own code has.
PLAIN_YARN = {key: value for key, value in YARN.items() if not key.startswith("mscale")} | {
    "original_max_position_embeddings": 4096
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
HYBRID = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "chunk_size": 8, "layer_norm_epsilon": 1e-5, "expand": 1,
    "time_step_min": 1e-30,  # below which transformers' path without kernels cuts steps, though `time_step_limit` is what the model says

}  # fmt: skip
# name -> (class of transformers, its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_3": ("Llama", {"rope_theta": 500000.0}),
    "llama_3_1": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_next": (
        "Qwen3Next",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4, "norm_topk_prob": True},
    ),
    "deepseek_v2": ("DeepseekV2", {**SHARED, **LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": PLAIN_YARN}),
    "deepseek_v3": ("DeepseekV3", {**SHARED, **LATENT, "n_group": 2, "n_routed_experts": 8, "rope_parameters": YARN}),
    "moonlight": ("DeepseekV3", {**SHARED, **LATENT, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446}),
    "glm_4_7_flash": ("Glm4MoeLite", {**SHARED, **LATENT, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "deepseek_v32": ("DeepseekV32", {**SHARED, **LATENT, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "num_experts": 4}),
    "glm4_moe": ("Glm4Moe", {**SHARED, "attention_bias": True, "use_qk_norm": True}),
    "nemotron_h": ("NemotronH", {**HYBRID, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    # transformers' path without kernels is 1e-4 off behind a chunk's end, where two Mamba layers follow one another: no end stands here.
    "nemotron_nano_v2": (
        "NemotronH",
        {**HYBRID, "layers_block_type": ["mamba", "mamba", "mlp", "attention"], "mamba_head_dim": 20, "chunk_size": 16},
    ),
    "nemotron_3_nano": ("NemotronH", HYBRID),
    "nemotron_3_super": ("NemotronH", {**HYBRID, "moe_latent_size": 24}),
}  # fmt: skip


def write(name: str, to: Path, **more: Any) -> Any:
    """The model in bf16, saved to a folder in several shards."""
    kind, keys = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**BASE | keys | more)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for at, tensor in model.state_dict().items():  # so that nothing stands where it began
            if tensor.is_floating_point():
                far = 0.1 if "norm" in at or "bias" in at else 0.03
                tensor.add_(torch.randn_like(tensor) * far)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(to, max_shard_size="40KB")
    return model


def lowering(folder: Path, **changes: Any) -> Lowering:
    """The recipe of a folder's config.json, on one GPU. changes: by dotted key, with `__` for the dot."""
    path = folder / "config.json"
    made = recipe.make(lint(path.read_text(), str(path)), Path("published.yaml"))
    tree = to_tree(made.recipe)
    tree["cluster"] |= {"nodes": 1, "gpus_per_node": 1}
    tree["data"]["workers"] = 0
    if dsa := tree["model"]["blocks"].get("dsa"):
        dsa["indexer_loss_coeff"] = 0.001  # training's, which no config says
    for key, value in changes.items():
        *parents, last = key.split("__")
        at = tree
        for parent in parents:
            at = at[parent]
        at[last] = value
    return translate(from_tree(tree))


def keys(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
