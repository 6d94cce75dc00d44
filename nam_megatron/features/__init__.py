"""What has no place in the pattern, one file each. Its fields are the YAML under `feature.<name>`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from nam_megatron.blocks import Gauge
from nam_megatron.setting import Config, Env, Row, Setting
from nam_megatron.sizes import Group, Line, Param, Sizes, Stage, Work

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Plan


class Feature(Config):
    """A feature that is on. Off, it is not there, and `off` pins what it owns, so that nothing is left to Megatron's default."""

    name: ClassVar[str]
    switch: ClassVar[str] = "enabled"  # the key that puts it on or off
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: it can be trained
    measures: ClassVar[Gauge | None] = None  # at the embedding, in the step line
    named: ClassVar[bool] = False  # whether what a model is called says it; what is ours always is
    bound: ClassVar[bool] = False  # whether no other parallel layout can read the optimizer's state that it leaves

    @property
    def on(self) -> bool:
        """Whether the switch is on; of what stands in a plan it always is."""
        return bool(getattr(self, self.switch))

    @classmethod
    def off(cls, plan: "Plan") -> Iterator[Setting]:
        """What Megatron is told where the feature is off; `beside` nothing."""
        return iter(())

    def env(self, plan: "Plan") -> Iterator[Env]:
        return iter(())

    def build(self, stack: "ModuleSpec", layers: "Mapping[str, ModuleSpec]") -> "ModuleSpec":
        """The spec of the layer stack with this feature in it; `layers`: those of its slots that the plan uses (torch side).

        What stands beside the stack: a hook that gets the model before it is wrapped, in metainfo["hooks"].
        """
        return stack

    def ours(self, plan: "Plan") -> str | None:
        """Why stock Megatron would train another model on this plan's arguments; None where it would not."""
        return None

    # What it costs. `state`: see budget/static.py.

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        """Parameters of its own on a pipeline stage."""
        return iter(())

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """Weights, gradients and optimizer state of `group`, as far as this feature decides about them."""
        return iter(())

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """What one microbatch keeps on `stage` because of it."""
        return iter(())

    def working(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """What it holds at a moment of one layer's `backward`, say, on top of everything that is kept."""
        return iter(())

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        """What it holds whatever the microbatches do."""
        return iter(())

    def flops(self, z: Sizes) -> Iterator[Work]:
        """Operations of one token's forward pass."""
        return iter(())


class Switch(Feature):
    """A feature whose switch is `enabled`."""

    enabled: Annotated[bool, Row("on or off")]
