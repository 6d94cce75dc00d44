"""What a plan computes, apart from how, where and how fast: for resuming a run and for comparing runs.

The row of each key says it (setting.Row.executes); whatever says nothing computes. The parallel layout only executes (but see `by_layout`):
the next step is the same one in another order of sums. The micro batch computes: the experts' balance is judged in each.
"""

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nam_megatron import migrate
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import Problem, Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe import config_at, filled, from_tree
from nam_megatron.recipe.resolve import unread
from nam_megatron.words.regular import closed

# Keys of older plans, and why they computed nothing.
RETIRED = {"precision.name": "a name"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A recipe key, or `settings.NAME` where a setting without a key differs; None for a value that one side lacks."""

    key: str
    before: Any
    after: Any
    computes: bool


def executes(key: str) -> str | None:
    """Why another value of a recipe key (`parallel.tensor`) computes the same; None if it does not, or is no key of today's."""
    *parents, last = key.partition("[")[0].split(".")
    for depth in range(len(parents) + 1):
        config = config_at(parents[:depth])
        name = [*parents, last][depth]
        if config is None or name not in config.model_fields:
            return RETIRED.get(key) or (config.executes if config else None)
        if why := config.row(name).executes:
            return why
    return None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """How two plans (the trees of plan.json) differ: in what stands, and in the settings that no recipe key decides."""
    sides = [flat(resolved(tree)) | _pins(tree) for tree in (before, after)]
    out = [set(_unread(tree)) for tree in (before, after)]
    ranks = [_data_parallel(side) for side in sides]
    same = ranks[0] == ranks[1] is not None
    sharded = {
        key for side, silent in zip(sides, out, strict=True) for key in _computing(side.keys() - silent, side, same)
    }
    unread = out[0] | out[1]
    looked = {f"settings.{s['name']}" for tree in (before, after) for s in tree["settings"] if s.get("executes")}
    for key in dict.fromkeys((*sides[0], *sides[1])):
        there, here = (side.get(key) for side in sides)
        if there != here and key not in unread:
            yield Difference(key, there, here, key in sharded or (key not in looked and not executes(key)))


# Weights alone -----------------------------------------------------------------------------------------------------------

# Of the model's keys those that say how it is trained; what the weights mean, they leave as it is.
TRAINS = (
    "model.seq_length",
    "model.init_std",
    "model.hidden_dropout",
    "model.attention_dropout",
    *(block.at(key) for block in KINDS.values() for key in block.trains),
)
# How kinds come to stand at the layers; the layers themselves are compared.
LAID = ("model.pattern", "model.letters", "model.substitute", "model.family", "lane")
SHAPING = tuple(name for name, feature in FEATURES.items() if feature.shapes)


def another_model(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Problem]:
    """Where the weights of one plan are those of another model than the other's. MTP's may be left behind."""
    layers = [[layer["kind"] for layer in tree["layers"]] for tree in (before, after)]
    if layers[0] != layers[1]:
        said = "the checkpoint's model has other layers"
        yield Problem(said, hint="keep its pattern, lane and substitutes", law="checkpoint-other-layers")
        return
    if after["mtp"]["kinds"] and before["mtp"] != after["mtp"]:
        hint = "keep it, or set it to 0"
        yield Problem(
            "the checkpoint's model has another MTP", key="feature.mtp.depths", hint=hint, law="checkpoint-other-mtp"
        )
    # What our compiler decided by itself, then and now; of a kind that has gone with MTP's head there is nothing to compare.
    sides = [
        {f"settings.{s['name']}" for s in tree["settings"] if s["owner"] in ("model", *KINDS, *SHAPING)}
        for tree in (before, after)
    ]
    pins = sides[0] & sides[1]
    for d in differences(before, after):
        of_model = d.key in pins or (d.key.startswith("model.") and not d.key.startswith((*TRAINS, *LAID)))
        if d.computes and (of_model or d.key.startswith(tuple(f"feature.{name}." for name in SHAPING))):
            message = (
                f"the checkpoint's model has `{d.key}` {json.dumps(d.before)}, and the plan's {json.dumps(d.after)}"
            )
            yield Problem(message, key=d.key, hint="keep what it was trained with", law="checkpoint-other-model")


# What the number of data-parallel ranks comes of.
SHARED_OUT = ("cluster.nodes", "cluster.gpus_per_node", "parallel.tensor", "parallel.pipeline", "parallel.context")


def _data_parallel(side: Mapping[str, Any]) -> float | None:
    """Ranks of a flat recipe, if it says numbers."""
    numbers = [n for n in (side.get(key) for key in SHARED_OUT) if isinstance(n, int) and n > 0]
    return numbers[0] * numbers[1] / prod(numbers[2:]) if len(numbers) == len(SHARED_OUT) else None


def by_layout(side: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys of a flat recipe with which the layout computes: key, why, and the keys of the layout that do."""
    mode, moe = "feature.muon.tp_mode", "model.blocks.moe."
    if side.get(mode) == "blockwise":
        why = "a rank orthogonalises its share of a matrix for itself"
        yield mode, why, ("parallel.tensor", "parallel.expert_tensor")
    if side.get(f"{moe}capacity_factor") is not None:
        why = "an expert's places are counted on each rank"
        yield f"{moe}capacity_factor", why, ("parallel.tensor", "parallel.sequence", "parallel.context")
    if side.get(f"{moe}balancing") == "global_aux_loss" and side.get(f"{moe}aux_loss_coeff"):
        why = "a microbatch is balanced against those before it, on all data-parallel ranks"
        yield f"{moe}balancing", why, SHARED_OUT


def _computing(read: Set[str], side: Mapping[str, Any], same: bool) -> Iterator[str]:
    """Keys of the layout that compute after all. same: as many data-parallel ranks on both sides."""
    for key, _, cut in by_layout(side):
        if key in read and not (same and cut is SHARED_OUT):
            yield from cut


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a stored plan without what does not stand: plans of older versions hold every kind and feature."""
    recipe = dict(filled(migrate.recipe(tree["recipe"])))
    kinds = {layer["kind"] for layer in tree["layers"]} | set(tree["mtp"]["kinds"])
    kinds |= {needed for kind in kinds if kind in KINDS for needed in KINDS[kind].needs}
    blocks = {kind: keys for kind, keys in recipe["model"]["blocks"].items() if kind in kinds}
    recipe["model"] = recipe["model"] | {"blocks": blocks}
    recipe["execution"] = {kind: keys for kind, keys in recipe.get("execution", {}).items() if kind in kinds}
    on = {name: keys for name, keys in recipe["feature"].items() if _on(name, keys)}
    return recipe | {"feature": on}


def _unread(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that stand and that nothing reads; none are known of a plan that today's version cannot read.

    What one side reads and the other does not is told by the key that makes it so.
    """
    try:
        return tuple(unread(from_tree(resolved(tree))))
    except Refused:
        return ()


def _on(name: str, keys: Mapping[str, Any]) -> bool:
    switch = FEATURES[name].switch if name in FEATURES else "enabled"  # of a feature that has gone since
    return name == "distributed_optimizer" or keys.get(switch) not in (0, "none")  # false is 0


def _pins(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a key: what this version of the compiler decides by itself. Its Megatron is one of them."""
    pins = {f"settings.{s['name']}": s["value"] for s in tree["settings"] if s["key"] is None}
    return pins | {"megatron_core": tree["megatron_core"]}


def flat(node: Any, key: str = "") -> dict[str, Any]:
    """Nested mappings as {dotted key: leaf}; a list is a leaf."""
    if isinstance(node, Mapping):
        return {k: v for name, child in node.items() for k, v in flat(child, f"{key}.{name}" if key else name).items()}
    return {key: node}


def read(path: Path) -> dict[str, Any]:
    """A plan.json, which another version may have written, with today's keys. Raises Refused."""
    try:
        tree = migrate.plan(json.loads(path.read_text(encoding="utf-8")))
        if not {"recipe", "settings", "megatron_core", "layers", "mtp"} <= tree.keys():
            raise ValueError("it is no plan")
        resolved(tree)
        if not all(isinstance(s, Mapping) and {"name", "key", "value", "owner"} <= s.keys() for s in tree["settings"]):
            raise ValueError("its settings are none")
    except OSError as err:
        raise Refused(closed(err, "schedule.load")) from None
    except (ValueError, AttributeError, RecursionError, KeyError, TypeError) as err:
        raise Refused(f"`{path}` cannot be understood: {err}", key="schedule.load", law="plan-unreadable") from None
    return tree
