"""What a folder of ours is already: an export, a run's record and a step vouch for their files."""

import os
from collections.abc import Iterator
from pathlib import Path

from nam_megatron.words.problem import Problem

EXPORT, RECEIPT, SUMS = "nam_export.json", "receipt.json", "integrity.json"  # each vouches for what lies beside it
BELOW = {EXPORT: "an export", SUMS: "a step of a checkpoint"}  # or deeper


def taken(path: Path, key: str | None = None, *, beside_record: bool = False) -> Iterator[Problem]:
    """Why nothing may be written into that folder, which need not be there: nor below an export or a step. Raises OSError.

    beside_record: there is room beside the record of a run.
    """
    real = Path(os.path.realpath(path))  # `..` is above an export, a link may lead into one
    above = ((at, said) for at in (real, *real.parents) for name, said in BELOW.items() if (at / name).is_file())
    beside = ((path, "the record of a run") for _ in range(not beside_record) if (path / RECEIPT).is_file())
    at, what = next(above, None) or next(beside, (None, None))
    if what:
        message = f"`{at}` is {what}, which vouches for its files: nothing else belongs there"
        yield Problem(message, key=key, hint="name a place of its own", law="file-of-others")
