"""A file that is whole wherever it is found: written under another name, and then given its own; and what tells whether it is the same."""

import contextlib
import hashlib
import os
from fnmatch import fnmatchcase
from pathlib import Path

PART = ".{}.{}.part"  # the file's name, the process that writes it


def write_whole(path: Path, text: str | bytes, *, mode: int = 0o666, kept: bool = False) -> None:
    """Write a file whole or not at all; what stands there is replaced. kept: it is on the disk before this returns. Raises OSError."""
    part = path.with_name(PART.format(path.name, os.getpid()))
    try:
        part.unlink(missing_ok=True)  # a pipe would wait for a reader, a link lead elsewhere
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if kept:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if kept:
            synced(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def is_part(name: str, of: str) -> bool:
    """Whether a file of this name is what `write_whole` has left of `of` where it was killed."""
    return fnmatchcase(name, PART.format(of, "*"))


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def synced(folder: Path) -> None:
    """The names in `folder` are on the disk."""
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)
