"""What an export holds: config.json of a plan, and every tensor under its two names, Megatron's and the export's."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nam_megatron.blocks.exported import Config, Tensor, norm, one
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem

# What each kind says of its export, in its folder.
FACETS = {
    kind: import_module(f"nam_megatron.blocks.{kind}.export")
    for kind in KINDS
    if find_spec(f"nam_megatron.blocks.{kind}.export")
}


def objections(plan: Plan, merged: bool = False) -> Iterator[Problem]:
    """Why a plan's model cannot be exported. merged: adapters are put into the weights that they stand on."""
    model = plan.recipe.model
    for seam in plan.not_built:
        yield Problem(f"`{seam.owner}` is not built: {seam.missing}")
    if plan.recipe.feature.lora and not merged:
        text = "a checkpoint of adapters has no other weights"
        yield Problem(text, key="feature.lora.rank", hint="`hf export` puts them into those of the pretrained model")
    for kind in sorted(plan.kinds - FACETS.keys()):
        yield Problem(f"the export has no {KINDS[kind].title}", key=f"model.blocks.{kind}")
    if model.linear_bias and any(getattr(FACETS[kind], "UNBIASED", False) for kind in plan.kinds & FACETS.keys()):
        text = "of biases the export has those of plain attention, dense MLPs and experts"
        yield Problem(text, key="model.linear_bias")
    if plan.recipe.blocks.moe and plan.recipe.blocks.moe.capacity_factor is not None:
        text = "experts with a capacity drop tokens by what else is in the batch, and a decoded token has no batch"
        yield Problem(text, key="model.blocks.moe.capacity_factor")


def config(plan: Plan) -> dict[str, Any]:
    """config.json's keys that compute. Kernels, layouts and whatever else only executes are not there."""
    model = plan.recipe.model
    needed = plan.kinds.union(*(KINDS[kind].needs for kind in plan.kinds))
    blocks = {kind: facet.keys(getattr(plan.recipe.blocks, kind)) for kind, facet in FACETS.items() if kind in needed}
    if b := blocks.get("attention"):
        b["qkv_bias"] |= model.linear_bias
    for b in blocks.values():
        if b.get("latent_norm_epsilon", ...) is None:
            b["latent_norm_epsilon"] = model.norm_epsilon
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
        "glu_offset": model.glu_offset or 0.0,
        "activation_clamp": model.activation_clamp or 0.0,
        "rotary_base": model.rotary_base,
        "tie_word_embeddings": model.tied_embeddings,
        "layer_kinds": [layer.kind for layer in plan.layers],
        "index_sources": [None if layer.source is None else layer.source - 1 for layer in plan.layers],
        "mtp_kinds": list(plan.mtp),
        "mtp_depths": plan.mtp_depths if plan.mtp else 0,
        **blocks,
        **dict(found for f in plan.recipe.feature.all() if (found := f.exported(needed))),
    }


def counted(c: Config) -> dict[str, Any]:
    """A config by dotted key, without what no layer of it reads and what others leave to whoever computes."""
    flat = {
        f"{k}.{n}" if isinstance(v, dict) else k: x
        for k, v in c.items()
        for n, x in (v.items() if isinstance(v, dict) else [("", v)])
    }
    unread = {"moe.router_dtype"}
    if not c["learned_positions"]:
        unread.add("max_position_embeddings")
    if "mlp" not in c["layer_kinds"]:
        unread.add("ffn_hidden_size")
    if not any(c.get("attention", {}).get("rotary_dim", 0) or KINDS[kind].latent for kind in c["layer_kinds"]):
        unread.add("rotary_base")
    return {key: value for key, value in flat.items() if key not in unread}


# Tensors -------------------------------------------------------------------------------------------------------------


def tensors(c: Config) -> Iterator[Tensor]:
    """Every tensor of a model, in the order in which it is written."""
    h = c["hidden_size"]
    yield Tensor("model.embed_tokens.weight", (("embedding.word_embeddings.weight", (c["vocab_size"], h)),))
    if rows := c["learned_positions"]:
        yield one("model.embed_positions.weight", "embedding.position_embeddings.weight", rows, h)
    if b := c.get("ngrams"):
        tables, at = (b["order"] - 1) * b["heads"], "embedding.ngrams."
        yield one("model.ngrams.table", f"{at}table", tables * b["buckets"] * b["width"])
        yield one("model.ngrams.projection.weight", f"{at}projection", h, tables * b["width"])
    for index, kind in enumerate(c["layer_kinds"]):
        computes = c["index_sources"][index] is None
        here, there = f"model.layers.{index}.", f"decoder.layers.{index}."
        yield from _within(here, there, layer(c, kind, computes))
        if c.get("mhc"):
            yield from _within(f"{here}streams.", f"{there}hyper_connection.", _streams(c))
    yield from norm(c, "model.norm", "decoder.final_norm.", h)
    for depth in range(c["mtp_depths"]):
        here, there = f"model.mtp.{depth}.", f"mtp.layers.{depth}."
        yield from norm(c, f"{here}embedding_norm", f"{there}enorm.", h)
        yield from norm(c, f"{here}hidden_norm", f"{there}hnorm.", h)
        yield Tensor(f"{here}join.weight", ((f"{there}eh_proj.weight", (h, 2 * h)),))
        for index, kind in enumerate(c["mtp_kinds"]):
            inner = f"{there}mtp_model_layer.layers.{index}."
            yield from _within(f"{here}layers.{index}.", inner, layer(c, kind, True))
        yield from norm(c, f"{here}norm", f"{there}final_layernorm.", h)
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (("output_layer.weight", (c["vocab_size"], h)),))


def _within(here: str, there: str, inner: Iterator[Tensor]) -> Iterator[Tensor]:
    for tensor in inner:
        parts = tuple((there + key, shape) for key, shape in tensor.parts)
        yield replace(tensor, name=here + tensor.name, parts=parts)


def layer(c: Config, kind: str, computes: bool) -> Iterator[Tensor]:
    """A layer's, its norm first. computes: not a DSA layer that reuses another's top-k."""
    facet = FACETS[kind]
    yield from norm(c, "norm", facet.INPUT_NORM, c["hidden_size"])
    yield from facet.tensors(c)
    if computes and (indexer := getattr(facet, "indexer", None)):
        yield from indexer(c)


def _streams(c: Config) -> Iterator[Tensor]:
    n = c["mhc"]["streams"]
    shapes = {"mapping": (n * (n + 2), n * c["hidden_size"]), "bias": (n * (n + 2),)}
    shapes |= dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), (1,))
    for name, shape in shapes.items():
        yield one(name, "mapping_proj.weight" if name == "mapping" else name, *shape, dtype="F32")
