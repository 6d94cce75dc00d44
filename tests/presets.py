"""The presets in conf/, for parametrised tests."""

from functools import cache

from nam_megatron.lower import Lowering, translate
from nam_megatron.recipe import conf_dir, load

NAMES = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))


@cache
def lowered(name: str, *overrides: str) -> Lowering:
    return translate(load(name, overrides))
