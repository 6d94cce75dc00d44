"""Laws on what owns tensors and no place in the pattern: positions, residual streams, n-grams and adapters."""

from collections.abc import Iterator

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import quoted
from nam_megatron.features.lora import Lora, offered, standing
from nam_megatron.features.mhc import DISCARDING, Mhc
from nam_megatron.features.names import Features
from nam_megatron.features.ngram_hash import PRIME, NgramHash
from nam_megatron.features.recompute import Recompute
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.layout import Parallel

YARN, LLAMA, LEARNED = "feature.yarn.factor", "feature.llama_rope.factor", "model.learned_positions"
STREAMS, NGRAMS, ADAPTERS = "feature.mhc.streams", "feature.ngram_hash.", "feature.lora."
NO_YARN, NO_LLAMA = f"set `{YARN}=1.0`", f"set `{LLAMA}=1.0`"
ONE_STREAM = f"set `{STREAMS}=0`, or "
PATTERN, ARGUMENTS = "core/models/hybrid/hybrid_model.py", "training/arguments.py"
SHOWN = "docs/nemo.md"


def _without_rope(recipe: Recipe, plan: Plan) -> bool:
    """Whether no layer turns queries and keys."""
    block = recipe.blocks.attention
    return not plan.kinds & {"attention", "mla", "dsa"} or (block is not None and block.position_embedding == "none")


def _llama_of_nothing(llama_rope: object, recipe: Recipe, plan: Plan) -> bool:
    block = recipe.blocks.attention
    return not plan.kinds & {"mla", "dsa"} and not (block and block.turned)


def _streams_again(mhc: Mhc, recompute: Recompute) -> Iterator[Words]:
    if recompute.granularity == "full":
        yield {"what": "full recompute of layers", "way": f"{ONE_STREAM}selective recompute"}
    if found := sorted(DISCARDING & {*recompute.modules}):
        yield {
            "what": f"recompute of {quoted(found)}",
            "way": f"{ONE_STREAM}leave them out of `feature.recompute.modules`",
        }


def _rows_unshared(ngram_hash: NgramHash, parallel: Parallel) -> Words | None:
    rows = ngram_hash.tables * ngram_hash.buckets
    return {"rows": rows} if rows % parallel.tensor else None


def _no_adapter(plan: Plan) -> dict[str, str]:
    """Modules around which no adapter may stand, and why."""
    return {name: why for block in standing(plan.site) for name, why in block.unadapted.items()}


def _unknown_targets(lora: Lora, plan: Plan) -> Iterator[Words]:
    good = offered(plan.site)
    for name in lora.targets or ():
        if name not in good and name not in _no_adapter(plan):
            yield {"name": name, "good": quoted(good)}


def _refused_targets(lora: Lora, plan: Plan) -> Iterator[Words]:
    bad = _no_adapter(plan)
    for name in lora.targets or ():
        if name in bad:
            yield {"name": name, "why": bad[name], "good": quoted(offered(plan.site))}


def _adapters_over_ranks(lora: Lora, parallel: Parallel) -> Iterator[Words]:
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(parallel, name) > 1:
            yield {"key": f"parallel.{name}"}


def _adapters_beside(lora: Lora, feature: Features) -> Iterator[Words]:
    f = feature
    for other in (f.fp8, f.muon, f.megatron_fsdp, f.cuda_graphs, f.mhc, f.mtp):
        if other is not None:
            off = "set `optim=adamw`" if other is f.muon else f"`~feature.{other.name}` turns it off"
            yield {"name": other.name, "key": f"feature.{other.name}.{other.switch}", "way": off}


LAWS = (
    Law(id="learned-positions-too-few", category=REFUSES, key=LEARNED,
        when=lambda model: model.learned_positions is not None and model.learned_positions < model.seq_length,
        says="{model.learned_positions} positions for a sequence of {model.seq_length}",
        way="give each token of it one", source=ARGUMENTS),
    Law(id="learned-positions-rope", category=CONTRADICTION, key=LEARNED,
        when=lambda model, attention: model.learned_positions is not None and attention.turned,
        says="Megatron has learned positions or RoPE for attention, not both",
        way="set it to null, or `model.blocks.attention.position_embedding=none`"),
    Law(id="learned-positions-mtp", category=REFUSES, key=LEARNED,
        when=lambda model, mtp: model.learned_positions is not None,
        says="Megatron has no MTP beside learned positions", way="set it to null, or MTP's depths to 0",
        source=ARGUMENTS),
    Law(id="streams-interleaved", category=UNTRIED, key=STREAMS,
        when=lambda mhc, parallel: parallel.virtual_pipeline > 1,
        says="residual streams have not been shown to pass through an interleaved pipeline",
        way=ONE_STREAM + "`parallel.virtual_pipeline=1`"),
    Law(id="streams-recompute", category=UNTRIED, key=STREAMS,
        when=_streams_again, title="recompute between residual streams has not been shown to be right",
        says="{what} between residual streams has not been shown to be right",
        way=ONE_STREAM + "selective recompute of other parts"),
    Law(id="streams-graphs", category=OURS, key=STREAMS,
        when=lambda mhc, cuda_graphs: not cuda_graphs.whole,
        says="a CUDA graph of a layer would hold its residual streams, and none was captured yet",
        way=ONE_STREAM + "`feature.cuda_graphs.impl=none`, or on one GPU full_iteration",
        source="nam_megatron/runtime/hyper_connections.py"),
    Law(id="whole-step-naive-streams", category=UNTRIED, key="feature.mhc.kernels",
        when=lambda mhc, cuda_graphs: cuda_graphs.whole and mhc.kernels == "naive",
        says="a graph of the whole step has not been tried with streams in plain torch",
        way="set it to fused, or `feature.cuda_graphs.impl=none`"),
    Law(id="streams-fp8", category=UNTRIED, key=STREAMS,
        when=lambda mhc, fp8: True,
        says="residual streams between FP8 layers have not been shown: no CPU runs FP8, and no GPU has run these",
        way=ONE_STREAM + "`feature.fp8.recipe=none`"),
    Law(id="streams-muon", category=WRONG, key=STREAMS,
        when=lambda mhc, muon: True,
        says="Muon would take the maps of the residual streams, which are fp32, for matrices like others",
        way=ONE_STREAM + "`optim=adamw`", source="core/optimizer/emerging_optimizers.py"),
    Law(id="ngrams-without-buckets", category=MATHS, key=NGRAMS + "buckets",
        when=lambda ngram_hash: not ngram_hash.buckets, says="n-gram embeddings without buckets",
        way="set it to the rows of a hash function"),
    Law(id="ngrams-beyond-hash", category=MATHS, key=NGRAMS + "buckets",
        when=lambda ngram_hash: ngram_hash.buckets > PRIME, says=f"more buckets than the {PRIME} values of the hash",
        way="fewer buckets, more heads"),
    Law(id="ngrams-unshared", category=MATHS, key=NGRAMS + "buckets",
        when=_rows_unshared, says="{rows} rows cannot be shared by {parallel.tensor} tensor ranks",
        way="make it a multiple of `parallel.tensor`"),
    Law(id="ngrams-document-end", category=CONTRADICTION, key=NGRAMS + "document_end",
        when=lambda ngram_hash, model: ngram_hash.document_end is not None
            and ngram_hash.document_end >= model.vocab_size,
        says="token {ngram_hash.document_end} is not among the {model.vocab_size} of the vocabulary",
        way="give the tokenizer's, or null"),
    Law(id="ngrams-mtp-pipeline", category=OURS, key=NGRAMS + "enabled",
        when=lambda ngram_hash, plan, parallel: plan.mtp and parallel.pipeline > 1,
        says="under MTP the last pipeline stage would have n-gram rows of its own, which nothing keeps equal to the first's",
        way="set `parallel.pipeline=1` or `feature.mtp.depths=0`", source="nam_megatron/runtime/ngram_embedding.py"),
    Law(id="ngrams-fsdp", category=OURS, key=NGRAMS + "enabled",
        when=lambda ngram_hash, megatron_fsdp: True,
        says="Megatron-FSDP copies gradients into buffers, and that of the n-grams' table is sparse",
        way="set `feature.megatron_fsdp.enabled=false`",
        source="core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"),
    Law(id="llama-scaling-latents", category=REFUSES, key=LLAMA,
        when=lambda llama_rope, plan: plan.kinds & {"mla", "dsa"}, says="MLA's RoPE is scaled by YaRN or not at all",
        way=f"{NO_LLAMA}, or `{YARN}`", source="core/transformer/multi_latent_attention.py"),
    Law(id="llama-scaling-of-nothing", category=CONTRADICTION, key=LLAMA,
        when=_llama_of_nothing, says="no layer has RoPE, whose angles this would scale", way=NO_LLAMA),
    Law(id="llama-scaling-yarn", category=CONTRADICTION, key=LLAMA,
        when=lambda llama_rope, yarn: True, says="YaRN scales these angles already",
        way=f"{NO_LLAMA}, or `{YARN}=1.0`"),
    Law(id="yarn-of-nothing", category=CONTRADICTION, key=YARN,
        when=lambda yarn, recipe, plan: _without_rope(recipe, plan), says="no layer has RoPE, which YaRN would change",
        way=NO_YARN),
    Law(id="yarn-part-of-a-head", category=WRONG, key="model.blocks.attention.rotary_percent",
        when=lambda yarn, attention, recipe, plan: not _without_rope(recipe, plan) and attention.rotary_percent != 1,
        says="Megatron's YaRN turns whole heads, whatever the share", way=f"set it to 1.0, or {NO_YARN}",
        source=PATTERN),
    Law(id="yarn-mtp", category=REFUSES, key=YARN,
        when=lambda yarn, attention, mtp: True, says="Megatron has MTP beside plain RoPE or none, not beside YaRN",
        way=f"{NO_YARN}, or MTP's depths to 0", source=ARGUMENTS),
    Law(id="yarn-ramp-backwards", category=MATHS, key="feature.yarn.beta_fast",
        when=lambda yarn: yarn.beta_fast < yarn.beta_slow,
        says="`beta_fast` {yarn.beta_fast:g} is below `beta_slow` {yarn.beta_slow:g}: the ramp would run backwards",
        way="it is the larger of the two, or the same"),
    Law(id="adapters-without-model", category=CONTRADICTION, key="schedule.pretrained",
        when=lambda lora, schedule: schedule.pretrained is None,
        says="adapters stand on a pretrained model, and none is named", way="give the folder of its checkpoints"),
    Law(id="adapters-on-kind", category=OURS, key=ADAPTERS + "rank",
        when=lambda lora, plan: ({"title": block.title} for block in standing(plan.site) if not block.adapted),
        says="adapters have not been shown on {title}",
        way="set it to 0, or another kind in its place", source=SHOWN),
    Law(id="adapters-on-nothing", category=CONTRADICTION, key=ADAPTERS + "targets",
        when=lambda lora, plan: lora.targets == () and {"good": quoted(offered(plan.site))}, says="adapters on nothing",
        way="null, or of {good}"),
    Law(id="adapters-on-unknown", category=CONTRADICTION, key=ADAPTERS + "targets",
        when=_unknown_targets, says="no kind of this model has a module `{name}` that could have an adapter",
        way="of {good}"),
    Law(id="adapters-on-what-stays", category=OURS, key=ADAPTERS + "targets",
        when=_refused_targets, title="a module gets no adapter, whose kind says why",
        says="`{name}` gets no adapter: {why}", way="of {good}", source=SHOWN),
    Law(id="adapters-over-ranks", category=OURS, key="parallel.tensor",
        when=_adapters_over_ranks, says="adapters have been shown under data parallelism alone", way="set it to 1",
        source=SHOWN),
    Law(id="adapters-beside-feature", category=OURS, key=ADAPTERS + "rank",
        when=_adapters_beside, says="adapters have not been shown beside `{name}`", way="turn it off", source=SHOWN),
    Law(id="adapters-fused-gradients", category=REFUSES, key="precision.fused_grad_accumulation",
        when=lambda lora, precision: precision.fused_grad_accumulation,
        says="weights that stay have no buffer that a gradient would be added to", way="set it to false",
        source="core/tensor_parallel/layers.py"),
    Law(id="adapters-expert-bias", category=WRONG, key="model.blocks.moe.expert_bias_update_rate",
        when=lambda lora, moe: moe.expert_bias_update_rate,
        says="the experts' bias would move while all weights stay, and checkpoints of adapters do not hold it",
        way="set it to 0", source="core/transformer/moe/router.py"),
    Law(id="adapters-indexer-loss", category=CONTRADICTION, key="model.blocks.dsa.indexer_loss_coeff",
        when=lambda lora, dsa: dsa.indexer_loss_coeff,
        says="the indexer stays as it is, and its loss would teach nothing", way="set it to 0"),
)  # fmt: skip
