"""A launch that names a published model, and the model's card (cards.yaml)."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.lint.follow import shown
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.rule import WRONG, Rule, without
from nam_megatron.lint.values import Args, NotKnown

CARDS = Path(__file__).parent.parent / "cards.yaml"
# Where a launch says what it trains, beside its file's name. A tokenizer is any model's.
NAMES = ("load", "save", "pretrained_checkpoint", "wandb_exp_name", "wandb_project")
# Flags of others by which the model comes from a config.json, so that what is lacking may stand there.
FROM_CARD = re.compile(r"--(use-bridge|bridge-.+|(.+-)?hf-.+|from-hf.*)")
# slime's and miles' of these: a tokenizer and what some flags are held against; the model is the flags', but for `... bridge`.
BESIDE_CARD = re.compile(r"--(hf-checkpoint|megatron-to-hf-mode)")
# Words that make another model of a name.
MAKERS = re.compile("llama|mi[sx]tral|qwen|deepseek|kimi|nemotron|gpt-?oss|gemma|glm")
OTHER = re.compile(r"(?<![a-z])(mini|tiny|toy|small|proxy|draft|debug|lite|like|tests?)(?![a-z])")

# Of a card's key: Megatron's argument, and what the launch has; NotKnown where the model has nothing of the sort.
VALUES: Mapping[str, tuple[str, Callable[[Args, Model], Any]]] = {
    "hidden": ("hidden_size", lambda a, m: m.need("hidden_size")),
    "heads": ("num_attention_heads", lambda a, m: m.heads),
    # Groups that are said and ignored are another rule's.
    "groups": ("num_query_groups", lambda a, m: _if("attention" in m.kinds and not _unread(a), m.groups)),
    "head_dim": ("kv_channels", lambda a, m: _if("attention" in m.kinds, m.head_dim)),
    "ffn": ("ffn_hidden_size", lambda a, m: _if("mlp" in m.kinds, m.ffn)),
    "positions": ("position_embedding_type", lambda a, m: _if("attention" in m.kinds, m.positions)),
    "base": ("rotary_base", lambda a, m: _if(m.positions == "rope", a.rotary_base)),
    "percent": ("rotary_percent", lambda a, m: _if(m.positions == "rope" and "attention" in m.kinds, a.rotary_percent)),
    "interleaved": ("rotary_interleaved", lambda a, m: _if(m.positions == "rope" and "attention" in m.kinds, a.rotary_interleaved)),
    "no_rope": ("no_rope_freq", lambda a, m: _if(m.positions == "rope", a.no_rope_freq)),
    "interpolation": ("rotary_seq_len_interpolation_factor",
                      lambda a, m: _if(m.positions == "rope" and a.rotary_seq_len_interpolation_factor != 1,  # 1 is none
                                       a.rotary_seq_len_interpolation_factor)),
    "window": ("window_size", lambda a, m: _if("attention" in m.kinds, a.window_size)),
    "eps": ("layernorm_epsilon", lambda a, m: a.layernorm_epsilon),
    "yarn_factor": ("rotary_scaling_factor", lambda a, m: _if(m.mla and m.rope_type == "yarn" and a.rotary_scaling_factor > 1,
                                                              a.rotary_scaling_factor)),
    "glu_offset": ("glu_linear_offset", lambda a, m: a.glu_linear_offset),
    "norm": ("normalization", lambda a, m: a.normalization),
    "activation": ("swiglu", lambda a, m: _if(m.has_mlps, m.activation)),
    "bias": ("add_bias_linear", lambda a, m: a.add_bias_linear),
    # Of a launch that has every bias `bias` tells.
    "qkv_bias": ("add_qkv_bias", lambda a, m: _if("attention" in m.kinds and not a.add_bias_linear, a.add_qkv_bias)),
    "qk_norm": ("qk_layernorm", lambda a, m: _if("attention" in m.kinds, a.qk_layernorm)),
    "tied": ("untie_embeddings_and_output_weights", lambda a, m: not a.untie_embeddings_and_output_weights),
    "experts": ("num_experts", lambda a, m: a.num_experts),  # none, where a script forgets to hand them on
    "top_k": ("moe_router_topk", lambda a, m: _if(m.moe, a.moe_router_topk)),
    "moe_ffn": ("moe_ffn_hidden_size", lambda a, m: _if(m.moe, m.moe_ffn)),
    "shared": ("moe_shared_expert_intermediate_size", lambda a, m: _if(m.moe, a.moe_shared_expert_intermediate_size)),
    "scores": ("moe_router_score_function", lambda a, m: _if(m.moe, a.moe_router_score_function)),
    "pre_softmax": ("moe_router_pre_softmax", lambda a, m: _if(m.moe, a.moe_router_pre_softmax)),
    "expert_bias": ("moe_router_enable_expert_bias", lambda a, m: _if(m.moe, a.moe_router_enable_expert_bias)),
    "scaling": ("moe_router_topk_scaling_factor", lambda a, m: _if(m.moe, a.moe_router_topk_scaling_factor)),
    "group_limit": ("moe_router_group_topk", lambda a, m: _if(m.moe, [a.moe_router_num_groups, a.moe_router_group_topk])),
    "q_latent": ("q_lora_rank", lambda a, m: _if(m.mla, a.q_lora_rank)),
    "kv_latent": ("kv_lora_rank", lambda a, m: _if(m.mla, a.kv_lora_rank)),
    "qk_dim": ("qk_head_dim", lambda a, m: _if(m.mla, a.qk_head_dim)),
    "rope_dim": ("qk_pos_emb_head_dim", lambda a, m: _if(m.mla, a.qk_pos_emb_head_dim)),
    "v_dim": ("v_head_dim", lambda a, m: _if(m.mla, a.v_head_dim)),
    "mamba_heads": ("mamba_num_heads", lambda a, m: _if(m.mamba, m.mamba_heads)),
    "mamba_head_dim": ("mamba_head_dim", lambda a, m: _if(m.mamba, a.mamba_head_dim)),
    "mamba_state": ("mamba_state_dim", lambda a, m: _if(m.mamba, a.mamba_state_dim)),
    "mamba_groups": ("mamba_num_groups", lambda a, m: _if(m.mamba, a.mamba_num_groups)),
}  # fmt: skip


def _unread(a: Args) -> bool:
    return a.said("num_query_groups") and not a.group_query_attention


def _if(there: bool, value: Any) -> Any:
    if not there:
        raise NotKnown("not in this model")
    return value


@cache
def _cards() -> tuple[tuple[str, re.Pattern[str], re.Pattern[str], Mapping[str, Any]], ...]:
    """(name, family, size, values) of every card."""
    found = []
    for group in yaml.safe_load(CARDS.read_text(encoding="utf-8")):
        family = re.compile(rf"(?<![a-z0-9]){group['family']}(?!\.?\d)")
        for name, card in group["models"].items():
            size = re.compile(rf"(?<![a-z0-9.]){card['said']}(?![a-z0-9]|-?a\d+b)" if card["said"] else "")
            found.append((name, family, size, group["values"] | {k: v for k, v in card.items() if k != "said"}))
    return tuple(found)


def names(a: Args) -> Iterator[str]:
    """What the launch calls itself, in small letters with dashes."""
    for word in (_own_name(a.launch.name), *(shown(a.given[n][-1][2]).partition(" ")[2] for n in a.sure(*NAMES))):
        yield _plain(word)


def _own_name(path: str) -> str:
    """Of a file's path what says which model it is: its end, as far up as needed; a folder is often of several, or another maker's."""
    parts = path.split("/")
    ends = [_plain("/".join(parts[-n:])) for n in range(1, len(parts) + 1)]
    makers = {*next(filter(None, map(MAKERS.findall, ends)), ())}  # of the nearest name that has one
    for end in ends:
        for name, family, size, _ in _cards():
            if family.search(end) and size.search(end) and makers.issuperset(MAKERS.findall(name.lower())):
                return end
    return ends[0]


def _plain(word: str) -> str:
    return re.sub(r"[\s_/]+", "-", re.sub(r"(?<=\d)p(?=\d)", ".", word.lower()))


def named(a: Args) -> tuple[str, Mapping[str, Any]] | None:
    """The one published model that the launch calls itself, and its card; None of several, or of something made from one."""
    found: dict[str, Mapping[str, Any]] = {}
    for text in names(a):
        cards = [(n, f, values) for n, f, size, values in _cards() if f.search(text) and size.search(text)]
        if len(cards) > 1:  # DeepSeek-V2-Lite is no DeepSeek-V2
            cards = [c for c in cards if c[0].endswith("Lite")]
        if cards and not OTHER.search(text.replace("-v2-lite", "").replace("-v2lite", "")):
            found |= {n: values for n, _, values in cards}
    return next(iter(found.items())) if len(found) == 1 else None


def agrees(a: Args, m: Model, argument: str) -> bool:
    """Whether the published model that the launch calls itself has the value that is here, or it is told that it has another."""
    (_, values) = named(a) or ("", {})
    flag = a.target.by_dest.get(argument)
    told = values and flag and any(found.startswith(f"{without(flag.name)}\t") for found in _contradicts(a, m))
    return bool(told) or any(VALUES[key][0] == argument and VALUES[key][1](a, m) == values[key] for key in values)


def from_card(a: Args) -> bool:
    """Whether the model comes from a config.json, so that what is lacking may stand there."""
    words = a.launch.words
    named = (name for name in (w.partition("=")[0] for w in words) if not BESIDE_CARD.fullmatch(name))
    return "--megatron-to-hf-mode bridge" in " ".join(words).replace("=", " ") or any(map(FROM_CARD.fullmatch, named))


def _contradicts(a: Args, m: Model) -> Iterator[str]:
    card = named(a)
    if card is None or m.ours:
        return
    name, values = card
    departs, compared = dict[str, str](), 0
    for key, published in values.items():
        argument, has = VALUES[key]
        try:
            here = has(a, m)
        except NotKnown:
            continue
        compared += 1
        if key == "hidden" and not 3 * here > 2 * published > here:
            return  # another size of that family
        if here != published:
            if not a.said(argument) and from_card(a):
                continue
            flag = a.written(argument) if a.said(argument) else without(a.written(argument))
            departs[key] = f"{flag}\t{name} has {key.replace('_', ' ')} {_word(published)}, here it is {_word(here)}\t"
    # else a model of its own with that name
    if 3 * len(departs) <= compared and not {"hidden", "heads"} <= departs.keys():
        yield from departs.values()


def _word(value: Any) -> str:
    return "none" if value is None else ("off", "on")[value] if isinstance(value, bool) else f"{value}"


RULES = (
    Rule("not-the-card", WRONG, "", _contradicts,
        "the launch calls itself by a published model's name, and that model's card says otherwise",
        "take the card's value, or call the launch by another name", "nam_megatron/lint/cards.yaml"),
)  # fmt: skip
