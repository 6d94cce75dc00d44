"""Laws on state space and recurrent layers: Mamba-2, Mamba-3, M2RNN and gated delta nets."""

from collections.abc import Callable, Iterator
from math import isclose

from nam_megatron.blocks import FP8_COLUMNS, needless
from nam_megatron.blocks.gdn.block import Gdn
from nam_megatron.blocks.m2rnn.block import M2Rnn
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import quoted
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.laws.sizes import FP8_ROW, SHARED, UNEVEN, fits, uneven, unshared
from nam_megatron.recipe.layout import Parallel
from nam_megatron.recipe.model import Model

MAMBA2, MAMBA3, M2RNN, GDN = (f"model.blocks.{kind}." for kind in ("mamba2", "mamba3", "m2rnn", "gdn"))
MAMBA2_HOW, MAMBA3_HOW, M2RNN_HOW = (f"execution.{kind}." for kind in ("mamba2", "mamba3", "m2rnn"))
MIXER, DELTA_NET = "core/ssm/mamba_mixer.py", "core/ssm/gated_delta_net/gdn.py"
CONTEXT = "core/ssm/mamba_context_parallel.py"
OFF = "set it to false"
ALIGNED_HEADS = "or make the heads of a GPU a multiple of 8"
ANY_LENGTH = f"`{MAMBA3_HOW}kernels=naive`, which runs any length, slowly"
NO_BF16_RATES = "feature.fp8.bf16_parts"


# Mamba-2 --------------------------------------------------------------------------------------------------------------


def _groups_over_context(mamba2: Mamba2, parallel: Parallel) -> Words | None:
    """Megatron repeats a group whose heads are spread over context ranks."""
    of_rank, context = mamba2.groups // parallel.tensor, parallel.context
    return {"of_rank": of_rank} if of_rank and max(of_rank, context) % min(of_rank, context) else None


def _odd_strides(mamba2: Mamba2, parallel: Parallel) -> Words | None:
    ranks = parallel.tensor * parallel.context
    groups = max(mamba2.groups // ranks, 1)
    width = mamba2.heads // ranks * (2 * mamba2.head_dim + 1) + 2 * groups * mamba2.state_dim
    if not mamba2.strided or mamba2.padded_projection or width % 8 == 0:
        return None
    words: dict[str, object] = {"width": width}
    both = f"set it and `{MAMBA2_HOW}strided_norm` to false, {ALIGNED_HEADS}"
    return words | {"way": both} if mamba2.strided_norm else words


def _mamba2_without_fp8(mamba2: Mamba2, parallel: Parallel, fp8: object) -> Words | None:
    multiple = FP8_COLUMNS * parallel.tensor
    if mamba2.padded_projection or mamba2.in_proj_width % multiple == 0:
        return None
    words = [f"{MAMBA2_HOW}padded_projection=true", *([] if mamba2.strided else [f"{MAMBA2_HOW}strided=true"])]
    padded = f", or set {quoted(words)}" if parallel.context == 1 else ""
    return {"width": mamba2.in_proj_width, "multiple": multiple, "or_padded": padded}


# Rows of zeros behind a packed projection -----------------------------------------------------------------------------


def _padded(plan: Plan) -> Iterator[tuple[str, int, int, bool]]:
    """(kind, its columns, what its GEMMs want multiples of, whether they have it) of each kind that is padded."""
    tensor = plan.recipe.parallel.tensor
    for kind in ("mamba2", "m2rnn"):
        block = getattr(plan.recipe.blocks, kind)
        if block and block.padded_projection:
            multiple = block.columns(plan.site)
            yield kind, block.in_proj_width, multiple, needless(block.in_proj_width, multiple, tensor)


def _needless_padding(plan: Plan, parallel: Parallel) -> Iterator[Words]:
    for kind, columns, multiple, none in _padded(plan):
        if none:
            yield {"columns": columns // parallel.tensor, "multiple": multiple, "key": _padding(kind)}


def _padding(kind: str) -> str:
    return f"execution.{kind}.padded_projection"


def padded_where(asked: Callable[[Plan], object]) -> Callable[[Plan], Iterator[Words]]:
    """A predicate of kinds that have a use for rows of zeros, where the plan asks for something else, too."""

    def when(plan: Plan) -> Iterator[Words]:
        found = _padded(plan) if asked(plan) else ()
        return ({"key": _padding(kind)} for kind, _, _, none in found if not none)

    return when


def _rounded_gradients(plan: Plan) -> bool:
    precision = plan.recipe.precision
    return precision.grad_reduce == "bf16" and precision.fused_grad_accumulation


def _captured(plan: Plan) -> bool:
    graphs = plan.recipe.feature.cuda_graphs
    return graphs is not None and "mamba" in graphs.modules


def _adapted(plan: Plan) -> bool:
    lora = plan.recipe.feature.lora
    return lora is not None and "in_proj" in lora.modules(plan.site)


def _gathered_fp8(plan: Plan) -> bool:
    fp8 = plan.recipe.feature.fp8
    return fp8 is not None and fp8.param_gather


def _useful(mamba2: Mamba2, plan: Plan) -> bool:
    """Whether Mamba-2's projection is padded and has a use for it."""
    return any(kind == "mamba2" and not none for kind, _, _, none in _padded(plan))


# Mamba-3 --------------------------------------------------------------------------------------------------------------


def _odd_pieces(mamba3: Mamba3, parallel: Parallel) -> Words | None:
    ranks = parallel.tensor * parallel.context
    own = mamba3.groups // ranks
    if mamba3.groups % ranks or own % mamba3.head_pieces == 0:
        return None
    fit = ", ".join(str(n) for n in range(1, own + 1) if not own % n)
    return {"own": own, "fit": fit}


def _odd_share(mamba3: Mamba3) -> Words | None:
    wanted = mamba3.state_dim * mamba3.rope_fraction
    if mamba3.rope_fraction > 1 or isclose(wanted, 2 * mamba3.angles, rel_tol=1e-12):
        return None
    return {"wanted": wanted, "way": fits(mamba3.state_dim, wanted)}


def _mamba3_without_fp8(mamba3: Mamba3, plan: Plan, parallel: Parallel, fp8: object) -> Words | None:
    rates = 3 * mamba3.heads + mamba3.angles
    width = mamba3.in_proj_width - (rates if mamba3.rates_apart(plan.site) else 0)
    if width // parallel.tensor % FP8_ROW == 0:
        return None
    return {"width": width, "or_whole": ", or `parallel.tensor=1`" if width % FP8_ROW == 0 else ""}


def rates_where(asked: Callable[..., object]) -> Callable[[Mamba3, Plan], Words | None]:
    """A predicate of a projection in two precisions, where the plan asks for something else, too."""

    def when(mamba3: Mamba3, plan: Plan) -> Words | None:
        if not mamba3.rates_apart(plan.site) or not asked(plan):
            return None
        narrow = mamba3.in_proj_width // plan.recipe.parallel.tensor % FP8_ROW
        return {"way": "set `feature.fp8.recipe=none`"} if narrow else {}

    return when


def _long_sample(mamba3: Mamba3, model: Model, parallel: Parallel) -> Words | None:
    """The kernels count B's and C's elements of one sample, of the groups that are scanned at once, in int32."""
    of_rank = mamba3.groups // (parallel.tensor * parallel.context)
    wide = max(1, of_rank // mamba3.head_pieces) * mamba3.mimo_rank * mamba3.state_dim
    if mamba3.kernels != "fused" or model.seq_length * wide < 2**31:
        return None
    words: dict[str, object] = {"most": 2**31 // wide}
    return (
        words | {"way": f"more `{MAMBA3_HOW}head_pieces`, or {ANY_LENGTH}"} if mamba3.head_pieces < of_rank else words
    )


def _kept_by_naive(mamba3: Mamba3) -> Iterator[Words]:
    kept = {
        "keep_states": "the state after each token: there are no chunks",
        "keep_prepared": "all that autograd needs",
    }
    for name, why in kept.items():
        if mamba3.kernels == "naive" and getattr(mamba3, name):
            yield {"key": MAMBA3_HOW + name, "why": why}


def _kernel_sizes(block: Mamba3 | M2Rnn) -> Iterator[Words]:
    return ({"key": problem.key, "what": problem.message, "way": problem.hint or ""} for problem in block.unserved())


# M2RNN and gated delta net --------------------------------------------------------------------------------------------


def _m2rnn_without_fp8(m2rnn: M2Rnn, plan: Plan, parallel: Parallel) -> bool:
    multiple = m2rnn.columns(plan.site)
    wide = m2rnn.in_proj_width % (multiple * parallel.tensor)
    return not m2rnn.padded_projection and multiple == FP8_COLUMNS and wide > 0


def _gdn_without_fp8(gdn: Gdn, parallel: Parallel, fp8: object) -> Words | None:
    columns = gdn.in_proj_width // parallel.tensor
    return {"columns": columns} if columns % FP8_ROW else None


def _blockwise(plan: Plan) -> bool:
    fp8 = plan.recipe.feature.fp8
    return fp8 is not None and fp8.recipe == "blockwise"


LAWS = (
    Law(id="mamba2-heads-uneven", category=REFUSES, key=MAMBA2 + "heads",
        when=lambda mamba2: uneven("Mamba-2 heads", mamba2.heads, mamba2.groups, MAMBA2 + "groups"),
        title="Mamba-2's heads are not a multiple of its groups", says=UNEVEN, source=MIXER),
    Law(id="mamba2-heads-unshared", category=REFUSES, key=MAMBA2 + "heads",
        when=lambda mamba2, parallel: unshared("Mamba-2 heads", mamba2.heads, parallel),
        title="Mamba-2's heads are not a multiple of the ranks that share them", says=UNEVEN, way=SHARED,
        source=CONTEXT),
    Law(id="mamba2-groups-uneven", category=REFUSES, key=MAMBA2 + "groups",
        when=lambda mamba2, parallel: uneven("Mamba-2 groups", mamba2.groups, parallel.tensor, "parallel.tensor"),
        title="Mamba-2's groups are not a multiple of `parallel.tensor`", says=UNEVEN, way=SHARED, source=MIXER),
    Law(id="mamba2-groups-context", category=REFUSES, key=MAMBA2 + "groups",
        when=_groups_over_context,
        says="{of_rank} groups of Mamba-2 on a tensor rank are neither spread over {parallel.context} context ranks nor repeated",
        way="one of the two numbers has to divide the other", source=CONTEXT),
    Law(id="mamba2-strides-unaligned", category=REFUSES, key=MAMBA2_HOW + "strided",
        when=_odd_strides,
        says="causal-conv1d wants strides that 8 divides, and the projection has {width} columns on each GPU",
        way=f"{OFF}, {ALIGNED_HEADS}", source="causal-conv1d 1.7.0, causal_conv1d.cpp"),
    Law(id="mamba2-projection-fp8", category=REFUSES, key=MAMBA2 + "heads",
        when=_mamba2_without_fp8,
        says="Mamba-2's input projection is {width} / tensor {parallel.tensor} wide, which 16 does not divide: no FP8 GEMM",
        way="choose heads that make it a multiple of {multiple}{or_padded}", source=MIXER),
    Law(id="padding-needless", category=CONTRADICTION, key=MAMBA2_HOW + "padded_projection",
        when=_needless_padding,
        says="the projection has {columns:,} columns on each GPU, which {multiple} divides: there is nothing to pad",
        way=OFF),
    Law(id="padding-fp8-weights", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=padded_where(_gathered_fp8),
        says="weights that are held in FP8 have one scale, and a copy with rows of zeros would need another",
        way=f"{OFF}, or `feature.fp8.param_gather=false`", source="nam_megatron/runtime/aligned.py"),
    Law(id="padding-fsdp", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=padded_where(lambda plan: plan.recipe.feature.megatron_fsdp),
        says="an FSDP has weights, and buffers of their gradients, only while a layer runs", way=OFF,
        source="nam_megatron/runtime/aligned.py"),
    Law(id="padding-bf16-gradients", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=padded_where(_rounded_gradients),
        says="each microbatch's gradient would be rounded to bf16 before it is added to a buffer of bf16", way=OFF,
        source="nam_megatron/runtime/aligned.py"),
    Law(id="padding-graphs", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=padded_where(_captured),
        says="a CUDA graph of a layer would hold the padded weight and its gradient, and none was captured yet",
        way=OFF, source="nam_megatron/runtime/aligned.py"),
    Law(id="padding-adapters", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=padded_where(_adapted), says="an adapter's output has no columns behind the projection's own", way=OFF,
        source="nam_megatron/runtime/aligned.py"),
    Law(id="mamba2-padding-unstrided", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=lambda mamba2, plan: _useful(mamba2, plan) and not mamba2.strided,
        says="Megatron's mixer cuts the projection into its parts, and has none for columns of zeros",
        way=f"{OFF}, or `{MAMBA2_HOW}strided=true`", source=MIXER),
    Law(id="mamba2-padding-context", category=OURS, key=MAMBA2_HOW + "padded_projection",
        when=lambda mamba2, plan, parallel: _useful(mamba2, plan) and parallel.context > 1,
        says="context ranks exchange the projection's parts, and columns of zeros are none", way=OFF, source=CONTEXT),
    Law(id="mamba2-norm-unstrided", category=OURS, key=MAMBA2_HOW + "strided_norm",
        when=lambda mamba2: mamba2.strided_norm and not mamba2.strided,
        says="only the strided mixer has a norm that reads strides", way=f"{OFF}, or `{MAMBA2_HOW}strided=true`",
        source="nam_megatron/blocks/mamba2/layer.py"),
    Law(id="mamba2-norm-context", category=OURS, key=MAMBA2_HOW + "strided_norm",
        when=lambda mamba2, parallel: mamba2.strided_norm and parallel.context > 1,
        says="context ranks exchange the scan's output before its norm, which copies it", way=OFF, source=CONTEXT),
    Law(id="mamba3-heads-uneven", category=MATHS, key=MAMBA3 + "heads",
        when=lambda mamba3: uneven("Mamba-3 heads", mamba3.heads, mamba3.groups, MAMBA3 + "groups"),
        title="Mamba-3's heads are not a multiple of its groups", says=UNEVEN),
    Law(id="mamba3-heads-unshared", category=MATHS, key=MAMBA3 + "heads",
        when=lambda mamba3, parallel: unshared("Mamba-3 heads", mamba3.heads, parallel),
        title="Mamba-3's heads are not a multiple of the ranks that share them", says=UNEVEN, way=SHARED),
    Law(id="mamba3-groups-unshared", category=MATHS, key=MAMBA3 + "groups",
        when=lambda mamba3, parallel: unshared("Mamba-3 groups", mamba3.groups, parallel),
        title="Mamba-3's groups are not a multiple of the ranks that share them", says=UNEVEN, way=SHARED),
    Law(id="mamba3-head-pieces", category=MATHS, key=MAMBA3_HOW + "head_pieces",
        when=_odd_pieces, says="{mamba3.head_pieces} pieces of the {own} groups of heads that a rank has",
        way="there may be {fit}"),
    Law(id="mamba3-angles-uneven", category=MATHS, key=MAMBA3 + "rope_fraction",
        when=lambda mamba3, parallel: uneven("Mamba-3 angles", mamba3.angles, parallel.tensor, "parallel.tensor"),
        title="Mamba-3's angles are not a multiple of `parallel.tensor`", says=UNEVEN, way=SHARED),
    Law(id="mamba3-state-odd", category=MATHS, key=MAMBA3 + "state_dim",
        when=lambda mamba3: mamba3.state_dim % 2,
        says="angles turn pairs of columns, and a state has {mamba3.state_dim}"),
    Law(id="mamba3-share-above-one", category=MATHS, key=MAMBA3 + "rope_fraction",
        when=lambda mamba3: mamba3.rope_fraction > 1, says="rope_fraction {mamba3.rope_fraction} is above 1",
        way="1.0 turns all columns"),
    Law(id="mamba3-share-odd", category=MATHS, key=MAMBA3 + "rope_fraction",
        when=_odd_share,
        says="angles turn pairs of columns, and rope_fraction {mamba3.rope_fraction} of {mamba3.state_dim} is {wanted:.6g}",
        way="choose a share that turns whole pairs"),
    Law(id="mamba3-projection-fp8", category=REFUSES, key=MAMBA3 + "heads",
        when=_mamba3_without_fp8,
        says="Mamba-3's input projection is {width} wide, which 16 x {parallel.tensor} tensor ranks do not divide: no FP8 GEMM",
        way="set `feature.fp8.recipe=none`{or_whole}", source="cuBLAS: FP8 GEMMs want widths that 16 divides"),
    Law(id="mamba3-rates-tensor", category=OURS, key=NO_BF16_RATES,
        when=rates_where(lambda plan: plan.recipe.parallel.tensor > 1),
        says="a rank's share of `mamba3_rates` cannot be multiplied apart from the rest of its projection",
        way="leave `mamba3_rates` out", source="nam_megatron/blocks/mamba3/layer.py"),
    Law(id="mamba3-rates-blockwise", category=UNTRIED, key=NO_BF16_RATES,
        when=rates_where(_blockwise), says="`mamba3_rates` in bf16 has not been tried with FP8 scaled by blocks",
        way="leave `mamba3_rates` out"),
    Law(id="mamba3-rates-adapters", category=UNTRIED, key=NO_BF16_RATES,
        when=rates_where(_adapted), says="`mamba3_rates` in bf16 has not been tried with adapters of the projection",
        way="leave `mamba3_rates` out"),
    Law(id="mamba3-sample-too-long", category=OURS, key="model.seq_length",
        when=_long_sample,
        says="Mamba-3's kernels take fewer than {most:,} tokens in a sample at these sizes, not {model.seq_length:,}",
        way=ANY_LENGTH.replace(",", "", 1), source="nam_megatron/blocks/mamba3/README.md"),
    Law(id="mamba3-naive-keeps", category=CONTRADICTION, key=MAMBA3_HOW + "keep_states",
        when=_kept_by_naive, title="plain torch has nothing of this kind to keep", says="plain torch keeps {why}",
        way=f"{OFF}, or `{MAMBA3_HOW}kernels=fused`"),
    Law(id="mamba3-kernel-sizes", category=OURS, key=MAMBA3 + "head_dim",
        when=lambda mamba3: _kernel_sizes(mamba3),
        title="the fused kernels of Mamba-3 do not take a width, a rank or a chunk", says="{what}",
        source="nam_megatron/blocks/mamba3/README.md"),
    Law(id="m2rnn-kernel-sizes", category=OURS, key=M2RNN + "k_dim",
        when=lambda m2rnn: _kernel_sizes(m2rnn), title="the fused kernels of M2RNN do not take a width", says="{what}",
        source="nam_megatron/blocks/m2rnn/README.md"),
    Law(id="m2rnn-heads-unshared", category=MATHS, key=M2RNN + "heads",
        when=lambda m2rnn, parallel: unshared("M2RNN heads", m2rnn.heads, parallel),
        title="M2RNN's heads are not a multiple of the ranks that share them", says=UNEVEN, way=SHARED),
    Law(id="m2rnn-keys-uneven", category=MATHS, key=M2RNN + "k_dim",
        when=lambda m2rnn, parallel: uneven("M2RNN's key width", m2rnn.k_dim, parallel.tensor, "parallel.tensor"),
        title="M2RNN's key width is not a multiple of `parallel.tensor`", says=UNEVEN, way=SHARED),
    Law(id="m2rnn-projection-fp8", category=REFUSES, key=M2RNN + "heads",
        when=_m2rnn_without_fp8,
        says="M2RNN's input projection is {m2rnn.in_proj_width} / tensor {parallel.tensor} wide, which 16 does not divide: no FP8 GEMM",
        way=f"a multiple of 16 heads for each tensor rank fits; or set `{M2RNN_HOW}padded_projection=true`, "
            "or put `m2rnn` into `feature.fp8.bf16_parts`", source="cuBLAS: FP8 GEMMs want widths that 16 divides"),
    Law(id="gdn-heads-uneven", category=REFUSES, key=GDN + "value_heads",
        when=lambda gdn: uneven("value heads", gdn.value_heads, gdn.key_heads, GDN + "key_heads"),
        title="a gated delta net's value heads are not a multiple of its key heads", says=UNEVEN, source=DELTA_NET),
    Law(id="gdn-heads-unshared", category=REFUSES, key=GDN + "key_heads",
        when=lambda gdn, parallel: unshared("key heads", gdn.key_heads, parallel),
        title="a gated delta net's key heads are not a multiple of the ranks that share them", says=UNEVEN, way=SHARED,
        source=DELTA_NET),
    Law(id="gdn-activation", category=REFUSES, key="model.activation",
        when=lambda gdn, model: model.activation != "swiglu",
        says="a gated delta net takes the model's activation, and knows SiLU alone, not that of {model.activation}",
        way="set `model.activation=swiglu`", source=DELTA_NET),
    Law(id="gdn-tensor-without-sequence", category=WRONG, key="parallel.sequence",
        when=lambda gdn, parallel: parallel.tensor > 1 and not parallel.sequence,
        says="a gated delta net under tensor parallelism gets wrong gradients without sequence parallelism",
        way="set `parallel.sequence=true`",
        source="its norm works on shared heads, and Megatron 0.19.2 sums such a gradient under sequence parallelism alone"),
    Law(id="gdn-projection-fp8", category=REFUSES, key=GDN + "value_heads",
        when=_gdn_without_fp8, says="FP8 wants a multiple of 16, and the input projection has {columns} columns a GPU",
        way="choose other heads", source="cuBLAS: FP8 GEMMs want widths that 16 divides"),
)  # fmt: skip
