"""DSA as a Megatron layer: our core attention inside AbsorbedMLASelfAttention, with Megatron's own indexer module.

Parameters, their names, shapes and sharding are those of Megatron's DSA (megatron-core 0.19.2,
transformer/experimental_attention_variant/{absorbed_mla,dsa}.py), so a checkpoint fits both; so do scores, top-k, loss,
its coefficient, its scaling and its logging. What differs: how it is computed, and how layers share a top-k.
"""

import importlib
from collections import deque
from types import ModuleType
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, is_checkpointing
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
    source_dsa_compute_layer,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from nam_megatron.blocks.dsa.block import KEPT_ROWS
from nam_megatron.blocks.dsa.naive import kept
from nam_megatron.blocks.mla.layer import (
    FusedMLASelfAttention,
    assert_served,
    itself,
    projections,
    weight_of,
)
from nam_megatron.blocks.mla.naive import Rope, absorbed_weight
from nam_megatron.errors import raise_if
from nam_megatron.runtime.context import own_chunks, whole
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.gpu import without_gpu
from nam_megatron.runtime.stack import NO_CROSS, NO_MLP

# A DSA layer has neither cross attention nor an MLP.
EMPTY = STOCK_EMPTY = NO_CROSS | NO_MLP

Kernels = Literal["fused", "naive"]


def _module(kind: str, kernels: Kernels) -> ModuleType:
    """The functions of a block in Triton or in plain torch: two modules with the same names."""
    return importlib.import_module(f"nam_megatron.blocks.{kind}.{'kernel' if kernels == 'fused' else 'naive'}")


def spec(backend: BackendSpecProvider, plan: Any) -> ModuleSpec:
    """The whole layer. The recipe's `model.blocks.dsa.kernels` is `fused` or `naive`.

    Raises:
        Refused: the fused kernels without a GPU; nothing else is put in their place.
    """
    kernels = plan.recipe.model.blocks.dsa.kernels
    raise_if(without_gpu("DSA", "dsa", kernels))
    core = ModuleSpec(SparseAttention, params={"kernels": kernels}, submodules=_indexer(backend))
    attention = AbsorbedMLASelfAttentionSubmodules(core_attention=core, **projections(backend, plan))
    parts = TransformerLayerSubmodules(
        input_layernorm=backend.layer_norm(rms_norm=True),
        self_attention=ModuleSpec(
            SparseSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "kernels": kernels},
            submodules=attention,
        ),
        self_attn_bda=get_bias_dropout_add,
    )
    return ModuleSpec(SparseLayer, submodules=parts)


def stock(backend: BackendSpecProvider, plan: Any) -> ModuleSpec:
    """The whole layer of Megatron's own modules, with norms on the latents."""
    core = ModuleSpec(DSAttention, submodules=_indexer(backend))
    parts = AbsorbedMLASelfAttentionSubmodules(core_attention=core, **projections(backend, plan))
    attention = ModuleSpec(AbsorbedMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    norm = backend.layer_norm(rms_norm=True)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def _indexer(backend: BackendSpecProvider) -> DSAttentionSubmodules:
    linear = backend.linear()
    parts = DSAIndexerSubmodules(
        linear_wq_b=linear, linear_wk=linear, k_norm=backend.layer_norm(), linear_weights_proj=linear
    )
    return DSAttentionSubmodules(indexer=ModuleSpec(DSAIndexer, submodules=parts))


class SparseLayer(TransformerLayer):
    """A transformer layer whose input norm hands its input on: the attention normalises while it projects."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        norm, attention = self.input_layernorm, self.self_attention
        attention.input_norm = (norm,)
        attention.core_attention.normalise = norm.forward
        # Called as before, so that the hooks of DDP's overlapped all-gather still run.
        norm.forward = itself
        # There is no norm output to drop; dropping this one would drop the residual.
        self.recompute_input_layernorm = False


class SparseSelfAttention(AbsorbedMLASelfAttention):
    """AbsorbedMLASelfAttention with MLA's ingress: its modules up to queries and keys are only asked for their weights."""

    table = FusedMLASelfAttention.table

    def __init__(
        self, config: MLATransformerConfig, submodules: Any, layer_number: int, *, kernels: Kernels, **rest: Any
    ):
        assert_served(config, kernels)
        super().__init__(config, submodules, layer_number, **rest)
        self.ops = _module("mla", kernels)
        self.input_norm: tuple = ()  # of the layer around us; in a tuple, so that it is not registered twice
        self._tables: dict = {}

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, packed_seq_params: None = None, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Absorbed queries [s, b, n / t, r + p], keys [s, b, 1, r + p] and query latents, of this rank's positions alone, of
        hidden states [s, b, h] before the input norm.
        """
        assert packed_seq_params is None
        c = self.config
        norms = [None if isinstance(n, IdentityOp) else weight_of(n) for n in (self.q_layernorm, self.kv_layernorm)]
        down = [weight_of(p) for p in (self.linear_q_down_proj, self.linear_kv_down_proj)]
        gamma, rope = weight_of(self.input_norm[0]), c.qk_pos_emb_head_dim
        latents = self.ops.ingress(hidden_states, gamma, *down, *norms, rope, c.layernorm_epsilon)
        q_latent = latents[..., : c.q_lora_rank].contiguous()
        if c.sequence_parallel:
            latents = gather_from_sequence_parallel_region(latents, group=self.tp_group)
        angles = Rope(*self.table(self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, c, None), False))

        def up(latents: Tensor) -> tuple[Tensor, Tensor]:
            n, q, kv = self.num_attention_heads_per_partition, self.linear_q_up_proj, self.linear_kv_up_proj
            weight = absorbed_weight(weight_of(q), weight_of(kv), n, rope, c.v_head_dim)
            return self.ops.absorbed(latents, weight, angles, n, c.q_lora_rank)

        if self.recompute_up_proj:
            # AbsorbedMLASelfAttention.forward drops both behind the core attention and has them made again.
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=None)
            return *self.qkv_up_checkpoint.checkpoint(up, latents), q_latent
        return *up(latents), q_latent


class SparseAttention(MegatronModule):
    """Each query attends to the top-k keys of an indexer: its own, or that of the layer whose top-k this one reuses."""

    # What AbsorbedMLASelfAttention asks of its core.
    consumes_absorbed_v_up_projection = True
    requires_dsa_inputs = True

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: DSAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float,
        kernels: Kernels,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and attn_mask_type is AttnMaskType.causal
        assert config.dsa_indexer_scoring_relu and not config.dsa_indexer_use_sparse_loss
        self.layer_number, self.softmax_scale, self.groups = layer_number, softmax_scale, pg_collection
        self.ops = _module("dsa", kernels)
        self.normalise = itself  # the layer's input norm, for the indexer
        self.source = source_dsa_compute_layer(
            layer_number, config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
        )
        self.shelf = Shelf.of(config)
        self.rerun: deque = deque()  # selections that an activation checkpoint's second run will want
        if self.source == layer_number:
            self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)
        else:
            self.indexer = None
            self.shelf.reads(self.source, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        up_v_weight: Tensor,
        packed_seq_params: None = None,
        **_: Any,
    ) -> Tensor:
        """query [s, b, n / t, r + p], key [s, b, 1, r + p], x [s, b, h] before the input norm and qr [s, b, q rank] (s / t under sequence
        parallelism), up_v_weight [n / t, d, r] -> [s, b, n / t d]. The mask is causal, whatever `attention_mask` says. Under context
        parallelism s is this rank's share of the sequence, in two chunks.
        """
        assert value is None and packed_seq_params is None and len(query) == len(key)
        config, cp = self.config, self.groups.cp
        spans = self._spans(len(query))
        key = whole(key, cp)
        loss = None
        if self.indexer is None:
            selections = self._once(lambda: self.shelf.take(self.source, self.layer_number))
        else:
            coefficient = config.dsa_indexer_loss_coeff or 0.0
            learns = self.training and torch.is_grad_enabled() and coefficient > 0
            with torch.no_grad():
                x = self.normalise(x)
            with torch.set_grad_enabled(learns):
                q, k, w = self.indexer.forward_before_topk(x, qr.detach())
                k = whole(k, cp)
                scores = [self.ops.index_scores(q[rows], k[:end], w[rows]) for rows, end in spans]
            selections = self._once(lambda: self._select([s.detach() for s in scores], query.detach(), key.detach()))
            if learns:
                factor = coefficient / (1 if config.calculate_per_token_loss else query.size(0) * query.size(1))
                more = self.softmax_scale, self.groups.tp, factor
                first, *others = (
                    self.ops.indexer_kl(q[rows], k[:end], w[rows], scored, query[rows], key[:end], *more)
                    for (rows, end), scored in zip(spans, scores, strict=True)
                )
                loss = sum(others, first)
        outs = [
            self.ops.attend(query[rows], key[:end], selection, self.softmax_scale, config.kv_lora_rank)
            for (rows, end), selection in zip(spans, selections, strict=True)
        ]
        out = self.ops.values(outs[0] if len(outs) == 1 else torch.cat(outs), up_v_weight)
        if loss is not None:
            among = {} if cp.size() == 1 else {("reduce_group" if config.calculate_per_token_loss else "avg_group"): cp}
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, self.layer_number, config.num_layers, **among)
            out = DSAIndexerLossAutoScaler.apply(out, loss)
        return out

    def _spans(self, tokens: int) -> list[tuple[slice, int]]:
        """Runs of this rank's queries, and how many keys the last of a run sees."""
        cp = self.groups.cp
        if cp.size() == 1:
            return [(slice(None), tokens)]
        chunk = tokens // 2
        first, second = ((n + 1) * chunk for n in own_chunks(cp))
        return [(slice(chunk), first), (slice(chunk, None), second)]

    def _select(self, scores: list[Tensor], query: Tensor, key: Tensor) -> list[Any]:
        """A selection for each span."""
        at_most = self.config.dsa_indexer_topk
        selections = [self.ops.select(s, min(at_most, s.size(2))) for s in scores]
        self.shelf.put(self.layer_number, selections)
        if self.training and GAUGES.wants(self.layer_number):
            spans = list(zip(self._spans(len(query)), selections, strict=True))
            shares = []
            for (rows, end), selection in [span for span in spans if span[0][1] > at_most] or spans[-1:]:
                few = sampled(len(query[rows]), at_most - (end - len(query[rows])))
                shares.append(kept(query[rows], key[:end], selection, self.softmax_scale, few).flatten())
            GAUGES.add(self.layer_number, torch.cat(shares))
        return selections

    def _once(self, make: Any) -> Any:
        """`make`'s selection; in the second run of an activation checkpoint that of the first run, whatever ran between.

        Megatron's schedules run the backward passes of a layer in the order of its forward passes.
        """
        if is_checkpointing() and torch.is_grad_enabled():
            return self.rerun.popleft()
        selection = make()
        if is_checkpointing():
            self.rerun.append(selection)
        return selection


def sampled(s: int, top_k: int) -> slice:
    """At most KEPT_ROWS queries, evenly spaced among those of `s` that come after the first `top_k`; where none does, the last one."""
    first = min(max(top_k, 0), s - 1)
    return slice(first, s, -(-(s - first) // KEPT_ROWS))


class Shelf:
    """The selections on their way from the layers that compute them to the layers that reuse them, of one model.

    A forward pass runs all layers of a share group one after another, so a source has one selection at a time; it is
    dropped when the last reusing layer has it. It lives on the config, which the layers share.

    While CUDA graphs are captured nothing is dropped: Transformer Engine runs each layer several times to warm up, then captures
    it, before it comes to the next. The graph of a reusing layer reads the memory that its source's graph writes, which both keep
    for their backward passes; as there is a graph for each microbatch in flight, replayed in the order of the capture, it holds
    the same microbatch's.
    """

    def __init__(self):
        self.readers: dict[int, list[int]] = {}  # layer numbers by source
        self.selections: dict[int, Any] = {}

    @classmethod
    def of(cls, config: MLATransformerConfig) -> "Shelf":
        if not hasattr(config, "nam_dsa_shelf"):
            config.nam_dsa_shelf = cls()
        return config.nam_dsa_shelf

    def reads(self, source: int, layer: int) -> None:
        self.readers.setdefault(source, []).append(layer)

    def put(self, source: int, selection: Any) -> None:
        if source in self.readers:
            self.selections[source] = selection

    def take(self, source: int, layer: int) -> Any:
        assert source in self.selections, (
            f"layer {layer} reuses the top-k of layer {source}, which has not run before it in this pass: "
            "a pipeline cut parts them, or something other than Megatron's own checkpoint runs this layer again"
        )
        selection = self.selections[source]
        if layer == max(self.readers[source]) and not is_graph_capturing():
            del self.selections[source]
        return selection
