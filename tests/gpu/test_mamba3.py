"""blocks/mamba3/kernel.py against naive.py in fp64: outputs, every gradient, pieces of a sequence, poisoned memory.

On a GPU in bf16 and fp32. With TRITON_INTERPRET=1 tiny cases on a CPU in fp32 (tests/blocks/test_mamba3.py does that). The
comparisons and their limits are those of benchmarks/mamba3.py, which prints them beside the times.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from benchmarks import mamba3 as bench
from nam_megatron.blocks.mamba3 import hopper, kernel, prepare

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]  # where each test is not anyway
DEVICE = "cpu" if INTERPRETED else "cuda"

CASES, STRONG, WALKED = bench.CASES, bench.STRONG, bench.WALKED
if INTERPRETED:
    # Together: several steps a program, tiles of the state, entries one by one, an unfinished chunk, documents, every rank.
    two, split, long = bench.TINY._replace(heads=2), kernel.Launch(programs=1000), kernel.Launch(chunks=2, programs=1)
    tiled = kernel.Launch(entries=1, output_tile=16, gradients_tile=16, halves=8)
    CASES = [
        bench.Case(two._replace(groups=1), 4, 6, 2, torch.float32, launch=split),
        bench.Case(two._replace(groups=1), 4, 8, 2, torch.float32, launch=tiled),
        bench.Case(two._replace(rank=1), 16, 35, 1, torch.float32, launch=long),
        bench.Case(two._replace(rank=2, groups=1, angles=16), 8, 19, 1, torch.float32, (5, 7, 7)),
        bench.Case(two._replace(rank=2), 8, 1, 1, torch.float32),
    ]
    STRONG = [
        bench.Case(two._replace(rank=1), 64, 255, 1, torch.float32, decay=4.0),
        *(
            bench.Case(two._replace(rank=2, heads=1, groups=1), 8, s, 1, torch.float32, decay=6.0)
            for s in (1, 7, 9, 17)
        ),
        bench.Case(two._replace(rank=2, groups=1), 8, 19, 1, torch.float32, (5, 7, 7), decay=6.0),
    ]
    # Sizes are fixed; several chunks, the last one unfinished or not, every rank.
    wide, walk = bench.SMALL._replace(heads=2), bench.WALK
    WALKED = [
        bench.Case(wide, 16, 35, launch=walk),
        bench.Case(wide, 16, 40, documents=(1, 20, 19), decay=4.0, launch=walk),
        bench.Case(wide._replace(rank=2, groups=1), 32, 64, 2, launch=walk),
        bench.Case(wide._replace(rank=1, angles=64), 64, 70, decay=4.0, launch=walk),
        bench.Case(two, 4, 6, 2, torch.float32, launch=walk),
    ]
WHOLE = CASES[0]
assert not WHOLE.documents


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Torch's deterministic mode: memory comes filled with NaN."""
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@triton.jit
def _softplus(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, prepare.softplus(tl.load(x + i)))


def test_a_small_rate_has_all_its_bits():
    x = torch.linspace(-30, 30, 128, device=DEVICE)
    _softplus[(1,)](x, out := torch.empty_like(x), 128)
    torch.testing.assert_close(out.double(), torch.nn.functional.softplus(x.double(), threshold=50), rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_every_gradient(case):
    assert not case.wrong(bench.errors(case, DEVICE))


@pytest.fixture
def walks(monkeypatch):
    """Of how many batch entries a walk was the forward pass."""
    found, walk = [], kernel._walk
    monkeypatch.setattr(kernel, "_walk", lambda y, *a, **kw: found.append(y.size(1)) or walk(y, *a, **kw))
    return found


@pytest.mark.parametrize("case", WALKED, ids=str)
def test_passes_that_walk(case, walks):
    assert not case.wrong(bench.errors(case, DEVICE))
    assert walks == ([] if case == WALKED[-1] else [case.b])


def test_a_walk_needs_enough_heads(walks):
    more = WALKED[0].b * WALKED[0].shape.heads + 1
    case = replace(WALKED[0], launch=kernel.Launch(walk=more))
    assert not case.wrong(bench.errors(case, DEVICE))
    assert not walks


@pytest.mark.gpu  # the interpreter is Triton's, these kernels are Gluon's
@pytest.mark.parametrize("case", bench.SPECIALISED, ids=str)
def test_warps_that_have_different_work(case, monkeypatch):
    """Right, the same in every run, and as near to fp64 as the kernel that one kind of warps runs."""
    served, serve = [], hopper.gradients
    monkeypatch.setattr(hopper, "gradients", lambda *args: served.append(1) or serve(*args))
    launch = kernel.Launch(specialised=1)
    found = bench.errors(replace(case, launch=launch), DEVICE)
    assert not case.wrong(found)
    assert served == [1] * (0 if case in bench.SPECIALISED[-2:] else -(-case.b // launch.entries))
    assert found == bench.errors(replace(case, launch=launch), DEVICE)
    other = bench.errors(replace(case, launch=launch._replace(specialised=0)), DEVICE)
    of_one = 2e-4 if case.shape.heads == 1 else 0.0  # a head's bias is one figure, and as near as rounding has it
    assert not {
        name: (error, other[name]) for name, error in found.items() if error > 1.3 * other[name] + 1e-5 + of_one
    }


@pytest.mark.parametrize("case", [CASES[0], CASES[1], WALKED[0], WALKED[1]], ids=str)
def test_states_that_are_kept_are_not_computed_again(case, monkeypatch):
    """By a walk, or by the kernels it stands for, of all batch entries or one by one."""
    starts = [0]

    def counted(*args, into=None, **named):
        starts[0] += into is None
        return states(*args, into=into, **named)

    states = kernel._states
    monkeypatch.setattr(kernel, "_states", counted)
    launch = case.launch or kernel.launch_of(case.shape)
    assert not case.wrong(bench.errors(replace(case, launch=launch._replace(states_kept=True)), DEVICE))
    assert starts == [0]


def drawn(case):
    """Weights, a packed projection, and the gradient of the scan's output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = bench.weights_of(case.shape, DEVICE, case.dtype, generator)
    packed = bench.packed_of(case.shape, case.s, case.b, DEVICE, case.dtype, generator)
    back = torch.randn(case.s, case.b, case.shape.inner, device=DEVICE, generator=generator).to(case.dtype)
    return weights, packed, back


@pytest.mark.parametrize("case", [CASES[0], CASES[1], WALKED[0], WALKED[1]], ids=str)
def test_what_is_prepared_is_not_computed_again(case, monkeypatch):
    """Once, for both passes, and with the gradients to the last bit that it has when it is computed twice."""
    made = []
    prepare_of = prepare.Prepared.of
    monkeypatch.setattr(prepare.Prepared, "of", lambda *args, **named: made.append(1) or prepare_of(*args, **named))
    launch = case.launch or kernel.launch_of(case.shape)
    weights, packed, back = drawn(case)
    found = []
    for kept in (False, True):
        given = [t if t is None else t.detach().requires_grad_() for t in (packed, *weights)]
        how = launch._replace(prepared_kept=kept)
        out = kernel.scan(
            given[0], prepare.Weights(*given[1:]), case.shape, case.chunk, bench.documents_of(case, DEVICE), None, how
        )
        out.backward(back)
        found.append([out, *(t.grad for t in given if t is not None)])
    assert len(made) == 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], WALKED[0], WALKED[1]], ids=str)
def test_rates_in_a_tensor_of_their_own(case):
    """Nothing but the place of their gradient differs, to the last bit; nor where rows lie farther apart than they are wide."""
    launch = case.launch or kernel.launch_of(case.shape)
    weights, packed, back = drawn(case)
    at, found = prepare.offsets(case.shape)["dt"], []
    for apart in (False, True):
        cut = (packed[..., :at], packed[..., at:]) if apart else (packed, None)
        first, rates, *rest = (t if t is None else t.detach().requires_grad_() for t in (*cut, *weights))
        documents = bench.documents_of(case, DEVICE)
        out = kernel.scan(first, prepare.Weights(*rest), case.shape, case.chunk, documents, None, launch, rates)
        out.backward(back)
        whole = first.grad if rates is None else torch.cat([first.grad, rates.grad], -1)
        found.append([out, whole, *(t.grad for t in rest if t is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("case", [WALKED[0], WALKED[2]], ids=str)
def test_a_walk_has_the_states_that_would_be_computed_again(case):
    """To what another order of sums makes of their last bit."""
    weights, packed, _ = drawn(case)
    launch, documents = case.launch, bench.documents_of(case, DEVICE)
    rates = prepare.rates_of(packed, case.shape)
    prepared = prepare.Prepared.of(
        packed, rates, weights, case.shape, case.chunk, kernel._angles(rates, case.shape, None), documents
    )
    found = kernel._no_states(packed, case.shape, case.chunk).fill_(torch.nan)
    y = packed.new_empty(*packed.shape[:2], case.shape.inner)
    kernel._walk(y, packed, weights, prepared, case.shape, case.chunk, launch, documents, states=found)
    operands = kernel.Operands.of(packed, weights, prepared, case.shape, case.chunk, launch, documents)
    wanted, _ = kernel._states(packed, operands, case.shape, case.chunk, launch)
    assert wanted[:, 1:].any() and found.shape == wanted.shape
    assert (found.float() - wanted.float()).norm() < 1e-3 * wanted.float().norm()


@pytest.mark.parametrize("case", STRONG, ids=str)
def test_a_state_forgotten_within_an_unfinished_chunk(case):
    """Rows past the end are later than all others, and e^(what has been forgotten until there) is no number."""
    assert not case.wrong(bench.errors(case, DEVICE))


@pytest.mark.parametrize("case", [WHOLE, WALKED[0], replace(WHOLE, shape=bench.TINY)], ids=str)
def test_pieces_of_a_sequence_are_the_whole(case):
    assert not case.wrong(bench.halves(case, DEVICE))


if INTERPRETED:

    @pytest.mark.parametrize("documents", [(), (20, 1, 53, 26)], ids=["whole", "packed"])
    def test_more_than_one_program_holds(documents, monkeypatch):
        """Spans of summed angles, tokens of a program, chunks: each several times, and each ends in the midst of one."""
        monkeypatch.setattr(prepare, "SPAN", prepare.ROWS * prepare.RUN)
        monkeypatch.setattr(prepare, "PROGRAMS", 2)
        monkeypatch.setattr(kernel, "BOUNDS", 16)
        launch = kernel.Launch(turned=16, written=16, rows=16, steps=4, chunks=2, programs=1, columns=16)
        case = bench.Case(two._replace(rank=2), 8, 100, 2, torch.float32, launch=launch)
        if documents:
            case = replace(case, b=1, documents=documents)
        else:
            assert not case.wrong(bench.halves(case, DEVICE))
        assert not case.wrong(bench.errors(case, DEVICE))


@pytest.mark.gpu
def test_launches_differ_in_speed_only():
    """Tiles of the state, entries one by one, several steps a program: the same sums in another order."""
    shape = WHOLE.shape._replace(groups=1)
    tiled = kernel.Launch(entries=1, output_tile=64, gradients_tile=64)
    for launch in (tiled, kernel.Launch(chunks=3, programs=1), kernel.Launch(chunks=1, programs=1000)):
        case = replace(WHOLE, shape=shape, launch=launch)
        assert not case.wrong(bench.errors(case, DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [None, bench.WALK], ids=["", "walks"])
def test_gradients_are_reproducible(launch):
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = bench.weights_of(bench.NAM56R, DEVICE, torch.bfloat16, generator)
    packed = bench.packed_of(bench.NAM56R, 1000, 1, DEVICE, torch.bfloat16, generator)
    dy = torch.randn(1000, 1, bench.NAM56R.inner, device=DEVICE, generator=generator)
    scan = lambda x, w: kernel.scan(x, w, bench.NAM56R, 16, launch=launch)  # noqa: E731
    first, second = (bench.run(scan, packed, weights, dy) for _ in range(2))
    for a, b in zip([*first[:2], *first[2]], [*second[:2], *second[2]], strict=True):
        assert torch.equal(a, b)


def test_limits_let_angles_drift_and_nothing_else():
    short, long = replace(WHOLE, s=512), replace(WHOLE, s=2048)
    assert long.limit("d angles") == 2 * short.limit("d angles") == 2 * long.limit("d B")
    assert list(short.wrong({"y": 0.0, "d angles": 0.5, "d z": float("nan")})) == ["d angles", "d z"]


if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

    def test_layer_on_two_tensor_ranks_is_the_naive_one_on_one():
        """Megatron's layer around the kernels, which gather the angles themselves."""
        import harness
        import modules

        from nam_megatron.blocks.mamba3 import layer
        from nam_megatron.blocks.mamba3.block import Mamba3

        def case(kernels: str, tp: int) -> harness.Case:
            sizes = dict(heads=4, head_dim=16, state_dim=32, groups=2, mimo_rank=2, chunk=8, rope_fraction=0.5)
            sizes |= dict.fromkeys(("keep_states", "keep_prepared"), kernels == "fused")
            block = Mamba3(kernels=kernels, recompute="none", head_pieces=1, **sizes)
            site = SimpleNamespace(keeps=lambda part: False)
            mixers = {"mamba3": layer.spec(modules.CpuBackend(), block, site)}
            return harness.Case("3", mixers=mixers, tp=tp, microbatches=1)

        wanted, found = harness.train(case("naive", 1)), harness.train(case("fused", 2))
        torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-3, atol=1e-5)
