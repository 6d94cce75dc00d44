"""nam doctor: what is installed, and which command needs what that is not"""

import platform
import sys

from nam_megatron import __version__, installed
from nam_megatron.errors import FINDINGS, OK, Refused, finish, page
from nam_megatron.packages import adding
from nam_megatron.packages import installed as version

# Commands, the distributions that they import, and the extra of pyproject.toml that brings these.
NEEDS = (
    ("translate, budget, lint, list, card, launch show", ("hydra-core", "pydantic", "rich"), None),
    (
        "verify, prove, launch run cluster=cpu",
        ("torch", "megatron-core", "emerging-optimizers", "einops", "psutil"),
        "megatron",
    ),
    ("data", ("torch", "megatron-core", "tokenizers", "pyarrow"), "data"),
    ("hf, generate", ("torch", "transformers", "safetensors", "tokenizers"), "hf"),
    ("hf evaluate", ("lm-eval", "accelerate"), "eval"),
    ("budget plot=FILE", ("matplotlib",), "plot"),
    ("launch run on a GPU", ("torch", "megatron-core", "transformer-engine", "mamba-ssm", "causal-conv1d"), "train"),
    ("nemo dump; `nam nemo doctor` for training", ("megatron-bridge", "megatron-core"), "nemo"),
)


def text() -> str:
    lines = [f"nam_megatron {__version__}, Python {platform.python_version()} ({sys.executable})", f"{_megatron()}", ""]
    width = max(len(commands) for commands, _, _ in NEEDS)
    for commands, needed, extra in NEEDS:
        lacking = [name for name in needed if version(name) is None]
        said = "ready" if not lacking else f"needs {', '.join(lacking)}: {adding(extra) if extra else 'uv sync'}"
        lines.append(f"{commands:<{width}}  {said}")
    return "\n".join(lines) + "\n"


def _megatron() -> str:
    try:
        found = installed.stack()
        return str(found) if found.megatron_core else "no Megatron"
    except Refused as refused:
        return refused.render().rstrip()


def command() -> int:
    code = page(__doc__, text)
    return OK if all(version(name) for name in NEEDS[0][1]) else max(code, FINDINGS)


if __name__ == "__main__":
    finish(command)
