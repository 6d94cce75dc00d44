"""MLA as a Megatron layer with our ingress: Megatron's modules own the parameters, its core attention attends.

Stock (megatron-core 0.19.2, transformer/multi_latent_attention.py): a norm, two products, two norms, two products, rotation
and concatenation, each reading and writing whole tensors. Here the modules up to the queries, keys and values are only
asked for their weights. What is checkpointed, sharded and reduced is theirs, under Megatron's names.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from nam_megatron.blocks.mla import naive
from nam_megatron.blocks.mla.block import Mla, low_rank
from nam_megatron.blocks.mla.naive import Rope
from nam_megatron.errors import Refused, raise_if
from nam_megatron.runtime.gpu import interpreted, without_gpu
from nam_megatron.runtime.slots import NO_CROSS, NO_MLP
from nam_megatron.words.site import Site

LATENTS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
IN_BF16 = {"latents": ((MultiLatentAttention, LATENTS),)}
# Empty on purpose; Megatron would fill linear_qkv_down_proj itself, on a copy of the spec with its own attention in it.


def spec(backend: BackendSpecProvider, block: Mla, site: Site) -> ModuleSpec:
    """The whole layer of slot `+`.

    Raises:
        Refused: the fused kernels without a GPU; nothing else is put in their place.
    """
    if block.kernels == "megatron":
        return _stock(backend, block)
    assert block.kernels, "MLA stands, and says whose kernels it has"
    raise_if(without_gpu("MLA", "mla", block.kernels))
    parts = MLASelfAttentionSubmodules(core_attention=backend.core_attention(), **projections(backend, block))
    params = {"attn_mask_type": AttnMaskType.causal, "kernels": block.kernels}
    layer = TransformerLayerSubmodules(
        input_layernorm=backend.layer_norm(rms_norm=True),
        self_attention=ModuleSpec(FusedMLASelfAttention, params=params, submodules=parts),
        self_attn_bda=get_bias_dropout_add,
    )
    return ModuleSpec(FusedMLALayer, submodules=layer)


def empty(block: Mla, site: Site) -> frozenset[str]:
    return NO_CROSS | NO_MLP | {"self_attention.linear_qkv_down_proj"} | block.without_norms()


def _stock(backend: BackendSpecProvider, block: Mla) -> ModuleSpec:
    """The whole layer of Megatron's own modules, with norms on the latents."""
    parts = MLASelfAttentionSubmodules(core_attention=backend.core_attention(), **projections(backend, block))
    kind = MLASelfAttention if block.q_lora_rank else WithoutQueryLatent
    attention = ModuleSpec(kind, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    norm = backend.layer_norm(rms_norm=True)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def projections(backend: BackendSpecProvider, block: Mla) -> dict[str, Any]:
    """The submodules that MLA and DSA have alike, ours and Megatron's: all but the core attention."""
    column, linear = backend.column_parallel_linear(), backend.linear()
    norm = backend.layer_norm(rms_norm=True, for_qk=True) if block.latent_norm else IdentityOp
    if block.latent_norm and block.latent_norm_epsilon:
        norm = with_epsilon(norm, block.latent_norm_epsilon)
    return {
        "linear_q_proj": column,
        "linear_q_down_proj": linear,
        "linear_q_up_proj": column,
        "linear_kv_down_proj": linear,
        "linear_kv_up_proj": column,
        "linear_proj": backend.row_parallel_linear(),
        "q_layernorm": norm if block.q_lora_rank else IdentityOp,
        "kv_layernorm": norm,
    }


def with_epsilon(norm: Any, own: float) -> type:
    """A norm of this epsilon, whatever it is built with: Megatron hands every one that of the model."""

    class Norm:  # and no function, which Megatron's `build_module` would take for the norm itself
        def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
            return norm(config=config, hidden_size=hidden_size, eps=own)

    return Norm


def latent_epsilon(norm: Any, otherwise: float) -> float:
    """Of a latent's norm; where none stands, nothing reads it."""
    return otherwise if isinstance(norm, IdentityOp) else norm.eps


class WithoutQueryLatent(MLASelfAttention):
    """MLASelfAttention whose queries come from the input as the key/value latent does: DeepSeek-V2-Lite's.

    With --qk-layernorm stock fuses one more norm, of the whole width, into their projection (megatron-core 0.19.2,
    transformer/mla_qk_norm_config.py, _resolve_mla_qk_layernorm), whatever projection the spec names.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        assert self.config.qk_layernorm is (submodules.kv_layernorm is not IdentityOp), "the flag and the spec differ"
        names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class FusedMLALayer(TransformerLayer):
    """A transformer layer whose input norm hands its input on: the attention normalises while it projects."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert isinstance(self.self_attention, FusedMLASelfAttention), "another attention stands in our layer"
        self.self_attention.input_norm = (self.input_layernorm,)
        if self.self_attention.normalises_input:
            # Called as before, so that the hooks of DDP's overlapped all-gather still run.
            self.input_layernorm.forward = itself
            # There is no norm output to drop; dropping this one would drop the residual.
            self.recompute_input_layernorm = False


def itself(x: Tensor) -> Tensor:
    return x


def cos_and_sin(angles: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Of Megatron's angles [positions, 1, 1, width], whose halves are alike: what Rope takes, times a magnitude."""
    half = angles[:, 0, 0, : width // 2].float()
    return (half.cos() * scale).contiguous(), (half.sin() * scale).contiguous()


class FusedMLASelfAttention(MLASelfAttention):
    """MLASelfAttention with other ways to the queries, keys and values.

    kernels: "fused", Triton: at low ranks both norms, all projections, rotation and concatenation in three kernels; at
    others, where products are bound by arithmetic, the library's products and one kernel behind each. "naive": plain torch.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int, *, kernels: str, **rest: Any):
        assert_served(config, kernels)
        super().__init__(config, submodules, layer_number, **rest)
        self.ops: ModuleType = naive
        self.normalises_input = True
        if kernels == "fused":
            from nam_megatron.blocks.mla import kernel

            widths = (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)
            self.ops = kernel
            self.normalises_input = low_rank(config.q_lora_rank, config.kv_lora_rank, *widths)
        self.input_norm: tuple = ()  # of the layer around us; in a tuple, so that it is not registered twice
        self._tables: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    # Training ---------------------------------------------------------------------------------------------------------

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, ...]:
        """(q, k, v, query latent, key-value latent) of hidden states [s, b, h], or [t, 1, h] when packed.

        The hidden states are before the input norm where `normalises_input`, else behind it.
        """
        if inference_context is not None or inference_params is not None:
            message = "this MLA layer does not decode in Megatron's engine"
            raise Refused(message, hint="export the checkpoint, and generate from that")
        parts, up = (
            (self._latents(hidden_states), self._up)
            if self.normalises_input
            else (self._latents_by_modules(hidden_states), self._up_by_modules)
        )
        if packed_seq_params is not None:
            parts = tuple(part.squeeze(1) for part in parts)
        up = partial(up, rope=self._rope(hidden_states, packed_seq_params, len(parts[2])))
        if self.recompute_up_proj:
            # MultiLatentAttention.forward drops q, k and v behind the core attention and has them made again.
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
            up = partial(self.qkv_up_checkpoint.checkpoint, up)
        return *up(*parts), *parts[:2]

    def _latents(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query latent, key-value latent and unrotated rope head of all tokens, slices of one tensor."""
        norms = [None if isinstance(n, IdentityOp) else weight_of(n) for n in (self.q_layernorm, self.kv_layernorm)]
        gamma, down = weight_of(self.input_norm[0]), (self.linear_q_down_proj, self.linear_kv_down_proj)
        rope, eps = self.config.qk_pos_emb_head_dim, self.config.layernorm_epsilon
        own = latent_epsilon(self.kv_layernorm, eps)
        latents = self.ops.ingress(x, gamma, *map(weight_of, down), *norms, rope, eps, own)
        if self.config.sequence_parallel:
            latents = gather_from_sequence_parallel_region(latents, group=self.tp_group)
        return latents.split((self.config.q_lora_rank, self.config.kv_lora_rank, rope), -1)

    def _up(self, q_latent: Tensor, kv_latent: Tensor, k_rope: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        q, kv = weight_of(self.linear_q_up_proj), weight_of(self.linear_kv_up_proj)
        heads, value = self.num_attention_heads_per_partition, self.config.v_head_dim
        return self.ops.queries(q_latent, q, rope, heads), *self.ops.keys_values(
            kv_latent, k_rope, kv, rope, heads, value
        )

    def _latents_by_modules(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same by the library and Megatron's modules: here the up projections gather the latents, and only the rope head is
        whole. One product for both down projections: narrow ones waste a wave of tiles, and two gradients of x are added."""
        down = torch.cat([weight_of(p) for p in (self.linear_q_down_proj, self.linear_kv_down_proj)])
        c = self.config
        q, latent, k_rope = F.linear(x, down).split((c.q_lora_rank, c.kv_lora_rank, c.qk_pos_emb_head_dim), -1)
        if c.sequence_parallel:
            k_rope = gather_from_sequence_parallel_region(k_rope, group=self.tp_group)
        return self.q_layernorm(q), self.kv_layernorm(latent), k_rope

    def _up_by_modules(
        self, q_latent: Tensor, kv_latent: Tensor, k_rope: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.num_attention_heads_per_partition
        q, kv = (up(x)[0] for up, x in ((self.linear_q_up_proj, q_latent), (self.linear_kv_up_proj, kv_latent)))
        q, kv = (x.view(*x.shape[:-1], heads, -1) for x in (q, kv))
        return self.ops.rotate_queries(q, rope), *self.ops.split_keys_values(kv, k_rope, rope, self.config.v_head_dim)

    def _rope(self, hidden_states: Tensor, packed: Any, tokens: int) -> Rope:
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, packed)
        if packed is None:
            return Rope(*self.table(length, False))
        assert packed.qkv_format == "thd" and packed.local_cp_size is None, "packed sequences come as THD"
        # Powers of two, so that lengths which differ from batch to batch fill few tables.
        cos, sin = self.table(1 << (length - 1).bit_length(), True)
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        cp = self.pg_collection.cp
        return Rope(cos, sin, naive.packed_positions(ends, tokens, len(cos), cp.rank(), cp.size()))

    def table(self, length: int, packed: bool) -> tuple[Tensor, Tensor]:
        """cos and sin, kept for good: CUDA graphs hold their addresses. Unpacked ones are this context rank's."""
        if (length, packed) not in self._tables:
            angles, scale = self.rotary_pos_emb(length, packed_seq=packed), 1.0
            if self.config.rope_type == "yarn":
                angles, scale = angles
            self._tables[length, packed] = cos_and_sin(angles, self.config.qk_pos_emb_head_dim, scale)
        return self._tables[length, packed]


def weight_of(module: torch.nn.Module) -> Tensor:
    """The weight of a module that is not called, behind what runs before a call: DDP waits there for its all-gather.

    Megatron-Bridge's adapter (0.6.2) stands around a module and gives the sum as its weight; its own two are modules inside.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            hook(part, ())
    return module.weight


def assert_served(config: Any, kernels: str) -> None:
    """What no recipe can say and our projections do not do; what a recipe can say, block.py refuses."""
    assert kernels in ("fused", "naive"), kernels
    unserved = {
        "norms whose gamma is centred at zero": config.layernorm_zero_centered_gamma,
        "queries without a latent": config.q_lora_rank is None,
        "weight gradients computed later": config.delay_wgrad_compute,
        "RoPE on a part of the rope head": config.rotary_percent != 1.0,
        "Megatron's cache of latents": config.cache_mla_latents,
        "its own fused down projection": config.mla_down_proj_fusion,
    }
    if kernels == "fused" and not interpreted():
        unserved[f"parameters of {config.params_dtype}"] = config.params_dtype != torch.bfloat16
    found = [what for what, is_so in unserved.items() if is_so]
    assert not found, f"our projections do not serve {', '.join(found)}"
