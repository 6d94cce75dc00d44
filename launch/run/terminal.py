"""The log as a person sees it: every line, and on a terminal a bar below."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.record import events
from launch.record.steps import LOSS, NORM


class Terminal:
    """Lines go to stdout as they are. A stdout that is closed (`| head`) or gone stops nobody's training."""

    def __init__(self, total: int, folder: Path, nonce: str):
        """folder, nonce: of the run, whose events the bar follows."""
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
        text = "\n".join(said)
        with contextlib.suppress(OSError):
            if self._bar is None:
                print(text, flush=True)
                return
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


def printable(text: str) -> str:
    """One line that moves no cursor: a receipt may be anybody's."""
    return "".join(c if c.isprintable() else " " if c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
