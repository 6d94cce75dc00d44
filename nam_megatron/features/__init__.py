"""What has no place in the pattern, one file each. Its fields are the YAML under `feature.<name>`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from nam_megatron.errors import Problem
from nam_megatron.setting import Config, Env, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan


class Feature(Config):
    """A feature, on or off. When off it still pins what it owns, so that nothing is left to Megatron's default."""

    name: ClassVar[str]
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: it can be trained

    @property
    def on(self) -> bool:
        raise NotImplementedError

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        return iter(())

    def env(self, plan: "Plan") -> Iterator[Env]:
        return iter(())

    def check(self, plan: "Plan") -> Iterator[Problem]:
        """Why this cannot be trained as `plan` has it; asked only when the feature is on."""
        return iter(())


class Switch(Feature):
    """A feature whose switch is `enabled`."""

    enabled: bool

    @property
    def on(self) -> bool:
        return self.enabled
