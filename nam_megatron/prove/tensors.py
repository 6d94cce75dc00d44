"""Which part of which global tensor a rank holds, by Megatron's own account: a checkpoint's ShardedTensors (torch side)."""

from collections.abc import Callable, Mapping
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


def kept(shard: Any) -> Shard:
    """A copy of what the shard holds, with its place in the whole."""
    return shard.key, tuple(shard.global_shape), window(shard), shard.data.detach().clone()


@torch.no_grad()
def gathered(model: Any, value: Callable[[torch.nn.Parameter], torch.Tensor], buffers: bool = False) -> list[Shard]:
    """(checkpoint key, global shape, window, local part) of `value` of every parameter, cut as the parameter is.

    buffers: of what else a checkpoint holds too, as it is.
    """
    # Parameters of their own stand in: another type of data in a parameter would take DDP's hooks from it.
    places = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    stand_in = {p: torch.nn.Parameter(value(p).clone(), requires_grad=False) for _, _, p in places}
    for p, other in stand_in.items():
        other.__dict__.update(p.__dict__)
    storages = {p.untyped_storage().data_ptr() for p in stand_in.values()}
    for parameters, name, p in places:
        parameters[name] = stand_in[p]
    try:
        # Read before the parameters go back: a shard is one itself, or a view of what it holds now.
        return [kept(s) for s in shards(model) if buffers or s.data.untyped_storage().data_ptr() in storages]
    finally:
        for parameters, name, p in places:
            parameters[name] = p


@torch.no_grad()
def unsharded(fsdp: Any, what: str) -> dict[torch.nn.Parameter, torch.Tensor]:
    """What Megatron-FSDP holds of each parameter, put together from its ranks. what: `model_weight_buffer` or `main_grad_buffer`.

    A rank holds a run of the flattened tensor, and those of a data parallel group follow each other.
    """
    found = {}
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        held = getattr(group, what)
        ranks = held.data_parallel_group
        for index, parameter in enumerate(group.params):
            mine = held.get_item(index, only_shard=True)
            sizes = [None] * ranks.size()
            torch.distributed.all_gather_object(sizes, mine.numel(), group=ranks)
            padded = mine.new_zeros(max(sizes))
            padded[: mine.numel()] = mine
            parts = [torch.empty_like(padded) for _ in sizes]
            torch.distributed.all_gather(parts, padded, group=ranks)
            whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
            found[parameter] = whole.view(parameter.shape)
    return found


@torch.no_grad()
def fill(model: Any, whole: Mapping[str, torch.Tensor]) -> None:
    """Give this rank's part of a model the values of whole tensors, by checkpoint key."""
    written = set()
    for shard in shards(model):
        shard.data.copy_(whole[shard.key][window(shard)])
        written.add(shard.data.untyped_storage().data_ptr())
    left = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in written]
    assert not left, f"no part of a checkpoint is a view of {left}"
