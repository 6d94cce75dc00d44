"""The products of Mamba-3's backward pass on Hopper: `_gradients_kernel` of kernel.py, with warps that have different work (Gluon).

One program a multiprocessor goes from tile to tile, a chunk of a head each. One warp asks for the next tile's 80 KiB while eight compute
with this one's: four have queries in rows and make o and the gradients of queries, four have keys in rows and make those of keys and
values. Each four compute their own scores, so nothing is transposed or handed over, and what multiplies from the left stays in registers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nam_megatron.blocks.mamba3.block import walkable
from nam_megatron.blocks.mamba3.naive import Shape

STAGES = 2  # tiles in shared memory: one that is computed with, one that is on its way
REGISTERS = 168  # of a thread at the start; the warp that loads gives most of its own to the others
COMPUTING, LOADING = 240, 24
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def serves(packed: Tensor, shape: Shape, chunk: int) -> bool:
    """Whether these products are computed here: on Hopper, in 16 bits, of whole chunks of 64 rows, heads of 64 and states of 128."""
    return (
        packed.is_cuda
        and torch.cuda.get_device_capability(packed.device)[0] == 9
        and packed.dtype in KINDS
        and packed.size(0) % chunk == 0
        and packed.size(0) * packed.size(1) * shape.heads * shape.rank < 2**31  # rows, which are counted in int32
        and walkable(shape.head_dim, shape.state_dim, shape.rank, chunk)
    )


def gradients(
    D: Tensor,
    rows: Sequence[Tensor],
    tokens: Sequence[Tensor],
    left: Tensor,
    states: Sequence[Tensor],
    into: Sequence[Tensor],
    documents: Tensor | None,
    shape: Shape,
    chunk: int,
) -> None:
    """Writes the gradients of q, k and v in the places of q, k and v, and o in the place of g.

    rows: q, k [b, heads, s * rank, state_dim], v, g [b, heads, s * rank, head_dim]. tokens: decay, now, scale, begun, until
    [b, heads, s]. left: [b, heads, chunks]. states: at the chunks' starts, and the gradients of those at their ends, [b, chunks, heads,
    head_dim, state_dim]. into: the gradients of what tokens sum over queries, of now and of scale [b, heads, s], of the decays over whole
    chunks and of D [b, heads, chunks]; all fp32. documents [b, s] int32. D [heads].
    """
    b, h, _, n = rows[0].shape
    p, r = shape.head_dim, shape.rank
    m, kind = chunk * r, KINDS[rows[0].dtype]
    wide, narrow = (gl.NVMMASharedLayout.get_default_for([64, width], kind) for width in (n, p))

    def tiled(t: Tensor, count: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(t.view(-1, t.size(-1)), [count, t.size(-1)], layout)

    chunks = tokens[0].size(2) // chunk
    tiles = b * h * chunks
    programs = min(tiles, torch.cuda.get_device_properties(D.device).multi_processor_count)
    _gradients_kernel[(programs,)](
        *(tiled(t, m, wide) for t in rows[:2]), *(tiled(t, m, narrow) for t in rows[2:]), *(tiled(t, p, wide) for t in states),
        D, *tokens, left, *into, documents, tiles, chunks,
        PACKED=documents is not None, H=h, L=chunk, R=r, N=n, P=p, STAGES=STAGES, COMPUTING=COMPUTING, LOADING=LOADING,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


# Names are kernel.py's. A tile is a chunk of a head; tiles are counted as q, k, v and g have them, chunks first.


@gluon.jit
def _gradients_kernel(
    q_of, k_of, v_of, g_of, state_of, d_state_of, D, decay, now, scale, begun, until, left,
    d_row, d_now, d_scale, ends, d_D, documents, tiles, chunks,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    STAGES: gl.constexpr, COMPUTING: gl.constexpr, LOADING: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = L * R
    kind: gl.constexpr = q_of.dtype
    q = gl.allocate_shared_memory(kind, [STAGES, M, N], q_of.layout)
    k = gl.allocate_shared_memory(kind, [STAGES, M, N], q_of.layout)
    v = gl.allocate_shared_memory(kind, [STAGES, M, P], v_of.layout)
    g = gl.allocate_shared_memory(kind, [STAGES, M, P], v_of.layout)
    state = gl.allocate_shared_memory(kind, [STAGES, P, N], state_of.layout)
    d_state = gl.allocate_shared_memory(kind, [STAGES, P, N], state_of.layout)
    dq = gl.allocate_shared_memory(kind, [M, N], q_of.layout)
    dk = gl.allocate_shared_memory(kind, [M, N], q_of.layout)
    dv = gl.allocate_shared_memory(kind, [M, P], v_of.layout)
    o = gl.allocate_shared_memory(kind, [M, P], v_of.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    sizes = (gl.program_id(0), tiles, gl.num_programs(0), chunks)
    descriptors = (q_of, k_of, v_of, g_of, state_of, d_state_of)
    inputs, turns = (q, k, v, g, state, d_state), (full, free)
    of_queries = (D, decay, begun, now, scale, documents)
    of_keys = (D, decay, until, now, scale, left, documents)
    gl.warp_specialize(
        [
            (
                _queries,
                (descriptors, inputs, turns, sizes, of_queries, (dq, o, d_row, d_now, d_D), PACKED, H, L, R, N, P, STAGES),
            ),
            (_keys, (descriptors, inputs, turns, sizes, of_keys, (dk, dv, d_scale, ends), PACKED, H, L, R, N, P, STAGES)),
            (_load, (descriptors, inputs, turns, sizes, H, STAGES)),
        ],
        [4, 1],
        [COMPUTING, LOADING],
    )  # fmt: skip


@gluon.jit
def _load(descriptors, inputs, turns, sizes, H: gl.constexpr, STAGES: gl.constexpr):
    q_of, k_of, v_of, g_of, state_of, d_state_of = descriptors
    q, k, v, g, state, d_state = inputs
    full, free = turns
    first, tiles, step, chunks = sizes
    M: gl.constexpr = q_of.block_type.shape[0]
    P: gl.constexpr = state_of.block_type.shape[0]
    BYTES: gl.constexpr = 2 * (q_of.block_type.nbytes + v_of.block_type.nbytes + state_of.block_type.nbytes)
    for turn in range(gl.cdiv(tiles - first, step)):
        tile, at = first + turn * step, turn % STAGES
        of, row = tile // chunks, tile * M
        of_state = ((of // H * chunks + tile % chunks) * H + of % H) * P
        mbarrier.wait(free.index(at), (turn // STAGES & 1) ^ 1)
        here = full.index(at)
        mbarrier.expect(here, BYTES)
        tma.async_copy_global_to_shared(q_of, [row, 0], here, q.index(at))
        tma.async_copy_global_to_shared(k_of, [row, 0], here, k.index(at))
        tma.async_copy_global_to_shared(v_of, [row, 0], here, v.index(at))
        tma.async_copy_global_to_shared(g_of, [row, 0], here, g.index(at))
        tma.async_copy_global_to_shared(state_of, [of_state, 0], here, state.index(at))
        tma.async_copy_global_to_shared(d_state_of, [of_state, 0], here, d_state.index(at))


@gluon.jit
def _queries(
    descriptors, inputs, turns, sizes, numbers, outputs,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of q, D and now, and of c where a row is a query; o. Matrices have queries in rows, keys in columns."""
    q_of, g_of = descriptors[0], descriptors[3]
    full, free = turns
    D, decay, begun, now, scale, documents = numbers
    dq_tile, o_tile, d_row, d_now, d_D = outputs
    first, tiles, step, chunks = sizes
    kind: gl.constexpr = q_of.dtype
    M: gl.constexpr = L * R
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row = gl.arange(0, M, gl.SliceLayout(1, mma))
    column = gl.arange(0, M, gl.SliceLayout(0, mma))
    token, other = row // R, column // R
    earlier, same, itself = _seen(other, token, row, column)
    square = gl.zeros([M, M], gl.float32, mma)
    wide = gl.zeros([M, N], gl.float32, mma)
    narrow = gl.zeros([M, P], gl.float32, mma)
    for turn in range(gl.cdiv(tiles - first, step)):
        tile, at = first + turn * step, turn % STAGES
        single = tile * L
        c, since, own = (
            gl.load(decay + single + token),
            gl.load(begun + single + token),
            gl.load(now + single + token),
        )
        c_key, later = gl.load(decay + single + other), gl.load(scale + single + other)
        skip = gl.load(D + tile // chunks % H)
        seen = earlier
        if PACKED:
            of = documents + tile // chunks // H * (chunks * L) + tile % chunks * L
            seen = seen & (gl.load(of + token)[:, None] == gl.load(of + other)[None, :])
        mbarrier.wait(full.index(at), turn // STAGES & 1)
        q, k, v, g, state = (
            inputs[0].index(at),
            inputs[1].index(at),
            inputs[2].index(at),
            inputs[3].index(at),
            inputs[4].index(at),
        )
        scores = warpgroup_mma(q, k.permute((1, 0)), square, use_acc=False, is_async=True)
        d_scores = warpgroup_mma(g, v.permute((1, 0)), square, use_acc=False, is_async=True)
        o = warpgroup_mma(q, state.permute((1, 0)), narrow, use_acc=False, is_async=True)
        scores, d_scores = warpgroup_mma_wait(1, [scores, d_scores])
        gl.store(d_D + tile, gl.sum(gl.sum(gl.where(itself, d_scores, 0.0), 1), 0))
        both = scores * d_scores
        _by_token(d_now + single, gl.sum(gl.where(same, both, 0.0), 1), L, R)
        # Only what the mask drops can be above 0.
        weights = gl.exp(gl.where(seen, c[:, None] - c_key[None, :], float("-inf"))) * later[None, :]
        of_row = gl.sum(both * weights, 1)
        weights = gl.where(same, own[:, None], weights)
        d_scores = gl.convert_layout((d_scores * weights).to(kind), operand)
        scores = gl.convert_layout((scores * weights + gl.where(itself, skip, 0.0)).to(kind), operand)
        o = warpgroup_mma_wait(0, [o]) * since[:, None]
        _by_token(d_row + single, of_row + gl.sum(g.load(mma).to(gl.float32) * o, 1), L, R)
        o = warpgroup_mma(scores, v, o, is_async=True)
        dq = warpgroup_mma(g, state, wide, use_acc=False, is_async=True)
        o = warpgroup_mma_wait(1, [o])
        _write(g_of, tile * M, o_tile, o)
        dq = warpgroup_mma_wait(0, [dq]) * since[:, None]
        dq = warpgroup_mma(d_scores, k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        fence_async_shared()
        mbarrier.arrive(free.index(at))
        _write(q_of, tile * M, dq_tile, dq)
    tma.store_wait(0)


@gluon.jit
def _keys(
    descriptors, inputs, turns, sizes, numbers, outputs,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of k, v, scale and the decays over whole chunks. Matrices have keys in rows, queries in columns."""
    k_of, v_of = descriptors[1], descriptors[2]
    full, free = turns
    D, decay, until, now, scale, left, documents = numbers
    dk_tile, dv_tile, d_scale, ends = outputs
    first, tiles, step, chunks = sizes
    kind: gl.constexpr = k_of.dtype
    M: gl.constexpr = L * R
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row = gl.arange(0, M, gl.SliceLayout(1, mma))
    column = gl.arange(0, M, gl.SliceLayout(0, mma))
    token, other = row // R, column // R
    earlier, same, itself = _seen(token, other, row, column)
    square = gl.zeros([M, M], gl.float32, mma)
    wide = gl.zeros([M, N], gl.float32, mma)
    narrow = gl.zeros([M, P], gl.float32, mma)
    for turn in range(gl.cdiv(tiles - first, step)):
        tile, at = first + turn * step, turn % STAGES
        single = tile * L
        c, till, own = (gl.load(decay + single + token), gl.load(until + single + token), gl.load(now + single + token))
        later, c_query = gl.load(scale + single + token), gl.load(decay + single + other)
        skip, whole = gl.load(D + tile // chunks % H), gl.load(left + tile)
        seen = earlier
        if PACKED:
            of = documents + tile // chunks // H * (chunks * L) + tile % chunks * L
            seen = seen & (gl.load(of + token)[:, None] == gl.load(of + other)[None, :])
        mbarrier.wait(full.index(at), turn // STAGES & 1)
        q, k, v, g, state, d_state = (
            inputs[0].index(at), inputs[1].index(at), inputs[2].index(at), inputs[3].index(at), inputs[4].index(at), inputs[5].index(at)
        )  # fmt: skip
        # The sum of state * d_state is the diagonal of a product.
        end = warpgroup_mma(state, d_state.permute((1, 0)), square, use_acc=False, is_async=True)
        scores = warpgroup_mma(k, q.permute((1, 0)), square, use_acc=False, is_async=True)
        end = warpgroup_mma_wait(1, [end])
        d_scores = warpgroup_mma(v, g.permute((1, 0)), square, use_acc=False, is_async=True)
        dv = warpgroup_mma(k, d_state.permute((1, 0)), narrow, use_acc=False, is_async=True)
        carried = gl.sum(gl.where(itself, end, 0.0), 1) * whole
        scores, d_scores = warpgroup_mma_wait(1, [scores, d_scores])
        between = gl.exp(gl.where(seen, c_query[None, :] - c[:, None], float("-inf")))
        of_row = gl.sum(scores * d_scores * between, 1)
        weights = gl.where(same, own[:, None], between * later[:, None])
        d_scores = gl.convert_layout((d_scores * weights).to(kind), operand)
        scores = gl.convert_layout((scores * weights + gl.where(itself, skip, 0.0)).to(kind), operand)
        dv = warpgroup_mma_wait(0, [dv]) * till[:, None]
        through = gl.sum(v.load(mma).to(gl.float32) * dv, 1)
        _by_token(d_scale + single, of_row + through, L, R)
        gl.store(ends + tile, gl.sum(carried + through * later, 0))
        dv = warpgroup_mma(scores, g, dv * later[:, None], is_async=True)
        dk = warpgroup_mma(v, d_state, wide, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, [dv])
        _write(v_of, tile * M, dv_tile, dv)
        dk = warpgroup_mma_wait(0, [dk]) * (till * later)[:, None]
        dk = warpgroup_mma(d_scores, q, dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk])
        fence_async_shared()
        mbarrier.arrive(free.index(at))
        _write(k_of, tile * M, dk_tile, dk)
    tma.store_wait(0)


@gluon.jit
def _seen(key, query, row, column):
    """[M, M]: whether the key is of an earlier token, whether both are of one, and the diagonal. key, query: tokens of one side each."""
    if key.type.layout.dim == 0:
        earlier = key[None, :] < query[:, None]
        same = key[None, :] == query[:, None]
    else:
        earlier = key[:, None] < query[None, :]
        same = key[:, None] == query[None, :]
    return earlier, same, row[:, None] == column[None, :]


@gluon.jit
def _by_token(pointer, x, L: gl.constexpr, R: gl.constexpr):
    """Stores [L R] as [L], summed over the rows of a token."""
    total = gl.sum(gl.reshape(x, [L, R]), 1)
    gl.store(pointer + gl.arange(0, L, total.type.layout), total)


@gluon.jit
def _write(descriptor, row, tile, x):
    """From registers by way of `tile`, once what was written from there last has left."""
    tma.store_wait(0)
    tile.store(x.to(descriptor.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [row, 0], tile)
