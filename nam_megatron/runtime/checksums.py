"""A checksum for every file of a checkpoint, written when it is saved and compared when it is loaded (torch side).

    python -m nam_megatron.runtime.checksums CHECKPOINT/iter_0000100     # for a checkpoint that has none, and whose files you trust

They are of one step and, where a trainer has saved it, of one run: the file says which step it is, and among what it hashes lie the
plan and the data's hashes. It is the file that Megatron's `--verify-integrity` writes and reads, `integrity.json`. Megatron's own way
knows one of our two formats, and hashes a whole checkpoint in one thread of one rank; here each rank hashes what it wrote.

An unkeyed hash finds what a disk, a network or a careless copy did. Whoever can write the files can write their checksums too.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nam_megatron.errors import OK, Refused, finish
from nam_megatron.tracker import INTEGRITY
from nam_megatron.words import regular
from nam_megatron.words.whole import digest, is_part, write_whole

NAME, ALGORITHM = INTEGRITY, "sha256"
SHARD = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")  # rank, number
DIGEST = re.compile(r"[0-9a-f]{64}")
BOUND: dict[str, str] = {}  # what this process puts into each step that it saves: name and text
THREADS = 8  # hashlib lets go of the interpreter; a disk is slower than eight of them
COMMAND = "python -m nam_megatron.runtime.checksums"


def bind(texts: Mapping[str, str]) -> None:
    """Have each checkpoint that this process saves from now on hold these files, too; of a job, the first rank's."""
    BOUND.clear()
    BOUND.update(texts)


def write(folder: Path) -> None:
    """Hash the files of a checkpoint, on every rank its own, and write them down on rank 0.

    Raises OSError on every rank where a file cannot be read on one of them, or the result not be written.
    """
    if not torch.distributed.get_rank():
        bind_to(folder, BOUND)
    torch.distributed.barrier()  # the files of the last rank
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[Any] = [None] * world
    try:
        mine: Any = digests(folder, [name for name in names(folder) if writer(name) % world == rank])
    except OSError as err:
        mine = str(err)
    torch.distributed.all_gather_object(found, mine)
    if failed := next((said for said in found if isinstance(said, str)), None):
        raise OSError(f"no checksums of `{folder}`: {failed}")
    if not rank:
        put(folder, {name: digest for part in found for name, digest in part.items()})


def bind_to(folder: Path, texts: Mapping[str, str]) -> None:
    """Write into a step what says of which run it is."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def writer(name: str) -> int:
    """The rank that wrote a file."""
    return int(found[1]) if (found := SHARD.fullmatch(name)) else 0


def names(folder: Path) -> list[str]:
    """Files that have a checksum. Of a save that broke off the part of a file of checksums may lie there."""
    found = (path.name for path in folder.iterdir() if path.is_file())
    return sorted(name for name in found if name != NAME and not is_part(name, NAME))


def digests(folder: Path, chosen: Sequence[str]) -> dict[str, str]:
    """{name: SHA-256 in hex}. Raises OSError."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(chosen, pool.map(lambda name: digest(folder / name), chosen), strict=True))


def whole(folder: Path) -> str:
    """One hash for a checkpoint: of its file of checksums. Raises OSError."""
    return digest(folder / NAME)


def put(folder: Path, found: dict[str, str]) -> None:
    said = {"algorithm": ALGORITHM, "step": folder.absolute().name, "files": dict(sorted(found.items()))}
    write_whole(folder / NAME, json.dumps(said, indent=1), kept=True)


def bound(folder: Path) -> str | None:
    """Of which step checksums are; None where they do not say it. Raises as `read`."""
    return _read(folder)[1]


def read(folder: Path) -> dict[str, str]:
    """Raises FileNotFoundError where there is none, ValueError where it is no such file."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[dict[str, str], str | None]:
    if what := regular.kind(folder / NAME):
        raise ValueError(f"it is {what}")  # which has no end
    text = (folder / NAME).read_text(encoding="utf-8")
    try:
        said = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    files = said.get("files") if isinstance(said, dict) else None
    if not isinstance(files, dict) or said.get("algorithm") != ALGORITHM:
        raise ValueError(f"it holds no {ALGORITHM} of files")
    for name, value in files.items():
        if not isinstance(value, str) or not DIGEST.fullmatch(value) or name != Path(name).name:
            raise ValueError(f"it says `{name[:40]}` {str(value)[:40]}")
    if not isinstance(step := said.get("step"), str | None):
        raise ValueError(f"it says that its step is {str(step)[:40]}")
    return files, step


def damage(folder: Path, *, thorough: bool = True) -> Iterator[str]:
    """What is wrong with the files of a checkpoint, each in words. thorough: the shards too, which hold nearly all of it."""
    try:
        told, step = _read(folder)
    except FileNotFoundError:
        yield f"`{NAME}` is missing; if you trust the files: `{COMMAND} {folder}`"
        return
    except (OSError, ValueError) as err:
        yield f"`{NAME}` cannot be read: {err}"
        return
    if step not in (None, folder.absolute().name):
        yield f"it was saved as `{step[:40]}`"
    there = set(names(folder))
    yield from (f"`{name}` is missing" for name in sorted(told.keys() - there))
    yield from (f"`{name}` has no checksum" for name in sorted(filter(SHARD.fullmatch, there - told.keys())))
    chosen = [name for name in sorted(told.keys() & there) if thorough or not SHARD.fullmatch(name)]
    try:
        found = digests(folder, chosen)
    except OSError as err:
        yield f"`{Path(err.filename or folder).name}` cannot be read: {err.strerror}"
        return
    yield from (f"`{name}` is not what was saved: its checksum differs" for name in chosen if found[name] != told[name])


def command() -> int:
    words = sys.argv[1:]
    if len(words) != 1 or words[0] in ("-h", "--help"):
        print(__doc__)
        return OK
    folder = Path(words[0])
    if not (folder / ".metadata").is_file():
        raise Refused(f"`{folder}` is no checkpoint", hint="the folder of one step, `.../iter_0000100`")
    if (folder / NAME).exists():
        raise Refused(f"`{folder / NAME}` is there already", hint="take it away first if it is wrong")
    try:
        put(folder, digests(folder, names(folder)))
    except OSError as err:
        raise Refused(f"`{folder}`: {err.strerror}", hint="its files must be readable, the folder writable") from None
    print(f"{folder / NAME}: {len(read(folder))} files")
    return OK


if __name__ == "__main__":
    finish(command)
