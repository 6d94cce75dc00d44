"""Stage 5b, Lowering -> configs instead of words: the sections of Megatron-Bridge's ConfigContainer (torch side).

Megatron fills its configs by one rule: a field gets the argument of its name. So do we, from the same settings that become the
command line, over the defaults of Megatron's own parser; `SPELLED` holds the fields whose name or form is another. That is how
Megatron 0.19.2 spells them (training/argument_utils.py, training/training.py and validate_args of training/arguments.py), not a
second place of decisions: tests/nemo compares every field with what Megatron's parser makes of the argv.

A setting that ends in no field is refused by name. Bridge itself is imported only where its container is made.
"""

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import Problem
from nam_megatron.words.setting import Value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Arguments:
    """What Megatron's parser would hold after the argv of a lowering, and which fields were made of each argument."""

    def __init__(self, lowering: Lowering):
        self.lowering = lowering
        self.values = {flag.dest: flag.default for flag in lowering.target.flags.values()}
        self.values |= {s.name: s.value for s in lowering.settings}
        self.fields: dict[str, list[str]] = {name: [] for name in self.values}
        self.field = ""

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __call__(self, name: str) -> Any:
        """The value; whoever asks for an argument knows what it is."""
        if self.field not in self.fields[name]:
            self.fields[name].append(self.field)
        return self.values[name]

    def of(self, section: str, cls: type) -> dict[str, Any]:
        """Keyword arguments of a config class: each field by its rule in SPELLED, else by the argument of its name."""
        types = typing.get_type_hints(cls)
        found = {}
        for field in dataclasses.fields(cls):
            self.field = f"{section}.{field.name}"
            if rule := SPELLED.get(self.field):
                found[field.name] = rule(self)
            elif field.name in self and field.init:
                found[field.name] = _typed(self(field.name), types[field.name])
        return found

    def homeless(self, elsewhere: Mapping[str, tuple[Value, str]]) -> Iterator[Problem]:
        """Settings that ended in no field. elsewhere: those that need none, with the one value that holds there, and why."""
        for s in self.lowering.settings:
            if self.fields[s.name] or (s.name in elsewhere and s.value == elsewhere[s.name][0]):
                continue
            why = f": {elsewhere[s.name][1]}" if s.name in elsewhere else ""
            hint = "train it with `nam_megatron.train`" + (f", or change `{s.key}`" if s.key else "")
            message = f"Megatron-Bridge cannot be told {s.name}={s.value!r} of `{s.owner}`{why}"
            yield Problem(message, key=s.key, hint=hint)


def _typed(value: Value, kind: Any) -> Any:
    """An argument as its field holds it: words for dtypes and enums become these, lists stay lists."""
    kinds = (kind, *typing.get_args(kind))
    if isinstance(value, str):
        if torch.dtype in kinds and value in DTYPES:
            return DTYPES[value]
        for cls in kinds:
            if isinstance(cls, type) and issubclass(cls, enum.Enum):
                return cls[value]
    return list(value) if isinstance(value, tuple) else value


# Fields whose name or form is not their argument's -------------------------------------------------------------------


def _only(name: str) -> Callable[[Arguments], Value]:
    """An argument that is a list on the command line; one item stands for all layers."""

    def rule(a: Arguments) -> Value:
        value = a(name)
        return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value

    return rule


def _activation(a: Arguments) -> Callable:
    if a("squared_relu"):
        return squared_relu
    if a("quick_geglu"):
        return quick_gelu
    return torch.nn.functional.silu if a("swiglu") else torch.nn.functional.gelu


def _dtype(a: Arguments) -> torch.dtype:
    return torch.bfloat16 if a("bf16") else torch.float32


def _virtual(a: Arguments) -> int | None:
    segments = a("hybrid_layer_pattern").split("/")[0].count("|") + 1
    virtual = segments // a("pipeline_model_parallel_size")
    return virtual if virtual > 1 else None


TRANSFORMER: dict[str, Callable[[Arguments], Any]] = {
    "num_layers": lambda a: get_hybrid_total_layer_count(a("hybrid_layer_pattern")),
    "mtp_num_layers": lambda a: parse_hybrid_pattern(a("hybrid_layer_pattern")).mtp_num_depths or None,
    "is_hybrid_model": lambda a: True,
    "virtual_pipeline_model_parallel_size": _virtual,
    "overlap_p2p_comm": lambda a: a("overlap_p2p_comm") and _virtual(a) is not None,
    "batch_p2p_comm": lambda a: not (a("overlap_p2p_comm") and _virtual(a) is not None),
    "deallocate_pipeline_outputs": lambda a: True,
    "params_dtype": _dtype,
    "pipeline_dtype": _dtype,
    "activation_func": _activation,
    "gated_linear_unit": lambda a: a("swiglu") or a("quick_geglu"),
    "bias_activation_fusion": lambda a: a("bias_swiglu_fusion") if a("swiglu") else a("bias_gelu_fusion"),
    "num_query_groups": lambda a: (None, a("num_query_groups"))[a("group_query_attention")],  # None: of every head
    "window_size": lambda a: tuple(map(int, a("window_size").split(","))) if a("window_size") else None,
    # MLA's, for which Megatron's own parser has no flags.
    "original_max_position_embeddings": lambda a: a("yarn_original_max_position_embeddings") or 4096,
    "beta_fast": lambda a: a("yarn_beta_fast") or 32,
    "beta_slow": lambda a: a("yarn_beta_slow") or 1,
    "num_moe_experts": lambda a: a("num_experts"),
    "moe_router_load_balancing_type": _only("moe_router_load_balancing_type"),
    "moe_aux_loss_coeff": _only("moe_aux_loss_coeff"),
    "cp_comm_type": _only("cp_comm_type"),
    "persist_layer_norm": lambda a: not a("no_persist_layer_norm"),
    "fp8_param": lambda a: a("fp8_param_gather"),
    "cuda_graph_modules": lambda a: list(a("cuda_graph_modules") or ()),
    "inference_cuda_graph_scope": lambda a: a("inference_cuda_graph_scope") or "none",
    "inference_sampling_seed": lambda a: a("seed"),
    "tensor_parallel_num_weight_shards": lambda a: a("tensor_parallel_num_weight_shards")
    or a("tensor_model_parallel_size"),
    "expert_tensor_parallel_num_weight_shards": lambda a: a("expert_tensor_parallel_num_weight_shards")
    or a("expert_tensor_parallel_size"),
}
HYBRID: dict[str, Callable[[Arguments], Any]] = {
    "seq_length": lambda a: a("max_position_embeddings"),
    "seq_len_interpolation_factor": lambda a: a("rotary_seq_len_interpolation_factor"),
    "share_embeddings_and_output_weights": lambda a: not a("untie_embeddings_and_output_weights"),
    "vocab_size": lambda a: a("padded_vocab_size"),
    "should_pad_vocab": lambda a: a("padded_vocab_size") is None,
}
SPELLED: dict[str, Callable[[Arguments], Any]] = {
    **{f"transformer.{name}": rule for name, rule in TRANSFORMER.items()},
    **{f"model.{name}": rule for name, rule in (TRANSFORMER | HYBRID).items()},
    "optimizer.params_dtype": _dtype,
    "ddp.grad_reduce_in_fp32": lambda a: all([a("accumulate_allreduce_grads_in_fp32"), not a("grad_reduce_in_bf16")]),
    "ddp.check_for_nan_in_grad": lambda a: a("check_for_nan_in_loss_and_grad"),
    "ddp.num_buckets": lambda a: a("ddp_num_buckets"),
    "ddp.bucket_size": lambda a: a("ddp_bucket_size"),
    "ddp.pad_buckets_for_high_nccl_busbw": lambda a: a("ddp_pad_buckets_for_high_nccl_busbw"),
    "ddp.reduce_scatter_with_fp32_accumulation": lambda a: a("ddp_reduce_scatter_with_fp32_accumulation"),
    # A list: as a tuple it would come back from YAML as another value.
    "ddp.param_name_patterns_for_fp32_local_accumulation": lambda a: list(
        a("ddp_param_name_patterns_for_fp32_local_accumulation") or ()
    ),
    "ddp.average_in_collective": lambda a: a("ddp_average_in_collective"),
    "ddp.align_param_gather": lambda a: a("align_param_gather") and _virtual(a) is not None,
    "ddp.megatron_fsdp_cuda_graph_mode": lambda a: a("use_megatron_fsdp") and a("cuda_graph_impl") != "none",
    "ddp.megatron_fsdp_main_grads_dtype": lambda a: DTYPES.get(a("megatron_fsdp_main_grads_dtype")),  # None: auto
    "ddp.megatron_fsdp_grad_comm_dtype": lambda a: DTYPES.get(a("megatron_fsdp_grad_comm_dtype")),
    "checkpoint.stream_ckpt_dequant": lambda a: (
        a("stream_ckpt_dequant") and not (a("fp8") and a("fp8_recipe") == "tensorwise")
    ),
    "scheduler.start_weight_decay": lambda a: a("weight_decay"),
    "scheduler.end_weight_decay": lambda a: a("weight_decay"),
    "rerun_state_machine.check_for_nan_in_loss": lambda a: a("check_for_nan_in_loss_and_grad"),
    "profiling.use_nsys_profiler": lambda a: a("profile"),
}


# (a) Megatron's own config ---------------------------------------------------------------------------------------------


def transformer_class(lowering: Lowering) -> type[TransformerConfig]:
    """Latent attention has a config class of its own."""
    latent = lowering.by_name.get("multi_latent_attention")
    return MLATransformerConfig if latent and latent.value else TransformerConfig
