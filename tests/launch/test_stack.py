"""The lock against the project and against what is installed; imports that fail, hang and crash."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from launch.host import patch, patches, stack
from launch.record import compare
from launch.record.redact import Redactor
from nam_megatron import packages
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

REPO = Path(__file__).parents[2]
LOCK = stack.load()
GOOD = {p.name: p.version for p in LOCK.packages}
TORCH = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": 91900, "nccl": "2.28.9", "triton": "3.6.0"}
LOADED = {p.module: {"ok": True} for p in LOCK.packages if p.module} | {"torch": TORCH}


def failures(installed=GOOD, imported=LOADED):
    return [(f.name, f.message) for f in stack.findings(LOCK, installed, imported) if f.level == "fail"]


def test_the_lock_is_what_the_project_asks_of_a_training_host():
    asked = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    pinned = {name: version for name, _, version in (line.partition("==") for line in asked) if version}
    assert {p.name: p.version for p in LOCK.packages if p.source != "torch"} == pinned


QUACK, FLASH = "execution.moe.expert_gemm=quack", "precision.attention_kernels=flash_attention_4"


@pytest.mark.parametrize(
    ("extra", "tried", "hint"),
    [("quack", packages.QUACK, packages.INSTALL), ("flash", packages.FLASH_PACKAGES, packages.FLASH_INSTALL)],
)
def test_an_extra_is_what_its_hint_installs(extra, tried, hint):
    asked = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert {word.partition("==")[0].partition("[")[0]: word.partition("==")[2] for word in asked} == tried
    said = hint.split("`")[1]
    assert said.startswith(f"{packages.PIP} install torch=={GOOD['torch']} ")
    assert shlex.split(said.partition(" install ")[2])[1:] == asked


def test_the_installer_is_that_of_the_environment():
    assert packages.installer(lambda name: name == "pip") == "pip"
    assert packages.installer(lambda name: None) == "uv pip"
    assert packages.installer() == packages.PIP


@pytest.mark.parametrize(
    ("words", "installed", "told"),
    [
        ((), {}, []),
        ((QUACK,), {}, ["quack-kernels is not installed", "nvidia-cutlass-dsl is not installed"]),
        ((QUACK,), packages.QUACK | {"quack-kernels": "0.7.0"}, ["quack-kernels is 0.7.0"]),
        ((QUACK,), packages.QUACK, []),
        ((FLASH,), packages.QUACK, ["flash-attn-4 is not installed"]),
        ((FLASH,), packages.FLASH_PACKAGES | {"flash-attn-4": "4.0.0b29"}, ["flash-attn-4 is 4.0.0b29"]),
        ((QUACK, FLASH), {}, [f"{name} is not installed" for name in packages.FLASH_PACKAGES]),
        ((QUACK, FLASH), packages.FLASH_PACKAGES, []),
    ],
)
def test_what_a_recipe_asks_beside_the_lock(words, installed, told):
    locked = dict.fromkeys(p.name for p in LOCK.packages)
    found = list(stack.asked(translate(load("nam56r_fused", words)).plan, locked | installed))
    assert [f.level for f in found] == ["fail"] * len(told) and all(f.hint for f in found)
    assert all(f.message.startswith(words) for f, words in zip(found, told, strict=True))


def test_every_package_that_a_plan_needs_is_asked_for(monkeypatch):
    """One that the lock has is compared with it; another one is named with the keys that need it."""
    here: dict[str, str] = {}
    monkeypatch.setattr(packages, "installed", here.get)
    monkeypatch.setattr(importlib.util, "find_spec", here.get)
    tracked = [f"feature.tracking.{word}" for word in ("tensorboard=/t", "mlflow=/m", "mlflow_experiment=e")]
    plan = translate(load("qwen3_next_80b_a3b", tracked)).plan
    needed = {need.name for need in plan.packages}
    assert needed >= {"flash-linear-attention", "tensorboard", "mlflow"}
    found = list(stack.asked(plan, {"mamba-ssm": None}))
    assert {f.message.partition(" is not installed, and ")[0] for f in found} == needed - {"mamba-ssm"}
    assert all(f.level == "fail" and f.message.endswith(" needs it") and f.hint for f in found)
    here["mlflow"] = "the module, of mlflow-skinny"
    assert "mlflow" not in {f.message.partition(" is")[0] for f in stack.asked(plan, {})}
    here |= dict.fromkeys(needed, "1")
    assert list(stack.asked(plan, {})) == []


@pytest.mark.parametrize(
    ("found", "value", "refused"),
    [("4.0.0b36", "1", True), ("4.0.0b36", "0", False), ("4.0.0b36", None, False), (None, "1", False)],
)
def test_transformer_engine_is_not_told_to_take_flash_attention_4(found, value, refused):
    said = [p.hint for p in packages.flash_attention(found, {} if value is None else {"NVTE_FLASH_ATTN_V4": value})]
    assert bool(said) is refused and all("NVTE_FLASH_ATTN_V4=0" in hint for hint in said)


def test_what_torch_brings_is_what_torch_asks_for():
    asked = {}
    for line in importlib.metadata.requires("torch"):
        wanted = Requirement(line)
        asked[wanted.name] = str(wanted.specifier).removeprefix("==")
    for p in LOCK.packages:
        if p.source == "torch":
            assert asked[p.name].split(";")[0] == p.version, p.name


def test_a_host_as_locked_passes():
    found = list(stack.findings(LOCK, GOOD, LOADED))
    assert [(f.name, f.level) for f in found] == [("torch", "ok"), ("lock", "ok"), ("extensions", "ok")]


@pytest.mark.parametrize(
    ("installed", "imported", "said"),
    [
        ({"torch": "2.10.0"}, {}, "torch is 2.10.0, and the lock says 2.11.0"),
        ({"torch": None}, {}, "torch is not installed, and the lock says 2.11.0"),
        ({}, {"torch": TORCH | {"cuda": "12.8"}}, "torch 2.11.0+cu130 is built for CUDA 12.8, and the lock says 13.0"),
        ({}, {"torch": TORCH | {"cuda": None}}, "torch 2.11.0+cu130 is built for CUDA None, and the lock says 13.0"),
        ({}, {"torch": {"error": "OSError: libcudart"}}, "torch cannot be imported: OSError: libcudart"),
    ],
)
def test_a_replaced_torch_is_the_first_error_of_all(installed, imported, said):
    broken = {"causal_conv1d": {"error": "ImportError: undefined symbol: _ZN3c10"}}
    found = failures(GOOD | {"mamba-ssm": "1.0"} | installed, LOADED | broken | imported)
    assert found[0] == ("torch", said) and [name for name, _ in found[1:]] == ["lock", "extensions"]


def test_an_extension_for_another_torch_is_told_from_a_missing_one():
    imported = LOADED | {
        "causal_conv1d": {"error": "ImportError: x.so: undefined symbol: _ZN3c105ErrorC2E"},
        "mamba_ssm.ops.triton.ssd_combined": {"error": "ModuleNotFoundError: No module named 'mamba_ssm'"},
    }
    hints = [f.hint for f in stack.findings(LOCK, GOOD, imported) if f.level == "fail"]
    assert hints[0].startswith("built for another torch") and not hints[1].startswith("built")


def test_imports_that_fail_hang_or_crash_are_told_apart_and_bounded(tmp_path):
    for name, body in {
        "fails": "raise ImportError('lib.so: undefined symbol: _ZN3c10')",
        "hangs": "import time; time.sleep(600)",
        "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "leaves": "raise SystemExit(0)",
        "talks": "print('{')",
    }.items():
        (tmp_path / f"{name}.py").write_text(body + "\n")
    # A torch that costs nothing to import.
    (tmp_path / "torch.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def said(module, seconds=20):
        return stack.probed(module, environ, seconds)

    assert said("fails") == {"error": "ImportError: lib.so: undefined symbol: _ZN3c10"}
    assert said("hangs", 1) == {"error": "no answer within 1 s"}
    assert said("crashes")["error"] == "exit code -11"
    assert said("leaves") == {"error": "SystemExit: 0"}
    assert said("talks") == {"ok": True}
    assert "No module named 'absent'" in said("absent")["error"]


def test_the_installed_torch_says_what_the_lock_says():
    said = stack.probed("torch", os.environ, 120)
    assert {k: said[k] for k in ("torch", "cuda", "triton", "nccl", "cudnn")} == TORCH


def test_this_host_has_the_python_packages_and_not_the_extensions():
    found = stack.versions(LOCK)
    assert found["megatron-core"] == "0.19.2" and found["transformer-engine-torch"] is None
    assert ("lock", "transformer-engine-torch is not installed, and the lock says 2.20.2") in failures(found)


def test_what_python_runs_at_its_start_is_known_by_its_code(tmp_path, monkeypatch):
    """A sitecustomize of three lines multiplies the loss, and every version is the same."""
    monkeypatch.setattr(stack.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(stack.site, "ENABLE_USER_SITE", False)
    for name in ("sitecustomize", "usercustomize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "editable.pth").write_text("/some/checkout\n")
    assert stack.versions(LOCK)["startup"] is None
    (tmp_path / "hook.pth").write_text("import hook; hook.go()\n")
    seen = [stack.startup()]
    for name in ("hook", "sitecustomize"):
        (file := tmp_path / f"{name}.py").write_text("1")
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(file)))
        seen.append(stack.startup())
        file.write_text("2")
        seen.append(stack.startup())
    packed = SimpleNamespace(__file__=str(tmp_path / "packed.zip" / "usercustomize.py"))
    monkeypatch.setitem(sys.modules, "usercustomize", packed)
    assert stack.startup() == seen[-1], "what is no file of its own is passed over"
    (tmp_path / "folder.pth").mkdir()
    monkeypatch.setitem(sys.modules, "hook", SimpleNamespace(__file__=str(tmp_path)))
    (tmp_path / "hook.pth").write_text("import hook.deep; hook.deep.go()\n")
    for text in "12":
        (tmp_path / "deep.py").write_text(text)
        monkeypatch.setitem(sys.modules, "hook.deep", SimpleNamespace(__file__=str(tmp_path / "deep.py")))
        seen.append(stack.startup())
    assert Redactor({}).tree({"startup": seen[-1]}) == {"startup": seen[-1]}
    assert len(set(seen)) == len(seen) and compare.executes("host.versions.startup") is False


@pytest.mark.parametrize(("name", "env"), [("nam_megatron.a", {}), ("megatron.core.a", {"PYTHONNODEBUGRANGES": "1"})])
def test_code_that_changed_without_a_new_time_is_told(name, env, tmp_path, monkeypatch):
    """Python itself runs the old one. A link changes no code, nor does it if what was compiled has no columns."""
    path, said = tmp_path / f"{name.replace('.', '/')}.py", []
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").write_text("")
    monkeypatch.setattr(patches, "installed", lambda queue: tmp_path)

    def runs() -> str:
        return subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=tmp_path, env=env, capture_output=True
        ).stdout.decode()

    for text, when in (("1", 1e9), ("2", 1e9), ("3", 2e9)):
        path.write_text(f"print({text})\n")
        os.utime(path, (when, when))
        shown = runs()
        os.link(path, tmp_path / text)
        said.append((shown, [f.message for f in (*stack.bytecode(tmp_path), *stack.bytecode_of_megatron())]))
    assert [shown for shown, _ in said] == ["1\n", "1\n", "3\n"]
    assert [len(found) for _, found in said] == [0, 1, 0] and f"`{path.relative_to(tmp_path)}` changed" in said[1][1][0]


def test_which_megatron_would_be_imported(queue, unpacked, monkeypatch):
    monkeypatch.setattr(patches, "installed", lambda queue: unpacked)
    assert stack.megatron()[1] == "pristine"
    (unpacked / "megatron/core/mine.py").write_text("")
    finding, state = stack.megatron()
    assert (finding.level, state) == ("fail", "foreign")
    (unpacked / "megatron/core/mine.py").unlink()
    patch.apply(queue, unpacked)
    finding, state = stack.megatron()
    assert (finding.level, state) == ("ok", "patched")


def test_the_steps_are_a_shell_script_in_the_order_of_the_lock():
    text = stack.steps(LOCK)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    order = [word.partition("==")[0] for line in lines if "pip" in line for word in line[-1:]]
    assert [n for n in order if n in GOOD] == [p.name for p in LOCK.packages if p.source != "torch"]
    for line in lines:
        # Whatever is resolved with its dependencies names torch, so that pip may not replace it.
        assert "--no-deps" in line or f"torch=={GOOD['torch']}" in line or "pip" not in line
    for p in LOCK.packages:
        if p.source == "build":
            (line,) = (line for line in lines if line[-1].startswith(p.name + "=="))
            assert line[0] == p.env and {"--no-build-isolation", "--no-binary"} <= set(line)


def simulated(tmp_path: Path, text: str | None = None, **said: str) -> subprocess.CompletedProcess:
    """The steps (or `text`) with programs that say what they are told to; `""`: there is no such program."""
    said = {
        "gcc": "echo 13.3.0",
        "g++": "cat > /dev/null",
        "nvcc": "echo release 13.0, V13.0.1",
        "pip": 'echo "pip $@"',
    } | said
    said |= {"python": 'echo "python $@"'} | ({"python": said["python"]} if "python" in said else {})
    for name in ("grep", "printf", "cat", "sh", "ls", "ln", "mkdir", "touch"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(shutil.which(name))
    for name, script in said.items():
        if script:
            (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
            (tmp_path / name).chmod(0o755)
    bash = [shutil.which("bash"), "-c", text or stack.steps(LOCK)]
    return subprocess.run(bash, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)


def test_the_steps_install_what_the_launcher_itself_needs(tmp_path):
    done = simulated(tmp_path)
    assert done.returncode == 0, done.stderr
    own = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(f" {need} " in done.stdout or f" {need}\n" in done.stdout for need in own)
    assert done.stdout.splitlines()[-1] == "python -m launch patch apply megatron-core"
    assert done.stdout.splitlines()[-2].count("assert") == 2  # the ABI, after everything else was installed


def test_what_is_built_once_is_kept_for_the_next_host(tmp_path):
    kept = tmp_path / "kept"
    text = stack.steps(LOCK, wheels=kept)
    pip = """
echo "pip $*"
case "$1 $*" in wheel*)
  for word; do case "$before" in -w) folder=$word;; esac; before=$word; done
  mkdir -p "$folder"; name=${before%%==*}
  case $name in transformer-engine-torch) name=transformer_engine_torch;; causal-conv1d) name=causal_conv1d;; *) name=mamba_ssm;; esac
  : > "$folder/$name-${before##*==}-cp312-linux.whl";;
esac"""
    built = {p.name for p in LOCK.packages if p.source == "build"}
    first, second = (simulated(tmp_path, text, pip=pip, uname="echo x86_64") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (
        sum("pip wheel" in line for line in first.stdout.splitlines()) == len(built) == len(list(kept.rglob("*.whl")))
    )
    assert "pip wheel" not in second.stdout and "--no-binary" not in second.stdout
    assert all(f"{wheel.name}" in second.stdout for wheel in kept.rglob("*.whl"))
    assert {wheel.parent.name for wheel in kept.rglob("*.whl")} == {"torch2.11.0-cu13.0-x86_64"}


def test_the_layout_puts_everything_that_grows_on_the_data_disk(tmp_path):
    disk, root = tmp_path / "disk", tmp_path / "root"
    root.mkdir()
    lines = [line.replace(" /$name", f" {root}/$name") for line in stack.layout(disk)]
    venv = 'python() { mkdir -p "$3/bin"; : > "$3/bin/activate"; }'
    said = 'echo "$UV_CACHE_DIR $PIP_CACHE_DIR $TMPDIR $UV_PROJECT_ENVIRONMENT"'
    for _ in range(2):  # a second time it changes nothing
        done = simulated(tmp_path, "\n".join(["set -eu", venv, *lines, said]))
        assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(disk) and Path(path).is_dir() for path in done.stdout.split())
    assert {p.name: p.resolve() for p in root.iterdir()} == {name: disk / name for name in ("durable", "scratch")}


def test_every_package_that_is_left_out_says_why_and_none_is_in():
    assert {"torchao", "qoptim", "dualpipe", "flash-attn", "nsight-systems"} == set(LOCK.left_out)
    assert not LOCK.left_out.keys() & GOOD.keys()
    text = stack.steps(LOCK, also=("flash",))
    assert all(f"# left out: {name}: {why}" in text for name, why in LOCK.left_out.items())
    assert any(line.startswith("pip install") and "flash-attn-4==" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"python": "exit 1"}, "error: the active environment has no pip"),
        ({"nvcc": ""}, "error: no nvcc"),
        ({"g++": ""}, "error: no g++"),
        ({"nvcc": "echo release 12.8, V12.8.93"}, "error: nvcc is not of CUDA 13.0"),
        ({"gcc": "echo 16.1.0"}, "error: CUDA 13.0 takes no GCC from 16 on"),
        ({"g++": "echo nccl.h: No such file >&2; exit 1"}, "nccl.h: No such file"),
    ],
)
def test_what_a_build_lacks_is_said_before_it(tmp_path, said, error):
    done = simulated(tmp_path, **said)
    assert done.returncode != 0 and error in done.stderr
    assert "transformer-engine" not in done.stdout


def test_a_step_that_replaces_torch_stops_the_script(tmp_path):
    done = simulated(tmp_path, python='case "$*" in *mamba_ssm*) exit 1;; esac')
    assert done.returncode != 0 and "mamba-ssm" in done.stdout


def test_the_command(capsys):
    assert stack.command([], {}) == 0
    assert capsys.readouterr().out == stack.steps(LOCK)
    with pytest.raises(Refused, match="takes no names"):
        stack.command(["torch"], {})
    for option, said in (({"wheels": "here"}, "no absolute path"), ({"also": "apex"}, "no extra of the stack")):
        with pytest.raises(Refused, match=said):
            stack.command([], option)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "it has no `torch_cuda`"),
        ('torch_cuda = "1"\n[[package]]\nname = "torch"', "it has no `version`"),
        ('torch_cuda = "13.0"\npackage = []', "first package must be torch"),
        (
            'torch_cuda = "13.0"\n[[package]]\nname = "numpy"\nversion = "2"\nsource = "wheel"',
            "first package must be torch",
        ),
        (
            'torch_cuda = "13.0"\n[[package]]\nname = "torch"\nversion = "2"\nsource = "magic"',
            "source of torch is none of",
        ),
        (
            'torch_cuda = 13\n[[package]]\nname = "torch"\nversion = "2"\nsource = "wheel"',
            "13 stands where a word should",
        ),
        (
            'torch_cuda = "1"\n[[package]]\nname = "torch"\nversion = "2"\nsource = "wheel"\nhash = "x"',
            "a package has no `hash`",
        ),
        ('torch_cuda = "1"\npackage = ["torch"]', "'torch' stands where a package should"),
        ("[", "no lock file"),
    ],
)
def test_a_damaged_lock_is_refused(tmp_path, change, said):
    path = tmp_path / "lock.toml"
    path.write_text(change)
    with pytest.raises(Refused) as refused:
        stack.load(path)
    assert re.search(said, refused.value.render()) and "Traceback" not in refused.value.render()


def test_another_lock_is_compared_as_ones_own(tmp_path):
    path = tmp_path / "lock.toml"
    path.write_text(
        'torch_cuda = "12.8"\n[[package]]\nname = "torch"\nversion = "2.11.0"\nsource = "wheel"\nmodule = "torch"\n'
    )
    lock = stack.load(path)
    assert lock == replace(lock, torch_cuda="12.8") and len(lock.packages) == 1
    (found,) = (f for f in stack.findings(lock, {"torch": "2.11.0"}, LOADED) if f.level == "fail")
    assert "built for CUDA 13.0, and the lock says 12.8" in found.message


def test_the_probe_counts_nvlinks():
    probe = subprocess.run([sys.executable, "-P", str(stack.PROBE), "nvlinks"], capture_output=True, text=True)
    assert probe.returncode == 0  # with or without nvidia-ml-py: one line of JSON

    from launch.host.probe import nvlinks

    class Nvml:
        NVML_NVLINK_MAX_LINKS = 18
        NVMLError = RuntimeError
        open = 0

        def nvmlInit(self):
            self.open += 1

        def nvmlShutdown(self):
            self.open -= 1

        def nvmlDeviceGetCount(self):
            return 3

        def nvmlDeviceGetHandleByIndex(self, index):
            return index

        def nvmlDeviceGetNvLinkState(self, handle, link):
            if handle == 2 or (handle == 1 and link > 15):
                raise self.NVMLError("not supported")
            return 1 if (handle, link) != (1, 3) else 0

    nvml = Nvml()
    assert nvlinks(nvml) == {"0": 18, "1": 15, "2": None} and nvml.open == 0
