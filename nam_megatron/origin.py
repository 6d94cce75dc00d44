"""Where a key of the composed config was set: the override or the file and line that had the last word."""

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from nam_megatron.errors import Problem

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
        roots = [Path(p.path.removeprefix("file://")) for p in self._search_path.get_path() if "pkg://" not in p.path]
        files = []
        for default in reversed(merged):
            path = next((f for r in roots if (f := r / f"{default.config_path}.yaml").is_file()), None)
            if path:
                package = tuple(p for p in (default.package or "").split(".") if p)
                files.append((path, package, yaml.compose(path.read_text(encoding="utf-8"), Loader=Loader)))
        return files

    def where(self, key: str) -> str | None:
        """`conf/model/nam56r.yaml:12`, or the override, or None if `key` is nowhere."""
        parts = tuple(re.sub(r"\[(\d+)\]", "", key).split("."))
        for text in reversed(self.overrides):
            override = OverridesParser.create().parse_override(text)
            target = tuple(override.key_or_group.replace("/", ".").split("."))
            if target == parts[: len(target)] and not self._loader.get_group_options(override.key_or_group):
                return f"command line: {text}"
        for length in range(len(parts), 0, -1):  # a missing or unknown key: where its parent stands
            for path, package, node in self._files:
                if (found := _find(node, package, parts[:length])) is not None:
                    key_node, value = found
                    link = (
                        re.fullmatch(r"\$\{(\w[\w.]*)\}", value.value) if isinstance(value, yaml.ScalarNode) else None
                    )
                    if link:
                        return self.where(link[1])
                    return f"{_short(path)}:{key_node.start_mark.line + 1}"
        return None


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
        name = re.search(r"'([^']+)'", text.split("Could not find ")[-1])
        wanted = name[1].split("/")[-1] if name else ""
        group = name[1].rsplit("/", 1)[0] if name and "/" in name[1] else "group"
        close = difflib.get_close_matches(wanted, options, 1)
        meant = f"did you mean `{close[0]}`? " if close else ""
        return Problem(f"no {group} `{wanted}`", group, f"{meant}there are: {', '.join(options)}")
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_override(match[1])
    if isinstance(err, yaml.YAMLError):
        mark = getattr(err, "problem_mark", None)
        place = f"{_short(Path(mark.name))}:{mark.line + 1}" if mark else "a config file"
        return Problem(
            f"{place} is not YAML: {getattr(err, 'problem', None) or first}",
            None,
            "check quotes, colons and indentation there",
        )
    if isinstance(err, UnicodeDecodeError):
        return Problem(f"a config file is not UTF-8: {err.reason} at byte {err.start}", None, "save it as UTF-8")
    return Problem(first, None, "`--help` lists groups and keys, `--cfg job` prints the composed config")


def _options(text: str) -> list[str]:
    """The names in Hydra's "Available options" list, which ends at the first line that is not indented."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Available options")), len(lines))
    return [line.strip() for line in takewhile(lambda line: line.startswith("\t"), lines[start + 1 :])]


def _unknown_override(key: str) -> Problem:
    from nam_megatron.recipe import Recipe, _fields_at

    *parents, last = key.split(".")
    try:
        names: Iterable[str] = _fields_at(parents) if parents else Recipe.model_fields
    except KeyError:
        names = ()
    close = difflib.get_close_matches(last, list(names), 1)
    meant = f", did you mean `{close[0]}`?" if close else ""
    return Problem(f"unknown key `{last}`{meant}", ".".join(parents) or None, "`--cfg job` prints every key there is")
