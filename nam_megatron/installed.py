"""Which Megatron and which Transformer Engine this Python would import. Whatever imports one of them asks here first.

Nothing is imported for it. What a command says of Megatron is true of one version: the target's. Another one is refused by its name,
before it can fail in its own way, or do something else without a word.
"""

import ast
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from nam_megatron import process
from nam_megatron.errors import Refused
from nam_megatron.packages import PIP, adding, installed, missing
from nam_megatron.targets import Target, current

CORE, TRAINING, ENGINE = "megatron.core", "megatron.training", "transformer-engine"
PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


@dataclass(frozen=True, slots=True)
class Stack:
    """Versions as they were asked; None of a package that is not installed."""

    megatron_core: str | None
    transformer_engine: str | None

    def __str__(self) -> str:
        engine = f"Transformer Engine {self.transformer_engine}" if self.transformer_engine else "no Transformer Engine"
        return f"Megatron {self.megatron_core}, {engine}"

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


def stack() -> Stack:
    """What is here. Raises Refused where Megatron does not say of which version it is, or its two halves are of two."""
    found = Stack(_megatron(), _engine())
    core, training = _folder(CORE), _folder(TRAINING)
    if core and training != core.with_name("training"):
        message = f"megatron.core is in `{core.parent}`, and megatron.training " + (
            f"is `{training}`" if training else "is not"
        )
        hint = f"one of the two is another Megatron's: `{PIP} install megatron-core=={current().pin}` has both"
        raise Refused(message, hint=hint, law="two-megatrons")
    return found


def ask(target: Target | None = None, engine: bool = False) -> Stack:
    """What is here, if it is what `target` (the current one) speaks of.

    engine: whether modules of Transformer Engine are built. One that is missing is refused where it is needed.

    Raises:
        Refused: a Python without assertions; no Megatron, two of them, or another version of one of the two.
    """
    if sys.flags.optimize:
        message = "this Python leaves out every assertion: what Megatron asserts of a model would not be checked"
        raise Refused(message, hint="start it without `-O`, and unset PYTHONOPTIMIZE", law="asserts-off")
    target, found = target or current(), stack()
    hint = f"install it: `{PIP} install megatron-core=={target.pin}`"
    if found.megatron_core is None:
        raise Refused(missing("megatron", process.started()))
    if found.megatron_core != target.pin:
        where = _folder(CORE)
        message = f"Megatron is {found.megatron_core} (`{where}`), and everything here is said of {target.pin}"
        raise Refused(message, hint=hint, law="other-megatron")
    if engine and found.transformer_engine not in (None, target.te_version):
        message = (
            f"Transformer Engine is {found.transformer_engine}, and everything here was seen with {target.te_version}"
        )
        hint = f"`{PIP} install --no-build-isolation 'transformer-engine[pytorch]=={target.te_version}'`"
        raise Refused(message, hint=hint, law="other-engine")
    return found


def _folder(package: str) -> Path | None:
    """Where Python would find a package of Megatron's; its parent `megatron` is a bare namespace."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # the parent is not there, or is no package
        return None
    except Exception as err:  # a parent of somebody's own, which Python has to run
        hint = f"{adding('megatron')} installs the tried one"
        message = f"Megatron cannot be imported: {type(err).__name__}: {err}"
        raise Refused(message, hint=hint, law="megatron-broken") from None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _megatron() -> str | None:
    """The version that stands in its code, as the metadata of a package may be of another one than Python finds first."""
    folder = _folder(CORE)
    if folder is None:
        return None
    file = folder / "package_info.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in PARTS
        }
        *numbers, more = (said[part] for part in PARTS)
    except (OSError, ValueError, SyntaxError, KeyError) as err:
        message = f"the Megatron in `{folder}` does not say of which version it is: {err}"
        raise Refused(message, hint=f"install megatron-core=={current().pin}", law="megatron-without-version") from None
    return ".".join(map(str, numbers)) + more


def _engine() -> str | None:
    """Without what a container's own build appends."""
    found = installed(ENGINE) or installed(f"{ENGINE}-torch")
    return found.partition("+")[0] if found else None
