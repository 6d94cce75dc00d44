"""One folder a run: the receipt, the plan, the log. The receipt is the record; it is written whole, or not at all.

    <receipts>/<run>/receipt.json   open from before the run until it is sealed; redacted, may be published
    <receipts>/<run>/plan.json events*.jsonl log.txt diff.patch nccl.*   what the run was given and said; not redacted but for secrets
    <receipts>/<run>/lock           held by the launcher as long as it lives: an open receipt that nobody holds is a lost run
    <receipts>/<run>/reserve        room kept back, given up to seal the receipt on a full disk
    <receipts>/.chain               the folder's own: its id, its salt, the last link; never published

A receipt carries the SHA-256 of its own content (`seal`), of the files beside it (`files`), and the seal of the one that was sealed
before it in its folder (`chain`). A hash without a key shows an accident, and a change by somebody who did not know of it. It proves
nothing against somebody who may write to the folder and computes it anew, for one receipt or for all; against that there are
signatures (`launch.record.signature`), made with a key that he does not have.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from launch.record.redact import Redactor
from nam_megatron import errors
from nam_megatron.errors import Refused, quoted, raise_if
from nam_megatron.recipe import at
from nam_megatron.words import whole
from nam_megatron.words.regular import irregular
from nam_megatron.words.taken import RECEIPT
from nam_megatron.words.whole import synced, write_whole

# Receipts of version 1 have a seal and nothing else: no hashes of files, no chain, no box.
SCHEMA, FIRST = "nam_megatron.receipt/2", "nam_megatron.receipt/1"
FILE, LOCK, RESERVE, LOG, PLAN, DIFF = RECEIPT, "lock", "reserve", "log.txt", "plan.json", "diff.patch"
SIGNATURE, CHAIN = f"{FILE}.sig", ".chain"
EVENTS = "events*.jsonl"  # each held by the ranks that write it, as long as they live
NCCL = "nccl.*"
KERNELS = "kernels.json"  # put there by whoever has a profile, see report
UNREAD = "unread"  # in the place of a hash: the disk failed when the run was sealed
OPENING = ".opening-"  # a folder whose receipt is not written yet
ARCHIVE = "archive"  # beside runs: those that nothing cites any more
RESERVED = 4 << 20  # bytes
RUN = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9_][\w.-]*-[0-9a-f]{6}", re.ASCII)
LONGEST = 20  # digits of a whole number
MOST = 1 << 20  # ranks
writing = partial(errors.writing, key="cluster.storage.receipts")
unwritable = partial(errors.unwritable, key="cluster.storage.receipts")
# Of what type the parts are that readers take apart; any of them may be missing, or null.
TYPES: tuple[tuple[str, tuple[type, ...]], ...] = (
    (
        "lineage box job recipe recipe.schedule forecast host host.topology host.topology.nics host.topology.cpus",
        (dict,),
    ),
    ("outcome outcome.nccl outcome.memory outcome.figures outcome.figures.window", (dict,)),
    ("words findings host.gpus outcome.ranks", (list,)),
    ("nonce outcome.end box.salt lineage.host lineage.family lineage.regime lineage.pool", (str,)),
    ("job.world job.nodes job.tokens_per_step job.train_steps job.stop_every job.log_interval", (int,)),
    ("forecast.peak_tflops forecast.model_flops_per_token forecast.peak_allocated_gib", (int, float)),
    ("recipe.schedule.timeout_minutes recipe.schedule.steady_timeout_seconds", (int, float)),
    ("outcome.figures.window.median_ms outcome.figures.window.tokens_per_s_per_gpu", (int, float)),
)
STATES = ("open", "sealed")
ENDS = ("completed", "failed", "refused", "interrupted", "lost")
# Written as they are: they name no machine, and readers depend on them.
OURS = ("schema", "run", "opened", "state", "lineage", "lock", "chain", "files", "box", "mends", "nonce")
# Here a text with a word that is not ours is left out whole: a person wrote it.
WHOLE = ("words", "recipe", "job", "environ")


@dataclass
class Receipt:
    """A receipt that is being written. `content` is redacted on the way to the disk."""

    folder: Path
    content: dict[str, Any]
    redactor: Redactor
    _lock: int = field(repr=False)
    _written: list[str] = field(default_factory=list, repr=False)  # seals: all that may stand there by us

    def record(self, **fields: Any) -> None:
        """Add fields and write the receipt, still open. Raises Refused where it cannot be written, or is no longer ours."""
        self.content |= fields
        self._replace(hashed(self._redacted()))

    def seal(self, end: str, outcome: Mapping[str, Any]) -> None:
        """Close the receipt for good. Raises Refused where it cannot be written, or is no longer ours."""
        with writing(self.folder):
            (self.folder / RESERVE).unlink(missing_ok=True)
            found = files(self.folder)
        with link(self.folder.parent, self.content["run"]) as chain:
            content = self._redacted() | {"files": found, "chain": chain}
            self._replace(sealed(content, end, self.redactor.tree(plain(outcome))))
        os.close(self._lock)

    def _replace(self, content: Mapping[str, Any]) -> None:
        """Write it over one that we wrote before, and over no other: a seal is for good."""
        if self._written and self._stands() not in self._written:
            hint = "nothing was overwritten; the log beside it is this run's own"
            raise Refused(f"`{self.folder / FILE}` was changed by somebody else during the run", hint=hint)
        # Before it is written: what fails after the file has its name has written it all the same.
        self._written.append(content["seal"])
        write(self.folder, content)

    def _stands(self) -> str | None:
        """The seal of what stands there; None where it is no receipt of ours. Raises Refused where the system does not say."""
        raise_if(irregular([self.folder / FILE]))  # a pipe has no end
        with writing(self.folder):
            (self.folder / FILE).read_bytes()
        with contextlib.suppress(Refused):
            return read(self.folder)["seal"]
        return None

    def _redacted(self) -> dict[str, Any]:
        return {
            k: plain(v) if k in OURS else self.redactor.tree(plain(v), whole=k in WHOLE)
            for k, v in self.content.items()
        }


def open_receipt(root: Path, preset: str, content: Mapping[str, Any], redactor: Redactor) -> Receipt:
    """A new folder below `root` with an open receipt, held by this process.

    Raises:
        Refused: the folder cannot be made, the disk is full, `preset` is no name.
    """
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{preset}-{secrets.token_hex(3)}"
    if not RUN.fullmatch(run):
        message = f"`{preset}` cannot be part of a folder's name"
        raise Refused(message, key="preset.name", hint="letters, digits, `_`, `-`, `.`")
    # Under a name of its own until there is a receipt in it, so that a kill leaves no folder that looks like a run.
    opening, folder = root / f"{OPENING}{run}", root / run
    try:
        with writing(root):
            opening.mkdir(parents=True)
            # In this order: whoever finds a receipt finds its lock held and its room reserved.
            lock = os.open(opening / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with open(opening / RESERVE, "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVED)
        head = {"schema": SCHEMA, "run": run, "opened": stamp(now), "state": "open", "lock": os.fstat(lock).st_ino}
        receipt = Receipt(opening, {**head, **content}, redactor, lock)
        receipt.record()
        with writing(root):
            os.rename(opening, folder)
            synced(root)
        receipt.folder = folder
    except Refused:
        shutil.rmtree(opening, ignore_errors=True)
        raise
    return receipt


def hashed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "seal": digest(body)}


def sealed(content: Mapping[str, Any], end: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    assert end in ENDS, end
    closed = stamp(datetime.now(UTC))
    body = {**content, "state": "sealed", "closed": closed, "outcome": {**outcome, "end": end}}
    return hashed(body)


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over everything but the seal."""
    body = {k: v for k, v in content.items() if k != "seal"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def named(word: str, root: Path) -> Path:
    """The folder or file of a run, by its path, how its name begins, or a part of it. Raises Refused: several are called so."""
    path = Path(word)
    root = path.parent if "/" in word else root
    if os.path.lexists(path) or not root.is_dir():
        return path
    every = folders(root) + folders(root / ARCHIVE)
    found = [f for f in every if f.name.startswith(path.name)] or [f for f in every if path.name in f.name]
    if len(found) > 1:
        raise Refused(f"{len(found)} runs are called `{word}...` in `{root}`", hint=quoted(f.name for f in found[-5:]))
    return found[0] if found else path


def read(path: Path) -> dict[str, Any]:
    """A receipt from its folder or file.

    Raises:
        Refused: no receipt, another schema, another run's, or one that was changed: it, or a file beside it that it has the hash of.
    """
    try:
        there = path.exists()
    except OSError as err:
        raise Refused(f"`{path}` cannot be looked at: {err.strerror}", hint="let this user read it") from None
    if not there:
        here = "" if path.is_absolute() else f" in `{Path.cwd()}`"
        message = f"there is no `{path}`{here}"
        raise Refused(message, hint="`python -m launch receipts` lists runs; name one, or its folder")
    path = path / FILE if path.is_dir() else path
    raise_if(irregular([path]))
    hint = "name a folder or file that `launch run` wrote"
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_once,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_finite,
        )
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate is no text
    except (OSError, ValueError, RecursionError) as err:
        why = err.strerror if isinstance(err, OSError) else err
        raise Refused(f"`{path}` is no receipt: {why}", hint=hint) from None
    if not isinstance(content, dict) or content.get("schema") not in (SCHEMA, FIRST):
        raise Refused(f"`{path}` is no receipt of schema `{SCHEMA}`", hint=hint)
    if content.get("state") not in STATES or not isinstance(content.get("run"), str):
        raise Refused(f"`{path}` is a damaged receipt", hint=hint)
    if wrong := misshapen(content):
        raise Refused(f"`{path}` is a damaged receipt: {quoted(wrong)} of another type or size", hint=hint)
    unsealed = content["schema"] == FIRST and content["state"] == "open"
    if not unsealed and content.get("seal") != digest(content):
        raise Refused(f"`{path}` was changed after it was sealed", hint="a receipt that was edited is no receipt")
    folder = path.absolute().parent
    if content["run"] != folder.name and not folder.name.startswith(OPENING):
        raise Refused(f"`{path}` is the receipt of `{content['run']}`", hint="it belongs into a folder of that name")
    hashes = found if isinstance(found := content.get("files"), dict) else {}
    # A file of events that came later would be read as this run's.
    come = folder.glob(EVENTS) if content["state"] == "sealed" and content["schema"] == SCHEMA else ()
    changed = [p.name for p in come if p.name not in hashes and p.is_file()]
    hashed = {name: was for name, was in hashes.items() if was != UNREAD}
    changed += [n for n, was in hashed.items() if Path(n).name != n or file_hash(folder / n) not in (None, was)]
    if changed:
        said = f"{quoted(changed)} of `{folder}` changed after the receipt was sealed"
        raise Refused(said, hint="they are not what it says")
    return content


def misshapen(content: Mapping[str, Any]) -> list[str]:
    """Keys of a receipt that hold something else than any of ours does."""
    found = ((key, types, at(content, key)) for keys, types in TYPES for key in keys.split())
    wrong = [key for key, types, value in found if value is not None and type(value) not in types]
    world, end = at(content, "job.world"), at(content, "outcome.end")
    wrong += ["job.world"] * (type(world) is int and not 0 < world <= MOST)
    return wrong + ["outcome.end"] * (content["state"] == "sealed" and end not in ENDS)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one key twice would show one value to a reader and another to the next."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _whole(digits: str) -> int:
    """A number that JSON's readers agree on: no count or size of ours has more digits."""
    if len(digits) > LONGEST:
        raise ValueError(f"a number of {len(digits)} digits stands in it")
    return int(digits)


def _finite(number: str) -> float:
    """What of JSON's numbers is one; ours has infinity and NaN as words."""
    if not math.isfinite(found := float(number)):
        raise ValueError(f"`{number}` stands in it")
    return found


def files(folder: Path) -> dict[str, str]:
    """SHA-256 of what lies beside a receipt. NCCL's files have one together: each is called after its host, as what is not ours may be."""
    found = {p.name for p in folder.iterdir() if p.is_file()}
    names = {NCCL if fnmatch(name, NCCL) else name for name in found if not (folder / name).is_symlink()}
    names &= {LOG, PLAN, DIFF, KERNELS, NCCL}
    names |= {name for name in found if fnmatch(name, EVENTS)}  # read through a link, too
    hashes = {name: file_hash(folder / name) or (UNREAD if fnmatch(name, EVENTS) else "") for name in sorted(names)}
    return {name: digits for name, digits in hashes.items() if digits}


def file_hash(path: Path) -> str | None:
    """None where there is no such file: a receipt may be published without its log. A pipe or a device is not read: it has no end."""
    if path.name == NCCL:
        every = sorted(filter(None, map(file_hash, path.parent.glob("nccl.[!*]*"))))
        return hashlib.sha256("".join(every).encode()).hexdigest() if every else None
    if path.exists() and not path.is_file():
        return "no file"
    try:
        return whole.digest(path)
    except OSError:
        return None


def folders(root: Path) -> list[Path]:
    """Folders of receipts below `root`, the oldest first; also a run's that may not be looked into. Raises Refused."""
    try:
        names = [*os.scandir(root)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as err:
        raise Refused(f"`{root}` cannot be looked into: {err.strerror}", hint="let this user read it") from None
    return sorted(Path(p) for p in names if not p.name.startswith(OPENING) and _holds_one(Path(p)))


def _holds_one(folder: Path) -> bool:
    try:
        return (folder / FILE).exists()
    except PermissionError:  # a run goes missing otherwise
        return RUN.fullmatch(folder.name) is not None


def seal_lost(root: Path, summary: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]) -> list[str]:
    """Seal the open receipts whose launcher is gone; returns their names. Those of live launchers stay as they are.

    So do those whose lock is gone or another's: nothing tells whether their launcher lives.
    summary: what came of a run, from its folder and its receipt.
    """
    for folder in root.glob(f"{OPENING}*"):
        if (lock := _taken(folder)) is not None:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)
    gone = []
    for folder in folders(root):
        with contextlib.suppress(Refused, OSError):  # one damaged or foreign receipt must not hide the others
            content = read(folder)
            if content["state"] == "open" and (lock := _taken(folder, content.get("lock"))) is not None:
                try:
                    content = read(folder)  # again: its launcher may have sealed it in between
                    if content["state"] == "open":
                        (folder / RESERVE).unlink(missing_ok=True)
                        outcome = Redactor(os.environ).tree(plain(summary(folder, content)))
                        with link(root, content["run"]) as chain:
                            more = {"schema": SCHEMA, "files": files(folder), "chain": chain}
                            write(folder, sealed(content | more, "lost", outcome))
                        gone.append(content["run"])
                finally:
                    os.close(lock)
    return gone


def held(folder: Path, content: Mapping[str, Any]) -> bool | None:
    """Whether the launcher of an open receipt lives, or a rank that it left; None where nothing tells."""
    try:
        os.close(_lock(folder, content.get("lock")))
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _taken(folder: Path, inode: int | None = None) -> int | None:
    """The folder's lock, taken; None while its launcher or a rank lives, and where the lock is gone or is not `inode`."""
    with contextlib.suppress(OSError):
        return _lock(folder, inode)
    return None


def _lock(folder: Path, inode: int | None) -> int:
    """Raises BlockingIOError while its launcher or a rank lives, another OSError where nothing tells."""
    lock = _opened(folder / LOCK)
    try:
        if inode not in (None, os.fstat(lock).st_ino):
            raise FileNotFoundError(errno.ENOENT, "another's lock", str(folder / LOCK))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for said in folder.glob(EVENTS):
            with open(_opened(said), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _opened(path: Path) -> int:
    """For a lock, which a local file system gives to who may only read, too. Raises OSError."""
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError as err:
        if err.errno not in (errno.EACCES, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


# The chain of a folder -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def link(root: Path, run: str) -> Iterator[dict[str, Any]]:
    """The place of `run` in the folder's chain: {"id", "number", "before"}; one at a time. Within, its receipt is sealed."""
    with own(root) as kept:
        if kept["pending"] and (done := _sealed_as(root, kept)):  # killed between the seal and the last line below
            kept |= {"number": kept["number"] + 1, "last": done}
        kept["pending"] = run
        _keep(root, kept)
        yield {"id": kept["id"], "number": kept["number"] + 1, "before": kept["last"]}
        kept |= {"number": kept["number"] + 1, "last": read(root / run)["seal"], "pending": None}
        _keep(root, kept)


@contextlib.contextmanager
def own(root: Path) -> Iterator[dict[str, Any]]:
    """What a folder keeps of its own, made where there is none; held against other launchers. Raises Refused."""
    with contextlib.ExitStack() as stack:
        raise_if(irregular((root / f"{CHAIN}.lock",)))
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(root / f"{CHAIN}.lock", "a", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        kept = kept_of(root)
        if kept is None:
            kept = {
                "id": secrets.token_hex(8), "salt": secrets.token_hex(16), "number": 0, "last": None, "pending": None,
            }  # fmt: skip
            _keep(root, kept)
        yield kept


def kept_of(root: Path, *, shown: bool = False) -> dict[str, Any] | None:
    """What `.chain` holds; None where there is none. Raises Refused for a damaged one.

    shown: of a folder that is only read, where one that its owner keeps to himself is as good as none.
    """
    raise_if(irregular((root / CHAIN,)))
    try:
        kept = json.loads((root / CHAIN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except PermissionError:
        if shown:
            return None
        raise Refused(f"`{root / CHAIN}` may not be read", hint="let this user read it") from None
    except (OSError, ValueError, RecursionError) as err:
        raise Refused(f"`{root / CHAIN}` cannot be read: {err}", hint="move it away: a new chain begins") from None
    types = {"id": str, "salt": str, "number": int, "last": str | None, "pending": str | None}
    if not isinstance(kept, dict) or not all(k in kept and isinstance(kept[k], kind) for k, kind in types.items()):
        raise Refused(f"`{root / CHAIN}` is damaged", hint="move it away: a new chain begins")
    return kept


def _keep(root: Path, kept: Mapping[str, Any]) -> None:
    with writing(root):
        write_whole(root / CHAIN, json.dumps(kept), mode=0o600, kept=True)


def _sealed_as(root: Path, kept: Mapping[str, Any]) -> str | None:
    """The seal of the pending run, where it got the next place."""
    with contextlib.suppress(Refused):
        found = read(root / kept["pending"])
        if found["state"] == "sealed" and place(found) == (kept["id"], kept["number"] + 1):
            return found["seal"]
    return None


def place(found: Mapping[str, Any]) -> tuple[str, int] | None:
    """(chain, number) of a sealed receipt; None where it has none."""
    chain = found.get("chain")
    if not isinstance(chain, Mapping) or type(chain.get("number")) is not int or chain["number"] < 1:
        return None
    return str(chain.get("id")), chain["number"]


def broken(root: Path, found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    """(whether it is damage, what is wrong) with the chains of the receipts `found` in `root`. Raises Refused for a damaged `.chain`.

    Receipts that were brought from another folder have its chain: what is missing there may lie at home. Or was removed, with `.chain`.
    """
    chains: dict[str, dict[int, Mapping[str, Any]]] = {}
    kept, found = kept_of(root, shown=True), list(found)
    if kept:
        chains[kept["id"]] = {}
        if kept["pending"] and kept["pending"] not in [one["run"] for one in found]:
            yield True, f"`{kept['pending']}` was about to be sealed, and is not here"
    for one in found:
        if one["schema"] == FIRST or one["state"] != "sealed":
            continue
        if (at := place(one)) is None:
            yield True, f"`{one['run']}` has no place in a chain"
            continue
        known = chains.setdefault(at[0], {})
        if at[1] in known:
            yield True, f"`{one['run']}` and `{known[at[1]]['run']}` have one place in the chain"
        known[at[1]] = one
    if chains and not kept:
        why = "may not be read by this user" if os.path.lexists(root / CHAIN) else "is not here"
        yield False, f"`{CHAIN}` {why}: whether later receipts were, cannot be told"
    for name, known in chains.items():
        mine = kept if kept is not None and name == kept["id"] else None
        home = mine is not None
        last = mine["number"] if mine else max(known)
        if mine and mine["pending"] and last + 1 in known:
            last += 1
        if absent := list(islice((n for n in range(1, last + 1) if n not in known), 10)):
            where = "removed, or damaged" if home else f"chain {name}, of another folder: removed, or never copied here"
            more = last - len(known) - len(absent)
            listed = ", ".join(map(str, absent)) + (f" and {more} more" if more > 0 else "")
            yield home, f"receipt {listed} of {last} not here ({where})"
        for number, one in sorted(known.items()):
            before = known.get(number - 1)
            if (before or number == 1) and one["chain"].get("before") != (before["seal"] if before else None):
                yield True, f"`{one['run']}` does not follow `{before['run'] if before else 'nothing'}`"
        if mine and last in known and not mine["pending"] and known[last]["seal"] != mine["last"]:
            yield True, f"`{known[last]['run']}` is not the receipt that was sealed last"
        if home and (later := [one["run"] for n, one in known.items() if n > last]):
            yield True, f"{quoted(later)} were not sealed here"


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace the receipt in one step, on the disk before this returns. Raises Refused."""
    with writing(folder):
        text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False)
        write_whole(folder / FILE, text + "\n", kept=True)


def plain(node: Any) -> Any:
    """JSON's own types; NaN and infinity as words."""
    if isinstance(node, Mapping):
        return {str(k): plain(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(v) for v in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def stamp(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"
