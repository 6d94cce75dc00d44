"""One folder per kind of layer. A kind that owns a place in the pattern is a block; anything else is a feature."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nam_megatron.errors import Problem
from nam_megatron.setting import Config
from nam_megatron.sizes import UNMEASURED, Line, Param, Sizes, State, Work

if TYPE_CHECKING:
    from megatron.core.models.backends import BackendSpecProvider
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Layer, Plan
    from nam_megatron.recipe.layout import Parallel

Slot = Literal["attention_layer", "mla_layer", "dsa_layer", "moe_layer", "mlp_layer", "mamba_layer", "gdn_layer"]
GraphPart = Literal["attn", "mamba", "mlp", "moe_router", "moe_preprocess"]


EMBEDDING = 0  # its number among the layers that measure


@dataclass(frozen=True)
class Gauge:
    """A figure that a layer measures of itself for the step line of the log. largest: of all that were taken, or their mean."""

    name: str
    largest: bool = False


class Block(Config):
    """A kind of layer, and all that is particular to it. Its fields are the YAML under `model.blocks.<kind>`."""

    kind: ClassVar[str]
    title: ClassVar[str]  # for people
    colour: ClassVar[str]  # of the layer strip on a terminal, as rich names colours
    hue: ClassVar[str]  # of the layers of a report's page, in hex
    measures: ClassVar[Gauge | None] = None  # of itself, in the step line
    letters: ClassVar[tuple[str, ...]]  # of the source pattern, at which it may stand
    symbol: ClassVar[str]  # Megatron's letter for it (megatron-core 0.19.2, hybrid_layer_allocation.Symbols)
    slot: ClassVar[
        Slot
    ]  # the field of Megatron's HybridStackSubmodules that builds it; all layers of a symbol share one
    stock: ClassVar[bool] = True  # whether Megatron has this layer; a mixer of ours stands in its Mamba slot
    needs: ClassVar[tuple[str, ...]] = ()  # kinds whose settings it stands on
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: the kind can be trained
    fixed: ClassVar[Mapping[str, tuple[Any, str]]] = {}  # model keys that it does not read: the value it has, and why
    graph_parts: ClassVar[tuple[GraphPart, ...]] = ()  # what a CUDA graph may capture of it
    cached: ClassVar[bool] = False  # whether it owns a place in the key/value cache
    adapted: ClassVar[tuple[str, ...]] = ()  # its modules that a low-rank adapter may stand around
    unadapted: ClassVar[Mapping[str, str]] = {}  # those around which none may, and why
    autotuned: ClassVar[bool] = False  # whether Triton tries its kernels out in the first step

    def build(self, backend: "BackendSpecProvider", plan: "Plan") -> "ModuleSpec":
        """The spec of its layer, or of its mixer where the slot is `mamba_layer` (torch side: blocks/<kind>/layer.py)."""
        raise NotImplementedError(self.kind)

    def empty(self, plan: "Plan") -> frozenset[str]:
        """Fields of that spec that are meant to be empty: Megatron passes over an empty field in silence (torch side)."""
        return frozenset()

    def ours(self, plan: "Plan") -> str | None:
        """Why stock Megatron would train another model on this plan's arguments; None where it would not."""
        return None if self.stock else "Megatron has no such layer and would build its Mamba-2 there"

    def gauge(self, layer: "Layer") -> Gauge | None:
        """What a layer of the main stack measures of itself while it trains; None where nothing."""
        return self.measures

    def captured(self, line: Line, parts: frozenset[str]) -> bool:
        """Whether a tensor that a layer keeps lives in the pool of a CUDA graph of these parts."""
        return bool(parts & set(self.graph_parts))

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


def spread(key: str, total: int, parallel: "Parallel", what: str) -> Iterator[Problem]:
    """A finding if the ranks that share a sequence's heads do not divide `total`."""
    by_key = "parallel.tensor" if parallel.context == 1 else "parallel.tensor * parallel.context"
    yield from divides(key, total, parallel.tensor * parallel.context, what, by_key)


BF16_COLUMNS, FP8_COLUMNS = 8, 16  # columns of a packed projection that its GEMMs want multiples of (aligned.py)


def needless(columns: int, multiple: int, tensor: int) -> bool:
    """Whether a packed projection has no use for rows of zeros: `multiple` divides its columns on each tensor rank."""
    return columns % (multiple * tensor) == 0


def unpadded(plan: "Plan", key: str, columns: int, multiple: int) -> Iterator[Problem]:
    """Where a packed projection has no use for rows of zeros behind its own, or cannot have them. columns: of all tensor ranks."""
    off, feature = "set it to false", plan.recipe.feature
    tensor = plan.recipe.parallel.tensor
    if needless(columns, multiple, tensor):
        message = f"the projection has {columns // tensor:,} columns on each GPU, which {multiple} divides: there is nothing to pad"
        yield Problem(message, key, off)
        return
    if feature.fp8 and feature.fp8.param_gather:
        message = "weights that are held in FP8 have one scale, and a copy with rows of zeros would need another"
        yield Problem(message, key, f"{off}, or `feature.fp8.param_gather=false`")
    if feature.megatron_fsdp:
        message = "an FSDP has weights, and buffers of their gradients, only while a layer runs"
        yield Problem(message, key, off)
    if plan.recipe.precision.grad_reduce == "bf16" and plan.recipe.precision.fused_grad_accumulation:
        message = "each microbatch's gradient would be rounded to bf16 before it is added to a buffer of bf16"
        yield Problem(message, key, off)
    if feature.cuda_graphs and "mamba" in feature.cuda_graphs.modules:
        message = "a CUDA graph of a layer would hold the padded weight and its gradient, and none was captured yet"
        yield Problem(message, key, off)
    if feature.lora and "in_proj" in feature.lora.modules(plan):
        yield Problem("an adapter's output has no columns behind the projection's own", key, off)


def padding(z: Sizes) -> Iterator[Line]:
    """What a padded projection keeps. `z` has pc, all the columns that it multiplies by on a rank."""
    yield z.line("padded weight", "2 h pc", "of the projection, with rows of zeros behind", mark=UNMEASURED)


def padding_working(z: Sizes) -> Iterator[Line]:
    if z.plan.recipe.precision.fused_grad_accumulation:
        yield z.line("backward", "4 h pc", "the gradient of the padded weight, before it is added", mark=UNMEASURED)


def whole_scores(z: Sizes) -> str:
    """What deterministic mode adds to the formula of attention's backward pass; `z` has n, its heads.

    cuDNN then writes the gradients of all scores in bf16 instead of adding to those of the queries (cudnn-frontend,
    node/scaled_dot_product_flash_attention.h, `use_dp_workspace`; Hopper). Ranks that gather keys have half of their queries at a time.
    """
    if not z.plan.recipe.precision.deterministic:
        return ""
    gathers = z["cp"] > 1 and z.plan.recipe.parallel.gathers_keys(z.plan)
    return " + b n s S / t" if gathers else " + 2 b n s s / t"


def residual(z: Sizes, norm: str = "norm") -> Iterator[Line]:
    """The input of a layer, which its norm keeps and the residual branch shares, and the norm's output.

    norm: the recompute module that drops the output; only where the norm is a module of its own.
    """
    yield z.line("input", "2 Ts h", "kept by the norm; the residual branch shares it")
    yield z.line("norm statistics", "4 Ts", "1 / rms of each token, fp32")
    if norm not in z.recompute:
        yield z.line("norm output", "w Ts h", "input of the first projections")
