"""DeepSeek sparse attention (DeepSeek-V3.2): MLA over the top-k positions a small indexer picks, symbol `D`."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from nam_megatron.blocks import NO_KERNEL, Block, Gauge
from nam_megatron.blocks.mla.block import PROJECTIONS, Mla
from nam_megatron.words.setting import SAME, Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, State, Work

INDEXER = ("linear_wq_b", "linear_wk", "linear_weights_proj")
TILE = 128  # of the fused kernels: it divides the position of the first query (kernel.ALIGN)
VARIANT = "experimental_attention_variant"  # of Megatron's config and arguments
KEPT_ROWS = 64  # queries of a sample, at most, of which the log's share of kept attention is taken


class Dsa(Block):
    """DeepSeek sparse attention, with the projections of `mla`."""

    kind = "dsa"
    title = "DSA"
    colour = "bright_cyan"
    hue = "#12a5c4"
    measures = Gauge("DSA kept")
    letters = ("A",)
    symbol = "D"
    slot = "dsa_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs")
    adapted = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    unadapted = dict.fromkeys(INDEXER, "the top-k is chosen by it, and what chooses gets no gradient")
    needs = ("mla",)
    graph_parts = ("attn",)
    cached = True
    gathers_keys = True
    share_by = "full_every"
    latent = True
    absent = dict.fromkeys((f"transformer.{VARIANT}", f"args.{VARIANT}"))
    fixed = MappingProxyType(
        {"attention_dropout": (0.0, "neither Megatron's sparse attention nor ours drops anything")}
    )
    without_gpu = (("kernels", "fused", "naive", NO_KERNEL),)
    cut_on_gpu = MappingProxyType({"top_k": 128})
    trains = ("indexer_loss_coeff",)

    kernels: Annotated[
        Literal["fused", "megatron", "naive"],
        Row("ours in Triton, Megatron's own modules, or plain torch", executes=SAME),
    ]
    indexer_heads: Annotated[PositiveInt, Row("heads of the indexer", "dsa_indexer_n_heads")]
    indexer_head_dim: Annotated[PositiveInt, Row("width of an indexer head", "dsa_indexer_head_dim")]
    top_k: Annotated[PositiveInt, Row("positions each query attends to", "dsa_indexer_topk")]
    indexer_loss_coeff: Annotated[
        NonNegativeFloat, Row("weight of the indexer's loss; unset leaves it untrained", "dsa_indexer_loss_coeff")
    ]
    query_pieces: Annotated[
        PositiveInt,
        Row(
            "parts of a rank's queries, taken one after the other: more of them need less memory for scores",
            executes="the order of sums",
            was=1,
        ),
    ]
    full_every: Annotated[
        PositiveInt, Row("every so many DSA layers one computes its top-k, the others reuse it; 1: all compute")
    ]

    def ours(self, site: Site) -> str | None:
        if site.index_reuse and self.kernels != "megatron":
            return "without an attention mask Megatron's shared top-k would live on across microbatches"
        return mla(site).other_epsilon(site)

    def gauge(self, layer: Layer) -> Gauge | None:
        return self.measures if computes(layer) and self.kernels != "megatron" else None

    def settings(self, site: Site) -> Iterator[Setting]:
        why = "Megatron checks a DSA config only when this is said"
        # From the pattern in the config; in the arguments it decides whether Megatron checks the DSA config at all.
        key = "model.substitute"
        yield Setting(VARIANT, "dsa", why, key, beside="kernels", fields=tuple(self.absent))
        why = "KL over all positions, not over the selected ones"
        yield Setting("dsa_indexer_use_sparse_loss", False, why, beside="indexer_loss_coeff")
        freq, offset = site.index_reuse or (1, None)
        why = "layers between two that compute their top-k; 1: all do"
        # The sharing itself is compared layer by layer; without it Megatron must not share at all.
        fields = {"transformer.dsa_indexer_topk_freq": 1} if self.full_every == 1 else {}
        yield Setting("dsa_indexer_topk_freq", freq, why, "full_every", fields=fields)
        if site.index_reuse:
            name, why = "dsa_indexer_skip_topk_offset", "first layer that computes one"
            yield Setting(name, offset, why, "full_every", fields=())
        yield Setting("dsa_indexer_rotate_activation", False, "on by default; needs fast_hadamard_transform")
        yield Setting("dsa_indexer_rope_interleaved", False, "halves, as the attention itself")
        yield Setting("dsa_indexer_scoring_relu", True, "as published")
        yield Setting("dsa_indexer_k_norm_epsilon", None, "the model's epsilon")
        yield Setting("dsa_indexer_k_norm_fp32", False, "as published")
        yield Setting(
            "dsa_kernel_backend", "none", "tilelang and cudnn decline these shapes and fall to dense fp32 silently"
        )
        if site.index_reuse:
            why = "our layers hand the top-k on themselves"
            if stock := self.kernels == "megatron":
                why = "carries the shared top-k; without a mask it would ride on the config object across microbatches"
            name = "create_attention_mask_in_dataloader"
            yield Setting(name, stock, why, "full_every", beside="", fields=(f"args.{name}",))

    def expects(self, site: Site) -> Mapping[str, Any]:
        mask = bool(site.reusing_layers) and self.kernels == "megatron"
        return {VARIANT: "dsa", "create_attention_mask_in_dataloader": mask}

    def stands(self, layers: Sequence[Layer], site: Site) -> Mapping[str, Any]:
        reuse = {str(layer.number): layer.source for layer in site.reusing_layers}
        return {"a_ranks": [layer.rank for layer in layers], "index_reused_from": reuse}

    def parts(self) -> Iterator[str]:
        yield "latents"

    def part(self, param: Param) -> str | None:
        return "latents" if any(name in param.name for name in (*PROJECTIONS, ".indexer.")) else None

    def requantised(self, site: Site) -> tuple[int, int]:
        return mla(site).requantised(site)

    @property
    def pieces(self) -> int:
        return self.query_pieces

    def unproven(self) -> Iterator[str]:
        if self.kernels == "megatron":
            yield "which of several equal index scores Megatron's top-k takes: the earliest, as ours do"

    def small(self, site: Site) -> Mapping[str, int]:
        return {"indexer_heads": 4, "indexer_head_dim": 32, "top_k": 8}

    def _sizes(self, z: Sizes) -> Sizes:
        """MLA's symbols; ih indexer heads of iw; A, one fp32 score tensor [b, n / t, s, S]; K keys a token attends to.

        Of a rank's queries `run` are scored at once, the last ones against all keys.
        """
        top, tokens = self.top_k, z.site.seq_length
        keys = (top * (top + 1) / 2 + (tokens - top) * top) / tokens
        z = mla(z.site).sizes(z).own(ih=self.indexer_heads, iw=self.indexer_head_dim, top=top, K=keys)
        run = (1 if z["cp"] == 1 else 0.5) / self.query_pieces
        return z.own(A=z.value("4 b n s S / t"), run=run)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        yield from mla(z.site).params(z, layer)
        if computes(layer):
            h, at = z.site.hidden_size, "self_attention.core_attention.indexer."
            wide = self.indexer_heads * self.indexer_head_dim
            yield Param(f"{at}linear_wq_b.weight", (wide, mla(z.site).q_lora_rank or 0), "replicated", "weight")
            yield Param(f"{at}linear_wk.weight", (self.indexer_head_dim, h), "replicated", "weight")
            yield Param(f"{at}linear_weights_proj.weight", (self.indexer_heads, h), "replicated", "weight")
            for part in ("weight", "bias"):  # a LayerNorm, whatever the model's norm
                yield Param(f"{at}k_norm.{part}", (self.indexer_head_dim,), "replicated", "other")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        lines = {"fused": self._fused, "megatron": self._megatron, "naive": self._naive}[self.kernels]
        yield from lines(z, layer)

    def _fused(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        yield from mla(z.site).our_latents(z)
        if "mla_up_proj" not in z.recompute:
            yield z.line("absorbed queries", "2 T n (rkv + dr) / t", "queries in the latent space")
            yield z.line("latent keys", "2 T cp (rkv + dr)", "one for all heads")
        yield z.line("output", "2 T n dv / t", "input of the output projection")
        if "core_attn" not in z.recompute:
            yield z.line("latent output", "2 T n rkv / t + 4 T n / t", "before the value absorption; row statistics")
            if computes(layer) and self.indexer_loss_coeff:
                why = "its input, the only normed one that is kept, and the gradients of its queries, keys and weights"
                yield z.line("indexer", "2 T (h + rq) + 2 T (ih iw + (2 cp + 1) iw + ih) + 8 s dr", why)
        if computes(layer):
            why = "int32, by query and by key; the reusing layers share it"
            yield z.line("top-k", "8 b s top + 4 b S", why, stays=True)

    def _naive(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        more = {"mark": UNMEASURED}
        yield z.line("queries, keys and latents", "6 T n (rkv + dr) / t + 4 Ts h", "plain torch", **more)
        yield z.line("scores", "3.25 A", "probabilities of all keys", **more)
        if computes(layer):
            yield z.line("indexer", "8 b ih s S", "fp32 [b, ih, s, S], before and after the ReLU", **more)
            yield z.line("top-k", "b s S", "bool; the reusing layers share it", stays=True, **more)

    def _megatron(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        yield from mla(z.site).latents(z)
        yield z.line("queries", "2 T n (dq + dr) / t", "packed: the absorption keeps a view of it")
        yield z.line("absorbed queries", "2 T n (rkv + dr) / t", "queries in the latent space")
        yield z.line("latent keys", "2 T cp (rkv + dr)", "one for all heads")
        yield z.line("output", "2 T n dv / t", "also the input of the output projection")
        if "core_attn" in z.recompute:
            return
        if computes(layer):
            if self.indexer_loss_coeff:
                yield z.line("indexer queries", "2 T ih iw", "the indexer's loss computes the rest again")
            yield z.line(
                "indexer weights and top-k", "2 T ih + 8 b s top + 8 s dr", "weights, int64 positions, cos and sin"
            )
        yield z.line("scores", "3.25 A", "stock fallback: exp fp32, probabilities fp32 and bf16, three bool masks")
        yield z.line("fp32 queries and keys", "4 T (n / t + cp) (rkv + dr) + 16 T n / t", "and row statistics")
        yield z.line("latent output", "2 T n rkv / t", "before the value absorption")
        if z["b"] > 1:
            why = "keys and values copied for each head: a broadcast product is a view only at one sample"
            yield z.line("copies by head", "4 T n (rkv + dr) / t + 2 T n rkv / t", why)

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        if self.kernels == "fused":
            more = {"mark": UNMEASURED}
            loss = computes(layer) and self.indexer_loss_coeff
            scores = "8 b s run S" if loss else "4 b s run S" if computes(layer) else "0"
            why = "fp32 scores, and target or the scores' gradients, once for all heads" if loss else "fp32 scores"
            z = z.own(rows=KEPT_ROWS)
            # In a step that has a line in the log.
            told = ", 8 rows n S / t" if computes(layer) else ""
            yield z.line("forward", f"max({scores}{told}, 2 Ts h)", why, **more)
            why = "gradients of queries and outputs, and what each query of a sample adds to each of its keys"
            again = " + 2 T n (rkv + dr) / t" if z["run"] < 1 else ""  # the queries', of each part and put together
            yield z.line("backward", f"2 T n (2 rkv + dr + dv) / t + 2 s run top (rkv + dr){again}", why, **more)
            return
        yield z.line("forward", "max(0, 3.5 A - 2 T n (rkv + dv) / t)", "6.75 score tensors in place of 3.25")
        yield z.line("backward", "max(0, 4.25 A - 2 T n (rkv + dv) / t) + 2 T h", "7.5 score tensors in place of 3.25")

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("down projections", "2 h (rq + rkv + dr)", "to the latents")
        yield z.work("up projections", "2 rq n (dq + dr) + 2 n dq rkv + 2 n rkv dv", "queries, and both absorptions")
        yield z.work("output projection", "2 n dv h", "")
        yield z.work("sparse core", "2 n (2 rkv + dr) K", "over the top-k positions alone", redone=("core_attn",))
        if computes(layer):
            indexer = "2 rq ih iw + 2 h iw + 2 h ih + 2 ih (iw + 1) x"
            yield z.work("indexer", indexer, "scores all earlier positions", redone=("core_attn",))
            if self.indexer_loss_coeff:
                loss = {"passes": 1, "model": False, "redone": ("core_attn",)}
                dense = "4 n (rkv + dr) x + 4 ih iw x" if self.kernels == "fused" else "2 n (rkv + dr) x"
                yield z.work("indexer loss", dense, "its target: dense scores, forward only", **loss)
        if self.kernels == "fused":
            return
        why = "stock fallback: all S keys, no mask, where the model needs the top-k"
        yield z.work("dense core", "2 n (2 rkv + dr) (S - K)", why, model=False, redone=("core_attn",))

    def tables(self, layer: Layer | None) -> int:
        return 2 if computes(layer) else 1

    def buffers(self, z: Sizes) -> Iterator[Line]:
        if z.site.index_reuse and self.kernels == "megatron":
            yield z.line("attention mask", "b S S", "bool, from the data loader: it carries the shared top-k")

    def serving(self, z: Sizes, layer: Layer | None) -> Iterator[State]:
        z = self._sizes(z)
        mark = "Megatron 0.19.2 cannot serve DSA"
        yield z.state(
            "latent and rope", "2 (rkv + dr)", "bf16, whole on every tensor rank", "token", page=64, mark=mark
        )
        if computes(layer):
            yield z.state("indexer keys", "2 iw", "bf16, only where the top-k is computed", "token", page=64, mark=mark)


def mla(site: Site) -> Mla:
    """The projections that DSA stands on."""
    block = site.blocks.mla
    assert isinstance(block, Mla), "a recipe with DSA has mla's keys"
    return block


def computes(layer: Layer | None) -> bool:
    """Whether the layer has an indexer of its own, or uses the top-k of another."""
    return layer is None or layer.source is None
