"""The page of every recipe key: python -m nam_megatron.reference > docs/reference.md

Made from the rows that stand beside the keys (setting.Row), as the editors' hover text and `explain=` are.
"""

from typing import Any

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import finish, page
from nam_megatron.schema import configs
from nam_megatron.targets import current
from nam_megatron.words.setting import Config, section

HEAD = """# Every key of a recipe

Generated: `python -m nam_megatron.reference`. `argument` is Megatron %s's, where the value goes in as it stands; elsewhere it is computed
from the key, or our own layers read it from plan.json. A key that *computes* is part of what a run is: another value is another model or
another training, and a checkpoint of it is not resumed. One that only *executes* changes how, where or how fast.
"""


def render() -> str:
    """The page, in Markdown."""
    text = [HEAD % current().pin]
    for path, config in configs():
        rows = [(name, config) for name, field in config.model_fields.items() if not section(field.annotation)]
        if not rows:
            continue
        doc = (config.__doc__ or "").strip().partition("\n")[0]
        text += [f"\n## {path.removesuffix('.') or 'recipe'}\n\n{doc}\n"]
        text += ["| key | values | what it is | argument | |", "|---|---|---|---|---|"]
        text += [_line(path, name, config) for name, config in rows]
        text.append("")
    text += ["\n## Letters of a pattern\n", "| letter | kinds that may stand there |", "|---|---|"]
    text += [f"| `{letter}` | {', '.join(kinds)} |" for letter, kinds in _letters().items()]
    return "\n".join(text) + "\n"


def _line(path: str, name: str, config: type[Config]) -> str:
    row = config.row(name)
    argument = f"`{current().by_dest[row.argument].name}`" if row.argument else ""
    what = f"executes: {row.executes}" if row.executes else "computes"
    cells = (f"`{path}{name}`", values(config.model_fields[name].annotation), row.doc, argument, what)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def values(annotation: Any) -> str:
    """What a key takes, in words: `integer`, `fused, naive`, `text or null`."""
    words = {int: "integer", float: "number", bool: "true, false", str: "text", type(None): "null"}
    if annotation in words:
        return words[annotation]
    args = getattr(annotation, "__args__", ())
    if args and all(isinstance(a, str) for a in args):
        return ", ".join(args)
    if getattr(annotation, "__origin__", None) in (tuple, dict):
        of = [values(a) for a in args[:1] if getattr(a, "__args__", None)]
        return " of ".join(["list", *of]) if annotation.__origin__ is tuple else "mapping"
    return " or ".join(dict.fromkeys(values(a) for a in args if a is not type(None))) + (
        " or null" if type(None) in args else ""
    )


def _letters() -> dict[str, list[str]]:
    return {a: [f"{k} ({b.title})" for k, b in KINDS.items() if a in b.letters] for a in "AEMR"}


if __name__ == "__main__":
    finish(lambda: page(__doc__, render))
