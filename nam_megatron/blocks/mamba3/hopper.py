"""The products of Mamba-3's backward pass on Hopper: the backward `_states_kernel` and `_gradients_kernel` of kernel.py in one (Gluon).

A program takes a head from its last chunk to its first, one a multiprocessor at a time, and its warps have different work. One asks for the
next chunk's 64 KiB while twelve compute with this one's: four have queries in rows, four have keys in rows, and four carry the gradient of
the state in fp32 from chunk to chunk, which never leaves the multiprocessor. Queries and keys compute their own scores each, so nothing is
transposed, and what multiplies from the left stays in registers.
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

WARPS = 4  # that do one kind of work
STAGES = 2  # chunks in shared memory: one that is computed with, one that is on its way
REGISTERS = 128  # of a thread at the start; the warps that load and carry give theirs to the others
COMPUTING, CARRYING, LOADING = 176, 120, 40
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 64, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))  # what multiplies from the left, in registers
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
# A token's numbers, in their order in shared memory; left is a chunk's.
NUMBERS = gl.constexpr(6)
DECAY, NOW, SCALE, BEGUN, UNTIL, LEFT = map(gl.constexpr, range(6))


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
    states: Tensor,
    sums: Tensor,
    ends: Tensor,
    d_D: Tensor,
    documents: Tensor | None,
    shape: Shape,
    chunk: int,
) -> None:
    """Writes the gradients of q, k and v in the places of q, k and v, and o in the place of g.

    rows: q, k [b, heads, s * rank, state_dim], v, g [b, heads, s * rank, head_dim]. tokens: decay, now, scale, begun, until
    [b, heads, s] fp32. left: [b, heads, chunks] fp32. states: at the chunks' starts [b, chunks, heads, head_dim, state_dim]. sums, ends,
    d_D: the gradients of c where a token is a query, of now and of scale [3, b, heads, s], of the decays over whole chunks
    [b, heads, chunks] and of D [b, heads, 1], all fp32. documents [b, s] int32. D [heads].
    """
    b, h, _, n = rows[0].shape
    p, r = shape.head_dim, shape.rank
    kind = KINDS[rows[0].dtype]
    chunks, heads = tokens[0].size(2) // chunk, b * h

    def ranks(t: Tensor) -> TensorDescriptor:
        """Tiles of a chunk, rank by rank."""
        width, layout = t.size(-1), gl.NVMMASharedLayout(128, 16, 3)
        return TensorDescriptor(t, [r, heads * chunks * chunk, width], [width, r * width, 1], [r, chunk, width], layout)

    flat = gl.NVMMASharedLayout.get_default_for([p, n], kind)
    of_states = TensorDescriptor.from_tensor(states.view(-1, n), [p, n], flat)
    by_row, parts = sums.new_empty(3, b, h, chunks, r, chunk), ends.new_empty(*ends.shape, 2 * WARPS)
    programs = min(heads, torch.cuda.get_device_properties(D.device).multi_processor_count)
    _gradients_kernel[(programs,)](
        *map(ranks, rows), of_states, D, *tokens, left, *by_row, parts, d_D, documents, heads, chunks,
        PACKED=documents is not None, H=h, L=chunk, R=r, N=n, P=p,
        STAGES=STAGES, COMPUTING=COMPUTING, CARRYING=CARRYING, LOADING=LOADING, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    torch.sum(by_row, 4, out=sums.unflatten(-1, (chunks, chunk)))
    torch.sum(parts, -1, out=ends)


# Names are kernel.py's, but rows of a chunk are here rank by rank, row m being rank m // L and token m % L: then four ranks share a
# thread's decays. A tile is a chunk of a head, by its place in q, k, v and g; of is a head of a batch entry.


@gluon.jit
def _gradients_kernel(
    q_of, k_of, v_of, g_of, state_of, D, decay, now, scale, begun, until, left,
    d_row, d_now, d_scale, ends, d_D, documents, heads, chunks,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    STAGES: gl.constexpr, COMPUTING: gl.constexpr, CARRYING: gl.constexpr, LOADING: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = L * R
    kind: gl.constexpr = q_of.dtype
    q = gl.allocate_shared_memory(kind, [STAGES, R, L, N], q_of.layout)
    k = gl.allocate_shared_memory(kind, [STAGES, R, L, N], q_of.layout)
    v = gl.allocate_shared_memory(kind, [STAGES, R, L, P], v_of.layout)
    g = gl.allocate_shared_memory(kind, [STAGES, R, L, P], v_of.layout)
    state = gl.allocate_shared_memory(kind, [STAGES, P, N], state_of.layout)
    d_state = gl.allocate_shared_memory(kind, [STAGES, P, N], state_of.layout)
    dq = gl.allocate_shared_memory(kind, [R, L, N], q_of.layout)
    dk = gl.allocate_shared_memory(kind, [R, L, N], q_of.layout)
    dv = gl.allocate_shared_memory(kind, [R, L, P], v_of.layout)
    o = gl.allocate_shared_memory(kind, [R, L, P], v_of.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [NUMBERS * STAGES, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    carried = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # tiles and numbers
        mbarrier.init(free.index(stage), count=3)  # queries, keys, the state
        mbarrier.init(carried.index(stage), count=1)
    sizes = (gl.program_id(0), heads, gl.num_programs(0), chunks)
    descriptors = (q_of, k_of, v_of, g_of, state_of)
    inputs, turns = (q, k, v, g, state, d_state, numbers), (full, free, carried)
    tokens = (decay, now, scale, begun, until, left)
    gl.warp_specialize(
        [
            (_queries, (descriptors, inputs, turns, sizes, D, documents, (dq, o, d_row, d_now), PACKED, H, L, R, N, P, STAGES)),
            (_keys, (descriptors, inputs, turns, sizes, D, documents, (dk, dv, d_scale, d_D, ends), PACKED, H, L, R, N, P, STAGES)),
            (_carry, (inputs, turns, sizes, ends, L, R, N, P, STAGES)),
            (_load, (descriptors, inputs, turns, sizes, tokens, H, L, R, P, STAGES)),
        ],
        [4, 4, 1],
        [COMPUTING, CARRYING, LOADING],
    )  # fmt: skip


@gluon.jit
def _load(
    descriptors, inputs, turns, sizes, tokens,
    H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A chunk's tiles, and its tokens' numbers once a row."""
    q_of, k_of, v_of, g_of, state_of = descriptors
    q, k, v, g, state, _, numbers = inputs
    full, free, _ = turns
    decay, now, scale, begun, until, left = tokens
    first, heads, step, chunks = sizes
    BYTES: gl.constexpr = 2 * (q_of.block_type.nbytes + v_of.block_type.nbytes) + state_of.block_type.nbytes
    token = gl.arange(0, L * R, gl.BlockedLayout([1], [32], [1], [0])) % L
    turn = 0
    for of in range(first, heads, step):
        for back in range(chunks):
            chunk, at = chunks - 1 - back, turn % STAGES
            tile = of * chunks + chunk
            here = full.index(at)
            mbarrier.wait(free.index(at), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(here, BYTES)
            tma.async_copy_global_to_shared(q_of, [0, tile * L, 0], here, q.index(at))
            tma.async_copy_global_to_shared(g_of, [0, tile * L, 0], here, g.index(at))
            tma.async_copy_global_to_shared(k_of, [0, tile * L, 0], here, k.index(at))
            tma.async_copy_global_to_shared(v_of, [0, tile * L, 0], here, v.index(at))
            of_state = ((of // H * chunks + chunk) * H + of % H) * P
            tma.async_copy_global_to_shared(state_of, [of_state, 0], here, state.index(at))
            single = tile * L + token
            found = (
                gl.load(decay + single), gl.load(now + single), gl.load(scale + single),
                gl.load(begun + single), gl.load(until + single), gl.load(left + tile + token * 0),
            )  # fmt: skip
            for i in gl.static_range(NUMBERS):
                numbers.index(NUMBERS * at + i).store(found[i])
            mbarrier.arrive(here)
            turn += 1


@gluon.jit
def _carry(
    inputs, turns, sizes, ends, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr
):
    """The gradient of the state from chunk to chunk, and its part of the gradients of the decays over whole chunks."""
    full, free, carried = turns
    first, heads, step, chunks = sizes
    M: gl.constexpr = L * R
    turn = 0
    for of in range(first, heads, step):
        d_state = gl.zeros([P, N], gl.float32, MMA)
        for back in range(chunks):
            at = turn % STAGES
            q, _, _, g = _tiles(inputs, at, M, N, P)
            state, tile = inputs[4].index(at), inputs[5].index(at)
            begun, left = _numbers(inputs, BEGUN, at), _numbers(inputs, LEFT, at)
            mbarrier.wait(full.index(at), turn // STAGES & 1)
            # Whoever read this place last has freed the chunk that has just come.
            tile.store(d_state.to(tile.dtype))
            fence_async_shared()
            mbarrier.arrive(carried.index(at))
            rest = left.load(ROWS)
            end = gl.sum(state.load(MMA).to(gl.float32) * d_state, 1) * rest
            begins = begun.load(gl.SliceLayout(0, OPERAND))
            ahead = (g.permute((1, 0)).load(OPERAND).to(gl.float32) * begins[None, :]).to(tile.dtype)
            d_state = warpgroup_mma(ahead, q, d_state * rest[:, None], is_async=True)
            _sums(ends + ((of * chunks + chunks - 1 - back) * 2 + 1) * 4, end, 4, P // 4)
            d_state = warpgroup_mma_wait(0, [d_state])
            fence_async_shared()
            mbarrier.arrive(free.index(at))
            turn += 1


@gluon.jit
def _queries(
    descriptors, inputs, turns, sizes, D, documents, outputs,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """o, the gradients of q and now, and of c where a row is a query. Matrices have queries in ROWS, keys in columns."""
    q_of, g_of = descriptors[0], descriptors[3]
    full, free, _ = turns
    dq_tile, o_tile, d_row, d_now = outputs
    first, heads, step, chunks = sizes
    kind: gl.constexpr = q_of.dtype
    M: gl.constexpr = L * R
    square = gl.zeros([M, M], gl.float32, MMA)
    wide = gl.zeros([M, N], gl.float32, MMA)
    narrow = gl.zeros([M, P], gl.float32, MMA)
    by_rank: gl.constexpr = gl.reshape(square, [R, L, R, L]).type.layout
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, by_rank))
    row = gl.arange(0, M, ROWS)
    token, other = gl.arange(0, L, gl.SliceLayout(1, pair)), gl.arange(0, L, gl.SliceLayout(0, pair))
    turn = 0
    for of in range(first, heads, step):
        skip = gl.load(D + of % H)
        for back in range(chunks):
            chunk, at = chunks - 1 - back, turn % STAGES
            tile = of * chunks + chunk
            q, k, v, g = _tiles(inputs, at, M, N, P)
            state = inputs[4].index(at)
            decay = _numbers(inputs, DECAY, at).slice(0, L)
            now, scale = _numbers(inputs, NOW, at).slice(0, L), _numbers(inputs, SCALE, at).slice(0, L)
            mbarrier.wait(full.index(at), turn // STAGES & 1)
            scores = warpgroup_mma(q, k.permute((1, 0)), square, use_acc=False, is_async=True)
            d_scores = warpgroup_mma(g, v.permute((1, 0)), square, use_acc=False, is_async=True)
            o = warpgroup_mma(q, state.permute((1, 0)), narrow, use_acc=False, is_async=True)
            earlier, same = other[None, :] < token[:, None], other[None, :] == token[:, None]
            if PACKED:
                numbered = documents + of // H * (chunks * L) + chunk * L
                earlier = earlier & (gl.load(numbered + token)[:, None] == gl.load(numbered + other)[None, :])
            # Only what the mask drops can be above 0.
            c, c_key = decay.load(token.type.layout), decay.load(other.type.layout)
            weights = (
                gl.exp(gl.where(earlier, c[:, None] - c_key[None, :], float("-inf")))
                * scale.load(other.type.layout)[None, :]
            )
            own = gl.where(same, now.load(token.type.layout)[:, None], weights)
            scores, d_scores = warpgroup_mma_wait(1, [scores, d_scores])
            scores, d_scores = gl.reshape(scores, [R, L, R, L]), gl.reshape(d_scores, [R, L, R, L])
            both = scores * d_scores
            of_now = _over_keys(gl.where(same[None, :, None, :], both, 0.0), M)
            of_row = _over_keys(both * weights[None, :, None, :], M)
            d_scores = _weighted(d_scores, own, kind, M)
            scores = _weighted(scores, own, kind, M)
            since = _numbers(inputs, BEGUN, at).load(ROWS)
            o = warpgroup_mma_wait(0, [o]) * since[:, None]
            of_row += gl.sum(g.load(MMA).to(gl.float32) * o, 1)
            o = warpgroup_mma(scores, v, o + v.load(MMA).to(gl.float32) * skip, is_async=True)
            dq = warpgroup_mma(g, state, wide, use_acc=False, is_async=True)
            gl.store(d_now + tile * M + row, of_now)
            gl.store(d_row + tile * M + row, of_row)
            o = warpgroup_mma_wait(1, [o])
            _write(g_of, tile * L, o_tile, o)
            dq = warpgroup_mma_wait(0, [dq]) * since[:, None]
            dq = warpgroup_mma(d_scores, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            fence_async_shared()
            mbarrier.arrive(free.index(at))
            _write(q_of, tile * L, dq_tile, dq)
            turn += 1
    tma.store_wait(0)


@gluon.jit
def _keys(
    descriptors, inputs, turns, sizes, D, documents, outputs,
    PACKED: gl.constexpr, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gradients of k, v, scale and D, and their part of those of the decays over whole chunks. Matrices have keys in ROWS, queries in
    columns."""
    k_of, v_of = descriptors[1], descriptors[2]
    full, free, carried = turns
    dk_tile, dv_tile, d_scale, d_D, ends = outputs
    first, heads, step, chunks = sizes
    kind: gl.constexpr = k_of.dtype
    M: gl.constexpr = L * R
    square = gl.zeros([M, M], gl.float32, MMA)
    wide = gl.zeros([M, N], gl.float32, MMA)
    narrow = gl.zeros([M, P], gl.float32, MMA)
    by_rank: gl.constexpr = gl.reshape(square, [R, L, R, L]).type.layout
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, by_rank))
    row = gl.arange(0, M, ROWS)
    token, other = gl.arange(0, L, gl.SliceLayout(1, pair)), gl.arange(0, L, gl.SliceLayout(0, pair))
    turn = 0
    for of in range(first, heads, step):
        skip = gl.load(D + of % H)
        d_skip = gl.zeros([M], gl.float32, ROWS)
        for back in range(chunks):
            chunk, at = chunks - 1 - back, turn % STAGES
            tile = of * chunks + chunk
            q, k, v, g = _tiles(inputs, at, M, N, P)
            d_state = inputs[5].index(at)
            decay = _numbers(inputs, DECAY, at).slice(0, L)
            now, scale = _numbers(inputs, NOW, at).slice(0, L), _numbers(inputs, SCALE, at)
            mbarrier.wait(full.index(at), turn // STAGES & 1)
            scores = warpgroup_mma(k, q.permute((1, 0)), square, use_acc=False, is_async=True)
            d_scores = warpgroup_mma(v, g.permute((1, 0)), square, use_acc=False, is_async=True)
            mbarrier.wait(carried.index(at), turn // STAGES & 1)
            dv = warpgroup_mma(k, d_state.permute((1, 0)), narrow, use_acc=False, is_async=True)
            earlier, same = token[:, None] < other[None, :], other[None, :] == token[:, None]
            if PACKED:
                numbered = documents + of // H * (chunks * L) + chunk * L
                earlier = earlier & (gl.load(numbered + token)[:, None] == gl.load(numbered + other)[None, :])
            c, c_query = decay.load(token.type.layout), decay.load(other.type.layout)
            between = gl.exp(gl.where(earlier, c_query[None, :] - c[:, None], float("-inf")))
            weights = between * scale.slice(0, L).load(token.type.layout)[:, None]
            weights = gl.where(same, now.load(token.type.layout)[:, None], weights)
            scores, d_scores = warpgroup_mma_wait(1, [scores, d_scores])
            scores, d_scores = gl.reshape(scores, [R, L, R, L]), gl.reshape(d_scores, [R, L, R, L])
            of_row = _over_keys(scores * d_scores * between[None, :, None, :], M)
            d_scores = _weighted(d_scores, weights, kind, M)
            scores = _weighted(scores, weights, kind, M)
            till, later = _numbers(inputs, UNTIL, at).load(ROWS), scale.load(ROWS)
            dv = warpgroup_mma_wait(0, [dv]) * till[:, None]
            v_rows, g_rows = v.load(MMA).to(gl.float32), g.load(MMA).to(gl.float32)
            through = gl.sum(v_rows * dv, 1)
            d_skip += gl.sum(v_rows * g_rows, 1)
            dv = warpgroup_mma(scores, g, dv * later[:, None] + g_rows * skip, is_async=True)
            dk = warpgroup_mma(v, d_state, wide, use_acc=False, is_async=True)
            gl.store(d_scale + tile * M + row, of_row + through)
            # Once a warp: sums across warps would wait for all of them.
            _sums(ends + tile * 8, through * later, 4, M // 4)
            dv = warpgroup_mma_wait(1, [dv])
            _write(v_of, tile * L, dv_tile, dv)
            dk = warpgroup_mma_wait(0, [dk]) * (till * later)[:, None]
            dk = warpgroup_mma(d_scores, q, dk, is_async=True)
            dk = warpgroup_mma_wait(0, [dk])
            fence_async_shared()
            mbarrier.arrive(free.index(at))
            _write(k_of, tile * L, dk_tile, dk)
            turn += 1
        gl.store(d_D + of, gl.sum(d_skip, 0))
    tma.store_wait(0)


@gluon.jit
def _tiles(inputs, at, M: gl.constexpr, N: gl.constexpr, P: gl.constexpr):
    """q, k, v and g of the chunk in stage `at`, [M, N] and [M, P]."""
    q, k = inputs[0].index(at).reshape([M, N]), inputs[1].index(at).reshape([M, N])
    return q, k, inputs[2].index(at).reshape([M, P]), inputs[3].index(at).reshape([M, P])


@gluon.jit
def _numbers(inputs, which: gl.constexpr, at):
    """One of a token's numbers, once a row of the chunk in stage `at`, [M]."""
    return inputs[6].index(NUMBERS * at + which)


@gluon.jit
def _weighted(scores, weights, kind: gl.constexpr, M: gl.constexpr):
    """[R, L, R, L] times the weights of pairs of tokens [L, L], as what multiplies from the left, [M, M]."""
    return gl.convert_layout(gl.reshape((scores * weights[None, :, None, :]).to(kind), [M, M]), OPERAND)


@gluon.jit
def _over_keys(x, M: gl.constexpr):
    """[R, L, R, L] -> [R L], in the layout ROWS."""
    return gl.sum(gl.convert_layout(gl.reshape(x, [M, M]), MMA), 1)


@gluon.jit
def _sums(pointer, x, COUNT: gl.constexpr, EACH: gl.constexpr):
    """Stores so many sums of so many values in a row."""
    total = gl.sum(gl.reshape(x, [COUNT, EACH]), 1)
    gl.store(pointer + gl.arange(0, COUNT, total.type.layout), total)


@gluon.jit
def _write(descriptor, token, tile, x):
    """From registers by way of `tile`, once what was written from there last has left."""
    tma.store_wait(0)
    tile.reshape(x.shape).store(x.to(tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [0, token, 0], tile)
