"""M2RNN's mixer with columns of zeros behind its projection, inside the real Transformer Engine: the same numbers as without them
(Mamba-2's: test_bf16_parts.py).

Of the projection alone sums differ in their order; of the mixer in what bf16 makes of that.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch.utils.checkpoint import checkpoint

from nam_megatron.runtime import stack

pytestmark = pytest.mark.gpu

DEVICE, WIDTH, COLUMNS, TOKENS, SAMPLES = "cuda", 1024, 1580, 512, 2


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def mixers(groups: ProcessGroupCollection, accumulate: bool, overwrites: bool = False) -> list[torch.nn.Module]:
    """NAM56R's, narrower, of the same weights: padded and as it was. accumulate: with gradients' buffers as Megatron's DDP gives them."""
    fields = dict(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=8, normalization="RMSNorm", add_bias_linear=False
    )
    fields |= dict(
        params_dtype=torch.bfloat16, bf16=True, is_hybrid_model=True, gradient_accumulation_fusion=accumulate
    )
    config, made = TransformerConfig(**fields), []
    for padded in (True, False):
        recipe = harness.recipe_of(keys={"m2rnn": {"kernels": "fused", "padded_projection": padded}})
        backend, block = stack.transformer_engine_backend(), recipe.blocks.m2rnn
        spec = stack.torch_side("m2rnn").spec(backend, block, harness.site_of(recipe))
        mixer = build_module(spec, config=config, d_model=WIDTH, layer_number=1, pg_collection=groups)
        made.append(mixer.to(DEVICE).train())
    made[1].load_state_dict(made[0].state_dict())
    for mixer in made if accumulate else ():
        for parameter in mixer.parameters():
            # Transformer Engine writes a step's first gradient over what is there, where Megatron has zeros.
            parameter.main_grad = torch.full_like(parameter, 0.5 if overwrites else 0.0, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
            parameter.overwrite_main_grad = overwrites
    return made


def trained(run: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, columns: int) -> dict[str, torch.Tensor]:
    """Of two microbatches: outputs, inputs' gradients, and the gradient of the projection's weight."""
    generator, seen = torch.Generator().manual_seed(7), {}
    for index in range(2):
        x, back = (
            torch.randn(TOKENS, SAMPLES, n, generator=generator).to(DEVICE, torch.bfloat16) for n in (WIDTH, columns)
        )
        out = run(x.requires_grad_())
        out.backward(back)
        seen |= {f"output {index}": out.detach(), f"input {index}": x.grad}
    if hasattr(weight, "main_grad"):
        # Of what Megatron's hook does with a gradient nothing is left but to count it.
        assert weight.grad_added_to_main_grad and weight.grad is not None
        return seen | {"weight": weight.main_grad.clone()}
    return seen | {"weight": weight.grad}


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    assert all(
        t.any() and found[name].shape == t.shape and found[name].dtype == t.dtype for name, t in expected.items()
    )
    return {name: ((found[name] - t).float().norm() / t.float().norm()).item() for name, t in expected.items()}


@pytest.mark.parametrize(
    ("accumulate", "overwrites"),
    [(True, False), (True, True), (False, False)],
    ids=["added", "overwritten", "autograd's"],
)
def test_the_projection_multiplies_the_same(accumulate, overwrites, groups):
    results, shapes = [], []
    for mixer in mixers(groups, accumulate, overwrites):

        def run(x, mixer=mixer):
            out, _ = mixer.in_proj(x)
            shapes.append(out.size(-1))
            return out[..., :COLUMNS]

        results.append(trained(run, mixer.in_proj.weight, COLUMNS))
        assert mixer.in_proj.weight.shape == (COLUMNS, WIDTH)
    assert shapes == 2 * [COLUMNS + 4] + 2 * [COLUMNS]
    errors = far(*results)
    # Products of bf16 numbers in fp32; everything else has been rounded to bf16.
    assert errors.pop("weight") < (1e-5 if accumulate else 4e-3)
    assert not {name: error for name, error in errors.items() if not error < 4e-3}


@pytest.mark.parametrize("accumulate", [True, False], ids=["added", "autograd's"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_mixer_trains_the_same(again, accumulate, groups):
    results, others = [], []
    for mixer in mixers(groups, accumulate):

        def run(x, mixer=mixer):
            return checkpoint(lambda x: mixer(x)[0], x, use_reentrant=True) if again else mixer(x)[0]

        results.append(trained(run, mixer.in_proj.weight, WIDTH))
        rest = {name: p for name, p in mixer.named_parameters() if name != "in_proj.weight"}
        # Transformer Engine adds the gradient of out_proj's weight to its buffer, and no other.
        added = {name: p.main_grad if accumulate and name == "out_proj.weight" else p.grad for name, p in rest.items()}
        others.append(added)
    errors = far(*results) | far(*others)
    assert not {name: error for name, error in errors.items() if not error < 2e-2}


def test_evaluation_takes_no_buffer(groups):
    """Without gradients nobody asks for `main_grad`, which an exported or served model has not."""
    ours, theirs = mixers(groups, True)
    for mixer in (ours, theirs):
        del mixer.in_proj.weight.main_grad
    x = torch.randn(TOKENS, SAMPLES, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        found, expected = ours(x)[0], theirs(x)[0]
    assert far({"output": found}, {"output": expected})["output"] < 2e-2
