"""One folder per kind of layer. A kind that owns a place in the pattern is a block; anything else is a feature."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from nam_megatron.errors import Problem
from nam_megatron.setting import Config, Setting
from nam_megatron.sizes import Line, Param, Sizes, State, Work

if TYPE_CHECKING:
    from nam_megatron.plan import Layer, Plan


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

    # What a layer of this kind costs. `layer` is None inside MTP.

    def params(self, z: Sizes, layer: "Layer | None") -> Iterator[Param]:
        """Its parameters, under the names and shapes of Megatron's modules."""
        raise NotImplementedError

    def activations(self, z: Sizes, layer: "Layer | None") -> Iterator[Line]:
        """What its forward pass keeps for the backward pass, less what selective recompute drops."""
        raise NotImplementedError

    def working(self, z: Sizes, layer: "Layer | None") -> Iterator[Line]:
        """What its `forward` and its `backward` hold at their worst moment on top of everything it keeps."""
        return iter(())

    def flops(self, z: Sizes, layer: "Layer | None") -> Iterator[Work]:
        """Operations of one token's forward pass."""
        raise NotImplementedError

    def serving(self, z: Sizes, layer: "Layer | None") -> Iterator[State]:
        """What it remembers of a sequence while serving."""
        return iter(())


def divides(key: str, total: int, by: int, what: str, by_key: str) -> Iterator[Problem]:
    """A finding if `by` does not divide `total`."""
    if total % by:
        yield Problem(f"{what} {total} is not divisible by `{by_key}` = {by}", key)


def residual(z: Sizes, norm: str = "norm") -> Iterator[Line]:
    """The input of a layer, which its norm keeps and the residual branch shares, and the norm's output.

    norm: the recompute module that drops the output; only where the norm is a module of its own.
    """
    yield z.line("input", "2 Ts h", "kept by the norm; the residual branch shares it")
    yield z.line("norm statistics", "4 Ts", "1 / rms of each token, fp32")
    if norm not in z.recompute:
        yield z.line("norm output", "w Ts h", "input of the first projections")
