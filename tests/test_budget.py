"""The budget: what each bucket does not care about, sums, published figures, what is refused, and the command."""

import importlib.util
import io
import json
import re
import sys
from functools import cache
from math import isclose, lcm
from pathlib import Path
from statistics import median

import pytest
import yaml
from command import warm
from hf_configs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from presets import lowered
from rich.console import Console

from nam_megatron import migrate
from nam_megatron.budget import __main__ as budget_command
from nam_megatron.budget import budget, container, ends, parameters, search, static
from nam_megatron.budget.__main__ import terminal
from nam_megatron.budget.cost import cost, megatrons_gaps
from nam_megatron.budget.memory import Budget, Moment, StageBudget, _Moving, in_flight
from nam_megatron.budget.picture import HUES
from nam_megatron.budget.serving import serve
from nam_megatron.budget.text import PHASES, against
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.features.recompute import groups
from nam_megatron.lint import __main__ as lint_command
from nam_megatron.lint import recipe
from nam_megatron.recipe import at, load, to_tree
from nam_megatron.words.sizes import BUCKETS, GIB, PARAMETERS, Group, Held, Line, Param, Sizes, Stage, _code

ROOT = Path(__file__).parents[1]
MEASURED = [
    entry
    for device in ("h200", "h100")
    for entry in json.loads((ROOT / "benchmarks" / f"measured_{device}.json").read_text())["entries"]
]
COMMAND = "nam_megatron.budget.__main__"
WEIGHTS = tuple(PARAMETERS.values())
STATIC = (*WEIGHTS, "gradients", "matrix optimizer", "other optimizer")
CORE = ("attention", "mamba2", "moe", "mla", "dsa", "mlp")


@pytest.mark.slow
def test_a_cluster_of_h100s_has_their_memory():
    clusters = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("h100_*.yaml"))
    assert clusters
    for name in clusters:
        assert plan_of("nam56r_native_dp", f"cluster={name}").recipe.device.name == "h100"
    # who says so has it
    assert plan_of("nam56r_native_dp", "cluster=h100_8", "device=h200").recipe.device.name == "h200"


def plan_of(preset, *overrides):
    return lowered(preset, *overrides).plan


def bill(preset, *overrides, phase="steady") -> dict[tuple[str, str], int]:
    """(bucket, owner) -> bytes, of stage 0."""
    found: dict[tuple[str, str], int] = {}
    for line in budget(plan_of(preset, *overrides)).stages[0].moments[phase].lines:
        key = line.bucket, line.owner
        found[key] = found.get(key, 0) + line.bytes
    return found


def of(found, *buckets, owners=None):
    return {k: n for k, n in found.items() if k[0] in buckets and (owners is None or k[1] in owners)}


# What each bucket does not care about ---------------------------------------------------------------------------------

NATIVE = ("nam56r_native_dp",)
DENSE = ("nam56r_native_dp", "model.letters.E=mlp", "parallel.tensor=2")  # MoE demands sequence parallelism
SPLIT = ("nam56r_nemo_native", "model.vocab_size=1024")  # its peak is in a layer
LATENT = ("nam56r", "lane=native_dp", "model.substitute=[]")
RECOMPUTE = ("feature.recompute.granularity=selective", "feature.recompute.modules=[moe_act,shared_experts,layernorm]")
FULL = ("feature.recompute.granularity=full", "feature.recompute.method=uniform", "feature.recompute.layers=1")
GRAPHS = (
    "feature.cuda_graphs.impl=transformer_engine",
    "feature.cuda_graphs.modules=[attn,mamba,moe_router,moe_preprocess]",
)
DULL = (
    "schedule.seed=7",
    "schedule.train_steps=9999",
    "optim.lr=1e-3",
    "data.workers=9",
    "schedule.global_batch_size=128",
)
WEIGHED = ("execution.moe.fused_weighted_squared_relu=true",)
OVERLAP = ("enabled", "overlap_grad_reduce", "overlap_param_gather")
HERE = ("workspaces", "allocator overhead")
REST = (*HERE, "runtime reserve")  # which has a share for each kind of process group

# name -> (the plan, what is changed, buckets that stay, owners they are compared for or None)
INDIFFERENT = {
    "experts: replicated and tensor-sharded": (NATIVE, ("parallel.expert=4",), (*WEIGHTS[:2], "logits and loss", *HERE), None),
    "experts: other layers": (NATIVE, ("parallel.expert=4",), ("activations",), ("attention", "mamba2", "ends")),
    "sequence: static": (DENSE, ("parallel.sequence=true",), (*STATIC, "logits and loss", *REST), None),
    "context: static": (NATIVE, ("parallel.context=2",), (*STATIC, *HERE), None),
    "micro batch: static": (NATIVE, ("schedule.micro_batch_size=2",), (*STATIC, *REST), None),
    "sequence length: static": (NATIVE, ("model.seq_length=2048",), (*STATIC, *REST), None),
    "data ranks: all but the optimizer": (
        NATIVE, ("cluster=h200_4",), (*WEIGHTS, "gradients", "activations", "routing scratch", "logits and loss", *REST), None,
    ),
    "optimizer: all but itself": (
        NATIVE, ("optim=muon",), (*WEIGHTS, "gradients", "activations", "routing scratch", "logits and loss", *REST), None,
    ),
    "gradient dtype: all but gradients": (
        NATIVE, ("precision.grad_reduce=bf16",), (*WEIGHTS, "other optimizer", "activations", "logits and loss", *REST), None,
    ),
    "recompute: all but activations": (NATIVE, RECOMPUTE, (*STATIC, "routing scratch", "logits and loss", *REST), None),
    "recompute of MoE: other layers": (NATIVE, RECOMPUTE, ("activations",), ("attention", "mamba2", "ends")),
    "full recompute: static and loss": (NATIVE, FULL, (*STATIC, "logits and loss", *REST), None),
    "loss fusion: all but the loss": (
        NATIVE, ("precision.cross_entropy=compiled",), (*STATIC, "activations", "routing scratch", *REST), None,
    ),
    "our loss: all but the loss": (
        NATIVE, ("precision.cross_entropy=fused",), (*STATIC, "activations", "routing scratch", *REST), None,
    ),
    "vocabulary: the layers": (NATIVE, ("model.vocab_size=131072",), ("activations", "routing scratch", *REST), None),
    "prediction depths: the trunk": (LATENT, ("feature.mtp.depths=2",), ("activations", "routing scratch", *REST), None),
    "graphs: static and loss": (NATIVE, GRAPHS, (*STATIC, "activations", "routing scratch", "logits and loss", *REST), None),
    "FP8: bf16 state": (
        ("nam56r_native_dp", "model.blocks.mamba2.heads=64"), ("precision=fp8_tensorwise",), (*STATIC, "logits and loss"), None,
    ),
    "overlap: everything": (
        NATIVE, ("feature.distributed_optimizer.overlap_param_gather=false",), BUCKETS, None,
    ),
    "what decides no shape: everything": (NATIVE, DULL, BUCKETS, None),
    "fused activation: all but activations": (NATIVE, WEIGHED, (*STATIC, "routing scratch", "logits and loss", *REST), None),
    "fused activation: other layers": (NATIVE, WEIGHED, ("activations",), ("attention", "mamba2", "ends")),
    "fused activation: nothing where it is recomputed": ((*NATIVE, *RECOMPUTE), WEIGHED, BUCKETS, None),
    "strides and the dispatcher: everything": (
        NATIVE, ("execution.mamba2.strided=true", "execution.moe.dispatcher=local"), BUCKETS, None,
    ),
    "tensor ranks: the inputs that they gather": (SPLIT, ("parallel.tensor=4",), ("communication",), ("parallel",)),
    "streams: the layers": (NATIVE, ("feature.mhc.streams=4",), ("activations", "routing scratch", *REST), None),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("case", INDIFFERENT)
def test_bucket_does_not_care(case):
    base, change, buckets, owners = INDIFFERENT[case]
    before, after = bill(*base), bill(*base, *change)
    assert of(before, *buckets, owners=owners) and of(before, *buckets, owners=owners) == of(
        after, *buckets, owners=owners
    )


def test_dense_layers_route_nothing_and_gather_nothing_without_sequence_parallelism():
    for size in (1, 2, 4):
        found = bill("nam56r_native_dp", "model.letters.E=mlp", f"parallel.tensor={size}")
        assert not of(found, "routing scratch") and not of(found, "communication", owners=("parallel",))


def test_the_fused_activation_keeps_the_unweighed_one_no_more():
    plain, fused = bill(*NATIVE), bill(*NATIVE, *WEIGHED)
    rows, width, layers = 4 * 4096 * 4, 896, 22  # of each microbatch: tokens x top-k, bf16
    assert plain["activations", "moe"] - fused["activations", "moe"] == 2 * rows * width * layers


def test_only_transformer_engines_grouped_gemm_has_a_workspace():
    """Measured 141 MB apart (benchmarks/measured_h200.json: native52_one and native52_one_torch, steady)."""
    peak = {}
    for gemm in ("transformer_engine", "torch"):
        words = ("cluster=h200_1", "schedule.global_batch_size=16", f"execution.moe.expert_gemm={gemm}")
        peak[gemm] = budget(lowered("nam56r_native_dp_fused", *words).plan).worst.moments["steady"].allocated
    assert peak["transformer_engine"] - peak["torch"] == pytest.approx(141e6, rel=0.05)


def test_a_gradient_of_each_shape_stays_where_gemms_add_the_real_ones():
    """Transformer Engine's get_dummy_wgrad; the output layer's has no element."""

    def lies(*words: str) -> list[int]:
        found = []
        for accumulates in ("true", "false"):
            said = f"precision.fused_grad_accumulation={accumulates}"
            stages = budget(plan_of("nam56r_native_dp_fused", *words, said)).stages
            found.append([stage.moments["between_steps"].allocated for stage in stages])
        return [ours - plain for ours, plain in zip(*found, strict=True)]

    one = ("cluster=h200_1", "schedule.global_batch_size=16")
    h, f, fs = 3584, 896, 1024
    # queries, keys and values; outputs of both mixers; Mamba-2's input; shared expert
    linear = 4608 * h + h * h + 8248 * h + 2 * h * fs
    assert lies(*one) == [2 * linear]
    by_te = "execution.moe.expert_gemm=transformer_engine"
    assert lies(*one, by_te) == [2 * (linear + 2 * h * f)]
    halves = ("cluster=h200_2", "schedule.global_batch_size=16", by_te)
    assert lies(*halves, "parallel.pipeline=2") == [2 * (linear + 2 * h * f)] * 2
    tensor = (
        "parallel.tensor=2",
        "parallel.sequence=true",
        "execution.moe.dispatcher=alltoall",
        "execution.moe.fused_router_gradient=false",
        "execution.mamba2.strided=false",
        "execution.mamba2.strided_norm=false",
    )
    assert lies(*halves, *tensor) == [linear + 4 * h * f]  # experts are whole
    alike = f"model.blocks.moe.shared_expert_hidden_size={f}"  # but not the shared one, of the same width
    assert lies(*halves, *tensor, alike) == [linear - 2 * h * (fs - f) + 4 * h * f]


@pytest.mark.parametrize("latent", [0, 1792, 3584])
def test_rows_of_experts_are_as_wide_as_their_latent_and_shared_by_expert_tensor_ranks(latent):
    """On the way there an expert's rows are held three times, back twice; ranks that share experts get the rows of all."""
    found = []
    for size in (1, 2):
        layout = ("parallel.tensor=2", "parallel.sequence=true", f"parallel.expert_tensor={size}", "parallel.expert=2")
        words = (f"model.blocks.moe.latent_size={latent}",) if latent else ()
        plan = plan_of("nam56r_nemo_native", "cluster=h200_4", *layout, *words)
        z, moe = Sizes.of(plan.site), plan.recipe.blocks.moe
        there, back = [line.bytes for line in moe.working(z, None)][:2]
        rows = moe.top_k * z["Ts"] * size
        assert there - back == 2 * rows * (latent or 3584)
        found.append({line.name: line.bytes for line in moe.activations(z, None)})
    one, two = found
    assert two["rows for experts"] == 2 * one["rows for experts"] == 4 * moe.top_k * z["Ts"] * (latent or 3584)
    for name in ("first projection", "weighed activation"):
        assert one[name] == two[name] == 2 * moe.top_k * z["Ts"] * moe.expert_hidden_size


SIX = ("cluster.gpus_per_node=6", "schedule.global_batch_size=48")


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), False), (("cluster.gpus_per_node=8",), False), (SIX, True),
        ((*SIX, *(f"feature.distributed_optimizer.overlap_{what}=false" for what in ("param_gather", "grad_reduce"))), False),
        ((*SIX, "optim=muon"), False), ((*SIX, "model.blocks.moe.expert_hidden_size=2688"), False),
    ],
)  # fmt: skip
def test_a_copy_of_experts_weights_is_forecast_where_buckets_part_them(words, copies):
    """896 x 3584 elements are a multiple of 128 and of each power of two, and not of three; Muon's weights lie in no bucket."""
    plan = plan_of("nam56r_native_dp_fused", "cluster=h200_1", "schedule.global_batch_size=32", *words)
    lines = plan.recipe.blocks.moe.working(Sizes.of(plan.site), None)
    found = [line.bytes for line in lines if line.why.startswith("a copy of a projection's weights")]
    assert found == [2 * 16 * 896 * 3584] * copies


def test_dispatch_counts_do_not_grow_with_tokens_or_tensor_ranks():
    def counts(*overrides):
        lines = budget(plan_of("nam56r_nemo_native", *overrides)).stages[0].steady.lines
        return [line.bytes for line in lines if line.name == "dispatch counts"]

    assert counts() == counts("schedule.micro_batch_size=1") == counts("parallel.tensor=4")


TRAINING_ONLY = (
    "optim=muon",
    "precision.grad_reduce=bf16",
    "schedule.micro_batch_size=1",
    "precision.cross_entropy=compiled",
)


@pytest.mark.parametrize("change", [*((word,) for word in TRAINING_ONLY), RECOMPUTE, FULL])
def test_serving_ignores_training_only_state(change):
    ours, theirs = (serve(plan_of("nam56r_native_dp", *c), 8, 1000) for c in ((), change))
    assert [(s.weights, s.pools, s.cache_map, s.logits) for s in ours] == [
        (s.weights, s.pools, s.cache_map, s.logits) for s in theirs
    ]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (4, 2)])
def test_ranks_share_what_is_served(tensor, pipeline):
    layout = (
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"parallel.sequence={str(tensor > 1).lower()}",
    )
    (one,), many = (serve(plan_of(*NATIVE, "cluster=h200_8", *words), 8, 1000) for words in ((), layout))
    assert [tensor * s.logits for s in many] == [*[0] * (pipeline - 1), one.logits]
    assert one.logits == 8 * one.plan.recipe.model.vocab_size * (2 + 4), "of a token, in bf16 and fp32"
    assert tensor * sum(s.recurrent for s in many) == one.recurrent
    assert tensor * sum(s.cache("paged") for s in many) == one.cache("paged")


SCALES = {
    "schedule.micro_batch_size=2": {"activations": 1 / 2, "routing scratch": 1 / 2, "logits and loss": 1 / 2},
    "parallel.expert=4": {"expert parameters": 1 / 4},
    "cluster=h200_4": {"other optimizer": 2},
    "precision.grad_reduce=bf16": {"gradients": 1 / 2},
    "model.hidden_size=7168": {"tensor-sharded parameters": 2, "expert parameters": 2},
    "device.allocator_gib=3.0": {"allocator overhead": 2},
}


@pytest.mark.parametrize("change", SCALES)
def test_each_bucket_grows_as_what_it_cares_about(change):
    """The other way round, so that no bucket above is constant by mistake."""
    base, after = bill(*NATIVE), bill(*NATIVE, change)
    found = {bucket: sum(of(after, bucket).values()) / sum(of(base, bucket).values()) for bucket in SCALES[change]}
    assert found == pytest.approx(SCALES[change], rel=0.02)


# Sums and shapes ------------------------------------------------------------------------------------------------------


def test_formula_says_what_is_computed():
    z = {"T": 3, "n": 5, "g": 2, "d": 7, "t": 4, "min": 9}
    for formula, expected in {
        "2 T (n + 2 g) d / t": 2 * 3 * (5 + 4) * 7 / 4,
        "(2 + n) T d": 7 * 3 * 7,
        "4 T n (d + 1) / (n t)": 4 * 3 * 5 * 8 / 20,
        "2 min(T, max(1e2, n)) + 1": 7,
        "3.25 T - 1": 8.75,
    }.items():
        assert eval(_code(formula), {"max": max, "min": min}, {k: v for k, v in z.items() if k != "min"}) == expected


def test_formula_with_a_stray_sign_is_our_mistake():
    with pytest.raises(AssertionError):
        _code("2 T % n")


@pytest.mark.parametrize("ranks", [1, 2, 6, 48, 256])
def test_a_buffer_ends_where_all_its_ranks_have_as_much(ranks):
    sizes, starts = (1, 64, 65, 1000), 64 + 64 + 128 + 1024  # each begins at a multiple of 64
    held = tuple(Held(Param("w", (n,), "replicated", "other"), "mlp", None, n, 1) for n in sizes)
    whole = sum(sizes) + Group("dense", held, ranks, "N").padding
    assert 0 <= whole - starts < lcm(ranks, 128) and whole % ranks == whole % 128 == 0


@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_stages_share_the_parameters(pipeline):
    plan = plan_of("nam56r_native_dp", "cluster=h200_8", f"parallel.pipeline={pipeline}")
    assert sum(s.parameters for s in budget(plan).stages) == parameters(plan)[0]


def test_a_stage_has_every_so_manieth_chunk():
    plan = plan_of("nam56r_native_dp", "cluster=h200_2", "parallel.pipeline=2", "parallel.virtual_pipeline=2")
    first = [[chunk[0].number for chunk in stage.chunks] for stage in static.stages(plan)]
    assert first[0][0] == 1 < first[1][0] < first[0][1] < first[1][1]


@pytest.mark.parametrize(
    ("words", "tables"),
    [
        (("deepseek_v2_lite", "feature.mtp.depths=2"), [27 + 2]),
        (("deepseek_v2_lite", "feature.mtp.depths=1", "parallel.pipeline=2", "parallel.expert=4"), [14, 13 + 1]),
        (("deepseek_v3_2",), [16, 14, 16, 14, 16, 14, 16, 16]),  # an indexer's beside each layer's
        (("deepseek_v3_2", "model.blocks.dsa.full_every=2"), [12, 9, 12, 12, 12, 12, 12, 11]),
    ],
)  # fmt: skip
def test_each_module_that_yarn_turns_has_tables_of_its_own(words, tables):
    found = ({line.name: line.bytes for line in s.steady.lines} for s in budget(plan_of(*words)).stages)
    assert [lines["YaRN tables"] for lines in found] == [4 * 4096 * 64 * n for n in tables]


@pytest.mark.parametrize("words", [("nam56r", "lane=native_dp"), (*NATIVE, "model.tied_embeddings=true")])
def test_last_stage_has_the_embedding_again_under_mtp_or_tied_to_it(words):
    plan = plan_of(*words, "parallel.pipeline=2", "cluster=h200_8")
    table = plan.recipe.model.vocab_size * plan.recipe.model.hidden_size
    assert sum(s.parameters for s in budget(plan).stages) == parameters(plan)[0] + table


KEYS = {
    "schedule.micro_batch_size": st.integers(1, 6),
    "model.seq_length": st.sampled_from([512, 1024, 4096]),
    "model.depth": st.integers(12, 30),
    "parallel.tensor": st.sampled_from([1, 2, 4]),
    "parallel.expert": st.sampled_from([1, 2, 4]),
    "parallel.pipeline": st.sampled_from([1, 2, 4]),
    "feature.mtp.depths": st.integers(0, 2),
    "optim": st.sampled_from(["adamw", "muon"]),
    "feature.distributed_optimizer.enabled": st.booleans(),
}


def random_plan(words):
    sequence = f"parallel.sequence={str(words['parallel.tensor'] > 1).lower()}"
    enabled = str(words["feature.distributed_optimizer.enabled"]).lower()
    overlap = f"feature.distributed_optimizer.overlap_param_gather={enabled}"
    batch = 16 * words["schedule.micro_batch_size"]
    overrides = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in words.items()]
    return plan_of(
        "nam56r_nemo_native", *overrides, sequence, overlap, "cluster=h200_2x8", f"schedule.global_batch_size={batch}"
    )


@settings(max_examples=12, deadline=None)
@given(st.fixed_dictionaries(KEYS))
def test_any_plan_adds_up(words):
    plan = random_plan(words)
    ours = budget(plan)
    assert ours == budget(plan)
    assert len(ours.stages) == plan.recipe.parallel.pipeline
    for s in ours.stages:
        for moment in s.moments.values():
            assert moment.total == sum(moment.buckets.values()) >= moment.reserved >= moment.allocated > 0
            assert all(line.bytes >= 0 and line.why and line.owner for line in moment.lines)
        built, after = (s.moments[phase].buckets for phase in ("build", "after_init"))
        # as the modules made them, and in DDP's buffer
        times = 2 if plan.recipe.feature.distributed_optimizer.enabled else 1
        assert all(built[bucket] == times * after[bucket] for bucket in PARAMETERS.values())
        assert all(built[bucket] == after[bucket] for bucket in ("gradients", "communication")), (
            "DDP has made its buffers"
        )
        held = {phase: m.allocated for phase, m in s.moments.items()}
        assert held["after_init"] <= held["between_steps"] <= held["steady"]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.fixed_dictionaries(KEYS))
def test_more_samples_never_take_less(words):
    words = {**words, "schedule.micro_batch_size": min(words["schedule.micro_batch_size"], 3)}
    more = {**words, "schedule.micro_batch_size": 2 * words["schedule.micro_batch_size"]}
    small, large = (budget(random_plan(w)) for w in (words, more))
    for a, b in zip(small.stages, large.stages, strict=True):
        assert a.steady.allocated <= b.steady.allocated


def test_sharding_divides_what_it_says_it_shares():
    """Bytes a parameter on 8 ranks: facts of each optimizer, dense and experts alike."""
    count = parameters(plan_of(*NATIVE))[0]

    def rate(*overrides, which=STATIC):
        return round(sum(of(bill(*NATIVE, *overrides), *which).values()) / count, 2)

    off = tuple(f"feature.distributed_optimizer.{k}=false" for k in OVERLAP)
    assert rate() == 2 + 4 + 12 / 8
    assert rate(*off) == 18
    fsdp, half = "feature.megatron_fsdp.enabled=true", "precision.grad_reduce=bf16"
    assert rate(fsdp) == (2 + 4 + 12) / 8 and rate(fsdp, half) == (2 + 2 + 12) / 8
    muon = rate("optim=muon", *off)
    assert 14 < muon < 18  # 14 for matrices, 18 for the rest
    assert rate("optim=muon") == pytest.approx(2 + 4 + 8 / 8, abs=0.15)


def test_full_recompute_keeps_one_input_a_layer():
    found = bill(*NATIVE, *FULL)
    # The first event is the loss: 52 inputs, what the final norm keeps and the RoPE table.
    tokens = 4 * 4096
    assert of(found, "activations", owners=("recompute",)) == {("activations", "recompute"): 52 * 2 * tokens * 3584}


def test_a_group_that_is_recomputed_holds_all_of_its_layers_up_to_the_one_at_work():
    whole, grouped = (
        _Moving(plan, Sizes.of(plan.site), static.stages(plan)[0], graphs=False).chunks[0][1:5]
        for plan in (plan_of(*NATIVE), plan_of(*NATIVE, *FULL[:2], "feature.recompute.layers=4"))
    )
    kept = [sum(line.bytes for line in part.kept) for part in whole]
    held = {}
    for name, lines in grouped[0].events:  # behind the layers' own what one of them needs besides, and the gradient
        held.setdefault(int(name.split()[1]), set()).add(sum(line.bytes for line in lines[:-2]))
    assert held == {n: {sum(kept[:n])} for n in range(1, 5)}


@pytest.mark.parametrize("phase", ["build", "first_step", "warm_up", "steady"])
def test_the_worst_moment_of_a_stage_is_the_largest_whatever_its_phase(phase):
    moments = {name: Moment(name, (Line("x", 1 + (name == phase), "1", "why"),)) for name in PHASES}
    found = StageBudget(Stage(0, 1, ()), 0, moments)
    assert found.worst is moments[phase] and found.peak_allocated == 2
    moments = {name: Moment(name, (Line("x", 1, "1", "why"),)) for name in PHASES}
    assert Budget(None, 0, 0, (StageBudget(Stage(0, 2, ()), 0, moments), found)).worst is found


def test_full_recompute_keeps_the_top_k_of_our_dsa():
    """Of the three layers that compute one: both runs of a layer use the same."""
    found = bill("nam56r", "lane=native_dp", *FULL)
    top_k = 8 * 4 * 4096 * 256 + 4 * 4 * 4096
    assert of(found, "activations", owners=("dsa",)) == {("activations", "dsa"): 3 * top_k}


def test_terminal_shows_bars_to_the_scale_of_the_device():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    ours, other = budget(plan_of(*NATIVE)), budget(plan_of("nam56r", *STOCK))
    terminal(ours, [other], console)
    bars = console.file.getvalue().splitlines()[:2]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", bar) for bar in bars]
    filled = [bar.count("█") / (bar.count("█") + bar.count("░")) for bar in plain]
    assert filled[0] == pytest.approx(ours.worst.steady.total / ours.capacity, abs=0.02)
    assert filled[1] == 1 and plain[1].endswith(f"{other.worst.steady.total / other.capacity:.1f} x the device")


def test_every_bucket_has_a_colour():
    assert tuple(HUES) == BUCKETS


# Pipelines ------------------------------------------------------------------------------------------------------------


def sets(pipeline, virtual, rank, batches):
    overrides = (f"parallel.pipeline={pipeline}", f"parallel.virtual_pipeline={virtual}", "cluster=h200_8")
    data = 8 // pipeline
    plan = plan_of("nam56r_native_dp", *overrides, f"schedule.global_batch_size={4 * data * batches}")
    found = in_flight(plan, static.stages(plan)[rank])
    return max(sum(counts) + 1 for counts, _ in found)


def test_stages_hold_as_many_microbatches_as_the_schedule_lets_in():
    """1F1B: one less for each later stage. Interleaved: Narayanan et al. 2021, (v - 1) p + 2 (p - rank - 1) + 1 pieces."""
    assert [sets(4, 1, rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [sets(4, 1, rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert [sets(4, 2, rank, 16) for rank in range(4)] == [11, 9, 7, 5]
    assert [sets(4, 2, rank, 4) for rank in range(4)] == [8, 8, 7, 5]


def test_every_microbatch_that_goes_in_comes_out():
    plan = plan_of("nam56r_native_dp", "parallel.pipeline=4", "parallel.virtual_pipeline=2", "cluster=h200_8")
    for stage in static.stages(plan):
        assert all(min(counts) >= 0 for counts, _ in in_flight(plan, stage))


# The real model on fake tensors, recorded -----------------------------------------------------------------------------

# Bytes alive after the forward pass of Megatron's real HybridModel (megatron-core 0.19.2) on torch's fake tensors, with
# stand-ins that save what TE 2.20.2's and mamba-ssm's autograd functions save: GB, one layer, micro batch 4 (DSA: 1),
# vocabulary 128, the fp32 softmax included.
STOCK = ("execution.mla.kernels=megatron", "execution.dsa.kernels=megatron")
ONE = ("nam56r_native_dp", "model.depth=1", "model.vocab_size=128", "cluster=h200_1", "model.substitute=[]")
RECORDED = {
    "*": (("model.pattern=A",), 0.754),
    "E": (("model.pattern=E",), 1.376),
    "M": (("model.pattern=M",), 1.102),
    "-": (("model.pattern=E", "model.letters.E=mlp"), 1.721),
    "+": (("model.pattern=A", "model.letters.A=mla", STOCK[0]), 1.199),
    "D": (("model.pattern=A", "model.letters.A=dsa", STOCK[1], "schedule.micro_batch_size=1"), 12.669),
    "E moe_act": (("model.pattern=E", "modules=[moe_act]"), 1.141),
    "E moe": (("model.pattern=E", "modules=[moe]"), 0.481),
    "E shared_experts": (("model.pattern=E", "modules=[shared_experts]"), 1.309),
    "E layernorm": (("model.pattern=E", "modules=[layernorm]"), 1.259),
    "* core_attn": (("model.pattern=A", "modules=[core_attn]"), 0.884),
    "+ mla_up_proj": (("model.pattern=A", "model.letters.A=mla", STOCK[0], "modules=[mla_up_proj]"), 0.613),
    "+ layernorm": (("model.pattern=A", "model.letters.A=mla", STOCK[0], "modules=[layernorm]"), 1.081),
    "- mlp": (("model.pattern=E", "model.letters.E=mlp", "modules=[mlp]"), 0.362),
    "D core_attn": (("model.pattern=A", "model.letters.A=dsa", STOCK[1], "modules=[core_attn]", "schedule.micro_batch_size=1"), 0.273),
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("name", RECORDED)
def test_kept_activations_are_the_real_models(name):
    overrides, expected = RECORDED[name]
    words = [w.replace("modules=", "feature.recompute.modules=") for w in overrides]
    if words != list(overrides):
        words.append("feature.recompute.granularity=selective")
    plan = plan_of(*ONE, *words)
    z, (stage,) = Sizes.of(plan.site), static.stages(plan)
    kept = sum(
        line.bytes for chunk in _Moving(plan, z, stage, graphs=False).chunks for part in chunk for line in part.kept
    )
    rope = sum(line.bytes for line in static.ends.buffers(z, stage) if line.name == "RoPE table")
    softmax = 4 * z["T"] * 128
    assert isclose(kept + rope + softmax, expected * 1e9, rel_tol=5e-3)


# Of NAM56R on one GPU, a layer: 4 x 4096 tokens of width 3584, 56 heads. Nothing measured them: written out by hand, in bf16 and fp32.
B, S, H, N = 4, 4096, 3584, 56
T = B * S
PLAIN = {
    "mla": {
        "input": 2 * T * H, "norms": 10 * T * H + 12 * T * (64 + 64), "normed latents": 2 * T * (64 + 64 + 64),
        "cos and sin": 4 * S * 64,
    },
    "dsa": {
        "queries, keys and latents": 6 * T * N * (64 + 64) + 4 * T * H, "scores": 13 * B * N * S * S,
        "indexer": 8 * B * 32 * S * S, "top-k": B * S * S,
    },
    "m2rnn": {"every state": 24 * T * 44 * 64 * 16},
    "mamba3": {"states": 16 * T * 7168 * 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_kernels_in_plain_torch_keep_what_autograd_keeps(kind):
    ours = budget(plan_of("nam56r", f"execution.{kind}.kernels=naive", "cluster=h200_1")).stages[0]
    found = {l.name: l.bytes / l.count for l in ours.moments["steady"].lines if l.owner == kind}
    assert {name: found.get(name) for name in PLAIN[kind]} == PLAIN[kind]


@pytest.mark.parametrize(
    ("preset", "letter", "tunes", "more"),
    [
        ("nam56r_native_dp", "A", 0, ()), ("nam56r_native_dp", "M", 1, ()), ("qwen3_next_80b_a3b", "M", 1, ()),
        ("nam56r_native_dp", "M", 0, ("precision.deterministic=true",)),
        ("nam56r", "M", 0, ()),  # ours, of one configuration each
    ],
)  # fmt: skip
def test_triton_tunes_other_peoples_kernels_in_the_first_step(preset, letter, tunes, more):
    words = (f"model.pattern={letter}", "model.depth=1", "model.vocab_size=128", "cluster=h200_1", "parallel.expert=1")
    words += ("model.substitute=[]", "feature.mtp.depths=0") if preset.startswith("nam") else ()
    moments = budget(plan_of(preset, *words, *more)).worst.moments
    assert sum(line.name == "autotuning" for line in moments["first_step"].lines) == tunes
    assert not any(line.name == "autotuning" for line in moments["steady"].lines)


@pytest.mark.slow
def test_table_of_long_sequences_is_todays():
    """benchmarks/tables.py has been run since the formulas changed: one row of it."""
    rows = (ROOT / "docs/log.md").read_text().splitlines()
    whole, pieces = (next(l for l in rows if l.startswith(f"| 65,536 | the {kept}")) for kept in ("input", "same"))
    words = ("model.seq_length=65536", "schedule.micro_batch_size=1", "schedule.global_batch_size=8")
    layouts = [(f"cluster=h200_{n}", f"parallel.context={c}") for n, c in ((1, 1), (2, 1), (8, 1), (2, 2), (4, 4))]

    def told(layout: tuple[str, ...], *more: str) -> str:
        return f"{budget(plan_of('nam56r_fused', *layout, *words, *more)).worst.steady.total / GIB:.1f}"

    assert [told(x, *FULL) for x in layouts] == [c.strip().partition(",")[0] for c in whole.strip("|").split("|")[2:]]
    assert told(layouts[0], "+overlay=long") == pieces.split("|")[3].strip()


def test_stages_exchange_what_a_tensor_rank_has_of_a_sequence():
    stages = ("cluster=h200_4", "parallel.pipeline=2")
    split = ("parallel.tensor=2", "parallel.sequence=true")
    plans = (plan_of("nam56r_native_dp", *stages, *words) for words in ((), split))
    lines = ({line.name: line.bytes for line in static._communication(Sizes.of(plan.site))} for plan in plans)
    whole, shared = (found["pipeline exchange"] for found in lines)
    assert whole == 2 * shared > 0


@pytest.mark.parametrize(
    ("method", "asked", "sizes"), [("uniform", 2, [2, 2, 1]), ("block", 2, [1, 1]), ("block", 9, [1] * 5)]
)
def test_layers_are_recomputed_in_groups_of_so_many_or_so_many_of_a_stage(method, asked, sizes):
    words = (*FULL, f"feature.recompute.method={method}", f"feature.recompute.layers={asked}")
    found = [*groups(load("nam56r", words).feature.recompute, 5)]
    assert [n for of, _ in found for n in of] == [*range(5)]
    assert [len(of) for of, checkpointed in found if checkpointed] == sizes


@pytest.mark.slow
def test_each_layer_in_bf16_takes_its_own_more():
    """Not what the first of its kind does, which may be an edge's."""
    more: dict[str, set[int]] = {}
    before = None
    for layers in range(1, 12):
        edges = ("feature.fp8.first_last_bf16=true", f"feature.fp8.bf16_layers_at_start={layers}")
        plan = plan_of("nam56r_native_dp_fp8", *edges)
        kept = budget(plan).worst.steady.buckets["activations"]
        if before is not None:
            more.setdefault(plan.layers[layers - 1].kind, set()).add(kept - before)
        before = kept
    assert len(more) > 2 and all(len(found) == 1 for found in more.values()) and min(more["attention"]) > 0


@pytest.mark.parametrize(("method", "layers", "kept"), [("uniform", 1, False), ("block", 52, True)])
def test_mtp_is_kept_where_megatron_does_not_recompute_it(method, layers, kept):
    """Under `block` 0.19.2 warns and skips it, whatever the number of layers."""
    words = (
        "feature.recompute.granularity=full",
        f"feature.recompute.method={method}",
        f"feature.recompute.layers={layers}",
    )
    lines = budget(plan_of("nam56r", "schedule.micro_batch_size=1", *words)).worst.steady.lines
    assert any(l.owner == "mtp" and l.name == "first projection" for l in lines) == kept


def test_pieces_take_less_memory_one_after_the_other():
    """Of Mamba-3's heads and DSA's queries, at a length where nothing else counts; the rest of a layer's work stays whole."""
    words = (
        "cluster=h200_1",
        "model.seq_length=65536",
        "schedule.micro_batch_size=1",
        "schedule.global_batch_size=8",
        *FULL,
    )

    def work(kind: str, when: str, *more: str) -> float:
        plan = plan_of("nam56r_fused", *words, *more)
        z, block = Sizes.of(plan.site), plan.recipe.blocks.of(kind)
        return next(l.bytes for l in block.working(z, next(x for x in plan.layers if x.kind == kind)) if l.name == when)

    # Of 56 heads and fewer at once the gradients of Mamba-3's states are written.
    for kind, key, when, most in (
        ("mamba3", "head_pieces", "backward", 0.66),
        ("dsa", "query_pieces", "forward", 0.62),
    ):
        one, two, four = (work(kind, when, f"execution.{kind}.{key}={n}") for n in (1, 2, 4))
        assert 0.5 * one <= two < most * one and 0.5 * two <= four < 0.75 * two


def test_rows_of_ngrams_are_remembered_where_the_embedding_is():
    """A byte a row: four tables of 1,000 rows, on the first of two stages."""
    plan = plan_of(*NATIVE, "feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=1000", "parallel.pipeline=2")
    held = [[x.bytes for x in s.moments["after_init"].lines if "asked" in x.name] for s in budget(plan).stages]
    assert held == [[4000], []]


def test_an_output_layer_without_logits_would_save_little(monkeypatch):
    """Why there is none: docs/log.md."""
    plans = [
        plan_of("nam56r_native_dp_fused", "schedule.micro_batch_size=8"),
        plan_of("nam56r_native_dp_fp8", "precision.cross_entropy=fused"),
        plan_of("nam52_h200_dense_no_mhc_recovery_v1", "+overlay=fused", "schedule.micro_batch_size=2"),
    ]
    peaks = [budget(plan).worst.steady.allocated for plan in plans]
    monkeypatch.setattr(ends, "loss", lambda z: ())
    shares = [1 - budget(plan).worst.steady.allocated / peak for plan, peak in zip(plans, peaks, strict=True)]
    assert all(0 < share < 0.03 for share in shares[:2]) and shares[2] == 0


def test_gated_delta_nets_by_value():
    """Of Qwen3-Next: 2048 wide, keys 16 x 128, values 32 x 128, chunks of 64; written out by hand."""
    plan = plan_of("qwen3_next_80b_a3b")
    z, (block,) = Sizes.of(plan.site), [b for b in plan.blocks if b.kind == "gdn"]
    tokens, keys, values, heads = z["T"], 2048, 4096, 32
    kept = {l.name: l.bytes for l in block.activations(z, None)}
    assert {name: n for name, n in kept.items() if name not in ("input", "norm statistics", "norm output")} == {
        "q, k, v, gate, beta, alpha": 2 * tokens * (2 * keys + 2 * values + 2 * heads),
        "queries and keys": 4 * tokens * keys + 4 * tokens * heads * 128,
        "values": 2 * tokens * values,
        "decay and beta": 6 * tokens * heads,
        "chunk matrices": 2 * tokens * heads * 64,
        "output and gate": 4 * tokens * values,
        "gated output": 2 * tokens * values,
    }
    assert {w.name: w.flops for w in block.flops(z, None)} == {
        "projections": 2 * 2048 * (2 * keys + 2 * values + 2 * heads) + 2 * values * 2048,
        "convolution": 2 * 4 * (2 * keys + values),
        "delta rule": heads * (3 * 64 * 128 + 2 * 64 * 128 + 6 * 128 * 128),
    }
    (s,) = serve(plan, batch=1, context=1)
    states = {p.state.name: p.contiguous // p.layers for p in s.pools if p.kind == "gdn"}
    assert states == {"convolution window": 2 * 4 * (2 * keys + values), "recurrent state": 4 * heads * 128 * 128}


def test_flops_of_layers_without_the_window_and_of_experts_of_a_latent():
    """13 attention layers of 56 heads of 64 over 4096 tokens: every fourth, three in all, without the window of 512."""
    keys = 512 - 512**2 / 8192
    more = "model.blocks.attention={window: 512, unwindowed_every: 4}"
    core = []
    for plan in (plan_of("nam56r_native_dp"), plan_of("nam56r_native_dp", more)):
        z, block = Sizes.of(plan.site), plan.recipe.blocks.attention
        each = (block.flops(z, layer) for layer in plan.layers if layer.kind == "attention")
        core.append(sum(work.flops for works in each for work in works if work.name == "core"))
    assert core == [4 * 3584 * 13 * 2048, 4 * 3584 * (3 * 2048 + 10 * keys)]
    plan = plan_of("nam56r_native_dp", "model.blocks.moe.latent_size=512")
    work = {w.name: w.flops for w in plan.recipe.blocks.moe.flops(Sizes.of(plan.site), None)}
    assert (work["latents"], work["experts"]) == (4 * 3584 * 512, 2 * 2 * 4 * 512 * 896)


def test_a_graph_of_the_whole_step_holds_in_its_pool_what_eager_steps_allocate():
    """Measured: allocated falls to what lies still, and reserved stays (benchmarks/measured_h200.json, native52_one_whole)."""
    one = ("cluster=h200_1", "schedule.global_batch_size=16")
    eager, whole = (
        budget(plan_of("nam56r_native_dp_fused", *one, f"feature.cuda_graphs.impl={impl}")).worst.moments
        for impl in ("none", "full_iteration")
    )
    inputs = 28 * 16 * 4096  # tokens, labels, positions in int64, masks in fp32
    assert whole["warm_up"] == eager["steady"]
    assert whole["steady"].reserved == eager["steady"].reserved + inputs
    assert whole["steady"].allocated == eager["between_steps"].allocated


def test_graph_runs_are_eager_until_the_capture():
    graphs, eager = budget(plan_of(*NATIVE, *GRAPHS)).worst.moments, budget(plan_of(*NATIVE)).worst.moments
    for early, cold in (("first_step", "first_step"), ("warm_up", "steady")):
        assert (graphs[early].event, graphs[early].total) == (eager[cold].event, eager[cold].total)
    assert (
        graphs["steady"].allocated < eager["steady"].allocated and graphs["steady"].reserved > eager["steady"].reserved
    )
    at_once = budget(plan_of(*NATIVE, *GRAPHS, "feature.cuda_graphs.warmup_steps=0")).worst.moments
    assert "warm_up" not in at_once and at_once["first_step"].reserved > eager["first_step"].reserved


def test_a_graph_of_the_whole_step_keeps_its_memory_from_the_optimizer():
    """Eager steps give what the passes held to Newton-Schulz; a graph's pool is its own."""
    one = ("nam56r_native_dp_fused", "cluster=h200_1", "model.depth=13", "optim=muon")
    whole = budget(plan_of(*one, "feature.cuda_graphs.impl=full_iteration")).worst.moments
    eager = budget(plan_of(*one)).worst.moments
    newton = [line for line in whole["steady"].lines if line.name.startswith("Newton-Schulz")]
    static = [line for line in whole["steady"].lines if line.name == "static inputs"]
    assert newton and static and {line.place for line in newton} == {"reserved"}
    more = sum(line.bytes for line in (*newton, *static))
    assert whole["steady"].reserved == eager["steady"].reserved + more
    assert whole["warm_up"].total == eager["steady"].total


def test_a_receipts_forecast_has_what_is_allocated_while_a_step_is_captured():
    one = ("nam56r_native_dp_fused", "cluster=h200_1", "model.depth=13")
    whole = budget(plan_of(*one, "feature.cuda_graphs.impl=full_iteration")).worst
    eager = budget(plan_of(*one)).worst
    assert whole.peak_allocated == eager.peak_allocated == eager.worst.allocated > whole.steady.allocated


def test_a_captured_mask_has_the_keys_of_all_ranks_that_share_the_sequence():
    def masks(*overrides):
        lines = budget(plan_of(*NATIVE, *GRAPHS, *overrides)).stages[0].moments["steady"].lines
        return sum(line.bytes for line in lines if line.name == "static masks")

    assert masks("parallel.context=2") == masks() / 2


@pytest.mark.few("layouts_")
@pytest.mark.parametrize(
    ("name", "limit"), {"layouts_h200": 0.03, "four_h200": 0.04, "four_layouts_h200": 0.04}.items()
)
def test_layouts_that_were_measured(name, limit):
    """What torch had reserved at the end of each, each layout's capture and its context ranks included."""
    for run in json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()):
        words = [word for word in run["overrides"] if not word.startswith("allow.")]  # nobody need allow it by now
        worst = budget(plan_of(run["preset"], *words)).worst.worst
        reserved = worst.total - worst.sum("outside")
        assert reserved == pytest.approx(run["peak_bytes"]["steady"]["reserved"], rel=limit), run["name"]


def test_dropout_keeps_a_byte_of_each_place_it_may_drop():
    """Of each layer, and of the embedding wherever it stands: before the layers, and before MTP's of each depth."""
    words = ("cluster=h200_1", "feature.mtp.depths=2", "schedule.micro_batch_size=1")
    for more in ((), ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true")):
        plan, plain = (plan_of("nam56r", *words, *more, *drops) for drops in (("model.hidden_dropout=0.1",), ()))
        z, (stage,) = Sizes.of(plan.site), static.stages(plan)
        kept, without = (
            sum(x.bytes for chunk in _Moving(p, z, stage, False).chunks for part in chunk for x in part.kept)
            for p in (plan, plain)
        )
        masks = len(plan.layers) + 2 * len(plan.mtp) + 1 + 2
        assert kept - without == masks * z["Ts"] * z["h"] == masks * 4096 * 3584 / plan.site.tensor


def test_a_process_group_of_one_takes_nothing():
    def outside(*overrides):
        return budget(plan_of(*NATIVE, *overrides)).worst.worst.sum("outside") / GIB

    device = plan_of(*NATIVE).recipe.device
    assert isclose(outside("cluster=h200_1"), device.runtime_gib)
    assert isclose(outside("cluster=h200_4"), device.runtime_gib + device.groups_gib.data)
    spread = outside("cluster=h200_4", "parallel.expert=4")
    assert isclose(spread, device.runtime_gib + device.groups_gib.data + device.groups_gib.expert)
    # Two pairs of ranks that share experts: a second group of data. Context ranks, which share gradients.
    assert isclose(outside("cluster=h200_4", "parallel.expert=2") - spread, device.groups_gib.data)
    of_context = device.runtime_gib + device.groups_gib.data + device.groups_gib.context
    assert isclose(outside("cluster=h200_2", "parallel.context=2"), of_context)
    gathered = outside(
        "cluster=h200_4", "parallel.expert=4", "execution.moe.dispatcher=gathered", "execution.moe.expert_gemm=torch"
    )
    assert isclose(gathered, device.runtime_gib + device.groups_gib.data + device.groups_gib.gathered)


def test_experts_are_reduced_apart_where_their_ranks_are_others():
    def apart(*overrides):
        plan = plan_of(*NATIVE, "cluster=h200_2", *overrides)
        groups = static.groups(plan, Sizes.of(plan.site), static.stages(plan)[0])
        return [group.name for group in groups] == ["dense", "experts"]

    assert [apart(), apart("parallel.expert=2"), apart("parallel.expert_tensor=2")] == [False, True, True]
    whole = ("parallel.tensor=2", "parallel.sequence=true")
    assert [apart(*whole, "parallel.expert_tensor=2"), apart(*whole, "parallel.expert_tensor=1")] == [False, True]


def test_gathered_tokens_have_rows_for_whatever_the_router_may_choose():
    """Four of sixteen experts: over two ranks a token may have all four of its rows on one, and over eight the two that are there."""

    def rows(*overrides):
        lines = budget(plan_of(*NATIVE, *overrides)).stages[0].moments["steady"].lines
        return sum(line.bytes for line in lines if line.name == "rows for experts")

    ours = "execution.moe.dispatcher=gathered", "execution.moe.expert_gemm=torch"
    one = rows("cluster=h200_1")
    assert rows("cluster=h200_2", "parallel.expert=2", *ours) == 2 * one
    assert rows("cluster=h200_8", "parallel.expert=8", *ours) == 4 * one
    assert rows("cluster=h200_8", "parallel.expert=2", *ours) == 2 * one


# Published figures ----------------------------------------------------------------------------------------------------


@cache
def errors():
    """(entry, phase, forecast / measured - 1) of allocated memory."""
    found = []
    for entry in MEASURED:
        ours = budget(plan_of(entry["preset"], *map(migrate.word, entry["overrides"]))).worst
        found += [
            (entry["name"], phase, ours.moments[phase].allocated / p["allocated"] - 1)
            for phase, p in entry["peaks"].items()
        ]
    return found


def test_forecast_is_within_five_percent_of_every_measured_peak():
    far = [row for row in errors() if abs(row[2]) > 0.05]
    assert not far
    assert median(abs(row[2]) for row in errors() if row[1] == "steady") < 0.03


def test_table_of_errors_is_todays():
    """benchmarks/memory.py has been run since the formulas or the measurements changed."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    # The same plans as the forecasts above, composed once.
    benchmark.load, benchmark.translate = lambda preset, words=(): (preset, *words), lambda asked: lowered(*asked)
    result = json.loads((ROOT / "benchmarks" / "memory.json").read_text())
    assert result["rows"] == benchmark.rows()
    docs = (ROOT / "docs" / "budget.md").read_text()
    assert docs == benchmark.page(docs, result)


def test_measured_runs_are_of_plans_that_can_be_trained():
    for entry in MEASURED:
        plan = plan_of(entry["preset"], *map(migrate.word, entry["overrides"]))
        assert not plan.not_built and plan.recipe.world_size == entry["gpus"], entry["name"]


def test_cost_of_the_native_lane():
    c = cost(plan_of(*NATIVE))
    assert isclose(c.model, 13.613e9, rel_tol=1e-4)
    assert isclose(c.utilisation(25_500), 0.351, rel_tol=1e-3)  # reported beside it
    assert c.hardware == c.model
    one, two = (cost(plan_of(*LATENT, f"feature.mtp.depths={n}")).by_owner()["mtp"] for n in (1, 2))
    assert two == 2 * one


def test_recompute_costs_forward_passes_and_no_model_flops():
    for depths, method, layers in ((0, "uniform", 1), (2, "uniform", 1), (2, "block", 52)):  # which skips MTP
        words = (*NATIVE, f"feature.mtp.depths={depths}")
        how = (f"feature.recompute.method={method}", f"feature.recompute.layers={layers}")
        plain, full = cost(plan_of(*words)), cost(plan_of(*words, *FULL, *how))
        outside = (
            ("logits", "eh projection") if method == "uniform" else [w.name for w in plain.works if w.owner == "mtp"]
        )
        again = sum(w.flops for w in plain.works if w.owner != "ends" and (w.owner != "mtp" or w.name not in outside))
        assert full.model == plain.model == plain.hardware and isclose(full.hardware - plain.hardware, again)
    moe = cost(plan_of(*NATIVE, "feature.recompute.granularity=selective", "feature.recompute.modules=[moe]"))
    assert isclose(moe.hardware - moe.model, plain.by_owner()["moe"])


def test_stock_dsa_does_more_than_the_model_needs():
    c = cost(plan_of("nam56r", "lane=native_dp", *STOCK))
    assert isclose(c.model, 14.660e9, rel_tol=1e-4)
    extra = {w.name for w in c.works if not w.model}
    assert extra == {"indexer loss", "dense core"} and c.hardware > c.model


# Serving --------------------------------------------------------------------------------------------------------------


def test_cache_is_of_attention_layers_alone():
    plan = plan_of(*NATIVE)
    (s,) = serve(plan, batch=8, context=4096)
    assert list(s.cache_map) == list(plan.numbers("attention")) and list(s.cache_map.values()) == list(range(13))
    assert s.cache("contiguous") == 13 * 8 * 4096 * 2048  # two tensors of 8 groups of 64 in bf16
    assert s.recurrent == 17 * 8 * (36_864 + 458_752)


@pytest.mark.parametrize(("batch", "context", "key"), [(0, 1, "batch"), (1, 0, "context"), (1, 4097, "context")])
def test_what_cannot_be_served_is_refused(batch, context, key):
    with pytest.raises(Refused) as refused:
        serve(plan_of(*NATIVE), batch=batch, context=context)
    assert [p.key for p in refused.value.problems] == [key]
    assert serve(plan_of(*NATIVE), batch=1, context=4096)


def test_pages_are_whole():
    (s,) = serve(plan_of(*NATIVE), batch=3, context=257)
    assert s.cache("paged") == s.cache("contiguous") // 257 * 512
    (s,) = serve(plan_of(*NATIVE), batch=3, context=257, page=1)
    assert s.cache("paged") == s.cache("contiguous")


def test_latents_are_cached_whole_and_indexer_keys_where_they_are_computed():
    for tensor in ((), ("parallel.tensor=2", "parallel.sequence=true")):
        (s,) = serve(plan_of("nam56r", "lane=native_dp", *tensor), batch=1, context=1)
        token = {(p.kind, p.state.name): p.contiguous for p in s.pools if p.state.per == "token"}
        assert token == {
            ("mla", "latent and rope"): 4 * 256,
            ("dsa", "latent and rope"): 9 * 256,
            ("dsa", "indexer keys"): 3 * 128,
        }


def test_recurrent_states_of_the_author_lane():
    (s,) = serve(plan_of("nam56r"), batch=1, context=1)
    states = {kind: sum(p.contiguous // p.layers for p in s.pools if p.kind == kind) for kind in ("mamba3", "m2rnn")}
    assert states["mamba3"] == 3_813_376  # mamba_ssm's allocate_inference_cache at these sizes
    assert states["m2rnn"] == 44 * 64 * 16 * 4 + 4 * (2 * 64 + 44 * 16) * 2


# What-if --------------------------------------------------------------------------------------------------------------


def test_fit_is_the_last_value_with_headroom(monkeypatch):
    recipe = load("nam56r_native_dp")
    fit = search.largest(recipe, "schedule.micro_batch_size")
    top = recipe.schedule.micro_batch_size
    while top <= fit.best.value:
        top *= 2
    monkeypatch.setattr(search, "LIMIT", top)  # the largest integer that is tried is tried
    assert search.largest(recipe, "schedule.micro_batch_size") == fit
    assert fit.best.good and not fit.beyond.good and fit.beyond.value == fit.best.value + 1
    assert not any(search.attempt(recipe, fit.key, fit.best.value + i).good for i in range(1, 9))


@pytest.mark.parametrize(
    ("key", "value", "batch", "note"),
    [
        ("schedule.micro_batch_size", 3, 72, "3 x 8"), ("schedule.micro_batch_size", 2, 64, ""), ("cluster.nodes", 3, 96, "4 x 24"),
        ("cluster.nodes", 2, 64, ""), ("schedule.global_batch_size", 96, 96, ""), ("parallel.context", 2, 64, ""),
    ],
)  # fmt: skip
def test_fit_says_what_else_it_had_to_change(key, value, batch, note):
    """The batch follows to the next that the tried value's own ranks share."""
    trial = search.attempt(load("nam56r_native_dp"), key, value)
    assert trial.budget, trial.reason
    recipe = trial.budget.plan.recipe
    assert (recipe.schedule.global_batch_size, at(to_tree(recipe), key)) == (batch, value)
    assert trial.note == (f"global batch 64 -> {batch}, a multiple of {note}" if note else "")


def test_fit_steps_over_refused_values():
    """20 steps of 56 heads: between two multiples of the tensor size every value is refused."""
    fit = search.largest(load("nam56r_nemo_native"), "model.vocab_size")
    assert fit.best.value % 2 == 0 and fit.beyond.value - fit.best.value == 2 and fit.beyond.budget


def test_fit_finds_nothing_where_nothing_fits():
    fit = search.largest(load("nam56r_native_dp", ["device.total_gib=20.0"]), "schedule.micro_batch_size")
    assert fit.best is None and fit.beyond.value == 1


@pytest.mark.slow
def test_fit_is_the_first_value_with_headroom_where_more_needs_less():
    words = ("model.seq_length=81920", "schedule.micro_batch_size=1", "schedule.global_batch_size=24", *FULL)
    recipe = load("nam56r_fused", ["cluster=h200_1", *words])
    nodes = search.smallest(recipe, "cluster.nodes")
    assert nodes.best.good and not nodes.beyond.good and nodes.beyond.value == nodes.best.value - 1 > 1
    assert search.smallest(recipe, "execution.mamba3.head_pieces").best is None, (
        "DSA's scores are too much by themselves"
    )
    assert search.smallest(recipe, "schedule.micro_batch_size").best is None
    fits, kept = (search.smallest(load("nam56r"), "cluster.nodes", keep=keep) for keep in (False, True))
    assert fits.best.value == kept.best.value == 1 and fits.beyond is None
    assert search.shrinks(load("nam56r"), "cluster.nodes") and not search.shrinks(load("nam56r"), "model.vocab_size")
    done = warm(
        "conf=nam56r_fused", "cluster=h200_1", *words, "fit=cluster.nodes", module="nam_megatron.budget.__main__"
    )
    assert (done.code, done.out.split(":")[0]) == (0, f"cluster.nodes={nodes.best.value}")


@pytest.mark.parametrize(("word", "shrinks"), [("parallel.expert=8", True), ("model.blocks.moe.top_k=16", False)])
def test_half_a_value_tells_what_more_needs_where_twice_is_refused(word, shrinks):
    key, _, value = word.partition("=")
    recipe = load("nam56r_native_dp", ("cluster=h200_8", word))
    assert search.attempt(recipe, key, 2 * int(value)).budget is None
    assert search.shrinks(recipe, key) == shrinks


def test_fit_of_a_key_that_takes_no_memory_has_no_limit():
    fit = search.largest(load("nam56r_native_dp"), "schedule.log_interval")
    assert fit.beyond is None and fit.key == "schedule.log_interval" and fit.best.good


def test_resolving_a_key():
    recipe = load("nam56r")
    assert search.resolve(recipe, "micro_batch_size", "fit") == "schedule.micro_batch_size"
    assert search.resolve(recipe, "model.blocks.moe.top_k", "fit") == "model.blocks.moe.top_k"
    for name, message in {
        "heads": "`heads` is 2 keys",
        "sequence": "no integer key `sequence`",  # a switch
        "lr": "no integer key `lr`",
    }.items():
        with pytest.raises(Refused, match=re.escape(message)) as refused:
            search.resolve(recipe, name, "fit")
        assert [p.key for p in refused.value.problems] == ["fit"]


def test_biases_of_experts_and_their_router_are_counted():
    """Six layers of 16 experts, 3584 and 896 wide, a vocabulary apart."""
    words = ("model.pattern=E", "model.depth=6", "model.blocks.moe.shared_expert_hidden_size=0", "cluster=h200_1")
    words += ("model.substitute=[]", "feature.mtp.depths=0", "model.blocks.moe.grouped_gemm=false")
    biased = parameters(plan_of("nam56r_native_dp", *words, "model.linear_bias=true"))[0]
    assert biased - parameters(plan_of("nam56r_native_dp", *words))[0] == 6 * (16 + 16 * (896 + 3584))


# The command ----------------------------------------------------------------------------------------------------------


def run(*words, cwd="."):
    return warm(*words, cwd=cwd, module=COMMAND)


def test_command_says_whether_it_fits():
    done = run("conf=nam56r_native_dp")
    assert done.code == 0 and "fits h200: " in done.out and done.err == ""
    done = run("conf=nam56r", *STOCK)
    assert done.code == 1 and "does not fit h200: " in done.out and "a larger `parallel.expert` further" in done.err
    one = run("conf=nam56r", "cluster=h200_1", *STOCK)
    assert one.code == 1 and "on more GPUs (`cluster=NAME`) one of `+overlay=ep`" in one.err
    tight = run("conf=nam56r_native_dp", "device.headroom_gib=100.0")
    assert tight.code == 0 and tight.err.startswith("warning: fits h200") and "headroom of 100" in tight.err


@pytest.mark.parametrize(("batch", "code"), [(1, 0), (100_000, 1)])
def test_json_of_serving_fits_as_its_exit_code_says(batch, code):
    done = run("conf=nam56r_native_dp", "serve=true", f"batch={batch}", "format=json")
    assert (done.code, json.loads(done.out)["fits"]) == (code, not code)


def test_json_has_every_line():
    done = run("conf=nam56r_native_dp", "format=json")
    found = json.loads(done.out)
    (stage,) = found["stages"]
    assert found["parameters"] == 3_996_461_352
    assert sum(line["bytes"] for line in stage["lines"]) == stage["moments"]["steady"]["total"]


def test_against_names_the_bucket_that_grows():
    done = run("conf=nam56r_native_dp", "against='nam56r_native_dp schedule.micro_batch_size=2'")
    assert done.code == 0 and done.out.endswith("activations grows most: +16.76 GiB\n")
    few, half = "schedule.micro_batch_size=1", "precision.grad_reduce=bf16"
    whole, other = (budget(plan_of(*NATIVE, word)) for word in (few, half))
    assert "gradients grows most: +" in against(whole, other), "though activations shrink by more"
    assert against(budget(plan_of(*NATIVE, few, half)), whole).endswith("no bucket grows\n")


def test_both_ends_of_a_sweep_are_tried():
    found = [list(search.values(f"depth:{words}")[1]) for words in ("5:5", "4:6", "1:9:4", "1:8:4")]
    assert found == [[5], [4, 5, 6], [1, 5, 9], [1, 5]]


def test_fit_and_sweep():
    done = run("conf=nam56r_native_dp", "fit=micro_batch_size", "cluster=h200_4", "precision.cross_entropy=compiled")
    assert done.code == 0
    assert done.out.splitlines()[1] == "with global batch 64 -> 84, a multiple of 7 x 4"
    done = run("conf=nam56r_nemo_native", "sweep=vocab_size:65535:65537")
    rows = done.out.splitlines()
    assert done.code == 0 and "refused: vocab_size 65535 is not divisible by tensor size 2" in rows[1]
    assert rows[2].split()[0] == "65536" and rows[2].endswith("fits")


@pytest.mark.few(1)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize(
    "words", [("against=[nam56r_smoke]",), ("sweep=micro_batch_size:1:4",), ("parallel.pipeline=2",)]
)
def test_plot(tmp_path, words, suffix):
    done = run("conf=nam56r_native_dp", f"plot=m.{suffix}", *words, cwd=tmp_path)
    assert done.code == 0 and done.err.endswith(f"wrote m.{suffix}\n")
    drawn = (tmp_path / f"m.{suffix}").read_bytes()
    assert len(drawn) > 2000 and drawn.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


REFUSED = {
    "no GPUs": (("cluster.gpus_per_node=0",), "greater than or equal to 1, not 0 @ cluster.gpus_per_node"),
    "a batch that does not divide": (("schedule.micro_batch_size=3",), "@ schedule.global_batch_size"),
    "a context beyond the model": (("serve=true", "context=4097"), "beyond the model's 4096 @ context"),
    "no batch": (("serve=true", "batch=0"), "@ batch"),
    "no context": (("serve=true", "context=0"), "an integer of at least 1, not `0` @ context"),
    "a batch without serving": (("batch=4",), "`batch` belongs to serving @ batch"),
    "two questions": (("serve=true", "fit=depth"), "`fit` and `serve` answer different questions"),
    "no such format": (("format=yaml",), "no format `yaml` @ format"),
    "no such key": (("fit=micro_batch_sise",), "no integer key `micro_batch_sise` @ fit"),
    "the word of another command": (("diff=nam56r",), "unknown key `diff`, did you mean `against`?"),
    "no such preset": (("against=nam57",), "@ against"),
    "a sweep that is none": (("sweep=depth",), "cannot read the sweep `depth` @ sweep"),
    "a sweep of nothing": (("sweep=depth:5:1",), "has no values @ sweep"),
    "a sweep without end": (("sweep=seq_length:1:100000000:1",), "100,000,000 values, more than 10,000 @ sweep"),
    "a sweep beyond numbers": (("sweep=seq_length:1:" + "9" * 5000,), "cannot read the sweep"),
    "a sweep in JSON": (("sweep=depth:1:2", "format=json"), "`sweep` has no format `json` @ format"),
    "JSON of one of two": (("against=nam56r", "format=json"), "`against` has no format `json` @ format"),
    "a picture of no format": (("plot=m.pdf",), "cannot draw `m.pdf` @ plot"),
    "a picture nowhere": (("plot=nowhere/m.png",), "there is no folder `nowhere` @ plot"),
    "less than balanced": (("imbalance=0.5",), "@ imbalance"),
    "a word for a switch": (("serve=8",), "`serve` is true or false, not `8` @ serve"),
    "a list for a word": (("fit=[a,b]",), "`fit` takes one word, not `['a', 'b']` @ fit"),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_with_its_key(case):
    words, message = REFUSED[case]
    done = run("conf=nam56r_native_dp", *words)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and message in done.err and "Traceback" not in done.err


def test_the_hint_of_a_long_sweep_is_one_that_runs():
    with pytest.raises(Refused) as refused:
        search.values("seq_length:1:25003:2")
    assert len(search.values(refused.value.problems[0].hint.split()[-1])[1]) <= search.MOST_POINTS


def test_a_preset_that_nobody_named_is_said():
    assert run("cluster=h200_1", "fit=depth").err.startswith("note: no `conf=`: the preset nam56r\n")


def test_model_is_the_whole_of_its_stages():
    """Parameters counted over one imaginary stage: what `parameters` and the header say."""
    plan = plan_of("nam56r")
    every = [p.elements for _, _, p in static.parts(plan, Sizes.of(plan.site), Stage(0, 1, plan.segments))]
    assert sum(every) == parameters(plan)[0] == sum(static.by_kind(plan).values())


def test_a_search_balances_the_experts_unless_it_is_told_otherwise():
    recipe, key = load("nam56r_native_dp", ["parallel.expert=4"]), "schedule.micro_batch_size"
    even, skewed = search.attempt(recipe, key, 4, 1.0), search.attempt(recipe, key, 4, 2.0)
    assert search.attempt(recipe, key, 4) == even != skewed
    assert search.largest(recipe, key) == search.largest(recipe, key, imbalance=1.0)
    assert [*search.sweep(recipe, key, [4], 2.0)] == [skewed]


@pytest.mark.parametrize("kernels", ["megatron", "compiled", "fused"])
@pytest.mark.parametrize("depths", [0, 2])
def test_what_is_alive_while_the_loss_goes_back(kernels, depths):
    """Bytes for a token and a word of the vocabulary; also where another moment is the peak."""
    words = [f"precision.cross_entropy={kernels}", f"feature.mtp.depths={depths}"]
    z = Sizes.of(translate(load("nam56r_native_dp", words)).plan.site)
    gradients = 2 * z["T"] * z["h"] + 2 * z["V"] * z["h"]
    found = {
        name: (sum(line.bytes for line in lines) - gradients * ("output" in name)) / z["T"] / z["V"]
        for name, lines in ends.loss(z)
    }
    if kernels == "fused":
        assert found == {"output layer backward": 2 + 2 * depths}
    else:
        clone = 4 if kernels == "compiled" else 0
        assert found == {"cross entropy backward": 2 + 4 + 4 * depths + clone, "output layer backward": 2 + 4 * depths}


def test_inputs_in_fp8_are_kept_of_each_depth_of_mtp():
    kept = []
    for depths in (0, 1, 2):
        words = ("feature.fp8.keep_inputs=true", "feature.cuda_graphs.impl=none", f"feature.mtp.depths={depths}")
        plan = plan_of("nam56r_native_dp_fp8", *words)
        (line,) = plan.recipe.feature.fp8.activations(Sizes.of(plan.site), static.stages(plan)[-1])
        kept.append(line.bytes)
    assert kept[2] - kept[1] == kept[1] - kept[0] > 0


# Somebody else's YAML -------------------------------------------------------------------------------------------------------------

NANO = Path(__file__).parent / "lint/bridge_nemotron_3_nano.yaml"
NANO_SAYS = ["model.vocab_size=131072", "execution.moe.dispatcher=alltoall"]


def of_yaml(path, *words, gpus=("gpus=8",)):
    return container.read(Path(path), gpus, words)


def test_a_container_of_others_is_priced_or_refused_by_name(monkeypatch, capsys):
    with pytest.raises(Refused) as refused:
        of_yaml(NANO)
    (problem,) = refused.value.problems
    assert problem.message.split("`")[1::2] == ["model.vocab_size", "execution.moe.dispatcher"]
    monkeypatch.setattr(sys, "argv", ["budget", str(NANO), "gpus=8", *NANO_SAYS])
    with pytest.raises(SystemExit) as end:
        budget_command.main()
    out = capsys.readouterr()
    assert end.value.code == 0 and "31,577,937,344 parameters" in out.out and "--ddp-bucket-size 134217728" in out.err


@pytest.mark.slow
def test_nemotrons_yaml_is_priced_as_the_recipe_that_it_names(tmp_path):
    tree = yaml.safe_load((Path(__file__).parents[1] / "examples/nemo/nemotron.yaml").read_text())
    name, text, notes, _ = of_yaml(Path(__file__).parents[1] / "examples/nemo/nemotron.yaml", gpus=())
    meant = load(tree["recipe"]["_target_"].rpartition(".")[2].partition("_pretrain")[0], tree["recipe"]["overrides"])
    made = recipe._load(text, name)
    assert (made.model, made.parallel, made.cluster) == (meant.model, meant.parallel, meant.cluster) and not notes
    tree["model"] = {"seq_length": 8192}
    (tmp_path / "laid.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(Refused, match=r"`model\.seq_length` is laid over the recipe"):
        of_yaml(tmp_path / "laid.yaml", gpus=())


LAUNCH = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128
  --max-position-embeddings 128 --swiglu --micro-batch-size 2 --global-batch-size 32 --bf16 --normalization RMSNorm
  --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 1024 --untie-embeddings-and-output-weights
  --disable-bias-linear --data-path a --split 99,1,0 --tensor-model-parallel-size 2 --tensorboard-dir tb --lr 1e-4 --train-iters 9"""


def test_a_launch_may_have_a_presets_name_and_says_what_lint_finds(tmp_path):
    text = " ".join(LAUNCH.split()).replace("--num-attention-heads 4", "--num-attention-heads 4 --num-query-groups 2")
    for name in ("Qwen3-8B.sh", "qwen3_8b.sh"):
        (tmp_path / name).write_text(text)
        preset, made, notes, _ = of_yaml(tmp_path / name)
        assert preset.lower() == "of_qwen3_8b" and f"name: {preset}" in made
        assert any("`lint` finds wrong model: --num-query-groups 2" in note for note in notes)


def test_what_memory_has_no_use_of_is_filled_in_unless_it_is_said(tmp_path):
    """Twice it would be refused, whatever sign it has."""
    (tmp_path / "train.sh").write_text(" ".join(LAUNCH.split()).replace("--lr 1e-4 --train-iters 9", ""))
    for words, filled in (((), {"optim.lr", "schedule.train_steps"}), (("++optim.lr=1e-3",), {"schedule.train_steps"})):
        *_, notes, made = of_yaml(tmp_path / "train.sh", *words)
        assert {word.partition("=")[0] for word in made} == filled and any(" ".join(made) in note for note in notes)


def test_a_launch_that_is_refused_is_named_and_not_the_recipe_made_of_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.sh").write_text(
        " ".join(LAUNCH.split()).replace("--global-batch-size 32", "--global-batch-size 30")
    )
    monkeypatch.setattr(sys, "argv", ["budget", str(tmp_path / "train.sh")])
    with pytest.raises(SystemExit):
        budget_command.main()
    said = f"schedule.global_batch_size (read from {tmp_path}/train.sh)"
    assert said in capsys.readouterr().err


def test_a_launch_of_others_is_priced_and_its_operations_are_counted(tmp_path, monkeypatch, capsys):
    """A YAML alone was."""
    text = " ".join(LAUNCH.split())
    (tmp_path / "train.sh").write_text(text)
    monkeypatch.setattr(sys, "argv", ["budget", str(tmp_path / "train.sh"), "format=json"])
    with pytest.raises(SystemExit) as end:
        budget_command.main()
    priced = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert lint_command.main([str(tmp_path / "train.sh"), "flops=true", "format=json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert priced["parameters"] == found["trains"]["parameters"]["total"]
    matrices = 2 * (4 * 256 * 256 + 3 * 256 * 640) + 256 * 1024  # 640: two thirds of four widths, in steps of 64
    core = 2 * 2 * 2 * 256 * 129 / 2
    assert found["flops"]["token"] == pytest.approx(3 * (2 * matrices + core), rel=1e-3)
    assert found["flops"]["step"] == found["flops"]["token"] * 32 * 128
    # Without a global batch Megatron takes a micro batch of each of the four data-parallel ranks.
    (tmp_path / "train.sh").write_text(text.replace("--global-batch-size 32", ""))
    assert lint_command.main([str(tmp_path / "train.sh"), "flops=true", "format=json"]) == 1
    assert json.loads(capsys.readouterr().out)["flops"]["step"] == found["flops"]["token"] * 2 * 4 * 128


def test_what_a_launch_does_not_say_is_asked_for_before_it_is_priced_or_counted(tmp_path, capsys):
    (tmp_path / "train.sh").write_text(
        " ".join(LAUNCH.split()).replace("--vocab-size 1024", "").replace("Null", "HuggingFace")
    )
    with pytest.raises(Refused, match=r"model\.vocab_size"):
        of_yaml(tmp_path / "train.sh", gpus=())
    assert lint_command.main([str(tmp_path / "train.sh"), "flops=true"]) == 2
    assert "model.vocab_size=VALUE" in capsys.readouterr().err
    name, text, _, filled = of_yaml(tmp_path / "train.sh", "model.vocab_size=1024", gpus=())
    assert not filled and recipe._load(text, name, ["model.vocab_size=1024"]).model.vocab_size == 1024
    (tmp_path / "verl.sh").write_text("python -m main actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    with pytest.raises(Refused, match="verl's words"):
        of_yaml(tmp_path / "verl.sh", gpus=())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("$MORE", "`$MORE` stands for words"),
        ("--recompute-granularty full", "did you mean `--recompute-granularity`"),
        ("--my-own-flag 3", "no flag `--my-own-flag`"),
        ("--encoder-tensor-model-parallel-size 2", "use `--tensor-model-parallel-size`"),
        ("--attention-backend unfused", "without `--attention-backend unfused`"),
        ("--attention-backend local", "does not carry `--attention-backend local"),
        ("--num-distributed-optimizer-instances 2", "memory depends on it"),
        ("--use-checkpoint-args", "a copy of the file without `--use-checkpoint-args`"),
        ("--yaml-cfg x.yaml", "a copy of the file without `--yaml-cfg`"),
        ("--optimizer sgd", "a copy of the file with `--optimizer adam` and without `--optimizer sgd`"),
        ("--enable-cuda-graph", "`--enable-cuda-graph -> --cuda-graph-impl none`"),
    ],
)
def test_words_that_may_change_what_is_held_are_not_left_out(more, said, tmp_path):
    (file := tmp_path / "train.sh").write_text(f"{' '.join(LAUNCH.split())} {more}")
    with pytest.raises(Refused) as refused:
        of_yaml(file, gpus=())
    assert said in refused.value.render()


def test_a_forks_own_flags_are_named(tmp_path):
    mine = [f"--{name}-of-ours 3" for name in ("ember", "quartz", "willow", "garnet", "maple", "cobalt", "thistle")]
    (file := tmp_path / "train.sh").write_text(f"{' '.join(LAUNCH.split())} {' '.join(mine)}")
    (note,) = (note for note in of_yaml(file, gpus=())[2] if "fork" in note)
    assert all(word.split()[0] in note for word in mine)


@pytest.mark.slow
def test_what_a_published_config_leaves_open_is_asked_for_or_said(tmp_path):
    """The longest sequence that the model takes was priced, on 8 GPUs, and without the layer of token prediction."""
    (file := tmp_path / "config.json").write_text(json.dumps(CONFIGS["glm_4_7_flash"]))
    said = ["schedule.micro_batch_size=1", "schedule.global_batch_size=64"]
    with pytest.raises(Refused) as refused:
        of_yaml(file, *said)
    assert [p.message.split("`")[1] for p in refused.value.problems] == ["model.seq_length"]
    name, text, notes, filled = of_yaml(file, *said, "model.seq_length=4096", gpus=("gpus=32",))
    made = recipe._load(text, name, [*filled, *said, "model.seq_length=4096"])
    assert made.cluster.nodes * made.cluster.gpus_per_node == 32
    for sentence in ("num_nextn_predict_layers: 1", "layout, precision, data"):
        assert any(sentence in note for note in notes)
    assert not any("sequence length" in note for note in notes)
    asked = run(f"conf={file}", "schedule.micro_batch_size=1")  # no learning rate, which memory has no use for
    assert asked.code == 2 and "does not say `model.seq_length` and `schedule.global_batch_size`," in asked.err


def test_no_dense_model_is_sent_to_expert_parallelism():
    for preset, experts in (("llama_3_8b", False), ("qwen3_30b_a3b", True)):
        done = run(
            f"conf={preset}", "device.headroom_gib=1", "schedule.micro_batch_size=64", "schedule.global_batch_size=4096"
        )
        assert done.code == 1 and "overlay=tp_sp" in done.err and ("overlay=ep" in done.err) == experts


def test_token_prediction_that_is_priced_is_not_called_lost(tmp_path):
    (file := tmp_path / "train.sh").write_text(
        f"{' '.join(LAUNCH.split())} --mtp-num-layers 1 --attention-backend flash --num-distributed-optimizer-instances 1"
    )
    name, text, notes, _ = of_yaml(file, gpus=())
    assert recipe._load(text, name).feature.mtp.depths == 1 and not any("mtp" in note for note in notes)


IDLE = """--attention-softmax-in-fp32 --save $1 --save-interval 9 --load $1 --eval-iters 8 --eval-interval 100 --log-throughput --manual-gc
  --manual-gc-interval 9 --distributed-timeout-minutes 60 --dataloader-type cyclic --eod-mask-loss --reset-position-ids --log-interval 100
  --no-check-for-nan-in-loss-and-grad --lr-warmup-init 1e-7 --lr-decay-style linear --ckpt-format torch --decoupled-lr 1e-3
  --async-save --rampup-batch-size 16 16 1000 --lr $LR --min-lr $X --seed $S --lr-warmup-iters $V --clip-grad $X --train-iters $N"""


@pytest.mark.slow
def test_what_nothing_is_held_for_stands_in_no_budgets_way(tmp_path):
    """Nor in one whose evaluations and checkpoints delayed scaling's laws would refuse. Other modules are other memory."""
    (file := tmp_path / "train.sh").write_text(plain := " ".join(LAUNCH.split()))
    bare = recipe._load(of_yaml(file, gpus=())[1], "train")
    for more in ("", " --fp8-format hybrid"):
        file.write_text(f"{plain} {' '.join(IDLE.split())}{more}")
        _, text, _, filled = of_yaml(file, gpus=())
        made = recipe._load(text, "train", filled)
        assert (made.model, made.parallel) == (bare.model, bare.parallel)
        assert translate(made).by_name["save"].value is None
    file.write_text(f"{plain} --attention-softmax-in-fp32 --transformer-impl local")
    with pytest.raises(Refused, match="attention-softmax-in-fp32"):
        of_yaml(file, gpus=())


@pytest.mark.parametrize("flag", ["--no-bias-swiglu-fusion", "--no-rope-fusion"])
def test_the_copy_that_a_refused_budget_speaks_of_is_priced(flag, tmp_path):
    """The key beside such a flag says another model: `model.activation=swiglu` passed, and the fusion stood."""
    (file := tmp_path / "train.sh").write_text(f"{' '.join(LAUNCH.split())} {flag}")
    with pytest.raises(Refused) as refused:
        of_yaml(file, "model.activation=swiglu", gpus=())
    (problem,) = refused.value.problems
    assert f"without `{flag}`" in problem.hint
    file.write_text(file.read_text().replace(flag, ""))
    of_yaml(file, gpus=())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": {"use_precision_aware_optimizer": True}}, "--use-precision-aware-optimizer"),
        ({"peft": {"_target_": "megatron.bridge.peft.lora.LoRA"}}, "adapters of others"),
        ({"model": None}, "its model is another file"),
    ],
)
def test_what_a_container_holds_besides_is_refused(change, said, tmp_path):
    tree = yaml.safe_load(NANO.read_text())
    for name, value in change.items():
        tree[name] = tree.get(name, {}) | value if name == "optimizer" else value
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(Refused, match=said):
        of_yaml(tmp_path / "run_config.yaml", *NANO_SAYS)


def test_weights_that_stay_beside_adapters_have_no_gradients():
    words = ("schedule.pretrained=/p", "feature.lora.rank=16", "model.blocks.moe.expert_bias_update_rate=0.0")
    plain, adapted = (translate(load("nam56r_native_dp", more)).plan for more in ((), words))
    lines = budget(adapted).stages[0].steady.lines
    counts = [static.by_kind(plan) for plan in (plain, adapted)]
    assert counts[1].pop("lora") * 4 == sum(line.bytes * line.count for line in lines if line.bucket == "gradients")
    assert counts[0] == counts[1]
    weights = [line for line in lines if line.bucket in WEIGHTS]
    assert sum(line.bytes * line.count for line in weights) == 2 * static.parameters(adapted)[0]


@pytest.mark.parametrize(
    "preset", ["nam56r", "nam56r_native_dp", "llama_3_8b", "nemotron_3_super_120b_a12b", "deepseek_v3_2"]
)
def test_what_megatrons_count_lacks_is_said_of_what_the_model_has(preset):
    p = translate(load(preset, [])).plan
    said, kinds = megatrons_gaps(cost(p)), {layer.kind for layer in p.layers}
    for words, kind in (("MLA", "mla"), ("DSA", "dsa"), ("Mamba-3", "mamba3"), ("router", "moe"), ("experts", "moe")):
        assert (words in said) <= (kind in kinds | set(p.mtp))
    assert ("same operations" in said) == (cost(p).megatron == cost(p).model)
    assert ("of a latent" in said) == bool(p.recipe.blocks.moe and p.recipe.blocks.moe.latent_size)
