"""What the doctor says of other people's machines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nam_megatron import nemo
from nam_megatron.errors import Refused
from nam_megatron.nemo import doctor
from nam_megatron.packages import adding

GOOD = {
    "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "hydra-core": "1.3.8", "omegaconf": "2.3.1", "transformers": "5.12.1",
    "transformer-engine-torch": "2.20.2", "nvidia-resiliency-ext": "0.6.0", "nvidia-modelopt": "0.44.0", "datasets": "5.0.1", "diffusers":
    "0.39.0", "megatron-energon": "7.4.0", "multi-storage-client": "0.51.0", "peft": "0.19.1", "nemo-toolkit": "3.0.0",
}  # fmt: skip


def told(monkeypatch, packages: dict[str, str], python: tuple = (3, 12, 3)) -> dict[str, doctor.Finding]:
    """Findings by name on a machine with these packages."""
    monkeypatch.setattr(doctor.packages, "installed", packages.get)
    monkeypatch.setattr(sys, "version_info", python)
    found = list(doctor.findings())
    assert [f.fatal for f in found] == sorted((f.fatal for f in found), reverse=True), "the fatal ones come first"
    return {f.name: f for f in found}


def test_nothing_to_say(monkeypatch):
    assert told(monkeypatch, GOOD) == {}


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("megatron-core", "0.13.1", "falls back to megatron-core 0.13"),
        ("megatron-bridge", None, "is missing"),
        ("hydra-core", "1.3.2", "1.3.2"),
        ("hydra-core", "1.3.0", "omegaconf 2.4 drags it back"),
        ("omegaconf", "2.4.0", "is 2.4.0"),
        ("transformers", "5.23.0", "is 5.23.0"),
        ("transformer-engine-torch", None, "alone is empty"),
        *(("nvidia-resiliency-ext", version, "Bridge's pretrain imports it") for version in (None, "0.5.3", "0.7.0")),
        ("nvidia-modelopt", None, "is missing"),
        ("datasets", None, "is missing"),
        ("diffusers", None, "is missing"),
        ("megatron-energon", None, "is missing"),
    ],
)
def test_a_package_that_is_missing_or_another(package, version, said, monkeypatch):
    packages = {k: v for k, v in GOOD.items() if k != package} | ({package: version} if version else {})
    found = told(monkeypatch, packages)
    assert list(found) == [package] and found[package].fatal
    assert said in found[package].message
    assert "install" in found[package].hint


@pytest.mark.parametrize("version", ["0.6.0", "0.5.1"])
def test_another_bridge_is_refused_before_it_is_imported(version, monkeypatch):
    """0.6.0 would be used with fields of another version, 0.5.1 die in an import."""
    told(monkeypatch, GOOD | {"megatron-bridge": version})
    with pytest.raises(Refused, match=f"megatron-bridge is {version}, and ==0.6.2 is needed"):
        nemo.recipe("nam56r_smoke")


def test_the_documented_steps_and_the_hint_install_below_glibc_2_39():
    """uv itself, asked what it would do on such a system."""
    text = (Path(__file__).parents[2] / "docs" / "nemo.md").read_text()
    hint = adding("nemo").strip("`")
    for line in [*re.findall(r"^(uv sync .*--extra nemo.*)$", text, re.MULTILINE), hint]:
        dry = ["--dry-run", "--frozen", "--offline", "--python-platform", "x86_64-manylinux_2_36"]
        words = [*re.split("#|&&", line)[0].split(), *dry]
        done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert hint in text and doctor.BY_HAND in text


def test_another_python(monkeypatch):
    assert told(monkeypatch, GOOD, python=(3, 13, 0))["python"].fatal


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ({"nvidia-cudnn-frontend": "1.26.0"}, "cudnn-frontend"),
        ({"nemo-run": "0.11.1", "leptonai": "0.47.1"}, "leptonai"),
        ({"nemo-toolkit": "2.6.0"}, "nemo-toolkit"),
    ],
)
def test_what_somebody_will_stumble_over(packages, name, monkeypatch):
    found = told(monkeypatch, GOOD | packages)
    assert list(found) == [name] and not found[name].fatal


def test_what_goes_well_together(monkeypatch):
    together = {"nvidia-cudnn-frontend": "1.29.0", "nemo-run": "0.11.1", "leptonai": "0.27.3"}
    assert told(monkeypatch, GOOD | together) == {}
    older = {"nvidia-cudnn-frontend": "1.26.0", "transformer-engine-torch": "2.18.0"}
    assert told(monkeypatch, GOOD | older) == {}
