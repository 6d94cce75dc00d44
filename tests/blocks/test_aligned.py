"""Input projections with columns of zeros behind their own: the model, its gradients and its parameters stay what they are."""

import sys
from pathlib import Path

import interpreter
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from harness import Case, on_ranks, step

from nam_megatron.runtime import aligned


class Projected(torch.autograd.Function):
    """x @ weight^T, and the weight's gradient as Transformer Engine leaves it with fuse_wgrad_accumulation: in `main_grad`, where nobody
    but it looks."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, d):
        (x,), weight = ctx.saved_tensors, ctx.weight
        gradient = (d.T @ x).to(weight.main_grad.dtype)
        total = gradient if getattr(weight, "overwrite_main_grad", False) else weight.main_grad + gradient
        weight.main_grad.copy_(total)
        weight.grad_added_to_main_grad = True
        return d @ weight, torch.full_like(weight, torch.nan)


@pytest.mark.parametrize("overwritten", [False, True])
def test_gradients_reach_the_parameters_buffer(overwritten):
    """Two layers of one size and two microbatches, through the buffer that both write."""
    torch.manual_seed(0)
    aligned._gradient.cache_clear()
    weights = [torch.nn.Parameter(torch.randn(13, 6).bfloat16()) for _ in range(2)]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.full((13, 6), 0.5), False
        weight.overwrite_main_grad = overwritten
    expected = [weight.main_grad.clone() for weight in weights]
    for _ in range(2):
        x, backs = torch.randn(9, 6).bfloat16(), [torch.randn(9, 13).bfloat16() for _ in weights]
        outs = [Projected.apply(x, aligned.padded(weight, 8, True)) for weight in weights]
        assert all(out.shape == (9, 16) and not out[:, 13:].any() for out in outs)
        sum((out[:, :13] * back).sum() for out, back in zip(outs, backs, strict=True)).backward()
        gradients = [(back.T @ x).float() for back in backs]
        expected = gradients if overwritten else [e + g for e, g in zip(expected, gradients, strict=True)]
    for weight, wanted in zip(weights, expected, strict=True):
        assert torch.equal(weight.main_grad, wanted) and weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape  # Megatron's hook waits for one
    assert aligned._gradient.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("columns", "multiple", "zeros"), [(1580, 8, 4), (790, 8, 2), (16, 8, 0), (8248, 16, 8), (13, 4, 3)]
)
def test_columns_are_a_multiple(columns, multiple, zeros):
    weight = torch.nn.Parameter(torch.ones(columns, 2))
    out = aligned.padded(weight, multiple, False)
    assert out.shape == (columns + zeros, 2) and out[:columns].all() and not out[columns:].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=str)
def test_the_model_is_the_same(layout, monkeypatch):
    """NAM56R's 1,580 columns in bf16, 790 of a tensor rank."""

    def run(rig):
        seen, pad = [], aligned.padded
        monkeypatch.setattr(aligned, "padded", lambda w, m, a: seen.append(pad(w, m, a)) or seen[-1])
        loss = step(rig)
        shapes = [tuple(p.shape) for p in rig.model.parameters()]
        return len(seen), loss, shapes, {n: p.main_grad.clone() for n, p in rig.model.named_parameters()}

    half = dict(params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16)
    ours, theirs = (
        on_ranks(Case("R-", config=half, microbatches=1, keys={"m2rnn": {"padded_projection": on}}, **layout), run)
        for on in (True, False)
    )
    for (times, loss, shapes, found), (never, expected, known, wanted) in zip(ours, theirs, strict=True):
        assert (times, never) == (1, 0) and loss == expected and shapes == known
        far = {name: (found[name] - g).norm() / g.norm() for name, g in wanted.items() if g.any()}
        assert far and not {name: e for name, e in far.items() if not e < 1e-2}


@pytest.mark.slow
def test_the_kernel():
    assert "3 passed" in interpreter.passes("tests/gpu/test_columns.py")
