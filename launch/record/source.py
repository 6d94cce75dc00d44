"""Which code a run is of: the git revision, what differs from it, and the hash of the Python files themselves."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.finding import Finding
from nam_megatron.errors import Refused
from nam_megatron.launcher import BESIDE
from nam_megatron.words.tree import blobs, tree_hash

REVISION = re.compile(r"[0-9a-f]{7,40}")
PACKAGES = ("nam_megatron", "launch")
UNTRACKED = 64 << 20  # bytes of new files that may be stored with a receipt
PATIENCE = 120  # seconds for one git command
# A patch as `git apply` takes it, whatever a user has set for reading.
PLAIN = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


@dataclass(frozen=True)
class Source:
    """revision: None where nobody knows it. diff: what differs from it, new files included; None where git could not say."""

    revision: str | None
    handed_in: str | None
    repository: bool
    diff: str | None
    trees: dict[str, str]

    def facts(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "handed_in": not self.repository and self.handed_in is not None,
            "dirty": bool(self.diff) if self.repository else None,
            "diff_sha256": hashlib.sha256(self.diff.encode("utf-8", "surrogateescape")).hexdigest()
            if self.diff
            else None,
            "trees": self.trees,
        }


def read(checkout: Path, receipts: Path, handed_in: str | None) -> Source:
    """What git says of `checkout`, without the receipts in it; of a copy without .git, what was handed in.

    Raises Refused where what was handed in is no git hash, or not this checkout's.
    """
    if handed_in is not None and not REVISION.fullmatch(handed_in):
        raise Refused(f"`{handed_in}` is no git revision", key="revision", hint="7 to 40 hexadecimal digits")
    if BESIDE.is_dir():  # a wheel: the checkout around it, if there is one, is somebody else's
        roots = {"nam_megatron": BESIDE.parent.parent, "launch": BESIDE}
        return Source(
            handed_in, handed_in, False, None, {package: tree_hash(roots[package], package) for package in PACKAGES}
        )
    trees = {package: tree_hash(checkout, package) for package in PACKAGES}
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != checkout.resolve():
        return Source(handed_in, handed_in, False, None, trees)
    head = (_git(checkout, "rev-parse", "--verify", "HEAD") or "").strip() or None
    if handed_in is not None and head is not None and not head.startswith(handed_in):
        hint = "leave `revision` out, or check it out"
        raise Refused(f"revision {handed_in} was handed in, and this checkout is at {head}", key="revision", hint=hint)
    inside = receipts.resolve().is_relative_to(checkout.resolve())
    but = [f":(exclude){receipts.resolve().relative_to(checkout.resolve())}"] if inside else []
    return Source(head, handed_in, True, difference(checkout, [".", *but]), trees)


def difference(checkout: Path, where: list[str]) -> str | None:
    """The working tree against HEAD as one binary patch, new files included; None where git cannot make it, or takes Python files for
    others than lie there: ignored or marked as unchanged ones, those of a filter, a link, a repository within or where receipts go.

    Made with an index and an object store of its own, so that the repository stays as it is.
    """
    new = _git(checkout, "ls-files", "--others", "--exclude-standard", "-z", "--", *where)
    if new is None or sum(_size(checkout / name) for name in new.split("\0") if name) > UNTRACKED:
        return None
    index, objects = (_git(checkout, "rev-parse", "--git-path", name) for name in ("index", "objects"))
    if index is None or objects is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "index")
        if (theirs := checkout / index.strip()).exists():
            # With its time, by which git knows what may have changed since in the same moment.
            shutil.copy2(theirs, own)
        Path(folder, "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(own),
            "GIT_OBJECT_DIRECTORY": f"{folder}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str((checkout / objects.strip()).resolve()),
        }
        if _git(checkout, "add", "--all", "--", *where, env=env) is None:
            return None
        seen = _git(checkout, "ls-files", "--stage", "-z", "--", *PACKAGES, env=env) or ""
        cells = (entry.partition("\t") for entry in seen.split("\0"))
        if {name: head.split()[1] for head, _, name in cells if name.endswith(".py")} != blobs(checkout, *PACKAGES):
            return None
        return _git(checkout, "diff", "--cached", *PLAIN, "HEAD", "--", *where, env=env)


def findings(source: Source, dirty: str) -> Iterator[Finding]:
    """Whether one can say later which code this was. dirty: what becomes of uncommitted changes, `refuse` or `store`."""
    if not source.repository and source.handed_in is None:
        hint = "hand it in: `revision=HASH`, and waive `git`: `'cluster.waivers={git: WHY}'`"
        yield Finding("git", "fail", "no .git here, and no revision was handed in", hint)
    elif not source.repository:
        hint = "waive `git`: `'cluster.waivers={git: WHY}'`"
        yield Finding("git", "fail", f"no .git here; revision {source.handed_in} was handed in", hint)
    elif source.revision is None:
        yield Finding("git", "fail", "this repository has no commit", "commit what you run")
    elif source.diff is None:
        hint = f"new files of more than {UNTRACKED >> 20} MiB? ignore them, or put them elsewhere. "
        hint += (
            "Python files that git ignores, filters or takes for unchanged (`git ls-files -v`)? commit them as they are"
        )
        yield Finding("git", "fail", "git cannot say what differs from the commit", hint)
    elif source.diff and dirty == "refuse":
        changed = source.diff.count("\ndiff --git ") + source.diff.startswith("diff --git ")
        yield Finding("git", "fail", f"uncommitted changes in {changed} files", "commit them, or `dirty=store`")
    else:
        state = "its changes are stored with the receipt" if source.diff else "clean"
        yield Finding("git", "ok", f"{source.revision}, {state}")


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _git(where: Path, *words: str, env: Mapping[str, str] | None = None) -> str | None:
    """What git prints; None where it fails or there is none. `safe.directory`: containers often run as another user."""
    command = ["git", "--no-replace-objects", "-c", "core.quotePath=false", "-c", "safe.directory=*", *words]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | dict(env or {})
    try:
        done = subprocess.run(command, cwd=where, env=env, capture_output=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None
