"""Where a key of the composed config was set: the override or the file and line that had the last word."""

import difflib
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.types import RunMode

from nam_megatron.errors import Problem

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LINK = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")  # a value that is nothing but a link to another key


class Origin:
    """Looks keys up in the files Hydra merged, the last word first. Reads them a second time, so only on demand.

    Made while the Hydra instance that composed the config is alive; may be asked any time later.
    """

    def __init__(self, config_name: str, overrides: Sequence[str]):
        self.config_name, self.overrides = config_name, list(overrides)
        self._search_path = GlobalHydra.instance().config_loader().get_search_path()

    @cached_property
    def _loader(self) -> ConfigLoaderImpl:
        return ConfigLoaderImpl(config_search_path=self._search_path)

    @cached_property
    def _files(self) -> list[tuple[Path, tuple[str, ...], yaml.Node | None]]:
        """(file, package, parsed nodes) of every merged file, the last word first."""
        merged = self._loader.compute_defaults_list(self.config_name, self.overrides, RunMode.RUN).defaults
        roots = _roots(self._search_path)
        files = []
        for default in reversed(merged):
            path = next((f for r in roots if (f := r / f"{default.config_path}.yaml").is_file()), None)
            if path:
                package = tuple(p for p in (default.package or "").split(".") if p)
                files.append((path, package, yaml.compose(path.read_text(encoding="utf-8"), Loader=Loader)))
        return files

    def unnamed_preset(self, name: str) -> str:
        """A note for stderr where the command line leaves the preset to conf/recipe.yaml, which has `name`; else empty."""
        named = any(text.startswith("preset=") for text in self.overrides)
        return "" if named else f"note: no `conf=`: the preset {name}\n"

    def where(self, key: str) -> str | None:
        """`conf/model/nam56r.yaml:12`, or the override, or None if `key` is nowhere."""
        parts = tuple(re.sub(r"\[(\d+)\]", "", key).split("."))
        for text in reversed(self.overrides):
            override = OverridesParser.create().parse_override(text)
            target = tuple(override.key_or_group.replace("/", ".").split("."))
            if target == parts[: len(target)] and not self._loader.get_group_options(override.key_or_group):
                return f"command line: {clipped(text)}"
        for length in range(len(parts), 0, -1):  # a missing or unknown key: where its parent stands
            for path, package, node in self._files:
                if (found := _find(node, package, parts[:length])) is not None:
                    key_node, value = found
                    if isinstance(value, yaml.ScalarNode) and (link := LINK.fullmatch(value.value)):
                        up, name = link.groups()  # each dot goes one level up from the key itself
                        return self.where(".".join((*parts[: length - len(up)], name) if up else (name,)))
                    return f"{_short(path)}:{key_node.start_mark.line + 1}"
        return next(
            (_short(path) for path, package, _ in self._files if package and package == parts[: len(package)]), None
        )


def clipped(text: str) -> str:
    return text if len(text) < 120 else text[:117] + "..."


def _short(path: Path) -> str:
    """`conf/...` however deep the folder lies."""
    parts = path.parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("conf") :]) if "conf" in parts else str(path)


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


def hydra_problem(err: Exception) -> Problem:
    """An error of Hydra, OmegaConf or the YAML parser in our words."""
    text = str(err).strip() or type(err).__name__
    first = text.splitlines()[0].rstrip(".")
    if options := _options(text):
        group = re.search(r"Available options in '([^']*)'", text)[1]
        name = re.search(r"'([^']*)'", text.split("Could not find ")[-1])
        wanted = name[1].removeprefix(f"{group}/") if name else ""
        stem = wanted.rpartition("/")[2].removesuffix(".yaml")  # a path, as a shell completes it
        close = difflib.get_close_matches(stem, options, 1)
        meant = f"did you mean `{close[0]}`? " if close else ""
        return Problem(f"no {group} `{wanted}`", group, f"{meant}there are: {', '.join(options)}")
    if isinstance(err, OverrideParseException):
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
        return _unknown_override(getattr(err.__cause__, "full_key", None) or match[1])
    if match := re.search(r"(\w+) appears more than once in the final|Multiple values for (\w+)", text):
        group = match[1] or match[2]
        return Problem(f"the recipe has a `{group}` already", group, f"leave the `+` out: `{group}=NAME`")
    if match := re.search(r"An item is already at '([^']+)'", text):
        return Problem(f"`{match[1]}` is there already", match[1], "leave the `+` out")
    if isinstance(err, yaml.YAMLError):
        mark = getattr(err, "problem_mark", None)
        name = _short(Path(mark.name if mark else getattr(err, "name", None) or "a config file"))
        place = f"{name}:{mark.line + 1}" if mark else name
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


def _roots(search_path: ConfigSearchPath) -> list[Path]:
    """The folders on disk where configs are looked for."""
    paths = (source.path for source in search_path.get_path())
    return [Path(p.removeprefix("file://")) for p in paths if not p.startswith(("pkg://", "structured://"))]


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


def _unknown_override(key: str) -> Problem:
    from nam_megatron.recipe import conf_dir, keys_at, keys_hint

    *parents, last = key.split(".")
    if not parents and (conf_dir() / last).is_dir():
        return Problem(f"no `{last}` is in use", last, f"to lay one over the preset: `+{last}=NAME`")
    close = difflib.get_close_matches(last, keys_at(parents), 1)
    meant = f", did you mean `{close[0]}`?" if close else ""
    hint = keys_hint(() if close else parents)
    return Problem(f"unknown key `{last}`{meant}", ".".join(parents) or None, hint)
