"""Flags that Megatron refuses beside others: one rule, a line for each."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.rule import CONFIG, FAIL, VALIDATE, Rule
from nam_megatron.lint.values import Args

Beside = Mapping[str, Callable[[Args, Model], bool]]


def _depths(m: Model) -> int:
    return m.mtp_depths or m.a.mtp_num_layers or 0


def _p2p(a: Args, m: Model) -> bool:
    return m.pp == 2 and not a.overlap_p2p_comm


# An argument -> what must not stand beside it, in the words of a launch, and when it does. The source is Megatron's own check.
CONFLICTS: Mapping[str, Beside] = {
    "overlap_moe_expert_parallel_comm": {
        "--recompute-granularity full": lambda a, m: m.recompute == "full",
        "--recompute-method": lambda a, m: a.recompute_method is not None,
        "--recompute-num-layers": lambda a, m: a.recompute_num_layers is not None,
        "--recompute-modules moe": lambda a, m: "moe" in (a.recompute_modules or ()),
        "--moe-shared-expert-overlap": lambda a, m: a.moe_shared_expert_overlap,
        "--moe-token-dispatcher-type allgather, the default": lambda a, m: a.moe_token_dispatcher_type == "allgather",
        "more than one MTP depth": lambda a, m: _depths(m) > 1,
        "fp32": lambda a, m: not (a.bf16 or a.fp16),
        "graphs of `moe` or `mlp`": lambda a, m: m.graphs == "transformer_engine" and bool({"moe", "mlp"} & {*m.graph_modules}),
    },
    "overlap_dispatch_backward_with_experts_wgrad": {
        "--overlap-moe-expert-parallel-comm": lambda a, m: a.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": lambda a, m: a.delay_wgrad_compute,
    },
    "use_precision_aware_optimizer": {"an optimizer other than adam": lambda a, m: a.optimizer != "adam"},
    "finetune": {"--override-ckpt-iteration": lambda a, m: a.override_ckpt_iteration is not None},
    "override_opt_param_scheduler": {"--use-checkpoint-opt_param-scheduler": lambda a, m: a.use_checkpoint_opt_param_scheduler},
    "moe_router_padding_for_quantization": {
        "--moe-token-dispatcher-type allgather, the default": lambda a, m: a.moe_token_dispatcher_type == "allgather",
    },
    "moe_single_grouped_weight": {"--use-megatron-fsdp": lambda a, m: a.use_megatron_fsdp},
    "moe_single_grouped_bias": {"--use-megatron-fsdp": lambda a, m: a.use_megatron_fsdp},
    "fp4": {"--fp4-recipe custom without --fp4-quantizer-factory": lambda a, m: a.fp4_recipe == "custom" and not a.fp4_quantizer_factory},
    "fp8": {"--fp8-recipe custom without --fp8-quantizer-factory": lambda a, m: a.fp8_recipe == "custom" and not a.fp8_quantizer_factory},
    "init_model_with_meta_device": {
        "--use-megatron-fsdp that shards nothing": lambda a, m: a.use_megatron_fsdp and a.data_parallel_sharding_strategy == "no_shard"
    },
    "check_weight_hash_across_dp_replicas_interval": {
        "--data-parallel-sharding-strategy optim_grads_params": lambda a, m: a.use_megatron_fsdp
        and a.data_parallel_sharding_strategy == "optim_grads_params"
    },
    "moe_expert_capacity_factor": {"--moe-router-load-balancing-type sinkhorn": lambda a, m: "sinkhorn" in m.balancing},
    "num_layers_per_virtual_pipeline_stage": {"--no-overlap-p2p-communication on two pipeline stages": _p2p},
    "num_virtual_stages_per_pipeline_rank": {"--no-overlap-p2p-communication on two pipeline stages": _p2p},
    "pipeline_model_parallel_layout": {
        "a --pipeline-model-parallel-size that does not divide its stages": lambda a, m: known(
            lambda: (m.unrolled_stages.count("|") + 1) % m.pp > 0, False
        ),
    },
    "moe_enable_deepep": {
        "--moe-flex-dispatcher-backend hybridep": lambda a, m: a.moe_token_dispatcher_type == "flex"
        and a.moe_flex_dispatcher_backend == "hybridep"
    },
    "moe_deepep_num_sms": {
        "another --moe-hybridep-num-sms": lambda a, m: a.moe_hybridep_num_sms not in (None, a.moe_deepep_num_sms)
        and a.moe_flex_dispatcher_num_sms is None
    },
    "qk_clip": {"--qk-clip-alpha that is not between 0 and 1": lambda a, m: not 0 < a.qk_clip_alpha < 1},
    "save_retain_interval": {
        "a --save-interval that does not divide it": lambda a, m: bool(a.said("save") and a.save_interval)
        and bool(a.save_retain_interval % a.save_interval)
    },
    "step_batch_size_schedule": {"--global-batch-size": lambda a, m: a.said("global_batch_size")},
    "hybrid_context_parallel": {"--use-megatron-fsdp": lambda a, m: a.use_megatron_fsdp},
    "flash_decode": {"--no-rope-freq": lambda a, m: bool(a.no_rope_freq)},
    "fake_process_group": {"--moe-token-dispatcher-type flex": lambda a, m: a.moe_token_dispatcher_type == "flex"},
    "encoder_num_layers": {"--num-layers": lambda a, m: a.num_layers is not None},
    "inference_fuse_tp_communication": {"a hybrid pattern": lambda a, m: m.hybrid},
}  # fmt: skip


def _refused(a: Args, m: Model) -> Iterator[str]:
    for name, others in CONFLICTS.items():
        if a.sure(name) and a.value(name):
            both = (what for what, stands in others.items() if known(partial(stands, a, m), False))
            yield from (f"{a.written(name)}\tbeside {what}" for what in both)


RULES = (Rule("conflict", FAIL, "", _refused, "Megatron refuses the two of them", "keep one", f"{VALIDATE}, {CONFIG}"),)
