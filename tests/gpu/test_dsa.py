"""blocks/dsa/kernel.py against naive.py in fp64: values, every gradient, repeated runs, poisoned memory.

With TRITON_INTERPRET=1 the same on a CPU, in fp32 and small (tests/blocks/test_dsa.py does that). The checks themselves, and
their limits, are those of benchmarks/dsa.py, which prints them beside the times.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

from benchmarks import dsa as bench
from nam_megatron.blocks.dsa import kernel, layer, naive

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

CASES = [(2, 1025, 56), (1, 2048, 28), (1, 2049, 7), (1, 2048, 14), (1, 2047, 32), (1, 4097, 64), (1, 8192, 7)]
if INTERPRETED:
    # The second in several parts of lists and of gradients, in rows of three widths; of the third a tile has one query's heads alone.
    CASES = [(2, 21, 7), (1, 70, 3), (1, 17, 16)]


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Torch's deterministic mode: memory comes filled with NaN, and what is not deterministic raises."""
    if INTERPRETED:
        import interpreter

        interpreter.mend(monkeypatch)
        for name, value in dict(DEVICE="cpu", DTYPE=torch.float32, H=3, R=32, P=16, D=16, K=8).items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(kernel, "ALIGN", triton.language.constexpr(32))
        # Several tiles in so few positions.
        for name, tile in kernel.TILES.items():
            small = {"rows": 32, "J": 32} | dict.fromkeys("IEM", 16)  # one side for the other shows
            small = {side: size for side, size in small.items() if side in tile}
            monkeypatch.setitem(kernel.TILES, name, tile | small)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def passed(check, *args) -> None:
    report = bench.Report(None, 1e9)
    check(report, *args)
    assert report.data["checks"] and not [c for c in report.data["checks"] if c["verdict"] != "PASS"]


@pytest.mark.parametrize(("b", "s", "n"), CASES)
def test_forward_backward_and_again(b, s, n):
    passed(bench.check, b, s, n)


def test_the_indexer_learns_as_exactly_as_megatrons(monkeypatch):
    """In bf16: scores' gradients stay fp32 and enter products as two bf16 numbers. Sharp scores too."""
    monkeypatch.setattr(bench, "DTYPE", torch.bfloat16)
    for scale in (1.0, 50.0):
        x = bench.inputs(1, 40 if INTERPRETED else 1024, 3 if INTERPRETED else 56)
        x.w *= scale
        passed(bench.check_indexer, f"scores x {scale:g} ", x)


@pytest.mark.parametrize("scale", [1, 10, 50])
def test_attention_however_sharp_is_as_exact_as_megatrons(monkeypatch, scale):
    monkeypatch.setattr(bench, "DTYPE", torch.bfloat16)
    x = bench.inputs(1, 40 if INTERPRETED else 1024, 4 if INTERPRETED else 56)
    x.query *= scale
    selection = kernel.select(kernel.index_scores(x.q, x.k, x.w), bench.K)
    passed(bench.check_attend, f"logits x {scale} ", x, selection)


def test_with_every_key_selected_it_is_dense_attention():
    passed(bench.check_dense, 1, 40 if INTERPRETED else 1000, 7 if INTERPRETED else 56)


def test_equal_scores_are_taken_from_the_left():
    s = 70
    scores = torch.zeros(1, s, 80, device=bench.DEVICE)
    scores[..., 0::3], scores[..., 1::3] = 1.0, -1.0
    taken = kernel.select(scores[..., :s], 4).indices[0]
    assert taken[69].tolist() == [0, 3, 6, 9], "the first of the largest"
    assert taken[5].tolist() == [0, 2, 3, 5], "all of the largest, then of the next"
    assert taken[2].tolist() == [0, 1, 2, -1], "all there is"


@pytest.mark.parametrize("top_k", [40, 140])
def test_kernel_and_definition_take_the_same_of_equal_scores(top_k):
    """Of a few heads all are often below zero, and their scores 0: a third of these."""
    s = 150
    make = torch.Generator(bench.DEVICE).manual_seed(0)
    scores = torch.randn(2, s, s, generator=make, device=bench.DEVICE).relu()
    scores[1] *= -1
    causal = naive.causal(s, s, scores.device)
    wanted = naive.select(scores.masked_fill(~causal, -torch.inf), top_k).selected
    padded = torch.nn.functional.pad(scores, (0, -s % kernel.ALIGN.value))
    selection = kernel.select(padded[..., :s], top_k)
    indices = selection.indices.long()
    found = torch.zeros(2, s, s + 1, dtype=torch.bool, device=scores.device)
    found.scatter_(-1, indices.where(indices >= 0, s), True)
    assert torch.equal(found[..., :s], wanted)
    for pairs, flat in zip(selection.pairs, indices.flatten(1), strict=True):
        assert torch.equal(pairs[: (flat >= 0).sum()].long(), flat.argsort(stable=True)[(flat < 0).sum() :])


if INTERPRETED:

    def kernels_of_layers(monkeypatch, name: str) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
        import harness

        recipe_of = harness.recipe_of

        def chosen(**said):
            recipe = recipe_of(**said)
            harness.say(recipe, "dsa", kernels=name)
            return recipe

        monkeypatch.setattr(harness, "recipe_of", chosen)

    WIDTHS = dict(q_lora_rank=16, kv_lora_rank=16, qk_pos_emb_head_dim=32, dsa_indexer_head_dim=32)

    @pytest.mark.parametrize(("reference", "heads", "tp"), [("megatron", 16, 1), ("naive", 2, 2)])
    def test_the_fused_layer_in_megatrons_hybrid_model(monkeypatch, reference, heads, tp):
        """Megatron's with 16 heads: of few all score below zero at once, and which of equal scores it takes is torch's choice."""
        sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
        import harness

        torch.use_deterministic_algorithms(False)
        sharing = dict(dsa_indexer_n_heads=heads, dsa_indexer_skip_topk_offset=1)
        case = harness.Case("D-D", microbatches=1, config=WIDTHS | sharing)
        kernels_of_layers(monkeypatch, reference)
        wanted = harness.train(case)
        kernels_of_layers(monkeypatch, "fused")
        found = harness.train(replace(case, tp=tp))
        torch.testing.assert_close(found.losses, wanted.losses)
        for key, gradient in wanted.gradients.items():
            torch.testing.assert_close(found.gradients[key], gradient, rtol=1e-3, atol=1e-6, msg=key)

else:

    def test_it_can_be_captured_in_a_cuda_graph():
        passed(bench.check_graph)

    @pytest.fixture(scope="module")
    def megatron():
        """Process groups of one GPU, under which layers can be built."""
        bench.one_rank()

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(1024, 2, 3584, device="cuda", dtype=torch.bfloat16, generator=generator)

    def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
        """cuBLAS may take another algorithm in a graph; another top-k would be off by far more."""
        assert found.keys() == wanted.keys()
        errors = {name: bench.error(found[name], tensor) for name, tensor in wanted.items()}
        assert not {name: error for name, error in errors.items() if not error < 1e-2}

    def test_a_layer_in_a_cuda_graph(megatron):
        """Forward and backward pass of a layer with an indexer and its loss, captured once and replayed on another input."""
        torch.use_deterministic_algorithms(False)  # Transformer Engine's part need not be
        layer = bench.layer("dsa", 5, bench.config())
        x, dy = draw(0).requires_grad_(), draw(1)
        names, parameters = zip(*layer.named_parameters(), strict=True)

        def step() -> dict[str, torch.Tensor]:
            y, _ = layer(x, attention_mask=None)
            return dict(zip(("y", "x", *names), (y, *torch.autograd.grad(y, (x, *parameters), dy)), strict=True))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(draw(2))
        graph.replay()
        close(captured, step())

    def test_a_share_group_in_transformer_engines_cuda_graphs(megatron):
        """As Megatron has it capture and replay: layer by layer, a graph for each of two microbatches in flight."""
        import megatron.core.transformer.cuda_graphs as cuda_graphs
        from transformer_engine.pytorch.graph import make_graphed_callables

        torch.use_deterministic_algorithms(False)
        config = bench.config(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"])
        layers = tuple(bench.layer("dsa", number, config) for number in (5, 9))
        samples = [layer.get_layer_static_inputs(1024, 2) for _ in range(2) for layer in layers]
        arguments = [(sample.pop("hidden_states"),) for sample in samples]
        cuda_graphs._set_capture_start()
        # What megatron-core 0.19.2's TECudaGraphHelper passes for a first pipeline stage of two.
        graphs = make_graphed_callables(
            layers, arguments, num_warmup_iters=3, allow_unused_input=True, sample_kwargs=samples, fp8_enabled=False,
            _order=[1, 1, -1, -1], _num_layers_per_chunk=[2], retain_graph_in_backward=False,
            _reuse_graph_input_output_buffers=True,
        )  # fmt: skip
        cuda_graphs._set_capture_end()
        mask = samples[0]["attention_mask"]

        def through(microbatch: int, x: torch.Tensor, graphed: bool) -> torch.Tensor:
            for i, layer in enumerate(layers):
                if graphed:
                    x = graphs[2 * microbatch + i](x, attention_mask=mask, is_first_microbatch=microbatch == 0)[0]
                else:
                    x = layer(x, attention_mask=mask)[0]
            return x

        def step(seed: int, graphed: bool) -> dict[str, torch.Tensor]:
            """Outputs and gradients of two microbatches, forward, forward, backward, backward."""
            found, hooks = {}, []

            def collect(name: str, leaf: torch.Tensor) -> None:
                # As Megatron's DDP does: a graph's gradient is in memory that the next graph may write.
                def add(leaf: torch.Tensor) -> None:
                    found[name] = found.get(name, 0) + leaf.grad.float()
                    leaf.grad = None

                hooks.append(leaf.register_post_accumulate_grad_hook(add))

            for i, layer in enumerate(layers):
                for name, parameter in layer.named_parameters():
                    collect(f"{i} {name}", parameter)
            outputs = []
            for microbatch in range(2):
                x = draw(seed + microbatch).requires_grad_()
                collect(f"x {microbatch}", x)
                outputs.append(through(microbatch, x, graphed))
                found[f"y {microbatch}"] = outputs[-1].detach().clone()
            for microbatch, y in enumerate(outputs):
                y.backward(draw(seed + 10 + microbatch))
            for hook in hooks:
                hook.remove()
            return found

        for seed in (100, 200):
            close(step(seed, graphed=True), step(seed, graphed=False))


@pytest.mark.parametrize(("begin", "rows"), [(1, 37)] if INTERPRETED else [(1, 1025), (3, 512)])
def test_the_last_queries_of_a_sequence_are_those_of_the_whole(begin, rows):
    """As context parallelism has them: `rows` queries behind `begin` blocks of keys. All by the whole in fp64, in plain torch."""
    begin *= kernel.ALIGN.value
    x = bench.inputs(2, begin + rows, 3)
    given = (x.q[begin:], x.k, x.w[begin:], x.query[begin:], x.key)
    q, k, w, query, key = bench.leaves(*given)
    scores = kernel.index_scores(q.detach(), k.detach(), w.detach())
    selection = kernel.select(scores, bench.K)
    seen = scores.masked_fill(~naive.causal(rows, begin + rows, scores.device), -torch.inf)
    assert torch.equal(selection.of(slice(None)), naive.select(seen, bench.K).selected)
    loss = kernel.indexer_kl(q, k, w, scores, query, key, bench.SCALE, None, 0.5)
    out = kernel.attend(query, key, selection, bench.SCALE, bench.R)
    (loss + (out * x.dout[begin:]).float().sum()).backward()

    whole = bench.leaves(x.q, x.k, x.w, x.query, x.key, dtype=torch.float64)

    def kl(tokens: int) -> torch.Tensor:
        q, k, w, query, key = (t[:tokens] for t in whole)
        return naive.indexer_kl(q, k, w, naive.index_scores(q, k, w), query, key, bench.SCALE, None, 0.5)

    mask = torch.zeros(2, begin + rows, begin + rows, dtype=torch.bool, device=scores.device)
    mask[:, :, 0], mask[:, begin:] = True, selection.of(slice(None))
    wanted = naive.attend(*whole[3:], naive.Selection(mask), bench.SCALE, bench.R)[begin:]
    wanted_loss = kl(begin + rows) - kl(begin)
    (wanted_loss + (wanted * x.dout[begin:].double()).sum()).backward()
    limit = 1e-5 if torch.float32 == bench.DTYPE else 2e-2
    found = {"out": (out, wanted), "loss": (loss, wanted_loss)}
    for name, ours, theirs in zip(("q", "k", "w", "query", "key"), (q, k, w, query, key), whole, strict=True):
        found[f"d {name}"] = ours.grad, theirs.grad[len(theirs) - len(ours) :]
    for name, (ours, theirs) in found.items():
        assert bench.error(ours.detach(), theirs.detach()) < limit, name


def test_the_log_looks_at_the_keys_that_were_selected():
    """Kept attention of a few queries, without the kernels' lists by key; with fewer keys than the top-k too."""
    x = bench.inputs(2, 21 if INTERPRETED else 1025, 3)
    scores = kernel.index_scores(x.q, x.k, x.w)
    visible = naive.causal(len(x.q), len(x.q), scores.device)
    plain = naive.select(scores[..., : len(x.q)].masked_fill(~visible, -torch.inf), bench.K)
    for rows in (slice(2, 21, 3), slice(len(x.q) - 1, None)):
        assert torch.equal(kernel.select(scores, bench.K).of(rows), plain.of(rows))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(32, 64), (1, 64), (5, 96)])
def test_the_indexer_turns_as_megatrons(heads, width, interleaved):
    """The first 64 channels, by any magnitude; outputs and gradients, in fp32."""
    config = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, dsa_indexer_rope_interleaved=interleaved
    )
    groups = SimpleNamespace(cp=object())
    own = SimpleNamespace(qk_pos_emb_head_dim=64, index_head_dim=width, config=config, pg_collection=groups, _tables={})
    torch.manual_seed(3)
    angles = torch.randn(19, 1, 1, 32, device=bench.DEVICE).repeat(1, 1, 1, 2)
    x, back = (torch.randn(19, 2, heads, width, device=bench.DEVICE) for _ in range(2))
    found = []
    for kind in (layer.TurningIndexer, layer.DSAIndexer):
        leaf = x.clone().requires_grad_()
        out = kind._apply_rope(own, leaf * 1, angles, 1.25)
        found += [out.detach(), *torch.autograd.grad(out, leaf, back)]
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
