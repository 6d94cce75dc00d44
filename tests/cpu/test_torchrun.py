"""Our start of torchrun: how it ends when a rank does, below a real one; its ranks are one line of Python."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nam_megatron.torchrun import worst

RANK = "import os, signal, sys, time\nrank = os.environ['RANK']\nwords = sys.argv[1:]\n"
REFUSES = "print('error: no', file=sys.stderr, flush=True); sys.exit(int(words[0]))"


def ended(
    tmp_path: Path, program: str, *words: str, start: tuple[str, ...] = ("--standalone", "--nproc-per-node", "2")
):
    (tmp_path / "rank.py").write_text(RANK + program)
    torchrun = [sys.executable, "-m", "nam_megatron.torchrun", *start, str(tmp_path / "rank.py"), *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(torchrun, capture_output=True, text=True, timeout=600, check=False, env=environ)


@pytest.mark.few(1)
@pytest.mark.parametrize("who", ["rank == '0'", "rank == '1'"])
@pytest.mark.parametrize("code", [2, 3])
def test_nothing_follows_a_refusal(who, code, tmp_path):
    done = ended(tmp_path, f"if not {who}: time.sleep(60)\n{REFUSES}", str(code))
    assert (done.returncode, done.stderr) == (code, "error: no\n")


@pytest.mark.slow
def test_what_is_no_refusal_is_told_by_rank(tmp_path):
    done = ended(tmp_path, "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert done.returncode == 128 + signal.SIGKILL
    assert "Sending process" in done.stderr and "Signal 9 (SIGKILL)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_of_several_hosts_a_signal_is_the_ranks(tmp_path):
    """They save and end well, in their own time; torchrun alone gives them 30 seconds and says that it was signalled."""
    ranks = (
        "from pathlib import Path\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nPath(words[0] + rank).touch()\n"
        "while not all(Path(words[0] + other).exists() for other in '01'): time.sleep(0.1)\n"
        "if rank == '0': os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"
    )
    start = ("--standalone", "--nnodes=1:1", "--nproc-per-node", "2")
    done = ended(tmp_path, ranks, f"{tmp_path}/up", start=start)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_success_and_torchruns_own_faults_are_as_ever(tmp_path):
    done = ended(tmp_path, "os.write(1, f'{words}\\n'.encode())", "--a", "b")  # in one piece: two ranks write
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "['--a', 'b']\n" * 2
    assert ended(tmp_path, "", start=("--nproc-per-node", "many")).stderr.endswith(
        "Unsupported nproc_per_node value: many\n"
    )


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((2, -15), 2), ((-15, 3), 3), ((-15, -15), 143), ((2, 1), 1), ((2, 3), 3), ((1, -9, 2), 137), ((-6, -15), 134),
        ((16, 2, 17), 16),
    ],
)  # fmt: skip
def test_the_worst_rank_decides(codes, code):
    assert worst(codes) == code
