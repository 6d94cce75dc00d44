"""The lines and the checkpoints of Megatron's training loop, as events (torch side): see runtime/record.py."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import checkpointing, get_args, get_timers, training

from nam_megatron.events import RECORD
from nam_megatron.mends.install import Run
from nam_megatron.runtime import pretrain, record


def install(run: Run) -> None:
    """Have Megatron's own training loop say its lines and its checkpoints."""
    theirs, line, counted = training.training_log, record.Line(), 0.0

    @wraps(theirs)
    def logged(
        losses: Mapping[str, torch.Tensor], sums: Any, rate: Any, step: int, scale: Any, report: bool, skipped: int, norm: Any,
        *words: Any, is_first_iteration: bool = False, **named: Any,
    ) -> bool:  # fmt: skip
        nonlocal counted
        args = get_args()
        line.add(losses, bool(skipped))
        due = step % args.log_interval == 0 or is_first_iteration
        # Before theirs, which sets it back, but not after a process's first step: that one is in its second line as well.
        elapsed = get_timers()("interval-time").elapsed(reset=False, barrier=True) if due else 0.0
        told = theirs(
            losses,
            sums,
            rate,
            step,
            scale,
            report,
            skipped,
            norm,
            *words,
            is_first_iteration=is_first_iteration,
            **named,
        )
        if due:
            seconds, counted = elapsed - counted, elapsed if is_first_iteration else 0.0
            line.say(
                step, seconds, training.num_floating_point_operations(args, get_current_global_batch_size()), of=args.train_iters,
                grad_norm=record.norm(norm, args.clip_grad), lr=record.number(rate), loss_scale=record.number(scale),
                tokens=args.consumed_train_samples * args.seq_length,
            )  # fmt: skip
        return told

    training.training_log = logged
    if run.plan.recipe.schedule.save is None:
        training.save_checkpoint = _unsaved
    else:
        follow_saves(training, checkpointing, lambda step, *_, **__: step)


def _unsaved(*_: Any, **__: Any) -> NoReturn:
    """Megatron's rerun state machine saves before it leaves a step with a bad gradient; without a folder that was a TypeError."""
    raise pretrain.NonFinite(f"{pretrain.whereabouts()}: {pretrain.BAD_GRADIENT}")


def follow_saves(caller: Any, checkpointing: Any, step_of: Callable[..., int]) -> None:
    """Say when a checkpoint is begun and when it is there. caller: the module whose `save_checkpoint` is called; step_of: its arguments."""
    save = caller.save_checkpoint

    @wraps(save)
    def followed(*words: Any, **named: Any) -> Any:
        if torch.distributed.get_rank():
            return save(*words, **named)
        step, schedule = step_of(*words, **named), checkpointing.schedule_async_save
        state = "saved"

        def scheduled(*more: Any) -> Any:
            nonlocal state
            state = "scheduled"
            more[-1].add_finalize_fn(lambda: RECORD.say("saved", step=step))
            return schedule(*more)

        RECORD.say("saving", step=step)
        checkpointing.schedule_async_save = scheduled
        try:
            made = save(*words, **named)
        finally:
            checkpointing.schedule_async_save = schedule
        RECORD.say(state, step=step)
        return made

    caller.save_checkpoint = followed
