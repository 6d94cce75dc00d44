"""Letters become layers: numbers, ranks, segments, index sources, and what the plan says about itself."""

import copy
import itertools
import json
import random
from collections import Counter

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, select_pipeline_segment
from megatron.core.transformer.experimental_attention_variant.dsa import (
    is_dsa_skip_topk_layer,
    source_dsa_compute_layer,
)
from presets import NAMES, changed, lowered

from launch.record import report as page
from nam_megatron import report
from nam_megatron.blocks import Gauge
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.compile.plan import identity, plan
from nam_megatron.errors import Refused
from nam_megatron.features.mtp import Mtp
from nam_megatron.judge import same
from nam_megatron.judge.identity import stands
from nam_megatron.recipe import load
from nam_megatron.train import gauges
from nam_megatron.words.sizes import Sizes

A = tuple(range(1, 52, 4))
R = (12, 24, 36, 48)
NAM56R_DSA = (5, 9, 13, 21, 25, 29, 37, 41, 45)
NAM56R = {"A": 13, "E": 22, "M": 13, "R": 4}
NAM52 = {"A": 13, "E": 26, "M": 13}


def planned(base="nam56r", **changes):
    return plan(changed(base, {key.replace("__", "."): value for key, value in changes.items()}))


def refusal(base="nam56r", **changes):
    """The one finding of a refused plan."""
    with pytest.raises(Refused) as refused:
        planned(base, **changes)
    (problem,) = refused.value.problems
    return problem


def lengths(p):
    return tuple(map(len, p.segments))


# The families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "letters", "dsa"),
    [
        ("nam56r", NAM56R, NAM56R_DSA),
        ("nam56r_nemo_native", NAM56R, ()),
        ("nam56r_native_dp", NAM56R, ()),
        ("nam56r_native_dp_fp8", NAM56R, ()),
        ("nam52_h200_dense_ref_v1", NAM52, ()),
        ("nam52_h200_dense_no_mhc_recovery_v1", NAM52, ()),
        ("nam52_h200_sparse_8_11_ref_v1", NAM52, (33, 37, 41, 45)),
        ("nam52r_h200_4full_9sparse_candidate_v1", NAM56R, NAM56R_DSA),
    ],
)
def test_families(name, letters, dsa):
    p = lowered(name).plan
    at = {letter: tuple(l.number for l in p.layers if l.letter == letter) for letter in "AEMR"}
    assert p.letter_counts == letters
    assert [l.number for l in p.layers] == list(range(1, 53))
    assert at["A"] == A
    assert at["R"] == (R if "R" in letters else ())
    assert p.numbers("dsa") == dsa
    assert tuple(l.number for l in p.layers if l.kind in ("mla", "attention")) == tuple(n for n in A if n not in dsa)
    for letter, numbers in at.items():
        ranks = [l.rank for l in p.layers if l.letter == letter]
        assert ranks == list(range(len(numbers))), "ranks count within the letter, from 0"


def test_nam56r_in_megatrons_letters():
    assert lowered("nam56r").plan.pattern == "+EMEDEMEDEMMDEME+EMEDEMMDEMEDEME+EMMDEMEDEMEDEMM+EME/+-"
    assert lowered("nam56r").plan.numbers("mla") == (1, 17, 33, 49)


def test_index_reuse_of_nam56r():
    p = lowered("nam56r").plan
    assert p.index_reuse == (16, 5)
    assert {l.number: l.source for l in p.reusing_layers} == {9: 5, 13: 5, 25: 21, 29: 21, 41: 37, 45: 37}
    assert not lowered("nam52r_h200_4full_9sparse_candidate_v1").plan.reusing_layers


@pytest.mark.parametrize("name", NAMES)
def test_megatron_parses_the_pattern_as_planned(name):
    p = lowered(name).plan
    parsed = parse_hybrid_pattern(p.pattern)
    assert parsed.main_pattern.replace("|", "") == "".join(KINDS[l.kind].symbol for l in p.layers)
    assert parsed.mtp_num_depths == p.mtp_depths
    assert (parsed.mtp_pattern or "") == "".join(KINDS[k].symbol for k in p.mtp)


# Tiling and segments ------------------------------------------------------------------------------------------------


def test_a_pattern_is_tiled_by_index_modulo():
    rng = random.Random(0)
    for _ in range(200):
        pattern = "".join(rng.choices("AEMR", k=rng.randint(1, 20)))
        depth = rng.randint(len(pattern), 60)
        p = planned("nam56r_native_dp", model__pattern=pattern, model__depth=depth)
        assert "".join(l.letter for l in p.layers) == "".join(pattern[i % len(pattern)] for i in range(depth))


def test_a_pattern_with_pipes_is_not_tiled():
    p = planned("nam56r_native_dp", model__pattern="AEM|R", model__depth=4, parallel__pipeline=2)
    assert p.pattern == "*EM|M"
    assert [l.segment for l in p.layers] == [0, 0, 0, 1]
    for depth in (3, 5, 8):
        problem = refusal("nam56r_native_dp", model__pattern="AEM|R", model__depth=depth, parallel__pipeline=2)
        assert problem.key == "model.pattern"
        assert f"4 letters and `model.depth` is {depth}" in problem.message
        assert "model.depth=4" in problem.hint


@pytest.mark.parametrize("pattern", ["|AEMR", "AEMR|", "AE||MR", "|"])
def test_an_empty_segment_is_refused(pattern):
    problem = refusal("nam56r_native_dp", model__pattern=pattern, model__depth=4, parallel__pipeline=2)
    assert (problem.key, problem.message) == ("model.pattern", "the pattern has an empty pipeline segment")


def test_pipes_must_be_as_many_as_the_layout_says():
    for pipeline, virtual in ((1, 1), (4, 1), (2, 2)):
        problem = refusal(
            "nam56r_native_dp",
            model__pattern="AEM|R",
            model__depth=4,
            parallel__pipeline=pipeline,
            parallel__virtual_pipeline=virtual,
        )
        assert problem.key == "model.pattern"
        assert f"2 pipeline segments and the layout {pipeline * virtual}" in problem.message


# Pipeline cuts ------------------------------------------------------------------------------------------------------

LETTERS = "AEMEAEMEAEMR" * 4 + "AEME"


def piped(*sizes):
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(LETTERS)
    return "|".join(LETTERS[a:b] for a, b in zip([0, *ends], ends, strict=False))


def test_two_stages_of_nam56r_are_29_and_23():
    p = planned(parallel__pipeline=2)
    assert lengths(p) == (29, 23)
    assert p.pattern.count("|") == 1


def test_written_cuts_that_part_a_group_are_refused():
    with pytest.raises(Refused) as refused:
        planned(model__pattern=piped(13, 13, 13, 13), parallel__pipeline=4)
    said = {p.message: p.key for p in refused.value.problems}
    assert said == {
        "layer 29 (dsa) reuses the top-k of layer 21, which is in pipeline segment 1, not 2": "model.pattern",
        "layer 41 (dsa) reuses the top-k of layer 37, which is in pipeline segment 2, not 3": "model.pattern",
        "layer 45 (dsa) reuses the top-k of layer 37, which is in pipeline segment 2, not 3": "model.pattern",
    }
    assert (
        lengths(planned(model__pattern=piped(13, 13, 13, 13), parallel__pipeline=4, model__blocks__dsa__full_every=1))
        == (13,) * 4
    )


def test_written_cuts_between_groups_stand():
    p = planned(model__pattern=piped(13, 16, 16, 7), parallel__pipeline=4)
    assert lengths(p) == (13, 16, 16, 7)
    assert p.pattern == "+EMEDEMEDEMMD|EME+EMEDEMMDEMED|EME+EMMDEMEDEMED|EMM+EME/+-"
    assert lengths(planned(model__pattern=piped(29, 23), parallel__pipeline=2)) == (29, 23)


def test_every_written_cut_is_judged_as_megatron_would_suffer_it():
    """One cut after each layer in turn: refused exactly if some layer's source is on the other side."""
    for cut in range(1, 52):
        parted = any(low <= cut < high for low, high in ((5, 13), (21, 29), (37, 45)))
        try:
            planned(model__pattern=piped(cut, 52 - cut), parallel__pipeline=2)
        except Refused:
            assert parted, cut
        else:
            assert not parted, cut


def brute_cuts(depth, want, legal):
    """(longest, sum of squares) of the best legal cuts, or None."""
    best = None
    for cuts in itertools.combinations(legal, want - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *cuts, depth))]
        score = (max(sizes), sum(s * s for s in sizes))
        best = min(best or score, score)
    return best


def test_placed_cuts_are_legal_and_as_even_as_can_be():
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        depth, every, want = rng.randint(2, 15), rng.randint(1, 4), rng.randint(1, 6)
        ranks = sorted(rng.sample(range(depth), rng.randint(0, depth)))
        substitute = [{"letter": "A", "ranks": ranks, "kind": "dsa"}] if ranks else []
        changes = {"model__pattern": "A", "model__depth": depth, "model__substitute": substitute}
        changes |= {"model__blocks__dsa__full_every": every} if ranks else {}
        changes |= {"parallel__pipeline": want}
        sources = {r + 1: ranks[i - i % every] + 1 for i, r in enumerate(ranks) if i % every}
        legal = [n for n in range(1, depth) if not any(s <= n < l for l, s in sources.items())]
        expected = brute_cuts(depth, want, legal)
        try:
            p = planned(**changes)
        except Refused as error:
            keys = {problem.key for problem in error.problems}
            assert keys == {"model.blocks.dsa.full_every"} or (expected is None and keys == {"parallel.pipeline"}), (
                error
            )
            refused += 1
            continue
        assert len(p.segments) == want
        assert (max(lengths(p)), sum(n * n for n in lengths(p))) == expected
        for layer in p.reusing_layers:
            assert p.layers[layer.source - 1].segment == layer.segment
    assert 100 < 400 - refused < 400


def test_cuts_of_a_deep_model_are_placed_at_once():
    p = planned("nam56r_native_dp", model__depth=4096, parallel__pipeline=64, parallel__virtual_pipeline=8)
    assert set(lengths(p)) == {8}


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (13, 4)])
def test_megatron_gives_each_rank_the_planned_layers(pipeline, virtual, monkeypatch):
    p = planned("nam56r_native_dp", parallel__pipeline=pipeline, parallel__virtual_pipeline=virtual)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: pipeline)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: group)
    monkeypatch.setattr(hybrid_layer_allocation, "log_on_each_pipeline_stage", lambda *_, **__: None)
    main = parse_hybrid_pattern(p.pattern).main_pattern
    for rank in range(pipeline):
        count = 0
        for stage in range(virtual):
            symbols, offset = select_pipeline_segment(main, rank, stage if virtual > 1 else None)
            segment = p.segments[stage * pipeline + rank]
            assert "".join(symbols) == "".join(KINDS[l.kind].symbol for l in segment)
            assert offset == segment[0].number - 1
            count += len(segment)
        assert p.stage_lengths[rank] == count <= p.longest_stage
    assert p.longest_stage in p.stage_lengths


def test_virtual_stages_need_a_pipeline():
    problem = refusal(parallel__virtual_pipeline=2)
    assert problem.key == "parallel.virtual_pipeline"


def test_more_segments_than_layers():
    assert (
        refusal("nam56r_native_dp", model__pattern="AEM", model__depth=3, parallel__pipeline=4).key
        == "parallel.pipeline"
    )


def test_more_stages_than_legal_places():
    """NAM56R has 51 - 3 * 8 places; a stage more is refused, and said with both ways out."""
    assert len(planned(parallel__pipeline=28).segments) == 28
    problem = refusal(parallel__pipeline=29)
    assert problem.key == "parallel.pipeline"
    assert "only 27 places" in problem.message
    assert "full_every=1" in problem.hint
    assert len(planned(parallel__pipeline=29, model__blocks__dsa__full_every=1).segments) == 29


# Index reuse --------------------------------------------------------------------------------------------------------


def wanted_sources(numbers, every):
    return {n: numbers[i - i % every] for i, n in enumerate(numbers)}


def megatron_sources(numbers, freq, offset):
    skips = {n: is_dsa_skip_topk_layer(n, offset, freq) for n in numbers}
    return {n: source_dsa_compute_layer(n, offset, freq) if skips[n] else n for n in numbers}


def test_index_reuse_is_what_megatron_computes_and_is_refused_only_where_it_cannot():
    rng = random.Random(2)
    seen = Counter()
    for _ in range(600):
        pattern = "".join(rng.choices("AEMR", weights=(3, 1, 1, 1), k=rng.randint(1, 12)))
        depth, every = rng.randint(len(pattern), 40), rng.randint(1, 5)
        numbers = [i + 1 for i in range(depth) if pattern[i % len(pattern)] == "A"]
        step = rng.choice((1, 1, 2, 3))
        ranks = list(range(rng.randrange(3), len(numbers), step))
        if rng.random() < 0.3:
            ranks = sorted(rng.sample(range(len(numbers)), rng.randint(0, len(numbers))))
        dsa = [numbers[r] for r in ranks]
        wanted = wanted_sources(dsa, every)
        changes = {"model__pattern": pattern, "model__depth": depth}
        changes |= {"model__blocks__dsa__full_every": every} if dsa else {}
        substitute = [{"letter": "A", "ranks": ranks, "kind": "dsa"}] if ranks else []
        try:
            p = planned("nam52_h200_sparse_8_11_ref_v1", model__substitute=substitute, **changes)
        except Refused as error:
            assert [problem.key for problem in error.problems] == ["model.blocks.dsa.full_every"]
            for freq, offset in itertools.product(range(1, depth + 2), range(depth + 2)):
                assert megatron_sources(dsa, freq, offset) != wanted, (dsa, every, freq, offset)
            seen["refused"] += 1
            continue
        assert {l.number: l.source or l.number for l in p.layers if l.kind == "dsa"} == wanted
        freq, offset = p.index_reuse or (1, 0)
        assert megatron_sources(dsa, freq, offset) == wanted, (dsa, every, freq, offset)
        seen["shared" if p.index_reuse else "not shared"] += 1
    assert min(seen["refused"], seen["shared"], seen["not shared"]) > 50, seen


# What may stand where -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letter", "now"), [("D", "is DSA to Megatron"), ("G", "is Megatron's symbol, and no letter, of it")]
)
def test_historic_letters_are_refused_and_say_what_they_meant(letter, now):
    problem = refusal(model__pattern=f"AEM{letter}")
    assert problem.key == "model.pattern"
    assert problem.message == f"letter `{letter}` meant gated delta net once, and {now}; it is not accepted"


def test_every_unknown_letter_is_said():
    with pytest.raises(Refused) as refused:
        planned(model__pattern="AEX*a D")
    assert [p.message for p in refused.value.problems] == [
        "letter `D` meant gated delta net once, and is DSA to Megatron; it is not accepted",
        "`X`, `*`, `a` and ` ` are no letters of a pattern",
    ]
    small = refusal(model__pattern="aE|mA")
    assert (small.message, small.hint) == (
        "`a` and `m` are no letters of a pattern",
        "letters are A, E, M, R and `|`: `AE|MA`",
    )


def test_a_rank_that_does_not_exist():
    problem = refusal(model__substitute=[{"letter": "A", "ranks": [13], "kind": "dsa"}])
    assert (problem.key, problem.message) == (
        "model.substitute[0].ranks",
        "there is no `A` of rank 13: 52 layers have 13 of them, counted from 0",
    )
    assert refusal("nam52_h200_dense_ref_v1", model__substitute=[{"letter": "R", "ranks": [0], "kind": "mamba2"}])


def test_a_rank_substituted_twice():
    twice = [{"letter": "A", "ranks": [3], "kind": "dsa"}, {"letter": "A", "ranks": [2, 3], "kind": "mla"}]
    problem = refusal(model__substitute=twice)
    assert (problem.key, problem.message) == ("model.substitute[1].ranks", "`A` rank 3 is substituted twice")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model__letters": {"A": "moe", "E": "moe", "M": "mamba3", "R": "m2rnn"}}, "model.letters.A"),
        ({"lane__blocks": {"M": "m2rnn", "R": "m2rnn"}}, "lane.blocks.M"),
        ({"model__substitute": [{"letter": "E", "ranks": [0], "kind": "dsa"}]}, "model.substitute[0].kind"),
    ],
)
def test_a_kind_at_the_wrong_letter(changes, key):
    with pytest.raises(Refused) as refused:
        planned(**changes)
    assert key in {p.key for p in refused.value.problems}


def test_gqa_and_mla_do_not_mix():
    problem = refusal("nam56r_native_dp", model__substitute=[{"letter": "A", "ranks": [1], "kind": "dsa"}])
    assert problem.key == "model.substitute"
    assert "no position embedding" in problem.message


def test_experts_off_makes_dense_layers_and_says_so():
    letters = {"A": "attention", "E": "mlp", "M": "mamba3", "R": "m2rnn"}
    p = planned("nam56r_native_dp", model__letters=letters)
    assert p.pattern == lowered("nam56r_native_dp").plan.pattern.replace("E", "-")
    assert p.numbers("mlp") == lowered("nam56r_native_dp").plan.numbers("moe")
    text = report.plan_text(lowered("nam56r_native_dp", "model.letters.E=mlp"))
    assert "E is a dense MLP of 18944: 22 layers" in text


def test_a_layer_with_a_window_is_marked_wherever_layers_stand():
    lowering = lowered("gpt_oss_20b", "model.blocks.attention.unwindowed_every=3", "cluster=cpu", "parallel.expert=1")
    said = [layer.number for layer in lowering.plan.layers if layer.letter == "A" and (layer.rank + 1) % 3]
    text = report.plan_text(lowering).splitlines()
    marks = next(line for line in text if line.startswith("variant "))[8:]
    assert [n for n, mark in enumerate(marks, 1) if mark == "w"] == said
    assert f"window 128: layers {', '.join(map(str, said))}" in text
    assert [
        l["number"] for l in json.loads(argv.plan_json(lowering))["layers"] if l.get("variant") == "window 128"
    ] == said
    layers = stands(lowering.plan)["layers"]
    assert layers["attention"]["variants"] == {"window 128": said} and "variants" not in layers["moe"]
    assert f"<title>layer {said[0]}: attention, window 128</title>" in page.strip(layers)
    assert "window 128 at 16 layers" in text[1] and any("1 CPU rank (cpu)" in line for line in text)


@pytest.mark.parametrize(
    ("base", "depths", "suffix"),
    [
        ("nam56r", 0, ""),
        ("nam56r", 1, "/+-"),
        ("nam56r", 2, "/+-/+-"),
        ("nam56r_native_dp", 1, "/*-"),
        ("nam52_h200_sparse_8_11_ref_v1", 2, "/+-/+-"),
    ],
)
def test_mtp_is_full_attention_and_a_dense_layer(base, depths, suffix):
    p = planned(base, feature__mtp={"depths": depths, "pattern": "A-", "loss_weight": 0.1})
    assert p.pattern.partition("/")[1] + p.pattern.partition("/")[2] == suffix


def test_mtp_of_a_model_of_nothing_but_dsa_is_still_full_attention():
    every = [{"letter": "A", "ranks": list(range(13)), "kind": "dsa"}]
    p = planned(model__substitute=every, model__blocks__dsa__full_every=1)
    assert "+" not in p.pattern.partition("/")[0]
    assert p.pattern.endswith("/+-")


@pytest.mark.parametrize(
    ("base", "inner", "suffix"),
    [
        ("nam56r", "AEMR", ("mla", "moe", "mamba3", "m2rnn")),
        ("nam56r_native_dp", "EAM-", ("moe", "attention", "mamba2", "mlp")),
        ("nam52_h200_sparse_8_11_ref_v1", "AE", ("mla", "moe")),
        ("qwen3_next_80b_a3b", "MA", ("gdn", "attention")),
    ],
)
def test_mtp_has_the_layers_of_its_pattern(base, inner, suffix):
    p = planned(base, feature__mtp={"depths": 2, "pattern": inner, "loss_weight": 0.1})
    assert p.mtp == suffix and p.pattern.split("/")[1:] == ["".join(KINDS[kind].symbol for kind in suffix)] * 2


def test_mtp_without_attention():
    assert refusal(model__pattern="EM", model__substitute=[]).key == "feature.mtp.depths"


def test_a_letter_of_mtp_has_a_kind():
    none = refusal("qwen3_next_80b_a3b", feature__mtp={"depths": 1, "pattern": "R", "loss_weight": 0.1})
    assert none.key == "model.letters.R" and none.message == "no kind stands at `R` of MTP"


# What the plan says about itself ------------------------------------------------------------------------------------


def test_a_lane_that_gives_blocks_up_says_so():
    (mamba, recurrent) = lowered("nam56r_nemo_native").plan.substitutions
    assert (mamba.letter, mamba.designed, mamba.standing, mamba.by) == ("M", "mamba3", "mamba2", "lane nemo_native")
    assert (recurrent.letter, recurrent.designed, recurrent.standing) == ("R", "m2rnn", "mamba2")
    assert recurrent.numbers == R
    assert len(mamba.numbers) == 13
    assert lowered("nam56r").plan.substitutions == ()


def test_the_stored_plan_says_what_stands_and_what_was_given_up():
    lowering = lowered("nam56r_nemo_native", "parallel.pipeline=2")
    p, told = lowering.plan, json.loads(argv.plan_json(lowering))
    assert [(s["letter"], s["designed"], s["standing"]) for s in told["substitutions"]] == [
        ("M", "mamba3", "mamba2"), ("R", "m2rnn", "mamba2"),
    ]  # fmt: skip
    assert [s["by"] for s in told["substitutions"]] == [s.by for s in p.substitutions]
    assert told["departures"] == list(p.departures) != [] and told["not_built"] == []
    assert told["mtp"] == {"depths": p.mtp_depths, "kinds": list(p.mtp)} and told["world_size"] == 8
    assert [(l["number"], l["kind"], l["segment"]) for l in told["layers"]] == [
        (l.number, l.kind, l.segment) for l in p.layers
    ]
    assert (told["pattern"], told["megatron_core"], told["argv"]) == (p.pattern, "0.19.2", list(argv.words(lowering)))
    assert told["env"] == {e.name: e.value for e in lowering.env}
    owned = {s["name"]: s for s in told["settings"]}
    assert owned["hidden_size"] == {"name": "hidden_size", "value": 3584, "owner": "model", "key": "model.hidden_size"}
    assert owned["log_throughput"]["executes"] is True and "executes" not in owned["hidden_size"]


def test_departures_from_the_lane_are_part_of_the_identity():
    assert lowered("nam56r_nemo_native").plan.departures == ()
    p = lowered("nam56r_nemo_native", "parallel.tensor=4", "parallel.pipeline=2", "parallel.expert=2").plan
    assert p.departures == ("tensor=4", "pipeline=2", "expert=2")
    standing = "NAM56R GQA 13, MoE 22, Mamba-2 17, bf16"
    assert identity(p) == f"{standing} / nemo_native (tensor=4, pipeline=2, expert=2)"
    other = lowered("nam56r_nemo_native", "parallel.sequence=false", "parallel.tensor=1").plan
    assert other.departures == ("tensor=1", "sequence=False")
    assert identity(other) != identity(p)
    spread = ("parallel.pipeline=2", "parallel.virtual_pipeline=4", "parallel.context=2", "parallel.expert_tensor=2")
    p = lowered("nam56r_nemo_native", *spread).plan
    assert p.departures == ("pipeline=2", "virtual_pipeline=4", "context=2", "expert_tensor=2")


def test_what_is_not_built_is_in_the_plan(monkeypatch):
    """A block with its layers, a feature without."""
    assert lowered("nam56r").plan.not_built == ()
    monkeypatch.setattr(Mamba3, "missing", "the mixer")
    monkeypatch.setattr(Mtp, "missing", "the loss")
    lowering = translate(load("nam56r"))
    block, feature = lowering.plan.not_built
    assert (block.owner, block.missing, len(block.numbers), block.numbers[0]) == ("mamba3", "the mixer", 13, 3)
    assert (feature.owner, feature.missing, feature.numbers) == ("mtp", "the loss", ())
    told = json.loads(argv.plan_json(lowering))["not_built"]
    assert told == [
        {"owner": "mamba3", "missing": "the mixer", "layers": list(block.numbers)},
        {"owner": "mtp", "missing": "the loss", "layers": []},
    ]


@pytest.mark.parametrize(("switch", "differs"), [(False, []), (True, ["feature.fsdp2.enabled", "feature.fsdp2.eager"])])
def test_a_stored_plan_may_have_a_feature_that_has_gone_since(switch, differs):
    """Off it was nothing; on it trained what this version cannot."""
    now = json.loads(argv.plan_json(lowered("nam56r")))
    old = copy.deepcopy(now)
    old["recipe"]["feature"]["fsdp2"] = {"enabled": switch, "eager": True}
    assert sorted(d.key for d in same.differences(old, now) if d.computes) == sorted(differs)


def test_layers_that_measure_themselves():
    """A DSA layer with an indexer of ours, every M2RNN layer; no reusing one, nothing of Megatron's own."""
    kept, gain = Gauge("DSA kept"), Gauge("M2RNN gain", largest=True)
    tail = dict.fromkeys((12, 24, 36, 48), gain)
    assert gauges(lowered("nam56r").plan) == dict.fromkeys((5, 21, 37), kept) | tail
    assert gauges(lowered("nam56r", "execution.dsa.kernels=megatron").plan) == tail
    assert gauges(lowered("nam52_h200_sparse_8_11_ref_v1").plan) == dict.fromkeys((33, 37, 41, 45), kept)
    ngrams = "feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=1000"
    assert gauges(lowered("nam56r_native_dp", *ngrams).plan) == {0: Gauge("n-gram rows")}
    assert gauges(lowered("nam56r_native_dp").plan) == {}


@pytest.mark.parametrize(("layer", "rows"), [(5, 64), (9, 0)])
def test_what_a_dsa_layer_measures_is_priced(layer, rows):
    """Where sequences are short, it takes more than the indexer's loss: twice fp32 [heads, 64, s]."""
    plan = lowered("nam56r", "model.seq_length=1024", "schedule.micro_batch_size=1").plan
    forward, _ = plan.recipe.blocks.dsa.working(Sizes.of(plan.site), plan.layers[layer - 1])
    assert forward.bytes == (8 * 56 * rows * 1024 if rows else 2 * 1024 * 3584)


@pytest.mark.parametrize(
    ("pattern", "depths", "more", "stops"),
    [("AE", 1, (), True), ("EA", 1, (), False), ("AE", 2, (), False), ("EAE", 2, (), True), ("A-", 1, (), False),
     ("AE", 1, ("model.blocks.moe.balancing=none", "model.blocks.moe.aux_loss_coeff=0.0"), False),
     ("AE", 1, ("model.blocks.moe.balancing=none", "model.blocks.moe.aux_loss_coeff=0.0", "model.blocks.moe.z_loss_coeff=1e-3"), True)],
)  # fmt: skip
def test_only_our_trainer_is_told_experts_of_mtp_that_stop_stock_megatron(pattern, depths, more, stops):
    """Megatron-LM issue 7172: a router's place in a depth against a row for each depth."""
    words = (f"feature.mtp.depths={depths}", f"feature.mtp.pattern={pattern}", *more)
    lowering = translate(load("nam56r_native_dp", words))
    assert [seam.owner for seam in lowering.plan.alone] == ["mtp"] * stops
    assert any(word.startswith("mtp:") for word in argv.marker(lowering)) == stops
