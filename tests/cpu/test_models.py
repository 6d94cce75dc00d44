"""The stack of runtime/stack.py inside Megatron's real HybridModel, on a CPU and in every layout.

Mamba-2 is Megatron's own MambaMixer with its Triton kernels in plain torch; mamba3 and m2rnn, which are not built yet,
are toy mixers; Transformer Engine's modules have stand-ins with the same parameters (tests/cpu/modules.py).
"""

import copy
import dataclasses
import importlib
import itertools
import os
import pickle
import sys
from functools import partial
from math import lcm
from types import ModuleType, SimpleNamespace

import harness
import megatron.core.ssm.mamba_mixer as upstream
import megatron.core.tensor_parallel.random as rng
import modules
import pytest
import torch
from harness import Case, in_child, on_ranks, plan_of, recipe_of, train
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from nam_megatron.blocks.mamba2 import layer as mamba2
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.blocks.moe import experts as on_gpu
from nam_megatron.blocks.moe import layer as moe
from nam_megatron.blocks.moe import quack_gemm, travel
from nam_megatron.blocks.moe.torch_gemm import TorchGemm
from nam_megatron.errors import Refused
from nam_megatron.packages import FLASH_PACKAGES, QUACK
from nam_megatron.runtime import flash_attention
from nam_megatron.runtime.stack import AbsentSlot, hybrid_stack_spec

MIXERS = {"mamba3": modules.toy_mixer(2), "m2rnn": modules.toy_mixer(1)}

# Every kind, twice: as the native lane has them and as the family was designed. D at 5 reuses the top-k of D at 3.
NATIVE = Case("*EM-M*|E-MM*/*-", mixers={})
DESIGN = Case("+EDED-3M|R+E/+-/+-", mixers=MIXERS)
FAMILIES = {"native": NATIVE, "design": DESIGN}
LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2ep2": {"tp": 2, "ep": 2},
}


def in_layout(case: Case, **layout) -> Case:
    pattern = case.pattern if layout.get("pp", 1) > 1 else case.pattern.replace("|", "")
    return dataclasses.replace(case, pattern=pattern, **layout)


@pytest.fixture(scope="module")
def whole():
    """One step of each family on one rank."""
    return {name: train(in_layout(case)) for name, case in FAMILIES.items()}


# The harness ----------------------------------------------------------------------------------------------------------


def test_harness_gradients_are_the_slopes_of_its_losses():
    """What every comparison below stands on: moving a weight along its gradient moves the loss by the gradient."""

    def slopes(rig):
        loss = lambda: sum(harness.step(rig)) / rig.case.microbatches  # noqa: E731
        loss()
        found, eps = {}, 1e-2
        for name, p in rig.model.named_parameters():
            gradient = p.main_grad.clone()
            along = gradient / gradient.norm()
            with torch.no_grad():
                p.add_(along, alpha=eps)
                up = loss()
                p.sub_(along, alpha=2 * eps)
                down = loss()
                p.add_(along, alpha=eps)
            found[name] = ((up - down) / (2 * eps), gradient.norm().item())
            loss()
        return found

    (found,) = on_ranks(Case("*-M", microbatches=1), slopes)
    bad = {name: pair for name, pair in found.items() if abs(pair[0] - pair[1]) > 0.02 * pair[1] + 1e-3}
    assert not bad


@pytest.mark.slow
def test_harness_gradients_are_not_the_weights(whole):
    (held,) = on_ranks(in_layout(NATIVE), harness.weights)
    gradients = whole["native"].gradients
    assert {key for key, *_ in held} == gradients.keys()
    assert not [key for key, _, window, part in held if torch.equal(gradients[key][window], part)]


def test_harness_tells_where_a_rank_failed():
    def fail(rig):
        if rig.rank == 1:
            raise KeyError("on purpose")
        torch.distributed.barrier()

    with pytest.raises(harness.RankFailed, match=r"(?s)rank 1:.*on purpose"):
        on_ranks(Case("*-", dp=2), fail, limit_s=30)


def test_harness_mamba_scan_is_the_published_recurrence():
    """mamba2_scan against h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t, y_t = h_t C_t + D x_t (arXiv 2405.21060)."""
    batch, length, heads, dim, groups, state = 2, 9, 4, 3, 2, 5
    inner, packed = heads * dim, groups * state
    torch.manual_seed(0)
    z, x, bc, dt = (torch.randn(batch, length, n) for n in (inner, inner, 2 * packed, heads))
    weight, bias, dt_bias, a, d = (torch.randn(n) for n in ((inner + 2 * packed, 4), inner + 2 * packed, *[heads] * 3))
    a = -a.exp()
    joined = torch.cat([x, bc], -1)
    taps = [torch.cat([torch.zeros_like(joined[:, :lag]), joined[:, : length - lag]], 1) for lag in (3, 2, 1, 0)]
    mixed = torch.nn.functional.silu(sum(tap * weight[:, i] for i, tap in enumerate(taps)) + bias)
    u, b, c = mixed.split([inner, packed, packed], -1)
    u = u.view(batch, length, heads, dim)
    b, c = (
        t.view(batch, length, groups, 1, state).expand(-1, -1, -1, heads // groups, -1).flatten(2, 3) for t in (b, c)
    )
    step = torch.nn.functional.softplus(dt + dt_bias)
    h, expected = torch.zeros(batch, heads, dim, state), torch.zeros_like(u)
    for t in range(length):
        h = h * (step[:, t] * a).exp()[..., None, None] + (step[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None]
        expected[:, t] = (h * c[:, t, :, None]).sum(-1)
    expected = (expected + d[:, None] * u).flatten(2) * torch.nn.functional.silu(z)
    found = modules.mamba2_scan(
        torch.cat([z, x, bc, dt], -1), weight, bias, dt_bias, a, D=d, headdim=dim, ngroups=groups, chunk_size=4
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_harness_products_of_bf16_are_rounded_once():
    """By each of the four operators, with scales; those of other types are what they were."""

    def products(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        a, b, c = (torch.randn(2, *shape).to(kind).requires_grad_() for shape in ((5, 7), (7, 3), (5, 3)))
        added = torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2), torch.baddbmm(c, a, b, beta=0.0, alpha=0.3)
        made = (a[0] @ b[0], a @ b, *added)
        return *made, *torch.autograd.grad(sum(m.sum() for m in made), (a, b, c))

    kinds = (torch.bfloat16, torch.float32, torch.float64)
    (found,) = on_ranks(Case("*-"), lambda _: [products(kind) for kind in kinds])
    torch.testing.assert_close(found[1:], [products(kind) for kind in kinds[1:]], rtol=0, atol=0)
    for rounded, native, exact in zip(found[0], products(kinds[0]), found[2], strict=True):
        assert rounded.dtype is torch.bfloat16
        assert (rounded - exact).abs().max() <= (native - exact).abs().max() + 1e-3


def test_harness_delta_rule_is_megatrons_own_deterministic_one():
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    torch.manual_seed(0)
    q, k, v, g, beta = (torch.randn(2, 70, 3, *d, requires_grad=True) for d in ((8,), (8,), (5,), (), ()))
    said = (modules.l2norm(q), modules.l2norm(k), v, -torch.nn.functional.softplus(g), beta.sigmoid())
    found, expected = (rule(*said)[0] for rule in (modules.gated_delta_rule, torch_chunk_gated_delta_rule))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(found)
    here, there = (
        torch.autograd.grad((y * weights).sum(), (q, k, v, g, beta), retain_graph=True) for y in (found, expected)
    )
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


# What is built --------------------------------------------------------------------------------------------------------


def describe(rig):
    """(layer number, layer class, class of what does the work) of the layers on this rank."""

    def worker(layer):
        for name in ("mixer", "mlp", "self_attention"):
            module = getattr(layer, name, None)
            if module is not None and not isinstance(module, IdentityOp):
                return type(module).__name__ + (
                    f" {module.expand}" if name == "mixer" and hasattr(module, "decay") else ""
                )

    layers = list(rig.model.decoder.layers)
    mtp = [list(depth.mtp_model_layer.layers) for depth in rig.model.mtp.layers] if rig.model.mtp_process else []
    return [[(x.layer_number, type(x).__name__, worker(x)) for x in part] for part in (layers, *mtp)]


BUILT = {
    "*": ("TransformerLayer", "SelfAttention"),
    "+": ("TransformerLayer", "MLASelfAttention"),
    "D": ("TransformerLayer", "AbsorbedMLASelfAttention"),
    "E": ("MoETransformerLayer", "MoELayer"),
    "-": ("MLPLayer", "MLP"),
    "M": ("MambaLayer", "MambaMixer"),
    "3": ("MambaLayer", "ToyMixer 2"),
    "R": ("MambaLayer", "ToyMixer 1"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_number_has_its_layer(family, pp):
    case = in_layout(FAMILIES[family], pp=pp)
    main, *mtp = case.pattern.split("/")
    expected = [(number, *BUILT[letter]) for number, letter in enumerate(main.replace("|", ""), 1)]
    ranks = on_ranks(case, describe)
    assert [layer for rank in ranks for layer in rank[0]] == expected
    inner = [[(number, *BUILT[letter]) for number, letter in enumerate(depth, 1)] for depth in mtp]
    assert ranks[-1][1:] == inner
    assert all(len(rank) == 1 for rank in ranks[:-1])


def test_mtp_restarts_its_numbers_and_still_gets_its_own_mixer():
    (parts,) = on_ranks(Case("R*3-/3-/3-", mixers=MIXERS), describe)
    assert [worker for _, _, worker in parts[0]] == ["ToyMixer 1", "SelfAttention", "ToyMixer 2", "MLP"]
    assert parts[1][0] == parts[2][0] == (1, "MambaLayer", "ToyMixer 2")


def test_layers_in_one_index_group_share_one_indexer():
    (owners,) = on_ranks(
        Case("+EDED-D-D"),
        lambda rig: [
            layer.layer_number
            for layer in rig.model.decoder.layers
            if type(layer.self_attention).__name__ == "AbsorbedMLASelfAttention"
            and layer.self_attention.core_attention.indexer is not None
        ],
    )
    assert owners == [3, 7]


# Names and shapes -----------------------------------------------------------------------------------------------------


def parameters(letter: str, c: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a layer, whole (not sharded), from the fields of its config."""
    h = c.hidden_size
    if letter == "*":
        queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
        return {
            "self_attention.linear_proj.weight": (h, queries),
            "self_attention.linear_qkv.layer_norm_weight": (h,),
            "self_attention.linear_qkv.weight": (queries + 2 * keys, h),
        }
    if letter in "+D":
        n, q, kv, rope = c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank, c.qk_pos_emb_head_dim
        latent = {
            "input_layernorm.weight": (h,),
            "self_attention.linear_proj.weight": (h, n * c.v_head_dim),
            "self_attention.linear_q_down_proj.weight": (q, h),
            "self_attention.linear_q_up_proj.weight": (n * (c.qk_head_dim + rope), q),
            "self_attention.linear_kv_down_proj.weight": (kv + rope, h),
            "self_attention.linear_kv_up_proj.weight": (n * (c.qk_head_dim + c.v_head_dim), kv),
            "self_attention.q_layernorm.weight": (q,),
            "self_attention.kv_layernorm.weight": (kv,),
        }
        indexer = {
            "linear_wq_b.weight": (c.dsa_indexer_n_heads * c.dsa_indexer_head_dim, q),
            "linear_wk.weight": (c.dsa_indexer_head_dim, h),
            "k_norm.weight": (c.dsa_indexer_head_dim,),
            "k_norm.bias": (c.dsa_indexer_head_dim,),
            "linear_weights_proj.weight": (c.dsa_indexer_n_heads, h),
        }
        prefix = "self_attention.core_attention.indexer."
        return latent | ({prefix + name: shape for name, shape in indexer.items()} if letter == "D" else {})
    if letter == "E":
        f, shared = c.moe_ffn_hidden_size, c.moe_shared_expert_intermediate_size
        experts = range(c.num_moe_experts)
        return {
            "pre_mlp_layernorm.weight": (h,),
            "mlp.router.weight": (c.num_moe_experts, h),
            **{f"mlp.experts.linear_fc1.weight{i}": (f, h) for i in experts},
            **{f"mlp.experts.linear_fc2.weight{i}": (h, f) for i in experts},
            "mlp.shared_experts.linear_fc1.weight": (shared, h),
            "mlp.shared_experts.linear_fc2.weight": (h, shared),
        }
    if letter == "-":
        return {
            "mlp.linear_fc1.layer_norm_weight": (h,),
            "mlp.linear_fc1.weight": (c.ffn_hidden_size, h),
            "mlp.linear_fc2.weight": (h, c.ffn_hidden_size),
        }
    assert letter == "M"
    heads, inner, bc = c.mamba_num_heads, c.mamba_num_heads * c.mamba_head_dim, c.mamba_num_groups * c.mamba_state_dim
    return {
        "mixer.conv1d_weight": (inner + 2 * bc, 1, 4),
        "mixer.conv1d_bias": (inner + 2 * bc,),
        "mixer.dt_bias": (heads,),
        "mixer.A_log": (heads,),
        "mixer.D": (heads,),
        "mixer.in_proj.layer_norm_weight": (h,),
        "mixer.in_proj.weight": (2 * inner + 2 * bc + heads, h),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (h, inner),
    }


@pytest.mark.parametrize("pattern", ["*EM-/*-", "+ED-/+-/+-", "DEM", "*EM/*E/*E", "+-/+EM"])
def test_names_and_shapes(pattern):
    fields = {**harness.ATTENTION, **harness.LATENT, **harness.DSA, **harness.MOE, **harness.MAMBA}
    c = SimpleNamespace(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, **fields)
    main, *mtp = pattern.split("/")
    stacks = {"decoder.layers": main}
    stacks |= {f"mtp.layers.{i}.mtp_model_layer.layers": depth for i, depth in enumerate(mtp)}
    expected = {
        f"{stack}.{i}.{name}": shape
        for stack, letters in stacks.items()
        for i, letter in enumerate(letters)
        for name, shape in parameters(letter, c).items()
    }
    expected |= dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), (harness.VOCAB, 64))
    expected["decoder.final_norm.weight"] = (64,)
    for depth in range(len(mtp)):
        expected |= {f"mtp.layers.{depth}.{norm}.weight": (64,) for norm in ("enorm", "hnorm", "final_layernorm")}
        expected[f"mtp.layers.{depth}.eh_proj.weight"] = (64, 128)
    assert harness.shapes(Case(pattern)) == expected


def test_native_preset_has_the_measured_number_of_parameters():
    """3,996,461,352 was counted on GPUs with TE's and mamba-ssm's own modules (NAM56R, GQA, no QK norm, no MTP)."""
    wide = {"hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 56, "num_query_groups": 8}
    wide |= {"kv_channels": 64, "num_moe_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 896}
    wide |= {"moe_shared_expert_intermediate_size": 1024, "mamba_num_heads": 56, "mamba_head_dim": 64}
    wide |= {"mamba_state_dim": 64, "mamba_num_groups": 8}
    pattern = "".join("*EME*EME*EMM"[i % 12] for i in range(52))
    found = harness.shapes(Case(pattern, vocab=65536, config=wide))
    assert sum(torch.Size(shape).numel() for shape in found.values()) == 3_996_461_352


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_is_the_same_model(whole, family, layout):
    one = whole[family]
    other = train(in_layout(FAMILIES[family], **LAYOUTS[layout]))
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    assert other.gradients.keys() == one.gradients.keys()
    far = {}
    for key, expected in one.gradients.items():
        error = (other.gradients[key] - expected).abs().max() / expected.abs().max()
        if not error < 1e-4:
            far[key] = error.item()
    assert not far


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_learned_positions_are_one_table_in_every_layout(layout):
    """Whole on each tensor rank, on the first stage alone; and no table of Megatron's optimizers, which marks that of words."""
    case, key = Case("*EM|-MM", positions=harness.SEQUENCE + 8), "embedding.position_embeddings.weight"

    def marked(rig):
        named = dict(rig.model.named_parameters())
        return {
            name for name, p in named.items() if "embedding" in name and hasattr(p, "is_embedding_or_output_parameter")
        }

    assert on_ranks(in_layout(case), marked) == [{"embedding.word_embeddings.weight"}]
    one, other = train(in_layout(case)), train(in_layout(case, **layout))
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    table = one.gradients[key]
    read, beyond = table.split([harness.SEQUENCE, 8])
    assert read.abs().amin(1).all() and not beyond.any()
    torch.testing.assert_close(other.gradients[key], table, rtol=1e-4, atol=1e-4 * table.abs().max().item())


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2}], ids=str)
def test_the_local_dispatcher_trains_what_allgather_does(layout):
    """Row by row the same values: the losses are equal, and gradients differ in the order of sums alone."""
    theirs, ours = (train(Case("*E-E", dispatcher=name, **layout)) for name in ("allgather", "local"))
    assert ours.losses == theirs.losses
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["in the sharded optimizer's buffer", "in no buffer"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2}], ids=str)
def test_torchs_grouped_gemm_trains_what_transformer_engines_does(layout, sharded, monkeypatch):
    """The same products without a count on the host, from weights where they lie, in the order of the rows."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    one = Case("*E-E", dispatcher="local", expert_gemm="torch", **layout)
    assert on_ranks(one, partial(copies, monkeypatch, ddp)) == [({False}, 0)] * one.world
    found, expected = train(one), train(Case("*E-E", dispatcher="allgather", **layout))
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-4, atol=1e-6)


def test_what_is_no_number_or_nothing_has_its_row_at_an_expert_too():
    """The one has to reach the loss; the other is a share that is too small for its type."""
    here = SimpleNamespace(arrive=lambda x: x)
    of = SimpleNamespace(
        chosen=here,
        tokens=here,
        config=SimpleNamespace(moe_permute_fusion=True),
        sort=lambda rows, probs: (rows, probs),
    )
    told = torch.tensor([[0.0, -1.0], [torch.nan, 0.5]])
    _, _, probs = moe.GatheredDispatcher.dispatch_postprocess(of, torch.ones(2, 4), told)
    assert of.local_map.tolist() == [[False, True], [True, True]] and probs[1, 1].isnan()


@pytest.mark.slow
@pytest.mark.parametrize("forked", [False, True], ids=["", "router"])
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}], ids=str
)
def test_gathered_tokens_train_what_exchanged_ones_do(layout, forked):
    """Experts over several ranks, whose counts no host knows."""
    keys = {"moe": {"fused_router_gradient": forked}}
    found = train(Case("*E-E", dispatcher="gathered", expert_gemm="torch", keys=keys, microbatches=4, **layout))
    expected = train(Case("*E-E", microbatches=4, **layout))
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("forked", [False, True], ids=["", "router"])
def test_the_shared_expert_runs_while_tokens_travel(forked):
    """In both directions: what is under way in each journey's time, in the order in which a GPU gets it."""

    def order(rig):
        told: list[str] = []
        start, end = travel.Trip.start, travel.Trip.end

        def left(trip, send, x):
            told.append(f"{send.__name__} leaves")
            return start(trip, send, x)

        def arrived(trip):
            told.append("arrives")
            return end(trip)

        travel.Trip.start, travel.Trip.end = left, arrived  # in this rank, a process of its own
        (layer,) = (m for m in rig.model.modules() if isinstance(m, MoELayer))
        for part in ("experts", "shared_experts"):
            for name in ("linear_fc1", "linear_fc2"):
                linear = getattr(getattr(layer, part), name)
                linear.register_forward_hook(lambda *_, what=f"{part} {name[-3:]}": told.append(what))
                weight = next(linear.parameters())
                weight.register_hook(lambda _, what=f"{part} {name[-3:]} back": told.append(what))
        harness.step(rig)
        return told

    case = Case("*E", dispatcher="gathered", expert_gemm="torch", keys={"moe": {"fused_router_gradient": forked}})
    there = "gather leaves, exchange leaves, shared_experts fc1, shared_experts fc2, arrives, arrives, experts fc1, experts fc2"
    back = "experts fc2 back, experts fc1 back, scatter leaves, exchange leaves, shared_experts fc2 back, shared_experts fc1 back"
    expected = f"{there}, scatter leaves, arrives, gather leaves, arrives, {back}, arrives, arrives".split(", ")
    for told in on_ranks(dataclasses.replace(case, dp=2, ep=2, microbatches=2), order):
        assert told == expected


def test_what_leaves_lies_in_a_row():
    """A gradient is often a view, and NCCL sends bytes as they lie. What arrives may be read once, and no journey begins before."""
    sent = []

    def send(x, group):
        sent.append((x, group))
        return x, SimpleNamespace(wait=lambda: sent.append("waited"))

    trip, x = travel.Trip(send, "group"), torch.arange(6.0).view(2, 3).T
    begun = trip.start(send, x)
    (left, group) = sent[0]
    assert left.is_contiguous() and torch.equal(left, x) and group == "group"
    with pytest.raises(AssertionError, match="under way"):
        trip.start(send, x)
    assert trip.end() is begun and sent[1] == "waited"
    with pytest.raises(AssertionError, match="nothing"):
        trip.end()


def copies(monkeypatch, ddp, rig):
    """Whether weights of a projection were copied, in any pass of a step; and how many layers wait for the host."""
    rig.ddp = DistributedDataParallel(rig.config, ddp, rig.model)
    copied, stacked = [], on_gpu._stacked

    def look(weights):
        out = stacked(weights)
        copied.append(out.data_ptr() != weights[0].data_ptr())
        return out

    monkeypatch.setattr(on_gpu, "_stacked", look)
    harness.step(rig)
    waits = [m for m in rig.model.modules() if isinstance(m, MoELayer) and hasattr(m.token_dispatcher, "copied")]
    return set(copied), len(waits)


def test_matrices_are_one_only_where_that_has_their_values():
    """Whatever part of a storage each is, and however it lies there."""
    held = torch.arange(40.0)
    lie = {(0, 6): True, (6, 0): False, (0, 7): False, (3, 9): True, (0, 6, 12): True, (0, 6, 18): False}
    for at, one in lie.items():
        for turned in itertools.product((False, True), repeat=len(at)):
            matrices = [
                held[n : n + 6].view(3, 2).T if t else held[n : n + 6].view(2, 3)
                for n, t in zip(at, turned, strict=True)
            ]
            whole = on_gpu._in_order(matrices)
            assert (whole is not None) == (one and not any(turned)), (at, turned)
            assert whole is None or torch.equal(whole, torch.stack(matrices))
    assert on_gpu._in_order([held[:6].view(2, 3), held.clone()[6:12].view(2, 3)]) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_end_of_a_bucket_parts_weights_as_the_budget_has_it(ranks):
    """64 x 32 elements are a multiple of what two ranks pad to, and not of what three do."""

    def parted(rig):
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=4000)
        DistributedDataParallel(rig.config, ddp, rig.model)
        of = [m.experts.linear_fc1 for m in rig.model.modules() if isinstance(m, MoELayer)]
        return any(on_gpu._in_order(on_gpu._weights(projection)) is None for projection in of)

    one = Case("*E-E", dispatcher="local", expert_gemm="torch", dp=ranks)
    assert on_ranks(one, parted) == [bool(64 * 32 % lcm(128, ranks))] * ranks == [ranks == 3] * ranks


@pytest.mark.parametrize(("off", "called"), [(0, "added inside"), (4, "added inside"), (1, "added one by one")])
@pytest.mark.parametrize("sizes", [(24, 8), (8, 24)], ids=str)
def test_buffers_off_16_bytes_are_added_to_one_by_one(sizes, off, called, monkeypatch):
    """TMA takes no others; off: fp32 elements in front of them. Plain torch stands for QuACK's two functions."""
    calls = []

    def gemm(a, b, *, cu_seqlens_k, out_dtype, tuned):
        calls.append("added one by one")
        return TorchGemm.gradients(a.mT, b, cu_seqlens_k).to(out_dtype)

    def of_tile(a, b, out, c=None, *, cu_seqlens_m=None, cu_seqlens_k=None, add_to_output=False, config=None):
        if cu_seqlens_m is not None:
            out.copy_(TorchGemm.product(a, b, cu_seqlens_m))
            return
        calls.append("added inside")
        assert add_to_output and out.data_ptr() % 16 == 0
        out += TorchGemm.gradients(a.mT, b, cu_seqlens_k)

    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    interface = SimpleNamespace(gemm=gemm, gemm_tuned=SimpleNamespace(fn=of_tile), GemmConfig=dict)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    n, k = sizes
    weights, whole = torch.randn(2, n, k), torch.zeros(2 * n * k + off)
    module = SimpleNamespace(num_gemms=2, **{f"weight{1 - i}": torch.nn.Parameter(w) for i, w in enumerate(weights)})
    for i, total in enumerate(whole[off:].view(2, n, k)):
        getattr(module, f"weight{1 - i}").main_grad = total
    rows, bounds = torch.randn(5, k), torch.tensor([0, 2, 5], dtype=torch.int32)
    on_gpu._project(module, rows, bounds, quack_gemm.QuackGemm, True)[0].sum().backward()
    assert calls == [called]
    wanted = torch.stack([rows[:2].sum(0).expand(n, k), rows[2:].sum(0).expand(n, k)])
    torch.testing.assert_close(whole[off:].view(2, n, k), wanted)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deep", "pickle"]
)
def test_a_copy_of_experts_multiplies_by_its_own_weights(copied):
    layer = torch.nn.Module()
    for name, shape in (("linear_fc1", (24, 8)), ("linear_fc2", (8, 24))):
        projection = torch.nn.Module()
        projection.num_gemms = 2
        for index in range(2):
            projection.register_parameter(f"weight{index}", torch.nn.Parameter(torch.randn(shape)))
        layer.add_module(name, projection)
    on_gpu.keep_counts_on_gpu(layer, TorchGemm, False)
    made, rows, bounds = copied(layer), torch.randn(5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    before = layer.linear_fc1(rows, bounds)[0]
    with torch.no_grad():
        layer.linear_fc1.weight0.zero_()
    torch.testing.assert_close(made.linear_fc1(rows, bounds)[0], before, rtol=0, atol=0)
    assert not layer.linear_fc1(rows, bounds)[0][2:].any()


def test_a_gpu_on_which_torch_would_wait_for_counts_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, told in (((9, 0), []), ((8, 0), ["this one has 8.0"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert [p.message.rpartition(", and ")[2] for p in TorchGemm.unserved()] == told


@pytest.mark.parametrize(
    ("found", "capability", "told"),
    [
        ({}, (9, 0), ["quack-kernels is not installed", "nvidia-cutlass-dsl is not installed"]),
        (QUACK | {"quack-kernels": "0.6.4"}, (9, 0), ["quack-kernels is 0.6.4"]),
        (QUACK | {"nvidia-cutlass-dsl": "4.7.1"}, (9, 0), ["nvidia-cutlass-dsl is 4.7.1"]),
        (QUACK, (8, 0), ["have been run on Hopper alone"]),
        (QUACK, (9, 0), ["cannot be imported: ModuleNotFoundError"]),
    ],
)
def test_hosts_that_do_not_run_quacks_gemms_are_refused(found, capability, told, monkeypatch):
    monkeypatch.setattr(quack_gemm, "installed", found.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    problems = list(quack_gemm.QuackGemm.unserved())
    assert len(problems) == len(told) and all(p.key == "execution.moe.expert_gemm" for p in problems)
    assert all(words in p.message for words, p in zip(told, problems, strict=True))


def test_gradients_of_experts_are_added_to_the_buffers_once():
    """Of two microbatches, whether Megatron's hooks add them or, as under fused accumulation, the layers."""

    def job(fused):
        def run(rig):
            for module in rig.model.modules():
                if isinstance(module, MoELayer):
                    on_gpu.keep_counts_on_gpu(module.experts, TorchGemm, fused)
            harness.step(rig)
            weights = {name: p for name, p in rig.model.named_parameters() if ".experts." in name}
            assert all(p.grad_added_to_main_grad == fused for p in weights.values())
            return {name: p.main_grad.clone() for name, p in weights.items()}

        return run

    one = Case("*E-E", dispatcher="local", expert_gemm="torch")
    (by_hooks,), (by_layers,) = (on_ranks(one, job(fused)) for fused in (False, True))
    torch.testing.assert_close(by_layers, by_hooks, rtol=0, atol=0)
    assert all(g.any() for g in by_hooks.values())


@pytest.mark.parametrize("counts", [(5, 0, 3, 8), (0, 0, 16, 0), (16, 0, 0, 0), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["in one buffer", "apart"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["to autograd", "to buffers"])
def test_each_expert_multiplies_its_own_rows(accumulate, counts, apart):
    """Expert by expert in fp64, experts without rows too, whether their weights lie in one buffer, from the last to the first, or not."""
    torch.manual_seed(0)
    buffer = torch.randn(4, 24, 8)
    weights = [torch.nn.Parameter(w.clone() if apart else w) for w in buffer.unbind()][::-1]
    before = torch.randn(4, 24, 8)
    totals = before.clone()
    for weight, total in zip(reversed(weights), [t.clone() for t in totals] if apart else totals, strict=True):
        weight.main_grad = total
    rows, back = torch.randn(16, 8, requires_grad=True), torch.randn(16, 24)
    module = SimpleNamespace(num_gemms=4, **{f"weight{i}": w for i, w in enumerate(weights)})
    bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    out, bias = on_gpu._project(module, rows, bounds, TorchGemm, accumulate)
    out.backward(back)
    exact = rows.detach().double().requires_grad_()
    own = [w.detach().double().requires_grad_() for w in reversed(weights)]
    wanted = torch.cat([part @ w.T for part, w in zip(exact.split(counts), own, strict=True)])
    wanted.backward(back.double())
    assert bias is None
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    for weight, w, was in zip(reversed(weights), own, before, strict=True):
        found = weight.main_grad - was if accumulate else weight.grad
        torch.testing.assert_close(found.double(), w.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=str)
def test_the_strided_mixer_is_megatrons(layout):
    """The same values, and what its scan sees is the projection itself, not a copy."""

    def where(rig):
        seen, scan = [], upstream.mamba_split_conv1d_scan_combined

        def look(packed, *weights, **kw):
            seen.append(packed.transpose(0, 1).is_contiguous())
            return scan(packed, *weights, **kw)

        upstream.mamba_split_conv1d_scan_combined = look
        harness.step(rig)
        return set(seen)

    ours, theirs = (Case("M*M", strided=strided, **layout) for strided in (True, False))
    assert on_ranks(ours, where)[0] == {True} and on_ranks(theirs, where)[0] == {False}
    found, expected = train(ours), train(theirs)
    assert found.losses == expected.losses
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_columns_of_zeros_behind_mamba2s_projection_are_nobodys(layout, monkeypatch):
    """200 columns, or 100 of a tensor rank: the scan gets those, in place; as many as FP8 GEMMs want go through the projection."""
    monkeypatch.setattr(Mamba2, "columns", lambda self, plan: 16)

    def widths(rig):
        seen, scan = [], upstream.mamba_split_conv1d_scan_combined
        # What Megatron says in the model's config later, such as the loss's scale, each mixer has to read.
        assert all(m.config is rig.config for m in rig.model.modules() if isinstance(m, upstream.MambaMixer))

        def look(packed, *weights, **kw):
            seen.append((packed.size(-1), packed.stride(-2) % 16))
            return scan(packed, *weights, **kw)

        upstream.mamba_split_conv1d_scan_combined = look
        harness.step(rig)
        return set(seen)

    ours, theirs = (
        Case("M*M", strided=True, keys={"mamba2": {"padded_projection": on}}, **layout) for on in (True, False)
    )
    assert on_ranks(ours, widths)[0] == {(200 // layout.get("tp", 1), 0)}
    found, expected = train(ours), train(theirs)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_the_strided_norm_is_given_what_the_scan_wrote(layout):
    """No copy between them, and the same values."""

    def where(rig):
        seen, mixers = [], [m for m in rig.model.modules() if isinstance(m, mamba2.StridedMambaMixer)]
        for mixer in mixers:
            mixer.norm.register_forward_pre_hook(
                lambda _, inputs: seen.append(inputs[0].transpose(0, 1).is_contiguous())
            )
        harness.step(rig)
        return {type(m).__name__ for m in mixers}, set(seen)

    ours, theirs = (Case("M*M", strided=True, keys={"mamba2": {"strided_norm": on}}, **layout) for on in (True, False))
    assert on_ranks(ours, where)[0] == ({"StridedNormMambaMixer"}, {True})
    assert on_ranks(theirs, where)[0] == ({"StridedMambaMixer"}, {False})
    found, expected = train(ours), train(theirs)
    assert found.losses == expected.losses
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-4, atol=1e-6)


def test_the_local_dispatcher_waits_once_and_late(monkeypatch):
    """The GPU has the shared expert and the sort to do while the host waits for the counts; nobody waits in the backward pass."""

    def order(rig):
        seen, (layer,) = [], [m for m in rig.model.modules() if isinstance(m, MoELayer)]
        event = SimpleNamespace(synchronize=lambda: seen.append("wait"))
        stream = SimpleNamespace(record_event=lambda: seen.append("copy") or event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        sort = moe.permute
        monkeypatch.setattr(moe, "permute", lambda *a, **kw: seen.append("sort") or sort(*a, **kw))
        for name in ("router", "shared_experts", "experts"):
            getattr(layer, name).register_forward_pre_hook(lambda *_, name=name: seen.append(name))
        harness.step(rig)
        assert layer.shared_output is None, "it would be held until the next pass"
        return seen

    (found,) = on_ranks(Case("E", dispatcher="local", microbatches=1), order)
    assert found == ["router", "copy", "shared_experts", "sort", "wait", "experts"]


@pytest.mark.few(1)
@pytest.mark.parametrize("modules", [["moe"], ["shared_experts"]], ids=str)
def test_the_local_dispatcher_under_recompute(modules):
    def no_cuda_state(rig):
        rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    kept, computed = (train(Case("*E", dispatcher="local", config=c), no_cuda_state) for c in ({}, again))
    assert computed.losses == kept.losses
    torch.testing.assert_close(computed.gradients, kept.gradients, rtol=1e-4, atol=1e-6)


def test_the_fused_activation_is_the_same_formula():
    """And it is the fused one that runs, in each of two microbatches; the shared expert's is Megatron's plain one either way."""

    def count(rig):
        calls, fused = [], experts.weighted_squared_relu_impl
        experts.weighted_squared_relu_impl = lambda x, probs: calls.append(probs.dtype) or fused(x, probs)
        harness.step(rig)
        return calls

    one = Case("*E", config={"use_fused_weighted_squared_relu": True})
    assert on_ranks(one, count) == [[torch.float32] * 2]
    plain, fused = train(Case("*E")), train(one)
    assert fused.losses == pytest.approx(plain.losses, rel=1e-6)
    torch.testing.assert_close(fused.gradients, plain.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_mla_under_tensor_without_sequence_parallelism_drifts_apart():
    """Megatron trains this pair: the replicated down projections get other gradients on each rank (0.19.2)."""
    with pytest.raises(AssertionError, match=r"replicas of .* differ"):
        train(Case("+-", tp=2, config={"sequence_parallel": False}))
    assert train(Case("*-", tp=2, config={"sequence_parallel": False})).losses


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_trained(whole, family):
    """No exceptions: 64 tokens reach each of the 4 experts, and the top-k indexer has its own loss."""
    still = [key for key, g in whole[family].gradients.items() if not g.abs().sum() > 0]
    experts = {key: g for key, g in whole[family].gradients.items() if ".experts.experts." in key}
    still += [f"{key}[{i}]" for key, g in experts.items() for i in range(len(g)) if not g[i].abs().sum() > 0]
    assert experts and not still


def test_latent_norms_take_part():
    """The norms of the latents do something: without them the losses differ, and Megatron refuses half of the pair."""
    normed = train(Case("+-D"))
    plain = {"qk_layernorm": False}
    with pytest.raises(harness.RankFailed, match="supposed to be disabled"):
        train(Case("+-D", config=plain))
    bare = train(Case("+-D", config=plain, latent_norm=False))
    assert {key.split(".")[-2] for key in normed.gradients.keys() - bare.gradients.keys()} == {
        "q_layernorm",
        "kv_layernorm",
    }
    assert bare.losses != pytest.approx(normed.losses, rel=1e-3)


# The optimizer --------------------------------------------------------------------------------------------------------


def muon_parameters(rig):
    """Names on this rank that Megatron's own factory gives to Muon; the others, which it gives to Adam."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    config = OptimizerConfig(optimizer="muon", lr=1e-3, muon_tp_mode="blockwise", use_distributed_optimizer=False)
    chain = get_megatron_optimizer(config, [rig.ddp], get_standard_config_overrides(config))
    names = {p: name for name, p in rig.model.named_parameters()}
    split = {True: set(), False: set()}
    for optimizer in chain.chained_optimizers:
        muon = "Muon" in type(optimizer.optimizer).__name__
        split[muon] |= {names[p] for group in optimizer.param_groups for p in group["params"]}
    return split[True], split[False]


def test_muon_takes_every_matrix_but_embedding_and_output():
    ((muon, adam),) = on_ranks(in_layout(DESIGN), muon_parameters)
    assert not muon & adam
    shapes = harness.shapes(in_layout(DESIGN))
    assert muon | adam == shapes.keys()
    tables = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert muon == {name for name, shape in shapes.items() if len(shape) == 2} - tables
    layers = "decoder.layers."
    # Not obvious, and so: the router, the indexer, the packed projection of Mamba as one matrix.
    assert {layers + "1.mlp.router.weight", layers + "7.mixer.in_proj.weight", "mtp.layers.0.eh_proj.weight"} <= muon
    assert layers + "2.self_attention.core_attention.indexer.linear_weights_proj.weight" in muon
    assert {layers + "7.mixer.conv1d_weight", layers + "7.mixer.A_log", layers + "1.pre_mlp_layernorm.weight"} <= adam


def test_the_copy_of_the_embedding_that_mtp_keeps_on_the_last_stage_is_not_muons():
    ranks = on_ranks(in_layout(DESIGN, pp=2), muon_parameters)
    assert all("embedding.word_embeddings.weight" in adam for _, adam in ranks)


def test_the_table_of_n_grams_is_adams_and_its_projection_muons():
    """The table is a vector to Megatron, and so has no weight decay; the name `embedding` keeps no matrix from Muon."""
    keys = {"enabled": True, "order": 2, "heads": 1, "buckets": 8, "width": 4, "document_end": None}
    ((muon, adam),) = on_ranks(Case("*-", features={"ngram_hash": keys}), muon_parameters)
    assert (
        "embedding.ngrams.projection" in muon and {"embedding.ngrams.table", "embedding.word_embeddings.weight"} <= adam
    )


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save(folder, rig):
    from megatron.core import dist_checkpointing

    for i, bias in enumerate(expert_biases(rig.model)):
        bias.copy_(torch.arange(len(bias)) + i)
    dist_checkpointing.save(state(rig), str(folder))
    return harness.weights(rig)


def load(folder, rig):
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for tensor in (*rig.model.parameters(), *expert_biases(rig.model)):
            tensor.fill_(torch.nan)
    rig.model.load_state_dict(dist_checkpointing.load(state(rig), str(folder)))
    biases = [(b.dtype, b.tolist()) for b in expert_biases(rig.model)]
    return harness.weights(rig), biases


def state(rig):
    return rig.model.sharded_state_dict(metadata={"dp_cp_group": rig.model.pg_collection.dp_cp})


def expert_biases(model):
    return [b for name, b in model.named_buffers() if name.endswith("expert_bias")]


@pytest.mark.slow
@pytest.mark.parametrize(("written", "read"), [("tp2", "tp2"), ("one", "tp2"), ("tp2", "one"), ("pp2", "ep2")])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_is_read_in_any_layout(tmp_path, family, written, read):
    layouts = LAYOUTS | {"one": {}}
    saved = on_ranks(in_layout(FAMILIES[family], **layouts[written]), partial(save, tmp_path))
    loaded = on_ranks(in_layout(FAMILIES[family], **layouts[read]), partial(load, tmp_path))
    before, after = harness.assemble(saved), harness.assemble([weights for weights, _ in loaded])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for _, biases in loaded:
        # Each router's own, in fp32 (a stage that was saved alone counted its routers from 0).
        first = biases[0][1][0]
        assert all(dtype is torch.float32 for dtype, _ in biases)
        assert all(values == [values[0] + i for i in range(4)] for _, values in biases) and first == 0


# Megatron's own spec --------------------------------------------------------------------------------------------------


def differences(ours, theirs, path=""):
    """Dotted paths at which two specs differ; looks into partials, which compare by identity."""
    if type(ours) is not type(theirs):
        return {path}
    if isinstance(ours, partial):
        pairs = {"func": (ours.func, theirs.func), "args": (ours.args, theirs.args)}
        pairs |= {key: (ours.keywords.get(key), theirs.keywords.get(key)) for key in ours.keywords | theirs.keywords}
    elif isinstance(ours, list):
        pairs = dict(enumerate(zip(ours, theirs, strict=True)))
    elif dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        pairs = {f.name: (getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours)}
    else:
        return set() if ours == theirs else {path}
    return {d for key, (a, b) in pairs.items() for d in differences(a, b, f"{path}.{key}".lstrip("."))}


def compared_with_upstream():
    """Slot -> where it differs. Without TE its classes are Megatron's mocks, one per class: still told apart."""
    import megatron.core.extensions.transformer_engine_spec_provider as provider
    import megatron.core.models.hybrid.hybrid_layer_specs as upstream

    if not te.HAVE_TE:
        te.HAVE_TE = True
        for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TEActivationOp"):
            cls = type(name, (), {})
            setattr(te, name, cls)
            setattr(provider, name, cls)
        upstream = importlib.reload(upstream)
    theirs, found = upstream.hybrid_stack_spec.submodules, {}
    for pattern in ("*EM-/*-", "+DEM/+-"):
        ours = hybrid_stack_spec(plan_of(pattern)).submodules
        built = {f.name: getattr(ours, f.name) for f in dataclasses.fields(ours)}
        for slot, spec in built.items():
            if not (isinstance(spec, ModuleSpec) and spec.module is AbsentSlot):
                found[slot] = differences(spec, getattr(theirs, slot))
    return found


def test_slots_are_megatrons_own_but_for_the_latent_norms():
    latent = {f"submodules.self_attention.submodules.{name}" for name in ("q_layernorm", "kv_layernorm")}
    assert in_child(compared_with_upstream) == {
        "attention_layer": set(),
        "mamba_layer": set(),
        "mlp_layer": set(),
        "moe_layer": set(),
        "mtp_block_spec": set(),
        "mla_layer": latent,
        "dsa_layer": latent,
    }


def attended_by_flash():
    """The core attentions of GQA, MLA, DSA and MTP's attention with FlashAttention 4, on a host that would have it."""
    compared_with_upstream()
    flash_attention.unserved = lambda: ()
    found = {}
    for pattern in ("*EM-/*-", "+DEM/+-"):
        plan = plan_of(pattern)
        plan.recipe.precision.attention_kernels = "flash_attention_4"
        layers = hybrid_stack_spec(plan).submodules
        for slot in ("attention_layer", "mla_layer", "dsa_layer"):
            spec = getattr(layers, slot)
            if spec.module is not AbsentSlot:
                core = spec.submodules.self_attention.submodules.core_attention
                found[slot] = core is flash_attention.FlashAttention
    return found, os.environ["NVTE_FLASH_ATTN_V4"]


def test_flash_attention_stands_where_a_recipe_says_so():
    """And Transformer Engine is told to leave it alone."""
    found, told = in_child(attended_by_flash)
    assert found == {"attention_layer": True, "mla_layer": True, "dsa_layer": False} and told == "0"


@pytest.mark.parametrize(
    ("found", "capability", "told"),
    [
        ({}, (9, 0), [f"{name} is not installed" for name in FLASH_PACKAGES]),
        (FLASH_PACKAGES | {"flash-attn-4": "4.0.0b29"}, (9, 0), ["flash-attn-4 is 4.0.0b29"]),
        (FLASH_PACKAGES, (10, 0), ["has been run on Hopper alone"]),
        (FLASH_PACKAGES, (9, 0), ["cannot be imported: ModuleNotFoundError"]),
    ],
)
def test_hosts_that_do_not_run_flash_attention_are_refused(found, capability, told, monkeypatch):
    monkeypatch.setattr(flash_attention, "installed", found.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    problems = list(flash_attention.unserved())
    assert len(problems) == len(told) and all(p.key == "precision.attention_kernels" and p.hint for p in problems)
    assert all(words in p.message for words, p in zip(told, problems, strict=True))


# Refusals -------------------------------------------------------------------------------------------------------------


def problems(*args, **kwargs):
    with pytest.raises(Refused) as refused:
        hybrid_stack_spec(*args, **kwargs)
    return [p.message for p in refused.value.problems]


def test_a_mixer_without_a_norm_is_refused():
    column, row = modules.CpuBackend().column_parallel_linear(), modules.CpuBackend().row_parallel_linear()
    bare = ModuleSpec(modules.ToyMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    (found,) = problems(plan_of("3*"), modules.CpuBackend(), {"mamba3": bare})
    assert found == "the mixer of `mamba3` has no norm for its input, and the M slot has none"


class NoNormAndLinear(LocalSpecProvider):
    """Megatron's local backend: it has no fused norm, so the norm would be missing from these layers."""

    def linear(self):
        return modules.ReplicatedLinear


class NoAttention(modules.CpuBackend):
    def core_attention(self):
        return IdentityOp


@pytest.mark.parametrize(
    ("pattern", "backend", "slots"),
    [
        (
            "*-M",
            NoNormAndLinear(),
            {"attention_layer": "linear_qkv", "mlp_layer": "linear_fc1", "mamba_layer": "in_proj"},
        ),
        ("+D", NoAttention(), {"mla_layer": "core_attention"}),
    ],
)
def test_an_empty_slot_is_refused(pattern, backend, slots):
    found = problems(plan_of(pattern), backend)
    assert len(found) == len(slots)
    for slot, field in slots.items():
        assert any(f"slot `{slot}` would be built without" in p and f"{field}`" in p for p in found)


def test_a_slot_that_the_plan_does_not_use_cannot_be_built():
    spec = hybrid_stack_spec(plan_of("*-"), modules.CpuBackend())
    with pytest.raises(AssertionError, match="the plan has no layer for slot moe_layer"):
        build_module(spec.submodules.moe_layer, config=None, layer_number=3)


def test_without_transformer_engine_nothing_is_built_by_default(monkeypatch):
    monkeypatch.setattr(te, "HAVE_TE", False)
    assert problems(plan_of("*-")) == ["Transformer Engine cannot be imported, so no trainable stack can be built"]
    monkeypatch.setattr(te, "HAVE_TE", True)
    monkeypatch.setattr(te, "TEColumnParallelGroupedLinear", None)
    assert problems(plan_of("*-")) == ["this Transformer Engine has no grouped linear layer for the experts"]


@pytest.mark.parametrize("grouped", [True, False])
def test_the_recipe_decides_about_grouped_gemm(grouped):
    """Megatron's own hybrid spec groups whatever the flag says."""
    asked = []

    class Backend(modules.CpuBackend):
        def grouped_mlp_modules(self, moe_use_grouped_gemm):
            asked.append(moe_use_grouped_gemm)
            return super().grouped_mlp_modules(True)

    hybrid_stack_spec(dataclasses.replace(plan_of("*E"), recipe=recipe_of(grouped_gemm=grouped)), Backend())
    assert asked == [grouped]
