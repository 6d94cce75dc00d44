"""What a run says of itself to programs: `events.jsonl` beside its plan, one JSON object a line, written whole and at once.

    {"run": NONCE, "rank": 3, "pid": 17, "n": 4, "at": 1790000000.5, "event": "step", "step": 12, ...}

A launcher draws the nonce of a run, makes the file and hands the nonce down in the environment; without one nothing is written. `n`
counts what a process has said, so a reader sees that a line is missing; an empty line says nothing. The hosts of a job have a file
each, `events.<host number>.jsonl`, since appends of several hosts to one file are not safe on every file system.

    launched, over    the launcher (rank null): before the trainer is started, and once it has ended (code)
    start             every rank: trainer, world, the host's number, and hashes of its code and its plan; a process that is started again
                      says it again
    built, memory     every rank: bytes of its GPU, once the model is there (its GPU, its code), after steps 1, 2, 4, 8, ... and the last
    mends             rank 0: stood, what stands in the place of others' functions, each with its hash (nam_megatron/mends)
    loaded            rank 0: step, of the checkpoint that it begins with, 0 of weights alone; sha256, of its checksums. 0 and null:
                      random weights
    step              the last rank, which has the loss: a line of the log in numbers, see nam_megatron/runtime/record.py
    saving, scheduled, saved
                      rank 0: step, of a checkpoint; `scheduled`: it goes on behind the training until it is `saved`
    end               every rank: reason (of REASONS), code, step (the last one done), and what is known of the error

NaN and infinity are the texts "nan", "inf" and "-inf".
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nam_megatron.words import whole
from nam_megatron.words.tree import tree_hash

PACKAGE = Path(__file__).parent  # whose modules this process imports
NONCE = "NAM_MEGATRON_RUN"  # the variable of the environment
FILE = "events.jsonl"
HOST, HOSTS = "GROUP_RANK", "GROUP_WORLD_SIZE"  # torchrun's
REASONS = (
    "done", "signal", "planned stop", "not a number", "unfit data", "wrong result", "out of memory", "full disk", "refused", "not built",
    "gave up", "error",
)  # fmt: skip
NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
LITTLE = 1 << 20  # bytes that a disk may have left when a file did not fit


class Record:
    """The events of one process. A line that cannot be written is said on stderr once, and missed by whoever counts."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._head: dict[str, Any] = {}
        self._said, self._failed, self._ended = 0, False, False
        self.done: int | None = None  # steps
        self.leaving = "error"  # why a SystemExit leaves
        self.saves: str | None = None  # where checkpoints go

    def open(self, folder: Path, nonce: str, rank: int | None, host: int | None = None) -> None:
        """host: its number, of a job of several. Raises OSError."""
        name = FILE if host is None else f"events.{host}.jsonl"
        self._file = os.open(folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # as long as it lives: nobody seals what it may add to
            fcntl.flock(self._file, fcntl.LOCK_SH)
        self._head = {"run": nonce, "rank": rank, "pid": os.getpid()}

    def start(self, plan: Path, environ: Mapping[str, str], trainer: str) -> None:
        """Of a training process; where no launcher has drawn a nonce nothing will be written. Raises OSError."""
        if not (nonce := environ.get(NONCE)):
            return
        host = int(environ.get(HOST, 0))
        several = int(environ.get(HOSTS, 1)) > 1
        self.open(plan.absolute().parent, nonce, int(environ.get("RANK", 0)), host if several else None)
        made_of = {"source": source(), "plan": digest(plan)}
        self.say("start", trainer=trainer, world=int(environ.get("WORLD_SIZE", 1)), host=host, **made_of)

    @property
    def on(self) -> bool:
        """Whether anything is written, by this process and not by one that was forked off it."""
        return self._file is not None and self._head["pid"] == os.getpid()

    def say(self, event: str, **facts: Any) -> None:
        """One event, in one write."""
        if not self.on or self._file is None:
            return
        self._said += 1
        assert not facts.keys() & {*self._head, "n", "at"}, "its own words"
        line = self._head | {"n": self._said, "at": time.time(), "event": event} | _plain(facts)
        try:
            raw = ("\n" * self._torn(self._file) + json.dumps(line, allow_nan=False) + "\n").encode()
            why = "the disk is full" if os.write(self._file, raw) < len(raw) else None
        except OSError as err:
            why = err.strerror
        if why and not self._failed:
            self._failed = True
            print(f"error: `{FILE}` cannot be written: {why}; the receipt will say so", file=sys.stderr, flush=True)

    @staticmethod
    def _torn(file: int) -> bool:
        """Whether somebody's last line is not whole, as one looks that is being written: ours would be lost with it."""
        size = os.lseek(file, 0, os.SEEK_END)
        return size > 0 and os.pread(file, 1, size - 1) != b"\n"

    def end(self, reason: str, code: int | None, **more: Any) -> None:
        """How this process ends; what is said first stands."""
        assert reason in REASONS, reason
        if self.on and not self._ended:
            self._ended = True
            self.say("end", reason=reason, code=code, step=self.done, **more)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Say an end for whatever leaves here, unless it was said where more is known of it."""
        try:
            yield
        except SystemExit as left:
            self.end(
                self.leaving, int(left.code if isinstance(left.code, int) else bool(left.code)), error="SystemExit"
            )
            raise
        except BaseException as err:
            self.end("full disk" if self._full(err) else "error", 1, error=type(err).__name__)
            raise
        self.end("done", 0)

    def _full(self, err: BaseException) -> bool:
        """Whether a checkpoint found no room. Of what its writers met Megatron often tells nothing, so the disk is asked as well."""
        said = any(text in str(err) for text in NO_ROOM)
        saving = type(err).__name__ == "CheckpointException"
        if self.saves is None or not (saving or (said and isinstance(err, OSError))):
            return False
        if said and (saving or any(f"'{self.saves.rstrip('/')}{end}" in str(err) for end in "'/")):
            return True
        try:
            return shutil.disk_usage(self.saves).free < LITTLE
        except OSError:
            return False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def source() -> str:
    """The hash of the code of this package, as it lies there. Raises OSError."""
    return tree_hash(PACKAGE.parent, PACKAGE.name)


def digest(path: Path) -> str | None:
    """SHA-256 of a file; None where there is none: a pipe would be waited for."""
    return whole.digest(path) if path.is_file() else None


def early(code: object, done: int, signalled: bool, every: int | None) -> str:
    """Why Megatron's training loop has left by itself, with that exit code. every: steps after which it is to; signalled: this rank."""
    if code:
        return "wrong result" if code in (16, 17) else "error"
    if code is None:
        return "gave up"
    return "planned stop" if not signalled and every and done % every == 0 else "signal"


# Of this process.
RECORD = Record()
