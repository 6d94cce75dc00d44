"""Recipe -> Site: what kinds, features and sections may know of it."""

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.recipe.recipe import Recipe
from nam_megatron.words.site import Layer, Site


def site(
    recipe: Recipe,
    kinds: frozenset[str],
    layers: tuple[Layer, ...] = (),
    mtp: tuple[str, ...] = (),
    index_reuse: tuple[int, int] | None = None,
    pattern: str = "",
) -> Site:
    """Where everything of a recipe stands. kinds: of its layers. The rest: of its plan (plan.py), nothing before there is one."""
    m, p, o, s, f = recipe.model, recipe.parallel, recipe.precision, recipe.schedule, recipe.feature
    on = {feature.name for feature in f.all() if feature.on}
    again = f.recompute if f.recompute and f.recompute.on else None
    return Site(
        kinds=kinds,
        letters=m.pattern,
        pattern=pattern,
        layers=layers,
        mtp=mtp,
        mtp_depths=f.mtp.depths if f.mtp else 0,
        index_reuse=index_reuse,
        blocks=recipe.blocks,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        seq_length=m.seq_length,
        vocab_size=m.vocab_size,
        tied_embeddings=m.tied_embeddings,
        normalization=m.normalization,
        norm_epsilon=m.norm_epsilon,
        activation=m.activation,
        linear_bias=m.linear_bias,
        learned_positions=m.learned_positions,
        rotary_base=m.rotary_base,
        yarn_length=f.yarn.original_length if f.yarn and f.yarn.on else 0,
        llama_rope="llama_rope" in on,
        tensor=p.tensor,
        sequence=p.sequence,
        pipeline=p.pipeline,
        context=p.context,
        gathers_keys=any(KINDS[kind].gathers_keys for kind in kinds),
        expert=p.expert,
        expert_tensor=p.expert_tensor,
        data_parallel=recipe.data_parallel,
        expert_data_parallel=recipe.expert_data_parallel,
        sharded=f.distributed_optimizer.enabled,
        overlap_grad_reduce=f.distributed_optimizer.overlap_grad_reduce,
        fsdp="megatron_fsdp" in on,
        micro_batch_size=s.micro_batch_size,
        global_batch_size=s.global_batch_size,
        decays=recipe.optim.decay != "constant",
        decay_steps=s.decay_steps,
        eval_steps=s.eval_steps,
        save=s.save is not None,
        fp8="fp8" in on,
        bf16_parts=frozenset(f.fp8.bf16_parts) if f.fp8 and f.fp8.on else frozenset(),
        grad_reduce=o.grad_reduce,
        fused_grad_accumulation=o.fused_grad_accumulation,
        cross_entropy=o.cross_entropy,
        deterministic=o.deterministic,
        recompute=frozenset(again.modules) if again and again.granularity == "selective" else frozenset(),
        recomputes_layers=again is not None and again.granularity == "full",
        whole_step=f.cuda_graphs is not None and f.cuda_graphs.whole,
        muon="muon" in on,
        lora="lora" in on,
    )
