"""The distributed optimizer's state of a checkpoint that any layout reads: written where it belongs, and looked at when read (torch side).

megatron-core 0.19.2 (sharded_param_state_fully_reshardable in optimizer/distrib_optimizer.py) puts the state of a gradient buffer's buckets
one behind the other without the padding at their ends, and then cuts each parameter out of it at its place in the buffer, which counts
that padding: from the second bucket on, what is saved as a parameter's master weight and moments begins in its neighbour, and the last
ones end in zeros. Only a warning speaks of the zeros. Mended upstream by Megatron-LM pull request 5077.

Such a checkpoint has the right weights in bf16, so a run that goes on from it has the right loss once, and others from its first update on.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nam_megatron.errors import Refused
from nam_megatron.mends import Plan

SAVE, LOAD = "sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"


def install(plan: Plan) -> None:
    """Cut each parameter's state out where it is, and raise Refused for a checkpoint whose master weights are not its weights'."""
    save, load = getattr(DistributedOptimizer, SAVE), getattr(DistributedOptimizer, LOAD)

    @functools.wraps(save)
    def saved(self: DistributedOptimizer, *args: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(_without_padding(buffer))
            return save(self, *args, **named)

    @functools.wraps(load)
    def loaded(self: DistributedOptimizer, *args: Any, **named: Any) -> None:
        load(self, *args, **named)
        if off := list(at_odds(self)):
            problem = f"the optimizer's fp32 weights are not those of the model: {off[0]}"
            problem += f" and {len(off) - 1} more" if len(off) > 1 else ""
            hint = "Megatron 0.19.2 writes such checkpoints where this trainer does not mend it, as older ones of ours did not; "
            hint += "`python -m nam_megatron.hf export`, then `import`, keeps the weights: another run, with a fresh optimizer"
            raise Refused(problem, key="schedule.load", hint=hint)

    setattr(DistributedOptimizer, SAVE, saved)
    setattr(DistributedOptimizer, LOAD, loaded)


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


def at_odds(optimizer: DistributedOptimizer) -> Iterator[str]:
    """Names of parameters in bf16 whose part on this rank is another one than the optimizer's fp32 copy, rounded.

    Those held in FP8 (`feature.fp8.param_gather`) are not looked at: they are rounded by a scale, which is of their whole tensor.
    """
    groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    for parameters, copies in groups:
        for parameter, copy in zip(parameters, copies, strict=True):
            if optimizer._is_distopt_quantized_param(parameter):
                continue
            part = optimizer._get_model_param_range_map(parameter)["param"]
            if not torch.equal(copy.to(parameter.dtype), parameter.detach().view(-1)[part.start : part.end]):
                yield optimizer._param_name(parameter)
