"""Where the files of a run would go: three classes of folders, none on the root volume, with room for the checkpoints."""

import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.finding import Finding
from launch.run.overlay import CACHES
from nam_megatron.recipe import Recipe

MOUNTS = Path("/proc/self/mountinfo")
CHECKPOINT_BYTES = 14  # a parameter: bf16 weight, fp32 master weight, two fp32 moments
# bytes a second to a shared file system on a bad day; seconds for a step, however long, and the end
SLOW, STEP = (250_000_000, 120)
FLEETING = ("tmpfs", "ramfs", "overlay")  # gone with the host or its container


@dataclass(frozen=True)
class Mount:
    point: Path
    device: str  # major:minor
    kind: str  # of file system
    source: str


@dataclass(frozen=True)
class Place:
    """A folder that a run uses. name: what for; kind: durable, scratch, receipts, cache, told, or beside: on a volume that lasts."""

    name: str
    kind: str
    path: Path
    written: bool = True


def mounts(said: str) -> list[Mount]:
    """/proc/self/mountinfo, in its order: of two on one point the later one is seen."""
    found = []
    for line in said.splitlines():
        left, _, right = line.partition(" - ")
        cells, more = left.split(" "), right.split(" ")
        if len(cells) > 5 and len(more) > 1:
            found.append(Mount(Path(_unescaped(cells[4])), cells[2], more[0], _unescaped(more[1])))
    return found


def _unescaped(said: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8) % 256), said)


def volume(path: Path, mounted: Sequence[Mount]) -> Mount | None:
    """The mount that `path` (absolute, links resolved; it need not exist) lies on."""
    holding = [m for m in mounted if path.is_relative_to(m.point)]
    return max(reversed(holding), key=lambda m: len(m.point.parts), default=None)


def one_volume(a: Mount, b: Mount) -> bool:
    """Whether two mounts are one disk: the same device, or parts of one (subvolumes have numbers of their own)."""
    return a.device == b.device or (a.source == b.source and a.source.startswith("/dev/"))


def _folder(address: str | None) -> str | None:
    """Where MLflow keeps what it is told, if that is a folder: `databricks` is an address, and so is what has another scheme."""
    return address.removeprefix("file://") if address and "/" in address else None


def places(recipe: Recipe, checkout: Path, environ: Mapping[str, str]) -> list[Place]:
    """Every folder that the run would write to, and its data. environ: the run's, overlay included."""
    storage, schedule = recipe.cluster.storage, recipe.schedule
    kept = {"load": schedule.load, "pretrained": schedule.pretrained, "data": recipe.data.path}
    kept |= {f"data {number}": part.path for number, part in enumerate(recipe.data.mixed, 1)}
    beside = {"tokenizer": recipe.data.tokenizer, "order of samples": recipe.data.cache}
    t = recipe.feature.tracking
    told = {"TensorBoard": t.tensorboard, "Weights & Biases": t.wandb_dir, "MLflow": _folder(t.mlflow)} if t else {}
    found = [
        Place("durable", "durable", Path(storage.durable)),
        Place("scratch", "scratch", Path(storage.scratch)),
        Place("receipts and logs", "receipts", Path(storage.receipts)),
        *([Place("save", "durable", Path(schedule.save))] if schedule.save else ()),
        *(Place(name, "durable", Path(path), written=False) for name, path in kept.items() if path),
        *(Place(name, "beside", Path(path), written=False) for name, path in beside.items() if path),
        *(Place(name, "told", Path(path)) for name, path in told.items() if path and "://" not in path),
        *(Place(name, "cache", Path(environ[name])) for name in CACHES if environ.get(name)),
    ]
    return [replace(p, path=Path(os.path.realpath(checkout / p.path.expanduser()))) for p in found]


def findings(used: Sequence[Place], mounted: Sequence[Mount]) -> Iterator[Finding]:
    yield from root_volume(used, mounted)
    yield from classes(used, mounted)
    yield from caches(used)


def root_volume(used: Sequence[Place], mounted: Sequence[Mount]) -> Iterator[Finding]:
    """The root volume is small, shared with the system, and full when it hurts most."""
    root = volume(Path("/"), mounted)
    if root is None:
        yield Finding("root-volume", "fail", "which volumes there are cannot be read", f"look at {MOUNTS}, or waive it")
        return
    on = [p.name for p in used if (m := volume(p.path, mounted)) and one_volume(m, root)]
    if on:
        hint = "other paths: `cluster.storage`, `schedule`, `data`, `feature.tracking`; waive it on hosts with one disk"
        yield Finding("root-volume", "fail", f"on the root volume: {', '.join(on)}", hint)
    else:
        yield Finding("root-volume", "ok", "nothing of the run lies on the root volume")


def classes(used: Sequence[Place], mounted: Sequence[Mount]) -> Iterator[Finding]:
    """Folders that exist and may be written to; what is kept on disks that keep; checkpoints and data in the durable class."""
    clean = True
    durable = next(p.path for p in used if p.name == "durable")
    for p in used:
        if p.name in ("durable", "scratch") and not p.path.is_dir():
            said, hint = f"{p.name} folder `{p.path}` is not there", f"make it, or `cluster.storage.{p.name}=DIR`"
        elif p.written and not _writable(p.path):
            said, hint = f"{p.name}: `{p.path}` cannot be written to", "another folder, or its rights"
        elif p.kind == "durable" and not p.path.is_relative_to(durable):
            said, hint = (
                f"{p.name}: `{p.path}` is outside the durable folder `{durable}`",
                "move it, or set `cluster.storage.durable`",
            )
        elif p.name == "durable" and (m := volume(p.path, mounted)) and m.kind in FLEETING:
            said, hint = (
                f"the durable folder lies on {m.kind}, which goes with the host",
                "`cluster.storage.durable=DIR` on a disk",
            )
        else:
            continue
        clean = False
        yield Finding("storage", "fail", said, hint)
    if clean:
        yield Finding("storage", "ok", "durable, scratch and receipts can be written to")


def user_cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/", ".cache"))


def programs(environ: Mapping[str, str]) -> list[Place]:
    """Where Python and its packages lie, and the caches from which they could be installed again."""
    caches = {"uv's cache": ("UV_CACHE_DIR", "uv"), "pip's cache": ("PIP_CACHE_DIR", "pip")}
    base = user_cache(environ)
    found = [Place("the virtual environment", "program", Path(sys.prefix).resolve())]
    found += [
        Place(name, "program", Path(environ.get(key) or base / folder).resolve())
        for name, (key, folder) in caches.items()
    ]
    return [p for p in found if p.path.exists()]


def environment(programs: Sequence[Place], used: Sequence[Place], mounted: Sequence[Mount]) -> Finding:
    """Programs on a disk that goes with the host: the host comes back without what trained on it."""
    where = {p.name: volume(p.path, mounted) for p in used if p.name in ("durable", "scratch")}
    durable, scratch = where.get("durable"), where.get("scratch")
    apart = scratch if scratch and durable and not one_volume(scratch, durable) else None
    root = volume(Path("/"), mounted)
    data = durable if root and durable and not one_volume(durable, root) else None
    lost, image, small = [], [], []
    for p in programs:
        m = volume(p.path, mounted)
        if m is None:
            continue
        if m.kind in ("tmpfs", "ramfs") or (apart and one_volume(m, apart)):
            lost.append(f"{p.name} (`{p.path}`)")
        elif m.kind in FLEETING:
            image.append(p.name)
        elif data and root and one_volume(m, root):
            small.append(f"{p.name} (`{p.path}`)")
    if small and not lost:
        hint = "everything that grows lies on the data disk: `python -m launch stack disk=FOLDER` makes that layout"
        return Finding("venv", "fail", f"on the root volume, beside a data disk: {', '.join(small)}", hint)
    if lost:
        hint = "a folder on a disk that keeps: UV_PROJECT_ENVIRONMENT, UV_CACHE_DIR, PIP_CACHE_DIR"
        return Finding("venv", "fail", f"on a disk that can be lost: {', '.join(lost)}", hint)
    if image:
        said = f"in the container's own layer, which goes with it unless it is of the image: {', '.join(image)}"
        return Finding("venv", "note", said)
    return Finding("venv", "ok", "the virtual environment and the package caches lie on disks that keep")


def _writable(path: Path) -> bool:
    """Whether files can be made in the folder, or in the one in which it would be made."""
    there = next((p for p in (path, *path.parents) if p.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def caches(used: Sequence[Place]) -> Iterator[Finding]:
    """Compile caches beside the data slow its reading, and are kept for ever with it."""
    data = [p.path.parent if p.name.startswith("data") else p.path for p in used if p.kind == "durable"]
    if bad := [p.name for p in used if p.kind == "cache" and any(p.path.is_relative_to(d) for d in data)]:
        hint = "`cluster.storage.scratch` outside the durable folder"
        yield Finding("caches", "fail", f"on the data path: {', '.join(bad)}", hint)
    else:
        yield Finding("caches", "ok", "temp and compile caches are off the data path")


def space(recipe: Recipe, parameters: int, free: int | None) -> Finding:
    """free: bytes where checkpoints go. Nothing deletes old ones, so that all of a run must fit."""
    schedule = recipe.schedule
    if schedule.save is None or schedule.save_interval is None:
        return Finding("space", "ok", f"no checkpoints are written{_free(free)}")
    one = CHECKPOINT_BYTES * parameters
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= 2 * most * recipe.world_size < one:  # a rank writes two files at most
        said = f"a checkpoint of up to {one / 1e9:.1f} GB, and no file may have more than {most / 1e9:.3f}"
        return Finding("space", "fail", said, "`ulimit -f unlimited`")
    count = max(1, schedule.train_steps // schedule.save_interval)
    said = f"{count} checkpoints of up to {one / 1e9:.1f} GB"
    if free is None:
        return Finding("space", "fail", f"{said}, and free space cannot be read", "name a folder that exists")
    if count * one > free:
        return Finding("space", "fail", f"{said}{_free(free)}", "a larger `schedule.save_interval`, or another folder")
    return Finding("space", "ok", f"{said}{_free(free)}")


def _free(free: int | None) -> str:
    return f", {free / 1e9:.1f} GB free" if free is not None else ""


def grace(recipe: Recipe, parameters: int) -> int:
    """Seconds from the signal that ends a job until it is killed: the step under way, and a checkpoint where one is written."""
    if recipe.schedule.save is None:
        return STEP
    return STEP + math.ceil(CHECKPOINT_BYTES * parameters / SLOW)


def free(path: Path) -> int | None:
    """Bytes that may still be written where `path` is or would be."""
    for there in (path, *path.parents):
        try:
            return shutil.disk_usage(there).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def facts(used: Sequence[Place], mounted: Sequence[Mount]) -> dict[str, Any]:
    """By class, without the paths: file system, whether it is the root volume, free space."""
    root, found = volume(Path("/"), mounted), {}
    for p in used:
        if p.name in ("durable", "scratch", "receipts and logs") and (m := volume(p.path, mounted)):
            left = free(p.path)
            found[p.kind] = {
                "file_system": m.kind,
                "root_volume": root is not None and one_volume(m, root),
                "free_gb": None if left is None else round(left / 1e9, 1),
            }
    return found
