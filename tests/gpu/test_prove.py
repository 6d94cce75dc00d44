"""The prove command on a GPU: fused kernels, graphs, recompute and a deterministic run against one rank's naive kernels, in bf16."""

import pytest

from nam_megatron.prove import proof
from nam_megatron.prove.__main__ import text
from nam_megatron.recipe import load

pytestmark = pytest.mark.gpu

ONE = ("cluster=h200_1", "model.seq_length=1024")
GRAPHS = (
    "feature.cuda_graphs.impl=transformer_engine",
    "feature.cuda_graphs.modules=[attn,mamba]",
    "feature.cuda_graphs.warmup_steps=1",
)
CASES = {
    "native_fused": ("nam56r_native_dp_fused", *ONE),
    "author_fused": ("nam56r_fused", *ONE),
    "author_stock_mla": ("nam56r", "execution.mla.kernels=megatron", *ONE),
    "author_recomputed": (
        "nam56r_fused", "feature.recompute.granularity=selective", "feature.recompute.modules=[layernorm,mla_up_proj,moe_act]", *ONE,
    ),
    "native_graphs": ("nam56r_native_dp", *GRAPHS, *ONE),
    "native_deterministic": ("nam56r_native_dp", "precision.deterministic=true", *ONE),
    "author_deterministic": ("nam56r_fused", "precision.deterministic=true", *ONE),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES.values(), ids=CASES.keys())
def test_one_gpu_computes_what_naive_kernels_compute(words):
    preset, *overrides = words
    found = proof.prove(load(preset, overrides), device="cuda", steps=2)
    assert found.word == proof.PROVEN, text(found, every=True)
