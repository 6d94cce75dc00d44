"""A config.json of Hugging Face as Megatron's arguments: models of the architectures that presets of ours have.

A key that decides the model and is missing is refused: transformers would take a default of its version, which the file does not say.
So is a value that no argument of Megatron says, by the name of whose lack it is. What training would choose is listed, as is every key that
is not read. Names and meanings: transformers 4's and 5.12.1's, models/*/configuration_*.py.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nam_megatron.errors import Problem, Refused

Words = Iterator[str]
MOST = 10_000  # layers
# Of generation, files and versions: no part of the model.
NEVER_READ = {
    "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "pretraining_tp", "output_router_logits", "ep_size", "quantization_config", "_name_or_path", "num_logits_to_keep",
    "use_mamba_kernels", "rescale_prenorm_residual", "chunk_size", "max_window_layers", "layer_types", "full_attention_interval", "expand",
    "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_ssm_cache_dtype", "sliding_window",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder",
    "problem_type", "moe_shared_expert_overlap", "mtp_layers_block_type", "attn_implementation", "mamba_chunk_size",
    "mtp_hybrid_override_pattern",
}  # fmt: skip


# Whose lack it is that a value cannot be said.
MEGATRON, OURS = "Megatron 0.19.2 has no argument for it", "Megatron may have it; here it is not read"
# Architectures that are asked for and not read, by what is lacking.
LACKS = Path(__file__).with_name("lacks.yaml")

# What a key holds that is no number of 0 or more; of numbers, which need not be whole, and which of those that have to stand may be 0.
FLAG, LIST, TEXT, TABLE = (bool, "true or false"), (list, "a list"), (str, "a word"), (dict, "a table")
HOLD: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "use_sliding_window",
                     "use_qk_norm", "norm_topk_prob", "seq_aux", "use_conv_bias", "mamba_conv_bias", "rope_interleave", "attn_output_gate",
                     "residual_in_fp32", "attention_out_bias", "qkv_bias", "use_qkv_bias", "is_causal", "use_parallel_residual",
                     "qk_layernorm", "indexer_rope_interleave", "qk_norm", "enable_moe_fp32_combine"), FLAG),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers", "time_step_limit", "no_rope_layers",
                     "attn_layer_indices", "architectures", "indexer_types"), LIST),
    **dict.fromkeys(("hidden_act", "mlp_hidden_act", "mamba_hidden_act", "topk_method", "scoring_func", "hybrid_override_pattern",
                     "index_topk_pattern"), TEXT),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), TABLE),
}  # fmt: skip
REAL = {
    "rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps", "initializer_range", "rope_theta", "partial_rotary_factor",
    "hidden_dropout", "attention_dropout", "routed_scaling_factor", "swiglu_limit", "router_aux_loss_coef", "aux_loss_alpha",
    "time_step_min", "router_jitter_noise", "swiglu_alpha", "residual_dropout", "resid_pdrop", "embd_pdrop", "z_loss_coefficient",
    "router_scaling_factor",
}  # fmt: skip
MAY_BE_0 = REAL | {"first_k_dense_replace"}
# Keys without which no model is told, and what Llama was before a key was there.
BASIC = ("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size", "tie_word_embeddings")
OLDER = {"rope_theta": "10000.0", "num_key_value_heads": "as many as `num_attention_heads`"}
# Keys that a dense model has no use for.
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
)
ALIKE = 0.9  # a letter or two of a name


class Said:
    """The keys of a config, and which were read. left: what Megatron's arguments cannot say."""

    def __init__(self, root: Mapping[str, Any], name: str):
        self.root, self.name = root, name
        self.read: set[str] = set()
        self.left: list[str] = []

    def get(self, key: str, otherwise: Any = None) -> Any:
        self.read.add(key)
        self.typed(key)
        return self.root.get(key, otherwise)

    def typed(self, key: str) -> None:
        """Raises Refused: the key holds what no file of transformers' has there."""
        if (value := self.root.get(key)) is None:
            return
        if key in HOLD:
            kind, wanted = HOLD[key]
            good = isinstance(value, kind)
        else:
            wanted = "a number of 0 or more" if key in REAL else "a whole number of 0 or more"
            good = isinstance(value, (int, float) if key in REAL else int) and not isinstance(value, bool)
            good = good and math.isfinite(value) and value >= 0
        if not good:
            raise Refused(Problem(f"`{key}` is {value!r} in `{self.name}`", key=key, hint=f"it is {wanted}"))

    def need(self, *keys: str) -> Any:
        """The value under whichever of these names stands.

        Raises:
            Refused: none does, or two with two values, of which another class takes the other.
        """
        found = {key: value for key in keys if (value := self.get(key)) is not None}
        value = next(iter(found.values()), None)
        if unlike := [key for key in found if found[key] != value]:
            what = f"`{self.name}` has `{next(iter(found))}: {value}` beside `{unlike[0]}: {found[unlike[0]]}`"
            raise Refused(Problem(what, key=unlike[0], hint="leave one of them out"))
        if value is None:
            raise Refused(self.unsaid(keys[0]))
        return value

    def unsaid(self, key: str) -> Problem:
        hint = "add it: transformers has a default of its own, which the file does not say"
        older = self.root["model_type"] == "llama" and OLDER.get(key)
        hint += f"; Llama 1 and 2, which are older than this key, have {older}" if older else ""
        return Problem(f"`{self.name}` does not say `{key}`", key=key, hint=hint)

    def number(self, *keys: str) -> Any:
        value = self.need(*keys)
        if not value and keys[0] not in MAY_BE_0:
            raise Refused(Problem(f"`{keys[0]}` is {value!r} in `{self.name}`", key=keys[0], hint="it is 1 or more"))
        return value

    def off(self, *keys: str) -> None:
        """Keys whose only value here is nothing. Raises Refused: another."""
        for key in keys:
            self.only(key, None, False, 0, 0.0, [])

    def only(self, key: str, *usual: Any, lack: str = MEGATRON) -> None:
        """A key whose values are these, or which is not there; a flag that is null is off. Raises Refused: another."""
        value = self.get(key)
        off = value is None and key in self.root and HOLD.get(key) is FLAG and True in usual
        if off or (value is not None and value not in usual):
            self.refuse(key, f"`{key}: {'null' if off else value}` in `{self.name}`", lack)

    def refuse(self, key: str, what: str, lack: str = MEGATRON) -> NoReturn:
        raise Refused(Problem(f"{what} cannot be said", key=key, hint=lack))


def config(text: str) -> dict[str, Any] | None:
    """The text as a config.json; None if it is none. YAML reads 1e-05 as a word, so JSON alone will do."""
    twice: list[str] = []

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return dict(pairs)

    try:
        root = json.loads(text, object_pairs_hook=table)
    except (ValueError, RecursionError):
        return None
    if not isinstance(root, dict) or "model_type" not in root:
        return None
    if (
        not root.keys() & {"vocab_size", "architectures", "transformers_version", "num_hidden_layers"}
        and _inner(root) is None
    ):
        return None
    if twice:
        raise Refused(Problem(f"`{twice[0]}` stands twice in config.json", key=twice[0], hint="keep one of them"))
    return root


# Under which key a model of several kinds of input publishes the one of text.
INNER = ("text_config", "language_config", "llm_config")


def _inner(root: Mapping[str, Any]) -> str | None:
    return next((key for key in INNER if isinstance(root.get(key), dict) and "vocab_size" in root[key]), None)


def of_text(root: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The text model of a nested config, and what it leaves out."""
    if (key := _inner(root)) is None:
        return root, []
    inner = dict(root[key])
    for shared in (
        "tie_word_embeddings",
        "model_type",
    ):  # which transformers takes from the whole where the part does not say
        if inner.get(shared) is None and root.get(shared) is not None:
            inner[shared] = root[shared]
    if (tied := root.get("tie_word_embeddings")) is not None and tied != inner["tie_word_embeddings"]:
        what = f"`tie_word_embeddings` is {json.dumps(tied)}, and {json.dumps(inner['tie_word_embeddings'])} in `{key}`"
        hint = "say in both what the weights are: transformers 4 takes the text's word, 5 the whole's"
        raise Refused(Problem(what, key="tie_word_embeddings", hint=hint))
    others = sorted(k for k, v in root.items() if k.endswith("_config") and k not in (key, "quantization_config") and v)
    return inner, [f"`{other}`: the model of text alone is described" for other in others]


def words(root: Mapping[str, Any], name: str) -> tuple[list[str], list[str]]:
    """Megatron's words for a config, and what they leave out.

    Raises:
        Refused: an architecture that is not read, or a key that is missing.
    """
    stored, inner, code = root.get("quantization_config"), _inner(root), root.get("auto_map")
    root, beside = of_text(root)
    kind = str(root["model_type"])
    if kind not in KINDS:
        lack = _lack(kind)
        known = f"there are: {', '.join(sorted(KINDS))}"
        raise Refused(
            Problem(f"`{kind}` in `{name}` is no architecture that is read: {lack}", key="model_type", hint=known)
        )
    name = f"{name}: {inner}" if inner else name
    said = Said(_flat(root, name), name)
    said.left += beside
    _of_language(said)
    if stored := stored or root.get("quantization_config"):
        method = (stored.get("quant_method") or stored.get("quant_algo")) if isinstance(stored, dict) else stored
        said.left.append(
            f"`quantization_config`: its weights are published as `{method}`, and a run's are as its precision says"
        )
    if code:
        named = ", ".join(map(str, code.values())) if isinstance(code, dict) else code
        said.left.append(f"`auto_map`: code of its own is not run, and may compute another model: {named}")
    for place in ("rope_parameters", "rope_scaling"):
        table = said.root.get(place)
        if dropped := sorted(table.keys() - {*IN_ROPE}) if isinstance(table, dict) else []:
            said.left.append(f"keys of `{place}` that are not read: {', '.join(dropped)}")
    try:
        found = [*_common(said), *KINDS[kind](said)]
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as err:  # a key of another shape
        raise Refused(Problem(f"`{name}` is no config.json of `{kind}`: {err}", key="model_type")) from None
    unread = sorted(said.root.keys() - said.read - NEVER_READ)
    for key in unread:
        close = difflib.get_close_matches(key, (k for k in said.read if said.root.get(k) is None), 1, ALIKE)
        if close and said.root[key] is not None:
            raise Refused(Problem(f"no `{key}` is read in `{name}`", key=key, hint=f"did you mean `{close[0]}`?"))
    dense = "--num-experts" not in found and kind != "nemotron_h"  # whose pattern says which layers have experts
    if beyond := [key for key in EXPERTS if dense and root.get(key)]:
        what = f"`{name}` says {', '.join(f'`{key}`' for key in beyond)} and is a `{kind}` without experts"
        raise Refused(Problem(what, key=beyond[0], hint="say the number of experts, or leave these out"))
    if unread:
        said.left.append(f"keys that are not read: {', '.join(unread)}")
    return found, said.left


# Ends of the names of classes that are language models, and architectures that go by another's.
LANGUAGE = re.compile(r"(\w+?)(ForCausalLM|ForConditionalGeneration)")
NAMED = {"kimi_k2": "deepseek_v3"}


def _of_language(s: Said) -> None:
    """Raises Refused: the class is no language model of this architecture, such as a draft, a classifier, or an encoder."""
    kind = str(s.root["model_type"])
    plain = NAMED.get(kind, kind).removesuffix("_text").replace("_", "")
    for named in s.get("architectures") or ():
        found = LANGUAGE.fullmatch(str(named))
        if found is None or found[1].replace("_", "").lower() != plain:
            hint = "a draft, a classifier or an encoder is another model; leave the key out if only its name is another"
            what = f"`{named}` in `{s.name}` is no language model of `{kind}`"
            raise Refused(Problem(what, key="architectures", hint=hint))


def _lack(kind: str) -> str:
    """Whose lack it is that an architecture is not read."""
    for whose, whys in yaml.safe_load(LACKS.read_text(encoding="utf-8")).items():
        for why, kinds in whys.items():
            if kind in kinds.split():
                return f"{why}: {MEGATRON if whose == 'megatron' else OURS}"
    return OURS


def _flat(root: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config with what its tables of rotary embedding hold of its own keys, as transformers 5 writes them, in the old place.

    Raises:
        Refused: two places say two things.
    """
    flat = dict(root)
    tables = [
        (place, root[place]) for place in ("rope_parameters", "rope_scaling") if isinstance(root.get(place), dict)
    ]
    for place, table in tables:
        if nested := [key for key, value in table.items() if isinstance(value, dict)]:
            raise Refused(Problem(f"`{place}.{nested[0]}` of `{name}` is for some layers alone", key=place, hint=OURS))
        for key in ("rope_theta", "partial_rotary_factor"):
            if (value := table.get(key)) is not None and flat.setdefault(key, value) != value:
                if flat[key] is not None:
                    what = f"`{name}` has `{key}: {flat[key]}` beside `{place}.{key}: {value}`"
                    raise Refused(Problem(what, key=key, hint="leave one of them out"))
                flat[key] = value
        for key, value in table.items():
            if key not in IN_ROPE and (close := difflib.get_close_matches(key, IN_ROPE, 1, ALIKE)):
                what = f"no `{place}.{key}` is read in `{name}`"
                raise Refused(Problem(what, key=place, hint=f"did you mean `{close[0]}`?"))
            if key in ("rope_type", "type") and not isinstance(value, str | None):
                raise Refused(Problem(f"`{place}.{key}` is {value!r} in `{name}`", key=place, hint="it is a word"))
            if key == "truncate" and not isinstance(value, bool):
                hint = "it is true or false"
                raise Refused(Problem(f"`{place}.{key}` is {value!r} in `{name}`", key=place, hint=hint))
            strange = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
            if key in ROPE_NUMBERS and value is not None and strange:
                raise Refused(Problem(f"`{place}.{key}` is {value!r} in `{name}`", key=place, hint="it is a number"))
    kinds = {table.get("rope_type") or table.get("type") or "default" for _, table in tables}
    if len(kinds) > 1:
        what = f"`{name}` has `rope_parameters` and `rope_scaling` of two types: {', '.join(sorted(map(str, kinds)))}"
        raise Refused(Problem(what, key="rope_scaling", hint="leave one of them out"))
    if len(tables) > 1:
        (_, one), (_, other) = tables
        # transformers 5.12.1 takes one of them alone, and what that lacks from its own defaults.
        if unlike := [key for key in ROPE_NUMBERS if root.get(key) is None and one.get(key) != other.get(key)]:
            what = f"`{name}` has `rope_parameters` and `rope_scaling` with two values of `{unlike[0]}`"
            raise Refused(Problem(what, key="rope_scaling", hint="leave one of them out"))
    return flat


# Keys of these tables: those that are no numbers, and those that are.
ROPE_WORDS = ("rope_type", "type", "truncate", "mrope_section", "mrope_interleaved")
ROPE_NUMBERS = (
    "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
IN_ROPE = ROPE_WORDS + ROPE_NUMBERS


def _numbers(s: Said, *same: str, **keys: str) -> Words:
    """Arguments, and the numbers of the keys that are called like them or given."""
    for flag, key in (dict.fromkeys(same) | keys).items():
        yield from (f"--{flag.replace('_', '-')}", str(s.number(key or flag)))


def _common(s: Said) -> Words:
    _whole(s)
    yield from _numbers(
        s, "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size", padded_vocab_size="vocab_size"
    )
    yield from ("--normalization", "LayerNorm" if s.root["model_type"] in CENTRED else "RMSNorm")
    yield from ("--norm-epsilon", str(s.number("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps")))
    if s.root["model_type"] not in BIASED:
        yield "--disable-bias-linear"
    residual = DROPS.get(s.root["model_type"])
    yield from ("--hidden-dropout", str(s.get(residual, 0.0) if residual else 0.0))
    yield from ("--attention-dropout", str(s.get("attention_dropout", 0.0)))
    if s.get("initializer_range") is not None:
        yield from ("--init-method-std", str(s.number("initializer_range")))
    else:  # as GLM-4.7-Flash: it leaves weights that are read as they are
        s.left.append("no `initializer_range`: the deviation of initial weights is to be given")
    if not s.need("tie_word_embeddings"):
        yield "--untie-embeddings-and-output-weights"
    s.off("mlp_bias", "use_bias", "mamba_proj_bias")
    if s.root["model_type"] not in ASKED:
        s.only("use_sliding_window", False, lack=OURS)
    s.only("is_causal", True)
    _elsewhere(s)
    act, gated = s.need("hidden_act", "mlp_hidden_act"), s.root["model_type"] not in UNGATED
    if act != (usual := "silu" if gated else "relu2"):
        what = f"`{act}` in a {'gated' if gated else 'plain'} MLP of `{s.name}`"
        s.refuse("hidden_act", what, f"{MEGATRON}: {'a gate' if gated else 'this MLP'} has `{usual}`")
    if s.root["model_type"] in BIASED:  # its gate is no plain SiLU, whatever it is called
        yield from ("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "7.0")
    else:
        yield "--swiglu" if gated else "--squared-relu"


UNGATED = {"nemotron_h", "nemotron", "arcee"}
CENTRED = {"nemotron", "stablelm"}  # whose norms take the mean away, and have biases
DROPS = {"seed_oss": "residual_dropout", "nemotron_h": "hidden_dropout", "stablelm": "hidden_dropout"}
# Whose classes turn a part of each head if a key says so; others' turn all of it.
PARTLY = {
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "glm4v_moe_text", "nemotron", "stablelm", "phi3", "glm", "bamba",
}  # fmt: skip
SQUARE = {"helium", "stablelm"}  # whose heads are together as wide as the hidden state
PAIRED = {"helium", "ernie4_5", "glm"}  # which turn neighbouring columns
SEEING = {
    "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text",
}  # fmt: skip
BIASED = {"gpt_oss"}  # with a clamped gate of its own, too
# Keys that a file may leave out and that then have another value in transformers than none: what it builds would be a guess.
LATENT = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "youtu"}
_DEEPSEEK = ("routed_scaling_factor", "n_group", "topk_group", "n_shared_experts")
SAID: Mapping[str, tuple[str, ...]] = {
    "mistral": ("sliding_window",), "mixtral": ("sliding_window",), "qwen3": ("head_dim",), "qwen3_moe": ("head_dim",),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("head_dim", "partial_rotary_factor")),
    **dict.fromkeys(LATENT - {"youtu"}, _DEEPSEEK), "deepseek_v2": (*_DEEPSEEK, "topk_method"),
    "glm_moe_dsa": (*_DEEPSEEK, "indexer_rope_interleave"),
    "gpt_oss": ("head_dim", "sliding_window", "layer_types", "attention_bias", "rope_scaling|rope_parameters"),
    "seed_oss": ("head_dim", "attention_bias", "attention_dropout", "residual_dropout"),
    "glm4_moe": (*_DEEPSEEK, "head_dim", "partial_rotary_factor"), "nemotron_h": ("head_dim|attention_head_dim",),
    "glm4v_moe_text": (*_DEEPSEEK, "partial_rotary_factor", "attention_bias"),
    **dict.fromkeys(("qwen3_vl_text", "helium", "ernie4_5"), ("head_dim",)),
    "glm": ("head_dim", "partial_rotary_factor", "attention_bias"), "nemotron": ("partial_rotary_factor",),
    "stablelm": ("partial_rotary_factor",), "bamba": ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"),
    "solar_open": ("routed_scaling_factor", "n_shared_experts", "head_dim"),  # whose class has one group
    "dots1": (*_DEEPSEEK, "norm_topk_prob"), "cwm": ("head_dim", "sliding_window", "layer_types", "rope_scaling|rope_parameters"),
    "ministral": ("sliding_window", "layer_types"), "phi3": ("sliding_window",),
    "hy_v3": ("head_dim", "num_shared_experts", "router_scaling_factor"),
}  # fmt: skip
# Whose `layer_types` say which layers have a window.
LISTED = {"gpt_oss", "ministral", "cwm", "dots1", "qwen2", "qwen3"}
ASKED = {"qwen2", "qwen3", "qwen3_moe"}  # which have one only where `use_sliding_window` says so
WINDOWED = {"mixtral", "mistral", "phi3", "qwen3_moe", *LISTED}
LINEAR = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
SPARSE = {"deepseek_v32", "glm_moe_dsa"}
FP32 = 3.4e38  # its largest number
INDEXED = {"deepseek_sparse_attention", "indexed_attention"}  # the second since transformers 5.24


def _whole(s: Said) -> None:
    """Raises Refused where the file leaves out keys that decide the model, or a list of layers has another length than there are."""
    root, kind = s.root, s.root["model_type"]
    lacking = [key for key in BASIC if root.get(key) is None]
    lacking += ["num_key_value_heads"] if kind not in LATENT and root.get("num_key_value_heads") is None else []
    lacking += ["rope_theta"] if kind != "nemotron_h" and root.get("rope_theta") is None else []
    said = (names.split("|") for names in SAID.get(kind, ()))
    lacking += [names[0] for names in said if not any(name in root for name in names)]
    if lacking:
        raise Refused([s.unsaid(key) for key in lacking])
    for key in ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "indexer_types"):
        s.typed(key)
        s.typed("num_hidden_layers")
        found, layers = root.get(key), root.get("num_hidden_layers")
        if found is not None and layers is not None and len(found) != layers:
            raise Refused(Problem(f"`{key}` has {len(found)} layers in `{s.name}`, and there are {layers}", key=key))


def _elsewhere(s: Said) -> None:
    """Keys that some architectures read: what they say in another is refused."""
    root, kind = s.root, s.root["model_type"]
    for key in ("sliding_window", "use_sliding_window", "layer_types", "time_step_limit"):
        s.typed(key)
    if kind not in WINDOWED and root.get("sliding_window") and root.get("use_sliding_window", True):
        s.refuse("sliding_window", f"`sliding_window: {root['sliding_window']}` of `{kind}`", OURS)
    full = {"full_attention", *(INDEXED if kind in SPARSE else ())}
    if kind not in LINEAR | LISTED and (others := {*(root.get("layer_types") or ())} - full):
        s.refuse("layer_types", f"`layer_types`: {', '.join(map(str, sorted(others)))}", OURS)
    lowest, highest = [_float(x) for x in root.get("time_step_limit") or (0.0, math.inf)]
    if lowest or highest < FP32:  # steps of which are never above
        s.refuse("time_step_limit", f"`time_step_limit: {root['time_step_limit']}`")


def _float(value: Any) -> float:
    """A number, or transformers 5's word for one that JSON has not."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _layers(s: Said) -> int:
    layers = s.number("num_hidden_layers")
    if not 0 < layers < MOST:
        raise ValueError(f"num_hidden_layers of {layers}")
    return layers


def _numbered(s: Said, key: str) -> list[int]:
    """The layers that a key names by their numbers. Raises Refused: there is no such layer."""
    found = s.get(key) or []
    if strange := [i for i in found if i not in range(_layers(s))]:
        raise Refused(Problem(f"`{key}` of `{s.name}` names no layer: {strange[0]!r}", key=key))
    return found


def _heads(s: Said) -> Words:
    heads, groups = s.number("num_attention_heads"), s.number("num_key_value_heads")
    if heads != groups:
        yield from ("--group-query-attention", "--num-query-groups", str(groups))
    said = [key for key in ("head_dim", "attention_head_dim") if s.get(key) is not None]
    width = s.number(*said) if said else s.number("hidden_size") // heads
    if s.root["model_type"] in SQUARE and width * heads != s.number("hidden_size"):
        s.refuse("head_dim", f"`head_dim: {width}`", "its code has heads that together are as wide as `hidden_size`")
    yield from ("--kv-channels", str(width))


def _angles(s: Said) -> tuple[Words, Mapping[str, Any], str | None]:
    """Rotary embedding under its old keys or transformers 5's: the words of its base, how it is scaled, and the kind of that."""
    parameters = s.get("rope_parameters") or {}
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    scaling = s.get("rope_scaling") or (parameters if named != "default" else {})
    base = s.number("rope_theta")
    if base != int(base):
        s.refuse("rope_theta", f"`rope_theta: {base}`", f"{MEGATRON}: it takes whole numbers")
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None and scaling.get("factor") is not None:
        s.refuse("rope_scaling", "`rope_scaling.factor` without a type of scaling", "say `rope_type`")
    if kind in ("yarn", "llama3"):  # transformers 5.12.1 takes it before the table's
        original = scaling.get("original_max_position_embeddings")
        lack = "it stands beside the one of `rope_scaling`, of another value: leave it out"
        s.only("original_max_position_embeddings", original, lack=lack)
    named = "yarn" if kind == "yarn" and s.root["model_type"] not in LATENT else "rope"  # MLA has a flag of its own
    return iter(("--position-embedding-type", named, "--rotary-base", str(int(base)))), scaling, kind


def _yarn(s: Said, scaling: Mapping[str, Any]) -> Words:
    """YaRN's words but for `mscale`, and for whether its ramp begins and ends at whole columns."""
    for key in ("factor", "original_max_position_embeddings"):
        if (value := scaling.get(key)) is None:
            s.refuse("rope_scaling", f"`rope_scaling` of type yarn without `{key}`", "give the whole file")
        if value < 1:
            s.refuse("rope_scaling", f"`rope_scaling.{key}: {value}`", "it is 1 or more")
    yield from ("--rotary-scaling-factor", str(float(scaling["factor"])))
    own = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    said = {key: fixed if scaling.get(key) is None else scaling[key] for key, fixed in own.items()}
    if not 0 < said["beta_slow"] <= said["beta_fast"]:
        what = f"`rope_scaling.beta_fast: {said['beta_fast']}` beside `beta_slow: {said['beta_slow']}`"
        s.refuse("rope_scaling", what, "both are above 0, and beta_fast is no less")
    for key, fixed in own.items():
        if said[key] != fixed:
            whole = int(said[key]) if said[key] == int(said[key]) else said[key]
            yield from (f"--yarn-{key.replace('_', '-')}", str(whole))


def _plain_yarn(s: Said, scaling: Mapping[str, Any]) -> Words:
    """Of attention that has no latents, as transformers 5.12.1's modeling_rope_utils.py reads it: either both `mscale` or none."""
    yield from _yarn(s, scaling)
    whole, rest, factor = (float(scaling.get(key) or 0) for key in ("mscale", "mscale_all_dim", "factor"))
    whole, rest = (whole, rest) if whole and rest else (1.0, 0.0)
    weight = (0.1 * whole * math.log(factor) + 1) / (0.1 * rest * math.log(factor) + 1)
    if (said := scaling.get("attention_factor")) is not None and not math.isclose(said, weight):
        s.refuse("rope_scaling", f"`rope_scaling.attention_factor: {said}` beside a factor of {factor:g}")
    yield from ("--mscale", str(whole), "--mscale-all-dim", str(rest))
    if scaling.get("truncate") is False:
        yield "--no-yarn-correction-range-round-to-int"


def _rope(s: Said) -> Words:
    """Rotary embedding with Llama's scaling."""
    base, scaling, kind = _angles(s)
    yield from base
    family = s.root["model_type"]
    if family in PAIRED:
        yield "--rotary-interleaved"
    if family not in PARTLY:
        s.only("partial_rotary_factor", 1.0, lack=f"`{family}` turns whole heads, whatever the file says")
    if (part := s.get("partial_rotary_factor")) not in (None, 1.0):
        if not 0 < part < 1:
            s.refuse("partial_rotary_factor", f"`partial_rotary_factor: {part}`", "it is above 0, and no more than 1")
        yield from ("--rotary-percent", str(part))
    if kind == "llama3":
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in usual.items():
            if scaling.get(key) != value:
                s.refuse("rope_scaling", f"`rope_scaling.{key}: {scaling.get(key)}`", f"{MEGATRON}: {value} is built")
        yield from ("--use-rope-scaling", "--rope-scaling-factor", str(scaling["factor"]))
    elif kind == "linear":
        if (factor := float(scaling["factor"])) != int(factor):
            s.refuse("rope_scaling", f"`rope_scaling.factor: {factor}`", f"{MEGATRON}: it takes whole numbers")
        yield from ("--rotary-seq-len-interpolation-factor", str(int(factor)))
    elif kind == "yarn":
        if part not in (None, 1.0):
            s.refuse("partial_rotary_factor", f"YaRN of {part} of a head", f"{MEGATRON}: its YaRN turns whole heads")
        yield from _plain_yarn(s, scaling)
    elif kind not in (None, "default") and (kind != "mrope" or family not in SEEING):  # of text alone it is plain
        s.refuse("rope_scaling", f"`rope_scaling` of type {kind}")


def _all_experts(s: Said) -> bool:
    """Whether no layer is a dense MLP, whose width need not be said then."""
    return s.root["model_type"] in ("qwen3_5_moe_text", "solar_open")


def _blocks(s: Said, qkv_bias: bool = False) -> Words:
    """Blocks of attention and a feed-forward layer."""
    width = s.get("intermediate_size") or (
        s.number("moe_intermediate_size") if _all_experts(s) else s.number("intermediate_size")
    )
    yield from ("--num-layers", str(_layers(s)), "--ffn-hidden-size", str(width))
    yield from _heads(s)
    yield from _rope(s)
    if s.get("attention_bias") and qkv_bias:
        yield "--add-qkv-bias"
    elif s.get("attention_bias"):
        s.refuse("attention_bias", "`attention_bias: true`, which biases the output projection too,")


def _routed(s: Said, experts: tuple[str, ...], width: str, balance: str | None) -> Words:
    count = s.number(*dict.fromkeys((*experts, "n_routed_experts", "num_local_experts", "num_experts")))
    yield from ("--num-experts", str(count), "--moe-router-topk", str(s.number("num_experts_per_tok")))
    yield from ("--moe-ffn-hidden-size", str(s.number(width)), "--moe-router-dtype", "fp32")
    yield from ("--moe-token-dispatcher-type", "alltoall")
    kernels = "one by one, since Megatron's grouped ones take no biases"
    if s.root["model_type"] not in BIASED:
        yield "--moe-grouped-gemm"
        kernels = "grouped"
    s.left.append(
        f"no key says the router's dtype, the dispatcher and the kernels of experts: fp32, alltoall, {kernels}"
    )
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
    if s.get("num_experts_per_tok") != 1:
        s.only("norm_topk_prob", True, lack=f"{MEGATRON}: shares of sigmoid scores sum to one")
    elif s.need("norm_topk_prob"):
        s.refuse(
            "norm_topk_prob",
            f"`norm_topk_prob: true` of one expert a token in `{s.name}`",
            f"{MEGATRON}: it weighs one by its score",
        )


def _groups(s: Said) -> Words:
    groups, chosen = (1 if s.get(key) is None else s.number(key) for key in ("n_group", "topk_group"))
    if s.get("topk_method") == "greedy":  # which looks at no groups
        groups = 1
    if groups > 1 and chosen < groups:
        top, best = s.get("num_experts_per_tok"), 1 if s.get("topk_method") == "group_limited_greedy" else 2
        if top != best * chosen:
            what = f"`topk_group: {chosen}` of `n_group: {groups}`, each ranked by its best {best}, beside top-{top}"
            s.refuse("topk_group", what, f"{MEGATRON}: it ranks a group by its best {top} // {chosen}")
        yield from ("--moe-router-num-groups", str(groups), "--moe-router-group-topk", str(chosen))
    if (scale := s.get("routed_scaling_factor")) not in (None, 1.0):
        yield from ("--moe-router-topk-scaling-factor", str(scale))


def _asked(s: Said) -> Words:
    """Windows of dense Qwens: of the layers from `max_window_layers` on where `layer_types` names none; of those with experts in all."""
    if s.get("use_sliding_window") and "sliding_window" not in s.root:
        raise Refused(s.unsaid("sliding_window"))
    if s.get("sliding_window") is not None and s.need("use_sliding_window"):
        yield from _window(s) if s.root["model_type"] == "qwen3_moe" else _arranged(s)
    elif others := {*(s.get("layer_types") or [])} - {"full_attention"}:
        what = f"`{', '.join(map(str, sorted(others)))}` without a window that is used"
        s.refuse("layer_types", what, "set `use_sliding_window` to true")


def _arranged(s: Said) -> Words:
    """Windows of the layers that `layer_types` names, or that follow on those that have none."""
    kinds = s.get("layer_types") or []
    if not kinds and s.root["model_type"] in ASKED:
        full = min(s.need("max_window_layers"), _layers(s))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (_layers(s) - full)
    if "sliding_attention" in kinds and not s.get("sliding_window"):
        s.refuse("sliding_window", "`sliding_attention` without a `sliding_window`", "give the window's length")
    if others := {*kinds} - {"sliding_attention", "full_attention"}:
        s.refuse("layer_types", f"`layer_types`: {', '.join(map(str, sorted(others)))}", OURS)
    if sliding := [int(kind == "sliding_attention") for kind in kinds] if "sliding_attention" in kinds else []:
        yield from (*_window(s), "--window-attn-skip-freq", str(sliding).replace(" ", ""))


def _window(s: Said) -> Words:
    if (window := s.get("sliding_window")) is not None:
        if not window:
            s.refuse("sliding_window", "`sliding_window: 0`", "say null where there is none")
        yield from ("--window-size", f"{window - 1},0")


def _all(*parts: Callable[[Said], Words]) -> Callable[[Said], Words]:
    """One part behind the other."""
    return lambda s: (word for part in parts for word in part(s))


_mistral = _all(_blocks, _window)


def _mistral_alone(s: Said) -> Words:
    if s.get("layer_types") and s.get("sliding_window"):
        what = "`layer_types` beside the window of `mistral`"
        s.refuse("layer_types", what, "transformers opens it as `ministral`: say that `model_type`, or leave them out")
    yield from _mistral(s)


def _ministral(s: Said) -> Words:
    if s.get("sliding_window"):
        s.need("layer_types")
    yield from (*_blocks(s), *_arranged(s))


def _phi3(s: Said) -> Words:
    yield from _mistral(s)
    s.off("resid_pdrop", "embd_pdrop")
    s.get("original_max_position_embeddings")  # of a scaling that is refused


def _nemotron(s: Said) -> Words:
    yield from _blocks(s)
    yield "--apply-layernorm-1p"


def _stablelm(s: Said) -> Words:
    yield from _blocks(s)
    if s.get("use_qkv_bias"):
        yield "--add-qkv-bias"
    s.off("use_parallel_residual", "qk_layernorm")


def _smollm3(s: Said) -> Words:
    yield from _blocks(s)
    turned = s.need("no_rope_layers")
    s.get("no_rope_layer_interval")
    if len(turned) != _layers(s) or {*turned} - {0, 1}:
        s.refuse("no_rope_layers", f"`no_rope_layers: {turned}`", "it is 1 or 0 for each layer, 1 where RoPE is")
    yield from ("--no-rope-freq", str([1 - int(turns) for turns in turned]).replace(" ", ""))


def _qwen2(s: Said) -> Words:
    yield from _blocks(s)
    if s.get("qkv_bias", True):  # which dense ones' code has without a key
        yield "--add-qkv-bias"


def _seed_oss(s: Said) -> Words:
    yield from _blocks(s, qkv_bias=True)
    s.off("attention_out_bias")
    if s.get("residual_dropout"):
        s.left.append("`residual_dropout`: Megatron's is of the embedding, too")


def _qwen3(s: Said) -> Words:
    yield from _blocks(s)
    yield "--qk-layernorm"


def _mixtral(s: Said) -> Words:
    yield from _mistral(s)
    yield from _routed(s, ("num_local_experts",), "intermediate_size", "router_aux_loss_coef")
    yield from ("--moe-router-score-function", "softmax")
    s.only("router_jitter_noise", 0, 0.0, lack=OURS)


def _gpt_oss(s: Said) -> Words:
    """Sinks, biases and clamped gates, all of which its code has without a key."""
    yield from ("--num-layers", str(_layers(s)), "--ffn-hidden-size", str(s.number("intermediate_size")))
    yield from (*_heads(s), *_rope(s), "--softmax-type", "learnable")
    if s.need("attention_bias") is not True:
        s.refuse("attention_bias", "`attention_bias: false` of `gpt_oss`", OURS)
    s.only("swiglu_limit", 7.0, lack=f"its code clamps at 7.0, whatever the file says: {OURS}")
    s.only("swiglu_alpha", 1.702, lack=f"{MEGATRON}: its quick GELU has 1.702")
    s.only(
        "experts_per_token", s.get("num_experts_per_tok"), lack="it stands beside `num_experts_per_tok`: leave one out"
    )
    s.need("layer_types")
    scaling = s.root.get("rope_parameters") or s.root.get("rope_scaling") or {}
    if not scaling:  # transformers 5.12.1 has YaRN by 32 then
        s.refuse("rope_scaling", "`gpt_oss` without a table of rotary embedding", "give the whole file")
    original = scaling.get("original_max_position_embeddings")
    s.only(
        "initial_context_length", original, lack="it stands beside `original_max_position_embeddings`: leave one out"
    )
    yield from _arranged(s)
    yield from _routed(s, ("num_local_experts",), "intermediate_size", "router_aux_loss_coef")
    yield from ("--moe-router-score-function", "softmax")


def _dense_first(s: Said) -> Words:
    layers, every = _layers(s), s.get("moe_layer_freq") or 1
    if every > 1 and s.root["model_type"] != "deepseek_v2":
        s.refuse("moe_layer_freq", f"`moe_layer_freq: {every}`", "its class reads `first_k_dense_replace` alone")
    if (kinds := s.get("mlp_layer_types")) is not None:
        if strange := [kind for kind in kinds if kind not in ("dense", "sparse")]:
            s.refuse("mlp_layer_types", f"`mlp_layer_types`: {', '.join(sorted({*map(str, strange)}))}", OURS)
        frequency = [int(kind == "sparse") for kind in kinds]
    dense = s.get("first_k_dense_replace") if kinds is not None else s.number("first_k_dense_replace")
    if dense is not None:
        if dense > layers:
            what = f"`first_k_dense_replace` is {dense} in `{s.name}`, and there are {layers} layers"
            raise Refused(Problem(what, key="first_k_dense_replace"))
        counted = [int(i >= dense and i % every == 0) for i in range(layers)]
        if kinds is not None and counted != frequency:
            what = f"`{s.name}` has `first_k_dense_replace: {dense}` beside other `mlp_layer_types`"
            raise Refused(Problem(what, key="first_k_dense_replace", hint="leave one of them out"))
        frequency = counted
    yield from ("--moe-layer-freq", str(frequency).replace(" ", ""))


def _qwen(s: Said) -> Words:
    step, plain = s.get("decoder_sparse_step", 1), _numbered(s, "mlp_only_layers")
    frequency = [int((i + 1) % step == 0 and i not in plain) for i in range(_layers(s))]
    if not all(frequency):
        yield from ("--moe-layer-freq", str(frequency).replace(" ", ""))
    yield from _routed(s, ("num_experts", "num_local_experts"), "moe_intermediate_size", "router_aux_loss_coef")


def _summed(s: Said) -> Words:
    """Experts by softmax over the chosen, without a key that says so."""
    yield from (*_qwen(s), "--moe-router-score-function", "softmax")
    s.only("norm_topk_prob", True)


def _shared_of_qwen(s: Said) -> Words:
    yield "--moe-shared-expert-gate"
    yield from ("--moe-shared-expert-intermediate-size", str(s.number("shared_expert_intermediate_size")))


def _linear(s: Said) -> Words:
    """Attention, gated, in some layers, gated delta nets in the others."""
    yield from _qwen3(s)
    kinds, every = s.get("layer_types"), s.get("full_attention_interval")
    if kinds is None or every:
        every = s.number("full_attention_interval")
        counted = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(_layers(s))]
        if kinds not in (None, counted):
            what = f"`{s.name}` has `full_attention_interval: {every}` beside other `layer_types`"
            raise Refused(Problem(what, key="full_attention_interval", hint="leave one of them out"))
        kinds = counted
    if others := {*kinds} - {"linear_attention", "full_attention"}:
        s.refuse("layer_types", f"`layer_types`: {', '.join(map(str, sorted(others)))}", OURS)
    linear = [int(kind == "linear_attention") for kind in kinds]
    yield from ("--experimental-attention-variant", "gated_delta_net")
    yield from ("--linear-attention-freq", str(linear).replace(" ", ""))
    yield from _numbers(s, "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
                        "linear_conv_kernel_dim")  # fmt: skip
    s.only("attn_output_gate", True)
    yield from ("--attention-output-gate", "--apply-layernorm-1p")


def _qwen3_5_moe(s: Said) -> Words:
    yield from _linear(s)
    for key in ("decoder_sparse_step", "mlp_only_layers"):
        s.only(key, 1, [], lack="its code has experts in all layers, whatever the file says")
    yield from (*_summed(s), *_shared_of_qwen(s), *_ahead(s))


def _ahead(s: Said, key: str = "mtp_num_hidden_layers") -> Words:
    if depths := s.get(key):
        s.left.append(
            f"`{key}: {depths}`: not read; a layer of token prediction is `feature.mtp.depths` with its `pattern`"
        )
    return iter(())


def _shared(s: Said, key: str = "n_shared_experts") -> Words:
    if shared := s.get(key):
        yield from ("--moe-shared-expert-intermediate-size", str(shared * s.number("moe_intermediate_size")))


def _deepseek(s: Said) -> Words:
    yield from ("--num-layers", str(_layers(s)), "--ffn-hidden-size", str(s.number("intermediate_size")))
    yield from ("--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", str(s.number("kv_lora_rank")))
    if "q_lora_rank" not in s.root:
        s.need("q_lora_rank")
    if (rank := s.get("q_lora_rank")) is not None:
        yield from ("--q-lora-rank", str(rank))
    yield from _numbers(s, "v_head_dim", qk_head_dim="qk_nope_head_dim", qk_pos_emb_head_dim="qk_rope_head_dim")
    s.get("num_key_value_heads")
    plain, turned = s.number("qk_nope_head_dim"), s.number("qk_rope_head_dim")
    if s.get("head_dim") and s.root["model_type"] != "glm_moe_dsa":  # whose class puts its own in
        s.only("head_dim", turned, lack="it stands beside `qk_rope_head_dim`: leave it out")
    s.only(
        "qk_head_dim", plain + turned, lack="it stands beside `qk_nope_head_dim` and `qk_rope_head_dim`: leave it out"
    )
    if s.number("hidden_size") % s.number("num_attention_heads"):  # Megatron would divide
        yield from ("--kv-channels", str(s.number("v_head_dim")))
    s.only("rope_interleave", True)
    s.only("partial_rotary_factor", 1.0)
    base, scaling, kind = _angles(s)
    yield from base
    if kind == "yarn":
        yield from ("--rope-type", "yarn", *_yarn(s, scaling))
        said = [key for key in ("mscale", "mscale_all_dim") if scaling.get(key)]  # 0 is none
        if len(said) == 1 and (said[0], scaling[said[0]]) != ("mscale", 1):  # by which it weighs where it has not both
            what = f"`rope_scaling.{said[0]}` without the other of `mscale` and `mscale_all_dim`"
            s.refuse("rope_scaling", what, "transformers' class weighs otherwise than Megatron then: say both")
        yield from (
            "--mscale",
            str(scaling.get("mscale") or 1.0),
            "--mscale-all-dim",
            str(scaling.get("mscale_all_dim") or 0.0),
        )
        if s.root["model_type"] == "deepseek_v2" and (rest := scaling.get("mscale_all_dim")):
            off = (0.1 * rest * math.log(scaling["factor"]) + 1) ** 2
            what = f"transformers 5.12.1's class leaves it out of its softmax, where its own code and Megatron weigh by {off:.2f}"
            s.left.append(f"`rope_scaling.mscale_all_dim: {rest}`: {what}")
        for key, usual in {"attention_factor": (None,), "truncate": (None, True)}.items():
            if scaling.get(key) not in usual:
                s.refuse("rope_scaling", f"`rope_scaling.{key}: {scaling[key]}`")
    else:
        yield from ("--rope-type", "rope")
        if kind not in (None, "default"):
            s.refuse("rope_scaling", f"`rope_scaling` of type {kind}")
    yield "--no-rope-fusion"
    s.off("attention_bias")
    if s.root["model_type"] in SPARSE:
        if s.number("rms_norm_eps") != 1e-6:  # which its code gives the norm of the indexer's keys always
            yield from ("--dsa-indexer-k-norm-epsilon", "1e-06")
        yield from _numbers(s, **{f"dsa_indexer_{key}": f"index_{key}" for key in ("n_heads", "head_dim", "topk")})
        yield from ("--experimental-attention-variant", "dsa", "--no-dsa-indexer-rotate-activation")
    if s.root["model_type"] == "glm_moe_dsa":
        s.only("indexer_rope_interleave", True, lack="its code turns neighbouring columns, whatever the file says")
        yield from ("--dsa-indexer-rope-interleaved", *_chosen_once(s))
        if s.number("rms_norm_eps") != 1e-6:  # a recipe of ours says it, and has no such indexer
            s.left.append("its norms of latents have an epsilon of 1e-06, and Megatron gives them `--norm-epsilon`")
    if s.get("n_routed_experts"):
        yield from _dense_first(s)
        yield from _routed(s, ("n_routed_experts",), "moe_intermediate_size", "aux_loss_alpha")
        yield from _shared(s)
        yield from _groups(s)
        # transformers' classes have these without a key, and the models' own stop at another.
        v3 = s.root["model_type"] != "deepseek_v2"
        s.only("scoring_func", "sigmoid" if v3 else "softmax", lack="its code has other scores, whatever the file says")
        s.only(
            "topk_method",
            *(("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")),
            lack="its code chooses otherwise",
        )
        if not v3:
            s.only("norm_topk_prob", False, lack="transformers' class leaves it out, the model's own code does not")
        yield from _sigmoid(s) if v3 else _softmax(s)
    _ahead(s, "num_nextn_predict_layers")


def _chosen_once(s: Said) -> Words:
    """Layers whose positions those behind them attend to, too: transformers 5.12.1's configuration_glm_moe_dsa.py."""
    layers, letters = _layers(s), s.get("index_topk_pattern")
    kinds = s.get("indexer_types") or [{"F": "full", "S": "shared"}.get(c, c) for c in letters or ()]
    every, first = s.get("index_topk_freq") or 1, s.get("index_skip_topk_offset")
    if every == 1 and "shared" in kinds:
        first = kinds.index("shared")
        every = next((i for i in range(first, layers) if kinds[i] == "full"), layers) + 1 - first
    if every > 1:
        first = max(first if first is not None else s.need("index_skip_topk_offset"), 1)
        yield from ("--dsa-indexer-topk-freq", str(every), "--dsa-indexer-skip-topk-offset", str(first))
    counted = ["shared" if every > 1 and max(i + 1 - first, 0) % every else "full" for i in range(layers)]
    if kinds and kinds != counted:
        what = f"`indexer_types` or `index_topk_pattern` of `{s.name}`, which is no period"
        s.refuse("indexer_types", what, f"{MEGATRON}: it shares among equal numbers of layers")


def _glm4_moe(s: Said) -> Words:
    yield from _blocks(s, qkv_bias=True)
    if s.get("use_qk_norm"):
        yield "--qk-layernorm"
    yield from (*_dense_first(s), *_scored(s))


def _glm4v_moe(s: Said) -> Words:
    s.off("use_qk_norm")
    yield from _glm4_moe(s)


def _dots1(s: Said) -> Words:
    yield from _qwen3(s)
    if s.get("layer_types") is None and s.get("sliding_window") and (s.get("max_window_layers") or 0) < _layers(s):
        s.need("layer_types")
    yield from _arranged(s)
    yield from (*_dense_first(s), *_scored(s))


def _scored(s: Said) -> Words:
    """Experts by sigmoid scores, and shared ones."""
    yield from _routed(s, ("n_routed_experts",), "moe_intermediate_size", None)
    yield from (*_shared(s), *_groups(s), *_sigmoid(s))
    _ahead(s, "num_nextn_predict_layers")


def _hy_v3(s: Said) -> Words:
    """Of Hy3. Its class weighs the chosen by their share, has norms of queries and keys, and reads `mlp_layer_types`, whatever is said."""
    yield from (*_qwen3(s), *_dense_first(s))
    yield from _routed(s, ("num_experts",), "moe_intermediate_size", None)
    s.number("num_shared_experts")
    yield from _shared(s, "num_shared_experts")
    if (scale := s.get("router_scaling_factor")) not in (None, 1.0):
        yield from ("--moe-router-topk-scaling-factor", str(scale))
    if s.get("num_experts_per_tok") == 1:
        s.refuse("num_experts_per_tok", "a share of one expert, which is 1 whatever its score,")
    yield from _sigmoid(s)
    s.only("qk_norm", True, lack="its class has these norms, whatever the file says")
    s.only("expert_hidden_dim", s.get("moe_intermediate_size"), lack="it is `moe_intermediate_size` under another name")
    s.get("enable_moe_fp32_combine")  # in which type two sums are added
    _ahead(s, "num_nextn_predict_layers")


# Names of Nemotron-H's layers in transformers 5, those of 5.17 and later beside the older, and Megatron's symbols.
SYMBOLS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def _pattern(s: Said) -> str:
    if (kinds := s.get("layers_block_type")) is None:
        return str(s.need("hybrid_override_pattern"))
    if strange := {*kinds} - SYMBOLS.keys():
        s.refuse("layers_block_type", f"`layers_block_type`: {', '.join(map(str, sorted(strange)))}", OURS)
    pattern = "".join(SYMBOLS[kind] for kind in kinds)
    if (other := s.get("hybrid_override_pattern")) not in (None, pattern):
        raise Refused(Problem(f"`{s.name}` has `{other}` beside `layers_block_type`", key="hybrid_override_pattern"))
    return pattern


def _nemotron_h(s: Said) -> Words:
    pattern = _pattern(s)
    s.get("num_hidden_layers")
    yield f"--hybrid-layer-pattern={pattern}"
    yield from _heads(s)
    yield from ("--position-embedding-type", "none", "--ffn-hidden-size", str(s.number("intermediate_size")))
    yield from _numbers(s, "mamba_num_heads", "mamba_head_dim", mamba_state_dim="ssm_state_size")
    yield from ("--mamba-num-groups", str(s.number("n_groups", "mamba_n_groups")))
    if s.get("residual_in_fp32"):
        yield "--fp32-residual-connection"
    s.off("attention_bias")
    _ahead(s, "num_nextn_predict_layers")
    if (least := s.get("time_step_min")) and least > 1e-30:
        s.left.append(
            f"`time_step_min: {least}`: transformers cuts steps below it, but its kernels and Megatron do not"
        )
    for key, usual in (("conv_kernel", 4), ("use_conv_bias", True), ("mamba_hidden_act", "silu")):
        if s.get(key, usual) != usual:
            s.refuse(key, f"`{key}: {s.root[key]}` in `{s.name}`", f"{MEGATRON}: {usual} is built")
    if "E" in pattern:
        yield from _routed(s, ("n_routed_experts",), "moe_intermediate_size", None)
        if s.get("moe_latent_size"):
            yield from ("--moe-latent-size", str(s.number("moe_latent_size")))
        s.only("n_shared_experts", 1, lack="its code has one, whatever the file says")
        yield from ("--moe-shared-expert-intermediate-size", str(s.number("moe_shared_expert_intermediate_size")))
        yield from _groups(s)
        yield from _sigmoid(s)


def _bamba(s: Said) -> Words:
    """Mamba-2 or attention, and a gated MLP behind each."""
    s.need("attn_layer_indices")
    attention = _numbered(s, "attn_layer_indices")
    yield "--hybrid-layer-pattern=" + "".join("*-" if i in attention else "M-" for i in range(_layers(s)))
    yield from (*_heads(s), *_rope(s), "--ffn-hidden-size", str(s.number("intermediate_size")))
    s.only("partial_rotary_factor", 0.5, lack="its class turns half of each head, whatever the file says")
    if s.root.get("partial_rotary_factor") is None:
        yield from ("--rotary-percent", "0.5")
    width = s.get("head_dim") or s.number("hidden_size") // s.number("num_attention_heads")
    s.only("attn_rotary_emb", width // 2, lack="half of each head turns")
    heads, expand = s.number("mamba_n_heads"), s.number("mamba_expand")
    width = expand * s.number("hidden_size") // heads
    s.only("mamba_d_head", width, lack=f"`mamba_expand`, `hidden_size` and `mamba_n_heads` make {width}")
    yield from ("--mamba-head-dim", str(width), "--mamba-num-groups", "1")
    yield from _numbers(s, mamba_num_heads="mamba_n_heads", mamba_state_dim="mamba_d_state")
    s.only("mamba_n_groups", 1, lack="its norm goes over all groups at once, Megatron's over each")
    s.only("mamba_d_conv", 4)
    s.only("mamba_conv_bias", True)
    s.off("attention_bias")
    # compute_default_rope_parameters of modeling_bamba.py; as pull request 48652 of huggingface/transformers has it of another model
    s.left.append("half of each head turns, as its weights were trained: transformers 5.12.1 turns all of it")
    if loss := s.get("z_loss_coefficient"):
        s.left.append(f"`z_loss_coefficient: {loss}`: a loss of its training")


_SHARING = (_qwen, _softmax, _shared_of_qwen)  # experts, and one beside them that all tokens see
_BIASED = partial(_blocks, qkv_bias=True)
KINDS: Mapping[str, Callable[[Said], Words]] = {
    "llama": _blocks, "mistral": _mistral_alone, "mixtral": _mixtral, "qwen2": _all(_qwen2, _asked), "qwen3": _all(_qwen3, _asked),
    "qwen3_moe": _all(_qwen3, _qwen, _softmax, _asked), "qwen3_next": _all(_linear, *_SHARING), "qwen3_5_text": _all(_linear, _ahead),
    "qwen3_5_moe_text": _qwen3_5_moe, "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek, "deepseek_v32": _deepseek, "youtu": _deepseek, "kimi_k2": _deepseek, "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek, "glm_moe_dsa": _deepseek, "nemotron_h": _nemotron_h,
    "gpt_oss": _gpt_oss, "seed_oss": _seed_oss, "qwen2_moe": _all(_qwen2, *_SHARING),
    "arcee": _blocks, "ministral": _ministral, "cwm": _ministral, "dots1": _dots1, "nemotron": _nemotron,
    "stablelm": _stablelm, "phi3": _phi3, "smollm3": _smollm3, "helium": _blocks, "ernie4_5": _blocks, "bamba": _bamba,
    "solar_open": _all(_BIASED, _scored), "glm": _BIASED, "qwen3_vl_text": _qwen3, "qwen3_vl_moe_text": _all(_qwen3, _summed),
    "glm4v_moe_text": _glm4v_moe, "hy_v3": _hy_v3,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _qwen2),
}  # fmt: skip
