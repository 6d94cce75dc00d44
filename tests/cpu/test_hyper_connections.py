"""Hyper-connections against the paper (arXiv 2512.24880, equations 5 to 9), written out token by token in fp64, and in every layout."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))

import harness
import hopper
import interpreter
import megatron.core.tensor_parallel.random as rng
import pytest
import torch
from harness import Case, on_ranks, train
from presets import lowered
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nam_megatron.compile.argv import words
from nam_megatron.hf.model.modeling_nam import Streams
from nam_megatron.prove.cpu import patched
from nam_megatron.runtime.hyper_connections import HyperConnection
from nam_megatron.words.sizes import Sizes, Stage

KEYS = {"sinkhorn_steps": 20, "initial_scale": 0.01, "epsilon": 1e-6, "kernels": "naive"}
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


# The paper, one token at a time --------------------------------------------------------------------------------------


def mapped(x, weight, alpha, bias, steps):
    """x [n, h] -> read [n], write [n], residual map [n, n]."""
    n, alpha = len(x), [a.squeeze() for a in alpha]
    r = x.flatten() / (x.square().mean().sqrt() + KEYS["epsilon"])
    logit = [weight[i] @ r for i in range(n * (n + 2))]
    read = torch.stack([1 / (1 + torch.exp(-(alpha[0] * logit[i] + bias[i]))) for i in range(n)])
    write = torch.stack([2 / (1 + torch.exp(-(alpha[1] * logit[n + i] + bias[n + i]))) for i in range(n)])
    at = [2 * n + i for i in range(n * n)]
    m = torch.stack([torch.exp(alpha[2] * logit[i] + bias[i]) for i in at]).reshape(n, n)
    for _ in range(steps):
        m = torch.stack([row / row.sum() for row in m])
        m = torch.stack([column / column.sum() for column in m.T]).T
    return read, write, m


def passed(streams, layer, weight, alpha, bias, steps=KEYS["sinkhorn_steps"]):
    """[s, b, n, h] -> the streams after `layer`, which sees all tokens at once."""
    s, b, n, h = streams.shape
    flat = streams.reshape(s * b, n, h)
    read, write, mix = torch.vmap(lambda x: mapped(x, weight, alpha, bias, steps))(flat)
    taken = sum(read[:, j, None] * flat[:, j] for j in range(n))
    output = layer(taken.reshape(s, b, h)).reshape(s * b, h)
    kept = [sum(mix[:, i, j, None] * flat[:, j] for j in range(n)) for i in range(n)]
    return torch.stack([kept[i] + write[:, i, None] * output for i in range(n)], 1).reshape(s, b, n, h)


def made(streams: int, hidden: int, dtype=torch.float64, **keys) -> HyperConnection:
    """The maps of one layer with weights that no initialisation makes."""
    config = SimpleNamespace(hidden_size=hidden, perform_initialization=True, sequence_parallel=False)
    with patched():
        module = HyperConnection(config, streams=streams, **{**KEYS, **keys}).to(dtype)
    generator = torch.Generator().manual_seed(streams)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + ("alpha" in name))
    return module


@pytest.mark.parametrize("streams", range(1, 9))
def test_a_layer_between_streams_is_the_papers(streams):
    hidden, steps = 5 + streams, streams
    module = made(streams, hidden, sinkhorn_steps=steps)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(3, 2, streams, hidden, generator=generator, dtype=torch.float64)
    wanted = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    of_export = Streams(hidden, streams, steps, KEYS["epsilon"]).double()
    of_export.load_state_dict({name.replace("_proj.weight", ""): p for name, p in module.named_parameters()})
    found = {}
    for which in ("ours", "paper"):
        given = {"streams": x.clone().requires_grad_(), "w": torch.ones(hidden, dtype=torch.float64).requires_grad_()}
        layer = lambda taken: (taken * given["w"]).cumsum(0).tanh()  # noqa: B023, E731  tokens look back, as a mixer's do
        if which == "ours":
            taken, write, mix, on = module.read(given["streams"].flatten(2))
            after = module.write(on, layer(taken), write, mix).unflatten(-1, (streams, -1))
            torch.testing.assert_close(mix.sum(-2), torch.ones_like(mix.sum(-2)))
        else:
            alpha = [getattr(module, name) for name in ALPHAS]
            after = passed(given["streams"], layer, module.mapping_proj.weight, alpha, module.bias, steps)
        tensors = given | dict(module.named_parameters())
        gradients = torch.autograd.grad((after * wanted).sum(), list(tensors.values()))
        found[which] = {"after": after.detach(), **dict(zip(tensors, gradients, strict=True))}
    taken, write, mix = of_export(x.flatten(2))
    exported = of_export.write(x.flatten(2), layer(taken), write, mix).unflatten(-1, (streams, -1))
    torch.testing.assert_close(exported.detach(), found["paper"]["after"], rtol=1e-9, atol=1e-12)
    assert found["ours"].keys() == {"after", "streams", "w", "mapping_proj.weight", *ALPHAS, "bias"}
    for name, tensor in found["paper"].items():
        torch.testing.assert_close(
            found["ours"][name], tensor, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_stream_is_the_plain_residual_to_the_last_bit():
    """By construction: nothing is built for it."""
    plain, one = lowered("nam56r_native_dp"), lowered("nam56r_native_dp", "feature.mhc.streams=1")
    assert words(one) == words(plain) and one.plan.recipe.feature.mhc is None and one.plan.layers == plain.plan.layers


# Megatron's model ----------------------------------------------------------------------------------------------------

PATTERN = "*EM-/*-"  # MTP's own layers keep one residual
FOUR = {"mhc": {"streams": 4, "kernels": "naive"}}


def reference(rig):
    """(loss and gradients of the model, those of the same layers between streams as the paper has them)."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    model, n = rig.model, 4
    harness.step(rig)
    ours = {name: p.main_grad.clone() for name, p in model.named_parameters()}

    def plainly(layer):
        def forward(hidden_states, **kwargs):
            maps = layer.hyper_connection
            made = [hidden_states] * n if layer.makes else hidden_states.unflatten(-1, (n, -1)).unbind(2)
            rest = []

            def mixer(taken):
                (name,) = (x for x in ("self_attn_bda", "mlp_bda", "mamba_bda") if callable(layer.__dict__.get(x)))
                setattr(layer, name, get_bias_dropout_add)
                found = type(layer).__mro__[2].forward(layer, taken, **kwargs)
                rest.extend(found[1:] if isinstance(found, tuple) else [])
                return (found[0] if isinstance(found, tuple) else found) - taken

            alpha = [getattr(maps, name) for name in ALPHAS]
            after = passed(torch.stack(made, 2), mixer, maps.mapping_proj.weight, alpha, maps.bias)
            after = sum(after.unbind(2)) / n if layer.folds else after.flatten(2)
            return (after, *rest) if rest else after

        return forward

    for layer in model.decoder.layers:
        layer.forward = plainly(layer)
    harness.step(rig)
    return ours, {name: p.main_grad.clone() for name, p in model.named_parameters()}


def test_the_model_is_its_layers_between_streams():
    ((ours, paper),) = on_ranks(Case(PATTERN, features=FOUR, microbatches=1), reference)
    assert sum("hyper_connection" in name for name in ours) == 5 * 4 and not any(
        "mtp" in n and "hyper" in n for n in ours
    )
    # Streams that are equal yet, as in the first layer, mix to themselves: what decides how has no gradient but rounding.
    least = 1e-2 * max(g.norm() for name, g in paper.items() if "alpha" in name)
    far = {name: ((ours[name] - g).norm() / max(g.norm(), least)).item() for name, g in paper.items()}
    assert not {name: error for name, error in far.items() if not error < 1e-3}


DENSE = "*M-/*-"  # Megatron trains no experts under tensor parallelism without sequence parallelism
LAYOUTS = [
    (PATTERN, {"tp": 2}),
    (DENSE, {"tp": 2, "config": {"sequence_parallel": False}}),
    (PATTERN, {"dp": 2, "ep": 2}),
    (PATTERN.replace("M", "|M"), {"pp": 2, "tp": 2}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("pattern", "layout"), LAYOUTS, ids=str)
def test_every_layout_is_the_same_model(pattern, layout):
    """Each rank has the gradients of its own tokens, or without sequence parallelism of all; all streams cross a pipeline's cut."""
    one, other = train(Case(pattern.replace("|", ""), features=FOUR)), train(Case(pattern, features=FOUR, **layout))
    assert other.losses == pytest.approx(one.losses, rel=1e-6) and other.gradients.keys() == one.gradients.keys()
    least = 1e-2 * max(g.norm() for name, g in one.gradients.items() if "alpha" in name)
    far = {n: ((other.gradients[n] - g).norm() / max(g.norm(), least)).item() for n, g in one.gradients.items()}
    # A factor is one number: what all tokens would have it do, which nearly cancels where streams are equal yet.
    loose = {name for name, g in one.gradients.items() if g.numel() == 1}
    assert not {name: error for name, error in far.items() if not error < (5e-4 if name in loose else 1e-4)}


def test_maps_stay_fp32_in_a_bf16_model():
    def job(rig):
        from megatron.core.transformer.module import Float16Module

        from nam_megatron.mends import install

        install.single("marked_fp32")
        rig.config.bf16 = True
        Float16Module(rig.config, rig.model)
        return {name for name, p in rig.model.named_parameters() if p.dtype == torch.float32}

    (kept,) = on_ranks(Case("-", features=FOUR), job)
    at = "decoder.layers.0.hyper_connection."
    assert kept == {at + name for name in (*ALPHAS, "bias", "mapping_proj.weight")}


@pytest.mark.slow
def test_ranks_that_share_a_sequence_have_the_same_streams():
    one, two = (train(Case("*E-", features=FOUR, cp=cp)) for cp in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    least = 1e-2 * max(g.norm() for name, g in one.gradients.items() if "alpha" in name)
    far = {n: ((two.gradients[n] - g).norm() / max(g.norm(), least)).item() for n, g in one.gradients.items()}
    assert sum("hyper_connection" in name for name in far) == 3 * 5
    assert not {name: error for name, error in far.items() if not error < 1e-4}


def test_recompute_of_what_lies_between_streams_changes_nothing():
    def no_cuda_state(rig):
        rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    again = {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}
    kept, computed = (train(Case("*E", features=FOUR, config=c), no_cuda_state) for c in ({}, again))
    assert computed.losses == kept.losses
    torch.testing.assert_close(computed.gradients, kept.gradients, rtol=0, atol=0)


# What is kept --------------------------------------------------------------------------------------------------------


class Living(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still held, but for those that are known."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return found

    def bytes(self, known):
        return sum(size for at, (ref, size) in self.made.items() if at not in known and not ref.expired())


@pytest.mark.parametrize("streams", [2, 4, 7])
def test_a_layer_keeps_what_the_budget_says(streams):
    """In bf16; of two layers, so that what the second one gets is the streams that the first one has made."""
    plan = lowered("nam56r_native_dp", f"feature.mhc.streams={streams}", "feature.mhc.kernels=naive").plan
    mhc, (layer, *_) = plan.recipe.feature.mhc, plan.layers
    z = Sizes.of(plan.site).own(Ts=6, h=16)
    said = {line.name: line.bytes for line in mhc.activations(z, Stage(0, 1, ((layer, layer),)))}
    modules = [made(streams, 16, torch.float32) for _ in range(2)]
    embedded = torch.randn(3, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    with Living() as living:
        x = modules[0].made(embedded)
        inputs = []
        for module in modules:
            taken, write, mix, x = module.read(x)
            inputs.append(taken)  # the norm's input is the layer's own
            x = module.write(x, taken * 1.0, write, mix)
        x = modules[1].folded(x)
        del taken, write, mix
    held = {t.untyped_storage().data_ptr() for t in (*inputs, x, *(p for m in modules for p in m.parameters()))}
    assert living.bytes(held) == sum(said.values()), said
    x.float().sum().backward()
    assert embedded.grad.isfinite().all()


@pytest.mark.parametrize("streams", [2, 4])
def test_kernels_compile_for_hopper(monkeypatch, tmp_path, streams):
    """What streams over memory keeps everything in registers, and so does what multiplies."""
    compiled = hopper.compiles(monkeypatch)
    with patched():
        maps = HyperConnection(
            SimpleNamespace(hidden_size=256, perform_initialization=False, sequence_parallel=False),
            streams=streams, **KEYS | {"kernels": "fused"},
        )  # fmt: skip
    x, output = (torch.zeros(64, 1, width, dtype=torch.bfloat16, requires_grad=True) for width in (streams * 256, 256))
    taken, write, mix, on = maps.read(x)
    torch.autograd.backward([taken, maps.write(on, output, write, mix)], [taken, x])
    assert len(compiled) == 9
    assert {name: hopper.stack(kernel, tmp_path) for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)
    assert all(kernel.metadata.shared <= 227 * 1024 for kernel in compiled.values()), "more than an SM's shared memory"


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    interpreter.passes("tests/gpu/test_mhc.py")
