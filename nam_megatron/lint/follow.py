"""What a launch script would run, without running it: variables, arrays, tests, heredocs and scripts inside scripts.

Nothing is executed and nothing is guessed: what is read is what bash would run, or open. What the script does not set is a hole,
`hole("NAME")`, which travels through strings and arrays until somebody needs the value. Where a condition cannot be told no branch
is taken: what the branches would set becomes a hole, flags they would append are noted, commands in them may run. Such a condition is
a fork, and the script can be read again with it decided. A loop over known
words is run for each of them; of another what it appends ends in a hole. The script is called without arguments.
"""

import ast
import fnmatch
import glob
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from nam_megatron.lint.shell import (
    BLANK,
    CLOSE,
    NAME,
    OPEN,
    Body,
    Branch,
    Chain,
    Command,
    Function,
    Loop,
    Part,
    ShellError,
    Subshell,
    Token,
    blanks_kept,
    inside,
    parsed,
)

HOLE = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
REPLACED = re.compile(
    r"([A-Za-z_]\w*)/(/?)([^/*?\[\\$\"'#%]+)(?:/([^$\"'`\\]*))?"
)  # ${NAME//old/new}, of plain letters
CUT = re.compile(r"([A-Za-z_]\w*)([%#/,^@].+|:[^-=+?].*)", re.DOTALL)  # ${NAME%/}, ${NAME:1:2}
TRIMMED = re.compile(r"(%%?|##?)([^$\"'`\\^]+)")
JOINED = re.compile(r"""\s*IFS=['"]?([^'";])[^;]*;\s*echo\s+"\$\{(\w+)\[\*\]\}"\s*""")  # $(IFS=,; echo "${A[*]}")
COUNT = re.compile(r"\s*(\w+)\s*=([^;]+);\s*\1\s*(<=?)([^;]+);\s*(?:\1\+\+|\+\+\1|\1\s*\+=\s*1)\s*")
COMPARED = re.compile(r"([^<>=!&|]+)(<=?|>=?|==|!=)([^<>=!&|]+)")
BUDGET = 200_000  # steps; a script that takes more is no launch
BRANCH = 20  # steps of a branch that may be taken, for its copies
SHELLS = {"bash", "sh", "zsh", "dash"}
COMMAND = re.compile("-c|--(wrap|command|cmd|commandline)")  # what a job is started with: a command in one word
STARTED = re.compile(r"\s*(\w+=\S*\s+)*(\S*/)?(python3?|torchrun|srun|mpirun|deepspeed|bash|sh|cd|export|source)\s")
TAKES_SCRIPT = SHELLS | {"sbatch", "cat", "tee", "srun", "ssh", "qsub", "bsub"}
DECLARE = {"export", "declare", "local", "readonly", "typeset"}
LABEL = 60  # characters of a condition that are shown
# A condition on variables alone, each of them a `V`.
PLAIN = re.compile(r"(! )?(-[nz] )?V( (=|==|!=|-eq|-ne|-gt|-ge|-lt|-le) \S+( or \S+)*)?")
TESTS = ("[", "[[", "test")
NESTED = 8  # scripts in scripts, and calls in calls
ROUNDS = 256  # of one loop
UNREAD = "not read, and it may set what is used here"
LARGEST = 1_000_000  # bytes of a file that a script sources
PRINTS = {"echo", "printf"}
CHANGING = re.compile(r"\+\+|--|<<=|>>=|(?<![<>=!])=(?!=)")  # what sets a variable within `(( ))`
# Commands of which nobody knows here how they end.
ASKS = {"grep", "egrep", "which", "command", "type", "hash", "pgrep", "diff", "cmp", "git", "ping", "read", "let"}
# {1..4}, {1..9..2}, {a,b}
BRACES = re.compile(r"\{(?:(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?|([^{},\s]*(?:,[^{},\s]*)+))\}")


def hole(name: str) -> str:
    return f"{OPEN}{name.replace(' ', BLANK)}{CLOSE}"  # one word, whatever it is called


def holes(text: str) -> tuple[str, ...]:
    """What a text still needs to know."""
    return tuple(name.replace(BLANK, " ") for name in HOLE.findall(text))


def shown(text: str) -> str:
    """`text` with its holes as a person wrote them."""
    return HOLE.sub(lambda m: f"${m[1]}" if re.fullmatch(r"\w+", m[1]) else f"$({m[1]})", text).replace(BLANK, " ")


class Arm(NamedTuple):
    """One way that a fork may go. label: what holds there, for people, `else` of the last; decided: of each condition, by its name, whether
    it does."""

    label: str
    decided: dict[str, bool]


Fork = tuple[Arm, ...]


def fork(conditions: Iterable[tuple[str, str]]) -> Fork:
    """Of conditions that are asked one after the other, each by its name and for people."""
    arms, passed = [], dict[str, bool]()
    for name, label in conditions:
        arms.append(
            Arm(label if len(label) <= LABEL else f"{label[: LABEL - 33]}...{label[-30:]}", {**passed, name: True})
        )
        passed[name] = False
    return (*arms, Arm("else", passed))


@dataclass
class Run:
    """What was found.

    commands: (words, exported environment) in order. perhaps: the same with a line, of branches whose condition cannot be told; each
    branch as if taken. uncalled: the same of functions that nothing here calls. left: the variables after each of those. printed: what
    `echo` shows. unset: names taken as absent from the environment, or from what the script is called with (`1`, `@`), because it copes
    without: the default it has, None where it only asks. notes: what could not
    be told. decided: of conditions that cannot be told how they are taken; forks: of the others that change a variable. appended: flags
    that their branches add to one, and whether that is in a round of which nobody knows. printing: commands whose output is open.
    """

    commands: list[tuple[tuple[str, ...], Mapping[str, str | None]]] = field(default_factory=list)
    perhaps: list[tuple[tuple[str, ...], Mapping[str, str | None], int]] = field(default_factory=list)
    uncalled: list[tuple[tuple[str, ...], Mapping[str, str | None], int]] = field(default_factory=list)
    left: dict[str, Mapping[str, str | list[str]]] = field(default_factory=dict)
    printed: list[tuple[tuple[str, ...], Mapping[str, str | None]]] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    unset: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    spent: int = 0
    decided: Mapping[str, bool] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    appended: dict[str, bool] = field(default_factory=dict)
    printing: set[str] = field(default_factory=set)

    def spend(self, steps: int = 1) -> None:
        self.spent += steps
        if self.spent > BUDGET:
            raise ShellError("too long for a launch script")


def run(text: str, folder: Path | None = None, decided: Mapping[str, bool] | None = None) -> Run:
    """Follow a script. folder: where it lies; what it sources from there is read with it. decided: see Run.

    Raises:
        ShellError: if it cannot be read as one.
    """
    found = Run(folder=folder, decided=decided or {})
    try:
        Follower(found).script(text)
    except RecursionError:
        raise ShellError("nested too deep") from None
    return found


class Given(NamedTuple):
    """What a script or a function is called with: `$1`, `$2`, ... as far as they are known. more: others may follow. gone: how many
    of those that are not known were shifted away. sure: how many of the first ones are one word each, whatever is in them."""

    words: list[str]
    more: bool
    gone: int = 0
    sure: int = 0


UNKNOWN = Given([hole("arguments")], True)


class Follower:
    """Of one script, which is called as it stands, without arguments that it would know of."""

    def __init__(self, found: Run, depth: int = 0, functions: dict[str, Function] | None = None):
        self.run, self.depth = found, depth
        self.bodies: list[Body] = []
        self.functions = {} if functions is None else functions
        self.called: set[str] = set()
        self.given = Given([], True)
        self.place: tuple[object, ...] = ()  # the calls that it is in
        # Of each call: what its local variables were outside, and exported as.
        self.locals: list[dict[str, tuple[Any, Any]]] = []

    def script(self, text: str) -> None:
        nodes, self.bodies = parsed(text)
        for node in nodes:
            if isinstance(node, Command) and node.words and node.words[0].literal == "exit":
                break
            self.node(node)
        if self.depth == 0:
            for name, function in list(self.functions.items()):
                if name not in self.called:
                    after, *_ = self.supposed([function.body])
                    self.run.left[name] = after.variables
                    self.run.uncalled += [(*command, function.line) for command in after.commands]
                    self.run.uncalled += after.perhaps

    def nested(self, text: str, shell: bool = True) -> None:
        """A script inside the script. shell: in a shell of its own, which has what is exported and sets nothing here."""
        if self.depth >= NESTED:
            raise ShellError("scripts inside scripts, too deep")
        follower = Follower(self.run, self.depth + 1, self.functions)
        follower.called, follower.place = self.called, (*self.place, text)
        kept = self.run.variables, self.run.env
        if shell:
            self.run.variables = {name: value for name, value in self.run.env.items() if value is not None}
            self.run.env = dict(self.run.env)
        else:
            follower.given, follower.locals = self.given, self.locals
        try:
            follower.script(text)
        except ShellError as err:
            self.run.notes.append(f"a script inside the script cannot be read ({err})")
        if shell:
            self.run.variables, self.run.env = kept

    # Nodes

    def nodes(self, nodes: Iterable[object]) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: object) -> None:
        self.run.spend()
        match node:
            case Command():
                self.command(node)
            case Loop():
                self.loop(node)
            case Chain() | Subshell():
                self.status(node)
            case Branch():
                self.branch(node)
            case Function():
                self.functions[node.name] = node

    def apart(self, node: object) -> bool | None:
        """How it ends in a shell of its own: what it sets is gone afterwards."""
        kept = self.run.variables, self.run.env, self.functions, self.given
        self.run.variables, self.run.env, self.functions = dict(kept[0]), dict(kept[1]), dict(kept[2])
        verdict = self.status(node)
        self.run.variables, self.run.env, self.functions, self.given = kept
        return verdict

    def call(self, function: Function, given: Given, prefix: Mapping[str, str | None]) -> None:
        if len(self.locals) >= NESTED:
            self.run.notes.append(f"line {function.line}: this function calls itself, or others too deep to follow")
            return
        self.called.add(function.name)
        outer, env, place = self.given, self.run.env, self.place
        self.given, self.run.env, self.place = given, {**env, **prefix}, (*self.place, function.name, *given.words)
        self.locals.append({name: (self.run.variables.get(name), env.get(name)) for name in prefix})
        self.run.variables |= {name: value for name, value in prefix.items() if value is not None}
        self.node(function.body)
        for name, kept in self.locals.pop().items():
            places: tuple[dict[str, Any], ...] = (self.run.variables, self.run.env)
            for held, value in zip(places, kept, strict=True):
                held.pop(name, None)
                if value is not None:
                    held[name] = value
        self.given, self.place = outer, place

    def loop(self, node: Loop) -> None:
        """Every round, where it can be told how many there are; else one, and what it appends goes on."""
        first = list(_first_words(node.body))
        steady = not any(w in ("break", "continue", "shift", "read", "return") for w in first)
        counted = self.counted(node.counts) if node.counts else None
        if (node.words is not None or counted) and node.variable:
            words = counted or [f for w in node.words or () for f in self.fields(w)]
            if steady and len(words) <= ROUNDS and not any(map(holes, words)):
                for number, word in enumerate(words):
                    self.put(node.variable, word)
                    self.round(node, number)
                return
        if node.condition:
            rounds = 0
            while (verdict := self.goes_on(node)) and steady and rounds < ROUNDS and not _forever(node.condition):
                self.round(node, rounds)
                rounds += 1
            if verdict is False:
                return
        if node.variable:
            self.put(node.variable, hole(node.variable))
        if "shift" in first and self.given.words:
            self.given = UNKNOWN
        before = dict(self.run.variables)
        # One of words that nobody knows may have no round; a `while` is taken to have one.
        sure = node.words is None or any(not holes(f) for w in node.words for f in self.fields(w))
        self.round(node, None)
        if not (node.condition and _forever(node.condition)):  # which ends in its first round, as far as one can see
            for name, after in list(self.run.variables.items()):
                old, open_ = before.get(name), hole(f"{name} of a loop")
                more = _appended_to(old or [], after)
                if not sure:
                    self.run.appended |= {f: True for f in more or () if f.startswith("--")}
                if isinstance(after, list) and more:
                    self.put(name, [*after, open_])
                elif (
                    isinstance(after, str)
                    and after.startswith((f"{old or ''} ", f"{hole(name)} "))
                    and name != node.variable
                ):
                    self.put(name, f"{after} {open_}")
                elif after != old and name != node.variable:
                    self.put(name, hole(name))

    def round(self, node: Loop, number: int | None) -> None:
        """One round of a loop; of None nobody knows which."""
        place, self.place = self.place, (*self.place, number)
        self.nodes(node.body)
        self.place = place

    def counted(self, text: str) -> list[str] | None:
        """The rounds of `i=0; i<N; i++`; None of another count, and of none."""
        if found := COUNT.fullmatch(text):
            first, last = (_integer(self.arithmetic(bound)) for bound in (found[2], found[4]))
            if first is not None and last is not None and last - first <= ROUNDS:
                return [str(i) for i in range(first, last + (found[3] == "<="))] or None
        return None

    def goes_on(self, node: Loop) -> bool | None:
        verdict = self.truth(node.condition)
        return None if verdict is None else verdict is not node.until

    def branch(self, node: Branch) -> None:
        subject = " ".join(self.fields(node.subject)) if node.subject else ""
        # That may be taken, each with its condition where that cannot be told.
        ways: list[tuple[tuple[str, str] | None, list[Any]]] = []
        closed = False
        for at, (condition, body) in enumerate(node.arms):
            label = ""
            if condition is None or (node.subject and [t.literal for t in condition] == ["*"]):
                verdict: bool | None = True
            elif node.subject:
                verdict = self.matches(subject, condition)
                label = f"{subject} = {' or '.join(map(self.pattern, condition))}"
            else:
                label = " and ".join(map(self.label, condition))
                verdict = self.truth(condition)
            name = self.named(label, node.line, at)
            verdict = self.run.decided.get(name) if verdict is None else verdict
            closed = (
                bool(verdict) and bool(ways) and self.over(body)
            )  # one of the ways before is taken where the script goes on
            if not closed and verdict is not False and (verdict or not self.over(body)):
                ways.append((None if verdict else (name, shown(label)), body))
            if verdict:
                break
        if ways and (ways[0][0] is None or (closed and len(ways) == 1)):
            self.nodes(ways[0][1])
        elif ways:
            asked = [condition for condition, _ in ways if condition]
            self.suppose([body for _, body in ways], node.line, fork(asked)[: -1 if closed else None], bool(verdict))

    def over(self, body: list[Any]) -> bool:
        """Whether the script ends in a branch, and nothing is launched there."""
        ends = any(isinstance(node, Command) and node.words and node.words[0].literal == "exit" for node in body)
        return ends and not _starts(self.supposed(body)[0].commands)

    def label(self, node: object) -> str:
        """A condition, with its holes."""
        if isinstance(node, Chain):
            sides = (self.label(side) for side in (node.left, node.right))
            apart = (isinstance(side, Chain) and side.op != node.op for side in (node.left, node.right))
            return f" {node.op} ".join(
                f"( {side} )" if other else side for side, other in zip(sides, apart, strict=True)
            )
        if isinstance(node, Subshell):
            return " | ".join(map(self.label, node.nodes))
        if isinstance(node, Branch):
            return "; ".join(self.label(inner) for _, body in node.arms for inner in body)
        words = node.words if isinstance(node, Command) else []
        said = [self.joined(w.parts) or "''" for w in words if w.kind == "word"]
        return (
            " ".join(" ".join(w for w in said if w not in ("[", "[[", "]", "]]", "test")).split()) or "a command's end"
        )

    def named(self, label: str, *where: int) -> str:
        """The name of a condition: what it says, and where it is asked unless it is of what the script does not set."""
        called = bool(self.locals or self.given.words or self.depth)
        own = (
            name in self.run.variables.keys() | self.run.printing
            or not (name.isidentifier() or name.isdigit() > called)
            for name in holes(label)
        )
        asked = re.split(r" (?:and|&&|\|\|) ", HOLE.sub("V", label))
        return label if all(map(PLAIN.fullmatch, asked)) and not any(own) else f"{label} {where} {self.place}"

    def matches(self, subject: str, patterns: list[Token]) -> bool | None:
        found = [self.pattern(p) for p in patterns]
        if holes(subject) or any(map(holes, found)):
            return None
        return any(fnmatch.fnmatchcase(subject, p) for p in found)

    def pattern(self, token: Token) -> str:
        """As fnmatch reads it: what is quoted means itself."""
        return "".join(
            glob.escape(self.joined([p])) if p.kind in ("quoted", "double") else self.joined([p]) for p in token.parts
        )

    def truth(self, nodes: list) -> bool | None:
        """Whether the condition of an `if` or a `while` holds; None if that cannot be told."""
        if len(nodes) == 1 and (
            isinstance(nodes[0], Chain) or _tests(nodes[0]) or _negated(nodes[0]) or _named(nodes[0])
        ):
            return self.status(nodes[0])
        if len(nodes) == 1 and (verdict := self.compared(nodes[0])) is not None:
            return verdict
        self.nodes(nodes)
        return None

    def compared(self, node: object) -> bool | None:
        """Whether `(( a < b ))` holds; None where that is not known, and of another command."""
        if not isinstance(node, Command) or len(node.words) != 1 or not node.words[0].parts:
            return None
        part = node.words[0].parts[0]
        found = COMPARED.fullmatch(part.text) if part.kind == "let" else None
        sides = [_integer(self.arithmetic(side)) for side in (found[1], found[3])] if found else []
        return COMPARE[found[2]](*sides) if found and None not in sides else None

    def status(self, node: object) -> bool | None:
        """How a command ends. Tests are judged; anything else is followed and taken to succeed."""
        if isinstance(node, Chain):
            left = self.status(node.left)
            if left is None:
                text = self.label(node.left)
                left, label = self.run.decided.get(name := self.named(text, node.line)), shown(text)
            if left is None:
                one, other = fork([(name, label)])
                taken = (
                    (one, other)
                    if node.op == "&&"
                    else (Arm(f"not ({one.label})", other.decided), Arm("else", one.decided))
                )
                self.suppose([[node.right]], node.line, taken)
            return self.status(node.right) if left is (node.op == "&&") else left
        if _negated(node):
            verdict = self.status(replace(node, words=node.words[1:]))
            return None if verdict is None else not verdict
        if (
            _named(node)
            and len(said := self.fields(node.words[0])) == 1
            and (said[0] in TRUTHS or HOLE.fullmatch(said[0]))
        ):
            return TRUTHS.get(said[0])
        if isinstance(node, Subshell):
            return [self.apart(inner) for inner in node.nodes][-1]
        if isinstance(node, Branch) and len(node.arms) == 1 and node.arms[0][0] is None and (body := node.arms[0][1]):
            self.nodes(body[:-1])
            return self.status(body[-1])
        if not _tests(node):
            self.node(node)
            if not isinstance(node, Command) or not node.words:
                return True
            words = [w.literal or "" for w in node.words]
            if words[0] == "exit" and len(words) == 2 and words[1].isdecimal():
                return int(words[1]) == 0
            return None if self.asks(node.words[0]) else True
        tokens = [w for w in node.words if w.kind == "word"]
        double = tokens[0].literal == "[["
        tokens = tokens[tokens[0].literal in TESTS : len(tokens) - (tokens[-1].literal in ("]", "]]"))]
        words = [f for w in tokens for f in ([self.joined(w.parts)] if double else self.fields(w) or [""])]
        if len(words) > 2 and words[-2] in ("=", "==", "!="):
            words[-1] = self.pattern(tokens[-1]) if double else glob.escape(words[-1])
        return self.test(words)

    def asks(self, token: Token, within: frozenset[str] = frozenset()) -> bool:
        """Whether a command's end says what only the host knows, whether a number is 0, or what a function found. within: functions."""
        if (name := token.literal or "") in within:
            return True
        if function := self.functions.get(name):
            *_, last = [None, *(node for node in _commands([function.body]) if node.words)]
            returns = any(w == "return" for w in _first_words([function.body]))
            return returns or (last is not None and (_tests(last) or self.asks(last.words[0], within | {name})))
        return token.literal in ASKS or any(part.kind == "let" for part in token.parts)

    def test(self, words: list[str]) -> bool | None:
        """Whether a test holds. The right side of an equation is a pattern."""
        if words[:1] in (["true"], [":"], ["false"]) and len(words) == 1:
            return words[0] != "false"
        if not words:
            return False
        if words[0] == "getopts":
            self.run.unset |= {"@": None} if self.given.more else {}
            return None if self.given.words else False
        if words[0] == "!":
            inner = self.test(words[1:])
            return None if inner is None else not inner
        if (len(words) == 2 and words[0] in ("-z", "-n")) or len(words) == 1:
            names = holes(words[-1])
            empty = words[-1] == "".join(map(hole, names))
            if any(name in self.run.variables for name in names):
                return None  # one that the script sets somewhere
            if empty:  # the script asks whether the environment has it, so it copes if not
                self.run.unset |= {name: None for name in names if name not in self.run.unset}
            return empty if words[0] == "-z" else not empty
        if len(words) == 3 and not any(map(holes, words)):
            left, op, right = words
            if op in ("=", "==", "!="):
                return fnmatch.fnmatchcase(left, right) is (op != "!=")
            if op in NUMERIC and _integer(left) is not None and _integer(right) is not None:
                return NUMERIC[op](int(left), int(right))
        return None

    def suppose(self, arms: Iterable[Iterable[object]], line: int, ways: Fork, one_is: bool = False) -> None:
        """Branches of which nobody knows whether one is taken: what they would run may run, and what they set is not known after them.

        one_is: one of them is, so that what all of them set alike is known.
        """
        before, ends = self.run, [self.supposed(arm) for arm in arms]
        starts = any(_starts(after.commands) for after, _, _ in ends)
        changes = (
            (after.variables, after.env, given) != (before.variables, before.env, self.given) or after.forks
            for after, _, given in ends
        )
        # In a round of which nobody knows a condition on what the script sets may go both ways.
        loose = None in self.place and any(name.endswith(f" {self.place}") for arm in ways for name in arm.decided)
        if not starts and not loose and any(changes) and ways not in before.forks:
            before.forks.append(ways)
        for name in ends[0][0].variables if one_is else ():
            values = [after.variables.get(name) for after, _, _ in ends]
            if values[0] is not None and all(value == values[0] for value in values):
                self.put(name, values[0])
        for after, functions, given in ends:
            before.perhaps += [*((words, env, line) for words, env in after.commands), *after.perhaps]
            self.functions |= functions
            self.given = given if given == self.given else UNKNOWN
            for name in dict.fromkeys((*before.variables, *after.variables)):
                self.unsettle(name, after.variables.get(name), line, loose)
            for name in after.env.keys() - before.env.keys():
                before.env[name] = hole(name)

    def supposed(self, nodes: Iterable[object]) -> tuple[Run, dict[str, Function], Given]:
        """What some nodes would do, the functions and the arguments afterwards; nothing of it is kept."""
        self.run.spend(BRANCH)
        actual, functions, given, called = self.run, self.functions, self.given, set(self.called)
        self.run = replace(
            actual,
            commands=[],
            perhaps=[],
            env=dict(actual.env),
            variables=dict(actual.variables),
            unset={},
            notes=[],
            forks=[],
        )
        self.functions = dict(functions)
        try:
            self.nodes(nodes)
            return self.run, self.functions, self.given
        finally:
            actual.spent, self.run = self.run.spent, actual
            self.functions, self.given, self.called = functions, given, called

    def unsettle(self, name: str, after: str | list[str] | None, line: int, loose: bool) -> None:
        """A variable that a branch may have changed to `after`. Flags that it would append are noted, and left out."""
        value = self.run.variables.get(name)
        if value == after or value == hole(name):
            return
        more = _appended_to(value, after)
        flags = [f for f in more or () if f.startswith("--")]
        self.run.appended |= dict.fromkeys(flags, loose) | {f: True for f in flags if self.run.appended.get(f)}
        if more is None:
            self.put(name, hole(name))
        elif flags := [f for f in more if f.startswith("--") and f not in self.flags_of_everything()]:
            text = f"line {line}: its condition cannot be told here, left out: {' '.join(map(shown, flags))}"
            self.run.notes.append(text)
        elif not any(f.startswith("--") for f in more):
            open_ = hole(f"{name} of a branch")
            self.put(name, [*value, open_] if isinstance(value, list) else f"{value} {open_}")

    def flags_of_everything(self) -> set[str]:
        return {f for v in self.run.variables.values() if isinstance(v, list) for f in v}

    # Commands

    def command(self, node: Command) -> None:
        words = list(node.words)
        if words and all(_assignment(w)[0] or _changed(w) for w in words):
            for token in words:
                self.assign(token)
            return
        prefix: dict[str, str | None] = {}
        while words and (found := _assignment(words[0]))[0]:  # NAME=value command: the command's own environment
            prefix[found[0]] = self.joined(found[2][0].parts) if found[2] else ""
            words.pop(0)
        if words and words[0].literal in DECLARE:
            options = "".join(token.literal or "" for token in words[1:] if (token.literal or "").startswith("-"))
            for token in words[1:]:
                name = _assignment(token)[0] or token.literal or ""
                if self.locals and words[0].literal not in ("export", "readonly") and "g" not in options:
                    self.locals[-1].setdefault(name, (self.run.variables.get(name), self.run.env.get(name)))
                self.assign(token)
                if set(options) & set("iAnul") and name in self.run.variables:
                    self.put(name, hole(name))  # what is assigned means something else
                value = self.run.variables.get(name)
                if words[0].literal == "export" and isinstance(value, str):
                    self.run.env[name] = value
            return
        fields = [f for w in words if w.kind == "word" for f in self.fields(w)]
        if fields and fields[0] in ("[", "[["):  # a test whose outcome nobody asked for
            return
        if fields[:2] == ["printf", "-v"] and len(fields) > 4 and fields[3].count("%") == fields[3].count("%s") == 1:
            self.put(fields[2], fields[3].replace("%s", fields[4]))
            return
        if fields and fields[0] in PRINTS:
            self.run.printed.append((tuple(fields[1:]), {**self.run.env, **prefix}))
            return
        if fields[:1] in (["read"], ["mapfile"], ["readarray"]):
            for name in filter(str.isidentifier, fields[1:]):
                self.put(name, hole(name))
        if fields[:1] == ["unset"]:
            for name in fields[1:]:
                if "[" in name:
                    self.put(name.partition("[")[0], hole(name.partition("[")[0]))
                elif "-f" in fields:
                    self.functions.pop(name, None)
                elif not name.startswith("-"):
                    self.run.variables.pop(name, None)
                    self.run.env[name] = None
            return
        more = self.given.more and any(p.kind == "var" and p.text in ("@", "*") for w in words for p in w.all_parts())
        if fields[:2] == ["set", "--"]:
            self.given = Given(fields[2:], more, sure=self.sure(words[2:]))
            return
        if fields[:1] == ["shift"]:
            by, (words_, more, gone, sure) = _integer(fields[1]) or 0 if len(fields) > 1 else 1, self.given
            self.given = Given(words_[by:], more, gone + max(by - len(words_), 0), max(sure - by, 0))
            return
        if fields[:1] == ["let"]:
            for text in fields[1:]:
                self.let(text)
            return
        if fields and (function := self.functions.get(fields[0])):
            self.call(function, Given(fields[1:], more, sure=self.sure(words[1:])), prefix)
            return
        if fields[:1] == ["env"]:
            while len(fields) > 1 and (match := re.match(r"([A-Za-z_]\w*)=(.*)", fields[1], re.DOTALL)):
                prefix[match[1]] = match[2]
                fields.pop(1)
        if not fields or _base(fields[0]) in TAKES_SCRIPT:
            for number in node.heredocs:
                if number < len(self.bodies):
                    body = self.bodies[number]
                    self.nested(self.joined(inside(body.text, "\\$`\n")) if body.expands else body.text)
        if fields[:1] in (["source"], ["."]) and len(fields) > 1:
            return self.sourced(fields[1])
        if fields[:1] == ["eval"] and re.match(rf"\w*{OPEN}[^{CLOSE}]*{CLOSE}\w*\+?=", " ".join(fields[1:])):
            self.run.notes.append(f"{UNREAD}: {shown(' '.join(fields))}")
            return None
        if fields[:1] == ["eval"]:
            return self.nested(" ".join(fields[1:]), shell=False)
        for i in range(1, len(fields)):
            option, _, text = fields[i].partition("=")
            text = text or "".join(fields[i + 1 : i + 2])
            for_shell = re.fullmatch(r"-[a-z]*c", fields[i]) and any(_base(f) in SHELLS for f in fields[:i])
            if text and (for_shell or (COMMAND.fullmatch(option) and STARTED.match(text))):
                outer, self.run.env = self.run.env, {**self.run.env, **prefix}
                self.nested(text)
                self.run.env = outer
                return None
        if fields:
            self.run.commands.append((tuple(fields), {**self.run.env, **prefix}))
        return None

    def sourced(self, word: str) -> None:
        """A file that runs as part of this script, where it lies beside it or below its folder."""
        here = re.fullmatch(f"{OPEN}([^{CLOSE}]*(?:BASH_SOURCE|\\$0)[^{CLOSE}]*){CLOSE}/(.*)", word)
        up = re.search(r"\)\"?((?:/\.\.)+)", here[1].replace(BLANK, " ")) if here else None
        inner = f"{'../' * (up[1].count('..') if up else 0)}{here[2]}" if here else word
        beside = self.run.folder is not None and not holes(inner) and not inner.startswith(("/", "~"))
        file = self.run.folder / inner if self.run.folder and beside else None
        try:
            text = (
                file.read_text(encoding="utf-8") if file and file.is_file() and file.stat().st_size < LARGEST else None
            )
        except (OSError, UnicodeDecodeError):
            text = None
        if text is None:
            self.run.notes.append(f"{UNREAD}: {shown(word)}")
        else:
            self.nested(text, shell=False)

    def assign(self, token: Token) -> str | None:
        """Carry an assignment out; returns the name, None if it is none."""
        if changed := _changed(token):
            self.change(token)
            return changed[0]
        name, append, words = _assignment(token)
        if name is None:
            return None
        value: str | list[str]
        value = [f for w in words for f in self.fields(w)] if token.kind == "array" else self.joined(words[0].parts)
        old = self.run.variables.get(name)
        if append and old is not None:
            text = isinstance(old, str) and isinstance(value, str)
            value = f"{old}{value}" if text else [*_listed(old), *_listed(value)]
        self.run.spend(1 + sum(1 + len(v) // 64 for v in _listed(value)))
        self.put(name, value)
        return name

    def put(self, name: str, value: str | list[str]) -> None:
        """Set a variable; one that is exported stays so."""
        self.run.variables[name] = value
        if self.run.env.get(name) is not None:
            self.run.env[name] = value if isinstance(value, str) else hole(name)

    def change(self, token: Token) -> None:
        """`A[1]=value`, or `(( ))`."""
        if token.parts[0].kind == "let":
            for text in token.parts[0].text.split(","):
                self.let(text)
            return
        match = re.fullmatch(r"([A-Za-z_]\w*)\[([^\]]*)\](\+?)=(.*)", self.joined(token.parts), re.DOTALL)
        name, index, append, value = match.groups() if match else (_changed(token)[0], "", "", "")
        old, at = self.run.variables.get(name, []), _integer(index)
        if isinstance(old, list) and at is not None and 0 <= at <= len(old) and not append:
            self.put(name, [*old[:at], value, *old[at + 1 :]])
        else:
            self.put(name, hole(name))

    def let(self, text: str) -> None:
        """An arithmetic command."""
        if step := re.fullmatch(r"\s*(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))\s*", text):
            text = f"{step[1] or step[4]} {(step[2] or step[3])[0]}= 1"
        if found := re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL):
            name, op, value = found.groups()
            self.put(name, self.arithmetic(f"{name} {op} ({value})" if op else value))
        elif CHANGING.search(text):
            for name in NAME.findall(text):
                self.put(name, hole(name))

    # Expansion

    def joined(self, parts: Iterable[Part]) -> str:
        """One string, as an assignment's value is: no splitting."""
        text = "".join(" ".join(self.values(p)) for p in parts)
        self.run.spend(len(text) // 64)
        return text

    def fields(self, token: Token) -> list[str]:
        """The words that a word becomes."""
        return [field for word in _unbraced(token) for field in self.split(word)]

    def sure(self, words: Iterable[Token]) -> int:
        """How many of the first fields of some words are one word each: what is open in them is quoted, and no array."""
        count = 0
        for word in words:
            fields = self.fields(word)
            bare = any(p.kind not in ("raw", "quoted", "double") for p in word.parts)
            if any(map(holes, fields)) and (bare or any(p.kind == "var" and "@" in p.text for p in word.all_parts())):
                break
            count += len(fields)
        return count

    def split(self, token: Token) -> list[str]:
        done: list[str] = []
        current: str | None = None
        for part in token.parts:
            values, glued = self.values(part), True
            if part.kind not in ("raw", "quoted", "double"):  # what unquoted expansions give is cut at blanks
                text = " ".join(values)
                values, glued = text.split(), not text[:1].isspace()
                values += [""] if values and text[-1:].isspace() else []
            elif part.kind == "raw" and not part.text:
                continue
            for i, value in enumerate(values):
                if (i or not glued) and current is not None:
                    done.append(current)
                    current = None
                current = (current or "") + value
            if part.kind not in ("raw", "quoted", "double") and values and values[-1] == "":
                current = None
        if current is not None:
            done.append(current)
        self.run.spend(1 + sum(1 + len(f) // 64 for f in done))
        return done

    def values(self, part: Part) -> list[str]:
        """What a part stands for: one string, or the elements of an array."""
        match part.kind:
            case "raw" | "quoted":
                return [part.text]
            case "double":
                parts = [p for p in inside(part.text) if p.kind != "quoted" or p.text]
                if len(parts) == 1 and parts[0].kind == "var" and re.fullmatch(r"\w+\[@\]|@", parts[0].text):
                    return self.values(parts[0])
                return [self.joined(parts)]
            case "arith":
                return [self.arithmetic(part.text)]
            case "var":
                return self.variable(part.text)
        if re.fullmatch(r"\s*#.*", part.text):  # `# a comment` between a command's words
            return []
        self.run.printing.add(_brief(part.text))
        return self.sequence(part.text) or [hole(_brief(part.text))]

    def sequence(self, text: str) -> list[str]:
        """The numbers of `seq LAST` or `seq FIRST LAST` as one text of lines, an array with a letter between; else nothing."""
        if found := JOINED.fullmatch(text):
            return [found[1].join(self.variable(f"{found[2]}[@]"))]
        if not re.match(r"\s*seq\s", text):
            return []
        match = re.fullmatch(r"\s*seq\s+(?:(-?\d{1,9})\s+)?(-?\d{1,9})\s*", self.joined(blanks_kept(text)))
        return ["\n".join(_counted(match[1] or "1", match[2]))] if match else []

    def variable(self, text: str) -> list[str]:
        """`$text` or `${text}`."""
        self.run.spend()
        given = self.given.words
        if text in ("@", "*"):
            if self.given.more:
                self.run.unset["@"] = None
            return given
        if text == "#":
            return [hole("#") if any(map(holes, given)) else str(len(given))]
        if counted := re.fullmatch(r"#(\w+)\[[@*]\]", text):
            held = self.run.variables.get(counted[1])
            words = held if isinstance(held, list) else [hole(text)]
            open_ = any(holes(word) or re.search(r"[*?[]", word) for word in words)  # or names of files
            return [hole(_brief(text)) if open_ else str(len(words))]
        if replaced := REPLACED.fullmatch(text):
            old = " ".join(self.variable(replaced[1]))
            return [old if holes(old) else old.replace(replaced[3], replaced[4] or "", -1 if replaced[2] else 1)]
        if (cut := CUT.fullmatch(text)) and holes(old := " ".join(self.variable(cut[1]))):
            return [old]
        if cut and (trimmed := TRIMMED.fullmatch(cut[2])):
            return [_trimmed(old, *trimmed.groups())]
        match = re.fullmatch(r"(\w+)(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", text, re.DOTALL)
        if not match:
            return [hole(_brief(text))]
        name, index, operation, rest = match.groups()
        value = self.run.variables.get(name)
        if name.isdigit() and name != "0":
            at = int(name) - 1
            value = given[at] if at < self.given.sure or (at < len(given) and not any(map(holes, given))) else None
            if value is None and not operation and not self.given.more and not any(map(holes, given)):
                value = ""  # beyond the last, and not set
            name = str(int(name) + self.given.gone)
        if isinstance(value, list) and index not in ("[@]", "[*]"):
            number = _integer((index or "[0]")[1:-1])
            value = value[number] if number is not None and -len(value) <= number < len(value) else None
        kind = (operation or "").lstrip(":")
        if kind in ("-", "=") and (value is None or value == [] or (value == "" and operation.startswith(":"))):
            value = self.joined(blanks_kept(rest))
            if name not in self.run.variables and (self.given.more or not name.isdigit()):
                self.run.unset[name] = value
            if kind == "=":
                self.put(name, value)
        if kind == "+":
            if isinstance(value, str) and holes(value) and not HOLE.sub("", value):
                return [hole(_brief(text))]  # it may be empty
            if value is None and "--" in rest and name not in self.run.variables:
                self.run.unset.setdefault(name, None)  # set, it brings flags
            value = self.joined(blanks_kept(rest)) if value or (value == "" and operation == "+") else ""
        return [hole(name)] if value is None else _listed(value)

    def arithmetic(self, text: str) -> str:
        """`$(( text ))`, in whole numbers."""
        if CHANGING.search(text):  # which it does beside having a value
            for name in NAME.findall(text):
                self.put(name, hole(name))
            return hole(_brief(f"({text})"))
        terms = r"\$\{(#\w+\[[@*]\])\}|\$?\{?([A-Za-z_]\w*)\}?"
        filled = re.sub(terms, lambda m: " ".join(self.variable(m[1] or m[2])), text)
        value = None if holes(filled) or len(filled) > 200 else _calculate(filled)
        return hole(_brief(f"({text})")) if value is None else str(value)


def _starts(commands: Iterable[tuple[tuple[str, ...], Any]]) -> bool:
    """Whether one of some commands is a launch."""
    return any(sum(w.startswith("--") for w in words) > 2 for words, _ in commands)


def _negated(node: object) -> TypeGuard[Command]:
    return (
        isinstance(node, Command)
        and len(node.words) > 1
        and node.words[0].literal == "!"
        and (_tests(rest := replace(node, words=node.words[1:])) or _named(rest))
    )


def _named(node: object) -> TypeGuard[Command]:
    """Whether a command is a variable alone, `$USE_MOE`, which may be true or false."""
    words = node.words if isinstance(node, Command) else []
    return len(words) == 1 and words[0].kind == "word" and [p.kind for p in words[0].all_parts()] == ["var"]


def _tests(node: object) -> TypeGuard[Command]:
    """Whether a node is a test: `[ ]`, `[[ ]]`, `test`."""
    return (
        isinstance(node, Command)
        and bool(node.words)
        and node.words[0].literal in (*TESTS, "true", "false", ":", "getopts")
    )


def _changed(token: Token) -> list[str]:
    """The variables that a word changes otherwise than by `NAME=`: an element's array, what `(( ))` counts."""
    first = token.parts[0] if token.parts else Part("", "")
    if first.kind == "let":
        return NAME.findall(first.text)
    element = re.match(r"([A-Za-z_]\w*)\[", first.text) if first.kind == "raw" else None
    rest = "".join(p.text for p in token.parts) if element else ""
    return [element[1]] if element and re.search(r"\]\+?=", rest) else []


def _assignment(token: Token) -> tuple[str | None, bool, tuple[Token, ...]]:
    """(name, whether it appends, the words assigned); a name of None if the token is no assignment."""
    if token.kind == "array":
        return token.text.rstrip("+="), token.text.endswith("+="), token.elements
    first = token.parts[0] if token.parts else Part("", "")
    if first.kind == "raw" and (match := re.match(r"([A-Za-z_]\w*)(\+?)=", first.text)):
        rest = Part("raw", first.text[match.end() :])
        return match[1], bool(match[2]), (Token("word", parts=(rest, *token.parts[1:])),)
    return None, False, ()


def _appended_to(old: str | list[str] | None, new: str | list[str] | None) -> list[str] | None:
    """The words that stand in `new` around all of `old`; None where it is another value."""
    if isinstance(old, list) and isinstance(new, list):
        at = next((i for i in range(len(new) - len(old) + 1) if new[i : i + len(old)] == old), None)
        return None if at is None else [*new[:at], *new[at + len(old) :]]
    if isinstance(old, str) and isinstance(new, str) and old.strip():
        before, found, after = new.partition(old)
        if found and before[-1:].strip() == "" and (after[:1].strip() == "" or old[-1].isspace()):
            return [*before.split(), *after.split()]
    return None


def _commands(nodes: Iterable[object]) -> Iterator[Command]:
    """Every command of some nodes, conditions left out."""
    for node in nodes:
        match node:
            case Command():
                yield node
            case Branch():
                for _, body in node.arms:
                    yield from _commands(body)
            case Chain():
                yield from _commands([node.left, node.right])
            case Loop():
                yield from _commands(node.body)
            case Subshell():
                yield from _commands(node.nodes)


def _first_words(nodes: Iterable[object]) -> Iterator[str | None]:
    return (node.words[0].literal for node in _commands(nodes) if node.words)


def _counted(first: str, last: str, step: int = 1) -> list[str]:
    """The numbers from first to last; a hole where they are too many to be meant."""
    many = abs(int(last) - int(first)) >= ROUNDS * abs(step)
    ends = int(last) + (1 if step > 0 else -1)
    return [hole(f"{first} to {last}")] if many else [str(i) for i in range(int(first), ends, step)]


def _unbraced(token: Token) -> Iterator[Token]:
    """`a{1..3}` and `{a,b}c` as the words that they are short for."""
    for at, part in enumerate(token.parts):
        if part.kind == "raw" and (match := BRACES.search(part.text)):
            for word in _alternatives(match):
                text = part.text[: match.start()] + word + part.text[match.end() :]
                yield from _unbraced(
                    replace(token, parts=(*token.parts[:at], Part("raw", text), *token.parts[at + 1 :]))
                )
            return
    yield token


def _alternatives(match: re.Match[str]) -> list[str]:
    first, last, step, several = match.groups()
    if several is not None:
        return several.split(",")
    if len({len(n.lstrip("-")) for n in (first, last)}) > 1 and "0" in (first.lstrip("-")[:1], last.lstrip("-")[:1]):
        return [hole(match[0][1:-1])]  # with leading zeros
    way = max(abs(int(step or 1)), 1) * (1 if int(last) >= int(first) else -1)
    return _counted(first, last, way)


def _forever(condition: list) -> bool:
    return all(isinstance(n, Command) and n.words and n.words[0].literal in ("true", ":") for n in condition)


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _brief(text: str) -> str:
    return " ".join(HOLE.sub(r"$\1", text).split())[:60]


def _divided(a: int, b: int) -> int:
    """Towards zero, as C and bash do."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


TRUTHS = {"true": True, ":": True, "false": False}
NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divided,
    ast.Mod: lambda a, b: a - b * _divided(a, b),
}  # fmt: skip


def _trimmed(text: str, sign: str, pattern: str) -> str:
    """`${text%pattern}` and its like: without the shortest end that is of a pattern, or for two signs the longest; `#`: start."""
    ends = [(text[i:], text[:i]) if sign[0] == "%" else (text[:i], text[i:]) for i in range(len(text) + 1)]
    ends = ends if sign in ("%%", "#") else ends[::-1]
    return next((rest for end, rest in ends if fnmatch.fnmatchcase(end, pattern)), text)


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _calculate(text: str) -> int | None:
    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
        raise ValueError

    if not re.fullmatch(r"[-+*/%()\s0-9]*", text):
        return None  # 10#08, comparisons
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
