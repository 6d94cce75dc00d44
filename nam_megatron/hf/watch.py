"""Every checkpoint of a run, exported as it appears and evaluated if asked, by a process beside the run (torch side).

The trainer knows nothing of it and waits for nothing: Megatron writes its tracker once a step lies whole on the disk.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nam_megatron.errors import Problem, Refused
from nam_megatron.hf.export import export
from nam_megatron.hf.perplexity import perplexity
from nam_megatron.tracker import TRACKER, word


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
        if dataset is not None and not (out / f"{name}.json").exists():
            made = perplexity(out / name, dataset, "valid", None, 4, torch.bfloat16, device)
            say(f"{name}: loss {made['loss']:.4f}, perplexity {made['perplexity']:.2f}")
            (out / f"{name}.json").write_text(json.dumps({**made, "step": step}, indent=1) + "\n", encoding="utf-8")
        last = step


def _newest(checkpoint: Path) -> int | None:
    try:
        said = word(checkpoint)
    except FileNotFoundError:
        return None  # the run has not saved yet
    except OSError as err:
        raise Refused(Problem(f"`{checkpoint / TRACKER}` cannot be read: {err}")) from None
    return int(said) if said.isdecimal() else None
