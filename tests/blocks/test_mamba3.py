"""Our Mamba-3 layer inside Megatron's real HybridModel on a CPU, and naive.py, its definition.

kernel.py is checked by tests/gpu/test_mamba3.py, which this file also runs in Triton's interpreter.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import hopper
import interpreter
import megatron.core.tensor_parallel.random as rng
import modules
from harness import Case, on_ranks, train
from megatron.core.packed_seq_params import PackedSeqParams

from nam_megatron.blocks.mamba3 import hopper as specialised
from nam_megatron.blocks.mamba3 import layer, naive
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.blocks.mamba3.naive import Shape, State, Weights
from nam_megatron.errors import Refused

SHAPE = Shape(heads=4, head_dim=8, state_dim=16, groups=2, rank=2, angles=3)
SIZES = dict(kernels="naive", recompute="none", heads=8, head_dim=8, state_dim=16, groups=2, mimo_rank=2, chunk=8)
SIZES |= dict(head_pieces=1, keep_states=False, keep_prepared=False)


def mixer(fp8=None, **changes):
    block = Mamba3(**{**SIZES, "rope_fraction": 0.5, **changes})
    keeps = fp8.keeps if fp8 else lambda part: False
    return {"mamba3": layer.spec(modules.CpuBackend(), block, SimpleNamespace(keeps=keeps))}


CASE = Case("3-3", mixers=mixer())


@pytest.fixture(autouse=True)
def no_random_state_of_a_gpu(monkeypatch):
    monkeypatch.setattr(rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(rng, "_set_cuda_rng_state", lambda *_, **__: None)


@pytest.fixture(scope="module")
def whole():
    return train(CASE)


def same(found, wanted):
    assert found.gradients.keys() == wanted.gradients.keys()
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted.gradients.items():
        assert gradient.abs().max() > 0, f"no gradient reaches {name}"
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def inputs(shape=SHAPE, s=9, b=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    h, p, n, _, r, _ = shape
    mimo = [draw(h, r, p) for _ in range(3)] if r > 1 else [None] * 3
    weights = Weights(draw(h), draw(h), draw(h, r, n), draw(h, r, n), 1 + draw(n), 1 + draw(n), *mimo)
    return draw(s, b, sum(shape.parts.values())), weights


# The definition -------------------------------------------------------------------------------------------------------


def test_output_is_the_sum_over_all_pairs_of_tokens():
    """The closed form of the recurrence: attention with decays, a trapezoid's weights and relative rotations."""
    shape, s = SHAPE._replace(groups=4), 7
    packed, w = inputs(shape, s, 1)
    z, x, B, C, dt, A, trap, angles = (t[:, 0] for t in packed.split(list(shape.parts.values()), -1))
    dt, gate = F.softplus(dt + w.dt_bias), trap.sigmoid()
    log = -F.softplus(A).clamp(min=1e-4) * dt
    turned = (math.pi * angles.tanh()[:, None] * dt[..., None]).cumsum(0)
    heads = []
    for h in range(shape.heads):
        head = lambda t: t.unflatten(-1, (shape.heads, -1))[:, h]  # noqa: E731, B023
        q, k = (
            F.rms_norm(head(t).unflatten(-1, (2, 16)), (16,), norm, 1e-5) + bias[h]
            for t, norm, bias in ((C, w.C_norm, w.C_bias), (B, w.B_norm, w.B_bias))
        )
        # A pair of columns is a complex number.
        q, k = (torch.complex(t[..., :8], t[..., 8:]) for t in (q, k))
        rows = []
        for i in range(s):
            o = w.D[h] * head(x)[i] * w.mimo_x[h]
            for j in range(i + 1):
                weight = gate[j, h] * dt[j, h] + (j < i) * (1 - gate[min(j + 1, s - 1), h]) * dt[min(j + 1, s - 1), h]
                relative = F.pad(turned[i, h] - turned[j, h], (0, 5))
                scores = (
                    q[i].conj()[:, None] * k[j][None] * torch.polar(torch.ones_like(relative), -relative)
                ).real.sum(-1)
                o = o + weight * log[j + 1 : i + 1, h].sum().exp() * scores @ (head(x)[j] * w.mimo_x[h])
            rows.append((w.mimo_o[h] * o * F.silu(head(z)[i] * w.mimo_z[h])).sum(0))
        heads.append(torch.stack(rows))
    torch.testing.assert_close(naive.scan(packed, w, shape)[0][:, 0], torch.cat(heads, -1))


@pytest.mark.parametrize("rank", [1, 2])
def test_two_halves_are_one_sequence(rank):
    shape = SHAPE._replace(rank=rank)
    packed, weights = inputs(shape)
    y, last = naive.scan(packed, weights, shape)
    first, state = naive.scan(packed[:4], weights, shape)
    second, state = naive.scan(packed[4:], weights, shape, state)
    torch.testing.assert_close(torch.cat([first, second]), y)
    for found, wanted in zip(state, last, strict=True):
        torch.testing.assert_close(found, wanted)


def test_packed_documents_do_not_see_each_other():
    packed, weights = inputs(s=9, b=1)
    numbers = torch.tensor([[0, 0, 0, 2, 3, 3, 3, 3, 3]])
    apart = torch.cat([naive.scan(part, weights, SHAPE)[0] for part in packed.split([3, 1, 5])])
    torch.testing.assert_close(naive.scan(packed, weights, SHAPE, None, numbers)[0], apart)


def test_groups_share_their_keys():
    """With the groups' B and C repeated for every head it is the same scan with as many groups as heads."""
    packed, weights = inputs()
    parts = dict(zip(SHAPE.parts, packed.split(list(SHAPE.parts.values()), -1), strict=True))
    for name in ("B", "C"):
        parts[name] = parts[name].unflatten(-1, (2, -1)).repeat_interleave(2, -2).flatten(-2)
    each = naive.scan(torch.cat(list(parts.values()), -1), weights, SHAPE._replace(groups=4))[0]
    torch.testing.assert_close(each, naive.scan(packed, weights, SHAPE)[0])


# The kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kernels_in_tritons_interpreter():
    assert "39 passed, 16 deselected" in interpreter.passes("tests/gpu/test_mamba3.py")


def products(monkeypatch, rank: int, chunk: int, packed: bool) -> list[torch.Tensor]:
    """hopper.gradients for two heads of two entries, of three chunks each. Returns what it sums on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    b, heads, s, shape = 2, 2, 3 * chunk, Shape(2, 64, 128, 1, rank, 32)
    rows = [torch.zeros(b, heads, s * rank, width, dtype=torch.bfloat16) for width in (128, 128, 64, 64)]
    tokens, left = [torch.zeros(b, heads, s) for _ in range(5)], torch.zeros(b, heads, 3)
    states, summed = (
        torch.zeros(b, 3, heads, 64, 128, dtype=torch.bfloat16),
        [torch.zeros(3, b, heads, s), left.clone()],
    )
    documents = torch.zeros(b, s, dtype=torch.int32) if packed else None
    specialised.gradients(
        torch.zeros(heads), rows, tokens, left, states, *summed, torch.zeros(b, heads, 1), documents, shape, chunk
    )
    return summed


@pytest.mark.parametrize(("rank", "chunk", "packed"), [(4, 16, False), (2, 32, True), (1, 64, True)])
def test_products_of_warps_with_different_work_compile_for_hopper(monkeypatch, rank, chunk, packed):
    compiled = hopper.compiles(monkeypatch)
    products(monkeypatch, rank, chunk, packed)
    assert compiled["_gradients_kernel"].metadata.shared <= 227 * 1024, "what a multiprocessor has"


@pytest.mark.parametrize(("rank", "chunk"), [(4, 16), (1, 64)])
def test_what_the_rows_and_warps_of_a_chunk_leave_is_added_up(monkeypatch, rank, chunk):
    def wrote(*args, **_):
        *by_row, ends = args[12:16]
        tiles = 2 * 2 * 3
        for n, found in enumerate(by_row):  # at a tile's rows, rank by rank
            found.view(-1)[:] = 10.0**n * torch.arange(tiles * chunk).view(tiles, 1, chunk).repeat(1, rank, 1).flatten()
        ends.view(-1)[:] = -1e9
        for at in range(tiles * 8):  # of each tile four warps of keys and four of the state
            ends.view(-1)[at] = at // 8

    monkeypatch.setattr(specialised, "_gradients_kernel", {(3,): wrote})
    sums, ends = products(monkeypatch, rank, chunk, packed=False)
    token = torch.arange(12.0 * chunk).view(2, 2, 3 * chunk)
    torch.testing.assert_close(sums, torch.stack([rank * 10.0**n * token for n in range(3)]))
    torch.testing.assert_close(ends, 8 * torch.arange(12.0).view(2, 2, 3))


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True), ({"tokens": 203}, False), ({"dtype": torch.float32}, False), ({"dtype": torch.float16}, True),
        ({"capability": (8, 0)}, False), ({"is_cuda": False}, False), ({"tokens": 2**26}, False), ({"rank": 2}, False),
    ],
)  # fmt: skip
def test_products_of_warps_with_different_work_are_served_where_they_were_made_for(monkeypatch, changes, served):
    of = dict(tokens=208, dtype=torch.bfloat16, capability=(9, 0), is_cuda=True, rank=4) | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: of["capability"])
    packed = SimpleNamespace(
        is_cuda=of["is_cuda"], device=0, dtype=of["dtype"], size=lambda axis: (of["tokens"], 2)[axis]
    )
    assert specialised.serves(packed, Shape(8, 64, 128, 1, of["rank"], 32), 16) == served


# The layer ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_tensor_ranks_are_one(whole):
    same(train(replace(CASE, tp=2)), whole)


def test_two_ranks_that_share_a_sequence_are_one(whole):
    same(train(replace(CASE, cp=2)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"cp": 2}], ids=["one rank", "tensor 2", "context 2"])
@pytest.mark.parametrize("recompute", ["none", "in_proj"])
def test_heads_in_pieces_are_all_heads(ranks, recompute):
    case = replace(CASE, mixers=mixer(groups=8, recompute=recompute))
    pieces = replace(case, mixers=mixer(groups=8, recompute=recompute, head_pieces=2), **ranks)
    same(train(pieces), train(case))
    heads = on_ranks(pieces, lambda rig: [each.mixer.scanned.heads for each in rig.model.decoder.layers[::2]])
    assert heads == ([[2, 2]] * 2 if ranks else [[4, 4]])


@pytest.mark.slow
def test_two_tensor_ranks_are_one_without_sequence_parallelism(whole):
    same(train(replace(CASE, tp=2, config={"sequence_parallel": False})), whole)


@pytest.mark.slow
def test_two_tensor_ranks_are_one_where_every_head_is_a_group():
    case = replace(CASE, mixers=mixer(groups=8))
    same(train(replace(case, tp=2)), train(case))


class Splits(modules.NormColumnLinear):
    """As Transformer Engine's: it asks for its weight, and hands on what its norm gave."""

    return_layernorm_output = False

    def _get_weight_tensors(self):
        return [self.weight]

    def forward(self, x):
        normed = F.rms_norm(x, (x.size(-1),), self.layer_norm_weight, self.config.layernorm_epsilon)
        out = F.linear(normed, self._get_weight_tensors()[0])  # of one tensor rank
        return ((out, normed) if self.return_layernorm_output else out), None


@pytest.mark.few(1)
@pytest.mark.parametrize(("changes", "layout"), [
    ({}, {}), ({"head_pieces": 2}, {}), ({"recompute": "in_proj"}, {}), ({"recompute": "in_proj", "head_pieces": 2}, {}), ({}, {"cp": 2}),
], ids=str)  # fmt: skip
def test_rates_multiplied_by_themselves(changes, layout, whole, monkeypatch):
    monkeypatch.setattr(modules.CpuBackend, "column_parallel_layer_norm_linear", lambda _: Splits)
    fp8 = SimpleNamespace(keeps=lambda part: part == "mamba3_rates")
    same(train(replace(CASE, mixers=mixer(fp8, **changes), **layout)), whole)


@pytest.mark.slow
def test_in_proj_computed_again_gives_the_same_gradients(whole):
    case = replace(CASE, mixers=mixer(recompute="in_proj"))
    same(train(case), whole)

    def job(rig):
        calls = []
        rig.model.decoder.layers[0].mixer.in_proj.register_forward_hook(
            lambda *_: calls.append(torch.is_grad_enabled())
        )
        harness.step(rig)
        return calls

    assert on_ranks(case, job) == [[False, True] * case.microbatches]


def test_parameters_are_those_of_the_block():
    """Names, shapes and what stays in fp32, at NAM56R's sizes and without memory."""
    block = Mamba3(
        kernels="naive", recompute="none", heads=112, head_dim=64, state_dim=128, groups=8, mimo_rank=4, chunk=16,
        head_pieces=1, keep_states=False, keep_prepared=False, rope_fraction=0.5,
    )  # fmt: skip
    sizes = SimpleNamespace(site=SimpleNamespace(hidden_size=3584), norm=lambda name, width: [_Norm(name, width)])
    wanted = {p.name: p.shape for p in block.params(sizes, None)}
    case = Case("3", mixers=mixer(**block.model_dump()), config=dict(hidden_size=3584, num_attention_heads=56))
    prefix = "decoder.layers.0."
    found = {
        n.removeprefix(prefix): s for n, s in harness.shapes(replace(case, meta=True)).items() if n.startswith(prefix)
    }
    assert found == wanted


class _Norm:
    def __init__(self, name, width):
        self.name, self.shape = name + "weight", (width,)


def test_what_the_scan_owns_stays_fp32_in_a_bf16_model():
    def job(rig):
        from megatron.core.transformer.module import Float16Module

        from nam_megatron.mends import install

        install.single("marked_fp32")
        mixer = rig.model.decoder.layers[0].mixer
        rig.config.bf16 = True
        Float16Module(rig.config, mixer)
        kept = {name for name, p in mixer.named_parameters() if p.dtype == torch.float32}
        mixer.in_proj.config.params_dtype = torch.bfloat16
        hidden = torch.randn(6, 2, 64, dtype=torch.bfloat16).requires_grad_()
        out = mixer(hidden)[0]
        out.float().sum().backward()
        wrong = [n for n, p in mixer.named_parameters() if p.grad is None or p.grad.dtype != p.dtype]
        return kept, out.dtype, wrong

    kept = {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}
    assert on_ranks(CASE, job) == [(kept, torch.bfloat16, [])]


@pytest.mark.parametrize(("padded", "tp"), [(False, 1), (True, 1), (True, 2)])
def test_packed_sequences_reach_the_scan(padded, tp):
    """What pads a document comes with it; what lies behind the last one is a document of its own."""

    def job(rig):
        mixer = rig.model.decoder.layers[0].mixer
        hidden = torch.randn(12, 1, 64, generator=torch.Generator().manual_seed(1))
        ends = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
        given = {"cu_seqlens_q": ends}
        if padded:
            given = {"cu_seqlens_q": torch.tensor([0, 3, 3, 4], dtype=torch.int32), "cu_seqlens_q_padded": ends}
        mine = [part.chunk(tp)[torch.distributed.get_rank()] for part in (hidden, *hidden.split([4, 2, 6]))]
        together = mixer(mine[0], packed_seq_params=PackedSeqParams(qkv_format="thd", **given))[0]
        return [part.detach() for part in (together, *(mixer(part)[0] for part in mine[1:]))]

    together, *apart = map(torch.cat, zip(*on_ranks(replace(CASE, tp=tp), job), strict=True))
    torch.testing.assert_close(together, torch.cat(apart))


@pytest.mark.parametrize("tp", [1, 2])
def test_decoding_token_by_token_is_the_whole_sequence(tp):
    def job(rig):
        mixer = rig.model.decoder.layers[0].mixer
        hidden = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(1))
        context = SimpleNamespace(is_static_batching=lambda: True, key_value_memory_dict={}, sequence_len_offset=0)
        outs = []
        for piece in hidden.split([4, 1, 1, 3]):
            outs.append(mixer(piece, inference_context=context)[0])
            context.sequence_len_offset += piece.size(0)
        state = context.key_value_memory_dict[mixer.layer_number]
        angle, ssm, k, x = (t[0].numel() for t in state)
        assert mixer.mamba_state_shapes_per_request() == ((angle + k + x,), tuple(state.ssm.shape[1:]))
        assert ssm == state.ssm[0].numel()
        return torch.cat(outs).detach(), mixer(hidden)[0].detach()

    for steps, once in on_ranks(replace(CASE, tp=tp, config={"sequence_parallel": False}), job):
        torch.testing.assert_close(steps, once)


def test_dynamic_batches_are_refused():
    def job(rig):
        context = SimpleNamespace(is_static_batching=lambda: False)
        with pytest.raises(Refused, match="dynamic"):
            rig.model.decoder.layers[0].mixer(torch.randn(4, 1, 64), inference_context=context)

    on_ranks(CASE, job)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (dict(head_dim=8), "head_dim"),
        (dict(state_dim=48), "state_dim"),
        (dict(mimo_rank=3), "mimo_rank"),
        (dict(chunk=64, mimo_rank=4), "chunk"),
        (dict(chunk=2, mimo_rank=4), "chunk"),
    ],
)
def test_sizes_that_the_kernels_do_not_serve_are_refused(changes, key):
    sizes = dict(
        heads=8, head_dim=16, state_dim=32, groups=2, mimo_rank=4, chunk=16, head_pieces=1, rope_fraction=0.5,
        keep_states=False, keep_prepared=False, recompute="none",
    )  # fmt: skip
    fused = Mamba3(kernels="fused", **{**sizes, **changes})
    assert [p.key for p in fused.unserved()] == [Mamba3.at(key)]
    assert not list(fused.model_copy(update={"kernels": "naive"}).unserved())


def test_fused_kernels_without_a_gpu_are_refused():
    with pytest.raises(Refused, match="need a GPU"):
        mixer(kernels="fused")


def test_state_of_no_tokens_is_zero():
    state = State.zeros(3, SHAPE, "cpu", torch.bfloat16)
    packed, weights = inputs(b=3)
    torch.testing.assert_close(naive.scan(packed, weights, SHAPE, state)[0], naive.scan(packed, weights, SHAPE)[0])
