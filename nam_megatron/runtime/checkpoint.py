"""Whether a checkpoint is whole and harmless, and what is written beside one that is saved (torch side); judge/resume.py says what."""

import contextlib
import fcntl
import io
import json
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nam_megatron import errors, tracker
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.data import identity
from nam_megatron.errors import Problem, Refused
from nam_megatron.judge import resume, same
from nam_megatron.judge.resume import DATA, ORIGIN, PLAN, SIGNED, of_others, weights_alone
from nam_megatron.recipe import Recipe
from nam_megatron.runtime import checksums
from nam_megatron.tracker import RELEASE, TRACKER
from nam_megatron.words.regular import closed, irregular
from nam_megatron.words.whole import write_whole

LOCK = "run.lock"
SAVING: dict[Path, int] = {}  # folders that this process saves into, and their locks
# Folders that this process has judged, their newest step then, and the hash of its checksums.
JUDGED: dict[Path, tuple[str, str]] = {}
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


def reads() -> bool:
    """Whether this rank looks at files for all of its host: what stands under a name there may differ from host to host."""
    from megatron.training.utils.common_utils import get_local_rank_preinit  # Slurm's word where there is no torchrun's

    return get_local_rank_preinit() == 0


@resume.seen
def objections(lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Why this plan cannot load what it asks for, or must not save where it asks to. thorough: see `damage`."""
    load = lowering.plan.recipe.schedule.load
    if load is not None and (Path(load) / TRACKER).is_file():
        yield from damage(Path(load), thorough=thorough)
    yield from resume.objections(lowering, thorough=thorough)


def damage(folder: Path, *, thorough: bool = True) -> Iterator[Problem]:
    """What is wrong with the newest checkpoint, by its checksums and by what its index names.

    Nothing of it is trusted while it is looked at: whoever loads it afterwards runs no code of its own.
    thorough: read the shards too; one rank does that of all hosts that share a disk, and the others wait for it when they meet.
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
    if theirs := of_others(folder, step):
        yield theirs
        return
    beside = [at for at in (folder, folder / SIGNED) if at.is_dir()]
    if pipes := [*irregular((path for at in (step, *beside) for path in at.iterdir()), "schedule.load")]:
        yield from pipes  # whoever opened one would wait
        return
    found = list(dict.fromkeys((*checksums.damage(step, thorough=thorough), *of_index(step, thorough=thorough))))
    found += [f"`{path.name}` is cut off" for path in sorted(step.glob("*.pt")) if not zipfile.is_zipfile(path)]
    yield from (Problem(f"checkpoint `{step}` is damaged: {what}", key="schedule.load", hint=hint) for what in found)
    if not found:
        JUDGED[folder] = step.name, checksums.whole(step)


def exchanged(load: str | None, step: int | None, key: str = "schedule.load") -> Iterator[Problem]:
    """Whether another checkpoint was loaded than was judged: without a tracker Megatron starts from random weights.

    step: that was loaded, 0 for none; None where only the tracker tells it. Raises Refused where it has to, and is gone.
    """
    if load is None or not ((judged := JUDGED.get(folder := Path(load))) or step):
        return
    name, sums = judged or ("none", "")
    try:
        told = step is None or name == RELEASE
        if (tracker.newest(folder, key).name if told else f"iter_{step:07d}") != name:
            what = f"its `{name}` was not loaded" if judged else "it had no checkpoint then, and one was loaded"
        elif checksums.whole(folder / name) != sums:
            what = f"the checksums of its `{name}` are others now"
        else:
            return
    except OSError as err:
        yield closed(err, key)
        return
    message = f"`{folder}` was changed after it was looked at: {what}"
    yield Problem(message, key=key, hint="start again once nobody writes there")


def untold(folder: Path) -> Iterator[str]:
    """What cannot be told of the newest checkpoint, which an older version has saved."""
    try:
        step = tracker.newest(folder)
        bound = checksums.bound(step)
    except (Refused, OSError, ValueError):
        return  # `damage` says it
    signed = [at / DATA for at in (folder, folder / SIGNED)]
    if bound is None or not all((step / name).is_file() for name in (PLAN, ORIGIN)):
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
        if named:
            return f"it names `{named[1]}`, which Megatron does not"
        return f"it is no object of torch's ({type(err).__name__})"
    return None


class Index(pickle.Unpickler):
    """Reads `.metadata`: every class in it becomes an inert one, and one that has no place in an index is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if name in INDEX.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return self.made(module, name)
        raise pickle.UnpicklingError(f"it names `{module[:40]}.{name[:40]}`, which has no place in an index")

    def made(self, module: str, name: str) -> Any:
        return type(name, (Inert,), {})


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
        raise Refused(f"another run that goes on saves into `{folder}`", key="schedule.save", hint=hint) from None
    except OSError:  # a file system without locks
        pass
    SAVING[folder.resolve()] = lock


writing = partial(errors.writing, key="schedule.save")  # what stands beside the checkpoints to come


def sign(lowering: Lowering, within: str = "") -> None:
    """Write beside the checkpoints to come what computes them, or into the folder `within` there. Raises Refused."""
    recipe = lowering.plan.recipe
    if recipe.schedule.save is None:
        return
    folder = Path(recipe.schedule.save) / within
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        alone(Path(recipe.schedule.save))
    texts = {PLAN: plan_json(lowering)} | origin(recipe, folder)
    if data := identity.read(recipe.data):
        texts[DATA] = json.dumps(data, indent=1) + "\n"
    with writing(folder):
        for name, text in texts.items():
            write_whole(folder / name, text)
    checksums.bind(texts)


def origin(recipe: Recipe, folder: Path) -> dict[str, str]:
    """What the run that saves beside the plan in `folder` began with, as that says where it goes on; nothing where nobody knows it."""
    schedule = recipe.schedule
    loads = (Path(name) for name in (schedule.load, schedule.pretrained) if name)
    began = next((place for place in loads if (place / TRACKER).is_file()), None)
    if began and began.resolve() == Path(schedule.save or "").resolve() and not weights_alone(began):
        weights = (identity.stored(folder / ORIGIN) or {}).get("weights")
    else:
        weights = JUDGED.get(began, ("", None))[1] if began else "random"
    return {ORIGIN: json.dumps({"files": {"weights": {"sha256": weights}}})} if weights else {}
