"""The file that names a run's newest checkpoint: the old name or the new one, whole (torch side).

megatron-core 0.19.2 (training/checkpointing.py) empties it before it writes. A kill in between, or a disk that is full then, leaves a run
whose checkpoints are whole and whose next command finds none.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training import checkpointing

from nam_megatron.mends import Plan
from nam_megatron.tracker import TRACKER
from nam_megatron.words.whole import write_whole


class Files:
    """What Megatron opens files with."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def open(self, path: Any, mode: str = "r", *words: Any, **named: Any) -> Any:
        whole = mode == "w" and Path(path).name == TRACKER
        return _written(Path(path)) if whole else self._theirs.open(path, mode, *words, **named)


def install(plan: Plan) -> None:
    """Have each checkpoint that this process saves from now on named whole."""
    checkpointing.maybe_msc = Files(checkpointing.maybe_msc)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    write_whole(path, text.getvalue())
