"""Mistakes that people make and cosmic-ray has no operator for, in its terms (cosmic_ray.operators.operator.Operator), on parso's trees."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator

# Keywords without which the linter refuses a call (B905, PLW1514): `strict` asserts, and `encoding` is what a test's locale has anyway.
# And what argparse shows of an option.
LINTED = ("strict", "encoding", "help")


def beside_the_program(node: Any) -> bool:
    """Types, decorators, assertions, texts for people, what only a type checker reads: no mistake there trains another model."""
    child = node
    while (parent := child.parent) is not None:
        if child.type in ("decorator", "decorators", "assert_stmt", "fstring", "tfpdef"):
            return True
        if child.type == "argument" and child.children[0].get_code().strip() in LINTED:
            return True
        if (
            parent.type == "expr_stmt"
            and child is parent.children[-1]
            and child.get_code().strip().startswith("Callable[")
        ):
            return True  # the name of a type
        if parent.type == "funcdef" and child is parent.annotation:
            return True
        if parent.type == "if_stmt" and parent.children[1].get_code().strip() == "TYPE_CHECKING":
            return True
        if (
            parent.type == "annassign"
            and child is parent.children[1]
            and not re.search("Annotated|Literal", child.get_code())
        ):
            return True
        # Of `key: Annotated[int, Row(...)] = None` the row counts, and `int | None` does not.
        if child.type == "operator" and child.value == "|" and any(a.type == "annassign" for a in above(child)):
            return True
        child = parent
    return False


def above(node: Any) -> Iterator[Any]:
    while (node := node.parent) is not None:
        yield node


class Own(Operator):
    """An operator whose places in a node are numbered from 0."""

    def places(self, node: Any) -> list:
        raise NotImplementedError

    def mutation_positions(self, node):
        for place in self.places(node):
            at = place[0] if isinstance(place, tuple) else place
            yield at.start_pos, at.end_pos

    @classmethod
    def examples(cls):
        return ()


def elements(node: Any) -> list[list[Any]]:
    """What stands between the commas of a list, a dict or a call."""
    found: list[list[Any]] = [[]]
    for child in node.children:
        if child.type == "operator" and child.value == ",":
            found.append([])
        else:
            found[-1].append(child)
    return [element for element in found if element]


def is_call(node: Any) -> bool:
    return node.type == "arglist" and node.parent.type == "trailer"


def positional(element: list[Any]) -> bool:
    return len(element) == 1 and element[0].type != "argument" and element[0].get_code().strip() not in ("*", "/")


def sort_of(node: Any) -> str:
    """Arguments of two sorts are not mistaken for one another: a text for a number, a tuple for a name."""
    if node.type in ("string", "strings", "number", "keyword", "lambdef"):
        return node.type.rstrip("s")
    return node.get_code().strip()[0] if node.type == "atom" else "name"


def swapped(a: Any, b: Any) -> None:
    """Exchange two nodes of one parent, or of two."""
    (i, p), (k, q) = ((n.parent.children.index(n), n.parent) for n in (a, b))
    before = a.get_first_leaf().prefix, b.get_first_leaf().prefix
    p.children[i], q.children[k] = b, a
    a.parent, b.parent = q, p
    b.get_first_leaf().prefix, a.get_first_leaf().prefix = before


class SwapArguments(Own):
    """`f(a, b)` -> `f(b, a)`; `f(x=a, y=b)` -> `f(x=b, y=a)`."""

    SYMMETRIC = ("max", "min", "gcd", "lcm", "promote_types", "suppress")

    def places(self, node):
        if not is_call(node) or node.parent.get_previous_leaf().value in self.SYMMETRIC:
            return []
        pairs = []
        for one, two in zip(elements(node), elements(node)[1:], strict=False):
            if positional(one) and positional(two):
                pairs.append((one[0], two[0]))
            elif all(len(e) == 1 and e[0].type == "argument" and len(e[0].children) == 3 for e in (one, two)):
                pairs.append((one[0].children[2], two[0].children[2]))
        return [(a, b) for a, b in pairs if a.get_code().strip() != b.get_code().strip() and sort_of(a) == sort_of(b)]

    def mutate(self, node, index):
        swapped(*self.places(node)[index])
        return node


class DropElement(Own):
    """A row of a list, tuple, set or dict less, or a keyword of a call."""

    def places(self, node):
        if node.type in ("testlist_comp", "dictorsetmaker"):
            if any(child.type in ("sync_comp_for", "comp_for") for child in node.children):
                return []
            found = elements(node)
            return [element[0] for element in found] if len(found) > (node.parent.children[0].value == "(") + 1 else []
        if is_call(node):
            named = [e[0] for e in elements(node) if e[0].type == "argument" and e[0].children[0].type == "name"]
            return [argument for argument in named if argument.children[0].value not in LINTED]
        return []

    def mutate(self, node, index):
        first = self.places(node)[index]
        at = node.children.index(first)
        end = at
        while end < len(node.children) and node.children[end].get_code().strip() != ",":
            end += 1
        del node.children[at : end + 1]
        return node


class DropOperand(Own):
    """A condition less: `a and b` -> `b`, `... for x in y if z` -> `... for x in y`, `a or b` -> `b`, `a | b` of sets -> `b`."""

    def places(self, node):
        if node.type in ("and_test", "or_test"):
            return list(node.children[::2])
        return [node] if node.type == "comp_if" else []

    def mutate(self, node, index):
        if node.type == "comp_if":
            return parso.parse("").children[0] if len(node.children) == 2 else node.children[2]
        at = 2 * index
        prefix = node.children[0].get_first_leaf().prefix
        first = max(at - 1, 0)  # the operand, and the word before or after it
        del node.children[first : first + 2]
        node.children[0].get_first_leaf().prefix = prefix
        return node


class DropStatement(Own):
    """A call, a `yield`, a `raise` or an `x += y` less."""

    def places(self, node):
        if node.type != "simple_stmt" or node.parent.type != "suite":
            return []
        said = node.children[0]
        if said.type == "expr_stmt":
            if said.children[1].get_code().strip().endswith("=") and said.children[1].get_code().strip() != "=":
                return [said]
            return []
        if said.type in ("atom_expr", "power"):
            return [said]
        return [said] if said.type in ("raise_stmt", "yield_expr", "del_stmt") else []

    def mutate(self, node, index):
        said = node.children[0]
        put = parso.parse("pass").children[0]
        put.prefix = said.get_first_leaf().prefix
        node.children[0] = put
        return node


def compiled(node: Any) -> bool:
    """Whether a statement or call is one of `re.compile`."""
    return node.type in ("expr_stmt", "atom_expr", "power") and "re.compile" in node.get_code()[:200]


class DropAlternative(Own):
    """A regular expression with an alternative less: `(a|b)` -> `(a)`."""

    ONE = re.compile(r"\|(?:[\w\s.,:;<>@~#%&'_-]|\\[\w.])+(?=[|)])")

    def places(self, node):
        if node.type != "string" or node.value[:1] not in "rR" or not any(map(compiled, above(node))):
            return []
        return [(node, found) for found in self.ONE.finditer(node.value)]

    def mutate(self, node, index):
        _, found = self.places(node)[index]
        node.value = node.value[: found.start()] + node.value[found.end() :]
        return node


class DropReduction(Own):
    """`x.sum(dim=0)` -> `x`, `max(found)` -> `found`: several of what should be one, or the last of them."""

    METHODS = ("sum", "mean", "max", "min", "amax", "amin", "norm", "prod", "all", "any", "cumsum", "logsumexp")
    FUNCTIONS = ("max", "min", "sum", "sorted", "set", "frozenset", "tuple", "abs")

    def places(self, node):
        if node.type not in ("atom_expr", "power"):
            return []
        c, found = node.children, []
        if (
            len(c) == 2 and c[0].type == "name" and c[0].value in self.FUNCTIONS
            and c[1].type == "trailer" and len(c[1].children) == 3 and c[1].children[1].type not in ("arglist", "argument")
        ):  # fmt: skip
            found.append(c[0])
        for before, called in pairwise(c[1:]):
            if (
                before.type == called.type == "trailer" and before.children[0].value == "." and called.children[0].value == "("
                and before.children[1].value in self.METHODS
            ):  # fmt: skip
                found.append(before)
        return found

    def mutate(self, node, index):
        at = node.children.index(self.places(node)[index])
        if at == 0:
            (_, call), prefix = node.children, node.children[0].get_first_leaf().prefix
            call.children[1].get_first_leaf().prefix = prefix  # the parentheses stay: `(found)`
            call.children[0].prefix = prefix
            node.children = [call]
        else:
            del node.children[at : at + 2]
        return node


class SwapPair(Own):
    """`a, b = f()` -> `b, a = f()`, `return a, b` -> `return b, a`, `for a, b in c` -> `for b, a in c`."""

    def places(self, node):
        if node.type not in ("testlist_star_expr", "testlist", "exprlist") or len(node.children) != 3:
            return []
        a, _, b = node.children
        return [(a, b)] if sort_of(a) == sort_of(b) and a.get_code().strip() != b.get_code().strip() else []

    def mutate(self, node, index):
        swapped(*self.places(node)[index])
        return node


class StaleState(Own):
    """An assignment to an attribute or an element less: `self.seen = step`, `cache[key] = value`. What was there stays."""

    def places(self, node):
        if node.type != "simple_stmt" or node.parent.type != "suite":
            return []
        said = node.children[0]
        if said.type != "expr_stmt" or said.children[1].type != "operator" or said.children[1].value != "=":
            return []
        target = said.children[0]
        stored = target.type in ("atom_expr", "power") and target.children[-1].type == "trailer"
        return [said] if stored else []

    def mutate(self, node, index):
        put = parso.parse("pass").children[0]
        put.prefix = node.children[0].get_first_leaf().prefix
        node.children[0] = put
        return node


OWN = (SwapArguments, DropElement, DropOperand, DropStatement, DropAlternative, DropReduction, SwapPair, StaleState)
