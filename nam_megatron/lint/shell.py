"""Bash as text -> words, commands, branches, loops: what launch scripts use of it. follow.py says what they come to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

DEPTH = 40
# Around what is not known, and a blank in it; private use: no script has them.
OPEN, CLOSE, BLANK = "\ue000", "\ue001", "\ue002"
OPERATORS = (
    "<<<", "<<-", "&>>", "&&", "||", ";;", "<<", ">>", "&>", ">&", "<&", ">|", "\n", ";", "&", "|", "(", ")", "<", ">",
)  # fmt: skip
REDIRECTS = {"<", ">", ">>", "<<<", "&>", "&>>", ">&", "<&", ">|"}
CLOSERS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;"}
NAME = re.compile(r"[A-Za-z_]\w*")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}  # of $'...'


class ShellError(ValueError):
    """The text is no shell script, or one that is no launch."""


@dataclass(frozen=True)
class Part:
    """A piece of a word: `raw` or `quoted` text, `double`-quoted source, a `var`, an `arith` or a `command` substitution.

    `let`: all of `(( ))`, as a command.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Token:
    """A `word` of parts, an `op`, or an `array` assignment `NAME=(elements)`."""

    kind: str
    text: str = ""
    parts: tuple[Part, ...] = ()
    elements: tuple["Token", ...] = ()
    line: int = 0

    @property
    def literal(self) -> str | None:
        """The text of a word that has nothing to expand."""
        if self.kind == "word" and all(p.kind in ("raw", "quoted") for p in self.parts):
            return "".join(p.text for p in self.parts)
        return None

    def all_parts(self) -> Iterator[Part]:
        """Every part, those inside double quotes and array elements too."""
        for part in self.parts:
            yield from inside(part.text) if part.kind == "double" else (part,)
        for element in self.elements:
            yield from element.all_parts()


@dataclass
class Command:
    """Words (assignments among them) and the numbers of the heredocs that feed it."""

    words: list[Token]
    line: int
    heredocs: list[int] = field(default_factory=list)


@dataclass
class Branch:
    """`if` and `case`: arms of (condition, body). A condition is nodes or, with a subject, patterns; None: otherwise."""

    arms: list[tuple[list[Any] | None, list[Any]]]
    line: int
    subject: Token | None = None


@dataclass
class Chain:
    """`left && right` or `left || right`."""

    left: object
    op: str
    right: object
    line: int


@dataclass
class Subshell:
    """Nodes that run in shells of their own: `( )`, the sides of a pipe, what runs in the background."""

    nodes: list


@dataclass
class Function:
    """`name() body`."""

    name: str
    body: object
    line: int


@dataclass(frozen=True)
class Body:
    """A heredoc's text. expands: its variables are the outer script's, since its delimiter has no quotes."""

    text: str
    expands: bool


@dataclass
class Loop:
    """Its variable and words (`for`; words of None: not a list) or condition (`while`, or `until` it holds), and its body."""

    variable: str | None
    condition: list
    body: list
    words: list[Token] | None = None
    until: bool = False
    counts: str | None = None  # the inside of `for (( ))`


class Lexer:
    """Cuts a text into tokens. `plain`: a list of words, where only blanks, quotes, `#` and `$` mean something."""

    def __init__(self, text: str, plain: bool = False):
        self.text, self.plain, self.at = text, plain, 0
        self.blanks = " \t\r\f\v\n" if plain else " \t\r\f\v"
        self.ends = self.blanks + ("" if plain else "\n;&|<>()")
        # Heredocs whose bodies start after this line: (delimiter, tabs dropped, expands).
        self.wanted: list[tuple[str, bool, bool]] = []
        self.bodies: list[Body] = []
        self._line, self._counted = 1, 0

    @property
    def line(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def tokens(self) -> Iterator[Token]:
        delimiter_next: str | None = None
        while (token := self.next()) is not None:
            if delimiter_next and token.kind == "word":
                word = "".join(p.text for p in token.parts)
                bare = all(p.kind == "raw" for p in token.parts)
                self.wanted.append((word, delimiter_next == "<<-", bare))
                delimiter_next = None
                continue
            delimiter_next = token.text if token.kind == "op" and token.text in ("<<", "<<-") else None
            yield token
        self._read_bodies()

    def next(self) -> Token | None:
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at) or self.text[self.at :] == "\\":  # the last is nothing, too
                self.at += 2
            elif self.text[self.at] in self.blanks:
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                break
        if self.at >= len(self.text):
            return None
        line = self.line
        # the name of a file that a command writes or reads
        if not self.plain and self.text.startswith(("<(", ">("), self.at):
            self.at += 1
            return Token("word", parts=(Part("command", self._balanced("(", ")")[1:-1]),), line=line)
        if not self.plain and self.text.startswith("((", self.at):
            start, body = self.at, self._balanced("(", ")")
            if body.endswith("))"):
                return Token("word", parts=(Part("let", body[2:-2]),), line=line)
            self.at = start
        if not self.plain:
            for op in OPERATORS:
                if self.text.startswith(op, self.at):
                    self.at += len(op)
                    if op == "\n":
                        self._read_bodies()
                    return Token("op", op, line=line)
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in self.ends:
            parts.append(self.part())
        name = "".join(p.text for p in parts) if all(p.kind == "raw" for p in parts) else ""
        if not self.plain and name.isdigit() and self.text[self.at : self.at + 1] in ("<", ">"):
            return self.next()  # `2>`: the number of a stream
        if not self.plain and self.text[self.at : self.at + 1] == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", name):
            self.at += 1
            return Token("array", name, elements=tuple(self._elements(line)), line=line)
        return Token("word", parts=tuple(parts), line=line)

    def _elements(self, line: int) -> Iterator[Token]:
        while (token := self.next()) is not None:
            if token.kind != "op":
                yield token
            elif token.text == ")":
                return
            elif token.text != "\n":
                raise ShellError(f"line {token.line}: `{token.text}` inside an array; quote the word it stands in")
        raise ShellError(f"line {line}: an array without its `)`")

    def part(self) -> Part:
        """The piece that starts at `at`."""
        text, start, c = self.text, self.at, self.text[self.at]
        if c == "\\":
            self.at = min(start + 2, len(text))
            return Part("quoted", text[start + 1 : self.at].replace("\n", ""))
        if c == "'":
            return Part("quoted", self._until("'", start + 1, "a quote"))
        if text.startswith("$'", start):
            self.at += 2
            return Part(
                "quoted", re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), self._quoted("'"), flags=re.DOTALL)
            )
        if c == "`":
            return Part("command", self._until("`", start + 1, "a backtick"))
        if c == '"' or text.startswith('$"', start):
            self.at += 1 + (c == "$")
            return Part("double", self._quoted('"'))
        if c == "$":
            return self._dollar()
        if c == OPEN:
            return Part("quoted", OPEN + self._until(CLOSE, start + 1, "a hole") + CLOSE)
        self.at += 1
        while self.at < len(text) and text[self.at] not in self.ends and text[self.at] not in f"\\'\"$`{OPEN}":
            self.at += 1
        return Part("raw", text[start : self.at])

    def _until(self, mark: str, start: int, what: str) -> str:
        end = self.text.find(mark, start)
        if end < 0:
            raise ShellError(f"line {self.line}: {what} without its end")
        self.at = end + 1
        return self.text[start:end]

    def _quoted(self, mark: str) -> str:
        """The source inside quotes that know a backslash; the opening one is behind us."""
        start, line = self.at, self.line
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == mark:
                self.at += 1
                return self.text[start : self.at - 1]
            if c == "$" and mark == '"' and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self._dollar()
            else:
                self.at += 1 + (c == "\\")
        raise ShellError(f"line {line}: a quote without its end")

    def _dollar(self) -> Part:
        text = self.text
        if text.startswith("$(", self.at):
            self.at += 1
            body = self._balanced("(", ")")
            if body.startswith("((") and body.endswith("))"):
                return Part("arith", body[2:-2])
            return Part("command", body[1:-1])
        if text.startswith("${", self.at):
            self.at += 1
            return Part("var", self._balanced("{", "}")[1:-1])
        if match := re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(text, self.at + 1):
            self.at = match.end()
            return Part("var", match[0])
        self.at += 1
        return Part("raw", "$")

    def _balanced(self, opening: str, closing: str) -> str:
        """From the bracket at `at` to its partner, both included; a bracket behind a backslash does not count."""
        start, depth, line = self.at, 0, self.line
        while self.at < len(self.text):
            c = self.text[self.at]
            depth += (c == opening) - (c == closing)
            self.at += 1 + (c == "\\")
            if depth == 0:
                return self.text[start : self.at]
        raise ShellError(f"line {line}: a `{opening}` without its `{closing}`")

    def _read_bodies(self) -> None:
        for delimiter, tabs, expands in self.wanted:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line).rstrip() == delimiter:
                    break
                lines.append(line)
            self.bodies.append(Body("\n".join(lines), expands))
        self.wanted.clear()


def inside(text: str, escaped: str = '\\"$`\n') -> Iterator[Part]:
    """The parts of the source between double quotes. escaped: what a backslash takes its meaning."""
    lexer, start = Lexer(text), 0
    while lexer.at < len(text):
        c = text[lexer.at]
        if c == "\\" and lexer.at + 1 < len(text) and text[lexer.at + 1] in escaped:
            yield Part("quoted", text[start : lexer.at] + text[lexer.at + 1].replace("\n", ""))
            start = lexer.at = lexer.at + 2
        elif c in "$`":
            yield Part("quoted", text[start : lexer.at])
            yield lexer.part()
            start = lexer.at
        else:
            lexer.at += 1
    yield Part("quoted", text[start:])


def blanks_kept(text: str) -> Iterator[Part]:
    """The parts of a text that is one word whatever blanks it has, as behind `:-`."""
    lexer = Lexer(text, plain=True)
    while lexer.at < len(text):
        if text[lexer.at] in lexer.blanks:
            lexer.at += 1
            yield Part("quoted", text[lexer.at - 1])
        else:
            yield lexer.part()


class Parser:
    """Tokens -> nodes: `Parser(text).block()` is the whole script, `bodies` its heredocs."""

    def __init__(self, text: str):
        lexer = Lexer(text)
        self.tokens, self.bodies = list(lexer.tokens()), lexer.bodies
        self.at = self.depth = self.heredocs = 0

    @property
    def token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    @property
    def word(self) -> str | None:
        """What the next token says where a command may start: an operator, or a word with nothing to expand."""
        token = self.token
        return None if token is None else token.text if token.kind == "op" else token.literal

    def eat(self) -> Token:
        if self.token is None:
            raise ShellError("the script ends in the middle of a command")
        self.at += 1
        return self.tokens[self.at - 1]

    def block(self, *until: str) -> list:
        """Commands up to one of `until`, which is eaten and kept in `ended`; up to the end of the text without `until`."""
        self.depth += 1
        if self.depth > DEPTH:
            raise ShellError("nested too deep")
        nodes: list = []
        while self.token is not None and self.word not in until:
            if self.word in CLOSERS or self.word in ("\n", ";", "&", "|"):
                self.eat()
            else:
                nodes.append(self.listed())
        self.depth -= 1
        if until:
            if self.token is None:
                raise ShellError(f"the script ends before its `{until[-1]}`")
            self.ended = self.word
            self.eat()
        return nodes

    def listed(self) -> object:
        """A chain, and whether it runs in the background."""
        node = self.chain()
        return Subshell([node]) if self.word == "&" and self.token and self.token.kind == "op" else node

    def chain(self) -> object:
        node = self.pipeline()
        while self.token is not None and self.token.kind == "op" and self.word in ("&&", "||"):
            op = self.eat()
            while self.word == "\n":
                self.eat()
            if self.token is None:
                break
            node = Chain(node, op.text, self.pipeline(), op.line)
        return node

    def pipeline(self) -> object:
        nodes = [self.command()]
        while self.token is not None and self.token.kind == "op" and self.word == "|":
            self.eat()
            while self.word in ("\n", "&"):
                self.eat()
            if self.token is not None:
                nodes.append(self.command())
        return Subshell(nodes) if len(nodes) > 1 else nodes[0]

    def command(self) -> object:
        assert self.token is not None, "asked for where there is one"
        line, word = self.token.line, self.word
        if word == "if":
            self.eat()
            return self._if(line)
        if word == "case":
            self.eat()
            return self._case(line)
        if word in ("while", "until"):
            self.eat()
            condition = self.block("do")
            return Loop(None, condition, self.block("done"), until=word == "until")
        if word in ("for", "select"):
            self.eat()
            name, words, first = self.word or _first_name(self.token), None, self.token
            if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].literal == "in":
                self.at, words = self.at + 2, []
                while self.token is not None and self.token.kind == "word":
                    words.append(self.eat())
            while self.token is not None and self.word != "do":
                self.eat()
            self.block("do")
            counts = first.parts[0].text if first and first.parts and first.parts[0].kind == "let" else None
            return Loop(name or "loop", [], self.block("done"), words, counts=counts)
        if word == "{":
            self.eat()
            return Branch([(None, self.block("}"))], line)
        if word == "!" and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].literal == "[[":
            self.eat()
            return _opposite(self.command())
        if word == "[[":
            self.eat()
            node = self._tested()
            if self.word == "]]":
                self.eat()
            while self.token is not None and self.token.kind == "op" and self.word in REDIRECTS:
                self._redirected()
            return node
        if word == "(":
            self.eat()
            return Subshell([Branch([(None, self.block(")"))], line)])
        if word == "function" and self.at + 1 < len(self.tokens) and (name := self.tokens[self.at + 1].literal):
            self.at += 2
            while self.word in ("(", ")", "\n"):
                self.eat()
            return self._function(name, line)
        return self._simple(line)

    def _function(self, name: str, line: int) -> Function:
        """What stands behind a function's name."""
        return Function(name, Command([], line) if self.token is None else self.command(), line)

    def _if(self, line: int) -> Branch:
        arms: list = []
        condition: list | None = self.block("then")
        while True:
            arms.append((condition, self.block("elif", "else", "fi")))
            if self.ended == "fi":
                return Branch(arms, line)
            condition = self.block("then") if self.ended == "elif" else None

    def _case(self, line: int) -> Branch:
        subject = self.token
        arms: list[tuple[list[Any] | None, list[Any]]] = []
        if subject is None or subject.kind != "word":
            raise ShellError(f"line {line}: a `case` without its word")
        self.eat()
        while self.word in ("in", "\n"):
            self.eat()
        while self.token is not None and self.word != "esac":
            patterns: list[Token] = []
            while self.token is not None and self.word != ")":
                if self.token.kind == "word":
                    patterns.append(self.token)
                self.eat()
            if self.token is None:
                raise ShellError(f"line {line}: a `case` arm without its `)`")
            self.eat()
            nodes: list = []
            while self.token is not None and self.word not in (";;", "esac"):
                if self.word in ("\n", ";", "&", "|"):
                    self.eat()
                else:
                    nodes.append(self.listed())
            while self.word in (";;", "\n"):
                self.eat()
            arms.append((patterns, nodes))
        if self.token is None:
            raise ShellError(f"line {line}: a `case` without its `esac`")
        self.eat()
        return Branch(arms, line, subject)

    def _tested(self, op: str = "||") -> object:
        """What stands in `[[ ]]`: a chain of tests, each with its own brackets; `&&` binds closer than `||`."""
        node = self._tested("&&") if op == "||" else self._test()
        while self.token is not None and self.token.kind == "op" and self.word == op:
            line = self.eat().line
            node = Chain(node, op, self._tested("&&") if op == "||" else self._test(), line)
        return node

    def _test(self) -> object:
        while self.word == "\n":
            self.eat()
        line, depth = self.token.line if self.token else 0, 0
        if self.word == "!":
            self.eat()
            return _opposite(self._test())
        if self.word == "(" and self.token and self.token.kind == "op":
            self.eat()
            node = self._tested()
            self.eat()
            return node
        words = [_raw("[[", line)]
        while (op := self.token and self.token.kind == "op") or self.word != "]]":
            depth += {"(": 1, ")": -1}.get(self.word or "", 0) if op else 0  # of a regular expression
            if self.token is None or depth < 0 or (op and self.word in ("&&", "||")):
                break
            token = self.eat()
            if not op:
                words.append(token)
            elif token.text != "\n":
                words.append(Token("word", parts=(Part("quoted", token.text),), line=line))
        return Command([*words, _raw("]]", line)], line)

    def _redirected(self) -> None:
        self.eat()
        if self.token is not None and self.token.kind == "word":
            self.eat()

    def _simple(self, line: int) -> object:
        node, start = Command([], line), self.at
        while self.token is not None:
            if self.token.kind != "op":
                node.words.append(self.eat())
            elif self.word in ("<<", "<<-"):
                self.eat()
                node.heredocs.append(self.heredocs)
                self.heredocs += 1
            elif self.word in REDIRECTS:
                self._redirected()
            elif (
                self.word == "("
                and len(node.words) == 1
                and (name := node.words[0].literal)
                and self.at + 1 < len(self.tokens)
                and self.tokens[self.at + 1].text == ")"
            ):
                self.at += 2
                while self.word == "\n":
                    self.eat()
                return self._function(name, line)
            elif self.word == "(":
                raise ShellError(f"line {self.token.line}: `(` in the middle of a command; quote the word it stands in")
            else:
                break
        if self.at == start:
            self.eat()  # an operator where a command should start
        return node


def _raw(text: str, line: int) -> Token:
    return Token("word", parts=(Part("raw", text),), line=line)


def _opposite(node: Any) -> object:
    """A test, or a chain of them, that holds where `node` does not."""
    if isinstance(node, Chain):
        return Chain(_opposite(node.left), "||" if node.op == "&&" else "&&", _opposite(node.right), node.line)
    return Command([node.words[0], _raw("!", node.line), *node.words[1:]], node.line)


def _first_name(token: Token | None) -> str | None:
    """The variable of `for ((i = 0; ...; ...))`."""
    found = NAME.search(token.parts[0].text) if token and token.parts and token.parts[0].kind == "let" else None
    return found and found[0]


@lru_cache(64)
def parsed(text: str) -> tuple[list[Any], list[Body]]:
    """A script's nodes and its heredocs: made once for all ways that it is followed, none of which changes them."""
    parser = Parser(text)
    return parser.block(), parser.bodies
