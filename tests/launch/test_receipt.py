"""What a receipt, a folder of receipts and a signature can and cannot be talked into."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_run import Launcher

from launch.record import compare, outcome, receipt, receipts, signature, status
from launch.record.redact import Redactor
from nam_megatron import events
from nam_megatron.errors import Refused

BESIDE = (receipt.LOG, receipt.PLAN, receipt.DIFF, receipt.KERNELS)


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "receipts"


def opened(root: Path, preset: str = "x", **content) -> receipt.Receipt:
    return receipt.open_receipt(root, preset, content, Redactor({}))


def run(root: Path, preset: str = "x", log: str = "a log\n") -> Path:
    """A sealed run with all that may lie beside a receipt."""
    made = opened(root, preset)
    (made.folder / receipt.LOG).write_text(log)
    for name in BESIDE[1:]:
        (made.folder / name).write_text("{}")
    for name in ("nccl.node-of-mine.1", "core.node-of-mine.2"):
        (made.folder / name).write_text("NCCL version 2.27.5")
    made.seal("completed", {"figures": {"loss": 1.0}})
    assert "node-of-mine" not in (made.folder / receipt.FILE).read_text()
    return made.folder


@pytest.mark.parametrize(
    ("number", "hints"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EDQUOT, "make room there"),
        (errno.EFBIG, "raise `ulimit -f`"),
        (errno.EACCES, "name a folder you may write to: `cluster.storage.receipts=DIR`"),
    ],
)
def test_what_cannot_be_written_is_said_with_what_helps(tmp_path, number, hints):
    with pytest.raises(Refused) as refused, receipt.writing(tmp_path):
        raise OSError(number, os.strerror(number))
    (problem,) = refused.value.problems
    assert problem.message == f"cannot write to `{tmp_path}`: {os.strerror(number)}" and problem.hint == hints


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "done"},
        {"state": None},
        {"run": 7},
        {"job": {"world": 4 * 10**9}},
        {"lineage": {"regime": [1]}},
        {"host": {"gpus": "two"}},
        {"outcome": {"end": "completed", "figures": True}},
        {"outcome": {"end": "won"}},
    ],
)
def test_a_receipt_of_no_state_or_run_is_damaged_however_it_is_sealed(root, changes):
    folder = run(root)
    rehashed(folder, **changes)
    with pytest.raises(Refused, match="is a damaged receipt"):
        receipt.read(folder)


def edit(folder: Path, **changes) -> None:
    file = folder / receipt.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rehashed(folder: Path, **changes) -> None:
    """What somebody does who has read receipt.py."""
    edit(folder, **changes)
    edit(folder, seal=receipt.digest(json.loads((folder / receipt.FILE).read_text())))


def listed(root: Path, capsys, **options: str) -> tuple[int, str]:
    code = receipts.command([str(root)], options)
    return code, capsys.readouterr().out


def change(folder: Path, name: str) -> None:
    (folder / name).write_text("replaced")


def twice(folder: Path, _: Path) -> None:
    file = folder / receipt.FILE
    file.write_text(file.read_text().replace("{", '{"state": "open",', 1))


def swapped(a: Path, b: Path) -> None:
    one, two = (f / receipt.FILE for f in (a, b))
    text = one.read_text()
    one.write_text(two.read_text())
    two.write_text(text)


ATTACKS = {
    "edited": (lambda a, b: edit(a, opened="1999"), "was changed after it was sealed"),
    "swapped": (swapped, "is the receipt of"),
    "copied": (lambda a, b: shutil.copytree(a, a.with_name("20200101T000000Z-x-000000")), "is the receipt of"),
    **{f"{name} replaced": (lambda a, b, name=name: change(a, name), f"`{name}` of") for name in BESIDE},
    "key twice": (twice, "a key stands in it twice"),
    "first removed": (lambda a, b: shutil.rmtree(a), "receipt 1 of 3 not here (removed, or damaged)"),
    "last removed": (lambda a, b: shutil.rmtree(sorted(a.parent.glob("*-z-*"))[0]), "receipt 3 of 3 not here"),
    "edited, hashed anew": (lambda a, b: rehashed(a, words=["other"]), "does not follow"),
    "last edited, hashed anew": (
        lambda a, b: rehashed(sorted(a.parent.glob("*-z-*"))[0], words=["other"]), "is not the receipt that was sealed last",
    ),
    "taken out of the chain": (lambda a, b: rehashed(b, chain=None), "has no place in a chain"),
    "a pipe": (lambda a, b: ((a / receipt.FILE).unlink(), os.mkfifo(a / receipt.FILE)), "is a pipe, and no file"),
    "log behind a pipe": (lambda a, b: (change(a, receipt.LOG), (a / receipt.LOG).unlink(), os.mkfifo(a / receipt.LOG)), "`log.txt` of"),
    "a device among its files": (lambda a, b: rehashed(a, files={"/dev/zero": "0" * 64}), "`/dev/zero` of"),
    "another's log among its files": (
        lambda a, b: rehashed(a, files={f"../{b.name}/{receipt.LOG}": receipt.file_hash(b / receipt.LOG)}), f"/{receipt.LOG}` of",
    ),
    "log of a device": (lambda a, b: ((a / receipt.LOG).unlink(), (a / receipt.LOG).symlink_to("/dev/zero")), "`log.txt` of"),
    "events laid beside it": (lambda a, b: change(a, "events.9.jsonl"), "`events.9.jsonl` of"),
    "a file of NCCL's laid beside it": (lambda a, b: change(a, "nccl.other.1"), "`nccl.*` of"),
    "the next one removed before it was sealed": (
        lambda a, b: (a.parent / receipt.CHAIN).write_text(
            json.dumps(json.loads((a.parent / receipt.CHAIN).read_text()) | {"pending": "gone"})
        ),
        "`gone` was about to be sealed, and is not here",
    ),
    "one place for two": (
        lambda a, b: rehashed(b, chain=receipt.read(a)["chain"]), "have one place in the chain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [receipt.CHAIN, f"{receipt.CHAIN}.lock"])
def test_a_pipe_in_the_place_of_a_folders_own_is_refused(root, name):
    root.mkdir(exist_ok=True)
    os.mkfifo(root / name)
    with pytest.raises(Refused, match="is a pipe"), receipt.own(root):
        pass


def passing(name: str) -> str:
    return f".{name}.{os.getpid()}.part"


def test_what_lies_under_a_passing_name_is_not_written_to(root, tmp_path):
    (precious := tmp_path / "precious").write_text("mine")
    root.mkdir(exist_ok=True)
    (root / passing(receipt.CHAIN)).symlink_to(precious)
    folder = run(root)
    os.mkfifo(folder / passing(receipt.FILE))
    receipt.write(folder, receipt.read(folder))
    assert precious.read_text() == "mine" and (folder / receipt.FILE).is_file()


def test_a_run_whose_folder_went_away_is_a_refusal(root):
    made = opened(root)
    shutil.rmtree(made.folder)
    with pytest.raises(Refused, match="cannot write to"):
        made.seal("completed", {})
    assert receipt.seal_lost(root, outcome.of_run) == []


def test_a_lost_run_whose_log_is_a_pipe_is_sealed(root):
    made = opened(root)
    os.mkfifo(made.folder / receipt.LOG)
    os.close(made._lock)
    assert receipt.seal_lost(root, outcome.of_run) == [made.content["run"]]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_folder_of_receipts_that_was_touched_is_a_finding(root, capsys, attack):
    folders = [run(root, name) for name in "xyz"]
    assert listed(root, capsys)[0] == 0
    do, said = ATTACKS[attack]
    do(*folders[:2])
    code, out = listed(root, capsys)
    assert code == 1 and said in out and "DAMAGED" in out


def test_receipts_from_another_folder_are_read_without_its_chain(root, tmp_path, capsys):
    """A few runs of a borrowed host come home: what is not among them is noted, not damage; what is out of order is."""
    first, second, third = (run(root, name) for name in "xyz")
    home = tmp_path / "home"
    home.mkdir()
    for folder in (first, third):
        shutil.copytree(folder, home / folder.name)
        (home / folder.name / receipt.LOG).unlink()  # published without it
    code, out = listed(home, capsys)
    assert code == 1 and "MISSING: receipt 2 of 3 not here (chain" in out
    code, out = listed(home, capsys, gaps="allowed")
    assert code == 0 and "note: receipt 2 of 3 not here (chain" in out
    shutil.copytree(second, home / second.name)
    rehashed(home / second.name, words=["other"])
    code, out = listed(home, capsys)
    assert code == 1 and "does not follow" in out


def test_a_chains_first_receipt_follows_none(root, capsys):
    """All that came after it hashed anew: nothing else shows that it began elsewhere."""
    before = "0" * 64
    for folder in [run(root, name) for name in "xyz"]:
        rehashed(folder, chain=receipt.read(folder)["chain"] | {"before": before})
        before = receipt.read(folder)["seal"]
    chain = root / receipt.CHAIN
    chain.write_text(json.dumps(json.loads(chain.read_text()) | {"last": before}))
    code, out = listed(root, capsys)
    assert code == 1 and out.count("DAMAGED") == 1 and "does not follow `nothing`" in out


def test_receipts_are_chosen_by_the_whole_name_of_a_preset(root, capsys):
    for name in ("mine", "mine-too"):
        assert f"-{name}-" in listed(run(root, name).parent, capsys, preset=name)[1]
    assert listed(root, capsys, preset="mine")[1].count("\n") == 1


def test_without_a_chain_nobody_knows_of_later_receipts(root, keys, capsys):
    """`rm -r NEWEST; rm .chain` was whole, and `touch .published` made a gap a note to who asks for signatures, too."""
    key, signers = keys
    first, second, third = (run(root, name) for name in "xyz")
    for folder in (first, third):
        signature.sign(folder, str(key))
    for gone in (third, root / receipt.CHAIN):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    code, out = listed(root, capsys)
    assert code == 1 and out.count("MISSING") == 1 and "whether later receipts were, cannot be told" in out
    shutil.rmtree(second)
    (root / receipts.PUBLISHED).touch()
    code, out = listed(root, capsys)
    assert code == 0 and "note: `.chain` is not here" in out
    code, out = listed(root, capsys, signers=str(signers))
    assert code == 1 and "MISSING: `.chain` is not here" in out


def test_a_chain_that_its_owner_keeps_is_a_finding_and_no_refusal(root, capsys, monkeypatch):
    """It has mode 0600, and a colleague wants the list all the same."""
    run(root)
    read = Path.read_text

    def barred(path: Path, *words, **more) -> str:
        if path.name == receipt.CHAIN:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path, *words, **more)

    monkeypatch.setattr(Path, "read_text", barred)
    code, out = listed(root, capsys)
    assert code == 1 and "MISSING: `.chain` may not be read by this user" in out
    assert listed(root, capsys, gaps="allowed")[0] == 0


def test_the_newest_seal_is_the_chains_though_a_clock_went_back(root, capsys, monkeypatch):
    run(root)
    monkeypatch.setattr(receipt, "datetime", SimpleNamespace(now=lambda zone: datetime(2020, 1, 1, tzinfo=zone)))
    seal = receipt.read(run(root, "y"))["seal"]
    assert receipts.command([str(root)], {}) == 0
    assert f"the newest seal is {seal[:12]}:" in capsys.readouterr().err


@pytest.mark.parametrize("later", [False, True])
def test_a_removed_receipt_is_missed_without_the_chain_too(root, capsys, later):
    """`rm -r RUN; rm .chain` made a note of it, with 0."""
    first, second, _ = (run(root, name) for name in "xyz")
    shutil.rmtree(second)
    (root / receipt.CHAIN).unlink()
    if later:
        run(root, "later")  # it begins a new chain, as if the others were another folder's
    code, out = listed(root, capsys)
    assert code == 1 and "MISSING: receipt 2 of 3 not here" in out, first


def test_a_chain_that_was_rolled_back_is_shown_by_a_seal_that_was_kept(root, capsys):
    run(root)
    before = (root / receipt.CHAIN).read_text()
    last = run(root, "y")
    seal = receipt.read(last)["seal"]
    receipts.command([str(root)], {})
    assert f"the newest seal is {seal[:12]}:" in capsys.readouterr().err
    assert listed(root, capsys, head=seal[:12])[0] == 0
    shutil.rmtree(last)
    (root / receipt.CHAIN).write_text(before)
    assert listed(root, capsys)[0] == 0, "which nothing in the folder can show"
    code, out = listed(root, capsys, head=seal[:12])
    assert code == 1 and f"MISSING: no receipt here has the seal `{seal[:12]}`" in out
    other = receipt.read(next(root.glob("*-x-*")))["seal"]
    assert listed(root, capsys, head=other[:12])[0] == 0 and listed(root, capsys, head=other[1:])[0] == 1
    with pytest.raises(Refused, match="`head` is 12 digits"):
        receipts.command([str(root)], {"head": ""})


def test_a_run_that_may_not_be_looked_into_is_one_all_the_same(root, capsys, monkeypatch):
    """Left out, a run that goes on was none: `no run`, with exit code 0."""
    folder, exists = run(root), Path.exists

    def barred(path: Path) -> bool:
        if folder in (path, *path.parents):
            raise PermissionError(errno.EACCES, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", barred)
    assert receipt.folders(root) == [folder]
    assert status.command([str(root)], {}) == 1 and "cannot be looked at: Permission denied" in capsys.readouterr().out
    monkeypatch.setattr(os, "scandir", lambda _: barred(folder / "x"))
    with pytest.raises(Refused, match="cannot be looked into: Permission denied"):
        receipt.folders(root)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: barred(folder / "x"))
    with pytest.raises(Refused, match="may not be read"):  # no reason to move it away
        receipt.kept_of(root)


def test_a_foreign_receipt_moves_no_cursor(root, capsys):
    folder = run(root)
    rehashed(folder, lineage={"host": "a\x1b[2J\nDAMAGED: b", "family": "f", "regime": "r"})
    receipts.command([str(root)], {})
    folder.rename(root / f"a\x1b[2J{folder.name}")
    status.command([str(root)], {"format": "prometheus"})
    out = capsys.readouterr().out
    assert "\x1b" not in out and not any(line.startswith("DAMAGED: b") for line in out.splitlines())


@pytest.mark.parametrize(
    ("number", "said"),
    [(str(10**400), "a number of 401 digits"), ("NaN", "`NaN`"), ("-Infinity", "`-Infinity`"), ("1e999", "`1e999`")],
)
def test_what_is_no_number_or_too_long_is_no_figure(root, number, said):
    file = run(root) / receipt.FILE
    file.write_text(file.read_text().replace('"loss": 1.0', f'"loss": {number}'))
    with pytest.raises(Refused, match=f"{said} stands in it"):
        receipt.read(file)


def test_an_open_receipt_that_was_edited_is_not_sealed_with_what_it_says(root, capsys):
    made = opened(root, job={"tokens_per_step": 1})
    os.close(made._lock)
    edit(made.folder, job={"tokens_per_step": 10**9})
    assert receipt.seal_lost(root, outcome.of_run) == []
    code, out = listed(root, capsys)
    assert code == 1 and "was changed" in out


@pytest.mark.parametrize("refused", [errno.EACCES, errno.EROFS])
def test_who_may_only_read_sees_whether_a_launcher_lives(root, capsys, monkeypatch, refused):
    """Another user's, or a folder that is mounted for reading: a run that was killed went on for ever."""
    live, lost = opened(root), opened(root)
    os.close(lost._lock)
    opens, locks = os.open, fcntl.flock

    def reading(path: object, flags: int, *more: int, **named: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(refused, os.strerror(refused), str(path))
        return opens(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", reading)
    assert [receipt.held(made.folder, made.content) for made in (live, lost)] == [True, False]
    code, out = listed(root, capsys)
    assert code == 1 and out.count("its launcher is gone, and it cannot be sealed") == 1

    def without_locks(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert [receipt.held(made.folder, made.content) for made in (live, lost)] == [None, None]
    monkeypatch.setattr(fcntl, "flock", locks)
    os.close(live._lock)


def test_what_came_of_a_lost_run_is_redacted_as_of_any_other(root, monkeypatch):
    made = opened(root)
    os.close(made._lock)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    assert receipt.seal_lost(root, lambda *_: {"reason": "no access with 0123456789abcdef0123"})
    assert "no access" in (text := (made.folder / receipt.FILE).read_text()) and "0123456789abcdef0123" not in text


@pytest.mark.parametrize("how", ["vanished", "replaced"])
def test_a_live_run_whose_lock_is_gone_is_not_sealed(root, capsys, how):
    made = opened(root)
    (made.folder / receipt.LOCK).rename(root / "kept")
    if how == "replaced":
        (made.folder / receipt.LOCK).touch()
    code, out = listed(root, capsys)
    assert code == 1 and "its lock is gone, another's or not to be asked" in out
    assert receipt.read(made.folder)["state"] == "open"
    made.seal("completed", {})
    assert receipt.read(made.folder)["outcome"]["end"] == "completed"


def test_a_lost_run_whose_ranks_go_on_is_not_sealed_yet(root, capsys):
    """A rank finishes its step and says its end: a seal from before that would not fit what lies beside it."""
    made, rank = opened(root, nonce="n"), events.Record()
    rank.open(made.folder, "n", 0, 1)
    os.close(made._lock)
    assert receipt.seal_lost(root, outcome.of_run) == [] and listed(root, capsys)[0] == 0
    assert receipt.held(made.folder, receipt.read(made.folder))
    rank.end("error", 1)
    rank.close()
    assert receipt.seal_lost(root, outcome.of_run) == [made.content["run"]]
    assert receipt.read(made.folder)["outcome"]["end"] == "lost"


def test_a_seal_is_never_written_over(root):
    made = opened(root)
    with receipt.link(root, made.content["run"]) as chain:
        sealed = receipt.sealed(receipt.read(made.folder) | {"chain": chain}, "lost", {})
        receipt.write(made.folder, sealed)
    for again in (lambda: made.record(more=1), lambda: made.seal("completed", {})):
        with pytest.raises(Refused, match="was changed by somebody else during the run"):
            again()
    assert receipt.read(made.folder) == sealed
    (made.folder / receipt.FILE).unlink()
    os.mkfifo(made.folder / receipt.FILE)  # whoever waits for its writer never ends
    with pytest.raises(Refused, match="is a pipe"):
        made.seal("completed", {})


def test_a_kill_between_the_seal_and_the_link_breaks_no_chain(root, capsys):
    run(root)
    kept = (root / receipt.CHAIN).read_text()
    second = run(root, "y")
    pending = json.loads(kept) | {"pending": second.name}
    (root / receipt.CHAIN).write_text(kept)  # nothing was begun: the second one is somebody else's
    code, out = listed(root, capsys)
    assert code == 1 and "were not sealed here" in out
    (root / receipt.CHAIN).write_text(json.dumps(pending))
    assert listed(root, capsys)[0] == 0
    run(root, "z")
    assert listed(root, capsys)[0] == 0


def test_a_kill_before_the_seal_misses_no_receipt(root, capsys):
    run(root)
    made = opened(root)
    begun = json.loads((root / receipt.CHAIN).read_text()) | {"pending": made.content["run"]}
    (root / receipt.CHAIN).write_text(json.dumps(begun))
    assert listed(root, capsys)[0] == 0


def test_what_is_about_to_be_sealed_is_on_disk_before(root):
    """Whoever is killed in between leaves a chain that knows of it."""
    made = opened(root)
    with receipt.link(root, made.content["run"]):
        assert receipt.kept_of(root)["pending"] == made.content["run"]


KEPT = {"id": "a", "salt": "b", "number": 3, "last": "c", "pending": None}


@pytest.mark.parametrize(
    "kept",
    [None, 3, [], {}, *({k: v for k, v in KEPT.items() if k != key} for key in KEPT)]
    + [KEPT | {key: other} for key, other in (("id", 1), ("salt", None), ("number", "3"), ("last", 1), ("pending", 1))],
)
def test_a_damaged_chain_is_refused(root, kept):
    """Nothing is sealed into it, and nothing is found whole by it."""
    root.mkdir()
    (root / receipt.CHAIN).write_text(json.dumps(KEPT))
    assert receipt.kept_of(root) == KEPT
    (root / receipt.CHAIN).write_text(json.dumps(kept))
    for use in (
        lambda: receipt.kept_of(root),
        lambda: list(receipt.broken(root, [])),
        lambda: receipt.own(root).__enter__(),
    ):
        with pytest.raises(Refused, match="is damaged"):
            use()
    (root / receipt.CHAIN).write_text("{")
    with pytest.raises(Refused, match="cannot be read"):
        receipt.kept_of(root)


def test_a_sealed_receipt_is_of_one_piece(root):
    """Whatever of it is changed, taken away or added, it is no receipt any more."""
    folder = run(root)
    whole = receipt.read(folder)
    assert whole["files"].keys() == {*BESIDE, receipt.NCCL}
    for key in (*whole, "new"):
        for value in ("other", None, ...):
            made = {k: v for k, v in whole.items() if k != key} | ({} if value is ... else {key: value})
            if made != whole:
                (folder / receipt.FILE).write_text(json.dumps(made))
                with pytest.raises(Refused):
                    receipt.read(folder)
    (folder / receipt.FILE).write_text(json.dumps(dict(reversed(whole.items())), indent=7))
    assert receipt.read(folder) == whole  # how it is laid out says nothing


def test_what_counts_is_on_the_disk_before_it_does(root, monkeypatch):
    """A receipt and a chain's head: the whole file, then its name, then the folder."""
    folder, order, replace = run(root), [], os.replace

    def synced(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        order.append((path.name, "a folder" if path.is_dir() else json.loads(path.read_text())))

    def replaced(old: Path, new: Path) -> None:
        order.append((old.name, new.name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    receipt.write(folder, {"a": 1})
    receipt._keep(root, {"b": 2})
    assert order == [
        (passing(receipt.FILE), {"a": 1}), (passing(receipt.FILE), receipt.FILE), (folder.name, "a folder"),
        (passing(".chain"), {"b": 2}), (passing(".chain"), ".chain"), (root.name, "a folder"),
    ]  # fmt: skip
    assert (folder / receipt.FILE).read_text() == '{\n "a": 1\n}\n'
    assert oct((root / receipt.CHAIN).stat().st_mode) == "0o100600"
    order.clear()
    opened(root)
    assert (root.name, "a folder") == order[-1]
    with pytest.raises(ValueError, match="Out of range"):
        receipt.write(folder, {"a": float("nan")})


def test_no_lock_stays_open_in_the_launcher(root):
    """Else it would hold for a live run what is lost, until the launcher itself ends."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    live, lost = opened(root), opened(root)
    assert descriptors() == before + 2
    os.close(lost._lock)
    assert [receipt.held(made.folder, made.content) for made in (live, lost)] == [True, False]
    assert receipt.held(live.folder, live.content | {"lock": 1}) is None
    assert receipt.seal_lost(root, outcome.of_run) == [lost.content["run"]]
    with pytest.raises(Refused, match="was changed"):
        edit(live.folder, opened="1999")
        live.record(words=["x"])
    os.close(live._lock)
    run(root)
    assert descriptors() == before


def test_the_ways_a_run_can_end(root):
    for end in ("completed", "failed", "refused", "interrupted", "lost"):
        assert receipt.sealed({}, end, {"x": 1})["outcome"] == {"x": 1, "end": end}
    with pytest.raises(AssertionError):
        receipt.sealed({}, "over", {})


def test_a_preset_is_no_path(root):
    with pytest.raises(Refused, match="cannot be part of a folder's name"):
        opened(root, "../../elsewhere")
    assert not root.exists()


@pytest.mark.parametrize(
    "chain", [None, 3, {}, {"number": None}, {"number": True}, {"number": 1.0}, {"number": 0}, {"number": -1}]
)
def test_a_place_in_a_chain_is_a_number_from_one(chain):
    assert receipt.place({"chain": chain}) is None and receipt.place({}) is None
    assert receipt.place({"chain": {"id": "a", "number": 1}}) == ("a", 1)


def test_a_receipt_that_cannot_be_written_leaves_no_folder(root, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Refused, match="cannot write to"):
        opened(root)
    assert list(root.iterdir()) == []


def test_a_kill_before_the_first_receipt_leaves_nothing(root):
    left = root / f"{receipt.OPENING}20200101T000000Z-x-000000"
    left.mkdir(parents=True)
    (left / receipt.LOCK).touch()
    (left / receipt.RESERVE).write_bytes(bytes(1 << 20))
    assert receipt.seal_lost(root, outcome.of_run) == [] and not left.exists()


def test_two_launchers_may_tidy_up_at_once(root, monkeypatch):
    left = root / f"{receipt.OPENING}20200101T000000Z-x-000000"
    left.mkdir(parents=True)
    (left / receipt.LOCK).touch()
    close = os.close

    def closed(file: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(left)  # the other one was faster
        close(file)

    monkeypatch.setattr(os, "close", closed)
    assert receipt.seal_lost(root, outcome.of_run) == [] and not left.exists()


def test_receipts_of_version_1_are_read_as_far_as_their_hash_goes(capsys):
    found = [receipt.read(f) for f in receipt.folders(receipts.RECEIPTS)]
    older = [r for r in found if r["schema"] == receipt.FIRST]
    assert len(older) > 1
    assert receipts.standing(receipts.RECEIPTS / older[0]["run"], older[0], None) == (receipts.OLD, False)
    with pytest.raises(Refused, match="no host is recorded in"):
        compare.table(older[:2])


@pytest.fixture
def keys(tmp_path) -> tuple[Path, Path]:
    """(a private key, a file of allowed signers with it)"""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me", "-f", str(key)], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"me@example.org {key.with_suffix('.pub').read_text()}")
    return key, signers


def test_a_signature_proves_what_a_hash_cannot(root, keys, capsys):
    key, signers = keys
    folder = run(root)
    assert listed(root, capsys, signers=str(signers))[0] == 1  # nobody signed it
    os.mkfifo(folder / receipt.SIGNATURE)
    assert listed(root, capsys, signers=str(signers))[0] == 1
    signature.sign(folder, str(key))
    code, out = listed(root, capsys, signers=str(signers))
    assert code == 0 and "signed by me@example.org" in out
    rehashed(folder, words=["other"])  # by somebody without the key, who writes the chain's head anew, too
    kept = json.loads((root / receipt.CHAIN).read_text()) | {"last": receipt.read(folder)["seal"]}
    (root / receipt.CHAIN).write_text(json.dumps(kept))
    assert listed(root, capsys)[0] == 0
    code, out = listed(root, capsys, signers=str(signers))
    assert code == 1 and "UNSIGNED" in out
    signature.sign(folder, str(key))  # anew, over what is sealed now
    assert listed(root, capsys, signers=str(signers))[0] == 0


def test_a_run_is_signed_as_it_is_sealed(root, keys, capsys):
    key, signers = keys
    launcher = Launcher.start(root, "steps=5", f"sign={key}")
    assert launcher.wait() == 0, launcher.err
    code, out = listed(root, capsys, signers=str(signers))
    assert code == 0 and "signed by me@example.org" in out
    assert str(key) not in (receipt.folders(root)[0] / receipt.FILE).read_text()


def test_who_signed_cannot_be_asked_without_a_list_or_a_tool(root, keys, monkeypatch):
    assert signature.key_objections(None) is None and signature.key_objections(str(keys[0])) is None
    with pytest.raises(Refused, match="no file of allowed signers") as refused:
        signature.signer(run(root), root / "nobody")
    assert [(p.key, p.hint) for p in refused.value.problems] == [("signers", "see ALLOWED SIGNERS in ssh-keygen(1)")]
    slow = root / "bin" / "ssh-keygen"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec /bin/sleep 9\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(signature, "SECONDS", 0.1)
    with pytest.raises(Refused, match=r"cannot be run: .* timed out"):
        signature.signer(run(root), keys[1])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Refused, match=r"`ssh-keygen -Y find-principals` cannot be run") as refused:
        signature.signer(run(root), keys[1])
    assert [(p.key, p.hint) for p in refused.value.problems] == [(None, "OpenSSH 8.2 or newer")]


def test_a_key_that_cannot_sign_is_refused(root, tmp_path):
    folder = run(root)
    (tmp_path / "no-key").write_text("x")
    with pytest.raises(Refused, match="is sealed and not signed"):
        signature.sign(folder, str(tmp_path / "no-key"))
    assert signature.key_objections(str(tmp_path / "nowhere")).key == "sign"


def test_events_on_a_disk_that_failed_when_the_run_was_sealed_are_no_change(root, monkeypatch):
    made, hashed = opened(root), receipt.file_hash
    change(made.folder, "events.0.jsonl")
    monkeypatch.setattr(receipt, "file_hash", lambda path: None if path.name.startswith("events") else hashed(path))
    made.seal("completed", {"figures": {"loss": 1.0}})
    monkeypatch.undo()
    assert receipt.read(made.folder)["files"]["events.0.jsonl"] == receipt.UNREAD
