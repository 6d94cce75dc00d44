"""A published config.json as a preset, for commands that take one by name."""

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nam_megatron.conf import READ_FROM
from nam_megatron.errors import Refused, shown
from nam_megatron.lint import Report, lint, recipe
from nam_megatron.lint.read import of_file
from nam_megatron.lint.rules.rule import FAIL, WRONG


def of_config(path: Path) -> tuple[str, Path]:
    """A preset of a config.json, and a folder to search it in, which goes when the command ends. What no config says is told on stderr.

    Raises:
        Refused: no config.json, or a model that no recipe says.
    """
    found = lint(of_file(str(path)), str(path))
    if found.launch.kind != "huggingface":
        raise Refused(f"`{path}` is no config.json of Hugging Face", key="conf", hint="`conf=NAME` chooses a preset")
    name = re.sub(r"\W", "_", f"of_{path.resolve().parent.name}")
    sys.stderr.write(shown("".join(f"> {path}: {line}\n" for line in stops(found))))
    made = recipe.make(found, path.with_name(f"{name}.yaml"))
    folder = Path(tempfile.mkdtemp(prefix="nam_megatron_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    keep(folder, name, made.yaml, str(path))
    sys.stderr.write(shown("".join(f"> {path}: {line}\n" for line in made.lost)))
    return name, folder


def keep(folder: Path, name: str, text: str, source: str) -> None:
    """Write a preset into a folder of this process alone. source: the file that it was made of, which messages name in its place."""
    file = folder / "preset" / f"{name}.yaml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    READ_FROM[file] = source


def stops(found: Report) -> Iterator[str]:
    """What lint finds that is refused, or another model than it says, for a command that goes on with it."""
    for f in found.findings:
        if f.severity in (FAIL, WRONG):
            yield f"{f.severity}: {f.flag}: {f.message}" + (f" ({f.detail})" if f.detail else "")
