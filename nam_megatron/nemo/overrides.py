"""What runners change in a container becomes a change of its recipe, or is refused (torch side).

Each changed field changes the recipe key that decides it; the recipe is checked as everywhere else, and all fields are made anew. A
field that no key decides cannot be changed.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
from megatron.bridge.utils.common_utils import get_world_size_safe

from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.recipe import Recipe, at, from_tree, to_tree, with_values
from nam_megatron.recipe.keys import values_at
from nam_megatron.runtime.bridge import Arguments
from nam_megatron.targets.target import Target
from nam_megatron.words.setting import Setting

# What a runner may set as it likes: where a run writes and what it reports, when it stops and what starts it again.
FREE = (
    "logger", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart", "checkpoint.most_recent_k",
    "checkpoint.exit_on_missing_checkpoint", "train.exit_duration_in_mins",
)  # fmt: skip
# Fields that are a key's own value, though a setting of another name brings them.
SAME = {"model.num_layers": "model.depth"}
# Fields that follow from a key and that no value of it changes.
_STAGES = "Megatron-Bridge builds no hybrid model with virtual pipeline stages, which alone read it"
FIXED = {
    "model.virtual_pipeline_model_parallel_size": _STAGES,
    "model.overlap_p2p_comm": _STAGES,
    "model.batch_p2p_comm": _STAGES,
    "ddp.align_param_gather": _STAGES,
    "model.should_pad_vocab": "the vocabulary is as large as `model.vocab_size` says, its padding in it",
}
LEAVE = "leave it out; if it has to change, it needs a key in the recipe"
ABSENT = object()


@functools.cache
def reviewed(target: Target) -> Mapping[str, str]:
    """Field -> why it stays as it is, of those that no recipe key decides: the target's own, and beside this file Bridge's."""
    found: dict[str, str] = {}
    for path in filter(None, (target.reviewed_file, Path(__file__).with_name("reviewed.yaml"))):
        for group in yaml.safe_load(path.read_text(encoding="utf-8")):
            for entry in group["fields"]:
                name = entry if isinstance(entry, str) else next(iter(entry))
                # Bridge keeps what Megatron has in two configs in one.
                for spelt in (name, name.replace("transformer.", "model.", 1)):
                    found.setdefault(spelt, " ".join(group["reason"].split()).rstrip("."))
    return found


@functools.cache
def deciding() -> Mapping[str, str]:
    """Field -> words of a recipe that decide it, of those that are no key's own value."""
    groups = yaml.safe_load(Path(__file__).with_name("decided.yaml").read_text(encoding="utf-8"))
    return {name: group["words"] for group in groups for name in (*group["fields"], *group.get("also", ()))}


def _hint(path: str, otherwise: str) -> str:
    """What a recipe says instead of a field; on our own command line they are words like any others."""
    words = deciding().get(path)
    return f"a recipe says it so: `{words}`" if words else otherwise


def carried(c: ConfigContainer) -> Recipe:
    """The recipe that a container was made of. Raises Refused."""
    with contextlib.suppress(ValueError, TypeError):
        tree = json.loads(c.model.nam_recipe)
        if isinstance(tree, dict):
            return from_tree(tree)
    raise Refused("`model.nam_recipe` is no longer the line that the container was made of", hint="leave it out")


def settle(
    c: ConfigContainer,
    classes: Mapping[str, Any],
    made: Callable[[Lowering], tuple[ConfigContainer, Arguments]],
    *,
    saved: bool = True,
) -> None:
    """Make a container's fields agree with its recipe, after the recipe took over what was changed in the fields.

    classes: of each section. made: the container of a lowering, and which of its fields each setting became. saved: it may have come
    with a checkpoint, and hold what validation derived.
    Raises Refused.
    """
    raise_if(_replaced(c, classes))
    idle = _apply(c)
    recipe = carried(c)
    meant, a = made(translate(recipe))
    raise_if(_strangers(c, meant))
    before, now = flat(meant), flat(c)
    changed = {path: value for path, value in now.items() if not _free(path) and value != before.get(path, ABSENT)}
    changed = {path: value for path, value in changed.items() if path not in idle}
    if saved and changed and get_world_size_safe() == recipe.world_size:
        # Whether the weights are there is asked once all is settled, in our words.
        meant.checkpoint.pretrained_checkpoint = meant.peft = None
        ConfigContainer.validate(meant)
        derived = flat(meant)
        changed = {path: value for path, value in changed.items() if value != derived.get(path, ABSENT)}
    new, follows = _with(_start(_corpus(recipe, changed, now), changed), changed, before, a)
    new = _with_world(new)
    fresh, _ = made(translate(new))
    raise_if(_environment(c, fresh.model.lowering))
    if new == recipe and not follows:
        for path in idle:
            section, _, name = path.partition(".")
            setattr(getattr(c, section), name, getattr(getattr(fresh, section), name))
        return
    after = flat(fresh)
    raise_if(
        Problem(
            f"`{path}` was set to {value!r}; it follows from another value of the recipe",
            key=follows[path],
            hint=_hint(path, _said(recipe, follows[path], path, value, made)),
        )
        if path in follows
        else Problem(f"`{path}` is {value!r}, and the recipe with all these changes makes {after.get(path)!r} of it")
        for path, value in changed.items()
        if after.get(path) != value
    )
    for field in dataclasses.fields(c):
        if not _free(field.name) and field.name != "env_vars":
            _renew(c, field.name, getattr(fresh, field.name))


def _said(
    recipe: Recipe, key: str, path: str, value: Any, made: Callable[[Lowering], tuple[ConfigContainer, Arguments]]
) -> str:
    """How a key says `value` of a field that follows from it."""
    few = [yaml.safe_load(word) for word in values_at(key)]
    for word in few:
        with contextlib.suppress(Refused):
            if flat(made(translate(with_values(recipe, {key: word})))[0])[path] == value:
                return f"change that key: `overrides=['{key}={json.dumps(word) if isinstance(word, bool) else word}']`"
    return f"leave it out: no value of `{key}` makes it so" if few else f"change that key: `overrides=['{key}=...']`"


def _renew(c: ConfigContainer, name: str, ours: Any) -> None:
    """Give a section the values of `ours`. It stays the same object: whoever registered a hook there, or kept it, has the new values."""
    theirs = getattr(c, name)
    if type(theirs) is not type(ours) or not dataclasses.is_dataclass(ours):
        for hooks in ("_pre_wrap_hooks", "_post_wrap_hooks"):
            if hasattr(theirs, hooks):
                setattr(ours, hooks, getattr(theirs, hooks))
        setattr(c, name, ours)
        return
    for field in dataclasses.fields(ours):
        if not field.name.startswith("_") and not _free(f"{name}.{field.name}") and hasattr(ours, field.name):
            setattr(theirs, field.name, getattr(ours, field.name))


def _free(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in FREE)


def flat(c: ConfigContainer) -> dict[str, Any]:
    """`section.field` -> value, in a form that does not depend on whether lists were tuples; of a section that may be absent, whole."""
    found = {}
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.name.startswith("_") or field.name == "env_vars":
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and field.default is dataclasses.MISSING:
            for inner in dataclasses.fields(value):
                if not inner.name.startswith("_"):
                    found[f"{field.name}.{inner.name}"] = _plain(getattr(value, inner.name, None))
        else:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value) and not dataclasses.is_dataclass(type(value)):
        # Made anew at each construction: two are the same if they come from the same code, and hold the same values.
        if isinstance(value, functools.partial):
            held = [*map(_plain, value.args), *(f"{name}={_plain(item)!r}" for name, item in value.keywords.items())]
            return f"{_plain(value.func)}({', '.join(map(str, held))})"
        if getattr(value, "__closure__", None) or not hasattr(value, "__qualname__"):
            return value  # what it holds cannot be compared
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    return value


# What is no changed field -----------------------------------------------------------------------------------------------


def _replaced(c: ConfigContainer, classes: Mapping[str, Any]) -> Iterator[Problem]:
    """Sections that are of another class than they were made, or that only Bridge could act on."""
    for name, cls in classes.items():
        theirs = getattr(c, name)
        if not isinstance(theirs, cls) and not _free(name):
            message = f"`{name}` was replaced by {_named(theirs)}: it is no longer the recipe's"
            yield Problem(message, hint=_hint(name, "change its fields, or the recipe"))
    for field in dataclasses.fields(c):
        theirs = getattr(c, field.name)
        if isinstance(theirs, dict) and field.name != "env_vars":
            # Bridge's overrides leave a mapping where there was nothing, and it fails on that later.
            hint = f"name its class in the YAML: `{field.name}._target_: megatron.bridge....`"
            yield Problem(f"`{field.name}` is a mapping, and Bridge needs a config", hint=hint)
        elif field.name in ("peft", "tensor_inspect") and theirs is not None and not _adapters(c, field.name):
            why = reviewed(c.model.lowering.target)[field.name]
            message = f"`{field.name}` was set to {_named(theirs)}, and no recipe key decides it: {why}"
            yield Problem(message, hint=_hint(field.name, LEAVE))


def _adapters(c: ConfigContainer, name: str) -> bool:
    """Whether it is the recipe's own, whose fields are compared."""
    recipe = carried(c)
    return name == "peft" and recipe.feature.lora is not None and isinstance(c.peft, LoRA)


def _named(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _strangers(c: ConfigContainer, meant: ConfigContainer) -> Iterator[Problem]:
    """Attributes that no class has: Python takes a misspelt name, and nothing reads it."""
    sections = {field.name: (getattr(c, field.name), getattr(meant, field.name)) for field in dataclasses.fields(c)}
    for section, (theirs, ours) in {"": (c, meant), **sections}.items():
        if not dataclasses.is_dataclass(theirs) or isinstance(theirs, type):
            continue
        fields = {field.name for field in dataclasses.fields(theirs)}
        for name in vars(theirs).keys() - fields - vars(ours or theirs).keys() - RUNTIME:
            if not name.startswith("_"):
                close = difflib.get_close_matches(name, fields, 1)
                path = f"{section}.{name}" if section else name
                hint = f"did you mean `{close[0]}`?" if close else "leave it out"
                yield Problem(f"`{path}` was set, and there is no such field", hint=hint)


# What Bridge itself keeps beside the fields of a container, some of it after validation.
RUNTIME = {"data_parallel_size", "timers", "user_comm_overlap_cfg", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"}


def _apply(c: ConfigContainer) -> set[str]:
    """Let a container's mixed precision and overlap of communication set the fields that they set, and forget them.

    Bridge's pretrain has done so before it validates. Returns the fields that hold such a value and that nothing reads: Bridge names
    the settings of every precision, also where it is off.
    """
    idle = set()
    mixed = get_mixed_precision_config(c.mixed_precision) if isinstance(c.mixed_precision, str) else c.mixed_precision
    if mixed is not None:
        mixed.finalize()
        mixed.setup(c.model, c.optimizer, c.ddp)
        names = set(_idle(mixed))
        for section in ("model", "optimizer", "ddp"):
            idle |= {f"{section}.{f.name}" for f in dataclasses.fields(getattr(c, section)) if f.name in names}
        c.mixed_precision = None
    if c.comm_overlap is not None:
        ranks = (
            c.model.tensor_model_parallel_size * c.model.pipeline_model_parallel_size * c.model.context_parallel_size
        )
        c.comm_overlap.data_parallel_size = max(1, get_world_size_safe() // ranks)
        c.comm_overlap.finalize()
        c.comm_overlap.setup(c.model, c.optimizer, c.ddp)
        c.comm_overlap = None
    return idle


def _idle(mixed: MixedPrecisionConfig) -> Iterator[str]:
    """Fields of a mixed precision that nothing reads where its kind is off; the switches themselves are compared."""
    scaled = {"loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"}
    for field in dataclasses.fields(mixed):
        name = field.name
        of_fp8 = name.startswith("fp8_") or name.endswith("_bf16") or name.startswith("reuse_grad_buf_for_mxfp8")
        if (
            (of_fp8 and not mixed.fp8)
            or (name.startswith("fp4_") and not mixed.fp4)
            or (name in scaled and not mixed.fp16)
        ):
            yield name


def _environment(c: ConfigContainer, lowering: Lowering) -> Iterator[Problem]:
    """Give the container the variables of a plan, and the process those that a change of its recipe has brought.

    Bridge has set the container's before it validates. Yields a finding for each that was set otherwise or taken out.
    """
    planned = {env.name: env.value for env in c.model.lowering.env}
    for env in lowering.env:
        said, before = c.env_vars.pop(env.name, None), planned.get(env.name)
        if said is None and before is not None and os.environ.get(env.name) != before:
            yield Problem(f"`env_vars` lacks {env.name}, and the plan needs `{before}`: {env.why}", hint="put it back")
        elif said is not None and str(said) != before and not env.allows(str(said)):
            needs = "it unset" if env.value is None else f"`{env.value}`"
            message = f"`env_vars.{env.name}` is `{said}`, and the plan needs {needs}: {env.why}"
            yield Problem(message, hint="leave it out")
        if env.value is not None:
            c.env_vars[env.name] = env.value
        if env.value != before and os.environ.get(env.name) == before:
            env.put(os.environ)


# Changed fields ---------------------------------------------------------------------------------------------------------


# Fields of a container that name datasets.
CORPORA = ("data_path", "blend", "blend_per_split")


def _corpus(recipe: Recipe, changed: dict[str, Any], now: Mapping[str, Any]) -> Recipe:
    """The recipe with the dataset that the fields of a container name in the place of mock data; takes those fields out of `changed`.

    Raises Refused.
    """
    path, blend, apart = (changed.get(f"dataset.{name}") for name in CORPORA)
    if recipe.data.name != "mock" or not (path or blend or apart):
        return recipe
    raise_if(
        Problem(f"two fields name datasets: `dataset.{a}` and `dataset.{b}`", key="data", hint="leave one out")
        for a, b in combinations((name for name in CORPORA if changed.get(f"dataset.{name}")), 2)
    )
    if apart and not (isinstance(apart, list) and len(apart) == 3 and apart[0] and apart[1] and not apart[2]):
        hint = "one for training, one for validation and none for tests: `dataset.blend_per_split=[[[A],[1.0]],[[B],[1.0]],null]`"
        raise Refused(f"`dataset.blend_per_split` is {apart!r}", key="data.valid_parts", hint=hint)
    words = list(path.split() if isinstance(path, str) else path or ())
    parts = _parts((apart[0] if apart else blend) or ((words[1::2], words[::2]) if len(words) > 1 else [words, None]))
    tokenizer, split = now["tokenizer.tokenizer_model"], now["dataset.split"]
    raise_if(
        Problem(f"a dataset without `{name}`", key=key, hint=f"`{name}={example}`")
        for name, key, example, value in (
            ("tokenizer.tokenizer_model", "data.tokenizer", "FOLDER", tokenizer),
            ("dataset.split", "data.split", "'99,1,0'", apart or split),
        )
        if not value
    )
    for name in CORPORA:
        changed.pop(f"dataset.{name}", None)
    data = {
        "name": "indexed",
        "path": parts[0]["path"],
        "parts": None,
        "split": split,
        "tokenizer": tokenizer,
        "cache": recipe.data.cache,
        "workers": recipe.data.workers,
    }
    if apart or len(parts) > 1:
        data |= {"name": "blend", "path": None, "parts": parts}
    if apart:
        data |= {"valid_parts": _parts(apart[1])}
    return from_tree(to_tree(recipe) | {"data": data})


def _parts(blend: Any) -> list[dict[str, Any]]:
    if not (isinstance(blend, (list, tuple)) and len(blend) == 2 and isinstance(blend[0], list)):
        hint = "a list of datasets and one of their weights: `dataset.blend=[[FOLDER/A,FOLDER/B],[0.7,0.3]]`"
        raise Refused(f"a blend is {blend!r}", key="data.parts", hint=hint)
    names, weights = blend
    try:
        return [{"weight": float(weight), "path": name} for weight, name in zip(weights or [1], names, strict=True)]
    except (ValueError, TypeError):
        message = f"the container names {', '.join(map(str, names))} with the weights {weights}"
        hint = "a weight for each dataset: `dataset.data_path='0.7 FOLDER/A 0.3 FOLDER/B'`"
        raise Refused(message, key="data.parts", hint=hint) from None


def _start(recipe: Recipe, changed: dict[str, Any]) -> Recipe:
    """The recipe from the weights that a container names, where it named none; takes the field out of `changed`."""
    if recipe.schedule.pretrained is not None or not changed.get("checkpoint.pretrained_checkpoint"):
        return recipe
    return with_values(recipe, {"schedule.pretrained": changed.pop("checkpoint.pretrained_checkpoint")})


def _with(
    recipe: Recipe, changed: Mapping[str, Any], before: Mapping[str, Any], a: Arguments
) -> tuple[Recipe, dict[str, str]]:
    """The recipe with the keys that decide the changed fields set to what the fields say; before: all fields as the recipe has them.

    And {field: key} of the changed ones that follow from a key without being its value: whether they fit shows when all is made anew.
    """
    owners: dict[str, list[Setting]] = {}
    for setting in a.lowering.settings:
        for path in a.fields[setting.name]:
            owners.setdefault(path, []).append(setting)
    said: dict[str, Any] = {}
    held = to_tree(recipe)
    follows: dict[str, str] = {}
    problems = []
    for path, value in changed.items():
        settings = owners.get(path, [])
        own = [s for s in settings if s.key and _same(_plain(at(held, s.key)), before[path])]
        if before[path] is None and path in deciding():
            own = []  # null is any key's
        owner = next(iter([*own, *settings]), None)
        if path in SAME:
            said[SAME[path]] = value
        elif owner is None:
            why = f": {reason}" if (reason := reviewed(a.lowering.target).get(path)) else ""
            problems.append(
                Problem(f"`{path}` was set to {value!r}, and no recipe key decides it{why}", hint=_hint(path, LEAVE))
            )
        elif owner.key is None:
            problems.append(
                Problem(
                    f"`{path}` was set to {value!r}, and `{owner.owner}` pins it: {owner.why}", hint=_hint(path, LEAVE)
                )
            )
        elif path in FIXED:
            problems.append(Problem(f"`{path}` was set to {value!r}: {FIXED[path]}", hint="leave it out"))
        elif not own:
            follows[path] = owner.key
        elif said.setdefault(owner.key, value) != value:
            message = f"`{path}` was set to {value!r}, and another field to {said[owner.key]!r}"
            problems.append(Problem(message, key=owner.key))
    raise_if(problems)
    return with_values(recipe, said), follows


def _same(held: Any, value: Any) -> bool:
    """Python's False equals 0, which is no switch."""
    return isinstance(held, bool) == isinstance(value, bool) and held == value


def _with_world(recipe: Recipe) -> Recipe:
    """The recipe on as many GPUs as the runner has started."""
    world = get_world_size_safe()
    a_node = min(world, recipe.cluster.gpus_per_node)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", a_node))  # Slurm's tasks say it not
    if world % a_node or here != a_node:
        said = f"{world} processes on hosts of {a_node} GPUs" + (f", and here are {here}" if here != a_node else "")
        hint = f"start full hosts of {a_node} GPUs, or change `cluster.gpus_per_node`"
        raise Refused(said, key="cluster.gpus_per_node", hint=hint)
    if world == recipe.world_size:
        return recipe
    cluster = recipe.cluster.model_copy(update={"nodes": world // a_node, "gpus_per_node": a_node})
    return recipe.model_copy(update={"cluster": cluster})
