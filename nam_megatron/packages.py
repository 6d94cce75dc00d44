"""Packages beside the lock: what a recipe's own keys need of a host, and what must not be there."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nam_megatron.words.problem import Problem

QUACK_KEY = "execution.moe.expert_gemm"
QUACK = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}  # the only versions that have been tried


def installer(find: Callable[[str], object] = importlib.util.find_spec) -> str:
    """The words that install into this environment: one that uv made has no pip, and the shell's would install somewhere else."""
    return "pip" if find("pip") else "uv pip"


PIP = installer()
BASE = ("hydra", "omegaconf", "pydantic", "rich", "yaml", "antlr4")  # of a plain install
INSTALL = f"`{PIP} install torch==2.11.0 quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.8.1'` installs it"
FLASH, FLASH_CHOICE = "flash-attn-4", "NVTE_FLASH_ATTN_V4"
FLASH_KEY = "precision.attention_kernels"
FLASH_PACKAGES = {FLASH: "4.0.0b36", **QUACK}  # it is built on QuACK
FLASH_INSTALL = f"`{PIP} install torch==2.11.0 flash-attn-4==4.0.0b36 quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.8.1'` installs it"


# The extra of pyproject.toml that a command needs, by the name of its module; and that of a package which not every run of it needs.
EXTRAS = {
    "verify": "megatron", "prove": "megatron", "runtime": "megatron", "torchrun": "train", "train": "train", "data": "data", "hf": "hf",
    "generate": "hf", "nemo": "nemo",
}  # fmt: skip
OF_PACKAGES = {
    "megatron": "megatron", "transformer_engine": "train", "mamba_ssm": "train", "causal_conv1d": "train", "lm_eval": "eval",
    "accelerate": "eval", "matplotlib": "plot", "tensorboard": "tracking", "nemo_run": "nemo-run", "quack": "quack",
    "flash_attn": "flash",
}  # fmt: skip
BUILT = ("train", "nemo")  # with CUDA extensions


def missing(name: str, command: str) -> Problem:
    """What is said where a command imports a package that this environment has not.

    name: of the package, as it is imported. command: the module that was started, `nam_megatron.verify`; another one's needs are
    those of a plain install.
    """
    top = name.partition(".")[0]
    part = command.removeprefix("nam_megatron").strip(".").partition(".")[0]
    extras = [extra for extra in (EXTRAS.get(part), OF_PACKAGES.get(top)) if extra]
    if {*extras} & {"train", "data", "nemo"}:  # which have Megatron's core themselves
        extras = [extra for extra in extras if extra != "megatron"]
    here = f"this Python is `{sys.executable}`"
    if not extras or top in BASE:
        message = f"`{top}` is not installed"
        return Problem(
            message, hint=f"{here}; `uv sync` makes an environment, `uv run` starts in it", law="package-missing"
        )
    hint = f"{here}; {adding(*dict.fromkeys(extras))} adds what it lacks"
    if {*extras} & {*BUILT}:
        hint += ", on a host with a GPU and the CUDA toolkit: `python -m launch stack` prints the steps"
    return Problem(f"{command or 'this'} needs `{top}`, which is not installed", hint=hint, law="package-missing")


def adding(*extras: str) -> str:
    """The words that install extras beside what is there."""
    if (Path(__file__).parent.parent / "uv.lock").is_file():
        return f"`uv sync --inexact {' '.join(f'--extra {name}' for name in extras)}`"
    if "nemo" in extras:  # an installer would take Bridge with all its needs, which contradict each other
        return "a checkout of this project and in it `uv sync --extra nemo`"
    return f"`{PIP} install 'nam_megatron[{','.join(extras)}]'`"


def installed(name: str) -> str | None:
    """The version of a package, from its metadata: nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def without_quack(find: Callable[[str], str | None]) -> Iterator[Problem]:
    """What is missing of QuACK. find: a package's version on a host, None where it is not installed."""
    for package, version in QUACK.items():
        if (found := find(package)) != version:
            message = f"{package} is {found or 'not installed'}, and QuACK's GEMMs were tried with {version} alone"
            yield Problem(message, key=QUACK_KEY, hint=f"{INSTALL}; or set `{QUACK_KEY}=torch`", law="quack-missing")


def without_flash(find: Callable[[str], str | None]) -> Iterator[Problem]:
    """What is missing of FlashAttention 4. find: as without_quack's."""
    for package, version in FLASH_PACKAGES.items():
        if (found := find(package)) != version:
            message = f"{package} is {found or 'not installed'}, and FlashAttention 4 was tried with {version} alone"
            hint = f"{FLASH_INSTALL}; or set `{FLASH_KEY}=transformer_engine`"
            yield Problem(message, key=FLASH_KEY, hint=hint, law="flash-missing")


def flash_attention(found: str | None, environ: Mapping[str, str]) -> Iterator[Problem]:
    """FlashAttention 4 that Transformer Engine (2.20) was told to take by itself. It says "no window" as (-1, 0), which from 4.0.0b30 on
    leaves a causal query nothing to see: all outputs and gradients are zero (seen on an H200 with 4.0.0b36, not with 4.0.0b29).

    found: the version of flash-attn-4, if it is installed.
    """
    if found and (value := environ.get(FLASH_CHOICE, "0")) != "0":
        message = f"{FLASH_CHOICE} is `{value}`: Transformer Engine would take {FLASH} {found} by itself, and it may give zeros"
        hint = f"set {FLASH_CHOICE}=0; `{FLASH_KEY}=flash_attention_4` calls it another way"
        yield Problem(message, hint=hint, law="flash-chosen-by-engine")
