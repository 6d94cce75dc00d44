"""Every checkpoint of a run, exported as it appears and evaluated if asked, by a process beside the run (torch side).

The trainer knows nothing of it and waits for nothing: Megatron writes its tracker once a step lies whole on the disk.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nam_megatron.data import manifest
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf import folder
from nam_megatron.hf.export import export
from nam_megatron.hf.opened import absent, identity
from nam_megatron.hf.perplexity import perplexity
from nam_megatron.runtime import checksums
from nam_megatron.tracker import RELEASE, newest, word
from nam_megatron.words.regular import irregular
from nam_megatron.words.taken import taken
from nam_megatron.words.whole import write_whole


def watch(
    checkpoint: Path,
    out: Path,
    tokens: Path | None,
    dataset: Path | None,
    device: str,
    until: int | None,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Export each new step to `out`/iter_NNNNNNN; with a dataset, its perplexity lies beside it as iter_NNNNNNN.json.

    until: the step to end after, None: never. seconds: between two looks. Steps that come and go between two looks are not seen.

    Raises:
        Refused: a checkpoint that cannot be exported.
    """
    if device != "cpu" and dataset is None:
        raise Refused("`--device` is where a perplexity is computed, and no `--dataset` is given")
    raise_if(absent(device))
    if dataset is not None:  # not once the first step has come, hours later
        manifest.read(dataset)
    raise_if(taken(out))
    if (checkpoint / checksums.NAME).is_file():
        raise Refused(f"`{checkpoint}` is one step", hint=f"the run's folder is `{checkpoint.absolute().parent}`")
    last = None
    if _newest(checkpoint) is None:  # a folder that the run will make, or a wrong name
        say(f"no step in `{checkpoint}` yet: waiting")
    while until is None or last is None or last < until:
        step = _newest(checkpoint)
        if step is None or step == last:
            time.sleep(seconds)
            continue
        name = f"iter_{step:07d}"
        if not (out / name).exists():
            export(checkpoint / name, out / name, tokens, say)
        made = _of(out / name, checkpoint / name)
        if dataset is not None and not _scored(out / f"{name}.json", made, dataset):
            found = perplexity(out / name, dataset, "valid", None, 4, torch.bfloat16, device, say=say)
            say(f"{name}: loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}")
            write_whole(out / f"{name}.json", json.dumps({**found, "step": step}, indent=1) + "\n")
        last = step


def _of(export: Path, step: Path) -> dict[str, Any]:
    """What an export is, of that very step. Raises Refused: it is something else."""
    made = identity(export)
    if (made["step"], made["checkpoint"]) != (step.name, checksums.whole(step)):
        message = f"`{export}` was there already, and is not the export of `{step}`"
        raise Refused(message, hint="take it away, or name another folder")
    return made


def _scored(result: Path, made: dict[str, Any], dataset: Path) -> bool:
    """Whether a result is there already that is of this export and dataset."""
    raise_if(irregular((result,)))
    if not result.exists():
        return False
    said = folder.load_json(result)
    # As written here: a result of `hf perplexity` may be of a few windows, or another split.
    whole = type(said.get("step")) is int
    return whole and (said.get("weights"), said.get("dataset")) == (made["weights"], manifest.read(dataset).key)


def _newest(checkpoint: Path) -> int | None:
    """The newest step; None: the run has not saved yet. Raises Refused: what names it cannot be understood."""
    try:
        step = newest(checkpoint)
    except Refused as refused:
        why = refused.problems[0].law
        if why in ("checkpoint-missing", "file-missing") or (why == "tracker-unreadable" and not word(checkpoint)):
            return None  # it has not begun, or the tracker is being written
        raise
    return None if step.name == RELEASE else int(step.name.removeprefix("iter_"))
