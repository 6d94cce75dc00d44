"""M2RNN: its definition, and its mixer inside Megatron's real HybridModel on a CPU.

kernel.py and elementwise.py are checked by tests/gpu/test_m2rnn.py, which this file also runs in Triton's interpreter.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import hopper
import interpreter
import modules
from harness import Case, on_ranks, step, train

from benchmarks import m2rnn as bench
from nam_megatron.blocks import Gauge
from nam_megatron.blocks.m2rnn import elementwise, kernel, layer, naive
from nam_megatron.blocks.m2rnn.block import CHECKPOINT, ROWS, M2Rnn
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.words.sizes import Sizes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def block(**sizes) -> M2Rnn:
    return M2Rnn(
        **dict(kernels="naive", k_dim=8, v_dim=4, heads=6, conv_width=4, gradient_clip=None, padded_projection=False)
        | sizes
    )


def spec(**sizes):
    return layer.spec(modules.CpuBackend(), block(**sizes), None)


CASE = Case("*R-R", mixers={"m2rnn": spec()})


def mixer_of(rig) -> layer.M2RnnMixer:
    return next(m for m in rig.model.modules() if isinstance(m, layer.M2RnnMixer))


# The definition ------------------------------------------------------------------------------------------------------


def test_scan_is_the_published_recurrence():
    """Written out number by number; h W has the state's row, y = q h sums over rows."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2), torch.randn(3, 1, 2), torch.randn(3, 1, 1, 3)
    f, w, h = torch.rand(3, 1, 1), torch.randn(1, 3, 3), torch.randn(1, 1, 2, 3)
    y, last = naive.scan(q, k, v, f, w, h)
    state = [[h[0, 0, i, j].item() for j in range(3)] for i in range(2)]
    for t in range(3):
        before = [list(row) for row in state]
        for i in range(2):
            for j in range(3):
                x = sum(before[i][m] * w[0, m, j] for m in range(3)) + k[t, 0, i] * v[t, 0, 0, j]
                state[i][j] = (f[t, 0, 0] * before[i][j] + (1 - f[t, 0, 0]) * torch.tanh(x)).item()
        for j in range(3):
            assert y[t, 0, 0, j].item() == pytest.approx(
                sum(q[t, 0, i].item() * state[i][j] for i in range(2)), rel=1e-5
            )
    torch.testing.assert_close(last[0, 0], torch.tensor(state))


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradients_are_those_of_the_authors_kernels(clip):
    """README's recursion written out; with a bound, what a state gets from later tokens is cut before its own output's share is added."""
    torch.manual_seed(1)
    q, k, v, f, w = (t[:, 0].double() if t.dim() > 3 or t.size(-1) == 5 else t.double() for t in bench_inputs(6))
    f = f[:, 0]
    dy, h0 = torch.randn(6, 3, 4, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    states = [h0]
    zs = []
    for t in range(6):
        zs.append(torch.tanh(states[t] @ w + k[t][None, :, None] * v[t][:, None, :]))
        states.append(f[t][:, None, None] * states[t] + (1 - f[t][:, None, None]) * zs[t])
    wanted = {name: torch.zeros_like(x) for name, x in dict(q=q, k=k, v=v, f=f, w=w).items()}
    carry, cut = torch.zeros_like(h0), False
    for t in reversed(range(6)):
        if clip is not None:
            cut |= bool((carry.abs() > clip).any())
            carry = carry.clamp(-clip, clip)
        dh = carry + q[t][None, :, None] * dy[t][:, None, :]
        dx = (1 - f[t][:, None, None]) * (1 - zs[t] ** 2) * dh
        wanted["q"][t] = torch.einsum("nkv,nv->k", states[t + 1], dy[t])
        wanted["k"][t] = torch.einsum("nkv,nv->k", dx, v[t])
        wanted["v"][t] = torch.einsum("nkv,k->nv", dx, k[t])
        wanted["f"][t] = (dh * (states[t] - zs[t])).sum((1, 2))
        wanted["w"] += states[t].transpose(1, 2) @ dx
        carry = f[t][:, None, None] * dh + dx @ w.transpose(1, 2)
    assert cut == (clip is not None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, f, w, h0)]
    batched = [x.unsqueeze(1) for x in leaves[:4]]
    y, _ = naive.scan(*batched, leaves[4], leaves[5].unsqueeze(0), gradient_clip=clip)
    found = torch.autograd.grad(y[:, 0], leaves, dy)
    for name, one, exact in zip((*wanted, "h0"), found, (*wanted.values(), carry), strict=True):
        torch.testing.assert_close(one, exact, msg=lambda m, n=name: f"{n}: {m}")


def test_forget_is_as_wide_as_its_input():
    x, bias, a = torch.linspace(-30, 3, 9, dtype=torch.float64), 0.1, torch.tensor(2.7, dtype=torch.float64)
    exact = np.exp(-np.exp(a.numpy()) * np.log1p(np.exp(x.numpy() + bias)))
    found = naive.forget(x, torch.tensor(bias, dtype=torch.float64), a)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-14)
    assert naive.forget(x.bfloat16(), torch.tensor(bias), a.float()).dtype == torch.float32


def test_the_gate_adds_what_skips_the_recurrence():
    """Two heads of width 2, two values of which are nothing: the norm's square is that of the other two."""
    y, v = (
        torch.tensor([1.0, 0, 0, 3]).view(1, 1, 2, 2).double(),
        torch.tensor([2.0, 0, 0, 5]).view(1, 1, 2, 2).double(),
    )
    d, g = torch.tensor([0.5, 1, 1, -0.2]).double(), torch.full((1, 1, 4), 40.0).double()  # SiLU(40) is 40
    found = naive.gate(y, v, g, d, torch.tensor([1.0, 1, 1, 10]).double(), 0.0)
    size = (80.0**2 + 80.0**2) / 4  # (1 + 0.5 * 2) * 40 and (3 - 0.2 * 5) * 40
    expected = torch.tensor([80.0, 0, 0, 800.0]).double() / size**0.5
    torch.testing.assert_close(found.flatten(), expected)


def test_two_halves_are_the_whole():
    x = bench_inputs(9)
    y, last = naive.scan(*x)
    first, state = naive.scan(*(t[:4] for t in x[:4]), x[4])
    second, end = naive.scan(*(t[4:] for t in x[:4]), x[4], state)
    torch.testing.assert_close((torch.cat([first, second]), end), (y, last))


def test_packed_documents_do_not_see_each_other():
    x, cu = bench_inputs(9), torch.tensor([0, 2, 2, 9])
    x = [t[:, :1] for t in x[:4]] + [x[4]]
    y, last = naive.scan(*x, cu_seqlens=cu)
    channels, weight, bias = torch.randn(9, 1, 5), torch.randn(5, 1, 4), torch.randn(5)
    convolved = naive.conv(channels, weight, bias, cu)
    for n, (first, end) in enumerate(((0, 2), (2, 9))):
        alone, state = naive.scan(*(t[first:end] for t in x[:4]), x[4])
        torch.testing.assert_close((y[first:end], last[2 * n]), (alone, state[0]))
        torch.testing.assert_close(convolved[first:end], naive.conv(channels[first:end], weight, bias))
    assert not last[1].any()  # of the empty document


@pytest.mark.parametrize(("scale", "grows"), [(0.0, False), (3.0, True)])
def test_the_gain_is_the_most_that_a_gradient_can_grow(scale, grows):
    """Of the identity that training begins with it is below 1; away from it the recurrence amplifies."""
    _, k, v, f, w = (t.double() for t in bench_inputs(20))
    w = torch.eye(4).double() + scale * w
    k, v, h = k / 10, v / 10, torch.randn(2, 3, 5, 4, dtype=torch.float64) / 10

    def end(row):
        """The last state of one row, the others as they are."""
        state = h.clone()
        state[1, 2, 3] = row
        return naive.scan(k, k, v, f, w, state)[1][1, 2]

    jacobian = torch.autograd.functional.jacobian(end, h[1, 2, 3])
    assert not jacobian[[0, 1, 2, 4]].any(), "a row sees another"
    found = naive.gain(k, v, f, w, h)
    assert found.shape == (2, 3, 5)
    assert found[1, 2, 3].item() == pytest.approx(torch.linalg.svdvals(jacobian[3])[0].item(), rel=1e-9)
    assert (found.max() > 100) if grows else (found.max() < 1)


def bench_inputs(s: int) -> list[torch.Tensor]:
    torch.manual_seed(s)
    return [
        torch.randn(s, 2, 5),
        torch.randn(s, 2, 5),
        torch.randn(s, 2, 3, 4),
        torch.rand(s, 2, 3),
        torch.randn(3, 4, 4),
    ]


# In Megatron ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    return train(CASE)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout", [dict(tp=2), dict(tp=2, config={"sequence_parallel": False}), dict(pp=2), dict(cp=2)], ids=str
)
def test_every_layout_is_the_same_model(whole, layout):
    pattern = "*R|-R" if "pp" in layout else CASE.pattern
    other = train(replace(CASE, pattern=pattern, **layout))
    assert other.losses == pytest.approx(whole.losses, rel=1e-6)
    assert other.gradients.keys() == whole.gradients.keys()
    for key, wanted in whole.gradients.items():
        error = (other.gradients[key] - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, f"gradient of {key}: off by {error:.1e}"


def told(case: Case) -> str:
    """What all ranks would add to the step line of one step of `case`."""

    def job(rig):
        tell(rig)
        step(rig)
        return GAUGES.beside("")

    (line,) = set(on_ranks(case, job))
    return line


def tell(rig) -> None:
    GAUGES.expect({number: Gauge("M2RNN gain", largest=True) for number in (2, 4)})
    GAUGES.step(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("span", [8, 64], ids=["the last tokens", "all of them"])
def test_every_layout_tells_the_same_gain(monkeypatch, span):
    monkeypatch.setattr(layer, "GAIN_SPAN", span)
    one = told(CASE)
    assert one.count(" M2RNN gain") == 2
    for other in (replace(CASE, tp=2), replace(CASE, pattern="*R|-R", pp=2)):
        numbers = [[float(part.split(": ")[1]) for part in line.split(" |")[:-1]] for line in (one, told(other))]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-3) and min(numbers[0]) > 0


def test_telling_the_gain_changes_no_bit(whole):
    other = train(CASE, tell)
    assert other.losses == whole.losses
    assert all(torch.equal(other.gradients[key], gradient) for key, gradient in whole.gradients.items())


def test_every_parameter_is_trained(whole):
    assert not [key for key, gradient in whole.gradients.items() if not gradient.abs().sum() > 0]


def test_a_later_token_changes_nothing_before_it():
    def job(rig):
        mixer, x = mixer_of(rig), torch.randn(12, 2, 64)
        other = x.clone()
        other[7:] += 1
        one, two = (mixer(t)[0] for t in (x, other))
        return torch.equal(one[:7], two[:7]) and not torch.isclose(one[7:], two[7:]).all(-1).any()

    assert on_ranks(CASE, job) == [True]


@pytest.mark.parametrize(("ends", "padded"), [([0, 5, 9], None), ([0, 3, 6], [0, 5, 9])], ids=["whole", "padded"])
def test_documents_of_a_packed_sequence_are_sequences_with_what_pads_them(ends, padded):
    def job(rig):
        mixer, x = mixer_of(rig), torch.randn(12, 1, 64)
        starts = padded and torch.tensor(padded)
        packed = SimpleNamespace(cu_seqlens_q=torch.tensor(ends), cu_seqlens_q_padded=starts)
        alone = torch.cat([mixer(part)[0] for part in (x[:5], x[5:9], x[9:])])
        torch.testing.assert_close(mixer(x, packed_seq_params=packed)[0], alone)

    on_ranks(CASE, job)


def test_what_context_ranks_cannot_share_is_refused():
    def job(rig):
        from megatron.core.inference.contexts import StaticInferenceContext

        mixer, x = mixer_of(rig), torch.randn(6, 1, 64)
        with pytest.raises(Refused, match="M2RNN takes no packed documents under context parallelism"):
            mixer(x, packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor([0, 6]), cu_seqlens_q_padded=None))
        with pytest.raises(AssertionError, match="whole sequences alone"):
            mixer(x, inference_context=StaticInferenceContext(1, 6))

    on_ranks(replace(CASE, cp=2), job)


def test_a_bound_of_the_states_gradient_reaches_the_recurrence(whole):
    other = train(replace(CASE, mixers={"m2rnn": spec(gradient_clip=1e-6)}))
    assert other.losses == whole.losses
    differ = [key for key, wanted in whole.gradients.items() if not torch.equal(other.gradients[key], wanted)]
    assert any("state_weight" in key for key in differ)


def test_decoding_continues_the_prompt():
    """Token by token, and several at once, from the states that the context keeps; and a new prompt starts afresh."""

    def job(rig):
        from megatron.core.inference.contexts import StaticInferenceContext

        mixer, x, context = mixer_of(rig), torch.randn(12, 2, 64), StaticInferenceContext(2, 12)
        with torch.no_grad():
            whole = mixer(x)[0]
            for _ in range(2):
                context.reset()
                parts = []
                for part in x.split([3, 4, 1, 1, 3]):
                    parts.append(mixer(part, inference_context=context)[0])
                    context.increment_sequence_len_offset(len(part))
                torch.testing.assert_close(torch.cat(parts), whole)
        window, matrix = context.key_value_memory_dict[mixer.layer_number]
        assert (window.shape[1:], matrix.shape[1:]) == mixer.mamba_state_shapes_per_request()

    on_ranks(CASE, job)


def test_what_the_recurrence_owns_stays_fp32():
    def job(rig):
        from megatron.core.transformer.module import Float16Module

        from nam_megatron.mends import install

        install.single("marked_fp32")
        mixer = mixer_of(rig)
        rig.config.bf16 = True
        Float16Module(rig.config, mixer)
        kept = {name for name, p in mixer.named_parameters() if p.dtype == torch.float32}
        mixer.in_proj.config.params_dtype = torch.bfloat16
        out, _ = mixer(torch.randn(6, 2, 64, dtype=torch.bfloat16))
        return kept, out.dtype

    assert on_ranks(CASE, job) == [({"state_weight", "D", "A_log", "dt_bias"}, torch.bfloat16)]


# The block -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_blocks_parameters_are_the_layers(tp):
    wide = dict(kernels="naive", k_dim=64, v_dim=16, heads=44)
    case = Case("R", tp=tp, config=dict(hidden_size=3584), mixers={"m2rnn": spec(**wide)}, meta=True)
    case = replace(case, config=case.config | dict(use_cpu_initialization=False, perform_initialization=False))
    found = on_ranks(case, lambda rig: {n: tuple(p.shape) for n, p in rig.model.decoder.layers[0].named_parameters()})
    plan = translate(load("nam56r", ["execution.m2rnn.kernels=naive"])).plan
    wanted = {}
    for p in block(**wide).params(Sizes.of(plan.site), None):
        wanted[p.name] = tuple(p.shape)
        if p.shard == "tensor":
            axis = 1 if p.name == "mixer.out_proj.weight" else 0
            wanted[p.name] = tuple(n // tp if i == axis else n for i, n in enumerate(p.shape))
    assert found == [wanted] * tp


def test_the_block_knows_how_the_kernels_are_cut():
    assert (kernel.Config().tokens, kernel.Config().rows) == (CHECKPOINT, ROWS)


def test_more_than_32_bits_reach_is_refused():
    """Without a GPU and without memory: 1.36 million tokens of NAM56R's packed projection."""
    weight, bias = torch.zeros(832, 1, 4), torch.zeros(832)
    for tokens in (1_359_000, 1_360_000):
        packed = torch.empty(tokens // 2, 2, 1580, device="meta")
        assert bool(list(elementwise.unreachable(packed))) == (tokens == 1_360_000)
    with pytest.raises(Refused, match="1,360,000 tokens") as refused:
        kernel.conv(packed[..., :832], weight, bias)
    assert refused.value.problems[0].key == "schedule.micro_batch_size"
    v, f, w = packed[..., :704].unflatten(-1, (44, 16)), packed[..., :44], torch.empty(44, 16, 16, device="meta")
    with pytest.raises(Refused, match="1,360,000 tokens"):
        kernel.scan(packed[..., :64], packed[..., 64:128], v, f, w)
    with pytest.raises(Refused, match="1,360,000 tokens"):
        kernel.gate(v, v, packed[..., :704], bias[:704], bias[:704], 1e-5)


def test_fused_without_a_gpu_is_refused():
    with pytest.raises(Refused, match="fused kernels of M2RNN need a GPU"):
        spec(kernels="fused", k_dim=16, v_dim=16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.blocks.m2rnn.k_dim=72"], "M2RNN's kernels take key widths that 16 divides, not 72"),
        (["model.blocks.m2rnn.v_dim=24"], "M2RNN's kernels take value widths of 16 and 32, not 24"),
        (["precision=fp8_tensorwise"], "M2RNN's input projection is 1580 / tensor 1 wide, which 16 does not divide"),
    ],
)
def test_sizes_without_a_kernel_are_refused(overrides, message):
    with pytest.raises(Refused) as refused:
        translate(load("nam56r", overrides))
    assert any(p.message.startswith(message) for p in refused.value.problems)
    if "fp8" not in overrides[0]:
        translate(load("nam56r", [*overrides, "execution.m2rnn.kernels=naive"]))


# The kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_compile_for_hopper(monkeypatch, tmp_path):
    """The interpreter takes what the compiler refuses: shapes that change in a loop, or sides no tensor core has."""
    compiled = hopper.compiles(monkeypatch)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    bench.run(kernel.scan, bench.inputs(8, 1, 2))
    for name in ("_forward", "_backward"):  # a state that does not stay in registers costs more than all else
        assert hopper.stack(compiled[name], tmp_path) == 0
    bench.check_around(SimpleNamespace(check=lambda *_: None), torch.bfloat16, 8, 1)
    assert len(compiled) == 7
    bench.run(kernel.scan, bench.inputs(8, 1, 2, dtype=torch.float32))
    bench.run(lambda *x: kernel.scan(*x, gradient_clip=1.0), bench.inputs(8, 1, 2))
    with torch.no_grad():  # no state is kept
        kernel.scan(
            torch.zeros(8, 1, 64),
            torch.zeros(8, 1, 64),
            torch.zeros(8, 1, 2, 16),
            torch.zeros(8, 1, 2),
            torch.zeros(2, 16, 16),
        )


if INTERPRETED:

    @pytest.mark.parametrize("tp", [1, 2])
    def test_fused_layer_is_the_naive_one(monkeypatch, tp):
        interpreter.mend(monkeypatch)
        sizes = dict(k_dim=16, v_dim=16, heads=2)
        sizes["gradient_clip"] = 1e-3 if tp == 2 else None
        cases = [
            Case("R", tp=tp, microbatches=1, mixers={"m2rnn": spec(kernels=k, **sizes)}) for k in ("fused", "naive")
        ]
        fused, plain = (train(case) for case in cases)
        assert fused.losses == pytest.approx(plain.losses, rel=1e-5)
        for key, wanted in plain.gradients.items():
            error = (fused.gradients[key] - wanted).norm() / wanted.norm()
            assert error < 1e-3, f"gradient of {key}: off by {error:.1e}"


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    interpreter.passes("tests/gpu/test_m2rnn.py", f"{__file__}::test_fused_layer_is_the_naive_one")
