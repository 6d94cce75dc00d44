"""A launch of our own trainer: its plan.json, which knows what no flag says."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nam_megatron import report
from nam_megatron.blocks import Block
from nam_megatron.budget import parameters
from nam_megatron.budget.static import by_kind
from nam_megatron.compile.argv import words
from nam_megatron.compile.lower import Lowering
from nam_megatron.lint.count import Count

# Of a plan's header, what the flags do not show.
TOLD = ("departs", "gives up", "untried")


@dataclass(frozen=True)
class Planned:
    """What is trained by a plan. `layers`: (Megatron's number, kind) of the main stack."""

    lowering: Lowering

    @cached_property
    def argv(self) -> tuple[str, ...]:
        return words(self.lowering)

    @cached_property
    def env(self) -> dict[str, str | None]:
        return {e.name: e.value for e in self.lowering.env}

    @property
    def gpus(self) -> int:
        return self.lowering.plan.recipe.world_size

    @property
    def name(self) -> str:
        return self.lowering.plan.recipe.preset.name

    @property
    def layers(self) -> tuple[tuple[int, str], ...]:
        return tuple((layer.number, layer.kind) for layer in self.lowering.plan.layers)

    @cached_property
    def count(self) -> Count:
        return Count(*parameters(self.lowering.plan), by_kind(self.lowering.plan))

    @property
    def lane(self) -> str:
        return self.lowering.plan.recipe.lane.name

    @property
    def dispatcher(self) -> str:
        moe = self.lowering.plan.recipe.blocks.moe
        assert moe is not None, "asked of a model with experts"
        return moe.dispatcher

    @property
    def pads_mamba(self) -> bool:
        mamba2 = self.lowering.plan.recipe.blocks.mamba2
        return mamba2 is not None and mamba2.padded_projection

    @property
    def precision(self) -> str | None:
        """FP8 and what stays in bf16 beside it; None without FP8."""
        fp8 = self.lowering.plan.recipe.feature.fp8
        return fp8.said(self.lowering.plan.site) if fp8 else None

    def kernels(self, kind: str) -> str | None:
        """Whose kernels run a kind; None where no layer is of it."""
        return getattr(getattr(self.lowering.plan.recipe.blocks, kind), "kernels", None)

    def rows(self) -> Iterator[tuple[str, str]]:
        """(label, text) of the blocks that have no flags, and of whose kernels run."""
        standing = [b for b in self.lowering.plan.blocks if b.kind in self.lowering.plan.kinds]
        for block in standing:
            if not block.stock:
                yield block.title, ", ".join(f"{name} {value}" for name, value in _sizes(block).items())
        choice = [f"{b.title} {whose}" for b in standing if (whose := self.kernels(b.kind)) is not None]
        yield "kernels", ", ".join([*choice, f"cross entropy {self.lowering.plan.recipe.precision.cross_entropy}"])

    def notes(self) -> Iterator[str]:
        return (line for line in report.header(self.lowering) if line.startswith(TOLD))


def _sizes(block: Block) -> dict[str, object]:
    return {name: value for name, value in block.model_dump().items() if not block.row(name).executes}
