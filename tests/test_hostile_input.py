"""Input that a person or a program may give by mistake or in bad faith: a refusal in a line, soon, and nothing left behind."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from command import briefly, warm

from nam_megatron.errors import finish

REPO = Path(__file__).parents[1]
SMOKE = REPO / "conf" / "preset" / "nam56r_smoke.yaml"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own" / "preset").mkdir(parents=True)
    return tmp_path


def own(folder: Path, text: str, encoding: str = "utf-8"):
    (folder / "own" / "preset" / "mine.yaml").write_text(text, encoding=encoding)
    return warm("--config-dir", str(folder / "own"), "conf=mine", cwd=folder, before=briefly)


def test_a_file_of_ones_own_is_read(folder):
    assert own(folder, SMOKE.read_text().replace("name: nam56r_smoke", "name: mine")).code == 0


def test_a_byte_order_mark_is_named(folder):
    done = own(folder, SMOKE.read_text(), "utf-8-sig")
    assert done.code == 2 and "mine.yaml` begins with a byte order mark" in done.err


def test_a_missing_package_line_is_named(folder):
    done = own(folder, SMOKE.read_text().replace("# @package _global_\n", ""))
    assert done.code == 2 and "does not say where its keys belong" in done.err
    assert "hint: its first line is `# @package _global_`" in done.err


def test_an_anchor_bomb_is_refused_at_once(folder):
    """A million values in six lines took 90 seconds."""
    lines = ["# @package _global_", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    done = own(folder, "\n".join(lines))
    assert done.code == 2 and "its anchors written out" in done.err


def test_a_file_far_too_large_is_refused_at_once(folder):
    """A value of 30 MB took 100 seconds to be called too long; one of a hundred kilobytes is read."""
    text = SMOKE.read_text().replace("name: nam56r_smoke", "name: mine")
    assert own(folder, text + "# " + "x" * 100_000 + "\n").code == 0
    done = own(folder, text + f'about: "{"x" * 30_000_000}"\n')
    assert done.code == 2 and "30,00" in done.err and "more than a config file has" in done.err


@pytest.mark.parametrize("text", ['{"a": ' * 50_000, "- " * 50_000, "x: " + "9" * 5000])
def test_what_libyaml_or_an_integer_cannot_hold_is_refused(folder, text):
    """The first ended the process without a word."""
    (folder / "train.yaml").write_text(text)
    for done in (own(folder, text), warm("lint", "train.yaml", cwd=folder, module="nam_megatron.cli")):
        assert done.code == 2 and done.err.startswith("error: ") and "Traceback" not in done.err


def test_a_device_is_not_read_to_its_end(tmp_path):
    done = warm("lint", "/dev/zero", cwd=tmp_path, module="nam_megatron.cli")
    assert done.code == 2 and "characters, which no launch has" in done.err
    done = warm("migrate", "/dev/zero", cwd=tmp_path, module="nam_megatron.cli")
    assert done.code == 2 and "`/dev/zero` is a device, and no file" in done.err


def test_a_value_in_the_place_of_a_name_is_refused(tmp_path):
    done = warm("conf=nam56r_smoke", f"assumptions.model/hidden_dropout.why={'9' * 5000}", cwd=tmp_path)
    assert done.code == 2 and "File name too long" in done.err and len(done.err) < 400


def test_a_file_that_may_not_be_read_is_refused(capsys):
    def closed():
        raise PermissionError(13, "Permission denied", "a/config.json")

    with pytest.raises(SystemExit) as left:
        finish(closed)
    assert (left.value.code, capsys.readouterr().err) == (
        2, "error: `a/config.json`: Permission denied\n\nhint: let this user read it\n",
    )  # fmt: skip


def test_an_anchor_of_itself_is_refused(folder):
    done = own(folder, "# @package _global_\nx: &x\n  y: *x\n")
    assert done.code == 2 and "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    [("-cn", "recipe"), ("-cnrecipe",), ("--config-name=recipe",), ("--config-name", "recipe"), ("-cp", "/tmp")],
)
def test_another_config_leaves_nothing_behind(tmp_path, words):
    done = warm(*words, cwd=tmp_path)
    assert done.code == 2 and "a command has one config" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("preset.about=${preset.family}", "preset.family=${preset.about}"),
        ("model.depth=${model.hidden_size}", "model.hidden_size=${model.depth}"),
        ("model.depth=${model.depth}",),
        ("+overlay=${overlay}",),
        ("format=${out}", "out=${format}"),
        ("schedule=${schedule.seed}", "schedule.seed=${schedule}"),
    ],
)
def test_interpolations_that_go_in_circles_are_refused(tmp_path, words):
    done = warm("conf=nam56r_smoke", *words, cwd=tmp_path)
    assert done.code == 2 and done.err.startswith("error: ") and "Traceback" not in done.err


@pytest.mark.few(2)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e308", "0.5", "true", "x"])
def test_an_imbalance_is_a_number(tmp_path, value):
    done = warm("conf=nam56r_smoke", f"imbalance={value}", cwd=tmp_path, module="nam_megatron.budget.__main__")
    assert done.code == 2 and "`imbalance` is the busiest rank over the mean" in done.err


@pytest.mark.parametrize("name", ["*", "ckpt?", "[a]"])
def test_a_pattern_does_not_go_into_a_pipe(tmp_path, name):
    """`$(...)` would put the names of files in its place."""
    words = ("conf=nam56r_smoke", f"schedule.save='{name}'", "schedule.save_interval=1")
    done = warm(*words, cwd=tmp_path)
    assert (done.code, done.out) == (2, "") and f"change `{name}` in" in done.err
    done = warm(*words, "out=run", cwd=tmp_path)
    assert done.code == 0 and f"--save '{name}'" in (tmp_path / "run" / "run.sh").read_text()


def test_the_largest_that_fits_is_also_given_for_the_global_batch_as_it_is(tmp_path):
    words = ("conf=nam56r_native_dp", "fit=micro_batch_size")
    done = warm(*words, cwd=tmp_path, module="nam_megatron.budget.__main__")
    lines = done.out.splitlines()
    assert done.code == 0
    if "with global batch" in done.out:
        kept = next(line for line in lines if line.endswith("with the global batch of 64 as it is"))
        best, kept = (int(re.match(r"schedule.micro_batch_size=(\d+):", line)[1]) for line in (lines[0], kept))
        assert kept <= best and 64 % kept == 0


def test_the_kept_batch_is_the_largest_divisor_that_fits():
    from nam_megatron.budget import search
    from nam_megatron.recipe import load

    recipe = load("nam56r_native_dp", ["cluster=h200_2", "schedule.global_batch_size=48"])
    free, kept = (search.largest(recipe, "schedule.micro_batch_size", keep=keep).best for keep in (False, True))
    assert not kept.note and 48 % (2 * kept.value) == 0 and kept.value <= free.value
    assert all(
        search.attempt(recipe, "schedule.micro_batch_size", v).note
        for v in range(kept.value + 1, free.value + 1)
        if 48 % (2 * v)
    )


def interrupted(words: list[str], after: float, tmp_path: Path) -> tuple[int, str, float]:
    """A program that gets a Ctrl-C, alone, so many seconds after its start: its exit code, its words, and how long it took to end."""
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=REPO,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, said = process.communicate(timeout=600)
        return process.returncode, said, time.monotonic() - begun


@pytest.mark.few(4)
@pytest.mark.parametrize("module", ["nam_megatron.translate", "nam_megatron.verify", "nam_megatron.budget", "launch"])
@pytest.mark.parametrize("after", [0.08, 0.15, 0.25, 0.4])
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(tmp_path, module, after):
    code, said, _ = interrupted(
        [module, *(["show"] if module == "launch" else []), "conf=nam56r_smoke"], after, tmp_path
    )
    # Before a line of ours but the packages' first import, Python ends as it does without us.
    early = "KeyboardInterrupt" in said and not re.search(r'/(nam_megatron|launch)/[\w/]+(?<!__init__)\.py"', said)
    assert early or (code in (130, -signal.SIGINT, 0) and "Traceback" not in said), said


IN_A_CALLBACK = """
import os, signal, sys, time, weakref
sys.argv = ["-m"]
import nam_megatron

class Thing:
    pass

def called(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)

thing = Thing()
kept = weakref.ref(thing, called)
del thing
time.sleep(20)
print("went on")
"""


def test_ctrl_c_in_a_callback_is_not_lost():
    """Python prints a traceback of what such a callback raises, and goes on; imports have one for each module."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, cwd=REPO, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")


@pytest.mark.parametrize(
    "line, way",
    [
        ("nam_megatron.translate conf=nam56r_smoke", "`uv sync` makes an environment"),
        ("nam_megatron.data tokenizer out README.md --entries 300", "`uv sync --inexact --extra data` adds"),
    ],
)
def test_a_python_without_the_packages_is_told_where_they_are(line, way):
    words = [sys.executable, "-S", "-m", *line.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not installed\n\nhint: " in done.stderr and way in done.stderr
    assert "Traceback" not in done.stderr


MADE_AN_ERROR = """
import os, signal, sys
sys.argv = ["-m", "conf=nam56r_smoke"]
from nam_megatron import app

def composed(*words, **more):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 10)
    except KeyboardInterrupt:
        pass
    raise app.OmegaConfBaseException

app.compose.compose = composed
app.run("translate", (), None)
"""


def test_ctrl_c_of_which_a_library_made_an_error_of_its_own_is_still_said_as_what_it_is(tmp_path):
    done = subprocess.run([sys.executable, "-c", MADE_AN_ERROR], capture_output=True, text=True, cwd=REPO, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_what_a_config_says_moves_no_cursor(tmp_path):
    published = yaml.safe_load((REPO / "tests" / "hf_configs.yaml").read_text())["llama_3_1_8b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(published | {"strange\x1b[2J": 1}))
    done = warm(f"conf={tmp_path}", cwd=tmp_path)
    assert "strange\N{REPLACEMENT CHARACTER}[2J" in done.err and "\x1b" not in done.err
    (tmp_path / "config.json").write_text(json.dumps(published | {"hidden_act": "x\x1b[2J\u202e"}))
    done = warm(f"conf={tmp_path}", cwd=tmp_path)
    assert done.code == 2 and "x\N{REPLACEMENT CHARACTER}[2J" in done.err and not {"\x1b", "\u202e"} & {*done.err}


def test_a_clock_of_no_time_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        finish(Mock(side_effect=OverflowError("timestamp too large to convert to C _PyTime_t")))
    assert left.value.code == 2 and capsys.readouterr().err.startswith("error: the clock of this host")
    with pytest.raises(OverflowError):  # of ours
        finish(Mock(side_effect=OverflowError("int too large to convert to float")))


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    done = warm("--config-dir", str(tmp_path / "loop"), "conf=nam56r_smoke", cwd=tmp_path)
    assert done.code == 2 and done.err.startswith("error: Symlink loop"), done.err


@pytest.mark.slow
def test_verify_ends_at_a_ctrl_c_that_reaches_it_alone(tmp_path):
    """Its second process is importing Megatron then: it is not waited for, and not left behind."""
    words = [sys.executable, "-m", "nam_megatron.verify", "conf=nam56r_smoke"]
    with subprocess.Popen(
        words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not (
            second := [p for p in Path("/proc").iterdir() if p.name.isdecimal() and _is_oracle_of(p, process.pid)]
        ):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=600)
    assert (process.returncode, out, said) == (130, "", "interrupted\n")
    assert not any(b"runtime.oracle" in _words(p) for p in second)


def _is_oracle_of(process: Path, parent: int) -> bool:
    with contextlib.suppress(OSError):
        return b"runtime.oracle" in _words(process) and f"\nPPid:\t{parent}\n" in (process / "status").read_text()
    return False


def _words(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
