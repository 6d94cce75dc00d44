"""M2RNN's scan inside an exported model (torch side)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nam_megatron.blocks.m2rnn import kernel
from nam_megatron.blocks.m2rnn.block import odd_sizes
from nam_megatron.runtime.served import remembers, served


def unserved(config: Any) -> Iterator[str]:
    yield from (text for _, text in odd_sizes(config.m2rnn["k_dim"], config.m2rnn["v_dim"]))


def put(mixer: Any) -> None:
    mixer.scan = served(_scan, mixer)


def _scan(self: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: Any) -> Tensor:
    if remembers(self, v, step):
        return type(self).scan(self, q, k, v, keep, step)
    state = step.state(self.index)
    q, k, v, keep = (x.transpose(0, 1).contiguous() for x in (q, k, v.unflatten(-1, (self.heads, self.width)), keep))
    y, state["matrix"] = kernel.scan(q, k, v, keep, self.state_weight, state.get("matrix"))
    return y.transpose(0, 1)
