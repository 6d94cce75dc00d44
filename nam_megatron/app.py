"""What every command shares: Hydra composes, we check, messages and exit codes are ours."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import hydra
from hydra._internal import utils as hydra_utils
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import nam_megatron
from nam_megatron import files
from nam_megatron.errors import OK, REFUSED, Problem, Refused, finish, raise_if, raise_if_twice
from nam_megatron.origin import Origin, clipped, hydra_problem
from nam_megatron.recipe import SWITCHED, Recipe, added, conf_dir, from_config

# `-cn NAME`, `-cp PATH`: Hydra would compose something else, in a folder `outputs` of its own making.
OTHER_CONFIG = re.compile(r"--config-(?:name|path)(?:=|$)|-c[np]")
Task = Callable[[Recipe, Mapping[str, Any], Origin], int]


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
    words = added(spelled(sys.argv[1:]))
    sys.argv[1:] = [f"preset={a.removeprefix('conf=')}" if a.startswith("conf=") else a for a in words]
    raise_if_twice(_given(sys.argv[1:]))
    raise_if(_no_names(sys.argv[1:]))
    codes = [OK]
    # Outside a job Hydra composes, and whatever it raises is over what it was given; in a job, errors are ours.
    in_job = False

    def job(cfg: DictConfig) -> None:
        nonlocal in_job
        in_job = True
        # Unresolved: `${...}` in an override is the config's business, which says where it stands.
        origin = Origin(config_name, OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))
        try:
            recipe = from_config(cfg, origin, without=keys)
            words = _words(cfg, keys)
            codes.append(task(recipe, words, origin))
        except Refused as refused:
            codes.append(_refuse(refused, origin))
        in_job = False

    if another := next((a for a in sys.argv[1:] if OTHER_CONFIG.match(a)), None):
        hint = "`conf=NAME` chooses a preset; `--config-dir DIR` adds a folder of your own"
        raise Refused(Problem(f"`{clipped(another)}`: a command has one config, and it is its own", None, hint))
    _options(sys.argv[1:])
    files.guard()
    # Hydra would print its own errors and exit with 1; ours name the key, give a hint, and exit with 2.
    hydra_utils.run_and_report = lambda function: function()
    Hydra.get_mode = _mode
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(job)()
    except Refused as refused:
        codes.append(_refuse(refused))
    except Exception as err:
        if in_job:
            raise
        problem = hydra_problem(err, keys)
        if more := also.get(problem.key or ""):
            problem = replace(problem, hint=f"{problem.hint}; {more}")
        codes.append(_refuse(Refused(problem)))
    return max(codes)


def _options(words: Sequence[str]) -> None:
    """Refuse options that Hydra does not have, which its parser would end the process for."""
    parser = hydra_utils.get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise Refused(
            Problem(f"options: {message}", None, "a key is KEY=VALUE; `--help` lists options, groups and keys")
        )

    parser.error = refuse
    parser.parse_args(words)


def _given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of every override: `key`, `+key` and `++key` are one key, and a mapping gives each of its keys."""
    parser = OverridesParser.create()
    for word in words:
        if word.startswith(("-", "~")):
            continue
        try:
            override = parser.parse_override(word)
            value = override.value()
            leaves = list(_leaves(override.key_or_group, value)) if isinstance(value, dict) else None
        except Exception:
            continue
        if leaves is not None:
            yield from leaves
        else:
            key = override.key_or_group
            # As it was typed, most likely.
            yield "conf" if key == "preset" else key, word.partition("=")[2]


def _no_names(words: Sequence[str]) -> Iterator[Problem]:
    """Groups of configs that are given what is no name of one of them; Hydra does not say which."""
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    for word in words:
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"null|true|false|[-+.\d]+", value) and key in groups:
            hint = f"`{key}` is a group of configs: write {key}=NAME; `--help` lists them"
            yield Problem(f"`{value}` is no name", key, SWITCHED if key == "feature" else hint)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, str(value)


def _mode(hydra_app: Hydra, config_name: str | None, overrides: Sequence[str], ask=Hydra.get_mode) -> Any:
    """`hydra.mode`, for which Hydra composes everything a first time; none of our files sets it, so None without that."""
    return ask(hydra_app, config_name, list(overrides)) if any("hydra." in text for text in overrides) else None


def _words(cfg: DictConfig, keys: Sequence[str]) -> dict[str, Any]:
    try:
        return {key: cfg[key] for key in keys}
    except OmegaConfBaseException as err:
        raise Refused(hydra_problem(err)) from None


def _refuse(refused: Refused, origin: Origin | None = None) -> int:
    if nam_megatron.interrupted:  # Hydra and OmegaConf make errors of their own of it
        raise KeyboardInterrupt from refused
    sys.stderr.write(refused.render(origin))
    return REFUSED
