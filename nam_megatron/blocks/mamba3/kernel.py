"""The Mamba-3 scan on a GPU, SISO and MIMO in one: chunks of tokens with the state between them, in Triton.

README.md beside this derives it. A chunk of L tokens of rank r is M = L r rows. Element-wise kernels first write what every
product reads, per head: turned q and k, v, and in the backward pass the gradient g of o. The state at the start of every chunk
is written by one sequential pass over the sequence, its gradient at the end of every chunk by another in reverse; all else is
parallel over chunks. With enough heads one such pass, `_walk_kernel`, is the whole forward pass.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from nam_megatron.blocks.mamba3 import hopper
from nam_megatron.blocks.mamba3.block import ENTRIES, SPECIALISED, walk_from, walkable
from nam_megatron.blocks.mamba3.naive import Shape, State, Weights, turn
from nam_megatron.blocks.mamba3.prepare import Prepared, Raw, offsets, packed_gradients, rates_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = 512  # tokens of a program that writes how much of a state is left


class Launch(NamedTuple):
    """How the kernels are started.

    columns: of the state, of a program of the walks over chunks. output_tile, gradients_tile: columns of the state taken at once
    by these kernels, which read q, k and the states once more if that is less than all. All three from 64 on in half
    precision: see `_options`. turned: rows of a program that writes q and k, written: of one that writes v and g. rows, halves:
    rows and columns of half the state of a program of the gradients of B and C. steps, chunks: rows of a step and steps of a
    program of the gradients of z and x; fewer where there would be fewer than `programs`. entries: of the batch, taken at once,
    0 for all: less memory, fewer programs. walk: heads, of all of the batch, from which the forward pass is one walk, where `_walks`
    allows it; 0: never. states_kept: the states at the chunks' starts are kept for the backward pass; prepared_kept: what `Prepared` has.
    specialised: heads, of the batch entries taken at once, from which hopper.py's kernel computes the backward pass's products, where it
    serves them; 0: never.
    values, keys: warps of a program of these gradients. Of kernels with products (warps, stages, registers of a thread); 0 warps: by the
    rows of a chunk, and no limit where these are many; 0 registers: no limit.
    """

    columns: int = 64
    output_tile: int = 128
    gradients_tile: int = 128
    turned: int = 32
    written: int = 64
    rows: int = 32
    halves: int = 16
    steps: int = 16
    chunks: int = 32
    programs: int = 1056
    entries: int = ENTRIES
    walk: int = 0
    states_kept: bool = False
    prepared_kept: bool = False
    specialised: int = SPECIALISED
    walks: tuple[int, int, int] = (4, 1, 0)
    forward_states: tuple[int, int, int] = (4, 3, 0)
    output: tuple[int, int, int] = (0, 1, 0)
    backward_states: tuple[int, int, int] = (4, 3, 0)
    gradients: tuple[int, int, int] = (0, 1, 0)
    values: int = 2
    keys: int = 1


def launch_of(shape: Shape, states_kept: bool = False, prepared_kept: bool = False) -> Launch:
    """As they are started in training."""
    return Launch(walk=walk_from(shape.rank), states_kept=states_kept, prepared_kept=prepared_kept)


class Operands(NamedTuple):
    """What the products read. Rows of [b, heads, s * rank, state_dim or head_dim] in the working precision.

    begun, until, kept: [b, heads, s] fp32, how much of the state at its chunk's start is left at a token, how much of a token's
    input is left at its chunk's end, and that times `scale`. left: [b, heads, chunks], of the state at its start at its end.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    begun: Tensor
    until: Tensor
    kept: Tensor
    left: Tensor

    @classmethod
    def of(
        cls,
        packed: Tensor,
        weights: Weights,
        prepared: Prepared,
        shape: Shape,
        chunk: int,
        launch: Launch,
        documents: Tensor | None,
        dy: Tensor | None = None,
    ) -> "Operands":
        """g only with dy [s, b, inner], any stride of s and b."""
        s, b, _ = packed.shape
        h, p, n, g, r, a = shape
        tokens, rows = max(1, launch.turned // r), max(1, launch.written // r)
        q, k = (packed.new_empty(b, h, s * r, n) for _ in range(2))
        _turn_kernel[(triton.cdiv(s, tokens), h, b)](
            prepared.keys, prepared.queries, weights.B_bias, weights.C_bias, prepared.cos, prepared.sin, k, q, s,
            H=h, HALF=n // 2, G=g, R=r, A=a, TOKENS=tokens, EVEN=s % tokens == 0, num_warps=4,
        )  # fmt: skip
        v, gradient = (packed.new_empty(b, h, s * r, p) if t is not None else None for t in (packed, dy))
        _rows_kernel[(h, triton.cdiv(s, rows), b)](
            packed, dy, *_mimo(weights), v, gradient, s, packed.stride(0), packed.stride(1),
            *((0, 0) if dy is None else dy.stride()[:2]), H=h, P=p, R=r, TOKENS=rows, EVEN=s % rows == 0, num_warps=4,
        )  # fmt: skip
        return cls(q, k, v, gradient, *_bounds(prepared, shape, chunk, documents))


def scan(
    packed: Tensor,
    weights: Weights,
    shape: Shape,
    chunk: int,
    documents: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    launch: Launch | None = None,
    rates: Tensor | None = None,
) -> Tensor:
    """naive.scan's output for a whole sequence, with gradients of `packed`, `rates` and `weights`.

    packed [s, b, width] on a GPU, unit stride in the last dimension; rates likewise: its columns from dt on, where they are a tensor
    of their own; documents [b, s] int32. With a group of tensor ranks
    each holds an equal share of the angles in its `packed`, in rank order. Keeps its arguments for the backward pass, and what
    `launch` says.
    """
    return _Scan.apply(packed, rates, documents, shape, chunk, group, launch or launch_of(shape), *weights)


@torch.no_grad()
def prefill(
    packed: Tensor,
    weights: Weights,
    shape: Shape,
    chunk: int,
    state: State | None = None,
    group: dist.ProcessGroup | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, State]:
    """naive.scan of one document without gradients: the output, and the state from which to go on."""
    launch = launch or launch_of(shape)
    start, rates = None if state is None else state.angle, rates_of(packed, shape)
    prepared = Prepared.of(packed, rates, weights, shape, chunk, _angles(rates, shape, group), start=start)
    before = None if state is None else _with_trapezoid(packed, weights, shape, state)
    y = packed.new_empty(*packed.shape[:2], shape.inner)
    if _walks(packed, shape, chunk, launch.walk):
        end = _walk(y, packed, weights, prepared, shape, chunk, launch, start=before, ends=True)
    else:
        operands = Operands.of(packed, weights, prepared, shape, chunk, launch, None)
        states, end = _states(packed, operands, shape, chunk, launch, before, ends=True)
        _output(y, packed, weights, prepared, operands, states, shape, chunk, launch, None)
    key = prepared.keys[:, -1].float().repeat_interleave(shape.heads // shape.groups, 1) + weights.B_bias
    x = packed[-1, :, shape.inner : 2 * shape.inner].unflatten(-1, (shape.heads, shape.head_dim))
    return y, State(prepared.angle, end, turn(key, prepared.angle).to(packed.dtype), x.contiguous())


def _angles(rates: Tensor, shape: Shape, group: dist.ProcessGroup | None) -> Tensor:
    """All angles [s, b, angles], the last columns of each rank's."""
    own = rates[..., 3 * shape.heads :]
    if group is None or group.size() == 1:
        return own
    every = own.new_empty(group.size() * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(every, own.contiguous(), group=group)
    return every.unflatten(0, (group.size(), -1)).movedim(0, -2).flatten(-2)


def _own_angles(d_angles: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's share of the gradients of all angles, summed over the ranks, each of which knows its own heads'."""
    if group is None or group.size() == 1:
        return d_angles
    every = d_angles.unflatten(-1, (group.size(), -1)).movedim(-2, 0).flatten(0, 1).contiguous()
    own = every.new_empty(d_angles.size(0), *every.shape[1:])
    dist.reduce_scatter_tensor(own, every, group=group)
    return own


def _with_trapezoid(packed: Tensor, weights: Weights, shape: Shape, state: State) -> Tensor:
    """The state that the first token decays: its own step's share of the token before it is added."""
    at = offsets(shape)
    dt, trap = (packed[0, :, at[name] : at[name] + shape.heads].float() for name in ("dt", "trap"))
    step = torch.nn.functional.softplus(dt + weights.dt_bias) * torch.sigmoid(-trap)
    v = state.x.float().unsqueeze(2) * (1 if weights.mimo_x is None else weights.mimo_x)
    return state.ssm + step[..., None, None] * torch.einsum("bhrn,bhrp->bhpn", state.k.float(), v)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, apart, documents, shape, chunk, group, launch, *weights):
        ctx.sizes = shape, chunk, group, launch
        kept, weights = _no_states(packed, shape, chunk) if launch.states_kept else None, Weights(*weights)
        rates = rates_of(packed, shape) if apart is None else apart
        prepared = Prepared.of(packed, rates, weights, shape, chunk, _angles(rates, shape, group), documents)
        ctx.save_for_backward(packed, apart, documents, kept, *weights, *(prepared if launch.prepared_kept else ()))
        y = packed.new_empty(*packed.shape[:2], shape.inner)
        if _walks(packed, shape, chunk, launch.walk):
            _walk(y, packed, weights, prepared, shape, chunk, launch, documents, states=kept)
            return y
        for of in _entries(packed.size(1), launch):
            own, mine, numbers = packed[:, of], _at(prepared, of), None if documents is None else documents[of]
            operands = Operands.of(own, weights, mine, shape, chunk, launch, numbers)
            states, _ = _states(own, operands, shape, chunk, launch, into=None if kept is None else kept[of])
            _output(y[:, of], own, weights, mine, operands, states, shape, chunk, launch, numbers)
            del operands, states  # before the next ones are made
        return y

    @staticmethod
    def backward(ctx, dy):
        packed, apart, documents, states, *rest = ctx.saved_tensors
        shape, chunk, group, launch = ctx.sizes
        rates = rates_of(packed, shape) if apart is None else apart
        count = len(Weights._fields)
        weights, angles, kept = Weights(*rest[:count]), _angles(rates, shape, group), rest[count:]
        prepared = Prepared(*kept) if kept else Prepared.of(packed, rates, weights, shape, chunk, angles, documents)
        d_packed, d_apart = (
            t if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in (packed, apart)
        )
        d_rates = rates_of(d_packed, shape) if d_apart is None else d_apart
        raw, sums = _backward(
            packed, weights, prepared, dy.contiguous(), d_packed, shape, chunk, launch, documents, states
        )
        d_angles, d_bias, d_B_norm, d_C_norm = packed_gradients(
            raw, d_packed, d_rates, packed, rates, weights, shape, chunk, angles, prepared.scale, documents
        )
        d_rates[..., 3 * shape.heads :] = _own_angles(d_angles, group)
        return d_packed, d_apart, *(None,) * 5, d_bias, *sums[:3], d_B_norm, d_C_norm, *sums[3:]


def _entries(b: int, launch: Launch) -> list[slice]:
    """The batch entries that are taken at once."""
    step = launch.entries or b
    return [slice(first, min(first + step, b)) for first in range(0, b, step)]


def _at(tensors: NamedTuple, of: slice) -> NamedTuple:
    """Some batch entries of tensors that have them first."""
    return type(tensors)(*(t[of] for t in tensors))


def _bounds(prepared: Prepared, shape: Shape, chunk: int, documents: Tensor | None) -> tuple[Tensor, ...]:
    """begun, until, kept, left of `Operands`."""
    b, h, s = prepared.decay.shape
    begun, until, kept = (torch.empty_like(prepared.decay) for _ in range(3))
    left = prepared.decay.new_empty(b, h, triton.cdiv(s, chunk))
    _bounds_kernel[(triton.cdiv(s, BOUNDS), h, b)](
        prepared.decay, prepared.scale, documents, begun, until, kept, left, s,
        H=h, L=chunk, PACKED=documents is not None, TOKENS=BOUNDS, num_warps=4,
    )  # fmt: skip
    return begun, until, kept, left


def _walks(packed: Tensor, shape: Shape, chunk: int, least: int) -> bool:
    """Whether a walk along the chunks does what several kernels do elsewhere: where its tiles serve 16 bits, and heads, which are all the
    programs there are, are not fewer than `least`."""
    tiles = walkable(shape.head_dim, shape.state_dim, shape.rank, chunk)
    return tiles and packed.dtype != torch.float32 and 0 < least <= packed.size(1) * shape.heads


def _walk(
    y: Tensor,
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None = None,
    start: Tensor | None = None,
    ends: bool = False,
    states: Tensor | None = None,
) -> Tensor | None:
    """Writes y [s, b, inner], and the states at the chunks' starts where there is a place for them; returns the last state in fp32 if
    asked for."""
    s, b, _ = packed.shape
    h, p, n, g, r, a = shape
    begun, _, kept, left = _bounds(prepared, shape, chunk, documents)
    end = packed.new_empty(b, h, p, n, dtype=torch.float32) if ends else None
    _walk_kernel[(h, b)](
        packed, prepared.keys, prepared.queries, weights.B_bias, weights.C_bias, prepared.cos, prepared.sin, *_mimo(weights),
        weights.D, prepared.decay, prepared.now, prepared.scale, begun, kept, left, start, end, states, y, documents,
        s, packed.stride(0), packed.stride(1), y.stride(0), y.stride(1),
        STARTED=start is not None, ENDS=ends, KEPT=states is not None, PACKED=documents is not None, EVEN=s % chunk == 0,
        H=h, P=p, N=n, G=g, R=r, A=a, L=chunk, **_options(launch.walks, shape, chunk),
    )  # fmt: skip
    return end


def _common(packed: Tensor, shape: Shape, chunk: int) -> dict:
    """Arguments that every kernel of products takes by name."""
    h, p, n, _, r, _ = shape
    s, precision = packed.size(0), "ieee" if packed.dtype == torch.float32 else "tf32"
    return dict(s=s, H=h, P=p, N=n, R=r, L=chunk, EVEN=s % chunk == 0, PRECISION=precision)


def _states(
    packed: Tensor,
    operands: Operands,
    shape: Shape,
    chunk: int,
    launch: Launch,
    start: Tensor | None = None,
    ends: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state at the start of each chunk [b, chunks, heads, head_dim, state_dim], and the last one in fp32 if asked for."""
    b = packed.size(1)
    h, p, n = shape[:3]
    columns = min(launch.columns, n)
    states = _no_states(packed, shape, chunk) if into is None else into
    end = packed.new_empty(b, h, p, n, dtype=torch.float32) if ends else None
    _states_kernel[(n // columns, h, b)](
        operands.k, operands.v, operands.kept, operands.left, start, states, end,
        COLUMNS=columns, STARTED=start is not None, ENDS=ends, BACK=False,
        **_common(packed, shape, chunk), **_options(launch.forward_states, shape, chunk),
    )  # fmt: skip
    return states, end


def _no_states(packed: Tensor, shape: Shape, chunk: int) -> Tensor:
    """A place for the states at the chunks' starts."""
    s, b, _ = packed.shape
    return packed.new_empty(b, triton.cdiv(s, chunk), shape.heads, shape.head_dim, shape.state_dim)


def _output(
    y: Tensor,
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    operands: Operands,
    states: Tensor,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None,
) -> None:
    """Writes y [s, b, inner]."""
    s, b, _ = packed.shape
    _output_kernel[(shape.heads, triton.cdiv(s, chunk), b)](
        packed, *_mimo(weights), weights.D, operands.q, operands.k, operands.v, prepared.decay, prepared.now, prepared.scale,
        operands.begun, states, y, documents, packed.stride(0), packed.stride(1), y.stride(0), y.stride(1),
        TILE=_tile_of(launch.output_tile, packed, shape), PACKED=documents is not None,
        **_common(packed, shape, chunk), **_options(launch.output, shape, chunk),
    )  # fmt: skip


def _tile_of(wanted: int, packed: Tensor, shape: Shape) -> int:
    # The compiler writes products of fp32 out, one multiplication at a time.
    return min(wanted, shape.state_dim, 32 if packed.dtype == torch.float32 else shape.state_dim)


def _options(chosen: tuple[int, int, int], shape: Shape, chunk: int) -> dict[str, int]:
    warps, stages, registers = chosen
    if not warps:
        # Warps of chained products lie along the rows, 16 each. Of 8 there is one program at a time, whatever its registers.
        warps, registers = (4, registers) if shape.rank * chunk <= 64 else (8, 0)
    if min(shape.head_dim, shape.state_dim) < 64:
        # Operands of several widths would lie at one place in shared memory, with several swizzles, and ptxas 12.8 takes wrong
        # addresses for some. With fewer than 4 warps there is no wgmma, and no such address.
        warps, registers = 2, 0
    return dict(num_warps=warps, num_stages=stages) | (dict(maxnreg=registers) if registers else {})


def _mimo(weights: Weights) -> tuple[Tensor, ...]:
    """mimo_x, mimo_z, mimo_o; with rank 1 something in their place, which is not read."""
    return tuple(weights.D if w is None else w for w in (weights.mimo_x, weights.mimo_z, weights.mimo_o))


def _backward(
    packed: Tensor,
    weights: Weights,
    prepared: Prepared,
    dy: Tensor,
    d_packed: Tensor,
    shape: Shape,
    chunk: int,
    launch: Launch,
    documents: Tensor | None,
    known: Tensor | None,
) -> tuple[Raw, list[Tensor | None]]:
    """Writes z's and x's columns of d_packed; returns what packed_gradients needs for the others, and the gradients of
    D, B_bias, C_bias, mimo_x, mimo_z, mimo_o. known: the states at the chunks' starts, where they were kept."""
    s, b, _ = packed.shape
    h, p, n, g, r, a = shape
    chunks, columns = triton.cdiv(s, chunk), min(launch.columns, n)
    common, together = _common(packed, shape, chunk), min(launch.entries or b, b)
    specialised = 0 < launch.specialised <= together * h and hopper.serves(packed, shape, chunk)

    def fp32(*size: int) -> Tensor:
        return packed.new_empty(*size, dtype=torch.float32)

    sums = fp32(3, b, h, s)
    raw = Raw(
        *(packed.new_empty(b, s, g, r, n) for _ in range(2)), *(fp32(b, h, s, a) for _ in range(2)),
        *sums, fp32(b, h, chunks),
    )  # fmt: skip
    tokens, steps = max(1, launch.rows // r), max(1, launch.steps // r)
    tiles, halves = triton.cdiv(s, tokens), min(launch.halves, n // 2)
    # A program sums the gradients of mimo weights over some tokens. A power of two mostly divides s: no masks.
    per = max(1, min(launch.chunks, together * h * triton.cdiv(s, steps) // launch.programs))
    per = 1 << (per.bit_length() - 1)
    slots = triton.cdiv(s, steps * per)
    d_D = fp32(b, h, 1 if specialised else chunks)
    d_x, d_z, d_o = (fp32(b, slots, h, r, p) if r > 1 else None for _ in range(3))
    d_B, d_C = (fp32(b, tiles, h, r, n) for _ in range(2))

    for of in _entries(b, launch):
        own, mine, numbers = packed[:, of], _at(prepared, of), None if documents is None else documents[of]
        entries, dy_of, out = own.size(1), dy[:, of], d_packed[:, of]
        operands = Operands.of(own, weights, mine, shape, chunk, launch, numbers, dy_of)
        states = _states(own, operands, shape, chunk, launch)[0] if known is None else known[of]
        rows, decays = operands[:4], (mine.decay, mine.now, mine.scale, operands.begun, operands.until)
        of_sums, into = sums[:, of], (raw.ends[of], d_D[of])
        if specialised:
            hopper.gradients(weights.D, rows, decays, operands.left, states, of_sums, *into, numbers, shape, chunk)
        else:
            d_states, more_ends = torch.empty_like(states), fp32(entries, h, chunks)
            _states_kernel[(n // columns, h, entries)](
                operands.q, operands.g, operands.begun, operands.left, None, d_states, None,
                COLUMNS=columns, STARTED=False, ENDS=False, BACK=True,
                **common, **_options(launch.backward_states, shape, chunk),
            )  # fmt: skip
            _gradients_kernel[(h, chunks, entries)](
                weights.D, *rows, *decays, operands.left, states, d_states, *of_sums, *into, more_ends, numbers,
                TILE=_tile_of(launch.gradients_tile, packed, shape), PACKED=numbers is not None,
                **common, **_options(launch.gradients, shape, chunk),
            )  # fmt: skip
            raw.ends[of].add_(more_ends)
            del d_states
        # From here on the gradients of q, k and v lie where these were, and o where its gradient was.
        _values_kernel[(h, slots, entries)](
            own, dy_of, *_mimo(weights), operands.v, operands.g, out, *(None if t is None else t[of] for t in (d_x, d_z, d_o)),
            s, own.stride(0), own.stride(1), *dy_of.stride()[:2], *out.stride()[:2],
            H=h, P=p, R=r, TOKENS=steps, PER=per, EVEN=s % (steps * per) == 0, num_warps=launch.values,
        )  # fmt: skip
        _keys_kernel[(2 * tiles * (n // 2 // halves), g, entries)](
            mine.keys, mine.queries, weights.B_bias, weights.C_bias, mine.cos, mine.sin, operands.k, operands.q,
            raw.keys[of], raw.queries[of], raw.angles[of], raw.more_angles[of], d_B[of], d_C[of], s,
            H=h, HALF=n // 2, G=g, R=r, A=a, TOKENS=tokens, COLUMNS=halves, EVEN=s % tokens == 0,
            num_warps=launch.keys,
        )  # fmt: skip
        del rows, decays, operands, states  # before the next ones are made
    return raw, [d_D.sum((0, 2)), *(None if t is None else t.sum((0, 1)) for t in (d_B, d_C, d_x, d_z, d_o))]


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Names: row m of a chunk is token m // R, rank m % R. q, k: turned queries and keys. v, g: rows of x mimo_x and of the
# gradient of o. c: log decay since the chunk began. [M, M] matrices have queries in rows, keys in columns.


@triton.jit
def _rows(chunk, s, L: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr):
    """Token, rank and presence of each row of a chunk; with EVEN every chunk is whole, and the compiler drops the masks."""
    row = tl.arange(0, L * R)
    token = chunk * L + row // R
    ok = tl.full([L * R], True, tl.int1) if EVEN else token < s
    return token, row % R, ok


@triton.jit
def _angle(cos, sin, token, ok, column, A: tl.constexpr, ALL: tl.constexpr):
    """cos and sin of each row and column of a half; columns from A on do not turn; ALL: there are none.
    Pointers of a batch entry and head."""
    turning = ok[:, None] if ALL else ok[:, None] & (column < A)[None, :]
    at = token[:, None] * A + column[None, :]
    c = tl.load(cos + at, mask=turning, other=1.0).to(tl.float32)
    return c, tl.load(sin + at, mask=turning, other=0.0).to(tl.float32)


@triton.jit
def _values(x, stride_s, mimo, token, rank, ok, P: tl.constexpr, R: tl.constexpr):
    """x of each row's token and head, and the rank's weights of it (ones if there are none), [M, P] fp32."""
    p = tl.arange(0, P)
    at = x + token[:, None].to(tl.int64) * stride_s + p[None, :]
    value = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)
    weight = tl.full(value.shape, 1.0, tl.float32)
    if R > 1:
        weight = tl.load(mimo + rank[:, None] * P + p[None, :])
    return value, weight


@triton.jit
def _over_ranks(x, L: tl.constexpr, R: tl.constexpr):
    """[L R, n] -> [L, n], summed over the rows of a token."""
    if R > 1:
        x = tl.sum(tl.reshape(x, [L, R, x.shape[1]]), 1)
    return x


@triton.jit
def _over_tokens(x, L: tl.constexpr, R: tl.constexpr):
    """[L R, n] -> [R, n], summed over tokens."""
    return tl.sum(tl.reshape(x, [L, R, x.shape[1]]), 0)


@triton.jit
def _by_token(x, L: tl.constexpr, R: tl.constexpr):
    """[L R] -> [L], summed over the rows of a token."""
    if R > 1:
        x = tl.sum(tl.reshape(x, [L, R]), 1)
    return x


@triton.jit
def _diagonal(value, M: tl.constexpr):
    """[M, M] with `value` on its diagonal: D, which skips the state, is a score of each row with itself."""
    row = tl.arange(0, M)
    return tl.where(row[:, None] == row[None, :], value, 0.0)


@triton.jit
def _row(pointer, token, ok):
    """One number a token, for each row; 0 for rows that are not there."""
    return tl.load(pointer + token, mask=ok, other=0.0)


@triton.jit
def _tile(pointer, row, ok, column, WIDTH: tl.constexpr):
    """[rows, columns] of a matrix of WIDTH columns; rows that are not there are 0."""
    return tl.load(pointer + row[:, None] * WIDTH + column[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def _turned(plain_low, plain_high, bias, c, s, HALF: tl.constexpr):
    """Both halves of normed keys (or queries) + bias, turned."""
    low = plain_low.to(tl.float32) + tl.load(bias)
    high = plain_high.to(tl.float32) + tl.load(bias + HALF)
    return (low * c - high * s).to(plain_low.dtype), (low * s + high * c).to(plain_low.dtype)


@triton.jit
def _turn_kernel(
    keys, queries, B_bias, C_bias, cos, sin, k, q, s,
    H: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr, TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, HALF)
    token, rank, ok = _rows(tl.program_id(0), s, TOKENS, R, EVEN)
    known = ok[:, None]
    of = b * H + h
    of_group = (b * s * G + h // (H // G)) * (R * 2 * HALF)
    at = (token * (G * R) + rank)[:, None] * (2 * HALF) + column[None, :]
    keys += of_group
    queries += of_group
    key_low = tl.load(keys + at, mask=known, other=0.0)
    key_high = tl.load(keys + at + HALF, mask=known, other=0.0)
    query_low = tl.load(queries + at, mask=known, other=0.0)
    query_high = tl.load(queries + at + HALF, mask=known, other=0.0)
    c, sn = _angle(cos + of * s * A, sin + of * s * A, token, ok, column, A, A == HALF)
    bias = rank[:, None] * (2 * HALF) + column[None, :]
    B_bias += h * (R * 2 * HALF)
    C_bias += h * (R * 2 * HALF)
    k += of * s * (R * 2 * HALF)
    q += of * s * (R * 2 * HALF)
    to = (token * R + rank)[:, None] * (2 * HALF) + column[None, :]
    low, high = _turned(key_low, key_high, B_bias + bias, c, sn, HALF)
    tl.store(k + to, low, mask=known)
    tl.store(k + to + HALF, high, mask=known)
    low, high = _turned(query_low, query_high, C_bias + bias, c, sn, HALF)
    tl.store(q + to, low, mask=known)
    tl.store(q + to + HALF, high, mask=known)


@triton.jit
def _rows_kernel(
    packed, dy, mimo_x, mimo_z, mimo_o, v, g, s, stride_s, stride_b, dy_s, dy_b,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    token, rank, ok = _rows(tl.program_id(1), s, TOKENS, R, EVEN)
    packed += b * stride_b + h * P
    at = h * R * P
    to = (b * H + h) * s * (R * P) + (token * R + rank)[:, None] * P + tl.arange(0, P)[None, :]
    x, weight = _values(packed + H * P, stride_s, mimo_x + at, token, rank, ok, P, R)
    tl.store(v + to, (x * weight).to(v.dtype.element_ty), mask=ok[:, None])
    if g is not None:
        z, by = _values(packed, stride_s, mimo_z + at, token, rank, ok, P, R)
        d_out, out = _values(dy + b * dy_b + h * P, dy_s, mimo_o + at, token, rank, ok, P, R)
        gate = z * by
        tl.store(g + to, (d_out * out * gate * tl.sigmoid(gate)).to(g.dtype.element_ty), mask=ok[:, None])


@triton.jit
def _bounds_kernel(
    decay, scale, documents, begun, until, kept, left, s,
    H: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    of = tl.program_id(2).to(tl.int64) * H + tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ok = token < s
    at = of * s + token
    first = token // L * L
    end = tl.minimum(first + L, s) - 1
    c = tl.load(decay + at, mask=ok, other=0.0)
    last = tl.load(decay + of * s + end, mask=ok, other=0.0)
    since = tl.exp(c)
    till = tl.exp(tl.minimum(last - c, 0.0))
    whole = tl.exp(last)
    if PACKED:
        documents += tl.program_id(2) * s
        here = tl.load(documents + token, mask=ok, other=0)
        before = tl.load(documents + tl.maximum(first - 1, 0), mask=ok, other=0)
        then = tl.load(documents + end, mask=ok, other=0)
        since = tl.where(here == before, since, 0.0)
        till = tl.where(here == then, till, 0.0)
        whole = tl.where(before == then, whole, 0.0)
    tl.store(begun + at, since, mask=ok)
    tl.store(until + at, till, mask=ok)
    tl.store(kept + at, till * tl.load(scale + at, mask=ok, other=0.0), mask=ok)
    tl.store(left + of * tl.cdiv(s, L) + token // L, whole, mask=ok & (token == first))


@triton.jit
def _states_kernel(
    k, v, factor, left, start, states, end, s,
    COLUMNS: tl.constexpr, STARTED: tl.constexpr, ENDS: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the start of each chunk, of k and the rows of v times `factor`. BACK: from the last chunk to the first; with q, g
    and `begun` it is the gradient of the state at the end of each."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, P)
    of = b * H + h
    k += of * s * R * N
    v += of * s * R * P
    factor += of * s
    chunks = tl.cdiv(s, L)
    left += of * chunks
    kind = states.dtype.element_ty
    tile = p[:, None] * N + column[None, :]
    states += ((b * chunks + (chunks - 1 if BACK else 0)) * H + h) * (P * N) + tile
    state = tl.zeros([P, COLUMNS], tl.float32)
    if STARTED:
        state = tl.load(start + of * (P * N) + tile)
    for i in range(chunks):
        chunk = chunks - 1 - i if BACK else i
        tl.store(states, state.to(kind))
        states += -H * P * N if BACK else H * P * N
        token, rank, ok = _rows(chunk, s, L, R, EVEN)
        row = token * R + rank
        rows = _tile(v, row, ok, p, P).to(tl.float32) * _row(factor, token, ok)[:, None]
        key = _tile(k, row, ok, column, N)
        state = tl.dot(tl.trans(rows.to(kind)), key, state * tl.load(left + chunk), input_precision=PRECISION)
    if ENDS:
        tl.store(end + of * (P * N) + tile, state)


@triton.jit
def _between(c, token, ok, documents, s, PACKED: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """[M, M]: the decay between a query and a key, 0 unless the key is earlier; and whether they are of one token.
    KEYS_FIRST: transposed, with keys in rows."""
    query: tl.constexpr = 0 if KEYS_FIRST else 1  # the dimension that a query's numbers do not have
    key: tl.constexpr = 1 - query
    # A row past the end is later than every other and its c is 0: what has been forgotten until there would be above 0.
    earlier = (tl.expand_dims(token, key) < tl.expand_dims(token, query)) & tl.expand_dims(ok, query)
    if PACKED:
        number = tl.load(documents + token, mask=token < s, other=-1)
        earlier = earlier & (number[:, None] == number[None, :])
    # Only what the mask drops can be above 0.
    between = tl.exp(tl.where(earlier, tl.expand_dims(c, query) - tl.expand_dims(c, key), float("-inf")))
    return between, token[None, :] == token[:, None]


@triton.jit
def _output_kernel(
    packed, mimo_x, mimo_z, mimo_o, D, q, k, v, decay, now, scale, begun, states, y,
    documents, stride_s, stride_b, y_s, y_b, s, TILE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    p = tl.arange(0, P)
    of = b * H + h
    if PACKED:
        documents += b * s
    kind = states.dtype.element_ty
    token, rank, ok = _rows(chunk, s, L, R, EVEN)
    row = token * R + rank
    q += of * s * R * N
    k += of * s * R * N
    states += ((b * tl.cdiv(s, L) + chunk) * H + h) * (P * N)
    every = tl.full([P], True, tl.int1)
    scores = tl.zeros([L * R, L * R], tl.float32)
    o = tl.zeros([L * R, P], tl.float32)
    for first in tl.range(0, N, TILE, disable_licm=True):
        column = first + tl.arange(0, TILE)
        query = _tile(q, row, ok, column, N)
        scores = tl.dot(query, tl.trans(_tile(k, row, ok, column, N)), scores, input_precision=PRECISION)
        o = tl.dot(query, tl.trans(_tile(states, p, every, column, N)), o, input_precision=PRECISION)
    o *= _row(begun + of * s, token, ok)[:, None]
    between, same = _between(_row(decay + of * s, token, ok), token, ok, documents, s, PACKED)
    later, own = _row(scale + of * s, token, ok), _row(now + of * s, token, ok)
    scores = scores * tl.where(same, own[None, :], between * later[None, :]) + _diagonal(tl.load(D + h), L * R)
    o = tl.dot(scores.to(kind), _tile(v + of * s * R * P, row, ok, p, P), o, input_precision=PRECISION)

    z, by = _values(packed + b * stride_b + h * P, stride_s, mimo_z + h * R * P, token, rank, ok, P, R)
    gate = z * by
    o *= gate * tl.sigmoid(gate)
    if R > 1:
        o *= tl.load(mimo_o + h * R * P + rank[:, None] * P + p[None, :])
    o = _over_ranks(o, L, R)
    token = chunk * L + tl.arange(0, L)
    to = y + b * y_b + token[:, None].to(tl.int64) * y_s + h * P + p[None, :]
    tl.store(to, o.to(kind), mask=(token < s)[:, None])


@triton.jit
def _of_ranks(weights, P: tl.constexpr, R: tl.constexpr):
    """[R, P] in memory -> [P, R, 1]. One load a rank: so few values are loaded by the threads that use them."""
    p = tl.arange(0, P)
    x = tl.load(weights + p)
    if R == 2:
        x = tl.join(x, tl.load(weights + P + p))
    if R == 4:
        odd = tl.join(tl.load(weights + P + p), tl.load(weights + 3 * P + p))
        x = tl.join(tl.join(x, tl.load(weights + 2 * P + p)), odd)
    return tl.reshape(x, [P, R, 1])


@triton.jit
def _turned_chunk(
    plain, bias, cos, sin, chunk, s,
    HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr, L: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Both halves of a chunk's turned keys or queries of one head, [L, R, HALF]."""
    token = tl.arange(0, L)[:, None, None]
    rank = tl.arange(0, R)[None, :, None]
    column = tl.arange(0, HALF)[None, None, :]
    first = chunk * L
    known = tl.full([L, 1, 1], True, tl.int1) if EVEN else first + token < s
    turning = known & (column < A)
    far = tl.cast(first, tl.int64)
    angle = far * A + token * A + column
    c = tl.load(cos + angle, mask=turning, other=1.0).to(tl.float32)
    sn = tl.load(sin + angle, mask=turning, other=0.0).to(tl.float32)
    at = plain + far * (G * R * 2 * HALF) + (token * (G * R * 2 * HALF) + rank * (2 * HALF) + column)
    low = tl.load(at, mask=known, other=0.0)
    high = tl.load(at + HALF, mask=known, other=0.0)
    # As many biases as there are values: a smaller load would lie in other threads.
    return _turned(low, high, bias + (token * 0 + rank * (2 * HALF) + column), c, sn, HALF)


@triton.jit
def _rank_by_rank(x):
    """[L, R, n] -> [R L, n]: a token's ranks L rows apart."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), [x.shape[0] * x.shape[1], x.shape[2]])


@triton.jit
def _walk_kernel(
    packed, keys, queries, B_bias, C_bias, cos, sin, mimo_x, mimo_z, mimo_o, D, decay, now, scale, begun, kept, left,
    start, end, states, y, documents, s, stride_s, stride_b, y_s, y_b,
    STARTED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Per head, all of the forward pass: from chunk to chunk with the state in registers. Everything is transposed, tokens in
    columns, so that the state is the left operand of its product: that may lie in registers. The right ones are 64 columns wide.

    Row m of a chunk is here rank m // L, token m % L: then a thread has all ranks of its tokens of o, and sums over them by itself.
    """
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = N // 2
    M: tl.constexpr = L * R
    of = b * H + h
    kind = y.dtype.element_ty
    p = tl.arange(0, P)
    column = tl.arange(0, HALF)
    single = tl.arange(0, L)
    rank = tl.arange(0, R)
    of_group = (b * s * G + h // (H // G)) * (R * N)
    keys += of_group
    queries += of_group
    B_bias += h * (R * N)
    C_bias += h * (R * N)
    cos += of * s * A
    sin += of * s * A
    packed += b * stride_b + h * P
    y += b * y_b + h * P
    decay += of * s
    now += of * s
    scale += of * s
    begun += of * s
    kept += of * s
    chunks = tl.cdiv(s, L)
    left += of * chunks
    if KEPT:
        states += (b * chunks * H + h) * (P * N) + p[:, None] * N + column[None, :]
    if R > 1:
        mimo_x += h * (R * P)
        mimo_z += h * (R * P)
        mimo_o += h * (R * P)
        by_x = _of_ranks(mimo_x, P, R)
    if PACKED:
        documents += b * s
    skip = tl.where(rank[:, None, None, None] == rank[None, None, :, None], tl.load(D + h), 0.0)
    low = tl.zeros([P, HALF], tl.float32)
    high = tl.zeros([P, HALF], tl.float32)
    of_state = of * (P * N) + p[:, None] * N + column[None, :]
    if STARTED:
        low = tl.load(start + of_state)
        high = tl.load(start + of_state + HALF)
    # Keys are turned one chunk ahead: what a loop carries may be a left operand in shared memory, where it is the right one, too.
    k_low, k_high = _turned_chunk(keys, B_bias, cos, sin, 0, s, HALF, G, R, A, L, EVEN)
    k_low, k_high = _rank_by_rank(k_low), _rank_by_rank(k_high)
    for chunk in tl.range(chunks, disable_licm=True):
        token = chunk * L + single
        ok = tl.full([L], True, tl.int1) if EVEN else token < s

        q_low, q_high = _turned_chunk(queries, C_bias, cos, sin, chunk, s, HALF, G, R, A, L, EVEN)
        q_low, q_high = tl.trans(_rank_by_rank(q_low)), tl.trans(_rank_by_rank(q_high))
        scores = tl.dot(k_low, q_low)
        scores = tl.dot(k_high, q_high, scores)
        # [L, L], the same for all ranks.
        between, same = _between(_row(decay, token, ok), token, ok, documents, s, PACKED, True)
        later, own = _row(scale, token, ok), _row(now, token, ok)
        weights = tl.where(same, own[:, None], between * later[:, None])
        scores = tl.reshape(scores, [R, L, R, L]) * weights[None, :, None, :]
        scores += tl.where(same[None, :, None, :], skip, 0.0)
        scores = tl.reshape(scores.to(kind), [M, M])

        # Columns of z and x: [P, 1, L].
        far = packed + token[None, None, :].to(tl.int64) * stride_s + p[:, None, None]
        x = tl.load(far + H * P, mask=ok[None, None, :], other=0.0).to(tl.float32)
        z = tl.load(far, mask=ok[None, None, :], other=0.0).to(tl.float32)
        if R > 1:
            x = x * by_x
        v = x.to(kind)

        if KEPT:
            tl.store(states, low.to(kind))
            tl.store(states + HALF, high.to(kind))
            states += H * P * N
        o = tl.dot(low.to(kind), q_low)
        o = tl.dot(high.to(kind), q_high, o)
        o = tl.reshape(o, [P, R, L]) * _row(begun, token, ok)[None, None, :]
        o = tl.dot(tl.reshape(v, [P, M]), scores, tl.reshape(o, [P, M]))
        gate = z
        if R > 1:
            gate = z * _of_ranks(mimo_z, P, R)
        o = tl.reshape(o, [P, R, L]) * (gate * tl.sigmoid(gate))
        if R > 1:
            o *= _of_ranks(mimo_o, P, R)
        out = tl.trans(tl.sum(o, 1))
        tl.store(y + token[:, None].to(tl.int64) * y_s + p[None, :], out.to(kind), mask=ok[:, None])

        rows = tl.reshape((v.to(tl.float32) * _row(kept, token, ok)[None, None, :]).to(kind), [P, M])
        by = tl.load(left + chunk)
        low = tl.dot(rows, k_low, low * by)
        high = tl.dot(rows, k_high, high * by)
        after = tl.minimum(chunk + 1, chunks - 1)
        k_low, k_high = _turned_chunk(keys, B_bias, cos, sin, after, s, HALF, G, R, A, L, EVEN)
        k_low, k_high = _rank_by_rank(k_low), _rank_by_rank(k_high)
    if ENDS:
        tl.store(end + of_state, low)
        tl.store(end + of_state + HALF, high)


@triton.jit
def _both_ways(rows, state, by, scores, others, PRECISION: tl.constexpr):
    """What rows meet in a state of which `by` is left, and by their scores in the chunk's other rows."""
    out = tl.dot(rows, state, input_precision=PRECISION) * by[:, None]
    return tl.dot(scores, others, out, input_precision=PRECISION)


@triton.jit
def _gradients_kernel(
    D, q, k, v, g, decay, now, scale, begun, until, left, states, d_states,
    d_row, d_now, d_scale, ends, d_D, more_ends, documents, s, TILE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: gradients of D, steps and decays; those of q, k and v in the places of q, k and v, o in that of g."""
    h = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    M: tl.constexpr = L * R
    p = tl.arange(0, P)
    every = tl.full([P], True, tl.int1)
    chunks = tl.cdiv(s, L)
    kind = q.dtype.element_ty
    of = b * H + h
    if PACKED:
        documents += b * s
    token, rank, ok = _rows(chunk, s, L, R, EVEN)
    row = token * R + rank
    single = chunk * L + tl.arange(0, L)
    q += of * s * R * N
    k += of * s * R * N
    v += of * s * R * P
    g += of * s * R * P
    at_state = ((b * chunks + chunk) * H + h) * (P * N)
    states += at_state
    d_states += at_state

    c, since, till = _row(decay + of * s, token, ok), _row(begun + of * s, token, ok), _row(until + of * s, token, ok)
    later, own = _row(scale + of * s, token, ok), _row(now + of * s, token, ok)
    if TILE == N:
        # Nothing else needs registers yet: they hold all that is on its way, and there is one wait instead of four.
        state = _tile(states, p, every, tl.arange(0, N), N)
        d_state = _tile(d_states, p, every, tl.arange(0, N), N)
        query = _tile(q, row, ok, tl.arange(0, N), N)
        key = _tile(k, row, ok, tl.arange(0, N), N)
    rows_v = _tile(v, row, ok, p, P)
    rows_g = _tile(g, row, ok, p, P)
    # The sum of state * d_state is the diagonal of a product: so neither has to be in registers.
    end = tl.zeros([P], tl.float32)
    for first in tl.range(0, N, TILE, disable_licm=True):
        column = first + tl.arange(0, TILE)
        state_part = _tile(states, p, every, column, N) if TILE < N else state
        d_state_part = _tile(d_states, p, every, column, N) if TILE < N else d_state
        products = tl.dot(state_part, tl.trans(d_state_part), input_precision=PRECISION)
        end += tl.sum(products * _diagonal(1.0, P), 1)
    tl.store(ends + of * chunks + chunk, tl.sum(end, 0) * tl.load(left + of * chunks + chunk))

    scores = tl.zeros([M, M], tl.float32)
    if TILE == N:
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
    else:
        for first in tl.range(0, N, TILE, disable_licm=True):
            column = first + tl.arange(0, TILE)
            query_part = _tile(q, row, ok, column, N)
            key_part = _tile(k, row, ok, column, N)
            scores = tl.dot(query_part, tl.trans(key_part), scores, input_precision=PRECISION)
    d_scores = tl.dot(rows_g, tl.trans(rows_v), input_precision=PRECISION)

    between, same = _between(c, token, ok, documents, s, PACKED)
    tl.store(d_D + of * chunks + chunk, tl.sum(tl.sum(d_scores * _diagonal(1.0, M), 1), 0))
    both = scores * d_scores
    at_once = tl.sum(tl.where(same, both, 0.0), 1)
    tl.store(d_now + of * s + single, _by_token(at_once, L, R), mask=single < s)
    both *= between
    of_row = tl.sum(both * later[None, :], 1)
    step = _by_token(tl.sum(both, 0), L, R)
    weights = tl.where(same, own[None, :], between * later[None, :])
    d_scores = (d_scores * weights).to(kind)
    scores = (scores * weights + _diagonal(tl.load(D + h), M)).to(kind)

    at_p = row[:, None] * P + p[None, :]
    o = tl.zeros([M, P], tl.float32)
    for first in tl.range(0, N, TILE, disable_licm=True):
        column = first + tl.arange(0, TILE)
        if TILE < N:
            query_part = _tile(q, row, ok, column, N)
            state_part = _tile(states, p, every, column, N)
        else:
            query_part, state_part = query, state
        o = tl.dot(query_part, tl.trans(state_part), o, input_precision=PRECISION)
    o *= since[:, None]
    of_row += tl.sum(rows_g.to(tl.float32) * o, 1)
    tl.store(d_row + of * s + single, _by_token(of_row, L, R), mask=single < s)
    o = tl.dot(scores, rows_v, o, input_precision=PRECISION)
    tl.store(g + at_p, o.to(kind), mask=ok[:, None])
    if TILE == N:
        at = row[:, None] * N + tl.arange(0, N)[None, :]
        dq = _both_ways(rows_g, state, since, d_scores, key, PRECISION)
        tl.store(q + at, dq.to(kind), mask=ok[:, None])

    dv = tl.zeros([M, P], tl.float32)
    for first in tl.range(0, N, TILE, disable_licm=True):
        column = first + tl.arange(0, TILE)
        if TILE < N:
            key_part = _tile(k, row, ok, column, N)
            d_state_part = _tile(d_states, p, every, column, N)
        else:
            key_part, d_state_part = key, d_state
        dv = tl.dot(key_part, tl.trans(d_state_part), dv, input_precision=PRECISION)
    dv *= till[:, None]
    carried = tl.sum(rows_v.to(tl.float32) * dv, 1)
    tl.store(more_ends + of * chunks + chunk, tl.sum(carried * later, 0))
    tl.store(d_scale + of * s + single, step + _by_token(carried, L, R), mask=single < s)
    dv = tl.dot(tl.trans(scores), rows_g, dv * later[:, None], input_precision=PRECISION)
    tl.store(v + at_p, dv.to(kind), mask=ok[:, None])
    if TILE == N:
        dk = _both_ways(rows_v, d_state, till * later, tl.trans(d_scores), query, PRECISION)
        tl.store(k + at, dk.to(kind), mask=ok[:, None])
    else:
        for first in tl.range(0, N, TILE, disable_licm=True):
            column = first + tl.arange(0, TILE)
            query_part = _tile(q, row, ok, column, N)
            key_part = _tile(k, row, ok, column, N)
            state_part = _tile(states, p, every, column, N)
            d_state_part = _tile(d_states, p, every, column, N)
            at = row[:, None] * N + column[None, :]
            dq = _both_ways(rows_g, state_part, since, d_scores, key_part, PRECISION)
            tl.store(q + at, dq.to(kind), mask=ok[:, None])
            dk = _both_ways(rows_v, d_state_part, till * later, tl.trans(d_scores), query_part, PRECISION)
            tl.store(k + at, dk.to(kind), mask=ok[:, None])


@triton.jit
def _values_kernel(
    packed, dy, mimo_x, mimo_z, mimo_o, dv, o, d_packed, d_mimo_x, d_mimo_z, d_mimo_o,
    s, stride_s, stride_b, dy_s, dy_b, out_s, out_b,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """From rows of o and of the gradient of v: gradients of x, z and mimo_*. One rank after the other, so that a thread has all
    ranks of its tokens: it loads what they share once and sums over them in registers."""
    h = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    p = tl.arange(0, P)
    packed += b * stride_b + h * P
    d_packed += b * out_b + h * P
    dy += b * dy_b + h * P
    dv += (b * H + h) * s * (R * P)
    o += (b * H + h) * s * (R * P)
    kind = packed.dtype.element_ty
    # As many weights as there are values: a smaller load would lie in other threads.
    weight = h * R * P + tl.arange(0, TOKENS)[:, None] * 0 + p[None, :]
    sum_x, sum_z, sum_o = (), (), ()
    for _ in tl.static_range(R):
        sum_x += (tl.zeros([TOKENS, P], tl.float32),)
        sum_z += (tl.zeros([TOKENS, P], tl.float32),)
        sum_o += (tl.zeros([TOKENS, P], tl.float32),)
    for part in tl.range(PER, disable_licm=True):
        token = (tl.program_id(1) * PER + part) * TOKENS + tl.arange(0, TOKENS)
        known = (tl.full([TOKENS], True, tl.int1) if EVEN else token < s)[:, None]
        far = token[:, None].to(tl.int64)
        at = token[:, None] * (R * P) + p[None, :]
        z = tl.load(packed + far * stride_s + p[None, :], mask=known, other=0.0).to(tl.float32)
        x = tl.load(packed + H * P + far * stride_s + p[None, :], mask=known, other=0.0).to(tl.float32)
        d_y = tl.load(dy + far * dy_s + p[None, :], mask=known, other=0.0).to(tl.float32)
        d_z = tl.zeros([TOKENS, P], tl.float32)
        d_x = tl.zeros([TOKENS, P], tl.float32)
        more_x, more_z, more_o = (), (), ()
        for r in tl.static_range(R):
            d_out = tl.load(o + at + r * P, mask=known, other=0.0).to(tl.float32) * d_y
            gradient = tl.load(dv + at + r * P, mask=known, other=0.0).to(tl.float32)
            if R > 1:
                by = tl.load(mimo_z + weight + r * P)
                gate = z * by
                sigmoid = tl.sigmoid(gate)
                more_o += (sum_o[r] + d_out * gate * sigmoid,)
                d_out *= tl.load(mimo_o + weight + r * P)
                d_gate = d_out * (sigmoid * (1 + gate * (1 - sigmoid)))
                more_z += (sum_z[r] + d_gate * z,)
                more_x += (sum_x[r] + gradient * x,)
                d_z += d_gate * by
                d_x += gradient * tl.load(mimo_x + weight + r * P)
            else:
                sigmoid = tl.sigmoid(z)
                d_z += d_out * (sigmoid * (1 + z * (1 - sigmoid)))
                d_x += gradient
        if R > 1:
            sum_x, sum_z, sum_o = more_x, more_z, more_o
        to = d_packed + far * out_s + p[None, :]
        tl.store(to, d_z.to(kind), mask=known)
        tl.store(to + H * P, d_x.to(kind), mask=known)
    if R > 1:
        slot = ((b * tl.num_programs(1) + tl.program_id(1)) * H + h) * (R * P) + p
        for r in tl.static_range(R):
            tl.store(d_mimo_x + slot + r * P, tl.sum(sum_x[r], 0))
            tl.store(d_mimo_z + slot + r * P, tl.sum(sum_z[r], 0))
            tl.store(d_mimo_o + slot + r * P, tl.sum(sum_o[r], 0))


@triton.jit
def _keys_kernel(
    keys, queries, B_bias, C_bias, cos, sin, dk, dq, d_keys, d_queries, d_angles_k, d_angles_q, d_B, d_C, s,
    H: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Per group and some tokens, from the gradients of every head's k (or q): of B (C), its bias, and its share of the summed
    angles'. Columns that turn and those that do not have a loop each: behind a branch a program would wait for what it loads."""
    BLOCKS: tl.constexpr = HALF // COLUMNS
    plain, bias, turned, out, d_angles, d_bias = keys, B_bias, dk, d_keys, d_angles_k, d_B
    if tl.program_id(0) // BLOCKS % 2 == 1:
        plain, bias, turned, out, d_angles, d_bias = queries, C_bias, dq, d_queries, d_angles_q, d_C
    first = tl.program_id(0) % BLOCKS * COLUMNS
    tile = tl.program_id(0) // (2 * BLOCKS)
    tiles = tl.num_programs(0) // (2 * BLOCKS)
    group = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    start = group * (H // G)
    column = first + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, R)
    token, rank, ok = _rows(tile, s, TOKENS, R, EVEN)
    known = ok[:, None]
    of = b * H + start
    plain += (b * s * G + group) * (R * 2 * HALF)
    out += (b * s * G + group) * (R * 2 * HALF)
    turned += of * s * (R * 2 * HALF)
    d_bias += ((b * tiles + tile) * H + start) * (R * 2 * HALF)
    at = (token * (G * R) + rank)[:, None] * (2 * HALF) + column[None, :]
    row = (token * R + rank)[:, None] * (2 * HALF) + column[None, :]
    to = ranks[:, None] * (2 * HALF) + column[None, :]
    far = tl.cast(s, tl.int64)
    low_total = tl.zeros([TOKENS * R, COLUMNS], tl.float32)
    high_total = tl.zeros([TOKENS * R, COLUMNS], tl.float32)
    if first < A:
        single = tile * TOKENS + tl.arange(0, TOKENS)
        turning = (single < s)[:, None] & (column < A)[None, :]
        angle = of * s * A
        bias += start * (R * 2 * HALF)
        add = rank[:, None] * (2 * HALF) + column[None, :]
        sums_at = single[:, None] * A + column[None, :]
        for _ in tl.range(H // G, disable_licm=True):
            low = tl.load(turned + row, mask=known, other=0.0).to(tl.float32)
            high = tl.load(turned + row + HALF, mask=known, other=0.0).to(tl.float32)
            c, sn = _angle(cos + angle, sin + angle, token, ok, column, A, A % COLUMNS == 0)
            plain_low = tl.load(plain + at, mask=known, other=0.0)
            plain_high = tl.load(plain + at + HALF, mask=known, other=0.0)
            # The vectors as the products read them, rounded: then what a pair of tokens adds at one it takes away at the other.
            own_low, own_high = _turned(plain_low, plain_high, bias + add, c, sn, HALF)
            sums = _over_ranks(own_low * high - own_high * low, TOKENS, R)
            low, high = c * low + sn * high, c * high - sn * low
            low_total += low
            high_total += high
            tl.store(d_angles + angle + sums_at, sums, mask=turning)
            tl.store(d_bias + to, _over_tokens(low, TOKENS, R))
            tl.store(d_bias + to + HALF, _over_tokens(high, TOKENS, R))
            turned += far * (R * 2 * HALF)
            angle += far * A
            bias += R * 2 * HALF
            d_bias += R * 2 * HALF
    else:
        for _ in tl.range(H // G, disable_licm=True):
            low = tl.load(turned + row, mask=known, other=0.0).to(tl.float32)
            high = tl.load(turned + row + HALF, mask=known, other=0.0).to(tl.float32)
            low_total += low
            high_total += high
            tl.store(d_bias + to, _over_tokens(low, TOKENS, R))
            tl.store(d_bias + to + HALF, _over_tokens(high, TOKENS, R))
            turned += far * (R * 2 * HALF)
            d_bias += R * 2 * HALF
    tl.store(out + at, low_total.to(out.dtype.element_ty), mask=known)
    tl.store(out + at + HALF, high_total.to(out.dtype.element_ty), mask=known)
