"""What a built dataset is and what it was made of: manifest.json, written last, read by the trainer before anything is built."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from nam_megatron.errors import Problem, Refused, not_there, quoted, raise_if
from nam_megatron.words.regular import irregular
from nam_megatron.words.setting import Config
from nam_megatron.words.whole import digest, write_whole

NAME = "manifest.json"
SPLITS = ("train", "valid")
# the folder of the dataset that holds its tokenizer, and the file of that
TOKENIZER, TOKENS = ("tokenizer", "tokenizer.json")
AROUND = ("truncation", "padding", "post_processor")  # of that file: what is done to a whole text, and never here
BUILD = "`python -m nam_megatron.data build` writes one"


class Input(Config):
    """One path as it was given. `sha256`: of the file; of a tree, of its files' relative paths and hashes."""

    path: str
    sha256: str
    documents: NonNegativeInt


class Split(Config):
    documents: PositiveInt
    tokens: PositiveInt


class File(Config):
    """blocks: what `identity.content` reads of a large one; older manifests lack it."""

    sha256: str
    bytes: PositiveInt
    blocks: str | None = None


class Manifest(Config):
    """key: hash of everything that decides the result. duplicates, empty: documents that were left out. largest_id: of any token.

    skipped: what of the inputs was left out, as it was named.
    """

    version: Literal[1]
    key: str
    inputs: tuple[Input, ...]
    valid_share: NonNegativeFloat
    skipped: tuple[str, ...] = ()
    duplicates: NonNegativeInt
    empty: NonNegativeInt
    vocabulary: PositiveInt
    largest_id: NonNegativeInt
    splits: dict[Literal[SPLITS], Split]  # type: ignore[valid-type]
    files: dict[str, File]


def read(folder: Path) -> Manifest:
    """The manifest of a built dataset. Raises Refused for a folder without one, or with one that cannot be understood."""
    path = folder / NAME
    raise_if(irregular((path,), "data.path"))
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as err:
        if not folder.exists():
            problem = not_there(folder, "data.path")
            raise Refused(replace(problem, hint="; ".join(filter(None, (problem.hint, BUILD))))) from None
        here = "" if folder.is_absolute() else f"`{folder}` is looked for in the current folder, `{Path.cwd()}`; "
        message = f"`{folder}` is no built dataset: {err.strerror}: `{path}`"
        raise Refused(message, key="data.path", hint=here + BUILD) from None
    except ValidationError as err:
        first = err.errors()[0]
        said = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise Refused(f"`{path}` cannot be understood: {said}", key="data.path", hint="build it again") from None


def write(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / NAME, json.dumps(manifest.model_dump(exclude_none=True), indent=1) + "\n")


def damage(folder: Path, manifest: Manifest, thorough: bool) -> Iterator[Problem]:
    """Files that are not the manifest's: missing, of another size, or, where that is asked or cheap, of another content."""
    all_files = [f"{TOKENIZER}/{TOKENS}", *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))]
    if unknown := [name for name in all_files if name not in manifest.files]:
        message = f"`{folder / NAME}` has no hash of {quoted(unknown)}"
        yield Problem(message, key="data.path", hint="build the dataset again")
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield Problem(f"`{path}` is missing", key="data.path", hint="build the dataset again")
        elif (size := path.stat().st_size) != file.bytes:
            said = f"`{path}` has {size} bytes, not {file.bytes}"
            yield Problem(said, key="data.path", hint="build the dataset again")
        elif (thorough or name.startswith(f"{TOKENIZER}/")) and digest(path) != file.sha256:
            what = "another tokenizer than the dataset's" if name.startswith(TOKENIZER) else "not what was built"
            yield Problem(f"`{path}` is {what}", key="data.path", hint="build the dataset again")
    # transformers takes special tokens from files that we do not write
    for path in sorted((folder / TOKENIZER).glob("*")):
        if f"{TOKENIZER}/{path.name}" not in (*manifest.files, *all_files):
            yield Problem(f"`{path}` is not of this dataset", key="data.path", hint="take it away")


def misfit(manifest: Manifest, vocab_size: int) -> Iterator[Problem]:
    """Why a model with a vocabulary of `vocab_size` cannot be trained on the dataset."""
    if manifest.vocabulary > vocab_size:
        message = f"the dataset's tokenizer has {manifest.vocabulary} entries, and the model's vocabulary {vocab_size}"
        yield Problem(message, key="model.vocab_size", hint="build the dataset with a smaller tokenizer")
    if manifest.largest_id >= manifest.vocabulary:
        said = f"the dataset has token {manifest.largest_id} of a vocabulary of {manifest.vocabulary}"
        yield Problem(said, key="data.path")


def passes(manifest: Manifest, tokens: int) -> str:
    """How often a run that reads `tokens` tokens goes through the training split, in a clause."""
    have = manifest.splits["train"].tokens
    return f"{tokens:,} tokens of a training split of {have:,}: {tokens / have:.2f} passes"
