"""Stage 3, Plan -> Lowering: every setting Megatron gets, each with one owner and a reason.

The sections of the recipe are lowered here; blocks and features bring their own settings.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath

from nam_megatron.errors import Problem, raise_if
from nam_megatron.plan import Plan, plan
from nam_megatron.recipe import Recipe
from nam_megatron.setting import CONNECTIONS, Env, Setting


@dataclass(frozen=True)
class Lowering:
    """What Megatron is told: settings in the order they are read best, and the environment it needs."""

    plan: Plan
    settings: tuple[Setting, ...]
    env: tuple[Env, ...]

    @cached_property
    def by_name(self) -> dict[str, Setting]:
        return {s.name: s for s in self.settings}


def translate(recipe: Recipe) -> Lowering:
    """Recipe -> Plan -> Lowering.

    Raises:
        Refused: with every finding of the stage that failed.
    """
    return lower(plan(recipe))


def lower(p: Plan) -> Lowering:
    """All settings of a plan, checked: layouts, blocks, features, and that no setting has two owners."""
    r = p.recipe
    problems = [
        *_layout(r),
        *_batches(r),
        *_model_checks(p),
        *_data_checks(r),
        *_precision_checks(r),
        *_expert_checks(p),
    ]
    for block in p.blocks:
        problems += block.check(p)
    for feature in r.feature.all():
        problems += feature.check(p) if feature.on else feature.idle()
    raise_if(problems)

    settings: list[Setting] = []
    for owner, section in SECTIONS.items():
        settings += (replace(s, owner=owner) for s in section(p))
    for block in p.blocks:
        settings += _owned(block.settings(p), block.kind, f"model.blocks.{block.kind}.")
    for feature in r.feature.all():
        settings += _owned(feature.settings(p), feature.name, f"feature.{feature.name}.")
    seen: dict[str, Setting] = {}
    for s in settings:
        assert s.name not in seen, f"{s.name} is set by {seen[s.name].owner} and by {s.owner}"
        seen[s.name] = s
    return Lowering(p, tuple(settings), tuple(_env(p)))


def _owned(settings: Iterator[Setting], owner: str, prefix: str) -> Iterator[Setting]:
    return (replace(s, owner=owner, key=prefix + s.key if s.key else None) for s in settings)


# The recipe's sections ------------------------------------------------------------------------------------------------


def _model(p: Plan) -> Iterator[Setting]:
    m = p.recipe.model
    yield Setting(
        "hybrid_layer_pattern",
        p.pattern,
        "one letter a layer; sets depth, MTP depths, pipeline segments",
        "model.pattern",
    )
    yield Setting("hidden_size", m.hidden_size, "width of the residual stream", "model.hidden_size")
    yield Setting(
        "ffn_hidden_size", m.ffn_hidden_size, "width of a dense MLP; no other layer has it", "model.ffn_hidden_size"
    )
    yield Setting("num_attention_heads", m.num_attention_heads, "query heads", "model.num_attention_heads")
    yield Setting("seq_length", m.seq_length, "tokens per sample", "model.seq_length")
    yield Setting("max_position_embeddings", m.seq_length, "Megatron wants at least the sequence", "model.seq_length")
    yield Setting("vocab_size", m.vocab_size, "entries of the tokenizer", "model.vocab_size")
    yield Setting(
        "padded_vocab_size",
        m.vocab_size,
        "rows of the embedding; else the tokenizer and a multiple of 128 decide",
        "model.vocab_size",
    )
    yield Setting(
        "untie_embeddings_and_output_weights", not m.tied_embeddings, "tied unless said", "model.tied_embeddings"
    )
    yield Setting("normalization", m.normalization, "Megatron's default is LayerNorm", "model.normalization")
    yield Setting("layernorm_epsilon", m.norm_epsilon, "added to the variance", "model.norm_epsilon")
    yield Setting("layernorm_zero_centered_gamma", False, "gamma starts at one")
    yield Setting("add_bias_linear", m.linear_bias, "on by default", "model.linear_bias")
    yield Setting("add_qkv_bias", m.linear_bias, "follows the other biases", "model.linear_bias")
    yield Setting("squared_relu", m.activation == "squared_relu", "gelu by default", "model.activation")
    yield Setting("swiglu", m.activation == "swiglu", "gated only when asked for", "model.activation")
    yield Setting("quick_geglu", False, "not offered")
    yield Setting("openai_gelu", False, "not offered")
    yield Setting("bias_gelu_fusion", False, "needs biases and gelu", "model.activation")
    if m.activation == "swiglu":
        yield Setting("bias_swiglu_fusion", True, "same formula, fused", "model.activation")
    yield Setting("hidden_dropout", m.hidden_dropout, "Megatron's default is 0.1", "model.hidden_dropout")
    yield Setting("attention_dropout", m.attention_dropout, "Megatron's default is 0.1", "model.attention_dropout")
    yield Setting("position_embedding_type", "rope", "Megatron's default is a learned table")
    yield Setting("rotary_base", m.rotary_base, "RoPE theta", "model.rotary_base")
    yield Setting("rotary_percent", 1.0, "the whole head turns")
    yield Setting("rotary_interleaved", False, "halves, not pairs")
    yield Setting("rotary_seq_len_interpolation_factor", None, "no interpolation")
    yield Setting("use_rope_scaling", False, "no scaling")
    yield Setting("window_size", None, "full causal attention")
    yield Setting("softmax_type", "vanilla", "no sink")
    yield Setting("attention_output_gate", False, "no gate")
    yield Setting("qk_l2_norm", False, "no L2 norm")
    yield Setting("qk_clip", False, "no clipping")
    yield Setting("apply_residual_connection_post_layernorm", False, "pre-norm residuals")
    yield Setting("init_method_std", m.init_std, "normal initialisation", "model.init_std")
    yield Setting("embedding_init_method_std", None, "as everything else")
    yield Setting("init_method_xavier_uniform", False, "normal, not Xavier")
    yield Setting("use_mup", False, "no muP")
    yield Setting("spec", None, "a spec that cannot be imported is replaced silently; ours is handed over as an object")


def _parallel(p: Plan) -> Iterator[Setting]:
    layout = p.recipe.parallel
    yield Setting("tensor_model_parallel_size", layout.tensor, "ranks that share each matrix", "parallel.tensor")
    yield Setting(
        "sequence_parallel", layout.sequence, "activations between matrices are sharded too", "parallel.sequence"
    )
    yield Setting(
        "pipeline_model_parallel_size", layout.pipeline, "the pattern's `|` say where it is cut", "parallel.pipeline"
    )
    yield Setting("context_parallel_size", layout.context, "ranks that share a sequence", "parallel.context")
    yield Setting("expert_model_parallel_size", layout.expert, "ranks that share the experts", "parallel.expert")
    yield Setting(
        "expert_tensor_parallel_size", layout.expert_tensor, "unset means the tensor size", "parallel.expert_tensor"
    )


def _precision(p: Plan) -> Iterator[Setting]:
    x = p.recipe.precision
    yield Setting("bf16", x.params == "bf16", "weights and activations", "precision.params")
    yield Setting("fp16", False, "not offered")
    yield Setting(
        "accumulate_allreduce_grads_in_fp32", x.grad_reduce == "fp32", "said outright", "precision.grad_reduce"
    )
    yield Setting("grad_reduce_in_bf16", x.grad_reduce == "bf16", "fp32 unless said", "precision.grad_reduce")
    yield Setting("fp32_residual_connection", False, "residual stream in bf16")
    yield Setting("attention_softmax_in_fp32", False, "TE's kernels keep it in fp32 themselves")
    yield Setting("apply_query_key_layer_scaling", False, "no scaling by layer")
    yield Setting(
        "cross_entropy_loss_fusion", x.cross_entropy == "compiled", "`fused` is ours", "precision.cross_entropy"
    )
    yield Setting("cross_entropy_fusion_impl", "native", "Megatron refuses `te`")
    yield Setting("fp16_lm_cross_entropy", False, "loss in fp32")
    yield Setting("use_precision_aware_optimizer", False, "fp32 master weights and moments")
    yield Setting(
        "gradient_accumulation_fusion",
        x.fused_grad_accumulation,
        "on by default, with a kernel of APEX's; TE's is used here",
        "precision.fused_grad_accumulation",
    )


def _optim(p: Plan) -> Iterator[Setting]:
    o, schedule = p.recipe.optim, p.recipe.schedule
    if not p.recipe.feature.muon.on:
        yield Setting("optimizer", "adam", "AdamW: decoupled weight decay", "optim.name")
    yield Setting("lr", o.lr, "peak learning rate", "optim.lr")
    yield Setting("min_lr", o.min_lr, "where the decay ends", "optim.min_lr")
    yield Setting("lr_decay_style", o.decay, "Megatron's default is linear", "optim.decay")
    yield Setting("lr_decay_iters", schedule.decay_steps, "steps until min_lr", "schedule.decay_steps")
    yield Setting("lr_warmup_iters", o.warmup_steps, "linear warm-up", "optim.warmup_steps")
    yield Setting("lr_warmup_init", 0.0, "from zero")
    yield Setting("decoupled_lr", None, "one learning rate for all")
    yield Setting("weight_decay", o.weight_decay, "Megatron's default is 0.01", "optim.weight_decay")
    yield Setting("weight_decay_incr_style", "constant", "no ramp")
    yield Setting("apply_wd_to_qk_layernorm", False, "norms are not decayed")
    yield Setting("adam_beta1", o.beta1, "first moment", "optim.beta1")
    yield Setting("adam_beta2", o.beta2, "Megatron's default is 0.999", "optim.beta2")
    yield Setting("adam_eps", o.eps, "added to the root", "optim.eps")
    yield Setting("clip_grad", o.clip_grad, "global gradient norm", "optim.clip_grad")


def _schedule(p: Plan) -> Iterator[Setting]:
    s = p.recipe.schedule
    yield Setting(
        "micro_batch_size", s.micro_batch_size, "samples per forward pass and rank", "schedule.micro_batch_size"
    )
    yield Setting("global_batch_size", s.global_batch_size, "samples per step", "schedule.global_batch_size")
    yield Setting("train_iters", s.train_steps, "steps", "schedule.train_steps")
    yield Setting("seed", s.seed, "weights and data order", "schedule.seed")
    yield Setting("eval_iters", s.eval_steps, "batches per evaluation; 100 by default", "schedule.eval_steps")
    yield Setting("eval_interval", s.eval_interval, "steps between evaluations", "schedule.eval_interval")
    yield Setting("log_interval", s.log_interval, "steps between log lines", "schedule.log_interval")
    yield Setting("log_throughput", True, "Megatron's own figure beside ours")
    yield Setting("check_for_nan_in_loss_and_grad", True, "the house's law: never off")
    yield Setting("save", s.save, "checkpoint folder", "schedule.save")
    yield Setting("save_interval", s.save_interval, "steps between checkpoints", "schedule.save_interval")
    yield Setting("load", s.load, "checkpoint to resume from", "schedule.load")
    yield Setting("exit_interval", s.stop_every, "a command does so many steps, the run goes on", "schedule.stop_every")
    yield Setting("exit_signal_handler", True, "SIGTERM ends the run after the step, with a checkpoint where `save` is")
    yield Setting(
        "distributed_timeout_minutes",
        s.timeout_minutes,
        "how long a lost rank goes unnoticed at most",
        "schedule.timeout_minutes",
    )
    yield Setting("manual_gc", s.manual_gc_interval > 0, "all ranks at once", "schedule.manual_gc_interval")
    yield Setting("manual_gc_interval", s.manual_gc_interval, "in steps", "schedule.manual_gc_interval")
    if not p.recipe.feature.megatron_fsdp.on:
        yield Setting("ckpt_format", "torch_dist", "sharded, readable in another layout")


def _data(p: Plan) -> Iterator[Setting]:
    d = p.recipe.data
    mock, built = d.name == "mock", PurePosixPath(d.path) if d.name == "built" else None
    yield Setting("mock_data", mock, "random tokens", "data.name")
    yield Setting("data_path", (d.path,) if d.name == "indexed" else None, "indexed dataset", "data.path")
    yield Setting("split", d.split, "train,valid,test weights", "data.split")
    yield Setting("train_data_path", (str(built / "train"),) if built else None, "split by document", "data.path")
    valid = (str(built / "valid"),) if built and p.recipe.schedule.eval_steps else None
    yield Setting("valid_data_path", valid, "split by document; only for evaluations", "data.path")
    yield Setting(
        "tokenizer_type", "NullTokenizer" if mock else "HuggingFaceTokenizer", "mock data has none", "data.name"
    )
    tokenizer = str(built / "tokenizer") if built else d.tokenizer
    yield Setting("tokenizer_model", tokenizer, "its folder", "data.path" if built else "data.tokenizer")
    yield Setting("num_workers", d.workers, "loader processes per rank", "data.workers")
    yield Setting("dataloader_type", "single", "in order, once")
    yield Setting("reset_position_ids", False, "positions run through documents")
    yield Setting("reset_attention_mask", False, "attention runs through documents")
    yield Setting("eod_mask_loss", False, "the end of a document counts")
    if not p.index_reuse:
        yield Setting("create_attention_mask_in_dataloader", False, "causal masks are made in the kernel")


def _device(p: Plan) -> Iterator[Setting]:
    yield Setting("transformer_impl", "transformer_engine", "the local implementation has no kernels for this device")
    yield Setting("attention_backend", "auto", "`flash` would switch cuDNN off and leave no backend without flash-attn")


SECTIONS = {
    "model": _model, "parallel": _parallel, "precision": _precision, "optim": _optim, "schedule": _schedule,
    "data": _data, "device": _device,
}  # fmt: skip


def _env(p: Plan) -> Iterator[Env]:
    layout, f = p.recipe.parallel, p.recipe.feature
    yield Env("PYTORCH_ALLOC_CONF", "expandable_segments:True", "without it fragmentation decides what fits", "device")
    if layout.tensor > 1 or layout.context > 1:
        yield Env(
            CONNECTIONS,
            "1",
            "Megatron demands it on this device under tensor or context parallelism",
            "parallel",
        )
    else:
        why = (
            "FSDP forbids 1"
            if f.megatron_fsdp.on or f.fsdp2.on
            else "nothing demands it; a leftover 1 slows the overlap"
        )
        yield Env(CONNECTIONS, None, why, "parallel")
    # Transformer Engine reads both once, at the first norm.
    cudnn = p.recipe.precision.norm_kernels == "cudnn"
    why = (
        "`norm_kernels` is cudnn"
        if cudnn
        else "`norm_kernels` is transformer_engine; a leftover 1 would choose cuDNN's"
    )
    for way in ("FWD", "BWD"):
        yield Env(f"NVTE_NORM_{way}_USE_CUDNN", "1" if cudnn else None, why, "precision")
    for feature in f.all():
        yield from (replace(e, owner=feature.name) for e in feature.env(p))


# What no single block or feature can see ------------------------------------------------------------------------------


def _layout(r: Recipe) -> Iterator[Problem]:
    p, world = r.parallel, r.world_size
    if world % (size := p.tensor * p.pipeline * p.context):
        yield Problem(
            f"{world} GPUs cannot hold tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {size}",
            "cluster.gpus_per_node",
            "the product must divide nodes * gpus_per_node",
        )
    if world % (size := p.pipeline * p.expert * p.expert_tensor):
        yield Problem(
            f"{world} GPUs cannot hold pipeline {p.pipeline} x expert {p.expert} x expert tensor {p.expert_tensor} = {size}",
            "parallel.expert",
            "the product must divide nodes * gpus_per_node",
        )
    if p.sequence and p.tensor == 1:
        yield Problem(
            "Megatron would switch sequence parallelism off at tensor size 1",
            "parallel.sequence",
            "set `parallel.sequence=false`",
        )


def _batches(r: Recipe) -> Iterator[Problem]:
    s, dp = r.schedule, r.data_parallel
    if dp and s.global_batch_size % (s.micro_batch_size * dp):
        yield Problem(
            f"global batch {s.global_batch_size} is not a multiple of micro batch {s.micro_batch_size} x data parallel {dp}",
            "schedule.global_batch_size",
            f"{s.micro_batch_size * dp} and its multiples fit",
        )
    if (r.optim.name == "muon") != r.feature.muon.on:
        yield Problem(
            f"the optimizer is called {r.optim.name} and Muon is {'on' if r.feature.muon.on else 'off'}",
            "optim.name",
            "set `optim=muon` or `optim=adamw`",
        )
    if r.optim.min_lr > r.optim.lr:
        yield Problem(f"min_lr {r.optim.min_lr} is above lr {r.optim.lr}", "optim.min_lr")
    if r.optim.warmup_steps >= s.decay_steps:
        yield Problem(
            f"warm-up of {r.optim.warmup_steps} steps leaves nothing of {s.decay_steps}",
            "optim.warmup_steps",
            "make it smaller",
        )
    if (s.save is None) != (s.save_interval is None):
        yield Problem("`save` and `save_interval` go together", "schedule.save_interval", "give both or neither")
    if s.stop_every and s.save is None:
        yield Problem(
            "a run that stops on its way and saves nothing", "schedule.stop_every", "set `schedule.save`, or null"
        )


def _precision_checks(r: Recipe) -> Iterator[Problem]:
    if r.precision.fused_grad_accumulation and (r.feature.fsdp2.on or r.feature.megatron_fsdp.on):
        yield Problem(
            "no FSDP keeps the buffer that gradients would be added to",
            "precision.fused_grad_accumulation",
            "set it to false",
        )


def _model_checks(plan: Plan) -> Iterator[Problem]:
    r = plan.recipe
    m, p = r.model, r.parallel
    if m.hidden_size % 8:
        message = f"hidden_size {m.hidden_size} is not a multiple of 8: rows of bf16 would not be 16 bytes apart"
        yield Problem(message, "model.hidden_size", f"{(m.hidden_size // 8 + 1) * 8} fits")
    if "attention" not in plan.kinds and m.hidden_size % m.num_attention_heads:
        # Megatron divides where `kv_channels` is not given.
        step = math.lcm(8, m.num_attention_heads)
        message = f"hidden_size {m.hidden_size} is not a multiple of num_attention_heads {m.num_attention_heads}"
        yield Problem(message, "model.hidden_size", f"{(m.hidden_size // step + 1) * step} fits")
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size"):
        if getattr(m, name) % p.tensor:
            yield Problem(f"{name} {getattr(m, name)} is not divisible by tensor size {p.tensor}", f"model.{name}")
    if p.sequence and m.seq_length % p.tensor:
        yield Problem(f"a sequence of {m.seq_length} cannot be shared by {p.tensor} ranks", "model.seq_length")
    if p.context > 1 and m.seq_length % (2 * p.context):
        yield Problem(f"a sequence of {m.seq_length} cannot be cut into 2 x context {p.context}", "model.seq_length")
    if r.feature.mtp.on and m.tied_embeddings:
        yield Problem("MTP with tied embeddings is not tested upstream", "model.tied_embeddings", "set it to false")


def _expert_checks(p: Plan) -> Iterator[Problem]:
    if "moe" not in p.kinds:
        for name in ("expert", "expert_tensor"):
            if (degree := getattr(p.recipe.parallel, name)) > 1:
                yield Problem(f"{name} parallel {degree} in a model without experts", f"parallel.{name}", "set it to 1")


# The keys of `data` that each kind of it has; `data.workers` has all.
DATA_KEYS = {"mock": (), "indexed": ("path", "split", "tokenizer"), "built": ("path",)}


def _data_checks(r: Recipe) -> Iterator[Problem]:
    d = r.data
    for name in ("path", "split", "tokenizer"):
        given, wanted = getattr(d, name) is not None, name in DATA_KEYS[d.name]
        if wanted and not given:
            yield Problem(f"{d.name} data without `{name}`", f"data.{name}", f"give it: `data.{name}=...`")
        if given and not wanted:
            right = " or ".join(f"`data={kind}`" for kind, keys in DATA_KEYS.items() if name in keys)
            yield Problem(f"{d.name} data with a `{name}`", f"data.{name}", f"set {right}")
    if d.split is not None and not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}", d.split):
        yield Problem(f"`{d.split}` is no split", "data.split", "three weights for train,valid,test: `99,1,0`")
    elif d.split is not None:
        train, valid, _ = map(float, d.split.split(","))
        if not train:
            yield Problem("nothing is left for training", "data.split", "`99,1,0` holds out one document in a hundred")
        if r.schedule.eval_steps and not valid:
            yield Problem("evaluations and no documents for them", "data.split", "`99,1,0`, or `schedule.eval_steps=0`")
