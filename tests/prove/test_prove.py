"""The prove command: what it cuts, what it compares, and that it finds what is planted."""

import itertools
import json
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache, partial
from math import inf, sqrt
from pathlib import Path
from types import SimpleNamespace

import planted
import pytest
import torch
from command import _child, unbuilt, warm
from managers import ends, fails, gone, waits, with_managers
from presets import ALL, PUBLIC, lowered

from nam_megatron.budget import parameters
from nam_megatron.errors import Refused
from nam_megatron.prove import compare, cpu, cut, every, proof, ranks, tensors, worker
from nam_megatron.prove.__main__ import as_json, text
from nam_megatron.prove.compare import COUNT, FORTH, FP32, GRADIENT, LOSS, WEIGHT, Row
from nam_megatron.recipe import load, to_tree

# The cut ---------------------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "as it is": (),
    "tensor 4": ("parallel.tensor=4", "parallel.sequence=true"),
    "pipeline 2 x 2": ("parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    "experts 8 twice": ("cluster.nodes=2", "parallel.expert=8"),
    "experts 4 x 2": ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=4", "parallel.expert_tensor=2"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("preset", ["nam56r", "nam56r_native_dp", "nam52_h200_sparse_8_11_ref_v1", "nam56r_fused"])
def test_the_cut_keeps_what_makes_a_layout(preset, layout):
    if "fused" in preset and any("expert=" in word for word in layout):
        moe = {"dispatcher": "alltoall", "expert_gemm": "transformer_engine", "fused_router_gradient": "false"}
        layout = (*layout, *(f"execution.moe.{key}={value}" for key, value in moe.items()))
    pair = cut.pair(load(preset, layout), "cpu", 2)
    full, small, one = pair.full, pair.layout.plan, pair.reference.plan
    assert small.kinds == full.kinds and small.mtp == full.mtp and small.mtp_depths == full.mtp_depths
    assert bool(small.reusing_layers) == bool(full.reusing_layers)
    assert small.recipe.parallel == full.recipe.parallel
    assert len(small.segments) == len(full.segments) and len(small.layers) <= 40
    assert min(2, full.recipe.expert_data_parallel) <= small.recipe.expert_data_parallel
    assert [l.kind for l in one.layers] == [l.kind for l in small.layers]
    assert (
        one.recipe.world_size == 1 and one.recipe.schedule.global_batch_size == small.recipe.schedule.global_batch_size
    )
    wide, narrow = full.recipe.model, small.recipe.model  # what a block adds to the stream is of the same size in both
    assert narrow.init_std * narrow.hidden_size**0.5 == pytest.approx(wide.init_std * wide.hidden_size**0.5, rel=1e-2)
    p, s = small.recipe.parallel, small.recipe.schedule
    rounds = s.global_batch_size / (s.micro_batch_size * small.recipe.data_parallel * p.pipeline)
    assert rounds >= (2 if p.virtual_pipeline > 1 else 1), (
        "virtual stages take turns, and each has one before and one after"
    )
    assert small.recipe.model.hidden_size <= 64 and small.recipe.data_parallel >= min(2, full.recipe.data_parallel)


@pytest.mark.parametrize(
    ("words", "symbols"),
    [
        (("model.pattern='AEAEMM|MM'", "model.depth=8"), "*EM|MM"),
        (("model.pattern='AEM|EAEMEAEMR'", "model.depth=12"), "*EM|*EME"),
        (("model.pattern='AMME|MMEA'", "model.depth=8"), "*MME|MME*"),
        (("parallel.virtual_pipeline=4",), "*EM|ME*|*EM|ME*|ME*|*EM|*EM|EMM*"),
    ],
    ids=["a stage without experts", "uneven", "each in its own order", "eight"],
)
def test_each_segment_of_a_pipeline_keeps_its_kinds(words, symbols):
    recipe = load("nam56r_native_dp", ("cluster=h200_2", "parallel.pipeline=2", *words))
    pair = cut.pair(recipe, "cpu", 2)
    assert pair.layout.plan.pattern == symbols and pair.reference.plan.pattern == symbols.replace("|", "")
    assert not any("segment" in sentence for sentence in pair.unproven)


def test_what_a_segment_of_the_cut_lacks_is_said():
    """NAM56R's four segments take three layers that share a top-k each, too many for a GPU at full width."""
    words = ("parallel.pipeline=2", "parallel.virtual_pipeline=2")
    (said,) = (s for s in cut.pair(load("nam56r", words), "cuda", 2).unproven if "segment" in s)
    assert said.startswith("parallel.pipeline: what the model has and the cut has not: mla in segment 1; dsa, ")
    whole = cut.pair(load("nam56r", words), "cpu", 2)
    assert whole.layout.plan.pattern == "+EMEDEMEDEMMD|+EMEDEMMDEMED|+EMMD|EMM+/+-"
    assert not any("segment" in sentence for sentence in whole.unproven)


def test_each_rank_has_two_tokens_of_either_half_that_it_is_given():
    words = ("parallel.tensor=4", "parallel.sequence=true", "parallel.context=4", "cluster=h200_2x8")
    cuts = cut.widths(lowered("qwen3_8b", *words).plan)
    assert cuts["model.seq_length"] >= 2 * (2 * 4) * 4


@pytest.mark.parametrize("words", ["block feature.recompute.layers=13", "uniform feature.recompute.layers=4"])
def test_what_is_recomputed_at_once_is_cut_with_the_stage(words):
    full = f"feature.recompute.granularity=full feature.recompute.method={words}".split()
    found = cut.pair(load("nam56r_native_dp", ("cluster=h200_8", "parallel.pipeline=4", *full)), "cpu", 1).layout.plan
    assert found.recipe.feature.recompute.layers == max(found.stage_lengths) == min(found.stage_lengths) == 3


def test_gradients_of_a_proof_on_a_cpu_lie_in_many_buckets():
    """Or what is done to one of them, or at its border, would be done to all."""
    pair = cut.pair(load("nam56r_native_dp"), "cpu", 1)
    said = worker.words(worker.Side(pair.layout, Path("folder"), "cpu"))
    assert parameters(pair.layout.plan)[0] > 20 * int(said[said.index("--ddp-bucket-size") + 1])


def test_a_window_is_cut_with_the_sequence():
    words = ("model.blocks.attention.window=1024",)
    for device, window in (("cpu", 8), ("cuda", 128)):
        plan = cut.pair(load("nam56r_native_dp", words), device, 2).layout.plan
        assert plan.recipe.blocks.attention.window == window


def test_heads_share_keys_in_the_cut_as_they_do_in_the_model():
    heads = load("nam56r_native_dp", ()).model.num_attention_heads
    for groups in (heads, heads // 2, 1):
        for layout in ((), ("parallel.tensor=4", "parallel.sequence=true")):
            words = (f"model.blocks.attention.query_groups={groups}", *layout)
            recipe = cut.pair(load("nam56r_native_dp", words), "cpu", 2).layout.plan.recipe
            left = recipe.blocks.attention.query_groups
            assert (left == recipe.model.num_attention_heads) == (groups == heads) and left <= groups


def test_the_two_sides_differ_in_execution_alone():
    pair = cut.pair(load("nam56r_fused", ("parallel.tensor=2", "parallel.sequence=true")), "cuda", 2)
    assert (pair.layout.plan.recipe.model.hidden_size, pair.layout.plan.recipe.model.seq_length) == (3584, 512)
    sides = (dict(cut.leaves(to_tree(x.plan.recipe))) for x in (pair.layout, pair.reference))
    layout, one = sides
    changed = {key for key in one if layout[key] != one[key]}
    assert changed <= cut.plain().keys()
    assert {
        "execution.dsa.kernels",
        "parallel.tensor",
        "precision.cross_entropy",
        "execution.moe.dispatcher",
    } <= changed


def test_all_that_is_cut_is_listed():
    pair = cut.pair(load("nam56r_native_dp_fp8"), "cpu", 2)
    full, small = (dict(cut.leaves(to_tree(x.recipe))) for x in (pair.full, pair.layout.plan))
    other = {key for key in full | small if full.get(key, ...) != small.get(key, ...)}
    assert {line.partition(":")[0] for line in pair.shrunk} == {k for k in other if not k.startswith("assumptions.")}
    assert {"optim.lr: 0.0003 -> 0.01", "feature.fp8.recipe: tensorwise -> none"} <= {*pair.shrunk}
    for was in ("true", "false"):
        words = (f"feature.distributed_optimizer.reshardable={was}",)
        said = cut.pair(load("nam56r_native_dp", words), "cpu", 2).unproven
        assert any("reshardable: true in place of false" in line for line in said) is (was == "false")


def test_an_unsharded_optimizer_is_cut_too():
    whole = [f"feature.distributed_optimizer.{key}=false" for key in ("enabled", "overlap_param_gather")]
    pair = cut.pair(load("nam56r_native_dp", [*whole, "optim.clip_grad=0.0"]), "cpu", 2)
    for side in (pair.layout, pair.reference):
        assert side.plan.recipe.optim.clip_grad == 0, "what clips nothing clips nothing in the proof"
        assert not side.plan.recipe.feature.distributed_optimizer.enabled and cut.resumable(side.plan.recipe)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_allowed_to_the_layout_needs_no_use_on_one_rank(device):
    hosts = "cluster=h200_2 cluster.nodes=2 cluster.gpus_per_node=1 feature.cuda_graphs.impl=full_iteration"
    pair = cut.pair(load("nam56r_native_dp_fused", [*hosts.split(), "allow.whole-step-hosts=tried"]), device, 2)
    assert pair.layout.plan.recipe.world_size == 2 and not pair.reference.plan.recipe.allow


@pytest.mark.few(2)
@pytest.mark.parametrize(("steps", "eager"), [(1, None), (2, 1), (3, 2), (9, 3)])
@pytest.mark.parametrize("impl", ["full_iteration", "transformer_engine"])
def test_what_is_captured_is_replayed_in_the_proof(impl, steps, eager):
    words = [
        "cluster=h200_1",
        f"feature.cuda_graphs.impl={impl}",
        *["feature.cuda_graphs.modules=[attn]"] * (impl[0] == "t"),
    ]
    pair = cut.pair(load("nam56r_native_dp_fused", words), "cuda", steps)
    graphs = pair.layout.plan.recipe.feature.cuda_graphs
    assert (graphs and graphs.warmup_steps) == eager
    assert pair.reference.plan.recipe.feature.cuda_graphs is None
    assert (f"feature.cuda_graphs.warmup_steps: 3 -> {eager}" in pair.shrunk) is (eager in (1, 2))
    assert any("nothing is captured" in sentence for sentence in pair.unproven) is (steps == 1)
    reference = [("output", 1, "embedding", 25.0)]  # replays say nothing of it, and that is no difference
    found = compare.rows(reference, [[]], NONE, pair.layout.plan, FP32, [1])
    assert [r.what for r in found] == [FORTH] * (graphs is None)
    assert any("runs no hooks" in sentence for sentence in pair.unproven) is (graphs is not None)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("nam56r_native_dp_fused", ("+overlay=fp8", "cluster=h200_1")),
        ("nam56r_fused", ("+overlay=fp8", "cluster=h200_1", "feature.fp8.bf16_parts=[experts,latents]")),
    ],
)
def test_one_rank_has_the_columns_without_which_there_is_no_fp8(preset, words):
    pair = cut.pair(load(preset, words), "cuda", 2)
    sides = [side.plan.recipe for side in (pair.layout, pair.reference)]
    assert sides[0].feature.fp8 == sides[1].feature.fp8
    block = "mamba2" if "native" in preset else "m2rnn"
    assert all(getattr(side.blocks, block).padded_projection for side in sides)
    plain = cut.pair(load(preset, ("cluster=h200_1",)), "cuda", 2).reference.plan.recipe
    assert not getattr(plain.blocks, block).padded_projection


def test_what_a_cpu_cannot_run_is_said_and_not_counted():
    said = "\n".join(cut.pair(load("nam56r_native_dp_fp8"), "cpu", 2).unproven)
    for key in ("feature.fp8", "feature.cuda_graphs", "precision.params", "mamba2: mamba-ssm's kernels"):
        assert key in said
    assert "mamba3" not in said  # of which there is none
    with pytest.raises(Refused, match="Muon, in bf16 alone, cannot be proven on a CPU"):
        cut.pair(load("nam56r_native_dp", ("+overlay=muon",)), "cpu", 2)


# The comparison --------------------------------------------------------------------------------------------------------------------


def row(what: str, off: float, layer: int | None = None, step: int = 1, name: str = "decoder.layers.0.x") -> Row:
    return Row(what, step, name, off, 1e-5, layer)


def test_the_row_to_look_at_first():
    """A wrong gradient spoils all below it, a wrong loss every gradient; whatever comes later is a consequence."""
    backward = [
        row(GRADIENT, 1e-2, 1),
        row(GRADIENT, 1e-3, 5),
        row(GRADIENT, 1e-7, 7),
        row(LOSS, 0.0),
        row(WEIGHT, 1.0, 1, 2),
    ]
    assert compare.first_off(backward) == backward[1]
    forward = [*backward, row(LOSS, 1e-3, name="microbatch 1"), row(COUNT, 3, 2)]
    assert compare.first_off(forward).what == LOSS
    layers = [row(FORTH, 1e-7, 1), row(FORTH, 1e-3, 4), row(FORTH, 1e-2, 5), row(FORTH, 1e-8, 0, name="embedding")]
    assert compare.first_off([*forward, *layers]) == layers[1]
    assert compare.first_off([row(GRADIENT, 1e-7, 3)]) is None
    ends = [
        row(GRADIENT, off, name=name)
        for off, name in ((0.5, "embedding.w"), (0.1, "decoder.final_norm.w"), (1e-3, "output_layer.w"))
    ]
    for deepest in (2, 1):
        assert compare.first_off([*backward, *ends[: deepest + 1]]) == ends[deepest]
    assert compare.first_off([*backward, ends[0]]) == backward[1]


@cache
def plan():
    return cut.pair(load("nam56r"), "cpu", 1).layout.plan


NONE = {("gradient", 2): []}  # no tensor of the step that is compared


def compared(*ranks: list, names=None, reference=()) -> dict[str, Row]:
    names = names or {("gradient", 1): [("decoder.layers.1.mlp.router.weight", 8)]}
    return {r.name: r for r in compare.rows(reference, ranks, names, plan(), FP32, [1])}


def test_shards_are_added_up_and_the_worst_replica_counts():
    key = "decoder.layers.1.mlp.router.weight"
    halves = [("gradient", 1, key, ((0, 4),), 3e-12, 1.0, 4)], [("gradient", 1, key, ((4, 8),), 1e-12, 1.0, 4)]
    found = compared(*halves)[key]
    assert found.off == pytest.approx(2e-6) and found.agrees
    assert (found.layer, found.kind, found.key) == (2, "moe", "model.blocks.moe")
    other_replica = [("gradient", 1, key, ((4, 8),), 1e-2, 1.0, 4)]
    assert compared(*halves, other_replica)[key].off == pytest.approx(0.1)


@pytest.mark.parametrize(("shares", "off"), [((4.0, 2.0, 2.0), 0), ((4.0,), 0.5), ((8.0, 8.0), 1)])
def test_the_norm_counts_a_tensor_once_over_all_ranks(shares, off):
    key, other = "decoder.layers.1.mlp.router.weight", "decoder.layers.2.input_layernorm.weight"
    said = [[("norm", 1, key, share), ("norm", 1, other, 3.0 / len(shares))] for share in shares]
    names = {("gradient", 1): [(other, 3), (key, 8)]}
    (found,) = (r for r in compare.rows((), said, names, plan(), FP32, [1]) if r.what == "norm")
    assert (found.off, found.agrees) == (off, not off)
    assert not off or (found.name, found.note) == (key, f"counted {sum(shares) / 8:g} times")


def test_sums_over_all_tokens_are_judged_by_the_largest_of_their_streams():
    """But not the weights that steps by them make."""
    keys = [f"decoder.layers.1.hyper_connection.{name}" for name in ("alpha_pre", "mapping_proj.weight")]
    for what, off in (("gradient", 0.01), ("weight", 0.1)):
        said = [(what, 1, key, ((0, 1),), 1e-2, whole, 1) for key, whole in zip(keys, (1.0, 100.0), strict=True)]
        assert compared(said, names={(what, 1): [(key, 1) for key in keys]})[keys[0]].off == pytest.approx(off)


@pytest.mark.parametrize(("norm", "elements", "off"), [(1e-6, 1, 2e-5), (2.0, 1, 1e-7), (1e-6, 4, 1e-5)])
def test_a_weight_that_a_step_takes_to_nothing_is_compared_with_the_step(norm, elements, off):
    """Squares of a difference of 2e-7 and of the norm: a step moves each element by 0.01."""
    key = "decoder.layers.1.mlp.router.weight"
    said = [("weight", 1, key, ((0, elements),), (2e-7) ** 2, norm**2, elements)]
    found = compared(said, names={("weight", 1): [(key, elements)]})[key]
    assert found.off == pytest.approx(off)


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ([], "the ranks do not hold all of it"),
        *(
            (
                [("gradient", 1, "decoder.layers.1.mlp.router.weight", (at,), 0.0, 1.0, 4) for at in held],
                "the ranks do not hold all of it",
            )
            for held in ([(0, 4)], [(0, 4), (2, 6), (4, 8)])
        ),
        ([("gradient", 1, "decoder.layers.1.mlp.router.weight", None, 0.0, 0.0, 0)], "another shape than on one rank"),
        ([("gradient", 1, "decoder.layers.1.mlp.router.bias", ((0, 4),), 0.0, 1.0, 4)], "one rank has no such tensor"),
        ([("gradient", 1, "decoder.layers.1.mlp.router.weight", ((0, 8),), float("nan"), 1.0, 8)], ""),
    ],
)
def test_what_is_missing_or_no_number_differs(said, note):
    bad = [r for r in compared(said).values() if r.off == inf]
    assert note in [r.note for r in bad]


@pytest.mark.parametrize(("square", "off"), [(0.0, 0), (1e-20, inf)])
def test_nothing_agrees_with_zeros_but_zeros(square, off):
    key = "decoder.layers.1.mlp.router.weight"
    assert compared([("gradient", 1, key, ((0, 8),), square, 0.0, 8)])[key].off == off


def test_what_was_never_compared_is_not_proven():
    found = [row(LOSS, 0.0), row(GRADIENT, 0.0), row(WEIGHT, 0.0), row(LOSS, 0.0, step=2), row(GRADIENT, 0.0, step=2)]
    nothing = ", ".join(f"no {what} of step 1" for what in (LOSS, GRADIENT, WEIGHT))
    said = [("gradient", 1, "w"), ("weight", 1, "w")]
    assert compare.silent(found, [said], [1]) == "" and compare.silent([], [], [1]) == f"nothing to compare: {nothing}"
    assert compare.silent(found, [said], [1, 2]) == "nothing to compare: no weight of step 2"
    # a replica, for which the other would speak
    for mute, none in (([], "gradient of step 1, no weight"), (said[:1], "weight")):
        assert compare.silent(found, [said, mute], [1]) == f"rank 1 said no {none} of step 1"


def test_a_rank_that_left_nothing_is_heard_as_silent(tmp_path):
    bench = proof.Bench(load("nam56r", ("cluster=h200_1",)))
    bench.folder = tmp_path
    torch.save([("weight", 1, "w")], tmp_path / "x-10.said")
    assert bench._said("x", 11) == [*[[]] * 10, [("weight", 1, "w")]]


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["every", str(tmp_path / "no" / "proven.json")])
    monkeypatch.setattr(every, "asked", None)
    with pytest.raises(Refused, match="cannot write"):
        every.command()


def test_a_pair_is_another_where_either_of_its_sides_is():
    recipe, pair = every.asked("nam56r", "none", "cpu")
    one, other = pair.layout, lowered("nam56r_native_dp")
    shown = SimpleNamespace(proof=lambda _, pair: proof.Proof(pair, "cpu", 2, FP32, (proof.Part(proof.START, ()),)))
    sides, seen = ((one, one), (one, other), (other, one), (one, other)), {}
    told = [every.outcome("a", "b=c", (recipe, replace(pair, layout=x, reference=y)), seen, shown) for x, y in sides]
    assert [row["verdict"] == every.AS for row in told] == [False, False, False, True]


def test_of_a_pair_the_worst_of_all_parts_is_told():
    """A start, a resume and a run have rows of their own; each has the worst of something."""
    recipe, pair = every.asked("nam56r", "none", "cpu")
    off = [{"gradient": 0.1, "weight": 0.6}, {"gradient": 0.3, "weight": 0.2}, {"gradient": 0.2, "weight": 0.4}]
    parts = tuple(
        proof.Part(f"part {n}", tuple(Row(what, 1, name, so / (1 + (name == "b")), 1.0) for what, so in it.items() for name in "ab"))
        for n, it in enumerate(off)
    )  # fmt: skip
    shown = SimpleNamespace(proof=lambda _, pair: proof.Proof(pair, "cpu", 2, FP32, parts))
    row = every.outcome("a", "b=c", (recipe, pair), {}, shown)
    assert (row["gradient"], row["weight"], row["compared"]) == (0.3, 0.6, 12)


def test_a_parameter_of_which_no_checkpoint_has_a_part_keeps_no_values_of_its_own(monkeypatch):
    """Each side would have others, and the layout be blamed."""
    model = torch.nn.Linear(2, 2)
    held = [
        SimpleNamespace(key=name, data=p.data, prepend_axis_num=0, local_shape=p.shape, global_offset=(0,) * p.ndim)
        for name, p in model.named_parameters()
    ]
    whole = {"weight": torch.eye(2), "bias": torch.ones(2)}
    monkeypatch.setattr(tensors, "shards", lambda _: held)
    tensors.fill(model, whole)
    assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    held.pop()
    with pytest.raises(AssertionError, match="bias"):
        tensors.fill(model, whole)


@pytest.mark.parametrize(
    "words",
    [
        "execution.mamba3.keep_states=true",
        "cluster.gpus_per_node=1",
        "feature.fp8.keep_inputs=true",
        "precision.cross_entropy=fused",
    ],
)
def test_what_goes_by_no_argument_makes_another_run(words):
    """It was reported as proven with an earlier one."""
    fp8 = ("feature.fp8.recipe=tensorwise", "feature.fp8.bf16_parts=[experts,latents,m2rnn]")
    recipe = ("cluster=h200_2", "parallel.tensor=1", "precision.deterministic=false", *fp8)
    assert every.run_of(lowered("nam56r", *recipe)) != every.run_of(lowered("nam56r", *recipe, words))


def test_outputs_losses_and_counts_of_all_ranks_are_put_together():
    module = "decoder.layers.1"
    parts = [[("output", 1, module, 9.0)], [("output", 1, module, 16.0)]]
    found = compared(*parts, names=NONE, reference=[("output", 1, module, 25.0)])[module]
    assert found.off == 0 and (found.layer, found.kind) == (2, "moe")
    found = compared(parts[1], [], names=NONE, reference=[("output", 1, module, 25.0)])[module]
    assert found.off == pytest.approx(0.2)
    reference = [("loss", 1, 0, [10.0, 4.0]), ("loss", 1, 1, [20.0, 4.0]), ("count", 1, "2", [5.0, 3.0])]
    layout = (
        [("loss", 1, 0, [10.0, 4.0]), ("count", 1, "2", [4.0, 1.0])],
        [("loss", 1, 1, [20.0, 4.0]), ("count", 1, "2", [1.0, 2.0])],
    )
    assert all(r.agrees for r in compared(*layout, names=NONE, reference=reference).values())
    (lost, *_), _ = layout
    found = compared([lost], [("count", 1, "2", [4.0, 4.0])], names=NONE, reference=reference)
    assert found["microbatch 2"].note == "no rank computed it" and found["router"].off == 1 / 8
    # no rank counted those of the other
    assert compared(layout[0], names=NONE, reference=reference)["router"].off == 3 / 8
    for said in ((4.0, 3.0), (3.0, 4.0)):  # of ranks that have the same microbatch
        ranks = ([("loss", 1, 0, [10.0, tokens])] for tokens in said)
        found = compared(*ranks, names=NONE, reference=reference)["microbatch 1"]
        assert (found.off, found.note) == (inf, "over [3.0, 4.0] tokens, not 4")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("resume", "zero", "limit"), [(None, True, 1e-4), ("reference", False, 1e-5), ("layout", False, 1e-4)]
)
def test_a_step_that_begins_with_one_ranks_bits_has_the_first_ones_limits(resume, zero, limit, monkeypatch, tmp_path):
    """One rank's checkpoint has these bits, the layout's has not; and what is read from one is no start."""
    key, module = "decoder.layers.1.mlp.router.weight", "decoder.layers.1"
    bench = proof.Bench(load("nam56r", ("cluster=h200_1",)), steps=2)
    bench.folder = tmp_path
    for at in ("weight-0", "gradient-2", "weight-2"):
        torch.save({key: torch.ones(8)}, tmp_path / f"{at}.pt")
    said = [("output", 2, module, 25.0), *((what, 2, key, ((0, 8),), 0.0, 1.0, 8) for what in ("gradient", "weight"))]
    monkeypatch.setattr(bench, "_run", lambda *_: "")
    monkeypatch.setattr(bench, "_said", lambda *_: [said])
    found = bench._compared("", bench._side("x", resume=resume), [2]).rows
    assert (found[0].what == compare.START) == zero
    assert [(r.what, r.limit) for r in found[zero:]] == [(FORTH, limit), (GRADIENT, limit), (WEIGHT, 1e-5)]


# The command -----------------------------------------------------------------------------------------------------------------------


def command(*words: str) -> subprocess.CompletedProcess:
    run = [sys.executable, "-W", "ignore", "-m", "nam_megatron.prove", *words]
    return subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_the_author_stack_in_two_tensor_ranks_is_proven():
    """From the command line, with a resume in either direction: what is proven, how far off, and what is not."""
    ran = command("conf=nam56r", *planted.CASES["tensor"][1], "format=json")
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told["verdict"] == "proven" and told["ranks"] == 2
    assert [(part["title"], part["first"]) for part in told["parts"]] == [
        (t, None) for t in (proof.START, proof.RESUMED, proof.BACK)
    ]
    assert told["parts"][0]["compared"] > 500
    worst = {row["what"]: row["off"] for row in told["parts"][0]["worst"] if row["step"] == 1}
    assert 0 < worst["gradient"] <= 1e-5
    assert any("dsa.kernels: naive in place of fused" in sentence for sentence in told["unproven"])


REFUSED = {
    "steps": (("steps=0",), 2, "`0` is no number of steps from 1 to 100 @ steps"),
    "steps that are none": (("steps=true",), 2, "`true` is no number of steps from 1 to 100 @ steps"),
    "no steps": (("steps=",), 2, "`` is no number of steps from 1 to 100 @ steps"),
    "resume": (("resume=1",), 2, "`1` is neither true nor false @ resume"),
    "a device": (
        ("device=gpu",),
        2,
        "h100, h200; one of your own is found by `--config-dir FOLDER`; what a proof runs on is `device=cpu` or",
    ),
    "two devices": (("device=cpu", "device=cuda"), 2, "error: `device` is given twice: `cpu` and `cuda`\n"),
    "an option": (("--nonsense",), 2, "error: options: unrecognized arguments: --nonsense\n\nhint: "),
    "a group without a name": (
        ("lane=null", "model=3"),
        2,
        "error: `null` is no name @ lane\n\nhint: `lane` is a group",
    ),
    "format": (("format=xml",), 2, "no `xml`"),
    "recipe": (("parallel.tensor=3",), 2, "8 GPUs cannot hold"),
    "ranks": (("conf=kimi_k2",), 2, "256 ranks would run on this host; 32 at most @ parallel"),
    "dropout": (
        ("conf=nam56r_native_dp", "+overlay=cp", "model.attention_dropout=0.1"),
        2,
        "drop other values than one does, and nothing could be compared @ model.attention_dropout",
    ),
    "capacity": (
        ("conf=nam56r_native_dp", "+overlay=tp_sp", "model.blocks.moe.capacity_factor=1.25"),
        2,
        "with `parallel.tensor=2` this trains another model than one rank does @ model.blocks.moe.capacity_factor",
    ),
    "balance over microbatches": (
        ("conf=nam56r_native_dp", "cluster=h200_2", "model.blocks.moe.balancing=global_aux_loss"),
        2,
        "with 2 of them this trains another model than one rank does @ model.blocks.moe.balancing",
    ),
    "muon": (
        ("conf=nam56r_native_dp", "+overlay=muon"),
        2,
        "Megatron's Muon, in bf16 alone, cannot be proven on a CPU",
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("words", "code", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(words, code, message):
    ran = warm(*words, module="nam_megatron.prove.__main__")
    assert (ran.code, ran.out) == (code, "") and message in ran.err and "Traceback" not in ran.err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("words", ["nam_megatron.prove.__main__ device=cuda", "nam_megatron.prove.every --device cuda"])
def test_a_host_without_gpus_is_told_before_a_rank_starts(words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(sys.argv[0], run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and "error: torch sees no GPU on this host @ device\n" in err
    assert "> reference" not in err


def test_what_a_proof_on_gpus_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(proof, "find_spec", lambda name: name)
    assert not list(proof.lacking(2))
    (few,) = proof.lacking(4)
    assert (few.message, few.key) == ("4 ranks, and torch sees 2 GPUs on this host", "device")
    monkeypatch.setattr(proof, "find_spec", lambda _: None)
    assert [problem.message for problem in proof.lacking(2)] == ["Transformer Engine is not installed"]


def test_limits_by_which_nothing_was_compared_are_not_told():
    part = proof.Part("one rank", (), "it broke")
    found = proof.Proof(cut.pair(load("nam56r"), "cuda", 1), "cuda", 1, FP32, (part,))
    assert "limits:" not in text(found) and json.loads(as_json(found))["limits"] is None
    assert "limits:" in text(replace(found, parts=(replace(part, rows=(row(GRADIENT, 0.0),)),)))


def test_of_each_kind_and_step_the_worst_that_agrees_is_told_beside_what_differs():
    rounded = replace(row(GRADIENT, 1.5e-5, name="c"), limit=2e-5, note="by what rounding makes of it")
    broken = replace(row(GRADIENT, inf, name="d"), note="the ranks do not hold all of it")
    rows = [row(GRADIENT, off, name=name) for off, name in ((1e-7, "a"), (3e-6, "b"), (2e-7, "e"))]
    rows += [rounded, broken, row(WEIGHT, 2e-6), row(WEIGHT, 1e-6, step=2), row(WEIGHT, 3e-6, step=2), row(LOSS, 0.0)]
    found = proof.Proof(cut.pair(load("nam56r"), "cpu", 1), "cpu", 2, FP32, (proof.Part(proof.START, tuple(rows)),))
    (part,) = json.loads(as_json(found))["parts"]
    told = {what: [(x["step"], x["what"], x["off"]) for x in part[what]] for what in ("worst", "rounding", "differ")}
    assert told["worst"] == [(1, LOSS, 0.0), (1, GRADIENT, 1.5e-5), (1, WEIGHT, 2e-6), (2, WEIGHT, 3e-6)]
    assert (told["rounding"], told["differ"]) == ([(1, GRADIENT, 1.5e-5)], [(1, GRADIENT, None)])


def test_nothing_is_proven_of_what_is_not_built():
    ran = warm("conf=nam56r", module="nam_megatron.prove.__main__", before=unbuilt)
    assert (ran.code, ran.out, ran.err) == (3, "", "error: `mamba3` is not built: the mixer\n")


def test_what_our_layers_do_not_take_is_megatrons_on_both_sides():
    stock = ("execution.mla.kernels=megatron", "execution.dsa.kernels=megatron", "model.blocks.dsa.full_every=1")
    for words, kernels in ((stock, "naive"), ((*stock, "model.normalization=LayerNorm"), "megatron")):
        blocks = cut.pair(load("nam56r", words), "cpu", 1).reference.plan.recipe.blocks
        assert (blocks.mla.kernels, blocks.dsa.kernels, blocks.mamba3.kernels) == (kernels, kernels, "naive")


def test_each_comparison_has_the_limit_of_its_own_noise():
    noisy, still = "decoder.layers.0.a", "decoder.layers.0.b"
    noise = [
        row(GRADIENT, 0.02, 1, name=noisy),
        row(GRADIENT, 0.3, 1, step=2, name=noisy),
        row(GRADIENT, 0.0, 1, name=still),
    ]
    limits = compare.beyond(
        [*noise, row(COUNT, 0.01, 4, name="router"), row(LOSS, 1e-3, name="microbatch 3"), row(compare.START, 0.004, 1)]
    )
    assert limits.of(GRADIENT, 1, noisy) == pytest.approx(0.08) and limits.of(GRADIENT, 2, noisy) == pytest.approx(1.2)
    assert limits.of(GRADIENT, 1, still) == 2**-5 and limits.of(GRADIENT, 2, still) == 2**-4
    assert limits.of(COUNT, 1, 4) == pytest.approx(0.04) and limits.of(COUNT, 1, 2) == compare.COUNTS_BF16
    assert limits.of(LOSS, 1, None) == pytest.approx(4e-3) and limits.of(compare.START, 1, noisy) == 0


def test_single_numbers_share_their_noise_with_their_like():
    """Of mHC's scalars one had a limit of 0.37 by a lucky draw, was off by 0.43, and the proof said `differs`."""
    names = [f"decoder.layers.{n}.hyper_connection.alpha_{a}" for n in range(4) for a in ("pre", "post", "res")]
    noise = [replace(row(GRADIENT, 0.1 if n else 0.001, 1, name=name), elements=1) for n, name in enumerate(names)]
    many = replace(row(GRADIENT, 0.1, 1, name="decoder.layers.0.hyper_connection.mapping"), elements=4096)
    limits = compare.beyond([*noise, many])
    assert limits.of(GRADIENT, 1, names[0]) == pytest.approx(0.6, rel=0.05) == limits.of(GRADIENT, 1, names[5])
    assert limits.of(GRADIENT, 1, many.name) == pytest.approx(0.4) and limits.of(GRADIENT, 2, names[0]) == 2**-4
    assert limits.of(WEIGHT, 1, names[0]) == 2**-5


def test_a_bias_may_turn_where_its_expert_had_the_mean():
    """64 experts, of which two had the mean of 100 but for one token: bf16 may send 2 % elsewhere, and those two may turn."""
    key, counts = "decoder.layers.1.mlp.router.expert_bias", [110.0, 90.0] * 31 + [101.0, 99.0]

    def found(limits, off, *steps):
        said, last = [("count", n, 2, given) for n, given in enumerate(steps or [counts], 1)], len(steps) or 1
        ranks, names = [[("weight", last, key, ((0, 64),), off**2, 1.0, 64), *said]], {("weight", last): [(key, 64)]}
        return compare.rows(said, ranks, names, plan(), limits, [last])[-1]

    noisy, both = compare.beyond([]), sqrt(2 * 2**2 / 64)
    assert found(noisy, both).agrees and not found(noisy, 1.1 * both).agrees and not found(FP32, both).agrees
    assert found(noisy, 0.0, [110.0, 90.0] * 32).limit == noisy.of(WEIGHT, 1, key), "none was near it"
    assert not found(FP32, both, [100.0] * 2 + [110.0, 90.0] * 31).agrees, "fp32 sends no token elsewhere"
    assert found(noisy, 0.0, counts, [110.0, 90.0] * 32).limit == pytest.approx(both / 2), (
        "two steps, one of which may turn"
    )


def test_what_noise_alone_may_do_is_not_counted_as_proven():
    blunt = Row(GRADIENT, 2, "decoder.layers.0.a", 3.0, 1.2, 1, "mla")
    part = proof.Part(proof.START, (blunt, row(GRADIENT, 0.0)))
    found = proof.Proof(cut.pair(load("nam56r"), "cpu", 1), "cpu", 1, FP32, (part,))
    assert blunt.agrees and found.word == proof.PROVEN
    assert found.unproven[-1].startswith("1 gradients of step 2: rounding alone")
    counted = replace(found, parts=(part, proof.Part(proof.START, (row(compare.NORM, 0.0),))))
    told = [[s for s in proof_.unproven if s.startswith("optim.clip_grad")] for proof_ in (found, counted)]
    assert [len(said) for said in told] == [1, 0], "under Megatron-FSDP no rank says what its norm counts"
    assert not replace(blunt, off=inf).agrees, "what is no number differs"
    for title, unproven in ((proof.START, True), (proof.AGAIN, True), (proof.RESUMED, False)):
        told = replace(found, parts=(replace(part, title=title),)).unproven
        assert ("a resume in another layout: not run" in told) == unproven


def test_gathering_leaves_the_hooks_of_narrow_weights_alone():
    """A parameter whose data has another type for a moment gets a new accumulator, without DDP's hooks."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from nam_megatron.prove.tensors import gathered

    class Model(torch.nn.Module):
        pg_collection = SimpleNamespace(dp_cp=None)

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def sharded_state_dict(self, metadata):
            return {"w": ShardedTensor.from_rank_offsets("w", self.w.data)}

    model, fired = Model(), []
    weight, accumulator = model.w, model.w.expand_as(model.w).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: fired.append(1))
    ((key, shape, _, value),) = gathered(model, lambda p: torch.full_like(p, 1 + 2**-20, dtype=torch.float32))
    assert (key, shape, value.dtype) == ("w", (4,), torch.float32) and (value == 1 + 2**-20).all()
    assert model.w is weight
    model.w.sum().backward()
    assert fired


def test_weights_that_begin_alike_are_told_apart():
    """A shard of ones in the wrong place would be its right one's equal."""
    made = torch.nn.ParameterList([torch.ones(4), torch.zeros(4), torch.arange(4.0), torch.ones(1)])
    worker._tell_apart([made])
    assert [len(p.unique()) for p in made] == [4, 4, 4, 1] and made[2].tolist() == [0, 1, 2, 3] and made[3] == 1
    samples = worker.Samples(8, 6, 10, 1, False)  # a mean over all tokens would be that over those that count
    count = [samples[i]["loss_mask"].sum().item() for i in range(8)]
    assert len({*count}) > 2 and min(count) > 0, "each sample is learned from"


def test_a_side_has_what_its_last_run_said_alone(monkeypatch, tmp_path):
    """Of a layout of more ranks that ran before it in the same bench."""
    bench = proof.Bench(load("nam56r_native_dp", ("cluster=h200_1",)), steps=1)
    bench.folder = tmp_path
    (tmp_path / "layout-3.said").touch()
    for codes, said in (
        ([0], ""),
        ([1], "rank 0 of 1 ended with code 1: it broke"),
        ([-9], "1 of 1 ranks were killed"),
    ):
        monkeypatch.setattr(ranks, "fork", lambda *_, codes=codes: [ranks.Rank(code, "", "it broke") for code in codes])
        assert bench._run(bench._side("layout")) == said and not [*tmp_path.iterdir()]


def test_a_cpus_adam_takes_the_steps_of_torchs():
    rates = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(torch.arange(1.0, 5)) for _ in range(2))
    pair = (
        (ours, cpu.FusedAdam([ours], capturable=False, adam_w_mode=True, **rates)),
        (theirs, torch.optim.AdamW([theirs], **rates)),
    )
    for step in range(3):
        for p, optimizer in pair:
            p.grad = torch.tensor([1.0, -2.0, 0.1, 0.0]) * (step + 1)
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_shaken_weights_are_the_noise_of_rounding():
    with proof.Bench(load("nam56r_native_dp", ("cluster=h200_1",)), steps=1) as bench:
        assert not bench.begin().broken
        rows = bench._shaken().rows
    moved = [r.off for r in rows if r.what == compare.START and r.name.endswith("weight")]
    assert len(moved) > 10 and all(2**-26 < off < 2**-23 for off in moved)
    assert 2**-26 < max(r.off for r in rows if r.what == GRADIENT) < 1e-4


def test_what_rounding_does_to_one_rank_too_is_no_difference():
    """By its own noise, told in a note; neither far off, nor in counts, nor where the noise sent a token elsewhere."""
    noise = [row(GRADIENT, 4e-6, name="a")]
    near, far = (row(GRADIENT, off, name="a") for off in (1.5e-5, 1.7e-5))
    (told,) = compare.rounded([near], noise, "it")
    assert told.agrees and told.note.endswith("by it: 1.6e-05") and told.limit == pytest.approx(1.6e-5)
    for other in (far, replace(near, name="b"), replace(near, step=2)):
        assert compare.rounded([other], noise, "it") == (other,)
    assert compare.rounded([near], [*noise, row(COUNT, 0.01, 4, name="router")], "it") == (near,)
    assert compare.rounded([near], [row(GRADIENT, 1.1e-4, name="a")], "it") == (near,), "as large as a choice makes it"
    assert compare.may_be_rounding([near, row(LOSS, 0.0)]) and not compare.may_be_rounding([row(LOSS, 0.0)])
    for other in (row(GRADIENT, 1.1e-4), row(COUNT, 0.01), row(compare.START, 1.1e-5)):
        assert not compare.may_be_rounding([near, other])


def test_one_rank_is_shaken_once_and_only_where_no_limit_knows_its_noise(monkeypatch, capsys):
    """A part that broke has nothing to be judged, and a run that broke judges nothing."""
    bench, shaken = proof.Bench(load("nam56r", ("cluster=h200_1",))), []
    noise = proof.Part("shaken", (row(GRADIENT, 4e-6, name="a"),))
    monkeypatch.setattr(bench, "_shaken", lambda: shaken.append(1) or noise)
    near = proof.Part("x", (row(GRADIENT, 1.5e-5, name="a"),))
    for part in (near, near, replace(near, rows=(row(GRADIENT, 0.0),)), replace(near, broken="it broke")):
        assert (bench.judged(part).first is None) == (not part.broken)
    assert len(shaken) == 1
    bench._noise, noise = None, proof.Part("shaken", (), "it is full")
    assert bench.judged(near) == near and capsys.readouterr().err == "> shaken: it is full\n"


def test_a_gpu_asks_fp32_for_norms_and_for_nothing_else(monkeypatch):
    """A norm is one number, and its noise one draw, which all layers share; the rest has noise of its own. Tokens may go elsewhere."""
    bench = proof.Bench(load("nam56r", ("cluster=h200_1",)))
    bench.device = "cuda"

    def part(*found):
        rows = (replace(row(what, off, name=f"layers.{n}", step=2), limit=0.0625, elements=1) for what, n, off in found)
        return proof.Part("one rank in fp32", tuple(rows))

    def judged(*found):
        found = bench.judged(part(*found)).rows
        return [x.name for x in found if not x.agrees], {x.note for x in found if x.note}

    noise = part((FORTH, 1, 0.05), (FORTH, 2, 0.01), (GRADIENT, 3, 0.05), (COUNT, 4, 0.01))
    monkeypatch.setattr(bench, "_in_fp32", lambda: noise)
    shared = 6 * sqrt((0.05**2 + 0.01**2) / 2)
    notes = {f"its limit is what rounding may make of it, by one rank in fp32: {shared:.1e}"}
    assert judged((FORTH, 1, 0.21), (FORTH, 2, 0.2)) == ([], notes)
    assert judged((FORTH, 1, 0.22), (FORTH, 2, 0.05)) == (["layers.1"], set())
    assert judged((FORTH, 1, 0.1), (GRADIENT, 3, 0.07)) == (["layers.1", "layers.3"], set())


def test_one_rank_in_fp32_begins_with_the_references_weights():
    lowering = cut.pair(load("nam56r_native_dp", ("cluster=h200_1",)), "cuda", 1).reference
    on_gpu = worker.Side(lowering, Path("folder"), "cuda", "exact", exact=True)
    assert not {"--bf16", "--load"} & {*worker.words(on_gpu)} and "--bf16" in worker.words(replace(on_gpu, exact=False))
    with proof.Bench(load("nam56r_native_dp", ("cluster=h200_1",)), steps=1) as bench:
        assert not bench.begin().broken
        exact = bench._in_fp32()
    assert not exact.broken and all(row.agrees for row in exact.rows)
    assert {compare.START, FORTH, GRADIENT} <= {row.what for row in exact.rows}


@pytest.mark.parametrize(
    "preset, said", [("nam56r_native_dp", "fp32"), ("nam56r_native_dp_fp8", "fp32, which FP8 multiplies")]
)
def test_what_fp8_multiplies_is_not_called_fp32_alone(monkeypatch, preset, said):
    bench = proof.Bench(load("nam56r_native_dp", ("cluster=h200_1",)))
    bench.pair, bench.folder = cut.pair(load(preset, ("cluster=h200_1",)), "cuda", 1), Path("folder")
    monkeypatch.setattr(bench, "_compared", lambda title, *_: title)
    assert bench._in_fp32() == f"one rank in {said}"


def test_a_run_that_says_nothing_is_not_equal_to_another(monkeypatch):
    bench = proof.Bench(load("nam56r", ("cluster=h200_1",)))
    bench.folder = Path("folder")
    said = [[(what, step, "w") for what in ("gradient", "weight") for step in (1, 2)]]
    monkeypatch.setattr(bench, "_run", lambda *_: "")
    for silent, broken in (
        ("layout", [True, True]),
        ("twice", [True, False]),
        ("again", [False, True]),
        ("", [False] * 2),
    ):
        monkeypatch.setattr(bench, "_said", lambda name, _, silent=silent: [[]] if name == silent else said)
        assert [part.broken.startswith("rank 0 said no gradient of step") for part in bench.equal()] == broken


def test_an_output_that_was_let_go_of_comes_back_into_every_view():
    output = torch.zeros(2, 3)
    row, version = output[1], output._version
    output.untyped_storage().resize_(0)
    cpu._bytes_back(output, torch.arange(6.0).view(2, 3))
    assert row.tolist() == [3.0, 4.0, 5.0] and output.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert output._version == version, "autograd would complain"


# Layouts ---------------------------------------------------------------------------------------------------------------------------

# A sample: `python -m nam_megatron.prove.every` does all presets with all overlays.
SAMPLE = {
    "two stages of two, MTP": (
        "nam56r_native_dp", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "feature.mtp.depths=2", "cluster=h200_2",
    ),
    "experts and a mixer in MTP, over every kind of rank": (
        "nam56r_native_dp", "+overlay=pp_tp_sp", "parallel.expert=2", "execution.moe.dispatcher=alltoall", "feature.mtp.depths=1",
        "feature.mtp.pattern=AEM", "model.blocks.moe.aux_loss_coeff=0.01", "cluster=h200_4",
    ),
    "a stage without an indexer and one without experts, whose losses Megatron's log sums over all stages": (
        "nam52r_h200_4full_9sparse_candidate_v1", "parallel.pipeline=2", "cluster=h200_2",
    ),
    "Megatron's kernels, recomputed": (
        "nam56r", "execution.mla.kernels=megatron", "execution.dsa.kernels=megatron", "feature.recompute.granularity=selective",
        "feature.recompute.modules=[layernorm,moe]", "cluster=h200_1",
    ),
    "experts, local overlay and the bits of a second run": (
        "nam56r_native_dp", "+overlay=ep", "cluster=h200_2", "precision.deterministic=true",
    ),
    "a sequence over two ranks, the author stack's": ("nam56r_fused", "+overlay=cp", "cluster=h200_2"),
    "a sequence over two ranks, beside tensor ranks and Megatron's kernels": (
        "nam52r_h200_4full_9sparse_candidate_v1", "parallel.context=2", "parallel.tensor=2", "parallel.sequence=true",
        "execution.mla.kernels=megatron", "execution.dsa.kernels=megatron", "cluster=h200_4",
    ),
    "sharded, each expert on one rank, and the bits of a second run": (
        "nam56r_fused", "+overlay=fsdp_ep", "cluster=h200_2", "precision.deterministic=true",
    ),
    "sharded, over tensor ranks, two of them to an expert": (
        "nam52_h200_dense_ref_v1", "+overlay=tp_sp_ep", "parallel.expert_tensor=2", "feature.megatron_fsdp.enabled=true", "cluster=h200_4",
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("words", SAMPLE.values(), ids=SAMPLE.keys())
def test_a_sample_of_layouts_is_proven(words):
    preset, *overrides = words
    found = proof.prove(load(preset, overrides), steps=2, resume="precision.deterministic=true" in words)
    assert found.word == proof.PROVEN, text(found)
    if "precision.deterministic=true" in words:
        resumed = [] if "+overlay=fsdp_ep" in words else [proof.AGAIN]  # its checkpoints stay in their layout
        assert [part.title for part in found.parts if part.title in (proof.TWICE, proof.AGAIN)] == [
            proof.TWICE,
            *resumed,
        ]
        assert all(len(part.rows) > 50 for part in found.parts)


def other_bits(backward: bool) -> None:
    """Make the last layer's experts put out, or get back, something else than in another run, by less than anybody would see."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    forward = MoELayer.forward

    def elsewhere(self, *args, **named):
        output, *rest = forward(self, *args, **named)
        if self.layer_number == 5 and backward:
            output.register_hook(lambda grad: grad * (1 + 2**-22))
        elif self.layer_number == 5:
            output = output * (1 + 2**-22)
        return output, *rest

    MoELayer.forward = elsewhere


@pytest.mark.parametrize(
    "other", [[[3.0, 4.0], [1.0, 2.0]], [[1.0, 2.0], [4.0, 3.0]], [[1.0, 2.0], [3.0, 3.0]]], ids=str
)
def test_bits_in_another_place_are_other_bits(monkeypatch, other):
    """And so are two that are equal in the place of two others that are."""

    def bits(values):
        found, model = {}, torch.nn.Identity()
        monkeypatch.setattr(worker, "_modules", lambda _: [("layer", model)])
        hooks = [*worker._passing(model, found)]
        model(torch.tensor(values, requires_grad=True)).backward(torch.tensor(values))
        assert hooks and len(found) >= 2
        return {name: value.item() for name, value in found.items()}

    mine, theirs = bits([[1.0, 2.0], [3.0, 4.0]]), bits(other)
    assert mine == bits([[1.0, 2.0], [3.0, 4.0]]) and all(mine[name] != theirs[name] for name in mine)
    assert bits([[1.0, 1.0]]) != bits([[2.0, 2.0]])


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_second_run_with_other_bits_is_told_by_the_module_that_first_had_them(backward):
    """Over two stages, whose layers are counted through."""
    recipe = load("nam56r_native_dp", ("precision.deterministic=true", "parallel.pipeline=2", "cluster=h200_2"))
    with proof.Bench(recipe, steps=1, resume=False) as bench:
        assert not bench.begin().broken
        assert not bench.start().first
        (same,) = bench.equal()
        assert not same.first and len(same.rows) > 200
        (part,) = bench.equal(partial(other_bits, backward))
    assert part.first.layer == 5 and part.first.kind == "moe"
    what = "output's-gradient decoder.layers.4.mlp" if backward else "output decoder.layers.4.mlp"
    assert part.first.name.startswith(what), part.first
    assert not any(row.off for row in part.rows[: part.rows.index(part.first)])


def as_begun():
    """In a fork of this process: streams that are no test's, and no folder that is known already."""
    tempfile.tempdir = None
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False, encoding="utf-8") for fd in (1, 2))  # noqa: SIM115


def ending(tmp_path, *words):
    """A proof in a process that has the imports, begun with the third step of its reference; what it says; where its files are."""
    made, said = tmp_path / "made", tmp_path / "said"
    made.mkdir()
    words = ("conf=nam56r_native_dp", "cluster=h200_1", *words)
    streams = (str(tmp_path / "out"), str(said))
    args = ("nam_megatron.prove.__main__", words, ".", *streams, {"TMPDIR": str(made)}, as_begun)
    ended = multiprocessing.get_context("fork").Process(target=_child, args=args)
    ended.start()
    while not list(made.glob("nam_megatron_prove_*/weight-3.pt")):
        assert ended.is_alive(), said.read_text()
        time.sleep(0.02)
    return ended, said, made


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("numbers", "code", "said"),
    [
        ((signal.SIGTERM,), 143, ""),
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGTERM), 143, ""),
        ((signal.SIGHUP,), 129, ""),
        ((signal.SIGINT, signal.SIGINT), 130, "interrupted\n"),
    ],
)
def test_a_proof_that_is_ended_leaves_no_file(tmp_path, numbers, code, said):
    """On SIGTERM, as of `timeout`: its checkpoints may be tens of GiB. And waits for no rank."""
    ended, told, made = ending(tmp_path, "steps=100", "resume=false")
    begun = time.monotonic()
    for number in numbers:
        os.kill(ended.pid, number)
        time.sleep(0.05)
    ended.join(600)
    # What comes when all is done has its usual effect.
    assert ended.exitcode in (code, -numbers[-1]) and told.read_text() == said
    assert not list(made.iterdir()) and time.monotonic() - begun < 300


def test_a_signal_while_files_are_deleted_waits_for_that(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "warm", lambda: None)
    monkeypatch.setattr(proof.tempfile, "tempdir", str(tmp_path))
    bench = proof.Bench(load("nam56r", ("cluster=h200_1",)), steps=1)

    class Deleted:
        name, cleaned = str(tmp_path), 0

        def __init__(self, **_): ...

        def cleanup(self):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
            Deleted.cleaned += 1

    monkeypatch.setattr(proof.tempfile, "TemporaryDirectory", Deleted)
    before = list(map(signal.getsignal, ranks.ENDING))
    with pytest.raises(KeyboardInterrupt), bench:
        pass
    assert Deleted.cleaned == 1 and list(map(signal.getsignal, ranks.ENDING)) == before


def test_what_nohup_keeps_away_stays_away():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ranks.undisturbed() as came:
            signal.raise_signal(signal.SIGHUP)
        assert not came
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("preset", ["nam56r_native_dp_fused", "nam56r_fused"])
def test_a_rank_that_is_no_fork_is_given_what_a_fork_has(preset):
    """On a GPU it is a process of its own."""
    pair = cut.pair(load(preset, ["cluster=h200_1"]), "cpu", 2)
    for lowering in (pair.reference, pair.layout):
        side = worker.Side(lowering, Path("folder"), "cuda")
        assert pickle.loads(pickle.dumps(side)) == side


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("other", "then"), [(fails, waits), (waits, waits), (ends, ends)], ids=["failed", "late", "done"]
)
def test_managers_of_a_rank_end_with_it(tmp_path, monkeypatch, device, other, then):
    """Of a rank that is killed since another failed or the time is over, too; sockets are left by none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir()
    # One that is late has to be so after it has begun, which takes a loaded machine any time.
    for limit in (8, 30, 120, 480) if other is waits else (480,):
        ended = ranks.fork(2, partial(with_managers, shared, other, then), limit, device)
        if (shared / "0.pids").exists():
            break
    assert [rank.code for rank in ended] == {ends: [0, 0], fails: [-9, 7], waits: [-9, -9]}[other], ended
    assert gone(shared) and list(tmp_path.iterdir()) == [shared]


@pytest.mark.slow
def test_managers_of_a_rank_end_with_a_command_that_is_killed(tmp_path):
    code = f"""if True:
        import pathlib, sys
        sys.path.append({str(Path(__file__).parent)!r})
        sys.path.append({str(Path(__file__).parents[1])!r})
        from functools import partial
        from managers import waits, with_managers
        from nam_megatron.prove import ranks
        ranks.fork(1, partial(with_managers, pathlib.Path({str(tmp_path)!r}), None, waits))"""
    killed = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)})
    while not (tmp_path / "0.pids").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert gone(tmp_path)


def test_what_one_run_made_in_an_earlier_step_is_no_other_bit():
    """Angles of a rotation, which a resumed run makes anew; but no gradient may be missing. In the order in which a step makes them."""

    def run(**bits):
        said = {
            "output decoder.layers.1.mlp, 1": 1,
            "output's-gradient decoder.layers.1.mlp, 1": 2,
            "gradient decoder.layers.1.mlp.w": 3,
        }
        return [[("bits", 2, name, bits.get(name.split()[0], value)) for name, value in reversed(said.items())]]

    def off(one, two):
        return [row.off for row in compare.equal_bits(one, two, plan(), [1, 2])]

    assert off(run(), run()) == [0, 0, 0]
    assert off(run(output=7), run()) == [1, 0, 0] and off(run(), run(gradient=7)) == [0, 0, 1]
    missing = [said[:-1] for said in run()], [said[1:] for said in run()]
    assert off(run(), missing[0]) == off(missing[0], run()) == [0, 0, 0]
    assert off(run(), missing[1]) == off(missing[1], run()) == [0, 0, 1]
    parts = [[("bits", 2, "weight w", digest) for digest in digests] for digests in ((1, 2), (7, 2))]
    assert off(parts[:1], parts[1:]) == [1]  # of several parts, as of experts, the last was compared
    no_way_back = [[bits for bits in run()[0] if "output's" not in bits[2]]]
    assert off(run(), no_way_back) == off(no_way_back, run()) == [0, 0, 0]


class Unreadable:
    def __reduce__(self):
        return exec, ("raise ValueError('no such job')",)


def test_a_rank_that_dies_as_it_reads_its_job_has_said_why(capfd):
    (rank,) = ranks.fork(1, Unreadable(), device="cuda")
    assert rank.code == 1 and proof._last(rank.err) == "ValueError: no such job"
    assert "no such job" not in "".join(capfd.readouterr())


def test_a_rank_that_waits_for_another_is_named_with_its_line():
    def one_stays_away() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(60)

    with proof.Bench(load("nam56r_native_dp", ("cluster=h200_2",)), steps=1) as bench:
        bench.limit_s = 10.0
        part = bench.start(one_stays_away)
    assert re.match(
        r"the ranks did not end in 10 s: rank 0 in _\w+ \(initialize.py:\d+\), rank 1 in no line", part.broken
    ), part.broken


def test_a_rank_that_has_ended_at_the_limit_is_not_late(monkeypatch):
    """The limit is met when the first of two has ended, however fast the machine is."""
    asked = itertools.count()
    over = lambda: bool(next(asked)) and len(multiprocessing.active_children()) < 2  # noqa: E731
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: 9.0 * over(), sleep=time.sleep))
    ended = ranks.fork(2, lambda: time.sleep(60 * int(os.environ["RANK"])), 5.0)
    assert [(rank.late, rank.code) for rank in ended] == [(False, 0), (True, -9)]


@pytest.mark.slow
def test_a_disk_that_would_be_filled_is_told_before_anything_runs(monkeypatch):
    with proof.Bench(load("nam56r_native_dp", ("cluster=h200_2", "parallel.pipeline=2"))) as bench:
        bench.proof(bench.begin())
        kept = sum(path.stat().st_size for path in bench.folder.rglob("*") if path.is_file())
        for free, begins in ((kept - 1, False), (2 * kept, True)):
            monkeypatch.setattr(proof.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
            assert (bench._cramped(saves=True) == "") == begins
        monkeypatch.setattr(proof.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
        found = bench.proof(bench.begin())
    assert found.word == proof.BROKEN
    assert re.search(
        r"it keeps up to 0\.\d GiB in `.+`, where 0\.0 GiB are free; `TMPDIR=FOLDER`", found.parts[0].broken
    )


def test_a_layout_that_does_not_run_is_not_proven():
    def breaks() -> None:
        raise ValueError("no such layout")

    with proof.Bench(load("nam56r_native_dp", ("cluster=h200_1",)), steps=1) as bench:
        assert not bench.begin().broken
        part = bench.start(breaks)
    whole = proof.Proof(bench.pair, "cpu", 1, bench.limits, (part,))
    assert whole.word == proof.BROKEN and whole.code == 1
    assert "ValueError: no such layout" in text(whole)


# Planted bugs ----------------------------------------------------------------------------------------------------------------------

# Of each case; `python tests/prove/planted.py` plants them all.
PLANTED = (
    "latent_norms_count_twice",
    "a_reusing_layer_gets_the_first_microbatchs_top_k",
    "the_balancing_loss_is_dropped",
)
PLANTED += ("gradients_are_not_reduced", "each_rank_holds_the_others_experts", "adams_moments_are_not_read")
PLANTED += ("copies_of_an_expert_keep_their_own_gradients", "the_schedule_counts_one_ranks_samples")
PLANTED += ("what_others_do_with_my_keys_is_lost", "the_mean_is_of_each_ranks_own_tokens")
PLANTED += ("a_sum_is_scaled_with_each_microbatch", "what_ranks_average_is_summed")


@pytest.fixture(scope="module")
def benches():
    made: dict[str, proof.Bench] = {}

    def bench(case: str) -> proof.Bench:
        if case not in made:
            preset, overrides, steps = planted.CASES[case]
            made[case] = proof.Bench(load(preset, overrides), steps=steps).__enter__()
            assert not made[case].begin().broken
        return made[case]

    yield bench
    for one in made.values():
        one.__exit__(None, None, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(benches, name):
    bug = planted.BUGS[name]
    found, said = planted.found(benches(bug.case), bug)
    assert found, said


# All pairs -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_pair_has_an_outcome_and_no_run_is_made_twice(monkeypatch, tmp_path, capsys):
    ran = []

    class Ran:
        """What stands for a bench that runs nothing."""

        def __init__(self, recipe, device, steps, resume):
            assert (device, steps, resume) == ("cpu", 2, False)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def begin(self):
            references.append(1)
            return proof.Part(proof.START, ())

        def beside(self, pair):
            self.pair = pair

        def proof(self, begun):
            ran.append(self.pair.layout.plan.recipe.preset.name)
            return proof.Proof(self.pair, "cpu", 2, FP32, (begun,))

        def clear(self):
            cleared.append(len(ran))

    references, cleared = [], []
    monkeypatch.setattr(every, "Bench", Ran)
    presets, overlays = "nam56r,nam56r_author_dp,nam52_h200_dense_ref_v1", "none,graphs,ep,fsdp_ep"
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "all.json"), "--presets", presets, "--overlays", overlays])
    assert every.command() == 0
    rows = json.loads((tmp_path / "all.json").read_text())
    verdicts = [r["verdict"] for r in rows]
    assert verdicts == [*("proven", "as", "proven", "proven"), *["as"] * 4, *("proven", "refused", "proven", "proven")]
    assert ran == ["nam56r"] * 3 + ["nam52_h200_dense_ref_v1"] * 3
    assert len(references) == 4, (
        "one rank runs once for a preset and a batch: two copies of experts take twice the microbatches"
    )
    assert cleared == [1, 3, 4, 6], "after its last pair, and not before"
    assert any("cuda_graphs" in sentence for sentence in rows[1]["unproven"])
    assert "8 " not in capsys.readouterr().out.splitlines()[-1]
    # the second is as the first
    monkeypatch.setattr(sys, "argv", ["", "--presets", "nam56r", "--overlays", "none,graphs"])
    differs = proof.Part(proof.START, (row(GRADIENT, 0.25), row(WEIGHT, 0.5)))
    for part in (proof.Part(proof.START, (), "it broke"), differs):
        monkeypatch.setattr(Ran, "begin", lambda self, part=part: part)
        assert every.command() == 1, "what does not run is no better than what differs"
    assert "gradients 2.5e-01, weights 5.0e-01" in capsys.readouterr().out


@pytest.mark.slow
def test_presets_can_be_cut():
    for name in ALL:
        if not lowered(name).plan.not_built:
            ranks = cut.pair(load(name), "cpu", 2).layout.plan.recipe.world_size
            assert ranks <= 8 or name in PUBLIC, "models of others may be laid out over many hosts"
