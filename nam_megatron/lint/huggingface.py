"""A config.json of Hugging Face as Megatron's arguments: models of the architectures that presets of ours have.

A key that decides the model and is missing is refused: transformers would take a default of its version, which the file does not say.
What no argument of Megatron says is listed, as is every key that is not read. Names and meanings: transformers 5.12.1,
models/*/configuration_*.py.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nam_megatron.errors import Problem, Refused

Words = Iterator[str]
MOST = 10_000  # layers
# Of generation, files and versions: no part of the model.
NEVER_READ = {
    "architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "pretraining_tp", "output_router_logits", "ep_size", "quantization_config", "_name_or_path", "num_logits_to_keep",
    "use_mamba_kernels", "rescale_prenorm_residual", "chunk_size", "max_window_layers", "layer_types", "full_attention_interval", "expand",
    "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_ssm_cache_dtype", "sliding_window", "residual_in_fp32",
}  # fmt: skip


class Said:
    """The keys of a config, and which were read. left: what Megatron's arguments cannot say."""

    def __init__(self, root: Mapping[str, Any], name: str):
        self.root, self.name = root, name
        self.read: set[str] = set()
        self.left: list[str] = []

    def get(self, key: str, otherwise: Any = None) -> Any:
        self.read.add(key)
        return self.root.get(key, otherwise)

    def need(self, *keys: str) -> Any:
        """The value under the first of these names that stands.

        Raises:
            Refused: none does.
        """
        found = [self.get(key) for key in keys]
        value = next((v for v in found if v is not None), None)
        if value is None:
            hint = "give the whole file: a default of transformers' would be a guess"
            raise Refused(Problem(f"`{self.name}` does not say `{keys[0]}`", keys[0], hint))
        return value

    def number(self, *keys: str) -> Any:
        value = self.need(*keys)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Refused(Problem(f"`{keys[0]}` is {value!r} in `{self.name}`, no number", keys[0]))
        return value

    def off(self, *keys: str) -> None:
        """Keys whose only value here is nothing; another is listed."""
        for key in keys:
            if self.get(key):
                self.left.append(f"`{key}: {self.root[key]}`")


def config(text: str) -> dict[str, Any] | None:
    """The text as a config.json; None if it is none. YAML reads 1e-05 as a word, so JSON alone will do."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return root if isinstance(root.get("model_type"), str) and "vocab_size" in root else None


def words(root: Mapping[str, Any], name: str) -> tuple[list[str], list[str]]:
    """Megatron's words for a config, and what they leave out.

    Raises:
        Refused: an architecture that is not read, or a key that is missing.
    """
    kind = str(root["model_type"])
    if kind not in KINDS:
        raise Refused(
            Problem(
                f"`{kind}` in `{name}` is no architecture that is read",
                "model_type",
                f"there are: {', '.join(sorted(KINDS))}",
            )
        )
    said = Said(root, name)
    try:
        found = [*_common(said), *KINDS[kind](said)]
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as err:  # a key of another shape
        raise Refused(Problem(f"`{name}` is no config.json of `{kind}`: {err}", "model_type")) from None
    if unread := sorted(root.keys() - said.read - NEVER_READ):
        said.left.append(f"keys that are not read: {', '.join(unread)}")
    return found, said.left


def _common(s: Said) -> Words:
    yield from (
        "--hidden-size",
        str(s.number("hidden_size")),
        "--num-attention-heads",
        str(s.number("num_attention_heads")),
    )
    yield from ("--max-position-embeddings", str(s.number("max_position_embeddings")))
    yield from ("--vocab-size", str(s.number("vocab_size")), "--padded-vocab-size", str(s.number("vocab_size")))
    yield from (
        "--normalization",
        "RMSNorm",
        "--norm-epsilon",
        str(s.number("rms_norm_eps", "layer_norm_epsilon", "norm_eps")),
    )
    yield from ("--disable-bias-linear", "--hidden-dropout", str(s.get("hidden_dropout", 0.0)))
    yield from (
        "--attention-dropout",
        str(s.get("attention_dropout", 0.0)),
        "--init-method-std",
        str(s.number("initializer_range")),
    )
    if not s.need("tie_word_embeddings"):
        yield "--untie-embeddings-and-output-weights"
    s.off("mlp_bias", "use_bias", "mamba_proj_bias", "use_sliding_window")
    s.left += list(_elsewhere(s.root))
    act = s.need("hidden_act", "mlp_hidden_act")
    if act not in ("silu", "relu2"):
        s.left.append(f"`hidden_act: {act}`")
    yield "--swiglu" if act == "silu" else "--squared-relu"


def _elsewhere(root: Mapping[str, Any]) -> Words:
    """Keys that some architectures read: what they say in another is listed."""
    kind = root["model_type"]
    if kind != "mixtral" and root.get("sliding_window") and root.get("use_sliding_window", True):
        yield f"`sliding_window: {root['sliding_window']}`"
    if kind != "qwen3_next" and (others := {*(root.get("layer_types") or ())} - {"full_attention"}):
        yield f"`layer_types`: {', '.join(map(str, sorted(others)))}"
    if (limits := root.get("time_step_limit")) and [float(x) for x in limits] != [0.0, float("inf")]:
        yield f"`time_step_limit: {limits}`"
    if root.get("residual_in_fp32"):
        yield "`residual_in_fp32: true`"


def _layers(s: Said) -> int:
    layers = s.number("num_hidden_layers")
    if not 0 < layers < MOST:
        raise ValueError(f"num_hidden_layers of {layers}")
    return layers


def _heads(s: Said) -> Words:
    heads, groups = s.number("num_attention_heads"), s.number("num_key_value_heads")
    if heads != groups:
        yield from ("--group-query-attention", "--num-query-groups", str(groups))
    width = s.get("head_dim") or s.get("attention_head_dim") or s.number("hidden_size") // heads
    yield from ("--kv-channels", str(width))


def _angles(s: Said) -> tuple[Words, Mapping[str, Any], str | None]:
    """Rotary embedding under its old keys or transformers 5's: the words of its base, how it is scaled, and the kind of that."""
    parameters = s.get("rope_parameters") or {}
    scaling = s.get("rope_scaling") or (parameters if parameters.get("rope_type", "default") != "default" else {})
    base = parameters.get("rope_theta") or s.number("rope_theta")
    found = iter(("--position-embedding-type", "rope", "--rotary-base", str(int(base))))
    return found, scaling, scaling.get("rope_type") or scaling.get("type")


def _rope(s: Said) -> Words:
    """Rotary embedding with Llama's scaling."""
    base, scaling, kind = _angles(s)
    yield from base
    parts = (s.get("partial_rotary_factor"), (s.get("rope_parameters") or {}).get("partial_rotary_factor"))
    if (part := next((part for part in parts if part is not None), 1.0)) != 1.0:
        yield from ("--rotary-percent", str(part))
    if kind == "llama3":
        yield from ("--use-rope-scaling", "--rope-scaling-factor", str(scaling.get("factor")))
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        s.left += [
            f"`rope_scaling.{k}: {scaling.get(k)}`: {v} is built" for k, v in usual.items() if scaling.get(k) != v
        ]
    elif kind:
        s.left.append(f"`rope_scaling` of type {kind}")


def _blocks(s: Said, qkv_bias: bool = False) -> Words:
    """Blocks of attention and a feed-forward layer."""
    yield from ("--num-layers", str(_layers(s)), "--ffn-hidden-size", str(s.number("intermediate_size")))
    yield from _heads(s)
    yield from _rope(s)
    if s.get("attention_bias") and qkv_bias:
        yield "--add-qkv-bias"
    elif s.get("attention_bias"):
        s.left.append("`attention_bias: true`: it biases the output projection, too")


def _routed(s: Said, experts: str, width: str, balance: str | None) -> Words:
    yield from ("--num-experts", str(s.number(experts)), "--moe-router-topk", str(s.number("num_experts_per_tok")))
    yield from ("--moe-ffn-hidden-size", str(s.number(width)), "--moe-router-dtype", "fp32", "--moe-grouped-gemm")
    yield from ("--moe-token-dispatcher-type", "alltoall")
    s.left.append("no key says the router's dtype, the dispatcher and the kernels of experts: fp32, alltoall, grouped")
    if balance is not None and (coefficient := s.get(balance)) is not None:
        kind = "seq_aux_loss" if s.get("seq_aux") else "aux_loss"
        yield from ("--moe-router-load-balancing-type", kind, "--moe-aux-loss-coeff", str(coefficient))
    else:
        yield from ("--moe-router-load-balancing-type", "none")
        s.left.append("no key says a loss that balances the experts: none")


def _softmax(s: Said) -> Words:
    """Softmax over all and shares as they are, or over the chosen."""
    yield from ("--moe-router-score-function", "softmax")
    if not s.need("norm_topk_prob"):
        yield "--moe-router-pre-softmax"


def _sigmoid(s: Said) -> Words:
    yield from ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    if s.get("norm_topk_prob") is False:
        s.left.append("`norm_topk_prob: false`: Megatron's shares of sigmoid scores sum to one")


def _groups(s: Said) -> Words:
    groups, chosen = s.get("n_group") or 1, s.get("topk_group") or 1
    if groups > 1 and chosen < groups:
        yield from ("--moe-router-num-groups", str(groups), "--moe-router-group-topk", str(chosen))
    if (scale := s.get("routed_scaling_factor") or 1.0) != 1.0:
        yield from ("--moe-router-topk-scaling-factor", str(scale))


def _llama(s: Said) -> Words:
    yield from _blocks(s)


def _mixtral(s: Said) -> Words:
    yield from _blocks(s)
    if window := s.root.get("sliding_window"):
        yield from ("--window-size", f"{window - 1},0")
    yield from _routed(s, "num_local_experts", "intermediate_size", "router_aux_loss_coef")
    yield from ("--moe-router-score-function", "softmax")
    s.off("router_jitter_noise")


def _dense_first(s: Said) -> Words:
    dense, every = s.number("first_k_dense_replace"), s.get("moe_layer_freq", 1)
    frequency = [int(i >= dense and i % every == 0) for i in range(_layers(s))]
    yield from ("--moe-layer-freq", str(frequency).replace(" ", ""))


def _qwen(s: Said) -> Words:
    step, plain = s.get("decoder_sparse_step", 1), s.get("mlp_only_layers") or []
    frequency = [int((i + 1) % step == 0 and i not in plain) for i in range(_layers(s))]
    if not all(frequency):
        yield from ("--moe-layer-freq", str(frequency).replace(" ", ""))
    yield from _routed(s, "num_experts", "moe_intermediate_size", "router_aux_loss_coef")
    yield from _softmax(s)
    yield "--qk-layernorm"


def _qwen3_moe(s: Said) -> Words:
    yield from _blocks(s)
    yield from _qwen(s)


def _qwen3_next(s: Said) -> Words:
    yield from _blocks(s)
    yield from _qwen(s)
    kinds = s.root.get("layer_types")
    if kinds is None:
        every = s.number("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(_layers(s))]
    linear = [int(kind == "linear_attention") for kind in kinds]
    yield from (
        "--experimental-attention-variant",
        "gated_delta_net",
        "--linear-attention-freq",
        str(linear).replace(" ", ""),
    )
    for ours, theirs in (("key-head-dim", "key_head_dim"), ("value-head-dim", "value_head_dim"), ("num-key-heads", "num_key_heads"),
                         ("num-value-heads", "num_value_heads"), ("conv-kernel-dim", "conv_kernel_dim")):  # fmt: skip
        yield from (f"--linear-{ours}", str(s.number(f"linear_{theirs}")))
    yield from ("--attention-output-gate", "--apply-layernorm-1p", "--moe-shared-expert-gate")
    yield from ("--moe-shared-expert-intermediate-size", str(s.number("shared_expert_intermediate_size")))


def _shared(s: Said) -> Words:
    if shared := s.get("n_shared_experts"):
        yield from ("--moe-shared-expert-intermediate-size", str(shared * s.number("moe_intermediate_size")))


def _depths(s: Said) -> None:
    if depths := s.get("num_nextn_predict_layers"):
        s.left.append(f"`num_nextn_predict_layers: {depths}`: that layer has experts, which MTP here has not")


def _deepseek(s: Said) -> Words:
    yield from ("--num-layers", str(_layers(s)), "--ffn-hidden-size", str(s.number("intermediate_size")))
    yield from ("--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", str(s.number("kv_lora_rank")))
    if "q_lora_rank" not in s.root:
        s.need("q_lora_rank")
    if (rank := s.get("q_lora_rank")) is not None:
        yield from ("--q-lora-rank", str(rank))
    for flag, key in (
        ("qk-head-dim", "qk_nope_head_dim"),
        ("qk-pos-emb-head-dim", "qk_rope_head_dim"),
        ("v-head-dim", "v_head_dim"),
    ):
        yield from (f"--{flag}", str(s.number(key)))
    s.get("num_key_value_heads"), s.get("head_dim"), s.get("qk_head_dim"), s.get("rope_interleave")
    base, scaling, kind = _angles(s)
    yield from base
    if kind == "yarn":
        yield from ("--rope-type", "yarn", "--rotary-scaling-factor", str(float(scaling["factor"])))
        yield from (
            "--mscale",
            str(scaling.get("mscale", 1.0)),
            "--mscale-all-dim",
            str(scaling.get("mscale_all_dim", 0.0)),
        )
        own = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
        for key, fixed in own.items():
            if scaling.get(key, fixed) != fixed:
                yield from (f"--yarn-{key.replace('_', '-')}", str(scaling[key]))
    else:
        yield from ("--rope-type", "rope")
        if kind:
            s.left.append(f"`rope_scaling` of type {kind}")
    yield "--no-rope-fusion"
    s.off("attention_bias")
    if s.get("n_routed_experts"):
        yield from _dense_first(s)
        yield from _routed(s, "n_routed_experts", "moe_intermediate_size", "aux_loss_alpha")
        yield from _shared(s)
        yield from _groups(s)
        scores, method = s.get("scoring_func"), s.get("topk_method")
        v3 = s.root["model_type"] != "deepseek_v2"
        if (scores or ("sigmoid" if v3 else "softmax")) == "sigmoid":
            yield from _sigmoid(s)
        else:
            yield from _softmax(s)
        if method == "group_limited_greedy":
            s.left.append(
                "`topk_method: group_limited_greedy`: it ranks groups by their best expert, Megatron by the sum of their best"
            )
    _depths(s)


def _glm4_moe(s: Said) -> Words:
    yield from _blocks(s, qkv_bias=True)
    if s.get("use_qk_norm"):
        yield "--qk-layernorm"
    yield from _dense_first(s)
    yield from _routed(s, "n_routed_experts", "moe_intermediate_size", None)
    yield from _shared(s)
    yield from _groups(s)
    yield from _sigmoid(s)
    _depths(s)


def _nemotron_h(s: Said) -> Words:
    pattern = s.need("hybrid_override_pattern")
    s.get("num_hidden_layers")
    yield f"--hybrid-layer-pattern={pattern}"
    yield from _heads(s)
    yield from ("--position-embedding-type", "none", "--ffn-hidden-size", str(s.number("intermediate_size")))
    for flag, key in (
        ("num-heads", "mamba_num_heads"),
        ("head-dim", "mamba_head_dim"),
        ("state-dim", "ssm_state_size"),
        ("num-groups", "n_groups"),
    ):
        yield from (f"--mamba-{flag}", str(s.number(key)))
    s.off("attention_bias", "num_nextn_predict_layers")
    for key, usual in (("conv_kernel", 4), ("use_conv_bias", True), ("mamba_hidden_act", "silu")):
        if s.get(key, usual) != usual:
            s.left.append(f"`{key}: {s.root[key]}`: {usual} is built")
    if "E" in pattern:
        yield from _routed(s, "n_routed_experts", "moe_intermediate_size", None)
        if s.get("moe_latent_size"):
            yield from ("--moe-latent-size", str(s.number("moe_latent_size")))
        if s.get("n_shared_experts"):
            yield from ("--moe-shared-expert-intermediate-size", str(s.number("moe_shared_expert_intermediate_size")))
        yield from _groups(s)
        yield from _sigmoid(s)


KINDS: Mapping[str, Callable[[Said], Words]] = {
    "llama": _llama, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "qwen3_next": _qwen3_next, "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek, "kimi_k2": _deepseek, "glm4_moe": _glm4_moe, "nemotron_h": _nemotron_h,
}  # fmt: skip
