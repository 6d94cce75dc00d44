"""Which layers are built."""

import re
from collections.abc import Iterator

from nam_megatron.lint.model import STOCK_SPECS, Model
from nam_megatron.lint.rules.cards import names
from nam_megatron.lint.rules.rule import CONFIG, COST, FAIL, HYBRID, OPEN, PATTERN, VALIDATE, WRONG, Rule, without
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args


def _mixed(m: Model) -> bool:
    return any("*" in part and ("+" in part or "D" in part) for part in m.parts)


def _spec(a: Args, m: Model) -> bool:
    words = tuple(a.spec or ())
    known = words in STOCK_SPECS or words[:1] == ("megatron.core.models.gpt.gpt_layer_specs",)
    return len(words) == 2 and not known and not m.ours and not a.foreign and not a.launch.partial


def _frequencies(a: Args, m: Model) -> Iterator[str]:
    """(flag, why) of every frequency that is no plan of the layers there are."""
    read = {
        "moe_layer_freq": not m.hybrid and bool(a.num_experts),
        "linear_attention_freq": not m.hybrid and m.variant == "gated_delta_net",
        "no_rope_freq": bool(a.no_rope_freq),
    }
    for name, is_read in read.items():
        if not is_read:
            continue
        match getattr(a, name):
            case None:
                yield without(a.written(name)) + "\t"
            case list(found) if len(found) != m.num_layers:
                yield f"{a.written(name)}\t{len(found)} entries for {m.num_layers} layers"
            case list(found) if set(found) - {0, 1}:
                yield f"{a.written(name)}\tan entry is neither 0 nor 1"
            case 0:
                yield f"{a.written(name)}\tevery 0 layers is no frequency"
            case int(every) if name == "no_rope_freq" and m.num_layers % every:
                yield f"{a.written(name)}\tit does not divide {m.num_layers} layers"


def _inference(a: Args, m: Model) -> bool:
    """Whether Megatron's layers for inference refuse this model."""
    if a.transformer_impl != "inference_optimized":
        return False
    plain = a.normalization != "RMSNorm" or a.layernorm_zero_centered_gamma or a.add_bias_linear or a.add_qkv_bias
    routed = m.gated or m.etp > 1 or a.moe_router_dtype != "fp32" or a.moe_expert_capacity_factor is not None
    return plain or bool(a.num_experts and routed)


WIDTHS = ("hidden_size", "ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
          "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")  # fmt: skip


def _odd(a: Args, m: Model) -> list[str]:
    """Widths that leave rows of bf16 without an alignment of 16 bytes. Of placeholders as narrow as that nothing is said."""
    return [f"{a.written(n)}\t" for n in a.sure(*WIDTHS) if isinstance(w := a.value(n), int) and w > 8 and w % 8]


RULES = (
    Rule("width-alignment", COST, "", _odd,
        "no multiple of 8: rows of bf16 do not begin at multiples of 16 bytes, which fused attention and the fast matrix kernels want",
        "take a multiple of 8, better of 64", "core/extensions/transformer_engine.py"),
    Rule("layer-frequency", FAIL, "moe_layer_freq|linear_attention_freq|no_rope_freq", _frequencies,
        "not a plan of the layers there are; the report takes a list cut, or its last entry as going on",
        "give one entry a layer, such as `([0]*1+[1]*7)` for eight", "core/models/gpt/gpt_layer_specs.py"),
    *map(trap, ("gpt-script-with-pattern",)),
    Rule("no-layers", WRONG, "hybrid_layer_pattern|num_layers",
        lambda a, m: m.hybrid and (m.pattern is None or not m.num_layers) and not a.unsaid_layers,
        "a hybrid without a pattern has no layers: embedding, final norm and output are all that is trained",
        "give `--hybrid-layer-pattern`; `--num-layers` alone builds nothing here", f"{HYBRID}, {PATTERN}"),
    Rule("num-layers-ignored", WRONG, "num_layers",
        lambda a, m: m.pattern is not None
            and a.said("num_layers")
            and a.num_layers != m.num_layers
            and f"the pattern has {m.num_layers}",
        "the pattern counts, not --num-layers", "leave `--num-layers` out",
        VALIDATE),
    *map(trap, ("two-patterns",)),
    Rule("pattern-symbol", FAIL, "hybrid_layer_pattern|hybrid_override_pattern",
        lambda a, m: " ".join(f"`{c}`" for c in m.bad_symbols), "a letter that is no layer of Megatron's",
        "layers are M G * D + - E; `|` cuts the pipeline, `/` starts an MTP depth", PATTERN),
    Rule("mixed-attention", FAIL, "hybrid_layer_pattern|hybrid_override_pattern", lambda a, m: _mixed(m),
        "`*` stands beside `+` or `D`: attention cannot be mixed with MLA or DSA", "use one of them", PATTERN),
    Rule("attention-without-positions", WRONG, "multi_latent_attention|hybrid_layer_pattern",
        lambda a, m: m.hybrid and m.mla and "attention" in m.kinds and not _mixed(m) and m.positions == "rope",
        "MLA is on, so `*` layers get no position embedding at all",
        "use `+` for `*`, or no MLA anywhere (MTP depths included)", HYBRID),
    *map(trap, ("mtp-without-pattern",)),
    Rule("mtp-depths", WRONG, "mtp_num_layers",
        lambda a, m: m.hybrid
            and bool(a.mtp_num_layers)
            and bool(m.mtp_depths)
            and a.mtp_num_layers != m.mtp_depths
            and f"the pattern has {m.mtp_depths}",
        "the pattern's depths count, not --mtp-num-layers",
        "make them agree", VALIDATE),
    *map(trap, ("mtp-loss-weight",)),
    Rule("padded-vocab-short", FAIL, "padded_vocab_size",
        lambda a, m: a.said("padded_vocab_size")
            and a.vocab_size is not None
            and a.padded_vocab_size < a.vocab_size
            and f"--vocab-size {a.vocab_size}",
        "the embedding has fewer rows than there are tokens: one beyond them stops the run, and with tensor parallelism gets zeros, unsaid",
        "leave it out: Megatron pads by itself", "core/tensor_parallel/layers.py VocabParallelEmbedding"),
    Rule("mtp-unequal", FAIL, "hybrid_layer_pattern|hybrid_override_pattern", lambda a, m: len(set(m.parts[1:])) > 1,
        "MTP depths must be alike", "repeat one part", PATTERN),
    *map(trap, ("mtp-positions",)),
    Rule("spec-words", FAIL, "spec",
        lambda a, m: a.said("spec")
            and len(a.spec) != 2
            and not (a.spec == ["local"] and re.search("bert|t5", " ".join(names(a)))),
        "--spec is a module and a name in it: two words", "give both", "core/transformer/spec_utils.py import_module"),
    Rule("spec-not-stock", OPEN, "spec", _spec,
        "if this cannot be imported, Megatron logs a line and trains its own stack; a slot it leaves empty is skipped in silence",
        "import it by hand first: `python -c 'from MODULE import NAME'`",
        "core/transformer/spec_utils.py import_module"),
    *map(trap, ("moe-layer-freq-ignored",)),
    Rule("inference-layers", FAIL, "transformer_impl", _inference,
        "layers for inference have RMSNorm, no bias, weights of norms as they are; with experts neither a gate nor a capacity",
        "leave it out: it is not for training", CONFIG),
    *map(trap, ("rmsnorm-fusion", "no-position-embedding")),
)  # fmt: skip
