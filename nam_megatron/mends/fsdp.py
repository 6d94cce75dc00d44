"""Gradients under Megatron-FSDP that 0.19.2 gets wrong (torch side)."""

from collections.abc import Sequence
from typing import Any

import torch

from nam_megatron.mends import Plan

AVERAGED = "average_gradients_across_tp_domain"


def install(models: Sequence[torch.nn.Module], plan: Plan) -> None:
    """Let models that Megatron-FSDP has wrapped hand the optimizer the gradients that one rank would; others stay as they are.

    Two things go wrong in 0.19.2 without a word:

    - where a tensor's data parallel group is one rank (experts, once expert parallelism takes all data parallel ranks), what was summed
      so far is scaled again with each microbatch (GradReducePipeline._bucket_group_gradient_reduce; Megatron-LM issue 6660 and pull
      request 6773 tell of its kin): with two microbatches on two ranks the first one weighs half as much as the second;
    - the mark of tensors whose gradients tensor ranks average, DSA's indexer's, is not handed to the optimizer's parameters
      (ParamAndGradBuffer._init_optimizer_named_parameters): they are summed.
    """
    for model in models:
        if (buffer := getattr(model, "param_and_grad_buffer", None)) is None:
            continue
        for _, parameter in buffer.optimizer_named_parameters:
            if getattr(parameter.orig_param, AVERAGED, False):
                setattr(parameter, AVERAGED, True)
        _scale_once(model, buffer)


def _scale_once(model: Any, buffer: Any) -> None:
    """Take the scale from what one rank reduces with each microbatch, and apply it when the step's sum is done."""
    if model.ddp_config.data_parallel_sharding_strategy not in ("optim_grads", "optim_grads_params"):
        return  # reduced once a step
    alone = []
    for group in buffer.parameter_groups:
        held = group.main_grad_buffer
        if held is not None and held.data_parallel_group.size() == 1 and held.gradient_scaling_factor not in (None, 1):
            alone.append((held, held.gradient_scaling_factor))
            held.gradient_scaling_factor = None
    if not alone:
        return
    finish = model.finish_grad_sync

    def finished(*args: Any, **named: Any) -> None:
        finish(*args, **named)
        for held, factor in alone:
            held.data.mul_(factor)
        buffer.update_main_grads()

    model.finish_grad_sync = finished
