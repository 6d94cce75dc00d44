"""NAM hybrid language models in plain torch: the definition that trained checkpoints are exported to.

Imports torch and transformers alone; it runs on any device and floating type. Tensors are batch first: b sequences of s
new tokens, t tokens with those of the cache. Sums, norms, rotations, softmax and recurrences are in fp32, or fp64 where
the weights are. Formulas are those of megatron-core 0.19.2 and nam_megatron, whose tests compare them.

Batches of unequal lengths are padded on one side: on the left where a cache is used.

`from_pretrained(..., kernels="nam_megatron")` lets that package, where it is installed, compute on a GPU what it has kernels for: it
takes the place of `Dsa.attended`, `Experts.forward`, `Mamba3.mix` and `M2Rnn.scan`, and of the model's step of one token.
"""

import importlib
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_nam import NamConfig

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
CHUNK = 64  # tokens that a scan takes at once
QUERIES = 256  # that sparse attention takes at once
EPSILON = 1e-5  # of the norms inside Mamba-2 and Mamba-3, whatever the model's
A_FLOOR = 1e-4  # Mamba-3's least decay per unit of step


def wide(x):
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# The cache -----------------------------------------------------------------------------------------------------------


class NamCache:
    """What a batch of sequences is remembered by: for each layer its tensors by name, batch first.

    Rows (keys, values, latents, indexer keys) grow with the tokens; states and windows do not. max_length: rows are
    allocated once for so many tokens, and more are an error; None: they grow.
    """

    # What transformers asks of a cache: no step is compiled with it, it cannot be cut back, and tokens in it are not read again.
    is_compileable, is_croppable, is_linear = False, False, (False,)

    def __init__(self, max_length=None):
        self.max_length, self.length = max_length, 0
        self.layers = {}

    def rows(self, layer, name, new):
        """All rows so far, with those of the new tokens, [b, t, ...]."""
        kept = self.layers.setdefault(layer, {})
        if self.max_length is None:
            kept[name] = torch.cat((kept[name], new), 1) if name in kept else new
            return kept[name]
        end = self.length + new.size(1)
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens, and {end} are asked for")
        if name not in kept:
            kept[name] = new.new_zeros(new.size(0), self.max_length, *new.shape[2:])
        kept[name][:, self.length : end] = new
        return kept[name][:, :end]

    def state(self, layer):
        """The layer's tensors that do not grow; a mapping to read and set."""
        return self.layers.setdefault(layer, {})

    def get_seq_length(self, layer_idx=0):
        return self.length

    def get_max_cache_shape(self, layer_idx=0):
        return self.max_length

    def reorder_cache(self, beam_idx):
        for kept in self.layers.values():
            for name, tensor in kept.items():
                chosen = tensor.index_select(0, beam_idx.to(tensor.device))
                # In its place: a step that was captured knows tensors by where they lie.
                fixed = self.max_length is not None and chosen.shape == tensor.shape
                kept[name] = tensor.copy_(chosen) if fixed else chosen

    @property
    def sequences(self):
        """How many it remembers; None: nothing yet."""
        return next((len(tensor) for kept in self.layers.values() for tensor in kept.values()), None)

    @property
    def nbytes(self):
        return sum(t.numel() * t.element_size() for kept in self.layers.values() for t in kept.values())


@dataclass
class Step:
    """What the layers of one forward pass share.

    real: bool [b, s], which of the new tokens are no padding; None: all. seen: the same of all t tokens. positions: [b, s].
    past: tokens in the cache. indices: the top-k of DSA layers, by layer.
    """

    cache: NamCache | None
    past: int
    positions: torch.Tensor
    real: torch.Tensor | None
    seen: torch.Tensor | None
    indices: dict

    def rows(self, layer, **new):
        """The rows of all tokens, in the order given."""
        found = [x if self.cache is None else self.cache.rows(layer, name, x) for name, x in new.items()]
        return found[0] if len(found) == 1 else found

    def state(self, layer):
        return {} if self.cache is None else self.cache.state(layer)

    def to(self, device, **_):
        """Where a layer is that lies on another device: what accelerate asks of all that a module is given."""
        moved = {name: x.to(device) for name in ("positions", "real", "seen") if (x := getattr(self, name)) is not None}
        return replace(self, **moved)

    def visible(self, first, last, window=0):
        """bool [1 or b, queries, t]: which keys the new tokens from `first` to `last` see, `window` of them at most (0: all). A
        pad sees pads too, for the sake of the softmax; nobody looks at its output."""
        device = self.positions.device
        total = self.past + self.positions.size(1)
        query = torch.arange(self.past + first, self.past + last, device=device)
        back = (query[:, None] - torch.arange(total, device=device))[None]
        near = (back >= 0) & (back < (window or total))
        if self.real is None:
            return near
        return near & (self.seen[:, None] | ~self.real[:, first:last, None])


# Parts ---------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias. centered: the weight is kept as its distance from one."""

    def __init__(self, size, eps, kind="RMSNorm", centered=False):
        super().__init__()
        self.weight, self.eps, self.offset = parameter(size), eps, float(centered)
        self.bias = parameter(size) if kind == "LayerNorm" else None

    def forward(self, x):
        y = wide(x)
        weight = self.weight.to(y.dtype) + self.offset
        if self.bias is not None:
            return F.layer_norm(y, (y.size(-1),), weight, self.bias.to(y.dtype), self.eps).to(x.dtype)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * weight).to(x.dtype)


def norm(c, size, kind=None, eps=None):
    """The model's norm."""
    return Norm(size, eps or c.norm_epsilon, kind or c.normalization, c.zero_centered_norms)


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


class Matrix(nn.Linear):
    """Gives its weight where it is called with nothing: so it is there, whoever keeps it elsewhere until its module is called."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x=None):
        return self.weight if x is None else super().forward(x)

    @staticmethod
    def of(layer, like):
        """The matrix that a layer multiplies by, of a type and device as `like` has; it may be what an adapter put in the place of ours."""
        if isinstance(layer, Matrix):
            return layer()
        return layer(torch.eye(layer.in_features, dtype=like.dtype, device=like.device)).T


class Rope:
    """Turns the first `width` columns of a head; its angles are plain, YaRN's or Llama-3.1's, as the config says."""

    def __init__(self, c, width):
        self.width, self.base, self.yarn, self.llama = width, c.rotary_base, c.yarn, c.llama_rope
        self.scale = self.magnitude("mscale") / self.magnitude("mscale_all_dim")

    def magnitude(self, key):
        """YaRN's, of one of its keys."""
        return 0.1 * self.yarn[key] * math.log(self.yarn["factor"]) + 1.0 if self.yarn else 1.0

    def frequencies(self, device):
        plain = 1.0 / (self.base ** (torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width))
        if self.yarn:
            slowed, kept = plain / self.yarn["factor"], 1 - self.ramp(device)
            return slowed * (1 - kept) + plain * kept
        if self.llama:  # waves of more than 8192 tokens are slowed, those of fewer than 2048 kept
            slowed, kept = plain / self.llama["factor"], ((8192 * plain / (2 * math.pi) - 1) / 3).clamp(0, 1)
            return slowed * (1 - kept) + plain * kept
        return plain

    def ramp(self, device):
        """0 where columns turn often over the length before (YaRN), 1 where they turn seldom."""
        y = self.yarn
        low, high = (
            self.width * math.log(y["original_length"] / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (y["beta_fast"], y["beta_slow"])
        )
        if y["rounded"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        columns = torch.arange(self.width // 2, dtype=torch.float32, device=device)
        return ((columns - low) / (high - low if high != low else 0.001)).clamp(0, 1)

    def __call__(self, x, positions, interleaved=False):
        """x [b, s, ..., d] turned by its positions [b, s]: channels (i, i + width / 2) together, or (2i, 2i + 1) where
        interleaved; what comes out is in halves either way."""
        if not self.width:
            return x
        angles = positions[..., None].float() * self.frequencies(x.device)
        angles = angles.view(*angles.shape[:2], *[1] * (x.dim() - 3), -1)
        y = wide(x[..., : self.width])
        first, second = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        cos, sin = ((turn * self.scale).to(y.dtype) for turn in (angles.cos(), angles.sin()))
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
        return torch.cat((turned, x[..., self.width :]), -1)


def activate(x, c):
    kind = c.activation
    if kind == "squared_relu":
        return F.relu(x).square()
    if kind == "swiglu":
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value
    if kind == "quick_geglu":
        gate, value = x.chunk(2, -1)
        if most := c.activation_clamp:  # 0: none
            gate, value = gate.clamp(max=most), value.clamp(-most, most)
        return gate * torch.sigmoid(1.702 * gate) * (value + c.glu_offset)
    return F.gelu(x)


def gates(kind):
    return 2 if kind in ("swiglu", "quick_geglu") else 1


def attend(q, k, v, step, scale, window=0, sinks=None):
    """Softmax attention of q [b, s, n, d] over k [b, t, g, d] and v [b, t, g, e]: [b, s, n e]. sinks [n]: scores of nothing."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sinks is not None:  # torch's kernels have none
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        scores = wide(q @ k.transpose(2, 3)) * scale
        scores = scores.masked_fill(~step.visible(0, q.size(2), window)[:, None], -torch.inf)
        nothing = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat((scores, nothing), -1).softmax(-1)[..., :-1].to(v.dtype)
        return (shares @ v).transpose(1, 2).flatten(2)
    if q.size(2) == 1:  # one query: the heads of a group are its queries, and no key is repeated for them
        q, visible = q.reshape(q.size(0), k.size(1), -1, q.size(3)), step.visible(0, 1, window)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return out.flatten(1).unsqueeze(1)
    whole = step.real is None and step.past == 0 and not window
    if whole:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.size(1) != q.size(1))
        return out.transpose(1, 2).flatten(2)
    if k.size(1) != q.size(1):  # with a mask torch would write all scores down: on a GPU no kernel of its takes both
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    mask = step.visible(0, q.size(2), window)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def masked(x, real):
    """Zero where a token is padding."""
    return x if real is None else x * real.view(*real.shape, *[1] * (x.dim() - 2)).to(x.dtype)


def convolve(x, weight, bias, state, real):
    """Causal convolution of each channel of x [b, s, c], then SiLU; the last columns are kept in `state`."""
    x, width = masked(x, real), weight.size(-1)
    before = state.get("window", x.new_zeros(x.size(0), width - 1, x.size(2)))
    x = torch.cat((before, x), 1)
    state["window"] = x[:, x.size(1) - width + 1 :].clone()
    y = wide(x).transpose(1, 2)
    y = F.conv1d(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype), groups=y.size(1))
    return F.silu(y).transpose(1, 2).to(x.dtype)


def parameter(*size, dtype=None):
    """What it begins with is not said here: a trained model's is read, another's as `_init_weights` has it."""
    return nn.Parameter(torch.empty(size, dtype=dtype))


def fp32(*size):
    """A parameter that stays in fp32 whatever the model is loaded in."""
    return parameter(*size, dtype=torch.float32)


# Attention -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention. `qkv` packs, group by group, the group's queries, their gates if it has any, its key and its value."""

    def __init__(self, c, index):
        super().__init__()
        b, h = c.attention, c.hidden_size
        self.index, self.width, self.rope, self.gated = index, b["head_dim"], Rope(c, b["rotary_dim"]), b["output_gate"]
        self.heads, self.groups = c.num_attention_heads, b["query_groups"]
        packed = (2 if self.gated else 1) * self.heads + 2 * self.groups
        self.qkv = linear(h, packed * self.width, b["qkv_bias"])
        self.out = linear(self.heads * self.width, h, c.linear_bias)
        self.q_norm, self.k_norm = (norm(c, self.width) if b["qk_norm"] else nn.Identity() for _ in range(2))
        self.sinks = parameter(self.heads) if b["sinks"] else None
        rank, every = c.layer_kinds[:index].count("attention"), b["unwindowed_every"]
        self.window = 0 if every and (rank + 1) % every == 0 else b["window"]

    def forward(self, x, step):
        parts, each = self.qkv(x).unflatten(-1, (self.groups, -1, self.width)), self.heads // self.groups
        q, gate, k, v = parts.split((each, each if self.gated else 0, 1, 1), -2)
        q, k = self.q_norm(q.flatten(2, 3)), self.k_norm(k.flatten(2, 3))
        q, k = (self.rope(y, step.positions) for y in (q, k))
        k, v = step.rows(self.index, keys=k, values=v.flatten(2, 3))
        y = attend(q, k, v, step, self.width**-0.5, self.window, self.sinks)
        if self.gated:
            y = (wide(y) * wide(gate).sigmoid().flatten(2)).to(y.dtype)
        return self.out(y)


class Latent(nn.Module):
    """What MLA and DSA have alike: the latents and both ways from them to scores."""

    def __init__(self, c, index):
        super().__init__()
        b, n, h = c.mla, c.num_attention_heads, c.hidden_size
        self.index, self.rope, self.heads = index, Rope(c, b["qk_rope_head_dim"]), n
        self.rq, self.rkv, self.dq, self.dr, self.dv = (
            b[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        self.scale = (self.dq + self.dr) ** -0.5 * self.rope.magnitude("mscale_all_dim") ** 2
        self.q_down = linear(h, self.rq) if self.rq else nn.Identity()
        self.kv_down, self.out = linear(h, self.rkv + self.dr), linear(n * self.dv, h)
        self.q_up, self.kv_up = Matrix(self.rq or h, n * (self.dq + self.dr)), Matrix(self.rkv, n * (self.dq + self.dv))
        self.q_norm, self.kv_norm = (
            norm(c, rank, eps=b["latent_norm_epsilon"]) if b["latent_norm"] and rank else nn.Identity()
            for rank in (self.rq, self.rkv)
        )

    def latents(self, x, step):
        """Query latent [b, s, rq], the input itself where there is none, and of the new tokens what is cached: [b, s, rkv + dr],
        latent and turned rope head."""
        latent, key = self.kv_down(x).split((self.rkv, self.dr), -1)
        key = self.rope(key, step.positions, interleaved=True)
        return self.q_norm(self.q_down(x)), torch.cat((self.kv_norm(latent), key), -1)

    def absorbed(self, q_latent, step):
        """Queries [b, s, n, rkv + dr] of the key latent, since q . (U c) = (U^T q) . c."""
        q, up = (Matrix.of(layer, q_latent).unflatten(0, (self.heads, -1)) for layer in (self.q_up, self.kv_up))
        up = up[:, : self.dq]
        weight = torch.cat((torch.bmm(up.transpose(1, 2), q[:, : self.dq]), q[:, self.dq :]), 1)
        query = F.linear(q_latent, weight.flatten(0, 1)).unflatten(-1, (self.heads, -1))
        turned = self.rope(query[..., self.rkv :], step.positions, interleaved=True)
        return torch.cat((query[..., : self.rkv], turned), -1)

    def over_latents(self, query, rows, visible):
        """Attention of absorbed queries over the rows that are visible: [b, s, n dv]."""
        if query.size(1) == 1:  # all heads see the same rows: they are the queries of one head
            rows = rows.unsqueeze(1)
            mixed = F.scaled_dot_product_attention(
                query, rows, rows[..., : self.rkv], attn_mask=visible.unsqueeze(1), scale=self.scale
            )
        else:
            scores = torch.einsum("bsnc,btc->bnst", wide(query), wide(rows)) * self.scale
            shares = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).to(rows.dtype)
            mixed = torch.einsum("bnst,btr->bsnr", shares, rows[..., : self.rkv])
        values = Matrix.of(self.kv_up, mixed).unflatten(0, (self.heads, -1))[:, self.dq :]
        return torch.einsum("bsnr,ndr->bsnd", mixed, values).flatten(2)


class Mla(Latent):
    """Multi-head latent attention (DeepSeek-V2). The cache holds latents; a single new token attends to them as they are."""

    def forward(self, x, step):
        q_latent, new = self.latents(x, step)
        rows = step.rows(self.index, latents=new)
        if x.size(1) == 1 and step.past:
            return self.out(self.over_latents(self.absorbed(q_latent, step), rows, step.visible(0, 1)))
        q = self.q_up(q_latent).unflatten(-1, (self.heads, -1))
        q = torch.cat((q[..., : self.dq], self.rope(q[..., self.dq :], step.positions, interleaved=True)), -1)
        k, v = self.kv_up(rows[..., : self.rkv]).unflatten(-1, (self.heads, -1)).split((self.dq, self.dv), -1)
        shared = rows[:, :, None, self.rkv :].expand(-1, -1, self.heads, -1)
        return self.out(attend(q, torch.cat((k, shared), -1), v, step, self.scale))


class Indexer(nn.Module):
    """Scores every earlier token for each new one."""

    def __init__(self, c):
        super().__init__()
        b, self.rope = c.dsa, Rope(c, c.mla["qk_rope_head_dim"])
        self.heads, self.width = b["indexer_heads"], b["indexer_head_dim"]
        self.q = linear(c.mla["q_lora_rank"], self.heads * self.width)
        self.k, self.k_norm = linear(c.hidden_size, self.width), norm(c, self.width, "LayerNorm")
        self.weights = linear(c.hidden_size, self.heads)

    def keys(self, x, step):
        """[b, s, width], what is cached."""
        return self.rope(self.k_norm(self.k(x)), step.positions)

    def queries(self, x, q_latent, step):
        q = self.rope(self.q(q_latent).unflatten(-1, (self.heads, -1)), step.positions)
        return q, self.weights(x) * self.heads**-0.5 * self.width**-0.5

    @staticmethod
    def scores(q, weights, keys):
        """[b, s, t] of q [b, s, h, d], weights [b, s, h] and keys [b, t, d]."""
        dots = torch.einsum("bshd,btd->bhst", wide(q), wide(keys)).relu()
        return torch.einsum("bhst,bsh->bst", dots, wide(weights))


class Dsa(Latent):
    """MLA over the `top_k` tokens that an indexer picks (DeepSeek-V3.2), its own or that of the layer `source`."""

    def __init__(self, c, index):
        super().__init__(c, index)
        self.top_k, self.source = c.dsa["top_k"], c.index_sources[index]
        self.indexer = Indexer(c) if self.source is None else None

    def forward(self, x, step):
        q_latent, new = self.latents(x, step)
        rows = step.rows(self.index, latents=new)
        index = None
        if self.indexer is not None:
            index = *self.indexer.queries(x, q_latent, step), step.rows(self.index, indexer=self.indexer.keys(x, step))
        return self.out(self.attended(self.absorbed(q_latent, step), rows, index, step))

    def attended(self, query, rows, index, step):
        """[b, s, n dv] of absorbed queries over their top-k of the rows. index: what the indexer's scores are made of; None: `source`
        has chosen."""
        new, parts = query.size(1), []
        if index is not None:
            step.indices[self.index] = []
        picked = step.indices[self.index if self.source is None else self.source]
        for block, first in enumerate(range(0, new, QUERIES)):
            last = min(first + QUERIES, new)
            visible = step.visible(first, last)
            if index is not None:
                scores = self.indexer.scores(*(part[:, first:last] for part in index[:2]), index[2])
                picked.append(self.pick(scores.masked_fill(~visible, -torch.inf), first))
            chosen = torch.zeros(len(rows), last - first, rows.size(1), dtype=torch.bool, device=rows.device)
            chosen = chosen.scatter(-1, picked[block].to(rows.device), True) & visible
            parts.append(self.over_latents(query[:, first:last], rows, chosen))
        return torch.cat(parts, 1)

    def pick(self, scores, first):
        """Tokens [b, s, k] of scores [b, s, t], of the queries from `first`: of equal ones the earlier, whatever comes after them."""
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]


# Feed-forward --------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, c, index=None, width=None):
        super().__init__()
        width, self.config = width or c.ffn_hidden_size, c
        self.up = linear(c.hidden_size, gates(c.activation) * width, c.linear_bias)
        self.down = linear(width, c.hidden_size, c.linear_bias)

    def forward(self, x, step=None):
        return self.down(activate(self.up(x), self.config))


class Router(nn.Module):
    def __init__(self, c):
        super().__init__()
        b, count = c.moe, c.moe["experts"]
        self.weight = parameter(count, c.hidden_size)
        self.bias = parameter(count) if c.linear_bias else None
        self.expert_bias = fp32(count) if b["expert_bias"] else None
        self.top_k, self.function, self.pre_softmax = b["top_k"], b["score_function"], b["pre_softmax"]
        self.groups, self.chosen_groups, self.scaling = b["groups"], b["chosen_groups"], b["routed_scaling"]
        self.dtype = {"fp32": torch.float32, "fp64": torch.float64, None: None}[b["router_dtype"]]

    def forward(self, x):
        """Experts [tokens, k] of x [tokens, h] and what each counts."""
        dtype = self.dtype or x.dtype
        logits = F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        experts, shares = self.shares(logits)
        return experts, (shares * self.scaling).to(logits.dtype)

    def shares(self, logits):
        if self.function == "softmax":
            scores = logits.softmax(-1, torch.float32) if self.pre_softmax else logits
            experts = self.pick(scores)
            scores = scores.gather(-1, experts)
            return experts, scores if self.pre_softmax else scores.softmax(-1, torch.float32)
        scores = logits.float().sigmoid()
        experts = self.pick(scores if self.expert_bias is None else scores + self.expert_bias.float())
        scores = scores.gather(-1, experts)
        if self.top_k > 1:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return experts, scores

    def pick(self, scores):
        """The best experts; where they are in groups, those of the groups whose best have the largest sums."""
        if self.groups > 1:
            grouped = scores.unflatten(-1, (self.groups, -1))
            sums = grouped.topk(self.top_k // self.chosen_groups, -1).values.sum(-1)
            left = torch.ones_like(sums, dtype=torch.bool).scatter(-1, sums.topk(self.chosen_groups, -1).indices, False)
            scores = grouped.masked_fill(left.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, -1).indices


class Experts(nn.Module):
    """up: [experts, width, hidden]; down: [experts, hidden, width]; hidden is the latent's where there is one."""

    def __init__(self, c):
        super().__init__()
        count, width, self.config = c.moe["experts"], c.moe["expert_hidden_size"], c
        hidden, rows = c.moe["latent_size"] or c.hidden_size, gates(c.activation) * width
        self.up, self.down = (parameter(count, *of) for of in ((rows, hidden), (hidden, width)))
        self.up_bias, self.down_bias = (parameter(count, of) if c.linear_bias else None for of in (rows, hidden))

    def forward(self, x, experts, shares):
        order = experts.flatten().argsort(stable=True)
        tokens, shares = order // experts.size(1), shares.flatten()[order, None]
        out, first = torch.zeros_like(x), 0
        for expert, count in enumerate(torch.bincount(experts.flatten(), minlength=len(self.up)).tolist()):
            if count:
                rows = slice(first, first + count)
                up, down = (None, None) if self.up_bias is None else (self.up_bias[expert], self.down_bias[expert])
                y = activate(F.linear(x[tokens[rows]], self.up[expert], up), self.config)
                y = F.linear((y * shares[rows]).to(x.dtype), self.down[expert])
                out.index_add_(0, tokens[rows], y if down is None else y + (down * shares[rows]).to(x.dtype))
                first += count
        return out


class Moe(nn.Module):
    """A token's best experts, weighed before their second projection, and a shared one. Experts of a latent work on a projection of the
    token, and their sum is projected back."""

    def __init__(self, c, index):
        super().__init__()
        b, h = c.moe, c.hidden_size
        self.router, self.experts = Router(c), Experts(c)
        latent, shared = b["latent_size"], b["shared_expert_hidden_size"]
        self.to_latent, self.from_latent = (
            linear(*sizes, c.linear_bias) if latent else nn.Identity() for sizes in ((h, latent), (latent, h))
        )
        self.shared = Mlp(c, width=shared) if shared else None
        self.shared_gate = linear(h, 1) if b["shared_expert_gate"] else None

    def forward(self, x, step):
        flat = x.flatten(0, 1)
        out = self.from_latent(self.experts(self.to_latent(flat), *self.router(flat))).view_as(x)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())


# Recurrences ---------------------------------------------------------------------------------------------------------


def decays(logs):
    """exp of the sums of logs [b, l, h] over (s, t], lower triangular: [b, h, t, s]."""
    total = logs.cumsum(1).transpose(1, 2)
    spans = total[..., :, None] - total[..., None, :]
    later = torch.ones(spans.shape[-2:], dtype=torch.bool, device=logs.device).triu(1)
    return spans.masked_fill(later, -torch.inf).exp()


class Mamba2(nn.Module):
    """Mamba-2 (arXiv 2405.21060) with a norm by group behind the gate. `in_proj` packs z, x, B, C, dt."""

    def __init__(self, c, index):
        super().__init__()
        b, self.index = c.mamba2, index
        self.heads, self.width, self.states, self.groups = (b[k] for k in ("heads", "head_dim", "state_dim", "groups"))
        self.inner, keys = self.heads * self.width, self.groups * self.states
        self.in_proj = linear(c.hidden_size, 2 * self.inner + 2 * keys + self.heads)
        self.conv_weight = parameter(self.inner + 2 * keys, 1, b["conv_width"])
        self.conv_bias = parameter(self.inner + 2 * keys)
        self.dt_bias, self.A_log, self.D = (fp32(self.heads) for _ in range(3))
        self.norm_weight = parameter(self.inner)
        self.out = linear(self.inner, c.hidden_size)

    def forward(self, x, step):
        state, keys = step.state(self.index), self.groups * self.states
        z, xbc, dt = self.in_proj(x).split((self.inner, self.inner + 2 * keys, self.heads), -1)
        xbc = wide(convolve(xbc, self.conv_weight, self.conv_bias, state, step.real))
        v, B, C = xbc.split((self.inner, keys, keys), -1)
        dt = masked(F.softplus(wide(dt) + wide(self.dt_bias)), step.real)
        v = v.unflatten(-1, (self.heads, self.width))
        B, C = (y.unflatten(-1, (self.groups, self.states)) for y in (B, C))
        y = self.scan(v, dt, B, C, state) + wide(self.D)[:, None] * v
        y = (y * F.silu(wide(z)).view_as(y)).to(x.dtype)
        y = wide(y).flatten(2).unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, (y.size(-1),), eps=EPSILON).flatten(2) * wide(self.norm_weight)
        return self.out(y.to(x.dtype))

    def scan(self, v, dt, B, C, state):
        """h_t = e^(A dt_t) h_t-1 + dt_t v_t B_t', y_t = h_t C_t: [b, s, heads, width]."""
        share, A = self.heads // self.groups, -torch.exp(wide(self.A_log))
        h = state.get("ssm", v.new_zeros(v.size(0), self.heads, self.width, self.states))
        parts = []
        for first in range(0, v.size(1), CHUNK):
            v_, dt_, B_, C_ = (y[:, first : first + CHUNK] for y in (v, dt, B, C))
            logs, driven = dt_ * A, v_ * dt_[..., None]
            total = logs.cumsum(1)
            dots = torch.einsum("btgn,bsgn->bgts", C_, B_).repeat_interleave(share, 1) * decays(logs)
            B_, C_ = (y.repeat_interleave(share, 2) for y in (B_, C_))
            y = torch.einsum("bhts,bshp->bthp", dots, driven)
            parts.append(y + torch.einsum("bthn,bhpn->bthp", C_, h) * total.exp()[..., None])
            left = (total[:, -1:] - total).exp()[..., None]
            h = h * total[:, -1].exp()[..., None, None] + torch.einsum("bshp,bshn->bhpn", driven * left, B_)
        state["ssm"] = h
        return torch.cat(parts, 1)


class Gdn(nn.Module):
    """Gated delta net (arXiv 2412.06464). `in_proj` packs q, k, v, gate, beta, alpha; as many value heads share each key head."""

    def __init__(self, c, index):
        super().__init__()
        b, self.index = c.gdn, index
        self.key_heads, self.key_width, self.heads, self.width = (
            b[k] for k in ("key_heads", "key_head_dim", "value_heads", "value_head_dim")
        )
        self.keys, self.inner = self.key_heads * self.key_width, self.heads * self.width
        channels = 2 * self.keys + self.inner
        self.parts = (channels, self.inner, self.heads, self.heads)
        self.in_proj, self.out = linear(c.hidden_size, sum(self.parts)), linear(self.inner, c.hidden_size)
        self.conv_weight = parameter(channels, 1, b["conv_width"])
        self.dt_bias, self.A_log = fp32(self.heads), fp32(self.heads)
        self.norm = norm(c, self.width)

    def forward(self, x, step):
        state = step.state(self.index)
        qkv, gate, beta, alpha = self.in_proj(x).split(self.parts, -1)
        qkv = convolve(qkv, self.conv_weight, None, state, step.real)
        q, k, v = qkv.split((self.keys, self.keys, self.inner), -1)
        q, k = (y.unflatten(-1, (self.key_heads, -1)) for y in (q, k))
        q, k = (y * torch.rsqrt(wide(y).square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(self.heads // self.key_heads, 2) for y in (q, k))
        # Decays are of the weights' own precision, as in training.
        logs = masked(-self.A_log.to(x.dtype).exp() * F.softplus(wide(alpha) + wide(self.dt_bias)), step.real)
        beta = masked(beta.sigmoid(), step.real)
        v, gate = (y.unflatten(-1, (self.heads, -1)) for y in (v, gate))
        y = self.scan(q * self.key_width**-0.5, k, *(wide(t) for t in (v, logs, beta)), state).to(x.dtype)
        y = (self.norm(y) * F.silu(wide(gate))).to(x.dtype)
        return self.out(y.flatten(2))

    def scan(self, q, k, v, logs, beta, state):
        """S_t = e^logs_t S_t-1 (I - beta_t k_t k_t') + beta_t v_t k_t', y_t = S_t q_t: [b, s, heads, width].

        What a token writes, u_t = beta_t (v_t - e^logs_t S_t-1 k_t), depends on what those before it in the chunk wrote: a triangular
        system.
        """
        S, parts = state.get("delta", v.new_zeros(v.size(0), self.heads, self.width, self.key_width)), []
        for first in range(0, v.size(1), CHUNK):
            q_, k_, v_, b_ = (y[:, first : first + CHUNK].transpose(1, 2) for y in (q, k, v, beta[..., None]))
            logs_ = logs[:, first : first + CHUNK]
            spread, total = decays(logs_), logs_.cumsum(1).transpose(1, 2)[..., None]
            told = b_ * (v_ - (k_ * total.exp()) @ S.transpose(2, 3))
            before = (b_ * (k_ @ k_.transpose(2, 3)) * spread).tril(-1)
            u = torch.linalg.solve_triangular(before, told, upper=False, unitriangular=True)
            parts.append((q_ * total.exp()) @ S.transpose(2, 3) + (q_ @ k_.transpose(2, 3) * spread) @ u)
            left = (total[:, :, -1:] - total).exp()
            S = S * total[:, :, -1:].exp() + (u * left).transpose(2, 3) @ k_
        state["delta"] = S
        return torch.cat(parts, 2).transpose(1, 2)


class Mamba3(nn.Module):
    """Mamba-3 (ICLR 2026): complex states by rotation, a trapezoidal step, `rank` inputs and outputs (MIMO).

    `in_proj` packs z, x, B, C (each by group, rank and state), dt, A, trap and the angles that all heads share.
    """

    def __init__(self, c, index):
        super().__init__()
        b, self.index = c.mamba3, index
        self.heads, self.width, self.states, self.groups, self.rank, self.angles = (
            b[k] for k in ("heads", "head_dim", "state_dim", "groups", "mimo_rank", "angles")
        )
        h, r, inner, keys = self.heads, self.rank, self.heads * self.width, self.groups * self.rank * self.states
        self.parts = (inner, inner, keys, keys, h, h, h, self.angles)
        self.in_proj, self.out = linear(c.hidden_size, sum(self.parts)), linear(inner, c.hidden_size)
        self.dt_bias, self.D = fp32(h), fp32(h)
        self.B_bias, self.C_bias = fp32(h, r, self.states), fp32(h, r, self.states)
        self.B_norm, self.C_norm = Norm(self.states, EPSILON), Norm(self.states, EPSILON)
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            self.register_parameter(name, fp32(h, r, self.width) if r > 1 else None)

    def forward(self, x, step):
        return self.out(self.mix(self.in_proj(x), step))

    def mix(self, packed, step):
        """[b, s, heads * width] of what `in_proj` packs."""
        state, share = step.state(self.index), self.heads // self.groups
        z, v, B, C, dt, A, trap, angles = wide(packed).split(self.parts, -1)
        z, v = (y.unflatten(-1, (self.heads, self.width)) for y in (z, v))
        dt = masked(F.softplus(dt + self.dt_bias), step.real)
        logs = -F.softplus(A).clamp(min=A_FLOOR) * dt
        turns = math.pi * angles.tanh().unsqueeze(-2) * dt.unsqueeze(-1)
        # Only differences of angles matter.
        turned = turns.cumsum(1) + state.get("angle", 0)
        state["angle"] = turned[:, -1:].remainder(2 * math.pi)

        def normed(y, norm, bias):
            y = norm(y.unflatten(-1, (self.groups, self.rank, self.states)))
            return self.turn(y.repeat_interleave(share, 2) + bias, turned)

        k, q = normed(B, self.B_norm, self.B_bias), normed(C, self.C_norm, self.C_bias)
        mimo_x, mimo_z, mimo_o = (1 if w is None else w for w in (self.mimo_x, self.mimo_z, self.mimo_o))
        given = masked(v, step.real)
        v = given.unsqueeze(-2) * mimo_x  # [b, s, heads, rank, width]
        last = None
        if "key" in state:
            last = state["key"].to(k.dtype), state["value"].to(v.dtype).unsqueeze(-2) * mimo_x
        o = self.scan(q, k, v, logs, dt, trap.sigmoid(), state, last) + self.D[:, None, None] * v
        state["key"], state["value"] = (y[:, -1].to(packed.dtype).contiguous() for y in (k, given))
        y = (mimo_o * o * F.silu(z.unsqueeze(-2) * mimo_z)).sum(-2)
        return y.flatten(2).to(packed.dtype)

    def turn(self, x, angle):
        """x [..., heads, rank, states] turned by angle [..., heads, angles]: column i with i + states / 2."""
        angle = F.pad(angle, (0, self.states // 2 - self.angles)).unsqueeze(-2)
        low, high = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)

    def scan(self, q, k, v, logs, dt, gate, state, last):
        """S_t = e^logs_t (S_t-1 + (1 - g_t) dt_t v_t-1' k_t-1) + g_t dt_t v_t' k_t, o_t = q_t S_t': [b, s, heads, rank, width].

        last: k and v of the token before, or None. What a token adds beyond its own step is weighed by the next one's:
        (1 - g_t+1) dt_t+1.
        """
        b, length = q.shape[:2]
        S = state.get("ssm", q.new_zeros(b, self.heads, self.width, self.states))
        k_last, v_last = last or (k.new_zeros(b, *k.shape[2:]), v.new_zeros(b, *v.shape[2:]))
        parts = []
        for first in range(0, length, CHUNK):
            span = slice(first, first + CHUNK)
            q_, k_, v_, logs_, dt_, g = (y[:, span] for y in (q, k, v, logs, dt, gate))
            now, late = g * dt_, (1 - g) * dt_
            # The last token before the chunk is in the state but for this step's share of it.
            S = S + torch.einsum("bhrp,bhrn->bhpn", v_last * late[:, 0, :, None, None], k_last)
            total = logs_.cumsum(1)
            weight = (now + F.pad(late[:, 1:], (0, 0, 0, 1))).transpose(1, 2)[:, :, None, :]  # of s in a later t
            spread = decays(logs_)
            spread = spread * weight - torch.diag_embed(weight[:, :, 0] - now.transpose(1, 2))
            dots = torch.einsum("bthrn,bshqn->bhtrsq", q_, k_) * spread[:, :, :, None, :, None]
            o = torch.einsum("bhtrsq,bshqp->bthrp", dots, v_)
            carried = torch.einsum("bthrn,bhpn->bthrp", q_, S) * total.exp()[..., None, None]
            parts.append(o + carried)
            left = (total[:, -1:] - total).exp() * weight[:, :, 0].transpose(1, 2)  # the last one's is `now`
            S = S * total[:, -1].exp()[..., None, None]
            S = S + torch.einsum("bshrp,bshrn->bhpn", v_ * left[..., None, None], k_)
            k_last, v_last = k_[:, -1], v_[:, -1]
        state["ssm"] = S.contiguous()
        return torch.cat(parts, 1)


class M2Rnn(nn.Module):
    """M2RNN (arXiv 2603.14360): h_t = f_t h_t-1 + (1 - f_t) tanh(h_t-1 W + k_t v_t'), y_t = q_t h_t, one q and k for all
    heads. `in_proj` packs q, k, v, gate, forget."""

    def __init__(self, c, index):
        super().__init__()
        b, self.index, self.eps = c.m2rnn, index, c.norm_epsilon
        self.heads, self.rows, self.width = b["heads"], b["k_dim"], b["v_dim"]
        inner = self.heads * self.width
        self.convolved = (self.rows, self.rows, inner)
        channels = sum(self.convolved)
        self.in_proj = linear(c.hidden_size, channels + inner + self.heads)
        self.conv_weight = parameter(channels, 1, b["conv_width"])
        self.conv_bias = parameter(channels)
        self.norm_weight = parameter(inner)
        self.state_weight = fp32(self.heads, self.width, self.width)
        self.D, self.A_log, self.dt_bias = fp32(inner), fp32(self.heads), fp32(self.heads)
        self.out = linear(inner, c.hidden_size)

    def forward(self, x, step):
        channels = sum(self.convolved)
        mixed, g, forget = self.in_proj(x).split((channels, self.heads * self.width, self.heads), -1)
        mixed = convolve(mixed, self.conv_weight, self.conv_bias, step.state(self.index), step.real)
        q, k, v = mixed.split(self.convolved, -1)
        keep = torch.exp(-torch.exp(self.A_log) * F.softplus(wide(forget) + self.dt_bias))
        if step.real is not None:
            keep = torch.where(step.real[..., None], keep, 1.0)
        y = self.scan(q, k, v, keep, step)
        u = (wide(y).flatten(2) + self.D * wide(v)) * F.silu(wide(g))
        u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + self.eps) * wide(self.norm_weight)
        return self.out(u.to(x.dtype))

    def scan(self, q, k, v, keep, step):
        """[b, s, heads, width] of q and k [b, s, rows] and v [b, s, heads * width], in their type."""
        state, dtype = step.state(self.index), v.dtype
        q, k, v = (wide(x) for x in (q, k, v))
        v = v.unflatten(-1, (self.heads, self.width))
        h, ys = state.get("matrix", q.new_zeros(q.size(0), self.heads, self.rows, self.width)), []
        for t in range(q.size(1)):
            z = torch.tanh(h @ self.state_weight.to(h.dtype) + k[:, t, None, :, None] * v[:, t, :, None, :])
            f = keep[:, t, :, None, None]
            h = f * h + (1 - f) * z
            ys.append((q[:, t, None, :, None] * h).sum(2))
        state["matrix"] = h
        return torch.stack(ys, 1).to(dtype)


# Embeddings of n-grams -----------------------------------------------------------------------------------------------


class Ngrams(nn.Module):
    """What is added to a token's embedding: for each order from 2 on and each hash function, the n-gram that ends at the token names a
    row of `buckets`; the rows side by side, zeros for one that would begin before its document, go through one projection."""

    PRIME = 2**31 - 1

    def __init__(self, hidden, order, heads, buckets, width, document_end=None):
        super().__init__()
        self.order, self.heads, self.buckets, self.width, self.end = order, heads, buckets, width, document_end
        self.tables = (order - 1) * heads
        self.table = parameter(self.tables * buckets * width)
        self.projection = linear(self.tables * width, hidden)

    def forward(self, tokens, step=None):
        """[b, s, hidden] of tokens [b, s], behind those that the step remembers; None: of whole sequences without padding."""
        state, real = ({}, None) if step is None else (step.state("ngrams"), step.real)
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        new = tokens.size(1)
        if "tokens" in state:
            tokens, real = torch.cat((state["tokens"], tokens), 1), torch.cat((state["real"], real), 1)
        state["tokens"], state["real"] = tokens[:, 1 - self.order :], real[:, 1 - self.order :]
        rows, there = (x[:, -new:] for x in self.rows(tokens, real))
        found = F.embedding(rows, self.table.view(-1, self.width)).masked_fill(~there.unsqueeze(-1), 0)
        return self.projection(found.flatten(2))

    def rows(self, tokens, real):
        """The row of each position, order by order, in it hash by hash, and whether there is one: [b, s, tables]."""
        factors, found, there = self.factors(), [], []
        back, within = [tokens], torch.ones_like(real)
        for order in range(2, self.order + 1):
            before, is_real = (F.pad(x, (order - 1, 0))[:, : x.size(1)] for x in (tokens, real))
            back.append(before)
            within = within & is_real if self.end is None else within & is_real & (before != self.end)
            for _ in range(self.heads):
                factor, state = next(factors), torch.zeros_like(tokens)
                for token in reversed(back):
                    state = (state * factor + token + 1) % self.PRIME
                square = state * state % self.PRIME
                state = square * square % self.PRIME * state % self.PRIME
                found.append(state % self.buckets + len(found) * self.buckets)
                there.append(within)
        return torch.stack(found, -1), torch.stack(there, -1)

    def factors(self):
        """splitmix64 of 1, 2, ..."""
        for i in range(1, self.tables + 1):
            x = i * 0x9E3779B97F4A7C15 % 2**64
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            yield (x ^ x >> 31) % (self.PRIME - 2) + 2


# The model -----------------------------------------------------------------------------------------------------------

# What a parameter is in a model that nobody trained, by its name; matrices are drawn.
FILLS = dict.fromkeys(("bias", "conv_bias", "dt_bias", "A_log", "expert_bias"), 0.0)
FILLS |= dict.fromkeys(("D", "norm_weight", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"), 1.0)
FILLS |= dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), 0.01)
MIXERS = {
    "attention": Attention, "mla": Mla, "dsa": Dsa, "moe": Moe, "mlp": Mlp,
    "mamba2": Mamba2, "gdn": Gdn, "mamba3": Mamba3, "m2rnn": M2Rnn,
}  # fmt: skip


class Layer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), x [b, s, h]; between residual streams x is [b, s, n h], stream by stream."""

    def __init__(self, c, kind, index, streams=None):
        super().__init__()
        self.norm = norm(c, c.hidden_size)
        self.mixer = MIXERS[kind](c, index)
        self.streams = Streams(c.hidden_size, **streams) if streams else None

    def forward(self, x, step):
        if self.streams is None:
            return x + self.mixer(self.norm(x), step)
        taken, write, mix = self.streams(x)
        return self.streams.write(x, self.mixer(self.norm(taken), step), write, mix)


class Streams(nn.Module):
    """The maps of a layer between n residual streams (arXiv 2512.24880), each a function of a token's streams: what the layer gets, how
    its output is dealt to them, and what each keeps of all, a matrix whose rows and columns sum to one."""

    def __init__(self, hidden, streams, sinkhorn_steps, epsilon):
        super().__init__()
        self.n, self.steps, self.epsilon = streams, sinkhorn_steps, epsilon
        maps = streams * (streams + 2)
        self.mapping, self.bias = fp32(maps, streams * hidden), fp32(maps)
        self.alpha_pre, self.alpha_post, self.alpha_res = fp32(1), fp32(1), fp32(1)

    def forward(self, x):
        """What the layer gets [b, s, h], write [b, s, n], mix [b, s, n, n]."""
        y, n = wide(x), self.n
        scale = y.square().mean(-1, keepdim=True).sqrt() + self.epsilon
        logits = F.linear(y, self.mapping.to(y.dtype)) / scale
        parts = zip(logits.split((n, n, n * n), -1), (self.alpha_pre, self.alpha_post, self.alpha_res), strict=True)
        logits = torch.cat([part * alpha for part, alpha in parts], -1) + self.bias
        read, write, mix = logits.split((n, n, n * n), -1)
        taken = (read.sigmoid().unsqueeze(-1) * y.unflatten(-1, (n, -1))).sum(2).to(x.dtype)
        return taken, 2 * write.sigmoid(), self.balanced(mix.unflatten(-1, (n, n)))

    def write(self, x, output, write, mix):
        dealt = write.unsqueeze(-1) * wide(output).unsqueeze(2)
        return (mix @ wide(x).unflatten(-1, (self.n, -1)) + dealt).flatten(2).to(x.dtype)

    def balanced(self, logits):
        """Sinkhorn's normalisations of rows and columns, in logarithms."""
        least, m = math.log(self.epsilon), logits - logits.amax(-1, keepdim=True)
        for _ in range(self.steps):
            m = m - m.logsumexp(-1, keepdim=True).clamp(min=least)
            m = m - m.logsumexp(-2, keepdim=True).clamp(min=least)
        return m.exp()


class Ahead(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3): from a token's hidden state and the next token, the one after."""

    def __init__(self, c):
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (norm(c, c.hidden_size) for _ in range(3))
        self.join = linear(2 * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind, i) for i, kind in enumerate(c.mtp_kinds))

    def forward(self, hidden, embedded, step):
        x = self.join(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1))
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)


class NamPreTrainedModel(PreTrainedModel):
    config_class = NamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # a recurrence cannot be taken back by some tokens
    _supports_sdpa = True
    _no_split_modules = ["Layer"]
    _keep_in_fp32_modules_strict = ["expert_bias", "state_weight", "dt_bias", "A_log", "B_bias", "C_bias"]
    _keep_in_fp32_modules_strict += ["mimo_x", "mimo_z", "mimo_o", r"mixer\.D", "streams"]

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def __init__(self, config):
        super().__init__(config)
        for name, only in (("attn_implementation", "sdpa"), ("experts_implementation", "eager")):
            if (asked := getattr(config, f"_{name}", None)) not in (None, only):
                raise ValueError(f"{name}: `{only}` is the only one, not `{asked}`")

    @torch.no_grad()
    def _init_weights(self, module):
        """Of a model that is made of a config alone, for whoever wants its shape: plain values, not those that training began with. Of
        `from_pretrained` none is left: it refuses to go on without a weight."""
        for name, weight in module.named_parameters(recurse=False):
            if name in FILLS:
                nn.init.constant_(weight, FILLS[name])
            elif name == "state_weight":
                weight.copy_(torch.eye(weight.size(-1)))
            elif isinstance(module, Norm):
                nn.init.constant_(weight, 1 - module.offset)
            else:
                nn.init.normal_(weight, 0.0, 0.02)

    @classmethod
    def from_pretrained(cls, path, *args, kernels="torch", output_loading_info=False, **kwargs):
        """As transformers' own, but a missing, unexpected or misshapen tensor is an error.

        kernels: "torch"; or "nam_megatron", that package's, for a model in bf16 on a GPU: an ImportError where it is not installed, its
        own Refused where they do not serve the model.
        """
        fuse = fusing(kernels)
        model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found := sorted(map(str, info.get(what) or ())):
                raise ValueError(f"{path}: {what.replace('_', ' ')}: {', '.join(found[:4])}")
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if kernels != "torch" and ("disk" in places or len(places) > 1):
            raise ValueError(
                f"kernels: `{kernels}` needs all weights on one GPU, and they are on {', '.join(sorted(places))}"
            )
        fuse(model)
        return (model, info) if output_loading_info else model


def fusing(kernels):
    """What puts the kernels of that name into a model."""
    if kernels == "torch":
        return lambda model: None
    if kernels != "nam_megatron":
        raise ValueError(f"kernels: `torch` or `nam_megatron`, not `{kernels}`")
    try:
        return importlib.import_module("nam_megatron.hf.fused").fuse
    except ModuleNotFoundError as err:
        raise ImportError(f"kernels: `nam_megatron` needs the package `{err.name}`, which is not installed") from err


class NamModel(NamPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embed_positions = nn.Embedding(c.learned_positions, c.hidden_size) if c.learned_positions else None
        self.ngrams = Ngrams(c.hidden_size, **c.ngrams) if c.ngrams else None
        self.layers = nn.ModuleList(Layer(c, kind, i, c.mhc) for i, kind in enumerate(c.layer_kinds))
        self.norm = norm(c, c.hidden_size)
        self.streams = c.mhc["streams"] if c.mhc else 1
        self.mtp = nn.ModuleList(Ahead(c) for _ in range(c.mtp_depths))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def begun(self, tokens, step=None):
        """The embeddings that a step begins with, of its tokens alone; None: of whole sequences."""
        x = self.embed_tokens(tokens)
        return x if self.ngrams is None else x + self.ngrams(tokens, step)

    def placed(self, x, step):
        """Embeddings and learned positions, where there are any."""
        return x if self.embed_positions is None else x + self.embed_positions(step.positions)

    def forward(self, x, step, each=None):
        """Hidden states [b, s, h] behind the last norm, of embeddings; `each` is called with every layer's output: residual streams
        are copies of the embedding at first, lie side by side between the layers, and their mean is what the last one leaves."""
        x = x.repeat(1, 1, self.streams)
        for index, layer in enumerate(self.layers):
            x = layer(x, step)
            if index == len(self.layers) - 1 and self.streams > 1:
                x = wide(x).unflatten(-1, (self.streams, -1)).mean(2).to(x.dtype)
            if each is not None:
                each(index, x)
        return self.norm(x)

    def ahead(self, hidden, tokens, step):
        """The hidden states of every MTP depth; depth d at position i predicts the token d + 2 places on."""
        found = []
        for depth in self.mtp:
            tokens = F.pad(tokens[:, 1:], (0, 1))
            hidden = depth(hidden, self.begun(tokens), step)
            found.append(hidden)
        return found


class NamForCausalLM(NamPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True  # to Trainer: the loss is divided by num_items_in_batch
    one_token = None  # the kernels' way of a step of one token: logits of (self, tokens, mask, positions, cache)

    def __init__(self, config):
        super().__init__(config)
        self.model = NamModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        output_hidden_states=None,
        mtp=False,
        return_dict=None,
        cache=None,
        output_attentions=None,
        num_items_in_batch=None,
    ):
        """Logits [b, s, vocabulary], and the mean loss where `labels` are given (-100: not counted; they are shifted here).

        attention_mask: [b, t], 0 for padding on one side, else 1. position_ids: what the mask says, from any first one where there is no
        cache; several documents in a row are refused, since nothing would part them. cache: a NamCache, which is filled; use_cache makes
        one; past_key_values is its name before transformers 5.24. logits_to_keep: of the last tokens alone, or of those that a tensor
        names; 0 is all. mtp: `hidden_states` are those of the MTP depths instead of the layers'; their logits are `lm_head` of them.
        num_items_in_batch: what the sum of the losses is divided by, instead of the labels that count here.

        Raises:
            ValueError: an argument that cannot be served; it is named.
        """
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("past_key_values: another cache than `cache`")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = NamCache()
        self._check(input_ids, inputs_embeds, cache, labels, logits_to_keep, output_attentions)
        if cache is not None and self.training and torch.is_grad_enabled() and self._checkpointed():
            raise ValueError("use_cache: none beside gradient checkpointing, which passes through a layer twice")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        plain = labels is None and not output_hidden_states and not mtp and inputs_embeds is None
        if plain and self.one_token is not None and cache is not None and input_ids.size(1) == 1:
            logits = self.one_token(self, input_ids, attention_mask, position_ids, cache)
            if logits is not None:
                return self._output(return_dict, logits, cache)
        step = self._step(input_ids if inputs_embeds is None else inputs_embeds, attention_mask, position_ids, cache)
        if inputs_embeds is None:
            x = self.model.begun(input_ids, step)
        elif self.model.ngrams is None:
            x = inputs_embeds
        else:
            raise ValueError("inputs_embeds: this model embeds n-grams of tokens, and takes input_ids")
        if (table := self.model.embed_positions) is not None:
            known = table.num_embeddings
            if (position_ids is not None or step.past + x.size(1) > known) and int(step.positions.max()) >= known:
                raise ValueError(
                    f"learned_positions: {int(step.positions.max()) + 1} tokens, and {known} positions are learned"
                )
        x = self.model.placed(x, step)
        kept = [x] if output_hidden_states else None
        hidden = self.model(x, step, (lambda i, y: kept.append(y)) if output_hidden_states else None)
        if mtp:
            if cache is not None or input_ids is None:
                raise ValueError("mtp: of whole sequences of tokens, without a cache")
            kept = self.model.ahead(hidden, input_ids, step)
        if cache is not None:
            cache.length += x.size(1)
        if torch.is_tensor(logits_to_keep):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(wide(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
            if num_items_in_batch is not None:
                count = num_items_in_batch
                loss = loss / (count.to(loss.device) if torch.is_tensor(count) else count)
        return self._output(return_dict, logits, cache, loss, kept)

    def _check(self, tokens, embeds, cache, labels, logits_to_keep, output_attentions):
        if (tokens is None) == (embeds is None):
            raise ValueError("input_ids: either these or inputs_embeds")
        if cache is not None and not isinstance(cache, NamCache):
            raise ValueError(f"past_key_values: a NamCache, not {type(cache).__name__}")
        rows, new = (tokens if embeds is None else embeds).shape[:2]
        if not rows or not new:
            raise ValueError(f"input_ids: {rows} sequences of {new} tokens")
        if cache is not None and cache.sequences not in (None, rows):
            raise ValueError(f"past_key_values: a cache of {cache.sequences} sequences, and a batch of {rows}")
        if labels is not None and labels.shape != (rows, new):
            raise ValueError(f"labels: {list(labels.shape)}, not {[rows, new]}")
        if labels is not None and (torch.is_tensor(logits_to_keep) or logits_to_keep):
            raise ValueError("logits_to_keep: none beside labels, which are of all tokens")
        if output_attentions or self.config.output_attentions:
            raise ValueError("output_attentions: the shares of attention are not kept")

    def _checkpointed(self):
        return any(isinstance(m, Layer) and m.gradient_checkpointing for m in self.modules())

    def _output(self, return_dict, logits, cache, loss=None, kept=None):
        """As an object of transformers, which names the cache as its version does; or as a tuple."""
        kept = None if kept is None else tuple(kept)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=kept, **{CACHE: cache})
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _step(self, x, mask, positions, cache):
        past, (b, s) = cache.length if cache is not None else 0, x.shape[:2]
        real = seen = None
        if mask is not None:
            if mask.shape != (b, past + s):
                raise ValueError(f"attention_mask: {list(mask.shape)}, not {[b, past + s]}")
            seen = mask.bool()
            if (mask != seen).any():
                raise ValueError("attention_mask: 0 for padding, else 1")
            if s > 1:
                _check_padding(seen, cache is not None)
            if seen.all():
                seen = None
            else:
                real = seen[:, past:]
        if seen is None:
            counted = torch.arange(past, past + s, device=x.device).expand(b, s)
        else:
            counted = (seen.long().cumsum(1) - 1).clamp(min=0)[:, past:]
        if positions is None:
            positions = counted
        else:
            _check_positions(positions, counted, real, cache)
        return Step(cache, past, positions.expand(b, s), real, seen, {})

    def _prepare_cache_for_generation(self, generation_config, *args, **kwargs):
        if (asked := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(f"cache_implementation: the model has a cache of its own, NamCache, and no `{asked}` one")
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "generate_batch: it packs sequences into one row, and nothing here parts them; `generate` takes a batch"
        )

    def _reorder_cache(self, cache, beam_idx):
        cache.reorder_cache(beam_idx)
        return cache


def _check_padding(seen, cached):
    ends = (seen[:, 1:] != seen[:, :-1]).sum(1)
    if (ends > 1).any():
        raise ValueError("attention_mask: padding stands on one side, not between tokens")
    if cached and not seen[:, -1].all():
        raise ValueError("attention_mask: with a cache padding stands on the left")


def _check_positions(positions, counted, real, cache):
    """A row is one document: the positions of its tokens rise one by one, and behind a cache go on from it."""
    rows, new = counted.shape
    if positions.dim() != 2 or positions.size(0) not in (1, rows) or positions.size(1) != new:
        raise ValueError(f"position_ids: {list(positions.shape)}, not {[rows, new]}")
    ahead = positions - counted
    if cache is None:
        first = ahead.new_zeros(rows, 1) if real is None else real.long().argmax(1, keepdim=True)
        ahead = ahead - ahead.expand(rows, new).gather(1, first)
    if ((ahead != 0) if real is None else (ahead != 0) & real).any():
        raise ValueError(
            "position_ids: each row is one document, whose tokens are counted one by one; packed ones are not parted"
        )


NamConfig.register_for_auto_class()
NamForCausalLM.register_for_auto_class("AutoModelForCausalLM")
