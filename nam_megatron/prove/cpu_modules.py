"""CPU stand-ins for Transformer Engine's modules and Mamba's kernels: same parameters, names and sharding (torch side).

Everything else in a model that is built on a CPU is Megatron's own class.
"""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_softmax import SoftmaxOne
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from nam_megatron.runtime.context import own, whole


def centered(config):
    """Whether a norm's weight is its distance from one."""
    return config.layernorm_zero_centered_gamma


def centered_norm(x, weight, bias, eps):
    """In fp32, as the kernels compute: one and a distance from it do not both fit into bf16. bias: LayerNorm's, None for RMSNorm."""
    y, shape, weight = x.float(), (x.size(-1),), weight.float() + 1
    normed = F.rms_norm(y, shape, weight, eps) if bias is None else F.layer_norm(y, shape, weight, bias.float(), eps)
    return normed.to(x.dtype)


class _ZeroRms(torch.nn.RMSNorm):
    def reset_parameters(self):
        torch.nn.init.zeros_(self.weight)

    def forward(self, x):
        return centered_norm(x, self.weight, None, self.eps)


class _ZeroLayer(torch.nn.LayerNorm):
    def reset_parameters(self):
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x):
        return centered_norm(x, self.weight, self.bias, self.eps)


ZERO_CENTERED = {torch.nn.RMSNorm: _ZeroRms, torch.nn.LayerNorm: _ZeroLayer}


class Norm:
    """TENorm. A class, not a function: build_module hands functions back unbuilt."""

    def __new__(cls, config, hidden_size, eps=1e-5):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = ZERO_CENTERED[kind](hidden_size, eps=eps) if centered(config) else kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormColumnLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: the norm's weight lives in the linear as `layer_norm_weight`, its bias as `layer_norm_bias`."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        start = torch.zeros if centered(config) else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_bias = None
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        shape, eps = (x.size(-1),), self.config.layernorm_epsilon
        if centered(self.config):
            x = centered_norm(x, weight, bias, eps)
        elif bias is None:
            x = F.rms_norm(x, shape, weight, eps)
        else:
            x = F.layer_norm(x, shape, weight, bias, eps)
        (weight,) = self._get_weight_tensors()
        # which Megatron looks at; Transformer Engine takes what it is given
        self.output_size_per_partition = len(weight)
        return super().forward(x, weight=weight)

    def _get_weight_tensors(self):
        return [self.weight]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets, **groups)


class ReplicatedLinear(torch.nn.Module):
    """TELinear(parallel_mode="duplicated"): the weight is whole on every tensor-parallel rank."""

    def __init__(self, input_size, output_size, *, config, init_method, parallel_mode, bias=False, **_):
        super().__init__()
        assert parallel_mode == "duplicated" and not bias
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.allreduce, self.weight.tensor_model_parallel = True, False
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.linear(x, self.weight), None


class CoreAttention(torch.nn.Module):
    """TEDotProductAttention, causal; Megatron's own DotProductAttention does not take the head sizes of MLA, nor a shared sequence."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, *, pg_collection, **_):
        super().__init__()
        self.group = pg_collection.cp
        self.scale, self.dropout, self.window = softmax_scale, config.attention_dropout, config.window_size
        if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = None
        assert config.softmax_type in ("vanilla", "learnable"), config.softmax_type
        self.group_tp, self.softmax_offset = pg_collection.tp, None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = dict(tp_group=self.group_tp, dp_cp_group=metadata["dp_cp_group"])
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(self, query, key, value, *_, **__):
        shared, positions = self.group.size() > 1, torch.arange(len(query) * self.group.size())
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, whole(key, self.group), whole(value, self.group)))
        dropped = self.dropout if self.training else 0.0
        seen, causal = None, self.window is None and not shared
        if not causal:  # as many tokens to the left as the window has, none to the right
            back = own(positions, self.group)[:, None] - positions
            seen = (back >= 0) & (back <= (self.window[0] if self.window else len(positions)))
        if self.softmax_offset is not None:
            return self.with_sinks(query, key, value, seen).permute(2, 0, 1, 3).flatten(2)
        more = dict(scale=self.scale, enable_gqa=True)
        out = F.scaled_dot_product_attention(query, key, value, seen, dropped, causal, **more)
        return out.permute(2, 0, 1, 3).flatten(2)

    def with_sinks(self, query, key, value, seen):
        """By Megatron's own softmax: torch's attention has no score of nothing."""
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
        scale = query.size(-1) ** -0.5 if self.scale is None else self.scale
        scores = (query @ key.transpose(2, 3)).float() * scale
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril() if seen is None else seen
        shares = SoftmaxOne(-1, self.softmax_offset.float())(scores.masked_fill(~seen, -torch.inf))
        return F.dropout(shares.to(value.dtype), self.dropout, self.training) @ value


class GroupedLinear(torch.nn.Module):
    """TEColumnParallelGroupedLinear / TERowParallelGroupedLinear: weight0, weight1, ... of the local experts."""

    def __init__(self, num_gemms, input_size, output_size, *, config, init_method, pg_collection, axis, **_):
        super().__init__()
        self.num_gemms, self.axis, self.groups = num_gemms, axis, pg_collection
        size = [output_size, input_size]
        size[axis] //= pg_collection.expt_tp.size()
        expert_parallel = config.expert_model_parallel_size > 1
        own_groups = expert_parallel or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
            init_method(weight)
            weight.allreduce, weight.tensor_model_parallel, weight.partition_dim = not own_groups, True, axis
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x, splits):
        parts = zip(x.split(splits), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        sharded, groups = {}, dict(tp_group=self.groups.expt_tp, dp_cp_group=metadata["dp_cp_group"])
        first, total = self.groups.ep.rank() * self.num_gemms, self.groups.ep.size() * self.num_gemms
        for index, weight in enumerate(self.parameters()):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, total))
            one = make_sharded_tensors_for_checkpoint(
                {"weight": weight}, prefix, {"weight": self.axis}, offsets, **groups
            )
            (tensor,) = one.values()
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            sharded[f"{prefix}weight{index}"] = tensor
        return sharded


class CpuBackend(LocalSpecProvider):
    """What TESpecProvider is with Transformer Engine."""

    def linear(self):
        return ReplicatedLinear

    def column_parallel_layer_norm_linear(self):
        return NormColumnLinear

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        return Norm

    def core_attention(self):
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        fc1, fc2 = partial(GroupedLinear, axis=0), partial(GroupedLinear, axis=1)
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))


class GatedNorm(torch.nn.Module):
    """ExtendedRMSNorm of Megatron's Mamba mixer without its Triton kernel: RMS norm by group, sharded by heads."""

    def __init__(self, size, *, eps, group_size, dtype, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x):
        groups = F.rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        return groups.flatten(-2) * self.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state, groups = {"weight": self.weight}, dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def mamba2_scan(zxbcdt, conv_weight, conv_bias, dt_bias, A, *, D, headdim, ngroups, **_):
    """mamba_split_conv1d_scan_combined of mamba-ssm (arXiv 2405.21060): [b, l, 2 d + 2 g n + h] -> [b, l, d]."""
    heads = dt_bias.numel()
    inner = heads * headdim
    state = (zxbcdt.size(-1) - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (conv_weight.size(1) - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv_weight.unsqueeze(1), conv_bias, groups=padded.size(1))).transpose(1, 2)
    x, B, C = xbc.split([inner, ngroups * state, ngroups * state], -1)
    x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt + dt_bias)
    B, C = (t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2) for t in (B, C))
    # No loop over tokens: the layer's form as attention, with what is left of each token at each later one in the place of the softmax.
    gone = torch.cumsum(dt * A, 1).transpose(1, 2)  # [b, h, l]
    later = torch.ones(gone.size(-1), gone.size(-1), dtype=torch.bool).triu(1)
    left = (gone[..., None] - gone[..., None, :]).masked_fill(later, -torch.inf).exp()
    wide = torch.promote_types(left.dtype, x.dtype)
    scores = torch.einsum("bthn,bshn->bhts", C.to(wide), B.to(wide)) * left * dt.transpose(1, 2)[..., None, :]
    y = torch.einsum("bhts,bshp->bthp", scores, x.to(wide)) + D[:, None] * x
    return (y * F.silu(z).unflatten(-1, (heads, headdim))).flatten(-2)


def l2norm(x):
    """flash-linear-attention's, over the last dimension."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_conv1d(x, weight, bias, activation, **_):
    """flash-linear-attention's: x [b, s, d], weight [d, width], then SiLU. Returns the output and no state."""
    assert activation == "silu"
    padded = F.pad(x.transpose(1, 2), (weight.size(1) - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.size(0))).transpose(1, 2), None


def gated_delta_rule(q, k, v, g, beta, **_):
    """flash-linear-attention's, token by token: S_t = exp(g_t) S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, y_t = S_t q_t.

    q, k [b, s, n, dk]; v [b, s, n, dv]; g, beta [b, s, n]. Returns y [b, s, n, dv] and no state (arXiv 2412.06464, equation 10).
    """
    q, k, v_, g, beta = (t.float() for t in (q * q.size(-1) ** -0.5, k, v, g, beta))
    state, ys = v_.new_zeros(*v.shape[:1], v.size(2), v.size(3), k.size(3)), []
    for t in range(v.size(1)):
        state = state * g[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (v_[:, t] - (state * k[:, t, :, None, :]).sum(-1))
        state = state + new[..., None] * k[:, t, :, None, :]
        ys.append((state * q[:, t, :, None, :]).sum(-1))
    return torch.stack(ys, 1).to(v.dtype), None
