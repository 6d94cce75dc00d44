"""Another learning rate for a checkpoint's optimizer (torch side).

megatron-core 0.19.2 tells groups of parameters by their rates (param_group_identifier_keys in optimizer/optimizer.py). Resumed with
another, none is found: a KeyError, even with --override-opt_param-scheduler. Were one found, its rates would be the checkpoint's, and the
scheduler would go by those. Here all groups have one pair of rates (`decoupled_lr` is none), so that nothing else is told by it.
"""

import functools
from typing import Any

from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nam_megatron.mends import Plan

RATES = ("max_lr", "min_lr")


def install(plan: Plan) -> None:
    """Give what is loaded the plan's rates, and the plan's schedule the number of steps done."""
    kept = tuple(key for key in optimizer.param_group_identifier_keys if key not in RATES)
    for module in (optimizer, distrib_optimizer):
        module.param_group_identifier_keys = kept
    load = OptimizerParamScheduler.load_state_dict

    @functools.wraps(load)
    def loaded(self: OptimizerParamScheduler, state_dict: dict[str, Any]) -> None:
        self.override_opt_param_scheduler = True
        for group in self.optimizer.param_groups:
            group.update({key: getattr(self, key) for key in RATES})
        load(self, state_dict)

    OptimizerParamScheduler.load_state_dict = loaded
