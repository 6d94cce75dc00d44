"""C++ and CUDA code that installed packages carry, as JSONL: real text for tests and examples where nothing can be fetched."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from nam_megatron.errors import Problem, Refused

SUFFIXES = (".h", ".hh", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu", ".inl")


def write(out: Path, packages: Sequence[str]) -> dict[str, int]:
    """Write each file once, in the order of packages and paths; rows `{text, path, package}`. Returns what was left out, counted.

    Raises:
        Refused: a package that is not installed, or has no such file.
    """
    seen: set[str] = set()
    counts = {"documents": 0, "bytes": 0, "duplicates": 0, "empty": 0, "not UTF-8": 0}
    part = out.with_name(f"{out.name}.part")
    with part.open("w", encoding="utf-8") as stream:
        for package in packages:
            for name, path in _files(package):
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
    part.replace(out)
    return counts


def _files(package: str) -> Iterator[tuple[str, Path]]:
    try:
        recorded = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise Refused(Problem(f"`{package}` is not installed here")) from None
    files = sorted((str(f), Path(str(f.locate()))) for f in recorded if f.suffix in SUFFIXES)
    if not files:
        raise Refused(Problem(f"`{package}` has no C++ file ({', '.join(SUFFIXES)})"))
    return ((name, path) for name, path in files if path.is_file())
