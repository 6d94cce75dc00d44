"""A recipe of Megatron-Bridge's in Python, or a Python script that holds Megatron's flags in its strings: read, never run.

A recipe is a function that sets fields, `cfg.model.num_layers = 32`, or calls `TrainingConfig(train_iters=...)`. What it sets on a
condition, in a loop, or to something that is computed is open; what a function of another file returns is not read. A name has the value
that was last given to it where that is one for sure, and none after a branch, a loop or a `try` that may have set it.
"""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from nam_megatron.lint.container import SECTIONS
from nam_megatron.lint.follow import HOLE, Fork, fork, hole, holes, shown
from nam_megatron.lint.others import BRIDGE, Said, flags
from nam_megatron.lint.shell import CLOSE, OPEN
from nam_megatron.targets import Target

CALLS, FOLLOWED = 8, 100  # functions within functions, and all that are followed
# The sections by the classes of Bridge's that make them.
CLASSES = {
    "TrainingConfig": "train", "ValidationConfig": "validation", "OptimizerConfig": "optimizer", "SchedulerConfig": "scheduler",
    "DistributedDataParallelConfig": "ddp", "GPTDatasetConfig": "dataset", "LoggerConfig": "logger", "TokenizerConfig": "tokenizer",
    "CheckpointConfig": "checkpoint", "RNGConfig": "rng", "DistributedInitConfig": "dist",
}  # fmt: skip
BASE = re.compile(r"^_?[a-z].*(config|common|recipe)")  # a function that makes a container
MODEL = re.compile(r"\w*(Provider|ModelConfig|TransformerConfig)\w*")
OTHERS = ("self", "args")  # whose attributes are no fields
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
FIRST = re.compile(r"(import|from)\s+[\w.]+|(\"\"\"|''')")


def is_python(first: str, name: str) -> bool:
    """Whether a text is Python's, by its name or its first line."""
    return name.endswith(".py") or bool(FIRST.match(first))


def read(text: str, target: Target, decided: Mapping[str, bool]) -> Said | None:
    """What a Python file says of Megatron; None: nothing. `Said.program` is empty of one with flags in strings. decided: see follow.py.

    Raises SyntaxError.
    """
    # Where nothing is used, as in a file that others import, all of it counts.
    return _said(Used().visit(ast.parse(text)), target, decided) or _said(ast.parse(text), target, decided)


def _said(tree: ast.Module, target: Target, decided: Mapping[str, bool]) -> Said | None:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    constants = _constants(tree)
    providers = _providers(tree, constants)
    recipes: list[tuple[Any, Recipe, ast.ClassDef | Function]] = []
    for function in [
        *functions.values(),
        *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in providers),
    ]:
        found = Recipe(functions, constants, {}, _several(tree), decided, target, providers)
        if isinstance(function, ast.ClassDef):
            found.fields = providers[function.name]
        else:
            found.names = dict(constants) | dict(_defaults(function))
            found.body(function.body, None)
        # One that hands on what a parser read is of a program of Megatron's, whose words are on the command that starts it.
        if found.together > 1:
            found.mixed = [*dict.fromkeys(name for at, name, _ in found.fields if at == "model")]
            found.fields = [one for one in found.fields if one[0] != "model"]
        values = [value for *_, value in found.fields]
        if not all(map(_open, values)) or not any("args." in value for value in values):
            recipes.append((flags(found.fields, target), found, function))
    best = max(recipes, key=lambda one: len(one[0][0]), default=None)
    if best and best[0][0]:
        (words, without), found, function = best
        what, calls = ("class", "is made of") if isinstance(function, ast.ClassDef) else ("function", "calls")
        notes = [
            f"read is the {what} `{function.name}` (line {function.lineno}); what it does not set, {BRIDGE} decides, and what it "
            f"{calls}: open"
        ]
        if others := sum(bool(one[0][0]) for one in recipes) - 1:
            notes.append(f"the file has {others} more that set fields; this one says most")
        parameters = [] if isinstance(function, ast.ClassDef) else _defaults(function)
        defaults = {name: value for name, value in parameters if not _open(value)}
        if defaults:
            said = ", ".join(f"{name}={value}" for name, value in defaults.items())
            notes.append(f"read with the defaults of its parameters, of which a caller may give others: {said}")
        notes += [f"it starts from `{name}()`, which is not in this file" for name in found.bases]
        notes += [f"not known here, it may set any field: {what}" for what in dict.fromkeys(found.unknown)]
        if found.mixed:
            notes.append(f"it makes {found.together} models, whose fields are not told apart: {', '.join(found.mixed)}")
        if without:
            notes.append(f"fields that no flag of Megatron's says: {', '.join(without)}")
        return Said(BRIDGE, tuple(words), tuple(notes), None, forks=tuple(found.forks))
    return _script(tree, functions, constants, target, decided)


def _providers(tree: ast.Module, constants: Mapping[str, Any]) -> dict[str, list[tuple[str, str, Any]]]:
    """Of each class that is made of one of Bridge's models the fields that it and those of this file set."""
    made: dict[str, list[tuple[str, str, Any]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [_called(base) for base in node.bases]
            if any(base in made or MODEL.fullmatch(base) for base in bases):
                inherited = [one for base in reversed(bases) for one in made.get(base, [])]
                own = [("model", name, value) for name, value in _attributes(node, constants) if value is not None]
                made[node.name] = [*inherited, *own]
    return made


# Functions that tell a person something; and those whose product is all that they do.
TELLING = {"print", "debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
MAKING = re.compile(r"\w*(Config|Container|Provider)|format|join|split|str|dict|list")


class Used(ast.NodeTransformer):
    """Leaves a text without what it only tells a person, and without what is given to a name that nothing asks for."""

    def visit_Module(self, node: ast.Module | Function) -> ast.AST:
        self.generic_visit(node)
        asked = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if not asked & {"locals", "globals", "vars", "eval"}:
            _drop(node, asked | _outer(node))
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Module

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        match node.value:
            case ast.Call(func=function, keywords=words) if _called(function) in TELLING:
                return node if any(word.arg == "file" for word in words) else None
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.copy_location(ast.Raise(), node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return node


def _drop(node: ast.AST, asked: set[str]) -> None:
    """Take the assignments away whose names are not asked for; those of functions and classes within are their own."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(node, name, [one for one in value if not _unused(one, asked)])
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, Function | ast.ClassDef | ast.expr):
            _drop(inner, asked)


def _unused(node: object, asked: set[str]) -> bool:
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            | ast.AugAssign(target=ast.Name(id=name), value=value)
        ):
            calls = [n.func for n in ast.walk(value) if isinstance(n, ast.Call)]
            return name not in asked and all(MAKING.fullmatch(_called(function)) for function in calls)
    return False


class Alias(NamedTuple):
    """What a name holds that stands for a section of the container."""

    section: str
    root: str | None


class Record(dict[str, Any]):
    """The attributes of a class of this file, or of what it makes; a hole for one that is set anywhere but where it is told here."""


APART = ast.If | ast.Match | ast.Try  # whose dictionaries are known behind them, but for what they put into them


@dataclass
class Walk:
    """Statements in their order: what each name is at them, and on which condition they stand (`on`), where the text does not decide it.

    constants: what names are in any function. names: what they are where it is. depth: functions that it is in; followed: how many it
    was in. several: names that are given more than once. place: the lines of the calls that it is in. decided, forks: see follow.py.
    """

    functions: Mapping[str, Function]
    constants: Mapping[str, Any]
    names: dict[str, Any]
    several: Set[str]
    decided: Mapping[str, bool]
    place: tuple[int, ...] = field(default=(), init=False)
    depth: int = field(default=0, init=False)
    followed: int = field(default=0, init=False)
    forks: list[Fork] = field(default_factory=list, init=False)

    @cached_property
    def shared(self) -> set[str]:
        """Names that a function gives to those outside it, who knows when."""
        return {name for function in self.functions.values() for name in _outer(function)}

    def expression(self, node: ast.expr, on: str | None) -> None:
        raise NotImplementedError

    def assign(self, target: ast.expr, value: ast.expr, on: str | None) -> None:
        raise NotImplementedError

    def augment(self, target: ast.expr, op: ast.operator, value: ast.expr, on: str | None) -> None:
        raise NotImplementedError

    def loop(self, node: ast.For, on: str | None) -> bool:
        """Whether a loop is read as one thing."""
        return False

    def entered(self, name: str, entries: Mapping[str, Any], on: str | None) -> None:
        """A dictionary got these."""

    def removed(self, node: ast.Delete) -> None:
        """Something is taken away."""

    def said(self) -> int:
        """How much is told of what hangs on a condition."""
        raise NotImplementedError

    def body(self, nodes: Sequence[ast.stmt], on: str | None) -> bool:
        """Whether it is over for sure behind these."""
        for node in nodes:
            loose, line = set(_bound(node)), f"line {node.lineno}"
            match node:
                case ast.If(test=test, body=then, orelse=otherwise):
                    truth = self.truth(test)
                    if truth is not None:
                        if self.body(then if truth else otherwise, on):
                            return True
                        continue
                    self.expression(test, on)
                    said = self.said()
                    holds, fails = _and(on, _brief(test)), _and(on, f"not ({_brief(test)})")
                    self.apart(then, holds)
                    self.apart(otherwise, fails)
                    if self.said() > said and not ends(then) and not ends(otherwise):
                        self.forked(test, on)
                    on = fails if returns(then) else holds if returns(otherwise) else on
                case ast.For() if self.loop(node, on):
                    pass
                case ast.For() | ast.AsyncFor() | ast.While():
                    self.names |= _holes(loose)
                    inner = _and(on, f"what {line} goes through has it")
                    self.expression(node.test if isinstance(node, ast.While) else node.iter, inner)
                    self.apart([*node.body, *node.orelse], inner)
                    on = inner if returns([node]) else on
                case ast.Match(subject=subject, cases=cases):
                    self.expression(subject, on)
                    for case in cases:
                        self.apart(case.body, _and(on, f"{_brief(subject)} is {ast.unparse(case.pattern)}"))
                    on = _and(on, f"{line} goes on") if returns([node]) else on
                case ast.Try(body=body, handlers=handlers, orelse=otherwise, finalbody=last):
                    goes_on = [h for h in handlers if not ends(h.body)]
                    works = _and(on, f"{line} does not fail") if goes_on else on
                    over = self.body([*body, *otherwise], works)
                    for handler in goes_on:
                        self.apart(handler.body, _and(on, f"{line} fails"))
                    if self.body(last, on) or (over and not goes_on):
                        return True
                    on = works if returns([node]) else on
                    if not goes_on:
                        continue
                case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                    for item in items:
                        self.expression(item.context_expr, on)
                    self.names |= _holes(bound(items))
                    if self.body(body, on):
                        return True
                    continue
                case ast.Return(value=value):
                    if value is not None:
                        self.expression(value, on)
                    return True
                case ast.Raise():
                    return True
                case _ if self.enters(node, on):
                    continue
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self.assign(target, value, on)
                    loose -= {target.id for target in targets if isinstance(target, ast.Name)} - self.shared
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, value, on)
                    loose -= {getattr(target, "id", "")} - self.shared
                case ast.AugAssign(target=target, op=op, value=value):
                    self.augment(target, op, value, on)
                    loose -= {getattr(target, "id", "")} - self.shared
                case ast.Expr(value=ast.Constant()):  # a docstring
                    continue
                case ast.Expr(value=value):
                    self.expression(value, on)
                case ast.Delete():
                    self.removed(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    continue
            self.names |= _holes(
                name for name in loose if not isinstance(self.names.get(name), dict) or not isinstance(node, APART)
            )
        return False

    def truth(self, test: ast.expr) -> bool | None:
        """Whether a condition holds; None where neither the text nor who asks decides it."""
        said = _value(test, self.names)
        return bool(said) if _known(said) else self.decided.get(self.named(test))

    def named(self, test: ast.expr) -> str:
        """The name of a condition: what it says, and where it is asked if a name in it is given more than once."""
        asked = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        own = any(name in self.several or self.names.get(name) not in (None, hole(name)) for name in asked)
        return f"{ast.unparse(test)} {test.lineno} {self.place}" if own else ast.unparse(test)

    def forked(self, test: ast.expr, on: str | None) -> None:
        """Note a condition that nobody decides; what a loop asks it may decide otherwise in each round."""
        if on is None and (ways := fork([(self.named(test), ast.unparse(test))])) not in self.forks:
            self.forks.append(ways)

    def apart(self, nodes: Sequence[ast.stmt], on: str) -> None:
        """Statements after which others may stand."""
        kept = dict(self.names)
        self.body(nodes, on)
        after, self.names = self.names, kept
        for name, held in list(kept.items()):
            if isinstance(held, dict) and (now := after.get(name)) is not held:
                self.names[name] = _either(name, held, now)

    def enters(self, node: ast.stmt, on: str | None) -> bool:
        """Whether a statement puts entries into a dictionary that is known."""
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)], value=value):
                more: ast.expr = ast.Dict([key], [value])
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=more):
                pass
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"), args=args, keywords=words)
            ):
                keys = [None if word.arg is None else ast.Constant(word.arg) for word in words]
                more = ast.Dict([*[None for _ in args], *keys], [*args, *(word.value for word in words)])
            case _:
                return False
        held, given = self.names.get(name), _value(more, self.names)
        if not isinstance(held, dict) or not isinstance(given, dict) or _says(map(ast.Constant, given.values())):
            return False
        given = {key: hole(f"whether {on}") for key in given} if on else given
        changed = {**held, **given}
        self.names |= {other: changed for other, one in self.names.items() if one is held}
        self.entered(name, given, on)
        return True

    def attribute(self, place: ast.expr, value: Any) -> None:
        """An attribute of a record is set, under all its names."""
        match place:
            case ast.Attribute(value=ast.Name(id=name), attr=key) if isinstance(held := self.names.get(name), Record):
                changed = Record({**held, key: value})
                self.names |= {other: changed for other, one in self.names.items() if one is held}

    def handed(self, value: ast.expr) -> Any:
        return _value(value, self.names)

    def follow(self, node: ast.Call, on: str | None) -> None:
        """Go through a function of this file with what it is called with."""
        inner, method = self.functions[_called(node.func)], isinstance(node.func, ast.Attribute)
        plain = [a.arg for a in (*inner.args.posonlyargs, *inner.args.args)][method:]
        passed = dict(zip(plain, node.args, strict=False)) | {w.arg: w.value for w in node.keywords if w.arg}
        given = dict(_defaults(inner))
        if any(isinstance(a, ast.Starred) for a in node.args) or any(w.arg is None for w in node.keywords):
            given, passed = _holes(given), {}
        given |= {name: self.handed(value) for name, value in passed.items()}
        given |= {"self": self.names.get("self", hole("self"))} if method else {}
        kept, self.names = self.names, {**self.constants, **given}
        self.depth, self.followed, self.place = self.depth + 1, self.followed + 1, (*self.place, node.lineno)
        self.body(inner.body, on)
        self.depth, self.place = self.depth - 1, self.place[:-1]
        after, self.names = self.names, kept
        for name, value in passed.items():  # what it did to what it was given
            if (
                isinstance(value, ast.Name)
                and isinstance(held := kept.get(value.id), dict)
                and after.get(name) is not held
            ):
                kept[value.id] = hole(value.id)

    def follows(self, name: str) -> bool:
        return name in self.functions and self.depth < CALLS and self.followed < FOLLOWED


@dataclass
class Recipe(Walk):
    """The fields that a function sets, in its order; the functions of other files that it starts from; what may set any field.

    providers: the fields of a class of this file. roots: of each field the container that it was last set on.
    models: lines of calls that make one of a width or depth of its own, and what each hangs on; mixed: the fields of several, which are
    not told apart.
    """

    target: Target
    providers: Mapping[str, list[tuple[str, str, Any]]]
    fields: list[tuple[str, str, Any]] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    roots: dict[tuple[str, str], str | None] = field(default_factory=dict)
    models: dict[int, str | None] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)

    @property
    def together(self) -> int:
        """How many it makes for sure or on one condition: of two conditions it may be the one or the other."""
        hanging = Counter(self.models.values())
        return hanging.pop(None, 0) + max(hanging.values(), default=0)

    def said(self) -> int:
        return len(self.fields)

    def assign(self, target: ast.expr, value: ast.expr, on: str | None) -> None:
        held = self.given(target, value, on)
        if isinstance(target, ast.Name):
            section = self.section(value)
            self.names[target.id] = section or (hole(target.id) if _open(held) else held)
            self.forget(lambda at, root: root == target.id, target.id)
        for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            self.put(one, held if one is target else hole(ast.unparse(one)))
        if isinstance(target, ast.Attribute) and target.attr in SECTIONS:
            where = ast.unparse(target.value)
            self.forget(lambda at, root: (at, root) == (target.attr, where), ast.unparse(target))
        self.expression(value, on)

    def augment(self, target: ast.expr, op: ast.operator, value: ast.expr, on: str | None) -> None:
        if isinstance(target, ast.Name):
            made = _value(ast.BinOp(ast.Name(target.id), op, value), self.names)
            self.names[target.id] = hole(target.id) if on else made
        else:
            self.put(target, hole(ast.unparse(target)))

    def given(self, target: ast.expr | str, node: ast.expr, on: str | None) -> Any:
        """What a field gets; a hole where it is not told whether it does."""
        if on:
            return hole(f"whether {on}")
        name = target if isinstance(target, str) else getattr(target, "attr", "")
        return ast.unparse(node) if name == "activation_func" else _value(node, self.names)

    def forget(self, of: Callable[[str, str | None], bool], what: str) -> None:
        """Another thing stands where some fields were set: what they are there is not known."""
        lost = hole(f"what `{what}` was given")
        self.fields = [
            (at, name, lost if of(at, self.roots.get((at, name))) else value) for at, name, value in self.fields
        ]

    def section(self, node: ast.expr) -> Alias | None:
        """The section of a container that an expression is."""
        match node:
            case ast.Attribute(value=root, attr=section) if section in SECTIONS:
                return Alias(section, ast.unparse(root))
            case ast.Name(id=name) if isinstance(self.names.get(name), Alias):
                return self.names[name]
            case ast.Call(func=function) if made := self.makes(function):
                return Alias(made, None)
        return None

    def handed(self, value: ast.expr) -> Any:
        return self.section(value) or super().handed(value)

    def makes(self, function: ast.expr) -> str | None:
        """The section that a call makes."""
        name = _called(function)
        return CLASSES.get(name) or ("model" if MODEL.fullmatch(name) or name in self.providers else None)

    def put(self, target: ast.expr, value: Any) -> None:
        self.attribute(target, value)
        match target:
            case ast.Attribute(value=inner, attr=name) if alias := self.section(inner):
                self.set(alias, name, value)
            case ast.Attribute(value=ast.Name(id=held), attr=name) if (
                name in self.target.by_dest and held not in OTHERS and not isinstance(self.names.get(held), Record)
            ):
                self.unknown.append(f"`{held}.{name}`")  # of something that may be a section
                self.fields += [(s, n, hole(f"{held}.{name}")) for s, n, _ in self.fields if n == name][:1]

    def set(self, alias: Alias, name: str, value: Any) -> None:
        """A field; open where another container of this function has another value of it."""
        root = None if self.depth else alias.root
        before, key = self.roots.get((alias.section, name)), (alias.section, name)
        if root and before and root != before:
            value = hole(f"{before}.{alias.section}.{name} or {root}.{alias.section}.{name}")
        self.roots[key] = root or before
        self.fields.append((*key, value))

    def expression(self, node: ast.expr, on: str | None) -> None:
        """What a call sets by its keywords, and what a function of this file does."""
        if not isinstance(node, ast.Call):
            return
        name, section = _called(node.func), self.makes(node.func)
        if name == "setattr" and len(node.args) == 3 and (alias := self.section(node.args[0])):
            said = _value(node.args[1], self.names)
            if isinstance(said, str) and not _open(said):
                self.set(alias, said, self.given(said, node.args[2], on))
            else:
                self.unknown.append(f"`{_brief(node)}` (line {node.lineno})")
            return
        self.fields += self.providers.get(name, [])
        if section == "model" and {"num_layers", "hidden_size"} & {word.arg for word in node.keywords}:
            self.models[node.lineno] = on
        if name == "apply_flex_dispatcher_backend" and node.args and (alias := self.section(node.args[0])):
            for changed in ("moe_token_dispatcher_type", "moe_shared_expert_overlap"):
                self.set(alias, changed, hole(name))  # Bridge's, which looks at the GPU
        for word in node.keywords:
            if section and word.arg is None:
                self.unknown.append(f"`**{_brief(word.value)}` (line {node.lineno})")
            self.expression(word.value, on)
            if section and word.arg and not isinstance(word.value, ast.Call):
                self.fields.append((section, word.arg, self.given(word.arg, word.value, on)))
        if section or (node.args and isinstance(node.func, ast.Attribute)):
            return
        if self.follows(name):
            self.follow(node, on)
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


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _constants(tree: ast.Module) -> dict[str, Any]:
    """What a module's names are in its functions; a hole for one with several values, or set anywhere but on the top level."""
    names: dict[str, Any] = {"__name__": "__main__"}
    stored = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    if any(isinstance(n, ast.Name) and n.id == "setattr" for n in ast.walk(tree)):
        stored |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                held = _value(value, names)
                names[name] = held if names.get(name, held) == held else hole(name)
            case ast.ClassDef(name=name, bases=bases, body=body) if (
                name not in names
                and all(isinstance(names.get(_called(base)), Record) for base in bases)
                and not any(isinstance(n, Function) and n.name == "__init__" for n in body)
            ):
                inherited = {key: value for base in reversed(bases) for key, value in names[_called(base)].items()}
                names[name] = Record(inherited | dict(_attributes(node, names)))
                names[name] |= {key: hole(f"{name}.{key}") for key in names[name] if key in stored}
            case _:
                names |= _holes(bound([node]))
    outer = _outer(tree) | {
        name for node in ast.walk(tree) if isinstance(node, Function) for one in node.body for name in _filled_in(one)
    }
    return names | _holes(outer)


def _attributes(node: ast.ClassDef, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a class says of its attributes; of a dataclass's field its default."""
    names = dict(names)
    for one in node.body:
        match one:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if isinstance(value, ast.Call) and _called(value.func) == "field":
                    default = {word.arg: word.value for word in value.keywords}
                    made = default.get("default_factory")
                    value = default.get("default") or (made.body if isinstance(made, ast.Lambda) else value)
                names[name] = ast.unparse(value) if name == "activation_func" else _value(value, names)
                yield name, names[name]


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that some statements may set or take away; what a function within them sets is its own."""
    return set().union(*map(_bound, nodes))


@lru_cache(10_000)  # a function is read as often as it is called
def _bound(node: ast.AST) -> frozenset[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return frozenset({name})
        case ast.Lambda():
            return frozenset()
        case (
            ast.Name(id=name, ctx=ast.Store() | ast.Del())
            | ast.MatchAs(name=str() as name)
            | ast.ExceptHandler(name=str() as name)
            | ast.MatchStar(name=str() as name)
            | ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
            | ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault" | "clear" | "pop" | "popitem")
            )
        ):
            own = {name}
        case ast.alias(name=name, asname=other):
            own = {other or name.partition(".")[0]}
        case _:
            own = set()
    return frozenset(own.union(*map(_bound, ast.iter_child_nodes(node))))


def _filled_in(node: ast.AST) -> Iterator[str]:
    """Names of what gets an entry by its key."""
    for one in ast.walk(node):
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name):
            yield one.value.id


def returns(nodes: Iterable[ast.AST]) -> bool:
    """Whether some statements hold a `return` of their own function."""
    return any(
        isinstance(node, ast.Return)
        or (not isinstance(node, Function | ast.Lambda) and returns(ast.iter_child_nodes(node)))
        for node in nodes
    )


def ends(nodes: Sequence[ast.stmt]) -> bool:
    """Whether some statements end in an error or the program's end."""
    match nodes[-1:]:
        case [ast.Raise()]:
            return True
        case [ast.Expr(value=ast.Call(func=function))]:
            return _called(function) in ("exit", "_exit", "abort")
    return False


def _either(name: str, held: dict[Any, Any], now: Any) -> Any:
    """What a dictionary is that may be the other one."""
    if not isinstance(now, dict):
        return hole(name)
    alike = {key for key in held if key in now and held[key] == now[key]}
    return type(held)({key: held[key] if key in alike else hole(f"{name}.{key}") for key in held | now})


def _outer(node: ast.AST) -> set[str]:
    """Names that functions within set outside themselves."""
    return {name for n in ast.walk(node) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}


def _several(tree: ast.Module) -> set[str]:
    """Names that are given more than once."""
    given = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {name for name, times in given.items() if times > 1}


def _holes(names: Iterable[str]) -> dict[str, Any]:
    return {name: hole(name) for name in names}


def _open(value: Any) -> bool:
    return isinstance(value, str) and OPEN in value


def _known(value: Any) -> bool:
    """Whether a value says of itself whether it is true."""
    return isinstance(value, (bool, int, float, str, type(None))) and not _open(value)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """A constant, a list of them, a name that has one, a sum or product of numbers, a dtype; a hole for anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            value = names.get(name, hole(name))
            return hole(name) if isinstance(value, Alias) else value
        case ast.Dict(keys=keys, values=elements) if all(key is None or isinstance(key, ast.Constant) for key in keys):
            made: dict[Any, Any] = {}
            for key, e in zip(keys, elements, strict=True):
                said = _value(e, names)
                if key is None and not isinstance(said, dict):
                    return hole(_brief(node))
                made |= said if key is None else {key.value: said}  # type: ignore[attr-defined]
            return made
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words):
            return _value(
                ast.Dict([None if w.arg is None else ast.Constant(w.arg) for w in words], [w.value for w in words]),
                names,
            )
        case ast.Call(func=ast.Name(id="vars" | "asdict"), args=[one]) | ast.Attribute(value=one, attr="__dict__") if (
            isinstance(held := _value(one, names), Record)
        ):
            return dict(held)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if isinstance(kind := names.get(name), Record):
            keys = [
                *(ast.Constant(key) for key, _ in zip(kind, args, strict=False)),
                *(ast.Constant(w.arg) if w.arg else None for w in words),
            ]
            given = (
                _value(ast.Dict(keys, [*args, *(w.value for w in words)]), names) if len(args) <= len(kind) else None
            )
            return Record({**kind, **given}) if isinstance(given, dict) else hole(_brief(node))
        case ast.Attribute(value=ast.Name() | ast.Call() as table, attr=key) if isinstance(
            held := _value(table, names), Record
        ):
            return held.get(key, hole(_brief(node)))
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            a, b = _value(left, names), _value(right, names)
            if not any(_open(v) or not isinstance(v, (bool, int, float, str)) for v in (a, b)):
                return (a == b) is isinstance(op, ast.Eq)
        case ast.IfExp(test=test, body=one, orelse=other) if _known(said := _value(test, names)):
            return _value(one if said else other, names)
        case ast.BoolOp(op=op, values=[first, *rest]) if _known(said := _value(first, names)):
            goes_on = rest and bool(said) is isinstance(op, ast.And)
            return _value(ast.BoolOp(op, rest), names) if goes_on else said
        case ast.Subscript(value=table, slice=key):
            held, at = _value(table, names), _value(key, names)
            if isinstance(held, dict) and isinstance(at, (str, int)) and at in held:
                return held[at]
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
            if isinstance(op, ast.Add) and isinstance(a, str) and isinstance(b, str) and not (_open(a) and _open(b)):
                return a + b
        case ast.BinOp(left=left, op=ast.Mod(), right=right) if isinstance(text := _value(left, names), str):
            several = right.elts if isinstance(right, ast.Tuple) else [right]
            given = tuple(_value(e, names) for e in several)
            return _filled(text, PERCENT, lambda: text % (given[0] if isinstance(given[0], dict) else given))
        case ast.Call(func=ast.Attribute(value=table, attr="format"), args=args, keywords=words) if isinstance(
            text := _value(table, names), str
        ):
            named = {word.arg or "**": _value(word.value, names) for word in words}
            return _filled(text, BRACES, lambda: text.format(*(_value(a, names) for a in args), **named))
        case ast.Call(func=ast.Name(id="str"), args=[one]) if isinstance(said := _value(one, names), str | int | float):
            return str(said)
        case ast.JoinedStr(values=parts):
            return "".join(str(_value(p, names)) for p in parts)
        case ast.FormattedValue(value=inner, conversion=conversion, format_spec=spec):
            said, wanted = _value(inner, names), "" if spec is None else str(_value(spec, names))
            if _open(said) or (conversion < 0 and not wanted):
                return said
            shape = f"{{{f'!{chr(conversion)}' if conversion > 0 else ''}:{wanted}}}"
            return _filled(shape, BRACES, lambda: shape.format(said))
    return hole(_brief(node))


BRACES, PERCENT = re.compile(r"\{([^{}]*)\}"), re.compile(r"%(?:\((\w+)\))?[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")


def _filled(text: str, places: re.Pattern[str], filled: Callable[[], str]) -> str:
    """A text with its places filled in; with holes there where that cannot be done here, or would be as long as no word is."""
    if not re.search(r"\d{4}", "".join(found[0] for found in places.finditer(text))):
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            return filled()
    return places.sub(lambda found: hole(found[1] or found[0]), text)


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
}  # fmt: skip


def _brief(node: ast.expr) -> str:
    return re.sub(f"[{OPEN}{CLOSE}]", "", ast.unparse(node))[:60]


# Flags in strings ----------------------------------------------------------------------------------------------------------


def _script(
    tree: ast.Module,
    functions: Mapping[str, Function],
    constants: dict[str, Any],
    target: Target,
    decided: Mapping[str, bool],
) -> Said | None:
    """The strings of the function that has most of Megatron's flags, in their order; of those on a condition it is said which."""
    templates = set(_templates(tree))
    speaking = {name for name, function in functions.items() if _says([function])}
    while more := {n for n, f in functions.items() if n not in speaking and speaking & {*map(_called, _calls(f))}}:
        speaking |= more
    of_classes = {
        n.name: c.name for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, Function)
    }
    found = []
    for function in (None, *functions.values()):  # whoever calls it may give another value than a parameter's default
        names = {name: value for name, value in constants.items() if isinstance(value, Record) or name == "__name__"}
        if function:
            names = constants | {name: hole(name) for name, _ in _defaults(function)}
            names |= (
                {"self": made} if isinstance(made := constants.get(of_classes.get(function.name, "")), Record) else {}
            )
        found.append(
            Strings(
                functions,
                constants,
                names,
                _several(tree),
                decided,
                target,
                speaking,
                {*of_classes},
                templates=templates,
            )
        )
        found[-1].body(function.body if function else tree.body, None)
    launches = [(one, words) for one in found for words in one.launches()]
    most, words = max(launches, key=lambda one: (_flags(one[1], target), -sum(map(_open, one[1]))))
    if not _flags(words, target):
        return None
    notes = ["the flags in its strings are read, in their order; what else it hands on is not known here"]
    if (others := len(most.launches())) > 1:
        notes.append(f"it starts {others} launches: read is the one with the most flags, the first of equals")
    for condition, said in _conditional(most.left, target).items():
        notes.append(f"conditional, neither there nor absent here: {', '.join(said)}, if {condition}")
    here = {word.partition("=")[0] for words in (most.words, *(text for _, text, _ in most.left)) for word in words}
    elsewhere = dict.fromkeys(word.partition("=")[0] for one in found for word in one.words if _is_flag(word, target))
    if away := [flag for flag in elsewhere if flag not in here]:
        more_ = f" and {len(away) - 8} more" if len(away) > 8 else ""
        notes.append(f"flags of its other functions, not read here: {', '.join(away[:8])}{more_}")
    if most.changed:
        notes.append(f"the words may be others, by what changes them: {', '.join(most.changed)}")
    return Said("", tuple(words), tuple(notes), None, forks=tuple(most.forks))


def _calls(node: ast.AST) -> Iterator[ast.expr]:
    return (n.func for n in ast.walk(node) if isinstance(n, ast.Call))


def _flags(words: Iterable[str], target: Target) -> int:
    return len({word.partition("=")[0] for word in words if _is_flag(word, target)})


def _templates(tree: ast.Module) -> Iterator[str]:
    """Names of texts whose places are filled in elsewhere: as they are, nobody uses them."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="format")):
                yield name
            case ast.BinOp(left=ast.Name(id=name), op=ast.Mod()):
                yield name


def _conditional(left: Sequence[tuple[int, list[str], str]], target: Target) -> dict[str, list[str]]:
    """Of each condition the flags that stand on it, with what follows them and their line."""
    found: dict[str, list[str]] = {}
    for line, text, condition in left:
        starts = [i for i, word in enumerate(text) if word.startswith("--")]
        for i, end in zip(starts, [*starts[1:], len(text)], strict=True):
            if _is_flag(text[i], target):
                found.setdefault(condition, []).append(f"`{shown(' '.join(text[i:end]))}` (line {line})")
    return found


# What is asked of a text, or declared, and is no word of a launch; and what changes one.
CHANGING = {"remove", "replace", "pop", "removeprefix", "removesuffix", "sub", "clear", "insert"}
ASKING = {
    "add_argument", "startswith", "endswith", "index", "count", "find", "split", "partition", "has_option", *CHANGING,
}  # fmt: skip


def _says(nodes: Iterable[ast.AST]) -> bool:
    """Whether flags stand in some strings."""
    return any(
        isinstance(c, ast.Constant) and re.search(r"(^|\s)--[a-z]", str(c.value)) for n in nodes for c in ast.walk(n)
    )


def _strings(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | dict) else []


SCRIPT = re.compile(r"[^-=\s][^=\s]*\.py")
# A variable of the shell that gets the text; or all that it is given, which is called after the first.
SHELLS_OWN = re.compile(r"\$(?:\{(?:(\w+)|[@*])(?:[^{}\s]*\})?|(\w+)|[@*])")


@dataclass
class Strings(Walk):
    """The words in the strings of a body, those of the functions that it calls among them.

    speaking: functions that have flags; methods: those of classes. left: words on a condition, each with its line and what it stands
    on. changed: what takes words away, or puts others in their place. table: the name that the dictionary gets which is being read.
    templates: see `_templates`.
    """

    target: Target
    speaking: set[str]
    methods: set[str]
    words: list[str] = field(default_factory=list)
    left: list[tuple[int, list[str], str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    table: str = ""
    read: set[str] = field(default_factory=set)
    templates: set[str] = field(default_factory=set)

    def launches(self) -> list[list[str]]:
        """The words of each script that is started, with those before the first one; a script's name is no word."""
        starts = [
            i for i, word in enumerate(self.words) if SCRIPT.fullmatch(word) and not self.takes(self.words[i - 1 : i])
        ]
        before = self.words[: min(starts, default=len(self.words))]
        cuts = zip(starts, [*starts[1:], len(self.words)], strict=bool(starts))
        return [before + self.words[i + 1 : end] for i, end in cuts] or [before]

    def takes(self, before: Sequence[str]) -> bool:
        """Whether the word before is a flag of Megatron's that wants a value."""
        flag = self.target.by_name(before[-1]) if before else None
        return flag is not None and flag.action == "store"

    def said(self) -> int:
        return len(self.left)

    def loop(self, node: ast.For, on: str | None) -> bool:
        if table := self.flags_of(node.target, node.iter, node.body):
            self.entries(table, node, on)
            self.read |= bound([node])
        return bool(table)

    def entered(self, name: str, entries: Mapping[str, Any], on: str | None) -> None:
        if name in self.read:  # its flags stand there already
            for flag in entries:
                if flag in self.words:
                    at = self.words.index(flag) + 1
                    while at < len(self.words) and not self.words[at].startswith("--"):
                        del self.words[at]
                    del self.words[at - 1]
            self.entries(entries, ast.Dict([], []), None)

    def removed(self, node: ast.Delete) -> None:
        self.changed += [
            f"`{_brief(one)}` (line {node.lineno})" for one in node.targets if isinstance(one, ast.Subscript)
        ]

    def assign(self, target: ast.expr, value: ast.expr, on: str | None) -> None:
        match target:
            case ast.Name(id=name):
                self.table = name
                if not self.unfilled(name, value):
                    self.node(value, on, False)
                self.table = ""
                self.name(name, value, on)
                return
            case ast.Attribute():
                self.attribute(target, hole(_brief(target)) if on else _value(value, self.names))
            case ast.Subscript():
                self.changed.append(f"`{_brief(target)}` (line {target.lineno})")
        self.nodes([target, value], on)

    def augment(self, target: ast.expr, op: ast.operator, value: ast.expr, on: str | None) -> None:
        self.node(value, on, False)
        if isinstance(target, ast.Name):
            self.name(target.id, ast.BinOp(ast.Name(target.id), op, value), on)

    def expression(self, node: ast.expr, on: str | None) -> None:
        self.node(node, on, False)

    def spoken(self, node: ast.AST) -> bool:
        """Whether a call is of a function of this file that has flags."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name in self.speaking and name not in self.methods
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return name in self.speaking & self.methods
        return False

    def hands(self, node: ast.Call) -> bool:
        """Whether a function of this file gets a dictionary, into which it may put something."""
        return isinstance(node.func, ast.Name) and any(
            isinstance(a, ast.Name) and isinstance(self.names.get(a.id), dict)
            for a in (*node.args, *(w.value for w in node.keywords))
        )

    def speaks(self, node: ast.AST) -> bool:
        return any(map(self.spoken, ast.walk(node)))

    def name(self, name: str, value: ast.expr, on: str | None) -> None:
        held = hole(name) if on else _value(value, self.names)
        if says := not self.unfilled(name, value) and (
            _says([value]) or self.speaks(value) or (self.fills(value) and self.text(value))
        ):
            self.read.add(name)
        known = isinstance(held, dict) or not (says or isinstance(held, list) or _open(held))
        self.names[name] = held if known else hole(name)

    def nodes(self, nodes: Sequence[ast.AST], condition: str | None, listed: bool = False) -> None:
        for node in nodes:
            self.node(node, condition, listed)

    def node(self, node: ast.AST, on: str | None, listed: bool) -> None:
        """on: the condition that it stands on. listed: in a list, whose elements are words."""
        match node:
            case ast.Lambda() | ast.Compare():
                return
            case ast.ListComp(generators=[first, *_]) | ast.GeneratorExp(generators=[first, *_]) if (
                table := self.flags_of(first.target, first.iter, [node])
            ):
                self.entries(table, node, on)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                kept = self.names
                self.names = kept | _holes(bound(node.generators))
                self.nodes(list(ast.iter_child_nodes(node)), on, listed)
                self.names = kept
            case ast.Call(func=function) if _called(function) in ASKING:
                if _called(function) in CHANGING:
                    self.changed.append(f"`{_brief(node)}` (line {node.lineno})")
                self.node(function, on, listed)
                return
            case ast.Call(func=function, args=[_, default]) if _called(function) in ("get", "getenv") and _says(
                [default]
            ):
                self.changed.append(f"`{_brief(node)}` (line {node.lineno})")
                self.node(default, on, listed)
            case ast.Call(args=args, keywords=words) if (self.spoken(node) or self.hands(node)) and self.follows(
                _called(node.func)
            ):
                self.nodes([*args, *words], on)
                self.follow(node, on)
            case ast.IfExp(test=test, body=one, orelse=other):
                self.fork(test, one, other, on, listed)
            case ast.BoolOp(op=op, values=[first, *rest]) if _says(rest) and (truth := self.truth(first)) is not None:
                if truth is isinstance(op, ast.And):
                    self.nodes(rest, on, listed)
                elif _says([first]) or not truth:
                    self.node(first, on, listed)
                elif self.asks(on):  # any words, of which none is that flag's value
                    self.changed.append(f"`{_brief(node)}` (line {node.lineno})")
                else:
                    self.sink(on).append(hole(_brief(first)))
            case ast.BoolOp(op=op, values=[first, *rest]) if _says([node]):
                self.forked(first, on)
                self.node(first, on, listed)
                self.nodes(
                    rest, _and(on, _brief(first) if isinstance(op, ast.And) else f"not ({_brief(first)})"), listed
                )
            case ast.JoinedStr(values=parts) if any(map(self.speaks, parts)):
                for speaks, several in groupby(parts, self.speaks):  # the words around what a function makes
                    if speaks:
                        self.nodes([*several], on)
                    else:
                        self.string(ast.copy_location(ast.JoinedStr([*several]), node), on, listed)
            case ast.JoinedStr() | ast.Constant(value=str()):
                self.string(node, on, listed)
            case ast.BinOp() | ast.Call() if (
                (_says([node]) or self.fills(node)) and self.text(node) and not self.speaks(node)
            ):
                self.string(node, on, listed)
            case ast.Name(id=name) if name not in self.read and (
                self.text(node) or _says(map(ast.Constant, _strings(self.names.get(name))))
            ):
                self.again(self.names[name], node, on, listed)
            case ast.Dict() if (
                isinstance(table := _value(node, self.names), dict)
                and any(_strings(table))
                and all(str(key).startswith("--") for key in table)
            ):
                self.entries(table, node, on)
            case ast.Dict(keys=keys, values=values) if sum(map(_says, ([v] for v in values))) > 1:
                for key, value in zip(keys, values, strict=True):
                    said = ast.unparse(key) if key else "another's"
                    self.node(
                        value, _and(on, f"the key is {said}" + (f" of `{self.table}`" if self.table else "")), listed
                    )
            case ast.Subscript(value=ast.Name(id=name)) if isinstance(
                said := _value(node, self.names), (str, list)
            ) and (not _open(said) and isinstance(self.names.get(name), dict)):  # which entry is known
                self.left = [one for one in self.left if not one[2].endswith(f" of `{name}`")]
                self.again(said, node, on, listed)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                begin = next((i for i, e in enumerate(elements) if isinstance(e, ast.Starred) or _says([e])), 0)
                scripts = [
                    i for i, e in enumerate(elements) if isinstance(e, ast.Constant) and SCRIPT.fullmatch(str(e.value))
                ]
                if (
                    scripts
                    and on is None
                    and not self.takes(
                        [
                            ast.literal_eval(e)
                            for e in elements[scripts[0] - 1 : scripts[0]]
                            if isinstance(e, ast.Constant)
                        ]
                    )
                ):
                    self.words.append(ast.literal_eval(elements[scripts[0]]))
                    begin = max(begin, scripts[0] + 1)
                self.nodes(elements[begin:], on, True)  # the command before its flags is no value of one before it
            case (
                ast.BinOp()
                | ast.UnaryOp()
                | ast.Name()
                | ast.Attribute()
                | ast.Call()
                | ast.Subscript()
                | ast.Constant()
                | ast.BoolOp()
            ) if (
                listed
                and self.asks(on)
                and not _says([node])
                and not (isinstance(node, ast.Name) and node.id in self.read)
            ):
                self.sink(on).append(str(_value(node, self.names)))
            case ast.AST():
                self.nodes(list(ast.iter_child_nodes(node)), on, listed)

    def unfilled(self, name: str, value: ast.expr) -> bool:
        """Whether a name gets a text whose places are filled in elsewhere."""
        return name in self.templates and isinstance(value, ast.Constant)

    def fills(self, node: ast.expr) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.templates for n in ast.walk(node))

    def text(self, node: ast.expr) -> bool:
        """Whether an expression is a string that has flags."""
        said = _value(node, self.names)
        return isinstance(said, str) and not HOLE.fullmatch(said) and _says([ast.Constant(said)])

    def again(self, said: object, node: ast.expr, on: str | None, listed: bool) -> None:
        """A value in the place of what stands for it."""
        self.node(ast.increment_lineno(ast.parse(repr(said), mode="eval"), node.lineno - 1).body, on, listed)

    def flags_of(self, target: ast.expr, over: ast.expr, made: Sequence[ast.AST]) -> dict[str, Any] | None:
        """The flags that a loop over a dictionary's entries makes of them, with their values."""
        match target, over:
            case (
                ast.Tuple(elts=[ast.Name(id=key), ast.Name()]),
                ast.Call(func=ast.Attribute(value=named, attr="items")),
            ) if isinstance(table := _value(named, self.names), dict):
                texts = [
                    ast.unparse(n)
                    for inner in made
                    for n in ast.walk(inner)
                    if isinstance(n, ast.JoinedStr | ast.BinOp)
                ]
                if (
                    isinstance(named, ast.Name)
                    and named.id not in self.read
                    and all(str(k).startswith("--") for k in table)
                ):
                    return table
                if any(re.match(rf"f?['\"]--['\"{{].*\b{key}\b", text) for text in texts):
                    return {f"--{name.replace('_', '-')}": value for name, value in table.items()}
        return None

    def entries(self, table: Mapping[str, Any], node: ast.AST, on: str | None) -> None:
        """A dictionary of flags: what has no value, or is true, is a flag alone, and what is false is none.

        Of what is None a loop that asks for it decides.
        """
        words, asked = [], not isinstance(node, ast.Dict) and "None" in ast.unparse(node)
        for flag, value in table.items():
            if value is None and asked:
                line = getattr(node, "lineno", 0)
                self.left.append((line, [flag], _and(on, f"line {line} says what is None")))
                continue
            values = [] if value is True or value in (None, "") else value if isinstance(value, list) else [value]
            words += [] if value is False else [flag, *map(str, values)]
        if on is None:
            self.words += words
        else:
            self.left.append((getattr(node, "lineno", 0), words, on))

    def fork(self, test: ast.expr, then: ast.expr, otherwise: ast.expr, on: str | None, listed: bool) -> None:
        truth = self.truth(test)
        if truth is not None:
            self.node(then if truth else otherwise, on, listed)
            return
        self.forked(test, on)
        self.node(then, _and(on, _brief(test)), listed)
        self.node(otherwise, _and(on, f"not ({_brief(test)})"), listed)

    def string(self, node: ast.expr, on: str | None, listed: bool) -> None:
        said = str(_value(node, self.names))
        kept = [found[0] for found in HOLE.finditer(said)]  # of which quotes and blanks are none of the words'
        bare = HOLE.sub("\ue003", said)
        try:
            parts = shlex.split(bare)
        except ValueError:
            parts = bare.split()
        left = iter(kept)
        words = [re.sub("\ue003", lambda _: next(left), part) for part in parts]
        text = [word for word in words if HOLE.sub("", word) or not {*holes(word)} <= self.read]
        text = [SHELLS_OWN.sub(lambda m: hole(m[1] or m[2] or "1"), word) for word in text]
        if any(w.startswith("--") for w in text):
            script = [i for i, w in enumerate(text) if SCRIPT.fullmatch(w) and not self.takes(text[i - 1 : i])]
            if script and on is None:
                text = text[script[0] :]
            elif not self.asks(on):  # the command before its flags
                text = text[next(i for i, w in enumerate(text) if w.startswith("--")) :]
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
