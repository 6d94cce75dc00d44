"""Which model does this command line really train? For any launch of Megatron-Core 0.19.2, ours or not.

read.py finds the launch in a text (shell.py and follow.py: a shell script; container.py: a container of Megatron-Bridge's), values.py
reads its words as Megatron's parser would, model.py derives what is built, count.py counts it, ours.py knows our own plans, rules are the
traps, describe.py the words, recipe.py a recipe of ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nam_megatron.errors import FINDINGS, OK, Problem, Refused
from nam_megatron.lint.model import Model
from nam_megatron.lint.read import Launch, read, stored
from nam_megatron.lint.rules import Finding, check
from nam_megatron.lint.rules.parser import left_open, own
from nam_megatron.lint.values import Args
from nam_megatron.targets import Target, current


@dataclass(frozen=True)
class Report:
    """A launch, what it trains, and the traps it steps in. open: flags of which Megatron or the text does not tell what they make."""

    name: str
    launch: Launch
    args: Args
    model: Model
    findings: tuple[Finding, ...]
    open: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return FINDINGS if self.findings or self.open else OK


def lint(
    text: str | Path,
    name: str = "-",
    gpus: int | None = None,
    ignore: Iterable[str] = (),
    target: Target | None = None,
) -> Report:
    """Look at a launch.

    Args:
        text: a list of flags, a shell script, or YAML; a path: a checkpoint's file with its arguments.
        name: what messages call it.
        gpus: world size, where the text does not say.
        ignore: ids of rules to leave out.
        target: the Megatron that would be started; the current one unless given.

    Raises:
        Refused: if there is no launch in the text, or one on another number of GPUs than `gpus`.
    """
    launch = stored(text, target or current()) if isinstance(text, Path) else read(text, target or current(), name)
    if launch.gpus and gpus not in (None, launch.gpus):
        raise Refused(
            Problem(
                f"`gpus={gpus}`, and `{name}` says {launch.gpus}", key="gpus", hint="leave it out, or change the text"
            )
        )
    args = Args(launch if gpus is None else launch.on(gpus))
    model, ignored = Model(args), tuple(ignore)
    unknown = [t.about for t in own(args)] if "unknown-flag" not in ignored else []
    values = left_open(args) if "unknown-variable" not in ignored else ()
    unset = [flag for why, flag, _ in values if why in ("unset", "branch")]
    return Report(name, launch, args, model, tuple(check(args, model, ignored)), tuple(dict.fromkeys(unknown + unset)))
