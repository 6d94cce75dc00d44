"""The record of a kernel benchmark: printed line by line, and kept in a file that is whole after each of them."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class Report:
    """Prints each result as it comes and keeps the file up to date. seconds: nothing new is attempted after them."""

    def __init__(self, path: Path | None, seconds: float):
        self.path, self.until = path, time.monotonic() + seconds
        self.data: dict = {"host": {}, "checks": [], "rows": [], "sweep": [], "failed": []}

    def add(self, part: str, **entry) -> None:
        self.data[part].append(entry)
        name, *rest = entry.items()
        words = [f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in rest]
        print(f"{part[:6]:6} {name[1]:54}", *words, flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def check(self, name: str, ours: float, limit: float, reference: float | None = None) -> None:
        verdict = "PASS" if ours <= limit else "FAIL"  # NaN fails
        more = {} if reference is None else {"reference": reference}
        self.add("checks", name=name, ours=ours, **more, limit=limit, verdict=verdict)

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """A failure is printed and the rest goes on."""
        if time.monotonic() > self.until:
            self.add("failed", name=name, why="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add("failed", name=name, why=f"{type(error).__name__}: {str(error)[:300]}")
            print(*traceback.format_exc().strip().splitlines()[-6:], sep="\n", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
