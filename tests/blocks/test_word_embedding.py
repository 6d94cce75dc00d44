"""A word embedding that adds its gradient to Megatron's buffer itself: the model and every gradient stay what they are."""

import sys
from pathlib import Path

import hopper
import interpreter
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from harness import Case, on_ranks, step

from nam_megatron.runtime import word_embedding

WORD = "embedding.word_embeddings.weight"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        ("M-", {}),
        ("M-/*-", {}),
        ("M-/*-", {"tp": 2}),
        ("M-|*-/*-", {"pp": 2}),
        ("M-", {"dp": 2}),
        ("M-/*-", {"cp": 2}),
        ("M-", {"positions": 32, "tp": 2}),
    ],
    ids=str,
)
def test_the_model_is_the_same(pattern, layout, monkeypatch):
    """Megatron's lookup and ours; learned positions keep it from scattering over the tensor ranks itself."""
    calls, add = [], word_embedding.add_rows
    monkeypatch.setattr(word_embedding, "add_rows", lambda *args: calls.append(1) or add(*args))

    def run(provided):
        def job(rig):
            if provided:
                word_embedding.provide([rig.model])
            loss = step(rig)
            return len(calls), loss, {n: p.main_grad.clone() for n, p in rig.model.named_parameters()}

        return on_ranks(Case(pattern, **layout), job)

    reads = 0
    for (times, loss, found), (never, expected, wanted) in zip(run(True), run(False), strict=True):
        assert never == 0 and bool(times) == (WORD in wanted) and loss == expected
        reads += times
        far = {name: float((found[name] - g).abs().max() / g.abs().max()) for name, g in wanted.items() if g.any()}
        assert far and not {name: e for name, e in far.items() if not e < 1e-5}
    assert reads


def test_it_compiles_for_hopper(monkeypatch):
    compiled = hopper.compiles(monkeypatch)
    monkeypatch.setattr(word_embedding, "interpreted", lambda: True)  # the way of the kernel, without a GPU
    total, words = torch.zeros(64, 3584), torch.zeros(2, 48, dtype=torch.int64)
    word_embedding.add_rows(total, words, torch.zeros(2, 48, 3584, dtype=torch.bfloat16))
    assert list(compiled) == ["_add_rows"]


@pytest.mark.slow
def test_the_kernel():
    assert "11 passed" in interpreter.passes("tests/gpu/test_word_embedding.py")
