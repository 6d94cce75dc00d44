"""Which test of GPUs passed on one, when, at which commit, and what has changed since of the code that it tests.

    python tests/gpu/passes.py              the list, a line a file
    python tests/gpu/passes.py FILE ...     take in what was written on other hosts, and show it

Exit code 1: some test never passed, or its pass is older than the code that it tests.

`pytest -m gpu tests/gpu` writes `passes.json` where it finds a GPU, and shows the list where it finds none. $NAM_GPU_PASSES is another file
for it, $NAM_REVISION the commit where there is no .git. What a test file tests are the folders of the modules that it names; where it
starts programs of ours, all of nam_megatron.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = HERE / "passes.json"
STARTS = {"trained", "test_whole_step", "nam_megatron.prove", "nam_megatron.recipe"}  # what runs a whole model

Runs = list[dict[str, Any]]  # revision, date, device, gpus, passed: ids of tests, without the folder


def read(path: Path = RECORD) -> Runs:
    found: Runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def newest(runs: Iterable[dict[str, Any]]) -> Runs:
    """Of each test the newest run that it passed in."""
    seen: set[str] = set()
    kept = []
    for run in sorted(runs, key=lambda run: str(run["date"]), reverse=True):
        if passed := sorted(set(run["passed"]) - seen):
            kept.append(run | {"passed": passed})
            seen.update(passed)
    return kept


def write(runs: Runs, path: Path) -> None:
    path.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def run_of(passed: Iterable[str], device: str, gpus: int) -> dict[str, Any]:
    revision = os.environ.get("NAM_REVISION") or git("rev-parse", "HEAD").strip()
    return {
        "revision": revision,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "device": device,
        "gpus": gpus,
        "passed": sorted(passed),
    }


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def tested(file: Path) -> list[str]:
    """Folders and files whose changes make a pass of this file old."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in named if node.module} | {f"{n.module}.{a.name}" for n in named for a in n.names}
    if any(module == start or module.startswith(f"{start}.") for module in modules for start in STARTS):
        return ["nam_megatron"]
    places = {str(Path(*module.split(".")[:-1])) for module in modules if module.startswith("nam_megatron.blocks.")}
    places |= {f"{Path(*module.split('.'))}.py" for module in modules if module.startswith("nam_megatron.")}
    return sorted(place for place in places if (ROOT / place).exists() and place != "nam_megatron/blocks")


def files(runs: Runs, there: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Of each file: how many of its tests have passed, the oldest of those runs, and how many commits since have changed what it tests;
    whether all have passed with the code that is here."""
    by_file: dict[str, list[str]] = {}
    for test in there:
        by_file.setdefault(test.split("::")[0], []).append(test)
    when = {test: run for run in runs for test in run["passed"]}
    for file, tests in sorted(by_file.items()):
        passed = [when[test] for test in tests if test in when]
        line, changed = f"{file:26} {len(passed):3} of {len(tests):3} on record", ""
        if passed:
            oldest = min(passed, key=lambda run: str(run["date"]))
            changed = changes(oldest["revision"], tested(HERE / file))
            line += f", since {oldest['date']} ({oldest['revision'][:7]}); {changed or 'nothing it tests has changed'}"
        yield line, len(passed) == len(tests) and not changed


def changes(revision: str, places: Iterable[str]) -> str:
    """How many commits have changed these since."""
    if not git("rev-parse", "-q", "--verify", f"{revision}^{{commit}}"):
        return "this repository does not know that commit"
    since = git("log", "--format=%h", f"{revision}..HEAD", "--", *places).split()
    return f"{len(since)} commits have changed what it tests" if since else ""


def collected() -> list[str]:
    """Every case of tests/gpu."""
    words = [sys.executable, "-m", "pytest", "--co", "-m", "gpu", "-p", "no:cacheprovider", str(HERE)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:  # what is not there would leave the record
        sys.exit(f"error: the tests were not collected, and nothing was written:\n{(ran.stdout + ran.stderr)[-1000:]}")
    tests = [line for line in ran.stdout.splitlines() if line.startswith("tests/gpu/") and "::" in line]
    return [test.removeprefix("tests/gpu/") for test in tests]


if __name__ == "__main__":
    there = collected()
    found = [run for path in map(Path, sys.argv[1:]) for run in read(path)]
    if found:
        runs = newest([*found, *read()])
        write([run | {"passed": [test for test in run["passed"] if test in there]} for run in runs], RECORD)
    rows = list(files(read(), there))
    print("\n".join(line for line, _ in rows))
    sys.exit(not all(current for _, current in rows))
