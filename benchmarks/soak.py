"""A day of use in minutes: python benchmarks/soak.py minutes=10 [seed=0] [steps=100] > benchmarks/soak.json

One run on CPU ranks (a rehearsal: `cluster=cpu`, whose checkpoints cannot be written in the background) in pieces: each goes on from
the newest one with one rank or two, and is ended at a random moment by a kill of the launcher, a kill of a rank, or a signal to the
launcher; once its disk is full. Beside it the same run in one piece. Then: each step's loss is that run's, no checkpoint went back, and
the receipts are one chain, each sealed with an end that is true. Moments are counted in steps, so that a busy machine changes no
verdict. As root, for a disk of its own that can be full; elsewhere that is left out, and said.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch.host import linux  # noqa: E402
from launch.record import outcome, receipt, receipts  # noqa: E402
from nam_megatron.tracker import TRACKER  # noqa: E402

RELATIVE = 5e-3  # of a loss: gradients of two ranks are summed in another order, in bf16
WORDS = (
    "conf=nam56r_smoke", "cluster=cpu", "diagnostic=a soak", "schedule.global_batch_size=4", "schedule.micro_batch_size=2",
    "feature.distributed_optimizer.reshardable=true",
)  # fmt: skip
# What befalls a piece, and how its receipt may say that it ended where it came before the last step.
FAULTS = {
    "kill": ("lost",),
    "kill a rank": ("failed",),
    "SIGTERM": ("interrupted",),
    "SIGINT": ("interrupted",),
    "full": ("failed", "refused"),
}
DISK_MB = 3000
STILL = 1800  # seconds without a step or a word in which nothing is expected any more


def words(at: Path, steps: int, ranks: int, *more: str) -> list[str]:
    storage = [f"cluster.storage.{name}={at / name}" for name in ("receipts", "scratch")]
    return [
        sys.executable, "-m", "launch", "run", *WORDS, *storage, f"schedule.train_steps={steps}", f"cluster.gpus_per_node={ranks}",
        *more,
    ]  # fmt: skip


def saving(at: Path) -> tuple[str, ...]:
    ckpt = at / "disk" / "ckpt"
    load = (f"schedule.load={ckpt}",) if (ckpt / TRACKER).exists() else ()
    return f"schedule.save={ckpt}", *load, "schedule.save_interval=2"


def losses(root: Path) -> Iterator[tuple[int, float]]:
    """The losses of steps, as the events say them. Megatron's log has a process's second one as the mean of its first two."""
    for path in sorted(root.glob("2*/events*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            if '"event": "step"' in line and line.endswith("}"):
                said = json.loads(line)
                yield said["step"], said["loss"]


def of_run(at: Path, word: str = "") -> list[int]:
    """Processes with a folder, and a word, in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            said = path.read_bytes()
            if str(at).encode() in said and word.encode() in said and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def piece(at: Path, command: list[str], fault: str | None, dice: random.Random) -> dict[str, Any]:
    """Start a launcher, and end it some steps later, or before its first one. fault None: it may finish; `full`: its disk fills then."""
    root, said, ballast = at / "receipts", at / "said.txt", at / "disk" / "ballast"
    old, made = len(receipt.folders(root)), len(list(losses(root)))
    with said.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    begin = moved = time.monotonic()
    due, seen, came = dice.choice((-1, *range(9))), None, False  # -1: as soon as there is a receipt
    while process.poll() is None:
        time.sleep(0.2)
        now = len(list(losses(root))) - made, said.stat().st_size
        if now != seen:
            seen, moved = now, time.monotonic()
        there = len(receipt.folders(root)) > old and now[0] > due
        if fault and not came and there:
            time.sleep(dice.uniform(0, 3))
            came = True
            if fault == "full":
                free = shutil.disk_usage(at / "disk").free
                with ballast.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, free - 2**18))
            elif fault == "kill a rank":
                over = of_run(at, "nam_megatron.torchrun")
                ranks = [one.pid for one in linux.processes() if one.parent in over]
                came = bool(ranks)
                for rank in ranks[:1]:
                    os.kill(rank, signal.SIGKILL)
            else:
                process.send_signal({"kill": signal.SIGKILL}.get(fault) or getattr(signal, fault))
        if time.monotonic() - moved > STILL:
            process.kill()
            raise TimeoutError("a piece that does not end")
    while of_run(at):  # ranks that have to see yet that their launcher is gone
        time.sleep(0.2)
        if time.monotonic() - moved > 2 * STILL:
            raise TimeoutError(f"{of_run(at)} outlive their launcher")
    ballast.unlink(missing_ok=True)
    receipt.seal_lost(root, outcome.of_run)
    tracker = at / "disk" / "ckpt" / TRACKER
    return {
        "fault": fault if came else "none",
        "ranks": int(next(word for word in command if "gpus_per_node" in word).rpartition("=")[2]),
        "code": process.returncode,
        "end": [receipt.read(folder)["outcome"]["end"] for folder in receipt.folders(root)[old:]],
        "steps": len(list(losses(root))) - made,
        "seconds": round(time.monotonic() - begin, 1),
        "saved": int(tracker.read_text()) if tracker.exists() else 0,
    }


def soak(at: Path, minutes: float, steps: int, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    whole, cut = at / "whole", at / "cut"
    for folder in (whole, cut / "disk"):
        folder.mkdir(parents=True)
    own_disk = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(cut / "disk")], check=False, capture_output=True
    ).returncode
    pieces: list[dict[str, Any]] = []
    try:
        piece(whole, words(whole, steps, 1), None, dice)
        until = time.monotonic() + 60 * minutes
        faults = dice.sample([kind for kind in FAULTS if own_disk or kind != "full"], len(FAULTS) - (not own_disk))
        while (pieces[-1]["saved"] if pieces else 0) < steps:
            late = time.monotonic() > until and not faults  # each kind comes once
            fault = None if late else faults.pop() if faults else dice.choice([*FAULTS][:4])
            pieces.append(piece(cut, words(cut, steps, dice.choice((1, 2)), *saving(cut)), fault, dice))
            sys.stderr.write(f"{pieces[-1]}\n")
            sys.stderr.flush()
            if not pieces[-1]["end"] or (late and pieces[-1]["code"]):
                break
    finally:
        if own_disk:
            subprocess.run(["umount", "-l", str(cut / "disk")], check=False)
    return judged(whole, cut, pieces, steps, own_disk)


def judged(whole: Path, cut: Path, pieces: list[dict[str, Any]], steps: int, own_disk: bool) -> dict[str, Any]:
    """What came of it; `wrong` is empty where all is as it must be."""
    one = dict(losses(whole / "receipts"))
    said = list(losses(cut / "receipts"))
    worst = max((abs(loss / one[step] - 1) for step, loss in said if step in one), default=0.0)
    ends = Counter(end for piece in pieces for end in piece["end"])
    wrong = []
    if worst > RELATIVE:
        wrong.append(f"a loss is off by {worst:.1e}")
    if {step for step, _ in said} != set(range(1, steps + 1)) or len(one) != steps:
        wrong.append(f"{len({step for step, _ in said})} and {len(one)} of {steps} steps have a loss")
    if any(b["saved"] < a["saved"] for a, b in pairwise(pieces)):
        wrong.append("a checkpoint went back")
    for number, one_piece in enumerate(pieces, 1):
        true = FAULTS.get(one_piece["fault"], ()) if one_piece["code"] else ()
        if one_piece["saved"] == steps:  # whatever comes then comes too late
            true = "completed", *true
        if len(one_piece["end"]) != 1 or one_piece["end"][0] not in true:
            wrong.append(f"piece {number} ended with {one_piece['code']}, and its receipt says {one_piece['end']}")
    listing = sys.stdout
    sys.stdout = sys.stderr
    try:
        if receipts.command([str(cut / "receipts")], {}):
            wrong.append("the receipts are no whole chain")
    finally:
        sys.stdout = listing
    if "Traceback" in (text := (cut / "said.txt").read_text(errors="replace")) and "launch/run/run.py" in text:
        wrong.append("a traceback of the launcher")
    return {
        "steps": steps,
        "steps_made": len(said),
        "pieces": pieces,
        "ends": dict(ends),
        "largest_difference_of_a_loss": worst,
        "a_full_disk": own_disk,
        "wrong": wrong,
    }


def main(argv: list[str]) -> int:
    given = dict(word.split("=", 1) for word in argv)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(
            Path(folder), float(given.get("minutes", 10)), int(given.get("steps", 100)), int(given.get("seed", 0))
        )
    json.dump(found, sys.stdout, indent=1)
    print()
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
