"""Which of a checkpoint's steps is its newest: the file beside them in which Megatron names it."""

from pathlib import Path

from nam_megatron.errors import Refused, not_there, raise_if
from nam_megatron.words.regular import closed, irregular
from nam_megatron.words.taken import SUMS

TRACKER = "latest_checkpointed_iteration.txt"
INTEGRITY = SUMS  # the checksums of a step, in it
RELEASE = "release"  # Megatron's word for weights without a state of training: a run starts from them at step 0


def word(folder: Path) -> str:
    """What the tracker says, whatever that is. Raises OSError."""
    return (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()


def newest(folder: Path, key: str | None = None) -> Path:
    """The folder of the newest step, whether it is there or not. key: of the recipe, that names the checkpoint.

    Raises:
        Refused: there is no tracker, it cannot be read or says no step.
    """
    tracker = folder / TRACKER
    raise_if(irregular((tracker,), key))
    try:
        said = word(folder)
    except FileNotFoundError:
        if not folder.exists():
            raise Refused(not_there(folder, key)) from None
        hint = f"it holds no `{TRACKER}`"
        raise Refused(f"no checkpoint in `{folder}`", key=key, hint=hint, law="checkpoint-missing") from None
    except OSError as err:
        raise Refused(closed(err, key)) from None
    if said == RELEASE:
        return folder / RELEASE
    if said.isascii() and said.isdecimal() and len(said) < 10:
        return folder / f"iter_{int(said):07d}"
    message = f"`{tracker}` says `{said[:40]}`, which is no step"
    raise Refused(message, key=key, hint="write the step", law="tracker-unreadable")
