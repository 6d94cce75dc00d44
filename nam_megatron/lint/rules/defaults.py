"""Megatron's defaults are GPT-2's: beside anything newer they are seldom meant."""

import re
from collections.abc import Iterator
from dataclasses import replace

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.cards import agrees, names
from nam_megatron.lint.rules.rule import CONFIG, DEFAULT, FAIL, FROM_ARGS, MOE, VALIDATE, Rule, When, without
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
        if not a.said(name) and (name == "hidden_dropout" or m.attends):
            yield without(a.target.by_dest[name].name) + "\t"


_SELDOM_MEANT = (
    Rule(
        "default-positions",
        DEFAULT,
        "position_embedding_type",
        lambda a, m: not a.any_said("position_embedding_type", "use_rotary_position_embeddings"),
        "a learned table of absolute positions is trained",
        "say `--position-embedding-type rope` (or `none`, or `learned_absolute` if meant)",
        "training/arguments.py _add_network_size_args",
    ),
    Rule(
        "default-normalization",
        DEFAULT,
        "normalization",
        # LayerNorm and biases beside a gate and RoPE are a model, too, as GPT-NeoX has them.
        lambda a, m: not a.said("normalization") and not (a.add_bias_linear and not m.hybrid),
        "LayerNorm is trained",
        "say `--normalization RMSNorm` (or LayerNorm, if meant)",
        CONFIG,
    ),
    Rule(
        "default-bias",
        DEFAULT,
        "add_bias_linear",
        lambda a, m: a.add_bias_linear
        and a.softmax_type != "learnable"  # gpt-oss's, whose layers have biases
        and (a.normalization == "RMSNorm" or m.hybrid),
        "every linear layer has a bias",
        "add `--disable-bias-linear`",
        CONFIG,
    ),
    Rule(
        "default-activation",
        DEFAULT,
        "swiglu",
        lambda a, m: m.activation == "GELU" and m.has_mlps and without("--swiglu or --squared-relu") + "\t",
        "MLPs and experts have GELU, without a gate",
        "add `--swiglu` or `--squared-relu`",
        FROM_ARGS,
    ),
    Rule(
        "default-dropout",
        DEFAULT,
        "",
        _dropouts,
        "a dropout of 0.1",
        "say 0.0 (or 0.1, if meant)",
        CONFIG,
    ),
    Rule(
        "default-beta2",
        DEFAULT,
        "adam_beta2",
        lambda a, m: not a.said("adam_beta2") and a.optimizer != "sgd" and not _as_ever(a, m),
        "Adam's second moment decays with 0.999",
        "say `--adam-beta2 0.95` (or 0.999, if meant)",
        "core/optimizer/optimizer_config.py",
    ),
    Rule(
        "default-router-scores",
        DEFAULT,
        "moe_router_score_function",
        # Sigmoid is of those with shared experts, or with groups of experts.
        lambda a, m: m.moe
        and not a.said("moe_router_score_function")
        and bool(a.moe_shared_expert_intermediate_size or a.moe_router_group_topk),
        "the router's scores are a softmax",
        "say `--moe-router-score-function` sigmoid or softmax",
        CONFIG,
    ),
    Rule(
        "default-expert-scale",
        DEFAULT,
        "moe_router_topk_scaling_factor",
        # Sigmoid scores with groups of experts are of DeepSeek-V3's kind.
        lambda a, m: m.expert_groups is not None
        and a.moe_router_score_function == "sigmoid"
        and not a.said("moe_router_topk_scaling_factor"),
        "the weights of a token's experts sum to 1; models of DeepSeek-V3's kind scale them, most by 2.5",
        "say `--moe-router-topk-scaling-factor` (or 1.0, if meant)",
        f"{MOE}moe_utils.py topk_routing_with_score_function",
    ),
    Rule(
        "default-top-k",
        DEFAULT,
        "moe_router_topk",
        lambda a, m: m.moe and not a.said("moe_router_topk"),
        "two experts take each token",
        "say `--moe-router-topk`",
        CONFIG,
    ),
    Rule(
        "default-ffn",
        DEFAULT,
        "ffn_hidden_size",
        lambda a, m: "mlp" in m.kinds and a.swiglu and not a.said("ffn_hidden_size") and f"{m.ffn} wide",
        "beside SwiGLU a dense MLP is 8/3 as wide as the residual stream, rounded down to a multiple of 64",
        "say `--ffn-hidden-size`",
        VALIDATE,
    ),
    Rule(
        "default-expert-ffn",
        DEFAULT,
        "moe_ffn_hidden_size",
        lambda a, m: m.moe
        and "mlp" in m.kinds
        and (a.num_experts or 0) > 16
        and not a.said("moe_ffn_hidden_size")
        and f"{m.ffn} wide",
        "each of the many experts is as wide as the dense MLPs beside them",
        "say `--moe-ffn-hidden-size`",
        VALIDATE,
    ),
    Rule(
        "default-yarn-scale",
        DEFAULT,
        "mscale_all_dim",
        lambda a, m: m.latent and m.yarn is not None and not a.said("mscale_all_dim"),
        "YaRN multiplies what is turned by 0.1 ln(factor) + 1 and leaves the softmax alone; models of DeepSeek's scale the softmax instead",
        "say `--mscale-all-dim`, 1.0 as those models have it",
        CONFIG,
    ),
    Rule(
        "default-balancing",
        DEFAULT,
        "moe_aux_loss_coeff",
        lambda a, m: not a.any_said("moe_router_load_balancing_type", "moe_router_force_load_balancing")
        and m.unbalanced,
        "the coefficient of the balancing loss is 0: nothing balances the experts",
        "say `--moe-aux-loss-coeff`, 1e-4 say (or `--moe-router-load-balancing-type none`, if meant)",
        CONFIG,
    ),
    Rule(
        "default-latent-norm",
        DEFAULT,
        "qk_layernorm",
        lambda a, m: m.mla and m.latent and not a.qk_layernorm and not m.of_published_mla,
        "the latents of MLA go without a norm",
        "add `--qk-layernorm`",
        "core/transformer/mla_qk_norm_config.py",
    ),
    Rule(
        "default-dispatcher",
        DEFAULT,
        "moe_token_dispatcher_type",
        lambda a, m: m.moe and m.ep * m.tp > 1 and not a.said("moe_token_dispatcher_type"),
        "allgather: every expert rank gets every token",
        "say `--moe-token-dispatcher-type alltoall`",
        CONFIG,
    ),
    Rule(
        "default-expert-tensor",
        DEFAULT,
        "expert_tensor_parallel_size",
        lambda a, m: m.moe and m.tp > 1 and not a.said("expert_tensor_parallel_size"),
        "experts are cut by the tensor parallel size too",
        "say `--expert-tensor-parallel-size 1`",
        VALIDATE,
    ),
)

RULES = (
    *(replace(rule, when=_beside_newer(rule.when, rule.about)) for rule in _SELDOM_MEANT),
    Rule(
        "activations",
        FAIL,
        "squared_relu|quick_geglu",
        lambda a, m: a.swiglu and (a.squared_relu or a.quick_geglu),
        "two activations",
        "keep one",
        FROM_ARGS,
    ),
    Rule(
        "squared-relu-fusion",
        FAIL,
        "squared_relu",
        lambda a, m: a.squared_relu and a.bias_gelu_fusion and a.add_bias_linear,
        "bias-GELU fusion is on by default and refuses squared ReLU",
        "add `--disable-bias-linear` or `--no-bias-gelu-fusion`",
        CONFIG,
    ),
)
