"""patches/ onto a real, pristine Megatron."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.host import patch, patches
from launch.words import parse
from nam_megatron.errors import Refused
from nam_megatron.targets import current
from nam_megatron.words.tree import tree_hash

REPO = Path(__file__).parents[2]
FUSED = "megatron/core/fusions/fused_mla_yarn_rope_apply.py"


def git(where: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "core.autocrlf=false")
    return subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True, text=True).stdout.strip()


def test_every_queue_is_whole_and_megatrons_is_for_the_pin():
    assert [p for q in patches.queues() for p in patches.objections(q)] == []
    assert [q.version for q in patches.queues() if q.project == "megatron-core"] == [current().pin]


def test_each_trailers_test_exists():
    for queue in patches.queues():
        for name in queue.series:
            assert (REPO / patches.trailers((queue.folder / name).read_text())["Test"]).is_file()


def test_apply_is_proven_by_gits_own_hash(queue, unpacked):
    linked = unpacked.parent / "an installer's cache"
    os.link(unpacked / FUSED, linked)
    before = linked.read_text()
    assert queue.state(unpacked) == "pristine"
    assert "1 patch applied" in patch.apply(queue, unpacked)
    assert queue.state(unpacked) == "patched" and not (unpacked / ".git").exists()
    assert linked.read_text() == before != (unpacked / FUSED).read_text()
    assert patch.apply(queue, unpacked) == f"{queue.name}: patched already"
    git(unpacked, "init", "--quiet")
    git(unpacked, "add", "--force", "*.py")
    assert git(unpacked, "write-tree") == queue.after


def test_a_queue_that_the_disk_does_not_give_is_refused(queue, monkeypatch):
    def failing(*_: object, **__: object) -> str:  # a read that fails names no file
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(Refused, match=f"I/O error: `{queue.folder.name}`"):
        patches.read(queue.folder)


@pytest.fixture
def large(tmp_path) -> tuple[patches.Queue, Path]:
    """A queue that changes six files, adds two and takes one away; and a pristine tree."""
    repo, pristine, folder = tmp_path / "repo", tmp_path / "pristine", tmp_path / "queue" / "thing" / "1.0"
    (repo / "thing" / "inner").mkdir(parents=True)
    folder.mkdir(parents=True)
    for name in "abcdefgh":
        (repo / "thing" / f"{name}.py").write_text(f"{name} = 1\n" * 50)
    git(repo, "init", "--quiet")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "one")
    git(repo, "tag", "pristine")
    shutil.copytree(repo / "thing", pristine / "thing")
    for name in "abcdef":
        (repo / "thing" / f"{name}.py").write_text(f"{name} = 2\n" * 50)
    (repo / "thing" / "g.py").unlink()
    (repo / "thing" / "new.py").write_text("new = 1\n")
    (repo / "thing" / "inner" / "newer.py").write_text("newer = 1\n")
    git(repo, "add", "--all")
    git(repo, "commit", "-qm", "Change much\n\nReason: r\nUpstream: none\nDrop-when: never\nTest: t")
    (folder / "series").touch()
    blank = patches.Queue(folder, "thing", "1.0", ("thing",), "thing==1.0", tree_hash(pristine, "thing"), "", ())
    patch.export(blank, repo)
    return patches.read(folder), pristine


CALLS = ("os.replace", "os.unlink", "os.mkdir", "os.fsync", "os.rmdir")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_tree_that_the_next_apply_finishes(large, tmp_path):
    """At every fifth of the moments before and after a call that changes the disk. Before, 6 of 6 kills left a foreign tree."""
    queue, pristine = large
    states, killed = [], 0
    for moment in range(0, 1000, 5):
        root = tmp_path / f"root{moment}"
        shutil.copytree(pristine, root)
        child = os.fork()
        if not child:
            _kill_at(moment)
            patch.apply(queue, root)
            os._exit(0)
        _, how = os.waitpid(child, 0)
        if not os.WIFSIGNALED(how):
            assert os.waitstatus_to_exitcode(how) == 0
            break
        killed += 1
        states.append(queue.state(root))
        assert states[-1] != "foreign" or patch.cut_off(queue, root)
        patch.apply(queue, root)
        assert queue.state(root) == "patched" and not list(root.glob(".nam_megatron*"))
        shutil.rmtree(root)
    assert killed > 12 and set(states) == {"pristine", "foreign", "patched"}


def _kill_at(moment: int) -> None:
    """From here on this process ends itself at the `moment`th edge of the calls that change the tree; not those of git's folder."""
    passed = iter(range(10**6))

    def around(call):
        def killing(*words, **named):
            here = not any("patch_" in str(w) and "/.nam_megatron" not in str(w) for w in words)
            if here and next(passed) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            made = call(*words, **named)
            if here and next(passed) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        return killing

    for name in CALLS:
        setattr(os, name.removeprefix("os."), around(getattr(os, name.removeprefix("os."))))


def test_a_full_disk_leaves_what_was_there(large, monkeypatch):
    queue, root = large
    write = patch.write_whole
    for full in ("0", "7", "journal.json"):

        def filled(path, data, full=full, **more):
            if path.name == full:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, data, **more)

        monkeypatch.setattr(patch, "write_whole", filled)
        with pytest.raises(Refused, match="No space left on device"):
            patch.apply(queue, root)
        assert queue.state(root) == "pristine" and not list(root.glob(".nam_megatron*"))


def test_a_journal_of_files_that_were_installed_again_is_forgotten(large):
    queue, root = large
    copy = root.parent / "copy"
    shutil.copytree(root, copy)
    (copy / "thing" / "a.py").write_text("other\n")
    patch._record(queue, root, copy)
    assert patch.cut_off(queue, root)
    (root / "thing" / "a.py").write_text("reinstalled\n")
    assert not patch.cut_off(queue, root)
    shutil.copytree(copy / "thing", root / "thing", dirs_exist_ok=True)
    (root / "thing" / "a.py").write_text("a = 1\n" * 50)
    patch._record(queue, root, copy)
    (patch._journal(queue, root) / "journal.json").write_text("[1]")
    patch.apply(queue, root)
    assert queue.state(root) == "patched"


def test_a_changed_file_is_not_patched(queue, unpacked):
    (unpacked / FUSED).write_text((unpacked / FUSED).read_text() + "\n# mine\n")
    with pytest.raises(Refused, match=r"holds no pristine megatron-core 0\.19\.2"):
        patch.apply(queue, unpacked)


def test_what_others_install_beside_it_is_not_the_projects(queue, unpacked):
    """Megatron-Bridge and megatron-energon live in the namespace `megatron`, too."""
    (unpacked / "megatron/bridge").mkdir()
    (unpacked / "megatron/bridge/__init__.py").write_text("x = 1\n")
    assert queue.state(unpacked) == "pristine"
    (unpacked / "megatron/core/mine.py").write_text("x = 1\n")
    assert queue.state(unpacked) == "foreign"


def test_the_installed_one_is_found_where_others_share_its_namespace(queue, tmp_path, monkeypatch):
    (tmp_path / "megatron/bridge").mkdir(parents=True)
    there = patches.installed(queue)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert patches.installed(queue) == there


@pytest.mark.slow
def test_a_patch_that_does_not_fit_shows_gits_words_and_changes_nothing(queue, unpacked):
    (unpacked / FUSED).write_text((unpacked / FUSED).read_text().replace("mask = x_off", "mask  = x_off"))
    moved = tree_hash(unpacked, "megatron")
    with pytest.raises(Refused, match=r"(?s)`git am` failed:.*fused_mla_yarn_rope_apply\.py.*does not apply"):
        patch.apply(replace(queue, before=moved), unpacked)
    assert tree_hash(unpacked, "megatron") == moved


@pytest.mark.slow
def test_a_series_with_another_result_is_refused(queue, unpacked):
    with pytest.raises(Refused, match="toml says 0000"):
        patch.apply(replace(queue, after="0000"), unpacked)
    assert queue.state(unpacked) == "pristine"


@pytest.mark.slow
def test_export_gives_back_what_was_applied_and_what_was_added(queue, unpacked, tmp_path):
    patch.apply(queue, unpacked, commits=True)
    mine = replace(queue, folder=tmp_path / "megatron-core" / "0.19.2")
    mine.folder.mkdir(parents=True)
    patch.export(mine, unpacked)
    again = patches.read(mine.folder)
    assert (again.series, again.before, again.after) == (queue.series, queue.before, queue.after)
    (unpacked / "megatron/core/new.py").write_text("x = 1\n")
    git(unpacked, "add", "megatron/core/new.py")
    git(unpacked, "commit", "-qm", "Add x\n\nNo trailers.")
    with pytest.raises(Refused, match="lacks `Reason`, `Upstream`, `Drop-when` and `Test`"):
        patch.export(mine, unpacked)
    git(unpacked, "commit", "-q", "--amend", "-m", "Add x\n\nReason: r\nUpstream: none\nDrop-when: never\nTest: t")
    patch.export(mine, unpacked)
    assert (
        len(patches.read(mine.folder).series) == 2
        and tree_hash(unpacked, "megatron") == patches.read(mine.folder).after
    )


def test_a_stray_patch_and_a_missing_one_are_named(queue, tmp_path):
    (tmp_path / "stray.patch").write_text("")
    found = [p.message for p in patches.objections(replace(queue, folder=tmp_path))]
    assert any("stray.patch` is in the folder and not in series" in m for m in found)
    assert any(m.endswith("is in series and not in the folder") for m in found)


@pytest.mark.parametrize("packages", ['"megatron/core"', "[]", "[1]"])
def test_a_pin_names_folders(queue, tmp_path, packages):
    shutil.copytree(queue.folder, tmp_path / "0.19.2")
    pin = tmp_path / "0.19.2" / "pin.toml"
    pin.write_text(re.sub(r"packages = .*", f"packages = {packages}", pin.read_text()))
    with pytest.raises(Refused, match="`packages` is no list of folders"):
        patches.read(pin.parent)


def test_one_queue_that_is_not_applied_is_a_finding_beside_others_that_are(large):
    queue, root = large
    patch.apply(queue, root)
    assert patch.verify([queue, queue], root) == 0
    other = replace(queue, after=queue.before)  # to which this tree is a foreign one
    assert patch.verify([queue, other], root) == patch.verify([other, queue], root) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("patch", "verify"), 1, "megatron-core 0.19.2: pristine"),
        (("patch", "verify"), 1, "hint: `python -m launch patch apply megatron-core` patches it"),
        (("patch", "--help"), 0, "python -m launch patch export PROJECT onto=DIR"),
        (("patch", "aply"), 2, "`patch` takes list, apply, verify or export"),
        (("patch", "list"), 0, "group_order: mend, both trainers, when before Megatron initialises"),
        (
            ("patch", "list"),
            0,
            "0001-Mask-heads-past-the-last-one-in-the-fused-MLA-RoPE-k: patch of megatron-core 0.19.2",
        ),
        (("patch", "list", "format=html"), 2, "`format` is text or markdown, not `html`"),
        (("patch", "list", "torch"), 2, "no patches for `torch`"),
        (("patch", "apply", "torch"), 2, "no patches for `torch`"),
        (("patch", "apply", "ont=x"), 2, "did you mean `onto`?"),
        (("patch", "verify", "onto=/nowhere"), 2, "`/nowhere` is no folder"),
        (("fly",), 2, "no verb `fly`"),
    ],
)
def test_the_command(words, code, said):
    done = subprocess.run([sys.executable, "-m", "launch", *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr and "Traceback" not in done.stderr


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}\.py", fullmatch=True),
        st.binary(max_size=20),
        min_size=1,
        max_size=8,
    )
)
def test_tree_hash_is_gits(tmp_path_factory, tree):
    root = tmp_path_factory.mktemp("t")
    for name, body in tree.items():
        path = root / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    git(root, "init", "--quiet")
    git(root, "add", "--force", ".")
    assert git(root, "write-tree") == tree_hash(root, "p")


@given(st.lists(st.text(max_size=20), max_size=5))
def test_any_words_are_parsed_or_refused(words):
    try:
        names, options = parse(words, ("onto", "anyway"))
    except Refused:
        return
    assert set(options) <= {"onto", "anyway"} and len(names) + len(options) <= len(words)
