"""Which host this is, without saying its name: the same box has the same id in every receipt of a folder.

GPUs are known by the hash of their UUIDs, 128 random bits that nobody guesses from it. A host's name can be guessed, so its hash has
the salt of the receipts folder in it, which is never published; without GPUs it is all there is.
"""

import hashlib
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.host.bounded import ask
from launch.record import receipt
from nam_megatron.errors import Refused
from nam_megatron.words.whole import write_whole

WORDS = ("nvidia-smi", "-L")
UUID = re.compile(r"\(UUID: (GPU-[0-9a-fA-F-]{36})\)")
SECONDS = 15
HOSTS = ".hosts"  # in a folder of receipts, beside its chain: {name: whose it is}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", re.ASCII)


def box(root: Path, environ: Mapping[str, str]) -> dict[str, str | None]:
    """{"gpus": hash of this host's GPUs, None without any; "host": hash of its name, "salt": whose}. Raises Refused.

    root: the receipts folder.
    """
    with receipt.own(root) as kept:
        salt = kept["salt"]
    answer = ask(WORDS, SECONDS, environ)
    uuids = sorted(UUID.findall(answer.out)) if answer.ok else []
    return {
        "gpus": _hash(*uuids) if uuids else None,
        "host": _hash(salt, socket.gethostname()),
        "salt": _hash(salt, "id"),
    }


def named(root: Path, found: Mapping[str, str | None], asked: str | None) -> str | None:
    """What this box is called in a folder of receipts: by the name that it gets once, `host=NAME`; None while it has none.

    found: of `box`. Raises Refused where another box answers to that name, or this one to another.
    """
    with receipt.own(root):
        names, here = hosts(root), str(found["gpus"] or found["host"])
        mine = next((name for name, whose in names.items() if whose == here), None)
        if asked is None or asked == mine:
            return mine
        if not NAME.fullmatch(asked):
            message = f"`{asked}` is no name of a host"
            raise Refused(message, key="host", hint="letters, digits, `.`, `_` and `-`, at most 40")
        if mine:
            raise Refused(f"this host is called `{mine}`", key="host", hint=f"`host={mine}`, or leave it out")
        if asked in names:
            hint = f"another name; where that host's GPUs were replaced, take its line out of `{root / HOSTS}`"
            raise Refused(f"another host is called `{asked}`", key="host", hint=hint)
        with receipt.writing(root):
            write_whole(root / HOSTS, json.dumps(names | {asked: here}, indent=1) + "\n")
        return asked


def hosts(root: Path) -> dict[str, str]:
    """{name: hash} of the boxes that have one. Raises Refused for a file that is damaged."""
    try:
        found = json.loads((root / HOSTS).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(whose, str) for whose in found.values()):
            raise ValueError("it is no table of names")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as err:
        hint = "move it away: hosts get their names anew"
        raise Refused(f"`{root / HOSTS}` cannot be read: {err}", key="host", hint=hint) from None


def of(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The id of the box of a receipt; None where it names none, as those of version 1.

    Of several nodes the launcher sees one: then the ranks' own GPUs are the box.
    """
    found, job = content.get("box"), content.get("job")
    if isinstance(job, Mapping) and type(job.get("nodes")) is int and job["nodes"] > 1:
        outcome = content.get("outcome")
        ranks = outcome.get("ranks") if isinstance(outcome, Mapping) else None
        told = [r.get("uuid") for r in ranks if isinstance(r, Mapping)] if isinstance(ranks, list) else []
        ids = [one for one in told if isinstance(one, str)]
        if len(ids) != job.get("world"):
            return None
        return "gpus", _hash(*sorted(ids))
    if not isinstance(found, Mapping):
        return None
    if isinstance(found.get("gpus"), str):
        return "gpus", found["gpus"]
    if isinstance(found.get("host"), str) and isinstance(found.get("salt"), str):
        return "host", found["salt"], found["host"]
    return None


def called(content: Mapping[str, Any]) -> str:
    """The box of a receipt that names one: by its name, else by its hash."""
    found, known = content.get("box"), of(content)
    name = found.get("name") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else known[-1] if known else "unknown"


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
