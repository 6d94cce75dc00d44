"""blocks/mla/kernel.py against naive.py: outputs and every gradient by name, uninitialised memory poisoned.

On a GPU in bf16: at most twice the error that plain torch has in bf16. `TRITON_INTERPRET=1` runs tiny cases on a CPU in fp32
(tests/blocks/test_mla.py does), and the whole layer with them.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from benchmarks import mla as bench
from nam_megatron.blocks.mla import kernel
from nam_megatron.blocks.mla.block import low_rank

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)

TINY = bench.Case(s=19, b=2, h=80, n=3, rq=16, rkv=32, dq=16, dr=32, dv=16)
CASES = bench.CASES
if INTERPRETED:
    # Hidden sizes that the tiles of the ingress and of its input's gradient divide, or the first alone, or neither. In the last case
    # ranks and widths that are equal in the others differ.
    CASES = [
        TINY,
        replace(TINY, s=21, b=1, h=72, packed=True, interleaved=False, norm=False),
        replace(TINY, s=33, h=96, rq=64, rkv=16, dq=32, dv=64),
    ]
HIGH = [replace(TINY, s=5, n=7, dq=24, dr=16, dv=40)] if INTERPRETED else [bench.HIGH, bench.ODD]
SMALL_TILES = dict(BM=16, BK=16, BN=32, GROUP=2, programs=6)


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Tiny cases must not fit into one tile."""
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)
        small = {k: t | {n: v for n, v in SMALL_TILES.items() if n in t} for k, t in kernel.TILES.items()}
        monkeypatch.setattr(kernel, "TILES", small)
        monkeypatch.setattr(kernel, "FEW", {})


@pytest.mark.parametrize("case", CASES, ids=bench.differing)
def test_ingress_queries_keys_and_values(case):
    verdict = bench.judge(case, DEVICE, bench.up, DTYPE)
    assert verdict.passed, verdict


if not INTERPRETED:

    def test_few_tokens_have_tiles_of_their_own(monkeypatch):
        case = replace(bench.FULL, s=1001, b=2)
        assert case.tokens <= kernel.FEW_TOKENS

        def run():
            subject = bench.kernels_subject(case, bench.up, kernel)
            outs = subject.forward()
            return [*outs, *subject.gradients(outs)]

        few = run()
        monkeypatch.setattr(kernel, "FEW", {})
        for one, other in zip(few, run(), strict=True):
            assert one is other is None or (one - other).norm() <= 1e-3 * other.norm()


def test_absorbed():
    verdict = bench.judge(CASES[0], DEVICE, bench.absorbed, DTYPE)
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", HIGH, ids=bench.differing)
def test_behind_products(case):
    verdict = bench.judge(case, DEVICE, bench.behind_products, DTYPE)
    assert verdict.passed, verdict


def test_turning_takes_nothing_from_others():
    """A sum hands one gradient to all that it added; and what needs the queries as they were before is refused."""
    case, rope = HIGH[0], bench.rope_of(HIGH[0], DEVICE)
    q, other, d = (torch.randn(case.shape(case.n, case.dq + case.dr), device=DEVICE, dtype=DTYPE) for _ in range(3))
    q, other = q.requires_grad_(), other.requires_grad_()

    def turned() -> torch.Tensor:
        return kernel.rotate_queries(q * 1, rope)

    alone = torch.autograd.grad(turned(), q, d.clone())[0]
    for add in (lambda: turned() + other, lambda: other + turned()):
        given = d.clone()
        found = torch.autograd.grad(add(), (q, other), given)
        for one, wanted in zip((*found, given), (alone, d, d), strict=True):
            assert torch.equal(one, wanted)

    at = q * 1
    kept = at.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept + kernel.rotate_queries(at, rope).sum()).backward()


def test_two_runs_are_bit_equal():
    assert not bench.repeats(CASES[0], DEVICE, DTYPE)


@pytest.mark.parametrize(
    ("sizes", "served"),
    [((64, 64, 64, 64, 64), True), ((1536, 512, 128, 64, 128), False), ((96, 64, 64, 64, 64), False)],
)
def test_where_products_take_over(sizes, served):
    assert low_rank(*sizes) == served


if INTERPRETED:
    import harness
    import megatron.core.tensor_parallel.random as rng

    LOW = dict(kv_lora_rank=16, qk_pos_emb_head_dim=32)
    AGAIN = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])

    @pytest.mark.parametrize(
        ("config", "tp"),
        [(LOW, 1), ({}, 1), (AGAIN, 2)],
        ids=[
            "low rank: in kernels",
            "no power of two: by cuBLAS",
            "by cuBLAS, again in the backward pass, two tensor ranks",
        ],
    )
    def test_the_layer_with_kernels_is_the_naive_layer(config, tp, monkeypatch):
        # Megatron's checkpoints keep the GPU's random state; nothing here is random.
        monkeypatch.setattr(rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
        monkeypatch.setattr(rng, "_set_cuda_rng_state", lambda *_, **__: None)
        trained, recipe_of = {}, harness.recipe_of
        for kernels, ranks in (("fused", tp), ("naive", 1)):
            recipe = recipe_of()
            harness.say(recipe, "mla", kernels=kernels)
            monkeypatch.setattr(harness, "recipe_of", lambda recipe=recipe, **_: recipe)
            trained[kernels] = harness.train(harness.Case("+", microbatches=1, tp=ranks, config=config))
        found, wanted = trained["fused"], trained["naive"]
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        for key, gradient in wanted.gradients.items():
            assert (found.gradients[key] - gradient).norm() < 1e-4 * gradient.norm(), key
