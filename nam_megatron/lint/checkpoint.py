"""The arguments that a Megatron checkpoint stores, as words for its parser. No code of the file runs, and no torch is needed.

`torch.save` writes a zip file with a pickle in it. Whatever the pickle names is stood in for by an object that does nothing: the arguments
are plain values of a Namespace, and what is none is listed.
"""

import io
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from nam_megatron.errors import Refused
from nam_megatron.targets import Target
from nam_megatron.targets.target import AS_TEXT, as_text, legal
from nam_megatron.tracker import TRACKER, newest
from nam_megatron.words.setting import Setting

FILES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
LARGEST = 64 * 2**20  # bytes of a pickle without its tensors
MAGIC = b"PK\x03\x04"
# Of one process, or of Megatron's own working-out; what has no flag, as where the run stood, is no word anyhow.
DERIVED = {
    "local_rank", "encoder_num_layers", "encoder_seq_length", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "padded_vocab_size",
}  # fmt: skip


class Standin:
    """Anything that is no plain value: takes what a pickle does to an object, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


class Reader(pickle.Unpickler):
    """Looks nothing up: every class and function is a Standin, but for the Namespace of the arguments."""

    def find_class(self, module: str, name: str) -> Any:
        return Namespace if (module, name) == ("argparse", "Namespace") else type(name, (Standin,), {})

    def persistent_load(self, _: Any) -> Any:
        return Standin()


def file_of(path: Path) -> Path:
    """The file with the arguments, of a checkpoint's folder, a step's, or itself.

    Raises:
        Refused: there is none.
    """
    if path.is_file():
        return path
    step = newest(path) if (path / TRACKER).is_file() else path
    found = next((step / name for name in FILES if (step / name).is_file()), None)
    if found is None:
        hint = f"name the folder that holds `{TRACKER}`, a step's folder with `common.pt`, or that file"
        if (path / "plan.json").is_file():
            hint = f"name the plan in it, `{path}/plan.json`"
        raise Refused(f"no checkpoint of Megatron's in `{path}`", hint=hint)
    return found


def is_file(path: Path) -> bool:
    """Whether a file is one that `torch.save` writes."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def stored(path: Path) -> dict[str, Any]:
    """The arguments in a file.

    Raises:
        Refused: it is none of Megatron's, or cannot be read without running it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            info = next(i for i in archive.infolist() if i.filename.rsplit("/", 1)[-1] == "data.pkl")
            if info.file_size > LARGEST:
                raise ValueError("its pickle is too large")
            state = Reader(io.BytesIO(archive.read(info))).load()
        args = state["args"]
        if not isinstance(args, Namespace):
            raise ValueError("its `args` are no Namespace")
        return vars(args)
    except Exception as err:  # whatever a broken or hostile pickle makes of its reader
        hint = "give `common.pt` as Megatron wrote it, or a checkpoint's folder"
        why = str(err) or type(err).__name__
        raise Refused(f"no arguments can be read from `{path}`: {why}", hint=hint) from None


def words(args: dict[str, Any], target: Target) -> tuple[list[str], list[str]]:
    """The words that make the stored values of the parser's defaults, and what none says."""
    found: list[str] = []
    left: list[str] = []
    for dest, value in args.items():
        flag = target.by_dest.get(dest)
        if flag is None or dest in DERIVED or value is None or value == flag.default:
            continue
        if args.get("hybrid_layer_pattern") and dest in ("num_layers", "mtp_num_layers"):
            continue  # the pattern says it
        if isinstance(value, list) and flag.nargs in ("+", "*"):
            value = tuple(value)
        elif flag.type in AS_TEXT:
            value = as_text(flag, value)
        elif flag.nargs in ("+", "*"):  # Megatron takes lists of one apart
            value = (value,)
        if not isinstance(value, (bool, int, float, str, tuple)):
            left.append(f"`{dest}`: an object of Python")
            continue
        value = float(value) if flag.type == "float" and type(value) is int else value
        try:
            fits = legal(flag, value)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            left.append(f"`{dest}` is {value!r} there, which no flag of 0.19.2's can say")
            continue
        found += target.words(Setting(dest, value, ""))
    unknown = sorted(name for name in args if name not in target.by_dest)
    if args.get("padded_vocab_size"):
        found += ["--padded-vocab-size", str(int(args["padded_vocab_size"]))]
    if unknown:
        left.append(
            f"{len(unknown)} stored values have no flag in Megatron {target.pin}: worked out, or another version's"
        )
    return found, left
