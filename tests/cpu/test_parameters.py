"""The budget against Megatron itself: parameters of its real modules at full width, and its own count of operations."""

from argparse import Namespace
from math import prod

import harness
import modules
import pytest
from harness import Case, on_ranks, shapes
from megatron.core.transformer import attention

from nam_megatron.budget import parameters
from nam_megatron.budget.cost import cost
from nam_megatron.budget.static import groups, parts, stages
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
from nam_megatron.targets import current
from nam_megatron.words.sizes import Sizes, Stage

NATIVE, LATENT = ("nam56r_native_dp",), ("nam56r", "lane=native_dp")
PLANS = {
    "native lane": NATIVE,
    "native lane, FP8": ("nam56r_native_dp_fp8",),
    "smoke": ("nam56r_smoke",),
    "dsa and mtp": LATENT,
    "dsa without reuse, two depths": (*LATENT, "model.blocks.dsa.full_every=1", "feature.mtp.depths=2"),
    "experts in mtp": (*LATENT, "feature.mtp.depths=2", "feature.mtp.pattern=AEM-"),
    "no latent norms": (*LATENT, "model.blocks.mla.latent_norm=false"),
    "dense": (*NATIVE, "model.letters.E=mlp", "feature.mtp.depths=1"),
    "swiglu": (*NATIVE, "model.activation=swiglu"),
    "qk norm": (*NATIVE, "model.blocks.attention.qk_norm=true"),
    "biases": ("nam56r_smoke", "model.letters.E=mlp", "model.linear_bias=true"),
    "no two widths alike": (
        *LATENT, "model.num_attention_heads=57", "model.hidden_size=1824", "model.blocks.mla.q_lora_rank=40", "model.vocab_size=32768",
        "model.blocks.mla.kv_lora_rank=44", "model.blocks.mla.qk_head_dim=56", "model.blocks.mla.qk_rope_head_dim=26",
        "model.blocks.mla.v_head_dim=72", "execution.mla.kernels=megatron", "execution.dsa.kernels=megatron",
        "model.blocks.dsa.indexer_heads=12", "model.blocks.dsa.indexer_head_dim=80", "model.blocks.moe.expert_hidden_size=640",
        "model.blocks.moe.shared_expert_hidden_size=704", "model.blocks.moe.experts=24", "model.ffn_hidden_size=2000",
        "model.blocks.mamba2.heads=80", "model.blocks.mamba2.head_dim=32", "model.blocks.mamba2.state_dim=96",
        "model.blocks.mamba2.groups=16",
    ),
    "learned positions": ("nam56r_smoke", "model.blocks.attention.position_embedding=none", "model.learned_positions=160"),
    "no shared expert": ("nam56r_smoke", "model.blocks.moe.shared_expert_hidden_size=0"),
    "experts of a latent": ("nam56r_smoke", "model.blocks.moe.latent_size=48"),
    "tied": ("nam56r_smoke", "model.tied_embeddings=true"),
}  # fmt: skip


def plan_of(preset, *overrides):
    return translate(load(preset, overrides)).plan


def config_of(plan) -> dict:
    """The recipe's widths as fields of Megatron's config; written from the recipe, not from lower.py's settings."""
    from megatron.core.activations import squared_relu
    from torch.nn.functional import silu

    m, b = plan.recipe.model, plan.recipe.blocks
    gated = m.activation == "swiglu"
    found = dict(
        hidden_size=m.hidden_size, ffn_hidden_size=m.ffn_hidden_size, num_attention_heads=m.num_attention_heads
    )
    found |= dict(
        add_bias_linear=m.linear_bias, gated_linear_unit=gated, activation_func=silu if gated else squared_relu
    )
    if plan.kinds & {"mla", "dsa"}:
        found |= dict(q_lora_rank=b.mla.q_lora_rank, kv_lora_rank=b.mla.kv_lora_rank, qk_head_dim=b.mla.qk_head_dim)
        found |= dict(qk_pos_emb_head_dim=b.mla.qk_rope_head_dim, v_head_dim=b.mla.v_head_dim)
        found |= dict(qk_layernorm=b.mla.latent_norm)
    else:
        found |= dict(kv_channels=b.attention.head_dim, num_query_groups=b.attention.query_groups)
        found |= dict(qk_layernorm=b.attention.qk_norm)
    if "dsa" in plan.kinds:
        frequency, offset = plan.index_reuse or (1, 0)
        found |= dict(dsa_indexer_n_heads=b.dsa.indexer_heads, dsa_indexer_head_dim=b.dsa.indexer_head_dim)
        found |= dict(dsa_indexer_topk_freq=frequency, dsa_indexer_skip_topk_offset=offset)
    if "moe" in plan.kinds:
        found |= dict(num_moe_experts=b.moe.experts, moe_ffn_hidden_size=b.moe.expert_hidden_size)
        found |= dict(moe_shared_expert_intermediate_size=b.moe.shared_expert_hidden_size or None)
        found |= dict(moe_latent_size=b.moe.latent_size)
    if "mamba2" in plan.kinds:
        found |= dict(mamba_num_heads=b.mamba2.heads, mamba_head_dim=b.mamba2.head_dim)
        found |= dict(mamba_state_dim=b.mamba2.state_dim, mamba_num_groups=b.mamba2.groups)
    return found


def case_of(plan, **layout) -> Case:
    norm = (mla := plan.recipe.blocks.mla) is None or mla.latent_norm
    m = plan.recipe.model
    layout |= dict(vocab=m.vocab_size, positions=m.learned_positions)
    return Case(plan.pattern, config=config_of(plan), latent_norm=norm, **layout)


def named(plan) -> dict[str, tuple[int, ...]]:
    """The budget's parameters under Megatron's full names."""
    found = {}
    for _, number, p in parts(plan, Sizes.of(plan.site), Stage(0, 1, plan.segments)):
        at = f"decoder.layers.{number - 1}." if number else ""
        names = [p.name.replace("*", str(i)) for i in range(p.count)] if "*" in p.name else [p.name]
        found |= {at + name: p.shape for name in names}
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in PLANS if name != "tied"])
def test_parameters_are_megatrons(name, monkeypatch):
    monkeypatch.setattr(attention, "TENorm", modules.Norm)  # which Megatron puts on queries and keys itself
    plan = plan_of(*PLANS[name])
    real = shapes(case_of(plan))
    assert named(plan) == real
    assert parameters(plan)[0] == sum(map(prod, real.values()))


def test_native_preset_has_the_measured_parameters():
    """Counted on GPUs; active: 4 of 16 experts."""
    total, active = parameters(plan_of(*NATIVE))
    assert total == 3_996_461_352
    assert active == total - 22 * 12 * 2 * 896 * 3584


def test_tied_embeddings_are_counted_once():
    plan, untied = plan_of(*PLANS["tied"]), plan_of("nam56r_smoke")
    table = plan.recipe.model.vocab_size * plan.recipe.model.hidden_size
    assert parameters(untied)[0] - parameters(plan)[0] == table


LAYOUTS = {
    "tp2": (("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true"), {"tp": 2}),
    "pp2": (("cluster=h200_2", "parallel.pipeline=2"), {"pp": 2}),
    "ep2": (("cluster=h200_2", "parallel.expert=2"), {"dp": 2, "ep": 2}),
    "tp2ep2": (
        ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"),
        {"tp": 2, "ep": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [NATIVE, LATENT], ids=["native", "latent"])
def test_each_rank_holds_what_megatron_gives_it(family, layout):
    """Elements of dense and of expert parameters on each rank, copies of the embedding included."""
    overrides, ranks = LAYOUTS[layout]
    plan = plan_of(*family, *overrides)
    no_memory = dict(use_cpu_initialization=False, perform_initialization=False)
    case = case_of(plan, meta=True, **ranks)
    case = harness.replace(case, config=no_memory | case.config)

    def count(rig):
        experts = [
            p.numel() for name, p in rig.model.named_parameters() if ".experts.linear" in name and "shared" not in name
        ]
        return sum(p.numel() for p in rig.model.parameters()) - sum(experts), sum(experts)

    z = Sizes.of(plan.site)
    for rank, real in enumerate(on_ranks(case, count)):
        stage = stages(plan)[rank if ranks.get("pp") else 0]
        held = [x for group in groups(plan, z, stage) for x in group.held]
        experts = sum(x.elements * x.count for x in held if x.param.shard == "expert")
        assert (sum(x.elements * x.count for x in held) - experts, experts) == real


def test_muons_share_is_megatrons_rule():
    """Two dimensions and no table: compared with Megatron's own optimizer in test_models.py, here with the shapes."""
    plan = plan_of(*LATENT)
    for _, _, p in parts(plan, Sizes.of(plan.site), Stage(0, 1, plan.segments)):
        assert (p.optimizer == "matrix") == (len(p.shape) == 2 and p.role != "table"), p.name


# Operations -----------------------------------------------------------------------------------------------------------

COUNTED = {
    "native": NATIVE,
    "mtp": (*NATIVE, "feature.mtp.depths=2"),
    "mtp of experts and mixers": (*NATIVE, "feature.mtp.depths=2", "feature.mtp.pattern=MEAE"),
    "latent": LATENT,
    "dense, gated": (*NATIVE, "model.letters.E=mlp", "model.activation=swiglu"),
    "as designed": ("nam56r",),
    "mha": (*NATIVE, "model.blocks.attention.query_groups=56"),
    "delta": ("qwen3_next_80b_a3b",),
    "delta, other widths": (
        "qwen3_next_80b_a3b",
        "model.blocks.gdn.key_head_dim=64",
        "model.blocks.gdn.value_head_dim=96",
        "model.blocks.gdn.conv_width=3",
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_megatrons_own_count_is_what_it_logs(name):
    """The real function on the arguments we emit."""
    from megatron.training.training import num_floating_point_operations

    lowering = translate(load(COUNTED[name][0], COUNTED[name][1:]))
    p = lowering.plan
    spoken = {s.name: s.value for s in lowering.settings}
    args = Namespace(**{**{dest: flag.default for dest, flag in current().by_dest.items()}, **spoken})
    args.mtp_num_layers = p.mtp_depths or None
    real = num_floating_point_operations(args, 1) / p.recipe.model.seq_length
    assert cost(p).megatron == pytest.approx(real, rel=1e-9)
