"""config.json of a published architecture, by the table of its family. What is written is read again before it counts."""

from collections.abc import Callable, Mapping
from typing import Any

from nam_megatron.blocks.exported import Config
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.plan import Plan
from nam_megatron.hf import describe
from nam_megatron.hf.families import Family

ABSENT = object()
SYMBOLS = {kind: block.symbol for kind, block in KINDS.items() if block.stock}


def written(of: Family, plan: Plan) -> dict[str, Any]:
    """The keys that say the model. A key of a kind that no layer is of is left out."""
    c = describe.config(plan)
    values = {key: _value(said, of, plan, c) for key, said in of.config.items()}
    keys = {key: value for key, value in values.items() if value is not ABSENT}
    if (depths := of.mtp.get("depths")) and c["mtp_depths"]:
        keys[depths] = c["mtp_depths"]
    if (pattern := of.mtp.get("pattern")) and c["mtp_depths"]:
        keys[pattern] = "".join(SYMBOLS[kind] for kind in c["mtp_kinds"])
    # Classes have tokens of their own where none is said, and never train the row of the one that pads.
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [of.architecture], "model_type": of.model_type, "torch_dtype": "bfloat16", **ends, **keys}


def _value(said: Any, of: Family, plan: Plan, c: Config) -> Any:
    if said is None:
        return ABSENT
    if isinstance(said, list):
        return said[0]
    if compute := COMPUTED.get(said):
        try:
            return compute(of, plan, c)
        except KeyError:  # a kind that does not stand
            return ABSENT
    path, _, null = said.partition(" or ")
    value: Any = c
    for part in path.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
    return (value or None) if null else value


def _rope_scaling(of: Family, plan: Plan, c: Config) -> dict[str, Any] | None:
    if y := c.get("yarn"):
        found = {key: y[key] for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
        found |= {} if y["rounded"] else {"truncate": False}
        return {"rope_type": "yarn", "original_max_position_embeddings": y["original_length"], **found}
    if scaled := c.get("llama_rope"):
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return {"rope_type": "llama3", "factor": scaled["factor"], **fixed}
    return None


def _rotated(of: Family, plan: Plan, c: Config) -> float:
    return float(c["attention"]["rotary_dim"] / c["attention"]["head_dim"])


def _ffn(of: Family, plan: Plan, c: Config) -> int:
    """Of dense MLPs; where none stands, no layer reads it, and the recipe's may be anything."""
    return c["moe"]["expert_hidden_size"] if "mlp" not in c["layer_kinds"] and "moe" in c else c["ffn_hidden_size"]


def _first_dense(of: Family, plan: Plan, c: Config) -> Any:
    """How many dense layers stand before the first with experts; where more come later, no number says it."""
    kinds = c["layer_kinds"][1::2]
    first = kinds.index("moe") if "moe" in kinds else len(kinds)
    return ABSENT if "mlp" in kinds[first:] else first


def _layer_types(of: Family, plan: Plan, c: Config) -> list[str]:
    attention = c.get("attention", {})
    window, every = attention.get("window", 0), attention.get("unwindowed_every", 0)
    found, rank = list[str](), 0
    for kind in c["layer_kinds"][::2]:
        rank += kind == "attention"
        slides = window and (not every or rank % every)
        found.append(getattr(describe.FACETS[kind], "LAYER_TYPE", "sliding_attention" if slides else "full_attention"))
    return found


def _interval(of: Family, plan: Plan, c: Config) -> Any:
    """Of so many layers the last is full attention; in another order none."""
    kinds = _layer_types(of, plan, c)
    every = [*kinds, "full_attention"].index("full_attention") + 1
    said = ["full_attention" if n % every == 0 else "linear_attention" for n in range(1, len(kinds) + 1)]
    return every if kinds == said else ABSENT


def _aux_loss(of: Family, plan: Plan, c: Config) -> float:
    moe = plan.recipe.blocks.moe
    if moe is None:
        raise KeyError("moe")
    return moe.aux_loss_coeff


def _summed(of: Family, plan: Plan, c: Config) -> bool:
    """Whether shares of the chosen sum to one: Megatron leaves one sigmoid score as it is."""
    moe = c["moe"]
    return not moe["pre_softmax"] and not (moe["score_function"] == "sigmoid" and moe["top_k"] == 1)


COMPUTED: Mapping[str, Callable[[Family, Plan, Config], Any]] = {
    "layers": lambda of, plan, c: len(c["layer_kinds"]) // of.parts,
    "ffn": _ffn,
    "pattern": lambda of, plan, c: "".join(SYMBOLS[kind] for kind in c["layer_kinds"]),
    "init_std": lambda of, plan, c: plan.recipe.model.init_std,
    "hidden_dropout": lambda of, plan, c: plan.recipe.model.hidden_dropout,
    "attention_dropout": lambda of, plan, c: plan.recipe.model.attention_dropout,
    "rope_scaling": _rope_scaling,
    # Of a class that has YaRN where no table is, and asks for a window even where `layer_types` has no layer with it.
    "rope_table": lambda of, plan, c: _rope_scaling(of, plan, c) or {"rope_type": "default"},
    "rope_parameters": lambda of, plan, c: (
        (_rope_scaling(of, plan, c) or {"rope_type": "default"})
        | {"rope_theta": c["rotary_base"], "partial_rotary_factor": _rotated(of, plan, c)}
    ),
    "window": lambda of, plan, c: c["attention"]["window"] or c["max_position_embeddings"],
    # Of Qwens with windows.
    "slides": lambda of, plan, c: bool(c["attention"]["window"]) or ABSENT,
    "slid": lambda of, plan, c: c["attention"]["window"] or ABSENT,
    "slid_layers": lambda of, plan, c: _layer_types(of, plan, c) if c["attention"]["window"] else ABSENT,
    "partial_rotary_factor": _rotated,
    "layer_types": _layer_types,
    "interval": _interval,
    "first_dense": _first_dense,
    "mlp_layer_types": lambda of, plan, c: ["dense" if kind == "mlp" else "sparse" for kind in c["layer_kinds"][1::2]],
    "mlp_only_layers": lambda of, plan, c: [i for i, kind in enumerate(c["layer_kinds"][1::2]) if kind == "mlp"],
    "aux_loss": _aux_loss,
    "norm_topk_prob": _summed,
    "shared_experts": lambda of, plan, c: c["moe"]["shared_expert_hidden_size"] // c["moe"]["expert_hidden_size"],
    "one_shared": lambda of, plan, c: int(c["moe"]["shared_expert_hidden_size"] > 0),
}
