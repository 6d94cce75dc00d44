"""What lies in patches/<project>/<version>/: a series of patches for one version of a project, and the hashes before and after."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from nam_megatron.errors import Problem, Refused, quoted
from nam_megatron.words.tree import files, tree_hash

ROOT = Path(__file__).parents[2] / "patches"
TRAILERS = ("Reason", "Upstream", "Drop-when", "Test")


@dataclass(frozen=True)
class Queue:
    """The patches for one version of one project. `before`, `after`: hashes of its packages' Python files.

    packages: folders; others may lie beside them, as Megatron-Bridge in the namespace `megatron`.
    """

    folder: Path
    project: str
    version: str
    packages: tuple[str, ...]
    source: str
    before: str
    after: str
    series: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.project} {self.version}"

    def tree(self, root: Path) -> str:
        """The hash of the packages under `root`."""
        return tree_hash(root, *self.packages)

    def files(self, root: Path) -> list[Path]:
        """Their Python files, as paths below `root`."""
        return files(root, *self.packages)

    def word(self, tree: str) -> str:
        """`pristine`, `patched` or `foreign`: what packages of this hash are."""
        return {self.before: "pristine", self.after: "patched"}.get(tree, "foreign")

    def state(self, root: Path) -> str:
        return self.word(self.tree(root))


def queues(root: Path = ROOT) -> list[Queue]:
    """Every queue on disk. Raises Refused for a damaged one."""
    return [read(path.parent) for path in sorted(root.glob("*/*/pin.toml"))]


def read(folder: Path) -> Queue:
    try:
        pin = tomllib.loads((folder / "pin.toml").read_text(encoding="utf-8"))
        series = tuple(
            l for l in (folder / "series").read_text(encoding="utf-8").splitlines() if l and not l.startswith("#")
        )
        tree, packages = pin["tree"], pin["packages"]
        if not (isinstance(packages, list) and packages and all(isinstance(p, str) for p in packages)):
            raise ValueError("`packages` is no list of folders")
        return Queue(
            folder,
            folder.parent.name,
            folder.name,
            tuple(packages),
            pin["source"],
            tree["before"],
            tree["after"],
            series,
        )
    except (OSError, ValueError, KeyError, TypeError) as err:
        why = f"{err.strerror}: `{Path(err.filename or folder).name}`" if isinstance(err, OSError) else err
        raise Refused(f"`{shown(folder)}` is no patch queue: {why}", hint="it needs pin.toml and series") from None


def find(project: str | None) -> Queue:
    known = queues()
    found = [q for q in known if project in (None, q.project)]
    if len(found) != 1:
        hint = f"there are: {quoted(q.name for q in known)}"
        raise Refused(f"no patches for `{project}`" if project else "which project?", hint=hint)
    return found[0]


def objections(queue: Queue) -> Iterator[Problem]:
    """What is wrong with the queue's own files."""
    on_disk = {p.name for p in queue.folder.glob("*.patch")}
    for name in sorted(on_disk ^ set(queue.series)):
        where = "in the folder and not in series" if name in on_disk else "in series and not in the folder"
        yield Problem(f"`{shown(queue.folder / name)}` is {where}")
    for name in queue.series:
        if name in on_disk:
            missing = [t for t in TRAILERS if not trailers((queue.folder / name).read_text(encoding="utf-8")).get(t)]
            if missing:
                message = f"`{shown(queue.folder / name)}` lacks {quoted(missing)}"
                yield Problem(message, hint="trailers end the message, one a line")


def trailers(mail: str) -> dict[str, str]:
    """The trailers of a patch: the last paragraph of its message."""
    message = HeaderParser().parsestr(mail).get_payload()
    assert isinstance(message, str), "HeaderParser makes no parts"
    last = message.split("\n---\n")[0].strip().split("\n\n")[-1]
    return {m[1]: m[2] for m in re.finditer(r"^([A-Z][A-Za-z-]*): (.+)$", last, re.MULTILINE)}


def installed(queue: Queue) -> Path:
    """The folder that holds the packages which Python would import here; imports nothing of them."""
    try:
        spec = importlib.util.find_spec(Path(queue.packages[0]).parts[0])
    except (ImportError, ValueError):
        spec = None
    roots = [Path(p).parent for p in (spec.submodule_search_locations or ())] if spec else []
    for root in roots:
        if (root / queue.packages[0]).is_dir():
            return root
    raise Refused(f"`{queue.packages[0]}` is not installed here", hint="name a folder: `onto=DIR`")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT.parent)) if path.is_relative_to(ROOT.parent) else str(path)
