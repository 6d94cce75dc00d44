"""Whether a plan may go on from a checkpoint, by the small files beside it; no tensor is read.

Megatron's checkpoint folder holds `latest_checkpointed_iteration.txt` and a folder for each step saved. Beside them the trainer writes
`plan.json` and, but for mock data, `data.json`, the hashes of the data, of a built dataset its manifest: what computed these weights.
Both stand in each step, too, under its checksums, as does what its run began with, so that a step of another run is known. Beside
imported weights lies the tokenizer that was exported with them, if one was.
A trainer asks before it loads, and `launch check` before anything starts.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nam_megatron import tracker
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.data import identity, manifest
from nam_megatron.errors import Problem, Refused, quoted
from nam_megatron.features.names import FEATURES
from nam_megatron.judge import same
from nam_megatron.recipe.data import Data
from nam_megatron.recipe.training import STAGE
from nam_megatron.tracker import INTEGRITY, RELEASE, TRACKER
from nam_megatron.words.regular import closed
from nam_megatron.words.taken import taken
from nam_megatron.words.whole import digest

PLAN, DATA = "plan.json", "data.json"
HASHED = f"{manifest.TOKENIZER}/{manifest.TOKENS}"  # as a dataset's manifest names its tokenizer's file
# Beside Bridge's checkpoints, what computed them stands in a folder: there `nam_megatron.train` does not take them for its own, whose
# count of samples they lack.
SIGNED = "nam_megatron"
ORIGIN = "origin.json"  # what the first process that saved there had loaded, as `data.json` has hashes
BEGAN = "began.json"  # beside the plan: the step and the samples that a run with `schedule.pretrained` began with
HERE = Path()

NEXT = "`schedule.changes=[{}]` makes it a next stage, saved elsewhere"
FOREIGN_STEP = "a step belongs into the folder of its run, beside its `plan.json`"
# Where data lies, which its content does not depend on.
PLACED, BLENDS = frozenset(("data.path", "data.tokenizer")), frozenset(("data.parts", "data.valid_parts"))
# What the flattened state of a sharded optimizer depends on.
SHARDED_BY = frozenset(
    f"parallel.{name}" for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
)


def seen(look: Callable[..., Iterator[Problem]]) -> Callable[..., Iterator[Problem]]:
    """`look`, which also tells of a folder that this user may not look into."""

    @functools.wraps(look)
    def looked(lowering: Lowering, *args: Any, **named: Any) -> Iterator[Problem]:
        try:
            yield from look(lowering, *args, **named)
        except OSError as err:
            folders = lowering.plan.recipe.schedule.model_dump(include={"load", "save", "pretrained"}).items()
            key = next((f"schedule.{name}" for name, folder in folders if folder and folder in str(err.filename)), None)
            yield closed(err, key)

    return looked


def began(folder: Path) -> dict[str, Any]:
    """What BEGAN says of the run that saves into `folder`; nothing where it cannot be read."""
    try:
        said = json.loads((folder / SIGNED / BEGAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def in_a_word(step: Path, sums: str) -> str:
    """A step of a pretrained checkpoint and the hash of its checksums, as BEGAN has them."""
    return f"{step.name} {sums}"


def step_and_sums(word: object) -> tuple[str, str] | None:
    """The same, read; None where it is no such word."""
    parts = word.split() if isinstance(word, str) else ()
    return (Path(parts[0]).name, parts[1]) if len(parts) == 2 else None


@seen
def early(lowering: Lowering, root: Path, bridge: bool) -> Iterator[Problem]:
    """What of `objections` small files alone tell, before anything starts. root: where relative paths begin. bridge: who will train."""
    load = lowering.plan.recipe.schedule.load
    folder = None if load is None else root / load
    if folder and (folder / TRACKER).is_file():  # what it lacks otherwise, a trainer's own guard says
        try:
            theirs = of_others(folder, tracker.newest(folder, "schedule.load"))
        except Refused as no:
            yield from no.problems
            return
        if theirs:
            yield theirs
            return
        if bridge:
            yield from another(folder / SIGNED, lowering, thorough=False)
    yield from occupied(lowering, root) if bridge else objections(lowering, thorough=False, root=root)


def objections(lowering: Lowering, *, thorough: bool = True, root: Path = HERE) -> Iterator[Problem]:
    """Why this plan cannot go on from what it asks for, or must not save where it asks to.

    thorough: hash the data; of a job one rank does that. root: where relative paths begin.
    """
    schedule = lowering.plan.recipe.schedule
    if schedule.load is not None:
        folder = root / schedule.load
        if not (folder / TRACKER).is_file():
            # Megatron would start from random weights.
            message = f"no checkpoint in `{folder}`"
            yield Problem(message, key="schedule.load", hint="set `schedule.load=null` to start afresh")
            return
        yield from another(folder, lowering, thorough=thorough)
        if schedule.changes:
            yield from no_stage(folder, lowering, root)
    elif schedule.changes:
        hint = "`schedule.load=FOLDER` names the stage before; a run of its own has `schedule.changes=[]`"
        yield Problem("changes of a checkpoint, and none is loaded", key="schedule.changes", hint=hint)
    yield from occupied(lowering, root)


def no_stage(folder: Path, lowering: Lowering, root: Path = HERE) -> Iterator[Problem]:
    """Why a plan that names changes is no next stage of the run in `folder`."""
    schedule, key = lowering.plan.recipe.schedule, "schedule.changes"
    if weights_alone(folder):
        hint = "`schedule.changes=[]`: a run that begins with them has any schedule"
        yield Problem("changes of a run, and what is loaded are weights alone", key=key, hint=hint)
        return
    if schedule.save is not None and (root / schedule.save).resolve() == folder.resolve():
        hint = f"save the stage elsewhere; to go on with one that `{folder}` holds, `schedule.changes=[]`"
        yield Problem("a stage does not write into the folder of the one before it", key="schedule.save", hint=hint)
        return
    if lowering.plan.recipe.feature.megatron_fsdp:
        hint = "go on as before with `schedule.changes=[]`, or train without Megatron-FSDP from the first stage on"
        yield Problem("a next stage under Megatron-FSDP has not been tried", key=key, hint=hint)
    with contextlib.suppress(Refused):  # said before
        sides = [same.flat(tree["recipe"]) for tree in (same.read(folder / PLAN), json.loads(plan_json(lowering)))]
        if idle := [name for name in schedule.changes if sides[0].get(name) == sides[1].get(name)]:
            hint = f"another value, or leave {'it' if len(idle) == 1 else 'them'} out of `{key}`"
            yield Problem(f"named as a change, and as the checkpoint has it: {quoted(idle)}", key=key, hint=hint)
        done = int(tracker.word(folder))
        if done >= schedule.train_steps:
            hint = f"more than {done}: steps are counted from the run's first"
            message = f"the stage before it ended at step {done}: none is left"
            yield Problem(message, key="schedule.train_steps", hint=hint)


def occupied(lowering: Lowering, root: Path = HERE) -> Iterator[Problem]:
    """Where the plan would write into a folder that vouches for its files, or into that of a run that it does not go on with."""
    schedule, tracking = lowering.plan.recipe.schedule, lowering.plan.recipe.feature.tracking
    for name in ("tensorboard", "wandb_dir", "mlflow"):
        if (place := str(getattr(tracking, name, None) or "://").removeprefix("file://")) and "://" not in place:
            yield from taken(root / place, f"feature.tracking.{name}")
    if schedule.save is None:
        return
    yield from taken(root / schedule.save, "schedule.save")
    if not (root / schedule.save / TRACKER).exists():
        # Of a run that ended before its first step was saved, or somebody's.
        if (theirs := root / schedule.save / PLAN).exists():
            try:
                same.read(theirs)
            except Refused as refused:
                hint = "name another folder, or take the file away"
                yield from (replace(p, key="schedule.save", hint=hint) for p in refused.problems)
        return
    if schedule.load is None or (root / schedule.load).resolve() != (root / schedule.save).resolve():
        hint = f"`schedule.load={schedule.save}` goes on with it; or name another folder"
        yield Problem(f"`{schedule.save}` holds the checkpoints of a run", key="schedule.save", hint=hint)


def another(folder: Path, lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Where the plan computes something else than the checkpoint's did, or the checkpoint is not of the run that its plan is of.

    folder: where the plan stands. thorough: hash the data; of a job one rank does that.
    """
    base = folder.parent if folder.name == SIGNED else folder
    with contextlib.suppress(Refused):
        if of_others(base, tracker.newest(base)):
            return  # `checkpoint.damage` says it
    if found := list(_another(folder, lowering, thorough)):
        yield from found
        return
    yield from strangers(base)


def strangers(folder: Path) -> Iterator[Problem]:
    """Whether the newest step of a checkpoint is another run's."""
    with contextlib.suppress(Refused):  # `checkpoint.damage` says it
        step = tracker.newest(folder)
        yield from (
            Problem(f"checkpoint `{step}` {why}", key="schedule.load", hint=FOREIGN_STEP) for why in foreign(step)
        )


def _another(folder: Path, lowering: Lowering, thorough: bool) -> Iterator[Problem]:
    after = json.loads(plan_json(lowering))
    try:
        before = same.read(folder / PLAN)
    except Refused as refused:
        yield from refused.problems
        return
    if weights_alone(folder):  # a run of its own begins
        if lowering.plan.recipe.feature.megatron_fsdp:  # in `fsdp_dtensor` alone: Megatron would stop with a KeyError
            message = "Megatron-FSDP reads no imported weights"
            yield Problem(message, key="feature.megatron_fsdp.enabled", hint="set it to false")
        yield from same.another_model(before, after)
        yield from another_tokenizer(folder, lowering.plan.recipe.data)
        return
    data = lowering.plan.recipe.data
    kept = data.name != "mock" and data.name == before["recipe"]["data"].get("name")
    known = identity.stored(folder / DATA) if kept else None
    if known and thorough:
        yield from another_data(known, data)
    for d in same.differences(before, after):
        if d.key in lowering.plan.recipe.schedule.changes:
            pass  # a stage's own
        elif _placed(d) and (known or (kept and not thorough)):
            pass  # its content is asked, wherever it lies
        elif d.key in SHARDED_BY and not _reshardable(was := same.resolved(before)):
            text = f"a checkpoint of `{d.key}` {d.before} cannot be read into {d.after}"
            hint = "resume in its layout"
            if not _bound(was["feature"]):
                hint += ", save with `feature.distributed_optimizer.reshardable=true`, then change it"
            yield Problem(text, key=d.key, hint=hint)
        elif d.computes:
            said = f"the checkpoint has `{d.key}` {_shown(d.before)}, and the plan {_shown(d.after)}"
            yield Problem(said, key=d.key, hint=_hint(d.key))


def _placed(d: same.Difference) -> bool:
    """Whether only the place of data differs; of a blend all weights are the same, in their order."""
    if d.key in BLENDS and d.before and d.after:
        return [part["weight"] for part in d.before] == [part["weight"] for part in d.after]
    return d.key in PLACED


def another_data(known: Mapping[str, str], data: Data) -> Iterator[Problem]:
    """Where data is not that of a checkpoint, of which `known` are the hashes."""
    try:
        now = identity.hashes(identity.read(data)) or {}
    except Refused as refused:
        yield from refused.problems
        return
    if found := identity.differing(known, now):
        message = f"the checkpoint was trained on other data: {quoted(found)} {'has' if len(found) == 1 else 'have'} another hash"
        yield Problem(message, key=data.key, hint=_hint(data.key))


def another_tokenizer(folder: Path, data: Data) -> Iterator[Problem]:
    """Where weights have learned other tokens than those of the data, as far as both are known.

    Imported ones have a tokenizer beside them, a run's the manifest of its dataset, with the hash of that one's.
    """
    known = data.built / manifest.TOKENIZER if data.built else data.tokenizer and Path(data.tokenizer)
    if not known or not (known / manifest.TOKENS).is_file():
        return
    key = "data.path" if data.built else "data.tokenizer"
    at = folder / manifest.TOKENIZER
    ours, theirs = (identity.tokens(place / manifest.TOKENS) for place in (known, at))
    if ours and theirs and ours != theirs:
        message = f"the data's tokenizer, `{known}`, is another than that of the weights, `{at}`"
        hint = f"build the dataset with `--tokenizer {at}`; or, if other tokens are meant, take that folder away"
        yield Problem(message, key=key, hint=hint)
    elif not theirs and (told := (identity.stored(folder / DATA) or {}).get(HASHED)):
        if told not in (digest(known / manifest.TOKENS), identity.laid_out(ours)):
            message = f"the data's tokenizer, `{known}`, is not the one of the dataset that the weights were trained on"
            yield Problem(message, key=key, hint=f"take the folder `{manifest.TOKENIZER}` of that dataset")


def weights_alone(folder: Path) -> bool:
    """Whether a checkpoint has no state of training: an imported one."""
    return (folder / TRACKER).is_file() and tracker.word(folder) == RELEASE


def _reshardable(recipe: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state was written parameter by parameter, and not as the layout had flattened it."""
    feature, state = recipe["feature"], recipe["feature"]["distributed_optimizer"]
    return not _bound(feature) and (not state["enabled"] or state["reshardable"])


def _bound(feature: Mapping[str, Any]) -> bool:
    """Whether no layout but its own ever reads the optimizer's state."""
    return any(cls.bound and name in feature for name, cls in FEATURES.items())


def _hint(key: str) -> str:
    if key == "schedule.train_steps":
        return f"the order of the data depends on it; to end a command earlier, use `schedule.stop_every`; {NEXT.format(key)}"
    if key in STAGE:
        return f"go on with what was computed before; {NEXT.format(key)}"
    return "go on with what was computed before, or start afresh: `schedule.load=null`"


def _shown(value: Any) -> str:
    return json.dumps(value)


def of_others(folder: Path, step: Path) -> Problem | None:
    """For a step that no program of ours has saved: nothing of ours lies in it or beside it."""
    if (step / INTEGRITY).exists() or any((at / PLAN).exists() for at in (step, folder, folder / SIGNED)):
        return None
    if not any(any(step.glob(name)) for name in (".metadata", "common.pt", "mp_rank_*")):
        return None  # what it is cannot be told
    bridge = (step / "run_config.yaml").exists()
    whose = "Megatron-Bridge under another recipe" if bridge else "another program, as Megatron-LM does"
    message = f"`{step}` was saved by {whose}: it says neither which plan it is of nor what its files hold"
    way = "Bridge's `AutoBridge.export_ckpt`" if bridge else "the trainer's own converter"
    hint = f"take the weights over in their published form: {way}, then `nam hf import FOLDER plan.json OUT` and `schedule.load=OUT`"
    return Problem(message, key="schedule.load", hint=hint)


def foreign(step: Path) -> Iterator[str]:
    """What tells that a step is not of the run whose plan stands beside it; see `untold`."""
    beside = next((at for at in (step.parent, step.parent / SIGNED) if (at / PLAN).is_file()), None)
    if beside is None or not (step / PLAN).is_file():
        return
    try:
        plans = [same.read(at / PLAN) for at in (step, beside)]
    except Refused as refused:
        yield from (problem.message for problem in refused.problems)
        return
    if step.name == RELEASE:  # a run may have begun beside it, whose plan says how it trains
        yield from (f"is of another model: {problem.message}" for problem in same.another_model(*plans))
        return
    for d in same.differences(*plans):
        if d.computes and not _placed(d):
            yield f"is of another run: `{d.key}` is {_shown(d.before)} in its `{PLAN}`, and {_shown(d.after)} in the run's"
    for name, said in ((DATA, "was trained on other data"), (ORIGIN, "began with other weights")):
        its, runs = (identity.stored(at / name) for at in (step, beside))
        if its and runs and (found := identity.differing(its, runs)):
            yield f"is of another run, which {said}: {quoted(found)}"
