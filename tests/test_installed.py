"""Whatever speaks of a Megatron has asked which one is here: another is refused by its name, in every command, before it is imported."""

import json
import os
import subprocess
import sys

import pytest
from presets import EMPTY_SET, lowered

from nam_megatron import installed, targets
from nam_megatron.errors import Refused
from nam_megatron.targets import current
from nam_megatron.verify import verify

INFO = 'MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = "{}"\nraise ImportError("nobody may import this")\n'


def another(folder, version, more="", training=True):
    """A Megatron that only says which it is, and where it was put."""
    for package in ("core", "training") if training else ("core",):
        (folder / "megatron" / package).mkdir(parents=True)
        (folder / "megatron" / package / "__init__.py").write_text("raise ImportError('nobody may import this')\n")
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(*version.split("."), more))
    return folder


def command(folder, *words):
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    return another(tmp_path_factory.mktemp("older"), "0.18.2")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        "-m nam_megatron.verify conf=nam56r_smoke",
        "-m nam_megatron.prove conf=nam56r_smoke",
        "-m nam_megatron.prove.every --presets nam56r_smoke --overlays none",
        "-m nam_megatron.nemo dump conf=nam56r_smoke",
        "-m nam_megatron.data build out in --tokenizer t",
        "-m nam_megatron.data check {set}",
        "-c from+nam_megatron.runtime.oracle+import+Oracle;Oracle().__enter__()",
        "-c from+nam_megatron.nemo+import+recipe;recipe('nam56r_smoke')",
    ],
)
def test_no_command_speaks_of_a_megatron_that_is_not_there(older, words):
    (older / "manifest.json").write_text(json.dumps(EMPTY_SET))
    done = command(older, *(word.replace("+", " ").replace("{set}", str(older)) for word in words.split()))
    said = done.stderr.strip().splitlines()
    assert done.returncode, done.stdout
    assert "Megatron is 0.18.2" in done.stderr and str(older) in done.stderr and "0.19.2" in done.stderr
    if "-c" not in words:
        assert done.returncode == 2 and "Traceback" not in done.stderr and said[-1].startswith("hint: ")


@pytest.mark.parametrize(("how", "env"), [(("-O",), {}), ((), {"PYTHONOPTIMIZE": "1"})])
def test_a_python_without_assertions_is_refused(how, env):
    words = [*how, "-c", "from nam_megatron import installed; print(installed.ask())"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ | env, check=False)
    assert "what Megatron asserts of a model would not be checked" in done.stderr and not done.stdout


def test_the_library_asks_like_the_commands(monkeypatch, tmp_path):
    from nam_megatron.prove.proof import Bench
    from nam_megatron.recipe import load
    from nam_megatron.runtime.stack import hybrid_stack_spec

    monkeypatch.setattr(installed, "_megatron", lambda: "0.19.0")
    for use in (
        lambda: verify(lowered("nam56r_smoke"), None),
        lambda: Bench(load("nam56r_smoke")),
        lambda: hybrid_stack_spec(lowered("nam56r_smoke").plan, None),
    ):
        with pytest.raises(Refused, match=r"Megatron is 0\.19\.0"):
            use()


def test_a_second_target_is_not_judged_by_the_first_ones_megatron(monkeypatch):
    """A target that is added beside the one that is here is the newest, of which commands speak."""
    from dataclasses import replace

    newer = replace(current(), name="v0_20", pin="0.20.0")
    monkeypatch.setattr(targets, "NAMES", (*targets.NAMES, "v0_20"))
    monkeypatch.setattr(targets, "target", lambda name: newer)
    with pytest.raises(Refused, match=r"0\.19\.2 .* of 0\.20\.0"):
        verify(lowered("nam56r_smoke", "model.init_std=0.0201"), None)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "training", "said"),
    [
        ("", False, "megatron.training is `"),  # the checkout's core, and the package's training
        ("rc1", True, "Megatron is 0.19.2rc1"),
        ("", True, None),
    ],
)
def test_what_python_finds_first_is_what_is_asked(tmp_path, monkeypatch, more, training, said):
    another(tmp_path, "0.19.2", more, training)
    words = "import nam_megatron.installed as i; print(i.ask())"
    done = command(tmp_path, "-c", words)
    assert (said in done.stderr) if said else (done.stdout == "Megatron 0.19.2, no Transformer Engine\n"), done.stderr


def test_a_megatron_that_does_not_say_its_version(tmp_path):
    info = another(tmp_path, "0.19.2") / "megatron" / "core" / "package_info.py"
    for text in ("MAJOR = 0\n", "MAJOR = (\n", "MAJOR, MINOR = 0, 19\n"):
        info.write_text(text)
        done = command(tmp_path, "-m", "nam_megatron.runtime.dump")  # which speaks of any version
        assert done.returncode == 2 and "does not say of which version it is" in done.stderr, done.stderr


@pytest.mark.slow
def test_what_was_asked_is_printed_and_stored():
    here = {"megatron_core": current().pin, "transformer_engine": None}
    assert installed.ask().as_dict() == here
    done = command("", "-m", "nam_megatron.verify", "conf=nam56r_smoke", "format=json")
    assert here.items() <= json.loads(done.stdout).items()


@pytest.mark.parametrize(
    ("found", "engine", "refused"), [("2.20.2", True, False), ("2.5", True, True), ("2.5", False, False)]
)
def test_transformer_engine_is_asked_where_its_modules_compute(monkeypatch, found, engine, refused):
    monkeypatch.setattr(installed, "installed", lambda name: f"{found}+4ba92e3")
    if refused:
        with pytest.raises(Refused, match=r"Transformer Engine is 2\.5"):
            installed.ask(engine=engine)
    else:
        assert installed.ask(engine=engine).transformer_engine == found
