"""What a folder of ours is already: an export, a run's record and a step vouch for their files."""

import os
from collections.abc import Iterator
from pathlib import Path

from nam_megatron.words.problem import Problem

EXPORT, RECEIPT, SUMS = "nam_export.json", "receipt.json", "integrity.json"  # each vouches for what lies beside it
OF_FILE = {RECEIPT: "the record of a run", SUMS: "a step of a checkpoint"}


def taken(path: Path, key: str | None = None, but: str | None = None) -> Iterator[Problem]:
    """Why nothing may be written into that folder, which need not be there: nor into one below an export. Raises OSError.

    but: of OF_FILE, beside which there is room.
    """
    real = Path(os.path.realpath(path))  # `..` is above an export, a link may lead into one
    export = next((at for at in (real, *real.parents) if (at / EXPORT).is_file()), None)
    beside = (said for name, said in OF_FILE.items() if name != but and (path / name).is_file())
    what = "an export" if export else next(beside, None)
    if what:
        message = f"`{export or path}` is {what}, which vouches for its files: nothing else belongs there"
        yield Problem(message, key=key, hint="name a place of its own", law="file-of-others")
