"""The classes of a recipe: what a person meant, every value of it that stands."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from nam_megatron.blocks.kinds import Blocks, Executing, whole
from nam_megatron.features.names import Features
from nam_megatron.recipe.data import Data
from nam_megatron.recipe.layout import Cluster, Device, Lane, Parallel
from nam_megatron.recipe.model import Model
from nam_megatron.recipe.training import Optim, Precision, Schedule
from nam_megatron.words.setting import Config, Name, Row

# What may be part of a file's name: no path, no option.
FILE_NAME = r"^\w[\w.-]*$"
FileName = Annotated[str, Field(max_length=100, pattern=FILE_NAME)]


class Preset(Config):
    """What a preset is called."""

    executes: ClassVar[str | None] = "names"

    name: Annotated[FileName, Row("of the preset, and in the names of a run's folder and job")]
    alias_of: Annotated[Name | None, Row("the preset that this is another name of")]
    family: Annotated[Name, Row("of models that are the same but for lane, layout and kernels")]
    about: Annotated[Name, Row("what it is for, in one sentence of `list=presets`; what it is, the plan says")]


class Assumption(Config):
    """A value that nobody published and we chose; said with every plan that still has it."""

    key: Annotated[Name, Row("the recipe key")]
    value: Annotated[
        bool | int | float | str | None, Row("the value that was chosen; with another one the assumption is none")
    ]
    why: Annotated[Name, Row("one clause")]


class Wish(Config):
    """What an overlay wishes of kernels: granted where nothing speaks against it, else it stays here with the reason."""

    executes: ClassVar[str | None] = "what was not granted; what stands in its place says its own key"

    key: Annotated[Name, Row("the recipe key")]
    value: Annotated[bool | int | float | str | None, Row("what was wished")]
    by: Annotated[Name, Row("the overlays that wish it")]
    instead: Annotated[bool | int | float | str | None, Row("what stands without it")]
    why: Annotated[str | None, Row("the law that denies it, in a plan; null: it is not decided")]


class Recipe(Config):
    """What a person meant, every value of it that stands."""

    preset: Preset
    model: Model
    execution: Executing
    lane: Lane
    parallel: Parallel
    feature: Features
    precision: Precision
    optim: Optim
    schedule: Schedule
    data: Data
    device: Device
    cluster: Cluster
    assumptions: Annotated[dict[Name, Assumption], Row("what nobody published and we chose", executes="sentences")]
    allow: Annotated[
        dict[Name, Name],
        Row("what nobody has tried and this run does: why, by its name in docs/laws.md", executes="a waiver", was={}),
    ]
    wishes: Annotated[
        tuple[Wish, ...],
        Row(
            "what overlays wished of kernels and the rest of the recipe denies; the compiler writes it",
            executes="wishes",
            was=[],
        ),
    ]

    @cached_property
    def blocks(self) -> Blocks:
        """Every kind that stands: what the model says of it, and how it is executed."""
        return whole(self.model.blocks, self.execution)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("blocks", None)  # which pydantic would copy as it stood
        return copied

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same weights: world / (tensor * pipeline * context)."""
        p = self.parallel
        return self.world_size // (p.tensor * p.pipeline * p.context)

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same experts: world / (pipeline * expert * expert_tensor)."""
        p = self.parallel
        return self.world_size // (p.pipeline * p.expert * p.expert_tensor)
