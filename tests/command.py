"""Runs a command as a user does, with its own arguments, folder, streams and exit code, in a process that starts warm.

A server imports the command once and forks for each run, which takes 0.05 s where a new interpreter takes 0.8 s.
`cold` is the real thing, for the few tests that need it.
"""

import fcntl
import importlib
import multiprocessing
import os
import pty
import resource
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["nam_megatron.translate", "tests.warmed"])  # found from the repository's root
# A process has one such server. Started by a test that builds data in this process, it would have torch and Megatron in it.
if multiprocessing.current_process().name == "MainProcess":  # a child of it imports this module before it runs
    forkserver.ensure_running()
TRANSLATE = "nam_megatron.translate"


@dataclass(frozen=True)
class Ran:
    code: int | None
    out: str
    err: str


def unbuilt() -> None:
    """As if Mamba-3's layer were still to be written: the `before` of a run."""
    from nam_megatron.blocks.mamba3.block import Mamba3

    Mamba3.missing = "the mixer"


def briefly() -> None:
    """Ends a run that takes more than 20 seconds of a processor, however many others want it."""
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def nothing() -> None: ...


def warm(*words: str, cwd: Path | str = ".", module: str = TRANSLATE, before: Callable[[], None] = nothing) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=_child, args=(module, words, str(cwd), str(out), str(err), {}, before))
        process.start()
        process.join(1200)  # a loaded machine takes any time; what never ends has no code
        process.kill()
        return Ran(process.exitcode, out.read_text(), err.read_text())


def on_terminal(
    *words: str,
    cwd: Path | str = ".",
    columns: int = 120,
    env: dict[str, str] | None = None,
    before: Callable[[], None] = nothing,
) -> Ran:
    """With stdout and stderr on a terminal; both arrive in `out`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    name = os.ttyname(slave)
    env = {"TERM": "xterm-256color", "COLUMNS": str(columns), **(env or {})}
    process = SERVER.Process(target=_child, args=(TRANSLATE, words, str(cwd), name, name, env, before))
    process.start()
    seen = b""
    os.set_blocking(master, False)
    while process.is_alive() or process.exitcode is None:
        process.join(0.02)
        seen += _drain(master)
    seen += _drain(master)
    os.close(slave)
    os.close(master)
    return Ran(process.exitcode, seen.decode().replace("\r\n", "\n"), "")


def cold(*words: str, cwd: Path | str = ".", **options) -> Ran:
    """A new interpreter, as typed: `python -m nam_megatron.translate ...`."""
    command = [sys.executable, "-m", TRANSLATE, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False, **options)
    return Ran(done.returncode, done.stdout, done.stderr)


def _child(
    module: str,
    words: tuple[str, ...],
    cwd: str,
    out: str,
    err: str,
    env: dict[str, str],
    before: Callable[[], None] = nothing,
) -> None:
    before()
    os.chdir(cwd)
    os.environ.pop("NO_COLOR", None)
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    sys.argv[:] = [module, *words]
    importlib.import_module(module).main()


def _drain(fd: int) -> bytes:
    seen = b""
    while True:
        try:
            piece = os.read(fd, 65536)
        except OSError:  # nothing more for now, or the other end is closed
            return seen
        if not piece:
            return seen
        seen += piece
