"""Git's hash of the Python files in some folders, without git and without a repository."""

import hashlib
import marshal
import warnings
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from types import CodeType


def files(root: Path, *packages: str) -> list[Path]:
    """The Python files of packages (`a`, `a/b`), as paths below `root`; compiled files differ by platform and are left out."""
    found = (p.relative_to(root) for package in packages for p in (root / package).rglob("*.py"))
    return sorted(p for p in found if "__pycache__" not in p.parts)


def blobs(root: Path, *packages: str) -> dict[str, str]:
    """{path: the hash that git gives what the file holds}. Raises OSError where a file cannot be read."""
    return {path.as_posix(): _object("blob", (root / path).read_bytes()).hex() for path in files(root, *packages)}


def tree_hash(root: Path, *packages: str) -> str:
    """The hash that `git add PACKAGE/**/*.py; git write-tree` gives, in hex.

    Every file counts as not executable, so that an unpacked archive and a checkout agree.
    Raises OSError where a file cannot be read.
    """
    nested: dict = {}
    for path in files(root, *packages):
        *folders, name = path.parts
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = _object("blob", (root / path).read_bytes())
    return _tree(nested).hex()


def stale(root: Path, *packages: str) -> list[Path]:
    """The files that Python would run as they were: what it has compiled is older than a change that kept their size and time."""
    return [path for path in files(root, *packages) if _outlived(root / path)]


def _outlived(path: Path) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            made, now = Path(cache_from_source(path)), path.stat()
            if now.st_ctime <= made.stat().st_mtime:  # no change since, of which alone the clock is the system's
                return False
            kept, stamp = made.read_bytes(), (now.st_mtime, now.st_size)
            its = MAGIC_NUMBER + bytes(4) + b"".join((int(n) & 0xFFFFFFFF).to_bytes(4, "little") for n in stamp)
            if kept[:16] != its:
                return False
            return _unplaced(marshal.loads(kept[16:])) != _unplaced(compile(path.read_bytes(), path, "exec", 0, True))
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, AttributeError):  # nothing that Python would take
        return False


def _unplaced(code: CodeType) -> CodeType:
    """Without its places in the source, of which PYTHONNODEBUGRANGES leaves columns out."""
    inner = (_unplaced(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=tuple(inner))


def _tree(node: dict) -> bytes:
    entries = []
    for name, child in node.items():
        folder = isinstance(child, dict)
        # Git sorts a folder as if its name ended in a slash.
        key = name.encode() + (b"/" if folder else b"")
        mode, digest = (b"40000", _tree(child)) if folder else (b"100644", child)
        entries.append((key, mode + b" " + name.encode() + b"\0" + digest))
    return _object("tree", b"".join(entry for _, entry in sorted(entries)))


def _object(kind: str, body: bytes) -> bytes:
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body, usedforsecurity=False).digest()
