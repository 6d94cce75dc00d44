"""The page of all laws, docs/laws.md."""

from nam_megatron.laws.book import FOUND, LAWS
from nam_megatron.laws.law import CATEGORIES, UNTRIED, Found, Law

HEAD = """# Laws

Generated: `python -m nam_megatron.laws`. Every refusal has an id and a class. `python -m nam_megatron.translate list=laws` prints them,
`explain=ID` says all of one. Names in capitals stand for a recipe's values. Files of `core/` and `training/` are Megatron 0.19.2's.
"""
WHOLE = ("plan", "recipe", "feature", "target")  # what a predicate takes for single things in it
WAIVING = """
Whoever wants one of these writes why: `'allow.ID=WHY'` on the command line, or below `allow:` in a preset. The plan, its identity and
each receipt say so from then on. A waiver that waives nothing is refused. A reason with commas or brackets is one text in quotes:
`'allow.ID="ours, and first"'`.
"""
ELSEWHERE = """
# What is refused beside a plan

While a recipe, a command line, a file or a machine is read. The message has the key, the file and the way out.

| id | class | what |
|---|---|---|
"""


def render() -> str:
    """The page, in Markdown."""
    sections = "".join(_section(category, [law for law in LAWS if law.category == category]) for category in CATEGORIES)
    return HEAD + sections + ELSEWHERE + "".join(_row(f"`{f.id}`", f.category, f.stated) for f in FOUND)


def _section(category: str, laws: list[Law]) -> str:
    if not laws:
        return ""
    said = CATEGORIES[category]
    waiving, columns = (
        WAIVING if category == UNTRIED else "",
        "| id | key | what | way out | known from |\n|---|---|---|---|---|\n",
    )
    head = f"\n## {category}\n\n{said[0].upper()}{said[1:]}.\n{waiving}\n{columns}"
    return head + "".join(_row(f"`{law.id}`", f"`{law.key}`", law.stated, law.ways, law.known_from) for law in laws)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def explained(law: Law | Found) -> dict[str, str]:
    """A law for somebody who asks for it by its id: what is said, by a word that names it."""
    rows = {"is": law.stated, "class": f"{law.category}: {CATEGORIES[law.category]}"}
    if isinstance(law, Found):
        return rows
    rows |= {
        "key": law.key,
        "about": ", ".join(name for name in law.about if name not in WHOLE),
        "way": law.ways,
        "source": law.known_from,
    }
    return {name: said for name, said in rows.items() if said}
