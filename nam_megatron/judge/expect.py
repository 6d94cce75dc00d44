"""What Megatron must hold of each computed setting, worked out from the recipe a second time: verify compares with this.

A key that goes to Megatron as it stands (Row.argument) is read from the recipe. A setting that names its fields with their values has said
what to expect. Every other setting that a key decides has its line here, under the argument's name; without one verify stops.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nam_megatron.compile.plan import Plan
from nam_megatron.recipe import Recipe, config_at, value_at
from nam_megatron.recipe.data import Part
from nam_megatron.words.setting import Setting


def _qkv_bias(p: Plan) -> bool:
    attention = p.recipe.blocks.attention
    return p.recipe.model.linear_bias or bool(attention and attention.qkv_bias)


def _positions(p: Plan) -> str:
    model, attention = p.recipe.model, p.recipe.blocks.attention
    if model.learned_positions is not None:
        return "learned_absolute"
    if attention is None:
        return "rope"
    return "yarn" if p.recipe.feature.yarn and attention.position_embedding == "rope" else attention.position_embedding


def _rotary_percent(p: Plan) -> float:
    attention = p.recipe.blocks.attention
    return attention.rotary_percent if attention else 1.0


def _mixed(parts: Sequence[Part] | None) -> list[str]:
    return [word for part in parts or () for word in (str(part.weight), part.path)]


def _data_path(p: Plan) -> list[str] | None:
    data = p.recipe.data
    if data.parts is not None:
        return None if data.valid_parts is not None else _mixed(data.parts)
    return [str(data.path)] if data.name in ("indexed", "sft") else None


def _split(name: str) -> Callable[[Plan], list[str] | None]:
    def path(p: Plan) -> list[str] | None:
        data = p.recipe.data
        if data.valid_parts is not None:
            return _mixed({"train": data.parts, "valid": data.valid_parts}[name])
        read = data.name == "built" and (name == "train" or p.recipe.schedule.eval_steps > 0)
        return [str(Path(str(data.path)) / name)] if read else None

    return path


def _tokenizer(p: Plan) -> str | None:
    data = p.recipe.data
    return str(Path(str(data.path)) / "tokenizer") if data.name == "built" else data.tokenizer


def _fused_rope(p: Plan) -> bool:
    """By Megatron 0.19.2: for GQA with plain RoPE alone; where no layer is attention the flag stands, and nothing reads it."""
    blocks = p.recipe.blocks
    if blocks.attention:
        return blocks.attention.position_embedding == "rope" and not p.recipe.feature.yarn
    return not blocks.mla and p.recipe.model.learned_positions is None


# Megatron's field -> what it must hold, whichever setting names it.
FIELDS: Mapping[str, Callable[[Plan], Any]] = {
    "transformer.apply_rope_fusion": _fused_rope,
    "transformer.cp_comm_type": lambda p: "all_gather" if any(block.gathers_keys for block in p.blocks) else "p2p",
}
# Argument -> what every field of its must hold.
EXPECTED: Mapping[str, Callable[[Plan], Any]] = {
    "max_position_embeddings": lambda p: p.recipe.model.learned_positions or p.recipe.model.seq_length,
    "add_qkv_bias": _qkv_bias,
    "quick_geglu": lambda p: p.recipe.model.activation == "quick_geglu",
    "position_embedding_type": _positions,
    "rotary_percent": _rotary_percent,
    "rope_type": lambda p: "yarn" if p.recipe.feature.yarn else "rope",
    "use_rope_scaling": lambda p: p.recipe.feature.llama_rope is not None,
    "cuda_graph_modules": lambda p: list(p.recipe.feature.cuda_graphs.modules) if p.recipe.feature.cuda_graphs else [],
    "te_rng_tracker": lambda p: p.recipe.feature.cuda_graphs is not None,
    "inference_cuda_graph_scope": lambda p: "layer",
    "fp8_recipe": lambda p: p.recipe.feature.fp8.recipe if p.recipe.feature.fp8 else None,
    "optimizer": lambda p: "muon" if p.recipe.feature.muon else "adam",
    "ckpt_format": lambda p: "fsdp_dtensor" if p.recipe.feature.megatron_fsdp else "torch_dist",
    "lr_decay_iters": lambda p: p.recipe.schedule.decay_steps,
    "manual_gc": lambda p: p.recipe.schedule.manual_gc_interval > 0,
    "pretrained_checkpoint": lambda p: p.recipe.schedule.pretrained,
    "bf16": lambda p: p.recipe.precision.params == "bf16",
    "cross_entropy_loss_fusion": lambda p: p.recipe.precision.cross_entropy == "compiled",
    "mock_data": lambda p: p.recipe.data.name == "mock",
    "data_path": _data_path,
    "train_data_path": _split("train"),
    "valid_data_path": _split("valid"),
    "tokenizer_type": lambda p: "NullTokenizer" if p.recipe.data.name == "mock" else "HuggingFaceTokenizer",
    "tokenizer_model": _tokenizer,
}
# Settings without a field of their own: the field, expected elsewhere, that is another where one of them is wrong.
SEEN_BY = {
    "group_query_attention": "transformer.num_query_groups",
    "dsa_indexer_topk_freq": "layers.*",
    "dsa_indexer_skip_topk_offset": "layers.*",
    "rotary_base": "*.rotary_base",
    "bias_gelu_fusion": "transformer.bias_activation_fusion",
    "bias_swiglu_fusion": "transformer.bias_activation_fusion",
    "grad_reduce_in_bf16": "ddp.grad_reduce_in_fp32",
}


def worked_out(plan: Plan) -> dict[str, Any]:
    """What every field of an argument must hold, here and as the kinds say it."""
    found = {name: work_out(plan) for name, work_out in EXPECTED.items()}
    for block in plan.blocks:
        found |= block.expects(plan.site)
    return found


def expected(s: Setting, plan: Plan, found: Mapping[str, Any]) -> Any:
    """What Megatron must hold where `s` is said: of a pin the pin itself, of anything that a key decides what the recipe says of it.

    found: what is worked out of the plan.
    """
    if s.name in found:
        return found[s.name]
    if s.key is None:
        return s.value
    assert as_it_stands(s, plan.recipe), (
        f"{s.owner} computes {s.name} from {s.key}, and nothing says what to expect of it"
    )
    return value_at(plan.recipe, s.key)


def compared(s: Setting) -> bool:
    """Whether a setting that names no field has another's that shows it."""
    return s.key is None or s.name in SEEN_BY


def as_it_stands(s: Setting, recipe: Recipe) -> bool:
    """Whether the key goes to Megatron as it is."""
    *parents, last = (s.key or "").split(".")
    config = config_at(parents)
    return config is not None and last in config.model_fields and config.row(last).argument == s.name
