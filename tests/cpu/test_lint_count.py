"""Lint's count of parameters against Megatron's own modules, for every kind of layer and what changes its size.

GPT models are not among them: their layers are the hybrid's attention and MLP under one roof.
"""

from math import prod

import modules
import pytest
from harness import Case, shapes
from megatron.core.transformer import attention
from torch.nn.functional import silu

from nam_megatron.lint import lint

SIZES = """--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --normalization RMSNorm --squared-relu --disable-bias-linear
    --untie-embeddings-and-output-weights --padded-vocab-size 128 --position-embedding-type rope"""
GQA = "--group-query-attention --num-query-groups 2 --kv-channels 16"
MLA = "--q-lora-rank 16 --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
DSA = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8"
REUSE = "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
SHARED = "--moe-shared-expert-intermediate-size 48"
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 16 --mamba-num-groups 2"
GATED = dict(gated_linear_unit=True, activation_func=silu)

CASES = {
    "attention": ("*", GQA, {}),
    "attention, norms": ("*", f"{GQA} --qk-layernorm", dict(qk_layernorm=True)),
    "attention, all heads": ("*", "--kv-channels 16", dict(num_query_groups=4)),
    "attention, output gate": ("*", f"{GQA} --attention-output-gate", dict(attention_output_gate=True)),
    "mla": ("+", f"{MLA} --qk-layernorm", {}),
    "mla without norms": ("+", MLA, dict(qk_layernorm=False)),
    "dsa": ("++DDDD", f"{MLA} {DSA} --qk-layernorm", dict(dsa_indexer_topk_freq=1, dsa_indexer_skip_topk_offset=0)),
    "dsa, index reuse": ("++DDDD", f"{MLA} {DSA} {REUSE} --qk-layernorm", {}),
    "dsa in token prediction": ("++DD/D", f"{MLA} {DSA} {REUSE} --qk-layernorm", {}),
    "dsa alone in token prediction": ("DDDD/DD", f"{MLA} {DSA} {REUSE} --qk-layernorm", {}),
    "mlp": ("-", "", {}),
    "mlp, gated": ("-", "--swiglu", GATED),
    "moe": ("E", f"{MOE} {SHARED}", {}),
    "moe without a shared expert": ("E", MOE, dict(moe_shared_expert_intermediate_size=None)),
    "moe, gated": ("E", f"{MOE} {SHARED} --swiglu", GATED),
    "moe, gated shared expert": ("E", f"{MOE} {SHARED} --moe-shared-expert-gate", dict(moe_shared_expert_gate=True)),
    "moe of a latent": ("E", f"{MOE} {SHARED} --moe-latent-size 24", dict(moe_latent_size=24)),
    "mamba": ("M", MAMBA, {}),
    "mamba, heads by width": ("M", MAMBA.replace("--mamba-num-heads 8", ""), dict(mamba_num_heads=None)),
    "layer norm": ("*-EM", f"{GQA} {MOE} {SHARED} {MAMBA} --normalization LayerNorm", dict(normalization="LayerNorm")),
    "mtp": ("*-/*-/*-", GQA, {}),
    "mtp, one layer for all depths": ("*-/*-/*-", f"{GQA} --mtp-use-repeated-layer", dict(mtp_use_repeated_layer=True)),
    "all": ("*EM-*EMM", f"{GQA} {MOE} {SHARED} {MAMBA}", {}),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_count_is_that_of_megatrons_modules(name, monkeypatch):
    monkeypatch.setattr(attention, "TENorm", modules.Norm)  # what Megatron puts on queries and keys by itself
    pattern, flags, config = CASES[name]
    size = SIZES.replace("--squared-relu", "") if "--swiglu" in flags else SIZES
    counted = lint(
        f"torchrun pretrain_hybrid.py --hybrid-layer-pattern '{pattern}' {' '.join(size.split())} {flags}"
    ).model.count
    built = shapes(Case(pattern, vocab=128, config=config, latent_norm=config.get("qk_layernorm", True)))
    assert counted.total == sum(map(prod, built.values()))


def test_a_gpt_is_the_hybrid_of_its_halves():
    """Its last layer, here the only one with experts, is that of token prediction, too."""
    scripts = (
        "gpt.py --num-layers 2 --moe-layer-freq [0,1] --mtp-num-layers 1",
        "hybrid.py --hybrid-layer-pattern *-*E/*E",
    )
    gpt, hybrid = (
        lint(f"torchrun pretrain_{script} {' '.join(SIZES.split())} {GQA} {MOE}").model.count for script in scripts
    )
    assert (gpt.total, gpt.active) == (hybrid.total, hybrid.active)


def test_active_leaves_out_the_experts_not_chosen():
    count = lint(
        f"torchrun pretrain_hybrid.py --hybrid-layer-pattern EE {' '.join(SIZES.split())} {MOE} {SHARED}"
    ).model.count
    assert count.total - count.active == 2 * 2 * (2 * 64 * 32)
