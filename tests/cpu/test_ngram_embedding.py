"""N-gram embeddings: what is hashed, what is added and every gradient, written out token by token; the same in every layout."""

import copy

import harness
import pytest
import torch
from harness import Case, on_ranks, train
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from nam_megatron.blocks import EMBEDDING, Gauge
from nam_megatron.hf.model.modeling_nam import Ngrams
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.ngram_embedding import PRIME, NgramEmbedding, multipliers, rows

END = 3
KEYS = {"enabled": True, "order": 3, "heads": 2, "buckets": 14, "width": 3, "document_end": END}
NGRAMS = {"ngram_hash": KEYS}


def row_of(gram: tuple[int, ...], table: int, order: int, heads: int, buckets: int) -> int:
    """The row of an n-gram in table number `table`: the fifth power of a polynomial, in Python's own integers."""
    factor = list(multipliers((order - 1) * heads))[table]
    residue = sum((t + 1) * factor ** (len(gram) - 1 - i) for i, t in enumerate(gram))
    return pow(residue, 5, PRIME) % buckets + table * buckets


def grams(tokens: list[int], order: int, heads: int, end: int | None):
    """For each position and table the n-gram that ends there, or None where its document begins later."""
    for i in range(len(tokens)):
        for table in range((order - 1) * heads):
            o = 2 + table // heads
            inside = i - o + 1 >= 0 and end not in tokens[i - o + 1 : i]
            yield i, table, tuple(tokens[i - o + 1 : i + 1]) if inside else None


@pytest.mark.parametrize(("order", "heads", "end"), [(2, 1, None), (3, 2, END), (5, 3, END)])
def test_rows_are_of_the_tokens_of_one_document(order, heads, end):
    tokens = torch.randint(0, 9, (2, 40), generator=torch.Generator().manual_seed(order))
    of_export = Ngrams(8, order, heads, 1000, 2, end).rows(tokens, torch.ones_like(tokens, dtype=torch.bool))
    for found, there in (rows(tokens, order, heads, 1000, end), of_export):
        assert found.shape == there.shape == (2, 40, (order - 1) * heads)
        for b in range(2):
            for i, table, gram in grams(tokens[b].tolist(), order, heads, end):
                assert there[b, i, table] == (gram is not None)
                if gram is not None:
                    assert found[b, i, table] == row_of(gram, table, order, heads, 1000)
        assert not there.all() and there[..., -heads:].any()


def test_hash_functions_part_what_others_throw_together():
    """Of 65,536 pairs in 65,536 rows a random function hits 63 %; two n-grams that meet in one head part in another."""
    tokens = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    found, _ = rows(tokens, 2, 2, 65536, None)
    one, two = (found[:, 1, head] % 65536 for head in (0, 1))
    assert all(0.62 < len(x.unique()) / 65536 < 0.65 for x in (one, two))
    assert len((one * 65536 + two).unique()) > 65530


def by_hand(rig):
    """(ours, by hand): what is added to the embedding, and the gradients of table and projection."""
    embedding = rig.model.embedding
    ngrams = embedding.ngrams
    tokens = torch.randint(0, 9, (2, 12), generator=torch.Generator().manual_seed(5))
    wanted = torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(12).expand(2, 12)
    out = embedding(input_ids=tokens, position_ids=positions)
    own = [ngrams.table, ngrams.projection]
    ours = [out - embedding.word_embeddings(tokens).transpose(0, 1), *torch.autograd.grad((out * wanted).sum(), own)]
    table, projection = (p.detach().double().requires_grad_() for p in own)
    held = table.view(-1, KEYS["width"])
    shape = {name: KEYS[name] for name in ("order", "heads")}
    added = torch.zeros(12, 2, 64, dtype=torch.float64)
    for b in range(2):
        for i, t, gram in grams(tokens[b].tolist(), *shape.values(), END):
            if gram is not None:
                columns = projection[:, t * KEYS["width"] : (t + 1) * KEYS["width"]]
                added[i, b] = added[i, b] + columns @ held[row_of(gram, t, *shape.values(), KEYS["buckets"])]
    theirs = [added, *torch.autograd.grad((added * wanted).sum(), [table, projection])]
    used = (theirs[1].view(-1, KEYS["width"]) != 0).any(1)
    return (
        [x.detach().to_dense() for x in ours],
        [x.detach() for x in theirs],
        ngrams.share_asked().item(),
        used.float().mean().item(),
    )


def test_what_is_added_is_what_stands_at_the_rows():
    ((ours, theirs, share, used),) = on_ranks(Case("*-", features=NGRAMS), by_hand)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert share == pytest.approx(used) and 0.2 < used < 1, "the rows that got a gradient are those that are counted"


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_the_step_line_has_the_share_of_rows_that_any_rank_asked_for(layout):
    def job(rig):
        GAUGES.expect({EMBEDDING: Gauge("n-gram rows")})
        GAUGES.step(0, 1)
        ngrams = rig.model.embedding.ngrams
        make = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
        ngrams(torch.randint(0, 9, (2, 12), generator=make))
        seen = ngrams.asked[: ngrams.held].tolist()
        ngrams(torch.randint(0, 9, (2, 12), generator=make))  # another microbatch, and nothing is measured
        return GAUGES.beside(""), ngrams.first, seen

    case = Case("*-", features={"ngram_hash": KEYS | {"buckets": 400}}, **layout)
    lines, firsts, seen = zip(*on_ranks(case, job), strict=True)
    asked = {first + i for first, rank in zip(firsts, seen, strict=True) for i, one in enumerate(rank) if one}
    assert max(map(sum, seen)) < len(asked), "another rank asked for other rows"
    assert set(lines) == {f" n-gram rows 0: {len(asked) / 1600:.4g} |"}


class Largest(TorchDispatchMode):
    """Elements, of four bytes, of the largest tensor that is made inside, but for those that share memory with `known`."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.made = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.layout is torch.strided:
            storage = found.untyped_storage()
            self.made = max(self.made, 0 if storage.data_ptr() in self.known else storage.nbytes() // 4)
        return found


def test_no_gradient_of_the_whole_table_is_made():
    """What a microbatch asked for is added to Megatron's buffer, in fp32; repeated rows and two microbatches add up."""

    def job(rig):
        ngrams, width = rig.model.embedding.ngrams, KEYS["width"]
        rig.ddp.zero_grad_buffer()
        wanted = torch.zeros_like(ngrams.table).view(-1, width)
        largest = Largest(ngrams.table, ngrams.table.main_grad)
        for seed in (1, 2):
            tokens = torch.randint(0, 9, (2, 12), generator=torch.Generator().manual_seed(seed))
            with largest:
                out = ngrams(tokens)
                out.square().sum().backward()
            ids, there = rows(tokens, *ngrams.hashed)
            back = (2 * out.detach() @ ngrams.projection.detach()).transpose(0, 1).unflatten(-1, (-1, width))
            wanted.index_add_(0, ids[there], back[there])
        return ngrams.table.main_grad.view(-1, width), wanted, largest.made, ngrams.table.numel()

    case = Case("*-", features={"ngram_hash": KEYS | {"buckets": 4000}})
    ((found, wanted, largest, table),) = on_ranks(case, job)
    torch.testing.assert_close(found, wanted)
    assert (wanted != 0).any(1).sum() > 50 and 12 * 2 * 64 <= largest < table / 4


LAYOUTS = [("*-/*-", {"tp": 2}), ("*-", {"tp": 2, "config": {"sequence_parallel": False}}), ("*|-", {"pp": 2, "dp": 2})]


@pytest.mark.few(1)
@pytest.mark.parametrize(("pattern", "layout"), LAYOUTS, ids=str)
def test_every_layout_is_the_same_model(pattern, layout):
    one, other = train(Case(pattern.replace("|", ""), features=NGRAMS)), train(Case(pattern, features=NGRAMS, **layout))
    assert other.losses == pytest.approx(one.losses, rel=1e-6) and other.gradients.keys() == one.gradients.keys()
    assert sum("ngrams" in name for name in one.gradients) == 2
    far = {n: ((other.gradients[n] - g).norm() / g.norm()).item() for n, g in one.gradients.items()}
    assert not {name: error for name, error in far.items() if not error < 1e-4}


def test_a_model_without_them_is_another():
    assert train(Case("*-")).losses != train(Case("*-", features=NGRAMS)).losses


def test_both_begin_as_the_configs_other_weights_do():
    def job(rig):
        config = copy.copy(rig.config)
        config.perform_initialization, config.init_method = True, lambda weight: weight.data.fill_(0.25)
        groups, keys = rig.model.pg_collection, dict(order=2, heads=2, buckets=5, width=3, document_end=None)
        return {
            name: set(p.flatten().tolist())
            for name, p in NgramEmbedding(config, groups.tp, groups.cp, **keys).named_parameters()
        }

    assert on_ranks(Case("-"), job) == [{"table": {0.25}, "projection": {0.25}}]


def test_the_shapes_are_the_budgets():
    found = harness.shapes(Case("*-", features=NGRAMS))
    assert found["embedding.ngrams.table"] == (4 * 14 * 3,) and found["embedding.ngrams.projection"] == (64, 4 * 3)
