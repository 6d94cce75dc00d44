"""Recipe -> Site: what kinds, features and sections may know of it."""

from dataclasses import fields
from typing import Any

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.recipe.recipe import Recipe
from nam_megatron.words.site import Layer, Site

# Of a Site, what is a recipe key by that name, and what it holds. These have another meaning there.
SAME = {field.name for field in fields(Site)} - {"letters", "pattern", "blocks", "save"}


def site(
    recipe: Recipe,
    kinds: frozenset[str],
    layers: tuple[Layer, ...] = (),
    mtp: tuple[str, ...] = (),
    index_reuse: tuple[int, int] | None = None,
    pattern: str = "",
) -> Site:
    """Where everything of a recipe stands. kinds: of its layers. The rest: of its plan (plan.py), nothing before there is one."""
    m, p, s, f = recipe.model, recipe.parallel, recipe.schedule, recipe.feature
    on = {feature.name for feature in f.all() if feature.on}
    again = f.recompute if f.recompute and f.recompute.on else None
    same: dict[str, Any] = {
        name: getattr(part, name)
        for part in (m, p, s, recipe.precision)
        for name in SAME & type(part).model_fields.keys()
    }
    return Site(
        **same,
        kinds=kinds,
        letters=m.pattern + (f.mtp.pattern if f.mtp and f.mtp.on else ""),
        pattern=pattern,
        layers=layers,
        mtp=mtp,
        mtp_depths=f.mtp.depths if f.mtp else 0,
        index_reuse=index_reuse,
        blocks=recipe.blocks,
        yarn_length=f.yarn.original_length if f.yarn and f.yarn.on else 0,
        llama_rope="llama_rope" in on,
        gathers_keys=any(KINDS[kind].gathers_keys for kind in kinds),
        data_parallel=recipe.data_parallel,
        expert_data_parallel=recipe.expert_data_parallel,
        sharded=f.distributed_optimizer.enabled,
        overlap_grad_reduce=f.distributed_optimizer.overlap_grad_reduce,
        fsdp="megatron_fsdp" in on,
        decays=recipe.optim.decay != "constant",
        save=s.save is not None,
        fp8="fp8" in on,
        bf16_parts=frozenset(f.fp8.bf16_parts) if f.fp8 and f.fp8.on else frozenset(),
        recompute=frozenset(again.modules) if again and again.granularity == "selective" else frozenset(),
        recomputes_layers=again is not None and again.granularity == "full",
        whole_step=f.cuda_graphs is not None and f.cuda_graphs.whole,
        muon="muon" in on,
        gpu=recipe.cluster.processor == "gpu",
        lora="lora" in on,
    )
