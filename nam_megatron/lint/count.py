"""Parameters of a model from plain numbers, exact to the last one. Checked against Megatron's own modules in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Arguments of Megatron's that `count` reads under their own names.
READS = (
    "add_bias_linear", "add_qkv_bias", "normalization", "qk_layernorm", "attention_output_gate", "softmax_type",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
    "moe_router_topk", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_num_key_heads", "linear_value_head_dim", "linear_num_value_heads", "mtp_use_repeated_layer",
)  # fmt: skip


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
    norm = 2 if v["normalization"] == "LayerNorm" else 1  # weights per channel
    bias = int(v["add_bias_linear"])

    def attention() -> int:
        q, kv = v["heads"] * v["head_dim"], 2 * v["groups"] * v["head_dim"]
        columns = q + kv + (q if v["attention_output_gate"] else 0)
        qkv_bias = columns if bias or v["add_qkv_bias"] else 0
        sinks = v["heads"] if v["softmax_type"] == "learnable" else 0
        norms = 2 * norm * v["head_dim"] if v["qk_layernorm"] else 0
        return norm * h + h * columns + qkv_bias + q * h + bias * h + norms + sinks

    def mla() -> int:
        q, kv, width = v["q_lora_rank"], v["kv_lora_rank"], v["heads"] * (v["qk_head_dim"] + v["qk_pos_emb_head_dim"])
        query = h * width if q is None else h * q + q * width
        value = v["heads"] * v["v_head_dim"]
        own = 0 if v.get("plain_query") else h  # without a latent Megatron's is over the whole width
        latents = norm * ((own if q is None else q) + kv) if v["qk_layernorm"] else 0
        keys = h * (kv + v["qk_pos_emb_head_dim"]) + kv * (v["heads"] * v["qk_head_dim"] + value)
        return norm * h + query + keys + latents + value * h + bias * h

    def indexer() -> int:
        heads, width = v["dsa_indexer_n_heads"], v["dsa_indexer_head_dim"]
        return (
            (v["q_lora_rank"] or h) * heads * width + h * width + 2 * width + h * heads
        )  # its norm is a LayerNorm always

    def mlp(inner: int, outer: int = h, biased: int = bias) -> int:
        first = inner * (2 if v["gated"] else 1)
        return outer * first + biased * first + inner * outer + biased * outer

    def moe(experts: int) -> int:
        latent = v["moe_latent_size"]
        projections = 2 * h * latent + bias * (h + latent) if latent else 0
        shared = (
            mlp(v["moe_shared_expert_intermediate_size"], biased=0) if v["moe_shared_expert_intermediate_size"] else 0
        )
        gate = h if shared and v["moe_shared_expert_gate"] else 0
        router = v["experts"] * (h + bias)
        return norm * h + router + experts * mlp(v["moe_ffn"], latent or h) + projections + shared + gate

    def mamba() -> int:
        inner, state = v["mamba_heads"] * v["mamba_head_dim"], 2 * v["mamba_num_groups"] * v["mamba_state_dim"]
        projection = h * (2 * inner + state + v["mamba_heads"])
        return (
            norm * h + projection + 5 * (inner + state) + 3 * v["mamba_heads"] + inner + inner * h
        )  # convolution 4 wide, biased

    def gdn() -> int:
        keys, values = (
            v["linear_key_head_dim"] * v["linear_num_key_heads"],
            v["linear_value_head_dim"] * v["linear_num_value_heads"],
        )
        heads, convolved = v["linear_num_value_heads"], 2 * keys + values
        projection = h * (2 * keys + 2 * values + 2 * heads)
        return (
            norm * (h + v["linear_value_head_dim"])
            + projection
            + convolved * v["linear_conv_kernel_dim"]
            + 2 * heads
            + values * h
        )

    def size(kind: str, number: int, active: bool) -> int:
        match kind:
            case "attention":
                return attention()
            case "mla":
                return mla()
            case "dsa":
                return mla() + (indexer() if number in indexers else 0)
            case "moe":
                return moe(min(v["moe_router_topk"], v["experts"]) if active else v["experts"])
            case "mlp":
                return norm * h + mlp(v["ffn"])
            case "mamba2":
                return mamba()
        return gdn()

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
