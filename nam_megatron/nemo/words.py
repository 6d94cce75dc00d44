"""Words of a container on our command line, as plugins of NeMo-Run and people of Bridge's recipes write them: `logger.log_interval=5`.

They are laid over the container that the recipe makes, as any runner's are: what a recipe key decides changes the recipe (torch side,
where there are any). Made for megatron-bridge 0.6.2.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nam_megatron.compile.lower import translate
from nam_megatron.nemo import doctor
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.keys import keys_at

if TYPE_CHECKING:
    from nam_megatron.nemo.container import NamContainer

# Of Bridge's ConfigContainer. `model` is also a section of recipes, whose keys go first.
SECTIONS = {
    *("train", "validation", "model", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "checkpoint", "logger", "dist", "rng"),
    *("rerun_state_machine", "profiling", "ft", "straggler", "nvrx_straggler", "inprocess_restart", "comm_overlap", "mixed_precision"),
    *("peft", "tensor_inspect", "env_vars"),
}  # fmt: skip


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the recipe's words, the container's)."""
    theirs = [word for word in words if _of_container(word)]
    return [word for word in words if word not in theirs], theirs


def _of_container(word: str) -> bool:
    key, sign, _ = word.lstrip("+~").partition("=")
    section, _, name = key.partition(".")
    if section not in SECTIONS or word.startswith("-") or not (sign or word.startswith("~")):
        return False
    return section != "model" or not (name.partition(".")[0] in keys_at(["model"]) or _unknown(name))


def _unknown(name: str) -> bool:
    """Whether Bridge's providers have no such field, or Bridge is not there: then it is a recipe's key, misspelt."""
    if doctor.installed("megatron-bridge") is None:
        return True
    doctor.stand_in()
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
    from megatron.bridge.models.transformer_config import MLATransformerConfig

    return not hasattr(HybridModelProvider, name) and name not in MLATransformerConfig.__dataclass_fields__


def laid(recipe: Recipe, words: Sequence[str]) -> "NamContainer":
    """The container of a recipe with `words` laid over it, and its recipe changed by them. Raises Refused."""
    from hydra.errors import HydraException
    from megatron.bridge.training import config
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    from nam_megatron.errors import Refused
    from nam_megatron.nemo.container import container, settled

    made = container(translate(recipe))
    if not words:
        return made
    for section, cls in (  # absent unless somebody names a field of theirs
        ("ft", config.FaultToleranceConfig),
        ("straggler", config.StragglerDetectionConfig),
        ("nvrx_straggler", config.NVRxStragglerDetectionConfig),
        ("inprocess_restart", config.InProcessRestartConfig),
    ):
        if any(word.lstrip("+").startswith(f"{section}.") for word in words):
            setattr(made, section, cls())
    os.environ.setdefault("WORLD_SIZE", str(recipe.world_size))  # by which Bridge counts GPUs; a runner has set it
    try:
        process_config_with_overrides(made, cli_overrides=list(words))
    except (HydraException, OverridesError) as err:
        first = str(err).strip().splitlines()[0].removeprefix("Failed to parse Hydra overrides: ")
        hint = "a word is `SECTION.FIELD=VALUE`, in quotes where the value has brackets or blanks"
        raise Refused(f"fields of the container: {first}", hint=hint) from None
    settled(made, saved=False)
    return made
