"""When layers measure themselves for the step line, and what the line says."""

import megatron.core.transformer.cuda_graphs as cuda_graphs
import pytest
import torch

from nam_megatron.blocks import Gauge
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


def test_the_line_has_what_was_measured(alone):
    gauges = Gauges()
    gauges.expect({9: LARGEST, 3: MEAN, 5: MEAN})
    gauges.step(0, 1)
    gauges.add(9, torch.tensor([-3.0, -2.0]))
    gauges.add(3, torch.tensor([0.25, 0.75, 0.5, 0.5]))
    assert gauges.beside("| a: 1 |") == "| a: 1 | mean of 3: 0.5 | largest of 9: -2 |"
    assert Gauges().beside("| a: 1 |") == "| a: 1 |"
