"""Where a parameter stands in the distributed optimizer's state, of gradient buffers with several buckets (torch side).

For a checkpoint that any layout reads, megatron-core 0.19.2 (sharded_param_state_fully_reshardable in optimizer/distrib_optimizer.py)
puts the state of a buffer's buckets one behind the other without the padding at their ends, and then cuts each parameter out of it at its
place in the buffer, which counts that padding: from the second bucket on, what is saved as a parameter's master weight and moments
begins in its neighbour, and the last ones end in zeros. A resumed run goes on with them, and only a warning speaks of the zeros. Mended
upstream by Megatron-LM pull request 5077.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def provide() -> None:
    """Cut each parameter's state out where it is."""
    upstream = DistributedOptimizer.sharded_param_state_fully_reshardable
    if getattr(upstream, "nam_unpadded", False):
        return

    @functools.wraps(upstream)
    def unpadded(self: DistributedOptimizer, *args: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(_without_padding(buffer))
            return upstream(self, *args, **named)

    unpadded.nam_unpadded = True  # type: ignore[attr-defined]
    DistributedOptimizer.sharded_param_state_fully_reshardable = unpadded


@contextlib.contextmanager
def _without_padding(buffer: Any) -> Iterator[None]:
    """Give a buffer's parameters the places that they have once the padding before them is gone."""
    padded, gone, length = buffer.param_index_map, [], 0
    for bucket in buffer.buckets:
        gone.append(bucket.offset - length)
        length += bucket.numel_unpadded
    buffer.param_index_map = {p: (begin - gone[b], end - gone[b], b) for p, (begin, end, b) in padded.items()}
    try:
        yield
    finally:
        buffer.param_index_map = padded
