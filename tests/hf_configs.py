"""config.json of the public models that have presets, as far as it says the model.

Where each field is from stands in conf/model/ of its preset. No hub was within reach (2026-11-26): they are as others quote them, and
DeepSeek-V3.2's and Nemotron-H-56B's are not here.
"""

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip
QWEN3_NEXT = QWEN3_30B | {
    "model_type": "qwen3_next", "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "hidden_act": "silu", "initializer_range": 0.006, "tie_word_embeddings": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "aux_loss_alpha": 1e-4, "seq_aux": True, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "vocab_size": 102400, "initializer_range": 0.02, "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1, "scoring_func": "softmax", "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "aux_loss_alpha": 0.001,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "initializer_range": 0.02,
    "rope_theta": 50000.0, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827, "aux_loss_alpha": 0.001, "num_nextn_predict_layers": 0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
MOONLIGHT = DEEPSEEK_V3 | {
    "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 163840, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "initializer_range": 0.02,
    "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "aux_loss_alpha": 0.001,
    "num_nextn_predict_layers": 0, "rope_scaling": None,
}  # fmt: skip
GLM_4_7_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "vocab_size": 154880, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "rope_scaling": None, "partial_rotary_factor": 1.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_scaling": None, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_0_6B = QWEN3_8B | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
GLM_4_5_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "partial_rotary_factor": 0.5, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attention_head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "mlp_hidden_act": "relu2", "initializer_range": 0.02, "tie_word_embeddings": False, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
NEMOTRON_NANO_9B_V2 = NEMOTRON_H_8B | {
    "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56, "num_attention_heads": 40, "mamba_head_dim": 80,
    "max_position_embeddings": 131072, "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
}  # fmt: skip
NEMOTRON_3_NANO = NEMOTRON_H_8B | {
    "hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip
NEMOTRON_3_SUPER = NEMOTRON_3_NANO | {
    "hidden_size": 4096, "intermediate_size": 2688, "mamba_num_heads": 128, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "routed_scaling_factor": 5.0,
    "initializer_range": 0.014,
    "num_hidden_layers": 88,
    "hybrid_override_pattern":
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip
CONFIGS = {
    "llama_3_1_8b": LLAMA, "mixtral_8x7b": MIXTRAL, "qwen3_30b_a3b": QWEN3_30B, "qwen3_next_80b_a3b": QWEN3_NEXT,
    "deepseek_v3_yarn": DEEPSEEK_V3, "deepseek_v2_lite": DEEPSEEK_V2_LITE, "kimi_k2": KIMI_K2, "glm_4_5_air": GLM_4_5_AIR,
    "moonlight_16b_a3b": MOONLIGHT, "glm_4_7_flash": GLM_4_7_FLASH, "qwen3_8b": QWEN3_8B, "qwen3_0_6b": QWEN3_0_6B,
    "nemotron_nano_9b_v2": NEMOTRON_NANO_9B_V2, "nemotron_h_8b": NEMOTRON_H_8B, "nemotron_3_nano_30b_a3b": NEMOTRON_3_NANO,
    "nemotron_3_super_120b_a12b": NEMOTRON_3_SUPER,
}  # fmt: skip
