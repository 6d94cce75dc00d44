"""The times of blocks: a counter in place of the GPU's clock, around real layers, in a bare model and in the trainer."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pretend
import pytest
import torch
from harness import Case, gradients, on_ranks, plan_of, step
from test_author_lane import RECIPE
from test_benchmarks import gauge
from test_train import run, trained

from nam_megatron import train
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.argv import words as words_of
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load

sys.path.insert(0, str(Path(train.__file__).parents[1] / "benchmarks"))

import blocks
import measure
import peak_memory

MICROBATCHES = 2
CASE = Case("+MD-ED/+-", microbatches=MICROBATCHES)
EDGES = [f"{way} {edge}" for way in blocks.WAYS for edge in ("begin", "end")]


class Event:
    """A CUDA event whose time is how many were recorded before it."""

    ticks = itertools.count()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = next(Event.ticks)

    def elapsed_time(self, other):
        return float(other.at - self.at)


def marked(rig):
    """(moments in the order of time as (part, microbatch, edge), what the report says, gradients) of the second of two steps."""
    torch.cuda.Event = Event
    layers = plan_of(CASE.pattern).layers
    layers = [SimpleNamespace(number=l.number, kind=l.kind, source=3 if l.number == 6 else None) for l in layers]
    marks = blocks.Marks(SimpleNamespace(layers=layers))
    for _ in range(2):
        marks.begin([rig.ddp])
        step(rig)
        marks.end()
    moments = [
        (event.at, part, call, edge)
        for part, calls in marks.calls.items()
        for call, events in enumerate(calls)
        for edge, event in events.items()
    ]
    return [moment[1:] for moment in sorted(moments)], marks.report(slice(1, None)), gradients(rig)


def plain(rig):
    step(rig)
    step(rig)
    return gradients(rig)


@pytest.fixture(scope="module")
def bare():
    (found,) = on_ranks(CASE, marked)
    return found


def test_layers_run_one_after_another_forward_and_back(bare):
    """The output layer is called twice a microbatch, for the MTP's loss first."""

    def span(part, call, way):
        return [(part, call, f"{way} begin"), (part, call, f"{way} end")]

    expected = []
    for i in range(MICROBATCHES):
        order = [*((n, i) for n in range(1, 7)), (blocks.MTP, i), (blocks.OUTPUT, 2 * i), (blocks.OUTPUT, 2 * i + 1)]
        expected += [moment for part in order for moment in span(*part, "forward")]
        expected += [moment for part in reversed(order) for moment in span(*part, "backward")]
    assert bare[0] == expected


def test_the_marks_leave_the_gradients_bit_for_bit(bare):
    (unmarked,) = on_ranks(CASE, plain)
    assert len(unmarked) == len(bare[2]) > 50
    for (key, *_, a), (other, *_, b) in zip(unmarked, bare[2], strict=True):
        assert key == other and torch.equal(a, b), key


def test_microbatches_add_up_and_kinds_come_from_the_plan(bare):
    report = bare[1]
    assert [layer["kind"] for layer in report["layers"]] == ["mla", "mamba2", "dsa", "mlp", "moe", "dsa, reused top-k"]
    times = {blocks.MTP: MICROBATCHES, blocks.OUTPUT: 2 * MICROBATCHES}  # one tick a call
    assert {part: row["backward_ms"] for part, row in report["parts"].items()} == times
    assert {(layer["forward_ms"], layer["backward_ms"]) for layer in report["layers"]} == {(MICROBATCHES, MICROBATCHES)}


def test_the_table_adds_up():
    layers = [
        {"number": n, "kind": kind, "forward_ms": f, "backward_ms": b}
        for n, kind, f, b in ((1, "mla", 1.0, 2.0), (2, "moe", 3.0, 5.0), (3, "mla", 2.0, 4.0))
    ]
    found = blocks.shares({"layers": layers, "parts": {"output layer": {"forward_ms": 1.0, "backward_ms": 2.0}}}, 40.0)
    assert found["kinds"]["mla"] == {"layers": 2, "forward_ms": 1.5, "backward_ms": 3.0, "share": 0.225}
    assert found["everything else"] == {"ms": 20.0, "share": 0.5}
    rows = [*found["kinds"].values(), *found["parts"].values(), found["everything else"]]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert "mla                                  2       1.500       3.000        22.5%\n" in blocks.text(found)


def author_lane(folder: Path, *words: str) -> tuple[list[float], dict]:
    """NAM56R as designed, small, trained under the memory benchmark: Megatron's log of its losses, and the report."""
    lowering, out = translate(load("nam56r", [*RECIPE, "cluster=h200_1"])), folder / "peak.json"
    plan = folder / "plan.json"
    plan.write_text(plan_json(lowering))

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        gauge()
        torch.cuda.Event = Event
        words_of_plan = ["--nam-plan", str(plan), *words_of(lowering)]
        return peak_memory.main(["--out", str(out), *words, *words_of_plan], time.time())

    return trained(pretend.fork(1, job)), json.loads(out.read_text())


@pytest.mark.slow
def test_the_command_reports_every_layer_of_what_was_trained(tmp_path, monkeypatch, capsys):
    """Of the trial alone it is told what a GPU would have said."""
    losses, document = author_lane(tmp_path, "--blocks")
    without, other = author_lane(tmp_path)
    assert losses == without and "blocks" not in other

    out = tmp_path / "blocks.json"
    asked = []
    monkeypatch.setattr(measure, "trial", lambda *args: asked.append(args) or {"name": "blocks", **document})
    monkeypatch.setattr(sys, "argv", ["blocks.py", "--out", str(out), "optim.lr=0.1"])
    assert blocks.main() == 0
    ((*_, overrides, _, _, words),) = asked
    assert (overrides[-1], words) == ("optim.lr=0.1", ("--blocks",))
    found = json.loads(out.read_text())["blocks"]
    plan = translate(load("nam56r", [*RECIPE, "cluster=h200_1"])).plan
    assert [layer["number"] for layer in found["layers"]] == [layer.number for layer in plan.layers]
    assert all(
        layer["kind"].startswith(planned.kind) for layer, planned in zip(found["layers"], plan.layers, strict=True)
    )
    assert all(layer["forward_ms"] > 0 < layer["backward_ms"] for layer in found["layers"])
    assert sum(kind["layers"] for kind in found["kinds"].values()) == len(plan.layers)
    assert found["parts"].keys() == {blocks.MTP, blocks.OUTPUT}
    assert "m2rnn  " in capsys.readouterr().out


def test_what_is_timed_by_default_is_the_authors_lane_with_every_kind_of_block():
    plan = measure.lowered(blocks.PRESET, blocks.CUT).plan
    assert plan.not_built == () and not list(blocks.unfit(plan))
    assert plan.kinds >= {"mla", "dsa", "moe", "mamba3", "m2rnn"} and plan.mtp_depths == 1


def test_what_cannot_be_timed_is_refused(tmp_path):
    full = [f"feature.recompute.{word}" for word in ("granularity=full", "method=uniform", "layers=1")]
    (rank,) = run(
        tmp_path, *full, main=lambda w, now: peak_memory.main(["--out", f"{tmp_path}/peak.json", "--blocks", *w], now)
    )
    assert rank.code == 2 and "runs inside backward passes @ feature.recompute.granularity" in rank.err
    assert not (tmp_path / "peak.json").exists()
