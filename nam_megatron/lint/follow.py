"""What a launch script would run, without running it: variables, arrays, tests, heredocs and scripts inside scripts.

Nothing is executed and nothing is guessed. What the script does not set is a hole, `hole("NAME")`, which travels through strings
and arrays until somebody needs the value. Where a condition cannot be told no branch is taken: what the branches would set
becomes a hole, flags they would append are noted, commands in them may run. A loop over known words is run for each of them; of
another what it appends ends in a hole.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from nam_megatron.lint.shell import (
    Branch,
    Chain,
    Command,
    Loop,
    Parser,
    Part,
    ShellError,
    Token,
    blanks_kept,
    inside,
)

OPEN, CLOSE, BLANK = "\ue000", "\ue001", "\ue002"  # private use: no script has them
HOLE = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
REPLACED = re.compile(
    r"([A-Za-z_]\w*)/(/?)([^/*?\[\\$\"'#%]+)(?:/([^$\"'`\\]*))?"
)  # ${NAME//old/new}, of plain letters
BUDGET = 200_000  # steps; a script that takes more is no launch
SHELLS = {"bash", "sh", "zsh", "dash"}
TAKES_SCRIPT = SHELLS | {"sbatch", "cat", "tee", "srun", "ssh", "qsub", "bsub"}
DECLARE = {"export", "declare", "local", "readonly", "typeset"}
NESTED = 8
ROUNDS = 256  # of one loop
PRINTS = {"echo", "printf"}


def hole(name: str) -> str:
    return f"{OPEN}{name.replace(' ', BLANK)}{CLOSE}"  # one word, whatever it is called


def holes(text: str) -> tuple[str, ...]:
    """What a text still needs to know."""
    return tuple(name.replace(BLANK, " ") for name in HOLE.findall(text))


def shown(text: str) -> str:
    """`text` with its holes as a person wrote them."""
    return HOLE.sub(lambda m: f"${m[1]}" if re.fullmatch(r"\w+", m[1]) else f"$({m[1]})", text).replace(BLANK, " ")


@dataclass
class Run:
    """What was found.

    commands: (words, exported environment) in order. perhaps: the same with a line, of branches whose condition cannot be told; each
    branch as if taken. printed: what `echo` shows. unset: names taken as absent from the environment, because the script has
    a default for them. notes: what could not be told.
    """

    commands: list[tuple[tuple[str, ...], Mapping[str, str | None]]] = field(default_factory=list)
    perhaps: list[tuple[tuple[str, ...], Mapping[str, str | None], int]] = field(default_factory=list)
    printed: list[tuple[tuple[str, ...], Mapping[str, str | None]]] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    spent: int = 0

    def spend(self, steps: int = 1) -> None:
        self.spent += steps
        if self.spent > BUDGET:
            raise ShellError("too long for a launch script")


def run(text: str) -> Run:
    """Follow a script.

    Raises:
        ShellError: if it cannot be read as one.
    """
    found = Run()
    try:
        Follower(found).script(text)
    except RecursionError:
        raise ShellError("nested too deep") from None
    return found


class Follower:
    def __init__(self, found: Run, depth: int = 0):
        self.run, self.depth = found, depth
        self.bodies: list[str] = []

    def script(self, text: str) -> None:
        parser = Parser(text)
        nodes, self.bodies = parser.block(), parser.bodies
        self.nodes(nodes)

    def nested(self, text: str) -> None:
        """A script inside the script."""
        if self.depth >= NESTED:
            raise ShellError("scripts inside scripts, too deep")
        try:
            Follower(self.run, self.depth + 1).script(text)
        except ShellError as err:
            self.run.notes.append(f"a script inside the script cannot be read ({err})")

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
            case Chain():
                self.status(node)
            case Branch():
                self.branch(node)

    def loop(self, node: Loop) -> None:
        """Every round, where it can be told how many there are; else one, and what it appends goes on."""
        steady = not any(w in ("break", "continue", "shift", "read") for w in _first_words(node.body))
        if node.words is not None and node.variable:
            words = [f for w in node.words for f in _braces(self.fields(w))]
            if steady and len(words) <= ROUNDS and not any(map(holes, words)):
                for word in words:
                    self.run.variables[node.variable] = word
                    self.nodes(node.body)
                return
        if node.condition:
            rounds = 0
            while (
                (verdict := self.truth(node.condition)) and steady and rounds < ROUNDS and not _forever(node.condition)
            ):
                self.nodes(node.body)
                rounds += 1
            if verdict is False:
                return
        if node.variable:
            self.run.variables[node.variable] = hole(node.variable)
        self.nodes(node.body)
        for name in _appended(node.body):
            value = self.run.variables.get(name, "")
            more = hole(f"{name} of a loop")
            self.run.variables[name] = [*value, more] if isinstance(value, list) else f"{value} {more}"

    def branch(self, node: Branch) -> None:
        subject = " ".join(self.fields(node.subject)) if node.subject else ""
        for i, (condition, body) in enumerate(node.arms):
            verdict: bool | None = True
            if condition is not None:
                verdict = self.matches(subject, condition) if node.subject else self.truth(condition)
            if verdict is None:
                for _, other in node.arms[i:]:
                    self.suppose(other, node.line)
                for _, other in node.arms[i:]:
                    self.skip(other, node.line)
                return
            if verdict:
                self.nodes(body)
                return

    def matches(self, subject: str, patterns: list[Token]) -> bool | None:
        return None if holes(subject) else any(fnmatch.fnmatchcase(subject, " ".join(self.fields(p))) for p in patterns)

    def truth(self, nodes: list) -> bool | None:
        """Whether the condition of an `if` or a `while` holds; None if that cannot be told."""
        if len(nodes) == 1 and (isinstance(nodes[0], Chain) or _tests(nodes[0])):
            return self.status(nodes[0])
        self.nodes(nodes)
        return None

    def status(self, node: object) -> bool | None:
        """How a command ends. Tests are judged; anything else is followed and taken to succeed."""
        if isinstance(node, Chain):
            left = self.status(node.left)
            if left is None:
                self.suppose([node.right], node.line)
                self.skip([node.right], node.line)
            return self.status(node.right) if left is (node.op == "&&") else left
        if not _tests(node):
            self.node(node)
            return True
        words = [f for w in node.words if w.kind == "word" for f in (self.fields(w) or [""])]
        return self.test([w for w in words if w not in ("[", "[[", "test", "]", "]]")])

    def test(self, words: list[str]) -> bool | None:
        if words[:1] in (["true"], [":"], ["false"]):
            return words[0] != "false"
        if words[:1] == ["!"]:
            inner = self.test(words[1:])
            return None if inner is None else not inner
        if (len(words) == 2 and words[0] in ("-z", "-n")) or len(words) == 1:
            names = holes(words[-1])
            empty = words[-1] == "".join(map(hole, names))
            if empty:  # the script asks whether the environment has it, so it copes if not
                self.run.unset |= set(names)
            return empty if words[0] == "-z" else not empty
        if len(words) == 3 and not any(map(holes, words)):
            left, op, right = words
            if op in ("=", "==", "!="):
                return fnmatch.fnmatchcase(left, right) is (op != "!=")
            if op in NUMERIC and _integer(left) is not None and _integer(right) is not None:
                return NUMERIC[op](int(left), int(right))
        return None

    def suppose(self, nodes: Iterable[object], line: int) -> None:
        """What would be run if a branch were taken."""
        actual = self.run
        self.run = replace(
            actual,
            commands=[],
            perhaps=[],
            env=dict(actual.env),
            variables=dict(actual.variables),
            unset=set(),
            notes=[],
        )
        try:
            self.nodes(nodes)
            found = [*((words, env, line) for words, env in self.run.commands), *self.run.perhaps]
        finally:
            actual.spent, self.run = self.run.spent, actual
        actual.perhaps += found

    def skip(self, nodes: Iterable[object], line: int) -> None:
        """A branch that may or may not be taken: what it sets is not known afterwards."""
        flags: list[str] = []
        for node in nodes:
            self.run.spend()
            match node:
                case Command():
                    for token in node.words:
                        name, append, words = _assignment(token)
                        if not name:
                            continue
                        if append or _again(name, words):
                            flags += [f for w in words for f in self.fields(w) if f.startswith("--")]
                        else:
                            self.run.variables[name] = hole(name)
                case Branch():
                    for _, body in node.arms:
                        self.skip(body, line)
                case Chain():
                    self.skip([node.left, node.right], line)
                case Loop():
                    self.skip(node.body, line)
        if flags := [f for f in flags if f not in self.flags_of_everything()]:
            self.run.notes.append(
                f"line {line}: its condition cannot be told here, left out: {' '.join(map(shown, flags))}"
            )

    def flags_of_everything(self) -> set[str]:
        return {f for v in self.run.variables.values() if isinstance(v, list) for f in v}

    # Commands

    def command(self, node: Command) -> None:
        words = list(node.words)
        if words and all(_assignment(w)[0] for w in words):
            for token in words:
                self.assign(token)
            return
        prefix: dict[str, str | None] = {}
        while words and (found := _assignment(words[0]))[0]:  # NAME=value command: the command's own environment
            prefix[found[0]] = self.joined(found[2][0].parts) if found[2] else ""
            words.pop(0)
        if words and words[0].literal in DECLARE:
            for token in words[1:]:
                name = self.assign(token) or token.literal or ""
                value = self.run.variables.get(name)
                if words[0].literal == "export" and isinstance(value, str):
                    self.run.env[name] = value
            return
        fields = [f for w in words if w.kind == "word" for f in self.fields(w)]
        if fields and fields[0] in ("[", "[["):  # a test whose outcome nobody asked for
            return
        if fields and fields[0] in PRINTS:
            self.run.printed.append((tuple(fields[1:]), {**self.run.env, **prefix}))
            return
        if fields[:1] == ["unset"]:
            for name in fields[1:]:
                self.run.variables.pop(name, None)
                self.run.env[name] = None
            return
        if fields[:1] == ["env"]:
            while len(fields) > 1 and (match := re.match(r"([A-Za-z_]\w*)=(.*)", fields[1], re.DOTALL)):
                prefix[match[1]] = match[2]
                fields.pop(1)
        if not fields or _base(fields[0]) in TAKES_SCRIPT:
            for number in node.heredocs:
                if number < len(self.bodies):
                    self.nested(self.bodies[number].replace("\\$", "$"))
        if fields[:1] == ["eval"]:
            return self.nested(" ".join(fields[1:]))
        for i in range(1, len(fields) - 1):
            if re.fullmatch(r"-[a-z]*c", fields[i]) and any(_base(f) in SHELLS for f in fields[:i]):
                outer, self.run.env = self.run.env, {**self.run.env, **prefix}
                self.nested(fields[i + 1])
                self.run.env = outer
                return None
        if fields:
            self.run.commands.append((tuple(fields), {**self.run.env, **prefix}))
        return None

    def assign(self, token: Token) -> str | None:
        """Carry an assignment out; returns the name, None if it is none."""
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
        self.run.variables[name] = value
        return name

    # Expansion

    def joined(self, parts: Iterable[Part]) -> str:
        """One string, as an assignment's value is: no splitting."""
        text = "".join(" ".join(self.values(p)) for p in parts)
        self.run.spend(len(text) // 64)
        return text

    def fields(self, token: Token) -> list[str]:
        """The words that a word becomes."""
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
        return self.sequence(part.text) or [hole(_brief(part.text))]

    def sequence(self, text: str) -> list[str]:
        """The numbers of `seq LAST` or `seq FIRST LAST` as one text; nothing of another command."""
        match = re.fullmatch(r"\s*seq\s+(?:(-?\d{1,9})\s+)?(-?\d{1,9})\s*", self.joined(blanks_kept(text)))
        return [" ".join(_counted(match[1] or "1", match[2]))] if match else []

    def variable(self, text: str) -> list[str]:
        """`$text` or `${text}`."""
        self.run.spend()
        if text in ("@", "*"):
            return []  # the script as it stands, called without arguments
        if text == "#":
            return ["0"]
        if replaced := REPLACED.fullmatch(text):
            old = " ".join(self.variable(replaced[1]))
            return [old if holes(old) else old.replace(replaced[3], replaced[4] or "", -1 if replaced[2] else 1)]
        match = re.fullmatch(r"(\w+)(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", text, re.DOTALL)
        if not match:
            return [hole(_brief(text))]
        name, index, operation, rest = match.groups()
        value = self.run.variables.get(name)
        if isinstance(value, list) and index not in ("[@]", "[*]"):
            number = _integer((index or "[0]")[1:-1])
            value = value[number] if number is not None and number < len(value) else None
        kind = (operation or "").lstrip(":")
        if kind in ("-", "=") and (value is None or value == [] or (value == "" and operation.startswith(":"))):
            if name not in self.run.variables:
                self.run.unset.add(name)
            value = self.joined(blanks_kept(rest))
            if kind == "=":
                self.run.variables[name] = value
        if kind == "+":
            value = self.joined(blanks_kept(rest)) if value else ""
        return [hole(name)] if value is None else _listed(value)

    def arithmetic(self, text: str) -> str:
        """`$(( text ))`, in whole numbers."""
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: " ".join(self.variable(m[1])), text)
        value = None if holes(filled) or len(filled) > 200 else _calculate(filled)
        return hole(_brief(f"({text})")) if value is None else str(value)


def _tests(node: object) -> TypeGuard[Command]:
    """Whether a node is a test: `[ ]`, `[[ ]]`, `test`, or half of a `[[ a && b ]]`."""
    if not isinstance(node, Command) or not node.words:
        return False
    return node.words[0].literal in ("[", "[[", "test", "true", "false", ":") or node.words[-1].literal == "]]"


def _assignment(token: Token) -> tuple[str | None, bool, tuple[Token, ...]]:
    """(name, whether it appends, the words assigned); a name of None if the token is no assignment."""
    if token.kind == "array":
        return token.text.rstrip("+="), token.text.endswith("+="), token.elements
    first = token.parts[0] if token.parts else Part("", "")
    if first.kind == "raw" and (match := re.match(r"([A-Za-z_]\w*)(\+?)=", first.text)):
        rest = Part("raw", first.text[match.end() :])
        return match[1], bool(match[2]), (Token("word", parts=(rest, *token.parts[1:])),)
    return None, False, ()


def _again(name: str, words: tuple[Token, ...]) -> bool:
    """Whether a variable's new value has its old one in it."""
    old = re.compile(rf"{name}(\W|$)")
    return any(p.kind == "var" and old.match(p.text) for w in words for p in w.all_parts())


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


def _first_words(nodes: Iterable[object]) -> Iterator[str | None]:
    return (node.words[0].literal for node in _commands(nodes) if node.words)


def _appended(nodes: Iterable[object]) -> Iterator[str]:
    """The variables that grow."""
    for node in _commands(nodes):
        for name, append, words in map(_assignment, node.words):
            if name and (append or _again(name, words)):
                yield name


def _counted(first: str, last: str) -> list[str]:
    """The numbers from first to last; a hole where they are too many to be meant."""
    many = int(last) - int(first) >= ROUNDS
    return [hole(f"{first} to {last}")] if many else [str(i) for i in range(int(first), int(last) + 1)]


def _braces(words: Iterable[str]) -> Iterator[str]:
    """`{1..4}` as four words."""
    for word in words:
        match = re.fullmatch(r"\{(\d{1,9})\.\.(\d{1,9})\}", word)
        yield from _counted(match[1], match[2]) if match else [word]


def _forever(condition: list) -> bool:
    return all(isinstance(n, Command) and n.words and n.words[0].literal in ("true", ":") for n in condition)


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _brief(text: str) -> str:
    return " ".join(HOLE.sub(r"$\1", text).split())[:60]


NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


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

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
