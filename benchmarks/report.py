"""The record of a kernel benchmark: printed line by line, and kept in a file that is whole after each of them.

The file is a list of runs. A run comes behind those that the file has; what it holds was measured on one GPU with one installation.
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

import torch

GRACE = 30.0  # seconds for what runs when the time is up, before it is killed
PACKAGES = "torch", "triton", "megatron-core", "transformer-engine", "mamba-ssm"
PACKAGES += "tilelang", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "sgl-flash-mla", "flash-attn-4"


class Report:
    """Prints each result as it comes and keeps the file up to date. seconds: nothing new is attempted after them."""

    def __init__(self, path: Path | None, seconds: float):
        self.path, self.until = path, time.monotonic() + seconds
        self.data: dict = {"host": {}, "checks": [], "rows": [], "sweep": [], "failed": []}
        found = json.loads(path.read_text()) if path and path.exists() else []
        self.earlier = found if isinstance(found, list) else [found]  # a file used to be one run

    def host(self, **more: object) -> None:
        """What is measured, and on what. more: sizes that hold for every row."""
        if not torch.cuda.is_available():
            raise SystemExit("error: this measures a GPU, and torch sees none")
        self.data["host"] = {"gpu": torch.cuda.get_device_name()}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                self.data["host"][name] = version(name)
        self.data["host"] |= more
        print(short(self.data["host"]), flush=True)
        self.save()

    def keep(self, part: str, /, **entry) -> None:
        self.data.setdefault(part, []).append(entry)
        self.save()

    def save(self) -> None:
        if self.path:
            new = self.path.with_name(f"{self.path.name}.new")  # a kill in the middle of writing leaves the old file
            new.write_text(json.dumps([*self.earlier, self.data], indent=1) + "\n")
            new.replace(self.path)

    def add(self, part: str, /, **entry) -> None:
        name, *rest = entry.items()
        words = [f"{k}={short(v)}" for k, v in rest]
        print(f"{part[:6]:6} {name[1]:54}", *words, flush=True)
        self.keep(part, **entry)

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

    def sound(self, name: str, check: Callable[[], object]) -> bool:
        """Whether all passes that `check` checks: what is wrong is not timed."""
        first = len(self.data["checks"])
        check()
        bad = [c["name"] for c in self.data["checks"][first:] if c["verdict"] != "PASS"]
        if bad:
            self.add("failed", name=name, why=f"not timed: {', '.join(bad)} failed")
        return not bad

    def judged(self, name: str, check: Callable[[], object], measure: Callable[[], object]) -> None:
        """Attempt to check, and to time what passed."""

        def work() -> None:
            if self.sound(name, check):
                measure()

        self.attempt(name, work)

    def apart(self, name: str, work: Callable[[], object]) -> None:
        """`attempt` in a process of its own, so that a crash or an illegal address ends nothing else.

        The process is a fork and reports through the file; the GPU must not have been used before, nor be used here.
        """
        assert self.path and not torch.cuda.is_initialized()
        self.save()
        if time.monotonic() > self.until:
            self.add("failed", name=name, why="no time left")
            return
        process = get_context("fork").Process(target=self.attempt, args=(name, work))
        process.start()
        process.join(self.until + GRACE - time.monotonic())
        if process.is_alive():
            process.kill()
            process.join()
        self.data = json.loads(self.path.read_text())[-1]
        if process.exitcode:
            self.add("failed", name=name, why=f"its process ended with {process.exitcode}")

    def end(self) -> int:
        """Prints what went wrong; the exit code."""
        bad = [c["name"] for c in self.data["checks"] if c["verdict"] != "PASS"]
        print(
            f"{len(self.data['checks'])} checks, {len(bad)} failed: {bad}; {len(self.data['failed'])} not run",
            flush=True,
        )
        return 1 if bad or self.data["failed"] else 0


def parser(
    doc: str | None, seconds: float, sweep: str = "", quick: str = "", apart: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks have: where results go, when to stop; sweep, quick: what these two would do. apart: its parts are
    processes of their own, which report through the file."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--out", type=Path, required=apart, help="file of results; a run is added to those that it has")
    made.add_argument(
        "--seconds", type=float, default=seconds, help="nothing new is begun after them (default: %(default)s)"
    )
    for name, what in (("--sweep", sweep), ("--quick", quick)):
        if what:
            made.add_argument(name, action="store_true", help=what)
    return made


def short(value: object) -> str:
    """Three digits, or all before the point of a time in microseconds; what has names, with them."""
    if isinstance(value, dict):
        return " ".join(f"{key} {short(each)}" for key, each in value.items())
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
