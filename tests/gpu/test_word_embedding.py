"""The gradient of the word embedding against autograd's own, in fp64; with TRITON_INTERPRET=1 the same on a CPU, small."""

import os

import pytest
import torch
import torch.nn.functional as F

from nam_megatron.runtime import word_embedding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.usefixtures("ready"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [(37, 19, 2, 300), (5, 40, 1, 256)] if INTERPRETED else [(65536, 4096, 2, 3584), (50257, 1023, 3, 1000)]


def drawn(words, s, b, which):
    if which == "one word":
        return torch.full((b, s), words - 1, device=DEVICE)
    if which == "every other rank's":
        return torch.full((b, s), -1, device=DEVICE)
    ids = torch.randint(-words // 4 if which == "some of other ranks" else 0, words, (b, s), device=DEVICE)
    if which == "one often":
        ids[torch.rand(b, s, device=DEVICE) < 0.4] = 3
    return ids.clamp(min=-1)


@pytest.mark.parametrize("which", ["any", "one often", "one word", "some of other ranks", "every other rank's"])
@pytest.mark.parametrize(("words", "s", "b", "width"), SIZES)
def test_rows_are_added(words, s, b, width, which):
    torch.manual_seed(1)
    ids = drawn(words, s, b, which)
    # As it lies, and of one that lies otherwise.
    for gradient in (
        torch.randn(b, s, width, device=DEVICE).bfloat16(),
        torch.randn(b, width, s, device=DEVICE).bfloat16().transpose(1, 2),
    ):
        totals = [torch.full((words, width), 0.5, device=DEVICE) for _ in range(2)]
        for total in totals:
            word_embedding.add_rows(total, ids, gradient)
        held = ids >= 0
        wanted = torch.full((words, width), 0.5, dtype=torch.float64, device=DEVICE)
        wanted.index_put_((ids[held],), gradient[held].double(), accumulate=True)
        assert torch.equal(*totals)
        # Sums of as many fp32 numbers as a word has positions.
        assert (totals[0] - wanted).abs().max() <= 1e-6 * max(1, int(held.sum())) ** 0.5 * wanted.abs().max()
        untouched = torch.ones(words, dtype=torch.bool, device=DEVICE)
        untouched[ids[held]] = False
        assert bool((totals[0][untouched] == 0.5).all())


def test_a_table_that_two_read_gets_both():
    """As MTP reads it; and what autograd is given has no rows."""
    torch.manual_seed(2)
    words, s, b, width = SIZES[0]
    table = torch.nn.Parameter(torch.randn(words, width, device=DEVICE).bfloat16())
    table.main_grad, table.grad_added_to_main_grad = torch.zeros(words, width, device=DEVICE), False
    wanted = torch.zeros(words, width, dtype=torch.float64, device=DEVICE)
    out = 0
    for absent in (False, True):
        ids = drawn(words, s, b, "some of other ranks" if absent else "any")
        rows, back = word_embedding._Rows.apply(table, ids, absent), torch.randn(b, s, width, device=DEVICE).bfloat16()
        assert torch.equal(rows, F.embedding(ids.clamp(min=0), table) * (ids >= 0).unsqueeze(-1))
        out = out + (rows * back).sum()
        wanted.index_put_((ids[ids >= 0],), back[ids >= 0].double(), accumulate=True)
    out.backward()
    assert table.grad_added_to_main_grad and table.grad.is_sparse and not table.grad._nnz()
    assert (table.main_grad - wanted).abs().max() <= 1e-5 * wanted.abs().max()
