"""One folder per kind of layer. A kind that owns a place in the pattern is a block; anything else is a feature.

Its torch side is `layer.py` of that folder, which has
    spec(backend, block, site)   of its layer, or of its mixer where the slot is `mamba_layer`
    empty(block, site)           of a layer's spec the fields that are meant to be empty: Megatron passes over those in silence
    IN_BF16                      of each of the block's `parts` (class, names of projections): what FP8 leaves in bf16 then
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from nam_megatron.words.setting import Config
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

Slot = Literal["attention_layer", "mla_layer", "dsa_layer", "moe_layer", "mlp_layer", "mamba_layer", "gdn_layer"]
Place = Literal["tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp"]
GraphPart = Literal["attn", "mamba", "mlp", "moe_router", "moe_preprocess"]


NO_KERNEL = "Transformer Engine's or Triton's kernel"  # that a CPU has
EMBEDDING = 0  # its number among the layers that measure


@dataclass(frozen=True)
class Gauge:
    """A figure that a layer measures of itself for the step line of the log. largest: of all that were taken, or their mean."""

    name: str
    largest: bool = False


class Block(Config):
    """A kind of layer, and all that is particular to it.

    Of its fields those that compute are the YAML under `model.blocks.<kind>`, and those that only execute under `execution.<kind>`.
    """

    kind: ClassVar[str]
    title: ClassVar[str]  # for people
    colour: ClassVar[str]  # of the layer strip on a terminal, as rich names colours
    hue: ClassVar[str]  # of the layers of a report's page, in hex
    tried: ClassVar[tuple[Place, ...]] = ()  # where its layer is right: over which ranks, in FP8, CUDA graphs, MTP
    measures: ClassVar[Gauge | None] = None  # of itself, in the step line
    letters: ClassVar[tuple[str, ...]]  # of the source pattern, at which it may stand
    symbol: ClassVar[str]  # Megatron's letter for it (megatron-core 0.19.2, hybrid_layer_allocation.Symbols)
    # the field of Megatron's HybridStackSubmodules that builds it; all layers of a symbol share one
    slot: ClassVar[Slot]
    stock: ClassVar[bool] = True  # whether Megatron has this layer; a mixer of ours stands in its Mamba slot
    needs: ClassVar[tuple[str, ...]] = ()  # kinds whose settings it stands on
    missing: ClassVar[str | None] = None  # the torch side that is still to be written; None: the kind can be trained
    share_by: ClassVar[str | None] = None  # the key that says how many layers, one after the other, have one choice
    latent: ClassVar[bool] = False  # whether keys and values come from a latent: Megatron's multi-latent attention
    activates: ClassVar[bool] = False  # whether it reads `model.activation`
    absent: ClassVar[Mapping[str, Any]] = {}  # what Megatron holds, by `config.field`, where nothing stands on it
    recomputed: ClassVar[tuple[str, ...]] = ()  # modules of selective recompute that no other kind has
    library: ClassVar[str | None] = None  # whose kernels it runs, on a GPU alone; None: Megatron's or ours
    fixed: ClassVar[Mapping[str, tuple[Any, str]]] = {}  # model keys that it does not read: the value it has, and why
    graph_parts: ClassVar[tuple[GraphPart, ...]] = ()  # what a CUDA graph may capture of it
    cached: ClassVar[bool] = False  # whether it owns a place in the key/value cache
    gathers_keys: ClassVar[bool] = False  # whether ranks that share sequences have to have all keys at once
    adapted: ClassVar[tuple[str, ...]] = ()  # its modules that a low-rank adapter may stand around
    unadapted: ClassVar[Mapping[str, str]] = {}  # those around which none may, and why
    autotuned: ClassVar[bool] = False  # whether Triton tries its kernels out in the first step
    without_gpu: ClassVar[
        tuple[tuple[str, Any, Any, str], ...]
    ] = ()  # of a key: what a CPU cannot run, runs instead, and why
    cut_on_gpu: ClassVar[Mapping[str, int]] = {}  # widths for a proof on a GPU, at most
    padded: ClassVar[tuple[str, ...]] = ()  # keys without which columns that 16 does not divide have no FP8 GEMM
    trains: ClassVar[tuple[str, ...]] = ()  # keys that say how it is trained, and leave as it is what its weights mean

    @classmethod
    def keys(cls, executes: bool) -> list[str]:
        """Its fields that only execute, or those that compute."""
        return [name for name in cls.model_fields if bool(cls.row(name).executes) == executes]

    @classmethod
    def at(cls, key: str) -> str:
        """The recipe key of a field."""
        return f"{'execution' if cls.row(key).executes else 'model.blocks'}.{cls.kind}.{key}"

    def called(self, site: Site) -> str:
        """What people call it with these values."""
        return self.title

    def variant(self, layer: Layer) -> str | None:
        """What tells a layer from others of its kind, as `window 128`; its first letter marks it in a strip."""
        return None

    def ours(self, site: Site) -> str | None:
        """Why stock Megatron would train another model on this plan's arguments; None where it would not."""
        return None if self.stock else "Megatron has no such layer and would build its Mamba-2 there"

    def gauge(self, layer: Layer) -> Gauge | None:
        """What a layer of the main stack measures of itself while it trains; None where nothing."""
        return self.measures

    def captured(self, line: Line, parts: frozenset[str]) -> bool:
        """Whether a tensor that a layer keeps lives in the pool of a CUDA graph of these parts."""
        return bool(parts & set(self.graph_parts))

    def expects(self, site: Site) -> Mapping[str, Any]:
        """What Megatron must hold of a setting that it computes, by the argument's name, worked out a second time: verify compares."""
        return {}

    def stands(self, layers: Sequence[Layer], site: Site) -> Mapping[str, Any] | None:
        """What a receipt says beside the numbers of its layers, which these are."""
        return None

    # What of it FP8 spares or keeps.

    def parts(self) -> Iterator[str]:
        """What of it `feature.fp8.bf16_parts` can leave in bf16."""
        return iter(())

    def part(self, param: Param) -> str | None:
        """The one of them that a parameter is of."""
        return None

    def requantised(self, site: Site) -> tuple[int, int]:
        """Channels of inputs quantised again for the weights' gradients: those that tensor ranks share, those they all have."""
        return 0, 0

    @property
    def pieces(self) -> int:
        """Parts of a rank's queries that are taken by themselves."""
        return 1

    def unproven(self) -> Iterator[str]:
        """What a proof on a CPU leaves open of it."""
        if self.library:
            yield f"{self.kind}: {self.library} kernels: plain torch"

    def small(self, site: Site) -> Mapping[str, int]:
        """Widths for a proof on a CPU, at most: each rank has at least two of what is shared, and sizes that meet in a matrix differ."""
        return {}

    # What a layer of this kind costs. `layer` is None inside MTP.

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        """Its parameters, under the names and shapes of Megatron's modules."""
        raise NotImplementedError

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        """What its forward pass keeps for the backward pass, less what selective recompute drops."""
        raise NotImplementedError

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        """What its `forward` and its `backward` hold at their worst moment on top of everything it keeps."""
        return iter(())

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        """Operations of one token's forward pass."""
        raise NotImplementedError

    def tables(self, layer: Layer | None) -> int:
        """Tables of YaRN that each layer makes for itself."""
        return 0

    def buffers(self, z: Sizes) -> Iterator[Line]:
        """What all its layers hold together, whatever the microbatches do."""
        return iter(())

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        """What it remembers of a sequence while serving."""
        return iter(())


BF16_COLUMNS, FP8_COLUMNS = 8, 16  # columns of a packed projection that its GEMMs want multiples of (aligned.py)


def needless(columns: int, multiple: int, tensor: int) -> bool:
    """Whether a packed projection has no use for rows of zeros: `multiple` divides its columns on each tensor rank."""
    return columns % (multiple * tensor) == 0


def padding(z: Sizes) -> Iterator[Line]:
    """What a padded projection keeps. `z` has pc, all the columns that it multiplies by on a rank."""
    yield z.line("padded weight", "2 h pc", "of the projection, with rows of zeros behind", mark=UNMEASURED)


def padding_working(z: Sizes) -> Iterator[Line]:
    if z.site.fused_grad_accumulation:
        yield z.line("backward", "4 h pc", "the gradient of the padded weight, before it is added", mark=UNMEASURED)


def whole_scores(z: Sizes) -> str:
    """What deterministic mode adds to the formula of attention's backward pass; `z` has n, its heads.

    cuDNN then writes the gradients of all scores in bf16 instead of adding to those of the queries (cudnn-frontend,
    node/scaled_dot_product_flash_attention.h, `use_dp_workspace`; Hopper). Ranks that gather keys have half of their queries at a time.
    """
    if not z.site.deterministic:
        return ""
    gathers = z["cp"] > 1 and z.site.gathers_keys
    return " + b n s S / t" if gathers else " + 2 b n s s / t"


def residual(z: Sizes, norm: str = "norm") -> Iterator[Line]:
    """The input of a layer, which its norm keeps and the residual branch shares, and the norm's output.

    norm: the recompute module that drops the output; only where the norm is a module of its own.
    """
    yield z.line("input", "2 Ts h", "kept by the norm; the residual branch shares it")
    yield z.line("norm statistics", "4 Ts", "1 / rms of each token, fp32")
    if norm not in z.recompute:
        yield z.line("norm output", "w Ts h", "input of the first projections")
