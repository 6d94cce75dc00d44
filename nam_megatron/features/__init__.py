"""What has no place in the pattern, one file each. Its fields are the YAML under `feature.<name>`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from nam_megatron.errors import Problem
from nam_megatron.setting import Config, Env, Setting
from nam_megatron.sizes import Group, Line, Param, Sizes, Stage, Work

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

    # What it costs; asked only when the feature is on, but for `state`: see budget/static.py.

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        """Parameters of its own on a pipeline stage."""
        return iter(())

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """Weights, gradients and optimizer state of `group`, as far as this feature decides about them."""
        return iter(())

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """What one microbatch keeps on `stage` because of it."""
        return iter(())

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        """What it holds whatever the microbatches do."""
        return iter(())

    def flops(self, z: Sizes) -> Iterator[Work]:
        """Operations of one token's forward pass."""
        return iter(())

    def idle(self) -> Iterator[Problem]:
        """What is asked of the feature although it is off, and would be dropped silently; asked only then."""
        return iter(())


class Switch(Feature):
    """A feature whose switch is `enabled`."""

    enabled: bool

    @property
    def on(self) -> bool:
        return self.enabled
