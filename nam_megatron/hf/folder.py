"""An export's folder: shards, their index, and nam_export.json, written last, which says what every file must be (torch side)."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nam_megatron.data.manifest import digest
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf.describe import Tensor

MANIFEST, INDEX, CONFIG = "nam_export.json", "model.safetensors.index.json", "config.json"
MOST = 4 * 2**30  # bytes of a shard
TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


def shards(tensors: Iterable[Tensor], most: int = MOST) -> list[tuple[str, list[Tensor]]]:
    """Tensors by file, in their order; a tensor is never cut."""
    groups: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return [(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def write_shard(path: Path, tensors: list[Tensor], read: Callable[[Tensor], torch.Tensor]) -> str:
    """Write one file, a tensor at a time. Returns its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.nbytes)}
        at += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    hashed = hashlib.sha256()
    with path.open("xb") as stream:

        def put(data: Any) -> None:
            stream.write(data)
            hashed.update(data)

        put(struct.pack("<Q", len(head)))
        put(head)
        for tensor in tensors:
            value = read(tensor).contiguous()
            assert value.shape == tensor.shape and value.dtype == TORCH[tensor.dtype], tensor
            put(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
    return hashed.hexdigest()


def write_index(folder: Path, files: list[tuple[str, list[Tensor]]]) -> None:
    names = {tensor.name: file for file, group in files for tensor in group}
    size = sum(tensor.nbytes for _, group in files for tensor in group)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=1)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def write_manifest(folder: Path, known: dict[str, str], **said: Any) -> None:
    """What every file is, and `said` beside it. known: hashes of files that need not be read again."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    files = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": known.get(p.name) or digest(p)} for p in paths
    }
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps({"version": 1, **said, "files": files}, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / MANIFEST)


def load_json(path: Path) -> dict[str, Any]:
    """A mapping in a file of an export. Raises Refused."""
    hint = "`python -m nam_megatron.hf export` writes one"
    try:
        if path.stat().st_size > 64 * 2**20:
            raise ValueError("it is too large")
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it holds no mapping")
    except OSError as err:
        raise Refused(Problem(f"`{path}` cannot be read: {err.strerror}", None, hint)) from None
    except (ValueError, RecursionError) as err:
        raise Refused(Problem(f"`{path}` cannot be understood: {err}", None, hint)) from None
    return tree


def damage(folder: Path, manifest: dict[str, Any]) -> Iterator[Problem]:
    """Files that are missing, cut off, changed, or not the export's."""
    files = manifest.get("files")
    if manifest.get("version") != 1 or not isinstance(files, dict):
        yield Problem(f"`{folder / MANIFEST}` is not of this version", None, "export again")
        return
    for name, said in files.items():
        path = folder / name
        if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
            yield Problem(f"`{name}` lies outside `{folder}`")
        elif not path.is_file():
            yield Problem(f"`{path}` is missing", None, "export again, or copy the whole folder")
        elif not isinstance(said, dict) or path.stat().st_size != said.get("bytes"):
            yield Problem(f"`{path}` has {path.stat().st_size} bytes, not {said.get('bytes')}", None, "copy it again")
        elif digest(path) != said.get("sha256"):
            what = "another tokenizer than was exported" if "tokenizer" in name else "not what was exported"
            yield Problem(f"`{path}` is {what}", None, "copy it again")
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files and path.suffix in (".safetensors", ".bin", ".pt", ".pkl", ".pth"):
            yield Problem(f"`{path}` is not of this export", None, "take it away")


def verified(folder: Path) -> dict[str, Any]:
    """The manifest of an export that is whole. Raises Refused with every file that is not."""
    manifest = load_json(folder / MANIFEST)
    raise_if(damage(folder, manifest))
    return manifest


def reader(folder: Path, tensors: list[Tensor]) -> Callable[[Tensor], torch.Tensor]:
    """What reads a tensor of an export, memory-mapped where the library does so.

    Raises:
        Refused: shards that cannot be read, or hold other tensors than these; at once, with every finding.
    """
    said = load_json(folder / INDEX).get("weight_map")
    said = said if isinstance(said, dict) else {}
    problems, found, handles = [], {}, {}
    for name in sorted({str(file) for file in said.values()}):
        path = folder / name
        try:
            if Path(name).name != name or path.suffix != ".safetensors":
                raise OSError(22, "no name of a shard")
            handles[name] = handle = safe_open(path, framework="pt", device="cpu")
        except OSError as err:
            problems.append(Problem(f"`{path}` cannot be read: {err.strerror or err}"))
            continue
        except SafetensorError as err:
            problems.append(Problem(f"`{path}` is damaged: {err}", None, "copy it again"))
            continue
        for key in handle.keys():  # noqa: SIM118  not a mapping
            part = handle.get_slice(key)
            found[key] = (name, tuple(part.get_shape()), part.get_dtype())
    if not problems:
        problems = list(_misfits(folder, tensors, said, found))
    raise_if(problems)
    return lambda tensor: handles[found[tensor.name][0]].get_tensor(tensor.name)


def _misfits(folder: Path, tensors: list[Tensor], said: dict, found: dict) -> Iterator[Problem]:
    for tensor in tensors:
        if tensor.name not in found:
            yield Problem(f"`{folder}` holds no `{tensor.name}`")
            continue
        name, shape, dtype = found[tensor.name]
        if said.get(tensor.name) != name:
            yield Problem(f"`{tensor.name}` lies in `{name}`, and the index says `{said.get(tensor.name)}`")
        if shape != tensor.shape:
            yield Problem(f"`{tensor.name}` is {list(shape)} in `{name}`, and {list(tensor.shape)} in the config")
        if dtype != tensor.dtype:
            yield Problem(f"`{tensor.name}` is {dtype} in `{name}`, not {tensor.dtype}")
    expected = {tensor.name for tensor in tensors}
    yield from (
        Problem(f"`{key}` of `{found[key][0]}` is no tensor of the config's model") for key in found.keys() - expected
    )


def fingerprint(hashes: dict[str, str]) -> str:
    """One hash for all shards."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def cut(tensor: Tensor, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's parts of an export's tensor, as views."""
    ends = [0]
    for _, shape in tensor.parts:
        ends.append(ends[-1] + shape[0])
    for (key, _), (first, last) in zip(tensor.parts, pairwise(ends), strict=True):
        yield key, value[first:last]
