"""Experts on a GPU: our dispatcher gives to the bit what Megatron's give; the fused activation is as exact as the plain one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from nam_megatron.blocks.moe import experts
from nam_megatron.blocks.moe.quack_gemm import QuackGemm
from nam_megatron.blocks.moe.torch_gemm import TorchGemm
from nam_megatron.runtime import stack

pytestmark = pytest.mark.gpu

DEVICE, POSITIONS, SAMPLES = "cuda", 512, 2
SIZES = dict(hidden_size=512, num_attention_heads=8, ffn_hidden_size=64, num_moe_experts=16, moe_router_topk=4)
SIZES |= dict(moe_ffn_hidden_size=256, moe_shared_expert_intermediate_size=128)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def served(gemm: type[experts.Gemm]) -> None:
    """A host need not have QuACK."""
    for problem in gemm.unserved():
        pytest.skip(problem.message)


def layer_of(
    dispatcher: str,
    groups: ProcessGroupCollection,
    backend,
    expert_gemm: str = "transformer_engine",
    forked: bool = False,
    **more,
) -> torch.nn.Module:
    """NAM56R's MoE layer without its norm, smaller. forked: with `fused_router_gradient`."""
    if expert_gemm == "quack":
        served(QuackGemm)
    fields = dict(num_layers=1, activation_func=squared_relu, normalization="RMSNorm", add_bias_linear=False)
    fields |= dict(hidden_dropout=0.0, bias_dropout_fusion=False, gradient_accumulation_fusion=False)
    fields |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")
    fields |= dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_grouped_gemm=True)
    fields |= dict(moe_token_dispatcher_type="allgather" if dispatcher == "local" else dispatcher)
    keys = {"moe": {"fused_router_gradient": forked}}
    block = harness.recipe_of(True, True, dispatcher, expert_gemm=expert_gemm, keys=keys).blocks.moe
    build = stack.torch_side("moe").spec(backend, block, None).submodules.mlp
    layer = build(config=TransformerConfig(**fields | SIZES | more), pg_collection=groups, layer_number=1)
    return layer.to(DEVICE).train()


def whole(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer's output and what stands beside it, as Megatron adds a bias."""
    out, beside = layer(x)
    return out if beside is None else out + beside


def step(layer: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and the gradients of the input and of every parameter."""
    generator, shape = torch.Generator().manual_seed(7), (POSITIONS, SAMPLES, SIZES["hidden_size"])
    here = dict(device=DEVICE, dtype=layer.config.params_dtype)
    x, back = (torch.randn(shape, generator=generator).to(**here) for _ in range(2))
    out = whole(layer, x.requires_grad_())
    out.backward(back)
    return out.detach(), {"input": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("fused", [False, True], ids=["indices", "Transformer Engine's permutation and router"])
@pytest.mark.parametrize("theirs", ["allgather", "alltoall"])
@pytest.mark.parametrize("router", ["fp32", None], ids=str)
@pytest.mark.parametrize("expert_gemm", ["transformer_engine", "torch", "quack"])
def test_the_local_dispatcher_is_megatrons(expert_gemm, router, theirs, fused, groups):
    half = dict(bf16=True, params_dtype=torch.bfloat16, moe_permute_fusion=fused, moe_router_fusion=fused)
    half |= dict(moe_router_dtype=router)
    backend = stack.transformer_engine_backend()
    made = [layer_of("local", groups, backend, expert_gemm, **half), layer_of(theirs, groups, backend, **half)]
    made[1].load_state_dict(made[0].state_dict())
    (found, gradients), (wanted, expected) = map(step, made)
    # Without Transformer Engine's permutation a token's experts are added by atomics, in whatever order; torch's come in another order.
    assert found.norm() > 0 and (torch.equal(found, wanted) or not fused or expert_gemm != "transformer_engine")
    expected["output"], gradients["output"] = wanted, found
    far = {name: (gradients[name] - g).norm() / g.norm() for name, g in expected.items()}
    assert not {name: error for name, error in far.items() if not error < 1e-2}  # bf16, summed in another order


@pytest.mark.parametrize("expert_gemm", ["transformer_engine", "torch", "quack"])
def test_the_forked_layer_trains_what_the_plain_one_does(expert_gemm, groups):
    """The same forward to the bit; gradients but for TF32 in Transformer Engine's GEMM of the router's."""
    half = dict(bf16=True, params_dtype=torch.bfloat16, moe_permute_fusion=True, moe_router_fusion=True)
    backend = stack.transformer_engine_backend()
    made = [layer_of("local", groups, backend, expert_gemm, forked, **half) for forked in (True, False)]
    made[1].load_state_dict(made[0].state_dict())
    (found, gradients), (wanted, expected) = map(step, made)
    assert found.norm() > 0 and torch.equal(found, wanted) and gradients.keys() == expected.keys()
    far = {name: (gradients[name] - g).norm() / g.norm() for name, g in expected.items()}
    assert not {
        name: error
        for name, error in far.items()
        if not error < (5e-3 if "router" in name or name == "input" else 1e-6)
    }


def test_the_fused_activation_is_as_exact_as_the_plain_one():
    """Against fp64. It rounds to bf16 once, after the weighing, where the plain one rounds before and after."""
    torch.manual_seed(0)
    x, back = (torch.randn(4096, 896, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    weights = torch.rand(4096, 1, device=DEVICE)

    def plain(x, weights):
        return (squared_relu(x) * weights).to(x.dtype)

    def run(function, dtype):
        inputs = [x.to(dtype).requires_grad_(), weights.to(torch.float64 if dtype == torch.float64 else weights.dtype)]
        inputs[1].requires_grad_()
        out = function(*inputs)
        out.backward(back.to(dtype))
        return [t.double() for t in (out, *(i.grad for i in inputs))]

    exact = run(lambda x, w: x.relu() ** 2 * w, torch.float64)
    ours, theirs = run(weighted_squared_relu_impl, x.dtype), run(plain, x.dtype)
    for wanted, fused, unfused in zip(exact, ours, theirs, strict=True):
        assert (fused - wanted).norm() <= 1.05 * (unfused - wanted).norm() + 1e-6 * wanted.norm()
        assert (fused - wanted).norm() < 5e-3 * wanted.norm()


@pytest.mark.parametrize("gemm", [TorchGemm, QuackGemm])
@pytest.mark.parametrize("buffers", ["none", "in order", "apart", "off 16 bytes"])
@pytest.mark.parametrize(
    "counts", [(300, 0, 211, 513), (0, 0, 1024, 0), (0, 1, 0, 1023), (256, 256, 256, 256), (100, 0, 33, 254)], ids=str
)
@pytest.mark.parametrize("sizes", [(896, 512), (512, 896)], ids=str)
def test_grouped_gemms_are_as_exact_as_gemms_of_each_expert(sizes, counts, buffers, gemm):
    """Against fp64, of uneven counts and experts without rows, whose weights get zeros, in memory that was full of NaN. Rows that are no
    expert's are NaN, too, and nobody reads them."""
    served(gemm)
    torch.manual_seed(0)
    (n, k), here = sizes, dict(device=DEVICE, dtype=torch.bfloat16)
    buffer, rows, back = (torch.randn(*size, **here) for size in ((4, n, k), (1024, k), (1024, n)))
    weights = [torch.nn.Parameter(w) for w in buffer.unbind()]
    module = SimpleNamespace(num_gemms=4, **{f"weight{i}": w for i, w in enumerate(reversed(weights))})
    known = sum(counts)
    rows[known:] = back[known:] = float("nan")
    rows.requires_grad_()
    totals = torch.randn(5 if buffers == "apart" else 4, n, k, device=DEVICE)
    if buffers == "apart":
        totals = [totals[i] for i in (0, 2, 3, 4)]
    if buffers == "off 16 bytes":
        totals = torch.randn(4 * n * k + 1, device=DEVICE)[1:].view(4, n, k)
    before = [total.double() for total in totals]
    for weight, total in zip(weights, totals, strict=True):
        weight.main_grad = total
    poison = torch.full((2**26,), float("nan"), device=DEVICE)
    del poison
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    out, _ = experts._project(module, rows, bounds, gemm, buffers != "none")
    out.backward(back)
    added = [total - start for total, start in zip(totals, before, strict=True)]
    found = [out[:known], rows.grad[:known], *([w.grad for w in weights] if buffers == "none" else added)]

    def by_expert(dtype):
        x, own = (t.detach().to(dtype).requires_grad_() for t in (rows[:known], buffer))
        y = torch.cat([part @ w.T for part, w in zip(x.split(counts), own, strict=True)])
        return [y, *torch.autograd.grad(y, (x, own), back[:known].to(dtype))]

    (y, dx, dw), (*exact, of_weights) = by_expert(torch.bfloat16), by_expert(torch.float64)
    for ours, theirs, wanted in zip(found, [y, dx, *dw], [*exact, *of_weights], strict=True):
        near = 1.05 * (theirs - wanted).norm() + 1e-6 * wanted.norm()
        assert (ours - wanted).norm() <= near


@pytest.mark.parametrize("gemm", ["torch", "quack"])
def test_no_count_goes_to_the_host(gemm, groups):
    """torch tells of every wait of the host for the GPU that it knows of."""
    half = dict(bf16=True, params_dtype=torch.bfloat16, moe_permute_fusion=True, moe_router_fusion=True)
    layer = layer_of("local", groups, stack.transformer_engine_backend(), gemm, **half)
    step(layer)
    x = torch.randn(POSITIONS, SAMPLES, SIZES["hidden_size"], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = whole(layer, x)
        out.backward(out.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
