"""What stands beside a checkpoint, and whether a plan may go on from it (torch side).

Megatron's checkpoint folder holds `latest_checkpointed_iteration.txt` and a folder for each step saved. Beside them the trainer writes
`plan.json` and, for a built dataset, `data.json`, its manifest: what computed these weights.
"""

import json
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from nam_megatron import computation
from nam_megatron.argv import plan_json
from nam_megatron.data import manifest
from nam_megatron.errors import Problem, Refused
from nam_megatron.lower import Lowering

TRACKER, PLAN, DATA = "latest_checkpointed_iteration.txt", "plan.json", "data.json"

# What the flattened state of a sharded optimizer depends on.
SHARDED_BY = frozenset(
    f"parallel.{name}" for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
)


def objections(lowering: Lowering) -> Iterator[Problem]:
    """Why this plan cannot load what it asks for, or must not save where it asks to."""
    schedule = lowering.plan.recipe.schedule
    if schedule.load is not None:
        folder = Path(schedule.load)
        if not (folder / TRACKER).is_file():
            # Megatron would start from random weights.
            yield Problem(f"no checkpoint in `{folder}`", "schedule.load", "set `schedule.load=null` to start afresh")
            return
        yield from damage(folder)
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
    built = {"before": before["recipe"]["data"].get("name"), "after": lowering.plan.recipe.data.name}
    for d in computation.differences(before, after):
        if d.key == "data.path" and set(built.values()) == {"built"}:
            if _data_key(folder / DATA) != _data_key(Path(d.after) / manifest.NAME):
                yield Problem(f"the checkpoint was trained on another dataset, `{d.before}`", d.key, _hint(d.key))
        elif d.key in SHARDED_BY and not _reshardable(computation.standing(before)):
            text = f"a checkpoint of `{d.key}` {d.before} cannot be read into {d.after}"
            hint = "resume in its layout, save with `feature.distributed_optimizer.reshardable=true`, then change it"
            yield Problem(text, d.key, hint)
        elif d.computes:
            yield Problem(
                f"the checkpoint has `{d.key}` {_shown(d.before)}, and the plan {_shown(d.after)}", d.key, _hint(d.key)
            )


def _reshardable(recipe: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state was written parameter by parameter, and not as the layout had flattened it."""
    feature = recipe["feature"]
    if feature.keys() & {"muon", "megatron_fsdp", "fsdp2"}:
        return False
    return not feature["distributed_optimizer"]["enabled"] or feature["distributed_optimizer"]["reshardable"]


def _hint(key: str) -> str:
    if key == "schedule.train_steps":
        return "the order of the data depends on it; to end a command earlier, use `schedule.stop_every`"
    return "go on with what was computed before, or start afresh: `schedule.load=null`"


def _shown(value: Any) -> str:
    return json.dumps(value)


def _data_key(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(folder: Path) -> Iterator[Problem]:
    """What is missing from the newest checkpoint, by the sizes that its own index names."""
    word = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if not word.isdecimal():
        yield Problem(f"`{folder / TRACKER}` says `{word[:40]}`, which is no step", "schedule.load", "write the step")
        return
    step = folder / f"iter_{int(word):07d}"
    hint = f"write an earlier step into `{folder / TRACKER}`"
    try:
        index = FileSystemReader(step).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError, IndexError) as err:
        yield Problem(f"the index of checkpoint `{step}` cannot be read: {err}", "schedule.load", hint)
        return
    needed: Mapping[str, int] = defaultdict(int)
    for stored in index.storage_data.values():
        needed[stored.relative_path] = max(needed[stored.relative_path], stored.offset + stored.length)
    for name, size in needed.items():
        path = step / name
        if not path.is_file():
            yield Problem(f"checkpoint `{step}` is damaged: `{name}` is missing", "schedule.load", hint)
        elif (found := path.stat().st_size) < size:
            text = f"checkpoint `{step}` is damaged: `{name}` has {found} bytes of {size}"
            yield Problem(text, "schedule.load", hint)
    for path in sorted(step.glob("*.pt")):
        if not zipfile.is_zipfile(path):
            yield Problem(f"checkpoint `{step}` is damaged: `{path.name}` is cut off", "schedule.load", hint)


def sign(lowering: Lowering, within: str = "") -> None:
    """Write beside the checkpoints to come what computes them, or into the folder `within` there."""
    recipe = lowering.plan.recipe
    if recipe.schedule.save is None:
        return
    folder = Path(recipe.schedule.save) / within
    folder.mkdir(parents=True, exist_ok=True)
    texts = {PLAN: plan_json(lowering)}
    if recipe.data.name == "built":
        texts[DATA] = (Path(recipe.data.path) / manifest.NAME).read_text(encoding="utf-8")
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
