"""What runners change in a container becomes a change of its recipe, or is refused (torch side).

Each changed field changes the recipe key that decides it; the recipe is checked as everywhere else, and all fields are made anew. A
field that no key decides cannot be changed.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe

from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.lower import translate
from nam_megatron.recipe import Recipe, from_tree, to_tree
from nam_megatron.runtime.bridge import Arguments
from nam_megatron.setting import Setting

if TYPE_CHECKING:
    from nam_megatron.nemo.container import NamContainer

# What a runner may set as it likes: where a run writes and what it reports, and when it stops.
FREE = (
    "logger.",
    "profiling.",
    "straggler",
    "nvrx_straggler",
    "ft",
    "env_vars",
    "checkpoint.most_recent_k",
    "train.exit_duration_in_mins",
)


def settle(c: "NamContainer") -> None:
    """Make a container's fields agree with its recipe, after the recipe took over what was changed in the fields.

    Raises Refused.
    """
    from nam_megatron.nemo.container import container, made

    recipe = from_tree(json.loads(c.model.nam_recipe))
    meant, a = made(translate(recipe))
    before, now = flat(meant), flat(c)
    changed = {path: now[path] for path in now if now[path] != before[path] and not path.startswith(FREE)}
    if changed and get_world_size_safe() == recipe.world_size:
        # A container that was saved with a checkpoint holds what validation derived.
        ConfigContainer.validate(meant)
        derived = flat(meant)
        changed = {path: value for path, value in changed.items() if value != derived[path]}
    new, follows = _with(recipe, changed, a)
    new = _with_world(new)
    if new == recipe and not follows:
        return
    fresh = container(translate(new))
    after = flat(fresh)
    raise_if(
        Problem(
            f"`{path}` was set to {value!r}; it follows from another value of the recipe",
            follows[path],
            f"change that key: `overrides=['{follows[path]}=...']`",
        )
        if path in follows
        else Problem(f"`{path}` is {value!r}, and the recipe with all these changes makes {after.get(path)!r} of it")
        for path, value in changed.items()
        if after.get(path) != value
    )
    free = {path for path in now if path.startswith(FREE) and now[path] != before.get(path)}
    for field in dataclasses.fields(c):
        ours, theirs = getattr(fresh, field.name), getattr(c, field.name)
        for path in free:
            section, _, name = path.partition(".")
            if section == field.name and name and hasattr(theirs, name):
                setattr(ours, name, getattr(theirs, name))
        if field.name not in free:
            setattr(c, field.name, ours)


def flat(c: ConfigContainer) -> dict[str, Any]:
    """`section.field` -> value, in a form that does not depend on whether lists were tuples."""
    found = {}
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for inner in dataclasses.fields(value):
                if not inner.name.startswith("_"):
                    found[f"{field.name}.{inner.name}"] = _plain(getattr(value, inner.name, None))
        elif not field.name.startswith("_"):
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):
        # Made anew at each construction: two are the same if they come from the same code.
        inner = getattr(value, "func", value)
        return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    return value


def _with(recipe: Recipe, changed: Mapping[str, Any], a: Arguments) -> tuple[Recipe, dict[str, str]]:
    """The recipe with the keys that decide the changed fields set to what the fields say.

    And {field: key} of the changed ones that follow from a key without being its value: whether they fit shows when all is made anew.
    """
    owners: dict[str, Setting] = {}
    for setting in a.lowering.settings:
        for path in a.fields[setting.name]:
            owners.setdefault(path, setting)
    said: dict[str, Any] = {}
    follows: dict[str, str] = {}
    problems = []
    for path, value in changed.items():
        owner = owners.get(path)
        if owner is None:
            message = f"`{path}` was set to {value!r}, and no recipe key decides it"
            problems.append(Problem(message, hint="leave it out; if it has to change, it needs a key in the recipe"))
        elif owner.key is None:
            problems.append(Problem(f"`{path}` was set to {value!r}, and `{owner.owner}` pins it: {owner.why}"))
        elif not _same(_held(recipe, owner.key), owner.value):
            follows[path] = owner.key
        elif said.setdefault(owner.key, value) != value:
            message = f"`{path}` was set to {value!r}, and another field to {said[owner.key]!r}"
            problems.append(Problem(message, owner.key))
    raise_if(problems)
    tree = to_tree(recipe)
    for key, value in said.items():
        node, last = _node(tree, key)
        node[last] = value
    return from_tree(tree), follows


def _same(held: Any, value: Any) -> bool:
    """Python's False equals 0, which is no switch."""
    return isinstance(held, bool) == isinstance(value, bool) and held == value


def _held(recipe: Recipe, key: str) -> Any:
    node, last = _node(to_tree(recipe), key)
    return tuple(node[last]) if isinstance(node[last], list) else node[last]


def _node(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, last = key.split(".")
    for name in parents:
        tree = tree[name]
    return tree, last


def _with_world(recipe: Recipe) -> Recipe:
    """The recipe on as many GPUs as the runner has started."""
    world = get_world_size_safe()
    if world == recipe.world_size:
        return recipe
    a_node = min(world, recipe.cluster.gpus_per_node)
    if world % a_node:
        hint = f"start full hosts of {a_node} GPUs, or change `cluster.gpus_per_node`"
        raise Refused(Problem(f"{world} processes on hosts of {a_node} GPUs", "cluster.gpus_per_node", hint))
    cluster = recipe.cluster.model_copy(update={"nodes": world // a_node, "gpus_per_node": a_node})
    return recipe.model_copy(update={"cluster": cluster})
