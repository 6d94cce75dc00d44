"""One folder a run: the receipt, the plan, the log. The receipt is the record; it is written whole, or not at all.

    <receipts>/<run>/receipt.json   open from before the run until it is sealed; redacted, may be published
    <receipts>/<run>/plan.json log.txt diff.patch nccl.*   what the run was given and said; not redacted but for secrets
    <receipts>/<run>/lock           held by the launcher as long as it lives: an open receipt that nobody holds is a lost run
    <receipts>/<run>/reserve        room kept back, given up to seal the receipt on a full disk

A sealed receipt carries the SHA-256 of its own content: `seal`.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.redact import Redactor
from nam_megatron.errors import Problem, Refused

SCHEMA = "nam_megatron.receipt/1"
FILE, LOCK, RESERVE, LOG, PLAN, DIFF = "receipt.json", "lock", "reserve", "log.txt", "plan.json", "diff.patch"
RESERVED = 4 << 20  # bytes
STATES = ("open", "sealed")
ENDS = ("completed", "failed", "refused", "interrupted", "lost")
# Written as they are: they name no machine, and readers depend on them.
OURS = ("schema", "run", "opened", "state", "lineage")


@dataclass
class Receipt:
    """A receipt that is being written. `content` is redacted on the way to the disk."""

    folder: Path
    content: dict[str, Any]
    redactor: Redactor
    _lock: int = field(repr=False)

    def record(self, **fields: Any) -> None:
        """Add fields and write the receipt, still open. Raises Refused where it cannot be written."""
        self.content |= fields
        write(self.folder, self._redacted())

    def seal(self, end: str, outcome: Mapping[str, Any]) -> None:
        """Close the receipt for good. Raises Refused where it cannot be written."""
        (self.folder / RESERVE).unlink(missing_ok=True)
        write(self.folder, sealed(self._redacted(), end, self.redactor.tree(plain(outcome))))
        os.close(self._lock)

    def _redacted(self) -> dict[str, Any]:
        return {k: plain(v) if k in OURS else self.redactor.tree(plain(v)) for k, v in self.content.items()}


def open_receipt(root: Path, preset: str, content: Mapping[str, Any], redactor: Redactor) -> Receipt:
    """A new folder below `root` with an open receipt, held by this process.

    Raises:
        Refused: the folder cannot be made, the disk is full.
    """
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{preset}-{secrets.token_hex(3)}"
    folder = root / run
    try:
        with writing(root):
            folder.mkdir(parents=True)
            # In this order: whoever finds a receipt finds its lock held and its room reserved.
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with open(folder / RESERVE, "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVED)
        head = {"schema": SCHEMA, "run": run, "opened": stamp(now), "state": "open"}
        receipt = Receipt(folder, {**head, **content}, redactor, lock)
        receipt.record()
        with writing(root):
            _synced(root)
    except Refused:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return receipt


def sealed(content: Mapping[str, Any], end: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    assert end in ENDS, end
    closed = stamp(datetime.now(UTC))
    body = {**content, "state": "sealed", "closed": closed, "outcome": {**outcome, "end": end}}
    return body | {"seal": digest(body)}


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over everything but the seal."""
    body = {k: v for k, v in content.items() if k != "seal"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A receipt from its folder or file.

    Raises:
        Refused: no receipt, another schema, or a sealed one that was changed since.
    """
    path = path / FILE if path.is_dir() else path
    hint = "name a folder or file that `launch run` wrote"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        why = err.strerror if isinstance(err, OSError) else err
        raise Refused(Problem(f"`{path}` is no receipt: {why}", None, hint)) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise Refused(Problem(f"`{path}` is no receipt of schema `{SCHEMA}`", None, hint))
    if content.get("state") not in STATES or not isinstance(content.get("run"), str):
        raise Refused(Problem(f"`{path}` is a damaged receipt", None, hint))
    if content["state"] == "sealed" and content.get("seal") != digest(content):
        raise Refused(
            Problem(f"`{path}` was changed after it was sealed", None, "a receipt that was edited is no receipt")
        )
    return content


def folders(root: Path) -> list[Path]:
    """Folders of receipts below `root`, the oldest first."""
    return sorted(p.parent for p in root.glob(f"*/{FILE}"))


def seal_lost(root: Path, summary: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]) -> list[str]:
    """Seal the open receipts whose launcher is gone; returns their names. Those of live launchers stay as they are.

    summary: what came of a run, from its folder and its receipt.
    """
    gone = []
    for folder in folders(root):
        with contextlib.suppress(Refused, OSError):  # one damaged or foreign receipt must not hide the others
            if read(folder)["state"] == "open" and (lock := _taken(folder)) is not None:
                try:
                    content = read(folder)  # again: its launcher may have sealed it in between
                    if content["state"] == "open":
                        (folder / RESERVE).unlink(missing_ok=True)
                        outcome = Redactor(os.environ).tree(plain(summary(folder, content)))
                        write(folder, sealed(content, "lost", outcome))
                        gone.append(content["run"])
                finally:
                    os.close(lock)
    return gone


def _taken(folder: Path) -> int | None:
    """The folder's lock, taken; None while its launcher lives."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace the receipt in one step, on the disk before this returns. Raises Refused."""
    with writing(folder):
        new = folder / f".{FILE}"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=True, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / FILE)
        _synced(folder)


def _synced(folder: Path) -> None:
    """The names in `folder` are on the disk."""
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)


@contextlib.contextmanager
def writing(where: Path, key: str = "cluster.storage.receipts") -> Iterator[None]:
    """What the system objects to, as a refusal that names the folder."""
    try:
        yield
    except OSError as err:
        raise Refused(unwritable(where, err, key)) from None


def unwritable(where: Path, err: OSError, key: str) -> Problem:
    full = err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    said = "the disk is full" if full else err.strerror
    hint = "make room there" if full else f"name a folder you may write to: `{key}=DIR`"
    return Problem(f"cannot write to `{where}`: {said}", key, hint)


def plain(node: Any) -> Any:
    """JSON's own types; NaN and infinity as words."""
    if isinstance(node, Mapping):
        return {str(k): plain(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(v) for v in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def stamp(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"
