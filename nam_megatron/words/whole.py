"""A file that is whole wherever it is found: written under another name, and then given its own."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; what stands there is replaced. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
