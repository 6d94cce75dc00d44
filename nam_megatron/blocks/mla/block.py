"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): Megatron's MLASelfAttention, symbol `+`."""

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from nam_megatron.blocks import NO_KERNEL, Block, residual, whole_scores
from nam_megatron.words.setting import SAME, Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

# Of latents and of parts of heads that the fused projections take: a tile's side is a power of two. Beyond a rank of 174
# (750 TFLOP/s over 4.3 TB/s) products are bound by arithmetic, and cuBLAS does them better.
WIDTHS = (16, 32, 64, 128)

PROJECTIONS = ("_down_proj", "_up_proj")  # of the latents


def low_rank(q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int) -> bool:
    """Whether `kernels=fused` projects in our kernels, or in Megatron's modules with our kernels behind them."""
    return {q_rank, kv_rank, nope, rope, value} <= set(WIDTHS) and rope >= 32  # RoPE turns halves


class Mla(Block):
    """Multi-head latent attention; DSA has its projections, too."""

    kind = "mla"
    title = "MLA"
    colour = "bright_blue"
    hue = "#2f6fde"
    letters = ("A",)
    symbol = "+"
    slot = "mla_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = (
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_proj",
    )
    graph_parts = ("attn",)
    cached = True
    latent = True
    absent = MappingProxyType({"transformer.multi_latent_attention": False})
    recomputed = ("mla_up_proj",)
    without_gpu = (("kernels", "fused", "naive", NO_KERNEL),)

    kernels: Annotated[
        Literal["fused", "megatron", "naive"] | None,
        Row("ours in Triton, Megatron's own modules, or plain torch", executes=SAME),
    ] = None
    q_lora_rank: Annotated[
        PositiveInt | None, Row("width of the query latent; null: queries come straight from the input", "q_lora_rank")
    ]
    kv_lora_rank: Annotated[
        PositiveInt,
        Row("width of the key/value latent; 32 on Megatron's command line, 512 in its config", "kv_lora_rank"),
    ]
    qk_head_dim: Annotated[PositiveInt, Row("part of a query/key head without position", "qk_head_dim")]
    qk_rope_head_dim: Annotated[
        PositiveInt, Row("part that RoPE turns, one key shared by all heads", "qk_pos_emb_head_dim")
    ]
    v_head_dim: Annotated[PositiveInt, Row("value head", "v_head_dim")]
    latent_norm: Annotated[bool, Row("RMSNorm on the latents; our stack spec holds them", "qk_layernorm")]
    latent_norm_epsilon: Annotated[
        PositiveFloat | None,
        Row(
            "added to the variance of latents; null: `model.norm_epsilon`. DeepSeek's classes in transformers have 1e-6 always",
            was=None,
        ),
    ]

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if "mla" not in site.kinds:
            yield "kernels", "DSA has its own"
        if not self.latent_norm:
            yield "latent_norm_epsilon", "latents have no norm"

    def without_norms(self) -> frozenset[str]:
        """Fields that are empty because a latent has no norm, or is not there."""
        without = [] if self.latent_norm else ["self_attention.kv_layernorm"]
        without += [] if self.latent_norm and self.q_lora_rank else ["self_attention.q_layernorm"]
        return frozenset(without)

    def ours(self, site: Site) -> str | None:
        if self.q_lora_rank is None and self.latent_norm:
            return "Megatron 0.19.2 would put one more norm, over the whole width, before the queries' projection"
        return self.other_epsilon(site)

    def other_epsilon(self, site: Site) -> str | None:
        if self.latent_norm and self.latent_norm_epsilon not in (None, site.norm_epsilon):
            return "Megatron 0.19.2 gives norms of latents the epsilon of all others"
        return None

    def settings(self, site: Site) -> Iterator[Setting]:
        heads, key = site.num_attention_heads, "model.letters.A"
        uneven = site.hidden_size % heads and "attention" not in site.kinds
        fields = {
            "transformer.multi_latent_attention": True,
            **({} if uneven else {"transformer.kv_channels": site.hidden_size // heads}),
            "transformer.num_query_groups": heads,
            "transformer.rotary_base": site.rotary_base,
        }
        why = "said outright; Megatron would infer it from the pattern"
        yield Setting("multi_latent_attention", True, why, key, beside="kernels", fields=fields)
        pin = partial(Setting, beside="v_head_dim")
        if uneven:
            yield pin(
                "kv_channels",
                self.v_head_dim,
                "read by no latent; unset, Megatron divides the width by the heads, which leaves a rest",
            )
        if site.yarn:  # which says the rest
            yield Setting("rope_type", "yarn", "as the feature says", "feature.yarn.factor", beside="v_head_dim")
        else:
            yield pin("rope_type", "rope", "unset means yarn")
            why = "40 in Megatron's config; scales the softmax even with plain RoPE"
            yield pin("rotary_scaling_factor", 1.0, why)
            yield pin("mscale", 1.0, "yarn's, neutral")
            yield pin("mscale_all_dim", 0.0, "yarn's, neutral")
        why = "Megatron fuses RoPE for MLA only with yarn, by kernels that mask heads wrongly, and never for DSA"
        yield Setting("apply_rope_fusion", False, why)
        yield Setting("cache_mla_latents", False, "inference only")
        yield Setting(
            "mla_down_proj_fusion", False, "one layer norm and two down projections, as the stack spec has them"
        )
        # GQA's settings stay at what MLA expects.
        yield Setting("group_query_attention", False, "excluded by MLA", fields=())

    def parts(self) -> Iterator[str]:
        yield "latents"

    def part(self, param: Param) -> str | None:
        return "latents" if any(name in param.name for name in PROJECTIONS) else None

    def requantised(self, site: Site) -> tuple[int, int]:
        return site.num_attention_heads * self.v_head_dim, 0

    def small(self, site: Site) -> Mapping[str, int]:
        return {"q_lora_rank": 16, "kv_lora_rank": 64, "qk_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 64}

    def sizes(self, z: Sizes) -> Sizes:
        """n heads; latents of ranks rq (0: none) and rkv; a query/key head is dq + dr wide, a value head dv."""
        sizes = {"rq": self.q_lora_rank or 0, "rkv": self.kv_lora_rank, "n": z.site.num_attention_heads}
        return z.own(dq=self.qk_head_dim, dr=self.qk_rope_head_dim, dv=self.v_head_dim, **sizes)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, n, at = z.site.hidden_size, z.site.num_attention_heads, "self_attention."
        query, key_value = n * (self.qk_head_dim + self.qk_rope_head_dim), n * (self.qk_head_dim + self.v_head_dim)
        # Latent: rows of the down and of the up projection, width. No biases, whatever the model has.
        latents = {"kv": (self.kv_lora_rank + self.qk_rope_head_dim, key_value, self.kv_lora_rank)}
        yield from z.norm("input_layernorm.", h)
        if self.q_lora_rank is None:
            yield Param(f"{at}linear_q_proj.weight", (query, h), "tensor", "weight")
        else:
            latents = {"q": (self.q_lora_rank, query, self.q_lora_rank)} | latents
        for part, (down, up, width) in latents.items():
            yield Param(f"{at}linear_{part}_down_proj.weight", (down, h), "replicated", "weight")
            yield Param(f"{at}linear_{part}_up_proj.weight", (up, width), "tensor", "weight")
            if self.latent_norm:
                yield from z.norm(f"{at}{part}_layernorm.", width)
        yield from z.row(f"{at}linear_proj", h, n * self.v_head_dim)

    def latents(self, z: Sizes) -> Iterator[Line]:
        """What MLA and DSA keep alike, up to the latents. `z` has this block's symbols."""
        z = z.in_bf16("latents")
        yield from residual(z, "layernorm")
        yield z.line("latents", "2 Ts (rq + rkv + dr)", "outputs of the down projections")
        if self.latent_norm:
            statistics = 8 if self.q_lora_rank else 4
            why = "inputs of the up projections, and the norms' statistics"
            yield z.line("normed latents", f"w Ts (rq + rkv) + {statistics} Ts", why)
        yield z.line("cos and sin", "8 s dr", "bf16, of queries and of keys: RoPE is not fused")

    def projects(self) -> bool:
        """Whether our kernels norm and project; the modules do otherwise, and keep what they keep."""
        sizes = (self.q_lora_rank, self.kv_lora_rank, self.qk_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return self.kernels == "naive" or (self.kernels == "fused" and low_rank(*sizes))

    def our_latents(self, z: Sizes) -> Iterator[Line]:
        mark = UNMEASURED if self.kernels == "naive" else ""
        yield z.line("input", "2 Ts h", "kept by the projection; the residual branch shares it", mark=mark)
        if self.kernels == "naive":
            yield z.line("norms", "10 Ts h + 12 Ts (rq + rkv)", "fp32 inside, and their outputs", mark=mark)
        else:
            why = "before their norms; statistics of all; the weights with gamma in them"
            yield z.line("latents", "2 (Ts + h) (rq + rkv + dr) + 12 Ts", why, mark=mark)
        yield z.line("normed latents", "2 T (rq + rkv + dr)", "of all positions, one tensor", mark=mark)
        yield z.line("cos and sin", "4 s dr", "fp32, kept from the first step on", mark=mark)

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self.sizes(z)
        yield from self.our_latents(z) if self.projects() else self.latents(z)
        if self.kernels == "fused" and not self.projects():
            yield z.line("down weights", "2 h (rq + rkv + dr)", "as one matrix", mark=UNMEASURED)
        if "mla_up_proj" not in z.recompute:
            yield z.line("queries and keys", "4 T n (dq + dr) / t", "after RoPE and concatenation")
            yield z.line("values", "2 T n dv / t", "contiguous")
        yield z.line("output", "2 T n dv / t", "also the input of the output projection")
        if "core_attn" not in z.recompute:
            yield z.line("softmax statistics", "4 T n / t", "fp32")

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z, others = self.sizes(z), ""
        # Keys and values of all ranks, as they come and in order; or as they go round, with what comes of each.
        if z["cp"] > 1:
            gathers = z.site.gathers_keys
            others = f" + {'4 T cp n (dq + dr + dv) / t' if gathers else '2 T cp n (dq + dr + 2 dv) / t'}"
        if self.projects():
            yield z.line("forward", f"2 Ts h{others}", "the layer's output")
        else:
            yield z.line(
                "forward", f"2 T n (dq + dv) / t + 2 Ts h{others}", "packed up projection and the layer's output"
            )
        why = "gradients of output, q (fp32 and bf16), k, v and input"
        yield z.line("backward", f"2 T h + 4 T n dv / t + 8 T n (dq + dr) / t{others}{whole_scores(z)}", why)

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self.sizes(z)
        yield z.work("down projections", "2 h (rq + rkv + dr)", "to the latents")
        again = {"redone": ("mla_up_proj",)}
        yield z.work("up projections", "2 rq n (dq + dr) + 2 rkv n (dq + dv)", "from them", **again)
        if self.q_lora_rank is None:
            yield z.work("query projection", "2 h n (dq + dr)", "straight from the input", **again)
        yield z.work("output projection", "2 n dv h", "")
        yield z.work("core", "2 n (dq + dr + dv) x", "causal: S / 2 keys a token", redone=("core_attn",))

    def tables(self, layer: Layer | None) -> int:
        return 1

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self.sizes(z)
        yield z.state("latent and rope", "2 (rkv + dr)", "bf16, whole on every tensor rank", "token", page=64)
