"""What every command shares: Hydra composes, we check, messages and exit codes are ours."""

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nam_megatron import process
from nam_megatron.compile import compose, files
from nam_megatron.compile.sources import Sources, clipped, no_folder, search, too_deep, word
from nam_megatron.conf import conf_dir
from nam_megatron.errors import OK, REFUSED, Problem, Refused, finish, lacking, raise_if, raise_if_twice
from nam_megatron.recipe import SWITCHED, Recipe, added, from_config

# `-cn NAME`, `-cp PATH`: Hydra would compose something else, in a folder `outputs` of its own making.
OTHER_CONFIG = re.compile(r"--config-(?:name|path)(?:=|$)|-c[np]")
Task = Callable[[Recipe, Mapping[str, Any], Sources], int]


def run(
    config_name: str,
    keys: Sequence[str],
    task: Task,
    spelled: Callable[[Sequence[str]], list[str]] = list,
    also: Mapping[str, str] | None = None,
) -> NoReturn:
    """Run a command and exit.

    Args:
        config_name: the command's own config in conf/, which includes `recipe`.
        keys: its top-level keys that are the command's words and not the recipe's.
        task: gets the recipe, those words and where things were set; returns the exit code. Called once per job of a multirun.
        spelled: the command line with the command's words as its config has them. May raise Refused.
        also: what to say besides of a group of configs that has not what was asked for, where the command has a word of its name.
    """
    finish(lambda: _run(config_name, keys, task, spelled, also or {}))


def _run(
    config_name: str,
    keys: Sequence[str],
    task: Task,
    spelled: Callable[[Sequence[str]], list[str]],
    also: Mapping[str, str],
) -> int:
    given = added(spelled(sys.argv[1:]))
    given = [new for a in given for new in (_preset(a.removeprefix("conf=")) if a.startswith("conf=") else [a])]
    raise_if_twice(_given(given))
    raise_if(_no_names(given))
    if another := next((a for a in given if OTHER_CONFIG.match(a)), None):
        hint = "`conf=NAME` chooses a preset; `--config-dir DIR` adds a folder of your own"
        message = f"`{clipped(another)}`: a command has one config, and it is its own"
        raise Refused(message, hint=hint, law="another-config")
    options = _options(given)
    texts = [*_folders(options.config_dir), *options.overrides]
    if options.cfg or options.help or options.info or options.shell_completion:
        return _shown(config_name, keys, texts, options)
    points = compose.points(texts, "out" in keys) if options.multirun else [texts]
    said = set[str]()
    return max(_point(config_name, keys, task, points, number, also, said) for number in range(len(points)))


def _point(
    config_name: str,
    keys: Sequence[str],
    task: Task,
    points: Sequence[Sequence[str]],
    number: int,
    also: Mapping[str, str],
    said: set[str],
) -> int:
    """The command with the words of one point of a sweep, or with all there are. said: what earlier points were told."""
    sources = None
    try:
        config, sources = compose.composed(config_name, points[number], keys)
        sources.points, sources.told = points, said
        return task(from_config(config, sources, without=keys), _words(config, keys), sources)
    except Refused as refused:
        return _refuse(refused if sources else _besides(refused, also), sources, said)
    except ModuleNotFoundError as err:
        if process.ours(err):
            raise
        return _refuse(Refused(lacking(err)), sources, said)


def _besides(refused: Refused, also: Mapping[str, str]) -> Refused:
    """With what a command says of a group of configs that has not what was asked for."""
    return Refused(
        replace(problem, hint=f"{problem.hint}; {more}") if (more := also.get(problem.key or "")) else problem
        for problem in refused.problems
    )


def published(conf: str) -> Path | None:
    """The config.json that `conf=` names, by file or folder; None of a preset's name. Raises Refused."""
    at = Path(conf) / "config.json" if Path(conf).is_dir() else Path(conf)
    if at.suffix != ".json" or not at.is_file():
        return None
    if conf == at.parent.name and (conf_dir() / "preset" / f"{conf}.yaml").is_file():
        hint = f"write `conf=./{conf}` for the folder; the preset is what `conf={conf}` means where there is none"
        message = f"`{conf}` is a preset, and a folder here with a model in it"
        raise Refused(message, key="conf", hint=hint, law="folder-or-preset")
    return at


def _preset(conf: str) -> list[str]:
    """The words that choose a preset: of its name, or of a published model's config.json."""
    if (at := published(conf)) is None:
        return [f"preset={conf}"]
    from nam_megatron.lint.preset import of_config

    name, folder = of_config(at)
    return [f"preset={name}", search([folder])]


def _options(words: Sequence[str]) -> Namespace:
    """Options, as Hydra has them. Refuses any other, for which its parser would end the process."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    info = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=info)

    def refuse(message: str) -> NoReturn:
        dashed = re.search(r"arguments: --([\w.]+)", message)
        key = f"{dashed[1]}=VALUE" if dashed else "KEY=VALUE"
        hint = f"a key is written without dashes, `{key}`; `--help` lists options, groups and keys"
        raise Refused(f"options: {message}", hint=hint, law="option-unknown")

    parser.error = refuse  # type: ignore[method-assign]
    found = parser.parse_intermixed_args(words)
    if len(found.config_dir) > 1:
        refuse("--config-dir is given twice, and takes one folder")
    return found


def _folders(named: Sequence[str]) -> list[str]:
    """The words that name folders of `--config-dir`. Raises Refused."""
    raise_if(
        filter(None, (too_deep(folder) if folder and Path(folder).is_dir() else no_folder(folder) for folder in named))
    )
    return [search([Path(folder)]) for folder in named]


def _shown(config_name: str, keys: Sequence[str], texts: list[str], options: Namespace) -> int:
    """A config, or what Hydra shows of itself: it would print errors of its own, so those of a config are said first."""
    rest, folders, _ = compose.searched(texts)
    if not options.shell_completion:
        config, _ = compose.composed(config_name, texts, keys)
    if options.cfg:
        try:
            sys.stdout.write(OmegaConf.to_yaml(config, resolve=options.resolve))
        except OmegaConfBaseException as err:
            raise Refused(compose.problem(err)) from None
        return OK
    asked = ["--help"] if options.help else ["--info", options.info] if options.info else ["--shell-completion"]
    sys.argv[1:] = [*asked, *rest]
    with files.searching(folders):
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(lambda _: None)()
    return OK


def _given(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of every override: `key`, `+key` and `++key` are one key, and a mapping gives each of its keys."""
    for text in texts:
        if text.startswith(("-", "~")):
            continue
        try:
            said = word(text, ())
        except Exception:  # refused when it is composed
            continue
        if isinstance(said.value, dict):
            yield from _leaves(said.key, said.value)
        else:
            # As it was typed, most likely.
            yield "conf" if said.key == "preset" else said.key, text.partition("=")[2]


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, str(value)


def _no_names(words: Sequence[str]) -> Iterator[Problem]:
    """Groups of configs that are given what is no name of one of them; Hydra does not say which."""
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    for text in words:
        key, equals, value = text.partition("=")
        if equals and re.fullmatch(r"null|true|false|[-+.\d]+", value) and key in groups:
            hint = f"`{key}` is a group of configs: write {key}=NAME; `--help` lists them"
            message = f"`{value}` is no name"
            yield Problem(message, key=key, hint=SWITCHED if key == "feature" else hint, law="value-no-name")


def _words(cfg: DictConfig, keys: Sequence[str]) -> dict[str, Any]:
    try:
        return {key: cfg[key] for key in keys}
    except OmegaConfBaseException as err:
        raise Refused(compose.problem(err)) from None


def _refuse(refused: Refused, sources: Sources | None, said: set[str]) -> int:
    if process.interrupted:  # Hydra and OmegaConf make errors of their own of it
        raise KeyboardInterrupt from refused
    if (text := refused.render(sources)) not in said:  # what all points of a sweep have in common is said once
        sys.stderr.write(text)
    said.add(text)
    return REFUSED
