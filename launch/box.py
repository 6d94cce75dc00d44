"""Which host this is, without saying its name: the same box has the same id in every receipt of a folder.

GPUs are known by the hash of their UUIDs, 128 random bits that nobody guesses from it. A host's name can be guessed, so its hash has
the salt of the receipts folder in it, which is never published; without GPUs it is all there is.
"""

import hashlib
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import receipt
from launch.bounded import ask

WORDS = ("nvidia-smi", "-L")
UUID = re.compile(r"\(UUID: (GPU-[0-9a-fA-F-]{36})\)")
SECONDS = 15


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


def of(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The id of the box of a receipt; None where it names none, as those of version 1.

    Of several nodes the launcher sees one: then the ranks' own GPUs are the box.
    """
    found, job = content.get("box"), content.get("job")
    if isinstance(job, Mapping) and type(job.get("nodes")) is int and job["nodes"] > 1:
        outcome = content.get("outcome")
        ranks = outcome.get("ranks") if isinstance(outcome, Mapping) else None
        ids = [r.get("uuid") for r in ranks if isinstance(r, Mapping)] if isinstance(ranks, list) else []
        if len(ids) != job.get("world") or not all(isinstance(one, str) for one in ids):
            return None
        return "gpus", _hash(*sorted(ids))
    if not isinstance(found, Mapping):
        return None
    if isinstance(found.get("gpus"), str):
        return "gpus", found["gpus"]
    if isinstance(found.get("host"), str) and isinstance(found.get("salt"), str):
        return "host", found["salt"], found["host"]
    return None


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
