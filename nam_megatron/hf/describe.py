"""What an export holds: config.json of a plan, and every tensor under its two names, Megatron's and the export's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import Problem
from nam_megatron.plan import Plan

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """name: in the export. parts: (checkpoint key, shape), joined along their first axis. dtype: as safetensors says it."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * {"BF16": 2, "F32": 4}[self.dtype]


def objections(plan: Plan) -> Iterator[Problem]:
    """Why a plan's model cannot be exported."""
    model = plan.recipe.model
    for seam in plan.not_built:
        yield Problem(f"`{seam.owner}` is not built: {seam.missing}")
    if plan.recipe.feature.lora:
        text = (
            "a checkpoint of adapters has no other weights, and nothing here adds them to those of the pretrained model"
        )
        yield Problem(text, "feature.lora.rank")
    for kind in sorted(plan.kinds - LAYERS.keys()):
        yield Problem(f"the export has no {KINDS[kind].title}", f"model.blocks.{kind}")
    if model.linear_bias and plan.kinds & {"mla", "dsa", "moe"}:
        text = "of biases the export has those of plain attention and dense MLPs, which are held against Megatron"
        yield Problem(text, "model.linear_bias")
    if model.blocks.moe and model.blocks.moe.capacity_factor is not None:
        text = "experts with a capacity drop tokens by what else is in the batch, and a decoded token has no batch"
        yield Problem(text, "model.blocks.moe.capacity_factor")


def config(plan: Plan) -> dict[str, Any]:
    """config.json's keys that compute. Kernels, layouts and whatever else only executes are not there."""
    model, feature = plan.recipe.model, plan.recipe.feature
    needed = {*plan.kinds, *(("mla",) if "dsa" in plan.kinds else ())}
    blocks = {kind: keys(getattr(model.blocks, kind)) for kind, keys in BLOCKS.items() if kind in needed}
    if b := blocks.get("attention"):
        b["qkv_bias"] |= model.linear_bias
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.seq_length,
        "learned_positions": model.learned_positions or 0,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "zero_centered_norms": model.zero_centered_norms,
        "linear_bias": model.linear_bias,
        "activation": model.activation,
        "rotary_base": model.rotary_base,
        "tie_word_embeddings": model.tied_embeddings,
        "layer_kinds": [layer.kind for layer in plan.layers],
        "index_sources": [None if layer.source is None else layer.source - 1 for layer in plan.layers],
        "mtp_kinds": list(plan.mtp),
        "mtp_depths": plan.mtp_depths if plan.mtp else 0,
        **blocks,
        **({"mhc": STREAMS(mhc)} if (mhc := feature.mhc) else {}),
        **({"ngrams": NGRAMS(hashed)} if (hashed := feature.ngram_hash) else {}),
        **({"yarn": YARN(yarn, rounded="attention" not in needed or yarn.rounded)} if (yarn := feature.yarn) else {}),
        **({"llama_rope": LLAMA_ROPE(scaled)} if (scaled := feature.llama_rope) else {}),
    }


def _named(*names: str) -> Any:
    return lambda block, **more: {name: getattr(block, name) for name in names} | more


def _attention_keys(b: Any) -> dict[str, Any]:
    named = _named("head_dim", "query_groups", "qk_norm", "qkv_bias", "output_gate")
    return named(b, rotary_dim=b.turned, window=b.window or 0, unwindowed_every=b.unwindowed_every or 0)


def _mla_keys(b: Any) -> dict[str, Any]:
    named = _named("kv_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm")
    return named(b, q_lora_rank=b.q_lora_rank or 0)


def _moe_keys(b: Any) -> dict[str, Any]:
    groups, chosen = b.group_limit or (1, 1)
    named = _named(
        "experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "shared_expert_gate",
        "score_function", "expert_bias", "pre_softmax", "router_dtype",
    )  # fmt: skip
    scaling, latent = b.routed_scaling or 1.0, b.latent_size or 0
    return named(b, routed_scaling=scaling, groups=groups, chosen_groups=chosen, latent_size=latent)


def _mamba2_keys(b: Any) -> dict[str, Any]:
    return _named("heads", "head_dim", "state_dim", "groups")(b, conv_width=4)  # MambaMixer's d_conv; not a flag


BLOCKS = {
    "attention": _attention_keys,
    "mla": _mla_keys,
    "dsa": _named("indexer_heads", "indexer_head_dim", "top_k"),
    "moe": _moe_keys,
    "mlp": _named(),
    "mamba2": _mamba2_keys,
    "gdn": _named("key_heads", "key_head_dim", "value_heads", "value_head_dim", "conv_width"),
    "mamba3": _named("heads", "head_dim", "state_dim", "groups", "mimo_rank", "angles"),
    "m2rnn": _named("k_dim", "v_dim", "heads", "conv_width"),
}


STREAMS = _named("streams", "sinkhorn_steps", "epsilon")
NGRAMS = _named("order", "heads", "buckets", "width", "document_end")
YARN = _named("factor", "original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
LLAMA_ROPE = _named("factor")


# Tensors -------------------------------------------------------------------------------------------------------------


def tensors(c: Config) -> Iterator[Tensor]:
    """Every tensor of a model, in the order in which it is written."""
    h = c["hidden_size"]
    yield Tensor("model.embed_tokens.weight", (("embedding.word_embeddings.weight", (c["vocab_size"], h)),))
    if rows := c["learned_positions"]:
        yield _one("model.embed_positions.weight", "embedding.position_embeddings.weight", rows, h)
    if b := c.get("ngrams"):
        tables, at = (b["order"] - 1) * b["heads"], "embedding.ngrams."
        yield _one("model.ngrams.table", f"{at}table", tables * b["buckets"] * b["width"])
        yield _one("model.ngrams.projection.weight", f"{at}projection", h, tables * b["width"])
    for index, kind in enumerate(c["layer_kinds"]):
        computes = c["index_sources"][index] is None
        here, there = f"model.layers.{index}.", f"decoder.layers.{index}."
        yield from _within(here, there, _layer(c, kind, computes))
        if c.get("mhc"):
            yield from _within(f"{here}streams.", f"{there}hyper_connection.", _streams(c))
    yield from _norm(c, "model.norm", "decoder.final_norm.", h)
    for depth in range(c["mtp_depths"]):
        here, there = f"model.mtp.{depth}.", f"mtp.layers.{depth}."
        yield from _norm(c, f"{here}embedding_norm", f"{there}enorm.", h)
        yield from _norm(c, f"{here}hidden_norm", f"{there}hnorm.", h)
        yield Tensor(f"{here}join.weight", ((f"{there}eh_proj.weight", (h, 2 * h)),))
        for index, kind in enumerate(c["mtp_kinds"]):
            inner = f"{there}mtp_model_layer.layers.{index}."
            yield from _within(f"{here}layers.{index}.", inner, _layer(c, kind, True))
        yield from _norm(c, f"{here}norm", f"{there}final_layernorm.", h)
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (("output_layer.weight", (c["vocab_size"], h)),))


def _within(here: str, there: str, inner: Iterator[Tensor]) -> Iterator[Tensor]:
    for tensor in inner:
        parts = tuple((there + key, shape) for key, shape in tensor.parts)
        yield replace(tensor, name=here + tensor.name, parts=parts)


def _one(name: str, key: str, *shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, ((key, shape),), dtype)


def _norm(c: Config, name: str, key: str, size: int) -> Iterator[Tensor]:
    for part in ("weight", "bias")[: 2 if c["normalization"] == "LayerNorm" else 1]:
        yield _one(f"{name}.{part}", f"{key}{part}", size)


def _linear(name: str, key: str, rows: int, columns: int, bias: bool) -> Iterator[Tensor]:
    yield _one(f"{name}.weight", f"{key}.weight", rows, columns)
    if bias:
        yield _one(f"{name}.bias", f"{key}.bias", rows)


def _packed(name: str, key: str, sizes: Mapping[str, int], *rest: int) -> Tensor:
    """One tensor that the checkpoint holds part by part."""
    return Tensor(name, tuple((f"{key}.{part}", (size, *rest)) for part, size in sizes.items()))


def _layer(c: Config, kind: str, computes: bool) -> Iterator[Tensor]:
    """A layer's, its norm first. computes: not a DSA layer that reuses another's top-k."""
    yield from _norm(c, "norm", INPUT_NORM[kind], c["hidden_size"])
    yield from LAYERS[kind](c)
    if kind == "dsa" and computes:
        yield from _indexer(c)


def _streams(c: Config) -> Iterator[Tensor]:
    n = c["mhc"]["streams"]
    shapes = {"mapping": (n * (n + 2), n * c["hidden_size"]), "bias": (n * (n + 2),)}
    shapes |= dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), (1,))
    for name, shape in shapes.items():
        yield _one(name, "mapping_proj.weight" if name == "mapping" else name, *shape, dtype="F32")


INPUT_NORM = {
    "attention": "self_attention.linear_qkv.layer_norm_", "mla": "input_layernorm.", "dsa": "input_layernorm.",
    "moe": "pre_mlp_layernorm.", "mlp": "mlp.linear_fc1.layer_norm_", "gdn": "self_attention.in_proj.layer_norm_",
    "mamba2": "mixer.in_proj.layer_norm_", "mamba3": "mixer.in_proj.layer_norm_", "m2rnn": "mixer.in_proj.layer_norm_",
}  # fmt: skip


def _attention(c: Config) -> Iterator[Tensor]:
    b, h, heads, at = c["attention"], c["hidden_size"], c["num_attention_heads"], "self_attention."
    packed = (2 if b["output_gate"] else 1) * heads + 2 * b["query_groups"]
    yield from _linear("mixer.qkv", f"{at}linear_qkv", packed * b["head_dim"], h, b["qkv_bias"])
    yield from _linear("mixer.out", f"{at}linear_proj", h, heads * b["head_dim"], c["linear_bias"])
    if b["qk_norm"]:
        for part in ("q", "k"):
            yield from _norm(c, f"mixer.{part}_norm", f"{at}{part}_layernorm.", b["head_dim"])


def _mla(c: Config) -> Iterator[Tensor]:
    b, h, n, at = c["mla"], c["hidden_size"], c["num_attention_heads"], "self_attention."
    rq, rkv, dq, dr, dv = (
        b[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rq:
        yield _one("mixer.q_down.weight", f"{at}linear_q_down_proj.weight", rq, h)
    yield _one("mixer.q_up.weight", f"{at}linear_q_{'up_' if rq else ''}proj.weight", n * (dq + dr), rq or h)
    yield _one("mixer.kv_down.weight", f"{at}linear_kv_down_proj.weight", rkv + dr, h)
    yield _one("mixer.kv_up.weight", f"{at}linear_kv_up_proj.weight", n * (dq + dv), rkv)
    yield _one("mixer.out.weight", f"{at}linear_proj.weight", h, n * dv)
    if b["latent_norm"]:
        if rq:
            yield from _norm(c, "mixer.q_norm", f"{at}q_layernorm.", rq)
        yield from _norm(c, "mixer.kv_norm", f"{at}kv_layernorm.", rkv)


def _indexer(c: Config) -> Iterator[Tensor]:
    b, h, at = c["dsa"], c["hidden_size"], "self_attention.core_attention.indexer."
    heads, width = b["indexer_heads"], b["indexer_head_dim"]
    yield _one("mixer.indexer.q.weight", f"{at}linear_wq_b.weight", heads * width, c["mla"]["q_lora_rank"])
    yield _one("mixer.indexer.k.weight", f"{at}linear_wk.weight", width, h)
    for part in ("weight", "bias"):  # a LayerNorm, whatever the model's norm
        yield _one(f"mixer.indexer.k_norm.{part}", f"{at}k_norm.{part}", width)
    yield _one("mixer.indexer.weights.weight", f"{at}linear_weights_proj.weight", heads, h)


def _gates(c: Config) -> int:
    return 2 if c["activation"] == "swiglu" else 1


def _mlp(c: Config) -> Iterator[Tensor]:
    h, width = c["hidden_size"], c["ffn_hidden_size"]
    yield from _linear("mixer.up", "mlp.linear_fc1", _gates(c) * width, h, c["linear_bias"])
    yield from _linear("mixer.down", "mlp.linear_fc2", h, width, c["linear_bias"])


def _moe(c: Config) -> Iterator[Tensor]:
    b, h, u = c["moe"], c["hidden_size"], _gates(c)
    count, width, shared, latent = (
        b[k] for k in ("experts", "expert_hidden_size", "shared_expert_hidden_size", "latent_size")
    )
    yield _one("mixer.router.weight", "mlp.router.weight", count, h)
    if b["expert_bias"]:
        yield _one("mixer.router.expert_bias", "mlp.router.expert_bias", count, dtype="F32")
    if latent:
        yield _one("mixer.to_latent.weight", "mlp.fc1_latent_proj.weight", latent, h)
        yield _one("mixer.from_latent.weight", "mlp.fc2_latent_proj.weight", h, latent)
    yield _one("mixer.experts.up", "mlp.experts.experts.linear_fc1.weight", count, u * width, latent or h)
    yield _one("mixer.experts.down", "mlp.experts.experts.linear_fc2.weight", count, latent or h, width)
    if shared:
        yield _one("mixer.shared.up.weight", "mlp.shared_experts.linear_fc1.weight", u * shared, h)
        yield _one("mixer.shared.down.weight", "mlp.shared_experts.linear_fc2.weight", h, shared)
    if b["shared_expert_gate"]:
        yield _one("mixer.shared_gate.weight", "mlp.shared_experts.gate_weight", 1, h)


def _mamba2(c: Config) -> Iterator[Tensor]:
    b, h = c["mamba2"], c["hidden_size"]
    heads, inner, keys = b["heads"], b["heads"] * b["head_dim"], b["groups"] * b["state_dim"]
    convolved = {"x": inner, "B": keys, "C": keys}
    yield _packed("mixer.in_proj.weight", "mixer.in_proj.weight", {"z": inner, **convolved, "dt": heads}, h)
    yield _packed("mixer.conv_weight", "mixer.conv1d.weight", convolved, 1, b["conv_width"])
    yield _packed("mixer.conv_bias", "mixer.conv1d.bias", convolved)
    for name in ("dt_bias", "A_log", "D"):
        yield _one(f"mixer.{name}", f"mixer.{name}", heads)
    yield _one("mixer.norm_weight", "mixer.norm.weight", inner)
    yield _one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


def _gdn(c: Config) -> Iterator[Tensor]:
    b, h, at = c["gdn"], c["hidden_size"], "self_attention."
    heads, keys, inner = b["value_heads"], b["key_heads"] * b["key_head_dim"], b["value_heads"] * b["value_head_dim"]
    convolved = {"query": keys, "key": keys, "value": inner}
    packed = {**convolved, "z": inner, "beta": heads, "alpha": heads}
    yield _packed("mixer.in_proj.weight", f"{at}in_proj.weight", packed, h)
    yield _packed("mixer.conv_weight", f"{at}conv1d.weight", convolved, 1, b["conv_width"])
    for name in ("dt_bias", "A_log"):
        yield _one(f"mixer.{name}", at + name, heads)
    yield from _norm(c, "mixer.norm", f"{at}out_norm.", b["value_head_dim"])
    yield _one("mixer.out.weight", f"{at}out_proj.weight", h, inner)


def _mamba3(c: Config) -> Iterator[Tensor]:
    b, h = c["mamba3"], c["hidden_size"]
    heads, p, n, r = (b[k] for k in ("heads", "head_dim", "state_dim", "mimo_rank"))
    inner, keys = heads * p, b["groups"] * r * n
    parts = {"z": inner, "x": inner, "B": keys, "C": keys, "dt": heads, "A": heads, "trap": heads}
    yield _packed("mixer.in_proj.weight", "mixer.in_proj.weight", {**parts, "angles": b["angles"]}, h)
    shapes = {"dt_bias": (heads,), "D": (heads,), "B_bias": (heads, r, n), "C_bias": (heads, r, n)}
    if r > 1:
        shapes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), (heads, r, p))
    for name, shape in shapes.items():
        yield _one(f"mixer.{name}", f"mixer.{name}", *shape, dtype="F32")
    for name in ("B", "C"):
        yield _one(f"mixer.{name}_norm.weight", f"mixer.{name}_norm.weight", n)
    yield _one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


def _m2rnn(c: Config) -> Iterator[Tensor]:
    b, h = c["m2rnn"], c["hidden_size"]
    heads, inner = b["heads"], b["heads"] * b["v_dim"]
    convolved = {"q": b["k_dim"], "k": b["k_dim"], "v": inner}
    yield _packed("mixer.in_proj.weight", "mixer.in_proj.weight", {**convolved, "gate": inner, "forget": heads}, h)
    yield _packed("mixer.conv_weight", "mixer.conv1d_weight", convolved, 1, b["conv_width"])
    yield _packed("mixer.conv_bias", "mixer.conv1d_bias", convolved)
    yield _one("mixer.norm_weight", "mixer.norm_weight", inner)
    yield _one("mixer.state_weight", "mixer.state_weight", heads, b["v_dim"], b["v_dim"], dtype="F32")
    for name, size in (("D", inner), ("A_log", heads), ("dt_bias", heads)):
        yield _one(f"mixer.{name}", f"mixer.{name}", size, dtype="F32")
    yield _one("mixer.out.weight", "mixer.out_proj.weight", h, inner)


LAYERS = {
    "attention": _attention, "mla": _mla, "dsa": _mla, "moe": _moe, "mlp": _mlp,
    "mamba2": _mamba2, "gdn": _gdn, "mamba3": _mamba3, "m2rnn": _m2rnn,
}  # fmt: skip
