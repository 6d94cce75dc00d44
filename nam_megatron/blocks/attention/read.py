"""Attention of a launch."""

from typing import Any

from nam_megatron.blocks.attention.block import Attention
from nam_megatron.blocks.read import Numbers, norm

UNTURNED = ("none", "learned_absolute")  # Megatron's types of positions without angles


def keys(a: Any, m: Any, lost: list[str]) -> dict[str, Any]:
    return Attention.of_arguments(a) | {
        "head_dim": m.head_dim,
        "query_groups": m.groups,
        **_window(a, m),
        "sinks": a.softmax_type == "learnable",
        "qkv_bias": a.add_qkv_bias and not a.add_bias_linear,
        # A learned table is the model's and YaRN a feature; others have no word in a recipe, and the comparison lists them.
        "position_embedding": "none" if m.positions in UNTURNED else "rope",
        "rotary_percent": 1.0 if m.positions in UNTURNED else a.rotary_percent,
    }


def _window(a: Any, m: Any) -> dict[str, Any]:
    """Tokens that a query sees, and which layers see all; nothing where no key says it, and the comparison lists what there is."""
    match a.value("window_size"):
        case (int(left), 0) if left >= 0 and (every := _unwindowed(m.windowed)) is not None:
            return {"window": left + 1, "unwindowed_every": every or None}
    return {"window": None, "unwindowed_every": None}


def _unwindowed(windowed: tuple[bool, ...]) -> int | None:
    """Every so many-th layer is without a window; 0 if none is, None if they are others than that."""
    periods = (n for n in range(2, len(windowed) + 1) if all(w is ((i + 1) % n > 0) for i, w in enumerate(windowed)))
    return 0 if all(windowed) else next(periods, None)


def count(v: Numbers, chooses: bool, whole: bool) -> int:
    h, bias = v["hidden_size"], int(v["add_bias_linear"])
    q, kv = v["heads"] * v["head_dim"], 2 * v["groups"] * v["head_dim"]
    columns = q + kv + (q if v["attention_output_gate"] else 0)
    qkv_bias = columns if bias or v["add_qkv_bias"] else 0
    sinks = v["heads"] if v["softmax_type"] == "learnable" else 0
    norms = 2 * norm(v) * v["head_dim"] if v["qk_layernorm"] else 0
    return norm(v) * h + h * columns + qkv_bias + q * h + bias * h + norms + sinks
