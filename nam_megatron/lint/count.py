"""Parameters of a model from plain numbers, exact to the last one. Checked against Megatron's own modules in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nam_megatron.blocks.read import norm as channels

# Arguments of Megatron's that `count` reads under their own names.
READS = (
    "add_bias_linear", "add_qkv_bias", "normalization", "qk_layernorm", "attention_output_gate", "softmax_type",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
    "moe_router_topk", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_num_key_heads", "linear_value_head_dim", "linear_num_value_heads", "mtp_use_repeated_layer",
)  # fmt: skip


@cache
def facet(kind: str) -> Any:
    """`read.py` of a kind's folder; None: no launch can say it in Megatron's arguments."""
    name = f"nam_megatron.blocks.{kind}.read"
    return import_module(name) if find_spec(name) else None


@dataclass(frozen=True, slots=True)
class Count:
    """total: parameters of all ranks together, each once. active: those one token meets. by: total by part."""

    total: int
    active: int
    by: Mapping[str, int]


def count(
    v: Mapping[str, Any],
    layers: Sequence[tuple[int, str]],
    mtp: Sequence[str] = (),
    depths: int = 0,
    indexers: frozenset[int] = frozenset(),
) -> Count:
    """Count a model.

    Args:
        v: READS, and resolved: `hidden_size`, `heads`, `groups`, `head_dim`, `ffn`, `moe_ffn`, `gated`, `experts`, `mamba_heads`,
            `vocabulary` and `learned_positions` (rows), `tied`; `plain_query`: our MLA, without that norm.
        layers: (number, kind) of each sublayer. mtp: kinds of one MTP depth.
        indexers: numbers of the DSA layers that have an indexer of their own.
    """
    h = v["hidden_size"]
    norm = channels(v)

    def size(kind: str, number: int, active: bool) -> int:
        found: int = facet(kind).count(v, number in indexers, not active)
        return found

    by: dict[str, int] = {}
    totals = []
    built = min(depths, 1) if v["mtp_use_repeated_layer"] else depths
    for active in (False, True):
        by = {"embedding": v["vocabulary"] * h} if not active else by
        total = v["vocabulary"] * h * (1 if v["tied"] else 2) + v["learned_positions"] * h + norm * h
        for number, kind in layers:
            total += (n := size(kind, number, active))
            if not active:
                by[kind] = by.get(kind, 0) + n
        extra = built * (3 * norm * h + 2 * h * h + sum(size(kind, i, active) for i, kind in enumerate(mtp, 1)))
        totals.append(total + extra)
        if not active and built:
            by["mtp"] = extra
    if not v["tied"]:
        by["output"] = v["vocabulary"] * h
    return Count(totals[0], totals[1], by)
