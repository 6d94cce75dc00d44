"""What a folder of ours is already: an export, a run's record and a step vouch for their files."""

import os
from collections.abc import Iterator
from pathlib import Path

from nam_megatron.words.problem import Problem

EXPORT, RECEIPT, SUMS = "nam_export.json", "receipt.json", "integrity.json"  # each vouches for what lies beside it
OF_FILE = {RECEIPT: "the record of a run", SUMS: "a step of a checkpoint"}


def taken(path: Path, key: str | None = None) -> Iterator[Problem]:
    """Why nothing may be written into that folder, which need not be there: nor into one below an export. Raises OSError."""
    real = Path(os.path.realpath(path))  # `..` is above an export, a link may lead into one
    export = next((at for at in (real, *real.parents) if (at / EXPORT).is_file()), None)
    what = "an export" if export else next((said for name, said in OF_FILE.items() if (path / name).is_file()), None)
    if what:
        message = f"`{export or path}` is {what}, which vouches for its files: nothing else belongs there"
        yield Problem(message, key=key, hint="name a place of its own", law="file-of-others")
