"""Signatures of sealed receipts by `ssh-keygen -Y`: what a hash without a key cannot prove.

`launch run ... sign=KEY` signs what it seals, `launch receipts DIR signers=FILE` checks: FILE is an allowed-signers file of ssh-keygen(1).
A signature holds for its receipt, the files it has hashes of, and by the chain for all that were sealed before it.
"""

import subprocess
from pathlib import Path

from launch.record.receipt import FILE, SIGNATURE
from nam_megatron.errors import Problem, Refused
from nam_megatron.words.regular import kind

PURPOSE = "nam_megatron.receipt"  # ssh-keygen's namespace: a signature for another purpose is none
SECONDS = 60  # a key on a token may ask for a touch


def key_objections(key: object) -> Problem | None:
    """Why `key` cannot sign, told before a run and not after it."""
    if key is not None and not Path(str(key)).is_file():
        message = f"no key `{key}`"
        return Problem(message, key="sign", hint="the path of a private key, or of a public one whose agent is there")
    return None


def sign(folder: Path, key: str) -> None:
    """Write the signature beside a sealed receipt. Raises Refused."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    done = _keygen("sign", "-f", key, "-n", PURPOSE, str(folder / FILE))
    if done.returncode or not (folder / SIGNATURE).is_file():
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Refused(f"`{folder / FILE}` is sealed and not signed: {said}", key="sign", hint="ssh-keygen said so")


def signer(folder: Path, signers: Path) -> str | None:
    """Who of `signers` signed the receipt as it lies there; None for nobody. Raises Refused where ssh-keygen cannot be asked."""
    if not signers.is_file():
        message = f"no file of allowed signers `{signers}`"
        raise Refused(message, key="signers", hint="see ALLOWED SIGNERS in ssh-keygen(1)")
    if kind(folder / SIGNATURE):  # a pipe, which would be waited for
        return None
    signature = str(folder / SIGNATURE)
    found = _keygen("find-principals", "-s", signature, "-f", str(signers))
    content = (folder / FILE).read_bytes()
    for name in found.stdout.decode(errors="replace").splitlines() if not found.returncode else ():
        words = ("-f", str(signers), "-I", name, "-n", PURPOSE, "-s", signature)
        if not _keygen("verify", *words, said=content).returncode:
            return name
    return None


def _keygen(what: str, *words: str, said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = ["ssh-keygen", "-Y", what, *words]
    try:
        return subprocess.run(command, input=said, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Refused(f"`ssh-keygen -Y {what}` cannot be run: {err}", hint="OpenSSH 8.2 or newer") from None
