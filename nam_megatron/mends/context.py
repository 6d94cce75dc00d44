"""Losses of a sequence that ranks share, as one rank has them (torch side). How it is cut, and made whole: runtime/context.py."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from torch import Tensor
from torch.distributed import ProcessGroup

from nam_megatron.mends import Plan


def install(plan: Plan | None) -> None:
    """Let each loss be what it is on one rank, however its tokens lie on the ranks that share a sequence.

    Megatron 0.19.2 averages the means that the ranks take of their own tokens (forward_step_calc_loss in pipeline_parallel/schedules.py,
    process_mtp_loss in transformer/multi_token_prediction.py), so where some are masked, as the last ones of a sequence are in MTP, the
    tokens beside them weigh more; the log has the main loss right (Megatron-LM issue 7452, finding 9). And it scales the loss of DSA's
    indexer by the number of ranks, as it has to scale the routers', which are sums: that one is a mean already.
    """
    schedules.forward_step_calc_loss = _OfWhole(schedules.forward_step_calc_loss)
    multi_token_prediction.roll_tensor = functools.partial(_rolled, multi_token_prediction.roll_tensor)


@dataclass(frozen=True)
class _OfWhole:
    """forward_step_calc_loss, with the mean over a microbatch's tokens on all ranks that share its sequences."""

    calculate: Callable

    def __call__(
        self, model: Any, output: Any, loss_func: Callable | None, config: TransformerConfig, *args: Any, **kw: Any
    ) -> Any:
        if config.calculate_per_token_loss:  # another model of this process
            return self.calculate(model, output, loss_func, config, *args, **kw)
        group = parallel_state.get_context_parallel_group()

        def of_whole(output: Any, **how: Any) -> Any:
            found = loss_func(output, **how)  # type: ignore[misc]
            if not (isinstance(found, tuple) and len(found) == 3):
                return found
            loss, tokens, said = found
            # Megatron divides by them, and averages over the ranks
            return (loss * (tokens / _mean(tokens, group)), tokens, said)

        result = self.calculate(model, output, loss_func and of_whole, config, *args, **kw)
        if config.experimental_attention_variant == "dsa":
            _without_ranks(group)
        return result


def _without_ranks(group: ProcessGroup) -> None:
    """The scale of the indexer's loss, which Megatron has just set."""
    DSAIndexerLossAutoScaler.set_loss_scale(DSAIndexerLossAutoScaler.main_loss_backward_scale / group.size())


def _rolled(roll: Callable, tensor: Tensor, *args: Any, cp_group: ProcessGroup | None = None, **kw: Any) -> Any:
    moved, total = roll(tensor, *args, cp_group=cp_group, **kw)
    # A count is asked for of masks alone; tokens and positions are rolled too, and are integers or not there.
    masks = cp_group is not None and moved is not None and moved.is_floating_point()
    return moved, _mean(total, cp_group) if masks else total


def _mean(count: Tensor, group: ProcessGroup) -> Tensor:
    """Of the ranks' counts; above zero."""
    total = count.float()
    torch.distributed.all_reduce(total, group=group)
    return (total / group.size()).clamp(min=1 / group.size())
