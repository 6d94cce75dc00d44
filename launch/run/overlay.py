"""The environment of the training processes: what the plan demands, what the launcher adds, and what the shell left lying around."""

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launch.finding import Finding
from nam_megatron import process
from nam_megatron.compile.lower import Lowering
from nam_megatron.environment import OLD_ALLOC, VALIDATED, carried
from nam_megatron.words.setting import CONNECTIONS, Env

MNNVL, VISIBLE = "NCCL_MNNVL_ENABLE", "CUDA_VISIBLE_DEVICES"
FORCED = "connections"  # the waiver of hosts that force CUDA_DEVICE_MAX_CONNECTIONS
CUDAS_DEFAULT = "8"
# Beside what every road carries: what needs the folder of a run.
OURS = (
    Env("NCCL_DEBUG", "INFO", "rank, GPU and bus as NCCL sees them, into files beside the log"),
    Env("NCCL_DEBUG_SUBSYS", "INIT,NET", "no more than that"),
)
# `python -m` would take modules from the folder that a command stands in before the installed ones that `nam` itself has.
SAFE = Env("PYTHONSAFEPATH", "1", "the modules that were checked, and none of the folder around the run")
# Where compilers and libraries would otherwise write into the home folder or the root volume.
CACHES = {
    "TMPDIR": "tmp", "TRITON_CACHE_DIR": "cache/triton", "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TORCH_EXTENSIONS_DIR": "cache/extensions", "CUDA_CACHE_PATH": "cache/cuda", "QUACK_CACHE_DIR": "cache/quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cache/flash",
}  # fmt: skip


def overlay(lowering: Lowering, scratch: Path) -> tuple[Env, ...]:
    """Every variable that the launcher sets or unsets, each with its reason. The plan's come first and win."""
    waivers, found = lowering.plan.recipe.cluster.waivers, []
    demanded = {env.name for env in lowering.env}
    caches = (Env(name, str(scratch / folder), "scratch, not home or root") for name, folder in CACHES.items())
    for env in carried(lowering, (*VALIDATED, *OURS, *((SAFE,) if process.PROGRAM else ()), *caches)):
        if env.name not in demanded:
            env = replace(env, owner="launch")
        if env.name == CONNECTIONS and env.value is None and FORCED in waivers:
            why = f"this platform forces a value ({waivers[FORCED]}); CUDA's default"
            env = replace(env, value=CUDAS_DEFAULT, why=why, owner="launch")
        found.append(env)
    return tuple(found)


def of_nccl(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that NCCL sets in its process where `environ` has them not: src/misc/param.cc of NVIDIA/nccl 2.30."""
    found: dict[str, str] = {}
    mine = environ.get("NCCL_CONF_FILE") or _home() + "/.nccl.conf"
    for path in (mine, "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                if "=" in line and not line.startswith("#"):
                    found.setdefault(*line.split("=", 1))
    return found


def _home() -> str:
    """Of this user, whatever HOME says; a container's may be nobody."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_dir
    return ""


def child(environ: Mapping[str, str], envs: tuple[Env, ...]) -> dict[str, str]:
    """`environ`, with what NCCL would add to it, and the overlay over it."""
    made = {k: v for k, v in {**of_nccl(environ), **environ}.items() if k not in {e.name for e in envs}}
    return made | {e.name: e.value for e in envs if e.value is not None}


def shown(env: Env) -> str:
    return f"{env.name}{'=' + env.value if env.value is not None else ' unset'}"


def findings(environ: Mapping[str, str], envs: tuple[Env, ...], diagnostic: str | None) -> Iterator[Finding]:
    """What the shell left lying around. Only what the plan demands fails; the launcher's own choices replace the shell's, and say so.

    Values of the shell are not quoted: one may be a secret.
    """
    bad, environ = False, {**of_nccl(environ), **environ}
    for env in envs:
        if env.name in environ and environ[env.name] != env.value:
            if env.owner != "launch" or env.name == OLD_ALLOC:
                bad = True
                name = FORCED if env.name == CONNECTIONS else "environment"
                said = f"this shell has another {env.name}; the run has {shown(env)}: {env.why}"
                yield Finding(name, "fail", said, f"unset {env.name}")
            else:
                yield Finding("environment", "note", f"replaces this shell's {env.name}: {shown(env)} ({env.why})")
    if VISIBLE in environ and not diagnostic:
        bad = True
        hint = f"unset {VISIBLE}; only a diagnostic run may have it: `diagnostic=WHY`"
        yield Finding("environment", "fail", f"{VISIBLE} is set: ranks would not be the host's GPUs in order", hint)
    if MNNVL in environ and not (diagnostic and environ[MNNVL] in ("0", "2")):
        bad = True
        hint = f"unset {MNNVL}; in a diagnostic run (`diagnostic=WHY`) it may be 0 or 2"
        yield Finding("environment", "fail", f"{MNNVL} is set", hint)
    if not bad:
        yield Finding("environment", "ok", f"overlay: {', '.join(map(shown, envs))}")
