"""The software of a training host: locked in stack.toml, compared with what is installed, and asked what it was built for."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import site
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from launch.finding import Finding
from launch.host import patch, patches
from launch.host.bounded import ask
from nam_megatron import packages
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import OK, Problem, Refused, raise_if
from nam_megatron.events import PACKAGE
from nam_megatron.launcher import BESIDE, PROGRAM
from nam_megatron.words.setting import STOCK
from nam_megatron.words.tree import stale

LOCK = Path(__file__).parent / "stack.toml"
PROBE = Path(__file__).parent / "probe.py"
SOURCES = ("wheel", "build", "torch")
ALSO = (
    "nvidia-cublas",
    "flash-attn",
    packages.FLASH,
    *packages.QUACK,
    "numpy",
    "nvidia-ml-py",
    "hydra-core",
    "omegaconf",
    "pydantic",
)  # recorded, not locked
EXTRAS = {"flash": packages.FLASH_PACKAGES, "quack": packages.QUACK}  # beside the lock; the first has the second
BUILD = ("setuptools", "wheel", "packaging", "ninja", "cmake", "pybind11")
NCCL = "python -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + \"/include\")'"
ACTIVE = "# into the environment that is active where this runs; `stack disk=/DIR` makes one of its own, /DIR/venv"
INTO = (
    "python -c 'import pip, sys; print(\"installs into\", sys.prefix)'"
    " || { echo 'error: the active environment has no pip: `python -m venv DIR` makes one that has' >&2; exit 1; }"
)
SECONDS = 44  # for one import, cold, beside others
STEPS = "`python -m launch stack` prints how it is installed"


@dataclass(frozen=True)
class Package:
    """One line of the lock; stack.toml says what each field means."""

    name: str
    version: str
    source: str
    module: str | None = None
    env: str = ""
    alone: bool = False
    with_: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lock:
    """gcc_below: the first GCC that CUDA's compiler does not take. left_out: {package: why it is none of the stack}."""

    torch_cuda: str
    packages: tuple[Package, ...]
    gcc_below: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def torch(self) -> Package:
        return self.packages[0]


def load(path: Path = LOCK) -> Lock:
    """Raises Refused for a file that is no lock."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        cuda, packages = tree["torch_cuda"], tuple(map(_package, tree["package"]))
        if not packages or packages[0].name != "torch":
            raise ValueError("the first package must be torch: all others are built against it")
        if bad := [p.name for p in packages if p.source not in SOURCES]:
            raise ValueError(f"the source of {bad[0]} is none of {', '.join(SOURCES)}")
        if bad := [v for p in packages for v in (p.name, p.version, p.env, cuda) if not isinstance(v, str)]:
            raise ValueError(f"{bad[0]!r} stands where a word should")
        left_out, gcc = tree.get("left_out", {}), tree.get("gcc_below")
        if not isinstance(left_out, dict) or not all(isinstance(why, str) for why in left_out.values()):
            raise ValueError("`left_out` is no table of reasons")
        if gcc is not None and type(gcc) is not int:
            raise ValueError(f"{gcc!r} stands where a version of GCC should")
        return Lock(cuda, packages, gcc, left_out)
    except OSError as err:
        why = err.strerror
    except KeyError as err:
        why = f"it has no `{err.args[0]}`"
    except (ValueError, TypeError) as err:
        why = str(err)
    raise Refused(f"`{path}` is no lock file: {why}", key="lock", hint=f"see launch/{LOCK.name}")


def _package(entry: Mapping[str, Any]) -> Package:
    """Raises KeyError or ValueError for an entry that is no package."""
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} stands where a package should")
    named = {"name": entry["name"], "version": entry["version"], "source": entry["source"]}
    more = {k: v for k, v in entry.items() if k not in named and k != "with"}
    if unknown := more.keys() - {f.name for f in fields(Package)}:
        raise ValueError(f"a package has no `{min(unknown)}`")
    return Package(**named, **more, with_=tuple(entry.get("with", ())))


def versions(lock: Lock) -> dict[str, str | None]:
    """Installed versions by package, from their metadata: nothing is imported."""
    names = (*(p.name for p in lock.packages), *ALSO)
    known = {name: packages.installed(name) for name in names}
    return {"python": sys.version.split()[0], "startup": startup(), **known}


def startup() -> str | None:
    """A hash of the code that Python runs by itself at its start: what `.pth` files say beside folders, the modules that they name,
    sitecustomize and usercustomize; None where there is none. It may change whatever is trained, and no package's version tells.
    """
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else ())]
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.pth"))]
    lines = [line for path in files for line in _content(path).decode(errors="replace").splitlines()]
    run = [line for line in lines if line.startswith(("import ", "import\t"))]
    # `a.b.go` names `a` and `a.b`.
    words = [name.split(".") for name in re.findall(r"\w+(?:\.\w+)*", " ".join(run))]
    names = {"sitecustomize", "usercustomize", *(name for word in words for name in accumulate(word, "{}.{}".format))}
    modules = [getattr(sys.modules[name], "__file__", None) for name in sorted(names & sys.modules.keys())]
    texts = [*(line.encode() for line in run), *(text for file in modules if file and (text := _content(Path(file))))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16] if texts else None


def _content(path: Path) -> bytes:
    """Nothing of what cannot be read: Python passes over it, too."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def probe(lock: Lock, environ: Mapping[str, str], seconds: float = SECONDS) -> dict[str, dict[str, Any]]:
    """{module: what came of importing it}, each in a process of its own: one that crashes or hangs takes no other along."""
    modules = [p.module for p in lock.packages if p.module]
    with ThreadPoolExecutor(len(modules)) as pool:
        return dict(zip(modules, pool.map(lambda m: probed(m, environ, seconds), modules), strict=True))


def probed(module: str, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    # -P: without it launch/ would be searched first, and launch/run/inspect.py found for Python's own.
    answer = ask([sys.executable, "-P", str(PROBE), module], seconds, environ)
    try:
        said = json.loads(answer.out.splitlines()[-1])
        return said if isinstance(said, dict) else {"error": "the import printed nonsense"}
    except (ValueError, IndexError):
        return {"error": answer.failure}


def findings(
    lock: Lock, installed: Mapping[str, str | None], imported: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """torch first: whatever replaced it explains the rest."""
    said = imported.get("torch", {})
    torch, found = lock.torch, installed.get("torch")
    if found is None or found.partition("+")[0] != torch.version:
        hint = f"something replaced it; {STEPS}" if found else STEPS
        yield Finding("torch", "fail", f"torch is {found or 'not installed'}, and the lock says {torch.version}", hint)
    elif "error" in said or "torch" not in said:
        yield Finding("torch", "fail", f"torch cannot be imported: {said.get('error')}", STEPS)
    elif said.get("cuda") != lock.torch_cuda:
        what = f"torch {said['torch']} is built for CUDA {said.get('cuda')}, and the lock says {lock.torch_cuda}"
        yield Finding("torch", "fail", what, f"something replaced it; {STEPS}")
    else:
        yield Finding(
            "torch", "ok", ", ".join(f"{k} {said.get(k)}" for k in ("torch", "cuda", "cudnn", "nccl", "triton"))
        )
    wrong = [p for p in lock.packages[1:] if (installed.get(p.name) or "").partition("+")[0] != p.version]
    for p in wrong:
        what = f"{p.name} is {installed.get(p.name) or 'not installed'}, and the lock says {p.version}"
        yield Finding("lock", "fail", what, STEPS)
    if not wrong:
        yield Finding("lock", "ok", f"{len(lock.packages)} packages as locked")
    extensions = {p.module: p for p in lock.packages[1:] if p.module}
    broken = {m: imported.get(m, {}).get("error", "not tried") for m in extensions if not imported.get(m, {}).get("ok")}
    for module, why in broken.items():
        package = extensions[module]
        hint = f"built for another torch: build it again; {STEPS}" if _foreign(why) else STEPS
        yield Finding("extensions", "fail", f"{package.name}: `import {module}` fails: {why}", hint)
    if not broken:
        yield Finding("extensions", "ok", f"{len(extensions)} packages load beside this torch")


def asked(plan: Plan, installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """What the plan's own keys need beside the lock. installed: as `versions` has it."""
    needed = {need.name: need.what for need in plan.packages if need.of != STOCK}
    found: Iterable[Problem] = ()
    if packages.FLASH in needed:
        found = packages.without_flash(installed.get)  # QuACK's among them
    elif packages.QUACK.keys() & needed:
        found = packages.without_quack(installed.get)
    for problem in found:
        yield Finding("lock", "fail", problem.message, problem.hint or "")
    for name, what in needed.items():
        if name not in (*installed, *packages.FLASH_PACKAGES) and not (
            packages.installed(name) or importlib.util.find_spec(name.replace("-", "_"))
        ):
            said = f"{name} is not installed, and {what} needs it"
            yield Finding("lock", "fail", said, f"`{packages.PIP} install {name}`")


def _foreign(why: str) -> bool:
    """Whether an import failed for want of what another torch, CUDA or compiler has."""
    return any(
        word in why for word in ("undefined symbol", "cannot open shared object", "version `GLIBCXX", "libc10", "ABI")
    )


def bytecode(root: Path = PACKAGE.parent, packages: Sequence[str] = (PACKAGE.name,)) -> Iterator[Finding]:
    """Whether Python would run the code whose hash a receipt has."""
    if found := stale(root, *packages):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        said = f"`{found[0]}`{more} changed without a new time: Python would run what it had compiled before"
        hint = f"`touch` it, or remove each `__pycache__` below `{root / found[0].parts[0]}`"
        yield Finding("bytecode", "fail", said, hint)


def bytecode_of_megatron() -> Iterator[Finding]:
    """The same of Megatron's, which takes seconds where an installer has linked its files: they may all have changed since."""
    with contextlib.suppress(Refused):  # `megatron` says it
        queue = patches.find("megatron-core")
        yield from bytecode(patches.installed(queue), queue.packages)


def megatron() -> tuple[Finding, str | None]:
    """Which Megatron would be imported, by the hash of its files; and its state: pristine, patched, foreign."""
    try:
        queue = patches.find("megatron-core")
        root = patches.installed(queue)
        state = queue.state(root)
        unfinished = patch.cut_off(queue, root)
    except (Refused, OSError) as err:
        return Finding("patches", "fail", f"which Megatron this is cannot be told: {err}", STEPS), None
    if unfinished:
        what = "`patch apply` was cut off here, and the installed Megatron is neither pristine nor patched"
        return Finding("patches", "fail", what, patch.FINISH.format(project=queue.project)), state
    if state == "foreign":
        what = f"the installed Megatron is neither {queue.name} nor our patched one"
        return Finding("patches", "fail", what, patch.REMEDY[state]), state
    said = (
        "is patched"
        if state == "patched"
        else "is pristine: `python -m launch patch apply megatron-core` would patch it"
    )
    return Finding("patches", "ok" if state == "patched" else "note", f"{queue.name} {said}"), state


def steps(lock: Lock, wheels: Path | None = None, disk: Path | None = None, also: Sequence[str] = ()) -> str:
    """Shell commands that install the lock, in its order: a script that stops at the first one that fails.

    wheels: a folder that keeps what is built, for hosts of one image: what lies there is not built again. disk: a folder on the data disk
    that gets the environment, its caches and the folders of runs. also: of EXTRAS.
    """
    torch = f"{lock.torch.name}=={lock.torch.version}"
    abi = f'import torch; assert torch.version.cuda == "{lock.torch_cuda}", torch.version.cuda'
    text = [
        "set -eu",
        f"# Python {sys.version_info[0]}.{sys.version_info[1]}, CUDA {lock.torch_cuda}",
        *(layout(disk) if disk else (ACTIVE,)),
        INTO,
        "# what is built below needs a compiler and the CUDA toolkit",
        'for tool in gcc g++ nvcc; do command -v $tool > /dev/null || { echo "error: no $tool" >&2; exit 1; }; done',
        f"nvcc --version | grep -q 'release {lock.torch_cuda},' || {{ echo 'error: nvcc is not of CUDA {lock.torch_cuda}' >&2; exit 1; }}",
        *compiler(lock),
        "# torch is named in every step: pip then refuses to replace it",
        f"pip install {torch}",
        f"python -c '{abi}'",
        "# this project's own packages, and what builds without isolation need",
        shlex.join(["pip", "install", torch, *requirements(), *BUILD]),
        "# the headers of the NCCL that torch brings, and a look whether the compiler finds them",
        f'export CPATH="$({NCCL}):${{CUDA_HOME:-/usr/local/cuda}}/include${{CPATH:+:$CPATH}}"',
        "printf '#include <cuda_runtime.h>\\n#include <nccl.h>\\n' | g++ -x c++ -E - > /dev/null",
    ]
    kept = wheels / f"torch{lock.torch.version}-cu{lock.torch_cuda}" if wheels else None
    for p in lock.packages[1:]:
        text += installing(p, torch, kept) if p.source != "torch" else ()
    for name in EXTRAS:
        asked = [f"{package}=={version}" for package, version in EXTRAS[name].items()]
        said = shlex.join(["pip", "install", torch, *(a.replace("-dsl==", "-dsl[cu13]==") for a in asked)])
        text.append(said if name in also else f"# `stack also={name}`: {said}")
    modules = ", ".join(p.module for p in lock.packages[1:] if p.module)
    last = f'{abi}; import {modules}; assert torch.__version__.partition("+")[0] == "{lock.torch.version}", torch.__version__'
    text += ["# whatever came since: the same torch, and all that was built loads beside it", f"python -c '{last}'"]
    text += [f"# left out: {name}: {why}" for name, why in lock.left_out.items()]
    return "\n".join([*text, f"{PROGRAM} patch apply megatron-core"]) + "\n"


def installing(p: Package, torch: str, kept: Path | None) -> Iterator[str]:
    """The lines for one package. kept: the folder of wheels, of this torch."""
    before = [p.env] if p.env else []
    build = f"--no-build-isolation --no-binary {p.name} " if p.source == "build" else ""
    if p.alone and p.with_:
        yield " ".join(["pip install", torch, *p.with_])
    rest = "--no-deps" if p.alone else torch
    if build and kept:
        folder = shlex.quote(f"{kept}-") + '"$(uname -m)"'  # what is built serves one torch, CUDA and machine
        wheel = f"{folder}/{p.name.replace('-', '_')}-{p.version}[-+]*.whl"
        made = " ".join([*before, f"pip wheel --no-deps {build}-w {folder} {p.name}=={p.version}"])
        yield f"ls {wheel} > /dev/null 2>&1 || {made}"
        yield f"pip install {rest} {wheel}"
    else:
        yield " ".join([*before, f"pip install {build}{rest} {p.name}=={p.version}"])


def compiler(lock: Lock) -> Iterator[str]:
    """The host's GCC, said, and whether CUDA takes it."""
    yield 'gcc=$(gcc -dumpfullversion); echo "gcc $gcc"'
    if lock.gcc_below:
        error = f"error: CUDA {lock.torch_cuda} takes no GCC from {lock.gcc_below} on"
        yield f"[ \"${{gcc%%.*}}\" -lt {lock.gcc_below} ] || {{ echo '{error}' >&2; exit 1; }}"


def layout(disk: Path) -> Iterator[str]:
    """Everything that grows lies on the data disk: the environment and both installers' caches, and what cluster files call /durable and
    /scratch, as links where nothing of that name is there.
    """
    at = shlex.quote(str(disk))
    yield "# everything that grows lies on the data disk; `launch check` says so of each: venv, root-volume"
    yield f"mkdir -p {at}/durable {at}/scratch/tmp {at}/cache/uv {at}/cache/pip"
    yield f"for name in durable scratch; do [ -e /$name ] || ln -s {at}/$name /$name; done"
    yield f"export UV_CACHE_DIR={at}/cache/uv PIP_CACHE_DIR={at}/cache/pip TMPDIR={at}/scratch/tmp UV_PROJECT_ENVIRONMENT={at}/venv"
    yield f"[ -d {at}/venv ] || python -m venv {at}/venv"
    yield f". {at}/venv/bin/activate"


def requirements() -> list[str]:
    """What this project itself needs, `launch` included."""
    if BESIDE.is_dir():
        return [said for said in importlib.metadata.requires("nam_megatron") or () if "extra ==" not in said]
    return tomllib.loads((LOCK.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def command(names: Sequence[str], options: Mapping[str, str]) -> int:
    """python -m launch stack [lock=FILE] [wheels=FOLDER] [disk=FOLDER] [also=flash,quack]"""
    if names:
        raise Refused("`stack` takes no names", hint=(command.__doc__ or "").strip())
    folders = {key: Path(options[key]) for key in ("wheels", "disk") if key in options}
    also = tuple(filter(None, options.get("also", "").split(",")))
    raise_if(
        [
            *(
                Problem(f"`{p}` is no absolute path", key=key, hint=f"`{key}=/...`")
                for key, p in folders.items()
                if not p.is_absolute()
            ),
            *(
                Problem(f"`{name}` is no extra of the stack", key="also", hint=f"there are: {', '.join(EXTRAS)}")
                for name in also
                if name not in EXTRAS
            ),
        ]
    )
    sys.stdout.write(steps(load(Path(options["lock"]) if "lock" in options else LOCK), also=also, **folders))
    return OK
