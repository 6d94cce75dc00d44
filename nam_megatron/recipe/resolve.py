"""What of a written recipe stands: the letters of the layers, the kind at each, the features that are on. The rest goes.

conf/ writes every kind and feature out, so that a person can read and override it; a plan holds those that it uses. The library's
own values of the others are left out; what a person says of them is refused.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.errors import Problem, Refused, quoted, raise_if
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe.recipe import Recipe
from nam_megatron.recipe.site import site
from nam_megatron.words.setting import Config

UNREAD = "nothing reads this"
HISTORIC = {"D": "is DSA to Megatron", "G": "is Megatron's symbol, and no letter, of it"}
Said = Callable[[str], bool]
PARTS = ("model.blocks", "execution")  # what a kind computes, and how it is executed


def letters(recipe: Recipe) -> tuple[str, list[int]]:
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
                message,
                key="model.pattern",
                hint=hint if depth <= 60 else f"set `model.depth={len(pattern)}`",
                law="pattern-cut-off",
            )
        return "".join(pattern[i % len(pattern)] for i in range(depth)), []
    pieces = pattern.split("|")
    if not all(pieces):
        hint = "write letters on both sides of each `|`"
        raise Refused("the pattern has an empty pipeline segment", key="model.pattern", hint=hint, law="segment-empty")
    if (total := sum(map(len, pieces))) != depth:
        message = (
            f"the pattern's segments have {total} letters and `model.depth` is {depth}; a pattern with `|` is not tiled"
        )
        hint = f"set `model.depth={total}`, or write no `|` and let the planner cut"
        raise Refused(message, key="model.pattern", hint=hint, law="segments-against-depth")
    ends, end = [], 0
    for piece in pieces[:-1]:
        end += len(piece)
        ends.append(end)
    return "".join(pieces), ends


def tiling(recipe: Recipe) -> str | None:
    """How the pattern becomes the layers, in words; None where it has a letter for each."""
    pattern, depth = recipe.model.pattern, recipe.model.depth
    if "|" in pattern or len(pattern) == depth:
        return None
    times, rest = divmod(depth, len(pattern))
    more = f" and its first {rest}" if rest else ""
    return f"{pattern} {'once' if times == 1 else f'{times} times'}{more}: {depth} layers"


def _no_letters(pattern: str) -> Iterator[Problem]:
    strange = [letter for letter in dict.fromkeys(pattern.replace("|", "")) if letter not in LETTERS]
    for letter in (letter for letter in strange if letter in HISTORIC):
        message = f"letter `{letter}` meant gated delta net once, and {HISTORIC[letter]}; it is not accepted"
        hint = (
            f"letters are {', '.join(LETTERS)}; sparse attention stands by `model.substitute`, a gated delta net at `M`"
        )
        yield Problem(message, key="model.pattern", hint=hint, law="letter-historic")
    if unknown := [letter for letter in strange if letter not in HISTORIC]:
        said = "is no letter of a pattern" if len(unknown) == 1 else "are no letters of a pattern"
        hint = f"letters are {', '.join(LETTERS)} and `|`"
        hint += f": `{pattern.upper()}`" if {*pattern.upper()} <= {*LETTERS, "|"} else ""
        yield Problem(f"{quoted(unknown)} {said}", key="model.pattern", hint=hint, law="letter-unknown")


def kinds(recipe: Recipe, letters: str) -> list[str]:
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
            problems.append(
                Problem(
                    f"no kind stands at `{letter}`",
                    key=key,
                    hint=f"one of {', '.join(LETTERS[letter])}",
                    law="letter-without-kind",
                )
            )
        elif kind not in LETTERS[letter]:
            problems.append(_misplaced(kind, letter, key))
        if lane and (designed := getattr(model.letters, letter)) and designed not in LETTERS[letter]:
            problems.append(_misplaced(designed, letter, f"model.letters.{letter}"))
    found = [standing[letter] for letter in letters]
    taken: dict[tuple[str, int], int] = {}
    for index, sub in enumerate(model.substitute):
        key = f"model.substitute[{index}]"
        places = [i for i, letter in enumerate(letters) if letter == sub.letter]
        if sub.kind not in LETTERS[sub.letter]:
            problems.append(_misplaced(sub.kind, sub.letter, f"{key}.kind"))
        if beyond := [str(rank) for rank in sub.ranks if rank >= len(places)]:
            ranks = f"rank{'s' * (len(beyond) > 1)} {', '.join(beyond)}"
            message = f"there is no `{sub.letter}` of {ranks}: {len(letters)} layers have {len(places)} of them, counted from 0"
            hint = "leave it out, or substitute nothing: `model.substitute=[]`; ranks count within the letter, not as Megatron's layers"
            problems.append(Problem(message, key=f"{key}.ranks", hint=hint, law="rank-beyond-letters"))
        for rank in (rank for rank in sub.ranks if rank < len(places)):
            if (sub.letter, rank) in taken:
                problems.append(
                    Problem(
                        f"`{sub.letter}` rank {rank} is substituted twice",
                        key=f"{key}.ranks",
                        law="rank-substituted-twice",
                    )
                )
            else:
                taken[sub.letter, rank] = index
                found[places[rank]] = sub.kind
    if "attention" in found and latent(found):
        message = "GQA and MLA in one model: Megatron would give GQA no position embedding"
        hint = "let `model.letters.A` be `mla`, or substitute nothing (`model.substitute=[]`)"
        problems.append(Problem(message, key="model.substitute", hint=hint, law="attention-beside-latents"))
    raise_if(problems)
    return found


def latent(kinds: Collection[str]) -> str | None:
    """The plain one of attention whose keys come from a latent, where these have any."""
    found = next((kind for kind in kinds if KINDS[kind].latent), None)
    return found and next(iter(KINDS[found].needs), found)


def _misplaced(kind: str, letter: str, key: str) -> Problem:
    message = f"`{kind}` cannot stand at `{letter}`"
    return Problem(message, key=key, hint=f"one of {', '.join(LETTERS[letter])}", law="kind-misplaced")


def mtp(recipe: Recipe, main: list[str]) -> tuple[str, ...]:
    """Kinds of one MTP depth, none without MTP: at A attention as the main stack has it, never DSA; at `-` a dense MLP; else the letter's.

    Raises:
        Refused: an A where the main stack has no attention, a letter at which no kind stands.
    """
    if not (recipe.feature.mtp and recipe.feature.mtp.on):
        return ()
    at = {letter: _stands_at(recipe, letter) for letter in LETTERS}
    at |= {"A": latent(main) or ("attention" if "attention" in main else None), "-": "mlp"}
    pattern = recipe.feature.mtp.pattern
    if "A" in pattern and at["A"] is None:
        message = "MTP needs an attention kind and the pattern has none"
        hint = "set it to 0, or write no `A` into `feature.mtp.pattern`"
        raise Refused(message, key="feature.mtp.depths", hint=hint, law="mtp-without-attention")
    for letter in dict.fromkeys(pattern):
        kind, key = at[letter], f"model.letters.{letter}"
        if kind is None:
            hint = f"one of {', '.join(LETTERS[letter])}, or leave `{letter}` out of `feature.mtp.pattern`"
            raise Refused(f"no kind stands at `{letter}` of MTP", key=key, hint=hint, law="letter-without-kind")
        if letter in LETTERS and kind not in LETTERS[letter]:
            raise_if([_misplaced(kind, letter, key)])
    return tuple(kind for letter in pattern if (kind := at[letter]))


def everywhere(recipe: Recipe) -> frozenset[str]:
    """Every kind that stands anywhere, MTP included."""
    main = kinds(recipe, letters(recipe)[0])
    return frozenset(main) | frozenset(mtp(recipe, main))


def stand(recipe: Recipe, said: Said, typed: Said | None = None, chosen: Said | None = None) -> Recipe:
    """`recipe` with what stands alone. said: whether a person wrote this key, or a key below it; typed: on the command line; chosen:
    anywhere but in the model's own file, which is a family's design.

    A feature that is switched off on the command line puts out what a preset says of it.

    Raises:
        Refused: something is said of a kind that no layer has, of a feature that is off, of a key that nothing reads, or of a letter
            at which something else stands.
    """
    here, chosen = everywhere(recipe), chosen or said
    configs = here | {needed for kind in here for needed in KINDS[kind].needs}
    feature, problems = recipe.feature, list[Problem]()
    for kind in KINDS:
        of = [section for section in PARTS if said(f"{section}.{kind}")] if kind not in configs else []
        if of:
            keys = (KINDS[kind].at(name) for name in KINDS[kind].model_fields)
            by_hand = next((key for key in keys if typed and typed(key)), None)
            problems.append(replace(no_layer(kind, here, recipe, of[0]), place=by_hand))
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
                problems.append(Problem(message, key=f"feature.{name}.{key}", hint=hint, law="feature-off"))
    idle = dict(_idle(recipe, here, configs, frozenset(off)))
    for key, why in idle.items():
        # A family's design, in a file, has letters that not every pattern has.
        if typed(key) if typed and key.startswith("model.letters.") else said(key):
            problems.append(Problem(f"{UNREAD}: {why}", key=key, hint="leave it out", law="key-unread"))
    raise_if([*problems, *_outdone(recipe, chosen)])
    for section in PARTS:
        fields = type(_at(recipe, section.split("."))).model_fields
        recipe = _without(recipe, section.split("."), {k: None for k in KINDS if k in fields and k not in configs})
    recipe = _without(recipe, ("feature",), dict.fromkeys(off))
    for key in idle:
        *parents, last = key.split(".")
        owner = _at(recipe, parents)
        if not type(owner).model_fields[last].is_required():
            recipe = _without(recipe, parents, {last: None})
    return recipe


def _outdone(recipe: Recipe, chosen: Said) -> Iterator[Problem]:
    """What is said of a letter and no layer has: the lane puts another kind there, or all its ranks are substituted."""
    model, lane = recipe.model, recipe.lane
    for letter in dict.fromkeys(model.pattern.replace("|", "")):
        key, here = f"model.letters.{letter}", getattr(lane.blocks, letter, None)
        asked = getattr(model.letters, letter)
        if here and asked != here and chosen(key):
            out = f"lane `{lane.name}` puts `{here}` at `{letter}`"
            yield Problem(f"{UNREAD}: {out}", key=key, hint=_in_the_lanes_place(asked, letter), law="letter-outdone")
            continue
        standing = {
            kind for at, kind in zip(letters(recipe)[0], kinds(recipe, letters(recipe)[0]), strict=True) if at == letter
        }
        key, asked = (f"lane.blocks.{letter}", here) if here else (key, asked)
        if asked not in standing and (here or chosen(key)):
            message = f"no `{letter}` is `{asked}`: `model.substitute` puts {quoted(sorted(standing))} at all its ranks"
            hint = "leave some ranks out of it, or let the letter be what stands there"
            yield Problem(message, key=key, hint=f"{hint}: `lane=own_dp`" if here else hint, law="letter-outdone")


def _in_the_lanes_place(kind: str | None, letter: str) -> str:
    if kind is None:
        return "leave it out"
    ours = f"`lane.blocks.{letter}={kind} lane.name=NAME` puts it there, under a name of your own"
    return f"{ours}; with `lane=own_dp` all letters are the model's"


def no_layer(kind: str, here: frozenset[str], recipe: Recipe | None = None, section: str = "model.blocks") -> Problem:
    """For somebody who configures a kind that does not stand. section: where, of PARTS."""
    block = KINDS[kind]
    stands = quoted(k for k in KINDS if k in here)
    out = f"leave this out (what a preset or an overlay said: `~{section}.{kind}`)"
    hint = f"{stands} stand here; {out}, or {_way(kind, recipe)}"
    for x in block.letters if recipe else ():
        if recipe and getattr(recipe.model.letters, x) == kind and (by := _stands_at(recipe, x)) != kind:
            hint = f"lane `{recipe.lane.name}` puts `{by}` at `{x}`; with `lane=own_dp` the model's `{kind}` stands there; or {out}"
    return Problem(f"no layer is {block.title}", key=f"{section}.{kind}", hint=hint, law="kind-without-layer")


def _way(kind: str, recipe: Recipe | None) -> str:
    """How a layer would become one. A letter may be `kind` already, and not be written."""
    letters = KINDS[kind].letters
    if recipe and (named := [x for x in letters if _stands_at(recipe, x) == kind]):
        return f"write {' or '.join(f'`{x}`' for x in named)} into `model.pattern`"
    return f"let a letter be `{kind}`: " + ", ".join(_at_letter(x, kind, recipe) for x in letters)


def _at_letter(letter: str, kind: str, recipe: Recipe | None) -> str:
    """The words that put a kind at a letter, which the lane has, or the model, or neither."""
    if recipe is None:  # a lane of ours puts nothing else at its letters
        return f"`lane.blocks.{letter}={kind} lane.name=NAME`" if letter in "MR" else f"`model.letters.{letter}={kind}`"
    if getattr(recipe.lane.blocks, letter, None):
        said = f"`lane.blocks.{letter}={kind} lane.name=NAME`"
    else:
        plus = "+" * (getattr(recipe.model.letters, letter) is None)
        said = f"`{plus}model.letters.{letter}={kind}`"
    return said if letter in recipe.model.pattern else f"{said} with `{letter}` in `model.pattern`"


def _stands_at(recipe: Recipe, letter: str) -> str | None:
    found: str | None = getattr(recipe.lane.blocks, letter, None) or getattr(recipe.model.letters, letter)
    return found


def _keys_of(kind: str, recipe: Recipe) -> str:
    if keys := KINDS[kind].keys(executes=False):
        return f"give its keys, {', '.join(keys)}: `+model.blocks.{kind}=...`"
    return f"it has no keys but a width, `model.ffn_hidden_size={recipe.model.ffn_hidden_size}`: `+model.blocks.{kind}={{}}`"


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
    pattern = str(model.get("pattern"))
    said = [
        *(kind for letter, kind in at.items() if str(letter) in pattern),
        *(item.get("kind") for item in items if isinstance(item, dict)),
    ]
    found = {kind for kind in said if isinstance(kind, str)}
    return frozenset(found | {needed for kind in found & KINDS.keys() for needed in KINDS[kind].needs})


def unread(recipe: Recipe) -> Iterator[str]:
    """Keys that stand in a resolved recipe, with a value, and that nothing reads."""
    here = everywhere(recipe)
    configs = frozenset(kind for kind in KINDS if getattr(recipe.blocks, kind))
    return (key for key, _ in _idle(recipe, here, configs, frozenset()))


def without_unneeded(recipe: Recipe, overlaid: Said) -> Recipe:
    """A resolved recipe without what an overlay asks of every model and this one has no use for."""
    where = site(recipe, everywhere(recipe))
    owners: list[tuple[Callable[[str], str], Config]] = [(block.at, block) for block in recipe.blocks.all()]
    owners += [(f"feature.{name}.".__add__, feature) for name in FEATURES if (feature := getattr(recipe.feature, name))]
    for whole, config in owners:
        for key, value in config.unneeded(where):
            if overlaid(whole(key)):
                recipe = put(recipe, whole(key), value)
    return recipe


def _idle(
    recipe: Recipe, here: frozenset[str], configs: frozenset[str], off: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """(dotted key, why nothing reads it), of the kinds and features that stand and of the sections."""
    where = site(recipe, here)
    for name in type(recipe).model_fields:
        part = getattr(recipe, name)
        if isinstance(part, Config):
            yield from ((f"{name}.{key}", why) for key, why in part.unread(where))
    for kind in configs:
        if block := getattr(recipe.blocks, kind):
            yield from ((block.at(key), why) for key, why in block.unread(where))
    for name in FEATURES:
        if name not in off and (feature := getattr(recipe.feature, name)):
            yield from ((f"feature.{name}.{key}", why) for key, why in feature.unread(where))


def missing(recipe: Recipe) -> Iterator[Problem]:
    """Configs that the layers need and the recipe lacks, and those that it has for nothing: of a recipe that `stand` did not make."""
    here = everywhere(recipe)
    configs = here | {needed for kind in here for needed in KINDS[kind].needs}
    for kind in KINDS:
        block = getattr(recipe.model.blocks, kind)
        if block is None and kind in configs:
            message = f"a layer is `{kind}`, and nothing says what that is"
            only_mtp = kind not in kinds(recipe, letters(recipe)[0])
            hint = (
                f"of each MTP depth, as ours are built; {_keys_of(kind, recipe)}"
                if only_mtp
                else _keys_of(kind, recipe)
            )
            yield Problem(message, key=f"model.blocks.{kind}", hint=hint, law="kind-unsaid")
        elif block is not None and kind not in configs:
            yield no_layer(kind, here, recipe)
        how, keys = getattr(recipe.execution, kind, None), KINDS[kind].keys(executes=True)
        if how is None and kind in configs and keys:
            yield Problem(
                f"a layer is `{kind}`, and nothing says how it is executed",
                key=f"execution.{kind}",
                hint=f"give its keys, {', '.join(keys)}: `+execution.{kind}=...`",
                law="kind-unsaid",
            )
        elif how is not None and kind not in configs:
            yield no_layer(kind, here, recipe, "execution")
    for name, cls in FEATURES.items():
        feature = getattr(recipe.feature, name)
        if feature is not None and not feature.on:
            said = f"feature `{name}` is off"
            yield Problem(said, key=f"feature.{name}.{cls.switch}", hint="leave the feature out", law="feature-off")
    idle = dict(_idle(recipe, here, configs, frozenset()))
    for path, config in _configs(recipe, ""):
        for key, field in type(config).model_fields.items():
            at = f"{path}{key}"
            if field.is_required() or key in KINDS or key in FEATURES:
                continue
            if getattr(config, key) is None and at not in idle and not at.startswith("lane.blocks."):
                yield Problem(f"key `{key}` is missing", key=at, hint=f"give it: `++{at}=...`", law="key-missing")
            elif getattr(config, key) is not None and at in idle:
                yield Problem(f"{UNREAD}: {idle[at]}", key=at, hint="leave it out", law="key-unread")


def _configs(config: Config, path: str) -> Iterator[tuple[str, Config]]:
    yield path, config
    for name in type(config).model_fields:
        if isinstance(part := getattr(config, name), Config):
            yield from _configs(part, f"{path}{name}.")


def _at(node: Any, parents: list[str] | tuple[str, ...]) -> Any:
    for name in parents:
        node = getattr(node, name)
    return node


def put(recipe: Recipe, key: str, value: Any) -> Recipe:
    """A copy with another value at a dotted key."""
    *parents, last = key.split(".")
    found: Recipe = _without(recipe, parents, {last: value})
    return found


def _without(recipe: Any, parents: list[str] | tuple[str, ...], update: dict[str, Any]) -> Any:
    """A copy with other values at `parents`."""
    if not parents:
        return recipe.model_copy(update=update)
    first, *rest = parents
    return recipe.model_copy(update={first: _without(getattr(recipe, first), rest, update)})
