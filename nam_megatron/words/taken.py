"""What a folder of ours is already: an export, a run's record and a step vouch for their files."""

import os
from collections.abc import Iterator
from pathlib import Path

from nam_megatron.words.problem import Problem

EXPORT, RECEIPT, SUMS = "nam_export.json", "receipt.json", "integrity.json"  # each vouches for what lies beside it
SAID = {EXPORT: "an export", RECEIPT: "the record of a run", SUMS: "a step of a checkpoint"}


def taken(path: Path, key: str | None = None, *, beside_record: bool = False) -> Iterator[Problem]:
    """Why nothing may be written into that folder, which need not be there: nor deeper. Raises OSError.

    beside_record: there is room beside the record of a run, and no deeper.
    """
    real = Path(os.path.realpath(path))  # `..` is above an export, a link may lead into one
    above = ((at, name) for at in (real, *real.parents) for name in SAID if (at / name).is_file())
    at, name = next((one for one in above if not (beside_record and one == (real, RECEIPT))), (None, None))
    if name:
        message = f"`{at}` is {SAID[name]}, which vouches for its files: nothing else belongs there"
        yield Problem(message, key=key, hint="name a place of its own", law="file-of-others")
