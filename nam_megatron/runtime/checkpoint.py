"""What stands beside a checkpoint, and whether a plan may go on from it (torch side).

Megatron's checkpoint folder holds `latest_checkpointed_iteration.txt` and a folder for each step saved. Beside them the trainer writes
`plan.json` and, but for mock data, `data.json`, the hashes of the data, of a built dataset its manifest: what computed these weights.
Both stand in each step, too, under its checksums, so that a step of another run is known. Beside imported weights lies the tokenizer that
was exported with them, if one was.
"""

import contextlib
import fcntl
import io
import json
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nam_megatron import tracker
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.data import identity, manifest
from nam_megatron.errors import Problem, Refused, quoted
from nam_megatron.features.names import FEATURES
from nam_megatron.judge import same
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.data import Data
from nam_megatron.recipe.training import STAGE
from nam_megatron.runtime import checksums
from nam_megatron.tracker import RELEASE, TRACKER
from nam_megatron.words.regular import irregular
from nam_megatron.words.whole import write_whole

PLAN, DATA, LOCK = "plan.json", "data.json", "run.lock"
SAVING: dict[Path, int] = {}  # folders that this process saves into, and their locks
HASHED = f"{manifest.TOKENIZER}/{manifest.TOKENS}"  # as a dataset's manifest names its tokenizer's file
# Beside Bridge's checkpoints, what computed them stands in a folder: there `nam_megatron.train` does not take them for its own, whose
# count of samples they lack.
SIGNED = "nam_megatron"

NEXT = "`schedule.changes=[{}]` makes it a next stage, saved elsewhere"
FOREIGN_STEP = "a step belongs into the folder of its run, beside its `plan.json`"
# Where data lies, which its content does not depend on.
PLACED = frozenset(("data.path", "data.tokenizer"))
# What the flattened state of a sharded optimizer depends on.
SHARDED_BY = frozenset(
    f"parallel.{name}" for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
)

FOREIGN = re.compile(r"GLOBAL ([\w.]{1,80})")  # in what torch says of a class that may not be loaded
# All that the index of a checkpoint is made of (torch 2.11), by module. Nothing else is looked up while it is read.
INDEX = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip


def objections(lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Why this plan cannot load what it asks for, or must not save where it asks to. thorough: see `damage`."""
    schedule = lowering.plan.recipe.schedule
    if schedule.load is not None:
        folder = Path(schedule.load)
        if not (folder / TRACKER).is_file():
            # Megatron would start from random weights.
            yield Problem(
                f"no checkpoint in `{folder}`", key="schedule.load", hint="set `schedule.load=null` to start afresh"
            )
            return
        yield from damage(folder, thorough=thorough)
        yield from another(folder, lowering, thorough=thorough)
        if schedule.changes:
            yield from no_stage(folder, lowering)
    elif schedule.changes:
        hint = "`schedule.load=FOLDER` names the stage before; a run of its own has `schedule.changes=[]`"
        yield Problem("changes of a checkpoint, and none is loaded", key="schedule.changes", hint=hint)
    yield from occupied(lowering)


def no_stage(folder: Path, lowering: Lowering) -> Iterator[Problem]:
    """Why a plan that names changes is no next stage of the run in `folder`."""
    schedule, key = lowering.plan.recipe.schedule, "schedule.changes"
    if weights_alone(folder):
        hint = "`schedule.changes=[]`: a run that begins with them has any schedule"
        yield Problem("changes of a run, and what is loaded are weights alone", key=key, hint=hint)
        return
    if schedule.save is not None and Path(schedule.save).resolve() == folder.resolve():
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
            yield Problem(
                f"the stage before it ended at step {done}: none is left", key="schedule.train_steps", hint=hint
            )


def occupied(lowering: Lowering) -> Iterator[Problem]:
    """Where the plan would save into the folder of a run that it does not go on with."""
    schedule = lowering.plan.recipe.schedule
    if schedule.save is not None and (Path(schedule.save) / TRACKER).exists():
        same = schedule.load is not None and Path(schedule.load).resolve() == Path(schedule.save).resolve()
        if not same:
            yield Problem(
                f"`{schedule.save}` holds the checkpoints of a run",
                key="schedule.save",
                hint=f"`schedule.load={schedule.save}` goes on with it; or name another folder",
            )


def another(folder: Path, lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Where the plan computes something else than the checkpoint's did, or the checkpoint is not of the run that its plan is of.

    folder: where the plan stands. thorough: hash the data; of a job one rank does that.
    """
    base = folder.parent if folder.name == SIGNED else folder
    with contextlib.suppress(Refused):
        if _of_others(base, tracker.newest(base)):
            return  # `damage` says it
    if found := list(_another(folder, lowering, thorough)):
        yield from found
        return
    yield from strangers(base)


def strangers(folder: Path) -> Iterator[Problem]:
    """Whether the newest step of a checkpoint is another run's."""
    with contextlib.suppress(Refused):  # `damage` says it
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
        elif d.key in PLACED and (known or (kept and not thorough)):
            pass  # its content is asked, wherever it lies
        elif d.key in SHARDED_BY and not _reshardable(same.resolved(before)):
            text = f"a checkpoint of `{d.key}` {d.before} cannot be read into {d.after}"
            hint = "resume in its layout, save with `feature.distributed_optimizer.reshardable=true`, then change it"
            yield Problem(text, key=d.key, hint=hint)
        elif d.computes:
            yield Problem(
                f"the checkpoint has `{d.key}` {_shown(d.before)}, and the plan {_shown(d.after)}",
                key=d.key,
                hint=_hint(d.key),
            )


def another_data(known: Mapping[str, str], data: Data) -> Iterator[Problem]:
    """Where data is not that of a checkpoint, of which `known` are the hashes."""
    try:
        now = identity.hashes(identity.tree(data)) or {}
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
        if told not in (manifest.digest(known / manifest.TOKENS), identity.laid_out(ours)):
            message = f"the data's tokenizer, `{known}`, is not the one of the dataset that the weights were trained on"
            yield Problem(message, key=key, hint=f"take the folder `{manifest.TOKENIZER}` of that dataset")


def weights_alone(folder: Path) -> bool:
    """Whether a checkpoint has no state of training: an imported one."""
    return (folder / TRACKER).is_file() and tracker.word(folder) == RELEASE


def _reshardable(recipe: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state was written parameter by parameter, and not as the layout had flattened it."""
    feature = recipe["feature"]
    if any(cls.bound and name in feature for name, cls in FEATURES.items()):
        return False
    return not feature["distributed_optimizer"]["enabled"] or feature["distributed_optimizer"]["reshardable"]


def _hint(key: str) -> str:
    if key == "schedule.train_steps":
        return f"the order of the data depends on it; to end a command earlier, use `schedule.stop_every`; {NEXT.format(key)}"
    if key in STAGE:
        return f"go on with what was computed before; {NEXT.format(key)}"
    return "go on with what was computed before, or start afresh: `schedule.load=null`"


def _shown(value: Any) -> str:
    return json.dumps(value)


def damage(folder: Path, *, thorough: bool = True) -> Iterator[Problem]:
    """What is wrong with the newest checkpoint, by its checksums and by what its index names.

    Nothing of it is trusted while it is looked at: whoever loads it afterwards runs no code of its own.
    thorough: read the shards too; of a job one rank does that, and the others wait for it when they meet.
    """
    try:
        step = tracker.newest(folder, "schedule.load")
    except Refused as no:
        yield from no.problems
        return
    hint = f"write an earlier step into `{folder / TRACKER}`"
    if not step.is_dir():
        yield Problem(f"checkpoint `{step}` is not there", key="schedule.load", hint=hint)
        return
    if theirs := _of_others(folder, step):
        yield theirs
        return
    beside = [at for at in (folder, folder / SIGNED) if at.is_dir()]
    if pipes := [*irregular((path for at in (step, *beside) for path in at.iterdir()), "schedule.load")]:
        yield from pipes  # whoever opened one would wait
        return
    found = list(dict.fromkeys((*checksums.damage(step, thorough=thorough), *of_index(step, thorough=thorough))))
    found += [f"`{path.name}` is cut off" for path in sorted(step.glob("*.pt")) if not zipfile.is_zipfile(path)]
    yield from (Problem(f"checkpoint `{step}` is damaged: {what}", key="schedule.load", hint=hint) for what in found)


def _of_others(folder: Path, step: Path) -> Problem | None:
    """For a step that no program of ours has saved: nothing of ours lies in it or beside it."""
    if (step / checksums.NAME).exists() or any((at / PLAN).exists() for at in (step, folder, folder / SIGNED)):
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
        if d.computes and d.key not in PLACED:
            yield f"is of another run: `{d.key}` is {_shown(d.before)} in its `{PLAN}`, and {_shown(d.after)} in the run's"
    data = [identity.stored(at / DATA) for at in (step, beside)]
    if data[0] and data[1] and (found := identity.differing(data[0], data[1])):
        yield f"is of another run, which was trained on other data: {quoted(found)}"


def untold(folder: Path) -> Iterator[str]:
    """What cannot be told of the newest checkpoint, which an older version has saved."""
    try:
        step = tracker.newest(folder)
        bound = checksums.bound(step)
    except (Refused, OSError, ValueError):
        return  # `damage` says it
    signed = [at / DATA for at in (folder, folder / SIGNED)]
    if bound is None or not (step / PLAN).is_file():
        yield f"whether `{step}` is a step of this run cannot be told: the version that saved it did not bind a step to its run"
    plan = next((at for at in (folder, folder / SIGNED) if (at / PLAN).is_file()), None)
    if plan and not any(map(identity.stored, signed)):
        with contextlib.suppress(Refused, AttributeError):
            if same.read(plan / PLAN)["recipe"]["data"].get("name") != "mock":
                yield f"whether the data is that of `{folder}` cannot be told: the version that saved it kept no hashes of it"


def untold_of(recipe: Recipe) -> Iterator[str]:
    """The same of what a recipe loads; of weights alone nothing is asked."""
    folders = [Path(name) for name in (recipe.schedule.load, recipe.schedule.pretrained) if name]
    for folder in folders:
        if (folder / TRACKER).is_file() and not weights_alone(folder):
            yield from untold(folder)


def of_index(step: Path, *, thorough: bool = True) -> Iterator[str]:
    """What is missing of a checkpoint by its own index, and what of it would run code when it is loaded."""
    try:
        with open(step / ".metadata", "rb") as file:
            index = Index(file).load()
        stored = [(info.relative_path, info.offset, info.length, key.fqn) for key, info in index.storage_data.items()]
        opaque = {name for name, m in index.state_dict_metadata.items() if type(m).__name__ == "BytesStorageMetadata"}
        for name, offset, length, _ in stored:
            if not isinstance(name, str) or not all(type(n) is int and 0 <= n < 2**62 for n in (offset, length)):
                raise ValueError(f"it says {str(name)[:40]}, {offset}, {length}")
            if name in ("", "..") or name != Path(name).name:
                raise ValueError(f"it names `{name[:80]}`, which is no file of this checkpoint")
    except FileNotFoundError:
        yield "`.metadata` is missing"
        return
    except Exception as err:  # a pickle that is no pickle any more raises anything
        yield f"its index `.metadata` cannot be read: {err or type(err).__name__}"
        return
    needed: defaultdict[str, int] = defaultdict(int)
    for name, offset, length, _ in stored:
        needed[name] = max(needed[name], offset + length)
    whole = True
    for name, size in needed.items():
        path = step / name
        if not path.is_file():
            whole = False
            yield f"`{name}` is missing"
        elif (there := path.stat().st_size) < size:
            whole = False
            yield f"`{name}` has {there} bytes of {size}"
    if thorough and whole:
        for name, offset, length, key in stored:
            if key in opaque and (why := unsafe(step / name, offset, length)):
                yield f"`{key}` in `{name}` cannot be loaded: {why}"


def unsafe(path: Path, offset: int, length: int) -> str | None:
    """Why an object that stands among the tensors of a shard (the state of random streams, Megatron's arguments) is not loaded."""
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    except Exception as err:  # as of any pickle; torch's own text says how to run the code all the same
        named = FOREIGN.search(str(err))
        return (
            f"it names `{named[1]}`, which Megatron does not"
            if named
            else f"it is no object of torch's ({type(err).__name__})"
        )
    return None


class Index(pickle.Unpickler):
    """Reads `.metadata`: every class in it becomes an inert one, and one that has no place in an index is an error."""

    def find_class(self, module: str, name: str) -> type:
        if name in INDEX.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return type(name, (Inert,), {})
        raise pickle.UnpicklingError(f"it names `{module[:40]}.{name[:40]}`, which has no place in an index")


class Inert:
    """Stands for any class of an index. Its `__setstate__` is also what keeps a pickle from setting attributes of the class itself."""

    def __init__(self, *_: object) -> None:
        """Takes what the class that it stands for would."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):  # a TensorProperties keeps a tuple, of which nothing is asked
            self.__dict__.update(state)


def alone(folder: Path) -> None:
    """No other run saves into `folder` as long as this process lives: steps of two would be of parts of both. Raises Refused."""
    if folder.resolve() in SAVING:
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        hint = f"let it end, or name another folder; if its host died with the lock, remove `{folder / LOCK}`"
        raise Refused(
            Problem(f"another run that goes on saves into `{folder}`", key="schedule.save", hint=hint)
        ) from None
    except OSError:  # a file system without locks
        pass
    SAVING[folder.resolve()] = lock


def sign(lowering: Lowering, within: str = "") -> None:
    """Write beside the checkpoints to come what computes them, or into the folder `within` there. Raises Refused."""
    recipe = lowering.plan.recipe
    if recipe.schedule.save is None:
        return
    folder = Path(recipe.schedule.save) / within
    folder.mkdir(parents=True, exist_ok=True)
    alone(Path(recipe.schedule.save))
    texts = {PLAN: plan_json(lowering)}
    if data := identity.tree(recipe.data):
        texts[DATA] = json.dumps(data, indent=1) + "\n"
    for name, text in texts.items():
        write_whole(folder / name, text)
    checksums.bind(texts)
