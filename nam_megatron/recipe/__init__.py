"""Stage 1, conf -> Recipe: Hydra composes, OmegaConf goes out at once, strict frozen models come in.

A `Recipe` holds what was meant and stands: of the kinds and features that conf/ writes out, those that this model uses.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import Field, ValidationError

from nam_megatron import resolvers
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import Problem, Refused, likely, quoted, raise_if
from nam_megatron.features.names import FEATURES, Features
from nam_megatron.origin import leaves
from nam_megatron.recipe import standing
from nam_megatron.recipe.data import Data
from nam_megatron.recipe.layout import Cluster, Device, Lane, LaneBlocks, Parallel, ProcessGroups, Storage
from nam_megatron.recipe.model import Kind, Letter, Letters, Model, Substitute
from nam_megatron.recipe.training import Optim, Precision, Schedule
from nam_megatron.setting import NEEDED, Config, Name, Row, section

__all__ = [
    "Assumption", "Cluster", "Data", "Device", "Kind", "Lane", "LaneBlocks", "Letter", "Letters", "Model", "Optim", "Parallel",
    "Precision", "Preset", "ProcessGroups", "Recipe", "Schedule", "Storage", "Substitute", "conf_dir", "config_at", "from_config",
    "from_tree", "keys_at", "keys_hint", "load", "parsed", "resolved", "to_tree", "value_at", "whole_hint",
]  # fmt: skip


# What may be part of a file's name: no path, no option.
FILE_NAME = r"^\w[\w.-]*$"
FileName = Annotated[str, Field(max_length=100, pattern=FILE_NAME)]


class Preset(Config):
    """What a preset is called."""

    executes: ClassVar[str | None] = "names"

    name: Annotated[FileName, Row("of the preset, and in the names of a run's folder and job")]
    alias_of: Annotated[Name | None, Row("the preset that this is another name of")]
    family: Annotated[Name, Row("of models that are told apart by nothing but lane, layout and kernels")]
    about: Annotated[Name, Row("what it is for, in one sentence of `list=presets`; what it is, the plan says")]


class Assumption(Config):
    """A value that nobody published and we chose; said with every plan that still has it."""

    key: Annotated[Name, Row("the recipe key")]
    value: Annotated[
        bool | int | float | str | None, Row("the value that was chosen; with another one the assumption is none")
    ]
    why: Annotated[Name, Row("one clause")]


class Recipe(Config):
    """What a person meant, every value of it that stands."""

    preset: Preset
    model: Model
    lane: Lane
    parallel: Parallel
    feature: Features
    precision: Precision
    optim: Optim
    schedule: Schedule
    data: Data
    device: Device
    cluster: Cluster
    assumptions: Annotated[dict[Name, Assumption], Row("what nobody published and we chose", executes="sentences")]

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same weights: world / (tensor * pipeline * context)."""
        p = self.parallel
        return self.world_size // (p.tensor * p.pipeline * p.context)

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same experts: world / (pipeline * expert * expert_tensor)."""
        p = self.parallel
        return self.world_size // (p.pipeline * p.expert * p.expert_tensor)


def conf_dir() -> Path:
    """The folder of configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def added(words: Iterable[str]) -> list[str]:
    """Overrides as Hydra wants them: it adds keys only where it is told to, and a waiver is one: `cluster.waivers.git=why`."""
    return [f"++{word}" if word.startswith("cluster.waivers") else word for word in words]


def load(preset: str = "nam56r", overrides: Iterable[str] = ()) -> Recipe:
    """Compose and check a recipe in this process.

    Args:
        preset: a name in conf/preset.
        overrides: Hydra overrides, e.g. `lane=nemo_native`, `cluster.gpus_per_node=4`.

    Raises:
        Refused: with every finding.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from nam_megatron.origin import Origin, hydra_problem

    words = [f"preset={preset}", *added(overrides)]
    before = GlobalHydra.instance().hydra  # a caller inside a Hydra app (diff=...) gets its own back
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            try:
                cfg = compose("recipe", overrides=words)
            except Exception as err:  # whatever Hydra raises, it raises over what it was given
                raise Refused(hydra_problem(err)) from None
            return from_config(cfg, Origin("recipe", words))
    finally:
        GlobalHydra.instance().hydra = before


def from_config(cfg: DictConfig, origin: Any = None, without: Iterable[str] = ()) -> Recipe:
    """A composed Hydra config as a Recipe. `without`: top-level keys that belong to the command, not the recipe.

    Raises:
        Refused: unknown and missing keys, wrong types, values out of range, dangling interpolations.
    """
    try:
        with resolvers.pure() as impure:
            tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        absent = sorted(OmegaConf.missing_keys(cfg))
        raise Refused((Problem(f"key `{k}` must be given", k, f"give it: `{k}=...`") for k in absent), origin) from None
    except OmegaConfBaseException as err:
        key = getattr(err, "full_key", None) or None
        if impure:
            hint = "write the value: a plan says what is trained on every machine, and so does its receipt"
            raise Refused(Problem(f"`${{{impure[0]}:...}}` reads this machine", key, hint), origin) from None
        raise Refused(Problem(_first_line(err), key, "`${...}` names a key of the composed config"), origin) from None
    for key in without:
        tree.pop(key, None)
    words = origin.assigned if origin else []
    if idle := [*_chooses_nothing(tree, words), *_taken_back(tree, words)]:
        raise Refused(idle, origin)
    try:
        written = parsed(tree, origin)
    except Refused:
        begun = list(_begun(tree)) if origin else []
        if not begun or not origin.take_kinds_of_overlays(tree["model"]["blocks"], begun):
            raise
        written = parsed(tree, origin)
    try:
        recipe = resolved(written, origin.said, origin.typed) if origin else resolved(written, lambda key: False)
    except Refused as refused:
        raise Refused(refused.problems, origin) from None
    if origin:
        recipe = standing.without_unneeded(recipe, origin.overlaid)
        # A value that a person gave is no assumption of ours.
        ours = {name: a for name, a in recipe.assumptions.items() if not origin.gave(a.key)}
        recipe = recipe.model_copy(update={"assumptions": ours})
    if renamed := [*_lane_in_name_only(recipe), *(origin.astray(recipe.preset.name) if origin else ())]:
        raise Refused(renamed, origin)
    return recipe


def resolved(written: Recipe, said: standing.Said, typed: standing.Said | None = None) -> Recipe:
    """What stands of a whole recipe as conf/ writes it: see standing.py.

    Raises:
        Refused: a person said something of what does not stand, left out what does, or assumed a key that is none.
    """
    recipe = standing.stand(written, said, typed)
    raise_if([*standing.missing(recipe), *_assumed_nothing(recipe)])
    held = {name: a for name, a in recipe.assumptions.items() if value_at(recipe, a.key) == a.value}
    return recipe.model_copy(update={"assumptions": held})


def value_at(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key; None where it does not stand."""
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def _assumed_nothing(recipe: Recipe) -> Iterator[Problem]:
    for name, assumption in recipe.assumptions.items():
        *parents, last = assumption.key.split(".")
        if last not in keys_at(parents):
            yield Problem(
                f"there is no key `{assumption.key}` to assume", f"assumptions.{name}.key", keys_hint(parents)
            )


SWITCHED = "features are switched by key: `feature.NAME.KEY=...`; `~feature.NAME` turns one off"


def _chooses_nothing(tree: Mapping[str, Any], words: Sequence[tuple[str, str, Any]]) -> Iterator[Problem]:
    """`feature=fp8` would put the keys of one feature in the place of all of them; `feature={}` leaves all as they are."""
    for text, key, value in words:
        if key == "feature" and isinstance(value, list):
            yield Problem(f"`{text}`: `feature` is no list", None, SWITCHED)
        if key == "feature" and isinstance(value, str) and value in FEATURES:
            hint = f"features are switched by key, e.g. `feature.{value}.{keys_at((key, value))[0]}=...`"
            if value in (tree.get("feature") or {}):
                hint += f"; `~feature.{value}` turns it off"
            yield Problem(f"`{text}`: `{value}` is one feature, and `feature` is all of them", None, hint)
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
                yield Problem(message, None, hint)


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
            yield Problem(f"`{text}` is given, and `{by}` takes it away", None, "keep one of them")


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
            yield Problem(message, f"lane.{key}", hint)


def from_tree(tree: Mapping[str, Any], origin: Any = None) -> Recipe:
    """A plain nested mapping, as `to_tree` makes it, as a Recipe. Raises Refused; what does not stand may not be in it."""
    recipe = parsed(filled(tree), origin)
    try:
        raise_if([*standing.missing(recipe), *_assumed_nothing(recipe)])
    except Refused as refused:
        raise Refused(refused.problems, origin) from None
    return recipe


def parsed(tree: Mapping[str, Any], origin: Any = None) -> Recipe:
    """A nested mapping as a Recipe, whether all of it stands or not. Raises Refused."""
    try:
        recipe = Recipe.model_validate(_tuples(tree))
    except ValidationError as err:
        raise Refused(_problems(err, tree), origin) from None
    if endless := list(_endless(recipe.model_dump())):
        raise Refused((Problem("an integer of more than 63 bits", key) for key in endless), origin)
    return recipe


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


def _first_line(err: Exception) -> str:
    return str(err).splitlines()[0].rstrip(".") if str(err) else type(err).__name__


def _dotted(loc: Iterable[Any]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def keys_at(loc: Iterable[Any]) -> tuple[str, ...]:
    """Names of the keys that exist under `loc`, the parts of a key; none where `loc` itself does not exist."""
    found = config_at(loc)
    return tuple(found.model_fields) if found else ()


def config_at(loc: Iterable[Any]) -> type[Config] | None:
    """The config class of the section at `loc`, the parts of a key; None where there is none."""
    cls: type[Config] | None = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        cls = section(cls.model_fields[part].annotation) if cls and part in cls.model_fields else None
    return cls


def keys_hint(loc: Sequence[Any]) -> str:
    """For somebody who wrote a key under `loc` that does not exist. At the top a command has words of its own."""
    names = keys_at(loc) if loc else ()
    return f"there are: {', '.join(names)}" if names else "`--cfg job` prints every key there is"


def whole_hint(written: Iterable[str]) -> str | None:
    """For somebody who wrote the end of a key, or left something in it out; of a feature its switch. The first that is one tells."""
    for key in written:
        above, _, last = key.rpartition(".")
        found = [
            f"`{known}.{feature.switch}`" if (feature := FEATURES.get(known.removeprefix("feature."))) else f"`{known}`"
            for known in (known for known in _known() if not known.startswith("lane."))  # a lane's are its name's
            if known.endswith(f".{key}") or (known.startswith(f"{above}.") and known.endswith(f".{last}"))
        ]
        if found:
            return f"a recipe key is written whole: {' or '.join(found)}"
    return None


def _known(cls: type[Config] = Recipe, path: str = "") -> Iterator[str]:
    """Every key that the command line can give, sections too."""
    for name, field in cls.model_fields.items():
        yield path + name
        inner = section(field.annotation)
        if inner and getattr(field.annotation, "__origin__", None) not in (tuple, dict):
            yield from _known(inner, f"{path}{name}.")


def _begun(tree: Mapping[str, Any]) -> Iterator[str]:
    """Kinds that lack keys, and of which nothing else is wrong: what is written of a misspelt one is told."""
    model = tree.get("model")
    blocks = model.get("blocks") if isinstance(model, Mapping) else None
    for kind, said in blocks.items() if isinstance(blocks, Mapping) else ():
        try:
            if kind in KINDS:
                KINDS[kind].model_validate(_tuples(said))
        except ValidationError as err:
            if all(error["type"] == "missing" for error in err.errors(include_url=False)):
                yield kind


def _problems(err: ValidationError, tree: Any) -> Iterator[Problem]:
    """What is wrong with a tree, once for all keys that a section lacks.

    Of a kind that no letter names they are not asked for: it is refused itself.
    """
    named, told = standing.named(tree), set[tuple[int | str, ...]]()
    errors = err.errors(include_url=False)
    for error in errors:
        of = error["loc"][:-1]
        if error["type"] != "missing" or isinstance(error["loc"][-1], int):
            yield _problem(error)
        elif of not in told:
            told.add(of)
            if of[:2] == ("model", "blocks") and len(of) > 2 and of[2] not in named:
                yield standing.no_layer(str(of[2]), named)
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
        return Problem(f"key `{names[0]}` is missing", _dotted(of) or key, hint, place=key)
    hint = f"give them in the file, or each by itself: {plus}"
    return Problem(f"{len(names)} keys are missing: {quoted(names)}", _dotted(of) or None, hint, place=key)


def _problem(error: Mapping[str, Any]) -> Problem:
    """One pydantic error in our words."""
    kind, loc, value = error["type"], error["loc"], error.get("input")
    key = _dotted(loc)
    if kind == "extra_forbidden":
        if hint := whole_hint([*leaves(key, value), key]):
            return Problem(f"unknown key `{loc[-1]}`", _dotted(loc[:-1]) or key, hint, place=key)
        close = likely(str(loc[-1]), keys_at(loc[:-1]))
        meant = f", did you mean `{close}`?" if close else ""
        hint = None if close else keys_hint(loc[:-1])
        return Problem(f"unknown key `{loc[-1]}`{meant}", _dotted(loc[:-1]) or key, hint, place=key)
    if kind == "missing":
        return Problem(f"item {loc[-1]}, counted from 0, is missing", _dotted(loc[:-1]))
    if kind == "invalid_key" or loc[-1:] == ("[key]",):
        return Problem(f"{_shown(value)} cannot be a key", _dotted(loc[: -1 if kind == "invalid_key" else -2]) or None)
    shown = _shown(value)
    if kind == "literal_error":
        names = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        # GQA in every plan, `attention` in a recipe.
        called = [name for name, block in KINDS.items() if name in names and block.title.lower() == str(value).lower()]
        close = likely(str(value), names) or next(iter(called), None)
        hint = f"did you mean `{close}`?" if close else None
        return Problem(f"{shown} is not one of {error['ctx']['expected']}", key, hint)
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == FILE_NAME:
        return Problem(f"{shown} cannot be a file's name", key, "letters, digits, `_`, `.` and `-`")
    if kind == "string_pattern_mismatch":
        return Problem(f"{shown} begins with a blank or `-`, or has a control character", key)
    if kind == "too_long":
        return Problem(
            f"must have at most {error['ctx']['max_length']} items, not {error['ctx']['actual_length']}", key
        )
    text = error["msg"].replace("String should", "must").replace("Input should be", "must be")
    for theirs, ours in TYPES.items():
        text = re.sub(theirs, ours, text)
    wrong_type = kind.endswith("_type") or kind == "int_from_float"
    kind_of = f" ({type(value).__name__})" if wrong_type and isinstance(value, (bool, int, float, str)) else ""
    return Problem(f"{text}, not {shown}{kind_of}", key or None)


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
