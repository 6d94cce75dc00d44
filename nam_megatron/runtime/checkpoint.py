"""What stands beside a checkpoint, and whether a plan may go on from it (torch side).

Megatron's checkpoint folder holds `latest_checkpointed_iteration.txt` and a folder for each step saved. Beside them the trainer writes
`plan.json` and, for a built dataset, `data.json`, its manifest: what computed these weights. Beside imported weights lies the tokenizer
that was exported with them, if one was.
"""

import io
import json
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nam_megatron import computation, tracker
from nam_megatron.argv import plan_json
from nam_megatron.data import manifest
from nam_megatron.errors import Problem, Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.lower import Lowering
from nam_megatron.recipe.data import Data
from nam_megatron.runtime import checksums
from nam_megatron.tracker import RELEASE, TRACKER

PLAN, DATA = "plan.json", "data.json"
HASHED = f"{manifest.TOKENIZER}/{manifest.TOKENS}"  # as a dataset's manifest names its tokenizer's file
# Beside Bridge's checkpoints, what computed them stands in a folder: there `nam_megatron.train` does not take them for its own, whose
# count of samples they lack.
SIGNED = "nam_megatron"

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
            yield Problem(f"no checkpoint in `{folder}`", "schedule.load", "set `schedule.load=null` to start afresh")
            return
        yield from damage(folder, thorough=thorough)
        yield from another(folder, lowering)
    yield from occupied(lowering)


def occupied(lowering: Lowering) -> Iterator[Problem]:
    """Where the plan would save into the folder of a run that it does not go on with."""
    schedule = lowering.plan.recipe.schedule
    if schedule.save is not None and (Path(schedule.save) / TRACKER).exists():
        same = schedule.load is not None and Path(schedule.load).resolve() == Path(schedule.save).resolve()
        if not same:
            yield Problem(
                f"`{schedule.save}` holds the checkpoints of a run",
                "schedule.save",
                f"`schedule.load={schedule.save}` goes on with it; or name another folder",
            )


def another(folder: Path, lowering: Lowering) -> Iterator[Problem]:
    """Where the plan computes something else than the checkpoint's did."""
    after = json.loads(plan_json(lowering))
    try:
        before = computation.read(folder / PLAN)
    except Refused as refused:
        yield from refused.problems
        return
    if weights_alone(folder):  # a run of its own begins
        if lowering.plan.recipe.feature.megatron_fsdp:  # in `fsdp_dtensor` alone: Megatron would stop with a KeyError
            message = "Megatron-FSDP reads no imported weights"
            yield Problem(message, "feature.megatron_fsdp.enabled", "set it to false")
        yield from computation.another_model(before, after)
        yield from another_tokenizer(folder, lowering.plan.recipe.data)
        return
    built = {"before": before["recipe"]["data"].get("name"), "after": lowering.plan.recipe.data.name}
    for d in computation.differences(before, after):
        if d.key == "data.path" and set(built.values()) == {"built"}:
            if _of_manifest(folder / DATA, "key") != _of_manifest(Path(d.after) / manifest.NAME, "key"):
                yield Problem(f"the checkpoint was trained on another dataset, `{d.before}`", d.key, _hint(d.key))
        elif d.key in SHARDED_BY and not _reshardable(computation.standing(before)):
            text = f"a checkpoint of `{d.key}` {d.before} cannot be read into {d.after}"
            hint = "resume in its layout, save with `feature.distributed_optimizer.reshardable=true`, then change it"
            yield Problem(text, d.key, hint)
        elif d.computes:
            yield Problem(
                f"the checkpoint has `{d.key}` {_shown(d.before)}, and the plan {_shown(d.after)}", d.key, _hint(d.key)
            )


def another_tokenizer(folder: Path, data: Data) -> Iterator[Problem]:
    """Where weights have learned other tokens than those of the data, as far as both are known.

    Imported ones have a tokenizer beside them, a run's the manifest of its dataset, with the hash of that one's.
    """
    known = data.built / manifest.TOKENIZER if data.built else data.tokenizer and Path(data.tokenizer)
    if not known or not (known / manifest.TOKENS).is_file():
        return
    key = "data.path" if data.built else "data.tokenizer"
    at = folder / manifest.TOKENIZER
    ours, theirs = (_tokens(place / manifest.TOKENS) for place in (known, at))
    if ours and theirs and ours != theirs:
        message = f"the data's tokenizer, `{known}`, is another than that of the weights, `{at}`"
        hint = f"build the dataset with `--tokenizer {at}`; or, if other tokens are meant, take that folder away"
        yield Problem(message, key, hint)
    elif not theirs and (told := _of_manifest(folder / DATA, "files", HASHED, "sha256")):
        if told != manifest.digest(known / manifest.TOKENS):
            message = f"the data's tokenizer, `{known}`, is not the one of the dataset that the weights were trained on"
            yield Problem(message, key, f"take the folder `{manifest.TOKENIZER}` of that dataset")


def _tokens(path: Path) -> dict[str, Any] | None:
    """What a tokenizer's file says of a text, however it is laid out; None where there is none, or it cannot be read."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in said.items() if key not in manifest.AROUND}
    except (OSError, ValueError, AttributeError):
        return None


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
        return "the order of the data depends on it; to end a command earlier, use `schedule.stop_every`"
    return "go on with what was computed before, or start afresh: `schedule.load=null`"


def _shown(value: Any) -> str:
    return json.dumps(value)


def _of_manifest(path: Path, *names: str) -> str | None:
    """What a dataset's manifest has under these names; None where there is none, or it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name in names:
            found = found[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


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
        yield Problem(f"checkpoint `{step}` is not there", "schedule.load", hint)
        return
    found = list(dict.fromkeys((*checksums.damage(step, thorough=thorough), *of_index(step, thorough=thorough))))
    found += [f"`{path.name}` is cut off" for path in sorted(step.glob("*.pt")) if not zipfile.is_zipfile(path)]
    yield from (Problem(f"checkpoint `{step}` is damaged: {what}", "schedule.load", hint) for what in found)


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


def sign(lowering: Lowering, within: str = "") -> None:
    """Write beside the checkpoints to come what computes them, or into the folder `within` there."""
    recipe = lowering.plan.recipe
    if recipe.schedule.save is None:
        return
    folder = Path(recipe.schedule.save) / within
    folder.mkdir(parents=True, exist_ok=True)
    texts = {PLAN: plan_json(lowering)}
    if recipe.data.built is not None:
        texts[DATA] = (recipe.data.built / manifest.NAME).read_text(encoding="utf-8")
    for name, text in texts.items():
        place(folder / name, text)


def place(path: Path, text: str) -> None:
    """Write a file that is whole wherever it is found."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
