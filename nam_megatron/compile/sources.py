"""Where each key of a composed config was said: one table of all places, the last of which has its way."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser import overrides_parser, overrides_visitor

from nam_megatron.compile.files import read
from nam_megatron.conf import READ_FROM, conf_dir, short
from nam_megatron.errors import Problem, quoted, raise_if, raise_if_twice
from nam_megatron.recipe.keys import config_at
from nam_megatron.words.setting import leaves

# What an overlay says there of kernels is a wish; that runs are equal to the last bit, a demand.
WISHED, DEMANDED = ("execution.", "precision."), ("precision.deterministic",)
LINK = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")  # a value that is nothing but a link to another key
NOT_GIVEN = "???"  # of OmegaConf: somebody else has to give the value
YAML = yaml.constructor.SafeConstructor()


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the command line.

    key: dotted. value: None where it takes the key away. chooses: whether it is about a group's files, and not about keys.
    """

    text: str
    key: str
    value: Any
    chooses: bool
    override: Any

    @property
    def takes(self) -> bool:
        return bool(self.override.is_delete())

    @property
    def where(self) -> str:
        """Without what `recipe.added` puts before it."""
        text = self.text.removeprefix("++") if self.text.startswith(("++cluster.waivers", "++allow")) else self.text
        return f"command line: {clipped(text)}"


class Once(overrides_visitor.HydraOverrideVisitor):
    """Hydra's own takes the last of a key that stands twice in one `{...}`, without a word."""

    def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
        pairs = [ctx.getChild(i) for i in range(1, ctx.getChildCount() - 1, 2)]
        raise_if_twice((str(self.visitDictKey(pair.getChild(0))), pair.getChild(2).getText()) for pair in pairs)
        return super().visitDictContainer(ctx)


def word(text: str, folders: Sequence[Path]) -> Word:
    """A word as Hydra reads it. Raises what Hydra raises, and Refused."""
    plain, overrides_parser.HydraOverrideVisitor = overrides_parser.HydraOverrideVisitor, Once
    try:
        (override,) = overrides_parser.OverridesParser.create().parse_overrides([text])
    finally:  # whoever uses Hydra beside us has its own
        overrides_parser.HydraOverrideVisitor = plain
    value = override.value()
    group = any(next((root / override.key_or_group).glob("*.yaml"), None) for root in (conf_dir(), *folders))
    return Word(text, override.key_or_group.replace("/", "."), value, group and not isinstance(value, dict), override)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file that gives a key a value, or begins the section of that name.

    of: the group of the file, `own` of one that is no overlay and outside the library's folder. rank: the later has its way.
    """

    key: str
    node: yaml.Node
    file: Path
    line: int
    of: str
    rank: int

    @property
    def leaf(self) -> bool:
        return not (isinstance(self.node, yaml.MappingNode) and self.node.value)

    @property
    def value(self) -> Any:
        return YAML.construct_document(self.node)

    @property
    def where(self) -> str:
        return short(self.file) + ("" if self.file in READ_FROM else f":{self.line}")


def search(folders: Sequence[Path]) -> str:
    """The word that names folders of one's own."""
    return f"hydra.searchpath=[{','.join(literal(str(folder.absolute())) for folder in folders)}]"


def literal(text: str) -> str:
    """A text as a word of the command line has it whatever signs it has."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Sources:
    """The table of a composed config, and what is asked of it.

    Args:
        config_name: the config of conf/ that was composed.
        words: of the command line.
        merged: files as Hydra merged them, with the key under which each was laid (`ConfigLoader.compute_defaults_list`).
        folders: those of one's own as they were searched.
        absent: folders that were named and are none.

    points: the words of each point of the sweep that this config is one of; of one that is none, its own alone. told: what they were.
    """

    points: Sequence[Sequence[str]] = ()

    def __init__(
        self,
        config_name: str,
        words: Sequence[Word],
        merged: Sequence[Any],
        folders: Sequence[Path],
        absent: Sequence[str],
    ):
        self.config_name, self.words = config_name, words
        self.own, self._absent = list(folders), absent
        self._merged = [(default, path) for default in merged if (path := self._file(default.config_path))]
        self._lenient: list[str] = []
        self.told = set[str]()

    def _file(self, config_path: str) -> Path | None:
        """Where a file was found: the first folder has its way."""
        name = f"{config_path.removesuffix('.yaml')}.yaml"
        return next((f for r in (conf_dir(), *self.own) if (f := r / name).is_file()), None)

    @cached_property
    def _table(self) -> list[Place]:
        """Every place of every key, the last word last."""
        table = []
        for rank, (default, path) in enumerate(self._merged):
            group = default.config_path.partition("/")[0]
            of = group if group == "overlay" or path.is_relative_to(conf_dir()) else "own"
            for key, line, node in _lines(read(path).node, _package(default)):
                if key.partition(".")[0] not in ("defaults", "hydra"):
                    table.append(Place(key, node, path, line, of, rank))
        return table

    @cached_property
    def _at(self) -> dict[str, list[Place]]:
        """The table by key. Of one that stands against an overlay its place is the last."""
        found: dict[str, list[Place]] = {}
        for place in (*self._table, *self.outlasting.values()):
            found.setdefault(place.key, []).append(place)
        return found

    def _given(self, *of: str) -> tuple[str, ...]:
        """Keys to which files of these groups give a value that is not taken away again."""
        taken = [word.key for word in self.words if word.takes]
        keys = (place.key for place in self._table if place.of in of and place.leaf)
        return tuple(key for key in keys if not any(_within(key, gone) for gone in taken))

    @cached_property
    def _written(self) -> dict[str, tuple[str, ...]]:
        """Keys of the library's presets, of files of one's own, and of overlays."""
        return {of: self._given(of) for of in ("preset", "own", "overlay")}

    @cached_property
    def _not_the_models(self) -> tuple[str, ...]:
        """Keys of every file but those of the group `model`."""
        return self._given(*({place.of for place in self._table} - {"model"}))

    @cached_property
    def _typed(self) -> tuple[str, ...]:
        """Keys of the command line."""
        given = (word for word in self.words if not word.takes and not word.chooses)
        return tuple(key for word in given for key in leaves(word.key, word.value))

    def typed(self, key: str) -> bool:
        """Whether `key` or one below it stands on the command line."""
        return any(_within(said, key) for said in self._typed)

    def gave(self, key: str) -> bool:
        """Whether the command line or a file of one's own gives `key` a value, or one below it."""
        return self.typed(key) or any(_within(said, key) for said in self._written["own"])

    def chosen(self, key: str) -> bool:
        """Whether `key`, or one below it, is given on the command line or by any file but the model's own, which is a family's design."""
        return self.typed(key) or any(_within(said, key) for said in self._not_the_models)

    def said(self, key: str) -> bool:
        """Whether a person wrote `key` or one below it, and could leave it out: typed, in a preset, in a file outside the library's conf/.

        An overlay is laid over any preset; what it says of kinds and features that do not stand there is left out, and told (left_out).
        A model of one's own gives every key that a model needs, those that no layer of it reads too.
        """
        if self.gave(key) or any(_within(said, key) for said in self._written["preset"]):
            return not self._must_be_given(key)
        self._lenient += [said for said in self._written["overlay"] if _within(said, key)]
        return False

    def overlaid(self, key: str) -> bool:
        """Whether overlays alone ask for `key`, so that they may be laid without it; said afterwards (left_out)."""
        return not self.said(key) and any(_within(said, key) for said in self._written["overlay"])

    def _must_be_given(self, key: str) -> bool:
        """Whether `key` would be missing without the one file that gives it."""
        *parents, last = key.split(".")
        config = config_at(parents)
        if config is None or last not in config.model_fields or not config.model_fields[last].is_required():
            return False
        return len(self._at.get(key, ())) == 1 and not self.typed(key)

    def not_given(self) -> list[str]:
        """Keys that the last file to say them leaves to be given, `???`, and the command line does not give.

        OmegaConf merges such a value into an earlier file's as if it were not there.
        """
        # Of overlays none is the last: their order says nothing.
        laid = {
            key: [place for place in places if place is places[-1] or place.of == places[-1].of == "overlay"]
            for key, places in self._at.items()
        }
        empty = (key for key, places in laid.items() if any(place.node.value == NOT_GIVEN for place in places))
        return [key for key in empty if not self.typed(key)]

    def take_kinds_of_overlays(self, blocks: dict[str, Any], begun: Sequence[str]) -> bool:
        """Take those out of the kinds begun of which overlays alone say something: without the keys of a model they are none yet."""
        taken = False
        for kind in begun:
            key = f"model.blocks.{kind}"
            if {place.of for place in self._at.get(key, ())} == {"overlay"} and not self.gave(key):
                del blocks[kind]
                taken = True
                self._lenient += [said for said in self._written["overlay"] if _within(said, key)]
        return taken

    def where(self, key: str, or_above: bool = True, passed: frozenset[str] = frozenset()) -> str | None:
        """`conf/model/nam56r.yaml:12`, or the word, or None if `key` is nowhere. or_above: where its parent stands will do. passed:
        keys whose links led here; where they go round, the last one is the place.
        """
        name = re.sub(r"\[(\d+)\]", "", key)
        asked = [word for word in reversed(self.words) if not word.chooses]
        if found := next((word for word in asked if _within(name, word.key)), None):
            return found.where
        for above in _above(name) if or_above else (name,):  # a missing or unknown key: where its parent stands
            below = (word for word in asked if above == name and _within(word.key, name))
            places = self._at.get(above)
            # `allow: {}`, and a word that gives one of it
            if places and places[-1].leaf and (found := next(below, None)):
                return found.where
            if places:
                there = _linked(places[-1])
                again = there is None or there in passed
                return places[-1].where if again else self.where(str(there), passed=passed | {key})
            if found := next(below, None):
                return found.where
        laid = ((path, _package(default)) for default, path in reversed(self._merged))
        return next(
            (short(path) for path, under in laid if under and _within(name, under) and (or_above or under == name)),
            None,
        )

    # What was not read as it was meant ---------------------------------------------------------------------------------

    def astray(self, called: str) -> Iterator[Problem]:
        """What was not read as it was meant: folders that are none, files that two folders have, a preset under another's name.

        called: `preset.name` of the recipe, which receipts and comparisons go by.
        """
        yield from map(no_folder, self._absent)
        yield from filter(None, map(too_deep, map(str, self.own)))
        for default, _ in self._merged if self.own else ():
            roots = {root.resolve(): root for root in (conf_dir(), *self.own)}.values()
            same = [file for root in roots if (file := root / f"{default.config_path}.yaml").is_file()]
            if len(same) > 1:
                group, _, name = default.config_path.rpartition("/")
                message = f"two files are {group or 'the config'} `{name}`: {' and '.join(map(short, same))}"
                yield Problem(
                    message, hint="give yours another name; Hydra would take the first", law="two-files-of-a-name"
                )
        chosen = (
            d.config_path for d, _ in self._merged if d.parent == "recipe" and d.config_path.startswith("preset/")
        )
        name = next(chosen, "").removeprefix("preset/")
        if name and called != name and "preset.name" not in self._typed:
            hint = f"write `preset: {{name: {name}}}` into its file"
            if name == f"{called}.yaml":
                hint = f"leave `.yaml` out: `{called}`"
            said = f"preset `{name}` calls itself `{called}`"
            yield Problem(said, key="preset.name", hint=hint, law="preset-misnamed")
        yield from self._outvoted()
        yield from self._unlaid()
        yield from self._hydras()

    def _hydras(self) -> Iterator[Problem]:
        """Hydra's own settings in a file of one's own: commands make no run folders and no logs of Hydra's."""
        for default, path in self._merged:
            if path.is_relative_to(conf_dir()):
                continue
            for key, line, _ in _lines(read(path).node, _package(default)):
                if key == "hydra":
                    hint = "leave it out: commands here have no folders, logs or launchers of Hydra's"
                    yield Problem(f"`hydra` in {short(path)}:{line}: nothing reads this", hint=hint, law="word-unread")

    def _unlaid(self) -> Iterator[Problem]:
        """What an overlay chooses by name where the command line chooses another: Hydra would take the latter and say nothing."""
        typed = {word.override.key_or_group: word for word in self.words}
        for overlay, group, choice in self._chosen_by_overlays():
            if group in typed and typed[group].value != choice:
                message = f"`{typed[group].text}` is chosen, and the overlay `{overlay}` chooses `{choice}`"
                hint = f"leave one of them out, or take `{group}={choice}`"
                yield Problem(message, key=group, hint=hint, law="choice-against-overlay")

    def _chosen_by_overlays(self) -> Iterator[tuple[str, str, Any]]:
        """(overlay, group, choice) of what overlays choose by name in the place of another."""
        for overlay, tree in self._overlays():
            for default in tree.get("defaults") or ():
                for name, choice in default.items() if isinstance(default, Mapping) else ():
                    group = str(name).removeprefix("override").strip().removeprefix("/")
                    if "@" not in group:
                        yield overlay, group, choice

    def _overlays(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Overlays by name, and what is in them, in the order in which they are laid."""
        for default, path in self._merged:
            group, _, name = default.config_path.partition("/")
            node = read(path).node if group == "overlay" else None
            if node is not None:
                yield name, YAML.construct_document(node)

    def _outvoted(self) -> Iterator[Problem]:
        """What the command line chooses by name and a file behind it makes something else of.

        With a learning rate of the preset's own the optimizer is still the one that was chosen; a model is all that its file says.
        """
        for word in self.words:
            group = word.override.key_or_group
            if group in ("preset", "overlay") or not word.chooses:
                continue
            others: dict[str, tuple[str, str]] = {}
            for key in self._what_is_chosen(group):
                said = [(place.file, shown(place.value)) for place in reversed(self._at.get(key, ()))]
                asked = next((value for file, value in said if file.parent.name == group), None)
                if asked is not None and said[0][1] != asked and not self.typed(key):
                    others[key] = asked, said[0][1]
            if others:
                stands = quoted(f"{key}={value}" for key, (_, value) in others.items())
                whole = " ".join(f"{key}={value}" for key, (value, _) in others.items())
                message = f"`{word.text}` is chosen, and a file behind it says {stands}"
                hint = f"say it on the command line, too: `{whole}`; or let the file choose in its `defaults`: `override /{group}: NAME`"
                yield Problem(message, key=next(iter(others)), hint=hint, law="choice-outvoted")

    def _what_is_chosen(self, group: str) -> list[str]:
        """Keys that a choice by name is about."""
        if group != "model":
            return [f"{group}.{name}" for name in ("name", "nodes", "gpus_per_node")]
        return [
            key for key, places in self._at.items() if any(p.leaf and p.file.parent.name == "model" for p in places)
        ]

    def left_out(self) -> list[str]:
        """What overlays say of what does not stand here, for people."""
        found: dict[str, list[str]] = {}
        for key in dict.fromkeys(self._lenient):
            for name in dict.fromkeys(p.file.stem for p in self._at[key] if p.of == "overlay"):
                found.setdefault(name, []).append(key)
        return [
            f"overlay {name} is laid without {', '.join(keys)}: nothing here has a use for it"
            for name, keys in found.items()
        ]

    @cached_property
    def _laid(self) -> dict[str, dict[Any, list[str]]]:
        """Of each key that overlays have the last word of: what they say, and which of them."""
        found: dict[str, dict[Any, list[str]]] = {}
        last = {place.key: place.of for place in self._table}
        for place in self._table:
            has_its_way = last[place.key] == "overlay" and not self.typed(place.key)
            if has_its_way and place.of == "overlay" and place.key in self._written["overlay"]:
                value = place.value if not isinstance(place.value, (list, dict)) else shown(place.value)
                found.setdefault(place.key, {}).setdefault(value, []).append(place.file.stem)
        return found

    @cached_property
    def wishes(self) -> dict[str, dict[Any, list[str]]]:
        """Of those the keys of `execution` and `precision` that only execute, and have a value without an overlay."""
        return {
            key: said
            for key, said in self._laid.items()
            if key.startswith(WISHED) and key not in DEMANDED and self._wished(key)
        }

    def _wished(self, key: str) -> bool:
        *parents, last = key.split(".")
        config, places = config_at(parents), [place for place in self._table if place.key == key]
        known = config is not None and last in config.model_fields and config.row(last).executes is not None
        under = [place for place in places if place.of != "overlay"][-1:]
        overlaid = (place for place in places if place.of == "overlay")
        # What a link leads to depends on the other overlays.
        return known and bool(under) and not any(map(_reads, (*under, *overlaid)))

    @cached_property
    def _insisted(self) -> dict[str, Place]:
        """Keys of kernels that a file of one's own, a preset or a file chosen on the command line gives, with an overlay behind it."""
        chosen = {(word.override.key_or_group, shown(word.value)) for word in self.words if word.chooses}
        before, found = set[str](), dict[str, Place]()
        for place in self._table:
            # What a group's files all have is nobody's choice: `execution=megatron` is about Megatron's kernels.
            by_name = place.key in before and (place.of, place.file.stem) in chosen and place.of != "overlay"
            given = place.leaf and place.node.value != NOT_GIVEN
            if place.key in self._laid and given and (place.of in ("own", "preset") or by_name):
                found[place.key] = place
            before.add(place.key)
        return {key: place for key, place in found.items() if key.startswith(WISHED)}

    @cached_property
    def outlasting(self) -> dict[str, Place]:
        """Those that stand: what an overlay says of them is a wish."""
        return {key: place for key, place in self._insisted.items() if key in self.wishes}

    def without_overlays(self, key: str) -> Any:
        """What a wished key has without the wish."""
        return next(place.value for place in reversed(self._at[key]) if place.of != "overlay")

    def contradictions(self) -> Iterator[Problem]:
        """Where overlays say different things that are no wishes, or choose them: whichever came last would have its way."""
        for key, said in self._laid.items():
            each = [f"`{name}` says {shown(value)}" for value, by in said.items() for name in by]
            if len(said) > 1 and key not in self.wishes:
                hint = f"lay one of them, or say it yourself: `{key}=...`"
                message = f"two overlays differ: {' and '.join(sorted(each))}"
                yield Problem(message, key=key, hint=hint, law="overlays-differ")
            elif key in self._insisted and key not in self.wishes and self._insisted[key].value not in said:
                place = self._insisted[key]
                message = f"the overlay {each[0]}, and {place.where} {shown(place.value)}"
                yield Problem(message, key=key, hint=f"say which: `{key}=...`", law="overlay-against-file")
        chosen: dict[str, dict[str, str]] = {}
        for overlay, group, choice in self._chosen_by_overlays():
            chosen.setdefault(group, {}).setdefault(shown(choice), overlay)
        typed = {word.override.key_or_group for word in self.words}
        for group, choices in chosen.items():
            if len(choices) > 1 and group not in typed:
                each = [f"`{overlay}` chooses {choice}" for choice, overlay in choices.items()]
                message = f"two overlays differ: {' and '.join(sorted(each))}"
                yield Problem(message, key=group, hint="lay one of them", law="overlays-differ")

    # For commands ------------------------------------------------------------------------------------------------------

    @property
    def search(self) -> list[str]:
        """The override that composes another preset from the same folders."""
        return [search(self.own)] if self.own else []

    def files(self, group: str) -> list[Path]:
        """Every file of a group, by name: the library's, and those of one's own folders."""
        found = [path for root in (conf_dir(), *self.own) for path in (root / group).glob("*.yaml")]
        raise_if(leads_nowhere(path) for path in found if not path.exists())
        return sorted(found, key=lambda path: path.stem)

    def unnamed_preset(self, name: str) -> str:
        """A note for stderr where the command line leaves the preset to conf/recipe.yaml, which has `name`; else empty."""
        named = any(word.text.startswith("preset=") for word in self.words)
        return "" if named else f"note: no `conf=`: the preset {name}\n"


def _package(default: Any) -> str:
    """The key under which a file was laid; empty for the whole recipe."""
    return ".".join(part for part in (default.package or "").split(".") if part)


def _lines(node: yaml.Node | None, under: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """(dotted key, line, node) of everything below a node."""
    if not isinstance(node, yaml.MappingNode):
        return
    YAML.flatten_mapping(node)  # what `<<` merges
    for name, value in node.value:
        key = f"{under}.{name.value}" if under else str(name.value)
        yield key, name.start_mark.line + 1, value
        yield from _lines(value, key)


def _above(key: str) -> Iterator[str]:
    """A key, and each section that it lies in, the nearest first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _linked(place: Place) -> str | None:
    """The key to which a value is nothing but a link; each dot goes one level up from the key itself."""
    link = LINK.fullmatch(place.node.value) if isinstance(place.node, yaml.ScalarNode) else None
    if link is None:
        return None
    up, name = link.groups()
    parts = place.key.split(".")
    return ".".join((*parts[: len(parts) - len(up)], name) if up else (name,))


def _reads(place: Place) -> bool:
    """Whether a value is made of others, or left to them."""
    return isinstance(place.node, yaml.ScalarNode) and ("${" in place.node.value or place.node.value == NOT_GIVEN)


def _within(said: str, key: str) -> bool:
    """Whether what was said is `key`, or lies below it."""
    return said == key or said.startswith(f"{key}.")


def shown(value: Any) -> str:
    """A value as a word of the command line gives it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {shown(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def clipped(text: str) -> str:
    return text if len(text) < 120 else text[:117] + "..."


def too_deep(folder: str) -> Problem | None:
    """For somebody who named the folder of a group, `my/preset`, in the place of the one that holds it."""
    path = Path(folder).resolve()
    if not (path.is_dir() and (conf_dir() / path.name).is_dir() and any(path.glob("*.yaml"))):
        return None
    if any((path / group.name).is_dir() for group in conf_dir().iterdir() if group.is_dir()):
        return None
    said = f"`{folder}` is a group of configs, one level too deep"
    hint = f"name the folder that holds `{path.name}/`: `--config-dir {Path(folder).parent}`"
    return Problem(said, hint=hint, law="folder-too-deep")


def leads_nowhere(path: Path) -> Problem:
    """For a link among one's own files whose target is gone."""
    hint = f"`ln -sfn FILE {path}` leads it to one, or take it away"
    return Problem(f"`{path}` is a link to `{path.readlink()}`, which is not there", hint=hint, law="file-unknown")


def no_folder(folder: str) -> Problem:
    """For somebody who named a folder of configs that is none."""
    if (inside := too_deep(folder)) is not None:
        return inside
    message = f"`{folder}` is no folder of configs"
    return Problem(message, hint="name a folder that has `preset/`: `--config-dir FOLDER`", law="no-config-folder")
