"""What layers measure of themselves for the step line (torch side): `| DSA kept 5: 0.8231 | M2RNN gain 12: 1.104 |`.

A kind says which of its layers measure, and what (`Block.gauge`); a feature may measure at the embedding (`Feature.measures`), whose
number is 0. Each measures for a process's first line and every tenth, in the first microbatch of each data-parallel rank; the figure is of
that step, while Megatron's own are means since the last line. Nothing here touches a gradient or a random number. Inside a CUDA graph
nothing can be measured; the line then lacks the figure.
"""

from collections.abc import Mapping

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor

from nam_megatron.blocks import Gauge

LINES = 10  # a measurement may cost as much as the layer's forward pass


class Gauges:
    """Figures by layer number, of the main stack. Costs a comparison in a microbatch where nothing is due."""

    def __init__(self) -> None:
        self._gauges: dict[int, Gauge] = {}
        self._first: int | None = None  # steps done when the process began
        self._done: int | None = None
        self._due = False
        self._found: dict[int, Tensor] = {}  # [value, weight]; none: due and not yet measured
        self._told: tuple[int, dict[str, float]] = (0, {})  # of which step, what its line said

    def expect(self, gauges: Mapping[int, Gauge]) -> None:
        """By layer number, the same on all ranks: what the step line will say, if it is measured."""
        self._gauges = dict(sorted(gauges.items()))

    @property
    def names(self) -> list[str]:
        """Of the figures in the line."""
        return [f"{gauge.name} {number}" for number, gauge in self._gauges.items()]

    def step(self, done: int, every: int, blind: bool = False) -> None:
        """A microbatch begins, after `done` steps. As in megatron-core 0.19.2, a process's first step and each `every`-th have a line.

        blind: it is in a CUDA graph as a whole.
        """
        if done != self._done:
            self._first = done if self._first is None else self._first
            due = done == self._first or (done + 1) % (every * LINES) == 0
            self._done, self._due, self._found = done, due and not blind, {}

    def wants(self, layer: int) -> bool:
        """Whether `layer` is to measure now. Only a layer of the main stack may ask: MTP's are numbered from 1 again."""
        return self._due and layer in self._gauges and layer not in self._found and not is_graph_capturing()

    def add(self, layer: int, values: Tensor) -> None:
        """values: any number of them; the line has their mean or their largest, over all ranks."""
        value = values.amax() if self._gauges[layer].largest else values.sum()
        self._found[layer] = torch.stack([value, torch.full_like(value, values.numel())]).float()

    def beside(self, line: str) -> str:
        """The line with what was measured. All ranks have to call it with the same step's line."""
        if not self._gauges or not self._due:
            return line
        nothing = torch.zeros(2, device=torch.cuda.current_device())
        sums = torch.stack([self._found.get(number, nothing) for number in self._gauges])
        largest = torch.stack([self._found.get(number, nothing - torch.inf)[0] for number in self._gauges])
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        of = zip(self.names, self._gauges.values(), sums.tolist(), largest.tolist(), strict=True)
        told = {name: top if gauge.largest else total / count for name, gauge, (total, count), top in of if count}
        self._told = (self._done or 0) + 1, told
        return line + "".join(f" {name}: {value:.4g} |" for name, value in told.items())

    def told(self, step: int) -> dict[str, float]:
        """What the line of `step` said."""
        return self._told[1] if self._told[0] == step else {}


# Of this process.
GAUGES = Gauges()
