"""The fused cross entropy in real HybridModels, in Triton's interpreter: it is Megatron's, on one rank and with a split vocabulary.

The kernels themselves are checked by tests/gpu/test_cross_entropy.py, which this file also runs in the interpreter.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

import interpreter
from harness import Case, on_ranks, train

from nam_megatron.errors import Refused
from nam_megatron.runtime import cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


LAYOUTS = {
    "one rank, MTP": dict(pattern="*-/*-"),
    "split vocabulary": dict(pattern="*-", tp=2),
    "last stage": dict(pattern="*|-", pp=2),
}


def test_without_a_gpu_megatrons_is_not_put_in_its_place():
    with pytest.raises(Refused, match="needs a GPU") as refused:
        cross_entropy.provide([])
    assert refused.value.problems[0].key == "precision.cross_entropy"


if INTERPRETED:

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
    def test_a_model_learns_the_same_from_it(monkeypatch, layout):
        interpreter.mend(monkeypatch)
        calls = []

        def before(rig):
            (model,) = cross_entropy.provide([rig.model])
            loss = model.compute_language_model_loss
            model.compute_language_model_loss = lambda *a: calls.append(1) or loss(*a)

        case = Case(**layout)
        ours, megatrons = train(case, before), train(case)
        assert ours.losses == pytest.approx(megatrons.losses, rel=1e-6)
        for key, wanted in megatrons.gradients.items():
            error = (ours.gradients[key] - wanted).norm() / wanted.norm()
            assert error < 1e-5, f"gradient of {key}: off by {error:.1e}"

    @pytest.mark.parametrize("height", [0.0, 1e4])
    def test_a_split_vocabulary_is_the_whole_one(monkeypatch, height):
        """Labels of each rank's slice and of none; logits far from zero, whose largest lies on either rank."""
        interpreter.mend(monkeypatch)
        logits = height + 8 * torch.randn(6, 1, 20, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([0, 9, 10, 19, 20, -1]).unsqueeze(1)
        x = logits.double().requires_grad_()
        wanted = torch.nn.functional.cross_entropy(x[:4, 0], labels[:4, 0], reduction="none")
        wanted.sum().backward()

        def job(rig):
            group = rig.model.pg_collection.tp
            own = logits[..., 10 * group.rank() :][..., :10].clone().requires_grad_()
            losses = cross_entropy.cross_entropy(own * 1, labels, group)
            losses.sum().backward()
            return losses.detach().flatten(), own.grad

        ranks = on_ranks(Case("-", tp=2), job)
        d = torch.cat([gradient for _, gradient in ranks], -1)
        for losses, _ in ranks:
            torch.testing.assert_close(losses[:4].double(), wanted.detach(), rtol=1e-6, atol=1e-6)
            assert losses[4:].isnan().all()
        torch.testing.assert_close(d[:4].double(), x.grad[:4], rtol=1e-5, atol=1e-6)
        assert d[4:].isnan().all()


@pytest.mark.slow
def test_kernels_and_models_in_the_interpreter():
    ours = (
        f"{__file__}::test_{name}"
        for name in ("a_model_learns_the_same_from_it", "a_split_vocabulary_is_the_whole_one")
    )
    interpreter.passes("tests/gpu/test_cross_entropy.py", *ours)
