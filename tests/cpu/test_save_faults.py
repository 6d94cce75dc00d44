"""Faults while a real trainer saves: a kill, a signal, an error or a full disk at what it asks of the system below its checkpoints.

    python tests/cpu/test_save_faults.py [count=200] [seed=0] > benchmarks/faults.json

draws more of them than the tests do, and says how each ended. Whatever happens, the newest step that the tracker names is whole, no run
that failed ends with 0, and the next run goes on from it.
"""

import json
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent)]  # as a program

import inject  # noqa: E402
import pytest  # noqa: E402
from test_train import logged, run  # noqa: E402

from nam_megatron.runtime import checkpoint  # noqa: E402
from nam_megatron.tracker import TRACKER  # noqa: E402

STEPS = ("schedule.train_steps=4", "schedule.decay_steps=4", "schedule.save_interval=1", "cluster=h200_1")
MOST = 60  # calls below the folder in four saves
# Of the bytes of a file: what a disk has left when it is full. A step's shard has more.
SIZES = (0, 100, 5_000, 200_000)


def drawn(count: int, seed: int) -> list[str]:
    """Faults, each told by its words; `3:EIO:os.rename` is the third rename."""
    of = [f"{number}:{fault}" for number in range(1, MOST + 1) for fault in ("SIGKILL", "SIGTERM", *inject.ERRORS)]
    of += [f"{number}:{fault}:os.rename" for number in range(1, 12) for fault in ("EIO", "SIGKILL")]
    of += [f"{size}:full" for size in SIZES] * 2
    random.Random(seed).shuffle(of)
    return of[:count]


def planted(where: str, below: Path) -> None:
    number, fault, *calls = where.split(":")
    if fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), int(number)))
    else:
        inject.at_call(int(number), fault, below, tuple(calls) or inject.CALLS)


def saving(at: Path, *more: str) -> tuple[str, ...]:
    return (*STEPS, f"schedule.save={at}/ckpt", *more)


def newest(at: Path) -> int:
    """The step that the tracker names, which is whole; 0: none was saved."""
    if not (at / "ckpt" / TRACKER).exists():
        return 0
    assert [problem.message for problem in checkpoint.damage(at / "ckpt")] == []
    return int((at / "ckpt" / TRACKER).read_text())


def tried(at: Path, where: str, *more: str) -> str:
    """How a run with this fault ended. Raises AssertionError where that must not be."""
    at.mkdir()
    (rank,) = run(at, *saving(at, *more), before=partial(planted, where, at / "ckpt"))
    reached, steps = newest(at), len(logged([rank]))
    if rank.code == 0:
        assert reached >= steps, f"ended with 0 after {steps} steps, and saved {reached}"
    return f"{'done' if rank.code == 0 else 'failed'}, a whole step {'' if reached else 'or none '}saved"


@pytest.mark.few(1)
@pytest.mark.parametrize("where", drawn(8, 1))
def test_whatever_befalls_a_save_the_newest_step_is_whole(tmp_path, where):
    tried(tmp_path / "run", where)


@pytest.mark.slow
def test_the_next_run_goes_on_from_it(tmp_path):
    """After a kill in a save, of which a part lies there. Of a process Megatron logs the second loss as the mean of two."""
    norm = "grad norm"
    whole = logged(run(tmp_path, *saving(tmp_path / "whole")), norm)
    tried(tmp_path / "run", "7:SIGKILL:os.rename")
    reached = newest(tmp_path / "run")
    assert 0 < reached < 4
    (rank,) = run(tmp_path, *saving(tmp_path / "run", f"schedule.load={tmp_path}/run/ckpt"))
    assert rank.code == 0, rank.err[-2000:]
    assert logged([rank], norm) == whole[reached:] and newest(tmp_path / "run") == 4


@pytest.mark.slow
def test_the_tracker_names_a_step_whatever_befalls_its_writing(tmp_path):
    """Emptied first, it would name none: of a kill in between, or a disk that is full then."""
    kill = partial(inject.at_call, 2, "SIGKILL", tmp_path / "ckpt" / f".{TRACKER}", ("os.rename",))
    (rank,) = run(tmp_path, *saving(tmp_path), before=kill)
    assert rank.code == -signal.SIGKILL and newest(tmp_path) == 1


def main(words: list[str]) -> int:
    options = {k: int(v) for k, _, v in (w.partition("=") for w in words)}
    seen: Counter[tuple[str, str]] = Counter()
    for where in drawn(options.get("count", 1 << 20), options.get("seed", 0)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                end = tried(Path(folder) / "run", where)
            except AssertionError as wrong:
                end = "wrong"
                print(f"{where}: {wrong}", file=sys.stderr, flush=True)
        seen[where.split(":")[1], end] += 1
    said: dict[str, dict[str, int]] = {}
    for (fault, end), times in sorted(seen.items()):
        said.setdefault(fault, {})[end] = times
    print(
        json.dumps(
            {**options, "wrong": sum(times for (_, end), times in seen.items() if end == "wrong"), "ends": said},
            indent=1,
        )
    )
    return 1 if any(end == "wrong" for _, end in seen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
