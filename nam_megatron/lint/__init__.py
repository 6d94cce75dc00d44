"""Which model does this command line really train? For any launch of Megatron-Core 0.19.2, ours or not.

read.py finds the launch in a text (shell.py and follow.py: a shell script; container.py: a container of Megatron-Bridge's), values.py
reads its words as Megatron's parser would, model.py derives what is built, count.py counts it, ours.py knows our own plans, rules are the
traps, describe.py the words, recipe.py a recipe of ours.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nam_megatron.errors import FINDINGS, OK, Problem, Refused
from nam_megatron.lint.follow import Fork
from nam_megatron.lint.model import Model
from nam_megatron.lint.read import Launch, read, stored
from nam_megatron.lint.rules import Finding, check
from nam_megatron.lint.rules.parser import left_open, own
from nam_megatron.lint.values import Args
from nam_megatron.targets import Target, current

MOST = 48  # readings of one text
LONG = 2_000  # characters, each of which costs as many again: a long text of Python takes a second a reading


@dataclass(frozen=True)
class Report:
    """A launch, what it trains, and the traps it steps in. open: flags of which Megatron or the text does not tell what they make.

    forks: of each condition that the text does not decide, and something hangs on, the reports of its ways. alone: as if none went any way.
    """

    name: str
    launch: Launch
    args: Args
    model: Model
    findings: tuple[Finding, ...]
    open: tuple[str, ...]
    forks: tuple[tuple[tuple[str, "Report"], ...], ...] = ()
    alone: tuple[Args, Model] | None = None

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
    most = MOST // (1 + len(launch.text) // LONG) if launch.kind in ("script", "python") else MOST
    readings = Readings(text, name, gpus, tuple(ignore), target or current(), most)
    return readings.report(launch if gpus is None else launch.on(gpus))


@dataclass
class Readings:
    """Of one text, by how the conditions go that it does not decide."""

    text: str | Path
    name: str
    gpus: int | None
    ignored: tuple[str, ...]
    target: Target
    left: int

    def report(
        self, launch: Launch, decided: frozenset[tuple[str, bool]] = frozenset(), passed: frozenset[str] = frozenset()
    ) -> Report:
        """passed: conditions that are looked at apart from this one."""
        args = Args(launch)
        model, alone, asked = Model(args), None, passed.union(*(arm.decided for fork in launch.forks for arm in fork))
        forks = [ways for fork in launch.forks if (ways := tuple(self.ways(launch, fork, decided, passed, asked)))]
        if forks:
            told = dict(args.open_values())
            alone, args = (args, model), Args(launch, {n: on for n, on in _hanging(forks).items() if n not in told})
            model = Model(args)
        findings = [
            f
            for f in check(args, model, self.ignored)
            if all((f.id, f.flag) in {(g.id, g.flag) for g in way.findings} for ways in forks for _, way in ways)
        ]
        unknown = [t.about for t in own(args)] if "unknown-flag" not in self.ignored else []
        values = left_open(args) if "unknown-variable" not in self.ignored else ()
        unset = [flag for why, flag, _ in values if why in ("unset", "branch", "condition")]
        open_ = tuple(dict.fromkeys(unknown + unset))
        return Report(self.name, launch, args, model, tuple(findings), open_, tuple(forks), alone)

    def ways(
        self,
        launch: Launch,
        fork: Fork,
        decided: frozenset[tuple[str, bool]],
        passed: frozenset[str],
        asked: frozenset[str],
    ) -> Iterator[tuple[str, Report]]:
        """The ways of a fork, where they differ in what is launched, and each is a launch of the same script."""
        if not isinstance(self.text, str) or passed & fork[-1].decided.keys() or len(fork) > self.left:
            return
        self.left -= len(fork)
        taken = [decided.union(arm.decided.items()) for arm in fork]
        try:
            read_ = [read(self.text, self.target, self.name, dict(way)) for way in taken]
        except Refused:
            return
        same = {one.script for one in read_} == {launch.script}
        if not same or len({repr((one.words, one.env, one.gpus, one.forks)) for one in read_}) < 2:
            return
        for arm, way, one in zip(fork, taken, read_, strict=True):
            yield arm.label, self.report(one if self.gpus is None else one.on(self.gpus), way, asked)


def _hanging(forks: Iterable[tuple[tuple[str, Report], ...]]) -> dict[str, tuple[str, ...]]:
    """Arguments that are one or another by which way a fork goes, and what it asks."""
    found: dict[str, tuple[str, ...]] = {}
    for ways in forks:
        given = [way.args for _, way in ways]
        for name in dict.fromkeys(name for args in given for name in args.given):
            if len({repr(args.given.get(name, [("", None, "")])[-1][1]) for args in given}) > 1:
                found[name] = (*found.get(name, ()), *(label for label, _ in ways[:-1]))
    return found
