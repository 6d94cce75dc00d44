"""What stands at which place of a message, in every source: a key where a key belongs, and words where words do."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("nam_megatron", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"\b(Problem|Refused)\(", path.read_text())
)


def text(node: ast.expr | None) -> str | None:
    """Of a text, what of it is written there; None of all else."""
    match node:
        case ast.Constant(value=str(said)):
            return said
        case ast.JoinedStr(values=parts):
            return "".join(part.value for part in parts if isinstance(part, ast.Constant))
    return None


def inlined(tree: ast.Module) -> ast.Module:
    """With texts in the place of the names that were given them just before."""
    for node in ast.walk(tree):
        for body in (getattr(node, field, None) for field in ("body", "orelse")):
            said: dict[str, ast.expr] = {}
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Assign) and text(statement.value) is not None:
                    said |= {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}
                for call in (part for part in ast.walk(statement) if isinstance(part, ast.Call) and said_of(part)):
                    call.args = [said.get(getattr(arg, "id", ""), arg) for arg in call.args]
                    for word in call.keywords:
                        word.value = said.get(getattr(word.value, "id", ""), word.value)
    return tree


def said_of(call: ast.Call) -> bool:
    """Whether it makes a problem, or refuses with what it says; not with problems that others have made."""
    name = getattr(call.func, "id", "")
    return name == "Problem" or (name == "Refused" and (bool(call.keywords) or text(call.args[0]) is not None))


def said_wrong(call: ast.Call) -> bool:
    named = {word.arg: word.value for word in call.keywords}
    message, key, hint = (text(node) for node in (call.args[0], named.get("key"), named.get("hint")))
    return any(
        (
            message and " " not in message,
            key is not None and any(c in key for c in " `;"),
            hint is not None and not any(c in hint for c in " `/="),
        )
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_problem_has_a_message_a_key_and_a_hint_in_this_order(path):
    calls = [node for node in ast.walk(inlined(ast.parse(path.read_text()))) if isinstance(node, ast.Call)]
    assert [ast.unparse(call) for call in calls if said_of(call) and said_wrong(call)] == []
