"""The log as a person sees it: every line, on a CPU without what says nothing there, and on a terminal a bar below."""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.record import events
from launch.record.receipt import LOG
from launch.record.steps import LOSS, NORM, STEP

ARGUMENTS = re.compile(r"-+ (end of )?arguments -+$")
# What Megatron, torch and our trainer say of GPUs and of packages that only GPUs use, and of their own clocks.
OF_NO_CPU = re.compile(
    r"(Apex (is|are) not installed|Only transformer-engine>=|No CUDA runtime is found|within GPU RNG context|'pin_memory' argument"
    r"|one_logger package|SyntaxWarning: invalid escape|MimoModelConfig is experimental|Flight recorder|TORCH_NCCL_TRACE_BUFFER_SIZE is"
    r"|path_to_cache is None|[Rr]erun_?[Ss]tate_?[Mm]achine|Theoretical memory footprints|\(after \d+ iterations\) memory"
    r"|^nam_megatron\.readings |^> mends: |^\[[a-z][a-z_, -]+\] datetime: )"
)


class Quiet:
    """Lines of a run on a CPU without those that say nothing there; a step's line without its figures of a GPU. held: how many."""

    def __init__(self) -> None:
        self.held, self._table, self._under = 0, False, False

    def __call__(self, said: Sequence[str]) -> Iterator[str]:
        for line in said:
            if edge := ARGUMENTS.match(line):
                self._table = not edge[1]
            # Below a warning stands its line of source, indented.
            self._under = bool(edge or self._table or OF_NO_CPU.search(line) or (self._under and line.startswith("  ")))
            self.held += self._under
            if not self._under:
                yield " | ".join(p for p in line.split(" | ") if "/GPU" not in p) if STEP.search(line) else line


class Terminal:
    """Lines go to stdout as they are, or as Quiet has them. A stdout that is closed (`| head`) or gone stops nobody's training."""

    def __init__(self, total: int, folder: Path, nonce: str, quiet: bool = False):
        """folder, nonce: of the run, whose events the bar follows."""
        self._quiet, self._log = Quiet() if quiet else None, folder / LOG
        self._bar: Any = None
        self._newest = events.Newest(folder, nonce)
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            shown = TextColumn("{task.description}")
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown)
            self._bar = Progress(*columns, redirect_stdout=False, redirect_stderr=False)
            self._task = self._bar.add_task("starting", total=total)
            self._bar.start()

    def lines(self, said: Sequence[str]) -> None:
        said = [*self._quiet(said)] if self._quiet else said
        text = "\n".join(said)
        with contextlib.suppress(OSError):
            if self._bar is None:
                if said:
                    print(text, flush=True)
                return
            if said:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            if step := self._newest.step():
                about = f"{step.ms:,.0f} ms" if step.ms else ""
                for title, name in (("loss", LOSS), ("norm", NORM)):
                    about += f"  {title} {step.values[name]:.4g}" if name in step.values else ""
                self._bar.update(self._task, completed=step.number, total=step.total, description=about)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
        if self._quiet and self._quiet.held:
            sys.stderr.write(
                f"note: {self._quiet.held} lines are left out here (Megatron's arguments, what is about GPUs); all are in {self._log}\n"
            )


def printable(text: str) -> str:
    """One line that moves no cursor: a receipt may be anybody's."""
    return "".join(c if c.isprintable() else " " if c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
