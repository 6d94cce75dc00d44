"""What a NAM model computes, as config.json says it. Imports transformers alone."""

from typing import NamedTuple

from transformers import PretrainedConfig

KINDS = ("attention", "mla", "dsa", "moe", "mlp", "mamba2", "gdn", "mamba3", "m2rnn")
NEEDS = {"dsa": ("mla",)}
MOST = 2**31 - 1  # of any size
MOST_LAYERS = 4096  # each is a module, which takes a millisecond to make


class Number(NamedTuple):
    """A real number of these bounds."""

    least: float
    most: float = MOST


# Sizes and choices of a kind, by type; a list has the values that a key may have, and a float is between 0 and 1.
BLOCKS = {
    "attention": {
        "head_dim": int, "query_groups": int, "qk_norm": bool, "qkv_bias": bool, "output_gate": bool, "rotary_dim": int,
        "window": int, "unwindowed_every": int, "sinks": bool,
    },
    "mla": {
        "q_lora_rank": int, "kv_lora_rank": int, "qk_head_dim": int, "qk_rope_head_dim": int, "v_head_dim": int,
        "latent_norm": bool, "latent_norm_epsilon": float,
    },
    "dsa": {"indexer_heads": int, "indexer_head_dim": int, "top_k": int},
    "moe": {
        "experts": int, "top_k": int, "expert_hidden_size": int, "shared_expert_hidden_size": int,
        "shared_expert_gate": bool, "score_function": ["sigmoid", "softmax"], "expert_bias": bool, "pre_softmax": bool,
        "routed_scaling": Number(1e-30), "groups": int, "chosen_groups": int, "latent_size": int,
        "router_dtype": ["fp32", "fp64", None],
    },
    "mlp": {},
    "mamba2": {"heads": int, "head_dim": int, "state_dim": int, "groups": int, "conv_width": int},
    "gdn": {"key_heads": int, "key_head_dim": int, "value_heads": int, "value_head_dim": int, "conv_width": int},
    "mamba3": {"heads": int, "head_dim": int, "state_dim": int, "groups": int, "mimo_rank": int, "angles": int},
    "m2rnn": {"k_dim": int, "v_dim": int, "heads": int, "conv_width": int},
}  # fmt: skip
MODEL = {
    "vocab_size": int, "hidden_size": int, "ffn_hidden_size": int, "num_attention_heads": int,
    "max_position_embeddings": int, "learned_positions": int, "normalization": ["RMSNorm", "LayerNorm"],
    "norm_epsilon": float, "zero_centered_norms": bool, "linear_bias": bool,
    "activation": ["squared_relu", "swiglu", "gelu", "quick_geglu"],
    "glu_offset": Number(-MOST), "activation_clamp": Number(0), "rotary_base": int,
}  # fmt: skip
# What exports computed before they had a key for it. An epsilon of latents was the model's.
BEFORE = {"glu_offset": 0.0, "activation_clamp": 0.0}
BEFORE_IN = {"attention": {"sinks": False}}
# Residual streams (mHC), where a model has several.
STREAMS = {"streams": int, "sinkhorn_steps": int, "epsilon": float}
# Embeddings of n-grams, where a model has them. document_end: a token, or null.
NGRAMS = {"order": int, "heads": int, "buckets": int, "width": int}
# Scaled angles: YaRN's, or Llama-3.1's.
YARN = {
    "factor": Number(1), "original_length": int, "beta_fast": Number(1e-30), "beta_slow": Number(1e-30), "mscale": Number(0),
    "mscale_all_dim": Number(0), "rounded": bool,
}  # fmt: skip
LLAMA_ROPE = {"factor": Number(1)}
OPTIONAL = ("mhc", "ngrams", "yarn", "llama_rope")
COMPUTES = {*MODEL, *KINDS, *OPTIONAL, "layer_kinds", "index_sources", "mtp_kinds", "mtp_depths", "tie_word_embeddings"}
# What engines ask a config for by names of their own; it follows from the rest.
DERIVED = ("num_key_value_heads", "head_dim", "layers_block_type")
REMEMBER = {"mla": "attention", "dsa": "attention"} | dict.fromkeys(("mamba2", "gdn", "mamba3", "m2rnn"), "mamba")
MAY_BE_ZERO = (
    "shared_expert_hidden_size", "rotary_dim", "window", "unwindowed_every", "latent_size", "learned_positions", "q_lora_rank",
)  # fmt: skip


class NamConfig(PretrainedConfig):
    """layer_kinds: the kind of each layer. index_sources: for a DSA layer that reuses a top-k the layer, from 0, that computes it;
    else null. mtp_kinds: the layers of one MTP depth. Of each kind that stands a mapping of its sizes, under its name. mhc: sizes of the
    residual streams, or null for the plain residual. ngrams: sizes of the embeddings of n-grams, or null for none. yarn, llama_rope: how
    RoPE's angles are scaled, or null for plain ones. What may be left out of a layer has size 0.

    Raises:
        ValueError: a key is missing, unknown to the kind, of another type or out of range; it is named.
    """

    model_type = "nam"

    def __init__(
        self,
        layer_kinds=None,
        index_sources=None,
        mtp_kinds=(),
        mtp_depths=0,
        tie_word_embeddings=False,
        mhc=None,
        ngrams=None,
        yarn=None,
        llama_rope=None,
        **keys,
    ):
        given = {name: keys.pop(name) for name in MODEL if name in keys}
        blocks = {kind: keys.pop(kind) for kind in KINDS if keys.get(kind) is not None}
        for kind in KINDS:
            keys.pop(kind, None)
        keys.pop("num_hidden_layers", None)
        if stray := [name for name in DERIVED if name in keys]:
            raise ValueError(f"{stray[0]}: it follows from the layers")
        if layer_kinds is None:  # transformers makes a default of every config, to write only what differs
            assert not given and not blocks, "layer_kinds: missing"
            layer_kinds = []
        else:
            given = BEFORE | given
            blocks = {k: BEFORE_IN.get(k, {}) | b if isinstance(b, dict) else b for k, b in blocks.items()}
            if isinstance(latent := blocks.get("mla"), dict):
                latent.setdefault("latent_norm_epsilon", given.get("norm_epsilon"))
            _check(layer_kinds, index_sources, mtp_kinds, mtp_depths, tie_word_embeddings, given, blocks)
            if mhc is not None:
                _check_block("mhc", mhc, STREAMS)
                _check_most("mhc", mhc, streams=8, sinkhorn_steps=1000)
            if ngrams is not None:
                _check_ngrams(ngrams, given["vocab_size"])
            _check_angles(yarn, llama_rope, given["rotary_base"])
        self.layer_kinds, self.mtp_kinds, self.mtp_depths = list(layer_kinds), list(mtp_kinds), mtp_depths
        self.index_sources = list(index_sources or [])
        self.num_hidden_layers, self.mhc, self.ngrams = len(self.layer_kinds), mhc, ngrams
        self.yarn, self.llama_rope = yarn, llama_rope
        for name in MODEL:
            setattr(self, name, given.get(name))
        for kind in KINDS:
            setattr(self, kind, blocks.get(kind))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **keys)

    @property
    def num_key_value_heads(self):
        """Of plain attention; without any, as many as there are heads."""
        return self.attention["query_groups"] if self.attention else self.num_attention_heads

    @property
    def head_dim(self):
        """Of plain attention; None without any."""
        return self.attention["head_dim"] if self.attention else None

    @property
    def layers_block_type(self):
        """What each layer remembers of a sequence: `attention`, what grows with it; `mamba`, a state; else its kind, and nothing."""
        return [REMEMBER.get(kind, kind) for kind in self.layer_kinds]

    def to_dict(self):
        return {k: v for k, v in super().to_dict().items() if k not in (*KINDS, *OPTIONAL) or v is not None}


def _check(kinds, sources, mtp, depths, tied, given, blocks):
    if missing := [name for name in MODEL if name not in given]:
        raise ValueError(f"{missing[0]}: missing")
    for name, kind in MODEL.items():
        _typed(name, given[name], kind)
    for name, value in (("layer_kinds", kinds), ("mtp_kinds", mtp)):
        if not isinstance(value, (list, tuple)) or not all(isinstance(k, str) and k in KINDS for k in value):
            raise ValueError(f"{name}: a list of {', '.join(KINDS)}, not {str(value)[:80]}")
    if not kinds or len(kinds) > MOST_LAYERS:
        raise ValueError(f"layer_kinds: {f'{len(kinds)} layers, and at most {MOST_LAYERS}' if kinds else 'empty'}")
    if type(depths) is not int or not 0 <= depths <= 64 or bool(depths) != bool(mtp) or len(mtp) > MOST_LAYERS // 64:
        raise ValueError(f"mtp_depths: {depths} for {len(mtp)} kinds")
    if type(tied) is not bool:
        raise ValueError(f"tie_word_embeddings: true or false, not {tied!r}")
    standing = {*kinds, *mtp}
    needed = standing | {n for kind in standing for n in NEEDS.get(kind, ())}
    if stray := sorted(blocks.keys() - needed):
        raise ValueError(f"{stray[0]}: no layer is of this kind")
    for kind in sorted(needed):
        _check_block(kind, blocks.get(kind), BLOCKS[kind])
    if not isinstance(sources, (list, tuple)) or len(sources) != len(kinds):
        raise ValueError("index_sources: one entry for each layer")
    for layer, source in enumerate(sources):
        fits = source is None or (
            type(source) is int
            and 0 <= source < layer
            and kinds[layer] == kinds[source] == "dsa"
            and sources[source] is None
        )
        if not fits:
            raise ValueError(f"index_sources[{layer}]: {source} is no DSA layer before it that computes its top-k")
    _check_sums(given, blocks)
    if given["linear_bias"] and (unbiased := sorted(needed & {"mla", "dsa"})):
        raise ValueError(f"linear_bias: none beside {unbiased[0]}")
    if 0 < given["learned_positions"] < given["max_position_embeddings"]:
        raise ValueError(
            f"learned_positions: {given['learned_positions']} of {given['max_position_embeddings']} positions"
        )
    if mtp and given["learned_positions"]:
        raise ValueError("learned_positions: none beside MTP")
    if mtp and (b := blocks.get("attention")) and b["unwindowed_every"]:
        raise ValueError("attention.unwindowed_every: none beside MTP")


def _check_block(kind, block, keys):
    if not isinstance(block, dict):
        raise ValueError(f"{kind}: missing" if block is None else f"{kind}: a mapping, not {str(block)[:80]}")
    if stray := sorted(block.keys() - keys.keys()):
        raise ValueError(f"{kind}.{stray[0]}: unknown key")
    for name, of in keys.items():
        if name not in block:
            raise ValueError(f"{kind}.{name}: missing")
        _typed(f"{kind}.{name}", block[name], of)


def _check_ngrams(ngrams, vocabulary):
    end = ngrams.get("document_end") if isinstance(ngrams, dict) else None
    sizes = {k: v for k, v in ngrams.items() if k != "document_end"} if isinstance(ngrams, dict) else ngrams
    _check_block("ngrams", sizes, NGRAMS)
    if end is not None and not (type(end) is int and 0 <= end < vocabulary):
        raise ValueError(f"ngrams.document_end: a token below {vocabulary} or null, not {str(end)[:80]}")
    _check_most("ngrams", ngrams, order=8, heads=1024)
    if ngrams["order"] < 2:
        raise ValueError("ngrams.order: 2 or more")


def _check_angles(yarn, llama, base):
    if yarn is not None:
        _check_block("yarn", yarn, YARN)
        if base == 1:
            raise ValueError("rotary_base: more than 1 beside YaRN")
    if llama is not None:
        _check_block("llama_rope", llama, LLAMA_ROPE)
        if yarn is not None:
            raise ValueError("llama_rope: none beside YaRN")


def _check_most(kind, block, **most):
    """What a forward pass counts through."""
    for name, limit in most.items():
        if block[name] > limit:
            raise ValueError(f"{kind}.{name}: at most {limit}, not {block[name]}")


def _check_sums(m, blocks):
    def divides(what, whole, part):
        if whole % part:
            raise ValueError(f"{what}: {part} does not divide {whole}")

    if b := blocks.get("attention"):
        divides("attention.query_groups", m["num_attention_heads"], b["query_groups"])
        divides("attention.rotary_dim", b["rotary_dim"], 2)
        if b["rotary_dim"] > b["head_dim"]:
            raise ValueError(f"attention.rotary_dim: {b['rotary_dim']} columns of a head of {b['head_dim']}")
    if b := blocks.get("mla"):
        divides("mla.qk_rope_head_dim", b["qk_rope_head_dim"], 2)
        if (d := blocks.get("dsa")) and d["indexer_head_dim"] < b["qk_rope_head_dim"]:
            raise ValueError("dsa.indexer_head_dim: narrower than mla.qk_rope_head_dim")
        if d and not b["q_lora_rank"]:
            raise ValueError("mla.q_lora_rank: the indexer of DSA reads the query latent")
    if b := blocks.get("moe"):
        if b["top_k"] > b["experts"]:
            raise ValueError(f"moe.top_k: {b['top_k']} of {b['experts']} experts")
        divides("moe.groups", b["experts"], b["groups"])
        divides("moe.chosen_groups", b["top_k"], b["chosen_groups"])
        if b["chosen_groups"] > b["groups"] or b["top_k"] > b["chosen_groups"] * (b["experts"] // b["groups"]):
            raise ValueError(
                f"moe.chosen_groups: {b['chosen_groups']} of {b['groups']} groups for {b['top_k']} experts"
            )
        if b["shared_expert_gate"] and not b["shared_expert_hidden_size"]:
            raise ValueError("moe.shared_expert_gate: there is no shared expert")
    if b := blocks.get("gdn"):
        divides("gdn.key_heads", b["value_heads"], b["key_heads"])
    for kind in ("mamba2", "mamba3"):
        if b := blocks.get(kind):
            divides(f"{kind}.groups", b["heads"], b["groups"])
    if (b := blocks.get("mamba3")) and (b["state_dim"] % 2 or b["angles"] > b["state_dim"] // 2):
        raise ValueError(f"mamba3.angles: {b['angles']} of {b['state_dim']} columns")


def _typed(name, value, kind):
    if isinstance(kind, list):
        if value not in kind:
            raise ValueError(f"{name}: one of {', '.join(map(str, kind))}, not {str(value)[:80]}")
    elif isinstance(kind, Number):
        if type(value) not in (int, float) or not kind.least <= value <= kind.most:
            raise ValueError(f"{name}: a number from {kind.least:g} to {kind.most:g}, not {str(value)[:80]}")
    elif kind is bool:
        if type(value) is not bool:
            raise ValueError(f"{name}: true or false, not {str(value)[:80]}")
    elif kind is float:
        if type(value) not in (int, float) or not 0 < value < 1:
            raise ValueError(f"{name}: between 0 and 1, not {str(value)[:80]}")
    elif type(value) is not int or not (name.rpartition(".")[2] not in MAY_BE_ZERO) <= value <= MOST:
        raise ValueError(f"{name}: a positive integer of 31 bits, not {str(value)[:80]}")
