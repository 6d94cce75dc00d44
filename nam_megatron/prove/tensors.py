"""Which part of which global tensor a rank holds, by Megatron's own account: a checkpoint's ShardedTensors (torch side)."""

from collections.abc import Callable
from typing import Any

import torch


def shards(model: Any) -> list[Any]:
    """Megatron's own account of which part of which global tensor a local tensor is: a checkpoint's ShardedTensors."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
    apply_factories(state)
    return [s for s in nested_values(state) if isinstance(s, ShardedTensor)]


def window(shard: Any) -> tuple[slice | int, ...]:
    """Where in the global tensor the shard's local data lies."""
    lead = shard.prepend_axis_num
    sizes = shard.local_shape
    return (
        *shard.global_offset[:lead],
        *(slice(o, o + n) for o, n in zip(shard.global_offset[lead:], sizes, strict=True)),
    )


Shard = tuple[str, tuple, tuple, torch.Tensor]


@torch.no_grad()
def gathered(model: Any, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> list[Shard]:
    """(checkpoint key, global shape, window, local part) of `value` of every parameter, cut as the parameter is."""
    kept = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = value(p).clone()
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # Read before the weights go back: a shard is the parameter itself, or a view of what it holds now.
    result = [
        (s.key, tuple(s.global_shape), window(s), s.data.clone())
        for s in shards(model)
        if s.data.untyped_storage().data_ptr() in storages
    ]
    for name, p in model.named_parameters():
        p.data = kept[name]
    return result
