"""A day of use in minutes: python benchmarks/soak.py minutes=10 [seed=0] [steps=150] > benchmarks/soak.json

One run on CPU ranks (a rehearsal: `cluster=cpu`) in pieces: each goes on from the newest checkpoint with one rank or two, and is
ended at a random moment by a kill of the launcher, a kill of a rank, or a signal to the launcher; once its disk is
full. Beside it the same run in one piece. Then: each step's loss is that run's, no checkpoint went back, and the receipts are one chain,
each sealed with an end that is true. As root, for a disk of its own that can be full; elsewhere that is left out, and said.
"""

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

from launch.record import outcome, receipt, receipts  # noqa: E402
from nam_megatron.tracker import TRACKER  # noqa: E402

RELATIVE = 5e-3  # of a loss: gradients of two ranks are summed in another order, in bf16
WORDS = (
    "conf=nam56r_smoke", "cluster=cpu", "diagnostic=a soak", "schedule.global_batch_size=4", "schedule.micro_batch_size=2",
    "feature.distributed_optimizer.reshardable=true",
)  # fmt: skip
FAULTS = ("kill", "kill a rank", "SIGTERM", "SIGINT")
DISK_MB = 3000


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


def below(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    said = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in said.splitlines()]
    found, ranks = {pid}, []
    for _ in range(4):
        found |= {int(row[0]) for row in rows if int(row[1]) in found}
    for row in rows:
        if (
            int(row[0]) in found
            and "nam_megatron.train" in row[-1]
            and "torch.distributed.run" not in row[-1]
            and "launch" not in row[-1]
        ):
            ranks.append(int(row[0]))
    return ranks


def piece(at: Path, command: list[str], fault: str | None, dice: random.Random, seconds: float) -> dict[str, Any]:
    """Start a launcher, and end it some seconds after its first step. fault None: it may finish; `full`: its disk fills then."""
    before = len(list(losses(at / "receipts")))
    with (at / "said.txt").open("ab") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
    begin, due = time.monotonic(), None
    ballast = at / "disk" / "ballast"
    while process.poll() is None:
        time.sleep(0.2)
        if due is None and len(list(losses(at / "receipts"))) > before:
            due = time.monotonic() + dice.uniform(0, seconds)
        if fault and due is None and fault != "full" and time.monotonic() - begin > 20 and dice.random() < 0.0003:
            due = time.monotonic()  # some before their first step
        if fault and due is not None and time.monotonic() >= due:
            due = float("inf")
            if fault == "full":
                free = shutil.disk_usage(at / "disk").free
                with ballast.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, free - 2**18))
            elif fault == "kill":
                process.kill()
            elif fault == "kill a rank":
                for rank in below(process.pid)[:1]:
                    os.kill(rank, signal.SIGKILL)
            else:
                process.send_signal(getattr(signal, fault))
        if time.monotonic() - begin > 600:
            process.kill()
            raise TimeoutError("a piece that does not end")
    ballast.unlink(missing_ok=True)
    time.sleep(3 if fault == "kill" else 0)  # what torchrun's ranks need to see that their launcher is gone
    tracker = at / "disk" / "ckpt" / TRACKER
    return {
        "fault": fault or "none",
        "ranks": int(next(word for word in command if "gpus_per_node" in word).rpartition("=")[2]),
        "code": process.returncode,
        "seconds": round(time.monotonic() - begin, 1),
        "saved": int(tracker.read_text()) if tracker.exists() else 0,
    }


def soak(at: Path, minutes: float, steps: int, seed: int) -> dict[str, Any]:
    dice, until = random.Random(seed), time.monotonic() + 60 * minutes
    whole, cut = at / "whole", at / "cut"
    for folder in (whole, cut / "disk"):
        folder.mkdir(parents=True)
    own_disk = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(cut / "disk")], check=False, capture_output=True
    ).returncode
    pieces: list[dict[str, Any]] = []
    try:
        piece(whole, words(whole, steps, 1), None, dice, 0)
        faults = ["full"] * own_disk
        while (pieces[-1]["saved"] if pieces else 0) < steps:
            late = time.monotonic() > until
            fault = None if late else faults.pop() if faults and len(pieces) == 2 else dice.choice(FAULTS)
            pieces.append(piece(cut, words(cut, steps, dice.choice((1, 2)), *saving(cut)), fault, dice, 12))
            sys.stderr.write(f"{pieces[-1]}\n")
            if late and pieces[-1]["code"]:
                break
    finally:
        if own_disk:
            subprocess.run(["umount", "-l", str(cut / "disk")], check=False)
    return judged(whole, cut, pieces, steps, own_disk)


def judged(whole: Path, cut: Path, pieces: list[dict[str, Any]], steps: int, own_disk: bool) -> dict[str, Any]:
    """What came of it; `wrong` is empty where all is as it must be."""
    receipt.seal_lost(cut / "receipts", outcome.of_run)
    one = dict(losses(whole / "receipts"))
    said = list(losses(cut / "receipts"))
    worst = max((abs(loss / one[step] - 1) for step, loss in said if step in one), default=0.0)
    ends = Counter(receipt.read(folder)["outcome"]["end"] for folder in receipt.folders(cut / "receipts"))
    wrong = []
    if worst > RELATIVE:
        wrong.append(f"a loss is off by {worst:.1e}")
    if {step for step, _ in said} != set(range(1, steps + 1)) or len(one) != steps:
        wrong.append(f"{len({step for step, _ in said})} and {len(one)} of {steps} steps have a loss")
    if any(b["saved"] < a["saved"] for a, b in pairwise(pieces)):
        wrong.append("a checkpoint went back")
    if sum(ends.values()) != len(pieces):
        wrong.append(f"{sum(ends.values())} receipts of {len(pieces)} pieces")
    if sum(piece["code"] == 0 for piece in pieces) != ends["completed"]:
        wrong.append(f"{ends['completed']} receipts say `completed`")
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
            Path(folder), float(given.get("minutes", 10)), int(given.get("steps", 150)), int(given.get("seed", 0))
        )
    json.dump(found, sys.stdout, indent=1)
    print()
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
