"""`model`: widths, the pattern of layers, the kinds at its letters and what all of them share."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nam_megatron.blocks.kinds import KINDS, LETTERS, Computing
from nam_megatron.words.setting import Config, Name, Row, Setting
from nam_megatron.words.site import Site

Letter = Literal["A", "E", "M", "R"]
if TYPE_CHECKING:
    Kind = str  # a checker knows no list that is made while it runs; pydantic does
else:
    Kind = Literal[tuple(KINDS)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
FUNCTIONS = {
    "squared_relu": "megatron.core.activations.squared_relu",
    "swiglu": "torch.nn.functional.silu",
    "quick_geglu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
}


class Letters(Config):
    """The kind of block the family was designed with at each letter of the pattern."""

    A: Annotated[Kind | None, Row("attention")] = None
    E: Annotated[Kind | None, Row("experts, or a dense MLP")] = None
    M: Annotated[Kind | None, Row("state space model; the lane may put another there, and the plan says so")] = None
    R: Annotated[Kind | None, Row("recurrent tail; the lane may put another there, and the plan says so")] = None


class Substitute(Config):
    """Another kind at some ranks of a letter; ranks count within the letter, from 0."""

    letter: Annotated[Letter, Row("whose ranks")]
    ranks: Annotated[
        tuple[NonNegativeInt, ...], Field(min_length=1), Row("counted within the letter, from 0; no layer numbers")
    ]
    kind: Annotated[Kind, Row("what stands there instead")]


class Model(Config):
    """The model, whatever trains it."""

    family: Annotated[Name, Row("what people call these models", executes="a name")]
    pattern: Annotated[
        str,
        Field(min_length=1, max_length=8192),
        Row("source letters: A attention, E expert, M Mamba family, R recurrent tail; `|` cuts for pipeline stages"),
    ]
    depth: Annotated[int, Field(ge=1, le=4096), Row("layers; the pattern is repeated up to here, if it has no `|`")]
    hidden_size: Annotated[PositiveInt, Row("width of the residual stream", "hidden_size")]
    ffn_hidden_size: Annotated[
        PositiveInt,
        Row("width of a dense MLP; no other layer has it", "ffn_hidden_size", ("transformer.ffn_hidden_size",)),
    ]
    num_attention_heads: Annotated[PositiveInt, Row("query heads", "num_attention_heads")]
    seq_length: Annotated[PositiveInt, Row("tokens per sample", "seq_length", ("args.seq_length",))]
    vocab_size: Annotated[
        PositiveInt, Row("entries of the tokenizer", "vocab_size", ("model.vocab_size", "tokenizer.vocab_size"))
    ]
    tied_embeddings: Annotated[bool, Row("whether the output layer is the embedding")]
    normalization: Annotated[
        Literal["RMSNorm", "LayerNorm"], Row("of every layer's input; Megatron's default is LayerNorm", "normalization")
    ]
    norm_epsilon: Annotated[PositiveFloat, Row("added to the variance", "layernorm_epsilon")]
    zero_centered_norms: Annotated[
        bool,
        Row("weights of the norms at a layer's input, of queries and keys and at the end are kept as their distance from one",
            "layernorm_zero_centered_gamma", was=False),
    ]  # fmt: skip
    linear_bias: Annotated[
        bool,
        Row("biases in attention and MLPs; on by Megatron's default. State space and recurrent layers have none",
            "add_bias_linear"),
    ]  # fmt: skip
    activation: Annotated[Literal["squared_relu", "swiglu", "gelu", "quick_geglu"], Row("of MLPs and experts")]
    glu_offset: Annotated[
        float | None, Row("of a quick GeGLU: added to what the gate weighs (gpt-oss: 1)", "glu_linear_offset")
    ] = None
    activation_clamp: Annotated[
        PositiveFloat | None,
        Row(
            "of a quick GeGLU: the gate's input is at most this, what it weighs within this of zero",
            "activation_func_clamp_value",
        ),
    ] = None
    hidden_dropout: Annotated[Fraction, Row("on the residual branch; Megatron's default is 0.1", "hidden_dropout")]
    attention_dropout: Annotated[
        Fraction, Row("on attention's probabilities; Megatron's default is 0.1", "attention_dropout")
    ]
    rotary_base: Annotated[PositiveInt, Row("RoPE theta: Megatron's --rotary-base")]
    learned_positions: Annotated[
        PositiveInt | None,
        Row("rows of a table of positions, added to the embedding; null: none. Megatron's --position-embedding-type "
            "learned_absolute with so many --max-position-embeddings, which Muon takes as any matrix", was=None),
    ]  # fmt: skip
    init_std: Annotated[PositiveFloat, Row("standard deviation of initial weights", "init_method_std")]
    letters: Letters
    substitute: Annotated[tuple[Substitute, ...], Row("other kinds at some ranks of a letter")]
    blocks: Computing

    def settings(self, site: Site) -> Iterator[Setting]:
        blocks = site.blocks
        yield Setting(
            "hybrid_layer_pattern",
            site.pattern,
            "one letter a layer; sets depth, MTP depths, pipeline segments",
            "pattern",
            fields=dict(_layers(site)),
        )
        rows, key = (
            self.learned_positions or self.seq_length,
            "learned_positions" if self.learned_positions else "seq_length",
        )
        why = "rows of the table of positions" if self.learned_positions else "Megatron wants at least the sequence"
        yield Setting("max_position_embeddings", rows, why, key, fields={"model.seq_length": rows})
        why = "rows of the embedding; else the tokenizer and a multiple of 128 decide"
        chosen = {"model.should_pad_vocab": False}
        yield Setting("padded_vocab_size", self.vocab_size, why, "vocab_size", fields=chosen)
        untied = not self.tied_embeddings
        fields: dict[str, Any] = {"model.share_embeddings_and_output_weights": self.tied_embeddings}
        name = "untie_embeddings_and_output_weights"
        yield Setting(name, untied, "tied unless said", "tied_embeddings", fields=fields)
        if not blocks.attention:  # which says it itself
            yield Setting("add_qkv_bias", self.linear_bias, "follows the other biases", "linear_bias")
        function = FUNCTIONS.get(self.activation, "torch._C._nn.gelu")
        fields = {"transformer.activation_func": function}
        squared, swiglu, quick = (self.activation == name for name in ("squared_relu", "swiglu", "quick_geglu"))
        yield Setting("squared_relu", squared, "gelu by default", "activation", fields=fields)
        fields = {"transformer.gated_linear_unit": swiglu or quick, "transformer.bias_activation_fusion": swiglu}
        yield Setting("swiglu", swiglu, "gated only when asked for", "activation", fields=fields)
        yield Setting("quick_geglu", quick, "gated only when asked for", "activation")
        yield Setting("openai_gelu", False, "not offered", beside="activation")
        yield Setting("bias_gelu_fusion", False, "needs biases and gelu", "activation", fields=())
        if swiglu:
            yield Setting("bias_swiglu_fusion", True, "same formula, fused", "activation", fields=())
        if self.learned_positions:
            name, why = "position_embedding_type", "a table beside the embedding, and no RoPE but MLA's own"
            yield Setting(name, "learned_absolute", why, "learned_positions")
        elif not blocks.attention:  # which says it itself
            # What positions are comes before their base.
            pin = partial(Setting, beside="attention_dropout")
            yield pin("position_embedding_type", "rope", "Megatron's default is a learned table")
        if not blocks.attention and not blocks.mla:
            # No layer reads these, and Megatron's config has them all the same.
            pin, heads = partial(Setting, beside="num_attention_heads"), self.num_attention_heads
            yield pin("num_query_groups", 1, "no attention", fields={"transformer.num_query_groups": heads})
            yield pin(
                "kv_channels", None, "no attention", fields={"transformer.kv_channels": self.hidden_size // heads}
            )
            yield pin("apply_rope_fusion", not self.learned_positions, "no attention; out without RoPE")
        # Each attention kind says where it is read. A flag that nothing reads would be a finding of lint's.
        if not blocks.attention or blocks.attention.turned:
            yield Setting("rotary_base", self.rotary_base, "RoPE theta", "rotary_base", fields=())
        pin = partial(Setting, beside="rotary_base")
        if not blocks.attention:
            yield pin("rotary_percent", 1.0, "the whole head turns")
        yield pin("rotary_interleaved", False, "halves, not pairs")
        yield pin("rotary_seq_len_interpolation_factor", None, "no interpolation")
        if not site.llama_rope:  # which says it itself
            yield pin("use_rope_scaling", False, "no scaling")
        if not blocks.attention:
            yield pin("window_size", None, "full causal attention")
        if not blocks.attention:
            yield pin("softmax_type", "vanilla", "no sink")
            yield pin("attention_output_gate", False, "no gate")
        yield pin("qk_l2_norm", False, "no L2 norm")
        yield pin("qk_clip", False, "no clipping")
        yield pin("apply_residual_connection_post_layernorm", False, "pre-norm residuals")
        fields = {"transformer.embedding_init_method_std": self.init_std}
        yield Setting("embedding_init_method_std", None, "as everything else", beside="init_std", fields=fields)
        yield Setting("init_method_xavier_uniform", False, "normal, not Xavier", beside="init_std")
        yield Setting("use_mup", False, "no muP", beside="init_std")
        why = "a spec that cannot be imported is replaced silently; ours is handed over as an object"
        yield Setting("spec", None, why, beside="init_std")

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        """(key, why nothing reads it) of what stands, and may be at its default."""
        if "mlp" not in site.kinds:
            yield "ffn_hidden_size", "no layer is a dense MLP"
        if not site.kinds & set(LETTERS["A"]):
            for name in ("attention_dropout", "rotary_base"):
                yield name, "no layer is attention"
        elif "attention" in site.kinds and (block := site.blocks.attention) and not block.turned:
            yield "rotary_base", "attention has no position embedding"
        if not any(KINDS[kind].activates for kind in site.kinds):
            yield "activation", "no layer is an MLP or has experts"
        if self.activation != "quick_geglu":
            for name in ("glu_offset", "activation_clamp"):
                yield name, "`model.activation` is no quick GeGLU"
        for letter in type(self.letters).model_fields:
            if letter not in site.letters:
                yield f"letters.{letter}", f"the pattern has no `{letter}`"


def _layers(site: Site) -> Iterator[tuple[str, object]]:
    """What Megatron must make of the pattern: (symbol, segment, layer whose top-k it uses) of each layer, and MTP's."""
    for layer in site.layers:
        source = (layer.source or layer.number) if KINDS[layer.kind].share_by else None
        yield f"layers.{layer.number}", (KINDS[layer.kind].symbol, layer.segment, source)
    yield "layers.mtp", ("".join(KINDS[k].symbol for k in site.mtp),) * site.mtp_depths
    yield "transformer.mtp_num_layers", site.mtp_depths or None
    asked = site.kinds.union(*(KINDS[kind].needs for kind in site.kinds))
    yield from (pin for kind, block in KINDS.items() if kind not in asked for pin in block.absent.items())
