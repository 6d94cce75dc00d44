"""Config files as Hydra gets them: a source of ours, which looks at each one first and reads it once in a process.

A file that Hydra would take for something else, or read for ever, is refused here, by its name and line.
"""

import contextlib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, DictConfig, ListConfig, OmegaConf

from nam_megatron.conf import conf_dir, short
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.words.nested import compose

HEADER = 512  # characters in which Hydra looks for its header
MOST = 100_000  # values of a file, each use of an anchor counted
MOST_BYTES = 2**21  # of a file; YAML is read at a megabyte a second and more than once
TAG = "tag:yaml.org,2002:"
NUMBERS = (TAG + "int", TAG + "float")
# Of what a key may have; a date is text to OmegaConf.
VALUES = {TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge", "timestamp")}
NO_NAMES = (*NUMBERS, TAG + "bool", TAG + "null", TAG + "timestamp")
OTHER_BASE = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*|.*:.*")
Seen = dict[Path, tuple[int, int, int] | None]  # files as they were when they were looked for
GLOBAL = ("preset", "overlay")  # groups whose files lay themselves over the whole recipe


class Folder(ConfigSource):
    """A folder of config files."""

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"no `{config_path}`")
        file = self._file(config_path)
        found = read(file)
        raise_if(_misplaced(file, config_path, found))
        # Hydra takes the defaults out of what it gets, and merges into it. Pickled it is copied nine times as fast as by `copy`.
        return ConfigResult(self.provider, self.full_path(), pickle.loads(found.pickled), dict(found.header))

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        file = self._file(config_path).absolute()
        Folders.seen[file] = state(file)
        return file.is_file()

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        found: list[str] = []
        for path in Path(self.path, config_path).iterdir():
            self._list_add_result(found, str(Path(config_path, path.name)), path.name, results_filter)
        return sorted(set(found))


class Folders(SearchPathPlugin):
    """Where Hydra searches while `searching` asks: the library's folder, and those of one's own behind it, each read by Folder."""

    own: ClassVar[Sequence[Path] | None] = None
    seen: ClassVar[Seen] = {}

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if Folders.own is None:
            return
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{Folder.scheme()}://{element.path}"
            elif element.provider == "hydra":  # its own dozen of files, which it would parse anew each time
                element.path = f"{Folder.scheme()}://{Path(hydra.__file__).parent / 'conf'}"
        for folder in Folders.own:
            search_path.append("nam_megatron", f"{Folder.scheme()}://{folder}")


@contextlib.contextmanager
def searching(own: Sequence[Path]) -> Iterator[None]:
    """Within, Hydra reads the library's folder, and then `own`, through Folder."""
    for plugin in (Folder, Folders):
        Plugins.instance().register(plugin)
    before = Folders.own
    Folders.own = own
    try:
        yield
    finally:
        Folders.own = before


def state(file: Path) -> tuple[int, int, int] | None:
    """What another content changes: its bytes, and when it was written or, by a copy that keeps its time, laid there. None: not there."""
    try:
        stat = file.stat()
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def unchanged(seen: Seen) -> bool:
    return all(state(file) == before for file, before in seen.items())


@dataclass(frozen=True, slots=True)
class Read:
    """A file: as OmegaConf has it, pickled; what its header says; as nodes, which know their lines.

    defaults: of each entry of the file's the words before its colon, or the whole of it.
    """

    pickled: bytes
    defaults: tuple[str, ...]
    header: Mapping[str, str | None]
    node: yaml.Node | None


def read(file: Path) -> Read:
    """A config file; read once for as long as it is not written to. Raises Refused."""
    try:
        stat = file.stat()
        return _read(file, stat.st_size, (stat.st_mtime_ns, stat.st_ctime_ns))
    except UnicodeDecodeError as err:
        problem = Problem(
            f"{short(file)} is not UTF-8: {err.reason} at byte {err.start}",
            hint="save it as UTF-8",
            law="file-not-utf8",
        )
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        place = f"{short(file)}:{mark.line + 1}" if mark else short(file)
        said = getattr(err, "problem", None) or str(err).splitlines()[0].rstrip(".")
        problem = Problem(
            f"{place} is not YAML: {said}", hint="check quotes, colons and indentation there", law="file-not-yaml"
        )
    except OSError as err:
        message = f"cannot read `{short(file)}`: {err.strerror}"
        problem = Problem(message, hint="check the name and its permissions", law="file-unreadable")
    raise Refused(problem) from None


@cache
def _read(file: Path, bytes_: int, _written: tuple[int, int]) -> Read:
    if bytes_ > MOST_BYTES:
        message = f"`{file}` has {bytes_:,} bytes, more than a config file has"
        raise Refused(message, hint=f"{MOST_BYTES:,} are enough", law="file-too-large")
    text = file.read_text(encoding="utf-8")
    if text.startswith("\ufeff"):
        hint = "save it as UTF-8 without one; Hydra would not see its `@package`"
        raise Refused(f"`{file}` begins with a byte order mark", hint=hint, law="byte-order-mark")
    try:
        node = compose(text)
    except yaml.MarkedYAMLError:
        node = yaml.compose(text, Loader=yaml.SafeLoader)  # the same complaint, in better words
    raise_if(_misread(node, file))
    if (found := size(node, {})) > MOST:
        message = f"`{file}` has {found} values, its anchors written out"
        raise Refused(message, hint=f"{MOST} are enough", law="anchors-too-many")
    config = OmegaConf.load(file)
    return Read(pickle.dumps(config), tuple(_defaults(config)), ConfigSource._get_header_dict(text[:HEADER]), node)


def _misplaced(file: Path, config_path: str, found: Read) -> Iterator[Problem]:
    """What a file says of its place that Hydra would misread, or refuse without a line."""
    group = config_path.rpartition("/")[0].partition("/")[0]
    if group in GLOBAL and found.header["package"] is None:
        hint = "its first line is `# @package _global_`"
        yield Problem(f"`{file}` does not say where its keys belong", hint=hint, law="package-header-missing")
    behind = None
    for word in found.defaults:
        *keywords, name = word.split() or [""]
        if "optional" in keywords:
            message = f"`{config_path}` has `{word}` in its `defaults`: where that is not there, it is left out without a word"
            yield Problem(message, hint="name it without `optional`, or leave it out", law="optional-file")
            return
        if "override" in keywords:
            behind = name
        elif behind and word != "_self_":
            message = f"`{config_path}` goes on in its `defaults` after `override /{behind.removeprefix('/')}`"
            hint = "`override` is the last of `defaults`; `_self_` alone may stand behind it"
            yield Problem(message, hint=hint, law="override-not-last")
            return
        if not keywords and group in GLOBAL and name.startswith("/") and name.removeprefix("/") in in_use():
            message = f"`{config_path}`: the recipe has a `{name[1:]}` already"
            yield Problem(message, hint=f"write `override {name}: NAME`", law="group-twice")


def _defaults(config: Container) -> Iterator[str]:
    entries = config.get("defaults") if isinstance(config, DictConfig) else None
    for entry in entries if isinstance(entries, ListConfig) else ():
        yield str(next(iter(entry), "")) if OmegaConf.is_dict(entry) else str(entry)


def in_use() -> set[str]:
    """Groups of which a recipe has one file each."""
    return set(read(conf_dir() / "recipe.yaml").defaults) - {"_self_"}


def _misread(root: yaml.Node | None, file: Path) -> Iterator[Problem]:
    """What is no name where YAML takes a key; `010`, which is 8 in YAML 1.1, and `1:30`, 90; a value of a kind that no key has."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if node is not None and node.tag not in VALUES:
            message = f"{short(file)}:{node.start_mark.line + 1}: `{node.tag.replace(TAG, '!!')}` is of no value that a key has"
            yield Problem(message, hint="leave the tag out", law="file-not-yaml")
        if isinstance(node, yaml.CollectionNode) and id(node) not in seen:
            seen.add(id(node))  # an anchor may stand in itself
            left += [child for part in node.value for child in (part if isinstance(part, tuple) else (part,))]
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.CollectionNode) or key.tag in NO_NAMES:
                    shown = f"`{key.value}`" if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                    message = f"{short(file)}:{key.start_mark.line + 1}: {shown} cannot be a key"
                    hint = "a key is a name: a number, a truth value or null is none"
                    yield Problem(message, hint=hint, law="key-malformed")
        elif isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and OTHER_BASE.fullmatch(node.value):
            message = (
                f"{short(file)}:{node.start_mark.line + 1}: `{node.value}` is {yaml.safe_load(node.value)} in YAML"
            )
            yield Problem(message, hint="write the number without a leading zero or a colon", law="file-not-yaml")


def size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node has with every alias written out; an alias of its own self counts as one."""
    if id(node) not in known:
        known[id(node)] = 1
        if isinstance(node, yaml.SequenceNode):
            known[id(node)] += sum(size(child, known) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            known[id(node)] += sum(size(child, known) for pair in node.value for child in pair)
    return known[id(node)]
