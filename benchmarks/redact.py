"""CPU time of taking secrets out of a trainer's log: python benchmarks/redact.py > benchmarks/redact.json

Lines as they come, 200 at a time as a chatty trainer's do, and one by one; and lines of which each carries a secret.
"""

import json
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/launch")]

import shapes  # noqa: E402

from launch.record.redact import Redactor, Stream  # noqa: E402

MB = 20


def logs() -> dict[str, list[str]]:
    megatron = (ROOT / "tests/launch/megatron_0_19_cpu.log").read_text(encoding="utf-8").splitlines()
    step = next(line for line in reversed(megatron) if "iteration" in line)
    dice = random.Random(0)
    drawn = [shapes.drawn(dice).line for _ in range(2000)]
    return {
        "Megatron's log": [f"{line} {i}" for i in range(10**4) for line in megatron][: MB * 10_000],
        "steps": [step.replace("1", str(i % 10)) for i in range(MB * 2500)],
        "warnings": [
            f"/opt/x/{i}.py:{i}: UserWarning: the keyword token {i} is deprecated" for i in range(MB * 10_000)
        ],
        "a secret in each line": drawn,
    }


def seconds(lines: list[str], at_once: int) -> float:
    stream, begin = Stream(Redactor({f"A{i}_TOKEN": f"Xq7{'z' * i}value" for i in range(5)})), time.process_time()
    for at in range(0, len(lines), at_once):
        stream.lines(lines[at : at + at_once])
    return time.process_time() - begin


def main() -> None:
    found = {}
    for name, lines in logs().items():
        size = sum(len(line.encode()) + 1 for line in lines) / 1e6
        rates = [size / seconds(lines, at_once) for at_once in (200, 1)]
        found[name] = {
            "megabytes": round(size, 1),
            "megabytes_a_second": round(rates[0], 1),
            "one_by_one": round(rates[1], 1),
            "cpu_minutes_a_gigabyte": round(1000 / rates[0] / 60, 2),
        }
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
