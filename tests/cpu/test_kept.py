"""What Megatron's own functions keep for their backward pass, beside what the budget says of them."""

import pytest
import torch
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
from nam_megatron.words.sizes import Sizes

GDN = "model.blocks.gdn."


@pytest.mark.parametrize(("heads", "key", "value"), [(2, 16, 16), (4, 64, 32), (6, 32, 128)])
def test_a_delta_rule_in_plain_torch(heads, key, value):
    """In deterministic mode; a chunk's rows are most of it, and the kernels keep none of them."""
    words = [
        f"{GDN}key_heads={heads}",
        f"{GDN}value_heads={heads}",
        f"{GDN}key_head_dim={key}",
        f"{GDN}value_head_dim={value}",
    ]
    words += [
        "model.seq_length=1024",
        "schedule.micro_batch_size=2",
        "precision.deterministic=true",
        "parallel.tensor=1",
    ]
    plan = translate(load("qwen3_next_80b_a3b", (*words, "parallel.sequence=false"))).plan
    lines = plan.recipe.blocks.gdn.activations(Sizes.of(plan.site), None)
    (said,) = (line.bytes for line in lines if line.name == "delta rule in plain torch")

    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive: list[torch.UntypedStorage] = []
    q, k, v = (torch.randn(2, 1024, heads, n).bfloat16().requires_grad_() for n in (key, key, value))
    decay, beta = (-torch.rand(2, 1024, heads)).requires_grad_(), torch.rand(2, 1024, heads).bfloat16().requires_grad_()
    inputs = {t.untyped_storage().data_ptr() for t in (q, k, v, decay, beta)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
    assert said == pytest.approx(sum(size for at, size in kept.items() if at not in inputs), rel=0.005)
