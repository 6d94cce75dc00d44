"""Multi-head and grouped-query attention: Megatron's SelfAttention, symbol `*`."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from nam_megatron.blocks import Block, residual, whole_scores
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work


class Attention(Block):
    """Multi-head or grouped-query attention: Megatron's own, with RoPE or no positions of its own."""

    kind = "attention"
    title = "GQA"
    colour = "bright_blue"
    hue = "#4c8bf5"
    letters = ("A",)
    symbol = "*"
    slot = "attention_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("linear_qkv", "linear_proj")
    graph_parts = ("attn",)
    cached = True
    cut_on_gpu = MappingProxyType({"window": 128})

    head_dim: Annotated[PositiveInt, Row("width of one head", "kv_channels")]
    query_groups: Annotated[PositiveInt, Row("key/value heads")]
    qk_norm: Annotated[bool, Row("norm on queries and keys per head", "qk_layernorm")]
    window: Annotated[
        PositiveInt | None,
        Row("tokens that a query sees, itself included; null: all before it. Megatron's --window-size", was=None),
    ]
    unwindowed_every: Annotated[
        int | None,
        Field(ge=2),
        Row(
            "every so many-th attention layer sees all tokens in spite of the window; null: none. Megatron's --window-attn-skip-freq",
            was=None,
        ),
    ]
    qkv_bias: Annotated[
        bool, Row("biases of queries, keys and values alone; `model.linear_bias` gives them and others", was=False)
    ]
    sinks: Annotated[
        bool,
        Row(
            "a score of each head that no key has, learned, which weighs nothing (gpt-oss). Megatron's --softmax-type",
            was=False,
        ),
    ]
    output_gate: Annotated[
        bool,
        Row(
            "attention's output times a sigmoid of the token, whose columns the packed projection has",
            "attention_output_gate",
            was=False,
        ),
    ]
    position_embedding: Annotated[
        Literal["rope", "none"],
        Row(
            "none: attention knows no positions but by the causal mask and `model.learned_positions`. Megatron's "
            "--position-embedding-type",
            was="rope",
        ),
    ]
    rotary_percent: Annotated[
        float,
        Field(gt=0, le=1),
        Row("share of a head that RoPE turns: its first columns. Megatron's --rotary-percent", was=1.0),
    ]

    @property
    def turned(self) -> int:
        """Columns of a head that RoPE turns; Megatron rounds down (core/models/common/embeddings/rotary_pos_embedding.py, 0.19.2)."""
        return int(self.head_dim * self.rotary_percent) if self.position_embedding == "rope" else 0

    def windowed(self, rank: int) -> bool:
        """Whether the attention layer of this rank has the window."""
        return self.window is not None and (not self.unwindowed_every or (rank + 1) % self.unwindowed_every > 0)

    def variant(self, layer: Layer) -> str | None:
        return f"window {self.window}" if self.windowed(layer.rank) else None

    def requantised(self, site: Site) -> tuple[int, int]:
        return site.num_attention_heads * self.head_dim, 0

    def called(self, site: Site) -> str:
        return {1: "MQA", site.num_attention_heads: "MHA"}.get(self.query_groups, self.title)

    def settings(self, site: Site) -> Iterator[Setting]:
        grouped = self.query_groups < site.num_attention_heads
        why = "without it Megatron ignores the groups and trains full MHA"
        yield Setting("group_query_attention", grouped, why, "query_groups", fields=())
        fields: dict[str, Any] = {"transformer.num_query_groups": self.query_groups}
        if self.turned:
            fields["model.rotary_base"] = site.rotary_base
        yield Setting("num_query_groups", self.query_groups, "key/value heads", "query_groups", fields=fields)
        # Megatron counts the tokens to the left and to the right of a query.
        fields = {"transformer.window_size": (self.window - 1, 0) if self.window else None}
        seen = f"{self.window - 1},0" if self.window else None
        yield Setting("window_size", seen, "full causal attention unless said", "window", fields=fields)
        if self.unwindowed_every and self.window:  # Megatron counts all layers, whatever stands there
            windows = [int(layer.kind == self.kind and self.windowed(layer.rank)) for layer in site.layers]
            fields, why = {"transformer.window_attn_skip_freq": windows}, "1: a layer with the window"
            text = f"[{','.join(map(str, windows))}]"
            yield Setting("window_attn_skip_freq", text, why, "unwindowed_every", fields=fields)
        softmax = "learnable" if self.sinks else "vanilla"
        yield Setting("softmax_type", softmax, "no sink unless asked for", "sinks")
        bias = self.qkv_bias or site.linear_bias
        yield Setting("add_qkv_bias", bias, "beside the other biases or without them", "qkv_bias")
        # YaRN is another type to Megatron, whose default is a learned table.
        yarn = self.turned > 0 and site.yarn
        why = "YaRN" if yarn else "a learned table by default"
        if not site.learned_positions:  # which says it itself
            name = "position_embedding_type"
            yield Setting(name, "yarn" if yarn else self.position_embedding, why, "position_embedding")
        if self.turned:
            yield Setting("rotary_percent", self.rotary_percent, "share of a head that RoPE turns", "rotary_percent")
        plain = self.turned > 0 and not yarn
        why = "plain RoPE is fused for this kind; Megatron puts it out without RoPE, and with YaRN"
        fields = {"transformer.apply_rope_fusion": plain}
        fields |= {} if self.turned else {"model.rotary_percent": self.rotary_percent}
        yield Setting("apply_rope_fusion", plain, why, beside="position_embedding", fields=fields)

    def expects(self, site: Site) -> Mapping[str, Any]:
        return {"softmax_type": "learnable" if self.sinks else "vanilla"}

    def alone(self, site: Site) -> Iterator[str]:
        if self.sinks and site.tensor > 1:
            yield "Megatron 0.19.2's norm that clips counts the sinks of the first tensor rank alone"

    def small(self, site: Site) -> Mapping[str, int]:
        return {"head_dim": 16, "window": 8, "query_groups": max(2, site.tensor)}

    def _sizes(self, z: Sizes) -> Sizes:
        """n heads, g key/value groups (at least one a rank) of width d."""
        return z.own(n=z.site.num_attention_heads, g=max(self.query_groups, int(z["t"])), d=self.head_dim)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, width = z.site.hidden_size, z.site.num_attention_heads * self.head_dim
        yield from z.norm("self_attention.linear_qkv.layer_norm_", h)
        columns = (2 if self.output_gate else 1) * width + 2 * self.query_groups * self.head_dim
        yield from z.column("self_attention.linear_qkv", columns, h)
        if self.qkv_bias:
            yield Param("self_attention.linear_qkv.bias", (columns,), "tensor", "other")
        yield from z.row("self_attention.linear_proj", h, width)
        if self.sinks:
            yield Param(
                "self_attention.core_attention.softmax_offset", (z.site.num_attention_heads,), "tensor", "other"
            )
        if self.qk_norm:
            yield from z.norm("self_attention.q_layernorm.", self.head_dim)
            yield from z.norm("self_attention.k_layernorm.", self.head_dim)

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        yield from residual(z)
        why, mark = ("after RoPE", "") if self.turned else ("split from the projection", UNMEASURED)
        yield z.line("queries", "2 T n d / t", why, mark=mark)
        yield z.line("keys", "2 T g d / t", why, mark=mark)
        if z.site.yarn:
            why = "bf16, of queries and of keys: YaRN is not fused"
            yield z.line("cos and sin", "8 s d", why, mark=UNMEASURED)
        if "core_attn" in z.recompute:
            yield z.line(
                "packed qkv", "2 T (n + 2 g) d / t", "the checkpoint keeps `value`, a view of the whole projection"
            )
        else:
            yield z.line("values", "2 T g d / t", "a copy: cuDNN's layout cannot take the view")
            yield z.line("softmax statistics", "4 T n / t", "fp32")
        yield z.line("output", "2 T n d / t", "also the input of the output projection")
        if self.output_gate:
            why = "the gate, and the gated output beside attention's own"
            yield z.line("output gate", "4 T n d / t", why, mark=UNMEASURED)
        if self.qk_norm:
            yield z.line(
                "before the qk norm", "2 T (n + g) d / t + 4 T (n + g) / t", "kept by the two norms", mark=UNMEASURED
            )

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z, others = self._sizes(z), ""
        if z["cp"] > 1:  # as MLA's: keys and values of all ranks, and what comes of each
            gathers = z.site.gathers_keys
            others = f" + {'8 T cp g d / t' if gathers else '2 T cp (2 g + n) d / t'}"
        yield z.line("forward", f"2 T (n + 2 g) d / t + 2 Ts h{others}", "packed qkv and the layer's output")
        if self.output_gate:
            yield z.line("forward", "2 T n d / t", "the gate's columns of the packed projection", mark=UNMEASURED)
        why = "gradients of output, q (fp32 and bf16), k, v and input"
        yield z.line("backward", f"2 T h + 8 T n d / t + 4 T g d / t{others}{whole_scores(z)}", why)

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z).own(g=self.query_groups)
        yield z.work("projections", "2 h (n + 2 g) d + 2 n d h", "qkv and output")
        if self.output_gate:
            yield z.work("output gate", "2 h n d", "its columns of the packed projection")
        why = "causal: S / 2 keys a token"
        if self.window and (layer is None or self.windowed(layer.rank)):
            z, why = z.own(x=self.window - self.window**2 / (2 * z["S"])), "causal: x keys a token in the window's mean"
        yield z.work("core", "4 n d x", why, redone=("core_attn",))

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        yield z.state("keys and values", "4 g d / t", "bf16", "token", page=256)
