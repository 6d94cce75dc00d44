"""Mixture of experts."""

import re
from collections.abc import Iterator

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.rule import CONFIG, COST, FAIL, FROM_ARGS, HYBRID, LACKS, MOE, WRONG, Rule, off
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args

# Refused without experts, by other rules.
REFUSED = re.compile(
    "moe_(ffn_hidden_size|flex_dispatcher_backend|use_upcycling|router_padding_.*|single_.*|enable_deepep|paged_stash|"
    "expert_rank_.*|latent_size)"
)


def _without_experts(a: Args, m: Model) -> list[str]:
    names = [n for n in a.sure(*a.given) if n.startswith("moe_") and not REFUSED.fullmatch(n) and not off(a, n)]
    return [] if a.num_experts or m.moe else [f"{a.written(n)}\t" for n in names]


def _metrics(a: Args, m: Model) -> Iterator[str]:
    """Of each MTP part: its `E` whose place is beyond the depths, with a loss of the router to log."""
    if m.plan or not m.hybrid or not (m.balanced_by_loss or a.moe_z_loss_coeff is not None):
        return
    for part in m.parts[1:2]:
        last = part.replace("|", "").rfind("E") + 1
        if last > m.mtp_depths > 0:
            yield f"`E` is layer {last} of a depth, and there {'are' if m.mtp_depths > 1 else 'is'} {m.mtp_depths}"


RULES = (
    Rule(
        "flex-ignored",
        COST,
        "moe_flex_dispatcher_backend",
        lambda a, m: known(lambda: m.moe, True)
        and a.launch.kind != "python"  # Bridge's recipes say what flex would take
        and a.said("moe_flex_dispatcher_backend")
        and a.moe_token_dispatcher_type != "flex"
        and (
            a.written("moe_token_dispatcher_type")
            if a.said("moe_token_dispatcher_type")
            else f"{LACKS}moe-token-dispatcher-type`"
        ),
        "ignored: the flex dispatcher alone has a backend",
        "use `--moe-token-dispatcher-type flex`, or leave it out",
        f"{MOE}moe_layer.py",
    ),
    Rule("moe-mtp-metrics", FAIL, "hybrid_layer_pattern", _metrics,
        "the router's losses of an MTP depth are logged by its place in the depth, and the table has a row for each depth only: "
            "IndexError in the first step (Megatron-LM issue 7172, 0.19.2 and main of September 2026)",
        "put `E` first in the MTP part, or train without balancing losses (`--moe-router-load-balancing-type none`)",
        f"{MOE}router.py attach_and_log_load_balancing_loss"),
    *map(trap, ("moe-probs-on-input",)),
    Rule("experts-not-in-pattern", WRONG, "num_experts",
        lambda a, m: m.hybrid and bool(a.num_experts) and not m.moe and bool(m.layers) and not a.foreign,
        "no layer of the pattern is `E`: the experts are not built", "write `E` where they belong", HYBRID),
    *map(trap, ("pattern-without-experts",)),
    Rule("moe-stage-without-experts", FAIL, "pipeline_model_parallel_size|hybrid_layer_pattern",
        lambda a, m: not m.plan
            and m.hybrid
            and m.moe
            and m.uneven("moe")
            and (m.balanced_by_loss or a.moe_z_loss_coeff is not None),
        "a pipeline stage has no `E`: routers' losses are logged as tensors of two sizes, and the first log line waits for ever",
        "cut the pattern with `|` so that every stage has an `E`", "training/training.py training_log"),
    Rule("moe-flags-ignored", WRONG, "", _without_experts, "ignored: there are no experts", "add `--num-experts`",
        FROM_ARGS),
    *map(trap, ("moe-width-without-experts",)),
    Rule("moe-no-balancing", WRONG, "moe_aux_loss_coeff",
        lambda a, m: ("0" if a.said("moe_aux_loss_coeff") else "not said, and so 0")
            if a.said("moe_router_load_balancing_type") and m.unbalanced and not a.launch.partial
            else "",
        "a loss is to balance the experts, and its coefficient is 0: nothing balances them",
        "say `--moe-aux-loss-coeff`, 1e-4 say (or `--moe-router-load-balancing-type none`, if meant)", CONFIG),
    *map(trap, ("moe-forced-balancing",)),
    Rule("moe-balancing-lists", FAIL, "moe_aux_loss_coeff",
        lambda a, m: len(m.balancing) > 1 and len(m.balancing) != len(m.aux_coefficients),
        "several balancing losses need as many coefficients", "give one for each", CONFIG),
    *map(trap, ("moe-expert-bias",)),
    Rule("moe-top-k", FAIL, "moe_router_topk", law("top-k-above-experts"), "more experts a token than there are",
        "lower it", f"{MOE}moe_utils.py"),
    Rule("moe-top-1", FAIL, "moe_router_topk",
        lambda a, m: a.moe_router_topk == 1
            and a.moe_router_score_function == "softmax"
            and not a.moe_router_pre_softmax
            and "sinkhorn" not in m.balancing,
        "softmax over one chosen expert has no gradient",
        "add `--moe-router-pre-softmax`", CONFIG),
    Rule("moe-groups", FAIL, "moe_router_group_topk",
        lambda a, m: bool(a.moe_router_group_topk)
            and (
                not a.moe_router_num_groups
                or a.moe_router_group_topk > a.moe_router_num_groups
                or bool((a.num_experts or 0) % a.moe_router_num_groups)
            ),
        "group-limited routing needs --moe-router-num-groups, a divisor of the experts and no smaller",
        "set both", CONFIG),
    Rule("moe-groups-uneven", WRONG, "moe_router_group_topk",
        lambda a, m: bool(a.moe_router_group_topk and a.moe_router_num_groups)
            and a.moe_router_group_topk < a.moe_router_num_groups
            and bool(a.moe_router_topk % a.moe_router_group_topk),
        "a group is ranked by its best --moe-router-topk / --moe-router-group-topk experts, rounded down",
        "choose a divisor of --moe-router-topk", f"{MOE}moe_utils.py group_limited_topk"),
    *map(trap, ("moe-expert-parallel", "moe-bias", "moe-grouped-bias")),
    Rule("moe-sequence", FAIL, "sequence_parallel", law("experts-tensor-without-sequence"),
        "experts under tensor parallelism train only with sequence parallelism", "add `--sequence-parallel`",
        f"{MOE}moe_layer.py"),
    *map(trap, ("moe-shared-overlap", "moe-padding", "moe-no-capacity", "moe-sequential")),
)  # fmt: skip
