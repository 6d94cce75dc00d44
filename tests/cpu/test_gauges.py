"""When layers measure themselves for the step line, and what the line says."""

import megatron.core.transformer.cuda_graphs as cuda_graphs
import pytest
import torch
from harness import Case, on_ranks, step
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from nam_megatron.blocks import Gauge
from nam_megatron.mends import stage_log
from nam_megatron.runtime.gauges import Gauges

MEAN, LARGEST = Gauge("mean of"), Gauge("largest of", largest=True)


@pytest.fixture
def alone(monkeypatch):
    """One rank, without a process group."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def asked(every: int, steps: range) -> list[int]:
    """The steps, from 1, in which layer 3 measures."""
    gauges = Gauges()
    gauges.expect({3: MEAN})
    found = []
    for done in steps:
        for _ in range(3):  # microbatches
            gauges.step(done, every)
            assert not gauges.wants(4)
            if gauges.wants(3):
                found.append(done + 1)
                gauges.add(3, torch.ones(2))
    return found


def test_it_is_measured_once_in_a_step_of_every_tenth_line():
    """Megatron logs every so many steps, and the first one of a process."""
    assert asked(1, range(21)) == [1, 10, 20]
    assert asked(3, range(61)) == [1, 30, 60]
    assert asked(3, range(7, 32)) == [8, 30]


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch):
    gauges = Gauges()
    gauges.expect({3: MEAN})
    gauges.step(0, 1)
    monkeypatch.setattr(cuda_graphs, "_IS_GRAPH_CAPTURING", True)
    assert not gauges.wants(3)


def test_a_step_that_is_one_graph_is_not_measured_and_its_line_lacks_the_figure(alone):
    gauges = Gauges()
    gauges.expect({3: MEAN})
    gauges.step(0, 1)
    gauges.add(3, torch.ones(1))
    gauges.step(9, 1, blind=True)
    assert not gauges.wants(3) and gauges.beside("| a: 1 |") == "| a: 1 |"
    gauges.step(19, 1)
    assert gauges.wants(3)


def test_the_line_has_the_mean_or_the_largest_of_all_ranks():
    """Of layers that one rank has, or both, with as many values as they like."""
    here = [{3: [0.25, 0.75], 5: [1.0], 9: [-3.0, -2.0], 7: [4.0]}, {5: [4.0, 4.0], 9: [-2.5], 8: [-7.0]}]

    def job(rig):
        gauges, mine = Gauges(), here[torch.distributed.get_rank()]
        gauges.expect({9: LARGEST, 3: MEAN, 5: MEAN, 7: LARGEST, 8: LARGEST})
        gauges.step(0, 1)
        for layer, values in mine.items():
            gauges.add(layer, torch.tensor(values))
        line = gauges.beside("| a: 1 |")
        return line, gauges.told(1), gauges.told(2), Gauges().beside(line)

    said = "| a: 1 | mean of 3: 0.5 | mean of 5: 3 | largest of 7: 4 | largest of 8: -7 | largest of 9: -2 |"
    for line, told, later, beside in on_ranks(Case("*-", tp=2), job):
        assert line == beside == said and not later
        assert told == {"mean of 3": 0.5, "mean of 5": 3, "largest of 7": 4, "largest of 8": -7, "largest of 9": -2}


@pytest.mark.parametrize(
    ("balancing", "mtp"), [("aux_loss", ""), ("seq_aux_loss", ""), ("global_aux_loss", ""), ("aux_loss", "/+E/+E")]
)
def test_stages_without_experts_and_indexers_add_up_what_those_with_them_do(balancing, mtp):
    """Another number of numbers, another group or one without the other's name waits for ever at the first line."""

    def job(rig):
        stage_log.install([rig.model], None)
        step(rig)
        found = {
            name: (len(entry.values), *(group and group.size() for group in (entry.reduce_group, entry.avg_group)), entry.needs_dp_avg)
            for name, entry in get_moe_metrics_tracker().metrics.items()
        }  # fmt: skip
        return found | {"indexers": len(DSAIndexerLossLoggingHelper.tracker["values"])}

    said = dict(moe_router_load_balancing_type=balancing, moe_z_loss_coeff=1e-3)
    every = on_ranks(Case(f"DE|+-{mtp}", pp=2, dp=2, config=said), job)
    assert len(every[0]) == 5 and all(found == every[0] for found in every)
    depths = mtp.count("/")
    assert [every[0].pop("indexers"), *{numbers for numbers, *_ in every[0].values()}] == [4, 4 + depths]
