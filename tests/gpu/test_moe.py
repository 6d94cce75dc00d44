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


def layer_of(dispatcher: str, groups: ProcessGroupCollection, backend, **more) -> torch.nn.Module:
    """NAM56R's MoE layer without its norm, smaller."""
    fields = dict(num_layers=1, activation_func=squared_relu, normalization="RMSNorm", add_bias_linear=False)
    fields |= dict(hidden_dropout=0.0, bias_dropout_fusion=False, gradient_accumulation_fusion=False)
    fields |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")
    fields |= dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_grouped_gemm=True)
    fields |= dict(moe_token_dispatcher_type="allgather" if dispatcher == "local" else dispatcher)
    plan = SimpleNamespace(recipe=harness.recipe_of(True, True, dispatcher))
    build = plan.recipe.model.blocks.moe.build(backend, plan).submodules.mlp
    layer = build(config=TransformerConfig(**fields | SIZES | more), pg_collection=groups, layer_number=1)
    return layer.to(DEVICE).train()


def step(layer: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and the gradients of the input and of every parameter."""
    generator, shape = torch.Generator().manual_seed(7), (POSITIONS, SAMPLES, SIZES["hidden_size"])
    here = dict(device=DEVICE, dtype=layer.config.params_dtype)
    x, back = (torch.randn(shape, generator=generator).to(**here) for _ in range(2))
    out, _ = layer(x.requires_grad_())
    out.backward(back)
    return out.detach(), {"input": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("fused", [False, True], ids=["indices", "Transformer Engine's permutation and router"])
@pytest.mark.parametrize("theirs", ["allgather", "alltoall"])
@pytest.mark.parametrize("router", ["fp32", None], ids=str)
def test_the_local_dispatcher_is_megatrons(router, theirs, fused, groups):
    half = dict(bf16=True, params_dtype=torch.bfloat16, moe_permute_fusion=fused, moe_router_fusion=fused)
    half |= dict(moe_router_dtype=router)
    made = [layer_of(name, groups, stack.transformer_engine_backend(), **half) for name in ("local", theirs)]
    made[1].load_state_dict(made[0].state_dict())
    (found, gradients), (wanted, expected) = map(step, made)
    # Without Transformer Engine's permutation a token's experts are added by atomics, in whatever order.
    assert found.norm() > 0 and (torch.equal(found, wanted) or not fused)
    expected["output"], gradients["output"] = wanted, found
    far = {name: (gradients[name] - g).norm() / g.norm() for name, g in expected.items()}
    assert not {name: error for name, error in far.items() if not error < 1e-2}  # bf16, summed in another order


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
