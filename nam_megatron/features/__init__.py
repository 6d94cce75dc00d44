"""What has no place in the pattern, one file each. Its fields are the YAML under `feature.<name>`.

A feature that owns a part of the model names a module of runtime/, which has
    build(feature, stack, layers)   the spec of the layer stack with it; layers: specs of the slots that the plan uses
What stands beside the stack is a hook that gets the model before it is wrapped, in the spec's metainfo["hooks"].
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from nam_megatron.blocks import Gauge
from nam_megatron.words.setting import Config, Env, Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import Group, Line, Param, Sizes, Stage, Work


class Feature(Config):
    """A feature that is on. Off, it is not there, and `off` pins what it owns, so that nothing is left to Megatron's default."""

    name: ClassVar[str]
    switch: ClassVar[str] = "enabled"  # the key that puts it on or off
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: it can be trained
    torch_side: ClassVar[str | None] = None  # the module of runtime/ that puts it into the layer stack
    measures: ClassVar[Gauge | None] = None  # at the embedding, in the step line
    shapes: ClassVar[bool] = (
        False  # whether the weights mean something else with it: a part of the model, not of its training
    )
    plain: ClassVar[Mapping[str, Any]] = {}  # what its keys say on the one rank of a proof
    without_gpu: ClassVar[tuple[tuple[str, Any, Any, str], ...]] = ()  # as of a kind: what a CPU runs
    named: ClassVar[bool] = False  # whether what a model is called says it; what is ours always is
    bound: ClassVar[bool] = False  # whether no other parallel layout can read the optimizer's state that it leaves

    @property
    def on(self) -> bool:
        """Whether the switch is on; of what stands in a plan it always is."""
        return bool(getattr(self, self.switch))

    @classmethod
    def off(cls) -> Iterator[Setting]:
        """What Megatron is told where the feature is off; `beside` nothing."""
        return iter(())

    def env(self) -> Iterator[Env]:
        return iter(())

    def ours(self, site: Site) -> str | None:
        """Why stock Megatron would train another model on this plan's arguments; None where it would not."""
        return None

    def exported(self, kinds: Collection[str]) -> tuple[str, Mapping[str, Any]] | None:
        """Its part of an export's config.json: its name there and its keys. kinds: that stand."""
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
