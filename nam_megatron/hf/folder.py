"""An export's folder: shards, their index, and nam_export.json, written last, which says what every file must be (torch side)."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nam_megatron.blocks.exported import Tensor
from nam_megatron.errors import Problem, Refused, not_there, raise_if
from nam_megatron.words.regular import irregular
from nam_megatron.words.taken import EXPORT
from nam_megatron.words.whole import digest, write_whole

MANIFEST, INDEX, CONFIG = EXPORT, "model.safetensors.index.json", "config.json"
SINGLE = "model.safetensors"  # in the place of shards and an index
# What may lie in an export although no manifest lists it: nobody computes from it. All else somebody loads without being asked:
# transformers another file of weights, an adapter or `custom_generate/generate.py`.
IDLE = re.compile(r"README\.md|LICENSE[\w.-]*|\.gitattributes|\.gitignore|\.(?:git|cache)(?:/.*)?", re.DOTALL)
MOST = 4 * 2**30  # bytes of a shard
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


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
            assert value.shape == tensor.shape and value.dtype == DTYPES[tensor.dtype], tensor
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
    sign(folder, {"version": 1, **said, "files": files})


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest anew."""
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def as_json(tree: dict[str, Any]) -> bytes:
    """A mapping, its keys in order."""
    return (json.dumps(tree, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_bytes(as_json(tree))


def load_json(path: Path) -> dict[str, Any]:
    """A mapping in a file of an export. Raises Refused."""
    hint = "copy it again: it is JSON in UTF-8, of at most 64 MiB"
    if path.name == MANIFEST:
        hint = "`python -m nam_megatron.hf export` writes one"
    raise_if(irregular((path,)))
    try:
        if path.stat().st_size > 64 * 2**20:
            raise ValueError("it is too large")
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it holds no mapping")
    except OSError as err:
        if not path.parent.exists():
            raise Refused(not_there(path.parent)) from None
        raise Refused(f"`{path}` cannot be read: {err.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as err:
        raise Refused(f"`{path}` cannot be understood: {err}", hint=hint) from None
    return tree


def damage(folder: Path, manifest: dict[str, Any], but: Collection[str] = ()) -> Iterator[Problem]:
    """Files that are missing, cut off, changed, or not the export's; `but` of these names."""
    files = manifest.get("files")
    if manifest.get("version") != 1 or not isinstance(files, dict):
        yield Problem(f"`{folder / MANIFEST}` is not of this version", hint="export again")
        return
    for name, said in files.items():
        path, said = folder / name, said if isinstance(said, dict) else {}
        if name in but:
            continue
        if not inside(name):
            yield Problem(f"`{ascii(name)[1:-1][:120]}` is no file inside `{folder}`")
        elif not path.is_file():  # a link may lead to one, as in the hub's cache: what it holds is looked at
            yield Problem(f"`{path}` is missing", hint="export again, or copy the whole folder")
        elif path.stat().st_size != said.get("bytes"):
            yield Problem(f"`{path}` has {path.stat().st_size} bytes, not {said.get('bytes')}", hint="copy it again")
        elif digest(path) != said.get("sha256"):
            what = "another tokenizer than was exported" if "tokenizer" in name else "not what was exported"
            yield Problem(f"`{path}` is {what}", hint="copy it again")
    yield from strangers(folder, {*files, MANIFEST})


def strangers(folder: Path, known: Collection[str]) -> Iterator[Problem]:
    """What else lies in a folder, and may be loaded by somebody."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if (path.is_symlink() or not path.is_dir()) and name not in known and not IDLE.fullmatch(name):
            yield Problem(f"`{path}` is not of this export", hint="take it away")


def inside(name: str) -> bool:
    """Whether a name is that of a file in a folder, as a manifest or an index may say it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts and name not in ("", ".")


def verified(folder: Path) -> dict[str, Any]:
    """The manifest of an export that is whole. Raises Refused with every file that is not."""
    if not (folder / MANIFEST).exists() and (folder / CONFIG).is_file():
        hint = (
            f"if you trust them, as what transformers saved of an export: `python -m nam_megatron.hf refresh {folder}`"
        )
        raise Refused(f"`{folder}` has no `{MANIFEST}`: nothing vouches for its files", hint=hint)
    manifest = load_json(folder / MANIFEST)
    raise_if(damage(folder, manifest))
    return manifest


@dataclass(frozen=True)
class Shelf:
    """Open shards, memory-mapped where the library does so. found: name -> (file, shape, type as safetensors says it)."""

    handles: Mapping[str, Any]
    found: Mapping[str, tuple[str, tuple[int, ...], str]]

    def get(self, name: str) -> torch.Tensor:
        return self.handles[self.found[name][0]].get_tensor(name)


def shelf(folder: Path, said: Mapping[str, Any] | None, single: str = "") -> Shelf:
    """The shards that an index names; said None: the one file `single`.

    Raises:
        Refused: files that cannot be read, or tensors that lie elsewhere than the index says; at once, with every finding.
    """
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    problems, handles = [], {}
    for name in [single] if said is None else sorted({str(file) for file in said.values()}):
        path = folder / name
        try:
            if not inside(name) or Path(name).name != name or path.suffix != ".safetensors":
                raise OSError(22, "no name of a shard")
            raise_if(irregular((path,)))
            handles[name] = handle = safe_open(path, framework="pt", device="cpu")
        except OSError as err:
            problems.append(Problem(f"`{ascii(str(path))[1:-1][:300]}` cannot be read: {err.strerror or err}"))
            continue
        except SafetensorError as err:
            problems.append(Problem(f"`{path}` is damaged: {err}", hint="copy it again"))
            continue
        for key in handle.keys():  # noqa: SIM118  not a mapping
            if key in found and key not in (said or ()):
                problems.append(
                    Problem(f"`{key}` lies in `{found[key][0]}` and in `{name}`, and the index says neither")
                )
            part = handle.get_slice(key)
            found[key] = (name, tuple(part.get_shape()), part.get_dtype())
    if not problems and said is not None:
        problems = [
            Problem(f"`{key}` lies in `{found[key][0]}`, and the index says `{file}`")
            for key, file in said.items()
            if key in found and found[key][0] != file
        ]
        problems += [
            Problem(f"`{key}` is in no shard, and the index says `{said[key]}`") for key in said if key not in found
        ]
    raise_if(problems)
    return Shelf(handles, found)


def reader(folder: Path, tensors: list[Tensor]) -> Callable[[Tensor], torch.Tensor]:
    """What reads a tensor of an export.

    Raises:
        Refused: shards that cannot be read, or hold other tensors than these; at once, with every finding.
    """
    if (folder / SINGLE).is_file() and not (folder / INDEX).exists():
        opened = shelf(folder, None, SINGLE)
    else:
        said = load_json(folder / INDEX).get("weight_map")
        opened = shelf(folder, said if isinstance(said, dict) else {})
    raise_if(_misfits(folder, tensors, opened.found))

    def read(tensor: Tensor) -> torch.Tensor:
        # transformers saves some in another type than ours; a value is the same in both, or it is not taken.
        value = opened.get(tensor.name)
        made = value.to(DTYPES[tensor.dtype])
        if made.dtype != value.dtype and not torch.equal(made.to(value.dtype), value):
            message = f"`{tensor.name}` in `{folder}` has values that {tensor.dtype} does not have, and is {tensor.dtype} in training"
            raise Refused(message, hint="save it rounded: `model.bfloat16().save_pretrained(FOLDER)`")
        return made

    return read


def _misfits(folder: Path, tensors: list[Tensor], found: Mapping[str, Any]) -> Iterator[Problem]:
    for tensor in tensors:
        if tensor.name not in found:
            yield Problem(f"`{folder}` holds no `{tensor.name}`")
            continue
        name, shape, dtype = found[tensor.name]
        if shape != tensor.shape:
            yield Problem(f"`{tensor.name}` is {list(shape)} in `{name}`, and {list(tensor.shape)} in the config")
        if dtype not in DTYPES:
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


@contextlib.contextmanager
def making(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which gets that name at the end, and is taken away where an error comes before.

    Raises Refused: `out` is there.
    """
    if out.exists() or out.is_symlink():  # a link to nowhere, too, which no folder replaces
        raise Refused(f"`{out}` is there already", hint="name another folder")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")  # OUT.part may be somebody's
    try:
        part.mkdir(parents=True)
    except OSError as err:
        raise Refused(f"`{part}` cannot be made: {err.strerror}") from None
    try:
        yield part
        try:
            part.rename(out)
        except OSError as err:
            if err.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise Refused(f"`{out}` has come while this was written", hint="name another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
