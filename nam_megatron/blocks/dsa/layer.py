"""DSA as a Megatron layer: our core attention inside AbsorbedMLASelfAttention, with Megatron's own indexer module.

Parameters, their names, shapes and sharding are those of Megatron's DSA (megatron-core 0.19.2,
transformer/experimental_attention_variant/{absorbed_mla,dsa}.py), so a checkpoint fits both; so do scores, top-k, loss,
its coefficient, its scaling and its logging. What differs: how it is computed, and how layers share a top-k.
"""

import importlib
from collections import deque
from collections.abc import Callable, Sequence
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

from nam_megatron.blocks.dsa.block import INDEXER, KEPT_ROWS, Dsa, mla
from nam_megatron.blocks.dsa.naive import kept
from nam_megatron.blocks.mla.layer import (
    LATENTS,
    FusedMLASelfAttention,
    assert_served,
    cos_and_sin,
    itself,
    latent_epsilon,
    projections,
    weight_of,
)
from nam_megatron.blocks.mla.naive import Rope, absorbed_weight
from nam_megatron.errors import raise_if
from nam_megatron.runtime.context import own_chunks, whole
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.gpu import without_gpu
from nam_megatron.runtime.slots import NO_CROSS, NO_MLP
from nam_megatron.words.site import Site

IN_BF16 = {"latents": ((AbsorbedMLASelfAttention, LATENTS), (DSAIndexer, INDEXER))}
# A DSA layer has neither cross attention nor an MLP.

Kernels = Literal["fused", "naive"]


def _module(kind: str, kernels: Kernels) -> ModuleType:
    """The functions of a block in Triton or in plain torch: two modules with the same names."""
    return importlib.import_module(f"nam_megatron.blocks.{kind}.{'kernel' if kernels == 'fused' else 'naive'}")


def spec(backend: BackendSpecProvider, block: Dsa, site: Site) -> ModuleSpec:
    """The whole layer.

    Raises:
        Refused: the fused kernels without a GPU; nothing else is put in their place.
    """
    kernels = block.kernels
    if kernels == "megatron":
        return _stock(backend, site)
    raise_if(without_gpu("DSA", "dsa", kernels))
    params = {"kernels": kernels, "query_pieces": block.query_pieces}
    indexer = TurningIndexer if kernels == "fused" else DSAIndexer
    core = ModuleSpec(SparseAttention, params=params, submodules=_indexer(backend, indexer))
    attention = AbsorbedMLASelfAttentionSubmodules(core_attention=core, **projections(backend, mla(site)))
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


def empty(block: Dsa, site: Site) -> frozenset[str]:
    return NO_CROSS | NO_MLP | mla(site).without_norms()


def _stock(backend: BackendSpecProvider, site: Site) -> ModuleSpec:
    """The whole layer of Megatron's own modules, with norms on the latents."""
    core = ModuleSpec(DSAttention, submodules=_indexer(backend))
    parts = AbsorbedMLASelfAttentionSubmodules(core_attention=core, **projections(backend, mla(site)))
    attention = ModuleSpec(AbsorbedMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    norm = backend.layer_norm(rms_norm=True)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def _indexer(backend: BackendSpecProvider, indexer: type[DSAIndexer] = DSAIndexer) -> DSAttentionSubmodules:
    linear = backend.linear()
    parts = DSAIndexerSubmodules(
        linear_wq_b=linear, linear_wk=linear, k_norm=backend.layer_norm(), linear_weights_proj=linear
    )
    return DSAttentionSubmodules(indexer=ModuleSpec(indexer, submodules=parts))


class TurningIndexer(DSAIndexer):
    """Megatron's indexer, which turns its queries and keys with our kernel: stock computes both tables each time it is asked, and reads and
    writes queries seven times. Products of fp32 where stock rounds each to bf16."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._tables: dict[int, Rope] = {}

    def _apply_rope(self, x: Tensor, rotary_pos_emb: Tensor, mscale: float, cu_seqlens: None = None) -> Tensor:
        """x [s, b, n, d] with its first channels turned, in place. rotary_pos_emb: angles of this rank's positions, [s, 1, 1, p]."""
        from nam_megatron.blocks.mla import kernel

        assert cu_seqlens is None and not self.config.rotary_interleaved
        if len(x) not in self._tables:  # kept for good: CUDA graphs hold their addresses
            tables = cos_and_sin(rotary_pos_emb, self.qk_pos_emb_head_dim, mscale)
            self._tables[len(x)] = Rope(*tables, interleaved=self.config.dsa_indexer_rope_interleaved)
        return kernel.rotate_queries(x.contiguous(), self._tables[len(x)], front=True)


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
        eps = c.layernorm_epsilon, latent_epsilon(self.kv_layernorm, c.layernorm_epsilon)
        latents = self.ops.ingress(hidden_states, gamma, *down, *norms, rope, *eps)
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
        query_pieces: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and attn_mask_type is AttnMaskType.causal
        assert config.dsa_indexer_scoring_relu and not config.dsa_indexer_use_sparse_loss
        self.layer_number, self.softmax_scale, self.groups = layer_number, softmax_scale, pg_collection
        self.ops, self.query_pieces = _module("dsa", kernels), query_pieces
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
        ends = self._ends(len(query))
        runs, key = _runs(query, ends), whole(key, cp)
        if self.indexer is None:
            selections, loss = self._once(lambda: self.shelf.take(self.source, self.layer_number)), None
        else:
            selections, loss = self._index(x, qr, runs, key, ends)
        outs = [
            self.ops.attend(run, key[:end], selection, self.softmax_scale, config.kv_lora_rank)
            for run, end, selection in zip(runs, ends, selections, strict=True)
        ]
        out = self.ops.values(outs[0] if len(outs) == 1 else torch.cat(outs), up_v_weight)
        if loss is not None:
            among = {} if cp.size() == 1 else {("reduce_group" if config.calculate_per_token_loss else "avg_group"): cp}
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, self.layer_number, config.num_layers, **among)
            out = DSAIndexerLossAutoScaler.apply(out, loss)
        return out

    def _ends(self, tokens: int) -> list[int]:
        """This rank's queries are taken in runs of one length: how many keys the last of each sees."""
        cp, pieces = self.groups.cp, self.query_pieces
        chunks = own_chunks(cp) if cp.size() > 1 else (0,)
        run = tokens // (len(chunks) * pieces)
        return [(chunk * pieces + piece + 1) * run for chunk in chunks for piece in range(pieces)]

    def _index(
        self, x: Tensor, qr: Tensor, runs: Sequence[Tensor], key: Tensor, ends: list[int]
    ) -> tuple[list[Any], Tensor | None]:
        """A selection for each run of queries, and the indexer's loss where it learns. One run's scores at a time."""
        config, again = self.config, self._again()
        coefficient = config.dsa_indexer_loss_coeff or 0.0
        learns = self.training and torch.is_grad_enabled() and coefficient > 0
        with torch.no_grad():
            x = self.normalise(x)
        with torch.set_grad_enabled(learns):
            q, k, w = self.indexer.forward_before_topk(x, qr.detach())
            k = whole(k, self.groups.cp)
        s, b = q.shape[:2]
        factor = coefficient / (1 if config.calculate_per_token_loss else s * b)
        selections, losses = [], []
        for q_run, w_run, run, end in zip(_runs(q, ends), _runs(w, ends), runs, ends, strict=True):
            with torch.set_grad_enabled(learns):
                scores = self.ops.index_scores(q_run, k[:end], w_run)
            if again is None:
                selections.append(self._select(scores.detach()))
            if learns:
                more = self.softmax_scale, self.groups.tp, factor
                losses.append(self.ops.indexer_kl(q_run, k[:end], w_run, scores, run, key[:end], *more))
            del scores  # before the next ones are made
        if again is None:
            self.shelf.put(self.layer_number, selections)
            self._measure(selections, runs, key, ends)
        return again or self._first(selections), sum(losses[1:], losses[0]) if learns else None

    def _select(self, scores: Tensor) -> Any:
        """The selection of a run of queries."""
        return self.ops.select(scores, min(self.config.dsa_indexer_topk, scores.size(2)))

    def _measure(self, selections: list[Any], runs: Sequence[Tensor], key: Tensor, ends: list[int]) -> None:
        """What the log says of this layer: of few queries, evenly spaced among all that have more keys than the top-k."""
        if not (self.training and GAUGES.wants(self.layer_number)):
            return
        shares = []
        for run, end, selection, few in zip(
            runs, ends, selections, sampled(ends, len(runs[0]), self.config.dsa_indexer_topk), strict=True
        ):
            if few.start >= few.stop:
                continue
            shares.append(kept(run.detach(), key[:end].detach(), selection, self.softmax_scale, few).flatten())
        GAUGES.add(self.layer_number, torch.cat(shares))

    def _once(self, make: Callable[[], list[Any]]) -> list[Any]:
        """`make`'s selections; in the second run of an activation checkpoint those of the first run, whatever ran between."""
        return self._again() or self._first(make())

    def _again(self) -> list[Any] | None:
        """In the second run of an activation checkpoint the selections of its first.

        Megatron's schedules run the backward passes of a layer in the order of its forward passes.
        """
        return self.rerun.popleft() if is_checkpointing() and torch.is_grad_enabled() else None

    def _first(self, selections: list[Any]) -> list[Any]:
        if is_checkpointing():
            self.rerun.append(selections)
        return selections


def _runs(x: Tensor, ends: list[int]) -> Sequence[Tensor]:
    return x.chunk(len(ends)) if len(ends) > 1 else (x,)


def sampled(ends: list[int], run: int, top_k: int) -> list[slice]:
    """Of each run of queries, of which the last has `end` keys, those that are looked at: at most KEPT_ROWS of all, evenly spaced among
    those that come after the first `top_k`; where none does, the last of all."""
    spaced, seen, found = -(-sum(min(run, max(0, end - top_k)) for end in ends) // KEPT_ROWS), 0, []
    for end in ends:
        many = min(run, max(0, end - top_k))
        # The first of each run goes on where the run before it left off.
        found.append(slice(run - many + -seen % max(1, spaced), run, max(1, spaced)))
        seen += many
    return found if seen else [*(slice(run, run) for _ in ends[1:]), slice(run - 1, run)]


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
