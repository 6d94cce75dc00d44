"""patches/<project>/<version>/: what we change upstream, as a series of mails for `git am`, proven by tree hashes.

    python -m launch patch list [format=text|markdown]            # what we change upstream: these, and the mends of nam_megatron/mends
    python -m launch patch verify [PROJECT] [onto=DIR]            # the queue itself; is DIR (default: the installed one) patched?
    python -m launch patch apply PROJECT [onto=DIR] [commits=true]   # commits=true: leave a repository, to work on the series
    python -m launch patch export PROJECT onto=DIR                # the commits since the tag `pristine` become the series

`apply` changes nothing unless the whole series fits and the result has the expected hash. What it changes then stands in a journal
beside the packages first; one that was cut off (a kill, a full disk) is finished by the next `apply`.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.host import changes
from launch.host.patches import Queue, find, installed, objections, queues
from nam_megatron.errors import FINDINGS, OK, Refused, raise_if, writing
from nam_megatron.events import digest
from nam_megatron.words.whole import write_whole

BASE_TAG = "pristine"
LIST = "journal.json"
FINISH = "`python -m launch patch apply {project}` finishes it"
# What brings packages in another state than `patched` there.
REMEDY = {
    "pristine": "`python -m launch patch apply {project}` patches it",
    "foreign": "install it again; changes to it belong into patches/",
}
WHO = ("-c", "user.name=nam_megatron", "-c", "user.email=nam_megatron@users.noreply.invalid")


def apply(queue: Queue, root: Path, commits: bool = False) -> str:
    """Bring the packages under `root` from `before` to `after`; returns what was done, in one line.

    commits: `root` becomes a repository with the pristine state tagged and one commit a patch.

    Raises:
        Refused: not the pinned version, a patch that does not fit (with git's words), another result than expected.
    """
    raise_if(objections(queue))
    with _alone(root):
        if cut_off(queue, root):
            _finish(queue, root)
        shutil.rmtree(_journal(queue, root), ignore_errors=True)  # one that was never begun, or is done but for itself
        return _apply(queue, root, commits)


def _apply(queue: Queue, root: Path, commits: bool) -> str:
    state = queue.state(root)
    if commits and (root / ".git").exists():
        raise Refused(f"`{root}` is a repository already", hint="unpack the wheel into an empty folder")
    if state == "patched" and not commits:
        return f"{queue.name}: patched already"
    if state != "pristine":
        hint = f"unpack {queue.source} into an empty folder"
        raise Refused(f"`{root}` holds no pristine {queue.name}: tree {queue.tree(root)}", hint=hint)
    with tempfile.TemporaryDirectory(prefix="nam_megatron_patch_") as work:
        copy = Path(work)
        _am(queue, root, copy)
        if (found := queue.tree(copy)) != queue.after:
            message = f"the patched {queue.name} has tree {found}, and pin.toml says {queue.after}"
            raise Refused(message, hint="export the series again")
        _record(queue, root, copy)
        _finish(queue, root)
        if commits:
            with writing(root, hint="it is patched, and is no repository; unpack it again"):
                shutil.copytree(copy / ".git", root / ".git.part", dirs_exist_ok=True)
                os.replace(root / ".git.part", root / ".git")
    return f"{queue.name}: {len(queue.series)} patch{'es' * (len(queue.series) != 1)} applied, tree {queue.after}"


def export(queue: Queue, repo: Path) -> str:
    """Write the commits of `repo` since the tag `pristine` as the queue's series, with its hashes."""
    tracked = _git(repo, "ls-files", "--", *queue.packages)
    if _git(repo, "status", "--porcelain", "--untracked-files=no") or not tracked:
        raise Refused(f"`{repo}` has uncommitted changes or no `{queue.packages[0]}`", hint="commit them first")
    with tempfile.TemporaryDirectory(prefix="nam_megatron_patch_") as work:
        out, base = Path(work, "series"), Path(work, "base")
        _git(
            repo, "format-patch", "--zero-commit", "--no-signature", "--full-index", "-o", str(out), f"{BASE_TAG}..HEAD"
        )
        names = tuple(sorted(p.name for p in out.glob("*.patch"))) if out.exists() else ()
        if not names:
            raise Refused(f"`{repo}` has no commits after `{BASE_TAG}`")
        _git(repo, "worktree", "add", "--detach", str(base), BASE_TAG)
        before = queue.tree(base)
        _git(repo, "worktree", "remove", "--force", str(base))
        if before != queue.before:
            raise Refused(f"`{BASE_TAG}` in `{repo}` is no pristine {queue.name}: tree {before}")
        made = Queue(out, queue.project, queue.version, queue.packages, queue.source, before, queue.tree(repo), names)
        raise_if(objections(made))
        for old in queue.folder.glob("*.patch"):
            old.unlink()
        for name in names:
            shutil.copyfile(out / name, queue.folder / name)
    (queue.folder / "series").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    (queue.folder / "pin.toml").write_text(pin(made), encoding="utf-8")
    return f"{queue.name}: {len(names)} patch{'es' * (len(names) != 1)} exported, tree {made.after}"


def pin(queue: Queue) -> str:
    return (
        f"packages = {json.dumps(list(queue.packages))}\n"
        f'source = "{queue.source}"\n\n'
        "# Git's tree hash of the packages' Python files (nam_megatron/words/tree.py), pristine and with the series applied.\n"
        f'[tree]\nbefore = "{queue.before}"\nafter = "{queue.after}"\n'
    )


def command(words: Sequence[str], options: dict[str, str]) -> int:
    verbs = {"list", "apply", "verify", "export"}
    verb, project = (*words, None, None)[:2]
    if verb not in verbs or len(words) > 2:
        message = "`patch` takes list, apply, verify or export, and a project"
        raise Refused(message, hint="python -m launch patch verify")
    if verb == "list":
        return show(project, options.get("format", "text"))
    onto = Path(options["onto"]) if "onto" in options else None
    if onto is not None and not onto.is_dir():
        raise Refused(f"`{onto}` is no folder", key="onto")
    if verb == "export":
        if onto is None:
            said = "`export` needs a repository"
            raise Refused(said, hint="`onto=DIR`, made with `patch apply PROJECT onto=DIR commits=true`")
        print(export(find(project), onto))
        return OK
    if verb == "apply":
        queue = find(project)
        print(apply(queue, onto or installed(queue), options.get("commits") == "true"))
        return OK
    return verify([find(project)] if project else queues(), onto)


def show(project: str | None, form: str) -> int:
    """Print the whole queue, mends included, or a project's patches alone."""
    from nam_megatron.mends.series import SERIES

    if form not in changes.FORMATS:
        raise Refused(f"`format` is {' or '.join(changes.FORMATS)}, not `{form}`", key="format")
    chosen, series = ([find(project)], ()) if project else (queues(), SERIES)
    raise_if(problem for queue in chosen for problem in objections(queue))
    print("\n".join(getattr(changes, form)(list(changes.changes(chosen, series)))))
    return OK


def verify(chosen: Sequence[Queue], onto: Path | None) -> int:
    raise_if(problem for queue in chosen for problem in objections(queue))
    states = []
    for queue in chosen:
        root = onto or installed(queue)
        tree = queue.tree(root)
        states.append(queue.word(tree))
        print(f"{queue.name}: {states[-1]}, tree {tree}")
        if cut_off(queue, root):
            sys.stderr.write(f"hint: an `apply` was cut off: {FINISH.format(project=queue.project)}\n")
        elif states[-1] in REMEDY:
            where = f"{queue.project} onto={onto}" if onto else queue.project
            sys.stderr.write(f"hint: {REMEDY[states[-1]].format(project=where)}\n")
    return OK if all(state == "patched" for state in states) else FINDINGS


def _am(queue: Queue, root: Path, copy: Path) -> None:
    """`copy` becomes a repository with the packages of `root` committed and tagged, and the series on top."""
    for path in queue.files(root):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, copy / path)
    _git(copy, "init", "--quiet")
    # A file that the user's own gitignore hides must not be lost, nor line ends changed.
    for key, value in (("core.autocrlf", "false"), ("core.excludesFile", os.devnull), ("core.fileMode", "false")):
        _git(copy, "config", key, value)
    _git(copy, "add", "--all", "--force", ".")
    _git(copy, *WHO, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "-m", f"{queue.name}, pristine")
    _git(copy, "tag", BASE_TAG)
    if queue.series:
        _git(
            copy,
            *WHO,
            "am",
            "--quiet",
            "--no-gpg-sign",
            *(str((queue.folder / name).resolve()) for name in queue.series),
        )


# The journal: a folder beside the packages with the new files, and last of all the list of what they replace.


def _journal(queue: Queue, root: Path) -> Path:
    return root / f".nam_megatron_patch_{queue.project}"


def _record(queue: Queue, root: Path, copy: Path) -> None:
    """Write down what brings `root` to `copy`, on the disk before this returns; changes no file of the packages. Raises Refused."""
    folder = _journal(queue, root)
    entries: list[list[str | None]] = []
    with writing(root, hint="nothing was patched"):
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for path in sorted({*queue.files(root), *queue.files(copy)}):
                was, becomes = digest(root / path), digest(copy / path)
                if was == becomes:
                    continue
                if becomes:
                    write_whole(folder / str(len(entries)), (copy / path).read_bytes(), kept=True)
                entries.append([str(path), was, becomes])
            write_whole(folder / LIST, json.dumps(entries), kept=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def cut_off(queue: Queue, root: Path) -> bool:
    """Whether an `apply` was begun here and not finished, and nobody has touched its files since."""
    return bool(_entries(queue, root))


def _entries(queue: Queue, root: Path) -> list[tuple[str, str | None, str | None]]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = [(path, was, becomes) for path, was, becomes in json.loads((_journal(queue, root) / LIST).read_bytes())]
        if all(digest(root / path) in (was, becomes) for path, was, becomes in found):
            return found
    return []


def _finish(queue: Queue, root: Path) -> None:
    """Do what the journal says, as far as it is not done. A new file takes the old one's place: installers link files to a shared
    cache. Raises Refused.
    """
    with writing(root, hint=FINISH.format(project=queue.project)):
        for number, (path, _, becomes) in enumerate(_entries(queue, root)):
            if becomes is None:
                (root / path).unlink(missing_ok=True)
            elif digest(root / path) != becomes:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(_journal(queue, root) / str(number), root / path)
        shutil.rmtree(_journal(queue, root))


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One `apply` at a time; waits for another."""
    at = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(at, fcntl.LOCK_EX)
        yield
    finally:
        os.close(at)


def _git(where: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, timeout=120, env=_clean())
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Refused(f"git cannot be run: {err}", hint="install git") from None
    if done.returncode:
        said = "\n".join(l for l in (done.stdout + done.stderr).splitlines() if l.strip() and not l.startswith("hint:"))
        raise Refused(f"`git {next(w for w in words if w in GIT_VERBS)}` failed:\n{said}")
    return done.stdout


GIT_VERBS = ("init", "config", "add", "commit", "tag", "am", "format-patch", "worktree", "status", "ls-files")


def _clean() -> dict[str, str]:
    """The environment without what would point git elsewhere."""
    return {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
