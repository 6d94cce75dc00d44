"""The distributed optimizer's record of where a parameter stands in its group, for groups of bf16 and fp32 parameters (torch side).

megatron-core 0.19.2 (optimizer/distrib_optimizer.py) numbers a group's parameters in the order of the gradient buffers, bf16 before
fp32, and then hands the group to Adam with the fp32 ones first. Saving and loading look a parameter's moments up by that number: of
a model with Mamba-3 or M2RNN, whose recurrences keep fp32 parameters, each one's moments are written as those of another. Where
the sizes differ saving fails; where they do not, nobody is told. Loading then copies into fp32 parameters outside of no_grad, which torch
refuses.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nam_megatron.mends import Plan


def install(plan: Plan) -> None:
    """Number the parameters of a group in the order in which Adam gets them."""
    upstream = DistributedOptimizer._build_optimizer_group_ranges

    def ordered(param_groups: list[dict], gbuf_ranges: list[dict]) -> tuple[dict, list[dict[str, Any]]]:
        places, ranges = upstream(param_groups, gbuf_ranges)
        for index, group in enumerate(ranges):
            group["params"].sort(key=lambda p: p.dtype != torch.float32)  # stable
            places |= {p: (index, place) for place, p in enumerate(group["params"])}
        return places, ranges

    DistributedOptimizer._build_optimizer_group_ranges = staticmethod(ordered)
    DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )
