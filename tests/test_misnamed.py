"""What somebody is told who names a file, a folder or a key that is not there: the word he wrote, and where it was looked for."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.record import receipt, report
from nam_megatron import generate
from nam_megatron.compile.sources import too_deep
from nam_megatron.data import manifest
from nam_megatron.errors import Refused, folded
from nam_megatron.hf import folder
from nam_megatron.tracker import newest

REPO = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "ask",
    [
        lambda: receipt.read(Path("nope")),
        lambda: report.command(["nope"], {}),
        lambda: newest(Path("nope")),
        lambda: folder.load_json(Path("nope") / "config.json"),
        lambda: manifest.read(Path("nope")),
    ],
    ids=["receipt", "report", "checkpoint", "export", "dataset"],
)
def test_what_is_not_there_is_called_by_the_word_that_was_written(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as caught:
        ask()
    (problem,) = caught.value.problems
    assert problem.message.startswith("there is no `nope`")
    assert str(tmp_path) in problem.message + (problem.hint or "")


def test_what_is_there_and_something_else_is_said_to_be_so(tmp_path):
    with pytest.raises(Refused, match=f"no checkpoint in `{tmp_path}`"):
        newest(tmp_path)
    with pytest.raises(Refused, match=r"receipt.json` is no receipt: No such file"):
        receipt.read(tmp_path)
    with pytest.raises(Refused, match="is no built dataset"):
        manifest.read(tmp_path)


def own(tmp_path: Path, name: str, text: str) -> Path:
    (tmp_path / "own" / "preset").mkdir(parents=True, exist_ok=True)
    head = (
        f"# @package _global_\ndefaults: [nam56r_smoke, _self_]\npreset: {{name: {name}, about: x, alias_of: null}}\n"
    )
    (tmp_path / "own" / "preset" / f"{name}.yaml").write_text(head + text)
    return tmp_path / "own"


def translate(*words: object, cwd: Path = REPO) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nam_megatron.translate", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        'model: {hidden_size: "${model.ffn_hidden_size}", ffn_hidden_size: "${model.hidden_size}"}\n',
        'model: {hidden_size: "${.hidden_size}"}\n',
        'model: {hidden_size: "${optim.lr}"}\noptim: {lr: "${optim.eps}", eps: "${model.hidden_size}"}\n',
    ],
)
def test_links_that_go_round_are_refused_with_their_file(text, tmp_path):
    done = translate("--config-dir", own(tmp_path, "round", text), "conf=round")
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert "go round in a circle" in done.stderr and re.search(r"preset/round.yaml:\d\)", done.stderr), done.stderr


def test_a_link_that_goes_straight_is_followed(tmp_path):
    done = translate("--config-dir", own(tmp_path, "straight", 'schedule: {log_interval: "${schedule.train_steps}"}\n'),
                     "conf=straight", "explain=schedule.log_interval")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_folder_one_level_too_deep_is_named_with_the_right_one(tmp_path):
    inside = own(tmp_path, "mine", "") / "preset"
    for preset in ("mine", "nam56r_smoke"):
        done = translate("--config-dir", inside, f"conf={preset}")
        assert done.returncode == 2, done.stdout
        assert "one level too deep" in done.stderr and f"`--config-dir {inside.parent}`" in done.stderr
    assert too_deep(str(inside.parent)) is None and too_deep(str(tmp_path)) is None
    assert translate("--config-dir", inside.parent, "conf=mine").returncode == 0


def test_text_folds_between_words():
    text = folded("name  ", "a-hyphenated-word and `python -m nam_megatron.translate` " * 3, "      ", 40)
    lines = text.splitlines()
    assert len(lines) > 3 and all(line.startswith("      ") for line in lines[1:])
    assert text.split() == ["name", *("a-hyphenated-word and `python -m nam_megatron.translate` " * 3).split()]


@pytest.mark.slow
def test_lists_break_no_word_on_a_terminal_of_80_columns():
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(REPO)}
    words = [sys.executable, "-m", "nam_megatron.translate", "list=overlays"]
    done = subprocess.Popen(words, stdout=theirs, stderr=subprocess.DEVNULL, cwd=REPO, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(ours, 65536):
            shown += chunk
    assert done.wait() == 0
    plain = translate("list=overlays").stdout
    assert shown.decode().split() == plain.split()
    assert max(map(len, shown.decode().splitlines())) <= 80 < max(map(len, plain.splitlines()))


def test_a_failed_runs_receipt_leaves_the_checkout_clean():
    asked = "receipts/20990101T000000Z-any-000000/receipt.json"
    done = subprocess.run(["git", "check-ignore", "-q", asked], cwd=REPO, check=False)
    assert done.returncode == 0


def test_generate_says_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate", "nope", "--prompt", "x"])
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    assert generate.main() == 2 and said.getvalue().startswith("error: there is no `nope`\n\nhint: it is looked for in")
