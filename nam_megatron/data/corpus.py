"""C++ and CUDA code that installed packages carry, as JSONL: real text for tests and examples where nothing can be fetched."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from nam_megatron.errors import Problem, Refused

SUFFIXES = (".h", ".hh", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu", ".inl")


def write(out: Path, packages: Sequence[str]) -> dict[str, int]:
    """Write each file once, in the order of packages and paths; rows `{text, path, package}`. Returns what was left out, counted.

    Raises:
        Refused: `out` exists; a package that is not installed, or has no such file.
    """
    if out.exists():
        raise Refused(_taken(out))
    files = [(package, name, path) for package in packages for name, path in _files(package)]
    seen: set[str] = set()
    counts = {"documents": 0, "bytes": 0, "duplicates": 0, "empty": 0, "not UTF-8": 0}
    if not out.parent.is_dir():
        raise Refused(f"no folder `{out.parent}`", hint="make it first")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8") as stream:
            for package, name, path in files:
                try:
                    text = path.read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    counts["not UTF-8"] += 1
                    continue
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest in seen or not text.strip():
                    counts["duplicates" if digest in seen else "empty"] += 1
                    continue
                seen.add(digest)
                row = {"text": text, "path": name, "package": f"{package} {metadata.version(package)}"}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                counts["documents"] += 1
                counts["bytes"] += len(text.encode())
        out.hardlink_to(part)  # which, unlike a rename, replaces nothing that somebody else has written meanwhile
    except FileExistsError:
        raise Refused(_taken(out)) from None
    finally:
        part.unlink(missing_ok=True)
    return counts


def _taken(out: Path) -> Problem:
    return Problem(f"`{out}` exists", hint="name another file")


def _files(package: str) -> Iterator[tuple[str, Path]]:
    try:
        recorded = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise Refused(f"`{package}` is not installed here") from None
    files = sorted((str(f), Path(str(f.locate()))) for f in recorded if f.suffix in SUFFIXES)
    if not files:
        raise Refused(f"`{package}` has no C++ file ({', '.join(SUFFIXES)})")
    return ((name, path) for name, path in files if path.is_file())
