"""What every command shares: Hydra composes, we check, messages and exit codes are ours."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from nam_megatron.errors import OK, REFUSED, Refused
from nam_megatron.origin import Origin, hydra_problem
from nam_megatron.recipe import Recipe, conf_dir, from_config

Task = Callable[[Recipe, Mapping[str, Any], Origin], int]


def run(config_name: str, keys: Sequence[str], task: Task) -> NoReturn:
    """Run a command and exit.

    Args:
        config_name: the command's own config in conf/, which includes `recipe`.
        keys: its top-level keys that are the command's words and not the recipe's.
        task: gets the recipe, those words and where things were set; returns the exit code. Called once per job of a multirun.
    """
    sys.argv[1:] = [f"preset={a.removeprefix('conf=')}" if a.startswith("conf=") else a for a in sys.argv[1:]]
    codes = [OK]
    origin: Origin | None = None

    def job(cfg: DictConfig) -> None:
        nonlocal origin
        origin = Origin(config_name, HydraConfig.get().overrides.task)
        try:
            words = {key: cfg[key] for key in keys}
            codes.append(task(from_config(cfg, origin, without=keys), words, origin))
        except Refused as refused:
            codes.append(_refuse(refused, origin))

    # Hydra would print its own errors and exit with 1; ours name the key, give a hint, and exit with 2.
    hydra_utils.run_and_report = lambda function: function()
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(job)()
        sys.stdout.flush()
    except Refused as refused:
        codes.append(_refuse(refused, origin))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as err:
        codes.append(_refuse(Refused(hydra_problem(err))))
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(max(codes))


def _refuse(refused: Refused, origin: Origin | None = None) -> int:
    sys.stderr.write(refused.render(origin))
    return REFUSED
