"""Which data it is, by its content and not by its path: for resuming a run, and for what a receipt says of one (no torch)."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nam_megatron.data import manifest
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.words import regular
from nam_megatron.words.regular import closed, irregular
from nam_megatron.words.whole import digest

if TYPE_CHECKING:
    from nam_megatron.recipe.data import Data

SAMPLES = "training.jsonl"  # Megatron-Bridge's name for prompts and answers
# Files that are hashed whole: up to 256 MiB, read in a fraction of a second. Larger ones are known by their size and by as much of them.
WHOLE, BLOCK = 2**28, 2**16
SPECIAL = f"{manifest.TOKENIZER}/special tokens"  # as `data.json` names what else decides them; older ones lack it
SAYING = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")  # of tokenizers without a `tokenizer.json`
NO_TOKENS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".md")


def tree(data: "Data", root: Path = Path()) -> dict[str, Any] | None:
    """What stands of the data beside a checkpoint: a built dataset's manifest, of others the same `files`; None of mock data.

    root: what relative paths are of. Raises Refused for data that cannot be read.
    """
    if data.built is not None:
        made = manifest.read(root / data.built)
        raise_if(overwritten(root / data.built, made))
        return made.model_dump()
    files = {name: _file(path) for name, path in _files(data, root)}
    raise_if(_twins(files, data.key))
    if data.tokenizer is not None:
        files |= _tokenizer(root / data.tokenizer)
    return {"version": 1, "files": files} if files else None


read = cache(tree)  # for a process that judges, signs and compares the same data: gigabytes are read once


def hashes(tree: Any) -> dict[str, str] | None:
    """{file: SHA-256} of a `tree` as it was stored; None where there is none, or of an unknown form."""
    try:
        return {name: file["sha256"] for name, file in tree["files"].items()} or None
    except (KeyError, TypeError, AttributeError):
        return None


def stored(path: Path) -> dict[str, str] | None:
    """`hashes` of a file; None where it is not there or cannot be read."""
    if regular.kind(path):  # what stands there has no end
        return None
    try:
        return hashes(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Files that are not the same in both."""
    unknown = {SPECIAL} - (before.keys() & after.keys())
    return [
        name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name) and name not in unknown
    ]


def tokens(path: Path) -> dict[str, Any] | None:
    """What a tokenizer's file says of a text, however it is laid out; None where there is none, or it cannot be read."""
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in said.items() if key not in manifest.AROUND}
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def laid_out(said: Mapping[str, Any] | None) -> str:
    """Hash of what `tokens` gives."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def content(path: Path) -> str:
    """SHA-256 of a file, or, of one larger than WHOLE, of blocks that lie evenly in it, the first and the last among them."""
    size = path.stat().st_size
    if size <= WHOLE:
        return digest(path)
    found, last = hashlib.sha256(), WHOLE // BLOCK - 1
    with path.open("rb") as stream:
        for i in range(last + 1):
            stream.seek(i * (size - BLOCK) // last)
            found.update(stream.read(BLOCK))
    return found.hexdigest()


def overwritten(folder: Path, made: manifest.Manifest) -> Iterator[Problem]:
    """Files that are there and not what the manifest says, by their `content`; `check` reads all."""
    for name, file in made.files.items():
        path = folder / name
        if not path.is_file():
            continue
        told = file.sha256 if path.stat().st_size <= WHOLE else file.blocks
        if told is not None and content(path) != told:
            yield Problem(f"`{path}` is not what was built", key="data.path", hint="build the dataset again")


def _twins(files: Mapping[str, Mapping[str, Any]], key: str) -> Iterator[Problem]:
    """Datasets of a blend that are one under two names: a link, a copy. It would weigh twice, or be evaluated on what it trains on."""
    sums: dict[str, list[str]] = {}
    for name, file in files.items():
        sums.setdefault(name.replace("/", ".").partition(".")[0], []).append(file["sha256"])
    first: dict[tuple[str, ...], str] = {}
    for name, of in sums.items():
        if (before := first.setdefault(tuple(of), name)) != name:
            hint = "give it one weight; evaluate on another"
            yield Problem(f"`{before}` and `{name}` of the blend are one dataset", key=key, hint=hint)


def _files(data: "Data", root: Path) -> Iterator[tuple[str, Path]]:
    if data.sft:
        names = [SAMPLES] if data.parts is None else [f"part{n}/{SAMPLES}" for n in range(1, len(data.parts) + 1)]
        yield from ((name, root / folder / SAMPLES) for name, folder in zip(names, data.folders, strict=True))
        return
    prefixes = {"data": data.path} if data.name == "indexed" else {}
    prefixes |= {f"part{number}": part.path for number, part in enumerate(data.parts or (), 1)}
    prefixes |= {f"valid{number}": part.path for number, part in enumerate(data.valid_parts or (), 1)}
    for name, prefix in prefixes.items():
        for end in ("bin", "idx"):
            yield f"{name}.{end}", root / f"{prefix}.{end}"


def _file(path: Path) -> dict[str, Any]:
    raise_if(irregular((path,), "data.path"))
    try:
        return {"sha256": content(path), "bytes": path.stat().st_size}
    except OSError as err:
        raise Refused(closed(err, "data.path")) from None


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Of what makes tokens of a text; none where it is no folder here."""
    name = f"{manifest.TOKENIZER}/{manifest.TOKENS}"
    if (path := folder / manifest.TOKENS).exists():
        found = _file(path)
        special = {
            n: {k: v for k, v in (tokens(folder / n) or {}).items() if n != SAYING[0] or "token" in k} for n in SAYING
        }
        of_text = found | ({"sha256": laid_out(said)} if (said := tokens(path)) is not None else {})
        return {name: of_text, SPECIAL: {"sha256": laid_out(special)}}
    named = [folder / n for n in VOCABULARIES if (folder / n).exists()]
    # Of another kind, tekken.json or spiece.model: any file may decide it, but for weights and pages beside it.
    named = named or sorted(p for p in folder.glob("*") if p.is_file() and p.suffix not in NO_TOKENS)
    return {f"{manifest.TOKENIZER}/{path.name}": _file(path) for path in named}
