"""The fused cross entropy against torch's in fp64: losses, gradients, odd vocabularies, what is not finite.

With TRITON_INTERPRET=1 the same on a CPU (tests/cpu/test_cross_entropy.py does that).
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import multi_token_prediction
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from nam_megatron.mends import mtp_counts
from nam_megatron.runtime import cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

PIECE = cross_entropy.COLUMNS * cross_entropy.PIECES
# (sequence, batch, vocabulary)
SIZES = [(3, 2, 5), (2, 1, PIECE), (5, 3, PIECE + 1), (2, 2, 3 * PIECE - 7)]
if not INTERPRETED:
    # The second has more logits than a 32-bit offset reaches.
    SIZES += [(4096, 4, 65536), (4096, 9, 65536), (333, 1, 50257)]


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)


def inputs(s: int, b: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits as wide as a model's at the start and at the end of training, labels, gradients of the losses."""
    make = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(s, b, vocabulary, generator=make, device=DEVICE, dtype=torch.float32).mul_(8).to(dtype)
    labels = torch.randint(vocabulary, (s, b), generator=make, device=DEVICE)
    labels[0, 0], labels[-1, -1] = 0, vocabulary - 1
    d_loss = torch.randn(s, b, generator=make, device=DEVICE)
    d_loss[0, 0] = 0.0  # masked
    return logits, labels, d_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients(size, dtype):
    logits, labels, d_loss = inputs(*size, dtype)
    want, d_want = [], []
    for x, label, by in zip(logits, labels, d_loss, strict=True):  # a token of the sequence at a time: fp64 is wide
        x = x.double().requires_grad_()
        want.append(functional.cross_entropy(x, label, reduction="none"))
        (d,) = torch.autograd.grad(want[-1], x, by.double())
        want[-1] = want[-1].detach()
        d_want.append(d.to(dtype))
    ours = logits.requires_grad_()
    loss = cross_entropy.cross_entropy(ours * 1, labels)
    (d_ours,) = torch.autograd.grad(loss, ours, d_loss)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), torch.stack(want), rtol=1e-5, atol=1e-5)
    exact = dict(rtol=1e-5, atol=4e-6) if dtype == torch.float32 else dict(rtol=2**-7, atol=4e-6)
    torch.testing.assert_close(d_ours, torch.stack(d_want), **exact)
    assert not d_ours[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_megatron_counts_the_same(size, dtype):
    """Where the largest logit is the label's: of several the first, as torch's argmax has it; and of a mask."""
    logits, labels, _ = inputs(*size, dtype)
    logits[:, -1, 1::2] = logits[:, -1, :1]  # in bf16 there are more
    logits[-1, 0] = logits[-1, 0].max()
    largest = logits.argmax(-1)
    labels = torch.where(labels % 3 == 0, labels, largest)
    mask = (torch.rand(labels.t().shape, device=DEVICE) < 0.7).float()
    stock = multi_token_prediction._compute_mtp_acceptance_counts
    wanted = stock(logits, labels.t(), mask, None, None)
    at = logits.requires_grad_() * 1
    cross_entropy.cross_entropy(at, labels)
    assert torch.equal(getattr(at, cross_entropy.LARGEST).long(), largest)
    assert mtp_counts._counts(stock, at, labels.t(), mask, None, None) == wanted


def test_the_gradient_takes_the_logits_place():
    logits, labels, _ = inputs(4, 2, 100, torch.bfloat16)
    at = logits.requires_grad_() * 1
    loss = cross_entropy.cross_entropy(at, labels)
    at.register_hook(lambda d: places.append((d.data_ptr(), d.requires_grad)))
    places: list[tuple[int, bool]] = []
    loss.sum().backward()
    assert places == [(at.data_ptr(), False)]


@pytest.mark.parametrize(("kept", "message"), [(False, "second time"), (True, "modified by an inplace operation")])
def test_a_second_backward_pass_is_refused(kept, message):
    logits, labels, _ = inputs(2, 1, 10, torch.float32)
    loss = cross_entropy.cross_entropy(logits.requires_grad_() * 1, labels).sum()
    loss.backward(retain_graph=kept)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_another_use_of_the_logits_is_right_or_refused():
    """Autograd runs the later of two uses first: what is behind it has the logits, what is before it their gradient."""
    logits, labels, _ = inputs(2, 1, 10, torch.float32)
    x, y = (logits.double().requires_grad_(), logits.clone().requires_grad_())
    wanted = functional.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum") + x.square().sum()
    wanted.backward()
    at = y * 1
    (cross_entropy.cross_entropy(at, labels).sum() + at.square().sum()).backward()
    torch.testing.assert_close(y.grad, x.grad.float())
    at = y * 1
    first = at.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + cross_entropy.cross_entropy(at, labels).sum()).backward()


def test_logits_that_are_nobodys_output_are_not_overwritten():
    logits, labels, _ = inputs(2, 1, 10, torch.float32)
    with pytest.raises(AssertionError, match="leaf"):
        cross_entropy.cross_entropy(logits.requires_grad_(), labels)


@pytest.mark.parametrize("height", [1e4, -1e4])
def test_far_from_zero_it_is_as_exact(height):
    """Steps of fp32 are 1e-3 there: what is subtracted from the logits must be one of them, not the logarithm of their sum."""
    logits, labels, d_loss = inputs(3, 2, PIECE + 1, torch.float32)
    logits = (logits + height).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    wanted = functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (d_wanted,) = torch.autograd.grad(wanted, exact, d_loss.double())
    loss = cross_entropy.cross_entropy(logits * 1, labels)
    (d,) = torch.autograd.grad(loss, logits, d_loss)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(d.double(), d_wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [-100, -1, PIECE + 9, 2**31])
def test_a_label_outside_the_vocabulary_makes_its_loss_and_gradient_nan(label):
    logits, labels, _ = inputs(3, 1, PIECE + 9, torch.bfloat16)
    labels[1, 0] = label
    logits.requires_grad_()
    loss = cross_entropy.cross_entropy(logits * 1, labels)
    (d,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().flatten().tolist() == [True, False, True]
    assert d[:, 0].isnan().all(-1).tolist() == [False, True, False] == d[:, 0].isnan().any(-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, PIECE - 1, PIECE + 3])
def test_what_is_not_finite_is_seen_in_its_row_alone(value, column):
    logits, labels, _ = inputs(3, 1, PIECE + 9, torch.bfloat16)
    logits[1, 0, column] = value
    assert cross_entropy.cross_entropy(logits, labels).isfinite().flatten().tolist() == [True, False, True]


def test_a_row_of_minus_infinity_but_its_label_costs_nothing():
    logits = torch.full((1, 1, PIECE + 5), float("-inf"), device=DEVICE)
    logits[0, 0, 7] = 3.0
    labels = torch.full((1, 1), 7, device=DEVICE)
    assert cross_entropy.cross_entropy(logits, labels).item() == 0.0


def test_labels_and_gradients_of_any_stride():
    logits, labels, d_loss = inputs(6, 4, 33, torch.float32)
    shown = [t.t().contiguous().t() for t in (labels, d_loss)]
    found = []
    for label, by in ((labels, d_loss), shown):
        x = logits.clone().requires_grad_()
        found.append(torch.autograd.grad(cross_entropy.cross_entropy(x * 1, label), x, by)[0])
    assert torch.equal(*found)
