"""Parts of an FP8 model that stay in bf16, inside the real Transformer Engine: in FP8's context they give what they give without it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import test_moe
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from test_moe import groups  # noqa: F401, a fixture

from nam_megatron.blocks.mamba2.layer import spec
from nam_megatron.runtime import bf16_parts, fp8_inputs, split_projection, stack

pytestmark = pytest.mark.gpu
WIDTH, TOKENS, SAMPLES = 512, 256, 2
HALF = dict(bf16=True, params_dtype=torch.bfloat16)


def trained(
    run: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, scaling: str | None = None
) -> dict[str, torch.Tensor]:
    """Of two microbatches: outputs, inputs' gradients, and at the end every parameter's. scaling: of FP8; None is bf16."""
    import transformer_engine.pytorch as te  # this file is collected where there is none
    from transformer_engine.common import recipe

    recipes = {
        "tensorwise": recipe.Float8CurrentScaling,
        "delayed": recipe.DelayedScaling,
        "blockwise": recipe.Float8BlockScaling,
    }
    generator, seen = torch.Generator().manual_seed(7), {}
    module.zero_grad()
    for index in range(2):
        x, back = (
            torch.randn(TOKENS, SAMPLES, WIDTH, generator=generator).to("cuda", torch.bfloat16) for _ in range(2)
        )
        with te.autocast(enabled=scaling is not None, recipe=recipes[scaling]() if scaling else None):
            out = run(x.requires_grad_())
        out.backward(back)
        seen |= {f"output {index}": out.detach(), f"input {index}": x.grad}
    return seen | {name: p.grad.clone() for name, p in module.named_parameters()}


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {name: ((found[name] - w).float().norm() / w.float().norm()).item() for name, w in wanted.items()}


@pytest.mark.parametrize("kept", [("experts",), ("experts", "shared_experts")], ids=str)
@pytest.mark.parametrize("gemm", ["transformer_engine", "torch", "quack"])
def test_experts(gemm, kept, groups):  # noqa: F811
    fp8 = dict(fp8="hybrid", fp8_recipe="tensorwise", moe_permute_fusion=True, moe_router_fusion=True)
    layer = test_moe.layer_of(
        "local", groups, stack.transformer_engine_backend(), gemm, hidden_size=WIDTH, **HALF | fp8
    )
    bf16_parts.provider(kept)([layer])

    def run(x):
        return test_moe.whole(layer, x)

    plain, mixed = trained(run, layer), trained(run, layer, "tensorwise")
    errors = far(mixed, plain)
    if "shared_experts" in kept:
        assert not {name: e for name, e in errors.items() if e}
    else:
        shared = {name for name, e in errors.items() if "shared" in name and e > 1e-3}
        assert shared and not {name: e for name, e in errors.items() if not e < 0.1}
        assert not {name: e for name, e in errors.items() if ".experts." in name and "shared" not in name and e}


def test_inputs_that_are_kept_in_fp8_are_what_they_would_be_quantised_to_again(groups):  # noqa: F811
    fp8 = dict(fp8="hybrid", fp8_recipe="tensorwise", moe_permute_fusion=True, moe_router_fusion=True)
    backend = stack.transformer_engine_backend()
    layer = test_moe.layer_of("local", groups, backend, "torch", hidden_size=WIDTH, **HALF | fp8)
    bf16_parts.provider(("experts",))([layer])
    fc1 = layer.shared_experts.linear_fc1
    assert fc1.save_original_input, "Megatron has it quantised twice"

    def run(x):
        return test_moe.whole(layer, x)

    again = trained(run, layer, "tensorwise")
    fp8_inputs.provide([layer])
    assert not fc1.save_original_input
    kept = trained(run, layer, "tensorwise")
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], wanted) for name, wanted in again.items())


@pytest.mark.parametrize("kept", [(), ("m2rnn",)], ids=str)
def test_m2rnn(kept, groups):  # noqa: F811
    fields = dict(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=8, normalization="RMSNorm", add_bias_linear=False
    )
    recipe = harness.recipe_of(keys={"m2rnn": {"kernels": "fused", "heads": 48}})
    backend, block = stack.transformer_engine_backend(), recipe.blocks.m2rnn
    made = stack.torch_side("m2rnn").spec(backend, block, harness.site_of(recipe))
    config = TransformerConfig(**fields, **HALF, is_hybrid_model=True, gradient_accumulation_fusion=False)
    mixer = build_module(made, config=config, d_model=WIDTH, layer_number=1, pg_collection=groups).cuda().train()
    bf16_parts.provider(kept)([mixer])

    def run(x):
        return mixer(x)[0]

    errors = far(trained(run, mixer, "tensorwise"), trained(run, mixer))
    assert all(e == 0 for e in errors.values()) if kept else errors["in_proj.weight"] > 1e-3


@pytest.mark.parametrize("accumulate", [False, True], ids=["autograd's", "added"])
@pytest.mark.parametrize("scaling", ["tensorwise", "delayed"])
def test_the_last_rows_of_a_projection(scaling, accumulate, groups):  # noqa: F811
    """In FP8's context they give what they give in bf16, to the last bit, and get the gradient that they get there."""
    rows, others = 1024, 104
    fields = dict(num_layers=1, hidden_size=WIDTH, num_attention_heads=8, normalization="RMSNorm")
    config = TransformerConfig(**fields, **HALF, add_bias_linear=False, gradient_accumulation_fusion=accumulate)
    made = stack.transformer_engine_backend().column_parallel_layer_norm_linear()
    projection = made(
        WIDTH, rows + others, config=config, init_method=config.init_method, gather_output=False, bias=False, skip_bias_add=False,
        is_expert=False, tp_group=groups.tp,
    ).cuda()  # fmt: skip
    split_projection.prepare(projection)
    lasts, firsts = [], []

    def run(x):
        first, last = split_projection.split(projection, x, rows)
        firsts.append(first.detach())
        lasts.append(last.detach())
        return torch.cat([first[..., : WIDTH - others], last], -1)  # as wide as the gradient that `trained` has

    results = []
    for how in (None, scaling):
        projection.weight.main_grad = torch.zeros_like(projection.weight, dtype=torch.float32)
        projection.weight.grad_added_to_main_grad = False
        seen = trained(run, projection, how)
        if accumulate:
            assert projection.weight.grad_added_to_main_grad
            seen["weight"] = projection.weight.main_grad.clone()
        results.append(seen)
    errors = far(*(results[::-1]))
    assert all(torch.equal(one, other) for one, other in zip(lasts[:2], lasts[2:], strict=True))
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(firsts[:2], firsts[2:], strict=True))
    plain, mixed = (seen["weight"][rows:] for seen in results)
    assert torch.equal(plain, mixed) and plain.any()
    assert results[0]["weight"][: WIDTH - others].any() and not {
        name: e for name, e in errors.items() if not e < (0.9 if scaling == "delayed" else 0.15)
    }


@pytest.mark.parametrize("scaling", [None, "tensorwise", "delayed", "blockwise"])
def test_a_padded_projection_of_mamba2(scaling, groups):  # noqa: F811
    """1,160 columns, which 16 does not divide; FP8 is as far from bf16 as FP8 is.

    Gradients of a number a head are sums over all tokens that may cancel, and what FP8 makes of them is then as large as they are (0.54
    of A_log's in one of 14 draws in plain torch, its products quantised). bf16 holds those.
    """
    fields = dict(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=8, normalization="RMSNorm", add_bias_linear=False
    )
    fields |= dict(mamba_num_heads=8, mamba_head_dim=64, mamba_state_dim=16, mamba_num_groups=4)
    config = TransformerConfig(**fields, **HALF, is_hybrid_model=True, gradient_accumulation_fusion=False)
    mixers = []
    for padded in (True, False):
        own = SimpleNamespace(strided=True, strided_norm=True, padded_projection=padded, columns=lambda site: 16)
        made = spec(stack.transformer_engine_backend(), own, None)
        mixers.append(
            build_module(made, config=config, d_model=WIDTH, layer_number=1, pg_collection=groups).cuda().train()
        )
    mixers[1].load_state_dict(mixers[0].state_dict())
    assert len(mixers[0].in_proj.weight) % 16
    widths = []
    mixers[0].in_proj.register_forward_hook(lambda *said: widths.append(said[-1][0].size(-1)))
    found = trained(lambda x: mixers[0](x)[0], mixers[0], scaling)
    errors = far(found, trained(lambda x: mixers[1](x)[0], mixers[1]))
    assert widths == 2 * [len(mixers[0].in_proj.weight) + 8]
    if scaling:
        errors = {name: e for name, e in errors.items() if found[name].numel() > fields["mamba_num_heads"]}
    assert not {name: e for name, e in errors.items() if not e < (0.15 if scaling else 2e-2)}
    assert all(g.isfinite().all() for g in found.values()) and (scaling is None or errors["output 0"] > 1e-3)
