"""Every command line of README and docs is run by a test, or says that it needs a GPU, a cluster or a network.

Each line is taken in one of these ways, the first whose condition holds:

  network    it installs something
  minutes    it is run whole by the test that MINUTES names
  elsewhere  its comment, or the one at the head of its block, says what it needs: NEEDS. Its words are read all the same
  read       a part of it is a reader's own (a checkpoint, an export, a corpus): its words are read by its own parser, and its
             recipe is composed and translated; what such commands do is the matter of their own tests
  run        as it stands, in a folder with what the pages tell to write
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hf_configs import CONFIGS
from ports import free_port
from test_docs import DOCS, HOUR, PAGES, REPO
from test_wheel import run, unpacked

from nam_megatron import cli
from nam_megatron.commands import ARGPARSE
from nam_megatron.compile import compose
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INSTALLS = re.compile(r"\b(pip install|uv sync|uv run|uvx)\b")
NEEDS = re.compile(r"\bon (a GPU|the GPUs|GPUs)\b|\bGPU: |\btraining host\b|\ba Slurm job\b")
# Two that may be compared, where a page says A and B.
BOTH = ("20261122T110256Z-nam56r_native_dp_fused-0252ea", "20261122T110531Z-nam56r_native_dp_fused-09d6e8")
# A reader's own, or minutes of work: lines that are read.
OWN = re.compile(
    r"^nam (data|hf|generate|nemo (dump|pretrain|finetune))\b|\blaunch run\b|\bnam_megatron\.torchrun\b|^lm_eval\b"
)
HOUR_TEST = "test_docs_lines.py::test_the_first_hour_from_a_run_to_a_comparison"
# What takes minutes, and who runs it whole.
MINUTES = {
    "nam launch run conf=nam56r_smoke cluster=cpu": HOUR_TEST,
    "nam launch run --config-dir ../mine": HOUR_TEST,
    "nam launch report receipts/RUN": HOUR_TEST,
    "nam launch compare receipts/RUN receipts/OTHER": HOUR_TEST,
    "nam verify --config-dir": "test_docs.py::test_the_tutorials_own_model_is_what_megatron_builds_and_the_same_on_two_ranks",
    "nam prove --config-dir": "test_docs.py::test_the_tutorials_own_model_is_what_megatron_builds_and_the_same_on_two_ranks",
}
LAUNCH = {
    line.partition(":")[0] for line in (REPO / "conf/launch.yaml").read_text().splitlines() if re.match(r"\w+: ", line)
}
OTHERS = LAUNCH | {"device", "steps", "resume", "out"} - {"hydra"}  # of commands, beside a recipe's


def lines() -> list[tuple[str, str, str]]:
    """(page, command, what its comment and the head of its block say) of each command line of every fenced block."""
    found = []
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            text = block.replace("\\\n", " ")
            if language == "bash" and not text.startswith("#!"):  # that is a script to be linted, in tests/test_lint.py
                head = text.partition("\n")[0] if text.startswith("#") else ""
                said = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
                found += [(page.name, *parted(line, head)) for line in said]
            found += [(page.name, *parted(line[2:], "")) for line in text.splitlines() if line.startswith("$ ")]
    return found


def parted(line: str, head: str) -> tuple[str, str]:
    command, _, comment = line.partition(" # ")
    return command.strip(), f"{head} {comment}"


def way(command: str, comment: str) -> str:
    if INSTALLS.search(command) or command.startswith("cd "):
        return "network"
    if any(command.startswith(begin) for begin in MINUTES):
        return "minutes"
    if NEEDS.search(comment):
        return "elsewhere"
    return "read" if OWN.search(command) or not command.startswith("nam ") else "run"


LINES = list(dict.fromkeys(lines()))
TRANSCRIPTS = {
    parted(line[2:], "")[0] for page in PAGES for line in page.read_text().splitlines() if line.startswith("$ ")
}


def of(*ways: str):
    cases = [(page, command) for page, command, comment in LINES if way(command, comment) in ways]
    return pytest.mark.parametrize(
        ("page", "command"), cases, ids=[f"{page}: {command[:60]}" for page, command in cases]
    )


def test_nobody_else_is_said_to_run_what_nobody_does():
    for begin, test in MINUTES.items():
        file, _, name = test.partition("::")
        assert any(command.startswith(begin) for _, command, _ in LINES), begin
        assert f"def {name}" in (REPO / "tests" / file).read_text()


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with what the pages tell to write: the tutorial's model, a preset of one's own, two runs, a published folder."""
    folder = tmp_path_factory.mktemp("docs") / "clone"
    files = dict(re.findall(r'```yaml title="([^"]+)"\n(.*?)```', HOUR, re.DOTALL))
    mine = re.search(r"```yaml\n(# @package _global_\n.*?)```", (DOCS / "presets.md").read_text(), re.DOTALL)
    files |= {
        "my/conf/preset/mine.yaml": mine[1],
        "Llama-3.1-8B/config.json": json.dumps(CONFIGS["llama_3_1_8b"]),
        "run_config.yaml": (REPO / "tests/lint/bridge_nemotron_3_nano.yaml").read_text(),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in TRANSCRIPTS:
        for name in re.findall(r"receipts/(\S+)", command):
            shutil.copytree(REPO / "receipts" / name, folder / "receipts" / name, dirs_exist_ok=True)
    for name in BOTH:
        shutil.copytree(REPO / "receipts" / name, folder / "receipts" / name, dirs_exist_ok=True)
    return folder


@pytest.mark.few(1)
@of("run")
def test_a_line_runs_as_it_stands(page, command, shop):
    words = re.sub(r"\[(receipts/B) \.\.\.\]", r"\1", command)
    for letter, name in zip("AB", BOTH, strict=True):
        words = re.sub(rf"receipts/{letter}\b", f"receipts/{name}", words)
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(shop), "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, shell=True, executable="/bin/bash", capture_output=True, text=True, cwd=shop, check=False,
                          timeout=600, env=os.environ | environ)  # fmt: skip
    # What a list or a search finds here is no fault of the line; a transcript shows what is refused, too.
    wanted = (
        (0, 2)
        if command in TRANSCRIPTS
        else (0, 1)
        if re.search(r"\b(lint|receipts|status|doctor|fit=)", command)
        else (0,)
    )
    assert done.returncode in wanted, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.few(12)
@of("read", "elsewhere")
def test_the_words_of_a_line_are_read(page, command):
    command = command.partition("&&")[0].strip()
    words = shlex.split(re.sub(r"^srun( --\S+)* ", "", command).replace(" ...", ""))
    name, rest = called(words)
    if name is None:  # somebody else's program, or a file of ours that is no command: what it has is in its help
        if words[0] == "python":
            helped(words)
        return
    if name in ARGPARSE:
        import_module(ARGPARSE[name]).parser().parse_args(cli.spelled(name, rest))
        return
    verb = rest.pop(0) if name in ("launch", "nemo") else ""
    if not any(word.startswith("conf=") for word in rest):
        return
    rest = [word for word in rest if word.partition("=")[0].lstrip("+") not in OTHERS]
    (preset,) = (word.removeprefix("conf=") for word in rest if word.startswith("conf="))
    words = [word for word in rest if not word.startswith(("conf=", "--", ">"))]
    for point in compose.points(words, False) if "--multirun" in rest else [words]:
        try:
            translate(load(preset, point))
        except Refused as refused:  # more is to be given where a line has `...`
            assert " ..." in command and {problem.law for problem in refused.problems} == {"key-not-given"}, refused
    assert verb in ("", "show", "check", "run", "dump", "pretrain", "finetune"), command


def called(words: list[str]) -> tuple[str | None, list[str]]:
    """The command of ours that a line starts, and its words; None where it is none."""
    if words[0] == "nam":
        return words[1], words[2:]
    if words[:2] == ["python", "-m"]:
        module, rest = words[2], words[3:]
        if module == "nam_megatron.torchrun":
            return "nemo", rest[rest.index("nam_megatron.nemo") + 1 :]
        name = module.rpartition(".")[2] if module != "launch" else "launch"
        return (name, rest) if name in cli.COMMANDS else (None, [])
    return None, []


def helped(words: list[str]) -> None:
    end = 3 if words[1] == "-m" else 2
    done = subprocess.run(
        [sys.executable, *words[1:end], "--help"], capture_output=True, text=True, cwd=REPO, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words[end:] if word.startswith("--")), done.stdout


@pytest.mark.slow
def test_the_first_hour_from_a_run_to_a_comparison(tmp_path, shop):
    """README's and the tutorial's lines one after another, as an installed package runs them: RUN is what the run named."""
    site = unpacked(tmp_path)

    def program(cwd: Path, words: str) -> subprocess.CompletedProcess:
        return run(site, cwd, f"nam_megatron.cli {words}")

    hour = [(c, comment) for page, c, comment in LINES if page == "first-hour.md" and c.startswith("nam launch run")]
    runs = [c for c, comment in hour if not NEEDS.search(comment)]
    assert len(runs) == 3
    work = tmp_path / "work" / "clone"
    shutil.copytree(shop.parent / "mine", work.parent / "mine")
    work.mkdir()
    for command in runs:
        # the line has 29500, as other tests' launches may
        done = program(work, f"{command.removeprefix('nam ')} port={free_port()}")
        assert done.returncode == 0 and "completed" in done.stderr, done.stderr
    first, second, _ = sorted(
        path.name for path in (work / "receipts").iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    done = program(work, f"launch report receipts/{first}")
    page = work / "receipts" / first / "report.html"
    assert done.returncode == 0 and "<svg" in page.read_text() and "loss" in page.read_text(), done.stderr
    done = program(work, f"launch compare receipts/{first} receipts/{second} --anyway")
    assert done.returncode == 0 and "hidden" in done.stdout, done.stderr
