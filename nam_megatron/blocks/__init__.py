"""One folder per kind of layer. A kind that owns a place in the pattern is a block; anything else is a feature."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from nam_megatron.errors import Problem
from nam_megatron.setting import Config, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan


class Block(Config):
    """A kind of layer. Its fields are the YAML under `model.blocks.<kind>`."""

    kind: ClassVar[str]
    symbol: ClassVar[str]  # Megatron's letter for it (megatron-core 0.19.2, hybrid_layer_allocation.Symbols)
    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # kinds whose settings it stands on
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: the kind can be trained

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        """What Megatron must be told when this kind stands in `plan`. Keys are field names of this config."""
        return iter(())

    def check(self, plan: "Plan") -> Iterator[Problem]:
        """Why this kind cannot be trained as `plan` has it."""
        return iter(())


def divides(key: str, total: int, by: int, what: str, by_key: str) -> Iterator[Problem]:
    """A finding if `by` does not divide `total`."""
    if total % by:
        yield Problem(f"{what} {total} is not divisible by `{by_key}` = {by}", key)
