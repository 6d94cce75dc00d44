"""Laws on what saves memory: recompute, sharded optimizer state and weights."""

from collections.abc import Iterator

from nam_megatron.compile.plan import Plan
from nam_megatron.features.distributed_optimizer import DistributedOptimizer
from nam_megatron.features.megatron_fsdp import OVERLAPS, MegatronFsdp
from nam_megatron.features.names import Features
from nam_megatron.features.recompute import NEEDS, Recompute
from nam_megatron.laws.law import CONTRADICTION, REFUSES, WRONG, Law, Words

AGAIN, SHARDED, FSDP = "feature.recompute.", "feature.distributed_optimizer.", "feature.megatron_fsdp."
CONFIG, ARGUMENTS = "core/transformer/transformer_config.py", "training/arguments.py"
MEGATRON_FSDP = "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"


def selective(recompute: Recompute) -> tuple[str, ...]:
    """The parts of layers that are computed again; none where whole layers are."""
    return recompute.modules if recompute.granularity == "selective" else ()


def full(recompute: Recompute) -> bool:
    return recompute.granularity != "selective"


def _parts_of_nothing(recompute: Recompute, plan: Plan) -> Iterator[Words]:
    for module in selective(recompute):
        if (kind := NEEDS.get(module)) and kind not in plan.kinds:
            yield {"module": module, "kind": kind}


def _bound(distributed_optimizer: DistributedOptimizer, feature: Features) -> Iterator[Words]:
    if distributed_optimizer.reshardable:
        yield from ({"name": f.name} for f in feature.all() if f.bound)


def _overlapped_anyway(megatron_fsdp: MegatronFsdp, distributed_optimizer: DistributedOptimizer) -> Iterator[Words]:
    for name in OVERLAPS[megatron_fsdp.strategy]:
        if not getattr(distributed_optimizer, name):
            yield {"key": SHARDED + name}


def _lost_gradient(recompute: Recompute, megatron_fsdp: MegatronFsdp, plan: Plan) -> bool:
    """What a second backward pass brings is written over what the first has brought (_grad_acc)."""
    again = "mla_up_proj" in selective(recompute) and "dsa" in plan.kinds
    return again and megatron_fsdp.strategy in ("optim_grads", "optim_grads_params")


LAWS = (
    Law(id="overlapped-gather-unsharded", category=CONTRADICTION, key=SHARDED + "overlap_param_gather",
        when=lambda distributed_optimizer: distributed_optimizer.overlap_param_gather
            and not distributed_optimizer.enabled, says="there are no sharded weights to gather",
        way=f"set `{SHARDED}overlap_param_gather=false`, or `{SHARDED}enabled=true`"),
    Law(id="reshardable-unsharded", category=CONTRADICTION, key=SHARDED + "reshardable",
        when=lambda distributed_optimizer: distributed_optimizer.reshardable and not distributed_optimizer.enabled,
        says="unsharded state is always reshardable", way="set it to false"),
    Law(id="reshardable-bound", category=CONTRADICTION, key=SHARDED + "reshardable",
        when=_bound, says="the optimizer's state of `{name}` fits its own parallel layout alone",
        way="set it to false"),
    Law(id="overlapped-gather-alone", category=REFUSES, key=SHARDED + "overlap_grad_reduce",
        when=lambda distributed_optimizer: distributed_optimizer.overlap_param_gather
            and not distributed_optimizer.overlap_grad_reduce,
        says="`overlap_param_gather` needs `overlap_grad_reduce`", way="switch both on or both off", source=ARGUMENTS),
    Law(id="fsdp-unsharded-optimizer", category=REFUSES, key=FSDP + "enabled",
        when=lambda megatron_fsdp, distributed_optimizer: not distributed_optimizer.enabled,
        says="Megatron-FSDP stands on the distributed optimizer", way=f"set `{SHARDED}enabled=true`", source=ARGUMENTS),
    Law(id="fsdp-overlaps", category=CONTRADICTION, key=SHARDED + "overlap_grad_reduce",
        when=_overlapped_anyway,
        says="Megatron-FSDP switches it on for strategy `{megatron_fsdp.strategy}`, and says nothing",
        way=f"set it to true, or `{FSDP}strategy=optim`", source=MEGATRON_FSDP),
    Law(
        id="fsdp-pipeline",  # _get_dp_tp_mesh: every rank of the run is one of data and tensor parallelism
        category=REFUSES,
        key="parallel.pipeline",
        when=lambda megatron_fsdp, parallel: parallel.pipeline > 1,
        says="Megatron-FSDP of 0.19.2 has no place for pipeline stages in its mesh",
        way=f"set `parallel.pipeline=1` or `{FSDP}enabled=false`",
        source="core/distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    Law(id="muon-fsdp", category=REFUSES, key="feature.muon.enabled",
        when=lambda muon, megatron_fsdp: True, says="Muon does not run under `megatron_fsdp`",
        way=f"set `{FSDP}enabled=false`", source=ARGUMENTS),
    Law(id="recompute-without-modules", category=WRONG, key=AGAIN + "modules",
        when=lambda recompute: not full(recompute) and not recompute.modules,
        says="selective recompute without modules recomputes `core_attn` silently",
        way=f"name them: `{AGAIN}modules=[core_attn]`, say", source=CONFIG),
    Law(id="recompute-layers-selective", category=CONTRADICTION, key=AGAIN + "method",
        when=lambda recompute: not full(recompute) and (recompute.method or recompute.layers),
        says="`method` and `layers` belong to full recompute", way=f"set `{AGAIN}granularity=full` or null them"),
    Law(id="recompute-of-nothing", category=CONTRADICTION, key=AGAIN + "modules",
        when=_parts_of_nothing, says="recompute of `{module}` in a model without {kind}"),
    Law(id="recompute-up-projection-fsdp", category=WRONG, key=AGAIN + "modules",
        when=_lost_gradient,
        says="under Megatron-FSDP the up-projection of DSA's keys and values loses one of the gradients that it gets in two passes",
        way=f"leave `mla_up_proj` out, or set `{FSDP}enabled=false`", source=MEGATRON_FSDP),
    Law(id="recompute-ungrouped-experts", category=REFUSES, key=AGAIN + "modules",
        when=lambda recompute, moe: "moe_act" in selective(recompute) and not moe.grouped_gemm,
        says="`moe_act` is recomputed only with grouped GEMM", way="set `model.blocks.moe.grouped_gemm=true`",
        source=CONFIG),
    Law(id="recompute-modules-full", category=CONTRADICTION, key=AGAIN + "modules",
        when=lambda recompute: full(recompute) and recompute.modules, says="`modules` belong to selective recompute",
        way=f"set `{AGAIN}modules=[]`"),
    Law(id="recompute-full-without-layers", category=REFUSES, key=AGAIN + "method",
        when=lambda recompute: full(recompute) and not (recompute.method and recompute.layers),
        says="full recompute needs `method` and `layers`", way=f"set `{AGAIN}method=uniform {AGAIN}layers=1`, say",
        source=ARGUMENTS),
    Law(id="recompute-beyond-stage", category=CONTRADICTION, key=AGAIN + "layers",
        when=lambda recompute, plan: full(recompute)
            and recompute.method
            and (recompute.layers or 0) > plan.longest_stage
            and {"longest": plan.longest_stage},
        says="{recompute.layers} layers per group exceed the longest stage of {longest}"),
    Law(id="recompute-groups-mtp", category=REFUSES, key=AGAIN + "layers",
        when=lambda recompute, mtp: full(recompute) and recompute.method == "uniform" and (recompute.layers or 1) > 1,
        says="Megatron recomputes MTP by single layers, and stops in the first step with groups of more",
        way="set it to 1", source="core/transformer/multi_token_prediction.py"),
    Law(
        # It travels with the microbatch's attention mask, of which the second run has another. Ours is kept by each layer.
        id="recompute-shared-top-k",
        category=WRONG,
        key=AGAIN + "granularity",
        when=lambda recompute, dsa, plan: full(recompute)
        and recompute.layers
        and plan.reusing_layers
        and dsa.kernels == "megatron",
        says="stock DSA loses a shared top-k under full recompute",
        way="set `execution.dsa.kernels=fused`, `model.blocks.dsa.full_every=1`, or use selective recompute",
        source="core/transformer/experimental_attention_variant/dsa.py",
    ),
)  # fmt: skip
