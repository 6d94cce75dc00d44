"""How the house stands, from its own text: python tests/house.py

Circles of imports (lazy ones and those for types count), files outside a kind's folder that name it, files that import Hydra's private
modules, lines. test_house.py holds them to bounds.
"""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = {"attention", "mlp", "moe"}  # kinds whose names mean other things, too
KINDS = {path.parent.name for path in (ROOT / "nam_megatron" / "blocks").glob("*/block.py")} - WORDS
# Where a kind is named outside the kinds' folders and the laws on several, and why that is right.
MAY_NAME = {
    "nam_megatron.features.fp8": "a value of `feature.fp8.bf16_parts` is called as the kind is",
    "nam_megatron.hf.model.configuration_nam": "an export's own code, which imports nothing of ours",
    "nam_megatron.hf.model.modeling_nam": "an export's own code, which imports nothing of ours",
    "nam_megatron.lint.huggingface": "a value of one of Megatron's arguments",
    "nam_megatron.lint.model": "which of Megatron's arguments build which kind",
    "nam_megatron.mends.context": "a value of one of Megatron's fields",
}
# Hydra's documentation names these of `hydra.core`: its ConfigStore, what registers plugins, search paths, the parser of its grammar.
PUBLIC = "config_store|global_hydra|plugins|config_search_path|override_parser"
PRIVATE = re.compile(rf"hydra\._internal|from hydra\.core\.(?!{PUBLIC})")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Module name -> its file, of the packages."""
    files = (file for package in ("nam_megatron", "launch") for file in (root / package).rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Names of the modules that a file imports anywhere, `known` or not."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (full if (full := f"{base}.{alias.name}") in known else base for alias in node.names)


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import one another, the largest first. Two are in one circle if each reaches the other."""
    reached = {name: _reach(name, edges) for name in edges}
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in edges if a in reached[a]}
    return sorted(map(sorted, found), key=len, reverse=True)


def _reach(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found, left = set[str](), [start]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found


def circles_of_imports() -> list[list[str]]:
    files = modules()
    return circles({m: {x for x in imports(m, f, files) if x in files and x != m} for m, f in files.items()})


def naming_a_kind() -> set[str]:
    """Files that have the name of a kind as a string, outside its folder and the laws on several."""
    name = re.compile(rf'"({"|".join(KINDS)})"')
    others = {m: f for m, f in modules().items() if not m.startswith(("nam_megatron.blocks", "nam_megatron.laws"))}
    return {m for m, f in others.items() if name.search(f.read_text(encoding="utf-8"))}


def in_hydras_private_modules() -> list[str]:
    return [m for m, f in modules().items() if PRIVATE.search(f.read_text(encoding="utf-8"))]


def lines() -> Counter[str]:
    """By folder, of the Python files that git knows; and of the golden files."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for path in filter(None, tracked.split("\0")):
        area = "golden" if path.startswith("tests/golden/") else path.split("/")[0] if path.endswith(".py") else None
        if area and (ROOT / path).is_file():
            found[area] += len((ROOT / path).read_bytes().splitlines())
    return found


def main() -> None:
    found = circles_of_imports()
    print(f"circles of imports: {len(found)}, the largest of {max(map(len, found), default=1)} files")
    for circle in found:
        print(f"  {', '.join(circle)}")
    strangers = naming_a_kind() - MAY_NAME.keys()
    print(f"files outside laws and a kind's folder that name it: {len(MAY_NAME)} that may, {len(strangers)} others")
    print(f"files in Hydra's private modules: {', '.join(in_hydras_private_modules()) or 'none'}")
    counts = lines()
    python = sum(n for area, n in counts.items() if area != "golden")
    print(f"lines: {', '.join(f'{area} {n:,}' for area, n in counts.most_common())}; Python {python:,}")


if __name__ == "__main__":
    main()
