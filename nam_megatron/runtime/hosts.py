"""Whether the hosts of a job are alike: what lies on their disks, what they run, and whether it is the chip of the plan (torch side)."""

import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nam_megatron.data import identity
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.events import source
from nam_megatron.recipe import Recipe
from nam_megatron.runtime import checkpoint
from nam_megatron.words.regular import closed
from nam_megatron.words.tree import tree_hash

UNLIKE = "is not the same on every host of this job"
# Variables by which libraries choose what they compute, but for where they keep something and what they print.
CHOOSING = re.compile(
    r"(?:NVTE|CUBLAS|CUBLASLT|CUDNN|PYTORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|FLA|FLASH|MAMBA|QUACK|TILELANG|CUTE_DSL|TORCH_BLAS)_"
    r"(?!\w*(?:DIR|PATH|FILE|FILENAME|HOME|THREADS)$|\w*(?:LOG|PRINT|DEBUG))"
    r"|\w*_TF32\w*_OVERRIDE$|DISABLE_ADDMM_CUDA_LT$|TORCH_COMPILE_DISABLE$"
)


def one_for_all(models: list[Any], recipe: Recipe) -> list[Any]:
    """In the form of Megatron's hooks. Raises Refused on all ranks: one has another chip than the plan's, or hosts differ."""
    found, files = [*another_chip(recipe)], None
    said: tuple[dict[str, Any], dict[str, str] | None] = {}, None
    if recipe.cluster.nodes > 1:
        with kept(found):
            files = judged()
        first, *_ = agreed(found, files)
        with kept(found):
            if checkpoint.reads() and files != first:  # the first rank has read its own; who sees the same need not
                found += (problem for folder in [*checkpoint.JUDGED] for problem in checkpoint.damage(folder))
            said = on_disk(recipe), runs() if checkpoint.reads() else None
        raise_if(differences(agreed(found, said)))
    raise_if(found)
    return models


@contextlib.contextmanager
def kept(found: list[Problem]) -> Iterator[None]:
    """What would end this rank alone, while all others wait for it, is told where they meet."""
    try:
        yield
    except Refused as no:
        found += no.problems
    except OSError as err:
        found.append(closed(err))


def agreed(found: list[Problem], said: Any) -> list[Any]:
    """What each rank says. Raises Refused on all of them if one has found something."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (found, said))
    raise_if(dict.fromkeys(problem for problems, _ in every for problem in problems))
    return [one for _, one in every]


def judged() -> list[tuple[str, int, int, int]]:
    """Of the checkpoints that were looked at, all that two hosts see alike of a file if they share its disk."""
    files = sorted(path for folder, (step, _) in checkpoint.JUDGED.items() for path in (folder / step).iterdir())
    return [(str(path), at.st_size, at.st_mtime_ns, at.st_ino) for path in files for at in [path.stat()]]


def another_chip(recipe: Recipe) -> Iterator[Problem]:
    """Kernels, and what Megatron demands, were chosen by what the plan says of the device; that it fits, by its memory."""
    wanted, hint = recipe.device, "take a `cluster` of these GPUs, or another host"
    if recipe.cluster.processor != "gpu":
        return
    if (found := torch.cuda.get_device_capability()) != wanted.capability:
        here, there = (".".join(map(str, one)) for one in (found, wanted.capability))
        message = f"this GPU is of compute capability {here}, and the plan's `{wanted.name}` of {there}"
        yield Problem(message, key="device.capability", hint=hint)
    if torch.cuda.is_available() and "gpus" not in recipe.cluster.waivers:
        gpu = torch.cuda.get_device_properties()
        if not wanted.sized(size := gpu.total_memory / 2**30):
            message = f"this GPU, {gpu.name}, has {size:.1f} GiB, and the plan's `{wanted.name}` {wanted.total_gib}"
            yield Problem(message, key="device.total_gib", hint=f"{hint}; or `cluster.waivers.gpus=REASON`")


def on_disk(recipe: Recipe) -> dict[str, Any]:
    """By its key, what this rank has found where a recipe loads, and, if it reads for its host, what the data is."""
    named = {f"schedule.{key}": getattr(recipe.schedule, key) for key in ("load", "pretrained")}
    mine: dict[str, Any] = {key: checkpoint.JUDGED.get(Path(name)) for key, name in named.items() if name}
    if checkpoint.reads():
        mine[recipe.data.key] = identity.hashes(identity.read(recipe.data))
    return mine


def runs() -> dict[str, str]:
    """The code that lies here, the versions of all packages that this process has loaded, and the variables that some of them read."""
    packages = importlib.metadata.packages_distributions()
    loaded = sorted({name for module in packages.keys() & sys.modules for name in packages[module] if name})
    code = {"our code": source()}
    for name in sys.modules.keys() & {"megatron.core", "megatron.training", "megatron.bridge"}:
        folder = Path(str(sys.modules[name].__file__)).parent
        code[f"the code of `{name}`"] = tree_hash(folder.parent, folder.name)
    chosen = {name: value for name, value in os.environ.items() if CHOOSING.match(name)}
    return code | {f"`{name}`": importlib.metadata.version(name) for name in loaded} | chosen


def differences(every: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> Iterator[Problem]:
    """Of what all ranks say, the first one's against the others'. A package that only some have loaded is none."""
    for key, value in every[0][0].items():
        if any(disk.get(key, value) != value for disk, _ in every):
            message = f"what stands there {UNLIKE}"
            yield Problem(message, key=key, hint="a folder that all hosts share, or the same files on each")
    others = [run for _, run in every if run is not None]
    for name in sorted({name for run in others for name in run}):
        said = [run.get(name) for run in others if name in run or CHOOSING.match(name)]
        if any(value != said[0] for value in said):
            yield Problem(f"{name} {UNLIKE}", hint="one image for all hosts, or the same steps on each")
