"""Stage 6: what Megatron builds, compared with what the recipe says. python -m nam_megatron.verify conf=nam56r_native_dp

The expectations below are written from the recipe, not from lower.py's settings: a wrong setting must disagree with
them. Megatron's side is what its own parser, validation and configs make of the argv (mcore/oracle.py).
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nam_megatron import app, argv
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, Problem, Refused, counted
from nam_megatron.lower import Lowering, translate
from nam_megatron.mcore import v0_19
from nam_megatron.mcore.oracle import Answer, Oracle
from nam_megatron.plan import Plan, Seam
from nam_megatron.recipe import Recipe

VERIFIED, MISMATCH, UNFINISHED = "verified", "mismatch", "incomplete"
REVIEWED = Path(__file__).parent / "mcore" / "reviewed" / "v0_19.yaml"
DEFAULT = object()  # stands for Megatron's default in the reviewed list
CONFIGS = ("transformer", "model", "optimizer", "ddp", "train", "scheduler", "rerun_state_machine", "rng", "validation")


@dataclass(frozen=True, slots=True)
class Row:
    """One field: what the recipe (or a pin, or a reviewed default) says, and what Megatron has."""

    field: str  # config.field in Megatron
    expected: Any
    actual: Any
    key: str | None  # recipe key; None: pinned or reviewed
    source: str  # recipe | pinned | reviewed

    @property
    def agrees(self) -> bool:
        return _same(self.expected, self.actual)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one plan. refused: Megatron's own error, if it does not take the argv at all."""

    rows: tuple[Row, ...]
    refused: str | None
    unknown: tuple[str, ...]  # fields nobody has looked at
    not_built: tuple[Seam, ...]

    @property
    def mismatches(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if not r.agrees)

    @property
    def word(self) -> str:
        if self.refused or self.mismatches or self.unknown:
            return MISMATCH
        return UNFINISHED if self.not_built else VERIFIED

    @property
    def code(self) -> int:
        return {VERIFIED: OK, MISMATCH: FINDINGS, UNFINISHED: INCOMPLETE}[self.word]


def verify(lowering: Lowering, oracle: Oracle, words: Sequence[str] | None = None) -> Verdict:
    """Compare what Megatron makes of `words` (the plan's own argv unless given) with the plan's recipe."""
    p = lowering.plan
    words = argv.argv(lowering) if words is None else words
    env = {e.name: e.value for e in lowering.env}
    answer = oracle.ask(words, p.recipe.world_size, p.recipe.device.capability, env)
    if answer.error:
        return Verdict((), answer.error, (), p.not_built)
    if p.recipe.feature.fsdp2.on:  # torch's FSDP has a config of its own: nothing of DDP's is read but this
        kept = {f: v for f, v in answer.values.items() if not f.startswith("ddp.") or f == "ddp.reshard_after_forward"}
        answer = replace(answer, values=kept)
    rows = {r.field: r for r in _recipe_rows(p, answer)}
    for row in _pinned_rows(lowering, answer):
        rows.setdefault(row.field, row)
    reviewed, derived = reviewed_fields()
    for field, value in reviewed.items():
        if field in answer.values and field not in rows:
            expected = _default(field, answer) if value is DEFAULT else value
            rows[field] = Row(field, expected, answer.values[field], None, "reviewed")
    unknown = [f for f in answer.values if f.split(".")[0] in CONFIGS and f not in rows and f not in derived]
    return Verdict(tuple(rows.values()), None, tuple(unknown), p.not_built)


@cache
def reviewed_fields() -> tuple[Mapping[str, Any], frozenset[str]]:
    """(field -> demanded value or DEFAULT, fields Megatron derives) of the reviewed list."""
    groups = yaml.safe_load(REVIEWED.read_text(encoding="utf-8"))
    demanded: dict[str, Any] = {}
    for group in groups:
        if group["class"] != "derived":
            for field in group["fields"]:
                demanded |= field if isinstance(field, dict) else {field: DEFAULT}
    return demanded, frozenset(f for g in groups if g["class"] == "derived" for f in g["fields"])


def _default(field: str, answer: Answer) -> Any:
    """What Megatron has when nobody speaks: its parser's default, or the config's where there is no flag."""
    if flag := v0_19.by_dest().get(field.split(".")[1]):
        value = flag.default
        return value[0] if isinstance(value, list) and len(value) == 1 else value  # Megatron unwraps lists of one
    return answer.defaults.get(field)


# What the recipe says, field by field ---------------------------------------------------------------------------------


def expectations(p: Plan) -> Iterator[tuple[str, Any, str]]:
    """(Megatron's field, value, recipe key). The only place that says where Megatron uses a key."""
    r, m = p.recipe, p.recipe.model
    for layer in p.layers:
        source = (layer.source or layer.number) if layer.kind == "dsa" else None
        yield f"layers.{layer.number}", (KINDS[layer.kind].symbol, layer.segment, source), "model.pattern"
    yield "layers.mtp", ("".join(KINDS[k].symbol for k in p.mtp),) * r.feature.mtp.depths, "feature.mtp.depths"
    yield "transformer.mtp_num_layers", r.feature.mtp.depths or None, "feature.mtp.depths"
    if r.feature.mtp.depths:
        yield "transformer.mtp_loss_scaling_factor", r.feature.mtp.loss_weight, "feature.mtp.loss_weight"

    for key, field in MODEL.items():
        yield field, getattr(m, key), f"model.{key}"
    yield "model.should_pad_vocab", False, "model.vocab_size"
    yield "model.share_embeddings_and_output_weights", m.tied_embeddings, "model.tied_embeddings"
    functions = {"squared_relu": "megatron.core.activations.squared_relu", "swiglu": "torch.nn.functional.silu"}
    yield "transformer.activation_func", functions.get(m.activation, "torch._C._nn.gelu"), "model.activation"
    yield "transformer.gated_linear_unit", m.activation == "swiglu", "model.activation"
    yield "transformer.bias_activation_fusion", m.activation == "swiglu", "model.activation"
    yield "transformer.embedding_init_method_std", m.init_std, "model.init_std"
    yield "transformer.add_qkv_bias", m.linear_bias, "model.linear_bias"
    yield from _attention(p)
    if "moe" in p.kinds:
        yield from _moe(r)
    else:
        yield "transformer.num_moe_experts", None, "model.letters.E"
    if "mamba2" in p.kinds:
        for key in ("heads", "head_dim", "state_dim", "groups"):
            name = f"num_{key}" if key in ("heads", "groups") else key
            yield f"transformer.mamba_{name}", getattr(m.blocks.mamba2, key), f"model.blocks.mamba2.{key}"

    for key, field in PARALLEL.items():
        yield field, getattr(r.parallel, key), f"parallel.{key}"
    yield "args.data_parallel_size", r.data_parallel, "cluster.gpus_per_node"
    yield "transformer.bf16", r.precision.params == "bf16", "precision.params"
    yield "optimizer.bf16", r.precision.params == "bf16", "precision.params"
    if not r.feature.fsdp2.on:
        yield "ddp.grad_reduce_in_fp32", r.precision.grad_reduce == "fp32", "precision.grad_reduce"
    compiled = r.precision.cross_entropy == "compiled"
    yield "transformer.cross_entropy_loss_fusion", compiled, "precision.cross_entropy"
    fused = r.precision.fused_grad_accumulation
    yield "transformer.gradient_accumulation_fusion", fused, "precision.fused_grad_accumulation"
    for key, field in OPTIM.items():
        yield field, getattr(r.optim, key), f"optim.{key}"
    for key, field in SCHEDULE.items():
        yield field, getattr(r.schedule, key), f"schedule.{key}"
    yield "train.manual_gc", r.schedule.manual_gc_interval > 0, "schedule.manual_gc_interval"
    yield from _features(p)
    yield from _data(r)


MODEL = {
    "hidden_size": "transformer.hidden_size",
    "ffn_hidden_size": "transformer.ffn_hidden_size",
    "num_attention_heads": "transformer.num_attention_heads",
    "vocab_size": "model.vocab_size",
    "seq_length": "model.seq_length",
    "normalization": "transformer.normalization",
    "norm_epsilon": "transformer.layernorm_epsilon",
    "linear_bias": "transformer.add_bias_linear",
    "hidden_dropout": "transformer.hidden_dropout",
    "attention_dropout": "transformer.attention_dropout",
    "init_std": "transformer.init_method_std",
}
PARALLEL = {
    "tensor": "transformer.tensor_model_parallel_size",
    "sequence": "transformer.sequence_parallel",
    "pipeline": "transformer.pipeline_model_parallel_size",
    "context": "transformer.context_parallel_size",
    "expert": "transformer.expert_model_parallel_size",
    "expert_tensor": "transformer.expert_tensor_parallel_size",
}
OPTIM = {
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "decay": "scheduler.lr_decay_style",
    "warmup_steps": "scheduler.lr_warmup_iters",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.adam_beta1",
    "beta2": "optimizer.adam_beta2",
    "eps": "optimizer.adam_eps",
    "clip_grad": "optimizer.clip_grad",
}
SCHEDULE = {
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "train_steps": "train.train_iters",
    "decay_steps": "scheduler.lr_decay_iters",
    "seed": "rng.seed",
    "eval_steps": "validation.eval_iters",
    "eval_interval": "validation.eval_interval",
    "log_interval": "logger.log_interval",
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    "save_interval": "checkpoint.save_interval",
    "stop_every": "train.exit_interval",
    "timeout_minutes": "dist.distributed_timeout_minutes",
    "manual_gc_interval": "train.manual_gc_interval",
}
MLA = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "latent_norm": "qk_layernorm",
}
DSA = {
    "indexer_heads": "dsa_indexer_n_heads",
    "indexer_head_dim": "dsa_indexer_head_dim",
    "top_k": "dsa_indexer_topk",
    "indexer_loss_coeff": "dsa_indexer_loss_coeff",
}
MOE = {
    "experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "expert_hidden_size": "moe_ffn_hidden_size",
    "score_function": "moe_router_score_function",
    "expert_bias": "moe_router_enable_expert_bias",
    "expert_bias_update_rate": "moe_router_bias_update_rate",
    "router_dtype": "moe_router_dtype",
    "balancing": "moe_router_load_balancing_type",
    "aux_loss_coeff": "moe_aux_loss_coeff",
    "grouped_gemm": "moe_grouped_gemm",
    "permute_fusion": "moe_permute_fusion",
    "router_fusion": "moe_router_fusion",
    "shared_overlap": "moe_shared_expert_overlap",
    "fused_weighted_squared_relu": "use_fused_weighted_squared_relu",
    "capacity_factor": "moe_expert_capacity_factor",
}


def _attention(p: Plan) -> Iterator[tuple[str, Any, str]]:
    m = p.recipe.model
    latent = bool({"mla", "dsa"} & p.kinds)
    yield "transformer.multi_latent_attention", latent, "model.letters.A"
    if latent:
        for key, field in MLA.items():
            yield f"transformer.{field}", getattr(m.blocks.mla, key), f"model.blocks.mla.{key}"
        yield "transformer.rotary_base", m.rotary_base, "model.rotary_base"  # MLA reads its own
        yield "transformer.num_query_groups", m.num_attention_heads, "model.num_attention_heads"
        yield "transformer.kv_channels", m.hidden_size // m.num_attention_heads, "model.num_attention_heads"
    elif "attention" in p.kinds:
        a = m.blocks.attention
        yield "model.rotary_base", m.rotary_base, "model.rotary_base"
        yield "transformer.num_query_groups", a.query_groups, "model.blocks.attention.query_groups"
        yield "transformer.kv_channels", a.head_dim, "model.blocks.attention.head_dim"
        yield "transformer.qk_layernorm", a.qk_norm, "model.blocks.attention.qk_norm"
    yield "transformer.experimental_attention_variant", "dsa" if "dsa" in p.kinds else None, "model.substitute"
    # From the pattern in the config; in the arguments it decides whether Megatron checks the DSA config at all.
    yield "args.experimental_attention_variant", "dsa" if "dsa" in p.kinds else None, "model.substitute"
    if "dsa" in p.kinds:
        for key, field in DSA.items():
            yield f"transformer.{field}", getattr(m.blocks.dsa, key), f"model.blocks.dsa.{key}"
        # The sharing itself is compared layer by layer; without it Megatron must not share at all.
        if m.blocks.dsa.full_every == 1:
            yield "transformer.dsa_indexer_topk_freq", 1, "model.blocks.dsa.full_every"
        else:
            # Stock layers hand the shared top-k on beside the mask, ours by themselves.
            masked = m.blocks.dsa.kernels == "megatron"
            yield "args.create_attention_mask_in_dataloader", masked, "model.blocks.dsa.kernels"


def _moe(r: Recipe) -> Iterator[tuple[str, Any, str]]:
    moe = r.model.blocks.moe
    for key, field in MOE.items():
        yield f"transformer.{field}", getattr(moe, key), f"model.blocks.moe.{key}"
    told = {"local": "allgather"}.get(moe.dispatcher, moe.dispatcher)
    yield "transformer.moe_token_dispatcher_type", told, "model.blocks.moe.dispatcher"
    shared = moe.shared_expert_hidden_size or None
    yield "transformer.moe_shared_expert_intermediate_size", shared, "model.blocks.moe.shared_expert_hidden_size"


def _features(p: Plan) -> Iterator[tuple[str, Any, str]]:
    f = p.recipe.feature
    re, graphs, fp8, dist = f.recompute, f.cuda_graphs, f.fp8, f.distributed_optimizer
    yield "transformer.recompute_granularity", re.granularity if re.on else None, "feature.recompute.granularity"
    modules = list(re.modules) if re.granularity == "selective" else ["core_attn"]  # Megatron's word for none
    yield "transformer.recompute_modules", modules, "feature.recompute.modules"
    yield "transformer.recompute_method", re.method if re.on else None, "feature.recompute.method"
    yield "transformer.recompute_num_layers", re.layers if re.on else None, "feature.recompute.layers"
    yield "transformer.cuda_graph_impl", graphs.impl, "feature.cuda_graphs.impl"
    yield "transformer.cuda_graph_modules", list(graphs.modules) if graphs.on else [], "feature.cuda_graphs.modules"
    yield "transformer.cuda_graph_warmup_steps", graphs.warmup_steps, "feature.cuda_graphs.warmup_steps"
    yield "rng.te_rng_tracker", graphs.on, "feature.cuda_graphs.impl"
    yield "transformer.fp8", fp8.format if fp8.on else None, "feature.fp8.format"
    if fp8.on:
        yield "transformer.fp8_recipe", fp8.recipe, "feature.fp8.recipe"
    yield "args.fp8_param_gather", fp8.on and fp8.param_gather, "feature.fp8.param_gather"
    yield "transformer.first_last_layers_bf16", fp8.on and fp8.first_last_bf16, "feature.fp8.first_last_bf16"
    if fp8.on and fp8.first_last_bf16:
        yield "transformer.num_layers_at_start_in_bf16", fp8.bf16_layers_at_start, "feature.fp8.bf16_layers_at_start"
        yield "transformer.num_layers_at_end_in_bf16", fp8.bf16_layers_at_end, "feature.fp8.bf16_layers_at_end"
    yield "optimizer.optimizer", "muon" if f.muon.on else "adam", "feature.muon.enabled"
    if f.muon.on:
        for key in ("momentum", "nesterov", "scale_mode", "tp_mode", "extra_scale_factor", "split_qkv"):
            yield f"optimizer.muon_{key}", getattr(f.muon, key), f"feature.muon.{key}"
        yield "optimizer.muon_num_ns_steps", f.muon.ns_steps, "feature.muon.ns_steps"
    # Muon's state is sharded layer by layer, by another switch that Megatron throws itself.
    yield "optimizer.use_distributed_optimizer", dist.enabled and not f.muon.on, "feature.distributed_optimizer.enabled"
    layer_wise = dist.enabled and f.muon.on
    yield "args.use_layer_wise_distributed_optimizer", layer_wise, "feature.distributed_optimizer.enabled"
    yield (
        "optimizer.overlap_param_gather",
        dist.overlap_param_gather,
        "feature.distributed_optimizer.overlap_param_gather",
    )
    reshardable = "feature.distributed_optimizer.reshardable"
    yield "checkpoint.dist_ckpt_optim_fully_reshardable", dist.reshardable, reshardable
    if not f.fsdp2.on:  # torch's FSDP has no such config
        at = "feature.distributed_optimizer."
        yield "ddp.use_distributed_optimizer", dist.enabled and not f.muon.on, at + "enabled"
        yield "ddp.fp8_param_gather", fp8.on and fp8.param_gather, "feature.fp8.param_gather"
        yield "ddp.use_megatron_fsdp", f.megatron_fsdp.on, "feature.megatron_fsdp.enabled"
        yield "ddp.overlap_grad_reduce", dist.overlap_grad_reduce, at + "overlap_grad_reduce"
        yield "ddp.overlap_param_gather", dist.overlap_param_gather, at + "overlap_param_gather"
    yield "args.use_megatron_fsdp", f.megatron_fsdp.on, "feature.megatron_fsdp.enabled"
    if f.megatron_fsdp.on:
        strategy = f.megatron_fsdp.strategy
        yield "ddp.data_parallel_sharding_strategy", strategy, "feature.megatron_fsdp.strategy"
    yield (
        "checkpoint.ckpt_format",
        "fsdp_dtensor" if f.megatron_fsdp.on else "torch_dist",
        "feature.megatron_fsdp.enabled",
    )
    yield "args.use_torch_fsdp2", f.fsdp2.on, "feature.fsdp2.enabled"
    if f.fsdp2.on:
        yield "ddp.reshard_after_forward", f.fsdp2.reshard_after_forward, "feature.fsdp2.reshard_after_forward"
    yield "args.fim_data", f.fim.on, "feature.fim.enabled"
    if f.fim.on:
        for key in ("rate", "spm_rate", "prefix_token", "middle_token", "suffix_token", "pad_token", "eod_token"):
            yield f"args.fim_{key}", getattr(f.fim, key), f"feature.fim.{key}"


def _data(r: Recipe) -> Iterator[tuple[str, Any, str]]:
    d, mock = r.data, r.data.name == "mock"
    yield "args.mock_data", mock, "data.name"
    yield "args.data_path", [d.path] if d.name == "indexed" else None, "data.path"
    yield "args.split", d.split, "data.split"
    built = d.name == "built"
    yield "args.train_data_path", [f"{d.path}/train"] if built else None, "data.path"
    yield "args.valid_data_path", [f"{d.path}/valid"] if built and r.schedule.eval_steps else None, "data.path"
    yield "tokenizer.tokenizer_type", "NullTokenizer" if mock else "HuggingFaceTokenizer", "data.name"
    yield "tokenizer.tokenizer_model", f"{d.path}/tokenizer" if built else d.tokenizer, "data.tokenizer"
    yield "tokenizer.vocab_size", r.model.vocab_size, "model.vocab_size"
    yield "args.seq_length", r.model.seq_length, "model.seq_length"
    yield "args.num_workers", d.workers, "data.workers"


def _recipe_rows(p: Plan, answer: Answer) -> Iterator[Row]:
    for field, value, key in expectations(p):
        yield Row(field, value, answer.values.get(field, "(no such field)"), key, "recipe")


def _pinned_rows(lowering: Lowering, answer: Answer) -> Iterator[Row]:
    """Settings without a recipe key: wherever Megatron keeps a field of that name, it must hold the pin."""
    for s in lowering.settings:
        if s.key is None:
            for field in pinned_fields(s.name, answer):
                yield Row(field, s.value, answer.values[field], None, "pinned")


# Destinations whose field has another name.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "rotary_seq_len_interpolation_factor": ("model.seq_len_interpolation_factor",),
    "check_for_nan_in_loss_and_grad": ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"),
    "embedding_init_method_std": (),  # Megatron fills in init_method_std; compared as that
}


def pinned_fields(name: str, answer: Answer) -> tuple[str, ...]:
    """Where Megatron keeps the destination `name`: in its configs, else in the parsed arguments."""
    if name in RENAMED:
        return tuple(f for f in RENAMED[name] if f in answer.values)
    found = tuple(f for c in CONFIGS if (f := f"{c}.{name}") in answer.values)
    return found or (f"args.{name}",)


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, (tuple, list)) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_same, expected, actual))
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    return expected == actual


# The command ----------------------------------------------------------------------------------------------------------


def summary(lowering: Lowering, v: Verdict) -> str:
    """The three lines a user sees first."""
    r = lowering.plan.recipe
    count = {source: sum(row.source == source for row in v.rows) for source in ("recipe", "pinned", "reviewed")}
    verdict = f"verdict:  {v.word}"
    if v.refused:
        verdict += f": Megatron refuses the arguments: {v.refused}"
    elif v.mismatches or v.unknown:
        verdict += f": {len(v.mismatches)} fields disagree, {len(v.unknown)} nobody has looked at"
    elif v.not_built:
        verdict += f": everything built agrees; not built: {', '.join(s.owner for s in v.not_built)}"
    return (
        f"{r.preset.name} on {counted(r.world_size, 'GPU')} against Megatron {v0_19.PIN}: {len(v.rows)} fields compared\n"
        f"fields:   {count['recipe']} follow from the recipe, {count['pinned']} are pinned, "
        f"{count['reviewed']} are reviewed defaults\n"
        f"{verdict}\n"
    )


def rows_text(rows: Sequence[Row]) -> str:
    """recipe key, Megatron's field, both values, verdict; one row a line."""
    cells = [("recipe key", "Megatron's field", "expected", "Megatron has", "verdict")]
    for r in rows:
        verdict = VERIFIED if r.agrees else MISMATCH
        cells.append((r.key or f"({r.source})", r.field, str(r.expected), str(r.actual), verdict))
    widths = [min(max(len(c[i]) for c in cells), 60) for i in range(5)]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in cells)


def task(recipe: Recipe, words: Mapping[str, Any], origin: Any) -> int:
    """Verify and print. stdout is the result."""
    form = words["format"]
    if form not in ("auto", "table", "json"):
        raise Refused(Problem(f"no format `{form}`", "format", "there are: auto, table, json"))
    sys.stderr.write(origin.unnamed_preset(recipe.preset.name))
    lowering = translate(recipe)
    with Oracle() as oracle:
        v = verify(lowering, oracle)
    if form == "json":
        rows = [{**asdict(r), "agrees": r.agrees} for r in v.rows]
        tree = {
            "preset": recipe.preset.name,
            "verdict": v.word,
            "refused": v.refused,
            "unknown": v.unknown,
            "rows": rows,
        }
        tree["not_built"] = [asdict(s) for s in v.not_built]
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
        return v.code
    sys.stdout.write(summary(lowering, v))
    shown = v.rows if form == "table" else v.mismatches
    if shown:
        sys.stdout.write("\n" + rows_text(shown))
    for field in v.unknown:
        sys.stdout.write(f"{field}: neither compared nor in mcore/reviewed/{REVIEWED.name}\n")
    return v.code


def main() -> None:
    app.run("verify", ("format",), task)


if __name__ == "__main__":
    main()
