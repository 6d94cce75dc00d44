"""A recipe of Megatron-Bridge's in Python, or a Python script that holds Megatron's flags in its strings: read, never run.

A recipe is a function that sets fields, `cfg.model.num_layers = 32`, or calls `TrainingConfig(train_iters=...)`. What it sets on a
condition, in a loop, or to something that is computed is open; what a function of another file returns is not read.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nam_megatron.lint.container import SECTIONS
from nam_megatron.lint.follow import hole, shown
from nam_megatron.lint.others import Said, flags
from nam_megatron.lint.shell import CLOSE, OPEN
from nam_megatron.targets import Target

BRIDGE = "Megatron-Bridge"
CALLS = 8  # functions that start from functions
# The sections by the classes of Bridge's that make them.
CLASSES = {
    "TrainingConfig": "train", "ValidationConfig": "validation", "OptimizerConfig": "optimizer", "SchedulerConfig": "scheduler",
    "DistributedDataParallelConfig": "ddp", "GPTDatasetConfig": "dataset", "LoggerConfig": "logger", "TokenizerConfig": "tokenizer",
    "CheckpointConfig": "checkpoint", "RNGConfig": "rng", "DistributedInitConfig": "dist",
}  # fmt: skip
BASE = re.compile(r"^_?[a-z].*(config|common|recipe)")  # a function that makes a container
MODEL = re.compile(r"\w*(Provider|ModelConfig|TransformerConfig)\w*")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
FIRST = re.compile(r"(import|from)\s+[\w.]+|(\"\"\"|''')")


def is_python(first: str, name: str) -> bool:
    """Whether a text is Python's, by its name or its first line."""
    return name.endswith(".py") or bool(FIRST.match(first))


def read(text: str, target: Target) -> Said | None:
    """What a Python file says of Megatron; None: nothing. `Said.program` is empty of one with flags in strings.

    Raises SyntaxError.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    constants = {name: value for name, value in _constants(tree.body, {})}
    recipes = []
    for function in functions.values():
        found = Recipe(functions, constants, target)
        found.function(function)
        recipes.append((flags(found.fields, target), found, function))
    best = max(recipes, key=lambda one: len(one[0][0]), default=None)
    if best and best[0][0]:
        (words, without), found, function = best
        notes = [
            f"read is the function `{function.name}` (line {function.lineno}); what it does not set, {BRIDGE} decides, and the functions "
            "that it calls: open"
        ]
        if others := sum(bool(one[0][0]) for one in recipes) - 1:
            notes.append(f"the file has {others} more functions that set fields; this one says most")
        notes += [f"it starts from `{name}()`, which is not in this file" for name in found.bases]
        if without:
            notes.append(f"fields that no flag of Megatron's says: {', '.join(without)}")
        return Said(BRIDGE, tuple(words), tuple(notes), None)
    return _script(tree, functions.values(), constants, target)


@dataclass
class Recipe:
    """The fields that a function sets, in its order; the functions of other files that it starts from."""

    functions: dict[str, Function]
    constants: dict[str, Any]
    target: Target
    fields: list[tuple[str, str, Any]] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)

    def function(self, node: Function, depth: int = 0) -> None:
        names = dict(self.constants) | dict(_defaults(node))
        self.body(node.body, names, depth)

    def body(self, nodes: Sequence[ast.stmt], names: dict[str, Any], depth: int, open_: str | None = None) -> None:
        for node in nodes:
            match node:
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    self.assign(target, value, names, depth, open_)
                case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                    self.call(value, names, depth, open_)
                case ast.AugAssign(target=ast.Attribute() as target):
                    self.put(target, hole(ast.unparse(target)))
                case ast.If(test=test, body=then, orelse=otherwise):
                    truth = _value(test, names)
                    known = isinstance(truth, (bool, int, float, str, type(None))) and not _open(truth)
                    for arm in [then if truth else otherwise] if known else [then, otherwise]:
                        self.body(arm, names, depth, open_ if known else f"line {node.lineno}")
                case ast.For(body=inner) | ast.While(body=inner) | ast.Try(body=inner):
                    self.body(inner, names, depth, f"line {node.lineno}")
                case ast.With(body=inner):
                    self.body(inner, names, depth, open_)
                case ast.Match(cases=cases):
                    for case in cases:
                        self.body(case.body, names, depth, f"line {node.lineno}")

    def assign(self, target: ast.expr, value: ast.expr, names: dict[str, Any], depth: int, open_: str | None) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = hole(target.id) if open_ else _value(value, names)
        self.put(target, hole(f"the condition in {open_}") if open_ else _value(value, names))
        self.call(value, names, depth, open_)

    def put(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Attribute(value=ast.Attribute(attr=section), attr=name) if section in SECTIONS:
                self.fields.append((section, name, value))

    def call(self, node: ast.expr, names: dict[str, Any], depth: int, open_: str | None) -> None:
        """What a call sets by its keywords, and what a function of this file does."""
        if not isinstance(node, ast.Call):
            return
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        section = CLASSES.get(name) or ("model" if MODEL.fullmatch(name) else None)
        for word in node.keywords:
            self.call(word.value, names, depth, open_)
            if section and word.arg and not isinstance(word.value, ast.Call):
                self.fields.append(
                    (section, word.arg, hole(f"the condition in {open_}") if open_ else _value(word.value, names))
                )
        if section or (node.args and isinstance(node.func, ast.Attribute)):
            return
        if (inner := self.functions.get(name)) and depth < CALLS:
            given = {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
            arguments = [a.arg for a in (*inner.args.posonlyargs, *inner.args.args)]
            given |= {a: _value(v, names) for a, v in zip(arguments, node.args, strict=False)}
            self.body(inner.body, dict(self.constants) | dict(_defaults(inner)) | given, depth + 1, open_)
        elif isinstance(node.func, ast.Name) and not node.args and BASE.search(name):
            self.bases.append(name)


def _defaults(node: Function) -> Iterator[tuple[str, Any]]:
    """A function's parameters: their defaults, or holes."""
    plain = [*node.args.posonlyargs, *node.args.args]
    values: list[ast.expr | None] = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults]
    for argument, value in [
        *zip(plain, values, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]:
        yield argument.arg, hole(argument.arg) if value is None else _value(value, {})


def _constants(nodes: Sequence[ast.stmt], names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _value(node.value, names)
            yield node.targets[0].id, names[node.targets[0].id]


def _open(value: Any) -> bool:
    return isinstance(value, str) and OPEN in value


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """A constant, a list of them, a name that has one, a sum or product of numbers, a dtype; a hole for anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name, hole(name))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            values = [_value(e, names) for e in elements]
            return hole(_brief(node)) if any(map(_open, values)) else values
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DTYPES:
            return DTYPES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left, names), _value(right, names)
            if all(isinstance(v, (int, float)) and abs(v) < 1e15 for v in (a, b)):
                return OPERATORS[type(op)](a, b)
        case ast.JoinedStr(values=parts):
            texts = [
                p.value
                if isinstance(p, ast.Constant)
                else _value(p.value, names)
                if isinstance(p, ast.FormattedValue)
                else ""
                for p in parts
            ]
            return "".join(map(str, texts))
    return hole(_brief(node))


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
}  # fmt: skip


def _brief(node: ast.expr) -> str:
    return re.sub(f"[{OPEN}{CLOSE}]", "", ast.unparse(node))[:60]


# Flags in strings ----------------------------------------------------------------------------------------------------------


def _script(
    tree: ast.Module, functions: Sequence[Function] | Any, constants: dict[str, Any], target: Target
) -> Said | None:
    """The strings of the function that has most of Megatron's flags, in their order; of those on a condition it is said which."""
    found = []
    for body in [tree.body, *(function.body for function in functions)]:
        found.append(Strings(dict(constants)))
        found[-1].nodes(body, None)
    most = max(found, key=lambda one: sum(_is_flag(w, target) for w in one.words))
    if not any(_is_flag(w, target) for w in most.words):
        return None
    notes = ["the flags in its strings are read, in their order; what else it hands on is not known here"]
    for condition, said in _conditional(most.left, target).items():
        notes.append(f"conditional, neither there nor absent here: {', '.join(said)}, if {condition}")
    return Said("", tuple(most.words), tuple(notes), None)


def _conditional(left: Sequence[tuple[int, list[str], str]], target: Target) -> dict[str, list[str]]:
    """Of each condition the flags that stand on it, with what follows them and their line."""
    found: dict[str, list[str]] = {}
    for line, text, condition in left:
        starts = [i for i, word in enumerate(text) if word.startswith("--")]
        for i, end in zip(starts, [*starts[1:], len(text)], strict=True):
            if _is_flag(text[i], target):
                found.setdefault(condition, []).append(f"`{shown(' '.join(text[i:end]))}` (line {line})")
    return found


@dataclass
class Strings:
    """The words in the strings of a body. left: those on a condition, each with its line and what it stands on."""

    names: dict[str, Any]
    words: list[str] = field(default_factory=list)
    left: list[tuple[int, list[str], str]] = field(default_factory=list)

    def nodes(self, nodes: Sequence[ast.AST], condition: str | None, listed: bool = False) -> None:
        for node in nodes:
            self.node(node, condition, listed)

    def node(self, node: ast.AST, on: str | None, listed: bool) -> None:
        """on: the condition that it stands on. listed: in a list, whose elements are words."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return
            case ast.If(test=test, body=then, orelse=otherwise):
                self.fork(test, then, otherwise, on, listed)
            case ast.IfExp(test=test, body=one, orelse=other):
                self.fork(test, [one], [other], on, listed)
            case ast.BoolOp(op=op, values=[first, *rest]):
                self.node(first, on, listed)
                self.nodes(
                    rest, _and(on, _brief(first) if isinstance(op, ast.And) else f"not ({_brief(first)})"), listed
                )
            case ast.For() | ast.While() | ast.Match():
                self.nodes(
                    list(ast.iter_child_nodes(node)), _and(on, f"what line {node.lineno} goes through has it"), listed
                )
            case ast.JoinedStr() | ast.Constant(value=str()):
                self.string(node, on, listed)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                self.nodes(elements, on, True)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.node(value, on, listed)
                self.names[name] = value.value if on is None and isinstance(value, ast.Constant) else hole(name)
            case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript() | ast.Constant() if listed and self.asks(
                on
            ):
                self.sink(on).append(str(_value(node, self.names)))
            case ast.AST():
                self.nodes(list(ast.iter_child_nodes(node)), on, listed)

    def fork(
        self, test: ast.expr, then: Sequence[ast.AST], otherwise: Sequence[ast.AST], on: str | None, listed: bool
    ) -> None:
        truth = _value(test, self.names)
        if isinstance(truth, (bool, int, str, type(None))) and not _open(truth):
            self.nodes(then if truth else otherwise, on, listed)
            return
        self.nodes(then, _and(on, _brief(test)), listed)
        self.nodes(otherwise, _and(on, f"not ({_brief(test)})"), listed)

    def string(self, node: ast.expr, on: str | None, listed: bool) -> None:
        try:
            text = shlex.split(str(_value(node, self.names)))
        except ValueError:
            return
        if any(w.startswith("--") for w in text):
            if on is None:
                self.words += text
            else:
                self.left.append((node.lineno, text, on))
        elif listed and len(text) == 1 and self.asks(on):
            self.sink(on).append(text[0])

    def sink(self, on: str | None) -> list[str]:
        """Where the words go that follow."""
        return self.words if on is None else self.left[-1][1] if self.left and self.left[-1][2] == on else []

    def asks(self, on: str | None) -> bool:
        """Whether a flag was last, which may take a value."""
        return any(w.startswith("--") for w in self.sink(on)[-1:])


def _and(outer: str | None, inner: str) -> str:
    return f"{outer} and {inner}" if outer else inner


def _is_flag(word: str, target: Target) -> bool:
    return word.startswith("--") and target.by_name(word.partition("=")[0]) is not None
