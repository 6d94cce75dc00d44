"""Whether a path that somebody gave is a file that ends: opening a pipe waits for a writer, and a device is read for ever."""

import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from nam_megatron.words.problem import Problem

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def kind(path: Path) -> str | None:
    """What stands there, or where a link leads, in place of a file or folder; None where it is one of these, or nothing is there."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def irregular(paths: Iterable[Path], key: str | None = None) -> Iterator[Problem]:
    """A problem of each path that is no file to read, or of their folder that may not be looked into."""
    try:
        for path in paths:
            if what := kind(path):
                hint = "take it away, or put a file there"
                yield Problem(f"`{path}` is {what}, and no file", key=key, hint=hint, law="no-regular-file")
    except OSError as err:
        yield closed(err, key)


def closed(err: OSError, key: str | None = None) -> Problem:
    """Of a file or folder that is not there, or that this user may not look into."""
    hint = "as which user does it run?" if isinstance(err, PermissionError) else None
    return Problem(f"`{err.filename}` cannot be read: {err.strerror}", key=key, hint=hint, law="file-error")
