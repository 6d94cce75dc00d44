"""Which model does this command line really train? For any launch of Megatron-Core 0.19.2, ours or not.

read.py finds the launch in a text (shell.py and follow.py: a shell script; container.py: a container of Megatron-Bridge's), values.py
reads its words as Megatron's parser would, model.py derives what is built, count.py counts it, ours.py knows our own plans, rules are the
traps, describe.py the words, recipe.py a recipe of ours.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nam_megatron.errors import FINDINGS, OK, Refused
from nam_megatron.lint.follow import Fork
from nam_megatron.lint.model import Model
from nam_megatron.lint.read import Launch, read, stored
from nam_megatron.lint.rules import Finding, check
from nam_megatron.lint.rules.parser import left_open, own
from nam_megatron.lint.rules.rule import without
from nam_megatron.lint.values import Args, Open
from nam_megatron.targets import Target, current

MOST = 48  # readings of one text
STEPS = 5_000  # of following a shell script, each of which costs as many again
LONG = 2_000  # characters, each of which costs as many again: a long text of Python takes a second a reading


@dataclass(frozen=True)
class Report:
    """A launch, what it trains, and the traps it steps in. open: flags of which Megatron or the text does not tell what they make.

    forks: of each condition that the text does not decide, and something hangs on, the reports of its ways, with open what the other
    conditions decide.
    """

    name: str
    launch: Launch
    args: Args
    model: Model
    findings: tuple[Finding, ...]
    open: tuple[str, ...]
    forks: tuple[tuple[tuple[str, "Report"], ...], ...] = ()

    @property
    def exit_code(self) -> int:
        return FINDINGS if self.findings or self.open else OK


def lint(
    text: str | Path, name: str = "-", gpus: int | None = None, ignore: Iterable[str] = (), target: Target | None = None
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
        message = f"`gpus={gpus}`, and `{name}` says {launch.gpus}"
        raise Refused(message, key="gpus", hint="leave it out, or change the text")
    cost = len(launch.text) // LONG if launch.kind in ("script", "python") else launch.spent // STEPS
    most = MOST // (1 + cost)
    readings = Readings(text, name, gpus, tuple(ignore), target or current(), most)
    return readings.report(readings.reading(launch if gpus is None else launch.on(gpus)))


@dataclass
class Readings:
    """Of one text, by how the conditions go that it does not decide."""

    text: str | Path
    name: str
    gpus: int | None
    ignored: tuple[str, ...]
    target: Target
    left: int

    def report(self, read_: "Reading", others: Mapping[str, Open] | None = None) -> Report:
        """others: arguments that hang on what is asked beside this."""
        launch, beside, hanging = read_.launch, {**read_.left, **(others or {})}, read_.by_fork
        forks = []
        for at, ways in enumerate(read_.forks):
            more = {name: on for one in (*hanging[:at], *hanging[at + 1 :]) for name, on in one.items()}
            forks.append(tuple((label, self.report(way, beside | more)) for label, way in ways))
        args = Args(launch, beside | read_.hanging)
        model = Model(args)
        findings = [
            f
            for f in check(args, model, self.ignored)
            if all(_about(f) in map(_about, way.findings) for ways in forks for _, way in ways)
        ]
        for (_, first), *rest in forks:
            for f in first.findings:
                alike = [[g for g in way.findings if _about(g) == _about(f)] for _, way in rest]
                if all(alike) and _about(f) not in map(_about, findings):
                    same = all(g == [f] for g in alike)
                    findings.append(f if same else replace(f, flag=_about(f)[1], detail=""))
        unknown = [t.about for t in own(args)] if "unknown-flag" not in self.ignored else []
        values = left_open(args) if "unknown-variable" not in self.ignored else ()
        unset = [flag for why, flag, _ in values if why in ("unset", "branch", "condition")]
        open_ = tuple(dict.fromkeys(unknown + unset))
        return Report(self.name, launch, args, model, tuple(findings), open_, tuple(forks))

    def reading(
        self, launch: Launch, decided: frozenset[tuple[str, bool]] = frozenset(), passed: frozenset[str] = frozenset()
    ) -> "Reading":
        """passed: conditions that are looked at apart from this one."""
        asked = passed.union(*(arm.decided for fork in launch.forks for arm in fork))
        forks, cut = [], False
        for fork in launch.forks:
            cut |= len(fork) > self.left or bool(passed & fork[-1].decided.keys())
            forks.append(tuple(self.ways(launch, fork, decided, passed, asked)))
        return Reading(launch, tuple(ways for ways in forks if ways), cut)

    def ways(
        self,
        launch: Launch,
        fork: Fork,
        decided: frozenset[tuple[str, bool]],
        passed: frozenset[str],
        asked: frozenset[str],
    ) -> Iterator[tuple[str, "Reading"]]:
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
            yield arm.label, self.reading(one if self.gpus is None else one.on(self.gpus), way, asked)


@dataclass(frozen=True)
class Reading:
    """A launch, and of each fork the readings of its ways. cut: there are more forks than are read for, or are read for apart."""

    launch: Launch
    forks: tuple[tuple[tuple[str, "Reading"], ...], ...]
    cut: bool = False

    @cached_property
    def left(self) -> dict[str, Open]:
        """Arguments whose flags stand in branches of forks that are not read for."""
        words = (word for word, apart in self.launch.perhaps.items() if apart or self.cut)
        flags = [flag for word in words if (flag := self.launch.target.by_name(word.partition("=")[0]))]
        return {f.dest: Open(("one of many conditions",), True) for f in flags if f.dest not in self.hanging}

    @cached_property
    def by_fork(self) -> list[dict[str, Open]]:
        return [_hanging(ways) for ways in self.forks]

    @cached_property
    def hanging(self) -> dict[str, Open]:
        told, found = dict(Args(self.launch).open_values()), dict[str, Open]()
        for name, on in (pair for one in self.by_fork for pair in one.items() if pair[0] not in told):
            before = found.get(name, Open(()))
            found[name] = Open((*before.names, *on.names), before.lacking or on.lacking)
        return found

    @cached_property
    def args(self) -> Args:
        return Args(self.launch, self.hanging)


def _about(f: Finding) -> tuple[str, str]:
    """What a finding is known by, whatever the value is."""
    return f.id, f.flag if f.flag.startswith(without("")) else f.flag.split()[0]


def _hanging(ways: tuple[tuple[str, Reading], ...]) -> dict[str, Open]:
    """Arguments that are one or another by which way a fork goes, and what it asks."""
    found: dict[str, Open] = {}
    for name in dict.fromkeys(name for _, way in ways for name in (*way.args.given, *way.left)):
        values = {repr(way.args.given.get(name, [("", None, "")])[-1][1]) for _, way in ways}
        if len(values) > 1 or len({name in way.left for _, way in ways}) > 1:
            lacking = not all(way.args.sure(name) for _, way in ways)
            found[name] = Open(tuple(label for label, _ in ways[:-1]), lacking)
    return found
