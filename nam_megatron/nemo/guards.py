"""What guards a training run of ours under whatever runner starts it by Bridge's pretrain (torch side).

The container asks `objections` when it is validated, and has the model `Watched` once it is built: what loads, what is trained on, a loss
that is not a number, and exit codes as of `nam_megatron.train`. Made for megatron-bridge 0.6.2.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from nam_megatron import tracker, train
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import FINDINGS, REFUSED, Problem, Refused
from nam_megatron.judge import resume
from nam_megatron.recipe import Recipe
from nam_megatron.runtime import checkpoint, tracking
from nam_megatron.runtime.nonfinite import Watch
from nam_megatron.runtime.padding import Unfit
from nam_megatron.runtime.pretrain import NonFinite, report
from nam_megatron.words.regular import kind

# What Bridge leaves beside its checkpoints, and looks for when it loads one; it writes Megatron's tracker too.
TRACKER = "latest_train_state.pt"
STATE = "train_state.pt"  # in a step
SIGNED = resume.SIGNED


# Before anything is built -----------------------------------------------------------------------------------------------


@resume.seen
def objections(lowering: Lowering, *, thorough: bool = True, dry: bool = False) -> Iterator[Problem]:
    """Why this plan cannot load what it asks for, must not save where it asks to, or cannot read its data.

    thorough: see `checkpoint.damage`. dry: no file is written, and this may be no training host.
    """
    s = lowering.plan.recipe.schedule
    yield from tracking.objections(lowering.plan, dry=dry)
    yield from train.unfit_data(lowering.plan)
    if s.changes:
        hint = "Megatron's own trainer does: `nam launch run`"
        yield Problem("Megatron-Bridge goes on with no next stage here", key="schedule.changes", hint=hint)
    if s.load is not None:
        folder = Path(s.load)
        there = [(folder / name).is_file() for name in (TRACKER, tracker.TRACKER)]
        if not any(there) and s.save == s.load:
            return  # the first of the commands that each go on where the last one ended
        if not all(there):
            # Bridge would start from random weights.
            hint = "null starts afresh, and so does the folder that is saved to; checkpoints of `nam_megatron.train` are of another form"
            yield Problem(f"no checkpoint of Megatron-Bridge's in `{s.load}`", key="schedule.load", hint=hint)
            return
        yield from checkpoint.damage(folder, thorough=thorough)
        yield from at_odds(folder, goes_on=True)
        yield from resume.another(folder / SIGNED, lowering, thorough=thorough)
    yield from resume.occupied(lowering)


def at_odds(folder: Path, *, goes_on: bool = False) -> Iterator[Problem]:
    """Whether somebody has set back Megatron's tracker alone: Bridge goes by its own.

    goes_on: whether the step's own state, which no checksum is of, is missing or another's; Bridge would begin with the first sample.
    """
    try:
        step, samples = _state(folder / TRACKER)
        if (said := tracker.word(folder)) != str(step):
            hint = f"copy the `{STATE}` of the step that is meant over `{folder / TRACKER}`"
            yield Problem(
                f"`{tracker.TRACKER}` says step {said}, and `{TRACKER}` {step}", key="schedule.load", hint=hint
            )
        elif goes_on and (own := _state(path := folder / f"iter_{step:07d}" / STATE)) != (step, samples):
            message = f"`{path}` says step {own[0]} and {own[1]} samples, and `{TRACKER}` {step} and {samples}"
            yield Problem(message, key="schedule.load", hint="go back to an earlier step: both trackers name one")
    except Refused as no:
        yield from no.problems


def _state(path: Path) -> tuple[int, int]:
    """Step and samples of one of Bridge's states of a training. Raises Refused."""
    try:
        if what := kind(path):
            raise ValueError(f"it is {what}")
        state = torch.load(path, weights_only=True)
        return state["step"].item(), state["consumed_train_samples"].item()
    except Exception as err:  # whatever a cut-off file makes torch raise
        raise Refused(f"`{path}` cannot be read: {err}", key="schedule.load") from None


# Once the model is built ------------------------------------------------------------------------------------------------


def notes(recipe: Recipe) -> Iterator[str]:
    """What a first run by a recipe's name does not do."""
    if recipe.data.name == "mock":
        yield (
            "this trains on Megatron's mock data and learns nothing. On a corpus: `python -m nam_megatron.data build` makes a folder, and "
            "`overrides=['data=built','data.path=FOLDER']` of the recipe function trains on it"
        )
    if recipe.schedule.save is None:
        yield "nothing is saved: `checkpoint.save=FOLDER checkpoint.save_interval=STEPS`, and the same folder as `checkpoint.load` to go on"


class Watched:
    """A model's forward pass with a look at a loss that is not a number.

    Bridge leaves that to Megatron's rerun state machine alone, which skips the first step, and cannot end a run without `save`.
    """

    def __init__(self, model: torch.nn.Module, *, saves: bool):
        self.model, self.forward, self.saves = model, model.forward, saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        machine = get_rerun_state_machine()
        first, again = not machine.first_iteration_complete, machine.state == RerunState.RERUNNING_IN_PLACE
        if machine.get_mode() == RerunMode.DISABLED or not (first or again):
            return self.forward(*args, **kwargs)
        watch = Watch(self.model)
        try:
            output = self.forward(*args, **kwargs)
        finally:
            watch.close()
        where = f"step {machine.current_iteration}, rank {torch.distributed.get_rank()}"
        if not self.model.post_process:
            # An inner stage says it itself: the last one will only see that it came from elsewhere.
            if watch.began_here():
                report(f"{where}: NaN or Inf, {watch.verdict()}")
        elif not (
            loss := output.detach().float().sum()
        ).isfinite():  # of each token, masked ones too: NaN times 0 is NaN
            message = f"{where}: the loss is {loss.item()}; {watch.verdict()}"
            if first or not self.saves:
                raise NonFinite(message)
            report(message)
        return output


# How it ends ------------------------------------------------------------------------------------------------------------


class _Explained(logging.Filter):
    """Bridge logs a traceback and "failed" at every early end: at a planned one, and at those that we explain ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], SystemExit | Refused | NonFinite | Unfit))


def explain_endings() -> None:
    """Let what nobody catches end a process as our own commands end: in our words and with their exit codes."""
    logging.getLogger("megatron.bridge.training.pretrain").addFilter(_Explained())
    before = sys.excepthook

    def ended(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, Refused | NonFinite | Unfit):
            before(kind, value, trace)
            return
        # torch.distributed collects what its predecessor says, to say it later
        with contextlib.redirect_stderr(sys.__stderr__):
            if isinstance(value, Refused):
                raise SystemExit(train.stop(int(os.environ.get(train.RANK, 0)), REFUSED, value.render()))
            print(f"error: {value}", file=sys.stderr, flush=True)
            raise SystemExit(FINDINGS)

    sys.excepthook = ended
