"""What a kind says of its tensors, for `export.py` of its folder: under which names they stand, ours and others'.

Such a file has
    INPUT_NORM       what comes before `weight` in the checkpoint's name of the norm of the layer's input
    keys(block)      the kind's part of an export's config.json
    tensors(config)  every tensor of a layer but that norm, by config.json
    pieces(config)   where values of these stand in tensors that others publish
and where it is so
    UNBIASED         an export has no biases of it
    LAYER_TYPE       transformers' word for it in `layer_types`, if not `full_attention`
    MOST_KEYS        the key that says how many tokens a query sees at most

Imports no torch: views are methods of whatever tensor is given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from nam_megatron.words.sizes import GATED

Config = Mapping[str, Any]
View = Callable[[Any], Any]


@dataclass(frozen=True)
class Tensor:
    """name: in the export. parts: (checkpoint key, shape), joined along their first axis. dtype: as safetensors says it."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * {"BF16": 2, "F32": 4}[self.dtype]


def _whole(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True)
class Piece:
    """Values that one of our tensors shares with one that others publish.

    slot: what a table of names calls theirs. tensor: ours, as the export names it. shape: theirs. here, there: the view of ours and of
    theirs that holds the values, of as many in the same order. expert: its number, of a tensor that stands once for each. less: what
    theirs is greater by (a norm's weight whose distance from one is what we keep).
    """

    slot: str
    tensor: str
    shape: tuple[int, ...]
    here: View = _whole
    there: View = _whole
    expert: int | None = None
    less: float = 0.0


def one(name: str, key: str, *shape: int, dtype: str = "BF16") -> Tensor:
    """One tensor of either side."""
    return Tensor(name, ((key, shape),), dtype)


def norm(c: Config, name: str, key: str, size: int) -> Iterator[Tensor]:
    """The model's norm. key: with what separates it from `weight`."""
    for part in ("weight", "bias")[: 2 if c["normalization"] == "LayerNorm" else 1]:
        yield one(f"{name}.{part}", f"{key}{part}", size)


def linear(name: str, key: str, rows: int, columns: int, bias: bool) -> Iterator[Tensor]:
    """A linear layer."""
    yield one(f"{name}.weight", f"{key}.weight", rows, columns)
    if bias:
        yield one(f"{name}.bias", f"{key}.bias", rows)


def packed(name: str, key: str, sizes: Mapping[str, int], *rest: int) -> Tensor:
    """One tensor that the checkpoint holds part by part."""
    return Tensor(name, tuple((f"{key}.{part}", (size, *rest)) for part, size in sizes.items()))


def gates(c: Config) -> int:
    """How many projections a feed-forward layer's first is."""
    return 2 if c["activation"] in GATED else 1


def same(tensors: Iterable[Tensor]) -> Iterator[Piece]:
    """Tensors that others publish as they are; the slot is the name within the layer."""
    return (Piece(tensor.name.removeprefix("mixer."), tensor.name, tensor.shape) for tensor in tensors)


def rows(tensor: Tensor, **sizes: int) -> Iterator[Piece]:
    """Slots that one tensor of ours packs along its first axis."""
    first, (_, *rest) = 0, tensor.shape
    for slot, size in sizes.items():
        yield Piece(slot, tensor.name, (size, *rest), _range(first, first + size))
        first += size


def _range(first: int, last: int) -> View:
    return lambda tensor: tensor[first:last]


def gated(c: Config, tensor: Tensor, stem: str = "") -> Iterator[Piece]:
    """A feed-forward layer's first projection, whose gate others publish by itself. Ours is named `...up.weight` or `...up.bias`."""
    total, what = tensor.shape[0], tensor.name.rpartition(".")[2]
    if gates(c) == 1:
        yield from rows(tensor, **{f"{stem}up.{what}": total})
    else:
        yield from rows(tensor, **{f"{stem}gate.{what}": total // 2, f"{stem}up.{what}": total // 2})
