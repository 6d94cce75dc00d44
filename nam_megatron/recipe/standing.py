"""What of a written recipe stands: the letters of the layers, the kind at each, the features that are on. The rest goes.

conf/ writes every kind and feature out, so that a person can read and override it; a plan holds those that it uses. The library's
own values of the others are left out; what a person says of them is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.errors import Problem, Refused, quoted, raise_if
from nam_megatron.features.names import FEATURES
from nam_megatron.setting import Config

if TYPE_CHECKING:
    from nam_megatron.recipe import Recipe

IDLE = "nothing reads this"
HISTORIC = {"D": "is DSA to Megatron", "G": "is Megatron's symbol, and no letter, of it"}
Said = Callable[[str], bool]


def letters(recipe: "Recipe") -> tuple[str, list[int]]:
    """The letters of all layers, and the layer numbers after which pipes were written.

    Raises:
        Refused: letters that are none; a pattern that `depth` layers would cut, or whose segments are another number.
    """
    pattern, depth = recipe.model.pattern, recipe.model.depth
    raise_if(_no_letters(pattern))
    if "|" not in pattern:
        if len(pattern) > depth:
            message = f"a pattern of {len(pattern)} letters for {depth} layers: the last {len(pattern) - depth} would be cut off"
            hint = f"set `model.depth={len(pattern)}`, or write the letters of {depth} layers: `model.pattern={pattern[:depth]}`"
            raise Refused(
                Problem(message, "model.pattern", hint if depth <= 60 else f"set `model.depth={len(pattern)}`")
            )
        return "".join(pattern[i % len(pattern)] for i in range(depth)), []
    pieces = pattern.split("|")
    if not all(pieces):
        hint = "write letters on both sides of each `|`"
        raise Refused(Problem("the pattern has an empty pipeline segment", "model.pattern", hint))
    if (total := sum(map(len, pieces))) != depth:
        message = (
            f"the pattern's segments have {total} letters and `model.depth` is {depth}; a pattern with `|` is not tiled"
        )
        hint = f"set `model.depth={total}`, or write no `|` and let the planner cut"
        raise Refused(Problem(message, "model.pattern", hint))
    ends, end = [], 0
    for piece in pieces[:-1]:
        end += len(piece)
        ends.append(end)
    return "".join(pieces), ends


def tiling(recipe: "Recipe") -> str | None:
    """How the pattern becomes the layers, in words; None where it has a letter for each."""
    pattern, depth = recipe.model.pattern, recipe.model.depth
    if "|" in pattern or len(pattern) == depth:
        return None
    times, rest = divmod(depth, len(pattern))
    more = f" and its first {rest}" if rest else ""
    return f"{pattern} {times} times{more}: {depth} layers"


def _no_letters(pattern: str) -> Iterator[Problem]:
    for letter in dict.fromkeys(pattern.replace("|", "")):
        if letter in HISTORIC:
            message = f"letter `{letter}` meant gated delta net once, and {HISTORIC[letter]}; it is not accepted"
            hint = f"letters are {', '.join(LETTERS)}; sparse attention stands by `model.substitute`, a gated delta net at `M`"
            yield Problem(message, "model.pattern", hint)
        elif letter not in LETTERS:
            yield Problem(
                f"`{letter}` is no letter of a pattern", "model.pattern", f"letters are {', '.join(LETTERS)} and `|`"
            )


def kinds(recipe: "Recipe", letters: str) -> list[str]:
    """The kind at each layer: the lane's block at M and R, else the model's letter, then the substitutes by rank.

    Raises:
        Refused: a kind that cannot stand at its letter, a rank that is not there or taken twice, GQA beside MLA.
    """
    model, standing, problems = recipe.model, {}, []
    for letter in LETTERS:
        if letter not in letters:
            continue
        lane = getattr(recipe.lane.blocks, letter, None)
        kind = lane or getattr(model.letters, letter)
        key = f"lane.blocks.{letter}" if lane else f"model.letters.{letter}"
        standing[letter] = kind
        if kind is None:
            problems.append(Problem(f"no kind stands at `{letter}`", key, f"one of {', '.join(LETTERS[letter])}"))
        elif kind not in LETTERS[letter]:
            hint = f"one of {', '.join(LETTERS[letter])}"
            problems.append(Problem(f"`{kind}` cannot stand at `{letter}`", key, hint))
    found = [standing[letter] for letter in letters]
    taken: dict[tuple[str, int], int] = {}
    for index, sub in enumerate(model.substitute):
        key = f"model.substitute[{index}]"
        places = [i for i, letter in enumerate(letters) if letter == sub.letter]
        if sub.kind not in LETTERS[sub.letter]:
            hint = f"one of {', '.join(LETTERS[sub.letter])}"
            problems.append(Problem(f"`{sub.kind}` cannot stand at `{sub.letter}`", f"{key}.kind", hint))
        for rank in sub.ranks:
            if rank >= len(places):
                message = f"there is no `{sub.letter}` of rank {rank}: {len(places)} of them, counted from 0"
                hint = "ranks count within the letter; Megatron's layer numbers are something else"
                problems.append(Problem(message, f"{key}.ranks", hint))
            elif (sub.letter, rank) in taken:
                problems.append(Problem(f"`{sub.letter}` rank {rank} is substituted twice", f"{key}.ranks"))
            else:
                taken[sub.letter, rank] = index
                found[places[rank]] = sub.kind
    if "attention" in found and {"mla", "dsa"} & set(found):
        message = "GQA and MLA in one model: Megatron would give GQA no position embedding"
        hint = "let `model.letters.A` be `mla`, or substitute nothing (`model.substitute=[]`)"
        problems.append(Problem(message, "model.substitute", hint))
    raise_if(problems)
    return found


def mtp(recipe: "Recipe", main: list[str]) -> tuple[str, ...]:
    """Kinds of one MTP depth: attention as the main stack has it, never DSA, and a dense MLP; none without MTP."""
    if not (recipe.feature.mtp and recipe.feature.mtp.on):
        return ()
    attention = "mla" if {"mla", "dsa"} & set(main) else "attention" if "attention" in main else None
    if attention is None:
        message = "MTP needs an attention kind and the pattern has none"
        raise Refused(Problem(message, "feature.mtp.depths", "set it to 0"))
    return attention, "mlp"


def everywhere(recipe: "Recipe") -> frozenset[str]:
    """Every kind that stands anywhere, MTP included."""
    main = kinds(recipe, letters(recipe)[0])
    return frozenset(main) | frozenset(mtp(recipe, main))


def stand(recipe: "Recipe", said: Said, typed: Said | None = None) -> "Recipe":
    """`recipe` with what stands alone. said: whether a person wrote this key, or a key below it; typed: on the command line.

    A feature that is switched off on the command line puts out what a preset says of it.

    Raises:
        Refused: something is said of a kind that no layer has, of a feature that is off, or of a key that nothing reads.
    """
    here = everywhere(recipe)
    configs = here | {needed for kind in here for needed in KINDS[kind].needs}
    feature, problems = recipe.feature, list[Problem]()
    for kind in KINDS:
        if kind not in configs and said(f"model.blocks.{kind}"):
            keys = (f"model.blocks.{kind}.{name}" for name in KINDS[kind].model_fields)
            by_hand = next((key for key in keys if typed and typed(key)), None)
            problems.append(replace(no_layer(kind, here, recipe), place=by_hand))
    off = [name for name in FEATURES if getattr(feature, name) is not None and not getattr(feature, name).on]
    for name in off:
        cls = FEATURES[name]
        put_out = typed is not None and typed(f"feature.{name}.{cls.switch}")
        for key in cls.model_fields:
            if key != cls.switch and (typed if put_out and typed else said)(f"feature.{name}.{key}"):
                message = f"`{key}` of a feature that is off"
                word = typed is not None and typed(f"feature.{name}.{key}")
                out = "leave it out" if word else f"leave out what a file says: `~feature.{name}`"
                hint = f"switch it on with `feature.{name}.{cls.switch}`, or {out}"
                problems.append(Problem(message, f"feature.{name}.{key}", hint))
    idle = dict(_idle(recipe, here, configs, frozenset(off)))
    for key, why in idle.items():
        # A family's design, in a file, has letters that not every pattern has.
        if typed(key) if typed and key.startswith("model.letters.") else said(key):
            problems.append(Problem(f"{IDLE}: {why}", key, "leave it out"))
    raise_if(problems)
    blocks = {kind: None for kind in KINDS if kind not in configs}
    recipe = _without(recipe, ("model", "blocks"), blocks)
    recipe = _without(recipe, ("feature",), dict.fromkeys(off))
    for key in idle:
        *parents, last = key.split(".")
        owner = _at(recipe, parents)
        if not type(owner).model_fields[last].is_required():
            recipe = _without(recipe, parents, {last: None})
    return recipe


def no_layer(kind: str, here: frozenset[str], recipe: "Recipe | None" = None) -> Problem:
    """For somebody who configures a kind that does not stand."""
    block = KINDS[kind]
    stands = quoted(k for k in KINDS if k in here)
    out = f"leave this out (what a preset or an overlay said: `~model.blocks.{kind}`)"
    hint = f"{stands} stand here; {out}, or {_way(kind, recipe)}"
    for x in block.letters if recipe else ():
        if recipe and getattr(recipe.model.letters, x) == kind and (by := _stands_at(recipe, x)) != kind:
            hint = f"lane `{recipe.lane.name}` puts `{by}` at `{x}`; with `lane=own_dp` the model's `{kind}` stands there; or {out}"
    return Problem(f"no layer is {block.title}", f"model.blocks.{kind}", hint)


def _way(kind: str, recipe: "Recipe | None") -> str:
    """How a layer would become one. A letter may be `kind` already, and not be written."""
    letters = KINDS[kind].letters
    if recipe and (named := [x for x in letters if _stands_at(recipe, x) == kind]):
        return f"write {' or '.join(f'`{x}`' for x in named)} into `model.pattern`"
    # A lane of ours puts nothing else at its letters.
    ways = (
        f"lane.blocks.{x}={kind} lane.name=NAME" if x in ("M", "R") else f"model.letters.{x}={kind}" for x in letters
    )
    return f"let a letter be `{kind}`: " + ", ".join(f"`{way}`" for way in ways)


def _stands_at(recipe: "Recipe", letter: str) -> str | None:
    found: str | None = getattr(recipe.lane.blocks, letter, None) or getattr(recipe.model.letters, letter)
    return found


def _keys_of(kind: str) -> str:
    keys = KINDS[kind].model_fields
    return (
        f"give its keys, {', '.join(keys)}: `+model.blocks.{kind}=...`"
        if keys
        else f"it has no keys: `+model.blocks.{kind}={{}}`"
    )


def _part(tree: Any, name: str) -> dict[str, Any]:
    """A section of an unread recipe; nothing where it is none."""
    found = tree.get(name) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def named(tree: Any) -> frozenset[str]:
    """Kinds that an unread recipe names at a letter, in its lane or for single ranks, and those that they need."""
    model, lane = _part(tree, "model"), _part(tree, "lane")
    substitute = model.get("substitute")
    items = substitute if isinstance(substitute, (list, tuple)) else ()
    at = _part(model, "letters") | {letter: kind for letter, kind in _part(lane, "blocks").items() if kind}
    said = [*at.values(), *(item.get("kind") for item in items if isinstance(item, dict))]
    found = {kind for kind in said if isinstance(kind, str)}
    return frozenset(found | {needed for kind in found & KINDS.keys() for needed in KINDS[kind].needs})


def idle(recipe: "Recipe") -> Iterator[str]:
    """Keys that stand in a resolved recipe, with a value, and that nothing reads."""
    here = everywhere(recipe)
    configs = frozenset(kind for kind in KINDS if getattr(recipe.model.blocks, kind))
    return (key for key, _ in _idle(recipe, here, configs, frozenset()))


def without_unneeded(recipe: "Recipe", overlaid: Said) -> "Recipe":
    """A resolved recipe without what an overlay asks of every model and this one has no use for."""
    here = everywhere(recipe)
    owners = [(f"model.blocks.{kind}", getattr(recipe.model.blocks, kind)) for kind in KINDS]
    owners += [(f"feature.{name}", getattr(recipe.feature, name)) for name in FEATURES]
    for owner, config in owners:
        for key, value in config.unneeded(recipe, here) if config else ():
            if overlaid(f"{owner}.{key}"):
                recipe = _without(recipe, owner.split("."), {key: value})
    return recipe


def _idle(
    recipe: "Recipe", here: frozenset[str], configs: frozenset[str], off: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """(dotted key, why nothing reads it), of the kinds and features that stand and of the sections."""
    for name in type(recipe).model_fields:
        part = getattr(recipe, name)
        if isinstance(part, Config):
            yield from ((f"{name}.{key}", why) for key, why in part.idle(recipe, here))
    for kind in configs:
        if block := getattr(recipe.model.blocks, kind):
            yield from ((f"model.blocks.{kind}.{key}", why) for key, why in block.idle(recipe, here))
    for name in FEATURES:
        if name not in off and (feature := getattr(recipe.feature, name)):
            yield from ((f"feature.{name}.{key}", why) for key, why in feature.idle(recipe, here))


def missing(recipe: "Recipe") -> Iterator[Problem]:
    """Configs that the layers need and the recipe lacks, and those that it has for nothing: of a recipe that `stand` did not make."""
    here = everywhere(recipe)
    configs = here | {needed for kind in here for needed in KINDS[kind].needs}
    for kind in KINDS:
        block = getattr(recipe.model.blocks, kind)
        if block is None and kind in configs:
            message = f"a layer is `{kind}`, and nothing says what that is"
            yield Problem(message, f"model.blocks.{kind}", _keys_of(kind))
        elif block is not None and kind not in configs:
            yield no_layer(kind, here, recipe)
    for name, cls in FEATURES.items():
        feature = getattr(recipe.feature, name)
        if feature is not None and not feature.on:
            yield Problem(f"feature `{name}` is off", f"feature.{name}.{cls.switch}", "leave the feature out")
    idle = dict(_idle(recipe, here, configs, frozenset()))
    for path, config in _configs(recipe, ""):
        for key, field in type(config).model_fields.items():
            at = f"{path}{key}"
            if field.is_required() or key in KINDS or key in FEATURES:
                continue
            if getattr(config, key) is None and at not in idle and not at.startswith("lane.blocks."):
                yield Problem(f"key `{key}` is missing", at, f"give it: `++{at}=...`")
            elif getattr(config, key) is not None and at in idle:
                yield Problem(f"{IDLE}: {idle[at]}", at, "leave it out")


def _configs(config: Config, path: str) -> Iterator[tuple[str, Config]]:
    yield path, config
    for name in type(config).model_fields:
        if isinstance(part := getattr(config, name), Config):
            yield from _configs(part, f"{path}{name}.")


def _at(node: Any, parents: list[str] | tuple[str, ...]) -> Any:
    for name in parents:
        node = getattr(node, name)
    return node


def _without(recipe: Any, parents: list[str] | tuple[str, ...], update: dict[str, Any]) -> Any:
    """A copy with other values at `parents`."""
    if not parents:
        return recipe.model_copy(update=update)
    first, *rest = parents
    return recipe.model_copy(update={first: _without(getattr(recipe, first), rest, update)})
