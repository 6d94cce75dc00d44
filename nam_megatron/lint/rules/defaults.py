"""Megatron's defaults are GPT-2's: beside anything newer they are seldom meant."""

import re
from collections.abc import Iterator
from dataclasses import replace

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.cards import agrees, names
from nam_megatron.lint.rules.rule import CONFIG, DEFAULT, FROM_ARGS, VALIDATE, Rule, When, without
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.rules.training import LONG
from nam_megatron.lint.values import Args

TESTED = re.compile(r"^TEST_TYPE:", re.MULTILINE)  # Megatron's own functional tests
OLDER = re.compile(r"(?<![a-z])(gpt-?[23]|bert|t5)(?![a-z\d])")  # models that have Megatron's defaults

# Of these experts say nothing: GPT-2's layers with experts are a model, too.
LAYERS = ("position_embedding_type", "normalization", "add_bias_linear", "swiglu")


def _beside_newer(when: When, about: str) -> When:
    """`when`, for a launch that says more than GPT-2 would, and whose value no recipe of ours has chosen, nor its published model."""

    def modern(a: Args, m: Model) -> bool:
        newer = a.swiglu or a.squared_relu or a.quick_geglu or a.normalization == "RMSNorm" or a.group_query_attention
        rotary = m.positions in ("rope", "yarn", "mrope")
        experts = m.moe and about not in LAYERS
        said = m.hybrid or experts or m.mla or newer or rotary
        own = not about.startswith("moe_") and any(map(OLDER.search, names(a)))
        tested = TESTED.search(a.launch.text)  # whose values nobody trains a model with
        return said and m.plan is None and not own and not tested

    return lambda a, m: modern(a, m) and not agrees(a, m, about) and when(a, m)


def _as_ever(a: Args, m: Model) -> bool:
    """Whether nobody asks for dropouts and Adam of this time: in a trial, or where layers are rather GPT-3's than Llama's."""
    if a.mock_data or 0 < (a.train_iters or 0) < LONG:
        return True
    older = m.activation == "GELU", a.normalization == "LayerNorm", m.positions == "learned_absolute", a.add_bias_linear
    return not (m.hybrid or m.mla) and sum(older) > 1


def _dropouts(a: Args, m: Model) -> Iterator[str]:
    for name in () if _as_ever(a, m) else ("hidden_dropout", "attention_dropout"):
        if name not in a.given and (name == "hidden_dropout" or m.attends):
            yield without(a.target.by_dest[name].name) + "\t"


_SELDOM_MEANT = (
    *map(trap, ("default-positions", "default-normalization", "default-bias")),
    Rule("default-activation", DEFAULT, "swiglu",
        lambda a, m: m.activation == "GELU" and m.has_mlps and without("--swiglu or --squared-relu") + "\t",
        "MLPs and experts have GELU, without a gate", "add `--swiglu` or `--squared-relu`", FROM_ARGS),
    Rule("default-dropout", DEFAULT, "", _dropouts, "a dropout of 0.1", "say 0.0 (or 0.1, if meant)", CONFIG),
    Rule("default-beta2", DEFAULT, "adam_beta2",
        lambda a, m: not a.said("adam_beta2") and a.optimizer != "sgd" and not _as_ever(a, m),
        "Adam's second moment decays with 0.999", "say `--adam-beta2 0.95` (or 0.999, if meant)",
        "core/optimizer/optimizer_config.py"),
    *map(trap, ("default-router-scores", "default-expert-scale", "default-top-k")),
    Rule("default-ffn", DEFAULT, "ffn_hidden_size",
        lambda a, m: "mlp" in m.kinds and a.swiglu and not a.said("ffn_hidden_size") and f"{m.ffn} wide",
        "beside SwiGLU a dense MLP is 8/3 as wide as the residual stream, rounded down to a multiple of 64",
        "say `--ffn-hidden-size`", VALIDATE),
    Rule("default-expert-ffn", DEFAULT, "moe_ffn_hidden_size",
        lambda a, m: m.moe
            and "mlp" in m.kinds
            and (a.num_experts or 0) > 16
            and not a.said("moe_ffn_hidden_size")
            and f"{m.ffn} wide",
        "each of the many experts is as wide as the dense MLPs beside them",
        "say `--moe-ffn-hidden-size`", VALIDATE),
    *map(trap, ("default-yarn-scale", "default-balancing", "default-latent-norm")),
    Rule("default-dispatcher", DEFAULT, "moe_token_dispatcher_type",
        lambda a, m: m.moe and m.ep * m.tp > 1 and not a.said("moe_token_dispatcher_type"),
        "allgather: every expert rank gets every token", "say `--moe-token-dispatcher-type alltoall`", CONFIG),
    *map(trap, ("default-expert-tensor",)),
)  # fmt: skip

RULES = (
    *(replace(rule, when=_beside_newer(rule.when, rule.about)) for rule in _SELDOM_MEANT),
    *map(trap, ("activations", "squared-relu-fusion")),
)
