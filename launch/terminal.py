"""The log as a person sees it: every line, and on a terminal a bar below."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from launch.steps import LOSS, NORM, Step, parse


class Terminal:
    """Lines go to stdout as they are. A stdout that is closed (`| head`) or gone stops nobody's training."""

    def __init__(self, total: int):
        self._bar: Any = None
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
            if step := next((s for s in map(parse, reversed(said)) if isinstance(s, Step)), None):
                said = f"{step.ms:,.0f} ms" if step.ms else ""
                for title, name in (("loss", LOSS), ("norm", NORM)):
                    said += f"  {title} {step.values[name]:.4g}" if name in step.values else ""
                self._bar.update(self._task, completed=step.number, total=step.total, description=said)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
