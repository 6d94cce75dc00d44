"""The Mamba-3 mixer inside Megatron's MambaLayer: projections, parameters and their sharding, recompute, decoding.

Megatron's own mixer is core/ssm/mamba_mixer.py (megatron-core 0.19.2). Heads and groups are spread over tensor ranks; the
angles, which all heads share, are a spread part of the input projection too, gathered before the scan. Under context
parallelism heads and groups are spread over its ranks as well, between the two projections.
"""

import math
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from nam_megatron.blocks.mamba3 import kernel, naive
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.blocks.mamba3.naive import NORM_EPSILON, Shape, State, Weights
from nam_megatron.blocks.mamba3.prepare import offsets
from nam_megatron.errors import Refused, raise_if
from nam_megatron.runtime import split_projection
from nam_megatron.runtime.context import by_heads, by_tokens, refuse_documents, share, whole
from nam_megatron.runtime.gpu import without_gpu
from nam_megatron.words.site import Site

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4  # of the initial steps, as mamba-ssm 2.3.2.post1 draws them
# Parameters that stay in fp32, all cut along their first dimension, the heads.
HEADWISE = ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")


def spec(backend: BackendSpecProvider, block: Mamba3, site: Site) -> ModuleSpec:
    """The mixer's spec.

    Raises:
        Refused: fused kernels without a GPU, or at sizes that they do not serve; nothing else is put in their place.
    """
    raise_if(without_gpu("Mamba-3", "mamba3", block.kernels))
    parts = MambaMixerSubmodules(
        in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear()
    )
    raise_if(block.unserved())
    names = (
        "heads", "head_dim", "state_dim", "groups", "mimo_rank", "angles", "chunk", "head_pieces", "recompute", "keep_states",
        "keep_prepared", "kernels",
    )  # fmt: skip
    params = {name: getattr(block, name) for name in names} | {"rates_apart": block.rates_apart(site)}
    return ModuleSpec(Mamba3Mixer, params=params, submodules=parts)


class Mamba3Mixer(MegatronModule):
    """[s, b, hidden] -> [s, b, hidden]; under sequence parallelism s is this rank's share of the sequence.

    heads, groups, angles: of the whole layer; each is spread over tensor ranks, which must divide it. chunk: tokens that the
    fused kernels take at once. head_pieces: parts of a rank's heads, scanned one after the other. recompute: `in_proj` computes the
    output of the input projection again in the backward pass instead of keeping it. keep_states, keep_prepared: the scan's states at the
    chunks' starts, and what it reads besides z and x, are kept, not computed again. rates_apart: dt, A, trap and the angles are
    multiplied by themselves, in bf16 beside the rest in FP8. d_model: Megatron's hidden size. Other keywords that MambaLayer gives are
    not used.
    """

    def __init__(
        self,
        config: Any,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        heads: int,
        head_dim: int,
        state_dim: int,
        groups: int,
        mimo_rank: int,
        angles: int,
        chunk: int,
        head_pieces: int,
        recompute: str,
        keep_states: bool,
        keep_prepared: bool,
        rates_apart: bool,
        kernels: str,
        layer_number: int,
        pg_collection: Any,
        name: str | None = None,
        **_: Any,
    ):
        super().__init__(config)
        self.layer_number, self.chunk, self.recompute, self.kernels = layer_number, chunk, recompute, kernels
        self.head_pieces, self.kept = head_pieces, (keep_states, keep_prepared)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        shares = ranks * self.cp_group.size() * head_pieces
        self.shape = Shape(heads // ranks, head_dim, state_dim, groups // ranks, mimo_rank, angles)
        self.scanned = Shape(heads // shares, head_dim, state_dim, groups // shares, mimo_rank, angles)
        self.parts = self.shape.parts | {"angles": angles // ranks}
        self.rates_apart = rates_apart
        # The recipe's check has refused all else.
        assert not any((heads % shares, groups % shares, angles % ranks))
        assert kernels == "naive" or config.params_dtype in kernel.DTYPES, config.params_dtype

        def linear(module: Any, inputs: int, outputs: int, part: str, **more: Any) -> Any:
            own = name and f"{name}.{part}"
            common = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group, name=own)
            return build_module(module, inputs, outputs, **common, **more)

        width = sum(self.parts.values()) * ranks
        self.in_proj = linear(
            submodules.in_proj, d_model, width, "in_proj",
            init_method=config.init_method, gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1",
        )  # fmt: skip
        if rates_apart:
            assert ranks == 1, "a law refuses tensor ranks"
            split_projection.prepare(self.in_proj)
        self.out_proj = linear(
            submodules.out_proj, heads * head_dim, d_model, "out_proj",
            init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )  # fmt: skip
        self._build_weights()

    def _build_weights(self) -> None:
        """The parameters of the scan, with mamba-ssm's initial values."""
        h, p, n, _, r, _ = self.shape
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        with get_cuda_rng_tracker().fork():
            spread = torch.rand(h, device=device, dtype=torch.float32)
        dt = torch.exp(spread * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN)).clamp(min=DT_FLOOR)
        values = {
            "dt_bias": dt + torch.log(-torch.expm1(-dt)),  # the inverse of softplus
            "D": torch.ones(h, device=device),
            "B_bias": torch.ones(h, r, n, device=device),
            "C_bias": torch.ones(h, r, n, device=device),
        }
        if r > 1:
            values["mimo_x"] = torch.full((h, r, p), 1 / r, device=device)
            values["mimo_z"] = torch.ones(h, r, p, device=device)
            values["mimo_o"] = torch.full((h, r, p), 1 / r, device=device)
        for name in HEADWISE:
            if name in values:
                parameter = torch.nn.Parameter(values[name])
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0
                parameter.keep_in_fp32 = True
                self.register_parameter(name, parameter)
        for name in ("B_norm", "C_norm"):
            norm = torch.nn.RMSNorm(n, eps=NORM_EPSILON, device=device, dtype=dtype)
            # Each rank has the gradient of its own groups; Megatron sums what is marked so.
            norm.weight.sequence_parallel = self.config.sequence_parallel
            self.add_module(name, norm)

    @property
    def weights(self) -> Weights:
        norms = {"B_norm": self.B_norm.weight, "C_norm": self.C_norm.weight}
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            norms = {k: copy_to_tensor_model_parallel_region(w, group=self.tp_group) for k, w in norms.items()}
        own = {name: share(getattr(self, name), self.cp_group) for name in HEADWISE if hasattr(self, name)}
        return Weights(**norms, **own)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and bias (None), as MambaLayer takes them.

        Raises:
            Refused: dynamic batches, documents while decoding or under context parallelism.
        """
        context = inference_context if inference_context is not None else inference_params
        if context is not None:
            return self._serve(hidden_states, context, packed_seq_params)
        documents = None if packed_seq_params is None else self._documents(hidden_states, packed_seq_params)
        if self.recompute == "in_proj" and self.training and torch.is_grad_enabled():
            again = CheckpointWithoutOutput(fp8=self.config.fp8)
            packed = again.checkpoint(self._packed, hidden_states)
            y = self._scan(packed, documents)
            again.discard_output_and_register_recompute(y)
        else:
            y = self._scan(self._packed(hidden_states), documents)
        return self.out_proj(by_tokens(y, self.cp_group))

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The input projection [s, b, *]; of `rates_apart` in two parts."""
        if self.rates_apart:
            return split_projection.split(self.in_proj, hidden_states, offsets(self.shape)["dt"])
        return self.in_proj(hidden_states)[:1]

    def _packed(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The input projection of whole sequences, of the heads of each scan: all, or parts of this context rank's."""
        projected, cp = self._projected(hidden_states), self.cp_group
        if cp.size() == self.head_pieces == 1:
            return projected
        widths = list(self.parts.values())
        at = list(self.parts).index("dt") if self.rates_apart else len(widths)
        cuts = zip(projected, (widths[:at], widths[at:]), strict=False)  # one of them where all is in one tensor
        *headwise, angles = (part for packed, own in cuts for part in packed.split(own, -1))
        if cp.size() > 1:
            angles, widths = whole(angles, cp), [part.size(-1) // cp.size() for part in headwise]
            headwise = by_heads(headwise, cp).split(widths, -1)
        pieces = zip(*(part.chunk(self.head_pieces, -1) for part in headwise), strict=True)
        return tuple(torch.cat([*piece, angles], -1) for piece in pieces)

    def _scan(self, packed: tuple[Tensor, ...], documents: Tensor | None) -> Tensor:
        if self.head_pieces == 1:
            return self._scan_piece(packed, self.weights, documents)
        pieces = zip(packed, self.weights.chunk(len(packed)), strict=True)
        return torch.cat([self._scan_piece((piece,), weights, documents) for piece, weights in pieces], -1)

    def _scan_piece(self, packed: tuple[Tensor, ...], weights: Weights, documents: Tensor | None) -> Tensor:
        if self.kernels == "fused":
            launch, (first, *rates) = kernel.launch_of(self.scanned, *self.kept), packed
            return kernel.scan(first, weights, self.scanned, self.chunk, documents, self.tp_group, launch, *rates)
        return naive.scan(self._with_all_angles(_joined(packed)), weights, self.scanned, None, documents)[0]

    def _with_all_angles(self, packed: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return packed
        rest, own = packed.split([packed.size(-1) - self.parts["angles"], self.parts["angles"]], -1)
        return torch.cat([rest, all_gather_last_dim_from_tensor_parallel_region(own, group=self.tp_group)], -1)

    def _documents(self, hidden_states: Tensor, packed: PackedSeqParams) -> Tensor:
        """[1, s] number of each token's document; s is the whole sequence."""
        refuse_documents("Mamba-3", self.cp_group)
        padded = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if padded is None else padded)[1:]
        assert hidden_states.size(1) == 1, "packed documents come as one sequence"
        ranks = self.tp_group.size() if self.config.sequence_parallel else 1
        places = torch.arange(hidden_states.size(0) * ranks, device=ends.device)
        return torch.searchsorted(ends.contiguous(), places, right=True).to(torch.int32).unsqueeze(0)

    # Serving

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a sequence's state in Megatron's two places: angles, last key and last input in one row; the SSM's."""
        h, p, n, _, r, a = self.shape
        return (h * (a + r * n + p),), (h, p, n)

    def _serve(
        self, hidden_states: Tensor, context: Any, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor | None]:
        """The first tokens of all sequences of a static batch, or their next ones, from the state kept in the context."""
        shared = self.config.sequence_parallel or self.cp_group.size() > 1
        if not context.is_static_batching() or packed is not None or shared:
            said = "Mamba-3 decodes static batches of whole sequences: no dynamic or packed batches, no sequence or context parallelism"
            raise Refused(said)
        if self.rates_apart:  # Megatron's engine pads the tokens of an FP8 projection, and knows of one output
            message = "Mamba-3 does not decode with `mamba3_rates` in bf16 beside FP8"
            raise Refused(message, key="feature.fp8.bf16_parts", hint="export the checkpoint, and generate from that")
        kept = context.key_value_memory_dict
        state = kept[self.layer_number] if context.sequence_len_offset > 0 else None
        y, kept[self.layer_number] = self.step(self.in_proj(hidden_states)[0], state)
        return self.out_proj(y)

    @torch.no_grad()
    def step(self, packed: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Output [s, b, heads * head_dim] for packed [s, b, *] of any length from `state` on (None: the start), and the next."""
        if self.kernels == "fused":
            return kernel.prefill(packed, self.weights, self.shape, self.chunk, state, self.tp_group)
        return naive.scan(self._with_all_angles(packed), self.weights, self.shape, state)

    # Checkpoints

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The packed projection under one key for each part, so that another number of tensor ranks can load it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(HEADWISE, 0), sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        key = f"{prefix}in_proj.weight"
        sharded[key] = _split_tensor_factory(sharded[key], list(self.parts.values()), list(self.parts), 0)
        return sharded


def _joined(packed: tuple[Tensor, ...]) -> Tensor:
    return packed[0] if len(packed) == 1 else torch.cat(packed, -1)
