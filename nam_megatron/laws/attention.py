"""Laws on attention: its heads, windows and positions, MLA and DSA."""

from collections.abc import Iterator
from math import isclose

from nam_megatron.blocks.attention.block import Attention
from nam_megatron.blocks.dsa.block import TILE, Dsa, computes
from nam_megatron.blocks.mla.block import WIDTHS, Mla
from nam_megatron.compile.plan import Plan
from nam_megatron.features.names import Features
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.laws.sizes import UNEVEN, fits, uneven
from nam_megatron.recipe.layout import Parallel
from nam_megatron.recipe.model import Model

GQA, MLA, DSA = "model.blocks.attention.", "model.blocks.mla.", "model.blocks.dsa."
MLA_HOW, DSA_HOW = "execution.mla.", "execution.dsa."
CONFIG = "core/transformer/transformer_config.py"
TO_NULL = "set it to null"


def _windows_of_few(attention: Attention, plan: Plan) -> Words | None:
    every, have = attention.unwindowed_every or 0, len(plan.numbers("attention"))
    return {"every": every, "have": have} if every > have else None


def _odd_turn(attention: Attention) -> Words | None:
    """Of a share of a head that is no whole number of pairs of columns, which Megatron would round."""
    wanted = attention.head_dim * attention.rotary_percent
    whole = attention.turned % 2 == 0 and isclose(attention.turned, wanted, rel_tol=1e-12)
    if attention.position_embedding != "rope" or whole:
        return None
    short = f"{wanted:g}"
    words: dict[str, object] = {"columns": short if float(short) == wanted else repr(wanted)}
    if attention.rotary_percent == 1:
        return words | {"key": GQA + "head_dim", "way": ""}
    return words | {"way": fits(attention.head_dim, wanted)}


def _ours(plan: Plan) -> Iterator[Words]:
    """The kinds whose projections to latents are ours: MLA's, and those of DSA, which stands on MLA's settings."""
    blocks = plan.recipe.blocks
    for kind, title, block in (("dsa", "DSA", blocks.dsa), ("mla", "MLA", blocks.mla)):
        if block and kind in plan.kinds and block.kernels != "megatron":
            key = f"execution.{kind}.kernels"
            yield {"title": title, "key": key}


def _uneven_queries(dsa: Dsa, model: Model, parallel: Parallel) -> Words | None:
    parts = dsa.query_pieces * (2 * parallel.context if parallel.context > 1 else 1)
    tile = TILE if dsa.kernels == "fused" else 1
    if dsa.kernels == "megatron" or parts == 1 or model.seq_length % (parts * tile) == 0:
        return None
    what = f"DSA's fused kernels take queries by {tile}" if tile > 1 else "DSA takes queries in equal parts"
    words: dict[str, object] = {"what": what, "parts": parts, "multiple": parts * tile}
    if dsa.query_pieces > 1:
        return words | {
            "key": DSA_HOW + "query_pieces",
            "way": "another number of pieces; of a sequence a multiple of {multiple:,} fits",
        }
    return words


def _odd_widths(dsa: Dsa, mla: Mla) -> Iterator[Words]:
    widths = {DSA + "indexer_head_dim": dsa.indexer_head_dim, MLA + "q_lora_rank": mla.q_lora_rank or WIDTHS[0]}
    widths |= {MLA + "kv_lora_rank": mla.kv_lora_rank, MLA + "qk_rope_head_dim": mla.qk_rope_head_dim}
    for key, width in widths.items():
        served = WIDTHS[1:] if key == MLA + "qk_rope_head_dim" else WIDTHS  # RoPE turns halves
        if dsa.kernels == "fused" and width not in served:
            yield {"key": key, "served": served, "width": width}


def _indexer_untrained(dsa: Dsa, plan: Plan, feature: Features) -> bool:
    """Whether no gradient comes for an indexer whose reduction others wait for."""
    computed = any(layer.kind == "dsa" and computes(layer) for layer in plan.layers)
    waits = feature.distributed_optimizer.overlap_grad_reduce and not feature.megatron_fsdp
    return computed and not dsa.indexer_loss_coeff and not feature.lora and waits


LAWS = (
    Law(id="query-groups-uneven", category=REFUSES, key="model.num_attention_heads",
        when=lambda attention, model: uneven("attention heads", model.num_attention_heads, attention.query_groups, GQA + "query_groups"),
        title="the attention heads are not a multiple of the key/value heads", says=UNEVEN, source=CONFIG),
    Law(id="query-groups-tensor", category=REFUSES, key=GQA + "query_groups",
        when=lambda attention, parallel: attention.query_groups % parallel.tensor
            and parallel.tensor % attention.query_groups,
        says="{attention.query_groups} query groups are neither a multiple nor a divisor of tensor parallel size {parallel.tensor}",
        source=CONFIG),
    Law(id="window-beyond-sequence", category=CONTRADICTION, key=GQA + "window",
        when=lambda attention, model: attention.window is not None and attention.window >= model.seq_length,
        says="a window of {attention.window} tokens limits nothing in {model.seq_length}",
        way=TO_NULL),
    Law(id="window-context", category=REFUSES, key=GQA + "window",
        when=lambda attention, parallel: attention.window and parallel.context > 1,
        says="Transformer Engine's ring of context ranks takes no window",
        way="set `parallel.context=1`, or it to null",
        source="Transformer Engine 2.20, pytorch/attention/dot_product_attention/context_parallel.py"),
    Law(id="sinks-context", category=UNTRIED, key=GQA + "sinks",
        when=lambda attention, parallel: attention.sinks and parallel.context > 1,
        says="sinks have not been tried with context ranks, whose ring Transformer Engine does not give them",
        way="set `parallel.context=1`"),
    Law(id="unwindowed-without-window", category=CONTRADICTION, key=GQA + "unwindowed_every",
        when=lambda attention: attention.unwindowed_every and not attention.window,
        says="there is no window to leave out", way=TO_NULL),
    Law(id="unwindowed-beyond-layers", category=CONTRADICTION, key=GQA + "unwindowed_every",
        when=_windows_of_few, says="there is no {every}-th of {have} attention layers", way="make it smaller, or null"),
    Law(id="unwindowed-mtp", category=WRONG, key=GQA + "unwindowed_every",
        when=lambda attention, mtp: attention.unwindowed_every,
        says="Megatron counts the layers of MTP from 1 again, and would give them the first layers' windows",
        way="set it to null, or `feature.mtp.depths=0`", source="core/transformer/multi_token_prediction.py"),
    Law(id="qkv-bias-twice", category=CONTRADICTION, key=GQA + "qkv_bias",
        when=lambda attention, model: attention.qkv_bias and model.linear_bias,
        says="`model.linear_bias` gives these biases already", way="set it to false"),
    Law(id="rope-share-without-rope", category=CONTRADICTION, key=GQA + "rotary_percent",
        when=lambda attention: attention.position_embedding == "none" and attention.rotary_percent != 1,
        says="there is no RoPE to turn a part of a head", way="set it to 1.0"),
    Law(id="rope-share-odd", category=WRONG, key=GQA + "rotary_percent",
        when=_odd_turn, says="RoPE turns an even number of columns of a head, not {columns}",
        way="choose a share that turns whole pairs", source="core/models/common/embeddings/rotary_pos_embedding.py"),
    Law(id="latents-fp8", category=OURS, key=MLA_HOW + "kernels",
        when=lambda plan, fp8: not fp8.keeps("latents") and _ours(plan),
        says="our {title} projects to latents and from them in bf16, not in FP8",
        way="put `latents` into `feature.fp8.bf16_parts`, or set `{key}=megatron`",
        source="nam_megatron/blocks/mla/README.md"),
    Law(id="latents-norm", category=OURS, key=MLA_HOW + "kernels",
        when=lambda plan, model: model.normalization != "RMSNorm" and _ours(plan),
        says="our {title} has RMSNorm in its projections, not {model.normalization}",
        way="set `{key}=megatron`", source="nam_megatron/blocks/mla/README.md"),
    Law(id="latents-without-query-latent", category=OURS, key=MLA_HOW + "kernels",
        when=lambda plan, mla: mla.q_lora_rank is None and _ours(plan),
        says="our {title} projects queries from a latent", way="set `{key}=megatron`",
        source="nam_megatron/blocks/mla/README.md"),
    Law(id="latents-centred-norms", category=OURS, key=MLA_HOW + "kernels",
        when=lambda plan, model: model.zero_centered_norms and _ours(plan),
        says="our {title} has the weights of its norms as they are, not centred at zero",
        way="set `{key}=megatron`", source="nam_megatron/blocks/mla/README.md"),
    Law(id="mla-rope-odd", category=MATHS, key=MLA + "qk_rope_head_dim",
        when=lambda mla: mla.qk_rope_head_dim % 2, says="RoPE needs an even width, not {mla.qk_rope_head_dim}"),
    Law(id="mla-tensor-without-sequence", category=WRONG, key="parallel.sequence",
        when=lambda mla, parallel: parallel.tensor > 1 and not parallel.sequence,
        says="MLA under tensor parallelism gets wrong gradients without sequence parallelism",
        way="set `parallel.sequence=true`",
        source="measured on 0.19.2: the latent norms' gradients come out multiplied by the tensor size"),
    Law(id="dsa-query-pieces", category=REFUSES, key=DSA_HOW + "query_pieces",
        when=lambda dsa: dsa.kernels == "megatron" and dsa.query_pieces > 1,
        says="Megatron's DSA takes all queries at once", way="set it to 1",
        source="core/transformer/experimental_attention_variant/dsa.py"),
    Law(id="dsa-queries-uneven", category=OURS, key="model.seq_length",
        when=_uneven_queries, title="DSA's queries cannot be cut into the parts that are asked for",
        says="{what}, and those of a sequence are cut into {parts} parts", way="a multiple of {multiple:,} fits",
        source="nam_megatron/blocks/dsa/README.md"),
    Law(id="dsa-kernel-widths", category=OURS, key=DSA + "indexer_head_dim",
        when=_odd_widths, says="DSA's fused kernels take widths of {served}, not {width}",
        way=f"set `{DSA_HOW}kernels=megatron`", source="nam_megatron/blocks/dsa/README.md"),
    Law(id="dsa-without-query-latent", category=REFUSES, key=MLA + "q_lora_rank",
        when=lambda dsa, mla: mla.q_lora_rank is None, says="DSA's indexer reads the query latent",
        way="give it a width, or let `model.letters.A` be `mla`",
        source="core/transformer/experimental_attention_variant/dsa.py"),
    Law(id="dsa-top-k-above-sequence", category=MATHS, key=DSA + "top_k",
        when=lambda dsa, model: dsa.top_k > model.seq_length,
        says="top-k {dsa.top_k} exceeds the sequence of {model.seq_length}"),
    Law(id="dsa-indexer-below-rope", category=MATHS, key=DSA + "indexer_head_dim",
        when=lambda dsa, mla: dsa.indexer_head_dim < mla.qk_rope_head_dim,
        says="indexer heads of {dsa.indexer_head_dim} cannot hold the {mla.qk_rope_head_dim} RoPE dimensions"),
    Law(id="dsa-indexer-untrained-overlap", category=REFUSES, key=DSA + "indexer_loss_coeff",
        when=_indexer_untrained,
        says="without its loss the indexer has no gradient, for which the overlapped reduction waits: Megatron stops in step 2",
        way="0.001, say, or set `feature.distributed_optimizer.overlap_grad_reduce=false` and "
            "`feature.distributed_optimizer.overlap_param_gather=false`",
        source="core/distributed/param_and_grad_buffer.py"),
    Law(id="dsa-bias", category=REFUSES, key="model.linear_bias",
        when=lambda dsa, model: model.linear_bias, says="DSA has no linear bias", way="set `model.linear_bias=false`",
        source=CONFIG),
)  # fmt: skip
