"""What stands between this machine and NeMo's route: the traps of its packages, each as a finding with a way out.

Reads what is installed; imports nothing of it. Every finding was met with megatron-bridge 0.6.2.
"""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.version import Version

from nam_megatron import packages
from nam_megatron.targets import current

BRIDGE, TOOLKIT = "0.6.2", "3.0.0"
RESILIENCY, ENGINE = "nvidia-resiliency-ext", "transformer-engine-torch"
BY_HAND = "uv pip install --no-deps --python-platform x86_64-manylinux_2_39 nvidia-resiliency-ext==0.6.0"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as NeMo's route needs it. fatal: nothing can be trained; else somebody will stumble over it."""

    name: str
    fatal: bool
    message: str
    hint: str


def installed(name: str) -> Version | None:
    found = packages.installed(name)
    return Version(found) if found else None


def stand_in() -> None:
    """Have Bridge imported where Transformer Engine is not installed: enough for configs, not for a model (torch side)."""
    if installed(ENGINE) is None:
        from nam_megatron.nemo import engine

        engine.provide()


# What has to be there, and what happens where it is not.
NEEDED = {
    f"megatron-core=={current().pin}": "on an old glibc pip falls back to megatron-core 0.13 without a word, for its `dev` extra",
    f"megatron-bridge=={BRIDGE}": "another version has other fields",
    "hydra-core>=1.3.4,<1.4": "omegaconf 2.4 drags it back to 1.3.0; `nemo-toolkit[core]` asks for 1.3.2 at most",
    "omegaconf>=2.3,<2.4": "2.4 has no Hydra that Bridge accepts",
    "transformers>=5.8,<=5.12.1": "Bridge imports every model family it knows",
    f"{ENGINE}>=2.18": "Bridge imports it at the first line; the package `transformer-engine` alone is empty",
    "nvidia-modelopt>=0.44": "Bridge's training imports it",
    "datasets>=2.20": "Bridge's data imports it",
    "diffusers>=0.36": "Bridge imports every model family it knows",
    "megatron-energon>=7,<8": "Bridge's data imports it",
    "multi-storage-client>=0.50,<0.52": "Bridge's checkpoints import it",
    "peft>=0.18.1": "Bridge imports it",
}


def findings() -> Iterator[Finding]:
    """Everything found, the fatal ones first."""
    yield from sorted(_found(), key=lambda f: not f.fatal)


def of_another_version() -> Iterator[Finding]:
    """Whether Bridge or Megatron-Core is of a version that the container was not made for: fields would be others, or missing."""
    yield from (f for f in findings() if f.fatal and f.name in ("megatron-bridge", "megatron-core"))


def _found() -> Iterator[Finding]:
    if sys.version_info[:2] != (3, 12):
        yield Finding("python", True, f"Python {platform.python_version()}; Bridge {BRIDGE} is for 3.12", "use 3.12")
    for text, why in NEEDED.items():
        need = Requirement(text)
        found = installed(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            has = f"is {found}" if found else "is missing"
            wanted = text.removeprefix(need.name)
            yield Finding(need.name, True, f"{need.name} {has}, and {wanted} is needed: {why}", f"install `{text}`")
    yield from _resiliency()
    yield from _engine()
    yield from _toolkit()
    yield from _runners()


def _resiliency() -> Iterator[Finding]:
    found = installed(RESILIENCY)
    if found is not None and found.release[:2] == (0, 6):
        return
    has = f"is {found}, and 0.6 is needed" if found else "is missing"
    hint = f"by hand, since its only wheel is named for glibc 2.39 and its code runs from 2.32 on: `{BY_HAND}`"
    yield Finding(RESILIENCY, True, f"{RESILIENCY} {has}: Bridge's pretrain imports it", hint)


def _engine() -> Iterator[Finding]:
    engine, frontend = installed("transformer-engine-torch"), installed("nvidia-cudnn-frontend")
    if engine and engine >= Version("2.19") and frontend and frontend < Version("1.28"):
        message = f"nvidia-cudnn-frontend {frontend} beside Transformer Engine {engine}, which asks for 1.28 or newer"
        hint = "`megatron-core[dev]` pins 1.26.0: install Bridge without its dependencies, or Transformer Engine 2.18"
        yield Finding("cudnn-frontend", False, message, hint)


def _toolkit() -> Iterator[Finding]:
    found = installed("nemo-toolkit")
    if found is not None and found.major != Version(TOOLKIT).major:
        message = f"nemo-toolkit {found}: from 3.0 on it trains no language models, before it did so by itself"
        hint = f"`nemo-toolkit=={TOOLKIT}` without extras can stand beside Bridge"
        yield Finding("nemo-toolkit", False, message, hint)


def _runners() -> Iterator[Finding]:
    runner, lepton = installed("nemo-run"), installed("leptonai")
    if runner and lepton and lepton >= Version("0.28"):
        message = f"nemo-run {runner} cannot be imported with leptonai {lepton}"
        yield Finding("leptonai", False, message, "install `leptonai<0.28`")


def recorded() -> dict[str, str | None]:
    """Versions for the receipt."""
    names = ("megatron-bridge", "megatron-core", RESILIENCY, "nemo-toolkit", "nemo-run", "transformers")
    return {name: str(found) if (found := installed(name)) else None for name in names}
