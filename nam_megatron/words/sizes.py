"""The words blocks and features speak to the budget: sizes, parameters, lines of bytes, of work and of serving state.

A formula is written once, as a person reads it (`2 T n d / t`: a blank between two factors multiplies), and evaluated:
what is printed is what was computed. Bytes unless said otherwise; all of one rank.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, lcm, prod
from types import CodeType
from typing import Any, Literal

from nam_megatron.words.site import Layer, Site

GIB = 2**30
Shard = Literal["replicated", "tensor", "expert"]
# weight: of a Transformer Engine GEMM; router: a matrix outside TE, or learned positions; table: embedding and output layer;
# other: the rest.
Role = Literal["weight", "router", "table", "other"]

# Where bytes go, in the order a person meets them. An owner is a block kind, a feature or a section of the recipe.
PARAMETERS = {
    "replicated": "replicated parameters",
    "tensor": "tensor-sharded parameters",
    "expert": "expert parameters",
}
GRADIENTS, MATRIX, OTHER = "gradients", "matrix optimizer", "other optimizer"
ACTIVATIONS, FEATURES, ROUTING = "activations", "feature activations", "routing scratch"
LOSS, MTP, COMMUNICATION, GRAPHS = "logits and loss", "multi-token prediction", "communication", "CUDA graphs"
WORKSPACE, RUNTIME, ALLOCATOR = "workspaces", "runtime reserve", "allocator overhead"
BUCKETS = (
    *PARAMETERS.values(), GRADIENTS, MATRIX, OTHER, ACTIVATIONS, FEATURES, ROUTING, LOSS, MTP, COMMUNICATION, GRAPHS,
    WORKSPACE, RUNTIME, ALLOCATOR,
)  # fmt: skip

UNMEASURED = "unmeasured"  # read in the code or simulated, never seen on a GPU


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of one layer. `shape` is the whole tensor's; of an expert's, that of one expert, `count` of them."""

    name: str  # Megatron's within the layer; `*` where each expert has one
    shape: tuple[int, ...]
    shard: Shard
    role: Role
    count: int = 1

    @property
    def elements(self) -> int:
        return self.count * prod(self.shape)

    @property
    def optimizer(self) -> Literal["matrix", "other"]:
        """What Muon takes: 2-D parameters but embeddings (megatron-core 0.19.2, optimizer/emerging_optimizers.py)."""
        return "matrix" if self.role in ("weight", "router") else "other"


GATED = ("swiglu", "quick_geglu")  # of `model.activation`


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes with one owner and one reason.

    since: when they first exist: `init`, `forward`, `step` (the first optimizer step, which makes the moments); `build` and
    `stepping` exist only while the model is built and only during each optimizer step.
    place: `allocated`, only `reserved` (CUDA-graph pools, fragments) or `outside` torch's allocator.
    stays: kept by a layer that is recomputed from its input, too.
    """

    name: str
    bytes: int
    formula: str
    why: str
    bucket: str = ""
    owner: str = ""
    count: int = 1
    since: Literal["build", "init", "forward", "step", "stepping"] = "forward"
    place: Literal["allocated", "reserved", "outside"] = "allocated"
    mark: str = ""
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of one token in the forward pass.

    passes: 3 with the backward pass, which costs twice as much. model: part of the model's own cost; False for work that
    only this implementation does. redone: the recompute modules under which the forward is done twice.
    """

    name: str
    flops: float
    formula: str
    why: str
    owner: str = ""
    count: int = 1
    passes: int = 3
    model: bool = True
    redone: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """What a layer remembers while serving. per: `token` (grows with the context) or `sequence`. page: tokens of a block."""

    name: str
    bytes: int
    formula: str
    why: str
    per: Literal["token", "sequence"]
    page: int = 1
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline rank: its layers, one tuple for each of its segments."""

    rank: int
    of: int
    chunks: tuple[tuple[Layer, ...], ...]

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.of - 1

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


@dataclass(frozen=True)
class Sizes:
    """The symbols of every formula, of a site; a block adds its own with `own`."""

    site: Site
    symbols: Mapping[str, float] = field(repr=False)
    recompute: frozenset[str] = frozenset()  # modules of selective recompute

    @classmethod
    def of(cls, site: Site, imbalance: float = 1.0) -> "Sizes":
        """imbalance: rows of the busiest expert rank over the mean; matters only where experts are spread."""
        tokens = site.micro_batch_size * site.seq_length // site.context
        symbols = {
            "b": site.micro_batch_size,
            "S": site.seq_length,
            "s": site.seq_length // site.context,
            "T": tokens,
            "Ts": tokens // site.tensor if site.sequence else tokens,
            "x": site.seq_length / 2,
            "h": site.hidden_size,
            "V": site.vocab_size,
            "t": site.tensor,
            "cp": site.context,
            "e": site.expert,
            "et": site.expert_tensor,
            "N": site.data_parallel * site.context,
            "Ne": site.expert_data_parallel,
            "D": site.mtp_depths,
            "w": 1 if site.fp8 else 2,
            "imbalance": imbalance if site.expert > 1 else 1.0,
            "MiB": 2**20,
            "GiB": GIB,
        }
        return cls(site, symbols, site.recompute)

    def __getitem__(self, symbol: str) -> float:
        return self.symbols[symbol]

    def own(self, **symbols: float) -> "Sizes":
        return replace(self, symbols={**self.symbols, **symbols})

    def in_bf16(self, part: str) -> "Sizes":
        """For what a part's GEMMs keep of their inputs: bf16 where FP8 leaves it in bf16."""
        return self.own(w=2) if self.site.keeps(part) else self

    def value(self, formula: str) -> float:
        number: float = eval(_code(formula), {"__builtins__": {}, "max": max, "min": min}, dict(self.symbols))
        return number

    def line(self, name: str, formula: str, why: str, **more: Any) -> Line:
        return Line(name, ceil(self.value(formula) - 1e-6), formula, why, **more)

    def work(self, name: str, formula: str, why: str, **more: Any) -> Work:
        return Work(name, self.value(formula), formula, why, **more)

    def state(self, name: str, formula: str, why: str, per: Literal["token", "sequence"], **more: Any) -> State:
        return State(name, ceil(self.value(formula) - 1e-6), formula, why, per, **more)

    # Parameters of the usual modules --------------------------------------------------------------------------------

    def norm(self, name: str, width: int) -> Iterator[Param]:
        """Of a normalisation; `name` ends where Megatron adds `weight`."""
        for part in ("weight", "bias") if self.site.normalization == "LayerNorm" else ("weight",):
            yield Param(name + part, (width,), "replicated", "other")

    def column(self, name: str, rows: int, columns: int) -> Iterator[Param]:
        """Of a linear layer whose outputs are shared over tensor ranks."""
        yield Param(f"{name}.weight", (rows, columns), "tensor", "weight")
        if self.site.linear_bias:
            yield Param(f"{name}.bias", (rows,), "tensor", "other")

    def row(self, name: str, rows: int, columns: int) -> Iterator[Param]:
        """Of a linear layer whose inputs are shared over tensor ranks; each has the whole bias."""
        yield Param(f"{name}.weight", (rows, columns), "tensor", "weight")
        if self.site.linear_bias:
            yield Param(f"{name}.bias", (rows,), "replicated", "other")

    @property
    def gates(self) -> int:
        """How many matrices a feed-forward's first projection packs."""
        return 2 if self.site.activation in GATED else 1


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as a rank holds it. `elements`: of one, of which there are `count`."""

    param: Param
    owner: str
    layer: int | None
    elements: int
    count: int

    @classmethod
    def of(cls, z: Sizes, param: Param, owner: str, layer: int | None = None) -> "Held":
        parts = {"replicated": 1, "tensor": int(z["t"]), "expert": int(z["et"])}[param.shard]
        count = param.count // int(z["e"]) if param.shard == "expert" else param.count
        return cls(param, owner, layer, prod(param.shape) // parts, count)


@dataclass(frozen=True)
class Group:
    """Parameters of a rank that share buffers: dense ones, or experts where these have ranks of their own."""

    name: Literal["dense", "experts"]
    held: tuple[Held, ...]
    ranks: int  # that share its optimizer state
    shares: str  # the symbol of that number: N or Ne

    def elements(self, held: Iterable[Held] | None = None) -> int:
        return sum(x.elements * x.count for x in (self.held if held is None else held))

    @property
    def padding(self) -> int:
        """Elements lost in the buffer: parameters start at multiples of 64, the end is padded for all ranks.

        megatron-core 0.19.2, distributed/param_and_grad_buffer.py; each further bucket's end would add as much again.
        """
        if not self.held:
            return 0
        padded = sum(-(-x.elements // 64) * 64 * x.count for x in self.held)
        end = lcm(self.ranks, 128)
        return -(-padded // end) * end - self.elements()

    def split(self, which: Literal["matrix", "other"]) -> tuple[Held, ...]:
        return tuple(x for x in self.held if x.param.optimizer == which)

    def weights(self, z: Sizes, rate: str, why: str, **more: Any) -> Iterator[Line]:
        """A line for each owner and way of sharding: `rate` bytes an element."""
        parts: dict[tuple[str, str], list[Held]] = {}
        for x in self.held:
            parts.setdefault((x.param.shard, x.owner), []).append(x)
        for (shard, owner), held in parts.items():
            yield from self.line(
                z, PARAMETERS[shard], "weights", rate, why, held, **{"since": "init", "owner": owner, **more}
            )

    def line(
        self, z: Sizes, bucket: str, name: str, rate: str, why: str, held: Iterable[Held] | None = None, **more: Any
    ) -> Iterator[Line]:
        """`rate` bytes for each element (symbol W) of `held`; nothing where there is none."""
        if elements := self.elements(held):
            z = z.own(W=elements)
            yield z.line(f"{name}, {self.name}", f"{rate} W", why, bucket=bucket, **more)


_WORD = re.compile(r"[A-Za-z]\w*|\d+(?:\.\d+)?(?:e\d+)?|[-+*/(),]")


@cache
def _code(formula: str) -> CodeType:
    """`2 T (n + g) d / t` as Python: two operands side by side multiply."""
    words = _WORD.findall(formula)
    assert "".join(words) == formula.replace(" ", ""), formula
    text, before = "", ""
    for word in words:
        called = before in ("max", "min")
        factor = before and (before[-1].isalnum() or before == ")") and not called
        text += (" * " if factor and (word[0].isalnum() or word == "(") else " ") + word
        before = word
    return compile(text.strip(), formula, "eval")
