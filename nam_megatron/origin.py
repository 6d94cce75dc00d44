"""Where a key of the composed config was set: the override or the file and line that had the last word."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from typing import Any

import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from nam_megatron.errors import Problem, likely, quoted

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LINK = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")  # a value that is nothing but a link to another key

# Words for runs that look like presets (docs/glossary.md): what each names.
NO_PRESETS = {
    "current": "what a wave of runs took as its baseline, another preset in the next wave",
    "head": "whatever was launched from HEAD, so a revision and no recipe",
    "v19c": "the tag of a wave of runs",
}


# What commands call the preset beside which they lay this one, and what a person may.
OTHER_PRESETS = ("diff", "against", "compare")


class Origin:
    """Looks keys up in the files Hydra merged, the last word first. Reads them a second time, so only on demand.

    Made while the Hydra instance that composed the config is alive; may be asked any time later.
    """

    def __init__(self, config_name: str, overrides: Sequence[str]):
        self.config_name, self.overrides = config_name, list(overrides)
        self._search_path = GlobalHydra.instance().config_loader().get_search_path()
        self._merged, self._roots, self._absent = DEFAULTS.files, DEFAULTS.roots, DEFAULTS.absent
        self._lenient: list[str] = []

    @cached_property
    def _loader(self) -> ConfigLoaderImpl:
        return ConfigLoaderImpl(config_search_path=self._search_path)

    @cached_property
    def _files(self) -> list[tuple[Path, tuple[str, ...], yaml.Node | None]]:
        """(file, package, parsed nodes) of every merged file, the last word first."""
        merged = self._merged
        files = []
        for default in reversed(merged):
            path = self._file(default)
            if path:
                package = tuple(p for p in (default.package or "").split(".") if p)
                files.append((path, package, yaml.compose(path.read_text(encoding="utf-8"), Loader=Loader)))
        return files

    def _file(self, default: Any) -> Path | None:
        """Where one of Hydra's defaults was found: the first folder has its way."""
        return next((f for r in self._roots if (f := r / f"{default.config_path}.yaml").is_file()), None)

    @cached_property
    def own(self) -> list[Path]:
        """Folders of configs besides the library's, as they are searched."""
        from nam_megatron.recipe import conf_dir

        return [root for root in dict.fromkeys(self._roots) if root.resolve() != conf_dir().resolve()]

    @property
    def search(self) -> list[str]:
        """The override that composes another preset from the same folders."""
        quoted = [str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'") for folder in self.own]
        return [f"hydra.searchpath=[{','.join(f"'{folder}'" for folder in quoted)}]"] if quoted else []

    def files(self, group: str) -> list[Path]:
        """Every file of a group, by name: the library's, and those of one's own folders."""
        from nam_megatron.recipe import conf_dir

        found = (path for root in (conf_dir(), *self.own) for path in (root / group).glob("*.yaml"))
        return sorted(found, key=lambda path: path.stem)

    def astray(self, called: str) -> Iterator[Problem]:
        """What was not read as it was meant: folders that are none, files that two folders have, a preset under another's name.

        called: `preset.name` of the recipe, which receipts and comparisons go by.
        """
        for folder in self._absent:
            yield no_folder(folder)
        for default in self._merged if self.own else ():
            roots = {root.resolve(): root for root in self._roots}.values()
            same = [file for root in roots if (file := root / f"{default.config_path}.yaml").is_file()]
            if len(same) > 1:
                group, _, name = default.config_path.rpartition("/")
                message = f"two files are {group or 'the config'} `{name}`: {' and '.join(map(_short, same))}"
                yield Problem(message, None, "give yours another name; Hydra would take the first")
        chosen = (d.config_path for d in self._merged if d.parent == "recipe" and d.config_path.startswith("preset/"))
        name = next(chosen, "").removeprefix("preset/")
        if name and called != name and "preset.name" not in self._typed:
            hint = f"write `preset: {{name: {name}}}` into its file"
            if name == f"{called}.yaml":
                hint = f"leave `.yaml` out: `{called}`"
            yield Problem(f"preset `{name}` calls itself `{called}`", "preset.name", hint)
        yield from self._outvoted()
        yield from self._unlaid()

    def _unlaid(self) -> Iterator[Problem]:
        """What an overlay chooses by name where the command line chooses another: Hydra would take the latter and say nothing."""
        typed = {override.key_or_group: (text, override.value()) for text, override in self._parsed}
        for overlay, tree in self._overlays():
            for default in tree.get("defaults", ()):
                for word, name in default.items() if isinstance(default, Mapping) else ():
                    group = str(word).removeprefix("override").strip().removeprefix("/")
                    text, chosen = typed.get(group, ("", name))
                    if chosen != name:
                        message = f"`{text}` is chosen, and the overlay `{overlay}` chooses `{name}`"
                        yield Problem(message, group, f"leave one of them out, or take `{group}={name}`")

    def _overlays(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Overlays by name, and what is in them, in the order in which they are laid."""
        for default in self._merged:
            group, _, name = default.config_path.partition("/")
            file = self._file(default)
            if group == "overlay" and file:
                yield name, yaml.load(file.read_text(encoding="utf-8"), Loader=Loader) or {}

    def _outvoted(self) -> Iterator[Problem]:
        """What the command line chooses by name and a file behind it makes something else of.

        With a learning rate of the preset's own the optimizer is still the one that was chosen.
        """
        for text, override in self._parsed:
            group = override.key_or_group
            if group in ("preset", "overlay") or not self._choices(group):
                continue
            others: dict[str, tuple[str, str]] = {}
            for name in ("name", "nodes", "gpus_per_node"):
                key = f"{group}.{name}"
                held = ((file, _find(node, package, (group, name))) for file, package, node in self._files)
                said = [(file, found[1].value) for file, found in held if found]
                asked = next((value for file, value in said if file.parent.name == group), None)
                if asked is not None and said[0][1] != asked and not self.typed(key):
                    others[key] = asked, said[0][1]
            if others:
                stands = quoted(f"{key}={value}" for key, (_, value) in others.items())
                whole = " ".join(f"{key}={value}" for key, (value, _) in others.items())
                hint = f"say it on the command line, too: `{whole}`; or let the file choose in its `defaults`: `override /{group}: NAME`"
                yield Problem(f"`{text}` is chosen, and a file behind it says {stands}", next(iter(others)), hint)

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

    def typed(self, key: str) -> bool:
        """Whether `key` or one below it stands on the command line."""
        return any(_within(said, key) for said in self._typed)

    def gave(self, key: str) -> bool:
        """Whether the command line or a file of one's own gives `key` a value, or one below it."""
        return self.typed(key) or any(_within(said, key) for said in self._written["own"])

    def _must_be_given(self, key: str) -> bool:
        """Whether `key` would be missing without the one file that gives it."""
        from nam_megatron.recipe import config_at

        *parents, last = parts = key.split(".")
        config = config_at(parents)
        if config is None or last not in config.model_fields or not config.model_fields[last].is_required():
            return False
        given = [path for path, package, node in self._files if _find(node, package, tuple(parts))]
        return len(given) == 1 and not self.typed(key)

    def take_kinds_of_overlays(self, blocks: dict[str, Any], begun: Sequence[str]) -> bool:
        """Take those out of the kinds begun of which overlays alone say something: without the keys of a model they are none yet."""
        taken = False
        for kind in begun:
            key = f"model.blocks.{kind}"
            said_by = {
                path.parent.name for path, package, node in self._files if _find(node, package, tuple(key.split(".")))
            }
            if said_by == {"overlay"} and not self.gave(key):
                del blocks[kind]
                taken = True
                self._lenient += [said for said in self._written["overlay"] if _within(said, key)]
        return taken

    def left_out(self) -> list[str]:
        """What overlays say of what does not stand here, for people."""
        keys = ", ".join(dict.fromkeys(self._lenient))
        return [f"the overlay is laid without {keys}: nothing here has a use for it"] if keys else []

    def overruled(self) -> list[str]:
        """Where one overlay says something else than one that was laid before it, for people: the last has its way."""
        said: dict[str, tuple[str, Any]] = {}
        found: dict[tuple[str, str], list[str]] = {}
        for name, written in self._overlays():
            tree = OmegaConf.create(dict(written))
            for key in [leaf for top, value in tree.items() if top != "defaults" for leaf in leaves(str(top), value)]:
                value = OmegaConf.select(tree, key)
                before, was = said.get(key, (name, value))
                # Of what is left out neither has its way.
                if was != value and not self.typed(key) and key not in self._lenient:
                    found.setdefault((name, before), []).append(f"{key}={shown(value)} in the place of {shown(was)}")
                said[key] = name, value
        return [f"`{name}` is laid over `{before}`: {', '.join(changes)}" for (name, before), changes in found.items()]

    @cached_property
    def _parsed(self) -> list[tuple[str, Any]]:
        return [(text, OverridesParser.create().parse_override(text)) for text in self.overrides]

    @cached_property
    def assigned(self) -> list[tuple[str, str, Any]]:
        """(word, dotted key, value) of each word of the command line; of one that takes a key away the value is None."""
        return [
            (text, o.key_or_group.replace("/", "."), None if o.is_delete() else _plain(o)) for text, o in self._parsed
        ]

    @cached_property
    def _typed(self) -> tuple[str, ...]:
        """Keys of the command line."""
        found = []
        for _, override in self._parsed:
            if not override.is_delete() and not self._choices(override.key_or_group):
                found += leaves(override.key_or_group.replace("/", "."), _plain(override))
        return tuple(found)

    @cached_property
    def _written(self) -> dict[str, tuple[str, ...]]:
        """Keys of the library's presets, of files of one's own, and of overlays."""
        from nam_megatron.recipe import conf_dir

        found: dict[str, list[str]] = {"preset": [], "own": [], "overlay": []}
        for default in self._merged:
            group = default.config_path.partition("/")[0]
            path = self._file(default)
            if path is None or (group not in found and path.is_relative_to(conf_dir())):
                continue
            if path.is_relative_to(conf_dir()) and group == self.config_name:
                continue
            tree = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
            package = ".".join(p for p in (default.package or "").split(".") if p)
            of = "overlay" if group == "overlay" else "preset" if path.is_relative_to(conf_dir()) else "own"
            for name, value in (tree or {}).items():
                if name not in ("defaults", "hydra"):
                    found[of] += leaves(f"{package}.{name}" if package else str(name), value)
        taken = [o.key_or_group.replace("/", ".") for _, o in self._parsed if o.is_delete()]
        return {of: tuple(k for k in keys if not any(_within(k, t) for t in taken)) for of, keys in found.items()}

    def unnamed_preset(self, name: str) -> str:
        """A note for stderr where the command line leaves the preset to conf/recipe.yaml, which has `name`; else empty."""
        named = any(text.startswith("preset=") for text in self.overrides)
        return "" if named else f"note: no `conf=`: the preset {name}\n"

    def _choices(self, group: str) -> list[str]:
        """The files of a group. Asked of the loader, Hydra would copy all it knows of folders for each answer."""
        found: list[str] = self._loader.repository.get_group_options(group, ObjectType.CONFIG)
        return found

    @cached_property
    def _plain_words(self) -> list[str]:
        """Overrides that are none of a group's choices."""
        return [text for text in self.overrides if not self._choices(_key_of(text).replace(".", "/"))]

    def where(self, key: str, or_above: bool = True) -> str | None:
        """`conf/model/nam56r.yaml:12`, or the override, or None if `key` is nowhere. or_above: where its parent stands will do."""
        parts = tuple(re.sub(r"\[(\d+)\]", "", key).split("."))
        for text, override in reversed(self._parsed):
            target = tuple(override.key_or_group.replace("/", ".").split("."))
            if target == parts[: len(target)] and not self._choices(override.key_or_group):
                return _said(text)
        shortest = 1 if or_above else len(parts)
        for length in range(len(parts), shortest - 1, -1):  # a missing or unknown key: where its parent stands
            for path, package, node in self._files:
                if (found := _find(node, package, parts[:length])) is not None:
                    key_node, value = found
                    if isinstance(value, yaml.ScalarNode) and (link := LINK.fullmatch(value.value)):
                        up, name = link.groups()  # each dot goes one level up from the key itself
                        return self.where(".".join((*parts[: length - len(up)], name) if up else (name,)))
                    return f"{_short(path)}:{key_node.start_mark.line + 1}"
            below = (
                word for word in reversed(self._plain_words) if length == len(parts) and _within(_key_of(word), key)
            )
            if word := next(below, None):
                return _said(word)
        return next(
            (
                _short(path)
                for path, package, _ in self._files
                if len(package or ()) >= shortest and package == parts[: len(package)]
            ),
            None,
        )


class _Defaults:
    """The list of files that Hydra merged last, which it throws away. Composing it a second time would take half as long as composing."""

    def __init__(self) -> None:
        self.files: Sequence[Any] = ()
        self.roots: Sequence[Path] = ()
        self.absent: Sequence[str] = ()
        create = config_loader_impl.create_defaults_list

        def record(*args: Any, **kwargs: Any) -> Any:
            made = create(*args, **kwargs)
            self.files = made.defaults
            repo = kwargs["repo"] if "repo" in kwargs else args[0]
            # A plugin of another package may put a source of its own beside them, as NeMo's storage client does: nobody named that one.
            folders = [
                s for s in repo.get_sources() if s.provider.startswith(("main", "command-line", "hydra.searchpath"))
            ]
            self.roots = [Path(s.path) for s in folders if s.scheme() == "file" and s.available()]
            # `pkg://` too: whose word a key is, is read from files.
            self.absent = [s.path for s in folders if s.scheme() != "file" or not s.available()]
            return made

        config_loader_impl.create_defaults_list = record


DEFAULTS = _Defaults()
# Hydra warns of a folder that is not there, and goes on; Origin.astray refuses it.
warnings.filterwarnings("ignore", message="provider=.* is not available", category=UserWarning)


def _said(word: str) -> str:
    """A word of the command line, without what `recipe.added` puts before it."""
    return f"command line: {clipped(word.removeprefix('++') if word.startswith('++cluster.waivers') else word)}"


def _key_of(override: str) -> str:
    """The key that a word of the command line is about."""
    key: str = OverridesParser.create().parse_override(override).key_or_group
    return key.replace("/", ".")


def _within(said: str, key: str) -> bool:
    """Whether what was said is `key`, or lies below it."""
    return said == key or said.startswith(f"{key}.")


def _plain(override: Any) -> Any:
    try:
        return override.value()
    except Exception:  # a sweep, or what Hydra refuses itself
        return None


def leaves(key: str, value: Any) -> list[str]:
    """Dotted keys of every value below `key`; the key itself where it is none."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in leaves(f"{key}.{name}", inner)]


def shown(value: Any) -> str:
    """A value as a word of the command line gives it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {shown(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def clipped(text: str) -> str:
    return text if len(text) < 120 else text[:117] + "..."


def _short(path: Path) -> str:
    """`conf/...` for the library's, wherever it lies; a file of one's own in full."""
    from nam_megatron.recipe import conf_dir

    return f"conf/{path.relative_to(conf_dir())}" if path.is_relative_to(conf_dir()) else str(path)


def _find(
    node: yaml.Node | None, package: tuple[str, ...], parts: tuple[str, ...]
) -> tuple[yaml.Node, yaml.Node] | None:
    if parts[: len(package)] != package or len(parts) == len(package):
        return None
    found = None
    for part in parts[len(package) :]:
        if not isinstance(node, yaml.MappingNode):
            return None
        found = next(((k, v) for k, v in node.value if k.value == part), None)
        if found is None:
            return None
        node = found[1]
    return found


def no_folder(folder: str) -> Problem:
    """For somebody who named a folder of configs that is none."""
    return Problem(
        f"`{folder}` is no folder of configs", None, "name a folder that has `preset/`: `--config-dir FOLDER`"
    )


def _no_choice(group: str, wanted: str, options: Sequence[str]) -> Problem:
    close = likely(wanted.rpartition("/")[2].removesuffix(".yaml"), options)
    meant = f"did you mean `{close}`? " if close else ""
    own = "" if close else "; one of your own is found by `--config-dir FOLDER`"
    return Problem(f"no {group} `{wanted}`", group, f"{meant}there are: {', '.join(options)}{own}")


def hydra_problem(err: Exception, words: Sequence[str] = ()) -> Problem:
    """An error of Hydra, OmegaConf or the YAML parser in our words. words: keys of the command that are none of the recipe's."""
    from nam_megatron.recipe import SWITCHED

    text = str(err).strip() or type(err).__name__
    first = text.splitlines()[0].rstrip(".")
    if (options := _options(text)) and (match := re.search(r"Available options in '([^']*)'", text)):
        group = match[1]
        name = re.search(r"'([^']*)'", text.split("Could not find ")[-1])
        wanted = name[1].removeprefix(f"{group}/") if name else ""
        stem = wanted.rpartition("/")[2].removesuffix(".yaml")  # a path, as a shell completes it
        if group == "preset" and stem.lower() in NO_PRESETS:
            hint = f"name the preset that was run; its receipt says which. There are: {', '.join(options)}"
            return Problem(f"`{wanted}` is no preset but {NO_PRESETS[stem.lower()]}", group, hint)
        problem = _no_choice(group, wanted, options)
        return replace(problem, hint=SWITCHED) if group == "feature" else problem
    if match := re.search(r"Could not load '(\w+)/([^']+)'", text):  # one of a list
        from nam_megatron.recipe import conf_dir

        options = sorted(path.stem for path in (conf_dir() / match[1]).glob("*.yaml"))
        return _no_choice(match[1], match[2], options)
    if match := re.search(r"Additional config directory '(.*)' not found", text):
        return no_folder(match[1])
    if match := re.match(r"In '?([^':]+)'?: Could not find '([^']+)'", text):
        hint = "another of a group is `override /GROUP: NAME`, an overlay `/overlay@_global_: NAME`"
        return Problem(f"`{match[1]}` has `{match[2]}` in its `defaults`, and there is no such file", None, hint)
    if match := re.match(r"In '?([^':]+)'?: Override '(\w+) : .*' is defined before", text):
        hint = "`override` is the last of `defaults`; `_self_` alone may stand behind it"
        return Problem(f"`{match[1]}` goes on in its `defaults` after `override /{match[2]}`", None, hint)
    if match := re.match(r"In '?([^':]+)'?: .*\n.*Cannot merge DictConfig with ListConfig", text):
        return Problem(f"`{match[1]}` has a list where a section belongs", None, "write `SECTION: {KEY: VALUE}` there")
    if isinstance(err, OverrideParseException):
        if re.fullmatch(r"\w+", err.override):
            return Problem(f"`{err.override}` is no KEY=VALUE", None, f"a preset is `conf={err.override}`")
        hint = "it is read as KEY=VALUE; a value with blanks or signs needs quotes of its own: KEY=\"'...'\""
        return Problem(f"cannot read the override `{clipped(err.override)}`", None, hint)
    if match := re.search(r"Ambiguous value for argument '(.+)'", text):
        return Problem(
            f"`{clipped(match[1])}` has several values",
            None,
            "a list is `KEY=[a,b]`; to sweep, add `--multirun` as the last word",
        )
    if text.startswith("Config group override"):
        return Problem(
            "a group of configs takes the name of one of them", None, "write GROUP=NAME; `--help` lists both"
        )
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_override(getattr(err.__cause__, "full_key", None) or match[1], match[1], words)
    if match := re.search(r"(\w+) appears more than once in the final|Multiple values for (\w+)", text):
        group = match[1] or match[2]
        hint = SWITCHED if group == "feature" else f"leave the `+` out: `{group}=NAME`"
        return Problem(f"the recipe has a `{group}` already", group, hint)
    if match := re.search(r"An item is already at '([^']+)'", text):
        return Problem(f"`{match[1]}` is there already", match[1], "leave the `+` out")
    if isinstance(err, yaml.YAMLError):
        mark = getattr(err, "problem_mark", None)
        file = _short(Path(mark.name if mark else getattr(err, "name", None) or "a config file"))
        place = f"{file}:{mark.line + 1}" if mark else file
        return Problem(
            f"{place} is not YAML: {getattr(err, 'problem', None) or first}",
            None,
            "check quotes, colons and indentation there",
        )
    if isinstance(err, UnicodeDecodeError):
        return Problem(f"{_read_when(err)} is not UTF-8: {err.reason} at byte {err.start}", None, "save it as UTF-8")
    if isinstance(err, RecursionError):
        return Problem("a config file includes itself, or nests too deeply", None, "look at its `defaults` and anchors")
    if isinstance(err, OSError) and err.filename:
        return Problem(
            f"cannot read `{_short(Path(err.filename))}`: {err.strerror}", None, "check the name and its permissions"
        )
    if isinstance(err, (AssertionError, LookupError, TypeError, AttributeError)):
        first = f"Hydra cannot make sense of this: {type(err).__name__}{f', {err}' if str(err) else ''}"
    return Problem(
        first, getattr(err, "full_key", None), "`--help` lists groups and keys, `--cfg job` prints the composed config"
    )


def _read_when(err: Exception) -> str:
    """The config file Hydra was reading, which the error does not say (hydra-core 1.3, FileConfigSource.load_config)."""
    frames = (frame for frame, _ in walk_tb(err.__traceback__))
    path = next((f.f_locals["full_path"] for f in frames if "full_path" in f.f_locals), None)
    return _short(Path(path)) if path else "a config file"


def _options(text: str) -> list[str]:
    """The names in Hydra's "Available options" list, which ends at the first line that is not indented."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Available options")), len(lines))
    return [line.strip() for line in takewhile(lambda line: line.startswith("\t"), lines[start + 1 :])]


def _unknown_override(key: str, whole: str, words: Sequence[str]) -> Problem:
    """key: as far as it is none; whole: as it was written."""
    from nam_megatron.recipe import conf_dir, keys_at, keys_hint, whole_hint

    *parents, last = key.split(".")
    at = ".".join(parents) or None
    if not parents and (conf_dir() / last).is_dir():
        return Problem(f"no `{last}` is in use", last, f"to lay one over the preset: `+{last}=NAME`")
    if last in keys_at(parents):  # of a model of one's own, or of a kind that its file leaves out
        return Problem(f"no file gives `{last}`", at, f"to add it: `+{key}=...`")
    if hint := whole_hint([whole, key]):
        return Problem(f"unknown key `{last}`", at, hint)
    also = () if parents else ("conf", *words)
    theirs = [word for word in also if word in OTHER_PRESETS and last in OTHER_PRESETS]
    close = theirs[0] if theirs else likely(last, (*keys_at(parents), *also))
    meant = f", did you mean `{close}`?" if close else ""
    return Problem(f"unknown key `{last}`{meant}", at, keys_hint(() if close else parents))
