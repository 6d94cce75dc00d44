"""A recipe means the same on every machine: a resolver that reads this one is refused (`oc.env`, Hydra's own, anybody's)."""

import contextlib
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.base import Container
from omegaconf.basecontainer import BaseContainer

# What OmegaConf brings that looks at the config alone.
PURE = ("oc.create", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.select")


@contextlib.contextmanager
def pure() -> Iterator[list[str]]:
    """Within, every resolver but those of PURE fails, however its name was put together; the names of those that were asked."""
    table = BaseContainer._resolvers  # OmegaConf has no other way to take one away and give it back
    before = dict(table)
    names: list[str] = []

    def refuse(name: str) -> Any:
        def asked(config: Container, parent: Container, node: Any, args: tuple, args_str: tuple) -> Any:
            names.append(name)
            raise ValueError(name)

        return asked

    try:
        table.update({name: refuse(name) for name in before if name not in PURE})
        yield names
    finally:
        table.clear()
        table.update(before)
        assert OmegaConf.has_resolver("oc.env")
