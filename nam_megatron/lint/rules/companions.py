"""Flags that Megatron refuses without another one: one rule, a line for each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.rule import CONFIG, FAIL, FRAGILE, VALIDATE, Rule, listed
from nam_megatron.lint.values import Args


@dataclass(frozen=True)
class Companion:
    """An argument, how a launch gives it, what it wants beside it, and whether that is so. The source is Megatron's own check."""

    name: str
    given: str
    wants: str
    met: Callable[[Args, Model], bool]


def _precise(a: Args, m: Model) -> bool:
    return a.use_precision_aware_optimizer


def _overlaps(a: Args, m: Model) -> bool:
    return a.overlap_moe_expert_parallel_comm


def _virtual(a: Args, m: Model) -> bool:
    stages = (a.num_layers_per_virtual_pipeline_stage, a.num_virtual_stages_per_pipeline_rank)
    return m.pp > 1 and (
        bool(a.pipeline_model_parallel_layout) or any(s is not None for s in stages) or len(m.segments) > m.pp
    )


def _ramp(a: Args, m: Model) -> bool:
    return a.weight_decay_incr_style != "constant"


COMPANIONS = (
    Companion("tp_comm_overlap", "", "--sequence-parallel", lambda a, m: m.sequence_parallel),
    Companion("overlap_moe_expert_parallel_comm", "", "--expert-model-parallel-size above 1, virtual stages where the pipeline has stages",
              lambda a, m: m.ep > 1 and (m.pp == 1 or _virtual(a, m))),
    Companion("delay_wgrad_compute", "", "--overlap-moe-expert-parallel-comm", _overlaps),
    Companion("ep_overlap_early_attn_memory_release", "", "--overlap-moe-expert-parallel-comm", _overlaps),
    Companion("overlap_param_gather_with_optimizer_step", "", "virtual pipeline stages, --overlap-param-gather", _virtual),
    Companion("overlap_p2p_comm_warmup_flush", "", "virtual pipeline stages", _virtual),
    Companion("num_layers_per_virtual_pipeline_stage", "2", "--pipeline-model-parallel-size above 1", lambda a, m: m.pp > 1),
    Companion("num_virtual_stages_per_pipeline_rank", "2", "--pipeline-model-parallel-size above 1", lambda a, m: m.pp > 1),
    Companion("defer_embedding_wgrad_compute", "", "--pipeline-model-parallel-size above 1 and fused gradient accumulation",
              lambda a, m: m.pp > 1 and a.gradient_accumulation_fusion),
    Companion("hierarchical_context_parallel_sizes", "2 2", "sizes whose product is --context-parallel-size",
              lambda a, m: prod(a.hierarchical_context_parallel_sizes) == m.cp),
    Companion("hybrid_context_parallel", "", "--calculate-per-token-loss", lambda a, m: a.calculate_per_token_loss),
    Companion("distribute_saved_activations", "", "--tensor-model-parallel-size above 1 and full recompute",
              lambda a, m: m.tp > 1 and m.recompute == "full"),
    Companion("use_precision_aware_optimizer", "", "--use-distributed-optimizer", lambda a, m: a.use_distributed_optimizer or m.fsdp),
    Companion("optimizer_cpu_offload", "", "--use-precision-aware-optimizer", _precise),
    Companion("main_grads_dtype", "bf16", "--use-precision-aware-optimizer", lambda a, m: a.main_grads_dtype == "fp32" or _precise(a, m)),
    Companion("main_params_dtype", "fp16", "--use-precision-aware-optimizer", lambda a, m: a.main_params_dtype == "fp32" or _precise(a, m)),
    Companion("exp_avg_dtype", "bf16", "--use-precision-aware-optimizer", lambda a, m: a.exp_avg_dtype == "fp32" or _precise(a, m)),
    Companion("exp_avg_sq_dtype", "bf16", "--use-precision-aware-optimizer", lambda a, m: a.exp_avg_sq_dtype == "fp32" or _precise(a, m)),
    Companion("start_weight_decay", "0.01", "--weight-decay-incr-style linear or cosine", _ramp),
    Companion("end_weight_decay", "0.1", "--weight-decay-incr-style linear or cosine", _ramp),
    Companion("weight_decay_incr_style", "linear", "--start-weight-decay and --end-weight-decay",
              lambda a, m: not _ramp(a, m) or None not in (a.start_weight_decay, a.end_weight_decay)),
    Companion("fp16_lm_cross_entropy", "", "--fp16", lambda a, m: a.fp16),
    Companion("fp4_param_gather", "", "--fp4-format", lambda a, m: bool(a.fp4)),
    Companion("fp8_output_proj", "", "--fp8-format with --fp8-recipe mxfp8", lambda a, m: bool(a.fp8) and a.fp8_recipe == "mxfp8"),
    Companion("reuse_grad_buf_for_mxfp8_param_ag", "", "--fp8-recipe mxfp8 with --fp8-param-gather",
              lambda a, m: a.use_megatron_fsdp or (bool(a.fp8) and a.fp8_recipe == "mxfp8" and a.fp8_param_gather)),
    Companion("moe_router_padding_for_quantization", "", "--fp8-format or --fp4-format", lambda a, m: bool(a.fp8 or a.fp4)),
    Companion("moe_router_padding_for_fp8", "", "--fp8-format or --fp4-format", lambda a, m: bool(a.fp8 or a.fp4)),
    Companion("moe_single_grouped_weight", "", "--moe-grouped-gemm and --use-transformer-engine-op-fuser",
              lambda a, m: a.moe_grouped_gemm and a.use_transformer_engine_op_fuser),
    Companion("moe_enable_deepep", "", "--moe-token-dispatcher-type flex", lambda a, m: a.moe_token_dispatcher_type == "flex"),
    Companion("moe_flex_dispatcher_backend", "ncclep", "--moe-token-dispatcher-type flex",
              lambda a, m: a.moe_flex_dispatcher_backend != "ncclep" or a.moe_token_dispatcher_type == "flex"),
    Companion("moe_paged_stash", "", "--moe-expert-rank-capacity-factor", lambda a, m: a.moe_expert_rank_capacity_factor is not None),
    Companion("moe_expert_rank_capacity_factor", "1.5",
              "--moe-flex-dispatcher-backend ncclep, or hybridep with --use-transformer-engine-op-fuser",
              lambda a, m: a.moe_flex_dispatcher_backend == "ncclep"
              or (a.moe_flex_dispatcher_backend == "hybridep" and a.use_transformer_engine_op_fuser)),
    Companion("moe_single_grouped_bias", "", "--moe-grouped-gemm and linear bias", lambda a, m: a.moe_grouped_gemm and a.add_bias_linear),
    Companion("moe_latent_size", "64", "--num-experts", lambda a, m: bool(a.num_experts)),
    Companion("mla_down_proj_fusion", "", "MLA", lambda a, m: m.mla),
    Companion("experimental_attention_variant", "gated_delta_net", "--linear-attention-freq",
              lambda a, m: m.variant != "gated_delta_net" or a.linear_attention_freq is not None),
    Companion("glu_linear_offset", "1.0", "--quick-geglu, or no fused SwiGLU",
              lambda a, m: not a.glu_linear_offset or a.quick_geglu or not (a.swiglu and a.bias_swiglu_fusion)),
    Companion("use_te_activation_func", "", "an activation of TE's, and no fusion of it with the bias",
              lambda a, m: not (a.squared_relu or a.quick_geglu or (a.swiglu and a.bias_swiglu_fusion)
                                or (m.activation == "GELU" and a.bias_gelu_fusion and a.add_bias_linear))),
    Companion("init_method_xavier_uniform", "", "another Megatron: 0.19.2 hands it to its config under a name that is not there",
              lambda a, m: not a.init_method_xavier_uniform),
    Companion("fsdp_manual_registration", "", "--use-megatron-fsdp and --use-nccl-ub", lambda a, m: a.use_megatron_fsdp and a.nccl_ub),
    Companion("position_embedding_type", "mrope", "--mrope-section",
              lambda a, m: a.position_embedding_type != "mrope" or bool(a.mrope_section)),
    Companion("fim_data", "", "real data, not --mock-data", lambda a, m: not a.mock_data),
    Companion("inference_fuse_tp_communication", "", "--transformer-impl inference_optimized",
              lambda a, m: a.transformer_impl == "inference_optimized"),
    Companion("inference_disable_triton_nvls_kernels", "", "--transformer-impl inference_optimized",
              lambda a, m: a.transformer_impl == "inference_optimized"),
    Companion("load_main_params_from_ckpt", "", "--no-load-optim", lambda a, m: bool(a.no_load_optim)),
    Companion("replication", "", "--replication-jump and --non-persistent-ckpt-type local",
              lambda a, m: a.replication_jump is not None and a.non_persistent_ckpt_type == "local"),
    Companion("batch_invariant_mode", "", "--attention-backend flash, --flash-attention-version 3 or 4",
              lambda a, m: a.attention_backend == "flash" and a.flash_attention_version in (3, 4)),
    Companion("cp_comm_type", "a2a+p2p", "--hierarchical-context-parallel-sizes",
              lambda a, m: "a2a+p2p" not in listed(a.cp_comm_type) or bool(a.hierarchical_context_parallel_sizes)),
    Companion("fine_grained_activation_offloading", "", "NVTE_CPU_OFFLOAD_V1=1 in the environment, and --offload-modules",
              lambda a, m: a.launch.env.get("NVTE_CPU_OFFLOAD_V1") == "1"),
    Companion("ckpt_convert_format", "torch_dist", "--ckpt-convert-save and --load",
              lambda a, m: None not in (a.ckpt_convert_save, a.load)),
    Companion("attention_backend", "local", "--spec local",
              lambda a, m: a.attention_backend != "local" or listed(a.spec)[0] == "local"),
    Companion("log_memory_interval", "3", "a multiple of --log-interval",
              lambda a, m: a.log_interval > 0 and a.log_memory_interval % a.log_interval == 0),
)  # fmt: skip

# What has no effect without another one, and is not refused.
IDLE = (
    Companion("qk_clip_threshold", "50", "--qk-clip", lambda a, m: a.qk_clip),
    Companion("window_attn_skip_freq", "4", "--window-size", lambda a, m: a.window_size is not None),
    Companion("moe_router_bias_update_rate", "0.1", "--moe-router-enable-expert-bias", lambda a, m: a.moe_router_enable_expert_bias),
    Companion("moe_aux_loss_coeff", "0.1", "a --moe-router-load-balancing-type with a loss",
              lambda a, m: any("loss" in b for b in m.balancing)),
    Companion("moe_token_drop_policy", "position", "--moe-expert-capacity-factor", lambda a, m: a.moe_expert_capacity_factor is not None),
    Companion("moe_shared_expert_gate", "", "--moe-shared-expert-intermediate-size",
              lambda a, m: bool(a.moe_shared_expert_intermediate_size)),
    Companion("sgd_momentum", "0.5", "--optimizer sgd", lambda a, m: a.optimizer == "sgd"),
    *(Companion(name, "0.5", "--optimizer muon", lambda a, m: "muon" in a.optimizer)
      for name in ("muon_momentum", "muon_extra_scale_factor", "muon_num_ns_steps", "muon_scale_mode")),
    *(Companion(name, "10", "--lr-decay-style WSD", lambda a, m: a.lr_decay_style == "WSD")
      for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")),
    Companion("moe_router_num_groups", "4", "--moe-router-group-topk", lambda a, m: bool(a.moe_router_group_topk)),
    Companion("moe_shared_expert_overlap", "", "--moe-shared-expert-intermediate-size",
              lambda a, m: bool(a.moe_shared_expert_intermediate_size)),
    Companion("cp_comm_type", "a2a", "--context-parallel-size above 1", lambda a, m: m.cp > 1),
    Companion("manual_gc_interval", "100", "--manual-gc", lambda a, m: a.manual_gc),
    Companion("async_save", "", "--use-persistent-ckpt-worker", lambda a, m: a.use_persistent_ckpt_worker),
    Companion("accumulate_allreduce_grads_in_fp32", "", "no --grad-reduce-in-bf16, which switches it off",
              lambda a, m: not (a.bf16 and a.grad_reduce_in_bf16)),
    Companion("rope_scaling_factor", "4", "--use-rope-scaling", lambda a, m: a.use_rope_scaling),
    *(Companion(name, value, "MLA, or --position-embedding-type yarn", lambda a, m: m.mla or m.positions == "yarn" or m.gpt_oss)
      for name, value in (("rotary_scaling_factor", "4"), ("mscale", "0.7"), ("mscale_all_dim", "0.7"))),
    *(Companion(name, value, "--fp8-recipe delayed", lambda a, m: not a.fp8 or a.fp8_recipe == "delayed")
      for name, value in (("fp8_amax_history_len", "1024"), ("fp8_amax_compute_algo", "max"), ("fp8_margin", "1"))),
    *(Companion(name, value, "an optimizer of Adam's kind", lambda a, m: a.optimizer != "sgd")
      for name, value in (("adam_beta1", "0.8"), ("adam_beta2", "0.95"), ("adam_eps", "1e-6"))),
    Companion("mtp_loss_scaling_factor", "0.3", "MTP", lambda a, m: bool(m.mtp_depths or a.mtp_num_layers)),
)  # fmt: skip


def _off(a: Args, name: str) -> bool:
    """Whether a flag's value asks for nothing: its default, unless that is a strength, which a person says who wants it."""
    value, strength = a.value(name), isinstance(a.value(name), float) and a.value(name) not in (0, 1)
    return value is False or (value == a.target.by_dest[name].default and not (strength and a.launch.kind == "shell"))


def _idle(a: Args, m: Model) -> Iterator[str]:
    for c in IDLE if a.launch.kind != "container" else ():  # Bridge writes every field, in use or not
        wanted = a.said(c.name) and not _off(a, c.name)
        if wanted and not known(partial(c.met, a, m), True):
            yield f"{a.written(c.name)}\twants {c.wants}"


def _alone(a: Args, m: Model) -> Iterator[str]:
    for c in COMPANIONS:
        if a.said(c.name) and not known(partial(c.met, a, m), True):
            yield f"{a.written(c.name)}\twants {c.wants}"


RULES = (
    Rule(
        "idle-flag",
        FRAGILE,
        "",
        _idle,
        "no effect without what it stands on",
        "give what it wants, or leave it out",
        CONFIG,
    ),
    Rule(
        "companion",
        FAIL,
        "",
        _alone,
        "refused without what it stands on",
        "give what it wants, or leave it out",
        f"{VALIDATE}, {CONFIG}",
    ),
)
