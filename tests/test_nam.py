"""The program `nam`: one grammar over the modules, help that fits a screen, and completion as a shell asks for it."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nam_megatron import cli
from nam_megatron.completion import SHELLS, complete
from nam_megatron.errors import Refused

NAM = Path(sys.executable).with_name("nam")


def nam(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([NAM, *words], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [name for name in cli.COMMANDS if name != "nemo"]
)  # whose help is Hydra's own, of all groups
def test_every_command_has_help_of_its_own_in_the_programs_words(name):
    done = nam(name, "--help")
    assert done.returncode == 0 and f"nam {name}" in done.stdout, done.stderr
    assert "python -m nam_megatron." not in done.stdout
    if name in cli.RECIPES:
        assert len(done.stdout.splitlines()) < 35 and max(map(len, done.stdout.splitlines())) < 160


@pytest.mark.slow
def test_the_package_itself_is_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "nam_megatron", "list", "lanes"], capture_output=True, text=True, check=True
    )
    assert done.stdout == nam("list", "lanes").stdout


@pytest.mark.slow
def test_what_a_module_prints_and_ends_with_is_the_programs():
    ours = nam("translate", "conf=nam56r_smoke")
    theirs = subprocess.run(
        [sys.executable, "-m", "nam_megatron.translate", "conf=nam56r_smoke"], capture_output=True, text=True
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, theirs.stdout, theirs.stderr)
    refused = nam("budget", "conf=nam56r_smok")
    assert refused.returncode == 2 and "did you mean" in refused.stderr and "Traceback" not in refused.stderr
    assert nam("lint", "/dev/null").returncode == 2
    assert nam("--version").stdout.startswith("nam_megatron 0.1.0, for Megatron-Core 0.19")
    listed = nam("list", "clusters")
    assert listed.stdout == nam("translate", "list=clusters").stdout and "h200_2x8   2 x 8 GPUs" in listed.stdout


def test_a_command_that_is_none_is_refused_with_the_one_that_is_meant(tmp_path):
    for said, meant in (("transalte", "`nam translate`"), ("perplexity", "`nam hf perplexity`"),
                        ("check", "`nam launch check` or `nam data check` or `nam hf check`")):  # fmt: skip
        done = nam(said)
        assert done.returncode == 2 and f"did you mean {meant}?" in done.stderr
    done = nam("hf", "check", "an export")  # one of two was taken for the other, and the message names the second
    assert done.returncode == 2 and "it is `nam hf check CHECKPOINT EXPORT`" in done.stderr
    assert "it is `nam data corpus FILE.jsonl --from " in nam("data", "corpus").stderr
    assert "did you mean" not in nam("the").stderr  # a word of what `nemo` is for
    (tmp_path / "plan.json").touch()
    assert f"`nam budget {tmp_path}/plan.json` says" in nam("translate", str(tmp_path)).stderr


def test_help_costs_no_import_of_a_recipe():
    code = "import sys; from nam_megatron import cli; cli.command(['--help']); print(sorted({'pydantic', 'hydra'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("name", "words", "read"),
    [
        ("generate", ["out", "prompt=a=b", "new=20", "endless=true"], ["out", "--prompt=a=b", "--new=20", "--endless"]),
        ("data", ["build", "set", "src", "suffix=[.h,.cpp]", "tokenizer=bpe"],
         ["build", "set", "src", "--suffix=.h", "--suffix=.cpp", "--tokenizer=bpe"]),
        ("hf", ["check", "a", "b", "plain=false", "--json"], ["check", "a", "b", "--json"]),
        ("hf", ["export", "a", "./b=c", "shard_gb=2"], ["export", "a", "./b=c", "--shard-gb=2"]),
        ("list", ["clusters", "--config-dir", "own"], ["list=clusters", "--config-dir", "own"]),
        ("translate", ["conf=nam56r", "optim.lr=1"], ["conf=nam56r", "optim.lr=1"]),
    ],
)  # fmt: skip
def test_one_grammar(name, words, read):
    assert cli.spelled(name, words) == read


def test_a_key_that_is_none_is_refused_before_argparse_reads_it_as_a_file():
    with pytest.raises(Refused, match="no `promt`"):
        cli.spelled("generate", ["out", "promt=x"])
    with pytest.raises(Refused, match="true or false"):
        cli.spelled("generate", ["out", "endless=yes"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tr", {"translate"}),
        ("launch re", {"report", "receipts"}),
        ("translate conf=nam56r_smo", {"conf=nam56r_smoke"}),
        ("launch run clus", {"cluster=", "cluster."}),
        ("launch run cluster=cp", {"cluster=cpu"}),
        ("translate +overlay=tp_", {"+overlay=tp_sp", "+overlay=tp_sp_ep"}),
        (
            "translate execution.moe.dispatcher=al",
            {"execution.moe.dispatcher=allgather", "execution.moe.dispatcher=alltoall"},
        ),
        ("translate model.blocks.moe.top", {"model.blocks.moe.top_k="}),
        ("translate precision.determ", {"precision.deterministic="}),
        ("translate precision.deterministic=", {"precision.deterministic=true", "precision.deterministic=false"}),
        ("hf exp", {"export"}),
        ("data build set --to", {"--tokenizer="}),
        ("hf import --w", {"--without-mtp"}),
        ("data build set to", {"tokenizer="}),
        ("list cl", {"clusters"}),
        ("nonsense a", set()),
    ],
)
def test_what_may_stand_at_the_cursor(line, found):
    assert set(complete(["nam", *line.split(" ")])) == found


def test_presets_of_ones_own_are_completed(tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").touch()
    for name in ("mi$(touch x)", "mi\nne", "mi ne", "mi\x1b[2J"):
        (tmp_path / "preset" / f"{name}.yaml").touch()
    assert complete(["nam", "translate", "--config-dir", str(tmp_path), "conf=mi"]) == [
        "conf=mine",
        "conf=mixtral_8x7b",
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_a_line(shell):
    """A real one on a terminal: the line as it stands after Tab."""
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    child, fd = pty.fork()
    if not child:
        start = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
        os.environ |= {"PATH": f"{NAM.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
        os.execvp(shell, [shell, *start])

    def until(text: str) -> str:
        seen, end = "", time.monotonic() + 60
        while text not in seen and time.monotonic() < end and select.select([fd], [], [], 1)[0] is not None:
            with contextlib.suppress(BlockingIOError):
                if select.select([fd], [], [], 0)[0]:
                    seen += os.read(fd, 65536).decode(errors="replace")
        return seen

    try:
        os.write(fd, f'eval "$(nam completion {shell})"; echo re""ady\n'.encode())
        assert "ready" in until("ready\r")
        os.write(fd, b"nam launch ru\tconf=nam56r_smo\tcluster=cp\t")
        assert "cluster=cpu" in until("cluster=cpu")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(fd)
