"""Where a kind of layer, a feature or a section of the recipe stands, and all that it may know of it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the main stack. `source`: number of the layer whose top-k it reuses; None if it computes its own."""

    number: int
    letter: str
    kind: str
    rank: int
    segment: int
    source: int | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the others have decided, as values: no plan, no other feature.

    The layers, the widths of the model, the layout, the batch, and how it is executed. A name that is a recipe key means the same here;
    what belongs to a feature that is off is False, empty or None.
    """

    kinds: frozenset[str]  # that stand anywhere, MTP included
    letters: str  # of the pattern and of MTP's, as a recipe writes them
    pattern: str  # as Megatron reads it, pipes and MTP suffixes included
    layers: tuple[Layer, ...]  # of the main stack
    mtp: tuple[str, ...]  # kinds of one depth; empty without MTP
    mtp_depths: int  # 0: none
    index_reuse: tuple[int, int] | None  # Megatron's (topk freq, skip offset) for the shared DSA index
    blocks: Any  # of the kinds that stand, and of those they stand on

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    tied_embeddings: bool
    normalization: str
    norm_epsilon: float
    activation: str
    linear_bias: bool
    learned_positions: int | None
    rotary_base: int
    yarn_length: int  # YaRN turns RoPE, for sequences that were so long before; 0: it does not
    llama_rope: bool  # RoPE is Llama-3.1's

    tensor: int
    sequence: bool
    pipeline: int
    context: int
    gathers_keys: bool  # a rank that shares sequences has all keys of them at once, not as they go round
    expert: int
    expert_tensor: int
    data_parallel: int  # ranks that hold the same weights
    expert_data_parallel: int  # ranks that hold the same experts
    sharded: bool  # the optimizer's state, over data parallel (ZeRO-1)
    overlap_grad_reduce: bool
    fsdp: bool  # weights too, by Megatron-FSDP

    micro_batch_size: int
    global_batch_size: int
    decays: bool  # the learning rate, after its warm-up
    decay_steps: int | None
    eval_steps: int
    save: bool

    fp8: bool
    bf16_parts: frozenset[str]  # what FP8 leaves in bf16: features/fp8.py, Part
    grad_reduce: str
    fused_grad_accumulation: bool
    cross_entropy: str
    deterministic: bool
    recompute: frozenset[str]  # modules of selective recompute
    recomputes_layers: bool  # whole: full recompute
    whole_step: bool  # one CUDA graph of all microbatches of a step
    muon: bool
    gpu: bool  # what trains; else a CPU, in a rehearsal
    lora: bool  # adapters are trained, and weights stay

    @property
    def yarn(self) -> bool:
        """Whether RoPE is YaRN."""
        return self.yarn_length > 0

    def keeps(self, part: str) -> bool:
        """Whether a part is left in bf16 by FP8."""
        return part in self.bf16_parts

    @property
    def reusing_layers(self) -> tuple[Layer, ...]:
        """Layers that have the top-k of another."""
        return tuple(layer for layer in self.layers if layer.source is not None)
