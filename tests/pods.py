"""One recipe on hosts that are one machine: each starts its run.sh as an operator's pods do, over its own share of the GPUs."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from ports import free_port

from launch.record import steps


def of(count: int, gpus: int) -> list[str]:
    """gpus: of each host; 0 where the words say how many ranks it has."""
    own = [f"cluster.gpus_per_node={gpus}"] if gpus else []
    return ["schedule.log_interval=1", f"cluster.nodes={count}", *own]


class Hosts:
    """`count` of them, begun; `at`: what they write."""

    def __init__(self, at: Path, count: int, gpus: int, words: Sequence[str]):
        self.logs = [at / f"{number}.log" for number in range(count)]
        command = [*words, *of(count, gpus), f"out={at}"]
        subprocess.run([sys.executable, "-m", "nam_megatron.translate", *command], check=True, timeout=300)
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        shared["PATH"] = f"{Path(sys.executable).parent}:{shared['PATH']}"
        self.processes = []
        for number, path in enumerate(self.logs):
            own = {"NODE_RANK": str(number)}
            if gpus:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpus * number + i) for i in range(gpus))
            with path.open("w") as log:
                run = ["bash", str(at / "run.sh")]
                self.processes.append(psutil.Popen(run, env=shared | own, stdout=log, stderr=subprocess.STDOUT))

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.processes)):
            self.lose(number)

    def steps(self) -> dict[int, dict[str, float]]:
        """Values of each step that the last rank has printed, by its number."""
        (log,) = [lines for path in self.logs if steps.read(lines := path.read_text().splitlines()).steps] or [[]]
        return {number: step.values for number, step in steps.read(log).steps.items()}

    def ended(self) -> list[int]:
        return [process.wait() for process in self.processes]

    def lose(self, number: int) -> None:
        """All of a host's processes at once, as when its power goes: ranks have sessions of their own."""
        if (host := self.processes[number]).is_running():
            for process in (host, *host.children(recursive=True)):
                process.kill()

    def trained(self, number: int) -> None:
        """Waits until a step has been printed, or a host has ended."""
        while number not in self.steps() and all(process.poll() is None for process in self.processes):
            time.sleep(0.2)
