"""Mixture of experts with one sort, for which the host waits once or not at all: Megatron's MoELayer with dispatchers of ours (torch side).

Written against core/transformer/moe/{moe_layer,token_dispatcher}.py of megatron-core 0.19.2. Without expert parallelism its dispatchers
do what only expert parallelism needs: all-to-all sorts rows by chunks that are in order already, in forward and backward; allgather
has the host wait for the GPU twice, for the rows of each expert and for the size of a masked selection, and the GPU then has nothing
to do until the host has launched the experts' first GEMM. With expert parallelism both have to wait: what travels, or is sorted, is as
large as the router decides.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, permute
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from nam_megatron.blocks.moe.block import Moe
from nam_megatron.blocks.moe.experts import Bounds, Gemm, keep_counts_on_gpu, last_first
from nam_megatron.blocks.moe.quack_gemm import QuackGemm
from nam_megatron.blocks.moe.router import ForkingRouter
from nam_megatron.blocks.moe.torch_gemm import TorchGemm
from nam_megatron.blocks.moe.travel import Trip, exchange, gather, scatter
from nam_megatron.errors import raise_if
from nam_megatron.runtime.slots import NO_ATTENTION, NO_CROSS
from nam_megatron.words.site import Site

ON_GPU: dict[str, type[Gemm]] = {"torch": TorchGemm, "quack": QuackGemm}  # by `expert_gemm`
FCS = ("linear_fc1", "linear_fc2")
IN_BF16 = {"experts": ((TEGroupedMLP, FCS),), "shared_experts": ((SharedExpertMLP, FCS),)}
# Used only with --use-te-activation-func; a backend without TE has none.


def spec(backend: BackendSpecProvider, block: Moe, site: Site) -> ModuleSpec:
    """The whole layer: Megatron's own modules, but for the dispatchers `local` and `gathered`."""
    # num_experts only has to be given; MoELayer takes the number from the config. It is the spec that decides about
    # grouped GEMM: Megatron's own hybrid spec groups whatever --moe-grouped-gemm says.
    moe = get_moe_module_spec_for_backend(backend, num_experts=1, moe_grouped_gemm=block.grouped_gemm)
    if block.dispatcher_is_ours:
        layer, parts = NamMoELayer, moe.keywords["submodules"]
        if block.fused_router_gradient:
            layer, parts = ForkedMoELayer, replace(parts, router=ForkingRouter)
        moe = partial(layer, **moe.keywords | {"submodules": parts}, gemm=ON_GPU.get(block.expert_gemm))
    norm = backend.layer_norm(rms_norm=True)
    parts = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=moe, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(MoETransformerLayer, submodules=parts)


def empty(block: Moe, site: Site) -> frozenset[str]:
    return NO_CROSS | NO_ATTENTION | {"mlp.experts.activation_func", "mlp.shared_experts.activation_func"}


class LocalDispatcher(MoEAllGatherTokenDispatcher):
    """Sorts a rank's tokens by expert, all of which it holds; nothing travels. Dropless: every token has top-k rows.

    Values and their order are those of Megatron's dispatchers; with `on_gpu` the last expert's rows come first, and no host waits.
    """

    routing_map: Any  # bool [tokens, experts] of the running microbatch, else None
    on_gpu = False

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Starts the copy of the rows of each expert to the host: whatever is launched from here on runs while the host waits."""
        if self.on_gpu:
            self.routing_map, probs, self.rows_of_experts = last_first(self.routing_map, probs)
            return hidden_states, probs
        self.rows_of_experts = self.routing_map.sum(dim=0).to("cpu", non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event()
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | Bounds, Tensor]:
        """[tokens, hidden], [tokens, experts] -> rows [tokens x top-k, hidden] by expert, how many each has (or Bounds), their probs."""
        self.local_map = self.routing_map
        rows, probs = self.sort(hidden_states, probs)
        self.routing_map = None
        if not self.on_gpu:
            self.copied.synchronize()
        return rows, self.rows_of_experts, probs

    def sort(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden], probs [tokens, experts here] -> rows by expert, as many as there can be, and their probs; by `local_map`."""
        self.hidden_shape_before_permute = hidden_states.shape
        rows, probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            hidden_states,
            self.local_map,
            probs=probs,
            num_out_tokens=hidden_states.size(0) * min(self.router_topk, self.num_local_experts),
            fused=self.config.moe_permute_fusion,
        )
        return rows, probs


class GatheredDispatcher(LocalDispatcher):
    """Gives every rank of an expert group all of its tokens, of which it sorts those of its own experts, the last one's first. Dropless.

    There are rows for whatever the router may choose, and what lies behind the last expert's is never read: no size depends on a token.
    """

    chosen: Trip
    tokens: Trip
    known: Tensor | None  # bool [rows]: whether a token was sorted there

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Starts the journey of tokens and probabilities: nobody may read them yet."""
        # Of [tokens, experts] each rank wants the columns of its own; -1 says that an expert was not chosen.
        ours = torch.where(self.routing_map, probs, -1.0).unflatten(1, (self.ep_size, -1)).transpose(0, 1)
        self.routing_map = None
        self.chosen, self.tokens = Trip(exchange, self.ep_group), Trip(gather, self.ep_group)
        return self.tokens.leave(hidden_states), self.chosen.leave(ours.flatten(0, 1))

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Bounds, Tensor]:
        """Rows as LocalDispatcher has them, as many as this rank's experts could get."""
        probs, hidden_states = self.chosen.arrive(probs), self.tokens.arrive(hidden_states)
        self.local_map, probs, bounds = last_first(~(probs < 0), probs.clamp(min=0))  # what is no number stands
        rows, probs = self.sort(hidden_states, probs)
        self.known = None
        # Megatron's own permutes all rows, and Transformer Engine's those that are known.
        if not self.config.moe_permute_fusion:
            self.known = torch.arange(len(rows), device=rows.device) < bounds.bounds[-1]
            rows, probs = self._none_behind(rows), torch.where(self.known, probs, 0.0)
        return rows, bounds, probs

    def _none_behind(self, rows: Tensor) -> Tensor:
        return rows if self.known is None else torch.where(self.known[:, None], rows, 0.0)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        hidden_states, self.known = self._none_behind(hidden_states), None
        return super().combine_preprocess(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[ranks x tokens, hidden] -> [tokens, hidden]: a token's sum over the experts of all ranks."""
        home = Trip(scatter, self.ep_group)
        return home.arrive(home.leave(hidden_states))


class NamMoELayer(MoELayer):
    """MoELayer with a dispatcher of ours, whose shared expert's output is added where the residual is.

    gemm: the counts stay on the GPU, and it multiplies the experts. None: Transformer Engine does, and the shared expert runs between the
    copy of the counts to the host and the wait for it. With several ranks it runs while the tokens travel.
    """

    def __init__(self, *args: Any, gemm: type[Gemm] | None = None, pg_collection: Any = None, **kwargs: Any):
        pg_collection = pg_collection or get_default_pg_collection()
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        assert pg_collection.expt_tp.size() == 1, "a part of an expert"
        several = pg_collection.ep.size() > 1
        assert gemm is not None or not several, "laws/experts.py refuses it"
        self.token_dispatcher = (GatheredDispatcher if several else LocalDispatcher)(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )
        self.token_dispatcher.on_gpu = gemm is not None
        if gemm is not None:
            raise_if(gemm.unserved())
            keep_counts_on_gpu(self.experts, gemm, self.config.gradient_accumulation_fusion)
        self.shared_output: Tensor | None = None
        c = self.config
        # Whether the shared expert's output is returned beside the experts' sum. Not where Megatron runs a layer twice, captures a part
        # of it, or takes a part of its tokens: there it looks at the first of both alone.
        self.apart = c.recompute_granularity is None and c.cuda_graph_impl in ("none", "full_iteration")
        self.apart &= c.mlp_chunks_for_training == c.mlp_chunks_for_prefill == 1

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The experts' sum, and what the shared expert adds to it, as a bias: the kernel that adds the residual takes both."""
        if not self.apart:
            return super().forward(*args, **kwargs)
        output, _ = super().forward(*args, **kwargs)
        shared, self.shared_output = self.shared_output, None
        return output, shared

    def shared_experts_compute(self, hidden_states: Tensor) -> None:
        """Not yet: in `dispatch`."""

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        sent, probs = super().dispatch(hidden_states, probs)
        self.shared_output = super().shared_experts_compute(self.shared_input(hidden_states))
        return sent, probs

    def shared_input(self, hidden_states: Tensor) -> Tensor:
        """What the shared expert reads. hidden_states: [tokens, hidden], this rank's for the experts."""
        return hidden_states.view(self.token_dispatcher.hidden_shape)

    def postprocess(self, output: Tensor, shared_expert_output: None) -> Tensor:
        shared = None
        if not self.apart:
            shared, self.shared_output = self.shared_output, None
        return super().postprocess(output, shared)


class ForkedMoELayer(NamMoELayer):
    """NamMoELayer whose experts and shared expert read what its ForkingRouter hands on: the input itself is read there alone."""

    # The router's inputs for the experts and for the shared expert, of the running pass.
    taken: tuple[Tensor, Tensor] | None = None

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        self.taken = self.router.take_inputs()
        return super().preprocess(self.taken[0], probs, routing_map)

    def shared_input(self, hidden_states: Tensor) -> Tensor:
        taken, self.taken = self.taken, None
        assert taken is not None, "the router has not run"
        return taken[1]
