"""Our DSA against Megatron's: function by function, and inside its real HybridModel on a CPU.

kernel.py is checked by tests/gpu/test_dsa.py, which this file also runs in Triton's interpreter.
"""

import math
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import hopper
import interpreter
import megatron.core.tensor_parallel.random as rng
import megatron.core.transformer.cuda_graphs as cuda_graphs
from harness import Case, RankFailed, on_ranks, train
from megatron.core.transformer.experimental_attention_variant import dsa as theirs

from benchmarks import dsa as bench
from nam_megatron.blocks import Gauge
from nam_megatron.blocks.dsa import naive
from nam_megatron.blocks.dsa.block import KEPT_ROWS
from nam_megatron.blocks.dsa.layer import sampled
from nam_megatron.runtime.gauges import GAUGES

S, B, N, H, D, R, P, K, SCALE = 19, 2, 3, 4, 8, 12, 8, 5, 0.3
# The harness's indexer: layer 3 serves 4 and 6. 16 heads: where all of few heads score below zero, scores are equal, and we take the
# earliest keys, Megatron what torch.topk gives.
CASE = Case("+MDD-D", config=dict(dsa_indexer_n_heads=16))


@pytest.fixture
def draw():
    torch.manual_seed(3)
    shapes = dict(q=(S, B, H, D), k=(S, B, D), w=(S, B, H), query=(S, B, N, R + P), key=(S, B, 1, R + P))
    return SimpleNamespace(**{name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()})


# The definition ------------------------------------------------------------------------------------------------------


def causal_bounds() -> dict:
    return dict(varlen_starts=torch.zeros(S, dtype=torch.long), varlen_ends=torch.arange(1, S + 1))


def test_scores_and_top_k_are_megatrons(draw):
    scores = naive.index_scores(draw.q, draw.k, draw.w)
    wanted, indices = theirs.fused_qk_topk_naive(draw.q.float(), draw.k.float(), draw.w.float(), K, **causal_bounds())
    torch.testing.assert_close(scores.float(), wanted, rtol=1e-4, atol=1e-5)
    mask = torch.zeros(B, S, S + 1, dtype=torch.bool).scatter_(-1, indices.where(indices >= 0, S), True)[..., :S]
    assert torch.equal(naive.select(scores, K).selected, mask)


def test_of_equal_scores_the_earliest_keys_are_taken(draw):
    """Two heads: a third of the pairs score 0. What Megatron takes has the same scores, not the same keys."""
    scores = naive.index_scores(draw.q[:, :, :2], draw.k, draw.w[:, :, :2])
    taken = naive.select(scores, K).selected
    for b in range(B):
        for i in range(S):
            ranked = sorted(range(i + 1), key=lambda j, row=scores[b, i]: (-row[j].item(), j))  # Python's sort
            assert taken[b, i].nonzero().flatten().tolist() == sorted(ranked[:K])
    rest = (draw.q[:, :, :2].float(), draw.k.float(), draw.w[:, :, :2].float(), K)
    its, indices = theirs.fused_qk_topk_naive(*rest, **causal_bounds())
    mask = torch.zeros(B, S, S + 1, dtype=torch.bool).scatter_(-1, indices.where(indices >= 0, S), True)[..., :S]
    rows = [row.masked_fill(~chosen, -torch.inf).sort(-1).values for row, chosen in ((its, taken), (its, mask))]
    torch.testing.assert_close(*rows)


def test_sparse_attention_is_megatrons(draw):
    selection = naive.select(naive.index_scores(draw.q, draw.k, draw.w), K)
    indices = selection.selected.to(torch.int8).topk(K).indices
    indices = indices.where(selection.selected.gather(-1, indices), -1)
    wanted = theirs._unfused_absorbed_dsa_fn(draw.query.float(), draw.key.float(), indices, SCALE, R, **causal_bounds())
    torch.testing.assert_close(naive.attend(draw.query, draw.key, selection, SCALE, R).float(), wanted)


def test_indexer_loss_and_its_gradients_are_megatrons(draw):
    ours = [t.clone().requires_grad_() for t in (draw.q, draw.k, draw.w)]
    kl = naive.indexer_kl(*ours, naive.index_scores(*ours), draw.query, draw.key, SCALE)
    (kl * 0.7 / (B * S)).backward()

    its = [t.float().requires_grad_() for t in (draw.q, draw.w, draw.k)]
    key = draw.key.float().expand(-1, -1, N, -1)
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    rest = (SCALE, K, 0.7, None, False, group, *causal_bounds().values())
    _, loss = theirs.FusedDSAIndexerLoss.apply(*its, draw.query.float(), key, *rest)
    loss.backward()
    torch.testing.assert_close((kl * 0.7 / (B * S)).float(), loss)
    for name, found, wanted in zip("qkw", ours, (its[0], its[2], its[1]), strict=True):
        torch.testing.assert_close(found.grad.float(), wanted.grad, rtol=1e-3, atol=1e-6, msg=f"gradient of {name}")


def test_with_every_key_selected_it_is_dense_attention(draw):
    selection = naive.select(naive.index_scores(draw.q, draw.k, draw.w), S)
    q, k = draw.query.permute(1, 2, 0, 3), draw.key.permute(1, 2, 0, 3).expand(-1, N, -1, -1)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, k[..., :R], is_causal=True, scale=SCALE)
    torch.testing.assert_close(naive.attend(draw.query, draw.key, selection, SCALE, R), dense.permute(2, 0, 1, 3))


def test_the_share_that_is_kept_is_that_of_all_the_attention(draw):
    """Written out query by query; 1 where all keys are selected."""
    selection = naive.select(naive.index_scores(draw.q, draw.k, draw.w), K)
    found = naive.kept(draw.query, draw.key, selection, SCALE, slice(2, S, 3))
    assert found.dtype == torch.float64
    for at, i in enumerate(range(2, S, 3)):
        for b in range(B):
            for n in range(N):
                weights = [math.exp(SCALE * (draw.query[i, b, n] @ draw.key[j, b, 0]).item()) for j in range(i + 1)]
                kept = sum(weight for j, weight in enumerate(weights) if selection.selected[b, i, j])
                assert found[b, n, at].item() == pytest.approx(kept / sum(weights), rel=1e-12)
    assert (found[..., 1:] > 0).all() and (found[..., 1:] < 1).all()
    whole = naive.select(naive.index_scores(draw.q, draw.k, draw.w), S)
    torch.testing.assert_close(
        naive.kept(draw.query, draw.key, whole, SCALE, slice(0, S)), torch.ones(B, N, S).double()
    )


def test_an_indexer_that_learns_keeps_more_than_chance(draw):
    own = [t.clone().requires_grad_() for t in (draw.q, draw.k, draw.w)]
    optimizer = torch.optim.Adam(own, lr=0.05)

    def kept(scores):
        (few,) = sampled([S], S, K)
        return naive.kept(draw.query, draw.key, naive.select(scores, K), SCALE, few).mean().item()

    before = kept(naive.index_scores(*own).detach())
    for _ in range(100):
        optimizer.zero_grad()
        naive.indexer_kl(*own, naive.index_scores(*own), draw.query, draw.key, SCALE).backward()
        optimizer.step()
    after = kept(naive.index_scores(*own).detach())
    visible = naive.causal(S, S, torch.device("cpu"))
    chance = kept(torch.rand(B, S, S).masked_fill(~visible, -torch.inf))
    logits = torch.einsum("ibnd,jbd->bnij", draw.query, draw.key[:, :, 0]) * SCALE
    best = kept(logits.masked_fill(~visible, -torch.inf).softmax(-1).sum(1))
    assert max(chance, before) + 0.1 < after < best + 1e-9


@pytest.mark.parametrize(("s", "top_k"), [(19, 5), (4096, 256), (300, 172), (32, 32), (1, 1)])
def test_the_queries_that_are_looked_at_have_more_keys_than_the_top_k(s, top_k):
    (few,) = sampled([s], s, top_k)
    rows = range(s)[few]
    assert 1 <= len(rows) <= KEPT_ROWS and (rows[0] == top_k if s > top_k else list(rows) == [s - 1])
    assert len(rows) == s - top_k or s - rows[-1] <= rows.step or s <= top_k, "the last ones too"


@pytest.mark.parametrize("pieces", [2, 8])
def test_in_pieces_the_same_queries_are_looked_at(pieces):
    run = 2048 // pieces
    ends = [(n + 1) * run for n in range(pieces)]
    few = sampled(ends, run, 500)
    rows = [end - run + row for end, some in zip(ends, few, strict=True) for row in range(run)[some]]
    assert rows == list(range(2048)[sampled([2048], 2048, 500)[0]]) and len(rows) <= KEPT_ROWS


# The layer -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """Chooses the recipe's kernels of MLA and DSA for the models that follow."""
    return naive_kernels(monkeypatch)


def naive_kernels(monkeypatch):
    recipe_of = harness.recipe_of
    # Megatron's checkpoints keep the GPU's random state; nothing here is random.
    monkeypatch.setattr(rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(rng, "_set_cuda_rng_state", lambda *_, **__: None)

    def choose(name: str, **more: int) -> None:
        def recipe(*args, **kwargs):
            made = recipe_of(*args, **kwargs)
            harness.say(made, "dsa", kernels=name, **more)
            harness.say(made, "mla", kernels=name)
            return made

        monkeypatch.setattr(harness, "recipe_of", recipe)

    choose("naive")
    return choose


YARN = CASE.config | dict(rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=16)
YARN |= dict(mscale_all_dim=0.5)


@pytest.fixture(scope="module")
def stock():
    """One step of four microbatches with Megatron's own layers, by the type of RoPE."""
    return {
        "yarn" if config is YARN else "rope": train(replace(CASE, microbatches=4, config=config))
        for config in (CASE.config, YARN)
    }


def full(method: str, layers: int) -> dict:
    return CASE.config | dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


def selective(*modules: str) -> dict:
    return CASE.config | dict(recompute_granularity="selective", recompute_modules=list(modules))


LAYOUTS = {
    "tp1": {},
    "tp2_sp": dict(tp=2),
    "cp2": dict(cp=2),
    "yarn": dict(config=YARN),
    "recomputed_core": dict(config=selective("core_attn", "layernorm", "mla_up_proj")),
    "recomputed_layers_pp2": dict(pattern="+M|DD-D", pp=2, config=full("uniform", 1)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_megatrons_model(kernels, stock, layout, pieces):
    kernels("naive", query_pieces=pieces)
    stock = stock["yarn" if layout.get("config") is YARN else "rope"]
    found = train(replace(CASE, microbatches=4, **layout))
    assert found.gradients.keys() == stock.gradients.keys(), "other checkpoint names"
    torch.testing.assert_close(found.losses, stock.losses, rtol=1e-5, atol=1e-6)
    for key, gradient in stock.gradients.items():
        error = (found.gradients[key] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"gradient of {key}: off by {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CASE, replace(CASE, pattern="+MDD|-MDD", pp=2)], ids=["pp1", "pp2_1f1b"])
def test_full_recompute_changes_no_bit_however_layers_are_grouped(kernels, layout):
    """Chunks that cut share groups, layers recomputed beside others that are not: each takes back its own microbatch's top-k."""
    layout = replace(layout, microbatches=4)
    wanted = train(layout)
    for method, layers in [("uniform", 1), ("uniform", 2), ("uniform", 3), ("uniform", 4), ("block", 3), ("block", 4)]:
        found = train(replace(layout, config=full(method, layers)))
        assert found.losses == wanted.losses
        differ = [k for k, gradient in wanted.gradients.items() if not torch.equal(found.gradients[k], gradient)]
        assert not differ, f"{method}, {layers} layers: {differ}"


def test_a_loss_is_told_once_though_its_layer_runs_twice(kernels):
    def job(rig):
        theirs.DSAIndexerLossLoggingHelper.tracker = {}
        harness.step(rig)
        return theirs.DSAIndexerLossLoggingHelper.tracker["values"].tolist()

    once, again = (on_ranks(replace(CASE, config=config), job) for config in (CASE.config, full("uniform", 1)))
    assert again == once and any(once[0])


def test_full_recompute_parts_stock_layers_from_their_top_k(kernels):
    """Why features/recompute.py refuses it for them alone."""
    kernels("megatron")
    with pytest.raises(RankFailed, match="needs top-k indices from source computing layer 3"):
        train(replace(CASE, config=full("uniform", 1)))


def test_a_selection_is_dropped_when_its_last_reader_has_it(kernels):
    def job(rig):
        harness.step(rig)
        return len(rig.config.nam_dsa_shelf.selections)

    assert on_ranks(CASE, job) == [0]


def test_checkpoints_take_back_all_they_left_behind(kernels):
    def job(rig):
        harness.step(rig)
        cores = [m for m in rig.model.modules() if hasattr(m, "rerun")]
        return [len(core.rerun) for core in cores]

    assert on_ranks(replace(CASE, config=full("uniform", 1)), job) == [[0, 0, 0]]


def test_layers_can_be_captured_one_by_one(kernels):
    """Transformer Engine runs a layer several times before it comes to the next; each reads what its source left last."""

    def job(rig):
        generator, mask = torch.Generator().manual_seed(1), None
        layers = [rig.model.decoder.layers[number - 1] for number in (3, 4, 6)]
        x = torch.randn(32, 1, 64, generator=generator)
        wanted = [layer(x, mask)[0].detach() for layer in layers]
        cuda_graphs._set_capture_start()
        for layer in layers:
            for _ in range(3):
                layer(torch.randn(32, 1, 64, generator=generator), mask)
        found = [layer(x, mask)[0].detach() for layer in layers]
        cuda_graphs._set_capture_end()
        again = [layer(x, mask)[0].detach() for layer in layers]
        return [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, found, again, strict=True)]

    assert on_ranks(CASE, job) == [[True, True, True]]


def line_of(case: Case) -> str:
    """What all ranks would add to the step line of one step of `case`."""

    def job(rig):
        GAUGES.expect({3: Gauge("DSA kept"), 7: Gauge("DSA kept")})
        GAUGES.step(0, 5)
        harness.step(rig)
        return GAUGES.beside("")

    (line,) = set(on_ranks(case, job))
    return line


TOLD = replace(CASE, pattern="+MDD-DD", microbatches=4)


@pytest.fixture(scope="module")
def told():
    """Of one rank. Layers 3 and 7 compute a top-k."""
    with pytest.MonkeyPatch.context() as patch:
        naive_kernels(patch)
        return line_of(TOLD)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [dict(tp=2), dict(pattern="+M|DD-DD", pp=2, config=full("uniform", 2)), dict(cp=2), dict(tp=2, dp=2)],
    ids=["tp2_sp", "pp2_recomputed", "cp2", "tp2_dp2"],
)
def test_every_layout_tells_the_same_share(kernels, told, layout):
    found = line_of(replace(TOLD, **layout))
    shares = [[float(part.split(": ")[1]) for part in line.split(" |")[:-1]] for line in (found, told)]
    assert found.startswith(" DSA kept 3: 0.") and " DSA kept 7: 0." in found
    assert shares[0] == pytest.approx(shares[1], abs=0.05 if "dp" in layout else 1e-4)
    assert (shares[0] != shares[1]) == ("dp" in layout), "of the first microbatch on each data-parallel rank"


@pytest.mark.few("one rank")
@pytest.mark.parametrize("layout", [{}, dict(cp=2)], ids=["one rank", "cp2"])
def test_queries_in_pieces_tell_the_same_share(kernels, told, layout):
    kernels("naive", query_pieces=4)
    found = line_of(replace(TOLD, **layout))
    shares = [[float(part.split(": ")[1]) for part in line.split(" |")[:-1]] for line in (found, told)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-4)


def test_one_piece_of_the_queries_is_scored_at_a_time(kernels, monkeypatch):
    kernels("naive", query_pieces=4)

    def job(rig):
        alive, before = weakref.WeakSet(), []
        layer_ = rig.model.decoder.layers[2]
        score = layer_.self_attention.core_attention.ops.index_scores

        def scored(*args):
            before.append(len(alive))
            scores = score(*args)
            alive.add(scores)
            return scores

        monkeypatch.setattr(layer_.self_attention.core_attention.ops, "index_scores", scored)
        with torch.no_grad():
            layer_(torch.randn(32, 1, 64), None)
        return before

    assert on_ranks(CASE, job) == [[0, 0, 0, 0]]


def test_all_is_kept_where_the_top_k_covers_the_sequence(kernels):
    assert line_of(replace(CASE, config=CASE.config | dict(dsa_indexer_topk=32))) == " DSA kept 3: 1 |"


@pytest.mark.slow
def test_telling_the_share_changes_no_bit(kernels):
    def tell(rig):
        GAUGES.expect({3: Gauge("DSA kept")})
        GAUGES.step(0, 1)

    def drawn(rig):
        harness.step(rig)
        return torch.get_rng_state().tolist()

    found, wanted = train(CASE, tell), train(CASE)
    assert found.losses == wanted.losses
    assert all(torch.equal(found.gradients[key], gradient) for key, gradient in wanted.gradients.items())
    assert on_ranks(CASE, lambda rig: (tell(rig), drawn(rig))[1]) == on_ranks(CASE, drawn)


def test_a_cut_share_group_is_an_error_not_another_model(kernels):
    with pytest.raises(RankFailed, match="layer 4 reuses the top-k of layer 3, which has not run before it"):
        train(replace(CASE, pattern="+MD|D-D", pp=2))


# The kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_compile_for_hopper(monkeypatch):
    """The interpreter takes what the compiler refuses: shapes that change in a loop, or sides no tensor core has."""
    compiled = hopper.compiles(monkeypatch)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    bench.train_core(bench.inputs(2, 32, 28))
    assert len(compiled) == 11
    assert all(kernel.metadata.shared <= 227 * 1024 for kernel in compiled.values()), "more than an SM's shared memory"


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    interpreter.passes("tests/gpu/test_dsa.py")
