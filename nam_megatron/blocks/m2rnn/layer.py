"""M2RNN's mixer, inside Megatron's MambaLayer (torch side; megatron-core 0.19.2).

Under tensor parallelism every rank has its share of the heads. Queries and keys are one head that all heads share: each rank
projects and convolves its share of their channels, and the ranks gather them before the recurrence, whose gradients for them are
summed on the way back. So no parameter is replicated but the norm of the input, which is Megatron's. Context-parallel ranks
share the heads between the projections, with whole sequences; each convolves all of its queries and keys.
"""

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import deprecate_inference_params
from torch import Tensor
from torch.nn import Parameter

from nam_megatron.blocks.m2rnn import naive
from nam_megatron.blocks.m2rnn.block import M2Rnn
from nam_megatron.errors import raise_if
from nam_megatron.runtime.aligned import align
from nam_megatron.runtime.context import by_heads, by_tokens, refuse_documents, share, whole
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.gpu import without_gpu
from nam_megatron.words.site import Site

# As the authors begin: A is uniform in (0, 16), softplus(dt_bias) is uniform in its logarithm, the convolution is normal like every other
# weight and without bias (theirs, in the configurations of their runs, has none at all).
A_MAX, DT_MIN, DT_MAX = 16.0, 1e-3, 0.1
# Tokens over which the log's gain is taken, the last ones of a sequence.
GAIN_SPAN = 64


def spec(backend: BackendSpecProvider, block: M2Rnn, site: Site) -> ModuleSpec:
    """The mixer.

    Raises:
        Refused: the recipe's kernels cannot serve the sizes, or not on this machine.
    """
    raise_if([*block.unserved(), *without_gpu("M2RNN", "m2rnn", block.kernels)])
    parts = MambaMixerSubmodules(
        in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear()
    )
    params = {
        name: getattr(block, name) for name in ("kernels", "k_dim", "v_dim", "heads", "conv_width", "gradient_clip")
    }
    params["columns"] = block.columns(site) if block.padded_projection else None
    return ModuleSpec(M2RnnMixer, params=params, submodules=parts)


class M2RnnMixer(MegatronModule):
    """[s, b, hidden] -> [s, b, hidden]; under sequence parallelism s is this rank's share.

    k_dim, v_dim: rows and columns of a head's state. conv_width: tokens that a query, key or value is made of.
    gradient_clip: naive.scan's. kernels: `fused` is Triton, `naive` plain torch. columns: aligned.align's multiple; None: no zeros.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        *,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        kernels: Literal["fused", "naive"],
        k_dim: int,
        v_dim: int,
        heads: int,
        conv_width: int,
        gradient_clip: float | None = None,
        columns: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(config)
        self.layer_number, self.tp_group, self.cp_group = layer_number, pg_collection.tp, pg_collection.cp
        self.head_group = pg_collection.tp_cp  # the ranks that hold the other heads of a sequence
        self.in_main_stack = name is None or not name.startswith("mtp")
        self.kernels, self.k_dim, self.v_dim, self.conv_width = kernels, k_dim, v_dim, conv_width
        self.gradient_clip = gradient_clip
        parts = self.tp_group.size()
        shares = parts * self.cp_group.size()
        assert heads % shares == 0 and k_dim % parts == 0
        # Of the parameters, and of what is between the projections.
        inner, own_heads, own_inner = heads * v_dim, heads // parts, heads // parts * v_dim
        self.heads, self.inner = heads // shares, heads // shares * v_dim
        # What in_proj packs on each rank; the first three go through the convolution.
        keys = k_dim // parts
        self.packed = {"q": keys, "k": keys, "v": own_inner, "gate": own_inner, "forget": own_heads}
        self.convolved = {name: self.packed[name] for name in ("q", "k", "v")}
        linear = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            2 * k_dim + 2 * inner + heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            name=name and f"{name}.in_proj",
            **linear,
        )
        if columns:
            align(self.in_proj, columns)
        self.out_proj = build_module(
            submodules.out_proj,
            inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            name=name and f"{name}.out_proj",
            **linear,
        )
        new = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        channels = sum(self.convolved.values())
        self.conv1d_weight = Parameter(torch.empty(channels, 1, conv_width, **new))
        self.conv1d_bias = Parameter(torch.empty(channels, **new))
        self.norm_weight = Parameter(torch.ones(own_inner, **new))
        # The recurrence's own stay fp32. W and D begin at one, where steps of bf16 are 2^-8, many times a learning rate. D is a
        # vector, so that it has no weight decay and Muon leaves it alone.
        new["dtype"] = torch.float32
        self.state_weight = Parameter(torch.eye(v_dim, **new).repeat(own_heads, 1, 1))
        self.D = Parameter(torch.ones(own_inner, **new))
        self.A_log = Parameter(torch.zeros(own_heads, **new))
        self.dt_bias = Parameter(torch.zeros(own_heads, **new))
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(), torch.no_grad():
                self._draw()
        for parameter in (self.state_weight, self.D, self.A_log, self.dt_bias):
            parameter.keep_in_fp32 = True
        for parameter in self.parameters(recurse=False):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0

    def _draw(self) -> None:
        self.config.init_method(self.conv1d_weight)
        self.conv1d_bias.zero_()
        self.A_log.uniform_(0, A_MAX).clamp_(min=1e-4).log_()
        dt = torch.exp(torch.empty_like(self.dt_bias).uniform_(math.log(DT_MIN), math.log(DT_MAX)))
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias of out_proj). `packed_seq_params`: documents of one sequence, each of which starts anew.

        `inference_context`: static batching. The first call runs over the prompt, the next ones over one token or several.
        """
        context = deprecate_inference_params(inference_context, inference_params)
        packed = self._whole(self.in_proj(hidden_states)[0])
        if packed_seq_params is not None:
            refuse_documents("M2RNN", self.cp_group)
        cu_seqlens = None if packed_seq_params is None else _borders(packed_seq_params, packed.size(0))
        if context is None:
            y = self._mix(packed, cu_seqlens)
        else:
            alone = context.is_static_batching() and self.cp_group.size() == 1
            assert cu_seqlens is None and alone, "M2RNN serves static batches of whole sequences alone"
            y = self._continue(packed, context)
        return self.out_proj(by_tokens(y, self.cp_group))

    def _whole(self, packed: Tensor) -> Tensor:
        """Of in_proj's output for this context rank's tokens: that of whole sequences, of its heads."""
        if self.cp_group.size() == 1:
            return packed
        q, k, *headwise = _split(packed, self.packed.values())
        return torch.cat([whole(torch.cat([q, k], -1), self.cp_group), by_heads(headwise, self.cp_group)], -1)

    def _mix(self, packed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """[s, b, in_proj's share] -> [s, b, heads * V], from zero states."""
        x, g, forget = self._unpack(packed)
        q, k, v = self._heads(self._ops.conv(x, *self._convolution, cu_seqlens))
        dt_bias, a_log, w = self._own(self.dt_bias, self.A_log, self.state_weight)
        f = naive.forget(forget, dt_bias, a_log)
        if self.training and cu_seqlens is None and self.in_main_stack and GAUGES.wants(self.layer_number):
            self._measure(q, k, v, f, w)
        y, _ = self._ops.scan(q, k, v, f, w, None, cu_seqlens, self.gradient_clip)
        return self._gate(y, v, g)

    @torch.no_grad()
    def _measure(self, q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor) -> None:
        """The gain over the last tokens of the first sequence, for the log."""
        q, k, v, f = (x[:, :1] for x in (q, k, v, f))
        split, h = max(len(q) - GAIN_SPAN, 0), f.new_zeros(1, self.heads, self.k_dim, self.v_dim)
        if split:
            _, h = self._ops.scan(*(x[:split] for x in (q, k, v, f)), w)
        GAUGES.add(self.layer_number, naive.gain(*(x[split:] for x in (k, v, f)), w, h))

    @property
    def _ops(self) -> ModuleType:
        """Where conv, scan and gate come from."""
        if self.kernels == "naive":
            return naive
        from nam_megatron.blocks.m2rnn import kernel

        return kernel

    def _own(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """This context rank's heads of each."""
        return tuple(share(p, self.cp_group) for p in parameters)

    @property
    def _convolution(self) -> tuple[Tensor, ...]:
        """Weight and bias of the channels that this rank convolves: queries, keys, its heads' values."""
        shared, parameters = 2 * self.convolved["q"], (self.conv1d_weight, self.conv1d_bias)
        if self.cp_group.size() == 1:
            return parameters
        return tuple(torch.cat([p[:shared], *self._own(p[shared:])]) for p in parameters)

    def _unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of in_proj's output: what is convolved, the gate, the forget gate's input."""
        return _split(packed, [2 * self.convolved["q"] + self.inner, self.inner, self.heads])

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels as q, k: [s, b, K], whole on each rank, and v: [s, b, heads, V]."""
        shared, v = x.split([2 * self.convolved["q"], self.inner], -1)
        shared = all_gather_last_dim_from_tensor_parallel_region(shared, group=self.tp_group)
        q, k = shared.unflatten(-1, (self.tp_group.size(), 2, -1)).unbind(-2)
        return q.flatten(-2), k.flatten(-2), v.unflatten(-1, (self.heads, self.v_dim))

    def _gate(self, y: Tensor, v: Tensor, g: Tensor) -> Tensor:
        group = self.head_group if self.head_group.size() > 1 else None
        return self._ops.gate(y, v, g, *self._own(self.D, self.norm_weight), self.config.layernorm_epsilon, group)

    # Serving ----------------------------------------------------------------------------------------------------------

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what is remembered of a sequence: the last columns before the convolution, and the heads' states."""
        return (sum(self.convolved.values()), self.conv_width), (self.heads, self.k_dim, self.v_dim)

    def _continue(self, packed: Tensor, context: Any) -> Tensor:
        """_mix of the tokens that follow those seen so far; the states are in the context, by layer."""
        batch, memory = packed.size(1), context.key_value_memory_dict
        if context.sequence_len_offset == 0:
            window, state = self.mamba_state_shapes_per_request()
            memory[self.layer_number] = packed.new_zeros(batch, *window), self.state_weight.new_zeros(batch, *state)
        window, state = memory[self.layer_number]
        x, g, forget = self._unpack(packed)
        seen = torch.cat([window.permute(2, 0, 1), x])
        window.copy_(seen[-self.conv_width :].permute(1, 2, 0))
        q, k, v = self._heads(naive.conv(seen, self.conv1d_weight, self.conv1d_bias)[self.conv_width :])
        f = naive.forget(forget, self.dt_bias, self.A_log)
        y, last = self._ops.scan(q, k, v, f, self.state_weight, state)
        state.copy_(last)
        return self._gate(y, v, g)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Each part of the packed tensors by itself, so that another tensor parallel size finds its share of each."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        for name, parts in (
            ("in_proj.weight", self.packed),
            ("conv1d_weight", self.convolved),
            ("conv1d_bias", self.convolved),
        ):
            key = prefix + name
            sharded[key] = _split_tensor_factory(sharded[key], list(parts.values()), list(parts), 0)
        return sharded


def _split(packed: Tensor, sizes: Iterable[int]) -> tuple[Tensor, ...]:
    """Parts of these sizes. What a padded projection has behind them is one more: left out here, its gradient is zeros, and no copy."""
    own = list(sizes)
    behind = packed.size(-1) - sum(own)
    return packed.split([*own, behind] if behind else own, -1)[: len(own)]


def _borders(packed: Any, tokens: int) -> Tensor:
    """First token of each document and the number of tokens: what lies past the last border is a document of its own."""
    given = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return F.pad(given.int(), (0, 1), value=tokens)


IN_BF16 = {"m2rnn": ((M2RnnMixer, ("in_proj", "out_proj")),)}
