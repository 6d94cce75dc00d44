"""Stage 1, conf -> Recipe: Hydra composes, OmegaConf goes out at once, strict frozen models come in.

A `Recipe` holds what was meant and stands: of the kinds and features that conf/ writes out, those that this model uses.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from nam_megatron import migrate, published
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile import resolvers
from nam_megatron.conf import READ, conf_dir
from nam_megatron.errors import Problem, Refused, joined, likely, quoted, raise_if
from nam_megatron.features.mtp import LAYERS
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe import resolve
from nam_megatron.recipe.data import Data
from nam_megatron.recipe.keys import SWITCHED, config_at, keys_at, keys_hint, value_at, whole_hint
from nam_megatron.recipe.layout import Cluster, Device, Lane, LaneBlocks, Parallel, ProcessGroups, Storage
from nam_megatron.recipe.model import Kind, Letter, Letters, Model, Substitute
from nam_megatron.recipe.recipe import FILE_NAME, Assumption, Preset, Recipe, Wish
from nam_megatron.recipe.training import Optim, Precision, Schedule
from nam_megatron.words.setting import NEEDED, Config, leaves, section

__all__ = [
    "SWITCHED", "Assumption", "Cluster", "Data", "Device", "Kind", "Lane", "LaneBlocks", "Letter", "Letters", "Model", "Optim", "Parallel",
    "Precision", "Preset", "ProcessGroups", "Recipe", "Schedule", "Storage", "Substitute", "conf_dir", "config_at", "from_config",
    "from_tree", "keys_at", "keys_hint", "load", "parsed", "resolved", "to_tree", "value_at", "whole_hint",
    "with_values",
]  # fmt: skip


SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of fp32's normal numbers; a GPU takes smaller ones for zero


def added(words: Iterable[str]) -> list[str]:
    """Overrides as Hydra wants them: it adds keys only where it is told to, and a waiver is one: `cluster.waivers.git=why`."""
    return [f"++{word}" if word.startswith(("cluster.waivers", "allow.", "allow=")) else word for word in words]


def load(preset: str = "nam56r", overrides: Iterable[str] = ()) -> Recipe:
    """Compose and check a recipe in this process.

    Args:
        preset: a name in conf/preset.
        overrides: Hydra overrides, e.g. `lane=nemo_native`, `cluster.gpus_per_node=4`.

    Raises:
        Refused: with every finding.
    """
    from nam_megatron.compile.compose import composed

    return from_config(*composed("recipe", [f"preset={preset}", *added(overrides)]))


def from_config(cfg: DictConfig, sources: Any = None, without: Iterable[str] = ()) -> Recipe:
    """A composed Hydra config as a Recipe. `without`: top-level keys that belong to the command, not the recipe.

    Raises:
        Refused: unknown and missing keys, wrong types, values out of range, dangling interpolations.
    """
    try:
        with resolvers.pure() as impure:
            tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        raw: Any = OmegaConf.to_container(cfg)  # `missing_keys` stops at a link to such a value
        open_ = {leaf for key, value in raw.items() for leaf in leaves(key, value) if at(raw, leaf) == "???"}
        absent = (open_ or OmegaConf.missing_keys(cfg)) | {*(sources.not_given() if sources else ())}
        raise Refused(_not_given(sorted(absent), sources), sources) from None
    except (RecursionError, OmegaConfBaseException) as err:
        key = getattr(err, "full_key", None) or None
        if isinstance(err, RecursionError) or "Recursive interpolation" in str(err):
            hint = "follow each `${...}` of the config: one leads back to itself"
            problem = Problem("`${...}` go round in a circle", key=key, hint=hint, law="value-dangling")
            raise Refused(problem, sources) from None
        if impure:
            hint = "write the value: a plan says what is trained on every machine, and so does its receipt"
            raise Refused(
                Problem(f"`${{{impure[0]}:...}}` reads this machine", key=key, hint=hint, law="value-of-this-machine"),
                sources,
            ) from None
        raise Refused(
            Problem(
                _first_line(err), key=key, hint="`${...}` names a key of the composed config", law="value-dangling"
            ),
            sources,
        ) from None
    if sources and (absent := sources.not_given()):
        raise Refused(_not_given(sorted(absent), sources), sources)
    for key in without:
        tree.pop(key, None)
    given = [(word.text, word.key, word.value) for word in sources.words] if sources else []
    if idle := [*_chooses_nothing(tree, given), *_taken_back(tree, given)]:
        raise Refused(idle, sources)
    by_hand = [
        Problem("wishes are an overlay's, and no key of yours", key="wishes", hint="leave it out", law="wishes-by-hand")
    ]
    if moved := [
        *migrate.left(tree),
        *(by_hand if tree.get("wishes") else ()),
        *(sources.contradictions() if sources else ()),
    ]:
        raise Refused(moved, sources)
    for key, place in sources.outlasting.items() if sources else ():
        section, _, last = key.rpartition(".")
        at(tree, section)[last] = place.value
    try:
        written = parsed(tree, sources)
    except Refused:
        begun = list(_begun(tree)) if sources else []
        if not begun or not sources.take_kinds_of_overlays(tree["model"]["blocks"], begun):
            raise
        written = parsed(tree, sources)
    try:
        words = (sources.said, sources.typed, sources.chosen) if sources else (lambda key: False,)
        recipe = resolved(written, *words)
    except Refused as refused:
        raise Refused(refused.problems, sources) from None
    if sources:
        recipe = resolve.without_unneeded(recipe, sources.overlaid)
        # A value that a person gave is no assumption of ours.
        ours = {name: a for name, a in recipe.assumptions.items() if not sources.gave(a.key)}
        stand = ((wish, value_at(recipe, wish.key)) for wish in _wishes(sources))
        wishes = tuple(w for w, is_ in stand if is_ in sources.wishes[w.key] or (w.why and is_ is not None))
        recipe = recipe.model_copy(update={"assumptions": ours, "wishes": wishes})
    outdone = [*_layout_outdone(recipe, sources.typed), *sources.astray(recipe.preset.name)] if sources else []
    if renamed := [*_lane_in_name_only(recipe), *outdone]:
        raise Refused(renamed, sources)
    return recipe


def _wishes(sources: Any) -> Iterator[Wish]:
    """What overlays say of kernels; of one key the last of its values first, whatever the order of the overlays."""
    for key, said in sorted(sources.wishes.items()):
        instead, place = sources.without_overlays(key), sources.outlasting.get(key)
        for value in sorted(said, key=lambda value: _rank(key, value), reverse=True):
            if not place or value != instead:
                why = f"{place.where} says so" if place else None
                yield Wish(key=key, value=value, by=" and ".join(sorted(set(said[value]))), instead=instead, why=why)


def _rank(key: str, value: Any) -> float:
    """The place of a value among those that a key takes."""
    *parents, last = key.split(".")
    config = config_at(parents)
    kind = config.model_fields[last].annotation if config else None
    for one in (kind, *get_args(kind)):
        if get_origin(one) is Literal and value in get_args(one):
            return get_args(one).index(value)
    return value if isinstance(value, (bool, int, float)) else -1


def _not_given(keys: Sequence[str], sources: Any = None) -> Problem:
    """One problem for all keys that wait for a value, each with its place; of a file named already the line is enough."""
    words = " ".join(f"{key}=..." for key in keys)
    if len(keys) == 1:
        return Problem(f"key `{keys[0]}` must be given", key=keys[0], hint=f"give it: `{words}`", law="key-not-given")
    said, before = [], ""
    for key in keys:
        where = (sources.where(key) if sources else None) or ""
        file, _, line = where.rpartition(":") if where[-1:].isdigit() else (where, "", "")
        place, before = (where if file != before else f"line {line}" if line else ""), file
        place = place.replace(READ, "not in ", 1)  # what a file of others should have said, and does not
        said.append(f"`{key}`" + (f" ({place})" if place else ""))
    hint = f"give them in the file or the command: `{words}`"
    return Problem(f"{len(keys)} keys must be given: {joined(said)}", hint=hint, law="key-not-given")


def resolved(
    written: Recipe, said: resolve.Said, typed: resolve.Said | None = None, chosen: resolve.Said | None = None
) -> Recipe:
    """What stands of a whole recipe as conf/ writes it: see resolve.py.

    Raises:
        Refused: a person said something of what does not stand, left out what does, or assumed a key that is none.
    """
    recipe = resolve.stand(written, said, typed, chosen)
    raise_if([*resolve.missing(recipe), *_assumed_nothing(recipe)])
    held = {name: a for name, a in recipe.assumptions.items() if value_at(recipe, a.key) == a.value}
    recipe = recipe.model_copy(update={"assumptions": held})
    return recipe.model_copy(update={"assumptions": {**derived(recipe), **held}})


def derived(recipe: Recipe) -> dict[str, Assumption]:
    """What a preset of a published family has and no article gives; without what a file in conf/ says of itself."""
    said, unread = {a.key for a in recipe.assumptions.values()}, set(resolve.unread(recipe))
    stands = {key: value for key, value in _computing(recipe) if key not in unread}
    found = published.assumed(recipe.preset.family, stands)
    made = (Assumption(key=key, value=value, why=why) for key, value, why in found if key not in said)
    return {a.key.replace(".", "/"): a for a in made}  # a name with dots would read as a path


def _computing(config: Config, above: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of everything below a section that computes, and what published.py asks for beside it."""
    for name in type(config).model_fields:
        key, value = f"{above}{name}", getattr(config, name)
        if isinstance(value, Config):
            yield from _computing(value, f"{key}.")
        elif key in published.ALSO or not config.row(name).executes:
            yield key, value


def _assumed_nothing(recipe: Recipe) -> Iterator[Problem]:
    for name, assumption in recipe.assumptions.items():
        *parents, last = assumption.key.split(".")
        if last not in keys_at(parents):
            message = f"there is no key `{assumption.key}` to assume"
            yield Problem(message, key=f"assumptions.{name}.key", hint=keys_hint(parents), law="assumption-of-nothing")


def _wished_nothing(recipe: Recipe) -> Iterator[Problem]:
    """Of a recipe that is read back: no overlay wishes of what computes."""
    for number, wish in enumerate(recipe.wishes):
        *parents, last = wish.key.split(".")
        config = config_at(parents)
        if parents[:1] not in (["execution"], ["precision"]) or config is None or last not in config.model_fields:
            message = f"`{wish.key}` is no key of kernels that an overlay wishes"
            yield Problem(message, key=f"wishes[{number}].key", hint="leave it out", law="wishes-by-hand")


def _chooses_nothing(tree: Mapping[str, Any], words: Sequence[tuple[str, str, Any]]) -> Iterator[Problem]:
    """`feature=fp8` would put the keys of one feature in the place of all of them; `feature={}` leaves all as they are."""
    for text, key, value in words:
        if key == "feature" and isinstance(value, list):
            yield Problem(f"`{text}`: `feature` is no list", hint=SWITCHED, law="features-as-a-list")
        if key == "feature" and isinstance(value, str) and value in FEATURES:
            hint = f"features are switched by key, e.g. `feature.{value}.{keys_at((key, value))[0]}=...`"
            if value in (tree.get("feature") or {}):
                hint += f"; `~feature.{value}` turns it off"
            said = f"`{text}`: `{value}` is one feature, and `feature` is all of them"
            yield Problem(said, hint=hint, law="one-feature-for-all")
        for empty in _empty(key, value):
            # What another word takes away, or puts there, this one may well begin.
            own, others = f"{empty}.", [f"{other}." for word, other, _ in words if word != text]
            held = at(tree, empty)
            if (
                held
                and isinstance(held, Mapping)
                and not any(other.startswith(own) or own.startswith(other) for other in others)
            ):
                hint = SWITCHED if empty == "feature" else f"leave it out; `{empty}.KEY=VALUE` changes one of them"
                message = f"`{text}` is laid over what stands there, and leaves {quoted(list(held)[:3])}"
                yield Problem(message, hint=hint, law="nothing-laid-over")


def _taken_back(tree: Mapping[str, Any], words: Sequence[tuple[str, str, Any]]) -> Iterator[Problem]:
    """Of two words one gives what the other takes away: the later has its way, and nobody would know."""
    given = [(text, leaf) for text, key, value in words if not text.startswith("~") for leaf in leaves(key, value)]
    taken = [(text, key) for text, key, _ in words if text.startswith("~")]
    # `feature.fp8=null` takes it away, too.
    taken += [(text, leaf) for text, leaf in given if at(tree, leaf) is None]
    for text, leaf in given:
        by = next((word for word, key in taken if word != text and f"{leaf}.".startswith(f"{key}.")), None)
        parent, _, last = leaf.rpartition(".")
        if by and last not in ((at(tree, parent) if parent else tree) or {}):
            message = f"`{text}` is given, and `{by}` takes it away"
            yield Problem(message, hint="keep one of them", law="given-and-taken-away")


def _empty(key: str, value: Any) -> Iterator[str]:
    """Dotted keys of the mappings in a value that have nothing in them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _empty(f"{key}.{name}", inner)
        if not value:
            yield key


def at(tree: Mapping[str, Any], key: str) -> Any:
    """What a plain nested mapping has at a dotted key; None where there is none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _lane_in_name_only(recipe: Recipe) -> Iterator[Problem]:
    """A lane is part of a run's identity: under the name of a file in conf/lane stands what that file says."""
    file = conf_dir() / "lane" / f"{recipe.lane.name}.yaml"
    if not file.is_file():
        return
    said, given = OmegaConf.to_container(OmegaConf.load(file)), recipe.lane.model_dump()
    pairs = {key: (said[key], given[key]) for key in ("tensor", "sequence")}
    pairs |= {f"blocks.{letter}": (said["blocks"][letter], kind) for letter, kind in given["blocks"].items() if kind}
    for key, (there, here) in pairs.items():
        if there != here:
            instead = "write a lane of your own" if key.startswith("blocks.") else f"set `parallel.{key}`"
            hint = f"{instead}, or give this lane another name: `lane.name=NAME`"
            message = f"lane `{recipe.lane.name}` has `{_shown(there)}`, not `{_shown(here)}`"
            yield Problem(message, key=f"lane.{key}", hint=hint, law="lane-in-name-only")


def _layout_outdone(recipe: Recipe, typed: resolve.Said) -> Iterator[Problem]:
    """A lane's layout is what `parallel` says where it says nothing else."""
    for key in ("tensor", "sequence"):
        asked, used = getattr(recipe.lane, key), getattr(recipe.parallel, key)
        if asked != used and typed(f"lane.{key}"):
            message = f"nothing reads this: `parallel.{key}={_shown(used)}` has its way"
            yield Problem(message, key=f"lane.{key}", hint="keep one of them", law="lane-outdone")


def from_tree(tree: Mapping[str, Any]) -> Recipe:
    """A plain nested mapping, as `to_tree` makes it, or made it, as a Recipe. Raises Refused; what does not stand may not be in it."""
    recipe = parsed(filled(migrate.recipe(tree)))
    raise_if([*resolve.missing(recipe), *_assumed_nothing(recipe), *_wished_nothing(recipe)])
    return recipe


def parsed(tree: Mapping[str, Any], sources: Any = None) -> Recipe:
    """A nested mapping as a Recipe, whether all of it stands or not. Raises Refused."""
    try:
        recipe = Recipe.model_validate(_tuples(tree))
    except ValidationError as err:
        raise Refused(_problems(err, tree), sources) from None
    if endless := list(_endless(recipe.model_dump())):
        raise Refused(
            (Problem("an integer of more than 63 bits", key=key, law="integer-too-long") for key in endless), sources
        )
    if vanishing := list(_vanishing(recipe.model_dump())):
        raise Refused(vanishing, sources)
    return recipe


def device(path: Path) -> Device:
    """A file of conf/device."""
    return Device.model_validate(_tuples(OmegaConf.to_container(OmegaConf.load(path))))


def filled(tree: Any, cls: type[Config] = Recipe) -> Any:
    """A stored tree with the values that it meant by saying nothing: of keys that came after it was written."""
    if not isinstance(tree, Mapping):
        return tree
    found = dict(tree)
    for name, field in cls.model_fields.items():
        inner = section(field.annotation)
        if name in found and inner:
            found[name] = filled(found[name], inner)
        elif name not in found and (was := cls.row(name).was) is not NEEDED:
            found[name] = was
    return found


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """A Recipe as plain JSON-able data, without what does not stand; `from_tree(to_tree(r)) == r`."""
    return _stands(recipe, recipe.model_dump(mode="json"))


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values at dotted keys of it. Raises Refused."""
    tree = to_tree(recipe)
    for key, value in values.items():
        parents, _, last = key.rpartition(".")
        at(tree, parents)[last] = value
    return from_tree(tree)


def _stands(config: Config, tree: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is None and not field.is_required():
            continue
        found[name] = _stands(value, tree[name]) if isinstance(value, Config) else tree[name]
    return found


def _tuples(node: Any) -> Any:
    """Lists as tuples, all the way down: strict frozen models take no lists."""
    if isinstance(node, Mapping):
        return {k: _tuples(v) for k, v in node.items()}
    return tuple(map(_tuples, node)) if isinstance(node, (list, tuple)) else node


def _endless(node: Any, key: str = "") -> Iterator[str]:
    """Keys of integers that no flag takes and whose digits Python may refuse to print."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _endless(value, f"{key}.{name}" if key else name)
    elif isinstance(node, tuple):
        for value in node:
            yield from _endless(value, key)
    elif isinstance(node, int) and node.bit_length() > 63:
        yield key


def _vanishing(node: Any, key: str = "") -> Iterator[Problem]:
    """Numbers that a GPU would not have: fp32 makes zero of them, or infinity."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, tuple) else ():
        yield from _vanishing(value, f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}" if key else name)
    if isinstance(node, float) and node and not SMALLEST <= abs(node) <= LARGEST:
        became = "zero" if abs(node) < SMALLEST else "infinity"
        hint = f"its numbers are from {SMALLEST:.3g} to {LARGEST:.3g}" + "; `0` says zero" * (became == "zero")
        yield Problem(f"fp32 would make {became} of {node!r}", key=key, hint=hint, law="value-beyond-fp32")


def _first_line(err: Exception) -> str:
    return str(err).splitlines()[0].rstrip(".") if str(err) else type(err).__name__


def _dotted(loc: Iterable[Any]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _begun(tree: Mapping[str, Any]) -> Iterator[str]:
    """Kinds that lack keys, and of which nothing else is wrong: what is written of a misspelt one is told."""
    model = tree.get("model")
    blocks = model.get("blocks") if isinstance(model, Mapping) else None
    for kind, said in blocks.items() if isinstance(blocks, Mapping) else ():
        try:
            if computing := config_at(("model", "blocks", kind)):
                computing.model_validate(_tuples(said))
        except ValidationError as err:
            if all(error["type"] == "missing" for error in err.errors(include_url=False)):
                yield kind


def _problems(err: ValidationError, tree: Any) -> Iterator[Problem]:
    """What is wrong with a tree, once for all keys that a section lacks; a misspelt one is not lacking, too.

    Of a kind that no letter names they are not asked for: it is refused itself.
    """
    named, told = resolve.named(tree), set[tuple[int | str, ...]]()
    errors = err.errors(include_url=False)
    strange = [e["loc"] for e in errors if e["type"] == "extra_forbidden"]
    meant = {(*loc[:-1], likely(str(loc[-1]), keys_at(loc[:-1]))) for loc in strange}
    errors = [e for e in errors if e["type"] != "missing" or e["loc"] not in meant]
    for error in errors:
        of = error["loc"][:-1]
        if error["type"] != "missing" or isinstance(error["loc"][-1], int):
            yield _problem(error)
        elif of not in told:
            told.add(of)
            if of[:2] == ("model", "blocks") and len(of) > 2 and of[2] not in named:
                yield resolve.no_layer(str(of[2]), named)
            else:
                lacking = (e["loc"][-1] for e in errors if e["type"] == "missing" and e["loc"][:-1] == of)
                yield _missing(of, [str(name) for name in lacking])


def _missing(of: Sequence[int | str], names: Sequence[str]) -> Problem:
    """Keys that no file gives; Hydra takes one with a plus alone."""
    key = _dotted((*of, names[0]))
    plus = f"`+{re.sub(r'\[(\d+)\]', r'.\1', key)}=...`"
    if len(names) == 1:
        keys = ", ".join(f"{name}: ..." for name in keys_at((*of, names[0])))
        hint = f"write `{names[0]}: {{{keys}}}` into the file" if keys else f"give it: {plus}"
        return Problem(f"key `{names[0]}` is missing", key=_dotted(of) or key, hint=hint, place=key, law="key-missing")
    hint = f"give them in the file, or each by itself: {plus}; docs/reference.md and `nam list keys` say what each is"
    message = f"{len(names)} keys are missing: {quoted(names)}"
    return Problem(message, key=_dotted(of) or None, hint=hint, place=key, law="key-missing")


def _problem(error: Mapping[str, Any]) -> Problem:
    """One pydantic error in our words."""
    kind, loc, value = error["type"], error["loc"], error.get("input")
    key = _dotted(loc)
    if kind == "extra_forbidden":
        if hint := whole_hint([*leaves(key, value), key]):
            return Problem(
                f"unknown key `{loc[-1]}`", key=_dotted(loc[:-1]) or key, hint=hint, place=key, law="key-unknown"
            )
        keys = keys_at(loc[:-1])
        close = likely(str(loc[-1]), keys)
        within = [name for name in keys if len(str(loc[-1])) > 2 and str(loc[-1]) in name]
        near = within if len(within) == 2 else [close]  # `mamba` is half of two kinds' names, and no nearer to one
        meant = f", did you mean {' or '.join(f'`{name}`' for name in near)}?" if close else ""
        hint = None if close else keys_hint(loc[:-1])
        message = f"unknown key `{loc[-1]}`{meant}"
        return Problem(message, key=_dotted(loc[:-1]) or key, hint=hint, place=key, law="key-unknown")
    if kind == "missing":
        return Problem(f"item {loc[-1]}, counted from 0, is missing", key=_dotted(loc[:-1]), law="item-missing")
    if kind == "invalid_key" or loc[-1:] == ("[key]",):
        said = f"{_shown(value)} cannot be a key"
        return Problem(said, key=_dotted(loc[: -1 if kind == "invalid_key" else -2]) or None, law="key-malformed")
    shown = _shown(value)
    if kind == "literal_error":
        names = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        # GQA in every plan, `attention` in a recipe.
        called = [name for name, block in KINDS.items() if name in names and block.title.lower() == str(value).lower()]
        within = [name for name in names if len(str(value)) > 2 and str(value) in name]
        near = within or [name for name in (likely(str(value), names), *called) if name][:1]
        hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else None
        return Problem(f"{shown} is not one of {error['ctx']['expected']}", key=key, hint=hint, law="value-unknown")
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == FILE_NAME:
        return Problem(
            f"{shown} cannot be a file's name", key=key, hint="letters, digits, `_`, `.` and `-`", law="name-no-file"
        )
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == LAYERS:
        hint = "1 to 16 letters: A, E, M and R as in `model.pattern`, and `-`, a dense MLP"
        return Problem(f"{shown} is no pattern of layers", key=key, hint=hint, law="letter-unknown")
    if kind == "string_pattern_mismatch":
        return Problem(f"{shown} begins with a blank or `-`, or has a control character", key=key, law="name-malformed")
    if kind in ("too_long", "too_short"):
        ctx = error["ctx"]
        bound = f"at most {ctx['max_length']} items" if kind == "too_long" else f"at least {ctx['min_length']}"
        return Problem(f"must have {bound}, not {ctx['actual_length']}", key=key, law="length-out-of-range")
    text = error["msg"].replace("String should", "must").replace("Input should be", "must be")
    for theirs, ours in TYPES.items():
        text = re.sub(theirs, ours, text)
    wrong_type = kind.endswith("_type") or kind == "int_from_float"
    kind_of = f" ({type(value).__name__})" if wrong_type and isinstance(value, (bool, int, float, str)) else ""
    return Problem(f"{text}, not {shown}{kind_of}", key=key or None, law="value-out-of-range")


# Pydantic's names of types, and what a person who writes YAML calls them.
TYPES = {
    r"a valid tuple": "a list",
    r"a valid dictionary.*": "a mapping",
    r"a valid integer": "an integer",
    r"a valid boolean": "true or false",
    r"a valid": "a",
}


def _shown(value: Any) -> str:
    """A value as YAML has it, shortened."""
    try:
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a set or a date; an integer of thousands of digits
        text = f"{type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."
