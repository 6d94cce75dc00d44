"""NAM recipes as NeMo's: functions without required arguments that return Megatron-Bridge's ConfigContainer.

    from nam_megatron.nemo import nam56r_pretrain_config

Two names for each preset, as NeMo has them: `nam56r_pretrain_config`, and the canonical one, which also says what the recipe was
written for, `nam56r_pretrain_8gpu_h200_bf16_config`. A third, `nam56r_finetune_config`, is for starts from a pretrained checkpoint, and
refuses where none is named. `dir()` and `python -m nam_megatron.nemo list` show all. Made when asked for, so
that listing them needs no Bridge.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.recipe import Recipe, conf_dir, load

if TYPE_CHECKING:
    from nam_megatron.nemo.container import NamContainer


@cache
def names() -> Mapping[str, str]:
    """Name of each recipe function -> its preset."""
    presets = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))
    return {
        name: preset
        for preset in presets
        for name in (f"{preset}_pretrain_config", canonical(load(preset)), f"{preset}{FINETUNE}")
    }


FINETUNE = "_finetune_config"


# How Bridge's own names of recipes spell the scaling of FP8: current, delayed, of blocks.
PRECISIONS = {"tensorwise": "fp8cs", "delayed": "fp8ds", "blockwise": "fp8sc"}


def canonical(recipe: Recipe) -> str:
    """`nam56r_pretrain_8gpu_h200_bf16_config`: the preset, its GPUs and its precision."""
    fp8 = recipe.feature.fp8
    precision = PRECISIONS[fp8.recipe] if fp8 else recipe.precision.params
    return f"{recipe.preset.name}_pretrain_{recipe.world_size}gpu_{recipe.device.name}_{precision}_config"


def recipe(preset: str, overrides: Iterable[str] = ()) -> "NamContainer":
    """The container of a preset, not yet validated.

    Args:
        preset: a name in conf/preset.
        overrides: changes of the recipe, as on the command line of every other tool here: `lane=nemo_native`.

    Raises:
        Refused: with every finding, or by the versions of what is installed.
    """
    from nam_megatron import installed
    from nam_megatron.compile.lower import translate
    from nam_megatron.nemo import doctor

    installed.ask()
    raise_if(Problem(f.message, hint=f.hint) for f in doctor.of_another_version())
    from nam_megatron.nemo.container import container

    return container(translate(load(preset, overrides)))


def _preset(name: str) -> str | None:
    """The preset of a recipe function's name, without composing all of them."""
    if name.endswith(FINETUNE):
        preset = name.removesuffix(FINETUNE)
        return preset if (conf_dir() / "preset" / f"{preset}.yaml").is_file() else None
    preset, _, rest = name.partition("_pretrain_")
    if not rest.endswith("config") or not (conf_dir() / "preset" / f"{preset}.yaml").is_file():
        return None
    return preset if name in (f"{preset}_pretrain_config", canonical(load(preset))) else None


def __getattr__(name: str) -> Callable[..., "NamContainer"]:
    preset = _preset(name)
    if preset is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def function(overrides: Iterable[str] = ()) -> "NamContainer":
        made = recipe(preset, overrides)
        if name.endswith(FINETUNE) and made.checkpoint.pretrained_checkpoint is None:
            hint = "`overrides=['schedule.pretrained=FOLDER', 'data=sft', ...]`"
            message = "nothing to finetune: no pretrained checkpoint is named"
            raise Refused(message, key="schedule.pretrained", hint=hint)
        return made

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"The container of preset `{preset}`. overrides: of the recipe, `lane=nemo_native`. Raises Refused."
    )
    return globals().setdefault(name, function)


def __dir__() -> list[str]:
    return sorted([*globals(), *names()])
