"""What may stand in a receipt: no secrets, no host names, no addresses, no paths of this machine."""

import hashlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# A variable is secret by a word of its name (`AWS_SECRET_ACCESS_KEY`) or by its name's end (`HFTOKEN`).
SECRET_WORD = re.compile(
    r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PW|CREDENTIALS?|AUTH|COOKIE|DSN|PAT|JWT|BEARER|NETRC)(_|$)"
    r"|(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$",
    re.IGNORECASE,
)
# Secrets by their shape, wherever they come from.
SECRET_SHAPE = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)"
)
IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
# Variables that are recorded: those of the software that trains, and no others.
RECORDED = re.compile(
    r"^(NCCL|TORCH|TORCHINDUCTOR|TORCHELASTIC|PYTORCH|CUDA|CUBLAS|CUDNN|NVTE|NVIDIA|TRITON|OMP|MKL|UCX|GLOO|NVSHMEM|TOKENIZERS)(_|$)"
)
# Two parts at least, and no `https://`. What a shell or Python quotes a path with ends it.
PART = r"[^\s/'\"`:,;=()\[\]{}<>|]+"
ABSOLUTE = re.compile(rf"(?<![\w.<>/-])(?!(?<=:)//)/+(?!(?:proc|sys|dev)/){PART}(?:/{PART})+/?")
FILE_URL = re.compile(r"(?<=file:)//+(?=[^\s/])")
IPV4 = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.])")
PRIVATE = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"))
)
NAME = re.compile(r"[\w.-]{1,64}")
# A shorter value is not looked for in texts: it would be found everywhere. Characters, and digits where there is nothing else.
SHORT, SHORT_NUMBER = 4, 8
WORDS = {"true", "false", "none", "null", "auto"}
MARK, HOST, ADDRESS = "<secret>", "<host>", "<address>"


class Redactor:
    """Takes secrets, hosts, addresses and paths out of text.

    environ: whose secret values are looked for everywhere. places: name -> folders that it stands for. hosts: more names than this
    host's own.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        places: Mapping[str, Iterable[Path]] | None = None,
        hosts: Iterable[str] = (),
    ):
        values = {v for k, v in environ.items() if SECRET_WORD.search(k)}
        values |= {line.strip() for v in values for line in v.splitlines()}
        self._secrets = sorted(filter(telling, values), key=len, reverse=True)
        found = {
            str(p): name for name, paths in (places or {}).items() for path in paths for p in (path, path.resolve())
        }
        # The longest first, so that a folder inside another one keeps its own name; `/x` alone would be found everywhere.
        self._places = sorted(((p, n) for p, n in found.items() if len(p) > 3), key=lambda pn: -len(pn[0]))
        names = {socket.gethostname(), *hosts}
        names |= {name.split(".")[0] for name in names}
        known = sorted((n for n in names if len(n) > 2 and n != "localhost"), key=len, reverse=True)
        # With the domain that may follow: `node1.cluster.example`.
        self._hosts = (
            re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, known))})(?:\.[\w-]+)*(?![\w-])") if known else None
        )

    def secrets(self, text: str) -> str:
        """`text` without secrets; hosts and paths stay."""
        for value in self._secrets:
            text = text.replace(value, MARK)
        return SECRET_SHAPE.sub(MARK, IN_URL.sub(f"{MARK}@", text))

    def text(self, text: str) -> str:
        """`text` without anything that names this machine."""
        text = self.secrets(text)
        for path, name in self._places:
            text = re.sub(re.escape(path) + r"(?![\w.-])", name, text)
        text = ABSOLUTE.sub(_unnamed, FILE_URL.sub(" /", text))
        text = IPV4.sub(_address, text)
        return self._hosts.sub(HOST, text) if self._hosts else text

    def tree(self, node: Any) -> Any:
        """The same for every text in plain data. Keys that are names stay: they are ours, or those of variables and packages."""
        if isinstance(node, str):
            return self.text(node)
        if isinstance(node, Mapping):
            return {k if NAME.fullmatch(k) else self.text(k): self.tree(v) for k, v in node.items()}
        return [self.tree(v) for v in node] if isinstance(node, (list, tuple)) else node

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that a receipt records."""
        kept = {k: v for k, v in sorted(environ.items()) if RECORDED.search(k)}
        return {k: MARK if SECRET_WORD.search(k) else self.text(v) for k, v in kept.items()}


def telling(value: str) -> bool:
    """Whether a secret can be told from ordinary text."""
    return len(value) >= (SHORT_NUMBER if value.isdecimal() else SHORT) and value.lower() not in WORDS


def _unnamed(found: re.Match[str]) -> str:
    """A path as a mark by which two receipts can tell whether it was the same one."""
    return f"<path {hashlib.sha256(found[0].rstrip('/').encode()).hexdigest()[:8]}>"


def _address(found: re.Match[str]) -> str:
    """A private address, or one with a port; any other four numbers are more likely a version."""
    try:
        address = ipaddress.IPv4Address(found[1])
    except ValueError:
        return found[0]
    port = found.string[found.end() : found.end() + 2]
    hidden = any(address in network for network in PRIVATE) or (re.match(r":\d", port) and not address.is_loopback)
    return ADDRESS if hidden else found[0]
