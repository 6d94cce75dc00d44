"""Where each rank is, in a small file of its own that the launcher reads: a run that hangs says which rank, and in what.

Beats are written where a folder `beat` lies beside the plan: a launcher that will read them makes it, and without one nothing is written.

    beat/<rank>    {"rank": 3, "host": "n1", "pid": 17, "phase": "step", "step": 12, "micro": 96, "spent": 0.41, "at": 1790000000.5,
                    "nth": 3, "born": 5021}

phase: start (the plan is accepted), built (model and optimizer are there), step (a microbatch was begun), end. step: the one under way,
from 1. nth: which one that is of this process, from 1. micro: microbatches begun. spent: seconds of a microbatch on this rank alone, from
its beginning until its loss was looked at, over the last ones; waiting for other ranks is not in it. None where it cannot be known. at:
seconds since the epoch. born: when the process began, in ticks since the host did: a process id may be given again.
"""

import json
import os
import time
from pathlib import Path

FOLDER = "beat"
EVERY = 0.5  # seconds between two writes, at least
LAST = 16  # microbatches that `spent` remembers, about


class Heart:
    """Beats of this process. Costs two looks at a clock in a microbatch; a file that cannot be written stops nothing."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._phase, self._step, self._micro, self._nth = "start", 0, 0, 0
        self._spent: float | None = None
        self._begun: float | None = None
        self._written = 0.0
        self._born: int | None = None

    def start(self, plan: Path, rank: int) -> None:
        """plan: the plan file; beats lie beside it."""
        folder = plan.absolute().parent / FOLDER
        if folder.is_dir():
            self._file = folder / str(rank)
            said = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
            self._born = int(said.rpartition(")")[2].split()[19])
            self._say("start")

    def built(self) -> None:
        self._say("built")

    def step(self, done: int, blind: bool = False) -> None:
        """A microbatch begins, after `done` steps; blind: all of a step, as a CUDA graph, and nobody waits for one of them."""
        self._micro, self._begun = self._micro + 1, time.monotonic()
        if blind:
            self._spent = None  # that of the eager steps would stand for good
        if done + 1 != self._step or self._begun - self._written >= EVERY:
            self._nth += done + 1 != self._step
            self._step = done + 1
            self._say("step")

    def looked(self) -> None:
        """This rank has waited for its device: what it did since the microbatch began was its own."""
        if self._begun is not None:
            took, self._begun = time.monotonic() - self._begun, None
            self._spent = took if self._spent is None else self._spent + (took - self._spent) / LAST

    def end(self) -> None:
        self._say("end")

    def _say(self, phase: str) -> None:
        self._phase, self._written = phase, time.monotonic()
        if self._file is None:
            return
        beat = {"rank": int(self._file.name), "host": os.uname().nodename, "pid": os.getpid(), "phase": phase}
        beat |= {
            "step": self._step,
            "micro": self._micro,
            "spent": self._spent,
            "at": time.time(),
            "nth": self._nth,
            "born": self._born,
        }
        part = self._file.with_name(f".{self._file.name}")
        try:
            part.write_text(json.dumps(beat), encoding="utf-8")
            part.replace(self._file)
        except OSError:
            self._file = None


HEART = Heart()
