"""Megatron-Bridge's run_config.yaml, and the YAML by which Nemotron names a recipe, as the launch of a Megatron (Bridge 0.6.2).

Bridge writes its whole container beside every checkpoint: some 700 fields, nearly all of one name with Megatron's arguments. Those are
the words here; `SPELLED` holds the others, which Bridge spells otherwise or puts into objects of Python. A field that has Megatron's own
default makes no word, so it counts as not chosen: the file does not tell who chose it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nam_megatron import migrate
from nam_megatron.errors import Refused
from nam_megatron.targets import Target
from nam_megatron.targets.target import AS_TEXT, as_text, legal
from nam_megatron.words.setting import Setting

OURS = "nam_megatron.nemo."
CLASS, RECIPE = "_target_", "recipe"
# An AttnBackend of Megatron's by its number.
BACKENDS = {"1": "flash", "2": "fused", "3": "unfused", "4": "local", "5": "auto"}
# What decides the model and its training; the others say what is logged, started again or kept.
SECTIONS = (
    "model", "optimizer", "ddp", "scheduler", "train", "validation", "rng", "dataset", "tokenizer", "checkpoint", "dist", "logger",
)  # fmt: skip


def kind(root: Mapping[str, Any]) -> str | None:
    """`container`, `recipe` (of Nemotron), or None for another YAML."""
    model, recipe = root.get("model"), root.get(RECIPE)
    if isinstance(model, dict) and CLASS in model:
        return "container"
    return "recipe" if isinstance(recipe, dict) and CLASS in recipe else None


def plan(root: Mapping[str, Any], name: str) -> tuple[str, tuple[str, ...]] | None:
    """The text of the plan.json that a container of ours or Nemotron's YAML of one of our recipes stands for, and notes; None of others.

    Raises Refused: what the recipe refuses, and a function of somebody else's, which would have to be called to know its model.
    """
    from nam_megatron.compile.argv import plan_json  # Hydra, only for those who want it
    from nam_megatron.compile.lower import translate
    from nam_megatron.nemo import _preset
    from nam_megatron.recipe import from_tree, load

    if kind(root) == "container":
        if not (line := root["model"].get("nam_recipe")):
            return None
        note = (
            "the recipe that it carries is read; a field that was changed beside it is refused when Bridge validates it"
        )
        try:
            tree = json.loads(str(line))
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict):
            raise Refused(f"`model.nam_recipe` in `{name}` is no recipe", hint="take the file as Bridge wrote it")
        return plan_json(translate(from_tree(tree))), (note,)
    recipe, target = root[RECIPE], str(root[RECIPE][CLASS])
    preset = _preset(target.removeprefix(OURS)) if target.startswith(OURS) else None
    if preset is None:
        hint = "give the `run_config.yaml` beside a checkpoint of it, or what `container.to_yaml(PATH)` writes"
        raise Refused(f"`{name}` names a Python function, `{target}`, and only its container says the model", hint=hint)
    laid = [
        f"{section}.{field}"
        for section, fields in root.items()
        if section in SECTIONS and isinstance(fields, dict)
        for field in fields
    ]
    notes = [f"laid over it, and not read here: {', '.join(laid)}"] if laid else []
    return plan_json(translate(load(preset, map(migrate.word, recipe.get("overrides") or ())))), tuple(notes)


def words(root: Mapping[str, Any], target: Target) -> tuple[list[str], list[str]]:
    """The words of a container for Megatron's parser, and notes on what has none."""
    said: dict[str, Any] = {}
    for section in SECTIONS:
        fields = root.get(section)
        if not isinstance(fields, dict):
            continue
        for name, value in fields.items():
            rule = SPELLED.get(f"{section}.{name}", SPELLED.get(name))
            pairs = rule(value, fields) if rule else [(name, value)]
            for dest, word in pairs:
                said.setdefault(dest, word)
    found: list[str] = []
    notes: list[str] = []
    for dest, value in said.items():
        flag = target.by_dest.get(dest)
        # Of a dtype or an enum the name; null is what the field has before Megatron or Bridge works it out.
        value = DTYPES.get(str(_word(value)), value) if isinstance(value, dict) else value
        if flag is None or isinstance(value, dict) or value in (None, [], [None], flag.default):
            continue
        if flag.type in AS_TEXT:
            value = as_text(flag, value)
        elif isinstance(value, list):
            value = tuple(value) if flag.nargs in ("+", "*") else value
        elif flag.nargs in ("+", "*"):
            value = (value,)
        if flag.type == "float" and isinstance(value, int):
            value = float(value)
        if not legal(flag, value):
            notes.append(f"`{dest}` is {value!r} there, which no flag of Megatron's can say")
            continue
        found += target.words(Setting(dest, value, ""))
    mixed = root.get("mixed_precision")
    on = "bf16" in mixed if isinstance(mixed, str) else isinstance(mixed, dict) and mixed.get("bf16")
    if on and "--bf16" not in found:
        found.append("--bf16")
    for name in ("peft", "comm_overlap"):
        if root.get(name):
            notes.append(f"it has `{name}`, which no flag of Megatron's says")
    return found, notes


DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


# How Bridge spells what Megatron's parser calls otherwise --------------------------------------------------------------

Rule = Callable[[Any, Mapping[str, Any]], Iterator[tuple[str, Any]] | list[tuple[str, Any]]]


def _as(dest: str) -> Rule:
    return lambda value, _: [(dest, value)]


def _not(dest: str) -> Rule:
    return lambda value, _: [(dest, not value)] if isinstance(value, bool) else []


def _word(value: Any) -> str | None:
    """The last name of a class, function, enum or dtype that YAML holds as a mapping; a plain value's text."""
    if isinstance(value, dict):
        value = value.get("_name_") or (value.get("_args_") or [None])[0] or value.get(CLASS)
    return None if value is None else re.split(r"[.:]", str(value))[-1]


def _activation(value: Any, model: Mapping[str, Any]) -> list[tuple[str, Any]]:
    name, gated = _word(value), model.get("gated_linear_unit") is True
    if name == "squared_relu":
        return [("squared_relu", True)]
    return [("swiglu", True)] if gated and name in ("silu", "swish") else []


def _groups(value: Any, _: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [("group_query_attention", True), ("num_query_groups", value)] if value else []


def _blend(value: Any, _: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not value:
        return [("mock_data", True)]
    paths, weights = value
    return [
        (
            "data_path",
            [w for pair in zip(map(str, weights), paths, strict=True) for w in pair] if weights else list(paths),
        )
    ]


def _vocabulary(value: Any, model: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Bridge pads it where it is told to; else it is the size that the table has."""
    if model.get("should_pad_vocab"):
        return [("vocab_size", value)]
    return [("vocab_size", value), ("padded_vocab_size", value)]


def _multiprocessors(backend: str) -> Rule:
    """Bridge writes the number of each backend, in use or not."""
    used = "moe_flex_dispatcher_backend"
    return lambda value, model: [("moe_flex_dispatcher_num_sms", value)] if model.get(used) == backend else []


def _fp8(value: Any, section: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Bridge names a recipe of FP8 also where it is off."""
    return [("fp8_recipe", value)] if section.get("fp8") else []


def _ramp(dest: str) -> Rule:
    """Weight decay's ends, where it moves."""
    return lambda value, scheduler: [(dest, value)] if scheduler.get("weight_decay_incr_style") != "constant" else []


SPELLED: Mapping[str, Rule] = {
    "model.num_moe_experts": _as("num_experts"),
    "model.hybrid_override_pattern": lambda value, _: [("hybrid_layer_pattern", value)] if value else [],
    "model.num_query_groups": _groups,
    "model.activation_func": _activation,
    "model.gated_linear_unit": lambda *_: [],
    "model.share_embeddings_and_output_weights": _not("untie_embeddings_and_output_weights"),
    "model.persist_layer_norm": _not("no_persist_layer_norm"),
    "model.seq_length": lambda value, _: [("seq_length", value), ("max_position_embeddings", value)],
    "model.vocab_size": _vocabulary,
    "model.attention_backend": lambda value, _: [("attention_backend", BACKENDS.get(str(_word(value)), _word(value)))],
    # Of a hybrid the pattern says it.
    "model.num_layers": lambda value, model: [] if model.get("hybrid_layer_pattern") else [("num_layers", value)],
    "model.mtp_num_layers": lambda value, model: []
    if model.get("hybrid_layer_pattern")
    else [("mtp_num_layers", value or None)],
    "model.fp8_param": _as("fp8_param_gather"),
    "model.fp8": lambda value, _: [("fp8", value)] if value else [],
    **{f"{section}.fp8_recipe": _fp8 for section in ("model", "optimizer")},
    **{f"model.moe_{backend}_num_sms": _multiprocessors(backend) for backend in ("deepep", "hybridep")},
    # Written whether anything is recomputed or not.
    "model.recompute_modules": lambda value, model: [("recompute_modules", value)]
    if model.get("recompute_granularity", True)
    else [],
    # Of any program: the number alone offloads nothing.
    "cpu_offloading_num_layers": lambda value, model: [("cpu_offloading_num_layers", value)]
    if model.get("cpu_offloading", True) not in (False, "none", None)
    else [],
    "model.cuda_graph_modules": lambda value, _: [("cuda_graph_modules", [_word(v) for v in value or ()])],
    "ddp.grad_reduce_in_fp32": _as("accumulate_allreduce_grads_in_fp32"),
    "ddp.average_in_collective": _as("ddp_average_in_collective"),
    "ddp.bucket_size": _as("ddp_bucket_size"),
    "ddp.num_buckets": _as("ddp_num_buckets"),
    "ddp.align_param_gather": lambda *_: [],
    "scheduler.start_weight_decay": _ramp("start_weight_decay"),
    "scheduler.end_weight_decay": _ramp("end_weight_decay"),
    "dataset.blend": _blend,
    "dataset.random_seed": _as("seed"),
    "dataset.sequence_length": _as("seq_length"),
    "dataset.path_to_cache": _as("data_cache_path"),
    "dataset.create_attention_mask": _as("create_attention_mask_in_dataloader"),
    "dataset.data_path": lambda *_: [],
}
