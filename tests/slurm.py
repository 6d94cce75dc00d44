"""A real Slurm of two hosts on this machine, for as long as a test or a person needs it; as root, where slurmctld, slurmd and munged are.

    python tests/slurm.py up FOLDER       # prints what to put before a command: `SLURM_CONF=... unshare ...`
    python tests/slurm.py down FOLDER

Each host is a slurmd in namespaces of its own: its name is `h1` or `h2`, which all of them resolve to this machine. Nothing of a Slurm that
runs here already is touched: key, sockets, ports and state lie in FOLDER.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel", "unshare")
HOSTS = ("h1", "h2")
CONF = """
ClusterName=pair
SlurmctldHost=h0(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={at}/state
SlurmctldPidFile={at}/slurmctld.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdSpoolDir={at}/spool-%n
SlurmdPidFile={at}/%n.pid
SlurmdLogFile={at}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
# However busy the machine is: Slurm's own timeouts are those of a cluster that answers.
SlurmdTimeout=60
MessageTimeout=90
TCPTimeout=30
BatchStartTimeout=300
UnkillableStepTimeout=600
KillWait=300
JobRequeue=1
SchedulerParameters=sched_interval=2,batch_sched_delay=1
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def lacking() -> str | None:
    """Why no scheduler can be brought up here; None: one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)} here: `apt install slurm-wlm munge`"
    if subprocess.run(["unshare", "-um", "true"], capture_output=True, check=False).returncode:
        return "no namespaces of its own: as root"
    return None


@dataclass(frozen=True)
class Scheduler:
    """A scheduler whose files lie in `at`."""

    at: Path

    def on(self, host: str) -> list[str]:
        """What stands before a command that is to run as if on a host."""
        named = f'hostname {host} && mount --bind {shlex.quote(str(self.at / "hosts"))} /etc/hosts && exec "$@"'
        return ["unshare", "-um", "sh", "-c", named, host]

    @property
    def environ(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        return {**kept, "SLURM_CONF": str(self.at / "slurm.conf"), "PATH": path}

    def ask(self, *words: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """What a command of Slurm's says. Raises CalledProcessError."""
        env = {**self.environ, **(environ or {})}
        done = subprocess.run(
            [*self.on("h0"), *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
        return done.stdout.strip()

    def _start(self, host: str, *words: str) -> None:
        with (self.at / f"{words[0]}.{host}.out").open("ab") as out:
            subprocess.run([*self.on(host), *words], env=self.environ, stdout=out, stderr=out, timeout=600, check=True)

    def up(self) -> None:
        """Raises CalledProcessError, TimeoutError: the log says why."""
        self.at.mkdir(parents=True)
        (self.at / "state").mkdir()
        key = self.at / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        names = [*HOSTS, "h0"]
        (self.at / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in names))
        nodes = "\n".join(
            f"NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 State=UNKNOWN"
            for host in HOSTS
        )
        (self.at / "slurm.conf").write_text(CONF.format(at=self.at, controller=free_port(), nodes=nodes))
        files = {name: str(self.at / f"munge.{name}") for name in ("socket", "key", "pid", "log", "seed")}
        self._start(
            "h0", "munged", "--force", f"--socket={files['socket']}", f"--key-file={files['key']}", f"--pid-file={files['pid']}",
            f"--log-file={files['log']}", f"--seed-file={files['seed']}",
        )  # fmt: skip
        self._start("h0", "slurmctld")
        for host in HOSTS:
            self.start(host)
        self.wait(lambda: self.nodes() == ["idle"] * len(HOSTS))

    def start(self, host: str) -> None:
        self._start(host, "slurmd", "-N", host)

    def nodes(self) -> list[str]:
        return [line.rstrip("*~#") for line in self.ask("sinfo", "--noheader", "--Node", "--format=%t").split()]

    def kill(self, host: str) -> None:
        """A host is gone: its daemon and everything that it has started, at once."""
        daemon = int((self.at / f"{host}.pid").read_text())
        for pid in [daemon, *self.below(host)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def below(self, host: str) -> list[int]:
        """Processes that believe to be on a host."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                said = path.read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={host}".encode() in said and f"SLURM_CONF={self.at}/slurm.conf".encode() in said:
                    found.append(int(path.parts[2]))
        steps = subprocess.run(
            ["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        mine = [int(line.split()[0]) for line in steps if "slurmstepd" in line and self._of(int(line.split()[0]), host)]
        return [*mine, *found]

    def _of(self, pid: int, host: str) -> bool:
        """Whether a daemon of a step is in the namespace of a host's slurmd."""
        with suppress(OSError, ValueError):
            daemon = int((self.at / f"{host}.pid").read_text())
            return os.readlink(f"/proc/{pid}/ns/uts") == os.readlink(f"/proc/{daemon}/ns/uts")
        return False

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        said = self.ask("scontrol", "show", "job", number)
        return dict(word.partition("=")[::2] for word in said.split() if "=" in word)

    def wait(self, done: Callable[[], bool], seconds: float = 1800) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:.0f} s: {self.ask('sinfo')}")
            time.sleep(0.5)

    def down(self) -> None:
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self.ask("scancel", "--full", "--signal=KILL", "--state=RUNNING")
        for name in (*HOSTS, "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((self.at / f"{name}.pid").read_text()), signal.SIGTERM)
        time.sleep(1)
        for name in (*HOSTS, "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((self.at / f"{name}.pid").read_text()), signal.SIGKILL)


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in ("up", "down"):
        sys.stderr.write(__doc__ or "")
        return 2
    if why := lacking():
        sys.stderr.write(f"error: {why}\n")
        return 2
    scheduler = Scheduler(Path(words[1]).absolute())
    getattr(scheduler, words[0])()
    if words[0] == "up":
        print(f"SLURM_CONF={scheduler.at}/slurm.conf", shlex.join(scheduler.on("h0")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
