"""Config files before Hydra reads them: what it would take for something else, or for ever."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from hydra.core.plugins import Plugins

from nam_megatron.errors import Problem, Refused

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
HEADER = 512  # characters in which Hydra looks for its header
MOST = 100_000  # values of a file, each use of an anchor counted
GLOBAL = ("preset", "overlay")  # groups whose files lay themselves over the whole recipe


def guard() -> None:
    """Have Hydra look at each file before it reads it, from here on in this process."""
    Plugins.instance()  # loads its modules a second time, and those are the ones it uses
    source = sys.modules["hydra._internal.core_plugins.file_config_source"].FileConfigSource
    if not hasattr(source.load_config, "__wrapped__"):
        source.load_config = checked(source.load_config)


def checked(load: Callable) -> Callable:
    """Hydra's loader of a file, which refuses what `objections` finds."""

    @wraps(load)
    def loading(source: Any, config_path: str) -> Any:
        name = source._normalize_file_name(config_path)
        file = Path(source.path.removeprefix("file://"), name)
        if file.is_file():
            look(file, Path(name).parts[0] if len(Path(name).parts) > 1 else "")
        return load(source, config_path)

    return loading


def look(file: Path, group: str) -> None:
    """Raises Refused. What is not UTF-8, or no YAML, is left to those who read it."""
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            hint = "save it as UTF-8 without one; Hydra would not see its `@package`"
            raise Refused(Problem(f"`{file}` begins with a byte order mark", None, hint))
        node = yaml.compose(text, Loader=Loader)
        if group in GLOBAL and "@package" not in text[:HEADER]:
            hint = "its first line is `# @package _global_`"
            raise Refused(Problem(f"`{file}` does not say where its keys belong", None, hint))
        if (found := size(node, {})) > MOST:
            raise Refused(Problem(f"`{file}` has {found} values, its anchors written out", None, f"{MOST} are enough"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return


def size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node has with every alias written out; an alias of its own self counts as one."""
    if id(node) not in known:
        known[id(node)] = 1
        if isinstance(node, yaml.SequenceNode):
            known[id(node)] += sum(size(child, known) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            known[id(node)] += sum(size(child, known) for pair in node.value for child in pair)
    return known[id(node)]
